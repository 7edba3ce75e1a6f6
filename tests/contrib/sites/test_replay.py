"""The files of a group alone repeat its outer steps."""

import json
import shutil

import jax
import numpy as np
import pytest
from running import refused, shown
from sites import Brisk, closed_round, make_calendar

from diloco.contrib.sites import measure, outer_state, replay
from diloco.contrib.sites.group.journal import Journal, head_of, path_of, state_of
from diloco.contrib.sites.group.records import pack, record_of

CALENDAR = make_calendar(3, steps=20)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """A folder with the files of a group: 6 rounds, snapshots after 2 and 4."""
  folder = tmp_path_factory.mktemp("group")
  storage = Brisk(folder)
  storage.put("config.json", json.dumps(CALENDAR.config.to_dict()).encode())
  journal, method = Journal(storage), measure.method_on_cpu(CALENDAR)
  with jax.set_mesh(method.sync.mesh):
    state = method.init().outer
  for number in range(6):
    if number in (2, 4):
      digests = outer_state.digests(state)
      head = journal.head(digests, number - 2, number)
      storage.put(head_of(number), pack(head))
      storage.put(state_of(number), pack({}, outer_state.to_bytes(state)))
    # Random codes and scales, which are all finite.
    rng, size = np.random.default_rng(number), CALENDAR.payload_bytes(number)
    codes = {site: rng.integers(0, 120, size, np.uint8).tobytes() for site in (0, 2)}
    closed = closed_round(CALENDAR, number, codes)
    assert journal.write(closed)
    p = closed.fragment
    theta, opt_state, _ = outer_state.apply(
      method.sync, CALENDAR, closed, state.theta[p], state.opt_state[p]
    )
    state = state.after_update(p, theta, opt_state)
  record = {"session": "x", "beat": 1, "ready": 0, "sent": [], "reason": ""}
  record["digests"] = {"6": outer_state.digests(state)}
  storage.put(record_of(1), pack(record))
  storage.put("lease", pack({"snapshot": 4}))
  for number in (0, 1):
    storage.delete(f"journal/{number:09d}.round")
  return folder


@pytest.fixture
def group(files, tmp_path):
  shutil.copytree(files, tmp_path, dirs_exist_ok=True)
  return Brisk(tmp_path)


def test_all_kept_rounds_are_repeated(group, tmp_path):
  before = {*tmp_path.rglob("*")}
  said = "Rounds 2 to 5 of 17 repeated, 3 notes of the outer state compared; no bit"
  assert said in shown(replay.main, tmp_path)
  assert {*tmp_path.rglob("*")} == before  # Also a copy without rights to write.


def test_an_unfinished_round_and_an_older_snapshot_are_no_damage(group, tmp_path):
  group.put("journal/000000006.round.5c0ffee.tmp", b"half")
  group.put("snapshots/copy.state", b"no state of a round")
  for number in (2, 3):  # A site deleted them after snapshots/ was copied.
    group.delete(path_of(number))
  assert "Rounds 4 to 5 of 17 repeated, 2 notes" in shown(replay.main, tmp_path)


def test_other_bits_are_named(group, tmp_path, capsys):
  data = bytearray(group.get("journal/000000004.round"))
  head, body = data[: data.index(b"\n")], data[data.index(b"\n") + 1 : -4]
  other = bytes(x ^ 1 for x in body)  # As if other payloads had counted.
  group.put("journal/000000004.round", pack(json.loads(bytes(head)), other))
  assert replay.main([str(tmp_path)]) == 1
  said = "After 6 rounds, site 1 has other bits than the rounds give."
  assert said in capsys.readouterr().out


def _without_journal(group):
  for number in range(2, 6):
    group.delete(path_of(number))


@pytest.mark.parametrize(
  ("harm", "said"),
  [
    (lambda group: group.delete("config.json"), "which has no config.json"),
    (lambda group: group.delete("lease"), "lease is missing or damaged"),
    (lambda group: group.put(state_of(4), b"half"), f"{state_of(4)} is missing or"),
    (lambda group: group.put(head_of(4), b"half"), f"{head_of(4)} is missing or"),
    (lambda group: group.put(state_of(2), b"half"), f"{state_of(2)} is missing or"),
    (lambda group: group.delete(path_of(2)), f"{path_of(2)} is missing or damaged"),
    (lambda group: group.put(path_of(5), b"half"), f"{path_of(5)} is missing or"),
    (_without_journal, f"{path_of(2)} is missing or damaged"),
  ],
)
def test_mistakes(group, tmp_path, harm, said):
  harm(group)
  assert said in refused(replay.main, tmp_path)
