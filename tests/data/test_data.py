"""Sources, tokenizer, packing, shards and saved positions."""

import json
import shutil
from collections import Counter

import numpy as np
import pytest
import running
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from diloco import config as config_lib
from diloco import data as data_lib
from diloco.contrib.heldout_tasks import make_items
from diloco.data import documents as documents_lib
from diloco.data import pipeline, sources
from diloco.data.documents import encode_document, make_documents
from diloco.errors import ConfigError
from diloco.spec.fields import DataConfig
from diloco.spec.shapes import BOS_ID, EOS_ID
from diloco.util.command import load_module

MAKE_STANDIN = load_module(
  f"{running.ROOT}/scripts/benchmarks/make_standin.py", "write", ""
)


@pytest.fixture
def numbered(tiny, tmp_path):
  """Makes 12 documents; each repeats one word that no other document has."""
  words = "war peace law trade navy army land gold bank corn iron wool".split()  # noqa: SIM905
  for i, word in enumerate(words):
    (tmp_path / f"{i:02}.txt").write_text(" ".join([word] * (20 + 3 * i)))
  tiny.data.source = f"files:{tmp_path}/*.txt"
  tiny.model.seq_len, tiny.train.batch_size = 8, 4
  return config_lib.resolve(tiny)


def batches(c, count, **kwargs):
  iterator = data_lib.TrainIterator(c, **kwargs)
  taken = [next(iterator) for _ in range(count)]
  iterator.close()
  return taken


def test_the_seed_determines_the_batches(tiny):
  a, b = (batches(config_lib.resolve(tiny), 4) for _ in range(2))
  np.testing.assert_array_equal(a, b)
  assert a[0].shape == (2, 2, 16)
  assert a[0].dtype == np.int32
  tiny.seed = 1
  assert np.any(batches(config_lib.resolve(tiny), 4)[0] != a[0])


def test_one_replica_sees_each_token_once_per_epoch(numbered):
  c = numbered
  source = data_lib.make_source(c.data, "train")
  tokenizer = data_lib.load_tokenizer(c.data.tokenizer)
  documents = [encode_document(tokenizer, source[i]) for i in range(len(source))]
  sizes = [sum(map(len, documents[r::2])) for r in range(2)]
  for r in range(2):
    # Three epochs of one replica, up to the last full batch.
    count = 3 * sizes[r] // (2 * 8)
    stream = np.concatenate([b[0].ravel() for b in batches(c, count, replica_ids=[r])])
    for epoch in range(2):
      seen = stream[epoch * sizes[r] : (epoch + 1) * sizes[r]]
      assert Counter(seen.tolist()) == Counter(np.concatenate(documents[r::2]).tolist())
    # The stream consists of whole documents, each ended by EOS.
    firsts = [tuple(d) for d in np.split(stream, np.flatnonzero(stream == EOS_ID) + 1)]
    assert set(firsts[:-1]) == {tuple(d) for d in documents[r::2]}
    number = len(documents[r::2])
    assert firsts[:number] != firsts[number : 2 * number]  # Each epoch has its order.
  words = [set(np.concatenate(documents[r::2])) - {EOS_ID} for r in range(2)]
  assert words[0].isdisjoint(words[1])


class IdDocuments:
  """Documents of unique ids in ascending order, each ended by EOS."""

  def __init__(self, lengths):
    ends = np.cumsum(lengths)
    self.tokens = [
      np.append(np.arange(e - n, e) + 10, EOS_ID).astype(np.int32)
      for n, e in zip(lengths, ends)
    ]

  def __len__(self):
    return len(self.tokens)

  def __getitem__(self, index):
    return self.tokens[index]

  def lengths(self, indices):
    return np.array([len(self.tokens[i]) for i in indices])


@pytest.fixture
def set_documents(monkeypatch):
  """Replaces the source by IdDocuments; their lengths do not count EOS."""

  def set_lengths(lengths):
    documents = IdDocuments(lengths)
    monkeypatch.setattr(pipeline, "make_documents", lambda c, split: documents)

  return set_lengths


# With EOS, documents fill sequences of 8 exactly: always, sometimes or seldom.
@pytest.mark.parametrize(
  ("lengths", "prefetch", "window"),
  [
    ([7] * 12, 3, 5),
    ([15, 7] * 6, 3, 0),
    *(([6, 2, 10, 4, 22] * 3, *more) for more in ((3, 0), (3, 5), (0, -1))),
  ],
)
def test_every_position_resumes_exactly(tiny, set_documents, lengths, prefetch, window):
  set_documents(lengths)
  tiny.data.shuffle_window = window
  tiny.model.seq_len, tiny.data.prefetch = 8, prefetch
  c = config_lib.resolve(tiny)
  iterator, positions, expected = data_lib.TrainIterator(c), [], []
  for _ in range(9):
    positions.append(json.dumps(iterator.get_state()))
    expected.append(next(iterator))
  iterator.close()
  c = config_lib.changed(c, {"data.num_threads": 3})  # The same batches.
  for step, position in enumerate(positions):
    again = data_lib.TrainIterator(c)
    again.set_state(json.loads(position))
    assert json.dumps(again.get_state()) == position
    rest = [next(again) for _ in range(9 - step)]
    np.testing.assert_array_equal(rest, expected[step:])
    again.close()


def test_the_window_shuffles_packed_sequences_and_keeps_all(tiny, set_documents):
  set_documents([800])
  tiny.replicas, tiny.train.batch_size, tiny.model.seq_len = 1, 1, 8
  plain = np.concatenate(batches(config_lib.resolve(tiny), 60))[:, 0, 0]
  for size in (2, 20):
    tiny.data.shuffle_window = size
    mixed = np.concatenate(batches(config_lib.resolve(tiny), 60))[:, 0, 0]
    before, after = plain.reshape(-1, size), mixed.reshape(-1, size)
    np.testing.assert_array_equal(np.sort(before), np.sort(after))
    # Of two sequences, every other window keeps the order.
    assert np.mean((before != after).any(axis=1)) > (0.2 if size == 2 else 0.99)


@pytest.mark.parametrize("lengths", [[7] * 12, [15, 7] * 6, [6, 2, 10, 4, 22, 1] * 3])
def test_a_whole_shard_is_shuffled_anew_in_each_epoch(tiny, set_documents, lengths):
  set_documents(lengths)
  tiny.data.shuffle_window, tiny.model.seq_len = -1, 8
  c = config_lib.resolve(tiny)
  documents = pipeline.make_documents(c, "train").tokens
  for r in range(2):
    whole = np.concatenate(documents[r::2])
    sequences = whole[: len(whole) // 8 * 8].reshape(-1, 8).tolist()
    # Two epochs of one replica, whose batches have two sequences.
    taken = np.concatenate([b[0] for b in batches(c, len(sequences), replica_ids=[r])])
    epochs = [taken[: len(sequences)].tolist(), taken[len(sequences) :].tolist()]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(sequences)
    assert epochs[0] != epochs[1]
    assert sequences not in epochs


def test_what_cannot_be_shuffled_whole_is_refused(tiny, set_documents, monkeypatch):
  tiny.data.shuffle_window = -1
  c = config_lib.resolve(tiny)
  monkeypatch.setattr(documents_lib, "MOST_TOKENS", 10_000)
  with pytest.raises(ConfigError, match=r"window is -1, .* prepare arrays"):
    data_lib.TrainIterator(c)
  set_documents([50, 3])
  with pytest.raises(ConfigError, match=r"shard 1 of 2 .* only 4 tokens, .* is 16"):
    data_lib.TrainIterator(c)


def test_each_replica_has_its_own_order(tiny, set_documents):
  set_documents([7] * 40)
  tiny.model.seq_len = 8
  # Each document fills a sequence, so its first id gives its index in the shard.
  first_ids = np.stack(batches(config_lib.resolve(tiny), 10))[..., 0]
  order_0, order_1 = ((first_ids[:, r].ravel() - 10) // 7 // 2 for r in range(2))
  assert sorted(order_0) == sorted(order_1) == list(range(20))
  assert np.mean(order_0 == order_1) < 0.5


def test_with_the_same_shards_every_m_sees_the_same_sequences_in_every_step(tiny):
  tiny.data.shards, tiny.train.batch_size = 4, 8
  found = {}
  for m in (1, 2, 4):
    tiny.replicas = m
    c = config_lib.resolve(tiny)
    found[m] = np.stack(batches(c, 5))
    assert found[m].shape == (5, m, 8 // m, 16)
    last = np.stack(batches(c, 5, replica_ids=[m - 1]))
    np.testing.assert_array_equal(last, found[m][:, -1:])
  for m in (1, 2):
    np.testing.assert_array_equal(found[m].reshape(found[4].shape), found[4])
  tiny.data.shards = 0
  four = config_lib.resolve(tiny)
  np.testing.assert_array_equal(batches(four, 5), found[4])
  # A position of four replicas in two processes resumes with one replica.
  tiny.data.shards, tiny.replicas = 4, 1
  one = config_lib.resolve(tiny)
  iterator = data_lib.TrainIterator(one)
  iterator.set_state(split_positions(four, [[1, 3], [0, 2]], steps=3))
  np.testing.assert_array_equal(next(iterator).reshape(4, 2, 16), found[4][3])
  iterator.close()


def split_positions(c, groups, steps):
  """Joins the positions of processes with the given replicas after some steps."""
  position = {}
  for ids in groups:
    iterator = data_lib.TrainIterator(c, replica_ids=ids)
    for _ in range(steps):
      next(iterator)
    position.update(json.loads(json.dumps(iterator.get_state())))
    iterator.close()
  return position


GROUPS = ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[3], [1], [2], [0]], [[2, 0, 3], [1]])


@pytest.mark.parametrize("before", GROUPS)
def test_any_division_into_processes_resumes_any_other(numbered, before):
  fields = numbered.to_dict()
  fields["replicas"], fields["overlap"]["taus"] = 4, ()
  c = config_lib.resolve(ConfigDict(fields))
  # 14 batches of 8 tokens are more than one epoch of each replica.
  expected = np.stack(batches(c, 20))
  position = split_positions(c, before, steps=14)
  for after in GROUPS:
    for ids in after:
      iterator = data_lib.TrainIterator(c, replica_ids=ids)
      iterator.set_state(position)
      rows = np.stack([next(iterator) for _ in range(6)])
      iterator.close()
      np.testing.assert_array_equal(rows, expected[14:, ids])


def test_a_position_that_does_not_fit_is_refused(tiny, set_documents):
  set_documents([7] * 12)
  c = config_lib.resolve(tiny)
  position = split_positions(c, [[1]], steps=1)
  iterator = data_lib.TrainIterator(c)
  with pytest.raises(ConfigError, match="has no shard 0, only 1; resume"):
    iterator.set_state(position)
  iterator.close()
  for number in (11, 13):
    set_documents([7] * number)
    iterator = data_lib.TrainIterator(c, replica_ids=[1])
    message = rf"counts 12 training documents, but data.source now has {number};"
    with pytest.raises(ConfigError, match=message):
      iterator.set_state(position)
    iterator.close()


def test_a_replica_that_does_not_exist_is_refused(tiny):
  with pytest.raises(ValueError, match=r"replica_ids is \[2\]; give ids from 0 to 1"):
    data_lib.TrainIterator(config_lib.resolve(tiny), replica_ids=[2])


def test_evaluation_counts_every_token_once(numbered):
  c = numbered
  source = data_lib.make_source(c.data, "eval")
  tokenizer = data_lib.load_tokenizer(c.data.tokenizer)
  stream = np.concatenate([encode_document(tokenizer, s) for s in _texts(source)])
  fields = c.to_dict()
  fields["eval"]["tokens"] = 0
  whole = data_lib.make_eval_set(config_lib.resolve(ConfigDict(fields)))
  counted = whole.tokens[whole.weights > 0]
  np.testing.assert_array_equal(counted, stream)
  assert whole.num_tokens == len(stream) == whole.weights.sum()
  # No batch is all padding.
  assert whole.weights.any(axis=(1, 2)).all()
  assert whole.num_bytes == sum(len(source[i].encode()) for i in range(len(source)))
  fields["eval"]["tokens"] = 10
  cut = data_lib.make_eval_set(config_lib.resolve(ConfigDict(fields)))
  assert cut.num_tokens == 10
  np.testing.assert_array_equal(cut.tokens[cut.weights > 0], stream[:10])


def test_the_test_text_begins_with_the_document_after_the_evaluated_text(tiny):
  tiny.eval.tokens, tiny.eval.test_tokens = 2000, 3000
  c = config_lib.resolve(tiny)
  documents = make_documents(c, "eval")
  # The first 2,000 tokens take all of document 0 and a part of document 1.
  first, second = len(documents[0]), len(documents[1])
  assert first < 2000 < first + second
  wanted = np.concatenate([documents[i] for i in range(2, 5)])[:3000]
  test = data_lib.make_eval_set(c, test=True)
  np.testing.assert_array_equal(test.tokens[test.weights > 0], wanted)
  assert (test.num_tokens, data_lib.make_eval_set(c).num_tokens) == (3000, 2000)
  tiny.eval.tokens = 10**6  # Nothing is left.
  with pytest.raises(ConfigError, match=r"test_tokens is 3000, .* lower eval.tokens"):
    data_lib.make_eval_set(config_lib.resolve(tiny), test=True)


def test_evaluation_reads_no_document_beyond_its_budget(tiny, monkeypatch):
  class Documents(IdDocuments):
    def __getitem__(self, index):
      read.append(index)
      return self.tokens[index]

    def num_bytes(self, index, num_tokens):
      return num_tokens

  documents = Documents([5] * 3)
  monkeypatch.setattr(pipeline, "make_documents", lambda c, split: documents)
  for budget, expected in ((1, [0]), (6, [0]), (9, [0, 1]), (0, [0, 1, 2])):
    tiny.eval.tokens, read = budget, []
    whole = data_lib.make_eval_set(config_lib.resolve(tiny))
    assert read == expected
    assert whole.num_tokens == whole.num_bytes == (budget or 18)


TEXT = st.text(
  # U+2581 is SentencePiece's space.
  st.characters(exclude_characters="\u2581\0", exclude_categories=["Cs"]),
  max_size=40,
)


@given(TEXT, st.integers(0, 80))
def test_prefix_bytes_agree_with_the_decoded_prefix(text, num_tokens):
  tokenizer = data_lib.load_tokenizer("sotu_2048")
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  prefix = text.encode("utf-8")[: tokenizer.prefix_bytes(text, num_tokens)]
  prefix.decode("utf-8")  # Whole characters.
  # The rest of the decoded text is at most part of one character.
  decoded = tokenizer.decode(ids[:num_tokens]).encode("utf-8")
  assert decoded[: len(prefix)] == prefix
  assert set(decoded[len(prefix) :].decode("utf-8")) <= {"\ufffd"}


def test_bos_begins_a_document_and_stands_for_no_bytes(tiny):
  plain = make_documents(config_lib.resolve(tiny), "eval")
  tiny.data.add_bos = True
  begun = make_documents(config_lib.resolve(tiny), "eval")
  assert len(begun) == len(plain)
  np.testing.assert_array_equal(begun[1], [BOS_ID, *plain[1]])
  assert begun.num_bytes(1, 0) == begun.num_bytes(1, 1) == 0
  for n in (1, 2, 7, len(plain[1])):
    assert begun.num_bytes(1, n + 1) == plain.num_bytes(1, n)


@pytest.fixture(scope="module")
def standin(tmp_path_factory):
  """Makes a data_dir with stand-ins for C4 and Dolma."""
  folder = tmp_path_factory.mktemp("tfds")
  for name in ("c4/en:3.1.0", "dolma:1.0.0"):
    MAKE_STANDIN.write(name, folder)
  return folder


def test_items_are_made_of_all_splits_of_tfds(standin, tmp_path, capsys):
  flags = ["--source=tfds:c4/en:3.1.0", f"--data_dir={standin}", "--items=9"]
  assert make_items.main([*flags, "--split=all", f"--output={tmp_path}"]) == 0
  d = DataConfig(source="tfds:c4/en:3.1.0", data_dir=str(standin))
  count = sum(len(sources.make_source(d, split)) for split in ("train", "eval"))
  assert f"9 items of {count:,} documents" in capsys.readouterr().out


def test_tfds_gives_the_same_batches_as_its_text(tiny, standin):
  direct = config_lib.resolve(tiny)
  tiny.data.source, tiny.data.data_dir = "tfds:c4/en:3.1.0", str(standin)
  tfds = config_lib.resolve(tiny)
  np.testing.assert_array_equal(batches(tfds, 30), batches(direct, 30))
  a, b = (data_lib.make_eval_set(c) for c in (direct, tfds))
  np.testing.assert_array_equal(a.tokens, b.tokens)
  assert a.num_bytes == b.num_bytes


def test_held_out_text_may_come_from_a_source_whose_field_mistakes_name(tiny, tmp_path):
  plain = config_lib.resolve(tiny)
  (tmp_path / "0.txt").write_text("words that no address has")
  tiny.data.eval_source = f"files:{tmp_path}"
  both = config_lib.resolve(tiny)
  np.testing.assert_array_equal(batches(both, 2), batches(plain, 2))
  found = data_lib.make_eval_set(both)
  ids = found.tokens.reshape(-1)[: found.num_tokens - 1].tolist()
  text = data_lib.load_tokenizer(both.data.tokenizer).decode(ids)
  assert (text, found.num_bytes) == ("words that no address has", len(text))
  tiny.data.eval_source = "files:/nowhere/*.txt"
  with pytest.raises(ConfigError, match=r"^data.eval_source is 'files:/nowhere/"):
    data_lib.make_eval_set(config_lib.resolve(tiny))
  (tmp_path / "0.txt").write_text("")
  (tmp_path / "1.txt").write_text("only training text")
  tiny.data.eval_source = f"files:{tmp_path}"
  with pytest.raises(ConfigError, match=r"^data.eval_source is .* has no text"):
    data_lib.make_eval_set(config_lib.resolve(tiny))


def test_slices_of_a_split_are_disjoint_and_complete(tiny, standin):
  tiny.data.source, tiny.data.data_dir = "tfds:dolma:1.0.0", str(standin)
  tiny.data.train_split, tiny.data.eval_split = "train[:90%]", "train[90%:]"
  train, held_out = (data_lib.make_source(tiny.data, s) for s in ("train", "eval"))
  tiny.data.train_split = "train"
  whole = data_lib.make_source(tiny.data, "train")
  assert len(train) == round(0.9 * len(whole))
  parts = [*_texts(train), *_texts(held_out)]
  assert parts == _texts(whole)
  with pytest.raises(ConfigError, match=r"'train' and 'train\[90%:\]' share documents"):
    data_lib.make_eval_set(config_lib.resolve(tiny))


def _texts(source):
  return [source[i] for i in range(len(source))]


@pytest.mark.parametrize(
  ("fields", "says"),
  [
    ({"source": "tfds:lm1b:1.1.0"}, ["lm1b/1.1.0/data", "tfds build lm1b:1.1.0"]),
    ({"train_split": "test"}, ["'test'", "train or validation"]),
    ({"train_split": "train[:0%]"}, ["no documents in", "'train[:0%]'", "train[:99%]"]),
  ],
)
def test_missing_tfds_data_are_told_with_path_and_remedy(tiny, standin, fields, says):
  tiny.data.source, tiny.data.data_dir = "tfds:c4/en:3.1.0", str(standin)
  tiny.data.update(fields)
  with pytest.raises(ConfigError) as error:
    data_lib.make_source(tiny.data, "train")
  for words in says:
    assert words in str(error.value)


def replace(old, new):
  """Makes a function that changes the descriptions in a folder of TFDS."""

  def change(folder):
    for path in (folder / "dataset_info.json", folder / "features.json"):
      # One line with the separators of json.dumps.
      text = json.dumps(json.loads(path.read_text()))
      path.write_text(text.replace(old, new))

  return change


def cut(folder):
  (path,) = folder.glob("dolma-train.*")
  path.write_bytes(path.read_bytes()[:200_000])


DAMAGED = r"dolma/1.0.0 .*(fetch|prepare) the data set"


@pytest.mark.parametrize(
  ("harm", "message"),
  [
    (replace("array_record", "tfrecord"), r"stored as tfrecord.*tfds convert_format"),
    (replace('"text": {"python', '"words": {"python'), r"no feature `text` but.*words"),
    (cut, DAMAGED),
    (lambda folder: (folder / "dataset_info.json").write_text("{"), DAMAGED),
  ],
)
def test_unreadable_tfds_data_are_named(tiny, standin, tmp_path, harm, message):
  folder = tmp_path / "dolma/1.0.0"
  shutil.copytree(standin / "dolma/1.0.0", folder)
  harm(folder)
  tiny.data.source, tiny.data.data_dir = "tfds:dolma:1.0.0", str(tmp_path)
  iterate = lambda: next(data_lib.TrainIterator(config_lib.resolve(tiny)))
  with pytest.raises(ConfigError, match=message):
    iterate()


@pytest.mark.parametrize(
  ("fields", "tokens", "message"),
  [
    ({}, 16, "model.seq_len is 16, which .* 16 tokens at once; .* at most 15"),
    ({}, 64, "train.batch_size is 4, which .* 64 tokens at once; .* at most 3"),
    ({"data.prefetch": 3}, 192, "data.prefetch is 3, which .* 192 .* at most 2"),
    ({"data.shuffle_window": 7}, 224, "window is 7, which .* 224 .* at most 6"),
  ],
)
def test_exactly_as_many_tokens_are_kept(tiny, monkeypatch, fields, tokens, message):
  tiny.data.prefetch, tiny.data.shuffle_window = 0, 0
  tiny.update_from_flattened_dict(fields)
  c = config_lib.resolve(tiny)
  monkeypatch.setattr(pipeline, "MOST_TOKENS", tokens - 1)
  with pytest.raises(ConfigError, match=message):
    data_lib.TrainIterator(c)
  monkeypatch.setattr(pipeline, "MOST_TOKENS", max(tokens, 64))
  data_lib.TrainIterator(c).close()
  monkeypatch.setattr(pipeline, "MOST_TOKENS", 63)
  with pytest.raises(ConfigError, match=r"eval.batch_size is 4, .* 64 .* at most 3"):
    data_lib.make_eval_set(c)
  monkeypatch.setattr(pipeline, "MOST_TOKENS", 64)
  assert data_lib.make_eval_set(c).tokens.shape[1:] == (4, 16)


def test_reading_text_imports_neither_jax_nor_tensorflow():
  run = running.python(
    "-c",
    "import sys; from diloco import config, data;"
    "c = config.default_config(); c.eval.tokens, c.train.steps = 1000, 200;"
    "c = config.resolve(c);"
    "data.make_source(c.data, 'train')[0]; data.make_eval_set(c);"
    "assert not {'jax', 'tensorflow', 'pandas'} & set(sys.modules), sys.modules",
  )
  assert run.returncode == 0, run.stderr


def test_a_crash_while_batches_are_prefetched_keeps_its_exit_code():
  run = running.python(
    "-c",
    "from conftest import tiny_config; from diloco import config, data;"
    "it = data.TrainIterator(config.resolve(tiny_config())); next(it);"
    "raise SystemExit(3)",
  )
  assert (run.returncode, run.stderr) == (3, "")


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"data.source": "c4"}, "data.source is 'c4'; choose sotu"),
    ({"data.source": "files:/nowhere/*.txt"}, "no file matches '/nowhere/"),
    ({"data.tokenizer": "nosuch"}, "data.tokenizer is 'nosuch', but there is no file"),
    ({"model.vocab_size": 100}, "model.vocab_size is 100, but data.tokenizer"),
    ({"replicas": 500, "train.batch_size": 500}, "replicas is 500, but data.source"),
    ({"data.prefetch": 1001}, "data.prefetch is 1001; it must be .* at most 1000"),
    ({"train.batch_size": 1 << 30}, "lower it to at most 8388608"),
  ],
)
def test_errors_name_field_value_and_remedy(tiny, fields, message):
  tiny.update_from_flattened_dict(fields)
  with pytest.raises(ConfigError, match=message):
    data_lib.TrainIterator(config_lib.resolve(tiny))
