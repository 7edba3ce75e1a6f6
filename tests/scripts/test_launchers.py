"""The launchers, with stand-ins of gcloud and Slurm that run on this machine."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
import running
from threads import free_port

from diloco.log import metrics
from diloco.util import remote

LAUNCHERS = running.ROOT / "scripts" / "launchers"
# `gcloud compute tpus queued-resources`: a host is a folder, one or two for each slice.
GCLOUD = """
import os, pathlib, shutil, subprocess, sys
cloud = pathlib.Path(os.environ["STAND_IN_CLOUD"])
per_slice = int(os.environ.get("STAND_IN_HOSTS", "2"))
verb, *names = [a for a in sys.argv[4:] if not a.startswith("--")]
flags = dict(a[2:].split("=", 1) for a in sys.argv if a.startswith("--") and "=" in a)
if verb == "create":
  for host in range(per_slice * int(flags["node-count"])):
    number, worker = divmod(host, per_slice)
    (cloud / f"{names[0]}-{number}-worker-{worker}").mkdir()
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
worst = max((process.wait() for process in started), default=0)
sys.exit(0 if os.environ.get("STAND_IN_SAYS_0") else worst)
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
# sbatch runs the job, and again as long as the job puts itself back into the queue.
SBATCH = """
export SLURM_JOB_ID=7
while bash "${@:2}"; do
  rm "$STAND_IN_CLOUD/requeue" 2>/dev/null || exit 0
done
exit 1
"""
SCONTROL = """
test "$*" = "requeue 7" && touch "$STAND_IN_CLOUD/requeue"
"""
# A machine reached by ssh is a folder, too; its python3 makes an env that has diloco.
SSH = """
cd "$STAND_IN_CLOUD" && HOME=$PWD exec bash -c "$2"
"""
SCP = """
cp $1 "$STAND_IN_CLOUD"
"""
RSYNC = """
cp -r "$STAND_IN_CLOUD/${2#*:}" "$3"
"""
VENV = """
test "$*" = "-m venv --clear env" && mkdir -p env/bin
echo 'exec "$STAND_IN_PYTHON" "$@"' > env/bin/python
echo 'test -f "$3"' > env/bin/pip
chmod +x env/bin/*
"""
# `gcloud compute tpus tpu-vm`: the VM is a folder.
VM = """
case "$4" in
  scp) cp $5 "$STAND_IN_CLOUD" ;;
  ssh) cd "$STAND_IN_CLOUD" && HOME=$PWD exec bash -c "${*#*--command=}" ;;
esac
"""
VM_PYTHON3 = """
case "$*" in
  "-m uv venv "*)
    mkdir -p env/bin
    printf '#!/bin/bash\nexec sleep 99' > env/bin/python
    chmod +x env/bin/python ;;
  "-m uv pip "*) test ! -e fails ;;
esac
"""
# Waits for a file of the machine, or with two arguments for the end of a process.
AWAIT = """
cd "$STAND_IN_CLOUD"
for _ in {1..9000}; do
  if [ "$2" ]; then kill -0 $(cat "$2") || exit 0; else [ -s "$1" ] && exit 0; fi
  sleep 0.1
done
"""


def environment(tmp_path, **tools: str) -> dict[str, str]:
  """Returns variables of programs that find these tools before all others.

  Args:
    tools: {name: text of a script for bash, or for Python if it imports}.
  """
  (folder := tmp_path / "tools").mkdir()
  (hosts := tmp_path / "hosts").mkdir()
  for name, text in tools.items():
    head = sys.executable if "import" in text else "/bin/bash"
    (folder / name).write_text(f"#!{head}{text}")
    (folder / name).chmod(0o755)
  return running.environment(
    PATH=f"{folder}{os.pathsep}{os.environ['PATH']}",
    STAND_IN_CLOUD=str(hosts),
    STAND_IN_PYTHON=sys.executable,
    JAX_COORDINATOR_PORT=str(free_port()),
    JAX_PLATFORMS="cpu",
  )


@pytest.fixture
def cloud(tmp_path):
  """A folder of hosts, and a function that runs a launcher there."""
  env = environment(tmp_path, gcloud=GCLOUD, python3=PYTHON3) | {
    **{"NAME": "pod", "ZONE": "z", "PROJECT": "p", "SLICES": "2"}
  }

  def launch(*args: str, script=LAUNCHERS / "tpu_multislice.sh", **more: str):
    more |= {"STAND_IN_SAYS_0": os.environ.get("STAND_IN_SAYS_0", "")}
    command, pipes = ["bash", script, *args], {"capture_output": True, "text": True}
    return subprocess.run(command, env=env | more, timeout=900, **pipes)

  yield tmp_path / "hosts", launch
  launch("stop")


def assert_whole(workdir: pathlib.Path) -> None:
  """Whether a run of 300 steps has all of them, and ended."""
  assert json.loads((workdir / "summary.json").read_text())["steps"] == 300
  steps = [record["step"] for record in metrics.read(workdir, "step")]
  assert steps == list(range(1, 301))


@pytest.mark.integration("starts, stops and continues two processes")
def test_two_slices_train_one_run(cloud, tmp_path):
  hosts, launch = cloud
  workdir = tmp_path / "shared" / "run"

  def must(*args, **more):
    found = launch(*args, **more)
    assert found.returncode == 0, found.stderr + launch("log").stdout
    return found.stdout

  must("create", STAND_IN_HOSTS="1")
  must("setup")
  assert len(list(hosts.glob("pod-*/diloco/diloco/main.py"))) == 2
  assert not list(hosts.glob("pod-*/diloco/.git"))
  run = ["run", "--config=diloco/tests/process_config.py", f"--workdir={workdir}"]
  run += ["--config.train.steps=300"]
  must(*run)  # Ends, as the connection does, while the processes go on.
  path = workdir / metrics.FILE
  running.wait(lambda: path.is_file() and metrics.read(workdir, "step"))
  for again in (run, ["setup"]):
    refused = launch(*again)
    assert refused.returncode == 2
    assert refused.stderr.count("a run is there; stop it first.") == 2
  must("stop")
  [saved] = (int(p.name) for p in (workdir / "checkpoints").glob("[0-9]*"))
  assert 0 < saved < 300
  must(*run)
  running.wait((workdir / "summary.json").is_file)
  logs = [path.read_text() for path in hosts.glob("pod-*/pod.log")]
  assert f"Going on from the checkpoint of step {saved}." in "".join(logs)
  assert any(log.splitlines()[-1] in must("log") for log in logs)
  assert_whole(workdir)


@pytest.mark.integration("starts, stops and continues two processes")
def test_a_slurm_job_goes_back_into_the_queue_until_the_run_is_done(tmp_path):
  env = environment(tmp_path, sbatch=SBATCH, srun=running.SRUN, scontrol=SCONTROL)
  workdir = tmp_path / "run"
  command = ["sbatch", "--nodes=2", LAUNCHERS / "slurm.sh", f"--workdir={workdir}"]
  command += ["--config=tests/process_config.py", "--config.train.steps=300"]
  said = tmp_path / "said.txt"
  with said.open("w") as out:
    job = subprocess.Popen(command, env=env, cwd=running.ROOT, stdout=out, stderr=out)
  path = workdir / metrics.FILE
  trains = lambda: path.is_file() and metrics.read(workdir, "step")
  tasks = lambda: map(int, (tmp_path / "tools" / "tasks").read_text().split())
  try:
    running.wait(lambda: trains() or job.poll() is not None)
    for task in tasks():  # The time limit is near.
      os.kill(task, signal.SIGTERM)
    assert job.wait(timeout=900) == 0, said.read_text()
  finally:
    if job.poll() is None:
      job.kill()
      for task in tasks():
        with contextlib.suppress(ProcessLookupError):
          os.kill(task, signal.SIGKILL)
  assert len([*tasks()]) == 4
  assert "Going on from the checkpoint of step" in said.read_text()
  assert_whole(workdir)


@pytest.mark.parametrize("workdir", ["~/run", "s3://bucket/run"])
def test_a_slurm_job_knows_wherever_the_run_is_that_it_is_done(
  s3, tmp_path, monkeypatch, workdir
):
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.setenv("SLURM_JOB_ID", "7")
  env = environment(tmp_path, srun="", scontrol=SCONTROL)
  job = ["bash", LAUNCHERS / "slurm.sh", f"--workdir={workdir}"]
  queued = tmp_path / "hosts" / "requeue"
  subprocess.run(job, env=env, cwd=running.ROOT, check=True)
  queued.unlink()
  summary = remote.local_copy(workdir, "it") / "summary.json"
  summary.parent.mkdir(exist_ok=True)
  summary.write_text("{}")
  remote.put_back(summary)
  subprocess.run(job, env=env, cwd=running.ROOT, check=True)
  assert not queued.exists()


@pytest.mark.integration("starts and stops a process")
def test_the_recipe_for_a_machine_reached_by_ssh(tmp_path):
  page = (running.ROOT / "docs" / "machines.md").read_text()
  recipe = page.partition("## A machine reached by ssh")[2].split("```")[1]
  look, stop, fetch = "ssh $HOST 'tail", "ssh $HOST 'kill", "rsync -a"
  for line, first in (
    (look, "await runs/sample/metrics.jsonl"),
    (fetch, "await ended sample.pid"),
  ):
    assert recipe.count(line) == recipe.count(stop) == 1
    recipe = recipe.replace(line, f"{first}\n{line}")
  tools = {"ssh": SSH, "scp": SCP, "rsync": RSYNC, "python3": VENV, "await": AWAIT}
  (tmp_path / "diloco-0.1.0-py3-none-any.whl").touch()
  run = ["bash", "-e", "-c", recipe.removeprefix("sh")]
  env = environment(tmp_path, **tools)
  found = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True)
  assert found.returncode == 0, found.stderr
  [saved] = (tmp_path / "sample" / "checkpoints").glob("[0-9]*")
  log = (tmp_path / "hosts" / "sample.log").read_text()
  assert f"saved step {saved.name}" in log


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_recipe_for_a_spot_vm_notes_the_trainer(tmp_path):
  page = (running.ROOT / "docs" / "machines.md").read_text()
  recipe = page.partition("A spot VM with")[2].split("```")[1].removeprefix("sh")
  (tmp_path / "diloco-0.1.0-py3-none-any.whl").touch()
  env = environment(tmp_path, gcloud=VM, python3=VM_PYTHON3)
  start = lambda: subprocess.run(
    ["bash", "-c", recipe], cwd=tmp_path, env=env, timeout=60
  )
  (fails := tmp_path / "hosts" / "fails").touch()
  assert start().returncode == 1
  fails.unlink()
  assert start().returncode == 0
  running.wait((pid := tmp_path / "hosts" / "335M.pid").is_file)
  trainer = int(pid.read_text())
  words = pathlib.Path(f"/proc/{trainer}/cmdline")
  running.wait(lambda: words.read_bytes() == b"sleep\x0099\0")
  os.kill(trainer, signal.SIGTERM)


def test_setup_packs_a_clone_and_says_what_is_none(cloud, tmp_path):
  inside = tmp_path / "package" / "scripts" / "launchers" / "tpu_multislice.sh"
  inside.parent.mkdir(parents=True)
  shutil.copy(LAUNCHERS / "tpu_multislice.sh", inside)
  found = cloud[1]("setup", script=inside)
  assert found.returncode == 2
  sentence = f"error: {tmp_path / 'package'} is no clone of diloco; give setup a wheel"
  assert found.stderr.startswith(sentence)


@pytest.mark.parametrize(("says_0", "status"), [("", 0), ("1", 2)])
def test_train_ends_with_the_run_and_its_status(cloud, monkeypatch, status, says_0):
  """Some versions of gcloud end with 0 although a command failed on several hosts."""
  monkeypatch.setenv("STAND_IN_SAYS_0", says_0)
  hosts, launch = cloud
  launch("create")
  for host in hosts.iterdir():
    (python := host / "env" / "bin" / "python").parent.mkdir(parents=True)
    python.write_text("#!/bin/bash\nsleep 1; echo ended; exit ${@: -1}")
    python.chmod(0o755)
  done = launch("train", str(status))
  assert (done.returncode, done.stdout.count("ended")) == (status, 4)


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
