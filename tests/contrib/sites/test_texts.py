"""The texts of sites that are away: lent in blocks, given back, and counted."""

import collections
import functools
import json
import types

import numpy as np
import pytest
from conftest import tiny_config, update

from diloco.config import changed, resolve
from diloco.contrib.sites.calendar import Calendar, as_all
from diloco.contrib.sites.coordinator.lending import Lending
from diloco.contrib.sites.link import Block
from diloco.contrib.sites.texts import Texts
from diloco.data import TrainIterator

SITES, TAU, STEPS = 3, 1, 160


def make_calendar(**fields) -> Calendar:
  c = tiny_config()
  c.replicas, c.train.batch_size, c.train.steps = SITES, 4 * SITES, STEPS
  c.overlap.transport, c.sync_every, c.data.prefetch = "sites", 4, 0
  update(c, {"sites.grace_s": 1.0, **fields})
  return Calendar(resolve(c))


def open_text(c, site: int) -> types.SimpleNamespace:
  """Stands for the `Batches` of a site with one replica."""
  found = types.SimpleNamespace(data=TrainIterator(c, [site]))
  found.set_state = lambda state: found.data.set_state(state)
  return found


@functools.cache
def names(c) -> dict[bytes, tuple[int, int]]:
  """Returns {sequence: (site whose text has it, number)}; none occurs twice."""
  found, twice = {}, set()
  for site in range(SITES):
    text = TrainIterator(c, [site])
    rows = [row.tobytes() for _ in range(2 * STEPS) for row in next(text)[0]]
    text.close()
    twice |= {row for row, n in collections.Counter(rows).items() if n > 1}
    twice |= found.keys() & {*rows}
    found |= {row: (site, i) for i, row in enumerate(rows)}
  return {row: name for row, name in found.items() if row not in twice}


class Site:
  """Reads text as `site.Site` does; trains nothing."""

  def __init__(self, group: "Group", index: int, rows: int):
    self.group, self.index, self.rows, self.uncounted = group, index, rows, []
    c = group.calendar.config
    c = as_all(changed(c, {"sites.batch_size": rows}))
    self.batches = open_text(c, index)
    self.texts = Texts(c, [index], self.batches)
    self.next = len(group.closed)  # The next round to merge.
    position = group.position(index)
    if position and group.lending.skip[index]:
      self.texts.jump(position, group.lending.skip[index])
    elif position:
      self.batches.set_state({s: x for s, (_, x) in position.items()})

  def train(self) -> None:
    self.uncounted += [row.tobytes() for row in next(self.batches.data)[0]]

  def merge(self, until: int) -> None:
    while self.next < until:
      for site, block in self.group.closed[self.next].items():
        self.texts.drop(block.again)
        if block.reader == self.index:
          self.texts.lend(self.next, site, block)
        elif site == self.index and not block.again:
          self.texts.jump(block.positions, block.skip + block.size)
      self.next += 1


class Group:
  """A coordinator and its sites; every site is at the same step."""

  def __init__(self, calendar: Calendar, batches=(0, 0, 0)):
    self.calendar, self.lending = calendar, Lending(calendar, ())
    self.closed: list[dict[int, Block]] = []
    self.lines: list[dict] = []
    self.data: dict[str, list] = {}
    self.trained = collections.Counter[tuple[int, int]]()
    self.batches = batches
    self.sites = {k: Site(self, k, batches[k]) for k in range(SITES)}
    self.cut: dict[int, Site] = {}  # Sites that lost their connection.
    self.t = 0

  def position(self, site: int) -> dict:
    own = self.calendar.shards_of(site)
    return {s: self.data[s] for s in own if s in self.data}

  def step(self) -> None:
    self.t += 1
    for site in self.sites.values():
      site.train()
    due = [r for r, (t, _) in enumerate(self.calendar.rounds) if t == self.t]
    for number in due:
      self.close(number)
    for site in self.sites.values():
      rounds = self.calendar.rounds[: len(self.closed)]
      site.merge(sum(t + TAU <= self.t for t, _ in rounds))

  def close(self, number: int) -> None:
    per_step, finished = {}, []
    for k, site in self.sites.items():
      for row in site.uncounted:
        if row in names(self.calendar.config):
          self.trained[names(self.calendar.config)[row]] += 1
      site.uncounted = []
      rows = self.batches[k] or 4
      per_step[k] = rows * self.calendar.config.model.seq_len
      finished += site.texts.finished
      state = site.batches.data.get_state()
      self.data |= {s: [self.t, x] for s, x in state.items()}
    away = [k for k in range(SITES) if k not in self.sites]
    positions = {k: self.position(k) for k in away if self.position(k)}
    lent = self.lending.choose(number, per_step, away, positions)
    self.lending.closed(number, per_step, lent, finished)
    self.lines.append(
      {"round": number, "tokens": per_step, "lent": lent, "finished": finished}
    )
    self.closed.append(lent)

  def kill(self, k: int) -> None:
    self.sites.pop(k).batches.data.close()

  def start(self, k: int) -> None:
    self.lending.started_again(k)
    self.sites[k] = Site(self, k, self.batches[k])

  def disconnect(self, k: int) -> None:
    self.cut[k] = self.sites.pop(k)
    for _ in range(TAU):  # Then the site waits for a round.
      self.cut[k].train()

  def connect(self, k: int) -> None:
    site = self.cut.pop(k)
    site.uncounted = []  # It takes the parameters of the group.
    site.merge(len(self.closed))
    self.sites[k] = site

  def audit(self) -> tuple[int, int]:
    """Counts sequences: that are missing, and that count twice."""
    for name, block in self.lending.open.items():
      if reader := self.sites.get(block.reader):
        queue = [x[:2] for x in reader.texts._blocks]
        known = name in queue or list(name) in reader.texts.finished
        assert known or name[0] >= reader.next
    unread = collections.Counter(
      (name[1], i)
      for name, block in self.lending.open.items()
      for i in self.numbers(name[1], block)
    )
    ends = {}
    for k in range(SITES):
      own = open_text(self.calendar.config, k)
      own.set_state({s: x for s, (_, x) in self.position(k).items()})
      known = names(self.calendar.config)
      skip = self.lending.skip[k]
      rows = [row.tobytes() for _ in range(skip + 8) for row in next(own.data)[0]]
      rows = rows[skip:]
      numbers = [(known[row][1] - i) for i, row in enumerate(rows) if row in known]
      assert len({*numbers}) == 1
      ends[k] = numbers[0]
      own.data.close()
    wanted = {x for x in names(self.calendar.config).values() if x[1] < ends[x[0]]}
    assert sum(ends.values()) > 200
    assert self.trained.keys() <= wanted
    missing = wanted - self.trained.keys() - unread.keys()
    twice = [x for x, n in self.trained.items() if n > 1]
    assert max(self.trained.values()) <= 2
    return len(missing), len(twice)

  def numbers(self, k: int, block: Block) -> list[int]:
    own = open_text(self.calendar.config, k)
    own.set_state({s: x for s, (_, x) in block.positions.items()})
    known = names(self.calendar.config)
    count = block.skip + block.size
    rows = []
    while len(rows) < count:
      rows += [row.tobytes() for row in next(own.data)[0]]
    own.data.close()
    return [known[r][1] for r in rows[block.skip : count] if r in known]


@pytest.mark.parametrize(
  "window",
  [0, *(pytest.param(w, marks=pytest.mark.slow("more of the same")) for w in (-1, 5))],
)
def test_the_text_of_a_site_that_is_away_is_trained_once_by_the_others(window):
  group = Group(make_calendar(**{"data.shuffle_window": window}))
  for t in range(1, STEPS + 1):
    if t == 30:
      group.kill(2)
    if t == 90:
      group.start(2)
    group.step()
  blocks = [b for lent in group.closed for b in lent.values()]
  assert len(blocks) > 10
  assert {b.reader for b in blocks} == {0, 1}  # They take turns.
  assert group.audit() == (0, 0)


def test_left_alone_the_text_of_a_site_that_is_away_waits_for_it():
  group = Group(make_calendar(**{"sites.lend_after": 0}))
  for t in range(1, STEPS + 1):
    if t == 30:
      group.kill(2)
    if t == 90:
      group.start(2)
    group.step()
  assert not any(group.closed)
  assert group.audit() == (0, 0)


@pytest.mark.parametrize(("seed", "batches"), [(0, (0, 0, 0)), (2, (4, 4, 2))])
def test_in_a_storm_only_blocks_of_dead_readers_are_read_twice(seed, batches):
  """Kills, restarts and cuts; the coordinator starts again now and then."""
  group, rng = Group(make_calendar(), batches), np.random.default_rng(seed)
  away: dict[int, int] = {}
  for t in range(1, STEPS + 1):
    for k in [k for k, until in away.items() if until == t]:
      del away[k]
      group.connect(k) if k in group.cut else group.start(k)
    k = int(rng.integers(SITES))
    if rng.random() < 0.1 and k in group.sites and len(group.sites) > 1 and t > 8:
      (group.kill if rng.random() < 0.5 else group.disconnect)(k)
      away[k] = t + int(rng.integers(2, 40))
    if rng.random() < 0.05:
      skip = group.lending.skip
      opened = group.lending.open
      group.lending = Lending(group.calendar, json.loads(json.dumps(group.lines)))
      assert group.lending.skip == skip
      assert group.lending.open.keys() == opened.keys()
      group.lending.open = opened  # Also who has started again since.
    group.step()
  for k in sorted(away):
    group.connect(k) if k in group.cut else group.start(k)
  relent = sum(b.size for lent in group.closed for b in lent.values() if b.again)
  missing, twice = group.audit()
  assert missing == 0
  assert twice <= relent
