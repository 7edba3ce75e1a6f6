"""The progress bar of every command. No JAX."""

import contextlib
import io
import os
import sys
from typing import Any

import tqdm


class _Lines(io.TextIOBase):
  """Writes each state of a bar to stderr as a line, for files and pipes."""

  encoding = sys.stderr.encoding

  def write(self, text: str) -> int:
    text = text.strip()  # Drops carriage returns, and blanks that erase older states.
    return sys.stderr.write(f"{text}\n") if text else 0

  def flush(self) -> None:
    sys.stderr.flush()


def make_bar(**options: Any) -> tqdm.tqdm:
  """Makes a progress bar on stderr; without a terminal, a line every 15 s or more.

  Args:
    options: as for tqdm.tqdm, such as total, unit and desc.
  """
  if not sys.stderr.isatty():
    return tqdm.tqdm(file=_Lines(), mininterval=15, **options)
  with contextlib.suppress(OSError, ValueError):
    if not os.get_terminal_size(sys.stderr.fileno()).columns:  # Some report 0.
      options["ncols"] = 80
  return tqdm.tqdm(dynamic_ncols="ncols" not in options, mininterval=0.2, **options)
