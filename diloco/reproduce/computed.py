"""Checks the papers' claims that need no training, by simulation, fits and arithmetic.

computed.toml has the text of each claim. The function with the claim's name returns our
numbers and the verdict. Imports no JAX.
"""

import dataclasses
import functools
import itertools
import time
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import scipy.special

from diloco.reproduce.claim import CONTRADICTED, NOT_SHOWN, SHOWN, Row
from diloco.scaling_laws import paper
from diloco.scaling_laws import tables as laws
from diloco.scaling_laws.fits import PowerLaw
from diloco.simulate import tables, wallclock
from diloco.simulate.memory import RATES, memory
from diloco.simulate.steady import required_bandwidth, steady_utilisation
from diloco.simulate.tables import papers_workload
from diloco.spec.fragments import make_fragments
from diloco.util.shipped import PACKAGE, papers_table

INCONSISTENT = "inconsistent in the paper"
WORDS = tomllib.loads((PACKAGE / "reproduce" / "computed.toml").read_text())
# {model: (layers, seconds per step)} in Streaming DiLoCo's Table 4.
SHAPES = {"1B": (24, 0.1), "10B": (48, 0.8), "100B": (108, 4.9)}
PLAIN: dict[str, Any] = {"method": "data_parallel"}
BEST: dict[str, Any] = {"method": "streaming", "tau": 1, "bits": 4}
H100 = "streaming_overlap_fp4_H100"
Result = tuple[str, str]  # Our numbers and the verdict.


@functools.cache
def rows() -> list[Row]:
  """Computes all claims; a shared result counts as a cost of the first claim only."""
  claims = []
  for name, claim in WORDS.items():
    # A claim with `here` has no function: a paper contradicts itself, and `here` says
    # what this code does.
    here, result, began = claim.get("here"), INCONSISTENT, time.perf_counter()
    if here is None:
      here, result = globals()[name]()
    cost = "-" if "here" in claim else f"{time.perf_counter() - began:.2f} s"
    row = {"here": here, "cost": cost, "verdict": result}
    claims.append({"choice": "", "command": "-", **claim, **row})
  return claims


def verdict(here: str, is_so: bool) -> Result:
  return here, SHOWN if is_so else CONTRADICTED


cells_4 = functools.cache(tables.table4)


@functools.cache
def table_4() -> dict[str, list[float]]:
  """Returns {method: our Gbit/s for 95% utilisation with 1B, 10B, 100B parameters}."""
  gbits, at = dict[str, list[float]](), tables.TARGETS.index(0.95)
  for row in cells_4():
    gbits.setdefault(row.name.split()[1], []).append(row.ours[at])
  return gbits


def cells_of_table_4() -> Result:
  return _cells(cells_4())


def cells_of_table_6() -> Result:
  return _cells(tables.table6())


def _cells(rows: list[tables.Row]) -> Result:
  steps = np.array([row.distances for row in rows])
  here = f"{np.sum(steps == 0)} of {steps.size} equal"
  if steps.any():
    here += f", {np.sum(steps == 1)} one grid point away"
  return verdict(here, steps.max() <= 1)


def best_method_needs() -> Result:
  gbits = table_4()["streaming_overlap_fp4"]
  return verdict(_list(gbits) + " Gbit/s", min(gbits) >= 1 and max(gbits) <= 5)


def data_parallel_needs() -> Result:
  gbits = table_4()["data_parallel"]
  return _list(gbits) + " Gbit/s, as in table 4", INCONSISTENT


def only_overlap_is_full() -> Result:
  names = ("data-parallel", "DiLoCo", "streaming", "overlap")
  settings = (PLAIN, {"method": "diloco"}, {"method": "streaming"}, BEST)
  shares = [_long_run(10e9, *SHAPES["10B"], 1e12, **fields) for fields in settings]
  here = ", ".join(f"{name} {share:.3%}" for name, share in zip(names, shares))
  full = [share > 1 - 1e-6 for share in shares]
  return verdict(here, full == [False, False, False, True])


def larger_models_need_less() -> Result:
  gbits = table_4()["streaming_overlap"]
  return verdict(_list(gbits) + " Gbit/s", gbits == sorted(gbits, reverse=True))


def streaming_needs_less() -> Result:
  method = lambda name: [row.ours for row in cells_4() if row.name.split()[1] == name]
  more = np.subtract(method("streaming"), method("diloco"))
  here = f"less in {np.sum(more < 0)} of {more.size} cells of table 4,"
  return verdict(f"{here} more in {np.sum(more > 0)}", more.max() <= 0)


def two_orders_less() -> Result:
  gbits = table_4()
  ratios = np.divide(gbits["data_parallel"], gbits["streaming_overlap_fp4"])
  return verdict(f"{_list([*ratios.round()])} times less", ratios.min() >= 100)


def strided_is_busier() -> Result:
  gbits = _needs({"pattern": "sequential"}, {"pattern": "strided"})
  return verdict(f"{_list(gbits)} Gbit/s", gbits[1] < gbits[0])


def five_steps_are_enough() -> Result:
  gbits = _needs(*({"tau": tau} for tau in (1, 2, 5, 10)))
  return verdict(f"{_list(gbits)} Gbit/s", gbits[3] > 0.99 * gbits[2])


def _needs(*settings: dict[str, Any]) -> list[float]:
  """Returns the long-run Gbit/s for 95% utilisation of a 100B model, 16-bit values."""
  methods = [BEST | {"bits": 16} | fields for fields in settings]
  works = [papers_workload(100e9, *SHAPES["100B"], **fields) for fields in methods]
  return [round(required_bandwidth(work, 0.95) / 1e9, 2) for work in works]


def deepseek() -> Result:
  shape = tables.TABLE_6["deepseek_v3"]
  ours = _long_run(671e9, *shape, 4e9, **BEST)
  plain = _long_run(671e9, *shape, 1e12, **PLAIN)
  return verdict(f"{ours:.1%}, {plain:.1%}", min(ours, plain) > 0.95)


def _long_run(
  params: float, layers: int, seconds: float, rate: float, **fields: Any
) -> float:
  """Returns the utilisation of an endless run."""
  work = papers_workload(params, layers, seconds, **fields)
  return float(steady_utilisation(work, [rate])[0])


def hours_of_table_1() -> Result:
  ratios = [float(row["hours"]) / float(row["paper_hours"]) for row in tables.table1()]
  worst = max(abs(ratio - 1) for ratio in ratios)
  return verdict(f"within {worst:.1%}", worst < 0.05)


def terabytes_of_table_1() -> Result:
  bits = float(tables.table1()[0]["terabits"])
  return f"{bits:.0f} terabits are {bits / 8:.0f} TB, for its hours", INCONSISTENT


def fewer_bits() -> Result:
  per_step = {}
  for fields in (PLAIN, BEST):
    work = papers_workload(1e9, *SHAPES["1B"], **fields)
    per_step[work.method] = work.bits * work.copies / work.whole_plan[0].sync_every
  ratio = per_step["data_parallel"] / per_step["streaming"]
  scaled = ratio * 4 / (4 + 8 / 128)
  here = f"{ratio:.0f}; {scaled:.0f} with our scale of one byte per 128 codes"
  return verdict(here, round(ratio) == 400)


def lower_peak() -> Result:
  layers, _ = SHAPES["1B"]
  fragments = make_fragments(layers, 3, "strided")
  ratio = layers / max(len(fragment.layers) for fragment in fragments)
  return verdict(f"{ratio:g}, by layers", ratio == 8)


def memory_of_100B() -> Result:
  inner, outer, held = (row["GiB"] for row in memory(100e9, 100e9 * 3 / 108)[:3])
  here = f"{outer / inner:.1%}; {inner:,.0f} and {held:.1f} GiB, {held / inner:.2%}"
  numbers = outer / inner, inner, held, held / inner
  return verdict(here, np.allclose(numbers, (0.66, 1117, 20, 0.02), rtol=0.1))


def offload_time() -> Result:
  *_, held = memory(100e9, 100e9 * 3 / 108)
  return ", ".join([f"{held[rate]:.0f} ms at {rate}" for rate in RATES]), INCONSISTENT


def slopes() -> Result:
  """Fits the loss, not its logarithm, over ln(FLOPs), to get the paper's numbers."""
  pairs = [_table_5(name) for name in ("data_parallel", H100)]
  fitted = [np.polyfit(x, loss, 1)[0] for x, loss in pairs]
  # The paper prints two decimals: each loss has a uniform error of at most 0.005.
  x, _ = pairs[0]
  error = 1.645 * 0.01 / 12**0.5 / (np.std(x) * len(x) ** 0.5)
  here = f"{fitted[0]:.5f}, {fitted[1]:.5f}, each ± {error:.5f} by the printed digits;"
  here += " slopes of the loss over ln(FLOPs), which are no exponents"
  return verdict(here, np.allclose(fitted, (-0.13149, -0.13539), atol=error, rtol=0))


def slopes_differ() -> Result:
  (x, plain), (_, ours) = (_table_5(name) for name in ("data_parallel", H100))
  (slope, _), covariance = np.polyfit(x, ours - plain, 1, cov=True)
  half = scipy.special.stdtrit(len(x) - 2, 0.95) * covariance[0, 0] ** 0.5
  here = f"{slope:.4f} ± {half:.4f}: 90% interval, paired by size"
  return verdict(here, slope + half < 0)


def _table_5(method: str) -> np.ndarray:
  """Returns ln(FLOPs) and loss of each size: float64 [2, sizes]."""
  rows = papers_table("reproduce", "streaming_table5_c4_scaling")
  of_method = [row for row in rows if row["method"] == method and row["eval_loss"]]
  pairs = [(np.log(float(row["flops"])), float(row["eval_loss"])) for row in of_method]
  return np.array(pairs).T


def outer_is_half() -> Result:
  high, low = (wallclock.NETWORKS[name].bandwidth for name in ("high", "low"))
  here = list[str]()
  for chips, m in ((64, 2), (64, 8), (16, 8)):
    inner = wallclock.all_reduce_time(1, chips / m, wallclock.Network(high, 0))
    outer = wallclock.all_reduce_time(1, chips, wallclock.Network(low, 0)) * low / high
    here.append(f"{outer / (inner + outer):.1%} with {chips} chips and M = {m}")
  return "; ".join(here) + ", by the paper's formulas", INCONSISTENT


def faster_in_wall_clock() -> Result:
  return _faster(paper.REPLICAS, paper.model_sizes("nominal"), 1, 0.9)


def overtraining_is_faster() -> Result:
  return _faster((2,), paper.model_sizes("nominal")[3:], 16, 1)


def _faster(
  replicas: Iterable[int], sizes: Iterable[float], more: float, share: float
) -> Result:
  """Compares the times of DiLoCo and data-parallel at their best batches."""
  networks = wallclock.NETWORKS.values()
  faster = [
    _seconds("diloco", *setting, more) < _seconds("data_parallel", *setting, more)
    for setting in itertools.product(sizes, replicas, networks)
  ]
  here = f"{sum(faster)} of {len(faster)} settings"
  return verdict(here, sum(faster) >= share * len(faster))


def _seconds(
  method: str, n: float, m: int, network: wallclock.Network, more: float
) -> float:
  """Returns the seconds to train 20 N * `more` tokens; see `wallclock.chips`."""
  batch = paper.law("batch_size", f"diloco_M{m}" if method == "diloco" else method)(n)
  chips, tokens = max(wallclock.chips(n, batch), 2, m), paper.CHINCHILLA * n * more
  run = wallclock.Training(n, tokens, batch, m, method, across=network, chips=chips)
  return wallclock.total_time(run)


def hundred_times_less() -> Result:
  """DiLoCo sends H times less per step, in fewer steps, as its best batch is larger."""
  plain, joint = (paper.law("batch_size", name) for name in ("data_parallel", "joint"))
  here, over = list[str](), list[bool]()
  for m in (2, 4, 8):
    ratios = [round(30 * joint(n, m) / plain(n)) for n in (4e9, 10e9)]
    here.append(f"{_list(ratios)} with M = {m}")
    over += [ratio > 100 for ratio in ratios]
  text, result = verdict("; ".join(here), all(over))
  # The answer may depend on M, and on how a batch is rounded.
  return text, NOT_SHOWN if any(over) and not all(over) else result


def loss_laws() -> Result:
  return _agree(laws.table7(), laws.table10())


def left_out_size() -> Result:
  return _agree(laws.table11())


def batch_laws() -> Result:
  return _agree(_only(laws.table10_from_8_and_9(), "batch_size"))


def rate_laws() -> Result:
  [cells] = _only(laws.table10_from_8_and_9(), "inner_lr").rows.values()
  return f"beta {cells[-1].ours:.2f} from table 8", INCONSISTENT


def _only(table: laws.Table, name: str) -> laws.Table:
  rows = {row: cells for row, cells in table.rows.items() if row.startswith(name)}
  return dataclasses.replace(table, rows=rows)


def _agree(*compared: laws.Table) -> Result:
  """Compares our numbers with the printed numbers, within 0.2% or 0.0005."""
  off, same = [], True
  for table in compared:
    for column, (deviation, _) in table.largest().items():
      ratio = column in table.relative
      off.append(f"{column} {deviation:.2%}" if ratio else f"{column} {deviation:.5f}")
      same &= deviation < (0.002 if ratio else 0.0005)
  return verdict("largest deviations: " + ", ".join(off), same)


def extrapolation() -> Result:
  rows = laws.extrapolation().rows.items()
  plain = [cells for row, cells in rows if not row.endswith("floor")]
  pairs = [[(cell.ours, cell.paper) for cell in cells] for cells in plain]
  ours, theirs = np.moveaxis(np.array(pairs, float), -1, 0)
  at_4B, at_10B = abs(ours / theirs - 1).max(axis=0)
  inside = sum(not cell.outside for cells in plain for cell in cells)
  here = f"within {at_4B:.1%} at 4B and {at_10B:.1%} at 10B;"
  here += f" {inside} of {ours.size} losses lie inside our 90% intervals"
  return verdict(here, max(at_4B, at_10B) < 0.05)


def finding_1() -> Result:
  alphas = [paper.law("loss", name).alpha for name in paper.ALGORITHMS]
  return verdict(f"alpha {_list(alphas)}", alphas == sorted(alphas, reverse=True))


def crossing() -> Result:
  two = ("data_parallel", "diloco_M2")
  printed = _crossing(*(paper.law("loss", name) for name in two))
  ours = _crossing(*(paper.loss_fit(name).law for name in two))
  here = f"from {printed:.1f}B on by the printed laws, from {ours:.1f}B by laws fitted"
  return f"{here} to table 4", NOT_SHOWN


def _crossing(one: PowerLaw, other: PowerLaw) -> float:
  """Returns the size, in 1e9 parameters, above which the loss of `other` is lower."""
  return (one.A / other.A) ** (1 / (other.alpha - one.alpha)) / 1e9


def finding_2() -> Result:
  lower = paper.losses("diloco_M1") < paper.losses("data_parallel")
  return verdict(f"{np.sum(lower)} of {len(lower)} sizes", bool(np.all(lower)))


def finding_3() -> Result:
  batches = np.array(
    [
      [paper.law("batch_size", name)(n) for name in paper.ALGORITHMS]
      for n in paper.model_sizes()
    ]
  )
  grows = np.all(np.diff(batches) > 0, axis=1)
  here = f"in order at {np.sum(grows)} of {len(grows)} sizes"
  return verdict(here, bool(np.all(grows[1:])))


def parametric_forms() -> Result:
  residuals = [f"{residual:.4f}" for residual in laws.residuals_at_optimum()]
  # The search's result depends on its starts, which the paper does not print.
  return f"{', '.join(residuals)} at the optima", NOT_SHOWN


def _list(numbers: Sequence[float]) -> str:
  return ", ".join(f"{number:g}" for number in numbers)
