"""How the processes of a run find each other: all connect to process 0.

Process 0 listens at the coordinator's address, and frees it for JAX's coordination
service as soon as all have come. The connections stay open for `Peers`.
"""

import contextlib
import json
import socket
import time
from collections.abc import Iterable

from diloco.run.peers import ProcessLost, Sockets

# The system notices within 40 s that a machine has vanished: TCP_USER_TIMEOUT is in
# milliseconds, and also holds for unanswered probes of an idle connection.
_TCP_OPTIONS = {
  "TCP_NODELAY": 1,
  "TCP_KEEPIDLE": 20,
  "TCP_KEEPINTVL": 5,
  "TCP_USER_TIMEOUT": 40_000,
}


def meet(host: str, port: int, count: int, index: int, timeout: float) -> Sockets:
  """Connects all processes to process 0, which listens at host:port.

  Process 0 returns when all have come, the others as soon as they are connected. If a
  process does not come, process 0 sends `failed` to those that came.

  Args:
    host: name or address of process 0's machine, as the others reach it.
    port: port of process 0; free again when process 0 returns.
    count: number of processes.
    index: number of this process.
    timeout: seconds to wait.

  Returns:
    The connections: of process 0 to all others, of the others to process 0.

  Raises:
    ProcessLost: a process did not come, or came with a wrong number or count.
  """
  if index:
    sockets = _join(host, port, count, index, timeout)
  else:
    sockets = _await_all(f"{host}:{port}", port, count, timeout)
  for connection in sockets.values():
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _TCP_OPTIONS.items():
      if hasattr(socket, option):  # macOS lacks some.
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
  return sockets


def process_names(ids: list[int]) -> str:
  """Names processes in a message, the first 16 if there are more."""
  shown = ", ".join(map(str, ids[:16])) + (", ..." if ids[16:] else "")
  return f"process{'es' if ids[1:] else ''} {shown}"


def _join(host: str, port: int, count: int, index: int, timeout: float) -> Sockets:
  """Connects to process 0, and tells it the number of this process."""
  deadline = time.monotonic() + timeout
  while True:
    try:
      left = max(deadline - time.monotonic(), 0.01)
      connection = socket.create_connection((host, port), left)
      connection.sendall(json.dumps([index, count]).encode() + b"\n")
      return {0: connection}
    except OSError as error:
      if time.monotonic() > deadline:
        raise ProcessLost(
          f"process {index} of {count} found no process 0 at {host}:{port} within"
          f" {timeout} s ({error}); start it, or correct --coordinator."
        ) from error
      time.sleep(0.2)


def _await_all(address: str, port: int, count: int, timeout: float) -> Sockets:
  """Accepts all other processes."""
  deadline = time.monotonic() + timeout
  sockets: Sockets = {}
  died = set[int]()
  with _listen(port) as listener:
    while True:
      # A process that died while it waited may be started again.
      for p in [p for p, connection in sockets.items() if _is_closed(connection)]:
        sockets.pop(p).close()
        died.add(p)
      if len(sockets) == count - 1:
        return sockets
      if time.monotonic() > deadline:
        missing = [p for p in range(1, count) if p not in sockets]
        left = sorted(died.intersection(missing))
        note = f" ({process_names(left)} came and went again)" if left else ""
        raise _refused(
          sockets.values(),
          f"{process_names(missing)} of {count} did not come to {address} within"
          f" {timeout} s{note}; start all with the same --coordinator and"
          " --num_processes, and see whether their machines reach that address.",
        )
      try:
        connection = listener.accept()[0]
        connection.settimeout(5)
        # Unbuffered: what follows the first line is for `Peers`.
        p, n = json.loads(connection.makefile("rb", buffering=0).readline())
        connection.setblocking(False)
      except (OSError, ValueError, TypeError):
        continue  # Nobody came, or another program, for instance a port scan.
      present = p in sockets and not _is_closed(sockets[p])
      if n != count or present or not 0 < p < count:
        raise _refused(
          [*sockets.values(), connection],
          f"a process came to {address} as number {p} of {n}, but {count} are expected"
          f" and {sorted([0, *sockets])} are there; give each its own --process_id and"
          " all the same --num_processes.",
        )
      sockets[p] = connection


def _listen(port: int) -> socket.socket:
  """Listens on all addresses, IPv4 and where possible IPv6."""
  dual = socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if dual else socket.AF_INET
  try:
    listener = socket.create_server(
      ("", port), family=family, dualstack_ipv6=dual, backlog=1024
    )
  except OSError as error:
    raise ProcessLost(
      f"process 0 cannot listen at port {port} ({error}); choose another port in"
      " --coordinator."
    ) from error
  listener.settimeout(0.2)
  return listener


def _refused(sockets: Iterable[socket.socket], message: str) -> ProcessLost:
  """Sends `failed` to all that came; returns the error to raise."""
  for connection in sockets:
    with contextlib.suppress(OSError):
      connection.sendall(json.dumps(["failed", message]).encode() + b"\n")
  return ProcessLost(message)


def _is_closed(connection: socket.socket) -> bool:
  """Whether the other end, which sends nothing while it waits, has closed it."""
  try:
    return not connection.recv(1, socket.MSG_PEEK)
  except BlockingIOError:
    return False
  except OSError:
    return True
