"""Parametric forms of L(N, M), Section 6.5 of arXiv 2503.09799.

Huber loss on logarithms, L-BFGS from random starts, selection on held-out data.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from scipy import optimize, special

from diloco.scaling_laws.fits import Array, Numbers, check_points

# Each form maps parameters q and (log N, log M, M) to log L and its gradient in q.
# A, B and C are positive and enter by their logarithms a, b, c, as in Hoffmann et
# al. (2022): sums become log-sum-exp.
Value = tuple[Array, Array]


def _product(q: Array, n: Array, m: Array, replicas: Array) -> Value:
  del replicas
  return q[0] + q[1] * n + q[2] * m, np.stack([np.ones_like(n), n, m])


def _with_constant(terms: Array, gradients: list[Array]) -> Value:
  """log(sum_k exp terms_k) and its gradient: softmax times each term's own."""
  value = special.logsumexp(terms, axis=0)
  weights = np.exp(terms - value)
  return value, np.concatenate([w * g for w, g in zip(weights, gradients)])


def _product_plus(q: Array, n: Array, m: Array, replicas: Array) -> Value:
  term, gradient = _product(q, n, m, replicas)
  one = np.ones_like(n)
  return _with_constant(np.stack([term, q[3] * one]), [gradient, one[None]])


def _exponent_plus(q: Array, n: Array, m: Array, replicas: Array) -> Value:
  one = np.ones_like(n)
  term = q[0] + (q[1] + q[2] * replicas) * n
  gradient = np.stack([one, n, replicas * n])
  return _with_constant(np.stack([term, q[3] * one]), [gradient, one[None]])


def _sum_plus(q: Array, n: Array, m: Array, replicas: Array) -> Value:
  one = np.ones_like(n)
  terms = np.stack([q[0] + q[1] * n, q[2] + q[3] * m, q[4] * one])
  gradients = [np.stack([one, n]), np.stack([one, m]), one[None]]
  return _with_constant(terms, gradients)


@dataclasses.dataclass(frozen=True)
class Form:
  """A family L(N, M).

  Attributes:
    name: as the paper's Table 13 writes it.
    parameters: names in the order of q.
    logs: which of them q holds as logarithms.
    low, high: box of the random starts, in q.
    log_value: q, log N, log M, M -> (log L [n], gradient [k, n]).
  """

  name: str
  parameters: tuple[str, ...]
  logs: tuple[str, ...]
  low: tuple[float, ...]
  high: tuple[float, ...]
  log_value: Callable[[Array, Array, Array, Array], Value]


FORMS = (
  Form(
    "A*N^alpha*M^beta",
    ("A", "alpha", "beta"),
    ("A",),
    (0, -0.5, 0),
    (10, 0, 0.1),
    _product,
  ),
  Form(
    "A*N^alpha*M^beta+C",
    ("A", "alpha", "beta", "C"),
    ("A", "C"),
    (0, -0.5, 0, -3),
    (10, 0, 0.1, 1),
    _product_plus,
  ),
  Form(
    "A*N^(alpha+beta*M)+C",
    ("A", "alpha", "beta", "C"),
    ("A", "C"),
    (0, -0.5, 0, -3),
    (10, 0, 0.01, 1),
    _exponent_plus,
  ),
  Form(
    "A*N^alpha+B*M^beta+C",
    ("A", "alpha", "B", "beta", "C"),
    ("A", "B", "C"),
    (0, -0.5, -5, 0, -3),
    (10, 0, 0, 1, 1),
    _sum_plus,
  ),
)
