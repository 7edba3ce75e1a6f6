"""docs/operate.md against the code: its times, flags, unit and script."""

import configparser
import importlib
import re

import pytest
from running import ROOT, python

from diloco.config import default_config
from diloco.config.resolve import leaves

PAGE = (ROOT / "docs/operate.md").read_text()
TIMES = re.findall(r"^\| .*? \| ([\d., ]+?)[^\d|]* \| `(.*?)` \|", PAGE, re.M)
FIELDS = leaves(default_config("sites").to_dict())
# Where a time lies that is no name of a module.
PLACES = {
  "grpc.": "diloco/processes/peers.py",
  "--initialization_timeout": "diloco/main.py",
  "--signal": "scripts/launchers/slurm.sh",
}


def blocks(kind: str) -> list[str]:
  return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_tables_have_all_times():
  assert len(TIMES) >= 20
  named = {where for _, where in TIMES}
  assert {f"sites.{f}" for f in ("grace_s", "start_s", "lost_s")} <= named
  for module in ("contrib.sites.group.link", "util.storage"):
    module = f"diloco.{module}"
    names = {n for n in vars(importlib.import_module(module)) if n.endswith("_S")}
    assert {f"{module}.{n}" for n in names} <= named


@pytest.mark.parametrize(("said", "where"), TIMES, ids=lambda x: x)
def test_every_time_is_that_of_the_code(said, where):
  values = tuple(float(x) for x in said.split(", "))
  for start, file in PLACES.items():
    if where.startswith(start):
      line = next(x for x in (ROOT / file).read_text().splitlines() if where[2:] in x)
      number = float(re.findall(r"\d[\d_]*", line)[0])
      assert number / (1000 if "_ms" in where else 1) == values[0]
      return
  if where in FIELDS:
    assert (FIELDS[where],) == values
    return
  module, _, name = where.rpartition(".")
  found = getattr(importlib.import_module(module), name)
  assert (found if isinstance(found, tuple) else (found,)) == values


def test_the_unit_starts_a_command_with_flags_that_exist():
  [text] = blocks("ini")
  unit = configparser.ConfigParser(strict=False)
  unit.optionxform = str
  unit.read_string(text.replace("\\\n", " "))
  python, dash, module, *words = unit["Service"]["ExecStart"].split()
  assert (python, dash, module) == ("/opt/diloco/bin/python", "-m", "diloco.main")
  flags = {word.split("=")[0][2:] for word in words if word.startswith("--")}
  code = (ROOT / "diloco/main.py").read_text()
  defined = {"config", *re.findall(r'DEFINE_\w+\(\s*"(\w+)"', code)}
  assert {f for f in flags if not f.startswith("config.")} <= defined


def test_the_script_prints_what_the_page_says():
  [script] = blocks("python")
  found = python("-c", script)
  assert found.returncode == 0, found.stderr
  assert found.stdout.strip() in PAGE
