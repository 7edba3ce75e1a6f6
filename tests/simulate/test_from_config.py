"""Tests the simulation of configs: workloads, step times, the command."""

import json
import re

import pytest
import running

from diloco.config import add_plugins, resolve
from diloco.config.command_line import load_config
from diloco.simulate import __main__ as command
from diloco.simulate import arguments, from_config
from diloco.simulate.from_config import step_time
from diloco.simulate.steady import steady_utilisation
from diloco.simulate.utilisation import Workload
from diloco.spec.shapes import flops_per_token, num_params

CONFIG = f"{running.ROOT}/configs/chinchilla.py:1.3B,M=2,H=100"


def test_a_config_keeps_its_parameters_schedule_and_bits():
  c = load_config(CONFIG)
  work = from_config.workload(c, 0.5)
  assert sum(work.params_per_layer) == pytest.approx(num_params(c.model))
  assert work.layers == 25  # 24 blocks, and the embedding before them.
  assert work.bits == pytest.approx(4 + 8 / 128, rel=1e-5)
  schedule = c.make_schedule()
  for step in range(200, 301):
    sent = {layer for p in schedule.sends(step) for layer in work.plan[1][p]}
    assert work.reduced_after(step) == sent
  whole = from_config.workload(load_config(f"{CONFIG},algorithm=diloco"), 0.5)
  assert whole.plan[1] == (tuple(range(25)),)
  assert whole.bits == 32
  plain = from_config.workload(load_config(f"{CONFIG},algorithm=data_parallel"), 0.5)
  assert (plain.method, plain.bits) == ("data_parallel", 16)
  assert plain.reduced_after(1) == set(range(25))
  wide = ["--config.inner.gradient_dtype=float32", "--config.algorithm=data_parallel"]
  assert from_config.workload(load_config(CONFIG, wide), 0.5).bits == 32


def test_wire_bits_by_hand():
  value = 4 + 8 / 128
  for compressor, bits in (
    ("quantize", value),
    ("random", 0.1 * value),
    # Indices within 2048 x 2048 and 2048 x 8192 values.
    ("topk", 0.1 * (value + (4 * 22 + 8 * 24) / 12)),
  ):
    c = load_config(CONFIG, [f"--config.wire.compressor={compressor}"])
    assert from_config.wire_bits(c) == pytest.approx(bits, rel=5e-3)


def test_averages_add_the_bits_of_a_round(tiny):
  base = from_config.wire_bits(resolve(tiny))
  add_plugins(tiny, "des_loc")
  tiny.des_loc.first_every, tiny.des_loc.second_every = 12, 24  # 3 and 6 rounds.
  # With two replicas a ring and a gather send each value once.
  more = from_config.wire_bits(resolve(tiny)) - base
  assert more == pytest.approx(32 / 3 + 32 / 6)
  add_plugins(tiny, "sparta")
  tiny.sparta.share = 1.0
  work = from_config.workload(resolve(tiny), 1.0)
  assert work.bits - base - more == pytest.approx(4 * 32)


@pytest.mark.parametrize(("every", "hidden"), [(1, 1), (2, 2), (5, 3)])
def test_an_average_ends_what_hides_an_exchange(tiny, every, hidden):
  add_plugins(tiny, "sparta")
  tiny.overlap.tau, tiny.sparta.share, tiny.sparta.every = 3, 0.1, every
  assert from_config.workload(resolve(tiny), 1.0).tau == hidden


def test_psum_all_reduces_float32(tiny):
  tiny.wire.exchange, tiny.replicas = "psum", 4
  work = from_config.workload(resolve(tiny), 1.0)
  assert (work.bits, work.copies) == (32, 2 * 3 / 4)


def test_an_answer_has_units_and_what_is_assumed():
  args = ["bandwidth", f"--config={CONFIG}", "--chips=64"]
  text = running.shown(command.main, *args)
  lines = dict(line.split(maxsplit=1) for line in text.splitlines())
  assert lines["link"].endswith(" Gbit/s of each replica")
  assert lines["utilisation"] == "0.95 of the time is compute"
  assert lines["step"].endswith("of compute: 64 chips of 197 TFLOP/s at an MFU of 0.4")
  c = load_config(CONFIG)
  assert lines["assumed"].startswith(
    f"streaming, M = {c.replicas}, H = {c.sync_every}, tau = {c.overlap.tau}, "
  )
  assert f"{num_params(c.model):,} parameters" in lines["assumed"]
  args += ["--config.algorithm=diloco"]
  assert "\nassumed      diloco, M = " in running.shown(command.main, *args)
  args[2:] = ["--step_time=2"]
  assert "\nstep         2 s of compute\n" in running.shown(command.main, *args)
  args += ["--config.plugins=warm_start", "--config.warm_start.steps=100"]
  text = running.shown(command.main, *args)
  assert "compute; the first 100 steps, all data-parallel" in text


@pytest.mark.parametrize(
  ("args", "message"),
  [
    ("bandwidth {} --tau=2", "--config gives tau; set --config.overlap.tau instead"),
    ("bandwidth {} --chips=2 --step_time=1", "--chips needs a --config, and no --step"),
    ("bandwidth --mfu=1", "--mfu needs a --config, and no --step_time"),
    ("bandwidth --method=diloco --tau=1", "--method=diloco ignores --tau; leave it ou"),
    ("bandwidth {}", "--chips is missing; give the number of chips of all replicas"),
    ("bandwidth {} --chips=2 --mfu=5", "mfu is 5.0, but must be above 0 and at most 1"),
    ("bandwidth --params=-1", "--params is '-1'; write one such as 35M, 2.4B or 4e9"),
    ("figure c10 --out=/proc/none", "--out is '/proc/none', where nothing can"),
    ("figure s4 {} --chips=2 --out=s4.xyz", "'s4.xyz'; give a file such as s4"),
  ],
)
def test_arguments_without_effect_are_refused(args, message):
  words = args.format(f"--config={CONFIG}").split()
  assert message in running.refused(command.main, *words)


@pytest.mark.parametrize(
  ("args", "message"),
  [
    ("bandwidth --config.seed=1 --gbits=1", "unrecognized arguments: --gbits=1 (see"),
    ("utilisation", "the following arguments are required: --gbits"),
    ("utilisation --gbits=nan", "--gbits: 'nan' is not a number from 1e-30 to 1e30"),
    ("bandwidth --sync_every=9999999999999", "9999999999999; give 0 to 1e+12"),
  ],
)
def test_flags_that_cannot_be_parsed_end_in_one_sentence(args, message):
  said = running.refused(command.main, *args.split())
  assert said.endswith(" (see --help)\n")
  assert message in said


def test_small_models_have_small_fragments():
  for layers in (1, 2):
    args = f"bandwidth --params=1B --layers={layers} --step_time=0.1 --json"
    work = Workload.of_equal_layers(1e9, layers, 0.1, fragment_size=layers, tau=1)
    reached = json.loads(running.shown(command.main, *args.split()))["gbits"] * 16e9 / 4
    assert steady_utilisation(work, [reached])[0] == pytest.approx(0.95)


def test_options_that_a_config_does_not_give_have_an_effect():
  found = {}
  for more in ("", "--latency=3", "--chips=2", "--mfu=0.2"):
    args = f"utilisation --config={CONFIG} --gbits=0.001 --json --chips=1 {more}"
    found[more] = json.loads(running.shown(command.main, *args.split()))
  assert found["--latency=3"]["utilisation"] < found[""]["utilisation"]
  seconds = {more: answer["step_time_s"] for more, answer in found.items()}
  assert seconds["--chips=2"] == pytest.approx(seconds[""] / 2)
  assert seconds["--mfu=0.2"] == pytest.approx(seconds[""] * 2)


def test_every_default_that_the_help_states_is_the_one_that_is_used():
  used = arguments.workload({"params": 12e9, "layers": 12, "step_time": 1.0})
  for name in ("fragment_size", "tau", "link"):
    option = arguments.OPTIONS[name]
    stated = re.search(r"default (\w+)", option.help)[1]
    assert option.type(stated) == getattr(used, name), name
  plain = {"params": 12e9, "layers": 12, "step_time": 1.0, "method": "data_parallel"}
  assert (used.bits, arguments.workload(plain).bits) == (4, 16)
  by_config = {name for name, option in arguments.OPTIONS.items() if option.field}
  wanted = "params layers replicas method sync_every fragment_size tau bits"
  assert by_config == {*wanted.split()}


def test_step_time_by_hand():
  c = load_config(CONFIG)
  flops = flops_per_token(c.model) * c.train.batch_size * 2048
  seconds = flops / (64 * 200e12 * 0.3)
  assert step_time(c, 64, 200, 0.3) == pytest.approx(seconds)
  assert step_time(c) == pytest.approx(flops / (197e12 * 0.4))
  with pytest.raises(ValueError, match="chips is 0, but must be above 0"):
    step_time(c, chips=0)
