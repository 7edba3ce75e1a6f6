"""The claims that need no training, against other computations of the same numbers."""

import itertools
import math
import re
import tomllib

import numpy as np
import pytest
from running import ROOT, read_csv, shown

from diloco.reproduce import __main__ as reproduce
from diloco.reproduce import computed
from diloco.reproduce.claim import COLUMNS, CONTRADICTED, NOT_SHOWN, SHOWN, table
from diloco.util.shipped import PACKAGE, papers_table

WORDS = tomllib.loads((PACKAGE / "reproduce" / "computed.toml").read_text())


def numbers(name):
  """Returns the numbers in what a claim says."""
  found = re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", getattr(computed, name)()[0])
  return [float(number.replace(",", "")) for number in found]


def test_the_table_has_a_row_for_every_claim():
  head, _, *rows = shown(reproduce.main, "--computed").splitlines()
  assert head == f"| {' | '.join(COLUMNS)} |"
  assert len(rows) == len(WORDS)
  for row, claim in zip(rows, WORDS.values()):
    assert row.startswith(f"| {claim['claim']} | {claim['source']} | {claim['kind']} |")
    *_, cost, last = row.removesuffix(" |").split(" | ")
    assert last in (SHOWN, NOT_SHOWN, CONTRADICTED, computed.INCONSISTENT)
    assert re.fullmatch(r"\d+\.\d\d s", cost) or claim["kind"] == "text"


def test_the_recorded_claims_are_those_of_today_but_for_the_seconds():
  recorded = [r for r in read_csv(ROOT / "docs/claims.csv") if r["kind"] != "trained"]
  today = table(computed.rows()).drop(columns="cost").to_dict("records")
  assert [{k: v for k, v in row.items() if k != "cost"} for row in recorded] == today


def test_every_contradiction_of_a_paper_has_our_choice_and_every_command_exists():
  for row, claim in zip(computed.rows(), WORDS.values(), strict=True):
    command = claim.get("command", "reproduce").split()[0]
    assert command in ("simulate", "scaling_laws", "list_configs", "reproduce")
    assert ("choice" in claim) == (row["verdict"] == computed.INCONSISTENT)
    assert ("here" in claim) == (claim["kind"] == "text")


def test_slopes_by_hand():
  table_5 = papers_table("reproduce", "streaming_table5_c4_scaling")
  rows = [row for row in table_5 if row["eval_loss"]]
  by_hand = []
  for method in ("data_parallel", computed.H100):
    own = [row for row in rows if row["method"] == method]
    x = np.array([math.log(float(row["flops"])) for row in own])
    y = np.array([float(row["eval_loss"]) for row in own])
    by_hand.append(np.polyfit(x, y, 1)[0])
  assert numbers("slopes")[:2] == pytest.approx(by_hand, abs=1e-5)
  difference = numbers("slopes_differ")[0]
  assert difference == pytest.approx(by_hand[1] - by_hand[0], abs=1e-4)


def test_findings_of_scaling_laws_by_hand():
  rows = papers_table("scaling_laws", "table4_loss")
  assert all(float(row["diloco_M1"]) < float(row["dp"]) for row in rows)
  assert computed.finding_2() == (f"{len(rows)} of {len(rows)} sizes", SHOWN)
  rows = papers_table("scaling_laws", "tables7_to_10_powerlaws")
  laws = [(float(r["A"]), float(r["alpha"])) for r in rows if r["table"] == "9"]
  in_order = 0
  for n in (35e6, 90e6, 180e6, 335e6, 550e6, 1.3e9, 2.4e9):
    batches = [a * n**alpha for a, alpha in laws]
    in_order += all(a < b for a, b in itertools.pairwise(batches))
  # Where the printed laws of data-parallel and M = 2 cross (table 7).
  crossing = (18.129 / 18.768) ** (1 / (0.0953 - 0.0969)) / 1e9
  assert numbers("crossing")[0] == pytest.approx(crossing, abs=0.05)
  assert computed.finding_3() == (f"in order at {in_order} of 7 sizes", SHOWN)


def test_bytes_and_memory_by_hand():
  params, part = 100e9, 3 / 108
  share, inner, outer, more = numbers("memory_of_100B")
  assert share == pytest.approx(100 * 2 / 3, abs=0.05)
  assert (inner, outer) == (1118, 20.7)
  assert (inner, outer) == pytest.approx(
    (12 * params / 2**30, 8 * params * part / 2**30), rel=2e-3
  )
  assert more == pytest.approx(100 * 8 * part / 12, abs=0.01)
  # 25B tokens in 0.67 hours of 0.1 s: 16 bits for each of 1e9 parameters in each step.
  assert numbers("terabytes_of_table_1") == [386, 48]


def test_bandwidths_and_batches_by_hand():
  table_4 = papers_table("simulate", "streaming_table4_bandwidth_for_cu")
  rows = {(r["model"], r["method"]): float(r["gbits_cu95"]) for r in table_4}
  best = "streaming_overlap_fp4"
  ratios = [rows[n, "data_parallel"] / rows[n, best] for n in ("1B", "10B", "100B")]
  assert numbers("two_orders_less") == [round(ratio) for ratio in ratios]
  by_hand = []
  for m in (2, 4, 8):
    for n in (4e9, 10e9):
      by_hand += [round(30 * 0.00709 * n**0.4695 * m**0.3399 / (0.22592 * n**0.281))]
    by_hand += [m]
  assert numbers("hundred_times_less") == by_hand
  assert computed.hundred_times_less()[1] == NOT_SHOWN


def test_a_claim_that_fails_is_contradicted(monkeypatch):
  gbits = [0.5, 1.0, 2.0]
  low = {"streaming_overlap_fp4": gbits, "streaming_overlap": gbits}
  monkeypatch.setattr(computed, "table_4", lambda: low)
  assert computed.best_method_needs() == ("0.5, 1, 2 Gbit/s", CONTRADICTED)
  assert computed.larger_models_need_less()[1] == CONTRADICTED
