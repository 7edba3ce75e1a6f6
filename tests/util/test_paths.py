"""Paths that users give, and files that are replaced at once."""

import errno
import os
import pathlib
import re
import stat

import pytest
from running import refused

from diloco.config import command_line
from diloco.data.files import list_files
from diloco.data.prepare import prepare_data
from diloco.errors import ConfigError
from diloco.interop.load import load
from diloco.log import workdir
from diloco.tokenizer.tokenizer import load_tokenizer
from diloco.tokenizer.vocabulary import split_folder
from diloco.train import train
from diloco.util import command, files, shipped

PACKAGE = pathlib.Path(command.__file__).parents[1]


@pytest.fixture
def home(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  return tmp_path


@pytest.mark.parametrize(
  ("path", "said"),
  [
    ("gs://bucket/run", "an address; give a path of this machine"),
    ("gs:/bucket/run", "an address; give a path of this machine"),
    ("s3://bucket/run", "an address"),
    ("file:///tmp/run", "an address"),
    ("~nobody-of-this-name/run", "but there is no such user; write ./~nobody-of-"),
    ("/tmp/\udcff/run", "which is no text in UTF-8; rename it"),
    ("/tmp/a\0b", "which is no text in UTF-8"),
    pytest.param("/tmp/" + "x" * 256, "with a name of more than 255 bytes", id="long"),
  ],
)
def test_a_path_that_can_be_none_of_this_machine(path, said, tiny):
  # A run may lie in a bucket: tests/checkpoint/test_bucket.py.
  of_runs = [("workdir", lambda: load(path)), ("workdir", lambda: train(tiny, path))]
  for name, read in (
    *(() if path.startswith(("gs://", "s3://")) else of_runs),
    ("--output", lambda: files.local_path(path, "--output")),
    ("--output", lambda: command.make_folder(path, "--output")),
    ("data.source", lambda: list_files(f"files:{path}")),
    ("data.source", lambda: split_folder(f"arrays:{path}", "train")),
    ("data.tokenizer", lambda: load_tokenizer(f"{path}.model")),
  ):
    with pytest.raises(ConfigError, match=f"^{name} is '.*', {re.escape(said)}.*\\.$"):
      read()


@pytest.mark.parametrize("path", ["a:b", "run:1/x", "C:", "./gs:/x", "a b", "ü"])
def test_other_names_are_paths(path):
  assert files.local_path(path, "x") == pathlib.Path(path)


def test_a_tilde_is_the_home_everywhere(home):
  (home / "text").mkdir()
  (home / "text" / "a.txt").write_text("a")
  assert command.as_path("~/w") == home / "w"
  assert command.make_folder("~/o", "--output") == home / "o"
  assert [f.path for f in list_files("files:~/text")] == [home / "text" / "a.txt"]
  assert split_folder("arrays:~/tokens", "train") == home / "tokens" / "train"
  (home / "x.model").write_bytes(load_tokenizer("sotu_2048").serialized())
  assert load_tokenizer("~/x.model").path == home / "x.model"
  (home / "c.py").write_text(pathlib.Path(shipped.find("sample")).read_text())
  assert command_line.load_config("~/c.py").replicas == 2


def test_an_option_refuses_such_a_path_in_one_sentence():
  said = refused(prepare_data.main, "--source=sotu", "--output=gs://b/x")
  assert said.startswith("error: argument --output: it is 'gs://b/x', ")


def test_a_full_disk_is_told_with_file_and_remedy(tmp_path, monkeypatch, capsys):
  def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, "fsync", full)
  output = tmp_path / "tokens"
  args = ["--source=sotu", "--split=eval", f"--output={output}"]
  assert prepare_data.main(args) == 1
  error = capsys.readouterr().err.splitlines()[-1]
  assert re.fullmatch(
    rf"error: cannot write {output}/\S+ \(No space left on device\); make room or raise"
    " the quota, then the same command goes on from what it has saved.",
    error,
  )


def test_runs_around_a_folder_are_named(tmp_path):
  run = tmp_path / "group" / "run"
  (run / "checkpoints" / "7").mkdir(parents=True)
  (run / "metrics.jsonl").touch()
  for given in (run.parent, tmp_path, run / "checkpoints", run / "checkpoints" / "7"):
    with pytest.raises(ConfigError, match=rf"yet \(did you mean {run}\?\); train with"):
      load(given)
    with pytest.raises(ConfigError, match=rf"\(did you mean {run}\?\); give the --w"):
      workdir.read(given, "step")


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
