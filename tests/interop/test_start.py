"""A start from a folder: an export, or one that the architecture reads itself."""

import json

import conftest
import jax
import numpy as np
import pytest

from diloco.cli import export
from diloco.config import resolve
from diloco.errors import ConfigError
from diloco.interop import init as start
from diloco.interop import load
from diloco.mesh.devices import make_inference_mesh, make_mesh
from diloco.model import registry
from diloco.util.storage import open_storage


def make_folder(tiny, folder, format_="diloco"):
  """Exports a model that was not trained; returns its parameters."""
  c = resolve(tiny)
  params = registry.get(c.model).init(c.model, jax.random.key(5))
  model = load.Model(c, 3, params, make_inference_mesh())
  paths = export.export(model, folder, format_)
  assert set(paths) == set(folder.iterdir())
  tiny.init.checkpoint = str(folder)
  return params


def assert_equal(tree, other):
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y), dict(tree), other)


def first_params(tiny):
  c = resolve(tiny)
  return start.first_params(c, make_mesh(c))


QWEN3 = {"model.name": "qwen3", "qwen3.kv_heads": 1}  # It also reads other folders.


@pytest.mark.parametrize("fields", [{}, QWEN3], ids=["decoder", "qwen3"])
def test_an_export_of_any_architecture_is_read(tiny, tmp_path, fields):
  conftest.update(tiny, fields)
  params = make_folder(tiny, tmp_path)
  tiny.model.dtype, tiny.model.remat = "bfloat16", "full"  # Not of the parameters.
  assert_equal(first_params(tiny), params)
  described = json.loads((tmp_path / "config.json").read_text())["architecture"]
  assert described == registry.get(resolve(tiny).model).DESCRIPTION


def test_an_export_in_a_bucket_is_read(tiny, tmp_path, s3):
  params = make_folder(tiny, tmp_path)
  bucket = open_storage("s3://bucket/export", "--output")
  for path in tmp_path.iterdir():
    bucket.put(path.name, path.read_bytes())
  tiny.init.checkpoint = "s3://bucket/export"
  assert_equal(first_params(tiny), params)


def test_a_format_or_a_folder_of_another_architecture_is_refused(tiny, tmp_path):
  with pytest.raises(ConfigError, match=r"'npz', .*=decoder one can write diloco; d"):
    make_folder(tiny, tmp_path, "npz")
  assert list(tmp_path.iterdir()) == []
  (tmp_path / "config.json").write_text(json.dumps({"model_type": "other"}))
  tiny.init.checkpoint = str(tmp_path)
  with pytest.raises(ConfigError, match=r"is none of diloco export .*model.name\."):
    first_params(tiny)


def test_an_export_with_another_tokenizer_is_refused(tiny, tmp_path):
  make_folder(tiny, tmp_path)
  own = tmp_path / "tokenizer.model"
  other = own.read_bytes() + b"\x50\x00"  # An unknown field of protobuf.
  own.write_bytes(other)
  with pytest.raises(ConfigError, match=r"trained with another; set data.tokenizer="):
    first_params(tiny)
