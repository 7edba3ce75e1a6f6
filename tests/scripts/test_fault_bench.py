"""The bench of faults: its storm, and the audit on logs made by hand."""

import copy
import json

import fault_audit as audit
import fault_bench as bench
import netns
import numpy as np
import pytest
import running

from diloco.contrib.sites.group.journal import head_of, path_of
from diloco.contrib.sites.group.records import pack

FIELDS = ["--config.train.steps=31"]


def _draw(seed, faults, every, *flags):
  argv = [f"--seed={seed}", f"--faults={faults}", f"--every={every}", *flags]
  return bench.draw(bench.parse(["--out=x", *argv]), sites=4)


def test_a_storm_has_as_many_faults_of_every_kind_as_asked():
  storm = _draw(1, 200, 60, "--s3")
  assert storm == _draw(1, 200, 60, "--s3") != _draw(2, 200, 60, "--s3")
  assert len(storm) == 200
  assert {f.kind for f in storm} == {*bench.KINDS}
  assert {f.site for f in storm} == {bench.LEADER, *range(4)}
  assert all((f.site < 0) == (f.kind == "kill leader") for f in storm)
  mean = sum(f.at for f in storm) / 200
  assert 0.8 < mean / (200 * 60 / 2) < 1.2  # Spread evenly over 200 minutes.


def test_a_storm_has_the_kinds_that_are_asked_and_possible():
  possible = {"kill", "pause", "cut", "kill leader"}
  for flags, kinds in (((), possible), (("--kinds=kill,pause",), {"kill", "pause"})):
    assert {f.kind for f in _draw(1, 60, 60, *flags)} == kinds


@pytest.mark.parametrize("every", [0.5, 3, 60])
def test_nothing_is_struck_again_before_its_fault_has_ended(every):
  storm = _draw(7, 100, every)
  assert storm == sorted(storm, key=lambda f: f.at)
  ends = {}
  for fault in storm:
    assert fault.at > ends.get(fault.site, -1)
    ends[fault.site] = fault.at + fault.seconds


def test_flags_of_the_config_are_kept_and_others_refused():
  own = [(1, "pace=0.5"), (1, "batch_size=1"), (2, "pace=0.2")]
  of_site = [f"--of_site={k}:--config.sites.{x}" for k, x in own]
  options = bench.parse(["--out=x", "--config.train.steps=19", *of_site])
  assert options.fields == ["--config.train.steps=19"]
  one, two, three = (flag.partition(":")[2] for flag in of_site)
  assert options.of_site == {1: [one, two], 2: [three]}
  for flag, said in (
    ("--nonsense=1", "--nonsense=1 is unknown"),
    ("--kinds=kill,slow", "--kinds has slow"),
  ):
    assert said in running.refused(bench.parse, "--out=x", flag)


@pytest.fixture
def calendar():
  return audit.Calendar(audit.config(bench.CONFIG, FIELDS))


@pytest.fixture
def rounds(calendar):
  """The log of a run in which site 2 missed round 1."""
  found = []
  for number, (step, fragment) in enumerate(calendar.rounds):
    members = [k for k in range(4) if (number, k) != (1, 2)]
    parts = {"tokens": 64, "payloads": 5, "per_step": 64}
    header = {name: dict.fromkeys(map(str, members), n) for name, n in parts.items()}
    header |= {"round": number, "fragment": fragment, "step": step, "refused": []}
    header |= {"late": [2] * (number == 1), "waited_s": 2.0 if number == 1 else 0.1}
    found.append(header | {"measured": {}, "data": {}})
  return found


def _metrics(k, rounds):
  records = []
  for r in rounds:
    pair = {"step": r["step"], "fragment": r["fragment"]}
    if str(k) in r["tokens"]:
      records.append({"kind": "send", **pair})
    norm = 0.5 + r["round"]
    merge = {"round": r["round"], "sites": len(r["tokens"]), "outer_update_norm": norm}
    records.append({"kind": "receive", **pair, **merge})
  return [*records, {"kind": "step", "step": 31}]


def test_an_audit_reads_all_logs(rounds, monkeypatch, tmp_path):
  # The newest snapshot has the first ten rounds, whose files are deleted.
  head = {"digests": [], "data": {}, "rounds": rounds[:10]}
  files = {head_of(10): pack(head)}
  files |= {path_of(r["round"]): pack(r) for r in rounds[10:]}
  for name, data in files.items():
    (tmp_path / "group" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "group" / name).write_bytes(data)
  for k in range(4):
    # A kill cut the second line short.
    first, *more = [json.dumps(r) + "\n" for r in _metrics(k, rounds)]
    lines = [first, '{"rou\n', *more]
    (tmp_path / f"site-{k}").mkdir()
    (tmp_path / f"site-{k}/metrics.jsonl").write_text("".join(lines))
  monkeypatch.setattr(audit, "outer_parameters", lambda path: {"theta": np.ones(1)})
  args = (tmp_path, bench.CONFIG, FIELDS, {}, slice(0, 3))
  found = audit.audit(*args)
  assert (found["problems"], found["rounds"]) == ([], len(rounds))
  assert found["tokens"] == pytest.approx((3 * 4 - 1) * 64 / 3)  # Site 2 missed one.
  assert found["merges"] == [len(rounds)] * 4
  assert [*audit.lines(tmp_path / "none")] == []
  sums = {"full": len(rounds) - 1, "fewer": 1, "lost": 1, "late": 1}
  assert found.items() >= (sums | {"longest_wait_s": 2.0}).items()
  # Site 1 has half the tokens in a step, and its payloads say otherwise.
  args[3][1] = ["--config.sites.batch_size=1"]
  assert len(audit.audit(*args)["problems"]) == len(rounds)


def test_rounds_that_are_missing_or_twice_or_out_of_order_are_found(rounds, calendar):
  for damaged in (
    rounds[:3] + rounds[4:],
    rounds[:-1],
    [*rounds[:3], rounds[2], *rounds[3:]],
    [rounds[1], rounds[0], *rounds[2:]],
  ):
    assert "rounds" in audit.check_rounds(damaged, calendar)[0]
  assert audit.check_rounds(rounds[:-1], calendar, stopped=True) == []
  assert audit.check_rounds(rounds[:3] + rounds[4:], calendar, stopped=True)


def test_a_round_of_another_step_or_without_payloads_is_found(rounds, calendar):
  other = copy.deepcopy(rounds)
  other[2]["step"] += 1
  assert "round 2" in audit.check_rounds(other, calendar)[0]
  other = copy.deepcopy(rounds)
  del other[4]["payloads"]["3"]
  assert "round 4" in audit.check_rounds(other, calendar)[0]


def test_a_site_whose_metrics_disagree_with_the_log_is_found(rounds, calendar):
  def problems(change):
    records = _metrics(1, rounds)
    change(records)
    return audit.check_site(1, records, rounds, calendar)

  merged = [i for i, r in enumerate(_metrics(1, rounds)) if r["kind"] == "receive"]
  last = len(rounds)
  assert "never closed" in problems(lambda r: r[merged[2]].update(round=last))[0]
  assert "merged round 2" in problems(lambda r: r[merged[2]].update(sites=3))[0]
  assert "never sent" in problems(lambda r: r.pop(0))[0]
  assert "ended at step" in problems(lambda r: r.pop())[0]


def test_a_kill_may_cut_off_the_newest_send_and_no_other(rounds, calendar):
  records = _metrics(1, rounds)
  sends = [i for i, r in enumerate(records) if r["kind"] == "send"]
  arrival = {"kind": "arrival", "step": records[sends[3]]["step"] + 2}
  check = lambda of_site: audit.check_site(1, of_site, rounds, calendar)
  killed = [*records[: sends[3]], arrival, *records[sends[3] + 1 :]]
  assert check(killed) == []
  killed.remove(records[sends[2]])
  # Then this one was the newest, so round 3 must be there.
  assert check(killed) == ["round 3 has a payload that site 1 never sent"]
  assert len(check(records[: sends[3]] + records[sends[3] + 1 :])) == 1


@pytest.mark.parametrize("tokens", [65, 31 * 64])
def test_a_payload_with_other_tokens_than_its_steps_is_found(tokens, rounds, calendar):
  assert audit.check_tokens(1, rounds, calendar) == []
  rounds[2]["tokens"]["1"] = tokens
  (problem,) = audit.check_tokens(1, rounds, calendar)
  assert f"round 2 has {tokens} tokens of site 1" in problem


def test_sites_that_computed_other_numbers_from_a_round_are_found(rounds):
  sites = {k: _metrics(k, rounds) for k in range(4)}
  next(r for r in sites[3] if r["kind"] == "receive")["outer_update_norm"] = 0.6
  (problem,) = audit.check_merges(sites)
  assert "site 3" in problem


def test_one_other_bit_in_a_last_checkpoint_is_found(monkeypatch, tmp_path):
  arrays = {"9.theta": np.arange(4, dtype=np.float32)}
  changed = {"9.theta": np.nextafter(arrays["9.theta"], 9)}
  names = [f"site-{k}" for k in range(4)]
  for name, different, expected in (
    ("site-2", arrays, []),
    ("site-2", changed, ["site-2 ends with other values of ['9.theta']"]),
    ("site-1", {}, ["site-1 has no last checkpoint like that of site-0"]),
  ):
    stored = lambda path, n=name, x=different: x if path.name == n else arrays
    monkeypatch.setattr(audit, "outer_parameters", stored)
    assert audit.check_states(tmp_path, names) == expected


@pytest.mark.slow("a storm of faults")
@pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))
@pytest.mark.parametrize(
  "flags", [["--config.sites.lost_s=2"], ["--s3", "--config.sites.lost_s=8"]]
)
def test_a_run_survives_a_storm_and_its_audit(tmp_path, flags):
  argv = [f"--out={tmp_path}/run", "--faults=6", "--every=3", "--seed=2", *flags]
  argv += ["--config.train.steps=400", "--limit=1500", "--step=0.1,0.2"]
  argv += [f"--of_site={k}:--config.sites.pace=0.5" for k in (1, 2, 3)]
  done = running.python("scripts/experiments/fault_bench.py", *argv)
  assert done.returncode == 0, done.stderr[-4000:]
  found = json.loads((tmp_path / "run/faults.json").read_text())
  assert found["problems"] == []
  assert found["faults"] == 6
  assert found["full"] + found["fewer"] == found["rounds"]
  assert found["loss"] < 7
