"""The log fetches metrics one launch late, counts time, and joins all processes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from diloco.algorithm.inner import InnerMetrics
from diloco.algorithm.state import Event
from diloco.checkpoint.record import Record, Spent
from diloco.checkpoint.resume import DIVERGED
from diloco.config import resolve
from diloco.log import metrics
from diloco.log.log import Log, TrainingDiverged, _join
from diloco.processes.peers import Peers
from diloco.util import files, remote
from diloco.wire.ledger import Ledger


class OnDevice:
  """A metric of two replicas on the device, which notes its copies and fetches."""

  ndim, replica_id, index = 1, 0, (slice(None),)

  def __init__(self, name, log: list):
    self.name, self._log = name, log
    self.data, self.addressable_shards = self, [self]

  def copy_to_host_async(self):
    self._log.append(("copy", self.name))

  def __array__(self, dtype=None, copy=None):
    self._log.append(("fetch", self.name))
    return np.ones(2)


def make_recorder(tiny, workdir, spent=None):
  c = resolve(tiny)
  return Log(c, workdir, Record({}, spent=spent or {}), lambda: None, Peers())


def launch(steps: range, log: list):
  """Arguments of `Log.launched`: metrics by step, and a send after the last."""
  made = [InnerMetrics(*[OnDevice(t, log)] * 3) for t in steps]
  sent = {"outer_grad_norm": OnDevice("send", log)}
  return steps, made, [Event("send", 0, steps[-1], 10, sent)]


def test_metrics_of_the_newest_launch_are_not_fetched(tiny, tmp_path):
  recorder, log = make_recorder(tiny, tmp_path), []
  recorder.launched(*launch(range(1, 4), log))
  assert {kind for kind, _ in log} == {"copy"}
  assert {name for _, name in log} == {1, 2, 3, "send"}
  log.clear()
  recorder.launched(*launch(range(4, 6), log))
  assert {name for kind, name in log if kind == "copy"} == {4, 5, "send"}
  assert {name for kind, name in log if kind == "fetch"} == {1, 2, 3, "send"}
  log.clear()
  recorder.flush()
  assert {name for _, name in log} == {4, 5, "send"}
  assert [r["step"] for r in metrics.read(tmp_path)] == [1, 2, 3, 4, 5]
  assert [r["step"] for r in metrics.read(tmp_path, "send")] == [3, 5]
  recorder.close()


@pytest.mark.parametrize(
  ("trained", "logged"),
  [
    (range(1, 25), [10, 20]),
    (range(12, 25), [20]),  # Goes on from a checkpoint.
    (range(1, 25, 2), [11, 21]),  # A site with sites.pace = 0.5.
    ([8, 9, 23], [23]),  # A site that was late.
  ],
)
def test_a_step_of_each_period_is_logged_despite_skips(trained, logged, tiny, tmp_path):
  tiny.log.every, tiny.train.steps = 10, 24
  recorder, of_step = make_recorder(tiny, tmp_path), InnerMetrics(*[np.ones(1)] * 3)
  for t in trained:
    recorder.launched(range(t, t + 1), [of_step], [])
  recorder.flush()
  assert [r["step"] for r in metrics.read(tmp_path)] == logged
  recorder.close()


def test_the_progress_line_fits_80_columns(tiny, tmp_path, capsys):
  tiny.train.steps = 100_000
  recorder = make_recorder(tiny, tmp_path)
  recorder._last_sync = "sync 12 @ 99999"
  metrics_of = lambda loss: InnerMetrics(*[np.full(2, loss)] * 3)
  for t in (99_998, 99_999):
    recorder.launched(range(t, t + 1), [metrics_of(6.25)], [])
  recorder.flush()
  recorder.say("evaluating")
  shown = capsys.readouterr().err
  recorder.close()
  line = capsys.readouterr().err
  assert "99999/100000 [" in line
  assert line.endswith(" tokens/s, sync 12 @ 99999]\n")
  # Without a terminal the bar itself has 10 columns; it needs one.
  assert len(line.replace("evaluating, ", "")) - 10 <= 80
  # What takes a minute after the last step is said when it begins.
  assert shown.endswith(line)
  assert "left, evaluating, loss 6.250" in line


@pytest.mark.parametrize("spent", [Spent(), Spent(wall_s=100.0, busy_s=10.0, steps=5)])
def test_the_speed_leaves_out_the_first_launch(tiny, tmp_path, monkeypatch, spent):
  # Times: the recorder is made, launches 1 to 3 are reported, the time is read.
  clock = iter([90.0, 100.0, 103.0, 105.0, 107.0])
  monkeypatch.setattr("diloco.log.log.time.perf_counter", lambda: next(clock))
  recorder = make_recorder(tiny, tmp_path, dataclasses.asdict(spent))
  of_step = InnerMetrics(*[jnp.ones(2)] * 3)
  for steps in (range(1, 4), range(4, 7), range(7, 9)):
    recorder.launched(steps, [of_step] * len(steps), [])
  recorder.flush()
  rates = [r["tokens_per_s"] for r in metrics.read(tmp_path)]
  tokens = tiny.train.batch_size * tiny.model.seq_len
  busy, n = spent.busy_s, spent.steps
  first = n * tokens / busy if n else None  # Of the time before, if the run goes on.
  later = [(n + 3) * tokens / (busy + 3)] * 3 + [(n + 5) * tokens / (busy + 5)] * 2
  assert rates == [first] * 3 + later
  assert recorder.spent() == Spent(spent.wall_s + 17.0, busy + 5.0, n + 5)
  recorder.close()


def test_only_sends_count_bytes_and_the_last_syncs_are_those_of_the_drain(
  tiny, tmp_path
):
  tiny.train.steps = 24
  recorder = make_recorder(tiny, tmp_path)
  norm = {"outer_grad_norm": jnp.ones(2), "outer_update_norm": jnp.ones(())}
  recorder.events([Event("send", 1, 4, 10, norm), Event("receive", 1, 6, 10, norm)])
  assert recorder.ledger == Ledger({"1": [1, 10]}, peak=10, latest=[4, 10])
  recorder.flush()
  assert [r["bytes"] for r in metrics.read(tmp_path, "send")] == [10]
  assert ["bytes" in r for r in metrics.read(tmp_path, "receive")] == [False]
  for step, shown in ((24, "sync 1 @ 24"), (25, "drain 1 @ 25")):
    recorder.events([Event("receive", 1, step, 0, norm)])
    assert recorder._last_sync == shown
  recorder.close()


def test_metrics_of_all_processes_are_joined_by_replica():
  # Process 0 has its own pairs as tuples; those of the others come as JSON.
  assert _join([[(1, 0.5), (2, 0.5)], [[0, 0.7]]]) == [0.7, 0.5, 0.5]


def test_an_outer_update_that_is_not_finite_stops_the_run(tiny, tmp_path):
  recorder = make_recorder(tiny, tmp_path)
  received = Event("receive", 0, 2, 0, {"outer_update_norm": jnp.array(jnp.nan)})
  with pytest.raises(TrainingDiverged, match="the outer update norm is nan at step 2"):
    recorder.events([received])


@pytest.mark.parametrize("name", ["loss", "gradient norm", "outer gradient norm"])
def test_a_metric_that_is_not_finite_stops_the_run(tiny, tmp_path, monkeypatch, name):
  recorder, bad = make_recorder(tiny, tmp_path), jnp.array([1, jnp.inf])
  good = InnerMetrics(*[jnp.ones(2)] * 3)
  recorder.launched(range(1, 2), [good], [])
  field = {"loss": "loss", "gradient norm": "grad_norm"}.get(name)
  sent = [] if field else [Event("send", 0, 2, 10, {"outer_grad_norm": bad})]
  second = good._replace(**{field: bad}) if field else good
  recorder.launched(range(2, 3), [second], sent)
  recorder.peers, sent = Peers(1, 2), []  # Process 0 may not hold replica 1.
  monkeypatch.setattr(remote, "put_back", sent.append)
  with pytest.raises(
    TrainingDiverged, match=f"the {name} of replica 1 is inf at step 2"
  ):
    recorder.flush()
  assert sent == [tmp_path / DIVERGED]
  assert files.read_json(tmp_path / DIVERGED) == {"step": 2, name: "inf"}


def test_the_steps_before_one_that_diverges_are_written(tiny, tmp_path):
  tiny.log.every, (good, bad) = (
    1,
    [InnerMetrics(*[jnp.array([x])] * 3) for x in (1, jnp.nan)],
  )
  recorder = make_recorder(tiny, tmp_path)
  recorder.launched(range(1, 4), [good, good, bad], [])
  with pytest.raises(TrainingDiverged, match="at step 3"):
    recorder.flush()
  assert [r["step"] for r in metrics.read(tmp_path)] == [1, 2]


def test_a_method_that_recovers_goes_on_until_the_step_that_it_says(tiny, tmp_path):
  recorder = make_recorder(tiny, tmp_path)
  recorder.recovers = lambda t: t <= 2
  bad = InnerMetrics(*[jnp.array([1, jnp.nan])] * 3)
  recorder.launched(range(1, 3), [bad, bad], [])
  recorder.flush()
  recorder.launched(range(3, 4), [bad], [])
  with pytest.raises(TrainingDiverged, match="loss of replica 1 is nan at step 3"):
    recorder.flush()
