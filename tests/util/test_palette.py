"""Shades of an algorithm's colour differ from each other and keep its hue."""

import colorsys
import itertools

import pytest

from diloco.util.palette import COLORS, OTHERS, looks, shades


def hsl(color: str) -> tuple[float, float, float]:
  hue, lightness, saturation = colorsys.rgb_to_hls(
    *(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
  )
  return hue, saturation, lightness


@pytest.mark.parametrize("color", COLORS.values())
def test_shades_go_from_light_to_dark_in_one_hue(color):
  found = shades(color, 5)
  lightness = [hsl(shade)[2] for shade in found]
  assert lightness == sorted(lightness, reverse=True)
  assert min(a - b for a, b in itertools.pairwise(lightness)) > 0.05
  assert all(abs(hsl(shade)[0] - hsl(color)[0]) < 0.02 for shade in found)
  assert found[2] == color


def test_one_shade_is_the_colour_itself():
  assert shades("#de8f05", 1) == ["#de8f05"]
  assert shades("#de8f05", 0) == []


def test_lines_of_one_algorithm_differ_in_shade_and_dashes():
  methods = {"a": "diloco", "b": "data_parallel", "c": "diloco", "d": "diloco"}
  found = looks(methods)
  assert [look["label"] for look in found] == [*methods]
  assert found[1]["color"] == COLORS["data_parallel"]
  of_diloco = [found[i] for i in (0, 2, 3)]
  assert [look["color"] for look in of_diloco] == shades(COLORS["diloco"], 3)
  assert len({str(look["ls"]) for look in of_diloco}) == 3
  assert found[1]["ls"] == found[3]["ls"] == "-"


def test_no_colour_stands_for_two_things():
  assert len({*COLORS.values(), *OTHERS}) == len(COLORS) + len(OTHERS)
