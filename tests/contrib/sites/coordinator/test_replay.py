"""The journal alone repeats the outer steps of a group."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sites import make_calendar
from test_group import entry_of

from diloco.config import changed
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.coordinator import replay
from diloco.contrib.sites.coordinator.group import OuterGroup, first_state
from diloco.contrib.sites.coordinator.journal import Journal
from diloco.contrib.sites.coordinator.rounds import Measured
from diloco.util import files

# The rounds in which the payload of site 2, and all payloads, were refused.
ONE_REFUSED, ALL_REFUSED = 2, 5


def make_group(folder, every=0, keep=2):
  """Leaves the folder of a coordinator that has applied all rounds but the last."""
  calendar = make_calendar(3, steps=30)
  fields = {"checkpoint.every": every, "checkpoint.keep": keep}
  calendar = Calendar(changed(calendar.config, fields))
  journal = Journal(folder)
  files.write_json(folder / "config.json", calendar.config.to_dict())
  group = OuterGroup(calendar, folder, journal)
  method, _ = first_state(calendar, folder)
  with jax.set_mesh(method.mesh):
    state = method.init()
  for number in range(len(calendar.rounds) - 1):
    rng, entry = np.random.default_rng(number), entry_of(calendar, number)
    bad = {ONE_REFUSED: (2,), ALL_REFUSED: (0, 2)}.get(number, ())
    good = [k for k in entry.payloads if k not in bad]
    payloads = {k: payload(method.plan, state, entry, rng) for k in good}
    counted = {"payloads": payloads, "tokens": {k: entry.tokens[k] for k in good}}
    measured = {k: Measured(None if k in bad else 1.0) for k in entry.payloads}
    journal.write(entry._replace(**counted, measured=measured))
    group.apply(journal.read(number))
  group.close()
  return calendar, journal.rounds


def payload(plan, state, entry, rng) -> bytes:
  """What a site sends whose parameters lie near the first ones."""
  p = entry.fragment
  moved = lambda x: x + rng.normal(0, 0.01, x.shape).astype(x.dtype)
  params_M = jax.tree.map(moved, state.params)
  codec_state = jax.tree.map(jnp.copy, state.outer.codec_state[p])
  with jax.set_mesh(jax.tree.leaves(state.params)[0].sharding.mesh):
    codes, _, _ = plan.send(
      entry.step, p, params_M, state.outer.theta[p], codec_state, 0
    )
  return np.asarray(plan.transport.carry(codes).addressable_data(0)).tobytes()


@pytest.fixture(scope="module")
def group(tmp_path_factory):
  """The folder of a coordinator, its calendar, and the rounds that are kept."""
  folder = tmp_path_factory.mktemp("group")
  return folder, *make_group(folder)


def table(group, capsys, *flags):
  """Replays with flags; returns the columns update, other and cosine."""
  assert replay.main([str(group[0]), *flags]) == 0
  head, *rows, _ = capsys.readouterr().out.splitlines()
  assert head.split() == ["round", "step", "fragment", "update", "other", "cosine"]
  assert len(rows) == len(group[2])
  found = np.array([row.split()[3:] for row in rows], float)
  assert found[ALL_REFUSED].tolist() == [0, 0, 0]  # It changes nothing.
  return np.delete(found, ALL_REFUSED, axis=0).T


def test_all_rounds_are_repeated(group, capsys):
  folder, _, kept = group
  assert replay.main([str(folder)]) == 0
  count = len(kept)
  assert (
    f"Rounds 0 to {count - 1} repeated: {count} compared" in capsys.readouterr().out
  )


def test_it_begins_at_the_oldest_checkpoint_and_compares_the_newer(tmp_path, capsys):
  calendar, kept = make_group(tmp_path, every=10)
  assert kept[0] > 0
  assert replay.main([str(tmp_path)]) == 0
  begin = calendar.first_after(10)
  assert f"Rounds {begin} to" in (out := capsys.readouterr().out)
  assert "1 checkpoints compared; no bit differs." in out


def test_a_round_that_differs_is_named(group, tmp_path, capsys):
  calendar = group[1]
  shutil.copytree(group[0], tmp_path, dirs_exist_ok=True)
  path = tmp_path / "applied.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  lines[3]["digest"] ^= 1
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  assert replay.main([str(tmp_path)]) == 1
  step, p = calendar.rounds[3]
  said = f"Round 3 (step {step}, fragment {p}, sites 0, 2): the outer state after it"
  assert said in capsys.readouterr().out


def test_another_rate_scales_the_update(group, capsys):
  twice = 2 * group[1].config.outer.learning_rate
  own, other, cosine = table(group, capsys, f"--config.outer.learning_rate={twice}")
  # Of two digits after the point; the sum of parameters and update is rounded.
  np.testing.assert_allclose(other, 2 * own, rtol=0.02)
  np.testing.assert_allclose(cosine, 1, atol=0.001)


def test_a_format_that_loses_nothing_gives_the_same_update(group, capsys):
  assert group[1].config.wire.format == "e3m0"
  own, other, cosine = table(group, capsys, "--config.wire.format=fp32")
  np.testing.assert_array_equal(other, own)
  assert (cosine == 1).all()


def test_a_coarser_format_turns_the_update(group, capsys):
  flags = "--config.wire.format=e1m0", "--config.wire.block_size=0"
  *_, cosine = table(group, capsys, *flags)
  assert (cosine < 0.99).all()
  assert (cosine > 0.3).all()


def test_the_weights_of_the_tokens_give_the_same_update(group, capsys):
  # Sites 0 and 2 have sent, with 10 and 20 tokens. An absent site changes nothing, and
  # a missing weight is 1.
  own, other, cosine = table(group, capsys, "--weights=2:2,1:7")
  np.testing.assert_array_equal(other, own)
  assert (cosine == 1).all()
  # In round 0 there is no momentum yet: (u0 + 2 u2) / 3 is the update.
  _, u0, cosine0 = table(group, capsys, "--weights=2:0")
  _, u2, cosine2 = table(group, capsys, "--weights=0:0,2:5")
  mean = (u0 * cosine0 + 2 * u2 * cosine2) / 3
  assert mean[0] == pytest.approx(own[0], rel=0.01)
  *_, cosine = table(group, capsys, "--weights=equal")
  assert (np.delete(cosine, ONE_REFUSED) < 1).all()


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    ([], "which has no rounds in journal/"),
    (["--config.data.seed=3"], "is no flag of replay; give --config.outer.FIELD"),
    (["--weights=0:x"], "argument --weights: '0:x'; give equal or SITE:WEIGHT"),
  ],
)
def test_mistakes(tmp_path, capsys, flags, said):
  try:
    status = replay.main([str(tmp_path), *flags])
  except SystemExit as end:  # The parser ends the process.
    status = end.code
  assert status == 2
  assert said in capsys.readouterr().err


def test_another_optimizer_has_another_state(group, capsys):
  assert replay.main([str(group[0]), "--config.outer.optimizer=adam"]) == 2
  assert "changes the state of the outer optimizer" in capsys.readouterr().err
