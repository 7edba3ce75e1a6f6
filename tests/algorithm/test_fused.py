"""The fused form of the outer step against the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.algorithm import fused, optimizers, outer
from diloco.algorithm.method import Method
from diloco.algorithm.placement import OnDevices
from diloco.algorithm.streaming import choose_send, choose_update, make_streaming
from diloco.config import default_config, resolve
from diloco.mesh.devices import make_mesh
from diloco.wire.cuts import cut


def make_config(**fields):
  c = default_config()
  c.replicas, c.sync_every, c.fragments.size = 2, 4, 2
  c.model.num_layers, c.model.dim, c.model.num_heads = 4, 64, 2
  c.model.vocab_size, c.model.seq_len = 48, 16
  c.train.steps, c.train.batch_size = 8, 12
  # Powers of two: fused multiply-adds round like separate operations.
  c.outer.optimizer, c.outer.learning_rate = "sgd(momentum=0.5, nesterov=True)", 0.5
  c.update_from_flattened_dict(fields)
  return resolve(c)


def lines_of(c) -> tuple:
  """The functions of lines 7 and 8, and of 10 and 11, that a run of the config has."""
  place = OnDevices(make_mesh(c, jax.devices()[:1]))
  return choose_send(c.wire, place), choose_update(c.wire, c.outer, place)


# Three shapes instead of a model's dozen: each is traced by itself.
SHAPES = {"blocks": {"up": (4, 64, 256), "odd": (4, 33)}, "embed": {"tokens": (48, 64)}}


FEEDBACK = {
  "plugins": ("error_feedback",),
  "wire.compressor": "error_feedback(beta=0.9, of='quantize')",
}


def outer_steps(c, lines_7_8, lines_10_11) -> tuple:
  """Sends and updates the first fragment twice, from random parameters."""
  sync = make_streaming(c, make_mesh(c, jax.devices()[:1]), SHAPES)
  at = {"wire": c.wire, "mesh": sync.mesh}
  send = jax.jit(lambda *args: lines_7_8.__wrapped__(*args, **at))
  update = jax.jit(lambda *args: lines_10_11.__wrapped__(*args, outer=c.outer, **at))
  tuned = optimizers.outer_tuned(c.outer)
  rng = np.random.default_rng(0)
  draw = lambda shape: rng.normal(size=(c.replicas, *shape)).astype(np.float32)
  is_shape = lambda x: isinstance(x, tuple)
  params_M = jax.tree.map(draw, sync.parameters, is_leaf=is_shape)
  with jax.set_mesh(sync.mesh):
    state = sync.init(jax.tree.map(jnp.asarray, params_M))
    theta, opt_state, codec = state.theta[0], state.opt_state[0], state.codec_state[0]
    found, metrics = [], {}
    for key in jax.random.split(jax.random.key(0)):
      params_M = jax.tree.map(lambda x: x + draw(x.shape[1:]), params_M)
      payload, codec, sent = send(params_M, theta, codec, sync.layers[0], key)
      theta, opt_state, updated = update(theta, opt_state, payload, tuned)
      found += [payload, theta, opt_state]
      metrics = sent | updated
  return found, metrics


@pytest.mark.parametrize(
  "fields",
  [
    {},
    {"wire.format": "e2m3", "wire.block_size": 16, "fragments.size": 1},
    {"wire.format": "e4m3fn", "wire.block_size": -1, "replicas": 4},
    {"wire.format": "e1m0", "wire.block_size": 8, "outer.optimizer": "sgd"},
    {"model.param_dtype": "bfloat16", "outer.optimizer": "sgd(momentum=0.5)"},
    # These send whole tensors, and decode piece by piece.
    FEEDBACK,
  ],
)
def test_pieces_give_the_same_bytes_and_parameters(fields, monkeypatch):
  c = make_config(**fields)
  monkeypatch.setitem(fused._VALUES, "cpu", 1 << 10)
  n, d, f = c.make_fragments()[0].shapes(SHAPES)["blocks"]["up"]
  assert cut(c.wire, 1 << 10, c.replicas, n, d, f).pieces > 1
  lines_7_8, lines_10_11 = lines_of(c)
  assert lines_10_11 is fused.update_in_place
  assert lines_7_8 is (outer.send if c.plugins else fused.send)
  found, metrics = outer_steps(c, lines_7_8, lines_10_11)
  expected, numbers = outer_steps(c, outer.send, outer.update)
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  assert metrics.keys() == numbers.keys()
  for name, number in numbers.items():
    np.testing.assert_allclose(metrics[name], number, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("weights_M", "fsdp"), [(np.ones(2), 1), (None, 2)])
def test_weights_and_payloads_of_other_meshes_take_whole_tensors(
  monkeypatch, weights_M, fsdp
):
  c = make_config()
  mesh, payload = make_mesh(c, jax.devices()[:1]), np.zeros((2, fsdp, 1), np.uint8)
  monkeypatch.setattr(outer, "update", lambda *args, **kind: args)
  given = ({}, (), payload, None, weights_M)
  assert fused._update(*given, wire=c.wire, outer=c.outer, mesh=mesh) == given


@pytest.mark.parametrize(
  ("fields", "form"),
  [
    # Updates that mix values.
    ({"outer.optimizer": "lamb"}, fused),
    ({"plugins": ("ties_merging",), "outer.average": "ties_merging"}, fused),
    # Payloads without scales, or with some of the values.
    ({"wire.format": "fp32"}, outer),
    ({"wire.compressor": "topk"}, outer),
  ],
)
def test_other_outer_steps_take_whole_tensors(fields, form):
  assert lines_of(make_config(**fields)) == (form.send, outer.update_in_place)


def test_the_outer_step_on_cpu_keeps_only_pieces_in_memory():
  c = make_config(**{"model.dim": 512, "fragments.size": 4, "replicas": 2})
  sync = make_streaming(c, make_mesh(c, jax.devices()[:1]))
  with jax.set_mesh(sync.mesh):
    state = Method(c, sync).abstract()
    parts = (state.outer.theta[0], state.outer.opt_state[0])
    size = sum(4 * x.size for x in jax.tree.leaves(parts[0]))
    at, key = {"wire": c.wire, "mesh": sync.mesh}, jax.eval_shape(jax.random.key, 0)
    sent = (state.params, parts[0], state.outer.codec_state[0], sync.layers[0], key)
    arrived = (*parts, sync.payload(0), sync.tuned)
    everyone = np.ones(c.replicas, bool)
    merged = (state.params, parts[0], sync.layers[0], everyone)
    memory = {
      "send": sync.lines_7_8.lower(*sent, **at),
      "update": sync.lines_10_11.lower(*arrived, outer=c.outer, **at),
      "merge": outer.merge.lower(*merged, alpha=0.5),
    }
    memory = {k: x.compile().memory_analysis() for k, x in memory.items()}
  temporary = {k: x.temp_size_in_bytes for k, x in memory.items()}
  assert temporary["send"] < 0.6 * size
  assert temporary["update"] < 0.6 * size
  assert temporary["merge"] < 0.6 * size
  assert memory["update"].alias_size_in_bytes >= 2 * size
