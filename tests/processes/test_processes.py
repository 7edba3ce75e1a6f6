"""Runs of several processes on this machine, started by diloco/cli/launch_local.py."""

import json
import os
import pathlib
import re
import signal
import subprocess
import time

import numpy as np
import pytest
import running
from conftest import records, rewind
from threads import free_port

from diloco.errors import ConfigError
from diloco.log import metrics
from diloco.processes import distributed as processes

CONFIG = f"--config={running.ROOT / 'tests' / 'process_config.py'}"
SAMPLE = "--config.log.sample_tokens=2"
# These depend on fsdp: every shard sends the parameters that fsdp does not divide.
BYTES = ("bytes", "bytes_sent", "peak_bytes")
KINDS = ("step", "send", "receive")
# The last payload arrives tau = 2 steps after the last inner step.
ALL_STEPS, AFTER_42 = range(1, 63), range(43, 63)
NORMS = ("grad_norm", "grad_norm_per_replica", "update_norm")


@pytest.fixture(scope="module")
def launch():
  """A function that starts the launcher with n processes and pipes its output."""
  # Slow tests compile as users do: some ask for the same bits of other programs.
  env = running.environment(XLA_FLAGS=os.environ.get("XLA_FLAGS", ""))
  started = []

  def start(n: int, workdir: pathlib.Path, *args: str, devices: int = 1):
    command = ["-m", "diloco.cli.launch_local", f"-n{n}", f"--devices={devices}", "--"]
    command += [CONFIG, f"--workdir={workdir}", *args]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = running.start(*command, env=env, **pipes)
    started.append(process)
    return process

  yield start
  for process in started:
    stop(process)


def stop(process) -> None:
  """Kills the launcher's processes, by a second signal."""
  while process.poll() is None:
    process.terminate()
    time.sleep(0.5)


def finish(process, timeout: float = 1200) -> str:
  """Waits until the launcher succeeds, and returns its output."""
  try:
    output, _ = process.communicate(timeout=timeout)
  except subprocess.TimeoutExpired:
    stop(process)
    raise
  assert process.returncode == 0, output[-5000:]
  return output


def assert_same_training(a, b, rtol: float, steps=ALL_STEPS, kinds=KINDS, but=()):
  """Compares the records of two runs at some steps, without the fields of `but`."""
  for kind in kinds:
    ours, theirs = ([r for r in records(w, kind) if r["step"] in steps] for w in (a, b))
    assert len(ours) == len(theirs) > 0
    for x, y in zip(ours, theirs):
      assert x.keys() == y.keys()
      for name in set(x) - set(but):
        message = f"{kind} {x['step']} {name}"
        np.testing.assert_allclose(x[name], y[name], rtol, err_msg=message)


def assert_same_losses_at_the_end(a, b):
  ours, theirs = (json.loads((w / "summary.json").read_text()) for w in (a, b))
  for which, loss in theirs["eval_loss"].items():
    assert ours["eval_loss"][which] == pytest.approx(loss, rel=1e-5)
  for name in ("bytes_sent_per_replica", "peak_bytes_per_sync", "syncs"):
    assert ours[name] == theirs[name]


def await_path(process, pattern: str, workdir: pathlib.Path) -> None:
  deadline = time.time() + 900
  while time.time() < deadline and process.poll() is None:
    if list(workdir.glob(pattern)):
      return
    time.sleep(0.05)
  stop(process)
  pytest.fail(f"no {pattern}: {process.communicate()[0][-5000:]}")


def pid_of(launcher, index: int) -> int:
  """The pid of the process with this number among the launcher's children."""
  children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
  for pid in children.read_text().split():
    if f"--process_id={index}" in pathlib.Path(f"/proc/{pid}/cmdline").read_text():
      return int(pid)
  raise LookupError(index)


@pytest.fixture(scope="module")
def one(launch, tmp_path_factory):
  """Workdir of a run of one process that has the devices of two."""
  workdir = tmp_path_factory.mktemp("one")
  finish(launch(1, workdir, SAMPLE, devices=2))
  return workdir


@pytest.fixture(scope="module")
def two(launch, tmp_path_factory):
  """Workdir and output of an undisturbed run of two processes."""
  workdir = tmp_path_factory.mktemp("two")
  output = finish(launch(2, workdir, SAMPLE))
  return workdir, output


@pytest.mark.integration("runs of several processes")
def test_two_processes_train_like_one(one, two):
  workdir, _ = two
  assert_same_training(workdir, one, rtol=0)
  assert_same_losses_at_the_end(workdir, one)


@pytest.mark.integration("runs of several processes")
def test_only_process_0_writes(two):
  workdir, output = two
  steps = [r["step"] for r in map(json.loads, (workdir / "metrics.jsonl").open())]
  assert steps.count(7) == 1
  said = [line for line in output.splitlines() if line.startswith("[1]")]
  assert [line for line in said if "Gloo" not in line] == []
  for said_once in ("evaluation", "generated"):
    assert len(re.findall(said_once, output)) == 1


@pytest.mark.slow("runs that go on elsewhere")
@pytest.mark.parametrize(("n", "devices"), [(1, 4), (4, 1)])
def test_a_run_of_two_processes_goes_on_elsewhere(launch, two, tmp_path, n, devices):
  rewind(two[0], tmp_path / "run", 42)
  output = finish(launch(n, tmp_path / "run", "--config.mesh.fsdp=2", devices=devices))
  assert "Going on from the checkpoint of step 42" in output
  assert_same_training(tmp_path / "run", two[0], rtol=2e-4, steps=AFTER_42, but=BYTES)


FOUR = "--config.replicas=4"


@pytest.fixture(scope="module")
def four_in_one_process(launch, tmp_path_factory):
  """Workdirs of runs of four replicas in one process, by devices."""
  workdir = tmp_path_factory.mktemp("four")
  finish(launch(1, workdir / "4 devices", FOUR, devices=4))
  finish(launch(1, workdir / "1 device", FOUR))
  return workdir


@pytest.mark.slow("four processes")
@pytest.mark.parametrize("transport", ["device", "host"])
def test_four_processes_are_like_one(launch, four_in_one_process, tmp_path, transport):
  finish(launch(4, tmp_path, FOUR, f"--config.overlap.transport={transport}"))
  # Every device has one replica and runs the same programs: no bit may differ.
  assert_same_training(tmp_path, four_in_one_process / "4 devices", rtol=0)

  # One device with four replicas has larger arrays, and so other kernels, which round
  # the last bits differently. Nothing else differs before the first payload arrives.
  one_device = four_in_one_process / "1 device"
  early = {"steps": range(1, 6), "kinds": ("step", "send")}
  assert_same_training(tmp_path, one_device, rtol=2e-6, **early)
  # Then codes amplify the rounding: a value next to the middle of two codes may get
  # the other code. Measured: the first outer gradients differ by 5e-7 of their norm,
  # and 1 code of 157,120 differs; later at most 100 codes of a send differ. The two
  # codes differ by 2/3 of the value between them (e3m0). So the outer gradient that is
  # sent differs by about 2/3 sqrt(100 / 157,120) of its norm. Norms may differ as much,
  # losses much less.
  moved = 2 / 3 * (100 / 157_120) ** 0.5
  assert_same_training(tmp_path, one_device, rtol=moved)
  assert_same_training(tmp_path, one_device, rtol=2e-4, kinds=("step",), but=NORMS)
  assert_same_losses_at_the_end(tmp_path, one_device)


@pytest.mark.integration("starts two processes")
def test_the_same_command_goes_on_after_a_process_was_killed(launch, two, tmp_path):
  run = launch(2, tmp_path)
  await_path(run, "checkpoints/21/_CHECKPOINT_METADATA", tmp_path)
  os.kill(pid_of(run, 1), signal.SIGKILL)
  output, _ = run.communicate(timeout=600)
  # The launcher's exit code is that of the process that it sees end first.
  assert run.returncode in (1, 128 + signal.SIGKILL), output[-5000:]
  assert "[0] error: process 1 of 2 is gone. The same command goes on from" in output
  assert not (tmp_path / "summary.json").exists()
  assert "Going on from the checkpoint of step" in finish(launch(2, tmp_path))
  assert_same_training(tmp_path, two[0], rtol=0)


@pytest.mark.slow("kills processes during an exchange")
@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_killed_during_an_exchange_ends_the_others(launch, tmp_path, killed):
  args = ("--config.overlap.transport=host", "--config.train.steps=120")
  run = launch(2, tmp_path / "run", *args)
  await_path(run, "run/checkpoints/21/_CHECKPOINT_METADATA", tmp_path)
  victim = pid_of(run, killed)
  os.kill(victim, signal.SIGSTOP)
  time.sleep(6)  # The other process goes on to its next exchange, and waits there.
  os.kill(victim, signal.SIGKILL)
  output, _ = run.communicate(timeout=600)
  assert f"process {killed} ended with signal 9." in output
  # If process 0 is gone, JAX may abort the other before it says why.
  lost = f"error: process {killed} of 2 is gone. The same command goes on from"
  aborted = re.search("Terminating process|Fatal Python error: Aborted", output)
  by_jax = bool(killed == 0 and aborted)
  ends = "(code 1|signal 6)" if by_jax else "code 1"
  assert f"[{1 - killed}] {lost}" in output or by_jax, output[-5000:]
  assert re.search(f"process {1 - killed} ended with {ends}\\.", output), output[-5000:]
  assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow("stops processes, then goes on")
@pytest.mark.parametrize(
  ("target", "signum", "said"),
  [
    # Process 0 gets SIGTERM from the launcher.
    ("process 1", signal.SIGTERM, "SIGTERM"),
    ("process 1", signal.SIGINT, "SIGTERM"),
    ("launcher", signal.SIGINT, "Ctrl-C"),
  ],
)
def test_a_signal_saves_one_step_on_all(launch, two, tmp_path, target, signum, said):
  run = launch(2, tmp_path, "--config.checkpoint.every=0")
  await_path(run, "metrics.jsonl", tmp_path)
  running.wait(lambda: metrics.read(tmp_path), run)
  os.kill(run.pid if target == "launcher" else pid_of(run, 1), signum)
  output, _ = run.communicate(timeout=600)
  assert run.returncode == (130 if signum == signal.SIGINT else 0), output[-5000:]
  assert "Traceback" not in output
  [step] = re.findall(rf"{said}: saved step (\d+)", output)
  assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [step]
  finish(launch(2, tmp_path, "--config.checkpoint.every=0"))
  assert_same_training(tmp_path, two[0], rtol=0)


# A process that is suspended for 2 s before it is gone. JAX aborts a process that is
# there when process 0 is not, so process 0 must wait for it.
LATE_EXIT = """
import os, runpy, sys, time
leave = os._exit
os._exit = lambda code: (time.sleep(2), leave(code))
runpy.run_module("diloco.main", run_name="__main__", alter_sys=True)
"""


@pytest.mark.integration("starts two processes")
def test_two_commands_that_differ_end_with_the_field(tmp_path):
  flags = [CONFIG, f"--workdir={tmp_path / 'run'}", "--num_processes=2"]
  flags.append(f"--coordinator=localhost:{free_port()}")
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
  own = [
    ["-m", "diloco.main", *flags, "--process_id=0"],
    ["-c", LATE_EXIT, *flags, "--process_id=1", "--config.checkpoint.every=20"],
  ]
  both = [running.start(*words, **pipes) for words in own]
  for process in both:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output[-5000:]
    assert "process 1 differs from process 0: checkpoint.every is 20, not 21;" in output
  assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
  "given",
  [
    *[(None, 2, 0), ("localhost:1", None, 0), ("localhost:1", 2, 2)],
    *[("localhost", 2, 0), ("localhost:99999", 2, 1), ("localhost:0", 2, 0)],
  ],
)
def test_incomplete_or_wrong_flags_are_refused(given):
  flags = r"--coordinator is {}, --num_processes {} and"
  shown = flags + " --process_id {}; give host:port"
  with pytest.raises(ConfigError, match=shown.format(*given)):
    processes.initialize(*given)


def test_auto_without_a_cluster_is_refused(monkeypatch):
  for name in list(os.environ):
    if name.startswith(("SLURM_", "OMPI_", "TPU_", "JAX_COORDINATOR")):
      monkeypatch.delenv(name)
  with pytest.raises(ConfigError, match="neither Slurm, Open MPI, GKE nor Cloud TPU"):
    processes.initialize(None, None, None, auto=True)


def test_auto_finds_slurm(monkeypatch):
  slurm = "JOB_ID=7 STEP_NODELIST=node[03-04] NTASKS=1 PROCID=0 LOCALID=0"
  for setting in f"{slurm} STEP_NUM_NODES=1".split():
    name, _, value = setting.partition("=")
    monkeypatch.setenv(f"SLURM_{name}", value)
  assert processes.initialize(None, None, None, auto=True).count == 1


def test_the_launcher_that_no_test_runs_is_valid_shell():
  path = running.ROOT / "scripts/launchers/slurm_one_node.sh"
  subprocess.run(["bash", "-n", path], check=True)
