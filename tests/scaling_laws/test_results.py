"""A table of one's own runs: best of each cell, laws, and what can be wrong with it."""

import csv
import dataclasses
import json
import re

import pytest

from diloco.scaling_laws import __main__ as cli
from diloco.scaling_laws import cells, results
from diloco.scaling_laws.fits import PowerLaw

LOSS, RATE = PowerLaw(20, -0.1, 0.02), PowerLaw(10, -0.5, 0.1)
BATCH = PowerLaw(2, 0.5, 0.3)
SIZES = (1e6, 1e7, 1e8)


def make_runs(replicas=(1, 2, 4), algorithm="diloco"):
  """Runs around the optima of known laws; the loss is a bowl in all three rates."""
  found = []
  for n in SIZES:
    for m in replicas:
      for i in (-1, 0, 1):
        for j in (-1, 0, 1):
          for k in (-1, 0, 1) if algorithm != "data_parallel" else (0,):
            found.append(
              cells.Run(
                algorithm,
                n,
                m,
                LOSS(n, m) * (1 + 0.01 * (i**2 + j**2 + k**2)),
                RATE(n, m) * 2 ** (i / 2),
                BATCH(n, m) * 2.0**j,
                0.6 + 0.2 * k if algorithm != "data_parallel" else 0.0,
              )
            )
  return found


def write(path, rows):
  with open(path, "w", newline="") as file:
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
  return str(path)


def as_rows(runs):
  rows = []
  for run in runs:
    row = dataclasses.asdict(run)
    rows.append({**row, "batch_sequences": row.pop("batch") / 64, "seq_len": 64})
  return rows


def test_laws_are_recovered_from_a_full_sweep():
  laws, problems = results.fit_runs(make_runs() + make_runs((1,), "data_parallel"))
  assert problems == []
  names = ["data_parallel", *(f"diloco_M{m}" for m in (1, 2, 4)), "diloco_joint"]
  assert list(laws) == names
  joint = laws["diloco_joint"]
  pairs = ((joint.loss, LOSS), (joint.learning_rate, RATE), (joint.batch, BATCH))
  for found, true in pairs:
    assert dataclasses.astuple(found.law) == pytest.approx(dataclasses.astuple(true))
  assert laws["diloco_M2"].batch(1e9) == pytest.approx(BATCH(1e9, 2))


def test_the_best_batch_lies_between_powers_of_two():
  runs = [
    cells.Run(
      "diloco", 1e6, 2, 3 + (i - 10.3) ** 2 / 100 + j**2, 0.01 + j / 1e3, 2.0**i
    )
    for i in (9, 10, 11)
    for j in (-1, 0, 1)
  ]
  best = cells.best_of_cells(runs)["diloco", 1e6, 2]
  assert best.run.batch == 2**10
  assert best.batch == pytest.approx(2**10.3)
  assert best.problems == ()


def test_a_best_point_on_the_edge():
  runs = [r for r in make_runs() if not (r.params == 1e7 and r.batch > BATCH(1e7, 4))]
  runs = [r for r in runs if r.replicas == 4]
  message = (
    "diloco at N = 1e.07, M = 4: the best batch, .*, is the largest of 2 tried with"
    " learning_rate .* and outer_learning_rate 0.6; extend the grid to larger ones"
    " until the best is interior. .1 more"
  )
  with pytest.raises(ValueError, match=message):
    results.fit_runs(runs)
  laws, problems = results.fit_runs(runs, strict=False)
  assert len(problems) == 2
  assert laws["diloco_M4"].loss.law.alpha == pytest.approx(LOSS.alpha)


def test_neighbours_are_those_along_the_axis_through_the_best():
  # The best rate has a larger and a smaller one, but the larger at another batch only.
  def run(rate, batch, loss):
    return cells.Run("data_parallel", 1e6, 1, loss, rate, batch)

  runs = [run(1, 8, 3.1), run(2, 8, 3.0), run(4, 16, 3.2), run(2, 4, 3.1)]
  (best,) = cells.best_of_cells(runs).values()
  rate, batch = best.problems
  assert "the best learning_rate, 2, is the largest of 2 tried with batch 8;" in rate
  assert "the best batch, 8, is the largest of 2 tried with learning_rate 2;" in batch
  runs = [run(2, 8, 3.0), run(4, 16, 3.2), run(1, 4, 3.1)]
  (best,) = cells.best_of_cells(runs).values()
  assert "the only one tried with batch 8; add smaller and larger" in best.problems[0]
  runs = [
    run(a, b, 3 + abs(a - 2) + abs(b - 8))
    for a, b in ((1, 8), (2, 8), (3, 8), (2, 4), (2, 16))
  ]
  (best,) = cells.best_of_cells(runs).values()
  assert best.problems == ()


@pytest.mark.parametrize("end", [0, 2])
def test_the_outer_rate_has_edges_too(end):
  rates = [0.6 + 0.2 * k for k in (-1, 0, 1)]
  keep = [rates[1], rates[end]]
  runs = [r for r in make_runs((2,)) if r.outer_learning_rate in keep]
  side = (
    "largest of 2 tried with .* larger",
    "",
    "smallest of 2 tried with .* smaller",
  )
  with pytest.raises(
    ValueError, match=f"best outer_learning_rate, 0.6, is the {side[end]}"
  ):
    results.fit_runs(runs)


@pytest.mark.parametrize("field", cells.AXES)
def test_a_hyperparameter_that_was_not_swept(field):
  best = {(r.params, r.replicas): r for r in sorted(make_runs(), key=lambda r: -r.loss)}
  keep = lambda r: getattr(r, field) == getattr(best[r.params, r.replicas], field)
  runs = [r for r in make_runs() if keep(r)]
  message = rf"diloco at N = 1e\+06, M = 1: {field} was not swept, all .* add runs with"
  with pytest.raises(ValueError, match=message):
    results.fit_runs(runs)
  laws, problems = results.fit_runs(runs, strict=False)
  assert sum("was not swept" in p for p in problems) == 9
  for name, law in laws.items():
    assert law.loss.law.alpha == pytest.approx(LOSS.alpha)
    assert (law.learning_rate is None) == (field == "learning_rate")
    assert (law.batch is None) == (field == "batch")
    said = [p for p in problems if f"{name} has no law of the {field}" in p]
    assert len(said) == (field != "outer_learning_rate")
  # Swept at two sizes is enough, and the third does not enter.
  runs = [r for r in make_runs() if r.params > 1e6 or keep(r)]
  laws, problems = results.fit_runs(runs, strict=False)
  assert len(problems) == 3
  if field == "batch":
    assert laws["diloco_M2"].batch.law.alpha == pytest.approx(BATCH.alpha)
    assert laws["diloco_M2"].batch.spare == 0


def test_a_table_without_outer_rates():
  runs = [r for r in make_runs() if r.outer_learning_rate == 0.6]
  _, problems = results.fit_runs(
    [dataclasses.replace(r, outer_learning_rate=0.0) for r in runs]
  )
  assert problems == []


def test_cells_on_a_diagonal_have_no_joint_law():
  runs = [
    r for r in make_runs() if r.params == {1: 1e6, 2: 1e7, 4: 1e8}[r.replicas]
  ] + make_runs((1,), "data_parallel")
  laws, problems = results.fit_runs(runs, strict=False)
  assert list(laws) == ["data_parallel"]
  assert any("N and M vary together; add a second M at one N" in p for p in problems)


def test_a_missing_cell_is_named():
  runs = [r for r in make_runs() if (r.params, r.replicas) != (1e8, 2)]
  with pytest.raises(ValueError, match=r"diloco has no run at N = 1e.08, M = 2"):
    results.fit_runs(runs)
  laws, problems = results.fit_runs(runs, strict=False)
  assert len(problems) == 1
  assert laws["diloco_joint"].loss.law.beta == pytest.approx(LOSS.beta)


def test_duplicates_are_named():
  runs = make_runs()
  with pytest.raises(ValueError, match=r"two runs of diloco at N = 1e.06, M = 1 have"):
    cells.best_of_cells([*runs, runs[0]])


@pytest.mark.parametrize(
  ("field", "value"), [("loss", 0.0), ("loss", float("nan")), ("learning_rate", -1.0)]
)
def test_numbers_without_a_logarithm(field, value):
  runs = make_runs()
  runs[5] = dataclasses.replace(runs[5], **{field: value})
  with pytest.raises(ValueError, match=f"{field} is .* leave the run out or repeat it"):
    results.fit_runs(runs)


def test_too_few_sizes():
  runs = [r for r in make_runs() if r.params == 1e6]
  with pytest.raises(
    ValueError, match=r"has 1 size, N = 1e.06; a law needs at least 2"
  ):
    results.fit_runs(runs)
  with pytest.raises(ValueError, match="there are no runs; add some"):
    results.fit_runs([])


def test_a_loss_that_does_not_fall_with_n_is_no_law():
  rising = [
    dataclasses.replace(r, loss=r.loss * (r.params / SIZES[0]) ** 0.2)
    for r in make_runs((2,))
  ]
  with pytest.raises(
    ValueError, match=r"loss of diloco_M2 does not fall with N \(alpha"
  ):
    results.fit_runs(rising)
  laws, problems = results.fit_runs(rising, strict=False)
  assert laws["diloco_M2"].loss.law.alpha > 0
  assert len(problems) == 1


def test_csv_round_trip_filters_and_reports(tmp_path, capsys):
  rows = [{**row, "status": "done", "sync_every": 30} for row in as_rows(make_runs())]
  rows.append({**rows[0], "sync_every": "100", "loss": 1.0})
  rows.append({**rows[0], "status": "failed", "loss": ""})
  path = write(tmp_path / "runs.csv", rows)
  with pytest.raises(ValueError, match="two runs of"):
    results.fit_runs(cells.read_csv(path))
  runs = cells.read_csv(path, {"sync_every": "30"})
  assert len(runs) == len(make_runs())
  assert runs[0].batch == pytest.approx(make_runs()[0].batch)
  assert cli.main(["fit", path, "--where=sync_every=30"]) == 0
  text = capsys.readouterr().out
  assert "\ndiloco_joint      loss           1: 0.0000  2: 0.0000  4: 0.0000\n" in text
  line = text[: text.index("|log y")].splitlines()[-3]
  assert line.startswith("diloco_joint      loss")
  assert "A 20 [20, 20]" in line
  assert cli.main(["fit", path]) == 2
  assert capsys.readouterr().err.startswith("error: two runs of diloco")


def test_what_laws_miss_at_the_largest_size_is_told(tmp_path, capsys):
  # The last point lies e^0.1 above the line through the others.
  runs = [
    dataclasses.replace(r, loss=r.loss * (1.1051709 if r.params == 1e8 else 1))
    for r in make_runs()
  ]
  path = write(tmp_path / "runs.csv", as_rows(runs))
  assert cli.main(["fit", path, "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  off = pytest.approx(0.1, abs=1e-6)
  assert found["diloco_M2"]["left_out"]["loss"] == {"1": off}
  assert found["diloco_joint"]["left_out"]["loss"] == {"1": off, "2": off, "4": off}
  two = [r for r in runs if r.params < 1e8]
  write(tmp_path / "runs.csv", as_rows(two))
  assert cli.main(["fit", path, "--json"]) == 0
  assert json.loads(capsys.readouterr().out)["diloco_M2"]["left_out"] == {}


def test_a_quantity_without_a_law_is_null(tmp_path, capsys):
  runs = [r for r in make_runs((2,)) if r.batch == BATCH(r.params, 2)]
  path = write(tmp_path / "runs.csv", as_rows(runs))
  assert cli.main(["fit", path, "--any"]) == 0
  out = capsys.readouterr().out
  assert re.search(r"diloco_M2 +batch +-\n", out)
  assert "note: diloco_M2 has no law of the batch, which was swept at 0 size(s)" in out
  assert cli.main(["fit", path, "--any", "--json"]) == 0
  assert json.loads(capsys.readouterr().out)["diloco_M2"]["batch"] is None


def test_laws_of_too_few_points_to_resample_keep_students_t(tmp_path, capsys):
  # The rate is swept at three of five sizes.
  runs = [
    cells.Run("diloco", n, 2, 3 + i / 50 + j**2, 0.01 * 2.0**j, 2**16)
    for i, n in enumerate((1e6, 2e6, 4e6, 8e6, 1.7e7))
    for j in ((-1, 0, 1) if i < 3 else (0,))
  ]
  path = write(tmp_path / "runs.csv", as_rows(runs))
  found = []
  for flags in ([], ["--bootstrap=200"]):
    assert cli.main(["fit", path, "--any", "--json", *flags]) == 0
    found.append(json.loads(capsys.readouterr().out)["diloco_M2"])
  student, resampled = found
  assert resampled["learning_rate"] == student["learning_rate"]
  assert resampled["loss"] != student["loss"]
  assert cli.main(["fit", path, "--any", "--bootstrap=200"]) == 0
  said = capsys.readouterr().out
  assert "note: the learning_rate of diloco_M2 has too few points" in said


def test_two_sizes_have_no_interval(tmp_path, capsys):
  runs = [r for r in make_runs((1,)) if r.params < 1e8]
  path = write(tmp_path / "runs.csv", as_rows(runs))
  assert cli.main(["fit", path]) == 0
  assert "alpha -0.1 [-]" in capsys.readouterr().out
  assert cli.main(["fit", path, "--json"]) == 0
  out = capsys.readouterr().out
  assert "NaN" not in out
  alpha = json.loads(out)["diloco_M1"]["loss"]["alpha"]
  assert alpha == {"value": pytest.approx(-0.1), "interval": None}


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"loss": "high"}, "line 2 of .* has 'high' as loss; give a number"),
    ({"loss": "nan"}, "line 2 of .* has 'nan' as loss; give a number"),
    ({"replicas": "inf"}, "line 2 of .* has 'inf' as replicas; give a number"),
    ({"replicas": "2.5"}, "line 2 of .* has '2.5' as replicas; give a whole number"),
    ({"learning_rate": ""}, "line 2 of .* has nothing as learning_rate; fill it in"),
    ({"batch_sequences": ""}, "no column batch_tokens; .*runs.csv has algorithm, par"),
    ({"algorithm": ""}, "line 2 of .* has nothing as algorithm"),
  ],
)
def test_csv_errors_name_the_line(tmp_path, change, message):
  rows = as_rows(make_runs())
  rows[0] |= change
  with pytest.raises(ValueError, match=message):
    cells.read_csv(write(tmp_path / "runs.csv", rows))


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path):
  rows = [{k: v for k, v in r.items() if k != "params"} for r in as_rows(make_runs())]
  with pytest.raises(
    ValueError, match=r"no column params; .*runs.csv has algorithm, re"
  ):
    cells.read_csv(write(tmp_path / "runs.csv", rows))


@pytest.mark.parametrize("where", [None, {"seed": "0"}])
@pytest.mark.parametrize(("more", "by"), [("", -1), (",0,1", 2)])
def test_rows_of_another_length(tmp_path, where, more, by):
  rows = [{**row, "status": "done", "seed": 0} for row in as_rows(make_runs())]
  path = tmp_path / "runs.csv"
  write(path, rows)
  lines = path.read_text().splitlines()
  # The last line without its last value, or with two too many.
  lines[-1] = lines[-1] + more if more else lines[-1].rpartition(",")[0]
  path.write_text("\n".join(lines))
  count = len(rows[0])
  message = rf"line {len(lines)} of .* has {count + by} values for {count} columns"
  with pytest.raises(ValueError, match=message):
    cells.read_csv(path, where)


def test_a_file_that_begins_with_a_byte_order_mark(tmp_path):
  path = tmp_path / "runs.csv"
  write(path, as_rows(make_runs()))
  path.write_text(path.read_text(), encoding="utf-8-sig")
  assert len(cells.read_csv(path)) == len(make_runs())


def test_a_filter_that_leaves_nothing_is_named(tmp_path, capsys):
  rows = [{**row, "seed": i % 2} for i, row in enumerate(as_rows(make_runs()))]
  path = write(tmp_path / "runs.csv", rows)
  assert cli.main(["fit", path, "--where=seq_len=64.0,seed=7"]) == 2
  said = capsys.readouterr().err
  assert "has seq_len=64.0,seed=7: seed is '0', '1'; choose among these." in said
  with pytest.raises(ValueError, match="has no finished run"):
    cells.read_csv(write(tmp_path / "f.csv", [{**rows[0], "status": "failed"}]))


def test_where_errors(tmp_path):
  path = write(tmp_path / "runs.csv", as_rows(make_runs()))
  with pytest.raises(ValueError, match="names the column 'seed', but"):
    cells.read_csv(path, {"seed": "0"})
  with pytest.raises(ValueError, match="--where has 'seed'; write name=value"):
    cli.fit(cli.make_parser().parse_args(["fit", "runs.csv", "--where=seed"]))
