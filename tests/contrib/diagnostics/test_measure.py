"""The diagnostics of a sync, against float64 NumPy; which syncs are measured."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.algorithm.outer import outer_step, send
from diloco.algorithm.streaming import Streaming, make_streaming
from diloco.config import default_config, resolve
from diloco.contrib.diagnostics import measure
from diloco.contrib.diagnostics.outer_step import MeasuredStep
from diloco.mesh.devices import make_mesh
from diloco.spec.plugins import OuterStep
from diloco.wire import exchange

LAYERS = 5


def make(**fields) -> Streaming:
  """A sync for the parameters of `draw`, on one device."""
  c = default_config()
  c.model.num_layers, c.train.steps, c.train.batch_size = LAYERS, 100, 60
  c.sync_every, c.wire.block_size = 8, 4
  c.update_from_flattened_dict(fields)
  c = resolve(c)
  shapes = jax.tree.map(np.shape, draw(np.random.default_rng(0)))
  return make_streaming(c, make_mesh(c, jax.devices()[:1]), shapes)


def draw(rng: np.random.Generator) -> dict:
  one = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return {
    "embed": {"tokens": one(7, 4), "norm": {"scale": one(4)}},
    "blocks": {"ff": {"up": one(LAYERS, 6, 3)}, "norm": {"scale": one(LAYERS, 6)}},
  }


def rows_of_parts(tree_M, layers) -> list[np.ndarray]:
  """The values of each layer, then those of the embedding: a row for each replica."""
  parts = [
    jax.tree.map(lambda x, i=i: x[:, i], tree_M["blocks"])
    for i in (layers if "blocks" in tree_M else [])
  ]
  parts += [tree_M[name] for name in tree_M if name == "embed"]
  flat = lambda x: np.float64(x).reshape(len(x), -1)
  return [np.concatenate([*map(flat, jax.tree.leaves(part))], axis=1) for part in parts]


def largest(matrix: np.ndarray) -> np.ndarray:
  values = np.linalg.svd(matrix, compute_uv=False)
  return values[:8] / np.sqrt(np.sum(values**2))


def rank(matrix: np.ndarray) -> float:
  return 1 / largest(matrix)[0] ** 2


def by_numpy(delta_M, sent_M, theta, layers) -> dict:
  """All diagnostics of a fragment.

  Args:
    delta_M: outer gradients of the whole model, float64.
    sent_M, theta: decoded outer gradients and outer parameters of the fragment.
    layers: the fragment's layers.
  """
  own = {name: delta_M[name] for name in theta}
  deltas, places = rows_of_parts(own, layers), range(len(layers))
  norm, errors = lambda x: np.linalg.norm(x, axis=-1), rows_of_parts(sent_M, places)
  cosine = lambda a, b: a @ b / norm(a) / norm(b)
  pairs = lambda d: itertools.combinations(d, 2)
  from_mean = lambda d: norm(d - d.mean(axis=0))
  thetas = rows_of_parts(jax.tree.map(lambda x: np.asarray(x)[None], theta), places)
  found = {
    "outer_grad_norm": [norm(d) for d in deltas],
    "quantization_error": [norm(e - d) / norm(d) for e, d in zip(errors, deltas)],
    "outer_grad_cosine": [np.mean([cosine(*x) for x in pairs(d)]) for d in deltas],
    "replica_drift": [np.sqrt(np.mean(from_mean(d) ** 2)) for d in deltas],
    "outer_norm": [norm(t[0]) for t in thetas],
  }
  found = {f"{name}_by_layer": np.array(x).T for name, x in found.items()}
  if "blocks" in theta:
    up = delta_M["blocks"]["ff"]["up"].mean(axis=0)
    found["stable_rank.ff.up"] = [rank(up[i]) for i in layers]
    found["spectrum.ff.up"] = np.transpose([largest(up[i]) for i in layers])
  if "embed" in theta:
    tokens = delta_M["embed"]["tokens"].mean(axis=0)
    found["stable_rank.tokens"] = [rank(tokens)]
    found["spectrum.tokens"] = largest(tokens)[:, None]
  return found


@pytest.mark.parametrize(
  ("m", "pattern"),
  [
    (2, "whole"),
    pytest.param(5, "sequential", marks=pytest.mark.slow("compiles for five replicas")),
  ],
)
def test_the_diagnostics_of_a_send_equal_numpy(m, pattern):
  fields = {"fragments.pattern": pattern, "fragments.size": LAYERS}
  sync = make(replicas=m, **fields, **{"wire.format": "e3m0"})
  rng = np.random.default_rng(m)
  theta, common = draw(rng), draw(rng)
  move = lambda t, common, *x: t - np.float32(0.1) * (common + np.stack(x))
  params_M = jax.tree.map(move, theta, common, *[draw(rng) for _ in range(m)])
  delta_M = jax.tree.map(lambda t, x: np.float64(t) - np.float64(x), theta, params_M)
  wire, mesh = sync.wire, sync.mesh
  with jax.set_mesh(mesh):
    state = sync.init(jax.tree.map(lambda t: np.stack([t] * m), theta))
    for p, own in enumerate(state.theta):
      layers, key = sync.layers[p], jax.random.key(0)
      args = (params_M, own, state.codec_state[p], layers, key)
      payload, _, whole = send(*args, wire=wire, mesh=mesh)
      decode = jax.jit(lambda x, own=own: exchange.decode(wire, mesh, x, own, (None,)))
      sent_M = decode(payload)
      args = (params_M, own, payload, layers)
      found = measure.of_send(*args, wire=wire, mesh=mesh)
      expected = by_numpy(delta_M, sent_M, own, layers)
      assert found.keys() == expected.keys()
      for name, value in expected.items():
        # The iteration may stop below a singular value.
        limit = 0.02 if "rank" in name or "spectrum" in name else 1e-4
        np.testing.assert_allclose(found[name], value, rtol=limit, err_msg=name)
      # The parts make up the fragment that `send` measures.
      squares_M = jnp.square(found["outer_grad_norm_by_layer"]).sum(axis=1)
      np.testing.assert_allclose(jnp.sqrt(squares_M), whole["outer_grad_norm"], 1e-5)


def test_a_single_replica_has_no_cosine_and_no_drift():
  fields = {"plugins": ("error_feedback",), "wire.format": "e3m0"}
  fields |= {"wire.compressor": "error_feedback(beta=0.5, of='quantize')"}
  sync = make(replicas=1, algorithm="diloco", **fields)
  params_M = jax.tree.map(lambda x: x[None], draw(np.random.default_rng(1)))
  with jax.set_mesh(sync.mesh):
    theta, args = sync.init(params_M).theta[0], (sync.layers[0],)
    payload = jnp.zeros(sync.payload(0).shape, jnp.uint8)  # Codes of zeros.
    args, kind = (theta, payload, *args), {"wire": sync.wire, "mesh": sync.mesh}
    moved_M = jax.tree.map(lambda x_M: 2 * x_M, params_M)
    found = measure.of_send(moved_M, *args, **kind)
  assert "outer_grad_cosine_by_layer" not in found
  assert (found["replica_drift_by_layer"] == 0).all()
  norms_M = found["outer_grad_norm_by_layer"]
  assert norms_M.shape == (1, LAYERS + 1)
  np.testing.assert_allclose(norms_M[0], found["outer_norm_by_layer"], rtol=1e-6)
  np.testing.assert_array_equal(found["quantization_error_by_layer"], 1)


@pytest.mark.parametrize("values", [[3.0, 2.0, 1.0, 0.5], [0] * 4])
def test_the_spectrum_of_a_small_matrix_has_all_singular_values(values):
  rng = np.random.default_rng(0)
  left, right = (np.linalg.qr(rng.normal(size=(n, 4)))[0] for n in (9, 6))
  found = measure.spectrum(jnp.float32(1e-3 * (left * values) @ right.T))
  norm = np.linalg.norm(values)
  expected = np.append(values, [0, 0]) / norm if norm else np.full(6, np.nan)
  np.testing.assert_allclose(found, expected, atol=1e-3)


def test_the_spectrum_has_the_largest_singular_values():
  rng, spectrum = np.random.default_rng(0), jax.jit(measure.spectrum)
  # Singular values that fall like those of outer gradients: 1, 1/2, 1/3, ...
  left, right = (np.linalg.qr(rng.normal(size=(n, 128)))[0] for n in (512, 128))
  values = 1 / np.arange(1, 129)
  matrix = (left * values) @ right.T
  for x in (matrix, matrix.T):
    found = spectrum(jnp.float32(x))
    np.testing.assert_allclose(found, values[:8] / np.linalg.norm(values), rtol=1e-2)
  # Of a matrix without a gap they are hardly too small.
  matrix = rng.normal(size=(128, 512))
  found, exact = spectrum(jnp.float32(matrix)), largest(matrix)
  assert (found <= exact * (1 + 1e-5)).all()
  assert (found > 0.9 * exact).all()


def test_the_norm_of_an_update_is_that_of_each_part():
  rng = np.random.default_rng(3)
  before, after = draw(rng), draw(rng)
  found = measure.of_update(before, after)["outer_update_norm_by_layer"]
  change = lambda a, b: (np.float64(b) - np.float64(a))[None]
  rows = rows_of_parts(jax.tree.map(change, before, after), range(LAYERS))
  np.testing.assert_allclose(found, [np.linalg.norm(x) for x in rows], rtol=1e-5)


def train(sync: Streaming, steps: int) -> tuple[list, dict]:
  """Outer steps between random inner steps; returns the end and the metrics' names.

  The names are {(kind, fragment, step): names}.
  """
  rng = np.random.default_rng(4)
  with jax.set_mesh(sync.mesh):
    theta = draw(rng)
    params_M = jax.tree.map(lambda x: jnp.stack([x] * sync.replicas), theta)
    state, events = sync.init(params_M), []
    for t in range(1, steps + 1):
      moves = [draw(rng) for _ in range(sync.replicas)]
      params_M = jax.tree.map(lambda x, *y: x + 0.01 * np.stack(y), params_M, *moves)
      params_M, state, new = sync.step(t, params_M, state)
      events += new
    params_M, state, new = sync.drain(steps, params_M, state, final_sync=True)
  names = {(e.kind, e.fragment, e.step): set(e.metrics) for e in [*events, *new]}
  return [np.asarray(x) for x in jax.tree.leaves((params_M, state))], names


def test_the_chosen_syncs_are_measured_and_nothing_else_changes():
  fields = {"overlap.taus": (2, 1), "fragments.size": LAYERS}
  off, without = train(make(**fields), 34)

  def measured(sync, t, params_M, state, last_send=None):
    last = last_send or t  # As in a drain, which computes no losses of a model.
    return MeasuredStep(None, 2, outer_step)(sync, t, params_M, state, last)

  on, found = train(
    dataclasses.replace(make(**fields), outer_step=OuterStep(measured)), 34
  )
  for x, y in zip(on, off, strict=True):
    np.testing.assert_array_equal(x, y)
  assert found.keys() == without.keys()
  more = {place: names - without[place] for place, names in found.items()}
  measured = sorted(place for place, names in more.items() if names)
  # Two fragments are sent after 8 and 12 steps, then every 8; the update is 1 later.
  # The final sync, at step 37, is not measured.
  sends = [(p, 8 * n + offset) for p, offset in ((0, 0), (1, 4)) for n in (1, 3)]
  expected = [("send", p, t) for p, t in sends]
  expected += [("receive", p, t + 1) for p, t in sends]
  assert measured == sorted(expected)
  update = {"outer_update_norm_by_layer"}
  assert all(more[place] == update for place in measured if place[0] == "receive")
