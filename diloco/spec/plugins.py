"""What a plug-in adds to configs and to the arithmetic of a run. No JAX.

A plug-in is a module that `plugins` names; `diloco.contrib` has those of later papers.
It registers names for fields that take names (`compressors.register`, `EXCHANGES`,
`MEANS`, `optimizers.OWN`, `registry.register`), or an `Extension`: fields of its own,
and what they do. Config, ledger, checkpoints, sweeps and simulators ask this file.
"""

import dataclasses
import importlib
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from diloco.errors import ConfigError

CONTRIB = "diloco.contrib"


class Rule(NamedTuple):
  """What one choice needs of other fields.

  Attributes:
    field: the field with the choice.
    choice: its value; None: any but the default.
    reason: why it needs that.
    needs: {other field: values that work}. data_parallel ignores most fields, so then
      only `algorithm` counts.
  """

  field: str
  choice: Any
  reason: str
  needs: Mapping[str, tuple]


class Average(NamedTuple):
  """float32 values that all replicas average between the syncs.

  Attributes:
    every: inner steps between two averages.
    values: values of one replica, if no tensor is sharded.
  """

  every: int
  values: int


class Exchange(NamedTuple):
  """How replicas exchange a fragment, by the name in wire.exchange.

  Attributes:
    copies: how often one of M replicas sends its bytes.
    own_outer: whether every replica has outer parameters of its own.
    outer_step: lines 6 to 12, with the arguments of `outer.outer_step`; None: those.
    programs: the programs of this outer step, for the dry run; see
      `Extension.programs`.
  """

  copies: Callable[[int], float]
  own_outer: bool = False
  outer_step: Callable | None = None
  programs: Callable | None = None


@dataclasses.dataclass(frozen=True)
class Extension:
  """Fields of a plug-in. A subclass is a frozen dataclass; it overrides what it needs.

  `c` is the whole config of a run.
  """

  def fill_in(self, v: Mapping[str, Any]) -> dict[str, Any]:
    """Returns other fields that follow from these; v has all fields by name."""
    return {}

  def check(self, c: Any) -> None:
    """Refuses what `RULES` cannot say.

    Raises:
      ConfigError: the fields cannot work.
    """

  def effects(self, c: Any) -> dict[str, tuple[bool, str]]:
    """Returns {field: (whether it does nothing, why)}; such fields are refused."""
    return {}

  def joint_steps(self, c: Any) -> int:
    """Counts the first steps, in which replicas average gradients and stay equal."""
    return 0

  def updates_early(self, c: Any) -> bool:
    """Returns whether the outer optimizer is updated in the joint steps, too."""
    return True

  def whole_round(self, c: Any) -> bool:
    """Returns whether an exchange takes a whole round of H steps."""
    return False

  def own_outer(self, c: Any) -> bool:
    """Returns whether every replica has outer parameters of its own."""
    return False

  def averages(self, c: Any) -> dict[str, Average]:
    """Returns what is averaged between the syncs, by kind."""
    return {}

  def average(
    self, c: Any, kind: str, t: int, plan: Any, state: Any
  ) -> tuple[Any, int]:
    """Averages one kind after inner step t, before the outer step.

    Returns:
      The new `TrainState`, and the values that one replica's devices averaged.
    """
    raise NotImplementedError

  def outer_step(self, c: Any) -> Callable | None:
    """Returns lines 6 to 12 in place of `outer.outer_step`; None: not this plug-in."""
    return None

  def programs(self, c: Any, plan: Any, state: Any) -> Iterable[tuple]:
    """Yields programs for the dry run: (name, {part: arrays}, function, args, kwargs).

    A plug-in with an outer step of its own yields all of its programs.
    """
    return ()


Group = TypeVar("Group", bound=Extension)
# {name of the group: its fields}, in the order of registration.
EXTENSIONS: dict[str, type[Extension]] = {}
RULES: list[Rule] = []
# Further names of outer.average: functions like `outer.average`, without its last
# argument.
MEANS: dict[str, Callable] = {}
EXCHANGES: dict[str, Exchange] = {
  "gather": Exchange(lambda replicas: replicas - 1),  # An all-gather of payloads.
  "psum": Exchange(lambda replicas: 2 * (replicas - 1) / replicas),  # A ring.
}


def register(name: str, group: type[Extension]) -> None:
  """Adds a group of fields: `name.FIELD`."""
  EXTENSIONS[name] = group


def load(names: Iterable[str]) -> dict[str, type[Extension]]:
  """Imports plug-ins; returns the groups of fields that they have registered.

  Args:
    names: modules, or names of files in `diloco/contrib`.

  Raises:
    ConfigError: a module cannot be imported.
  """
  found = dict[str, type[Extension]]()
  for name in names:
    module = f"{CONTRIB}.{name}" if name in contrib() else str(name)
    try:
      importlib.import_module(module)
    except Exception as error:  # A module may raise anything.
      reason = error if isinstance(error, ImportError) else f"it raises {error!r}"
      raise ConfigError(
        f"plugins names {name!r}, but {reason}; is its folder on PYTHONPATH, or is it"
        f" one of {', '.join(contrib())}?"
      ) from error
    found |= {n: kind for n, kind in EXTENSIONS.items() if kind.__module__ == module}
  return found


def contrib() -> list[str]:
  """Lists the plug-ins that ship with the package."""
  folder = pathlib.Path(__file__).parents[1] / "contrib"
  return sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_"))


def hint(name: str) -> str:
  """Returns the rest of a sentence about an unknown name, if a plug-in has it."""
  return f"; the plug-in {name} has it: set plugins=('{name}',)" * (name in contrib())
