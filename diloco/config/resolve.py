"""From a ConfigDict to a `Config`: derived fields are filled in, nonsense is refused.

Every error is one sentence with the field, its value and the remedy. No JAX.
"""

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

import ml_collections

from diloco.config.fields import Config, ConfigError, Range
from diloco.model import shapes
from diloco.wire import sizes


def default_config() -> ml_collections.ConfigDict:
  """Streaming DiLoCo with the papers' choices, to be changed by files and flags."""
  return ml_collections.ConfigDict(Config().to_dict())


def resolve(config: ml_collections.ConfigDict | Config) -> Config:
  """Fills in what follows from other fields, and refuses what cannot work.

  Args:
    config: with the fields of `default_config`.

  Returns:
    The config with final steps, tokens, taus, ff_dim, weight decay and wire format;
    for diloco also the pattern and the overlap. Resolving it again changes nothing.

  Raises:
    ConfigError: a field cannot work.
  """
  v = leaves(config.to_dict())
  _check_names(v)
  if v["algorithm"] == "diloco":
    v["fragments.pattern"] = "whole"
    v |= {"overlap.tau": 0, "overlap.taus": (), "overlap.alpha": 0.0}
  if v["wire.format"] == "auto":
    v["wire.format"] = "fp32" if v["algorithm"] == "diloco" else "e3m0"
  v["overlap.taus"] = tuple(v["overlap.taus"] or [v["overlap.tau"]] * v["replicas"])
  v["model.ff_dim"] = v["model.ff_dim"] or 4 * v["model.dim"]
  tokens_per_step = v["train.batch_size"] * v["model.seq_len"]
  if v["train.steps"] == 0 and tokens_per_step > 0:
    v["train.steps"] = v["train.tokens"] // tokens_per_step
    if v["train.steps"] < 1:
      raise ConfigError(
        f"train.steps is 0 and train.tokens is {v['train.tokens']}; set train.steps, or"
        f" train.tokens to at least one batch of {tokens_per_step} tokens."
      )
  v["train.tokens"] = v["train.steps"] * tokens_per_step
  _check_values(v)
  if v["inner.weight_decay"] < 0:
    v["inner.weight_decay"] = 1.0 / v["train.steps"]
  c = _build(Config, v)
  _check_together(c)
  return c


def complete(saved: Mapping[str, Any]) -> Config:
  """A config that was kept as JSON; fields that came later take their defaults.

  Raises:
    ConfigError: it has a field that is gone, or one that cannot work.
  """
  v = leaves(Config().to_dict()) | leaves(saved)
  return resolve(
    _nest({k: tuple(x) if isinstance(x, list) else x for k, x in v.items()})
  )


def changed(config: Config, fields: Mapping[str, Any]) -> Config:
  """The config with other values, for example {"model.dim": 64}; resolved again."""
  return resolve(_nest(leaves(config.to_dict()) | dict(fields)))


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """{"model.dim": 512, ...} of nested dicts."""
  found = dict[str, Any]()
  for key, value in config.items():
    if isinstance(value, Mapping):
      found |= leaves(value, f"{prefix}{key}.")
    else:
      found[prefix + key] = value
  return found


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
  """{field: "old -> new"} of all fields in which two nested dicts differ."""
  a, b = leaves(old), leaves(new)
  plain = lambda x: list(x) if isinstance(x, tuple) else x
  value = lambda x, field: x.get(field, "(absent)")
  return {
    field: f"{value(a, field)!r} -> {value(b, field)!r}"
    for field in sorted(a | b)
    if plain(value(a, field)) != plain(value(b, field))
  }


def types(group: type = Config, prefix: str = "") -> dict[str, Any]:
  """{"model.dim": its type with its limits, ...} of all fields."""
  found = dict[str, Any]()
  for name, kind in typing.get_type_hints(group, include_extras=True).items():
    if dataclasses.is_dataclass(kind):
      found |= types(typing.cast(type, kind), f"{prefix}{name}.")
    else:
      found[prefix + name] = kind
  return found


def _nest(values: Mapping[str, Any]) -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  for field, value in values.items():
    *groups, name = field.split(".")
    part = config
    for group in groups:
      if group not in part:
        part[group] = ml_collections.ConfigDict()
      part = part[group]
    part[name] = value
  return config


def _build(group: type, values: Mapping[str, Any], prefix: str = "") -> Any:
  parts = {
    f.name: _build(typing.cast(type, f.type), values, f"{prefix}{f.name}.")
    if dataclasses.is_dataclass(f.type)
    else values[prefix + f.name]
    for f in dataclasses.fields(group)
  }
  return group(**parts)


def _check_names(given: Mapping[str, Any]) -> None:
  known = leaves(Config().to_dict())
  for field in given:
    if field not in known:
      raise ConfigError(
        f"{field} is set to {given[field]!r}, but there is no such field;"
        " diloco/config/fields.py lists all of them."
      )
  for field, default in known.items():
    if field not in given:
      raise ConfigError(
        f"{field} is missing; start from default_config(), where it is {default!r}."
      )
    if isinstance(given[field], float) and not math.isfinite(given[field]):
      raise ConfigError(
        f"{field} is {given[field]}; choose a finite number, its default is"
        f" {default!r}."
      )


def _check_values(values: Mapping[str, Any]) -> None:
  """Each field against the type and the limits that fields.py gives it."""
  # train.steps comes last: other fields determine it.
  last = lambda item: item[0] == "train.steps"
  for field, kind in sorted(types().items(), key=last):
    value = values[field]
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if choices and value not in choices:
      raise ConfigError(f"{field} is {value!r}; choose one of {', '.join(choices)}.")
    for limits in getattr(kind, "__metadata__", ()):
      if isinstance(limits, Range) and value not in limits:
        raise ConfigError(f"{field} is {value}; choose a value {limits}.")
  taus = values["overlap.taus"]
  if not all(isinstance(tau, int) for tau in taus):
    raise ConfigError(
      f"overlap.taus is {taus}, but each tau counts inner steps; give whole numbers."
    )


def _check_together(c: Config) -> None:
  """Fields that do not go together."""
  if c.overlap.transport == "host" and c.wire.exchange == "psum":
    raise ConfigError(
      "overlap.transport is host, but wire.exchange is psum, which reduces on the"
      " devices; choose gather."
    )
  if c.train.batch_size % (c.replicas * c.train.accumulate):
    raise ConfigError(
      f"train.batch_size is {c.train.batch_size}, which replicas * train.accumulate"
      f" = {c.replicas} * {c.train.accumulate} does not divide; choose a multiple of"
      f" {c.replicas * c.train.accumulate}."
    )
  if c.model.dim % c.model.num_heads:
    raise ConfigError(
      f"model.num_heads is {c.model.num_heads}, which does not divide model.dim ="
      f" {c.model.dim}; choose a divisor (the papers use dim / 64)."
    )
  if c.model.loss_chunk and c.model.seq_len % c.model.loss_chunk:
    raise ConfigError(
      f"model.loss_chunk is {c.model.loss_chunk}, which does not divide"
      f" model.seq_len = {c.model.seq_len}; choose a divisor, or 0."
    )
  if len(c.overlap.taus) != c.replicas:
    raise ConfigError(
      f"overlap.taus is {c.overlap.taus}, {len(c.overlap.taus)} values, but replicas"
      f" is {c.replicas}; give one per replica or leave it empty."
    )
  try:
    c.make_schedule()
    shapes.parameters(c.model)
    sizes.check(c.wire)
  except ValueError as error:
    raise ConfigError(str(error)) from error
