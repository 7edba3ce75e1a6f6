"""Algorithms 1 and 2 in float64 NumPy, written from the papers alone.

Nothing of the package is used here. Parameters are {'embed': {name: array},
'blocks': {name: array with a leading layer axis}}; an inner step is an increment
that is added to a replica's parameters.
"""

import copy

import numpy as np

E3M0 = np.array([0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0])


def make_fragments(num_layers, size, pattern):
  """List of (layers, embed); the embedding is the last fragment."""
  if pattern == "whole":
    return [(list(range(num_layers)), True)]
  n = int(np.ceil(num_layers / size))
  if pattern == "strided":
    groups = [[x for x in range(num_layers) if x % n == p] for p in range(n)]
  else:
    groups = [list(range(num_layers))[i * size : (i + 1) * size] for i in range(n)]
  return [(g, False) for g in groups] + [([], True)]


def quantize_e3m0(x, block):
  """Nearest value of E3M0 under a power-of-two scale per block, brute force.

  x: one layer's tensor, flattened. Ties go to the even code.
  """
  out = np.zeros_like(x)
  for start in range(0, len(x), block):
    part = x[start : start + block]
    amax = np.abs(part).max()
    if amax == 0:
      continue
    # Smallest k with amax / 2^k below 24, halfway between 16 and the 32 that would
    # follow; code 7 is odd, so the tie itself belongs to the next scale.
    k = -200
    while amax / 2.0**k >= 24.0:
      k += 1
    scaled = np.abs(part) / 2.0**k
    distance = np.abs(scaled[:, None] - E3M0[None])
    nearest = distance.min(axis=1, keepdims=True)
    is_near = distance == nearest
    even = np.arange(8) % 2 == 0
    # Prefer even codes among equals.
    code = np.argmax(is_near * (1 + even), axis=1)
    out[start : start + block] = np.sign(part) * E3M0[code] * 2.0**k
  return out


class Sgd:
  """SGD with optional heavy-ball or Nesterov momentum, optax's form."""

  def __init__(self, rate, momentum=0.0, nesterov=False):
    self.rate, self.momentum, self.nesterov = rate, momentum, nesterov
    self.trace = None

  def update(self, grad):
    if self.trace is None:
      self.trace = {k: np.zeros_like(v) for k, v in grad.items()}
    steps = {}
    for k, g in grad.items():
      self.trace[k] = self.momentum * self.trace[k] + g
      step = g + self.momentum * self.trace[k] if self.nesterov else self.trace[k]
      steps[k] = -self.rate * step
    return steps


class Adam:
  """Adam with bias correction."""

  def __init__(self, rate, b1=0.9, b2=0.999, eps=1e-8):
    self.rate, self.b1, self.b2, self.eps = rate, b1, b2, eps
    self.m, self.v, self.n = None, None, 0

  def update(self, grad):
    zeros = {k: np.zeros_like(v) for k, v in grad.items()}
    self.m, self.v = self.m or zeros, self.v or dict(zeros)
    self.n += 1
    steps = {}
    for k, g in grad.items():
      self.m[k] = self.b1 * self.m[k] + (1 - self.b1) * g
      self.v[k] = self.b2 * self.v[k] + (1 - self.b2) * g * g
      m, v = self.m[k] / (1 - self.b1**self.n), self.v[k] / (1 - self.b2**self.n)
      steps[k] = -self.rate * m / (np.sqrt(v) + self.eps)
    return steps


def entries(params, fragment):
  """{(group, name, layer): array} of a fragment's single tensors."""
  layers, embed = fragment
  found = {}
  if embed:
    found.update({("embed", n, None): a for n, a in params["embed"].items()})
  for layer in layers:
    found.update({("blocks", n, layer): a[layer] for n, a in params["blocks"].items()})
  return {k: np.array(v, np.float64) for k, v in found.items()}


def store(params, key, value):
  group, name, layer = key
  if layer is None:
    params[group][name] = value
  else:
    params[group][name][layer] = value


def add(params, increment):
  for group, tensors in increment.items():
    for name, value in tensors.items():
      params[group][name] = params[group][name] + value


def simulate(
  theta, increments, *, fragments, sync_every, taus, alpha, make_optimizer, block=None
):
  """Streaming DiLoCo.

  Args:
    theta: initial parameters, shared by all replicas.
    increments: increments[t - 1][m] is what inner step t adds to replica m.
    fragments: list of (layers, embed), in the order of the schedule.
    sync_every: H.
    taus: tau_m.
    alpha: mixing weight of the local parameters.
    make_optimizer: makes one fragment's outer optimizer.
    block: values per scale of E3M0; None sends exact values.

  Returns:
    dict with theta (outer), replicas, optimizers and log of (event, t, p).
  """
  num, total = len(fragments), len(increments)
  outer = copy.deepcopy(theta)
  replicas = [copy.deepcopy(theta) for _ in taus]
  optimizers = [make_optimizer() for _ in fragments]
  offsets = [int(np.floor(p * sync_every / num)) for p in range(num)]
  wire, log = {}, []

  for t in range(1, total + max(taus) + 1):
    if t <= total:  # Afterwards only what is in flight is received.
      for m, replica in enumerate(replicas):
        add(replica, increments[t - 1][m])
      for p, t_p in enumerate(offsets):
        if t >= sync_every + t_p and (t - t_p) % sync_every == 0:
          base, grads = entries(outer, fragments[p]), []
          for replica in replicas:
            mine = entries(replica, fragments[p])
            delta = {k: base[k] - mine[k] for k in base}
            if block:
              delta = {
                k: quantize_e3m0(d.ravel(), block).reshape(d.shape)
                for k, d in delta.items()
              }
            grads.append(delta)
          mean = {k: sum(g[k] for g in grads) / len(grads) for k in base}
          wire[p, t] = mean
          log.append(("send", t, p))
    for (p, sent), mean in sorted(wire.items()):
      if t == sent + min(taus):
        steps = optimizers[p].update(mean)
        for key, value in entries(outer, fragments[p]).items():
          store(outer, key, value + steps[key])
        log.append(("receive", t, p))
      for m, replica in enumerate(replicas):
        if t == sent + taus[m]:
          new = entries(outer, fragments[p])
          for key, value in entries(replica, fragments[p]).items():
            store(replica, key, alpha * value + (1 - alpha) * new[key])
  return {"theta": outer, "replicas": replicas, "optimizers": optimizers, "log": log}


def diloco(theta, increments, *, sync_every, make_optimizer):
  """Algorithm 1, written on its own: flat vectors, no fragments, no overlap."""
  flat = lambda p: np.concatenate([np.ravel(v) for g in p.values() for v in g.values()])
  outer, optimizer = flat(theta), make_optimizer()
  replicas = [outer.copy() for _ in increments[0]]
  for t, step in enumerate(increments, start=1):
    replicas = [r + flat(u) for r, u in zip(replicas, step)]
    if t % sync_every == 0:
      delta = sum(outer - r for r in replicas) / len(replicas)
      outer = outer + optimizer.update({"x": delta})["x"]
      replicas = [outer.copy() for _ in replicas]
  return outer, replicas
