"""Plug-ins: the page docs/extend.md, and what diloco does with names and fields."""

import json
import pathlib
import re
import shutil
import sys
import types

import later_papers  # noqa: F401  Registers a method of each kind.
import pytest
import running
from conftest import first_of, records, rewind
from plugins import EXAMPLES  # Registers `signs`, `feedback`, `bigram` and `signed`.

from diloco import __main__, train
from diloco.checkpoint.record import Record
from diloco.checkpoint.resume import check
from diloco.cli import check_plugin, list_configs
from diloco.config import add_plugins, changed, complete, default_config, resolve
from diloco.config.describe import text as described
from diloco.config.resolve import leaves
from diloco.errors import ConfigError
from diloco.interop import load
from diloco.log import metrics, read_run
from diloco.simulate import from_config
from diloco.spec import plugins as contrib_lib
from diloco.spec import shapes, sizes
from diloco.sweep import csv_file, job, saved

OTHERS = sorted(EXAMPLES.keys() - {"pulled"})  # A set differs between workers.
GIVEN = {
  "sign_sgd": "outer.learning_rate=0.001",
  "one_bit": "wire.format=auto",
  "theta_norm": "theta_norm.on=true",
  "pulled": "pulled.share=0.1",
  "pairs": "log.sample_tokens=0",
}


@pytest.mark.parametrize(
  "name", first_of("a process that trains three small runs", "pulled", *OTHERS)
)
def test_check_plugin_accepts_the_plugins_of_the_page(name, tmp_path):
  (tmp_path / f"{name}.py").write_text(EXAMPLES[name])
  done = running.python(
    *("-m", "diloco", "check_plugin", f"{name}.py", GIVEN[name]), cwd=tmp_path
  )
  assert done.returncode == 0, done.stdout + done.stderr
  names = [line.partition(": ")[0].split()[-1] for line in done.stdout.splitlines()]
  assert names == [*["size"] * (name == "one_bit"), "jit", "fsdp", "resume"]


def test_check_plugin_asks_for_the_fields_that_turn_it_on(tmp_path):
  path = tmp_path / "asks.py"
  path.write_text(EXAMPLES["theta_norm"].replace('"theta_norm"', '"asks"'))
  with pytest.raises(ConfigError, match=r"has the fields asks\.on, and none is given"):
    check_plugin.cases(str(path), ["wire.format=fp32"])
  given = ["asks.on=true"]
  assert check_plugin.cases(str(path), given) == [given]


def test_a_fault_in_a_plugin_is_told_with_its_line(tmp_path):
  path = tmp_path / "faulty.py"
  path.write_text("import jax\n\nx = Share\n")
  where = rf"NameError: name 'Share' is not defined \({path}, line 3\); mend it"
  with pytest.raises(ConfigError, match=where):
    default_config(str(path))


def test_a_plugin_is_given_by_path_and_its_run_keeps_the_file(tmp_path):
  code = EXAMPLES["one_bit"].replace('"one_bit"', '"by_path"')
  path = tmp_path / "by_path.py"
  path.write_text(code.replace("return 4 * n + -(-n * s // 8)", "return 8 * n"))
  c = check_plugin.tiny(str(path), ["wire.compressor=by_path"])
  assert c.plugins == ("by_path",)
  with pytest.raises(ConfigError, match=r"payload of 3 x 40 values is uint8 \(27,\)"):
    check_plugin.size(c, [])
  contrib_lib.keep(c.plugins, tmp_path)
  copy = tmp_path / "plugins/by_path.py"
  assert contrib_lib.kept("by_path", tmp_path) == str(copy)
  assert complete(c.to_dict()) == c
  assert default_config(str(copy)).plugins == ("by_path",)  # It is the same file.
  copy.write_text("")
  with pytest.raises(ConfigError, match=r"by_path.py has its name; rename the file"):
    default_config(str(copy))
  with pytest.raises(ConfigError, match=r"there is no file .*/absent.py"):
    default_config("absent.py")
  (tmp_path / "sparta.py").touch()
  with pytest.raises(ConfigError, match=r"sparta is no name for a module; rename"):
    default_config(f"{tmp_path}/sparta.py")
  with pytest.raises(ConfigError, match=r"the kind 'compressor'; choose one of fields"):
    contrib_lib.register("compressor", "mine", None)


def test_a_registered_compressor_works_in_trainer_ledger_and_simulator(tiny, tmp_path):
  tiny.wire.compressor = "signs"
  c = resolve(tiny)
  summary = train.train(tiny, tmp_path)
  whole = shapes.parameters(c.model)
  # A bit for every value, rounded up to bytes, and four bytes for every layer's tensor.
  payloads = []
  for fragment in c.make_fragments():
    rows = [sizes.layout(*leaf) for leaf in shapes.leaves(fragment.shapes(whole))]
    payloads.append(sum(4 * n + -(-n * s // 8) for n, s, _ in rows))
  sends = metrics.read(tmp_path, "send")
  assert sends
  for send in sends:  # M = 2: to one other replica.
    assert send["bytes"] == payloads[send["fragment"]]
    assert 0.1 < send["quantization_error"][0] < 1
  assert summary["bytes_sent_per_replica"] == sum(send["bytes"] for send in sends)
  bits = from_config.workload(c, seconds=1.0).bits
  assert bits == pytest.approx(8 * sum(payloads) / shapes.num_params(c.model))
  assert summary["eval_loss"]["outer"] < 7.7  # log(2048) is 7.62.


@pytest.mark.parametrize("transport", first_of("whole runs", "device", "host"))
def test_the_state_of_a_compressor_is_resumed_exactly(tiny, tmp_path, transport):
  tiny.model.name = "bigram"  # A small model compiles quickly.
  tiny.wire.compressor, tiny.wire.format = "feedback", "e3m0"
  tiny.overlap.tau, tiny.overlap.transport, tiny.checkpoint.keep = 2, transport, 9
  # A fragment is in flight at steps 5 and 10, where checkpoints are written.
  schedule = resolve(tiny).make_schedule()
  assert schedule.in_flight(5)
  assert schedule.in_flight(10)
  train.train(tiny, tmp_path / "whole")
  rewind(tmp_path / "whole", tmp_path / "resumed", 5)
  summary = train.train(tiny, tmp_path / "resumed")
  for kind in ("step", "send", "receive", "eval"):
    whole, resumed = (records(tmp_path / d, kind) for d in ("whole", "resumed"))
    assert json.dumps(whole) == json.dumps(resumed)
  # Without the state, the same values are sent as with `quantize`.
  tiny.wire.compressor = "quantize"
  assert train.train(tiny, tmp_path / "plain")["eval_loss"] != summary["eval_loss"]


def with_methods(c, **fields):
  """Adds fields of methods of `later_papers` to a config."""
  add_plugins(c, "later_papers")
  c.update_from_flattened_dict(fields)
  return c


SIGNED = {"outer.optimizer": "signed", "outer.learning_rate": 1e-5}


@pytest.mark.integration("whole runs")
@pytest.mark.parametrize(
  "fields",
  [
    {"outer.average": "median", "wire.format": "fp32"} | SIGNED,
    {"mixing.every": 3, "calm.steps": 3},
  ],
  ids=["mean and optimizer", "start and between syncs"],
)
def test_a_later_paper_in_one_file_trains_resumes_and_is_counted(
  fields, tiny, tmp_path
):
  tiny.checkpoint.keep, tiny.model.name, tiny.log.sample_tokens = 9, "bigram", 3
  # Few programs; a payload is in flight at step 5, where the run goes on.
  tiny.fragments.pattern, tiny.overlap.tau = "whole", 2
  c = resolve(with_methods(tiny, **fields))
  # The model has no attention.
  assert shapes.flops_per_token(c.model) == 6 * (2048 * 16 + 3 * 16 * 16)
  summary = train.train(c, tmp_path / "whole")
  assert 0 < summary["eval_loss"]["outer"] < 9  # log(2048) is 7.62.
  rewind(tmp_path / "whole", tmp_path / "again", 5)
  assert train.train(c, tmp_path / "again")["eval_loss"] == summary["eval_loss"]
  # The ledger of the run, and the list that counts without a run.
  _, counted = list_configs.traffic(c)
  assert counted == summary["bytes_sent_per_replica"]
  assert from_config.workload(c, seconds=1.0).bits == from_config.wire_bits(c)
  [record] = (tmp_path / "whole/checkpoints").glob("12/record/metadata")
  saved = json.loads(record.read_text())["config"]
  assert saved["mixing"] == {"every": fields.get("mixing.every", 0)}
  assert complete(saved) == c


def test_fields_of_a_plugin_are_known_to_config_sweeps_and_simulators(tiny, tmp_path):
  c = resolve(with_methods(tiny, **{"mixing.every": 2}))
  text = described(saved_config(c, tmp_path))
  assert "mixing.every = 2 (default 0)" in text
  assert "Averages the embeddings of the replicas between the syncs." in text
  assert resolve(saved_config(c, tmp_path)) == c
  tiny.mixing.every = 0
  bits = from_config.wire_bits(c) - from_config.wire_bits(resolve(tiny))
  embed = c.model.vocab_size * c.model.dim / shapes.num_params(c.model)
  assert bits == pytest.approx(32 * embed * c.sync_every / 2)  # M = 2: sent once.
  tiny.mixing.every = -1
  with pytest.raises(ConfigError, match=r"mixing.every is -1; it must be at"):
    resolve(tiny)
  with pytest.raises(ConfigError, match=r"sparta.share is 0.1, but .* plug-in sparta"):
    changed(c, {"sparta.share": 0.1})


def saved_config(c, folder):
  """The config that a run of a sweep takes from its config.json."""
  (folder / "config.json").write_text(json.dumps(c.to_dict()))
  return saved.get_config(str(folder / "config.json"))


def test_no_command_knows_a_plugin_of_contrib():
  package = pathlib.Path(train.__file__).parent
  naming = re.compile(rf"contrib(\.| import )({'|'.join(contrib_lib.contrib())})\b")
  files = (path for path in package.rglob("*.py") if naming.search(path.read_text()))
  outside = {path.relative_to(package).as_posix() for path in files}
  outside = {name for name in outside if not name.startswith(("contrib/", "configs/"))}
  assert outside == set()


def test_a_plugin_that_cannot_be_imported_is_named(tiny):
  tiny.plugins = ("nowhere_to_be_found",)
  with pytest.raises(ConfigError, match=r"plugins names 'nowhere.*PYTHONPATH"):
    resolve(tiny)


@pytest.fixture
def stranger(tiny, tmp_path, monkeypatch):
  """The folder of a run and of an export whose plug-in lies in the current folder."""
  fields = resolve(tiny).to_dict() | {"plugins": ["of_a_stranger"]}
  (tmp_path / "of_a_stranger.py").write_text("print('runs')")
  (tmp_path / "config.json").write_text(json.dumps({"step": 1, "config": fields}))
  (tmp_path / load.WEIGHTS).touch()
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "config.json").write_text(json.dumps(fields))
  (tmp_path / "run" / "metrics.jsonl").touch()
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  return fields


READS = {
  "an export": lambda fields: load.load("."),
  "a checkpoint": lambda fields: load._config(Record(fields), pathlib.Path()),
  "a run that goes on": lambda fields: check(
    fields, complete(fields | {"plugins": []}), 1
  ),
  "the config of a run": lambda fields: saved.get_config("run/config.json"),
  "a run of a sweep": lambda fields: job.run_by_hand(
    types.SimpleNamespace(run=[pathlib.Path("run")])
  ),
  "a table of runs": lambda fields: csv_file._run(
    dict.fromkeys(csv_file._RESULTS, "1")
    | {c: str(leaves(fields)[f]) for c, f in csv_file.EXPORTED_FIELDS.items()}
    | {"config": json.dumps({"plugins": fields["plugins"]}), "loss": "1"}
  ),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_no_record_imports_the_code_of_a_stranger(read, stranger, capfd):
  with pytest.raises(ConfigError, match=r"of_a_stranger, code .* --plugins=of_a_str"):
    read(stranger)
  assert "of_a_stranger" not in sys.modules
  assert capfd.readouterr().out == ""


def test_the_log_of_a_run_is_read_without_its_plugins(stranger):
  """As `compare` and `status` do."""
  config = pathlib.Path("run/config.json")
  stranger |= {"strange": {"every": [3]}, "outer": {"average": "strange"}}
  config.write_text(json.dumps(stranger))
  c = read_run.read(pathlib.Path("run"), "run").config
  assert leaves(c.to_dict())["strange.every"] == (3,)
  assert (c.plugins, c.outer.average) == (("of_a_stranger",), "strange")
  for part in ("run/site-0", "run/site-1"):
    shutil.copytree("run", part, ignore=shutil.ignore_patterns("site-*"))
  both = read_run.read(pathlib.Path("run"), "run").config
  assert (both.replicas, both.plugins) == (2 * c.replicas, c.plugins)
  shutil.rmtree("run/site-0"), shutil.rmtree("run/site-1")
  assert "of_a_stranger" not in sys.modules
  config.write_text(json.dumps(stranger | {"model": {"name": "strange"}}))
  with pytest.raises(ConfigError, match="of_a_stranger, code that is not of diloco"):
    read_run.read(pathlib.Path("run"), "run")


def test_a_plugin_that_the_command_names_is_imported(stranger, capsys, monkeypatch):
  monkeypatch.setattr(sys, "argv", sys.argv)
  command = ["diloco", "generate", "."]
  with pytest.raises(SystemExit, match="2"):
    __main__.main(command)
  refused = capsys.readouterr()
  assert refused.out == ""
  with pytest.raises(SystemExit, match="2"):
    __main__.main([*command, re.search(r"--plugins=\S+", refused.err)[0]])
  del sys.modules["of_a_stranger"]
  done = capsys.readouterr()
  assert done.out == "runs\n"
  assert f"whose {load.WEIGHTS} cannot be read" in done.err
