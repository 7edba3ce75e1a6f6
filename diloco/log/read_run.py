"""Reads runs to compare them, even while they train. No JAX."""

import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from diloco.config import Config
from diloco.config.comparable import READING, Basis, basis
from diloco.errors import ConfigError
from diloco.log import metrics, workdir
from diloco.spec import plugins
from diloco.util import files

# Fields in which joined runs may differ, because they change only the noise.
_NOISE = ("seed", "plugins", "log.", "checkpoint.", "profile.", *READING)


@dataclasses.dataclass
class Run:
  """The results of a run so far; a run of several sites counts as one run.

  Attributes:
    name: a short name of its folder.
    config: of the whole run.
    loss: {step: training loss, mean of the replicas}, nats per token.
    held_out: {step: held-out loss of the outer parameters}, nats per token.
    bits: {step: held-out loss in bits per byte of the text}.
    sent: {step: bytes that one replica has sent so far}.
    peak: the most bytes that one replica sent at a single step.
    tokens_per_s: speed of all replicas together; None before the second step.
    basis: the config and the data to which the losses belong.
    seeds: number of runs of which this run is the mean.
  """

  name: str
  config: Config
  loss: dict[int, float]
  held_out: dict[int, float]
  bits: dict[int, float]
  sent: dict[int, float]
  peak: int
  tokens_per_s: float | None
  basis: Basis
  seeds: int = 1

  @property
  def step(self) -> int:
    """The newest step; it has no loss if a site has jumped to the run's last step."""
    return max([*self.loss, *self.sent], default=0)


def read(folder: pathlib.Path, name: str, flag: str = "WORKDIR") -> Run:
  """Reads a run.

  Args:
    folder: folder of the run.
    name: a short name, for `Run`.
    flag: the flag or argument that gives the folder.

  Raises:
    ConfigError: the folder has no run, or this version cannot use the run's config.
  """
  c, read_parts = workdir.read(folder, "step", "eval", "send", name=flag, parts=True)
  of = lambda kind: itertools.chain(*(kinds[kind] for kinds in read_parts))
  sent = _by_step(of("step"), "bytes_sent").mean().to_dict()
  parts = workdir.parts_of(folder)
  ends = [end for part in parts if (end := files.read_json(part / "summary.json"))]
  if len(ends) == len(parts):
    total = statistics.mean(end["bytes_sent_per_replica"] for end in ends)
    sent[ends[0]["steps"]] = total
  speeds = [kinds["step"][-1]["tokens_per_s"] for kinds in read_parts if kinds["step"]]
  return Run(
    name=name,
    config=c,
    loss=_by_step(of("step"), "loss").mean().to_dict(),
    held_out=_by_step(of("eval"), "loss_outer").mean().to_dict(),
    bits=_by_step(of("eval"), "bits_per_byte").mean().to_dict(),
    sent=sent,
    peak=max(map(_peak, read_parts)),
    tokens_per_s=sum(speeds) if speeds and all(speeds) else None,
    basis=basis(c.to_dict(), workdir.read_contents(parts[0])),
  )


def joined(runs: Sequence[Run]) -> list[list[Run]]:
  """Groups runs at the same step that differ only in noise, such as in the seed."""
  groups, noise = dict[str, list[Run]](), _NOISE + plugins.free()
  for run in runs:
    fields, contents = run.basis
    same = [(f, x) for f, x in fields.items() if not f.startswith(noise)]
    key = repr((run.step, max(run.held_out, default=0), same, contents))
    groups.setdefault(key, []).append(run)
  return [*groups.values()]


def _by_step(records: Iterable[dict], field: str) -> Any:
  """Groups the values of a field by step, from all parts of a run; None becomes NaN."""
  table = pd.DataFrame(records, columns=["step", field]).astype({field: float})
  return table.groupby("step")[field]


def _peak(kinds: metrics.Kinds) -> int:
  """Returns the most bytes sent at one step, from the records of a part of a run."""
  of_steps = [r["peak_bytes"] for r in kinds["step"]]
  # The record of the last step lacks the final sync, which comes after that step.
  return int(max([*of_steps, *_by_step(kinds["send"], "bytes").sum()], default=0))


def names_of(folders: Sequence[pathlib.Path]) -> list[str]:
  """Returns the shortest path ends that are different for all folders."""
  paths = [folder.absolute().parts for folder in folders]
  for count in range(1, max(map(len, paths)) + 1):
    names = [str(pathlib.Path(*parts[-count:])) for parts in paths]
    if len(set(names)) == len(names):
      return names
  raise ConfigError(f"WORKDIR {max(names, key=names.count)} is given twice.")
