"""The table as a CSV file: written by --export, taken over by --import."""

import csv
import json
import math
import pathlib
from typing import Any

from diloco.config import Config, changed
from diloco.config.resolve import leaves
from diloco.sweep.table import COLUMNS, Table, digest

# Columns that only the driver needs.
_UNEXPORTED = ("point", "config", "attempts", "started", "vanished")

# What an exported row says of the config, by column name.
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
_SHOWN = tuple(c for c in COLUMNS if c not in _UNEXPORTED)
_TYPES = {"TEXT": str, "INTEGER": int, "REAL": float}


def export(rows: list[dict[str, Any]], path: pathlib.Path) -> int:
  """Writes the finished and failed runs as CSV; returns how many.

  The fields in which runs usually differ get columns of their own, and so does what the
  sweep file was asked for (point_size, ...); `config` keeps, as JSON, all other fields
  that differ from the defaults.
  """
  default = leaves(json.loads(json.dumps(Config().to_dict())))
  ended = [row for row in rows if row["status"] in ("done", "failed")]
  asked = sorted({name for row in ended for name in json.loads(row["point"])})
  with path.open("w", newline="") as file:
    writer = csv.writer(file, lineterminator="\n")
    names = [f"point_{name}" for name in asked]
    writer.writerow([*names, *EXPORTED_FIELDS, *_SHOWN, "config"])
    for row in ended:
      point = json.loads(row["point"])
      config = default | leaves(json.loads(row["config"]))
      known = EXPORTED_FIELDS.values()
      rest = {
        k: v
        for k, v in config.items()
        if k not in known and v != default.get(k, "(gone)")
      }
      writer.writerow(
        [
          *(point.get(a, "") for a in asked),
          *(config[field] for field in known),
          *(_digits(row[c]) for c in _SHOWN),
          json.dumps(rest, sort_keys=True),
        ]
      )
  return len(ended)


def load(path: pathlib.Path, table: Table) -> int:
  """Takes the finished runs of an exported file over into a table; returns how many.

  A sweep then goes on from them as if it had run them here. Names are made anew from
  the configs, so that fields which did not exist then have their defaults. All runs
  are taken over or, if one cannot be, none.

  Raises:
    ValueError: the file was not written by `export`; with the line that shows it.
  """
  names, runs = table.names(), list[dict]()
  with path.open(newline="") as file:
    reader = csv.DictReader(file)
    try:
      there = reader.fieldnames or ()
      missing = [c for c in (*EXPORTED_FIELDS, *_SHOWN, "config") if c not in there]
      if missing:
        raise ValueError(f"it has no column {', '.join(missing)}")
      for row in reader:
        if row["status"] == "done":
          runs.append(_run(row, names))
        elif row["status"] != "failed":
          raise ValueError(f"status is {row['status']!r}, neither done nor failed")
    except (ValueError, TypeError, KeyError, AttributeError, csv.Error) as error:
      reason = " ".join(str(error).split()).rstrip(".")
      raise ValueError(
        f"line {max(reader.line_num, 1)} of {path} cannot be taken over ({reason});"
        " give a file written by --export."
      ) from error
  table.insert(runs)
  return len(runs)


def _run(row: dict[str, str], names: dict[str, str]) -> dict[str, Any]:
  """A row of the table from one of the file.

  Raises:
    ValueError, TypeError, KeyError, AttributeError: it is none.
  """
  if None in row or None in row.values():
    raise ValueError("it has not as many cells as the first line")
  values = {c: _cell(c, row[c]) for c in _SHOWN}
  loss = values["loss"]
  if not isinstance(loss, float) or not math.isfinite(loss):
    raise ValueError(f"loss is {row['loss']!r}, but the run is done")
  default = leaves(Config().to_dict())
  fields = {f: type(default[f])(row[c]) for c, f in EXPORTED_FIELDS.items()}
  rest = {k: _tuple(v) for k, v in json.loads(row["config"]).items()}
  resolved = json.loads(json.dumps(changed(Config(), fields | rest).to_dict()))
  asked = {k: v for k, v in row.items() if k.startswith("point_") and v != ""}
  point = {k.removeprefix("point_"): v for k, v in asked.items()}
  return dict.fromkeys(COLUMNS) | {
    **values,
    "name": names.get(digest(resolved), digest(resolved)),
    "point": json.dumps(point, sort_keys=True),
    "config": json.dumps(resolved),
    "attempts": 1,
  }


def _cell(column: str, text: str) -> str | int | float | None:
  """A cell as its column's type; an empty one is None."""
  kind = COLUMNS[column].split()[0]
  try:
    return _TYPES[kind](text) if text else None
  except ValueError:
    raise ValueError(f"{column} is {text!r}, no {kind.lower()}") from None


def _tuple(value):
  return tuple(value) if isinstance(value, list) else value


def _digits(value):
  return float(f"{value:.6g}") if isinstance(value, float) else value
