"""Sets the modes of JAX in which this package computes."""

import contextlib
from collections.abc import Iterator

import jax

from diloco.errors import ConfigError


@contextlib.contextmanager
def plain_modes() -> Iterator[None]:
  """Sets the modes for a `with` block on this thread, or for a decorated function.

  For its own code, the user's program may set JAX_ENABLE_X64, strict promotion of
  dtypes or ranks, another generator of random numbers, a transfer guard, or
  JAX_DISABLE_JIT. In this package every dtype comes from the config or from the user's
  arrays, random numbers depend on seeds only, and a sync without jit would take
  minutes. Other modes that find errors, such as JAX_DEBUG_NANS, stay as they are.
  """
  with (
    jax.enable_x64(False),
    jax.numpy_dtype_promotion("standard"),
    jax.numpy_rank_promotion("allow"),
    jax.default_prng_impl("threefry2x32"),
    jax.threefry_partitionable(True),  # False draws other numbers from the same seed.
    jax.transfer_guard("allow"),
    jax.disable_jit(False),
  ):
    yield


@contextlib.contextmanager
def training_modes() -> Iterator[None]:
  """Sets the modes of `plain_modes` for a whole run.

  Raises:
    ConfigError: JAX_DISABLE_JIT is set, so the user expects inner steps without jit.
  """
  # Type checkers know this option with jax 0.12, but not with jax 0.10.
  if jax.config.jax_disable_jit:  # type: ignore[attr-defined, unused-ignore]
    raise ConfigError(
      "JAX_DISABLE_JIT is set, but the trainer needs jit; unset it, and print values of"
      " your own code with jax.debug.print."
    )
  with plain_modes():
    yield
