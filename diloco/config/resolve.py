"""Makes a `Config` from a ConfigDict: fills in and checks fields. No JAX.

Every error is one sentence with the field, its value and the remedy.
"""

import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, cast

import ml_collections
from ml_collections import config_dict

from diloco.config import checks, combinations
from diloco.errors import ConfigError
from diloco.spec import plugins
from diloco.spec.fields import Config
from diloco.tokenizer.vocabulary import fill_in
from diloco.util.types import Json

# Fields outside of groups, such as `seed`.
_ALONE = {
  f.name for f in dataclasses.fields(Config) if not dataclasses.is_dataclass(f.default)
}


def leaves(config: Json | ml_collections.ConfigDict, prefix: str = "") -> Json:
  """Flattens groups of fields: {"model.dim": 512, ...}; lists (JSON) become tuples.

  A placeholder of ml_collections without a value becomes None.
  """
  fields = Json()
  if isinstance(config, ml_collections.ConfigDict):
    items = config.items(preserve_field_references=True)
  else:
    items = config.items()
  for name, value in items:
    is_group = isinstance(value, Mapping | ml_collections.ConfigDict)
    if is_group and (value or not (prefix or name in _ALONE)):
      fields |= leaves(value, f"{prefix}{name}.")
    else:
      value = _held(value)
      fields[prefix + name] = tuple(value) if isinstance(value, list) else value
  return fields


def _held(value: Any) -> Any:
  """Returns the value in a field reference; any other value as it is."""
  try:
    return value.get() if isinstance(value, ml_collections.FieldReference) else value
  except config_dict.RequiredValueError:
    return None


def _types(group: type) -> Json:
  """Returns {"model": {"dim": its type with its Range, ...}, ...}."""
  hints = typing.get_type_hints(group, include_extras=True)
  kinds = {f.name: hints[f.name] for f in dataclasses.fields(group)}
  return {
    name: _types(cast(type, kind)) if dataclasses.is_dataclass(kind) else kind
    for name, kind in kinds.items()
    if name != "extensions"
  }


_TYPES = _types(Config)
# Values of data_parallel and diloco, whatever the config says.
_WHOLE: Json = {
  "fragments.pattern": "whole",
  "overlap.tau": 0,
  "overlap.taus": (),
  "overlap.alpha": 0.0,
}


def _kinds(names: Sequence[str]) -> Json:
  """Returns the type of each field of a config with these plug-ins."""
  groups = plugins.load(names)
  kinds = _TYPES | {name: _types(group) for name, group in groups.items()}
  return leaves(kinds)


def default_config(*names: str) -> ml_collections.ConfigDict:
  """Returns the defaults of fields.py, which config files and flags change.

  Args:
    names: plug-ins, whose fields are added.

  Raises:
    ConfigError: a plug-in cannot be imported.
  """
  # With type_safe=False, ml_collections checks no types. `resolve` checks them instead,
  # with better messages, and accepts 5e8 as a whole number.
  c = ml_collections.ConfigDict(Config().to_dict(), type_safe=False)
  add_plugins(c, *names)
  return c


def add_plugins(c: ml_collections.ConfigDict, *names: str) -> None:
  """Adds plug-ins to a config, with their fields.

  Raises:
    ConfigError: a plug-in cannot be imported.
  """
  with c.unlocked():
    for name, fields in _extensions(names).items():
      if name not in c:
        c[name] = fields
  c.plugins = tuple(dict.fromkeys((*c.plugins, *map(plugins.module_of, names))))


def _extensions(names: Sequence[str]) -> dict[str, Json]:
  """Returns {group: {field: default}} for the groups of some plug-ins."""
  return {n: dataclasses.asdict(kind()) for n, kind in plugins.load(names).items()}


def _defaults(names: Sequence[str]) -> Json:
  """Returns the default of each field of a config with these plug-ins."""
  return leaves(Config().to_dict() | _extensions(names))


def plugins_of(v: Json) -> tuple[str, ...]:
  """Returns the plug-ins of a config.

  Raises:
    ConfigError: `plugins` has something other than names and paths.
  """
  names = v.get("plugins", ())
  is_text = isinstance(names, tuple | list) and all(isinstance(x, str) for x in names)
  # The flag --config.plugins=a,b sets ("a,b",).
  given = [name for x in names for name in x.split(",") if name] if is_text else [""]
  if not all(re.fullmatch(r"[\w-]+(\.[\w-]+)*|.+\.py", name) for name in given):
    raise ConfigError(
      f"plugins is {names!r}; give names or paths, as ('sparta', './mine.py')."
    )
  # If a plug-in of diloco has a transport, the two have the same name.
  given += {str(v.get("overlap.transport"))}.intersection(plugins.contrib())
  return tuple(dict.fromkeys(given))


def resolve(config: ml_collections.ConfigDict | Config) -> Config:
  """Fills in the fields that follow from others, and checks all fields.

  Args:
    config: has some fields of `default_config`; other fields take their defaults.

  Returns:
    The config with final steps, tokens, taus, ff_dim, weight decay, wire format,
    tokenizer and vocabulary, and for algorithms other than streaming also with final
    pattern and overlap. Another `resolve` would not change this config.

  Raises:
    ConfigError: a field has a value that cannot work.
  """
  given = leaves(config.to_dict() if isinstance(config, Config) else config)
  c = _resolve(given)
  checks.check_tokens(c, given)
  combinations.check_effects(c, leaves(c.to_dict()), _defaults(c.plugins))
  checks.check_all_synced(c)
  return c


def complete(saved: Json) -> Config:
  """Resolves a config read from JSON; missing fields take their defaults.

  Raises:
    ConfigError: a field no longer exists, or has a value that cannot work; see also
      `plugins.check_trusted`.
  """
  return _resolve(saved_fields(saved))


def shown(saved: Json) -> Config:
  """Completes a config for a command that only shows a run; imports no strange plug-in.

  The result has the fields of a strange (not trusted) plug-in as they were saved.

  Raises:
    ConfigError: the model or the transport is from a strange plug-in; see `complete`.
  """
  v = leaves(saved)
  names = [x for x in plugins_of(v) if plugins.is_trusted(x)]
  known = all(v[f] in plugins.NAMES[f] for f in ("model.name", "overlap.transport"))
  if names == [*plugins_of(v)] or not known:
    return complete(saved)
  defaults = _defaults(names)
  c = _build(defaults | {f: v[f] for f in defaults if f in v} | {"plugins": names})
  stand_ins = []
  for group in saved.keys() - c.to_dict().keys():
    kind = dataclasses.make_dataclass(
      group, saved[group], bases=(plugins.Extension,), frozen=True
    )
    stand_ins.append(kind(**saved[group]))
  extensions = (*c.extensions, *stand_ins)
  return dataclasses.replace(c, plugins=plugins_of(v), extensions=extensions)


def saved_fields(saved: Json) -> Json:
  """Returns the fields of a config read from JSON by name.

  Raises:
    ConfigError: see `plugins.check_trusted`.
  """
  v = leaves(saved)
  names = plugins_of(v)
  plugins.check_trusted(names)
  return v | {"plugins": names}


def changed(config: Config, fields: Json) -> Config:
  """Resolves a config again with other values, for example {"eval.tasks": ""}.

  Derived fields, such as model.ff_dim and overlap.taus, keep their values. Only with
  another algorithm, they are derived again.
  """
  v = leaves(config.to_dict())
  if fields.get("algorithm", config.algorithm) != config.algorithm:
    v = underived(v)
  return _resolve(v | dict(fields))


def underived(v: Json) -> Json:
  """Returns the fields of a resolved config without those that follow from others."""
  derived = _derived(v)
  if v["algorithm"] != "streaming":
    derived |= {f: v[f] for f in _WHOLE}
  return {f: x for f, x in v.items() if f not in derived or derived[f] != x}


def difference(old: Json, new: Json) -> dict[str, str]:
  """Returns {field: "old -> new"} for the fields in which two nested dicts differ."""
  a, b = leaves(old), leaves(new)
  pairs = {f: (a.get(f, "(absent)"), b.get(f, "(absent)")) for f in sorted(a | b)}
  return {f: f"{x!r} -> {y!r}" for f, (x, y) in pairs.items() if x != y}


def _resolve(v: Json) -> Config:
  names = plugins_of(v)
  defaults = _defaults(names)  # Imports plug-ins, also from paths.
  names = tuple(dict.fromkeys(map(plugins.module_of, names)))
  # Fields may be missing: a config file may name a plug-in without its fields, and a
  # saved config may be older than a field.
  v = defaults | v | {"plugins": names}
  # The flag --config.overlap.taus= sets ("",).
  v = {f: () if isinstance(x, tuple) and x == ("",) else x for f, x in v.items()}
  kinds = _kinds(names)
  v = checks.check_each(v, defaults, kinds)
  if v["algorithm"] != "streaming":
    v |= _WHOLE
  tokens_per_step = v["train.batch_size"] * v["model.seq_len"]
  steps = {"train.steps": v["train.steps"] or v["train.tokens"] // tokens_per_step}
  v |= checks.check_each(steps, defaults, {field: kinds[field] for field in steps})
  if not v["train.steps"]:
    raise ConfigError(
      f"train.steps is 0 and train.tokens is {v['train.tokens']}; set train.steps, or"
      f" set train.tokens to at least one batch of {tokens_per_step} tokens."
    )
  v["train.tokens"] = v["train.steps"] * tokens_per_step
  for extension in _build(v).effective:
    v |= extension.fill_in(_build(v))
  v["wire.format"] = _format(v)
  derived = _derived(v)
  v["overlap.taus"] = tuple(v["overlap.taus"] or derived["overlap.taus"])
  fill_in(v)
  v["model.ff_dim"] = v["model.ff_dim"] or derived["model.ff_dim"]
  if v["inner.weight_decay"] < 0:
    v["inner.weight_decay"] = derived["inner.weight_decay"]
  c = _build(v)
  checks.check_together(c, v, defaults)
  checks.check_profile(c)
  return c


def check_some(fields: Json) -> Config:
  """Checks some fields of a config, such as the arguments of the library.

  Returns:
    A config with these fields and with defaults. The wire format is the only derived
    field that is filled in. If a plug-in of diloco has the compressor, this function
    loads the plug-in.

  Raises:
    ConfigError: a field has a value that cannot work.
  """
  coder = str(fields.get("wire.compressor", "")).partition("(")[0]
  names = tuple({coder}.intersection(plugins.contrib()))
  defaults = _defaults(names)
  given = defaults | dict(fields) | {"plugins": names}
  v = checks.check_each(given, defaults, _kinds(names))
  v["wire.format"] = _format(v)
  c = _build(v)
  checks.check_names(c)
  combinations.check(v, defaults)
  combinations.check_effects(c, v, defaults)
  for extension in c.extensions:
    extension.check(c)
  return c


def _derived(v: Json) -> Json:
  """Returns the values that some fields have if they are not given."""
  return {
    "model.ff_dim": 4 * v["model.dim"],
    "inner.weight_decay": 1.0 / (v["inner.decay_steps"] or v["train.steps"] or 1),
    "wire.format": _format({**v, "wire.format": "auto"}),
    "overlap.taus": (v["overlap.tau"],) * v["replicas"],
  }


def _format(v: Json) -> str:
  """Returns the number format of the wire."""
  if v["wire.format"] != "auto":
    return str(v["wire.format"])
  return "fp32" if v["algorithm"] == "diloco" else "e3m0"


def _build(v: Json) -> Config:
  """Makes a `Config` from {field: value}."""
  groups = dict[str, Json]()  # {group: {name: value}}
  for field, value in v.items():
    group, _, name = field.rpartition(".")
    groups.setdefault(group, {})[name] = value
  default, alone = Config(), groups.pop("")
  kinds = plugins.load(v["plugins"])
  made = {name: kind(**groups.pop(name, {})) for name, kind in kinds.items()}
  groups["model"]["extensions"] = (*filter(None, [made.get(v["model.name"])]),)
  parts = {
    group: dataclasses.replace(getattr(default, group), **values)
    for group, values in groups.items()
  }
  return Config(**alone, **parts, extensions=tuple(made.values()))
