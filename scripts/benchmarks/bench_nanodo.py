"""Times a training step beside NanoDO's, in turn, in one process; prints a table.

  git clone https://github.com/google-deepmind/nanodo /tmp/nanodo
  PYTHONPATH=/tmp/nanodo python scripts/benchmarks/bench_nanodo.py --sizes=1M,5M,35M

NanoDO's model is imported, not copied. Its loss is one line of optax. This file repeats
that line, because an import of NanoDO's loss needs grain. Both sides have the same
architecture, batch, dtype, loss and optimizer: by default without QK-LayerNorm and
z-loss, which NanoDO does not have. The memory is the size of XLA's temporary buffers.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from bench_step import Bench
from ml_collections import config_flags
from timing import in_turn, print_devices, timed

from diloco.algorithm import optimizers
from diloco.config import Config, changed, command_line, default_config, resolve
from diloco.errors import ConfigError

# Fields of a model, of its batch, and of what makes our step fast on two CPU cores.
SIZE = (
  *("model.num_layers", "model.num_heads", "model.dim", "model.vocab_size"),
  *("train.batch_size", "model.seq_len"),
  *("train.accumulate", "model.loss_chunk", "model.remat"),
)
SIZES = {
  "105k": (3, 2, 32, 2048, 4, 64, 1, 0, "none"),
  "382k": (5, 4, 64, 2048, 4, 64, 1, 0, "none"),
  "1M": (4, 2, 128, 2048, 32, 128, 4, 64, "full"),
  "5M": (6, 4, 256, 2048, 16, 256, 4, 128, "dots"),
  "35M": (6, 8, 512, 32_768, 4, 512, 1, 128, "dots"),
}
_SIZES = flags.DEFINE_list("sizes", ["1M"], f"Of {', '.join(SIZES)}.")
config_flags.DEFINE_config_dict(
  "ours", default_config(), "Fields of our side, for example --ours.model.remat=dots."
)
_DTYPE = flags.DEFINE_string("dtype", "float32", "Compute dtype of both sides.")
_NANODO_REMAT = flags.DEFINE_bool("nanodo_remat", False, "NanoDO's model.remat.")

Step = Callable[[], object]


def config(size: tuple) -> Config:
  """Makes our config of a size, with the optimizer that both sides use, and --ours."""
  c = default_config()
  c.algorithm, c.train.steps, c.model.dtype = "data_parallel", 1000, _DTYPE.value
  c.model.qk_norm, c.model.z_loss = False, 0.0
  ours = config_flags.get_override_values(flags.FLAGS["ours"])
  c.update_from_flattened_dict(dict(zip(SIZE, size)) | ours)
  return resolve(c)


def random_tokens(c: Config) -> np.ndarray:
  """Draws the tokens of a step, int32 [B, L]."""
  shape = (c.train.batch_size, c.model.seq_len)
  rng = np.random.default_rng(0)
  return rng.integers(3, c.model.vocab_size, shape).astype(np.int32)


def two_replicas(c: Config) -> Config:
  """Makes a config of two replicas; each has half of the sequences and microbatches."""
  accumulate = max(1, c.train.accumulate // 2)
  fields = {"algorithm": "diloco", "replicas": 2, "train.accumulate": accumulate}
  return changed(c, fields)


def nanodo(c: Config, tokens_BxL: np.ndarray) -> tuple[Step, int]:
  """Compiles NanoDO's step; returns a function to run it, and its temporary bytes."""
  try:
    from nanodo.model import DoConfig, TransformerDo
  except ImportError as error:
    raise ConfigError(
      f"NanoDO cannot be imported ({error}); clone it and put it on PYTHONPATH, as the"
      " first lines of scripts/benchmarks/bench_nanodo.py say."
    ) from None
  m = c.model
  sizes = {"D": m.dim, "H": m.num_heads, "L": m.seq_len, "N": m.num_layers}
  sizes |= {"V": m.vocab_size, "F": 4 * m.dim}
  how = {"dtype": jnp.dtype(m.dtype), "remat": _NANODO_REMAT.value}
  model = TransformerDo(DoConfig(**sizes, **how, fsdp_enabled=False))
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
  print_devices()
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
