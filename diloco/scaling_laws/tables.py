"""Computes the tables of arXiv 2503.09799, and compares each cell with the paper's."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pandas as pd

from diloco.scaling_laws import fits, paper, parametric
from diloco.util.bar import make_bar


@dataclasses.dataclass(frozen=True)
class Cell:
  """Our number and the paper's number, with our 90% interval.

  In Table 13, the interval is the range over seeds. None stands for a missing number.
  """

  ours: float | None
  paper: float | None = None
  interval: tuple[float, float] | None = None

  @property
  def outside(self) -> bool:
    """Whether the paper's number is outside our interval."""
    if self.interval is None or self.paper is None:
      return False
    return not self.interval[0] <= self.paper <= self.interval[1]

  def __str__(self) -> str:
    if self.ours is None:
      return "-"
    span = " [{:.5g}, {:.5g}]".format(*self.interval) if self.interval else ""
    theirs = "" if self.paper is None else f" / {self.paper:g}"
    return f"{self.ours:.5g}{span}{theirs}"


@dataclasses.dataclass(frozen=True)
class Table:
  """A table of the paper.

  Attributes:
    title: what the table shows, and which N it uses.
    columns: names of the columns.
    relative: columns whose deviations are ratios; all other deviations are differences.
    rows: {row: cells in the order of columns}.
    note: a text to show below the table, or "".
  """

  title: str
  columns: tuple[str, ...]
  relative: tuple[str, ...]
  rows: dict[str, tuple[Cell, ...]]
  note: str = ""

  def largest(self) -> dict[str, tuple[float, str]]:
    """Returns the largest deviation from the paper in each column, and its row."""
    largest = {}
    for i, column in enumerate(self.columns):
      deviations = []
      for row, cells in self.rows.items():
        ours, theirs = cells[i].ours, cells[i].paper
        if ours is not None and theirs is not None:
          ratio = column in self.relative
          deviations.append((abs(ours / theirs - 1 if ratio else ours - theirs), row))
      if deviations:
        largest[column] = max(deviations, key=lambda deviation: deviation[0])
    return largest


def table7(sizes: str = "words") -> Table:
  """Fits a power law of the loss for each algorithm."""
  rows = {a: _law_cells(a, sizes) for a in paper.ALGORITHMS}
  title = f"Table 7: L = A N^alpha, {sizes} N"
  return Table(title, ("A", "alpha"), ("A",), rows)


def table10(sizes: str = "words") -> Table:
  """Fits the joint law of the loss."""
  rows = {"loss": _law_cells("joint", sizes)}
  title = f"Table 10: L = A N^alpha M^beta, {sizes} N"
  return Table(title, ("A", "alpha", "beta"), ("A",), rows)


def table10_from_8_and_9(sizes: str = "words") -> Table:
  """Fits joint laws of learning rate and batch to the values of the laws for each M.

  The paper prints these laws, but not the data behind them. On a full grid, such as
  Table 4's, a joint fit to the laws' values equals a joint fit to the data: the laws
  for each M are a projection of the data onto a space that contains the joint law.
  """
  n, m, _ = paper.loss_grid(sizes)
  rows = {}
  for table, source in (("inner_lr", 8), ("batch_size", 9)):
    laws = {r: paper.law(table, f"diloco_M{r}") for r in paper.REPLICAS}
    values = [laws[int(r)](size) for size, r in zip(n, m)]
    law = fits.fit_power_law(n, values, m, name=table).law
    theirs = dataclasses.astuple(paper.law(table, "joint"))
    pairs = zip(dataclasses.astuple(law), theirs)
    rows[f"{table}, from Table {source}"] = tuple(Cell(*pair) for pair in pairs)
  title = f"Table 10 from Tables 8 and 9: A N^alpha M^beta, {sizes} N; batch in tokens"
  note = (
    "Batch: the three tables agree. Rate: Table 8 cannot come from the same runs as"
    " Table 10, which has it rise with M."
  )
  return Table(title, ("A", "alpha", "beta"), ("A",), rows, note)


def table11(sizes: str = "words") -> Table:
  """Computes residuals of the loss at 2.4B, a size that the fits leave out."""
  printed = {
    (r["M"], r["fit"]): float(r["res_loss"]) for r in paper.read("table11_residuals")
  }
  joint = fits.leave_largest_out(paper.loss_fit("joint", sizes))
  rows: dict[str, tuple[Cell, ...]] = {}
  means = {"independent": 0.0, "joint": 0.0}
  for m in paper.REPLICAS:
    single = fits.leave_largest_out(paper.loss_fit(f"diloco_M{m}", sizes))
    for fit, value in (("independent", single[1]), ("joint", joint[m])):
      rows[f"M={m} {fit}"] = (Cell(value, printed[str(m), fit]),)
      means[fit] += value / len(paper.REPLICAS)
  for fit, value in means.items():
    rows[f"mean {fit}"] = (Cell(value, printed["avg", fit]),)
  title = f"Table 11: residual |log L - log L~| at 2.4B, {sizes} N"
  return Table(title, ("residual",), (), rows)


def table13(sizes: str = "nominal", seeds: int = 5) -> Table:
  """Computes the mean residual of each parametric form at the held-out size 2.4B.

  The result depends on the random starting points, which the paper does not print. So
  the table shows the result of the first seed, the range over all `seeds`, and the
  residual of the optimum, which needs no starting points. The search takes seconds; a
  terminal shows its progress.
  """
  n, m, y = map(np.asarray, paper.loss_grid(sizes))
  pairs = [(form, seed) for form in parametric.FORMS for seed in range(seeds)]
  bar = make_bar(iterable=pairs, desc="Table 13", leave=False, disable=None, unit="fit")
  searches = [parametric.fit_parametric(form, n, m, y, seed=seed) for form, seed in bar]
  ours = np.reshape([fit.held_out for fit in searches], (-1, seeds)).tolist()
  theirs = [float(line["avg_residual"]) for line in paper.read("table13_parametric")]
  rows = dict[str, tuple[Cell, ...]]()
  cells = zip(parametric.FORMS, ours, theirs, residuals_at_optimum(sizes))
  for form, errors, printed, best in cells:
    searched = Cell(errors[0], printed, (min(errors), max(errors)))
    rows[form.name] = (searched, Cell(best))
  same = np.array_equal(np.argsort([errors[0] for errors in ours]), np.argsort(theirs))
  note = (
    f"In brackets: range over {seeds} seeds of the starts."
    f" {'Same' if same else 'Not the same'} order as the paper."
  )
  title = f"Table 13: mean residual on held-out 2.4B, {sizes} N"
  return Table(title, ("residual", "at the optimum"), (), rows, note)


def residuals_at_optimum(sizes: str = "nominal") -> list[float]:
  """Computes the second column of `table13`."""
  n, m, y = map(np.asarray, paper.loss_grid(sizes))
  held, residuals = n == n.max(), list[float]()
  for form in parametric.FORMS:
    best = parametric.fit_optimum(form, n[~held], m[~held], y[~held])
    residuals.append(form.error(best.q, n[held], m[held], y[held]))
  return residuals


def extrapolation(sizes: str = "words") -> Table:
  """Predicts the losses at 4B and 10B of Tables 5 and 12.

  The paper trained models with hyperparameters from independent and from joint laws.
  Each measured loss is compared with a loss law of the same kind. In the rows named
  `with floor`, the law has an additional constant.
  """
  rows, columns = {}, paper.LARGE
  for line in paper.read("table12_fit_extrapolation"):
    algorithm, fit = line["algorithm"], line["fit"]
    m = 1 if algorithm == "data_parallel" else int(algorithm[-1])
    name = "joint" if fit == "joint" else algorithm
    for suffix, fitted in (("", paper.loss_fit), (" with floor", paper.floor_fit)):
      law = fitted(name, sizes)
      rows[f"{algorithm} {fit}{suffix}"] = tuple(
        Cell(law(n, m), float(line[f"loss_{scale}"]), law.predict_interval(n, m))
        for scale, n in zip(columns, paper.model_sizes(sizes, columns))
      )
  outside = [
    sum(cells[i].outside for row, cells in rows.items() if ("floor" in row) == floor)
    for floor in (False, True)
    for i in (0, 1)
  ]
  note = (
    "Of {} measured losses each, outside the intervals: {} at 4B and {} at 10B; with"
    " a floor {} and {}."
  ).format(len(rows) // 2, *outside)
  title = f"Tables 5 and 12: loss at 4B and 10B, {sizes} N"
  return Table(title, columns, columns, rows, note)


def all_tables(sizes: str | None = None) -> Iterator[Table]:
  """Computes and yields the tables one after another.

  Args:
    sizes: one of `paper.SIZES`. None: each table uses the N nearest to the paper.
  """
  first = sizes or "words"
  yield table7(first)
  yield table10(first)
  yield table10_from_8_and_9(first)
  yield table11(first)
  yield table13(sizes or "nominal")
  yield extrapolation(first)


def show(table: Table) -> str:
  """Formats a table as text, with the largest deviation of each column."""
  cells = {row: map(str, cells) for row, cells in table.rows.items()}
  text = pd.DataFrame.from_dict(cells, "index", columns=[*table.columns]).to_string()
  lines = [table.title, text]
  for column, (d, row) in table.largest().items():
    text = f"{d:.2%}" if column in table.relative else f"{d:.5f}"
    lines.append(f"largest deviation in {column}: {text} ({row})")
  return "\n".join(lines + ([table.note] if table.note else []))


def _law_cells(algorithm: str, sizes: str) -> tuple[Cell, ...]:
  """Fits the loss law of an algorithm or `joint`; returns one cell per parameter."""
  fit, theirs = paper.loss_fit(algorithm, sizes), paper.law("loss", algorithm)
  return tuple(
    Cell(getattr(fit.law, name), getattr(theirs, name), interval)
    for name, interval in fit.interval().items()
  )
