"""Where a run's numbers go: JSON lines, TensorBoard, Weights & Biases, one picture."""

import contextlib
import json
import math
import os
import pathlib
import secrets
from collections.abc import Iterator
from typing import Any

import ml_collections

from diloco.config import ConfigError


class MetricsWriter:
  """Appends records to metrics.jsonl and mirrors their scalars elsewhere.

  Every line is one JSON object with `kind` (step, send, receive or eval) and
  `step`. The file is only ever appended to: after a resume the steps since the
  checkpoint appear again, with the same numbers, and `read` keeps the last.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    c: ml_collections.FrozenConfigDict,
    enabled: bool = True,
  ):
    """Opens the files; not `enabled`, on all processes but one, it writes nothing."""
    path = workdir / "metrics.jsonl" if enabled else pathlib.Path(os.devnull)
    torn = enabled and _ends_in_mid_line(path)
    self._file = path.open("a", buffering=1)  # By lines, so that it can be followed.
    if torn:
      self._file.write("\n")
    self._tensorboard: Any = None
    self._wandb: Any = None
    if not enabled:
      return
    if c.log.tensorboard:
      import tensorboardX

      self._tensorboard = tensorboardX.SummaryWriter(
        str(workdir / "tensorboard"), flush_secs=30
      )
    if c.log.wandb_project:
      try:
        import wandb
      except ImportError as error:
        raise ConfigError(
          f"log.wandb_project is {c.log.wandb_project!r}, but wandb is not installed:"
          " pip install wandb, or '.[wandb]' from a clone."
        ) from error
      self._wandb = wandb.init(
        project=c.log.wandb_project,
        config=c.to_dict(),
        dir=str(workdir),
        id=_kept_id(workdir),
        resume="allow",
      )
      # Steps may come again, after a resume, and in another order than theirs, at the
      # end: W&B's own counter would drop them.
      self._wandb.define_metric("inner_step")
      self._wandb.define_metric("*", step_metric="inner_step")

  def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
    """Records plain Python numbers and lists of them."""
    # NaN is no JSON; it stands for "not defined here" (a cosine at M = 1).
    clean = {k: _finite(v) for k, v in values.items()}
    self._file.write(json.dumps({"kind": kind, "step": step, **clean}) + "\n")
    prefix = f"fragment_{values['fragment']}" if "fragment" in values else kind
    scalars = dict(_scalars(prefix, clean))
    if self._tensorboard:
      for name, value in scalars.items():
        self._tensorboard.add_scalar(name, value, step)
    if self._wandb:
      self._wandb.log({**scalars, "inner_step": step})

  def flush(self) -> None:
    self._file.flush()

  def close(self) -> None:
    self._file.close()
    if self._tensorboard:
      self._tensorboard.close()
    if self._wandb:
      self._wandb.finish()


def read(workdir: pathlib.Path, kind: str = "step") -> list[dict[str, Any]]:
  """The records of one kind in order of steps; of repeated ones the last.

  A line cut short by a kill is left out.
  """
  records = {}
  with (workdir / "metrics.jsonl").open() as lines:
    for line in lines:
      with contextlib.suppress(json.JSONDecodeError):
        record = json.loads(line)
        if record["kind"] == kind:
          records[record["step"], record.get("fragment")] = record
  return [records[key] for key in sorted(records, key=lambda k: (k[0], k[1] or 0))]


def plot_loss(workdir: pathlib.Path, title: str) -> pathlib.Path:
  """Draws the loss curve of a run from its metrics into loss.png."""
  # Not by pyplot, whose backend is the caller's: a notebook draws on after training.
  from matplotlib.figure import Figure

  steps, evals = read(workdir), read(workdir, "eval")
  figure = Figure(figsize=(7, 4), layout="constrained")
  axes = figure.subplots()
  axes.plot(
    [r["step"] for r in steps],
    [r["loss"] for r in steps],
    lw=0.8,
    label="training, mean of replicas",
  )
  if evals:
    axes.plot(
      [r["step"] for r in evals],
      [r["loss_outer"] for r in evals],
      "o",
      color="black",
      ms=4,
      label="held-out, outer parameters",
    )
  axes.set(xlabel="inner step", ylabel="loss (nats per token)", title=title)
  axes.grid(alpha=0.3)
  axes.legend()
  path = workdir / "loss.png"
  figure.savefig(path, dpi=120)
  return path


def _kept_id(workdir: pathlib.Path) -> str:
  """The W&B run of a workdir: drawn once, so that a resumed run goes on in it."""
  path = workdir / "wandb_id.txt"
  if not path.exists():
    path.write_text(secrets.token_hex(8) + "\n")
  return path.read_text().strip()


def _ends_in_mid_line(path: pathlib.Path) -> bool:
  """Whether the last line of a file, if there is one, was cut short by a kill."""
  if not path.exists() or not path.stat().st_size:
    return False
  with path.open("rb") as file:
    file.seek(-1, os.SEEK_END)
    return file.read() != b"\n"


def _finite(value):
  if isinstance(value, list):
    return [_finite(v) for v in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def _scalars(prefix: str, values: dict[str, Any]) -> Iterator[tuple[str, float]]:
  for name, value in values.items():
    for i, v in enumerate(value) if isinstance(value, list) else ((None, value),):
      if isinstance(v, int | float):
        yield f"{prefix}/{name}" + ("" if i is None else f"/replica_{i}"), v
