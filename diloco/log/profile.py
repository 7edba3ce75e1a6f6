"""Traces some inner steps of a run for xprof (docs/watch.md)."""

import contextlib

import jax

from diloco.algorithm.state import TrainState
from diloco.config import Config
from diloco.log.log import Log

FOLDER = "profile"


class Profile:
  """The trace of the steps `profile.steps`, in WORKDIR/profile.

  Steps that are launched together are traced together, so a trace may begin a few steps
  earlier and end a few steps later. The trace changes no result. It waits for the
  devices before it begins and before it ends; this waiting is not in the training time.
  """

  def __init__(self, c: Config, log: Log):
    self._steps, self._log, self._print = c.profile.range, log, log.peers.print_line
    self._folder = log.workdir / FOLDER
    if log.peers.count > 1:  # On one machine, processes would write files of one name.
      self._folder /= f"process-{log.peers.index}"
    self._first: int | None = None  # The first step of the trace, while it runs.
    self._annotation = contextlib.ExitStack()  # Names the traced steps.

  def begin(self, steps: range, state: TrainState) -> None:
    """Begins the trace if the next launch has steps to trace.

    Args:
      steps: the inner steps of the next launch.
      state: the state before these steps.
    """
    if not self._steps:
      return
    if self._first is None and steps[0] > self._steps[-1]:
      self._print(f"Traces nothing: the steps of profile.steps are before {steps[0]}.")
      self._steps = range(0)
    elif self._first is None and steps[-1] >= self._steps[0]:
      with self._log.pause():
        jax.block_until_ready(state)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's calls would hide other events.
        jax.profiler.start_trace(self._folder, profiler_options=options)
      self._first = steps[0]
    if self._first is not None:
      named = jax.profiler.StepTraceAnnotation
      self._annotation.enter_context(named("inner steps and sync", step_num=steps[-1]))

  def end(self, steps: range, state: TrainState) -> None:
    """Ends the trace if no more steps are to be traced.

    Args:
      steps: the inner steps that were just launched.
      state: the state after these steps and their syncs.
    """
    if self._first is None:
      return
    self._annotation.close()
    if steps[-1] >= self._steps[-1]:
      with self._log.pause():
        jax.block_until_ready(state)
        traced = f"{self._first} to {steps[-1]}"
        self.close()
      self._print(f"The trace of the steps {traced} is in {self._folder}.")

  def close(self) -> None:
    """Ends and writes a trace that has begun, even if the run ends early."""
    if self._first is not None:
      self._first, self._steps = None, range(0)
      jax.profiler.stop_trace()
