"""The runs of an exported table, and how figures and tables choose among them."""

import collections
import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from diloco.config.command_line import parse_options
from diloco.scaling_laws import rows


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
    ValueError: the file is no such table, or has no finished run like that.
  """
  found = rows.read(path, parse_options(",".join(where), place="--where"))
  least = min(row.number("tokens") / row.number("params") for row in found)
  return [_run(row, least) for row in found]


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


def _run(row: rows.Row, least: float) -> Run:
  tokens, params = row.number("tokens"), row.number("params")
  return Run(
    algorithm=row.text("algorithm"),
    replicas=row.whole("replicas"),
    params=params,
    sync_every=row.whole("sync_every"),
    rate=row.number("learning_rate"),
    outer_rate=row.number("outer_learning_rate"),
    batch=row.number("batch_sequences") * row.number("seq_len"),
    tokens=tokens,
    overtrain=round(tokens / params / least),
    seed=row.whole("seed"),
    loss=row.number("loss"),
  )
