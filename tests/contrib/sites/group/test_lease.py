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

  def run(self, seconds: float, every: float = 0.5) -> None:
    for _ in range(round(seconds / every)):
      self.now += every
      # All look before any of them writes: the worst order.
      awake = [name for name in self.sites if name not in self.asleep]
      found = dict(self.file) if self.file else None
      for name in awake:
        self.sites[name].observe(found, self.now + self.offsets[name])
      for name in awake:
        now = self.now + self.offsets[name]
        if self.sites[name].is_due(now):
          self.file = self.sites[name].record(now, published=7)

  def holders(self) -> list[str]:
    return [name for name, lease in self.sites.items() if lease.held]


@pytest.mark.parametrize("seed", range(10))
def test_one_site_gets_the_lease_and_keeps_it(seed):
  random.seed(seed)
  world = World("abc")
  world.run(20)
  [first] = world.holders()
  world.run(500)
  assert world.holders() == [first]
  assert {lease.seen["name"] for lease in world.sites.values()} == {first}


@pytest.mark.parametrize("seed", range(10))
def test_another_site_follows_a_silent_holder_and_only_then(seed):
  random.seed(seed)
  world = World("abc")
  world.run(20)
  [first] = world.holders()
  world.asleep.add(first)
  world.run(LOST_S - 4)  # The last beat may be 2.5 s old.
  assert world.holders() == [first]
  world.run(LOST_S)
  [second] = set(world.holders()) - {first}
  # The former holder wakes up, and learns it with its first look.
  world.asleep.clear()
  world.run(0.5)
  assert world.holders() == [second]
  world.run(500)
  assert world.holders() == [second]


def test_a_former_holder_that_writes_once_more_changes_nothing():
  world = World("ab")
  world.run(20)
  [first] = world.holders()
  old = dict(world.file)
  world.asleep.add(first)
  world.run(2 * LOST_S)
  [second] = set(world.holders()) - {first}
  for _ in range(5):
    world.file = old
    world.run(3)
    assert world.sites[second].held
    assert world.sites[second].seen["name"] == second
    assert world.file["name"] == second


def test_a_holder_that_leaves_is_followed_at_once():
  world = World("ab")
  world.run(20)
  [first] = world.holders()
  world.file = world.sites[first].leave()
  world.asleep.add(first)
  world.run(LOST_S / 2)
  assert len(world.holders()) == 1
  assert world.file["name"] != first
  assert world.file["published"] == 7


@pytest.mark.parametrize("garbage", [{}, {"name": 3}, {"name": "z", "term": "9"}])
def test_garbage_counts_as_silence(garbage):
  world = World("ab")
  world.run(20)
  [first] = world.holders()
  world.file = garbage
  world.run(5)
  assert world.holders() == [first]
  assert world.file["name"] == first
