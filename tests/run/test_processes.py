"""Runs of several processes on this machine, by scripts/launch_local.py."""

import json
import os
import pathlib
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from diloco.config import ConfigError
from diloco.run import metrics
from diloco.run import processes as distributed

ROOT = pathlib.Path(__file__).parents[2]
# Compiled once for all tests, and not optimised: the programs are tiny.
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# Every shard of a replica sends the leaves that are not sharded.
BYTES = ("bytes", "bytes_sent")


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
  """start(n, workdir, *args, devices) -> Popen of the launcher, output in a pipe."""
  env = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)]),
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": FLAGS,
  }
  started = []

  def start(n: int, workdir: pathlib.Path, *args: str, devices: int = 1):
    command = [
      *(sys.executable, str(ROOT / "scripts" / "launch_local.py")),
      *(f"-n{n}", f"--devices={devices}", "--"),
      *(f"--config={ROOT / 'tests' / 'process_config.py'}", f"--workdir={workdir}"),
      *args,
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes)
    started.append(process)
    return process

  yield start
  for process in started:
    stop(process)


def stop(process) -> None:
  """Kills the launcher's processes: the second signal does."""
  while process.poll() is None:
    process.terminate()
    time.sleep(0.5)


def finish(process, timeout: float = 1200) -> str:
  """Waits for success; the output."""
  try:
    output, _ = process.communicate(timeout=timeout)
  except subprocess.TimeoutExpired:
    stop(process)
    raise
  assert process.returncode == 0, output[-5000:]
  return output


def records(workdir, kind):
  """All records of a kind that two runs should share."""
  left_out = ("kind", "time", "tokens_per_s", "waited_s")
  return [
    {k: v for k, v in r.items() if k not in left_out}
    for r in metrics.read(workdir, kind)
  ]


def assert_same_training(a, b, rtol: float, first: int = 0, but=()):
  for kind in ("step", "send", "receive"):
    ours, theirs = ([r for r in records(w, kind) if r["step"] > first] for w in (a, b))
    assert len(ours) == len(theirs) > 0
    for x, y in zip(ours, theirs):
      assert x.keys() == y.keys()
      for name in set(x) - set(but):
        np.testing.assert_allclose(x[name], y[name], rtol, err_msg=f"{kind} {name}")


def rewind(workdir, to):
  """A copy of a run that was stopped after its checkpoint of step 42."""
  shutil.copytree(workdir, to)
  shutil.rmtree(to / "checkpoints" / "60")
  (to / "metrics.jsonl").unlink()
  (to / "summary.json").unlink()


def await_path(process, pattern: str, workdir: pathlib.Path) -> None:
  deadline = time.time() + 900
  while time.time() < deadline and process.poll() is None:
    if list(workdir.glob(pattern)):
      return
    time.sleep(0.05)
  stop(process)
  pytest.fail(f"no {pattern}: {process.communicate()[0][-5000:]}")


def pid_of(launcher, index: int) -> int:
  """The process with an id among the launcher's children."""
  children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
  for pid in children.read_text().split():
    if f"--process_id={index}" in pathlib.Path(f"/proc/{pid}/cmdline").read_text():
      return int(pid)
  raise LookupError(index)


@pytest.fixture(scope="module")
def one(launch, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("one")
  finish(launch(1, workdir))
  return workdir


@pytest.fixture(scope="module")
def two(launch, tmp_path_factory):
  """Workdir and output of a run of two processes that nothing disturbed."""
  workdir = tmp_path_factory.mktemp("two")
  output = finish(launch(2, workdir))
  return workdir, output


def test_two_processes_train_like_one(one, two):
  workdir, _ = two
  assert_same_training(workdir, one, rtol=2e-5)
  ours, theirs = (json.loads((w / "summary.json").read_text()) for w in (workdir, one))
  for which, loss in theirs["eval_loss"].items():
    assert ours["eval_loss"][which] == pytest.approx(loss, rel=1e-5)
  for name in ("bytes_sent_per_replica", "peak_bytes_per_sync", "syncs"):
    assert ours[name] == theirs[name]


def test_only_process_0_writes(two):
  workdir, output = two
  steps = [r["step"] for r in map(json.loads, (workdir / "metrics.jsonl").open())]
  assert steps.count(7) == 1
  said = [line for line in output.splitlines() if line.startswith("[1]")]
  assert [line for line in said if "Gloo" not in line] == []
  assert len(re.findall("evaluation", output)) == 1


def test_a_run_of_two_processes_goes_on_in_one_on_four_devices(launch, two, tmp_path):
  rewind(two[0], tmp_path / "run")
  output = finish(launch(1, tmp_path / "run", "--config.mesh.fsdp=2", devices=4))
  assert "Going on from the checkpoint of step 42" in output
  assert_same_training(tmp_path / "run", two[0], rtol=2e-4, first=42, but=BYTES)


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_in_four(launch, two, tmp_path):
  rewind(two[0], tmp_path / "run")
  finish(launch(4, tmp_path / "run", "--config.mesh.fsdp=2"))
  assert_same_training(tmp_path / "run", two[0], rtol=2e-4, first=42, but=BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["device", "host"])
def test_four_replicas_on_one_and_four_processes(launch, tmp_path, transport):
  args = ("--config.replicas=4", f"--config.overlap.transport={transport}")
  finish(launch(1, tmp_path / "one", *args))
  finish(launch(4, tmp_path / "four", *args))
  # Four replicas in one program and one in each of four are not the same kernels.
  assert_same_training(tmp_path / "four", tmp_path / "one", rtol=2e-4)


LATE = """
import sys, time
import conftest, jax, numpy as np
from diloco.algorithm.plan import make_plan
from diloco.config import resolve
from diloco.model import sharding
from diloco.run import processes
from diloco.run.mesh import make_mesh
from diloco.wire.exchange import encoded

i = int(sys.argv[1])
peers = processes.initialize(sys.argv[2], 2, i)
c = conftest.tiny_config()
c.overlap.transport = "host"
c = resolve(c)
mesh = make_mesh(c)
with jax.set_mesh(mesh):
  transport = make_plan(c, mesh).transport
  transport.connect()
  time.sleep(35 * i)
  own = np.full((2, 1, 8), i, np.uint8)
  found = transport.carry(sharding.place(own, encoded(mesh)))
  print(np.asarray(found.addressable_data(0))[:, 0, 0].tolist(), flush=True)
peers.close()
"""


@pytest.mark.slow
def test_a_peer_may_come_late_to_the_first_exchange():
  # Gloo waits for half a minute at most to be connected.
  env = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
  address = f"localhost:{free_port()}"
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", LATE, str(i), address],
      **{"env": env, "text": True, "stdout": subprocess.PIPE},
    )
    for i in range(2)
  ]
  try:
    found = [p.communicate(timeout=300)[0] for p in processes]
  finally:
    for p in processes:
      p.kill()
  assert all(output.endswith("[0, 1]\n") for output in found), found


@pytest.mark.slow
def test_data_parallel_on_two_processes(launch, tmp_path):
  args = ("--config.algorithm=data_parallel", "--config.train.steps=10")
  for n in (1, 2):
    finish(launch(n, tmp_path / str(n), *args))
  ours, theirs = (
    [r["loss"] for r in records(tmp_path / n, "step")] for n in ("1", "2")
  )
  np.testing.assert_allclose(ours, theirs, rtol=2e-5)


def test_after_a_killed_peer_the_same_command_goes_on(launch, two, tmp_path):
  run = launch(2, tmp_path)
  await_path(run, "checkpoints/21/_CHECKPOINT_METADATA", tmp_path)
  os.kill(pid_of(run, 1), signal.SIGKILL)
  output, _ = run.communicate(timeout=600)
  # The launcher's code is that of the process whose end it sees first.
  assert run.returncode in (1, 128 + signal.SIGKILL), output[-5000:]
  assert "[0] error: process 1 of 2 is gone. The same command goes on from" in output
  assert not (tmp_path / "summary.json").exists()
  assert "Going on from the checkpoint of step" in finish(launch(2, tmp_path))
  assert_same_training(tmp_path, two[0], rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_peer_killed_in_mid_exchange(launch, tmp_path, killed):
  args = ("--config.overlap.transport=host", "--config.train.steps=120")
  run = launch(2, tmp_path / "run", *args)
  await_path(run, "run/checkpoints/21/_CHECKPOINT_METADATA", tmp_path)
  victim = pid_of(run, killed)
  os.kill(victim, signal.SIGSTOP)
  time.sleep(6)  # The other goes on to its next exchange, and waits there.
  os.kill(victim, signal.SIGKILL)
  output, _ = run.communicate(timeout=600)
  assert f"process {killed} ended with signal 9." in output
  # Without process 0 JAX may end the other before it has spoken, by SIGABRT.
  lost = f"error: process {killed} of 2 is gone. The same command goes on from"
  by_jax = killed == 0 and "Terminating process" in output
  ends = "(code 1|signal 6)" if by_jax else "code 1"
  assert f"[{1 - killed}] {lost}" in output or by_jax, output[-5000:]
  assert re.search(f"process {1 - killed} ended with {ends}\\.", output), output[-5000:]
  assert not (tmp_path / "run" / "summary.json").exists()
  if killed == 1:
    output = finish(launch(2, tmp_path / "run", *args))
    assert "Going on from the checkpoint of step" in output
    finish(launch(2, tmp_path / "undisturbed", *args))
    again, once = (
      json.loads((tmp_path / name / "summary.json").read_text())
      for name in ("run", "undisturbed")
    )
    assert again["eval_loss"] == once["eval_loss"]
    assert_same_training(tmp_path / "run", tmp_path / "undisturbed", rtol=0)


@pytest.mark.slow
def test_sigterm_to_one_process_saves_the_same_step_on_all(launch, two, tmp_path):
  run = launch(2, tmp_path, "--config.checkpoint.every=0")
  await_path(run, "metrics.jsonl", tmp_path)
  os.kill(pid_of(run, 1), signal.SIGTERM)
  output = finish(run)
  [step] = re.findall(r"SIGTERM: saved step (\d+)", output)
  assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [step]
  finish(launch(2, tmp_path, "--config.checkpoint.every=0"))
  assert_same_training(tmp_path, two[0], rtol=0)


def test_the_launcher_ends_all_when_one_cannot_start(launch, tmp_path):
  run = launch(2, tmp_path, "--config.train.batch_size=3")
  output, _ = run.communicate(timeout=600)
  assert run.returncode == 2
  assert "error: train.batch_size is 3" in output


def free_port() -> int:
  with socket.socket() as s:
    s.bind(("", 0))
    return s.getsockname()[1]


def meet(indices, count, timeout=20):
  """What every process gets from `distributed.meet`, or its error."""
  port, found = free_port(), {}

  def come(i):
    try:
      found[i] = distributed.meet("localhost", port, count, i, timeout)
    except distributed.ProcessLost as error:
      found[i] = error

  threads = [threading.Thread(target=come, args=(i,)) for i in indices]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(timeout + 30)
  return found, port


def test_missing_processes_are_named_to_all_that_came():
  found, port = meet([0, 2], count=5, timeout=1)
  message = f"processes 1, 3, 4 of 5 did not come to localhost:{port} within 1 s"
  assert message in str(found[0])
  assert str(found[2]) == str(found[0])


def test_a_missing_process_0_is_told_with_its_address():
  found, port = meet([1], count=2, timeout=1)
  assert f"process 1 of 2 found no process 0 at localhost:{port}" in str(found[1])


def test_a_process_id_given_twice():
  port, errors = free_port(), []

  def come(i):
    try:
      distributed.meet("localhost", port, 3, i, 20)
    except distributed.ProcessLost as error:
      errors.append(str(error))

  threads = [threading.Thread(target=come, args=(i,)) for i in (0, 1, 1)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(30)
  assert len(errors) == 3
  assert all("as number 1 of 3" in e and "own --process_id" in e for e in errors)


def come_and_go(port, index, count):
  """A process that dies while it waits for the others."""
  deadline = time.monotonic() + 20
  while True:
    try:
      s = socket.create_connection(("localhost", port))
      break
    except OSError:
      assert time.monotonic() < deadline
      time.sleep(0.05)
  with s:
    s.sendall(json.dumps([index, count]).encode() + b"\n")


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_process_may_die_and_come_again_while_the_others_wait(order):
  port, found = free_port(), {}
  come = lambda i: found.update({i: distributed.meet("localhost", port, 3, i, 20)})
  threads = [threading.Thread(target=come, args=(i,)) for i in (0, *order)]
  threads[0].start()
  come_and_go(port, 1, 3)
  for thread in threads[1:]:
    thread.start()
    time.sleep(0.3)
  for thread in threads:
    thread.join(30)
  peers = [distributed.Peers(i, 3, found[i]) for i in range(3)]
  assert together(peers, lambda p: p.all_gather(p.index))[0] == [0, 1, 2]
  together(peers, lambda p: p.close())


def test_a_process_that_dies_while_it_waits_is_not_taken_for_there():
  port = free_port()
  dying = threading.Thread(target=come_and_go, args=(port, 1, 3))
  dying.start()
  with pytest.raises(distributed.ProcessLost, match="process 1 came and went again"):
    distributed.meet("localhost", port, 3, 0, 3)  # Process 2 never comes.
  dying.join()


def initialize_with(monkeypatch, starts_jax) -> tuple[queue.SimpleQueue, list]:
  """Process 0 of 2 after both met; codes it ends with, and process 1's sockets."""
  codes, sockets = queue.SimpleQueue(), []
  monkeypatch.setattr(os, "_exit", codes.put)
  monkeypatch.setattr(distributed, "_GRACE", 0.0)
  monkeypatch.setattr(type(jax.config), "update", lambda *args: None)
  monkeypatch.setattr(
    jax.distributed, "initialize", lambda *args, **kwargs: starts_jax(codes, sockets)
  )
  port = free_port()
  other = threading.Thread(
    target=lambda: sockets.append(distributed.meet("localhost", port, 2, 1, 20)[0])
  )
  other.start()
  distributed.initialize(f"localhost:{port}", 2, 0, remedy="Start again.")
  other.join()
  return codes, sockets


def test_a_process_that_dies_while_jax_starts_is_named(monkeypatch, capfd):
  ended = []

  def starts_jax(codes, sockets):
    while not sockets:
      time.sleep(0.01)
    sockets[0].close()
    ended.append(codes.get(timeout=10))  # JAX itself would wait here.

  initialize_with(monkeypatch, starts_jax)
  assert ended == [1]
  assert "error: process 1 of 2 is gone. Start again." in capfd.readouterr().err


def test_all_are_told_that_jax_does_not_start(monkeypatch, capfd):
  def starts_jax(codes, sockets):
    raise RuntimeError("UNKNOWN: address already in use\nand more")

  codes, sockets = initialize_with(monkeypatch, starts_jax)
  message = r"process 0 of 2 met .* JAX did not join them \(UNKNOWN: address .* use\);"
  assert codes.get(timeout=10) == 1
  assert re.search(f"error: {message}", capfd.readouterr().err)
  kind, told = json.loads(sockets[0].makefile().readline())
  assert kind == "failed"
  assert re.match(message, told)


def together(peers, what):
  """Calls what(peer) for all at once: {index: result}."""
  found = {}
  call = lambda p: found.update({p.index: what(p)})
  threads = [threading.Thread(target=call, args=(p,)) for p in peers]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(30)
  return found


def test_peers_gather_and_report_in_order():
  found, _ = meet([0, 1, 2], count=3)
  peers = [distributed.Peers(i, 3, found[i]) for i in range(3)]
  gathered = together(peers, lambda p: p.all_gather(p.index))
  assert gathered == {i: [0, 1, 2] for i in range(3)}
  for p in peers:
    for t in range(2):
      p.report([t, p.index])
  assert list(peers[0].reports(wait=True)) == [
    [[0, 0], [0, 1], [0, 2]],
    [[1, 0], [1, 1], [1, 2]],
  ]
  assert list(peers[1].reports(wait=True)) == []
  together(peers, lambda p: p.close())


def test_a_peer_that_is_gone_before_all_are_listened_to_ends_the_process(monkeypatch):
  codes, start = queue.SimpleQueue(), threading.Thread.start
  monkeypatch.setattr(os, "_exit", codes.put)
  monkeypatch.setattr(threading.Thread, "start", lambda t: (start(t), time.sleep(0.2)))
  pairs = [socket.socketpair() for _ in range(2)]
  pairs[0][1].close()
  distributed.Peers(0, 3, {1: pairs[0][0], 2: pairs[1][0]})
  assert codes.get(timeout=10) == 1


def test_one_process_alone_needs_nobody():
  alone = distributed.Peers()
  assert alone.all_gather("x") == ["x"]
  alone.report(1)
  assert list(alone.reports()) == [[1]]
  alone.close()


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ((None, 2, 0), "give all three"),
    (("localhost:1", 2, 2), "number the processes from 0 to 1"),
    (("localhost", 2, 0), "write host:port"),
  ],
)
def test_incomplete_flags(given, message):
  with pytest.raises(ConfigError, match=message):
    distributed.initialize(*given)


def test_auto_without_a_cluster(monkeypatch):
  for name in list(os.environ):
    if name.startswith(("SLURM_", "OMPI_", "TPU_", "JAX_COORDINATOR")):
      monkeypatch.delenv(name)
  with pytest.raises(ConfigError, match="neither Slurm, Open MPI, GKE nor Cloud TPU"):
    distributed.initialize(None, None, None, auto=True)


def test_auto_finds_slurm(monkeypatch):
  for name, value in {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "1",
  }.items():
    monkeypatch.setenv(name, value)
  assert distributed.initialize(None, None, None, auto=True).count == 1


@pytest.mark.parametrize("script", ["slurm.sh", "tpu_multislice.sh"])
def test_scripts_are_valid_shell(script):
  subprocess.run(["bash", "-n", ROOT / "scripts" / script], check=True)
