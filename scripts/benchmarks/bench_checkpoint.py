"""Measures saving and reading one replica's parameters, and their checksums.

python scripts/benchmarks/bench_checkpoint.py --config=chinchilla:1.3B --workdir=runs/b

Writes the parameters twice: as a run does, and compressed, as Orbax does by default.
"""

import contextlib
import pathlib
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import flags, logging
from ml_collections import config_flags

from diloco.algorithm.state import abstract_params
from diloco.checkpoint import checksums, damage
from diloco.checkpoint.record import folder_of
from diloco.config import command_line, resolve
from diloco.processes.peers import Peers
from diloco.util import command

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config of the model.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for a temporary folder.")


def main(argv) -> None:
  del argv
  logging.set_verbosity(logging.ERROR)
  around = command.make_folder(_WORKDIR.value, "--workdir").absolute()
  with tempfile.TemporaryDirectory(dir=around) as workdir:
    measure(pathlib.Path(workdir))


def measure(workdir: pathlib.Path) -> None:
  """Prints the times and sizes of saving to a folder, and of reading."""
  values = np.random.default_rng(0).standard_normal(1 << 24, np.float32)
  fill = lambda x: jax.device_put(np.resize(values, x.shape).astype(x.dtype))
  tree = {"params": jax.tree.map(fill, abstract_params(resolve(_CONFIG.value)))}
  place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  like = jax.tree.map(place, tree)
  size = sum(x.nbytes for x in jax.tree.leaves(tree))
  print(f"{size:,} bytes in {len(jax.tree.leaves(tree))} arrays")

  with timed("checksums before saving"):
    sums = checksums.compute(tree, Peers())
  for step, name in enumerate(("", ", compressed")):
    folder = folder_of(workdir) / str(step) / "state"
    handler = ocp.PyTreeCheckpointHandler(use_compression=bool(step))
    with timed("write" + name):
      ocp.Checkpointer(handler).save(folder, args=ocp.args.PyTreeSave(tree))
    written = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    print(f"{written:,} bytes written")
  tree = None  # Frees the memory.
  for step, name in enumerate(("", ", compressed")):
    with timed("read" + name):
      found = jax.block_until_ready(damage.read_arrays(workdir, step, like))
    with timed("checksums after reading"):
      assert not checksums.changed(found, sums, Peers())
    found = None


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
  """Prints how long the block takes."""
  start = time.perf_counter()
  yield
  print(f"{name:<24} {time.perf_counter() - start:>7.2f} s", flush=True)


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "workdir"])
  command_line.run(main)
