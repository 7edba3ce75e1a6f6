"""What a run says while it runs and at its end.

Device metrics are fetched one launch late, so that logging never waits for the steps
that were just launched. Of several processes each reads the metrics of its replicas;
process 0 writes them once it has those of all.
"""

import collections
import contextlib
import dataclasses
import math
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tqdm

from diloco import config as config_lib
from diloco.algorithm.inner import InnerMetrics, learning_rate
from diloco.algorithm.sync import Event
from diloco.evaluate.heldout import EvalResult
from diloco.evaluate.tasks import TaskResult
from diloco.model.decoder import flops_per_token
from diloco.run import hardware, metrics
from diloco.run.processes import Peers
from diloco.wire import ledger as ledger_lib


class TrainingDiverged(RuntimeError):
  """A loss or gradient is NaN or infinite: says where, and what can be restored."""


@dataclasses.dataclass
class Spent:
  """Time of a run, over the processes that went on from one another's checkpoints.

  Attributes:
    wall_s: seconds from a process's first step to what it saved last.
    busy_s: seconds of training, without evaluation and checkpoints, nor the first
      launch of every process, which compiles.
    steps: inner steps of `busy_s`.
  """

  wall_s: float = 0.0
  busy_s: float = 0.0
  steps: int = 0


class Recorder:
  """Progress bar, metrics files, divergence check, byte ledger and summary."""

  def __init__(
    self,
    c,
    workdir: pathlib.Path,
    start: int,
    ledger: ledger_lib.Ledger,
    spent: Spent,
    last_checkpoint: Callable[[], int | None],
    peers: Peers,
  ):
    """Opens the files.

    Args:
      c: resolved config.
      workdir: where they lie.
      start: inner steps that are done.
      ledger: the bytes of those; booked on.
      spent: the time of those; booked on.
      last_checkpoint: the step of the newest checkpoint, None if there is none.
      peers: the processes of the run.
    """
    self._config, self._workdir = c, workdir
    self._ledger, self._spent = ledger, spent
    self._last_checkpoint, self._peers = last_checkpoint, peers
    self._writer = metrics.MetricsWriter(workdir, c, enabled=peers.index == 0)
    self._schedule = learning_rate(c)
    self._pending: collections.deque = collections.deque()
    self._tokens_per_step = c.train.batch_size * c.model.seq_len
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
    self, steps: range, metrics: list[InnerMetrics], events: list[Event]
  ) -> None:
    """Takes note of inner steps that were launched together, and reports the last ones.

    Args:
      steps: the steps.
      metrics: of each of them; on the devices, not waited for.
      events: what was sent and received after the last.
    """
    _copy_to_host((metrics, [event.metrics for event in events]))
    self._pending.append((steps, metrics, events))
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
  def pause(self):
    """Takes evaluation and checkpoints out of the training time."""
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
    self._report_events(events)
    self._write(wait=True)

  def _report_oldest(self) -> None:
    steps, metrics, events = self._pending.popleft()
    found = [{k: _local(v) for k, v in of._asdict().items()} for of in metrics]
    rate = self._tick(len(steps))
    for t, values in zip(steps, found):
      self._check_finite(t, values["loss"], "loss")
      self._check_finite(t, values["grad_norm"], "gradient norm")
      if t == steps[-1]:
        self._report_events(events)
      if t % self._config.log.every and t < self._config.train.steps:
        continue  # What is not written is not told either: links may be slow.
      extra = {
        "time": time.time(),
        "bytes_sent": self._ledger.total,
        "tokens_per_s": rate,
      }
      self._peers.report(["step", t, values, extra])

  def _report_events(self, events: list[Event]) -> None:
    for event in events:
      values = {k: _local(v) for k, v in event.metrics.items()}
      extra = {"fragment": event.fragment}
      if event.kind == "send":
        sent = self._ledger.record(event.fragment, event.step, event.payload_bytes)
        extra["bytes"] = sent
        self._check_finite(event.step, values["outer_grad_norm"], "outer gradient norm")
      else:
        self._last_sync = f"fragment {event.fragment} @ {event.step}"
      self._peers.report([event.kind, event.step, values, extra])

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
    if t % self._config.log.every == 0:
      values = {
        "tokens": t * self._tokens_per_step,
        "loss": loss,
        "loss_per_replica": inner["loss"],
        "grad_norm": float(np.mean(inner["grad_norm"])),
        "grad_norm_per_replica": inner["grad_norm"],
        "update_norm": float(np.mean(inner["update_norm"])),
        "learning_rate": float(self._schedule(t - 1)),
        **extra,
      }
      if self._peak and rate:
        values["mfu"] = rate * flops_per_token(self._config) / self._peak
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
    return self._rate()

  def _rate(self) -> float | None:
    """Mean tokens/s so far."""
    spent = self._spent
    return spent.steps * self._tokens_per_step / spent.busy_s if spent.steps else None

  def spent(self) -> Spent:
    """The time so far, to be saved with a checkpoint."""
    self._spent.wall_s = time.perf_counter() - self._began
    return self._spent

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

  def summary(
    self, results: dict[str, EvalResult], scores: dict[str, TaskResult]
  ) -> dict[str, Any]:
    """What summary.json holds; bytes are those one replica sends."""
    c, ledger = self._config, self._ledger
    params = config_lib.num_params(c)
    reference = ledger_lib.data_parallel_bytes(c.replicas, params, c.train.steps)
    sent, peak = ledger.total, ledger.peak
    if c.algorithm == "data_parallel":
      value_bytes = np.dtype(c.inner.gradient_dtype).itemsize
      peak = int(ledger_lib.data_parallel_bytes(c.replicas, params, 1, value_bytes))
      sent = peak * c.train.steps
    return {
      "algorithm": c.algorithm,
      "replicas": c.replicas,
      "steps": c.train.steps,
      "tokens": c.train.tokens,
      "params": params,
      "eval_loss": {which: r.loss for which, r in results.items()},
      "perplexity": results["outer"].perplexity,
      "bits_per_byte": results["outer"].bits_per_byte,
      "tasks": {task: dataclasses.asdict(r) for task, r in scores.items()},
      "bytes_sent_per_replica": sent,
      "bytes_data_parallel_per_replica": int(reference),
      "bytes_ratio_to_data_parallel": reference / sent if sent else None,
      "peak_bytes_per_sync": peak,
      "syncs": ledger.syncs,
      "fragments": {
        p: {"syncs": n, "bytes": b} for p, (n, b) in ledger.fragments.items()
      },
      "tokens_per_s": self._rate(),
      "wall_s": self.spent().wall_s,
      "device": jax.devices()[0].device_kind,
      "devices": jax.device_count(),
      "jax": jax.__version__,
    }

  def report(self, summary: dict, text: str, picture: pathlib.Path) -> None:
    """Prints the end of the run for a person."""
    self._bar.close()
    losses = summary["eval_loss"]
    ratio = summary["bytes_ratio_to_data_parallel"]
    lines = [
      "",
      f"evaluation   outer parameters {losses['outer']:.4f} nats/token, perplexity"
      f" {summary['perplexity']:.2f}, {summary['bits_per_byte']:.4f} bits/byte",
      f"             replicas' mean {losses['mean']:.4f}, first replica"
      f" {losses['first']:.4f}",
      *(
        f"{task:<12} accuracy {100 * r['accuracy']:.2f}%, length-normalised"
        f" {100 * r['accuracy_norm']:.2f}%, of {r['items']:,} items,"
        f" {100 * r['chance']:.0f}% by chance"
        for task, r in summary["tasks"].items()
      ),
      f"exchanged    {summary['bytes_sent_per_replica']:,} bytes sent per replica in"
      f" {summary['syncs']} syncs, at most {summary['peak_bytes_per_sync']:,} at once",
      "             data-parallel with 16-bit gradients would have sent"
      f" {summary['bytes_data_parallel_per_replica']:,}"
      + (f": {ratio:,.1f} times as many" if ratio else ""),
      f"speed        {summary['tokens_per_s'] or 0:,.0f} tokens/s,"
      f" {summary['wall_s']:.0f} s in all",
    ]
    if text:
      lines += ["", "generated    " + text.replace("\n", "\n             "), ""]
    lines += [
      f"checkpoint   {self._workdir / 'checkpoints'}",
      f"metrics      {self._workdir / 'metrics.jsonl'} and tensorboard/",
      f"loss curve   {picture}",
      f"summary      {self._workdir / 'summary.json'}",
    ]
    print("\n".join(lines))

  def close(self) -> None:
    self._bar.close()
    self._writer.close()


def _copy_to_host(tree: Any) -> None:
  """Begins to fetch arrays, without waiting for what computes them."""
  for x in jax.tree.leaves(tree):
    x.copy_to_host_async()


def _local(x: jax.Array) -> Any:
  """What of a metric this process tells: [replica, value] pairs, or a number."""
  if x.ndim == 0:
    return float(np.asarray(x))
  if x.is_fully_replicated:
    return list(enumerate(np.asarray(x).tolist()))
  pairs: list[tuple[int, float]] = []
  for shard in x.addressable_shards:
    if shard.replica_id == 0:  # Copies lie on the other devices of the replica.
      values = np.asarray(shard.data).tolist()
      pairs += enumerate(values, start=shard.index[0].start or 0)
  return pairs


def _join(parts: list[Any]) -> Any:
  """One metric of all replicas, from what `_local` found on every process."""
  if not isinstance(parts[0], list):
    return parts[0]
  return [value for _, value in sorted(dict(p for part in parts for p in part).items())]
