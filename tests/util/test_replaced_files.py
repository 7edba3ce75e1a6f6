"""Files that are replaced at once."""

import os
import stat

import pytest

from diloco.util import files


def test_a_file_is_replaced_only_when_it_is_complete(tmp_path):
  path = tmp_path / "a.json"
  files.write_json(path, {"a": 1})

  def fill_the_disk():
    with files.replacing(path) as file:
      file.write(b"half")
      raise OSError("No space left on device")

  with pytest.raises(OSError, match="No space"):
    fill_the_disk()
  assert files.read_json(path) == {"a": 1}
  assert list(tmp_path.iterdir()) == [path]
  with files.replacing(path) as file:
    file.write(b"{}")
  assert files.read_json(path) == {}


def test_a_pipe_is_written_and_not_replaced(tmp_path):
  path = tmp_path / "pipe"
  os.mkfifo(path)
  reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
  files.write_json(path, {})
  assert os.read(reader, 100) == b"{}\n"
  os.close(reader)
  assert stat.S_ISFIFO(path.stat().st_mode)
  assert list(tmp_path.iterdir()) == [path]
