"""Timers and the first printed line of all benchmarks of compiled programs."""

import time
from collections.abc import Callable

import jax
import numpy as np
from absl import flags

from diloco.mesh.devices import divide_cpu

_REPEATS = flags.DEFINE_integer("repeats", 10, "Timed calls; the table has medians.")


def print_devices(cpu_devices: int = 1) -> None:
  """Prints the devices, the version of JAX, and that the numbers are medians.

  Args:
    cpu_devices: `mesh.cpu_devices`, by which it first divides the CPU.
  """
  divide_cpu(cpu_devices)
  kind = jax.devices()[0].device_kind
  print(f"{jax.device_count()} x {kind}, jax {jax.__version__}, medians")


def in_turn(*timers: Callable[[], float]) -> list[float]:
  """Calls timers in turn, so that slow phases affect all; returns their medians."""
  for timer in timers:
    timer()
  rows = [[timer() for timer in timers] for _ in range(_REPEATS.value)]
  return [float(np.median(column)) for column in zip(*rows)]


def timed(f: Callable, *args, **static) -> float:
  """Calls a function; returns the seconds until its results exist."""
  start = time.perf_counter()
  jax.block_until_ready(f(*args, **static))
  return time.perf_counter() - start
