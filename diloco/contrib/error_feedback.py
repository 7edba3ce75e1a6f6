"""Error feedback: a replica adds the error of its codes to its next send.

A replica keeps an error e for every value of a fragment. At a send, it adds the outer
gradient delta: e becomes beta e + delta. Then it sends the codes of e, and subtracts
the decoded codes from e.

  wire.compressor = "error_feedback(beta=0.95, of='quantize')"

wraps another compressor. All compressors work except DARE, which enlarges the values
that it sends: e would grow with every send. The error takes as much memory as one more
copy of the parameters in float32. It is compressor state: it is sharded, saved, and
restored exactly.

SparseLoCo (arXiv 2508.15706) sends the largest 1% to 3% of each chunk in 2 bits. Its
outer optimizer is SGD without momentum: the error takes the place of the momentum.
MuLoCo (arXiv 2505.23725) uses Muon as inner and Nesterov momentum as outer optimizer.

Source: abstract and code of both papers (tplr-ai/templar, facebookresearch/MuLoCo).
SparseLoCo's authors report a lower loss than DiLoCo with uncompressed outer gradients.
MuLoCo's authors report better results than DiLoCo with AdamW, from 150M to 3.1B
parameters. The plug-in `bins` has their 2-bit codes, `chunked_topk` the chunks.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array

from diloco.config import Config
from diloco.spec import plugins, sizes
from diloco.spec.call_text import parse
from diloco.spec.fields import WireConfig
from diloco.spec.plugins import Compressor
from diloco.util.types import PyTree
from diloco.wire import compressors


def error_feedback(beta: float, of: str) -> Compressor:
  """Makes the compressor; its state is (state of the other compressor, error).

  Args:
    beta: share of the error that is sent later, above 0 and at most 1.
    of: the other compressor.

  Raises:
    ValueError: an argument cannot work.
  """
  if not isinstance(beta, int | float) or not 0 < beta <= 1:
    raise ValueError(f"beta is {beta!r}; give a number above 0 and at most 1")
  if not isinstance(of, str):
    raise ValueError(f"of is {of!r}; give a compressor, such as 'quantize'")
  if "of" in parse("wire.compressor", of)[1]:
    raise ValueError(f"of is {of!r}, which has an error of its own; choose another of")
  if sizes.coder(of) == "dare":
    raise ValueError("dare enlarges the values that it sends; choose another of")
  sizes.check(WireConfig(of, "fp32"))
  compressor = compressors.get(of)

  def init(x: Array) -> tuple[PyTree, Array]:
    return compressor.init(x), jnp.zeros_like(x)

  def encode(
    wire: WireConfig, x_NxS: Array, state: PyTree, row: int, key: Array
  ) -> tuple[Array, PyTree]:
    state, error_NxS = state
    error_NxS = beta * error_NxS + x_NxS
    code, state = compressor.encode(wire, error_NxS, state, row, key)
    n, s = x_NxS.shape
    sent_NxS = compressor.decode(wire, code, n, s, row)
    return code, (state, error_NxS - sent_NxS)

  return compressor._replace(init=init, encode=encode)


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(plugins.Extension):
  """Error feedback has no fields of its own; wire.compressor chooses it."""

  def effects(self, c: Config) -> dict[str, tuple[bool, str]]:
    name, arguments = parse("wire.compressor", c.wire.compressor)
    quantizes = name == "error_feedback" and sizes.coder(arguments["of"]) == "quantize"
    lossless = quantizes and c.wire.format == "fp32"
    return {
      "wire.compressor": (lossless, "wire.format is fp32: no code loses anything")
    }


plugins.register("wire.compressor", "error_feedback", error_feedback)
plugins.register("fields", "error_feedback", ErrorFeedback)
