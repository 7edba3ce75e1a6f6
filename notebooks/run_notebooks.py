"""Runs notebooks and stores their outputs; all of notebooks/ or those that are named.

  pip install -e '.[notebooks]'
  python notebooks/run_notebooks.py
  python notebooks/run_notebooks.py notebooks/quickstart.ipynb

A notebook is written only if all its cells run. Messages on standard error, times and
versions are not stored.
"""

import argparse
import pathlib
import sys
import time

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = pathlib.Path(__file__).parent
LONGEST_CELL = 600  # Seconds.


def run(path: pathlib.Path) -> None:
  """Runs one notebook in its folder, and stores it if something has changed.

  Raises:
    CellExecutionError: a cell failed; the file is left as it was.
  """
  book = nbformat.read(path, as_version=4)
  NotebookClient(
    book,
    timeout=LONGEST_CELL,
    kernel_name="python3",
    resources={"metadata": {"path": str(path.parent)}},
    record_timing=False,
  ).execute()
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
