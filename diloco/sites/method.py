"""The method of a site: its part of Algorithm 2 in place of the trainer's."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from diloco.algorithm.method import Method, Wrapper
from diloco.algorithm.state import Event, TrainState
from diloco.config import Config
from diloco.data.batches import Batches
from diloco.errors import ConfigError
from diloco.processes.stop import Stop, Stopped
from diloco.sites.calendar import config_of
from diloco.sites.site import Site
from diloco.spec import sizes
from diloco.spec.shapes import num_params


class SitePart:
  """A site's part of a run, for `diloco.train.train`.

  Attributes:
    site: its connection to the coordinator.
    config: of the whole run.
    first_replica: number of its first replica.
  """

  def __init__(self, site: Site):
    self.site, self.config, self.first_replica = site, site.config, site.first_replica

  def own_config(self) -> Config:
    """Returns the config by which this site trains.

    Raises:
      ConfigError: overlap.transport is not sites.
    """
    if self.config.overlap.transport != "sites":
      raise ConfigError(
        f"overlap.transport is {self.config.overlap.transport}, which needs no"
        " --coordinator and --site (docs/sites.md)."
      )
    return config_of(self.config, self.site.index)

  def method(self, method: Method, batches: Batches, stop: Stop) -> Method:
    return SiteMethod(method, self.site, batches, stop)


@dataclasses.dataclass(frozen=True)
class SiteMethod(Wrapper):
  """Trains like `method`, and exchanges payloads with a coordinator.

  Attributes:
    site: sends, receives and merges.
    batches: follow the site's step.
    stop: knows whether a signal came, so that the site must not wait for others.
  """

  site: Site
  batches: Batches
  stop: Stop

  def enter(self, t: int, state: TrainState) -> tuple[int, TrainState]:
    return self.site.enter(self.method.plan, t, state, self.batches)

  def outer(self, t: int, state: TrainState) -> tuple[int, TrainState, list[Event]]:
    args = (self.method.plan, t, state, self.batches, self.stop.is_told)
    return self.site.outer_step(*args)

  def drain(self, t: int, state: TrainState) -> tuple[TrainState, list[Event]]:
    del t
    args = (self.method.plan, state, self.batches, self.stop.is_told)
    state, events = self.site.drain(*args)
    if not self.site.is_finished:  # A signal came; the last checkpoint is older.
      raise Stopped(late=True, events=events)
    return state, events

  def note(self) -> str:
    return self.site.note()

  def account(self, summary: Mapping[str, Any]) -> dict[str, Any]:
    c, sent = self.site.config, summary["bytes_sent_per_replica"]
    total = num_params(c.model)
    reference = int(sizes.all_reduce_bytes(c.replicas, total, c.train.steps))
    return {
      "site": self.site.account(),
      "bytes_data_parallel_per_replica": reference,
      "bytes_ratio_to_data_parallel": reference / sent if sent else None,
    }

  def close(self, reason: str) -> None:
    self.site.leave(reason)
    self.method.close(reason)
