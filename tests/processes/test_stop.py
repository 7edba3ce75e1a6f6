"""Ctrl-C ends a run wherever it arrives."""

import gc
import os
import signal
import subprocess
import time
import types

import pytest
import running

from diloco.processes.peers import Peers
from diloco.processes.stop import AGAIN, Interrupted, end_on_signal

# A process that does not end at the first Ctrl-C. Its handler may run while `print`
# flushes; a second `print` would raise an error there.
DEAF = """
import os, signal, time
from diloco.processes import stop
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"heard\\n"))
stop.watch_signals()
print("ready", flush=True)
time.sleep(60)
"""


def test_the_second_interrupt_ends_a_process_at_once():
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
  process = running.start("-c", DEAF, **pipes)
  assert process.stdout.readline() == "ready\n"
  process.send_signal(signal.SIGINT)
  assert process.stdout.readline() == "heard\n"
  process.send_signal(signal.SIGINT)
  _, stderr = process.communicate(timeout=30)
  assert process.returncode == 130
  assert "Second Ctrl-C: ended at once" in stderr


@pytest.fixture
def interrupt_while_collecting():
  """Sends Ctrl-C inside a callback of the collector, where Python drops exceptions."""

  def interrupt(phase, info):
    if phase == "stop":
      os.kill(os.getpid(), signal.SIGINT)

  gc.disable()  # Until a test collects.
  gc.callbacks.append(interrupt)
  yield
  gc.callbacks.remove(interrupt)
  gc.enable()


def collect():
  """Collects garbage, and gives an interrupt ten seconds."""
  gc.collect()
  time.sleep(10)


def test_an_interrupt_during_collection_is_raised(interrupt_while_collecting, capfd):
  before = signal.getsignal(AGAIN)
  with pytest.raises(KeyboardInterrupt), end_on_signal(Peers()):
    collect()
  assert capfd.readouterr().err == ""
  assert signal.getsignal(AGAIN) == before


def test_an_interrupt_during_collection_leaves_time_to_save(interrupt_while_collecting):
  with end_on_signal(Peers()) as stop:
    gc.collect()
    stop.unsaved = True
    time.sleep(0.1)
    assert stop.received()


def test_an_alarm_of_the_user_rings_in_a_run_and_after_it():
  rung = []
  before = signal.signal(signal.SIGALRM, lambda *_: rung.append(True))
  try:
    with end_on_signal(Peers()):
      signal.raise_signal(signal.SIGALRM)
      signal.alarm(1)
    time.sleep(1.5)
  finally:
    signal.signal(signal.SIGALRM, before)
  assert len(rung) == 2


def test_a_process_of_several_that_is_interrupted_at_the_end_finishes(capfd):
  """The others evaluate, and wait for it."""
  with end_on_signal(Peers()) as stop:
    stop.signum, stop.common = signal.SIGINT, types.SimpleNamespace(over=lambda: None)
    stop.finished(4, "/w")
    stop.common = None
    with pytest.raises(Interrupted):
      stop.finished(4, "/w")


@pytest.mark.parametrize(
  ("late", "said"), [(False, "saved step 4 "), (True, "step 4 is")]
)
def test_a_run_that_leaves_says_which_step_is_saved(late, said, capfd):
  with end_on_signal(Peers()) as stop:
    stop.unsaved = True
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(Interrupted):
      stop.leave(4, "/w", late)
  assert f"Ctrl-C: {said}" in capfd.readouterr().err
