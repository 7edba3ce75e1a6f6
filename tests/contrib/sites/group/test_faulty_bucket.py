"""Sites that share a bucket, whose requests are lost, come twice and come late."""

import random
import time
import types

import pytest
from sites import Player, make_calendar, play

from diloco.util.storage import open_storage


@pytest.mark.integration("an S3 server")
def test_sites_in_a_bucket_with_bad_manners_agree_bit_for_bit(s3, monkeypatch):
  pytest.importorskip("obstore")
  calendar = make_calendar(grace_s=1.0, least_grace_s=1.0, lost_s=4.0)
  rng = random.Random(5)
  draw = lambda: rng.choice([*[""] * 6, "lost before", "lost after", "twice", "late"])
  players = list[Player]()
  for site in range(3):
    storage = open_storage("s3://bucket/group", "--group")
    monkeypatch.setattr(storage, "poll_s", 0.1)
    players.append(Player(calendar, storage, site).join())
  storage.put("sites/7", b"garbage")
  storage.put("journal/notes", b"mine")
  late = types.SimpleNamespace(wait=lambda _: time.sleep(1))
  monkeypatch.setattr(s3, "goes_on", late)
  s3.faults[:] = [draw() for _ in range(10_000)]
  play(players, range(4))
  first = next(p for p in players if p.holds)
  players[0].send(4, tokens=2**62)
  first.link.kill()
  rest = [p for p in players if p is not first]
  play(rest, range(4, 8))
  assert len({tuple(p.numbers) for p in rest}) == 1
  s3.faults.clear()
  for player in rest:
    player.leave()
