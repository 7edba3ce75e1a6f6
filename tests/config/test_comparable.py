"""Contents decide whether losses can be compared; where they are unknown, paths do."""

import pytest

from diloco.config.comparable import CONTENT, HELD_OUT, basis, differing, model_fields

DIGESTS = {"data.tokenizer": "t1", "data.source": "s1", HELD_OUT: "h1", "jax": "0.9"}


def make(contents=None, **fields):
  config = {
    "data": {"tokenizer": "a.model", "source": "files:/a", "eval_source": ""},
    "eval": {"tokens": 5},
    "model": {"name": "mine", "dim": 8, "remat": "dots"},
    "mine": {"heads": 2},
  }
  for field, value in fields.items():
    group, _, name = field.partition("__")
    config[group][name] = value
  return basis(config, {} if contents is None else DIGESTS | contents)


@pytest.mark.parametrize(
  ("ours", "theirs", "found"),
  [
    (make(), make(), {}),
    (make(), make({}), {}),
    (make(), make(eval__tokens=6), {"eval.tokens": (5, 6)}),
    # It is the held-out text of both.
    (make(), make(data__eval_source="files:/a"), {}),
    (
      make(),
      make(data__source="files:/b"),
      {f"data.{name}": ("files:/a", "files:/b") for name in ("source", "eval_source")},
    ),
    # All of it has moved, or more tokens were asked for than there are.
    (make({}), make({}, data__source="/b", data__tokenizer="b", eval__tokens=9), {}),
    # The held-out text is the same; of the training text, only the beginning changed.
    (make({}), make({"data.source": "s2"}), {f"{CONTENT}data.source": ("s1", "s2")}),
    (make({}), make({HELD_OUT: "h2"}), {f"{CONTENT}data.eval_source": ("h1", "h2")}),
    (
      make({}),
      make({HELD_OUT: "h2", "data.tokenizer": "t2"}, data__tokenizer="b.model"),
      {"data.tokenizer": ("a.model", "b.model")},
    ),
    (make({}), make({HELD_OUT: "h2"}, eval__tokens=6), {"eval.tokens": (5, 6)}),
    (make({}), make({HELD_OUT: "h2"}, data__add_bos=1), {"data.add_bos": (None, 1)}),
    (make({"jax": "0.8"}), make({}), {}),
  ],
)
def test_what_differs_is_named(ours, theirs, found):
  assert differing(ours, theirs) == found


def test_models_may_differ_in_speed_only():
  ours = make({})
  for field, x in (("model__dim", 16), ("mine__heads", 4), ("model__remat", "none")):
    theirs = make({}, **{field: x})
    found = differing(ours, theirs, *model_fields(ours))
    assert [*found] == [field.replace("__", ".")] * (field != "model__remat")
    assert differing(ours, theirs) == {}
