"""A coordinator without JAX in a thread, and sites that send random payloads."""

import asyncio
import contextlib
import functools
import json
import pathlib
import threading
import time
import zlib

import numpy as np
from conftest import tiny_config, update

from diloco.config import resolve
from diloco.contrib.sites import SitesConfig, security
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.coordinator.board import Board
from diloco.contrib.sites.coordinator.journal import Entry, Journal
from diloco.contrib.sites.coordinator.rounds import Measured
from diloco.contrib.sites.coordinator.server import Server
from diloco.contrib.sites.link import Link

LONG = 60.0  # Seconds after which a test gives up.
# `Arrival.seconds` of a site.
ARRIVAL = {"start": 5, "snapshot": 0.5, "first_step": 3, "rounds": 0.6, "compiling": 3}


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


class Group:
  """An outer state whose bytes tell which payloads were applied, in which order."""

  def __init__(self, journal: Journal):
    self.applied, self.state, self.digests = 0, 0, [0]
    self.snapshot_bytes, self.data = 100_000, {}
    for number in journal.rounds:
      self.apply(journal.read(number))

  def apply(self, entry: Entry) -> None:
    assert entry.round == self.applied
    self.state = after(self.state, entry.payloads)
    self.digests.append(self.state)
    self.data |= entry.data
    self.applied += 1

  def snapshot(self) -> tuple[int, bytes]:
    return self.applied, self.state.to_bytes(4) * (self.snapshot_bytes // 4)

  def agrees(self, applied: int, digests: list[int]) -> bool:
    return applied < len(self.digests) and digests == [self.digests[applied]]


def after(state: int, payloads: dict[int, bytes]) -> int:
  """Returns the outer state after one more round."""
  for site, data in payloads.items():
    state = zlib.crc32(data, zlib.crc32(bytes([site]), state))
  return state


class Coordinator:
  """A real server on localhost, in a thread of its own."""

  def __init__(self, calendar: Calendar, workdir: pathlib.Path, tls="", port=0):
    self.calendar, self.workdir, self.tls, self.port = calendar, workdir, tls, port
    self.said: list[str] = []
    self.bad: set[tuple[int, int]] = set()  # Pairs (site, round).
    self.error: BaseException | None = None
    self._up, self.over = threading.Event(), threading.Event()
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._thread.start()
    assert self._up.wait(LONG)
    if self.error:
      raise self.error

  @property
  def address(self) -> str:
    return f"localhost:{self.port}"

  @property
  def state(self) -> int:
    """The outer state after all closed rounds, which a thread applies."""
    wait(lambda: self.group.applied == self.board.published)
    return self.group.state

  def call(self, function):
    """Calls a function in the coordinator's event loop."""
    done = asyncio.run_coroutine_threadsafe(_coroutine(function), self._loop)
    return done.result(LONG)

  def kill(self) -> None:
    """Ends the thread without a farewell, as if the process was killed."""
    deadline = time.monotonic() + LONG
    while self._thread.is_alive():  # Before Python 3.12 `wait_for` may miss a cancel.
      with contextlib.suppress(RuntimeError):  # The loop is closed.
        self._loop.call_soon_threadsafe(self._cancel)
      self._thread.join(0.1)
      assert time.monotonic() < deadline

  def _cancel(self) -> None:
    for task in self._tasks:  # gRPC's own tasks crash Python if they are cancelled.
      task.cancel()

  def restart(self) -> "Coordinator":
    """Kills the coordinator, and starts another in its folder, at its address."""
    self.kill()
    return Coordinator(self.calendar, self.workdir, self.tls, self.port)

  def lines(self) -> list[int]:
    """Returns the rounds of rounds.jsonl."""
    return [entry["round"] for entry in read_lines(self.workdir)]

  def _run(self) -> None:
    try:
      asyncio.run(self._serve())
    except asyncio.CancelledError:
      pass
    except BaseException as error:
      self.error = error
    finally:
      self._up.set()

  def measure(self, number: int, payloads: dict[int, bytes]) -> dict[int, Measured]:
    """Random bytes may be any numbers; the tests say which ones are bad."""
    bad = Measured(None)
    return {k: bad if (k, number) in self.bad else Measured(1.0) for k in payloads}

  async def _serve(self) -> None:
    self._loop = asyncio.get_running_loop()
    journal = Journal(self.workdir)
    self.board = Board(self.calendar, journal, self.said.append)

    def load():
      self.group = Group(journal)
      return self.group

    self.server = Server(self.board)
    listen = f"localhost:{self.port}"
    credentials = security.server_credentials(listen, self.tls, not self.tls)
    self.port = await self.server.serve(listen, credentials)
    work = (self.board.close_rounds(self.measure), self.board.apply_rounds(load))
    self._tasks = [asyncio.create_task(x) for x in work]
    self._up.set()
    try:
      await asyncio.gather(*self._tasks)
      self.over.set()
    finally:
      await self.server._server.stop(grace=None)


async def _coroutine(function):
  return function()


def read_lines(workdir: pathlib.Path) -> list[dict]:
  text = (workdir / "rounds.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines()]


class Player:
  """A site that trains nothing: sends its payloads, and keeps what it receives."""

  def __init__(self, coordinator: Coordinator, site: int, tls="", **hello):
    self.calendar, self.site, self.said = coordinator.calendar, site, []
    keepalive_s = self.calendar.config.of(SitesConfig).keepalive_s
    channel = functools.partial(
      security.channel, coordinator.address, tls, not tls, keepalive_s
    )
    said = {"site": site, "config": self.calendar.config.to_dict()} | hello
    room = 2 * self.calendar.fragments + 2
    show = self.said.append
    self.link = Link(channel, coordinator.address, said, show, room, keepalive_s)
    self.state, self.applied, self.members, self.refused = 0, 0, {}, {}

  def join(self, **state) -> "Player":
    """Joins, from the first state or from the state of another player."""
    hello = {"round": self.applied, "digests": [self.state]} | state
    welcome = in_time(lambda: self.link.join(**hello))
    self.applied = welcome.round
    if welcome.snapshot:
      self.state = int.from_bytes(welcome.snapshot[:4])
    self.welcome = welcome
    self.link.ready(self.applied)
    return self

  def send(self, number: int, **fields) -> None:
    data = {s: [number, {}] for s in self.calendar.shards_of(self.site)}
    own = {"tokens": 16, "per_step": 8, "data": data, "finished": []}
    fields = own | fields
    self.link.send(number, payload(self.calendar, self.site, number), fields)

  def receive(self, until: int) -> None:
    """Applies the rounds below a number when they are closed."""
    while self.applied < until:
      late = after_a_long_time()
      assert self.link.wait_until(self.applied, late), f"no round {self.applied}"
      closed = self.link.closed(self.applied)
      for site, data in closed.payloads.items():
        assert data == payload(self.calendar, site, closed.round)
      assert closed.payloads.keys() == closed.tokens.keys()
      self.members[closed.round] = tuple(closed.tokens)
      self.refused[closed.round] = closed.refused
      self.state = after(self.state, closed.payloads)
      self.applied += 1
      self.link.forget(self.applied)

  def leave(self, reason: str = "stopped") -> None:
    in_time(lambda: self.link.leave(reason))


def after_a_long_time():
  """Returns a function that becomes true."""
  deadline = time.monotonic() + LONG
  return lambda: time.monotonic() > deadline


def in_time(function):
  """Calls a function, which must not take for ever."""
  found = []

  def run():
    try:
      found.append((function(), None))
    except BaseException as error:
      found.append((None, error))

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  thread.join(LONG)
  assert found, "it takes for ever"
  result, error = found[0]
  if error:
    raise error
  return result


def wait(condition) -> None:
  """Waits until a condition holds."""
  deadline = time.monotonic() + LONG
  while not condition():
    assert time.monotonic() < deadline, "it never happens"
    time.sleep(0.01)


def play(players: list[Player], rounds: range) -> None:
  """All players send each round, and receive it."""
  for number in rounds:
    for player in players:
      player.send(number)
    for player in players:
      player.receive(number + 1)


@contextlib.contextmanager
def leaving(*players: Player):
  """Players leave at the end, also of a test that fails."""
  try:
    yield
  finally:
    for player in players:
      with contextlib.suppress(Exception):
        player.leave()
