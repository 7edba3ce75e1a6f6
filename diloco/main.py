"""Trains from the command line.

python -m diloco.main --config=configs/sample.py --workdir=/tmp/sample
python -m diloco.main --config=configs/sample.py --workdir=/tmp/dp \\
  --config.algorithm=data_parallel
"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

from diloco.config import ConfigError

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "A file with get_config(), for example configs/sample.py."
)
_WORKDIR = flags.DEFINE_string(
  "workdir",
  None,
  "Where checkpoints, metrics and the summary go; resumed if it exists.",
)


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
  logging.set_verbosity(logging.WARNING)  # Orbax says a page per checkpoint.
  # After the flags are parsed, so that --help and flag errors answer at once.
  from diloco import record, train

  try:
    train.train(_CONFIG.value, str(_WORKDIR.value))
  except (ConfigError, record.TrainingDiverged) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2 if isinstance(error, ConfigError) else 1)


def parse_flags(argv):
  """Parses flags; what is wrong with them is told in one sentence."""
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    # Errors of a config file come with its traceback; the last line says it.
    message = str(error).strip().splitlines()[-1].strip()
  except OSError as error:
    message = " ".join(str(error).split())
  except (AttributeError, KeyError, TypeError) as error:
    given = " ".join(a for a in argv if a.startswith("--config"))
    message = (
      f"{given}: {str(error).strip()} is no field, or its value has another type;"
      " diloco/config.py lists all fields."
    )
  print(f"error: {message}", file=sys.stderr)
  sys.exit(2)


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "workdir"])
  app.run(main, flags_parser=parse_flags)
