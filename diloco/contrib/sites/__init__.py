"""Sites that come and go, as in Decoupled DiLoCo (arXiv 2604.21428).

With `overlap.transport=sites`, which loads this plug-in, every site trains its replicas
by its own clock, and `coordinator/` relays the payloads (docs/sites.md). No JAX.
"""

import dataclasses
from typing import Any

from diloco.config import Config
from diloco.config.checks import divide
from diloco.config.combinations import DILOCO
from diloco.errors import ConfigError
from diloco.spec import plugins
from diloco.spec.fields import Count, NonNegative, Positive
from diloco.spec.plugins import Rule, Transport


@dataclasses.dataclass(frozen=True)
class SitesConfig(plugins.Extension):
  """Sites that come and go, with overlap.transport=sites (docs/sites.md)."""

  # K: number of sites, a divisor of M. 0: one site per replica.
  count: Count = 0
  # Fewest payloads with which a round closes.
  quorum: Positive = 1
  # Seconds that a round waits for the other sites after the quorum has sent.
  grace_s: NonNegative = 20.0
  # Seconds that the first site waits for the others before the first round.
  start_s: NonNegative = 300.0

  def check(self, c: Config) -> None:
    count = self.count or c.replicas
    if self.quorum > count:
      raise ConfigError(
        f"sites.quorum is {self.quorum}, but there are {count} sites; lower it."
      )
    divide("replicas", c.replicas, "sites.count", count)

  def free(self) -> tuple[str, ...]:
    return ("sites.quorum", "sites.grace_s", "sites.start_s")

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
