"""A small sweep, and a backend whose runs end at once."""

import json
import math

from diloco.config import default_config
from diloco.sweep import table
from diloco.sweep.grid import Axis, Grid, Sweep, powers
from diloco.sweep.runner import Driver
from diloco.util import files

BEST = 2.0**-8


def config(point):
  c = default_config()
  c.algorithm, c.replicas, c.sync_every = "diloco", point["replicas"], 5
  c.inner.learning_rate = point["lr"]
  c.train.steps, c.train.batch_size = 10, 4
  return c


def make_sweep(**axis):
  lr = Axis("lr", powers(2, -7, -7), ratio=2, **axis)
  return Sweep(config, [Grid("g", [{"replicas": m} for m in (1, 2)], (lr,))])


def one_cell(*rates, replicas=1):
  return Sweep(config, [Grid("g", [{"replicas": replicas}], (Axis("lr", rates),))])


def summary_of(saved: dict) -> dict:
  loss = 3 + abs(math.log2(saved["inner"]["learning_rate"] / BEST))
  return {
    "params": 100,
    "tokens": saved["train"]["tokens"],
    "steps": saved["train"]["steps"],
    "eval_loss": {"outer": loss, "mean": loss, "first": loss},
    "bits_per_byte": 1.0,
    "bytes_sent_per_replica": 8,
    "peak_bytes_per_sync": 4,
    "syncs": 2,
    "tokens_per_s": 5.0,
    "wall_s": 1.0,
    "device": "fake",
  }


class Fake:
  """A backend whose runs end at once: `end(run, config)` writes their files."""

  detached = False

  def __init__(self, end=None):
    self.started, self.ends, self._end = [], [], end or self.good

  @staticmethod
  def good(run, saved, text="one"):
    (run / "contents.json").write_text(json.dumps({"data.source": text}))
    (run / "summary.json").write_text(json.dumps(summary_of(saved)))

  def start(self, run):
    self.started.append(run.name)
    self._end(run, json.loads((run / "config.json").read_text()))

  def running(self, run):
    return False

  def stop(self):
    self.ends.append("stop")

  def kill(self):
    self.ends.append("kill")


def make_driver(sweep, results, backend, parallel=100):
  return Driver(sweep, results, backend, parallel)


def rows_of(results):
  return list(table.read_rows(results).values())


def write_run(results, name, config, summary=None, ended=None, **notes):
  """Writes a run directory as a driver, a job and a trainer leave it."""
  if summary is not None:
    ended = {"failed": False, "error": ""}
  contents = {"config": config, "summary": summary, "ended": ended}
  for file, content in contents.items():
    if content is not None:
      files.write_json(results / "runs" / name / f"{file}.json", content)
  table.note(results / "runs" / name, **{"attempts": 1, **notes})


def finish(driver):
  for _ in range(50):
    cells = driver.step()
    if all(c.state in ("interior", "edge", "failed") for c in cells):
      return cells
  raise AssertionError("the sweep does not end")


def without(config: dict, field: str) -> dict:
  """The config as older code wrote it, which did not have the field yet."""
  group, name = field.split(".")
  return {**config, group: {k: v for k, v in config[group].items() if k != name}}
