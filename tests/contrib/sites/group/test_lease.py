"""The lease passes on when its holder is silent, whatever clocks show."""

import random

import pytest

from diloco.contrib.sites.group.lease import Lease

LOST_S = 20.0


class World:
  """Sites that look at one file every half second, each by a clock of its own."""

  def __init__(self, names: str):
    self.sites = {name: Lease(name, LOST_S) for name in names}
    # Monotonic clocks begin anywhere.
    self.offsets = {name: 1000.0 * i for i, name in enumerate(names)}
    self.file, self.now, self.asleep = None, 0.0, set()
    self.news = {"snapshot": 7}

  def run(self, seconds: float, every: float = 0.5) -> None:
    for _ in range(round(seconds / every)):
      self.now += every
      # All look before any of them writes: the worst order.
      awake = [name for name in self.sites if name not in self.asleep]
      clocks = {name: self.now + self.offsets[name] for name in awake}
      found = dict(self.file) if self.file else None
      for name, now in clocks.items():
        self.sites[name].observe(found, now)
      for name, now in clocks.items():
        if self.sites[name].is_due(now):
          self.file = self.sites[name].record(now, **self.news)

  def holders(self) -> list[str]:
    return [name for name, lease in self.sites.items() if lease.held]


def begun(names: str) -> tuple[World, str]:
  """A world in which a site has the lease, and the name of this site."""
  world = World(names)
  world.run(20)
  [first] = world.holders()
  return world, first


@pytest.mark.parametrize("seed", range(10))
def test_a_site_keeps_the_lease_until_it_is_silent_and_another_one_follows(seed):
  random.seed(seed)
  world, first = begun("abc")
  world.run(500)
  assert world.holders() == [first]
  assert {lease.seen["name"] for lease in world.sites.values()} == {first}
  old = dict(world.file)
  world.asleep.add(first)
  world.run(LOST_S - 4)  # The last beat may be 2.5 s old.
  assert world.holders() == [first]
  world.run(LOST_S)
  [second] = set(world.holders()) - {first}
  for _ in range(5):  # The former holder writes once more.
    world.file = old
    world.run(3)
    assert world.sites[second].held
    assert world.sites[second].seen["name"] == world.file["name"] == second
  # The former holder wakes up, and learns it with its first look.
  world.asleep.clear()
  world.run(0.5)
  assert world.holders() == [second]
  world.run(500)
  assert world.holders() == [second]


def test_a_holder_that_leaves_is_followed_at_once():
  world, first = begun("ab")
  world.file, world.news = world.sites[first].leave(), {}
  world.asleep.add(first)
  world.run(LOST_S / 2)
  assert len(world.holders()) == 1
  assert world.file["name"] != first
  assert world.file["snapshot"] == 7  # The next holder keeps what was recorded.


@pytest.mark.parametrize("garbage", [{}, {"name": 3}, {"name": "z", "term": "9"}])
def test_garbage_counts_as_silence(garbage):
  world, first = begun("ab")
  world.file = garbage
  world.run(5)
  assert world.holders() == [first]
  assert world.file["name"] == first
