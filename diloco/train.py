"""The training loop: the story of a run, from a config to its summary."""

import contextlib
import dataclasses
import json
import pathlib
import signal
import sys
from typing import Any

import jax
import numpy as np

from diloco import config as config_lib
from diloco import data as data_lib
from diloco import evaluate as evaluate_lib
from diloco import generate as generate_lib
from diloco import inner as inner_lib
from diloco import mesh as mesh_lib
from diloco import metrics as metrics_lib
from diloco import outer as outer_lib
from diloco import state as state_lib
from diloco import sync as sync_lib
from diloco.checkpoint import Checkpoints
from diloco.record import Recorder
from diloco.wire import ledger as ledger_lib


def train(config, workdir: str | pathlib.Path) -> dict[str, Any]:
  """Trains a model as `config` says, resuming from `workdir` if it has a checkpoint.

  Args:
    config: ConfigDict with the fields of `default_config`.
    workdir: receives checkpoints/, metrics.jsonl, tensorboard/, loss.png and
      summary.json.

  Returns:
    The summary, as in summary.json; empty if SIGTERM ended the run early.

  Raises:
    ConfigError: the config cannot work, or workdir holds a run of another config.
    TrainingDiverged: a loss or gradient became NaN or infinite.
  """
  c = config_lib.resolve(config)
  workdir = pathlib.Path(workdir)
  stop = _StopOnSigterm()
  mesh = mesh_lib.make_mesh(c)
  with jax.set_mesh(mesh), contextlib.closing(data_lib.make_train_iterator(c)) as data:
    run = _build(c, mesh, data)
    workdir.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(workdir, c)
    start, state, record = _restore(run, checkpoints)
    ledger = ledger_lib.Ledger(**record["ledger"])
    recorder = Recorder(c, workdir, start, ledger, lambda: checkpoints.latest)

    def save(t: int, finished: bool = False) -> None:
      recorder.flush()  # Nothing that is not finite gets into a checkpoint.
      checkpoints.save(t, state, _record(run, ledger, finished))

    for t in range(start + 1, c.train.steps + 1):
      tokens_MxBxL = jax.device_put(_by_replica(c, next(run.data)), run.batch_sharding)
      params, opt_state, metrics = run.inner_step(
        state.params, state.opt_state, tokens_MxBxL, run.trainable(t)
      )
      outer, events = state.outer, list[sync_lib.Event]()
      if run.outer and outer:
        params, outer, events = sync_lib.outer_step(run.outer, t, params, outer)
      state = state_lib.TrainState(params, opt_state, outer)
      recorder.step(t, metrics, events)

      if c.eval.every and t % c.eval.every == 0 and t < c.train.steps:
        with recorder.pause():
          recorder.evaluation(t, {"outer": run.evaluate(run.outer_params(state))})
      last = stop.requested or t == c.train.steps
      if not last and c.checkpoint.every and t % c.checkpoint.every == 0:
        with recorder.pause():
          save(t)
      if stop.requested and t < c.train.steps:
        save(t)
        checkpoints.close()
        recorder.close()
        _say(f"SIGTERM: saved step {t} in {workdir}; the same command goes on.")
        return {}

    if not record["finished"]:
      state = _finish(run, c.train.steps, state, recorder)
      save(c.train.steps, finished=True)
    summary = _summarise(run, state, recorder, workdir)
    checkpoints.close()
    recorder.close()
    return summary


@dataclasses.dataclass(frozen=True)
class _Run:
  """What a run is made of: data and compiled programs, nothing that changes."""

  config: Any
  mesh: Any
  data: Any
  tokenizer: Any
  optimizer: Any
  inner_step: Any
  outer: outer_lib.Outer | None
  evaluate: Any
  batch_sharding: Any

  def trainable(self, t: int):
    """FedPart's mask for inner step t, None without it."""
    if not (self.outer and self.config.outer.fedpart):
      return None
    p = self.outer.schedule.next_to_send(t)
    like = state_lib.abstract_params(self.config)
    return inner_lib.fedpart_mask(like, self.outer.fragments[p])

  def outer_params(self, state: state_lib.TrainState):
    """The parameters that a run stands for: the outer ones (2501.18512, Table 3)."""
    if self.outer is None or state.outer is None:
      return evaluate_lib.first_replica(state.params)
    like = state_lib.abstract_params(self.config)
    return outer_lib.assemble(self.outer, state.outer, like)


def _build(c, mesh, data) -> _Run:
  """Data, programs and evaluation; every error of the config comes from here."""
  tokenizer = data_lib.load_tokenizer(c.data.tokenizer)
  eval_set = data_lib.make_eval_set(c)
  optimizer = inner_lib.make_optimizer(c)
  streaming = c.algorithm != "data_parallel"
  return _Run(
    config=c,
    mesh=mesh,
    data=data,
    tokenizer=tokenizer,
    optimizer=optimizer,
    inner_step=inner_lib.make_inner_step(c, optimizer),
    outer=outer_lib.make_outer(c, mesh) if streaming else None,
    evaluate=evaluate_lib.make_evaluate(c, mesh, eval_set),
    batch_sharding=mesh_lib.batch_sharding(mesh),
  )


def _restore(run: _Run, checkpoints: Checkpoints):
  """The state to start from: (step, state, record)."""
  c = run.config
  fresh = state_lib.init_state(c, run.mesh, run.optimizer, run.outer)

  def state_at(step: int, record: dict) -> state_lib.TrainState:
    outer = fresh.outer
    if run.outer is None or outer is None or record["finished"]:
      return fresh
    in_flight = {
      str(p): sync_lib.payload_struct(run.outer, p, fresh.params, outer)
      for p in run.outer.schedule.in_flight(step)
    }
    outer = outer_lib.OuterState(outer.theta, outer.opt_state, in_flight)
    return state_lib.TrainState(fresh.params, fresh.opt_state, outer)

  restored = checkpoints.restore(state_at)
  if restored is None:
    ledger = dataclasses.asdict(ledger_lib.Ledger(c.replicas))
    return 0, fresh, {"ledger": ledger, "finished": False}
  run.data.set_state(restored.record["data"])
  _say(f"Going on from the checkpoint of step {restored.step}.")
  return restored.step, restored.state, restored.record


def _record(run: _Run, ledger: ledger_lib.Ledger, finished: bool) -> dict[str, Any]:
  return {
    "data": run.data.get_state(),
    "ledger": dataclasses.asdict(ledger),
    "finished": finished,
  }


def _finish(run: _Run, t: int, state, recorder: Recorder):
  """Receives what is in flight and, if asked for, synchronises everything."""
  if run.outer is None:
    return state
  params, outer, events = sync_lib.drain(run.outer, t, state.params, state.outer)
  if run.config.outer.final_sync:
    params, outer, more = sync_lib.sync_all(run.outer, t, params, outer)
    events += more
  recorder.events(events)
  return state_lib.TrainState(params, state.opt_state, outer)


def _summarise(run: _Run, state, recorder: Recorder, workdir: pathlib.Path):
  """Evaluates, generates, draws and writes summary.json; returns the summary."""
  c = run.config
  outer_params = run.outer_params(state)
  results = {
    "outer": run.evaluate(outer_params),
    "mean": run.evaluate(evaluate_lib.replica_mean(state.params)),
    "first": run.evaluate(evaluate_lib.first_replica(state.params)),
  }
  recorder.evaluation(c.train.steps, results)
  recorder.flush()
  text = ""
  if c.log.sample_tokens:
    prompt = run.tokenizer.encode(c.log.prompt)
    ids = generate_lib.make_generate(c)(
      outer_params, prompt, c.log.sample_tokens, c.log.temperature, c.seed
    )
    text = run.tokenizer.decode([*prompt, *ids])
  title = f"{c.algorithm}, M={c.replicas}, H={c.sync_every}"
  picture = metrics_lib.plot_loss(workdir, title)
  summary = recorder.summary(results)
  (workdir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
  recorder.report(summary, results["outer"], text, picture)
  return summary


def _by_replica(c, tokens_MxBxL: np.ndarray) -> np.ndarray:
  """Data-parallel's one replica takes the batches of all M: [1, M B, L]."""
  if c.algorithm != "data_parallel":
    return tokens_MxBxL
  return tokens_MxBxL.reshape(1, -1, tokens_MxBxL.shape[-1])


def _say(line: str) -> None:
  print(line, file=sys.stderr)


class _StopOnSigterm:
  """Notes that SIGTERM came; the loop saves and ends after its step."""

  def __init__(self):
    self.requested = False
    try:
      signal.signal(signal.SIGTERM, self._note)
    except ValueError:
      _say("Not in the main thread: SIGTERM will not save a checkpoint.")

  def _note(self, signum, frame):
    del signum, frame
    self.requested = True
