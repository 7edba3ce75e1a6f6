"""Tests the wall-clock model against Appendix A by hand, Table 1 and the figures."""

import dataclasses
import math
import pathlib

import pytest

from diloco.simulate import figures, tables
from diloco.simulate import wallclock as wc

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
  run = wc.Training(1e9, 20e9, 2**20, method=method, replicas=replicas, sync_every=30)
  r, steps = 64, 20e9 / 2**20
  wide = 2 * 16e9 / 10e9 * (1 - 1 / r) + 0.01
  extra = 1 if method == "data_parallel" else 1 + 1 / 30
  assert wc.communication_time(run) == pytest.approx(wide * steps * extra)


def test_diloco_with_replicas_crosses_datacentres_every_h_steps():
  run = wc.Training(1e9, 20e9, 2**20, replicas=4, sync_every=30)
  r, steps = 64, 20e9 / 2**20
  inner = 2 * 16e9 / 400e9 * (1 - 4 / r) + 1e-4
  outer = 2 * 16e9 / 10e9 * (1 - 1 / r) + 0.01
  assert wc.communication_time(run) == pytest.approx(steps * (inner + outer / 30))
  streaming = dataclasses.replace(run, method="streaming")
  assert wc.total_time(streaming) == wc.total_time(run)
  # Overlapped hides the outer steps if compute takes longer.
  hidden = dataclasses.replace(run, method="overlapped")
  assert wc.communication_time(hidden) == pytest.approx(steps * inner)
  slow = dataclasses.replace(hidden, across=wc.Network(1e8, 0.01))
  assert wc.communication_time(slow) > wc.communication_time(hidden)


def test_outer_bits_and_chips_by_hand():
  run = wc.Training(1e9, 20e9, 2**20, replicas=4, outer_bits=4, chips=128)
  steps = 20e9 / 2**20
  inner = 2 * 16e9 / 400e9 * (1 - 4 / 128) + 1e-4
  outer = 2 * 4e9 / 10e9 * (1 - 1 / 128) + 0.01
  assert wc.communication_time(run) == pytest.approx(steps * (inner + outer / 30))
  assert wc.compute_time(run) == pytest.approx(6 * 20e18 / (128 * 300e12))


def test_table_1_hours():
  for row in tables.table1():
    near = 0.003 if row["name"].startswith("data_parallel") else 0.03
    assert row["hours"] == pytest.approx(row["paper_hours"], rel=near)
    # Our terabits are close to the paper's terabytes, which would be eight times more.
    assert row["terabits"] == pytest.approx(row["paper_terabytes"], rel=0.15)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"tokens": 0}, "tokens is 0, but must be above 0"),
    ({"params": math.nan}, "params is nan"),
    ({"batch_tokens": 512}, "chips is 0.0312 .one for .*, but .* at least 2; give mor"),
    ({"chips": 1, "method": "data_parallel"}, "chips is 1, but .* at least 2"),
    ({"chips": 3, "replicas": 4}, "chips is 3, but .* at least 4"),
    ({"method": "ring"}, "method is 'ring', but must be one of"),
  ],
)
def test_errors_name_the_field_the_value_and_the_limit(fields, message):
  valid = {"params": 1e9, "tokens": 20e9, "batch_tokens": 2**20, "replicas": 2}
  with pytest.raises(ValueError, match=message):
    wc.Training(**valid | fields)


def test_a_network_has_a_bandwidth_and_no_negative_latency():
  with pytest.raises(ValueError, match="bandwidth is 0, but must be above 0"):
    wc.Network(0, 0)
  with pytest.raises(ValueError, match="latency is -1, but must be at least 0"):
    wc.Network(1e9, -1)
  wc.Network(math.inf, 0)


def test_every_figure_draws(tmp_path):
  streaming, scaling = (2, 3, 4, 6, 7, 9, 14, 15, 16), (6, 10, 12)
  expected = {f"s{n}" for n in streaming} | {f"c{n}" for n in scaling}
  assert set(figures.FIGURES) == expected
  for name in ("s7", "s14", "c12"):  # tests/test_pictures.py draws others.
    for path in figures.draw(name, tmp_path):
      assert pathlib.Path(path).stat().st_size > 5000
  with pytest.raises(ValueError, match="figure is 's99', but must be one of s2"):
    figures.draw("s99", tmp_path)
