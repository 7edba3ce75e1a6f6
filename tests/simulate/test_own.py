"""The reader's own case: configs as workloads, step times, frontier, command."""

import json
import pathlib

import pytest

from diloco import config as config_lib
from diloco.simulate import __main__ as command
from diloco.simulate import own
from diloco.simulate.utilisation import utilisation

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = f"{ROOT}/configs/chinchilla.py:1.3B,M=2,H=100"


def test_a_config_keeps_its_parameters_schedule_and_bits():
  c = own.load_config(CONFIG)
  work = own.workload(c, 0.5)
  assert sum(work.params_per_layer) == pytest.approx(config_lib.num_params(c))
  assert work.layers == 25  # 24 blocks, and the embedding before them.
  assert work.bits == 4 + 8 / 128
  schedule = config_lib.make_schedule(c)
  for step in range(200, 301):
    sent = {layer for p in schedule.sends(step) for layer in work.plan[p][1]}
    assert work.reduced_after(step) == sent
  whole = own.workload(own.load_config(f"{CONFIG},algorithm=diloco"), 0.5)
  assert whole.plan == ((0, tuple(range(25))),)
  assert whole.bits == 32
  plain = own.workload(own.load_config(f"{CONFIG},algorithm=data_parallel"), 0.5)
  assert plain.method == "data_parallel"


def test_step_time_by_hand():
  c = own.load_config(CONFIG)
  flops = 6 * config_lib.num_params(c) * c.train.batch_size * 2048
  assert own.step_time(c, 64, 197e12, 0.4) == pytest.approx(flops / (64 * 197e12 * 0.4))
  with pytest.raises(ValueError, match="chips is 0; give a positive number"):
    own.step_time(c, 0, 1e12, 0.4)


def test_wire_bits_count_the_scales(tiny):
  for fmt, block, bits in (
    ("e3m0", 32, 4.25),
    ("e4m3fn", 128, 8.0625),
    ("e2m3", -1, 6 + 8 / 16),
    ("fp32", 32, 32),
  ):
    tiny.wire.format, tiny.wire.block_size = fmt, block
    assert own.wire_bits(config_lib.resolve(tiny)) == bits


def test_psum_all_reduces_float32(tiny):
  tiny.wire.exchange, tiny.replicas = "psum", 4
  work = own.workload(config_lib.resolve(tiny), 1.0)
  assert (work.bits, work.copies) == (32, 2 * 3 / 4)


def test_the_frontier_reaches_the_target_and_no_choice_dominates_another():
  choices = own.frontier(1e9, 24, 0.1, 1e9, 0.95)
  assert choices
  assert [c.loss_per_cent for c in choices] == sorted(c.loss_per_cent for c in choices)
  for i, c in enumerate(choices):
    assert c.utilisation >= 0.95
    for better in choices[:i]:
      assert better.bits < c.bits or better.fragment_size > c.fragment_size
  assert own.frontier(1e12, 24, 0.1, 1e6, 0.95) == []
  assert own.loss_penalty(30, 1) == 0
  assert own.loss_penalty(100, 1) == pytest.approx(100 * 0.02 / 2.67)


def test_the_command(capsys, tmp_path):
  picture = tmp_path / "own.png"
  args = [f"--config={CONFIG}", "--chips=64", "--json"]
  assert command.main(["bandwidth", *args, f"--plot={picture}"]) == 0
  said = json.loads(capsys.readouterr().out)
  assert picture.stat().st_size > 5000
  work = own.workload(own.load_config(CONFIG), said["step_time_s"])
  reached = utilisation(work, [said["gbits"] * 1e9])[0]
  assert reached == pytest.approx(0.95, abs=2e-3)
  plain = ["--params=1e9", "--layers=24", "--step_time=0.1", "--gbits=1"]
  assert command.main(["frontier", *plain]) == 0
  out = capsys.readouterr().out
  assert "loss, %" in out
  assert "Table 5" in out
  assert command.main(["utilisation", "--layers=3", "--gbits=1"]) == 2
  assert "--params is missing; give it, or a --config" in capsys.readouterr().err
  assert command.main(["utilisation", "--config=no.py", "--gbits=1"]) == 2
  assert "there is no file no.py" in capsys.readouterr().err
