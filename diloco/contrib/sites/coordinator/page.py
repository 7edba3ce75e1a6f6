"""A page of numbers for Prometheus, `/metrics` (docs/operate.md). No JAX."""

import functools
import pathlib
import shutil
import time
from typing import Any

from diloco.checkpoint.record import steps_of
from diloco.contrib.sites.coordinator.board import Board
from diloco.contrib.sites.coordinator.journal import Entry
from diloco.contrib.sites.coordinator.rounds import Presence
from diloco.errors import ConfigError
from diloco.util.command import optional

HOST = "127.0.0.1"


class Page:
  """Serves the numbers of a coordinator in a thread, to whoever asks.

  Counters begin at 0 when the coordinator starts.

  Attributes:
    address: where it listens, host:port.
    registry: has the numbers.
  """

  def __init__(self, board: Board, workdir: pathlib.Path, address: str):
    """Starts to serve.

    Args:
      address: PORT of this machine's loopback interface, or HOST:PORT; port 0: any.

    Raises:
      ConfigError: prometheus_client is not installed, or nobody can listen there.
    """
    client = optional("prometheus_client", f"--metrics={address} needs", "metrics")
    self.registry = registry = client.CollectorRegistry()
    client.ProcessCollector(registry=registry)  # Memory, processor, files.

    def make(kind: str, name: str, text: str, *labels: str) -> Any:
      return getattr(client, kind)(f"diloco_{name}", text, labels, registry=registry)

    def follow(name: str, text: str, value: Any) -> None:
      make("Gauge", name, text).set_function(value)

    rounds, sites = board.calendar.rounds, range(board.calendar.sites)
    follow("rounds", "Rounds of the run.", lambda: len(rounds))
    follow("rounds_closed", "Rounds on the disk.", lambda: board.published)
    follow("rounds_applied", "Rounds in the outer state.", board.applied)
    follow("sites", "Sites of the run.", lambda: len(sites))
    follow("sites_connected", "Sites that are connected.", board.inside)
    free = lambda: shutil.disk_usage(workdir).free
    follow("disk_free_bytes", "Room in the file system of --workdir.", free)
    saved = lambda: max(steps_of(workdir), default=0)
    follow("checkpoint_step", "Step of the newest checkpoint.", saved)
    expected = make("Gauge", "site_expected", "Whether rounds wait for a site.", "site")
    for k in sites:
      is_in = functools.partial(_is_in, board, k)
      expected.labels(k).set_function(is_in)
    self._step = make("Gauge", "step", "Inner step of the newest round.")
    text = "When the newest round closed, or the coordinator started."
    self._closed_at = make("Gauge", "round_closed_timestamp_seconds", text)
    self._closed_at.set(time.time())
    self._waited_s = make("Counter", "waited_seconds", "Waits of rounds after quorum.")
    of_site = functools.partial(make, "Counter")
    self._payloads = of_site("site_payloads", "Payloads that counted.", "site")
    self._tokens = of_site("site_tokens", "Tokens behind these, a replica.", "site")
    self._bytes = of_site("site_bytes", "Bytes of these.", "site")
    self._late = of_site("site_late", "Rounds that did not get a payload.", "site")
    self._refused = of_site("site_refused", "Payloads with bad numbers.", "site")
    for counter in (self._payloads, self._late, self._refused):
      for k in sites:
        counter.labels(k)  # Shown as 0 from the beginning, for rates.
    text = "Where the time went until the site took part."
    self._arrival = make("Gauge", "site_arrival_seconds", text, "site", "phase")

    host, _, port = address.rpartition(":")
    host = host.strip("[]") or HOST
    if not port.isdecimal() or int(port) > 65535:
      raise ConfigError(f"--metrics is {address!r}; give PORT or HOST:PORT.")
    try:
      self._server, _ = client.start_http_server(int(port), host, registry)
    except OSError as error:
      raise ConfigError(
        f"--metrics is {address!r}, where nobody can listen ({error.strerror}); choose"
        " another port, or an address of this machine."
      ) from error
    self.address = f"{host}:{self._server.server_port}"

  def closed(self, entry: Entry) -> None:
    """Counts a round that closed."""
    self._step.set(entry.step)
    self._closed_at.set(time.time())
    self._waited_s.inc(entry.waited_s)
    for k, tokens in entry.tokens.items():
      self._payloads.labels(k).inc()
      self._tokens.labels(k).inc(tokens)
      self._bytes.labels(k).inc(len(entry.payloads[k]))
    for counter, whom in ((self._late, entry.late), (self._refused, entry.refused)):
      for k in whom:
        counter.labels(k).inc()

  def arrived(self, site: int, seconds: dict[str, float]) -> None:
    """Shows where the time of a site went until it took part."""
    for phase, s in seconds.items():
      self._arrival.labels(site, phase).set(s)

  def close(self) -> None:
    """Stops to serve."""
    self._server.shutdown()
    self._server.server_close()


def _is_in(board: Board, site: int) -> bool:
  return board.rounds.members[site].presence is Presence.IN
