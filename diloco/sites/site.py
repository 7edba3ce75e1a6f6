"""A site's part of Algorithm 2: sends its payloads, merges the rounds of the group.

A site runs its inner steps by its own clock. After step t it sends its payload of the
round that is due, and after step t + tau it merges that round as the coordinator closed
it. A site that finds rounds closed beyond its own step was late: it merges them all,
takes the group's step count, and goes on from there.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco.algorithm.metrics import Metrics
from diloco.algorithm.optimizers import at_step
from diloco.algorithm.plan import Plan
from diloco.algorithm.state import Event, OuterState, TrainState
from diloco.config import Config
from diloco.data.batches import Batches
from diloco.mesh.sharding import FSDP
from diloco.processes.peers import Peers, say
from diloco.sites import outer_state, security
from diloco.sites.calendar import Calendar, config_of
from diloco.sites.link import Closed, Link, Welcome
from diloco.sites.shared_link import SharedLink
from diloco.util.types import PyTree

# A closed round, and what its outer step returned.
Updated = tuple[Closed, tuple[PyTree, PyTree, Metrics]]


@dataclasses.dataclass
class Account:
  """What happened to a site, for its summary.

  Attributes:
    rounds: rounds that this site merged.
    contributed: rounds in which its payload counted.
    lost: its payloads that came too late.
    skipped_steps: steps of the group that this site did not train.
  """

  rounds: int = 0
  contributed: int = 0
  lost: int = 0
  skipped_steps: int = 0


class Site:
  """One site of a run.

  Attributes:
    index: its number.
    config: of the whole run.
    first_replica: number of its first replica.
  """

  def __init__(self, config: Config, index: int, link: Link | SharedLink, peers: Peers):
    """Prepares a site, which joins by `enter`.

    Args:
      config: of the whole run.
      index: number of the site.
      link: the connection to the coordinator.
      peers: the processes of this site.
    """
    self.config, self.index, self._account = config, index, Account()
    self._calendar, self._link, self._peers = Calendar(config), link, peers
    self.first_replica = index * self._calendar.replicas_per_site
    self._applied = 0  # Rounds below this number are in the site's outer state.
    self._taken = 0  # All replicas have merged the rounds below this number.
    self._since = 0  # The last step that was taken over from the group.
    # Rounds that this site has sent, not yet merged: the compressor state before each.
    self._pending = dict[int, PyTree]()
    self._ready = False
    # A thread updates the outer state while the devices train; see `_send`.
    self._thread = futures.ThreadPoolExecutor(1, "outer-step")
    self._jobs = dict[int, futures.Future[Updated]]()
    self._waited_s = 0.0

  def account(self) -> dict[str, Any]:
    """Returns what happened to this site, as JSON values."""
    found = dataclasses.asdict(self._account)
    found |= {"index": self.index, "reconnects": self._link.reconnects}
    found["text"] = (
      f"{self.index} of {self._calendar.sites}: contributed to"
      f" {found['contributed']} of {found['rounds']} rounds,"
      f" {found['lost']} came too late, {found['skipped_steps']} steps not trained"
    )
    return found

  def note(self) -> str:
    """Says who is in, for the progress line."""
    return f"{self._link.inside} of {self._calendar.sites} sites"

  def enter(
    self, plan: Plan, start: int, state: TrainState, batches: Batches
  ) -> tuple[int, TrainState]:
    """Joins the group.

    Args:
      start: step of the site's own checkpoint, or 0.
      state: the state of that checkpoint, or the first state.
      batches: goes to the site's last position in its text.

    Returns:
      The group's step, and the state from which the site goes on.

    Raises:
      ConfigError: the coordinator refuses this site.
    """
    assert state.outer is not None
    self._applied = self._calendar.first_after(start - min(plan.schedule.taus))
    self._taken = self._applied
    welcome = self._link.join(
      fsdp=plan.mesh.shape[FSDP],
      round=self._applied,
      digests=outer_state.digests(state.outer),
    )
    recorded = {s: x for s, (step, x) in welcome.data.items() if step > start}
    text = "its own position"
    if recorded:
      own = batches.get_state()
      batches.set_state({s: recorded.get(s, x) for s, x in own.items()})
      text = "the position that the coordinator recorded"
    t, step = start, self._calendar.step_before(welcome.round)
    if welcome.snapshot is not None:
      t, state = step, _at_step(self._take(plan, state, welcome), step)
      self._since = t
      self._account.skipped_steps += max(t - start, 0)
      moments = f"of its checkpoint of step {start}" if start else "fresh"
      self._tell(
        f"Site {self.index} goes on at the group's step {t}: parameters from the group,"
        f" inner optimizer state {moments}, text from {text}."
      )
    else:
      # Trains the steps before the first open round again, so that it can send it.
      step = self._calendar.step_before(self._link.newest()[1])
      if t > step > 0:
        t, state = step, _at_step(state, step)
    return t, state

  def outer_step(
    self,
    plan: Plan,
    t: int,
    state: TrainState,
    batches: Batches,
    stopping: Callable[[], bool] = lambda: False,
  ) -> tuple[int, TrainState, list[Event]]:
    """Runs lines 6 to 12 after inner step t.

    Args:
      stopping: whether this process is told to end, so that it must not wait.

    Returns:
      The step after which the site goes on: t, or a later step if it was late.
    """
    events = list[Event]()
    if not self._ready:
      # The first step is compiled, so from now on the others may wait for this site.
      t, state = self._catch_up(plan, t, state, events, stopping)
      self._ready = True
      self._link.ready(self._calendar.first_after(t - 1))
      if not self._link.wait_for_start(stopping):
        return t, state, events
    for p in plan.schedule.sends(t):
      state = self._send(plan, t, p, state, batches, events)
    state, arrived = self._arrivals(plan, t, state, events, stopping)
    if arrived:
      t, state = self._catch_up(plan, t, state, events, stopping)
    return t, state, events

  def drain(
    self, plan: Plan, state: TrainState, batches: Batches, stopping: Callable[[], bool]
  ) -> tuple[TrainState, list[Event]]:
    """Receives the rounds in flight after the last step, and the final sync if any."""
    events, last = list[Event](), self.config.train.steps
    for t in range(last + 1, last + max(plan.schedule.taus) + 1):
      state, arrived = self._arrivals(plan, t, state, events, stopping, last)
      if not arrived:
        return state, events
    final = range(self._applied, len(self._calendar.rounds))
    for number in final:
      state = self._send(plan, *self._calendar.rounds[number], state, batches, events)
    for number in final:
      if not self._arrived(number, stopping):
        break
      state = self._receive(plan, last, number, state, (True,) * plan.replicas, events)
    return state, events

  @property
  def is_finished(self) -> bool:
    """Whether this site has merged all rounds."""
    return self._applied == len(self._calendar.rounds)

  def leave(self, reason: str) -> None:
    """Tells the coordinator that this site goes; only the first call does something."""
    self._thread.shutdown(wait=False, cancel_futures=True)
    self._link.leave(reason)

  def _send(
    self,
    plan: Plan,
    t: int,
    p: int,
    state: TrainState,
    batches: Batches,
    events: list[Event],
  ) -> TrainState:
    """Lines 7 and 8; nothing if the round is closed already."""
    number = self._calendar.number[t, p]
    if number < self._link.newest()[0] or state.outer is None:
      if number >= self._applied:  # The group did not wait for this site.
        self._miss(t)
      return state
    outer = state.outer
    before = jax.tree.map(jnp.copy, outer.codec_state[p])  # `send` donates its own.
    arrays = (state.params, outer.theta[p], outer.codec_state[p])
    payload, codec_state, metrics = plan.send(t, p, *arrays, self.first_replica)
    data = np.asarray(plan.transport.carry(payload).addressable_data(0)).tobytes()
    steps = self._calendar.steps_behind(number, self._since)
    tokens = steps * self.config.tokens_per_step // self.config.replicas
    parts = self._peers.all_gather(batches.get_state())
    position = {shard: [t, x] for part in parts for shard, x in part.items()}
    self._link.send(number, data, {"tokens": tokens, "data": position})
    self._pending[number] = before
    if isinstance(self._link, Link):  # Several processes must receive together.
      theta, opt_state = outer.theta[p], outer.opt_state[p]
      self._jobs[number] = self._thread.submit(
        self._outer_step, plan, number, theta, opt_state
      )
    events.append(Event("send", p, t, len(data) // plan.replicas, metrics))
    outer = _with_codec_state(outer, p, codec_state)
    return dataclasses.replace(state, outer=outer)

  def _arrivals(
    self,
    plan: Plan,
    t: int,
    state: TrainState,
    events: list[Event],
    stopping: Callable[[], bool],
    last_send: int | None = None,
  ) -> tuple[TrainState, bool]:
    """Lines 9 to 12; the flag says whether all rounds that were due have come."""
    for p, mask in plan.schedule.arrivals(t, last_send):
      sent_at = t - min(tau for tau, now in zip(plan.schedule.taus, mask) if now)
      number = self._calendar.number[sent_at, p]
      if not self._arrived(number, stopping):
        return state, False
      if number >= self._taken:
        state = self._receive(plan, t, number, state, mask, events)
    return state, True

  def _arrived(self, number: int, stopping: Callable[[], bool]) -> bool:
    """Waits until a round is closed; returns False if this process must end."""
    began = time.perf_counter()
    arrived = number < self._applied or self._link.wait_until(number, stopping)
    self._waited_s = time.perf_counter() - began
    return arrived

  def _receive(
    self,
    plan: Plan,
    t: int,
    number: int,
    state: TrainState,
    mask: tuple[bool, ...],
    events: list[Event],
  ) -> TrainState:
    """Lines 10 to 12 with all closed rounds up to `number`, in their order."""
    welcome = self._link.welcome()
    if welcome:
      state = self._take(plan, state, welcome)
    for r in range(self._applied, number + 1):
      state = self._update(plan, t, r, state, events)
    p = self._calendar.rounds[number][1]
    return self._merge(plan, p, state, mask)

  def _update(
    self,
    plan: Plan,
    t: int,
    number: int,
    state: TrainState,
    events: list[Event],
  ) -> TrainState:
    """Lines 10 and 11 with one closed round."""
    assert state.outer is not None
    p, outer = self._calendar.rounds[number][1], state.outer
    job = self._jobs.pop(number, None)
    now = (plan, number, outer.theta[p], outer.opt_state[p])
    closed, result = job.result() if job else self._outer_step(*now)
    theta, opt_state, metrics = result
    self._applied = number + 1
    self._link.forget(self._applied)
    self._account.rounds += 1
    if self.index in closed.tokens:
      self._account.contributed += 1
    elif number in self._pending:
      self._miss(t)
      # Error feedback: what the lost payload took from the error comes back.
      outer = _with_codec_state(outer, p, self._pending[number])
    self._pending.pop(number, None)
    # For audits: the round, how many sites are in it, and whether this one is.
    more: Metrics = {
      "round": np.asarray(number),
      "sites": np.asarray(len(closed.tokens)),
      "counted": np.asarray(self.index in closed.tokens),
      "waited_s": np.float32(self._waited_s),
    }
    events.append(Event("receive", p, t, 0, metrics | more))
    outer = outer.after_update(p, *plan.placement.keep((theta, opt_state)))
    return dataclasses.replace(state, outer=outer)

  def _outer_step(
    self, plan: Plan, number: int, theta: PyTree, opt_state: PyTree
  ) -> Updated:
    """Waits for a closed round, and runs its outer step."""
    self._link.wait_until(number, lambda: False)
    closed = self._link.closed(number)
    p, fsdp = closed.fragment, plan.mesh.shape[FSDP]
    result = outer_state.apply(
      plan,
      p,
      self._calendar.sites,
      fsdp,
      theta,
      opt_state,
      closed.payloads,
      closed.tokens,
    )
    return closed, jax.block_until_ready(result)

  def _merge(
    self, plan: Plan, p: int, state: TrainState, mask: tuple[bool, ...]
  ) -> TrainState:
    """Line 12."""
    assert state.outer is not None
    params_M = plan.merge(p, state.params, state.outer.theta[p], mask)
    return dataclasses.replace(state, params=params_M)

  def _miss(self, t: int) -> None:
    """Counts a round that closed without this site; the next ones may wait again."""
    self._account.lost += 1
    self._link.ready(self._calendar.first_after(t))

  def _catch_up(
    self,
    plan: Plan,
    t: int,
    state: TrainState,
    events: list[Event],
    stopping: Callable[[], bool],
  ) -> tuple[int, TrainState]:
    """Merges the rounds that closed beyond step t, and takes the group's step."""
    rounds, everywhere = self._calendar.rounds, (True,) * plan.replicas
    while (published := self._link.newest()[1]) > self._applied:  # Others go on.
      if rounds[published - 1][0] <= t:
        break
      # The link has no room for more rounds before these are applied.
      last = min(published, self._applied + self._calendar.room) - 1
      if not self._link.wait_until(last, stopping):
        break
      for r in range(self._applied, last + 1):
        state = self._receive(plan, t, r, state, everywhere, events)
      self._taken = self._applied
    step = self._calendar.step_before(self._applied)
    if step <= t:
      return t, state
    self._tell(f"Site {self.index} was late: goes on at step {step} instead of {t}.")
    self._account.skipped_steps += step - t
    self._since = step
    self._link.ready(self._calendar.first_after(step))
    return step, _at_step(state, step)

  def _take(self, plan: Plan, state: TrainState, welcome: Welcome) -> TrainState:
    """Takes the group's outer state from a snapshot, and starts from it."""
    assert state.outer is not None
    assert welcome.snapshot is not None
    thetas, opt_states = outer_state.from_bytes(
      welcome.snapshot, state.outer.theta, state.outer.opt_state
    )
    outer = OuterState(tuple(thetas), tuple(opt_states), state.outer.codec_state, {})
    state = dataclasses.replace(state, outer=outer)
    whole = dataclasses.replace(plan, alpha=0.0)
    for p in range(len(plan.fragments)):
      state = self._merge(whole, p, state, (True,) * plan.replicas)
    self._applied = self._taken = welcome.round
    self._link.forget(self._applied)
    self._pending.clear()
    self._jobs.clear()
    return state

  def _tell(self, line: str) -> None:
    if self._peers.index == 0:
      say(line)


def make_site(
  c: Config, index: int, address: str, tls: str, insecure: bool, peers: Peers
) -> Site:
  """Prepares a site, which joins when training begins.

  Args:
    c: config of the whole run.
    index: the site's number.
    address: host:port of the coordinator.
    tls: folder of the site's certificates; "" with `insecure`.
    insecure: whether to use plain text.
    peers: the processes of this site; process 0 connects to the coordinator.

  Raises:
    ConfigError: the run has no such site, the address is wrong, or certificates are
      missing.
  """
  config_of(c, index)
  open_channel = functools.partial(security.channel, address, tls, insecure)
  open_channel().close()  # Finds mistakes.
  hello = {"site": index, "config": c.to_dict()}
  room = Calendar(c).room
  link = Link(open_channel, address, hello, say, room) if peers.index == 0 else None
  if link and peers.count == 1:
    return Site(c, index, link, peers)
  return Site(c, index, SharedLink(link, peers), peers)


def _with_codec_state(outer: OuterState, p: int, codec_state: PyTree) -> OuterState:
  """Replaces the compressor state of fragment p."""
  states = list(outer.codec_state)
  states[p] = codec_state
  return dataclasses.replace(outer, codec_state=tuple(states))


def _at_step(state: TrainState, t: int) -> TrainState:
  """Sets the count of the learning rate's schedule; moments keep their own counts."""
  return dataclasses.replace(state, opt_state=at_step(state.opt_state, t))
