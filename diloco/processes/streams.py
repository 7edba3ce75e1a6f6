"""The addresses, messages and threads of the gRPC streams of `Peers`.

A message is a JSON list. The first message of a stream is [index, count]: the sender's
number and the number of processes. The other messages are [kind, value]. The kind is
value, report, end or a kind of news. For the kind end, the value is an error with its
exit status, or null. An empty message shows that its sender is still there.
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
  """Returns the address to connect to; localhost becomes its IPv4 address."""
  return re.sub(r"^localhost:", "127.0.0.1:", address)


def listened(address: str) -> str:
  """Returns where a process listens, so that others reach it at `address`, host:port.

  If the address is on the loopback, the process listens there. Else it listens at all
  IPv6 and IPv4 addresses of its machine, because the host's name may mean another
  address on this machine than on the others.
  """
  at, port = reached(address), address.rpartition(":")[2]
  return at if re.match(r"127\.[\d.]+:|\[::1\]:", at) else f"[::]:{port}"


def packed(*parts: Any) -> bytes:
  return json.dumps(parts).encode()


def hello(first: bytes) -> tuple[int, int] | None:
  """Returns (index, count) from a process's first message; None if it is wrong."""
  try:
    p, n = json.loads(first)
  except (ValueError, TypeError, RecursionError):
    return None
  return (p, n) if type(p) is type(n) is int and 0 < p < n else None


def outgoing(box: Box, beat: float) -> Iterator[bytes]:
  """Yields the messages to a process; an empty one after `beat` seconds of silence."""
  while True:
    try:
      message = box.get(timeout=beat)
    except queue.Empty:
      message = packed()
    if message is None:
      return
    yield message


class Threads(futures.Executor):
  """Runs each call in a daemon thread; threads of a pool would keep Python alive."""

  def submit(self, run: Callable, /, *args: Any, **kwargs: Any) -> futures.Future:
    future = futures.Future[Any]()
    task = lambda: future.set_result(run(*args, **kwargs))
    threading.Thread(target=task, daemon=True).start()
    return future
