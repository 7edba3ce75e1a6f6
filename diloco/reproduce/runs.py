"""Reads the runs of an exported table and selects the runs of a figure."""

import pathlib
import statistics

import pandas as pd

from diloco.scaling_laws import runs
from diloco.sweep.chart import PLAIN
from diloco.util.command import parse_options


def read(path: pathlib.Path, where: str = "") -> pd.DataFrame:
  """Reads the finished runs of an exported table.

  Args:
    path: the table.
    where: `column=value,...`; the rows must have all these values.

  Returns:
    The columns of `scaling_laws.runs.read` and
      sync_every: H.
      overtrain: D / N as a multiple of the smallest D / N in the table.
      curve: the algorithm's name in legends, with M.

  Raises:
    ValueError: the file is not an exported table, or no finished run is selected.
  """
  conditions = parse_options(where, place="--where")
  table = runs.read(path, conditions, ("sync_every", "seed", "tokens"))
  ratio = table["tokens"] / table["params"]
  return table.assign(
    overtrain=(ratio / ratio.min()).round().astype(int),
    curve=[*map(curve_name, table["algorithm"], table["replicas"])],
  )


def curve_name(algorithm: str, replicas: int | None = None) -> str:
  """Names the curve of an algorithm, with M: "DiLoCo, M=4"."""
  if algorithm == "data_parallel":
    return PLAIN
  name = {"diloco": "DiLoCo"}.get(algorithm, algorithm)
  return name if replicas is None else f"{name}, M={replicas}"


def main_grid(table: pd.DataFrame) -> pd.DataFrame:
  """Selects the runs with the most frequent H, without overtraining.

  Data-parallel does not sync, so its H does not matter.

  Args:
    table: as `read` returns it.
  """
  plain = table["curve"] == PLAIN
  cadences = table.loc[~plain, "sync_every"]
  if not cadences.empty:
    plain |= table["sync_every"] == statistics.mode(cadences)
  return table[plain & (table["overtrain"] == 1)]


def best(table: pd.DataFrame, *by: str) -> pd.DataFrame:
  """Selects the run with the least `choice` for each value of the columns `by`."""
  return table.loc[table.groupby(list(by))["choice"].idxmin()]


def at_common_seeds(cells: pd.DataFrame) -> pd.DataFrame:
  """Replaces `loss` by its mean over the seeds that all rows have.

  A sweep repeats only its best points with other seeds, which see other documents. With
  means over different seeds, the best point may seem worse than its neighbours. Rows
  without a common seed keep `loss`.
  """
  by_seed = pd.DataFrame([*map(dict, cells["all_losses"])], cells.index)
  common = by_seed.dropna(axis=1)
  return cells if common.empty else cells.assign(loss=common.mean(axis=1))


def above_plain(cells: pd.DataFrame) -> pd.DataFrame:
  """Compares the losses with those of data-parallel at the same N, seed by seed.

  Args:
    cells: a row per algorithm and N.

  Returns:
    The other algorithms' rows where data-parallel has this N and one of the seeds, with
    the mean of the differences in per cent as `more`, and its standard deviation as
    `more_std`: NaN for one seed.
  """
  plain = cells[cells["curve"] == PLAIN].set_index("params")["losses"]
  others = cells[(cells["curve"] != PLAIN) & cells["params"].isin(plain.index)]
  by_seed = lambda losses: pd.Series(dict(losses))
  differences = [
    100 * (by_seed(losses) / by_seed(plain[n]) - 1)
    for n, losses in zip(others["params"], others["losses"])
  ]
  means, deviations = [x.mean() for x in differences], [x.std() for x in differences]
  return others.assign(more=means, more_std=deviations).dropna(subset="more")


def curves(table: pd.DataFrame) -> list[str]:
  """Lists the names of the curves, data-parallel first."""
  return sorted(set(table["curve"]), key=lambda name: (name != PLAIN, name))
