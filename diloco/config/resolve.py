"""Makes a `Config` from a ConfigDict: fills in fields, finds mistakes. No JAX.

Every error is one sentence with the field, its value and the remedy.
"""

import dataclasses
import math
import numbers
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from diloco.config import rules
from diloco.errors import ConfigError
from diloco.spec import plugins, shapes, sizes
from diloco.spec.fields import Config, Range
from diloco.tokenizer.vocabulary import fill_in


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Flattens nested dicts: {"model.dim": 512, ...}; lists (JSON) become tuples."""
  found = dict[str, Any]()
  for name, value in config.items():
    if isinstance(value, Mapping):
      found |= leaves(value, f"{prefix}{name}.")
    else:
      found[prefix + name] = tuple(value) if isinstance(value, list) else value
  return found


def _types(group: object) -> dict[str, Any]:
  """Returns {"model": {"dim": its type with its Range, ...}, ...}."""
  hints = typing.get_type_hints(group, include_extras=True)
  return {
    name: _types(kind) if dataclasses.is_dataclass(kind) else kind
    for name, kind in hints.items()
  }


# Plug-ins that the flag --config.plugins names; the config file does not know it.
_asked_for: tuple[str, ...] = ()


def ask_for(names: Sequence[str]) -> None:
  """Gives every `default_config` from now on the fields of these plug-ins.

  Raises:
    ConfigError: a plug-in cannot be imported.
  """
  global _asked_for
  plugins.load(names)
  _asked_for = tuple(names)


def default_config(*names: str) -> ml_collections.ConfigDict:
  """Returns the defaults of fields.py, which config files and flags change.

  Args:
    names: plug-ins, whose fields are there, too.

  Raises:
    ConfigError: a plug-in cannot be imported.
  """
  c = ml_collections.ConfigDict(Config().to_dict())
  add_plugins(c, *names, *_asked_for)
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
  c.plugins = tuple(dict.fromkeys((*c.plugins, *names)))


def _extensions(names: Sequence[str]) -> dict[str, dict[str, Any]]:
  """Returns {name: {field: default}} of the groups of plug-ins."""
  return {n: dataclasses.asdict(kind()) for n, kind in plugins.load(names).items()}


def _defaults(names: Sequence[str]) -> dict[str, Any]:
  """Returns the default of each field of a config with these plug-ins."""
  return leaves(Config().to_dict() | _extensions(names))


def _names(v: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns the plug-ins of a config.

  Raises:
    ConfigError: `plugins` are no names.
  """
  names = v.get("plugins", ())
  if not isinstance(names, tuple | list) or not all(isinstance(x, str) for x in names):
    raise ConfigError(f"plugins is {names!r}; give names, as ('sparta', 'my_module').")
  # The flag --config.plugins=a,b sets ("a,b",).
  return tuple(name for x in names for name in x.split(",") if name)


def resolve(config: ml_collections.ConfigDict | Config) -> Config:
  """Fills in the fields that follow from others, and checks all fields.

  Args:
    config: has fields of `default_config`; the others take their defaults.

  Returns:
    The config with final steps, tokens, taus, ff_dim, weight decay, wire format,
    tokenizer and vocabulary; unless streaming also pattern and overlap. `resolve` does
    not change this config again.

  Raises:
    ConfigError: a field has a value that cannot work.
  """
  c = _resolve(leaves(config.to_dict()))
  rules.check_effects(c, leaves(c.to_dict()), _defaults(c.plugins))
  _check_all_synced(c)
  return c


def complete(saved: Mapping[str, Any]) -> Config:
  """Resolves a config read from JSON; fields that it lacks take their defaults.

  Raises:
    ConfigError: a field no longer exists, or has a value that cannot work.
  """
  return _resolve(leaves(saved))


def changed(config: Config, fields: Mapping[str, Any]) -> Config:
  """Resolves the config again with other values, for example {"eval.tasks": ""}.

  Derived fields, such as model.ff_dim and overlap.taus, keep their values.
  """
  return _resolve(leaves(config.to_dict()) | dict(fields))


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
  """Returns {field: "old -> new"} for the fields in which two nested dicts differ."""
  a, b = leaves(old), leaves(new)
  pairs = {f: (a.get(f, "(absent)"), b.get(f, "(absent)")) for f in sorted(a | b)}
  return {f: f"{x!r} -> {y!r}" for f, (x, y) in pairs.items() if x != y}


def _resolve(v: dict[str, Any]) -> Config:
  names = _names(v)
  defaults = _defaults(names)
  # A config file may name a plug-in and leave its fields out, and a saved config may
  # be older than a field.
  v = defaults | v | {"plugins": names}
  # The flag --config.overlap.taus= sets ("",).
  v = {field: () if value == ("",) else value for field, value in v.items()}
  _check_each(v, defaults)
  if v["algorithm"] != "streaming":
    v["fragments.pattern"] = "whole"
    v |= {"overlap.tau": 0, "overlap.taus": (), "overlap.alpha": 0.0}
  if v["algorithm"] != "data_parallel":
    for extension in _build(v).extensions:
      v |= extension.fill_in(v)
  if v["wire.format"] == "auto":
    v["wire.format"] = "fp32" if v["algorithm"] == "diloco" else "e3m0"
  v["overlap.taus"] = tuple(v["overlap.taus"] or [v["overlap.tau"]] * v["replicas"])
  fill_in(v)
  v["model.ff_dim"] = v["model.ff_dim"] or 4 * v["model.dim"]
  tokens_per_step = v["train.batch_size"] * v["model.seq_len"]
  v["train.steps"] = v["train.steps"] or v["train.tokens"] // tokens_per_step
  if not v["train.steps"]:
    raise ConfigError(
      f"train.steps is 0 and train.tokens is {v['train.tokens']}; set train.steps, or"
      f" set train.tokens to at least one batch of {tokens_per_step} tokens."
    )
  v["train.tokens"] = v["train.steps"] * tokens_per_step
  if v["inner.weight_decay"] < 0:
    v["inner.weight_decay"] = 1.0 / (v["inner.decay_steps"] or v["train.steps"])
  c = _build(v)
  _check_together(c, v, defaults)
  if c.outer.changes and not c.outer.decay_syncs and c.make_fragments():
    c = _build(v | {"outer.decay_syncs": max(c.num_updates())})
  _check_profile(c)
  return c


def check_some(fields: Mapping[str, Any]) -> Config:
  """Checks fields that are no whole run, as the library's arguments are.

  Returns:
    A config with these fields and defaults; it is not resolved.

  Raises:
    ConfigError: a field has a value that cannot work.
  """
  defaults = _defaults(())
  v = defaults | dict(fields)
  _check_each(v, defaults)
  c = _build(v)
  _check_names(c)
  rules.check(v, defaults)
  rules.check_effects(c, v, defaults)
  return c


_KINDS = {int: (numbers.Integral, "a whole number"), float: (numbers.Real, "a number")}


def _check_each(v: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
  """Checks names, choices and limits of all fields."""
  for field in sorted(v.keys() - defaults.keys()):
    more = plugins.hint(field.partition(".")[0])
    raise ConfigError(
      f"{field} is {v[field]!r}, but there is no such field; see"
      f" diloco/spec/fields.py{more}."
    )
  groups = plugins.load(v["plugins"])
  kinds = _types(Config) | {name: _types(group) for name, group in groups.items()}
  del kinds["extensions"]
  for field, kind in leaves(kinds).items():
    base = (*typing.get_args(kind), kind)[0] if hasattr(kind, "__metadata__") else kind
    if base in _KINDS and (
      not isinstance(v[field], _KINDS[base][0]) or isinstance(v[field], bool)
    ):
      raise ConfigError(f"{field} is {v[field]!r}; give {_KINDS[base][1]}.")
    if isinstance(v[field], float) and not math.isfinite(v[field]):
      raise ConfigError(f"{field} is {v[field]}; give a finite number.")
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if choices and v[field] not in choices:
      raise ConfigError(f"{field} is {v[field]!r}; choose one of {', '.join(choices)}.")
    for limits in getattr(kind, "__metadata__", ()):
      if isinstance(limits, Range) and v[field] not in limits:
        raise ConfigError(f"{field} is {v[field]}; it must be {limits}.")


def _build(v: Mapping[str, Any]) -> Config:
  """Makes a config of the fields in `v`."""
  groups = dict[str, dict[str, Any]]()  # {group: {name: value}}
  for field, value in v.items():
    group, _, name = field.rpartition(".")
    groups.setdefault(group, {})[name] = value
  default, own = Config(), groups.pop("")
  kinds = plugins.load(v["plugins"])
  made = [kind(**groups.pop(name, {})) for name, kind in kinds.items()]
  parts = {
    group: dataclasses.replace(getattr(default, group), **values)
    for group, values in groups.items()
  }
  return Config(**own, **parts, extensions=tuple(made))


def _check_together(
  c: Config, v: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
  """Checks fields that depend on each other; `v` has all by name."""
  tau = max((tau for tau in c.overlap.taus if isinstance(tau, int)), default=0)
  rules.check({**v, "overlap.tau": tau}, defaults)
  count = c.sites.count or c.replicas
  if c.sites.quorum > count:
    raise ConfigError(
      f"sites.quorum is {c.sites.quorum}, but there are {count} sites; lower it."
    )
  if c.eval.test_tokens and not c.eval.tokens:
    raise ConfigError(
      f"eval.test_tokens is {c.eval.test_tokens}, but eval.tokens is 0, which takes all"
      " held-out text; set eval.tokens."
    )
  m, shares = c.model, c.replicas * c.train.accumulate
  for multiple, n, divisor, d in (
    ("train.batch_size", c.train.batch_size, "replicas * train.accumulate", shares),
    ("train.batch_size", c.train.batch_size, "data.shards", c.data.shards),
    ("data.shards", c.data.shards, "replicas", c.replicas),
    ("replicas", c.replicas, "sites.count", c.sites.count),
    ("model.dim", m.dim, "model.num_heads", 0 if m.head_dim else m.num_heads),
    ("model.num_heads", m.num_heads, "model.num_kv_heads", m.num_kv_heads),
    ("model.seq_len", m.seq_len, "model.loss_chunk", m.loss_chunk),
  ):
    if d and n % d:
      raise ConfigError(
        f"{multiple} is {n}, which {divisor} = {d} does not divide; change one of them."
      )
  for field in shapes.ONLY_QWEN3 if m.name == "decoder" else ():
    value, default = getattr(m, field), defaults[f"model.{field}"]
    if value != default:
      raise ConfigError(
        f"model.{field} is {value}, which model.name=decoder does not have; leave it at"
        f" {default}, or set model.name=qwen3."
      )
  taus = c.overlap.taus
  if len(taus) != c.replicas or not all(isinstance(tau, int) for tau in taus):
    raise ConfigError(
      f"overlap.taus is {taus}; give {c.replicas} whole numbers, one per replica, or"
      " leave it empty."
    )
  try:
    c.make_schedule()
    shapes.parameters(c.model)
  except ValueError as error:
    raise ConfigError(str(error)) from error
  _check_names(c)
  if c.make_fragments():
    for extension in c.extensions:
      extension.check(c)


def _check_names(c: Config) -> None:
  """Refuses names that nothing has registered."""
  try:
    sizes.check(c.wire)
  except ValueError as error:
    raise ConfigError(str(error)) from error
  known = ("mean", *plugins.MEANS)
  if c.outer.average not in known:
    raise ConfigError(
      f"outer.average is {c.outer.average!r}; choose one of"
      f" {', '.join(known)}{plugins.hint(c.outer.average)}."
    )


def _check_profile(c: Config) -> None:
  asked, last = c.profile.steps, c.train.steps
  given = re.fullmatch(r"(\d{1,9}):(\d{1,9})", asked, re.ASCII)
  if asked and not (given and 1 <= int(given[1]) <= int(given[2]) <= last):
    raise ConfigError(
      f"profile.steps is {asked!r}; give the first and the last inner step to trace,"
      f" such as 100:105, from 1 to train.steps = {last}."
    )


def _check_all_synced(c: Config) -> None:
  """Refuses a run so short that some outer parameters would stay untrained."""
  if 0 in c.num_syncs():
    schedule = c.make_schedule()
    first = max(map(schedule.first_send, range(schedule.num_fragments)))
    joint = c.joint_steps
    after = f" after {joint} joint steps" if joint else ""
    field = "the number of joint steps or sync_every" if joint else "sync_every"
    final = "" if c.own_outer else ", or set outer.final_sync=true"
    raise ConfigError(
      f"train.steps is {c.train.steps}, but with sync_every={c.sync_every}{after} some"
      f" parameters are first synchronised at step {first}, so the outer parameters,"
      f" which are evaluated, would not contain all training; train longer or lower"
      f" {field}{final}."
    )
