"""What the outer step needs besides arrays: one dataclass, made from a config."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.algorithm.home import Home, make_home
from diloco.algorithm.jobs import Background, Foreground, Jobs
from diloco.algorithm.schedule import Fragment, Schedule
from diloco.config import Config
from diloco.config.fields import OuterConfig, WireConfig
from diloco.model import shapes
from diloco.model.shapes import Shapes
from diloco.model.sharding import FSDP, REPLICA
from diloco.wire import exchange, sizes
from diloco.wire.transport import HostTransport, Transport, make_transport


@dataclasses.dataclass(frozen=True)
class Plan:
  """How a run synchronises its replicas.

  Attributes:
    schedule: which fragments are sent and received after which step.
    fragments: the P fragments, in the order in which they are sent.
    layers: int32 (n,) per fragment: its layers.
    parameters: shapes of one replica's parameters.
    shapes: per fragment, shapes of its parameters.
    wire: what is sent.
    outer: the outer optimizer and its rate.
    alpha: weight of the local parameters in a merge.
    seed: of the compressors' random numbers.
    mesh: the device mesh.
    home: where the outer state lives and is updated.
    transport: carries payloads.
    jobs: when payloads are carried and outer state is updated.
  """

  schedule: Schedule
  fragments: tuple[Fragment, ...]
  layers: tuple[np.ndarray, ...]
  parameters: Shapes
  shapes: tuple[Shapes, ...]
  wire: WireConfig
  outer: OuterConfig
  alpha: float
  seed: int
  mesh: Mesh
  home: Home
  transport: Transport
  jobs: Jobs

  @property
  def replicas(self) -> int:
    return len(self.schedule.taus)

  def sync_bytes(self, p: int) -> int:
    """Bytes that one replica sends in one sync of fragment p."""
    fsdp = self.mesh.shape[FSDP]
    return sizes.sync_bytes(self.wire, self.replicas, self.shapes[p], fsdp)

  def payload(self, p: int, fsdp: int | None = None) -> jax.ShapeDtypeStruct:
    """Shape and sharding of fragment p's encoded payload.

    Args:
      p: the fragment.
      fsdp: axis of the mesh that encoded it; None: that of this mesh.
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
    """What fragments must have in common to share their programs, as arguments."""
    present = {"wire": self.wire, "outer": self.outer, "mesh": self.mesh}
    return {"keys": tuple(self.shapes[p]), **present}


def make_plan(c: Config, mesh: Mesh, parameters: Shapes | None = None) -> Plan | None:
  """The plan of a config on a mesh; None for data-parallel.

  Args:
    c: the config.
    mesh: the device mesh.
    parameters: shapes of one replica's parameters; default those of the model.

  Raises:
    ConfigError: overlap.transport or outer.offload do not fit the machine.
  """
  if c.data_parallel:
    return None
  transport = make_transport(c, mesh)
  hosts = transport.hosts if isinstance(transport, HostTransport) else None
  fragments = c.make_fragments()
  parameters = parameters or shapes.parameters(c.model)
  return Plan(
    schedule=c.make_schedule(),
    fragments=fragments,
    layers=tuple(f.indices for f in fragments),
    parameters=parameters,
    shapes=tuple(f.shapes(parameters) for f in fragments),
    wire=c.wire,
    outer=c.outer,
    alpha=c.overlap.alpha,
    seed=c.seed,
    mesh=mesh,
    home=make_home(c, mesh, hosts),
    transport=transport,
    jobs=Background() if hosts else Foreground(),
  )
