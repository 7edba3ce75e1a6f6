"""Compares the simulated utilisation with measurements over limited links.

  python scripts/experiments/measured_links.py

Fits how far each transport falls short of the papers' ideal link (`Link` of
diloco/simulate/utilisation.py), and prints the tables of docs/links.md: measured
utilisation, and by how many percentage points the simulator is above it, without and
with the fitted link. Takes two minutes on one core.
"""

import collections
import csv
import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize
from sites_run import ROOT
from wan_bench import resolved

from diloco.reproduce.comparison import markdown
from diloco.simulate import from_config
from diloco.simulate.utilisation import LINKS, Link, Workload, utilisation
from diloco.util.command import Parser

# The model of docs/measured_l40s.csv has an embedding, six blocks and a head of 50,257
# tokens and width 256 (configs/models/30m-realvocab.toml of the authors' repository).
PARAMS, EMBEDDING = 30_846_720, 50_257 * 256
BLOCK = (PARAMS - 2 * EMBEDDING) / 6


class Row(NamedTuple):
  """A measurement.

  Attributes:
    transport: a name of LINKS.
    method: name of the method in the printed table.
    nominal, rate: bits per second of each replica's link, as set and as measured.
    steps: inner steps that were measured.
    measured: utilisation.
    work: the workload, with the ideal link.
  """

  transport: str
  method: str
  nominal: float
  rate: float
  steps: int
  measured: float
  work: Workload

  def simulated(self, link: Link) -> float:
    LINKS["tried"] = link
    work = dataclasses.replace(self.work, link="tried")
    return float(utilisation(work, [self.rate], self.steps)[0])


def read(name: str) -> list[dict[str, str]]:
  """Reads a table of docs/, without its comments."""
  with (ROOT / "docs" / name).open() as file:
    return [*csv.DictReader(line for line in file if not line.startswith("#"))]


def l40s() -> list[Row]:
  """Returns the rows with limited links of docs/measured_l40s.csv.

  DiLoCo and local SGD compute nothing during a sync, so their model is one layer here.
  DDP overlaps its all-reduce with the backward pass of the layers.
  """
  layers = {"ddp": (EMBEDDING, *6 * (BLOCK,), EMBEDDING)}
  found = []
  for line in read("measured_l40s.csv"):
    if line["rate_mbit_s"] == "unlimited":
      continue
    method, h = line["method"], int(line["H"])
    work = Workload(
      params_per_layer=layers.get(method, (PARAMS,)),
      step_time=float(line["compute_s_per_step"]),
      method="data_parallel" if method == "ddp" else "diloco",
      replicas=4,
      sync_every=h,
      bits=32,
      exchange="psum",
    )
    set_to = float(line["rate_mbit_s"]) * 1e6
    rate = float(line["measured_rate_mbit_s"] or 0) * 1e6 or set_to
    steps, measured = int(line["window_steps"]), float(line["utilisation"])
    name = "DDP" if method == "ddp" else f"{NAMES[method]}, H = {h}"
    found.append(Row("nccl", name, set_to, rate, steps, measured, work))
  return found


NAMES = {"diloco": "DiLoCo", "localsgd": "local SGD"}


def wan(name: str, transport: str) -> list[Row]:
  """Returns the rows of a table that wan_bench.py wrote."""

  @functools.cache
  def config(method: str, replicas: int):
    options = collections.namedtuple("Options", ["replicas"])(replicas)
    return resolved(options, method)

  found = []
  for line in read(name):
    c = config(line["method"], int(line["replicas"]))
    work = from_config.workload(c, float(line["compute_s_per_step"]))
    rate, measured = float(line["rate_mbit_s"]) * 1e6, float(line["utilisation"])
    steps = 4 * c.sync_every
    found.append(Row(transport, line["method"], rate, rate, steps, measured, work))
  return found


def fit(rows: Sequence[Row]) -> Link:
  """Fits the link, by least squares of simulated minus measured utilisation."""

  error = lambda values: np.mean(np.square(points(rows, Link(*values))))
  how = {"method": "Powell", "bounds": [(0.3, 1.0), (0.0, 0.5)]}
  best = optimize.minimize(error, (0.9, 0.1), **how, options={"xtol": 1e-3}).x
  return Link(*(round(float(x), 2) for x in best))


def points(rows: Sequence[Row], link: Link) -> list[float]:
  """Returns by how many percentage points the simulator is above each measurement."""
  return [100 * (row.simulated(link) - row.measured) for row in rows]


def table(rows: Sequence[Row], link: Link) -> list[str]:
  """Formats the rows as Markdown; measurements of one setting are averaged."""
  groups = collections.defaultdict[tuple, list[Row]](list)
  for row in rows:
    groups[row.method, row.nominal].append(row)
  mean = lambda values: f"{np.mean(values):+.1f}"
  return markdown(
    {
      "method": [method for method, _ in groups],
      "Mbit/s": [f"{rate / 1e6:g}" for _, rate in groups],
      "measured": [
        f"{np.mean([r.measured for r in own]):.1%}" for own in groups.values()
      ],
      "ideal link": [mean(points(own, Link())) for own in groups.values()],
      "fitted link": [mean(points(own, link)) for own in groups.values()],
    }
  )


def summary(sets: dict[str, Sequence[Row]]) -> list[str]:
  """Formats the largest and the mean difference of each set of rows."""
  lines: dict[str, list] = collections.defaultdict(list)
  for name, rows in sets.items():
    link = LINKS[rows[0].transport]
    lines["measurements"].append(name)
    lines["rows"].append(len(rows))
    lines["link"].append(rows[0].transport)
    for label, one in (("ideal", Link()), ("fitted", link)):
      off = np.abs(points(rows, one))
      lines[f"{label}: mean, largest"].append(f"{off.mean():.1f}, {off.max():.1f}")
  return markdown(lines)


def sets() -> dict[str, Sequence[Row]]:
  """Returns the measurements under the names that docs/links.md uses."""
  theirs = l40s()
  part = lambda keep: [row for row in theirs if keep(row.method)]
  gloo = wan("wan.csv", "gloo")
  exchanged = lambda row: row.method != "data-parallel"
  return {
    "L40S, DiLoCo": part(lambda name: name.startswith("DiLoCo")),
    "L40S, local SGD": part(lambda name: name.startswith("local")),
    "L40S, DDP": part(lambda name: name == "DDP"),
    "wan.csv": [*filter(exchanged, gloo)],
    "wan.csv, data-parallel": [row for row in gloo if not exchanged(row)],
    "wan_m4.csv": [*filter(exchanged, wan("wan_m4.csv", "gloo"))],
  }


def main() -> None:
  Parser(description=__doc__).parse_args()
  measured = sets()
  for name in ("L40S, DiLoCo", "wan.csv"):
    print(f"{measured[name][0].transport}: {fit(measured[name])}")
  print("\n" + "\n".join(summary(measured)))
  for name, rows in measured.items():
    print(f"\n{name}\n\n" + "\n".join(table(rows, LINKS[rows[0].transport])))


if __name__ == "__main__":
  main()
