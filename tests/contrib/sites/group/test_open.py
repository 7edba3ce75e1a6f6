"""A group is of one run; what cannot work is refused before anything changes."""

import json

import pytest
import running
from sites import make_calendar

from diloco.config.command_line import load_config
from diloco.contrib.sites.group.open import check_contents, open_group
from diloco.errors import ConfigError
from diloco.util.storage import Folder

CONFIG = make_calendar().config


def test_the_first_site_writes_the_config_and_the_others_compare(tmp_path):
  group = str(tmp_path / "group")
  for fields in ({}, {"grace_s": 7.0}):  # It may differ.
    open_group(make_calendar(**fields).config, 0, group)
  found = json.loads((tmp_path / "group/config.json").read_text())
  assert found == json.loads(json.dumps(CONFIG.to_dict()))
  other = make_calendar(steps=44).config
  said = r"where a run with another config is \(.*train.steps: 40 -> 44.*\); give"
  with pytest.raises(ConfigError, match=said):
    open_group(other, 0, group)
  storage = Folder(tmp_path / "group")
  read = {"data.tokenizer": "a", "data.source": "b"}
  for more in ({}, {"jax": "of another version"}):
    check_contents(storage, "PATH", read | more)
  for what in read:
    with pytest.raises(ConfigError, match=f"where {what} had other contents under"):
      check_contents(storage, "PATH", read | {what: "c"})
  (tmp_path / "group/config.json").write_text("{")
  with pytest.raises(ConfigError, match=r"whose config.json cannot be read; restore"):
    open_group(CONFIG, 0, group)


@pytest.mark.parametrize("site", [-1, 3])
def test_a_site_that_does_not_exist_leaves_nothing(tmp_path, site):
  with pytest.raises(ConfigError, match=f"--site is {site}, .* 0 to 2; give one of"):
    open_group(CONFIG, site, str(tmp_path / "group"))
  assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (["--config.train.steps=77"], "train.steps: 3200 -> 77"),
    (["--group="], "--group is empty"),
    (["--config.overlap.transport=host"], "which needs no --group and --site"),
  ],
)
def test_a_wrong_start_changes_nothing_and_starts_no_jax(tmp_path, flags, said):
  group, config = tmp_path / "group", "sample"
  given = [f"--config={config}", "--config.overlap.transport=sites"]
  before = json.dumps(load_config(config, given[1:]).to_dict())
  group.mkdir()
  (group / "config.json").write_text(before)
  given += [f"--workdir={tmp_path}/own", f"--group={group}", "--site=0", *flags]
  done = running.python("-c", PROGRAM, *given)
  assert (done.returncode, done.stdout) == (2, "False\n")
  assert said in done.stderr
  assert (group / "config.json").read_text() == before
  assert [x.name for x in tmp_path.rglob("*")] == ["group", "config.json"]


PROGRAM = """
from diloco import main
from diloco.config.command_line import run
try:
  run(main.main)
finally:
  from jax._src import xla_bridge
  print(xla_bridge.backends_are_initialized())
"""
