"""A run knows its text and tokenizer by content, and not by path."""

import json
import os
import pathlib
import shutil

import pytest

from diloco import data as data_lib
from diloco import train
from diloco.config import resolve
from diloco.config.comparable import HELD_OUT
from diloco.data.contents import contents, repeated
from diloco.data.prepare import tokenize as prepare
from diloco.data.sources import make_source
from diloco.data.text_file import File
from diloco.errors import ConfigError
from diloco.interop.load import load
from diloco.spec import plugins
from diloco.spec.fields import DataConfig
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
  held_out = data_lib.make_eval_set(c).digest
  test = data_lib.make_eval_set(c, test=True).digest if c.eval.test_tokens else ""
  return contents(c, data_lib.load_tokenizer(c.data.tokenizer), held_out, test)


def test_a_text_is_the_same_wherever_it_lies(tiny, folder, tmp_path):
  before = of(tiny, source=f"files:{folder}")
  moved = shutil.move(folder, tmp_path / "elsewhere")
  assert of(tiny, source=f"files:{moved}/*.txt") == before


@pytest.mark.parametrize(
  "change",
  [
    lambda folder: (folder / "07.txt").write_text("Document 8. " * 50),
    lambda folder: (folder / "07.txt").rename(folder / "29b.txt"),
    lambda folder: (folder / "07.txt").rename(folder / "07.jsonl"),
  ],
)
def test_a_text_that_changed_is_another(tiny, folder, change):
  before = of(tiny, source=f"files:{folder}")
  change(folder)
  assert of(tiny, source=f"files:{folder}")["data.source"] != before["data.source"]


def test_the_held_out_tokens_have_a_digest_of_their_own(tiny, folder):
  before = of(tiny, eval_source=f"files:{folder}")
  (folder / "07.txt").write_text("A text that is not held out.")
  tiny.eval.batch_size, tiny.model.seq_len = 1, 8
  assert of(tiny, eval_source=f"files:{folder}") == before
  long = (folder / "00.txt").read_text() * 500  # More than beginning and end.
  middle = len(long) // 2
  for text in (long, long[:middle] + "x" + long[middle + 1 :]):
    (folder / "00.txt").write_text(text)
    tiny.eval.tokens = 0
    after = of(tiny, eval_source=f"files:{folder}")
    assert {w for w in after if after[w] != before[w]} == {HELD_OUT}
    before = after
  tiny.eval.tokens = tiny.eval.test_tokens = 500
  before = of(tiny, eval_source=f"files:{folder}")
  (folder / "20.txt").write_text("Another text after the first held-out tokens.")
  after = of(tiny, eval_source=f"files:{folder}")
  assert {w for w in after if after[w] != before[w]} == {"the test tokens"}


def test_the_files_of_tasks_and_plugins_are_known(tiny, tmp_path, monkeypatch):
  task, plugin = tmp_path / "items.jsonl", tmp_path / "my_mean.py"
  plugin.write_text(
    "from diloco.spec import plugins\nplugins.register('outer.average', 'mine', sum)\n"
    "plugins.register('eval.tasks', 'of_plugin', '~/items.jsonl')\n"
  )
  task.write_text('{"query": "a", "choices": ["b", "c"], "gold": 0}\n')
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setenv("HOME", str(tmp_path))
  tiny.plugins, tiny.eval.tasks = ("my_mean", "sparta"), "hellaswag, of_plugin"
  before = of(tiny)
  assert "the plug-in sparta" not in before  # A part of "the code of diloco".
  for file, what in ((task, "the task of_plugin"), (plugin, "the plug-in my_mean")):
    file.write_text(file.read_text() + "\n")
    after = of(tiny)
    assert {w for w in after if after[w] != before[w]} == {what}
    before = after


def test_a_plugin_in_a_package_is_the_whole_package(tmp_path, monkeypatch):
  package = tmp_path / "my_methods"
  package.mkdir()
  for name in ("__init__", "slow", "helper"):
    (package / f"{name}.py").touch()
  monkeypatch.syspath_prepend(tmp_path)
  plugins.load(["my_methods.slow"])
  names = [path.name for path in plugins.source_files("my_methods.slow")]
  assert names == ["__init__.py", "helper.py", "slow.py"]


def test_held_out_documents_that_are_training_documents_are_counted(folder):
  # The files 00 and 20 are held out.
  assert repeated(DataConfig(source=f"files:{folder}")) == (0, 2, 0)
  for name in ("07", "08"):
    shutil.copy(folder / "20.txt", folder / f"{name}.txt")
  # Another name of the same text, so that nothing is remembered.
  d = DataConfig(source=f"files:{folder}/*.txt")
  sizes = [(folder / name).stat().st_size for name in ("00.txt", "20.txt")]
  assert repeated(d) == (1, 2, sizes[1] / sum(sizes))
  # Two held-out documents that are equal are no training documents.
  shutil.copy(folder / "00.txt", folder / "20.txt")
  assert repeated(DataConfig(source=f"files:{folder}/[0-9]*")).documents == 0


def test_equal_texts_are_found_in_paragraphs_and_in_lines_of_json(tmp_path):
  paragraphs, lines, others = (tmp_path / x for x in ("a.txt", "b.json", "c.json"))
  texts = [f'Say "{i % 300}".' for i in range(400)]  # 100 texts are there twice.
  paragraphs.write_text("\n\n\n".join(texts))  # The last one has no line end.
  for file, field in ((lines, "text"), (others, "body")):
    nested = {"id": {field: "one text, which is no document"}, "at": field}
    rows = [nested | {field: text} for text in texts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  for source in (f"paragraphs:{paragraphs}", f"files:{lines}", f"files:{others}#body"):
    d = DataConfig(source=source)
    held, train = (
      [found[i].strip() for i in range(len(found))]
      for found in (make_source(d, "eval"), make_source(d, "train"))
    )
    expected = sum(text in train for text in held)
    assert 0 < expected < len(held)
    assert repeated(d)[:2] == (expected, len(held))


def test_a_held_out_source_of_its_own_is_compared_with_the_training_text(folder):
  # Its held-out documents are files 00 and 20, and 20 is also one of the other folder.
  other = folder.parent / "other"
  other.mkdir()
  shutil.copy(folder / "20.txt", other / "05.txt")
  (other / "00.txt").write_text("Not held out in the other folder.")
  d = DataConfig(source=f"files:{other}", eval_source=f"files:{folder}")
  assert repeated(d)[:2] == (1, 2)
  assert repeated(DataConfig(source="arrays:x", eval_source=f"files:{folder}")) is None


def test_a_text_file_is_read_once_unless_it_changes(tmp_path, monkeypatch):
  path, read = tmp_path / "a.txt", []
  path.write_text("\n\n".join(f"Paragraph {i}." for i in range(100)))
  raw = File._raw
  monkeypatch.setattr(File, "_raw", lambda self: read.append(self.path) or raw(self))
  d = DataConfig(source=f"paragraphs:{path}")
  train, held_out = make_source(d, "train"), make_source(d, "eval")
  assert repeated(d)[:2] == (0, len(held_out))
  assert len(train) + len(held_out) == 100
  assert read == [path]
  path.write_text("One paragraph.")
  assert len(make_source(d, "train")) + len(make_source(d, "eval")) == 1
  assert read == [path, path]


def prepare_with(model: bytes, folder: pathlib.Path, text: pathlib.Path) -> None:
  own = folder.with_suffix(".model")
  own.write_bytes(model)
  for split, name in (("train", "train"), ("eval", "validation")):
    out = folder / name
    prepare.tokenize(f"files:{text}", split, str(own), out, workers=1)
  own.unlink()


@pytest.mark.integration("whole runs")
def test_only_moved_data_let_a_run_go_on(tiny, folder, tmp_path, monkeypatch, in_line):
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
  sha256 = data_lib.load_tokenizer(str(SHIPPED)).sha256

  # Without the data, and from another folder, the run still has its tokenizer.
  shutil.rmtree(moved)
  monkeypatch.chdir(tmp_path)
  model = load(os.path.relpath(workdir, tmp_path))
  assert data_lib.load_tokenizer(model.config.data.tokenizer).sha256 == sha256
  assert files.read_json(workdir / "contents.json")["data.tokenizer"] == sha256[:12]
