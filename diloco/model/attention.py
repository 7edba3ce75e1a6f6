"""Computes causal self-attention by a kernel that suits the device of the program.

xla     `jax.nn.dot_product_attention`; keeps all scores, so memory grows with L^2
splash  Pallas kernel for TPUs; keeps no scores, skips the blocks above the diagonal
cudnn   flash attention of cuDNN for NVIDIA GPUs; keeps no scores

All three kernels compute the softmax in float32. With bfloat16 inputs, xla and cudnn
round the softmax's weights to bfloat16 before the product with the values; splash does
not. Splash, and xla on CPUs, scale the queries in their own dtype. Cudnn, and xla on
other devices, scale the scores in float32.

Letters: B sequences, L positions, H heads of queries, G heads of keys and values, K
head size. Query head h reads head h // (H / G) of the keys and values.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from diloco.errors import ConfigError
from diloco.mesh import sharding
from diloco.spec.fields import ModelConfig
from diloco.util.command import one_line

# {kernel: prefix of the device kinds that can run the kernel}, and {kernel: prefixes of
# the device kinds for which `auto` chooses the kernel}.
_KINDS = {"splash": "TPU", "cudnn": "NVIDIA"}
_AUTO = {"splash": ("TPU",), "cudnn": ("NVIDIA A100", "NVIDIA H100", "NVIDIA H200")}
# Block sizes of splash, in positions: multiples of the 128 lanes of a TPU.
_BLOCKS = (512, 256, 128)


def attend(
  m: ModelConfig,
  q_BxLxHxK: jax.Array,
  k_BxLxGxK: jax.Array,
  v_BxLxGxK: jax.Array,
  segment_BxL: jax.Array | None,
  batch_axes: tuple[str, ...] = (),
) -> jax.Array:
  """Computes causal self-attention; scores are divided by sqrt(K).

  Args:
    m: the architecture; `model.attention` chooses the kernel, see `choose`.
    q_BxLxHxK: queries, in m.dtype.
    k_BxLxGxK: keys.
    v_BxLxGxK: values.
    segment_BxL: int32 index of each position's document; a position sees its own
      document only. None: a position sees all earlier positions.
    batch_axes: mesh axes that shard B.

  Returns:
    (B, L, H, K) in the dtype of the values.
  """
  mesh = jax.sharding.get_abstract_mesh()
  # The mesh knows the devices that the program is compiled for, even in a dry run.
  device = mesh.abstract_device or jax.devices()[0]
  name = choose(m, device.device_kind, q_BxLxHxK.shape[1])
  # Repeats grouped heads: the kernels take one key-value head per query head.
  copies = q_BxLxHxK.shape[2] // k_BxLxGxK.shape[2]
  repeated = lambda x: jnp.repeat(x, copies, axis=2) if copies > 1 else x
  args = (q_BxLxHxK, repeated(k_BxLxGxK), repeated(v_BxLxGxK), segment_BxL)
  if name == "xla":
    return _xla_for_cpu(*args) if device.platform == "cpu" else _of_jax(*args)
  # In tests, a CPU interprets the TPU's kernel.
  on_tpu = functools.partial(_splash, interpret=device.platform == "cpu")
  kernel = on_tpu if name == "splash" else _cudnn
  if mesh.empty:
    return kernel(*args)
  # XLA cannot partition a kernel, so each device runs the kernel on its own shard.
  spec = P(batch_axes)
  return sharding.on_each_device(kernel, spec, spec)(*args)


def choose(m: ModelConfig, kind: str, length: int | None = None) -> str:
  """Returns the kernel that `model.attention` chooses on a kind of device.

  Args:
    m: the architecture.
    kind: as in `jax.Device.device_kind`.
    length: positions of a sequence; None: seq_len. Sequences of tasks can be
      shorter; xla computes them if their length does not suit the kernel.
  """
  length = length or m.seq_len
  if m.attention != "auto":
    return "xla" if _length_obstacle(m.attention, length) else m.attention
  for name, kinds in _AUTO.items():
    if kind.startswith(kinds) and not _obstacle(m, name, length):
      return name
  return "xla"


def check(m: ModelConfig, kind: str) -> None:
  """Refuses a `model.attention` that cannot work on a kind of device.

  Raises:
    ConfigError: the attention cannot work here; the message says why.
  """
  name = m.attention
  reason = _obstacle(m, name, m.seq_len)
  if not kind.startswith(_KINDS.get(name, "")):
    reason = f"needs devices of kind {_KINDS[name]}, and these are {kind}"
  if reason:
    raise ConfigError(f"model.attention is {name}, which {reason}; choose auto or xla.")


def _obstacle(m: ModelConfig, name: str, length: int) -> str:
  """Returns why a kernel cannot compute sequences of this length; "" if it can."""
  if name != "cudnn":
    return _length_obstacle(name, length)
  if m.dtype != "bfloat16":
    return f"needs model.dtype=bfloat16, and model.dtype is {m.dtype}"
  if m.segment_masks:
    # The vmap rule of cuDNN fails with one mask for all heads. Such a mask also has L^2
    # values, so it would need much memory.
    return "cannot mask documents, and model.segment_masks is true"
  one = jax.ShapeDtypeStruct((1, length, m.num_heads, m.head_size), m.dtype)
  try:
    jax.eval_shape(_cudnn, one, one, one, None)
  except (NotImplementedError, RuntimeError, ValueError) as error:
    return f"JAX refuses here ({one_line(error).rstrip('.')})"
  return ""


def _length_obstacle(name: str, length: int) -> str:
  if name == "splash" and length % _BLOCKS[-1]:
    return f"needs a multiple of {_BLOCKS[-1]} positions, and model.seq_len is {length}"
  return ""


def _of_jax(
  q_BxLxHxK: jax.Array,
  k_BxLxHxK: jax.Array,
  v_BxLxHxK: jax.Array,
  segment_BxL: jax.Array | None,
  implementation: Literal["cudnn"] | None = None,
) -> jax.Array:
  args = (q_BxLxHxK, k_BxLxHxK, v_BxLxHxK)
  mask = None if segment_BxL is None else _same_segment(segment_BxL)
  return jax.nn.dot_product_attention(
    *args, mask=mask, is_causal=True, implementation=implementation
  )


_cudnn = functools.partial(_of_jax, implementation="cudnn")


def _xla_for_cpu(
  q_BxLxHxK: jax.Array,
  k_BxLxHxK: jax.Array,
  v_BxLxHxK: jax.Array,
  segment_BxL: jax.Array | None,
) -> jax.Array:
  """Computes the same as `_of_jax`, in a form that XLA for CPU compiles to fast code.

  The axis of heads comes first, and the queries are scaled instead of the scores.
  """
  heads_first = (x.swapaxes(1, 2) for x in (q_BxLxHxK, k_BxLxHxK, v_BxLxHxK))
  q_BxHxLxK, k_BxHxLxK, v_BxHxLxK = heads_first
  _, _, length, size = q_BxHxLxK.shape
  scores_BxHxLxL = jnp.einsum(
    "bhqk,bhsk->bhqs",
    q_BxHxLxK * size**-0.5,
    k_BxHxLxK,
    preferred_element_type=jnp.float32,
  )
  visible = jnp.tril(jnp.ones((length, length), bool))
  if segment_BxL is not None:
    visible &= _same_segment(segment_BxL)
  lowest = jnp.finfo(jnp.float32).min
  weights_BxHxLxL = jax.nn.softmax(jnp.where(visible, scores_BxHxLxL, lowest))
  return (weights_BxHxLxL.astype(v_BxHxLxK.dtype) @ v_BxHxLxK).swapaxes(1, 2)


def _same_segment(segment_BxL: jax.Array) -> jax.Array:
  """Returns bool (B, 1, L, L): whether two positions are in the same document."""
  return segment_BxL[:, None, :, None] == segment_BxL[:, None, None, :]


def _splash(
  q_BxLxHxK: jax.Array,
  k_BxLxHxK: jax.Array,
  v_BxLxHxK: jax.Array,
  segment_BxL: jax.Array | None,
  interpret: bool,
) -> jax.Array:
  # Imported here, because the import takes 0.3 s.
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  _, length, heads, size = q_BxLxHxK.shape
  block = next(b for b in _BLOCKS if length % b == 0)
  kernel = splash.make_splash_mha_single_device(
    splash.MultiHeadMask([splash.CausalMask((length, length))] * heads),
    block_sizes=splash.BlockSizes(
      block_q=block,
      block_kv=block,
      block_q_dkv=block,
      block_kv_dkv=block,
      block_q_dq=block,
      block_kv_dq=block,
    ),
    interpret=interpret,
  )
  q_BxLxHxK *= size**-0.5
  segments = None
  if segment_BxL is not None:
    segments = splash.SegmentIds(segment_BxL, segment_BxL)
  heads_first = (x.swapaxes(1, 2) for x in (q_BxLxHxK, k_BxLxHxK, v_BxLxHxK))
  return jax.vmap(kernel)(*heads_first, segments).swapaxes(1, 2)
