r"""Simulates how much training is left when chips fail (Decoupled DiLoCo, 2604.21428).

python -m diloco simulate failures --config=configs/chinchilla.py:10B,M=8 \
  --step_time=1 --gbits=10 --chips=1024,131072 --mtbf=1y,5y

Goodput is useful tokens per second, divided by the tokens per second that all chips
compute if no chip fails and no chip waits. A token is useful if its step is part of the
trained model in the end. There are six methods:

- data_parallel: a failure stops all chips. All restart from the last checkpoint.
- restart_all: DiLoCo, and a failure of one site stops all sites. All restart from the
  last checkpoint.
- all_wait: a failed site restarts alone. The other sites wait until all are back.
- quorum: a failed site restarts alone. The other sites go on while at least `quorum`
  sites are up.
- elastic: data-parallel that goes on without the chips that fail.
- elastic_sites: DiLoCo whose sites are elastic inside, and never wait for each other.

Rules of all methods:

- Failures are independent; the time to a chip's next failure is exponential. A failed
  chip stops its whole site, and fails as often while it restarts or waits.
- A failure during a restart begins the restart again.
- A share of the failures are hangs: they are noticed only after the grace time.
- The last step of a run sends everything, so that no work is lost at the end.

Rules of data_parallel and restart_all: a checkpoint stops all chips for a while.
Data-parallel has a network on which gradients take no time. With DiLoCo, the link slows
the steps down as in `steady.py`.

Rules of all_wait and quorum:

- A site sends each fragment as the schedule says. If the site fails before the payload
  has crossed the link, its inner steps since the last send of this fragment are lost. A
  fragment counts as its share of the parameters.
- After the restart, the site downloads parameters and momentum (float32) over its link,
  and takes the step count of the group. It does not repeat lost steps.
- The coordinator never fails, its link is never the bottleneck, and the outer state
  survives, even if all sites are down.
- If a site hangs, the others wait for the grace time minus the time of tau steps.
- If too few sites are up, the others wait immediately, not only at the next send.
- With fewer sites an exchange takes as long as with all, and downloads slow nobody.

Rules of elastic and elastic_sites:

- A failure stops a data-parallel group for the time `reconfigure`. Then it goes on
  without the `part` of its chips that hangs together with the failed one. These come
  back after the time `repair`. What fails during the stop is taken out in that stop.
- No step is lost, and goodput falls by the share of the chips that are away.
- With elastic_sites each site is such a group. So M sites behave like one group with
  1/M of the chips, apart from the link.

The defaults of these three times are fitted to four cells that Decoupled DiLoCo reports
at 1.2M chips; tests compare them with its cells at 2.4M chips (docs/simulate.md).

Times are seconds, sizes are bits, bandwidths are bits per second.
"""

import argparse
import dataclasses
import heapq
import itertools
import math
import re
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np

from diloco.errors import ConfigError
from diloco.simulate.arguments import Answer, Args, assumed, fields_of, workload
from diloco.simulate.limits import NO_ROUNDS, AboveZero, check, check_fields
from diloco.simulate.options import GROUPS, Command, Option, number, whole
from diloco.simulate.steady import steady_utilisation
from diloco.simulate.utilisation import LINKS, Workload
from diloco.spec.fields import NonNegative, Positive, Range, Share
from diloco.util.command import make_folder
from diloco.util.palette import legend, looks, panels, save

Rng = np.random.Generator
METHODS = {
  "data_parallel": "data-parallel, all restart",
  "restart_all": "DiLoCo, all restart",
  "all_wait": "DiLoCo, all wait",
  "quorum": "DiLoCo, quorum rounds",
  "elastic": "data-parallel, elastic",
  "elastic_sites": "DiLoCo, elastic sites",
}
MOST_FAILURES = 1e7  # In a run; more take minutes.
SNAPSHOT_BITS = 64  # Per parameter: the parameter and its outer momentum.
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "y": 365.25 * 86400}


@dataclasses.dataclass(frozen=True)
class Machines:
  """Chips that fail, and for how long they are simulated.

  Attributes:
    chips: chips of all sites together.
    mtbf: mean time between failures of one chip.
    restart: from a failure to the first step, without the download of a snapshot.
    grace: the time after which the others stop waiting for a site that hangs.
    quorum: sites that must be up for rounds to go on.
    hangs: the share of failures that are hangs.
    checkpoint_time: for how long a checkpoint stops all chips.
    checkpoint_every: compute time between checkpoints; None: `daly_period`.
    reconfigure: for how long a failure stops an elastic group.
    part: chips that an elastic group loses by a failure.
    repair: time until these chips are back.
    duration: simulated length of a run.
    runs: number of runs.
    seed: seed of the failures.

  Raises:
    ValueError: a value is not possible.
  """

  chips: Positive
  mtbf: AboveZero
  restart: NonNegative = 300.0
  grace: NonNegative = 30.0
  quorum: Positive = 1
  hangs: Share = 0.0
  checkpoint_time: AboveZero = 30.0
  checkpoint_every: Annotated[float | None, Range(0, open=True)] = None
  reconfigure: NonNegative = 18.0
  part: Positive = 256
  repair: NonNegative = 4800.0
  duration: AboveZero = 30 * UNITS["d"]
  runs: Annotated[int, Range(1, 100_000)] = 10
  seed: Annotated[int, Range(0)] = 0

  def __post_init__(self) -> None:
    check_fields(self)


@dataclasses.dataclass(frozen=True)
class Row:
  """Simulated goodput.

  Attributes:
    chips, mtbf_s, step_time_s: the setting.
    utilisation: of DiLoCo on its link if no chip fails.
    goodput, deviation: for each of METHODS, the mean and the standard deviation of the
      runs.
  """

  chips: int
  mtbf_s: float
  step_time_s: float
  utilisation: float
  goodput: dict[str, float]
  deviation: dict[str, float]


def daly_period(checkpoint_time: float, mtbf: float) -> float:
  """Returns the compute time between checkpoints that loses least (Daly, 2006, eq. 37).

  Args:
    mtbf: mean time between failures of all chips together.
  """
  half = checkpoint_time / (2 * mtbf)
  if half >= 1:
    return mtbf
  series = 1 + math.sqrt(half) / 3 + half / 9
  return math.sqrt(2 * checkpoint_time * mtbf) * series - checkpoint_time


def simulate(work: Workload, rate: float, machines: Machines) -> Row:
  """Simulates runs with each of METHODS.

  Args:
    work: model, step time, schedule and payloads.
    rate: bandwidth of a site's link.

  Raises:
    ValueError: a value is not possible.
  """
  check("chips", machines.chips, Range(work.replicas))
  check("quorum", machines.quorum, Range(1, work.replicas))
  expected = machines.duration * machines.chips / machines.mtbf
  if expected > MOST_FAILURES:
    raise ValueError(
      f"duration is {show_time(machines.duration)}, in which {expected:.2g} chips fail;"
      f" give a shorter one, so that at most {MOST_FAILURES:g} fail."
    )
  speed = float(steady_utilisation(work, [rate])[0])
  rate *= LINKS[work.link].efficiency
  found = []
  for run in range(machines.runs):
    # Each method meets the same random numbers.
    seed = (machines.seed, run)
    part = checkpointed(machines, np.random.default_rng(seed))
    found.append([part, speed * part])
    for quorum in (work.replicas, machines.quorum):
      rng = np.random.default_rng(seed)
      part = rounds(work, rate, speed, machines, quorum, rng)
      found[run].append(speed * part)
    for sites, most in ((1, 1.0), (work.replicas, speed)):
      rng = np.random.default_rng(seed)
      parts = [elastic(machines, sites, rng) for _ in range(sites)]
      found[run].append(most * float(np.mean(parts)))
  return Row(
    machines.chips,
    machines.mtbf,
    work.step_time,
    speed,
    dict(zip(METHODS, np.mean(found, 0).tolist())),
    dict(zip(METHODS, np.std(found, 0).tolist())),
  )


def checkpointed(machines: Machines, rng: Rng) -> float:
  """Simulates chips that all restart from a checkpoint after every failure.

  Returns:
    The share of the time in which the chips compute steps that are not lost.
  """
  seconds, mtbf = machines.duration, machines.mtbf / machines.chips
  pause = machines.checkpoint_time
  period = machines.checkpoint_every or daly_period(pause, mtbf)
  clock = saved = 0.0
  while clock < seconds:
    up = rng.exponential(mtbf)
    whole, rest = divmod(min(up, seconds - clock), period + pause)
    saved += whole * period
    clock += up
    if clock >= seconds:
      saved += min(rest, period)
    clock += _notice(machines, rng)
    clock += _restart(machines.restart, mtbf, seconds - clock, rng)
  return saved / seconds


def rounds(
  work: Workload, rate: float, speed: float, machines: Machines, quorum: int, rng: Rng
) -> float:
  """Simulates sites that fail and restart one by one.

  Args:
    work, rate: as in `simulate`.
    speed: utilisation without failures.
    quorum: sites that must be up for rounds to go on.

  Returns:
    The useful steps of a site, divided by the steps of a run without failures.
  """
  schedule, fragments = work.whole_plan
  step = work.step_time / speed
  params = np.array([sum(work.params_per_layer[i] for i in ids) for ids in fragments])
  offsets = np.array([schedule.offset(p) for p in range(len(fragments))])
  upload = (work.latency + params * work.bits / rate) / step
  down = machines.restart + work.latency + sum(params) * SNAPSHOT_BITS / rate
  pause = max(machines.grace - min(schedule.taus) * step, 0.0)
  mtbf = machines.mtbf * work.replicas / machines.chips
  seconds = machines.duration

  def applied(joined: float, failed: float) -> float:
    """Returns the useful steps of a site that joined and failed at these steps."""
    whole = np.floor((failed - upload - offsets) / schedule.sync_every)
    last = whole * schedule.sync_every + offsets
    return float(np.average(np.maximum(last - joined, 0.0), weights=params))

  events = [(rng.exponential(mtbf), site) for site in range(work.replicas)]
  heapq.heapify(events)
  up = dict.fromkeys(range(work.replicas), 0.0)  # {site: the step at which it joined}.
  clock = paused = now = useful = 0.0  # `now` is the step of the group.
  while clock < seconds:
    at, site = heapq.heappop(events)
    end = min(at, seconds)
    if len(up) >= quorum:
      now += max(end - max(clock, paused), 0.0) / step
    clock = end
    if clock >= seconds:
      break
    if site in up:
      useful += applied(up.pop(site), now)
      noticed = _notice(machines, rng)
      if noticed:
        paused = max(paused, clock + pause)
      at += noticed + _restart(down, mtbf, seconds - clock, rng)
    else:
      up[site] = now
      at += rng.exponential(mtbf)
    heapq.heappush(events, (at, site))
  useful += sum(now - joined for joined in up.values())
  return useful / work.replicas * step / seconds


def elastic(machines: Machines, sites: int, rng: Rng) -> float:
  """Simulates one of `sites` groups that go on without the chips that fail.

  Returns:
    The share of the group's chips that compute, mean over the time.
  """
  seconds, chips = machines.duration, machines.chips / sites
  part, mtbf = min(machines.part / chips, 1.0), machines.mtbf / chips
  away = list[float]()  # A heap: when the parts that are away come back.
  clock = useful = 0.0
  while clock < seconds:
    end = min(clock + rng.exponential(mtbf), seconds)
    while clock < end:
      while away and away[0] <= clock:
        heapq.heappop(away)
      until = min([end, *away[:1]])
      useful += (until - clock) * max(1 - part * len(away), 0.0)
      clock = until
    clock += machines.reconfigure + _notice(machines, rng)
    heapq.heappush(away, clock + machines.repair)
  return useful / seconds


def _notice(machines: Machines, rng: Rng) -> float:
  """Draws the time until a failure is noticed."""
  return machines.grace if rng.random() < machines.hangs else 0.0


def _restart(needed: float, mtbf: float, limit: float, rng: Rng) -> float:
  """Draws the time of a restart that every failure begins again.

  Args:
    needed: the time without failures.
    mtbf: mean time between failures of the chips that restart.
    limit: later times do not matter.
  """
  seconds = 0.0
  while seconds < limit:
    failure = rng.exponential(mtbf)
    if failure >= needed:
      break
    seconds += failure
  return seconds + needed


def show_time(seconds: float) -> str:
  """Writes a time in its largest unit, such as 5y, 6h or 0.1s."""
  unit = next((u for u in reversed(UNITS) if UNITS[u] <= seconds), "s")
  return f"{seconds / UNITS[unit]:.4g}{unit}"


def show(rows: list[Row]) -> str:
  """Formats goodput as text: mean and standard deviation."""
  lines = [
    f"{'chips':>10}{'mtbf':>8}{'no failure':>12}"
    + "".join(f"{name:>16}" for name in METHODS)
  ]
  for row in rows:
    cells = [f"{row.goodput[m]:.3f} ±{row.deviation[m]:.3f}" for m in METHODS]
    head = f"{row.chips:>10}{show_time(row.mtbf_s):>8}{row.utilisation:>12.3f}"
    lines.append(head + "".join(f"{cell:>16}" for cell in cells))
  return "\n".join(lines)


def draw(rows: list[Row]) -> Any:
  """Draws goodput over chips, a panel per mean time between"""
  times = list(dict.fromkeys(row.mtbf_s for row in rows))
  titles = [f"a chip fails once in {show_time(mtbf)}" for mtbf in times]
  plain = ("data_parallel", "elastic")
  methods = {
    text: "data_parallel" if name in plain else "diloco"
    for name, text in METHODS.items()
  }
  figure, axes = panels("Simulated goodput when chips fail", titles, sharey=True)
  for axis, mtbf in zip(axes, times):
    own = sorted((r for r in rows if r.mtbf_s == mtbf), key=lambda r: r.chips)
    chips = [row.chips for row in own]
    for name, look in zip(METHODS, looks(methods)):
      goodput = [row.goodput[name] for row in own]
      deviation = [row.deviation[name] for row in own]
      axis.errorbar(chips, goodput, deviation, marker="o", ms=2.5, **look)
    axis.set(xscale="log", xlabel="chips", ylim=(-0.03, 1.05))
  axes[0].set_ylabel("goodput (share)")
  return legend(figure, "Bars: standard deviation of the simulated runs.")


def goodput(args: Args) -> Answer:
  """Computes the goodput of training when chips fail."""
  fixed = "config" not in args or "step_time" in args
  rows = []
  for chips, mtbf in itertools.product(args["chips"], args["mtbf"]):
    one = args | {"chips": chips, "mtbf": mtbf}
    machines = Machines(**fields_of(Machines, one))
    # Without --step_time, more chips share the config's batch: steps are shorter.
    work = workload({k: v for k, v in one.items() if k != "chips" or not fixed})
    if work.method == "data_parallel":
      raise ConfigError(NO_ROUNDS)
    rows.append(simulate(work, args["gbits"] * 1e9, machines))
  text = show(rows) + (
    f"\nshare of useful tokens, mean ± deviation of {machines.runs} runs of"
    f" {show_time(machines.duration)}; restart"
    f" {show_time(machines.restart)}, {args['gbits']:g} Gbit/s"
  )
  if fixed:
    text += "".join(f"\n{line}" for line in assumed(args, work))
  if "out" in args:
    path = make_folder(args["out"], "--out") / "simulated_failures"
    text = "\n".join([text, *save(lambda: draw(rows), path, ".png", ".svg")])
  return rows, text


def duration(text: str) -> float:
  """Parses a time in seconds, or with a unit, such as 10m or 5y."""
  found = re.fullmatch(rf"(.*\d\.?)([{''.join(UNITS)}]?)", text)
  if not found:
    raise argparse.ArgumentTypeError(f"{text!r} is no time; write 90, 10m or 5y")
  return number(found[1]) * UNITS[found[2] or "s"]


def several(parse: Callable[[str], Any]) -> Callable[[str], list]:
  """Returns a parser of values with commas between them."""
  return lambda text: [parse(part) for part in text.split(",")]


OPTIONS = GROUPS["method"] | {
  "gbits": GROUPS["utilisation"]["gbits"],
  "chips": Option("chips of all sites, such as 1024,131072", several(whole), "", True),
  "mtbf": Option(
    "mean time between a chip's failures, such as 1y,5y", several(duration), "", True
  ),
  "restart": Option("time of a restart; default 5m", duration),
  "grace": Option("time that others wait for a site that hangs; default 30s", duration),
  "quorum": Option("sites that must be up for rounds to go on; default 1", whole),
  "hangs": Option("share of failures that are hangs; default 0"),
  "checkpoint_time": Option("how long a checkpoint stops all; default 30s", duration),
  "checkpoint_every": Option("time between checkpoints; default Daly's", duration),
  "reconfigure": Option(
    "how long a failure stops an elastic group; default 18s", duration
  ),
  "part": Option("chips that an elastic group loses by a failure; default 256", whole),
  "repair": Option("time until they are back; default 80m", duration),
  "duration": Option("simulated time of a run; default 30d", duration),
  "runs": Option("simulated runs; default 10", whole),
  "seed": Option("seed of the failures; default 0", whole),
  "out": Option("folder for a figure", str),
}
COMMAND = Command("goodput when chips fail", goodput, OPTIONS)
