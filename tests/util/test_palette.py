"""Shades of an algorithm's colour differ from each other and keep its hue."""

import colorsys
import itertools

import pytest

from diloco.util.palette import COLORS, legend, looks, panels, shades


def hsl(color: str) -> tuple[float, float, float]:
  hue, lightness, saturation = colorsys.rgb_to_hls(
    *(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
  )
  return hue, saturation, lightness


def luminance(color: str) -> float:
  """Relative luminance as WCAG 2 defines it; white has 1."""
  rgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
  linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb]
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_legend_has_the_order_of_the_curves():
  figure, (panel,) = panels("title")
  panel.plot([1, 2], [1, 2], label="low")
  panel.errorbar([1, 2], [5, 4], [1, 1], label="high")
  panel.plot([], [], label="key")
  (key,) = legend(figure, "note").legends
  assert [text.get_text() for text in key.get_texts()] == ["high", "low", "key"]
  assert key.get_title().get_text() == "note"
  assert panel.get_title() == "title"


@pytest.mark.parametrize("color", COLORS.values())
def test_shades_go_from_light_to_dark_in_one_hue(color):
  found = shades(color, 5)
  lightness = [hsl(shade)[2] for shade in found]
  assert lightness == sorted(lightness, reverse=True)
  assert min(a - b for a, b in itertools.pairwise(lightness)) > 0.05
  assert all(abs(hsl(shade)[0] - hsl(color)[0]) < 0.02 for shade in found)
  assert luminance(found[0]) < 0.5  # Prints on white.
  assert (shades(color, 1), shades(color, 0)) == ([color], [])


def test_lines_of_one_algorithm_differ_in_shade_and_dashes():
  methods = {"a": "diloco", "b": "data_parallel", "c": "diloco", "d": "diloco"}
  found = looks(methods)
  assert [look["label"] for look in found] == [*methods]
  assert found[1]["color"] == COLORS["data_parallel"]
  of_diloco = [found[i] for i in (0, 2, 3)]
  assert [look["color"] for look in of_diloco] == shades(COLORS["diloco"], 3)
  assert len({str(look["ls"]) for look in of_diloco}) == 3
  assert found[1]["ls"] == found[3]["ls"] == "-"
