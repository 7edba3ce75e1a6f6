"""Real coordinators and sites as processes of this machine, killed and stopped."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from threads import free_port

from diloco.config import resolve
from diloco.contrib.sites import make_certificates
from diloco.contrib.sites.calendar import Calendar
from diloco.interop.load import load
from diloco.log import metrics
from diloco.util.command import load_module

ROOT = pathlib.Path(__file__).parents[3]
CONFIG = ROOT / "tests" / "process_config.py"
LONG = 900  # Seconds after which a test gives up.


@pytest.fixture(scope="module")
def env():
  """The environment of all processes, which share compiled programs."""
  return {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)]),
    "JAX_PLATFORMS": "cpu",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    # Slow tests compile as users do: some ask for the same bits of other programs.
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
  }


class Run:
  """The processes of one run: `group` is the coordinator, and 0, 1, ... the sites."""

  def __init__(
    self, folder: pathlib.Path, env: dict[str, str], sites: int, *flags: str
  ):
    self.folder, self.sites, self._env = folder, sites, env
    self._flags = (f"--config={CONFIG}", *flags)
    make_certificates.make(folder / "tls", sites)
    self._address = f"localhost:{free_port()}"
    # Of one site: more flags, and its number of devices.
    self.own: dict[str | int, tuple[str, ...]] = {}
    self.devices: dict[str | int, int] = {}
    self.processes: dict[str | int, subprocess.Popen] = {}

  def start(self, *names: str | int) -> None:
    """Starts the coordinator and all sites, or some of them, by the same commands."""
    for name in names or ("group", *range(self.sites)):
      if name == "group":
        module, tls = "diloco.coordinator", "coordinator"
        place = [f"--listen={self._address}"]
      else:
        module, tls = "diloco.main", f"site-{name}"
        place = [f"--coordinator={self._address}", f"--site={name}"]
      place += [f"--tls={self.folder / 'tls' / tls}", f"--workdir={self.workdir(name)}"]
      command = [sys.executable, "-m", module, *self._flags, *place]
      command += ["--config.overlap.transport=sites", *self.own.get(name, ())]
      flag = f"--xla_force_host_platform_device_count={self.devices.get(name, 1)}"
      env = self._env | {"XLA_FLAGS": f"{self._env['XLA_FLAGS']} {flag}"}
      with (self.folder / f"{name}.log").open("ab") as log:
        self.processes[name] = subprocess.Popen(
          command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT
        )

  def workdir(self, name: str | int) -> pathlib.Path:
    return self.folder / str(name)

  def send(self, signum: int, *names: str | int) -> None:
    for name in names:
      self.processes[name].send_signal(signum)

  def kill(self, name: str | int) -> None:
    process = self.processes.pop(name)
    process.kill()
    process.wait()

  def finish(self, *names: str | int) -> None:
    """Waits until processes have ended well."""
    for name in names or self.processes:
      try:
        status = self.processes[name].wait(LONG)
      except subprocess.TimeoutExpired:
        status = "none: it does not end"
      assert status == 0, f"{name}: status {status}\n{self.log(name)[-4000:]}"

  def log(self, name: str | int) -> str:
    return (self.folder / f"{name}.log").read_text(errors="replace")

  def lines(self) -> list[dict]:
    path = self.workdir("group") / "rounds.jsonl"
    if not path.exists():
      return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]

  def await_rounds(self, more: int) -> None:
    """Waits until so many more rounds are closed."""
    wanted, deadline = len(self.lines()) + more, time.monotonic() + LONG
    while len(self.lines()) < wanted:
      for name, process in self.processes.items():
        assert not process.poll(), f"{name}:\n{self.log(name)[-4000:]}"
      assert time.monotonic() < deadline, self.log("group")[-4000:]
      time.sleep(0.1)

  def await_member(self, site: int) -> None:
    """Waits until a round closes with a site."""
    before = len(self.lines())
    while not any(str(site) in line["tokens"] for line in self.lines()[before:]):
      self.await_rounds(1)

  def received(self, site: int) -> list[dict]:
    """Returns what a site says of the rounds that it merged, in order of time."""
    found = []
    for line in (self.workdir(site) / "metrics.jsonl").read_text().splitlines():
      if '"kind": "receive"' in line and line.endswith("}"):
        found.append(json.loads(line))
    return found

  def end(self) -> None:
    for process in self.processes.values():
      process.kill()
      process.wait()


@pytest.fixture
def make_run(tmp_path, env):
  """A function that makes runs, whose processes end with the test."""
  runs = []

  def make(sites: int, *flags: str) -> Run:
    runs.append(Run(tmp_path, env, sites, *flags))
    return runs[-1]

  yield make
  for run in runs:
    run.end()


def audit(run: Run, rounds: int, whole: tuple[int, ...]) -> None:
  """Checks the coordinator's account against those of the sites.

  Args:
    rounds: rounds of the run.
    whole: sites that were never started again, so they merged every round.
  """
  lines = run.lines()
  assert [line["round"] for line in lines] == list(range(rounds))
  members = [set(map(int, line["tokens"])) for line in lines]
  assert all(members)
  for site in range(run.sites):
    records = run.received(site)
    for record in records:
      number = round(record["round"])
      assert record["sites"] == len(members[number]), record
      assert bool(record["counted"]) == (site in members[number]), record
    if site in whole:
      # The last step's lines are written after those of the rounds in flight.
      merged = sorted(round(record["round"]) for record in records)
      assert merged == list(range(rounds))
  names = ("group", *range(run.sites))
  models = [load(run.workdir(name)) for name in names]
  for model in models[1:]:
    assert_same_bits(models[0].params, model.params)
  summary = json.loads((run.workdir("group") / "coordinator.json").read_text())
  assert summary["rounds"] == rounds
  full = sum(len(sites) == run.sites for sites in members)
  assert summary["rounds_with_all_sites"] == full
  assert summary["rounds_with_fewer_sites"] == rounds - full


def assert_same_bits(a, b) -> None:
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_two_processes_and_two_sites_compute_the_bits_of_one_process(
  make_run, tmp_path, env
):
  flags = ("--config.train.steps=24", "--config.outer.final_sync=true")
  flags += ("--config.log.sample_tokens=0",)
  # Otherwise a busy machine may be late for a round.
  run = make_run(2, *flags, "--config.sites.least_grace_s=20")
  run.start()
  run.finish()
  launch = [sys.executable, "diloco/cli/launch_local.py"]
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
  for n in (1, 2):  # Both have two devices.
    place = [f"-n{n}", f"--devices={2 // n}", "--", f"--config={CONFIG}"]
    command = [*launch, *place, f"--workdir={tmp_path / str(n)}_processes", *flags]
    found = subprocess.run(command, cwd=ROOT, env=env, text=True, **pipes, timeout=LONG)
    assert found.returncode == 0, found.stdout[-4000:]
  one, two = tmp_path / "1_processes", tmp_path / "2_processes"
  said = [line for line in found.stdout.splitlines() if line.startswith("[1]")]
  assert [line for line in said if "Gloo" not in line] == []  # Process 0 speaks.
  for kind in ("step", "send", "receive"):
    a, b = (metrics.read(workdir, kind) for workdir in (one, two))
    for record in (*a, *b):
      for clock in ("time", "tokens_per_s", "waited_s"):
        record.pop(clock, None)
    assert a == b != []
  audit(run, rounds=9, whole=(0, 1))
  assert all(len(line["tokens"]) == 2 for line in run.lines())
  models = [load(x).params for x in (run.workdir("group"), one, two)]
  assert_same_bits(models[0], models[1])
  assert_same_bits(models[1], models[2])
  want = json.loads((two / "summary.json").read_text())
  for site in range(2):
    own = json.loads((run.workdir(site) / "summary.json").read_text())
    # The same parameters, but two devices sum the losses in another order.
    assert own["eval_loss"]["outer"] == pytest.approx(want["eval_loss"]["outer"], 1e-6)
    assert own["bytes_sent_per_replica"] == want["bytes_sent_per_replica"]
    assert own["site"]["contributed"] == own["site"]["rounds"] == 9
    assert own["site"]["lost"] == own["site"]["skipped_steps"] == 0


@pytest.mark.slow("three processes")
def test_sites_of_other_devices_batches_and_speeds_train_one_model(make_run):
  flags = ("--config.train.steps=24", "--config.log.sample_tokens=0")
  run = make_run(2, *flags, "--config.sites.least_grace_s=20")
  run.devices[0], run.own[0] = 2, ("--config.mesh.fsdp=2", "--config.model.remat=full")
  run.own[1] = ("--config.sites.batch_size=2", "--config.sites.pace=0.5")
  run.start()
  run.finish()
  audit(run, rounds=8, whole=(0, 1))
  length = 16
  for line in run.lines():
    assert line["per_step"] == {"0": 4 * length, "1": 2 * length}
    # Rounds are three steps, of which site 1 trains the odd ones of the run.
    steps = {"0": 3, "1": 2 - line["round"] % 2}
    assert line["tokens"] == {k: n * line["per_step"][k] for k, n in steps.items()}


# A minute each.
STEPS, EVERY = 1500, 6
LONGER = (
  f"--config.train.steps={STEPS}",
  f"--config.sync_every={EVERY}",
  "--config.fragments.pattern=strided",
  "--config.checkpoint.every=80",
  "--config.log.every=20",
  "--config.replicas=3",
  "--config.train.batch_size=6",
  "--config.sites.grace_s=2",
)


def rounds_of(run: Run) -> int:
  """Counts the rounds of the long run."""
  c = load_module(str(CONFIG), "get_config", "").get_config()
  c.overlap.transport, c.train.steps, c.sync_every = "sites", STEPS, EVERY
  c.fragments.pattern, c.replicas, c.train.batch_size = "strided", run.sites, 6
  return len(Calendar(resolve(c)).rounds)


@pytest.mark.slow("kills processes for a minute")
def test_a_site_is_killed_and_comes_back_with_and_without_its_checkpoint(make_run):
  run = make_run(3, *LONGER)
  run.start()
  run.await_rounds(50)  # With a checkpoint.
  run.kill(1)
  run.await_rounds(3)
  run.start(1)
  run.await_member(1)
  run.kill(2)
  run.await_rounds(3)
  shutil.move(run.workdir(2), run.folder / "lost")
  run.start(2)
  run.finish()
  audit(run, rounds_of(run), whole=(0,))
  # The second may come back after the last round; the audit needs its bits only.
  for site in ("1", "2"):
    assert any(site not in line["tokens"] for line in run.lines())


@pytest.mark.slow("kills processes for a minute")
def test_the_coordinator_is_killed_twice_and_goes_on(make_run):
  run = make_run(3, *LONGER)
  run.start()
  for _ in range(2):
    run.await_rounds(30)
    run.kill("group")
    time.sleep(3)
    run.start("group")
  run.finish()
  audit(run, rounds_of(run), whole=(0, 1, 2))
  # Nobody was missing: the sites sent the open rounds again.
  assert all(len(line["tokens"]) == 3 for line in run.lines())


@pytest.mark.slow("stops processes for a minute")
def test_a_site_that_hangs_and_goes_on_delays_the_others_once(make_run):
  run = make_run(3, *LONGER)
  run.start()
  run.await_rounds(20)
  run.send(signal.SIGSTOP, 1)
  run.await_rounds(10)
  run.send(signal.SIGCONT, 1)
  run.await_rounds(20)
  run.send(signal.SIGSTOP, 1)
  time.sleep(25)  # Longer than the coordinator waits for a sign of life.
  run.send(signal.SIGCONT, 1)
  run.finish()
  audit(run, rounds_of(run), whole=(0, 2))
  lines = run.lines()
  assert any("1" not in line["tokens"] for line in lines)
  assert 1 <= sum(1 in line["late"] for line in lines) <= 4
  assert max(line["waited_s"] for line in lines) < 2.5


@pytest.mark.slow("stops processes for a minute")
def test_all_are_stopped_and_go_on_by_the_same_commands(make_run):
  run = make_run(3, *LONGER)
  names = ("group", 0, 1, 2)
  run.start()
  run.await_rounds(30)
  run.send(signal.SIGTERM, 0, 1, 2)
  run.finish(0, 1, 2)
  run.send(signal.SIGTERM, "group")
  run.finish("group")
  before = run.lines()
  run.start()
  run.await_rounds(30)
  run.send(signal.SIGTERM, *names)
  run.finish()
  run.start(0, 1, 2, "group")
  run.finish()
  audit(run, rounds_of(run), whole=())
  assert run.lines()[: len(before)] == before
