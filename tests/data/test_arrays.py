"""Damaged token arrays are refused in one sentence; sound ones need no other field."""

import itertools
import json
import pathlib
import random
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco import config as config_lib
from diloco import data as data_lib
from diloco.data.arrays import TokenArrays
from diloco.data.documents import make_documents
from diloco.data.prepare import tokenize as prepare
from diloco.errors import ConfigError


@pytest.fixture
def folder(lines, tmp_path, in_line):
  """Prepares a training split in several files."""
  prepare.tokenize(lines, "train", "sotu_2048", tmp_path / "a", unit_size=5000)
  return tmp_path / "a"


def read_all(folder):
  """Reads all documents, and checks the promises of `TokenArrays` about each."""
  tokenizer = data_lib.load_tokenizer("sotu_2048")
  arrays = TokenArrays(folder, tokenizer)
  documents = [arrays[i] for i in range(len(arrays))]
  for ids in documents:
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert ids.min() >= 0
    assert ids.max() < tokenizer.vocab_size
    assert ids[-1] == 1
  return documents


def change(name, edit):
  """Makes a function that edits the first array named so, and its size on record."""

  def damage(folder):
    path = min(folder.glob(name))
    np.save(path, edit(np.load(path)))
    manifest = json.loads((folder / "manifest.json").read_text())
    for file in manifest["files"]:
      file["size"] = (folder / file["file"]).stat().st_size
    set_manifest(files=manifest["files"])(folder)

  return damage


def of_ends(edit):
  return change("ends.npy", edit)


def overwrite(name, content):
  return lambda folder: min(folder.glob(name)).write_bytes(content)


def set_manifest(**fields):
  def damage(folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

  return damage


UNIT = "00001-of-*.npy"


@pytest.mark.parametrize(
  ("damage", "message"),
  [
    (set_manifest(version=0), r"manifest.json is damaged or not of version 1; copy"),
    (overwrite("manifest.json", b'{"version": 1, '), "manifest.json is damaged"),
    (overwrite("manifest.json", b'{"version": 1}'), "manifest.json is damaged"),
    (set_manifest(shards=[{"file": "a", "tokens": "7"}]), "manifest.json is damaged"),
    (set_manifest(shards=[]), r"ends.npy, which counts .* tokens instead of 0"),
    (set_manifest(documents=7), r"ends.npy, which holds uint64\[288\] instead of"),
    (set_manifest(dtype="uint32"), r"holds uint16\[\d+\] instead of uint32\["),
    (of_ends(lambda e: e + np.uint64(10**6)), r"counts 1,0\d\d,\d\d\d tokens instead"),
    (
      of_ends(lambda e: np.r_[e[:5], e[5:-1] ^ np.uint64(1 << 60), e[-1:]]),
      r"ends.npy, whose document 5 has the tokens \d+ to \d{10}",
    ),
    (of_ends(lambda e: np.r_[e[5::-1], e[6:]]), r"ends.npy, whose document 1 has the"),
    (
      of_ends(lambda e: np.r_[e[:9], e[9] - np.uint64(1), e[10:]]),
      r"npy, whose document 9 does not end with EOS",
    ),
    (
      change(
        UNIT, lambda ids: np.where(np.arange(len(ids)) == 3, 2048, ids).astype("u2")
      ),
      r"00001-of-\d+.npy, whose document \d+ has the token 2048, but .* 2048 pieces",
    ),
    (change(UNIT, lambda ids: ids.astype("f2")), "npy, which holds float16"),
    (change(UNIT, lambda ids: ids[:, None]), r"npy, which holds uint16\[\d+, 1\]"),
  ],
)
def test_damage_is_refused_in_one_sentence(folder, damage, message):
  assert len(read_all(folder)) == 288
  damage(folder)
  with pytest.raises(ConfigError, match=message) as error:
    read_all(folder)
  assert "\n" not in str(error.value)


@settings(
  max_examples=60,
  deadline=None,
  suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32), flips=st.integers(1, 40), first=st.booleans())
def test_flipped_bits_give_documents_or_one_sentence(folder, seed, flips, first):
  """Any damage ends in a ConfigError or in documents of possible tokens."""
  rng = random.Random(seed)
  path = rng.choice(sorted(folder.glob("*.json")) + sorted(folder.glob("*.npy")))
  good = path.read_bytes()
  damaged = bytearray(good)
  stop = min(len(good), 128) if first else len(good)
  for _ in range(flips):
    damaged[rng.randrange(stop)] ^= 1 << rng.randrange(8)
  path.write_bytes(damaged)
  try:
    read_all(folder)
  except ConfigError:
    pass
  finally:
    path.write_bytes(good)


@pytest.mark.parametrize(
  ("source", "message"),
  [
    ("arrays:{}/a", "which is one split; give arrays:{}, and set data.train_split"),
    ("arrays:{}/a/ends.npy", "manifest.json does not exist; run `python"),
    ("arrays:{}", "b/manifest.json does not exist; run `python"),
  ],
)
def test_a_source_that_is_no_folder_of_splits_is_refused(tiny, folder, source, message):
  tiny.data.source, tiny.data.train_split = source.format(folder.parent), "b"
  with pytest.raises(ConfigError, match=re.escape(message.format(folder.parent))):
    make_documents(config_lib.resolve(tiny), "train")


@pytest.mark.skipif(not pathlib.Path("/proc/self/smaps").exists(), reason="Linux only")
def test_arrays_are_read_without_the_pages_around_a_document(folder):
  arrays = TokenArrays(folder, data_lib.load_tokenizer("sotu_2048"))
  maps = pathlib.Path("/proc/self/smaps").read_text().split("VmFlags:")
  own = [flags for text, flags in itertools.pairwise(maps) if str(folder) in text]
  assert len(own) > len(arrays._arguments)  # The ends are a map, too.
  assert all(" rr " in flags.splitlines()[0] for flags in own)
