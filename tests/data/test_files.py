"""Text files: paragraphs, folders, and files that are no text."""

import bz2
import gzip
import importlib
import itertools
import json
import lzma
import os
import pathlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco import config as config_lib
from diloco import data as data_lib
from diloco.data import files
from diloco.data.documents import make_documents
from diloco.data.prepare import pieces
from diloco.data.text_file import File
from diloco.errors import ConfigError
from diloco.spec.fields import DataConfig

LINE = st.sampled_from([b"", b" \t", b"One line.", b"  indented", "Ω\u2028".encode()])


@given(st.lists(LINE, max_size=12), st.sampled_from([b"\n", b"\r\n"]), st.booleans())
def test_paragraphs_are_the_runs_of_lines_with_text(tmp_path_factory, rows, end, ended):
  path = tmp_path_factory.mktemp("text") / "a.txt"
  content = end.join(rows) + (end if ended else b"")
  path.write_bytes(content)
  expected = [
    "".join(lines)
    for blank, lines in itertools.groupby(
      content.decode().split("\n"), key=lambda line: not line.strip()
    )
    if not blank
  ]
  file = File(path, "paragraphs")
  found = list(file.documents())
  texts = [text.replace("\n", "") for _, text in found]
  assert texts == [text.replace("\n", "") for text in expected]
  for offset, text in found:
    assert content[offset:].startswith(text.encode())
  offsets = file.scan()["offset"].tolist()
  assert offsets == [offset for offset, _ in found]
  again = [file.document(offset) for offset in offsets]
  assert again == [text for _, text in found]


@pytest.fixture
def book(tmp_path):
  """Writes one file of 60 paragraphs."""
  path = tmp_path / "book.txt"
  path.write_text("\n\n".join(f"Paragraph {i}\nof {i * i} words." for i in range(60)))
  return path


def test_a_file_of_paragraphs_trains_and_is_held_out_in_part(tiny, book):
  tiny.data.source = f"paragraphs:{book}"
  c = config_lib.resolve(tiny)
  train, held_out = (data_lib.make_source(c.data, s) for s in ("train", "eval"))
  texts = {s[i] for s in (train, held_out) for i in range(len(s))}
  assert len(train) + len(held_out) == len(texts) == 60
  assert 1 <= len(held_out) < 10
  assert len(make_documents(c, "train")) == len(train)
  # Preparation and training of tokenizers see the same documents.
  (piece,) = pieces.cut(pieces.make_pieces(c.data.source, "train"), 100)
  assert list(pieces.read(piece)) == [train[i] for i in range(len(train))]


def test_too_few_documents_name_paragraphs_as_a_way_out(tiny, book):
  tiny.data.source = f"files:{book}"
  message = r"only 0 training documents; a text file is one .* write paragraphs:.*book"
  with pytest.raises(ConfigError, match=message):
    data_lib.TrainIterator(config_lib.resolve(tiny))
  # Of JSON lines, only more lines help.
  assert files.more_documents("files:/data/*.jsonl.gz") == "add documents"


def test_a_folder_stands_for_its_files_that_are_not_hidden(tmp_path):
  for name in ("b.txt", "in/a.txt", "in/deep/c[1].jsonl", ".git/config", ".hidden"):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
  found = files.list_files(f"files:{tmp_path}")
  names = [file.path.relative_to(tmp_path).as_posix() for file in found]
  assert names == ["b.txt", "in/a.txt", "in/deep/c[1].jsonl"]


def test_a_file_counts_once_whatever_leads_to_it(tmp_path):
  text = tmp_path / "text"
  (text / "in").mkdir(parents=True)
  for name in ("a.txt", "in/b.txt"):
    (text / name).write_text(name)
  (text / "up").symlink_to(text)
  (text / "c.txt").symlink_to(text / "a.txt")
  (text / "d.txt").hardlink_to(text / "in" / "b.txt")
  for source in (f"files:{text}", f"files:{text}/**/*"):
    found = files.list_files(source)
    assert [file.path.name for file in found] == ["a.txt", "d.txt"]
  (text / "in" / "above").symlink_to(text.parent)  # Two loops have endless paths.
  assert files.list_files(f"files:{text}") == found
  (text / "e.txt").symlink_to("absent")
  with pytest.raises(ConfigError, match=r"cannot be read .*e.txt.*; restore the file"):
    files.list_files(f"files:{text}/*")


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
  (tmp_path / "in").mkdir()
  (tmp_path / "a.txt").touch()
  scan = os.scandir

  def refuse(path):
    if str(path).endswith("/in"):
      raise PermissionError(13, "Permission denied", str(path))
    return scan(path)

  monkeypatch.setattr(os, "scandir", refuse)
  with pytest.raises(ConfigError, match=r"data.source cannot be read .*/in'"):
    files.list_files(f"files:{tmp_path}")


@pytest.mark.parametrize("name", ["a.ndjson", "a.JSONL", "a.Json", "a.jsonl.GZ"])
def test_json_lines_are_known_by_their_name_in_any_case(name):
  assert files.make_file(pathlib.Path(name), paragraphs=True).kind == "lines"


GOOD = json.dumps({"text": "good"}).encode()


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.txt", b"one\ntwo\ncaf\xe9\n", r"a.txt, line 3, is not UTF-8 text \(byte 0xe9"),
    ("a.txt", "words".encode("utf-16"), r"a.txt, line 1, is not UTF-8 .* `iconv -f"),
    ("a.txt", gzip.compress(b"text", mtime=0), "a.txt is a binary file, which is not "),
    ("a.tar", b"name\0\0\0\0text", r"a.tar is a binary file, .*, \.parquet, .* \.zst,"),
    ("a.data", GOOD + b"\n" + GOOD, "its first line is a JSON object with a `text`; r"),
    ("a.jsonl", GOOD + b"\n\n{bad\n", "a.jsonl, line 3, is not a JSON object"),
    ("a.jsonl", GOOD + b'\n{"txt": ""}', "a.jsonl, line 2, is not a JSON object"),
    ("a.jsonl", b'{"text": "caf\xe9"}', "a.jsonl, line 1, is not UTF-8 text"),
    ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl, line 1, is not a JSON object"),
    ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1, is not a JSON object"),
    ("a.json", b'[\n{"text": "a list"}\n]', "a.json, line 1, is not a JSON object"),
  ],
)
@pytest.mark.parametrize("paragraphs", [False, True])
def test_a_file_without_text_is_named(tmp_path, name, content, message, paragraphs):
  path = tmp_path / name
  path.write_bytes(content)
  file = files.make_file(path, paragraphs)
  with pytest.raises(ConfigError, match=message):
    list(file.documents())

  def read_each():
    offsets = file.scan()["offset"]  # Refuses a binary file.
    return [file.document(offset) for offset in offsets]

  with pytest.raises(ConfigError, match=message):
    read_each()


def test_a_file_that_vanishes_while_training_is_named(tiny, tmp_path):
  for i in range(30):
    (tmp_path / f"{i}.txt").write_text("Some words. " * 9)
  tiny.data.source = f"files:{tmp_path}/*.txt"
  iterator = data_lib.TrainIterator(config_lib.resolve(tiny))
  for path in tmp_path.glob("*.txt"):
    path.unlink()
  message = r"data.source cannot be read \(.*No such file.*\.txt"
  with pytest.raises(ConfigError, match=message):
    list(itertools.islice(iterator, 30))
  iterator.close()


def test_a_field_of_another_name_follows_a_hash(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text('{"content": "good", "text": 3}\n{"content": "better"}\n')
  (file,) = files.list_files(f"files:{tmp_path}#content")
  assert [text for _, text in file.documents()] == ["good", "better"]
  assert file.document(31) == "better"
  (file,) = files.list_files(f"files:{tmp_path}")
  with pytest.raises(
    ConfigError, match=r"with a string `text`; .* files:/data/.*#cont"
  ):
    list(file.documents())
  (tmp_path / "x#y").mkdir()
  (tmp_path / "x#y" / "b.json").touch()
  (file,) = files.list_files(f"files:{tmp_path}/x#y")
  assert (file.kind, file.field) == ("lines", "text")
  (tmp_path / "plain.txt").touch()
  with pytest.raises(ConfigError, match="plain text has no field 'body'; remove #body"):
    files.list_files(f"files:{tmp_path}/*.txt#body")


def packed(suffix: str, content: bytes) -> bytes:
  """Compresses in two frames, as tools that use several cores do."""
  half = content.index(b"\n") + 1
  pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(suffix)
  if not pack:
    arrow = pytest.importorskip("pyarrow")
    pack = lambda x: arrow.compress(x, codec="zstd", asbytes=True)
  return pack(content[:half]) + pack(content[half:])


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst", ".ZST"])
def test_compressed_lines_are_read_whole_and_damage_is_named(tmp_path, suffix):
  path = tmp_path / f"a.jsonl{suffix}"
  rows = [{"text": f"{i} ü"} for i in range(50)]
  content = packed(suffix.lower(), b"\n".join(json.dumps(x).encode() for x in rows))
  path.write_bytes(content)
  (piece,) = pieces.cut(pieces.make_pieces(f"files:{tmp_path}", "all"), 10)
  assert list(pieces.read(piece)) == [x["text"] for x in rows]
  damaged = bytearray(content)
  damaged[content.rindex(content[:3]) + 12] ^= 8  # In the second frame.
  for bad in (content[:-7], damaged)[: 1 if "zst" in suffix.lower() else 2]:
    path.write_bytes(bad)
    with pytest.raises(ValueError, match=r"cannot be read .*; fetch the file again"):
      list(pieces.read(piece))


def test_a_compressed_text_is_read_whole_but_never_at_a_place(tmp_path):
  (tmp_path / "one.txt.gz").write_bytes(gzip.compress(b"One\r\ndocument."))
  (piece,) = pieces.make_pieces(f"files:{tmp_path}", "all")
  assert list(pieces.read(piece)) == ["One\r\ndocument."]
  d = DataConfig(source=f"files:{tmp_path}")
  with pytest.raises(ConfigError, match=r"gz can only be .*; run `python .*prepare_da"):
    data_lib.make_source(d, "train")


def write_table(path: pathlib.Path, columns: dict) -> None:
  arrow = pytest.importorskip("pyarrow")
  table = arrow.table(columns)
  if path.suffix == ".parquet":
    importlib.import_module("pyarrow.parquet").write_table(
      table, path, row_group_size=7, write_page_checksum=True, compression="none"
    )
  else:
    made = arrow.ipc.new_stream if path.suffix == ".arrow" else arrow.ipc.new_file
    with made(str(path), table.schema) as writer:
      writer.write_table(table, max_chunksize=7)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
def test_rows_of_a_table_are_documents(tmp_path, suffix):
  path = tmp_path / f"a{suffix}"
  texts = [f"{i} ü\n" for i in range(50)]
  write_table(path, {"id": list(range(50)), "content": texts})
  # A folder that Hugging Face's `datasets` has saved.
  (tmp_path / "dataset_info.json").write_text("{}")
  (tmp_path / "state.json").write_text("{}")
  (tmp_path / "cache-1c80317fa3b1799d.arrow").write_text("of a former `map`")
  source = f"files:{tmp_path}#content"
  (piece,) = pieces.cut(pieces.make_pieces(source, "all"), 10)
  assert list(pieces.read(piece)) == texts
  held_out, train = (
    list(pieces.read(pieces.make_pieces(source, s)[0])) for s in ("eval", "train")
  )
  assert sorted(held_out + train) == sorted(texts)
  assert 1 <= len(held_out) < 10
  with pytest.raises(ConfigError, match=f"a{suffix} can only be read in order; run `"):
    data_lib.make_source(DataConfig(source=source), "train")
  (piece,) = pieces.make_pieces(f"files:{tmp_path}", "all")
  with pytest.raises(ConfigError, match=r"has no column 'text' but id, content; name "):
    list(pieces.read(piece))
  (piece,) = pieces.make_pieces(f"files:{tmp_path}#id", "all")
  with pytest.raises(ConfigError, match=r"row 0 from 0, has int and no text in 'id'"):
    list(pieces.read(piece))
  content = path.read_bytes()
  if suffix == ".parquet":
    path.write_bytes(content.replace("33 ü".encode(), "34 ü".encode()))
    (piece,) = pieces.make_pieces(source, "all")
    with pytest.raises(ValueError, match="cannot be read"):
      list(pieces.read(piece))
  path.write_bytes(content[:-40])
  (piece,) = pieces.make_pieces(source, "all")
  with pytest.raises(ValueError, match=r"cut short, damaged or no|cannot be read"):
    list(pieces.read(piece))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.zst"])
def test_a_table_without_pyarrow_says_what_to_install(tmp_path, name, monkeypatch):
  (tmp_path / name).touch()
  monkeypatch.setitem(sys.modules, "pyarrow", None)
  (piece,) = pieces.make_pieces(f"files:{tmp_path}", "all")
  with pytest.raises(ConfigError, match=r"pip install pyarrow, or '.\[prepare\]'"):
    list(pieces.read(piece))
