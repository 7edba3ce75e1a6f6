"""Damages of files, for tests of what is read from them."""

import os
import pathlib
from collections.abc import Callable, Iterator

import numpy as np

Damage = Callable[[pathlib.Path], None]


def flip(file: pathlib.Path, where: float) -> None:
  """Flips one bit, at a place from 0 (the first) to 1 (after the last)."""
  content = bytearray(file.read_bytes())
  bit = int(where * 8 * len(content))
  content[bit // 8] ^= 1 << bit % 8
  file.write_bytes(content)


def all_of(folder: pathlib.Path, flips: int) -> Iterator[tuple[str, Damage]]:
  """Yields each damage of each file of a folder: its name, and what does it.

  Args:
    flips: flipped bits per file, one at a time, at random places.
  """
  rng = np.random.default_rng(0)
  for file in sorted(p for p in folder.rglob("*") if p.is_file()):
    name = file.relative_to(folder)
    yield f"{name} cut to half", lambda p, n=name: cut(p / n, 0.5)
    yield f"{name} cut to nothing", lambda p, n=name: cut(p / n, 0)
    yield f"{name} deleted", lambda p, n=name: (p / n).unlink()
    yield f"{name} zeroed", lambda p, n=name: zero(p / n)
    for where in rng.random(flips):
      yield f"{name} flipped at {where}", lambda p, n=name, w=where: flip(p / n, w)


def cut(file: pathlib.Path, part: float) -> None:
  os.truncate(file, int(file.stat().st_size * part))


def zero(file: pathlib.Path) -> None:
  file.write_bytes(bytes(file.stat().st_size))
