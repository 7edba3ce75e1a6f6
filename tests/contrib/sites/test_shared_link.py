"""All processes of a site get what process 0 received from the group."""

import types

import numpy as np
import pytest
from threads import at_once, connected

from diloco.contrib.sites import shared_link
from diloco.contrib.sites.group.journal import Closed
from diloco.contrib.sites.group.link import Welcome
from diloco.contrib.sites.group.rounds import Measured
from diloco.contrib.sites.shared_link import SharedLink

CLOSED = Closed(
  round=3,
  fragment=1,
  step=9,
  tokens={0: 5, 2: 6},
  payloads={0: b"ab", 2: b"cde"},
  per_step={0: 1, 2: 3},
  refused=(1,),
  measured={0: Measured(1.0, 0.5), 1: Measured(None)},
  data={"0": [9, {}]},
)
EMPTY = Closed(4, 0, 9, {}, {}, refused=(0, 1, 2))
WELCOME = Welcome(3, {"0": [1, {}]}, b"xyz")


class FakeLink(types.SimpleNamespace):
  """A link that has all answers."""

  inside = 2
  closed = staticmethod({3: CLOSED, 4: EMPTY}.__getitem__)
  newest = staticmethod(lambda: (4, 5))
  join = staticmethod(lambda applied, digests: WELCOME)
  absent = staticmethod(lambda: [1])
  wait_until = staticmethod(lambda number, stopping: not stopping())
  wait_for_start = staticmethod(lambda stopping: not stopping())

  def __init__(self):
    super().__init__(told=[], welcomes=[None, Welcome(7, {}, b"")])

  def welcome(self):
    return self.welcomes.pop(0)

  def send(self, number, data, fields):
    self.told.append(("send", number, data, fields))

  def ready(self, first):
    self.told.append(("ready", first))

  def leave(self, reason):
    self.told.append(("leave", reason))


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
    (lambda link: link.join(0, []), WELCOME),
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
  found = [site.ask(lambda link: link.welcome()) for _ in range(2)]
  assert found == [
    dict.fromkeys(range(3)),
    dict.fromkeys(range(3), Welcome(7, {}, b"")),
  ]


def test_process_0_alone_tells_the_group(site):
  site.ask(lambda link: link.ready(1))
  site.ask(lambda link: link.send(1, b"ab", {"tokens": 3}))
  site.ask(lambda link: link.leave("finished"))
  told = [("ready", 1), ("send", 1, b"ab", {"tokens": 3})]
  assert site.link.told == [*told, ("leave", "finished")]
  assert site.ask(lambda link: link.inside) == {0: 2, 1: 0, 2: 0}


def test_bytes_cross_the_devices_as_they_are(monkeypatch):
  kept = []

  def broadcast(values):
    kept.append(values)
    return values

  monkeypatch.setattr(shared_link.multihost_utils, "broadcast_one_to_all", broadcast)
  data = bytes(range(256))
  assert SharedLink(None, None)._bytes(data, 256) == data
  SharedLink(None, None)._bytes(None, 5)
  assert kept[1].dtype == np.uint8
  assert kept[1].shape == (5,)  # All processes must give arrays of one shape.
