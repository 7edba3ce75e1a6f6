"""A site's connection to the coordinator: joins, sends payloads, receives rounds.

One thread keeps the connection, and opens it again when it breaks. The training thread
sends payloads and waits for closed rounds. Nothing here uses JAX.
"""

import contextlib
import dataclasses
import queue
import re
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import grpc
from grpc import StatusCode as Status

from diloco.contrib.sites import SitesConfig, messages
from diloco.contrib.sites.messages import BadMessage, Message
from diloco.errors import ConfigError
from diloco.util.types import PyTree

# Statuses after which it is useless to try again.
_FINAL = {
  *(Status.INVALID_ARGUMENT, Status.FAILED_PRECONDITION, Status.PERMISSION_DENIED),
  *(Status.UNAUTHENTICATED, Status.UNIMPLEMENTED),
}
# Seconds, beyond those of a keep-alive, after which another process is this site, and
# not a connection that the coordinator has not dropped yet.
_DOUBLED_S = 25.0
_RETRY_S = (0.2, 5.0)  # First and longest pause between two tries.
_REJECTED = 3  # Tries that end without an answer of a coordinator that is there.


class Block(NamedTuple):
  """A part of the text of a site that is away.

  Attributes:
    reader: the site that trains it.
    positions: {shard: [step, position]} of the text, as they were recorded.
    skip: sequences of each shard between these positions and the block.
    size: sequences of each shard.
    again: the round in which it was lent before, and the site whose text it is; ():
      it is new.
  """

  reader: int
  positions: dict[str, Any]
  skip: int
  size: int
  again: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Closed:
  """A closed round, as a site receives it.

  Attributes:
    round: its number.
    fragment: the fragment p.
    tokens: {site: tokens behind each payload of the site}; its keys are the members.
    payloads: {site: bytes}.
    refused: the sites whose payloads had bad numbers.
    per_step: {site: tokens of one of its replicas' inner steps}; {}: all are equal.
    lent: {site that is away: a block of its text}.
  """

  round: int
  fragment: int
  tokens: dict[int, int]
  payloads: dict[int, bytes]
  refused: tuple[int, ...] = ()
  per_step: Mapping[int, int] = dataclasses.field(default_factory=dict)
  lent: Mapping[int, Block] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Welcome:
  """The answer to a site that joins.

  Attributes:
    round: the first round that the site will receive.
    data: {shard: [step, position in its text]}, as the coordinator recorded them.
    snapshot: the group's outer state as bytes; empty if the site's own is right.
    skip: sequences of each shard after this position that others have trained.
  """

  round: int
  data: dict[str, Any]
  snapshot: bytes
  skip: int = 0


class Link:
  """The connection of one site.

  Attributes:
    inside: sites that were connected when the last round closed.
    reconnects: how often the connection had to be opened again.
    room: closed rounds that are kept until the training thread takes them.
  """

  def __init__(
    self,
    open_channel: Callable[[], grpc.Channel],
    address: str,
    hello: dict[str, Any],
    print_line: Callable[[str], None],
    room: int,
    keepalive_s: float = SitesConfig.keepalive_s,
  ):
    """Prepares the connection; `join` opens it.

    Args:
      open_channel: opens a channel to the coordinator.
      address: of the coordinator, for messages.
      hello: fields of the message `join` (docs/sites.md), which describe the site.
      print_line: prints a line.
      room: see above; more than the fragments of the model.
      keepalive_s: `sites.keepalive_s`.
    """
    self.inside, self.reconnects, self.room = 0, 0, room
    self._open, self._address, self._print = open_channel, address, print_line
    self._doubled_s = 2 * keepalive_s + _DOUBLED_S
    own = {"version": messages.VERSION, "session": secrets.token_hex(8)}
    self._hello = hello | own
    self._changed = threading.Condition()
    self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    self._welcome: Welcome | None = None  # Until the training thread takes it.
    self._error: Exception | None = None
    # Whether the coordinator ever welcomed this process, and now on this connection.
    self._known = self._entered = False
    self._started = self._leaving = False
    self._closed: dict[int, Closed] = {}
    self._next = 0  # The next round to receive,
    self._last: list[int] | None = None  # and the CRC-32s of the one before, if known.
    self._published = 0  # Rounds that the coordinator has closed.
    self._welcomed: dict[str, Any] = {}  # The welcome of this connection,
    self._snapshot = bytearray()  # and the part of its snapshot that has come.
    self._parts: dict[tuple[int, int], bytearray] = {}
    # {round that is not closed: one message with the whole payload}
    self._outgoing: dict[int, Message] = {}
    self._first: int | None = None  # The last argument of `ready`.
    self._call: grpc.Call | None = None
    self._thread: threading.Thread | None = None

  def join(self, **state: object) -> Welcome:
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
    welcome = self.welcome()
    assert welcome is not None
    return welcome

  def ready(self, first: int, arrival: dict[str, float] | None = None) -> None:
    """Says that the site will send round `first` and those after it.

    Args:
      first: that round.
      arrival: `Arrival.seconds` of a site that has just arrived.
    """
    with self._changed:
      self._first = first
      if self._entered:
        more = {"arrival": arrival} if arrival else {}
        self._put("ready", {"round": first, **more})

  def wait_for_start(self, stopping: Callable[[], bool]) -> bool:
    """Waits until the group begins; returns False if `stopping()` comes first."""
    self._wait(lambda: self._started or stopping())
    return self._started

  def send(self, number: int, data: bytes, fields: dict[str, Any]) -> None:
    """Sends the payload of a round, again if the connection breaks meanwhile."""
    with self._changed:
      if number < self._next:
        return  # The round closed without this site.
      fields = {"round": number, "total": len(data), "crc32": zlib.crc32(data)} | fields
      self._outgoing[number] = Message("chunk", fields, data)
      if self._entered:  # Otherwise `_enter` sends it.
        self._put_payload(self._outgoing[number])

  def wait_until(self, number: int, stopping: Callable[[], bool]) -> bool:
    """Waits until a round is closed; returns False if `stopping()` comes first."""
    self._wait(lambda: number < self._next or stopping())
    return number < self._next

  def closed(self, number: int) -> Closed:
    """Returns a closed round that is neither forgotten nor part of a snapshot."""
    with self._changed:
      return self._closed[number]

  def welcome(self) -> Welcome | None:
    """Returns the snapshot that came after a long absence, once; None without one."""
    with self._changed:
      found, self._welcome = self._welcome, None
      return found

  def newest(self) -> tuple[int, int]:
    """Returns how many rounds are received, and how many the coordinator has closed."""
    with self._changed:
      self._raise()
      return self._next, self._published

  def forget(self, below: int) -> None:
    """Frees the rounds below this number."""
    with self._changed:
      for number in [r for r in self._closed if r < below]:
        del self._closed[number]
      self._changed.notify_all()

  def applied(self, number: int, theta: PyTree, opt_state: PyTree) -> None:
    """Takes a fragment's outer state after a round; a coordinator has its own."""

  def offer(self, applied: int, outer: PyTree) -> None:
    """Takes the outer state after `applied` rounds; a coordinator has its own."""

  def leave(self, reason: str) -> None:
    """Tells the coordinator that the site goes, and closes the connection.

    Later calls do nothing. Threads that wait for a round get an error.
    """
    with self._changed:
      if self._leaving:
        return
      self._leaving = True
      self._put("leave", {"reason": reason})
      self._requests.put(None)
      self._changed.notify_all()
    if self._thread:
      self._thread.join(timeout=10)
    if self._call:
      self._call.cancel()

  def _put(self, *message: Any) -> None:
    self._requests.put(messages.pack(Message(*message)))

  def _put_payload(self, whole: Message) -> None:
    for offset, part in messages.chunks(whole.body):
      fields = whole.fields if offset == 0 else {"round": whole.fields["round"]}
      self._put("chunk", {**fields, "offset": offset}, part)

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
    try:
      self._keep()
    except Exception as error:  # Otherwise the training thread would wait for ever.
      with self._changed:
        self._error = error
        self._changed.notify_all()

  def _keep(self) -> None:
    """Connects again and again.

    Raises:
      ConfigError: the coordinator refuses the site.
    """
    pause, lost_at, told, rejected = _RETRY_S[0], time.monotonic(), False, 0
    while not self._leaving:
      began, received = time.monotonic(), self._next
      status, reason = self._session()
      now = time.monotonic()
      if self._leaving:
        return
      if self._next > received or (self._entered and now - began > 2 * _RETRY_S[1]):
        pause, lost_at, told = _RETRY_S[0], now, False
      rejected = rejected + 1 if _is_rejection(status, reason) else 0
      if rejected == _REJECTED and not self._known:
        raise ConfigError(
          f"the coordinator at {self._address} ends every connection at once; give"
          " --tls=FOLDER with a certificate of the coordinator's own authority"
          " (python -m diloco make_certificates)."
        )
      doubled = status is Status.ALREADY_EXISTS and now - lost_at > self._doubled_s
      if status in _FINAL or doubled:
        raise ConfigError(f"the coordinator at {self._address} {reason}.")
      if not told and now - lost_at > 1:
        told = True
        self._print(f"{_problem(status, self._address, reason)} This site tries again.")
      time.sleep(pause)
      pause = min(2 * pause, _RETRY_S[1])
      self.reconnects += 1

  def _session(self) -> tuple[Status | None, str]:
    """Joins and receives until the connection ends; returns why it ended."""
    with self._changed:
      requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
      self._requests, self._entered, self._welcomed = requests, False, {}
      self._parts.clear()
      received = self._next if self._known else None
      own = {"received": received, "last": self._last}
      self._put("join", self._hello | own)
    try:
      with contextlib.closing(self._open()) as channel:
        call = channel.stream_stream(messages.METHOD)
        self._call = arriving = call(iter(requests.get, None))
        for data in arriving:
          self._receive(messages.unpack(data))
      return None, "it closed the connection"
    except grpc.RpcError as error:
      return error.code(), _last_error(str(error.details()))
    except BadMessage as error:
      return None, f"it sent {error}"
    finally:
      requests.put(None)

  def _receive(self, message: Message) -> None:
    """Takes a message.

    Raises:
      BadMessage: the message cannot come from this version of diloco.
    """
    fields = message.fields
    with self._changed:
      try:
        if message.kind == "chunk":
          self._chunk(fields, message.body)
        elif message.kind == "welcome":
          self._welcomed, self._snapshot = fields, bytearray()
          self._enter()
        elif message.kind == "state" and not self._entered:
          self._snapshot += message.body
          self._enter()
        elif message.kind == "start":
          self._started = True
        elif message.kind == "closed":
          self._close(fields)
      except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadMessage(f"a wrong {message.kind[:50]!r} ({error})") from error
      self._changed.notify_all()

  def _enter(self) -> None:
    """Takes the coordinator's welcome when the whole snapshot is here."""
    fields = self._welcomed
    if len(self._snapshot) < fields["snapshot"]:
      return
    snapshot, self._snapshot = bytes(self._snapshot), bytearray()
    self._started = self._started or fields["started"]
    if not self._known or snapshot:
      own = (fields["round"], fields["data"], snapshot, fields["skip"])
      self._welcome = Welcome(*own)
      self._outgoing.clear()
      self._next, self._last = fields["round"], None
    self._published = max(fields["published"], self._next)
    self._hello["run"] = fields["run"]
    self._known = self._entered = True
    if self._first is not None:  # The site trains already: the connection was lost.
      for whole in self._outgoing.values():
        self._put_payload(whole)
      self._put("ready", {"round": min([*self._outgoing, self._first])})

  def _chunk(self, fields: dict[str, Any], body: bytes | memoryview) -> None:
    number, site, offset = fields["round"], fields["site"], fields["offset"]
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
    self._published = max(fields["published"], number + 1)
    self._changed.notify_all()
    # Receives no more until the training thread takes a round.
    self._changed.wait_for(lambda: len(self._closed) < self.room or self._leaving)
    tokens, per_step = (
      {int(site): n for site, n in fields[name].items()}
      for name in ("tokens", "per_step")
    )
    own = self._outgoing.pop(number, None)
    payloads = dict[int, bytes]()
    for site, crc32 in zip(tokens, fields["crc32"]):
      default = own.body if own and site == self._hello["site"] else None
      part = self._parts.pop((number, site), default)
      if part is None or zlib.crc32(part) != crc32:
        raise BadMessage(f"another payload of site {site} than round {number} has")
      payloads[site] = bytes(part)
    for key in [k for k in self._parts if k[0] <= number]:
      del self._parts[key]  # These payloads came after their round closed.
    self.inside = fields["inside"]
    refused = tuple(fields.get("refused", ()))
    lent = {int(k): Block(*x) for k, x in fields["lent"].items()}
    rest = (tokens, payloads, refused, per_step, lent)
    self._closed[number] = Closed(number, fields["fragment"], *rest)
    self._next, self._last = number + 1, fields["crc32"]


def _is_rejection(status: Status | None, reason: str) -> bool:
  """Returns whether a connection ended before the coordinator answered.

  The side that does not accept a certificate says nothing: the other side sees only
  that the connection ends.
  """
  silent = "Socket closed" in reason or "handshake" in reason.lower()
  return status is Status.UNAVAILABLE and silent


def _problem(status: Status | None, address: str, reason: str) -> str:
  """Returns a sentence about a lost connection; UNKNOWN is an error of the server."""
  if status is Status.UNKNOWN:
    return f"The coordinator at {address} has an error, see its output ({reason})."
  return f"No coordinator at {address} ({reason})."


def _last_error(details: str) -> str:
  """Returns the end of a sentence of gRPC, which tells the reason."""
  reason = details.rpartition("last error: ")[2].rstrip(".")
  return re.sub(r"^UN[A-Z]+: (ipv.:\S+: )?", "", reason)
