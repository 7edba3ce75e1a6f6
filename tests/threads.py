"""Processes of a run that are threads of the test."""

import contextlib
import itertools
import os
import socket
import threading

from diloco.processes.peers import Peers, ProcessLost

# Linux gives outgoing connections ports from 32768 on, so nobody takes these meanwhile.
_PORTS = itertools.count(20_000 + os.getpid() * 101 % 12_000)


def free_port() -> int:
  """Finds a port for a server that starts later."""
  while True:
    with socket.socket() as s, contextlib.suppress(OSError):
      s.bind(("", port := next(_PORTS)))
      return port


def at_once(run, indices) -> dict:
  """Calls run(i) for all indices at once: {i: its result, or the ProcessLost}."""
  found = {}

  def call(i):
    try:
      found[i] = run(i)
    except ProcessLost as error:
      found[i] = error

  thread = lambda i: threading.Thread(target=call, args=(i,), name=f"process {i}")
  threads = [thread(i) for i in indices]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert found.keys() == {*indices}, "a thread raised another error, or hangs"
  return found


def meet(indices, count, timeout=20, port=None) -> dict:
  """Calls `Peers.meet` in each process: {i: its Peers, or the ProcessLost}."""
  address = f"localhost:{port or free_port()}"
  return at_once(lambda i: Peers.meet(address, count, i, timeout), indices)


def connected(count: int) -> list[Peers]:
  found = meet(range(count), count)
  return [found[i] for i in range(count)]


def close(peers) -> None:
  """Ends processes after they have gathered their numbers."""
  gathered = at_once(lambda i: peers[i].all_gather(i), range(len(peers)))
  assert gathered == {i: [*range(len(peers))] for i in range(len(peers))}
  at_once(lambda i: peers[i].close(), range(len(peers)))
