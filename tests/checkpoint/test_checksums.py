"""Checksums against a sum over every element, and against every flipped bit."""

import itertools
import math
import types

import jax
import numpy as np
import pytest

from diloco.checkpoint import checksums
from diloco.processes.peers import Peers

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool"]


def array(shape, dtype, seed=0) -> np.ndarray:
  values = np.random.default_rng(seed).normal(0, 50, shape)
  return np.asarray(jax.numpy.asarray(values).astype(dtype))


def shards(x: np.ndarray, parts: tuple[int, ...], copies: int = 1):
  """What `checksums` reads of a jax.Array with parts[i] shards along axis i."""
  size = [n // p for n, p in zip(x.shape, parts)]
  places = [
    tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, size))
    for place in itertools.product(*map(range, parts))
  ]
  return types.SimpleNamespace(
    size=x.size,
    addressable_shards=[
      types.SimpleNamespace(data=x[index].copy(), index=index, replica_id=copy)
      for index in places
      for copy in range(copies)
    ],
  )


def weight(axis: int, i: int) -> int:
  mixed = (i + 1 + (axis << 48)) * 0x9E3779B97F4A7C15 % 2**64
  return (mixed ^ (mixed >> 29)) | 1


def reference(x: np.ndarray) -> int:
  """The definition in Python's integers, element by element."""
  bits = x.view(f"u{x.itemsize}")
  return (
    sum(
      int(bits[index]) * math.prod(weight(a, i) for a, i in enumerate(index))
      for index in np.ndindex(x.shape)
    )
    % 2**64
  )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 1, 4)])
def test_every_element_counts_with_its_weight(shape, dtype):
  x = array(shape, dtype)
  assert checksums.compute([jax.numpy.asarray(x)], Peers()) == {"0": reference(x)}


def test_an_axis_longer_than_a_block_is_summed_whole(monkeypatch):
  x = array((2, 10), "float32")
  monkeypatch.setattr(checksums, "_BLOCK", 4)
  assert checksums.compute([jax.numpy.asarray(x)], Peers()) == {"0": reference(x)}


@pytest.mark.parametrize("parts", [(1, 1, 1), (4, 1, 1), (2, 3, 1), (4, 1, 5)])
@pytest.mark.parametrize("copies", [1, 2])
def test_any_sharding_has_the_same_checksum(parts, copies):
  x = array((4, 6, 5), "float32")
  tree = {"a": [shards(x, parts, copies)]}
  assert checksums.compute(tree, Peers()) == {"a/0": reference(x)}
  assert checksums.changed(tree, {"a/0": reference(x)}, Peers()) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_is_noticed(dtype):
  x = array((3, 5), dtype)
  saved = checksums.compute({"x": jax.numpy.asarray(x)}, Peers())
  for bit in range(8 * x.nbytes):
    damaged = bytearray(x.tobytes())
    damaged[bit // 8] ^= 1 << bit % 8
    y = np.frombuffer(bytes(damaged), x.dtype).reshape(x.shape)
    assert checksums.changed({"x": shards(y, (1, 1))}, saved, Peers()) == ["x"]


def test_a_flipped_bit_in_all_copies_or_in_one_is_noticed():
  x = array((4, 4), "float32")
  y = x.copy()
  y.view(np.uint32)[3, 3] ^= 1 << 31
  saved = {"x": reference(x)}
  assert checksums.changed({"x": shards(y, (2, 2), 64)}, saved, Peers()) == ["x"]
  tree = {"x": shards(x, (2, 2), 64)}
  tree["x"].addressable_shards[-1].data = y[2:, 2:]  # The last copy of the last shard.
  assert checksums.changed(tree, saved, Peers()) == ["x"]


def test_some_of_the_arrays_are_compared_and_all_must_have_a_checksum():
  x = jax.numpy.asarray(array((3,), "float32"))
  saved = checksums.compute({"a": x, "b": x}, Peers())
  assert checksums.changed({"b": x}, saved, Peers()) == []
  assert checksums.changed({"c": x}, saved, Peers()) == ["c"]
