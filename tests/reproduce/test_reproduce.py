"""The command reproduce: claims, verdicts, the page, and runs from end to end."""

import argparse
import dataclasses
import functools
import json
import math
import re

import conftest
import pytest
from running import refused

from diloco.config import add_plugins
from diloco.reproduce import __main__ as reproduce
from diloco.reproduce import comparison
from diloco.sweep import table
from diloco.sweep.grid import Grid, Sweep
from diloco.sweep.search import search_all
from diloco.util import files


@pytest.mark.parametrize("name", sorted({c.ablation for c in reproduce.CLAIMS}))
def test_every_claim_has_runs_and_a_range(name):
  args = argparse.Namespace(only=name, seeds=1, text="", items="")
  sweep = reproduce.sweeps(args)[name]
  searches = search_all(sweep.grids, lambda point: None)
  found = [p for s in searches for p in s.points or [s.cell]]
  if name.startswith("evaluated"):
    found = [
      {**p, comparison.EVALUATED: x} for p in found for x in comparison._PARAMETERS
    ]
  for claim in (c for c in reproduce.CLAIMS if c.ablation == name):
    pairs = [(claim.a, claim.b), *([claim.than] if claim.than else [])]
    for pair in pairs:
      a, b = ([p for p in found if keys.items() <= p.items()] for keys in pair)
      assert a, claim
      assert b, claim
      assert not any(p in b for p in a)
    assert math.isfinite(claim.low) != math.isfinite(claim.high)
    known = claim.column in ("loss", "accuracy")
    assert known or all(claim.column in p for p in a + b)


def test_every_ablation_of_the_papers_and_the_ladder_have_a_claim():
  files = ("ablations", reproduce.SCORED)
  names = [reproduce.load_module(file, "get_sweep", "").ABLATIONS for file in files]
  # Ablations with eight seeds decide the claims of the last three.
  none = {"methods", "weights", "fragments", "tau_2", "evaluated"}
  wanted = {reproduce.LADDER}.union(*names) - none
  assert {c.ablation for c in reproduce.CLAIMS} == wanted


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
  """Fake runs end at once, so no driver waits."""
  drive = functools.partial(reproduce.drive, pause=0.05)
  monkeypatch.setattr(reproduce, "drive", drive)


class Fake:
  """A backend whose runs end at once; the loss grows with tau."""

  detached = False
  started = 0

  def __init__(self, cores, environment):
    assert cores <= 1

  def start(self, *runs):
    for run in runs:
      Fake.started += 1
      c = json.loads((run / "config.json").read_text())
      loss = 4 + 0.01 * c["overlap"]["tau"] + 0.1 * c["seed"]
      losses = {"outer": loss, "mean": loss + 0.01, "first": loss + 0.1}
      test = {name: value + 1 for name, value in losses.items()}
      some = {"eval_loss": losses, "test_loss": test, "bytes_sent_per_replica": 9}
      files.write_json(run / "summary.json", {**some, "wall_s": 36.0})

  def running(self, run):
    return False

  def stop(self):
    pass


def test_the_page_has_all_claims_and_keeps_finished_runs(tmp_path, monkeypatch):
  monkeypatch.setattr(reproduce, "Local", Fake)
  flags = [f"--out={tmp_path}", "--only=tau,evaluated", "--seeds=2", "--jobs=99"]
  assert "--out is missing" in refused(reproduce.main, *flags[1:])
  assert reproduce.main([*flags, "--report"]) == 0
  page = (tmp_path / "reproduced.md").read_text()
  assert "26 of 26 settings have no result yet." in page
  assert page.count(" h | no runs yet |") == 2
  assert reproduce.main(flags) == 0
  # The run of `evaluated` is that of tau = 1 with alpha = 0.
  assert Fake.started == 24
  page = (tmp_path / "reproduced.md").read_text()
  for claim in (c for c in reproduce.CLAIMS if c.ablation == "tau"):
    row = f"| {claim.text} | {claim.source} | trained | {claim.paper} |"
    assert page.count(row) == 1
  # From tau = 1 to 10 the loss grows by 0.09, from 5.01 at seed 0 and from 5.11 at 1.
  assert (
    "+1.78% [+1.67, +1.89], 2 seeds; shown if below 0.2% |"
    " `reproduce --only=tau --out=OUT` | 0.02 h | contradicted |" in page
  )
  # Two seeds train together, and both have the group's 36 s.
  assert "24 runs, 0 failed, 0.1 hours" in page
  assert "no result yet" not in page
  for picture in re.findall(r"\]\((.*?png)\)", page):
    assert (tmp_path / picture).is_file()
  assert page.count("](figures/") == 2
  assert reproduce.main(flags) == reproduce.main([*flags, "--report"]) == 0
  assert Fake.started == 24
  flags[1] = "--only=evaluated"
  assert reproduce.main([*flags, "--report"]) == 0
  assert "\n2 runs, 0 failed" in (tmp_path / "reproduced.md").read_text()


def test_failed_runs_are_run_again_when_asked(tmp_path, monkeypatch):
  monkeypatch.setattr(reproduce, "Local", Fake)
  Fake.started = 0
  flags = [f"--out={tmp_path}", "--only=evaluated", "--seeds=2", "--jobs=99"]
  assert reproduce.main(flags) == 0
  for run in tmp_path.glob("runs/*"):
    (run / "summary.json").unlink()
    table.note_end(run, failed=True, error="The disk was full.")
  assert reproduce.main(flags) == 1
  assert Fake.started == 2
  assert "\n0 runs, 2 failed" in (tmp_path / "reproduced.md").read_text()
  assert reproduce.main([*flags, "--retry_failed"]) == 0
  assert Fake.started == 4
  assert "\n2 runs, 0 failed" in (tmp_path / "reproduced.md").read_text()


def test_the_ladder_is_run_with_its_own_configs(tmp_path, monkeypatch):
  monkeypatch.setattr(reproduce, "Local", Fake)
  Fake.started = 0
  flags = [f"--out={tmp_path}", "--only=fedpart,ladder", "--seeds=2", "--jobs=99"]
  assert reproduce.main(flags) == 0
  configs = [json.loads(p.read_text()) for p in tmp_path.glob("runs/*/config.json")]
  widths = {32: 0, 48: 0, 56: 0, 64: 0, 80: 0, 96: 0}
  for c in configs:
    widths[c["model"]["dim"]] += c["model"]["seq_len"] == 64
  # The ablation's four runs have the width of the smallest size.
  assert Fake.started == len(configs) == sum(widths.values())
  # Every size has three learning rates or more with seed 0, and two other seeds.
  # Where nothing else is tuned, exactly three.
  assert widths[56] == widths[80] == widths[96] == 4 * (3 + 2)
  assert min(widths[48], widths[64]) > 4 * (3 + 2)
  page = (tmp_path / "reproduced.md").read_text()
  # All losses of a seed are alike; seed 0 tunes and is not in the mean.
  claim = "M=2 does better relative to data-parallel at the largest N"
  row = next(line for line in page.splitlines() if line.startswith(f"| {claim} |"))
  assert "| +0.00 points [+0.00, +0.00], 2 seeds; shown if below 0 points |" in row
  assert row.endswith(" h | undecided |")
  assert "| DiLoCo, M=4 | 1081 | 2 | 5.1500 ± 0.0707 | +0.00 ± 0.00 |" in page


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--only=tau,taus"], "--only has 'taus'; write some of algorithms, "),
    (["--text=a,b"], "has 'b'; write scale=small"),
  ],
)
def test_a_mistake_is_one_sentence(tmp_path, flags, message):
  only = [] if flags[0].startswith("--only") else ["--only=tau"]
  assert message in refused(reproduce.main, f"--out={tmp_path}", *only, *flags)


def test_a_refused_run_is_a_mistake_and_not_done(tmp_path, monkeypatch):
  sweep = tiny_sweep()
  config = sweep.config

  def refuse(point):
    c = config(point)
    c.sync_every = 0 if point["fedpart"] else c.sync_every
    return c

  sweep = dataclasses.replace(sweep, config=refuse)
  monkeypatch.setattr(reproduce, "sweeps", lambda args: {"fedpart": sweep})
  said = refused(reproduce.main, f"--out={tmp_path}", "--report")
  assert said.startswith("error: sync_every is 0")
  assert not list(tmp_path.iterdir())


def tiny_sweep():
  def config(point):
    c = conftest.tiny_config()
    add_plugins(c, "fedpart")
    c.fedpart.on, c.seed = point["fedpart"], point["seed"]
    c.eval.test_tokens, c.log.sample_tokens = 256, 0
    return c

  cells = [{"size": "small", "fedpart": f, "seed": 0} for f in (False, True)]
  own = comparison.Chart("FedPart", "fedpart")
  return Sweep(config, [Grid("fedpart", cells)], chart=own)


@pytest.mark.slow("trains runs of the report")
def test_two_real_runs_make_a_page(tmp_path, monkeypatch):
  monkeypatch.setattr(reproduce, "sweeps", lambda args: {"fedpart": tiny_sweep()})
  flags = [f"--out={tmp_path}", "--seeds=1", "--jobs=2"]
  assert reproduce.main(flags) == 0
  rows = table.read_rows(tmp_path)
  assert [row["status"] for row in rows.values()] == ["done", "done"]
  page = (tmp_path / "reproduced.md").read_text()
  for row in rows.values():
    assert f"{row['test_loss']:.4f}" in page
  assert "1 seed; shown if above 0.2% | `reproduce --only=fedpart --out=OUT` |" in page
  times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*.jsonl")}
  assert reproduce.main(flags) == 0
  assert times == {path: path.stat().st_mtime_ns for path in times}
