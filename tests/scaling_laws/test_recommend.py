"""Recommendations from the paper's laws and from your own runs."""

import itertools
import json
import math
import re

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import refused, shown
from test_results import make_run, write

from diloco.config.command_line import load_config
from diloco.scaling_laws import paper, predict, results, runs
from diloco.scaling_laws import recommend as lib
from diloco.scaling_laws.__main__ import main, train_command
from diloco.scaling_laws.fits import PowerLaw


def test_the_joint_method_takes_the_laws_of_table_10():
  found = lib.recommend(4e9, 2)
  assert found.learning_rate == pytest.approx(22256 * 4e9**-0.8827 * 2**0.2929)
  batch = 0.00709 * 4e9**0.4695 * 2**0.3399 * 2048
  assert found.batch_tokens == pytest.approx(batch)
  assert found.batch_sequences == 256
  assert found.tokens == found.steps * 256 * 2048
  assert 80e9 - found.tokens < 256 * 2048
  assert found.notes == ()
  near, far = (lib.recommend(4e9, 2, batch_tokens=x * batch) for x in (1.2, 4))
  assert near.notes == ()
  assert "those of the laws' batch, 592,193 tokens, and do not hold" in far.notes[0]


def test_the_independent_method_takes_the_laws_of_tables_8_and_9():
  found = lib.recommend(1.3e9, 4, "independent")
  assert found.learning_rate == pytest.approx(4512.99 * 1.3e9**-0.789)
  assert found.batch_tokens == pytest.approx(0.00535 * 1.3e9**0.510 * 2048)
  # Data-parallel has independent laws only.
  plain = lib.recommend(1.3e9, 4, "joint", "data_parallel")
  assert plain.learning_rate == pytest.approx(16319.2 * 1.3e9**-0.819)
  assert (plain.method, plain.outer_learning_rate) == ("independent", 0)


@given(st.floats(0.1, 1e6), st.integers(1, 24))
def test_rounding_changes_a_batch_by_at_most_the_square_root_of_2(sequences, unit):
  rounded = lib.round_batch(sequences, unit)
  assert rounded % unit == 0
  assert math.log2(rounded / unit).is_integer()
  if sequences > unit:
    assert 2**-0.501 < rounded / sequences < 2**0.501
  else:
    assert rounded == unit


def test_outer_rates_rise_with_replicas_on_the_papers_grid():
  rates = [lib.outer_rate(m) for m in range(1, 20)]
  assert rates == sorted(rates)
  assert set(rates) <= {0.2, 0.4, 0.6, 0.8, 1.0}


def test_predictions_are_near_the_losses_that_the_paper_measured():
  # Table 12 has the losses at 4B and 10B. The law with a floor is nearer to both.
  for params, dp, two in ((4e9, 2.224, 2.220), (10e9, 2.090, 2.086)):
    for algorithm, theirs in (("data_parallel", dp), ("diloco", two)):
      assert predict.measured(params, 2, "joint", algorithm) == theirs
      plain = predict.predict(params, 2, algorithm=algorithm)
      floor = predict.predict(params, 2, algorithm=algorithm, floor=True)
      low, high = plain.interval
      assert low < plain.loss < high < 1.06 * low
      assert plain.loss < floor.loss
      assert floor.loss == pytest.approx(theirs, rel=0.012)
  assert predict.measured(4e9, 8, "joint", "diloco") is None
  assert predict.measured(2e9, 2, "joint", "diloco") is None
  assert predict.measured(4e9, 2, "joint", "streaming") is None


def test_a_prediction_has_the_law_and_the_interval_of_its_replicas():
  law = paper.loss_fit("joint")
  for m in (1, 4):
    found = predict.predict(1e9, m)
    assert (found.loss, found.interval) == (law(1e9, m), law.predict_interval(1e9, m))
    assert found.interval[0] < found.loss < found.interval[1]
  assert predict.predict(1e9, 1).interval[1] < found.interval[1]


@pytest.mark.parametrize(
  ("arguments", "note"),
  [
    ((1e6, 1, "joint", "data_parallel"), "N = 1e.06 is beyond what the laws were"),
    ((1e9, 16), "M = 16 is beyond the 8 replicas"),
    ((35e6, 8, "joint", "diloco", 1, 2048, 64), "rounded batch is .* times the law's"),
  ],
)
def test_a_note_says_where_a_law_is_stretched(arguments, note):
  (found,) = lib.recommend(*arguments).notes
  assert re.search(note, found)


def test_a_note_advises_on_runs_with_few_rounds():
  found = lib.recommend(1e6)
  assert found.steps == 1220
  assert "40 rounds of H = 30" in found.notes[1]
  assert "outer momentum 0.5 to 0.8" in found.notes[1]
  for other in ({"overtrain": 100}, {"algorithm": "data_parallel"}, {"params": 35e6}):
    notes = lib.recommend(**{"params": 1e6, **other}).notes
    assert not any("momentum" in note for note in notes)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"params": -1}, "params is -1; give a positive number"),
    ({"fsdp": 0}, "fsdp is 0"),
    ({"overtrain": math.nan}, "overtrain is nan"),
    ({"overtrain": 1e300}, "overtrain is 1e.300; give a positive number up to 1e30"),
    ({"method": "best"}, "method is 'best'; choose one of joint, independent"),
    ({"replicas": 3, "method": "independent"}, "no separate law for diloco_M3"),
    ({"params": 100}, "less than one batch of"),
  ],
)
def test_numbers_without_a_recommendation_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    lib.recommend(**{"params": 1e9, **change})


OWN_LOSS, OWN_RATE = PowerLaw(30, -0.12, 0.05), PowerLaw(5, -0.4, 0.2)


@pytest.fixture
def own_runs():
  """Makes runs of streaming, M = 1 and 2, 6 tokens per parameter; best at 0.4 M."""
  table = pd.DataFrame(
    make_run(
      "streaming",
      n,
      m,
      OWN_LOSS(n, m) * (1 + 0.01 * (abs(i) + abs(j) + abs(k))),
      OWN_RATE(n, m) * 2 ** (i / 2),
      4096 * 2**j,
      0.4 * m + 0.1 * k,
    )
    for n, m in itertools.product((1e6, 2e6, 4e6), (1, 2))
    for i, j, k in itertools.product((-1, 0, 1), repeat=3)
  )
  table = table.rename(columns={"batch": "batch_tokens"})
  return table.assign(tokens=6 * table["params"])


def ask(*arguments) -> dict:
  flags = "--algorithm=streaming", "--seq_len=64", *arguments, "--json"
  return json.loads(shown(main, "recommend", *flags))


def test_laws_of_your_own_runs_replace_the_papers_laws(tmp_path, own_runs):
  path = write(tmp_path / "runs.csv", own_runs)
  laws, _ = results.fit_runs(runs.read(path))
  found = lib.recommend(1e7, 4, algorithm="streaming", seq_len=64, laws=laws)
  assert found.learning_rate == pytest.approx(OWN_RATE(1e7, 4))
  assert found.batch_sequences == 64
  assert predict.predict(1e7, 4, laws=laws).loss == pytest.approx(OWN_LOSS(1e7, 4))
  with pytest.raises(ValueError, match="the results have no law diloco_M4, only"):
    predict.predict(1e7, 4, "independent", laws=laws)
  answer = ask("--params=2e6", f"--results={path}")
  assert answer["loss"]["loss"] == pytest.approx(OWN_LOSS(2e6, 2))
  assert answer["dp_loss"] is None
  assert answer["loss_measured"] is None
  assert answer["notes"] == []
  answer = ask("--params=1e9", "--replicas=4", f"--results={path}")
  assert answer["notes"] == [
    "N = 1e+09 is beyond the runs' sizes, 1e+06 to 4e+06: sweep nearby.",
    "M = 4 is beyond the runs' replicas, 1 to 2: sweep it.",
  ]
  assert answer["outer_source"].endswith("M=2")


def test_the_sequences_are_as_long_as_those_of_your_own_runs(tmp_path, own_runs):
  table = runs.read(write(tmp_path / "runs.csv", own_runs.assign(seq_len=64)))
  laws, _ = results.fit_runs(table)
  same = lib.recommend(4e6, 2, algorithm="streaming", laws=laws)
  longer = lib.recommend(4e6, 2, algorithm="streaming", seq_len=128, laws=laws)
  assert (same.seq_len, same.notes, longer.seq_len) == (64, (), 128)
  assert "of runs with sequences of 64 tokens, and loss and rate may" in longer.notes[0]
  assert "sequences of 2,048 tokens" in lib.recommend(4e9, seq_len=512).notes[0]


def test_a_note_names_the_algorithm_whose_laws_are_used(tmp_path, own_runs):
  answer = ask("--params=4e9", "--seq_len=2048")
  [note] = answer["notes"]
  assert note == "the laws are of diloco, as streaming has no such law."
  assert answer["loss_measured"] is None
  assert answer["dp_loss_measured"] == 2.224
  path = write(tmp_path / "runs.csv", own_runs)
  answer = ask("--algorithm=diloco", "--params=2e6", f"--results={path}")
  [note] = answer["notes"]
  assert note == "the laws are of streaming_joint, as diloco has no such law."
  both = own_runs.assign(algorithm="diloco"), own_runs.query("replicas == 2")
  write(tmp_path / "runs.csv", pd.concat(both))
  answer = ask("--params=2e6", f"--results={path}")
  assert (answer["method"], answer["notes"]) == ("independent", [])


def test_the_budget_and_the_outer_rate_are_of_your_own_runs(tmp_path, own_runs):
  path = write(tmp_path / "runs.csv", own_runs)
  answer = ask("--params=4e6", f"--results={path}")
  assert answer["tokens_per_param"] == pytest.approx(6)
  assert answer["tokens"] == pytest.approx(6 * 4e6, rel=1e-3)
  assert answer["outer_learning_rate"] == 0.8
  assert answer["outer_source"] == "the best of your runs at M=2"
  one = ask("--params=4e6", "--replicas=1", f"--results={path}")
  assert one["outer_learning_rate"] == 0.4
  more = ask("--params=4e6", f"--results={path}", "--overtrain=4")
  assert more["tokens"] == pytest.approx(24 * 4e6, rel=1e-3)
  assert more["loss"] is None
  text = shown(main, "recommend", "--params=4e6", f"--results={path}", "--overtrain=4")
  assert "no law: laws hold only for 6 tokens per parameter" in text


def test_notes_list_the_problems_of_your_own_runs(tmp_path, own_runs):
  # No smaller batch at the largest N with M = 2, no tokens, and one cell is missing.
  few = "params == 4e6 and replicas == 2 and batch_tokens == 2048"
  table = own_runs.query(f"not ({few}) and not (params == 1e6 and replicas == 1)")
  path = write(tmp_path / "runs.csv", table.drop(columns="tokens"))
  given = ("--params=4e6", f"--results={path}")
  said = refused(main, "recommend", *given)
  assert "the best batch, 4096, is the smallest of 2" in said
  answer = ask(*given, "--any")
  tokens, edge, few, missing = answer["notes"]
  assert "no column tokens): the budget is 20 tokens per parameter" in tokens
  assert "best batch, 4096, is the smallest of 2 tried" in edge
  assert "only 2 batch sizes were tried" in few
  assert "streaming has no run at N = 1e+06, M = 1" in missing
  # The fifth note says that the laws are not of diloco.
  assert shown(main, "recommend", *given, "--any").count("\nnote") == 5
  problems = json.loads(shown(main, "fit", path, "--any", "--json"))["problems"]
  assert {edge, few, missing} <= {*problems}
  write(path, own_runs.assign(tokens=own_runs["params"] * own_runs["replicas"]))
  answer = ask(*given, "--any")
  (note,) = answer["notes"]
  assert note.startswith("the runs of streaming_joint had 1 to 2 tokens per parameter")


def test_a_recommendation_needs_a_law_of_the_batch(tmp_path, own_runs):
  table = own_runs.query("batch_tokens == 4096")
  path = write(tmp_path / "runs.csv", table)
  said = "no law of the batch for joint: sweep three values of batch or more at two"
  assert said in refused(main, "recommend", "--params=4e6", f"--results={path}")
  answer = ask("--params=4e6", f"--results={path}", "--batch_tokens=4096")
  assert (answer["batch_tokens"], answer["notes"]) == (4096, [])
  answer = ask("--params=4e6", f"--results={path}", "--batch_tokens=9999")
  assert "those of the runs' batch, 4,096 tokens, and do not hold" in answer["notes"][0]
  write(path, table.query("replicas == 2"))
  answer = ask("--params=4e6", f"--results={path}", "--batch_tokens=4096")
  assert answer["method"] == "independent"


def test_the_command_prints_both_losses_and_the_measured_ones():
  text = shown(main, "recommend", "--params=4B", "--replicas=2")
  for part in ("524,288 tokens = 256 x 2048", "measured 2.220", "measured 2.224"):
    assert part in text
  assert "figure 7" in text
  config, *flags, workdir = text.partition("--config=")[2].split()
  assert workdir == "--workdir=runs/4B"
  c = load_config(config, flags)
  assert (c.algorithm, c.replicas, c.train.batch_size) == ("diloco", 2, 256)
  assert c.train.steps == 152_587
  short = train_command("4B", own=False, r=lib.recommend(4e9, seq_len=1000)).split()
  assert load_config(short[4][9:], short[5:-1]).model.loss_chunk == 0
  flags = "--params=4B", "--overtrain=2", "--algorithm=data_parallel"
  text = shown(main, "recommend", *flags)
  assert "no law: laws hold only for 20 tokens per parameter" in text
  assert "outer" not in text
  for flags, said in (
    (["--params=big"], "--params is 'big'"),
    (["--params=1e9", "--results=/nonexistent.csv"], "/nonexistent.csv"),
    (["--params=1e9", "--where=seed=0"], "need --results, which is not given"),
    (["--params=1e9", "--any"], "need --results, which is not given"),
  ):
    assert said in refused(main, "recommend", *flags)
