r"""Runs ablations and ladder small, and writes a page: each claim beside our result.

  python -m diloco reproduce --out=/tmp/reproduced --seeds=3 --jobs=2
  python -m diloco reproduce --out=/tmp/reproduced --only=tau,fragments --list
  python -m diloco reproduce --out=/tmp/reproduced --seeds=3 --report

The runs are those of configs/ablations.py and ladder.py; finished runs are not run
again, and Ctrl-C saves the others. At the end, and with --report at any time,
OUT/reproduced.md has all tables, figures and verdicts. Give the same --seeds, --only
and --text each time.
"""

import argparse
import dataclasses
import math
import os
import pathlib
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import scipy.special

from diloco.config import Config, ConfigError, files, resolve
from diloco.config.command_line import Parser, guarded, load_module, make_folder
from diloco.model.shapes import matrix_params
from diloco.sweep import chart, progress, table
from diloco.sweep.grid import Point, Search, Sweep
from diloco.sweep.load import load_sweep, shared_programs
from diloco.sweep.local import Local
from diloco.sweep.runner import Driver, drive
from diloco.sweep.table import Row
from diloco.sweep.tables import markdown

PAGE = "reproduced.md"
LADDER = "ladder"
STREAMING, SCALING = "2501.18512", "2503.09799"
SHOWN, NOT_SHOWN, CONTRADICTED = "shown", "not shown at this scale", "contradicted"
# Per cent of the loss that Streaming DiLoCo calls negligible (section 3.3.2).
SMALL = 0.2
# The verdicts' intervals contain the true mean with this probability.
CONFIDENCE = 0.9
# Runs that a process trains together, if they differ only in seed or rates.
TOGETHER = 6
# Of a run on one core of a 2-core CPU: start; a token; a token and parameter.
START_S, TOKEN_S, PARAMETER_S = 6.0, 15e-6, 50e-12


@dataclasses.dataclass(frozen=True)
class Claim:
  """A claim of a paper: by how many per cent `a` lies above `b`.

  Attributes:
    ablation: name of the ablation whose runs decide, or LADDER.
    text: the claim in words.
    source: paper, table or figure.
    paper: the paper's number.
    a, b: keys of the points to compare; of several points of a seed, the one with the
      least loss on the text for choosing counts.
    low, high: what the claim says of 100 * (a / b - 1).
    column: the number to compare, `loss` or a key of the points.
    than: keys of two other points, whose difference is subtracted.
  """

  ablation: str
  text: str
  source: str
  paper: str
  a: Mapping
  b: Mapping
  low: float = -math.inf
  high: float = math.inf
  column: str = "loss"
  than: tuple[Mapping, Mapping] | None = None


def differences(claim: Claim, found: pd.DataFrame) -> list[float]:
  """Returns 100 * (a / b - 1) of every seed that has both, less that of `than`."""

  def by_seed(keys: Mapping) -> dict[int, float]:
    some = found
    for key, value in keys.items():
      some = some[some[key] == value]
    best = some.loc[some.groupby("seed")["choice"].idxmin()]
    return dict(zip(best["seed"], best[claim.column]))

  def more(a: Mapping, b: Mapping) -> dict[int, float]:
    losses, others = by_seed(a), by_seed(b)
    seeds = sorted(losses.keys() & others.keys())
    return {seed: 100 * (losses[seed] / others[seed] - 1) for seed in seeds}

  if found.empty:
    return []
  values = more(claim.a, claim.b)
  if claim.than is None:
    return [*values.values()]
  than = more(*claim.than)
  return [value - than[seed] for seed, value in values.items() if seed in than]


def interval(values: Sequence[float]) -> tuple[float, float]:
  """Returns Student's interval of the mean; with one value, it is unbounded."""
  if len(values) < 2:
    return -math.inf, math.inf
  quantile = scipy.special.stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)
  half = quantile * statistics.stdev(values) / math.sqrt(len(values))
  mean = statistics.mean(values)
  return mean - half, mean + half


def span(claim: Claim, values: Sequence[float]) -> tuple[float, float]:
  """Returns what decides a claim: the interval of the mean, or the range.

  Best rates and batches are points of a grid, which may be the same for all seeds. So
  their mean has no Student's interval, and all seeds must agree.
  """
  if claim.column != "loss" and len(values) > 1:
    return min(values), max(values)
  return interval(values)


def verdict(claim: Claim, values: Sequence[float]) -> str:
  """Compares the span of the values with the range that a claim allows.

  Returns:
    SHOWN if the span lies in the range, CONTRADICTED if it lies outside, else
    NOT_SHOWN.
  """
  least, most = span(claim, values)
  if claim.low < least and most < claim.high:
    return SHOWN
  return CONTRADICTED if most < claim.low or least > claim.high else NOT_SHOWN


def _algorithm(name: str, replicas: int, **more) -> dict:
  return {"algorithm": name, "replicas": replicas, **more}


_PLAIN = _algorithm("data_parallel", 1)
_ONE, _TWO, _FOUR = (_algorithm("diloco", m) for m in (1, 2, 4))
_SMALLEST, _LARGEST = {"size": 105}, {"size": 1081}
_COARSE = {"compressor": "quantize", "bits": 4}
_STRIDED, _SEQUENTIAL = {"pattern": "strided"}, {"pattern": "sequential"}

CLAIMS = (
  Claim(
    "algorithms",
    "Streaming DiLoCo in 4 bits is within 1% of data-parallel",
    f"{STREAMING}, table 5, 35M",
    "+0.6% (3.53, 3.51)",
    {"name": "streaming, H=30"},
    {"name": "data-parallel"},
    high=1.0,
  ),
  Claim(
    "algorithms",
    "Streaming DiLoCo is no worse than DiLoCo",
    f"{STREAMING}, table 5, 35M",
    "-0.3% (3.53, 3.54)",
    {"name": "streaming, H=30"},
    {"name": "DiLoCo, H=30"},
    high=SMALL,
  ),
  Claim(
    "algorithms",
    "H=100 is a little worse than H=30",
    f"{STREAMING}, table 5, 35M",
    "+0.8% (3.56, 3.53)",
    {"name": "streaming, H=100"},
    {"name": "streaming, H=30"},
    low=0,
  ),
  Claim(
    "fragments",
    "The strided pattern is slightly better than the sequential one",
    f"{STREAMING}, figure 6, section 3.3.1",
    "lower, no number",
    {"fragment": 3} | _STRIDED,
    {"fragment": 3} | _SEQUENTIAL,
    high=0,
  ),
  Claim(
    "fragments",
    "Small fragments cost little against one fragment of all layers",
    f"{STREAMING}, figure 6, section 3.3.1",
    "a trade-off with the peak of the bytes, no number",
    {"fragment": 1},
    {"fragment": 6},
    high=SMALL,
  ),
  Claim(
    "fedpart",
    "Freezing the other fragments is worse",
    f"{STREAMING}, section 3.3.1",
    "+20% (3.2145, 2.6749)",
    {"fedpart": True},
    {"fedpart": False},
    low=SMALL,
  ),
  *(
    Claim(
      "tau",
      f"With alpha = {alpha:g}, an overlap of {tau} steps costs less than {SMALL}%",
      f"{STREAMING}, figure 8",
      f"below {SMALL}% up to 10 steps",
      {"alpha": alpha, "tau": tau},
      {"alpha": alpha, "tau": 1},
      high=SMALL,
    )
    for alpha in (0.0, 0.5)
    for tau in (5, 10)
  ),
  Claim(
    "tau_2",
    "A second replica that is 5 steps late costs little",
    f"{STREAMING}, figure 10, section 3.3.2",
    "limited up to 5 steps, no number",
    {"tau_2": 5},
    {"tau_2": 1},
    high=SMALL,
  ),
  Claim(
    "compression",
    "4 bits are as good as 32",
    f"{STREAMING}, figure 11",
    "no difference",
    _COARSE,
    {"compressor": "quantize", "bits": 32},
    high=SMALL,
  ),
  *(
    Claim(
      "compression",
      f"At the bytes of 4 bits, {name} is worse than E3M0",
      f"{STREAMING}, figure 11",
      "significantly worse, no number",
      {"compressor": method, "bits": 4},
      _COARSE,
      low=0,
    )
    for method, name in (("topk", "top-k"), ("random", "FedDropout"), ("dare", "DARE"))
  ),
  Claim(
    "compression",
    "FedDropout is worse than top-k at the same bytes",
    f"{STREAMING}, figure 11",
    "particularly at random, no number",
    {"compressor": "random", "bits": 4},
    {"compressor": "topk", "bits": 4},
    low=0,
  ),
  *(
    Claim(
      "replicas",
      f"M=4 is worse than M=2 at a fixed {fixed} batch",
      f"{STREAMING}, figure 12, {where}",
      number,
      _algorithm("streaming", 4, fixed=fixed),
      _algorithm("streaming", 2, fixed=fixed),
      low=0,
    )
    for fixed, where, number in (
      ("global", "table 6, 35M, H=30 (which batch is not said)", "+2.0% (3.60, 3.53)"),
      ("local", "table 7, 1B, Dolma, 25B tokens", "+2.6% (2.73, 2.66)"),
    )
  ),
  Claim(
    "cadence",
    "At H=5, Streaming DiLoCo is better than DiLoCo",
    f"{STREAMING}, figure 13",
    "more robust to low H, no number",
    _algorithm("streaming", 2, sync_every=5),
    _algorithm("diloco", 2, sync_every=5),
    high=0,
  ),
  *(
    Claim(
      "cadence",
      f"{name} gets worse from H=30 to H=300",
      f"{STREAMING}, figure 13",
      "no number",
      _algorithm(algorithm, 2, sync_every=300),
      _algorithm(algorithm, 2, sync_every=30),
      low=0,
    )
    for algorithm, name in (("diloco", "DiLoCo"), ("streaming", "Streaming DiLoCo"))
  ),
  Claim(
    "evaluated",
    "Outer parameters are better than the mean of the replicas",
    f"{STREAMING}, table 3",
    "-0.4% (2.67, 2.68)",
    {"evaluated": "outer"},
    {"evaluated": "mean of replicas"},
    high=0,
  ),
  Claim(
    "evaluated",
    "Outer parameters are better than the first replica",
    f"{STREAMING}, table 3",
    "-3.6% (2.67, 2.77)",
    {"evaluated": "outer"},
    {"evaluated": "first replica"},
    high=0,
  ),
  Claim(
    "batch",
    "DiLoCo with M=1 is better than data-parallel",
    f"{SCALING}, finding 2, table 4, 35M",
    "-0.1% (3.482, 3.485)",
    _ONE,
    _PLAIN,
    high=0,
  ),
  *(
    Claim(
      "batch",
      f"DiLoCo with M={m['replicas']} is worse than data-parallel at small N",
      f"{SCALING}, table 4, 35M",
      number,
      m,
      _PLAIN,
      low=0,
    )
    for m, number in ((_TWO, "+0.7% (3.508, 3.485)"), (_FOUR, "+2.0% (3.554, 3.485)"))
  ),
  Claim(
    "batch",
    "At a large batch, M=1 is better than data-parallel",
    f"{SCALING}, figure 3",
    "lower, no number",
    _ONE | {"batch": 32},
    _PLAIN | {"batch": 32},
    high=0,
  ),
  Claim(
    "batch",
    "The gap of data-parallel to M=1 grows with the batch, from 8 to 32",
    f"{SCALING}, figure 3",
    "increases, no number",
    _PLAIN | {"batch": 32},
    _ONE | {"batch": 32},
    low=0,
    than=(_PLAIN | {"batch": 8}, _ONE | {"batch": 8}),
  ),
  Claim(
    "batch",
    "The best batch of M=4 is larger than that of data-parallel",
    f"{SCALING}, finding 3, figure 4",
    "larger, no number",
    _FOUR,
    _PLAIN,
    low=0,
    column="batch",
  ),
  Claim(
    "outer_rate",
    "The best outer rate grows with M",
    f"{SCALING}, finding 4, figures 7, 8",
    "larger, no number",
    _FOUR | {"sync_every": 30},
    _ONE | {"sync_every": 30},
    low=0,
    column="outer_lr",
  ),
  Claim(
    "outer_rate",
    "The best outer rate grows with H",
    f"{SCALING}, figure 8",
    "larger, no number",
    _TWO | {"sync_every": 100},
    _TWO | {"sync_every": 1},
    low=0,
    column="outer_lr",
  ),
  Claim(
    "outer_rate",
    "H=1 is worse than H=10 for M=2",
    f"{SCALING}, figure 9",
    "H=1 is the worst, no number",
    _TWO | {"sync_every": 1},
    _TWO | {"sync_every": 10},
    low=0,
  ),
  Claim(
    "outer_rate",
    "For M=2, H=100 is worse than H=10",
    f"{SCALING}, figure 9",
    "rises with H, no number",
    _TWO | {"sync_every": 100},
    _TWO | {"sync_every": 10},
    low=0,
  ),
  *(
    Claim(
      "overtrain",
      f"M=1 is slightly better than data-parallel with {factor} times the tokens",
      f"{SCALING}, figure 11",
      "slightly lower, no number",
      _ONE | {"overtrain": factor},
      _PLAIN | {"overtrain": factor},
      high=0,
    )
    for factor in (1, 4, 16)
  ),
  Claim(
    LADDER,
    "DiLoCo with M=1 is better than data-parallel at the largest N",
    f"{SCALING}, finding 2, table 4, 2.4B",
    "-0.4% (2.317, 2.326)",
    _ONE | _LARGEST,
    _PLAIN | _LARGEST,
    high=0,
  ),
  *(
    Claim(
      LADDER,
      f"The gap of M={m['replicas']} to data-parallel shrinks as N grows",
      f"{SCALING}, finding 1, table 4, 35M to 2.4B",
      number,
      m | _LARGEST,
      _PLAIN | _LARGEST,
      high=0,
      than=(m | _SMALLEST, _PLAIN | _SMALLEST),
    )
    for m, number in (
      (_ONE, "-0.3 points (-0.4%, -0.1%)"),
      (_TWO, "-0.8 points (-0.1%, 0.7%)"),
      (_FOUR, "-1.7 points (0.3%, 2.0%)"),
    )
  ),
  Claim(
    LADDER,
    "M=4 is worse than M=2 at the largest N",
    f"{SCALING}, table 4, 2.4B",
    "+0.4% (2.332, 2.323)",
    _FOUR | _LARGEST,
    _TWO | _LARGEST,
    low=0,
  ),
)


def sweeps(args: argparse.Namespace) -> dict[str, Sweep]:
  """Returns the sweeps of the ablations and the ladder by name.

  Raises:
    ConfigError: --only names an unknown ablation.
  """
  ablations = load_module("ablations", "get_sweep", "configs/ablations.py").ABLATIONS
  known = [*ablations, LADDER]
  names = [name.strip() for name in args.only.split(",") if name.strip()]
  for name in names:
    if name not in known:
      raise ConfigError(f"--only has {name!r}; write some of {', '.join(known)}.")
  options = f"seeds={args.seeds}" + (f",text={args.text}" if args.text else "")
  file = lambda name: "ladder:" if name == LADDER else f"ablations:{name},"
  return {name: load_sweep(file(name) + options) for name in names or known}


def make_driver(found: Mapping[str, Sweep], args: argparse.Namespace) -> Driver:
  """Makes one driver for all sweeps, so that a run that several need runs once."""
  configs = {name == LADDER: sweep.config for name, sweep in found.items()}
  together = Sweep(
    config=lambda point: configs[_of_ladder(point)](point),
    grids=[grid for sweep in found.values() for grid in sweep.grids],
    environment=next(iter(found.values())).environment,  # The same for all.
  )
  backend = Local(1, shared_programs(args.out) | dict(together.environment))
  return Driver(together, args.out, backend, args.jobs, TOGETHER)


def _of_ladder(point: Point) -> bool:
  """Tells the ladder's points, whose size is a number, from those of ablations."""
  return point.get("size") != "small"


def ablation(cell: Search) -> str:
  """Returns the ablation of a cell; its grids are called NAME and NAME seeds."""
  return LADDER if _of_ladder(cell.cell) else cell.grid.name.partition(" ")[0]


def listing(driver: Driver, names: Sequence[str], jobs: int) -> list[str]:
  """Lists the sweeps with runs and minutes; a run that two of them need counts once.

  The numbers are estimates: how far a search goes is not known before.
  """
  known = set[str]()
  lines = list[dict[str, Any]]()
  for name in names:
    cells = [cell for cell in driver.cells() if ablation(cell) == name]
    todo = driver.todo(cells)
    points = [todo[run].point for run in todo.keys() - known if not todo[run].error]
    known |= todo.keys()
    points += [point for cell in cells for point in _later(cell, cells)]
    seconds = sum(_seconds(resolve(driver.sweep.config(point))) for point in points)
    done = sum(len(cell.points) - len(cell.todo) for cell in cells)
    minutes = math.ceil(seconds / 60 / jobs)
    lines.append({"done": done, "to run": len(points), "minutes": minutes})
  columns = {key: [line[key] for line in lines] for key in lines[0]}
  runs, minutes = sum(columns["to run"]), sum(columns["minutes"])
  total = f"{runs} runs, about {minutes} minutes with --jobs={jobs}"
  return [*markdown({"ablation": names} | columns), "", total]


def _later(cell: Search, cells: Sequence[Search]) -> list[Point]:
  """Guesses which runs follow after those that a cell asks for now.

  A tuned axis needs a neighbour on both sides, and a waiting cell a first point.
  """
  if cell.ended:
    return []
  tuned = sum(bool(axis.ratio or axis.first) for axis in cell.grid.axes)
  count = 2 * tuned + (cell.state == "waiting")
  like = next(point for other in cells for point in other.points)
  return [{**like, **cell.cell}] * count


def _seconds(c: Config) -> float:
  return START_S + c.train.tokens * (TOKEN_S + PARAMETER_S * matrix_params(c.model))


def report(
  found: Mapping[str, Sweep], driver: Driver, args: argparse.Namespace
) -> pathlib.Path:
  """Writes the page and its figures; returns the path of the page."""
  best = driver.best_rows()
  tables = {
    name: chart.frame(sweep.chart, [pair for pair in best if ablation(pair[0]) == name])
    for name, sweep in found.items()
    if sweep.chart
  }
  make_folder(args.out / "figures", "--out")
  lines = [*_introduction(driver.rows, args), *_verdicts(tables)]
  for name, some in tables.items():
    own = found[name].chart
    assert own is not None
    picture = args.out / "figures" / f"reproduced_{name}.png"
    lines += ["", f"## {own.title}", "", *chart.lines(own, some)]
    if not some.empty:
      chart.draw(own, some, picture)
      lines += ["", f"![{own.title}](figures/{picture.name})"]
  with files.replacing(args.out / PAGE) as file:
    file.write("\n".join([*lines, ""]).encode())
  return args.out / PAGE


def _introduction(rows: Mapping[str, Row], args: argparse.Namespace) -> list[str]:
  done = [row for row in rows.values() if row["status"] == "done"]
  failed = sum(row["status"] == "failed" for row in rows.values())
  groups = dict[str, float]()  # All runs of a group have its time.
  for row in done:
    group = row.get("group", row["name"])
    groups[group] = max(groups.get(group, 0.0), row["wall_s"] or 0.0)
  hours = sum(groups.values()) / 3600
  revisions = ", ".join(sorted({str(row["revision"]) for row in done})) or "none"
  only = f" --only={args.only}" if args.only else ""
  text = f" --text={args.text}" if args.text else ""
  repeats = (
    "State of the Union addresses, which 16 times the tokens repeat 4.6 times and on"
    " which overtrained runs are also evaluated (--text changes this)"
  )
  return [
    "# Claims of both papers, at small scale",
    "",
    f"`python -m diloco reproduce --out=OUT --seeds={args.seeds}{only}{text}`",
    "",
    f"{len(done)} runs, {failed} failed, {hours:.1f} hours of one core, on"
    f" {os.cpu_count()} cores of {platform.machine()}; revisions {revisions}."
    " Losses are in nats per token, on held-out text by which nothing was chosen."
    " Tables give mean and standard deviation over seeds.",
    "",
    "The small runs differ from the papers' (docs/ablations.md, The two scales): outer"
    " momentum 0.5 instead of 0.9, the same text order for all M, and"
    f" {'the text of --text' if args.text else repeats}. docs/ladder.md says how the"
    " ladder differs. Claims about simulated networks and fitted laws are not here:"
    " docs/simulate.md and docs/scaling_laws.md repeat the papers' numbers.",
    "",
    "A number below is by how many per cent the first of the two compared settings lies"
    " above the second one. The difference is taken seed by seed; the brackets are"
    f" Student's {100 * CONFIDENCE:.0f}% interval of its mean. A claim is *{SHOWN}* if"
    f" the whole interval lies in the range under 'shown if', *{CONTRADICTED}* if it"
    f" lies outside, and else *{NOT_SHOWN}*. For a best rate or batch, the brackets are"
    " the least and the greatest value, so all seeds must agree.",
    "",
    "'Shown if' tests the direction of a claim, not its size. Its margin of"
    f" {SMALL}% is the difference that Streaming DiLoCo calls negligible (section"
    " 3.3.2); the margin of 1% is ours.",
    "",
  ]


def _verdicts(tables: Mapping[str, pd.DataFrame]) -> list[str]:
  some = [claim for claim in CLAIMS if claim.ablation in tables]
  values = [differences(claim, tables[claim.ablation]) for claim in some]
  return markdown(
    {
      "claim": [claim.text for claim in some],
      "source": [claim.source for claim in some],
      "paper": [claim.paper for claim in some],
      "here": [_formatted(claim, v) for claim, v in zip(some, values)],
      "shown if": [_range(claim) for claim in some],
      "verdict": [verdict(claim, v) for claim, v in zip(some, values)],
    }
  )


def _range(claim: Claim) -> str:
  """Formats the range that a claim allows, in per cent: all have one bound."""
  above = claim.low > -math.inf
  return f"above {claim.low:g}%" if above else f"below {claim.high:g}%"


def _formatted(claim: Claim, values: Sequence[float]) -> str:
  if not values:
    return "no runs yet"
  text, (least, most) = f"{statistics.mean(values):+.2f}%", span(claim, values)
  if len(values) > 1:
    text += f" [{least:+.2f}, {most:+.2f}]"
  return f"{text}, {len(values)} seed{'s' * (len(values) > 1)}"


def run(args: argparse.Namespace) -> int:
  """Lists, or runs what is missing, and writes the page; returns the exit status."""
  if args.seeds < 1 or args.jobs < 1:
    raise ConfigError(
      f"--seeds is {args.seeds} and --jobs {args.jobs}; give 1 or more."
    )
  found = sweeps(args)
  driver = make_driver(found, args)
  if args.list:
    print("\n".join(listing(driver, [*found], args.jobs)))
    return 0
  make_folder(args.out, "--out")
  number = 0
  if not args.report:
    with table.alone(args.out):
      number = drive(driver, progress.Live(driver.runs))
  print(f"page         {report(found, driver, args)}")
  if number:
    return 128 + number
  return int(any(cell.state == "failed" for cell in driver.cells()))


def main(argv: Sequence[str] | None = None) -> int:
  parser = Parser(prog="python -m diloco reproduce", description=__doc__)
  add = parser.add_argument
  add("--out", type=pathlib.Path, required=True, help="folder of runs, page, figures")
  only = "names of configs/ablations.py, and ladder; default: all"
  add("--only", default="", help=only)
  add("--seeds", type=int, default=3, help="seeds of every setting; default 3")
  add("--jobs", type=int, default=2, help="processes, one core each; default 2")
  add("--text", default="", help="data.source of the runs; default: sotu")
  add("--list", action="store_true", help="only list what is left, with minutes")
  add("--report", action="store_true", help="only write the page")
  return guarded(run, parser.parse_args(argv))


if __name__ == "__main__":
  sys.exit(main())
