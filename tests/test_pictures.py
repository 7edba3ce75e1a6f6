"""Every picture that a command draws: titled, labelled, whole, printable on white."""

import argparse
import itertools
import json
import pathlib
from collections.abc import Callable

import matplotlib.colors
import matplotlib.style
import numpy as np
import pytest
import wan_bench
from conftest import tiny_config
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from diloco.cli import compare
from diloco.config import add_plugins, resolve
from diloco.contrib.diagnostics import __main__ as diagnostics
from diloco.log import read_run
from diloco.reproduce import comparison
from diloco.scaling_laws import figures as law_figures
from diloco.simulate import figures as simulated
from diloco.simulate import schedule_figure
from diloco.sweep.chart import PLAIN, Chart
from diloco.sweep.grid import Grid
from diloco.sweep.search import Search
from diloco.util import palette


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The folder of a run with diagnostics."""
  folder = tmp_path_factory.mktemp("run")
  tiny = tiny_config()
  add_plugins(tiny, "diagnostics")
  tiny.update_from_flattened_dict({"fragments.size": 2, "diagnostics.every": 1})
  c = resolve(tiny)  # Fragments: layers 0 and 2, layer 1, embedding.
  records = list[dict]()
  for t in range(1, 13):
    own = {"step": t, "tokens": t * c.tokens_per_step, "tokens_per_s": 1000.0}
    records.append({"kind": "step", "loss": 8 / t, "bytes_sent": t // 4 * 100, **own})
    records[-1] |= {"peak_bytes": 100, "time": float(t)}
    if t % 4 == 0:
      records.append({"kind": "eval", "step": t, "loss_outer": 8 / t})
      for p, parts in enumerate((2, 1, 1)):
        name = ("replica_drift", "outer_norm", "outer_grad_norm", "outer_grad_cosine")
        found = {f"{n}_by_layer": [0.5] * parts for n in (*name, "quantization_error")}
        found |= {"stable_rank.ff.up": [2.0] * parts, "spectrum.ff.up": [[0.9], [0.1]]}
        here = {"step": t, "fragment": p, "bytes": 100}
        records.append({"kind": "send", **here, **found})
        update = {"outer_update_norm_by_layer": [0.1] * parts}
        records.append({"kind": "receive", **here, **update})
        losses = {"loss_before_merge": [5.0], "loss_after_merge": [4.9]}
        records.append({"kind": "merge", **here, **losses})
  (folder / "config.json").write_text(json.dumps(c.to_dict()))
  text = "".join(json.dumps(r) + "\n" for r in records)
  (folder / "metrics.jsonl").write_text(text)
  return folder


def of_chart(x: str, *values, **fields) -> Figure:
  """Draws a chart of two seeds for each value."""
  cells = [
    {x: value, "seed": seed, "algorithm": name, "replicas": 1 + (name != PLAIN)}
    for value in values
    for seed in (0, 1)
    for name in ("data_parallel", "diloco")
  ]
  pairs = [
    (
      Search(Grid("g", [cell]), cell, "interior", best=cell),
      {"loss": 5 + i / 10, "test_loss": None, "accuracy": None}
      | {"bytes_sent": 7, "tokens": 2},
    )
    for i, cell in enumerate(cells)
  ]
  own = Chart("title", x, ("algorithm", "replicas"), **fields)
  return comparison.figure(own, comparison.frame(own, pairs))


def of_links() -> Figure:
  options = argparse.Namespace(replicas=2, rates=[4e6, 1e9], rounds=1)
  rows = [
    {"method": "DiLoCo", "rate_mbit_s": rate, "utilisation": rate / 1000}
    | {"compute_s_per_step": 0.05}
    for rate in (4.0, 1000.0)
  ]
  return wan_bench.picture(options, rows)


def of_schedule() -> Figure:
  c = resolve(tiny_config())
  return schedule_figure.make(c, schedule_figure.planned(c, 1, 12), 1, 12)


def of_compare(run) -> Figure:
  found = [read_run.read(run, name) for name in ("a", "b")]
  return compare.draw(found)


MORE = {"y": (("loss", "loss"), ("more", "above (%)"))}
PICTURES: dict[str, Callable[[pathlib.Path], Figure]] = {
  **{
    name: lambda _, n=name: simulated.FIGURES[n]()
    for name in ("s2", "s3", "s6", "s9", "c6")
  },
  "extrapolation": lambda _: law_figures.whole_figure(*law_figures.FIGURES["c13"]),
  "losses and difference": lambda _: law_figures.whole_figure(
    *law_figures.FIGURES["c2"]
  ),
  "numbers": lambda _: of_chart("size", 1, 2, against=PLAIN, log=True, **MORE),
  "words": lambda _: of_chart("name", "b", "a", **MORE),
  "links": lambda _: of_links(),
  "schedule": lambda _: of_schedule(),
  "compare": of_compare,
  "diagnostics": lambda run: diagnostics.draw(*diagnostics.read(run)),
}


def contrast(color) -> float:
  """The contrast of a colour with white, as WCAG 2 defines it."""
  rgb = np.array(matplotlib.colors.to_rgb(color))
  linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
  return 1.05 / (linear @ (0.2126, 0.7152, 0.0722) + 0.05)


def clipped(line: Line2D) -> bool:
  """Whether an end of the axes cuts a marker of a line."""
  if line.get_marker() in ("None", "", None) or not len(line.get_xdata()):
    return False
  points = line.get_transform().transform(line.get_xydata())
  points = points[np.isfinite(points).all(axis=1)]
  reach = line.get_markersize() / 2 * line.figure.dpi / 72
  box = line.axes.bbox
  return bool(
    ((points < np.array(box.min) + reach) | (points > np.array(box.max) - reach)).any()
  )


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_titled_labelled_whole_and_prints_on_white(name, run):
  with matplotlib.style.context(palette.STYLE):
    figure = PICTURES[name](run)
    FigureCanvasAgg(figure).draw()
  panels = figure.axes
  assert figure.get_suptitle() or all(p.get_title() for p in panels)
  assert any(p.get_xlabel() for p in panels)
  low, high = figure.bbox.padded(1).get_points()
  of_panels = [(p.title, p.xaxis.label, p.yaxis.label) for p in panels]
  of_legends = [(*key.get_texts(), key.get_title()) for key in figure.legends]
  texts = (*figure.texts, *itertools.chain(*of_panels, *of_legends))
  for text in filter(Text.get_text, texts):
    ends = text.get_window_extent().get_points()
    assert ((low <= ends) & (ends <= high)).all(), text.get_text()
  if name in ("s9", "c6"):
    assert len(figure.legends) == 1
  for panel in panels:
    assert name not in ("s9", "c6") or not panel.get_legend()
    for line in panel.lines:
      assert contrast(line.get_color()) > 1.9, line.get_label()
      assert not clipped(line), line.get_label()
