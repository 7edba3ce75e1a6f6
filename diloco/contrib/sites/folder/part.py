"""Makes the link of a site to a store: checks the store and the config of its run."""

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable

from diloco.algorithm.placement import Placement
from diloco.checkpoint import resume
from diloco.config import Config, changed
from diloco.contrib.sites import SitesConfig
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.coordinator import group, measure
from diloco.contrib.sites.coordinator.board import Measure
from diloco.contrib.sites.folder.link import FolderLink
from diloco.contrib.sites.folder.store import Store, open_store
from diloco.errors import ConfigError
from diloco.log.metrics import CONFIG

_WAIT_S = 5.0  # Seconds in which a file that is there must be seen in whole.


def make_link(
  c: Config,
  index: int,
  address: str,
  tls: str,
  insecure: bool,
  print_line: Callable[[str], None],
) -> FolderLink:
  """Prepares the link of site `index`; `site.make_part` has the arguments.

  Raises:
    ConfigError: nothing can be written at the address, or another run is there.
  """
  if tls or insecure:
    raise ConfigError(
      f"--tls is {tls!r} and --insecure is {insecure}, but --coordinator is"
      f" {address!r}, a folder or a bucket, which needs neither; leave them out."
    )
  store = open_store(address)
  check_config(store, address, c)
  # Nobody counts here what others have trained of a text, so no text is lent.
  calendar = Calendar(changed(c, {"sites.lend_after": 0}))
  if not store.is_exclusive:
    print_line(
      f"note: {address} does not say which of two sites created a file; keep"
      " sites.lost_s above the time in which all sites see a new file (docs/sites.md)."
    )
  lost_s, measure = c.of(SitesConfig).lost_s, _measure(calendar)
  return FolderLink(store, address, calendar, index, lost_s, print_line, measure)


def check_config(store: Store, address: str, c: Config) -> None:
  """Writes the config of the run, or compares it with that of the other sites.

  Raises:
    ConfigError: they differ, or the file is damaged.
  """
  own = c.to_dict()
  store.create(CONFIG, (json.dumps(own, indent=2) + "\n").encode())
  until, found = time.monotonic() + _WAIT_S, None
  while not isinstance(found, dict):
    with contextlib.suppress(ValueError):
      found = json.loads(store.get(CONFIG) or b"")
    if time.monotonic() > until:
      raise ConfigError(
        f"--coordinator is {address}, whose {CONFIG} cannot be read; restore it from a"
        " copy, or give an empty folder."
      )
    time.sleep(0 if found else store.poll_s)
  if changes := resume.differing(found, own):
    lines = "; ".join(f"{field}: {change}" for field, change in changes.items())
    raise ConfigError(
      f"--coordinator is {address}, where a run with another config is ({lines}); give"
      " the same config, or another folder."
    )


def _measure(calendar: Calendar) -> Measure:
  """Returns a `Measure` whose programs are made when it is called first."""

  @functools.cache
  def measurer() -> Measure:
    plan = group.make(calendar).plan
    # On a CPU of this process alone, also if the site has several.
    mesh = plan.placement.devices
    own = dataclasses.replace(plan, placement=Placement(mesh, mesh))
    return measure.measurer(own, calendar)

  return lambda number, payloads: measurer()(number, payloads)
