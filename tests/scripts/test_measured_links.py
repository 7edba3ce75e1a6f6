"""docs/links.md has what the simulator gives beside the measurements."""

import csv
import re

import measured_links
import numpy as np
import pytest
from running import ROOT

from diloco.simulate.utilisation import LINKS, Link


def starting(rows, name):
  return [row for row in rows if row.method.startswith(name)]


def test_the_page_has_how_far_the_simulator_is_from_every_measurement():
  page = (ROOT / "docs" / "links.md").read_text()
  sets = measured_links.sets()
  assert [len(rows) for rows in sets.values()] == [16, 16, 4, 20, 5, 6]
  assert "\n".join(measured_links.summary(sets)) in page


@pytest.mark.parametrize("name", ["wan", "wan_m4"])
def test_the_page_has_the_utilisation_of_every_method_and_rate(name):
  page = (ROOT / "docs" / "links.md").read_text()
  with (ROOT / "docs" / f"{name}.csv").open() as file:
    rows = [*csv.DictReader(line for line in file if not line.startswith("#"))]
  for row in rows:
    share = f"{100 * float(row['utilisation']):.1f}"
    cells = [x for x in page.splitlines() if x.startswith(f"| {row['method']} | ")]
    assert any(f"| {share} (" in line for line in cells), (row["method"], share)


def test_the_page_has_the_fitted_links():
  page = (ROOT / "docs" / "links.md").read_text()
  found = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \|", page, re.M)
  assert {name: Link(float(a), float(b)) for name, a, b in found} == {
    name: link for name, link in LINKS.items() if name != "tried"
  }


def test_the_link_of_nccl_is_best_for_diloco_and_better_for_local_sgd():
  theirs = measured_links.l40s()
  diloco, local = starting(theirs, "DiLoCo"), starting(theirs, "local SGD")
  error = lambda rows, link: np.square(measured_links.points(rows, link)).mean()
  best = LINKS["nccl"]
  for more, wait in ((0.03, 0), (-0.03, 0), (0, 0.03), (0, -0.03)):
    other = Link(best.efficiency + more, best.wait + wait)
    assert error(diloco, other) > error(diloco, best)
  assert np.abs(measured_links.points(diloco, best)).max() < 1.35
  assert np.abs(measured_links.points(diloco, Link())).max() > 7
  # Local SGD was not fitted.
  assert error(local, best) < error(local, Link()) / 4
