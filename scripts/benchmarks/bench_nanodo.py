"""Times a training step beside NanoDO's, in turn, in one process; prints a table.

  git clone https://github.com/google-deepmind/nanodo /tmp/nanodo
  PYTHONPATH=/tmp/nanodo python scripts/benchmarks/bench_nanodo.py --sizes=sample,5M,35M

NanoDO's model is imported, not copied. Its loss needs grain to be imported, and is one
line of optax, which is repeated here. Both sides have the same architecture, batch,
dtype, loss and optimizer: by default without QK-LayerNorm and z-loss, which NanoDO does
not have. Memory is that of XLA's temporary buffers.
"""

import ast
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from bench_step import Bench
from timing import in_turn, timed

from diloco.algorithm import optimizers
from diloco.config import Config, changed, command_line, default_config, resolve
from diloco.errors import ConfigError


class Size(NamedTuple):
  """A model, its batch, and what makes our step fast on two CPU cores."""

  layers: int
  heads: int
  width: int
  vocabulary: int
  sequences: int
  length: int
  accumulate: int = 1
  loss_chunk: int = 0
  remat: str = "full"


SIZES = {
  "105k": Size(3, 2, 32, 2048, 4, 64, remat="none"),
  "382k": Size(5, 4, 64, 2048, 4, 64, remat="none"),
  "sample": Size(4, 2, 128, 2048, 32, 128, accumulate=4, loss_chunk=64),
  "5M": Size(6, 4, 256, 2048, 16, 256, accumulate=4, loss_chunk=128, remat="dots"),
  "35M": Size(6, 8, 512, 32_768, 4, 512, loss_chunk=128, remat="dots"),
}
_SIZES = flags.DEFINE_list("sizes", ["sample"], f"Of {', '.join(SIZES)}.")
_OURS = flags.DEFINE_multi_string(
  "ours", [], "A field of our side, for example --ours=model.remat=dots; repeatable."
)
_DTYPE = flags.DEFINE_string("dtype", "float32", "Compute dtype of both sides.")
_NANODO_REMAT = flags.DEFINE_bool("nanodo_remat", False, "NanoDO's model.remat.")

Step = Callable[[], object]


def config(size: Size) -> Config:
  """Makes our config of a size, with the optimizer that both sides use, and --ours."""
  c = default_config()
  c.algorithm, c.train.steps, c.train.batch_size = "data_parallel", 1000, size.sequences
  c.model.num_layers, c.model.num_heads = size.layers, size.heads
  c.model.dim, c.model.vocab_size = size.width, size.vocabulary
  c.model.seq_len, c.model.dtype = size.length, _DTYPE.value
  c.model.qk_norm, c.model.z_loss = False, 0.0
  c.model.remat, c.model.loss_chunk = size.remat, size.loss_chunk
  c.train.accumulate = size.accumulate
  changes = (text.partition("=") for text in _OURS.value)
  c.update_from_flattened_dict({name: literal(value) for name, _, value in changes})
  return resolve(c)


def random_tokens(c: Config) -> np.ndarray:
  """Draws the tokens of a step, int32 [B, L]."""
  shape = (c.train.batch_size, c.model.seq_len)
  rng = np.random.default_rng(0)
  return rng.integers(3, c.model.vocab_size, shape).astype(np.int32)


def literal(text: str) -> object:
  """Reads a Python literal; any other text is a string."""
  try:
    return ast.literal_eval(text)
  except (SyntaxError, ValueError):
    return text


def two_replicas(c: Config) -> Config:
  """Halves the sequences of a model, and keeps those of a microbatch."""
  accumulate = max(1, c.train.accumulate // 2)
  fields = {"algorithm": "diloco", "replicas": 2, "train.accumulate": accumulate}
  return changed(c, fields)


def nanodo(c: Config, tokens_BxL: np.ndarray) -> tuple[Step, int]:
  """Compiles NanoDO's step; returns a call of it and its temporary bytes."""
  try:
    from nanodo.model import DoConfig, TransformerDo
  except ImportError as error:
    raise ConfigError(
      f"NanoDO cannot be imported ({error}); clone it and put it on PYTHONPATH, as the"
      " first lines of scripts/benchmarks/bench_nanodo.py say."
    ) from None
  m = c.model
  model = TransformerDo(
    DoConfig(
      D=m.dim,
      H=m.num_heads,
      L=m.seq_len,
      N=m.num_layers,
      V=m.vocab_size,
      F=4 * m.dim,
      dtype=jnp.dtype(m.dtype),
      fsdp_enabled=False,
      remat=_NANODO_REMAT.value,
    )
  )
  optimizer = optimizers.make_inner(c)

  def loss(params, tokens_BxL):
    ids_BxL = jnp.pad(tokens_BxL[:, :-1], ((0, 0), (1, 0)))
    logits_BxLxV = model.apply({"params": params}, ids_BxL)
    return optax.losses.softmax_cross_entropy_with_integer_labels(
      logits_BxLxV, tokens_BxL
    ).mean()

  def step(params, opt_state, tokens_BxL):
    nll, grads = jax.value_and_grad(loss)(params, tokens_BxL)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, nll

  params = model.init(jax.random.key(0), jnp.asarray(tokens_BxL))["params"]
  held = [params, optimizer.init(params)]
  compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*held, tokens_BxL).compile()

  def call():
    *held[:], nll = compiled(*held, tokens_BxL)
    return nll

  return call, compiled.memory_analysis().temp_size_in_bytes


def main(argv) -> None:
  del argv
  device = jax.devices()[0]
  print(f"{jax.device_count()} x {device.device_kind}, jax {jax.__version__}, medians")
  print("size    step           ms  tokens/s  NanoDO's time / this  temporary MiB")
  for size in _SIZES.value:
    c = config(SIZES[size])
    tokens_BxL = random_tokens(c)
    theirs, memory = nanodo(c, tokens_BxL)
    timers, memories = [functools.partial(timed, theirs)], [memory]
    for bench in (Bench(c), Bench(two_replicas(c))):
      timers.append(bench.inner)
      memories.append(bench.step.memory_analysis().temp_size_in_bytes)
    times = in_turn(*timers)
    for name, t, memory in zip(("NanoDO", "data-parallel", "M=2"), times, memories):
      print(
        f"{size:<7} {name:<13} {1e3 * t:8.2f} {tokens_BxL.size / t:9,.0f}"
        f" {times[0] / t:20.2f} {memory / 2**20:14.1f}"
      )


if __name__ == "__main__":
  command_line.run(main)
