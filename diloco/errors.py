"""The message and the exit status of an error, by one rule for all commands.

Exit status 2 means that a person must correct something. Status 1 means that the cause
may be temporary, so systemd or a scheduler may start the same command again.
"""

import errno
import os
import re

# The errors of the operating system when a person has named a wrong path or lacks a
# permission. The causes of all other errors may be temporary: a time-out, a stale
# handle, too many open files, a full disk, a file system read-only after a fault.
_MENDED_BY_A_PERSON = {
  *(errno.EPERM, errno.EACCES, errno.ENOENT, errno.EEXIST, errno.ENOTDIR),
  *(errno.EISDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP, errno.EXDEV),
  *(errno.EINVAL, errno.EFBIG, errno.E2BIG, errno.ENOEXEC, errno.ENODEV, errno.ENXIO),
  *(errno.ENOSYS, errno.ENOTSUP, errno.EADDRNOTAVAIL, errno.EMLINK),
}
_FULL = {errno.ENOSPC, errno.EDQUOT}
# Finds the system's error number in a message of TensorStore or of a Rust library.
_IN_A_TEXT = re.compile(r"os_error_code='(\d+)'|\(os error (\d+)\)")


class ConfigError(ValueError):
  """A mistake of the user; the message gives the field, its value and the remedy."""


class TryAgain(RuntimeError):
  """An error that may be temporary; the message says from where a restart goes on."""


def explain(
  error: BaseException, mistakes: type[Exception] = ConfigError
) -> tuple[str, int] | None:
  """Returns the message and the exit status for an error; None if the error is a bug.

  Args:
    mistakes: an exception that means a mistake of the user.
  """
  if isinstance(error, TryAgain):
    return str(error), 1
  if cause := passing(error):
    return _sentence(cause), 1
  return (str(error), 2) if isinstance(error, (mistakes, OSError)) else None


def passing(error: BaseException) -> OSError | None:
  """Returns the system's error behind an error, if it may be temporary; else None."""
  cause = of_system(error)
  return None if cause is None or cause.errno in _MENDED_BY_A_PERSON else cause


def is_full(error: BaseException) -> bool:
  """Returns whether the cause of an error is a full disk or an exhausted quota."""
  cause = of_system(error)
  return cause is not None and cause.errno in _FULL


def of_system(error: BaseException | None) -> OSError | None:
  """Returns the system's error that an error is, names in its text, or has as cause."""
  while error is not None:
    if isinstance(error, TimeoutError | ConnectionError):
      return error
    # An OSError without a number is not from the system: a library may raise such an
    # error for damaged content.
    if isinstance(error, OSError) and error.errno:
      return error
    if code := _IN_A_TEXT.search(str(error)):
      number = int(code[1] or code[2])
      return OSError(number, os.strerror(number))
    error = error.__cause__
  return None


def _sentence(cause: OSError) -> str:
  """Returns a sentence with the cause and with a remedy: make room, or start again."""
  where = f" {cause.filename}" if cause.filename else ""
  reason = cause.strerror or str(cause)
  if cause.errno in _FULL:
    return (
      f"cannot write{where} ({reason}); make room or raise the quota, then the same"
      " command goes on from what it has saved."
    )
  what = f"{where.strip()} cannot be used now" if where else "the system refused a call"
  return f"{what} ({reason}); this may pass, so start the same command again."
