"""The memory of parameters and optimizers, against section 2.5 and counted shapes."""

import json
import math

import pytest
from running import refused, shown

from diloco.config import resolve
from diloco.config.command_line import load_config
from diloco.simulate import __main__ as command
from diloco.simulate.memory import memory
from diloco.spec.shapes import num_params


def test_the_paper_s_numbers():
  inner, outer, held = memory(100e9, 100e9 * 3 / 108)
  assert outer["share"] == pytest.approx(2 / 3)
  # The paper's GB are 2^30 bytes: 1,117 (1,117.6) and 20 (20.7), which is 2% (1.85%).
  assert (math.floor(inner["GiB"]), math.floor(held["GiB"])) == (1117, 20)
  assert round(100 * held["share"]) == 2
  assert held["GB"] == pytest.approx(2 * 4 * 100 * 3 / 108)
  # "2 TB/s" and "less than 10 ms" do not fit each other; PCIe is 31 times slower.
  assert held["2 TB/s"] == pytest.approx(11.1, abs=0.05)
  assert held["64 GB/s of PCIe"] == pytest.approx(347, abs=0.5)


def test_the_command_has_the_paper_s_model_as_its_default():
  found = json.loads(shown(command.main, "memory", "--json"))
  for ours, expected in zip(found, memory(100e9, 100e9 / 36), strict=True):
    assert ours == pytest.approx(expected)


def test_of_a_config_it_counts_the_trainer_s_fragments():
  found = json.loads(shown(command.main, "memory", "--config=sample", "--json"))
  c = resolve(load_config("sample"))
  whole = num_params(c.model)
  inner, outer, held = (row["GB"] * 1e9 for row in found)
  assert (inner, outer) == pytest.approx((12 * whole, 8 * whole))
  assert outer / len(c.make_fragments()) < held < outer
  diloco = ["--config=sample", "--config.algorithm=diloco", "--json"]
  found = json.loads(shown(command.main, "memory", *diloco))
  assert found[2]["share"] == pytest.approx(2 / 3)
  refused(command.main, "memory", "--layers=0")
  plain = ["--config=sample", "--config.algorithm=data_parallel"]
  assert "data_parallel, which has no rounds" in refused(command.main, "memory", *plain)
