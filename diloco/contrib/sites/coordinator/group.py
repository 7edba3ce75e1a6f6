"""The outer state of the coordinator: applied rounds, checkpoints, snapshots."""

import pathlib
from typing import Any

import jax

from diloco.algorithm.method import Method, make_method
from diloco.algorithm.state import OuterState, TrainState, init_outer
from diloco.checkpoint import checkpoints, damage, resume
from diloco.checkpoint.record import Record, steps_of
from diloco.config import changed
from diloco.contrib.sites import outer_state
from diloco.contrib.sites.calendar import Calendar, config_of
from diloco.contrib.sites.coordinator.journal import Entry, Journal
from diloco.contrib.sites.link import Closed
from diloco.errors import ConfigError
from diloco.interop.init import first_params
from diloco.mesh.devices import make_mesh
from diloco.model import registry
from diloco.spec.schedule import reaches
from diloco.util.types import PyTree

_KEPT = 64  # Rounds whose digests are kept, for sites that come back.


def make(calendar: Calendar) -> Method:
  """Makes the method on the first CPU."""
  c = changed(calendar.config, {"mesh.replica": 1, "mesh.fsdp": 1})
  return make_method(config_of(c, 0), make_mesh(c, jax.devices("cpu")[:1]))


def first_state(calendar: Calendar, workdir: pathlib.Path) -> tuple[Method, OuterState]:
  """Makes the method, and the outer state before round 0 on the first CPU."""
  method = make(calendar)
  c, mesh = calendar.config, method.mesh
  with jax.set_mesh(mesh):
    # A coordinator that goes on from a checkpoint does not read init.checkpoint.
    params = None if steps_of(workdir) else first_params(c, mesh)
    if params is None:
      init = jax.jit(lambda key: registry.get(c.model).init(c.model, key))
      params = init(jax.random.key(c.seed))
    params_M = jax.tree.map(lambda x: x[None], params)
    first = init_outer(method.plan, params_M)
  # The coordinator sends nothing, so it has no compressor state.
  return method, OuterState(first.theta, first.opt_state, (), {})


def saved_state(
  calendar: Calendar, workdir: pathlib.Path, steps: list[int], first: OuterState
) -> tuple[damage.Stored, OuterState]:
  """Reads the newest whole checkpoint of some steps.

  Raises:
    ConfigError: none is whole, or it was made with another config.
  """
  own = TrainState({}, {}, first)

  def like(step: int, record: Record) -> PyTree:
    resume.check(record.config, calendar.config, step)
    return checkpoints.tree_of(own)

  found = damage.read_newest(workdir, steps, like, "choose another --workdir")
  return found, checkpoints.state_of(found.arrays, own).outer


def round_of(
  workdir: pathlib.Path, calendar: Calendar, entry: Entry, applied: int
) -> Closed:
  """Returns the round that follows `applied` rounds.

  Raises:
    ConfigError: it does not follow, or is of another schedule.
  """
  if entry.round != applied:
    raise ConfigError(
      f"{workdir} has round {entry.round} in its journal, but lacks round {applied};"
      f" restore journal/{applied:09d}.round from a copy."
    )
  p = entry.fragment
  if calendar.rounds[entry.round : entry.round + 1] != ((entry.step, p),):
    raise ConfigError(
      f"{workdir} has round {entry.round} of another schedule in its journal"
      f" (fragment {p} after step {entry.step}); choose another --workdir."
    )
  return Closed(entry.round, p, entry.tokens, entry.payloads, per_step=entry.per_step)


class OuterGroup:
  """The outer state of the coordinator, on this process's first CPU.

  Attributes:
    applied: rounds below this number are in the outer state.
    data: {shard: [step, position in its text]} of these rounds.
  """

  def __init__(self, calendar: Calendar, workdir: pathlib.Path, journal: Journal):
    """Goes on from the newest checkpoint and the journal, or starts at step 0.

    Raises:
      ConfigError: the checkpoint was made with another config, no checkpoint can be
        read, or the journal is damaged or lacks a round after the checkpoint.
    """
    self._calendar, self._workdir, self._journal = calendar, workdir, journal
    method, self._outer = first_state(calendar, workdir)
    self._plan = method.plan
    self.applied, self.data = 0, dict[str, Any]()
    self._checkpoints = checkpoints.Checkpoints(workdir, calendar.config, method)
    self._restore()
    self._digests = {self.applied: outer_state.digests(self._outer)}
    for number in [r for r in journal.rounds if r >= self.applied]:
      self.apply(journal.read(number))

  def apply(self, entry: Entry) -> None:
    """Applies a closed round, and saves a checkpoint if one is due.

    Raises:
      ConfigError: this is not the next round, or it is of another schedule.
    """
    closed = round_of(self._workdir, self._calendar, entry, self.applied)
    p = closed.fragment
    state = (self._outer.theta[p], self._outer.opt_state[p])
    theta, opt_state, _ = outer_state.apply(self._plan, self._calendar, closed, *state)
    self._outer = self._outer.after_update(p, theta, opt_state)
    self.applied += 1
    self.data |= entry.data
    latest = list(self._digests[self.applied - 1])
    latest[p] = outer_state.digest(theta, opt_state)
    self._journal.applied(entry.round, latest[p])
    self._digests[self.applied] = latest
    self._digests.pop(self.applied - _KEPT, None)
    if self._is_due(entry.step):
      self.save(entry.step)

  def snapshot(self) -> tuple[int, bytes]:
    """Returns the number of applied rounds, and the outer state as bytes."""
    return self.applied, outer_state.to_bytes(self._outer)

  def agrees(self, applied: int, digests: list[int]) -> bool:
    """Returns whether a site's outer state after `applied` rounds is the group's."""
    return self._digests.get(applied) == digests

  def save(self, step: int, finished: bool = False) -> None:
    """Saves the outer state; deletes payloads that no checkpoint needs any more."""
    config = self._calendar.config.to_dict()
    record = Record(config, self.data, finished=finished)
    self._checkpoints.save(step, TrainState({}, {}, self._outer), record)
    self._checkpoints.wait()
    oldest = min(steps_of(self._workdir))
    self._journal.forget(before=self._calendar.first_after(oldest))

  def finish(self) -> None:
    """Saves the outer state after the last round."""
    if self._checkpoints.latest != self._calendar.config.train.steps:
      self.save(self._calendar.config.train.steps, finished=True)

  def close(self) -> None:
    self._checkpoints.close()

  def _restore(self) -> None:
    steps = steps_of(self._workdir)
    if not steps:
      return
    args = (self._calendar, self._workdir, steps, self._outer)
    found, self._outer = saved_state(*args)
    self.applied = self._calendar.first_after(found.step)
    if found.record.finished and found.step == self._calendar.config.train.steps:
      self.applied = len(self._calendar.rounds)  # With the final sync.
    self.data = dict(found.record.data)

  def _is_due(self, step: int) -> bool:
    """Returns whether a checkpoint is due after the round that was just applied."""
    c, rounds = self._calendar.config, self._calendar.rounds
    if self.applied == len(rounds) or rounds[self.applied][0] == step:
      return False  # A checkpoint holds all rounds of its step, or none.
    if step == c.train.steps:
      return False  # `finish` saves this step with the final sync, which comes later.
    return reaches((self._checkpoints.latest or 0) + 1, step, c.checkpoint.every)
