"""Every figure, table and section of both papers has a row, and its command exists."""

import shlex

import pytest
from running import ROOT, read_csv

from diloco import __main__ as listing
from diloco.cli import list_configs
from diloco.config.command_line import load_config
from diloco.evaluate.tasks import TASKS
from diloco.reproduce import __main__ as reproduce
from diloco.simulate import __main__ as simulate
from diloco.simulate import figures

ROWS = read_csv(ROOT / "diloco/reproduce/items.csv")
KINDS = {"simulated", "fitted", "counted", "trained", "code", "missing"}

# What the papers' texts have, and the parts of a figure. Left out are introductions,
# related work, conclusions and headings of chapters: they repeat claims of the others.
STREAMING = {
  "algorithm": "1 2",
  "figure": "1 2 3 4abc 5ab 6ab 7 8 9 10 11ab 12ab 13 14 15abc 16ab 17ab 18",
  "table": "1 2 3 4 5 6 7",
  "section": "2.1 2.2 2.3 2.4 2.5 3.1 3.2 3.2.1 3.2.2 3.3 3.3.1 3.3.2 3.3.3",
}
SCALING = {
  "algorithm": "1",
  "figure": "1 2ab 3ab 4 5 6abc 7 8ab 9 10abc 11 12abc 13 14 15 16 17 18ab 19ab",
  "table": "1 2 3 4 5 6 7 8 9 10 11 12 13",
  "finding": "1 2 3 4",
  "section": "2.1 2.2 3 3.1 5.1 5.2 6.1 6.2 6.3 6.4 6.5 A.1 A.2 A.3 B",
}


@pytest.mark.parametrize(
  ("paper", "items"), [("2501.18512", STREAMING), ("2503.09799", SCALING)]
)
def test_every_item_has_one_row_or_one_for_each_part(paper, items):
  rows = [row["item"] for row in ROWS if row["paper"] == paper]
  assert len(set(rows)) == len(rows)
  expected = set()
  for kind, names in items.items():
    for name in names.split():
      whole = f"{kind} {name.rstrip('abc')}"
      parts = name[len(whole) - len(kind) - 1 :]
      expected |= {whole} if whole in rows else {whole + part for part in parts or "?"}
  assert set(rows) == expected


def test_a_missing_item_has_a_reason_and_every_item_a_command():
  assert {row["kind"] for row in ROWS} <= KINDS
  for row in ROWS:
    assert row["what"]
    assert row["command"]
    assert row["kind"] != "missing" or row["note"], row


@pytest.mark.parametrize("command", sorted({row["command"] for row in ROWS}))
def test_the_command_exists(command):
  name, *words = shlex.split(command)
  assert name in listing.commands()
  values = dict(word.removeprefix("--").partition("=")[::2] for word in words)
  if name == "simulate":
    args, rest = simulate.make_parser().parse_known_args(words)
    assert not rest
    assert args.command != "figure" or args.name in figures.FIGURES
  if "config" in values:
    load_config(values["config"], [w for w in words if w.startswith("--config.")])
  files = ("ablations", reproduce.SCORED)
  known = [reproduce.load_module(file, "get_sweep", "").ABLATIONS for file in files]
  for only in values.get("only", "").split(","):
    assert only in {"", reproduce.LADDER}.union(*known)
  assert values.get("tasks", "piqa") in TASKS
  if "of" in values:
    assert list_configs.runs_of(values["of"])
  for word in words:
    if word.startswith(("configs/", "docs/")):
      assert (ROOT / word).is_file()
