"""Compressors on one tensor as compiled programs; op by op they take far longer."""

import functools

import jax

from diloco.wire.compressors import COMPRESSORS


@functools.partial(jax.jit, static_argnums=(0, 3))
def encode(wire, x_NxS, state, row, key):
  return COMPRESSORS[wire.compressor].encode(wire, x_NxS, state, row, key)


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4))
def decode(wire, payload, n, s, row):
  return COMPRESSORS[wire.compressor].decode(wire, payload, n, s, row)
