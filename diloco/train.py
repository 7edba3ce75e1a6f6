"""The training loop: the story of a run, from a config to its summary."""

import contextlib
import dataclasses
import json
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from diloco import config as config_lib
from diloco import data as data_lib
from diloco.algorithm import state as state_lib
from diloco.algorithm import sync as sync_lib
from diloco.model import sampling
from diloco.model import sharding as mesh_lib
from diloco.run import mesh as run_mesh
from diloco.run import metrics as metrics_lib
from diloco.run import processes as distributed
from diloco.run.build import Run, build
from diloco.run.checkpoint import Checkpoints
from diloco.run.log import Recorder, Spent
from diloco.run.processes import Peers, say
from diloco.wire import exchange
from diloco.wire import ledger as ledger_lib

_SUMMARY = "summary.json"


def train(
  config, workdir: str | pathlib.Path, peers: Peers | None = None
) -> dict[str, Any]:
  """Trains a model as `config` says, resuming from `workdir` if it has a checkpoint.

  Args:
    config: ConfigDict with the fields of `default_config`.
    workdir: receives checkpoints/, metrics.jsonl, tensorboard/, loss.png and
      summary.json. Several processes need one that all of them see.
    peers: the processes that train together, all in this function; default this one.

  Returns:
    The summary, as in summary.json; empty if SIGTERM ended the run early. That of a
    finished run is read, not made again.

  Raises:
    ConfigError: the config cannot work, `peers` are not JAX's processes, or workdir
      holds a run of another config.
    TrainingDiverged: a loss or gradient became NaN or infinite.
  """
  c = config_lib.resolve(config)
  workdir = pathlib.Path(workdir)
  peers = peers or Peers()
  _check_all_meet(peers)
  with contextlib.ExitStack() as stack:
    ends_after = stack.enter_context(_end_on_sigterm(peers))
    mesh = run_mesh.make_mesh(c)
    stack.enter_context(jax.set_mesh(mesh))
    own_replicas = mesh_lib.local_replicas(c, mesh)
    data = data_lib.make_train_iterator(c, own_replicas)
    stack.enter_context(contextlib.closing(data))
    run = build(c, mesh, data, own_replicas, peers)
    if run.outer:
      stack.callback(run.outer.transport.close)
    distributed.make_shared(workdir, peers)
    if run.outer:
      run.outer.transport.connect()
    checkpoints = Checkpoints(workdir, c, peers)
    stack.enter_context(contextlib.closing(checkpoints))
    start, state, record = _restore(run, checkpoints)
    ledger = ledger_lib.Ledger(**record["ledger"])
    spent = Spent(**record.get("spent", {}))
    latest = lambda: checkpoints.latest
    recorder = Recorder(c, workdir, start, ledger, spent, latest, peers)
    stack.enter_context(contextlib.closing(recorder))

    def save(t: int, finished: bool = False) -> None:
      recorder.flush()  # Nothing that is not finite gets into a checkpoint.
      now = recorder.spent()
      checkpoints.save(t, _publish(run, state), _record(run, ledger, now, finished))

    for steps in run.stretches(start):
      state, metrics, events = _train(run, steps, state)
      recorder.stretch(steps, metrics, events)

      t = steps[-1]
      if c.eval.every and t % c.eval.every == 0 and t < c.train.steps:
        with recorder.pause():
          outer_params = run.outer_params(state)
          scores = run.evaluate_tasks(outer_params)
          recorder.evaluation(t, {"outer": run.evaluate(outer_params)}, scores)
      stopping = ends_after(steps) and t < c.train.steps
      last = stopping or t == c.train.steps
      if not last and c.checkpoint.every and t % c.checkpoint.every == 0:
        with recorder.pause():
          save(t)
      if stopping:
        save(t)
        checkpoints.wait()
        if peers.index == 0:
          say(f"SIGTERM: saved step {t} in {workdir}; the same command goes on.")
        return {}

    if not record["finished"]:
      state = _finish(run, c.train.steps, state, recorder)
      save(c.train.steps, finished=True)
    elif summary := _written_summary(workdir, peers):
      if peers.index == 0:
        recorder.report(summary, "", workdir / "loss.png")
      return summary
    return _summarise(run, state, recorder, workdir)


def _check_all_meet(peers: Peers) -> None:
  """Without it every process of JAX would write the same files, each with its part."""
  if peers.count != jax.process_count():
    raise config_lib.ConfigError(
      f"peers are {peers.count} processes, but JAX's are {jax.process_count()}; join"
      " them by diloco.distributed.initialize, instead of jax.distributed.initialize,"
      " and hand its peers to train; on the command line by --distributed=auto or"
      " --coordinator."
    )


def _train(run: Run, steps: range, state: state_lib.TrainState):
  """Inner steps, and the outer step after the last of them.

  Args:
    run: the run.
    steps: numbers of the K steps; K > 1 only where they hide an exchange.
    state: before them, donated.

  Returns:
    (state after them, [InnerMetrics of each step, float32[M]], what was sent and
    received after the last). Nothing is waited for.
  """
  params, opt_state, outer = state.params, state.opt_state, state.outer
  tokens = [run.next_batch() for _ in steps]
  trainable = run.trainable(steps[0])
  if run.outer and outer and run.hiding_steps(steps[0] - 1):
    count, spare = np.int32(len(tokens)), run.longest_hiding - len(tokens)
    padded = tokens + spare * tokens[:1]
    program = lambda payloads: run.hidden_exchange(
      count, params, opt_state, padded, trainable, payloads, run.tuned
    )
    params, opt_state, metrics, outer = sync_lib.hide_exchange(
      run.outer, steps[0] - 1, outer, program
    )
    metrics = metrics[: len(tokens)]
  else:
    [tokens_MxBxL] = tokens
    params, opt_state, of_step = run.inner_step(
      params, opt_state, tokens_MxBxL, trainable, run.tuned
    )
    metrics = [of_step]
  events = list[sync_lib.Event]()
  if run.outer and outer:
    params, outer, events = sync_lib.outer_step(run.outer, steps[-1], params, outer)
  return state_lib.TrainState(params, opt_state, outer), metrics, events


def _restore(run: Run, checkpoints: Checkpoints):
  """The state to start from: (step, state, record)."""
  c = run.config

  def state_at(step: int, record: dict) -> state_lib.TrainState:
    # Shapes alone: a fresh state beside the restored one may not fit.
    like = state_lib.abstract_state(c, run.mesh, run.optimizer, run.outer)
    if run.outer is None or like.outer is None:
      return like
    in_flight = () if record["finished"] else run.outer.schedule.in_flight(step)
    payloads = {
      str(p): sync_lib.payload_struct(run.outer, p, like.params, like.outer.theta[p])
      for p in in_flight
    }
    outer = sync_lib.published(run.outer, like.outer)
    outer = dataclasses.replace(outer, in_flight=payloads)
    return dataclasses.replace(like, outer=outer)

  restored = checkpoints.restore(state_at)
  if restored is None:
    fresh = state_lib.init_state(c, run.mesh, run.optimizer, run.outer)
    ledger = dataclasses.asdict(ledger_lib.Ledger(c.replicas, c.wire.exchange))
    return 0, fresh, {"ledger": ledger, "finished": False}
  run.data.set_state(restored.record["data"])
  if run.peers.index == 0:
    say(f"Going on from the checkpoint of step {restored.step}.")
    shards = run.mesh.shape[mesh_lib.FSDP]
    exchange.warn_of_other_shards(c, restored.record.get("fsdp"), shards)
  state = restored.state
  if run.outer and state.outer:
    outer = sync_lib.adopt(run.outer, state.outer)
    state = dataclasses.replace(state, outer=outer)
  return restored.step, state, restored.record


def _publish(run: Run, state: state_lib.TrainState) -> state_lib.TrainState:
  """The state as all processes can save it together."""
  if run.outer is None or state.outer is None:
    return state
  return dataclasses.replace(state, outer=sync_lib.publish(run.outer, state.outer))


def _record(
  run: Run, ledger: ledger_lib.Ledger, spent: Spent, finished: bool
) -> dict[str, Any]:
  """What a checkpoint keeps beside the arrays, as JSON; `_restore` reads it."""
  position = dict[str, Any]()
  for part in run.peers.all_gather(run.data.get_state()):
    position.update(part)
  return {
    "data": position,
    "ledger": dataclasses.asdict(ledger),
    "spent": dataclasses.asdict(spent),
    "finished": finished,
    "fsdp": run.mesh.shape[mesh_lib.FSDP],
  }


def _finish(run: Run, t: int, state, recorder: Recorder):
  """Receives what is in flight and, if asked for, synchronises everything."""
  if run.outer is None:
    return state
  params, outer, events = sync_lib.drain(run.outer, t, state.params, state.outer)
  if run.config.outer.final_sync:
    params, outer, more = sync_lib.sync_all(run.outer, t, params, outer)
    events += more
  recorder.events(events)
  return state_lib.TrainState(params, state.opt_state, outer)


def _summarise(run: Run, state, recorder: Recorder, workdir: pathlib.Path):
  """Evaluates, generates, draws and writes summary.json; returns the summary."""
  c = run.config
  outer_params = run.outer_params(state)
  results = {
    "outer": run.evaluate(outer_params),
    "mean": run.evaluate(state_lib.replica_mean(state.params, run.mesh)),
    "first": run.evaluate(state_lib.first_replica(state.params, run.mesh)),
  }
  scores = run.evaluate_tasks(outer_params)
  recorder.evaluation(c.train.steps, results, scores)
  recorder.flush()
  text = ""
  if c.log.sample_tokens:
    prompt = run.tokenizer.encode(c.log.prompt)
    ids = sampling.make_generate(c)(
      outer_params, prompt, c.log.sample_tokens, c.log.temperature, c.seed
    )
    text = run.tokenizer.decode([*prompt, *ids])
  title = f"{c.algorithm}, M={c.replicas}, H={c.sync_every}"
  summary = recorder.summary(results, scores)
  if run.peers.index == 0:
    picture = metrics_lib.plot_loss(workdir, title)
    written = workdir / ("." + _SUMMARY)
    written.write_text(json.dumps(summary, indent=2) + "\n")
    written.replace(workdir / _SUMMARY)  # Whole or not there.
    recorder.report(summary, text, picture)
  return summary


def _written_summary(workdir: pathlib.Path, peers: Peers) -> dict[str, Any] | None:
  """The summary that process 0 finds, None if the run was cut short before it."""
  path = workdir / _SUMMARY
  found = json.loads(path.read_text()) if peers.index == 0 and path.exists() else None
  return peers.all_gather(found)[0]


@contextlib.contextmanager
def _end_on_sigterm(peers: Peers) -> Iterator[Callable[[range], bool]]:
  """Notes SIGTERM instead of dying of it, until training ends.

  Yields:
    Whether all processes end after some steps; to be asked about every step.
  """
  if peers.count > 1:  # JAX notes the signal and lets all processes agree on a step.
    reached = multihost_utils.reached_preemption_sync_point
    yield lambda steps: any(list(map(reached, steps)))  # Asked about each of them.
    return
  requested = threading.Event()
  try:
    before = signal.signal(signal.SIGTERM, lambda signum, frame: requested.set())
  except ValueError:
    say("Not in the main thread: SIGTERM will not save a checkpoint.")
    yield lambda steps: False
    return
  try:
    yield lambda steps: requested.is_set()
  finally:
    # None is a handler that was not set from Python and cannot be.
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
