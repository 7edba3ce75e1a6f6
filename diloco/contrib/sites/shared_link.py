"""The link of a site with several processes: process 0 has it and tells the others.

All processes of the site call every method together, in the same order, so that all of
them merge the same rounds after the same steps.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from diloco.contrib.sites.group.journal import Closed, closed_of, header_of
from diloco.contrib.sites.group.link import Link, Welcome
from diloco.processes.peers import Peers


def _tell(name: str) -> Callable[..., None]:
  """Makes a method that calls the link's method, on process 0 only."""

  def method(self: "SharedLink", *args: Any) -> None:
    if self._link:
      getattr(self._link, name)(*args)

  return method


def _ask(name: str) -> Callable[..., Any]:
  """Makes a method that calls the link on process 0; all processes get the result."""

  def method(self: "SharedLink", *args: Any) -> Any:
    return self._peers.broadcast(self._link and getattr(self._link, name)(*args))

  return method


class SharedLink:
  """Has the methods of a `Link`."""

  ready, send, applied = _tell("ready"), _tell("send"), _tell("applied")
  offer, leave = _tell("offer"), _tell("leave")
  wait_for_start, wait_until = _ask("wait_for_start"), _ask("wait_until")
  newest, absent = _ask("newest"), _ask("absent")

  def __init__(self, link: Link | None, peers: Peers):
    """Shares a link.

    Args:
      link: the link; None on all processes but process 0.
      peers: the processes of this site.
    """
    self._link, self._peers = link, peers

  def join(
    self, applied: int, digests: list[int], stopping: Callable[[], bool]
  ) -> Welcome | None:
    link = self._link
    return self._share(link.join(applied, digests, stopping) if link else None)

  def closed(self, number: int) -> Closed:
    header, body = None, None
    if self._link:
      closed = self._link.closed(number)
      header, body = header_of(closed), b"".join(closed.payloads.values())
    header = self._peers.broadcast(header)
    size = sum(header["payloads"].values())
    return closed_of(header, self._bytes(body, size) if size else b"")

  def welcome(self) -> Welcome | None:
    return self._share(self._link.welcome() if self._link else None)

  def _share(self, welcome: Welcome | None) -> Welcome | None:
    of_0 = welcome and [welcome.round, welcome.data, len(welcome.snapshot)]
    head = self._peers.broadcast(of_0)
    if head is None:
      return None
    number, data, size = head
    snapshot = welcome.snapshot if welcome else None
    return Welcome(number, data, self._bytes(snapshot, size) if size else b"")

  def _bytes(self, data: bytes | None, size: int) -> bytes:
    """Returns the bytes of process 0 on every process; they may be large."""
    values = np.frombuffer(data or bytes(size), np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(values)).tobytes()
