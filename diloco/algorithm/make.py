"""Makes a plan: chooses, once, the form of every part of the outer step."""

import dataclasses
from collections.abc import Callable

import optax
from jax.sharding import Mesh

from diloco.algorithm import fused, outer
from diloco.algorithm.diagnostics import DiagnosedPlan
from diloco.algorithm.home import Home, make_home
from diloco.algorithm.jobs import Jobs
from diloco.algorithm.optimizers import Outer, outer_shardings, outer_tuned
from diloco.algorithm.plan import Form, Plan
from diloco.config import Config
from diloco.mesh.sharding import abstract
from diloco.spec import plugins, shapes
from diloco.spec.fields import WireConfig
from diloco.spec.schedule import Fragment
from diloco.spec.shapes import Shapes
from diloco.wire.transport import make_transport


def make_plan(
  c: Config,
  mesh: Mesh,
  parameters: Shapes | None = None,
  fragments: tuple[Fragment, ...] | None = None,
  optimizer: optax.GradientTransformation | None = None,
) -> Plan:
  """Makes the plan of a config on a mesh.

  Args:
    parameters: shapes of one replica's parameters; None: those of the model.
    fragments: which of these parameters are sent together; None: those of the config.
    optimizer: the outer optimizer; None: that of the config.

  Raises:
    ConfigError: overlap.transport or outer.offload does not fit the machine, or the
      outer optimizer cannot step these parameters.
  """
  transport = make_transport(c, mesh)
  home = make_home(c, mesh, transport.hosts)
  schedule = c.make_schedule()
  if fragments:
    schedule = dataclasses.replace(schedule, num_fragments=len(fragments))
  fragments, stepped = fragments or c.make_fragments(), optimizer or c.outer
  parameters = parameters or shapes.parameters(c.model)
  parts = tuple(f.shapes(parameters) for f in fragments)
  for part in parts:  # Finds mistakes in the optimizer; computes nothing.
    outer_shardings(stepped, abstract(part, "float32"), mesh)
  kind = DiagnosedPlan if c.log.diagnostics_every else Plan
  return kind(
    schedule=schedule,
    fragments=fragments,
    layers=tuple(f.indices for f in fragments),
    parameters=parameters,
    shapes=parts,
    wire=c.wire,
    outer=stepped,
    tuned=outer_tuned(stepped),
    own_outer=c.own_outer,
    alpha=c.overlap.alpha,
    seed=c.seed,
    diagnostics_every=c.log.diagnostics_every,
    mesh=mesh,
    home=home,
    transport=transport,
    jobs=Jobs(background=home.at_hosts),
    form=choose_form(c.wire, stepped, home, c.own_outer),
    step=choose_step(c),
  )


def choose_form(
  wire: WireConfig, optimizer: Outer, home: Home, own_outer: bool = False
) -> Form:
  """Chooses the plain or the fused form of lines 7 and 8, and of lines 10 and 11.

  Args:
    own_outer: whether every replica has outer parameters of its own.
  """
  sends = outer if own_outer or not fused.can_send(wire, home.devices) else fused
  updates = fused if fused.can_update(wire, optimizer, home.mesh) else outer
  update = updates.update if home.at_hosts else updates.update_in_place
  return Form(sends.send, update, outer.merge)


def choose_step(c: Config) -> Callable:
  """Chooses lines 6 to 12: Algorithm 2, or the outer step of a plug-in."""
  own = [plugins.EXCHANGES[c.wire.exchange].outer_step]
  own += [extension.outer_step(c) for extension in c.extensions]
  return next(filter(None, own), outer.outer_step)
