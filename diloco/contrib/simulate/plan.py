r"""Plans a run: hours and loss of many settings on a link; recommends a setting.

python -m diloco plan --config=sample --gbits=0.02 --step_time=0.06
python -m diloco plan --config=chinchilla:1.3B,M=2 --gbits=1 --chips=64 --replicas=2,4
python -m diloco plan --config=chinchilla:1.3B,M=2 --gbits=0.1,1,10 --chips=64
python -m diloco plan --config=sample --gbits=0.02 --step_time=0.06 --curve=runs/dp \
  --target=4.4

`python -m diloco simulate plan` is the same command. A row is data-parallel, or
Streaming DiLoCo with some M, H, tau and number format. It shows utilisation, bytes that
a replica sends per token, the final loss above data-parallel with its 90% interval, and
the hours of the whole run. The table leaves out rows that another row beats in both
hours and loss (--all shows all rows). The last lines recommend one row and say the
rule. With --target, it is the row that reaches that loss first; without --target, the
row of least loss among those with a utilisation of at least 0.95. With several --gbits,
the table has the recommended row of each rate. --out draws hours and loss of all
settings at each rate, and marks the recommended row.

Time comes from the simulator (`steady.py`). The loss comes from measurements:
`plan.csv` for N, M and H, interpolated over their logarithms, and `LATE` for tau. E3M0
and float32 get the same loss (measured: +0.1 ± 0.3%, docs/claims.csv). The end of a row
says from which sizes its loss comes, and what was not measured. If all runs of a size
have another M, other sizes say how much the row's M adds. A loss is shown as 0 ± x if
zero lies inside its interval. Above the largest measured M or H, the line through the
two largest values is extended. Below the smallest M or H, and outside the measured N,
the nearest measured value counts.

The syncs compute for --sync_time seconds in each round. This time lengthens a run and
is no part of the utilisation.

--curve is a finished data-parallel run on the same data. A run that ends x% above
data-parallel is assumed to be x% above it at all steps.
"""

import collections
import dataclasses
import functools
import itertools
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from diloco.config import Config, changed, resolve
from diloco.config.comparable import basis, differing, model_fields
from diloco.errors import ConfigError
from diloco.simulate import arguments
from diloco.simulate.arguments import Answer, Args, Command, Option, number, whole
from diloco.simulate.limits import check
from diloco.simulate.steady import steady_utilisation
from diloco.simulate.utilisation import Workload
from diloco.spec.fields import Range
from diloco.spec.shapes import matrix_params, num_params
from diloco.util import palette
from diloco.util.command import as_path, check_picture

if TYPE_CHECKING:  # Matplotlib is slow to import.
  from matplotlib.figure import Figure

H = (5, 10, 30, 100, 300)
TAU = (1, 5, 10)
FORMATS = ("e3m0", "fp32")
# Least utilisation of the recommended row, if there is no --target.
ENOUGH = 0.95
SMALL = 35e6  # The papers' smallest N.
# {alpha: (tau, loss in per cent above that at tau = 1 and alpha = 0, half of the 90%
# interval)}. Runs: 0.14M parameters, M = 2, H = 30, three seeds (docs/claims.csv,
# ablation tau).
LATE = {
  0.0: ((1, 0, 0), (2, 0.08, 0.29), (5, 0.21, 0.22), (10, 1.25, 0.11)),
  0.5: ((1, 0.45, 0.5), (2, 0.54, 0.25), (5, 0.66, 0.25), (10, 0.95, 0.38)),
}
# Values as in LATE at 500M: below 0.2% up to tau = 10 (2501.18512, section 3.3.2).
LATE_LARGE = ((1, 0.0, 0.0), (10, 0.2, 0.1))


class Cell(NamedTuple):
  """A row of plan.csv: the final loss above that of data-parallel.

  Attributes:
    percent: per cent above data-parallel.
    half: half of the 90% interval over the seeds. For the papers' single runs, it is
      the rounding error of the printed digits.
  """

  params: float
  replicas: int
  sync_every: int
  percent: float
  half: float


@dataclasses.dataclass(frozen=True)
class Row:
  """A setting on a link; percent and half as in `Cell`."""

  gbits: float
  method: str
  replicas: int
  sync_every: int
  tau: int
  format: str
  utilisation: float
  bytes_per_token: float
  percent: float
  half: float
  hours: float
  source: str
  hours_to_target: float | None = None


def cells() -> list[Cell]:
  """Reads plan.csv."""
  lines = pathlib.Path(__file__).with_suffix(".csv").read_text().splitlines()[1:]
  rows = (line.split(",") for line in lines)
  return [
    Cell(float(n), int(m), int(h), float(p), float(x)) for n, m, h, p, x, _ in rows
  ]


def loss_above(c: Config, measured: Sequence[Cell]) -> tuple[float, float, str]:
  """Predicts a streaming run's final loss, in per cent above data-parallel at its best.

  Args:
    measured: the cells, such as those of plan.csv.

  Returns:
    Per cent, half of the 90% interval, and a text that says what was measured.
  """
  n, tau = float(matrix_params(c.model)), max(c.overlap.taus)
  if n < SMALL:  # Our runs; the papers count matrices alone.
    n = float(num_params(c.model))
  ran = collections.defaultdict[float, set[int]](set)
  for x in measured:
    ran[x.params].add(x.replicas)
  few = [n for n, known in ran.items() if len(known) == 1 and c.replicas not in known]
  several = [x for x in measured if x.params not in few]
  mine = [_moved(x, c.replicas, several) if x.params in few else x for x in measured]
  at = {"params": n, "replicas": c.replicas, "sync_every": c.sync_every}
  percent, half, outside = _between(mine, at)
  known = LATE.get(c.overlap.alpha)
  late = LATE_LARGE if n >= SMALL else known or LATE[0.0]
  taus, more, wide = zip(*late)
  percent += float(np.interp(tau, taus, more))
  half = math.hypot(half, float(np.interp(tau, taus, wide)))
  outside += [f"alpha = {c.overlap.alpha:g}"] * (known is None)
  outside += [f"tau = {tau}"] * (tau > taus[-1])
  low, high = _around(n, sorted({x.params for x in mine}))
  outside += [f"M = {c.replicas}"] * (not {low, high}.isdisjoint(few))
  outside += [c.wire.compressor] * (c.wire.compressor != "quantize")
  outside += [c.wire.format] * (c.wire.format not in FORMATS)
  outside += c.plugins
  say = lambda v: f"{v / 1e9:g}B" if v >= 1e9 else f"{v / 1e6:.3g}M"
  source = ", ".join(map(say, sorted({low, high})))
  source = f"from {source}, {'one run' if low >= SMALL else 'three seeds'}"
  missing = ", ".join(dict.fromkeys(outside))
  return percent, half, f"{source}; not measured: {missing}" if missing else source


def _moved(x: Cell, m: int, others: Sequence[Cell]) -> Cell:
  """Estimates a cell with m replicas: adds the difference that other sizes have."""
  at = {name: getattr(x, name) for name in _LETTERS}
  before, after = (_between(others, at | {"replicas": r}) for r in (x.replicas, m))
  percent = x.percent + after[0] - before[0]
  half = math.hypot(x.half, before[1], after[1])
  return x._replace(replicas=m, percent=percent, half=half)


def _around(value: float, known: Sequence[float]) -> tuple[float, float]:
  """Returns the nearest known values below and above; outside, the nearest twice."""
  low = max((v for v in known if v <= value), default=known[0])
  return low, min((v for v in known if v >= value), default=known[-1])


_LETTERS = {"params": "N", "replicas": "M", "sync_every": "H"}


def _between(
  some: Sequence[Cell], at: Mapping[str, float]
) -> tuple[float, float, list[str]]:
  """Interpolates over the logarithms of the fields; the last field comes first.

  Returns:
    percent, half, and the fields whose values were not measured: they lie outside the
    cells, or between two sizes that differ by more than a factor of 10.
  """
  if not at:
    return some[0].percent, some[0].half, []
  (name, value), *rest = at.items()
  known = sorted({getattr(x, name) for x in some})
  low, high = _around(value, known)
  far = not low <= value <= high or (name == "params" and high > 10 * low)
  if value > high and name != "params":  # Extrapolates linearly.
    low, high = known[-2:] if known[1:] else (high, high)
  (a, x, left), (b, y, right) = (
    _between([cell for cell in some if getattr(cell, name) == v], dict(rest))
    for v in (low, high)
  )
  share = math.log(value / low) / math.log(high / low) if high > low else 0.0
  outside = [f"{_LETTERS[name]} = {value:.3g}"] * far + left + right
  return a + share * (b - a), x + min(share, 1) * (y - x), outside


def settings(c: Config, replicas: Sequence[int]) -> Iterator[Config]:
  """Yields data-parallel and the settings of Streaming DiLoCo that the config allows.

  Fields that do not vary are those of `c`; M is that of `c` if `replicas` is empty.

  Raises:
    ConfigError: a number of replicas cannot share the batch.
  """
  for m in replicas:
    changed(c, {"replicas": m, "overlap.taus": ()})
  yield changed(c, {"algorithm": "data_parallel"})
  taus, rounds = {*TAU, *c.overlap.taus}, {*H, c.sync_every}
  names = dict.fromkeys((*FORMATS, c.wire.format))
  for m, h, tau, name in itertools.product(
    replicas or (c.replicas,), sorted(rounds), sorted(taus), names
  ):
    fields: dict[str, Any] = {"replicas": m, "sync_every": h, "wire.format": name}
    fields |= {"algorithm": "streaming", "overlap.tau": tau, "overlap.taus": ()}
    try:
      yield resolve(changed(c, fields))
    except ConfigError:  # For example, tau is above H, or H is longer than the run.
      continue


def plan(args: Args) -> Answer:
  """Returns the rows to show and the recommended row of each rate, also as text."""
  if "config" not in args:
    raise ConfigError("--config is missing; plan needs one, such as --config=sample.")
  if "curve" in args and "target" not in args:
    raise ConfigError("--curve is only for --target; give both, or none of them.")
  if "out" in args:
    check_picture(args["out"], "plan.png")
  base = arguments.workload(args)
  rows = every_row(args, base)
  if "target" in args:
    check("target", args["target"], Range(0, open=True))
    curve = held_out(args)
    rows = [timed(row, curve, args["target"]) for row in rows]
  by_rate = {rate: [r for r in rows if r.gbits == rate] for rate in args["gbits"]}
  good = {rate: efficient(some) for rate, some in by_rate.items()}
  choices = good if "target" in args else by_rate
  best = {rate: recommended(some, "target" in args) for rate, some in choices.items()}
  step, _ = arguments.assumed(args, base)
  batch = f"batch of {args['config'].tokens_per_step:,} tokens; ±: 90% interval"
  link = f"{', '.join(f'{rate:g}' for rate in by_rate)} Gbit/s"
  lines = [step, f"assumed      {link}, {arguments.conditions(base)}, {batch}", ""]
  if len(by_rate) == 1:
    (rate,) = by_rate
    shown = by_rate[rate] if "all" in args else good[rate]
    if (row := best[rate]) and row not in shown:  # A row that is less busy beats it.
      shown = sorted([*shown, row], key=lambda r: r.hours)
    lines += [*table(shown, args), *advice(good[rate], best[rate], args)]
  else:
    shown = rows if "all" in args else [row for row in best.values() if row]
    lines += [*table(shown, args), f"rule         {rule(args)}"]
    lines += [
      f"{g:g} Gbit/s: {nothing(by_rate[g], args)}" for g, row in best.items() if not row
    ]
  if "out" in args:
    draw = functools.partial(picture, by_rate, good, best)
    lines += palette.save(draw, args["out"])
  return {"rows": shown, "recommended": list(best.values())}, "\n".join(lines)


def every_row(args: Args, base: Workload) -> list[Row]:
  """Computes a row for each setting and each rate of the link."""
  c, sync, known = args["config"], args.get("sync_time", 0.0), cells()
  check("sync_time", sync, Range(0))
  rows = list[Row]()
  for one in settings(c, args.get("replicas", ())):
    # Every M has the same total batch. --step_time holds for the config's M. With
    # another M, the number of devices changes, and so does the step time. --chips is
    # the number of all chips, for every M.
    faster = one.replicas / c.replicas if "step_time" in args else 1
    given = {k: args[k] for k in ("latency", "link") if k in args}
    work = arguments.workload(
      {"config": one, "step_time": base.step_time / faster} | given
    )
    # Links with an efficiency below 1 count more bits than are sent; `ideal` does not.
    ideal = dataclasses.replace(work, link="ideal")
    per_step = (
      sum(bits for bits, _ in ideal.transfers) / 8 / work.whole_plan[0].sync_every
    )
    is_plain = one.algorithm == "data_parallel"
    percent, half, source = (0.0, 0.0, "") if is_plain else loss_above(one, known)
    reached = steady_utilisation(work, [1e9 * rate for rate in args["gbits"]])
    rows += [
      Row(
        rate,
        one.algorithm,
        one.replicas,
        one.sync_every if not is_plain else 1,
        max(one.overlap.taus),
        one.wire.format if not is_plain else one.inner.gradient_dtype,
        float(share),
        per_step / one.tokens_per_step,
        percent,
        half,
        run_seconds(one, work.step_time / float(share), sync) / 3600,
        source,
      )
      for rate, share in zip(args["gbits"], reached)
    ]
  return rows


def run_seconds(c: Config, step: float, sync: float) -> float:
  """Returns the seconds of a run.

  Args:
    step: seconds of a step, including its wait for the link.
    sync: seconds that the syncs of a round compute; data-parallel has none.
  """
  return c.train.steps * (step + (0 if c.one_model else sync / c.sync_every))


def efficient(rows: Sequence[Row]) -> list[Row]:
  """Leaves out rows that another row beats in hours and loss; sorts by hours."""
  kept, digits = list[Row](), lambda hours: float(f"{hours:.3g}")  # Rounds to 3 digits.
  for row in sorted(
    rows, key=lambda r: (digits(r.hours), r.percent, r.bytes_per_token, r.hours)
  ):
    if not kept or row.percent < kept[-1].percent:
      kept.append(row)
  return kept


def recommended(rows: Sequence[Row], to_target: bool) -> Row | None:
  """Returns the row that `rule` chooses, or None if there is none."""
  if to_target:
    timed = [row for row in rows if row.hours_to_target is not None]
    return min(timed, key=lambda r: (r.hours_to_target, r.percent), default=None)
  fast = [row for row in rows if row.utilisation >= ENOUGH]
  # Equal losses may be one measurement, as where M = 1 was not measured.
  best = lambda r: (r.percent, float(f"{r.hours:.3g}"), r.bytes_per_token)
  return min(fast, key=best, default=None)


def held_out(args: Args) -> list[tuple[float, float]]:
  """Reads the curve: (share of the run's steps, held-out loss), in order.

  Raises:
    ConfigError: there is no curve, or its run is not data-parallel, or has another
      model or other tokens than the config.
  """
  from diloco.log import read_run  # Imports pandas, which is slow.

  if "curve" not in args:
    raise ConfigError("--target needs --curve, the folder of a data-parallel run.")
  run = read_run.read(args["curve"], "curve", "--curve")
  if run.config.algorithm != "data_parallel" or len(run.held_out) < 2:
    raise ConfigError(
      f"--curve is {args['curve']}, a run of {run.config.algorithm} with"
      f" {len(run.held_out)} evaluations; give a data-parallel run with eval.every set."
    )
  ours = basis(args["config"].to_dict(), {})
  same = ("train.tokens", *model_fields(ours))
  for field, (value, of_curve) in differing(ours, run.basis, *same).items():
    if field in same:  # A plan does not need the text on this machine.
      raise ConfigError(
        f"--curve is {args['curve']}, where {field} is {of_curve}, and --config has"
        f" {value}; give a run of the same model and tokens."
      )
  steps = run.config.train.steps
  return [(step / steps, loss) for step, loss in sorted(run.held_out.items())]


def timed(row: Row, curve: Sequence[tuple[float, float]], target: float) -> Row:
  """Adds the hours until the target; None if the curve does not fall so far."""
  wanted = target / (1 + row.percent / 100)
  for (a, high), (b, low) in itertools.pairwise(curve):
    if low <= wanted:
      share = b if high <= low else b - (b - a) * max(wanted - low, 0) / (high - low)
      hours = row.hours * max(share, a)
      return dataclasses.replace(row, hours_to_target=hours)
  return row


def table(rows: Sequence[Row], args: Args) -> list[str]:
  """Formats the rows."""
  has_rates, has_target = len(args["gbits"]) > 1, "target" in args
  head = f"{'Gbit/s':<9}" if has_rates else ""
  head += f"{'method':<14}{'M':>3}{'H':>5}{'tau':>5} {'format':<9}{'busy':>7}"
  head += f"{'bytes/token':>13}{'loss, %':>16}{'hours':>10}"
  lines = [head + (f"{'to target':>11}" if has_target else "")]
  for r in rows:
    above = f"{r.percent:+.2f} ± {r.half:.2f}"
    if abs(r.percent) <= r.half:  # Zero lies in the interval: the sign is not known.
      above = f"0 ± {abs(r.percent) + r.half:.2f}" if r.half else "0"
    line = f"{r.gbits:<9g}" if has_rates else ""
    line += f"{r.method:<14}{r.replicas:>3}{r.sync_every:>5}{r.tau:>5} {r.format:<9}"
    line += f"{r.utilisation:>7.1%}{r.bytes_per_token:>13,.4g}{above:>16}"
    line += f"{r.hours:>10.4g}"
    if has_target:
      hours = "never" if r.hours_to_target is None else f"{r.hours_to_target:.4g}"
      line += f"{hours:>11}"
    lines.append(f"{line}  {r.source}".rstrip())
  return lines


def advice(rows: Sequence[Row], best: Row | None, args: Args) -> list[str]:
  """Formats the rule, the cost of a smaller loss, and the recommended flags."""
  if best is None:
    return [f"recommended  none: {nothing(rows, args)}."]
  lines = [f"rule         {rule(args)}"]
  slower = (r for r in rows if r.hours > best.hours and r.percent < best.percent)
  if after := next(slower, None):
    points = best.percent - after.percent
    more = f"{after.hours - best.hours:.3g} h more for {points:.2f} points less loss"
    lines.append(f"next row     {more}")
  c, kept = args["config"], "note         rates and batch stay those of the config"
  if best.method == "data_parallel":
    return [*lines, kept, "recommended  --config.algorithm=data_parallel"]
  if best.replicas != c.replicas:
    lines.append(f"{kept} with M = {c.replicas}")
  flags = f"--config.sync_every={best.sync_every} --config.overlap.tau={best.tau}"
  flags += f" --config.wire.format={best.format} --config.replicas={best.replicas}"
  if c.algorithm == "streaming" and {*c.overlap.taus} != {c.overlap.tau}:
    lines.append("note         leave out overlap.taus, which would replace this tau")
  if c.algorithm != "streaming":
    flags = f"--config.algorithm=streaming {flags}"
  return [*lines, f"recommended  {flags}"]


def rule(args: Args) -> str:
  """Says how `recommended` chooses a row."""
  if "target" in args:
    return f"the fewest hours to a loss of {args['target']:g}"
  return f"the smallest loss of all settings that are busy for {ENOUGH:.0%} of the time"


def nothing(rows: Sequence[Row], args: Args) -> str:
  """Says why no row is recommended, and which row comes nearest."""
  if "target" in args:
    return f"no setting reaches {args['target']:g}; raise --target"
  most = max(rows, key=lambda row: row.utilisation)
  return (
    f"no setting keeps the replicas busy for {ENOUGH:.0%} of the time; the busiest one"
    f" (H = {most.sync_every}, tau = {most.tau}, {most.format}) reaches"
    f" {most.utilisation:.1%}; raise --gbits or --config.sync_every"
  )


Rows = Mapping[float, Sequence[Row]]  # The rows of each rate.


def picture(every: Rows, good: Rows, best: Mapping[float, Row | None]) -> "Figure":
  """Draws loss against hours, a panel for each rate and a colour for each H."""
  names = [f"{rate:g} Gbit/s" for rate in every]
  figure, axes = palette.panels("Settings of a run", names, 3.4, sharey=True)
  rounds = sorted({row.sync_every for rows in every.values() for row in rows})
  colors = dict(
    zip(rounds[1:], palette.shades(palette.COLORS["streaming"], len(rounds) - 1))
  )
  for axis, rate in zip(axes, every):
    for h in rounds:  # Data-parallel has H = 1.
      rows = [row for row in every[rate] if row.sync_every == h]
      color = colors.get(h, palette.COLORS["data_parallel"])
      label = f"streaming, H = {h}" if h in colors else "data-parallel"
      axis.plot(*_points(rows), "o", ms=4, label=label, color=color)
    axis.plot(*_points(good[rate]), color="0.4", label="frontier", zorder=0)
    if row := best[rate]:
      axis.plot(*_points([row]), "ko", mfc="none", ms=9, label="recommended")
      at, name = (row.hours, row.percent), f"  M = {row.replicas}, tau = {row.tau}"
      axis.annotate(name, at, (6, 6), textcoords="offset points")
    axis.set(xscale="log", xlabel="hours", ylabel="loss, % above data-parallel")
    axis.label_outer()
  return palette.legend(figure)


def _points(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
  return [row.hours for row in rows], [row.percent for row in rows]


def several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
  """Makes a parser of comma-separated values; equal values count once."""
  return lambda text: list(dict.fromkeys(kind(part) for part in text.split(",")))


COMMAND = Command(
  "H, tau, format and M for a link: hours and loss",
  plan,
  "config chips peak_tflops mfu step_time link gbits! latency",
  {
    "sync_time": Option("seconds that the syncs of a round compute; default 0"),
    "gbits": Option("rates of the link in Gbit/s, such as 1,10", several(number)),
    "replicas": Option("such as 2,4; default the config's", several(whole)),
    "curve": Option("folder of a data-parallel run, for --target", pathlib.Path),
    "target": Option("held-out loss to reach, nats per token"),
    "all": Option("show all rows", bool),
    "out": Option("picture of hours and loss, such as plan.png", as_path),
  },
)

if __name__ == "__main__":
  from diloco.simulate.__main__ import main

  sys.exit(main(["plan", *sys.argv[1:]]))
