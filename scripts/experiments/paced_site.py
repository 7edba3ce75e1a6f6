"""Runs diloco.main as if an inner step took STEP_S seconds, for fault_bench.py.

A launch of n inner steps takes at least n * STEP_S seconds: the process sleeps for the
rest, as if it waited for a device. So sites of given speeds can share the cores of one
machine.
"""

import os
import runpy
import time

import jax

from diloco.algorithm.method import Method

STEP_S = float(os.environ["STEP_S"])
_inner = Method.inner


def inner(self, steps, state, tokens):
  """Replaces `Method.inner`: computes, then sleeps for the rest of the time."""
  end = time.monotonic() + STEP_S * len(steps)
  found = jax.block_until_ready(_inner(self, steps, state, tokens))
  time.sleep(max(end - time.monotonic(), 0))
  return found


Method.inner = inner
runpy.run_module("diloco.main", run_name="__main__", alter_sys=True)
