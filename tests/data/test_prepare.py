"""Preparation gives the same files after any kill, and finds damage."""

import contextlib
import importlib.util
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess

import numpy as np
import pytest
import running
import wreck
from array_record.python import array_record_module
from etils import epath
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboardX.record_writer import RecordWriter

from diloco import config as config_lib
from diloco import data as data_lib
from diloco.data import files, records
from diloco.data.arrays import TokenArrays
from diloco.data.documents import make_documents
from diloco.data.prepare import pieces, prepare_data, units
from diloco.data.prepare import tokenize as prepare
from diloco.data.text_file import File
from diloco.errors import ConfigError


def array_records(path):
  return array_record_module.ArrayRecordReader(str(path)).read_all()


def contents(folder):
  return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != ".lock"}


def same_data(c, other):
  for split in ("train", "eval"):
    a, b = make_documents(c, split), make_documents(other, split)
    assert len(a) == len(b) > 0
    for i in range(len(a)):
      np.testing.assert_array_equal(a[i], b[i])
      for kept in (0, 1, len(a[i]) // 2, len(a[i])):
        assert a.num_bytes(i, kept) == b.num_bytes(i, kept)
    some = range(1, len(a), 2)
    lengths = [len(a[i]) for i in some]
    assert a.lengths(some).tolist() == b.lengths(some).tolist() == lengths


def as_arrays(tiny, folder, **changes):
  tiny.data.source = f"arrays:{folder}"
  tiny.data.train_split, tiny.data.eval_split = "train", "eval"
  tiny.data.update(changes)
  return config_lib.resolve(tiny)


@pytest.mark.parametrize("add_bos", [False, True])
def test_arrays_hold_the_texts_of_their_source(tiny, lines, tmp_path, in_line, add_bos):
  for split in ("train", "eval"):
    made = prepare.tokenize(
      lines, split, "sotu_2048", tmp_path / "arrays" / split, unit_size=1000
    )
    assert made["dtype"] == "uint16"
    assert made["units"] > 10
  tiny.data.source, tiny.data.add_bos = lines, add_bos
  direct = config_lib.resolve(tiny)
  arrays = as_arrays(tiny, tmp_path / "arrays")
  same_data(direct, arrays)
  assert (make_documents(arrays, "train")[0][0] == 2) == add_bos


def test_counts_are_exact(lines, tmp_path, in_line):
  made = prepare.tokenize(lines, "all", "sotu_2048", tmp_path / "a", unit_size=5000)
  texts = [
    json.loads(line)["text"]
    for path in sorted(pathlib.Path(lines.removeprefix("files:")).parent.iterdir())
    for line in path.read_text().splitlines()
    if line
  ]
  tokenizer = data_lib.load_tokenizer("sotu_2048")
  assert made["documents"] == len(texts) == 300
  assert made["bytes"] == sum(len(t.encode()) for t in texts)
  assert made["tokens"] == sum(len(tokenizer.encode(t)) + 1 for t in texts)
  # NumPy alone can read the arrays.
  shards = [np.load(tmp_path / "a" / s["file"]) for s in made["shards"]]
  assert [len(s) for s in shards] == [s["tokens"] for s in made["shards"]]
  stream = np.concatenate(shards)
  documents = np.split(stream, np.load(tmp_path / "a" / "ends.npy").astype(int))[:-1]
  assert [tokenizer.decode(d.tolist()) for d in documents] == texts


def test_large_vocabularies_take_four_bytes(lines, tmp_path, in_line, monkeypatch):
  class Large:
    sha256, vocab_size = "0", 70_000

    def serialized(self):
      return b"any bytes"

    def encode(self, text):
      return [69_999] * len(text)

  monkeypatch.setattr(prepare, "load_tokenizer", lambda name: Large())
  made = prepare.tokenize(lines, "all", "large", tmp_path / "a")
  assert made["dtype"] == "uint32"
  assert TokenArrays(tmp_path / "a", Large())[5][0] == 69_999


class Killed(BaseException):
  pass


def test_tokenizing_goes_on_after_any_kill(lines, tmp_path, in_line, monkeypatch):
  """Every file appears by a rename; kills before and after each rename and unlink."""
  options = (lines, "train", "sotu_2048")
  prepare.tokenize(*options, tmp_path / "whole", unit_size=5000)
  expected = contents(tmp_path / "whole")
  rename, unlink = pathlib.Path.rename, pathlib.Path.unlink

  left = 0

  def tick():
    nonlocal left
    left -= 1
    if left == 0:
      raise Killed

  def dying(real):
    def change(*args, **kwargs):
      tick()
      result = real(*args, **kwargs)
      tick()
      return result

    return change

  folder = tmp_path / "broken"
  for step in itertools.count(1):
    left = step
    shutil.rmtree(folder, ignore_errors=True)
    with monkeypatch.context() as patch, contextlib.suppress(Killed):
      patch.setattr(pathlib.Path, "rename", dying(rename))
      patch.setattr(pathlib.Path, "unlink", dying(unlink))
      prepare.tokenize(*options, folder, unit_size=5000)
    prepare.tokenize(*options, folder, unit_size=5000)
    assert contents(folder) == expected
    if left > 0:
      break
  assert step > 30


PREPARE = ("-m", "diloco.data.prepare.prepare_data")


def children(pid):
  text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
  return [int(child) for child in text.split()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """What an undisturbed preparation writes."""
  folder = tmp_path_factory.mktemp("whole")
  prepare.tokenize("sotu", "train", "sotu_2048", folder, workers=1, unit_size=1 << 20)
  return contents(folder)


@pytest.mark.integration("kills processes")
@pytest.mark.parametrize("victim", ["parent", "worker"])
def test_the_command_goes_on_after_a_process_was_killed(tmp_path, victim, whole):
  flags = ["--source=sotu", "--split=train", f"--output={tmp_path}/broken"]
  flags += ["--workers=2", "--unit_mb=1"]
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
  process = running.start(*PREPARE, *flags, **pipes)
  running.wait(lambda: [*tmp_path.glob("broken/*-of-?????.npy")], process)
  workers = children(process.pid)
  assert len(workers) >= 2
  os.kill(process.pid if victim == "parent" else workers[-1], signal.SIGKILL)
  _, errors = process.communicate(timeout=60)
  if victim == "worker" and process.returncode:  # It may have been the last unit.
    assert "start the same command again to continue" in errors
    assert "Traceback" not in errors
  running.wait(lambda: not any(os.path.exists(f"/proc/{w}") for w in workers))
  again = running.python(*PREPARE, *flags)
  assert again.returncode == 0, again.stderr
  assert "236 documents" in again.stdout
  assert not re.search(r" 0\.0 CPU seconds", again.stdout)
  assert contents(tmp_path / "broken") == whole


def test_a_folder_takes_one_preparation(lines, tmp_path, in_line):
  folder = tmp_path / "a"
  made = prepare.tokenize(lines, "train", "sotu_2048", folder)
  assert prepare.tokenize(lines, "train", "sotu_2048", folder) == made
  with pytest.raises(ConfigError, match="has split 'train' instead of 'eval'; repeat"):
    prepare.tokenize(lines, "eval", "sotu_2048", folder)
  with (
    units.lock(folder),
    pytest.raises(ConfigError, match="another process is working there"),
  ):
    prepare.tokenize(lines, "train", "sotu_2048", folder)
  (folder / "manifest.json").write_text('{"version"')
  with pytest.raises(ConfigError, match=r"manifest.json, which is damaged; delete"):
    prepare.tokenize(lines, "train", "sotu_2048", folder)


@pytest.mark.parametrize(
  ("when", "new"),  # Instead of "one": a word as long, or a longer one.
  [("finished", "two"), ("interrupted", "three"), ("while it runs", "two")],
)
def test_a_text_that_changes_is_another_text(tmp_path, in_line, monkeypatch, when, new):
  text, folder = tmp_path / "a.jsonl", tmp_path / "a"
  row = '{"text": "one"}\n'
  text.write_text(row * 9_000)  # Longer than the beginning and the end that count.
  make = lambda: prepare.tokenize(f"files:{text}", "all", "sotu_2048", folder)
  write = prepare._tokenize_unit

  def change(*args, **kwargs):
    write(*args, **kwargs)
    text.write_text(row * 4_500 + row.replace("one", new) + row * 4_499)
    os.utime(text, (1e9, 1e9))
    if when == "interrupted":
      raise Killed

  with monkeypatch.context() as patch:
    if when == "finished":
      make()
      write = lambda *args, **kwargs: None
      change()
    else:
      patch.setattr(prepare, "_tokenize_unit", change)
      with pytest.raises((Killed, ConfigError), match=r"no longer|^$"):
        make()
  said = r"files are no longer those .* put the old files back with their times, or"
  for _ in range(2):
    with pytest.raises(ConfigError, match=said):
      make()


def test_a_refused_folder_stays_as_it_was(lines, tmp_path, in_line):
  folder = tmp_path / "mine"
  folder.mkdir()
  for name in ("thesis.tex", ".draft.tmp"):
    (folder / name).touch()
  with pytest.raises(ConfigError, match="holds other files"):
    prepare.tokenize(lines, "train", "sotu_2048", folder)
  assert sorted(p.name for p in folder.iterdir()) == [".draft.tmp", "thesis.tex"]


def test_a_split_without_text_is_refused(tmp_path, in_line):
  (tmp_path / "a.txt").write_text("One document, which is held out.")
  source = f"files:{tmp_path}/a.txt"
  with pytest.raises(ConfigError, match=r"no text in the split 'train'; .*paragraphs:"):
    prepare.tokenize(source, "train", "sotu_2048", tmp_path / "a")
  assert not (tmp_path / "a/manifest.json").exists()


def test_one_command_prepares_both_splits(tiny, lines, tmp_path, capsys, in_line):
  flags = (f"--source={lines}", f"--output={tmp_path}/a")
  said = r"a/train: 288 documents.*\n.*a/validation: 12 documents"
  assert re.search(said, running.shown(prepare_data.main, *flags, "--split=train,eval"))
  tiny.data.source = lines
  direct = config_lib.resolve(tiny)
  same_data(direct, as_arrays(tiny, tmp_path / "a", eval_split="validation"))
  for splits in ("train,train", "train,eval,all", "eval,train", "all,eval"):
    assert prepare_data.main([*flags, f"--split={splits}"]) == 2
    assert "or two that share no document, first that for" in capsys.readouterr().err


def test_a_run_checks_its_arrays(tiny, lines, tmp_path, in_line):
  c = as_arrays(tiny, tmp_path, tokenizer="sotu_2048")
  with pytest.raises(ConfigError, match=r"does not exist; run .*tokenize"):
    make_documents(c, "train")
  prepare.tokenize(lines, "all", "sotu_2048", tmp_path / "train", unit_size=5000)
  assert len(make_documents(c, "train")) == 300
  manifest = tmp_path / "train" / "manifest.json"
  good = manifest.read_text()
  manifest.write_text(good.replace('"sha256": "', '"sha256": "0'))
  with pytest.raises(ConfigError, match=r"with the tokenizer sotu_2048 .sha256 0"):
    make_documents(c, "train")
  manifest.rename(tmp_path / "train" / "plan.json")
  with pytest.raises(ConfigError, match=r"manifest.json is not finished; run"):
    make_documents(c, "train")
  manifest.write_text(good)
  shard = next((tmp_path / "train").glob("00001-of-*.npy"))
  for damage in (lambda: shard.write_bytes(b""), shard.unlink):
    damage()
    with pytest.raises(ConfigError, match=r"has .*/00001-of-.*, with 0 bytes instead"):
      make_documents(c, "train")


ROWS = st.lists(
  st.one_of(st.just(""), st.text(max_size=20).map(lambda t: json.dumps({"text": t}))),
  max_size=12,
)


@settings(max_examples=30, deadline=None)
@given(ROWS, st.lists(st.integers(1, 300), max_size=4), st.sampled_from(["\n", "\r\n"]))
def test_ranges_and_offsets_give_every_line_once(tmp_path_factory, rows, cuts, end):
  path = tmp_path_factory.mktemp("rows") / "a.jsonl"
  path.write_bytes(end.join(rows).encode())
  texts = [json.loads(row)["text"] for row in rows if row]
  file = File(path, "lines")
  whole = list(file.documents())
  assert [text for _, text in whole] == texts
  bounds = [0, *sorted(cuts), 0]
  parts = [file.documents(a, b) for a, b in itertools.pairwise(bounds)]
  assert list(itertools.chain(*parts)) == whole
  assert file.scan()["offset"].tolist() == [offset for offset, _ in whole]
  assert [file.document(offset) for offset, _ in whole] == texts


def test_splits_of_files_are_disjoint_and_complete_and_have_their_share(lines):
  splits = [
    [t for p in pieces.cut(pieces.make_pieces(lines, s), 777) for t in pieces.read(p)]
    for s in ("train", "eval", "all")
  ]
  assert sorted(splits[0] + splits[1]) == sorted(splits[2])
  assert len(set(splits[2])) == 300
  share = files.in_split("eval", 3, np.arange(0, 10**7, 337)).mean()
  assert abs(share - 1 / files.HOLD_OUT_EVERY) < 0.003
  held_out = [i for i in range(60) if files.in_split("eval", i, 0)]
  assert held_out == [0, 20, 40]


def test_a_flipped_bit_of_an_array_record_is_named(tmp_path):
  path = tmp_path / "a.array_record"
  writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
  for _ in range(9):
    writer.write(bytes(99))
  writer.close()
  piece = pieces.Piece(File(path, "array_record"), 0, 9, 0, "train", 0)
  wreck.flip(path, 200 / path.stat().st_size)
  with pytest.raises(ValueError, match=rf"{path} cannot be read .*; fetch the file"):
    list(pieces.read(piece))


@pytest.fixture(scope="module")
def tfrecord(tmp_path_factory):
  """Writes C4's stand-in, and a copy in tfrecord with the writer of tensorboardX."""
  root = tmp_path_factory.mktemp("tfds")
  script = "scripts/benchmarks/make_standin.py"
  run = running.python(script, f"--data_dir={root}/standin")
  assert run.returncode == 0, run.stderr
  old, new = (root / d / "c4/en/3.1.0" for d in ("standin", "tfrecord"))
  new.mkdir(parents=True)
  info = json.loads((old / "dataset_info.json").read_text())
  info["fileFormat"] = "tfrecord"
  for split in info["splits"]:
    name = split["name"]
    (path,) = old.glob(f"c4-{name}.*")
    rows = array_records(path)
    count = 3 if name == "train" else 1
    cuts = [len(rows) * i // count for i in range(count + 1)]
    split["filepathTemplate"] = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    split["shardLengths"] = [str(b - a) for a, b in itertools.pairwise(cuts)]
    for i, (a, b) in enumerate(itertools.pairwise(cuts)):
      writer = RecordWriter(str(new / f"c4-{name}.tfrecord-{i:05}-of-{count:05}"))
      for row in rows[a:b]:
        writer.write(row)
      writer.close()
  (new / "dataset_info.json").write_text(json.dumps(info))
  shutil.copy(old / "features.json", new / "features.json")
  return root


def test_arrays_from_tfrecord_are_those_of_array_record(tfrecord, tmp_path, in_line):
  made = {}
  for name, size in (("standin", 1 << 19), ("tfrecord", 1 << 30)):
    args = "tfds:c4/en:3.1.0", "train[10%:90%]", "sotu_2048", tmp_path / name
    made[name] = prepare.tokenize(*args, str(tfrecord / name), unit_size=size)
  assert made["standin"]["units"] > made["tfrecord"]["units"]
  for key in ("documents", "tokens", "bytes"):
    assert made["standin"][key] == made["tfrecord"][key]
  tokenizer = data_lib.load_tokenizer("sotu_2048")
  a, b = (TokenArrays(tmp_path / name, tokenizer) for name in made)
  assert len(a) == 188
  for i in range(len(a)):
    np.testing.assert_array_equal(a[i], b[i])


class Bucket(LocalFileSystem):
  """Stands for gs://: the bucket `root` is the root of this machine."""

  protocol = ("gs", "gcs")

  @classmethod
  def _strip_protocol(cls, path):
    return super()._strip_protocol(str(path).replace("gs://root/", "/"))


def test_a_bucket_gives_the_same_arrays(tfrecord, tmp_path, in_line, monkeypatch):
  where = f"gs://root{tfrecord}"
  if importlib.util.find_spec("gcsfs") is None:
    with pytest.raises(ConfigError, match=r"data_dir is 'gs://root.* install gcsfs"):
      prepare.tokenize("tfds:c4/en:3.1.0", "train", "sotu_2048", tmp_path / "no", where)
  # Without the cache of file systems by name, in fsspec and in etils.
  backend = type(epath.backend.fsspec_backend)
  monkeypatch.setattr(backend, "fs", lambda *_: Bucket(skip_instance_cache=True))
  for name, folder in (("here", str(tfrecord)), ("there", where)):
    args = "tfds:c4/en:3.1.0", "validation", "sotu_2048", tmp_path / name
    prepare.tokenize(*args, data_dir=f"{folder}/tfrecord")
  assert contents(tmp_path / "here") == contents(tmp_path / "there")
  [piece] = pieces.make_pieces("tfds:c4/en:3.1.0", "train", f"{where}/standin")
  assert str(piece.file.path).startswith(f"{where}/standin/c4/en/3.1.0/c4-train.array")


def test_tfrecord_of_another_writer_is_read_bit_for_bit_or_refused(tmp_path):
  rng = np.random.default_rng(0)
  rows = [rng.bytes(n) for n in (0, 1, 7, 8, 100, 70_000, 3)]
  writer = RecordWriter(str(tmp_path / "a"))
  for row in rows:
    writer.write(row)
  writer.close()
  for start in range(len(rows) + 1):
    for stop in range(start, len(rows) + 1):
      found = records.read_tfrecord(tmp_path / "a", start, stop)
      assert list(found) == rows[start:stop]
  with pytest.raises(ValueError, match="ends after 7 records, but"):
    list(records.read_tfrecord(tmp_path / "a", 9, 10))
  size = (tmp_path / "a").stat().st_size
  for bit in (0, 8.5 / size, 0.5):  # Of a length, of its checksum, of a record.
    shutil.copy(tmp_path / "a", tmp_path / "b")
    wreck.flip(tmp_path / "b", bit)
    with pytest.raises(ValueError, match="b is cut short"):
      list(records.read_tfrecord(tmp_path / "b", 0, 7))
  wreck.cut(tmp_path / "a", 1 - 3 / size)
  with pytest.raises(ValueError, match="a is cut short"):
    list(records.read_tfrecord(tmp_path / "a", 0, 7))
  # RFC 3720, B.4: 32 bytes of zeros have the CRC 0x8A9136AA.
  rotated = (0x8A9136AA >> 15 | 0x8A9136AA << 17) + 0xA282EAD8
  assert records.masked_crc32c(bytes(32)) == rotated & 0xFFFFFFFF
