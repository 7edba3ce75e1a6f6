"""Trains runs that differ in numbers only: one launch runs a step of all runs.

`jax.vmap` maps the functions of a single run's method over a new first axis of all
arrays, the axis of the runs. Each run has its own text, log, checkpoints, evaluation
and summary. A run that diverges ends with an error, without effect on other runs.

Letters: R runs, M replicas, B sequences, L positions.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.algorithm.inner import InnerMetrics, inner_step
from diloco.algorithm.method import Method
from diloco.algorithm.optimizers import OuterTuned, Tuned, outer_tuned, tuned
from diloco.algorithm.state import Event, TrainState
from diloco.algorithm.sync_metrics import Metric
from diloco.config import Config
from diloco.errors import ConfigError, TryAgain
from diloco.log.workdir import FAILED
from diloco.mesh.modes import training_modes
from diloco.processes.peers import Peers, print_line
from diloco.session import Joined, Run, StepsDiffer, open_runs
from diloco.train import loop
from diloco.util.types import PyTree


class Numbers(NamedTuple):
  """The numbers in which runs differ; every leaf has the shape [R]."""

  seed: jax.Array | int
  inner: Tuned
  outer: OuterTuned


def numbers_of(configs: Sequence[Config]) -> Numbers:
  """Stacks the numbers of configs; they stay weakly typed, like Python numbers."""
  each = [Numbers(c.seed, tuned(c), outer_tuned(c.outer)) for c in configs]
  return jax.tree.map(lambda *x: jnp.stack([jnp.asarray(v) for v in x]), *each)


@dataclasses.dataclass
class Together(Method):
  """The method of R runs: the method of one run, mapped over the runs.

  Attributes:
    numbers: the numbers in which the runs differ; `c` is the config of one run.
  """

  numbers: Numbers

  def init(
    self, seed: jax.Array | None = None, params: PyTree | None = None
  ) -> TrainState:
    del seed
    one = Method(self.c, self.sync)
    return jax.vmap(lambda seed: one.init(seed, params))(self.numbers.seed)

  def span(self, t: int, last: int, periods: Sequence[int]) -> range:
    return range(t + 1, t + 2)

  def inner(
    self, steps: range, state: TrainState, tokens: list[jax.Array]
  ) -> tuple[TrainState, list[InnerMetrics]]:
    """Runs one inner step of all runs; tokens are int32 [R, M, B, L]."""
    t, [tokens_RxMxBxL] = steps[0], tokens
    params, opt_state, metrics = inner_together(
      state.params,
      state.opt_state,
      tokens_RxMxBxL,
      self.numbers.inner,
      c=self.c,
      averaged=t <= self.c.joint_steps,
    )
    return TrainState(params, opt_state, state.outer), [metrics]

  def outer(self, t: int, state: TrainState) -> tuple[int, TrainState, list[Event]]:
    """Runs the outer step of all runs; the metrics of the events have the axis R."""
    if not (self.c.averages_after(t) or self.sync.schedule.is_busy(t)):
      return t, state, []
    return t, *self._map(lambda method, state: method.outer(t, state)[1:], state)

  def drain(self, t: int, state: TrainState) -> tuple[TrainState, list[Event]]:
    return self._map(lambda method, state: method.drain(t, state), state)

  def of_run(self, arrays: PyTree, r: int) -> PyTree:
    return _of_run(arrays, r)

  def _map(
    self,
    f: Callable[[Method, TrainState], tuple[TrainState, list[Event]]],
    state: TrainState,
  ) -> tuple[TrainState, list[Event]]:
    """Maps a function of one run's method over the runs."""
    events = list[Event]()

    def one(
      numbers: Numbers, state: TrainState
    ) -> tuple[TrainState, list[Mapping[str, Metric]]]:
      sync = dataclasses.replace(self.sync, seed=numbers.seed, tuned=numbers.outer)
      state, events[:] = f(Method(self.c, sync), state)
      return state, [event.metrics for event in events]

    state, metrics = jax.vmap(one)(self.numbers, state)
    return state, [dataclasses.replace(e, metrics=m) for e, m in zip(events, metrics)]


@functools.partial(jax.jit, static_argnames=("c", "averaged"), donate_argnums=(0, 1))
def inner_together(
  params: PyTree,
  opt_state: PyTree,
  tokens: jax.Array,
  tuned: Tuned,
  *,
  c: Config,
  averaged: bool = False,
) -> tuple[PyTree, PyTree, InnerMetrics]:
  """Maps `inner_step` over the runs."""
  one = functools.partial(inner_step, c=c, averaged=averaged)
  in_turn = lambda *args: jax.lax.map(lambda args: one(*args), args)
  args = (params, opt_state, tokens, tuned)
  # XLA for CPU is slow at batched products.
  return jax.lax.platform_dependent(*args, cpu=in_turn, default=jax.vmap(one))


@jax.jit
def _of_run(arrays: PyTree, r: int) -> PyTree:
  """Takes the arrays of one run out of those of all runs."""
  return jax.tree.map(lambda x_R: x_R[r], arrays)


class Member(Run):
  """One of the runs that train together, in this process only.

  Every run has `Peers` of its own, because its log takes the reports of its peers.

  Attributes:
    out: the run's log.txt, which `train` closes.
  """

  def __init__(self, c: Config, workdir: pathlib.Path):
    super().__init__(c, workdir, Peers())
    self.out = (workdir / "log.txt").open("a", buffering=1)

  @contextlib.contextmanager
  def own(self) -> Iterator[None]:
    """Writes all output to the run's log.txt.

    An error of one run, such as a loss that diverges, ends this run only.
    """
    out = self.out
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
      try:
        yield
      except (ConfigError, TryAgain) as error:
        self.failed = True
        if hasattr(self, "log"):  # Unset if it trains alone or fails early.
          self.log.close()  # Ends the progress bar's line, too.
        print_line(f"{FAILED}{error}")


def train(runs: Sequence[Member]) -> bool:
  """Trains runs, all from the start or all from checkpoints of the same step.

  SIGTERM and Ctrl-C save all runs. If a damaged checkpoint leaves the runs at different
  steps, nothing is trained; the next start trains these runs in smaller groups.

  Args:
    runs: on one process and one device. Their configs differ in the fields of
      `Numbers` only.

  Returns:
    Whether SIGTERM ended the runs early, and they are saved.

  Raises:
    ConfigError: as in `diloco.train.train`, for a mistake of all runs.
    Interrupted: Ctrl-C ended the runs early, and the runs are saved.
  """
  with training_modes(), contextlib.ExitStack() as stack:
    for run in runs:
      stack.callback(run.out.close)
    try:
      session = stack.enter_context(open_runs(runs, join=join))
    except StepsDiffer:
      print_line(
        "A damaged checkpoint leaves the runs at different steps; start again."
      )
      return False
    return not loop(session) and not all(run.failed for run in runs)


def join(
  method: Method, runs: Sequence[Run], states: Sequence[TrainState], first: PyTree
) -> Joined:
  """Makes one method, one state and one stream of tokens for all runs; see `Join`."""
  together = Together(runs[0].c, method.sync, numbers_of([run.c for run in runs]))
  if states:
    place = NamedSharding(method.sync.mesh, P())
    state = jax.tree.map(lambda *x: jax.device_put(np.stack(x), place), *states)
  else:
    state = together.init(params=first)
  return Joined(together, state, _tokens(runs))


def _tokens(runs: Sequence[Run]) -> Iterator[jax.Array]:
  """Yields the tokens of all runs for each step, int32 [R, M, B, L]."""
  batches = {run.c.seed: run.batches for run in runs}
  while True:
    by_seed = {seed: next(tokens) for seed, tokens in batches.items()}
    yield jnp.stack([by_seed[run.c.seed] for run in runs])
