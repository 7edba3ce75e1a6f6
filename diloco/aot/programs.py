"""The training programs of a config, lowered from shapes and compiled for a mesh.

Nothing runs and nothing is allocated: the state is drawn as shapes with shardings, and
XLA compiles as it would on the machine.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from diloco.algorithm import optimizers
from diloco.algorithm.inner import fedpart_mask, inner_step
from diloco.algorithm.outer import merge, send, update
from diloco.algorithm.overlap import hidden_exchange
from diloco.algorithm.plan import Plan, make_plan
from diloco.algorithm.state import abstract_state
from diloco.aot import hlo
from diloco.config import Config, changed
from diloco.model import sharding
from diloco.wire.exchange import encoded, transmitted
from diloco.wire.transport import transmit


@dataclasses.dataclass(frozen=True)
class Program:
  """What one compiled program needs; sizes in bytes on one device.

  Attributes:
    name: what it does.
    compile_s: seconds to compile it here.
    arguments: of its inputs in device memory.
    temporaries: of what it makes and drops.
    peak: most that is alive at once, inputs and code included.
    flops: that XLA counts, once per loop; 0 if it does not say.
    crossing: bytes that one coordinate of the replica axis sends to the others.
    windows: when what crosses starts and ends; empty if compiled quickly.
    host: of its inputs and outputs in the host's memory.
  """

  name: str
  compile_s: float
  arguments: int
  temporaries: int
  peak: int
  flops: float
  crossing: float
  windows: list[hlo.Window]
  host: int


class Programs:
  """A config's training programs on a mesh, lowered one by one on request.

  Fragments of one shape share their programs; the largest fragment stands for all.

  Attributes:
    state: shapes and shardings of the training state, the outer state on the devices.
    fragment: the fragment with the largest payload.
    payload: shape of its payload; None for data-parallel.
    in_flight: most bytes on one device of fragments that are sent and not received:
      payloads and, if the outer state waits at the host, the part that is fetched.
    lower: {name: function that lowers the program}.
  """

  def __init__(self, c: Config, mesh: Mesh):
    self.c, self.mesh = c, mesh
    with jax.set_mesh(mesh):
      self._draw()

  def _draw(self) -> None:
    c, mesh = self.c, self.mesh
    # A described device has no memory at its host to keep anything in.
    plan = make_plan(changed(c, {"outer.offload": False}), mesh)
    self.state = s = abstract_state(c, mesh, plan)
    tokens = jax.ShapeDtypeStruct(
      (c.models, c.train.batch_size // c.models, c.model.seq_len),
      jnp.int32,
      sharding=sharding.batch_sharding(mesh, sharding.lead(c)),
    )
    trainable = None
    if c.outer.fedpart and plan is not None:
      trainable = fedpart_mask(c.model.num_layers, plan.fragments[:1])
    tuned = jax.eval_shape(lambda: jax.tree.map(jnp.float32, optimizers.tuned(c)))
    inner = (s.params, s.opt_state, tokens, trainable, tuned)
    self.lower: dict[str, Callable[[], Any]] = {
      "inner step": lambda: inner_step.lower(*inner, c=c)
    }
    self.fragment, self.payload, self.in_flight = 0, None, 0
    if plan is None or s.outer is None:
      return
    payloads = [plan.payload(p) for p in range(len(plan.fragments))]
    self.fragment = p = int(np.argmax([x.size for x in payloads]))
    self.payload = payload = payloads[p]
    self.in_flight = self._most_in_flight(plan, payloads)
    theta, opt_state, layers = s.outer.theta[p], s.outer.opt_state[p], plan.layers[p]
    codec_state, key = s.outer.codec_state[p], jax.eval_shape(lambda: jax.random.key(0))
    everyone = np.ones(c.replicas, bool)
    self.lower["send"] = lambda: send.lower(
      s.params, theta, codec_state, layers, key, wire=c.wire, mesh=mesh
    )
    self.lower["merge"] = lambda: merge.lower(
      s.params, theta, layers, everyone, alpha=plan.alpha
    )
    if plan.home.at_hosts:
      return  # The hosts exchange and update.
    hides = plan.transport.hides
    sent = _placed(payload, transmitted(mesh) if hides else encoded(mesh))
    self.lower["update"] = lambda: update.lower(
      theta, opt_state, sent, wire=c.wire, outer=c.outer, mesh=mesh
    )
    if hides:
      self.lower["exchange alone"] = lambda: transmit.lower(payload, mesh=mesh)
    if c.outer.offload:
      self._lower_copies(theta, opt_state)
    steps = plan.schedule.longest_hiding()
    if steps and hides:
      count = jax.ShapeDtypeStruct((), jnp.int32)
      batches = [tokens] * steps
      self.lower[f"exchange, {steps} inner step{'s' * (steps > 1)}"] = lambda: (
        hidden_exchange.lower(
          count,
          s.params,
          s.opt_state,
          batches,
          trainable,
          tuned,
          [payload],
          c=c,
          mesh=mesh,
        )
      )

  def _most_in_flight(self, plan: Plan, payloads: list[jax.ShapeDtypeStruct]) -> int:
    """See `in_flight`."""
    c, s = self.c, self.state.outer
    assert s is not None
    place = transmitted(self.mesh) if plan.transport.hides else encoded(self.mesh)
    kept = [nbytes(_placed(x, place)) for x in payloads]
    if c.outer.offload:
      kept = [k + nbytes(o) for k, o in zip(kept, zip(s.theta, s.opt_state))]
    one_round = range(2 * c.sync_every, 3 * c.sync_every)
    return max(sum(kept[p] for p in plan.schedule.in_flight(t)) for t in one_round)

  def _lower_copies(self, theta, opt_state) -> None:
    """The copies of a fragment's outer state from the host and back."""
    here = jax.tree.map(lambda x: x.sharding, (theta, opt_state))
    there = jax.tree.map(lambda at: at.with_memory_kind("pinned_host"), here)
    waiting = jax.tree.map(
      lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
      (theta, opt_state),
      there,
    )
    copy = lambda to: jax.jit(lambda tree: jax.device_put(tree, to), out_shardings=to)
    self.lower["fetch from host"] = lambda: copy(here).lower(waiting)
    self.lower["back to host"] = lambda: copy(there).lower((theta, opt_state))

  def compile(self, name: str, quick: bool = False) -> Program:
    """Compiles one program and measures it.

    Args:
      name: a key of `lower`.
      quick: whether XLA compiles with its least effort: a fifth of the time, about
        as much memory, and nothing overlaps.

    Raises:
      jax.errors.JaxRuntimeError: XLA refuses it, for example for its memory.
    """
    with jax.set_mesh(self.mesh):
      lowered = self.lower[name]()
      start = time.perf_counter()
      effort = {"exec_time_optimization_effort": -1.0} if quick else None
      compiled = lowered.compile(compiler_options=effort)
      seconds = time.perf_counter() - start
    text, memory = compiled.as_text(), compiled.memory_analysis()
    return Program(
      name=name,
      compile_s=seconds,
      arguments=memory.argument_size_in_bytes,
      temporaries=memory.temp_size_in_bytes,
      peak=memory.peak_memory_in_bytes + memory.generated_code_size_in_bytes,
      flops=(compiled.cost_analysis() or {}).get("flops", 0.0),
      crossing=hlo.replica_bytes(text, self.mesh),
      windows=[] if quick else hlo.windows(text, self.mesh),
      host=memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes,
    )


def _placed(x, sharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def nbytes(tree) -> int:
  """Bytes of a tree of placed shapes on one device."""
  shard = lambda x: x.sharding.shard_shape(x.shape) if x.sharding else x.shape
  return sum(math.prod(shard(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
