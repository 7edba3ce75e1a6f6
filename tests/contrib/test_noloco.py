"""NoLoCo's pairs against float64 NumPy, and exact resume."""

import conftest
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref

import diloco
from diloco.config import add_plugins, resolve
from diloco.contrib import noloco
from diloco.errors import ConfigError

M, H, STEPS, RATE, MOMENTUM = 4, 3, 13, 0.7, 0.5
WIRE = diloco.WireConfig(format="fp32", exchange="pair")


def tree():
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return {"a": draw(4, 6), "b": draw(5)}


def moved(t, params_M):
  rng = np.random.default_rng(t)
  move = lambda x: x - jnp.asarray(rng.normal(size=x.shape), x.dtype) / 8
  return jax.tree.map(move, params_M)


def make(params_M, fragments=None):
  outer = diloco.OuterConfig(f"sgd(momentum={MOMENTUM})", RATE)
  fields = {"fragments": fragments, "wire": WIRE, "outer": outer, "seed": 3}
  return diloco.streaming(params_M, sync_every=H, **fields)


@pytest.mark.parametrize("replicas", [2, 4, 6, 12])
def test_in_a_tournament_everyone_meets_everyone_once(replicas):
  peers = noloco.rounds(replicas)
  assert peers.shape == (replicas - 1, replicas)
  for row in peers:
    assert (row[row] == np.arange(replicas)).all()
    assert (row != np.arange(replicas)).all()
  for m in range(replicas):
    assert sorted(peers[:, m]) == [x for x in range(replicas) if x != m]


@pytest.mark.parametrize("fragment_of", [(0, 0), (0, 1)])
def test_pairs_step_as_in_the_authors_code(fragment_of, monkeypatch):
  """m <- mu m + rate (mean(theta - phi) + mean(phi) - phi_m); phi_m <- phi_m + m."""
  pairs, drawn = [], noloco.peers_of

  def watched(x_M, key, mesh):
    """Finds out who met whom from the first tensor of the fragment."""
    peers_M = drawn(x_M, key, mesh)
    x, y = (np.asarray(jax.tree.leaves(a)[0]).reshape(M, -1) for a in (x_M, peers_M))
    pairs.append([int(np.abs(x - peer).sum(1).argmin()) for peer in y])
    return peers_M

  monkeypatch.setattr(noloco, "peers_of", watched)
  monkeypatch.setattr(noloco, "update", noloco.update.__wrapped__)  # Not traced.
  params_M = diloco.replicate(tree(), M)
  method = make(params_M, dict(zip("ab", fragment_of)).get)
  state, sent = method.init(params_M), []
  inner = [np.asarray(x, np.float64) for x in jax.tree.leaves(params_M)]
  phi, momentum = [x.copy() for x in inner], [0 * x for x in inner]
  met = {p: [] for p in fragment_of}
  for t in range(1, STEPS + 1):
    params_M, state, events = method.step(t, moved(t, params_M), state)
    sent += [event.sent for event in events if event.kind == "send"]
    rng = np.random.default_rng(t)
    inner = [x - rng.normal(size=x.shape) / 8 for x in inner]
    for p in ref.sent_at(t, len(met), H):
      met[p].append(pairs.pop(0))
      assert all(met[p][-1][peer] == m != peer for m, peer in enumerate(met[p][-1]))
    for i, p in enumerate(fragment_of):
      if p not in ref.sent_at(t, len(met), H):
        continue
      delta, pair = inner[i] - phi[i], met[p][-1]
      pull = (phi[i] + phi[i][pair]) / 2 - phi[i]
      mean = (delta + delta[pair]) / 2
      momentum[i] = MOMENTUM * momentum[i] + RATE * (mean + pull)
      phi[i] = phi[i] + momentum[i]
      inner[i] = phi[i].copy()
  params_M, state, _ = method.drain(STEPS, params_M, state)
  for x, y in zip(jax.tree.leaves(params_M), inner):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
  for x, y in zip(jax.tree.leaves(method.params(state)), phi):
    np.testing.assert_allclose(x, y.mean(axis=0), rtol=1e-5, atol=1e-5)
  # To one peer, whatever M is.
  size = {p: 4 * sum(n for n, q in zip((24, 5), fragment_of) if q == p) for p in met}
  assert sent == [
    size[p] for t in range(1, STEPS + 1) for p in ref.sent_at(t, len(met), H)
  ]
  assert not pairs
  for found in met.values():
    assert len({tuple(pair) for pair in found}) > 1
  if len(met) == 2:  # Each fragment draws for itself.
    assert met[0] != met[1]


def test_a_run_goes_on_from_any_step_bit_for_bit():
  start_M = diloco.replicate(tree(), M)

  def train(params_M, first, state):
    method, states = make(start_M), {}
    state = state or method.init(params_M)
    for t in range(first + 1, STEPS + 1):
      params_M, state, _ = method.step(t, moved(t, params_M), state)
      states[t] = jax.tree.map(np.asarray, (params_M, state))
    return states, jax.tree.map(np.asarray, (params_M, method.params(state)))

  states, expected = train(start_M, 0, None)
  for t in (2, 3, 7):
    params_M, state = states[t]
    like = make(start_M).abstract_state(start_M, t)
    state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, like)
    found = train(jax.tree.map(jnp.asarray, params_M), t, state)[1]
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))


def test_bfloat16_replicas_that_did_not_train_send_zeros():
  params_M = diloco.replicate(jax.tree.map(jnp.bfloat16, tree()), M)
  method = make(params_M)
  state, norms = method.init(params_M), []
  for t in range(1, 2 * H + 1):
    params_M = moved(t, params_M) if t <= H else params_M
    params_M, state, events = method.step(t, params_M, state)
    norms += [e.metrics["outer_grad_norm"] for e in events if e.kind == "send"]
  assert (norms[0] > 0.1).all()
  np.testing.assert_array_equal(norms[1], 0)


@pytest.mark.parametrize(
  ("field", "value", "said"),
  [
    ("replicas", 3, "replicas is 3, but wire.exchange is pair.*choose an even number"),
    ("overlap.tau", 1, "pair, .* but overlap.tau is 1; choose"),
    ("overlap.alpha", 0.5, "pair, .* but overlap.alpha is 0.5; choose"),
    ("eager.on", True, "pair, .* but eager.on is True; choose false"),
    ("wire.format", "e3m0", "pair, .* but wire.format is e3m0; choose"),
    ("outer.offload", True, "pair, .* but outer.offload is True; choose"),
    ("overlap.transport", "host", "pair, .* but overlap.transport is host; choose"),
  ],
)
def test_what_pairs_cannot_do_is_refused(tiny, field, value, said):
  add_plugins(tiny, "noloco")
  tiny.wire.exchange, tiny.wire.format, tiny.overlap.tau = "pair", "fp32", 0
  conftest.update(tiny, {field: value, "train.batch_size": 12})
  with pytest.raises(ConfigError, match=said):
    resolve(tiny)
