"""The connection of a site of several processes: process 0 has it and tells the rest.

All processes of the site call every method together, in the same order, so that all of
them merge the same rounds after the same steps.
"""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from diloco.contrib.sites.link import Block, Closed, Link, Welcome
from diloco.processes.peers import Peers
from diloco.util.types import PyTree


class SharedLink:
  """Has the methods of a `Link`."""

  def __init__(self, link: Link | None, peers: Peers):
    """Shares a connection.

    Args:
      link: the connection; None on all processes but process 0.
      peers: the processes of this site.
    """
    self._link, self._peers = link, peers

  @property
  def inside(self) -> int:
    return self._link.inside if self._link else 0

  @property
  def reconnects(self) -> int:
    return self._link.reconnects if self._link else 0

  def join(self, **state: object) -> Welcome:
    found = self._welcome(self._link.join(**state) if self._link else None)
    assert found is not None
    return found

  def ready(self, first: int, arrival: dict[str, float] | None = None) -> None:
    if self._link:
      self._link.ready(first, arrival)

  def wait_for_start(self, stopping: Callable[[], bool]) -> bool:
    return self._peers.broadcast(self._link and self._link.wait_for_start(stopping))

  def send(self, number: int, data: bytes, fields: dict[str, Any]) -> None:
    if self._link:
      self._link.send(number, data, fields)

  def wait_until(self, number: int, stopping: Callable[[], bool]) -> bool:
    return self._peers.broadcast(self._link and self._link.wait_until(number, stopping))

  def closed(self, number: int) -> Closed:
    head, own = None, None
    if self._link:
      found = self._link.closed(number)
      payloads = found.payloads.values()
      tokens, sizes = list(found.tokens.items()), [len(x) for x in payloads]
      per_step = list(found.per_step.items())
      lent = list(found.lent.items())
      head = [found.fragment, tokens, sizes, found.refused, per_step, lent]
      own = b"".join(payloads)
    fragment, tokens, sizes, refused, per_step, lent = self._peers.broadcast(head)
    data = io.BytesIO(self._bytes(own, sum(sizes)) if sizes else b"")
    parts = {site: data.read(size) for (site, _), size in zip(tokens, sizes)}
    whole = (number, fragment, dict(tokens), parts, tuple(refused), dict(per_step))
    return Closed(*whole, {k: Block(*x) for k, x in lent})

  def newest(self) -> tuple[int, int]:
    received, published = self._peers.broadcast(self._link and self._link.newest())
    return received, published

  def welcome(self) -> Welcome | None:
    return self._welcome(self._link.welcome() if self._link else None)

  def forget(self, below: int) -> None:
    if self._link:
      self._link.forget(below)

  def applied(self, number: int, theta: PyTree, opt_state: PyTree) -> None:
    if self._link:
      self._link.applied(number, theta, opt_state)

  def offer(self, applied: int, outer: PyTree) -> None:
    if self._link:
      self._link.offer(applied, outer)

  def leave(self, reason: str) -> None:
    if self._link:
      self._link.leave(reason)

  def _welcome(self, own: Welcome | None) -> Welcome | None:
    of_0 = own and [own.round, own.data, own.skip, len(own.snapshot)]
    head = self._peers.broadcast(of_0)
    if head is None:
      return None
    number, data, skip, size = head
    snapshot = self._bytes(own.snapshot if own else None, size) if size else b""
    return Welcome(number, data, snapshot, skip)

  def _bytes(self, own: bytes | None, size: int) -> bytes:
    """Returns the bytes of process 0, which may be many."""
    values = np.frombuffer(own or bytes(size), np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(values)).tobytes()
