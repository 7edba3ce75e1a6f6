"""The Slurm backend: with a fake Slurm and a real one."""

import os
import pathlib
import shutil
import subprocess
import time

import conftest
import pytest
import submitit

from diloco.config import default_config
from diloco.sweep import slurm
from diloco.sweep.grid import Axis, Grid, Sweep
from diloco.sweep.runner import Driver
from diloco.sweep.slurm import Slurm
from diloco.sweep.table import read_rows


def diverging(point):
  """A run that fails within seconds, with an error that the trainer prints."""
  c = default_config()
  c.algorithm, c.train.steps, c.train.batch_size = "data_parallel", 1, 2
  c.data.tokenizer = "nowhere.model"
  c.inner.learning_rate = point["lr"]
  return c


def tiny(point):
  c = conftest.tiny_config()
  c.inner.learning_rate = point["lr"]
  return c


def run_out(driver: Driver, seconds: float) -> list[dict]:
  end = time.monotonic() + seconds
  while not all(cell.ended for cell in driver.step()):
    assert time.monotonic() < end, "the sweep does not end"
    time.sleep(0.5)
  return list(read_rows(driver.results).values())


def test_without_slurm_the_error_is_one_sentence(tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", str(tmp_path))
  with pytest.raises(ValueError, match="this --backend cannot submit") as error:
    Slurm(tmp_path, {}, {})
  assert "\n" not in str(error.value)


SBATCH = """#!/bin/sh
name=$(sed -n 's/^#SBATCH --job-name=//p' "$1")
echo "$name" >> {folder}/queue
[ -e {folder}/sbatch_fails ] && rm {folder}/sbatch_fails && exit 1
number=$(wc -l < {folder}/queue)
[ -e {folder}/jobs_run ] && SLURM_JOB_ID=$number sh "$1" > {folder}/job.txt 2>&1 &
echo Submitted batch job $number
"""
SRUN = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do
  [ "$1" = --output ] || [ "$1" = --error ] && shift
  shift
done
SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 \\
  exec "$@"
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
  for name, text in {"sbatch": SBATCH, "squeue": SQUEUE, "srun": SRUN}.items():
    (folder / name).write_text(text.format(folder=folder))
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


def test_a_job_runs_and_the_driver_notes_its_failure(tmp_path, fake_slurm):
  (fake_slurm / "jobs_run").touch()
  sweep = Sweep(diverging, [Grid("g", [{}], (Axis("lr", (0.1,)),))])
  backend = Slurm(tmp_path, {}, {"timeout_min": 5})
  (row,) = run_out(Driver(sweep, tmp_path, backend), seconds=120)
  assert row["status"] == "failed"
  assert "nowhere.model" in row["error"]


def test_unknown_options_are_refused(tmp_path, fake_slurm):
  with pytest.raises(ValueError, match="cannot submit"):
    Slurm(tmp_path, {}, {"nonsense": 1})


def test_a_driver_killed_while_it_submits_does_not_submit_twice(
  tmp_path, fake_slurm, monkeypatch
):
  def killed(*_):
    raise KeyboardInterrupt  # sbatch has submitted, but the driver does not know yet.

  backend = Slurm(tmp_path, {}, {})
  with monkeypatch.context() as patch:
    number = "_get_job_id_from_submission_command"
    patch.setattr(submitit.SlurmExecutor, number, killed)
    with pytest.raises(KeyboardInterrupt):
      Driver(ONE, tmp_path, backend).step()
  assert submitted(fake_slurm) == 1
  driver = Driver(ONE, tmp_path, Slurm(tmp_path, {}, {}))
  driver.step()
  driver.step()
  assert submitted(fake_slurm) == 1
  other = Sweep(tiny, [Grid("g", [{}], (Axis("lr", (0.001, 0.002)),))])
  Driver(other, tmp_path, Slurm(tmp_path, {}, {}), parallel=1).step()
  assert submitted(fake_slurm) == 1  # An earlier driver's job counts.
  (row,) = read_rows(tmp_path).values()
  assert (row["status"], row["attempts"]) == ("running", 1)
  assert row["name"] in (fake_slurm / "queue").read_text()


def test_a_failing_squeue_neither_ends_the_driver_nor_submits_again(
  tmp_path, fake_slurm, monkeypatch, capsys
):
  first = Driver(ONE, tmp_path, Slurm(tmp_path, {}, {}))
  (fake_slurm / "squeue_fails").touch()
  first.step()
  assert submitted(fake_slurm) == 0  # The run may be in the queue already.
  (fake_slurm / "squeue_fails").unlink()
  first.step()
  (fake_slurm / "squeue_fails").touch()
  first.step()
  Driver(ONE, tmp_path, Slurm(tmp_path, {}, {})).step()
  assert submitted(fake_slurm) == 1
  assert [row["status"] for row in read_rows(tmp_path).values()] == ["running"]
  assert "asking again" in capsys.readouterr().err
  monkeypatch.setattr(slurm, "PATIENCE", -1.0)
  with pytest.raises(ValueError, match=r"squeue does not answer .* jobs go on"):
    first.step()


def test_a_failing_sbatch_is_asked_again(tmp_path, fake_slurm):
  (fake_slurm / "sbatch_fails").touch()
  Driver(ONE, tmp_path, Slurm(tmp_path, {}, {})).step()
  assert submitted(fake_slurm) == 2
  (fake_slurm / "sbatch").write_text("#!/bin/sh\necho limit >&2; exit 1")
  other = Driver(ONE, tmp_path / "other", Slurm(tmp_path / "other", {}, {}))
  with pytest.raises(ValueError, match=r"submits nothing \(limit\)"):
    other.step()
  (row,) = read_rows(tmp_path / "other").values()
  assert (row["status"], row["vanished"]) == ("interrupted", 0)


def test_a_job_that_slurm_queued_again_is_not_submitted(tmp_path, fake_slurm):
  driver = Driver(ONE, tmp_path, Slurm(tmp_path, {}, {}))
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
  python_path = {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
  make = lambda: Slurm(tmp_path, python_path, {"timeout_min": 20})
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
