"""Writes a run's numbers to JSON lines, TensorBoard and Weights & Biases. No JAX.

A number has the same name in TensorBoard and in Weights & Biases, see `scalars`.
"""

import json
import pathlib
import secrets
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from diloco.config import Config
from diloco.config.comparable import HELD_OUT, digests
from diloco.config.resolve import leaves
from diloco.util import files
from diloco.util.command import optional
from diloco.util.types import Json

# {kind: records in order of steps}
Kinds = dict[str, list[Json]]
FILE = "metrics.jsonl"
CONFIG, CONTENTS = "config.json", "contents.json"
# Indent of each line of a text, so that TensorBoard shows the text verbatim.
_AS_CODE = "    "
# Fields of a record that make no curves: names, constants and clock times.
_NO_CURVES = ("kind", "step", "fragment", "bytes", "round", "time")


class MetricsWriter:
  """Appends records to metrics.jsonl, and copies their numbers to other loggers.

  Every line is one JSON object with `step` and `kind`: start (of an attempt), step,
  send, receive, eval, sample, or a kind of a plug-in. Lines are only appended. A
  resumed run writes the steps since its checkpoint again, and readers drop the lines of
  earlier attempts.
  For commands that read a run, config.json has the config. contents.json has digests of
  the run's text, of its tokenizer and of the held-out tokens of its last evaluation.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    c: Config,
    contents: Mapping[str, str] = {},
    start: int = 0,
  ):
    """Opens the files.

    Args:
      contents: `diloco.data.contents` of this process.
      start: the step from which the run goes on.
    """
    files.write_json(workdir / CONFIG, c.to_dict())
    self._contents = workdir / CONTENTS, digests(contents)
    before = files.read_json(workdir / CONTENTS) or {}
    of_losses = {HELD_OUT: before[HELD_OUT]} if HELD_OUT in before else {}
    files.write_json(workdir / CONTENTS, digests(contents) | of_losses)
    path = workdir / FILE
    files.cut_half_line(path)
    self._file = path.open("a", buffering=1)  # Readers follow it line by line.
    self._append("start", start, {})
    self._tensorboard: Any = None
    self._wandb: Any = None
    if c.log.tensorboard:
      import tensorboardX

      # TensorBoard drops the points of earlier attempts from `purge_step` on.
      self._tensorboard = tensorboardX.SummaryWriter(
        str(workdir / "tensorboard"), flush_secs=30, purge_step=start + 1
      )
      fields = leaves(c.to_dict()).items()
      text = "\n".join(f"{field} = {value!r}" for field, value in fields)
      self._tensorboard.add_text("config", textwrap.indent(text, _AS_CODE))
    if c.log.wandb_project:
      self._wandb = _start_wandb(workdir, c)

  def write(self, kind: str, step: int, values: Json) -> None:
    """Writes a record of plain Python numbers and lists of numbers."""
    record = self._append(kind, step, values)
    if kind == "eval":  # The held-out text may differ from that of earlier evaluations.
      files.write_json(*self._contents)
    curves = scalars(record)
    if self._tensorboard:
      for name, value in curves.items():
        self._tensorboard.add_scalar(name, value, step)
    if self._wandb:
      self._wandb.log({**curves, "inner_step": step})

  def sample(self, step: int, text: str) -> None:
    """Writes text that the model generated after a step."""
    self._append("sample", step, {"text": text})
    if self._tensorboard:
      self._tensorboard.add_text("sample", textwrap.indent(text, _AS_CODE), step)
    if self._wandb:
      self._wandb.log({"sample": text, "inner_step": step})

  def results(self, summary: Json) -> None:
    """Hands the content of summary.json to Weights & Biases."""
    if self._wandb:
      self._wandb.summary.update(dict(summary))

  def close(self) -> None:
    self._file.close()
    if self._tensorboard:
      self._tensorboard.close()
    if self._wandb:
      self._wandb.finish()

  def _append(self, kind: str, step: int, values: Json) -> Json:
    # A NaN means "not defined". JSON has no NaN, so a record has null in its place.
    clean = json.loads(json.dumps(values), parse_constant=lambda _: None)
    record = {"kind": kind, "step": step, **clean}
    self._file.write(json.dumps(record) + "\n")
    return record


class Follower:
  """Reads a run's records as they are added; skips lines that are not records.

  A killed run may leave an incomplete line, and a line may be read while it is written.
  """

  def __init__(self, workdir: pathlib.Path):
    self._path, self._next = workdir / FILE, 0  # The first byte that is not read yet.

  def records(self) -> Iterator[Json]:
    """Yields the records that were added since the last call, in the file's order."""
    with self._path.open("rb") as file:
      file.seek(self._next)
      for line in file:
        record = as_record(line)
        if not record and not line.endswith(b"\n"):
          return  # The run will write the rest of this line.
        self._next += len(line)
        if record:
          yield record


def as_record(line: bytes) -> Json:
  """Parses a line of metrics.jsonl; {} if the line is not a record."""
  try:
    record = json.loads(line)
    return record if "kind" in record and "step" in record else {}
  except (RecursionError, TypeError, ValueError):
    return {}


def read(workdir: pathlib.Path, kind: str = "step") -> list[Json]:
  """Reads the records of one kind in order of steps, without those of earlier attempts.

  A resumed run repeats the steps since its checkpoint; only its last attempt counts.
  """
  return read_kinds(workdir, kind)[kind]


def read_kinds(workdir: pathlib.Path, *kinds: str) -> Kinds:
  """Reads the records of several kinds like `read`, in one pass over the file."""
  by_kind: dict[str, dict] = {kind: {} for kind in kinds}
  newest = 0
  for record in Follower(workdir).records():
    kind, step = record["kind"], record["step"]
    if kind in ("start", "step", "eval"):
      if step < newest:  # The run went on from an earlier step.
        for some in by_kind.values():
          for later in [place for place in some if place[0] > step]:
            del some[later]
      newest = step
    if kind in by_kind:
      by_kind[kind][step, record.get("fragment", 0)] = record
  return {kind: [rs[place] for place in sorted(rs)] for kind, rs in by_kind.items()}


def scalars(record: Json) -> dict[str, float]:
  """Returns {name: number} of a record, for the curves of dashboards.

  Dashboards group names by their first part. For a quantity with a number per fragment
  or per replica, the first part is the quantity: outer_grad_cosine/fragment_0,
  loss_per_replica/replica_1. For other quantities, the first part is the kind of the
  record: step/loss, eval/perplexity. A number of a fragment is the mean over the
  replicas, and over the layers if each layer has a value. metrics.jsonl has all values.
  """
  numbers = dict[str, float | None]()
  for name, value in record.items():
    if name in _NO_CURVES or isinstance(value, str):
      continue
    if "fragment" in record:
      value = _mean(value) if isinstance(value, list) else value
      numbers[f"{name}/fragment_{record['fragment']}"] = value
    elif isinstance(value, list):
      # With one replica, its number is the mean, which the record has already.
      several = enumerate(value if len(value) > 1 else [])
      numbers |= {f"{name}/replica_{i}": x for i, x in several}
    else:
      numbers[f"{record['kind']}/{name}"] = value
  return {name: float(value) for name, value in numbers.items() if value is not None}


def _mean(values: list) -> float | None:
  """Averages the numbers in a list, or in a list of lists; None without numbers."""
  known = [x for x in np.ravel(values) if x is not None]
  return sum(known) / len(known) if known else None


def _start_wandb(workdir: pathlib.Path, c: Config) -> Any:
  """Starts a run of Weights & Biases, or continues the one of this workdir."""
  needs = f"log.wandb_project is {c.log.wandb_project!r}, which needs"
  wandb = optional("wandb", needs, "wandb")
  path = workdir / "wandb_id.txt"
  if not path.exists():
    path.write_text(secrets.token_hex(8) + "\n")
  run = wandb.init(
    project=c.log.wandb_project,
    config=c.to_dict(),
    dir=str(workdir),
    id=path.read_text().strip(),
    resume="allow",
  )
  # By default, W&B would drop records whose step is below its own counter: after a
  # resume, and in the drain at the end. So `inner_step` becomes the horizontal axis.
  run.define_metric("inner_step")
  run.define_metric("*", step_metric="inner_step")
  return run
