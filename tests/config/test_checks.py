"""Every field of every plug-in refuses every wrong type in one sentence."""

import fractions
import re

import numpy as np
import pytest
from ml_collections import config_dict
from test_config import make

from diloco.config import command_line, default_config, resolve
from diloco.config.resolve import leaves
from diloco.errors import ConfigError
from diloco.spec import plugins

ALL = default_config(*plugins.contrib()).to_dict()
FIELDS = {f: x for f, x in leaves(ALL).items() if f != "plugins"}
# What is the wrong type for each field but those of these types.
VALUES = [
  (None, ()),
  ("a text", (str,)),
  ("\udcff", ()),  # A byte of a command line that is no UTF-8.
  (True, (bool, float)),  # ConfigDict makes True the number 1.0.
  (3, (int, float)),
  (3.5, (float,)),
  (float("nan"), ()),
  (float("inf"), ()),
  ([], (tuple,)),
  ([1, "a"], ()),
  ({}, ()),
  (np.arange(3), ()),
]


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_refuses_other_types_in_one_sentence(field):
  c = make(**{"plugins": plugins.contrib(), field: FIELDS[field]})
  group, _, name = field.rpartition(".")
  for value, fits in VALUES:
    if not isinstance(FIELDS[field], fits):
      (c[group] if group else c)[name] = value
      with pytest.raises(ConfigError) as error:
        resolve(c)
      start = f"{re.escape(field)} is .*; (give|choose|it must be) .*"
      assert re.fullmatch(f"{start}[^.]\\.", str(error.value), re.DOTALL), error.value


HAS_FIELDS, NAMES = "but it has fields; set mo", r"give names or paths, as \("
WITHOUT = config_dict.required_placeholder(int)


@pytest.mark.parametrize(
  ("field", "value", "said"),
  [
    *(("model", value, HAS_FIELDS) for value in (None, "decoder", [])),
    *(("plugins", value, NAMES) for value in (None, 3, "sparta", ["a", 3], [[]])),
    ("seed", WITHOUT, "give a whole number"),
  ],
)
def test_what_stands_for_no_field_is_refused(field, value, said):
  c = make()
  c[field] = value
  with pytest.raises(ConfigError, match=rf"^{field} is .*[,;] {said}"):
    resolve(c)


@pytest.mark.parametrize(
  "value", [5e2, np.float32(500), np.int64(500), fractions.Fraction(500)]
)
def test_a_whole_number_may_be_written_in_other_ways(value):
  c = make(**{"train.steps": value, "inner.clip_norm": 1, "overlap.taus": (1.0, 2)})
  resolved = resolve(c)
  same = {"train.steps": 500, "inner.clip_norm": 1.0, "overlap.taus": (1, 2)}
  assert resolved == resolve(make(**same))
  assert type(resolved.train.steps) is int
  assert type(resolved.inner.clip_norm) is float


@pytest.mark.parametrize(
  ("text", "number"),
  [("5e8", 500_000_000), ("1.5e3", 1500), ("7", 7), ("0x10", 16), ("5e-1", None)]
  + [(text, None) for text in ("", "None", "nan", "1e400", "[1]", "1.5", "abc")],
)
def test_a_flag_takes_a_whole_number_with_an_exponent(text, number):
  given = [f"--config.seed={text}"]
  if number is None:
    with pytest.raises(ConfigError, match=f"seed={re.escape(text)}: give an integer"):
      command_line.load_config("sample", given)
  else:
    assert command_line.load_config("sample", given).seed == number


@pytest.mark.parametrize("value", ["None", "'a'", "HOLDER(int)", "NEEDED(int)"])
def test_a_flag_takes_the_place_of_a_value_that_cannot_work(value, tmp_path):
  path = tmp_path / "c.py"
  path.write_text(
    "from ml_collections.config_dict import placeholder as HOLDER\n"
    "from ml_collections.config_dict import required_placeholder as NEEDED\n"
    "from diloco.config import default_config\n"
    "def get_config():\n"
    "  c = default_config()\n"
    f"  c.train.steps = {value}\n"
    "  c.log.every = c.eval.get_ref('batch_size')\n"
    "  return c\n"
  )
  given = ["--config.train.steps=200", "--config.eval.batch_size=8"]
  c = command_line.load_config(str(path), given)
  assert (c.train.steps, c.log.every) == (200, 8)  # The reference follows the flag.
  with pytest.raises(ConfigError, match=r"steps is (None in .*c.py; give|'a'; give a)"):
    command_line.load_config(str(path))
