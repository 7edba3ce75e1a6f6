"""What a stranger or a broken site sends: one sentence for it, no harm for others."""

import json
import queue
import re
import struct
import zlib

import grpc
import pytest
from sites import Coordinator, Player, make_calendar, payload, play, wait

from diloco.config import changed
from diloco.contrib.sites import messages, security
from diloco.contrib.sites.messages import CHUNK, Message, pack

ALL = make_calendar(3, steps=80, start_s=0.0)
CODES = grpc.StatusCode


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A coordinator with the sites 0 and 1; site 2 is the stranger."""
  coordinator = Coordinator(ALL, tmp_path_factory.mktemp("group"))
  players = [Player(coordinator, site).join() for site in (0, 1)]
  yield coordinator, players
  for player in players:
    player.leave()
  coordinator.kill()


def say(coordinator, sent: list[bytes]) -> tuple[grpc.StatusCode, str]:
  """Sends messages on a connection of its own; returns how the connection ends."""
  with security.channel(coordinator.address, "", True) as channel:
    call = channel.stream_stream(messages.METHOD)(iter(sent), timeout=30)
    try:
      for _ in call:
        pass
    except grpc.RpcError as error:
      return error.code(), error.details()
  return CODES.OK, ""


def hello(**fields) -> bytes:
  return pack(Message("join", said(**fields)))


def said(**fields) -> dict:
  known = {"site": 2, "config": ALL.config.to_dict(), "session": "s"}
  return {**known, "version": messages.VERSION, "round": 0, "digests": [], **fields}


def chunk(number: int, offset: int = 0, body: bytes | None = None, **fields) -> bytes:
  data = payload(ALL, 2, number)
  start = {"total": len(data), "crc32": zlib.crc32(data), "data": {}}
  start |= {"tokens": 1, "per_step": 1}
  header = {"round": number, "offset": offset, **(start if offset == 0 else {})}
  body = data[offset : offset + CHUNK] if body is None else body
  return pack(Message("chunk", header | fields, body))


def whole(number: int, more: bytes = b"") -> list[bytes]:
  """Returns all parts of a payload, with more bytes at the end."""
  parts = list(messages.chunks(payload(ALL, 2, number)))
  last, end = parts.pop()
  parts.append((last, bytes(end) + more))
  return [chunk(number, offset, part) for offset, part in parts]


def test_a_site_that_sends_everything_right_is_no_stranger(run):
  coordinator, players = run
  now = players[0].applied
  # Its own batch, speed, devices and memory.
  own = {
    "sites.batch_size": 4,
    "sites.pace": 0.5,
    "mesh.fsdp": 2,
    "model.remat": "full",
  }
  config = changed(ALL.config, own).to_dict()
  assert say(coordinator, [hello(config=config), *whole(now), *whole(now + 1)]) == (
    CODES.OK,
    "",
  )
  wait(lambda: coordinator.board.inside() == 2)
  play(players, range(now, now + 3))
  for player in players:
    members = [player.members[r] for r in range(now, now + 3)]
    assert members == [(0, 1, 2), (0, 1, 2), (0, 1)]


DEEP = b'{"kind": "join", "config": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
STRANGERS = {
  "no message": ([], "did not say which site"),
  "nothing": ([b""], "are no message"),
  "garbage": ([bytes(range(256)) * 40], "are no message|too large"),
  "deep json": ([struct.pack(">I", len(DEEP)) + DEEP], "are no message"),
  "header too large": ([struct.pack(">I", 1 << 30) + b"{}"], "too large"),
  "other message": ([pack(Message("ready", {"round": 0}))], "no `join`"),
  "other version": ([hello(version=0)], "but this site version 0; install the same"),
  "no site": ([hello(site="2")], "join.site is '2'"),
  "unknown site": ([hello(site=3)], "refuses --site=3: the run has the sites 0 to 2"),
  "no config": ([hello(config=7)], "has no config"),
  "no fields": ([hello(config={"x": "y" * 2000})], r"another config .*\.\.\.$"),
  "other seed": (
    [hello(config={**ALL.config.to_dict(), "seed": 7})],
    r"another config than this site \(seed: 0 -> 7\); give both the same: only sites",
  ),
  "doubled site": ([hello(site=0)], "refuses --site=0: another process is this site"),
  "other run": ([hello(run="x")], "it coordinates another run; start the coord"),
  "ahead": ([hello(round=10**6)], "closed rounds, but this site has 1000000"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_refused_with_one_sentence(run, name):
  coordinator, players = run
  before = list(coordinator.said)
  sent, reason = STRANGERS[name]
  code, details = say(coordinator, sent)
  assert code is not CODES.OK
  assert_sentence(details, reason)
  assert coordinator.said == before  # Nobody is in.
  play(players, range(players[0].applied, players[0].applied + 1))


def assert_sentence(details: str, reason: str) -> None:
  assert re.search(reason, details), details
  assert "\n" not in details
  assert len(details) < 2100


def test_fields_may_differ_that_change_no_result(run):
  coordinator, _ = run
  config = json.loads(json.dumps(ALL.config.to_dict()))
  config["log"]["every"] = 77
  assert say(coordinator, [hello(config=config)]) == (CODES.OK, "")


# What a site sends after it has joined, while round r is open.
BROKEN = {
  "garbage": (lambda r: [b"\0" * 100], "are no message"),
  "unknown": (lambda r: [pack(Message("x" * 9999, {}))], "unknown message 'xxx"),
  "two joins": (lambda r: [hello()], "unknown message 'join'"),
  "no round": (lambda r: [pack(Message("chunk", {}))], "chunk.round is None"),
  "negative": (lambda r: [chunk(r, round=-1)], "chunk.round is -1"),
  "true": (lambda r: [chunk(r, round=True)], "chunk.round is True"),
  "after the end": (lambda r: [chunk(r, round=10**9)], "chunk.round is 1000000000"),
  "future": (lambda r: [chunk(r + 4)], "sent round .* but round .* is open"),
  "ready after the end": (
    lambda r: [pack(Message("ready", {"round": 10**9}))],
    "ready.round is 1000000000",
  ),
  "wrong total": (lambda r: [chunk(r, total=1 << 50)], "bytes, not"),
  "no total": (lambda r: [chunk(r, total=None)], "chunk.total is None"),
  "no tokens": (lambda r: [chunk(r, tokens=0)], "chunk.tokens is 0"),
  "no per_step": (lambda r: [chunk(r, per_step=None)], "chunk.per_step is None"),
  "no blocks": (
    lambda r: [chunk(r, finished=[[1]])],
    r"finished is \[\[1\]\]; it must be",
  ),
  "no offset": (lambda r: [chunk(r, offset=None, body=b"a")], "chunk.offset is None"),
  "empty": (lambda r: [chunk(r, body=b"")], "out of order"),
  "starts late": (lambda r: [chunk(r, offset=1)], "sent byte 1 of round"),
  "out of order": (
    lambda r: [chunk(r, body=b"ab"), chunk(r, offset=3, body=b"c")],
    "sent byte 3 of round",
  ),
  "replayed part": (
    lambda r: [chunk(r, body=b"ab"), chunk(r, body=b"ab")],
    "sent byte 0 of round",
  ),
  "replayed payload": (lambda r: whole(r) * 2, "sent byte 0 of round"),
  "too long": (lambda r: whole(r, more=b"more"), "sent more than"),
  "wrong checksum": (
    lambda r: [chunk(r, crc32=7), *whole(r)[1:]],
    "another checksum",
  ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_site_loses_its_connection_and_harms_nobody(run, name):
  coordinator, players = run
  now = players[0].applied
  make, reason = BROKEN[name]
  code, details = say(coordinator, [hello(), *make(now)])
  assert code is CODES.INVALID_ARGUMENT
  assert_sentence(details, reason)
  assert details.startswith("ended the connection: ")
  wait(lambda: coordinator.board.inside() == 2)
  left = [key for key in coordinator.board.uploads if key[1] == 2]
  complete = [key for key in left if coordinator.board.rounds.has(2, key[0])]
  assert left == complete
  play(players, range(now, now + 1))
  counted = name == "replayed payload"  # Once, as it came.
  for player in players:
    assert (2 in player.members[now]) == counted


def test_a_message_that_is_too_large_is_refused(run):
  coordinator, players = run
  for sent in ([b"a" * (1 << 20)], [hello(), b"a" * (1 << 20)]):
    code, details = say(coordinator, sent)
    assert code is CODES.RESOURCE_EXHAUSTED
    assert "larger" in details
  play(players, range(players[0].applied, players[0].applied + 1))


def test_positions_of_other_sites_are_not_taken(run):
  coordinator, players = run
  now = players[0].applied
  data = {"0": [9, "mine"], "2": [9, "own"], "x" * 1000: 1}
  first, *rest = whole(now)
  first = chunk(now, data=data)
  assert say(coordinator, [hello(), first, *rest])[0] is CODES.OK
  play(players, range(now, now + 1))
  wait(lambda: coordinator.group.applied == now + 1)
  assert coordinator.group.data == {"0": [now, {}], "1": [now, {}], "2": [9, "own"]}


def test_a_flood_of_connections_is_limited(run):
  coordinator, players = run
  channels = [security.channel(coordinator.address, "", True) for _ in range(40)]
  hold = []
  try:
    for channel in channels:
      waiting = queue.Queue()
      call = channel.stream_stream(messages.METHOD)(iter(waiting.get, None))
      hold.append((waiting, call))
    wait(lambda: say(coordinator, [])[0] is CODES.RESOURCE_EXHAUSTED)
    play(players, range(players[0].applied, players[0].applied + 2))
  finally:
    for (waiting, _), channel in zip(hold, channels):
      waiting.put(None)
      channel.close()
  wait(lambda: say(coordinator, [])[0] is CODES.INVALID_ARGUMENT)


def test_the_audit_holds_after_all_attacks(run):
  coordinator, players = run
  assert coordinator.lines() == list(range(players[0].applied))
  assert {p.state for p in players} == {coordinator.state}
  assert [p.link.reconnects for p in players] == [0, 0]
