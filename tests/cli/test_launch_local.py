"""The launcher waits for its processes, and ends the others if one fails."""

import argparse
import io
from concurrent import futures

import pytest
import running

from diloco.cli import launch_local

PROGRAMS = {
  "fails": "import sys; sys.exit(3)",
  "hangs": "import time; time.sleep(600)",
  "ends": "import time; time.sleep(1)",
  "crashes": "import os; os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize(
  ("names", "needed", "ended", "said"),
  [
    (["ends"], {"ends"}, 0, []),
    (["fails", "hangs"], {"fails"}, 3, ["fails ended with code 3", "hangs ended with"]),
    (["fails", "ends"], {"ends"}, 3, ["fails ended with code 3"]),
    (["crashes", "ends"], set(), 137, ["crashes ended with signal 9"]),
  ],
)
def test_the_first_failure_counts(names, needed, ended, said, monkeypatch, capsys):
  monkeypatch.setattr(launch_local, "GRACE", 0.2)
  processes = {name: running.start("-c", PROGRAMS[name]) for name in names}
  with futures.ThreadPoolExecutor(len(names)) as threads:
    assert launch_local.wait(threads, processes, needed) == ended
  lines = capsys.readouterr().err.splitlines()
  assert [x.startswith(f"process {y}") for x, y in zip(lines, said, strict=True)] == [
    True for _ in said
  ]


@pytest.mark.parametrize(
  ("args", "begin"),
  [
    (["--config=c"], ["diloco", "main", "--config=c"]),
    (["plan", "--config=c"], ["diloco", "plan", "--config=c"]),
  ],
)
def test_a_command_may_be_given(args, begin):
  commands = launch_local.run_commands(argparse.Namespace(n=2, args=args))
  for i, one in commands.items():
    assert one[: len(begin)] == begin
    assert one[-2:] == ["--num_processes=2", f"--process_id={i}"]


def test_lines_of_a_process_are_shown_without_those_of_gloo(capsys):
  text = b"a\r 10%|#  [Gloo] Rank 0 is connected to 0 peer ranks. Expected: 0\nb\n"
  text += b"[Gloo] Rank 1 is connected to 1 peer ranks.\n"
  launch_local.copy("0", io.BytesIO(text))
  assert capsys.readouterr().out.splitlines() == ["[0] a", "[0]  10%|#  ", "[0] b"]
