"""A config that leaves tokenizer and vocabulary open takes those of its data."""

import pathlib
import shutil

import pytest

from diloco import config as config_lib
from diloco import data as data_lib
from diloco.data.prepare import tokenize as prepare
from diloco.errors import ConfigError
from diloco.tokenizer import vocabulary

SHIPPED = pathlib.Path(vocabulary.__file__).parent / "shipped/sotu_2048.model"


@pytest.fixture
def prepared(tmp_path, in_line):
  """Prepares both splits of a text with a copy of the shipped tokenizer."""
  (tmp_path / "text.txt").write_text("\n\n".join(f"Paragraph {i}." for i in range(60)))
  model = shutil.copy(SHIPPED, tmp_path / "own.model")
  for split, name in (("train", "train"), ("eval", "validation")):
    folder = tmp_path / "tokens" / name
    prepare.tokenize(f"paragraphs:{tmp_path}/text.txt", split, str(model), folder)
  (tmp_path / "own.model").unlink()
  return tmp_path / "tokens"


def test_the_folder_of_prepared_data_is_all_that_training_needs(tiny, prepared):
  tiny.data.source, tiny.model.vocab_size = f"arrays:{prepared}", 0
  c = config_lib.resolve(tiny)
  assert c.data.tokenizer == str(prepared / "train/tokenizer.model")
  assert c.model.vocab_size == 2048
  assert config_lib.resolve(c) == config_lib.complete(c.to_dict()) == c
  iterator = data_lib.TrainIterator(c)
  assert next(iterator).shape == (2, 2, 16)
  iterator.close()
  assert data_lib.make_eval_set(c).num_bytes > 0


def test_a_split_is_found_by_its_folder_or_by_what_it_was_prepared_from(prepared):
  source = f"arrays:{prepared}"
  for split in ("validation", "eval"):
    assert vocabulary.split_folder(source, split) == prepared / "validation"
  assert vocabulary.split_folder(source, "train[:99%]") == prepared / "train[:99%]"
  (prepared / "eval").mkdir()
  assert vocabulary.split_folder(source, "eval") == prepared / "eval"


def test_values_of_the_user_are_kept_and_contradictions_refused(tiny, prepared):
  tiny.data.source, tiny.model.vocab_size = f"arrays:{prepared}", 4096
  c = config_lib.resolve(tiny)
  assert c.model.vocab_size == 4096
  data_lib.TrainIterator(c).close()
  tiny.model.vocab_size = 2000
  with pytest.raises(ConfigError, match="at least 2048, or set 0 for exactly as many"):
    data_lib.TrainIterator(config_lib.resolve(tiny))
  other = bytearray(SHIPPED.read_bytes()) + b"\x12\x00"  # An empty protobuf message.
  (prepared / "other.model").write_bytes(other)
  tiny.model.vocab_size, tiny.data.tokenizer = 0, str(prepared / "other.model")
  c = config_lib.resolve(tiny)
  assert (c.model.vocab_size, c.data.tokenizer) == (2048, str(prepared / "other.model"))
  message = r"tokenizer own.model .*; set data.tokenizer to the first one \(empty: that"
  with pytest.raises(ConfigError, match=message):
    data_lib.TrainIterator(c)


def test_a_tokenizer_without_permission_is_named(tiny, tmp_path, monkeypatch):
  """Root may read everything, so the test replaces the refusal of the system."""
  tiny.data.tokenizer, tiny.model.vocab_size = str(tmp_path / "a.model"), 0
  (tmp_path / "a.model").touch()

  def refuse(path):
    raise PermissionError(13, "Permission denied", str(path))

  monkeypatch.setattr(pathlib.Path, "read_bytes", refuse)
  with pytest.raises(ConfigError, match=r"a.model', which cannot be read \(Permission"):
    config_lib.resolve(tiny)
