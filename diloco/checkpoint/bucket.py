"""Checkpoints in a bucket, which every process writes and reads by itself.

Each array is a Zarr array (version 2, not compressed), so that other programs can read
it: `checkpoints/STEP/NAME/.zarray` describes it, and a chunk is a file. A chunk never
crosses the border of a shard: a process writes the chunks that it holds, and reads
those that it needs. `checkpoints/STEP.json` is the record. It is written last; without
it, there is no checkpoint. No local disk holds any part of a checkpoint.
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

_File = tuple[str, np.ndarray]  # Its name and its content.
_CHUNK = 1 << 26  # Bytes of a chunk at most, if the shape of the shards allows it.


class BucketManager:
  """Does for a bucket what Orbax's CheckpointManager does for a folder."""

  def __init__(self, workdir: pathlib.Path, keep: int, peers: Peers):
    """Takes the folder over from a run that was there before.

    Args:
      workdir: the local copy of the folder (`remote.local_copy`).
      keep: how many checkpoints stay.
      peers: the processes, which must all make this object.
    """
    bucket = remote.bucket_of(workdir)
    assert bucket
    self._workdir, self._bucket, self._keep, self._peers = workdir, bucket, keep, peers
    self._requests = concurrent.futures.ThreadPoolExecutor(remote.REQUESTS)
    self._writer = concurrent.futures.ThreadPoolExecutor(1)
    self._saving: concurrent.futures.Future | None = None
    self._token = peers.broadcast(secrets.token_hex(8))  # Of this start of the run.
    if peers.index == 0:
      self._mirror = remote.Mirror(workdir, bucket)
      self._delete_old(last=sys.maxsize)  # Before any process writes: see `reload`.
      print(f"The log is in {workdir} until a checkpoint copies it.", file=sys.stderr)
    self.reload()

  def reload(self) -> None:
    """Looks for the newest checkpoint; all processes wait for process 0."""
    self._latest = self._peers.broadcast(next(iter(steps_of(self._workdir)), None))

  def latest_step(self) -> int | None:
    return self._latest

  def save(self, step: int, args: Any) -> bool:
    """Starts to save; copies the arrays before it returns.

    Args:
      args: `ocp.args.Composite` of the arrays, `state`, and the JSON, `record`.

    Returns:
      False if there is a checkpoint of this step or a later one.
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
    """Waits until the newest checkpoint is complete; raises what its writing raised."""
    if saving := self._saving:
      self._saving = None
      saving.result()

  def close(self) -> None:
    """Ends the threads; then the bucket has all files of the run."""
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
    put = lambda chunk: self._bucket.put(chunk[0], chunk[1].tobytes())
    list(self._requests.map(put, chunks))
    done = f"{FOLDER}/{step}/.done/{self._token}"
    if self._peers.index:
      self._bucket.put(f"{done}/{self._peers.index}", b"")
      return
    # Not by `Peers`, whose messages the training thread sends and awaits in its order.
    while len(self._bucket.names(done)) < self._peers.count - 1:
      time.sleep(self._bucket.poll_s)
    self._mirror.push()  # A run that goes on from this checkpoint needs its log.
    self._bucket.put(f"{FOLDER}/{step}.json", json.dumps(record).encode())
    self._delete_old(last=step)

  def _delete_old(self, last: int) -> None:
    """Deletes all but the newest checkpoints, also what killed runs have left.

    Args:
      last: folders of later steps stay: another process may write to them already.
    """
    steps = steps_of(self._workdir)
    kept = {str(step) for step in steps[: self._keep]}
    for step in steps[self._keep :]:
      self._bucket.delete(f"{FOLDER}/{step}.json")
    folders = [x for x in self._bucket.children(FOLDER)[1] if x.isdigit()]
    for folder in {x for x in folders if int(x) <= last} - kept:
      names = self._bucket.listed(f"{FOLDER}/{folder}")
      list(self._requests.map(self._bucket.delete, names))


def read_arrays(workdir: pathlib.Path, step: int, like: PyTree) -> PyTree:
  """Reads arrays as `damage.read_arrays`, of a bucket; `workdir` is its local copy.

  Raises:
    ValueError: an array is missing, or has another shape.
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
    found = [_read(name, x, get, pool) for name, x in named(like).items()]
  return jax.tree.unflatten(jax.tree.structure(like), found)


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
  read = dict[str, np.ndarray]()  # Several devices may hold the same part.

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
  """Yields file name and a copy of the data of each chunk that this process writes."""
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
  """Cuts the shards along their first axes until a chunk is small enough."""
  shape = list(x.sharding.shard_shape(x.shape))
  for axis, size in enumerate(shape):
    least = -(-math.prod(shape) * x.dtype.itemsize // _CHUNK)
    # An axis that only far more pieces divide stays whole: each piece is a file.
    fitting = (n for n in range(least, 4 * least) if size % n == 0)
    shape[axis] = 1 if size <= least else size // next(fitting, 1)
  return [max(n, 1) for n in shape]


def _describe(x: jax.Array) -> Json:
  """Returns the content of .zarray."""
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
