"""A start from a folder: an export, or one that the architecture reads itself."""

import json

import jax
import numpy as np
import plugins
import pytest

from diloco.cli import export
from diloco.config import resolve
from diloco.errors import ConfigError
from diloco.interop import init as start
from diloco.interop import load
from diloco.mesh.devices import make_inference_mesh, make_mesh
from diloco.model import registry
from diloco.spec.plugins import register
from diloco.spec.shapes import Architecture
from diloco.util.storage import open_storage


class Elsewhere(plugins.Bigram):
  """A model of another program, which has the matrices (out, in) in a .npz file."""

  @staticmethod
  def read(m, tokenizer, folder):
    del tokenizer
    found = np.load(folder / "w.npz")
    fields = {"model.num_layers": len(found["w"]), "model.dim": found["w"].shape[1]}
    w = found["w"].swapaxes(1, 2)
    return fields, iter([("embed.tokens", found["tokens"]), ("blocks.w", w)])

  @staticmethod
  def write(model, tokenizer, folder, dtype):
    del tokenizer
    w = np.asarray(model.params["blocks"]["w"], dtype).swapaxes(1, 2)
    np.savez(folder / "w.npz", w=w, tokens=model.params["embed"]["tokens"])
    return ["w.npz"]


Elsewhere.FORMATS = {"npz": Elsewhere.write}
register("model.name", "elsewhere", Architecture(Elsewhere, plugins.Bigram.parameters))


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


@pytest.mark.parametrize("name", ["decoder", "elsewhere"])
def test_an_export_of_any_architecture_is_read(tiny, tmp_path, name):
  tiny.model.name = name
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


def test_an_architecture_may_read_and_write_folders_of_another_program(tiny, tmp_path):
  tiny.model.name = "elsewhere"
  params = make_folder(tiny, tmp_path, "npz")
  assert_equal(first_params(tiny), params)
  tiny.model.dim = 32
  with pytest.raises(ConfigError, match=r"model.dim is 32, but .* has 16; set model.d"):
    first_params(tiny)


def test_a_format_or_a_folder_of_another_architecture_is_refused(tiny, tmp_path):
  with pytest.raises(ConfigError, match=r"'npz', .*=decoder one can write diloco; d"):
    make_folder(tiny, tmp_path, "npz")
  assert list(tmp_path.iterdir()) == []
  (tmp_path / "config.json").write_text(json.dumps({"model_type": "other"}))
  tiny.init.checkpoint = str(tmp_path)
  with pytest.raises(ConfigError, match=r"is none of diloco export .*model.name\."):
    first_params(tiny)


def test_an_export_with_another_tokenizer_or_damage_is_refused(tiny, tmp_path):
  make_folder(tiny, tmp_path)
  (tmp_path / "model.safetensors").write_bytes(b"cut short")
  with pytest.raises(ConfigError, match=r"model.safetensors cannot be read .*again"):
    first_params(tiny)
  own = tmp_path / "tokenizer.model"
  other = own.read_bytes() + b"\x50\x00"  # An unknown field of protobuf.
  own.write_bytes(other)
  with pytest.raises(ConfigError, match=r"trained with another; set data.tokenizer="):
    first_params(tiny)
