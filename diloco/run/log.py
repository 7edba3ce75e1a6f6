"""What a run says while it runs.

Device metrics are fetched one launch late, so that logging never waits for the steps
that were just launched. Each process reads the metrics of its own replicas; process 0
writes them when it has those of all.
"""

import collections
import contextlib
import dataclasses
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import tqdm

from diloco.algorithm.inner import InnerMetrics
from diloco.algorithm.optimizers import learning_rate
from diloco.algorithm.state import Event
from diloco.config import Config
from diloco.evaluate.heldout import EvalResult
from diloco.evaluate.tasks import TaskResult
from diloco.model.shapes import flops_per_token
from diloco.run import hardware, metrics
from diloco.run.processes import Peers
from diloco.wire.ledger import Ledger


class TrainingDiverged(RuntimeError):
  """A loss or gradient is NaN or infinite: says where, and what can be restored."""


@dataclasses.dataclass
class Spent:
  """Time of a run, over all processes that continued it from a checkpoint.

  Attributes:
    wall_s: seconds from a process's first step to what it saved last.
    busy_s: seconds of training, without evaluations and checkpoints, and without the
      first launch of every process, which compiles.
    steps: inner steps of `busy_s`.
  """

  wall_s: float = 0.0
  busy_s: float = 0.0
  steps: int = 0


class Log:
  """Progress bar, metrics files, divergence check, ledger and clock.

  Attributes:
    ledger: bytes of all steps so far.
  """

  def __init__(
    self,
    c: Config,
    workdir: pathlib.Path,
    start: int,
    ledger: Ledger,
    spent: Spent,
    last_checkpoint: Callable[[], int | None],
    peers: Peers,
  ):
    """Opens the files.

    Args:
      c: the config.
      workdir: where they lie.
      start: inner steps that are done.
      ledger: the bytes of those steps.
      spent: the time of those steps.
      last_checkpoint: the step of the newest checkpoint, None if there is none.
      peers: the processes of the run.
    """
    self._c, self._workdir, self.ledger, self._spent = c, workdir, ledger, spent
    self._last_checkpoint, self._peers = last_checkpoint, peers
    self._writer = metrics.MetricsWriter(workdir, c, enabled=peers.index == 0)
    self._schedule = learning_rate(c)
    self._pending: collections.deque = collections.deque()
    peak = hardware.peak_flops(jax.devices()[0].device_kind)
    self._peak = peak * jax.device_count() if peak else None
    self._began = time.perf_counter() - spent.wall_s
    self._clock: float | None = None  # When the last steps were reported.
    self._last_sync = "none yet"
    self._bar = tqdm.tqdm(
      total=c.train.steps,
      initial=start,
      unit="step",
      desc=c.algorithm,
      dynamic_ncols=True,
      disable=peers.index > 0,
      mininterval=0.2 if sys.stderr.isatty() else 15,
    )

  def stretch(
    self, steps: range, by_step: list[InnerMetrics], events: list[Event]
  ) -> None:
    """Takes inner steps that were just launched, and reports those before them.

    Args:
      steps: the steps.
      by_step: metrics of each step; on the devices, not waited for.
      events: what was sent and received after the last step.
    """
    for x in jax.tree.leaves((by_step, [event.metrics for event in events])):
      if hasattr(x, "copy_to_host_async"):  # Not of what the host computed.
        x.copy_to_host_async()
    self._pending.append((steps, by_step, events))
    while len(self._pending) > 1:
      self._report_oldest()
    self._write(wait=False)

  def flush(self) -> None:
    """Waits for all steps and writes them."""
    while self._pending:
      self._report_oldest()
    self._write(wait=True)
    self._writer.flush()

  @contextlib.contextmanager
  def pause(self) -> Iterator[None]:
    """Does not count evaluations and checkpoints as training time."""
    self.flush()
    yield
    self._clock = time.perf_counter() if self._clock else None

  def evaluation(
    self, t: int, results: dict[str, EvalResult], scores: dict[str, TaskResult]
  ) -> None:
    """Writes held-out losses by kind of parameters, and accuracies by task."""
    values = {f"loss_{which}": r.loss for which, r in results.items()}
    values["bits_per_byte"] = results["outer"].bits_per_byte
    for task, result in scores.items():
      values[f"{task}_accuracy"] = result.accuracy
      values[f"{task}_accuracy_norm"] = result.accuracy_norm
    self._writer.write("eval", t, values)

  def events(self, events: list[Event]) -> None:
    """Writes sends and receives, and books the bytes."""
    for event in events:
      values = {k: _local(v) for k, v in event.metrics.items()}
      extra = {"fragment": event.fragment}
      if event.kind == "send":
        self.ledger.record(event.fragment, event.step, event.sent)
        extra["bytes"] = event.sent
        self._check_finite(event.step, values["outer_grad_norm"], "outer gradient norm")
      else:
        self._last_sync = f"fragment {event.fragment} @ {event.step}"
      self._peers.report([event.kind, event.step, values, extra])

  def spent(self) -> Spent:
    """The time so far, to be saved with a checkpoint."""
    self._spent.wall_s = time.perf_counter() - self._began
    return self._spent

  def tokens_per_s(self) -> float | None:
    """Mean over the run so far."""
    s = self._spent
    return s.steps * self._c.tokens_per_step / s.busy_s if s.steps else None

  def _report_oldest(self) -> None:
    steps, by_step, events = self._pending.popleft()
    found = [{k: _local(v) for k, v in of._asdict().items()} for of in by_step]
    rate = self._tick(len(steps))
    for t, values in zip(steps, found):
      self._check_finite(t, values["loss"], "loss")
      self._check_finite(t, values["grad_norm"], "gradient norm")
      if t == steps[-1]:
        self.events(events)
      if t % self._c.log.every and t < self._c.train.steps:
        continue  # Skips steps that are not logged: links may be slow.
      extra = {
        "time": time.time(),
        "bytes_sent": self.ledger.total,
        "tokens_per_s": rate,
      }
      self._peers.report(["step", t, values, extra])

  def _write(self, wait: bool) -> None:
    """Writes what all processes have reported; process 0 only."""
    for reports in self._peers.reports(wait):
      kind, step, _, extra = reports[0]
      values = {k: _join([r[2][k] for r in reports]) for k in reports[0][2]}
      if kind == "step":
        self._write_step(step, values, extra)
      else:
        self._writer.write(kind, step, {**extra, **values})

  def _write_step(self, t: int, inner: dict[str, list[float]], extra: dict) -> None:
    loss, rate = float(np.mean(inner["loss"])), extra["tokens_per_s"]
    if t % self._c.log.every == 0:
      values = {
        "tokens": t * self._c.tokens_per_step,
        "loss": loss,
        "loss_per_replica": inner["loss"],
        "grad_norm": float(np.mean(inner["grad_norm"])),
        "grad_norm_per_replica": inner["grad_norm"],
        "update_norm": float(np.mean(inner["update_norm"])),
        "learning_rate": float(self._schedule(t - 1)),
        **extra,
      }
      if self._peak and rate:
        values["mfu"] = rate * flops_per_token(self._c.model) / self._peak
      self._writer.write("step", t, values)
    self._bar.set_postfix_str(
      f"loss {loss:.3f}, {rate or 0:,.0f} tokens/s, last sync: {self._last_sync}",
      refresh=False,
    )
    self._bar.update(t - self._bar.n)

  def _tick(self, steps: int) -> float | None:
    """Books so many steps and the time since the last ones; mean tokens/s so far."""
    now = time.perf_counter()
    if self._clock is not None:
      self._spent.busy_s += now - self._clock
      self._spent.steps += steps
    self._clock = now
    return self.tokens_per_s()

  def _check_finite(self, t: int, per_replica: list, what: str) -> None:
    for m, value in per_replica:
      if not math.isfinite(value):
        self._writer.flush()
        saved = self._last_checkpoint()
        good = f"step {saved}" if saved is not None else "none"
        raise TrainingDiverged(
          f"the {what} of replica {m} is {value} at step {t}; last good checkpoint:"
          f" {good}, in {self._workdir / 'checkpoints'}."
        )

  def close(self) -> None:
    self._bar.close()
    self._writer.close()


def _local(x: Any) -> Any:
  """This process's part of a metric: [replica, value] pairs, or a number."""
  if x.ndim == 0:
    return float(np.asarray(x))
  if x.is_fully_replicated:
    return list(enumerate(np.asarray(x).tolist()))
  pairs: list[tuple[int, float]] = []
  for shard in x.addressable_shards:
    if shard.replica_id == 0:  # The replica's other devices hold copies.
      values = np.asarray(shard.data).tolist()
      pairs += enumerate(values, start=shard.index[0].start or 0)
  return pairs


def _join(parts: list[Any]) -> Any:
  """One metric of all replicas, from the parts of all processes."""
  if not isinstance(parts[0], list):
    return parts[0]
  return [value for _, value in sorted(dict(p for part in parts for p in part).items())]
