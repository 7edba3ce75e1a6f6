"""When a fragment is exchanged and updated: at its arrival, or once it is sent."""

import time
from collections.abc import Callable
from concurrent import futures
from typing import Protocol, TypeVar

import jax
import numpy as np

Result = TypeVar("Result")


class Jobs(Protocol):
  """Runs one job per fragment in flight."""

  def start(self, p: int, job: Callable[..., Result], *args) -> None:
    """Fragment p was sent: `job(*args)` may begin."""

  def finish(self, p: int, job: Callable[..., Result], *args) -> Result:
    """Fragment p arrives: the result of its job, begun now if `start` did not."""
    ...

  def waited(self) -> dict[str, np.float32]:
    """Metric `waited_s`: seconds that the last `finish` waited; {} if none can."""
    ...

  def settle(self) -> None:
    """Waits for all jobs."""

  def close(self) -> None:
    """Forgets all jobs, without waiting for them."""


class Foreground:
  """Runs a job when it is due. Devices run programs in the order of their launches."""

  def start(self, p: int, job: Callable[..., Result], *args) -> None:
    pass

  def finish(self, p: int, job: Callable[..., Result], *args) -> Result:
    return job(*args)

  def waited(self) -> dict[str, np.float32]:
    return {}

  def settle(self) -> None:
    pass

  def close(self) -> None:
    pass


class Background:
  """Runs jobs in a thread, in the order of the sends, while the devices train."""

  def __init__(self):
    self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="exchange")
    self._jobs: dict[int, futures.Future] = {}
    self._waited_s = 0.0

  def start(self, p: int, job: Callable[..., Result], *args) -> None:
    run = lambda: jax.block_until_ready(job(*args))
    self._jobs[p] = self._thread.submit(run)

  def finish(self, p: int, job: Callable[..., Result], *args) -> Result:
    if p not in self._jobs:  # Sent before this process resumed.
      self.start(p, job, *args)
    began = time.perf_counter()
    result = self._jobs.pop(p).result()
    self._waited_s = time.perf_counter() - began
    return result

  def waited(self) -> dict[str, np.float32]:
    return {"waited_s": np.float32(self._waited_s)}

  def settle(self) -> None:
    # Two threads that start collectives between the same processes could start them
    # in another order on each.
    futures.wait(self._jobs.values())

  def close(self) -> None:
    self._thread.shutdown(wait=False, cancel_futures=True)
