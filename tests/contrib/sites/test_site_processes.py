"""Sites as processes of this machine that share a folder: killed, stopped, unequal."""

import json
import os
import pathlib
import signal
import subprocess
import time

import jax
import numpy as np
import pytest
import running
from fault_audit import closed_rounds

from diloco.contrib.sites.group.records import unpack
from diloco.interop.load import load

LONG = 900  # Seconds after which a test gives up.
# Otherwise a busy machine may be late for a round.
IN_TIME = {"sites.least_grace_s": 20}


class Run:
  """The sites of one run, which share the folder `group`."""

  def __init__(self, folder: pathlib.Path, fields: dict):
    self.folder, self.group = folder, folder / "group"
    self._flags = [f"--config={running.ROOT / 'tests' / 'process_config.py'}"]
    self._flags += [f"--config.{name}={value}" for name, value in fields.items()]
    self.processes: dict[int, subprocess.Popen] = {}

  def start(self, *sites: int, devices: int = 1, flags: tuple[str, ...] = ()) -> None:
    for site in sites:
      place = (f"--group={self.group}", f"--site={site}")
      own = ("--config.overlap.transport=sites", *flags)
      self.processes[site] = self.run(site, *place, *own, devices=devices)

  def run(self, name: int | str, *place: str, devices: int) -> subprocess.Popen:
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = running.environment(XLA_FLAGS=f"{flags} {os.environ.get('XLA_FLAGS', '')}")
    workdir = f"--workdir={self.folder / str(name)}"
    command = ["-m", "diloco.main", *self._flags, workdir, *place]
    with (self.folder / f"{name}.log").open("ab") as log:
      pipes = {"stdout": log, "stderr": subprocess.STDOUT}
      return running.start(*command, env=env, **pipes)

  def finish(self) -> None:
    for site, process in self.processes.items():
      assert process.wait(LONG) == 0, self.log(site)[-4000:]

  def log(self, name: int | str) -> str:
    return (self.folder / f"{name}.log").read_text(errors="replace")

  def rounds(self) -> list[dict]:
    """Returns the headers of all closed rounds."""
    return closed_rounds(self.group)

  def assert_same_bits(self, *names: int | str) -> None:
    first, *others = [load(self.folder / str(name)).params for name in names]
    for other in others:
      jax.tree.map(np.testing.assert_array_equal, first, other)

  def wait(self, condition) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
      for site, process in self.processes.items():
        assert not process.poll(), f"{site}:\n{self.log(site)[-4000:]}"
      assert time.monotonic() < deadline
      time.sleep(0.1)

  def await_rounds(self, more: int) -> None:
    """Waits until so many more rounds are closed."""
    closed = lambda: [int(path.stem) for path in self.group.glob("journal/*.round")]
    wanted = max(closed(), default=-1) + more
    self.wait(lambda: max(closed(), default=-1) >= wanted)

  def start_again(self, site: int) -> None:
    """Starts a killed site; returns when it handles signals and trains."""
    words = "takes part after"
    before = self.log(site).count(words)
    self.start(site)
    self.wait(lambda: self.log(site).count(words) > before)


@pytest.fixture
def make_run(tmp_path):
  runs = []

  def make(fields: dict) -> Run:
    runs.append(Run(tmp_path, fields))
    return runs[-1]

  yield make
  for run in runs:
    for process in run.processes.values():
      process.kill()
      process.wait()


@pytest.mark.integration("starts three processes")
def test_two_sites_with_a_folder_compute_the_bits_of_one_process(make_run):
  fields = {"train.steps": 24, "outer.final_sync": True, "plugins": "sites"}
  run = make_run(fields | IN_TIME)
  run.start(0, 1)
  # As with the sites, each replica has a device of its own.
  run.processes["alone"] = run.run("alone", devices=2)
  run.finish()
  run.assert_same_bits(0, 1, "alone")
  assert [line["round"] for line in run.rounds()] == list(range(9))
  assert all(len(line["tokens"]) == 2 for line in run.rounds())


@pytest.mark.slow("two processes")
def test_sites_of_other_devices_batches_and_speeds_train_one_model(make_run):
  run = make_run({"train.steps": 24, **IN_TIME})
  run.start(0, devices=2, flags=("--config.mesh.fsdp=2", "--config.model.remat=full"))
  run.start(1, flags=("--config.sites.batch_size=2", "--config.sites.pace=0.5"))
  run.finish()
  run.assert_same_bits(0, 1)
  length = 16
  assert len(run.rounds()) == 8
  for line in run.rounds():
    assert line["per_step"] == {"0": 4 * length, "1": 2 * length}
    # Rounds are three steps, of which site 1 trains the odd ones of the run.
    steps = {"0": 3, "1": 2 - line["round"] % 2}
    assert line["tokens"] == {k: n * line["per_step"][k] for k, n in steps.items()}


@pytest.mark.slow("two processes")
def test_a_site_that_never_comes_is_no_success(make_run):
  run = make_run({"train.steps": 6, "sites.start_s": 0, "sites.lost_s": 2})
  run.start(0)
  assert run.processes.pop(0).wait(LONG) == 2, run.log(0)[-4000:]
  assert "but site 1 of 2 sent no payload in any round" in run.log(0)
  summary = json.loads((run.folder / "0/summary.json").read_text())
  assert summary["site"]["absent"] == [1]


@pytest.mark.slow("kills processes for a minute")
def test_holders_are_killed_and_come_back_and_no_round_is_lost(make_run):
  fields = {"replicas": 3, "train.batch_size": 6, "train.steps": 3000, "sync_every": 6}
  fields |= {"checkpoint.every": 60, "log.every": 20}
  run = make_run(fields | {"sites.grace_s": 2, "sites.lost_s": 3})
  run.start(0, 1, 2)
  killed = []
  for _ in range(2):
    run.await_rounds(30)
    holder = unpack((run.group / "lease").read_bytes())[0]["site"]
    killed.append(holder)
    process = run.processes.pop(holder)
    process.kill()
    process.wait()
    run.await_rounds(10)
    run.start_again(holder)
  for process in run.processes.values():  # All stop and go on by the same commands.
    process.send_signal(signal.SIGTERM)
  run.finish()
  run.start(0, 1, 2)
  run.finish()
  rounds = run.rounds()
  assert [line["round"] for line in rounds] == list(range(3000 // 6))
  for site in {*killed}:
    assert any(str(site) not in line["tokens"] for line in rounds)
  run.assert_same_bits(0, 1, 2)
  # Old rounds are deleted.
  assert len(list(run.group.glob("journal/*.round"))) < 40
  assert len(list(run.group.glob("snapshots/*.state"))) <= 2
  assert len(list(run.group.glob("payloads/*"))) <= 6
