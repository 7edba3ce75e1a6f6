"""Loads a sweep file, and lets its runs share compiled programs. Imports no JAX."""

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence

import ml_collections

from diloco.config.checks import unknown
from diloco.config.command_line import asked_plugins, with_flags
from diloco.config.resolve import add_plugins, leaves
from diloco.errors import ConfigError
from diloco.sweep.grid import Point, Sweep, refusal
from diloco.sweep.search import Search, search_all
from diloco.util import command


def load_sweep(name: str, fields: Sequence[str] = ()) -> Sweep:
  """Runs a sweep file.

  Args:
    name: a file or the name of a shipped sweep; an argument may follow after a colon.
    fields: flags --config.FIELD=VALUE, which change the config of every point.

  Raises:
    ConfigError: the file has an error, or returns no sweep that can be searched; a
      field does not exist, or the points of the sweep differ in this field.
  """
  path, _, argument = name.partition(":")
  if not path:
    raise ConfigError("--sweep must be given, for example --sweep=configs/ladder.py.")
  module = command.load_module(path, "get_sweep", "--sweep=configs/ladder.py")
  try:
    sweep = module.get_sweep(*filter(None, [argument]))
    if not isinstance(sweep, Sweep):
      raise ValueError(f"get_sweep() returns {sweep!r}; return a Sweep of grid.py.")
    searches = search_all(sweep.grids, lambda point: None)  # Checks every `like`.
  except Exception as error:
    raise ConfigError(f"{path}: {command.located(error, module.__file__)}") from error
  return _with_fields(sweep, searches, fields) if fields else sweep


def _with_fields(
  sweep: Sweep, searches: Sequence[Search], fields: Sequence[str]
) -> Sweep:
  """Returns a sweep in which some config fields have the same value at every point.

  Raises:
    ConfigError: a field does not exist, the points differ in it, or its value is wrong.
  """
  some = [point for search in searches for point in search.points]
  for search in searches:
    beside = [axis.beside(p) for axis in search.grid.axes for p in search.points[:1]]
    some += itertools.chain.from_iterable(beside)
  pairs = [flag.removeprefix("--config.").partition("=")[::2] for flag in fields]
  named = asked_plugins(pairs)

  def with_groups(point: Point) -> ml_collections.ConfigDict:
    """Makes the config of a point, with the fields of the plug-ins that flags name."""
    try:
      config = sweep.config(dict(point))
      add_plugins(config, *named)
    except Exception as error:
      raise refusal(point, error) from error
    return config

  plain = [leaves(with_groups(point).to_dict()) for point in some]
  for flag, (field, _) in zip(fields, pairs):
    if field not in plain[0]:
      raise ConfigError(f"--config.{field} is no field{unknown(field, plain[0])}.")
    if len({repr(values.get(field)) for values in plain}) > 1:
      raise ConfigError(
        f"{flag} is given, but the runs differ in {field}; leave it out."
      )
  config = lambda point: with_flags(with_groups(point), fields)
  config(some[0])  # Raises an error if a value has a wrong type.
  return dataclasses.replace(sweep, config=config)


def shared_programs(results: pathlib.Path) -> dict[str, str]:
  """Returns environment variables with which runs share compiled programs."""
  return {
    "JAX_COMPILATION_CACHE_DIR": str(results.absolute() / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
