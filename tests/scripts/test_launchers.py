"""The launchers, on stand-ins of gcloud that run on this machine what a host would."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest
from threads import free_port

from diloco.log import metrics

ROOT = pathlib.Path(__file__).parents[2]
LAUNCHERS = ROOT / "scripts" / "launchers"
# `gcloud compute tpus queued-resources`: a host is a folder, two for each slice.
GCLOUD = """
import os, pathlib, shutil, subprocess, sys
cloud = pathlib.Path(os.environ["STAND_IN_CLOUD"])
verb, *names = [a for a in sys.argv[4:] if not a.startswith("--")]
flags = dict(a[2:].split("=", 1) for a in sys.argv if a.startswith("--") and "=" in a)
if verb == "create":
  for host in range(2 * int(flags["node-count"])):
    (cloud / f"{names[0]}-{host // 2}-worker-{host % 2}").mkdir()
hosts, started = sorted(cloud.glob("*-worker-*")), []
for rank, host in enumerate(hosts):
  if verb == "scp":
    shutil.copy(names[0], host)
  if verb == "ssh":  # Open MPI's variables stand for those of Cloud TPU.
    env = dict(os.environ, HOME=str(host), OMPI_COMM_WORLD_RANK=str(rank))
    env |= {"OMPI_COMM_WORLD_SIZE": str(len(hosts)), "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    env["OMPI_MCA_orte_hnp_uri"] = "4096.0;tcp://127.0.0.1:1"
    run = ["bash", "-c", flags["command"]]
    started.append(subprocess.Popen(run, cwd=host, env=env))
sys.exit(max((process.wait() for process in started), default=0))
"""
# The python3 of a host, which installs nothing: env/bin/python imports the clone there.
PYTHON3 = """
case "$*" in
  "-m pip install -q uv") ;;
  "-m uv venv "*)
    mkdir -p env/bin
    echo 'PYTHONPATH=$HOME/diloco:$HOME/diloco/tests exec "$STAND_IN_PYTHON" "$@"' \\
      > env/bin/python
    chmod +x env/bin/python ;;
  "-m uv pip install "*" ./diloco jax[tpu]") test -f diloco/pyproject.toml ;;
  *) echo "python3 $*" >&2; exit 9 ;;
esac
"""


@pytest.fixture
def cloud(tmp_path):
  """A folder of hosts, and a function that runs a launcher there."""
  tools, hosts = tmp_path / "tools", tmp_path / "hosts"
  tools.mkdir()
  hosts.mkdir()
  for name, head, text in (
    ("gcloud", f"#!{sys.executable}", GCLOUD),
    ("python3", "#!/bin/bash", PYTHON3),
  ):
    (tools / name).write_text(head + text)
    (tools / name).chmod(0o755)
  env = {
    **os.environ,
    "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
    "STAND_IN_CLOUD": str(hosts),
    "STAND_IN_PYTHON": sys.executable,
    "JAX_COORDINATOR_PORT": str(free_port()),
    "JAX_PLATFORMS": "cpu",
    **{"NAME": "pod", "ZONE": "z", "PROJECT": "p", "SLICES": "2"},
  }

  def launch(*args: str, script=LAUNCHERS / "tpu_multislice.sh"):
    command = ["bash", script, *args]
    return subprocess.run(
      command, env=env, capture_output=True, text=True, check=False, timeout=900
    )

  yield hosts, launch
  launch("stop")


def await_that(is_true, seconds: float = 900) -> None:
  deadline = time.time() + seconds
  while not is_true():
    assert time.time() < deadline
    time.sleep(0.2)


@pytest.mark.integration("starts, stops and continues four processes")
def test_two_slices_of_two_hosts_train_one_run(cloud, tmp_path):
  hosts, launch = cloud
  workdir = tmp_path / "shared" / "run"

  def must(*args):
    found = launch(*args)
    assert found.returncode == 0, found.stderr + launch("log").stdout
    return found.stdout

  must("create")
  must("setup")
  assert len(list(hosts.glob("pod-*/diloco/diloco/main.py"))) == 4
  assert not list(hosts.glob("pod-*/diloco/.git"))
  run = ["run", "--config=diloco/tests/process_config.py", f"--workdir={workdir}"]
  run += ["--config.train.steps=300", "--config.replicas=4"]
  must(*run)  # Ends, as the connection does, while the processes go on.
  await_that(
    lambda: (workdir / metrics.FILE).is_file() and metrics.read(workdir, "step")
  )
  refused = launch(*run)
  assert refused.returncode == 2
  assert refused.stderr.count("a run is there; stop it first.") == 4
  must("stop")
  [saved] = (int(p.name) for p in (workdir / "checkpoints").glob("[0-9]*"))
  assert 0 < saved < 300
  must(*run)
  await_that((workdir / "summary.json").is_file)
  assert f"Going on from the checkpoint of step {saved}." in must("log")
  assert json.loads((workdir / "summary.json").read_text())["steps"] == 300
  steps = [record["step"] for record in metrics.read(workdir, "step")]
  assert steps == list(range(1, 301))


def test_setup_packs_a_clone_and_says_what_is_none(cloud, tmp_path):
  inside = tmp_path / "package" / "scripts" / "launchers" / "tpu_multislice.sh"
  inside.parent.mkdir(parents=True)
  shutil.copy(LAUNCHERS / "tpu_multislice.sh", inside)
  found = cloud[1]("setup", script=inside)
  assert found.returncode == 2
  sentence = f"error: {tmp_path / 'package'} is no clone of diloco; give setup a wheel"
  assert found.stderr.startswith(sentence)


def test_stop_ends_no_other_process(cloud):
  _, launch = cloud
  launch("create")
  other = subprocess.Popen([sys.executable, "-c", "input()", "diloco.main"], stdin=-1)
  try:
    assert launch("stop").returncode == 0
    assert other.poll() is None
  finally:
    other.kill()
    other.wait()
