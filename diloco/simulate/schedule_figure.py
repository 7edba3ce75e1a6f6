"""Draws a schedule: inner steps, sends, fragments in flight, merges.

A run of the config sends and merges at the drawn steps, because it has this schedule.
"""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from diloco.config import Config
from diloco.errors import ConfigError
from diloco.simulate.limits import NO_ROUNDS
from diloco.spec.fragments import Fragment
from diloco.spec.shapes import parameters
from diloco.spec.sizes import sync_bytes
from diloco.util.command import prefixed
from diloco.util.palette import COLORS, PAGE, shades

MOST_STEPS = 1000  # More steps would be narrower than a pixel.
NAMES = {"diloco": "DiLoCo", "streaming": "Streaming DiLoCo"}
HEIGHT = 0.62  # Height of a bar; a row has the height 1.


class Send(NamedTuple):
  """The sending of one fragment after an inner step.

  Attributes:
    step: number of finished inner steps.
    fragment: index p of the fragment.
    nbytes: bytes that one replica sends.
  """

  step: int
  fragment: int
  nbytes: int


def planned(c: Config, first: int, last: int) -> list[Send]:
  """Lists the sends after the inner steps first..last, and earlier ones in flight."""
  shapes = parameters(c.model)
  sizes = [sync_bytes(c.wire, c.replicas, f.shapes(shapes)) for f in c.make_fragments()]
  schedule, start = c.make_schedule(), max(first - max(c.overlap.taus), 1)
  return [
    Send(t, p, sizes[p]) for t in range(start, last + 1) for p in schedule.sends(t)
  ]


def window(c: Config, first: int | None, last: int | None) -> tuple[int, int]:
  """Returns the steps to draw; by default one round from just before the first send.

  Raises:
    ConfigError: the config has no rounds, or there are no steps or too many to draw.
  """
  if not c.make_fragments():
    raise ConfigError(NO_ROUNDS)
  margin = 3 + c.sync_every // 20
  first = max(c.make_schedule().first_send(0) - margin, 1) if first is None else first
  if last is None:
    last = first + c.sync_every + max(c.overlap.taus) + margin + 1
  last = min(last, c.train.steps)
  if first < 1 or not 0 <= last - first < MOST_STEPS:
    raise ConfigError(
      f"--first is {first} and --last is {last}; draw from 1 to {MOST_STEPS} steps"
      f" between 1 and {c.train.steps}."
    )
  return first, last


def make(c: Config, sends: Sequence[Send], first: int, last: int) -> Figure:
  """Draws the schedule, with a title above and a legend below."""
  count = len(c.make_fragments())
  height = 1.0 + 0.2 * (count + c.replicas)
  figure = Figure(figsize=(PAGE, height), layout="constrained")
  axes = figure.subplots()
  draw(c, sends, first, last, axes)
  axes.set_title(
    f"{NAMES[c.algorithm]}: {c.replicas} replicas, {count} fragment{'s' * (count > 1)},"
    f" H = {c.sync_every}, τ = {c.overlap.different_taus}, {c.wire.format.upper()}"
  )
  color = COLORS[c.algorithm]
  handles: list[Patch | Line2D] = [
    Patch(color="0.8", label="inner steps"),
    Line2D([], [], marker="v", ls="", color=color, label="all replicas send"),
    Patch(color=color, label="in flight"),
    Line2D([], [], marker="|", ls="", mew=2.5, ms=9, color=color, label="merge"),
  ]
  if len(set(c.overlap.taus)) > 1:
    waits = Patch(color=color, alpha=0.3, label="waits for a replica with a larger τ")
    handles.insert(3, waits)
  figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
  return figure


def draw(c: Config, sends: Sequence[Send], first: int, last: int, axes: Axes) -> None:
  """Draws the steps first..last: replicas above, fragments in flight below."""
  fragments = c.make_fragments()
  count, taus = len(fragments), c.overlap.taus
  base = count + 0.6  # Bottom of the lowest replica.
  rows = {base + c.replicas - 1 - m: f"replica {m}" for m in range(c.replicas)}
  steps = [(t - 0.9, 0.8) for t in range(first, last + 1)]
  for y in rows:
    axes.broken_barh(steps, (y, HEIGHT), lw=0, color="0.8")
  colors = shades(COLORS[c.algorithm], count)
  for send in sends:
    p, t = send.fragment, send.step
    y, color = count - 1 - p, colors[p]
    # After its last step, the trainer receives all that is in flight.
    merges = [min(t + tau, c.train.steps) for tau in taus]
    arrival, end = min(merges), max(merges)
    axes.add_patch(Rectangle((t, y), arrival - t, HEIGHT, color=color))
    if end > arrival:
      waits = Rectangle((arrival, y), end - arrival, HEIGHT, fc=color, alpha=0.3, lw=0)
      axes.add_patch(waits)
    if t >= first:
      axes.plot([t, t], [y + HEIGHT, base - 0.12], color=color, lw=0.8)
      axes.plot(t, base - 0.12, "v", color=color, ms=4)
    for row, merge in zip(rows, merges):
      if first <= merge <= last:
        axes.plot([merge] * 2, [y + HEIGHT, row], ":", color=color, lw=0.8)
        axes.plot([merge] * 2, [row - 0.08, row + 0.7], color=color, lw=2.5)
  sizes = {send.fragment: f" ({prefixed(send.nbytes)}B)" for send in sends}
  for p, fragment in enumerate(fragments):
    rows[count - 1 - p] = content(fragment, c) + sizes.get(p, "")
  axes.set_yticks([y + HEIGHT / 2 for y in rows], list(rows.values()))
  axes.tick_params(left=False)
  axes.set(xlim=(first - 1.5, last + 1), ylim=(-0.3, base + c.replicas))
  axes.set_xlabel("inner steps")
  axes.grid(visible=False)
  axes.spines[["top", "right", "left"]].set_visible(False)


def content(fragment: Fragment, c: Config) -> str:
  """Names the parameters of a fragment, such as "layers 0, 3, 6"."""
  count = len(fragment.layers)
  names = ", ".join(map(str, fragment.layers[:4])) + (", ..." if count > 4 else "")
  parts = [f"layer{'s' * (count > 1)} {names}"] * bool(count)
  parts += ["embedding"] * ("embed" in fragment.shapes(parameters(c.model)))
  return "whole model" if c.fragments.pattern == "whole" else " and ".join(parts)
