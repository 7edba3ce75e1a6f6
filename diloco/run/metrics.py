"""Where a run's numbers go: JSON lines, TensorBoard, Weights & Biases, one picture."""

import contextlib
import json
import pathlib
import secrets
from collections.abc import Iterator
from typing import Any

from diloco.config import Config, ConfigError


class MetricsWriter:
  """Appends records to metrics.jsonl, and copies their numbers elsewhere.

  Every line is one JSON object with `kind` (step, send, receive or eval) and `step`.
  Lines are only appended: a resumed run writes the steps since its checkpoint again,
  with the same numbers, and `read` takes the last.
  """

  def __init__(self, workdir: pathlib.Path, c: Config):
    path = workdir / "metrics.jsonl"
    # A kill may have cut the last line short.
    with path.open("ab+") as file:
      file.seek(max(file.tell() - 1, 0))
      if file.read() not in (b"", b"\n"):
        file.write(b"\n")
    self._file = path.open("a", buffering=1)  # Line by line, so that one can follow it.
    self._tensorboard: Any = None
    self._wandb: Any = None
    if c.log.tensorboard:
      import tensorboardX

      self._tensorboard = tensorboardX.SummaryWriter(
        str(workdir / "tensorboard"), flush_secs=30
      )
    if c.log.wandb_project:
      self._wandb = _start_wandb(workdir, c)

  def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
    """Writes a record of plain Python numbers and lists of numbers."""
    # JSON has no NaN, which stands for "not defined": null takes its place.
    clean = json.loads(json.dumps(values), parse_constant=lambda _: None)
    self._file.write(json.dumps({"kind": kind, "step": step, **clean}) + "\n")
    prefix = f"fragment_{values['fragment']}" if "fragment" in values else kind
    scalars = dict(_scalars(prefix, clean))
    if self._tensorboard:
      for name, value in scalars.items():
        self._tensorboard.add_scalar(name, value, step)
    if self._wandb:
      self._wandb.log({**scalars, "inner_step": step})

  def close(self) -> None:
    self._file.close()
    if self._tensorboard:
      self._tensorboard.close()
    if self._wandb:
      self._wandb.finish()


def read(workdir: pathlib.Path, kind: str = "step") -> list[dict[str, Any]]:
  """Reads the records of one kind in order of steps; of repeated records the last.

  Skips lines that are no records, for example a line that a kill cut short.
  """
  records = {}
  with (workdir / "metrics.jsonl").open(errors="replace") as lines:
    for line in lines:
      with contextlib.suppress(ValueError, TypeError, KeyError):
        record = json.loads(line)
        if record["kind"] == kind:
          records[record["step"], record.get("fragment", 0)] = record
  return [records[key] for key in sorted(records)]


def plot_loss(workdir: pathlib.Path, title: str) -> pathlib.Path:
  """Draws the loss curve of a run into loss.png."""
  # Without pyplot, whose backend belongs to the caller, for instance a notebook.
  from matplotlib.figure import Figure

  figure = Figure(figsize=(7, 4), layout="constrained")
  axes = figure.subplots()
  for kind, field, style, label in (
    ("step", "loss", "-", "training, mean of replicas"),
    ("eval", "loss_outer", "ko", "held-out, outer parameters"),
  ):
    points = [(r["step"], r[field]) for r in read(workdir, kind)]
    if points:
      axes.plot(*zip(*points), style, lw=0.8, ms=4, label=label)
  axes.set(xlabel="inner step", ylabel="loss (nats per token)", title=title)
  axes.grid(alpha=0.3)
  axes.legend()
  path = workdir / "loss.png"
  figure.savefig(path, dpi=120)
  return path


def _start_wandb(workdir: pathlib.Path, c: Config) -> Any:
  """Starts a run of Weights & Biases, or continues the one of this workdir."""
  try:
    import wandb
  except ImportError as error:
    raise ConfigError(
      f"log.wandb_project is {c.log.wandb_project!r}, but wandb is not installed: pip"
      " install wandb, or '.[wandb]' from a clone."
    ) from error
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
  # W&B drops steps below its own counter: after a resume, and those of the last drain.
  run.define_metric("inner_step")
  run.define_metric("*", step_metric="inner_step")
  return run


def _scalars(prefix: str, values: dict[str, Any]) -> Iterator[tuple[str, float]]:
  """Yields names and numbers; a list has a name for each replica."""
  for name, value in values.items():
    if isinstance(value, list):
      replicas = {f"replica_{i}": x for i, x in enumerate(value)}
      yield from _scalars(f"{prefix}/{name}", replicas)
    elif value is not None:
      yield f"{prefix}/{name}", value
