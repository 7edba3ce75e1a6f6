"""Runs the exchange and the update of a fragment when it arrives, or earlier."""

import time
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

import jax
import numpy as np

Result = TypeVar("Result")


class Jobs:
  """Runs one job per fragment in flight: `receive` of `diloco.algorithm.outer`.

  In the foreground, a job runs when its fragment arrives. If it ran earlier, it
  would delay inner steps, because devices run programs in launch order. In the
  background, a thread runs the jobs in the order of the sends while the devices train.
  """

  def __init__(self, background: bool):
    self._thread = futures.ThreadPoolExecutor(1, "exchange") if background else None
    self._jobs: dict[int, futures.Future] = {}
    self._waited_s = 0.0

  def start(self, p: int, job: Callable[..., Result], *args) -> None:
    """Lets `job(*args)` begin; called when fragment p is sent."""
    if self._thread:
      run = lambda: jax.block_until_ready(job(*args))
      self._jobs[p] = self._thread.submit(run)

  def finish(self, p: int, job: Callable[..., Result], *args) -> Result:
    """Returns the result of fragment p's job; called when the fragment arrives."""
    if self._thread is None:
      return job(*args)
    if p not in self._jobs:  # The fragment was sent before the run resumed.
      self.start(p, job, *args)
    began = time.perf_counter()
    result = self._jobs.pop(p).result()
    self._waited_s = time.perf_counter() - began
    return result

  def waited(self) -> dict[str, np.float32]:
    """Returns {"waited_s": seconds of the last `finish`}; {} in the foreground."""
    return {"waited_s": np.float32(self._waited_s)} if self._thread else {}

  def settle(self) -> None:
    """Waits for all jobs."""
    # Two threads could start collectives in a different order on each process.
    futures.wait(self._jobs.values())

  def close(self) -> None:
    """Forgets all jobs, without waiting for them."""
    if self._thread:
      self._thread.shutdown(wait=False, cancel_futures=True)
