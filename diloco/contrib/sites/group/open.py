"""Opens the storage of a group, and compares its config with that of a site. No JAX."""

import contextlib
import json

from diloco.checkpoint import resume
from diloco.config import Config
from diloco.contrib.sites.calendar import config_of
from diloco.errors import ConfigError
from diloco.log.metrics import CONFIG
from diloco.util.storage import Storage, open_storage


def open_group(c: Config, site: int, address: str) -> Storage:
  """Opens the storage of a group for a site.

  The first site writes the config of the run; every site compares its own config.

  Raises:
    ConfigError: there is no such site, nothing can be written at the address, or
      another run is there.
    OSError: the file system or the network fails, perhaps not for long.
  """
  config_of(c, site)
  storage, own, found = open_storage(address, "--group"), c.to_dict(), None
  storage.create(CONFIG, (json.dumps(own, indent=2) + "\n").encode())
  with contextlib.suppress(RecursionError, ValueError):
    found = json.loads(storage.get(CONFIG) or b"")
  if not isinstance(found, dict):
    raise ConfigError(
      f"--group is {address}, whose {CONFIG} cannot be read; restore it from a copy, or"
      " give an empty folder."
    )
  if changes := resume.differing(found, own):
    lines = "; ".join(f"{field}: {change}" for field, change in changes.items())
    raise ConfigError(
      f"--group is {address}, where a run with another config is ({lines}); give the"
      " same config, or another folder."
    )
  return storage
