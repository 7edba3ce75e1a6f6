"""Checks the fields of a config: first each field alone, then all together. No JAX.

`combinations.py` has the rules for values that need values of other fields. Every error
is one sentence with the field, its value and the remedy.
"""

import numbers
import re
import typing
from collections.abc import Collection
from typing import Any

from diloco.config import combinations
from diloco.errors import ConfigError
from diloco.spec import plugins, sizes
from diloco.spec.call_text import LARGEST_FLOAT
from diloco.spec.fields import Config, Range
from diloco.util.command import meant
from diloco.util.types import Json

# {type of a field: the values that it accepts, in words}
_WANTED = {
  int: "a whole number",
  float: "a number",
  bool: "True or False",
  str: "a text in UTF-8",
  tuple: "values such as (1, 4), or leave it empty",
}


def check_each(v: Json, defaults: Json, kinds: Json) -> Json:
  """Checks names, types, choices and limits of all fields.

  Args:
    v: a config's fields by name, such as "outer.average".
    defaults: the default of each field.
    kinds: the type of each field, with its limits.

  Returns:
    The fields. A number gets the type of its field, so 5e8 can be a whole number.

  Raises:
    ConfigError: a field has a value that cannot work.
  """
  for field in sorted(v.keys() - defaults.keys()):
    fields = [name for name in defaults if name.startswith(f"{field}.")]
    if fields:
      raise ConfigError(f"{field} is {v[field]!r}, but it has fields; set {fields[0]}.")
    near = unknown(field, defaults)
    raise ConfigError(f"{field} is {v[field]!r}, but there is no such field{near}.")
  return {field: _checked(field, v[field], kind) for field, kind in kinds.items()}


def _checked(field: str, value: Any, kind: Any) -> Any:
  """Returns the value of a field, converted to the type of the field.

  Raises:
    ConfigError: the value has another type, is not one of the choices, or is outside
      the limits.
  """
  choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
  if choices and not (isinstance(value, str) and value in choices):
    near = meant(str(value), choices)
    choose = f"choose one of {', '.join(choices)}{near}"
    raise ConfigError(f"{field} is {value!r}; {choose}.")
  try:
    value = _converted(value, kind)
  except (OverflowError, TypeError, ValueError) as error:
    base = getattr(kind, "__origin__", kind)
    raise ConfigError(f"{field} is {value!r}; give {_WANTED[base]}.") from error
  if isinstance(value, float) and not abs(value) <= LARGEST_FLOAT:
    raise ConfigError(
      f"{field} is {value}; give a finite number, at most {LARGEST_FLOAT:.2g}."
    )
  for limits in getattr(kind, "__metadata__", ()):
    if isinstance(limits, Range) and value not in limits:
      raise ConfigError(f"{field} is {value}; it must be {limits}.")
  return value


def _converted(value: Any, kind: Any) -> Any:
  """Converts a value to its type; returns it unchanged if `_WANTED` lacks the type.

  Raises:
    OverflowError, TypeError, ValueError: the value does not fit the type.
  """
  base = getattr(kind, "__origin__", kind)
  if base not in _WANTED:
    return value
  number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if number and (base is float or (base is int and value % 1 == 0)):
    return base(value)
  if base is tuple and isinstance(value, tuple):
    item = (*typing.get_args(kind), Any)[0]
    return tuple(_converted(x, item) for x in value)
  if base in (bool, str) and isinstance(value, base):
    str(value).encode()  # Fails for bytes that are no UTF-8.
    return value
  raise TypeError(f"no {base}")


def unknown(field: str, known: Collection[str]) -> str:
  """Returns the end of an error message about a field that does not exist."""
  near, group = f"{meant(field, known)}{plugins.hint(field)}", field.partition(".")[0]
  is_strange = not near and not any(name.startswith(f"{group}.") for name in known)
  ask = plugins.ASK if is_strange and "." in field else ""
  return f"{near}{ask}; diloco.main --print_config shows all"


def check_together(c: Config, v: Json, defaults: Json) -> None:
  """Checks fields that depend on each other; `v` has all fields by name."""
  combinations.check({**v, "overlap.tau": max(c.overlap.taus)}, defaults)
  if c.eval.test_tokens and not c.eval.tokens:
    raise ConfigError(
      f"eval.test_tokens is {c.eval.test_tokens}, but eval.tokens is 0, which takes all"
      " held-out text; set eval.tokens."
    )
  d, m = c.data, c.model
  is_text = not d.source.startswith(("arrays:", "tfds:"))
  if d.train_split == d.eval_split and d.eval_source in ("", d.source) and not is_text:
    raise ConfigError(
      f"data.eval_split is {d.eval_split!r}, but this split trains; name another, or"
      " parts of one, such as train[:99%] and train[99%:]."
    )
  divide("train.batch_size", c.train.batch_size, "replicas", c.replicas)
  divide("train.batch_size", c.train.batch_size, "data.shards", c.data.shards)
  divide("data.shards", c.data.shards, "replicas", c.replicas)
  # An architecture with its own fields may have a head size other than dim / num_heads.
  heads = 0 if m.extensions else m.num_heads
  divide("model.dim", m.dim, "model.num_heads", heads)
  divide("model.seq_len", m.seq_len, "model.loss_chunk", m.loss_chunk)
  if len(c.overlap.taus) != c.replicas:
    raise ConfigError(
      f"overlap.taus is {c.overlap.taus}; give {c.replicas} whole numbers, one per"
      " replica, or leave it empty."
    )
  check_names(c)
  for extension in c.effective:
    extension.check(c)
  c.make_schedule()


def divide(multiple: str, n: int, divisor: str, d: int) -> None:
  """Refuses one field's value n if another field's value d does not divide n.

  Raises:
    ConfigError: d does not divide n, and d is not 0.
  """
  if d and n % d:
    raise ConfigError(
      f"{multiple} is {n}, which {divisor} = {d} does not divide; change one of them."
    )


def check_names(c: Config) -> None:
  """Refuses an unknown compressor, number format, model, average or transport."""
  sizes.check(c.wire)
  # Another config may have loaded a plug-in that this config does not name.
  extensions, names = c.model.extensions, plugins.NAMES
  models = [n for n in names["model.name"] if extensions or n not in names["fields"]]
  plugins.check_name("model.name", c.model.name, models)
  plugins.check_name(
    "outer.average", c.outer.average, ("mean", *names["outer.average"])
  )
  plugins.check_name(
    "overlap.transport", c.overlap.transport, names["overlap.transport"]
  )


def check_profile(c: Config) -> None:
  asked, last = c.profile.steps, c.train.steps
  given = re.fullmatch(r"(\d{1,9}):(\d{1,9})", asked, re.ASCII)
  if asked and not (given and 1 <= int(given[1]) <= int(given[2]) <= last):
    raise ConfigError(
      f"profile.steps is {asked!r}; give the first and the last inner step to trace,"
      f" such as 100:105, from 1 to train.steps = {last}."
    )


def check_tokens(c: Config, given: Json) -> None:
  """Refuses a number of tokens that contradicts a given number of steps."""
  steps, tokens = given.get("train.steps"), given.get("train.tokens")
  if steps and tokens and tokens // c.tokens_per_step != steps:
    raise ConfigError(
      f"train.tokens is {tokens:,.0f}, but train.steps is {steps:g}, which decides; set"
      " one of them to 0."
    )


def check_all_synced(c: Config) -> None:
  """Refuses a run so short that some outer parameters would stay untrained."""
  if 0 in c.num_syncs():
    first = max(c.make_schedule().first_sends)
    joint = c.joint_steps
    after = f" after {joint} joint steps" if joint else ""
    field = "the number of joint steps or sync_every" if joint else "sync_every"
    raise ConfigError(
      f"train.steps is {c.train.steps}, but with sync_every={c.sync_every}{after} some"
      f" parameters are first synchronised at step {first}, so the outer parameters,"
      f" which are evaluated, would not contain all training; train longer or lower"
      f" {field}, or set outer.final_sync=true."
    )
