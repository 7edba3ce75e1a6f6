"""Makes a plan; this is where the code for every part of the outer step is chosen."""

from jax.sharding import Mesh

from diloco.algorithm import fused, outer
from diloco.algorithm.diagnostics import DiagnosedPlan
from diloco.algorithm.optimizers import Outer, outer_shardings, outer_tuned
from diloco.algorithm.placement import Placement, make_placement
from diloco.algorithm.plan import Form, OuterStep, Plan
from diloco.config import Config
from diloco.mesh.sharding import abstract
from diloco.spec import plugins, shapes
from diloco.spec.fields import WireConfig
from diloco.spec.fragments import Fragment
from diloco.spec.schedule import Schedule
from diloco.spec.shapes import Shapes
from diloco.wire.transport import make_transport


def build_plan(
  schedule: Schedule,
  fragments: tuple[Fragment, ...],
  parameters: Shapes,
  mesh: Mesh,
  *,
  wire: WireConfig,
  optimizer: Outer,
  alpha: float,
  seed: int,
  transport: str,
  offload: bool,
  own_outer: bool,
  step: OuterStep | None = None,
  diagnostics_every: int = 0,
) -> Plan:
  """Makes a plan.

  Args:
    schedule: when fragments are sent and received.
    fragments: which parameters are sent together.
    parameters: shapes of one replica's parameters.
    mesh: the replica x fsdp mesh.
    wire: compressor and number format of payloads.
    optimizer: the outer optimizer.
    alpha: weight of a replica's own parameters in a merge.
    seed: seed of the compressors' random numbers.
    transport: a name in `plugins.TRANSPORTS`.
    offload: whether the outer state lives in pinned memory.
    own_outer: whether every replica has outer parameters of its own.
    step: lines 6 to 12; None: those of Algorithm 2.
    diagnostics_every: measures every n-th sync of each fragment; 0: none.

  Raises:
    ConfigError: the transport or pinned memory does not fit the machine, or the outer
      optimizer cannot step these parameters.
  """
  carrier = make_transport(transport, mesh, wire.exchange == "gather")
  placement = make_placement(mesh, carrier.hosts, offload)
  parts = tuple(f.shapes(parameters) for f in fragments)
  for part in parts:  # Finds mistakes in the optimizer; computes nothing.
    outer_shardings(optimizer, abstract(part, "float32"), mesh)
  kind = DiagnosedPlan if diagnostics_every else Plan
  return kind(
    schedule=schedule,
    fragments=fragments,
    layers=tuple(f.indices for f in fragments),
    parameters=parameters,
    shapes=parts,
    wire=wire,
    outer=optimizer,
    tuned=outer_tuned(optimizer),
    own_outer=own_outer,
    alpha=alpha,
    seed=seed,
    diagnostics_every=diagnostics_every,
    mesh=mesh,
    placement=placement,
    transport=carrier,
    form=choose_form(wire, optimizer, placement, own_outer),
    step=step or plugins.EXCHANGES[wire.exchange].outer_step or outer.outer_step,
  )


def make_plan(c: Config, mesh: Mesh, parameters: Shapes | None = None) -> Plan:
  """Makes the plan of a config on a mesh.

  Args:
    parameters: shapes of one replica's parameters; None: those of the model.

  Raises:
    ConfigError: see `build_plan`.
  """
  steps = (extension.outer_step(c) for extension in c.extensions)
  fragments = c.make_fragments()
  return build_plan(
    c.make_schedule(),
    fragments,
    parameters or shapes.parameters(c.model),
    mesh,
    wire=c.wire,
    optimizer=c.outer,
    alpha=c.overlap.alpha,
    seed=c.seed,
    # data_parallel sends nothing, so it has no use for hosts.
    transport=c.overlap.transport if fragments else "device",
    offload=c.outer.offload and bool(fragments),
    own_outer=c.own_outer,
    step=next(filter(None, steps), None),
    diagnostics_every=c.log.diagnostics_every,
  )


def choose_form(
  wire: WireConfig, optimizer: Outer, placement: Placement, own_outer: bool = False
) -> Form:
  """Chooses the plain or the fused form of lines 7 and 8, and of lines 10 and 11.

  Args:
    own_outer: whether every replica has outer parameters of its own.
  """
  sends = outer if own_outer or not fused.can_send(wire, placement.devices) else fused
  updates = fused if fused.can_update(wire, optimizer, placement.mesh) else outer
  update = updates.update if placement.at_hosts else updates.update_in_place
  return Form(sends.send, update, outer.merge)
