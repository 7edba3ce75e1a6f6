"""Mistakes at the command line: one sentence (name, value, remedy), exit code 2."""

import pathlib
import subprocess
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from diloco.config import ConfigError, command_line
from diloco.data import records
from diloco.run import load as restore
from diloco.run import metrics
from diloco.sweep import slurm

ROOT = pathlib.Path(__file__).parents[2]
SAMPLE = f"--config={ROOT}/configs/sample.py"
BROKEN = """
from diloco.config import default_config

def get_config(arg="name"):
  c = default_config()
  if arg == "dict":
    return {}
  if arg == "value":
    raise ValueError("size is 3; give 4.")
  if arg == "file":
    open("/none/such")
  if arg == "field":
    c.outer.lr_
  return undefined
"""


def sentence(*args: str, workdir: tuple[str, ...] = ("--workdir=/tmp",)) -> str:
  """What the parser says of a program with a config and a few flags."""
  values, argv = flags.FlagValues(), ["program", *args, *workdir]
  config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
  flags.DEFINE_string("workdir", None, "", flag_values=values)
  flags.DEFINE_integer("number", 1, "", lower_bound=1, flag_values=values)
  flags.DEFINE_enum("mode", "a", ["a", "b"], "", flag_values=values)
  flags.mark_flags_as_required(["config", "workdir"], flag_values=values)
  with pytest.raises(ConfigError) as caught:
    command_line._parse(values, argv)
  return str(caught.value)


@pytest.mark.parametrize(
  ("args", "said"),
  [
    (("config.sync_every=abc",), "--config.sync_every is 'abc'; give an integer."),
    (("config.wire.density=x:y: z",), "density is 'x:y: z'; give a number."),
    (("config.model.remat=maybe",), "remat is 'maybe'; give true or false."),
    (("config.overlap.taus=(1,2",), "taus is '(1,2'; give values by commas."),
    (("config.sync_evry=3",), "sync_evry is no field (did you mean sync_every?);"),
    (("config.format=1",), "format is no field (did you mean wire.format?);"),
    (("config.wire.format.x=1",), "--config.wire.format.x is no field"),
    (("config.overlap=1",), "group of fields; set one of them, such as --config.over"),
    (("config.overlap={}", "config.qqq=1"), "--config.qqq is no field; diloco/config"),
    (("number=0",), "--number is '0'; give a positive integer."),
    (("mode=c",), "--mode is 'c': value should be one of <a|b>."),
    (("mood=c",), "--mood is no flag of this command (did you mean mode?); --help"),
  ],
)
def test_flags_and_fields(args, said):
  assert said in sentence(SAMPLE, *(f"--{arg}" for arg in args))


def test_flags_that_are_missing_or_in_another_order():
  assert sentence() == "--config must be given; --help says what for."
  both = "--config and --workdir must be given; --help says what for."
  assert sentence(workdir=()) == both
  assert "sync_every needs a --config before it" in sentence("--config.sync_every=3")
  assert "before a value for --config" in sentence("--config.sync_every=3", SAMPLE)


@pytest.mark.parametrize("path", ["none.py", "none.py:1B", ".", ""])
@pytest.mark.parametrize("more", [(), ("--config.sync_every=3",)])
def test_there_is_no_such_config_file(path, more):
  said = f"--config is {path!r}, but there is no file {path.partition(':')[0]}; give"
  assert sentence(f"--config={path}", *more).startswith(said)
  with pytest.raises(ConfigError, match="but there is no file"):
    command_line.load_config(path, more)


def test_a_config_file_with_an_error_is_named_with_the_line(tmp_path):
  path = tmp_path / "broken.py"
  path.write_text(BROKEN)
  for arg, said in (
    ("name", f"NameError: name 'undefined' is not defined ({path}, line 14)"),
    ("dict", "get_config() returns no config; return default_config() with changes."),
    ("value", "size is 3; give 4."),
    ("file", "[Errno 2] No such file or directory: '/none/such'"),
  ):
    assert sentence(f"--config={path}:{arg}") == f"{path}:{arg}: {said}"
  assert sentence(f"--config={path}:field").endswith(f"({path}, line 13)")
  (tmp_path / "syntax.py").write_text("x = =")
  assert f"({tmp_path}/syntax.py, line 1)" in sentence(f"--config={tmp_path}/syntax.py")
  assert "0 positional arguments but 1 was given; its" in sentence(f"{SAMPLE}:foo")


def test_a_config_file_without_get_config(tmp_path, monkeypatch):
  monkeypatch.delitem(sys.modules, "config_config", raising=False)
  (tmp_path / "empty.py").touch()
  said = sentence(f"--config={tmp_path}/empty.py")
  assert said.endswith("the file has no get_config(); see configs/sample.py.")


def test_load_config_takes_what_the_trainer_takes():
  name = f"{ROOT}/configs/chinchilla.py:1.3B,M=4"
  c = command_line.load_config(name, ["--config.overlap.tau=5"])
  assert (c.replicas, c.overlap.taus) == (4, (5,) * 4)


def test_folders_that_cannot_be_written(tmp_path):
  made = command_line.make_folder(tmp_path / "a" / "b", "--output")
  assert made.is_dir()
  assert not list(made.iterdir())
  (tmp_path / "file").touch()
  for path in (tmp_path / "file", tmp_path / "file" / "under", "/proc/none"):
    with pytest.raises(ConfigError, match=r"^--output is '.*', where nothing can be"):
      command_line.make_folder(path, "--output")


def test_modules_and_the_function_they_need(tmp_path):
  for text, said in (
    ("def get_it(): pass", ""),
    ("x = 1", r"has no get_it\(\); see configs/ladder.py."),
    ("import none_such", "ModuleNotFoundError: .* line 1"),
    ("x = =", "invalid syntax .*line 1"),
  ):
    (tmp_path / "m.py").write_text(text)
    load = (str(tmp_path / "m.py"), "get_it", "configs/ladder.py")
    if not said:
      assert command_line.load_module(*load).get_it() is None
      continue
    with pytest.raises(ConfigError, match=said):
      command_line.load_module(*load)
  for path in ("none.py", str(tmp_path)):
    with pytest.raises(ConfigError, match=f"{path!r} is no file; give for example"):
      command_line.load_module(path, "get_it", "configs/ladder.py")


def test_options_by_name_and_type():
  known = {"M": int, "rate": float, "note": str, "data": ("c4", "dolma")}
  found = command_line.parse_options("M=2, rate=1e-3,note=a=b,data=c4,", known)
  assert found == {"M": 2, "rate": 1e-3, "note": "a=b", "data": "c4"}
  assert command_line.parse_options("") == {}
  assert command_line.parse_options("x=1,y=a") == {"x": "1", "y": "a"}
  allowed = "write M=<integer> rate=<number> note=<text> data=c4|dolma, by commas."
  for text, remedy in (
    ("M", allowed),
    ("=3", allowed),
    ("H=3", allowed),
    ("M=2.5", "write M=<integer>."),
    ("rate=inf", "write rate=<number>."),
    ("data=mc4", "write data=c4|dolma."),
  ):
    with pytest.raises(ConfigError) as caught:
      command_line.parse_options(text, known, "--options")
    assert str(caught.value) == f"--options has {text!r}; {remedy}"
  with pytest.raises(ConfigError, match="--where has 'foo'; write name=value, by comm"):
    command_line.parse_options("foo", place="--where")
  with pytest.raises(ConfigError, match="has M twice; give it once"):
    command_line.parse_options("M=2,M=3", known)


@pytest.mark.parametrize(
  ("package", "extra", "use"),
  [
    ("google-crc32c", "prepare", lambda tmp, c: records.masked_crc32c(b"")),
    ("safetensors", "export", lambda tmp, c: restore.import_safetensors()),
    ("submitit", "slurm", lambda tmp, c: slurm.Slurm(1, tmp, {}, {})),
    ("wandb", "wandb", lambda tmp, c: metrics.MetricsWriter(tmp, c)),
  ],
)
def test_packages_that_are_not_installed(package, extra, use, tmp_path, tiny):
  tiny.log.wandb_project = "ours"
  with pytest.MonkeyPatch.context() as patch:
    for name in (package.replace("-", "_"), f"{package}.numpy"):
      patch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError) as caught:
      use(tmp_path, tiny)
  remedy = f"is not installed: pip install {package}, or '.[{extra}]' from a clone."
  assert str(caught.value).endswith(remedy)


def run(*args: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, *args], cwd=ROOT, capture_output=True, text=True, check=False
  )


@pytest.mark.parametrize(
  ("command", "said"),
  [
    (
      "-m diloco.sweep --sweep=configs/ladder.py --results=/proc/none",
      "--results is '/proc/none', where noth",
    ),
    ("-m diloco.sweep --results=/tmp --foo", "--foo is no flag of this command"),
    ("-m diloco.aot --config=none.py --topology=v5e", "--config is 'none.py', but"),
    ("scripts/prepare_data.py --source=sotu --output=/tmp", "no command is given"),
    ("scripts/train_tokenizer.py --source=sotu --output=/proc/x/y", "--output is '/pr"),
    ("scripts/make_standin.py --name=c4 --data_dir=/tmp", "--name is 'c4'; give c4/en"),
    (
      "scripts/bench_data.py --config=configs/sample.py:x",
      "configs/sample.py:x: get",
    ),
    ("scripts/bench_step.py --config.seed=1", "--config.seed needs a --config before"),
    ("scripts/bench_prepare.py --folder=/proc/x", "--folder is '/proc/x', where noth"),
  ],
)
def test_other_programs_end_with_one_sentence(command, said):
  ended = run(*command.split())
  assert ended.returncode == 2
  assert [line.startswith(f"error: {said}") for line in ended.stderr.splitlines()] == [
    1
  ]


def test_the_trainer_ends_with_one_sentence(tmp_path):
  (tmp_path / "file").touch()
  for args, said in (
    (("configs/none.py",), "error: --config is 'configs/none.py', but there is no"),
    (("configs/sample.py", "word"), "error: word is given besides the flags; write"),
    (("configs/sample.py",), "error: --workdir is "),
  ):
    flag = f"--workdir={tmp_path}/file"
    ended = run("-m", "diloco.main", f"--config={args[0]}", flag, *args[1:])
    assert ended.returncode == 2
    assert [line[: len(said)] for line in ended.stderr.splitlines()] == [said]
