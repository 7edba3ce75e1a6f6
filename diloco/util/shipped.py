"""Finds the files that ship with the package. No JAX.

Configs, launchers and docs/ladder.csv are inside the package in a wheel, and beside the
package in a clone.
"""

import csv
import os
import pathlib

PACKAGE = pathlib.Path(__file__).parents[1]


def papers_table(package: str, name: str) -> list[dict[str, str]]:
  """Reads the rows of a paper's table, `diloco/<package>/papers/<name>.csv`."""
  with (PACKAGE / package / "papers" / f"{name}.csv").open() as file:
    return list(csv.DictReader(file))


def folder(name: str) -> pathlib.Path:
  """Returns the folder `configs`, `scripts` or `docs`; a wheel has only some files."""
  inside = PACKAGE / name
  return inside if inside.is_dir() else PACKAGE.parent / name


def find(path: str) -> str:
  """Returns the path of the Python file that a path or a name means.

  Args:
    path: a file; or the name of a shipped config, such as sample, configs/sample.py or
      diloco/configs/sample.py; or a file of the package, such as diloco/sweep/saved.py.
      If the current folder has such a file, this file is taken.

  Returns:
    The path of the file. If there is no such file, `path` itself.
  """
  path = os.path.expanduser(path)
  given, stem = pathlib.Path(path), pathlib.Path(path).stem
  spellings = (stem, f"{stem}.py", f"configs/{stem}.py", f"diloco/configs/{stem}.py")
  candidates = []
  if str(given) in spellings:
    candidates.append(folder("configs") / f"{stem}.py")
  if given.parts[:1] == ("diloco",):
    candidates.append(PACKAGE.parent / given)
  if os.path.isfile(path):  # For too long a name, pathlib would raise an error.
    return path
  return next((str(file) for file in candidates if os.path.isfile(file)), path)


def names(function: str) -> list[str]:
  """Lists the shipped configs (`get_config`) or sweeps (`get_sweep`) by name."""
  # A sweep also has a get_config, but the command line cannot give it an argument.
  is_sweep = lambda file: "def get_sweep(" in file.read_text()
  files = sorted(folder("configs").glob("*.py"))
  return [f.stem for f in files if is_sweep(f) == (function == "get_sweep")]
