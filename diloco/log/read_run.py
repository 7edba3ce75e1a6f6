"""Reads runs to compare them, also while they go on. No JAX."""

import collections
import dataclasses
import math
import pathlib
from collections.abc import Sequence

import numpy as np

from diloco.config import Config
from diloco.errors import ConfigError
from diloco.log import metrics, workdir
from diloco.log.workdir import parts_of
from diloco.util import files


@dataclasses.dataclass
class Run:
  """What is known of a run; of a run of several parts, all parts together.

  Attributes:
    name: a short name of its folder.
    config: of the whole run.
    loss: {step: training loss, mean of the replicas}, nats per token.
    held_out: {step: held-out loss of the outer parameters}, nats per token.
    sent: {step: bytes that one replica has sent so far}.
    peak: the most bytes that one replica sent at a single step.
    tokens_per_s: of all replicas together; None before the second step.
  """

  name: str
  config: Config
  loss: dict[int, float]
  held_out: dict[int, float]
  sent: dict[int, float]
  peak: int
  tokens_per_s: float | None

  @property
  def step(self) -> int:
    """The newest step."""
    return max(self.loss, default=0)


def read(folder: pathlib.Path, name: str) -> Run:
  """Reads a run.

  Raises:
    ConfigError: the folder has no run, or this version cannot use the run's config.
  """
  c, read_parts = workdir.read(folder, "step", "eval", "send", parts=True)
  steps = [found["step"] for found in read_parts]
  evaluations = [r for found in read_parts for r in found["eval"]]
  speeds = [rs[-1]["tokens_per_s"] for rs in steps if rs]
  return Run(
    name=name,
    config=c,
    loss=_mean_by_step(steps, "loss"),
    held_out=_mean_by_step([evaluations], "loss_outer"),
    sent=_mean_by_step(steps, "bytes_sent"),
    peak=max(map(_peak, read_parts)),
    tokens_per_s=sum(speeds) if speeds and all(speeds) else None,
  )


def read_all(folders: Sequence[pathlib.Path]) -> list[Run]:
  """Reads runs, which get the shortest names that tell them apart."""
  return [read(folder, name) for folder, name in zip(folders, names_of(folders))]


def _mean_by_step(parts: Sequence[list[dict]], field: str) -> dict[int, float]:
  """Averages a field over the parts of a run that have a step."""
  found = dict[int, list[float]]()
  for records in parts:
    for r in records:
      value = math.nan if r[field] is None else r[field]  # JSON has no NaN.
      found.setdefault(r["step"], []).append(value)
  return {t: float(np.mean(found[t])) for t in sorted(found)}


def _peak(found: metrics.Kinds) -> int:
  """Returns the most bytes of one step, from the records of a part of a run."""
  sends = collections.Counter[int]()  # The final sync follows the last step's record.
  for r in found["send"]:
    sends[r["step"]] += r["bytes"]
  of_steps = [r["peak_bytes"] for r in found["step"]]
  return max([*of_steps, *sends.values()], default=0)


def names_of(folders: Sequence[pathlib.Path]) -> list[str]:
  """Returns the shortest ends of the paths that tell the folders apart."""
  paths = [folder.absolute().parts for folder in folders]
  for count in range(1, max(map(len, paths)) + 1):
    names = ["/".join(parts[-count:]) for parts in paths]
    if len(set(names)) == len(names):
      return names
  raise ConfigError(f"WORKDIR {max(names, key=names.count)} is given twice.")


def write_csv(folders: Sequence[pathlib.Path], path: pathlib.Path) -> int:
  """Writes a line per run and step; returns the number of lines.

  The columns have the names of `metrics.scalars`. A part counts as a run.
  """
  import pandas as pd

  parts = [part for folder in folders for part in parts_of(folder)]
  lines = dict[tuple[str, int], dict[str, float]]()
  for name, part in zip(names_of(parts), parts):
    for record in metrics.Follower(part).records():
      lines.setdefault((name, record["step"]), {}).update(metrics.scalars(record))
  table = pd.DataFrame(list(lines.values())).sort_index(axis=1)
  for place, column in enumerate(("run", "step")):
    table.insert(place, column, [key[place] for key in lines])
  with files.replacing(path) as file:
    table.to_csv(file, index=False)
  return len(table)
