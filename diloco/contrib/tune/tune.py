"""Finds the fastest settings that change no result beyond rounding.

  python -m diloco tune --config=configs/sample.py
  python -m diloco tune --config=chinchilla:335M,M=2 --config.model.seq_len=1024
  diloco train --config=sample $(diloco tune --config=sample --flags)

Times the inner step on this machine's devices. It tries the values of one field after
the other. It compares each value with the fastest settings so far, and prints a row:

ms     median time of an inner step of all replicas
ratio  time of the fastest settings so far over this time; inf: so far, none fits

The last line has the flags of the fastest settings. The inner steps read no data set.

--flags prints only these flags, for the command of a run.

The command does not try: fields whose effect the step time does not show
(data.prefetch, outer.offload, overlap.transport); attention kernels that the devices
lack; mesh.fsdp if each shard is coded by itself, because mesh.fsdp then changes the
codes.
"""

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh

from diloco.algorithm import optimizers
from diloco.algorithm.inner import inner_step
from diloco.algorithm.method import make_method
from diloco.checkpoint.resume import coded_by_shard
from diloco.config import Config, ConfigError, changed, command_line, resolve
from diloco.config.resolve import leaves
from diloco.mesh import memory, sharding
from diloco.mesh.devices import divide_cpu, make_mesh
from diloco.model import attention
from diloco.util.bar import make_bar
from diloco.util.types import Json

_CONFIG = command_line.define_config()
_SECONDS = flags.DEFINE_float(
  "seconds", 1.0, "Seconds of timed steps per row.", lower_bound=0.0
)
_FLAGS = flags.DEFINE_bool(
  "flags", False, "Print only the flags to stdout, and the rest to stderr."
)
# A setting becomes the fastest if its step takes less than this share of the time of
# the fastest so far: smaller differences are noise.
_BETTER = 0.98
Fields = Json
# A function that times two configs in turn and returns both times in seconds: infinity
# for a config that does not fit in the memory. Raises ConfigError if one cannot work.
Timer = Callable[[Config, Config], tuple[float, float]]


def candidates(c: Config, devices: Sequence[jax.Device]) -> Iterator[list[Fields]]:
  """Yields values to try, for one field or for fields that depend on each other."""
  n, kind = len(devices), devices[0].device_kind
  most = math.gcd(c.replicas, n)
  now = c.mesh.replica or n // (c.mesh.fsdp or n // most)
  rows = [k for k in range(1, most + 1) if most % k == 0 and k != now]
  if not coded_by_shard(c):
    yield [{"mesh.replica": k, "mesh.fsdp": n // k} for k in rows]
  kernels = {"cudnn", "splash", "xla"} - {attention.choose(c.model, kind)}
  yield [{"model.attention": name} for name in sorted(kernels)]
  pairs = itertools.product(("none", "dots", "full"), (1, 0))
  blocks = [{"model.remat": remat, "model.unroll": unroll} for remat, unroll in pairs]
  yield blocks
  powers = [2**k for k in range((c.train.batch_size // c.replicas).bit_length())]
  yield [{"train.accumulate": n} for n in powers]
  chunks = [n for n in (2**k for k in range(6, 16)) if n < c.model.seq_len]
  yield [{"model.loss_chunk": n} for n in (0, *chunks)]
  yield blocks  # With a new microbatch, other values may be fastest.


def search(
  c: Config, timer: Timer, groups: Sequence[list[Fields]], out: TextIO | None = None
) -> Fields:
  """Prints the rows; returns the fastest values that differ from the config's.

  Args:
    groups: from `candidates`.
    out: file for the rows; None: stdout.
  """
  best, tried = Json(), {c}
  every = list(itertools.chain(*groups))
  with make_bar(iterable=every, unit="setting", disable=None, leave=False) as bar:
    show = lambda row: bar.write(row, file=out)
    show(f"{'setting':<38}{'ms':>10}{'ratio':>8}")
    for fields in bar:
      text = " ".join(f"{field}={value}" for field, value in fields.items())
      current = changed(c, best)
      try:
        trial = changed(c, best | fields)
        if trial in tried:
          continue
        tried.add(trial)
        before, now = timer(current, trial)
      except ConfigError:  # For example, the batch cannot be divided like this.
        continue
      row = f"{1e3 * now:10.2f}{before / now:8.2f}"
      show(f"{text:<38}{' out of memory' if math.isinf(now) else row}")
      if now < _BETTER * before:
        best |= fields
  defaults = leaves(c.to_dict())
  return {field: value for field, value in best.items() if value != defaults[field]}


class Steps:
  """Compiles inner steps, and times them on one state."""

  def __init__(self, c: Config):
    self._c, self._mesh = c, make_mesh(c)
    self._held = list[Any]()  # The state; empty: there is none yet.

  def _begin(self, mesh: Mesh) -> None:
    """Makes the first state; keeps the outer state, as it takes memory in a run."""
    self._held = []  # Frees the old state before the new one is made.
    c, self._mesh = self._c, mesh
    with jax.set_mesh(mesh):
      state = make_method(c, mesh).init()
    shape = (c.models, c.train.batch_size // c.models, c.model.seq_len)
    tokens = np.random.default_rng(0).integers(0, c.model.vocab_size, shape, np.int32)
    place = sharding.batch_sharding(mesh, c.one_model)
    rest = (jax.device_put(tokens, place), optimizers.tuned(c), state.outer)
    self._held = [state.params, state.opt_state, *rest]

  def _seconds(self, c: Config) -> float:
    """Runs one step; returns its seconds. The first step of a config compiles."""
    mesh = make_mesh(c)
    attention.check(c.model, mesh.devices.flat[0].device_kind)
    if mesh != self._mesh or not self._held:
      self._begin(mesh)
    *arguments, _ = self._held
    start = time.perf_counter()
    with jax.set_mesh(mesh):
      *self._held[:2], metrics = inner_step(*arguments, c=c)
    jax.block_until_ready(metrics)
    return time.perf_counter() - start

  def _fits(self, c: Config) -> bool:
    """Compiles and runs the step once, untimed; returns whether the memory suffices."""
    try:
      self._seconds(c)
    except jax.errors.JaxRuntimeError as error:
      if not memory.explain(error):
        raise
      self._held = []  # The step may have freed the state.
      return False
    return True

  def __call__(self, *pair: Config) -> tuple[float, float]:
    """Times two configs in turn."""
    fit = [self._fits(c) for c in pair]
    rows = list[list[float]]()
    if not all(fit):  # One time is enough: the config that fits is the better one.
      rows = [[self._seconds(c) if x else math.inf for c, x in zip(pair, fit)]]
    end = time.perf_counter() + _SECONDS.value
    while all(fit) and (len(rows) < 3 or time.perf_counter() < end):
      rows.append([self._seconds(c) for c in pair])
    # A row times both configs back to back, so another job slows both.
    ratio = statistics.median(before / now for before, now in rows)
    now = statistics.median(now for _, now in rows)
    return ratio * now, now


def measure(
  c: Config, timer: Timer, groups: Sequence[list[Fields]], out: TextIO | None
) -> tuple[Fields, float]:
  """Searches, then times the fastest settings against the config once more.

  Returns:
    The fields that differ from the config's, and the ratio of the config's step time
    to that of the fastest settings.

  Raises:
    ConfigError: nothing fits in the memory.
  """
  best = search(c, timer, groups, out)
  before, now = timer(c, changed(c, best))
  if math.isinf(now):
    raise ConfigError(
      "nothing fits in the memory; lower train.batch_size, or use more devices."
    )
  return (best, before / now) if best and now < before else ({}, 1.0)


def main(_: list[str]) -> None:
  c = resolve(_CONFIG.value)
  divide_cpu(c.mesh.cpu_devices)  # As in a run.
  devices = jax.devices()
  if not math.isfinite(_SECONDS.value):
    raise ConfigError(f"--seconds is {_SECONDS.value}; give a finite number.")
  out = sys.stderr if _FLAGS.value else None
  attention.check(c.model, devices[0].device_kind)
  fields, ratio = measure(c, Steps(c), list(candidates(c, devices)), out)
  settings = " ".join(f"--config.{k}={v}" for k, v in fields.items())
  if _FLAGS.value:
    print(settings)
  told = settings or "no other flag"
  print(f"{ratio:.2f} times as fast as the config: {told}", file=out)


if __name__ == "__main__":
  flags.mark_flag_as_required("config")
  command_line.run(main)
