"""All processes of a site get what process 0 received from the group."""

import types

import numpy as np
import pytest
from sites import closed_round, make_calendar
from threads import at_once, connected

from diloco.contrib.sites import shared_link
from diloco.contrib.sites.group.link import Welcome
from diloco.contrib.sites.group.rounds import Measured
from diloco.contrib.sites.shared_link import SharedLink

CLOSED = closed_round(make_calendar(), 3, {0: b"ab", 2: b"cde"})._replace(
  tokens={0: 5, 2: 6},
  per_step={0: 1, 2: 3},
  refused=(1,),
  measured={0: Measured(1.0, 0.5), 1: Measured(None)},
)
EMPTY = closed_round(make_calendar(), 4, {})._replace(refused=(0, 1, 2))
WELCOME = Welcome(3, {"0": [1, {}]}, b"xyz")


class FakeLink:
  """A link that has all answers."""

  def __init__(self):
    self.told, self.welcomes = [], [None, Welcome(7, {}, b"")]
    self.closed = {3: CLOSED, 4: EMPTY}.__getitem__
    self.newest, self.absent = lambda: (4, 5), lambda: [1]
    self.join = lambda applied, digests, stopping: WELCOME
    self.wait_until = lambda number, stopping: not stopping()
    self.wait_for_start = lambda stopping: not stopping()
    self.welcome = lambda: self.welcomes.pop(0)
    for name in ("ready", "send", "applied", "offer", "leave"):
      setattr(self, name, lambda *args, name=name: self.told.append((name, *args)))


@pytest.fixture
def site():
  """A function that calls all three processes: {process: what it gets}."""
  peers, link = connected(3), FakeLink()

  class OverPeers(SharedLink):
    """Bytes go over the processes' own connection instead of JAX's devices."""

    def _bytes(self, own, size):
      data = bytes.fromhex(self._peers.broadcast(own and own.hex()))
      assert len(data) == size
      return data

  shared = [OverPeers(None if i else link, p) for i, p in enumerate(peers)]
  yield types.SimpleNamespace(
    ask=lambda call: at_once(lambda i: call(shared[i]), range(3)), link=link
  )
  at_once(lambda i: peers[i].close(), range(3))


@pytest.mark.parametrize(
  ("call", "answer"),
  [
    (lambda link: link.join(0, [], None), WELCOME),
    (lambda link: link.closed(3), CLOSED),
    (lambda link: link.closed(4), EMPTY),
    (lambda link: [*link.newest()], [4, 5]),
    (lambda link: link.absent(), [1]),
    (lambda link: link.wait_until(3, lambda: False), True),
    (lambda link: link.wait_for_start(lambda: True), False),
  ],
)
def test_every_process_gets_the_answer(site, call, answer):
  assert site.ask(call) == dict.fromkeys(range(3), answer)


def test_a_snapshot_comes_once(site):
  for expected in (None, Welcome(7, {}, b"")):
    assert site.ask(SharedLink.welcome) == dict.fromkeys(range(3), expected)


def test_process_0_alone_tells_the_group(site):
  told = [
    ("ready", 1),
    ("send", 1, b"ab", {"tokens": 3}),
    ("applied", 1, 2**32 - 1),
    ("offer", 5, list),
    ("leave", "finished"),
  ]
  for name, *args in told:
    site.ask(lambda link, name=name, args=args: getattr(link, name)(*args))
  assert site.link.told == told


def test_bytes_cross_the_devices_as_they_are(monkeypatch):
  kept = []
  broadcast = lambda values: kept.append(values) or values
  monkeypatch.setattr(shared_link.multihost_utils, "broadcast_one_to_all", broadcast)
  data, alone = bytes(range(256)), SharedLink(None, None)
  assert alone._bytes(data, 256) == data
  alone._bytes(None, 5)
  assert kept[1].dtype == np.uint8
  assert kept[1].shape == (5,)  # All processes must give arrays of one shape.
