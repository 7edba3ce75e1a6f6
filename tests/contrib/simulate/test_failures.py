"""Tests goodput against closed forms, against runs by hand, and as a command."""

import dataclasses
import json
import math
import pathlib

import numpy as np
import pytest
from scipy import optimize, stats

from diloco.config.command_line import load_config
from diloco.contrib.simulate import failures
from diloco.contrib.simulate.failures import Machines, checkpointed, rounds
from diloco.simulate import __main__ as command
from diloco.simulate import from_config
from diloco.simulate.compute_time import step_time
from diloco.simulate.utilisation import Workload

CONFIG = f"{pathlib.Path(__file__).parents[3]}/configs/chinchilla.py:1.3B,M=4"
FAST = 1e15  # Bits per second.
BENCH = "failures --params=1M --layers=2 --replicas=4 --sync_every=10 --step_time=0.1"


class Script:
  """A random generator that returns given times, and after them no failure."""

  def __init__(self, times):
    self.times = list(times)

  def exponential(self, mean):
    return self.times.pop(0) if self.times else math.inf

  def random(self):
    return 0.5


def sites(replicas=2, **fields):
  """Makes a workload of steps of one second, H = 10, with one layer per fragment."""
  settings = {"sync_every": 10, "fragment_size": 1} | fields
  return Workload.of_equal_layers(1e6, 1, 1.0, replicas=replicas, **settings)


def run_by_hand(machines, times, quorum=1, rate=FAST, **fields):
  """Simulates 100 seconds with scripted failures; returns the useful steps of all."""
  work = sites(**{"method": "diloco"} | fields)
  machines = dataclasses.replace(machines, duration=100.0)
  return 200 * rounds(work, rate, 1.0, machines, quorum, Script(times))


def efficiency(every, pause, restart, mtbf):
  """Daly's expected share of useful time (2006): failures are a Poisson process."""
  segment = mtbf * math.exp(restart / mtbf) * math.expm1((every + pause) / mtbf)
  return every / segment


@pytest.mark.parametrize("pause", [0.1, 5, 60])
@pytest.mark.parametrize("every", [30, None])
@pytest.mark.parametrize("restart", [0, 20, 150])
def test_checkpoint_restart_is_as_long_as_daly_expects(pause, every, restart):
  given = {"checkpoint_time": pause, "checkpoint_every": every, "duration": 3e6}
  machines = Machines(50, 5000, restart, **given)
  every = every or failures.daly_period(pause, 100)
  reached = checkpointed(machines, np.random.default_rng(0))
  assert reached == pytest.approx(efficiency(every, pause, restart, 100), rel=0.04)


@pytest.mark.parametrize("pause", [0.01, 1, 30, 190])
def test_dalys_period_is_nearly_the_best(pause):
  found = optimize.minimize_scalar(
    lambda every: -efficiency(every, pause, 20, 100), (1e-3, 300), method="brent"
  )
  reached = efficiency(failures.daly_period(pause, 100), pause, 20, 100)
  assert reached == pytest.approx(-found.fun, rel=0.01)
  assert failures.daly_period(250, 100) == 100


@pytest.mark.parametrize("quorum", [1, 3, 5, 6])
def test_rounds_go_on_while_a_quorum_is_up(quorum):
  """If little is lost with a payload, only the number of sites that are up counts."""
  work = sites(6, method="diloco", sync_every=1)
  # A site fails every 1000 s; a failure in the restart begins it again.
  machines = Machines(60, 10_000, restart=300, duration=3e6)
  up = math.exp(-300 / 1000)
  count = np.arange(quorum, 7)
  expected = np.sum(stats.binom.pmf(count, 6, up) * count / 6)
  reached = rounds(work, FAST, 1.0, machines, quorum, np.random.default_rng(1))
  assert reached == pytest.approx(expected, rel=0.03)
  if quorum == 6:  # All wait: any failure stops all, and nobody repeats steps.
    assert expected == pytest.approx(math.exp(-6 * 300 / 1000))


@pytest.mark.parametrize("layers", [1, 4])
def test_a_failure_loses_the_steps_since_the_last_payload_that_arrived(layers):
  """At a send, a site has up to H steps; they count if the payload crosses the link."""
  h, seconds, upload, restart = 100, 2.0, 40.0, 50.0
  work = Workload.of_equal_layers(
    1e6, layers, seconds, replicas=8, sync_every=h, fragment_size=1, bits=16
  )
  rate = 16e6 / layers / upload
  machines = Machines(8, 600, restart, duration=3e6)
  down = restart + 64e6 / rate
  interval = h * seconds
  expected = math.exp(-(down + upload) / 600) * -math.expm1(-interval / 600)
  reached = rounds(work, rate, 1.0, machines, 1, np.random.default_rng(2))
  assert reached == pytest.approx(expected / (interval / 600), rel=0.01)


def test_an_elastic_group_stops_shortly_and_lacks_a_part():
  # A failure every 100 s stops 100 chips for 5 s and takes 10 of them for 20 s, of
  # which the group runs until the next stop.
  machines = Machines(100, 10_000, reconfigure=5, part=10, repair=20, duration=3e6)
  up = 100 / (100 + 5)
  lacks = 0.1 * 100 * -math.expm1(-20 / 100) / 100
  reached = failures.elastic(machines, 1, np.random.default_rng(4))
  assert reached == pytest.approx(up * (1 - lacks), rel=0.005)
  hangs = dataclasses.replace(machines, hangs=1.0, grace=15, repair=0)
  reached = failures.elastic(hangs, 1, np.random.default_rng(5))
  assert reached == pytest.approx(100 / (100 + 5 + 15), rel=0.005)


# Goodput that Decoupled DiLoCo (arXiv 2604.21428) reports for one failure per chip and
# year, from public summaries of the paper: {chips: {M: goodput}}; M = 1 is elastic
# data-parallel.
REPORTED = {
  1_200_000: {1: 0.58, 2: 0.70, 8: 0.88, 16: 0.93},
  2_400_000: {1: 0.40, 8: 0.80, 16: 0.86},
}


@pytest.mark.parametrize("chips", REPORTED)
def test_the_defaults_explain_the_cells_that_they_were_not_fitted_to(chips):
  # The cells at 1.2M chips chose the defaults; those at 2.4M chips did not.
  machines = Machines(chips, failures.UNITS["y"], duration=3 * failures.UNITS["d"])
  for replicas, reported in REPORTED[chips].items():
    reached = failures.elastic(machines, replicas, np.random.default_rng(6))
    assert reached == pytest.approx(reported, abs=0.03)


def test_sites_behave_like_one_group_with_their_part_of_the_chips():
  machines = Machines(8000, 1e6, part=50, repair=3000, duration=3e6, runs=2)
  row = failures.simulate(sites(8), FAST, machines)
  one = dataclasses.replace(machines, chips=1000)
  alone = failures.simulate(sites(2), FAST, one).goodput["elastic"]
  assert row.goodput["elastic_sites"] == pytest.approx(alone, rel=0.01)
  assert row.goodput["elastic"] < alone - 0.05


def test_a_hang_stops_the_others_for_the_grace_time():
  work = sites(4, method="diloco", sync_every=1)
  machines = Machines(4, 1000, restart=100, grace=40, hangs=1, duration=3e6)
  cycle = 1000 + 40 + 1000 * math.expm1(100 / 1000)
  expected = 1000 / cycle * (1 - 40 / cycle) ** 3
  reached = rounds(work, FAST, 1.0, machines, 1, np.random.default_rng(3))
  assert reached == pytest.approx(expected, rel=0.01)


def test_runs_by_hand():
  machines = Machines(2, 1.0, restart=30.0, grace=8.0)
  late = 1e9
  # Site 0 fails at 25.5 s: step 20 was sent last. It is back at 55.5 s.
  times = [25.5, late, late, late]
  alone = 20 + (100 - 55.5) + 100
  assert run_by_hand(machines, times) == pytest.approx(alone)
  # The other site waits for 30 s.
  assert run_by_hand(machines, times, quorum=2) == pytest.approx(20 + 44.5 + 70)
  # The restart fails after 10 s and begins again.
  again = [25.5, late, 10.0, late, late]
  assert run_by_hand(machines, again) == pytest.approx(alone - 10)
  # The other site waits until the grace time is over, and the restart begins then.
  hang = 20 + (100 - 63.5) + 92
  hangs = dataclasses.replace(machines, hangs=1.0)
  assert run_by_hand(hangs, times) == pytest.approx(hang)
  # With tau = 3, three steps hide a part of the grace time.
  streaming = {"method": "streaming", "tau": 3}
  hidden = run_by_hand(hangs, times, **streaming)
  assert hidden == pytest.approx(hang + 3)
  # A payload that takes 6 s is lost, and the snapshot takes 24 s.
  slow = run_by_hand(machines, times, rate=16e6 / 6)
  assert slow == pytest.approx(10 + (100 - 55.5 - 24) + 100)
  # Nobody is up from 42 s to 55.5 s; then site 0 goes on at step 42.
  both = [25.5, 42.0, late, late, late, late]
  assert run_by_hand(machines, both) == pytest.approx(
    20 + (100 - 55.5) + 40 + (100 - 72)
  )


def test_a_site_contributes_each_fragment_as_its_share_of_the_parameters():
  work = dataclasses.replace(
    sites(2, method="streaming"),
    params_per_layer=(3e6, 1e6),
  )
  machines = Machines(2, 1.0, restart=1000.0, duration=100.0)
  # At 23 s the first fragment was sent at step 20, the second at step 15.
  script = Script([23.0, 1e9, 1e9])
  reached = 200 * rounds(work, FAST, 1.0, machines, 1, script)
  assert reached == pytest.approx(0.75 * 20 + 0.25 * 15 + 100)


def test_checkpoint_restart_by_hand():
  given = {"checkpoint_time": 1.0, "checkpoint_every": 9.0, "duration": 100.0}
  machines = Machines(2, 1.0, restart=30.0, grace=8.0, **given)
  # 25 s hold two segments of 10 s. From 55 s on, four more segments and 5 s.
  reached = checkpointed(machines, Script([25.0, 1e9]))
  assert 100 * reached == pytest.approx(18 + 36 + 5)
  hangs = dataclasses.replace(machines, hangs=1.0)
  hang = checkpointed(hangs, Script([25.0, 1e9]))
  assert 100 * hang == pytest.approx(18 + 27 + 7)


def test_without_failures_only_checkpoints_and_the_link_cost_time():
  work = sites(2, method="diloco")
  machines = Machines(2, 1e12, checkpoint_time=1, checkpoint_every=99, duration=1e5)
  row = failures.simulate(work, 16e5, machines)
  assert row.utilisation == pytest.approx(10 / 20)
  speed = row.utilisation
  wanted = {"data_parallel": 0.99, "restart_all": 0.99 * speed}
  wanted |= {"all_wait": speed, "quorum": speed}
  wanted |= {"elastic": 1.0, "elastic_sites": speed}
  assert row.goodput == pytest.approx(wanted)
  assert max(row.deviation.values()) == 0


def test_the_command_takes_payloads_and_schedule_from_the_config(capsys, tmp_path):
  args = ["failures", f"--config={CONFIG}", "--gbits=1", "--mtbf=10d,20d", "--runs=2"]
  assert command.main([*args, "--chips=64,512", "--duration=2d", "--json"]) == 0
  rows = json.loads(capsys.readouterr().out)
  assert [(r["chips"], r["mtbf_s"]) for r in rows] == [
    (chips, days * 86400) for chips in (64, 512) for days in (10, 20)
  ]
  c = load_config(CONFIG)
  for row in rows:
    work = from_config.workload(c, step_time(c, row["chips"]))
    machines = Machines(row["chips"], row["mtbf_s"], duration=2 * 86400, runs=2)
    own = failures.simulate(work, 1e9, machines)
    assert dataclasses.asdict(own) == row
  fixed = [*args, "--chips=64,512", "--duration=1d", "--step_time=2"]
  assert command.main([*fixed, f"--out={tmp_path}"]) == 0
  text = capsys.readouterr().out
  assert text.count("10d") == 2
  for kind in ("png", "svg"):
    assert f"{tmp_path}/simulated_failures.{kind}" in text
    assert (tmp_path / f"simulated_failures.{kind}").stat().st_size > 5000
  # More bits on the link and longer rounds change the result.
  found = set()
  for more in ("sync_every=300", "wire.format=bf16", "overlap.tau=20"):
    one = [*args, "--chips=512", "--step_time=2", "--json", f"--config.{more}"]
    assert command.main(one) == 0
    found.add(json.loads(capsys.readouterr().out)[0]["goodput"]["quorum"])
  assert len(found) == 3


def test_runs_of_minutes_on_four_sites(capsys):
  """The setting of a test with real processes: one fault per minute."""
  args = "--chips=4 --mtbf=4m --restart=15 --grace=3 --duration=10m --runs=300 --json"
  more = "--gbits=10 --fragment_size=1 --checkpoint_time=0.5 --checkpoint_every=10"
  assert command.main(f"{BENCH} {args} {more}".split()) == 0
  [row] = json.loads(capsys.readouterr().out)
  error = {m: 4 * d / math.sqrt(300) for m, d in row["deviation"].items()}
  lost = -math.expm1(-1 / 240) * 240
  expected = {
    "data_parallel": efficiency(10, 0.5, 15, 60),
    "all_wait": math.exp(-15 / 60),
    "quorum": math.exp(-15 / 240) * lost,
  }
  # The run begins with all sites up; the closed forms hold for runs without end.
  edge = {"data_parallel": 0.02, "all_wait": 0.01, "quorum": 0.003}
  for method, value in expected.items():
    assert abs(row["goodput"][method] - value) < error[method] + edge[method]


@pytest.mark.parametrize(
  ("args", "message"),
  [
    ("--chips=3", "chips is 3, but must be at least 4."),
    ("--quorum=5", "quorum is 5, but must be at least 1 and at most 4."),
    ("--hangs=2", "hangs is 2.0, but must be at least 0 and at most 1."),
    ("--mtbf=0", "mtbf is 0.0, but must be above 0."),
    ("--runs=0", "runs is 0, but must be at least 1"),
    ("--duration=0", "duration is 0.0, but must be above 0."),
    ("--mtbf=1 --duration=1y", "duration is 1y, in which 1.3e+08 chips fail; give a"),
    ("--out=/proc/none", "--out is '/proc/none', where nothing can be written"),
    ("--mfu=0.5", "--mfu needs a --config, and no --step_time."),
  ],
)
def test_impossible_settings_end_in_one_sentence(args, message, capsys):
  usual = "--gbits=1 --chips=4 --mtbf=1d --duration=1h"
  assert command.main(f"{BENCH} {usual} {args}".split()) == 2
  error = capsys.readouterr().err
  assert error.startswith("error: ")
  assert error.count("\n") == 1
  assert message in error


def test_data_parallel_has_no_rounds(capsys):
  args = "--gbits=1 --chips=4 --mtbf=1d --config.algorithm=data_parallel"
  assert command.main(["failures", f"--config={CONFIG}", *args.split()]) == 2
  assert capsys.readouterr().err == (
    "error: algorithm is data_parallel, which has no rounds; choose diloco or"
    " streaming.\n"
  )


@pytest.mark.parametrize("text", ["5x", "y", "1y,,2", "", "1 y 2"])
def test_a_time_has_a_number_and_perhaps_a_unit(text, capsys):
  with pytest.raises(SystemExit):
    command.main([*BENCH.split(), "--gbits=1", "--chips=4", f"--mtbf={text}"])
  assert capsys.readouterr().err.startswith("error: argument --mtbf: '")


def test_times_are_shown_in_their_largest_unit():
  times = {0.1: "0.1s", 90: "1.5m", 5 * 365.25 * 86400: "5y", 86400: "1d"}
  assert {t: failures.show_time(t) for t in times} == times
