"""How long a step computes, without communication: of a config, and in the papers."""

from diloco.config import Config
from diloco.simulate.limits import check
from diloco.spec.fields import Range
from diloco.spec.shapes import flops_per_token

# Defaults of the simulators: the peak of a TPU v5e, and the share that a run reaches.
PEAK_TFLOPS, MFU = 197, 0.4


def step_time(
  c: Config, chips: int = 1, peak_tflops: float = PEAK_TFLOPS, mfu: float = MFU
) -> float:
  """Computes the seconds per step: FLOPs / (chips * peak * share of the peak).

  The FLOPs include those of the attention scores.

  Args:
    chips: number of chips of all replicas together.
    peak_tflops: peak TFLOP/s of one chip.
    mfu: share of the peak that the run reaches.
  """
  for name, value in (("chips", chips), ("peak_tflops", peak_tflops)):
    check(name, value, Range(0, open=True))
  check("mfu", mfu, Range(0, 1, open=True))
  flops = flops_per_token(c.model) * c.tokens_per_step
  return flops / (chips * (peak_tflops * 1e12) * mfu)


def papers_step_time(step_time: float, layers: int) -> float:
  """Returns the seconds of a simulated step, of those that the papers' tables print.

  There, 3 L nodes take the printed time. The simulated step lacks one of these nodes
  and is shorter by its time: the first layer needs no gradient with respect to its
  input. This explains all data-parallel and DiLoCo cells of Table 4 of Streaming
  DiLoCo. With nodes of T / (3 L - 1), three cells differ.
  """
  return step_time * (3 * layers - 1) / (3 * layers)
