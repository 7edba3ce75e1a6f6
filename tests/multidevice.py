"""Runs in a process of its own with 8 forced host devices; prints JSON.

Trains the same few steps on several layouts of the mesh, and reads the collectives of
the compiled programs. Arguments: parts to run, whole or with names: losses=1,8.
"""

import contextlib
import functools
import hashlib
import json
import sys

import conftest
import drjax
import jax
import jax.numpy as jnp
import numpy as np
import numpy_attention
import plugins  # noqa: F401  Registers `feedback`.

import diloco
from diloco.algorithm import optimizers, slices
from diloco.algorithm.inner import inner_step
from diloco.algorithm.method import Method, overlapped_exchange
from diloco.algorithm.outer import merge, outer_step, send, update
from diloco.algorithm.state import TrainState, first_replica, replica_mean
from diloco.algorithm.streaming import make_streaming
from diloco.aot import hlo
from diloco.aot.programs import Programs
from diloco.config import Config, resolve
from diloco.contrib import sparta
from diloco.contrib.diagnostics import measure
from diloco.contrib.diagnostics.outer_step import losses as losses_of
from diloco.mesh import sharding
from diloco.mesh.devices import make_mesh
from diloco.model import attention
from diloco.spec import shapes
from diloco.spec.fields import ModelConfig
from diloco.wire import exchange, transport
from diloco.wire.transport import transmit

STEPS = 6
transport.OVERLAPPING = {"cpu"}  # These programs are those of accelerators.


def make_config(**fields) -> Config:
  c = conftest.tiny_config()
  c.model.dim, c.model.num_heads, c.model.vocab_size = 32, 2, 64
  c.train.batch_size, c.sync_every, c.overlap.tau = 16, 3, 1
  c.wire.block_size, c.eval.batch_size = 8, 8
  conftest.update(c, fields)
  return resolve(c)


@contextlib.contextmanager
def begun(c: Config, devices: int):
  """Makes a run on some devices: its method, its sync and its first state."""
  mesh = make_mesh(c, jax.devices()[:devices])
  with jax.set_mesh(mesh):
    method = Method(c, make_streaming(c, mesh))
    yield method, method.sync, method.init()


def tokens_of(c: Config, mesh, t: int) -> jax.Array:
  """Random tokens of step t."""
  shape = (c.models, c.train.batch_size // c.models, c.model.seq_len)
  tokens = np.random.default_rng(t).integers(0, 64, shape).astype(np.int32)
  return jax.device_put(tokens, sharding.batch_sharding(mesh, c.one_model))


def losses(devices: int, **fields) -> list[list[float]]:
  """Loss of each replica at each step, on random tokens."""
  c = make_config(**fields)
  found, tuned = [], optimizers.tuned(c)
  with begun(c, devices) as (_, sync, s):
    params, opt_state, outer = s.params, s.opt_state, s.outer
    for t in range(1, STEPS + 1):
      tokens = tokens_of(c, sync.mesh, t)
      params, opt_state, metrics = inner_step(
        params, opt_state, tokens, tuned, c=c, averaged=t <= c.joint_steps
      )
      params, outer, _ = outer_step(sync, t, params, outer)
      found.append(np.asarray(metrics.loss).tolist())
  return found


def bits(kind: str, overlapping: frozenset[str] = frozenset({"cpu"})) -> dict:
  """Trains on 2 devices as diloco.train does; losses, and digests of the end."""
  fields = {"sync_every": 6, "overlap.tau": 2, "fragments.size": 3, "mesh.fsdp": 1}
  c = make_config(**fields, **{"overlap.transport": kind})
  transport.OVERLAPPING = overlapping
  found, hidden, late, last = [], 0, 0, 13
  with begun(c, 2) as (method, sync, s):
    arrived = exchange.transmitted(sync.mesh)
    for steps in conftest.spans(method, 0, last, (c.eval.every,)):
      overlaps = sync.overlap_steps(steps[0] - 1) > 0
      tokens = [tokens_of(c, sync.mesh, t) for t in steps]
      s, metrics = method.inner(steps, s, tokens)
      hidden += overlaps
      for p in sync.schedule.sends(steps[0] - 1) if overlaps else []:
        there = s.outer.in_flight[p].payload.sharding.is_equivalent_to(arrived, 3)
        late += not there  # This exchange would hide behind no inner step.
      params, outer, _ = outer_step(sync, steps[-1], s.params, s.outer)
      s = TrainState(params, s.opt_state, outer)
      found += [np.asarray(m.loss).tolist() for m in metrics]
    params, outer, _ = sync.drain(last, s.params, s.outer)
  ends = {"params": params, "theta": outer.theta, "momentum": outer.opt_state}
  counts = {"hidden": hidden, "late": late}
  return {"losses": found} | counts | {n: digest(x) for n, x in ends.items()}


def digest(tree) -> str:
  leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
  return hashlib.sha256(b"".join(x.tobytes() for x in leaves)).hexdigest()


def traffic(devices: int, **fields) -> dict:
  """Collectives across replicas in every program of a round."""
  c = make_config(**fields)
  with begun(c, devices) as (_, sync, s):
    mesh = sync.mesh
    tokens, tuned = tokens_of(c, mesh, 0), optimizers.tuned(c)
    theta, layers = s.outer.theta[0], sync.layers[0]
    args = (s.params, theta, s.outer.codec_state[0], layers, jax.random.key(0))
    payload = sync.payload(0)
    place = exchange.transmitted(mesh) if sync.transport.overlaps else payload.sharding
    sent = jax.ShapeDtypeStruct(payload.shape, payload.dtype, sharding=place)
    wire, opt_state = {"wire": c.wire, "mesh": mesh}, s.outer.opt_state[0]
    everyone = np.ones(c.replicas, bool)
    programs = {
      "inner": inner_step.lower(s.params, s.opt_state, tokens, tuned, c=c),
      "send": send.lower(*args, **wire),
      "update": update.lower(theta, opt_state, sent, sync.tuned, outer=c.outer, **wire),
      "merge": merge.lower(s.params, theta, layers, everyone, alpha=sync.alpha),
    }
    if sync.transport.overlaps:  # A psum is a part of update.
      programs["transmit"] = transmit.lower(payload, mesh=mesh)
      given = np.int32(3), s.params, s.opt_state, [tokens] * 3, tuned, [payload]
      programs["hidden"] = overlapped_exchange.lower(*given, c=c, mesh=mesh)
    texts = {name: p.compile().as_text() for name, p in programs.items()}
    real, *_ = send(*args, **wire)
  crossing = {
    name: [[x.kind, x.dtype, x.nbytes] for x in hlo.across_replicas(text, mesh)]
    for name, text in texts.items()
  }
  crossing["bytes"] = {n: hlo.replica_bytes(text, mesh) for n, text in texts.items()}
  crossing["booked"] = sync.sync_bytes(0)
  assert real.shape == payload.shape
  assert real.sharding.is_equivalent_to(payload.sharding, real.ndim)
  crossing["payload_shape"] = list(payload.shape)
  return crossing


def averages(devices: int, **fields) -> dict:
  """Averages moments and parameters that differ between the replicas.

  Returns:
    For each kind of average, bytes that a replica sends and books. `right`: whether
    changed values are means over the replicas, and arrays lie where they lay. `changed`
    and `expected`: numbers of changed parameters and moments.
  """
  c = make_config(**fields, **{"des_loc.second_every": 1, "sparta.share": 0.1})
  with begun(c, devices) as (method, sync, s):
    draw = lambda x: np.random.default_rng(x.size).normal(size=x.shape)
    put = lambda x: jax.device_put(draw(x).astype(x.dtype), x.sharding)
    s = TrainState(*jax.tree.map(put, (s.params, s.opt_state)), s.outer)
    old = jax.tree.map(np.asarray, (s.params, s.opt_state))
    places = jax.tree.map(lambda x: x.sharding, (s.params, s.opt_state))
    s, events = method.average(1, s)
  right, changed = True, [0, 0]
  for i, three in enumerate(zip(old, (s.params, s.opt_state), places)):
    for x, y, place in zip(*map(jax.tree.leaves, three)):
      mean = np.broadcast_to(np.mean(x, axis=0, dtype=np.float64), x.shape)
      moved = (x != np.asarray(y)).any(axis=0)
      right &= np.allclose(np.asarray(y)[:, moved], mean[:, moved], atol=1e-5)
      right &= y.sharding.is_equivalent_to(place, y.ndim)
      changed[i] += int(moved.sum())
  programs = Programs(c, sync.mesh)
  crossing = {x.fragment: programs.compile(x.fragment).crossing for x in events}
  booked = {x.fragment: x.sent for x in events}
  n = shapes.num_params(c.model)
  values = sparta.count(0.1, sync.parameters, sync.mesh.shape[sharding.FSDP])
  found = {"crossing": crossing, "booked": booked, "right": bool(right)}
  return found | {"changed": changed, "expected": [values, n]}


def coded_moments(devices: int, **fields) -> list[float]:
  """Bytes that a replica sends and books when it averages moments in 4 bits."""
  own = {"des_loc.first_every": 1, "des_loc.format": "e3m0"}
  c = make_config(**fields, **own)
  with begun(c, devices) as (method, sync, s):
    _, (event,) = method.average(1, s)
  return [Programs(c, sync.mesh).compile(event.fragment).crossing, event.sent]


def whole_models() -> dict:
  """Bytes on one device while a replica's model is joined, relative to a shard."""
  c = make_config(**{"mesh.replica": 2, "mesh.fsdp": 4})
  device = jax.devices()[0]
  whole = shapes.parameters(c.model)
  shard = shapes.num_params(c.model)  # Bytes: four per parameter, on four devices.
  on_device = lambda arrays: sum(
    s.data.nbytes for x in arrays for s in x.addressable_shards if s.device == device
  )
  found = {}
  with begun(c, 8) as (_, sync, s):
    mesh = sync.mesh
    old = {id(x): x for x in jax.live_arrays()}
    most = []

    def thetas():
      for theta in s.outer.theta:
        most.append(on_device(x for x in jax.live_arrays() if id(x) not in old))
        yield theta

    joined = slices.join(thetas(), sync.layers, whole, mesh)
    found["joining"] = max(most) / shard
    same = jax.tree.map(lambda a, b: bool((a == b[0]).all()), joined, s.params)
    found["same"] = all(jax.tree.leaves(same))
    reduced = {"mean": replica_mean, "first": first_replica}
    results = {name: run(s.params, mesh=mesh) for name, run in reduced.items()}
    for name, tree in {**results, "joined": joined}.items():
      found[name] = on_device(jax.tree.leaves(tree)) / shard
    for name, run in reduced.items():
      memory = run.lower(s.params, mesh=mesh).compile().memory_analysis()
      found[f"{name} temporaries"] = memory.temp_size_in_bytes / shard
  return found


def gradients(devices: int, **fields) -> dict:
  """Collectives across the copies of data-parallel's one model."""
  c = make_config(**fields | {"algorithm": "data_parallel"})
  with begun(c, devices) as (_, sync, s):
    mesh = sync.mesh
    args = (s.params, s.opt_state, tokens_of(c, mesh, 0), optimizers.tuned(c))
    text = inner_step.lower(*args, c=c).compile().as_text()
  crossing = hlo.across_replicas(text, mesh)
  return {
    "kinds": sorted({x.kind for x in crossing}),
    "bytes": sum(x.nbytes for x in crossing),
    "gradient": 4 * shapes.num_params(c.model),
    "dry_run": Programs(c, mesh).compile("inner step").crossing,
  }


def shards(compressor: str) -> dict[str, bool]:
  """Compares what two fsdp shards with the same values send, for two replicas."""
  c = make_config(**{"mesh.replica": 1, "wire.compressor": compressor})
  mesh = make_mesh(c, jax.devices()[:2])
  values = np.random.default_rng(0).standard_normal((2, 3, 32, 8)).astype(np.float32)
  # fsdp does not divide 45 values: both devices hold all values.
  whole = values.reshape(2, 3, -1)[:, :, :45]
  delta_M = {"blocks": {"twice": np.concatenate([values] * 2, axis=2), "odd": whole}}
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), delta_M)
  state_M = exchange.init_state(c.wire, jax.tree.map(jnp.asarray, delta_M))
  keys_M = jax.random.split(jax.random.key(1), 2)
  encode = lambda x, s: exchange.encode(c.wire, mesh, x, s, keys_M)
  decode = lambda at: jax.jit(lambda x: exchange.decode(c.wire, at, x, like, (None,)))
  with jax.set_mesh(mesh):
    sent, state_M = jax.jit(encode)(delta_M, state_M)
    found = decode(mesh)(sent)
  alone = make_mesh(make_config(), jax.devices()[:1])
  with jax.set_mesh(alone):
    foreign = decode(alone)(jnp.asarray(np.asarray(sent)))
  same = lambda x, y: bool((np.asarray(x) == np.asarray(y)).all())
  first, second = np.split(np.asarray(found["blocks"]["twice"]), 2, axis=2)
  one, other = [shard.data for shard in found["blocks"]["odd"].addressable_shards]
  # Error feedback keeps the error of each shard's own codes.
  error = jax.tree.map(lambda x, y: x - np.asarray(y), delta_M, found)
  kept = [same(a, b) for a, b in zip(jax.tree.leaves(state_M), jax.tree.leaves(error))]
  return {
    "halves_agree": same(first, second),
    "some_arrive": bool(first.any() and second.any()),
    "whole_leaves_agree": same(one, other),
    "foreign_agrees": all(jax.tree.leaves(jax.tree.map(same, found, foreign))),
    "state_is_the_error": all(kept) and len(kept) == 2 * (compressor == "feedback"),
  }


def attention_errors(name: str, dtype: str, masks: bool, fsdp: int) -> list[float]:
  """Errors of y, dq, dk, dv under DrJAX's map, relative to the largest value."""
  m, b, length, h, k = 2, 4, 384, 2, 16
  dims = ModelConfig(
    dim=h * k, num_heads=h, seq_len=length, dtype=dtype, attention=name
  )
  rng = np.random.default_rng(0)
  q, k, v, dy = np.asarray(jnp.asarray(rng.normal(size=(4, m, b, length, h, k)), dtype))
  segment = np.sort(rng.integers(0, 5, (m, b, length))).astype(np.int32)
  true = numpy_attention.attention(q, k, v, segment if masks else None, dy)

  def of_a_replica(q, k, v, dy, segment):
    seen = segment if masks else None
    attend = lambda q, k, v: attention.attend(dims, q, k, v, seen, (sharding.FSDP,))
    y, pull = jax.vjp(attend, q, k, v)
    return y, *pull(dy)

  mesh = make_mesh(make_config(), jax.devices()[: 2 * fsdp])
  program = drjax.program(placements={sharding.REPLICA: m})(
    lambda *args: drjax.map_fn(of_a_replica, args)
  )
  with jax.set_mesh(mesh):
    mine = [np.asarray(x, np.float64) for x in jax.jit(program)(q, k, v, dy, segment)]
  return [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(mine, true)]


def attentions() -> dict:
  """Errors of each attention, and losses of whole runs with it."""
  numpy_attention.run_cudnn_on_cpu()
  attention.check = lambda m, device: None  # It refuses kernels on a CPU.
  errors = {
    f"{name}, {dtype}, fsdp {fsdp}{', masks' * masks}": attention_errors(
      name, dtype, masks, fsdp
    )
    for name, dtype, masks, fsdp in (
      ("xla", "float32", True, 2),
      ("splash", "float32", False, 2),
      ("splash", "float32", True, 1),
      ("splash", "float32", True, 2),
      ("splash", "bfloat16", False, 2),
      ("cudnn", "bfloat16", False, 1),
      ("cudnn", "bfloat16", False, 2),
    )
  }
  fields = {
    **{"algorithm": "data_parallel", "model.seq_len": 128, "model.num_layers": 1},
    **{"train.accumulate": 2, "model.remat": "full", "model.segment_masks": True},
  }
  runs = {
    name: losses(4, **fields, **{"model.attention": name}) for name in ("xla", "splash")
  }
  return {"errors": errors, "losses": runs}


def arrivals(slices: int, gathers: bool) -> bool:
  """Tells whether every group gets all payloads, in order; groups lie on `slices`."""
  num_slices, on_gpu = sharding.num_slices, transport.gathers
  sharding.num_slices, transport.gathers = lambda mesh: slices, lambda mesh: gathers
  mesh = make_mesh(make_config(**{"replicas": 8, "mesh.replica": 4, "mesh.fsdp": 2}))
  shapes_of_two = ((8, 2, 5), (8, 2, 3))
  sent = [np.random.default_rng(0).integers(0, 256, x, np.uint8) for x in shapes_of_two]
  payloads = [jax.device_put(x, exchange.encoded(mesh)) for x in sent]
  found = jax.jit(lambda x: transport.finish(mesh, x, transport.start(mesh, x)))(
    payloads
  )
  sharding.num_slices, transport.gathers = num_slices, on_gpu
  # Each device holds the parts of all eight replicas.
  return all(
    np.array_equal(shard.data, x[shard.index])
    for x, y in zip(sent, found)
    for shard in y.addressable_shards
  ) and all(y.sharding.is_equivalent_to(exchange.transmitted(mesh), 3) for y in found)


def library(devices: int, fsdp: int, kind: str) -> list[list[float]]:
  """Trains a user's tree by the library; returns its outer parameters, flat."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  one = {"net": [{"w": draw(4, 8, 6)}, {"b": draw(4, 3)}], "z": draw(8, 2)}
  mesh = diloco.replica_mesh(4, fsdp, jax.devices()[:devices])
  params_M = diloco.replicate(one, 4, mesh)
  by_path = lambda path: int(path == "z")
  method = diloco.streaming(
    params_M,
    sync_every=4,
    fragments=diloco.Stacked("net", size=2) if kind == "stacked" else by_path,
    tau=1,
    wire="fp32",
    mesh=mesh,
  )
  state, count = method.init(params_M), np.int32(0)
  move = lambda params_M, count, moves: (
    jax.tree.map(jnp.subtract, params_M, moves),
    count + 1,
    jax.tree.map(jnp.sum, moves),
  )
  train_step = method.overlapped(move)
  for t in range(1, 12):
    sent, draw = state.in_flight.keys(), np.random.default_rng(t).integers
    of_leaf = lambda x, draw=draw: np.float32(draw(-8, 9, x.shape))
    moves = jax.tree.map(of_leaf, params_M)
    if kind == "stacked":
      params_M, count, sums, state = train_step(t, params_M, count, state, moves)
      assert sums["z"] == moves["z"].sum()
      hidden = {p for p in sent if state.in_flight[p].arrived}
      assert hidden == ({*sent} if devices > 1 else set())  # No exchange on one device.
    else:
      params_M = jax.tree.map(jnp.subtract, params_M, moves)
    params_M, state, _ = method.step(t, params_M, state)
  assert count == (11 if kind == "stacked" else 0)
  params_M, state, _ = method.drain(11, params_M, state)
  leaves = jax.tree.leaves((params_M, method.params(state)))
  return [np.asarray(x).ravel().tolist() for x in leaves]


def diagnosed(devices: int, fsdp: int) -> dict[str, list]:
  """Diagnostics of two fragments, and the losses around a merge."""
  c = make_config(**{"mesh.fsdp": fsdp, "fragments.size": 3})
  rng, found = np.random.default_rng(0), {}
  with begun(c, devices) as (_, sync, s):
    mesh = sync.mesh
    draw = lambda x: jax.device_put(np.float32(rng.normal(size=x.shape)), x.sharding)
    moved_M = jax.tree.map(lambda x: x + 0.1 * draw(x), s.params)
    for p, (theta, state) in enumerate(zip(s.outer.theta, s.outer.codec_state)):
      payload, _, metrics = sync.encode(3, p, moved_M, theta, state)
      args, kind = (theta, payload, sync.layers[p]), {"wire": sync.wire, "mesh": mesh}
      metrics |= measure.of_send(moved_M, *args, **kind)
      found |= {f"{name}, {p}": np.asarray(x).tolist() for name, x in metrics.items()}
    rows = np.arange(2 * 4 * c.model.seq_len).reshape(2, 4, -1).astype(np.int32) % 64
    weights = np.float32(rows % 5 > 0)
    place = lambda x: jax.device_put(x, sharding.batch_sharding(mesh))
    found["loss"] = losses_of(moved_M, place(rows), place(weights), c=c).tolist()
  return found


def main() -> None:
  one_model = {"algorithm": "data_parallel"}
  layouts = {
    "1": (1, {}),
    "2": (2, {}),
    "4": (4, {}),
    "8": (8, {}),
    "host": (8, {"overlap.transport": "host"}),
    "fsdp": (4, {"mesh.replica": 1, "mesh.fsdp": 4}),
    "two_on_each": (2, {"replicas": 4, "mesh.replica": 2}),
    "four_on_one": (1, {"replicas": 4}),
    "4 of 4": (4, {"replicas": 4}),
    "psum_8": (8, {"wire.exchange": "psum"}),
    "psum_of_4": (4, {"wire.exchange": "psum", "replicas": 4}),
    "chunked_feedback": (8, {"model.loss_chunk": 4, "wire.compressor": "feedback"}),
    "one_copy": (1, one_model),
    "one_copy_on_2": (2, {**one_model, "mesh.replica": 1}),
    "two_copies": (2, one_model),
    "two_copies_on_8": (8, one_model),
    "accumulated": (2, {**one_model, "train.accumulate": 2}),
    "16_bits": (2, {**one_model, "inner.gradient_dtype": "bfloat16"}),
  }
  parts = {
    **{
      run.__name__: {
        name: functools.partial(run, n, **fields)
        for name, (n, fields) in layouts.items()
      }
      for run in (losses, gradients, traffic, averages, coded_moments)
    },
    "whole_models": {"2 of 4": whole_models},
    "arrivals": {
      f"{slices}, {gathers}": functools.partial(arrivals, slices, gathers)
      for slices, gathers in ((1, False), (2, False), (4, False), (3, False), (1, True))
    },
    "library": {
      f"{kind}, {devices}": functools.partial(library, devices, fsdp, kind)
      for kind in ("by path", "stacked")
      for devices, fsdp in ((1, 1), (8, 2))
    },
    "diagnosed": {
      f"{devices}, {fsdp}": functools.partial(diagnosed, devices, fsdp)
      for devices, fsdp in ((1, 1), (2, 2), (2, 1), (4, 2))
    },
    "bits": {
      "device": functools.partial(bits, "device"),
      "apart": functools.partial(bits, "device", frozenset()),
      "host": functools.partial(bits, "host"),
    },
    "shards": {
      name: functools.partial(shards, name)
      for name in ("quantize", "random", "feedback")
    },
    # The last part: it changes JAX and attention.check.
    "attentions": {"all": attentions},
  }
  found = {}
  for word in sys.argv[1:]:
    part, _, names = word.partition("=")
    chosen = names.split(",") if names else parts[part]
    found[part] = {name: parts[part][name]() for name in chosen}
  json.dump(found, sys.stdout)


if __name__ == "__main__":
  main()
