"""The journal alone repeats the outer steps of a group."""

import json

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
from diloco.util import files


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
    payloads = {k: payload(method.plan, state, entry, rng) for k in entry.payloads}
    journal.write(entry._replace(payloads=payloads))
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


def test_all_rounds_are_repeated(tmp_path, capsys):
  _, kept = make_group(tmp_path)
  assert replay.main([str(tmp_path)]) == 0
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


def test_a_round_that_differs_is_named(tmp_path, capsys):
  calendar, _ = make_group(tmp_path)
  path = tmp_path / "applied.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  lines[3]["digest"] ^= 1
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  assert replay.main([str(tmp_path)]) == 1
  step, p = calendar.rounds[3]
  said = f"Round 3 (step {step}, fragment {p}, sites 0, 2): the outer state after it"
  assert said in capsys.readouterr().out


def test_another_rate_scales_the_update(tmp_path, capsys):
  calendar, _ = make_group(tmp_path)
  twice = 2 * calendar.config.outer.learning_rate
  flag = f"--config.outer.learning_rate={twice}"
  assert replay.main([str(tmp_path), flag]) == 0
  head, *rows, _ = capsys.readouterr().out.splitlines()
  assert head.split() == ["round", "step", "fragment", "update", "other", "cosine"]
  own, other, cosine = np.array([row.split()[3:] for row in rows], float).T
  # Of two digits after the point; the sum of parameters and update is rounded.
  np.testing.assert_allclose(other, 2 * own, rtol=0.02)
  np.testing.assert_allclose(cosine, 1, atol=0.001)


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    ([], "which has no rounds in journal/"),
    (["--config.wire.format=fp32"], "is no flag of replay; give --config.outer.FIELD"),
  ],
)
def test_mistakes(tmp_path, capsys, flags, said):
  assert replay.main([str(tmp_path), *flags]) == 2
  assert said in capsys.readouterr().err


def test_another_optimizer_has_another_state(tmp_path, capsys):
  make_group(tmp_path)
  assert replay.main([str(tmp_path), "--config.outer.optimizer=adam"]) == 2
  assert "changes the state of the outer optimizer" in capsys.readouterr().err
