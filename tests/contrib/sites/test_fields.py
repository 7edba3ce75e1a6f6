"""The fields of sites: who has them, what they refuse, and old configs."""

import pytest
from conftest import update

from diloco.checkpoint import resume
from diloco.config import default_config, resolve
from diloco.config.command_line import load_config
from diloco.contrib.sites import SitesConfig
from diloco.errors import ConfigError

DEFAULTS = {"count": 0, "quorum": 1, "grace_s": 20.0, "start_s": 300.0}
FILE = """
from diloco.config import default_config

def get_config(grace=""):
  c = default_config()
  c.train.steps, c.overlap.transport = 1000, "sites"
  if grace:
    c.sites.grace_s = float(grace)
  return c
"""


def test_to_name_the_transport_is_enough(tmp_path):
  flags = "--config.sites.count=1", "--config.overlap.transport=sites"
  c = load_config("sample", flags)
  assert (c.plugins, c.of(SitesConfig)) == (("sites",), SitesConfig(count=1))
  assert load_config("sample", flags[::-1]) == c
  (tmp_path / "file.py").write_text(FILE)
  file = str(tmp_path / "file.py")
  assert load_config(file, flags[:1]).of(SitesConfig).count == 1
  with pytest.raises(ConfigError, match=r"line 8\); write default_config\('sites'\)"):
    load_config(f"{file}:2")


def test_a_run_without_sites_has_none_of_their_fields():
  with pytest.raises(ConfigError, match=r"count is no field.*set plugins=\('sites',\)"):
    load_config("sample", ["--config.sites.count=2"])


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"sites.quorum": 3}, "sites.quorum is 3, but there are 2 sites; lower it."),
    ({"sites.batch_size": 3, "sites.count": 1}, "batch_size is 3, .*replicas = 2 does"),
    ({"sites.batch_size": 3, "data.shards": 4}, "data.shards of a site = 2 does not"),
    ({"sites.batch_size": 16}, "sites.batch_size is 16, but all .*batch_size = 4"),
    ({"sites.pace": 0.2}, "sites.pace is 0.2, .* sync_every = 4 .* at least 0.25."),
    ({"sites.pace": 0}, "sites.pace is 0.0; it must be above 0 and at most 1."),
    ({"sites.count": 3}, "replicas is 2, which sites.count = 3 does not divide;"),
    ({"algorithm": "data_parallel"}, "transport is sites, which .* choose streaming"),
    ({"overlap.transport": "site"}, r"one of device, host.* \(did you mean sites\?\)"),
  ],
)
def test_what_cannot_work_is_refused(tiny, fields, message):
  tiny.overlap.transport = "sites"
  update(tiny, fields)
  with pytest.raises(ConfigError, match=message):
    resolve(tiny)


def test_only_the_number_of_sites_must_stay_when_a_run_goes_on():
  c = default_config("sites")
  old, new = c.to_dict(), c.to_dict()
  new["sites"] = {name: x + 2 for name, x in DEFAULTS.items()}
  assert resume.differing(old, new) == {"sites.count": "0 -> 2"}
