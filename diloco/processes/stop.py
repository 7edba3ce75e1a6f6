"""How a run ends before its last step: SIGTERM and Ctrl-C save a checkpoint."""

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.experimental import multihost_utils

from diloco.processes.peers import Peers, say
from diloco.util.command import INTERRUPTED
from diloco.util.orbax_errors import hush

# Makes Python raise a KeyboardInterrupt again. Not SIGALRM, which a user may need; and
# SIGURG does nothing to a process that does not handle it.
AGAIN = signal.SIGURG


class Interrupted(KeyboardInterrupt):
  """Ctrl-C ended a run, and the run is saved."""


class Stopped(Exception):
  """A run ends before its last step.

  Attributes:
    late: whether steps after the newest checkpoint are done, and not saved.
    events: what happened since the last launch, for the log.
  """

  def __init__(self, late: bool = False, events: Sequence[Any] = ()):
    super().__init__()
    self.late, self.events = late, list(events)


class Stop:
  """Knows whether the run must end.

  Attributes:
    peers: the processes of the run.
    signum: the first signal that this process received; 0 before.
    unsaved: whether this process has run steps that the next signal must save.
  """

  def __init__(self, peers: Peers):
    self.peers, self.signum, self.unsaved = peers, 0, False

  def handle(self, signum: int, frame: object) -> None:
    """Notes a signal; raises KeyboardInterrupt if Ctrl-C has nothing to wait for."""
    del frame
    first, self.signum = not self.signum, self.signum or signum
    if signum != signal.SIGINT:
      return
    if not (first and self.unsaved):
      raise KeyboardInterrupt
    say("\nCtrl-C: saves and ends after this step; a second Ctrl-C ends at once.")
    if self.peers.count > 1:  # JAX passes a SIGTERM on to the other processes.
      os.kill(os.getpid(), signal.SIGTERM)

  def raise_again(self, signum: int, frame: object) -> None:
    """Raises the KeyboardInterrupt that Python dropped, unless a step must be saved."""
    del signum, frame
    if not self.unsaved:
      raise KeyboardInterrupt

  def is_told(self) -> bool:
    """Returns whether this process has received a signal to end."""
    return bool(self.signum)

  def after(self, steps: range) -> bool:
    """Returns whether all processes end now; must be called with every step.

    Args:
      steps: the steps that were just finished.
    """
    self.unsaved = True
    if self.peers.count > 1:  # JAX makes all processes agree on the step.
      reached = multihost_utils.reached_preemption_sync_point
      return any(list(map(reached, steps)))  # list: any() would skip steps.
    return bool(self.signum)

  def leave(self, t: int, workdir: object, late: bool = False) -> None:
    """Reports that step t is saved.

    Args:
      t: step of the newest checkpoint; 0: there is none.
      workdir: its folder.
      late: whether steps after t are done, and not saved.

    Raises:
      Interrupted: the signal was Ctrl-C.
    """
    self.unsaved = False
    what = "Ctrl-C" if self.signum == signal.SIGINT else "SIGTERM"
    saved = f"step {t} is the newest that is saved" if late else f"saved step {t}"
    saved = saved if t else "no step is saved"
    line = f"{what}: {saved} in {workdir}; the same command goes on."
    if self.peers.index == 0:
      say(line)
    if self.signum == signal.SIGINT:
      raise Interrupted(line)

  def finished(self, t: int, workdir: object) -> None:
    """Notes that the last step t is saved; from now on Ctrl-C ends at once.

    Raises:
      Interrupted: Ctrl-C came before this call.
    """
    self.unsaved = False
    if self.signum == signal.SIGINT:
      self.leave(t, workdir)


@contextlib.contextmanager
def end_on_signal(peers: Peers) -> Iterator[Stop]:
  """Makes SIGTERM and Ctrl-C end the training loop instead of the process."""
  stop = Stop(peers)
  if threading.current_thread() is not threading.main_thread():
    say("Not in the main thread: SIGTERM and Ctrl-C will not save a checkpoint.")
    yield stop
    return
  handlers = {signal.SIGINT: stop.handle, AGAIN: stop.raise_again}
  if peers.count == 1:  # JAX handles SIGTERM if several processes train together.
    handlers[signal.SIGTERM] = stop.handle
  # A shell without job control starts background processes with Ctrl-C ignored.
  handled = [s for s in handlers if signal.getsignal(s) != signal.SIG_IGN]
  before = {s: signal.signal(s, handlers[s]) for s in handled}
  hush()  # Before the hook below, which it must outlast.
  report = sys.unraisablehook
  sys.unraisablehook = functools.partial(_raise_soon, report)
  try:
    yield stop
  finally:
    sys.unraisablehook = report
    for signum, handler in before.items():
      # None is a handler that was not set from Python and cannot be restored.
      signal.signal(signum, handler or signal.SIG_DFL)


def _raise_soon(report: Callable, lost: "sys.UnraisableHookArgs") -> None:
  """Sends AGAIN if Python has dropped a KeyboardInterrupt; reports all else.

  Python drops what is raised in __del__ and in callbacks of its garbage collector. JAX
  has such a callback, and a signal often reaches it: the collector is slow.
  """
  if lost.exc_type is KeyboardInterrupt:
    # Later, because what is raised now would be dropped, too.
    main = threading.main_thread().ident
    threading.Timer(0.01, signal.pthread_kill, (main, AGAIN)).start()
  else:
    report(lost)


def end_at_second_interrupt() -> None:
  """Makes a second Ctrl-C end this process at once, even while XLA compiles.

  Python calls its signal handlers only between Python instructions. Signals also arrive
  in a pipe, which a thread reads.
  """
  read, write = os.pipe()
  os.set_blocking(write, False)
  signal.set_wakeup_fd(write, warn_on_full_buffer=False)

  def watch() -> None:
    received = 0
    while received < 2:
      received += os.read(read, 1)[0] == signal.SIGINT
    say("\nSecond Ctrl-C: ended at once; the same command goes on from the checkpoint.")
    os._exit(INTERRUPTED)

  threading.Thread(target=watch, daemon=True).start()
