"""Small texts, and preparation without other processes."""

import concurrent.futures
import json

import pytest


class InLine(concurrent.futures.Executor):
  """Runs each task in this process when it is submitted."""

  def __init__(self, *_):
    pass

  def submit(self, function, *args):
    future = concurrent.futures.Future()
    future.set_result(function(*args))
    return future


@pytest.fixture
def in_line(monkeypatch):
  """Prepares data without other processes."""
  monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", InLine)


@pytest.fixture
def lines(tmp_path):
  """Writes three JSON-lines files of 100 documents; gives the glob of their names."""
  folder = tmp_path / "lines"
  folder.mkdir()
  for f in range(3):
    rows = [
      {"text": f"Document {f} {i}: {'é' * (i % 7)}\nwith {i * i} words.", "id": i}
      for i in range(100)
    ]
    text = "\n".join(json.dumps(r, ensure_ascii=i % 2 == 0) for i, r in enumerate(rows))
    (folder / f"{f}.jsonl").write_text(text + "\n" * f)
  return f"files:{folder}/*.jsonl"
