"""Reports on a run while it trains: progress bar, metrics, divergence check, speed.

Metrics are fetched from the devices one launch late, so that logging never waits for
the steps that were just launched. Each process reads the metrics of its own replicas.
Process 0 writes the metrics of a step when they have arrived from all processes.
"""

import contextlib
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import tqdm

from diloco.algorithm.inner import InnerMetrics
from diloco.algorithm.optimizers import learning_rate
from diloco.algorithm.state import Event
from diloco.checkpoint.record import Record, Spent
from diloco.checkpoint.resume import DIVERGED
from diloco.config import Config
from diloco.errors import ConfigError
from diloco.log import metrics
from diloco.mesh import hardware
from diloco.processes.peers import Peers
from diloco.spec.schedule import reaches
from diloco.spec.shapes import flops_per_token
from diloco.util import files, remote
from diloco.util.bar import make_bar
from diloco.util.types import Json
from diloco.wire.ledger import Ledger, all_reduced_bytes


class TrainingDiverged(ConfigError):
  """A loss or a gradient is NaN or infinite."""


class Log:
  """Writes the metrics of all processes, and counts bytes and time.

  Attributes:
    workdir: folder of the files.
    peers: the processes that train the run.
    ledger: bytes of all steps so far.
    recovers: `Method.recovers`.
    mixtures: `Record.mixtures` of the run.
    contents: `diloco.data.contents` of the run.
  """

  def __init__(
    self,
    c: Config,
    workdir: pathlib.Path,
    record: Record,
    last_checkpoint: Callable[[], int | None],
    peers: Peers,
    contents: Mapping[str, str] = {},
  ):
    """Opens the files.

    Args:
      workdir: folder of the files.
      record: the record of the checkpoint from which the run goes on, with the bytes
        and the time of the steps so far; a new record for a new run.
      last_checkpoint: returns the step of the newest checkpoint, or of the checkpoint
        that is being written; None if there is no checkpoint.
    """
    self._c, self.workdir, self.peers = c, workdir, peers
    self.ledger, self._spent = Ledger(**record.ledger), Spent(**record.spent)
    self.mixtures, self._last_checkpoint = record.mixtures, last_checkpoint
    self.contents = dict(contents)
    self._writer = (
      metrics.MetricsWriter(workdir, c, contents, last_checkpoint() or 0)
      if peers.index == 0
      else None
    )
    # Computes all learning rates now: later, a device would first run the steps that
    # are in flight.
    rates = jax.jit(lambda peak, count: learning_rate(c, peak)(count))
    self._rates = np.asarray(rates(c.inner.learning_rate, np.arange(c.train.steps)))
    # The launch that is not reported yet: its steps, their metrics and its events.
    self._pending: tuple[range, list[InnerMetrics], list[Event]] | None = None
    self._began = time.perf_counter() - self._spent.wall_s
    self._clock: float | None = None  # When the last steps were reported.
    self._at = c.train.steps  # Last reported step; at first, the run's last step.
    self._last_sync = "no sync yet"
    self._bar: tqdm.tqdm | None = None
    self.recovers: Callable[[int], bool] = lambda t: False

  def launched(
    self, steps: range, by_step: list[InnerMetrics], events: list[Event]
  ) -> None:
    """Notes inner steps that were just launched, and reports the launch before them.

    Args:
      by_step: metrics of each step, which the devices may still be computing.
      events: sends and receives after the last of these steps.
    """
    for x in jax.tree.leaves((by_step, [event.metrics for event in events])):
      if hasattr(x, "copy_to_host_async"):  # NumPy arrays lack this method.
        x.copy_to_host_async()
    self._report_pending()
    self._pending = steps, by_step, events
    self._write(wait=False)

  def flush(self) -> None:
    """Waits for all launched steps and writes their metrics."""
    self._report_pending()
    self._write(wait=True)

  @contextlib.contextmanager
  def pause(self) -> Iterator[None]:
    """Keeps an evaluation or a checkpoint out of the training time."""
    self.flush()
    yield
    self._clock = time.perf_counter() if self._clock else None

  def say(self, text: str) -> None:
    """Shows immediately what the run does after its last step."""
    if self._bar:
      self._bar.set_postfix_str(f"{text}, {self._bar.postfix}")

  def evaluation(self, t: int, values: dict[str, float]) -> None:
    """Writes the results of an evaluation after step t."""
    if self._writer:
      self._writer.write("eval", t, values)

  def results(self, summary: Json, text: str) -> None:
    """Writes generated text, unless it is empty; gives the summary to W&B."""
    if self._writer:
      if text:
        self._writer.sample(self._c.train.steps, text)
      self._writer.results(summary)

  def events(self, events: list[Event]) -> None:
    """Reports events, and counts the bytes of syncs and averages."""
    for event in events:
      if event.kind == "average":
        self.ledger.record_average(event.fragment, event.step, event.sent)
        continue
      values = {name: _local(x) for name, x in event.metrics.items()}
      extra = {"fragment": event.fragment}
      if event.kind == "send":
        self.ledger.record(event.fragment, event.step, event.sent)
        extra["bytes"] = event.sent
        self._check_finite(event.step, values["outer_grad_norm"], "outer gradient norm")
      elif event.kind == "receive":
        name = "sync" if event.step <= self._c.train.steps else "drain"
        self._last_sync = f"{name} {event.fragment} @ {event.step}"
        update = [(None, values["outer_update_norm"])]
        self._check_finite(event.step, update, "outer update norm")
      self.peers.report([event.kind, event.step, values, extra])

  def spent(self) -> Spent:
    """Returns the time that the run has taken so far, for a checkpoint."""
    self._spent.wall_s = time.perf_counter() - self._began
    return self._spent

  def sent(self, t: int) -> int:
    """Counts the bytes that one replica has sent by the end of inner step t."""
    return self.ledger.total + all_reduced_bytes(self._c, t)

  def peak(self) -> int:
    """The most bytes that one replica has sent at a single step so far."""
    return max(self.ledger.peak, all_reduced_bytes(self._c, 1))

  def tokens_per_s(self) -> float | None:
    """Mean speed of the run so far; None before it is known."""
    s = self._spent
    return s.steps * self._c.tokens_per_step / s.busy_s if s.steps else None

  def close(self) -> None:
    """Ends the line of the progress bar, and closes the files."""
    if self._bar:
      self._bar.close()
    if self._writer:
      self._writer.close()

  def _report_pending(self) -> None:
    """Waits for the pending launch, and hands its metrics to process 0."""
    if self._pending is None:
      return
    (steps, by_step, events), self._pending = self._pending, None
    numbers = [{name: _local(x) for name, x in m._asdict().items()} for m in by_step]
    now = time.perf_counter()
    if self._clock is not None:
      self._spent.busy_s += now - self._clock
      self._spent.steps += len(steps)
    self._clock = now
    if self.peers.index == 0:
      # The bar starts after the first launch, so that it does not count compilation.
      self._bar = self._bar or make_bar(
        total=self._c.train.steps,
        initial=steps[-1],
        position=0,  # Runs that train together show their bars in different files.
        bar_format="{percentage:3.0f}%|{bar}| {n}/{total} [{remaining} left{postfix}]",
      )
      self._bar.update(steps[-1] - self._bar.n)
    for t, values in zip(steps, numbers):
      before, self._at = min(self._at, t - 1), t  # A site may skip steps.
      self._check_finite(t, values["loss"], "loss")
      self._check_finite(t, values["grad_norm"], "gradient norm")
      if t == steps[-1]:
        self.events(events)
      if not reaches(before + 1, t, self._c.log.every) and t < self._c.train.steps:
        continue  # Sends nothing for unlogged steps: links may be slow.
      extra = {
        "time": time.time(),
        "bytes_sent": self.sent(t),
        "peak_bytes": self.peak(),
        "tokens_per_s": self.tokens_per_s(),
      }
      self.peers.report(["step", t, values, extra])

  def _write(self, wait: bool) -> None:
    """Writes the reports that have come from all processes; process 0 only."""
    for reports in self.peers.reports(wait):
      kind, step, values_0, extra = reports[0]
      values = {name: _join([r[2][name] for r in reports]) for name in values_0}
      if kind == "step":
        self._write_step(step, values, extra)
      elif self._writer:
        self._writer.write(kind, step, {**extra, **values})

  def _write_step(self, t: int, inner: dict[str, list[float]], extra: dict) -> None:
    loss, rate = float(np.mean(inner["loss"])), extra["tokens_per_s"]
    if self._writer and (t < self._c.train.steps or t % self._c.log.every == 0):
      values = {
        "tokens": t * self._c.tokens_per_step,
        "loss": loss,
        "loss_per_replica": inner["loss"],
        "grad_norm": float(np.mean(inner["grad_norm"])),
        "grad_norm_per_replica": inner["grad_norm"],
        "update_norm": float(np.mean(inner["update_norm"])),
        "learning_rate": float(self._rates[t - 1]),
        **extra,
      }
      if rate and (peak := hardware.peak_flops(jax.devices()[0].device_kind)):
        flops = rate * flops_per_token(self._c.model)
        values["mfu"] = flops / (peak * jax.device_count())
      self._writer.write("step", t, values)
    if self._bar:
      text = f"loss {loss:.3f}, {rate or 0:,.0f} tokens/s, {self._last_sync}"
      self._bar.set_postfix_str(text, refresh=False)

  def _check_finite(self, t: int, per_replica: list, name: str) -> None:
    for m, value in per_replica:
      if not (math.isfinite(value) or self.recovers(t)):
        self._write(wait=False)  # The steps before this one show what happened.
        saved = self._last_checkpoint()
        # Only the processes that hold replica m know: each may have to write.
        files.write_json(self.workdir / DIVERGED, {"step": t, name: str(value)})
        remote.put_back(self.workdir / DIVERGED)
        who = "" if m is None else f" of replica {m}"
        raise TrainingDiverged(
          f"the {name}{who} is {value} at step {t}; last good checkpoint:"
          f" {'none' if saved is None else f'step {saved}'}, in"
          f" {self.workdir / 'checkpoints'}; the same command with a lower"
          " inner.learning_rate or outer.learning_rate goes on from there."
        )


def _local(x: Any) -> Any:
  """Returns this process's part of a metric: [replica, value] pairs, or a number."""
  if x.ndim == 0:
    return float(np.asarray(x))
  if isinstance(x, np.ndarray):
    return list(enumerate(x.tolist()))
  pairs: list[tuple[int, float]] = []
  for shard in x.addressable_shards:
    if shard.replica_id == 0:  # Other devices hold copies.
      values = np.asarray(shard.data).tolist()
      pairs += enumerate(values, start=shard.index[0].start or 0)
  return pairs


def _join(parts: list[Any]) -> Any:
  """Joins all processes' parts of a metric: one value per replica, or a number."""
  if not isinstance(parts[0], list):
    return parts[0]
  by_replica = dict(pair for part in parts for pair in part)
  return [by_replica[m] for m in sorted(by_replica)]
