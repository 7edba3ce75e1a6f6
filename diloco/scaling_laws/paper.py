"""Reads the numbers that the paper prints (arXiv 2503.09799), from `papers/`.

The paper does not say which N it fitted, so SIZES has three readings of N. `nominal`
takes N from the model names of Table 4 (35e6 to 2.4e9; 335M, not 330M). The other two
readings compute 12 * layers * width^2 + vocabulary * width, without positions and
norms. For `padded`, the vocabulary is the 32,768 rows of the embedding; for `words`, it
is the 32,000 words (Section 3). `words` is the default, because it comes nearest to
Tables 7, 10 and 11.
"""

import functools
from collections.abc import Sequence

import numpy as np

from diloco.scaling_laws import parametric
from diloco.scaling_laws.fits import Array, Fit, PowerLaw, fit_power_law
from diloco.spec.fields import ModelConfig
from diloco.spec.shapes import matrix_params
from diloco.util.command import parse_count
from diloco.util.shipped import papers_table

# Tokens per sequence; the paper's batch laws count sequences of this length.
SEQ_LEN = 2048
WORDS = 32_000
# Tokens per parameter (Section 3.1).
CHINCHILLA = 20
REPLICAS = (1, 2, 4, 8)
ALGORITHMS = ("data_parallel", *(f"diloco_M{m}" for m in REPLICAS))
# {reading of N: vocabulary size}. None: N is the rounded number in a model's name.
SIZES = {"words": WORDS, "padded": 32_768, "nominal": None}
# Models trained with predicted hyperparameters (Tables 5 and 12).
LARGE = ("4B", "10B")
# Reads the rows of `papers/<name>.csv`.
read = functools.cache(functools.partial(papers_table, "scaling_laws"))


def num_params(layers: int, dim: int, vocab_size: int = WORDS) -> float:
  """Counts N, a decoder's parameters, as the laws do: without positions and norms."""
  m = ModelConfig(num_layers=layers, dim=dim, vocab_size=vocab_size)
  return float(matrix_params(m))


def model_sizes(sizes: str = "words", models: Sequence[str] = ()) -> Array:
  """Returns N of models of Table 3, float64 [n].

  Args:
    sizes: one of SIZES.
    models: names as in Table 3, such as 4B. Empty means the seven models of Table 4.
  """
  rows = read("table3_models")
  rows = [r for r in rows if r["scale"] in models] if models else rows[:7]
  vocab_size = SIZES[sizes]
  if vocab_size is None:
    # The model that Table 3 calls 330M is 335M in Table 4.
    return np.array([parse_count(r["scale"].replace("330M", "335M")) for r in rows])
  shapes = [(int(r["layers"]), int(r["qkv_dim"])) for r in rows]
  return np.array([num_params(*shape, vocab_size) for shape in shapes])


def losses(algorithm: str) -> Array:
  """Returns the evaluation losses of the seven models in Table 4, float64 [7]."""
  column = "dp" if algorithm == "data_parallel" else algorithm
  return np.array([float(row[column]) for row in read("table4_loss")])


def loss_grid(sizes: str = "words") -> tuple[Array, Array, Array]:
  """Returns N, M and loss of DiLoCo's 28 cells in Table 4, float64 [28] each."""
  n = np.tile(model_sizes(sizes), len(REPLICAS))
  m = np.repeat(np.array(REPLICAS, float), len(n) // len(REPLICAS))
  return n, m, np.concatenate([losses(f"diloco_M{m}") for m in REPLICAS])


def measured(algorithm: str, fit: str, scale: str) -> float | None:
  """Returns the loss of a run of Table 12, or None if the paper has no such run.

  Args:
    algorithm: one of ALGORITHMS.
    fit: joint or independent, the kind of laws that gave the hyperparameters.
    scale: one of LARGE.
  """
  for row in read("table12_fit_extrapolation"):
    if (row["algorithm"], row["fit"]) == (algorithm, fit):
      return float(row[f"loss_{scale}"])
  return None


def law(quantity: str, algorithm: str) -> PowerLaw:
  """Reads a law of Tables 7 to 10; converts the batch law to tokens.

  Args:
    quantity: loss, inner_lr or batch_size.
    algorithm: one of ALGORITHMS, or joint for the rows of Table 10.

  Raises:
    ValueError: the paper has no law for the algorithm.
  """
  _check_algorithm(algorithm)
  rows = read("tables7_to_10_powerlaws")
  asked = (quantity, algorithm)
  row = next(r for r in rows if (r["quantity"], r["algorithm"]) == asked)
  unit = SEQ_LEN if quantity == "batch_size" else 1
  return PowerLaw(float(row["A"]) * unit, float(row["alpha"]), float(row["beta"]))


@functools.cache
def loss_fit(algorithm: str, sizes: str = "words") -> Fit:
  """Fits the loss law of Table 7, or of Table 10 for `joint`, to Table 4.

  Raises:
    ValueError: the paper has no losses of the algorithm.
  """
  n, m, y = _points(algorithm, sizes)
  replicas = m if algorithm == "joint" else None
  return fit_power_law(n, y, replicas, f"the loss of {algorithm}")


@functools.cache
def floor_fit(algorithm: str, sizes: str = "words") -> parametric.Optimum:
  """Fits A N^alpha + C, or A N^alpha M^beta + C for `joint`, to Table 4.

  With C, a law predicts the losses at 4B and 10B better than without (Tables 5, 12).

  Raises:
    ValueError: the paper has no losses of the algorithm.
  """
  form = parametric.FORMS[1] if algorithm == "joint" else parametric.FLOOR
  return parametric.fit_optimum(form, *_points(algorithm, sizes))


def _points(algorithm: str, sizes: str) -> tuple[Array, Array, Array]:
  """Returns N, M and loss of an algorithm in Table 4; `joint` is DiLoCo with any M."""
  _check_algorithm(algorithm)
  if algorithm == "joint":
    return loss_grid(sizes)
  n = model_sizes(sizes)
  return n, np.ones_like(n), losses(algorithm)


def _check_algorithm(algorithm: str) -> None:
  if algorithm not in (*ALGORITHMS, "joint"):
    raise ValueError(
      f"the paper has no separate law for {algorithm}, only for"
      f" {', '.join(ALGORITHMS)}; use the joint law."
    )
