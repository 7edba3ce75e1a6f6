"""The command: its flags, what it shows, exports and refuses."""

import json
import math
import re
import sys

import pytest
from fake_runs import (
  Fake,
  config,
  finish,
  make_driver,
  make_sweep,
  one_cell,
  rows_of,
  summary_of,
  write_run,
)
from running import ROOT, called, read_csv, refused, shown

from diloco.cli import sweep as cli
from diloco.config import complete
from diloco.config.resolve import leaves
from diloco.errors import ConfigError
from diloco.spec.shapes import matrix_params, num_params
from diloco.sweep.chart import Chart
from diloco.sweep.csv_file import export
from diloco.sweep.grid import Axis, Grid, Sweep, powers
from diloco.sweep.load import load_sweep
from diloco.sweep.search import search_all
from diloco.sweep.table import alone


def sweep_of(folder, text):
  """Writes the file of a sweep; returns the flag that names it."""
  (folder / "sweep.py").write_text(text)
  return f"--sweep={folder / 'sweep.py'}"


def test_two_drivers_do_not_share_results(tmp_path):
  finish(make_driver(make_sweep(), tmp_path / "from", Fake()))
  export(rows_of(tmp_path / "from"), tmp_path / "out.csv")
  write_run(tmp_path, "a", {}, ended={"failed": True, "error": "It failed."})
  sweep = ROOT / "configs" / "ladder.py"
  for command in (
    (f"--sweep={sweep}", "--retry_failed"),
    (f"--import={tmp_path / 'out.csv'}",),
  ):
    with alone(tmp_path):
      said = refused(cli.main, *command, f"--results={tmp_path}")
    assert "has a driver already" in said
  assert [row["error"] for row in rows_of(tmp_path)] == ["It failed."]


@pytest.mark.parametrize("action", ["--fit", "--export=a.csv", "--import=a.csv"])
def test_fields_change_no_recorded_runs(tmp_path, action):
  said = refused(cli.main, action, f"--results={tmp_path}", "--config.seed=3")
  assert "--config.seed=3 changes the runs of --sweep" in said


def test_an_export_with_a_sweep_has_the_runs_of_this_sweep_only(tmp_path):
  results, out = tmp_path / "results", tmp_path / "out.csv"
  finish(make_driver(one_cell(1, 2, 4), results, Fake()))
  names = {row["name"] for row in rows_of(results)}
  finish(make_driver(make_sweep(), results, Fake()))
  text = "import fake_runs\nget_sweep = lambda: fake_runs.one_cell(1, 2, 4)"
  shown(cli.main, sweep_of(tmp_path, text), f"--results={results}", f"--export={out}")
  assert {row["name"] for row in read_csv(out)} == names
  assert 3 == len(names) < len(rows_of(results))


def test_flags_of_fields_change_every_run_of_a_sweep(tmp_path):
  fields = ["--config.data.source=arrays:/data/c4", "--config.train.accumulate=2"]
  fields += ["--config.data.tokenizer=", "--config.eval.tokens=1e6"]
  fields += ["--config.plugins=diagnostics", "--config.diagnostics.every=3"]
  sweep = load_sweep("ladder:size=35M", fields)
  plain = load_sweep("ladder:size=35M")
  changed = {"data.source": "arrays:/data/c4", "train.accumulate": 2}
  changed |= {"data.tokenizer": "", "eval.tokens": 1_000_000}
  changed |= {"plugins": ("diagnostics",), "diagnostics.every": 3}
  points = [p for s in search_all(sweep.grids, lambda point: None) for p in s.points]
  assert len(points) == 5
  for point in points:
    before, after = (leaves(s.config(point).to_dict()) for s in (plain, sweep))
    assert after == before | changed


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--config.data.sauce=x", r"data.sauce is no field \(did you mean data.source\?\)"),
    ("--config.train.accumulate=two", "accumulate"),
    ("--config.inner.learning_rate=1", "but the runs differ in inner.learning_rate"),
    ("--config.train.batch_size=64", "but the runs differ in train.batch_size; leave"),
  ],
)
def test_fields_that_a_sweep_cannot_take_are_refused(flag, message):
  with pytest.raises(ConfigError, match=message):
    load_sweep("ladder:size=35M", [flag])


def test_other_unknown_flags_stay_mistakes():
  said = refused(cli.main, "--sweep=ladder", "--show_all", "--results=x")
  assert "unrecognized arguments: --show_all" in said


def test_the_examples_of_the_docs_train_small_models_and_show_a_chart(
  tmp_path, monkeypatch, capsys
):
  blocks = (ROOT / "docs" / "sweep.md").read_text().split("```python\n")[1:]
  for name, block in zip(("small", "seeds"), blocks, strict=True):
    (tmp_path / f"{name}.py").write_text(block.split("```")[0])
  monkeypatch.setattr(sys, "path", [*sys.path])
  sweep = load_sweep(str(tmp_path / "seeds.py"))
  driver = make_driver(sweep, tmp_path / "r", Fake())
  finish(driver)
  cli.show_chart(sweep.chart, driver)
  lines = capsys.readouterr().out.splitlines()
  assert [line.split(" | ")[:2] for line in lines[2:]] == [["| 10", "3"], ["| 50", "3"]]
  # Seven runs of 76,800 tokens take a minute; docs/sweep.md says how long.
  driver = make_driver(load_sweep(str(tmp_path / "small.py")), tmp_path, Fake())
  finish(driver)
  configs = [row["config"] for row in driver.rows.values()]
  assert len(configs) >= 6
  assert {row["status"] for row in driver.rows.values()} == {"done"}
  assert {c["train"]["tokens"] for c in configs} == {76_800}
  assert {num_params(complete(c).model) for c in configs} == {103_744}


def test_a_table_with_losses_of_several_texts_says_so(tmp_path, capsys):
  def of_tokens(point):
    c = config({"replicas": 1, "lr": 1})
    c.eval.tokens = point["tokens"]
    return c

  grid = Grid("g", [{"tokens": n} for n in (100, 200)])
  driver = make_driver(Sweep(of_tokens, [grid]), tmp_path, Fake())
  finish(driver)
  cli.show_chart(Chart("", "tokens"), driver)
  said = "The runs differ in eval.tokens, so their losses per token cannot be compared"
  assert said in capsys.readouterr().out


def test_a_sweep_whose_cell_has_failed_ends_with_status_1(tmp_path):
  text = "from diloco.sweep.grid import Grid, Sweep\n"
  text += "get_sweep = lambda: Sweep(dict, [Grid('g', [{}])])"
  done = called(cli.main, sweep_of(tmp_path, text), f"--results={tmp_path}/r")
  assert done.returncode == 1
  assert "1 of 1 cells, 0 runs done, 0 running, 1 failed" in done.stderr


def test_show_lists_the_first_runs_and_changes_nothing(tmp_path):
  missing = tmp_path / "typo"
  sweep = f"--sweep={ROOT / 'configs' / 'ladder.py'}"
  export_ = (f"--export={tmp_path / 'out.csv'}", f"--results={missing}")
  assert "holds no runs" in refused(cli.main, *export_)
  lines = shown(cli.main, sweep, "--show", f"--results={missing}").splitlines()
  waiting = [x.split() for x in lines if x.startswith("waiting")]
  assert [x[2:5] for x in waiting] == [
    ["size=105", f"algorithm={algorithm}", f"replicas={m}"]
    for algorithm, m in [("data_parallel", 1), *(("diloco", m) for m in (1, 2, 4))]
  ]
  assert not missing.exists()
  refusing = Sweep(config, [Grid("g", [{"replicas": 3}], (Axis("lr", (1,)),))])
  driver = make_driver(refusing, tmp_path, Fake())
  assert driver.cells()[0].state == "failed"
  assert [plan.point["replicas"] for plan in driver.refused()] == [3]
  assert rows_of(tmp_path) == []
  with alone(tmp_path):  # A driver at work is no obstacle.
    shown(cli.main, sweep, "--show", f"--results={tmp_path}")


def test_a_sweep_is_shown_without_results_and_imports_what_lies_beside_it(tmp_path):
  (tmp_path / "beside_it.py").write_text("lr = 0.125")
  text = "import beside_it, fake_runs\n"
  text += "get_sweep = lambda: fake_runs.one_cell(beside_it.lr)"
  sweep = sweep_of(tmp_path, text)
  assert "lr=0.125" in shown(cli.main, sweep, "--show")
  assert "--results is missing; give the folder" in refused(cli.main, sweep)


def test_a_sweep_of_three_sizes_has_laws_by_one_command(tmp_path):
  def sized(point):
    c = config({"replicas": 2, "lr": point["lr"]})
    c.model.dim, c.model.num_heads, c.train.steps = point["width"], 2, 100
    return c

  def end(run, saved):
    summary, n = summary_of(saved), matrix_params(complete(saved).model)
    rate = math.log2(saved["inner"]["learning_rate"] * n / 2**8)
    loss = 20 * n**-0.1 + 0.02 * rate**2
    summary |= {"params": n, "tokens": 20 * n}
    summary["eval_loss"] = dict.fromkeys(summary["eval_loss"], loss)
    (run / "contents.json").write_text("{}")
    (run / "summary.json").write_text(json.dumps(summary))

  cells = [{"width": width} for width in (64, 128, 256)]
  lr = Axis("lr", powers(2, -9, -7), ratio=2)
  sweep = Sweep(sized, [Grid("sizes", cells, (lr,))])
  finish(make_driver(sweep, tmp_path, Fake(end)))
  line = r"diloco_M2 +(\w+) +A \S+ \[.*?\]  alpha (\S+)"
  laws = dict(re.findall(line, shown(cli.main, f"--results={tmp_path}", "--fit")))
  assert laws.keys() == {"loss", "learning_rate"}
  assert float(laws["loss"]) == pytest.approx(-0.1, abs=0.02)
  # The rates are powers of two.
  assert float(laws["learning_rate"]) == pytest.approx(-1, abs=0.3)


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--results="], "argument --results: it is empty; give a path"),
    (["--sweep="], "--sweep must be given, for example"),
    (["--export=a", "--show"], "argument --show: not allowed with argument --export"),
    (["--import=a"], "--import is 'a', but there is no such file"),
    (["--slurm_options=b=c"], "but --backend is local"),
    (["--backend=slurm", "--cores=2"], "is slurm; give --cpus-per-task"),
    (["--launch=true"], "--launch is 'true', but it lacks {flags}; write it"),
    (["--launch=ssh 'x {flags}"], "shell cannot read (No closing quotation); complete"),
    (["--launch=none {flags}"], "there is no command none here"),
    (["--launch=x {flags}", "--backend=slurm"], "but --backend is slurm; leave one"),
    (["--launch=true {flags}", "--vectorize=2"], "but --launch trains one run"),
    (
      ["--backend=slurm", "--slurm_options=--ntasks-per-node=8", "--vectorize=2"],
      "but of the tasks of --slurm_options one would train; leave one of them out",
    ),
    (["--workdir=s3://b/x"], "'s3://b/x', but there is no --launch; add it."),
    (["--launch=true {flags}", "--workdir=/x"], "'/x', no address such as s3://"),
  ],
)
def test_flags_that_do_not_fit_are_refused(tmp_path, monkeypatch, flags, message):
  monkeypatch.chdir(tmp_path)
  sweep = f"--sweep={ROOT}/configs/ladder.py"
  assert message in refused(cli.main, "--results=r", sweep, *flags)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("def get_sweep(:", "SyntaxError: "),
    ("def get_sweep():\n  return None", "get_sweep() returns None; return a Sweep"),
    (
      "from diloco.sweep.grid import Grid, Sweep\n"
      "def get_sweep():\n  return Sweep(dict, [Grid('g', [{}], like=lambda c: 1 / 0)])",
      "ZeroDivisionError: division by zero (",
    ),
    (
      "from diloco.sweep.grid import Grid, Sweep\n"
      "def get_sweep():\n  return Sweep(lambda p: 1 / 0, [Grid('g', [{'a': 1}])])",
      "at the point a=1 raises ZeroDivisionError: division by zero.",
    ),
  ],
)
def test_an_error_of_a_sweep_file_is_one_sentence(tmp_path, text, message):
  flags = [sweep_of(tmp_path, text), f"--results={tmp_path}/r", "--config.seed=3"]
  assert message in refused(cli.main, *flags)
  assert not (tmp_path / "r").exists()
