"""Trains a model; the same command continues a run.

python -m diloco.main --config=sample --workdir=runs/sample
python -m diloco.main --config=sample --workdir=runs/dp --config.algorithm=data_parallel
python -m diloco.main --config=chinchilla:1.3B,M=2 --workdir=/data/run \\
  '--config.overlap.taus=(1,4)' --config.wire.format=fp32
python -m diloco.main --config=my_config.py --print_config

--config is a file, or the name of a config that ships with diloco (`python -m diloco`
lists them); a text after a colon is the config's argument. --config.FIELD=VALUE changes
a field. --print_config prints every field with its value, limits and meaning.

Several processes train together if each is started with --coordinator, --num_processes
and --process_id, or with --distributed=auto; see docs/cluster.md.
"""

import sys
import traceback

from absl import flags, logging

from diloco.config import resolve
from diloco.config.command_line import define_config, run
from diloco.errors import ConfigError
from diloco.util.command import guarded, interrupted, make_folder
from diloco.util.files import disk_is_full

FLAGS = flags.FLAGS
define_config()
flags.DEFINE_string("workdir", None, "Folder of the run; a run that is there goes on.")
flags.DEFINE_boolean(
  "print_config", False, "Print every field with value and meaning, and end."
)
flags.DEFINE_string(
  "coordinator",
  None,
  "Address, host:port, of process 0; with --site, of diloco.coordinator, or a folder.",
)
flags.DEFINE_integer("site", None, "This site, from 0 (docs/sites.md).", lower_bound=0)
flags.DEFINE_string(
  "process0", None, "With --site, if it has several processes: host:port of the first."
)
flags.DEFINE_string("tls", "", "With --site: folder with ca.pem, cert.pem and key.pem.")
flags.DEFINE_boolean("insecure", False, "With --site: plain text, on localhost only.")
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
  logging.set_verbosity(logging.WARNING)  # Orbax logs a page per checkpoint.
  # Imported after the flags are parsed, so that --help and flag errors answer fast.
  from diloco import train
  from diloco.log.log import TrainingDiverged
  from diloco.mesh import memory
  from diloco.mesh.compiling import announce_compilations
  from diloco.processes import distributed as processes
  from diloco.processes import stop
  from diloco.processes.peers import Peers, ProcessLost
  from diloco.spec.plugins import TRANSPORTS
  from diloco.wire.transport import ExchangeFailed

  peers = Peers()
  stop.watch_signals()
  try:
    # These errors need not wait for the other processes.
    c = resolve(FLAGS.config)
    workdir = make_folder(FLAGS.workdir, "--workdir")
    alone = FLAGS.site is None
    for name in ("process0", "tls", "insecure") if alone else ():
      if FLAGS[name].value:
        raise ConfigError(
          f"--{name} is {FLAGS[name].value}, but --site is not given; add --site=K."
        )
    peers = processes.initialize(
      FLAGS.coordinator if alone else FLAGS.process0,
      FLAGS.num_processes,
      FLAGS.process_id,
      auto=FLAGS.distributed == "auto",
      timeout=FLAGS.initialization_timeout,
    )
    part = None
    if not alone:
      make_part = TRANSPORTS[c.overlap.transport].make_part
      if not make_part:
        raise ConfigError(
          f"overlap.transport is {c.overlap.transport}, which needs no --coordinator"
          " and --site (docs/sites.md)."
        )
      group = (FLAGS.coordinator or "", FLAGS.tls, FLAGS.insecure)
      part = make_part(c, FLAGS.site, *group, peers)
    if peers.index == 0:
      announce_compilations()
    train.train(FLAGS.config, workdir, peers, part)
    peers.close()
  except (ConfigError, TrainingDiverged, ProcessLost) as error:
    peers.fail(str(error), code=2 if isinstance(error, ConfigError) else 1)
  except ExchangeFailed as error:
    peers.await_loss()
    peers.fail(str(error))
  except stop.Interrupted:
    peers.close()
    sys.exit(interrupted())
  except KeyboardInterrupt:
    peers.fail(
      "interrupted; the same command goes on from the newest checkpoint, if any.",
      interrupted(),
    )
  except Exception as error:
    reason = memory.explain(error) or disk_is_full(error)
    if peers.count == 1 and not reason:
      raise
    peers.await_loss()
    if not reason:
      traceback.print_exc()
    peers.fail(reason or f"{type(error).__name__}: {error}")


def print_config() -> None:
  """Prints the fields of --config."""
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
  except KeyboardInterrupt:  # While modules were imported.
    sys.exit(interrupted())
