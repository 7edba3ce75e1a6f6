"""Sites that share a folder and train nothing, and a storage with bad manners."""

import asyncio
import contextlib
import functools
import hashlib
import pathlib
import threading
import time
import zlib
from concurrent import futures

import jax.numpy as jnp
import numpy as np
from conftest import tiny_config, update

from diloco.algorithm.state import OuterState
from diloco.config import resolve
from diloco.contrib.sites import outer_state
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.group.journal import Closed
from diloco.contrib.sites.group.link import Link
from diloco.contrib.sites.group.rounds import Measured
from diloco.util.storage import Folder, Storage

LONG = 60.0  # Seconds after which a test gives up.
BEATS = 200  # Sites of tests show often that they are there.


def make_calendar(sites: int = 3, steps: int = 40, **fields) -> Calendar:
  """Makes a run of some sites; `fields` are those of `sites.`."""
  c = tiny_config()
  c.replicas, c.train.batch_size, c.overlap.transport = sites, 2 * sites, "sites"
  fields = {"grace_s": LONG, "least_grace_s": LONG} | fields
  own = {f"sites.{name}": x for name, x in fields.items()}
  update(c, {"train.steps": steps, **own})
  return Calendar(resolve(c))


@functools.cache
def payload(calendar: Calendar, site: int, number: int) -> bytes:
  size = calendar.payload_bytes(number)
  return np.random.default_rng((site, number)).bytes(size)


def fields_of(calendar: Calendar, site: int, number: int) -> dict:
  """What a site says of its payload."""
  per_step = calendar.config.tokens_per_step // calendar.config.replicas
  at = [calendar.rounds[number][0], {"documents": 9, "position": {"at": number}}]
  data = dict.fromkeys(calendar.shards_of(site), at)
  return {"tokens": per_step, "per_step": per_step, "data": data}


def closed_round(calendar: Calendar, number: int, payloads: dict[int, bytes]) -> Closed:
  """A round in which the payloads of these sites count."""
  step, fragment = calendar.rounds[number]
  said = {site: fields_of(calendar, site, number) for site in payloads}
  return Closed(
    round=number,
    fragment=fragment,
    step=step,
    tokens={site: x["tokens"] for site, x in said.items()},
    payloads=payloads,
    per_step={site: x["per_step"] for site, x in said.items()},
    data={shard: at for x in said.values() for shard, at in x["data"].items()},
  )


def after(state: int, payloads: dict[int, bytes]) -> int:
  """Returns the outer state after one more round."""
  for site, data in payloads.items():
    state = zlib.crc32(data, zlib.crc32(bytes([site]), state))
  return state


class Brisk(Folder):
  """A folder that is looked at often."""

  poll_s = 0.01


class Late(Brisk):
  """Shows new files late, in another order, in parts at first, and lists some twice."""

  def __init__(self, root: pathlib.Path, seed: int = 0):
    super().__init__(root)
    self._seed, self._seen = seed, dict[tuple[str, bytes], int]()
    self._old = dict[str, bytes]()
    self.halves = 0

  def get(self, name: str) -> bytes | None:
    found = super().get(name)
    if found is None:
      return None
    # How often this version has been read, and how often it must be.
    version = (name, hashlib.md5(found).digest())
    looks = self._seen[version] = self._seen.get(version, -1) + 1
    wanted = hashlib.md5(f"{self._seed} {version}".encode()).digest()[0] % 6
    if looks < wanted:
      return self._old.get(name)  # As a cache would answer.
    if looks == wanted:
      self.halves += 1
      return found[: len(found) // 2]
    self._old[name] = found
    return found

  def names(self, folder: str) -> list[str]:
    found = super().names(folder)
    return found[: len(found) // 2] + found[::-1]


class Mortal(Link):
  """A link that can be killed."""

  async def _main(self) -> None:
    self.loop, self.task = asyncio.get_running_loop(), asyncio.current_task()
    with contextlib.suppress(asyncio.CancelledError):
      await super()._main()

  def kill(self) -> None:
    """Ends the thread without a farewell, as if the process was killed."""
    self.loop.call_soon_threadsafe(self.task.cancel)
    self._thread.join(10)
    assert not self._thread.is_alive()


class Player:
  """A site that trains nothing; its outer state is a number for each fragment."""

  def __init__(
    self, calendar: Calendar, storage: Storage, site: int, state: dict | None = None
  ):
    self.calendar, self.site, self.said = calendar, site, []
    self.bad = set[tuple[int, int]]()  # Pairs (site, round).
    show = self.said.append
    self.link = Mortal(storage, "PATH", calendar, site, self.measure, show)
    self.applied, self.numbers = 0, [0] * calendar.fragments
    self.members, self.refused = {}, {}
    vars(self).update(state or {})

  def measure(self, number: int, payloads: dict[int, bytes]) -> dict[int, Measured]:
    """Random bytes may be any numbers; the tests say which ones are bad."""
    bad = Measured(None)
    return {k: bad if (k, number) in self.bad else Measured(1.0) for k in payloads}

  @property
  def outer(self) -> OuterState:
    theta = tuple(jnp.uint32(x) for x in self.numbers)
    return OuterState(theta, theta, (), {})

  def offer(self) -> None:
    make = lambda: (outer_state.digests(self.outer), outer_state.to_bytes(self.outer))
    self.link.offer(self.applied, make)

  def join(self) -> "Player":
    digests = outer_state.digests(self.outer)
    stay = lambda: False
    self.welcome = in_time(lambda: self.link.join(self.applied, digests, stay))
    self.take(self.welcome)
    if not self.welcome.snapshot:
      self.offer()
    self.link.ready(self.link.newest()[1])
    return self

  def take(self, welcome) -> None:
    self.applied = welcome.round
    if welcome.snapshot:
      numbers = np.frombuffer(welcome.snapshot, np.uint32)
      self.numbers = numbers[: len(self.numbers)].tolist()

  def send(self, number: int, **fields) -> None:
    fields = fields_of(self.calendar, self.site, number) | fields
    self.link.send(number, payload(self.calendar, self.site, number), fields)

  def receive(self, until: int) -> None:
    """Applies the rounds below a number when they are closed."""
    deadline = time.monotonic() + LONG
    late = lambda: time.monotonic() > deadline
    while self.applied < until:
      assert self.link.wait_until(self.applied, late), f"no round {self.applied}"
      if welcome := self.link.welcome():
        self.take(welcome)
        continue
      closed = self.link.closed(self.applied)
      for site, data in closed.payloads.items():
        assert data == payload(self.calendar, site, closed.round)
      assert closed.payloads.keys() == closed.tokens.keys()
      self.members[closed.round] = tuple(closed.tokens)
      self.refused[closed.round] = closed.refused
      p = closed.fragment
      self.numbers[p] = after(self.numbers[p], closed.payloads)
      theta = jnp.uint32(self.numbers[p])
      self.link.applied(self.applied, outer_state.digest(theta, theta))
      self.applied += 1

  def leave(self, reason: str = "stopped") -> None:
    in_time(lambda: self.link.leave(reason))

  @property
  def holds(self) -> bool:
    return self.link._lease.held


def in_time(function):
  """Calls a function, which must not take for ever."""
  future = futures.Future()

  def run():
    try:
      future.set_result(function())
    except BaseException as error:
      future.set_exception(error)

  threading.Thread(target=run, daemon=True).start()
  return future.result(LONG)


def play(players: list[Player], rounds: range) -> None:
  """All players send each round, and receive it."""
  for number in rounds:
    for player in players:
      player.send(number)
    for player in players:
      player.receive(number + 1)
