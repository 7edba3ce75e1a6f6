"""The picture of a run: which runs and which steps can be drawn."""

import shutil
import subprocess
import sys

import pytest

from diloco.cli import draw_run
from diloco.config import resolve
from diloco.log.metrics import MetricsWriter
from diloco.simulate.schedule_figure import Send, planned
from diloco.train import train


def test_the_sends_of_a_run_are_read_and_drawn(tiny, tmp_path):
  tiny.overlap.tau = 2
  train(tiny, tmp_path)
  shutil.rmtree(tmp_path / "checkpoints")  # A young run has none.
  c, sends, done = draw_run.read(tmp_path)
  assert done == 12
  assert c == resolve(tiny)
  # H is 4, so fragment p is sent after 4 + p, 8 + p and 12 + p steps. E3M0 sends half a
  # byte for each value, and a byte for each block of 16. A layer has 3072 values in
  # matrices and 48 in norms; fragment 3, the embedding, has 33,024 and 16.
  sizes = [1536 + 192 + 24 + 4] * 3 + [16_512 + 2064 + 8 + 1]
  assert sends == [Send(t, t % 4, sizes[t % 4]) for t in range(4, 13)]
  assert sends == planned(c, 1, 12)
  out = tmp_path / "new" / "run.png"
  flags = [f"--workdir={tmp_path}", "--last=12", f"--out={out}"]
  ended = subprocess.run(
    [sys.executable, "-m", "diloco", "draw_run", *flags],
    capture_output=True,
    text=True,
    check=False,
  )
  assert (ended.returncode, ended.stdout) == (0, f"{out}\n"), ended.stderr
  assert out.read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_a_run_is_refused(tmp_path):
  with pytest.raises(draw_run.ConfigError, match=r"has no metrics.jsonl; give the"):
    draw_run.read(tmp_path)


def test_a_run_without_a_config_is_refused(tmp_path):
  (tmp_path / "metrics.jsonl").write_text("")
  (tmp_path / "config.json").write_text('{"seed": ')
  message = r"has no config.json that can be read"
  with pytest.raises(draw_run.ConfigError, match=message):
    draw_run.read(tmp_path)


def test_a_data_parallel_run_is_refused(tiny, tmp_path):
  tiny.algorithm = "data_parallel"
  MetricsWriter(tmp_path, resolve(tiny)).close()
  with pytest.raises(draw_run.ConfigError, match="a data-parallel run; use a DiLoCo"):
    draw_run.read(tmp_path)


def test_steps_without_a_send_are_refused():
  sends = [Send(t, 0, 1) for t in (8, 16)]
  message = "but the log has sends from step 8 to 16; choose"
  with pytest.raises(draw_run.ConfigError, match=message):
    draw_run.check(sends, 20, 30)
  with pytest.raises(draw_run.ConfigError, match="but the log has no send; choose"):
    draw_run.check([], 20, 30)
