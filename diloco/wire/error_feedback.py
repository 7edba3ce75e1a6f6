"""Error feedback: a replica sends later what its codes lost now.

A replica keeps an error e for every value of a fragment. At a send, e becomes beta e +
delta; the replica sends the codes of e, and subtracts the decoded codes from e.
`wire.error_feedback` is beta; 0, the papers' choice, switches it off. Any compressor
works except DARE, which sends values that are too large: e would grow with every send.
The error takes as much memory as one more copy of the parameters in float32. It is
compressor state: it is sharded, saved, and restored exactly.

SparseLoCo (arXiv 2508.15706) sends the largest 1% to 3% of each chunk in 2 bits. Its
outer optimizer is SGD without momentum: the error takes the place of the momentum.
MuLoCo (arXiv 2505.23725) uses Muon as inner and Nesterov momentum as outer optimizer.

Source: the abstracts, and the code of both (tplr-ai/templar, facebookresearch/MuLoCo).
SparseLoCo's authors report a lower loss than DiLoCo with uncompressed outer gradients.
MuLoCo's report that it is better than DiLoCo with AdamW from 150M to 3.1B parameters.
`diloco.wire.bins` has their 2-bit codes.
"""

import jax.numpy as jnp
from jax import Array

from diloco.spec.fields import WireConfig
from diloco.util.types import PyTree
from diloco.wire.compressors import COMPRESSORS, Compressor


def compressor_of(wire: WireConfig) -> Compressor:
  """Returns the compressor of a config, with error feedback if the config asks.

  Then a state is the pair (state of the compressor, error).
  """
  compressor, beta = COMPRESSORS[wire.compressor], wire.error_feedback
  if not beta:
    return compressor

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
