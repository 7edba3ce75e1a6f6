"""Draws figures and tables from a made-up table; names the figures without runs."""

import csv
import pathlib

import numpy as np
import pytest

from diloco.reproduce import figures, tables
from diloco.reproduce import runs as runs_lib
from diloco.util.palette import COLORS, shades

FIELDS = "algorithm replicas params sync_every learning_rate outer_learning_rate"
FIELDS += " batch_sequences seq_len tokens seed status loss"


def write(path: pathlib.Path, rows) -> pathlib.Path:
  with path.open("w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(FIELDS.split())
    writer.writerows(rows)
  return path


# A run of DiLoCo; m=0 makes a run of data-parallel.
def row(
  m, n, h=10, outer=0.6, batch=8, ratio=2, seed=0, loss=None, status="done", seq=64
):
  algorithm = "diloco" if m else "data_parallel"
  loss = 5 + m / 10 - n / 1e6 if loss is None else loss
  return algorithm, m or 1, n, h, 0.01, outer, batch, seq, n * ratio, seed, status, loss


@pytest.fixture
def table(tmp_path):
  sizes, replicas = (100_000, 200_000), (0, 1, 2)
  rows = [row(m, n, batch=b) for n in sizes for m in replicas for b in (4, 8, 16)]
  rows += [row(m, n, outer=o) for n in sizes for m in (1, 2) for o in (0.4, 0.8)]
  rows += [
    row(m, n, h=h, outer=o)
    for n in sizes
    for m in (1, 2)
    for h in (1, 30)
    for o in (0.4, 0.6, 0.8)
  ]
  rows += [row(m, n, ratio=8) for n in sizes for m in replicas]
  rows += [row(0, 100_000, seed=s, loss=4.9 + s / 100) for s in (1, 2)]
  rows.append(row(2, 100_000, status="failed", loss=""))
  return write(tmp_path / "table.csv", rows)


def test_the_command_draws_small_pictures(table, tmp_path, capsys):
  assert figures.main([str(table), f"--out={tmp_path}", "--prefix=x_"]) == 0
  pictures = sorted(tmp_path.glob("x_*.png"))
  assert len(pictures) == len(figures.FIGURES)
  assert all(10_000 < p.stat().st_size < 200_000 for p in pictures)
  assert "2 seeds" in capsys.readouterr().out  # The third one tuned.


def test_figures_draw_the_numbers_of_the_table(table):
  runs = runs_lib.read(table)
  left, right = figures.figure_2(runs).axes
  one, two, *_ = shades(COLORS["diloco"], 4)
  assert [(line.get_label(), line.get_color()) for line in left.lines] == [
    ("data-parallel", COLORS["data_parallel"]),
    ("DiLoCo, M=1", one),
    ("DiLoCo, M=2", two),
  ]
  assert list(left.lines[2].get_ydata()) == pytest.approx([5.1, 5.1 - 0.1])
  assert list(right.lines[0].get_ydata()) == pytest.approx(
    [100 * (5.0 / 4.9 - 1), 100 * (4.9 / 4.8 - 1)]
  )
  assert tables.losses(runs)[2].startswith("| 100,000 | 4.9000 | 5.0000 (+2.04%) |")


def test_differences_are_taken_seed_by_seed(tmp_path):
  losses = {0: (4.0, 5.0, 3.0), 2: (4.4, 5.3, 3.3)}
  rows = [
    row(m, 100_000, seed=seed, loss=loss)
    for m, some in losses.items()
    for seed, loss in enumerate(some)
  ]
  table = runs_lib.read(write(tmp_path / "t.csv", rows))
  percent = np.array([10, 6, 10])
  more = f"(+{percent.mean():.2f} ± {percent.std(ddof=1):.2f}%)"
  assert tables.losses(table)[2] == f"| 100,000 | 4.0000 | 4.3333 {more} |"
  said = "data-parallel, N=100,000: 3 seeds, 4.0000 ± 1.0000 (standard deviation)"
  assert tables.seeds(table)[0] == said
  (bars,) = figures.figure_2(table).axes[1].containers
  ((low, high),) = bars.lines[2][0].get_segments()
  assert high[1] - low[1] == pytest.approx(2 * percent.std(ddof=1))


def test_curves_over_the_batch_compare_points_with_the_same_seeds(tmp_path):
  # The best batch, 8, is repeated with seeds that see harder documents.
  losses = {4: (5.1,), 8: (5.0, 5.5, 5.6), 16: (5.2,)}
  rows = [
    row(m, 100_000, batch=batch, seed=seed, loss=loss + m / 10)
    for m in (0, 1)
    for batch, some in losses.items()
    for seed, loss in enumerate(some)
  ]
  table = runs_lib.read(write(tmp_path / "t.csv", rows))
  plain, one = figures.figure_4(table).axes[0].lines
  assert list(plain.get_ydata()) == pytest.approx([5.1, 5.0, 5.2])
  assert list(one.get_ydata()) == pytest.approx([5.2, 5.1, 5.3])
  assert figures.figure_2(table).axes[0].lines[0].get_ydata()[0] > 5.3


def test_without_a_common_seed_there_is_no_difference(tmp_path):
  rows = [row(0, 100_000), row(1, 100_000, seed=1), row(0, 200_000), row(1, 200_000)]
  table = runs_lib.read(write(tmp_path / "t.csv", rows))
  assert tables.losses(table)[2] == "| 100,000 | 4.9000 | 5.0000 |"
  left, right = figures.figure_2(table).axes
  assert len(left.lines[1].get_xdata()) == 2
  assert list(right.lines[0].get_ydata()) == pytest.approx([100 * (4.9 / 4.8 - 1)])


def test_algorithms_with_the_same_replicas_are_different_curves(tmp_path):
  rows = [
    ("streaming" if s else "diloco", *row(2, n, h=h, outer=o, loss=5 + s - n / 1e6)[1:])
    for n in (100_000, 200_000)
    for h in (1, 10)
    for o in (0.4, 0.6, 0.8)
    for s in (0, 1)
  ]
  table = runs_lib.read(write(tmp_path / "t.csv", rows))
  assert names_of(figures.figure_7(table)) == ["DiLoCo, M=2", "streaming, M=2"]


def names_of(figure):
  return [line.get_label() for line in figure.axes[0].lines]


def test_the_main_grid_has_one_cadence_and_no_overtraining(table):
  main = runs_lib.main_grid(runs_lib.read(table))
  kinds = main[["sync_every", "overtrain"]].drop_duplicates()
  assert kinds.to_numpy().tolist() == [[10, 1]]


def test_where_selects_rows_by_column(table, tmp_path, capsys):
  runs = runs_lib.read(table, "batch_sequences=8.0,seed=0")
  assert set(runs["batch"]) == {8 * 64}
  assert figures.main([str(table), "--out=x", "--where=nothing=8"]) == 2
  assert "names the column 'nothing'" in capsys.readouterr().err
  assert figures.main([str(table), "--out=x", "--where=sync_every=8,seed"]) == 2
  assert "--where has 'seed'; write name=value" in capsys.readouterr().err
  assert figures.main([str(table), f"--out={table}"]) == 2
  assert f"--out is '{table}', where nothing" in capsys.readouterr().err


def test_both_of_two_curves_that_coincide_are_seen(table):
  one, two = figures.figure_7(runs_lib.read(table)).axes[0].lines
  assert one.get_xydata().tolist() == two.get_xydata().tolist()
  assert one.get_markersize() > two.get_markersize()
  assert (one.get_linestyle(), two.get_linestyle()) == ("-", "--")


def test_outer_rates_tried_at_one_size_have_no_figure(tmp_path, capsys):
  rows = [
    row(m, 100_000, h=h, outer=o) for m in (1, 2) for h in (1, 10) for o in (4, 6, 8)
  ]
  path = write(tmp_path / "t.csv", rows)
  assert figures.main([str(path), f"--out={tmp_path}"]) == 0
  said = capsys.readouterr().out
  assert "figure 7: left out, outer learning rates were tried at one N only" in said


def test_the_command_names_figures_without_runs(tmp_path, capsys):
  path = write(tmp_path / "t.csv", [row(m, 100_000) for m in (0, 1, 2)])
  assert figures.main([str(path), f"--out={tmp_path}"]) == 0
  said = capsys.readouterr().out
  assert (
    "figure 4: left out, data-parallel was tried with three batches at no N" in said
  )
  # No run has M = 1.
  assert figures.main([str(path), f"--out={tmp_path}", "--where=replicas=2"]) == 0
  said = capsys.readouterr().out
  assert "figure 2: the panel of differences is left out" in said
  assert len(figures.figure_2(runs_lib.read(path, "replicas=2")).axes) == 1


def test_the_cadence_of_data_parallel_does_not_count(tmp_path):
  """Most runs are data-parallel, whose H is the default and does not matter."""
  rows = [row(0, n, h=100) for n in (1, 2, 3)] + [row(2, n, h=10) for n in (1, 2)]
  main = runs_lib.main_grid(runs_lib.read(write(tmp_path / "t.csv", rows)))
  assert main.groupby("algorithm").size().to_dict() == {"data_parallel": 3, "diloco": 2}
