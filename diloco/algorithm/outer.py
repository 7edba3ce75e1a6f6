"""What the outer step computes: Algorithm 2 of Streaming DiLoCo (2501.18512).

Per fragment p: `send` forms every replica's outer gradient and its packed codes,
`update` decodes them, averages in float32 and steps the outer optimizer, `merge`
mixes the result into the replicas. When they run is `diloco.sync`'s. DiLoCo is the
case of one fragment, tau = 0, alpha = 0.

The outer parameters live per fragment: each fragment has its own outer parameters
and its own optimizer state, so an update can touch no other fragment. All fragments
of one shape share one compiled program; their layers are an argument.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from diloco import config as config_lib
from diloco.algorithm.schedule import Fragment, Schedule
from diloco.model import sharding as mesh_lib
from diloco.wire import exchange
from diloco.wire.payload import make_codec_from_config
from diloco.wire.transport import Transport, make_transport

Tree = Any


@flax.struct.dataclass
class OuterState:
  """What the outer optimizer owns; only `diloco.sync` changes it.

  Attributes:
    theta: per fragment, its outer parameters: {'blocks': (n, ...)} and/or
      {'embed': ...}, float32, sharded over fsdp, the same on every replica.
    opt_state: per fragment, its outer optimizer's state.
    in_flight: {str(p): payload} of the fragments sent and not yet applied, uint8
      [M, fsdp, bytes].
  """

  theta: tuple[Tree, ...]
  opt_state: tuple[Tree, ...]
  in_flight: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Outer:
  """The compiled pieces of the outer step and the plan they follow.

  Attributes:
    schedule: which fragments are sent and received after which step.
    fragments: what each fragment holds.
    layers: int32 (n,) per fragment: its layers.
    seed: of the codecs' random numbers.
    exchange: as `config.wire.exchange`.
    transport: exchanges payloads; has the update of the outer state (`make_update`).
    fresh: params_M -> the first OuterState; may be traced.
    init: the same, taken to where it lives.
    send: params_M, theta, layers, key -> (payload uint8 [M, fsdp, bytes], metrics);
      jitted.
    merge: params_M (donated), theta, layers, mask bool [M] -> params_M; jitted.
  """

  schedule: Schedule
  fragments: tuple[Fragment, ...]
  layers: tuple[np.ndarray, ...]
  seed: int
  exchange: str
  transport: Transport
  fresh: Any
  init: Any
  send: Any
  merge: Any


def make_optimizer(c) -> optax.GradientTransformation:
  """The outer optimizer of a resolved config; gradients are not clipped."""
  name, rate = c.outer.optimizer, c.outer.learning_rate
  if name == "nesterov":
    return optax.sgd(rate, c.outer.momentum, nesterov=True)
  if name == "sgd":
    return optax.sgd(rate, c.outer.momentum or None)
  return getattr(optax, name)(rate)


def take(params_M: Tree, theta: Tree, layers: jax.Array | np.ndarray) -> Tree:
  """The part of the replicas' parameters that a fragment holds.

  Args:
    params_M: parameters of all replicas, leaves (M, N, ...) and (M, ...).
    theta: any tree with the fragment's structure.
    layers: int32 (n,), its layers.

  Returns:
    Leaves (M, n, ...) under `blocks` and (M, ...) under `embed`.
  """
  part = {}
  if "blocks" in theta:
    part["blocks"] = jax.tree.map(lambda x: x[:, layers], params_M["blocks"])
  if "embed" in theta:
    part["embed"] = params_M["embed"]
  return part


def put(params_M: Tree, part_M: Tree, layers: jax.Array) -> Tree:
  """The inverse of `take`: parameters with the fragment's part replaced."""
  params_M = dict(params_M)
  if "blocks" in part_M:
    params_M["blocks"] = jax.tree.map(
      lambda x, y: x.at[:, layers].set(y), params_M["blocks"], part_M["blocks"]
    )
  if "embed" in part_M:
    params_M["embed"] = part_M["embed"]
  return params_M


def merge_part(x_M: jax.Array, theta: jax.Array, mask_M: jax.Array, alpha: float):
  """theta_m <- alpha theta_m + (1 - alpha) theta where mask_M (line 12)."""
  mixed = theta[None]
  if alpha:
    mixed = alpha * x_M.astype(jnp.float32) + (1 - alpha) * mixed
  mask = mask_M.reshape(-1, *[1] * theta.ndim)
  return jnp.where(mask, mixed.astype(x_M.dtype), x_M)


def make_outer(c, mesh) -> Outer:
  """Builds the outer step of a resolved config on a mesh.

  Raises:
    ConfigError: a name is unknown, or the transport does not fit the processes.
  """
  optimizer, codec = make_optimizer(c), make_codec_from_config(c)
  alpha, replicas = c.overlap.alpha, config_lib.trained_replicas(c)
  fragments = config_lib.make_fragments(c)
  layers = tuple(np.asarray(f.layers, np.int32) for f in fragments)
  transport = make_transport(c, mesh, lambda m: make_update(c, optimizer, codec, m))

  @jax.jit
  def init_fragment(params_M, like, layers):
    theta = jax.tree.map(
      lambda x: x[0].astype(jnp.float32), take(params_M, like, layers)
    )
    return _constrain(mesh, theta, optimizer.init(theta))

  def fresh(params_M: Tree, keep=lambda tree: tree) -> OuterState:
    """Outer parameters = the first replica's, which all replicas share at start."""
    pairs = [
      keep(init_fragment(params_M, structure(f), ids))
      for f, ids in zip(fragments, layers)
    ]
    thetas, opt_states = zip(*pairs)
    return OuterState(tuple(thetas), tuple(opt_states), {})

  @jax.jit
  def send(params_M, theta, layers, key):
    """Lines 7 and 8: outer gradients, encoded per replica and unreduced."""
    delta_M = jax.tree.map(
      lambda t, x_M: t[None] - x_M.astype(jnp.float32),
      theta,
      take(params_M, theta, layers),
    )
    keys_M = jax.vmap(lambda m: jax.random.fold_in(key, m))(jnp.arange(replicas))
    payload = exchange.encode(codec, mesh, delta_M, keys_M)
    # What the codes lose, from the sender's own decoding: nothing is exchanged.
    sent_M = exchange.decode_own(codec, mesh, payload, theta)
    error_M = _norms(jax.tree.map(jnp.subtract, sent_M, delta_M))
    delta_norm_M = _norms(delta_M)
    metrics = {
      "outer_grad_norm": delta_norm_M,
      "quantization_error": error_M / jnp.maximum(delta_norm_M, 1e-30),
    }
    return payload, metrics

  def merge(params_M, theta, layers, mask_M):
    """Line 12, for the replicas in `mask_M`."""
    part_M = jax.tree.map(
      lambda x_M, t: merge_part(x_M, t, mask_M, alpha),
      take(params_M, theta, layers),
      theta,
    )
    return put(params_M, part_M, layers)

  return Outer(
    schedule=config_lib.make_schedule(c),
    fragments=fragments,
    layers=layers,
    seed=c.seed,
    exchange=c.wire.exchange,
    transport=transport,
    fresh=fresh,
    init=lambda params_M: fresh(params_M, transport.keep),
    send=send,
    merge=jax.jit(merge, donate_argnums=0),
  )


def make_update(c, optimizer: optax.GradientTransformation, codec, mesh: Mesh):
  """Lines 10 and 11: decode, mean in float32, outer optimizer.

  Args:
    c: resolved config.
    optimizer: the outer optimizer.
    codec: from `make_codec_from_config`.
    mesh: where the outer state lies.

  Returns:
    update(theta, opt_state, payload) -> (theta, opt_state, metrics), not compiled.
  """

  def update(theta, opt_state, payload):
    if c.wire.exchange == "psum":
      delta, cosine = exchange.reduce_own(codec, mesh, payload, theta, c.replicas)
    else:
      delta_M = exchange.decode_all(codec, mesh, payload, theta)
      delta, cosine = _mean(delta_M), _mean_cosine(delta_M)
    updates, opt_state = optimizer.update(delta, opt_state, theta)
    theta, opt_state = _constrain(mesh, optax.apply_updates(theta, updates), opt_state)
    metrics = {
      "outer_grad_mean_norm": optax.tree.norm(delta),
      "outer_update_norm": optax.tree.norm(updates),
      "outer_grad_cosine": cosine,
    }
    return theta, opt_state, metrics

  return update


def _constrain(mesh: Mesh, theta: Tree, opt_state: Tree):
  return jax.lax.with_sharding_constraint(
    (theta, opt_state), mesh_lib.state_shardings(theta, opt_state, mesh)
  )


def assemble(outer: Outer, state: OuterState, like: Tree) -> Tree:
  """The outer parameters of the whole model, each fragment as of its last sync.

  Args:
    outer: from `make_outer`.
    state: outer state.
    like: parameters of one replica, or their shapes.

  Returns:
    One replica's tree, float32.
  """
  thetas = map(outer.transport.fetch, state.theta)
  return join(thetas, outer.layers, like, outer.transport.mesh)


def join(
  thetas: Iterable[Tree], layers: Iterable[np.ndarray], like: Tree, mesh: Mesh
) -> Tree:
  """The parameters of which each fragment holds a part.

  Args:
    thetas: parameters of the fragments, on the devices.
    layers: int32 (n,) per fragment.
    like: parameters of one replica, or their shapes.
    mesh: their devices.

  Returns:
    One replica's tree, float32, sharded over fsdp at every moment.
  """
  places = mesh_lib.shardings(like, mesh)
  leaves, treedef = jax.tree.flatten(like)
  shapes = tuple(x.shape for x in leaves)
  zeros = jax.jit(_zeros, static_argnums=0, out_shardings=jax.tree.leaves(places))
  full = jax.tree.unflatten(treedef, zeros(shapes))
  place = jax.jit(_place, donate_argnums=0, out_shardings=places)
  for theta, ids in zip(thetas, layers):
    full = place(full, theta, ids)
  return full


def _zeros(shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
  return [jnp.zeros(shape, jnp.float32) for shape in shapes]


def _place(full: Tree, theta: Tree, layers: jax.Array) -> Tree:
  one_M = lambda tree: jax.tree.map(lambda x: x[None], tree)
  return jax.tree.map(lambda x_M: x_M[0], put(one_M(full), one_M(theta), layers))


def structure(fragment: Fragment) -> dict[str, None]:
  """A tree like a fragment's, as `take` needs it."""
  keys = {"blocks": bool(fragment.layers), "embed": fragment.embed}
  return {key: None for key, present in keys.items() if present}


def _mean(delta_M: Tree) -> Tree:
  return jax.tree.map(lambda x_M: x_M.mean(axis=0), delta_M)


def _norms(tree_M: Tree) -> jax.Array:
  """Global L2 norm of each replica's tree, float32[M]."""
  return jax.vmap(optax.tree.norm)(tree_M)


def _mean_cosine(delta_M: Tree) -> jax.Array:
  """Mean cosine similarity over the pairs of replicas; NaN for M = 1.

  With unit vectors u_m, |sum u_m|^2 = M + sum over pairs i != j of cos_ij.
  """
  norms_M = jnp.maximum(_norms(delta_M), 1e-30)
  m = norms_M.shape[0]
  if m == 1:
    return jnp.float32(jnp.nan)
  total = jax.tree.map(lambda x_M: jnp.tensordot(1 / norms_M, x_M, axes=1), delta_M)
  return (optax.tree.norm(total) ** 2 - m) / (m * (m - 1))
