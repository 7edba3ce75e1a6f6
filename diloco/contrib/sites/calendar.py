"""All rounds of a run and one site's part in them, from the config. No JAX."""

import bisect
import dataclasses
import functools
import math
from collections.abc import Collection

from diloco.config import Config, changed
from diloco.contrib.sites import SitesConfig
from diloco.errors import ConfigError
from diloco.spec import shapes, sizes


@dataclasses.dataclass(frozen=True)
class Calendar:
  """The rounds of a run of several sites; `config` is the config of the whole run."""

  config: Config

  @functools.cached_property
  def rounds(self) -> tuple[tuple[int, int], ...]:
    """The (step t, fragment p) of every round, in the order of the sends."""
    c, schedule = self.config, self.config.make_schedule()
    fragments = range(schedule.num_fragments)
    sends = [
      (schedule.first_send(p) + k * c.sync_every, p)
      for p in fragments
      for k in range(schedule.num_sends(p, c.train.steps))
    ]
    last = c.train.steps + max(c.overlap.taus) + 1
    return (*sorted(sends), *((last, p) for p in fragments if c.outer.final_sync))

  @functools.cached_property
  def number(self) -> dict[tuple[int, int], int]:
    """The number of each round: {(step, fragment): round}."""
    return {pair: r for r, pair in enumerate(self.rounds)}

  @property
  def sites(self) -> int:
    """The number of sites, K."""
    return self.config.of(SitesConfig).count or self.config.replicas

  @functools.cached_property
  def fragments(self) -> int:
    """The number of fragments, P."""
    return len(self.config.make_fragments())

  @property
  def replicas_per_site(self) -> int:
    return self.config.replicas // self.sites

  @property
  def room(self) -> int:
    """A site holds at most so many closed, unmerged rounds; at most P are in flight."""
    return 2 * self.fragments + 2

  def shards_of(self, site: int) -> list[str]:
    """Returns the names of the text shards of a site, as in saved positions."""
    n = self.replicas_per_site
    replicas = range(site * n, (site + 1) * n)
    return [str(shard) for shard in self.config.shards_of(replicas)]

  def payload_bytes(self, number: int) -> int:
    """Counts the bytes of one site's payload of a round; see `unsharded.py`."""
    c = self.config
    part = c.make_fragments()[self.rounds[number][1]]
    part_shapes = part.shapes(shapes.parameters(c.model))
    return self.replicas_per_site * sizes.payload_bytes(c.wire, part_shapes)

  def trains(self, step: int) -> bool:
    """Returns whether this site trains a step; it skips some if sites.pace < 1."""
    return self.trained(step) > self.trained(step - 1)

  def trained(self, step: int) -> int:
    """Counts the inner steps up to `step` that this site trains; always step 1."""
    # `round` comes before `ceil`, because 0.1 * 30 is more than 3 in floating point.
    return math.ceil(round(step * self.config.of(SitesConfig).pace, 6))

  def step_before(self, number: int) -> int:
    """Returns the step after which a site with the rounds below `number` goes on.

    The step lies before the first open round, so that the site sends that round.
    """
    if not number:
      return 0
    step = self.rounds[number - 1][0]
    open_step = self.rounds[number][0] if number < len(self.rounds) else step + 1
    # The final sync comes after the last step.
    return min(step, open_step - 1, self.config.train.steps)

  def steps_behind(
    self, number: int, since: int, left_out: Collection[int] = ()
  ) -> int:
    """Counts the inner steps that this site's payload of a round contains.

    Args:
      number: the round.
      since: the last step that the site took over from the group, instead of training.
      left_out: steps that the site did not train, because it was late.
    """
    step, fragment = self.rounds[number]
    before = (t for t, p in reversed(self.rounds[:number]) if p == fragment)
    begin, end = max(next(before, 0), since), min(step, self.config.train.steps)
    missing = sum(begin < t <= end for t in left_out)
    # At least 1, even if the site trained no step since the fragment's last send.
    return max(self.trained(end) - self.trained(begin) - missing, 1)

  def first_after(self, step: int) -> int:
    """Returns the first round that is sent after a later step than `step`."""
    return bisect.bisect(self.rounds, step, key=lambda sent: sent[0])


def as_all(c: Config) -> Config:
  """Returns the config of a run whose sites all have this site's batch."""
  batch = c.of(SitesConfig).batch_size * Calendar(c).sites
  return changed(c, {"train.batch_size": batch}) if batch else c


def config_of(c: Config, site: int) -> Config:
  """Returns the config by which a site trains its own replicas.

  Raises:
    ConfigError: there is no such site.
  """
  calendar = Calendar(c)
  if not 0 <= site < calendar.sites:
    raise ConfigError(
      f"--site is {site}, but sites.count gives the sites 0 to {calendar.sites - 1};"
      " give one of them."
    )
  n = calendar.replicas_per_site
  changes = {
    "replicas": n,
    "train.batch_size": c.train.batch_size * n // c.replicas,
    "data.shards": c.data.shards // calendar.sites,
    "overlap.taus": c.overlap.taus[site * n : (site + 1) * n],
    "sites.count": 1,
    "sites.quorum": 1,
  }
  return changed(c, changes)
