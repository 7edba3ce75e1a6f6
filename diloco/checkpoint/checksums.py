"""Computes checksums of arrays, which show damaged checkpoints.

The checksum of an array is the sum, modulo 2**64, of (bits of an element as an integer)
x (weight of the element). A weight is a product of odd numbers, one for each index. So
one flipped bit always changes the checksum, and other damage goes unnoticed with
probability 2**-64. Each process sums over its own shards, and these sums are added. So
the checksum does not depend on the sharding.
"""

import functools
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import numpy as np

from diloco.processes.peers import Peers
from diloco.util.types import PyTree

Shard = Any  # JAX has no public name for the type of `jax.Array.addressable_shards`.
_BLOCK = 1 << 16  # Number of indices of an axis that get their weights at once.
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio, odd.


def compute(tree: PyTree, peers: Peers) -> dict[str, int]:
  """Returns {name: checksum} of global arrays; all processes must call `compute`."""
  sums = _sum(tree, peers, lambda shard: shard.replica_id == 0)
  return {name: checksum for name, (checksum, _) in sums.items()}


def changed(tree: PyTree, saved: dict[str, int], peers: Peers) -> list[str]:
  """Returns the names of arrays that differ from the saved arrays.

  All processes must call this function, and get the same names. Each process checks all
  of its shards, copies of other devices' shards included.

  Args:
    tree: the global arrays to check, all saved arrays or some of them.
    saved: checksums from `compute`.
  """
  sizes = {name: x.size for name, x in named(tree).items()}
  return [
    name
    for name, (checksum, elements) in _sum(tree, peers, lambda shard: True).items()
    if name not in saved or checksum != saved[name] * (elements // sizes[name]) % 2**64
  ]


def _sum(
  tree: PyTree, peers: Peers, chosen: Callable[[Shard], bool]
) -> dict[str, tuple[int, int]]:
  """Adds the checksums of the chosen shards of all processes.

  Returns:
    {name: (sum of the checksums, number of elements)}.
  """
  shards = {
    name: [shard for shard in x.addressable_shards if chosen(shard)]
    for name, x in named(tree).items()
  }
  with futures.ThreadPoolExecutor() as pool:
    sums = {name: pool.map(_of_shard, some) for name, some in shards.items()}
    local = {
      name: (sum(sums[name]), sum(shard.data.size for shard in some))
      for name, some in shards.items()
    }
  parts = peers.all_gather(local)
  total = lambda name, i: sum(part[name][i] for part in parts)
  return {name: (total(name, 0) % 2**64, total(name, 1)) for name in local}


def _of_shard(shard: Shard) -> int:
  """Returns the checksum of a shard, whose indices count from the array's beginning."""
  x = np.asarray(shard.data)
  sums: Any = x.view(f"u{x.itemsize}")
  for axis in reversed(range(x.ndim)):
    first, size = shard.index[axis].start or 0, x.shape[axis]
    # Goes block by block: a long axis' weights may need more memory than the array.
    blocks = [range(i, min(i + _BLOCK, size)) for i in range(0, size, _BLOCK)]
    parts = [
      np.einsum("...i,i->...", sums[..., b.start : b.stop], _weights(axis, first, b))
      for b in blocks
    ]
    sums = np.sum(parts, axis=0, dtype=np.uint64)
  return int(sums)


def _weights(axis: int, first: int, block: range) -> np.ndarray:
  """Returns odd numbers, uint64, one for each index first + i with i in `block`."""
  i = np.arange(first + block.start + 1, first + block.stop + 1, dtype=np.uint64)
  mixed = (i + np.uint64(axis << 48)) * _MIX
  return (mixed ^ (mixed >> np.uint64(29))) | np.uint64(1)


def named(tree: PyTree) -> dict[str, jax.Array]:
  """Returns {path in the tree, joined by "/": array}."""
  name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  return {name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
