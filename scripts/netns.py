"""A star of network namespaces on one machine: real interfaces with a limited rate.

  with netns.star(2) as network:
    network.limit(100e6)
    subprocess.Popen(network.command(0, ["python", "server.py"]))

Every node is a namespace with one interface, eth0, joined to a bridge in a namespace
of its own, so that nothing on the host (addresses, firewall) is touched or matters.
Needs root and iproute2; see `missing`. Bandwidth is limited, delay is not: the token
bucket is in every kernel that has traffic control, netem is not.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence

# Namespaces are called PREFIX, the process id of who made them, and a number or hub.
PREFIX = "diloco"
# Frames as large as long-distance research networks take. Headers are 66 bytes a
# frame and acknowledgements as much: 1% of a bulk transfer, against 7% at 1500.
MTU = 9000
# IPv6 would announce itself on the interfaces now and then. Payload both ways under
# Reno: 93% of 1 Mbit/s, 97% or more of 4 Mbit/s to 1 Gbit/s. BBR: 61% of the last, as
# its pacing needs timers that a busy machine does not keep.
SETTINGS = {
  "ipv6/conf/all/disable_ipv6": 1,
  "ipv4/tcp_congestion_control": "reno",
}


def missing() -> str | None:
  """What this machine lacks for network namespaces; None if nothing."""
  for tool in ("ip", "tc"):
    if shutil.which(tool) is None:
      return f"{tool} is not installed (Debian: apt-get install iproute2)"
  if os.geteuid() != 0:
    return "network namespaces need root"
  probe = f"{PREFIX}{os.getpid()}-probe"
  made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
  if made.returncode:
    return f"network namespaces cannot be made here: {made.stderr.strip()}"
  _remove(probe)
  return None


@dataclasses.dataclass(frozen=True)
class Network:
  """A star of n nodes.

  Attributes:
    names: the nodes' namespaces.
    addresses: the nodes' IPv4 addresses.
    hub: the bridge's namespace; its port{i} is the other end of node i's eth0.
    statistics: open /proc/net/dev of each node.
  """

  names: tuple[str, ...]
  addresses: tuple[str, ...]
  hub: str
  statistics: tuple[int, ...]

  def command(self, node: int, argv: Sequence[str]) -> list[str]:
    """`argv` as a command that runs inside a node."""
    return ["ip", "netns", "exec", self.names[node], *argv]

  def limit(self, rate: float | None) -> None:
    """Limits every link in both directions to `rate` bits per second; None: to none.

    May be called while traffic flows.
    """
    for i, name in enumerate(self.names):
      for namespace, device in ((name, "eth0"), (self.hub, f"port{i}")):
        tc = ["tc", "-n", namespace, "qdisc"]
        if rate is None:
          # There is nothing to delete if there was no limit.
          subprocess.run([*tc, "del", "dev", device, "root"], capture_output=True)
        else:
          _run(*tc, "replace", "dev", device, "root", "tbf", *_bucket(rate))

  def counters(self, node: int) -> tuple[int, ...]:
    """Bytes that a node's eth0 has (received, sent), headers of frames included.

    Cheap enough to be polled; nothing is started inside the node.
    """
    return self._statistics(node, 0, 8)

  def packets(self, node: int) -> tuple[int, ...]:
    """Frames that a node's eth0 has (received, sent)."""
    return self._statistics(node, 1, 9)

  def _statistics(self, node: int, *columns: int) -> tuple[int, ...]:
    text = os.pread(self.statistics[node], 1 << 16, 0).decode()
    fields = text[text.index("eth0:") + 5 :].split()
    return tuple(int(fields[column]) for column in columns)


def _bucket(rate: float) -> list[str]:
  # The bucket refills in 2 ms, longer than timers are late, but holds so little that
  # even a packed fragment finds no free ride: 25 kB at 100 Mbit/s. The queue takes
  # 50 ms and at least 16 frames, then drops, as a router would.
  burst = max(rate / 8 * 2e-3, 2 * (MTU + 14))
  queue = max(rate / 8 * 50e-3, 16 * (MTU + 14))
  return ["rate", f"{rate:.0f}bit", "burst", f"{burst:.0f}", "limit", f"{queue:.0f}"]


@contextlib.contextmanager
def star(nodes: int) -> Iterator[Network]:
  """Makes the namespaces, and removes them and whatever runs inside at the end.

  What an earlier process that was killed has left behind is removed first.

  Raises:
    ValueError: nodes is not in 2..250.
    RuntimeError: this machine lacks something, see `missing`, or a command failed.
  """
  if not 2 <= nodes <= 250:
    raise ValueError(f"nodes is {nodes}; a star has 2 to 250.")
  reason = missing()
  if reason:
    raise RuntimeError(reason + ".")
  remove_stale()
  prefix = f"{PREFIX}{os.getpid()}-"
  names = tuple(f"{prefix}{i}" for i in range(nodes))
  addresses = tuple(f"10.77.0.{i + 1}" for i in range(nodes))
  hub = f"{prefix}hub"
  statistics: list[int] = []
  try:
    _make_hub(hub)
    for i, (name, address) in enumerate(zip(names, addresses)):
      _make_node(i, name, address, hub)
    statistics += [_inside(name, _open_statistics) for name in names]
    yield Network(names, addresses, hub, tuple(statistics))
  finally:
    for fd in statistics:
      os.close(fd)
    for name in (*names, hub):
      _remove(name)


def remove_stale() -> list[str]:
  """Removes the namespaces, and what runs inside, of processes that are gone."""
  listed = json.loads(_run("ip", "-j", "netns", "list") or "[]")
  removed = []
  for name in [entry["name"] for entry in listed]:
    owner = re.fullmatch(rf"{PREFIX}(\d+)-(\d+|hub|probe)", name)
    if owner and not pathlib.Path("/proc", owner[1]).exists():
      _remove(name)
      removed.append(name)
  return removed


def _make_hub(hub: str) -> None:
  _run("ip", "netns", "add", hub)
  _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
  _run("ip", "-n", hub, "link", "set", "bridge", "up", "mtu", str(MTU))


def _make_node(i: int, name: str, address: str, hub: str) -> None:
  port = f"port{i}"
  _run("ip", "netns", "add", name)
  for namespace in (name, hub):
    for path, value in SETTINGS.items():
      write = f"echo {value} > /proc/sys/net/{path}"
      # A kernel without IPv6, or without Reno, has nothing to set.
      subprocess.run(
        ["ip", "netns", "exec", namespace, "sh", "-c", write], capture_output=True
      )
  _run(
    *("ip", "-n", hub, "link", "add", port, "mtu", str(MTU), "type", "veth"),
    *("peer", "name", "eth0", "mtu", str(MTU), "netns", name),
  )
  _run("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
  # A segment is a frame. Otherwise the kernel hands 64 kB at a time across, which the
  # counters take for one frame with one header.
  _run("ip", "-n", name, "link", "set", "eth0", "gso_max_segs", "1", "up")
  _run("ip", "-n", name, "link", "set", "lo", "up")
  _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
  # A full queue of a slow link delays a frame by up to a second; nothing is lost
  # there, so nothing is to be sent again.
  subnet = f"{address.rpartition('.')[0]}.0/24"
  _run("ip", "-n", name, "route", "change", subnet, "dev", "eth0", "rto_min", "1s")
  # Gloo binds to what the host's name means; the host's own file says 127.0.0.1.
  hosts = pathlib.Path("/etc/netns", name, "hosts")
  hosts.parent.mkdir(parents=True, exist_ok=True)
  hosts.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")


def _remove(name: str) -> None:
  """Ends what runs in a namespace and removes it; never raises."""
  found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
  for pid in found.stdout.split():
    with contextlib.suppress(ProcessLookupError):
      os.kill(int(pid), signal.SIGKILL)
  subprocess.run(["ip", "netns", "del", name], capture_output=True)
  shutil.rmtree(pathlib.Path("/etc/netns", name), ignore_errors=True)


def _open_statistics() -> int:
  return os.open("/proc/thread-self/net/dev", os.O_RDONLY)


def _inside(name: str, function):
  """Calls a function in a namespace: in a thread, as a namespace is per thread."""
  result = []

  def call():
    with open(f"/run/netns/{name}") as namespace:
      if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
        return
    result.append(function())

  thread = threading.Thread(target=call)
  thread.start()
  thread.join()
  if not result:
    raise RuntimeError(f"namespace {name} could not be entered.")
  return result[0]


def _run(*argv: str) -> str:
  done = subprocess.run(argv, capture_output=True, text=True)
  if done.returncode:
    raise RuntimeError(f"{' '.join(argv)} failed: {done.stderr.strip()}")
  return done.stdout
