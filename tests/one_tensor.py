"""Compressors on one tensor as compiled programs; op by op they take far longer."""

import functools

import jax

from diloco.wire import compressors


@functools.partial(jax.jit, static_argnums=(0, 3))
def encode(wire, x_NxS, state, row, key):
  return compressors.get(wire.compressor).encode(wire, x_NxS, state, row, key)


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4))
def decode(wire, payload, n, s, row):
  return compressors.get(wire.compressor).decode(wire, payload, n, s, row)
