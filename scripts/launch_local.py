"""Starts N processes of one run on this machine.

  python scripts/launch_local.py -n 4 -- --config=configs/sample.py --workdir=/tmp/run

Every process is a `diloco.main` with the arguments after `--`. Every output line begins
with the number of its process. If a process fails, the others have 20 seconds to report
it and end; then they are killed. SIGTERM and SIGINT are passed on to all processes; a
second signal kills them. The exit status is that of the first process that failed. With
--devices=K each process has K forced CPU devices.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time

GRACE = 20.0  # Seconds that the others have after a process has failed.


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("-n", type=int, required=True, help="number of processes")
  parser.add_argument("--devices", type=int, default=0, help="CPU devices per process")
  parser.add_argument("args", nargs="+", help="-- and arguments of diloco.main")
  options = parser.parse_args()
  if options.n < 1:
    parser.error(f"-n is {options.n}; start at least 1 process")
  port = free_port()
  processes = [start(i, options, port) for i in range(options.n)]
  forward_signals(processes)
  threads = [
    threading.Thread(target=copy, args=(i, p.stdout)) for i, p in enumerate(processes)
  ]
  for thread in threads:
    thread.start()
  code = wait(processes)
  for thread in threads:
    thread.join()
  return code


def free_port() -> int:
  with socket.socket() as s:
    s.bind(("", 0))
    return s.getsockname()[1]


def start(i: int, options, port: int) -> subprocess.Popen:
  env = {**os.environ, "PYTHONUNBUFFERED": "1"}
  if options.devices:
    flag = f"--xla_force_host_platform_device_count={options.devices}"
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {flag}".strip()
  return subprocess.Popen(
    [
      sys.executable,
      "-m",
      "diloco.main",
      f"--coordinator=localhost:{port}",
      f"--num_processes={options.n}",
      f"--process_id={i}",
      *options.args,
    ],
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    start_new_session=True,  # Ctrl-C reaches a process once, through this one.
  )


def copy(i: int, stream) -> None:
  """Prints the lines of a process; a progress bar ends lines by carriage returns."""
  for line in iter(stream.readline, b""):
    for part in line.decode(errors="replace").splitlines():
      if part.strip():
        sys.stdout.write(f"[{i}] {part}\n")
    sys.stdout.flush()


def forward_signals(processes: list[subprocess.Popen]) -> None:
  received = []

  def forward(signum, frame):
    del frame
    received.append(signum)
    for p in processes:
      if p.poll() is None:
        p.send_signal(signum if len(received) == 1 else signal.SIGKILL)

  signal.signal(signal.SIGTERM, forward)
  signal.signal(signal.SIGINT, forward)


def wait(processes: list[subprocess.Popen]) -> int:
  """Waits for all processes, kills the rest after a failure; returns the status."""
  code, deadline, running = 0, None, dict(enumerate(processes))
  while running:
    for i, p in list(running.items()):
      if p.poll() is None:
        continue
      del running[i]
      if p.returncode:
        how = f"code {p.returncode}" if p.returncode > 0 else f"signal {-p.returncode}"
        print(f"process {i} ended with {how}.", file=sys.stderr)
        # The shell reports a signal as 128 plus its number.
        code = code or (p.returncode if p.returncode > 0 else 128 - p.returncode)
        deadline = deadline or time.monotonic() + GRACE
    if deadline and time.monotonic() > deadline:
      for p in running.values():
        p.kill()
    time.sleep(0.1)
  return code


if __name__ == "__main__":
  sys.exit(main())
