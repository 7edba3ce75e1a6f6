"""Bytes of fragments and syncs."""

import jax.numpy as jnp
import plugins  # noqa: F401  Registers compressors.
import pytest

from diloco.contrib import sparta
from diloco.spec import sizes
from diloco.spec.fields import WireConfig

# Two layers of 8 x 6 and an embedding of 10 x 4, with a norm each.
FRAGMENT = {
  "blocks": {"w": (2, 8, 6), "norm": (2, 5)},
  "embed": {"tokens": (10, 4), "norm": (4,)},
}
VALUES = 2 * 48 + 2 * 5 + 40 + 4


def test_float32_takes_four_bytes_a_value():
  assert sizes.payload_bytes(WireConfig(format="fp32"), FRAGMENT) == 4 * VALUES


def test_e3m0_takes_half_a_byte_and_a_scale_per_block():
  wire = WireConfig(format="e3m0", block_size=16)
  codes = 48 + 5 + 20 + 2
  scales = 2 * 3 + 2 * 1 + 3 + 1
  assert sizes.payload_bytes(wire, FRAGMENT) == codes + scales


@pytest.mark.parametrize(
  ("block_size", "scales"),
  # 0: one per layer or tensor; -1: one per row, of 6, 5, 4 and 4 values.
  [(0, 2 * 1 + 2 * 1 + 1 + 1), (-1, 2 * 8 + 2 * 1 + 10 + 1)],
)
def test_whole_tensors_and_rows_may_share_a_scale(block_size, scales):
  wire = WireConfig(format="e3m0", block_size=block_size)
  assert sizes.payload_bytes(wire, FRAGMENT) == 48 + 5 + 20 + 2 + scales


def test_a_share_of_the_values_is_rounded_up_and_never_empty():
  kept = lambda density, s: sizes.kept(WireConfig(density=density), s)
  assert [kept(0.1, s) for s in (1, 10, 11, 20, 21)] == [1, 1, 2, 2, 3]
  assert kept(0.07, 100) == 7  # 0.07 * 100 is 7.000000000000001.
  assert kept(1e-9, 100) == 1


def test_an_index_takes_the_bits_of_the_largest_index_and_at_least_one():
  for s in [*range(2, 70), 1 << 20, (1 << 20) + 1]:
    assert sizes.index_bits(s) == (s - 1).bit_length()
  assert sizes.index_bits(1) == 1


def test_shards_are_coded_apart_and_small_tensors_on_every_device():
  wire = WireConfig(format="e3m0", block_size=16)
  # On each of 2 devices: w 2 x (4 x 6), tokens 5 x 4, embed's norm 2; blocks' norm of
  # 5 values is not divided.
  codes = 24 + 5 + 10 + 1
  scales = 2 * 2 + 2 * 1 + 2 + 1
  assert sizes.payload_bytes(wire, FRAGMENT, fsdp=2) == 2 * (codes + scales)


@pytest.mark.parametrize(("replicas", "others"), [(1, 0), (2, 1), (4, 3)])
def test_a_replica_sends_its_payload_to_every_other_one(replicas, others):
  wire = WireConfig(format="e3m0")
  payload = sizes.payload_bytes(wire, FRAGMENT)
  assert sizes.sync_bytes(wire, replicas, FRAGMENT) == others * payload


@pytest.mark.parametrize(("replicas", "share"), [(1, 0), (2, 1), (4, 1.5)])
def test_psum_reduces_float32_on_a_ring(replicas, share):
  wire = WireConfig(format="e3m0", exchange="psum")
  assert sizes.sync_bytes(wire, replicas, FRAGMENT) == share * 4 * VALUES


def test_psum_reduces_small_tensors_on_every_device():
  wire = WireConfig(format="e3m0", exchange="psum")
  # As above: on each of 2 devices w 2 x 24, blocks' norm 2 x 5, tokens 20, norm 2.
  found = sizes.exchanged_bytes(wire, FRAGMENT, fsdp=2)
  assert found == 4 * 2 * (48 + 10 + 20 + 2)
  assert sizes.exchanged_bytes(wire, FRAGMENT) == 4 * VALUES


def test_sparta_takes_a_share_of_every_layers_tensor_and_shard():
  # 10% of 48, 5, 40 and 4 values, rounded up.
  assert sparta.count(0.1, FRAGMENT) == 2 * (5 + 1) + 4 + 1
  # On each of 2 devices 24, 5, 20 and 2 values.
  assert sparta.count(0.1, FRAGMENT, fsdp=2) == 2 * (2 * (3 + 1) + 2 + 1)
  assert sparta.count(1.0, FRAGMENT) == VALUES


@pytest.mark.parametrize(("replicas", "sent"), [(1, 0), (2, 40), (4, 60)])
def test_an_average_reduces_float32_on_a_ring(replicas, sent):
  assert sizes.average_bytes(replicas, 10) == sent


@pytest.mark.parametrize("dtype", sizes.DTYPE_BYTES)
def test_a_gradient_takes_the_bytes_of_its_dtype(dtype):
  assert sizes.DTYPE_BYTES[dtype] == jnp.dtype(dtype).itemsize
