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

from diloco.contrib.sites.group.records import unpack
from diloco.interop.load import load

ROOT = pathlib.Path(__file__).parents[3]
LONG = 900  # Seconds after which a test gives up.


class Run:
  """The sites of one run, which share the folder `group`."""

  def __init__(self, folder: pathlib.Path, *flags: str):
    self.folder, self.group = folder, folder / "group"
    self._flags = (f"--config={ROOT / 'tests' / 'process_config.py'}", *flags)
    # Of one site: more flags, and its number of devices.
    self.own: dict[int, tuple[str, ...]] = {}
    self.devices: dict[int, int] = {}
    self.processes: dict[int, subprocess.Popen] = {}

  def start(self, *sites: int) -> None:
    for site in sites:
      place = [f"--group={self.group}", f"--site={site}"]
      place += [
        "--config.overlap.transport=sites",
        f"--workdir={self.folder / str(site)}",
        *self.own.get(site, ()),
      ]
      devices = self.devices.get(site, 1)
      self.processes[site] = self.run(site, *place, devices=devices)

  def run(self, name: int | str, *place: str, devices: int = 1) -> subprocess.Popen:
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = running.environment(XLA_FLAGS=f"{flags} {os.environ.get('XLA_FLAGS', '')}")
    command = ["-m", "diloco.main", *self._flags, *place]
    with (self.folder / f"{name}.log").open("ab") as log:
      pipes = {"stdout": log, "stderr": subprocess.STDOUT}
      return running.start(*command, env=env, **pipes)

  def kill(self, site: int) -> None:
    process = self.processes.pop(site)
    process.kill()
    process.wait()

  def finish(self) -> None:
    for site, process in self.processes.items():
      assert process.wait(LONG) == 0, self.log(site)[-4000:]

  def log(self, name: int | str) -> str:
    return (self.folder / f"{name}.log").read_text(errors="replace")

  def lines(self) -> list[dict]:
    lines = (self.group / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]

  def params(self, *names: int | str) -> list:
    return [load(self.folder / str(name)).params for name in names]

  def await_rounds(self, more: int) -> None:
    """Waits until so many more rounds are closed."""
    newest = lambda: max(
      (p.stem for p in self.group.glob("journal/*.round")), default=-1
    )
    wanted, deadline = int(newest()) + more, time.monotonic() + LONG
    while int(newest()) < wanted:
      for site, process in self.processes.items():
        assert not process.poll(), f"{site}:\n{self.log(site)[-4000:]}"
      assert time.monotonic() < deadline
      time.sleep(0.1)

  def start_again(self, site: int) -> None:
    """Starts a killed site; returns when it handles signals and trains."""
    words = "takes part after"
    before, deadline = self.log(site).count(words), time.monotonic() + LONG
    self.start(site)
    while self.log(site).count(words) == before:
      assert not self.processes[site].poll(), self.log(site)[-4000:]
      assert time.monotonic() < deadline
      time.sleep(0.1)

  def holder(self) -> int:
    return unpack((self.group / "lease").read_bytes())[0]["site"]


@pytest.fixture
def make_run(tmp_path):
  runs = []

  def make(*flags: str) -> Run:
    runs.append(Run(tmp_path, *flags))
    return runs[-1]

  yield make
  for run in runs:
    for process in run.processes.values():
      process.kill()
      process.wait()


def assert_same_bits(models: list) -> None:
  for other in models[1:]:
    jax.tree.map(np.testing.assert_array_equal, models[0], other)


@pytest.mark.integration("starts three processes")
def test_two_sites_with_a_folder_compute_the_bits_of_one_process(make_run):
  run = make_run(
    *("--config.train.steps=24", "--config.outer.final_sync=true"),
    # Otherwise a busy machine may be late for a round.
    *("--config.plugins=sites", "--config.sites.least_grace_s=20"),
    "--config.log.sample_tokens=0",
  )
  run.start(0, 1)
  # As with the sites, each replica has a device of its own.
  own = (f"--workdir={run.folder / 'alone'}", "--config.plugins=sites")
  alone = run.run("alone", *own, devices=2)
  run.finish()
  assert alone.wait(LONG) == 0, run.log("alone")[-4000:]
  assert_same_bits(run.params(0, 1, "alone"))
  assert [line["round"] for line in run.lines()] == list(range(9))
  assert all(len(line["tokens"]) == 2 for line in run.lines())


@pytest.mark.slow("two processes")
def test_sites_of_other_devices_batches_and_speeds_train_one_model(make_run):
  run = make_run(
    *("--config.train.steps=24", "--config.log.sample_tokens=0"),
    "--config.sites.least_grace_s=20",
  )
  run.devices[0], run.own[0] = 2, ("--config.mesh.fsdp=2", "--config.model.remat=full")
  run.own[1] = ("--config.sites.batch_size=2", "--config.sites.pace=0.5")
  run.start(0, 1)
  run.finish()
  assert_same_bits(run.params(0, 1))
  length = 16
  assert len(run.lines()) == 8
  for line in run.lines():
    assert line["per_step"] == {"0": 4 * length, "1": 2 * length}
    # Rounds are three steps, of which site 1 trains the odd ones of the run.
    steps = {"0": 3, "1": 2 - line["round"] % 2}
    assert line["tokens"] == {k: n * line["per_step"][k] for k, n in steps.items()}


@pytest.mark.slow("two processes")
def test_a_site_that_never_comes_is_no_success(make_run):
  run = make_run(
    *("--config.train.steps=6", "--config.log.sample_tokens=0"),
    *("--config.sites.start_s=0", "--config.sites.lost_s=2"),
  )
  run.start(0)
  assert run.processes.pop(0).wait(LONG) == 2, run.log(0)[-4000:]
  assert "but site 1 of 2 sent no payload in any round" in run.log(0)
  summary = json.loads((run.folder / "0/summary.json").read_text())
  assert summary["site"]["absent"] == [1]


@pytest.mark.slow("kills processes for a minute")
def test_holders_are_killed_and_come_back_and_no_round_is_lost(make_run):
  run = make_run(
    *("--config.train.steps=3000", "--config.sync_every=6", "--config.replicas=3"),
    *("--config.train.batch_size=6", "--config.checkpoint.every=60"),
    *("--config.log.every=20", "--config.sites.grace_s=2", "--config.sites.lost_s=3"),
  )
  run.start(0, 1, 2)
  killed = []
  for _ in range(2):
    run.await_rounds(30)
    killed.append(run.holder())
    run.kill(killed[-1])
    run.await_rounds(10)
    run.start_again(killed[-1])
  for process in run.processes.values():  # All stop and go on by the same commands.
    process.send_signal(signal.SIGTERM)
  run.finish()
  run.start(0, 1, 2)
  run.finish()
  lines = run.lines()
  assert [line["round"] for line in lines] == list(range(3000 // 6))
  for site in {*killed}:
    assert any(str(site) not in line["tokens"] for line in lines)
  assert_same_bits(run.params(0, 1, 2))
  # Old rounds are deleted.
  assert len(list(run.group.glob("journal/*.round"))) < 40
  assert len(list(run.group.glob("snapshots/*.state"))) <= 2
  assert len(list(run.group.glob("payloads/*"))) <= 6
