"""Ends a run before its last step: SIGTERM and Ctrl-C save a checkpoint."""

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from diloco.processes.common_end import CommonEnd
from diloco.processes.peers import Peers, print_line
from diloco.util.command import INTERRUPTED
from diloco.util.orbax_errors import hush

# The handler of this signal raises a KeyboardInterrupt that Python has dropped. Without
# a handler, SIGURG has no effect on a process. SIGALRM is left to users.
AGAIN = signal.SIGURG
# Called with each signal that arrives, even while the main thread is in JAX.
_watchers: list[Callable[[int], None]] = []


class Interrupted(KeyboardInterrupt):
  """Ctrl-C ended a run; `Stop.leave` has reported the newest step that is saved."""


class Stopped(Exception):
  """A run ends before its last step.

  Attributes:
    late: whether steps after the newest checkpoint are done, but not saved.
  """

  def __init__(self, late: bool = False):
    super().__init__()
    self.late = late


class Stop:
  """Knows whether the run must end.

  Attributes:
    peers: the processes of the run.
    signum: the first signal that this process received; 0 if it received none.
    unsaved: whether this process has run steps that the next signal must save.
  """

  def __init__(self, peers: Peers):
    self.peers, self.signum, self.unsaved = peers, 0, False
    self.common = CommonEnd(peers) if peers.count > 1 else None

  def handle(self, signum: int, frame: object) -> None:
    """Notes a signal; Ctrl-C raises KeyboardInterrupt, or first saves unsaved steps."""
    del frame
    first, self.signum = not self.signum, self.signum or signum
    self.watch(signum)
    if signum != signal.SIGINT:
      return
    if not (first and self.unsaved):
      raise KeyboardInterrupt
    print_line(
      "\nCtrl-C: saves and ends after this step; a second Ctrl-C ends at once."
    )
    if self.common:
      self.common.ask("Ctrl-C")

  def watch(self, signum: int) -> None:
    """Asks the other processes to end, if the signal is SIGTERM."""
    if self.common and signum == signal.SIGTERM:
      self.common.ask("SIGTERM")

  def raise_again(self, signum: int, frame: object) -> None:
    """Raises the KeyboardInterrupt that Python dropped, unless a step must be saved."""
    del signum, frame
    if not self.unsaved:
      raise KeyboardInterrupt

  def received(self) -> bool:
    """Returns whether a signal to end has come to this process or to another."""
    return bool(self.signum or (self.common and self.common.asked))

  def after_launch(self) -> bool:
    """Returns whether all processes end now; must be called after every launch."""
    self.unsaved = True
    return self.common.after_launch() if self.common else bool(self.signum)

  def leave(self, t: int, workdir: object, late: bool = False) -> None:
    """Reports the newest step that is saved.

    Args:
      t: step of the newest checkpoint; 0: there is none.
      workdir: folder of the run.
      late: whether steps after t are done, but not saved.

    Raises:
      Interrupted: the signal was Ctrl-C.
    """
    self.unsaved = False
    what = "Ctrl-C" if self.signum == signal.SIGINT else "SIGTERM"
    saved = f"step {t} is the newest that is saved" if late else f"saved step {t}"
    saved = saved if t else "no step is saved"
    line = f"{what}: {saved} in {workdir}; the same command goes on."
    self.peers.print_line(line)
    if self.signum == signal.SIGINT:
      raise Interrupted(line)

  def finished(self, t: int, workdir: object) -> None:
    """Notes that the last step t is saved; from now on Ctrl-C ends immediately.

    Raises:
      Interrupted: Ctrl-C came before this call, and this process trains alone.
    """
    self.unsaved = False
    if self.common:
      self.common.over()
    # Other processes do not know of a Ctrl-C that comes after the last launch, and wait
    # for this process in the evaluation. So the run finishes.
    if self.signum == signal.SIGINT and not self.common:
      self.leave(t, workdir)


@contextlib.contextmanager
def end_on_signal(peers: Peers) -> Iterator[Stop]:
  """Makes SIGTERM and Ctrl-C end the training loop instead of the process."""
  with contextlib.ExitStack() as stack:
    stop = Stop(peers)
    if stop.common:
      stack.callback(stop.common.close)
    if threading.current_thread() is threading.main_thread():
      _handle(stop, stack)
    else:
      print_line(
        "Not in the main thread: SIGTERM and Ctrl-C will not save a checkpoint."
      )
    yield stop


def _handle(stop: Stop, stack: contextlib.ExitStack) -> None:
  """Passes signals to `stop` until the stack is closed."""
  handlers = {signal.SIGINT: stop.handle, AGAIN: stop.raise_again}
  handlers[signal.SIGTERM] = stop.handle
  for signum, handler in handlers.items():
    # A shell without job control starts background processes with Ctrl-C ignored.
    if signal.getsignal(signum) != signal.SIG_IGN:
      before = signal.signal(signum, handler)
      # `before` is None for a handler that C code set, which cannot be restored.
      stack.callback(signal.signal, signum, before or signal.SIG_DFL)
  hush()  # First, because its hook must outlast the hook below.
  stack.callback(setattr, sys, "unraisablehook", sys.unraisablehook)
  sys.unraisablehook = functools.partial(_raise_soon, sys.unraisablehook)
  _watchers.append(stop.watch)
  stack.callback(_watchers.remove, stop.watch)


def _raise_soon(report: Callable, lost: "sys.UnraisableHookArgs") -> None:
  """Sends AGAIN if Python dropped a KeyboardInterrupt; reports any other exception.

  Python drops exceptions in __del__ and in callbacks of its garbage collector. JAX has
  such a callback, and signals often come then, because the collector is slow.
  """
  if lost.exc_type is KeyboardInterrupt:
    # Waits 0.01 s, because Python would drop an exception that is raised now, too.
    main = threading.main_thread().ident
    threading.Timer(0.01, signal.pthread_kill, (main, AGAIN)).start()
  else:
    report(lost)


def watch_signals() -> None:
  """Makes a second Ctrl-C end this process immediately, even during compilation.

  Python calls signal handlers only between Python instructions. So this function also
  puts signals in a pipe, which a thread reads. After SIGTERM, the thread asks the other
  processes to end, even while this process waits in JAX.
  """
  read, write = os.pipe()
  os.set_blocking(write, False)
  signal.set_wakeup_fd(write, warn_on_full_buffer=False)

  def watch() -> None:
    interrupts = 0
    while interrupts < 2:
      [signum] = os.read(read, 1)
      interrupts += signum == signal.SIGINT
      for watcher in list(_watchers):
        watcher(signum)
    print_line(
      "\nSecond Ctrl-C: ended at once; the same command goes on from the checkpoint."
    )
    os._exit(INTERRUPTED)

  threading.Thread(target=watch, daemon=True).start()
