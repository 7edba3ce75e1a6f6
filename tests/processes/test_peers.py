"""How processes meet, exchange values and notice a loss; here they are threads."""

import contextlib
import json
import os
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator

import grpc
import jax
import pytest
import running
from threads import at_once, close, connected, free_port, meet

from diloco.errors import ConfigError
from diloco.processes import distributed as processes
from diloco.processes import peers as peers_lib
from diloco.processes import streams
from diloco.processes.peers import Peers, ProcessLost
from diloco.util import files


@pytest.fixture
def codes(monkeypatch) -> queue.SimpleQueue:
  """Exit statuses of processes that end in an error; they wait shortly for others."""
  found = queue.SimpleQueue()
  monkeypatch.setattr(os, "_exit", found.put)
  monkeypatch.setattr(peers_lib, "_GRACE", 1.0)
  return found


def told(codes, capfd, count=1, status=1) -> list[str]:
  """Waits until processes end in an error; returns what they say."""
  assert [codes.get(timeout=10) for _ in range(count)] == [status] * count
  return [line for line in capfd.readouterr().err.splitlines() if "error: " in line]


def test_a_process_tells_one_error_of_its_threads(codes, capfd):
  peers = Peers(0, 2)
  for message in ("the disk is full.", "the disk is full."):
    threading.Thread(target=peers.fail, args=(message,), daemon=True).start()
  assert told(codes, capfd) == ["error: the disk is full."]
  with pytest.raises(queue.Empty):
    codes.get(timeout=0.5)


def test_missing_processes_are_named_to_all_that_came(codes, capfd):
  port = free_port()
  found = meet([0, 2], count=5, timeout=1, port=port)
  message = f"processes 1, 3, 4 of 5 did not come to localhost:{port} within 1 s"
  assert message in str(found[0])
  assert told(codes, capfd) == [f"error: {found[0]}"]


def test_a_missing_process_0_is_told_with_its_address():
  port = free_port()
  found = meet([1], count=2, timeout=1, port=port)
  message = f"process 1 of 2 found no process 0 at localhost:{port} within 1 s ("
  assert message in str(found[1])
  assert "Connection refused" in str(found[1])


def test_a_port_in_use_is_told(capfd):
  with socket.create_server(("", 0)) as other:
    port = other.getsockname()[1]
    found = meet([0], count=2, port=port)
  assert f"process 0 cannot listen at port {port}," in str(found[0])


@pytest.mark.parametrize(
  ("number", "count", "reason"),
  [
    (1, 3, "as number 1 of 3, but 3 are expected and [0, 1] are there; give each its"),
    (1, 4, "as number 1 of 4, but 3 are expected and [0"),
  ],
)
def test_an_unexpected_process_disturbs_nobody(codes, capfd, number, count, reason):
  address, found = f"localhost:{free_port()}", {}
  come = lambda i: found.update({i: Peers.meet(address, 3, i, 20)})
  threads = [threading.Thread(target=come, args=(i,)) for i in range(3)]
  for thread in threads[:2]:
    thread.start()
  threads[1].join(20)
  time.sleep(0.5)  # Process 0 counts a process after it has sent the first message.
  Peers.meet(address, count, number, 20)
  [error] = told(codes, capfd, status=2)
  assert error.startswith(f"error: a process came to {address} {reason}")
  threads[2].start()
  for thread in threads:
    thread.join(20)
  close(found)


HELLOS = (
  *(b"", b"\xff", b"[", b"[" * 50_000, b"{}", b"null", b"7", b'"12"', b"[1]"),
  *(b"[1, 2, 3]", b'["1", "2"]', b"[null, 2]", b"[true, 2]", b"[0, 2]", b"[2, 2]"),
  *(b"[-1, 2]", b"[1.0, 2]", b"x" * (5 << 20), None),
)


def test_what_is_no_hello_and_a_port_scan_disturb_nobody(monkeypatch):
  monkeypatch.setattr(peers_lib, "_HELLO_S", 1.0)
  port, found = free_port(), {}
  waiting = threading.Thread(target=lambda: found.update(meet([0], 2, port=port)))
  waiting.start()
  # Each channel has a connection of its own: the server takes one stream of each, and
  # may not have seen yet that the stream before it ended.
  alone = [("grpc.use_local_subchannel_pool", 1)]
  for hello in HELLOS:
    with grpc.insecure_channel(f"127.0.0.1:{port}", alone) as channel:
      messages = queue.SimpleQueue()
      if hello is not None:  # Else the stream stays silent.
        messages.put(hello)
      talk = channel.stream_stream("/diloco.Peers/Talk")
      with pytest.raises(grpc.RpcError) as refused:
        next(talk(iter(messages.get, None), wait_for_ready=True, timeout=60))
      messages.put(None)
      assert refused.value.code() in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,
      )
  for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", os.urandom(100)):
    with socket.create_connection(("localhost", port)) as other:
      other.sendall(junk)
  found |= meet([1], 2, port=port)
  waiting.join(30)
  close(found)


@pytest.mark.parametrize(
  ("address", "listens"),
  [
    ("localhost:7", "127.0.0.1:7"),
    ("127.3.0.1:7", "127.3.0.1:7"),
    ("[::1]:7", "[::1]:7"),
    ("node03:7", "[::]:7"),
    ("127.example.com:7", "[::]:7"),
    ("10.0.0.1:7", "[::]:7"),
    ("[fe80::1]:7", "[::]:7"),
  ],
)
def test_loopback_stays_loopback(address, listens):
  assert streams.listened(address) == listens


def test_nobody_else_reaches_a_run_at_localhost():
  port = free_port()
  peers = meet(range(2), 2, port=port)
  with pytest.raises(ConnectionRefusedError):
    socket.create_connection(("127.0.0.2", port))  # An address of this machine.
  close(peers)


def join(port: int, p: int, count: int) -> grpc.Call:
  """Joins process 0 like a process that dies when the call is cancelled."""
  channel, messages = grpc.insecure_channel(f"localhost:{port}"), queue.SimpleQueue()
  messages.put(json.dumps([p, count]).encode())
  talk = channel.stream_stream("/diloco.Peers/Talk")
  call = talk(iter(messages.get, None), wait_for_ready=True, timeout=60)
  next(call)
  time.sleep(0.5)  # Process 0 counts a process after it has sent the first message.
  return call


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_process_may_die_and_come_again_while_the_others_wait(order):
  port, found = free_port(), {}
  come = lambda i: found.update(meet([i], 3, port=port))
  threads = [threading.Thread(target=come, args=(i,)) for i in (0, *order)]
  threads[0].start()
  join(port, 1, 3).cancel()
  for thread in threads[1:]:
    time.sleep(0.3)
    thread.start()
  for thread in threads:
    thread.join(30)
  close(found)


@pytest.mark.integration("kills processes")
def test_a_process_that_dies_while_it_waits_is_missing():
  port = free_port()
  dying = threading.Thread(target=lambda: join(port, 1, 3).cancel())
  dying.start()
  with pytest.raises(ProcessLost, match="process 1 came and went again"):
    Peers.meet(f"localhost:{port}", 3, 0, 4)  # Process 2 never comes.
  dying.join()


def test_a_process_that_comes_to_a_complete_run_waits_for_the_next():
  port, found = free_port(), {}
  first = meet(range(2), 2, port=port)
  late = threading.Thread(target=lambda: found.update(meet([1], 2, port=port)))
  late.start()
  time.sleep(1)
  close(first)
  first[0]._server.stop(None).wait()  # The first run's process 0 ends.
  found |= meet([0], 2, port=port)
  late.join(30)
  close(found)


def initialize_with(monkeypatch, starts_jax) -> None:
  """Starts process 0 of 2; process 1 joins it, and `starts_jax` starts JAX."""
  monkeypatch.setattr(type(jax.config), "update", lambda *args: None)
  port, calls = free_port(), []

  def initialize(address, *args, coordinator_bind_address, **kwargs):
    assert coordinator_bind_address == address
    starts_jax(calls[0])

  monkeypatch.setattr(jax.distributed, "initialize", initialize)
  other = threading.Thread(target=lambda: calls.append(join(port, 1, 2)))
  other.start()
  monkeypatch.setattr(processes, "free_port", other.join)
  processes.initialize(f"localhost:{port}", 2, 0)


def test_a_process_that_dies_while_jax_starts_is_named(monkeypatch, codes, capfd):
  ended = []

  def starts_jax(call):
    call.cancel()
    ended.extend(told(codes, capfd))  # JAX itself would wait here.

  initialize_with(monkeypatch, starts_jax)
  message = "error: process 1 of 2 is gone. The same command goes on from the last"
  assert ended[0].startswith(message)


def raises_at_once(*args, **kwargs):
  raise RuntimeError("UNKNOWN: address already in use\nand more")


@pytest.mark.parametrize(
  ("starts_jax", "reason"),
  [
    (raises_at_once, "UNKNOWN: address already in use"),
    (lambda *args, **kwargs: time.sleep(3), "within 1 s"),
  ],
)
def test_all_hear_of_a_jax_without_start(monkeypatch, codes, capfd, starts_jax, reason):
  monkeypatch.setattr(type(jax.config), "update", lambda *args: None)
  monkeypatch.setattr(jax.distributed, "initialize", starts_jax)
  address = f"localhost:{free_port()}"
  own = threading.Thread(target=processes.initialize, args=(address, 2, 0, False, 1))
  own.start()
  other = Peers.meet(address, 2, 1, 20)
  assert isinstance(other.broadcast(None), int)  # The port for JAX.
  message = re.escape(f"({reason}); start all again, and see whether their machines")
  said = told(codes, capfd, count=2)
  assert len(said) == 2
  for line in said:
    assert re.match(f"error: process 0 of 2 met the others, .* {message}", line)
  own.join()


def test_values_are_gathered_broadcast_and_reported_in_order():
  peers = connected(3)
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
  close(peers)


def test_a_process_that_never_comes_to_a_meeting_is_named(monkeypatch):
  peers = connected(3)
  monkeypatch.setattr(peers_lib, "PATIENCE", 0.5)
  peers[1].send("value", None)  # Process 1 comes; process 2 does something else.
  with pytest.raises(ProcessLost, match="process 2 of 3 is there, but has not come"):
    peers[0].all_gather(None)


def test_a_proxy_in_the_environment_is_not_used(monkeypatch):
  for name in ("http_proxy", "https_proxy", "grpc_proxy"):
    monkeypatch.setenv(name, "http://localhost:1")
  monkeypatch.delenv("no_proxy", raising=False)
  close(connected(2))


@pytest.mark.skipif(sys.platform != "linux", reason="needs TCP_USER_TIMEOUT and /proc")
def test_both_machines_notice_when_the_other_confirms_nothing(monkeypatch):
  monkeypatch.setattr(peers_lib, "_BEAT", 0.01)
  port = free_port()
  peers = meet(range(2), 2, port=port)
  time.sleep(0.1)
  found = list(connections(port))
  assert len(found) >= 2
  timeouts = [s.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for s in found]
  assert set(timeouts) == {30_000}
  close(peers)  # Empty messages, which the other must confirm, carry no values.


def connections(port: int) -> Iterator[socket.socket]:
  """All TCP connections of this Python process from or to a port."""
  for fd in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError, IndexError):
      s = socket.socket(fileno=os.dup(int(fd)))
      if port in (s.getsockname()[1], s.getpeername()[1]):
        yield s


def test_an_error_and_its_exit_status_are_those_of_all(codes, capfd):
  peers = connected(3)
  threading.Thread(target=peers[1].fail, args=("no data.", 2)).start()
  said = told(codes, capfd, count=3, status=2)
  assert sorted(said) == ["error: no data.", *["error: process 1: no data."] * 2]


def test_a_killed_process_0_is_named_by_all(codes, capfd):
  address = f"localhost:{free_port()}"
  code = f"""
from diloco.processes.peers import Peers
Peers.meet({address!r}, 3, 0, 60).all_gather(None)"""
  process_0 = running.start("-c", code)
  others = at_once(lambda i: Peers.meet(address, 3, i, 60), [1, 2])
  process_0.kill()
  process_0.wait()
  said = told(codes, capfd, count=len(others))
  message = "error: process 0 of 3 is gone. The same command goes on from"
  assert [line.startswith(message) for line in said] == [True, True]


def test_one_process_alone_needs_nobody_and_fails_with_a_sentence(capfd):
  alone = Peers()
  assert alone.all_gather("x") == ["x"]
  assert alone.broadcast("x") == "x"
  alone.report(1)
  assert list(alone.reports()) == [[1]]
  alone.close()
  with pytest.raises(SystemExit) as ended:
    alone.fail("no data.", code=2)
  assert ended.value.code == 2
  assert capfd.readouterr().err == "error: no data.\n"


def test_a_folder_that_not_all_processes_share_is_refused(tmp_path):
  peers = connected(2)
  at_once(lambda i: processes.make_shared(tmp_path / "run", peers[i]), range(2))
  assert list(tmp_path.glob("run/*")) == []

  def refusals(folder):
    def make(i):
      try:
        processes.make_shared(folder / str(i), peers[i])
      except ConfigError as error:
        return str(error)

    return at_once(make, range(2)).values()

  for error in refusals(tmp_path):
    assert "which process 1 of 2 does not share with process 0; put it" in error
  for error in refusals(files.COPIES / "s3"):  # Each could write to its own bucket.
    assert "the address of --workdir is s3://1, not s3://0; give all the same" in error
  close(peers)
