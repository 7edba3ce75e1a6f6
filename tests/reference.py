"""DiLoCo and Streaming DiLoCo a second time: float64 NumPy, slow and literal.

Written from the papers (Streaming DiLoCo, arXiv 2501.18512, Algorithms 1 and 2;
optax's definition of Nesterov momentum) and not from the package, with which it
shares no code, so that a mistake has to be made twice to go unseen. It favours
dictionaries and loops over anything clever.

Parameters come as `{'embed': {name: array}, 'blocks': {name: array (N, ...)}}`, N
the number of layers. Inside, they are a flat dictionary with one entry per tensor
and layer, keyed `('embed', name)` or `('blocks', name, layer)`; a fragment is
then nothing but a list of keys.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Params = dict[str, dict[str, np.ndarray]]
Flat = dict[tuple, np.ndarray]
# Inner step of replica m at step t: (parameters, m, t) -> new parameters.
InnerStep = Callable[[Params, int, int], Params]
# One tensor of one layer, flattened, and the length of its rows (last axis) ->
# (values as decoded, bytes sent).
Compress = Callable[[np.ndarray, int], tuple[np.ndarray, int]]


def split(params: Params) -> Flat:
  """One float64 entry per tensor and layer; copies."""
  flat: Flat = {}
  for name, leaf in params["embed"].items():
    flat["embed", name] = np.array(leaf, np.float64)
  for name, leaf in params["blocks"].items():
    for layer, tensor in enumerate(leaf):
      flat["blocks", name, layer] = np.array(tensor, np.float64)
  return flat


def join(flat: Flat) -> Params:
  """The inverse of `split`."""
  embed = {key[1]: value for key, value in flat.items() if key[0] == "embed"}
  layers: dict[str, list] = {}
  for key in sorted(key for key in flat if key[0] == "blocks"):
    layers.setdefault(key[1], []).append(flat[key])
  blocks = {name: np.stack(tensors) for name, tensors in layers.items()}
  return {"embed": embed, "blocks": blocks}


# --- Fragments and their schedule (section 2.2, figure 2) ----------------------


def make_fragments(
  num_layers: int, fragment_size: int, pattern: str
) -> list[tuple[tuple[int, ...], bool]]:
  """`(layers, has the embedding)` of each fragment, in the order of the schedule.

  'whole' is one fragment of everything, which is DiLoCo. Otherwise the layers go
  to n = ceil(N / fragment_size) fragments and the embedding is one more, the last.
  """
  if pattern == "whole":
    return [(tuple(range(num_layers)), True)]
  n = math.ceil(num_layers / fragment_size)
  of_layer = {
    "sequential": lambda layer: layer // fragment_size,
    "strided": lambda layer: layer % n,
  }[pattern]
  groups: list[list[int]] = [[] for _ in range(n)]
  for layer in range(num_layers):
    groups[of_layer(layer)].append(layer)
  return [(tuple(group), False) for group in groups] + [((), True)]


def keys_of(fragment: tuple[tuple[int, ...], bool], flat: Flat) -> list[tuple]:
  """The entries of a flat parameter dictionary that belong to a fragment."""
  layers, embed = fragment
  return [k for k in flat if (embed if k[0] == "embed" else k[2] in layers)]


def offset(p: int, P: int, H: int) -> int:
  """t_p: how long after the first fragment of a round fragment p is sent."""
  return (p * H) // P


def sent_at(t: int, P: int, H: int) -> list[int]:
  """The fragments sent at the end of step t, t counted from 1."""
  sent = []
  for p in range(P):
    t_p = offset(p, P, H)
    if t >= H + t_p and (t - t_p) % H == 0:
      sent.append(p)
  return sent


# --- Outer optimizers: (lr, ...) -> step(theta, g, state, count) ----------------
# One tensor at a time. `state` is a dictionary that the step updates, empty before
# the first; `count` numbers the updates of this fragment from 1.


def heavy_ball(lr: float, mu: float):
  """m <- mu * m + g; theta <- theta - lr * m."""

  def step(theta, g, state, count):
    state["m"] = mu * state.get("m", np.zeros_like(g)) + g
    return theta - lr * state["m"]

  return step


def nesterov(lr: float, mu: float):
  """m <- mu * m + g; theta <- theta - lr * (g + mu * m), as in optax and PyTorch."""

  def step(theta, g, state, count):
    state["m"] = mu * state.get("m", np.zeros_like(g)) + g
    return theta - lr * (g + mu * state["m"])

  return step


def adam(lr: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8):
  """Adam with bias correction, epsilon outside the root (arXiv 1412.6980, alg. 1)."""

  def step(theta, g, state, count):
    state["m"] = b1 * state.get("m", np.zeros_like(g)) + (1 - b1) * g
    state["v"] = b2 * state.get("v", np.zeros_like(g)) + (1 - b2) * g**2
    m_hat = state["m"] / (1 - b1**count)
    v_hat = state["v"] / (1 - b2**count)
    return theta - lr * m_hat / (np.sqrt(v_hat) + eps)

  return step


# --- The wire (section 2.4) -----------------------------------------------------


def float_values(exponent_bits: int, mantissa_bits: int) -> np.ndarray:
  """Magnitudes of all codes of an eXmY format and of the one code that would follow.

  In units of the smallest normal number; no infinities, no NaN. E3M0 gives
  0, 1, 2, 4, 8, 16, 32, 64 and, imagined, 128.
  """
  values = []
  for code in range(2 ** (exponent_bits + mantissa_bits) + 1):
    exponent, mantissa = divmod(code, 2**mantissa_bits)
    fraction = mantissa / 2**mantissa_bits
    values.append(fraction if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - 1))
  return np.array(values)


def nearest_code(magnitude: float, values: np.ndarray) -> int:
  """The code of the nearest of `values`; of two equally near ones, the even code."""
  distance = np.abs(values - magnitude)
  candidates = np.flatnonzero(distance == distance.min())
  return int(next((c for c in candidates if c % 2 == 0), candidates[0]))


def block_quantise(
  x: np.ndarray, block: int | None, exponent_bits: int = 3, mantissa_bits: int = 0
) -> np.ndarray:
  """What a receiver decodes of a flat array sent as eXmY codes with block scales.

  Args:
    x: (n,) values.
    block: consecutive values that share a scale; the last block may be shorter.
      None makes the array one block.
    exponent_bits: X of eXmY.
    mantissa_bits: Y of eXmY.

  Returns:
    (n,) values, each a code's value times the block's power of two: the smallest
    power for which the block's largest magnitude does not saturate, that is,
    does not round to the code that would follow the last.
  """
  values = float_values(exponent_bits, mantissa_bits)
  decoded = np.zeros_like(x)
  block = block or max(len(x), 1)
  for start in range(0, len(x), block):
    part = x[start : start + block]
    largest = np.abs(part).max()
    if largest == 0:
      continue
    # From a power that is surely too small, upwards; the last code is len - 2.
    power = math.floor(math.log2(largest)) - math.ceil(math.log2(values[-1])) - 2
    while nearest_code(largest / 2.0**power, values) > len(values) - 2:
      power += 1
    for i, value in enumerate(part):
      code = nearest_code(abs(value) / 2.0**power, values[:-1])
      decoded[start + i] = math.copysign(values[code] * 2.0**power, value)
  return decoded


def quantised(
  block: int | None,
  exponent_bits: int = 3,
  mantissa_bits: int = 0,
  scale_bytes: int = 1,
) -> Compress:
  """A `Compress` of eXmY codes, packed per tensor and layer, and their scales."""

  def compress(x, row):
    n = len(x)
    scales = math.ceil(n / (block or n))
    bits = 1 + exponent_bits + mantissa_bits
    num_bytes = math.ceil(n * bits / 8) + scales * scale_bytes
    return block_quantise(x, block, exponent_bits, mantissa_bits), num_bytes

  return compress


def largest_of_chunks(
  chunk: int, density: float, exponent_bits: int, mantissa_bits: int
) -> Compress:
  """A `Compress` of the largest values of each chunk; the last chunk gets zeros.

  The indices come first, then the kept values as eXmY codes with a scale per chunk.
  """

  def compress(x, row):
    length = min(chunk, len(x))
    k, width = math.ceil(density * length), math.ceil(math.log2(length))
    padded = np.concatenate([x, np.zeros(-len(x) % length)])
    decoded = np.zeros_like(padded)
    for start in range(0, len(x), length):
      order = np.argsort(-np.abs(padded[start : start + length]), kind="stable")
      kept = start + np.sort(order[:k])
      decoded[kept] = block_quantise(padded[kept], None, exponent_bits, mantissa_bits)
    chunks = len(padded) // length
    bits = 1 + exponent_bits + mantissa_bits
    num_bytes = math.ceil(chunks * k * width / 8) + math.ceil(chunks * k * bits / 8)
    return decoded[: len(x)], num_bytes + chunks

  return compress


def uncompressed(x: np.ndarray, row: int) -> tuple[np.ndarray, int]:
  """A `Compress` that sends float32."""
  return x, 4 * len(x)


# --- Training -------------------------------------------------------------------


@dataclass
class Result:
  """The result of a run.

  Attributes:
    outer: theta, the outer parameters.
    replicas: theta_m of each replica.
    state: per fragment, per key, the outer optimizer's state ({'m': ...}).
    log: ('send', t, p), ('update', t, p), ('merge', t, p, m), in order.
    payload: per send, the bytes that each replica sends to each other one.
  """

  outer: Params
  replicas: list[Params]
  state: list[dict[tuple, dict[str, np.ndarray]]]
  log: list[tuple] = field(default_factory=list)
  payload: list[int] = field(default_factory=list)

  def moment(self, name: str = "m") -> Params:
    """An outer moment laid out as parameters; zero where there was no update."""
    flat = {key: np.zeros_like(value) for key, value in split(self.outer).items()}
    for fragment in self.state:
      flat.update({key: s[name] for key, s in fragment.items() if name in s})
    return join(flat)


def increments(u: Callable[[int, int], Params]) -> InnerStep:
  """The inner step theta_m <- theta_m + u(m, t)."""

  def step(params, m, t):
    theta, add = split(params), split(u(m, t))
    return join({key: theta[key] + add[key] for key in theta})

  return step


def simulate(
  theta: Params,
  inner: InnerStep,
  fragments: Sequence[tuple[tuple[int, ...], bool]],
  *,
  T: int,
  H: int,
  tau: int | Sequence[int] = 0,
  alpha: float = 0.0,
  M: int,
  outer,
  compress: Compress = uncompressed,
  feedback: float = 0.0,
  keep: bool = False,
  stored: Callable[[np.ndarray], np.ndarray] = lambda x: x,
  drain: bool = True,
) -> Result:
  """T steps of Algorithm 2; line numbers in the comments are its own.

  Args:
    theta: initial parameters, of the outer model and of every replica.
    inner: the inner step.
    fragments: from `make_fragments`.
    T: inner steps.
    H: inner steps between two sends of one fragment.
    tau: overlap, one number or one per replica, each below H.
    alpha: mixing factor.
    M: replicas.
    outer: one of the outer optimizers above.
    compress: what the wire does to an outer gradient.
    feedback: beta of error feedback: a replica sends beta times what its earlier codes
      lost, plus the outer gradient.
    keep: whether a replica adds the steps since the send to what it merges.
    stored: rounds values to the type in which replicas keep their parameters. The outer
      gradient starts from the rounded outer parameters, which were merged.
    drain: whether fragments still in flight after step T are received.
  """
  taus = [tau] * M if isinstance(tau, int) else list(tau)
  assert len(taus) == M
  assert all(0 <= tau_m < H for tau_m in taus)
  P = len(fragments)
  theta_outer = split(theta)
  theta_m = [split(theta) for _ in range(M)]
  keys = [keys_of(fragment, theta_outer) for fragment in fragments]
  result = Result({}, [], [{key: {} for key in keys[p]} for p in range(P)])
  updates = [0] * P
  error: dict[tuple, np.ndarray] = {}  # Per replica and key.
  # Per fragment in flight: when it was sent, the mean of the decoded outer
  # gradients, the outer parameters once updated, and who has not merged yet.
  flight: dict[int, dict] = {}

  def update(p, t):
    delta = flight[p]["delta"]
    updates[p] += 1
    for key in keys[p]:
      theta_outer[key] = outer(
        theta_outer[key], delta[key], result.state[p][key], updates[p]
      )
    flight[p]["theta"] = {key: theta_outer[key].copy() for key in keys[p]}
    result.log.append(("update", t, p))

  def merge(p, m, t):
    if flight[p]["theta"] is None:  # the earliest arrival
      update(p, t)
    for key in keys[p]:
      local, merged = theta_m[m][key], flight[p]["theta"][key]
      theta_m[m][key] = stored(alpha * local + (1 - alpha) * merged)
      if keep:
        steps = local - flight[p]["start"][m][key]
        theta_m[m][key] = stored(theta_m[m][key] + steps)
    flight[p]["waiting"].remove(m)
    result.log.append(("merge", t, p, m))

  for t in range(1, T + 1):
    for m in range(M):  # lines 3 to 5
      stepped = split(inner(join(theta_m[m]), m, t))
      theta_m[m] = {key: stored(value) for key, value in stepped.items()}

    for p in sent_at(t, P, H):  # lines 6 to 8
      assert p not in flight
      delta = {key: np.zeros_like(theta_outer[key]) for key in keys[p]}
      payload = 0
      for m in range(M):
        payload = 0
        for key in keys[p]:
          delta_m = stored(theta_outer[key]) - theta_m[m][key]
          delta_m = delta_m + feedback * error.get((m, key), 0.0)
          decoded, num_bytes = compress(delta_m.ravel(), delta_m.shape[-1])
          error[m, key] = delta_m - decoded.reshape(delta_m.shape)
          delta[key] += decoded.reshape(delta_m.shape) / M
          payload += num_bytes
      flight[p] = {"sent": t, "delta": delta, "theta": None, "waiting": list(range(M))}
      flight[p]["start"] = [dict(flat) for flat in theta_m]
      result.log.append(("send", t, p))
      result.payload.append(payload)

    for p in list(flight):  # lines 9 to 12
      for m in list(flight[p]["waiting"]):
        if flight[p]["sent"] + taus[m] == t:
          merge(p, m, t)
      if not flight[p]["waiting"]:
        del flight[p]

  if drain:
    for p in list(flight):
      for m in list(flight[p]["waiting"]):
        merge(p, m, T)
  result.outer = join(theta_outer)
  result.replicas = [join(flat) for flat in theta_m]
  return result
