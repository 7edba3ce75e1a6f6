"""Writes the table as a CSV file (--export), and reads such files (--import)."""

import csv
import json
import math
import pathlib
from collections.abc import Iterable
from typing import Any

import pandas as pd

from diloco.config import Config, changed, complete
from diloco.config.comparable import HELD_OUT
from diloco.config.resolve import leaves
from diloco.spec import plugins
from diloco.spec.shapes import matrix_params
from diloco.sweep import table
from diloco.sweep.table import SUMMARY_COLUMNS, Row
from diloco.util import files
from diloco.util.command import one_line
from diloco.util.types import Json

# {column: config field}: the fields in which runs usually differ.
EXPORTED_FIELDS = {
  "algorithm": "algorithm",
  "replicas": "replicas",
  "sync_every": "sync_every",
  "outer_learning_rate": "outer.learning_rate",
  "outer_optimizer": "outer.optimizer",
  "learning_rate": "inner.learning_rate",
  "batch_sequences": "train.batch_size",
  "seq_len": "model.seq_len",
  "num_layers": "model.num_layers",
  "dim": "model.dim",
  "vocab_size": "model.vocab_size",
  "seed": "seed",
}
_NOTED = ("name", "group", "revision", "status", "error", "finished")
# Columns after those of the config fields.
_RESULTS = (*_NOTED, *SUMMARY_COLUMNS, "config")
_NEWER = {"accuracy"}  # Columns that an older file may lack.
# {column: key in contents.json}: digests, which runs of earlier versions lack.
_DIGESTS = {"tokenizer": "data.tokenizer", "text": "data.source", "held_out": HELD_OUT}
# Column of the papers' N, 12 layers dim^2 + vocab dim, without positions and norms.
_PAPERS_N = "matrix_params"


def export(rows: Iterable[Row], path: pathlib.Path) -> int:
  """Writes the finished and failed runs as CSV; returns their number.

  The columns point_NAME hold the values of the point. `params` is the number of all
  parameters, `matrix_params` the papers' N. The column `config` holds the other
  fields that differ from their defaults, as JSON.
  """
  ended = [row for row in rows if row["status"] in ("done", "failed")]
  asked = sorted({f"point_{name}" for row in ended for name in row["point"]})
  known = _DIGESTS if any(row["contents"] for row in ended) else ()
  columns = [*asked, *EXPORTED_FIELDS, *known, _PAPERS_N, *_RESULTS]
  cells = pd.DataFrame(map(_line, ended), columns=columns, dtype=object)
  with files.replacing(path) as file:
    cells.to_csv(file, index=False)
  return len(ended)


def load(path: pathlib.Path, results: pathlib.Path) -> int:
  """Makes run directories from the finished runs of a CSV file; returns their number.

  A sweep then continues as if the runs had been trained here. Runs that are
  done in `results` stay unchanged. Config fields newer than the file get defaults.

  Raises:
    ValueError: a line cannot be imported; if so, no run is imported.
  """
  runs = list[dict[str, dict]]()
  with path.open(newline="") as file:
    reader = csv.DictReader(file)
    try:
      columns = reader.fieldnames or ()
      asked = {*EXPORTED_FIELDS, *_RESULTS} - _NEWER
      missing = sorted(asked - {*columns})
      if missing:
        raise ValueError(f"there is no column {', '.join(missing)}")
      for line in reader:
        if line["status"] == "done":
          runs.append(_run(line))
        elif line["status"] != "failed":
          raise ValueError(f"status is {line['status']!r}, neither done nor failed")
    except (ValueError, TypeError, KeyError, AttributeError, csv.Error) as error:
      reason = one_line(error).rstrip(".")
      raise ValueError(
        f"line {max(reader.line_num, 1)} of {path} cannot be imported ({reason});"
        " give a file written by --export."
      ) from error
  rows = table.read_rows(results)
  names = table.names_by_digest(rows)
  for run in runs:
    digest = table.digest(run["config.json"])
    name = names.get(digest, digest)
    if name not in rows or rows[name]["status"] != "done":
      # run.json comes last, because a run counts as soon as it has this file.
      for file_name, content in run.items():
        files.write_json(results / "runs" / name / file_name, content)
  return len(runs)


def _line(row: Row) -> Json:
  """Returns a line of the CSV file: {column: cell}."""
  default, fields, papers_n = leaves(table.as_json(Config())), Json(), None
  plugins.check_trusted(row["config"].get("plugins", ()))
  if row["config"]:  # A refused point has none.
    try:
      c = complete(row["config"])  # An earlier version may have saved this config.
      fields, papers_n = leaves(table.as_json(c)), matrix_params(c.model)
    except (ValueError, TypeError):  # This version cannot read the config.
      fields = default | leaves(row["config"])
  known = EXPORTED_FIELDS.values()
  rest = {f: v for f, v in fields.items() if f not in known and v != default.get(f)}
  return {
    **{f"point_{name}": value for name, value in row["point"].items()},
    **{column: fields.get(field) for column, field in EXPORTED_FIELDS.items()},
    **{column: row["contents"].get(what) for column, what in _DIGESTS.items()},
    _PAPERS_N: papers_n,
    **{column: _eight_digits(row[column]) for column in (*_NOTED, *SUMMARY_COLUMNS)},
    "config": json.dumps(rest, sort_keys=True),
  }


def _run(line: dict[str, str]) -> dict[str, dict]:
  """Makes the files of a finished run, {name: content}, from a line of the CSV file.

  Raises:
    ValueError, TypeError, KeyError, AttributeError: the line cannot be imported.
  """
  if None in line or None in line.values():
    raise ValueError("it does not have as many cells as the first line")
  summary = {
    field: kind(line[column]) if line.get(column) else None
    for column, (field, kind) in SUMMARY_COLUMNS.items()
  }
  loss = summary["eval_loss.outer"]
  if loss is None or not math.isfinite(loss):
    raise ValueError(f"loss is {line['loss']!r}, but the run is done")
  default = leaves(Config().to_dict())
  fields = {f: type(default[f])(line[c]) for c, f in EXPORTED_FIELDS.items()}
  for field, value in json.loads(line["config"]).items():
    fields[field] = tuple(value) if isinstance(value, list) else value
  plugins.check_trusted(fields.get("plugins", ()))
  asked = {c: text for c, text in line.items() if c.startswith("point_") and text}
  return {
    "config.json": table.as_json(changed(Config(), fields)),
    "contents.json": {what: line[c] for c, what in _DIGESTS.items() if line.get(c)},
    "summary.json": summary,
    "ended.json": {"failed": False, "error": "", "finished": line["finished"]},
    "run.json": {
      "point": {column.removeprefix("point_"): text for column, text in asked.items()},
      "group": line["group"],
      "revision": line["revision"],
      "attempts": 1,
      "started": table.utc_now("microseconds"),
    },
  }


def _eight_digits(value: Any) -> Any:
  # With six digits, two runs may tie, and an imported sweep chooses another one.
  return float(f"{value:.8g}") if isinstance(value, float) else value
