"""Makes a plan: chooses, once, the form of every part of the outer step."""

import optax
from jax.sharding import Mesh

from diloco.algorithm import fused
from diloco.algorithm import outer as plain
from diloco.algorithm.diagnostics import DiagnosedPlan
from diloco.algorithm.optimizers import Outer, outer_shardings, outer_tuned
from diloco.algorithm.placement import Placement, make_placement
from diloco.algorithm.plan import Form, Plan
from diloco.config import Config
from diloco.mesh.sharding import abstract
from diloco.spec import plugins, shapes
from diloco.spec.fields import WireConfig
from diloco.spec.schedule import Fragment, Schedule
from diloco.spec.shapes import Shapes
from diloco.wire.transport import make_transport


def make_plan(c: Config, mesh: Mesh, parameters: Shapes | None = None) -> Plan:
  """Makes the plan of a config on a mesh.

  Args:
    parameters: shapes of one replica's parameters; None: those of the model.

  Raises:
    ConfigError: see `build_plan`.
  """
  parameters = parameters or shapes.parameters(c.model)
  return build_plan(c, mesh, c.make_schedule(), c.make_fragments(), parameters)


def build_plan(
  c: Config,
  mesh: Mesh,
  schedule: Schedule,
  fragments: tuple[Fragment, ...],
  parameters: Shapes,
  optimizer: optax.GradientTransformation | None = None,
) -> Plan:
  """Makes a plan of any schedule, fragments and parameters.

  Args:
    c: all else: wire, outer step, overlap, seed. It need not be resolved.
    mesh: the replica x fsdp mesh.
    schedule: when fragments are sent and received.
    fragments: which parameters are sent together.
    parameters: shapes of one replica's parameters.
    optimizer: the outer optimizer, in place of that of `c.outer`.

  Raises:
    ConfigError: the transport or pinned memory does not fit the machine, or the outer
      optimizer cannot step these parameters.
  """
  # data_parallel sends nothing, so it has no use for hosts.
  transport = c.overlap.transport if fragments else "device"
  carrier = make_transport(transport, mesh, c.wire.exchange == "gather")
  offload = c.outer.offload and bool(fragments)
  placement = make_placement(mesh, carrier.hosts, offload)
  parts = tuple(f.shapes(parameters) for f in fragments)
  outer = optimizer or c.outer
  for part in parts:  # Finds mistakes in the optimizer; computes nothing.
    outer_shardings(outer, abstract(part, "float32"), mesh)
  steps = [extension.outer_step(c) for extension in c.extensions]
  steps += [plugins.EXCHANGES[c.wire.exchange].outer_step, plain.outer_step]
  kind = DiagnosedPlan if c.log.diagnostics_every else Plan
  return kind(
    schedule=schedule,
    fragments=fragments,
    layers=tuple(f.indices for f in fragments),
    parameters=parameters,
    shapes=parts,
    wire=c.wire,
    outer=outer,
    tuned=outer_tuned(outer),
    own_outer=c.own_outer,
    alpha=c.overlap.alpha,
    seed=c.seed,
    diagnostics_every=c.log.diagnostics_every,
    mesh=mesh,
    placement=placement,
    transport=carrier,
    form=choose_form(c.wire, outer, placement, c.own_outer),
    step=next(filter(None, steps)),
  )


def choose_form(
  wire: WireConfig, optimizer: Outer, placement: Placement, own_outer: bool = False
) -> Form:
  """Chooses the plain or the fused form of lines 7 and 8, and of lines 10 and 11.

  Args:
    own_outer: whether every replica has outer parameters of its own.
  """
  sends = plain if own_outer or not fused.can_send(wire, placement.devices) else fused
  updates = fused if fused.can_update(wire, optimizer, placement.mesh) else plain
  update = updates.update if placement.at_hosts else updates.update_in_place
  return Form(sends.send, update, plain.merge)
