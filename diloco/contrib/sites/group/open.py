"""Opens the storage of a group, and compares what a site reads. No JAX."""

import contextlib
import json
from collections.abc import Mapping

from diloco.checkpoint import resume
from diloco.config import Config
from diloco.contrib.sites.calendar import config_of
from diloco.errors import ConfigError
from diloco.log.metrics import CONFIG, CONTENTS
from diloco.util.storage import Storage, open_storage
from diloco.util.types import Json


def open_group(c: Config, site: int, address: str) -> Storage:
  """Opens the storage of a group for a site.

  The first site writes the config of the run; every site compares its own config.

  Raises:
    ConfigError: there is no such site, nothing can be written at the address, or
      another run is there.
    OSError: the file system or the network fails, perhaps not for long.
  """
  config_of(c, site)
  storage, config = open_storage(address, "--group"), c.to_dict()
  if changes := resume.differing(_first(storage, address, CONFIG, config), config):
    lines = "; ".join(f"{field}: {change}" for field, change in changes.items())
    raise ConfigError(
      f"--group is {address}, where a run with another config is ({lines}); give the"
      " same config, or another folder."
    )
  return storage


def check_contents(storage: Storage, address: str, read: Mapping[str, str]) -> None:
  """Refuses a site that reads another text or has another tokenizer than the first.

  Args:
    read: `diloco.data.contents` of the site.

  Raises:
    ConfigError: see above.
  """
  contents = {what: read[what] for what in ("data.tokenizer", "data.source")}
  first = _first(storage, address, CONTENTS, contents)
  if others := [what for what in contents if first.get(what) != contents[what]]:
    raise ConfigError(
      f"--group is {address}, where {' and '.join(others)} had other contents under the"
      " same name; give this site the files of the others, or another folder."
    )


def _first(storage: Storage, address: str, name: str, content: Json) -> Json:
  """Returns the JSON object in a file, which the first site writes."""
  storage.create(name, (json.dumps(content, indent=2) + "\n").encode())
  with contextlib.suppress(RecursionError, ValueError):
    if isinstance(written := json.loads(storage.get(name) or b""), dict):
      return written
  raise ConfigError(
    f"--group is {address}, whose {name} cannot be read; restore it from a copy, or"
    " give an empty folder."
  )
