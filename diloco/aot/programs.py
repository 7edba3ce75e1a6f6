"""Lowers the training programs of a config from shapes, and compiles them for a mesh.

No program runs and no array is allocated. The state consists of shapes with shardings,
and XLA compiles as it would on the real devices.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Lowered, Wrapped

from diloco.algorithm import outer as outer_lines
from diloco.algorithm.inner import inner_step
from diloco.algorithm.method import Method, overlapped_exchange
from diloco.algorithm.optimizers import tuned
from diloco.algorithm.placement import OnHosts
from diloco.algorithm.state import OuterState
from diloco.algorithm.streaming import Streaming, make_streaming
from diloco.aot import hlo
from diloco.config import Config, changed
from diloco.evaluate import heldout
from diloco.mesh import sharding
from diloco.util.types import PyTree
from diloco.wire.transport import transmit

_LEAST = 9  # XLA's number for its optimization level O0.


@dataclasses.dataclass(frozen=True)
class Program:
  """What XLA reports about one compiled program.

  Attributes:
    name: name of the program.
    compile_s: seconds to compile it here.
    memory: XLA's memory statistics, in bytes on one device.
    peak: the most bytes of device memory at once, including inputs and code.
    total: `peak`, plus the state on the device that is not an argument of the program.
    crossing: bytes that one coordinate of the replica axis sends to the others.
    windows: how many loops overlap each collective between replicas; empty if `quick`.
  """

  name: str
  compile_s: float
  memory: Any
  peak: int
  total: int
  crossing: float
  windows: list[hlo.Window]


class Programs:
  """The training programs of a config on a mesh, lowered and compiled on request.

  Fragments of one shape share their programs. The fragment with the largest payload
  represents all fragments.

  Attributes:
    mesh: the device mesh.
    state: shapes and shardings of the training state, without outer.offload.
    fragment: the fragment with the largest payload.
    payload: shape of that payload; None for data-parallel.
    on_device: bytes of each part of the state in the memory of one device. The part
      "in flight" is the most bytes that the fragments in flight take at once: their
      payloads and, with outer.offload, their outer state.
    on_host: bytes of each part of the state in the host's memory, per device.
    lower: {name: function that lowers the program}.
  """

  def __init__(self, c: Config, mesh: Mesh):
    self.mesh = mesh
    self.fragment = 0
    self.payload: jax.ShapeDtypeStruct | None = None
    self.lower: dict[str, Callable[[], Lowered]] = {}
    self._held = dict[str, int]()  # {program: bytes of `on_device` in its arguments}.
    with jax.set_mesh(mesh):
      # Devices that are only described have no host memory for outer.offload.
      sync = make_streaming(changed(c, {"outer.offload": False}), mesh)
      self.state = Method(c, sync).abstract()
      arrays = (self.state.params, self.state.opt_state)
      parts = ("parameters", "inner optimizer")
      self.on_device = dict(zip(parts, map(nbytes, arrays)))
      self.on_host: dict[str, int] = {}
      tokens = jax.ShapeDtypeStruct(
        (c.models, c.train.batch_size // c.models, c.model.seq_len),
        jnp.int32,
        sharding=sharding.batch_sharding(mesh, c.one_model),
      )
      both = dict(zip(parts, arrays))
      self._add("inner step", both, inner_step, *arrays, tokens, tuned(c), c=c)
      if c.joint_steps:
        warm = partial(self._add, "joint step", both, inner_step)
        warm(*arrays, tokens, tuned(c), c=c, averaged=True)
      if sync.fragments:
        self._add_outer_step(c, sync, self.state.outer)
      steps = sync.schedule.longest_overlap if sync.transport.overlaps else 0
      if steps:
        name = f"exchange, {steps} inner step{'s' * (steps > 1)}"
        count = jax.ShapeDtypeStruct((), jnp.int32)
        args = (count, *arrays, [tokens] * steps, tuned(c), [self.payload])
        held = {**both, "in flight": self.payload}
        self._add(name, held, overlapped_exchange, *args, c=c, mesh=mesh)
      self._add_evaluation(c)

  def _add(
    self,
    name: str,
    held: Mapping[str, PyTree],
    function: Wrapped,
    *args: PyTree,
    **kwargs: object,
  ) -> None:
    """Adds a program.

    Args:
      held: {part of the state: its arrays that are arguments of the program}; parts
        that are not in `on_device` do not count.
      function: the jitted function.
      args, kwargs: the arguments of the function.
    """
    self.lower[name] = partial(function.lower, *args, **kwargs)
    here = [nbytes(tree) for part, tree in held.items() if part in self.on_device]
    self._held[name] = sum(here)

  def _add_evaluation(self, c: Config) -> None:
    """Adds the program of a batch's loss, with a copy of one replica's parameters."""
    shape = (heldout.batch_size(c.eval.batch_size, self.mesh), c.model.seq_len)
    place = sharding.eval_sharding(self.mesh)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
    float32 = lambda x: jax.ShapeDtypeStruct(x.shape[1:], jnp.float32)
    one = jax.tree.map(float32, self.state.params)
    params = sharding.structs(one, sharding.shardings(one, self.mesh))
    args = (params, tokens, weights)
    self._add("evaluation", {}, heldout.sum_of_losses, *args, m=c.model)

  def _add_outer_step(self, c: Config, sync: Streaming, outer: OuterState) -> None:
    """Adds the programs of the outer step of the fragment with the largest payload."""
    self.fragment = p = sync.largest
    self.payload = sync.payload(p)
    payloads = [sync.transmitted(i) for i in range(len(sync.fragments))]
    away = c.outer.offload or isinstance(sync.place, OnHosts)
    place = self.on_host if away else self.on_device
    place["outer parameters"] = nbytes(outer.theta)
    place["outer optimizer"] = nbytes(outer.opt_state)
    if jax.tree.leaves(outer.codec_state):
      self.on_device["compressor"] = nbytes(outer.codec_state)
    if jax.tree.leaves(outer.own):
      self.on_device["plug-ins"] = nbytes(outer.own)
    kept = [nbytes(x) for x in payloads]
    if c.outer.offload:
      kept = [k + nbytes(o) for k, o in zip(kept, zip(outer.theta, outer.opt_state))]
    # A round after the first sends of all fragments, which a warm start delays.
    begin = max(sync.schedule.first_sends) + c.sync_every
    one_round = range(begin, begin + c.sync_every)
    in_flight = [sum(kept[i] for i in sync.schedule.in_flight(t)) for t in one_round]
    if any(in_flight):
      self.on_device["in flight"] = max(in_flight)

    theta, opt_state = outer.theta[p], outer.opt_state[p]
    if isinstance(sync.place, OnHosts):  # Send and merge take theta from the devices.
      theta = sharding.structs(theta, sharding.shardings(theta, self.mesh))
    params, layers = self.state.params, sync.layers[p]
    key = jax.eval_shape(lambda: jax.random.key(0))
    codec_state, everyone = outer.codec_state[p], np.ones(c.replicas, bool)
    wire = {"wire": c.wire, "mesh": self.mesh}
    merged = {"parameters": params, "outer parameters": theta}
    sent = merged | {"compressor": codec_state}
    for average in c.averages.values():
      for call in average.programs(sync, self.state):
        self._add(call.name, call.held, call.function, *call.args, **call.kwargs)
    mine = (params, theta, codec_state, layers, key)
    self._add("send", sent, sync.lines_7_8, *mine, **wire)
    here = (params, theta, layers, everyone)
    self._add("merge", merged, outer_lines.merge, *here, alpha=sync.alpha)
    if isinstance(sync.place, OnHosts):
      return  # The hosts exchange payloads and update theta.
    part = (theta, opt_state)
    held = {"outer parameters": theta, "outer optimizer": opt_state}
    held |= {"in flight": (*part, payloads[p]) if c.outer.offload else payloads[p]}
    args = (*part, payloads[p], sync.tuned)
    self._add("update", held, sync.lines_10_11, *args, outer=c.outer, **wire)
    if sync.transport.moves:
      alone = {"in flight": self.payload}
      self._add("exchange alone", alone, transmit, self.payload, mesh=self.mesh)
    if c.outer.offload:
      here = jax.tree.map(lambda x: x.sharding, part)
      there = jax.tree.map(lambda at: at.with_memory_kind("pinned_host"), here)
      copy = lambda to: jax.jit(lambda x: jax.device_put(x, to), out_shardings=to)
      fetched = sharding.structs(part, there)
      self._add("fetch from host", {}, copy(here), fetched)
      self._add("back to host", {"in flight": part}, copy(there), part)

  def compile(self, name: str, quick: bool = False) -> Program:
    """Compiles one program and measures it.

    Args:
      name: a key of `lower`.
      quick: whether XLA compiles with its least effort. This takes a fifth of the time
        of full effort. The program needs about as much memory as with full effort, but
        none of its collectives overlaps with compute.

    Raises:
      jax.errors.JaxRuntimeError: XLA refuses the program, perhaps for its memory.
    """
    effort: dict[str, Any] = {"optimization_level": _LEAST} if quick else {}
    with jax.set_mesh(self.mesh):
      lowered = self.lower[name]()
      start = time.perf_counter()
      compiled: Any = lowered.compile(compiler_options=effort)
      seconds = time.perf_counter() - start
    text, memory = str(compiled.as_text()), compiled.memory_analysis()
    peak = memory.peak_memory_in_bytes + memory.generated_code_size_in_bytes
    crossing = hlo.replica_bytes(text, self.mesh)
    windows = [] if quick else hlo.windows(text, self.mesh)
    total = peak + self.outside(name)
    return Program(name, seconds, memory, peak, total, crossing, windows)

  def outside(self, name: str) -> int:
    """Returns the bytes of state on a device that are not arguments of a program."""
    return sum(self.on_device.values()) - self._held[name]


def nbytes(tree: PyTree) -> int:
  """Returns the bytes that a tree of shapes with shardings takes on one device."""
  shard = lambda x: x.sharding.shard_shape(x.shape) if x.sharding else x.shape
  return sum(math.prod(shard(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
