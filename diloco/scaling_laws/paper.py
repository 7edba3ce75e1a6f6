"""The paper's own numbers (arXiv 2503.09799), from `papers/`.

Which N? The paper does not say which number stands for N in its fits. `nominal` reads
the names of Table 4 (35e6 to 2.4e9, with 335M). The others are 12 layers width^2 +
vocabulary width, positions and norms aside: `padded` with the 32,768 rows of the
embedding, `words` with its 32,000 words in vocabulary (Section 3). `words` is the
default: it comes nearest to Tables 7, 10 and 11.
"""

import csv
import functools
import importlib.resources
from collections.abc import Sequence

import numpy as np

from diloco.config.fields import ModelConfig
from diloco.model.shapes import matrix_params
from diloco.scaling_laws import optimum, parametric
from diloco.scaling_laws.fits import Fit, PowerLaw, fit_power_law
from diloco.scaling_laws.uncertainty import Array

# Tokens per sequence; the unit of the paper's batch laws.
SEQ_LEN = 2048
WORDS = 32_000
# Tokens per parameter (Section 3.1).
CHINCHILLA = 20
REPLICAS = (1, 2, 4, 8)
ALGORITHMS = ("data_parallel", *(f"diloco_M{m}" for m in REPLICAS))
SIZES = {"words": WORDS, "padded": 32_768, "nominal": None}


@functools.cache
def read(name: str) -> list[dict[str, str]]:
  """The rows of `papers/<name>.csv`."""
  path = importlib.resources.files("diloco.scaling_laws") / "papers" / f"{name}.csv"
  with path.open() as file:
    return list(csv.DictReader(file))


def number(text: str) -> float:
  """35M, 2.4B or 4e9 as a number.

  Raises:
    ValueError: the text is no size.
  """
  unit = {"M": 1e6, "B": 1e9}.get(text[-1:], 1.0)
  try:
    # Rounding takes the binary error of 2.4 * 1e9 away.
    value = round(float(text[:-1] if unit > 1 else text) * unit) * 1.0
  except (ValueError, OverflowError):
    value = 0.0
  if value <= 0:
    raise ValueError(f"size is {text!r}; write one such as 35M, 2.4B or 4e9.")
  return value


def num_params(layers: int, dim: int, vocab_size: int = WORDS) -> float:
  """N of a decoder without positions and norms, as the laws count it."""
  m = ModelConfig(num_layers=layers, dim=dim, vocab_size=vocab_size)
  return float(matrix_params(m))


def model_sizes(sizes: str = "words", models: Sequence[str] = ()) -> Array:
  """N of models of Table 3.

  Args:
    sizes: one of SIZES, see the module's docstring.
    models: names as in Table 3, such as 4B; the seven of Table 4 if empty.

  Raises:
    ValueError: sizes is not one of SIZES.
  """
  if sizes not in SIZES:
    raise ValueError(f"sizes is {sizes!r}; choose one of {', '.join(SIZES)}.")
  rows = read("table3_models")
  rows = [r for r in rows if r["scale"] in models] if models else rows[:7]
  vocab_size = SIZES[sizes]
  if vocab_size is None:
    # Table 4 calls the model of Table 3's 330M 335M.
    return np.array([number(r["scale"].replace("330M", "335M")) for r in rows])
  shapes = [(int(r["layers"]), int(r["qkv_dim"])) for r in rows]
  return np.array([num_params(*shape, vocab_size) for shape in shapes])


def losses(algorithm: str) -> Array:
  """Table 4: evaluation loss of the seven models, float64 [7]."""
  column = "dp" if algorithm == "data_parallel" else algorithm
  return np.array([float(row[column]) for row in read("table4_loss")])


def loss_grid(sizes: str = "words") -> tuple[Array, Array, Array]:
  """DiLoCo's 28 cells of Table 4: N, M and loss, float64 [28] each."""
  n = np.tile(model_sizes(sizes), len(REPLICAS))
  m = np.repeat(np.array(REPLICAS, float), len(n) // len(REPLICAS))
  return n, m, np.concatenate([losses(f"diloco_M{m}") for m in REPLICAS])


def law(table: str, algorithm: str) -> PowerLaw:
  """A row of Table 7, 8 or 9; the batch law is turned into tokens.

  Args:
    table: loss, inner_lr or batch_size.
    algorithm: one of ALGORITHMS, or joint for the rows of Table 10.

  Raises:
    ValueError: the paper has no law for the algorithm.
  """
  if algorithm == "joint":
    row = next(r for r in read("table10_joint_powerlaw") if r["quantity"] == table)
  elif algorithm in ALGORITHMS:
    names = {
      "loss": "table7_loss_powerlaw",
      "inner_lr": "table8_lr_powerlaw",
      "batch_size": "table9_batch_powerlaw",
    }
    row = next(r for r in read(names[table]) if r["algorithm"] == algorithm)
  else:
    raise ValueError(
      f"the paper has no law of its own for {algorithm}, only for"
      f" {', '.join(ALGORITHMS)}; use the joint law."
    )
  found = PowerLaw(float(row["A"]), float(row["alpha"]), float(row.get("beta") or 0))
  return found.times(SEQ_LEN) if table == "batch_size" else found


@functools.cache
def loss_fit(algorithm: str, sizes: str = "words") -> Fit:
  """The loss law of Table 7, or of Table 10 for `joint`, fitted to Table 4.

  Raises:
    ValueError: the paper has no losses of the algorithm.
  """
  if algorithm == "joint":
    n, m, y = loss_grid(sizes)
    return fit_power_law(n, y, m, "the joint loss")
  law("loss", algorithm)  # Says which algorithms there are.
  name = f"the loss of {algorithm}"
  return fit_power_law(model_sizes(sizes), losses(algorithm), name=name)


@functools.cache
def floor_fit(name: str, sizes: str = "words") -> optimum.Optimum:
  """A power law with a constant added: A N^alpha M^beta + C for `joint`, else of an
  algorithm alone A N^alpha + C. It foresees 4B and 10B better (Tables 5 and 12).

  Raises:
    ValueError: the paper has no losses of the algorithm.
  """
  if name == "joint":
    return optimum.fit_optimum(parametric.FORMS[1], *loss_grid(sizes))
  law("loss", name)  # Says which algorithms there are.
  n, y = model_sizes(sizes), losses(name)
  return optimum.fit_optimum(parametric.FLOOR, n, np.ones_like(n), y)
