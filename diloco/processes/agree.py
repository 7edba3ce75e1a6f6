"""Checks before anything compiles: all processes of a run must run the same program.

JAX does not notice that processes run different programs. The processes would go on
with a mixture of two configs, or wait for each other forever.
"""

import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from diloco.config import Config
from diloco.config.comparable import READING
from diloco.config.resolve import leaves
from diloco.errors import ConfigError
from diloco.processes.peers import Peers
from diloco.spec import plugins

# A run's result depends on these packages: grain orders, sentencepiece tokenises text.
_PACKAGES = ("jax", "jaxlib", "numpy", "optax", "flax", "grain", "sentencepiece")
_SHOWN = 4  # Largest number of differences in a message.


def check_same(peers: Peers, mine: Mapping[str, Any], remedy: str) -> None:
  """Refuses processes that differ in `mine`; all processes must call this function.

  Args:
    peers: the processes of the run.
    mine: {name: JSON value of this process}.
    remedy: what the user can do, for the error message.

  Raises:
    ConfigError: a process differs from process 0; the message has the differences.
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
  """Refuses processes that differ in config, code or packages.

  With the transport device, all processes must also have one kind of device.

  Raises:
    ConfigError: see `check_same`.
  """
  if peers.count == 1:
    return
  fields = {f: v for f, v in leaves(c.to_dict()).items() if f not in READING}
  others = made_with(c) | _versions("orbax-checkpoint")
  if c.overlap.transport == "device":  # XLA runs one program on all devices.
    others["the kind of device"] = jax.local_devices()[0].device_kind
  remedy = "start all with the same command, code, packages and kind of device"
  check_same(peers, fields | others, remedy)


def made_with(c: Config) -> dict[str, str]:
  """Returns the versions and the code on which a result depends, besides the config.

  Returns:
    {a package, diloco or a plug-in, in words: its version, or a digest of its files}.
  """
  code = {"the code of diloco": _digest(plugins.source_files("diloco"))}
  for name in {*c.plugins} - {*plugins.contrib()}:
    code[f"the plug-in {name}"] = _digest(plugins.source_files(name))
  return _versions(*_PACKAGES) | code


def _versions(*packages: str) -> dict[str, str]:
  return {f"the version of {p}": importlib.metadata.version(p) for p in packages}


def _digest(paths: Iterable[pathlib.Path]) -> str:
  digest = hashlib.sha256()
  for path in paths:
    digest.update(path.read_bytes())
  return digest.hexdigest()[:12]
