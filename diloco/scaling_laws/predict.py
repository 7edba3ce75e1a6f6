"""The loss that a run is expected to reach, from the paper's laws or one's own."""

import dataclasses

from diloco.scaling_laws import paper
from diloco.scaling_laws.fits import Fit
from diloco.scaling_laws.optimum import Optimum
from diloco.scaling_laws.results import Laws
from diloco.scaling_laws.uncertainty import Interval

METHODS = ("joint", "independent")


@dataclasses.dataclass(frozen=True)
class Prediction:
  """A loss with the interval for one new run; None where it cannot be known."""

  loss: float
  interval: Interval


def law_name(algorithm: str, replicas: int, method: str) -> str:
  """data_parallel, joint or diloco_M<replicas>.

  Raises:
    ValueError: method is none of METHODS.
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
  level: float = 0.9,
) -> Prediction:
  """Evaluation loss at 20 tokens per parameter (or those of one's own runs), and the
  interval for a new run.

  Args:
    params: N.
    replicas: M.
    method: joint or independent.
    algorithm: data_parallel, diloco or streaming.
    laws: of one's own runs; None takes the paper's.
    floor: whether the paper's law gets a constant that the loss does not go below.
    level: of the interval.

  Raises:
    ValueError: there is no law for this M.
  """
  name = law_name(algorithm, replicas, method)
  law: Fit | Optimum
  if laws is not None:
    law = own_laws(laws, name, algorithm)[1].loss
  else:
    law = paper.floor_fit(name) if floor else paper.loss_fit(name)
  interval = law.predict_interval(params, replicas, level)
  return Prediction(law(params, replicas), interval)


def measured(params: float, algorithm: str, replicas: int, method: str) -> float | None:
  """The paper's loss of this run, if it trained it (Tables 5 and 12), else None.

  It trained no Streaming DiLoCo.
  """
  if algorithm == "streaming":
    return None
  name = "data_parallel" if algorithm == "data_parallel" else f"diloco_M{replicas}"
  how = "independent" if algorithm == "data_parallel" else method
  for scale in ("4B", "10B"):
    sizes = [paper.model_sizes(s, [scale])[0] for s in paper.SIZES]
    if min(sizes) <= params <= max(sizes):
      for row in paper.read("table12_fit_extrapolation"):
        if (row["algorithm"], row["fit"]) == (name, how):
          return float(row[f"loss_{scale}"])
  return None


def own_laws(laws: dict[str, Laws], name: str, algorithm: str) -> tuple[str, Laws]:
  """The law called `joint` or `diloco_M2` among one's own, and its name there.

  Laws of the algorithm itself come first, then those of diloco or streaming.

  Raises:
    ValueError: there is none.
  """
  short = name.removeprefix("diloco_")
  for prefix in ("", f"{algorithm}_", "diloco_", "streaming_"):
    if prefix + short in laws:
      return prefix + short, laws[prefix + short]
  raise ValueError(
    f"the results have no law {name}, only {', '.join(laws)}; add runs, or choose"
    " another method or number of replicas."
  )
