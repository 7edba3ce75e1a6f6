"""Sites that come and go, as in Decoupled DiLoCo (arXiv 2604.21428).

With `overlap.transport=sites`, which loads this plug-in, every site trains its replicas
by its own clock, and `coordinator/` relays the payloads (docs/sites.md). No JAX.
"""

import dataclasses
from typing import Annotated, Any

from diloco.config import Config
from diloco.config.checks import divide
from diloco.config.combinations import DILOCO
from diloco.errors import ConfigError
from diloco.spec import plugins
from diloco.spec.fields import Count, NonNegative, Positive, Range
from diloco.spec.plugins import Rule, Transport

Cosine = Annotated[float, Range(-1, 1)]
Seconds = Annotated[float, Range(0.1)]


@dataclasses.dataclass(frozen=True)
class SitesConfig(plugins.Extension):
  """Sites that come and go, with overlap.transport=sites (docs/sites.md)."""

  # K: number of sites, a divisor of M. 0: one site per replica.
  count: Count = 0
  # Fewest payloads with which a round closes.
  quorum: Positive = 1
  # After the quorum, a round waits for the other sites until it is needed: for what is
  # left of tau inner steps, whose time is measured, and at most for so many seconds. If
  # tau is 0, it waits for so many seconds.
  grace_s: NonNegative = 20.0
  # A round waits for at least so many seconds after the quorum, if grace_s is not
  # less: networks and machines vary.
  least_grace_s: NonNegative = 2.0
  # Seconds that the first site waits for the others before the first round.
  start_s: NonNegative = 300.0
  # With a folder instead of a coordinator: seconds without a sign of a site after which
  # it counts as gone, and after which another site closes the rounds in its place.
  lost_s: Seconds = 20.0
  # A payload whose norm is more than so many times the usual one does not count; 0: any
  # finite payload counts.
  most_norm: NonNegative = 10.0
  # A payload whose mean cosine with the others is less does not count, if there are two
  # others; -1: any counts. Honest ones may fall below 0 (2501.18512, figure 18: -0.1).
  least_cosine: Cosine = -1.0

  def check(self, c: Config) -> None:
    count = self.count or c.replicas
    if self.quorum > count:
      raise ConfigError(
        f"sites.quorum is {self.quorum}, but there are {count} sites; lower it."
      )
    divide("replicas", c.replicas, "sites.count", count)

  def free(self) -> tuple[str, ...]:
    return tuple(f"sites.{x.name}" for x in dataclasses.fields(self)[1:])

  def summed(self) -> tuple[str, ...]:
    return ("sites.count",)


def make_part(*args: Any) -> Any:
  """Imports `site.make_part`, which needs JAX, and calls it."""
  from diloco.contrib.sites import site

  return site.make_part(*args)


plugins.register("sites", SitesConfig)
plugins.TRANSPORTS["sites"] = Transport(
  at_hosts=True, needs="--coordinator and --site (docs/sites.md)", make_part=make_part
)
NEEDS = {"algorithm": DILOCO}
plugins.RULES.append(
  Rule("overlap.transport", "sites", "which carries outer gradients", NEEDS)
)
