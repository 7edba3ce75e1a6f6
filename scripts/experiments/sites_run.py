"""Commands and processes of training runs in network namespaces.

Site K runs in node K + 1 of the star. Node 0 has the S3 server, if the sites meet in a
bucket.
"""

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

import netns

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
PORT = 7777
GROUP = "group"  # The folder in which the sites meet, beside their workdirs.
BUCKET = "bucket"
_FETCH = """
import sys, urllib.request
method, url = sys.argv[1:]
with urllib.request.urlopen(urllib.request.Request(url, method=method)) as answer:
  sys.stdout.buffer.write(answer.read())
"""
_READ = """
import sys
from diloco.util.storage import open_storage
storage = open_storage(sys.argv[1], "--group", writes=False)
sys.stdout.buffer.write(storage.get(sys.argv[2]) or b"")
"""


def name(k: int) -> str:
  """Returns the name of site k's workdir."""
  return f"site-{k}"


def site(
  network: netns.Network,
  k: int,
  folder: pathlib.Path,
  config: str,
  fields: Sequence[str],
  group: str = "",
) -> list[str]:
  """Returns the command of site k, with its workdir in `folder`.

  Args:
    group: folder or address where the sites meet; "": folder/GROUP.
  """
  own = [f"--site={k}", f"--group={group or folder / GROUP}"]
  own += ["--config.overlap.transport=sites", f"--workdir={folder / name(k)}"]
  return _python(network, k + 1, config, [*own, *fields])


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
  return _python(network, nodes[k], config, [*fields, *own])


def _python(network, node, config, fields) -> list[str]:
  argv = [sys.executable, "-m", "diloco.main", f"--config={config}", *fields]
  return network.command(node, argv)


def paced(command: Sequence[str]) -> list[str]:
  """Returns the command of a training process whose inner steps take STEP_S seconds."""
  at = command.index("-m")
  script = ROOT / "scripts/experiments/paced_site.py"
  return [*command[:at], str(script), *command[at + 2 :]]


def start(command: Sequence[str], log: pathlib.Path, **variables: str):
  """Starts a process on the CPU; appends its output to the file `log`."""
  env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **variables}
  with log.open("ab") as file:
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=file, stderr=file)


def stop(processes: Iterable[subprocess.Popen]) -> None:
  """Kills processes, and waits for their end."""
  for started in processes:
    started.kill()
    started.wait()


class Bucket:
  """An S3 server of moto in node 0, with one bucket.

  Attributes:
    address: address of the group in the bucket.
    variables: environment variables that a site needs.
  """

  address = f"s3://{BUCKET}/{GROUP}"

  def __init__(self, network: netns.Network, folder: pathlib.Path):
    """Starts the server, with its log in `folder`."""
    self._network = network
    self._url = f"http://{network.addresses[0]}:{PORT}"
    self.variables: Mapping[str, str] = {
      "AWS_ENDPOINT_URL": self._url,
      "AWS_ACCESS_KEY_ID": "any",
      "AWS_SECRET_ACCESS_KEY": "any",
    }
    argv = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(PORT)]
    self.process = start(network.command(0, argv), folder / "s3.log")
    for _ in range(100):
      if self.fetch(f"/{BUCKET}", "PUT") is not None:
        return
    raise RuntimeError(f"the S3 server does not begin; see {folder / 's3.log'}")

  def fetch(self, path: str, method: str = "GET") -> bytes | None:
    """Sends a request from the server's node, without access key; None: it failed."""
    argv = [sys.executable, "-c", _FETCH, method, self._url + path]
    done = subprocess.run(self._network.command(0, argv), capture_output=True)
    return done.stdout if done.returncode == 0 else None

  def file(self, of_group: str) -> bytes:
    """Returns a file of the group; empty if it is not there."""
    argv = [sys.executable, "-c", _READ, self.address, of_group]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **self.variables}
    command = self._network.command(0, argv)
    return subprocess.run(command, capture_output=True, env=env).stdout

  def names(self, start: str) -> list[str]:
    """Lists the files of the group whose names begin with `start`."""
    query = f"?list-type=2&prefix={GROUP}/{start}"
    text = (self.fetch(f"/{BUCKET}{query}") or b"").decode()
    return re.findall(f"<Key>{GROUP}/(.+?)</Key>", text)
