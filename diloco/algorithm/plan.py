"""The plan: all that the outer step needs besides arrays, in one dataclass.

The plan of data-parallel has no fragments, so nothing is ever sent or merged.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import TraceAnnotation
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Wrapped

from diloco.algorithm.optimizers import Outer, OuterTuned
from diloco.algorithm.placement import OnDevices
from diloco.algorithm.sync_metrics import Metrics
from diloco.mesh.sharding import FSDP, REPLICA
from diloco.spec import sizes
from diloco.spec.fields import WireConfig
from diloco.spec.fragments import Fragment
from diloco.spec.plugins import OuterStep
from diloco.spec.schedule import Schedule
from diloco.spec.shapes import Shapes
from diloco.util.types import PyTree
from diloco.wire import exchange
from diloco.wire.transport import Transport

if TYPE_CHECKING:
  from diloco.algorithm.state import InFlight


class Form(NamedTuple):
  """How the lines of Algorithm 2 are computed; `make.choose_form` makes it once.

  Attributes:
    send: lines 7 and 8, `outer.send` or `fused.send`.
    update: lines 10 and 11, `outer.update` or `fused.update`, in place or not.
    merge: line 12.
  """

  send: Wrapped
  update: Wrapped
  merge: Wrapped


@dataclasses.dataclass(frozen=True)
class Plan:
  """How a run synchronises its replicas.

  Attributes:
    schedule: which fragments are sent and received after which step.
    fragments: the P fragments, in the order in which they are sent.
    layers: layer indices of each fragment, int32 (n,).
    parameters: shapes of one replica's parameters.
    shapes: parameter shapes of each fragment.
    wire: compressor and number format of payloads.
    outer: the outer optimizer.
    tuned: learning rate and momentum of the outer optimizer.
    alpha: weight of a replica's own parameters in a merge.
    seed: seed of the compressors' random numbers.
    mesh: the device mesh.
    place: where the outer state lives, and where and when it is updated.
    transport: carries the payloads between replicas.
    form: how the lines are computed.
    step: lines 6 to 12; `outer.outer_step`, or that of a plug-in.
  """

  schedule: Schedule
  fragments: tuple[Fragment, ...]
  layers: tuple[np.ndarray, ...]
  parameters: Shapes
  shapes: tuple[Shapes, ...]
  wire: WireConfig
  outer: Outer
  tuned: OuterTuned
  alpha: float
  seed: int | jax.Array
  mesh: Mesh
  place: OnDevices
  transport: Transport
  form: Form
  step: OuterStep

  @property
  def replicas(self) -> int:
    return len(self.schedule.taus)

  def key(self, t: int, number: int) -> jax.Array:
    """Makes the PRNG key of fragment `number` after step t.

    The key depends only on the seed, t and the number. So the random numbers are the
    same in every part of a run, with every transport, and after a run resumes.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), t), number)

  def after_drain(self, step: int) -> "Plan":
    """Returns the plan of a run that was finished after `step` and is extended."""
    schedule = dataclasses.replace(self.schedule, drained=step)
    return dataclasses.replace(self, schedule=schedule)

  def sync_bytes(self, p: int) -> int:
    """Counts the bytes that one replica sends in one sync of fragment p."""
    return self._sync_bytes[p]

  @functools.cached_property
  def _sync_bytes(self) -> list[int]:
    args = (self.wire, self.replicas)
    fsdp = self.mesh.shape[FSDP]
    return [sizes.sync_bytes(*args, part, fsdp) for part in self.shapes]

  def payload(self, p: int, fsdp: int | None = None) -> jax.ShapeDtypeStruct:
    """Describes the shape and sharding of fragment p's encoded payload.

    Args:
      fsdp: size of the fsdp axis that encoded the payload; None: as in this mesh.
    """
    own = self.mesh.shape[FSDP]
    fsdp = own if fsdp is None else fsdp
    size = sizes.payload_bytes(self.wire, self.shapes[p], fsdp) // fsdp
    place = NamedSharding(self.mesh, P(REPLICA))
    return jax.ShapeDtypeStruct(
      (self.replicas, fsdp, size),
      jnp.uint8,
      sharding=exchange.encoded(self.mesh) if fsdp == own else place,
    )

  @property
  def largest(self) -> int:
    """The fragment with the largest payload."""
    return int(np.argmax([self.payload(p).size for p in range(len(self.fragments))]))

  def transmitted(self, p: int) -> jax.ShapeDtypeStruct:
    """Describes fragment p's payload when it has arrived; see `transport.carry`."""
    payload = self.payload(p)
    if not self.transport.overlaps:
      return payload
    there = exchange.transmitted(self.mesh)
    return jax.ShapeDtypeStruct(payload.shape, payload.dtype, sharding=there)

  def kind(self, p: int) -> dict[str, Any]:
    """Returns static arguments of jitted functions that handle fragment p."""
    present = {"wire": self.wire, "outer": self.outer, "mesh": self.mesh}
    return {"keys": tuple(self.shapes[p]), **present}

  def send(
    self,
    t: int,
    p: int,
    params_M: PyTree,
    theta: PyTree,
    codec_state: PyTree,
    first: int = 0,
  ) -> tuple[jax.Array, PyTree, Metrics]:
    """Lines 7 and 8 for fragment p after step t; see `outer.send`."""
    args = (theta, codec_state, self.layers[p], self.key(t, p), first)
    with TraceAnnotation("send"):
      return self.form.send(params_M, *args, wire=self.wire, mesh=self.mesh)

  def receive(
    self, theta: PyTree, opt_state: PyTree, flying: "InFlight"
  ) -> tuple[PyTree, PyTree, Metrics]:
    """Lines 10 and 11: carries the payloads, then updates a fragment on `place.mesh`.

    Donates theta and opt_state, except on hosts.
    """
    payload = flying.payload
    if not flying.arrived:
      with TraceAnnotation("exchange"):
        payload = self.transport.carry(payload)
    kind = {"wire": self.wire, "outer": self.outer, "mesh": self.place.mesh}
    with TraceAnnotation("receive"):
      return self.form.update(theta, opt_state, payload, self.tuned, **kind)

  def merge(
    self, p: int, params_M: PyTree, theta: PyTree, mask: Sequence[bool]
  ) -> PyTree:
    """Line 12 for fragment p; theta is on the devices."""
    mask_M = np.asarray(mask)
    with TraceAnnotation("merge"):
      return self.form.merge(params_M, theta, self.layers[p], mask_M, alpha=self.alpha)
