"""Sites that come and go, as in Decoupled DiLoCo (arXiv 2604.21428).

With `overlap.transport=sites`, which loads this plug-in, every site trains its replicas
by its own clock, and the sites meet in a folder or a bucket (docs/sites.md). No JAX.
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
  # Fewest payloads with which a round closes.
  quorum: Positive = 1
  # After the quorum, a round waits for late sites until the first sender needs the
  # result, tau inner steps after its send (the time of a step is measured). It waits at
  # most for this many seconds. If tau is 0, it waits for this many.
  grace_s: NonNegative = 20.0
  # A round waits for at least so many seconds after the quorum, if grace_s is not
  # less: networks and machines vary.
  least_grace_s: NonNegative = 2.0
  # Seconds that the first site waits for the others before the first round.
  start_s: NonNegative = 300.0
  # Seconds without a sign of a site after which it counts as gone. If it closed the
  # rounds, another site then takes its place.
  lost_s: Wait = 20.0
  # A payload whose norm is more than so many times the usual one does not count; 0: any
  # finite payload counts.
  most_norm: NonNegative = 10.0
  # A payload whose mean cosine with the others is less does not count, if there are two
  # others; -1: any counts. Honest ones may fall below 0 (2501.18512, figure 18: -0.1).
  least_cosine: Cosine = -1.0
  # Sequences per inner step of this site, all its replicas together. Sites may differ.
  # 0: its share of train.batch_size.
  batch_size: Count = 0
  # Share of the group's inner steps that this site trains, evenly spread. A site of
  # half the speed sets 0.5: it sends in every round, with half the steps.
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
        f" train.batch_size = {c.train.batch_size}, which bounds the weight of one;"
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
