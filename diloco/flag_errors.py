"""Command lines that cannot be understood, told in one sentence."""

import sys

from absl import flags


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
