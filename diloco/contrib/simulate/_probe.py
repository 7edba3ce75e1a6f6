"""Measures what `python -m diloco plan --probe` needs: a step, a sync, and the link.

The processes that train together start with the flags of `diloco.main`, for example by
`python -m diloco launch_local -n 2 -- plan --config=sample --probe`. All time the
compiled inner step at once, and the slowest counts; then what syncs compute. Then they
exchange payloads of some sizes as the trainer does (`diloco.wire.transport`): a line
through time over bytes has the latency and the rate. What the transport lacks of the
link is in both.
"""

import contextlib
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import optimize

from diloco.algorithm import optimizers
from diloco.algorithm.inner import inner_step
from diloco.algorithm.make import make_plan
from diloco.algorithm.state import init_state
from diloco.config import Config, changed
from diloco.contrib.simulate.plan import FORMATS
from diloco.data.batches import Batches
from diloco.errors import ConfigError
from diloco.mesh import sharding
from diloco.mesh.devices import make_mesh
from diloco.processes import distributed
from diloco.processes.agree import check_same_program
from diloco.processes.peers import Peers, ProcessLost
from diloco.spec import plugins, shapes, sizes
from diloco.wire import exchange
from diloco.wire.transport import ExchangeFailed, make_transport

_SECONDS = 3.0  # Of timed inner steps.
_BLOCK = 5  # Steps that are timed together, as the trainer does not wait for each.
_REPEATS = 5  # Exchanges of a size; the median counts.
# Before each exchange, in seconds: a run is silent between two syncs, too, and TCP
# begins slowly again after its shortest time-out, 0.2 s.
_PAUSE = 0.25
_FIRST, _MOST = 2**14, 2**26  # Bytes: the first message has at most, the last about.
# Seconds. A longer exchange is the last one; a shorter one of the largest fragment is
# not, because on a fast link noise would hide its bytes.
_LONG, _SHORT = 1.0, 0.03


class Line(NamedTuple):
  """seconds = latency + bytes / rate.

  Attributes:
    latency: seconds of each message.
    rate: bytes per second.
    residual: what is left, as a share of the times; both as root mean squares.
  """

  latency: float
  rate: float
  residual: float


def measure(args: dict[str, Any]) -> dict[str, Any]:
  """Measures with the other processes, if there are some; ends all but process 0.

  Args:
    args: `config`, and the flags by which `diloco.main` finds the other processes.

  Returns:
    step_time: seconds of an inner step, of all replicas at once.
    sync_time: seconds by which the syncs of all fragments lengthen a round.
    gbits, latency, residual: of the link, as in `Line`; only with several processes.
    All have four digits.
  """
  peers = Peers()
  try:
    peers = distributed.initialize(
      args.get("coordinator"),
      args.get("num_processes"),
      args.get("process_id"),
      auto=args.get("distributed") == "auto",
    )
    found = _measured(args["config"], peers, "gbits" in args)
    peers.close()
  except (ConfigError, ProcessLost, ExchangeFailed) as error:
    peers.fail(str(error), code=2 if isinstance(error, ConfigError) else 1)
  if peers.index:
    sys.exit()
  return {name: float(f"{value:.4g}") for name, value in found.items()}


def _measured(c: Config, peers: Peers, has_rate: bool) -> dict[str, float]:
  alone = peers.count == 1
  if alone and not has_rate:
    raise ConfigError(
      "--probe has one process, so there is no link to measure; start two, such as"
      " python -m diloco launch_local -n 2 -- plan --config=... --probe, or give"
      " --gbits."
    )
  if not alone and has_rate:
    raise ConfigError("--probe measures gbits between processes; leave out --gbits.")
  if not alone and plugins.TRANSPORTS[c.overlap.transport].make_part:
    raise ConfigError(
      f"overlap.transport is {c.overlap.transport}, which --probe cannot measure; set"
      " it to host, or give --gbits to one process."
    )
  check_same_program(c, peers)
  if alone:  # One replica trains here, the others elsewhere.
    own = {"replicas": 1, "train.batch_size": c.train.batch_size // c.replicas}
    c = changed(c, own | {"overlap.taus": (), "mesh.replica": 0})
  elif c.one_model:  # Its steps would exchange gradients.
    c = changed(c, {"algorithm": "streaming"})
  found = {"step_time": max(peers.all_gather(step_seconds(c)))}
  found["sync_time"] = max(peers.all_gather(sync_seconds(c, peers)))
  if not alone:
    line = _link(c, peers)
    found |= {"gbits": 8e-9 * line.rate, "latency": line.latency}
    found |= {"residual": line.residual}
  return found


def _link(c: Config, peers: Peers) -> Line:
  """Measures the link, at most three times: other jobs can hide a fast one.

  All processes have the same times, so they agree whether to repeat.
  """
  for _ in range(2):
    with contextlib.suppress(ConfigError):
      return fit(*zip(*_exchanges(c, peers)))
  return fit(*zip(*_exchanges(c, peers)))


def step_seconds(c: Config) -> float:
  """Returns the median seconds of an inner step of all replicas, with its batch."""
  mesh, blocks, end = make_mesh(c), list[float](), math.inf
  with jax.set_mesh(mesh), contextlib.closing(Batches(c, mesh)) as batches:
    state = init_state(c, mesh, make_plan(c, mesh))
    params, opt_state, tuned = state.params, state.opt_state, optimizers.tuned(c)
    while len(blocks) < 4 or time.perf_counter() < end:
      start = time.perf_counter()
      for tokens in itertools.islice(batches, _BLOCK):
        params, opt_state, metrics = inner_step(params, opt_state, tokens, tuned, c=c)
      jax.block_until_ready(metrics)
      end = min(end, time.perf_counter() + _SECONDS)  # The first block compiles.
      blocks.append((time.perf_counter() - start) / _BLOCK)
  return statistics.median(blocks[1:])


def sync_seconds(c: Config, peers: Peers) -> float:
  """Returns the seconds that the syncs of all fragments take from the inner steps.

  These are the seconds of send, update and merge on the devices. An exchange, and an
  update on hosts, counts only where inner steps run on CPUs, which it shares: by its
  CPU time, as it waits for the link.
  """
  mesh, total, on_cpus = make_mesh(c), 0.0, jax.default_backend() == "cpu"
  plan, clock, everyone = make_plan(c, mesh), time.perf_counter, [True] * c.replicas
  plan.transport.connect()
  with jax.set_mesh(mesh):
    state = init_state(c, mesh, plan)
    params, outer = state.params, state.outer
    for p, theta in enumerate(outer.theta):
      theta, opt_state = plan.placement.bring((theta, outer.opt_state[p]))
      codec_state, times = outer.codec_state[p], list[float]()
      for _ in range(1 + _REPEATS):  # The first one compiles.
        peers.all_gather(None)
        start = clock()
        payload, codec_state, _ = plan.send(1, p, params, theta, codec_state)
        jax.block_until_ready(payload)
        sent, cpus = clock() - start, time.process_time()
        payload = jax.block_until_ready(plan.transport.carry(payload))
        cpus, start = time.process_time() - cpus, clock()
        found = jax.block_until_ready(plan.update_with(payload, theta, opt_state))
        theta, opt_state, _ = found
        updated, start = clock() - start, clock()
        params = jax.block_until_ready(plan.merge(p, params, theta, everyone))
        shared = cpus + updated if on_cpus else updated * (not plan.placement.at_hosts)
        times.append(sent + shared + clock() - start)
      total += statistics.median(times[1:])
  return total


def _exchanges(c: Config, peers: Peers) -> Iterator[tuple[float, float]]:
  """Exchanges payloads as large as those of fragments; see also `_LONG`.

  Yields:
    Bytes that a replica sends, and the median seconds until all have all payloads.
  """
  mesh = make_mesh(c)
  transport, fsdp = make_transport(c.overlap.transport, mesh), mesh.shape[sharding.FSDP]
  transport.connect()
  rng, fragments = np.random.default_rng(0), message_sizes(c)
  larger = [fragments[-1] * 4**k for k in range(1, 14)]
  for i, size in enumerate([*fragments, *(n for n in larger if n <= _MOST)]):
    payload = rng.integers(0, 256, (c.replicas, fsdp, -(-size // fsdp)), np.uint8)
    sent, times = sharding.place(payload, exchange.encoded(mesh)), list[float]()
    for _ in range(1 + _REPEATS):  # The first one compiles.
      time.sleep(_PAUSE)
      peers.all_gather(None)
      start = time.perf_counter()
      jax.block_until_ready(transport.carry(sent))
      times.append(time.perf_counter() - start)
    seconds = max(peers.all_gather(statistics.median(times[1:])))
    yield payload[0].size * sizes.copies("gather", c.replicas), seconds
    if i and seconds > (_LONG if size < fragments[-1] else _SHORT):
      return


def message_sizes(c: Config) -> list[int]:
  """Returns bytes: four times more each, up to the largest fragment of the formats."""
  wires = [changed(c, {"wire.format": name}).wire for name in FORMATS]
  whole = shapes.parameters(c.model)
  found = [
    sizes.payload_bytes(wire, fragment.shapes(whole))
    for wire in wires
    for fragment in c.make_fragments()
  ]
  most, found = max(found), [min(*found, _FIRST)]
  while 4 * found[-1] < most:
    found.append(4 * found[-1])
  return [*found, most]


def fit(sent: Sequence[float], seconds: Sequence[float]) -> Line:
  """Fits latency and rate by least squares; neither is negative.

  Args:
    sent: bytes of each message.
    seconds: its time.

  Raises:
    ConfigError: larger messages take no longer.
  """
  columns = np.stack([np.ones(len(sent)), sent], axis=1)
  (latency, per_byte), norm = optimize.nnls(columns, np.array(seconds))
  if not per_byte:
    raise ConfigError(
      f"--probe saw messages of {max(sent):.4g} bytes take no longer than those of"
      f" {min(sent):.4g}; repeat it on an idle machine, or give --gbits."
    )
  return Line(latency, 1 / per_byte, norm / np.linalg.norm(seconds))
