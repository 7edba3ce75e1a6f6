"""Makes the plan: all that the outer step needs besides arrays, in one dataclass.

The plan of data-parallel has no fragments, so nothing is ever sent or merged.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.algorithm.home import Home, make_home
from diloco.algorithm.jobs import Jobs
from diloco.algorithm.optimizers import Outer, OuterTuned, outer_shardings, outer_tuned
from diloco.config import Config
from diloco.mesh.sharding import FSDP, REPLICA, abstract
from diloco.spec import shapes, sizes
from diloco.spec.fields import WireConfig
from diloco.spec.schedule import Fragment, Schedule
from diloco.spec.shapes import Shapes
from diloco.wire import exchange
from diloco.wire.transport import Transport, make_transport


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
    tuned: its learning rate and momentum.
    own_outer: whether every replica has outer parameters of its own.
    alpha: weight of a replica's own parameters in a merge.
    seed: seed of the compressors' random numbers.
    diagnostics_every: syncs of a fragment between two with diagnostics; 0: none.
    mesh: the device mesh.
    home: where the outer state lives and is updated.
    transport: carries the payloads between replicas.
    jobs: decides when payloads are carried and outer state is updated.
  """

  schedule: Schedule
  fragments: tuple[Fragment, ...]
  layers: tuple[np.ndarray, ...]
  parameters: Shapes
  shapes: tuple[Shapes, ...]
  wire: WireConfig
  outer: Outer
  tuned: OuterTuned
  own_outer: bool
  alpha: float
  seed: int | jax.Array
  diagnostics_every: int
  mesh: Mesh
  home: Home
  transport: Transport
  jobs: Jobs

  @property
  def replicas(self) -> int:
    return len(self.schedule.taus)

  def key(self, t: int, number: int) -> jax.Array:
    """Makes the PRNG key of fragment `number` after step t.

    It depends only on the seed, t and the number, so sites, transports and resumed runs
    draw alike.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), t), number)

  def after_drain(self, step: int) -> "Plan":
    """Returns the plan of a run that was finished after `step` and is extended."""
    schedule = dataclasses.replace(self.schedule, drained=step)
    return dataclasses.replace(self, schedule=schedule)

  def is_diagnosed(self, p: int, t: int) -> bool:
    """Returns whether the sync of fragment p that is sent after step t is diagnosed.

    This is the first sync of the fragment, then one in `diagnostics_every`.
    """
    every, number = self.diagnostics_every, self.schedule.num_sends(p, t)
    return bool(every) and (number - 1) % every == 0

  def sync_bytes(self, p: int) -> int:
    """Counts the bytes that one replica sends in one sync of fragment p."""
    fsdp = self.mesh.shape[FSDP]
    return sizes.sync_bytes(self.wire, self.replicas, self.shapes[p], fsdp)

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

  def kind(self, p: int) -> dict:
    """Returns static arguments of jitted functions that handle fragment p."""
    present = {"wire": self.wire, "outer": self.outer, "mesh": self.mesh}
    return {"keys": tuple(self.shapes[p]), "each": self.own_outer, **present}


def make_plan(
  c: Config,
  mesh: Mesh,
  parameters: Shapes | None = None,
  fragments: tuple[Fragment, ...] | None = None,
  outer: optax.GradientTransformation | None = None,
) -> Plan:
  """Makes the plan of a config on a mesh.

  Args:
    parameters: shapes of one replica's parameters; None: those of the model.
    fragments: which of these parameters are sent together; None: those of the config.
    outer: the outer optimizer; None: that of the config.

  Raises:
    ConfigError: overlap.transport or outer.offload does not fit the machine, or the
      outer optimizer cannot step these parameters.
  """
  transport = make_transport(c, mesh)
  schedule = c.make_schedule()
  if fragments:
    schedule = dataclasses.replace(schedule, num_fragments=len(fragments))
  fragments, optimizer = fragments or c.make_fragments(), outer or c.outer
  parameters = parameters or shapes.parameters(c.model)
  parts = tuple(f.shapes(parameters) for f in fragments)
  for part in parts:  # Finds mistakes in the optimizer; computes nothing.
    outer_shardings(optimizer, abstract(part, "float32"), mesh)
  return Plan(
    schedule=schedule,
    fragments=fragments,
    layers=tuple(f.indices for f in fragments),
    parameters=parameters,
    shapes=parts,
    wire=c.wire,
    outer=optimizer,
    tuned=outer_tuned(optimizer),
    own_outer=c.own_outer,
    alpha=c.overlap.alpha,
    seed=c.seed,
    diagnostics_every=c.log.diagnostics_every,
    mesh=mesh,
    home=make_home(c, mesh, transport.hosts),
    transport=transport,
    jobs=Jobs(background=transport.hosts is not None),
  )
