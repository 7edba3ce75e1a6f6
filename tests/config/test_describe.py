"""The description of the config says of every field what fields.py says."""

import running

from diloco.config import default_config, describe
from diloco.config.resolve import leaves
from diloco.spec import plugins


def described():
  groups = describe.groups(plugins.contrib())
  return {f.name: f for group in groups for f in group.fields}


def sample():
  c = default_config()
  c.train.steps = 400
  return c


def test_every_field_has_a_meaning_a_type_and_its_default():
  defaults = leaves(default_config(*plugins.contrib()).to_dict())
  found = described()
  assert sorted(found) == sorted(defaults)
  assert {n: f.default for n, f in found.items()} | {"plugins": ()} == defaults | {
    "plugins": ()
  }
  for field in found.values():
    assert field.meaning.endswith("."), field.name
    assert field.kind, field.name
  assert all(group.meaning.endswith(".") for group in describe.groups())


def test_types_and_limits_are_told_in_words():
  kinds = {name: f.kind for name, f in described().items()}
  assert kinds["algorithm"] == "data_parallel or diloco or streaming"
  assert kinds["wire.density"] == "number, above 0 and at most 1"
  assert kinds["wire.block_size"] == "whole number, at least -1"
  assert kinds["replicas"] == "whole number, at least 1 and at most 100000"
  assert kinds["model.qk_norm"] == "true or false"
  assert kinds["overlap.taus"] == "several, as (1, 2)"
  assert kinds["plugins"] == "several, as ('a', 'b')"
  assert kinds["log.prompt"] == "text"


def test_a_comment_belongs_to_the_field_below_it():
  meaning = described()["overlap.alpha"].meaning
  assert meaning.startswith("alpha: weight of the replica's own parameters in the mer")
  assert meaning.endswith("1 ignores the other replicas.")
  source = (
    "class A:\n  # Not this.\n\n  # One\n  # two.\n  x: int = 1\n  y: int = 2\n\n"
    "  def f(self): ...\n"
  )
  assert describe._comments(source) == {("A", x): "One two." for x in "xy"}


def test_the_text_tells_values_defaults_and_what_the_run_uses():
  c = sample()
  c.outer.learning_rate = 0.5
  c.replicas = 4
  lines = describe.text(c).splitlines()
  for line in (
    "outer.learning_rate = 0.5 (default 0.4)",
    "wire.format = auto, here e3m0",
    "overlap.taus = (), here (1, 1, 1, 1)",
    "replicas = 4 (default 2)",
    "seed = 0",
    "data.data_dir = ''",
    "model.qk_norm = true",
  ):
    assert line in lines
  assert max(map(len, lines)) <= 88
  names = [line.split(" = ")[0] for line in lines if " = " in line and line[0] != " "]
  core = [f.name for group in describe.groups() for f in group.fields]
  assert names[1:] == core  # The first line tells how to set a field.


def main(*flags: str, cwd):
  return running.python("-X", "importtime", "-m", "diloco.main", *flags, cwd=cwd)


def test_the_trainer_prints_its_config_and_ends(tmp_path):
  flags = ("--config=sample", "--print_config", "--config.replicas=4")
  ended = main(*flags, f"--workdir={tmp_path}/run", cwd=tmp_path)
  assert ended.returncode == 0
  assert "replicas = 4 (default 2)" in ended.stdout
  assert not list(tmp_path.iterdir())
  imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
  assert "jax" not in imported
  ended = main("--config=sample", cwd=tmp_path)
  assert ended.stderr.splitlines()[-1] == "error: --workdir must be given (see --help)"
