"""A finished run is extended: train.steps grows."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from conftest import first_of, rewind, update

from diloco import train
from diloco.checkpoint import resume
from diloco.config import add_plugins, changed, resolve
from diloco.errors import ConfigError
from diloco.interop.load import load
from diloco.log import metrics


def assert_same_models(a: pathlib.Path, b: pathlib.Path):
  jax.tree.map(np.testing.assert_array_equal, load(a).params, load(b).params)


@pytest.fixture
def short(tiny):
  """Eight steps; the cosine of the learning rate ends after them."""
  tiny.train.steps, tiny.inner.decay_steps, tiny.checkpoint.keep = 8, 8, 100
  return tiny


@pytest.mark.parametrize("algorithm", first_of("whole runs", "diloco", "data_parallel"))
def test_with_nothing_in_flight_extending_is_exact(short, tmp_path, algorithm, capsys):
  short.algorithm = algorithm
  first = train.train(short, tmp_path / "extended")
  short.train.steps = 14
  second = train.train(short, tmp_path / "extended")
  told = "Extends the run from 8 to 14 steps: the learning rate follows the same sched"
  assert told in capsys.readouterr().err
  whole = train.train(short, tmp_path / "whole")
  assert second["eval_loss"] == whole["eval_loss"] != first["eval_loss"]
  assert_same_models(tmp_path / "extended", tmp_path / "whole")
  steps = [r["step"] for r in metrics.read(tmp_path / "extended")]
  assert steps == list(range(1, 15))
  # The result of the shorter run is kept.
  kept = json.loads((tmp_path / "extended" / "summary_8.json").read_text())
  assert kept["eval_loss"] == first["eval_loss"]


@pytest.mark.integration("whole runs")
def test_an_extended_run_resumes_exactly_with_fragments_in_flight(short, tmp_path):
  # The fragments in flight at step 8 were received there; the schedule begins anew.
  short.overlap.tau = 2
  train.train(short, tmp_path / "a")
  short.train.steps, short.checkpoint.every = 16, 1
  train.train(short, tmp_path / "a")
  sends = [(r["step"], r["fragment"]) for r in metrics.read(tmp_path / "a", "send")]
  receives = metrics.read(tmp_path / "a", "receive")
  assert sends == sorted((4 + t, t % 4) for t in range(13))
  assert len(receives) == len(sends)
  # Nothing is in flight after step 9. From step 11 on, one fragment arrives and one
  # leaves at every step.
  for step in (9, 11):
    rewind(tmp_path / "a", tmp_path / "b", step)
    train.train(short, tmp_path / "b")
    assert_same_models(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b")


def check(tiny, step=8, **fields) -> str:
  old = resolve(tiny).to_dict()
  update(tiny, fields)
  return resume.check(old, resolve(tiny), step)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    *[("seed", 7), ("sync_every", 3), ("replicas", 1), ("algorithm", "diloco")],
    *[("outer.learning_rate", 0.7), ("outer.optimizer", "sgd")],
    *[("inner.learning_rate", 0.7), ("inner.clip_norm", 0.5), ("wire.format", "e2m1")],
    *[("wire.block_size", 32), ("overlap.tau", 2), ("overlap.alpha", 0.25)],
    *[("fragments.pattern", "sequential"), ("model.qk_norm", False)],
    *[("train.batch_size", 8), ("data.shuffle_window", 9), ("data.source", "files:/x")],
    ("sparta.share", 0.1),
  ],
)
def test_a_run_goes_on_with_no_other_value_of_a_field_that_counts(tiny, field, value):
  with pytest.raises(ConfigError, match=rf"{field}: .* -> "):
    check(tiny, **{field: value})


@pytest.mark.parametrize(
  ("field", "value"),
  [
    *[("log.every", 3), ("profile.steps", "2:3"), ("init.checkpoint", "/x")],
    *[("eval.tokens", 512), ("checkpoint.every", 3), ("outer.offload", True)],
    *[("model.attention", "xla"), ("model.remat", "full"), ("model.unroll", 0)],
    *[("model.loss_chunk", 8), ("train.accumulate", 2), ("overlap.transport", "host")],
    *[("data.data_dir", "/x"), ("data.num_threads", 4), ("diagnostics.every", 3)],
  ],
)
def test_a_run_goes_on_with_another_value_that_changes_no_result(tiny, field, value):
  assert check(tiny, **{field: value}) == ""


def test_what_a_run_is_made_with_may_change_and_is_named():
  read = {"data.source": "a", "the version of grain": "0.2.17", "the task x": "c"}
  reads = {"data.source": "b", "the version of grain": "0.2.18", "the task y": "d"}
  said = resume.mixture(read, reads, step=4)
  assert "changed at step 4 (the version of grain: 0.2.17 -> 0.2.18);" in said
  assert resume.mixture(read, {**read, "the task y": "d"}, step=4) == ""
  assert resume.mixture({}, reads, step=4) == ""  # A checkpoint of an older version.


def test_a_cosine_is_not_silently_stretched(tiny):
  tiny.train.steps, tiny.inner.warmup_steps = 8, 0
  message = (
    r"train.steps is 16, but the run's cosine ends at step 8; set inner.decay_steps=8"
    r" to keep .* or inner.decay_steps=16 to stretch it \(the rate jumps from 0.00015"
    r" to 0.00157 at step 9\)"
  )
  with pytest.raises(ConfigError, match=message):
    check(tiny, **{"train.steps": 16})


LONGER = {"train.steps": 16, "inner.decay_steps": 8}
CONSTANT = {"inner.final_fraction": 1.0}
SAME_RATE = "the learning rate follows the same schedule."
OTHER_DECAY = "the weight decay changes from 0.125 to 0.0625."


@pytest.mark.parametrize(
  ("before", "fields", "told"),
  [
    ({}, {"inner.decay_steps": 8}, SAME_RATE),
    ({}, {"inner.decay_steps": 16}, f"jumps from 0.00015 to 0.00157, {OTHER_DECAY}"),
    (CONSTANT, {}, f"the same schedule, {OTHER_DECAY}"),
    ({**CONSTANT, "inner.weight_decay": 0.1}, {}, SAME_RATE),
  ],
)
def test_an_extension_says_what_changes(tiny, before, fields, told):
  tiny.train.steps, tiny.inner.warmup_steps = 8, 0
  tiny.update_from_flattened_dict(before)
  said = check(tiny, **{"train.steps": 16}, **fields)
  assert said.startswith("Extends the run from 8 to 16 steps: ")
  assert said.endswith(told)


def test_a_plug_in_may_refuse_an_extension(tiny):
  tiny.train.steps = 8
  add_plugins(tiny, "elastic")
  tiny.elastic.pull = 0.1
  with pytest.raises(ConfigError, match=r"plug-ins \(elastic\) cannot extend it"):
    check(tiny, **LONGER)


@pytest.mark.parametrize("steps", [98, 11_000])
def test_a_weight_decay_follows_any_number_of_steps(tiny, steps):
  assert 1 / steps * steps != 1  # In floats.
  tiny.train.steps = steps
  said = check(tiny, **{"train.steps": 2 * steps, "inner.decay_steps": 2 * steps})
  assert "the weight decay changes" in said


@pytest.mark.parametrize(
  ("fields", "told"),
  [
    # Without the fields that follow.
    ({"train.steps": 7}, r"\(train.steps: 8 -> 7\);"),
    ({"train.steps": 16, "seed": 1}, "seed: 0 -> 1"),
    ({**LONGER, "inner.weight_decay": 0.3}, "inner.weight_decay: "),
    ({"inner.decay_steps": 6}, "inner.decay_steps: 0 -> 6"),
  ],
)
def test_other_changes_are_refused(tiny, fields, told):
  tiny.train.steps = 8
  with pytest.raises(ConfigError, match=f"made with another config .*{told}"):
    check(tiny, **fields)


@pytest.mark.integration("whole runs")
def test_a_changed_plugin_is_told_also_at_the_end(short, tmp_path, monkeypatch, capsys):
  plugin, workdir = tmp_path / "my_rate.py", tmp_path / "run"
  plugin.write_text("# One version.\n")
  monkeypatch.syspath_prepend(tmp_path)
  short.plugins, short.checkpoint.every = ("my_rate",), 2
  assert train.train(short, workdir)["mixtures"] == []

  def again_from(step, text):
    for later in range(step + 2, 9, 2):
      shutil.rmtree(workdir / "checkpoints" / str(later))
    (workdir / "summary.json").unlink()
    plugin.write_text(text)
    return train.train(short, workdir)["mixtures"]

  [said] = again_from(4, "# Another version.\n")
  assert "changed at step 4 (the plug-in my_rate: " in said
  found = capsys.readouterr()
  assert said in found.err
  assert f"mixture      {said}" in found.out
  # The checkpoint of step 6 knows of the change.
  assert again_from(6, "# Another version.\n") == [said]


@pytest.mark.parametrize(
  ("fields", "diverged", "allowed"),
  [
    ({"inner.learning_rate": 1e-3}, True, True),
    ({"inner.learning_rate": 1e-3, "outer.learning_rate": 0.1}, True, True),
    ({}, True, False),
    ({"inner.learning_rate": 1e-3}, False, None),
    ({"inner.learning_rate": 1.0}, True, None),
    ({"inner.learning_rate": 1e-3, "outer.learning_rate": 0.9}, True, None),
    ({"inner.learning_rate": 1e-3, "seed": 1}, True, None),
  ],
)
def test_only_a_diverged_run_goes_on_with_lower_rates(tiny, fields, diverged, allowed):
  c = resolve(tiny)
  now = changed(c, fields)
  if allowed is None:
    with pytest.raises(ConfigError, match="made with another config"):
      resume.check(c.to_dict(), now, 3, diverged=diverged)
  else:
    said = resume.check(c.to_dict(), now, 3, diverged=diverged)
    assert said.startswith("The run diverged; it goes on with inner") == allowed


def test_a_run_may_change_to_another_transport_and_back(tiny):
  here = resolve(tiny)
  host = changed(here, {"overlap.transport": "host"})
  for old, new in ((here, host), (host, here)):
    assert resume.check(old.to_dict(), new, step=4) == ""
  # A site's checkpoint has no payloads in flight: the group keeps them.
  sites = changed(here, {"overlap.transport": "sites"})
  for old, new in ((here, sites), (sites, here)):
    with pytest.raises(ConfigError, match=r"\(overlap\.transport: .* -> .*\); choose"):
      resume.check(old.to_dict(), new, step=4)
  with pytest.raises(ConfigError, match=r"sites\.count: 0 -> 1"):
    resume.check(sites.to_dict(), changed(sites, {"sites.count": 1}), step=4)


def test_a_former_field_is_told_by_its_new_form(tiny):
  saved = resolve(tiny).to_dict()
  saved["wire"] = saved["wire"] | {"error_feedback": 0.9}
  message = r"of step 4 whose config cannot be used .* wire\.error_feedback is 0\.9,"
  with pytest.raises(ConfigError, match=message):
    resume.check(saved, resolve(tiny), step=4)
