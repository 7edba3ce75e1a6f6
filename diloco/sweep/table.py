"""The results: one SQLite table, a row per run, written by the driver alone."""

import contextlib
import datetime
import fcntl
import hashlib
import json
import pathlib
import sqlite3
import subprocess
from collections.abc import Iterator
from typing import Any

from diloco.config import Config, complete
from diloco.config.resolve import leaves

# Column, type and meaning; `name` is the digest of the config when the run was first
# started, so that a config that two grids ask for is run once.
COLUMNS = {
  "name": "TEXT PRIMARY KEY",
  "point": "TEXT",  # JSON: what the sweep file was asked for.
  "config": "TEXT",  # JSON: every field, resolved.
  "revision": "TEXT",  # Git revision of the code, with -dirty if it was changed.
  "status": "TEXT",  # running, interrupted (to be resumed), done or failed.
  "error": "TEXT",  # Why it failed, one line.
  "attempts": "INTEGER",  # Times it was started.
  "started": "TEXT",  # UTC.
  "finished": "TEXT",
  "params": "INTEGER",
  "tokens": "INTEGER",
  "steps": "INTEGER",
  "loss": "REAL",  # Held-out, of the outer parameters, nats per token.
  "loss_mean": "REAL",  # Of the replicas' mean.
  "loss_first": "REAL",  # Of replica 0.
  "bits_per_byte": "REAL",
  "bytes_sent": "INTEGER",  # By one replica, in all.
  "peak_bytes": "INTEGER",  # By one replica, at one sync.
  "syncs": "INTEGER",
  "tokens_per_s": "REAL",
  "wall_s": "REAL",
  "device": "TEXT",
  "vanished": "INTEGER",  # Ends in a row of which the run noted nothing.
}


@contextlib.contextmanager
def alone(results: pathlib.Path) -> Iterator[None]:
  """Keeps other drivers and imports off a results directory, which it creates.

  Raises:
    ValueError: one is at work there.
  """
  results.mkdir(parents=True, exist_ok=True)
  with (results / "driver.lock").open("w") as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(
        f"--results={results} has a driver already; use --show to look at it, or"
        " another directory."
      ) from None
    yield


class Table:
  """The table of one results directory.

  Args:
    results: the directory.
    read_only: nothing is created or changed.

  Raises:
    ValueError: read_only, and there is no table.
  """

  def __init__(self, results: pathlib.Path, read_only: bool = False):
    path = results / "results.sqlite"
    if read_only and not path.is_file():
      raise ValueError(
        f"--results={results} holds no results.sqlite; run a sweep first."
      )
    results.mkdir(parents=True, exist_ok=True)
    self._db = sqlite3.connect(path, timeout=60)
    self._db.row_factory = sqlite3.Row
    if read_only:
      self._db.execute("PRAGMA query_only=ON")
      return
    # WAL needs memory that all readers share, which network file systems do not have.
    self._db.execute("PRAGMA journal_mode=DELETE")
    columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    with self._db:
      self._db.execute(f"CREATE TABLE IF NOT EXISTS runs ({columns})")
      there = {row["name"] for row in self._db.execute("PRAGMA table_info(runs)")}
      for name, kind in COLUMNS.items():
        if name not in there:  # The table was made by code that had fewer.
          self._db.execute(f"ALTER TABLE runs ADD COLUMN {name} {kind}")

  def rows(self) -> list[dict[str, Any]]:
    """All runs, in the order in which they were first started."""
    found = self._db.execute("SELECT * FROM runs ORDER BY rowid")
    return [dict(row) for row in found]

  def names(self) -> dict[str, str]:
    """Name of the run by `digest` of its config, as this code would write it.

    A run keeps the name that it was given. When the code has gained a field since,
    the digest is another; then the run is taken to have had the field's default.
    """
    found: dict[str, str] = {}
    done = set[str]()
    fields = set(leaves(Config().to_dict()))
    for row in self.rows():
      if row["attempts"] == 0:  # A refusal: there is no config.
        continue
      config = json.loads(row["config"])
      if set(leaves(config)) != fields:
        try:
          config = json.loads(json.dumps(complete(config).to_dict()))
        except (ValueError, TypeError):  # A field is gone: it is no run of this code.
          continue
      key = digest(config)
      if key not in found or (row["status"] == "done" and key not in done):
        found[key] = row["name"]
      if row["status"] == "done":
        done.add(key)
    return found

  def start(self, name: str, point: dict, config: dict, revision: str) -> None:
    """Books that a run starts, or starts again."""
    with self._db:
      self._db.execute(
        "INSERT INTO runs (name, point, config, attempts) VALUES (?, ?, ?, 0)"
        " ON CONFLICT (name) DO NOTHING",
        (name, json.dumps(point, sort_keys=True), json.dumps(config)),
      )
      self._db.execute(
        "UPDATE runs SET status = 'running', error = NULL, revision = ?, started = ?,"
        " attempts = attempts + 1 WHERE name = ?",
        (revision, _now(), name),
      )

  def finish(self, name: str, summary: dict) -> None:
    """Books the summary of a run that ended well."""
    losses = summary["eval_loss"]
    self._update(
      name,
      status="done",
      finished=_now(),
      params=summary["params"],
      tokens=summary["tokens"],
      steps=summary["steps"],
      loss=losses["outer"],
      loss_mean=losses["mean"],
      loss_first=losses["first"],
      bits_per_byte=summary["bits_per_byte"],
      bytes_sent=summary["bytes_sent_per_replica"],
      peak_bytes=summary["peak_bytes_per_sync"],
      syncs=summary["syncs"],
      tokens_per_s=summary["tokens_per_s"],
      wall_s=summary["wall_s"],
      device=summary["device"],
    )

  def fail(self, name: str, error: str) -> None:
    """Books a failure with its reason."""
    self._update(name, status="failed", error=error, finished=_now())

  def interrupt(self, name: str, vanished: int) -> None:
    """Books that a run is no longer running, but has not ended.

    Args:
      name: of the run.
      vanished: ends in a row of which it noted nothing; 0 if it stopped and saved.
    """
    self._update(name, status="interrupted", vanished=vanished)

  def refuse(self, name: str, point: dict, error: str) -> None:
    """Books a point for which no run can be started; it has no attempts."""
    values = (name, json.dumps(point, sort_keys=True), error, _now())
    with self._db:
      self._db.execute(
        "INSERT OR REPLACE INTO runs (name, point, config, status, attempts, error,"
        " finished) VALUES (?, ?, '{}', 'failed', 0, ?, ?)",
        values,
      )

  def forget(self, name: str) -> None:
    with self._db:
      self._db.execute("DELETE FROM runs WHERE name = ?", (name,))

  def forget_failed(self) -> None:
    """Lets failed runs run again."""
    with self._db:
      self._db.execute("DELETE FROM runs WHERE status = 'failed'")

  def insert(self, rows: list[dict[str, Any]]) -> None:
    """Adds runs that are done elsewhere, all or none, unless they are done here too.

    Args:
      rows: of all columns.
    """
    marks = ", ".join(f":{name}" for name in COLUMNS)
    sets = ", ".join(f"{name} = excluded.{name}" for name in COLUMNS if name != "name")
    with self._db:
      self._db.executemany(
        f"INSERT INTO runs ({', '.join(COLUMNS)}) VALUES ({marks})"
        f" ON CONFLICT (name) DO UPDATE SET {sets} WHERE runs.status != 'done'",
        rows,
      )

  def _update(self, name: str, **values) -> None:
    sets = ", ".join(f"{column} = ?" for column in values)
    with self._db:
      self._db.execute(
        f"UPDATE runs SET {sets} WHERE name = ?", (*values.values(), name)
      )

  def close(self) -> None:
    self._db.close()


def digest(config: dict) -> str:
  """A run's name: the same config has the same name on every machine."""
  return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def git_revision() -> str:
  """Revision of the code that runs, `-dirty` if it was changed; unknown without git."""
  with contextlib.suppress(OSError, subprocess.CalledProcessError):
    return subprocess.run(
      ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
      cwd=pathlib.Path(__file__).parent,
      capture_output=True,
      check=True,
      text=True,
    ).stdout.strip()
  return "unknown"


def _now() -> str:
  return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
