"""Runs in a process of its own with 4 forced CPU devices; prints JSON.

Two replicas of a site send two payloads of a fragment, on several layouts of the mesh.
Arguments, in JSON: pairs of layouts, before and after a checkpoint; fields of configs.
"""

import dataclasses
import hashlib
import json
import pathlib
import sys
import tempfile

import jax
import numpy as np
from conftest import tiny_config, update

from diloco.algorithm.method import make_method
from diloco.checkpoint.checkpoints import Checkpoints
from diloco.checkpoint.record import Record
from diloco.config import changed, resolve
from diloco.contrib.sites import outer_state, unsharded
from diloco.contrib.sites.calendar import config_of
from diloco.mesh.devices import make_mesh


def make_site(layout: tuple[int, int], fields: dict):
  """Returns the first site's config and its method on a mesh [replica, fsdp]."""
  c = tiny_config()
  c.replicas, c.train.batch_size, c.eval.batch_size = 4, 32, 4
  c.model.dim, c.model.num_heads, c.overlap.transport = 32, 2, "sites"
  # Blocks cross the borders of shards, and other tensors have odd sizes.
  c.wire.block_size, c.model.seq_len, c.model.vocab_size = 96, 18, 2050
  update(c, {"sites.count": 2, **fields})
  own = config_of(resolve(c), 0)
  own = changed(own, dict(zip(("mesh.replica", "mesh.fsdp"), layout)))
  mesh = make_mesh(own, jax.devices()[: layout[0] * layout[1]])
  return own, make_method(own, mesh)


def step(state, t: int):
  """Changes the parameters as training might."""
  rng = np.random.default_rng(t)
  draw = lambda x: (
    x + jax.device_put(rng.normal(size=x.shape).astype(x.dtype) * 0.01, x.sharding)
  )
  return dataclasses.replace(state, params=jax.tree.map(draw, state.params))


def send(method, state, t: int, p: int):
  """Returns the state after a send, the digest of the payload, and its shape."""
  outer = state.outer
  arrays = (state.params, outer.theta[p], outer.codec_state[p])
  payload, codec_state, metrics = unsharded.send(method.sync, t, p, *arrays, 2)
  assert np.isfinite(metrics["outer_grad_norm"]).all()
  for new, old in zip(*map(jax.tree.leaves, (codec_state, outer.codec_state[p]))):
    assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
  outer = outer.with_codec_state(p, codec_state)
  state = dataclasses.replace(state, outer=outer)
  return state, hashlib.sha256(np.asarray(payload).tobytes()).hexdigest(), payload.shape


def payloads(before, after, fields: dict) -> list:
  """The payloads of steps 7 and 11; a checkpoint moves to another layout between."""
  c, method = make_site(before, fields)
  p = len(method.sync.fragments) - 1  # With the embedding.
  with jax.set_mesh(method.sync.mesh):
    state, *one = send(method, step(method.init(), 7), 7, p)
    assert method.sync.schedule.in_flight(7)  # Checkpoints need no payload.
    outer = outer_state.digests(state.outer)
    with tempfile.TemporaryDirectory() as folder:
      checkpoints = Checkpoints(pathlib.Path(folder), c, method)
      checkpoints.save(7, state, Record(c.to_dict(), fsdp=before[1]))
      checkpoints.close()
      c, method = make_site(after, fields)
      with jax.set_mesh(method.sync.mesh):
        checkpoints = Checkpoints(pathlib.Path(folder), c, method)
        state = checkpoints.restore().arrays
        checkpoints.close()
        assert outer_state.digests(state.outer) == outer
        assert state.outer.in_flight == {}
        _, *two = send(method, step(state, 11), 11, p)
  return [*one, *two]


if __name__ == "__main__":
  moves, *cases = map(json.loads, sys.argv[1:])
  print(json.dumps([[payloads(*move, case) for move in moves] for case in cases]))
