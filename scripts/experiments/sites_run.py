"""Commands, processes and certificates of runs in network namespaces.

With sites, node 0 of the star is the coordinator's, node K + 1 is that of site K.
"""

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Sequence

import netns

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
PORT = 7777
COORDINATOR, GROUP = "coordinator", "group"


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
  own = [f"--listen={listen(network)}", f"--tls={folder / 'tls' / COORDINATOR}"]
  return _of_site(network, 0, "coordinator", folder, config, [*own, *fields])


def site(
  network: netns.Network,
  k: int,
  folder: pathlib.Path,
  config: str,
  fields: Sequence[str],
  shared: bool = False,
) -> list[str]:
  """Returns the command of site k; `folder` has its workdir and its keys.

  If the sites share a folder instead of a coordinator, it is folder/GROUP.
  """
  group = [f"--coordinator={listen(network)}", f"--tls={folder / 'tls' / f'site-{k}'}"]
  own = [f"--site={k}", *([f"--coordinator={folder / GROUP}"] if shared else group)]
  return _of_site(network, k + 1, "main", folder, config, [*own, *fields])


def process(
  network: netns.Network,
  nodes: range,
  k: int,
  folder: pathlib.Path,
  config: str,
  fields: Sequence[str],
) -> list[str]:
  """Returns the command of process k of one run on all `nodes`, without sites."""
  own = [f"--coordinator={network.addresses[nodes[0]]}:{PORT}", f"--process_id={k}"]
  own += [f"--num_processes={len(nodes)}", f"--workdir={folder / 'run'}"]
  return _python(network, nodes[k], "main", config, [*fields, *own])


def _of_site(network, node, module, folder, config, fields) -> list[str]:
  name = names(node)[node]
  own = ["--config.overlap.transport=sites", f"--workdir={folder / name}", *fields]
  return _python(network, node, module, config, own)


def _python(network, node, module, config, fields) -> list[str]:
  argv = [sys.executable, "-m", f"diloco.{module}", f"--config={config}", *fields]
  return network.command(node, argv)


def paced(command: Sequence[str]) -> list[str]:
  """Returns the command of a training process whose inner steps take STEP_S seconds."""
  at = command.index("-m")
  script = ROOT / "scripts/experiments/paced_site.py"
  return [*command[:at], str(script), *command[at + 2 :]]


def start(command: Sequence[str], log: pathlib.Path, **variables: str):
  """Starts a process on the CPU; its output goes to the end of the file `log`."""
  env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **variables}
  with log.open("ab") as file:
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=file, stderr=file)


def stop(processes: Iterable[subprocess.Popen]) -> None:
  """Kills processes, and waits for their end."""
  for started in processes:
    started.kill()
    started.wait()


def certificates(folder: pathlib.Path, sites: int) -> None:
  """Makes folder/tls/NAME with ca.pem, cert.pem and key.pem for each of `names`."""
  flags = [f"--out={folder / 'tls'}", f"--sites={sites}"]
  env = {**os.environ, "PYTHONPATH": str(ROOT)}
  argv = [sys.executable, "-m", "diloco", "make_certificates", *flags]
  subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env=env)
