"""Runs lines 7, 8, 10 and 11 of Algorithm 2 with fewer memory passes than `outer`.

`send` and `update` have the arguments and results of `outer.send` and `outer.update`.
The last digit of a result may differ from theirs, because XLA fuses different
multiplications with additions. `Streaming` uses `send` if `can_send` allows it, and
`update` if `can_update` allows it.

XLA runs one operation after the other, and most operations write whole arrays. Here a
loop takes a piece of a tensor through all operations while the piece is in the cache of
a CPU or in the vector memory of a TPU. So few intermediate arrays go to main memory.

Letters: M replicas; J pieces; G planes of C rows of R values as in `diloco.wire.cuts`.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import PyTreeDef

from diloco.algorithm import optimizers, sync_metrics
from diloco.algorithm import outer as plain
from diloco.algorithm.optimizers import Outer, OuterTuned
from diloco.algorithm.slices import Layers, outer_gradient
from diloco.algorithm.sync_metrics import products
from diloco.mesh.sharding import FSDP, REPLICA, names, specs
from diloco.spec import formats, plugins, sizes
from diloco.spec.call_text import parse
from diloco.spec.fields import OuterConfig, WireConfig
from diloco.util.types import PyTree
from diloco.wire.cuts import Cut, cut

Result = TypeVar("Result")
# A piece has at most so many values, over all replicas: 2 MiB of float32 on CPUs,
# 16 MiB on TPUs.
_VALUES = {"cpu": 1 << 19, "tpu": 1 << 22}


def _most(mesh: Mesh) -> int:
  return _VALUES.get(mesh.devices.flat[0].platform, 0)


def can_send(wire: WireConfig, mesh: Mesh) -> bool:
  """Says whether `send` supports the compressor, the number format and the devices."""
  return wire.compressor == "quantize" and _can_decode(wire, mesh)


def can_update(wire: WireConfig, outer: Outer, mesh: Mesh) -> bool:
  """Says whether `update` supports the outer optimizer, the exchange and the format."""
  if not isinstance(outer, OuterConfig):
    return False
  if outer.average != "mean":
    return False  # A plug-in's average needs whole tensors.
  name, _ = parse("outer.optimizer", outer.optimizer)
  fits = name == "sgd"  # SGD updates each value independently.
  return fits and wire.exchange == "gather" and _can_decode(wire, mesh)


def _can_decode(wire: WireConfig, mesh: Mesh) -> bool:
  scaled = wire.format not in {*formats.PLAIN, *plugins.NAMES["wire.format"]}
  return sizes.coder(wire.compressor) == "quantize" and scaled and bool(_most(mesh))


@partial(jax.jit, static_argnames=("wire", "mesh"))
def send(
  params_M: PyTree,
  theta: PyTree,
  codec_state: PyTree,
  layers: Layers,
  key: Array | None,
  first: int = 0,
  *,
  wire: WireConfig,
  mesh: Mesh,
) -> tuple[Array, PyTree, sync_metrics.Metrics]:
  """Computes the outer gradients and encodes them: lines 7 and 8; see `outer.send`.

  Returns `codec_state` unchanged, and ignores `key` and `first`: `can_send` allows only
  a compressor without state and without random numbers.
  """
  del key, first
  params_M, places = {k: params_M[k] for k in theta}, specs(theta, mesh)

  def local(params_M: PyTree, theta: PyTree, layers: Layers) -> tuple[Array, Array]:
    """Returns a payload, and the squared norms of outer gradients and coding errors."""
    leaves_M, codes_M = jax.tree.leaves(params_M), list[Array]()
    sums = jnp.zeros((2, len(leaves_M[0])))
    tensors = _tensors(wire, mesh, len(leaves_M[0]), theta, places)
    for x_M, (in_blocks, share, t, piece) in zip(leaves_M, tensors):
      ids = layers if in_blocks else jnp.zeros(1, jnp.int32)
      parts_M, squares = _encode(piece, x_M, t, ids)
      codes_M, sums = codes_M + parts_M, sums + share * squares
    return jnp.concatenate(codes_M, axis=1)[:, None], jax.lax.psum(sums, FSDP)

  payload, squares = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(specs(params_M, mesh, (REPLICA,)), places, P()),
    out_specs=(P(REPLICA, FSDP), P(None, REPLICA)),
    check_vma=False,
  )(params_M, theta, layers)
  delta_norm_M, error_norm_M = jnp.sqrt(squares)
  return payload, codec_state, sync_metrics.of_norms(delta_norm_M, error_norm_M)


def _encode(piece: Cut, x_M: Array, t: Array, ids: Layers) -> tuple[list[Array], Array]:
  """Encodes a tensor.

  Returns:
    Parts of the tensor's payload, uint8 [M, n] each; squared norms of the outer
    gradients and of their coding errors, float32 [2, M].
  """
  t = t.reshape(len(ids), -1, piece.row)
  x_M = x_M.reshape(len(x_M), -1, *t.shape[1:])

  def delta(j: Array) -> Array:
    planes, part = [], jax.lax.dynamic_slice
    for plane in range(piece.planes):
      layer, i = divmod((plane * piece.pieces + j) * piece.rows, t.shape[1])
      shape = (1, piece.rows, piece.row)
      x = part(x_M, (0, ids[layer], i, 0), (len(x_M), *shape))
      planes.append(outer_gradient(part(t, (layer, i, 0), shape), x))
    return jnp.concatenate(planes, axis=1)

  def body(j: Array) -> tuple[list[Array], Array]:
    delta_M = _alone(j, delta, j)
    code_M = _alone(j, piece.encode, delta_M)
    error_M = _alone(j, lambda code, x: piece.decode(code) - x, code_M, delta_M)
    squares = [jnp.square(x).sum(axis=(1, 2, 3)) for x in (delta_M, error_M)]
    codes_end = piece.codes // piece.pieces
    return jnp.split(code_M, [codes_end], axis=1), jnp.stack(squares)

  parts_JxM, squares = jax.lax.map(body, jnp.arange(piece.pieces))
  return piece.payload([x.swapaxes(0, 1) for x in parts_JxM]), squares.sum(axis=0)


def _update(
  theta: PyTree,
  opt_state: PyTree,
  payload: Array,
  tuned: OuterTuned,
  weights_M: Array | None = None,
  *,
  wire: WireConfig,
  outer: Outer,
  mesh: Mesh,
) -> tuple[PyTree, PyTree, sync_metrics.Metrics]:
  """Decodes, averages and runs the outer optimizer: lines 10 and 11.

  Returns what `outer.update` returns, and calls `outer.update` in two cases: there are
  weights, or a mesh with an fsdp axis of another size encoded the payload.
  """
  if weights_M is not None or payload.shape[1] != mesh.shape[FSDP]:
    whole = (theta, opt_state, payload, tuned, weights_M)
    return plain.update(*whole, wire=wire, outer=outer, mesh=mesh)
  places = optimizers.outer_shardings(outer, theta, mesh)
  at = jax.tree.map(lambda place: place.spec, places)

  def local(
    theta: PyTree, opt_state: PyTree, payload: Array, tuned: OuterTuned
  ) -> tuple[PyTree, PyTree, Array, Array]:
    """Returns the new theta and opt_state, and the sums of `_step` over all tensors."""
    optimizer, payload_M = optimizers.make_outer(outer, tuned), payload[:, 0]
    # The state of SGD is a tree like theta (the momentum), or empty.
    state, news, sums = jax.tree.leaves(opt_state), list[list[Array]](), list[Array]()
    tensors = _tensors(wire, mesh, len(payload), theta, at[0])
    for i, (_, share, t, piece) in enumerate(tensors):
      code_M, payload_M = jnp.split(payload_M, [piece.size], axis=1)
      olds = [t, *state[i :: len(tensors)]]
      new, more = _step(optimizer, piece, code_M, olds)
      more = [share * x for x in more]
      news, sums = [*news, new], list(map(jnp.add, sums, more)) or more
    leaves = [x for part in zip(*news) for x in part]
    new = jax.tree.unflatten(jax.tree.structure((theta, opt_state)), leaves)
    return *new, *jax.lax.psum(sums, FSDP)

  theta, opt_state, products_MxM, squares = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(*at, P(None, FSDP), P()),
    out_specs=(*at, P(), P()),
    check_vma=False,
  )(theta, opt_state, payload, tuned)
  theta, opt_state = jax.lax.with_sharding_constraint((theta, opt_state), places)
  cosine = sync_metrics.mean_cosine(products_MxM)
  delta_norm, update_norm = jnp.sqrt(squares)
  return theta, opt_state, sync_metrics.of_update(delta_norm, update_norm, cosine)


_jit = partial(jax.jit, static_argnames=("wire", "outer", "mesh"))
update, update_in_place = _jit(_update), _jit(_update, donate_argnums=(0, 1))


def _step(
  optimizer: optax.GradientTransformation, piece: Cut, code_M: Array, olds: list[Array]
) -> tuple[list[Array], list[Array]]:
  """Updates a tensor and its optimizer state by one outer step.

  Returns:
    [new tensor, its new state], and sums over the tensor: the scalar product of the
    outer gradients of each pair of replicas [M, M]; the squared norms of the mean outer
    gradient and of the update [2].
  """
  m, pieces_M, shape = len(code_M), piece.by_piece(code_M), olds[0].shape
  like: PyTreeDef = jax.tree.structure(optimizer.init(olds[0]))
  at = lambda x, j: jax.lax.dynamic_index_in_dim(x, j, 1, keepdims=False)
  put = lambda x, y, j: jax.lax.dynamic_update_index_in_dim(x, y, j, 1)

  def step(
    xs: list[Array], j: Array, delta_M: Array
  ) -> tuple[list[Array], list[Array]]:
    t, *old = (at(x, j) for x in xs)
    mean = sum(delta_M[1:], delta_M[0]) / m
    updates, old = optimizer.update(mean, like.unflatten(old), t)
    squares = jnp.stack([jnp.square(x).sum() for x in (mean, updates)])
    new = [optax.apply_updates(t, updates), *jax.tree.leaves(old)]
    return new, [products(delta_M), squares]

  def body(
    j: Array, carry: tuple[list[Array], list[Array]]
  ) -> tuple[list[Array], list[Array]]:
    xs, sums = carry
    code_M = jnp.concatenate([at(x, j) for x in pieces_M], axis=1)
    delta_M = _alone(j, piece.decode, code_M)
    new, more = _alone(j, step, xs, j, delta_M)
    return [put(x, y, j) for x, y in zip(xs, new)], jax.tree.map(jnp.add, sums, more)

  # The loop changes donated tensors in place.
  xs = [x.reshape(piece.planes, -1, piece.rows, piece.row) for x in olds]
  start = (xs, [jnp.zeros((m, m)), jnp.zeros(2)])
  xs, sums = jax.lax.fori_loop(0, piece.pieces, body, start)
  return [x.reshape(shape) for x in xs], sums


def _tensors(
  wire: WireConfig, mesh: Mesh, m: int, theta: PyTree, places: PyTree
) -> list[tuple[bool, float, Array, Cut]]:
  """Lists, per tensor: whether it has layers, weight of a device's sums, tensor, `Cut`.

  Sums are added over the devices of a replica. Each of these devices has a whole copy
  of an unsharded tensor, so the sums of such a tensor have the weight 1 / fsdp.
  """
  tensors, most = [], _most(mesh)
  leaves, _ = jax.tree.flatten_with_path(theta)
  for (path, t), place in zip(leaves, jax.tree.leaves(places)):
    share = 1 if FSDP in place else 1 / mesh.shape[FSDP]
    n, s, row = sizes.layout(names(path), t.shape)
    piece = cut(wire, most, m, n, s // row, row)
    tensors.append((names(path)[0] == "blocks", share, t, piece))
  return tensors


def _alone(j: Array, f: Callable[..., Result], *args: PyTree) -> Result:
  """Computes f(*args) once, into separate arrays; j is a loop index, never negative.

  Otherwise XLA fuses f, inside a loop, into each operation that uses f's result. On
  CPUs such a fusion updates tensors in place on one thread only, and copies a whole
  tensor that is read twice.
  """
  f = jax.jit(f)  # So f is traced once for the three uses below.
  zeros = lambda *args: jax.tree.map(jnp.zeros_like, jax.eval_shape(f, *args))
  branch = lambda *args: jax.lax.cond(j >= 0, f, zeros, *args)
  barrier = lambda *args: jax.lax.optimization_barrier(f(*args))
  return jax.lax.platform_dependent(*args, cpu=branch, default=barrier)
