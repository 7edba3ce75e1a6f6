"""The legend of a simulated figure."""

import pytest

from diloco.simulate import figures


@pytest.mark.parametrize("name", ["s4", "s9", "c10", "c12", "c6"])
def test_the_legend_lies_outside_of_the_panels(name):
  figure = figures.FIGURES[name]()
  assert len(figure.legends) == 1
  assert not any(axis.get_legend() for axis in figure.axes)
