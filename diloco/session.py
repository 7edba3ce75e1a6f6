"""The parts around the training loop: data, method, checkpoints, log, evaluation."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import jax
import ml_collections
from jax.sharding import Mesh

from diloco.algorithm.inner import InnerMetrics
from diloco.algorithm.method import Method, make_method
from diloco.algorithm.state import Event, TrainState
from diloco.checkpoint.checkpoints import Checkpoints
from diloco.checkpoint.damage import Stored
from diloco.checkpoint.record import Record
from diloco.config import Config, complete, resolve
from diloco.data.batches import Batches, Replicas
from diloco.data.contents import contents, keep_tokenizer
from diloco.errors import ConfigError
from diloco.evaluate.evaluation import Evaluation
from diloco.interop.init import first_params
from diloco.log import summary
from diloco.log.log import Log
from diloco.log.profile import Profile
from diloco.log.workdir import check_own
from diloco.mesh.devices import make_mesh
from diloco.mesh.sharding import FSDP
from diloco.model import attention
from diloco.processes.agree import check_same, check_same_program
from diloco.processes.distributed import check_all_meet, lock_workdir, make_shared
from diloco.processes.peers import Peers
from diloco.processes.stop import Stop, Stopped, end_on_signal
from diloco.spec import plugins
from diloco.spec.schedule import reaches
from diloco.util import files, remote
from diloco.util.types import Json, PyTree


class Hook(NamedTuple):
  """A function that the loop calls after launches of inner steps.

  Attributes:
    call: takes the launched steps, the step t after which training goes on, the state
      after t, the metrics of each step, and the events of the outer step. `call` must
      not keep the arrays of the state: the next launch overwrites these arrays.
    every: inner steps between two calls; a launch ends at each multiple. 0: no calls;
      None: a call after every launch, whatever its length.
  """

  call: Callable[[range, int, TrainState, list[InnerMetrics], list[Event]], None]
  every: int | None = None


class Part(Replicas, Protocol):
  """This process's part of a run whose replicas do not all train together."""

  def own_config(self) -> Config:
    """Returns the config by which this part trains."""

  def method(
    self, method: Method, batches: Batches, stop: Stop, contents: Mapping[str, str]
  ) -> Method:
    """Returns a method that trains like `method` and exchanges with other parts.

    Args:
      contents: `diloco.data.contents` of this part.
    """


class Run:
  """One run, which trains alone or together with other runs.

  Attributes:
    c: the run's config.
    workdir: the run's folder.
    peers: the processes that train the run.
    failed: whether the run ended with an error, while other runs go on.
    batches: the run's training batches.
    checkpoints, log: write the run's checkpoints and log.
  """

  batches: Batches
  checkpoints: Checkpoints
  log: Log

  def __init__(self, c: Config, workdir: pathlib.Path, peers: Peers):
    self.c, self.workdir, self.peers, self.failed = c, workdir, peers, False

  def own(self) -> contextlib.AbstractContextManager[None]:
    """Returns a context for work on this run only; here the context does nothing."""
    return contextlib.nullcontext()


class Joined(NamedTuple):
  """The method, state and tokens with which all runs of a session train.

  Attributes:
    method: takes the state of all runs from step to step.
    state: the state of all runs before the first step.
    tokens: yields the tokens of all runs for each step.
  """

  method: Method
  state: TrainState
  tokens: Iterator[jax.Array]


# Called with the method of one run, the runs, the runs' saved states (empty: start from
# step 0), and the parameters to start from (None: random parameters).
Join: TypeAlias = Callable[
  [Method, Sequence[Run], Sequence[TrainState], PyTree], Joined
]


class StepsDiffer(Exception):
  """The newest checkpoints of runs that train together have different steps."""


@dataclasses.dataclass
class Session:
  """The parts of a training loop.

  Attributes:
    method: trains the runs.
    runs: one run, or runs that train together.
    batches: yields int32 [M, B, L] for each step.
    evaluation: evaluates the parameters of one run.
    stop: knows whether a signal came.
    mesh: the device mesh.
    profile: traces the steps that the config names, if any.
    where: the folder of the runs, for messages.
    t: the step after which training begins.
    state: the state after that step.
    is_finished: whether an earlier session finished the run.
    more: hooks of the user, called before the hook that may stop the run.
  """

  method: Method
  runs: Sequence[Run]
  batches: Iterator[jax.Array]
  evaluation: Evaluation
  stop: Stop
  mesh: Mesh
  profile: Profile
  where: object
  t: int
  state: TrainState
  is_finished: bool = False
  more: Sequence[Hook] = ()

  @property
  def c(self) -> Config:
    """The config of the first run; others differ only in `together.groups.FIELDS`."""
    return self.runs[0].c

  @property
  def last(self) -> int:
    return self.c.train.steps

  @functools.cached_property
  def hooks(self) -> list[Hook]:
    """The hooks in the order of their calls: log, evaluate, save, the user's, stop."""
    return [
      Hook(self._report),
      Hook(self._evaluate, every=self.c.eval.every),
      Hook(self._checkpoint, every=self.c.checkpoint.every),
      *self.more,
      Hook(self._stop),
    ]

  def start(self) -> tuple[int, TrainState]:
    """Joins the run; returns the step after which training begins, and its state."""
    state = self.state
    del self.state  # The loop donates the state, so nothing else may use it.
    return self.method.enter(self.t, state)

  def span(self, t: int, state: TrainState) -> range:
    """Returns the inner steps after step t that one launch runs."""
    averages = [average.every for average in self.c.averages.values()]
    periods = [*averages, *(hook.every or 0 for hook in self.hooks)]
    steps = self.method.span(t, self.last, periods)
    self.profile.begin(steps, state)
    return steps

  def take(self, steps: range) -> list[jax.Array]:
    """Returns the tokens of these steps."""
    return [next(self.batches) for _ in steps]

  def due(self, steps: range, t: int) -> list[Hook]:
    """Returns the hooks to call after these steps; training goes on after step t."""
    is_due = lambda every: every is None or reaches(steps[0], t, every)
    return [hook for hook in self.hooks if is_due(hook.every)]

  def _report(
    self,
    steps: range,
    t: int,
    state: TrainState,
    metrics: list[InnerMetrics],
    events: list[Event],
  ) -> None:
    """Writes the logs."""
    for run, run_metrics, run_events in self._logged(metrics, events):
      with run.own():
        run.log.launched(steps, run_metrics, run_events)
    self.profile.end(steps, state)

  def _evaluate(self, steps: range, t: int, state: TrainState, *_: object) -> None:
    """Evaluates the state; `finish` evaluates the state after the last step."""
    if t < self.last:
      with self._paused():
        for run, run_state in self._each(state):
          with run.own():
            scores = self.evaluation(self.method.params(run_state))
            run.log.evaluation(t, scores.numbers)

  def _checkpoint(self, steps: range, t: int, state: TrainState, *_: object) -> None:
    """Saves the state; `finish` saves the state after the last step."""
    if t < self.last:
      with self._paused():
        self._save(t, state)

  def _stop(self, steps: range, t: int, state: TrainState, *_: object) -> None:
    """Saves and ends the loop if a signal asks for it, or if all runs have failed.

    Raises:
      Stopped: a signal came, and the state is saved; or all runs have failed.
    """
    stops = self.stop.after_launch()
    if stops and t < self.last:
      self._checkpoint(steps, t, state)
    if (stops and t < self.last) or all(run.failed for run in self.runs):
      raise Stopped

  def _save(self, t: int, state: TrainState, finished: bool = False) -> None:
    for run, run_state in self._each(state):
      if t <= (run.checkpoints.latest or 0):
        continue  # Step t or, if the method went back, a later step is saved already.
      with run.own():
        run.log.flush()  # Raises if a loss is not finite: that state is not saved.
        run.checkpoints.save(t, run_state, self._record(run, finished))

  def _record(self, run: Run, finished: bool) -> Record:
    """Makes the record of a run from all processes; all must call this method."""
    position = Json()
    for part in run.peers.all_gather(run.batches.get_state()):
      position.update(part)
    return Record(
      config=run.c.to_dict(),
      data=position,
      ledger=dataclasses.asdict(run.log.ledger),
      spent=dataclasses.asdict(run.log.spent()),
      finished=finished,
      fsdp=self.mesh.shape[FSDP],
      drained=self.method.sync.schedule.drained,
      contents=run.log.contents,
      mixtures=run.log.mixtures,
    )

  def leave(self, stopped: Stopped) -> None:
    """Ends the runs before the last step, after waiting for their newest checkpoints.

    Raises:
      Interrupted: Ctrl-C ended the run.
    """
    for run in self.runs:
      run.checkpoints.wait()
      run.log.close()
    self.method.close("stopped")
    if not all(run.failed for run in self.runs):
      saved = max(run.checkpoints.latest or 0 for run in self.runs)
      self.stop.leave(saved, self.where, stopped.late)

  def finish(self, state: TrainState, events: list[Event]) -> Json:
    """Saves the last state, evaluates it, and writes the summaries.

    Args:
      state: the state after the drain.
      events: the events of the drain.

    Returns:
      The summary of the last run.
    """
    self._report_events(events)
    self._save(self.last, state, finished=True)
    for run, _ in self._each(()):  # A run with a summary needs no other start.
      with run.own():
        run.checkpoints.wait()
    self.stop.finished(self.last, self.where)
    run_summary = self._summarise(state)
    self.method.close("finished")
    return run_summary

  def summary(self) -> Json:
    """Returns the summary of a run that an earlier session finished."""
    [run] = self.runs
    run_summary = summary.read(run.workdir, run.peers)
    if not run_summary:
      return self._summarise(self.state)
    if run.peers.index == 0:
      summary.report(run.workdir, run_summary)
    return run_summary

  def _summarise(self, state: TrainState) -> Json:
    run_summary = Json()
    for run, run_state in self._each(state):
      with run.own():
        run_summary = summary.make(
          run.c, self.method, run_state, self.mesh, self.evaluation, run.log
        )
    return run_summary

  def _report_events(self, events: list[Event]) -> None:
    """Gives each log its part of the events after the last launch."""
    for run, _, own_events in self._logged([], events):
      with run.own():
        run.log.events(own_events)

  @contextlib.contextmanager
  def _paused(self) -> Iterator[None]:
    """Does not count the time of the `with` block as training time of any run."""
    with contextlib.ExitStack() as stack:
      for run in self.runs:
        if not run.failed:
          with run.own():
            stack.enter_context(run.log.pause())
      yield

  def _logged(
    self, by_step: list[InnerMetrics], events: list[Event]
  ) -> Iterator[tuple[Run, list[InnerMetrics], list[Event]]]:
    """Yields the runs that go on, with metrics and events; waits for no device."""
    metrics = [event.metrics for event in events]
    for run, (run_metrics, parts) in self._each((by_step, metrics)):
      run_events = [dataclasses.replace(e, metrics=m) for e, m in zip(events, parts)]
      yield run, run_metrics, run_events

  def _each(self, arrays: PyTree) -> Iterator[tuple[Run, PyTree]]:
    """Yields the runs that have not failed, each with its part of the arrays."""
    for r, run in enumerate(self.runs):
      if not run.failed:
        yield run, self.method.of_run(arrays, r)


def open_session(
  config: ml_collections.ConfigDict | Config,
  workdir: str | pathlib.Path,
  peers: Peers | None,
  part: Part | None,
  hooks: Sequence[Hook] = (),
) -> contextlib.AbstractContextManager[Session]:
  """Prepares a new or resumed run; takes the arguments of `train`.

  Finds every mistake in the config before anything compiles.
  """
  c = config if isinstance(config, Config) else resolve(config)
  if part:
    c = part.own_config()
  elif needs := plugins.transport(name := c.overlap.transport).needs:
    raise ConfigError(f"overlap.transport is {name}, which needs {needs}.")
  workdir = remote.local_copy(workdir, "workdir", writes=True)
  return open_runs([Run(c, workdir, peers or Peers())], part=part, hooks=hooks)


def _alone(
  method: Method, runs: Sequence[Run], states: Sequence[TrainState], first: PyTree
) -> Joined:
  [run] = runs
  state = states[0] if states else method.init(params=first)
  return Joined(method, state, run.batches)


@contextlib.contextmanager
def open_runs(
  runs: Sequence[Run],
  *,
  join: Join = _alone,
  part: Part | None = None,
  hooks: Sequence[Hook] = (),
) -> Iterator[Session]:
  """Prepares one run, or several runs that train together, each new or resumed.

  Args:
    runs: their configs differ only in `together.groups.FIELDS`. Each run has peers of
      its own, because its log takes the reports of its peers.
    join: makes one method, one state and one stream of tokens for all runs.
    part: this process's part of the run.
    hooks: hooks of the user.

  Raises:
    ConfigError: the config cannot work on these devices, or with this text.
    StepsDiffer: the newest checkpoints of the runs have different steps.
  """
  c, peers, where = runs[0].c, runs[0].peers, runs[0].workdir
  check_all_meet(peers)
  check_same_program(c, peers)
  with contextlib.ExitStack() as stack:
    stop = stack.enter_context(end_on_signal(peers))
    mesh = make_mesh(c)
    kind = mesh.devices.flat[0].device_kind
    attention.check(c.model, kind)
    stack.enter_context(jax.set_mesh(mesh))
    # Runs with the same seed read the same text.
    batches = {
      seed: stack.enter_context(contextlib.closing(Batches(run_c, mesh, part)))
      for seed, run_c in {run.c.seed: run.c for run in runs}.items()
    }
    evaluation = Evaluation(c, mesh)
    read = contents(c, evaluation.tokenizer, evaluation.held_out, evaluation.test)
    if peers.count > 1:
      check_same(peers, read, "give all the same text, tokenizer and tasks")
    whole = make_method(c, mesh)
    method = part.method(whole, batches[c.seed], stop, read) if part else whole
    for run in runs:
      check_own(run.workdir)
      make_shared(run.workdir, run.peers)
      stack.enter_context(lock_workdir(run.workdir, run.peers))
    peers.print_line(f"attention: {attention.choose(c.model, kind)}")
    stack.callback(lambda: method.close("ended"))  # `method` may be replaced below.
    method.connect()

    # Continue from the newest checkpoints, or start at step 0.
    restored = list[Stored | None]()
    for run in runs:
      run.batches = batches[run.c.seed]
      run.checkpoints = Checkpoints(run.workdir, run.c, method, run.peers, read)
      stack.enter_context(contextlib.closing(run.checkpoints))
      stored = None
      with run.own():
        if note := summary.note(run.c):
          peers.print_line(f"note: {note}")
        stored = run.checkpoints.restore()
        if peers.index == 0:
          keep_tokenizer(run.workdir, evaluation.tokenizer)
          plugins.keep(run.c.plugins, run.workdir)
      if stored and len(runs) > 1:  # The host has room for the states of all runs.
        stored = stored._replace(arrays=jax.device_get(stored.arrays))
      restored.append(stored)
    [t, *others] = [stored.step if stored else 0 for stored in restored]
    if any(step != t for step in others):
      raise StepsDiffer
    remedy = "see whether all machines mount the same --workdir"
    check_same(peers, {"the step of the newest checkpoint": t}, remedy)
    for run, stored in zip(runs, restored):
      record = stored.record if stored else Record(run.c.to_dict())
      if stored:
        run.batches.set_state(record.data)
        method = method.after_drain(record.drained)
        if not record.finished:
          summary.set_aside(run.workdir, run.peers)
        elif summary.read(run.workdir, run.peers):
          asked, run.c = run.c.eval, complete(record.config)  # As in its result.
          if asked != run.c.eval:
            peers.print_line("eval.* differs: use `python -m diloco evaluate`.")
      latest = lambda run=run: run.checkpoints.latest
      run.log = Log(run.c, run.workdir, record, latest, run.peers, read)
      stack.enter_context(contextlib.closing(run.log))
      run.log.recovers = method.recovers
    states = [stored.arrays for stored in restored if stored]
    del restored
    first = None if states else first_params(c, mesh)
    if first is not None:
      peers.print_line(f"Starts from the parameters in {c.init.checkpoint}.")
    joined = join(method, runs, states, first)
    del states, first
    yield Session(
      method=joined.method,
      runs=runs,
      batches=joined.tokens,
      evaluation=evaluation,
      stop=stop,
      mesh=mesh,
      profile=stack.enter_context(contextlib.closing(Profile(c, runs[0].log))),
      where="the folder of every run" if others else files.shown(where),
      t=t,
      state=joined.state,
      is_finished=record.finished,
      more=hooks,
    )
