"""The progress bar of every command. No JAX."""

import contextlib
import os
import sys
from typing import Any

import tqdm


def make_bar(**options: Any) -> tqdm.tqdm:
  """Makes a progress bar on stderr; without a terminal, it prints a line now and then.

  Args:
    options: as for tqdm.tqdm, such as total, unit and desc.
  """
  interval = 0.2 if sys.stderr.isatty() else 15
  with contextlib.suppress(OSError, ValueError):
    if not os.get_terminal_size(sys.stderr.fileno()).columns:  # As under some programs.
      options["ncols"] = 80
  return tqdm.tqdm(
    dynamic_ncols="ncols" not in options, mininterval=interval, **options
  )
