"""Sites that share a folder and train nothing, and stores with bad manners."""

import asyncio
import contextlib
import hashlib
import pathlib

import jax.numpy as jnp
import numpy as np
import sites
from sites import after, in_time, payload

from diloco.algorithm.state import OuterState
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.coordinator.rounds import Measured
from diloco.contrib.sites.folder.link import FolderLink
from diloco.contrib.sites.folder.store import Folder, Store

BEATS = 200  # Sites of tests show often that they are there.


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


class Mortal(FolderLink):
  """A link that can be killed."""

  def _keep(self) -> None:
    with contextlib.suppress(asyncio.CancelledError):
      super()._keep()

  async def _main(self) -> None:
    self.loop, self.task = asyncio.get_running_loop(), asyncio.current_task()
    await super()._main()

  def kill(self) -> None:
    """Ends the thread without a farewell, as if the process was killed."""
    self.loop.call_soon_threadsafe(self.task.cancel)
    self._thread.join(10)
    assert not self._thread.is_alive()


class Player(sites.Player):
  """A site whose outer state is a number for each fragment."""

  def __init__(
    self,
    calendar: Calendar,
    store: Store,
    site: int,
    lost_s: float = 20.0,
    state: dict | None = None,
  ):
    self.calendar, self.site, self.said = calendar, site, []
    self.bad = set[tuple[int, int]]()  # Pairs (site, round).
    args = (store, "PATH", calendar, site, lost_s, self.said.append, self.measure)
    self.link = Mortal(*args)
    self.applied, self.numbers = 0, [0] * calendar.fragments
    self.members, self.refused = {}, {}
    vars(self).update(state or {})

  def measure(self, number: int, payloads: dict[int, bytes]) -> dict[int, Measured]:
    bad = Measured(None)
    return {k: bad if (k, number) in self.bad else Measured(1.0) for k in payloads}

  @property
  def outer(self) -> OuterState:
    theta = tuple(jnp.uint32(x) for x in self.numbers)
    return OuterState(theta, theta, (), {})

  @property
  def digests(self) -> list[int]:
    from diloco.contrib.sites import outer_state

    return outer_state.digests(self.outer)

  def join(self) -> "Player":
    state = {"round": self.applied, "digests": self.digests}
    self.welcome = in_time(lambda: self.link.join(**state))
    self.take(self.welcome)
    if not self.welcome.snapshot:
      self.link.offer(self.applied, self.outer)
    self.link.ready(self.link.newest()[1])
    return self

  def take(self, welcome) -> None:
    self.applied = welcome.round
    if welcome.snapshot:
      numbers = np.frombuffer(welcome.snapshot, np.uint32)
      self.numbers = numbers[: len(self.numbers)].tolist()

  def receive(self, until: int) -> None:
    late = sites.after_a_long_time()
    while self.applied < until:
      assert self.link.wait_until(self.applied, late), f"no round {self.applied}"
      if welcome := self.link.welcome():
        self.take(welcome)
        continue
      closed = self.link.closed(self.applied)
      for site, data in closed.payloads.items():
        assert data == payload(self.calendar, site, closed.round)
      self.members[closed.round] = tuple(closed.tokens)
      self.refused[closed.round] = closed.refused
      p = closed.fragment
      self.numbers[p] = after(self.numbers[p], closed.payloads)
      theta = jnp.uint32(self.numbers[p])
      self.link.applied(self.applied, theta, theta)
      self.applied += 1
      self.link.forget(self.applied)

  @property
  def holds(self) -> bool:
    return self.link._lease.held
