"""The paper's tables (arXiv 2503.09799), ours against theirs, cell by cell."""

import dataclasses
import math

import numpy as np

from diloco.scaling_laws import fits, paper, parametric
from diloco.scaling_laws.fits import Fit


@dataclasses.dataclass(frozen=True)
class Cell:
  """One number: ours, its bootstrap interval if it has one, and the paper's."""

  ours: float
  paper: float
  interval: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Table:
  """A table of the paper.

  Attributes:
    title: what it is, and with which N.
    columns: names of the columns.
    relative: columns whose deviation is a ratio; of the others it is a difference.
    rows: {row: cells in the order of columns}.
    note: what a reader must know, or "".
  """

  title: str
  columns: tuple[str, ...]
  relative: tuple[str, ...]
  rows: dict[str, tuple[Cell, ...]]
  note: str = ""

  def largest(self) -> dict[str, tuple[float, str]]:
    """Largest deviation of each column, and the row it is in."""
    found = {}
    for i, column in enumerate(self.columns):
      deviations = {}
      for row, cells in self.rows.items():
        ours, theirs = cells[i].ours, cells[i].paper
        d = abs(ours / theirs - 1) if column in self.relative else abs(ours - theirs)
        if math.isfinite(d):
          deviations[row] = d
      if deviations:
        row = max(deviations, key=lambda r: deviations[r])
        found[column] = (deviations[row], row)
    return found


def loss_fits(sizes: str = "nominal") -> dict[str, Fit]:
  """Power laws of Table 4's losses, by algorithm, and the joint one."""
  n = paper.model_sizes(sizes)
  found = {
    a: fits.fit_power_law(n, paper.losses(a), name=f"the loss of {a}")
    for a in paper.ALGORITHMS
  }
  n, m, y = paper.loss_grid(sizes)
  found["joint"] = fits.fit_power_law(n, y, m, name="DiLoCo's joint loss")
  return found


def table7(sizes: str = "nominal") -> Table:
  """Power laws for the loss, one per algorithm."""
  rows = {
    a: _law_cells(fit, paper.law("loss", a))
    for a, fit in loss_fits(sizes).items()
    if a != "joint"
  }
  title = f"Table 7: L = A N^alpha, {sizes} N"
  return Table(title, ("A", "alpha"), ("A",), rows)


def table10(sizes: str = "nominal") -> Table:
  """Joint laws. The rate's and the batch's follow from Tables 8 and 9.

  On a full grid the joint least squares equals that on the single laws' values,
  because both designs share the grid. Table 4's grid is full. The batch row agrees;
  the rate's cannot come from the same cells as Table 8.
  """
  rows = {"loss": _law_cells(loss_fits(sizes)["joint"], paper.law("loss", "joint"))}
  n, m, _ = paper.loss_grid(sizes)
  for table in ("inner_lr", "batch_size"):
    laws = {r: paper.law(table, f"diloco_M{r}") for r in paper.REPLICAS}
    values = [laws[int(r)](size, 1) for size, r in zip(n, m)]
    law = fits.fit_power_law(n, values, m, name=table, samples=1).law
    theirs = paper.law(table, "joint")
    pairs = (
      (law.A, theirs.A),
      (law.alpha, theirs.alpha),
      (law.beta, theirs.beta),
    )
    rows[f"{table}, from Table {8 if table == 'inner_lr' else 9}"] = tuple(
      Cell(*pair) for pair in pairs
    )
  title = f"Table 10: A N^alpha M^beta, {sizes} N; batch in tokens"
  return Table(title, ("A", "alpha", "beta"), ("A",), rows)


def table11(sizes: str = "nominal") -> Table:
  """Leave-one-out residuals of the loss at 2.4B."""
  n, m, y = paper.loss_grid(sizes)
  joint = fits.leave_largest_out(n, y, m, "DiLoCo's joint loss")
  theirs = {
    (r["M"], r["fit"]): float(r["res_loss"]) for r in paper.read("table11_residuals")
  }
  rows, means = {}, {"independent": 0.0, "joint": 0.0}
  for r in paper.REPLICAS:
    single = fits.leave_largest_out(
      paper.model_sizes(sizes), paper.losses(f"diloco_M{r}"), name=f"M = {r}"
    )[1]
    for fit, value in (("independent", single), ("joint", joint[r])):
      rows[f"M={r} {fit}"] = (Cell(value, theirs[str(r), fit]),)
      means[fit] += value / len(paper.REPLICAS)
  for fit, value in means.items():
    rows[f"mean {fit}"] = (Cell(value, theirs["avg", fit]),)
  title = f"Table 11: residual |log L - log L~| at 2.4B, {sizes} N"
  return Table(title, ("residual",), (), rows)


def table13(
  sizes: str = "nominal", settings: parametric.Settings | None = None
) -> Table:
  """Parametric forms: mean residual on the held-out 2.4B."""
  n, m, y = paper.loss_grid(sizes)
  rows, alone = {}, []
  printed = {
    r["form"]: float(r["avg_residual"]) for r in paper.read("table13_parametric")
  }
  for form in parametric.FORMS:
    fit = parametric.fit_parametric(form, n, m, y, settings=settings)
    rows[form.name] = (Cell(fit.held_out, printed[form.name]),)
    alone.append(f"{fit.train_only_held_out:.4f}")
  order = sorted(rows, key=lambda r: rows[r][0].ours)
  same = order == sorted(rows, key=lambda r: rows[r][0].paper)
  note = (
    f"{'Same' if same else 'Not the same'} order as the paper. Chosen by the training"
    f" points alone: {', '.join(alone)}."
  )
  title = f"Table 13: mean residual on held-out 2.4B, {sizes} N"
  return Table(title, ("residual",), (), rows, note)


def extrapolation(sizes: str = "nominal", level: float = 0.9) -> Table:
  """Tables 5 and 12: losses predicted for 4B and 10B beside the measured ones.

  The paper trained each with hyperparameters of an independent and of a joint fit;
  the same prediction stands beside both measurements.
  """
  laws = loss_fits(sizes)
  rows = {}
  for line in paper.read("table12_fit_extrapolation"):
    algorithm, fit = line["algorithm"], line["fit"]
    replicas = 1 if algorithm == "data_parallel" else int(algorithm[-1])
    law = laws["joint" if fit == "joint" else algorithm]
    cells = []
    for scale, row in zip(("4B", "10B"), paper.read("table3_models")[7:]):
      size = paper.number(scale) if sizes == "nominal" else paper.exact_size(row)
      cells.append(
        Cell(
          law.law(size, replicas),
          float(line[f"loss_{scale}"]),
          law.predict_interval(size, replicas, level),
        )
      )
    rows[f"{algorithm} {fit}"] = tuple(cells)
  title = f"Tables 5 and 12: loss at 4B and 10B, {sizes} N, {level:.0%} intervals"
  return Table(title, ("4B", "10B"), ("4B", "10B"), rows)


def all_tables(sizes: str | None = None) -> list[Table]:
  """Every table; without `sizes`, Table 11 comes with both readings of N."""
  first = sizes or "nominal"
  more = [] if sizes else [table11("exact")]
  return [
    table7(first),
    table10(first),
    table11(first),
    *more,
    table13(first),
    extrapolation(first),
  ]


def show(table: Table) -> str:
  """The table as text, with the largest deviation of each column."""
  width = max(len(r) for r in table.rows) + 2
  lines = [table.title]
  lines.append(" " * width + "".join(f"{c:>40}" for c in table.columns))
  for row, cells in table.rows.items():
    lines.append(f"{row:<{width}}" + "".join(f"{_text(c):>40}" for c in cells))
  for column, (d, row) in table.largest().items():
    text = f"{d:.2%}" if column in table.relative else f"{d:.5f}"
    lines.append(f"largest deviation in {column}: {text} ({row})")
  return "\n".join(lines + ([table.note] if table.note else []))


def _text(cell: Cell) -> str:
  span = ""
  if cell.interval and np.isfinite(cell.interval).all():
    span = f" [{cell.interval[0]:.5g}, {cell.interval[1]:.5g}]"
  return f"{cell.ours:.5g}{span} / {cell.paper:g}"


def _law_cells(fit: Fit, theirs: fits.PowerLaw) -> tuple[Cell, ...]:
  interval = fit.interval()
  return tuple(
    Cell(getattr(fit.law, name), getattr(theirs, name), interval[name])
    for name in interval
  )
