"""Processes agree on the launch after which all end; here they are threads."""

import queue
import random
import signal
import subprocess
import threading
import time

import pytest
import running
from threads import at_once, close, connected, free_port

from diloco.log import metrics
from diloco.processes import common_end
from diloco.processes.common_end import CommonEnd

# A process of a run that waits one second for a common end.
IMPATIENT = """
import runpy
from diloco.processes import common_end
common_end.PATIENCE = 1.0
runpy.run_module("diloco.main", run_name="__main__")
"""


def leave(ends, peers):
  for end in ends:
    end.close()
  close(peers)


@pytest.mark.parametrize("asking", [(0,), (1,), (0, 1, 2)], ids=str)
def test_all_end_after_the_same_launch(asking):
  peers = connected(3)
  ends = [CommonEnd(p) for p in peers]
  began = queue.SimpleQueue()

  def run(i: int) -> int:
    """Launches until the end; asks for it after some launches."""
    rng = random.Random(i)
    for launch in range(1, 1000):
      time.sleep(rng.random() / 100)  # Each is at another launch.
      if launch == 5 + i and i in asking:
        began.put(launch)
        ends[i].ask("SIGTERM")
      if ends[i].after_launch():
        return launch
    return 0

  found = set(at_once(run, range(3)).values())
  assert len(found) == 1
  assert began.get() <= found.pop() < 1000
  assert all(end.asked for end in ends)
  leave(ends, peers)


@pytest.mark.parametrize("over", [False, True])
def test_without_a_common_launch_a_process_ends_unless_finished(over, monkeypatch):
  monkeypatch.setattr(common_end, "PATIENCE", 0.1)
  peers, errors = connected(2), queue.SimpleQueue()
  monkeypatch.setattr(peers[1], "fail", errors.put)
  end = CommonEnd(peers[1])  # Process 0 answers nothing.
  end.ask("SIGTERM")
  if over:
    end.over()
    with pytest.raises(queue.Empty):
      errors.get(timeout=0.3)
  else:
    assert "SIGTERM: the 2 processes did not finish a common" in errors.get(timeout=10)
  leave([end], peers)


def test_threads_that_ask_at_once_start_one_timer(monkeypatch):
  made = []

  class Slow(threading.Timer):
    def __init__(self, *args):
      made.append(self)
      time.sleep(0.1)  # The others come meanwhile.
      super().__init__(*args)

  peers = connected(2)
  end = CommonEnd(peers[1])
  monkeypatch.setattr(common_end.threading, "Timer", Slow)
  at_once(lambda i: end.ask("SIGTERM"), range(4))
  assert len(made) == 1
  leave([end], peers)


@pytest.mark.integration("stops a process of two")
def test_sigterm_ends_a_process_that_waits_for_a_suspended_one(tmp_path):
  # tests/process_config.py wants two devices.
  port = free_port()

  def start(i: int) -> subprocess.Popen:
    config = ("--config=tests/process_config.py", "--config.checkpoint.every=0")
    joined = (f"--coordinator=localhost:{port}", "--num_processes=2")
    more = ("--config.train.steps=100000", f"--workdir={tmp_path}")
    words = ["-c", IMPATIENT, *config, *joined, *more, f"--process_id={i}"]
    return running.start(*words, stderr=subprocess.PIPE)

  processes = [start(0), start(1)]
  try:
    path = tmp_path / metrics.FILE
    running.wait(lambda: path.is_file() and metrics.read(tmp_path), *processes)
    processes[1].send_signal(signal.SIGSTOP)
    time.sleep(1)  # Process 0 comes to the collective that process 1 never reaches.
    processes[0].send_signal(signal.SIGTERM)
    _, stderr = processes[0].communicate(timeout=120)
    assert processes[0].returncode == 1
    assert "error: SIGTERM: the 2 processes did not finish a common step" in stderr
    processes[1].send_signal(signal.SIGCONT)
    assert processes[1].wait(60) in (1, -signal.SIGABRT)
  finally:
    for p in processes:
      p.kill()
