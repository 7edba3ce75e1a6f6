"""The training programs of a config, lowered from shapes and compiled for a mesh.

Nothing runs and nothing is allocated: the state is drawn as shapes with shardings, and
XLA compiles as it would on the machine.
"""

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from diloco import config as config_lib
from diloco.algorithm import inner, outer, state, sync
from diloco.aot import hlo
from diloco.model import sharding as mesh_lib
from diloco.wire.transport import DeviceTransport


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
    state: shapes and shardings of the training state.
    fragment: the fragment with the largest payload.
    payload: shape of its payload.
    in_flight: most bytes on one device of fragments that are sent and not received:
      payloads and, where the outer state waits at the host, what is fetched of it.
    lower: {name: function that lowers the program}.
  """

  def __init__(self, c, mesh):
    self.c, self.mesh = c, mesh
    with jax.set_mesh(mesh):
      self._draw()

  def _draw(self) -> None:
    c, mesh = self.c, self.mesh
    optimizer = inner.make_optimizer(c)
    step = inner.make_inner_step(c)
    streaming = c.algorithm != "data_parallel"
    # A described device has no memory at its host to keep anything in.
    on_devices = ml_collections.ConfigDict(c.to_dict())
    on_devices.outer.offload = False
    plan = outer.make_outer(on_devices, mesh) if streaming else None
    self.state = s = state.abstract_state(c, mesh, optimizer, plan)
    m = config_lib.trained_replicas(c)
    tokens = jax.ShapeDtypeStruct(
      (m, c.train.batch_size // m, c.model.seq_len),
      jnp.int32,
      sharding=mesh_lib.batch_sharding(mesh, not streaming),
    )
    fedpart = c.outer.fedpart and plan is not None
    trainable = None
    if fedpart:
      like = state.abstract_params(c)
      trainable = jax.eval_shape(
        lambda: inner.fedpart_mask(like, config_lib.make_fragments(c)[:1])
      )
    values = jax.eval_shape(lambda: jax.tree.map(jnp.float32, inner.tuned(c)))
    self.lower = {
      "inner step": lambda: step.lower(s.params, s.opt_state, tokens, trainable, values)
    }
    self.fragment, self.payload, self.in_flight = 0, None, 0
    if plan is None or s.outer is None:
      return
    thetas = s.outer.theta
    payloads = [
      sync.payload_struct(plan, p, s.params, theta) for p, theta in enumerate(thetas)
    ]
    self.fragment = p = int(np.argmax([x.size for x in payloads]))
    self.payload = payload = payloads[p]
    self.in_flight = self._most_in_flight(plan, payloads)
    theta, opt_state, layers = thetas[p], s.outer.opt_state[p], plan.layers[p]
    key = jax.eval_shape(lambda: jax.random.key(0))
    everyone = np.ones(c.replicas, bool)
    self.lower["send"] = lambda: plan.send.lower(s.params, theta, layers, key)
    self.lower["merge"] = lambda: plan.merge.lower(s.params, theta, layers, everyone)
    transport = plan.transport
    if not isinstance(transport, DeviceTransport):
      return  # The hosts exchange and update.
    sent = _placed(payload, transport.transmitted)
    self.lower["update"] = lambda: transport.update.lower(theta, opt_state, sent)
    if transport.hides():
      self.lower["exchange alone"] = lambda: transport.transmit.lower(payload)
    if c.outer.offload:
      self._lower_copies(theta, opt_state)
    steps = hidden_steps(c)
    if steps and transport.hides():
      hidden = sync.make_hidden_exchange(step, mesh)
      count = jax.ShapeDtypeStruct((), jnp.int32)
      self.lower[f"exchange, {steps} inner step{'s' * (steps > 1)}"] = lambda: (
        hidden.lower(
          count, s.params, s.opt_state, [tokens] * steps, trainable, [payload], values
        )
      )

  def _most_in_flight(self, plan: outer.Outer, payloads) -> int:
    """See `in_flight`."""
    c, s = self.c, self.state.outer
    assert s is not None
    place = getattr(plan.transport, "transmitted", plan.transport.encoded)
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


def hidden_steps(c) -> int:
  """Most inner steps that one program runs beside an exchange; 0 if none does."""
  if c.algorithm == "data_parallel" or c.overlap.transport != "device":
    return 0
  return config_lib.make_schedule(c).longest_hiding()


def nbytes(tree) -> int:
  """Bytes of a tree of placed shapes on one device."""
  shard = lambda x: x.sharding.shard_shape(x.shape) if x.sharding else x.shape
  return sum(math.prod(shard(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
