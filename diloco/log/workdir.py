"""Reads the folder of a run, even while the run trains. No JAX."""

import os
import pathlib
import types
from collections.abc import Iterator, Sequence

from diloco.config import Config
from diloco.config.resolve import leaves, shown
from diloco.errors import ConfigError
from diloco.log import metrics
from diloco.spec import plugins
from diloco.util import files
from diloco.util.types import Json

# If several runs train in one process, `failed: ` stands before a run's error in the
# log.txt of this run. `error: ` stands before an error of the process, in the log.txt
# of the first run.
FAILED = "failed: "
# Fields that are summed over the sites of a run.
_SUMMED = ("replicas", "train.batch_size", "data.shards", "overlap.taus")
_BLOCK = 1 << 16  # Bytes of one read from the end of a file.


def parts_of(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the folders of a run's parts: site-0, site-1, ..., or the folder itself.

  The list is empty if no such folder has a metrics.jsonl.
  """
  parts = [path.parent for path in folder.glob(f"site-*/{metrics.FILE}")]
  if parts:
    return sorted(parts, key=lambda path: (len(path.name), path.name))
  return [folder] if (folder / metrics.FILE).is_file() else []


def read_config(folder: pathlib.Path) -> Json:
  """Reads all fields of a run's config; {} if config.json is absent or damaged."""
  return files.read_json(folder / metrics.CONFIG) or {}


def read_contents(folder: pathlib.Path) -> dict[str, str]:
  """Reads the digests of a run's data; {} for a run of an earlier version."""
  return files.read_json(folder / metrics.CONTENTS) or {}


def check_own(folder: pathlib.Path) -> None:
  """Refuses a folder whose config.json is not of a run: a run would overwrite it.

  Raises:
    ConfigError: the folder is an export, or the folder of another program.
  """
  if (saved := read_config(folder)) and "algorithm" not in saved:
    raise ConfigError(
      f"--workdir is {str(folder)!r}, whose config.json is not that of a run, and"
      " training would replace it; give another folder."
    )


def whole_config(parts: Sequence[pathlib.Path]) -> Config:
  """Returns the config of a run, joined from its parts if there are several.

  Raises:
    ConfigError: a folder has no config, or this version cannot use it.
  """
  configs = []
  for part in parts:
    if not (saved := read_config(part)):
      raise ConfigError(f"{part} has no config.json that can be read.")
    configs.append(shown(saved))
  first, *others = (leaves(c.to_dict()) for c in configs)
  transport = plugins.transport(configs[0].overlap.transport)
  summed = (*_SUMMED, *transport.summed)
  whole = {f: sum((v[f] for v in others), first[f]) for f in summed}
  # Each part has its own batch size, so their sum may not be a multiple of `rows`.
  rows = whole["data.shards"] or whole["replicas"]
  whole["train.batch_size"] -= whole["train.batch_size"] % rows
  joined = configs[0].to_dict()
  for field, value in whole.items():
    group, _, name = field.rpartition(".")
    (joined[group] if group else joined)[name] = value
  return shown(joined) if others else configs[0]  # Imports no strange plug-in.


def read(
  folder: pathlib.Path, *kinds: str, name: str = "WORKDIR", parts: bool = False
) -> tuple[Config, list[metrics.Kinds]]:
  """Reads the config of a run, and some kinds of records of each of its parts.

  Args:
    folder: folder of the run.
    kinds: as for `metrics.read_kinds`.
    name: the flag or argument that gives the folder.
    parts: whether the folder may have the parts site-0, site-1, ...

  Raises:
    ConfigError: the folder has no run, or this version cannot use the run's config.
  """
  folders = parts_of(folder)
  if not folders or (not parts and folders != [folder]):
    raise ConfigError(
      f"{name} is {str(folder)!r}, which has no {metrics.FILE}"
      f"{files.folders_with(metrics.FILE, folder)}; give the --workdir of a run of"
      " diloco.main."
    )
  return whole_config(folders), [metrics.read_kinds(part, *kinds) for part in folders]


def title(c: Config | types.SimpleNamespace) -> str:
  """Names a run in a title, such as "streaming, M=2, H=30"."""
  synced = c.algorithm != "data_parallel"
  return f"{c.algorithm}, M={c.replicas}" + (f", H={c.sync_every}" if synced else "")


def backwards(path: pathlib.Path) -> Iterator[bytes]:
  """Yields the lines of a file from the last to the first; none if it is missing."""
  if not path.is_file():
    return
  with path.open("rb") as file:
    end, rest = file.seek(0, os.SEEK_END), b""
    while end:
      start = max(end - _BLOCK, 0)
      file.seek(start)
      rest, *lines = (file.read(end - start) + rest).split(b"\n")
      yield from reversed(lines)
      end = start
    yield rest
