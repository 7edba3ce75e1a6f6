"""How processes meet, exchange values and notice a loss; here they are threads."""

import json
import os
import queue
import re
import socket
import threading
import time

import jax
import pytest

from diloco.config import ConfigError
from diloco.run import peers as peers_lib
from diloco.run import processes, rendezvous
from diloco.run.peers import Peers, ProcessLost


def free_port() -> int:
  with socket.socket() as s:
    s.bind(("", 0))
    return s.getsockname()[1]


def at_once(run, indices) -> dict:
  """Calls run(i) for all indices at once: {i: its result, or the ProcessLost}."""
  found = {}

  def call(i):
    try:
      found[i] = run(i)
    except ProcessLost as error:
      found[i] = error

  threads = [threading.Thread(target=call, args=(i,)) for i in indices]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  return found


def meet(indices, count, timeout=20, port=None) -> dict:
  """Calls `rendezvous.meet` in each process: {i: its connections, or the error}."""
  port = port or free_port()
  return at_once(
    lambda i: rendezvous.meet("localhost", port, count, i, timeout), indices
  )


def told(sockets) -> str:
  """Reads the error that process 0 sent to a process that had come."""
  kind, message = json.loads(sockets[0].makefile().readline())
  assert kind == "failed"
  return message


def test_missing_processes_are_named_to_all_that_came():
  port = free_port()
  found = meet([0, 2], count=5, timeout=1, port=port)
  message = f"processes 1, 3, 4 of 5 did not come to localhost:{port} within 1 s"
  assert message in str(found[0])
  assert told(found[2]) == str(found[0])


def test_a_missing_process_0_is_told_with_its_address():
  port = free_port()
  found = meet([1], count=2, timeout=1, port=port)
  assert f"process 1 of 2 found no process 0 at localhost:{port}" in str(found[1])


def test_a_process_id_given_twice():
  port, ids = free_port(), [0, 1, 1]
  come = lambda k: rendezvous.meet("localhost", port, 3, ids[k], 20)
  found = at_once(come, range(3))
  errors = [str(found[0]), told(found[1]), told(found[2])]
  assert all("as number 1 of 3" in e and "own --process_id" in e for e in errors)


def test_processes_that_disagree_on_their_number():
  port, counts = free_port(), [2, 3]
  come = lambda i: rendezvous.meet("localhost", port, counts[i], i, 20)
  found = at_once(come, range(2))
  assert "as number 1 of 3, but 2 are expected" in str(found[0])
  assert told(found[1]) == str(found[0])


def test_a_port_scan_disturbs_nobody():
  port, found = free_port(), {}
  waiting = threading.Thread(target=lambda: found.update(meet([0], 2, port=port)))
  waiting.start()
  for junk in (b"", b"GET / HTTP/1.1\r\n", b"7\n"):
    visit(port, junk)
  found |= meet([1], 2, port=port)
  waiting.join(30)
  assert set(found[0]) == {1}


def visit(port: int, line: bytes) -> None:
  """Connects to process 0, sends a line and leaves, like a process that dies."""
  deadline = time.monotonic() + 20
  while True:
    try:
      s = socket.create_connection(("localhost", port))
      break
    except OSError:
      assert time.monotonic() < deadline
      time.sleep(0.05)
  with s:
    s.sendall(line)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_process_may_die_and_come_again_while_the_others_wait(order):
  port, found = free_port(), {}
  come = lambda i: found.update(meet([i], 3, port=port))
  threads = [threading.Thread(target=come, args=(i,)) for i in (0, *order)]
  threads[0].start()
  visit(port, b"[1, 3]\n")
  for thread in threads[1:]:
    thread.start()
    time.sleep(0.3)
  for thread in threads:
    thread.join(30)
  peers = [Peers(i, 3, found[i]) for i in range(3)]
  gathered = at_once(lambda i: peers[i].all_gather(i), range(3))
  assert gathered == {i: [0, 1, 2] for i in range(3)}
  at_once(lambda i: peers[i].close(), range(3))


def test_a_process_that_dies_while_it_waits_is_missing():
  port = free_port()
  dying = threading.Thread(target=visit, args=(port, b"[1, 3]\n"))
  dying.start()
  with pytest.raises(ProcessLost, match="process 1 came and went again"):
    rendezvous.meet("localhost", port, 3, 0, 3)  # Process 2 never comes.
  dying.join()


def initialize_with(monkeypatch, starts_jax) -> tuple[queue.SimpleQueue, list]:
  """Starts process 0 of 2; returns its exit statuses and process 1's connection."""
  codes, sockets = queue.SimpleQueue(), []
  monkeypatch.setattr(os, "_exit", codes.put)
  monkeypatch.setattr(peers_lib, "_GRACE", 0.0)
  monkeypatch.setattr(type(jax.config), "update", lambda *args: None)
  monkeypatch.setattr(
    jax.distributed, "initialize", lambda *args, **kwargs: starts_jax(codes, sockets)
  )
  port = free_port()
  other = threading.Thread(
    target=lambda: sockets.append(rendezvous.meet("localhost", port, 2, 1, 20)[0])
  )
  other.start()
  processes.initialize(f"localhost:{port}", 2, 0)
  other.join()
  return codes, sockets


def test_a_process_that_dies_while_jax_starts_is_named(monkeypatch, capfd):
  ended = []

  def starts_jax(codes, sockets):
    while not sockets:
      time.sleep(0.01)
    sockets[0].close()
    ended.append(codes.get(timeout=10))  # JAX itself would wait here.

  initialize_with(monkeypatch, starts_jax)
  assert ended == [1]
  message = "error: process 1 of 2 is gone. The same command goes on from the last"
  assert message in capfd.readouterr().err


def test_all_are_told_that_jax_does_not_start(monkeypatch, capfd):
  def starts_jax(codes, sockets):
    raise RuntimeError("UNKNOWN: address already in use\nand more")

  codes, sockets = initialize_with(monkeypatch, starts_jax)
  message = r"process 0 of 2 met .* JAX did not join them \(UNKNOWN: address .* use\);"
  assert codes.get(timeout=10) == 1
  assert re.search(f"error: {message}", capfd.readouterr().err)
  lines = sockets[0].makefile()
  assert json.loads(lines.readline()) == ["value", None]  # All have come.
  kind, said = json.loads(lines.readline())
  assert kind == "failed"
  assert re.match(message, said)


def connected(count: int) -> list[Peers]:
  found = meet(range(count), count)
  return [Peers(i, count, found[i]) for i in range(count)]


def test_values_are_gathered_broadcast_and_reported_in_order():
  peers = connected(3)
  gathered = at_once(lambda i: peers[i].all_gather(i), range(3))
  assert gathered == {i: [0, 1, 2] for i in range(3)}
  sent = at_once(lambda i: peers[i].broadcast({"from": i}), range(3))
  assert sent == {i: {"from": 0} for i in range(3)}
  for p in peers:
    for t in range(2):
      p.report([t, p.index])
  assert list(peers[0].reports(wait=True)) == [
    [[0, 0], [0, 1], [0, 2]],
    [[1, 0], [1, 1], [1, 2]],
  ]
  assert list(peers[1].reports(wait=True)) == []
  at_once(lambda i: peers[i].close(), range(3))


def test_a_process_that_dies_in_the_middle_of_a_message_is_gone(monkeypatch, capfd):
  codes = queue.SimpleQueue()
  monkeypatch.setattr(os, "_exit", codes.put)
  own, other = socket.socketpair()
  Peers(0, 2, {1: own})
  other.sendall(b'["report", 1')
  other.close()
  assert codes.get(timeout=10) == 1
  assert "error: process 1 of 2 is gone." in capfd.readouterr().err


def test_a_peer_that_is_gone_before_all_are_listened_to_ends_the_process(monkeypatch):
  codes, start = queue.SimpleQueue(), threading.Thread.start
  monkeypatch.setattr(os, "_exit", codes.put)
  monkeypatch.setattr(threading.Thread, "start", lambda t: (start(t), time.sleep(0.2)))
  pairs = [socket.socketpair() for _ in range(2)]
  pairs[0][1].close()
  Peers(0, 3, {1: pairs[0][0], 2: pairs[1][0]})
  assert codes.get(timeout=10) == 1


def test_one_process_alone_needs_nobody():
  alone = Peers()
  assert alone.all_gather("x") == ["x"]
  assert alone.broadcast("x") == "x"
  alone.report(1)
  assert list(alone.reports()) == [[1]]
  alone.close()


def test_one_process_alone_fails_with_a_sentence(capfd):
  with pytest.raises(SystemExit) as ended:
    Peers().fail("no data.", code=2)
  assert ended.value.code == 2
  assert capfd.readouterr().err == "error: no data.\n"


def test_a_folder_that_not_all_processes_share_is_refused(tmp_path):
  peers = connected(2)
  at_once(lambda i: processes.make_shared(tmp_path / "run", peers[i]), range(2))
  assert list(tmp_path.glob("run/*")) == []

  def make(i):
    try:
      processes.make_shared(tmp_path / str(i), peers[i])
    except ConfigError as error:
      return str(error)

  for error in at_once(make, range(2)).values():
    assert "which process 1 of 2 does not share with process 0; put it" in error
  at_once(lambda i: peers[i].close(), range(2))
