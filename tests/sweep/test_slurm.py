"""The Slurm backend: with a fake Slurm and a real one."""

import os
import pathlib
import shutil
import subprocess
import time

import conftest
import pytest
import running
from threads import free_port

from diloco.cli import sweep as cli
from diloco.sweep import slurm
from diloco.sweep.grid import Axis, Grid, Sweep
from diloco.sweep.runner import Driver
from diloco.sweep.slurm import Slurm
from diloco.sweep.table import read_rows


def tiny(point):
  c = conftest.tiny_config()
  c.model.num_layers, c.fragments.pattern, c.train.steps = 1, "whole", 4
  c.inner.learning_rate = point["lr"]
  c.data.tokenizer = point.get("tokenizer", c.data.tokenizer)
  return c


def run_out(driver: Driver, seconds: float) -> list[dict]:
  end = time.monotonic() + seconds
  while not all(cell.ended for cell in driver.step()):
    assert time.monotonic() < end, "the sweep does not end"
    time.sleep(0.5)
  return list(read_rows(driver.results).values())


# Numbers jobs by the lines of `queue`, and runs them if there is a file `jobs_run`.
SBATCH = """#!/bin/bash
for word in "$@"; do
  [[ $word == --job-name=* ]] && echo "${word#--job-name=}" >> {folder}/queue
  [[ $word == --output=* ]] && output="${word#--output=}"
done
[ -e {folder}/sbatch_fails ] && rm {folder}/sbatch_fails && exit 1
while [[ $1 == --* ]]; do echo "$1" >> {folder}/options; shift; done
[ -e {folder}/jobs_run ] && (SLURM_JOB_ID=7 bash "$@" > "$output" 2>&1 < /dev/null &)
echo Submitted batch job 7
"""
SQUEUE = """#!/bin/sh
[ -e {folder}/squeue_fails ] && echo slurm_load_jobs error >&2 && exit 1
while read name; do echo "$name $(cat {folder}/state)"; done < {folder}/queue
"""


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
  """A folder: queue has the jobs' names, state their state; jobs_run lets them run."""
  folder = tmp_path / "fake"
  folder.mkdir()
  srun = f"#!/bin/bash{running.SRUN}"
  for name, text in {"sbatch": SBATCH, "squeue": SQUEUE, "srun": srun}.items():
    (folder / name).write_text(text.replace("{folder}", str(folder)))
    (folder / name).chmod(0o755)
  (folder / "queue").touch()
  (folder / "state").write_text("R")
  monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
  monkeypatch.setattr(slurm, "FRESH", 0.0)
  monkeypatch.setattr(slurm, "PAUSES", (0.0,))
  return folder


ONE = Sweep(tiny, [Grid("g", [{}], (Axis("lr", (0.001,)),))])


def submitted(folder: pathlib.Path) -> int:
  return len((folder / "queue").read_text().splitlines())


@pytest.mark.integration("trains in two processes")
def test_each_run_is_a_job_of_several_processes(tmp_path, fake_slurm, monkeypatch):
  (fake_slurm / "jobs_run").touch()
  monkeypatch.setenv("JAX_COORDINATOR_PORT", str(free_port()))
  sweep = Sweep(tiny, [Grid("g", [{"lr": 0.001}, {"lr": 0.1, "tokenizer": "none"}])])
  backend = Slurm(tmp_path, {"PYTHONPATH": str(running.ROOT)}, ["--nodes=2"])
  rows = run_out(Driver(sweep, tmp_path, backend), seconds=900)
  assert [row["status"] for row in rows] == ["done", "failed"]
  assert "none" in rows[1]["error"]
  assert rows[0]["attempts"] == 1
  assert "Going on" not in (rows[0]["folder"] / "log.txt").read_text()
  assert (fake_slurm / "options").read_text().splitlines()[2] == "--nodes=2"


def test_a_dry_run_counts_jobs(tmp_path, fake_slurm):
  flags = ["--sweep=ladder:size=35M", f"--results={tmp_path / 'r'}", "--dry_run"]
  flags += ["--backend=slurm", "--slurm_options=--nodes=2 --gpus-per-node=8"]
  said = running.shown(cli.main, *flags)
  assert said.splitlines()[0].split() == ["size", "jobs", "FLOPs", "GPU-hours"]
  assert submitted(fake_slurm) == 0


def test_a_driver_killed_while_it_submits_does_not_submit_twice(
  tmp_path, fake_slurm, monkeypatch
):
  ask = slurm._ask

  def killed(command, *more):
    answer = ask(command, *more)
    if command[0] == "sbatch":  # It has submitted, but the driver does not know yet.
      raise KeyboardInterrupt
    return answer

  backend = Slurm(tmp_path, {})
  with monkeypatch.context() as patch:
    patch.setattr(slurm, "_ask", killed)
    with pytest.raises(KeyboardInterrupt):
      Driver(ONE, tmp_path, backend).step()
  assert submitted(fake_slurm) == 1
  driver = Driver(ONE, tmp_path, Slurm(tmp_path, {}))
  driver.step()
  driver.step()
  assert submitted(fake_slurm) == 1
  other = Sweep(tiny, [Grid("g", [{}], (Axis("lr", (0.001, 0.002)),))])
  Driver(other, tmp_path, Slurm(tmp_path, {}), parallel=1).step()
  assert submitted(fake_slurm) == 1  # An earlier driver's job counts.
  (row,) = read_rows(tmp_path).values()
  assert (row["status"], row["attempts"]) == ("running", 1)
  assert row["name"] in (fake_slurm / "queue").read_text()


def test_a_failing_squeue_neither_ends_the_driver_nor_submits_again(
  tmp_path, fake_slurm, monkeypatch, capsys
):
  first = Driver(ONE, tmp_path, Slurm(tmp_path, {}))
  (fake_slurm / "squeue_fails").touch()
  first.step()
  assert submitted(fake_slurm) == 0  # The run may be in the queue already.
  (fake_slurm / "squeue_fails").unlink()
  first.step()
  (fake_slurm / "squeue_fails").touch()
  first.step()
  Driver(ONE, tmp_path, Slurm(tmp_path, {})).step()
  assert submitted(fake_slurm) == 1
  assert [row["status"] for row in read_rows(tmp_path).values()] == ["running"]
  assert "asking again" in capsys.readouterr().err
  monkeypatch.setattr(slurm, "PATIENCE", -1.0)
  with pytest.raises(ValueError, match=r"squeue does not answer .* jobs go on"):
    first.step()


def test_a_failing_sbatch_is_asked_again(tmp_path, fake_slurm):
  (fake_slurm / "sbatch_fails").touch()
  Driver(ONE, tmp_path, Slurm(tmp_path, {})).step()
  assert submitted(fake_slurm) == 2
  (fake_slurm / "sbatch").write_text("#!/bin/sh\necho limit >&2; exit 1")
  other = Driver(ONE, tmp_path / "other", Slurm(tmp_path / "other", {}))
  with pytest.raises(ValueError, match=r"submits nothing \(limit\)"):
    other.step()
  (row,) = read_rows(tmp_path / "other").values()
  assert (row["status"], row["vanished"]) == ("interrupted", 0)


def test_a_job_that_slurm_queued_again_is_not_submitted(tmp_path, fake_slurm):
  driver = Driver(ONE, tmp_path, Slurm(tmp_path, {}))
  driver.step()
  (run,) = (tmp_path / "runs").iterdir()
  (run / "ended.json").write_text('{"failed": false, "error": ""}')
  (fake_slurm / "state").write_text("PD")
  driver.step()
  assert submitted(fake_slurm) == 1
  (fake_slurm / "state").write_text("CG")  # The job is completing: it ends.
  driver.step()
  assert submitted(fake_slurm) == 2


def slurm_answers() -> bool:
  if not shutil.which("sinfo"):
    return False
  asked = subprocess.run(["sinfo", "-h"], capture_output=True, text=True, check=False)
  return asked.returncode == 0 and "idle" in asked.stdout


@pytest.mark.slow("starts a real Slurm")
@pytest.mark.skipif(
  not slurm_answers(),
  reason="no Slurm answers; see scripts/launchers/slurm_one_node.sh",
)
def test_jobs_of_a_real_slurm_outlive_the_driver_and_lost_jobs_run_again(tmp_path):
  sweep = Sweep(tiny, [Grid("g", [{}], (Axis("lr", (0.001, 0.002)),))])
  python_path = {"PYTHONPATH": str(running.ROOT)}
  make = lambda: Slurm(tmp_path, python_path, ["--time=20"])
  first = Driver(sweep, tmp_path, make(), parallel=2)
  first.step()  # Submits both and is never called again.
  lost, kept = read_rows(tmp_path).values()
  queue = ["squeue", "--noheader", "--me", "--format=%i %j"]
  listed = subprocess.run(queue, capture_output=True, check=True, text=True).stdout
  (number,) = [s.split()[0] for s in listed.splitlines() if lost["name"] in s]
  subprocess.run(["scancel", number], check=True)
  rows = run_out(Driver(sweep, tmp_path, make(), parallel=2), seconds=500)
  assert [row["status"] for row in rows] == ["done", "done"]
  attempts = {row["name"]: row["attempts"] for row in rows}
  assert attempts == {lost["name"]: 2, kept["name"]: 1}
