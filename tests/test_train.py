"""Whole runs: resumption bit for bit, signals, divergence, checkpoints, algorithms."""

import gc
import json
import os
import shutil
import signal
import subprocess

import jax
import numpy as np
import pytest
import running
import tiny_config
from conftest import assert_same_end, first_of, rewind

from diloco import train
from diloco.algorithm.method import Method
from diloco.checkpoint import checkpoints as checkpoint
from diloco.checkpoint import damage
from diloco.errors import ConfigError
from diloco.interop import load
from diloco.log import metrics
from diloco.log.log import Log, TrainingDiverged
from diloco.processes.distributed import lock_workdir
from diloco.processes.peers import Peers
from diloco.session import Hook


def losses(workdir):
  return {r["step"]: r["loss_per_replica"] for r in metrics.read(workdir)}


def contents(folder):
  return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """A run of the tiny config that was never stopped."""
  workdir = tmp_path_factory.mktemp("finished")
  train.train(tiny_config.get_config(), workdir)
  return workdir


@pytest.fixture
def go_on(capsys):
  """A function that starts a run in this process; gives what it says."""

  def start_again(workdir, **fields):
    c = tiny_config.get_config()
    c.update_from_flattened_dict(fields)
    capsys.readouterr()
    train.train(c, workdir)
    return capsys.readouterr().err

  return start_again


def start(workdir, *args, **more):
  config = f"--config={running.ROOT / 'tests' / 'tiny_config.py'}"
  words = ["-m", "diloco.main", config, f"--workdir={workdir}", *args]
  return running.start(*words, **more)


def test_the_summary_describes_the_run(finished):
  s = json.loads((finished / "summary.json").read_text())
  assert (s["algorithm"], s["replicas"], s["steps"]) == ("streaming", 2, 12)
  assert s["tokens"] == 12 * 4 * 16
  assert set(s["eval_loss"]) == {"outer", "mean", "first"}
  assert all(4 < v < 9 for v in s["eval_loss"].values())
  sends, receives = metrics.read(finished, "send"), metrics.read(finished, "receive")
  assert s["bytes_sent_per_replica"] == sum(r["bytes"] for r in sends)
  assert s["syncs"] == len(sends) == len(receives)
  assert s["peak_bytes_per_sync"] == max(r["bytes"] for r in sends)
  expected = 2 * s["params"] * 12  # Ring all-reduce of 16 bits, M = 2.
  ratio = expected / s["bytes_sent_per_replica"]
  assert s["bytes_ratio_to_data_parallel"] == pytest.approx(ratio)
  for r in sends:
    assert 0 < r["quantization_error"][0] < 0.5
  assert all(-1 <= r["outer_grad_cosine"] <= 1 for r in receives)
  for name in ("metrics.jsonl", "checkpoints"):
    assert (finished / name).exists()


def test_killed_and_resumed_is_bit_for_bit_the_same(finished, tmp_path, go_on):
  # In flight at the checkpoint of step 5: fragments sent at 4 (tau = 2: not yet
  # received), so the payloads come from the checkpoint.
  process = start(tmp_path)
  running.wait((tmp_path / "checkpoints/5/_CHECKPOINT_METADATA").exists, process)
  process.send_signal(signal.SIGKILL)
  process.wait()
  assert "Going on from the checkpoint of step 5" in go_on(tmp_path)
  assert losses(tmp_path) == losses(finished)
  assert_same_end(tmp_path, finished)
  a, b = (json.loads((w / "summary.json").read_text()) for w in (tmp_path, finished))
  for field in ("eval_loss", "bytes_sent_per_replica", "peak_bytes_per_sync"):
    assert a[field] == b[field]


@pytest.mark.parametrize(
  ("signum", "status"),
  first_of("starts and stops processes", ("SIGTERM", 0), ("SIGINT", 130)),
)
def test_a_signal_saves_and_the_run_goes_on(finished, tmp_path, go_on, signum, status):
  process = start(tmp_path, "--config.checkpoint.every=0", stderr=subprocess.PIPE)
  lines = tmp_path / "metrics.jsonl"
  running.wait(lambda: lines.exists() and metrics.read(tmp_path), process)
  process.send_signal(getattr(signal, signum))
  _, stderr = process.communicate(timeout=120)
  assert process.returncode == status, stderr
  name = {"SIGINT": "Ctrl-C"}.get(signum, signum)
  # A line of its own, after that of the progress bar.
  assert any(line.startswith(f"{name}: saved step") for line in stderr.splitlines())
  assert "Traceback" not in stderr
  assert not (tmp_path / "summary.json").exists()
  assert "Going on" in go_on(tmp_path, **{"checkpoint.every": 0})
  assert losses(tmp_path) == losses(finished)


@pytest.mark.integration("starts processes and stops them")
def test_an_interrupt_before_the_first_step_is_one_line(tmp_path):
  process = start(tmp_path, stderr=subprocess.PIPE)
  running.wait((tmp_path / ".lock").exists, process)
  process.send_signal(signal.SIGINT)
  _, stderr = process.communicate(timeout=120)
  assert process.returncode == 130
  assert "error: interrupted; the same command goes on" in stderr
  assert "Traceback" not in stderr


def test_a_second_run_in_the_same_workdir_is_refused(tiny, tmp_path):
  for _ in range(2):  # Whoever ends keeps no lock.
    with lock_workdir(tmp_path, Peers()):
      holder = f"where process {os.getpid()} on .* is training; wait for its end"
      with pytest.raises(ConfigError, match=holder):
        train.train(tiny, tmp_path)


def test_a_finished_run_is_not_trained_again(finished, tmp_path, go_on):
  shutil.copytree(finished, tmp_path / "copy")
  before = (finished / "summary.json").read_text()
  stderr = go_on(tmp_path / "copy", **{"eval.tokens": 100})
  assert "This run finished before, at step 12; nothing was trained." in stderr
  assert "eval.* differs: use `python -m diloco evaluate`" in stderr
  of_result, now = (w / "config.json" for w in (finished, tmp_path / "copy"))
  assert now.read_text() == of_result.read_text()
  assert "Going on" not in stderr
  assert (tmp_path / "copy" / "summary.json").read_text() == before
  assert losses(tmp_path / "copy") == losses(finished)
  # Cut short between the last checkpoint and the summary, or damaged.
  (tmp_path / "copy" / "summary.json").write_bytes(b"\xff{garbage")
  assert "at step 12; its result is computed again." in go_on(tmp_path / "copy")
  after, before = (
    json.loads((w / "summary.json").read_text()) for w in (tmp_path / "copy", finished)
  )
  for field in ("eval_loss", "bytes_sent_per_replica", "syncs", "tokens_per_s"):
    assert after[field] == before[field]


@pytest.mark.slow("starts a process")
def test_a_full_disk_costs_nothing_but_time(finished, tmp_path, go_on, monkeypatch):
  workdir = tmp_path / "copy"
  rewind(finished, workdir, 10)
  before = contents(workdir / "checkpoints")
  # Files end at 0.1 or 0.2 MB, as on a disk that others fill while the run saves. The
  # embedding alone has 0.26 MB. The store decides how much else it puts into a file.
  monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1000")
  limit = ["sh", "-c", 'ulimit -f 200; exec "$@"', "sh"]
  process = start(workdir, stderr=subprocess.PIPE, before=limit)
  _, stderr = process.communicate(timeout=300)
  assert process.returncode == 2
  assert "Traceback" not in stderr
  sentence = (
    f"error: --workdir is {workdir}, where the checkpoint of step 12 cannot be written"
    " (File too large); mend this, then the"
  )
  assert stderr.splitlines()[-1].startswith(sentence)
  assert stderr.endswith(" same command goes on from the checkpoint of step 10.\n")
  assert stderr.count("rror") == 1
  assert contents(workdir / "checkpoints") == before
  assert "Going on from the checkpoint of step 10" in go_on(workdir)
  assert losses(workdir) == losses(finished)
  assert_same_end(workdir, finished)


@pytest.mark.integration("whole runs")
@pytest.mark.parametrize(
  "field", [{"overlap.transport": "host"}, {"outer.offload": True}]
)
def test_a_run_resumes_with_its_outer_state_moved(finished, tmp_path, go_on, field):
  workdir = tmp_path / "copy"
  rewind(finished, workdir, 10)
  assert "Going on from the checkpoint of step 10" in go_on(workdir, **field)
  assert losses(workdir) == losses(finished)
  assert_same_end(workdir, finished)
  models = (load.load(w).params for w in (workdir, finished))
  jax.tree.map(np.testing.assert_array_equal, *models)


def test_divergence_stops_with_step_replica_and_last_checkpoint(tiny, tmp_path, capsys):
  tiny.inner.learning_rate, tiny.inner.clip_norm = 1e30, 0.0
  tiny.inner.warmup_steps = 0
  tiny.checkpoint.every = 1
  with pytest.raises(TrainingDiverged) as error:
    train.train(tiny, tmp_path)
  assert "replica 0 is nan at step" in str(error.value)
  assert "last good checkpoint: step " in str(error.value)
  # The same command goes on with a lower rate. These parameters diverge with any.
  tiny.inner.learning_rate = 1e29
  with pytest.raises(TrainingDiverged):
    train.train(tiny, tmp_path)
  said = "The run diverged; it goes on with inner.learning_rate: 1e+30 -> 1e+29."
  assert said in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["data_parallel", "diloco"])
def test_the_baselines_run_from_the_same_config(
  finished, tiny, tmp_path, algorithm, capsys
):
  tiny.algorithm, tiny.outer.final_sync, tiny.log.sample_tokens = algorithm, True, 4
  summary = train.train(tiny, tmp_path)
  assert "generated " in capsys.readouterr().out
  sends = metrics.read(tmp_path, "send")
  # All algorithms see the same tokens, so before anything was learned losses agree.
  first, streaming = (metrics.read(d)[0]["loss"] for d in (tmp_path, finished))
  assert first == pytest.approx(streaming, rel=0 if algorithm == "diloco" else 1e-6)
  if algorithm == "data_parallel":
    # These gradients are float32; the reference counts 16 bits.
    assert summary["bytes_ratio_to_data_parallel"] == 0.5
    assert sends == []
    assert len(set(summary["eval_loss"].values())) == 1
    assert len(metrics.read(tmp_path)[0]["loss_per_replica"]) == 1
  else:
    assert [r["step"] for r in sends] == [4, 8, 12, 13]  # The last is final_sync's.
    assert sends[0]["bytes"] == 4 * summary["params"]
    assert summary["bytes_sent_per_replica"] == sum(r["bytes"] for r in sends)
    assert summary["syncs"] == len(sends)


@pytest.mark.integration("whole runs")
def test_a_run_goes_on_from_the_checkpoint_that_is_left(tiny, tmp_path, monkeypatch):
  tiny.train.steps, tiny.checkpoint.every, tiny.overlap.tau = 8, 5, 2
  first = train.train(tiny, tmp_path)
  shutil.rmtree(tmp_path / "checkpoints" / "8")
  read, nbytes = damage.read_arrays, []
  gc.collect()
  old = {id(x): x for x in jax.live_arrays()}  # Kept, so that no id is given again.

  def spy(workdir, step, like):
    gc.collect()
    nbytes.append(sum(x.nbytes for x in jax.live_arrays() if id(x) not in old))
    nbytes.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(like)))
    return read(workdir, step, like)

  monkeypatch.setattr(damage, "read_arrays", spy)
  again = train.train(tiny, tmp_path)
  # No second copy of the state is held while the saved one is read.
  [alive, state_bytes] = nbytes
  assert alive < state_bytes / 100
  assert again["eval_loss"] == first["eval_loss"]
  assert again["bytes_sent_per_replica"] == first["bytes_sent_per_replica"]
  # Each process counts all but its first step: 2 to 5, then 7 and 8.
  for step, steps in ((5, 4), (8, 6)):
    path = tmp_path / "checkpoints" / str(step) / "record" / "metadata"
    assert json.loads(path.read_text())["spent"]["steps"] == steps


def test_what_train_opened_is_closed_when_it_raises(tiny, tmp_path, monkeypatch):
  closed = []

  def note(cls):
    close = cls.close
    monkeypatch.setattr(cls, "close", lambda *to: closed.append(cls) or close(*to))

  opened = (checkpoint.Checkpoints, Log, Method)
  for cls in opened:
    note(cls)

  def handler(signum, frame):
    pass

  def fail(*args):
    raise RuntimeError("out of memory")

  monkeypatch.setattr(Method, "outer", fail)
  before = signal.signal(signal.SIGTERM, handler)
  try:
    with pytest.raises(RuntimeError, match="out of memory"):
      train.train(tiny, tmp_path)
    assert signal.getsignal(signal.SIGTERM) is handler
  finally:
    signal.signal(signal.SIGTERM, before)
  assert sorted(closed, key=opened.index) == list(opened)


def test_jax_processes_unknown_to_the_peers_are_refused(tiny, tmp_path, monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(ConfigError, match=r"JAX's are 2; join them by"):
    train.train(tiny, tmp_path)
  assert not list(tmp_path.iterdir())


NOISY = "noisy_sgd(eta=0.01, gamma=0.5, key=0)"


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"outer.optimizer": "bogus"}, "outer.optimizer is 'bogus', but optax has no"),
    ({"inner.optimizer": "momo"}, "inner.optimizer cannot step these"),
    ({"inner.optimizer": "rprop"}, "inner.optimizer cannot step these"),
    ({"inner.optimizer": NOISY}, "inner.optimizer keeps a PRNG key"),
    ({"outer.optimizer": NOISY}, "outer.optimizer keeps a PRNG key in its state"),
  ],
)
def test_a_mistake_in_an_optimizer_is_found_at_once(tiny, tmp_path, fields, message):
  tiny.update_from_flattened_dict({"inner.weight_decay": 0.0, **fields})
  with pytest.raises(ConfigError, match=message):
    train.train(tiny, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_a_hook_is_called_periodically_and_changes_no_bit(finished, tmp_path):
  periodic, always = list[int](), list[range]()
  hooks = [
    Hook(call=lambda steps, t, *_: periodic.append(t), every=5),
    Hook(call=lambda steps, t, *_: always.append(steps)),
  ]
  train.train(tiny_config.get_config(), tmp_path, hooks=hooks)
  assert periodic == [5, 10]
  assert [t for steps in always for t in steps] == list(range(1, 13))
  assert_same_end(tmp_path, finished)
