"""Makes the table and the figure of a sweep that compares cells, such as an ablation.

A row of the table is a cell with all its seeds: mean and standard deviation of the loss
of the best runs. If all these runs have a test loss, the table reports it, and the
evaluation loss only chooses the best run. If one seed tunes a cell and other seeds
repeat its best point, the table reports only the other seeds, because the best of many
runs is partly luck.
"""

import itertools
import math
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from diloco.sweep.chart import EVALUATED, PLAIN, Chart
from diloco.sweep.grid import Point, key
from diloco.sweep.search import Search
from diloco.sweep.table import Row
from diloco.util import palette
from diloco.util.palette import COLORS, DASHES, OTHERS, PAGE, shades

# Explains the ± of the table and the bars of the figure, which are not the same.
SPREAD = (
  "±: standard deviation over seeds. For the bars of the figure, the mean of each seed"
  " over all settings is subtracted first, unless runs are missing."
)
# {replicas: (marker, its size in points)}. Curves may coincide, so later curves
# have smaller markers and more gaps.
_MARKERS = {1: ("^", 8.5), 2: ("s", 5.5), 4: ("D", 4.5), 8: ("v", 3.5)}
_PLAIN_KEYS = ("compressor", "pattern")
_PARAMETERS = {"first replica": "_first", "mean of replicas": "_mean", "outer": ""}


def frame(chart: Chart, cells: Sequence[tuple[Search, Row | None]]) -> pd.DataFrame:
  """Makes a table of the best runs.

  Args:
    cells: every cell, and the row of its best run.

  Returns:
    One row per cell whose search has a best point, with the keys of this point. If
    several grids search the same cell, its row is the row with the lowest loss. A tuned
    cell has no row if another cell repeats it with another seed. Other columns:
      choice: the evaluation loss, by which the sweep chooses the best run.
      seed: 0 if the points have none.
      loss: the test loss if all these runs have one, else the evaluation loss.
      more: by how many per cent the loss exceeds the loss of the row with which this
        row is compared, at the same seed; NaN if that other row has no result.
      accuracy: accuracy in the first task, in per cent; NaN if no task was scored.
      bytes: bytes that one replica sent.
      per_token: `bytes` per token of the run; NaN if its tokens are unknown.
    If chart.x is EVALUATED, a cell has three rows, one per key of `_PARAMETERS`.
  """
  which = _PARAMETERS if chart.x == EVALUATED else {"outer": ""}
  best = dict[str, tuple[Search, Row]]()
  for cell, row in cells:
    if row and cell.has_best:
      _, other = best.setdefault(key(cell.cell), (cell, row))
      if row["loss"] < other["loss"]:
        best[key(cell.cell)] = cell, row
  for name in {repeated(cell) for cell, _ in [*best.values()]}:
    best.pop(name, None)
  tested = lambda row: all(row[f"test_loss{end}"] is not None for end in which.values())
  test = "test_" if all(tested(row) for _, row in best.values()) else ""
  records = [
    {
      **(cell.best or {}),
      EVALUATED: name,
      "choice": row["loss"],
      "loss": row[f"{test}loss{end}"],
      "accuracy": 100 * (math.nan if row["accuracy"] is None else row["accuracy"]),
      "bytes": row["bytes_sent"],
      "per_token": row["bytes_sent"] / (row["tokens"] or math.nan),
    }
    for cell, row in best.values()
    for name, end in which.items()
  ]
  if not records:
    return pd.DataFrame(columns=[chart.x, *chart.by, "loss"])
  table = pd.DataFrame(records)
  table["seed"] = table["seed"].fillna(0).astype(int) if "seed" in table else 0
  return table.assign(more=_more(chart, cells[0][0].cell, table))


def repeated(cell: Search) -> str:
  """Returns the key of the cell that `cell` repeats with another seed, or ""."""
  source = cell.grid.like(cell.cell) or {}
  same = {**source, "seed": 0} == {**cell.cell, "seed": 0}
  return key(source) if same and not cell.grid.axes else ""


def _more(chart: Chart, first: Point, table: pd.DataFrame) -> pd.Series:
  if chart.against:
    plain = chart.against == PLAIN
    some = table[table["algorithm"] == "data_parallel"] if plain else table
    others = some.groupby([chart.x, "seed"])["loss"].first()
    asked_x = chart.x if plain else chart.against
    asked = pd.MultiIndex.from_frame(table[[asked_x, "seed"]])
  else:
    first = {**first, EVALUATED: table[EVALUATED].iloc[0]}
    keys = [name for name in (*chart.by, chart.x) if name in first]
    some = table[(table[keys] == pd.Series(first)[keys]).all(axis=1)]
    others, asked = some.groupby("seed")["loss"].first(), pd.Index(table["seed"])
  return 100 * (table["loss"] / others.reindex(asked).to_numpy() - 1)


def curve_name(algorithm: str, replicas: int | None = None) -> str:
  """Names the curve of an algorithm with M replicas, such as "DiLoCo, M=4"."""
  if algorithm == "data_parallel":
    return PLAIN
  name = {"diloco": "DiLoCo"}.get(algorithm, algorithm)
  return name if replicas is None else f"{name}, M={replicas}"


def curve(values: dict, plain: Collection[str] = ()) -> str:
  """Names a curve: the algorithm with M, as `curve_name` does, then other keys.

  For keys in `plain` and `_PLAIN_KEYS`, the name has the value without the key.
  """
  names = []
  if "algorithm" in values:
    m = values.get("replicas", math.nan)  # NaN if only other cells have M.
    names = [curve_name(values["algorithm"], None if math.isnan(m) else int(m))]
    values = {k: v for k, v in values.items() if k not in ("algorithm", "replicas")}
  names += [
    str(v) if k in (*_PLAIN_KEYS, *plain) else f"{k}={v}" for k, v in values.items()
  ]
  return ", ".join(names)


def in_words(chart: Chart, table: pd.DataFrame) -> pd.DataFrame:
  """Replaces values of the table by the words that the chart has for them."""
  new = {key: table[key].replace(dict(words)) for key, words in chart.words.items()}
  return table.assign(**new)


def spread(chart: Chart, table: pd.DataFrame, y: str = "loss") -> pd.DataFrame:
  """Returns mean, standard deviation and count over the seeds, by curve and x."""
  # In pandas 2, a table without columns has no records, so `by` chooses afterwards.
  rows = table.to_dict("records")
  name = [curve({key: row[key] for key in chart.by}, chart.words) for row in rows]
  groups = table.assign(curve=name).groupby(["curve", chart.x], sort=False)
  return groups[y].agg(["mean", "std", "count"]).reset_index()


def lines(chart: Chart, table: pd.DataFrame) -> list[str]:
  """Formats the table as Markdown; differences are taken seed by seed."""
  if table.empty:
    return ["no cell has a result yet"]
  table = in_words(chart, table)
  cells = spread(chart, table)
  columns = {
    "curve": cells["curve"],
    chart.x if chart.along else chart.xlabel or chart.x: cells[chart.x],
    "seeds": cells["count"],
    "held-out loss": _with_deviation(cells, "{:.4f}"),
  }
  if chart.by_name:
    reference = table.groupby(chart.x, sort=False)[chart.against].first()
    columns["against"] = cells[chart.x].map(reference)
  from_what = {"": "from the first (%)", PLAIN: "above data-parallel (%)"}
  name = from_what.get(chart.against, "difference (%)")
  columns[name] = _with_deviation(spread(chart, table, "more"), "{:+.2f}")
  columns["bytes sent"] = spread(chart, table, "bytes")["mean"].map("{:,.0f}".format)
  for y, label in _panels(chart, table):
    if y == "accuracy":
      columns[label] = _with_deviation(spread(chart, table, y), "{:.2f}")
    elif y not in ("loss", "more"):
      columns[f"{label}, mean"] = spread(chart, table, y)["mean"].map("{:.3g}".format)
  if not chart.by:
    del columns["curve"]
  return markdown(columns)


def markdown(columns: Mapping[str, Iterable]) -> list[str]:
  """Formats columns of texts or numbers as lines of a Markdown table."""
  rows = [list(columns), ["---"] * len(columns), *zip(*columns.values())]
  head, rule, *body = [f"| {' | '.join(map(str, row))} |" for row in rows]
  return [head, rule.replace(" ", ""), *body]


def _panels(chart: Chart, table: pd.DataFrame) -> list[tuple[str, str]]:
  """Returns the panels of `chart.y` whose column has a value of some run."""
  return [(y, label) for y, label in chart.y if table[y].notna().any()]


def _with_deviation(cells: pd.DataFrame, form: str) -> pd.Series:
  """Formats means, with the standard deviation where there are several seeds.

  NaN becomes "-".
  """
  plain = form.replace("+", "")
  deviation = cells["std"].map(f" ± {plain}".format).where(cells["count"] > 1, "")
  text = lambda mean: "-" if math.isnan(mean) else form.format(mean)
  return cells["mean"].map(text) + deviation


def paired(chart: Chart, table: pd.DataFrame) -> pd.DataFrame:
  """Removes what raises or lowers all losses of a seed: the seed's mean over cells.

  All cells of a seed see the same text, so their losses rise and fall together, often
  by more than the cells differ. The spread that is left is too small by a factor
  of sqrt((k - 1) / k) for k cells, because each cell is part of the common mean;
  `stretch` corrects this (Cousineau 2005, Morey 2008). If there is one cell, or a cell
  lacks seeds, the table is returned unchanged.
  """
  by = table.groupby([*chart.by, chart.x], dropna=False)
  if len(by) < 2 or (by["seed"].nunique() < table["seed"].nunique()).any():
    return table
  common = table.groupby("seed")["loss"].transform("mean") - table["loss"].mean()
  mean = by["loss"].transform("mean")
  stretch = math.sqrt(len(by) / (len(by) - 1))
  return table.assign(loss=mean + stretch * (table["loss"] - common - mean))


def draw(chart: Chart, table: pd.DataFrame, path: pathlib.Path) -> None:
  """Draws the figure: points are means over seeds, bars standard deviations.

  For the bars of losses, the mean of each seed is subtracted first (`paired`).
  """
  palette.save(lambda: figure(chart, table), path)


def figure(chart: Chart, table: pd.DataFrame) -> Figure:
  """Makes the matplotlib figure: one panel per entry of chart.y; `draw` saves it."""
  table = in_words(chart, table)
  shown, bars = paired(chart, table), "Bars: standard deviation over the seeds"
  if shown is not table and any(y == "loss" for y, _ in chart.y):
    bars += ";\nof losses, after the mean of each seed is subtracted"
  if chart.by_name:  # Points compared with themselves lie at 0.
    shown = shown[shown[chart.x] != shown[chart.against]]
  words = not _numbers(shown[chart.along or chart.x])
  height = 1.3 + 0.2 * shown[chart.x].nunique() if words else 3.2
  ys = _panels(chart, shown)
  figure, panels = palette.panels(chart.title, [""] * len(ys), height)
  for panel, (y, label) in zip(panels, ys):
    cells = spread(chart, shown, y)
    if chart.along:
      cells[chart.x] = cells[chart.x].map(shown.groupby(chart.x)[chart.along].mean())
    _draw_panel(panel, cells, chart, label)
    if y == "more":
      (panel.axvline if words else panel.axhline)(0, color="black", lw=0.8, zorder=1)
  if words:
    figure.set_figwidth(PAGE)  # Long words need a wide figure.
  return palette.legend(figure, f"{bars}.")


def _numbers(values: pd.Series) -> bool:
  kind = values.infer_objects().dtype
  return pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind)


def _look(name: str) -> dict[str, Any]:
  """Returns the style of a curve: colour by algorithm; shade, marker and dashes by M.

  Args:
    name: a name from `curve_name`, with M.
  """
  if name == PLAIN:
    return {"color": COLORS["data_parallel"], "marker": "o", "ms": 8}
  algorithm, _, replicas = name.lower().partition(", m=")
  m = int(replicas)
  if m not in _MARKERS:
    return {"color": COLORS[algorithm], "marker": "P", "ms": 4}
  i, (marker, size) = [*_MARKERS].index(m), _MARKERS[m]
  color = shades(COLORS[algorithm], len(_MARKERS))[i]
  return {"color": color, "marker": marker, "ms": size, "ls": DASHES[i]}


def _draw_panel(panel: Axes, cells: pd.DataFrame, chart: Chart, label: str) -> None:
  """Draws a curve per group; if x has words, each word is a row, least mean on top."""
  colors = itertools.cycle((COLORS["streaming"], *OTHERS))
  words = not _numbers(cells[chart.x])
  means = cells.groupby(chart.x)["mean"].mean()
  ticks = [*(means.sort_values().index if words else means.index)]
  for name, some in cells.groupby("curve", sort=False):
    known = re.fullmatch(rf"{PLAIN}|(DiLoCo|streaming), M=\d+", str(name))
    color = "0.25" if words and not name else next(colors)
    other = {"marker": "o", "ms": 4, "color": color}
    style = _look(str(name)) if known else other
    style |= {"capsize": 2, "label": name or None}
    some = some.sort_values(chart.x)
    deviation = some["std"].fillna(0.0)
    if words:
      rows = some[chart.x].map(ticks.index)
      panel.errorbar(some["mean"], rows, xerr=deviation, **style | {"ls": ""})
    else:
      panel.errorbar(some[chart.x], some["mean"], deviation, **style)
  if chart.log:
    panel.set_xscale("log")
  if words:
    panel.set(xlabel=label, ylim=(len(ticks) - 0.5, -0.5))
    panel.set_yticks(range(len(ticks)), ticks)
  else:
    panel.set(xlabel=chart.xlabel or chart.x, ylabel=label)
    if not chart.along:
      panel.set_xticks(ticks, [f"{t}" for t in ticks])
    elif chart.log:
      panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
      panel.xaxis.set_major_formatter("{x:g}")
  panel.minorticks_off()
