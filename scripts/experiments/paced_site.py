"""Runs diloco.main as if an inner step took STEP_S seconds, for fault_bench.py.

The process sleeps until its launch of inner steps has taken this time, as it would wait
for a device. So sites of given speeds share the cores of one machine.
"""

import os
import runpy
import time

import jax

from diloco.algorithm.method import Method

STEP_S = float(os.environ["STEP_S"])
_inner = Method.inner


def inner(self, steps, state, tokens):
  """Takes the place of `Method.inner`."""
  end = time.monotonic() + STEP_S * len(steps)
  found = jax.block_until_ready(_inner(self, steps, state, tokens))
  time.sleep(max(end - time.monotonic(), 0))
  return found


Method.inner = inner
runpy.run_module("diloco.main", run_name="__main__", alter_sys=True)
