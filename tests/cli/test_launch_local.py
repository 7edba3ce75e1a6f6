"""The launcher waits for its processes, and ends the others if one fails."""

import subprocess
import sys
from concurrent import futures

import pytest

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
  start = lambda name: subprocess.Popen([sys.executable, "-c", PROGRAMS[name]])
  processes = {name: start(name) for name in names}
  with futures.ThreadPoolExecutor(len(names)) as threads:
    assert launch_local.wait(threads, processes, needed) == ended
  lines = capsys.readouterr().err.splitlines()
  assert [x.startswith(f"process {y}") for x, y in zip(lines, said, strict=True)] == [
    True for _ in said
  ]
