"""Tests the utilisation simulator: properties, closed forms, tables and the command."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from running import refused, shown
from workloads import workloads

from diloco.simulate import __main__ as command
from diloco.simulate import tables
from diloco.simulate.utilisation import LINKS, Link, Node, Workload, utilisation

STEPS = 24  # Fewer than the default, so that the tests are fast.
RATES = np.geomspace(1e6, 1e12, 13)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(workloads)
def test_utilisation_is_a_share_that_grows_with_bandwidth_up_to_one(work):
  reached = utilisation(work, RATES, STEPS)
  assert np.all((reached > 0) & (reached <= 1 + 1e-12))
  assert np.all(np.diff(reached) >= -1e-12)
  instant = dataclasses.replace(work, latency=0.0, link="ideal")
  assert utilisation(instant, [np.inf], STEPS)[0] == pytest.approx(1)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(workloads)
def test_nodes_of_a_resource_do_not_overlap_and_start_after_their_inputs(work):
  nodes: list[Node] = []
  reached = utilisation(work, [1e9], STEPS, nodes)[0]
  for resource in ("compute", "link"):
    mine = [n for n in nodes if n.resource == resource]
    for a, b in itertools.pairwise(mine):
      assert b.start >= a.end - 1e-12 * max(a.end, 1)
  compute = [n for n in nodes if n.resource == "compute"]
  assert len(compute) == STEPS * (3 * work.layers - 1)
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
def test_diloco_that_syncs_at_every_step_is_data_parallel(work):
  one = dataclasses.replace(work, method="diloco", sync_every=1, tau=0)
  reference = dataclasses.replace(work, method="data_parallel", tau=0)
  np.testing.assert_array_equal(
    utilisation(one, RATES, STEPS), utilisation(reference, RATES, STEPS)
  )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(workloads)
def test_more_overlap_is_never_worse(work):
  best = np.zeros(len(RATES))
  for tau in range(work.sync_every):
    streaming = dataclasses.replace(work, method="streaming", tau=tau)
    reached = utilisation(streaming, RATES, STEPS)
    assert np.all(reached >= best - 1e-9)
    best = reached


def test_a_link_in_closed_form(monkeypatch):
  monkeypatch.setitem(LINKS, "mine", Link(0.8, 0.1))
  monkeypatch.setitem(LINKS, "waits", Link(1.0, 0.1))
  fields = {"method": "diloco", "sync_every": 50, "bits": 16}
  work = Workload((1e9,), 0.2, **fields, link="mine")
  expected = 10 / (10 + 16 / 0.8 + 0.1 * 10)
  assert utilisation(work, [1e9], 100)[0] == pytest.approx(expected)
  # Of streaming, each of two fragments waits for a tenth of 25 steps; overlap hides it.
  work = Workload((1e-9, 1e-9), 0.2, "streaming", 2, 50, 1, link="waits")
  assert utilisation(work, [1e9], 5000)[0] == pytest.approx(1 / 1.1, rel=2e-2)
  hidden = dataclasses.replace(work, tau=3)
  assert utilisation(hidden, [1e9], 5000)[0] > 0.999


def test_replicas_in_closed_form():
  # Compute time does not count. For M=2 one copy of the values crosses the link;
  # an all-reduce sends 2 (M-1)/M copies, a gather M-1 copies.
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


def test_table_6(monkeypatch):
  rows = tables.table6()
  assert len(rows) == 18
  for row in rows:
    assert row.distances == [0] * 5, row.name
  for line in tables.read("scaling_table6_cu"):
    digits = len(line["step_time_s"].partition(".")[2])
    cut = int(tables.TABLE_6[line["architecture"]][1] * 10**digits) / 10**digits
    assert cut == float(line["step_time_s"])
  # Only the 0.89 is ours: with the printed 0.8, the other two models still agree.
  monkeypatch.setitem(tables.TABLE_6, "chinchilla", (48, 0.8))
  distances = [d for row in tables.table6() for d in row.distances]
  assert sum(d == 0 for d in distances) >= 73
  assert max(distances) <= 1


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"tau": 100}, "tau is 100, but sync_every is 100"),
    ({"fragment_size": 25}, "fragments.size is 25, but the model has 24 layers"),
    ({"method": "ring"}, "method is 'ring', but must be one of data_parallel"),
    ({"link": "tcp"}, "link is 'tcp', but must be one of ideal, nccl, gloo"),
    ({"bits": 0}, "bits is 0, but must be above 0 and at most 1000000"),
    ({"latency": math.nan}, "latency is nan, but must be at least 0"),
  ],
)
def test_errors_name_the_field_the_value_and_the_limit(fields, message):
  valid = {"params": 1e9, "layers": 24, "step_time": 0.1}
  with pytest.raises(ValueError, match=message):
    Workload.of_equal_layers(**valid | fields)


def test_the_commands_agree():
  last = shown(command.main, "table4").strip().splitlines()[-1]
  assert last == "exact 70/75, within one grid point 75/75"
  model = ["--params=1e9", "--layers=24", "--step_time=0.1", "--json"]
  gbits = json.loads(shown(command.main, "bandwidth", *model, "--target=0.95"))["gbits"]
  found = json.loads(shown(command.main, "utilisation", *model, f"--gbits={gbits}"))
  assert found["utilisation"] == pytest.approx(0.95)
  assert "bandwidth is" in refused(command.main, "utilisation", *model, "--gbits=-1")
