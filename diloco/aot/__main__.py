"""Dry run: compiles a config's training programs for TPUs or GPUs that are not there.

python -m diloco aot --config=configs/chinchilla.py:1.3B --topology=v5e:4x4 --slices=2
python -m diloco aot --config=configs/chinchilla.py:1.3B --topology=h100:8 --slices=2

The first command compiles for two slices, the second for two nodes of eight GPUs. Both
commands print each program's memory, compile time, bytes between replicas and overlap.
TPUs need the pip extra `tpu`, GPUs the pip extra `gpu-aot`; see docs/aot.md.
"""

from absl import flags

from diloco.aot import look_for_no_device
from diloco.config import command_line

_CONFIG = command_line.define_config()
_TOPOLOGY = flags.DEFINE_string(
  "topology",
  None,
  "Chip and grid, as v5e:16x16; or GPU and number in a node, as h100:8.",
)
_SLICES = flags.DEFINE_integer(
  "slices",
  1,
  "Number of slices or nodes, joined by the data-centre network.",
  lower_bound=1,
)
_QUICK = flags.DEFINE_bool(
  "quick", False, "Compile with XLA's least effort: faster, but without overlap (TPUs)."
)


def main(_: list[str]) -> None:
  look_for_no_device()
  from diloco.aot.report import report

  for line in report(_CONFIG.value, str(_TOPOLOGY.value), _SLICES.value, _QUICK.value):
    print(line, flush=True)


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "topology"])
  command_line.run(main)
