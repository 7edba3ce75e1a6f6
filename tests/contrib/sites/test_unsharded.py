"""The payloads of a site do not depend on how fsdp shards its replicas."""

import json
import pathlib

import cpu_devices
import pytest
from conftest import FEEDBACK

SCRIPT = pathlib.Path(__file__).with_name("unequal_devices.py")
FEW = [[(1, 1), (1, 4)], [(2, 2), (1, 1)]]
MORE = [*FEW, [(2, 1), (2, 2)], [(1, 4), (2, 1)]]


@pytest.mark.parametrize(
  ("moves", "cases"),
  [
    (FEW, [{}]),
    pytest.param(
      *(MORE, [{"wire.compressor": "random"}, {"wire.compressor": "topk"}, FEEDBACK]),
      marks=pytest.mark.slow("compiles for long"),
    ),
  ],
)
def test_bytes_are_those_of_one_device_also_after_a_move(moves, cases):
  """Pairs (replica, fsdp): the layout before and after a checkpoint is restored."""
  found = cpu_devices.run(4, SCRIPT, json.dumps(moves), *map(json.dumps, cases))
  for by_move in found:
    assert len(by_move) == len(moves)
    one, shape, two, _ = by_move[0]
    assert shape[:2] == [2, 1]
    assert one != two
    for other in by_move[1:]:
      assert other == by_move[0]
