"""Tests the long run: many simulated rounds, closed forms, and the commands."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import workloads

from diloco.simulate.steady import make_rules, required_bandwidth, steady_utilisation
from diloco.simulate.utilisation import Workload, utilisation

RATES = np.geomspace(1e6, 1e12, 9)
ROUNDS = 40
FP4 = {"bits": 4, "sync_every": 100}


def seconds(work, rates, steps):
  """Simulates `steps` steps node by node; returns their time at each rate."""
  return steps * work.step_time / utilisation(work, rates, steps)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(workloads)
def test_later_rounds_of_a_long_simulation_have_the_time_of_the_long_run(work):
  steps = ROUNDS * work.whole_plan[0].sync_every
  later = seconds(work, RATES, 2 * steps) - seconds(work, RATES, steps)
  expected = steady_utilisation(work, RATES)
  assert steps * work.step_time / later == pytest.approx(expected, rel=1e-6)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(workloads, st.floats(0.1, 0.97))
def test_the_required_bandwidth_is_just_enough(work, target):
  work = dataclasses.replace(work, latency=0.0, link="ideal")
  rate = required_bandwidth(work, target)
  assert steady_utilisation(work, [rate])[0] == pytest.approx(target)
  assert steady_utilisation(work, [rate / 1.01])[0] < target - 1e-4


def test_a_reduction_that_many_steps_hide_needs_only_the_mean_rate():
  # 4 Gbit in 100 steps of 0.1 s. The link is never idle, and no step waits for it.
  for tau in (13, 29, 50, 99):
    work = Workload.of_equal_layers(1e9, 24, 0.1, tau=tau, **FP4)
    assert required_bandwidth(work, 0.99) == pytest.approx(0.99 * 4e9 / 10)
    assert required_bandwidth(work, 1.0) == pytest.approx(4e9 / 10)


def test_a_short_run_charges_its_last_payload_and_the_long_run_does_not():
  work = Workload.of_equal_layers(1e9, 24, 0.1, tau=5, **FP4)
  rate = required_bandwidth(work, 0.99)
  assert utilisation(work, [rate], 300)[0] < 0.975
  later = seconds(work, [rate], 600) - seconds(work, [rate], 300)
  assert 300 * work.step_time / later[0] == pytest.approx(0.99)


def test_one_layer_in_closed_form():
  # Forward, backward and reduction run one after another: nothing can overlap.
  work = Workload((1e9,), 0.2, method="data_parallel", bits=16, latency=0.1)
  expected = 0.2 / (0.2 + 0.16 + 0.1)
  assert steady_utilisation(work, [1e11])[0] == pytest.approx(expected)
  assert required_bandwidth(work, expected) == pytest.approx(1e11)


def test_a_replica_alone_needs_no_bandwidth():
  work = Workload.of_equal_layers(1e9, 24, 0.1, replicas=1)
  assert required_bandwidth(work, 0.95) == 0
  assert steady_utilisation(work, [1.0])[0] == pytest.approx(1)


def test_every_rule_lies_between_moments_and_each_layer_crosses_once():
  work = Workload.of_equal_layers(1e9, 7, 0.1, sync_every=5, fragment_size=2, tau=3)
  rules = list(make_rules(work))
  moments = set(itertools.chain(*((r.after, r.before) for r in rules)))
  assert moments == set(range(3 * 7))
  # A transfer follows its request and the transfer before it.
  assert sorted(r.layer for r in rules if r.layer >= 0) == sorted([*range(7)] * 2)
  # Once around: the compute nodes of one round.
  chain = [r for r in rules if r.layer < 0 and r.before % 3 != 1]
  assert sum(r.nodes for r in chain) == 5 * (3 * 7 - 1)
  assert sum(r.rounds for r in chain) == 1


def test_impossible_targets_are_refused():
  work = Workload.of_equal_layers(1e9, 24, 0.1)
  with pytest.raises(ValueError, match=r"target is 1.5, but must be above 0 and at"):
    required_bandwidth(work, 1.5)
  late = Workload.of_equal_layers(1e9, 24, 0.1, method="data_parallel", latency=1.0)
  with pytest.raises(ValueError, match=r"no bandwidth reaches with a latency of 1.0 s"):
    required_bandwidth(late, 0.9)
  diloco = Workload.of_equal_layers(1e9, 24, 0.1, method="diloco")
  with pytest.raises(ValueError, match=r"target is 1.0, which no bandwidth reaches;"):
    required_bandwidth(diloco, 1.0)
  with pytest.raises(ValueError, match="bandwidth is 0 bit/s, but must be above 0"):
    steady_utilisation(work, [0])
