"""Registers what plug-ins add to configs and to the arithmetic of a run. No JAX.

A plug-in is a module or a package that the field `plugins` names; the plug-ins in
`diloco.contrib` are methods of later papers and more. A plug-in calls `register` to add
a name that a field then accepts, such as a compressor for `wire.compressor`, or to add
an `Extension`, which has new fields. Config, ledger, checkpoints, sweeps and simulators
look up plug-ins in this file.
"""

import dataclasses
import importlib
import pathlib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypedDict, TypeVar, cast

from diloco.errors import ConfigError
from diloco.util import files
from diloco.util.command import located, meant
from diloco.util.types import PyTree

if TYPE_CHECKING:
  import optax
  from jax import Array
  from jax.stages import Wrapped

  from diloco.spec.fields import Config, WireConfig
  from diloco.spec.shapes import Architecture

CONTRIB = "diloco.contrib"
# Subfolder of a run's folder for copies of its plug-ins' files.
KEPT = "plugins"
_FILE = ".py"


# Remedy in an error message about a name that nothing has registered.
ASK = "; if a plug-in has it, name the plug-in in plugins"


class NotTrusted(ConfigError):
  """A saved record names plug-ins that are neither diloco's nor already imported."""


class Call(NamedTuple):
  """A call of a jitted function, for the dry run.

  Attributes:
    name: name of the program.
    held: {part of the state: its arrays that are arguments of the call}.
    function: the jitted function.
    args: its arguments.
    kwargs: its keyword arguments.
  """

  name: str
  held: Mapping[str, PyTree]
  function: "Wrapped"
  args: tuple[PyTree, ...]
  kwargs: Mapping[str, object]


class Rule(NamedTuple):
  """A value of one field that works only with some values of other fields.

  Attributes:
    field: name of the field.
    choice: the value; None means any value but the default.
    reason: the cause of the rule, for the error message.
    needs: {other field: values that work}. data_parallel ignores most fields, so for
      data_parallel only the needs of `algorithm` and `model.name` count.
  """

  field: str
  choice: object
  reason: str
  needs: Mapping[str, tuple[object, ...]]


class Average(NamedTuple):
  """Values that all replicas average between the syncs.

  Attributes:
    every: inner steps between two averages.
    sent: bytes that one replica sends in an average, if no tensor is sharded.
    run: averages the values after inner step t, before the outer step. Its arguments
      are t, the `Streaming` and the `TrainState`. It returns the new `TrainState`, and
      the bytes that one replica's devices sent.
    programs: yields the calls of jitted functions in `run`, for the dry run. Its
      arguments are the `Streaming` and the shapes of the `TrainState`.
    by_shard: whether other shards of a tensor (mesh.fsdp) give other values.
  """

  every: int
  sent: int
  run: Callable[..., tuple[PyTree, int]]
  programs: Callable[..., Iterable[Call]] = lambda sync, state: ()
  by_shard: bool = False


class Timetable(NamedTuple):
  """The averages of one plug-in, besides the average of the outer gradients.

  Attributes:
    joint_steps: number of first inner steps in which replicas average gradients and
      stay equal.
    averages: {kind: the values that replicas average between the syncs}.
  """

  joint_steps: int = 0
  averages: Mapping[str, Average] = {}


@dataclasses.dataclass(frozen=True)
class OuterStep:
  """The outer step (lines 6 to 12 of Algorithm 2), with the additions of plug-ins.

  Attributes:
    run: called as run(sync, t, params_M, state, last_send) after inner step t, where
      `sync` is the `Streaming`. It returns parameters, outer state and events, as
      `outer.outer_step` does. A final sync (`outer.final_sync`) calls only
      `outer.outer_step`.
    states: {name: init} of the states that `run` keeps for each fragment p in
      `state.own[p][name]`; checkpoints contain them. `init` takes the fragment's
      parameters of all replicas, float32 leaves (M, n, ...) under `blocks`, else (M,
      ...). `init` returns a tree of arrays. A tree that is built like the parameters is
      sharded like the parameters, with or without the axis M. Every device of a
      replica holds all other arrays whole.
  """

  run: Callable[..., tuple[PyTree, PyTree, list[PyTree]]]
  states: Mapping[str, Callable[[PyTree], PyTree]] = dataclasses.field(
    default_factory=dict
  )


class Compressor(NamedTuple):
  """The pure functions of a compressor; `sizes.py` defines N, S and R.

  Attributes:
    encode: float32 (N, S), state, R and a PRNG key -> uint8 (size,) and the new state.
    decode: uint8 (size,), N, S and R -> float32 (N, S).
    size: N, S and R -> the exact number of bytes; must not need JAX.
    init: a tensor -> its first state: a tree of float32 arrays of the tensor's shape,
      such as the error that error feedback keeps; () without state. Every replica has
      its own state, which is sharded and saved like its parameters.
  """

  encode: "Callable[[WireConfig, Array, PyTree, int, Array], tuple[Array, PyTree]]"
  decode: "Callable[[WireConfig, Array, int, int, int], Array]"
  size: "Callable[[WireConfig, int, int, int], int]"
  init: "Callable[[Array], PyTree]" = lambda x: ()


class BlockFormat(NamedTuple):
  """A number format whose codes come in blocks.

  Attributes:
    bits: bits per value.
    block_bytes: bytes that a block sends in addition to its codes.
    encode: blocks float32 (N, K, B) and S -> codes uint8 (N, K, B) and the additional
      bytes; the zeros after the first S values of a layer are only padding.
    decode: codes and additional bytes -> float32 (N, K, B).
  """

  bits: int
  block_bytes: int
  encode: "Callable[[Array, int], tuple[Array, Array]]"
  decode: "Callable[[Array, Array], Array]"


class Transport(NamedTuple):
  """The way in which payloads travel between replicas.

  Attributes:
    at_hosts: True: hosts hold the outer state. False: devices hold the outer state.
    needs: flags that a process needs because it trains only some of the replicas (a
      part of the run); "": all replicas train together. A checkpoint of a part has
      nothing in flight, and mesh.fsdp does not change the codes of a part.
    make_part: makes the `session.Part` of this process; called in `diloco.main`.
    summed: fields whose value for the whole run is the sum over its parts.
  """

  at_hosts: bool
  needs: str = ""
  make_part: Callable[..., PyTree] | None = None
  summed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Extension:
  """The fields of a plug-in. A subclass is a frozen dataclass that overrides methods.

  `c` is the whole config of a run. A group with the name of the run's architecture is
  also a part of `c.model`; the architecture's functions read it by `m.of(GROUP)`.

  Attributes:
    rules: combinations of fields that work, see `Rule`.
    wraps_last: whether `wrap` gets the outer step of all other plug-ins.
  """

  rules: ClassVar[tuple[Rule, ...]] = ()
  wraps_last: ClassVar[bool] = False

  def fill_in(self, c: "Config") -> dict[str, object]:
    """Returns values for other fields, {field: value}; `c.train.steps` is set.

    Raises:
      ConfigError: the fields of this group determine no value.
    """
    return {}

  def check(self, c: "Config") -> None:
    """Refuses combinations of fields that `rules` cannot express.

    Raises:
      ConfigError: the fields cannot work.
    """

  def effects(self, c: "Config") -> dict[str, tuple[bool, str]]:
    """Returns {field: (whether it has no effect, why)}; useless fields are refused."""
    return {}

  def free(self) -> tuple[str, ...]:
    """Lists the fields of this group that may change when a run continues.

    The entry "NAME." means all fields of the plug-in NAME; a run that continues may
    then also add or drop this plug-in.
    """
    return ()

  def extends(self) -> bool:
    """Returns whether a finished run can be extended by more steps."""
    return True

  def schedule(self, c: "Config") -> Timetable:
    """Returns the joint steps and the averages of this plug-in, see `Timetable`."""
    return Timetable()

  def wrap(self, c: "Config", step: OuterStep) -> OuterStep:
    """Returns the outer step that replaces `step`; it may call `step.run`."""
    return step

  def inner_optimizer(
    self,
    c: "Config",
    clip: "optax.GradientTransformation",
    make: "Callable[[int], optax.GradientTransformation]",
  ) -> "optax.GradientTransformation | None":
    """Returns the inner optimizer; None means `optax.chain(clip, make(1))`.

    Args:
      clip: clips gradients by their norm.
      make: makes the config's optimizer. Its argument is the number of axes that a
        tensor under `blocks` has in front of the axes of one layer.
    """
    return None


Group = TypeVar("Group", bound=Extension)


# {field that takes names: {name: its meaning}}; "fields" has the groups of fields.
Names = TypedDict(
  "Names",
  {
    "fields": dict[str, type[Extension]],
    # A compressor with arguments, such as "mine(k=3)", is registered as a function,
    # which raises ValueError if an argument cannot work.
    "wire.compressor": dict[str, Compressor | Callable[..., Compressor]],
    "wire.format": dict[str, BlockFormat],
    "inner.optimizer": dict[str, "Callable[..., optax.GradientTransformation]"],
    "outer.optimizer": dict[str, "Callable[..., optax.GradientTransformation]"],
    # Functions with the arguments of `algorithm.outer.average`, except the last.
    "outer.average": dict[str, "Callable[[PyTree, Array | None], PyTree]"],
    "overlap.transport": dict[str, Transport],
    # (number of layers, size) -> the layers of each fragment.
    "fragments.pattern": dict[str, Callable[[int, int], Sequence[Sequence[int]]]],
    "model.name": dict[str, "Architecture"],
    "eval.tasks": dict[str, str],  # Paths of JSON lines.
  },
)
NAMES = cast(Names, {kind: {} for kind in Names.__annotations__})


def register(kind: str, name: str, thing: object) -> None:
  """Registers a name that the field `kind` then accepts.

  Args:
    kind: a field, such as "wire.compressor". With "fields", `thing` is a subclass of
      `Extension`, and its fields get the names `name.FIELD`.
    thing: the meaning of the name, of the type in `Names` for this kind.

  Raises:
    ConfigError: `kind` is not a field that takes names.
  """
  if kind not in NAMES:
    raise ConfigError(
      f"register has the kind {kind!r}; choose one of {', '.join(NAMES)}."
    )
  cast(dict[str, dict[str, object]], NAMES)[kind][name] = thing


def transport(name: str) -> Transport:
  """Returns the transport whose name is a value of `overlap.transport`."""
  return NAMES["overlap.transport"][name]


register("overlap.transport", "device", Transport(at_hosts=False))
register("overlap.transport", "host", Transport(at_hosts=True))


def load(names: Iterable[str]) -> dict[str, type[Extension]]:
  """Imports plug-ins; returns the groups of fields that the plug-ins have registered.

  Args:
    names: modules, packages, names in `contrib()`, or paths of files `NAME.py`, each of
      which becomes the module NAME.

  Raises:
    ConfigError: a module cannot be imported.
  """
  groups = dict[str, type[Extension]]()
  for name in names:
    module = f"{CONTRIB}.{name}" if name in contrib() else module_of(name)
    path = pathlib.Path(name).expanduser().resolve()
    try:
      if name.endswith(_FILE):
        _import_file(path)
      importlib.import_module(module)
    except ImportError as error:
      ask = f"; is its folder on PYTHONPATH, or is it one of {', '.join(contrib())}?"
      raise ConfigError(f"plugins names {name!r}, but {error}{ask}") from error
    except Exception as error:  # A module may raise anything.
      fault = located(error, str(path))
      raise ConfigError(
        f"plugins names {name!r}, but it raises {fault}; mend it."
      ) from error
    places = {n: f"{kind.__module__}." for n, kind in NAMES["fields"].items()}
    # A package may define its groups in any of its modules.
    defined = [n for n, place in places.items() if place.startswith(f"{module}.")]
    groups |= {n: NAMES["fields"][n] for n in defined}
  return groups


def module_of(name: str) -> str:
  """Returns the module name of a plug-in that is given as a path or as a name."""
  return pathlib.Path(name).stem if name.endswith(_FILE) else name


def _import_file(path: pathlib.Path) -> None:
  """Imports a file of any folder as a module with the file's name.

  The file may import other files of its folder.

  Raises:
    ImportError: there is no such file, or another module has its name.
  """
  if not path.is_file():
    raise ImportError(f"there is no file {path}")
  if path.stem in contrib() or not path.stem.isidentifier():
    raise ImportError(f"{path.stem} is no name for a module; rename the file")
  importlib.invalidate_caches()  # The file may be newer than this process.
  sys.path += {str(path.parent)}.difference(sys.path)  # Last, so it hides no module.
  there = getattr(importlib.import_module(path.stem), "__file__", None)
  if not there or pathlib.Path(there).read_bytes() != path.read_bytes():
    raise ImportError(f"{there or path.stem} has its name; rename the file")


def keep(names: Iterable[str], workdir: pathlib.Path) -> None:
  """Copies the files of plug-ins into the folder of their run.

  Packages and the plug-ins that ship with diloco are not copied.
  """
  for name in set(names).difference(contrib()):
    [path, *others] = source_files(name)
    copy = workdir / KEPT / path.name
    is_there = copy.is_file() and copy.read_bytes() == path.read_bytes()
    if path.stem == name and not others and not is_there:
      copy.parent.mkdir(exist_ok=True)
      with files.replacing(copy) as file:
        file.write(path.read_bytes())


def kept(name: str, workdir: pathlib.Path) -> str:
  """Returns the path of a plug-in's copy in a run's folder; without one, `name`."""
  copy = workdir / KEPT / f"{name}{_FILE}"
  return str(copy) if copy.is_file() else name


def is_trusted(name: str) -> bool:
  """Returns whether a plug-in ships with diloco, or is imported already."""
  return name in contrib() or name in sys.modules


def check_trusted(names: Iterable[str]) -> None:
  """Refuses plug-ins that a record names, unless `is_trusted` accepts them.

  An import runs the code of a module, and a record may come from anybody. A record is
  the config of a workdir or of an export, or a table of runs.

  Raises:
    NotTrusted: the message tells how to allow the plug-ins at the command line.
  """
  strange = ",".join(n for n in names if not is_trusted(n))
  if strange:
    raise NotTrusted(
      f"plugins names {strange}, code that is not of diloco and would run here; if you"
      f" trust it, add --plugins={strange} to `python -m diloco ...`, or"
      f" --config.plugins={strange} to a command that trains; or give the path of the"
      f" copy in {KEPT}/ of the run's folder."
    )


def free() -> tuple[str, ...]:
  """Lists the plug-in fields that may change when a run continues."""
  return sum((kind().free() for kind in NAMES["fields"].values()), ())


def source_files(name: str) -> list[pathlib.Path]:
  """Lists the file of an imported module, or all files of the package that has it."""
  top = sys.modules[name.partition(".")[0]]
  folders = [pathlib.Path(folder) for folder in getattr(top, "__path__", ())]
  if folders:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))
  return [pathlib.Path(str(top.__file__))]


def contrib() -> list[str]:
  """Lists the plug-ins that ship with the package, files and folders."""
  folder = pathlib.Path(__file__).parents[1] / "contrib"
  folders = [path.parent for path in folder.glob("[!_]*/__init__.py")]
  return sorted(p.stem for p in (*folders, *folder.glob("[!_]*.py")))


def near_name(name: str, known: Collection[str]) -> str:
  """Returns the end of an error message about an unknown name."""
  return hint(name) or meant(name, known) or ASK


def check_name(field: str, name: str, known: Collection[str]) -> None:
  """Refuses a name that nothing has registered.

  Raises:
    ConfigError: the name is unknown.
  """
  if name not in known:
    near = near_name(name, [*known, *contrib()])
    raise ConfigError(f"{field} is {name!r}; choose one of {', '.join(known)}{near}.")


def hint(name: str) -> str:
  """Returns the end of an error message if a plug-in has the unknown name, else "".

  Names of a plug-in NAME are NAME, NAME with a number, `NAME.FIELD` and `NAME(...)`.
  """
  name = re.split(r"[.(]", name)[0]
  plugin = name if name in contrib() else name.rstrip("0123456789")
  if plugin not in contrib():
    return ""
  return f"; the plug-in {plugin} has it: set plugins=('{plugin}',)"
