"""The training loop: a whole run, from a config to its summary."""

import contextlib
import dataclasses
import pathlib
from typing import Any

import jax
import ml_collections

from diloco.algorithm import overlap
from diloco.algorithm.methods import between_syncs
from diloco.algorithm.state import Event, abstract_state, final_params, init_state
from diloco.algorithm.streaming import make_method
from diloco.checkpoint.checkpoints import Checkpoints, Record, make_record
from diloco.checkpoint.record import Spent
from diloco.config import Config, resolve
from diloco.data.batches import Batches
from diloco.errors import ConfigError
from diloco.evaluate.evaluation import Evaluation
from diloco.evaluate.merges import MergeLoss
from diloco.interop.init import first_params
from diloco.log import summary
from diloco.log.log import Log
from diloco.log.profile import Profile
from diloco.mesh.devices import make_mesh
from diloco.model import attention
from diloco.processes.distributed import check_all_meet, lock_workdir, make_shared
from diloco.processes.peers import Peers, say
from diloco.processes.stop import end_on_signal
from diloco.sites.calendar import config_of
from diloco.sites.site import Site
from diloco.wire.ledger import Ledger


def train(
  config: ml_collections.ConfigDict | Config,
  workdir: str | pathlib.Path,
  peers: Peers | None = None,
  site: Site | None = None,
) -> dict[str, Any]:
  """Trains a model, resuming from `workdir` if it has a checkpoint.

  Args:
    config: with the fields of `default_config`.
    workdir: receives config.json, checkpoints/, metrics.jsonl, tensorboard/, loss.png
      and summary.json. All processes must see the same folder.
    peers: the processes that train together; each must call `train`. None: only this.
    site: the part of this process in a run of several sites
      (overlap.transport=sites). It has the config of the whole run.

  Returns:
    The summary, as in summary.json; empty if SIGTERM ended the run early. If the
    run has finished before, its summary is read from the file.

  Raises:
    ConfigError: the config cannot work, `peers` are not JAX's processes, or workdir
      contains a run with another config.
    TrainingDiverged: a loss or gradient became NaN or infinite.
    Interrupted: Ctrl-C ended the run early, and the run is saved.
  """
  c, workdir, peers = resolve(config), pathlib.Path(workdir), peers or Peers()
  if (site is not None) != (c.overlap.transport == "sites"):
    raise ConfigError(
      f"overlap.transport is {c.overlap.transport}, which needs"
      f" {'no ' if site else ''}--coordinator and --site (docs/sites.md)."
    )
  if site:  # From here on `c` describes the part of this site.
    c = config_of(c, site.index)
  check_all_meet(peers)
  with contextlib.ExitStack() as stack:
    stop = stack.enter_context(end_on_signal(peers))

    # Every mistake in the config is found here, before anything compiles.
    mesh = make_mesh(c)
    attention.check(c.model, mesh.devices.flat[0])
    stack.enter_context(jax.set_mesh(mesh))
    batches = stack.enter_context(contextlib.closing(Batches(c, mesh, site)))
    evaluation = Evaluation(c, mesh)
    method = make_method(c, mesh)
    plan = method.plan if method else None
    abstract_state(c, mesh, None)  # Finds mistakes in inner.optimizer.
    between_syncs.check(c)
    # Launches of inner steps end at these multiples.
    periods = (c.eval.every, c.checkpoint.every, *c.averages().values())
    make_shared(workdir, peers)
    stack.enter_context(lock_workdir(workdir, peers))
    note = summary.note(c)
    if peers.index == 0:
      say(f"attention: {attention.choose(c.model, mesh.devices.flat[0])}")
      if note:
        say(f"note: {note}")
    if plan:
      stack.callback(plan.jobs.close)
      plan.transport.connect()

    # Continue from the newest checkpoint, or start at step 0.
    checkpoints = Checkpoints(workdir, c, mesh, plan, peers)
    stack.enter_context(contextlib.closing(checkpoints))
    restored = checkpoints.restore()
    if restored:
      start, state, record = restored.step, restored.state, restored.record
      batches.set_state(record.data)
      method = method.after_drain(record.drained) if method else None
      plan = method.plan if method else None
      if start == record.drained:
        summary.set_aside(workdir, start, peers)
    else:
      first = first_params(c, mesh)
      if first is not None and peers.index == 0:
        say(f"Starts from the parameters in {c.init.checkpoint}.")
      state = init_state(c, mesh, plan, params=first)
      start, record, first = 0, Record(c.to_dict()), None
    merge_loss = MergeLoss(c, mesh, plan, evaluation)
    t = start
    if site and plan and not record.finished:
      stack.callback(site.leave, "ended")
      t, state = site.enter(plan, start, state, batches)
    ledger, spent = Ledger(**record.ledger), Spent(**record.spent)
    log = Log(c, workdir, ledger, spent, lambda: checkpoints.latest, peers)
    stack.enter_context(contextlib.closing(log))
    log.note = site.note if site else None
    profile = stack.enter_context(contextlib.closing(Profile(c, workdir, log, peers)))

    def save(t: int, finished: bool = False) -> None:
      if site and t <= (checkpoints.latest or 0):
        return  # The site went back to the group's step.
      log.flush()  # Raises if a loss is not finite: that state must not be saved.
      now = make_record(
        c, batches, log.ledger, log.spent(), mesh, plan, peers, finished
      )
      checkpoints.save(t, state, now)

    while t < c.train.steps:
      steps = overlap.stretch(plan, t, c.train.steps, periods)
      # Run inner steps of all replicas, then the outer step.
      profile.begin(steps, state)
      tokens = [next(batches) for _ in steps]
      state, by_step = overlap.inner_steps(c, plan, steps, state, tokens)
      t, averages, events = steps[-1], list[Event](), list[Event]()
      if plan:
        state, averages = between_syncs.average(c, t, plan, state)
      if site and plan:
        t, state, events = site.outer_step(plan, t, state, batches, stop.is_told)
      elif method and state.outer:
        before = merge_loss.before(t, state.params)
        params, outer, events = method.step(t, state.params, state.outer)
        events += merge_loss.after(t, params, before)
        state = dataclasses.replace(state, params=params, outer=outer)
      log.stretch(steps, by_step, averages + events)
      profile.end(steps, state)

      last = t == c.train.steps
      if c.eval.every and t % c.eval.every == 0 and not last:
        with log.pause():
          params = final_params(plan, state, mesh)
          log.evaluation(t, evaluation(params).numbers)
      if stop.after(steps) and not last:
        save(t)
        checkpoints.wait()
        if site:
          site.leave("stopped")
        stop.leave(checkpoints.latest or t, workdir)
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
      # Receive the fragments in flight.
      if site and plan:
        state, events = site.drain(plan, state, batches, stop.is_told)
        log.events(events)
        if not site.is_finished:  # A signal came; the last checkpoint is older.
          checkpoints.wait()
          site.leave("stopped")
          stop.leave(checkpoints.latest or 0, workdir, late=True)
          return {}
      elif method and state.outer:
        params, outer, events = method.drain(
          c.train.steps, state.params, state.outer, c.outer.final_sync
        )
        state = dataclasses.replace(state, params=params, outer=outer)
        log.events(events)
      save(c.train.steps, finished=True)
      stop.finished(c.train.steps, workdir)
    found = summary.make(c, plan, state, mesh, evaluation, log, workdir, peers, site)
    if site:
      site.leave("finished")
    return found
