"""Counts in sentences of the documents are those of the tables that they count."""

import collections
import re
import statistics

import pytest
from running import ROOT, read_csv

from diloco.util.command import load_module


def stated(page: str, sentence: str) -> list[int]:
  """The whole numbers that a sentence of a page states at each `#`."""
  text = " ".join((ROOT / page).read_text().split())
  pattern = re.escape(sentence).replace(r"\#", r"([\d,]*\d)").replace(r"\ ", " ")
  match = re.search(pattern, text)
  assert match, f"{page} has no sentence {sentence!r}"
  return [int(n.replace(",", "")) for n in match.groups()]


def table(name: str) -> list[dict[str, str]]:
  return read_csv(ROOT / "docs" / name)


# Pages of what to do, which nobody reads if they are longer.
DO = "settings data machines aot watch library extend evaluation models operate sweep"
DO += " ablations scaling_laws simulate sites"


def test_the_front_page_the_manual_and_its_pages_are_short():
  assert len((ROOT / "README.md").read_text().splitlines()) <= 120
  words = {p.stem: len(p.read_text().split()) for p in ROOT.glob("docs/*.md")}
  assert sum(words.values()) <= 35_000
  assert not {name for name in DO.split() if words[name] > 2_000}


@pytest.mark.parametrize(
  ("page", "sentence"),
  [
    ("docs/ladder.md", "has its # runs"),
    ("docs/benchmarks.md", "[a ladder](ladder.md): # runs of six sizes"),
  ],
)
def test_runs_of_the_ladder(page, sentence):
  rows = table("ladder.csv")
  assert stated(page, sentence) == [len(rows)]
  assert len({row["params"] for row in rows}) == 6


def test_the_gaps_of_the_tuned_momentum_are_those_of_its_runs():
  rows = [r for r in table("ladder_momentum.csv") if r["point_seed"]]
  loss = {(r["params"], r["replicas"], r["seed"]): float(r["test_loss"]) for r in rows}
  page = (ROOT / "docs/ladder.md").read_text()
  sizes = {row["params"] for row in rows}
  assert len(sizes) == 3
  for n in sizes:
    gaps = [100 * (loss[n, "4", s] / loss[n, "1", s] - 1) for s in "123"]
    cell = f"+{statistics.mean(gaps):.2f} ± {statistics.stdev(gaps):.2f}%"
    assert f"| {int(n):,} | {cell} |" in page


def test_cases_and_runs_of_the_gap():
  rows, page = table("gap.csv"), "docs/gap.md"
  cases = {row["point_case"] for row in rows}
  assert stated(page, "has # cases, # runs") == [len(cases), len(rows)]


def test_the_recorded_runs_of_the_gap_have_the_rates_of_batch_32():
  c = load_module("batch_32", "get_config", "batch_32").get_config()
  plain = [r for r in table("gap.csv") if r["point_case"] == "streaming, batch 8"]
  assert plain
  for row in plain:
    assert c.outer.optimizer == row["outer_optimizer"]
    assert c.outer.learning_rate == float(row["outer_learning_rate"])
    assert c.inner.learning_rate == float(row["learning_rate"])


def test_claims_and_verdicts():
  rows = table("claims.csv")
  trained = collections.Counter(r["verdict"] for r in rows if r["kind"] == "trained")
  counts = [trained[v] for v in ("shown", "undecided", "contradicted")]
  sentence = "| # claims of the papers"
  assert stated("README.md", sentence) == [sum(counts)]
  assert stated("README.md", "# hold, # are undecided, # are contradicted") == counts
  sentence = "Of # trained claims, # are shown, # are undecided and # are contradicted"
  assert stated("docs/claims.md", sentence) == [sum(counts), *counts]
  assert "since eleven claims that" in (ROOT / "docs/claims.md").read_text()
  assert sum(", 8 seeds" in row["here"] for row in rows) == 11
  # The page speaks of contradictions among trained claims only.
  others = {r["verdict"] for r in rows if r["kind"] != "trained"}
  assert "contradicted" not in others
  runs, more = stated("docs/claims.md", "the # runs behind them, and # of unfinished")
  assert len(table("reproduced.csv")) == runs + more
