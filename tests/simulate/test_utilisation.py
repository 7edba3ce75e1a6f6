"""The utilisation simulator: properties, closed forms, tables and the command."""

import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.simulate import __main__ as command
from diloco.simulate import tables
from diloco.simulate.utilisation import (
  Assumptions,
  Node,
  Workload,
  required_bandwidth,
  utilisation,
)

SHORT = Assumptions(steps=24)
RATES = np.geomspace(1e6, 1e12, 13)

workloads = st.integers(2, 8).flatmap(
  lambda layers: st.integers(2, 12).flatmap(
    lambda h: st.builds(
      Workload,
      params_per_layer=st.lists(
        st.floats(1e5, 1e8), min_size=layers, max_size=layers
      ).map(tuple),
      step_time=st.floats(1e-3, 10),
      method=st.sampled_from(["data_parallel", "diloco", "streaming"]),
      sync_every=st.just(h),
      fragment_size=st.integers(1, layers),
      pattern=st.sampled_from(["strided", "sequential"]),
      tau=st.integers(0, h - 1),
      bits=st.sampled_from([4, 16, 32]),
    )
  )
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(workloads)
def test_within_bounds_monotone_and_one_at_infinite_bandwidth(work):
  reached = utilisation(work, RATES, SHORT)
  assert np.all((reached > 0) & (reached <= 1 + 1e-12))
  assert np.all(np.diff(reached) >= -1e-12)
  assert utilisation(work, [np.inf], SHORT)[0] == pytest.approx(1)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(workloads)
def test_no_event_overlaps_another_on_its_resource_and_causes_come_first(work):
  nodes: list[Node] = []
  reached = utilisation(work, [1e9], SHORT, nodes)[0]
  for resource in ("compute", "link"):
    mine = [n for n in nodes if n.resource == resource]
    for a, b in itertools.pairwise(mine):
      assert b.start >= a.end - 1e-12 * max(a.end, 1)
  compute = [n for n in nodes if n.resource == "compute"]
  assert len(compute) == 24 * (3 * work.layers - 1)
  busy = sum(n.end - n.start for n in compute)
  assert busy / max(n.end for n in nodes) == pytest.approx(reached)
  done = {(n.step, n.layer): n.end for n in compute if n.kind == "backward_parameters"}
  forward = {(n.step, n.layer): n.start for n in compute if n.kind == "forward"}
  wait = work.tau if work.method == "streaming" else 0
  for n in nodes:
    if n.kind == "reduction":
      assert n.start >= done[n.step, n.layer] - 1e-12
      needed = (n.step + 1 + wait, n.layer)
      if needed in forward:
        assert forward[needed] >= n.end - 1e-9 * max(n.end, 1)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(workloads)
def test_diloco_at_every_step_is_data_parallel(work):
  one = dataclasses.replace(work, method="diloco", sync_every=1, tau=0)
  reference = dataclasses.replace(work, method="data_parallel", tau=0)
  np.testing.assert_array_equal(
    utilisation(one, RATES, SHORT), utilisation(reference, RATES, SHORT)
  )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(workloads)
def test_more_overlap_is_never_worse(work):
  best = np.zeros(len(RATES))
  for tau in range(work.sync_every):
    streaming = dataclasses.replace(work, method="streaming", tau=tau)
    reached = utilisation(streaming, RATES, SHORT)
    assert np.all(reached >= best - 1e-9)
    best = reached


def test_slow_links_in_closed_form():
  # On a link so slow that compute vanishes, a step takes what its bits take.
  work = Workload.of_equal_layers(1e9, 4, 0.1, method="data_parallel", bits=16)
  slow = 1e6
  assert utilisation(work, [slow])[0] == pytest.approx(0.1 / (16e9 / slow), rel=1e-3)
  # DiLoCo: once every H steps.
  diloco = Workload.of_equal_layers(
    1e9, 4, 0.1, method="diloco", sync_every=50, bits=16
  )
  assert utilisation(diloco, [slow])[0] == pytest.approx(
    50 * 0.1 / (16e9 / slow), rel=1e-2
  )


def test_one_layer_in_closed_form():
  # Forward, backward, reduction in a row: nothing can overlap.
  work = Workload((1e9,), 0.2, method="data_parallel", bits=16)
  assert utilisation(work, [1e11])[0] == pytest.approx(0.2 / (0.2 + 0.16))


def test_replicas_in_closed_form():
  # Compute vanishes: all-reducing takes 2 (M-1)/M, gathering M-1 of what M=2 takes.
  for m in (1, 2, 8):
    for method, copies in (("data_parallel", 2 * (m - 1) / m), ("diloco", m - 1)):
      work = Workload.of_equal_layers(
        1e9, 4, 1e-6, method=method, replicas=m, sync_every=1, bits=16
      )
      seconds = 1e-6 + copies * 16e9 / 1e9
      assert utilisation(work, [1e9])[0] == pytest.approx(1e-6 / seconds, rel=1e-5)


def test_table_4():
  rows = tables.table4()
  distances = [d for row in rows for d in row.distances]
  assert len(distances) == 75
  assert sum(d == 0 for d in distances) >= 70
  assert max(distances) <= 1
  for row in rows:
    if "streaming" not in row.name:
      assert row.distances == [0] * 5


def test_table_6():
  rows = tables.table6()
  assert len(rows) == 18
  for row in rows:
    assert row.distances == [0] * 5, row.name
  # Only the 0.89 is ours: with the printed 0.8, the other two models still agree.
  printed = {**tables.TABLE_6, "chinchilla": (48, 0.8)}
  distances = [d for row in tables.table6(models=printed) for d in row.distances]
  assert sum(d == 0 for d in distances) >= 73
  assert max(distances) <= 1
  for line in tables.read("scaling_table6_cu"):
    digits = len(line["step_time_s"].partition(".")[2])
    cut = int(tables.TABLE_6[line["architecture"]][1] * 10**digits) / 10**digits
    assert cut == float(line["step_time_s"])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.floats(0.1, 0.97), st.sampled_from(["data_parallel", "diloco", "streaming"]))
def test_required_bandwidth_is_just_enough(target, method):
  work = Workload.of_equal_layers(1e9, 6, 0.1, method=method, sync_every=20)
  rate = required_bandwidth(work, target, SHORT)
  assert utilisation(work, [rate], SHORT)[0] >= target
  assert utilisation(work, [rate / 1.01], SHORT)[0] < target


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"tau": 100}, "tau is 100, but sync_every is 100"),
    ({"fragment_size": 25}, "fragments.size is 25, but the model has 24 layers"),
    ({"method": "ring"}, "method is 'ring'; choose one of data_parallel"),
    ({"bits": 0}, "bits is 0; give bits per value"),
    ({"latency": float("nan")}, "latency is nan"),
    ({"sync_every": 0}, "sync_every is 0; H must be at least 1"),
    ({"replicas": 0}, "replicas is 0; M must be at least 1"),
  ],
)
def test_errors_name_field_value_and_remedy(fields, message):
  with pytest.raises(ValueError, match=message):
    Workload.of_equal_layers(1e9, 24, 0.1, **fields)


def test_numbers_that_cannot_be():
  with pytest.raises(ValueError, match=r"step_time is nan; give positive seconds"):
    Workload.of_equal_layers(1e9, 24, float("nan"))
  with pytest.raises(ValueError, match=r"params_per_layer needs at least one layer"):
    Workload.of_equal_layers(0, 24, 0.1)
  work = Workload.of_equal_layers(1e9, 24, 0.1)
  for rate in (0, -1, float("nan")):
    with pytest.raises(ValueError, match=r"bandwidth is .*; give positive bits"):
      utilisation(work, [rate])
  with pytest.raises(ValueError, match=r"target is 1.5; give a utilisation between"):
    required_bandwidth(work, 1.5)
  late = Workload.of_equal_layers(1e9, 24, 0.1, method="data_parallel", latency=1.0)
  with pytest.raises(ValueError, match=r"latency 1.0 s keeps out of reach"):
    required_bandwidth(late, 0.9)


def test_the_command(capsys):
  assert command.main(["table4"]) == 0
  last = capsys.readouterr().out.strip().splitlines()[-1]
  assert last == "exact 70/75, within one grid point 75/75"
  model = ["--params=1e9", "--layers=24", "--step_time=0.1", "--json"]
  assert command.main(["bandwidth", *model, "--target=0.95"]) == 0
  gbits = json.loads(capsys.readouterr().out)["gbits"]
  assert command.main(["utilisation", *model, f"--gbits={gbits}"]) == 0
  assert json.loads(capsys.readouterr().out)["utilisation"] == pytest.approx(
    0.95, abs=2e-3
  )
  assert command.main(["utilisation", *model, "--gbits=-1"]) == 2
  assert "error: bandwidth is" in capsys.readouterr().err


def test_no_jax_on_this_path():
  code = (
    "import sys, diloco.simulate.__main__, diloco.simulate.tables;"
    "assert not {'jax', 'matplotlib'} & set(sys.modules), sys.modules.keys()"
  )
  root = pathlib.Path(__file__).parents[2]
  subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
