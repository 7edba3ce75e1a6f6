"""Reads and writes the run directories of a sweep, and makes a table of them.

The directories are the only record of a sweep. RESULTS/runs/NAME holds

  contents.json digests of the run's texts and tokenizer
  config.json   every field of the run's config, resolved
  run.json      notes of the driver: point, group, revision, attempts, started, running,
                vanished, saved, worker
  ended.json    how the last attempt ended: failed, error, finished
  summary.json  the trainer's results

and the trainer's other files. NAME is the digest that the config had when the run first
started. So two grids that ask for the same config share one run. A point without a
valid config has a directory with only run.json and ended.json.
"""

import contextlib
import datetime
import hashlib
import json
import math
import pathlib
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from diloco.config import Config, complete
from diloco.config.comparable import CONTENT, Basis, basis, differing
from diloco.config.resolve import leaves
from diloco.errors import ConfigError
from diloco.log.workdir import read_contents
from diloco.util import files
from diloco.util.types import Json

Row = Json

# {column: (field in summary.json, its type)}. Losses are held-out losses in nats per
# token; test losses are empty if eval.test_tokens is 0. `accuracy` is the accuracy
# in the first task, and empty if no task was scored. `bytes_sent` counts all bytes that
# one replica sends, `peak_bytes` only those of the step at which it sends most.
SUMMARY_COLUMNS = {
  "params": ("params", int),
  "tokens": ("tokens", int),
  "steps": ("steps", int),
  "loss": ("eval_loss.outer", float),
  "loss_mean": ("eval_loss.mean", float),
  "loss_first": ("eval_loss.first", float),
  "test_loss": ("test_loss.outer", float),
  "test_loss_mean": ("test_loss.mean", float),
  "test_loss_first": ("test_loss.first", float),
  "bits_per_byte": ("bits_per_byte", float),
  "accuracy": ("accuracy", float),
  "bytes_sent": ("bytes_sent_per_replica", int),
  "peak_bytes": ("peak_bytes_per_sync", int),
  "syncs": ("syncs", int),
  "tokens_per_s": ("tokens_per_s", float),
  "wall_s": ("wall_s", float),
  "device": ("device", str),
}


@contextlib.contextmanager
def alone(results: pathlib.Path) -> Iterator[None]:
  """Creates a results directory and keeps other drivers and imports out of it.

  Raises:
    ValueError: another driver or import uses the directory.
  """
  (results / "runs").mkdir(parents=True, exist_ok=True)
  with (results / "driver.lock").open("w") as lock:
    if not files.try_lock(lock):
      raise ValueError(f"--results={results} has a driver already; use --show.")
    yield


def read_rows(
  results: pathlib.Path | None, earlier: Mapping[str, Row] = {}
) -> dict[str, Row]:
  """Reads all runs by name, in the order in which they were first started.

  Args:
    results: the results directory; None: there are no runs.
    earlier: the result of an earlier call. Runs that had ended are not read again.
  """
  rows = dict[str, Row]()
  for path in results.glob("runs/*/run.json") if results else ():
    row = earlier.get(path.parent.name)
    if row is None or row["status"] not in ("done", "failed"):
      row = read_row(path.parent)
    rows[row["name"]] = row
  return dict(sorted(rows.items(), key=lambda item: item[1]["started"]))


def read_row(directory: pathlib.Path) -> Row:
  """Reads one run; a directory without files is a run that was never started.

  Returns:
    The driver's notes (see `note`), and: `folder` (the directory), its `name`, `config`
    ({} if the point has no valid config), `contents` (digests of texts and tokenizer),
    `error`, `finished`, SUMMARY_COLUMNS (None unless the run is done) and `status`.
    The status is running (also after the run vanished, until a driver notices),
    interrupted (to be resumed), done or failed.
  """
  # The trainer writes summary.json, then the job writes ended.json. We read ended.json
  # first, so that the row of an ended run has its summary.
  ended = files.read_json(directory / "ended.json") or {}
  result = files.read_json(directory / "summary.json") or {}
  summary = leaves({"accuracy": _accuracy(directory, result)} | result)
  row: Row = {
    **{"point": {}, "group": "", "revision": None},
    **{"attempts": 0, "started": "", "vanished": 0, "saved": 0},
    **(files.read_json(directory / "run.json") or {}),
    **dict.fromkeys(SUMMARY_COLUMNS),
    "folder": directory,
    "name": directory.name,
    "config": files.read_json(directory / "config.json") or {},
    "contents": read_contents(directory),
    "error": None,
    "finished": ended.get("finished"),
  }
  loss = summary.get("eval_loss.outer")
  loss = loss if isinstance(loss, int | float) else None
  if not ended:
    row["status"] = "running" if row.get("running") else "interrupted"
  elif loss is None:
    row["status"] = "failed" if ended.get("failed") else "interrupted"
    row |= {"error": ended.get("error") or None, "vanished": 0}
  elif math.isfinite(loss):
    row["status"] = "done"
    columns = SUMMARY_COLUMNS.items()
    row |= {column: summary.get(field) for column, (field, _) in columns}
  else:
    log = directory / "metrics.jsonl"
    row["status"] = "failed"
    row["error"] = f"the held-out loss of the final evaluation is {loss}; see {log}."
  return row


def check_texts(rows: Iterable[Row]) -> None:
  """Refuses runs whose text or tokenizer has changed under the same path.

  Raises:
    ConfigError: a text or tokenizer has changed; the message names two runs.
  """
  first = dict[tuple, tuple[Row, Basis]]()
  for row in sorted(rows, key=lambda row: row["started"]):
    row_basis = basis(row["config"], row["contents"])
    old, before = first.setdefault(row_basis.chosen, (row, row_basis))
    for what, (now, then) in differing(row_basis, before).items():
      if what.startswith(CONTENT):
        raise ConfigError(
          f"{row['folder']} has another text than {old['folder']}: {what} is {now}, not"
          f" {then}, so their losses cannot be compared; put back what was there, and"
          f" remove {row['folder']}, or give another --results."
        )


def _accuracy(directory: pathlib.Path, result: Row) -> float | None:
  """Returns the accuracy of the first task, from training or else `diloco evaluate`."""
  later = files.read_json(directory / f"evaluation_{result.get('steps')}.json") or {}
  for record in (result, later):
    for task in (record.get("tasks") or {}).values():
      return task["accuracy"]
  return None


def note(directory: pathlib.Path, **changes: Any) -> None:
  """Changes the driver's notes on a run.

  The notes are
    point: the point for which the sweep file made the config.
    group: name of the first of the runs that one process trains together.
    revision: Git revision of the code, with -dirty if files were changed.
    attempts: how often the run was started.
    started: UTC time of the first note.
    running: True when an attempt starts; False if it ends without an ended.json, cannot
      be submitted, or is still to come.
      This note has no effect once there is an ended.json.
    vanished: how many of the last attempts, in a row, left no ended.json and no newer
      checkpoint.
    saved: the step of the newest checkpoint when an attempt last vanished.
    worker: the number that the last attempt had in the command of --launch.
  """
  path = directory / "run.json"
  before = files.read_json(path) or {"started": utc_now("microseconds")}
  files.write_json(path, {**before, **changes})


def note_end(directory: pathlib.Path, failed: bool, error: str = "") -> None:
  """Writes how an attempt ended; `error` is the reason of a failure, in one line."""
  end = {"failed": failed, "error": error, "finished": utc_now()}
  files.write_json(directory / "ended.json", end)


def retry_failed(results: pathlib.Path) -> None:
  """Marks failed runs to be run again."""
  for row in read_rows(results).values():
    if row["status"] == "failed":
      note(row["folder"], running=False, vanished=0)
      forget_end(row["folder"])


def forget_end(directory: pathlib.Path) -> None:
  """Deletes the summary and end of an earlier attempt, before another one starts."""
  (directory / "summary.json").unlink(missing_ok=True)
  (directory / "ended.json").unlink(missing_ok=True)


def names_by_digest(rows: Mapping[str, Row]) -> dict[str, str]:
  """Maps the digest of each run's config, as computed now, to the run's name.

  When the code gains a config field, digests change, but a run keeps its name: the run
  counts as one with the field's default. If runs have equal digests, the name of a run
  that is done is taken.
  """
  names: dict[str, str] = {}
  valid = [row for row in rows.values() if row["config"]]
  for row in sorted(valid, key=lambda row: row["status"] != "done"):
    # A config with a field that no longer exists belongs to no run of this code.
    with contextlib.suppress(ValueError, TypeError):
      names.setdefault(digest(as_json(complete(row["config"]))), row["name"])
  return names


def as_json(config: Config) -> Json:
  """Returns a config as config.json stores it: lists replace tuples."""
  return json.loads(json.dumps(config.to_dict()))


def digest(value: Json) -> str:
  """Returns 12 hex digits that identify a value, such as a config, on any machine."""
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def git_revision() -> str:
  """Returns this code's Git revision, with -dirty if changed; "unknown" without Git."""
  command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
  here = pathlib.Path(__file__).parent
  quiet = subprocess.DEVNULL
  try:
    return subprocess.check_output(command, cwd=here, stderr=quiet, text=True).strip()
  except (OSError, subprocess.CalledProcessError):
    return "unknown"


def utc_now(precision: str = "seconds") -> str:
  return datetime.datetime.now(datetime.UTC).isoformat(timespec=precision)
