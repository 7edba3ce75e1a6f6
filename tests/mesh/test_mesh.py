"""Mesh layouts: all train the same numbers, and only payloads cross replicas."""

import types

import jax
import numpy as np
import pytest
from cpu_devices import run_on_8_devices

from diloco.algorithm.state import abstract_params
from diloco.config import resolve
from diloco.errors import ConfigError
from diloco.mesh import sharding
from diloco.mesh.devices import device_grid, make_mesh


@pytest.fixture(scope="module")
def few():
  """The programs of one layout; test_layouts.py has all, and their losses."""
  return run_on_8_devices("traffic=2")


def test_only_the_packed_payload_crosses_and_is_booked(few):
  traffic = few["traffic"]["2"]
  for program in ("inner", "send", "update", "merge"):
    assert traffic[program] == []
  [[kind, dtype, size]] = traffic["transmit"]
  assert (kind, dtype) == ("collective-permute", "u8")
  assert traffic["payload_shape"] == [2, 1, size]
  assert traffic["hidden"] == traffic["transmit"]
  assert traffic["booked"] == traffic["bytes"]["transmit"] > 0


def test_every_large_parameter_is_sharded(tiny):
  c = resolve(tiny)
  params = abstract_params(c)
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    spec = sharding.weight_spec(path, leaf.shape, 2)
    assert sharding.FSDP in spec
    position = spec.index(sharding.FSDP)
    assert leaf.shape[position] % 2 == 0
    # Never the layer axis: a fragment is a set of its indices.
    assert position == (1 if path[0].key == "blocks" else 0)


@pytest.mark.parametrize(
  ("devices", "fields", "message"),
  [
    (1, {"mesh.replica": 2}, r"mesh.replica \* mesh.fsdp is 2 \* 1, but there are 1 d"),
    (1, {"mesh.fsdp": 4}, "but there are 1 devices; choose two factors of 1"),
    (3, {"mesh.replica": 3}, r"mesh.replica is 3, which does not divide the 2 repl"),
    (4, {"mesh.fsdp": 1}, r"is 4 \(4 devices over mesh.fsdp=1\), .* 0 for both"),
    (4, {"mesh.replica": 1}, r"a replica has 2 sequences; raise .* multiple of 8"),
  ],
)
def test_replicas_and_batches_have_to_fit_the_mesh(tiny, devices, fields, message):
  tiny.update_from_flattened_dict(fields)
  with pytest.raises(ConfigError, match=message):
    make_mesh(resolve(tiny), jax.devices()[:1] * devices)


def test_a_leading_axis_has_the_name_that_is_given(tiny):
  mesh = make_mesh(resolve(tiny), jax.devices()[:1])
  like = {"embed": {"x": np.zeros((1, 5))}, "blocks": {"y": np.zeros((1, 3, 5))}}
  # Data-parallel's one model has no replica axis, even if the sizes would allow one.
  for axis in (None, sharding.REPLICA):
    for place in jax.tree.leaves(sharding.shardings(like, mesh, (axis,))):
      assert place.spec[0] == axis


def test_a_part_that_two_devices_hold_is_copied_once():
  part = types.SimpleNamespace(index=(slice(0, 2),), data=np.ones(2))
  x = types.SimpleNamespace(shape=(3,), dtype=float, addressable_shards=[part, part])
  assert sharding.local_parts(x).tolist() == [1, 1, 0]


@pytest.mark.parametrize(
  ("replica", "slices", "processes"), [(1, 2, 4), (2, 1, 2), (4, 1, 1), (8, 1, 1)]
)
def test_rows_of_replicas_lie_within_slices_and_processes(replica, slices, processes):
  # Two slices of two processes with four devices each, in no order.
  devices = [
    types.SimpleNamespace(slice_index=s, process_index=2 * s + p, id=i, platform="gpu")
    for i in range(4)
    for p in range(2)
    for s in range(2)
  ]
  grid = device_grid(devices, replica, 16 // replica)
  assert len({id(d) for d in grid.ravel()}) == 16
  for row in grid:
    assert len({d.slice_index for d in row}) == slices
    assert len({d.process_index for d in row}) == processes
