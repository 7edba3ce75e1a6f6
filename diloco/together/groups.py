"""Finds runs of a sweep that can train in one program (--vectorize). No JAX."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from diloco.config.resolve import leaves
from diloco.spec import plugins

T = TypeVar("T")
# The fields in which the runs of a group may differ.
FIELDS = (
  "seed, inner.learning_rate, inner.weight_decay, outer.learning_rate and the momentum"
  " of sgd in outer.optimizer"
)
_VARIED = ("seed", "inner.learning_rate", "outer.learning_rate")
# A run whose momentum is no number below 1 trains alone; its own start refuses it.
_BELOW_1 = r"(?:0?\.\d+|0|\d(?:\.\d+)?[eE]-0*[1-9]\d*)(?=[,)\s])"
_MOMENTUM = re.compile(r"^(\s*sgd\((?:[^)]*[\s,])?momentum\s*=\s*)" + _BELOW_1)
# {field: the value that a run in a group must have}
_NEEDED = {
  "overlap.transport": "device",
  "outer.offload": False,
  "log.wandb_project": "",
  "profile.steps": "",
}


def alike(config: Mapping[str, Any]) -> str:
  """Returns a text that is the same for all runs that can train together.

  Args:
    config: a config in the form of config.json.
  """
  v = {field: x for field, x in leaves(config).items() if field not in _VARIED}
  # Without weight decay the optimizer has another program.
  v["inner.weight_decay"] = bool(v["inner.weight_decay"])
  v["outer.optimizer"] = _MOMENTUM.sub(r"\1...", v["outer.optimizer"])
  return json.dumps(v, sort_keys=True)


def obstacle(config: Mapping[str, Any]) -> str:
  """Says why a run must train alone; "" if it can train in a group."""
  v = leaves(config)
  obstacles = [f"{f} is {v[f]!r}" for f, value in _NEEDED.items() if v[f] != value]
  # Plug-ins from outside this package may keep the state of a single run.
  if not {*v["plugins"]} <= {*plugins.contrib()}:
    obstacles.append(f"plugins is {v['plugins']!r}")
  return next(iter(obstacles), "")


def split(configs: Mapping[str, Mapping[str, Any]], most: int) -> list[list[str]]:
  """Divides runs into groups that can train together, ordered by their first runs.

  Args:
    configs: {name: config of the run}.
    most: the largest number of runs in a group.

  Returns:
    The names of each group's runs.
  """
  by_config: dict[str, list[str]] = {}
  for name, config in configs.items():
    alone = most == 1 or obstacle(config)
    by_config.setdefault(name if alone else alike(config), []).append(name)
  return at_most(most, by_config.values())


def at_most(most: int, groups: Iterable[list[T]]) -> list[list[T]]:
  """Cuts groups into parts of at most `most` runs."""
  return [some[i : i + most] for some in groups for i in range(0, len(some), most)]
