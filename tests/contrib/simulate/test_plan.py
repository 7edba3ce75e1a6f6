"""The planner: losses against the runs behind them, hours against closed forms."""

import dataclasses
import itertools
import json
import re
import statistics

import pytest
from running import ROOT, read_csv, refused, shown

from diloco.config import changed
from diloco.config.command_line import load_config
from diloco.contrib.simulate import plan
from diloco.contrib.simulate.plan import Cell, Row
from diloco.errors import ConfigError
from diloco.simulate import __main__ as command
from diloco.spec.shapes import flops_per_token

SAMPLE = [f"--config={ROOT / 'configs' / 'sample.py'}", "--step_time=0.06"]


@pytest.fixture(scope="module")
def sample():
  return load_config(str(ROOT / "configs" / "sample.py"), [])


def row(hours, percent, **fields):
  usual = Row(1.0, "streaming", 2, 30, 1, "e3m0", 1.0, 8.0, percent, 0.1, hours, "")
  return dataclasses.replace(usual, **fields)


def test_the_small_losses_are_those_of_the_recorded_runs():
  runs = read_csv(ROOT / "docs" / "reproduced.csv")
  # Runs with an accuracy trained on another text.
  runs = [r for r in runs if r["params"] == "141920" and not r["accuracy"]]
  runs = [r for r in runs if r["test_loss"]]
  others = ("tau", "bits", "method", "overtrain", "batch", "fragment", "fedpart")
  # These runs trained on another text, too.
  others += ("momentum", "tuned_momentum")

  def by_seed(cell):
    """Returns {seed: told loss of the run with the smallest chosen loss}."""
    found = dict[str, tuple[float, float]]()
    for r in runs:
      h = r["point_sync_every"] or ("30" if r["point_fixed"] == "global" else "")
      same = (r["algorithm"], r["point_replicas"], h)
      if same == cell and not any(r[f"point_{o}"] for o in others):
        one = (float(r["loss"]), float(r["test_loss"]))
        found[r["point_seed"]] = min(found.get(r["point_seed"], one), one)
    return {seed: told for seed, (_, told) in found.items()}

  plain = by_seed(("data_parallel", "2", "30"))
  t = {3: 2.92, 4: 2.353}  # Student's t for intervals of 90%.
  small = [x for x in plan.cells() if x.params == 141_920]
  assert len(small) == 7
  for x in small:
    told = by_seed(("streaming", str(x.replicas), str(x.sync_every)))
    above = [100 * (told[s] / plain[s] - 1) for s in told if s in plain]
    assert x.percent == pytest.approx(statistics.mean(above), abs=0.006)
    half = t[len(above)] * statistics.stdev(above) / len(above) ** 0.5
    assert x.half == pytest.approx(half, abs=0.006)


CELLS = [
  Cell(1e6, 2, 10, 1.0, 0.1),
  Cell(1e6, 2, 100, 3.0, 0.3),
  Cell(4e6, 2, 10, 0.0, 0.1),
  Cell(4e6, 2, 100, 1.0, 0.1),
  Cell(1e6, 8, 10, 9.0, 2.0),
]


@pytest.mark.parametrize(
  ("fields", "percent", "half", "note"),
  [
    ({}, 1.0, 0.1, "1M"),
    ({"sync_every": 30}, 1 + 2 * 0.4771, 0.1 + 0.2 * 0.4771, "1M"),  # log10(3)
    ({"sync_every": 5}, 1.0, 0.1, "1M; H = 5"),
    ({"n": 2e6}, 0.5, 0.1, "1M, 4M"),
    ({"n": 5e5}, 1.0, 0.1, "1M; N = 5e+05"),
    ({"n": 8e6}, 0.0, 0.1, "4M; N = 8e+06"),
    ({"replicas": 4}, 5.0, 1.05, "1M"),
    # At 4e6 only M = 2 ran; at 1e6, M = 8 adds 8.
    ({"n": 2e6, "replicas": 8}, 8.5, 2.0025, "1M, 4M; M = 8"),
    ({"replicas": 16}, 13.0, 2.0, "1M; M = 16"),
    ({"sync_every": 1000}, 5.0, 0.3, "1M; H = 1e+03"),
    ({"wire.format": "bf16", "plugins": ("bins",)}, 1.0, 0.1, "1M; bf16, bins"),
    ({"overlap.tau": 5, "overlap.taus": ()}, 1.21, (0.1**2 + 0.22**2) ** 0.5, "1M"),
  ],
)
def test_the_loss_beyond_measurements(sample, monkeypatch, fields, percent, half, note):
  for count in ("matrix_params", "num_params"):
    monkeypatch.setattr(plan, count, lambda m: n)
  fields = dict(fields)
  n = fields.pop("n", 1e6)
  if "replicas" in fields:
    fields |= {"train.batch_size": 16, "overlap.taus": ()}
  found = plan.loss_above(changed(sample, fields), CELLS)
  assert found[:2] == pytest.approx((percent, half), abs=2e-3)
  sizes, _, missing = note.partition("; ")
  missing = f"; not measured: {missing}" if missing else ""
  assert found[2] == f"from {sizes}, three seeds{missing}"


@pytest.mark.parametrize("n", [1e5, 2e5, 2.7e5, 1e6, 3e6, 1e8, 2e9])
def test_more_replicas_have_no_smaller_loss(sample, monkeypatch, n):
  for count in ("matrix_params", "num_params"):
    monkeypatch.setattr(plan, count, lambda m: n)
  for h in plan.H:
    fields = {"sync_every": h, "train.batch_size": 8, "overlap.taus": ()}
    some = [changed(sample, fields | {"replicas": m}) for m in (2, 4, 8)]
    losses = [plan.loss_above(c, plan.cells())[0] for c in some]
    assert losses == sorted(losses)


def test_efficient_rows_are_those_that_no_row_beats():
  rows = [row(h, p) for h, p in itertools.product((1, 2, 3), (0.5, 1.0))]
  rows += [row(0.5, 2.0), row(4.0, 0.1), row(4.0, 0.6)]
  kept = [(r.hours, r.percent) for r in plan.efficient(rows)]
  assert kept == [(0.5, 2.0), (1, 0.5), (4.0, 0.1)]


def test_the_smallest_loss_of_the_busy_rows_is_recommended():
  slow, fast, worse = row(9, 0.1, utilisation=0.5), row(1, 0.9), row(0.9, 2.0)
  assert plan.recommended([slow, fast, worse], to_target=False) == fast
  assert plan.recommended([slow], to_target=False) is None
  alone = row(2 * fast.hours, fast.percent, utilisation=1.0, bytes_per_token=0)
  assert plan.recommended([alone, fast], to_target=False) == fast


def test_the_fastest_row_to_the_target_is_recommended():
  # The curve reaches 4.0 at half of the run and 3.0 at its end.
  curve = [(0.1, 8.0), (0.5, 4.0), (1.0, 3.0)]
  rows = [row(10, 0.0), row(6, 5.0), row(5, 40.0), row(8, 0.0)]
  timed = [plan.timed(r, curve, 3.5) for r in rows]
  hours = [r.hours_to_target for r in timed]
  wanted = 3.5 / 1.05  # Without what the loss is above, the curve must fall to this.
  share = 0.5 + 0.5 * (4.0 - wanted)
  assert hours == [pytest.approx(7.5), pytest.approx(6 * share), None, pytest.approx(6)]
  assert plan.recommended(timed, to_target=True) == timed[1]


def test_the_curve_is_that_of_the_configs_model_and_tokens(tmp_path, sample):
  plain = changed(sample, {"algorithm": "data_parallel", "data.source": "files:/x"})
  (tmp_path / "config.json").write_text(json.dumps(plain.to_dict()))
  evals = [{"kind": "eval", "step": t, "loss_outer": 9 - t / 800} for t in (800, 3200)]
  lines = "".join(json.dumps(r | {"bits_per_byte": 1}) + "\n" for r in evals)
  (tmp_path / "metrics.jsonl").write_text(lines)
  args = {"config": sample, "curve": tmp_path}
  assert plan.held_out(args) == [(0.25, 8.0), (1.0, 5.0)]
  for field, value in (("train.steps", 800), ("model.dim", 64)):
    other = args | {"config": changed(sample, {field: value})}
    said = r"train.tokens is 1638400, and --config has" if "train" in field else field
    with pytest.raises(ConfigError, match=f"where {said}"):
      plan.held_out(other)


def run(*args):
  return shown(command.main, "plan", *args)


def test_hours_on_a_fast_link_are_those_of_the_steps_and_syncs(sample):
  args = (*SAMPLE, "--gbits=1e9", "--json", "--all")
  without = json.loads(run(*args))["rows"]
  hours = sample.train.steps * 0.06 / 3600
  for r in without:
    assert r["utilisation"] == pytest.approx(1, abs=1e-6)
    assert r["hours"] == pytest.approx(hours, rel=1e-5)
  assert {r["method"] for r in without} == {"data_parallel", "streaming"}
  # Syncs lengthen a round, but not data-parallel.
  rounds = {r["sync_every"]: sample.train.steps / r["sync_every"] for r in without}
  for r, s in zip(without, json.loads(run(*args, "--sync_time=0.03"))["rows"]):
    more = 0 if r["method"] == "data_parallel" else 0.03 * rounds[r["sync_every"]]
    assert s["hours"] - r["hours"] == pytest.approx(more / 3600, abs=1e-9)
    assert s["utilisation"] == r["utilisation"]


def test_data_parallel_waits_for_its_gradients_on_a_slow_link(sample):
  found = json.loads(run(*SAMPLE, "--gbits=1e-4", "--json", "--all"))
  plain = next(r for r in found["rows"] if r["method"] == "data_parallel")
  sent = 4 * 1_066_624 * 8 / 1e5  # Seconds for float32 gradients of all parameters.
  hours = sample.train.steps * sent / 3600
  assert plain["hours"] == pytest.approx(hours, rel=0.01)
  assert plain["bytes_per_token"] == pytest.approx(4 * 1_066_624 / 512)


def test_more_replicas_share_the_batch_and_all_chips():
  name = f"{ROOT / 'configs' / 'chinchilla.py'}:1.3B,M=2"
  args = (f"--config={name}", "--gbits=1e9", "--json", "--all", "--replicas=2,4")
  hours = {}
  for speed in ("--step_time=1", "--chips=64"):
    rows = json.loads(run(*args, speed))["rows"]
    hours[speed] = {r["replicas"]: r["hours"] for r in rows}
  c = load_config(name)
  one = {m: c.train.steps / 3600 * 2 / m for m in (2, 4)}
  assert hours["--step_time=1"] == pytest.approx(one)
  seconds = flops_per_token(c.model) * c.train.tokens / (64 * 197e12 * 0.4)
  assert hours["--chips=64"] == pytest.approx(dict.fromkeys((2, 4), seconds / 3600))


def test_the_recommended_flags_can_be_typed(sample):
  lines = run(*SAMPLE, "--gbits=0.02").splitlines()
  step, assumed, *_, rule, after, last = lines
  assert step.split()[:2] == ["step", "0.06"]
  assert "0.02 Gbit/s, latency 0 s, ideal link; 1,066,624 parameters, batch" in assumed
  assert "smallest loss of all settings that are busy for 95%" in rule
  assert re.fullmatch(r"next row +\S+ h more for \S+ points less loss", after)
  _, *flags = last.split()
  c = load_config(str(ROOT / "configs" / "sample.py"), flags)
  assert c.sync_every in plan.H
  taus = "--config.overlap.taus=(1,5)"
  *_, note, _ = run(*SAMPLE, "--gbits=0.02", taus).splitlines()
  assert "leave out overlap.taus, which would replace this tau" in note


@pytest.mark.parametrize(
  "args",
  [
    ["--config=chinchilla:1.3B,M=2,algorithm=diloco", "--chips=64", "--gbits=10"],
    [*SAMPLE, "--gbits=1", "--sync_time=3"],  # Data-parallel is faster, but less busy.
    [*SAMPLE, "--gbits=1", "--replicas=2,4", "--target=4"],
  ],
)
def test_the_recommended_row_is_in_the_table(args, monkeypatch):
  monkeypatch.setattr(plan, "held_out", lambda args: [(0.1, 5.0), (1.0, 3.0)])
  found = json.loads(run(*args, "--json"))
  assert found["recommended"][0] in found["rows"]


def test_a_config_of_another_algorithm_has_the_same_settings(sample):
  flag = "--config.algorithm=diloco"
  diloco = load_config(str(ROOT / "configs" / "sample.py"), [flag])
  ours, theirs = (
    {(c.sync_every, c.overlap.taus, len(c.make_fragments())) for c in settings}
    for settings in (plan.settings(sample, [4]), plan.settings(diloco, [4]))
  )
  assert {fragments for *_, fragments in ours} == {0, 5}  # 0: data-parallel.
  assert {x for x in ours if x[2]} <= theirs
  flags = "recommended  --config.algorithm=streaming --config.sync_every="
  assert flags in run(*SAMPLE, flag, "--gbits=0.02")


def test_a_loss_whose_sign_is_not_known_has_none():
  rows = [row(1, -0.2, half=0.3), row(1, -0.4, half=0.3), row(1, 0.0, half=0.0)]
  _, *lines = plan.table(rows, {"gbits": [1]})
  found = [re.search(r"8 +(.+?) +1", line)[1] for line in lines]
  assert found == ["0 ± 0.50", "-0.40 ± 0.30", "0"]


def test_several_rates_have_a_row_each_and_a_picture(sample, tmp_path):
  out = tmp_path / "plan.png"
  rates = [1e-9, 0.02, 1.0]
  args = (*SAMPLE, "--json", f"--gbits={','.join(map(str, rates))}", f"--out={out}")
  found = json.loads(run(*args))
  none, slow, fast = found["recommended"]
  assert none is None
  assert found["rows"] == [slow, fast]
  for rate, best in zip(rates[1:], (slow, fast)):
    one = json.loads(run(*SAMPLE, "--json", f"--gbits={rate}"))
    assert one["recommended"] == [best]
  assert out.stat().st_size > 5000
  text = run(*args[:1], SAMPLE[1], args[3])
  assert "1e-09 Gbit/s: no setting keeps the replicas busy" in text


def test_rounds_are_no_longer_than_the_run(sample):
  short = changed(sample, {"train.steps": 40, "inner.warmup_steps": 9})
  found = {x.sync_every for x in plan.settings(short, ()) if not x.one_model}
  assert found == {5, 10}  # With H = 30, the last fragment is first sent at step 54.


def test_a_target_that_no_setting_reaches_is_told(monkeypatch):
  monkeypatch.setattr(plan, "held_out", lambda args: [(0.5, 8.0), (1.0, 4.0)])
  last = run(*SAMPLE, "--gbits=1", "--target=3").splitlines()[-1]
  assert last == "recommended  none: no setting reaches 3; raise --target."


@pytest.mark.parametrize(
  ("args", "error"),
  [
    (["--gbits=1", "--step_time=1"], "--config is missing; plan needs one"),
    ([*SAMPLE, "--gbits=1", "--target=4"], "--target needs --curve, the folder"),
    ([*SAMPLE, "--gbits=1", "--curve=/etc", "--target=4"], "--curve is '/etc', which"),
    ([*SAMPLE, "--gbits=1", "--curve=/etc"], "--curve is only for --target; give"),
    ([*SAMPLE, "--gbits=1", "--replicas=3"], "batch_size is 4, which replicas = 3"),
    ([*SAMPLE, "--gbits=1", "--target=0"], "target is 0.0, but must be above 0"),
    ([*SAMPLE, "--gbits=1", "--sync_time=-1"], "sync_time is -1.0, but must be"),
    ([*SAMPLE, "--gbits=1", "--out=plan.xyz"], "--out is 'plan.xyz'; give a file such"),
  ],
)
def test_mistakes_are_told(args, error):
  assert error in refused(command.main, "plan", *args)
