r"""Compares runs by a table and a picture of their losses. Runs may still train.

python -m diloco compare runs/data_parallel runs/diloco runs/streaming
python -m diloco compare runs/a runs/b --out=ab.png
"""

import argparse
import dataclasses
import itertools
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from diloco.config.comparable import READING, apart, incomparable, model_fields
from diloco.config.resolve import leaves
from diloco.log.curves import line, points, smoothed
from diloco.log.read_run import Run, joined, names_of, read
from diloco.log.workdir import title
from diloco.spec import plugins
from diloco.spec.shapes import matrix_params
from diloco.util import command, files, palette, remote

# Fields that get no extra column: they have a column, follow from other columns, or
# change no result. `Extension.free` names such fields of plug-ins.
_QUIET = (
  *("algorithm", "replicas", "sync_every", "seed", "overlap.tau", "overlap.transport"),
  *("wire.format", "fragments.pattern", "train.tokens", "plugins"),
  *("sites.", "eval.", "mesh.", "log.", "checkpoint.", "profile."),
  *READING,
)
ABOVE = "above data-parallel (%)"


def named(runs: Sequence[Run]) -> list[Run]:
  """Names the runs of a sweep by the fields that differ, not by their digests."""
  fields = [leaves(run.config.to_dict()) for run in runs]
  differs = _differing(fields, "seed")
  pairs = lambda values: [f"{f.rpartition('.')[2]}={values.get(f)}" for f in differs]
  names = [", ".join([title(run.config), *pairs(x)]) for run, x in zip(runs, fields)]
  named_runs = list[Run]()
  for run, name in zip(runs, names):
    digest = re.fullmatch(r"(.*/)?[0-9a-f]{12}", run.name)
    rename = digest and names.count(name) == 1
    named_runs.append(dataclasses.replace(run, name=name) if rename else run)
  return named_runs


def _differing(runs: Sequence[Mapping[str, Any]], *also: str) -> list[str]:
  """Returns the fields in which runs differ; _QUIET fields only if in `also`."""
  shown = lambda f: f in also or not f.startswith(_QUIET + plugins.free())
  names = filter(shown, dict.fromkeys(itertools.chain(*runs)))
  return [f for f in names if len({repr(run.get(f)) for run in runs}) > 1]


def mean_of(runs: Sequence[Run]) -> Run:
  """Returns a run with the mean losses of runs that differ only in their seeds."""
  mean = lambda losses: pd.DataFrame(losses).mean(skipna=False).to_dict()
  return dataclasses.replace(
    runs[0],
    name=_name(runs),
    loss=mean([run.loss for run in runs]),
    held_out=mean([run.held_out for run in runs]),
    seeds=len(runs),
  )


def row(runs: Sequence[Run]) -> dict[str, str]:
  """Returns the columns of a run: its settings, then its results.

  Args:
    runs: one run, or several that differ only in their seeds.
  """
  run = runs[0]
  c, step, last = run.config, run.step, max(run.held_out, default=0)
  losses = [one.held_out[last] for one in runs] if last else []
  speeds = [one.tokens_per_s for one in runs if one.tokens_per_s]
  taus, wire = c.overlap.different_taus, c.wire.format
  unsynced = {"H": "-", "tau": "-", "wire": c.inner.gradient_dtype}
  synced = {"H": str(c.sync_every), "tau": taus, "wire": wire}
  loss = f"{np.mean(losses):.4f}" if last else "-"
  if last and len(runs) > 1:
    loss += f" ± {np.std(losses, ddof=1):.4f}"
  return {
    "algorithm": c.algorithm,
    "M": str(c.replicas),
    **(unsynced if c.one_model else synced),
    "N": f"{matrix_params(c.model):,}",
    "seed": ", ".join(str(one.config.seed) for one in runs),
    "step": f"{step:,}" + (f" of {c.train.steps:,}" if step < c.train.steps else ""),
    "tokens": f"{step * c.tokens_per_step:,}",
    "held-out loss": loss + (f" at {last:,}" if 0 < last < step else ""),
    "bits/byte": f"{np.mean([one.bits[last] for one in runs]):.4f}" if last else "-",
    "bytes sent": f"{run.sent.get(step, 0):,.0f}",
    "peak bytes": f"{run.peak:,}",
    "tokens/s": f"{np.mean(speeds):,.0f}" if speeds else "-",
  }


def table(runs: Sequence[Run]) -> str:
  """Formats a line per run, after a line with the settings that all runs share.

  Runs that differ only in their seeds share a line.
  """
  groups = joined(runs)
  fields = [leaves(group[0].config.to_dict()) for group in groups]
  others = pd.DataFrame(fields, columns=_differing(fields)).astype(str)
  frame = pd.DataFrame([row(group) for group in groups]).join(others)
  gaps = above(groups)
  if len(gaps) - gaps.count("-") > 1:
    frame.insert(frame.columns.get_loc("bits/byte"), ABOVE, gaps)
  settings = ("M", "H", "tau", "wire", "N", "seed", "step", "tokens")
  alike = [name for name in settings if frame[name].nunique() == 1 and len(groups) > 1]
  shared = "all: " + ", ".join(f"{name} {frame[name][0]}" for name in alike)
  shown = frame.drop(columns=alike).set_axis([*map(_name, groups)])
  text = (shared + "\n\n") * bool(alike) + shown.to_string()
  if len(groups) < len(runs):
    text += "\n\n±: standard deviation over the seeds; tokens/s: their mean"
  return text


def above(groups: Sequence[Sequence[Run]]) -> list[str]:
  """Returns by how many % each group's held-out loss is above data-parallel's.

  Each group is compared with the best data-parallel group that shares a seed with it,
  has the same model and was evaluated after as many tokens on the same text. Only
  losses of the shared seeds count, and they are compared per seed.
  """
  finals, texts = [_final(group) for group in groups], list[str]()
  pairs = [*zip(groups, finals)]
  plain = [(g[0], x) for g, x in pairs if g[0].config.algorithm == "data_parallel"]
  for group, (tokens, losses) in pairs:
    run, same = group[0], model_fields(group[0].basis)
    rivals = (
      {seed: theirs[seed] for seed in losses.keys() & theirs}
      for other, (t, theirs) in plain
      if t == tokens > 0 and not apart(run.basis, other.basis, *same)
    )
    mean = lambda theirs: np.mean([*theirs.values()])
    best = min(filter(None, rivals), key=mean, default={})
    gaps = [100 * (losses[seed] / loss - 1) for seed, loss in best.items()]
    spread = f" ± {np.std(gaps, ddof=1):.2f}" if len(gaps) > 1 else ""
    texts.append(f"{np.mean(gaps):+.2f}{spread}" if gaps else "-")
  return texts


def _final(runs: Sequence[Run]) -> tuple[int, dict[int, float]]:
  """Returns the tokens before the last evaluation, and {seed: its held-out loss}."""
  last = max(runs[0].held_out, default=0)
  losses = {run.config.seed: run.held_out[last] for run in runs if last}
  return last * runs[0].config.tokens_per_step, losses


def _name(runs: Sequence[Run]) -> str:
  """Returns the common beginning of the names of runs, and the number of runs."""
  if len(runs) == 1:
    return runs[0].name
  common = os.path.commonprefix([run.name for run in runs])  # noqa: RUF071
  common = re.sub(r"[\W_]*(seed|s)?[\W_]*$", "", common) or runs[0].config.algorithm
  return f"{common} (n={len(runs)})"


def draw(runs: Sequence[Run]) -> Any:
  """Draws the loss over tokens and over bytes sent; returns the figure."""
  from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter  # Slow import.

  title = "Lines: training loss, smoothed. Circles: held-out loss."
  if any(run.seeds > 1 for run in runs):
    title += " (n=...): mean of so many runs with different seeds."
  figure, panels = palette.panels(title, ("", ""), 3.2, sharey=True)
  looks = palette.looks({label(run): run.config.algorithm for run in runs})
  for run, look in zip(runs, looks):
    c = run.config
    steps, loss = points(run.loss)
    places = [{t: float(t * c.tokens_per_step) for t in run.loss}, run.sent]
    for panel, place in zip(panels, places):
      # A logarithmic axis cannot show 0.
      x = np.array([place.get(t) or math.nan for t in steps], dtype=float)
      # Keeps only the last step with each x; a run may have no step yet.
      last = np.append(x[1:] != x[:-1], True)[: len(x)]
      line(panel, x[last], smoothed(loss)[last], **look)
      for t in filter(place.get, run.held_out):
        color = look["color"]
        panel.plot(place[t], run.held_out[t], "o", color=color, mec="black", ms=4)
  panels[0].set_xlabel("tokens")
  panels[0].xaxis.set_major_formatter(EngFormatter(sep=""))
  panels[1].set(xlabel="bytes sent by one replica", xscale="log")
  low, high = panels[1].get_xlim()
  subs = (1, 2, 5) if high < 40 * low else (1,)  # More labels would overlap.
  panels[1].xaxis.set_major_locator(LogLocator(subs=subs, numticks=6))
  panels[1].xaxis.set_major_formatter(EngFormatter(sep=""))
  panels[1].xaxis.set_minor_formatter(NullFormatter())
  panels[0].set_ylabel("loss (nats per token)")
  return palette.legend(figure)


def label(run: Run) -> str:
  """Names a run and its method in the legend."""
  name, method = run.name, title(run.config)
  if name.startswith(method):  # The name from `named` is enough.
    return name
  return method if name == run.config.algorithm else f"{name}: {method}"


def missing(run: Run) -> list[str]:
  """Returns a sentence for each result that a run lacks."""
  if not run.loss:
    return [f"{run.name} has no step yet."]
  sentences = list[str]()
  if run.step < run.config.train.steps:
    sentences.append(f"{run.name} is not finished; the numbers are those so far.")
  if not run.held_out:
    sentences.append(f"{run.name} has no held-out loss yet; see eval.every.")
  if not run.sent[run.step]:
    sentences.append(f"{run.name} has sent nothing, so it has no line against bytes.")
  return sentences


def compare(args: argparse.Namespace) -> None:
  """Prints the table, and writes the picture."""
  if args.out:
    command.check_picture(args.out, "compare.png")
  folders = [remote.local_copy(place, "WORKDIR") for place in args.workdir]
  runs = named([read(*pair) for pair in zip(folders, names_of(folders))])
  means = [mean_of(group) for group in joined(runs)]
  print(table(runs) + "\n")
  warned = incomparable([run.basis for run in runs])
  for sentence in [*warned, *itertools.chain(*map(missing, runs))]:
    print(sentence)
  out = args.out or folders[0] / "compare.png"
  palette.save(lambda: draw(means), out)
  remote.put_back(out)
  print(f"picture      {files.shown(out)}")


def main(argv: Sequence[str] | None = None) -> int:
  parser = command.Parser(prog="python -m diloco compare", description=__doc__)
  add = parser.add_argument
  text = "--workdir of a run, or the folder of its site-0, site-1, ..."
  add("workdir", metavar="WORKDIR", type=command.as_place, nargs="+", help=text)
  add(
    "--out",
    type=command.as_path,
    help="picture to write; default compare.png in WORKDIR",
  )
  return command.guarded(compare, parser.parse_args(argv))


if __name__ == "__main__":
  sys.exit(main())
