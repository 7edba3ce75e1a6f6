"""Dry run for TPUs: compiles a config's training programs on a machine without one.

python -m diloco.aot --config=configs/chinchilla.py:1.3B --topology=v5e:4x4 --slices=2
python -m diloco.aot --config=configs/chinchilla.py:1.3B --topology=v5e --slices=2

The first prints memory, FLOPs, compile time, bytes between replicas and overlap of
each program; the second finds the smallest slices on which training fits. Needs the
extra `tpu`; see docs/aot.md.
"""

import os

from absl import flags
from ml_collections import config_flags

from diloco.config import command_line

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "A file with get_config(), for example configs/sample.py."
)
_TOPOLOGY = flags.DEFINE_string(
  "topology",
  None,
  "Chip and grid of a slice, for example v5e:16x16; a chip alone: find the smallest.",
)
_SLICES = flags.DEFINE_integer(
  "slices", 1, "Slices of that shape, joined by the data-centre network."
)
_QUICK = flags.DEFINE_bool(
  "quick", False, "XLA's least effort: sooner, about as much memory, no overlap."
)


def main(argv) -> None:
  del argv
  # libtpu looks for a TPU, and for other processes that use it, unless told not to.
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
  from diloco.aot.report import find, report

  topology = str(_TOPOLOGY.value)
  run = report if ":" in topology else find
  for line in run(_CONFIG.value, topology, _SLICES.value, _QUICK.value):
    print(line, flush=True)


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "topology"])
  command_line.run(main)
