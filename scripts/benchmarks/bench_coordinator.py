"""What a coordinator needs: memory, time per round, bytes of its link (docs/sites.md).

  python scripts/benchmarks/bench_coordinator.py --config=configs/chinchilla.py:150M,M=4

Applies closed rounds with random codes, one of each fragment, as the coordinator does
when all sites have sent. No site and no network takes part.
"""

import os
import pathlib
import resource
import sys
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

from diloco.config import changed
from diloco.config.command_line import load_config
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.coordinator.group import OuterGroup
from diloco.contrib.sites.coordinator.journal import Entry, Journal
from diloco.spec.shapes import num_params
from diloco.util.command import Parser, guarded


def main() -> None:
  parser = Parser(description=__doc__)
  parser.add_argument("--config", required=True, help="as for diloco.main")
  parser.add_argument("--folder", help="for the journal and the checkpoint")
  args, overrides = parser.parse_known_args()
  c = load_config(args.config, overrides)
  c = changed(c, {"overlap.transport": "sites", "checkpoint.every": 0})
  with tempfile.TemporaryDirectory(dir=args.folder) as folder:
    measure(Calendar(c), pathlib.Path(folder))


def measure(calendar: Calendar, workdir: pathlib.Path) -> None:
  journal, c = Journal(workdir), calendar.config
  group = OuterGroup(calendar, workdir, journal)
  idle = resident()
  print(f"parameters           {num_params(c.model):,}")
  print(f"sites                {calendar.sites}")
  print(f"memory, idle         {idle / 1e9:.2f} GB")
  rng, seconds, written = np.random.default_rng(0), [], []
  # The first round compiles; fragments of other shapes compile again.
  for r in range(2 * calendar.fragments):
    size = calendar.payload_bytes(r)
    # Scale bytes of 100 to 155 decode to finite values.
    sent = rng.integers(100, 156, size, dtype=np.uint8).tobytes()
    step, fragment = calendar.rounds[r]
    payloads = dict.fromkeys(range(calendar.sites), sent)
    tokens = dict.fromkeys(payloads, 1)
    entry = Entry(r, fragment, step, tokens, payloads, (), {}, 0.0)
    began = time.perf_counter()
    journal.write(entry)
    written.append(time.perf_counter() - began)
    began = time.perf_counter()
    group.apply(entry)
    if r >= calendar.fragments:
      seconds.append(time.perf_counter() - began)
  largest = max(calendar.payload_bytes(r) for r in range(calendar.fragments))
  print(f"memory, at most      {resident(peak=True) / 1e9:.2f} GB")
  print(f"snapshot             {len(group.snapshot()[1]) / 1e9:.2f} GB, for a newcomer")
  print(f"largest payload      {largest / 1e6:.2f} MB of a site")
  print(f"received per round   {calendar.sites * largest / 1e6:.2f} MB")
  relayed = calendar.sites * (calendar.sites - 1) * largest
  print(f"sent per round       {relayed / 1e6:.2f} MB")
  print(f"journal              {max(written):.2f} s per round, at most")
  print(f"outer step           {max(seconds):.2f} s per round, at most")
  group.close()


def resident(peak: bool = False) -> int:
  """Returns this process's resident memory in bytes."""
  if peak:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
  return int(pages) * resource.getpagesize()


if __name__ == "__main__":
  sys.exit(guarded(main))
