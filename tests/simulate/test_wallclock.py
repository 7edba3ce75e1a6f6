"""Tests the wall-clock model against Appendix A by hand, Table 1 and the figures."""

import dataclasses
import pathlib

import numpy as np
import pytest

from diloco.config import changed
from diloco.config.command_line import load_config
from diloco.simulate import figures, from_config, tables
from diloco.simulate import wallclock as wc
from diloco.simulate.__main__ import main
from diloco.simulate.steady import required_bandwidth

LOW, HIGH = wc.NETWORKS["low"], wc.NETWORKS["high"]


def test_all_reduce_time_by_hand():
  # Three quarters of 2 * 16 Gbit over 10 Gbit/s, and 10 ms.
  assert wc.all_reduce_time(16e9, 4, LOW) == pytest.approx(2 * 1.6 * 0.75 + 0.01)
  assert wc.all_reduce_time(16e9, 1, LOW) == 0


def test_compute_time_is_6nd_over_rq():
  run = wc.Training(1.3e9, 26e9, 2**20, replicas=2)
  r = 2**20 / 16_384
  assert wc.chips(1.3e9, 2**20) == r
  assert wc.compute_time(run) == pytest.approx(6 * 1.3e9 * 26e9 / (r * 300e12))
  # Doubling the batch doubles the chips, for every N.
  for n in (35e6, 10e9):
    assert wc.chips(n, 2**22) == 2 * wc.chips(n, 2**21)


@pytest.mark.parametrize(("method", "replicas"), [("data_parallel", 2), ("diloco", 1)])
def test_data_parallel_and_one_replica_cross_datacentres_each_step(method, replicas):
  run = wc.Training(1e9, 20e9, 2**20, method=method, replicas=replicas)
  r, steps = 64, 20e9 / 2**20
  wide = 2 * 16e9 / 10e9 * (1 - 1 / r) + 0.01
  extra = 1 if method == "data_parallel" else 1 + 1 / 30
  assert wc.communication_time(run) == pytest.approx(wide * steps * extra)


def test_diloco_with_replicas_crosses_datacentres_every_h_steps():
  run = wc.Training(1e9, 20e9, 2**20, replicas=4)
  r, steps = 64, 20e9 / 2**20
  inner = 2 * 16e9 / 400e9 * (1 - 4 / r) + 1e-4
  outer = 2 * 16e9 / 10e9 * (1 - 1 / r) + 0.01
  assert wc.communication_time(run) == pytest.approx(steps * (inner + outer / 30))
  # Overlapped hides the outer steps if compute takes longer.
  hidden = dataclasses.replace(run, method="overlapped")
  assert wc.communication_time(hidden) == pytest.approx(steps * inner)
  slow = dataclasses.replace(hidden, across=wc.Network(1e8, 0.01))
  assert wc.communication_time(slow) > wc.communication_time(hidden)


def test_table_1_hours():
  for row in tables.table1():
    near = 0.003 if row["name"].startswith("data_parallel") else 0.03
    assert row["hours"] == pytest.approx(row["paper_hours"], rel=near)
    # Our terabits are close to the paper's terabytes, which would be eight times more.
    assert row["terabits"] == pytest.approx(row["paper_terabytes"], rel=0.15)


def test_every_figure_is_listed_and_draws(tmp_path, capsys):
  streaming, scaling = (2, 3, 4, 6, 7, 9, 14, 15, 16), (6, 10, 12)
  expected = {f"s{n}" for n in streaming} | {f"c{n}" for n in scaling}
  assert set(figures.FIGURES) == expected
  with pytest.raises(SystemExit):
    main(["figure", "--help"])
  listed = capsys.readouterr().out.partition("one of")[2].partition("options")[0]
  assert {*listed.replace(",", " ").split()} >= expected
  for name in ("s7", "s14", "c12"):  # tests/test_pictures.py draws others.
    for path in figures.draw(name, tmp_path):
      assert pathlib.Path(path).stat().st_size > 5000
  with pytest.raises(ValueError, match="figure is 's99', but must be one of s2"):
    figures.draw("s99", tmp_path)


def test_the_figure_of_a_config_has_its_utilisation():
  c = load_config("chinchilla:1.3B,M=4")
  lines = {x.get_label(): x for x in figures.of_config(c, 0.5, 0.1).axes[0].lines}
  half = {k: np.interp(0.5, x.get_ydata(), tables.GRID) for k, x in lines.items()}
  assert list(half) == list(figures.METHODS)
  # A link that is half as busy as the devices: bits of a step over 0.5 s of compute.
  assert half["data-parallel"] > 10 * half["DiLoCo"]
  for label, bits in (("+ overlap", 16), ("+ overlap, FP4", 4 + 8 / 128)):
    work = from_config.workload(changed(c, {"wire.format": "bf16"}), 0.5, 0.1)
    work = dataclasses.replace(work, bits=bits)
    needed = required_bandwidth(work, 0.5) / 1e9
    assert half[label] == pytest.approx(needed, rel=0.2)  # Points of the grid.
