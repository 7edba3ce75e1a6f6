"""Trains until the run is done; starts diloco.main again when it dies.

python -m diloco keep_running --config=sample --workdir=/data/run

All arguments go to diloco.main. Every start continues from the newest checkpoint. The
command ends with the run; after a mistake in the arguments (exit status 2); and after
five deaths in a row without a new checkpoint. SIGTERM and Ctrl-C are passed on: the run
saves, and this command ends too. docs/cloud.md shows where this helps.
"""

import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from diloco.checkpoint.record import steps_of
from diloco.errors import ConfigError
from diloco.util.command import INTERRUPTED, guarded
from diloco.util.files import local_path

FINAL = (0, 2, INTERRUPTED)  # Exit statuses after which a restart is pointless.
MOST_DEATHS = 5
PAUSE_S = 5.0  # The other processes of a run need time to end, too.


def keep_running(command: Sequence[str], workdir: pathlib.Path) -> int:
  """Runs the command until it ends well, or dies too often; returns its status."""
  child: subprocess.Popen | None = None
  asked: list[int] = []

  def forward(signum: int, frame: object) -> None:
    del frame
    asked.append(signum)
    if child is not None:
      child.send_signal(signum)

  for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, forward)
  deaths = 0
  while True:
    before = steps_of(workdir)
    # In a group of its own: Ctrl-C reaches it once, through this process.
    child = subprocess.Popen(command, start_new_session=True)
    status = child.wait()
    deaths = deaths + 1 if steps_of(workdir) == before else 1
    if status in FINAL or asked or deaths == MOST_DEATHS:
      return status if status >= 0 else 128 - status  # As a shell reports a signal.
    how = f"status {status}" if status > 0 else f"signal {-status}"
    print(f"diloco.main died of {how}; it starts again.", file=sys.stderr, flush=True)
    time.sleep(PAUSE_S)
    if asked:
      return 128 + asked[0]


def run(args: Sequence[str]) -> int:
  workdir = re.search(r"^--?workdir[=\n](.+)", "\n".join(args), re.MULTILINE)
  if not workdir:
    raise ConfigError("--workdir must be given, with the other flags of diloco.main.")
  command = [sys.executable, "-m", "diloco.main", *args]
  return keep_running(command, local_path(workdir[1], "--workdir"))


if __name__ == "__main__":
  if {"--help", "-h"} & set(sys.argv[1:]):
    sys.exit(guarded(print, __doc__))
  sys.exit(guarded(run, sys.argv[1:]))
