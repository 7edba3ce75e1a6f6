"""Measures how long payloads of two sites take to cross limited links.

  python scripts/experiments/crossing_bench.py

Both sites send a payload at the same moment. The time ends when both know that the
round is closed. It is divided by bytes / rate. The links of the sites are limited, that
of the coordinator is not. Connections, messages, relay and journal are those of
diloco/coordinator, with TLS; nothing is trained. Then nothing is sent for --quiet
seconds. Bytes are those of the interfaces' counters, headers included. Needs root,
iproute2 and the package cryptography.
"""

import argparse
import asyncio
import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import types

import netns
import numpy as np
import sites_run

from diloco.contrib.sites import SitesConfig, security
from diloco.contrib.sites.coordinator.board import Board
from diloco.contrib.sites.coordinator.journal import Journal
from diloco.contrib.sites.coordinator.rounds import Measured
from diloco.contrib.sites.coordinator.server import Server
from diloco.contrib.sites.link import Link
from diloco.util.command import Parser

SITES = 2
_LEAD_S = 0.3  # A round is announced so much earlier: both sites start together.


@dataclasses.dataclass(frozen=True)
class Calendar:
  """Stands in for `calendar.Calendar`: every round has the size that is given."""

  sizes: tuple[int, ...]
  sites: int = SITES
  fsdp: int = 1
  fragments: int = 1
  replicas_per_site: int = 1

  @property
  def config(self):
    some = types.SimpleNamespace
    train, overlap = some(steps=len(self.sizes)), some(taus=(0,))
    sites = SitesConfig(lend_after=0)  # There is no text to lend.
    return some(of=lambda _: sites, to_dict=dict, train=train, overlap=overlap)

  @property
  def rounds(self) -> list[tuple[int, int]]:
    return [(t + 1, 0) for t in range(len(self.sizes))]

  def payload_bytes(self, number: int) -> int:
    return self.sizes[number]

  def shards_of(self, site: int) -> list[str]:
    return [str(site)]


class Group:
  """Stands in for the outer state: there is none."""

  def __init__(self):
    self.applied, self.data = 0, {}

  def apply(self, entry) -> None:
    del entry
    self.applied += 1

  def snapshot(self) -> tuple[int, bytes]:
    return 0, b""

  def agrees(self, applied: int, digests: list[int]) -> bool:
    del digests
    return applied == 0


def coordinate(options) -> None:
  """The coordinator's process."""

  async def serve():
    tls = options.folder / "tls" / sites_run.COORDINATOR
    credentials = security.server_credentials(options.address, str(tls), False)
    journal = Journal(options.folder)
    board = Board(Calendar(options.sizes), journal, lambda line: None)
    await Server(board).serve(options.address, credentials)
    measure = lambda number, payloads: dict.fromkeys(payloads, Measured(1.0))
    await asyncio.gather(board.close_rounds(measure), board.apply_rounds(Group))

  asyncio.run(serve())


def send(options) -> None:
  """A site's process: reads rounds and times, prints when they began and ended."""
  tls = str(options.folder / "tls" / f"site-{options.site}")
  channel = functools.partial(security.channel, options.address, tls, False)
  hello = {"site": options.site, "config": {}}
  say = lambda line: print(line, file=sys.stderr)
  link = Link(channel, options.address, hello, say, room=8)
  link.join(fsdp=1, round=0, digests=[])
  link.ready(0)
  link.wait_for_start(lambda: False)
  print("ready", flush=True)
  for line in sys.stdin:
    number, begin = json.loads(line)
    data = np.random.default_rng(number).bytes(options.sizes[number])
    time.sleep(max(begin - time.time(), 0))
    link.send(number, data, {"tokens": 1, "per_step": 1, "data": {}})
    link.wait_until(number, lambda: False)
    print(time.time(), flush=True)
    link.forget(number + 1)
  link.leave("finished")


def measure(options, network: netns.Network) -> None:
  """Measures all rates and sizes; prints the rows of the table."""
  with tempfile.TemporaryDirectory(prefix="crossing_") as name:
    folder = pathlib.Path(name)
    sites_run.certificates(folder, SITES)
    per_rate = [size for size in options.sizes for _ in range(options.repeats)]
    sizes = per_rate * len(options.rates)
    argv = [sys.executable, __file__, f"--folder={folder}"]
    argv += [f"--address={sites_run.listen(network)}"]
    argv += [f"--sizes={','.join(map(str, sizes))}"]
    start = functools.partial(subprocess.Popen, text=True, cwd=sites_run.ROOT)
    server = start(network.command(0, [*argv, "--role=coordinator"]))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    sites = [
      start(network.command(k + 1, [*argv, "--role=site", f"--site={k}"]), **pipes)
      for k in range(SITES)
    ]
    try:
      for site in sites:
        assert site.stdout.readline() == "ready\n", "a site has failed"
      _print_rows(options, network, sites, sizes)
    finally:
      sites_run.stop([*sites, server])


def _print_rows(options, network, sites, sizes) -> None:
  counted = lambda: np.array([network.counters(k + 1) for k in range(SITES)])
  rounds = iter(range(len(sizes)))
  for rate in options.rates:
    network.limit(rate, nodes=range(1, SITES + 1))
    for size in options.sizes:
      seconds, before = [], counted()
      for number in [next(rounds) for _ in range(options.repeats)]:
        begin = time.time() + _LEAD_S
        for site in sites:
          site.stdin.write(json.dumps([number, begin]) + "\n")
          site.stdin.flush()
        seconds.append(max(float(site.stdout.readline()) for site in sites) - begin)
      time.sleep(_LEAD_S)
      ratios = np.array(seconds) * rate / 8 / size
      sent = (counted() - before)[:, 1].mean() / options.repeats
      print(
        f"| {rate / 1e6:g} | {size:,} | {np.median(ratios):.3f} | {ratios.min():.3f}"
        f" | {ratios.max():.3f} | {sent / size:.4f} |",
        flush=True,
      )
  before = counted()
  time.sleep(options.quiet)
  received, sent = (counted() - before).mean(axis=0) / max(options.quiet, 1)
  quiet = f"quiet for {options.quiet:g} s"
  print(f"{quiet}: a site sends {sent:.1f} bytes/s and receives {received:.1f}")


HEADER = (
  "| Mbit/s | payload | time / (bytes / rate) | least | most | sent / payload |\n"
  "|--:|--:|--:|--:|--:|--:|"
)


def parse(argv=None):
  """Parses the command line."""
  parser = Parser(description=__doc__)
  add = parser.add_argument
  rates = lambda text: [1e6 * float(x) for x in text.split(",")]
  sizes = lambda text: tuple(int(float(x)) for x in text.split(","))
  text = "comma-separated, in Mbit/s"
  add("--rates", type=rates, default=rates("8,16,64"), help=text)
  text = "comma-separated, bytes of a payload"
  add("--sizes", type=sizes, default=sizes("1e5,1e6,4e6"), help=text)
  add("--repeats", type=int, default=5, help="rounds for each rate and size")
  add("--quiet", type=float, default=60, help="seconds without payloads at the end")
  add("--role", choices=("coordinator", "site"), help=argparse.SUPPRESS)
  add("--site", type=int, help=argparse.SUPPRESS)
  add("--address", help=argparse.SUPPRESS)
  add("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
  return parser.parse_args(argv)


def main() -> None:
  options = parse()
  if options.role:
    {"coordinator": coordinate, "site": send}[options.role](options)
    return
  netns.prepare()
  print(HEADER)
  with netns.star(SITES + 1) as network:
    measure(options, network)


if __name__ == "__main__":
  main()
