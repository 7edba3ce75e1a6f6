"""Laws of your own runs: the best run of each cell, the fits and all refusals."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pandas as pd
import pytest
from running import refused, shown

from diloco.scaling_laws import __main__ as cli
from diloco.scaling_laws import cells, results, runs
from diloco.scaling_laws.fits import PowerLaw

LOSS, RATE = PowerLaw(20, -0.1, 0.02), PowerLaw(10, -0.5, 0.1)
BATCH = PowerLaw(2, 0.5, 0.3)
SIZES = (1e6, 1e7, 1e8)


def make_run(algorithm, params, replicas, loss, rate, batch, outer=0.0) -> dict:
  found = {"algorithm": algorithm, "params": params, "replicas": replicas, "loss": loss}
  found |= {"learning_rate": rate, "batch": batch, "outer_learning_rate": outer}
  return found | {"tokens": 0.0}


def make_runs(replicas=(1, 2, 4), algorithm="diloco") -> pd.DataFrame:
  """Makes runs around the optima of known laws, where the loss is least."""
  plain = algorithm == "data_parallel"
  return pd.DataFrame(
    make_run(
      algorithm,
      n,
      m,
      LOSS(n, m) * (1 + 0.01 * (i**2 + j**2 + k**2)),
      RATE(n, m) * 2 ** (i / 2),
      BATCH(n, m) * 2.0**j,
      0.0 if plain else 0.6 + 0.2 * k,
    )
    for n, m in itertools.product(SIZES, replicas)
    for i, j, k in itertools.product(
      (-1, 0, 1), (-1, 0, 1), (0,) if plain else (-1, 0, 1)
    )
  )


def at_best_batch(table: pd.DataFrame) -> np.ndarray:
  """Whether each run has the batch at the optimum of its cell."""
  pairs = zip(table["params"], table["replicas"])
  return np.isclose(table["batch"], [BATCH(n, m) for n, m in pairs])


def as_file(table: pd.DataFrame) -> pd.DataFrame:
  """Returns the columns of an exported file."""
  columns = table.drop(columns="batch")
  return columns.assign(batch_sequences=table["batch"] / 64, seq_len=64)


def write(path, table: pd.DataFrame) -> str:
  table.to_csv(path, index=False)
  return str(path)


def despite(message: str, table: pd.DataFrame) -> tuple[dict, list[str]]:
  """The laws and problems of runs that are refused with this message without --any."""
  with pytest.raises(ValueError, match=message):
    results.fit_runs(table)
  return results.fit_runs(table, strict=False)


def test_laws_are_recovered_from_a_full_sweep():
  plain = make_runs((1,), "data_parallel")
  laws, problems = results.fit_runs(pd.concat([make_runs(), plain], ignore_index=True))
  assert problems == []
  names = ["data_parallel", *(f"diloco_M{m}" for m in (1, 2, 4)), "diloco_joint"]
  assert list(laws) == names
  joint = laws["diloco_joint"]
  pairs = ((joint.loss, LOSS), (joint.learning_rate, RATE), (joint.batch, BATCH))
  for found, true in pairs:
    assert dataclasses.astuple(found.law) == pytest.approx(dataclasses.astuple(true))
  assert laws["diloco_M2"].batch(1e9) == pytest.approx(BATCH(1e9, 2))


def test_the_best_batch_lies_between_powers_of_two():
  table = pd.DataFrame(
    make_run("diloco", 1e6, 2, 3 + (i - 10.3) ** 2 / 100 + j**2, 0.01 + j / 1e3, 2.0**i)
    for i in (9, 10, 11)
    for j in (-1, 0, 1)
  )
  (best,) = cells.best_of_cells(table).itertuples()
  assert best.loss == pytest.approx(3 + 0.3**2 / 100)
  assert best.batch == pytest.approx(2**10.3)
  assert best.problems == []


def test_a_best_point_on_the_edge_is_refused():
  table = make_runs((4,))
  table = table[~((table["params"] == 1e7) & (table["batch"] > BATCH(1e7, 4)))]
  message = (
    "diloco at N = 1e.07, M = 4: the best batch, .*, is the largest of 2 tried with"
    " learning_rate .* and outer_learning_rate 0.6; extend the grid to larger ones"
    " until the best is interior. To fit despite this and 1 more: --any."
  )
  laws, problems = despite(message, table)
  assert len(problems) == 2
  assert laws["diloco_M4"].loss.law.alpha == pytest.approx(LOSS.alpha)


def test_a_run_that_failed_bounds_the_search(tmp_path):
  """A failed run has no N; it has that of a finished run of its model."""
  table = as_file(make_runs((1,), "data_parallel")).assign(status="done")
  table["matrix_params"] = table["params"]
  high = table["learning_rate"] > table["params"].map(lambda n: RATE(n, 1) * 1.1)
  path = write(tmp_path / "runs.csv", table[~high])
  with pytest.raises(ValueError, match="is the largest of 2 tried with batch"):
    results.fit_runs(runs.read(path))
  table.loc[high, ["status", "params", "loss"]] = ["failed", np.nan, np.nan]
  _, problems = results.fit_runs(runs.read(write(tmp_path / "runs.csv", table)))
  assert problems == []


def test_only_runs_with_the_best_values_on_the_other_axes_are_neighbours():
  def problems(*points):
    table = pd.DataFrame(
      make_run("data_parallel", 1e6, 1, loss, rate, batch)
      for rate, batch, loss in points
    )
    return cells.best_of_cells(table)["problems"].iloc[0]

  # The best rate has a larger and a smaller one, but the larger at another batch only.
  rate, batch = problems((1, 8, 3.1), (2, 8, 3.0), (4, 16, 3.2), (2, 4, 3.1))[:2]
  assert "the best learning_rate, 2, is the largest of 2 tried with batch 8;" in rate
  assert "the best batch, 8, is the largest of 2 tried with learning_rate 2;" in batch
  first, *_ = problems((2, 8, 3.0), (4, 16, 3.2), (1, 4, 3.1))
  assert "the only one tried with batch 8; add smaller and larger" in first
  cross = ((1, 8), (2, 8), (3, 8), (2, 4), (2, 16))
  assert problems(*((a, b, 3 + abs(a - 2) + abs(b - 8)) for a, b in cross)) == []


def test_a_value_that_all_runs_share_is_a_choice():
  full = make_runs((2,))
  table = full[full["outer_learning_rate"] == 0.6].assign(batch=4096.0)
  table = table.drop_duplicates(cells.CELL + cells.AXES)
  laws, problems = results.fit_runs(table)
  assert problems == []
  assert (laws["diloco_M2"].batch, laws["diloco_M2"].outer_rates) == (None, {2: 0.6})


def test_a_note_says_that_the_rate_was_not_tuned_at_other_batches(tmp_path):
  full = make_runs((2,))
  best_rate = np.isclose(full["learning_rate"], [RATE(n, 2) for n in full["params"]])
  cross = full[at_best_batch(full) | best_rate]
  path = write(tmp_path / "runs.csv", as_file(cross))
  for command in (["fit", path], ["recommend", "--params=1e7", f"--results={path}"]):
    said = "diloco_M2: at 6 of the batches beside the best ones only one rate was tried"
    assert shown(cli.main, *command).count(said) == 1
  assert results.fit_runs(full)[0]["diloco_M2"].notes == ()


def test_a_hyperparameter_that_was_not_swept_is_refused():
  full = make_runs()
  best = at_best_batch(full)
  table = full[best]
  message = r"diloco at N = 1e\+06, M = 1: batch was not swept, all .* add runs with"
  laws, problems = despite(message, table)
  assert sum("was not swept" in p for p in problems) == 9
  for name, law in laws.items():
    assert law.loss.law.alpha == pytest.approx(LOSS.alpha)
    assert law.learning_rate.law.alpha == pytest.approx(RATE.alpha)
    assert law.batch is None
    assert sum(f"{name} has no law of the batch" in p for p in problems) == 1
  # Two sizes with a sweep are enough; the law leaves out the third.
  laws, problems = results.fit_runs(full[(full["params"] > 1e6) | best], strict=False)
  assert len(problems) == 3
  assert laws["diloco_M2"].batch.law.alpha == pytest.approx(BATCH.alpha)
  assert laws["diloco_M2"].batch.spare == 0


def test_cells_on_a_diagonal_have_no_joint_law():
  table = make_runs()
  table = table[table["params"] == table["replicas"].map({1: 1e6, 2: 1e7, 4: 1e8})]
  table = pd.concat([table, make_runs((1,), "data_parallel")], ignore_index=True)
  laws, problems = results.fit_runs(table, strict=False)
  assert list(laws) == ["data_parallel"]
  assert any("N and M vary together; add a second M at one N" in p for p in problems)


def test_a_missing_cell_is_named():
  table = make_runs()
  table = table[~((table["params"] == 1e8) & (table["replicas"] == 2))]
  laws, problems = despite("diloco has no run at N = 1e.08, M = 2", table)
  assert len(problems) == 1
  assert laws["diloco_joint"].loss.law.beta == pytest.approx(LOSS.beta)


def test_columns_in_which_runs_alike_differ_are_named(tmp_path):
  table = as_file(make_runs()).assign(seed=0, note="a (b), c", wall_s=range(243))
  other_seed = table[:3].assign(seed=1, wall_s=[301, 302, 303])
  longer = table[7:9].assign(point_overtrain="4", note="d, e", wall_s=[304, 305])
  every = [table.assign(point_overtrain=""), other_seed, longer]
  path = write(tmp_path / "runs.csv", pd.concat(every))
  message = "they differ in note, wall_s, point_overtrain"
  with pytest.raises(ValueError, match=message):
    cells.best_of_cells(runs.read(path))
  found = runs.read(path, {"point_overtrain": ""})
  assert len(cells.best_of_cells(found)) == 9
  twice = pd.concat([table, table[:1]])
  with pytest.raises(ValueError, match=r"\(lines 2 and 245\); keep one\."):
    cells.best_of_cells(runs.read(write(tmp_path / "runs.csv", twice)))


@pytest.mark.parametrize(
  ("column", "usual", "other", "said"),
  [
    ("sync_every", 30, 100, r"have sync_every 30 \(line 2\) and 100 \(line 56"),
    ("outer_optimizer", "sgd", "sgd(momentum=0.9)", "=outer_optimizer=sgd[.]"),
    ("text", "0a", "0b", "have text 0a .* and 0b .* choose by --where=text=0a"),
    ("config", "{}", '{"overlap.tau": 5}', "M = 1 differ in overlap.tau .* in config"),
    ("tokens", 1e6, 4e6, "1e.07, M = 1 have 1e.06 and 4e.06 tokens .* differ in note"),
  ],
)
def test_runs_of_another_kind_win_no_cell(tmp_path, column, usual, other, said):
  """They have rates and batches of their own, and lower losses at one size."""
  table = as_file(make_runs((1,))).assign(**{column: usual}, note="usual")
  more = table[table["params"] == 1e7].assign(**{column: other}, note="other")
  for name in ("loss", "learning_rate"):
    more[name] *= 0.9
  table = pd.concat([table, more], ignore_index=True)
  path = write(tmp_path / "runs.csv", table.sort_values("params", kind="stable"))
  for strict in (True, False):
    with pytest.raises(ValueError, match=said):
      results.fit_runs(runs.read(path), strict=strict)
  laws, _ = results.fit_runs(runs.read(path, {"note": "usual"}), strict=False)
  assert laws["diloco_M1"].loss.law.alpha == pytest.approx(LOSS.alpha)


def test_data_parallel_has_no_h_and_older_runs_no_digest():
  plain = make_runs((1,), "data_parallel").assign(sync_every="1", text="")
  table = pd.concat([plain, make_runs((1,)).assign(sync_every="30.0", text="0a")])
  table = pd.concat([table, make_runs((2,)).assign(sync_every="30", text="0a")])
  assert len(cells.best_of_cells(table.reset_index(drop=True))) == 9


def test_a_loss_that_does_not_fall_with_n_is_refused():
  table = make_runs((2,))
  rising = table.assign(loss=table["loss"] * (table["params"] / SIZES[0]) ** 0.2)
  laws, problems = despite(r"loss of diloco_M2 does not fall with N \(al", rising)
  assert laws["diloco_M2"].loss.law.alpha > 0
  assert len(problems) == 1


def test_the_command_fits_a_file(tmp_path):
  table = as_file(make_runs()).assign(status="done", sync_every=30)
  other = table[:1].assign(sync_every=100, loss=1.0)
  failed = table[:1].assign(status="failed", loss="")
  path = write(tmp_path / "runs.csv", pd.concat([table, other, failed]))
  found = runs.read(path, {"sync_every": "30.0"})
  assert len(found) == len(make_runs())
  assert found["batch"].to_numpy() == pytest.approx(make_runs()["batch"].to_numpy())
  text = shown(cli.main, "fit", path, "--where=sync_every=30")
  assert "\ndiloco_joint      loss           1: 0.0000  2: 0.0000  4: 0.0000\n" in text
  line = text[: text.index("|log y")].splitlines()[-3]
  assert line.startswith("diloco_joint      loss")
  assert "A 20 [20, 20]" in line
  said = "error: the runs have sync_every 30 (line 2) and 100 (line 245), so"
  assert refused(cli.main, "fit", path).startswith(said)


def test_the_command_prints_residuals_at_the_largest_size(tmp_path):
  # The last point lies e^0.1 above the line through the others.
  table = make_runs()
  above = np.where(table["params"] == 1e8, np.exp(0.1), 1)
  table["loss"] *= above
  path = write(tmp_path / "runs.csv", as_file(table))
  found = json.loads(shown(cli.main, "fit", path, "--json"))
  off = pytest.approx(0.1, abs=1e-6)
  assert found["diloco_M2"]["left_out"]["loss"] == {"2": off}
  assert found["diloco_joint"]["left_out"]["loss"] == {"1": off, "2": off, "4": off}
  # Two sizes have neither residuals nor intervals.
  write(tmp_path / "runs.csv", as_file(table[table["params"] < 1e8]))
  found = json.loads(shown(cli.main, "fit", path, "--json"))["diloco_M2"]
  alpha = {"value": pytest.approx(-0.1), "interval": None}
  assert (found["left_out"], found["loss"]["alpha"]) == ({}, alpha)
  assert "alpha -0.1 [-]" in shown(cli.main, "fit", path)


def test_a_quantity_without_a_law_is_null_in_json(tmp_path):
  table = make_runs((2,))
  table = table[at_best_batch(table)]
  path = write(tmp_path / "runs.csv", as_file(table))
  out = shown(cli.main, "fit", path, "--any")
  assert re.search(r"diloco_M2 +batch +-\n", out)
  assert re.search("note: diloco_M2 has no law of the batch: .* but has 0: add", out)
  found = json.loads(shown(cli.main, "fit", path, "--any", "--json"))
  assert found["diloco_M2"]["batch"] is None


@pytest.mark.parametrize(
  ("column", "value", "message"),
  [
    ("loss", "0.0", "has '0.0' as loss; give a positive number, or leave the run out"),
    ("learning_rate", "", "has '' as learning_rate; give a positive number"),
    ("replicas", "2.5", "has '2.5' as replicas; give a whole number"),
    ("replicas", "0", "has '0' as replicas; give a whole number from 1 on"),
    ("replicas", "9" * 20, "has '9{20}' as replicas; give a whole number from 1 on"),
    ("algorithm", "", "has '' as algorithm; give a name"),
  ],
)
def test_errors_of_a_file_name_the_line(tmp_path, column, value, message):
  table = as_file(make_runs()).astype(object)
  table.loc[5, column] = value
  with pytest.raises(ValueError, match=f"line 7 of .*runs.csv {message}"):
    runs.read(write(tmp_path / "runs.csv", table))


@pytest.mark.parametrize(("more", "by"), [("", -1), (",0,1", 2)])
def test_rows_of_another_length_are_refused(tmp_path, more, by):
  table = as_file(make_runs()).assign(status="done", seed=0)
  path = tmp_path / "runs.csv"
  write(path, table)
  lines = path.read_text().splitlines()
  # The last line without its last value, or with two too many.
  lines[-1] = lines[-1] + more if more else lines[-1].rpartition(",")[0]
  path.write_text("\n".join(lines))
  count = len(table.columns)
  message = rf"line {len(lines)} of .* has {count + by} values for {count} columns"
  with pytest.raises(ValueError, match=message):
    runs.read(path, {"seed": "0"})


def test_files_that_are_no_table_are_refused(tmp_path):
  path = tmp_path / "runs.csv"
  text = as_file(make_runs()).to_csv(index=False)
  for data, message in (
    (text.encode("utf-16"), "save it as CSV, UTF-8"),
    ((text + "x" * 200_000).encode(), "runs.csv is no table: field larger than"),
    (text.replace("tokens", "loss").encode(), "runs.csv has two columns 'loss'; renam"),
    (text.replace("params", "size").encode(), "has no column params; it has algorithm"),
    (b"", "runs.csv has no finished run"),
  ):
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
      runs.read(path)
  path.write_text(text.replace(",", ", "), encoding="utf-8-sig")  # Of a spreadsheet.
  assert len(runs.read(path)) == len(make_runs())


def test_a_filter_without_any_run_is_refused(tmp_path):
  table = as_file(make_runs())
  table["seed"] = np.arange(len(table)) % 2
  path = write(tmp_path / "runs.csv", table)
  said = refused(cli.main, "fit", path, "--where=seq_len=64.0,seed=7")
  assert "has seq_len=64.0,seed=7: seed is for example '0', '1'; choose among" in said
  with pytest.raises(ValueError, match="has no finished run"):
    runs.read(write(tmp_path / "f.csv", table[:1].assign(status="failed")))
