"""Writes and reads checkpoints in a bucket; every process does its own part.

Each array is a Zarr array (version 2, not compressed), so that other programs can read
it. `checkpoints/STEP/NAME/.zarray` describes an array, and each chunk is a file. A
chunk never crosses the border of a shard: a process writes the chunks of its shards,
and reads the chunks that it needs. `checkpoints/STEP.json` is the record. The record is
written last: without it, a checkpoint does not count. No local disk holds any part of a
checkpoint.
"""

import concurrent.futures
import itertools
import json
import math
import pathlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco.checkpoint.checksums import named
from diloco.checkpoint.record import FOLDER, steps_of
from diloco.processes.peers import Peers
from diloco.util import remote
from diloco.util.types import Json, PyTree

_File = tuple[str, np.ndarray]  # Name and content of a file.
_CHUNK = 1 << 26  # Limit of a chunk's bytes, if the shape of the shards allows it.


class BucketManager:
  """Takes the place of Orbax's CheckpointManager if the workdir is in a bucket."""

  def __init__(self, workdir: pathlib.Path, keep: int, peers: Peers):
    """Takes the folder over from an earlier run.

    Args:
      workdir: the local copy of the folder (`remote.local_copy`).
      keep: number of checkpoints to keep.
      peers: all processes of the run; every process must make this object.
    """
    bucket = remote.bucket_of(workdir)
    assert bucket
    self._workdir, self._bucket, self._keep, self._peers = workdir, bucket, keep, peers
    self._requests = concurrent.futures.ThreadPoolExecutor(remote.REQUESTS)
    self._writer = concurrent.futures.ThreadPoolExecutor(1)
    self._saving: concurrent.futures.Future | None = None
    self._token = peers.broadcast(secrets.token_hex(8))  # Id of this start of the run.
    if peers.index == 0:
      self._mirror = remote.Mirror(workdir, bucket)
      # No process writes before `reload` returns. The newest checkpoint may be damaged.
      self._delete_old(last=sys.maxsize, keep=sys.maxsize)
      print(f"The log is in {workdir} until a checkpoint copies it.", file=sys.stderr)
    self.reload()

  def reload(self) -> None:
    """Finds the newest checkpoint; all processes wait for the answer of process 0."""
    self._latest = self._peers.broadcast(next(iter(steps_of(self._workdir)), None))

  def latest_step(self) -> int | None:
    return self._latest

  def save(self, step: int, args: Any) -> bool:
    """Starts to save a checkpoint; copies the arrays before it returns.

    Args:
      args: `ocp.args.Composite` with the arrays as `state` and the JSON as `record`.

    Returns:
      False if a checkpoint of this step or a later step exists.
    """
    if self._latest is not None and step <= self._latest:
      return False
    chunks = list[_File]()
    for name, x in named(args.state.item).items():
      chunks += _chunks_here(x, f"{FOLDER}/{step}/{name}")
      if self._peers.index == 0:
        text = np.frombuffer(json.dumps(_describe(x)).encode(), np.uint8)
        chunks.append((f"{FOLDER}/{step}/{name}/.zarray", text))
    self._latest = step
    self._saving = self._writer.submit(self._write, step, chunks, args.record.item)
    return True

  def wait_until_finished(self) -> None:
    """Waits until the newest checkpoint is complete; raises the error if it failed."""
    if saving := self._saving:
      self._saving = None
      saving.result()

  def close(self) -> None:
    """Copies the run's last files to the bucket, and ends the threads."""
    try:
      self.wait_until_finished()
      if self._peers.index == 0:
        self._mirror.push()
    finally:
      self._writer.shutdown()
      self._requests.shutdown()

  def set_aside(self, step: int, name: str) -> None:
    """Moves a checkpoint to unreadable/NAME."""
    inside = self._bucket.names(f"{FOLDER}/{step}")
    parts = [f"{step}.json", *(f"{step}/{x}" for x in inside)]
    move = lambda x: self._bucket.move(f"{FOLDER}/{x}", f"unreadable/{name}/{x}")
    list(self._requests.map(move, parts))

  def _write(self, step: int, chunks: list[_File], record: Any) -> None:
    if self._peers.index == 0:
      self._mirror.check()  # Another run's checkpoint of this step may be there.
    put = lambda chunk: self._bucket.put(chunk[0], chunk[1].tobytes())
    list(self._requests.map(put, chunks))
    done = f"{FOLDER}/{step}/.done/{self._token}"
    if self._peers.index:
      self._bucket.put(f"{done}/{self._peers.index}", b"")
      return
    # Waits without `Peers`, whose messages must stay in the training thread's order.
    while len(self._bucket.names(done)) < self._peers.count - 1:
      time.sleep(self._bucket.poll_s)
    self._mirror.push()  # The log goes first: a resumed run needs it.
    self._bucket.put(f"{FOLDER}/{step}.json", json.dumps(record).encode())
    self._delete_old(last=step, keep=self._keep)

  def _delete_old(self, last: int, keep: int) -> None:
    """Deletes all but the newest checkpoints, and unfinished folders of killed runs.

    Args:
      keep: number of checkpoints to keep.
      last: folders of later steps stay, because other processes may be writing them.
    """
    steps = steps_of(self._workdir)
    kept = {str(step) for step in steps[:keep]}
    for step in steps[keep:]:
      self._bucket.delete(f"{FOLDER}/{step}.json")
    folders = [x for x in self._bucket.children(FOLDER)[1] if x.isdigit()]
    for folder in {x for x in folders if int(x) <= last} - kept:
      names = self._bucket.listed(f"{FOLDER}/{folder}")
      list(self._requests.map(self._bucket.delete, names))


def read_arrays(workdir: pathlib.Path, step: int, like: PyTree) -> PyTree:
  """Does the work of `damage.read_arrays` for a bucket with the local copy `workdir`.

  Raises:
    ValueError: an array is missing, or its shape differs from that in `like`.
    OSError: the network fails.
  """
  bucket = remote.bucket_of(workdir)
  assert bucket

  def get(name: str) -> bytes:
    data = bucket.get(f"{FOLDER}/{step}/{name}")
    if data is None:
      raise ValueError(f"{name} is missing")
    return data

  with concurrent.futures.ThreadPoolExecutor(remote.REQUESTS) as pool:
    arrays = [_read(name, x, get, pool) for name, x in named(like).items()]
  return jax.tree.unflatten(jax.tree.structure(like), arrays)


def _read(
  name: str,
  x: Any,
  get: Callable[[str], bytes],
  pool: concurrent.futures.Executor,
) -> jax.Array:
  described = json.loads(get(f"{name}/.zarray"))
  dtype, chunks = jnp.dtype(described["dtype"]), described["chunks"]
  if described["shape"] != [*x.shape]:
    raise ValueError(f"{name} has the shape {described['shape']}, not {[*x.shape]}")
  read = dict[str, np.ndarray]()  # A cache: several devices may hold the same part.

  def part(index: Any) -> np.ndarray:
    if repr(index) not in read:
      spans = [range(*s.indices(size)) for s, size in zip(index, x.shape)]
      places = [range(s.start // c, -(-s.stop // c)) for s, c in zip(spans, chunks)]
      out = np.empty([len(s) for s in spans], dtype)

      def fill(place: tuple[int, ...]) -> None:
        data = np.frombuffer(get(f"{name}/{_key(place)}"), dtype).reshape(chunks)
        begins = [p * c for p, c in zip(place, chunks)]
        both = [
          range(max(s.start, b), min(s.stop, b + c))
          for s, b, c in zip(spans, begins, chunks)
        ]
        cut = lambda starts: tuple(
          slice(r.start - s, r.stop - s) for r, s in zip(both, starts)
        )
        out[cut([s.start for s in spans])] = data[cut(begins)]

      list(pool.map(fill, itertools.product(*places)))
      read[repr(index)] = out.astype(x.dtype, copy=False)
    return read[repr(index)]

  return jax.make_array_from_callback(x.shape, x.sharding, part)


def _chunks_here(x: jax.Array, name: str) -> Iterator[_File]:
  """Yields file name and content, a copy, for each chunk that this process writes."""
  chunks = _chunk_shape(x)
  for shard in x.addressable_shards:
    if shard.replica_id == 0 and x.size:
      data = np.array(shard.data)  # A copy: the devices may reuse the memory.
      begins = [s.start or 0 for s in shard.index]
      counts = [range(n // c) for n, c in zip(data.shape, chunks)]
      for place in itertools.product(*counts):
        cut = tuple(slice(p * c, (p + 1) * c) for p, c in zip(place, chunks))
        whole = [b // c + p for b, c, p in zip(begins, chunks, place)]
        yield f"{name}/{_key(whole)}", data[cut]


def _chunk_shape(x: jax.Array) -> list[int]:
  """Divides the shards along their first axes until a chunk is small enough."""
  shape = list(x.sharding.shard_shape(x.shape))
  for axis, size in enumerate(shape):
    least = -(-math.prod(shape) * x.dtype.itemsize // _CHUNK)
    # Leaves the axis whole if only 4 * `least` or more pieces divide it: each piece is
    # a file.
    fitting = (n for n in range(least, 4 * least) if size % n == 0)
    shape[axis] = 1 if size <= least else size // next(fitting, 1)
  return [max(n, 1) for n in shape]


def _describe(x: jax.Array) -> Json:
  """Returns the content of an array's .zarray file."""
  dtype = np.dtype(x.dtype)
  return {
    "zarr_format": 2,
    "shape": x.shape,
    "chunks": _chunk_shape(x),
    "dtype": dtype.str if dtype.isbuiltin == 1 else dtype.name,  # Such as bfloat16.
    "compressor": None,
    "fill_value": None,
    "order": "C",
    "filters": None,
  }


def _key(place: Any) -> str:
  return ".".join(map(str, place)) or "0"
