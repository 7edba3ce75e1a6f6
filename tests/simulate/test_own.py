"""The reader's own case: configs as workloads, step times, frontier, command."""

import json
import pathlib

import pytest

from diloco.config import resolve
from diloco.config.command_line import load_config
from diloco.model.shapes import flops_per_token, num_params
from diloco.simulate import __main__ as command
from diloco.simulate import own
from diloco.simulate.utilisation import utilisation

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = f"{ROOT}/configs/chinchilla.py:1.3B,M=2,H=100"


def test_a_config_keeps_its_parameters_schedule_and_bits():
  c = load_config(CONFIG)
  work = own.workload(c, 0.5)
  assert sum(work.params_per_layer) == pytest.approx(num_params(c.model))
  assert work.layers == 25  # 24 blocks, and the embedding before them.
  assert work.bits == pytest.approx(4 + 8 / 128, rel=1e-5)
  schedule = c.make_schedule()
  for step in range(200, 301):
    sent = {layer for p in schedule.sends(step) for layer in work.plan[p][1]}
    assert work.reduced_after(step) == sent
  whole = own.workload(load_config(f"{CONFIG},algorithm=diloco"), 0.5)
  assert whole.plan == ((0, tuple(range(25))),)
  assert whole.bits == 32
  plain = own.workload(load_config(f"{CONFIG},algorithm=data_parallel"), 0.5)
  assert plain.method == "data_parallel"


def test_step_time_by_hand():
  c = load_config(CONFIG)
  flops = flops_per_token(c.model) * c.train.batch_size * 2048
  assert own.step_time(c, 64, 197e12, 0.4) == pytest.approx(flops / (64 * 197e12 * 0.4))
  with pytest.raises(ValueError, match="chips is 0; give a positive number"):
    own.step_time(c, 0, 1e12, 0.4)


def test_wire_bits_by_hand():
  value = 4 + 8 / 128
  for compressor, bits in (
    ("quantize", value),
    ("random", 0.1 * value),
    # Indices within 2048 x 2048 and 2048 x 8192 values.
    ("topk", 0.1 * (value + (4 * 22 + 8 * 24) / 12)),
  ):
    c = load_config(CONFIG, [f"--config.wire.compressor={compressor}"])
    assert own.wire_bits(c) == pytest.approx(bits, rel=5e-3)
  for field, said in (
    ("compressor=zip", "wire.compressor is 'zip'; choose one of quantize, topk"),
    ("format=e9m9", "wire.format is 'e9m9'; choose fp32, bf16 or eXmY"),
    ("format=four", "wire.format is 'four'; choose"),
  ):
    with pytest.raises(ValueError, match=said):
      own.wire_bits(load_config(CONFIG, [f"--config.wire.{field}"]))


def test_psum_all_reduces_float32(tiny):
  tiny.wire.exchange, tiny.replicas = "psum", 4
  work = own.workload(resolve(tiny), 1.0)
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
  work = own.workload(load_config(CONFIG), said["step_time_s"])
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


def test_fields_are_set_as_for_the_trainer(capsys):
  said = []
  for more in ((), ("--config.overlap.tau=5",), ("--config.wire.compressor=topk",)):
    args = ["bandwidth", f"--config={CONFIG}", "--step_time=1", "--json", *more]
    assert command.main(args) == 0
    said.append(json.loads(capsys.readouterr().out)["gbits"])
  assert said[1] < 0.5 * said[0]
  assert said[2] == pytest.approx(said[0] * 0.1 * (4 + 70 / 3) / 4, rel=0.05)


@pytest.mark.parametrize(
  ("args", "said"),
  [
    *(
      (f"bandwidth {{}} --{name}", f"is given with --config, which states it; set {to}")
      for name, to in (
        ("tau=1", "--config.overlap.tau instead."),
        ("bits=4", "--config.wire.format instead."),
        ("method=diloco", "--config.algorithm instead."),
        ("replicas=2", "--config.replicas instead."),
        ("sync_every=100", "--config.sync_every instead."),
        ("fragment_size=3", "--config.fragments.size instead."),
        ("params=1e9", "--config.model.dim instead."),
        ("layers=3", "--config.model.num_layers instead."),
      )
    ),
    ("frontier {} --gbits=1 --replicas=2", "--config.replicas instead."),
    ("wallclock {} --tokens=1e9", "--config.train.tokens instead."),
    ("wallclock {} --outer_bits=4", "--config.wire.format instead."),
    ("bandwidth {} --chips=2 --step_time=1", "--chips is given, but the time of a st"),
    (
      "bandwidth --mfu=1",
      "--mfu is given, but the time of a step follows from it only",
    ),
    ("bandwidth --method=diloco --tau=1", "--tau is given with --method=diloco, to wh"),
    ("bandwidth --config.seed=1", "--config.seed needs a --config before it."),
    ("bandwidth {} --config.sed=1", "--config.sed is no field (did you mean seed?)"),
    ("bandwidth {} --plot=/proc/none/x.png", "--plot is '/proc/none', where nothing"),
    ("bandwidth {} --step_time=0", "step_time is 0.0; give positive seconds"),
    ("figure c10 --output=/proc/none", "--output is '/proc/none', where nothing can"),
  ],
)
def test_arguments_that_would_mean_nothing_are_refused(args, said, capsys):
  assert command.main(args.format(f"--config={CONFIG}").split()) == 2
  error = capsys.readouterr().err
  assert error.startswith("error: ")
  assert error.count("\n") == 1
  assert said in error


def test_a_config_takes_what_it_does_not_state(capsys):
  said = {}
  for more in ("", "--latency=3", "--chips=2", "--mfu=0.2"):
    args = f"utilisation --config={CONFIG} --gbits=1 --json {more}".split()
    assert command.main(args) == 0
    said[more] = json.loads(capsys.readouterr().out)
  assert said["--latency=3"]["utilisation"] < said[""]["utilisation"]
  assert said["--chips=2"]["step_time_s"] == pytest.approx(said[""]["step_time_s"] / 2)
  assert said["--mfu=0.2"]["step_time_s"] == pytest.approx(said[""]["step_time_s"] * 2)
