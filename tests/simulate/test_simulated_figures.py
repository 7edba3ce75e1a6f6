"""A line of a simulated figure has the colour of its algorithm."""

import pytest

from diloco.config import resolve
from diloco.simulate import figures, from_config
from diloco.util.palette import COLORS


@pytest.mark.parametrize("algorithm", COLORS)
def test_a_config_has_the_colour_of_its_algorithm(tiny, algorithm):
  tiny.algorithm = algorithm
  work = from_config.workload(resolve(tiny), 1.0)
  curve, _ = figures.own_figure(work, 1.0).axes[0].lines
  assert curve.get_color() == COLORS[algorithm]


@pytest.mark.parametrize("name", ["s4", "s9", "c10", "c12", "c6"])
def test_the_legend_lies_outside_of_the_panels(name):
  figure = figures.FIGURES[name]()
  assert len(figure.legends) == 1
  assert not any(axis.get_legend() for axis in figure.axes)
