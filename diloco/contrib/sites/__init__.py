"""Sites that come and go, as in Decoupled DiLoCo (arXiv 2604.21428).

With `overlap.transport=sites`, which loads this plug-in, every site trains its replicas
at its own speed. The sites meet in a folder or a bucket (docs/sites.md). No JAX.
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
Pace = Annotated[float, Range(0, 1, open=True)]
Wait = Annotated[float, Range(0.1)]


@dataclasses.dataclass(frozen=True)
class SitesConfig(plugins.Extension):
  """Sites that come and go, with overlap.transport=sites (docs/sites.md)."""

  # K: number of sites, a divisor of M. 0: one site per replica.
  count: Count = 0
  # Smallest number of payloads with which a round closes.
  quorum: Positive = 1
  # Longest wait of a round for late sites after the quorum, in seconds. A round waits
  # only until the first sender needs the result, tau inner steps after its send (the
  # time of a step is measured). If tau is 0, a round waits for all of grace_s.
  grace_s: NonNegative = 20.0
  # Shortest wait of a round for late sites after the quorum, in seconds: tau short
  # steps may take less time than a usual delay. A smaller grace_s counts instead.
  least_grace_s: NonNegative = 2.0
  # Seconds that the first site waits for the others before the first round.
  start_s: NonNegative = 300.0
  # A site counts as gone after so many seconds without a new record. If this site
  # closed the rounds, another site then takes over.
  lost_s: Wait = 20.0
  # A payload does not count if its norm is more than this many times the usual norm. 0:
  # every finite payload counts.
  most_norm: NonNegative = 10.0
  # A payload does not count if its mean cosine with at least two other payloads is
  # smaller than this. -1: every payload counts. Correct payloads may have cosines below
  # 0 (2501.18512, figure 18: -0.1).
  least_cosine: Cosine = -1.0
  # Sequences per inner step of this site, over all its replicas. Sites may differ. 0:
  # the site's share of train.batch_size.
  batch_size: Count = 0
  # Share of the group's inner steps that this site trains, evenly spread. A site of
  # half the speed sets 0.5: it sends in every round, after half as many steps.
  pace: Pace = 1.0

  rules = (
    Rule(
      "overlap.transport",
      "sites",
      "which carries outer gradients",
      {"algorithm": DILOCO},
    ),
  )

  def check(self, c: Config) -> None:
    count = self.count or c.replicas
    if self.quorum > count:
      raise ConfigError(
        f"sites.quorum is {self.quorum}, but there are {count} sites; lower it."
      )
    divide("replicas", c.replicas, "sites.count", count)
    for name, n in {
      "a site's replicas": c.replicas // count,
      "the data.shards of a site": c.shards // count,
    }.items():
      divide("sites.batch_size", self.batch_size, name, n)
    if self.batch_size > c.train.batch_size:
      raise ConfigError(
        f"sites.batch_size is {self.batch_size}, but all sites together have"
        f" train.batch_size = {c.train.batch_size}, which bounds a site's weight;"
        " raise train.batch_size for all sites."
      )
    if self.pace * c.sync_every < 1:
      raise ConfigError(
        f"sites.pace is {self.pace}, so this site would train no step in some of the"
        f" rounds of sync_every = {c.sync_every} steps; raise it to at least"
        f" {1 / c.sync_every:.3g}."
      )

  def free(self) -> tuple[str, ...]:
    return tuple(f"sites.{x.name}" for x in dataclasses.fields(self)[1:])


def make_part(c: Config, site: int, address: str) -> Any:
  """Imports `site.make_part`, which needs JAX, and calls it."""
  from diloco.contrib.sites.site import make_part

  return make_part(c, site, address)


plugins.register("fields", "sites", SitesConfig)
plugins.register(
  "overlap.transport",
  "sites",
  Transport(
    at_hosts=True,
    needs="--group and --site (docs/sites.md)",
    make_part=make_part,
    summed=("sites.count",),
  ),
)
