"""A command that trains each run of a sweep elsewhere (--launch)."""

import json
import shlex
import sys

import pytest
from buckets import serving
from fake_runs import config, rows_of

from diloco.cli import sweep as cli
from diloco.config import command_line, complete, resolve
from diloco.sweep import job, table
from diloco.sweep.local import Local

# A machine: its shell reads the command, as that of ssh does, and a run takes a while.
# It notes what it has trained, is killed once, and refuses a learning rate of 0.5.
MACHINE = """#!PYTHON
import json, os, pathlib, shlex, sys, time
flags = dict(word[2:].split("=", 1) for word in shlex.split(sys.argv[2])[1:])
folder, workdir = pathlib.Path(__file__).parent, flags["workdir"]
rate = float(flags.get("config.inner.learning_rate", 0.0))
busy = folder / f"busy-{sys.argv[1]}"
busy.mkdir()  # Fails if another run has this machine.
with (folder / "trained.txt").open("a") as file:
  print(sys.argv[1], workdir.rpartition("/")[2], file=file)
time.sleep(0.2)
busy.rmdir()
if rate == 0.5:
  sys.exit(2)
try:
  (folder / "killed").mkdir()
  sys.exit(1)
except FileExistsError:
  pass
losses = dict.fromkeys(("outer", "mean", "first"), 3 + rate)
data = json.dumps({"eval_loss": losses, "tokens": 1, "steps": 1}).encode()
if "://" in workdir:
  from obstore.store import from_url
  from_url(workdir, client_options={"allow_http": True}).put("summary.json", data)
else:
  (pathlib.Path(workdir) / "summary.json").write_bytes(data)
"""


@pytest.fixture
def sweep(tmp_path):
  """A function that runs a sweep of some rates on two machines."""
  (tmp_path / "machine").write_text(MACHINE.replace("PYTHON", sys.executable))
  (tmp_path / "machine").chmod(0o755)

  def run(*flags: str, results: str = "results", rates=(0.001,)) -> int:
    text = f"import fake_runs\nget_sweep = lambda: fake_runs.one_cell(*{rates})"
    (tmp_path / "sweep.py").write_text(text)
    launch = f"--launch={tmp_path / 'machine'} {{worker}} 'train {{flags}}'"
    results = f"--results={tmp_path / results}"
    where = [f"--sweep={tmp_path / 'sweep.py'}", results, "--parallel=2"]
    return cli.main([*where, launch, *flags])

  return run


def trained(folder) -> list[list[str]]:
  return [line.split() for line in (folder / "trained.txt").read_text().splitlines()]


@pytest.mark.integration("starts ten processes")
def test_two_machines_train_three_runs_and_a_killed_run_again(sweep, tmp_path):
  """A mistake is not repeated, and bounds the search of the cell."""
  for _ in range(2):
    assert sweep(rates=(0.002, 0.004, 0.5)) == 0
    rows = sorted(rows_of(tmp_path / "results"), key=lambda row: row["point"]["lr"])
    assert [row["status"] for row in rows] == ["done", "done", "failed"]
    assert "exit status 2" in rows[-1]["error"]
    # One of the others was killed once.
    assert sorted(row["attempts"] for row in rows[:2]) == [1, 2]
    assert rows[-1]["attempts"] == 1
    assert len(trained(tmp_path)) == 4
  assert {machine for machine, _ in trained(tmp_path)} == {"0", "1"}


@pytest.mark.integration("starts five processes")
def test_runs_in_a_bucket_are_read_there_and_never_repeated(
  sweep, tmp_path, monkeypatch
):
  pytest.importorskip("moto")
  with serving(tmp_path) as server:
    for name, value in server.env.items():
      monkeypatch.setenv(name, value)
    server.make("bucket")
    assert sweep("--workdir=s3://bucket/sweep/") == 0
    # Another driver without these results.
    assert sweep("--workdir=s3://bucket/sweep", results="other") == 0
  for results in ("results", "other"):
    losses = [row["loss"] for row in rows_of(tmp_path / results)]
    assert losses == pytest.approx([3.001])
  assert len(trained(tmp_path)) == 2  # It was killed once.


def test_the_flags_of_a_run_make_its_config(tmp_path):
  c = config({"replicas": 2, "lr": 0.001})
  c.overlap.taus, c.inner.optimizer = (1, 2), "adamw(b1=0.9, b2=0.95)"
  c.data.source = "files:/some text's folder"
  saved = table.as_json(resolve(c))
  (tmp_path / "config.json").write_text(json.dumps(saved))
  for launch in ("run {flags}", "ssh host 'run {flags}'"):
    command = job.launched(launch, tmp_path)
    first, *flags = command if command[0] == "run" else shlex.split(command[2])
    *flags, workdir = flags
    assert (first, workdir) == ("run", f"--workdir={tmp_path}")
    name = flags[0].removeprefix("--config=")
    assert command_line.load_config(name, flags[1:]) == complete(saved)
  name = f"{job.saved.__file__}:{tmp_path / 'config.json'}"
  c = command_line.load_config(name, ["--config.algorithm=streaming"])
  assert (len(c.make_fragments()) > 1, c.overlap.taus, c.wire.format) == (
    True,
    (1, 1),
    "e3m0",
  )


def test_a_worker_of_an_earlier_driver_is_busy(tmp_path):
  runs = [tmp_path / "runs" / name for name in "abc"]
  for number, run in enumerate(runs):
    table.note(run, worker=number)
  backend = Local(0, {}, launch="x")
  backend.running = lambda run: run.name in "ac"
  assert backend._free_worker(runs[1]) == 1
