"""Runs that differ only in the seed count as one setting."""

import pandas as pd
import pytest

from diloco.scaling_laws import cells, runs

COLUMNS = ["params", "replicas", "learning_rate", "seed", "loss", "test_loss", "tokens"]
# The rate 0.2 is best with the tuning seed 0, and the rate 0.1 with the mean.
ROWS = [
  (1e6, 2, 0.1, 0, 4.00, 4.50, 6e6),
  (1e6, 2, 0.2, 0, 3.90, 4.40, 6e6),
  (1e6, 2, 0.2, 1, 4.20, 4.80, 6e6),
  (1e6, 2, 0.2, 2, 4.30, 4.60, 6e6),
  (1e7, 2, 0.1, 0, 3.00, 3.10, 6e7),
]


def write(path, rows=ROWS, drop=()) -> str:
  table = pd.DataFrame(rows, columns=COLUMNS)
  table = table.assign(algorithm="diloco", batch_tokens=512)
  table.drop(columns=[*drop]).to_csv(path, index=False)
  return str(path)


def test_the_tuning_seed_chooses_and_the_mean_of_the_others_is_told(tmp_path):
  table = runs.read(write(tmp_path / "runs.csv"))
  assert list(table.index) == [2, 3, 6]  # Lines of the tuning seed's runs.
  small, large = cells.best_of_cells(table).to_dict("records")
  assert small["learning_rate"] == 0.2
  assert small["choice"] == 3.9
  assert small["loss"] == pytest.approx((4.8 + 4.6) / 2)
  assert small["losses"] == ((1, 4.8), (2, 4.6))
  assert small["all_losses"] == ((0, 4.4), (1, 4.8), (2, 4.6))
  assert (large["choice"], large["loss"], large["losses"]) == (3.0, 3.1, ((0, 3.1),))


def test_without_a_test_loss_in_every_run_the_loss_is_told(tmp_path):
  some = [(*row[:5], "" if row[3] else row[5], row[6]) for row in ROWS]
  for path in (
    write(tmp_path / "without.csv", drop=["test_loss"]),
    write(tmp_path / "some.csv", some),
  ):
    assert runs.read(path)["losses"].iloc[1] == ((1, 4.2), (2, 4.3))


def test_if_all_settings_have_the_same_seeds_all_are_told(tmp_path):
  some = [(1e6, 2, lr, s, 3.0 + s, 4.0 + s, 6e6) for lr in (0.1, 0.2) for s in (0, 1)]
  table = runs.read(write(tmp_path / "runs.csv", some))
  assert table["loss"].tolist() == [4.5, 4.5]


def test_runs_with_equal_seeds_or_other_tokens_stay_apart(tmp_path):
  longer = (1e6, 2, 0.1, 1, 3.8, 4.3, 24e6)
  table = runs.read(write(tmp_path / "runs.csv", [*ROWS, longer]))
  assert len(table) == 4
  twice = runs.read(write(tmp_path / "runs.csv", [*ROWS, ROWS[3]]))
  assert len(twice) == 6
  with pytest.raises(ValueError, match=r"two runs of diloco at N = 1e\+06, M = 2"):
    cells.best_of_cells(twice)


@pytest.mark.parametrize("column", ["config", "outer_optimizer", "dim", "seq_len"])
def test_runs_with_another_config_stay_apart(tmp_path, column):
  path = tmp_path / "runs.csv"
  table = pd.read_csv(write(path)).assign(**{column: list("aaaba")})
  table.to_csv(path, index=False)
  assert list(runs.read(path).index) == [2, 3, 5, 6]


def test_without_the_tuning_seed_the_first_run_stands_for_a_setting(tmp_path):
  later = [(1e8, 2, 0.1, 2, 2.0, 2.1, 6e8), (1e8, 2, 0.1, 1, 2.2, 2.3, 6e8)]
  table = runs.read(write(tmp_path / "runs.csv", [*ROWS, *later]))
  last = table.iloc[-1]
  assert (last.name, last["choice"], last["loss"]) == (7, 2.0, pytest.approx(2.2))


def test_a_file_without_seeds_has_a_row_per_run(tmp_path):
  path = write(tmp_path / "runs.csv", drop=["seed"])
  assert list(runs.read(path)["loss"]) == [row[5] for row in ROWS]
