"""Delayed averaging: a replica keeps the inner steps that it took during an exchange.

  wire.compressor = "delayed_averaging(of='quantize')"

A fragment arrives tau inner steps after it was sent. Line 12 with alpha = 0 then drops
these steps: theta_m <- theta. Delayed averaging adds them to the outer parameters:

  theta_m <- theta + theta_m(t) - theta_m(t - tau)

So the next outer gradient covers all H steps, and nothing more is sent. The outer
gradient of the last send tells theta_m(t - tau). It is kept as compressor state: one
more copy of the parameters in float32, which is sharded, saved and restored exactly.
`of` is the compressor that codes it.

Delayed Gradient Averaging (Zhu et al., NeurIPS 2021) does this without outer optimizer:
when the mean of the updates arrives, a replica puts it in place of its own update, and
keeps what it trained since. We read the abstract and a description of the formula.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from diloco.algorithm.slices import outer_gradient, put, take
from diloco.algorithm.state import Event, OuterState, TrainState
from diloco.algorithm.streaming import Streaming
from diloco.config import Config
from diloco.errors import ConfigError
from diloco.spec import plugins, sizes
from diloco.spec.call_text import parse
from diloco.spec.fields import WireConfig
from diloco.spec.plugins import Call, Compressor, OuterStep
from diloco.util.types import PyTree
from diloco.wire import compressors

NAME = "delayed_averaging"


def delayed_averaging(of: str) -> Compressor:
  """Makes the compressor; its state is (state of the other, last outer gradient).

  Args:
    of: the other compressor.

  Raises:
    ConfigError: it does not exist.
  """
  sizes.check(WireConfig(of, "fp32"))
  compressor = compressors.get(of)

  def init(x: Array) -> tuple[PyTree, Array]:
    return compressor.init(x), jnp.zeros_like(x)

  def encode(
    wire: WireConfig, x_NxS: Array, state: PyTree, row: int, key: Array
  ) -> tuple[Array, PyTree]:
    code, own = compressor.encode(wire, x_NxS, state[0], row, key)
    return code, (own, x_NxS)

  return compressor._replace(init=init, encode=encode)


@dataclasses.dataclass(frozen=True)
class DelayedAveraging(plugins.Extension):
  """Delayed averaging has no fields of its own; wire.compressor chooses it."""

  def chosen(self, c: Config) -> bool:
    return parse("wire.compressor", c.wire.compressor)[0] == NAME

  def check(self, c: Config) -> None:
    if not self.chosen(c):
      return
    start, transport = f"wire.compressor is {c.wire.compressor}", c.overlap.transport
    needs = {  # Field: value, whether it works, what works.
      "overlap.alpha": (c.overlap.alpha, not c.overlap.alpha, "0"),
      "overlap.taus": (c.overlap.taus, len({*c.overlap.taus}) == 1, "equal ones"),
      "overlap.transport": (
        transport,
        transport in ("device", "host"),
        "device or host",
      ),
    }
    for field, (value, works, choice) in needs.items():
      if not works:
        raise ConfigError(
          f"{start}, but {field} is {value}; choose {choice}, or another compressor."
        )

  def effects(self, c: Config) -> dict[str, tuple[bool, str]]:
    useless = self.chosen(c) and not any(c.overlap.taus)
    reason = "overlap.tau is 0: no inner step runs during an exchange"
    return {"wire.compressor": (useless, reason)}

  def outer_step(self, c: Config, step: OuterStep) -> OuterStep:
    return partial(outer_step, step=step) if self.chosen(c) else step

  def programs(self, c: Config, sync: Streaming, state: TrainState) -> Iterator[Call]:
    if not self.chosen(c):
      return
    p, outer, params = sync.largest, state.outer, state.params
    theta, codec, layers = outer.theta[p], outer.codec_state[p], sync.layers[p]
    held = {"parameters": params, "outer parameters": theta, "compressor": codec}
    args = (params, theta, codec, layers)
    yield Call("steps since the send", held, steps_since, args, {})
    steps = jax.eval_shape(steps_since, *args)
    yield Call("keep", {"parameters": params}, keep, (params, steps, layers), {})


plugins.register("wire.compressor", NAME, delayed_averaging)
plugins.register("fields", NAME, DelayedAveraging)


def outer_step(
  sync: Streaming,
  t: int,
  params_M: PyTree,
  state: OuterState,
  last_send: int | None = None,
  *,
  step: OuterStep,
) -> tuple[PyTree, OuterState, list[Event]]:
  """Runs `step`; then adds the steps since the send to the fragments that arrived."""
  kept = dict[int, PyTree]()
  sent = sync.schedule.sends(t, last_send)  # With tau = 0 there are no such steps.
  for p, _ in sync.schedule.arrivals(t, last_send):
    if p not in sent:
      theta = sync.place.fetch(state.theta[p])
      kept[p] = steps_since(params_M, theta, state.codec_state[p], sync.layers[p])
  params_M, state, events = step(sync, t, params_M, state, last_send)
  for p, steps_M in kept.items():
    params_M = keep(params_M, steps_M, sync.layers[p])
  return params_M, state, events


@jax.jit
def steps_since(
  params_M: PyTree, theta: PyTree, codec_state: PyTree, layers: np.ndarray
) -> PyTree:
  """Returns theta_m(t) - theta_m(t - tau) of a fragment that was sent at t - tau.

  Args:
    params_M: parameters of all replicas.
    theta: outer parameters of the fragment, as they were at the send.
    codec_state: compressor state of the fragment.
    layers: int32 (n,), the fragment's layers.

  Returns:
    float32 leaves (M, n, ...) under `blocks`, else (M, ...).
  """

  def one(theta: Array, x_M: Array, state: PyTree) -> Array:
    return state[1] - outer_gradient(theta, x_M)  # That of the send, less that of now.

  return jax.tree.map(one, theta, take(params_M, theta, layers), codec_state)


@partial(jax.jit, donate_argnums=0)
def keep(params_M: PyTree, steps_M: PyTree, layers: np.ndarray) -> PyTree:
  """Adds steps to a fragment of the replicas' parameters, which are donated."""
  return put(params_M, steps_M, layers, lambda x_M, s_M: (x_M + s_M).astype(x_M.dtype))
