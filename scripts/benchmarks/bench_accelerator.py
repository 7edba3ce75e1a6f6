"""Times training steps on this machine's accelerators; prints a table.

  git clone https://github.com/google-deepmind/nanodo /tmp/nanodo
  PYTHONPATH=/tmp/nanodo python scripts/benchmarks/bench_accelerator.py

A row is one size, one step, one attention, one rematerialisation and one unrolling of
the loop over blocks. The steps are NanoDO's, data-parallel and Streaming DiLoCo with
M=2, all with the same global batch.

MFU counts the FLOPs of `diloco.spec.shapes.flops_per_token`. The hidden exchange is the
time that an exchange adds to the inner step that hides it, as a share of this step. For
an exchange, the two replicas need at least two devices.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

import bench_nanodo
import jax
import numpy as np
from absl import flags
from bench_step import Bench
from timing import in_turn, print_devices, timed

from diloco.algorithm.method import overlapped_exchange
from diloco.algorithm.outer import send
from diloco.config import Config, changed, command_line
from diloco.errors import ConfigError
from diloco.mesh import hardware
from diloco.model import attention
from diloco.spec.shapes import flops_per_token

ATTENTION, REMAT = ("xla", "splash", "cudnn"), ("none", "dots", "full")
# 16 sequences of 2,048 tokens, 4 at a time: with these, data-parallel fits on a v5e.
_PAPER = (32_768, 16, 2048, 4, 256, "full")
SIZES = bench_nanodo.SIZES | {
  "35M": (6, 8, 512, *_PAPER),
  "150M": (11, 15, 960, *_PAPER),
  "335M": (15, 20, 1280, *_PAPER),
}
_ATTENTION = flags.DEFINE_list("attention", list(ATTENTION), "Attentions to time.")
_REMAT = flags.DEFINE_list("remat", list(REMAT), "Rematerialisations to time.")
_UNROLL = flags.DEFINE_list("unroll", ["1"], "Values of model.unroll to time.")
_HEAD = (
  f"{'size':<7}{'step':<14}{'attention':<10}{'remat':<6}{'unroll':<7}{'ms':>9}{'tokens/s':>11}"
  f"{'MFU':>7}{'NanoDO / this':>14}{'temporary':>12}{'hidden exchange':>16}"
)
Case = tuple[str, str, Config]  # Size, step, config.


def base_config(name: str) -> Config:
  """Makes the data-parallel config of a size."""
  if name not in SIZES:
    raise ConfigError(f"--sizes has {name!r}; choose from {', '.join(SIZES)}.")
  return bench_nanodo.config(SIZES[name])


def cases(size: str, kind: str) -> Iterator[Case]:
  """Yields the cases of diloco, not NanoDO, with all attentions of the device."""
  c = base_config(size)
  for name in _ATTENTION.value:
    chosen = changed(c, {"model.attention": name})
    try:
      attention.check(chosen.model, kind)
    except ConfigError as error:
      print(f"{size:<7}no rows with attention {name}: {error}")
      continue
    for remat, unroll in itertools.product(_REMAT.value, _UNROLL.value):
      how = {"model.remat": remat, "model.unroll": int(unroll)}
      one = changed(chosen, how | {"replicas": 2})
      yield size, "data-parallel", one
      # One inner step hides the exchange of a fragment.
      fields = {"algorithm": "streaming", "overlap.tau": 1, "overlap.taus": ()}
      two = changed(bench_nanodo.two_replicas(one), fields)
      yield size, "M=2", two


def exchange_share(bench: Bench) -> float | None:
  """Times the inner step with and without an exchange; None if nothing is exchanged."""
  c, sync, mesh = bench.c, bench.sync, bench.mesh
  if not sync.transport.moves:  # Also measured on CPUs, where no run overlaps them.
    return None
  tokens, *rest = bench.rest
  theta, layers = bench.state.outer.theta[0], sync.layers[0]
  with jax.set_mesh(mesh):
    key, codec_state = jax.random.key(0), bench.state.outer.codec_state[0]
    payload, *_ = send(
      bench.params, theta, codec_state, layers, key, wire=c.wire, mesh=mesh
    )

    def step():
      state = (np.int32(1), bench.params, bench.opt_state)
      bench.params, bench.opt_state, metrics, arrived = overlapped_exchange(
        *state, [tokens], *rest, [payload], c=c, mesh=mesh
      )
      return metrics, arrived

    alone, both = in_turn(bench.inner, lambda: timed(step))
  return (both - alone) / alone


def row(case: Case, nanodo_s: float | None) -> str:
  """Compiles and times one step; returns its line of the table."""
  c = case[-1]
  bench = Bench(c)
  seconds = in_turn(bench.inner)[0]
  temporary = bench.step.memory_analysis().temp_size_in_bytes
  cells = numbers(c, seconds, nanodo_s, temporary)
  if c.one_model:
    return label(case) + cells
  share = exchange_share(bench)
  hidden = "one device" if share is None else f"{share:+.1%}"
  return f"{label(case)}{cells}{hidden:>16}"


def label(case: Case) -> str:
  size, step, c = case
  m = c.model
  return f"{size:<7}{step:<14}{m.attention:<10}{m.remat:<6}{m.unroll:<7}"


def numbers(c: Config, seconds: float, nanodo_s: float | None, temporary: int) -> str:
  """Formats table cells of a step: ms, tokens/s, MFU, NanoDO / this, temporary."""
  rate = c.tokens_per_step / seconds
  peak = hardware.peak_flops(jax.devices()[0].device_kind)
  mfu = "-"
  if peak:
    mfu = f"{rate * flops_per_token(c.model) / (peak * jax.device_count()):.1%}"
  ratio = f"{nanodo_s / seconds:.2f}" if nanodo_s else "-"
  memory = f"{temporary / 2**20:,.0f} MiB"
  return f"{1e3 * seconds:>9.2f}{rate:>11,.0f}{mfu:>7}{ratio:>14}{memory:>12}"


def or_memory(case: Case, make: Callable[[], str]) -> str:
  """Returns a line of the table; if memory does not suffice, the line says so."""
  try:
    return make()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return f"{label(case)}  out of memory"


def nanodo_row(size: str) -> tuple[float | None, str]:
  """Times NanoDO's step; returns its seconds, and its row or the reason for no row."""
  remat = "full" if flags.FLAGS.nanodo_remat else "none"
  c = changed(base_config(size), {"model.attention": "xla", "model.remat": remat})
  case = (size, "NanoDO", c)
  try:
    step, temporary = bench_nanodo.nanodo(c, bench_nanodo.random_tokens(c))
    seconds = in_turn(functools.partial(timed, step))[0]
  except ConfigError as error:
    return None, f"{size:<7}no row and no column of NanoDO: {error}"
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return None, f"{label(case)}  out of memory"
  return seconds, label(case) + numbers(c, seconds, seconds, temporary)


def main(argv) -> None:
  del argv
  on_cpu = jax.default_backend() == "cpu"
  flags.FLAGS.set_default("dtype", "float32" if on_cpu else "bfloat16")
  kind = jax.devices()[0].device_kind
  print_devices()
  todo = {size: list(cases(size, kind)) for size in flags.FLAGS.sizes}
  print(_HEAD)
  for size, steps in todo.items():
    seconds, line = nanodo_row(size)
    print(line, flush=True)
    for case in steps:
      make = functools.partial(row, case, seconds)
      print(or_memory(case, make), flush=True)


if __name__ == "__main__":
  flags.FLAGS.set_default("sizes", ["35M", "150M", "335M"])
  command_line.run(main)
