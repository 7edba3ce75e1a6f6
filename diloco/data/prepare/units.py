"""Runs units of work in several processes. A unit makes one file, whole or not at all.

A file gets its name only when it is complete and on disk. If the command is killed at
any moment, every existing file is whole, and the same command makes the missing files.
"""

import concurrent.futures
import contextlib
import multiprocessing
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from diloco.data.prepare.pieces import Piece
from diloco.errors import ConfigError
from diloco.util.bar import make_bar
from diloco.util.files import try_lock

# {path of a file: the pieces of a source from which the file is made}
Units: TypeAlias = Mapping[pathlib.Path, list[Piece]]


def run_units(
  make: Callable[[pathlib.Path, list[Piece]], None],
  units: Units,
  workers: int,
  title: str,
) -> None:
  """Makes the files that are missing, with a progress bar in bytes.

  Args:
    make: function that makes a file from its pieces. Other processes call it, so it
      must be a module-level function or a `functools.partial` of such a function.
    units: all units, finished units included.
    workers: number of processes.
    title: title of the progress bar.

  Raises:
    ConfigError: a process was killed.
    Exception: the first exception that a unit raised. Finished files stay.
  """
  sizes = {path: sum(p.size for p in pieces) for path, pieces in units.items()}
  missing = [path for path in units if not path.is_file()]
  total = sum(sizes.values())
  done = total - sum(sizes[path] for path in missing)
  others = set(multiprocessing.active_children())
  spawn = multiprocessing.get_context("spawn")
  pool = concurrent.futures.ProcessPoolExecutor(workers, spawn, _end_with_parent)
  bar = make_bar(desc=title, total=total, initial=done, unit="B", unit_scale=True)
  with pool, bar:
    futures = {pool.submit(make, path, units[path]): sizes[path] for path in missing}
    try:
      for future in concurrent.futures.as_completed(futures):
        future.result()
        bar.update(futures[future])
    except concurrent.futures.process.BrokenProcessPool as error:
      raise ConfigError(
        f"A process of --workers={workers} was killed, perhaps because memory ran out;"
        " start the same command again to continue."
      ) from error
    except BaseException:  # Even after Ctrl-C, ends the units that are in progress.
      for process in set(multiprocessing.active_children()) - others:
        process.terminate()
      raise


def _end_with_parent() -> None:
  """Ends this process when its parent ends, even if the parent was killed."""

  def watch() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

  threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def lock(folder: pathlib.Path) -> Iterator[None]:
  """Makes and locks a folder, and deletes the temporary files of killed processes.

  The system releases the lock when the process ends, even if the process is killed.

  Raises:
    ConfigError: another process has locked the folder.
  """
  folder.mkdir(parents=True, exist_ok=True)
  with (folder / ".lock").open("w") as file:
    if not try_lock(file):
      raise ConfigError(
        f"--output is {str(folder)!r}, but another process is working there; wait for"
        " it to end."
      )
    for unfinished in folder.glob(".*.[0-9]*.tmp"):
      unfinished.unlink(missing_ok=True)
    yield
