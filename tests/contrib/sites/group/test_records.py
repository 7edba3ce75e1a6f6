"""What sites write: whole or not there, and never believed without a check."""

import math

import pytest
import wreck
from sites import fields_of, make_calendar

from diloco.contrib.sites.group.records import as_record, check_payload, pack, unpack

CALENDAR = make_calendar(2)
BODY = memoryview(bytes(CALENDAR.payload_bytes(0)))
GOOD = fields_of(CALENDAR, 1, 0)
PLACE = GOOD["data"]["1"]
LENGTH = CALENDAR.config.model.seq_len
STEP = CALENDAR.rounds[0][0]


def test_any_part_of_a_file_counts_as_no_file_and_every_damage_is_found(tmp_path):
  path, data = tmp_path / "own", pack({"a": [1]}, b"ab\n", bytes(range(256)))
  head, body = unpack(data)
  assert (head, bytes(body)) == ({"a": [1]}, b"ab\n" + bytes(range(256)))
  assert all(unpack(data[:end]) is None for end in range(len(data)))
  for name, harm in wreck.all_of(tmp_path, flips=100):
    path.write_bytes(data)
    harm(tmp_path)
    print(name)
    assert not path.exists() or unpack(path.read_bytes()) is None


def test_a_payload_is_what_its_site_can_have_trained():
  found = check_payload(CALENDAR, 0, 1, GOOD, BODY)
  assert found == (GOOD["tokens"], GOOD["per_step"], GOOD["data"], bytes(BODY))
  # The most: the whole batch of the group in each step since the start.
  most = CALENDAR.config.tokens_per_step
  check_payload(CALENDAR, 0, 1, GOOD | {"per_step": most, "tokens": most * STEP}, BODY)
  with pytest.raises(ValueError, match=f"has {len(BODY) - 1} bytes, not {len(BODY)}"):
    check_payload(CALENDAR, 0, 1, GOOD, BODY[1:])


@pytest.mark.parametrize(
  ("fields", "said"),
  [
    ({"tokens": 2**62}, "has 4611686018427387904 tokens, not those of 1 to"),
    ({"tokens": (STEP + 1) * GOOD["per_step"]}, "not those of 1 to"),
    ({"tokens": GOOD["per_step"] + LENGTH}, "not those of 1 to"),
    ({"tokens": 0}, "has 0 tokens"),
    ({"tokens": True}, "has True tokens"),
    ({"tokens": math.nan}, "has nan tokens"),
    ({"per_step": 2**62, "tokens": 2**62}, "tokens per step, not those of 1 to 4 seq"),
    ({"per_step": LENGTH - 1}, "tokens per step"),
    ({"per_step": "8"}, "has 8 tokens per step"),
    ({"data": {}}, "no positions of exactly the shards 1"),
    ({"data": 5}, "no positions"),
    ({"data": {"0": PLACE, "1": PLACE}}, "no positions of exactly"),
    ({"data": {"1": 5}}, "a position in the text that is none: 5"),
    ({"data": {"1": [STEP + 1, PLACE[1]]}}, "a position in the text"),
    ({"data": {"1": [STEP, {"documents": 9}]}}, "a position in the text"),
  ],
)
def test_what_no_site_can_have_trained_is_refused(fields, said):
  with pytest.raises(ValueError, match=said):
    check_payload(CALENDAR, 0, 1, GOOD | fields, BODY)


# {field of a record: a value that makes sense, and others}
RECORD = {
  "session": ("x", 5),
  "beat": (1, "1"),
  "ready": (0, 10**9, -1),
  "sent": ([1], "all", [1, "2"]),
  "digests": ({"3": [7]}, {"x": [7]}, {"3": 7}),
  "reason": ("", None),
}


@pytest.mark.parametrize("name", RECORD)
def test_a_record_that_makes_no_sense_is_none(name):
  good = {field: values[0] for field, values in RECORD.items()}
  assert as_record(good, CALENDAR) == good
  assert as_record(good | {"ready": None}, CALENDAR)
  for bad in RECORD[name][1:]:
    assert as_record(good | {name: bad}, CALENDAR) is None
  del good[name]
  assert as_record(good, CALENDAR) is None or name == "ready"
