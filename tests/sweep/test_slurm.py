"""The Slurm backend: submitit's local executor, and a real Slurm where there is one."""

import os
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

from diloco.sweep import slurm  # noqa: E402
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


SBATCH = """#!/bin/sh
name=$(sed -n 's/^#SBATCH --job-name=//p' "$1")
echo "$name" >> {folder}/queue
[ -e {folder}/sbatch_fails ] && rm {folder}/sbatch_fails && exit 1
echo Submitted batch job $(wc -l < {folder}/queue)
"""
SQUEUE = """#!/bin/sh
[ -e {folder}/squeue_fails ] && echo slurm_load_jobs error >&2 && exit 1
while read name; do echo "$name $(cat {folder}/state)"; done < {folder}/queue
"""


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
  """A folder: queue has the names of the jobs, all of them in the state of `state`."""
  folder = tmp_path / "fake"
  folder.mkdir()
  for name, text in {"sbatch": SBATCH, "squeue": SQUEUE, "srun": "#!/bin/sh"}.items():
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


def test_a_driver_killed_while_it_submits_does_not_submit_twice(
  tmp_path, fake_slurm, monkeypatch
):
  def killed(*_):
    raise KeyboardInterrupt  # sbatch has answered, and nothing is noted yet.

  backend = Slurm(2, tmp_path, {}, {})
  with monkeypatch.context() as patch:
    number = "_get_job_id_from_submission_command"
    patch.setattr(submitit.SlurmExecutor, number, killed)
    with pytest.raises(KeyboardInterrupt):
      Driver(ONE, tmp_path, backend).step()
  assert submitted(fake_slurm) == 1
  driver = Driver(ONE, tmp_path, Slurm(2, tmp_path, {}, {}))
  driver.step()
  driver.step()
  assert submitted(fake_slurm) == 1
  assert Slurm(2, tmp_path, {}, {}).slots() == 1  # An earlier driver's job counts.
  (row,) = Table(tmp_path).rows()
  assert (row["status"], row["attempts"]) == ("running", 1)
  assert row["name"] in (fake_slurm / "queue").read_text()


def test_a_failing_squeue_neither_ends_the_driver_nor_submits_again(
  tmp_path, fake_slurm, monkeypatch, capsys
):
  first = Driver(ONE, tmp_path, Slurm(1, tmp_path, {}, {}))
  (fake_slurm / "squeue_fails").touch()
  first.step()
  assert submitted(fake_slurm) == 0  # Whether it runs already is not known.
  (fake_slurm / "squeue_fails").unlink()
  first.step()
  (fake_slurm / "squeue_fails").touch()
  first.step()
  Driver(ONE, tmp_path, Slurm(1, tmp_path, {}, {})).step()
  assert submitted(fake_slurm) == 1
  assert [row["status"] for row in Table(tmp_path).rows()] == ["running"]
  assert "asking again" in capsys.readouterr().err
  monkeypatch.setattr(slurm, "PATIENCE", -1.0)
  with pytest.raises(ValueError, match=r"squeue does not answer .* the jobs go on"):
    first.step()


def test_a_failing_sbatch_is_asked_again(tmp_path, fake_slurm):
  (fake_slurm / "sbatch_fails").touch()
  Driver(ONE, tmp_path, Slurm(1, tmp_path, {}, {})).step()
  assert submitted(fake_slurm) == 2
  (fake_slurm / "sbatch").write_text("#!/bin/sh\necho limit >&2; exit 1")
  other = Driver(ONE, tmp_path / "other", Slurm(1, tmp_path / "other", {}, {}))
  with pytest.raises(ValueError, match=r"submits nothing \(limit\)"):
    other.step()
  (row,) = Table(tmp_path / "other").rows()
  assert (row["status"], row["vanished"]) == ("interrupted", 0)


def test_a_job_that_slurm_itself_queued_again_is_not_submitted(tmp_path, fake_slurm):
  driver = Driver(ONE, tmp_path, Slurm(2, tmp_path, {}, {}))
  driver.step()
  (run,) = (tmp_path / "runs").iterdir()
  (run / "ended.json").write_text('{"failed": false, "error": ""}')
  (fake_slurm / "state").write_text("PD")
  driver.step()
  assert submitted(fake_slurm) == 1
  (fake_slurm / "state").write_text("CG")  # It is really going.
  driver.step()
  assert submitted(fake_slurm) == 2


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
  queue = ["squeue", "--noheader", "--me", "--format=%i %j"]
  listed = subprocess.run(queue, capture_output=True, check=True, text=True).stdout
  (number,) = [s.split()[0] for s in listed.splitlines() if lost["name"] in s]
  subprocess.run(["scancel", number], check=True)
  rows = run_out(Driver(sweep, tmp_path, make()), seconds=500)
  assert [row["status"] for row in rows] == ["done", "done"]
  attempts = {row["name"]: row["attempts"] for row in rows}
  assert attempts == {lost["name"]: 2, kept["name"]: 1}
