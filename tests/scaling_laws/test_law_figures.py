"""Figures are drawn by the command, with every measured point on them."""

import matplotlib.pyplot as plt
import pytest

from diloco.scaling_laws import __main__ as cli
from diloco.scaling_laws import figures


def test_the_command_writes_png_and_svg(tmp_path, capsys):
  assert cli.main(["figures", f"--output={tmp_path}"]) == 0
  paths = capsys.readouterr().out.split()
  assert len(paths) == 4
  for path in paths:
    with open(path, "rb") as file:
      head = file.read(100)
    assert head.startswith(b"\x89PNG" if path.endswith("png") else b"<?xml")
  assert cli.main(["figures", f"--output={paths[0]}"]) == 2
  assert f"--output is '{paths[0]}', where nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("draw", "stars"), [(figures.extrapolation, 6), (figures.difference, 6)]
)
def test_measured_points_are_stars(draw, stars):
  figure, axes = plt.subplots()
  draw(axes)
  assert sum(line.get_marker() == "*" for line in axes.lines) == stars
  plt.close(figure)
