"""Trains a model; the same command continues a run.

python -m diloco.main --config=sample --workdir=runs/sample
python -m diloco.main --config=sample --workdir=runs/dp --config.algorithm=data_parallel
python -m diloco.main --config=chinchilla:1.3B,M=2 --workdir=/data/run \\
  '--config.overlap.taus=(1,4)' --config.wire.format=fp32
python -m diloco.main --config=my_config.py --print_config

--config is a file, or the name of a config that ships with diloco (`python -m diloco`
lists the names); a text after a colon is the config's argument. --config.FIELD=VALUE
changes a field. --print_config prints every field with its value, limits and meaning.

Several processes train together if each is started with --coordinator, --num_processes
and --process_id, or with --distributed=auto; see docs/machines.md.
"""

import sys
import traceback
from collections.abc import Callable
from typing import Any

from absl import flags, logging

from diloco.config import Config, resolve
from diloco.config.command_line import define_config, run
from diloco.errors import ConfigError, explain
from diloco.spec import plugins
from diloco.util import files, remote
from diloco.util.command import guarded, interrupted, make_folder

FLAGS = flags.FLAGS
define_config()
flags.DEFINE_string(
  "workdir",
  None,
  "Folder of the run, or s3://BUCKET/RUN; a run there goes on.",
)
flags.DEFINE_boolean(
  "print_config", False, "Print every field with value and meaning, and end."
)
flags.DEFINE_string(
  "coordinator", None, "Address, host:port, of process 0, if there are several."
)
flags.DEFINE_integer("site", None, "This site, from 0 (docs/sites.md).", lower_bound=0)
flags.DEFINE_string("group", None, "Folder or bucket in which the sites of a run meet.")
flags.DEFINE_integer("num_processes", None, "Number of processes.", lower_bound=1)
flags.DEFINE_integer("process_id", None, "This process, from 0.", lower_bound=0)
flags.DEFINE_enum(
  "distributed",
  "manual",
  ["manual", "auto"],
  "auto: coordinator, count and number come from Slurm, Open MPI, GKE or Cloud TPU.",
)
flags.DEFINE_integer(
  "initialization_timeout", 300, "Seconds to wait for all processes.", lower_bound=1
)


def main(_: list[str]) -> None:
  if FLAGS.print_config:
    sys.exit(guarded(print_config, mistakes=ConfigError))
  # Finds mistakes before this process waits for other processes or for JAX.
  c = resolve(FLAGS.config)
  make_part = find_part(c)
  workdir = FLAGS.workdir
  if files.is_address(workdir):
    workdir = remote.local_copy(workdir, "--workdir", writes=True)
  else:
    workdir = make_folder(workdir, "--workdir", later=True)  # Checks; makes nothing.
  logging.set_verbosity(logging.WARNING)  # Orbax logs a page for each checkpoint.
  # These imports come after the flags, so that --help and flag errors answer fast.
  from diloco import train
  from diloco.mesh import devices, memory
  from diloco.mesh.compiling import announce_compilations
  from diloco.processes import distributed as processes
  from diloco.processes import stop
  from diloco.processes.peers import Peers, ProcessLost

  peers = Peers()
  stop.watch_signals()
  try:
    peers = processes.initialize(
      FLAGS.coordinator,
      FLAGS.num_processes,
      FLAGS.process_id,
      auto=FLAGS.distributed == "auto",
      timeout=FLAGS.initialization_timeout,
    )
    part = make_part(peers) if make_part else None
    if peers.count == 1 and not part:
      devices.divide_cpu(c.mesh.cpu_devices)
    if peers.index == 0:
      announce_compilations()
    train.train(c, workdir, peers, part)
    peers.close()
  except stop.Interrupted:
    peers.close()
    sys.exit(interrupted())
  except KeyboardInterrupt:
    peers.fail(
      "interrupted; the same command goes on from the newest checkpoint, if any.",
      interrupted(),
    )
  except Exception as error:
    reason = memory.explain(error)
    told = (reason, 1) if reason else explain(error)
    if peers.count == 1 and not told:
      raise
    if not isinstance(error, ConfigError | ProcessLost):
      peers.await_loss()  # A lost process may be the cause.
    if not told:
      traceback.print_exc()
    peers.fail(*(told or (f"{type(error).__name__}: {error}", 1)))


def find_part(c: Config) -> Callable[[Any], Any] | None:
  """Returns the function that makes this site's part of a run; None without sites.

  Raises:
    ConfigError: the flags cannot work, or the group has another config.
  """
  transport = plugins.transport(c.overlap.transport)
  if (FLAGS.site is None) != (FLAGS.group is None):
    raise ConfigError(
      f"--site is {FLAGS.site} and --group is {FLAGS.group}; give both, or none."
    )
  if FLAGS.site is None:
    return None
  if not transport.make_part:
    raise ConfigError(
      f"overlap.transport is {c.overlap.transport}, which needs no --group and --site"
      " (docs/sites.md)."
    )
  return transport.make_part(c, FLAGS.site, FLAGS.group)


def print_config() -> None:
  """Prints all fields of --config."""
  from diloco.config import describe

  print(describe.text(FLAGS.config))


if __name__ == "__main__":
  flags.mark_flag_as_required("config")
  flags.register_multi_flags_validator(
    ["workdir", "print_config"],
    lambda given: given["workdir"] is not None or given["print_config"],
    "Flag --workdir must have a value other than None.",
  )
  try:
    run(main)
  except KeyboardInterrupt:  # During the imports.
    sys.exit(interrupted())
