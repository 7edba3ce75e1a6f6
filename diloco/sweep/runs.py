"""The runs of an exported table, and how figures and tables choose among them."""

import collections
import csv
import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from diloco.command_line import parse_options


@dataclasses.dataclass(frozen=True)
class Run:
  """A finished run, as the exported table has it.

  Attributes:
    algorithm: data_parallel, diloco or streaming.
    replicas: M.
    params: N.
    sync_every: H.
    rate, outer_rate: inner and outer learning rate.
    batch: tokens per step over all replicas.
    tokens: D.
    overtrain: D / N as a multiple of the table's smallest.
    seed: of the run.
    loss: held-out, nats per token.
  """

  algorithm: str
  replicas: int
  params: float
  sync_every: int
  rate: float
  outer_rate: float
  batch: float
  tokens: float
  overtrain: int
  seed: int
  loss: float

  @property
  def curve(self) -> str:
    """Its name in legends."""
    if self.algorithm == "data_parallel":
      return "data-parallel"
    name = "DiLoCo" if self.algorithm == "diloco" else self.algorithm
    return f"{name}, M={self.replicas}"


def read(path: pathlib.Path, where: Sequence[str] = ()) -> list[Run]:
  """The finished runs of an exported table.

  Args:
    path: of the table.
    where: `column=value,...`, which rows must have.

  Raises:
    ValueError: the file is no such table, or has no finished run.
  """
  with path.open(newline="") as file:
    rows = [row for row in csv.DictReader(file) if row.get("status") == "done"]
  wanted = parse_options(",".join(where), place="--where")
  if rows and not set(wanted) <= set(rows[0]):
    raise ValueError(
      f"--where={' '.join(where)} names a column that {path} has not; it has"
      f" {', '.join(rows[0])}."
    )
  rows = [row for row in rows if all(row[k] == v for k, v in wanted.items())]
  if not rows:
    raise ValueError(
      f"{path} has no finished run{' with ' if where else ''}{' '.join(where)}; write"
      " it with python -m diloco.sweep --export."
    )
  try:
    least = min(float(r["tokens"]) / float(r["params"]) for r in rows)
    return [_run(row, least) for row in rows]
  except (KeyError, ValueError) as error:
    raise ValueError(
      f"{path} is no table of a sweep ({error}); write it with python -m diloco.sweep"
      " --export."
    ) from error


def main_grid(runs: Sequence[Run]) -> list[Run]:
  """The runs of the main grid: most frequent H and seed, no overtraining."""
  cadence = statistics.mode(r.sync_every for r in runs)
  seed = statistics.mode(r.seed for r in runs)
  return [
    r
    for r in runs
    if (r.overtrain, r.seed) == (1, seed)
    and (r.sync_every == cadence or r.algorithm == "data_parallel")
  ]


def best(runs: Iterable[Run], key: Callable[[Run], Any]) -> dict[Any, Run]:
  """The run with the least loss for every value of `key`, in order of the values."""
  found: dict[Any, Run] = {}
  for run in runs:
    k = key(run)
    if k not in found or run.loss < found[k].loss:
      found[k] = run
  return dict(sorted(found.items()))


def by_curve(
  runs: Iterable[Run], x: Callable[[Run], float] = lambda r: r.params
) -> dict[str, list[Run]]:
  """Runs by curve, data-parallel first, each in order of x (then of the batch)."""
  curves = collections.defaultdict(list)
  for r in runs:
    curves[r.algorithm != "data_parallel", r.curve].append(r)
  return {
    k[1]: sorted(curves[k], key=lambda r: (x(r), r.batch)) for k in sorted(curves)
  }


def _run(row: dict[str, str], least: float) -> Run:
  tokens, params = float(row["tokens"]), float(row["params"])
  return Run(
    algorithm=row["algorithm"],
    replicas=int(row["replicas"]),
    params=params,
    sync_every=int(row["sync_every"]),
    rate=float(row["learning_rate"]),
    outer_rate=float(row["outer_learning_rate"]),
    batch=float(row["batch_sequences"]) * float(row["seq_len"]),
    tokens=tokens,
    overtrain=round(tokens / params / least),
    seed=int(row["seed"]),
    loss=float(row["loss"]),
  )
