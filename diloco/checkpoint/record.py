"""Lists a run's checkpoints and reads their records, not their arrays. No JAX.

Each checkpoint is a folder whose name is its step. The subfolder `state` holds the
arrays, in Orbax's format, and `record` holds the rest, as JSON. In a bucket, the record
is a file beside the folder, and `bucket.py` describes the files of arrays. A reader
gets exactly what was saved, or an error: checksums find damage that the file formats do
not reveal.
"""

import dataclasses
import json
import pathlib
import zlib

from diloco.errors import ConfigError
from diloco.util import remote
from diloco.util.types import Json

FOLDER = "checkpoints"  # In the folder of a run.


@dataclasses.dataclass
class Spent:
  """Time that a run has spent, summed over all its starts.

  Attributes:
    wall_s: seconds from each opening of the log to the last checkpoint.
    busy_s: seconds of training, without evaluations, checkpoints, and the first launch
      of each start, which compiles.
    steps: number of inner steps in `busy_s`.
  """

  wall_s: float = 0.0
  busy_s: float = 0.0
  steps: int = 0


@dataclasses.dataclass(frozen=True)
class Record:
  """The part of a checkpoint that is not arrays; it is stored as JSON.

  Attributes:
    config: all fields of the run's config.
    data: position in every shard of the text, see `TrainIterator.get_state`.
    ledger: fields of a `Ledger`.
    spent: fields of a `Spent`.
    finished: whether training has ended and nothing is in flight.
    fsdp: size of the fsdp axis of the mesh.
    in_flight: (p, size of the fsdp axis that encoded the payload) of each fragment in
      flight; `Checkpoints.save` fills it in.
    drained: `Schedule.drained` of an extended run.
    contents: `diloco.data.contents` of the run; {} if the process read no text.
    mixtures: the sentences of `resume.check` and `resume.mixture` at all resumes of the
      run so far.
    checksums: {name: checksum} of the arrays; `Checkpoints.save` fills it in.
  """

  config: Json
  data: Json = dataclasses.field(default_factory=dict)
  ledger: Json = dataclasses.field(default_factory=dict)
  spent: Json = dataclasses.field(default_factory=dict)
  finished: bool = False
  fsdp: int = 1
  in_flight: list[tuple[int, int]] = dataclasses.field(default_factory=list)
  drained: int = 0
  contents: dict[str, str] = dataclasses.field(default_factory=dict)
  mixtures: list[str] = dataclasses.field(default_factory=list)
  checksums: dict[str, int] = dataclasses.field(default_factory=dict)

  def to_json(self) -> Json:
    """Returns the fields and their checksum, for a JSON file."""
    fields = json.loads(json.dumps(dataclasses.asdict(self)))
    return {**fields, "crc32": _crc32(fields)}


def folder_of(workdir: pathlib.Path) -> pathlib.Path:
  """Returns the folder of a run's checkpoints, which may not exist yet.

  Raises:
    ConfigError: a file has the folder's name.
  """
  folder = (workdir / FOLDER).absolute()
  if folder.exists() and not folder.is_dir():
    raise ConfigError(
      f"--workdir is {workdir}, where `checkpoints` is a file and not a folder; move it"
      " away or choose another --workdir."
    )
  return folder


def steps_of(workdir: pathlib.Path) -> list[int]:
  """Returns the steps of the checkpoints in a workdir, newest first."""
  if bucket := remote.bucket_of(workdir):
    names = [name.removesuffix(".json") for name in bucket.children(FOLDER)[0]]
  else:
    names = [p.name for p in folder_of(workdir).glob("*")]
  return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def read_record(workdir: pathlib.Path, step: int) -> Record:
  """Reads the record of a checkpoint.

  Raises:
    ValueError, OSError, TypeError: the record is missing or damaged.
  """
  path = folder_of(workdir) / str(step) / "record" / "metadata"
  if bucket := remote.bucket_of(workdir):
    fields = json.loads(bucket.get(f"{FOLDER}/{step}.json") or b"")
  else:
    fields = json.loads(path.read_bytes())
  if fields.pop("crc32", None) != _crc32(fields):
    raise ValueError(f"{path} has another content than was saved")
  return Record(**fields)


def _crc32(fields: Json) -> int:
  return zlib.crc32(json.dumps(fields, sort_keys=True).encode())
