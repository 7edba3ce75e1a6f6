"""Shortens the errors of Orbax from a page to a few words.

Orbax and TensorStore log an error in each thread that meets the error. They raise
exceptions of many types, whose messages include TensorStore's options. They also leave
unawaited coroutines behind, about which Python warns. Callers of Orbax use this file to
report the reason once.
"""

import functools
import logging
import os
import sys
import traceback
import warnings
from typing import Any

from diloco.errors import of_system


@functools.cache  # Once per process.
def hush() -> None:
  """Drops the logs of Orbax, and the warnings about it that follow an error."""
  logging.getLogger("absl").addFilter(lambda record: not of_orbax(record.pathname))
  # Orbax raises the first error and closes the event loop. Then asyncio logs the other
  # errors, and the writes that are unfinished.
  logging.getLogger("asyncio").addFilter(lambda record: not _another_error(record))
  warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
  hook = sys.unraisablehook
  sys.unraisablehook = lambda ignored: None if _left_behind(ignored) else hook(ignored)


def of_orbax(text: str) -> bool:
  """Returns whether a text names a source file of Orbax."""
  return f"{os.sep}orbax{os.sep}checkpoint{os.sep}" in text


def reason_of(error: Exception) -> str:
  """Returns the reason why a call of Orbax failed, in one line."""
  system = of_system(error)
  if system and system.strerror:
    where = f": {system.filename}" if system.filename else ""
    return f"{system.strerror}{where}"
  while isinstance(error.__cause__, Exception):
    error = error.__cause__
  text = str(error).partition("\n")[0]
  # Drops the options at the end of TensorStore's message, and the text before the name
  # of the last file, which is the most precise place of the error.
  text = text.partition(" [tensorstore_spec")[0]
  text = text[max(text.rfind("local file "), 0) :]
  plain = text and type(error) in (ValueError, OSError)
  return text if plain else f"{type(error).__name__}: {text}"


def _another_error(record: logging.LogRecord) -> bool:
  """Returns whether asyncio logs a later error of Orbax, or an unfinished write."""
  trace = traceback.format_exception(*record.exc_info) if record.exc_info else []
  text = "".join([record.getMessage(), *trace])
  # A log of TensorStore has no stack frames, but names the files' format, OCDBT.
  of_tensorstore = " in OCDBT database " in text
  return of_orbax(text) or of_tensorstore


def _left_behind(ignored: Any) -> bool:
  """Returns whether Python ignored an exception that only follows an earlier failure.

  The exception comes from a coroutine, or from `__del__` of an object that is not
  complete because of an interrupt.
  """
  origin = ignored.object
  code = getattr(origin, "cr_code", None) or getattr(origin, "__code__", None)
  closed = str(ignored.exc_value) == "Event loop is closed"
  return closed or (code is not None and of_orbax(code.co_filename))
