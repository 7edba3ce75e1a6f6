"""metrics.jsonl survives a kill; dashboards get the same names for the same numbers."""

import json
import struct
import sys
import types

import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.proto.event_pb2 import SessionLog

from diloco import config as config_lib
from diloco.checkpoint.record import Record
from diloco.config.comparable import HELD_OUT
from diloco.log import metrics
from diloco.log.log import Log
from diloco.processes.peers import Peers


def test_what_a_run_wrote_before_it_went_back_does_not_count(tmp_path):
  at = lambda kind, t, x: json.dumps({"kind": kind, "step": t, "loss": x})
  first = [at("step", t, t) for t in range(1, 6)]
  first += [at("eval", t, t) for t in (2, 5)] + [at("send", 3, 3)]
  again = [at("send", 3, 30), at("step", 3, 30), '{"kind": "st']  # From step 2.
  (tmp_path / "metrics.jsonl").write_text("\n".join([*first, *again]))
  found = metrics.read_kinds(tmp_path, "step", "eval", "send")
  losses = {kind: [r["loss"] for r in records] for kind, records in found.items()}
  assert losses == {"step": [1, 2, 30], "eval": [2], "send": [30]}
  assert [r["loss"] for r in metrics.read(tmp_path, "eval")] == [2]
  # Without a logged step, an evaluation shows how far the run had come.
  lines = [at("eval", 50, 6), at("eval", 150, 31), at("start", 120, 0)]
  (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
  assert [r["loss"] for r in metrics.read(tmp_path, "eval")] == [6]


class WandbRun:
  """Takes what a run of Weights & Biases takes."""

  def __init__(self, **kwargs):
    self.kwargs, self.logged, self.summary = kwargs, [], {}

  def define_metric(self, name, step_metric=None):
    pass

  def log(self, values):
    self.logged.append(values)

  def finish(self):
    pass


@pytest.fixture
def wandb_runs(tiny, monkeypatch):
  """The runs that were started with the config `tiny`."""
  runs, tiny.log.wandb_project = [], "project"
  start = lambda **kwargs: runs.append(WandbRun(**kwargs)) or runs[-1]
  monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=start))
  return runs


def test_a_resumed_run_continues_its_wandb_run(tiny, tmp_path, wandb_runs):
  c = config_lib.resolve(tiny)
  for workdir in ("a", "a", "b"):
    (tmp_path / workdir).mkdir(exist_ok=True)
    write(tmp_path / workdir, c, 1)
  first, again, other = (run.kwargs["id"] for run in wandb_runs)
  assert first == again != other
  assert wandb_runs[0].logged == [{"step/loss": 1.0, "inner_step": 1}]


def write(workdir, c, *steps: int) -> None:
  writer = metrics.MetricsWriter(workdir, c, start=min(steps, default=1) - 1)
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
  # Whole files get no empty lines. A start before all checkpoints drops all records.
  before = path.read_bytes()
  write(tmp_path, c)
  assert path.read_bytes() == before + b'{"kind": "start", "step": 0}\n'
  assert metrics.read(tmp_path) == []


def test_the_digest_of_held_out_tokens_is_that_of_the_last_evaluation(tiny, tmp_path):
  c = config_lib.resolve(tiny)
  saved = lambda: json.loads((tmp_path / "contents.json").read_text())
  start = lambda held_out: metrics.MetricsWriter(
    tmp_path, c, {HELD_OUT: held_out, "data.source": "0123456789abcdef", "jax": "0.9"}
  )
  start("one").write("eval", 4, {})
  assert saved() == {HELD_OUT: "one", "data.source": "0123456789ab"}
  writer = start("two")
  writer.write("step", 5, {})
  assert saved()[HELD_OUT] == "one"
  writer.write("eval", 8, {})
  assert saved()[HELD_OUT] == "two"


STEP = {"tokens": 96, "time": 1.7e9, "loss": 2.5, "loss_per_replica": [2.0, 3.0]}
RECORDS = [
  {"kind": "step", "step": 3, **STEP, "tokens_per_s": None},
  {"kind": "send", "step": 3, "fragment": 1, "bytes": 9, "outer_grad_norm": [1.0, 2.0]},
  {"kind": "receive", "step": 4, "fragment": 1, "round": 7, "outer_grad_cosine": 0.25},
  {"kind": "eval", "step": 4, "loss_outer": 2.0, "perplexity": 7.5},
]
# A name begins with the quantity; constants are left out.
OF_REPLICAS = {f"loss_per_replica/replica_{m}": 2.0 + m for m in range(2)}
NAMES = [
  {"step/tokens": 96, "step/loss": 2.5, **OF_REPLICAS},
  {"outer_grad_norm/fragment_1": 1.5},
  {"outer_grad_cosine/fragment_1": 0.25},
  {"eval/loss_outer": 2.0, "eval/perplexity": 7.5},
]


def test_the_numbers_of_one_replica_are_no_second_curve():
  record = {"kind": "step", "step": 1, "loss": 2.0, "loss_per_replica": [2.0]}
  assert metrics.scalars(record) == {"step/loss": 2.0}


def events(path):
  """Yields the events of a TensorBoard file."""
  content = path.read_bytes()
  while content:
    (size,) = struct.unpack("<Q", content[:8])
    yield event_pb2.Event.FromString(content[12 : 12 + size])
    content = content[16 + size :]


def test_tensorboard_and_wandb_have_config_sample_and_one_name_per_number(
  tiny, tmp_path, wandb_runs
):
  tiny.log.tensorboard = True
  writer = metrics.MetricsWriter(tmp_path, config_lib.resolve(tiny))
  for record in RECORDS:
    values = {k: v for k, v in record.items() if k not in ("kind", "step")}
    writer.write(record["kind"], record["step"], values)
  writer.sample(4, "The people\n of")
  writer.results({"eval_loss": {"outer": 2.0}})
  writer.close()
  (run,) = wandb_runs
  steps = [*(record["step"] for record in RECORDS), 4]
  names = [*NAMES, {"sample": "The people\n of"}]
  assert run.logged == [n | {"inner_step": t} for n, t in zip(names, steps)]
  assert run.summary == {"eval_loss": {"outer": 2.0}}
  assert run.kwargs["config"]["model"]["dim"] == 16
  (path,) = (tmp_path / "tensorboard").iterdir()
  found = dict[str, list]()
  for event in events(path):
    for value in event.summary.value:
      found.setdefault(value.tag, []).append((value.simple_value, value.tensor))
  config = found.pop("config/text_summary")[0][1].string_val[0].decode()
  assert "    model.dim = 16\n" in config
  sample = found.pop("sample/text_summary")[0][1].string_val[0].decode()
  assert sample == "    The people\n     of"
  assert {tag: x for tag, ((x, _),) in found.items()} == {
    name: value for names in NAMES for name, value in names.items()
  }


def test_tensorboard_drops_what_came_after_the_checkpoint(tiny, tmp_path):
  tiny.log.tensorboard = True
  c = config_lib.resolve(tiny)
  Log(c, tmp_path, Record({}), lambda: 5, Peers()).close()
  (path,) = (tmp_path / "tensorboard").iterdir()
  starts = [e.step for e in events(path) if e.session_log.status == SessionLog.START]
  assert starts == [6]
