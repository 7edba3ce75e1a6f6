"""A site's part of Algorithm 2: sends its payloads, merges the rounds of the group.

A site runs its inner steps by its own clock. After step t it sends its payload of the
round that is due, and after step t + tau it merges that round as the coordinator closed
it. A site that finds rounds closed beyond its own step was late: it merges them all,
takes the group's step count, and goes on from there. A site with bad numbers sends
nothing, or is refused; it goes on with the group's parameters.
"""

import dataclasses
import functools
import importlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco.algorithm.method import Method, Wrapper
from diloco.algorithm.optimizers import at_step
from diloco.algorithm.placement import Jobs
from diloco.algorithm.state import Event, TrainState, replaced
from diloco.algorithm.sync_metrics import Metrics
from diloco.config import Config
from diloco.contrib.sites import SitesConfig, outer_state, security, unsharded
from diloco.contrib.sites.arrival import Arrival, process_began, text
from diloco.contrib.sites.calendar import Calendar, as_all, config_of
from diloco.contrib.sites.link import Closed, Link, Welcome
from diloco.contrib.sites.shared_link import SharedLink
from diloco.contrib.sites.texts import Texts
from diloco.data.batches import Batches, own_replicas
from diloco.processes.peers import Peers, print_line
from diloco.processes.stop import Stop, Stopped
from diloco.spec import sizes
from diloco.spec.schedule import reaches
from diloco.util.types import PyTree


@dataclasses.dataclass
class SitePart:
  """A site's part of a run, for `diloco.train.train`.

  Attributes:
    config: of the whole run, as if all sites had this site's batch.
    index: number of the site.
    link: the connection to the coordinator.
    peers: the processes of this site.
    first_replica: number of the site's first replica.
    arrival: measures where the time goes until the site takes part.
  """

  config: Config
  index: int
  link: Link | SharedLink
  peers: Peers

  def __post_init__(self) -> None:
    self.first_replica = self.index * Calendar(self.config).replicas_per_site
    self.arrival = Arrival(process_began())

  def own_config(self) -> Config:
    """Returns the config by which this site trains."""
    return config_of(self.config, self.index)

  def method(self, method: Method, batches: Batches, stop: Stop) -> Method:
    return Site(method, self, batches, stop)


def make_part(
  c: Config, index: int, address: str, tls: str, insecure: bool, peers: Peers
) -> SitePart:
  """Prepares a site, which joins when training begins.

  Args:
    c, index, peers: see `SitePart`; process 0 connects to the coordinator.
    address, tls, insecure: see `security.channel`; or a folder or a bucket, which has
      a slash in its address.

  Raises:
    ConfigError: the site or the address is wrong, or certificates are missing.
  """
  config_of(c, index)
  if "/" in address:
    # This module needs the coordinator's rules, so it lies in a layer above.
    make = importlib.import_module(f"{__package__}.folder.part").make_link
    make = functools.partial(make, c, index, address, tls, insecure, print_line)
  else:
    keepalive_s = c.of(SitesConfig).keepalive_s
    open_channel = functools.partial(
      security.channel, address, tls, insecure, keepalive_s
    )
    open_channel().close()  # Finds mistakes.
    hello, room = {"site": index, "config": c.to_dict()}, Calendar(c).room
    own = (open_channel, address, hello, print_line, room, keepalive_s)
    make = functools.partial(Link, *own)
  link = make() if peers.index == 0 else None
  shared = link if link and peers.count == 1 else SharedLink(link, peers)
  part = SitePart(as_all(c), index, shared, peers)
  jax.monitoring.register_event_duration_secs_listener(part.arrival.listen)
  return part


@dataclasses.dataclass
class Site(Wrapper):
  """Trains like `method`, and exchanges payloads with the coordinator; see `Method`.

  Attributes:
    part: which site this is, and its connection.
    batches: follow the site's step.
    stop: knows whether a signal came, so that the site must not wait for others.
  """

  part: SitePart
  batches: Batches
  stop: Stop

  def __post_init__(self) -> None:
    self._link, self._calendar = self.part.link, Calendar(self.part.config)
    self._applied = 0  # Rounds below this number are in the site's outer state.
    self._taken = 0  # All replicas have merged the rounds below this number.
    self._since = 0  # The last step that was taken over from the group.
    # {round that this site has sent and not merged: compressor state before the send}
    self._pending = dict[int, PyTree]()
    self._ready = False
    own = own_replicas(self.method.c, self.method.mesh)
    replicas = [self.part.first_replica + m for m in own]
    self._texts = Texts(self.part.config, replicas, self.batches)
    # A thread updates the outer state while the devices train. Several processes must
    # receive together, so they update it when a round is due.
    self._background = self.part.peers.count == 1
    self._jobs = Jobs(self._background)
    self._waited_s = 0.0
    self._events = list[Event]()  # Events of the current `outer` or `drain`.
    # For the summary: rounds that this site merged, those in which its payload counted,
    # its payloads that came too late, steps of the group that it did not train, and how
    # often it began again because of bad numbers.
    names = ("rounds", "contributed", "lost", "skipped_steps", "restored")
    self._account = dict.fromkeys(names, 0)
    # The step of the last of these, until a payload of this site counts again.
    self._restored_at: int | None = None

  def account(self, summary: Mapping[str, Any]) -> dict[str, Any]:
    c, sent, own = self.part.config, summary["bytes_sent_per_replica"], self._account
    index, params = self.part.index, summary["params"]
    line = (
      f"{index} of {self._calendar.sites}: contributed to {own['contributed']} of"
      f" {own['rounds']} rounds, {own['lost']} came too late, {own['skipped_steps']}"
      f" steps not trained, {own['restored']} times restored from the group"
    )
    more = {"index": index, "reconnects": self._link.reconnects, "text": line}
    more["arrival_s"] = self.part.arrival.seconds
    reference = int(sizes.all_reduce_bytes(c.replicas, params, c.train.steps))
    return {
      "site": own | more,
      "bytes_data_parallel_per_replica": reference,
      "bytes_ratio_to_data_parallel": reference / sent if sent else None,
    }

  def recovers(self, t: int) -> bool:
    """Returns whether the group's parameters cure bad numbers after step t.

    They do not if no payload of the site has counted since they did.
    """
    return self._restored_at is None or t <= self._restored_at

  def note(self) -> str:
    return f"{self._link.inside} of {self._calendar.sites} sites"

  def enter(self, t: int, state: TrainState) -> tuple[int, TrainState]:
    """Joins the group with the site's own checkpoint of step t, or its first state.

    Raises:
      ConfigError: the coordinator refuses this site.
    """
    calendar, taus = self._calendar, self.method.plan.schedule.taus
    self.part.arrival.ends("start")
    self._applied = self._taken = calendar.first_after(t - min(taus))
    digests = outer_state.digests(state.outer)
    welcome = self._link.join(round=self._applied, digests=digests)
    self.part.arrival.ends("snapshot")
    place = "its own position"
    recorded = {s: x for s, (step, x) in welcome.data.items() if step > t}
    if welcome.skip:
      self._texts.jump(welcome.data, welcome.skip)
      place = "the position after what the others have trained"
    elif recorded:
      own = self.batches.get_state()
      self.batches.set_state({s: recorded.get(s, x) for s, x in own.items()})
      place = "the position that the coordinator recorded"
    if not welcome.snapshot:
      self._link.offer(self._applied, state.outer)  # The first site's is the group's.
      # Goes back to the step before the first open round: the site must train these
      # steps again to send that round.
      step = calendar.step_before(self._link.newest()[1])
      return (step, _at_step(state, step)) if t > step > 0 else (t, state)
    step = self._since = calendar.step_before(welcome.round)
    self._account["skipped_steps"] += max(step - t, 0)
    moments = f"of its checkpoint of step {t}" if t else "fresh"
    self._print(
      f"goes on at the group's step {step}: parameters from the group,"
      f" inner optimizer state {moments}, text from {place}."
    )
    return step, _at_step(self._take(state, welcome), step)

  def outer(self, t: int, state: TrainState) -> tuple[int, TrainState, list[Event]]:
    """Runs lines 6 to 12 after inner step t, and after later steps that are skipped.

    A late site takes the group's step. A site with sites.pace below 1 trains only some
    of the group's steps, but sends and merges after all.
    """
    self._events, calendar, first = [], self._calendar, t
    t, state = self._outer(t, state)
    last = self.part.config.train.steps
    while t < last and calendar.trained(t + 1) == calendar.trained(t):
      t, state = self._outer(t + 1, _at_step(state, t + 1))
    if reaches(first, t, self.part.config.checkpoint.every):
      # Newcomers may start from this state.
      self._link.offer(self._applied, state.outer)
    return t, state, self._events

  def _outer(self, t: int, state: TrainState) -> tuple[int, TrainState]:
    if not self._ready:
      # The first step is done, so from now on the others may wait for this site.
      t, state = self._arrive(t, state)
      if not self._link.wait_for_start(self.stop.received):
        return t, state
    for p in self.method.plan.schedule.sends(t):
      state = self._send(t, p, state)
    state, arrived = self._arrivals(t, state)
    return self._catch_up(t, state) if arrived else (t, state)

  def _arrive(self, t: int, state: TrainState) -> tuple[int, TrainState]:
    """Takes part in the rounds from now on, after the site's first step."""
    arrival = self.part.arrival
    jax.block_until_ready(state.params)
    arrival.ends("first_step")
    t, state = self._catch_up(t, state)
    arrival.ends("rounds")
    self._ready = True
    seconds = {k: round(s, 3) for k, s in arrival.seconds.items()}
    self._print(f"takes part after {text(seconds)}.")
    of_event = {f"{k}_s": np.float32(s) for k, s in seconds.items()}
    self._events.append(Event("arrival", 0, t, 0, of_event))
    self._link.ready(self._calendar.first_after(t - 1), seconds)
    return t, state

  def drain(self, t: int, state: TrainState) -> tuple[TrainState, list[Event]]:
    """Receives the rounds in flight after the last step, and the final sync if any."""
    self._events = []
    state = self._drain(t, state)
    if self._applied < len(self._calendar.rounds):  # A signal came.
      raise Stopped(late=True, events=self._events)  # The last checkpoint is older.
    return state, self._events

  def _drain(self, last: int, state: TrainState) -> TrainState:
    for t in range(last + 1, last + max(self.method.plan.schedule.taus) + 1):
      state, arrived = self._arrivals(t, state, last)
      if not arrived:
        return state
    final = range(self._applied, len(self._calendar.rounds))
    for number in final:
      state = self._send(*self._calendar.rounds[number], state)
    for number in final:
      if not self._arrived(number):
        break
      state = self._receive(last, number, state)
    return state

  def close(self, reason: str) -> None:
    self._jobs.close()
    self._link.leave(reason)
    self.method.close(reason)

  def _send(self, t: int, p: int, state: TrainState) -> TrainState:
    """Lines 7 and 8; nothing if the round is closed or the site just began again."""
    plan, outer, number = self.method.plan, state.outer, self._calendar.number[t, p]
    if self._restored_at == t:
      return state
    if number < self._link.newest()[0]:
      if number >= self._applied:  # The group did not wait for this site.
        self._miss(t)
      return state
    before = jax.tree.map(jnp.copy, outer.codec_state[p])  # `send` donates its own.
    arrays = (state.params, outer.theta[p], outer.codec_state[p])
    found = unsharded.send(plan, t, p, *arrays, self.part.first_replica)
    payload, codec_state, metrics = found
    norms = jnp.asarray(metrics["outer_grad_norm"]).addressable_shards
    finite = all(bool(np.isfinite(x.data).all()) for x in norms)
    parts = self.part.peers.all_gather([finite, self.batches.get_state()])
    if self._restored_at is None and not all(ok for ok, _ in parts):
      return self._restore(t, state, "its parameters are not finite")
    data = np.asarray(plan.transport.carry(payload).addressable_data(0)).tobytes()
    c, steps = self.part.config, self._calendar.steps_behind(number, self._since)
    per_step = c.tokens_per_step // c.replicas
    position = {shard: [t, x] for _, part in parts for shard, x in part.items()}
    fields = {"tokens": steps * per_step, "per_step": per_step, "data": position}
    fields["finished"] = list(self._texts.finished)
    self._link.send(number, data, fields)
    self._pending[number] = before
    job = functools.partial(self._outer_step, number)
    self._jobs.start(number, job, outer.theta[p], outer.opt_state[p])
    self._events.append(Event("send", p, t, len(data) // plan.replicas, metrics))
    return _with_codec_state(state, p, codec_state)

  def _arrivals(
    self, t: int, state: TrainState, last_send: int | None = None
  ) -> tuple[TrainState, bool]:
    """Lines 9 to 12; the flag says whether all rounds that were due have come."""
    schedule = self.method.plan.schedule
    for p, mask in schedule.arrivals(t, last_send):
      sent_at = t - min(tau for tau, now in zip(schedule.taus, mask) if now)
      number = self._calendar.number[sent_at, p]
      if not self._arrived(number):
        return state, False
      if number >= self._taken:
        state = self._receive(t, number, state, mask)
    return state, True

  def _arrived(self, number: int) -> bool:
    """Waits until a round is closed; returns False if this process must end."""
    began, received = time.perf_counter(), self.stop.received
    arrived = number < self._applied or self._link.wait_until(number, received)
    self._waited_s = time.perf_counter() - began
    return arrived

  def _receive(
    self, t: int, number: int, state: TrainState, mask: tuple[bool, ...] | None = None
  ) -> TrainState:
    """Lines 10 to 12 with all closed rounds up to `number`, in their order.

    Args:
      mask: the replicas that merge; None: all.
    """
    welcome = self._link.welcome()
    if welcome:
      state = self._take(state, welcome)
      if welcome.skip:
        self._texts.jump(welcome.data, welcome.skip)
    for r in range(self._applied, number + 1):
      state = self._update(t, r, state)
    plan, p = self.method.plan, self._calendar.rounds[number][1]
    mask = mask or (True,) * plan.replicas
    params_M = plan.merge(p, state.params, state.outer.theta[p], mask)
    return dataclasses.replace(state, params=params_M)

  def _update(self, t: int, number: int, state: TrainState) -> TrainState:
    """Lines 10 and 11 with one closed round."""
    p, outer = self._calendar.rounds[number][1], state.outer
    job = functools.partial(self._outer_step, number)
    closed, (theta, opt_state, metrics) = self._jobs.finish(
      number, job, outer.theta[p], outer.opt_state[p]
    )
    self._applied = number + 1
    self._link.forget(self._applied)
    self._account["rounds"] += 1
    for site, block in closed.lent.items():
      self._texts.drop(block.again)
      if block.reader == self.part.index:
        self._texts.lend(number, site, block)
      elif site == self.part.index and not block.again:
        self._texts.jump(block.positions, block.skip + block.size)
    counted, sent = self.part.index in closed.tokens, number in self._pending
    refused, before = self.part.index in closed.refused, self._pending.pop(number, None)
    if counted:
      self._account["contributed"] += 1
      self._restored_at = None if sent else self._restored_at
    elif sent and not refused:
      self._miss(t)
      # Error feedback: restores the error to its value before the lost payload.
      state = _with_codec_state(state, p, before)
    # To check a run later: the round, the number of its sites, whether this one counts.
    more: Metrics = {
      "round": np.asarray(number),
      "sites": np.asarray(len(closed.tokens)),
      "counted": np.asarray(counted),
      "waited_s": np.float32(self._waited_s),
    }
    self._events.append(Event("receive", p, t, 0, metrics | more))
    kept = self.method.plan.placement.keep((theta, opt_state))
    state = dataclasses.replace(state, outer=state.outer.after_update(p, *kept))
    if sent and refused:
      return self._restore(t, state, f"its payload of round {number} was refused")
    return state

  def _outer_step(
    self, number: int, theta: PyTree, opt_state: PyTree
  ) -> tuple[Closed, tuple[PyTree, PyTree, Metrics]]:
    """Waits for a closed round, and runs its outer step."""
    self._link.wait_until(number, lambda: False)
    closed, plan = self._link.closed(number), self.method.plan
    found = outer_state.apply(plan, self._calendar, closed, theta, opt_state)
    self._link.applied(number, *found[:2])
    return closed, found

  def _miss(self, t: int) -> None:
    """Counts a round that closed without this site; the next ones may wait again."""
    self._account["lost"] += 1
    self._link.ready(self._calendar.first_after(t))

  def _restore(self, t: int, state: TrainState, reason: str) -> TrainState:
    """Begins again after step t with the group's parameters, because of bad numbers.

    The inner optimizer and the compressor begin with fresh states. What is in flight
    still counts, unless it is refused.
    """
    self._print(f"goes on at step {t} with the group's parameters: {reason}.")
    self._account["restored"] += 1
    self._restored_at = self._since = t
    self._pending.clear()
    self._link.ready(self._calendar.first_after(t))
    as_before = lambda x, old_M: x.astype(old_M.dtype)
    params = jax.tree.map(as_before, self.method.params(state), state.params)
    fresh = self.method.init(params=params)
    outer = dataclasses.replace(state.outer, codec_state=fresh.outer.codec_state)
    return _at_step(dataclasses.replace(fresh, outer=outer), t)

  def _catch_up(self, t: int, state: TrainState) -> tuple[int, TrainState]:
    """Merges the rounds that closed beyond step t, and takes the group's step."""
    rounds = self._calendar.rounds
    while (published := self._link.newest()[1]) > self._applied:  # Others go on.
      if rounds[published - 1][0] <= t:
        break
      # The link has no room for more rounds before these are applied.
      last = min(published, self._applied + self._calendar.room) - 1
      if not self._link.wait_until(last, self.stop.received):
        break
      for r in range(self._applied, last + 1):
        state = self._receive(t, r, state)
      self._taken = self._applied
    step = self._calendar.step_before(self._applied)
    if step <= t:
      return t, state
    self._print(f"was late: goes on at step {step} instead of {t}.")
    self._account["skipped_steps"] += step - t
    self._since = step
    self._link.ready(self._calendar.first_after(step))
    return step, _at_step(state, step)

  def _take(self, state: TrainState, welcome: Welcome) -> TrainState:
    """Takes the group's outer state from a snapshot, and starts from it."""
    outer = outer_state.from_bytes(welcome.snapshot, state.outer)
    whole, params_M = dataclasses.replace(self.method.plan, alpha=0.0), state.params
    for p, theta in enumerate(outer.theta):
      params_M = whole.merge(p, params_M, theta, (True,) * whole.replicas)
    self._applied = self._taken = welcome.round
    self._link.forget(self._applied)
    self._pending.clear()
    self._jobs.close()
    self._jobs = Jobs(self._background)
    return dataclasses.replace(state, params=params_M, outer=outer)

  def _print(self, line: str) -> None:
    if self.part.peers.index == 0:
      print_line(f"Site {self.part.index} {line}")


def _with_codec_state(state: TrainState, p: int, codec_state: PyTree) -> TrainState:
  """Replaces the compressor state of fragment p."""
  states = replaced(state.outer.codec_state, p, codec_state)
  outer = dataclasses.replace(state.outer, codec_state=states)
  return dataclasses.replace(state, outer=outer)


def _at_step(state: TrainState, t: int) -> TrainState:
  """Sets the count of the learning rate's schedule; moments keep their own counts."""
  return dataclasses.replace(state, opt_state=at_step(state.opt_state, t))
