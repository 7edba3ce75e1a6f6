"""What a command tells about an error, and the exit status: one rule for all commands.

Exit status 2 means that a person must mend something. Status 1 means that the cause may
pass: systemd or a scheduler may start the same command again.
"""

import errno
import os
import re

# What the system answers when a person has named a wrong path or lacks a right. All
# other answers may pass: a time-out, a stale handle, too many open files, a full disk,
# a file system that is read-only after a fault.
_MENDED_BY_A_PERSON = {
  *(errno.EPERM, errno.EACCES, errno.ENOENT, errno.EEXIST, errno.ENOTDIR),
  *(errno.EISDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP, errno.EXDEV),
  *(errno.EINVAL, errno.EFBIG, errno.E2BIG, errno.ENOEXEC, errno.ENODEV, errno.ENXIO),
  *(errno.ENOSYS, errno.ENOTSUP, errno.EADDRNOTAVAIL),
}
_FULL = {errno.ENOSPC, errno.EDQUOT}
# How TensorStore and libraries in Rust write the system's answer into their errors.
_IN_A_TEXT = re.compile(r"os_error_code='(\d+)'|\(os error (\d+)\)")


class ConfigError(ValueError):
  """A mistake of the user; one sentence gives the field, its value and the remedy."""


class TryAgain(RuntimeError):
  """What may pass; one sentence says from where the same command goes on."""


def explain(
  error: BaseException, mistakes: type[Exception] = ConfigError
) -> tuple[str, int] | None:
  """Returns the sentence about an error and the exit status; None if it is a bug.

  Args:
    mistakes: an exception that means a mistake of the user.
  """
  if isinstance(error, TryAgain):
    return str(error), 1
  if cause := passing(error):
    return _sentence(cause), 1
  return (str(error), 2) if isinstance(error, (mistakes, OSError)) else None


def passing(error: BaseException) -> OSError | None:
  """Returns the system's answer behind an error, if that may pass; else None."""
  cause = of_system(error)
  return None if cause is None or cause.errno in _MENDED_BY_A_PERSON else cause


def is_full(error: BaseException) -> bool:
  """Whether the cause of an error is a full disk, or a quota."""
  cause = of_system(error)
  return cause is not None and cause.errno in _FULL


def of_system(error: BaseException | None) -> OSError | None:
  """Returns the system's answer behind an error: itself, its cause, or in its text."""
  while error is not None:
    # A library may use a plain OSError without a number for damaged content.
    if isinstance(error, TimeoutError | ConnectionError):
      return error
    if isinstance(error, OSError) and error.errno:
      return error
    if code := _IN_A_TEXT.search(str(error)):
      number = int(code[1] or code[2])
      return OSError(number, os.strerror(number))
    error = error.__cause__
  return None


def _sentence(cause: OSError) -> str:
  """Names the cause, and the remedy if there is one besides waiting."""
  where = f" {cause.filename}" if cause.filename else ""
  reason = cause.strerror or str(cause)
  if cause.errno in _FULL:
    return (
      f"cannot write{where} ({reason}); make room or raise the quota, then the same"
      " command goes on from what it has saved."
    )
  what = f"{where.strip()} cannot be used now" if where else "the system refused a call"
  return f"{what} ({reason}); this may pass, so start the same command again."
