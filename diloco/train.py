"""The training loop: the story of a run, from a config to its summary."""

import contextlib
import dataclasses
import pathlib
from typing import Any

import jax
import ml_collections
from jax.sharding import Mesh

from diloco.algorithm import optimizers, overlap
from diloco.algorithm.inner import fedpart_mask
from diloco.algorithm.outer import drain, outer_step
from diloco.algorithm.plan import Plan, make_plan
from diloco.algorithm.state import Event, final_params, init_state
from diloco.config import Config, resolve
from diloco.evaluate.evaluation import Evaluation
from diloco.model.sharding import FSDP
from diloco.run import summary
from diloco.run.batches import Batches
from diloco.run.checkpoint import Checkpoints, Record
from diloco.run.log import Log, Spent
from diloco.run.mesh import make_mesh
from diloco.run.processes import Peers, check_all_meet, end_on_sigterm, make_shared, say
from diloco.wire.ledger import Ledger


def train(
  config: ml_collections.ConfigDict | Config,
  workdir: str | pathlib.Path,
  peers: Peers | None = None,
) -> dict[str, Any]:
  """Trains a model, resuming from `workdir` if it has a checkpoint.

  Args:
    config: with the fields of `default_config`.
    workdir: receives checkpoints/, metrics.jsonl, tensorboard/, loss.png and
      summary.json. Several processes need one that all of them see.
    peers: the processes that train together, all in this function; default this one.

  Returns:
    The summary, as in summary.json; empty if SIGTERM ended the run early. The summary
    of a finished run is read, not made again.

  Raises:
    ConfigError: the config cannot work, `peers` are not JAX's processes, or workdir
      holds a run of another config.
    TrainingDiverged: a loss or gradient became NaN or infinite.
  """
  c, workdir, peers = resolve(config), pathlib.Path(workdir), peers or Peers()
  check_all_meet(peers)
  with contextlib.ExitStack() as stack:
    ends_after = stack.enter_context(end_on_sigterm(peers))

    # Every mistake in the config is found here, before anything compiles.
    mesh = make_mesh(c)
    stack.enter_context(jax.set_mesh(mesh))
    batches = stack.enter_context(contextlib.closing(Batches(c, mesh)))
    evaluation = Evaluation(c, mesh)
    plan = make_plan(c, mesh)
    make_shared(workdir, peers)
    if plan:
      stack.callback(plan.jobs.close)
      plan.transport.connect()

    # Go on from the newest checkpoint, or begin.
    checkpoints = Checkpoints(workdir, c, mesh, plan, peers)
    stack.enter_context(contextlib.closing(checkpoints))
    restored = checkpoints.restore()
    if restored:
      start, state, record = restored.step, restored.state, restored.record
      batches.set_state(record.data)
      if peers.index == 0:
        say(f"Going on from the checkpoint of step {start}.")
    else:
      start, state, record = 0, init_state(c, mesh, plan), Record(c.to_dict())
    ledger, spent = Ledger(**record.ledger), Spent(**record.spent)
    latest = lambda: checkpoints.latest
    log = Log(c, workdir, start, ledger, spent, latest, peers)
    stack.enter_context(contextlib.closing(log))

    def save(t: int, finished: bool = False) -> None:
      log.flush()  # Nothing that is not finite gets into a checkpoint.
      now = _record(c, batches, log, mesh, peers, finished)
      checkpoints.save(t, state, now)

    tuned, periods = optimizers.tuned(c), (c.eval.every, c.checkpoint.every)
    for steps in overlap.stretches(plan, start, c.train.steps, periods):
      # Inner steps of all replicas, and the outer step after the last of them.
      tokens = [next(batches) for _ in steps]
      trainable = _trainable(c, plan, steps[0])
      state, by_step = overlap.inner_steps(
        c, plan, steps, state, tokens, trainable, tuned
      )
      t, events = steps[-1], list[Event]()
      if plan and state.outer:
        params, outer, events = outer_step(plan, t, state.params, state.outer)
        state = dataclasses.replace(state, params=params, outer=outer)
      log.stretch(steps, by_step, events)

      last = t == c.train.steps
      if c.eval.every and t % c.eval.every == 0 and not last:
        with log.pause():
          params = final_params(plan, state, mesh)
          log.evaluation(
            t, {"outer": evaluation.loss(params)}, evaluation.tasks(params)
          )
      if ends_after(steps) and not last:
        save(t)
        checkpoints.wait()
        if peers.index == 0:
          say(f"SIGTERM: saved step {t} in {workdir}; the same command goes on.")
        return {}
      if c.checkpoint.every and t % c.checkpoint.every == 0 and not last:
        with log.pause():
          save(t)

    if record.finished:
      found = summary.read(workdir, peers)
      if found:
        if peers.index == 0:
          summary.report(workdir, found)
        return found
    else:
      # Receive what is in flight.
      if plan and state.outer:
        params, outer, events = drain(
          plan, c.train.steps, state.params, state.outer, c.outer.final_sync
        )
        state = dataclasses.replace(state, params=params, outer=outer)
        log.events(events)
      save(c.train.steps, finished=True)
    return summary.make(c, plan, state, mesh, evaluation, log, workdir, peers)


def _trainable(c: Config, plan: Plan | None, t: int) -> Any:
  """FedPart's mask for inner step t, None without it."""
  if plan is None or not c.outer.fedpart:
    return None
  due = [plan.fragments[p] for p in plan.schedule.next_to_send(t)]
  return fedpart_mask(c.model.num_layers, due)


def _record(
  c: Config, batches: Batches, log: Log, mesh: Mesh, peers: Peers, finished: bool
) -> Record:
  """What a checkpoint keeps beside the arrays."""
  position = dict[str, Any]()
  for part in peers.all_gather(batches.get_state()):
    position.update(part)
  return Record(
    config=c.to_dict(),
    data=position,
    ledger=dataclasses.asdict(log.ledger),
    spent=dataclasses.asdict(log.spent()),
    finished=finished,
    fsdp=mesh.shape[FSDP],
  )
