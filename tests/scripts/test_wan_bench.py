"""The bench of limited links: its plan, its sums, and one run from end to end."""

import itertools

import netns
import pytest
import running
import wan_bench as bench

from diloco.spec.shapes import num_params


def options(*argv):
  return bench.parse(["--out=x", *argv])


def test_every_method_is_a_valid_config():
  for method in bench.METHODS:
    c = bench.resolved(options("--replicas=4"), method)
    assert c.replicas == 4
    assert c.log.every in (1, 5)
    assert 1e6 < num_params(c.model) < 4e6


@pytest.mark.parametrize("method", [m for m in bench.METHODS if m != "data-parallel"])
def test_phases_are_whole_rounds_between_two_sends(method):
  given = options("--rates=8,32", "--rounds=2", "--repeats=3")
  c = bench.resolved(given, method)
  schedule = c.make_schedule()
  phases = bench.plan(given, method, 0.05)
  assert [p.rate for p in phases] == 3 * [32e6] + 3 * [8e6]
  for phase in phases:
    assert phase.last - phase.first == 2 * c.sync_every
    # At both ends nothing is in flight, and nothing is sent in the next step.
    for step in (phase.first, phase.last):
      assert not schedule.in_flight(step)
      assert not schedule.sends(step)
      assert not schedule.sends(step + 1)
      assert step % c.log.every == 0
  for before, after in itertools.pairwise(phases):
    assert before.last <= after.starts < after.first


def test_data_parallel_leaves_out_rates_that_take_too_long():
  given = options("--rates=1,100,10", "--longest_step=10", "--seconds=20")
  phases = bench.plan(given, "data-parallel", 0.05)
  c = bench.resolved(given, "data-parallel")
  bits = 32 * num_params(c.model)
  assert [p.rate for p in phases] == [100e6, 10e6]
  assert phases[1].last - phases[1].first == int(20 / (bits / 10e6 + 0.05))


def _trace(step_s=0.1, sync_s=1.0, sends=10, payload=5000):
  """Steps of 0.1 s; every tenth takes one second longer, in which it sends."""
  records, samples, now, sent = [], [], 1000.0, 0
  for t in range(1, 101):
    now += step_s
    samples.append((now, sent))
    if t % sends == 0:
      now += sync_s
      sent += payload
      samples.append((now, sent))
      records.append({"kind": "send", "step": t, "bytes": payload})
      records.append({"kind": "receive", "step": t, "waited_s": sync_s})
    if t % 5 == 0:
      records.append({"kind": "step", "step": t, "time": now})
  return bench.Trace(records, samples)


def _row(method="DiLoCo", rate=8e6, seconds=1000.0):
  c = bench.resolved(options(), "DiLoCo")
  return bench.row(c, method, bench.Phase(rate, 10, 15, 95), seconds, _trace(), 0.1)


def test_a_row_of_a_known_trace():
  row, c = _row(), bench.resolved(options(), "DiLoCo")
  assert row["steps"] == 80
  assert row["wall_s"] == pytest.approx(80 * 0.1 + 8 * 1.0)
  assert row["utilisation"] == pytest.approx(0.5)
  assert row["waited_s"] == pytest.approx(8.0)
  assert row["bytes_per_step"] == pytest.approx(8 * 5000 / 80)
  assert row["counters_to_ledger"] == pytest.approx(1.0)
  tokens = c.train.batch_size * c.model.seq_len
  assert row["tokens_per_s"] == pytest.approx(80 * tokens / 16.0)
  with pytest.raises(RuntimeError, match=r"DiLoCo at 8 Mbit/s: the rate was set"):
    _row(seconds=1e9)
  # Half of the steps that are logged send nothing.
  phase = bench.Phase(8e6, 10, 15, 95)
  assert _trace(sends=20).compute_seconds(phase) == pytest.approx(0.1)


def test_predictions_have_closed_forms():
  """A reduction that nothing hides costs its bits over the rate."""
  c = bench.resolved(options(), "DiLoCo")
  bits, seconds, rate = 32 * num_params(c.model), 0.05, 1e7
  compute = c.sync_every * seconds
  # The backward pass hides some of it, at most one step.
  found = bench.predicted(c, seconds, rate)
  assert compute / (compute + bits / rate) <= found
  assert found <= compute / (compute + bits / rate - seconds)
  four = bench.resolved(options("--replicas=4"), "DiLoCo")
  assert bench.predicted(four, seconds, 3 * rate) == pytest.approx(found)
  fp4 = bench.resolved(options(), "Streaming, overlap, FP4")
  # Everything is hidden, except the last send.
  assert 0.99 < bench.predicted(fp4, seconds, rate) <= 1


def test_the_table_is_ordered_and_compares_bytes():
  rows = [
    {**_row(method, rate), "bytes_per_step": sent}
    for method, sent in (("data-parallel", 4000.0), ("DiLoCo", 10.0))
    for rate in (8e6, 2e6)
  ]
  lines = bench.table(rows).splitlines()[2:]
  both = ("DiLoCo", "data-parallel")
  wanted = [[f" {method} ", f" {rate} "] for rate in (2, 8) for method in both]
  assert [line.split("|")[1:3] for line in lines] == wanted
  assert lines[0].endswith("| 400x |")
  # Repeated rows are one line with their range.
  row, shares = _row(), (0.5, 0.7, 0.6)
  rows = [{**row, "utilisation": share, "tokens_per_s": 10 * share} for share in shares]
  [line] = bench.table(rows).splitlines()[2:]
  assert line.split("|")[3] == " 60.0% (50.0% to 70.0%) "
  assert line.split("|")[5] == " 6 "


def test_results_of_other_methods_are_kept(tmp_path):
  given = bench.parse([f"--out={tmp_path}", "--methods", "Streaming"])
  assert bench.load(given) == []
  row = _row()
  bench.save(given, [{**row}, {**row, "method": "Streaming"}])
  [kept] = bench.load(given)
  assert kept.pop("method") == row.pop("method")
  assert kept == pytest.approx(row, rel=1e-5)
  assert len((tmp_path / "wan.md").read_text().splitlines()) == 4


@pytest.mark.slow("a benchmark in network namespaces")
@pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))
def test_one_command_measures_and_saves(tmp_path):
  argv = [f"--out={tmp_path}", "--methods", "DiLoCo", "--rates=50,500"]
  done = running.python("scripts/experiments/wan_bench.py", *argv)
  if "run again on an idle machine" in done.stderr:
    pytest.skip(done.stderr.splitlines()[-1])
  assert done.returncode == 0, done.stderr[-4000:]
  rows = running.read_csv(tmp_path / "wan.csv")
  assert len(rows) == 2
  for row in rows:
    # At least the payload; headers add at most the claimed three per cent.
    assert 1 < float(row["counters_to_ledger"]) < 1.03
  assert "DiLoCo" in (tmp_path / "wan.md").read_text()
  assert (tmp_path / "wan.png").stat().st_size > 10_000
