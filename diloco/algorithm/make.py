"""Makes a plan; this is where the code for every part of the outer step is chosen."""

import optax
from jax.sharding import Mesh

from diloco.algorithm import fused, outer
from diloco.algorithm.optimizers import Outer, outer_shardings, outer_tuned
from diloco.algorithm.placement import OnDevices, OnHosts, make_place
from diloco.algorithm.plan import Form, Plan
from diloco.config import Config
from diloco.mesh.sharding import abstract
from diloco.spec import shapes
from diloco.spec.fields import WireConfig
from diloco.spec.fragments import Fragment
from diloco.spec.plugins import OuterStep
from diloco.spec.schedule import Schedule
from diloco.spec.shapes import Shapes
from diloco.wire.transport import make_transport


def make_plan(
  c: Config,
  mesh: Mesh,
  parameters: Shapes | None = None,
  *,
  fragments: tuple[Fragment, ...] | None = None,
  schedule: Schedule | None = None,
  optimizer: optax.GradientTransformation | None = None,
) -> Plan:
  """Makes the plan of a config on a mesh; the library gives some parts of its own.

  Args:
    mesh: the replica x fsdp mesh.
    parameters: shapes of one replica's parameters; None: those of the model.
    fragments: which of these are sent together; None: those of the config.
    schedule: when fragments are sent and received; None: that of the config.
    optimizer: the outer optimizer; None: that of the config.

  Raises:
    ConfigError: the transport or pinned memory does not fit the machine, or the outer
      optimizer cannot step these parameters.
  """
  parameters = parameters or shapes.parameters(c.model)
  fragments = c.make_fragments() if fragments is None else fragments
  outer_optimizer: Outer = optimizer or c.outer
  # data_parallel sends nothing, so it has no use for hosts.
  kind = c.overlap.transport if fragments else "device"
  transport = make_transport(kind, mesh, c.wire.exchange == "gather")
  offload = c.outer.offload and bool(fragments)
  place = make_place(mesh, transport.hosts, offload)
  parts = tuple(f.shapes(parameters) for f in fragments)
  for part in parts:  # Finds mistakes in the optimizer; computes nothing.
    outer_shardings(outer_optimizer, abstract(part, "float32"), mesh)
  step: OuterStep = outer.outer_step
  for extension in c.extensions:
    step = extension.outer_step(c, step)
  return Plan(
    schedule=schedule or c.make_schedule(),
    fragments=fragments,
    layers=tuple(f.indices for f in fragments),
    parameters=parameters,
    shapes=parts,
    wire=c.wire,
    outer=outer_optimizer,
    tuned=outer_tuned(outer_optimizer),
    alpha=c.overlap.alpha,
    seed=c.seed,
    mesh=mesh,
    place=place,
    transport=transport,
    form=choose_form(c.wire, outer_optimizer, place),
    step=step,
  )


def choose_form(wire: WireConfig, optimizer: Outer, place: OnDevices) -> Form:
  """Chooses the plain or the fused form of lines 7 and 8, and of lines 10 and 11."""
  sends = fused if fused.can_send(wire, place.devices) else outer
  updates = fused if fused.can_update(wire, optimizer, place.mesh) else outer
  update = updates.update if isinstance(place, OnHosts) else updates.update_in_place
  return Form(sends.send, update, outer.merge)
