"""Rows of a CSV file: the finished runs that a filter takes, and their values."""

import csv
import dataclasses
import math
import os
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Row:
  """One row.

  Attributes:
    values: {column: text}.
    place: where it is, such as `line 3 of runs.csv`, for errors.
  """

  values: Mapping[str, str]
  place: str

  def has(self, column: str) -> bool:
    """Whether something is in this column."""
    return self.values.get(column, "") != ""

  def text(self, column: str) -> str:
    """What is in a column.

    Raises:
      ValueError: there is no such column, or nothing in it.
    """
    if column not in self.values:
      raise ValueError(
        f"no column {column}; {self.place.partition(' of ')[2]} has"
        f" {', '.join(self.values)}."
      )
    if not self.has(column):
      raise ValueError(
        f"{self.place} has nothing as {column}; fill it in, or leave the run out."
      )
    return self.values[column]

  def number(self, column: str) -> float:
    """A column's finite number.

    Raises:
      ValueError: there is none.
    """
    text = self.text(column)
    try:
      value = float(text)
    except ValueError:
      value = math.nan
    if not math.isfinite(value):
      raise ValueError(
        f"{self.place} has {text!r} as {column}; give a number, or leave the run out."
      )
    return value

  def whole(self, column: str) -> int:
    """A column's whole number.

    Raises:
      ValueError: there is none.
    """
    value = self.number(column)
    if not value.is_integer():
      raise ValueError(
        f"{self.place} has {self.values[column]!r} as {column}; give a whole number."
      )
    return int(value)


def read(path: str | os.PathLike, where: Mapping[str, str] | None = None) -> list[Row]:
  """The finished runs of a CSV file whose columns have the wanted values.

  Args:
    path: of the file. If it has a column `status`, rows other than `done` are left out.
    where: {column: value}; numbers are compared as numbers.

  Raises:
    ValueError: a row has more or fewer values than there are columns, `where` names a
      column that is not there, or no row is left.
  """
  found = []
  with open(path, newline="", encoding="utf-8-sig") as file:
    reader = csv.reader(file)
    columns = next(reader, [])
    for values in filter(None, reader):
      place = f"line {reader.line_num} of {path}"
      if len(values) != len(columns):
        raise ValueError(
          f"{place} has {len(values)} values for {len(columns)} columns; complete it,"
          " or leave the run out."
        )
      found.append(Row(dict(zip(columns, values)), place))
  for column in where or {}:
    if column not in columns:
      raise ValueError(
        f"--where names the column {column!r}, but {path} has {', '.join(columns)}."
      )
  found = [row for row in found if row.values.get("status", "done") == "done"]
  if not found:
    raise ValueError(f"{path} has no finished run; add some.")
  for column, value in (where or {}).items():
    tried = dict.fromkeys(row.values[column] for row in found)
    found = [row for row in found if _same(row.values[column], value)]
    if not found:
      raise ValueError(
        f"no finished run of {path} has {_conditions(where or {})}: {column} is"
        f" {', '.join(map(repr, list(tried)[:10]))}{', ...' if len(tried) > 10 else ''}"
        "; choose among these."
      )
  return found


def _conditions(where: Mapping[str, str]) -> str:
  return ",".join(f"{column}={value}" for column, value in where.items())


def _same(text: str, value: str) -> bool:
  try:
    return float(text) == float(value)
  except ValueError:
    return text == value
