"""A site's part of Algorithm 2: sends its payloads, merges the rounds of the group.

A site runs its inner steps at its own speed. After step t it sends its payload of the
round that is due. After step t + tau it merges that round: the payloads with which the
group closed the round. A site is late if the group has closed rounds beyond the site's
own step. A late site merges all these rounds and goes on at the group's step. A site
whose payload was refused, because of bad numbers, goes on with the group's parameters.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np

from diloco.algorithm.method import Method
from diloco.algorithm.optimizers import at_step
from diloco.algorithm.outer import outer_step
from diloco.algorithm.placement import Jobs
from diloco.algorithm.state import Event, TrainState
from diloco.algorithm.sync_metrics import Metrics
from diloco.config import Config
from diloco.contrib.sites import outer_state, unsharded
from diloco.contrib.sites.calendar import Calendar, as_all, config_of
from diloco.contrib.sites.group.journal import Closed
from diloco.contrib.sites.group.link import Link, Welcome
from diloco.contrib.sites.group.open import check_contents, open_group
from diloco.contrib.sites.measure import measurer
from diloco.contrib.sites.shared_link import SharedLink
from diloco.data.batches import Batches
from diloco.errors import ConfigError
from diloco.processes.peers import Peers, print_line
from diloco.processes.stop import Stop, Stopped
from diloco.spec import sizes
from diloco.spec.schedule import reaches
from diloco.util.types import Json, PyTree


@dataclasses.dataclass
class SitePart:
  """A site's part of a run, for `diloco.train.train`.

  Attributes:
    config: config of the whole run, as if all sites had this site's batch size.
    index: number of the site.
    link: the link to the group.
    peers: the processes of this site.
    check: refuses another text or tokenizer than that of the group.
    first_replica: number of the site's first replica.
  """

  config: Config
  index: int
  link: Link | SharedLink
  peers: Peers
  check: Callable[[Mapping[str, str]], None] = lambda contents: None

  def __post_init__(self) -> None:
    self.first_replica = self.index * Calendar(self.config).replicas_per_site

  def own_config(self) -> Config:
    """Returns the config by which this site trains."""
    return config_of(self.config, self.index)

  def method(
    self, method: Method, batches: Batches, stop: Stop, contents: Mapping[str, str]
  ) -> Method:
    self.check(contents)
    c, run = self.config, method.sync.outer_step.run
    if run is not outer_step or c.averages or c.joint_steps:
      raise ConfigError(
        f"overlap.transport is sites, but one of plugins={c.plugins} has a `wrap` or a"
        " `schedule`, which sites do not call; choose device, or leave it out."
      )
    return Site(method.c, method.sync, self, batches, stop)


def make_part(c: Config, index: int, address: str) -> Callable[[Peers], SitePart]:
  """Checks the site and its group before JAX starts; prepares the site's part.

  Args:
    c: config of the whole run.
    index: number of the site.
    address: folder or bucket of the group.

  Returns:
    A function that makes the site's part from the processes of the site. Only process 0
    has a link to the group.

  Raises:
    ConfigError: there is no such site, or the group has another config.
  """
  storage = open_group(c, index, address)

  def make(peers: Peers) -> SitePart:
    calendar = Calendar(c)
    measure = lambda number, payloads: measurer(calendar)(number, payloads)
    args = (storage, address, calendar, index, measure, print_line)
    link = None if peers.index else Link(*args)
    shared = link if link and peers.count == 1 else SharedLink(link, peers)
    check = functools.partial(check_contents, storage, address)
    return SitePart(as_all(c), index, shared, peers, check)

  return make


@dataclasses.dataclass
class Site(Method):
  """Trains like any method, and exchanges payloads with its group.

  Attributes:
    part: number and link of this site.
    batches: the site's batches.
    stop: knows whether a signal came. If so, the site must not wait for others.
  """

  part: SitePart
  batches: Batches
  stop: Stop

  def __post_init__(self) -> None:
    self._link, self._calendar = self.part.link, Calendar(self.part.config)
    self._applied = 0  # Rounds below this number are in the site's outer state.
    self._taken = 0  # All replicas have merged the rounds below this number.
    self._since = 0  # The last step at which the group's state was taken over.
    self._left_out = set[int]()  # Steps that the site does not train; see `_leave_out`.
    # {round that this site has sent and not merged: compressor state before the send}
    self._pending = dict[int, PyTree]()
    self._ready = False
    self._jobs = self._new_jobs()
    self._waited_s = 0.0
    self._events = list[Event]()  # Events of the current call of `outer` or `drain`.
    # For the summary: rounds that this site merged, rounds in which its payload
    # counted, its payloads that came too late, steps of the group that it did not
    # train, and the number of calls of `_restore`.
    names = ("rounds", "contributed", "lost", "skipped_steps", "restored")
    self._account = dict.fromkeys(names, 0)
    self._absent = list[int]()  # Sites that have sent nothing in the whole run.
    # The step of the last `_restore`, until a later payload of this site counts.
    self._restored_at: int | None = None

  def account(self, summary: Json) -> Json:
    c, sent, counts = self.part.config, summary["bytes_sent_per_replica"], self._account
    site, sites, params = self.part.index, self._calendar.sites, summary["params"]
    line = (
      f"{site} of {sites}: contributed to {counts['contributed']} of {counts['rounds']}"
      f" rounds, {counts['lost']} came too late, {counts['skipped_steps']} steps not"
      f" trained, {counts['restored']} times restored from the group"
    )
    more = {"index": site, "absent": self._absent, "text": line}
    reference = int(sizes.all_reduce_bytes(c.replicas, params, c.train.steps))
    return {
      "site": counts | more,
      "bytes_data_parallel_per_replica": reference,
      "bytes_ratio_to_data_parallel": reference / sent if sent else None,
    }

  def recovers(self, t: int) -> bool:
    """Returns whether the group's parameters can cure bad numbers after step t.

    They cannot if no payload of the site has counted since the last `_restore`.
    """
    return self._restored_at is None or t <= self._restored_at

  def enter(self, t: int, state: TrainState) -> tuple[int, TrainState]:
    """Joins the group with the site's own checkpoint of step t, or its first state.

    Raises:
      ConfigError: another process runs this site, or the group is of another run.
      Stopped: a signal came first.
    """
    calendar, taus = self._calendar, self.sync.schedule.taus
    self._applied = calendar.first_after(t - min(taus))
    self._taken = calendar.first_after(t - max(taus))
    digests, received = outer_state.digests(state.outer), self.stop.received
    welcome = self._link.join(self._applied, digests, received)
    if not welcome:
      raise Stopped
    place = self._find_text(t, welcome.data)
    if not welcome.snapshot:
      self._offer(state)  # The first site's outer state becomes the group's.
      # Goes back to the step before the first open round: the site must train
      # again from there to send that round.
      number, rounds = self._link.newest()[1], calendar.rounds
      step = rounds[number][0] - 1 if number < len(rounds) else t
      return (step, _at_step(state, step)) if t > step else (t, state)
    step = self._since = calendar.step_before(welcome.round)
    self._account["skipped_steps"] += max(step - t, 0)
    moments = f"of its checkpoint of step {t}" if t else "fresh"
    self._print(
      f"goes on at the group's step {step}: parameters from the group,"
      f" inner optimizer state {moments}, text from {place}."
    )
    return step, _at_step(self._take(state, welcome), step)

  def _find_text(self, t: int, recorded: Json) -> str:
    """Goes to the text positions that the group recorded after step t, and names them.

    If a position is bad, the site goes on at the position of its checkpoint.
    """
    before = self.batches.get_state()
    try:
      known = {s: recorded[s] for s in before.keys() & recorded}
      if later := {s: place for s, (step, place) in known.items() if step > t}:
        self.batches.set_state(before | later)
        return "the position that the group recorded"
    except (AttributeError, LookupError, TypeError, ValueError) as error:
      self.batches.set_state(before)
      self._print(f"cannot use the recorded position in its text ({error!r}).")
    return "its own position"

  def _offer(self, state: TrainState) -> None:
    """Gives the link the outer state, from which new sites may start."""
    outer = state.outer
    make = lambda: (outer_state.digests(outer), outer_state.to_bytes(outer))
    self._link.offer(self._applied, make)

  def outer(self, t: int, state: TrainState) -> tuple[int, TrainState, list[Event]]:
    """Runs lines 6 to 12 of Algorithm 2 after step t, and after later skipped steps.

    A late site goes to the group's step. A site sends and merges after every step of
    the group, also after the steps that it does not train.
    """
    self._events, first, step, last = [], t, t, self.part.config.train.steps
    trains = lambda t: self._calendar.trains(t) and t not in self._left_out
    t, state = self._outer(t, state)
    while step <= t < last and not trains(t + 1):
      step = t + 1
      self._account["skipped_steps"] += step in self._left_out
      t, state = self._outer(step, _at_step(state, step))
    if reaches(first, t, self.part.config.checkpoint.every):
      self._offer(state)
    return t, state, self._events

  def _leave_out(self, t: int) -> None:
    """Leaves out the next step after t that the site would train.

    A late site does this. Otherwise it would stay behind the group by the time that a
    closed round needs to reach the site.
    """
    step = next(filter(self._calendar.trains, itertools.count(t + 1)))
    since = t - self._calendar.config.sync_every  # No new payload has older steps.
    self._left_out = {step, *(s for s in self._left_out if s > since)}

  def _outer(self, t: int, state: TrainState) -> tuple[int, TrainState]:
    if not self._ready:
      # The first step is done, so from now on the others may wait for this site.
      t, state = self._arrive(t, state)
      if not self._link.wait_for_start(self.stop.received):
        return t, state
    for p in self.sync.schedule.sends(t):
      state = self._send(t, p, state)
    state, arrived = self._arrivals(t, state)
    if not arrived:  # A signal came, but step t contains the merge.
      return t - 1, _at_step(state, t - 1)
    return self._catch_up(t, state)

  def _arrive(self, t: int, state: TrainState) -> tuple[int, TrainState]:
    """Takes part in the rounds from now on, after the site's first step."""
    jax.block_until_ready(state.params)
    t, state = self._catch_up(t, state)
    self._ready = True
    self._print(f"takes part after step {t}.")
    self._events.append(Event("arrival", 0, t, 0, {}))
    self._link.ready(self._calendar.first_after(t - 1))
    return t, state

  def drain(self, t: int, state: TrainState) -> tuple[TrainState, list[Event]]:
    """Receives the rounds in flight after the last step, and the final sync if any."""
    self._events = []
    state = self._drain(t, state)
    if self._applied < len(self._calendar.rounds):  # A signal came.
      raise Stopped(late=True)  # This state is not saved.
    self._absent = self._link.absent()
    return state, self._events

  def _drain(self, last: int, state: TrainState) -> TrainState:
    for t in range(last + 1, last + max(self.sync.schedule.taus) + 1):
      state, arrived = self._arrivals(t, state, last)
      if not arrived:
        return state
    final = range(self._applied, len(self._calendar.rounds))
    for number in final:
      state = self._send(*self._calendar.rounds[number], state)
    for number in final:
      if self._arrived(number):
        state = self._receive(last, number, state)
    return state

  def close(self, reason: str) -> None:
    """Leaves the group.

    Raises:
      ConfigError: the run is finished, but some sites were in no closed round.
    """
    self._jobs.close()
    self._link.leave(reason)
    super().close(reason)
    if self._absent and reason == "finished":
      sites = f"site {', '.join(map(str, self._absent))}"
      raise ConfigError(
        f"the run is finished and saved, but {sites} of {self._calendar.sites} sent no"
        " payload in any round, so fewer replicas than the config says have trained;"
        " train again with all sites and another --group, or keep the result as one of"
        " fewer replicas."
      )

  def _send(self, t: int, p: int, state: TrainState) -> TrainState:
    """Runs lines 7 and 8; starts the round's outer step, which waits for the group.

    The outer step waits in the background. It starts here even if this site sends no
    payload: the thread takes the rounds in their order, so no round waits for a later
    round.
    """
    number = self._calendar.number[t, p]
    state = self._payload(t, p, number, state)
    if number >= self._applied:
      job = functools.partial(self._outer_step, number)
      self._jobs.start(number, job, state.outer.theta[p], state.outer.opt_state[p])
    return state

  def _payload(self, t: int, p: int, number: int, state: TrainState) -> TrainState:
    """Runs lines 7 and 8, unless the round is closed."""
    sync, outer = self.sync, state.outer
    if number < self._link.newest()[0]:
      if number >= self._applied:  # The group did not wait for this site.
        self._miss(t)
      return state
    before = jax.tree.map(jnp.copy, outer.codec_state[p])  # `send` donates the state.
    arrays = (state.params, outer.theta[p], outer.codec_state[p])
    first = self.part.first_replica
    payload, codec_state, metrics = unsharded.send(sync, t, p, *arrays, first)
    parts = self.part.peers.all_gather(self.batches.get_state())
    data = np.asarray(sync.transport.carry(payload).addressable_data(0)).tobytes()
    steps = self._calendar.steps_behind(number, self._since, self._left_out)
    c = self.part.config
    per_step = c.tokens_per_step // c.replicas
    position = {shard: [t, x] for part in parts for shard, x in part.items()}
    fields = {"tokens": steps * per_step, "per_step": per_step, "data": position}
    self._link.send(number, data, fields)
    self._pending[number] = before
    self._events.append(Event("send", p, t, len(data) // sync.replicas, metrics))
    return dataclasses.replace(state, outer=outer.with_codec_state(p, codec_state))

  def _arrivals(
    self, t: int, state: TrainState, last_send: int | None = None
  ) -> tuple[TrainState, bool]:
    """Runs lines 9 to 12; the flag says whether all rounds that were due have come."""
    schedule = self.sync.schedule
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
    """Runs lines 10 to 12 with all closed rounds up to `number`, in their order.

    Args:
      mask: the replicas that merge; None: all.
    """
    welcome = self._link.welcome()
    if welcome:
      state = self._take(state, welcome)
    for r in range(self._applied, number + 1):
      state = self._update(t, r, state)
    sync, p = self.sync, self._calendar.rounds[number][1]
    mask = mask or (True,) * sync.replicas
    params_M = sync.merge(p, state.params, state.outer.theta[p], mask)
    return dataclasses.replace(state, params=params_M)

  def _update(self, t: int, number: int, state: TrainState) -> TrainState:
    """Runs lines 10 and 11 with one closed round."""
    p, outer = self._calendar.rounds[number][1], state.outer
    job = functools.partial(self._outer_step, number)
    closed, digest, (theta, opt_state, metrics) = self._jobs.finish(
      number, job, outer.theta[p], outer.opt_state[p]
    )
    self._link.applied(number, digest)
    self._applied = number + 1
    self._account["rounds"] += 1
    counted, sent = self.part.index in closed.tokens, number in self._pending
    refused, before = self.part.index in closed.refused, self._pending.pop(number, None)
    if counted:
      self._account["contributed"] += 1
      self._restored_at = None if sent else self._restored_at
    elif sent and not refused:
      self._miss(t)
      # Error feedback: restores the error to its value before the lost payload.
      outer = outer.with_codec_state(p, before)
    # For checks after the run: the round, the number of its sites, whether this site's
    # payload counts.
    more: Metrics = {
      "round": np.asarray(number),
      "sites": np.asarray(len(closed.tokens)),
      "counted": np.asarray(counted),
      "waited_s": np.float32(self._waited_s),
    }
    self._events.append(Event("receive", p, t, 0, metrics | more))
    kept = self.sync.place.keep((theta, opt_state))
    state = dataclasses.replace(state, outer=outer.after_update(p, *kept))
    if sent and refused:
      return self._restore(t, number, state)
    return state

  def _outer_step(
    self, number: int, theta: PyTree, opt_state: PyTree
  ) -> tuple[Closed, int, tuple[PyTree, PyTree, Metrics]]:
    """Waits until a round is closed, and runs its outer step; also returns a digest."""
    self._link.wait_until(number, lambda: False)
    closed, sync = self._link.closed(number), self.sync
    updated = outer_state.apply(sync, self._calendar, closed, theta, opt_state)
    return closed, outer_state.digest(*updated[:2]), updated

  def _miss(self, t: int) -> None:
    """Counts a round that closed without this site; announces the site's next round."""
    self._account["lost"] += 1
    self._leave_out(t)
    self._link.ready(self._calendar.first_after(t))

  def _restore(self, t: int, number: int, state: TrainState) -> TrainState:
    """Begins again after step t, because the group refused the payload of a round.

    The parameters are the group's; the inner optimizer and the compressor begin with
    fresh states. Payloads in flight still count, unless they are refused.
    """
    self._print(
      f"goes on at step {t} with the group's parameters: its payload of round {number}"
      " was refused."
    )
    self._account["restored"] += 1
    self._restored_at = self._since = t
    self._pending.clear()
    self._link.ready(self._calendar.first_after(t))
    as_before = lambda x, old_M: x.astype(old_M.dtype)
    params = jax.tree.map(as_before, self.params(state), state.params)
    fresh = self.init(params=params)
    outer = dataclasses.replace(state.outer, codec_state=fresh.outer.codec_state)
    return _at_step(dataclasses.replace(fresh, outer=outer), t)

  def _catch_up(self, t: int, state: TrainState) -> tuple[int, TrainState]:
    """Merges the rounds that closed beyond step t, and goes to the group's step."""
    rounds = self._calendar.rounds
    while (published := self._link.newest()[1]) > self._applied:  # More may close.
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
    self._leave_out(step)  # Meanwhile the other sites have trained on.
    self._link.ready(self._calendar.first_after(step))
    return step, _at_step(state, step)

  def _take(self, state: TrainState, welcome: Welcome) -> TrainState:
    """Takes the group's outer state from a snapshot, and starts from it."""
    outer = outer_state.from_bytes(welcome.snapshot, state.outer)
    whole, params_M = dataclasses.replace(self.sync, alpha=0.0), state.params
    for p, theta in enumerate(outer.theta):
      params_M = whole.merge(p, params_M, theta, (True,) * whole.replicas)
    self._applied = self._taken = welcome.round
    self._pending.clear()
    self._jobs.close()
    self._jobs = self._new_jobs()
    return dataclasses.replace(state, params=params_M, outer=outer)

  def _new_jobs(self) -> Jobs:
    # A thread updates the outer state while the devices train. But several processes
    # must receive together, so they update the outer state only when a round is due.
    is_alone = self.part.peers.count == 1
    return Jobs(futures.ThreadPoolExecutor(1, "exchange") if is_alone else None)

  def _print(self, line: str) -> None:
    if self.part.peers.index == 0:
      print_line(f"Site {self.part.index} {line}")


def _at_step(state: TrainState, t: int) -> TrainState:
  """Sets the step of the learning rate schedule to t; moments keep their own counts."""
  return dataclasses.replace(state, opt_state=at_step(state.opt_state, t))
