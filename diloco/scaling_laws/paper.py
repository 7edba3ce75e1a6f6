"""The paper's own numbers (arXiv 2503.09799), from `papers/`.

Which N? The paper names its models by rounded sizes. `nominal` reads the names of
Table 4 (35e6 to 2.4e9, with 335M); `exact` is 12 layers width^2 + vocabulary width,
positions and norms aside.
"""

import csv
import functools
import importlib.resources

import numpy as np

from diloco.scaling_laws.fits import Array, PowerLaw

# Tokens per sequence; the unit of the paper's batch laws.
SEQ_LEN = 2048
VOCAB_SIZE = 32_768
REPLICAS = (1, 2, 4, 8)
ALGORITHMS = ("data_parallel", *(f"diloco_M{m}" for m in REPLICAS))
SIZES = ("nominal", "exact")


@functools.cache
def read(name: str) -> list[dict[str, str]]:
  """The rows of `papers/<name>.csv`."""
  path = importlib.resources.files("diloco.scaling_laws") / "papers" / f"{name}.csv"
  with path.open() as file:
    return list(csv.DictReader(file))


def number(text: str) -> float:
  """35M or 2.4B as a number."""
  units = {"M": 1e6, "B": 1e9}
  # Rounding takes the binary error of 2.4 * 1e9 away.
  return round(float(text[:-1]) * units[text[-1]]) * 1.0


def model_sizes(kind: str = "nominal") -> Array:
  """N of the seven models of Table 4, float64 [7].

  Raises:
    ValueError: kind is not one of SIZES.
  """
  if kind == "nominal":
    return np.array([number(row["N"]) for row in read("table4_loss")])
  if kind == "exact":
    return np.array([exact_size(r) for r in read("table3_models")[:7]])
  raise ValueError(f"sizes is {kind!r}; choose one of {', '.join(SIZES)}.")


def exact_size(row: dict[str, str]) -> float:
  """12 L d^2 + V d of a row of Table 3."""
  d = int(row["qkv_dim"])
  return float(12 * int(row["layers"]) * d**2 + VOCAB_SIZE * d)


def losses(algorithm: str) -> Array:
  """Table 4: evaluation loss of the seven models, float64 [7]."""
  column = "dp" if algorithm == "data_parallel" else algorithm
  return np.array([float(row[column]) for row in read("table4_loss")])


def loss_grid(kind: str = "nominal") -> tuple[Array, Array, Array]:
  """DiLoCo's 28 cells of Table 4: N, M and loss, float64 [28] each."""
  n = np.tile(model_sizes(kind), len(REPLICAS))
  m = np.repeat(np.array(REPLICAS, float), len(n) // len(REPLICAS))
  return n, m, np.concatenate([losses(f"diloco_M{m}") for m in REPLICAS])


def law(table: str, algorithm: str) -> PowerLaw:
  """A row of Table 7, 8 or 9; the batch law is turned into tokens.

  Args:
    table: loss, inner_lr or batch_size.
    algorithm: one of ALGORITHMS, or joint for the rows of Table 10.
  """
  if algorithm == "joint":
    row = next(r for r in read("table10_joint_powerlaw") if r["quantity"] == table)
  else:
    names = {
      "loss": "table7_loss_powerlaw",
      "inner_lr": "table8_lr_powerlaw",
      "batch_size": "table9_batch_powerlaw",
    }
    row = next(r for r in read(names[table]) if r["algorithm"] == algorithm)
  found = PowerLaw(float(row["A"]), float(row["alpha"]), float(row.get("beta") or 0))
  return found.times(SEQ_LEN) if table == "batch_size" else found
