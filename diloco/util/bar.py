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
    text = text.strip()  # Of carriage returns, and of blanks that hide a longer state.
    return sys.stderr.write(f"{text}\n") if text else 0

  def flush(self) -> None:
    sys.stderr.flush()


def make_bar(**options: Any) -> tqdm.tqdm:
  """Makes a progress bar on stderr; without a terminal, it prints a line now and then.

  Args:
    options: as for tqdm.tqdm, such as total, unit and desc.
  """
  if not sys.stderr.isatty():
    return tqdm.tqdm(file=_Lines(), mininterval=15, **options)
  with contextlib.suppress(OSError, ValueError):
    if not os.get_terminal_size(sys.stderr.fileno()).columns:  # As under some programs.
      options["ncols"] = 80
  return tqdm.tqdm(dynamic_ncols="ncols" not in options, mininterval=0.2, **options)
