"""What the update of a closed round would be with another config, for `replay`."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco.algorithm.plan import Plan
from diloco.algorithm.state import OuterState
from diloco.config import changed
from diloco.contrib.sites import outer_state
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.coordinator import group
from diloco.contrib.sites.link import Closed
from diloco.errors import ConfigError
from diloco.mesh import sharding
from diloco.util.types import PyTree
from diloco.wire import exchange


class OtherUpdate:
  """Updates outer parameters with other fields of `outer` or `wire`, or other weights.

  With another wire, the payloads are decoded, so their values are those that the sites
  sent, and coded again: from the compressor's first state, and with the random numbers
  that its site would draw.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    calendar: Calendar,
    plan: Plan,
    state: OuterState,
    fields: Mapping[str, Any],
    weights: Mapping[int, int] | None,
  ):
    """Prepares the updates.

    Args:
      workdir: of the coordinator.
      calendar, plan, state: of the run.
      fields: that are changed.
      weights: {site: its weight, otherwise 1}; None: its tokens.

    Raises:
      ConfigError: the fields cannot work, or need another optimizer state.
    """
    config = changed(calendar.config, fields)
    method, first = group.first_state(Calendar(config), workdir)
    kinds = {str(jax.tree.structure(x.opt_state)) for x in (state, first)}
    if len(kinds) > 1:
      raise ConfigError(
        f"{', '.join(fields)} changes the state of the outer optimizer, so no update of"
        " this run can be computed with it; change its rate or its momentum only."
      )
    self._calendar, self._own, self._plan = calendar, plan, method.plan
    self._weights, self._recodes = weights, plan.wire != method.plan.wire
    self._code = jax.jit(self._encode, static_argnums=1)

  def theta(self, closed: Closed, theta: PyTree, opt_state: PyTree) -> PyTree:
    """Returns the outer parameters of the fragment after a round."""
    if self._weights is not None:
      weights = {k: self._weights.get(k, 1) for k in closed.tokens}
      tokens = {k: n for k, n in weights.items() if n}
      payloads = {k: closed.payloads[k] for k in tokens}
      closed = Closed(closed.round, closed.fragment, tokens, payloads)
    if self._recodes:
      closed = dataclasses.replace(closed, payloads=self._recoded(closed))
    args = (self._plan, self._calendar, closed)
    return outer_state.apply(*args, theta, opt_state)[0]

  def _recoded(self, closed: Closed) -> dict[int, bytes]:
    step, p = self._calendar.rounds[closed.round]
    payload = outer_state.place(self._own, self._calendar, p, closed.payloads)
    with jax.set_mesh(self._own.placement.mesh):
      codes_R = np.asarray(self._code(payload, p, self._plan.key(step, p)))
    codes_K = codes_R.reshape(self._calendar.sites, -1)
    return {site: codes_K[site].tobytes() for site in closed.payloads}

  def _encode(self, payload: jax.Array, p: int, key: jax.Array) -> jax.Array:
    own, wire, mesh = self._own, self._plan.wire, self._own.placement.mesh
    like = sharding.abstract(own.shapes[p], "float32")
    delta_R = exchange.decode(own.wire, mesh, payload, like, (None,))
    draw = jax.vmap(functools.partial(jax.random.fold_in, key))
    state_R = exchange.init_state(wire, delta_R)
    keys_R = draw(jnp.arange(len(payload)))
    return exchange.encode(wire, mesh, delta_R, state_R, keys_R)[0]
