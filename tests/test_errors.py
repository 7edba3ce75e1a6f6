"""Which errors a person must mend (exit status 2), and which may pass (1)."""

import errno
import os

import pytest

from diloco import errors
from diloco.errors import ConfigError, TryAgain
from diloco.log.log import TrainingDiverged
from diloco.processes.peers import ProcessLost
from diloco.util.command import guarded
from diloco.wire.transport import ExchangeFailed


def of(number: int) -> OSError:
  return OSError(number, os.strerror(number), "/data/run")


def raised_from(error: Exception, cause: Exception) -> Exception:
  """Returns an error as `raise error from cause` makes it."""
  error.__cause__ = cause
  return error


MENDED = (
  *("EACCES", "EPERM", "ENOENT", "ENOTDIR", "EISDIR", "EEXIST", "EINVAL"),
  *("ENAMETOOLONG", "EFBIG", "ELOOP", "ENOSYS"),
)
PASSING = ("ENOSPC", "EDQUOT", "EMFILE", "EROFS", "ESTALE", "EAGAIN", "ETIMEDOUT")
TENSORSTORE = ValueError("Error writing local file [os_error_code='24' ...]")
CASES = [
  *((of(getattr(errno, name)), 2) for name in MENDED),
  *((of(getattr(errno, name)), 1) for name in PASSING),
  (TimeoutError("Orbax: 0 of 2 futures completed"), 1),
  (ConfigError("seed is x; give a number."), 2),
  (TrainingDiverged("the loss is nan; lower the rate."), 2),
  (TryAgain("later."), 1),
  (ProcessLost("process 1 is gone."), 1),
  (ExchangeFailed("an exchange failed."), 1),
  # Whatever is wrapped around the system's answer, the answer decides.
  (raised_from(ConfigError("choose another folder."), of(errno.EMFILE)), 1),
  (raised_from(ConfigError("choose another folder."), of(errno.EACCES)), 2),
  (raised_from(RuntimeError("x"), raised_from(KeyError("y"), of(errno.ESTALE))), 1),
  (TENSORSTORE, 1),
  (RuntimeError("I/O error: No space left on device (os error 28)"), 1),
  (OSError("Not a gzipped file"), 2),  # Damaged content, without a number.
  (RuntimeError("a bug"), None),
  (raised_from(RuntimeError("a bug"), KeyError("x")), None),
]


@pytest.mark.parametrize(("error", "status"), CASES, ids=lambda x: repr(x)[:60])
def test_the_cause_decides_the_exit_status(error, status, capsys):
  def run():
    raise error

  if status is None:
    assert errors.explain(error) is None
    with pytest.raises(type(error)):
      guarded(run, mistakes=ConfigError)
    return
  sentence, found = errors.explain(error)
  assert found == status == guarded(run, mistakes=ConfigError)
  assert capsys.readouterr().err == f"error: {sentence}\n"
  assert ("make room" in sentence) == errors.is_full(error)
  if cause := errors.of_system(error):
    assert (cause.strerror or str(cause)) in sentence or status == 2


def test_a_value_error_is_a_mistake_where_a_command_says_so(capsys):
  error = ValueError("--seed is x; give a number.")
  assert errors.explain(error) is None
  assert errors.explain(error, ValueError) == (str(error), 2)
