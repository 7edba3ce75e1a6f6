"""The coordinator's end of the connections: who may join, and what a site is sent.

Payloads are relayed while they arrive, so two links take the time of one.
"""

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc import StatusCode as Status

from diloco.checkpoint import resume
from diloco.contrib.sites import SitesConfig, messages, security
from diloco.contrib.sites.coordinator.board import Board, Session, Upload
from diloco.contrib.sites.coordinator.journal import Entry
from diloco.contrib.sites.messages import BadMessage, Message, chunks, pack
from diloco.errors import ConfigError

_HELLO_S = 30.0  # Seconds in which a connection must send `join`.
_LONGEST = 2000  # Characters of a reason; gRPC refuses headers of 8 KiB.


class Refused(Exception):
  """Why a connection ends: a gRPC status and a sentence."""

  def __init__(self, status: Status, reason: str):
    super().__init__(reason)
    self.status = status


class Server:
  """Serves the sites of one run."""

  def __init__(self, board: Board):
    """Starts without connections; the board has payloads and rounds."""
    self._board = board
    self._sessions: dict[int, Session] = {}
    self._tls = False

  async def serve(
    self, address: str, credentials: grpc.ServerCredentials | None
  ) -> int:
    """Listens; returns the port.

    Raises:
      ConfigError: nobody can listen there.
    """
    self._tls = credentials is not None
    most = 4 * self._board.calendar.sites + 16  # Connections of all sites, and others.
    keepalive_s = self._board.calendar.config.of(SitesConfig).keepalive_s
    options = security.options(keepalive_s)
    self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=most)
    service, _, method = messages.METHOD[1:].partition("/")
    handlers = {method: grpc.stream_stream_rpc_method_handler(self._serve_site)}
    generic = grpc.method_handlers_generic_handler(service, handlers)
    self._server.add_generic_rpc_handlers([generic])
    tls, plain = self._server.add_secure_port, self._server.add_insecure_port
    try:
      port = tls(address, credentials) if credentials else plain(address)
    except RuntimeError as error:
      raise ConfigError(
        f"--listen is {address}, which is in use or not of this machine; choose"
        " another."
      ) from error
    await self._server.start()
    return port

  async def stop(self) -> None:
    """Ends the connections; the sites try again."""
    self._sessions.clear()
    self._board.notify()
    await self._server.stop(grace=1)

  async def _serve_site(
    self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
  ) -> AsyncIterator[bytes]:
    """Serves one connection until it ends."""
    session = None
    try:
      iterator = aiter(requests)
      session = await self._join(iterator, context)
      reader = asyncio.create_task(self._read(session, iterator))
      reader.add_done_callback(lambda _: self._board.notify())
      try:
        async for message in self._messages(session, reader):
          yield pack(message)
      finally:
        reader.cancel()
    except Refused as refused:
      await context.abort(refused.status, _short(str(refused)))
    except BadMessage as error:
      reason = f"ended the connection: {_short(str(error))}."
      await context.abort(Status.INVALID_ARGUMENT, reason)
    finally:
      if session and self._sessions.get(session.site) is session:
        del self._sessions[session.site]
        self._board.gone(session.site)

  async def _join(
    self, iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext
  ) -> Session:
    """Reads and checks the first message of a connection.

    Raises:
      Refused: this is no site of the run, or the site is there already.
      BadMessage: this is no message.
    """
    try:
      first = await asyncio.wait_for(anext(iterator), _HELLO_S)
    except (TimeoutError, StopAsyncIteration) as error:
      raise BadMessage("it did not say which site it is") from error
    hello = messages.unpack(first)
    if hello.kind != "join":
      raise BadMessage("its first message is no `join`")
    if (version := hello.fields.get("version")) != messages.VERSION:
      reason = (
        f"speaks version {messages.VERSION} of the protocol, but this site version"
        f" {str(version)[:9]}; install the same revision of diloco on both"
      )
      raise Refused(Status.FAILED_PRECONDITION, reason)
    name, count = str(hello.fields.get("session"))[:50], self._board.calendar.sites
    site = messages.number(hello, "site", 0, messages.LARGEST)
    if site >= count:
      known = f"the run has the sites 0 to {count - 1} (sites.count)."
      raise Refused(Status.FAILED_PRECONDITION, f"refuses --site={site}: {known}")
    self._check_certificate(site, context)
    self._check_config(hello.fields.get("config"))
    self._check_progress(hello)
    await self._check_history(hello)
    old = self._sessions.get(site)
    if old and old.name != name:
      reason = "another process is this site; give each its own number."
      raise Refused(Status.ALREADY_EXISTS, f"refuses --site={site}: {reason}")
    session = self._sessions[site] = Session(site, name, hello.fields)
    if old:  # The process opened this connection because it had lost that one.
      self._board.gone(site)
    self._board.joined(site, is_new=hello.fields.get("received") is None)
    return session

  def _check_certificate(self, site: int, context: grpc.aio.ServicerContext) -> None:
    names = context.auth_context().get("x509_common_name", [b"nobody"])
    if self._tls and names[0] != security.site_name(site).encode():
      reason = f"the certificate is that of {names[0].decode(errors='replace')}."
      raise Refused(Status.PERMISSION_DENIED, f"refuses --site={site}: {reason}")

  def _check_progress(self, hello: Message) -> None:
    """Refuses, for now, a site of another run, or one that has more rounds.

    Otherwise this coordinator's state would replace that of the site's group.
    """
    remedy = "start the coordinator with the --workdir that it had"
    if hello.fields.get("run") not in (None, self._board.run):
      raise Refused(Status.UNAVAILABLE, f"it coordinates another run; {remedy}")
    received, own = hello.fields.get("received"), hello.fields.get("round")
    rounds = max([x for x in (received, own) if isinstance(x, int)], default=0)
    if rounds > self._board.published:
      has = f"it has {self._board.published} closed rounds, but this site has {rounds}"
      raise Refused(Status.UNAVAILABLE, f"{has}; {remedy}")

  async def _check_history(self, hello: Message) -> None:
    """Refuses a process whose last round this coordinator has closed differently.

    So it was restored from a copy, and its group has closed as many rounds again.
    """
    received, sums = hello.fields.get("received"), hello.fields.get("last")
    if sums is None or not isinstance(received, int):
      return  # A process that was never in is compared by its outer state.
    if self._board.is_kept(received - 1):
      entry = await self._board.entry(received - 1)
      if sums != _sums(entry):
        reason = (
          f"closed round {received - 1} differently than this site knows, so it was"
          " restored from a copy; start the site again, then it takes the group's state"
        )
        raise Refused(Status.FAILED_PRECONDITION, reason)

  def _check_config(self, config: Any) -> None:
    if not isinstance(config, dict):
      raise BadMessage("its `join` has no config")
    changes = resume.differing(self._board.calendar.config.to_dict(), config)
    if changes:
      lines = "; ".join(f"{field}: {change}" for field, change in changes.items())
      reason = (
        f"has another config than this site ({lines}); give both the same: only"
        " sites.batch_size, sites.pace and fields without effect on the result may"
        " differ (docs/sites.md)."
      )
      raise Refused(Status.FAILED_PRECONDITION, reason)

  async def _read(self, session: Session, iterator: AsyncIterator[bytes]) -> None:
    """Takes the site's messages until it leaves or the connection ends."""
    async for data in iterator:
      is_newest = self._sessions.get(session.site) is session
      if not (is_newest and self._board.receive(session, messages.unpack(data))):
        return

  async def _messages(
    self, session: Session, reader: asyncio.Task
  ) -> AsyncIterator[Message]:
    """Yields all that the site lacks, in order, until its connection ends."""
    board, at, started = self._board, 0, False
    async for message in self._welcome(session):
      if message.kind == "welcome":
        at = message.fields["round"]
      yield message
    sent = dict[tuple[int, int], tuple[Upload, int]]()  # Bytes sent.
    while not reader.done() and self._sessions.get(session.site) is session:
      news = board.changed
      if board.started and not started:
        started = True
        yield Message("start", {})
      while at < board.published:
        async for message in self._closed(session, at, sent):
          yield message
        at += 1
      relayed = False
      for (r, site), upload in list(board.uploads.items()):
        was, offset = sent.get((r, site), (upload, 0))
        offset = offset if was is upload else 0
        if r >= at and site != session.site and len(upload.received) > offset:
          part = bytes(upload.received[offset : offset + messages.CHUNK])
          sent[r, site] = upload, offset + len(part)
          yield Message("chunk", {"round": r, "site": site, "offset": offset}, part)
          relayed = True
      if not relayed and news is board.changed:
        await news.wait()
    with contextlib.suppress(asyncio.CancelledError):
      if reader.done():
        reader.result()  # Raises BadMessage.

  async def _welcome(self, session: Session) -> AsyncIterator[Message]:
    """Yields the answer to `join`, and a snapshot if the site needs one."""
    board, received = self._board, session.fields.get("received")
    snapshot, data = b"", dict[str, Any]()
    if isinstance(received, int) and board.is_kept(received):
      # This process was connected before, so it need not wait for the outer state.
      at = received
    else:
      own, digests = session.fields.get("round"), session.fields.get("digests")
      applied = own if isinstance(own, int) else -1
      at, snapshot, data = await board.lacks(session.site, applied, digests)
    fields = {
      "round": at,
      "run": board.run,
      "published": board.published,
      "snapshot": len(snapshot),
      "data": data,
      "skip": board.lending.skip[session.site],
      "started": board.started,
    }
    yield Message("welcome", fields)
    for _, part in chunks(snapshot) if snapshot else ():
      yield Message("state", {}, part)

  async def _closed(
    self, session: Session, at: int, sent: dict[tuple[int, int], tuple[Upload, int]]
  ) -> AsyncIterator[Message]:
    """Yields the rest of a closed round's payloads, then who is in it."""
    try:
      entry = await self._board.entry(at)
    except ConfigError as error:
      reason = "it no longer has the rounds that this site lacks"
      raise Refused(Status.UNAVAILABLE, reason) from error
    sums = _sums(entry)
    for (site, data), crc32 in zip(entry.payloads.items(), sums):
      if self._board.is_owner(session.name, at, site):
        continue
      was, offset = sent.get((at, site), (None, 0))
      offset = offset if was and was.crc32 == crc32 else 0
      for start, part in chunks(data, offset) if offset < len(data) else ():
        yield Message("chunk", {"round": at, "site": site, "offset": start}, part)
    for key in [k for k in sent if k[0] <= at]:
      del sent[key]
    yield Message(
      "closed",
      {
        "round": at,
        "fragment": entry.fragment,
        "step": entry.step,
        "tokens": entry.tokens,
        "per_step": entry.per_step,
        "lent": entry.lent,
        "refused": entry.refused,
        "crc32": sums,
        "published": self._board.published,
        "inside": self._board.inside(),
      },
    )


def _sums(entry: Entry) -> list[int]:
  return [zlib.crc32(data) for data in entry.payloads.values()]


def _short(reason: str) -> str:
  return reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]}..."
