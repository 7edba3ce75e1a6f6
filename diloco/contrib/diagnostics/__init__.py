"""Diagnostics: measures some syncs layer by layer (docs/watch.md). No JAX."""

import dataclasses

from diloco.config import Config
from diloco.config.combinations import ON_DEVICES
from diloco.errors import ConfigError
from diloco.spec import plugins
from diloco.spec.fields import Count
from diloco.spec.plugins import OuterStep, Rule


@dataclasses.dataclass(frozen=True)
class Diagnostics(plugins.Extension):
  """Measures some syncs layer by layer (docs/watch.md)."""

  # Measures the first sync of each fragment and then every n-th, layer by layer:
  # cosine, drift, coding error, stable rank, update, and the loss around the merge.
  # n = 4 costs 1.1 to 1.3% of the sample run's time. Skips final syncs. 0: never.
  every: Count = 0

  wraps_last = True
  rules = (
    Rule("diagnostics.every", None, "which compares replicas on devices", ON_DEVICES),
  )

  def free(self) -> tuple[str, ...]:
    return ("diagnostics.",)

  def wrap(self, c: Config, step: OuterStep) -> OuterStep:
    import jax

    from diloco.contrib.diagnostics.outer_step import MeasuredStep

    if self.every and jax.config.jax_debug_nans:  # type: ignore[attr-defined, unused-ignore]
      raise ConfigError(
        f"diagnostics.every is {self.every}, whose metrics have NaN where nothing is"
        " measured, but JAX_DEBUG_NANS is set; unset one of them."
      )
    if not self.every:
      return step
    return dataclasses.replace(step, run=MeasuredStep(c, self.every, step.run))


plugins.register("fields", "diagnostics", Diagnostics)
