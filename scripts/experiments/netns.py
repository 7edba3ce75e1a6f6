"""A star of network namespaces on one machine: real interfaces with a limited rate.

  with netns.star(2) as network:
    network.limit(100e6)
    subprocess.Popen(network.command(0, ["python", "server.py"]))

Every node is a namespace with one interface, eth0. A bridge in one more namespace joins
the nodes. So the host's addresses and firewall do not change and have no effect. Needs
root and iproute2; see `missing`. The network limits the rate but adds no delay: every
kernel with traffic control has the token bucket (rate), but not every kernel has netem
(delay).
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence

# A namespace's name is PREFIX, its maker's process id, '-', and a number, hub or probe.
PREFIX = "diloco"
# The frame size of long-distance research networks. Headers (66 bytes per frame) and
# acknowledgements (66 bytes) add 1% to a bulk transfer, but 7% with frames of 1500
# bytes. But a token bucket must hold two frames, so 18 kB cross without limit.
MTU = 9000
# IPv6 would send packets of its own. With Reno, payload in both directions uses 93% of
# 1 Mbit/s and at least 97% of 4 Mbit/s to 1 Gbit/s. BBR uses only 61% of 1 Gbit/s: on
# a busy machine, timers are too late for its pacing.
SETTINGS = {"ipv6/conf/all/disable_ipv6": 1, "ipv4/tcp_congestion_control": "reno"}


def missing() -> str | None:
  """Names what this machine lacks for network namespaces; None: nothing."""
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


def prepare() -> None:
  """Ends the program if namespaces cannot be made; call it before `star`.

  SIGTERM becomes SystemExit, so that processes and namespaces are removed.
  """
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  reason = missing()
  if reason:
    sys.exit(f"error: {reason}.")


@dataclasses.dataclass(frozen=True)
class Network:
  """A star of n nodes.

  Attributes:
    names: the nodes' namespaces.
    addresses: the nodes' IPv4 addresses.
    hub: the bridge's namespace; its port{i} is the other end of node i's eth0.
    mtu: bytes of a frame.
    residents: process ids of idle processes, one in each node.
  """

  names: tuple[str, ...]
  addresses: tuple[str, ...]
  hub: str
  mtu: int
  residents: tuple[int, ...]

  def command(self, node: int, argv: Sequence[str]) -> list[str]:
    """Returns the command that runs `argv` inside a node."""
    return ["ip", "netns", "exec", self.names[node], *argv]

  def limit(
    self,
    rate: float | None,
    nodes: Iterable[int] | None = None,
    upload_only: bool = False,
  ) -> None:
    """Limits links to `rate` bits per second; None: no limit.

    May be called while traffic flows.

    Args:
      rate: the rate of each direction.
      nodes: the nodes whose links change; None: all nodes.
      upload_only: whether only the direction away from the nodes changes.
    """
    for i in range(len(self.names)) if nodes is None else nodes:
      directions = ((self.names[i], "eth0"), (self.hub, f"port{i}"))
      for namespace, device in directions[:1] if upload_only else directions:
        tc = ["tc", "-n", namespace, "qdisc"]
        if rate is None:
          # This command fails, without harm, if there was no limit.
          subprocess.run([*tc, "del", "dev", device, "root"], capture_output=True)
        else:
          _run(*tc, "replace", "dev", device, "root", "tbf", *_bucket(rate, self.mtu))

  def connect(self, node: int, up: bool) -> None:
    """Cuts a node's link, or restores it; addresses and routes stay."""
    state = "up" if up else "down"
    _run("ip", "-n", self.hub, "link", "set", f"port{node}", state)

  def counters(self, node: int) -> tuple[int, int]:
    """Returns (received, sent): bytes of a node's eth0, frame headers included.

    Cheap enough to poll: starts no process inside the node.
    """
    text = pathlib.Path(f"/proc/{self.residents[node]}/net/dev").read_text()
    fields = text[text.index("eth0:") + 5 :].split()
    return int(fields[0]), int(fields[8])


def _bucket(rate: float, mtu: int) -> list[str]:
  # The bucket holds 2 ms of traffic (25 kB at 100 Mbit/s), at least two frames: enough
  # for late timers, but too little to carry a packed fragment without waiting. The
  # queue holds 50 ms of traffic, at least 16 frames; a full queue drops frames, as a
  # router would.
  burst = max(rate / 8 * 2e-3, 2 * (mtu + 14))
  queue = max(rate / 8 * 50e-3, 16 * (mtu + 14))
  return ["rate", f"{rate:.0f}bit", "burst", f"{burst:.0f}", "limit", f"{queue:.0f}"]


@contextlib.contextmanager
def star(nodes: int, mtu: int = MTU) -> Iterator[Network]:
  """Makes the namespaces; at the end removes them and kills the processes inside.

  First removes the namespaces that killed processes have left behind.

  Args:
    nodes: 2 to 250.
    mtu: bytes of a frame.

  Raises:
    RuntimeError: a command failed; see `prepare`.
  """
  remove_stale()
  prefix = f"{PREFIX}{os.getpid()}-"
  names = tuple(f"{prefix}{i}" for i in range(nodes))
  addresses = tuple(f"10.77.0.{i + 1}" for i in range(nodes))
  hub = f"{prefix}hub"
  residents = list[subprocess.Popen]()
  try:
    _make_hub(hub, mtu)
    for i, (name, address) in enumerate(zip(names, addresses)):
      _make_node(i, name, address, hub, mtu)
    residents += map(_settle, names)
    yield Network(names, addresses, hub, mtu, tuple(p.pid for p in residents))
  finally:
    for name in (*names, hub):
      _remove(name)
    for process in residents:
      process.communicate()


def remove_stale() -> list[str]:
  """Removes namespaces whose maker is gone, with their processes; returns the names."""
  listed = json.loads(_run("ip", "-j", "netns", "list") or "[]")
  removed = []
  for name in [entry["name"] for entry in listed]:
    owner = re.fullmatch(rf"{PREFIX}(\d+)-(\d+|hub|probe)", name)
    if owner and not pathlib.Path("/proc", owner[1]).exists():
      _remove(name)
      removed.append(name)
  return removed


def _make_hub(hub: str, mtu: int) -> None:
  _run("ip", "netns", "add", hub)
  _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
  _run("ip", "-n", hub, "link", "set", "bridge", "up", "mtu", str(mtu))


def _make_node(i: int, name: str, address: str, hub: str, mtu: int) -> None:
  port = f"port{i}"
  _run("ip", "netns", "add", name)
  for namespace in (name, hub):
    for path, value in SETTINGS.items():
      write = f"echo {value} > /proc/sys/net/{path}"
      # This command fails, without harm, if the kernel has no IPv6 or no Reno.
      subprocess.run(
        ["ip", "netns", "exec", namespace, "sh", "-c", write], capture_output=True
      )
  _run(
    *("ip", "-n", hub, "link", "add", port, "mtu", str(mtu), "type", "veth"),
    *("peer", "name", "eth0", "mtu", str(mtu), "netns", name),
  )
  _run("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
  # Sets one segment per frame. Otherwise the kernel passes on 64 kB at a time, and the
  # counters show these bytes as one frame with one header.
  _run("ip", "-n", name, "link", "set", "eth0", "gso_max_segs", "1", "up")
  _run("ip", "-n", name, "link", "set", "lo", "up")
  _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
  # The full queue of a slow link delays a frame by up to a second. The frame is not
  # lost, so TCP must wait that long before it sends the frame again.
  subnet = f"{address.rpartition('.')[0]}.0/24"
  _run("ip", "-n", name, "route", "change", subnet, "dev", "eth0", "rto_min", "1s")
  # Gloo binds to the address of the host name; the host's /etc/hosts says 127.0.0.1.
  hosts = pathlib.Path("/etc/netns", name, "hosts")
  hosts.parent.mkdir(parents=True, exist_ok=True)
  hosts.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")


def _remove(name: str) -> None:
  """Kills the processes in a namespace, then removes it; ignores failed commands."""
  found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
  for pid in found.stdout.split():
    with contextlib.suppress(ProcessLookupError):
      os.kill(int(pid), signal.SIGKILL)
  subprocess.run(["ip", "netns", "del", name], capture_output=True)
  shutil.rmtree(pathlib.Path("/etc/netns", name), ignore_errors=True)


def _settle(name: str) -> subprocess.Popen:
  """Starts an idle process in a namespace; `_remove` kills the process.

  Its folder in /proc shows the namespace's counters to processes outside.
  """
  stay = ["sh", "-c", "echo inside; exec sleep infinity"]
  command = ["ip", "netns", "exec", name, *stay]
  process = subprocess.Popen(command, stdout=subprocess.PIPE)
  if not process.stdout.readline():
    raise RuntimeError(f"namespace {name} could not be entered.")
  return process


def _run(*argv: str) -> str:
  done = subprocess.run(argv, capture_output=True, text=True)
  if done.returncode:
    raise RuntimeError(f"{' '.join(argv)} failed: {done.stderr.strip()}")
  return done.stdout
