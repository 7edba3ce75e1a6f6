"""A run knows its text and tokenizer by content, and not by path."""

import os
import pathlib
import shutil

import pytest

from diloco import data as data_lib
from diloco import train
from diloco.config import resolve
from diloco.data.contents import contents, held_out
from diloco.data.prepare import tokenize as prepare
from diloco.errors import ConfigError
from diloco.interop.load import load
from diloco.tokenizer import vocabulary
from diloco.util import files

SHIPPED = pathlib.Path(vocabulary.__file__).parent / "shipped/sotu_2048.model"


@pytest.fixture
def folder(tmp_path):
  """A folder of text files and one of JSON lines."""
  folder = tmp_path / "text"
  folder.mkdir()
  for i in range(30):
    (folder / f"{i:02}.txt").write_text(f"Document {i}. " * 50)
  return folder


def of(tiny, **fields):
  tiny.data.update(fields)
  c = resolve(tiny)
  return contents(c, data_lib.load_tokenizer(c.data.tokenizer))


def test_a_text_is_the_same_wherever_it_lies(tiny, folder, tmp_path):
  before = of(tiny, source=f"files:{folder}")
  moved = shutil.move(folder, tmp_path / "elsewhere")
  assert of(tiny, source=f"files:{moved}/*.txt") == before


@pytest.mark.parametrize(
  "change",
  [
    lambda folder: (folder / "30.txt").write_text("One more."),
    lambda folder: (folder / "07.txt").unlink(),
    lambda folder: (folder / "07.txt").write_text("Document 8. " * 50),
    lambda folder: (folder / "07.txt").rename(folder / "29b.txt"),
    lambda folder: (folder / "07.txt").rename(folder / "07.jsonl"),
  ],
)
def test_a_text_that_changed_is_another(tiny, folder, change):
  before = of(tiny, source=f"files:{folder}")
  change(folder)
  assert of(tiny, source=f"files:{folder}")["data.source"] != before["data.source"]


def test_paragraphs_are_another_text_than_files(tiny, folder):
  whole = of(tiny, source=f"files:{folder}")
  assert of(tiny, source=f"paragraphs:{folder}")["data.source"] != whole["data.source"]


def test_the_held_out_text_has_a_digest_of_its_own(tiny, folder):
  tiny.data.source = "sotu"
  same = held_out(resolve(tiny))
  tiny.data.eval_source = f"files:{folder}"
  assert held_out(resolve(tiny)) != same


def prepare_with(model: bytes, folder: pathlib.Path, text: pathlib.Path) -> None:
  own = folder.with_suffix(".model")
  own.write_bytes(model)
  for split, name in (("train", "train"), ("eval", "validation")):
    out = folder / name
    prepare.tokenize(f"files:{text}", split, str(own), out, workers=1)
  own.unlink()


@pytest.mark.integration("whole runs")
def test_a_run_goes_on_with_moved_data_and_refuses_others(
  tiny, folder, tmp_path, monkeypatch, in_line
):
  shipped = SHIPPED.read_bytes()
  tokens, workdir = tmp_path / "tokens", tmp_path / "run"
  prepare_with(shipped, tokens, folder)
  tiny.data.source, tiny.train.steps, tiny.checkpoint.every = f"arrays:{tokens}", 8, 4
  first = train.train(tiny, workdir)
  shutil.rmtree(workdir / "checkpoints" / "8")

  # The folder was prepared again, with another tokenizer of as many pieces.
  prepare_with(shipped + b"\x12\x00", tmp_path / "others", folder)
  tiny.data.source = f"arrays:{tmp_path / 'others'}"
  with pytest.raises(ConfigError, match=r"data.source: other contents.*data.tokenizer"):
    train.train(tiny, workdir)

  # The folder has moved.
  moved = shutil.move(tokens, tmp_path / "moved")
  tiny.data.source = f"arrays:{moved}"
  again = train.train(tiny, workdir)
  assert again["eval_loss"] == first["eval_loss"]
  assert again["tokenizer"] == data_lib.load_tokenizer(str(SHIPPED)).sha256

  # Without the data, and from another folder, the run still has its tokenizer.
  shutil.rmtree(moved)
  monkeypatch.chdir(tmp_path)
  model = load(os.path.relpath(workdir, tmp_path))
  assert (
    data_lib.load_tokenizer(model.config.data.tokenizer).sha256 == again["tokenizer"]
  )
  assert files.read_json(workdir / "summary.json")["tokenizer"] == again["tokenizer"]
