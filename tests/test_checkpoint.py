"""What a run may differ in from the checkpoint that it goes on from."""

import json

import conftest
import pytest

from diloco import config as config_lib
from diloco.checkpoint import check_same_config


def saved(c) -> dict:
  return json.loads(json.dumps(config_lib.resolve(c).to_dict()))


def test_fields_that_the_runs_code_did_not_have_count_as_their_defaults():
  c = conftest.tiny_config()
  old = saved(c)
  del old["outer"]["offload"]
  check_same_config(old, config_lib.resolve(c), step=3)
  c.outer.offload = True
  with pytest.raises(config_lib.ConfigError, match=r"outer.offload: False -> True"):
    check_same_config(old, config_lib.resolve(c), step=3)


def test_a_field_that_is_gone_is_a_difference():
  c = conftest.tiny_config()
  old = saved(c)
  old["outer"]["warp"] = 2
  with pytest.raises(config_lib.ConfigError, match=r"outer.warp: 2 -> '.absent.'"):
    check_same_config(old, config_lib.resolve(c), step=3)
