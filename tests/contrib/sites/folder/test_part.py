"""A folder is of one run; what cannot work is refused before anything compiles."""

import json
import threading

import pytest
from folders import Brisk
from sites import make_calendar

from diloco.contrib.sites.folder import part
from diloco.contrib.sites.folder.part import check_config, make_link
from diloco.errors import ConfigError

CONFIG = make_calendar().config


def test_the_first_site_writes_the_config_and_the_others_compare(tmp_path):
  for fields in ({}, {"grace_s": 7.0}):  # It may differ.
    check_config(Brisk(tmp_path), "PATH", make_calendar(**fields).config)
  found = json.loads((tmp_path / "config.json").read_text())
  assert found == json.loads(json.dumps(CONFIG.to_dict()))
  other = make_calendar(steps=44).config
  said = r"PATH, where a run with another config is \(.*train.steps: 40 -> 44.*\); give"
  with pytest.raises(ConfigError, match=said):
    check_config(Brisk(tmp_path), "PATH", other)


def test_a_config_that_comes_late_is_waited_for_and_a_damaged_one_is_named(
  tmp_path, monkeypatch
):
  store, path = Brisk(tmp_path), tmp_path / "config.json"
  text = json.dumps(CONFIG.to_dict())
  path.write_text(text[:100])
  timer = threading.Timer(0.1, path.write_text, (text,))
  timer.start()
  check_config(store, "PATH", CONFIG)
  timer.join()
  path.write_text(text[:100])
  monkeypatch.setattr(part, "_WAIT_S", 0.1)
  with pytest.raises(ConfigError, match=r"PATH, whose config.json cannot be read; res"):
    check_config(store, "PATH", CONFIG)


@pytest.mark.parametrize("flags", [("tls", False), ("", True)])
def test_a_folder_needs_no_certificates(tmp_path, flags):
  address = str(tmp_path / "group")
  with pytest.raises(ConfigError, match="a folder or a bucket, which needs neither"):
    make_link(CONFIG, 0, address, *flags, print)
