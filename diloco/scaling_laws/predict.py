"""Predicts the loss of a run, from the paper's laws or from your own."""

import dataclasses

from diloco.scaling_laws import paper
from diloco.scaling_laws.fits import Interval, LeastSquares, show
from diloco.scaling_laws.results import Laws

METHODS = ("joint", "independent")


@dataclasses.dataclass(frozen=True)
class Prediction:
  """A loss in nats per token, with its 90% interval for one new run."""

  loss: float
  interval: Interval

  def __str__(self) -> str:
    return show(self.loss, self.interval, ".3f")


def law_name(algorithm: str, replicas: int, method: str) -> str:
  """Names the law of a run: data_parallel, joint or diloco_M<replicas>.

  Raises:
    ValueError: the method is not one of METHODS.
  """
  if method not in METHODS:
    raise ValueError(f"method is {method!r}; choose one of {', '.join(METHODS)}.")
  if algorithm == "data_parallel":
    return algorithm
  return "joint" if method == "joint" else f"diloco_M{replicas}"


def predict(
  params: float,
  replicas: int = 1,
  method: str = "joint",
  algorithm: str = "diloco",
  laws: dict[str, Laws] | None = None,
  floor: bool = False,
) -> Prediction:
  """Predicts the loss at 20 tokens per parameter, or at the ratio of your own runs.

  Args:
    params: N.
    replicas: M.
    method: joint or independent.
    algorithm: data_parallel, diloco or streaming.
    laws: laws of your own runs; None: the paper's laws.
    floor: whether to use the paper's law with a floor C, below which no loss falls.

  Raises:
    ValueError: there is no law for this M.
  """
  name = law_name(algorithm, replicas, method)
  if laws is not None:
    law: LeastSquares = own_laws(laws, name, algorithm)[1].loss
  else:
    law = paper.floor_fit(name) if floor else paper.loss_fit(name)
  return Prediction(law(params, replicas), law.predict_interval(params, replicas))


def measured(params: float, replicas: int, method: str, algorithm: str) -> float | None:
  """Returns the loss that the paper measured for this run (Tables 5 and 12), or None.

  The paper has no runs of Streaming DiLoCo.
  """
  plain = algorithm == "data_parallel"
  name = algorithm if plain else f"{algorithm}_M{replicas}"
  for scale in paper.LARGE:
    sizes = [paper.model_sizes(s, [scale])[0] for s in paper.SIZES]
    if min(sizes) <= params <= max(sizes):
      return paper.measured(name, "independent" if plain else method, scale)
  return None


def own_laws(laws: dict[str, Laws], name: str, algorithm: str) -> tuple[str, Laws]:
  """Finds your own laws by a name such as joint or diloco_M2; returns name and laws.

  Looks for laws of `algorithm` first, then of diloco, then of streaming.

  Raises:
    ValueError: there are no such laws.
  """
  short = name.removeprefix("diloco_")
  for prefix in ("", f"{algorithm}_", "diloco_", "streaming_"):
    if prefix + short in laws:
      return prefix + short, laws[prefix + short]
  raise ValueError(
    f"the results have no law {name}, only {', '.join(laws)}; add runs, or choose"
    " another --algorithm, --method or --replicas."
  )
