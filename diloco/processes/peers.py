"""The channel between the processes of a run, in addition to JAX's runtime.

JAX carries the tensors. Each process also keeps one gRPC stream to process 0, from the
start of the run to its end. The stream carries small values, such as metrics and data
positions, and the news that a process failed or is gone. No step waits for the stream.

JAX's coordination service cannot replace the streams (jax 0.10.2). It has no public
API, and it aborts a process without an error that Python could catch. It notices a lost
process by missed heartbeats, but a suspended process misses heartbeats, too. With two
processes and heartbeats of 10 s, a process noticed after 9.3 s that the other process
was killed; a stream breaks after 0.01 s. `multihost_utils` cannot replace the streams
either: it gathers arrays of one shape on the devices, after all launched steps.
"""

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import jax

from diloco.errors import TryAgain
from diloco.processes import streams
from diloco.processes.streams import Box, outgoing, packed
from diloco.util.files import shown

# Seconds to wait for errors of other processes, which may cause this process's error.
_GRACE = 5.0
# Seconds to wait for a value of a process that is connected but does not send it.
PATIENCE = 1800.0
_BEAT = 10.0  # Seconds of silence after which an empty message is sent.
_HELLO_S = 10.0  # Seconds in which the first message of a new stream must come.
_SERVICE, _METHOD = "diloco.Peers", "Talk"
_OPTIONS = (
  # A connection breaks when a machine has confirmed nothing for 30 s. gRPC's own pings
  # would also break the connection to a suspended process, so they come once a day.
  ("grpc.keepalive_timeout_ms", 30_000),
  ("grpc.keepalive_time_ms", 86_400_000),
  ("grpc.http2.bdp_probe", 0),  # These probes would be pings, too.
  ("grpc.enable_http_proxy", 0),
  ("grpc.so_reuseport", 0),
  # Every attempt to connect looks up the host's name again, and takes at most 5 s.
  ("grpc.use_local_subchannel_pool", 1),
  ("grpc.min_reconnect_backoff_ms", 5_000),
)
# Limits of what process 0 receives, because anybody who reaches its port can send. Each
# process of the run sends values of 1 MB at most, on one stream. The other processes
# have no limit, because the messages of process 0 have the values of all processes.
_LIMITS = (
  ("grpc.max_receive_message_length", 4 << 20),
  ("grpc.max_concurrent_streams", 1),
  ("grpc.max_connection_idle_ms", 30_000),
)
_NO_LIMIT = (("grpc.max_receive_message_length", -1),)


class ProcessLost(TryAgain):
  """A process did not connect in time, or is gone."""


class Peers:
  """All processes of a run, seen from this process, which is alone by default.

  Attributes:
    index: number of this process, from 0.
    count: number of processes.
    news: messages of kinds that this class does not use: (sender, kind, value).
  """

  def __init__(self, index: int = 0, count: int = 1):
    self.index, self.count = index, count
    self._received = {
      (kind, p): queue.SimpleQueue[Any]()
      for kind in ("value", "report")
      for p in range(count)
    }
    self.news = queue.SimpleQueue[tuple[int, str, Any]]()
    self._boxes: dict[int, Box] = {}  # {connected process: the messages to it}
    self._died, self._met = set[int](), index > 0
    self._change = threading.Condition()  # Guards _boxes, _died and _met.
    # Two locks that are never released: this process ends once, and fails once.
    self._ending = threading.Lock()
    self._failing = threading.Lock()

  @classmethod
  def meet(cls, address: str, count: int, index: int, timeout: float) -> "Peers":
    """Connects all processes to process 0, which listens at the address.

    Process 0 returns when all processes have come; any other process returns when it is
    connected. If a process does not come, process 0 reports this to the processes that
    came, and they end. A process with a wrong number or count gets an error and ends;
    the others continue to wait.

    Args:
      address: host:port of process 0, as the others reach it.
      count: number of processes.
      index: number of this process.
      timeout: seconds to wait.

    Raises:
      ProcessLost: a process did not come.
    """
    peers = cls(index, count)
    if index:
      peers._join(address, timeout)
    else:
      peers._await_all(address, timeout)
    return peers

  def broadcast(self, value: Any) -> Any:
    """Returns process 0's value (JSON) on all processes; all must call this."""
    if self.index:
      return self._received["value", 0].get()
    self.send("value", value)
    return value

  def all_gather(self, value: Any) -> list[Any]:
    """Returns the values (JSON) of all processes, in their order; all must call this.

    Raises:
      ProcessLost: a process has sent nothing for PATIENCE seconds. Only process 0
        raises this; when process 0 ends, the others end.
    """
    if self.index:
      self.send("value", value)
      return self.broadcast(None)
    values = [value]
    for p in range(1, self.count):
      try:
        values.append(self._received["value", p].get(timeout=PATIENCE))
      except queue.Empty:
        raise ProcessLost(
          f"process {p} of {self.count} is there, but has not come to where the others"
          f" have waited for {PATIENCE / 60:.0f} minutes; see where it hangs (py-spy"
          " dump --pid), end all, and start the same command again."
        ) from None
    return self.broadcast(values)

  def send(self, kind: str, value: Any) -> None:
    """Sends a message (JSON): from process 0 to all others, from others to process 0.

    A message of a kind that this class does not use arrives in `news`.
    """
    message = packed(kind, value)
    with self._change:
      for box in self._boxes.values():
        box.put(message)

  def report(self, value: Any) -> None:
    """Sends a value (JSON) to process 0, without waiting."""
    if self.index:
      self.send("report", value)
    else:
      self._received["report", 0].put(value)

  def reports(self, wait: bool = False) -> Iterator[list[Any]]:
    """Yields a list of all processes' values for each `report`; only on process 0.

    Args:
      wait: whether to wait until the others have reported as often as process 0.
    """
    received = [self._received["report", p] for p in range(self.count)]
    while not received[0].empty() and (wait or not any(q.empty() for q in received)):
      yield [q.get() for q in received]

  def await_loss(self) -> None:
    """Waits before an error is reported, because a lost process may be the cause.

    If a process is lost, this process ends here, and the message names the lost one.
    """
    if self.count > 1:
      time.sleep(_GRACE)

  def print_line(self, line: str) -> None:
    """Writes one line to stderr, in process 0 only."""
    if self.index == 0:
      print_line(line)

  def fail(self, message: str, code: int = 1) -> None:
    """Reports an error to the user and the other processes, and ends this process.

    This process ends without Python's clean-up, in which JAX waits for the other
    processes. Process 0 ends last, because JAX aborts the others when process 0 is
    gone. The others end when process 0 has their message.
    """
    if self.count == 1:
      print_line(f"error: {message}")
      sys.exit(code)
    self._failing.acquire()  # Waits forever if another thread ends this process.
    print_line(f"error: {message}")
    self._ending.acquire(blocking=False)
    self.send("end", [message, code])
    self._await_ends()
    sys.stdout.flush()
    os._exit(code)

  def close(self) -> None:
    """Waits until all processes call this, and leaves JAX's runtime."""
    if self.count > 1:
      self.all_gather(None)
      self._ending.acquire(blocking=False)
      if jax.distributed.is_initialized():
        jax.distributed.shutdown()
      if self.index == 0:
        self.send("end", None)
      self._await_ends()
      if self.index:
        self._channel.close()

  def _join(self, address: str, timeout: float) -> None:
    """Connects to process 0, and sends it the number of this process."""
    deadline = time.monotonic() + timeout
    while True:
      box = Box()
      box.put(packed(self.index, self.count))
      target, options = streams.reached(address), _OPTIONS + _NO_LIMIT
      self._channel = grpc.insecure_channel(target, options)
      talk = self._channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
      messages = talk(outgoing(box, _BEAT))
      self._kept = messages  # The stream ends when nothing refers to `messages`.
      try:
        next(messages)  # Waits until process 0 answers.
        return self._listen(0, box, messages)
      except grpc.RpcError as error:
        box.put(None)
        self._channel.close()
        if time.monotonic() > deadline:
          raise ProcessLost(
            f"process {self.index} of {self.count} found no process 0 at {address}"
            f" within {timeout} s ({error.details()}); start it, or correct"
            " --coordinator."
          ) from error
        time.sleep(0.2)

  def _await_all(self, address: str, timeout: float) -> None:
    """Serves the other processes, and waits until all have come."""
    self._address = address
    talk = {_METHOD: grpc.stream_stream_rpc_method_handler(self._talk)}
    handler = grpc.method_handlers_generic_handler(_SERVICE, talk)
    # Allows more streams than processes: a process that has died may come again.
    most = 2 * self.count + 8
    options = _OPTIONS + _LIMITS
    self._server = grpc.server(streams.Threads(), [handler], None, options, most)
    try:
      self._server.add_insecure_port(streams.listened(address))
    except RuntimeError as error:
      raise ProcessLost(
        f"process 0 cannot listen at port {address.rpartition(':')[2]}, which is in use"
        " or not allowed; choose another port in --coordinator."
      ) from error
    self._server.start()
    with self._change:
      all_came = lambda: len(self._boxes) == self.count - 1
      self._met = self._change.wait_for(all_came, timeout)
      missing = [p for p in range(1, self.count) if p not in self._boxes]
      died = sorted(self._died.intersection(missing))
    if not self._met:
      note = f" ({process_names(died)} came and went again)" if died else ""
      message = (
        f"{process_names(missing)} of {self.count} did not come to {address} within"
        f" {timeout} s{note}; start all with the same --coordinator and"
        " --num_processes, and see whether their machines reach that address."
      )
      self.send("end", [message, 1])
      self._server.stop(_GRACE).wait()
      raise ProcessLost(message)

  def _talk(
    self, requests: Iterator[bytes], context: grpc.ServicerContext
  ) -> Iterator[bytes]:
    """Serves another process, until it is gone or this process closes the stream."""
    late = threading.Timer(_HELLO_S, context.cancel)
    late.daemon = True
    late.start()
    hello = streams.hello(next(requests, b""))
    late.cancel()
    if not hello:
      context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no process of a run")
      return  # The call above raises.
    p, n = hello
    box = Box()
    with self._change:
      complete = self._met
      expected = n == self.count and p not in self._boxes
      if expected and not complete:
        self._listen(p, box, requests)
        context.add_callback(lambda: self._forget(p))  # Runs when process p is gone.
        self._change.notify()
    if complete:  # Process p may belong to the next run, which waits for this port.
      context.abort(grpc.StatusCode.UNAVAILABLE, "a run that is complete is there")
    yield packed()
    if not expected:  # A mistake, or a process of another run: this run goes on.
      refusal = (
        f"a process came to {self._address} as number {p} of {n}, but {self.count}"
        f" are expected and {sorted([0, *self._boxes])} are there; give each its own"
        " --process_id and all the same --num_processes."
      )
      print_line(f"Refused: {refusal}")
      yield packed("end", [refusal, 2])
      return
    yield from outgoing(box, _BEAT)

  def _listen(self, p: int, box: Box, messages: Iterator[bytes]) -> None:
    self._boxes[p] = box
    threading.Thread(target=self._read, args=(p, box, messages), daemon=True).start()

  def _read(self, p: int, box: Box, messages: Iterator[bytes]) -> None:
    """Receives the messages of process p until that process fails or is gone."""
    error = (
      f"process {p} of {self.count} is gone. The same command goes on from the last"
      " checkpoint."
    )
    code, pause = 1, 0.0
    with contextlib.suppress(grpc.RpcError):  # RpcError: the connection broke.
      for kind, value in filter(None, map(json.loads, messages)):
        if kind == "end":
          text, code = value or ("", 0)
          error = f"process {p}: {text}" if p else text
          pause = _GRACE / 2  # Time in which this process may report its own error.
          box.put(packed("end", None))  # A process that fails waits for this answer.
          break
        if (kind, p) in self._received:
          self._received[kind, p].put(value)
        else:
          self.news.put((p, kind, value))
    if p == 0:
      self._forget(p)
    if not error or not self._met:  # Until all have met, process p may come again.
      return
    time.sleep(pause)
    if self._ending.acquire(blocking=False):
      print_line("")  # Ends a line on which a progress bar may stand.
      self.fail(error, code)

  def _forget(self, p: int) -> None:
    """Removes process p from `_boxes`: its stream is over, or it has sent `end`."""
    with self._change:
      self._boxes.pop(p).put(None)
      self._died.add(p)
      self._change.notify()

  def _await_ends(self) -> None:
    """Waits until no process is left in `_boxes`, at most _GRACE seconds."""
    with self._change:
      self._change.wait_for(lambda: not self._boxes, _GRACE)


def process_names(ids: list[int]) -> str:
  """Names at most 16 processes, for a message."""
  shown = ", ".join(map(str, ids[:16])) + (", ..." if ids[16:] else "")
  return f"process{'es' if ids[1:] else ''} {shown}"


def print_line(line: str) -> None:
  """Writes one line to stderr, in one piece even if other threads write, too."""
  print(shown(line) + "\n", end="", file=sys.stderr, flush=True)
