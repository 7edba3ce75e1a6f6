"""Compares the bytes that the outer step reads and writes with the least possible.

  python scripts/benchmarks/count_bytes.py --config=configs/sample.py --chip=v5e

Compiles send, update and merge for one TPU or GPU, on a machine without it. A row for
each program: the bytes of main memory that the compiled program reads and writes
(`traffic.py`), the least possible, and their ratio. The fragment is that with
the largest payload; all replicas lie on the chip.
"""

import jax
import traffic
from absl import flags
from bench_step import least_bytes
from ml_collections import config_flags

from diloco.algorithm.make import make_plan
from diloco.aot import topology
from diloco.aot.programs import Programs
from diloco.config import command_line, resolve

_CONFIG = config_flags.DEFINE_config_file("config", None, "The config to compile.")
_CHIP = flags.DEFINE_enum(
  "chip", "v5e", ["v5e", "v6e", *topology.GPUS], "Chip to compile for."
)


def main(argv) -> None:
  del argv
  c = resolve(_CONFIG.value)
  grid = topology.TOPOLOGIES[_CHIP.value][0]
  devices = topology.describe(f"{_CHIP.value}:{grid}")
  mesh = topology.make_mesh(c, devices, slices=1)
  programs = Programs(c, mesh)
  with jax.set_mesh(mesh):
    fragment = make_plan(c, mesh).shapes[programs.fragment]
    for name, least in least_bytes(c, fragment).items():
      moved = traffic.nbytes(programs.lower[name]().compile().as_text())
      print(f"{name:<7} {moved:>14,} bytes   least {least:>13,}   {moved / least:.2f}")


if __name__ == "__main__":
  flags.mark_flag_as_required("config")
  command_line.run(main)
