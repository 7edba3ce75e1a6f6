"""docs/links.md has what the simulator gives beside the measurements."""

import csv
import importlib.util
import pathlib
import re
import sys

import numpy as np
import pytest

from diloco.simulate.utilisation import LINKS, Link

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "experiments"


@pytest.fixture(scope="module")
def script():
  """The script as a module; its neighbours are importable while it loads."""
  sys.path.insert(0, str(SCRIPTS))
  try:
    spec = importlib.util.spec_from_file_location(
      "measured_links", SCRIPTS / "measured_links.py"
    )
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
  finally:
    sys.path.remove(str(SCRIPTS))
  return module


@pytest.fixture(scope="module")
def theirs(script):
  return script.l40s()


def starting(rows, name):
  return [row for row in rows if row.method.startswith(name)]


def test_the_page_has_how_far_the_simulator_is_from_every_measurement(script):
  page = (ROOT / "docs" / "links.md").read_text()
  sets = script.sets()
  assert [len(rows) for rows in sets.values()] == [16, 16, 4, 20, 5, 6]
  assert "\n".join(script.summary(sets)) in page


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


def test_a_blocking_sync_in_closed_form(theirs):
  # A ring sends 2 (M - 1) / M copies of 4 bytes; nothing overlaps.
  for row in starting(theirs, "DiLoCo"):
    syncs = row.steps // row.work.sync_every
    sync_s = 2 * 3 / 4 * 32 * 30_846_720 / row.rate
    compute_s = row.steps * row.work.step_time
    expected = compute_s / (compute_s + syncs * sync_s)
    assert row.simulated(Link()) == pytest.approx(expected)
    wait_s = syncs * 0.13 * row.work.sync_every * row.work.step_time
    expected = compute_s / (compute_s + syncs * sync_s / 0.97 + wait_s)
    assert row.simulated(Link(0.97, 0.13)) == pytest.approx(expected)


def test_the_link_of_nccl_is_best_for_diloco_and_better_for_local_sgd(script, theirs):
  diloco, local = starting(theirs, "DiLoCo"), starting(theirs, "local SGD")
  error = lambda rows, link: np.square(script.points(rows, link)).mean()
  best = LINKS["nccl"]
  for more, wait in ((0.03, 0), (-0.03, 0), (0, 0.03), (0, -0.03)):
    other = Link(best.efficiency + more, best.wait + wait)
    assert error(diloco, other) > error(diloco, best)
  assert np.abs(script.points(diloco, best)).max() < 1.35
  assert np.abs(script.points(diloco, Link())).max() > 7
  # Local SGD was not fitted.
  assert error(local, best) < error(local, Link()) / 4
