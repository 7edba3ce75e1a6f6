"""A line of a simulated figure has the colour of its algorithm."""

import pytest

from diloco.config import resolve
from diloco.simulate import figures, from_config
from diloco.util.palette import COLORS, shades


@pytest.mark.parametrize("algorithm", COLORS)
def test_a_config_has_the_colour_of_its_algorithm(tiny, algorithm):
  tiny.algorithm = algorithm
  work = from_config.workload(resolve(tiny), 1.0)
  curve, _ = figures.own_figure(work, 1.0).axes[0].lines
  assert curve.get_color() == COLORS[algorithm]


def test_lines_of_one_algorithm_differ_in_shade_and_dashes():
  methods = {"a": "diloco", "b": "data_parallel", "c": "diloco", "d": "diloco"}
  looks = figures.looks(methods)
  assert [look["label"] for look in looks] == [*methods]
  assert looks[1]["color"] == COLORS["data_parallel"]
  of_diloco = [looks[i] for i in (0, 2, 3)]
  assert [look["color"] for look in of_diloco] == shades(COLORS["diloco"], 3)
  assert len({str(look["ls"]) for look in of_diloco}) == 3
  assert looks[1]["ls"] == looks[3]["ls"] == "-"


@pytest.mark.parametrize("name", ["s4", "s9", "c10", "c12", "c6"])
def test_the_legend_lies_outside_of_the_panels(name):
  figure = figures.FIGURES[name]()
  assert len(figure.legends) == 1
  assert not any(axis.get_legend() for axis in figure.axes)
