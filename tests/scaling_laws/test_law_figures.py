"""Figures of the scaling laws: the files, and the points that the paper measured."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from diloco.scaling_laws import __main__ as cli
from diloco.scaling_laws import figures, paper


def test_the_command_writes_png_and_svg(tmp_path, capsys):
  assert cli.main(["figures", f"--out={tmp_path}"]) == 0
  paths = capsys.readouterr().out.split()
  assert len(paths) == 4
  for path in paths:
    with open(path, "rb") as file:
      head = file.read(100)
    assert head.startswith(b"\x89PNG" if path.endswith("png") else b"<?xml")
  assert cli.main(["figures", f"--out={paths[0]}"]) == 2
  assert f"--out is '{paths[0]}', where nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("draw", "stars"),
  [(figures.losses, 8), (figures.extrapolation, 6), (figures.difference, 6)],
)
def test_every_measured_loss_is_a_star(draw, stars):
  axes = Figure().subplots()
  draw(axes)
  lines = [line.get_ydata() for line in axes.lines if line.get_marker() == "*"]
  assert np.isfinite(np.concatenate(lines)).sum() == stars


def test_figure_2a_has_the_losses_of_table_4():
  axes = Figure().subplots()
  figures.losses(axes)
  drawn = {line.get_label(): line.get_ydata() for line in axes.lines}
  rows = paper.read("table4_loss")
  for label, column in (("data-parallel", "dp"), ("DiLoCo, M = 8", "diloco_M8")):
    assert list(drawn[label]) == [float(row[column]) for row in rows]
