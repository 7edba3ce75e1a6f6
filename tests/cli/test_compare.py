"""The table and the picture of several runs."""

import dataclasses
import json

import pytest
from conftest import tiny_config, update
from running import refused, shown

from diloco.cli import compare, status
from diloco.config import changed, resolve
from diloco.config.comparable import HELD_OUT, incomparable
from diloco.contrib.sites.calendar import config_of
from diloco.log import read_run
from diloco.wire.ledger import gradient_bytes


def make_run(folder, c, last=12, loss=5.0, sent=100, peak=0):
  """Writes the files of a run, which sends `sent` bytes after every fourth step."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(c.to_dict()))
  with (folder / "metrics.jsonl").open("w") as file:
    for t in range(1, last + 1):
      r = {"kind": "step", "step": t, "tokens": t * c.tokens_per_step, "loss": loss}
      r |= {"tokens_per_s": 1000.0, "time": 1.0 * t}
      gradients = gradient_bytes(c) * c.one_model
      r["bytes_sent"] = t // 4 * sent + t * gradients
      r["peak_bytes"] = max(gradients, peak)
      file.write(json.dumps(r) + "\n")
      if t % 4 == 0:
        r = {"kind": "send", "step": t, "fragment": 0, "bytes": sent // 2}
        file.write(json.dumps(r) + "\n" + json.dumps({**r, "fragment": 1}) + "\n")
    r = {"kind": "eval", "step": last, "loss_outer": loss - 1}
    r["bits_per_byte"] = loss - 1.5
    file.write(json.dumps(r) + "\n")
  return folder


def read_runs(folder, configs, **more):
  """Runs with these configs by name, as they are read from their files."""
  return [read_run.read(make_run(folder / n, c, **more), n) for n, c in configs.items()]


def config(**fields):
  c = tiny_config()
  c.update(fields)
  return resolve(c)


@pytest.fixture
def two(tmp_path):
  """Folders of a streaming run and of a data-parallel run that is not finished."""
  plain = config(algorithm="data_parallel", seed=3)
  return [
    make_run(tmp_path / "streaming", config()),
    make_run(tmp_path / "plain", plain, last=8, loss=4.0, sent=0),
  ]


def test_the_table_has_what_differs_and_the_results(two):
  runs = [read_run.read(folder, folder.name) for folder in two]
  head, _, *lines = compare.table(runs).splitlines()
  assert head == "all: M 2, N 41,984"
  streaming, plain = (line.split() for line in lines[1:])
  assert streaming[:5] == ["streaming", "streaming", "4", "1", "e3m0"]
  assert streaming[5:] == ["0", "12", "768", "4.0000", "3.5000", "300", "100", "1,000"]
  peak = gradient_bytes(runs[1].config)
  assert plain[:5] == ["plain", "data_parallel", "-", "-", "float32"]
  assert plain[5:10] == ["3", "8", "of", "12", "512"]
  assert plain[10:] == ["3.0000", "2.5000", f"{8 * peak:,}", f"{peak:,}", "1,000"]


def test_a_field_that_differs_is_a_column(tmp_path):
  c = tiny_config()
  c.inner.learning_rate, c.overlap.alpha = 0.5, 0.25
  text = compare.table(read_runs(tmp_path, {"a": config(), "b": resolve(c)}))
  assert {"inner.learning_rate", "0.5", "overlap.alpha", "0.25"} <= {*text.split()}


def test_runs_that_differ_in_their_seeds_share_a_line(tmp_path):
  losses = {"s0": (0, 5.0), "s1": (1, 5.5), "s2": (2, 6.0)}
  runs = read_runs(tmp_path, {"x": config(sync_every=3)})
  for name, (seed, loss) in losses.items():
    runs += read_runs(tmp_path, {f"run_{name}": config(seed=seed)}, loss=loss)
  head, _, titles, *lines = compare.table(runs).splitlines()
  assert "step 12" in head
  assert "seed" in titles
  assert lines[0].split()[0] == "x"
  assert lines[1].startswith("run (n=3)")
  assert " 0, 1, 2 " in lines[1]
  assert " 4.5000 ± 0.5000 " in lines[1]  # Of 4, 4.5 and 5.
  assert lines[-1] == "±: standard deviation over the seeds; tokens/s: their mean"


def test_losses_stand_above_those_of_the_best_data_parallel_runs_seed_by_seed(tmp_path):
  # Held-out losses are 1 lower.
  losses = {
    "streaming": (config(), (5.2, 5.3, 5.1)),
    "best": (config(algorithm="data_parallel"), (5.0, 5.25, 5.0)),
    "other": (config(algorithm="data_parallel", sync_every=3), (5.3, 5.3, 5.3)),
    "short": (config(), (5.0,)),
  }
  runs = []
  for name, (c, each) in losses.items():
    for seed, loss in enumerate(each):
      own, last = dataclasses.replace(c, seed=seed), 8 if name == "short" else 12
      runs += read_runs(tmp_path, {f"{name}_{seed}": own}, last=last, loss=loss)
  alone = config(algorithm="data_parallel", sync_every=2, seed=7)
  groups = read_run.joined(runs + read_runs(tmp_path, {"alone": alone}, loss=4.9))
  # 4.2 / 4.0, 4.3 / 4.25 and 4.1 / 4.0: 5.00, 1.18 and 2.50%.
  gaps = ["+2.89 ± 1.94", "+0.00 ± 0.00", "+5.39 ± 3.65", "-", "+0.00"]
  assert compare.above(groups) == gaps
  assert compare.above(groups[:1]) == ["-"]
  assert compare.ABOVE in compare.table(runs)
  assert compare.ABOVE not in compare.table(runs[:3])


def test_runs_of_a_sweep_are_named_by_what_differs(tmp_path):
  c = tiny_config()
  c.inner.learning_rate = 0.5
  configs = {"0123456789ab": config(seed=1), "ba9876543210": resolve(c)}
  runs = compare.named(read_runs(tmp_path, configs))
  rates = [x.inner.learning_rate for x in configs.values()]
  assert {run.name for run in runs} == {
    f"streaming, M=2, H=4, seed={seed}, learning_rate={rate}"
    for seed, rate in zip((1, 0), rates)
  }
  mine = {f"my {name}": x for name, x in configs.items()}
  assert [x.name for x in compare.named(read_runs(tmp_path, mine))] == [*mine]


def test_the_peak_has_the_averages_that_the_run_counted(tmp_path):
  for counted, peak in ((170, 170), (70, 100)):
    [run] = read_runs(tmp_path, {"a": config()}, peak=counted)
    assert run.peak == peak


def test_sites_are_one_run(tmp_path):
  c = tiny_config()
  c.overlap.transport = "sites"
  whole = resolve(c)
  for k in (0, 1):
    make_run(tmp_path / f"run/site-{k}", config_of(whole, k), loss=4.0 + k)
  run = read_run.read(tmp_path / "run", "run")
  assert (run.config.replicas, run.config.tokens_per_step) == (2, whole.tokens_per_step)
  assert set(run.loss.values()) == {4.5}
  assert run.tokens_per_s == 2000
  assert run.sent[12] == 300


def test_a_site_that_jumped_to_the_last_step_is_finished(tmp_path):
  folder = make_run(tmp_path / "site", config(), last=8)
  run = read_run.read(folder, "site")
  assert compare.missing(run) == ["site is not finished; the numbers are those so far."]
  end = {"steps": 12, "bytes_sent_per_replica": 450}
  (folder / "summary.json").write_text(json.dumps(end))
  run = read_run.read(folder, "site")
  assert (run.step, run.sent[12], compare.missing(run)) == (12, 450, [])


def test_the_command_writes_the_picture(two, tmp_path):
  picture = tmp_path / "new/x.png"
  assert "plain is not finished" in shown(compare.main, *two, f"--out={picture}")
  assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
  ("args", "message"),
  [
    (["{0}", "{0}"], "is given twice"),
    (["{0}/none"], "has no metrics.jsonl (did you mean"),
    (["{0}", "--out=x.what"], "--out is 'x.what'; give a file such as compare.png"),
    (["{0}", "--out={0}/a.png"], "a.png'; give a file such as compare.png"),
  ],
)
def test_mistakes_are_told_in_one_sentence(two, args, message):
  (two[0] / "a.png").mkdir(exist_ok=True)
  assert message in refused(compare.main, *[arg.format(two[0]) for arg in args])


def test_a_held_out_loss_that_is_not_finite_is_shown(tmp_path):
  folder = make_run(tmp_path / "a", config())
  with (folder / "metrics.jsonl").open("a") as file:
    file.write('{"kind": "eval", "step": 12, "loss_outer": null}\n')
  run = read_run.read(folder, "a")
  assert "nan" in compare.table([run])
  assert "held-out     not finite at 12" in status.lines(folder, 0.0)


def test_a_run_without_a_step_is_named_beside_the_others(two, tmp_path):
  new = make_run(tmp_path / "new", config())
  (new / "metrics.jsonl").write_text("")
  out = tmp_path / "x.svg"
  assert "new has no step yet." in shown(compare.main, two[0], new, f"--out={out}")
  assert out.is_file()


def test_runs_that_differ_in_seeds_are_drawn_as_their_mean(tmp_path):
  runs = read_runs(tmp_path, {"a_0": config(seed=0)}, loss=5.0)
  runs += read_runs(tmp_path, {"a_1": config(seed=1)}, loss=4.0)
  [group] = read_run.joined(runs)
  mean = compare.mean_of(group)
  assert mean.name == "a (n=2)"
  assert mean.held_out == {12: 3.5}
  assert mean.loss == {t: (runs[0].loss[t] + runs[1].loss[t]) / 2 for t in runs[0].loss}


def test_fields_that_change_no_result_are_no_columns_and_part_no_seeds(tmp_path):
  measured = tiny_config()
  update(measured, {"diagnostics.every": 2, "seed": 1})
  runs = read_runs(tmp_path, {"s0": config(), "s1": resolve(measured)})
  assert [len(group) for group in read_run.joined(runs)] == [2]
  assert "diagnostics" not in compare.table(runs)


def test_a_text_that_changed_under_its_name_is_noticed(tmp_path):
  plain = config(algorithm="data_parallel")
  configs = {"a": plain, "b": plain, "c": dataclasses.replace(plain, seed=1)}
  runs = []
  for name, c in configs.items():
    folder = make_run(tmp_path / name, c)
    texts = {"data.source": "old", HELD_OUT: "new" if name == "b" else "old"}
    (folder / "contents.json").write_text(json.dumps(texts))
    runs.append(read_run.read(folder, name))
  a, b, c = runs
  [sentence] = incomparable([run.basis for run in runs])
  assert "differ in the content of data.eval_source, so their losses" in sentence
  assert incomparable([a.basis, c.basis]) == []
  assert read_run.joined(runs) == [[a, c], [b]]
  assert compare.above([[a], [b]]) == ["+0.00", "+0.00"]  # Each is its only rival.
  c = config()
  same = {"d": c, "e": changed(c, {"model.dim": 32})}
  other, wider = read_runs(tmp_path, same, loss=3.0)
  assert compare.above([[a], [other], [wider]]) == ["+0.00", "-50.00", "-"]
