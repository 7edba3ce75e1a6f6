"""metrics.jsonl survives a kill; the picture leaves the backend of pyplot alone."""

import json
import sys
import types

import matplotlib

from diloco import config as config_lib
from diloco.run import metrics


def test_drawing_the_loss_keeps_the_backend(tmp_path):
  records = [{"kind": "step", "step": t, "loss": 5 - t / 10} for t in (1, 2, 3)]
  records.append({"kind": "eval", "step": 3, "loss_outer": 4.8})
  lines = [json.dumps(r) for r in records]
  (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
  before = matplotlib.get_backend()
  try:
    matplotlib.use("svg")
    picture = metrics.plot_loss(tmp_path, "title")
    assert matplotlib.get_backend().lower() == "svg"
  finally:
    matplotlib.use(before)
  assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_last_record_of_a_repeated_step_counts(tmp_path):
  records = [
    {"kind": "step", "step": t, "loss": x} for t, x in ((1, 3), (2, 2), (1, 1))
  ]
  text = "\n".join(json.dumps(r) for r in records) + '\n{"kind": "st'
  (tmp_path / "metrics.jsonl").write_text(text)
  assert [r["loss"] for r in metrics.read(tmp_path)] == [1, 2]


def test_a_resumed_run_continues_its_wandb_run(tiny, tmp_path, monkeypatch):
  runs = []

  class Run:
    def __init__(self, **kwargs):
      self.kwargs, self.logged = kwargs, []
      runs.append(self)

    def define_metric(self, name, step_metric=None):
      pass

    def log(self, values):
      self.logged.append(values)

    def finish(self):
      pass

  fake = types.SimpleNamespace(init=Run)
  monkeypatch.setitem(sys.modules, "wandb", fake)
  tiny.log.wandb_project = "project"
  c = config_lib.resolve(tiny)
  for workdir in ("a", "a", "b"):
    (tmp_path / workdir).mkdir(exist_ok=True)
    write(tmp_path / workdir, c, 1)
  first, again, other = (run.kwargs["id"] for run in runs)
  assert first == again != other
  assert runs[0].logged == [{"step/loss": 1.0, "inner_step": 1}]


def write(workdir, c, *steps: int) -> None:
  writer = metrics.MetricsWriter(workdir, c)
  for step in steps:
    writer.write("step", step, {"loss": float(step)})
  writer.close()


def test_a_line_cut_short_by_a_kill_spoils_no_other_line(tiny, tmp_path):
  c = config_lib.resolve(tiny)
  write(tmp_path, c, 1, 2)
  path = tmp_path / "metrics.jsonl"
  path.write_text(path.read_text()[:-7])
  with path.open("ab") as file:
    file.write(b"\n\xff\xfe not UTF-8\n3\n{}")
  assert [r["step"] for r in metrics.read(tmp_path)] == [1]
  write(tmp_path, c, 2, 3)
  records = [(r["step"], r["loss"]) for r in metrics.read(tmp_path)]
  assert records == [(1, 1.0), (2, 2.0), (3, 3.0)]
  # Whole files are left as they are: no empty lines.
  before = path.read_bytes()
  write(tmp_path, c)
  assert path.read_bytes() == before
