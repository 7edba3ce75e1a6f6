"""Makes the inner and outer optimizers of a config, and shards their state.

`inner.optimizer` and `outer.optimizer` name an optimizer of optax or optax.contrib with
keyword arguments: "adamw(b1=0.9, b2=0.99)", "lion", "sgd(momentum=0.9, nesterov=True)".
A plug-in may register more optimizers for each of the two fields.
"""

import inspect
import math
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from diloco.config import Config
from diloco.errors import ConfigError
from diloco.mesh import sharding
from diloco.mesh.sharding import FSDP, Leading
from diloco.spec.call_text import parse
from diloco.spec.fields import OuterConfig
from diloco.spec.plugins import NAMES, near_name
from diloco.util.types import PyTree

# The outer optimizer: a config that names it, or a transformation of optax.
Outer: TypeAlias = OuterConfig | optax.GradientTransformation
# Arguments of optax's optimizers that say how slowly past gradients decay.
_DECAY_RATES = {"momentum", "b1", "b2", "b3", "beta"}
# Optimizers of optax that need a whole tensor to update one of its values.
_BY_TENSOR = {"adafactor", "fromage", "galore", "lamb", "lars", "novograd", "sm3"}
# Optimizers of optax whose weight decay does not shrink a weight by the decay times the
# rate: it is a part of the gradient, or the optimizer scales it.
_OTHER_DECAY = {
  "adadelta",
  "cocob",
  "dadapt_adamw",
  "dog",
  "dowg",
  "madgrad",
  "prodigy",
}
# fsdp may leave at most this much optimizer state unsharded, as a share of the bytes of
# the parameters on a device.
_WHOLE = 0.1


class Tuned(NamedTuple):
  """Numbers of the inner step that a sweep varies.

  The numbers are arguments of the inner step's program. So XLA compiles one program,
  and all other runs of the sweep find this program in the compilation cache.

  Attributes:
    learning_rate: peak of the schedule.
    weight_decay: inner.weight_decay, divided by the peak learning rate if
      inner.weight_decay_scaling is schedule.
  """

  learning_rate: jax.Array | float
  weight_decay: jax.Array | float


class OuterTuned(NamedTuple):
  """Numbers that a sweep varies; they are arguments of the outer step's program.

  Attributes:
    learning_rate: the outer learning rate.
    momentum: sgd's momentum; None for sgd without momentum, and for other optimizers.
  """

  learning_rate: jax.Array | float
  momentum: jax.Array | float | None


def tuned(c: Config) -> Tuned:
  """Returns the tuned numbers of a config."""
  decay = c.inner.weight_decay
  if c.inner.weight_decay_scaling == "schedule" and c.inner.learning_rate:
    decay /= c.inner.learning_rate
  return Tuned(c.inner.learning_rate, decay)


def learning_rate(c: Config, peak: jax.Array | float | None = None) -> optax.Schedule:
  """Makes the learning rate schedule: a linear warm-up, then a cosine decay.

  The cosine ends at step `c.schedule_steps` with `final_fraction` of the peak; later
  steps keep this last rate. Inner step t uses the schedule's value at t - 1, so with a
  warm-up the first step has rate 0.
  """
  peak, steps = c.inner.learning_rate if peak is None else peak, c.schedule_steps
  warmup = min(c.inner.warmup_steps, steps)
  cosine = optax.cosine_decay_schedule(
    peak, max(steps - warmup, 1), alpha=c.inner.final_fraction
  )
  warm = optax.linear_schedule(0.0, peak, warmup)
  return optax.join_schedules([warm, cosine], [warmup])


def make_inner(c: Config, values: Tuned | None = None) -> optax.GradientTransformation:
  """Makes the inner optimizer with clipping (2501.18512, 3.2; 2503.09799, 3).

  By default a step decays weights by 1/T * learning rate / peak rate (Wang & Aitchison,
  2024). Optax multiplies its argument `weight_decay` by the learning rate, so `tuned`
  divides the decay by the peak rate.

  Raises:
    ConfigError: inner.optimizer is unknown, or takes no weight decay; or several
      plug-ins change the inner optimizer.
  """
  values = values or tuned(c)
  norm = c.inner.clip_norm
  clip = optax.clip_by_global_norm(norm) if norm else optax.identity()
  rate = learning_rate(c, values.learning_rate)
  decay = values.weight_decay if c.inner.weight_decay else None
  make = partial(_make, "inner.optimizer", c.inner.optimizer, rate, decay)
  made = [extension.inner_optimizer(c, clip, make) for extension in c.extensions]
  from_plugins = [*filter(None, made)]
  if len(from_plugins) > 1:
    raise ConfigError(
      f"plugins is {','.join(c.plugins)}, of which {len(from_plugins)} change the inner"
      " optimizer; switch off all but one."
    )
  return from_plugins[0] if from_plugins else optax.chain(clip, make())


def averages(opt_state: PyTree) -> list[PyTree]:
  """Finds the optimizer states that hold averages of the parameters.

  Schedule-Free keeps an average x, and the parameters are y = b1 x + (1 - b1) z. Any
  state that has b1 and z counts as Schedule-Free. No outer step synchronises x.
  """
  keeps = lambda x: hasattr(x, "b1") and hasattr(x, "z")
  return [x for x in jax.tree.leaves(opt_state, is_leaf=keeps) if keeps(x)]


def judged(params_M: PyTree, opt_state_M: PyTree) -> PyTree:
  """Returns the inner optimizer's average of the parameters; without one, params_M.

  Args:
    params_M: parameters, leaves (M, ...).
    opt_state_M: inner optimizer state, leaves (M, ...).
  """
  states_M = averages(opt_state_M)
  return _averaged_M(states_M[0], params_M) if states_M else params_M


_averaged_M = jax.jit(jax.vmap(optax.contrib.schedule_free_eval_params))


def at_step(opt_state: PyTree, t: int) -> PyTree:
  """Sets the step count of learning rate schedules; other counts stay as they are."""

  def moved(x: PyTree) -> PyTree:
    return x._replace(count=jnp.zeros_like(x.count) + t) if is_schedule(x) else x

  return jax.tree.map(moved, opt_state, is_leaf=is_schedule)


def is_schedule(x: PyTree) -> bool:
  """Returns whether x is the state of a schedule, which counts updates."""
  return isinstance(x, optax.ScaleByScheduleState)


def outer_tuned(outer: Outer) -> OuterTuned:
  """Returns the tuned numbers of the outer step; an optax transformation has none.

  Raises:
    ConfigError: outer.optimizer is not the name of an optimizer with arguments.
  """
  if isinstance(outer, optax.GradientTransformation):
    return OuterTuned(0.0, None)
  name, arguments = parse("outer.optimizer", outer.optimizer)
  momentum = arguments.get("momentum") if name == "sgd" else None
  return OuterTuned(outer.learning_rate, momentum)


def make_outer(
  outer: Outer, values: OuterTuned | None = None
) -> optax.GradientTransformation:
  """Makes the outer optimizer.

  Raises:
    ConfigError: outer.optimizer names an unknown optimizer.
  """
  if isinstance(outer, optax.GradientTransformation):
    return outer
  rate, momentum = values or outer_tuned(outer)
  return _make("outer.optimizer", outer.optimizer, rate, momentum=momentum)


def outer_shardings(outer: Outer, theta: PyTree, mesh: Mesh) -> tuple[PyTree, PyTree]:
  """Returns NamedShardings of a fragment's outer parameters and optimizer state.

  Args:
    theta: the fragment's outer parameters, or their shapes.
  """
  opt_at = state_shardings("outer.optimizer", make_outer(outer), theta, mesh)
  return sharding.shardings(theta, mesh), opt_at


def _make(
  field: Literal["inner.optimizer", "outer.optimizer"],
  text: str,
  rate: optax.ScalarOrSchedule,
  decay: jax.Array | float | None = None,
  leading: int = 1,
  momentum: jax.Array | float | None = None,
) -> optax.GradientTransformation:
  """Makes the optimizer that `text` names.

  Args:
    leading: number of axes before a layer's own axes in a tensor under `blocks`.
    momentum: replaces the momentum in `text`; None: keeps the momentum in `text`.
  """
  name, arguments = parse(field, text)
  for decay_rate in _DECAY_RATES & arguments.keys():
    value = arguments[decay_rate]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and 0 <= value < 1):
      raise ConfigError(
        f"{field} is {text!r}, whose {decay_rate} is {value!r}; give a number of at"
        " least 0 and below 1."
      )
  if momentum is not None:
    arguments["momentum"] = momentum
  factory = NAMES[field].get(name) or getattr(optax.contrib, name, None)
  factory = factory or getattr(optax, name, None)
  known = inspect.signature(factory).parameters if callable(factory) else {}
  if factory is None or "learning_rate" not in known:
    near = near_name(name, ("adam", "adamw", "lion", "muon", "sgd"))
    raise ConfigError(
      f"{field} is {text!r}, but optax has no optimizer {name} with a learning_rate;"
      " choose another, for example adamw, lion, muon or sgd(momentum=0.9,"
      f" nesterov=True){near}."
    )
  given = {"learning_rate": rate}
  if decay is not None:
    if name in _OTHER_DECAY:
      raise ConfigError(
        f"{field} is {text!r}, whose weight decay is not decoupled, but"
        " inner.weight_decay is not 0; set it to 0, and give weight_decay to the"
        " optimizer if you want it."
      )
    if "weight_decay" not in known:
      raise ConfigError(
        f"{field} is {text!r}, which takes no weight decay, but inner.weight_decay is"
        " not 0; set it to 0."
      )
    given["weight_decay"] = decay
    if "adam_weight_decay" in known:  # Muon uses Adam for tensors that are no matrices.
      given["adam_weight_decay"] = decay
  elif "weight_decay" in known:
    arguments = {"weight_decay": 0.0} | arguments  # The default of Optax is not 0.
  if name == "muon":
    given["muon_weight_dimension_numbers"] = partial(_matrices, leading)
  for argument in arguments:
    if argument not in known or argument in given:
      free = ", ".join(k for k in known if k not in given)
      raise ConfigError(
        f"{field} is {text!r}, but {name} takes no argument {argument} here; choose"
        f" among {free}."
      )
  used = {name: known[name].default for name in known} | arguments
  if used.get("nesterov") and used.get("momentum", 0) is None:
    raise ConfigError(
      f"{field} is {text!r}, but without momentum optax ignores nesterov; give momentum"
      " too, for example 0.9."
    )
  try:
    made = factory(**given, **arguments)
  except (TypeError, ValueError) as error:
    raise ConfigError(f"{field} is {text!r}, which optax refuses: {error}.") from error
  return over_layers(made) if leading and name in _BY_TENSOR else made


def over_layers(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Makes an optimizer that updates each layer of a stack alone.

  Its state is {'blocks': leaves (N, ...), 'embed': ...}.
  """
  each = lambda k, f: jax.vmap(f) if k == "blocks" else f

  def init(params: PyTree) -> PyTree:
    return {k: each(k, optimizer.init)({k: x}) for k, x in params.items()}

  def update(
    grads: PyTree, state: PyTree, params: PyTree = None
  ) -> tuple[PyTree, PyTree]:
    updates, after = dict[str, PyTree](), dict[str, PyTree]()
    for k, g in grads.items():
      step = each(k, optimizer.update)
      updates_k, after[k] = step({k: g}, state[k], {k: params[k]})
      updates |= updates_k
    return updates, after

  return optax.GradientTransformation(init, update)


def _matrices(leading: int, params: PyTree) -> PyTree:
  """Tells Muon that a stacked tensor (N, in, out) holds N matrices.

  Otherwise Muon would see three axes and leave the tensor to Adam.
  """

  def numbers(path: KeyPath, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
    is_matrix = sharding.names(path)[0] == "blocks" and x.ndim == leading + 2
    return optax.contrib.MuonDimensionNumbers((-2,), (-1,)) if is_matrix else None

  return jax.tree_util.tree_map_with_path(numbers, params)


def state_shardings(
  field: str,
  optimizer: optax.GradientTransformation,
  params: PyTree,
  mesh: Mesh,
  leading: Leading = (),
) -> PyTree:
  """Returns NamedShardings of an optimizer's state.

  A moment has the shape of its parameter, and its path ends with the parameter's path.
  A moment is sharded like its parameter. All other parts of the state are unsharded:
  every device of a replica holds a copy.

  Args:
    field: name of the config's field, for error messages.
    params: shapes of one model's parameters, without a leading axis.
    leading: the leading axis of the state, see `diloco.mesh.sharding`.

  Raises:
    ConfigError: the optimizer needs more than gradients and parameters, its state has
      a PRNG key, or fsdp cannot shard a large part of the state.
  """
  # Computes only shapes: the devices of a dry run cannot compute values.
  draw = lambda params: jax.eval_shape(optimizer.init, params)
  try:
    state = draw(params)
    jax.eval_shape(optimizer.update, params, state, params)
  except Exception as error:
    reason = str(error).strip().splitlines()[0]
    raise ConfigError(
      f"{field} cannot step these parameters ({reason}); choose an optimizer that needs"
      " gradients and parameters only."
    ) from error
  is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  if any(map(is_key, jax.tree.leaves(state))):
    raise ConfigError(
      f"{field} keeps a PRNG key in its state, which no checkpoint can hold; choose an"
      " optimizer that draws no random numbers."
    )
  whole, fsdp = NamedSharding(mesh, P(*leading)), mesh.shape[FSDP]
  places = sharding.with_leading(sharding.shardings(params, mesh), leading)
  state_at = places_like(state, (params, places), whole=whole)
  size = lambda leaves: sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
  pairs = zip(jax.tree.leaves(state), jax.tree.leaves(state_at))
  # Does not count state that is unsharded because its parameter is unsharded.
  replicated = size(x for x, at in pairs if at is whole)
  if fsdp > 1 and replicated > _WHOLE * size(jax.tree.leaves(params)) / fsdp:
    raise ConfigError(
      f"{field} keeps {replicated:,} bytes of state on every device, which mesh.fsdp ="
      f" {fsdp} cannot shard; choose another optimizer, or mesh.fsdp=1."
    )
  return state_at


def places_like(
  state: PyTree, *pairs: tuple[PyTree, PyTree], whole: NamedSharding
) -> PyTree:
  """Returns the shardings of a state, in which moments are sharded like parameters.

  A moment has the shape of its parameter, and its path ends with the parameter's path.

  Args:
    pairs: (tree of parameters or of their shapes, tree of the parameters' shardings).
    whole: the sharding of all other parts.
  """
  known = {
    (sharding.names(path), x.shape): at
    for params, places in pairs
    for (path, x), at in zip(
      jax.tree.leaves_with_path(params), jax.tree.leaves(places), strict=True
    )
  }

  def place(path: KeyPath, x: jax.ShapeDtypeStruct) -> NamedSharding:
    names = sharding.names(path)
    ends = (known.get((names[i:], x.shape)) for i in range(len(names)))
    return next(filter(None, ends), whole)

  return jax.tree.map_with_path(place, state)
