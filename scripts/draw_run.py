"""Draws the schedule of a run from its metrics: inner steps, sends, merges.

python -m diloco draw_run --workdir=/tmp/sample --first=17 --last=62 --out=/tmp/run.png
"""

import pathlib
import sys

from absl import flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from diloco.config import Config, ConfigError, command_line, complete
from diloco.run import metrics
from diloco.run.record import read_record, steps_of

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run of DiLoCo.")
_FIRST = flags.DEFINE_integer("first", 1, "First inner step to draw.", lower_bound=1)
_LAST = flags.DEFINE_integer("last", 60, "Last inner step to draw.")
_OUT = flags.DEFINE_string("out", None, "Picture to write, for example run.png.")
# More steps would be narrower than a pixel.
MOST_STEPS = 1000


def read(workdir: pathlib.Path) -> tuple[Config, list[dict]]:
  """Reads a run's config and the records of its sends.

  Raises:
    ConfigError: the folder holds no run that synchronises replicas.
  """
  steps = steps_of(workdir)
  if not steps:
    raise ConfigError(f"--workdir is {workdir}, which has no checkpoint; train first.")
  try:
    c = complete(read_record(workdir, steps[0]).config)
    names = ("step", "fragment", "bytes")
    sends = [{name: r[name] for name in names} for r in metrics.read(workdir, "send")]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ConfigError(
      f"--workdir is {workdir}, whose newest checkpoint or metrics.jsonl cannot be read"
      f" ({type(error).__name__}: {command_line.one_line(error)})."
    ) from error
  if c.data_parallel:
    raise ConfigError(f"--workdir is {workdir}, a data-parallel run; use a DiLoCo run.")
  return c, sends


def check(sends: list[dict], first: int, last: int, out: pathlib.Path) -> None:
  """Raises a ConfigError if the picture would be empty or cannot be written."""
  if not 0 <= last - first < MOST_STEPS:
    raise ConfigError(
      f"--first is {first} and --last is {last}; draw from 1 to {MOST_STEPS} steps."
    )
  steps = [send["step"] for send in sends]
  if not any(first <= step <= last for step in steps):
    known = f"sends from step {min(steps)} to {max(steps)}" if steps else "no send"
    raise ConfigError(
      f"--first is {first} and --last is {last}, but the log has {known}; choose steps"
      " with a send."
    )
  kinds = Figure().canvas.get_supported_filetypes()
  if out.suffix.removeprefix(".") not in kinds:
    raise ConfigError(f"--out is {str(out)!r}; give a file such as run.png or run.svg.")


def draw(c: Config, sends: list[dict], first: int, last: int, axes: Axes) -> None:
  """Draws steps first..last: replicas above, the fragments in flight below."""
  fragments = c.make_fragments()
  count = len(fragments)
  base = count + 0.6  # Bottom of the lowest replica.
  rows = {base + c.replicas - 1 - m: f"replica {m}" for m in range(c.replicas)}
  for y in rows:
    for t in range(first, last + 1):
      axes.add_patch(Rectangle((t - 0.9, y), 0.8, 0.62, lw=0, color="#c4ced3"))
  for send in sends:
    p, t = send["fragment"], send["step"]
    if not first <= t <= last:
      continue
    color, y = f"C{p}", count - 1 - p
    arrival = t + max(c.overlap.taus)
    axes.add_patch(Rectangle((t, y), arrival - t, 0.62, color=color))
    text = {"fontsize": 7, "va": "center_baseline", "color": "white", "ha": "center"}
    if arrival - t > (last - first) / 20:  # The text fits into the bar.
      size = f"{send['bytes'] / 1000:.0f} kB"
      axes.text((t + arrival) / 2, y + 0.31, size, **text)
    axes.plot([t, t], [y + 0.62, base - 0.12], color=color, lw=0.8)
    axes.plot([arrival] * 2, [y + 0.62, base], ":", color=color, lw=0.8)
    axes.plot(t, base - 0.12, "v", color=color, ms=5)
    for row, tau in zip(rows, c.overlap.taus):
      if t + tau <= last:
        axes.plot([t + tau] * 2, [row - 0.08, row + 0.7], color=color, lw=2.5)
  for p, fragment in enumerate(fragments):
    parts = [f"layer {n}" for n in fragment.layers] + ["embedding"] * bool(
      fragment.rest
    )
    rows[count - 1 - p] = ", ".join(parts[:3]) + ", ..." * (len(parts) > 3)
  axes.set_yticks([y + 0.31 for y in rows], rows.values(), fontsize=8)
  axes.tick_params(left=False)
  axes.set(xlim=(first - 1.5, last + 4), ylim=(-0.3, base + c.replicas))
  axes.set_xlabel("inner steps", fontsize=8)
  axes.tick_params(axis="x", labelsize=8)
  axes.spines[["top", "right", "left"]].set_visible(False)
  tau = "/".join(map(str, sorted(set(c.overlap.taus))))
  axes.set_title(
    f"{c.replicas} replicas, {count} fragments, H = {c.sync_every}, tau = {tau},"
    f" {c.wire.format.upper()}. Grey: inner steps. Triangle: all replicas send the"
    " outer gradient of a fragment.\nBar: the fragment is in flight. Mark on a"
    " replica: outer step, then the replica merges the fragment and trains on.",
    fontsize=8,
    loc="left",
  )


def main(argv) -> None:
  del argv
  c, sends = read(pathlib.Path(str(_WORKDIR.value)))
  check(sends, _FIRST.value, _LAST.value, pathlib.Path(str(_OUT.value)))
  command_line.make_folder(pathlib.Path(str(_OUT.value)).parent, "--out")
  height = 0.9 + 0.3 * (len(c.make_fragments()) + c.replicas)
  figure = Figure(figsize=(9, height), layout="constrained")
  draw(c, sends, _FIRST.value, _LAST.value, figure.subplots())
  figure.savefig(_OUT.value, dpi=130)
  print(_OUT.value)


if __name__ == "__main__":
  flags.mark_flags_as_required(["workdir", "out"])
  sys.exit(command_line.run(main))
