"""Runs in a process of its own with 8 forced host devices; prints JSON.

Trains the same few steps on several layouts of the mesh and reads the collectives of
the compiled programs.
"""

import functools
import hashlib
import json
import sys

import conftest
import jax
import jax.numpy as jnp
import numpy as np

from diloco import config as config_lib
from diloco.algorithm import inner, outer, state, sync
from diloco.aot import hlo
from diloco.aot.programs import Programs
from diloco.model import sharding as mesh_lib
from diloco.run import mesh as run_mesh
from diloco.wire import exchange, ledger
from diloco.wire import payload as payload_lib

STEPS = 6


def make_config(**fields):
  c = conftest.tiny_config()
  c.model.dim, c.model.num_heads, c.model.vocab_size = 32, 2, 64
  c.train.batch_size, c.sync_every, c.overlap.tau = 16, 3, 1
  c.wire.block_size, c.eval.batch_size = 8, 8
  c.update_from_flattened_dict(fields)
  return config_lib.resolve(c)


def losses(devices: int, **fields) -> list[list[float]]:
  """Loss of each replica at each step, on random tokens."""
  c = make_config(**fields)
  mesh = run_mesh.make_mesh(c, jax.devices()[:devices])
  found = []
  with jax.set_mesh(mesh):
    optimizer = inner.make_optimizer(c)
    step, plan = inner.make_inner_step(c), outer.make_outer(c, mesh)
    s = state.init_state(c, mesh, optimizer, plan)
    params, opt_state, outer_state = s.params, s.opt_state, s.outer
    for t in range(1, STEPS + 1):
      shape = (c.replicas, c.train.batch_size // c.replicas, c.model.seq_len)
      tokens = np.random.default_rng(t).integers(0, 64, shape).astype(np.int32)
      tokens = jax.device_put(tokens, mesh_lib.batch_sharding(mesh))
      params, opt_state, metrics = step(params, opt_state, tokens, None)
      params, outer_state, _ = sync.outer_step(plan, t, params, outer_state)
      found.append(np.asarray(metrics.loss).tolist())
  return found


def bits(transport: str) -> dict:
  """A streaming run on 2 devices, as training does it: losses, digests of the end."""
  fields = {"sync_every": 6, "overlap.tau": 2, "fragments.size": 3, "mesh.fsdp": 1}
  c = make_config(**fields, **{"overlap.transport": transport})
  mesh = run_mesh.make_mesh(c, jax.devices()[:2])
  found, hidden, t, last = [], 0, 0, 13
  with jax.set_mesh(mesh):
    optimizer = inner.make_optimizer(c)
    step, plan = inner.make_inner_step(c), outer.make_outer(c, mesh)
    beside = sync.make_hidden_exchange(step, mesh)
    longest = plan.schedule.longest_hiding()
    s = state.init_state(c, mesh, optimizer, plan)
    params, opt_state, outer_state = s.params, s.opt_state, s.outer
    while t < last:
      hiding = plan.schedule.hiding_steps(t) if plan.transport.hides() else 0
      tokens = []
      for k in range(max(min(hiding, last - t), 1)):
        shape = (c.replicas, c.train.batch_size // c.replicas, c.model.seq_len)
        drawn = np.random.default_rng(t + k).integers(0, 64, shape).astype(np.int32)
        tokens.append(jax.device_put(drawn, mesh_lib.batch_sharding(mesh)))
      if hiding:
        # Those of one program for stretches of any length; the last one is shorter.
        padded = tokens + (longest - len(tokens)) * tokens[:1]
        program = functools.partial(
          beside, np.int32(len(tokens)), params, opt_state, padded, None
        )
        params, opt_state, metrics, outer_state = sync.hide_exchange(
          plan, t, outer_state, program
        )
        hidden += 1
      else:
        params, opt_state, of_step = step(params, opt_state, *tokens, None)
        metrics = [of_step]
      t += len(tokens)
      params, outer_state, _ = sync.outer_step(plan, t, params, outer_state)
      found += [np.asarray(m.loss).tolist() for m in metrics[: len(tokens)]]
    params, outer_state, _ = sync.drain(plan, t, params, outer_state)
  ends = {
    "params": params,
    "theta": outer_state.theta,
    "momentum": outer_state.opt_state,
  }
  return {"losses": found, "hidden": hidden} | {n: digest(x) for n, x in ends.items()}


def digest(tree) -> str:
  leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
  return hashlib.sha256(b"".join(x.tobytes() for x in leaves)).hexdigest()


def traffic(devices: int, **fields) -> dict:
  """Collectives across replicas of the inner step, a send and an update."""
  c = make_config(**fields)
  mesh = run_mesh.make_mesh(c, jax.devices()[:devices])
  with jax.set_mesh(mesh):
    optimizer = inner.make_optimizer(c)
    step, plan = inner.make_inner_step(c), outer.make_outer(c, mesh)
    s = state.init_state(c, mesh, optimizer, plan)
    shape = (c.replicas, c.train.batch_size // c.replicas, c.model.seq_len)
    tokens = jax.device_put(jnp.zeros(shape, jnp.int32), mesh_lib.batch_sharding(mesh))
    key = jax.random.key(0)
    theta, layers = s.outer.theta[0], plan.layers[0]
    payload = sync.payload_struct(plan, 0, s.params, s.outer.theta[0])
    _, event = sync.send_fragment(plan, 1, 0, s.params, s.outer)
    sent = jax.ShapeDtypeStruct(
      payload.shape, payload.dtype, sharding=plan.transport.transmitted
    )
    hidden = sync.make_hidden_exchange(step, mesh)
    several = [tokens] * 3
    programs = {
      "inner": step.lower(s.params, s.opt_state, tokens, None),
      "send": plan.send.lower(s.params, theta, layers, key),
      "hidden": hidden.lower(3, s.params, s.opt_state, several, None, [payload]),
      "transmit": plan.transport.transmit.lower(payload),
      "update": plan.transport.update.lower(theta, s.outer.opt_state[0], sent),
      "merge": plan.merge.lower(s.params, theta, layers, np.ones(c.replicas, bool)),
    }
    texts = {name: p.compile().as_text() for name, p in programs.items()}
  crossing = {
    name: [[x.kind, x.dtype, x.nbytes] for x in hlo.across_replicas(text, mesh)]
    for name, text in texts.items()
  }
  crossing["bytes"] = {n: hlo.replica_bytes(text, mesh) for n, text in texts.items()}
  books = ledger.Ledger(c.replicas, c.wire.exchange)
  crossing["booked"] = books.record(0, 1, event.payload_bytes)
  crossing["payload_shape"] = list(payload.shape)
  return crossing


def whole_models() -> dict:
  """Bytes on one device while one replica's model is put together, over a shard's."""
  c = make_config(**{"mesh.replica": 2, "mesh.fsdp": 4})
  mesh = run_mesh.make_mesh(c)
  device = jax.devices()[0]
  like = state.abstract_params(c)
  shard = sum(4 * x.size for x in jax.tree.leaves(like)) / 4
  on_device = lambda arrays: sum(
    s.data.nbytes for x in arrays for s in x.addressable_shards if s.device == device
  )
  found = {}
  with jax.set_mesh(mesh):
    plan = outer.make_outer(c, mesh)
    s = state.init_state(c, mesh, inner.make_optimizer(c), plan)
    old = {id(x): x for x in jax.live_arrays()}
    most = []

    def thetas():
      for theta in s.outer.theta:
        most.append(on_device(x for x in jax.live_arrays() if id(x) not in old))
        yield theta

    joined = outer.join(thetas(), plan.layers, like, mesh)
    found["joining"] = max(most) / shard
    same = jax.tree.map(lambda a, b: bool((a == b[0]).all()), joined, s.params)
    found["same"] = all(jax.tree.leaves(same))
    results = {
      "joined": joined,
      "mean": state.replica_mean(s.params, mesh),
      "first": state.first_replica(s.params, mesh),
    }
    for name, tree in results.items():
      found[name] = on_device(jax.tree.leaves(tree)) / shard
    for name in ("mean", "first"):
      out = mesh_lib.shardings(like, mesh)
      program = jax.jit(getattr(state, f"_{name}"), out_shardings=out).lower(s.params)
      memory = program.compile().memory_analysis()
      found[f"{name} temporaries"] = memory.temp_size_in_bytes / shard
  return found


def data_parallel(devices: int, **fields) -> dict:
  """Losses, and the bytes of collectives across copies of the one model."""
  c = make_config(algorithm="data_parallel", **fields)
  mesh = run_mesh.make_mesh(c, jax.devices()[:devices])
  found = []
  with jax.set_mesh(mesh):
    optimizer = inner.make_optimizer(c)
    s = state.init_state(c, mesh, optimizer, None)
    params, opt_state = s.params, s.opt_state
    step = inner.make_inner_step(c)
    for t in range(1, STEPS + 1):
      shape = (1, c.train.batch_size, c.model.seq_len)
      tokens = np.random.default_rng(t).integers(0, 64, shape).astype(np.int32)
      tokens = jax.device_put(tokens, mesh_lib.batch_sharding(mesh, data_parallel=True))
      if t == 1:
        hlo_text = step.lower(params, opt_state, tokens, None).compile().as_text()
      params, opt_state, metrics = step(params, opt_state, tokens, None)
      found.append(np.asarray(metrics.loss).tolist())
  crossing = hlo.across_replicas(hlo_text, mesh)
  return {
    "losses": found,
    "kinds": sorted({x.kind for x in crossing}),
    "bytes": sum(x.nbytes for x in crossing),
    "gradient": 4 * config_lib.num_params(c),
    "dry_run": Programs(c, mesh).compile("inner step").crossing,
  }


def shards(compressor: str, rounding: str) -> dict[str, bool]:
  """What two fsdp shards with the same values send, for two replicas."""
  fields = {"wire.compressor": compressor, "wire.rounding": rounding}
  c = make_config(**{"mesh.replica": 1, **fields})
  codec = payload_lib.make_codec_from_config(c)
  mesh = run_mesh.make_mesh(c, jax.devices()[:2])
  values = np.random.default_rng(0).standard_normal((2, 3, 32, 8)).astype(np.float32)
  # 45 values are not divided: both devices hold all of them.
  whole = values.reshape(2, 3, -1)[:, :, :45]
  delta_M = {"blocks": {"twice": np.concatenate([values] * 2, axis=2), "odd": whole}}
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), delta_M)
  keys_M = jax.random.split(jax.random.key(1), 2)
  with jax.set_mesh(mesh):
    sent = jax.jit(lambda x: exchange.encode(codec, mesh, x, keys_M))(delta_M)
    found = jax.jit(lambda x: exchange.decode_all(codec, mesh, x, like))(sent)
  alone = run_mesh.make_mesh(make_config(), jax.devices()[:1])
  with jax.set_mesh(alone):
    moved = jnp.asarray(np.asarray(sent))
    foreign = jax.jit(lambda x: exchange.decode_all(codec, alone, x, like))(moved)
  same = lambda x, y: bool((np.asarray(x) == np.asarray(y)).all())
  first, second = np.split(np.asarray(found["blocks"]["twice"]), 2, axis=2)
  one, other = [shard.data for shard in found["blocks"]["odd"].addressable_shards]
  return {
    "halves_agree": same(first, second),
    "some_arrive": bool(first.any() and second.any()),
    "whole_leaves_agree": same(one, other),
    "foreign_agrees": all(jax.tree.leaves(jax.tree.map(same, found, foreign))),
  }


def main() -> None:
  layouts = {
    "1": (1, {}),
    "2": (2, {}),
    "4": (4, {}),
    "8": (8, {}),
    "host": (8, {"overlap.transport": "host"}),
    "fsdp": (4, {"mesh.replica": 1, "mesh.fsdp": 4}),
    "two_on_each": (2, {"replicas": 4, "mesh.replica": 2}),
    "four_on_one": (1, {"replicas": 4}),
  }
  result = {
    "data_parallel": {
      "1": data_parallel(1),
      "2": data_parallel(2),
      "8": data_parallel(8),
      "accumulated": data_parallel(2, **{"train.accumulate": 2}),
      "16 bits": data_parallel(2, **{"inner.gradient_dtype": "bfloat16"}),
    },
    "whole_models": whole_models(),
    "losses": {name: losses(n, **fields) for name, (n, fields) in layouts.items()},
    "bits": {transport: bits(transport) for transport in ("device", "host")},
    "shards": {
      f"{compressor}, {rounding}": shards(compressor, rounding)
      for compressor in ("quantize", "random")
      for rounding in ("nearest", "stochastic")
    },
    "traffic": {
      "2": traffic(2),
      "8": traffic(8),
      "chunked": traffic(8, **{"model.loss_chunk": 4}),
      "psum": traffic(2, **{"wire.exchange": "psum"}),
      "psum_8": traffic(8, **{"wire.exchange": "psum"}),
      "psum_of_4": traffic(4, **{"wire.exchange": "psum", "replicas": 4}),
    },
  }
  json.dump(result, sys.stdout)


if __name__ == "__main__":
  main()
