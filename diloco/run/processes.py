"""Processes that train together: how they meet, agree, and notice that one is gone.

JAX's runtime carries the tensors. Beside it every process keeps one TCP connection to
process 0, for what that runtime does not tell: which processes have not come, which
one died, and small values such as metrics and data positions. Nothing on it is waited
for in a step, so replicas stay as independent as the algorithm allows.

Process 0 listens at the coordinator's address, and leaves it to JAX's coordination
service as soon as all have come; connections made by then stay.
"""

import collections
import contextlib
import json
import os
import pathlib
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

from diloco.config import ConfigError

# Seconds until the operating system notices that a peer's machine is gone.
_KEEPALIVE_IDLE, _KEEPALIVE_INTERVAL, _KEEPALIVE_COUNT = 20, 5, 4  # 40 s in all.
# JAX's own limit, after which it can only abort: long enough for a process that is
# stopped for a while, since deaths are noticed without it.
_HEARTBEAT = 600
_GRACE = 5.0  # Seconds for others' errors to arrive before ours is told.


class ProcessLost(RuntimeError):
  """A process has not come, or is gone."""


class Peers:
  """This process among all of a run; of one process alone by default.

  Attributes:
    index: this process, from 0.
    count: processes in all.
  """

  def __init__(self, index: int = 0, count: int = 1, sockets=None, remedy: str = ""):
    """Starts to listen to the peers.

    Args:
      index: this process.
      count: processes in all.
      sockets: {process: socket} that this process is connected to: all others for
        process 0, process 0 for the others.
      remedy: what to do when a process is lost; ends the message.
    """
    self.index, self.count = index, count
    self._sockets: dict[int, socket.socket] = sockets or {}
    self._remedy = remedy
    self._gathered = {p: queue.SimpleQueue[Any]() for p in range(count)}
    self._reports = {p: queue.SimpleQueue[Any]() for p in range(count)}
    self._reported: collections.deque[Any] = collections.deque()
    self._send_lock, self._lost_lock = threading.Lock(), threading.Lock()
    self._closing = False
    self._readers = [
      threading.Thread(target=self._read, args=(p,), daemon=True) for p in self._sockets
    ]
    for reader in self._readers:
      reader.start()

  def all_gather(self, value: Any) -> list[Any]:
    """The values (JSON) of all processes, in their order; all must call it."""
    if self.index:
      self._send(0, "gather", value)
      return self._gathered[0].get()
    values = [value, *(self._gathered[p].get() for p in range(1, self.count))]
    for p in self._sockets:
      self._send(p, "gather", values)
    return values

  def report(self, value: Any) -> None:
    """Hands a value (JSON) to process 0 without waiting for anything."""
    if self.index:
      self._send(0, "report", value)
    else:
      self._reported.append(value)

  def reports(self, wait: bool = False) -> Iterator[list[Any]]:
    """On process 0 the values of each `report` of all processes; elsewhere nothing.

    Args:
      wait: whether to wait for everything that this process has reported itself.
    """
    others = [self._reports[p] for p in range(1, self.count)]
    while self._reported and (wait or not any(q.empty() for q in others)):
      yield [self._reported.popleft(), *(q.get() for q in others)]

  def fail(self, message: str, code: int = 1) -> None:
    """Tells the others why this process stops, and ends it; alone it returns.

    Without Python's clean-up: JAX would wait there for the others.
    """
    if self.count > 1:
      self._closing = True
      self._tell("failed", message)
      self._leave(code)

  def await_loss(self) -> None:
    """Called with an exception that a lost peer may have caused, before it is told.

    Returns if all peers are there; otherwise the process ends.
    """
    if self.count > 1:
      time.sleep(_GRACE)

  def close(self) -> None:
    """Says goodbye; all processes leave together."""
    if self.count > 1:
      self.all_gather(None)
      self._closing = True
      if jax.distributed.is_initialized():
        jax.distributed.shutdown()

  def _send(self, p: int, kind: str, value: Any) -> None:
    line = json.dumps([kind, value]).encode() + b"\n"
    with contextlib.suppress(OSError), self._send_lock:
      self._sockets[p].sendall(line)  # That p is gone is noticed by reading.

  def _tell(self, kind: str, value: Any) -> None:
    for p in self._sockets:
      self._send(p, kind, value)

  def _read(self, p: int) -> None:
    with contextlib.suppress(OSError), self._sockets[p].makefile("rb") as lines:
      for line in lines:
        kind, value = json.loads(line)
        if kind == "failed":
          # The same error may be on its way here: then this process tells its own.
          time.sleep(_GRACE / 2)
          return self._lost(value if p == 0 else f"process {p}: {value}")
        {"gather": self._gathered, "report": self._reports}[kind][p].put(value)
    return self._lost(f"process {p} of {self.count} is gone.")

  def _lost(self, message: str) -> None:
    with self._lost_lock:
      if self._closing:
        return
      self._closing = True
    # A progress bar may stand on the line.
    say(f"\nerror: {message}{' ' if self._remedy else ''}{self._remedy}")
    if self.index == 0:
      self._tell("failed", message)
    self._leave(1)

  def _leave(self, code: int) -> None:
    """Ends the process; process 0 last, since without it JAX aborts the others."""
    deadline = time.monotonic() + _GRACE
    for reader in self._readers if self.index == 0 else ():
      # One that is not started yet cannot be joined.
      if reader.is_alive() and reader is not threading.current_thread():
        reader.join(max(deadline - time.monotonic(), 0))
    for stream in (sys.stdout, sys.stderr):
      stream.flush()
    os._exit(code)


def initialize(
  coordinator: str | None,
  num_processes: int | None,
  process_id: int | None,
  auto: bool = False,
  timeout: int = 300,
  remedy: str = "",
) -> Peers:
  """Joins the other processes; before anything of JAX is used.

  Once all have met, a process that is lost ends this one, as later in the run.

  Args:
    coordinator: host:port of process 0; None and not `auto`: one process alone.
    num_processes: processes in all.
    process_id: this one.
    auto: whether JAX finds what is not given, on Slurm, Open MPI, GKE or Cloud TPU.
    timeout: seconds for all to come.
    remedy: ends the message that tells of a lost process.

  Raises:
    ConfigError: the arguments are incomplete.
    ProcessLost: not all came; says which, and where they were awaited.
  """
  devices = None
  if auto:
    coordinator, num_processes, process_id, devices = _detect(
      coordinator, num_processes, process_id, timeout
    )
  given = (coordinator, num_processes, process_id)
  if given == (None, None, None):
    return Peers()
  if coordinator is None or num_processes is None or process_id is None:
    raise ConfigError(
      f"--coordinator is {coordinator}, --num_processes {num_processes} and"
      f" --process_id {process_id}; give all three, or --distributed=auto."
    )
  if not 0 <= process_id < num_processes:
    raise ConfigError(
      f"--process_id is {process_id}, but --num_processes is {num_processes}; number"
      f" the processes from 0 to {num_processes - 1}."
    )
  host, _, port = coordinator.rpartition(":")
  if not host or not port.isdigit():
    raise ConfigError(f"--coordinator is {coordinator!r}; write host:port.")
  if num_processes == 1:
    return Peers()
  sockets = meet(host.strip("[]"), int(port), num_processes, process_id, timeout)
  # Before JAX, which would wait until the time-out for one that dies now.
  peers = Peers(process_id, num_processes, sockets, remedy)
  # Without this the processes' CPU devices cannot exchange anything.
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  try:
    jax.distributed.initialize(
      coordinator,
      num_processes,
      process_id,
      devices,
      initialization_timeout=timeout,
      heartbeat_timeout_seconds=_HEARTBEAT,
    )
  except RuntimeError as error:
    peers.await_loss()
    message = (
      f"process {process_id} of {num_processes} met the others at {coordinator}, but"
      f" JAX did not join them ({str(error).partition(chr(10))[0]}); start all again,"
      " if need be with another port in --coordinator."
    )
    say(f"error: {message}")
    peers.fail(message)
  return peers


def make_shared(folder: pathlib.Path, peers: Peers) -> None:
  """Makes a folder that all processes write to.

  Raises:
    ConfigError: it is another folder on the machines of some processes.
  """
  folder.mkdir(parents=True, exist_ok=True)
  probe = folder / peers.all_gather(f".shared-{secrets.token_hex(8)}")[0]
  if peers.index == 0 and peers.count > 1:
    probe.touch()
  peers.all_gather(None)
  seen = peers.all_gather(peers.count == 1 or probe.exists())
  if peers.index == 0:
    probe.unlink(missing_ok=True)
  if not all(seen):
    blind = [p for p, sees in enumerate(seen) if not sees]
    raise ConfigError(
      f"--workdir is {folder}, which {_name(blind)} of {peers.count} does not share"
      " with process 0; put it on a file system that all machines mount."
    )


def say(line: str) -> None:
  """One line on stderr, whole even if other threads write."""
  sys.stderr.write(line + "\n")
  sys.stderr.flush()


def _detect(coordinator, num_processes, process_id, timeout: int):
  """What JAX finds out about the cluster: address, count, id and local devices."""
  # JAX has no public name for this, only for detecting and joining in one.
  from jax._src import clusters

  found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
    coordinator, num_processes, process_id, None, None, timeout
  )
  if None in found[:3]:
    raise ConfigError(
      "--distributed is auto, but this is neither Slurm, Open MPI, GKE nor Cloud TPU;"
      " give --coordinator, --num_processes and --process_id."
    )
  return found


def check_all_meet(peers: Peers) -> None:
  """Refuses processes of JAX that know nothing of each other.

  Each of them would write the same files, with its own part of the run.

  Raises:
    ConfigError: JAX has more or fewer processes than `peers`.
  """
  if peers.count != jax.process_count():
    raise ConfigError(
      f"peers are {peers.count} processes, but JAX's are {jax.process_count()}; join"
      " them by diloco.run.processes.initialize, instead of jax.distributed.initialize,"
      " and hand its peers to train; on the command line by --distributed=auto or"
      " --coordinator."
    )


@contextlib.contextmanager
def end_on_sigterm(peers: Peers) -> Iterator[Callable[[range], bool]]:
  """Notes SIGTERM instead of dying of it, until training ends.

  Yields:
    A function from steps that were just finished to whether all processes end now. It
    must be asked about every step.
  """
  if peers.count > 1:  # JAX notes the signal and lets all processes agree on a step.
    reached = multihost_utils.reached_preemption_sync_point
    yield lambda steps: any(list(map(reached, steps)))  # Asks about each of them.
    return
  requested = threading.Event()
  try:
    before = signal.signal(signal.SIGTERM, lambda signum, frame: requested.set())
  except ValueError:
    say("Not in the main thread: SIGTERM will not save a checkpoint.")
    yield lambda steps: False
    return
  try:
    yield lambda steps: requested.is_set()
  finally:
    # None is a handler that was not set from Python and cannot be.
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def meet(
  host: str, port: int, count: int, index: int, timeout: int
) -> dict[int, socket.socket]:
  """Connects all processes with process 0, which listens at host:port.

  Args:
    host: where the others find process 0.
    port: its port; free again when this returns.
    count: processes in all.
    index: this one.
    timeout: seconds for all to come.

  Returns:
    {process: socket}, as `Peers` takes it.

  Raises:
    ProcessLost: not all came, or one with another id or count than it should have.
  """
  deadline = time.monotonic() + timeout
  if index:
    sockets = {0: _join(host, port, count, index, timeout, deadline)}
  else:
    sockets = _gather_all(f"{host}:{port}", port, count, timeout, deadline)
  for s in sockets.values():
    _keep_alive(s)
  return sockets


def _gather_all(address: str, port: int, count: int, timeout: int, deadline: float):
  sockets: dict[int, socket.socket] = {}
  went = set[int]()  # One that came and died may be started again.

  def refuse(message: str):
    for s in sockets.values():
      with contextlib.suppress(OSError):
        _write(s, message)
    return ProcessLost(message)

  def drop_gone(among) -> bool:
    gone = [p for p in among if p in sockets and _is_gone(sockets[p])]
    for p in gone:
      sockets.pop(p).close()
    went.update(gone)
    return bool(gone)

  with _listen(port) as listener:
    while len(sockets) < count - 1 or drop_gone(list(sockets)):
      listener.settimeout(max(deadline - time.monotonic(), 0.01))
      try:
        connection, _ = listener.accept()
      except TimeoutError:
        drop_gone(list(sockets))
        missing = [p for p in range(1, count) if p not in sockets]
        left = sorted(went.intersection(missing))
        note = f" ({_name(left)} came and went again)" if left else ""
        raise refuse(
          f"{_name(missing)} of {count} did not come to {address} within {timeout} s"
          f"{note};"
          " start all with the same --coordinator and --num_processes, and see"
          " whether that address can be reached from theirs."
        ) from None
      connection.settimeout(5)
      try:
        p, n = _readline(connection)
      except (OSError, ValueError, TypeError):
        connection.close()  # Something else, for instance a port scan.
        continue
      drop_gone([p])
      if n != count or p in sockets or not 0 < p < count:
        sockets[-1] = connection
        raise refuse(
          f"a process came to {address} as number {p} of {n}, but {count} are expected"
          f" and {sorted(k for k in [0, *sockets] if k >= 0)} are there; give each its"
          " own --process_id and all the same --num_processes."
        )
      sockets[p] = connection
    for s in sockets.values():
      with contextlib.suppress(OSError):  # `Peers` notices that it is gone.
        _write(s, None)
  return sockets


def _is_gone(s: socket.socket) -> bool:
  """Whether the process at the other end, which waits for a word, has closed it."""
  timeout = s.gettimeout()
  s.setblocking(False)
  try:
    return not s.recv(1, socket.MSG_PEEK)
  except BlockingIOError:
    return False
  except OSError:
    return True
  finally:
    s.settimeout(timeout)


def _join(host: str, port: int, count: int, index: int, timeout: int, deadline: float):
  while True:
    try:
      s = socket.create_connection((host, port), max(deadline - time.monotonic(), 0.01))
      _write(s, [index, count])
      break
    except OSError as error:
      if time.monotonic() > deadline:
        raise ProcessLost(
          f"process {index} of {count} found no process 0 at {host}:{port} within"
          f" {timeout} s ({error}); start it, or correct --coordinator."
        ) from error
      time.sleep(0.2)
  s.settimeout(max(deadline - time.monotonic(), 0) + 10)
  try:
    message = _readline(s)
  except (OSError, ValueError) as error:
    raise ProcessLost(
      f"process {index} of {count} reached {host}:{port}, but process 0 did not answer"
      f" ({error}); look for its error."
    ) from error
  if message is not None:
    raise ProcessLost(message)
  return s


def _listen(port: int) -> socket.socket:
  try:
    if socket.has_dualstack_ipv6():
      family, dual = socket.AF_INET6, True
    else:
      family, dual = socket.AF_INET, False
    return socket.create_server(
      ("", port), family=family, dualstack_ipv6=dual, backlog=1024
    )
  except OSError as error:
    raise ProcessLost(
      f"process 0 cannot listen at port {port} ({error}); choose another port in"
      " --coordinator."
    ) from error


def _write(s: socket.socket, value: Any) -> None:
  s.sendall(json.dumps(value).encode() + b"\n")


def _readline(s: socket.socket) -> Any:
  """One line of JSON and not a byte more."""
  line = b""
  while not line.endswith(b"\n"):
    byte = s.recv(1)
    if not byte:
      raise ValueError("connection closed")
    line += byte
  return json.loads(line)


def _keep_alive(s: socket.socket) -> None:
  s.settimeout(None)
  s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  for option, value in (
    ("TCP_KEEPIDLE", _KEEPALIVE_IDLE),
    ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL),
    ("TCP_KEEPCNT", _KEEPALIVE_COUNT),
    # The same limit where something was sent and is not acknowledged.
    ("TCP_USER_TIMEOUT", 40_000),
  ):
    if hasattr(socket, option):  # Not everywhere under this name.
      s.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _name(ids: list[int]) -> str:
  if len(ids) == 1:
    return f"process {ids[0]}"
  return f"processes {', '.join(map(str, ids[:16]))}{', ...' if ids[16:] else ''}"
