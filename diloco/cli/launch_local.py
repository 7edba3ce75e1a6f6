"""Starts N processes of one run on this machine.

  python -m diloco launch_local -n 4 -- --config=configs/sample.py --workdir=runs/run
  python -m diloco launch_local -n 2 --sites -- --config=configs/sample.py \\
    --workdir=runs/sites

Every process runs `diloco.main` with the arguments after `--`. If the first of them is
the name of a diloco command, every process runs that command instead. Every output line
begins with the number of its process. If a process fails, the others have 20 seconds to
report the failure and end; then they are killed. SIGTERM and SIGINT are passed on to
all processes; a second signal kills them. The exit status is that of the first process
that failed. With --devices=K, each process has K simulated CPU devices.

With --sites, the N processes are the sites of one run (docs/sites.md). They write to
the folders site-0, site-1, ... of the workdir, and share its folder `group`. If a site
fails, the others go on.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent import futures
from typing import IO

from diloco.util.command import Parser, as_path, free_port, guarded, in_range

GRACE = 20.0  # Seconds from the failure of a process until the others are killed.
MOST = 1024  # Most processes, or devices per process: a typing error may fill memory.
# Every process prints such messages about its connections; `copy` removes them.
_GLOO = re.compile(r"\[Gloo\] Rank \d+ is connected to .*")


def main() -> int:
  parser = Parser(description=__doc__)
  parser.add_argument(
    "-n", type=in_range(1, MOST), required=True, help="number of processes"
  )
  parser.add_argument(
    "--devices", type=in_range(0, MOST), default=0, help="CPU devices per process"
  )
  parser.add_argument("--sites", action="store_true", help="each process is a site")
  parser.add_argument("args", nargs="+", help="-- and arguments of diloco.main")
  options = parser.parse_args()
  commands = site_commands(options) if options.sites else run_commands(options)
  processes = {name: start(command, options) for name, command in commands.items()}
  forward_signals(list(processes.values()))
  needed = set() if options.sites else set(processes)
  with futures.ThreadPoolExecutor(2 * len(processes)) as threads:
    for name, p in processes.items():
      assert p.stdout is not None  # `start` makes a pipe.
      threads.submit(copy, name, p.stdout)
    return wait(threads, processes, needed)


def run_commands(options: argparse.Namespace) -> dict[str, list[str]]:
  """Returns {name: module and arguments} of the processes of one run."""
  together = [f"--coordinator=localhost:{free_port()}", f"--num_processes={options.n}"]
  args = options.args
  if args[0].startswith("-"):
    args = ["main", *args]
  return {
    str(i): ["diloco", *args, *together, f"--process_id={i}"] for i in range(options.n)
  }


def site_commands(options: argparse.Namespace) -> dict[str, list[str]]:
  """Returns {name: module and arguments} of the sites of one run."""
  parser = Parser(allow_abbrev=False, add_help=False)
  parser.add_argument("--workdir", type=as_path, required=True)
  known, args = parser.parse_known_args(options.args)
  args += ["--config.overlap.transport=sites", f"--config.sites.count={options.n}"]
  site = ["diloco.main", f"--group={known.workdir / 'group'}"]
  return {
    str(i): [*site, f"--site={i}", f"--workdir={known.workdir / f'site-{i}'}", *args]
    for i in range(options.n)
  }


def start(command: list[str], options: argparse.Namespace) -> subprocess.Popen:
  env = {**os.environ, "PYTHONUNBUFFERED": "1"}
  if options.devices:
    flag = f"--xla_force_host_platform_device_count={options.devices}"
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {flag}".strip()
  return subprocess.Popen(
    [sys.executable, "-m", *command],
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    start_new_session=True,  # Only `forward_signals` passes Ctrl-C on to a process.
  )


def copy(name: str, stream: IO[bytes]) -> None:
  """Prints the lines of a process; those of a progress bar end in carriage returns."""
  for line in iter(stream.readline, b""):
    for part in line.decode(errors="replace").splitlines():
      part = _GLOO.sub("", part)  # Gloo's message may follow a progress bar.
      if part.strip():
        with contextlib.suppress(BrokenPipeError):  # If nobody reads the output, go on.
          print(f"[{name}] {part}", flush=True)


def forward_signals(processes: list[subprocess.Popen]) -> None:
  received = list[int]()

  def forward(signum: int, frame: object) -> None:
    del frame
    received.append(signum)
    for p in processes:
      p.send_signal(signum if len(received) == 1 else signal.SIGKILL)

  signal.signal(signal.SIGTERM, forward)
  signal.signal(signal.SIGINT, forward)


def wait(
  threads: futures.Executor, processes: dict[str, subprocess.Popen], needed: set[str]
) -> int:
  """Waits for all processes; returns the status of the first that failed.

  If one of `needed` fails, the others are killed after GRACE seconds.
  """

  def kill_all() -> None:
    for p in processes.values():
      p.kill()

  code, grace = 0, threading.Timer(GRACE, kill_all)
  names = {threads.submit(p.wait): name for name, p in processes.items()}
  for end in futures.as_completed(names):
    name, status = names[end], end.result()
    if status:
      how = f"code {status}" if status > 0 else f"signal {-status}"
      print(f"process {name} ended with {how}.", file=sys.stderr)
      # Shells report the end by a signal as 128 plus the signal's number.
      code = code or (status if status > 0 else 128 - status)
      if name in needed and grace.ident is None:  # No timer runs yet.
        grace.start()
  grace.cancel()
  return code


if __name__ == "__main__":
  sys.exit(guarded(main))
