"""The star of network namespaces: rates, counters, isolation, cleanup after a kill."""

import contextlib
import json
import pathlib
import signal
import socket
import subprocess
import sys

import netns
import pytest
import running

MISSING = netns.missing()
needs_namespaces = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

# Both ends send `size` bytes at once and wait for as many; prints the seconds.
EXCHANGE = """
import socket, sys, threading, time
address, size, listens = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "0"
if listens:
  peer, _ = socket.create_server((address, 5000)).accept()
else:
  while True:
    try:
      peer = socket.create_connection((address, 5000))
      break
    except ConnectionRefusedError:
      time.sleep(0.02)
def receive():
  left = size
  while left:
    left -= len(peer.recv(1 << 20))
thread = threading.Thread(target=receive)
start = time.perf_counter()
thread.start()
peer.sendall(bytes(size))
thread.join()
print(time.perf_counter() - start)
"""


def _exchange(network, size: int, first: int = 0, second: int = 1) -> float:
  """Seconds that an exchange of `size` bytes each way takes."""
  given = network.addresses[first], str(size)
  processes = [
    subprocess.Popen(
      network.command(node, [sys.executable, "-c", EXCHANGE, *given, str(i)]),
      stdout=subprocess.PIPE,
      text=True,
    )
    for i, node in enumerate((first, second))
  ]
  return max(float(p.communicate(timeout=60)[0]) for p in processes)


def _told(*command: str) -> str:
  return subprocess.run(command, capture_output=True, text=True).stdout


def _discipline(namespace: str, device: str) -> str:
  """How a device queues its frames, as tc tells it."""
  return _told("tc", "-n", namespace, "qdisc", "show", "dev", device)


def _existing() -> set[str]:
  listed = _told("ip", "-j", "netns", "list")
  return {entry["name"] for entry in json.loads(listed or "[]")}


def _sent_again(network, node: int) -> int:
  """Segments that TCP has sent once more in a node's namespace."""
  text = _told(*network.command(node, ["cat", "/proc/net/snmp"]))
  names, values = [s.split() for s in text.splitlines() if s.startswith("Tcp:")]
  return int(dict(zip(names, values))["RetransSegs"])


def _has_ended(pid: str) -> bool:
  """Whether a process is dead, also if whoever adopted it has not looked yet."""
  try:
    state = pathlib.Path("/proc", pid, "stat").read_text().rpartition(")")[2]
  except FileNotFoundError:
    return True
  return state.split()[0] == "Z"


@needs_namespaces
def test_counters_show_payload_and_headers():
  size = 2_000_000
  with netns.star(2) as network:
    before = [network.counters(i) for i in range(2)]
    _exchange(network, size)
    after = [network.counters(i) for i in range(2)]
    again = sum(_sent_again(network, i) for i in range(2)) * (netns.MTU + 14)
  for bytes0, bytes1 in zip(before, after):
    for direction in range(2):
      # Never less than the payload; every 8948 bytes of it bring 66 of headers (a
      # bundle of the kernel's would bring them once), and an acknowledgement at most.
      # A busy machine sends some twice, which TCP counts.
      moved = bytes1[direction] - bytes0[direction]
      assert size * (1 + 66 / 8948) <= moved <= size * 1.1 + again
  sent, received = after[0][1] - before[0][1], after[1][0] - before[1][0]
  assert abs(sent - received) < size / 100  # Farewells may be on their way.


@needs_namespaces
def test_rate_bounds_throughput_and_can_change():
  with netns.star(2) as network:
    network.limit(8e6)
    # The bucket and one frame in each of the two shapers pass ahead of the rate.
    ahead = 4 * 2 * (netns.MTU + 14)
    assert _exchange(network, 500_000) >= (500_000 - ahead) / 1e6
    network.limit(80e6)
    assert _exchange(network, 500_000) >= (500_000 - 10 * ahead) / 1e7
    network.limit(None)
    network.limit(None)
    for device in ((network.names[0], "eth0"), (network.hub, "port1")):
      assert "tbf" not in _discipline(*device)


@needs_namespaces
def test_some_links_are_limited_in_one_direction():
  with netns.star(3) as network:
    network.limit(8e6, [1], upload_only=True)
    network.limit(8e6, [2])
    uploads = [(name, "eth0") for name in network.names]
    downloads = [(network.hub, f"port{i}") for i in range(3)]
    limited = [at for at in uploads + downloads if "tbf" in _discipline(*at)]
    assert limited == [*uploads[1:], downloads[2]]


@needs_namespaces
def test_a_link_that_was_cut_carries_again():
  with netns.star(2) as network:
    knock = f"import socket; socket.create_connection(({network.addresses[1]!r}, 5), 1)"

    def answer() -> str:
      command = network.command(0, [sys.executable, "-c", knock])
      return subprocess.run(command, capture_output=True, text=True).stderr

    assert "ConnectionRefusedError" in answer()
    network.connect(1, up=False)
    assert "TimeoutError" in answer()
    network.connect(1, up=True)
    assert "ConnectionRefusedError" in answer()
    assert _exchange(network, 10_000) > 0
    assert "rto_min" in _told("ip", "-n", network.names[1], "route")


@needs_namespaces
def test_star_of_four_is_isolated_and_knows_its_names():
  with contextlib.suppress(ZeroDivisionError), netns.star(4) as network:
    assert len(set(network.addresses)) == 4
    quiet = network.counters(1)
    _exchange(network, 100_000, first=3, second=0)
    # Node 1 sees only frames that the bridge floods before it knows the addresses.
    assert network.counters(1)[0] - quiet[0] < 10_000
    ask = f"import socket; print(socket.gethostbyname({socket.gethostname()!r}))"
    for node in range(4):
      answer = _told(*network.command(node, [sys.executable, "-c", ask]))
      assert answer.strip() == network.addresses[node]
      links = _told("ip", "-n", network.names[node], "-j", "link")
      assert {x["ifname"] for x in json.loads(links)} >= {"lo", "eth0"}
    names = {*network.names, network.hub}
    assert names <= _existing()
    raise ZeroDivisionError  # An error inside removes everything.
  assert not names & _existing()
  assert not any(pathlib.Path("/etc/netns", name).exists() for name in names)


@needs_namespaces
def test_what_a_killed_process_left_is_removed_with_its_children():
  program = (
    "import netns, subprocess, time\n"
    "with netns.star(2) as network:\n"
    "  child = subprocess.Popen(network.command(0, ['sleep', '600']))\n"
    "  print(child.pid, *network.names, network.hub, flush=True)\n"
    "  time.sleep(600)\n"
  )
  killed = subprocess.Popen(
    [sys.executable, "-c", program],
    cwd=running.ROOT / "scripts/experiments",
    stdout=subprocess.PIPE,
    text=True,
  )
  child, *names = killed.stdout.readline().split()
  # While its owner lives a namespace is not stale.
  netns.remove_stale()
  assert set(names) <= _existing()
  killed.send_signal(signal.SIGKILL)
  killed.wait()
  assert set(names) <= _existing()
  assert set(names) <= set(netns.remove_stale())
  assert not set(names) & _existing()
  running.wait(lambda: _has_ended(child), seconds=5)


def test_missing_tools_are_named(monkeypatch):
  monkeypatch.setenv("PATH", "/nowhere")
  assert netns.missing() == "ip is not installed (Debian: apt-get install iproute2)"
