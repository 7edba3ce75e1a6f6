"""A mistake at the command line gives one sentence and exit status 2."""

import os
import re
import subprocess
import sys

import pytest
import running
from absl import flags

from diloco.config import command_line, describe
from diloco.errors import ConfigError
from diloco.log import metrics
from diloco.util import command

SAMPLE = f"--config={running.ROOT}/configs/sample.py"
BROKEN = """
from diloco.config import default_config

def get_config(arg="name"):
  c = default_config()
  if arg == "dict":
    return {}
  if arg == "value":
    raise ValueError("size is 3; give 4.")
  if arg == "field":
    c.outer.lr_
  return undefined
"""


def sentence(*args: str, workdir: tuple[str, ...] = ("--workdir=/tmp",)) -> str:
  """Returns the error that a program with a config and some flags prints."""
  values, argv = flags.FlagValues(), ["program", *args, *workdir]
  command_line.define_config(values)
  flags.DEFINE_string("workdir", None, "", flag_values=values)
  flags.DEFINE_integer("number", 1, "", lower_bound=1, flag_values=values)
  flags.DEFINE_enum("mode", "a", ["a", "b"], "", flag_values=values)
  flags.mark_flags_as_required(["config", "workdir"], flag_values=values)
  with pytest.raises(ConfigError) as caught:
    command_line._parse(values, argv)
  return str(caught.value)


@pytest.mark.parametrize(
  ("arg", "said"),
  [
    ("config.sync_every=abc", "--config.sync_every=abc: give an integer"),
    ("config.wire.density=x:y: z", "--config.wire.density=x:y: z: give a number"),
    ("config.model.qk_norm=maybe", "qk_norm=maybe: give true or false"),
    ("config.overlap.taus=(1,2", r"taus=\(1,2: give values such as \(1, 2\)"),
    ("config.sync_evry=3", r"sync_evry is no field \(did you mean sync_every\?\);"),
    ("config.wire.format.x=1", "--config.wire.format.x is no field"),
    ("config.log=1", r"log is no field \(did you mean log.every or log.\w+ or"),
    ("config.qqq=1", "--config.qqq is no field; diloco.main --print_config shows all."),
    ("number=0", "--number=0: give a positive integer"),
    ("mode=c", "--mode=c: value should be one of <a|b>"),
    ("numbr=1", r"there is no flag --numbr \(did you mean --number\?\); see --help"),
    ("steps=5", r"mean --config.train.steps or --config.profile.steps\?"),
    ("xyzzy", "there is no flag --xyzzy; see --help"),
    ("config.=1", "--config. is no field"),
    ("config=wan", "--config is given as .* and as wan; give one."),
  ],
)
def test_a_wrong_flag_is_named_with_the_remedy(arg, said):
  assert re.search(said.replace("<a|b>", "<a.b>"), sentence(SAMPLE, f"--{arg}"))


def test_missing_flags_and_flags_in_the_wrong_order():
  assert sentence() == "--config must be given (see --help)"
  assert sentence(workdir=()) == "--config and --workdir must be given (see --help)"
  assert "sync_every needs a --config before it" in sentence("--config.sync_every=3")
  assert "before a value for --config" in sentence("--config.sync_every=3", SAMPLE)


@pytest.mark.parametrize("path", ["none.py", "none.py:1B", ".", "", "x" * 300])
@pytest.mark.parametrize("more", [(), ("--config.sync_every=3",)])
def test_a_config_file_that_does_not_exist(path, more):
  said = f"there is no file {path.partition(':')[0]}; give for example"
  assert sentence(f"--config={path}", *more).startswith(said)
  with pytest.raises(ConfigError, match="there is no file"):
    command_line.load_config(path, more)


def test_values_after_a_space_and_paths_with_spaces(tmp_path):
  path = tmp_path / "a b.py"
  path.write_bytes((running.ROOT / "configs" / "sample.py").read_bytes())
  values, argv = flags.FlagValues(), ["program", "--config", str(path)]
  argv += ["--config.seed", "4", "--noconfig.model.qk_norm", "word"]
  command_line.define_config(values)
  assert command_line._parse(values, argv) == ["program", "word"]
  config = values["config"].value
  assert (config.seed, config.model.qk_norm) == (4, False)


@pytest.mark.parametrize("made", ["ConfigDict", "FrozenConfigDict"])
def test_a_file_may_leave_fields_out_and_flags_may_lie_in_a_file(made, tmp_path):
  path, flag_file = tmp_path / "c.py", tmp_path / "flags.txt"
  path.write_text(
    "import ml_collections\ndef get_config():\n"
    f"  return ml_collections.{made}({{'train': {{'steps': 400}}, 'plugins': ()}})\n"
  )
  for given, said in (
    (f"--config={path}\n--config.wire.density=0.5", "wire.density = 0.5 (default 0.1)"),
    ("--config=sample\n--config.sync_every=5", "sync_every = 5 (default 100)"),
    (f"--config={path}\n--config.plugins=fedpart,sparta", "sparta.every = 1"),
  ):
    flag_file.write_text(given)
    values, argv = flags.FlagValues(), ["program", f"--flagfile={flag_file}"]
    command_line.define_config(values)
    flags.DEFINE_string("flagfile", "", "", flag_values=values)
    command_line._parse(values, argv)
    config = values["config"].value
    config.unlock().wire.compressor = "topk"
    assert said in describe.text(config).splitlines()
  flag_file.write_text("--config=sample\n--config.sync_evry=5")
  assert "sync_evry is no field (did you" in sentence(f"--flagfile={flag_file}")
  flag_file.write_bytes(b"\xff")
  assert "--flagfile names a file that is no t" in sentence(f"--flagfile={flag_file}")
  assert "Unable to open flagfile" in sentence("--flagfile=/none/such")


def test_a_config_file_with_an_error_is_named_with_the_line(tmp_path):
  path = tmp_path / "broken.py"
  path.write_text(BROKEN)
  for arg, said in (
    ("name", f"NameError: name 'undefined' is not defined ({path}, line 12)"),
    ("dict", "get_config() returns no config; return default_config() with changes."),
    ("value", "size is 3; give 4."),
  ):
    assert sentence(f"--config={path}:{arg}") == f"{path}:{arg}: {said}"
  assert sentence(f"--config={path}:field").endswith(f"({path}, line 11)")
  (tmp_path / "syntax.py").write_text("x = =")
  assert "(syntax.py, line 1)" in sentence(f"--config={tmp_path}/syntax.py")
  assert "takes no argument; set fields by flags" in sentence(f"{SAMPLE}:foo")
  assert "run `python -m diloco sweep --sweep=ladder`." in sentence("--config=ladder")
  (tmp_path / "empty.py").touch()
  said = sentence(f"--config={tmp_path}/empty.py")
  assert said.endswith("empty.py has no get_config(); see configs/sample.py.")


def test_folders_that_are_not_writable(tmp_path):
  made = command.make_folder(tmp_path / "a" / "b", "--output")
  assert made.is_dir()
  assert not list(made.iterdir())
  (tmp_path / "file").touch()
  for path in (tmp_path / "file", tmp_path / "file" / "under", "/proc/none"):
    with pytest.raises(ConfigError, match=r"^--output is '.*', where nothing can be"):
      command.make_folder(path, "--output")


def test_ctrl_c_while_a_text_is_executed_has_the_same_status(tmp_path):
  (tmp_path / "program.py").write_text(
    "import sys; from diloco.util.command import guarded\n"
    "sys.exit(guarded(exec, 'raise KeyboardInterrupt'))"
  )
  # With -m, as our commands are started; CPython ends a file in another way.
  done = running.python("-m", "program", cwd=tmp_path)
  assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_counts_have_a_unit_or_an_exponent():
  counts = ("35M", "2.4B", "4e9", "1048576")
  assert [command.parse_count(c) for c in counts] == [35e6, 2.4e9, 4e9, 2**20]
  for text in ("4X", "1B3", "", "-1M", "nan", "inf", "1e999", "1e31", "0.5"):
    with pytest.raises(ConfigError, match=f"^size is '{text}'; write one such as 35M"):
      command.parse_count(text)
  with pytest.raises(ConfigError, match=r"^--params is 'big'; write one such"):
    command.parse_count("big", "--params")


def test_numbers_are_shown_with_three_digits_and_a_prefix():
  texts = {999: "999", 1000: "1k", 141_505: "142k", 76_683_576: "76.7M", 999_900: "1M"}
  assert {number: command.prefixed(number) for number in texts} == texts


@pytest.mark.parametrize(
  ("limits", "text", "message"),
  [
    ((1,), "0", "argument -x: 0; give 1 to inf"),
    ((1,), "1.5", "argument -x: invalid number value: '1.5'"),
    ((2.0, 1e9), "1", "argument -x: 1; give 2 to 1e+09"),
    ((0.0,), "nan", "argument -x: nan; give 0 to inf"),
    ((0.0,), "1e400", "argument -x: 1e400; give 0 to inf"),
  ],
)
def test_a_number_has_limits(limits, text, message):
  parser = command.Parser()
  parser.add_argument("-x", type=command.in_range(*limits))
  assert parser.parse_args(["-x", "3"]).x == 3
  said = running.refused(parser.parse_args, "-x", text)
  assert said == f"error: {message} (see --help)\n"


def test_options_have_names_and_types():
  known = {"M": int, "rate": float, "note": str, "data": ("c4", "dolma")}
  found = command.parse_options("M=2, rate=1e-3,note=a=b,data=c4,", known)
  assert found == {"M": 2, "rate": 1e-3, "note": "a=b", "data": "c4"}
  assert command.parse_options("") == {}
  assert command.parse_options("x=1,y=a") == {"x": "1", "y": "a"}
  brackets = {"outer_optimizer": "sgd(momentum=0.5, nesterov=True)", "seed": "0"}
  text = ",".join(f"{name}={value}" for name, value in brackets.items())
  assert command.parse_options(text) == brackets
  allowed = "M=<integer> rate=<number> note=<text> data=c4|dolma, separated by commas."
  for text in ("M", "=3", "H=3", "M=2.5", "rate=x", "rate=inf", "data=mc4"):
    with pytest.raises(ConfigError) as caught:
      command.parse_options(text, known, "--options")
    assert str(caught.value) == f"--options has {text!r}; write {allowed}"
  with pytest.raises(ConfigError, match="--where has 'foo'; write name=value, separat"):
    command.parse_options("foo", place="--where")
  with pytest.raises(ConfigError, match="has M twice; give it once"):
    command.parse_options("M=2,M=3", known)


def test_a_missing_package_is_named_with_a_remedy(tmp_path, tiny, monkeypatch):
  tiny.log.wandb_project = "ours"
  monkeypatch.setitem(sys.modules, "wandb", None)
  with pytest.raises(ValueError, match=r"pip install wandb, or '.\[wandb\]'"):
    metrics.MetricsWriter(tmp_path, tiny)


@pytest.mark.parametrize(
  ("command", "said"),
  [
    ("-m diloco.aot --config=none.py --topology=v5e", "there is no file none.py"),
    ("diloco/cli/train_tokenizer.py --source=sotu --output=/proc/x/y", "--output is "),
    ("scripts/benchmarks/bench_step.py --config.seed=1", "--config.seed needs a --con"),
  ],
)
def test_other_programs_end_with_one_sentence(command, said):
  ended = running.python(*command.split())
  assert ended.returncode == 2
  assert [x.startswith(f"error: {said}") for x in ended.stderr.splitlines()] == [1]


def test_the_trainer_ends_with_one_sentence(tmp_path):
  (tmp_path / "file").touch()
  for word, said in (
    ("word", "error: word is given besides the flags; write"),
    ("--config.seed=1", "error: --workdir is "),
    ("--stderrthreshold=x", "error: --stderrthreshold must be"),
  ):
    flag = f"--workdir={tmp_path}/file"
    ended = running.python("-m", "diloco.main", "--config=sample", flag, word)
    assert ended.returncode == 2
    assert [line[: len(said)] for line in ended.stderr.splitlines()] == [said]
  flags = ["--config=sample", f"--workdir={tmp_path}/new/run", "--config.mesh.fsdp=3"]
  assert running.python("-m", "diloco.main", *flags).returncode == 2
  assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("size", [1, 10**6])
def test_a_reader_that_ends_early_is_no_mistake(size):
  """A short text is written when the program ends, a long one before."""
  program = f"""
import sys
from diloco.util.command import guarded
sys.exit(guarded(lambda: input() and print("x" * {size})))
"""
  pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
  process = running.start("-c", program, **pipes)
  process.stdout.close()
  process.stdin.write("go\n")
  process.stdin.close()
  assert process.stderr.read() == ""
  assert process.wait() == 141


def test_another_broken_pipe_is_told(capsys):
  def run():
    reader, writer = os.pipe()
    os.close(reader)
    try:
      os.write(writer, b"x")
    finally:
      os.close(writer)

  assert command.guarded(run) == 1
  assert "Broken pipe" in capsys.readouterr().err
