"""Whether all processes of a run would compute the same: found before they compile.

JAX does not notice that processes run different programs. They would train on with a
mixture of two configs, or wait for each other for ever.
"""

import hashlib
import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax

from diloco.config import Config
from diloco.config.resolve import leaves
from diloco.errors import ConfigError
from diloco.processes.peers import Peers
from diloco.spec import plugins

# Fields that each process may have for itself: they change nothing that is computed.
FREE_FIELDS = ("data.data_dir", "data.prefetch")
# A result depends on these packages.
_PACKAGES = ("jax", "jaxlib", "numpy", "optax", "grain", "orbax-checkpoint")
_SHOWN = 4  # Most differences in a message.


def check_same(peers: Peers, mine: Mapping[str, Any], remedy: str) -> None:
  """Refuses processes that differ; all processes must call it.

  Args:
    peers: the processes of the run.
    mine: {what: JSON value of this process}.
    remedy: what the user can do.

  Raises:
    ConfigError: names the first process that differs from process 0, and in what.
  """
  first, *others = peers.all_gather(json.loads(json.dumps(mine)))
  for p, theirs in enumerate(others, start=1):
    names = [n for n in first | theirs if first.get(n) != theirs.get(n)]
    if names:
      shown = [f"{n} is {theirs.get(n)}, not {first.get(n)}" for n in names[:_SHOWN]]
      more = f"; {len(names) - _SHOWN} more" if names[_SHOWN:] else ""
      raise ConfigError(
        f"process {p} differs from process 0: {'; '.join(shown)}{more}; {remedy}."
      )


def check_same_program(c: Config, peers: Peers) -> None:
  """Refuses processes with other configs, code, packages or devices.

  Raises:
    ConfigError: see `check_same`.
  """
  if peers.count == 1:
    return
  fields = {f: v for f, v in leaves(c.to_dict()).items() if f not in FREE_FIELDS}
  packages = {f"the version of {p}": importlib.metadata.version(p) for p in _PACKAGES}
  others = {"the code of diloco and its plug-ins": code_digest()}
  if c.overlap.transport == "device":  # XLA runs one program on all devices.
    others["the kind of device"] = jax.local_devices()[0].device_kind
  remedy = "start all with the same command, code, packages and kind of device"
  check_same(peers, fields | packages | others, remedy)


def code_digest() -> str:
  """Digests the files of this package, and of the plug-ins that were imported."""
  package = pathlib.Path(__file__).parents[1]
  modules = (sys.modules[kind.__module__] for kind in plugins.EXTENSIONS.values())
  own = {pathlib.Path(m.__file__) for m in modules if m.__file__}
  digest = hashlib.sha256()
  for path in (*sorted(package.rglob("*.py")), *sorted(own)):
    digest.update(path.read_bytes())
  return digest.hexdigest()[:12]
