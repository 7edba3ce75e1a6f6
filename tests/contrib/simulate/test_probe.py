"""The probe: a line through made-up times, and two processes that print their plan."""

import itertools
import pathlib
import subprocess
import sys
import types

import pytest

from diloco.config.command_line import load_config
from diloco.contrib.simulate import _probe as probe
from diloco.errors import ConfigError
from diloco.processes.peers import Peers
from diloco.simulate import __main__ as command

CONFIG = str(pathlib.Path(__file__).parents[3] / "configs" / "wan.py")
SMALL = [f"--config.model.{x}" for x in ("num_layers=2", "dim=32", "num_heads=2")]
SIZES = (4e3, 16e3, 64e3, 256e3)


def test_the_line_has_the_latency_and_the_rate():
  line = probe.fit(SIZES, [0.02 + x / 5e5 for x in SIZES])
  assert line == pytest.approx((0.02, 5e5, 0), abs=1e-9)


def test_the_residual_is_what_no_line_explains():
  seconds = [0.02 + x / 5e5 for x in SIZES]
  seconds[1] += 0.03
  line = probe.fit(SIZES, seconds)
  # The best line is above three of the points and below one, so most remains.
  left = [y - line.latency - x / line.rate for x, y in zip(SIZES, seconds)]
  share = sum(x * x for x in left) / sum(x * x for x in seconds)
  assert line.residual == pytest.approx(share**0.5)
  assert sum(left) == pytest.approx(0, abs=1e-9)


def test_no_latency_is_negative():
  # A bucket lets the first 20 kB pass at once.
  seconds = [max(x - 2e4, 1e2) / 5e5 for x in SIZES]
  line = probe.fit(SIZES, seconds)
  assert line.latency == 0
  squares = sum(x * x for x in SIZES)
  assert line.rate == pytest.approx(
    squares / sum(x * y for x, y in zip(SIZES, seconds))
  )


def test_times_that_do_not_grow_are_refused():
  with pytest.raises(ConfigError, match=r"2.56e\+05 bytes take no longer than those"):
    probe.fit(SIZES, [0.3, 0.2, 0.1, 0.0])


def test_messages_are_as_large_as_fragments():
  small, *_, large = probe.message_sizes(load_config(CONFIG, SMALL))
  # A block in 4 bits with scales, and the embedding in float32.
  assert 2e3 < small < 8e3
  assert large == 4 * (2048 * 32 + 64 * 32 + 32)


@pytest.mark.parametrize(
  ("transport", "backend", "seconds"),
  # An update on hosts lengthens no inner step of other devices.
  [
    ("device", "cpu", 3),
    ("device", "gpu", 3),
    ("host", "cpu", 3 + 10),
    ("host", "gpu", 2),
  ],
)
def test_what_counts_as_the_time_of_a_sync(monkeypatch, transport, backend, seconds):
  c = load_config(CONFIG, [*SMALL, f"--config.overlap.transport={transport}"])
  monkeypatch.setattr(probe.jax, "default_backend", lambda: backend)
  # A second passes at each look at the clock: send, update and merge take one each. An
  # exchange takes ten seconds of the cores.
  wall, cpu = itertools.count(), itertools.count(step=10 * (transport == "host"))
  clocks = {"perf_counter": lambda: next(wall), "process_time": lambda: next(cpu)}
  monkeypatch.setattr(probe, "time", types.SimpleNamespace(**clocks))
  assert len(c.make_fragments()) == 3
  assert probe.sync_seconds(c, Peers()) == 3 * seconds


@pytest.mark.slow("starts two processes")
def test_the_printed_flags_repeat_the_plan(capfd):
  plan = ["plan", f"--config={CONFIG}", *SMALL]
  launch = [sys.executable, "-m", "diloco", "launch_local", "-n", "2", "--"]
  found = subprocess.run(
    [*launch, *plan, "--probe"], capture_output=True, text=True, check=False
  )
  assert found.returncode == 0, found.stderr
  lines = found.stdout.splitlines()
  assert all(line.startswith("[0] ") for line in lines)
  first, *rest = [line.removeprefix("[0] ") for line in lines]
  label, *flags = first.partition(" (residual")[0].split()
  assert label == "measured"
  names = [x.partition("=")[0] for x in flags]
  assert names == ["--step_time", "--sync_time", "--gbits", "--latency"]
  assert command.main([*plan, *flags]) == 0
  assert capfd.readouterr().out.splitlines() == [line.rstrip() for line in rest]
