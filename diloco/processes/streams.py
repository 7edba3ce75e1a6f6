"""The gRPC streams of `Peers`: addresses, messages, threads.

A message is a JSON list. The first of a stream is [index, count], the others are [kind,
value]. The kind is value, report, end or a kind of news. The value of an end is an
error and its exit status, or null. Empty messages show that their sender is there.
"""

import json
import queue
import re
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

Box = queue.SimpleQueue[bytes | None]  # Messages to a process; None ends the stream.


def reached(address: str) -> str:
  """Returns where a process connects: localhost has one address, that of IPv4."""
  return re.sub(r"^localhost:", "127.0.0.1:", address)


def listened(address: str) -> str:
  """Returns where a process listens that others reach at an address (host:port).

  That is the loopback if the address is there; else all addresses of the machine, also
  of IPv4, because a name may mean another one here than for the others.
  """
  at, port = reached(address), address.rpartition(":")[2]
  return at if re.match(r"127\.[\d.]+:|\[::1\]:", at) else f"[::]:{port}"


def packed(*parts: Any) -> bytes:
  return json.dumps(parts).encode()


def hello(first: bytes) -> tuple[int, int] | None:
  """Reads the first message of a process: its number and their count; else None."""
  try:
    p, n = json.loads(first)
  except (ValueError, TypeError, RecursionError):
    return None
  return (p, n) if type(p) is type(n) is int and 0 < p < n else None


def outgoing(box: Box, beat: float) -> Iterator[bytes]:
  """Yields the messages to a process; an empty one shows after `beat` s who is lost."""
  while True:
    try:
      message = box.get(timeout=beat)
    except queue.Empty:
      message = packed()
    if message is None:
      return
    yield message


class Threads(futures.Executor):
  """One daemon thread per call; those of a pool would keep Python from ending."""

  def submit(self, run: Callable, /, *args: Any, **kwargs: Any) -> futures.Future:
    future = futures.Future[Any]()
    task = lambda: future.set_result(run(*args, **kwargs))
    threading.Thread(target=task, daemon=True).start()
    return future
