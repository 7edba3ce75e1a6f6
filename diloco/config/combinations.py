"""Refuses fields that do not work together or have no effect. No JAX."""

from collections.abc import Mapping
from typing import Any

from diloco.errors import ConfigError
from diloco.spec import plugins, sizes
from diloco.spec.fields import Config
from diloco.spec.plugins import Rule

DILOCO = ("streaming", "diloco")
DEVICE = ("device",)
OFF = (0,)  # 0 and False both mean off.
ON_DEVICES = {"overlap.transport": DEVICE}

RULES = (
  Rule(
    "wire.exchange",
    "psum",
    "where devices add up what replicas send",
    ON_DEVICES | {"outer.average": ("mean",)},
  ),
)


def check(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
  """Refuses fields that do not work together.

  Args:
    values: a config's fields by name, such as "outer.average"; overlap.tau must be the
      largest tau of all replicas.
    defaults: the default of each field.

  Raises:
    ConfigError: the value of one field needs another value of a second field.
  """
  data_parallel = values["algorithm"] == "data_parallel"
  groups = plugins.NAMES["fields"].values()
  plugin_rules = (rule for group in groups for rule in group.rules)
  for field, choice, reason, needs in (*RULES, *plugin_rules):
    if field not in values:  # The plug-in with this field is not loaded.
      continue
    value, default = values[field], defaults[field]
    if value == default or choice not in (None, value):
      continue
    for other, works in needs.items():
      if values.get(other, works[0]) in works or (
        data_parallel and other not in ("algorithm", "model.name")
      ):
        continue
      given = values[other]
      choices = " or ".join(str(type(given)(x)).lower() for x in works)
      raise ConfigError(
        f"{field} is {value}, {reason}, but {other} is {given}; choose {choices}, or"
        f" set {field}={str(default).lower()}."
      )


def check_effects(
  c: Config, values: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
  """Refuses fields that have no effect because of other fields.

  Fields of DiLoCo are allowed with data_parallel, and fields of streaming with diloco,
  so that one file serves a run and its baselines. Saved configs are not checked, so a
  saved run whose config has a field without effect can still be read.

  Args:
    values: the fields of `c` by name.
    defaults: the default of each field.

  Raises:
    ConfigError: a field without effect does not have its default.
  """
  groups = [_effects(c)]
  if c.make_fragments():
    groups += [_effects_on_syncs(c), *(x.effects(c) for x in c.extensions)]
  for field, (useless, reason) in (item for group in groups for item in group.items()):
    value, default = values[field], defaults[field]
    if useless and value != default:
      raise ConfigError(
        f"{field} is {value}, but {reason}; change that, or set"
        f" {field}={str(default).lower()}."
      )


def _effects(c: Config) -> dict[str, tuple[bool, str]]:
  """Returns {field: (whether it has no effect, why)} for any algorithm."""
  silent = (not c.log.sample_tokens, "log.sample_tokens is 0")
  no_split = lambda source: not source.startswith(("tfds:", "arrays:"))
  held_out = c.data.eval_source or c.data.source
  return {
    "data.train_split": (
      no_split(c.data.source),
      f"data.source is {c.data.source}, which has no splits of its own",
    ),
    "data.eval_split": (
      no_split(held_out),
      f"the held-out text is of {held_out}, which has no splits of its own",
    ),
    "eval.task_items": (not c.eval.tasks, "eval.tasks is empty"),
    "inner.weight_decay_scaling": (not c.inner.weight_decay, "inner.weight_decay is 0"),
    "log.prompt": silent,
    "log.temperature": silent,
  }


def _effects_on_syncs(c: Config) -> dict[str, tuple[bool, str]]:
  """Returns {field: (whether it has no effect, why)} for the fields of DiLoCo."""
  compressor = sizes.coder(c.wire.compressor)
  return {
    "overlap.tau": (
      bool(c.overlap.taus) and c.overlap.tau not in c.overlap.taus,
      f"overlap.taus is {c.overlap.taus}",
    ),
    "wire.density": (
      compressor == "quantize",
      "wire.compressor is quantize, which sends all values",
    ),
  }
