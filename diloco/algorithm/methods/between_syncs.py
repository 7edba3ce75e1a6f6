"""Runs DES-LOC and SPARTA: they average float32 values of the replicas between syncs.

Both run after an inner step and before the outer step, with one all-reduce, and leave
the outer step as it is.
"""

import jax
from jax.profiler import TraceAnnotation

from diloco.algorithm.method import Wrapper
from diloco.algorithm.methods import des_loc, sparta
from diloco.algorithm.methods.des_loc import FIRST, SECOND
from diloco.algorithm.optimizers import make_inner
from diloco.algorithm.plan import Plan
from diloco.algorithm.state import Event, TrainState, abstract_params
from diloco.config import Config
from diloco.errors import ConfigError
from diloco.mesh.sharding import FSDP
from diloco.spec import shapes, sizes

SPARTA = "sparta"
# Sends of fragments use the numbers 0, 1, ... in this place of the key.
_SPARTA_KEY = 2**32 - 1


class BetweenSyncs(Wrapper):
  """A method whose replicas are averaged before the outer step; see `average`."""

  def outer(self, t: int, state: TrainState) -> tuple[int, TrainState, list[Event]]:
    state, averages = average(self.method.c, t, self.method.plan, state)
    t, state, events = self.method.outer(t, state)
    return t, state, averages + events


def check(c: Config) -> None:
  """Refuses averages that the inner optimizer cannot give.

  Raises:
    ConfigError: des_loc asks for moments that the inner optimizer does not have.
  """
  every = c.averages()
  if not every:
    return
  with_lead = lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
  params_1 = jax.tree.map(with_lead, abstract_params(c))
  state_1 = jax.eval_shape(jax.vmap(make_inner(c).init), params_1)
  known = {
    moment.kind for moment in des_loc.moments(shapes.parameters(c.model), state_1)
  }
  for kind, name in ((FIRST, "first"), (SECOND, "second")):
    if kind in every and kind not in known:
      raise ConfigError(
        f"des_loc.{name}_every is {every[kind]}, but inner.optimizer is"
        f" {c.inner.optimizer!r}, which keeps no {name} moments; set it to 0."
      )


def average(
  c: Config, t: int, plan: Plan, state: TrainState
) -> tuple[TrainState, list[Event]]:
  """Averages what is due after inner step t; other steps cost nothing.

  Args:
    t: number of finished inner steps.
    state: the state before the outer step; what is averaged is donated.

  Returns:
    The new state, and an event for each kind of average.
  """
  params, opt_state, events = state.params, state.opt_state, list[Event]()
  for kind in c.averages_after(t):
    if kind == SPARTA:
      key = plan.key(t, _SPARTA_KEY)
      with TraceAnnotation("sparta"):
        params = sparta.average(params, key, share=c.sparta.share, mesh=plan.mesh)
      fsdp = plan.mesh.shape[FSDP]
      values = sizes.sparta_values(c.sparta.share, plan.parameters, fsdp)
    else:
      with TraceAnnotation("des_loc"):
        opt_state, values = des_loc.average(plan, opt_state, kind)
    sent = sizes.average_bytes(c.replicas, values)
    events.append(Event("average", kind, t, sent, {}))
  return TrainState(params, opt_state, state.outer), events
