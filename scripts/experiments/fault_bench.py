"""Trains sites during a storm of random faults; measures goodput and audits the run.

  python scripts/experiments/fault_bench.py --out=/tmp/storm --faults=10 --every=60
  python scripts/experiments/fault_bench.py --out=/tmp/calm --faults=0

Each site has a network namespace (netns.py) and runs configs/faults.py. --seed decides
the faults: a site is killed, paused, cut off or (with --s3) slowed, or the site that
has the lease is killed. A killed process starts again with the same command after
--restart_after seconds.

The sites meet in a folder on the disk; a site that is cut off sees an empty folder to
which it cannot write. With --s3 they meet in a bucket, and the faults cut and slow the
links to the bucket.

Sites may differ. In this example, one of two sites has half the speed of the other:

  ... --config.replicas=2 --step=0.1,0.2 --of_site=1:--config.sites.pace=0.5

Goodput is the number of tokens in all applied contributions per second of the storm.
The storm lasts --faults times --every seconds (without faults, until the run ends). It
begins after the first rounds, in which programs compile. After the storm, the run goes
on to its end. The audit (fault_audit.py) reads the closed rounds, the metrics.jsonl of
all sites, and the last checkpoints. Writes faults.json in --out, which must be new.
Needs root and iproute2, and moto[server] for --s3.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import pathlib
import random
import re
import sched
import signal
import subprocess
import sys
import time

import fault_audit
import netns
import sites_run

from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.group.records import unpack
from diloco.util.command import Parser

CONFIG = "configs/faults.py"
LEADER = -1  # The site that has the lease when the fault strikes.
KINDS = ("kill", "pause", "cut", "slow", "kill leader")
LONGEST_S = 15.0  # The longest pause, cut or slow link; the shortest lasts 2 s.
WARM = 15  # All programs are compiled after this many rounds.
BACK_S = 10.0  # Seconds after a restart in which no fault strikes the process.
SLOWER = 8  # A slow link has 1 / SLOWER of the rate.


@dataclasses.dataclass(frozen=True)
class Fault:
  """A fault, and when it strikes.

  Attributes:
    at: seconds after the first WARM rounds.
    kind: one of KINDS.
    site: the site that it strikes, or LEADER.
    seconds: how long it lasts; for `kill` until the process starts again.
  """

  at: float
  kind: str
  site: int
  seconds: float


def draw(options, sites: int) -> list[Fault]:
  """Draws a storm: times, kinds and sites have uniform distributions.

  A site, or the leader, is struck again only after its last fault has ended. If all
  sites that a kind could strike have a fault at this time, the new fault comes later.
  """
  rng, seconds = random.Random(options.seed), options.faults * options.every
  times = sorted(rng.uniform(0, seconds) for _ in range(options.faults))
  free_at = collections.defaultdict[int, float](float)
  storm = list[Fault]()
  for at in times:
    kind = rng.choice(options.kinds)
    seconds = options.restart_after if "kill" in kind else rng.uniform(2, LONGEST_S)
    struck = [LEADER] if kind == "kill leader" else [*range(sites)]
    rng.shuffle(struck)
    site = min(struck, key=lambda k: max(free_at[k], at))
    at = max(free_at[site], at)
    free_at[site] = at + seconds + (BACK_S if "kill" in kind else 1)
    storm.append(Fault(at, kind, site, seconds))
  return sorted(storm, key=lambda fault: fault.at)


class Run:
  """The processes of a run in their namespaces, and the faults that strike them."""

  def __init__(self, options, network: netns.Network):
    self.options, self.network = options, network
    self.folder: pathlib.Path = options.out
    self.processes: dict[int, subprocess.Popen] = {}
    self.unplanned = list[str]()  # Processes that ended by themselves, with an error.
    self.restarts = 0
    self._events = sched.scheduler(time.monotonic)
    self.bucket = sites_run.Bucket(network, self.folder) if options.s3 else None
    self._progress_at = self._progress = 0

  def start(self, who: int) -> None:
    """Starts the process of a site; appends its output to the log of the site."""
    o = self.options
    fields = [*o.fields, f"--config.seed={o.seed}", *o.of_site.get(who, [])]
    group = self.bucket.address if self.bucket else ""
    command = sites_run.site(self.network, who, self.folder, CONFIG, fields, group)
    # With this cache, a restarted process does not compile again.
    env = {"JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled")}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    env |= self.bucket.variables if self.bucket else {}
    if o.step:
      command = sites_run.paced(command)
      env["STEP_S"] = str(o.step[min(who, len(o.step) - 1)])
    log = self.folder / f"{sites_run.name(who)}.log"
    self.processes[who] = sites_run.start(command, log, **env)

  def file(self, name: str) -> bytes:
    """Returns a file of the group."""
    if self.bucket:
      return self.bucket.file(name)
    return (self.folder / sites_run.GROUP / name).read_bytes()

  def leader(self) -> int:
    """Returns the site that has the lease now."""
    while not (found := unpack(self.file("lease"))):  # Half-written, or server busy.
      time.sleep(0.2)
    return found[0]["site"]

  def after(self, seconds: float, action, *arguments) -> None:
    """Calls a function later, in `wait`."""
    self._events.enter(seconds, 0, action, arguments)

  def strike(self, fault: Fault) -> None:
    """Begins a fault, and schedules its end."""
    who = self.leader() if fault.site == LEADER else fault.site
    if self.processes[who].poll() is not None:  # The leader may be dead already.
      self.after(1, self.strike, fault)
      return
    print(f"{fault.at:6.1f} s: {fault.kind} {sites_run.name(who)}", flush=True)
    if "kill" in fault.kind:
      self.processes[who].kill()
      self.after(fault.seconds, self._again, who)
    elif fault.kind == "pause":
      self.processes[who].send_signal(signal.SIGSTOP)
      self.after(fault.seconds, self.processes[who].send_signal, signal.SIGCONT)
    elif fault.kind == "cut":
      self.connect(who, False)
      self.after(fault.seconds, self.connect, who, True)
    else:
      self.network.limit(self.options.rate / SLOWER, [who + 1])
      self.after(fault.seconds, self.full_rate, who)

  def connect(self, who: int, up: bool) -> None:
    """Cuts a site off from its group, or connects it again."""
    if self.bucket:
      self.network.connect(who + 1, up)
      return
    # A process in a network namespace has its own mounts, which end with the process.
    group = str(self.folder / sites_run.GROUP)
    mount = ["umount"] if up else ["mount", "-t", "tmpfs", "-o", "ro", "cut"]
    inside = ["nsenter", "-m", "-t", str(self.processes[who].pid), *mount, group]
    subprocess.run(inside, stderr=subprocess.DEVNULL)

  def full_rate(self, who: int) -> None:
    self.network.limit(None, [who + 1])
    self.network.limit(self.options.rate, [who + 1], upload_only=True)

  def _again(self, who: int) -> None:
    self.processes[who].wait()
    self.restarts += 1
    self.start(who)

  def look_after(self) -> bool:
    """Schedules restarts of failed processes; returns whether all have finished."""
    codes = {who: process.poll() for who, process in self.processes.items()}
    events = self._events.queue
    planned = [event.argument[0] for event in events if event.action == self._again]
    failed = [who for who, rc in codes.items() if rc and who not in planned]
    for who in failed:
      self.unplanned.append(f"{sites_run.name(who)} ended with {codes[who]}")
      print(f"  {self.unplanned[-1]}", flush=True)
      self.after(self.options.restart_after, self._again, who)
    return all(rc == 0 for rc in codes.values())

  def wait(self) -> None:
    """Runs the scheduled calls that are due."""
    time.sleep(0.05)
    self._events.run(blocking=False)

  def progress(self) -> int:
    """Counts closed rounds."""
    if self.bucket and time.monotonic() - self._progress_at < 1:
      return self._progress  # Each look into the bucket starts a process.
    self._progress_at = time.monotonic()
    journal = (self.folder / sites_run.GROUP / "journal").glob("*.round")
    names = self.bucket.names("journal/") if self.bucket else map(str, journal)
    rounds = [int(r) + 1 for r in re.findall(r"(\d{9})\.round", " ".join(names))]
    self._progress = max([self._progress, *rounds])
    return self._progress


def weather(run: Run, sites: int, storm: list[Fault]) -> dict:
  """Runs the sites to the end, or to --limit; returns what was seen from outside."""
  for who in range(sites):
    run.start(who)
  began, at, warm, first, changed = time.monotonic(), 0, 0, 0.0, 0.0
  stopped, longest, storm_s = False, 0.0, run.options.faults * run.options.every
  counted: tuple[int, float] | None = None  # (rounds, seconds) at the storm's end.
  while not run.look_after():
    run.wait()
    now, found = time.monotonic(), run.progress()
    if found > at:
      if warm:
        longest = max(longest, now - changed)
      elif found >= WARM:
        warm, first = found, now
        for fault in storm:
          run.after(fault.at, run.strike, fault)
      at, changed = found, now
    if warm and not counted and storm and now - first > storm_s:
      counted = at, now - first
    if warm and now - first > run.options.limit:
      stopped = True
      break
    if not warm and now - began > 900:
      raise RuntimeError(f"training does not begin; see {run.folder}")
  reached, seconds = counted or (at, changed - first)
  return {
    "first": warm,
    "reached": reached,
    "seconds": seconds,
    "wall_s": changed - first,
    "longest_without_a_round_s": longest,
    "faults": sum(fault.at < changed - first for fault in storm),
    "restarts": run.restarts,
    "unplanned": run.unplanned,
    "stopped": stopped,
  }


def result(options, storm: list[Fault], observed: dict) -> dict:
  """Adds goodput, the audit and the loss to what was observed."""
  kinds = [f.kind for f in storm[: observed["faults"]]]
  found = {
    "seed": options.seed,
    "kinds": {kind: kinds.count(kind) for kind in KINDS},
    **observed,
  }
  measured = slice(observed["first"], observed["reached"])
  args = (options.out, CONFIG, options.fields, options.of_site, measured)
  found |= fault_audit.audit(*args, observed["stopped"])
  found["tokens_per_s"] = found["tokens"] / observed["seconds"]
  summary = options.out / "site-0/summary.json"
  with contextlib.suppress(OSError):
    found["loss"] = json.loads(summary.read_text())["eval_loss"]["outer"]
  return found


def parse(argv=None):
  """Parses the command line; unknown flags --config.NAME=VALUE change the config."""
  parser = Parser(description=__doc__)
  add = parser.add_argument
  add("--out", type=pathlib.Path, required=True, help="new folder for the run")
  add("--seed", type=int, default=0, help="of the storm and of the run")
  add("--faults", type=int, default=10, help="number of faults")
  add("--every", type=float, default=60, help="mean seconds between two faults")
  add("--restart_after", type=float, default=5, help="seconds until a restart")
  add("--rate", type=float, default=4e6, help="bits per second of the uploads")
  numbers = lambda text: [float(x) for x in text.split(",")]
  text = "seconds of an inner step of site 0, 1, ...; more sites have the last"
  add("--step", type=numbers, default=[], help=text)
  text = "a field of site K alone, K:--config.NAME=VALUE; may be repeated"
  add("--of_site", action="append", default=[], help=text)
  add("--kinds", help=f"comma-separated kinds of fault, of {', '.join(KINDS)}")
  add("--limit", type=float, default=3600, help="seconds; then the run is stopped")
  add("--s3", action="store_true", help="the sites meet in a bucket, not in a folder")
  options, options.fields = parser.parse_known_args(argv)
  for field in options.fields:
    if not field.startswith("--config."):
      parser.error(f"{field} is unknown; give --config.NAME=VALUE")
  own = [field.partition(":") for field in options.of_site]
  options.of_site = {int(k): [f for j, _, f in own if j == k] for k, _, _ in own}
  known = [kind for kind in KINDS if kind != "slow" or options.s3]
  options.kinds = options.kinds.split(",") if options.kinds else known
  if unknown := {*options.kinds} - {*known}:
    parser.error(f"--kinds has {', '.join(unknown)}; choose of {', '.join(known)}")
  options.out = options.out.absolute()
  return options


def main() -> None:
  options = parse()
  netns.prepare()
  if options.out.exists() and any(options.out.iterdir()):
    sys.exit(f"error: --out is {options.out}, which is not empty; choose a new folder.")
  options.out.mkdir(parents=True, exist_ok=True)
  sites = Calendar(fault_audit.config(CONFIG, options.fields)).sites
  storm = draw(options, sites)
  with netns.star(sites + 1) as network:
    run = Run(options, network)
    for k in range(sites):
      run.full_rate(k)
    try:
      observed = weather(run, sites, storm)
      if run.bucket:  # The audit reads a folder.
        for name in itertools.chain(*map(run.bucket.names, fault_audit.FILES)):
          path = options.out / sites_run.GROUP / name
          path.parent.mkdir(parents=True, exist_ok=True)
          path.write_bytes(run.file(name))
    finally:
      own = [run.bucket.process] if run.bucket else []
      sites_run.stop([*run.processes.values(), *own])
  found = result(options, storm, observed)
  (options.out / "faults.json").write_text(json.dumps(found, indent=1) + "\n")
  print(json.dumps(found, indent=1))
  if found.get("problems"):
    sys.exit("error: the audit found problems.")


if __name__ == "__main__":
  main()
