"""Where the time goes until a site that starts takes part in the rounds. No JAX."""

import math
import os
import time
from typing import Any

# What is measured, in this order, and how a line names it.
PHASES = {
  "start": "to start",
  "snapshot": "for the answer of the group",
  "first_step": "for the first step",
  "rounds": "to receive rounds",
}
# Part of these seconds, in which XLA compiled programs or read them from its cache.
COMPILING = "compiling"


class Arrival:
  """Measures the phases of a site's start.

  Attributes:
    seconds: {phase: its seconds}, and those of `COMPILING`.
  """

  def __init__(self, began: float):
    """Starts to measure.

    Args:
      began: when the site's process began, by `time.monotonic`.
    """
    self.seconds = {COMPILING: 0.0}
    self._last = began

  def ends(self, phase: str) -> None:
    """Notes that a phase ends now, and the next one begins."""
    now = time.monotonic()
    self.seconds[phase], self._last = now - self._last, now

  def listen(self, event: str, duration_secs: float, **about: str | int) -> None:
    """Takes the events of `jax.monitoring`."""
    del about
    if event == "/jax/core/compile/backend_compile_duration":
      self.seconds[COMPILING] += duration_secs


def process_began() -> float:
  """Returns when this process began, by `time.monotonic`; needs Linux."""
  with open("/proc/self/stat", "rb") as file:
    ticks = int(file.read().rpartition(b")")[2].split()[19])
  age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
  return time.monotonic() - age


def checked(seconds: Any) -> dict[str, float]:
  """Reads what a site says of its arrival; {} if `Arrival` measures something else."""
  if not isinstance(seconds, dict):
    return {}
  known: dict[str, Any] = {k: seconds.get(k) for k in (*PHASES, COMPILING)}
  is_time = lambda x: isinstance(x, int | float) and 0 <= x < math.inf
  return known if all(map(is_time, known.values())) else {}


def text(seconds: dict[str, float]) -> str:
  """Describes an arrival, such as "9.1 s: 5.0 s to start, ...; compiling took 3 s"."""
  parts = ", ".join(f"{seconds[k]:.1f} s {words}" for k, words in PHASES.items())
  whole = sum(seconds[k] for k in PHASES)
  return f"{whole:.1f} s: {parts}; compiling took {seconds[COMPILING]:.1f} s of these"
