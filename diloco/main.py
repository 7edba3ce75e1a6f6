"""Trains from the command line.

python -m diloco.main --config=configs/sample.py --workdir=/tmp/sample
python -m diloco.main --config=configs/sample.py --workdir=/tmp/dp \\
  --config.algorithm=data_parallel

Several processes train together when each is started with --coordinator,
--num_processes and --process_id, or with --distributed=auto; see docs/cluster.md.
"""

import sys
import traceback

from absl import app, flags, logging
from ml_collections import config_flags

from diloco.config import ConfigError, resolve
from diloco.config.command_line import make_folder, parse_flags

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "A file with get_config(), for example configs/sample.py."
)
_WORKDIR = flags.DEFINE_string(
  "workdir",
  None,
  "Where checkpoints, metrics and the summary go; resumed if it exists.",
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "host:port of process 0, for a run of several processes."
)
_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", None, "Processes of the run, all together.", lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer(
  "process_id", None, "Which of them this is, from 0.", lower_bound=0
)
_DISTRIBUTED = flags.DEFINE_enum(
  "distributed",
  "manual",
  ["manual", "auto"],
  "auto: coordinator, number and id come from Slurm, Open MPI, GKE or Cloud TPU.",
)
_TIMEOUT = flags.DEFINE_integer(
  "initialization_timeout", 300, "Seconds for all processes to come.", lower_bound=1
)


def main(argv) -> None:
  del argv
  logging.set_verbosity(logging.WARNING)  # Orbax says a page per checkpoint.
  # After the flags are parsed, so that --help and flag errors answer at once.
  from diloco import train
  from diloco.run import processes
  from diloco.run.log import TrainingDiverged
  from diloco.wire.transport import ExchangeFailed

  peers = processes.Peers()
  try:
    # These errors need not wait for the other processes.
    resolve(_CONFIG.value)
    make_folder(str(_WORKDIR.value), "--workdir")
    peers = processes.initialize(
      _COORDINATOR.value,
      _NUM_PROCESSES.value,
      _PROCESS_ID.value,
      auto=_DISTRIBUTED.value == "auto",
      timeout=_TIMEOUT.value,
      remedy=f"The same command goes on from the last checkpoint in {_WORKDIR.value}.",
    )
    train.train(_CONFIG.value, str(_WORKDIR.value), peers)
    peers.close()
  except (
    ConfigError,
    TrainingDiverged,
    ExchangeFailed,
    processes.ProcessLost,
  ) as error:
    if isinstance(error, ExchangeFailed):
      peers.await_loss()
    processes.say(f"error: {error}")
    code = 2 if isinstance(error, ConfigError) else 1
    peers.fail(str(error), code)
    sys.exit(code)
  except (Exception, KeyboardInterrupt) as error:
    if peers.count == 1:
      raise
    if isinstance(error, Exception):
      peers.await_loss()
      traceback.print_exc()
    peers.fail(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "workdir"])
  app.run(main, flags_parser=parse_flags)
