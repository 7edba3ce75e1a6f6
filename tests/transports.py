"""Two processes exchange random values; started by wire/test_transport.py.

usage: transports.py NUMBER ADDRESS, with four CPU devices per process
"""

import json
import os
import pathlib
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.mesh.sharding import FSDP, REPLICA, mesh_of, place, shardings
from diloco.wire import exchange, transport

# Row r of the mesh holds a group of replicas on two devices of process OWNERS[r].
OWNERS = (1, 0, 0, 1)
# Payloads (replicas, shards, bytes); those of the last two come from other meshes.
SHAPES = ((4, 2, 3), (8, 2, 5), (8, 1, 3), (4, 4, 3))


def make_mesh() -> Mesh:
  devices = {p: iter(jax.local_devices(p)) for p in set(OWNERS)}
  grid = [[next(devices[p]), next(devices[p])] for p in OWNERS]
  return mesh_of(np.asarray(grid))


def connections() -> int:
  """Counts the TCP connections that this process has open."""
  files = pathlib.Path("/proc/self/fd").iterdir()
  sockets = {os.readlink(file) for file in files if file.is_socket()}
  tables = [pathlib.Path(f"/proc/self/net/{name}") for name in ("tcp", "tcp6")]
  rows = [x.split() for t in tables for x in t.read_text().splitlines()[1:]]
  established = "01"
  return sum(x[3] == established and f"socket:[{x[9]}]" in sockets for x in rows)


def carry(t: transport.Transport, mesh: Mesh, shape: tuple[int, ...]) -> dict:
  """Carries one payload: whether all values arrive, and how they are sharded."""
  values = np.random.default_rng(shape).integers(0, 256, shape, dtype=np.uint8)
  own = shape[1] == mesh.shape[FSDP]
  payload = place(values, NamedSharding(mesh, P(REPLICA, FSDP) if own else P(REPLICA)))
  found = t.carry(payload)
  result = {
    "values": found.shape == shape and holds(found, lambda part: values[part.index])
  }
  if t.hosts:
    result["everywhere"] = found.sharding == NamedSharding(t.hosts, P())
    return result
  if own:
    place_of_all = exchange.transmitted(mesh)
    result["everywhere"] = found.sharding.is_equivalent_to(place_of_all, found.ndim)
  return result


def reduce(mesh: Mesh) -> bool:
  """Returns whether every device gets its part of the mean of eight replicas."""
  rng = np.random.default_rng(0)
  # fsdp shards an axis of 4, but not of 5. The sums of small integers are exact.
  draw = lambda *shape: rng.integers(-9, 9, (8, *shape)).astype(np.float32)
  values_M = {"blocks": {"w": draw(3, 4, 2), "odd": draw(3, 5)}, "embed": draw(4, 3)}
  places = shardings(values_M, mesh, (REPLICA,))
  mean = exchange.all_reduce(mesh, jax.tree.map(place, values_M, places))
  expected = jax.tree.map(lambda x_M: x_M.mean(axis=0), values_M)
  same = lambda x, at, value: (
    x.sharding.is_equivalent_to(at, x.ndim) and holds(x, lambda part: value[part.index])
  )
  places = shardings(expected, mesh)
  return all(jax.tree.leaves(jax.tree.map(same, mean, places, expected)))


def holds(x: jax.Array, expected) -> bool:
  """Returns whether every part on this process's devices is `expected(part)`."""
  return all(np.array_equal(part.data, expected(part)) for part in x.addressable_shards)


def main() -> None:
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[1]))
  mesh, results = make_mesh(), {}
  with jax.set_mesh(mesh):
    for name, t in {
      "device": transport.DeviceTransport(mesh),
      "host": transport.HostTransport(mesh),
    }.items():
      opened = [connections()]
      t.connect()
      opened.append(connections())
      carried = {str(shape): carry(t, mesh, shape) for shape in SHAPES}
      opened.append(connections())
      results[name] = {"connections": opened, "carried": carried}
      results[name] |= {"moves": t.moves, "overlaps": t.overlaps}
    payload = place(np.zeros((8, 2, 1), np.uint8), exchange.encoded(mesh))
    unpacked = transport.DeviceTransport(mesh, packed=False)
    results["psum carries"] = unpacked.carry(payload) is not payload
    results["mean"] = reduce(mesh)
  print(json.dumps(results), flush=True)
  jax.distributed.shutdown()


if __name__ == "__main__":
  main()
