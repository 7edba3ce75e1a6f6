"""Reads the finished runs of a CSV file into a table."""

import csv
import math
import os
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from diloco.scaling_laws.cells import joined
from diloco.spec.fields import ALGORITHMS

NEEDED = ("params", "replicas", "loss", "learning_rate")
# Column of the loss on the test text. `read` reports this loss if all runs have it; the
# column `loss` chooses the settings.
TEST_LOSS = "test_loss"
# Columns that may be absent or empty; missing values count as 0.
OPTIONAL = ("outer_learning_rate", "tokens")
WHOLE = ("replicas", "sync_every", "seed")


def read(
  path: str | os.PathLike,
  where: Mapping[str, str] | None = None,
  more: Sequence[str] = (),
) -> pd.DataFrame:
  """Reads the finished runs of a CSV file, such as the export of a sweep.

  Args:
    path: the file. Rows whose status is not `done` are left out, but `attrs["failed"]`
      has cell and hyperparameters of those that failed.
    where: {column: value} that rows must have. Numbers are compared as numbers.
    more: further columns of numbers that the caller needs.

  Returns:
    One row per setting, indexed by the line number of its run in the file. Runs that
    differ only in the seed are joined (`cells.joined`). The columns are
      algorithm: data_parallel, diloco or streaming.
      params: N.
      replicas: M; 1 for data_parallel.
      loss: held-out loss in nats per token, the mean of `losses`. It comes from the
        column `test_loss` if all runs have a test loss, else from the column `loss`.
      choice: the file's `loss` of the row's run; the best setting has the least.
      losses: (seed, loss) of each seed, without the tuning seed if there are others.
      all_losses: (seed, loss) of each seed.
      learning_rate: peak of the inner learning rate.
      batch: tokens per step over all replicas, from the columns `batch_sequences` and
        `seq_len`, or from `batch_tokens`.
      outer_learning_rate: 0 for data_parallel, or if unknown.
      tokens: D; 0 if unknown.
    and the columns of `more`, which are numbers. The file's other columns are text.

  Raises:
    ValueError: a column is missing, a value is not a number (the error names the line),
      or no row is left.
  """
  text = _finished(path, where or {})
  sequences = "batch_sequences" in text
  batch = ("batch_sequences", "seq_len") if sequences else ("batch_tokens",)
  needed = (*NEEDED, *batch, *more)
  missing = [c for c in ("algorithm", *needed) if c not in text]
  if missing:
    raise ValueError(
      f"{path} has no column {', '.join(missing)}; it has {', '.join(text)}."
    )
  optional = {*OPTIONAL} - {*more}
  for column in optional:
    text[column] = text[column].replace("", "0") if column in text else "0"
  plain = text["algorithm"] == "data_parallel"
  text.loc[plain, ["replicas", "outer_learning_rate"]] = ["1", "0"]
  failed = text["status"] == "failed" if "status" in text else text["loss"].isna()
  failed, text = text[failed], text[~failed]
  runs = text.copy()
  known = text["algorithm"].isin(ALGORITHMS)
  _check(text["algorithm"], known, f"name of {', '.join(ALGORITHMS)}", path)
  seed = ("seed",) if "seed" in text else ()
  for column in dict.fromkeys((*needed, *OPTIONAL, *seed)):
    runs[column] = _numbers(text[column], path, column in optional)
  runs["batch"] = runs[list(batch)].prod(axis=1)
  runs["choice"] = runs["loss"]
  if TEST_LOSS in text and (text[TEST_LOSS] != "").all():
    runs["loss"] = runs[TEST_LOSS] = _numbers(text[TEST_LOSS], path, optional=False)
  settings = joined(runs)
  settings.attrs["failed"] = _settings(failed, text, batch)
  return settings


def _settings(
  failed: pd.DataFrame, done: pd.DataFrame, batch: Sequence[str]
) -> pd.DataFrame:
  """Parses the settings of failed runs; N is that of a finished run of their model."""
  if "matrix_params" in done:
    known = done.drop_duplicates("matrix_params").set_index("matrix_params")["params"]
    failed = failed.assign(params=failed["matrix_params"].map(known))
  columns = ("replicas", "params", "learning_rate", "outer_learning_rate", *batch)
  numbers = failed[[*columns]].map(_number).astype(float)
  numbers["batch"] = numbers[[*batch]].prod(axis=1)
  return numbers.assign(algorithm=failed["algorithm"])


def _finished(path: str | os.PathLike, where: Mapping[str, str]) -> pd.DataFrame:
  """Reads, as text, the rows that `where` selects, done or failed, by their lines."""
  try:
    with open(path, newline="", encoding="utf-8-sig") as file:
      reader = csv.reader(file, skipinitialspace=True)
      columns = next(reader, [])
      lines = {}
      for values in filter(None, reader):
        lines[reader.line_num] = [value.strip() for value in values]
  except (OSError, UnicodeDecodeError, csv.Error) as error:
    raise ValueError(
      f"{path} is no table: {error}; save it as CSV, UTF-8, or give a file written by"
      " python -m diloco sweep --export."
    ) from error
  if len(set(columns)) < len(columns):
    twice = next(c for c in columns if columns.count(c) > 1)
    raise ValueError(f"{path} has two columns {twice!r}; rename one of them.")
  for line, values in lines.items():
    if len(values) != len(columns):
      raise ValueError(
        f"line {line} of {path} has {len(values)} values for {len(columns)} columns;"
        " complete it, or leave the run out."
      )
  rows = pd.DataFrame.from_dict(lines, orient="index", columns=columns)
  if "status" in rows:
    rows = rows[rows["status"].isin(("done", "failed"))]
  if not _any_done(rows):
    raise ValueError(f"{path} has no finished run; add some.")
  for column, value in where.items():
    if column not in rows:
      raise ValueError(
        f"--where names the column {column!r}, but {path} has {', '.join(rows)}."
      )
    tried = rows[column].unique()
    same = rows[column].map(_number) == _number(value)
    rows = rows[same | (rows[column] == value)]
    if not _any_done(rows):
      conditions = ",".join(f"{c}={v}" for c, v in where.items())
      raise ValueError(
        f"no finished run of {path} has {conditions}: {column} is for example"
        f" {', '.join(map(repr, tried[:10]))}; choose among these."
      )
  return rows.copy()


def _any_done(rows: pd.DataFrame) -> bool:
  return len(rows) > 0 and ("status" not in rows or "done" in rows["status"].values)


def _numbers(column: pd.Series, path: str | os.PathLike, optional: bool) -> pd.Series:
  """Parses a column of text; an optional number may be 0."""
  values = column.map(_number)
  if column.name in WHOLE:
    least = 0 if column.name == "seed" else 1
    whole = (values >= least) & (values < 2**53) & (values % 1 == 0)
    _check(column, whole, f"whole number from {least} on", path)
    return values.astype(int)
  positive = (values >= 0) if optional else (values > 0)
  _check(column, np.isfinite(values) & positive, "positive number", path)
  return values


def _check(
  column: pd.Series, good: pd.Series, wanted: str, path: str | os.PathLike
) -> None:
  """Raises a ValueError that names the first line whose value is not good."""
  if not good.all():
    line = column.index[~good][0]
    raise ValueError(
      f"line {line} of {path} has {column[line]!r} as {column.name}; give a {wanted},"
      " or leave the run out."
    )


def _number(text: str) -> float:
  """Parses a number; returns NaN for any other text."""
  try:
    return float(text)
  except ValueError:
    return math.nan
