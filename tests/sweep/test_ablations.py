"""configs/ablations.py: grids, configs, equal bytes; and the chart of a sweep."""

import collections
import dataclasses
import math

import pytest
from fake_runs import Fake, finish, make_driver, make_sweep, summary_of

from diloco.config import command_line, resolve
from diloco.contrib import des_loc, warm_start
from diloco.contrib.fedpart import FedPart
from diloco.errors import ConfigError
from diloco.reproduce import comparison
from diloco.spec import sizes
from diloco.spec.shapes import num_params, parameters
from diloco.sweep.chart import EVALUATED, Chart
from diloco.sweep.grid import Axis, Grid
from diloco.sweep.load import load_sweep
from diloco.sweep.search import Search, search_all
from diloco.util import command, files

FILE = command.load_module("ablations", "get_sweep", "")
SCALES = [
  (name, scale)
  for name, ablation in FILE.ABLATIONS.items()
  for scale in ("small", "paper")
  if getattr(ablation, scale)
]


def points(argument: str) -> list[dict]:
  searches = search_all(load_sweep(f"ablations:{argument}").grids, lambda point: None)
  return [point for search in searches for point in search.points]


def values(argument: str, key: str) -> set:
  return {point[key] for point in points(argument)}


def test_a_seed_of_all_ablations_has_as_many_runs_as_the_papers_figures():
  """A cell that tunes its inner rate begins with one run."""
  found = collections.Counter[str]()
  for name, scale in SCALES:
    found[scale] += len(points(f"{name},scale={scale}"))
  assert found == {"small": 227, "paper": 269}


@pytest.mark.parametrize(("name", "scale"), SCALES)
def test_every_config_resolves(name, scale):
  text = ",text=arrays:/nowhere" if scale == "small" else ""  # A report needs no text.
  sweep = load_sweep(f"ablations:{name},scale={scale}{text}")
  found = points(f"{name},scale={scale}")
  # The outer rate changes no other field: its least value is enough.
  least = min(point.get("outer_lr", 0.0) for point in found)
  some = [point for point in found if point.get("outer_lr", least) == least]
  resolved = [resolve(sweep.config(point)) for point in some]
  # M=2 has the same fixed global and local batch.
  assert len({*resolved}) == len(some) - 2 * (name == "replicas")
  tokens = {c.train.tokens // c.tokens_per_step for c in resolved}
  assert tokens == {c.train.steps for c in resolved}
  for c in resolved:
    assert (c.model.num_layers == 18) == (scale == "paper")
    if scale == "small":
      assert 0.13e6 < num_params(c.model) < 0.15e6
      assert c.eval.test_tokens == c.eval.tokens == 65_536


def test_the_papers_grids_are_those_of_their_text():
  h, rates = {1, 5, 10, 30, 100, 300}, {0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0}
  assert values("outer_rate,scale=paper", "sync_every") == h
  assert values("outer_rate,scale=paper", "outer_lr") == rates
  assert values("outer_rate,scale=paper", "replicas") == {1, 2, 4, 8}
  assert values("overtrain,scale=paper", "overtrain") == {1, 4, 16}
  assert values("overtrain,scale=paper", "replicas") == {1, 2, 4}
  assert values("replicas,scale=paper", "replicas") == {2, 4, 8}
  taus = values("tau,scale=paper", "tau")
  assert (min(taus), max(taus)) == (1, 20)
  assert values("tau,scale=paper", "alpha") == {0.0, 0.5}
  assert values("tau_2", "alpha") == {0.5}


def test_each_point_changes_the_fields_of_its_figure():
  def c(**point):
    base = {"size": "small", "algorithm": "streaming", "replicas": 2, "seed": 0}
    return resolve(FILE.get_config(base | point))

  assert c(tau_2=5, alpha=0.5).overlap.taus == (1, 5)
  assert c(tau_2=1) == c(tau=1) == c(fedpart=False) == c(compressor="quantize", bits=4)
  assert c(fedpart=True).of(FedPart).on
  assert c(fragment=3, pattern="sequential").make_fragments()[0].layers == (0, 1, 2)
  for m in (2, 4, 8):
    fixed = c(replicas=m, fixed="global"), c(replicas=m, fixed="local")
    assert [x.train.batch_size for x in fixed] == [8, 4 * m]
    assert len({x.train.tokens for x in fixed}) == 1
    assert all(x.train.steps % x.sync_every == 0 for x in fixed)
  assert c(overtrain=16).train.tokens == 16 * c().train.tokens


def test_methods_of_later_papers_set_fields_of_any_config():
  c = resolve(command_line.load_config("methods:warm_start"))
  found = c.of(warm_start.WarmStart).steps, c.train.steps, c.model.dim
  assert found == (40, 400, 128)
  point = {"size": "small", "algorithm": "diloco", "replicas": 2, "seed": 0}
  c = resolve(FILE.get_config({**point, "method": "des_loc"}))
  assert c.sync_every == 30
  assert dataclasses.astuple(c.of(des_loc.DesLoc)) == (90, 180, "fp32")
  base = resolve(command_line.load_config("batch_32"))
  assert resolve(command_line.load_config("methods")) == base
  with pytest.raises(ConfigError, match="the method is 'pear'; write one of data_par"):
    command_line.load_config("methods:pear")


def test_overtrained_runs_of_the_papers_scale_are_evaluated_on_another_text():
  point = {"algorithm": "diloco", "replicas": 2, "seed": 0, "overtrain": 4}
  c = resolve(FILE.get_config({"size": "550M", **point}, family="chinchilla"))
  assert (c.data.source, c.data.eval_source) == ("tfds:dolma:1.0.0", "tfds:c4/en:3.1.0")
  c = resolve(FILE.get_config({"size": "small", **point}, text="files:/text"))
  assert (c.data.source, c.data.eval_source) == ("files:/text", "")


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_dropped_values_take_the_bytes_of_the_number_formats(scale):
  sweep, found = load_sweep(f"ablations:compression,scale={scale}"), {}
  for point in points(f"compression,scale={scale}"):
    c = resolve(sweep.config(point))
    shapes = [f.shapes(parameters(c.model)) for f in c.make_fragments()]
    sent = sum(sizes.payload_bytes(c.wire, fragment) for fragment in shapes)
    found[point["compressor"], point["bits"]] = sent
  for (_, bits), sent in found.items():
    assert 0.995 * found["quantize", bits] < sent <= found["quantize", bits]
  assert found["quantize", 32] > 7.5 * found["quantize", 4]


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("", r"the ablation is ''; write one of algorithms, fragments, "),
    ("taus", "the ablation is 'taus'; write one of"),
    ("tau,seeds=0", "'tau,seeds=0'; give at least one seed"),
    ("tau,size=1B", "'tau,size=1B'; give .* size only with scale=paper"),
    ("tau,scale=paper,text=sotu", "text only with scale=small"),
    ("tau,scale=big", "'scale=big'; write scale=small|paper"),
    ("tau,scale=paper,size=1M", "the scale is '1M'"),
    ("batch,scale=paper", "batch has no scale=paper; --sweep=ladder:size=550M"),
  ],
)
def test_a_wrong_argument_is_one_sentence(argument, message):
  def first_config():
    sweep = load_sweep(f"ablations:{argument}")
    return sweep.config(sweep.grids[0].cells[0])

  with pytest.raises(ConfigError, match=message):
    first_config()


def test_batches_of_diloco_tune_the_outer_rate_too_and_later_seeds_take_it():
  def loss(point):
    far = abs(point.get("outer_lr", 0.4) - 0.4)
    return abs(math.log2(point["lr"] / 2.0**-6)) + far

  searches = search_all(load_sweep("ablations:batch,seeds=2").grids, loss)
  for s in searches:
    assert (s.state, s.best["lr"]) == ("interior", 2.0**-6)
    plain = s.cell["algorithm"] == "data_parallel"
    assert s.best.get("outer_lr") == (None if plain else 0.4)
    if s.cell["seed"] > 0:  # It takes what the first seed chose.
      assert s.points == [s.best]
  assert {s.cell["seed"] for s in searches} == {0, 1, 2}


def test_the_best_outer_momentum_is_tuned_with_the_outer_rate():
  loss = lambda point: abs(point["tuned_momentum"] - 0.7) + abs(point["outer_lr"] - 0.2)
  searches = search_all(load_sweep("ablations:outer_rate_best,seeds=2").grids, loss)
  assert {s.cell["sync_every"] for s in searches} == {1, 10, 100}
  for s in searches:
    assert s.state == "interior"
    assert (s.best["tuned_momentum"], s.best["outer_lr"]) == (0.7, 0.2)


def test_a_chart_reports_the_test_loss_of_the_run_that_the_other_loss_chose(tmp_path):
  def end(run, saved):
    summary = summary_of(saved)
    rate = saved["inner"]["learning_rate"]
    test = {"outer": 10 + rate, "mean": 20 + rate, "first": 30 + rate}
    files.write_json(run / "summary.json", {**summary, "test_loss": test})

  driver = make_driver(make_sweep(), tmp_path, Fake(end))
  finish(driver)
  own = Chart("t", "replicas", y=(("loss", "loss"), ("lr", "best rate")))
  found = comparison.frame(own, driver.best_rows())
  # `fake_runs` has its least loss, 3, at the rate 2^-8; the least test loss is at 2^-9.
  assert found["choice"].tolist() == [3, 3]
  assert found["loss"].tolist() == [10 + 2.0**-8] * 2
  assert found["lr"].tolist() == pytest.approx([2.0**-8] * 2, rel=1e-5)
  three = comparison.frame(Chart("t", EVALUATED), driver.best_rows())
  wanted = {"first replica": 30, "mean of replicas": 20, "outer": 10}
  for name, loss in wanted.items():
    some = three[three[EVALUATED] == name]
    assert some["loss"].tolist() == [loss + 2.0**-8] * 2


def ended(cell, loss, test_loss=None, accuracy=None, **tuned):
  """A cell whose search has ended, and the row of its best run."""
  found = Search(Grid("g", [cell]), cell, "interior", best={**cell, **tuned})
  row = {"loss": loss, "test_loss": test_loss, "accuracy": accuracy, "bytes_sent": 7}
  return found, row | {"tokens": 14}


def test_a_figure_has_another_column_along_x_than_the_table():
  own = Chart("t", "case", ("method",), "bytes", True, along="per_token")
  cells = [ended({"case": c, "method": m}, 2.0) for c, m in (("a", "x"), ("b", "y"))]
  for (_, row), sent in zip(cells, (28, 7), strict=True):
    row["bytes_sent"] = sent
  table = comparison.frame(own, cells)
  assert table["case"].tolist() == ["a", "b"]
  (panel,) = comparison.figure(own, table).axes
  points = [container.lines[0].get_xdata().tolist() for container in panel.containers]
  assert points == [[2.0], [0.5]]
  with pytest.raises(ValueError, match="'kilobytes', which no cell"):
    Chart("t", "case", along="kilobytes").check(["case"])


def test_a_chart_gives_mean_and_deviation_over_seeds(tmp_path):
  runs = [("a", 1, 0, 2.0), ("a", 1, 1, 4.0)]
  runs += [("b", 1, 0, 3.0), ("b", 1, 1, 5.0), ("b", 2, 1, 6.0)]
  own = Chart("title", "x", ("compressor",), log=True)
  cells = [ended({"compressor": m, "x": x, "seed": s}, y) for m, x, s, y in runs]
  table = comparison.frame(own, cells)
  assert comparison.lines(own, table)[2:] == [
    "| a | 1 | 2 | 3.0000 ± 1.4142 | +0.00 ± 0.00 | 7 |",
    "| b | 1 | 2 | 4.0000 ± 1.4142 | +37.50 ± 17.68 | 7 |",
    "| b | 2 | 1 | 6.0000 | +50.00 | 7 |",
  ]
  comparison.draw(own, table, tmp_path / "a.png")
  assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
  nothing = comparison.frame(own, [])
  assert comparison.lines(own, nothing) == ["no cell has a result yet"]


def test_a_chart_compares_with_another_point_seed_by_seed():
  runs = [("a", 0, 2.0), ("a", 1, 4.0), ("b", 0, 2.2), ("b", 1, 4.8), ("c", 1, 4.0)]
  own = Chart("t", "case", y=(("more", "above (%)"),), against="against")
  cells = [
    ended({"case": case, "against": "a", "seed": seed}, 9.0, loss)
    for case, seed, loss in runs
  ]
  table = comparison.frame(own, cells)
  assert table["more"].tolist() == pytest.approx([0, 0, 10, 20, 0])
  assert comparison.lines(own, table)[2:] == [
    "| a | 2 | 3.0000 ± 1.4142 | a | +0.00 ± 0.00 | 7 |",
    "| b | 2 | 3.5000 ± 1.8385 | a | +15.00 ± 7.07 | 7 |",
    "| c | 1 | 4.0000 | a | +0.00 | 7 |",
  ]
  (panel,) = comparison.figure(own, table).axes
  shown = [label.get_text() for label in panel.get_yticklabels()]
  assert shown == ["c", "b"]  # Not the point that is compared with itself.


def test_a_chart_compares_with_data_parallel_at_the_same_size():
  def cell(size, m, **more):
    algorithm = "diloco" if m else "data_parallel"
    return {"size": size, "algorithm": algorithm, "replicas": m or 1, **more}

  y = (("loss", "nats"), ("more", "above (%)"))
  own = Chart("t", "size", ("algorithm", "replicas"), y=y, against=comparison.PLAIN)
  cells = [
    ended(cell(2, 2), 2.2),
    ended(cell(2, 0), 9.0, lr=1),  # The next grid finds a better point of the cell.
    ended(cell(2, 0), 2.0, lr=2),
    ended(cell(2, 0), 3.0, lr=3),
    ended(cell(4, 0), 1.0),
    ended(cell(4, 2), 1.2),
    ended(cell(4, 0, seed=1), 2.0),
    ended(cell(4, 2, seed=1), 2.2),
    ended(cell(8, 2), 1.0),  # There is no data-parallel of this size.
  ]
  table = comparison.frame(own, cells)
  assert table["seed"].tolist() == [0, 0, 0, 0, 1, 1, 0]
  assert table["lr"].tolist()[1] == 2
  assert table["more"].tolist()[:-1] == pytest.approx([10, 0, 0, 20, 0, 10])
  lines = comparison.lines(own, table)
  assert "| DiLoCo, M=2 | 8 | 1 | 1.0000 | - | 7 |" in lines
  assert "above data-parallel (%)" in lines[0]
  assert "| DiLoCo, M=2 | 4 | 2 | 1.7000 ± 0.7071 | +15.00 ± 7.07 | 7 |" in lines
  panel, _ = comparison.figure(own, table).axes
  named = [container.get_label() for container in panel.containers]
  assert named == ["DiLoCo, M=2", "data-parallel"]


def test_the_run_that_tuned_is_not_reported_beside_those_that_repeat_it():
  tuned = Grid("t", [{"x": 1, "seed": 0}, {"x": 2, "seed": 0}], [Axis("lr", (0.1, 1))])
  seeds = [{"x": 1, "seed": 1}, {"x": 1, "seed": 2}]
  repeats = Grid("r", seeds, (), lambda cell: {**cell, "seed": 0})
  losses = {(1, 0): 2.0, (2, 0): 2.5, (1, 1): 3.0, (1, 2): 4.0}
  cells = [
    (
      Search(grid, cell, "interior", best={**cell, "lr": 1}),
      ended({}, losses[cell["x"], cell["seed"]])[1],
    )
    for grid in (tuned, repeats)
    for cell in grid.cells
  ]
  table = comparison.frame(Chart("t", "x"), cells)
  # Nothing repeats x = 2 yet.
  assert table[["x", "seed"]].values.tolist() == [[2, 0], [1, 1], [1, 2]]


def test_losses_on_two_texts_are_not_compared():
  own = Chart("t", "x")
  cells = [ended({"x": 1}, 2.0, 2.5), ended({"x": 2}, 3.0)]
  assert comparison.frame(own, cells)["loss"].tolist() == [2.0, 3.0]


def test_bars_leave_out_what_all_cells_of_a_seed_share():
  losses = {(1, 0): 2.0, (2, 0): 2.3, (1, 1): 4.0, (2, 1): 4.1}
  own = Chart("t", "x")
  cells = [ended({"x": x, "seed": seed}, loss) for (x, seed), loss in losses.items()]
  table = comparison.frame(own, cells)
  drawn = comparison.spread(own, comparison.paired(own, table))
  assert drawn["mean"].tolist() == pytest.approx([3.0, 3.2])
  # The differences are 0.3 and 0.1, half of each on either side.
  assert drawn["std"].tolist() == pytest.approx([0.1 / 2**0.5 * 2**0.5] * 2)
  part = table[:-1]
  assert comparison.paired(own, part) is part


def test_a_chart_has_the_accuracies_of_the_runs_that_have_one():
  own = Chart("t", "x", y=(("loss", "nats"), ("accuracy", "accuracy (%)")))
  scores = {(1, 0): 0.5, (1, 1): 0.52, (2, 0): 0.25, (2, 1): None}
  cells = [
    ended({"x": x, "seed": seed}, 2.0, accuracy=a) for (x, seed), a in scores.items()
  ]
  table = comparison.frame(own, cells)
  lines = comparison.lines(own, table)
  assert lines[0].endswith("| bytes sent | accuracy (%) |")
  assert lines[2].endswith("| 7 | 51.00 ± 1.41 |")
  assert lines[3].endswith("| 7 | 25.00 |")
  assert len(comparison.figure(own, table).axes) == 2
  none = table.assign(accuracy=math.nan)
  assert len(comparison.figure(own, none).axes) == 1
  assert comparison.lines(own, none)[0].endswith("| bytes sent |")


def test_curves_are_named_as_in_the_other_figures():
  name = comparison.curve
  assert name({"algorithm": "data_parallel", "replicas": 1}) == "data-parallel"
  assert name({"algorithm": "diloco", "replicas": 4}) == "DiLoCo, M=4"
  assert name({"algorithm": "streaming", "fixed": "local"}) == "streaming, fixed=local"
  assert name({"compressor": "topk"}) == "topk"


def test_a_chart_says_its_words_instead_of_values():
  words = {"frozen": {False: "all trained", True: "one trained"}, "x": {1: "one"}}
  own = Chart("t", "frozen", ("x",), words=words)
  cells = [ended({"x": 1, "frozen": f}, 2.0 + f) for f in (False, True)]
  table = comparison.frame(own, cells)
  assert table["frozen"].tolist() == [False, True]
  lines = comparison.lines(own, table)
  assert lines[2:] == [
    "| one | all trained | 1 | 2.0000 | +0.00 | 7 |",
    "| one | one trained | 1 | 3.0000 | +50.00 | 7 |",
  ]
  (panel,) = comparison.figure(own, table).axes
  shown = [label.get_text() for label in panel.get_yticklabels()]
  assert shown == ["all trained", "one trained"]
