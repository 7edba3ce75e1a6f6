"""Loads a sweep file, and prepares what its runs share. No JAX."""

import pathlib

from diloco.errors import ConfigError
from diloco.sweep.grid import Sweep
from diloco.sweep.search import search_all
from diloco.util import command


def load_sweep(name: str) -> Sweep:
  """Runs a sweep file.

  Args:
    name: a file or the name of a shipped sweep; an argument follows a colon.

  Raises:
    ConfigError: the file has an error, or returns no sweep that can be searched.
  """
  path, _, argument = name.partition(":")
  if not path:
    raise ConfigError("--sweep must be given, for example --sweep=configs/ladder.py.")
  module = command.load_module(path, "get_sweep", "--sweep=configs/ladder.py")
  try:
    sweep = module.get_sweep(*filter(None, [argument]))
    if not isinstance(sweep, Sweep):
      raise ValueError(f"get_sweep() returns {sweep!r}; return a Sweep of grid.py.")
    search_all(sweep.grids, lambda point: None)  # Calls `like` for every cell.
  except Exception as error:
    raise ConfigError(f"{path}: {command.located(error, module.__file__)}") from error
  return sweep


def shared_programs(results: pathlib.Path) -> dict[str, str]:
  """Returns environment variables with which runs share compiled programs."""
  return {
    "JAX_COMPILATION_CACHE_DIR": str(results.absolute() / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
