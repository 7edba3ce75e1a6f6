"""The channel between the processes of a run, beside JAX's runtime.

JAX carries the tensors. Each process also keeps one TCP connection to process 0. It
carries small values, such as metrics and data positions, and the news that a process
failed or is gone. No inner step waits for it. A message is a line of JSON: [kind,
value]; the kind is value, report or failed.
"""

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

Sockets = dict[int, socket.socket]  # {process: connection}
_GRACE = 5.0  # Seconds to wait for the errors of others, which may explain this one.


class ProcessLost(RuntimeError):
  """A process did not come, or is gone."""


class Peers:
  """All processes of a run, seen from this one. By default this process is alone.

  Attributes:
    index: number of this process, from 0.
    count: number of processes.
  """

  def __init__(self, index: int = 0, count: int = 1, sockets: Sockets | None = None):
    """Starts to listen to the other processes.

    Args:
      index: number of this process.
      count: number of processes.
      sockets: from `rendezvous.meet`.
    """
    self.index, self.count, self._sockets = index, count, sockets or {}
    self._received = {
      (kind, p): queue.SimpleQueue[Any]()
      for kind in ("value", "report")
      for p in range(count)
    }
    self._sending = threading.Lock()
    self._ending = threading.Lock()  # Never released: the process ends once.
    self._readers = [
      threading.Thread(target=self._read, args=(p,), daemon=True) for p in self._sockets
    ]
    for reader in self._readers:
      reader.start()

  def broadcast(self, value: Any) -> Any:
    """Returns process 0's value (JSON) on all processes; all must call it."""
    if self.index:
      return self._received["value", 0].get()
    self._send("value", value)
    return value

  def all_gather(self, value: Any) -> list[Any]:
    """Returns the values (JSON) of all processes, in their order; all must call it."""
    if self.index:
      self._send("value", value)
      return self.broadcast(None)
    others = (self._received["value", p].get() for p in range(1, self.count))
    return self.broadcast([value, *others])

  def report(self, value: Any) -> None:
    """Hands a value (JSON) to process 0, and waits for nothing."""
    if self.index:
      self._send("report", value)
    else:
      self._received["report", 0].put(value)

  def reports(self, wait: bool = False) -> Iterator[list[Any]]:
    """Yields the values of each `report` of all processes; only on process 0.

    Args:
      wait: whether to wait until the others have reported as often as process 0.
    """
    received = [self._received["report", p] for p in range(self.count)]
    while not received[0].empty() and (wait or not any(q.empty() for q in received)):
      yield [q.get() for q in received]

  def await_loss(self) -> None:
    """Waits before telling an error that the loss of another process may have caused.

    If a process is lost, this process ends here, with the message that names it.
    """
    if self.count > 1:
      time.sleep(_GRACE)

  def fail(self, message: str, code: int = 1) -> None:
    """Tells the user and the other processes an error, and ends this process."""
    say(f"error: {message}")
    if self.count == 1:
      sys.exit(code)
    self._ending.acquire(blocking=False)
    self._send("failed", message)
    self._exit(code)

  def close(self) -> None:
    """Waits until all processes call it, and leaves JAX's runtime."""
    if self.count > 1:
      self.all_gather(None)
      self._ending.acquire(blocking=False)
      if jax.distributed.is_initialized():
        jax.distributed.shutdown()

  def _send(self, kind: str, value: Any) -> None:
    """Sends a message to all connected processes."""
    line = json.dumps([kind, value]).encode() + b"\n"
    with self._sending:
      for connection in self._sockets.values():
        with contextlib.suppress(OSError):  # The reader notices that it is closed.
          connection.sendall(line)

  def _read(self, p: int) -> None:
    """Receives the messages of process p until that process is gone."""
    # ValueError: the process died in the middle of a line.
    with contextlib.suppress(OSError, ValueError):
      for line in self._sockets[p].makefile("rb"):
        kind, value = json.loads(line)
        if kind == "failed":
          # This process may be about to tell the same error itself.
          time.sleep(_GRACE / 2)
          return self._lost(value if p == 0 else f"process {p}: {value}")
        self._received[kind, p].put(value)
    return self._lost(
      f"process {p} of {self.count} is gone. The same command goes on from the last"
      " checkpoint."
    )

  def _lost(self, message: str) -> None:
    if self._ending.acquire(blocking=False):
      say(f"\nerror: {message}")  # A progress bar may stand on the line.
      if self.index == 0:
        self._send("failed", message)
      self._exit(1)

  def _exit(self, code: int) -> None:
    """Ends the process without Python's clean-up, in which JAX waits for the others.

    Process 0 ends last: without it JAX aborts the others.
    """
    others = {*self._readers} - {threading.current_thread()}
    deadline = time.monotonic() + _GRACE
    while self.index == 0 and any(reader.is_alive() for reader in others):
      if time.monotonic() > deadline:
        break
      time.sleep(0.05)
    sys.stdout.flush()
    os._exit(code)


def say(line: str) -> None:
  """Writes one line to stderr, whole even if other threads write."""
  print(line + "\n", end="", file=sys.stderr, flush=True)
