"""A site's connection to the coordinator: joins, sends payloads, receives rounds.

One thread keeps the connection, and opens it again when it breaks. The training thread
sends payloads and waits for closed rounds. Nothing here uses JAX.
"""

import contextlib
import dataclasses
import queue
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from diloco.config import ConfigError
from diloco.coordinator.messages import (
  METHOD,
  VERSION,
  BadMessage,
  Message,
  chunks,
  pack,
  unpack,
)

_FINAL = {  # Statuses after which it is useless to try again.
  grpc.StatusCode.INVALID_ARGUMENT,
  grpc.StatusCode.FAILED_PRECONDITION,
  grpc.StatusCode.PERMISSION_DENIED,
  grpc.StatusCode.UNAUTHENTICATED,
  grpc.StatusCode.UNIMPLEMENTED,
}
_DOUBLED_S = 45.0  # A dead connection of this site is noticed by then.
_RETRY_S = (0.2, 5.0)  # First and longest pause between two tries.


@dataclasses.dataclass(frozen=True)
class Closed:
  """A closed round, as a site receives it.

  Attributes:
    round: its number.
    fragment: the fragment p.
    step: the inner step after which it was sent.
    tokens: {site: tokens behind each payload of the site}; its keys are the members.
    payloads: {site: bytes}.
    inside: sites that are connected.
  """

  round: int
  fragment: int
  step: int
  tokens: dict[int, int]
  payloads: dict[int, bytes]
  inside: int


@dataclasses.dataclass(frozen=True)
class Welcome:
  """The answer to a site that joins.

  Attributes:
    round: the first round that the site will receive.
    step: the group's step, after which the site goes on.
    data: {replica: position in its text}, as the coordinator recorded them.
    snapshot: the group's outer state as bytes; None if the site's own is right.
    started: whether the group has begun.
  """

  round: int
  step: int
  data: dict[str, Any]
  snapshot: bytes | None
  started: bool


@dataclasses.dataclass
class _Outgoing:
  """A payload that may have to be sent again."""

  fields: dict[str, Any]
  data: bytes


class Link:
  """The connection of one site.

  Attributes:
    inside: sites that were connected when the last round closed.
    reconnects: how often the connection had to be opened again.
  """

  def __init__(
    self,
    open_channel: Callable[[], grpc.Channel],
    address: str,
    hello: dict[str, Any],
    say: Callable[[str], None],
  ):
    """Prepares the connection; `join` opens it.

    Args:
      open_channel: opens a channel to the coordinator.
      address: of the coordinator, for messages.
      hello: what the site says of itself; see `_join`.
      say: tells the user a line.
    """
    self.inside, self.reconnects = 0, 0
    self._open, self._address, self._hello, self._say = (
      open_channel,
      address,
      {**hello, "version": VERSION, "session": secrets.token_hex(8)},
      say,
    )
    self._changed = threading.Condition()
    self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    self._welcome: Welcome | None = None
    self._reset: Welcome | None = None
    self._error: ConfigError | None = None
    self._started = self._leaving = False
    self._closed: dict[int, Closed] = {}
    self._next = 0  # The next round to receive.
    self._step = 0  # Step of the newest closed round.
    self._snapshot: bytearray | None = None
    self._welcomed: dict[str, Any] = {}
    self._parts: dict[tuple[int, int], bytearray] = {}
    self._outgoing: dict[int, _Outgoing] = {}  # {round that is not closed: payload}
    self._first: int | None = None  # The last argument of `ready`.
    self._call: grpc.Call | None = None
    self._thread: threading.Thread | None = None

  def join(self, **state: Any) -> Welcome:
    """Joins the group, and waits for the coordinator's answer.

    Args:
      state: position of the site: `round` (rounds below it are applied) and `digests`
        of its outer state.

    Raises:
      ConfigError: the coordinator refuses the site.
    """
    self._hello |= state
    self._thread = threading.Thread(target=self._run, daemon=True, name="link")
    self._thread.start()
    self._wait(lambda: self._welcome is not None)
    assert self._welcome is not None
    return self._welcome

  def ready(self, first: int) -> None:
    """Says that the site will send round `first` and those after it."""
    with self._changed:
      self._first = first
      self._put(Message("ready", {"round": first}))

  def wait_for_start(self) -> None:
    """Waits until the group begins."""
    self._wait(lambda: self._started)

  def send(self, number: int, data: bytes, fields: dict[str, Any]) -> None:
    """Sends the payload of a round, again if the connection breaks meanwhile."""
    with self._changed:
      if number < self._next:
        return  # The round closed without this site.
      fields = {"round": number, "total": len(data), "crc32": zlib.crc32(data)} | fields
      self._outgoing[number] = _Outgoing(fields, data)
      self._put_payload(self._outgoing[number])

  def wait_until(self, number: int, stopping: Callable[[], bool]) -> bool:
    """Waits until a round is closed; returns False if `stopping()` comes first."""
    self._wait(lambda: number < self._next or stopping())
    return number < self._next

  def closed(self, number: int) -> Closed:
    """Returns a closed round that is neither forgotten nor part of a snapshot."""
    with self._changed:
      return self._closed[number]

  def reset(self) -> Welcome | None:
    """Returns the snapshot that came after a long absence, once; None without one."""
    with self._changed:
      found, self._reset = self._reset, None
      return found

  def newest(self) -> tuple[int, int]:
    """Returns the number of rounds that are received, and the step of the last."""
    with self._changed:
      self._raise()
      return self._next, self._step

  def forget(self, below: int) -> None:
    """Frees the rounds below this number."""
    with self._changed:
      for number in [r for r in self._closed if r < below]:
        del self._closed[number]

  def leave(self, reason: str) -> None:
    """Tells the coordinator that the site goes, and closes the connection.

    Later calls do nothing. Threads that wait for a round get an error.
    """
    with self._changed:
      if self._leaving:
        return
      self._leaving = True
      self._changed.notify_all()
      self._put(Message("leave", {"reason": reason}))
      self._requests.put(None)
    if self._thread:
      self._thread.join(timeout=10)
    if self._call:
      self._call.cancel()

  def _put(self, message: Message) -> None:
    self._requests.put(pack(message))

  def _put_payload(self, out: _Outgoing) -> None:
    for offset, part in chunks(out.data):
      more = out.fields if offset == 0 else {"round": out.fields["round"]}
      self._put(Message("chunk", {**more, "offset": offset}, part))

  def _wait(self, done: Callable[[], bool]) -> None:
    with self._changed:
      while not done():
        self._raise()
        self._changed.wait(1.0)  # Lets Ctrl-C through.

  def _raise(self) -> None:
    if self._error:
      raise self._error
    if self._leaving:
      raise ConnectionError("this site has left")

  def _run(self) -> None:
    """Keeps the connection until the site leaves or is refused."""
    pause, lost_at, told = _RETRY_S[0], time.monotonic(), False
    while not self._leaving:
      began = time.monotonic()
      status, reason = self._session()
      if self._leaving:
        return
      if status is None or time.monotonic() - began > 2 * _RETRY_S[1]:
        pause, lost_at, told = _RETRY_S[0], time.monotonic(), False
      doubled = status is grpc.StatusCode.ALREADY_EXISTS
      if status in _FINAL or (doubled and time.monotonic() - lost_at > _DOUBLED_S):
        with self._changed:
          self._error = ConfigError(f"the coordinator at {self._address} {reason}")
          self._changed.notify_all()
        return
      if not told and time.monotonic() - lost_at > 1:
        told = True
        self._say(f"No coordinator at {self._address} ({reason}); tries again.")
      time.sleep(pause)
      pause = min(2 * pause, _RETRY_S[1])
      self.reconnects += 1

  def _session(self) -> tuple[grpc.StatusCode | None, str]:
    """Joins and receives until the connection ends; returns why it ended."""
    with self._changed:
      requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
      self._requests = requests
      hello = {**self._hello, "received": self._next if self._welcome else None}
      self._put(Message("join", hello))
    try:
      with contextlib.closing(self._open()) as channel:
        call = channel.stream_stream(METHOD)
        self._call = received = call(_until_none(requests))
        for data in received:
          self._receive(unpack(data))
      return None, "it closed the connection"
    except grpc.RpcError as error:
      return error.code(), str(error.details())
    except BadMessage as error:
      return None, f"it sent {error}"
    finally:
      requests.put(None)

  def _receive(self, message: Message) -> None:
    fields = message.fields
    with self._changed:
      if message.kind == "chunk":
        self._chunk(fields["round"], fields["site"], fields["offset"], message.body)
      elif message.kind == "welcome":
        self._snapshot = bytearray() if fields["snapshot"] else None
        self._welcomed = fields
        self._enter()
      elif message.kind == "state" and self._snapshot is not None:
        self._snapshot += message.body
        self._enter()
      elif message.kind == "start":
        self._started = True
      elif message.kind == "closed":
        self._close(fields)
      self._changed.notify_all()

  def _enter(self) -> None:
    """Takes the coordinator's welcome when the whole snapshot is here."""
    if self._snapshot is not None and len(self._snapshot) < self._welcomed["snapshot"]:
      return
    fields = self._welcomed
    self._parts.clear()
    self._started = self._started or fields["started"]
    snapshot = None if self._snapshot is None else bytes(self._snapshot)
    if self._welcome is None or snapshot is not None:
      welcome = Welcome(
        fields["round"], fields["step"], fields["data"], snapshot, fields["started"]
      )
      self._reset = welcome if self._welcome else None
      self._welcome = welcome
      self._outgoing.clear()
      self._next, self._step = fields["round"], fields["step"]
      self._closed.clear()
    if self._first is not None:  # The site trains already: the connection was lost.
      for out in self._outgoing.values():
        self._put_payload(out)
      self._put(Message("ready", {"round": min([*self._outgoing, self._first])}))

  def _chunk(
    self, number: int, site: int, offset: int, body: bytes | memoryview
  ) -> None:
    part = self._parts.setdefault((number, site), bytearray())
    if offset == 0:
      part.clear()
    if offset != len(part):
      raise BadMessage(f"a chunk at {offset} after {len(part)} bytes")
    part += body

  def _close(self, fields: dict[str, Any]) -> None:
    number = fields["round"]
    if number != self._next:
      raise BadMessage(f"round {number} after round {self._next - 1}")
    tokens = {int(site): n for site, n in fields["tokens"].items()}
    own = self._outgoing.pop(number, None)
    payloads = dict[int, bytes]()
    for site, crc32 in zip(tokens, fields["crc32"]):
      part: bytes | bytearray | None = self._parts.pop((number, site), None)
      if part is None and own and site == self._hello["site"]:
        part = own.data
      if part is None or zlib.crc32(part) != crc32:
        raise BadMessage(f"another payload of site {site} than round {number} has")
      payloads[site] = bytes(part)
    for key in [k for k in self._parts if k[0] <= number]:
      del self._parts[key]  # Late payloads.
    self.inside, self._step = fields["inside"], fields["step"]
    self._closed[number] = Closed(
      number, fields["fragment"], fields["step"], tokens, payloads, fields["inside"]
    )
    self._next = number + 1


def _until_none(requests: queue.SimpleQueue) -> Iterator[bytes]:
  while (request := requests.get()) is not None:
    yield request
