"""Runs notebooks and stores their outputs; all of notebooks/ or those that are named.

  pip install -e '.[notebooks]'
  python notebooks/run_notebooks.py
  python notebooks/run_notebooks.py notebooks/quickstart.ipynb

A notebook is written only if all its cells run. Messages on standard error, times and
versions are not stored. `two_places` runs twice at once, in a common folder.
"""

import argparse
import functools
import os
import pathlib
import sys
import tempfile
import time
from concurrent import futures

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = pathlib.Path(__file__).parent
LONGEST_CELL = 600  # Seconds.
PLACES = {"two_places": 2}  # How often a notebook runs at once; others run once.


def run(path: pathlib.Path) -> None:
  """Runs one notebook in its folder, and stores it if something has changed.

  Raises:
    CellExecutionError: a cell failed; the file is left as it was.
  """
  books = [nbformat.read(path, as_version=4) for _ in range(PLACES.get(path.stem, 1))]
  with tempfile.TemporaryDirectory() as group, futures.ThreadPoolExecutor() as pool:
    run_book = functools.partial(_run_book, folder=path.parent, group=group)
    book, *_ = pool.map(run_book, books)
  for cell in book.cells:
    if cell.cell_type == "code":
      cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
  # The kernel adds its version of Python here.
  book.metadata = {
    "kernelspec": {
      "display_name": "Python 3",
      "language": "python",
      "name": "python3",
    },
    "language_info": {"name": "python"},
  }
  text = nbformat.writes(book) + "\n"
  if text != path.read_text():
    path.write_text(text)


def _run_book(
  book: nbformat.NotebookNode, folder: pathlib.Path, group: str
) -> nbformat.NotebookNode:
  client = NotebookClient(
    book,
    timeout=LONGEST_CELL,
    kernel_name="python3",
    resources={"metadata": {"path": str(folder)}},
    record_timing=False,
  )
  return client.execute(env={**os.environ, "GROUP": group})


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "notebooks", nargs="*", type=pathlib.Path, default=sorted(FOLDER.glob("*.ipynb"))
  )
  for path in parser.parse_args(argv).notebooks:
    begin = time.monotonic()
    try:
      run(path)
    except (OSError, CellExecutionError) as error:
      print(f"error: {path} is left as it was: {error}", file=sys.stderr)
      return 1
    print(f"{path}: {time.monotonic() - begin:.0f} s", flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
