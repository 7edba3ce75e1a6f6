"""Units of work over processes, each of which makes one file, whole or not at all.

A file is written under another name and renamed when it is complete and on disk, so
after a kill at any moment what exists is whole, and the rest is made anew.
"""

import concurrent.futures
import contextlib
import fcntl
import json
import multiprocessing
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import tqdm

from diloco.config import ConfigError

LOCK = ".lock"


def run_units(
  function: Callable[[Any], dict[str, int]],
  units: Sequence[Any],
  sizes: Sequence[int],
  done: int,
  workers: int,
  what: str,
) -> None:
  """Runs `function` on all units over processes, with a progress bar in bytes.

  Args:
    function: of a module, so that processes find it; returns counts to show.
    units: its arguments.
    sizes: bytes of each.
    done: bytes of units that were finished before.
    workers: processes.
    what: title of the bar.

  Raises:
    ConfigError: a process was killed.
    Exception: the first one that a unit raised; finished units stay.
  """
  start, counts = time.perf_counter(), dict[str, int]()
  others = set(multiprocessing.active_children())
  pool = concurrent.futures.ProcessPoolExecutor(
    max(min(workers, len(units)), 1),
    mp_context=multiprocessing.get_context("spawn"),
    initializer=_end_with,
    initargs=(os.getpid(),),
  )
  total = done + sum(sizes)
  with (
    pool,
    tqdm.tqdm(total=total, initial=done, desc=what, unit="B", unit_scale=True) as bar,
  ):
    futures = {pool.submit(function, u): size for u, size in zip(units, sizes)}
    try:
      for future in concurrent.futures.as_completed(futures):
        for key, value in future.result().items():
          counts[key] = counts.get(key, 0) + value
        seconds = time.perf_counter() - start
        bar.set_postfix_str(
          ", ".join(f"{k} {v:,} ({v / seconds:,.0f}/s)" for k, v in counts.items()),
          refresh=False,
        )
        bar.update(futures[future])
    except concurrent.futures.process.BrokenProcessPool as error:
      raise ConfigError(
        f"A process of --workers={workers} was killed, perhaps for want of memory;"
        " start the same command again, it goes on."
      ) from error
    except BaseException:  # Also Ctrl-C: what is half done is made anew anyway.
      for process in set(multiprocessing.active_children()) - others:
        process.terminate()
      raise


def _end_with(parent: int) -> None:
  """Makes this process end soon after its parent was killed."""

  def watch() -> None:
    while os.getppid() == parent:
      time.sleep(0.5)
    os._exit(1)

  threading.Thread(target=watch, daemon=True).start()


def temporary(path: pathlib.Path) -> pathlib.Path:
  """Where this process writes what will be `path`."""
  return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
  """A file that appears under its name only when it is complete and on disk."""
  unfinished = temporary(path)
  with unfinished.open("wb+") as file:
    yield file
    file.flush()
    os.fsync(file.fileno())
  unfinished.rename(path)


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a JSON file all at once."""
  with replacing(path) as file:
    file.write((json.dumps(value, indent=2) + "\n").encode())


@contextlib.contextmanager
def lock(folder: pathlib.Path) -> Iterator[None]:
  """Keeps a second preparation out, and clears away what a killed one left.

  The system gives the lock up when the process ends, however it ends.
  """
  with (folder / LOCK).open("w") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      raise ConfigError(
        f"--output is {str(folder)!r}, in which another process is at work; wait for"
        " it."
      ) from error
    for unfinished in folder.glob(".*.tmp"):
      unfinished.unlink(missing_ok=True)
    yield
