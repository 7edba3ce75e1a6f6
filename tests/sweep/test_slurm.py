"""The Slurm backend: submitit's local executor, and a real Slurm where there is one."""

import pathlib
import shutil
import subprocess
import time

import conftest
import pytest

from diloco.config import default_config
from diloco.sweep.grid import Axis, Grid, Sweep
from diloco.sweep.runner import Driver
from diloco.sweep.table import Table

submitit = pytest.importorskip("submitit", reason="the extra `slurm` is not installed")

from diloco.sweep.slurm import Slurm  # noqa: E402


def diverging(point):
  """A run that fails within seconds, in the trainer's own words."""
  c = default_config()
  c.train.steps, c.train.batch_size = 1, 2
  c.data.tokenizer = "nowhere.model"
  c.inner.learning_rate = point["lr"]
  return c


def tiny(point):
  c = conftest.tiny_config()
  c.inner.learning_rate = point["lr"]
  return c


def run_out(driver: Driver, seconds: float) -> list[dict]:
  end = time.monotonic() + seconds
  while any(c.search.state in ("searching", "waiting") for c in driver.step()):
    assert time.monotonic() < end, "the sweep does not end"
    time.sleep(0.5)
  driver.stop()
  return Table(driver._results).rows()


def test_submitit_runs_the_job_and_its_failure_is_booked(tmp_path):
  sweep = Sweep(diverging, [Grid("g", [{}], (Axis("lr", (0.1,)),))])
  backend = Slurm(1, tmp_path, {}, {"timeout_min": 5}, cluster="local")
  (row,) = run_out(Driver(sweep, tmp_path, backend), seconds=120)
  assert row["status"] == "failed"
  assert "nowhere.model" in row["error"]


def test_without_slurm_the_error_is_one_sentence(tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", str(tmp_path))
  with pytest.raises(ValueError, match="--backend=slurm cannot submit") as error:
    Slurm(1, tmp_path, {}, {})
  assert "\n" not in str(error.value)


def test_unknown_options_are_refused(tmp_path):
  with pytest.raises(ValueError, match="cannot submit"):
    Slurm(1, tmp_path, {}, {"nonsense": 1}, cluster="local")


def slurm_answers() -> bool:
  if not shutil.which("sinfo"):
    return False
  asked = subprocess.run(["sinfo", "-h"], capture_output=True, text=True, check=False)
  return asked.returncode == 0 and "idle" in asked.stdout


@pytest.mark.slow
@pytest.mark.skipif(
  not slurm_answers(), reason="no Slurm answers; see scripts/slurm_one_node.sh"
)
def test_a_real_slurm_trains_outlives_the_driver_and_reports_lost_jobs(tmp_path):
  sweep = Sweep(tiny, [Grid("g", [{}], (Axis("lr", (0.001, 0.002)),))])
  python_path = {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
  make = lambda: Slurm(2, tmp_path, python_path, {"timeout_min": 20})
  first = Driver(sweep, tmp_path, make())
  first.step()  # Submits both; this driver is never asked again.
  lost, kept = Table(tmp_path).rows()
  number = (tmp_path / "runs" / lost["name"] / "slurm_job").read_text()
  subprocess.run(["scancel", number], check=True)
  rows = run_out(Driver(sweep, tmp_path, make()), seconds=500)
  assert [row["status"] for row in rows] == ["done", "done"]
  attempts = {row["name"]: row["attempts"] for row in rows}
  assert attempts == {lost["name"]: 2, kept["name"]: 1}
