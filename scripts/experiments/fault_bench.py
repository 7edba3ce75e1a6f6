"""Trains four sites through a storm of faults: goodput, an audit, a table.

  python scripts/experiments/fault_bench.py --out=/tmp/storm --faults=10 --every=60
  python scripts/experiments/fault_bench.py --out=/tmp/calm --faults=0

The coordinator and each site have a network namespace (netns.py) and run
configs/faults.py. The storm follows from --seed: a site is killed, paused, cut off or
slowed, or the coordinator is killed. A killed process starts again with the same
command after --restart_after seconds. With --baseline the run has no coordinator: the
sites exchange with overlap.transport=host, and when a process ends, all start again
from the last checkpoint.

Goodput is the tokens behind all applied contributions over seconds, while the storm
lasts (--faults times --every seconds; without faults until the end). It begins after
the first rounds, in which programs compile. The run goes on to its end. The audit
(fault_audit.py) reads the coordinator's rounds.jsonl, the metrics.jsonl of all sites,
and the last checkpoints. Writes faults.json in --out, which must be new. Needs root,
iproute2 and the package cryptography.
"""

import collections
import contextlib
import dataclasses
import json
import pathlib
import random
import sched
import signal
import subprocess
import sys
import time

import fault_audit
import netns
import sites_run

from diloco.util.command import Parser

CONFIG = "configs/faults.py"
SITES = 4
COORDINATOR = -1
KINDS = ("kill", "pause", "cut", "slow", "kill coordinator")
LONGEST_S = 15.0  # A pause, a cut or a slow link lasts 2 s to this long.
WARM = {False: 15, True: 50}  # Rounds, in the baseline steps, before all is compiled.
BACK_S = 10.0  # A process that starts again is not struck so long.
SLOWER = 8  # A slow link has this part of the rate.


@dataclasses.dataclass(frozen=True)
class Fault:
  """A fault that strikes at a time.

  Attributes:
    at: seconds after the first rounds.
    kind: one of KINDS.
    site: which site it strikes; COORDINATOR.
    seconds: how long it lasts; for `kill` until the process starts again.
  """

  at: float
  kind: str
  site: int
  seconds: float


def draw(seed: int, faults: int, every: float, restart_after: float) -> list[Fault]:
  """Draws a storm: times are uniform, and so are kinds and sites.

  A site, or the coordinator, is struck again only after its last fault has ended. If
  all that a kind could strike are busy, the fault comes later.
  """
  rng = random.Random(seed)
  times = sorted(rng.uniform(0, faults * every) for _ in range(faults))
  free_at = collections.defaultdict[int, float](float)
  storm = list[Fault]()
  for at in times:
    kind = rng.choice(KINDS)
    seconds = restart_after if "kill" in kind else rng.uniform(2, LONGEST_S)
    sites = [COORDINATOR] if kind == "kill coordinator" else [*range(SITES)]
    rng.shuffle(sites)
    site = min(sites, key=lambda k: max(free_at[k], at))
    at = max(free_at[site], at)
    free_at[site] = at + seconds + (BACK_S if "kill" in kind else 1)
    storm.append(Fault(at, kind, site, seconds))
  return sorted(storm, key=lambda fault: fault.at)


class Run:
  """The processes of a run in their namespaces, and what happens to them."""

  def __init__(self, options, network: netns.Network):
    self.options, self.network = options, network
    self.folder: pathlib.Path = options.out
    self.processes: dict[int, subprocess.Popen] = {}
    self.unplanned = list[str]()  # Processes that ended by themselves, with an error.
    self.restarts = 0
    self._events = sched.scheduler(time.monotonic)
    self.everyone = (
      [*range(SITES)] if options.baseline else [COORDINATOR, *range(SITES)]
    )
    # An all-gather sends a payload to each of the others; to the coordinator, once.
    self.rate = options.rate * (SITES - 1 if options.baseline else 1)

  def start(self, who: int) -> None:
    """Starts a process; its output goes on in the same file."""
    fields = [*self.options.fields, f"--config.seed={self.options.seed}"]
    place = (self.folder, CONFIG, fields)
    if self.options.baseline:
      fields.append("--config.overlap.transport=host")
      command = sites_run.process(self.network, range(1, SITES + 1), who, *place)
    elif who == COORDINATOR:
      command = sites_run.coordinator(self.network, *place)
    else:
      command = sites_run.site(self.network, who, *place)
    # A restart does not compile again.
    env = {"JAX_COMPILATION_CACHE_DIR": str(self.folder.absolute() / "compiled")}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    log = self.folder / f"{self.name(who)}.log"
    self.processes[who] = sites_run.start(command, log, **env)

  def name(self, who: int) -> str:
    return sites_run.names(SITES)[who + 1]

  def after(self, seconds: float, action, *arguments) -> None:
    """Calls a function later, in `wait`."""
    self._events.enter(seconds, 0, action, arguments)

  def strike(self, fault: Fault) -> None:
    """Lets a fault begin; it ends by itself."""
    print(f"{fault.at:6.1f} s: {fault.kind} {self.name(fault.site)}", flush=True)
    # Without a coordinator, process 0 leads.
    who = max(fault.site, 0) if self.options.baseline else fault.site
    if "kill" in fault.kind:
      self.processes[who].kill()
      if not self.options.baseline:  # There `look_after` starts all again.
        self.after(fault.seconds, self._again, who)
    elif fault.kind == "pause":
      self.processes[who].send_signal(signal.SIGSTOP)
      self.after(fault.seconds, self.processes[who].send_signal, signal.SIGCONT)
    elif fault.kind == "cut":
      self.network.connect(who + 1, up=False)
      self.after(fault.seconds, self.network.connect, who + 1, True)
    else:
      self.network.limit(self.rate / SLOWER, [who + 1])
      self.after(fault.seconds, self._full_rate, who)

  def _full_rate(self, who: int) -> None:
    self.network.limit(None, [who + 1])
    self.network.limit(self.rate, [who + 1], upload_only=True)

  def _again(self, who: int) -> None:
    self.processes[who].wait()
    self.restarts += 1
    self.start(who)

  def look_after(self) -> bool:
    """Starts what ended with an error; returns whether all have finished."""
    codes = {who: process.poll() for who, process in self.processes.items()}
    events = self._events.queue
    planned = [event.argument[0] for event in events if event.action == self._again]
    failed = [who for who, rc in codes.items() if rc and who not in planned]
    if self.options.baseline:
      if failed and not planned:
        for process in self.processes.values():
          process.kill()
        for who in self.everyone:
          self.after(self.options.restart_after, self._again, who)
    else:
      for who in failed:
        self.unplanned.append(f"{self.name(who)} ended with {codes[who]}")
        print(f"  {self.unplanned[-1]}", flush=True)
        self.after(self.options.restart_after, self._again, who)
    return all(rc == 0 for rc in codes.values())

  def wait(self) -> None:
    """Does what is due."""
    time.sleep(0.05)
    self._events.run(blocking=False)

  def progress(self) -> int:
    """Counts closed rounds; in the baseline, the steps of the metrics so far."""
    if not self.options.baseline:
      path = self.folder / sites_run.COORDINATOR / "rounds.jsonl"
      return path.read_bytes().count(b"\n") if path.exists() else 0
    found = fault_audit.lines(self.folder / "run/metrics.jsonl")
    return max((r["step"] for r in found if r["kind"] == "step"), default=0)


def weather(run: Run, storm: list[Fault]) -> dict:
  """Runs to the end, or to the limit; returns what was observed from outside."""
  for who in run.everyone:
    run.start(who)
  began, at, warm, first, changed = time.monotonic(), 0, 0, 0.0, 0.0
  longest, storm_s = 0.0, run.options.faults * run.options.every
  counted: tuple[int, float] | None = None  # Progress, seconds: when the storm ends.
  while not run.look_after():
    run.wait()
    now, found = time.monotonic(), run.progress()
    if found > at:
      if warm:
        longest = max(longest, now - changed)
      elif found >= WARM[run.options.baseline]:
        warm, first = found, now
        for fault in storm:
          run.after(fault.at, run.strike, fault)
      at, changed = found, now
    if warm and not counted and storm and now - first > storm_s:
      counted = at, now - first
    if warm and now - first > run.options.limit:
      print(f"stopped after {run.options.limit:g} s", flush=True)
      break
    if not warm and now - began > 300:
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
  }


def result(options, storm: list[Fault], observed: dict) -> dict:
  """Adds goodput, the audit and the loss to what was observed."""
  kinds = [f.kind for f in storm[: observed["faults"]]]
  found = {
    "seed": options.seed,
    "kinds": {kind: kinds.count(kind) for kind in KINDS},
    **observed,
  }
  if options.baseline:
    c = fault_audit.config(CONFIG, options.fields)
    tokens = (observed["reached"] - observed["first"]) * c.tokens_per_step
    summary = options.out / "run/summary.json"
  else:
    measured = slice(observed["first"], observed["reached"])
    audit = fault_audit.audit(options.out, CONFIG, options.fields, measured)
    found |= audit
    tokens, summary = audit["tokens"], options.out / "site-0/summary.json"
  found["tokens_per_s"] = tokens / observed["seconds"]
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
  add("--limit", type=float, default=3600, help="seconds; then the run is stopped")
  add("--baseline", action="store_true", help="all restart from the last checkpoint")
  options, options.fields = parser.parse_known_args(argv)
  for field in options.fields:
    if not field.startswith("--config."):
      parser.error(f"{field} is unknown; give --config.NAME=VALUE")
  return options


def main() -> None:
  options = parse()
  netns.prepare()
  if options.out.exists() and any(options.out.iterdir()):
    sys.exit(f"error: --out is {options.out}, which is not empty; choose a new folder.")
  options.out.mkdir(parents=True, exist_ok=True)
  storm = draw(options.seed, options.faults, options.every, options.restart_after)
  sites_run.certificates(options.out, SITES)
  with netns.star(SITES + 1) as network:
    run = Run(options, network)
    network.limit(run.rate, range(1, SITES + 1), upload_only=True)
    try:
      observed = weather(run, storm)
    finally:
      sites_run.stop(run.processes.values())
  found = result(options, storm, observed)
  (options.out / "faults.json").write_text(json.dumps(found, indent=1) + "\n")
  print(json.dumps(found, indent=1))
  if found.get("problems"):
    sys.exit("error: the audit found problems.")


if __name__ == "__main__":
  main()
