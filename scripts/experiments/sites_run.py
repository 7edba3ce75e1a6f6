"""Commands and certificates of a run of several sites in network namespaces.

Node 0 of the star is the coordinator's, node K + 1 is that of site K.
"""

import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import netns

ROOT = pathlib.Path(__file__).resolve().parents[2]
PORT = 7777
COORDINATOR = "coordinator"


def names(sites: int) -> list[str]:
  """Returns the names of the coordinator and of the sites: those of their folders."""
  return [COORDINATOR, *(f"site-{k}" for k in range(sites))]


def listen(network: netns.Network) -> str:
  """Returns the coordinator's address."""
  return f"{network.addresses[0]}:{PORT}"


def coordinator(
  network: netns.Network, folder: pathlib.Path, config: str, fields: Sequence[str]
) -> list[str]:
  """Returns the command of the coordinator; `folder` has its workdir and its keys."""
  own = [f"--listen={listen(network)}"]
  return _python(network, 0, "coordinator", folder, config, [*own, *fields])


def site(
  network: netns.Network,
  k: int,
  folder: pathlib.Path,
  config: str,
  fields: Sequence[str],
) -> list[str]:
  """Returns the command of site k; `folder` has its workdir and its keys."""
  own = [f"--site={k}", f"--coordinator={listen(network)}"]
  return _python(network, k + 1, "main", folder, config, [*own, *fields])


def _python(network, node, module, folder, config, fields) -> list[str]:
  name = names(node)[node]
  argv = [
    *(sys.executable, "-m", f"diloco.{module}", f"--config={config}"),
    *("--config.overlap.transport=sites", f"--workdir={folder / name}"),
    *(f"--tls={folder / 'tls' / name}", *fields),
  ]
  return network.command(node, argv)


def certificates(folder: pathlib.Path, sites: int) -> None:
  """Makes folder/tls/NAME with ca.pem, cert.pem and key.pem for each of `names`."""
  flags = [f"--out={folder / 'tls'}", f"--sites={sites}"]
  env = {**os.environ, "PYTHONPATH": str(ROOT)}
  argv = [sys.executable, "-m", "diloco.sites.make_certificates", *flags]
  subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env=env)
