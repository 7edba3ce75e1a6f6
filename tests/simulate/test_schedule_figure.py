"""The picture of a schedule has its sends, flights and merges where they belong."""

import json

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from diloco.config import resolve
from diloco.simulate import __main__ as command
from diloco.simulate import schedule_figure


def drawn(c, first: int, last: int):
  """Draws planned sends; returns the axes, and the bars of the flights."""
  axes = Figure().subplots()
  sends = schedule_figure.planned(c, first, last)
  schedule_figure.draw(c, sends, first, last, axes)
  boxes = [x for x in axes.patches if isinstance(x, Rectangle)]
  return sends, boxes, axes


def test_bars_start_at_sends_and_end_at_arrivals(tiny):
  tiny.sync_every, tiny.overlap.tau, tiny.train.steps = 8, 3, 40
  c = resolve(tiny)
  schedule, count = c.make_schedule(), len(c.make_fragments())
  sends, boxes, axes = drawn(c, 10, 30)
  assert [(s.step, s.fragment) for s in sends] == [
    (t, p) for t in range(7, 31) for p in schedule.sends(t)
  ]
  heads = [x.get_xdata()[0] for x in axes.lines if x.get_marker() == "v"]
  assert heads == [s.step for s in sends if s.step >= 10] != [s.step for s in sends]
  flights = {(b.get_x(), count - 1 - b.get_y(), b.get_width()) for b in boxes}
  assert flights == {(s.step, s.fragment, 3) for s in sends}
  assert [len(steps.get_paths()) for steps in axes.collections] == [21] * c.replicas


def test_every_merge_is_a_mark_on_the_replica_that_merges(tiny):
  tiny.sync_every, tiny.train.steps = 8, 40
  tiny.replicas, tiny.overlap.taus = 2, (1, 4)
  c = resolve(tiny)
  schedule, count = c.make_schedule(), len(c.make_fragments())
  assert schedule_figure.window(c, 10, 99) == (10, 40)
  sends, boxes, axes = drawn(c, 10, 40)
  top = count + 0.6 + c.replicas - 1  # Bottom of replica 0.
  marks = {
    (x.get_xdata()[0], round(top - x.get_ydata()[0] - 0.08))
    for x in axes.lines
    if x.get_linewidth() == 2.5
  }
  expected = {
    (min(t, 40), m)  # The trainer drains after its last step.
    for t in range(10, 45)
    for _, mask in schedule.arrivals(t, last_send=40)
    for m, merges in enumerate(mask)
    if merges
  }
  assert marks == expected
  waits = [b for b in boxes if b.get_alpha() == 0.3]
  assert {(b.get_x(), b.get_x() + b.get_width()) for b in waits} == {
    (s.step + 1, min(s.step + 4, 40)) for s in sends if s.step < 39
  }


def test_rows_name_the_parameters_of_the_fragments(tiny):
  tiny.model.num_layers, tiny.fragments.size = 5, 3
  names = lambda c: [schedule_figure.content(f, c) for f in c.make_fragments()]
  assert names(resolve(tiny)) == ["layers 0, 2, 4", "layers 1, 3", "embedding"]
  tiny.fragments.size = 1
  assert names(resolve(tiny))[-2:] == ["layer 4", "embedding"]
  tiny.algorithm = "diloco"
  assert names(resolve(tiny)) == ["whole model"]


def test_the_command_draws_any_config(tmp_path, capsys):
  out = tmp_path / "new" / "x.svg"
  config = ["--config=configs/streaming.py:35M", "--config.overlap.tau=7"]
  assert command.main(["schedule", *config, f"--out={out}", "--json"]) == 0
  assert json.loads(capsys.readouterr().out) == [str(out)]
  assert 10_000 < out.stat().st_size < 200_000


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ("--first=5 --last=4 --out=a.png", "draw from 1 to 1000 steps"),
    ("--first=0 --last=4 --out=a.png", "draw from 1 to 1000 steps"),
    ("--first=1 --last=1001 --out=a.png", "draw from 1 to 1000 steps"),
    ("--first=3201 --out=a.png", "1000 steps between 1 and 3200."),
    ("--out=a.txt", "--out is 'a.txt'; give a file such as run.png"),
    ("--config.algorithm=data_parallel --out=a.png", "which has no rounds; choose"),
  ],
)
def test_a_schedule_that_cannot_be_drawn_is_refused(arguments, message, capsys):
  config = "--config=configs/sample.py"
  assert command.main(["schedule", config, *arguments.split()]) == 2
  assert message in capsys.readouterr().err
