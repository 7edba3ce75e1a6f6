"""Trains runs that differ in numbers only: one launch does the step of all runs.

`jax.vmap` maps the functions of a single run over an axis in front of all arrays, the
runs. Everything else belongs to each run: text, log, checkpoints, evaluation, summary.
A run that diverges ends with its error; its numbers touch no other run.

Letters: R runs, M replicas, B sequences, L positions.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.algorithm import overlap
from diloco.algorithm.inner import InnerMetrics, inner_step
from diloco.algorithm.methods import between_syncs
from diloco.algorithm.optimizers import OuterTuned, Tuned, outer_tuned, tuned
from diloco.algorithm.plan import Plan, make_plan
from diloco.algorithm.state import (
  Event,
  TrainState,
  abstract_state,
  final_params,
  init_state,
)
from diloco.algorithm.streaming import Streaming
from diloco.checkpoint.checkpoints import Checkpoints, Restored, make_record
from diloco.checkpoint.record import Spent
from diloco.config import Config
from diloco.data.batches import Batches
from diloco.errors import ConfigError
from diloco.evaluate.evaluation import Evaluation
from diloco.interop.init import first_params
from diloco.log import summary
from diloco.log.log import Log, TrainingDiverged
from diloco.log.workdir import FAILED
from diloco.mesh.devices import make_mesh
from diloco.model import attention
from diloco.processes.distributed import lock_workdir
from diloco.processes.peers import Peers, say
from diloco.processes.stop import end_on_signal
from diloco.wire.ledger import Ledger

Tree = Any
# Runs outer steps of one run.
Steps = Callable[[Plan, TrainState], tuple[TrainState, list[Event]]]


class Numbers(NamedTuple):
  """The numbers in which runs differ; every leaf has the shape [R]."""

  seed: Any
  inner: Tuned
  outer: OuterTuned


def numbers_of(configs: Sequence[Config]) -> Numbers:
  """Stacks the numbers of configs. They stay weakly typed, as Python numbers are."""
  each = [Numbers(c.seed, tuned(c), outer_tuned(c.outer)) for c in configs]
  return jax.tree.map(lambda *x: jnp.stack([jnp.asarray(v) for v in x]), *each)


class Run:
  """One of the runs.

  Attributes:
    c: config of the run.
    workdir: folder of the run.
    peers: only this process. Own, since a log takes the reports of its peers.
    out: the run's log.txt, which `train` closes.
    failed: whether the run ended with an error.
    log, checkpoints: as in `diloco.train`.
  """

  log: Log
  checkpoints: Checkpoints

  def __init__(self, c: Config, workdir: pathlib.Path):
    self.c, self.workdir, self.peers, self.failed = c, workdir, Peers(), False
    self.out = (workdir / "log.txt").open("a", buffering=1)

  @contextlib.contextmanager
  def own(self) -> Iterator[None]:
    """Writes all output to the run's log.txt; an error of this run is no other's."""
    out = self.out
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
      try:
        yield
      except (ConfigError, TrainingDiverged) as error:
        self.failed = True
        if hasattr(self, "log"):  # Else it trained alone, and has closed its log.
          self.log.close()  # Ends the line of the progress bar.
        say(f"{FAILED}{error}")


def train(runs: Sequence[Run]) -> bool:
  """Trains runs, all from the start or all from checkpoints of the same step.

  SIGTERM and Ctrl-C save all runs. If a damaged checkpoint leaves the runs at different
  steps, nothing is trained; the next start trains these runs in smaller groups.

  Args:
    runs: on one process and one device. Their configs differ in the fields of
      `Numbers` only.

  Returns:
    Whether SIGTERM ended the runs early, and they are saved.

  Raises:
    ConfigError: as `diloco.train.train`, if it holds for all runs.
    Interrupted: Ctrl-C ended the runs early, and the runs are saved.
  """
  c = runs[0].c
  with contextlib.ExitStack() as stack:
    stop = stack.enter_context(end_on_signal(Peers()))
    mesh = make_mesh(c)
    attention.check(c.model, mesh.devices.flat[0])
    stack.enter_context(jax.set_mesh(mesh))
    # Runs of the same seed read the same text.
    batches = {
      run.c.seed: stack.enter_context(contextlib.closing(Batches(run.c, mesh)))
      for run in {run.c.seed: run for run in runs}.values()
    }
    evaluation, plan = Evaluation(c, mesh), make_plan(c, mesh)
    abstract_state(c, mesh, None)  # Finds mistakes in inner.optimizer.
    between_syncs.check(c)
    restored = list[Restored | None]()
    for run in runs:
      stack.callback(run.out.close)
      stack.enter_context(lock_workdir(run.workdir, run.peers))
      run.checkpoints = Checkpoints(run.workdir, run.c, mesh, plan, run.peers)
      stack.enter_context(contextlib.closing(run.checkpoints))
      found = None
      with run.own():
        found = run.checkpoints.restore()
        if note := summary.note(run.c):
          say(f"note: {note}")
      restored.append(_on_host(found))
    start = restored[0].step if restored[0] else 0
    if any((found.step if found else 0) != start for found in restored):
      say("A damaged checkpoint leaves the runs at different steps; start again.")
      return False
    for run, found in zip(runs, restored):
      ledger = Ledger(**found.record.ledger) if found else Ledger()
      spent = Spent(**found.record.spent) if found else Spent()
      latest = lambda run=run: run.checkpoints.latest
      run.log = Log(run.c, run.workdir, ledger, spent, latest, run.peers)
      stack.enter_context(contextlib.closing(run.log))
      if found:
        batches[run.c.seed].set_state(found.record.data)

    numbers, log = numbers_of([run.c for run in runs]), _Logs(runs)
    states = [found.state for found in restored if found]
    if states:
      place = NamedSharding(mesh, P())
      put = lambda *x: jax.device_put(np.stack(x), place)
      state = jax.tree.map(put, *states)
      del states, restored
    else:
      params = first_params(c, mesh)
      init = lambda seed: init_state(c, mesh, plan, seed, params)
      state = jax.vmap(init)(numbers.seed)

    def save(t: int, finished: bool = False) -> None:
      for r, run in log.going():
        with run.own():
          run.log.flush()  # Raises if a loss is not finite.
          data = batches[run.c.seed]
          record = make_record(
            run.c,
            data,
            run.log.ledger,
            run.log.spent(),
            mesh,
            plan,
            run.peers,
            finished,
          )
          run.checkpoints.save(t, _of_run(state, r), record)

    for t in range(start + 1, c.train.steps + 1):
      # Run an inner step of all runs, then the outer step.
      by_seed = {seed: next(data) for seed, data in batches.items()}
      tokens = jnp.stack([by_seed[run.c.seed] for run in runs])
      state, metrics, events = step(c, plan, numbers, t, state, tokens)
      log.step(t, metrics, events)

      last = t == c.train.steps
      if c.eval.every and t % c.eval.every == 0 and not last:
        with log.pause():
          for r, run in log.going():
            params = final_params(plan, _of_run(state, r), mesh)
            run.log.evaluation(t, evaluation(params).numbers)
      if stop.after(range(t, t + 1)) and not last:
        with log.pause():
          save(t)
        for run in runs:
          run.checkpoints.wait()
        stop.leave(t, "the folder of every run")
        return True
      if c.checkpoint.every and t % c.checkpoint.every == 0 and not last:
        with log.pause():
          save(t)
      if not log.going():
        return False

    # Receive the fragments in flight.
    log.report()
    if plan:
      state, events = over_runs(plan, numbers, functools.partial(_drain, c), state)
      log.events(events)
    save(c.train.steps, finished=True)
    stop.finished(c.train.steps, "the folder of every run")
    for r, run in log.going():
      with run.own():
        args = (_of_run(state, r), mesh, evaluation, run.log, run.workdir, run.peers)
        summary.make(run.c, plan, *args)
    return False


class _Logs:
  """The logs of all runs. They get the metrics of a launch when the next one runs."""

  def __init__(self, runs: Sequence[Run]):
    self._runs = runs
    self._pending: tuple[int, InnerMetrics, list[Event]] | None = None

  def going(self) -> list[tuple[int, Run]]:
    """Lists the runs that have not failed, with their numbers from 0."""
    return [(r, run) for r, run in enumerate(self._runs) if not run.failed]

  def step(self, t: int, metrics: InnerMetrics, events: list[Event]) -> None:
    """Takes the metrics of step t, which was just launched, as `Log.stretch`."""
    self.report()
    self._pending = t, metrics, events

  def report(self) -> None:
    """Waits for the pending launch, and gives each log its part."""
    if self._pending is None:
      return
    (t, metrics, events), self._pending = self._pending, None
    metrics = jax.device_get(metrics)
    for r, run, own in self._split(events):
      with run.own():
        of_run = jax.tree.map(lambda x_R: x_R[r], metrics)  # noqa: B023
        run.log.stretch(range(t, t + 1), [of_run], own)

  def events(self, events: list[Event]) -> None:
    """Gives each log its part of the events after the last step."""
    for _, run, own in self._split(events):
      with run.own():
        run.log.events(own)

  @contextlib.contextmanager
  def pause(self) -> Iterator[None]:
    """Keeps what all runs do in the block out of the training time of each."""
    self.report()
    with contextlib.ExitStack() as stack:
      for _, run in self.going():
        with run.own():
          stack.enter_context(run.log.pause())
      yield

  def _split(self, events: list[Event]) -> Iterator[tuple[int, Run, list[Event]]]:
    metrics = jax.device_get([event.metrics for event in events])
    for r, run in self.going():
      parts = [{name: x_R[r] for name, x_R in values.items()} for values in metrics]
      pairs = zip(events, parts)
      yield r, run, [dataclasses.replace(e, metrics=part) for e, part in pairs]


def over_runs(
  plan: Plan, numbers: Numbers, steps: Steps, state: TrainState
) -> tuple[TrainState, list[Event]]:
  """Maps steps of one run over all runs; the metrics of the events have the axis R."""
  events = list[Event]()

  def one(numbers: Numbers, state: TrainState) -> tuple[TrainState, list]:
    own = dataclasses.replace(plan, seed=numbers.seed, tuned=numbers.outer)
    state, events[:] = steps(own, state)
    return state, [event.metrics for event in events]

  state, metrics = jax.vmap(one)(numbers, state)
  return state, [dataclasses.replace(e, metrics=m) for e, m in zip(events, metrics)]


def step(
  c: Config,
  plan: Plan | None,
  numbers: Numbers,
  t: int,
  state: TrainState,
  tokens: jax.Array,
) -> tuple[TrainState, InnerMetrics, list[Event]]:
  """Runs inner step t of all runs, then their outer step.

  Args:
    tokens: int32 [R, M, B, L].
  """
  trainable = overlap.trained_next(c, plan, t) if plan else None
  params, opt_state, metrics = inner_together(
    *(state.params, state.opt_state, tokens, trainable, numbers.inner),
    c=c,
    averaged=c.is_warm(t),
  )
  state, averages = TrainState(params, opt_state, state.outer), list[Event]()
  if plan and c.averages_after(t):
    due = functools.partial(between_syncs.average, c, t)
    state, averages = over_runs(plan, numbers, due, state)
  if plan is None or not plan.schedule.is_busy(t):
    return state, metrics, averages
  state, events = over_runs(plan, numbers, functools.partial(_outer, t), state)
  return state, metrics, averages + events


@functools.partial(jax.jit, static_argnames=("c", "averaged"), donate_argnums=(0, 1))
def inner_together(
  params: Tree,
  opt_state: Tree,
  tokens: jax.Array,
  trainable: Tree | None,
  tuned: Tuned,
  *,
  c: Config,
  averaged: bool = False,
) -> tuple[Tree, Tree, InnerMetrics]:
  """Maps `inner_step` over the runs, which all train the same layers."""
  one = lambda *args: inner_step(*args[:3], trainable, args[3], c=c, averaged=averaged)
  in_turn = lambda *args: jax.lax.map(lambda args: one(*args), args)
  args = (params, opt_state, tokens, tuned)
  # XLA for CPU is slow at batched products.
  return jax.lax.platform_dependent(*args, cpu=in_turn, default=jax.vmap(one))


def _outer(t: int, plan: Plan, state: TrainState) -> tuple[TrainState, list[Event]]:
  """Runs the outer step of one run after inner step t."""
  assert state.outer
  params, outer, events = Streaming(plan).step(t, state.params, state.outer)
  return dataclasses.replace(state, params=params, outer=outer), events


def _drain(c: Config, plan: Plan, state: TrainState) -> tuple[TrainState, list[Event]]:
  """Receives the fragments of one run that are in flight after the last step."""
  assert state.outer
  args = (c.train.steps, state.params, state.outer, c.outer.final_sync)
  params, outer, events = Streaming(plan).drain(*args)
  return dataclasses.replace(state, params=params, outer=outer), events


@jax.jit
def _of_run(state: TrainState, r: int) -> TrainState:
  """Takes the state of one run out of the state of all runs."""
  return jax.tree.map(lambda x_R: x_R[r], state)


def _on_host(found: Restored | None) -> Restored | None:
  """Copies a restored state to the host, where the states of all runs have room."""
  return found and found._replace(state=jax.device_get(found.state))
