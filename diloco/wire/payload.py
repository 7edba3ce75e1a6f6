"""A fragment's tree as one flat buffer of bytes, and back.

Under `blocks` every leaf leads with the fragment's layers and each layer is coded by
itself; a leaf of `embed` is coded as one layer. Leaves follow each other in the order
of the flattened tree.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from diloco.config import ConfigError
from diloco.wire import codecs

Tree = Any


def make_codec_from_config(c) -> codecs.MakeCodec:
  """A function from row length to the `Codec` that `config.wire` describes.

  Raises:
    ConfigError: a name is unknown.
  """
  w = c.wire
  options = codecs.Options(w.format, w.block_size, w.rounding, w.density)
  make = lambda row: codecs.make_codec(w.compressor, options, row)
  try:
    make(1)  # Unknown names fail here, not while tracing.
  except ValueError as error:
    raise ConfigError(str(error)) from error
  return make


def encode_tree(
  make_codec: codecs.MakeCodec,
  tree: Tree,
  key: jax.Array,
  shards: list[jax.Array | None] | None = None,
) -> jax.Array:
  """Packs a fragment's tree of float32 leaves.

  Args:
    make_codec: from `make_codec_from_config`.
    tree: {'blocks': leaves (n, ...)} and/or {'embed': leaves (...)}.
    key: PRNG key, used by stochastic rounding and random subsets.
    shards: of each leaf in the order of the flattened tree, which shard of a tensor
      it is, int32: shards draw apart from each other. None for a whole tensor.

  Returns:
    uint8 [tree_nbytes(make_codec, tree)].
  """
  parts = []
  for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
    n, s, row = _layout(path, leaf)
    leaf_key = jax.random.fold_in(key, i)
    if shards and (shard := shards[i]) is not None:
      leaf_key = jax.random.fold_in(leaf_key, shard)
    parts.append(make_codec(row).encode(leaf.reshape(n, s), leaf_key))
  return jnp.concatenate(parts)


def decode_tree(make_codec: codecs.MakeCodec, payload: jax.Array, like: Tree) -> Tree:
  """Unpacks what `encode_tree` packed.

  Args:
    make_codec: as for `encode_tree`.
    payload: uint8 [tree_nbytes(make_codec, like)].
    like: the tree that was packed, or its shapes.

  Returns:
    Leaves float32, shaped like `like`.
  """
  leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
  out, start = [], 0
  for path, leaf in leaves:
    n, s, row = _layout(path, leaf)
    codec = make_codec(row)
    stop = start + codec.nbytes(n, s)
    out.append(codec.decode(payload[start:stop], n, s).reshape(leaf.shape))
    start = stop
  return jax.tree.unflatten(treedef, out)


def tree_nbytes(make_codec: codecs.MakeCodec, like: Tree) -> int:
  """Bytes on the wire for a tree of these shapes."""
  total = 0
  for path, leaf in jax.tree_util.tree_leaves_with_path(like):
    n, s, row = _layout(path, leaf)
    total += make_codec(row).nbytes(n, s)
  return total


def _layout(path, leaf) -> tuple[int, int, int]:
  """Layers, values per layer and values per row of a leaf."""
  n = leaf.shape[0] if path[0].key == "blocks" else 1
  return n, math.prod(leaf.shape) // n, leaf.shape[-1]
