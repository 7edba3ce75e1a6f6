"""The status of runs and groups, read from the files that a run leaves so far."""

import json
import os
import subprocess

import pytest
import running
from conftest import tiny_config
from running import refused

from diloco.cli import status
from diloco.config import resolve
from diloco.contrib.sites.group.journal import head_of, path_of
from diloco.contrib.sites.group.records import pack
from diloco.util import files

NOW = 1_000_000.0


def write(folder, records, age=5.0, config=None):
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / "metrics.jsonl"
  path.write_text("".join(json.dumps(r) + "\n" for r in records))
  os.utime(path, (NOW - age, NOW - age))
  if config:
    (folder / "config.json").write_text(json.dumps(config.to_dict()))


def close(folder, config, *rounds):
  """Writes closed rounds into the folder of a group."""
  (folder / "journal").mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(config.to_dict()))
  for header in rounds:
    path = folder / path_of(header["round"])
    path.write_bytes(json.dumps(header).encode() + b"\n\x00\xffpayload")
    os.utime(path, (NOW - 3, NOW - 3))


def records(last, rate=100.0):
  """Records of a run of 64 tokens per step, with an evaluation after step 2."""
  for t in range(1, last + 1):
    now = {"tokens": 64 * t, "loss": 9 - t / 10, "tokens_per_s": rate, "time": 2.0 * t}
    yield {"kind": "step", "step": t, **now}
    if t == 2:
      yield {"kind": "eval", "step": t, "loss_outer": 8.5}
    if t > 4:
      yield {"kind": "receive", "step": t, "fragment": t % 4}


@pytest.fixture
def config():
  c = tiny_config()
  c.eval.every = 2
  return resolve(c)


def told(folder, now=NOW):
  return dict(line.split(maxsplit=1) for line in status.lines(folder, now))


def test_a_run_that_goes_on_tells_all_of_it(tmp_path, config):
  write(tmp_path, [*records(9), {"kind": "step"}], config=config)
  (tmp_path / "checkpoints" / "5").mkdir(parents=True)
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"kind": "step", "step": 10, "lo')
  os.utime(tmp_path / "metrics.jsonl", (NOW - 5, NOW - 5))
  assert told(tmp_path) == {
    "run": f"{tmp_path}: streaming, M=2, H=4",
    "step": "9 of 12, 100 tokens/s, 0:00:02 of training left",
    "loss": "8.1000",
    "held-out": "8.5000 at 2",
    "last": told(tmp_path)["last"],
    "checkpoint": "step 5",
  }
  lines = status.lines(tmp_path, NOW)
  assert "last line    5 s ago" in lines
  syncs = "fragment 0 at 8, fragment 1 at 9, fragment 2 at 6, fragment 3 at 7"
  assert f"last sync    {syncs}" in lines
  # A stop saves between two lines of the log.
  (tmp_path / "checkpoints" / "11").mkdir()
  assert told(tmp_path)["step"].startswith("11 of 12, ")


@pytest.mark.parametrize(
  ("age", "slow", "text"),
  [(59, 1, "59 s ago"), (61, 1, "0:01:01 ago"), (1900, 50, "1900 s ago")],
)
def test_a_run_without_new_lines_has_probably_stopped(
  tmp_path, config, age, slow, text
):
  lines = [{**r, "time": slow * 2.0 * r["step"]} for r in records(9)]
  write(tmp_path, lines, age, config)
  found, stopped = told(tmp_path), ":" in text
  assert found.get("state") == ("probably stopped" if stopped else None)
  assert f"last line    {text}" in status.lines(tmp_path, NOW)
  assert found["step"].endswith("of training left") != stopped


def lock(folder, number: int) -> str:
  """Locks a folder like a process of this machine with this number."""
  text = files.holder().replace(f"process {os.getpid()} on", f"process {number} on")
  (folder / ".lock").write_text(text)
  return text


def test_a_run_has_stopped_if_its_process_is_known_here_and_gone(tmp_path, config):
  write(tmp_path, records(9), config=config)
  gone = subprocess.Popen(["true"])
  gone.wait()
  for number, changes, state in (
    (gone.pid, {}, "stopped"),
    (os.getpid(), {}, None),
    # A container that has the machine's host name, a boot before, an older lock.
    (gone.pid, {"pid:[": "pid:[1"}, None),
    (gone.pid, {"boot ": "boot 0"}, None),
    (gone.pid, {f"\n{files.holder().splitlines()[1]}\n": ""}, None),
  ):
    text = lock(tmp_path, number)
    for before, after in changes.items():
      assert before in text
      (tmp_path / ".lock").write_text(text.replace(before, after))
    found = told(tmp_path)
    assert found.get("state") == state
    assert ("training left" in found["step"]) == (state is None)


# A site may jump to the last step, even before it has logged one.
@pytest.mark.parametrize("last", [12, 9, 0])
def test_a_run_that_wrote_its_summary_last_is_finished(tmp_path, config, last):
  write(tmp_path, records(last), age=9000, config=config)
  lock(tmp_path, 2**22 + 1)
  (tmp_path / "summary.json").write_text("{}")
  assert "state        finished" in status.lines(tmp_path, NOW)
  os.utime(tmp_path / "summary.json", (0, 0))  # The run was extended and goes on.
  finished = "state        finished" in status.lines(tmp_path, NOW)
  assert finished == (last != 9)


def test_a_group_tells_who_is_in(tmp_path, config):
  line = lambda r, step, **sites: {
    **{"round": r, "fragment": r % 4, "step": step, "late": []},
    **{"tokens": {k[1:]: 64 for k in sites}, "waited_s": 0.1},
  }
  close(tmp_path, config)
  assert status.lines(tmp_path, NOW)[1].split() == ["round", "none", "closed", "yet"]
  rounds = [line(0, 1, s0=1, s1=1), line(1, 2, s0=1, s1=1), line(2, 3, s0=1)]
  close(tmp_path, config, *rounds)
  (tmp_path / "journal/000000003.round").write_bytes(b'{"round": 3, "tok')
  assert "never sent" not in told(tmp_path)
  found = status.lines(tmp_path, NOW)
  assert "sites        1 of 2 in the last round: 0" in found
  assert "away         1 since step 2" in found
  assert "last line    3 s ago" in found
  assert not any(x.startswith("refused") for x in found)
  bad = [{**x, "refused": [0, 1] if x["round"] else [1]} for x in rounds[:2]]
  close(tmp_path, config, *bad)
  assert "refused      1 of site 0, 2 of site 1" in status.lines(tmp_path, NOW)
  # The four fragments are sent after the steps 4, 5, 6 and 7, then every four steps.
  assert "round        3 of 9, step 3" in found
  assert "state        finished" not in status.lines(tmp_path, NOW)


def test_rounds_before_the_newest_snapshot_are_read_from_its_head(tmp_path, config):
  line = {"round": 7, "fragment": 0, "step": 8, "tokens": {"0": 64, "2": 64}}
  (tmp_path / "snapshots").mkdir()
  (tmp_path / head_of(8)).write_bytes(pack({"rounds": [line]}))
  close(tmp_path, config, line | {"round": 8, "step": 9, "tokens": {"0": 64}})
  found = status.lines(tmp_path, NOW)
  assert "away         2 since step 8" in found
  assert "never sent   1" in found
  assert "state        finished" in found


def test_a_run_of_sites_has_a_line_for_each_site_and_their_group(tmp_path, config):
  for run in (tmp_path, tmp_path / "sites"):
    close(run, config, {"round": 0, "fragment": 0, "step": 1, "tokens": {"0": 64}})
    write(run / "site-0", records(9), config=config)
  lines = status.lines(tmp_path, NOW)
  names = [".", "site-0", "sites", "sites/site-0"]
  assert [line.split()[0] for line in lines] == names
  assert ["step 9 of 12" in line for line in lines] == [False, True, False, True]


def test_a_folder_without_runs_is_a_mistake(tmp_path):
  assert "where no run has written metrics.jsonl" in refused(status.main, tmp_path)
  assert "but there is no such folder." in refused(status.main, tmp_path / "rnu")


def test_the_config_of_another_program_is_no_config_of_a_run(tmp_path):
  (tmp_path / "config.json").write_text('{"algorithm": "other"}')
  (tmp_path / "metrics.jsonl").touch()
  title, *_ = status.lines(tmp_path, NOW)
  assert title.endswith("config not known, because config.json is not that of a run")


def test_a_run_that_died_before_its_first_step_is_stopped(tmp_path, config):
  (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
  assert "none yet; compiling the first one" in status.lines(tmp_path, NOW)[1]
  lock(tmp_path, 2**22 + 1)
  _, *lines = status.lines(tmp_path, NOW)
  assert [line.split()[1] for line in lines] == ["none", "stopped"]


def test_a_group_has_closed_no_round_yet(tmp_path, config):
  (tmp_path / "journal").mkdir()
  assert status.lines(tmp_path, NOW)[1].split() == ["round", "none", "closed", "yet"]


NO_JAX = """
import sys
import diloco.simulate.__main__ as simulate
import diloco.simulate.tables
assert "matplotlib" not in sys.modules
import diloco.cli.compare
import diloco.cli.status
import diloco.scaling_laws.__main__
import diloco.cli.sweep, diloco.reproduce.comparison, diloco.sweep.slurm
plan = ["plan", "--config=configs/sample.py", "--step_time=0.06", "--gbits=0.02"]
assert simulate.main(plan) == 0
assert not {"jax", "jaxlib", "flax"} & {*sys.modules}
"""


def test_commands_that_compute_nothing_on_devices_import_no_jax():
  ended = running.python("-c", NO_JAX)
  assert ended.returncode == 0, ended.stderr
