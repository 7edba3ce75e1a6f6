"""The outer step of a closed round, and the outer state as bytes.

Every site runs the same program on a CPU with the same payloads. So all sites hold
equal outer states, and only new sites receive float32 values.
"""

import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.algorithm import sync_metrics
from diloco.algorithm.state import OuterState
from diloco.algorithm.streaming import Streaming
from diloco.algorithm.sync_metrics import Metrics
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.group.journal import Closed
from diloco.mesh import sharding
from diloco.util.types import PyTree


def apply(
  sync: Streaming, calendar: Calendar, closed: Closed, theta: PyTree, opt_state: PyTree
) -> tuple[PyTree, PyTree, Metrics]:
  """Runs lines 10 and 11 of Algorithm 2 on a CPU, with the payloads of a closed round.

  Payloads are uint8 [replicas of the site, 1, bytes]. Their weights in the mean are
  those of Decoupled DiLoCo (arXiv 2604.21428): tokens x tokens per step.

  Args:
    sync: how the replicas of a site are synchronised.
    theta, opt_state: outer parameters and optimizer state of the fragment.

  Returns:
    New theta, new opt_state, metrics float32 [].
  """
  if not closed.payloads:  # All payloads were refused.
    none = jnp.float32(0)
    return theta, opt_state, sync_metrics.of_update(none, none, cosine=None)
  mesh = sync.place.mesh
  payload = place(sync, calendar, closed.fragment, closed.payloads)
  weights = np.zeros((calendar.sites, len(payload) // calendar.sites), np.float32)
  most = max(closed.per_step.values(), default=1)
  for site, tokens in closed.tokens.items():
    # In units of the largest tokens per step: weights of equal batches are integers.
    weights[site] = tokens * closed.per_step.get(site, most) / most
  # Equal weights become the plain mean, so that no bit differs from other transports.
  equal = bool((weights == weights[0]).all())
  with jax.set_mesh(mesh):
    return sync.lines_10_11(
      theta,
      opt_state,
      payload,
      sync.tuned,
      None if equal else weights.reshape(-1),
      wire=sync.wire,
      outer=sync.outer,
      mesh=mesh,
    )


def place(
  sync: Streaming, calendar: Calendar, p: int, payloads: Mapping[int, bytes]
) -> jax.Array:
  """Puts the payloads {site: bytes} of fragment p on the CPU, in the sites' order.

  Absent sites have payloads of zeros, so that one program serves any number of sites.
  """
  n, *shape = sync.payload(p, fsdp=1).shape
  codes = np.zeros((calendar.sites, n, *shape), np.uint8)
  for site, data in payloads.items():
    codes[site] = np.frombuffer(data, np.uint8).reshape(n, *shape)
  whole = NamedSharding(sync.place.mesh, P())
  return sharding.place(codes.reshape(-1, *shape), whole)


def digests(state: OuterState) -> list[int]:
  """Returns a CRC-32 of each fragment's outer parameters and optimizer state."""
  return [digest(*parts) for parts in zip(state.theta, state.opt_state)]


def digest(theta: PyTree, opt_state: PyTree) -> int:
  """Returns the CRC-32 of a fragment's outer state."""
  sum_ = 0
  for leaf in jax.tree.leaves((theta, opt_state)):
    sum_ = zlib.crc32(_host(leaf).data, sum_)  # `.data` copies no array.
  return sum_


def to_bytes(state: OuterState) -> bytes:
  """Writes theta and opt_state of all fragments, in the order of their trees."""
  leaves = jax.tree.leaves((state.theta, state.opt_state))
  return b"".join(_host(leaf).tobytes() for leaf in leaves)


def from_bytes(data: bytes, state: OuterState) -> OuterState:
  """Reads what `to_bytes` has written.

  Args:
    state: an outer state with arrays of the same shapes, or only the shapes.

  Returns:
    The state with new arrays, sharded like the old (on the CPU); nothing in flight.
  """
  leaves, structure = jax.tree.flatten((state.theta, state.opt_state))
  arrays, start = [], 0
  for x in leaves:
    values = np.frombuffer(data, x.dtype, x.size, start).reshape(x.shape)
    arrays.append(sharding.place(values, x.sharding))
    start += values.nbytes
  theta, opt_state = jax.tree.unflatten(structure, arrays)
  return OuterState(theta, opt_state, state.codec_state, {})


def _host(x: jax.Array) -> np.ndarray:
  return np.asarray(x.addressable_data(0))
