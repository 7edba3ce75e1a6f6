"""Loads models from runs and from exports, without the data of the run."""

import json
import shutil

import conftest
import cpu_devices
import jax
import numpy as np
import pytest
import running
from running import shown

from diloco import train
from diloco.checkpoint.record import Record
from diloco.cli import evaluate, export, generate
from diloco.errors import ConfigError, explain
from diloco.evaluate import heldout
from diloco.interop import load as restore


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """The folder of a run, and the outer parameters of its last evaluation."""
  workdir = tmp_path_factory.mktemp("run")
  return workdir, train_in(workdir)


def train_in(workdir, **fields):
  """Trains, and returns the outer parameters of the last evaluation."""
  seen = []
  evaluate_ = heldout.evaluate

  def spy(params, *args):
    seen.append(jax.device_get(params))
    return evaluate_(params, *args)

  c = conftest.tiny_config()
  c.train.steps, c.log.sample_tokens = 9, 0
  c.eval.batch_size = 3  # Four devices take 4.
  c.checkpoint.every, c.checkpoint.keep = 4, 5
  conftest.update(c, fields)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(heldout, "evaluate", spy)
    train.train(c, workdir)
  return seen[0]  # Before the mean of the replicas and the first replica.


def assert_same_bits(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b)):
    x, y = (np.asarray(v).view(np.uint32) for v in (x, y))
    np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


@pytest.mark.integration("another whole run")
def test_the_parameters_of_data_parallel_are_those_that_were_evaluated(tmp_path):
  params = train_in(tmp_path, algorithm="data_parallel")
  assert_same_bits(restore.load(tmp_path).params, params)


def test_the_outer_parameters_are_those_that_were_evaluated(trained):
  workdir, params = trained
  model = restore.load(workdir)
  assert (model.step, model.config.train.steps) == (9, 9)
  assert {x.dtype for x in jax.tree.leaves(model.params)} == {np.dtype("float32")}
  assert_same_bits(model.params, params)


def test_an_earlier_checkpoint_and_an_unfinished_run(trained, tmp_path):
  workdir, params = trained
  early = restore.load(workdir, step=4)
  assert early.step == 4
  assert np.any(early.params["embed"]["tokens"] != params["embed"]["tokens"])
  shutil.copytree(workdir / "checkpoints" / "4", tmp_path / "checkpoints" / "4")
  assert_same_bits(restore.load(tmp_path).params, early.params)


def test_neither_data_nor_later_fields_nor_devices_are_needed(trained, tmp_path):
  workdir, params = trained
  shutil.copytree(workdir, tmp_path / "copy")
  for file in tmp_path.glob("copy/checkpoints/*/record/metadata"):
    record = json.loads(file.read_text())
    record["config"]["data"]["source"] = "files:/nowhere/*.txt"
    record["config"]["model"]["attention"] = "splash"  # This machine has no TPU.
    del record["config"]["eval"], record["crc32"]
    file.write_text(json.dumps(Record(**record).to_json()))
  model = restore.load(tmp_path / "copy")
  assert_same_bits(model.params, params)
  assert model.config.model.attention == "auto"


def test_an_export_keeps_all_bits_and_the_config(trained, tmp_path):
  workdir, folder = trained[0], tmp_path / "out"
  original = restore.load(workdir)
  params = original.params
  bits = np.random.default_rng(0).integers(0, 2**32, (2048, 16), np.uint32)
  bits[0, :4] = 0x80000000, 1, 0x7FC00123, 0x7F800000  # -0, subnormal, NaN, infinity.
  params["embed"]["tokens"] = bits.view(np.float32)
  export.export(original, folder)
  assert str(workdir) not in (folder / "config.json").read_text()
  model = restore.load(folder)
  assert_same_bits(model.params, params)
  assert model.step == 9
  mine, run = model.config.to_dict(), original.config.to_dict()
  assert mine["data"].pop("tokenizer") == str(folder / "tokenizer.model")
  own = run["data"].pop("tokenizer")  # The copy in the folder of the run.
  assert own == str(workdir / "tokenizer.model")
  assert mine == run
  # Read without this package, every tensor has its documented name and shape.
  from safetensors.numpy import load_file

  tensors = load_file(folder / "model.safetensors")
  assert tensors["blocks.attention.q"].shape == (3, 16, 16)
  np.testing.assert_array_equal(tensors["embed.tokens"], params["embed"]["tokens"])
  described = json.loads((folder / "config.json").read_text())
  assert described["config"]["model"]["num_heads"] == 2
  # An export of an export is the same export.
  _, *again = export.export(model, tmp_path / "again")
  assert [path.name for path in again] == [restore.WEIGHTS, restore.TOKENIZER]
  for path in again:
    assert path.read_bytes() == (folder / path.name).read_bytes()
  with pytest.raises(ValueError, match=r"a run; give another folder"):
    export.export(original, workdir)
  assert not (workdir / restore.WEIGHTS).exists()


def test_an_export_that_does_not_fit_its_config(trained, tmp_path):
  export.export(restore.load(trained[0]), tmp_path)
  described = json.loads((tmp_path / "config.json").read_text())
  described["config"]["model"]["qk_norm"] = False
  (tmp_path / "config.json").write_text(json.dumps(described))
  with pytest.raises(ValueError, match=r"does not fit its config.json in blo"):
    restore.load(tmp_path)


@pytest.mark.parametrize(
  ("file", "content"),
  [("config.json", b"{"), ("config.json", b"[]"), ("model.safetensors", b"cut short")],
)
def test_a_damaged_export_is_refused(trained, tmp_path, file, content):
  export.export(restore.load(trained[0]), tmp_path)
  (tmp_path / file).write_bytes(content)
  with pytest.raises(ValueError, match=rf"{file} cannot be read .* again"):
    restore.load(tmp_path)


def test_a_model_that_cannot_be_loaded_is_explained_in_one_sentence(trained, tmp_path):
  with pytest.raises(ValueError, match="nowhere', but there is no such folder; give"):
    restore.load(tmp_path / "nowhere")
  with pytest.raises(ValueError, match="which holds no checkpoint yet; train with"):
    restore.load(tmp_path)
  with pytest.raises(ValueError, match=r"step is 5, but .* of steps 4, 8, 9;"):
    restore.load(trained[0], step=5)
  copy = tmp_path / "copy"
  shutil.copytree(trained[0], copy)
  for step in ("8", "9"):
    shutil.rmtree(copy / "checkpoints" / step / "state")
  assert restore.load(copy).step == 4  # The newest complete one.
  shutil.rmtree(copy / "checkpoints" / "4" / "record")
  with pytest.raises(ValueError, match=r"of steps 9, 8, 4 cannot be read"):
    restore.load(copy)


@pytest.mark.integration("a process")
def test_any_number_of_devices_gives_the_same_parameters_and_scores(trained, tmp_path):
  code = (
    "import sys; from diloco.cli import evaluate, export;"
    "from diloco.interop import load as restore;"
    "m = restore.load(sys.argv[1]); q = m.params['blocks']['attention']['q'];"
    "assert len(q.sharding.device_set) == 4 and not q.sharding.is_fully_replicated;"
    "export.export(m, sys.argv[2]);"
    "evaluate.main(sys.argv[3:]); print(0)"
  )
  workdir, out = str(trained[0]), str(tmp_path / "out")
  args = [workdir, f"--tasks={running.ROOT / 'tests/fixtures/items.jsonl'}"]
  details = [tmp_path / f"{n}.jsonl" for n in (1, 4)]
  cpu_devices.run(4, "-c", code, workdir, out, *args, f"--details={details[1]}")
  assert_same_bits(restore.load(out).params, trained[1])
  assert evaluate.main([*args, f"--details={details[0]}"]) == 0
  one, four = ([json.loads(x) for x in d.read_text().splitlines()] for d in details)
  assert len(one) == len(four) == 5
  for a, b in zip(one, four):
    np.testing.assert_allclose(a["scores"], b["scores"], rtol=1e-5)


def test_commands(trained, tmp_path):
  out = str(tmp_path / "out")
  assert "model.safetensors" in shown(export.main, trained[0], f"--output={out}")
  text = []
  for workdir in (trained[0], out):
    args = [str(workdir), "--prompt=The nation", "--tokens=6", "--seed=1"]
    text.append(shown(generate.main, *args))
  assert text[0] == text[1]
  assert text[0].startswith("The nation")
  run, output = str(trained[0]), f"--output={out}"
  for command, flags, message in (
    (generate, [out, "--top_k=-1"], "argument --top_k: -1; give 0 to inf (see --help)"),
    (generate, [out, f"--seed={'9' * 20}"], "99; give -9.22337e+18 to 9.22337e+18"),
    (generate, [out, "--prompt=\udcff"], "which is not UTF-8"),
    (export, [run, output, "--format=hf"], "'hf', but of an architecture with model."),
    (export, [run, output, "--dtype=bfloat16"], "which --format=diloco has not"),
    (export, [str(tmp_path), output], "holds no checkpoint yet"),
    (export, [run, "--output=/proc/none"], "--output is '/proc/none', where nothing"),
    (evaluate, [run, "--tasks=piqa", "--details=/proc/none/x"], "where nothing"),
  ):
    assert message in running.refused(command.main, *flags)


def test_an_export_to_a_full_disk_is_one_sentence(trained, tmp_path, monkeypatch):
  def full(*args, **kinds):  # As safetensors' own error.
    raise RuntimeError("I/O error: No space left on device (os error 28)")

  monkeypatch.setattr("safetensors.numpy.save_file", full)
  with pytest.raises(ConfigError, match=r"cannot be written \(.*; mend") as caught:
    export.export(restore.load(trained[0]), tmp_path)
  sentence, status = explain(caught.value)
  assert "make room" in sentence
  assert status == 1
