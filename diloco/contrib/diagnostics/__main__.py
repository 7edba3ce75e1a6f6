"""Draws the diagnostics of a run, layer by layer. The run need not be finished.

python -m diloco diagnostics runs/sample --out=diagnostics.png

A run measures them with --config.plugins=diagnostics --config.diagnostics.every=4
(docs/watch.md). No JAX.
"""

import argparse
import itertools
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from diloco.config import Config
from diloco.contrib.diagnostics import Diagnostics
from diloco.errors import ConfigError
from diloco.log import metrics, workdir
from diloco.log.curves import line, points, running_mean, smoothed
from diloco.log.workdir import title
from diloco.util.command import Parser, as_path, check_picture, guarded
from diloco.util.palette import COLORS, OTHERS, PAGE, save, shades
from diloco.util.types import Json

if TYPE_CHECKING:  # Matplotlib is slow to import.
  from matplotlib.artist import Artist
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

# Name of a fragment's part outside the layers: embedding, positions, final norm, head.
EMBEDDING = "embedding"
Records = Sequence[Json]
# {curve: {step: value}}
Curves = dict[str, dict[int, float]]


def read(folder: pathlib.Path) -> tuple[Config, metrics.Kinds]:
  """Reads a run's config, and its records by kind: send, receive, merge.

  Raises:
    ConfigError: the folder has no run with diagnostics, or a run in several parts.
  """
  c, [kinds] = workdir.read(folder, "send", "receive", "merge")
  if not any("replica_drift_by_layer" in r for r in kinds["send"]):
    raise ConfigError(
      f"WORKDIR is {str(folder)!r}, whose {metrics.FILE} has no diagnostics; train with"
      " --config.plugins=diagnostics --config.diagnostics.every=4, and not with"
      " algorithm=data_parallel."
    )
  return c, kinds


def by_layer(c: Config, records: Records, name: str) -> Curves:
  """Returns the curve of each layer and of the embedding; replicas are averaged."""
  parts = [*(f"layer {i}" for i in range(c.model.num_layers)), EMBEDDING]
  fragments, curves = c.make_fragments(), {part: dict[int, float]() for part in parts}
  for r in records:
    if name in r:
      fragment = fragments[r["fragment"]]
      # The value of the embedding comes last. If a fragment has no embedding, zip drops
      # its name.
      names = [*(f"layer {i}" for i in fragment.layers), EMBEDDING]
      values = np.atleast_2d(np.asarray(r[name], dtype=float)).mean(axis=0)
      for part, value in zip(names, values):
        curves[part][r["step"]] = value
  return {part: curve for part, curve in curves.items() if curve}


def relative(curves: Curves, norms: Curves) -> Curves:
  """Divides the curve of each part by the L2 norm of its outer parameters.

  A part has no norm before its first send with the plug-in.
  """
  divided = Curves()
  for part, curve in curves.items():
    if part not in norms:
      continue
    steps, values = points(curve)
    norm = np.interp(steps, *points(norms[part]))  # Norms are known at sends only.
    divided[part] = dict(zip(steps.tolist(), values / norm))
  return divided


def _matrices(records: Records, kind: str) -> Iterator[tuple[Json, str, np.ndarray]]:
  """Yields each value KIND.MATRIX of the records: its record, MATRIX, the value."""
  for r in records:
    for name in r:
      _, is_kind, matrix = name.partition(f"{kind}.")
      if is_kind:
        yield r, matrix, np.asarray(r[name], dtype=float)


def by_matrix(c: Config, records: Records) -> Curves:
  """Returns the stable rank of each matrix, the mean over the layers in a round."""
  ranks = dict[str, dict[int, list[float]]]()
  for r, matrix, values in _matrices(records, "stable_rank"):
    last = r["step"] // c.sync_every * c.sync_every
    ranks.setdefault(matrix, {}).setdefault(last, []).extend(values)
  return {
    matrix: {t: float(np.mean(values)) for t, values in rounds.items()}
    for matrix, rounds in ranks.items()
  }


def last_spectra(records: Records) -> Curves:
  """Returns {matrix: {k: k-th singular value}} at the last sync of each fragment.

  A value is divided by the Frobenius norm, then averaged over all fragments' layers.
  """
  last = dict[str, dict[int, np.ndarray]]()  # {matrix: {fragment: values x layers}}
  for r, matrix, values in _matrices(records, "spectrum"):
    last.setdefault(matrix, {})[r["fragment"]] = values
  mean = lambda spectra: np.hstack([*spectra.values()]).mean(axis=1).tolist()
  return {
    matrix: dict(enumerate(mean(spectra), start=1)) for matrix, spectra in last.items()
  }


def merges(records: Records) -> dict[int, float]:
  """Returns {step: loss after a merge minus loss before}, the mean over replicas."""
  changes = {}
  for r in records:
    after, before = (
      np.asarray(r[f"loss_{when}_merge"], dtype=float) for when in ("after", "before")
    )
    changes[r["step"]] = float(np.nanmean(after - before))  # NaN: nothing measured.
  return changes


def draw(c: Config, kinds: metrics.Kinds) -> "Figure":
  """Draws one panel for each quantity; returns a figure."""
  from matplotlib.figure import Figure

  of = lambda kind, name: by_layer(c, kinds[kind], f"{name}_by_layer")
  norms, ranks = of("send", "outer_norm"), by_matrix(c, kinds["send"])
  looks = itertools.product(("-", "--", ":"), OTHERS)
  matrices = {m: {"ls": ls, "color": color} for m, (ls, color) in zip(ranks, looks)}
  layers = _of_layers(c)
  figure = Figure(figsize=(PAGE, 9.2), layout="constrained")
  panels = figure.subplots(4, 2)
  cosine, drift, step, rank, error, loss, norm, spectrum = panels.flat
  for panel in (drift, step, rank, error, loss, norm):
    panel.sharex(cosine)
  text = "cosine similarity of outer gradients"
  _lines(cosine, text, of("send", "outer_grad_cosine"), layers)
  text = "replicas' distance from their mean /\nnorm of outer parameters"
  _lines(drift, text, relative(of("send", "replica_drift"), norms), layers)
  text = "outer update / norm of outer parameters"
  _lines(step, text, relative(of("receive", "outer_update_norm"), norms), layers)
  text = "stable rank of the mean outer gradient,\nmean of the layers"
  _lines(rank, text, ranks, matrices)
  text = "error of the codes /\nnorm of the outer gradient"
  _lines(error, text, of("send", "quantization_error"), layers)
  _draw_merges(loss, merges(kinds["merge"]), COLORS[c.algorithm])
  text = "norm of a replica's outer gradient"
  _lines(norm, text, of("send", "outer_grad_norm"), layers)
  text = (
    "singular values of the mean outer gradient /\n"
    "its norm, last syncs, mean of the layers"
  )
  spectrum.set_title(text, fontsize="medium")
  for matrix, values in last_spectra(kinds["send"]).items():
    spectrum.plot(*points(values), label=matrix, **matrices[matrix])  # Not smoothed.
  for panel in (drift, step, norm):
    panel.set_yscale("log")
  for panel in (cosine, loss):
    panel.axhline(0, color="black", lw=0.6)
  for panel in (loss, norm):
    panel.set_xlabel("inner step")
  spectrum.set(xlabel="number of the singular value", ylim=(0, None))
  cosine.legend(*_few(*drift.get_legend_handles_labels()))
  rank.set_ylim(0, 1.6 * rank.get_ylim()[1])  # Space for the legend.
  rank.legend(ncols=3, loc="upper left", fontsize=7)
  every = c.of(Diagnostics).every
  chosen = f"one sync in {every}" if every > 1 else "every sync"
  figure.suptitle(f"{title(c)}, {c.wire.format}: {chosen} of each fragment")
  return figure


def _of_layers(c: Config) -> dict[str, dict[str, Any]]:
  """Returns the style of each part: earlier layers are darker (2501.18512, fig. 18)."""
  colors = reversed(shades(COLORS[c.algorithm], c.model.num_layers))
  layers = {f"layer {i}": {"color": color} for i, color in enumerate(colors)}
  return layers | {EMBEDDING: {"color": OTHERS[3], "ls": "--"}}


def _lines(
  panel: "Axes", title: str, curves: Curves, styles: dict[str, dict[str, Any]]
) -> None:
  panel.set_title(title, fontsize="medium")
  for name, curve in curves.items():
    steps, values = points(curve)
    line(panel, steps, smoothed(values), label=name, **styles[name])


def _draw_merges(panel: "Axes", changes: dict[int, float], color: str) -> None:
  title = "held-out loss after a merge minus before\n(nats per token)"
  panel.set_title(title, fontsize="medium")
  steps, values = points(changes)
  if len(steps):
    points_only = {"marker": ".", "ls": "", "ms": 2}
    line(panel, steps, values, color="0.6", label="each merge", **points_only)
    mean = running_mean(values, 10)
    line(panel, steps, mean, color=color, label="mean of 21 merges")
    panel.legend()


def _few(
  handles: list["Artist"], labels: list[str]
) -> tuple[list["Artist"], list[str]]:
  """Keeps the first and the last layer, and the embedding, for a legend."""
  layers = [i for i, label in enumerate(labels) if label != EMBEDDING]
  kept = sorted({*layers[:1], *layers[-1:], len(labels) - 1})
  return [handles[i] for i in kept], [labels[i] for i in kept]


def run(args: argparse.Namespace) -> None:
  """Writes the picture."""
  if args.out:
    check_picture(args.out, "diagnostics.png")
  c, kinds = read(args.workdir)
  out = args.out or args.workdir / "diagnostics.png"
  save(lambda: draw(c, kinds), out)
  print(f"picture      {out}")


def main(argv: Sequence[str] | None = None) -> int:
  parser = Parser(prog="python -m diloco diagnostics", description=__doc__)
  parser.add_argument("workdir", metavar="WORKDIR", type=as_path, help="of the run")
  text = "picture to write; default WORKDIR/diagnostics.png"
  parser.add_argument("--out", type=as_path, help=text)
  return guarded(run, parser.parse_args(argv))


if __name__ == "__main__":
  sys.exit(main())
