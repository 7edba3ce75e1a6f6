"""What diagnostics cost: the time around the syncs of one run that have them or not.

  python scripts/benchmarks/bench_diagnostics.py --workdir=runs/diagnosed

Prints the median time from the step before a send to the end of the step with its last
merge, for both kinds of syncs, and the share of the run that the difference takes. The
run needs syncs of both kinds after step 60.
"""

import pathlib
import statistics

from absl import flags
from ml_collections import config_flags

from diloco import train
from diloco.config import add_plugins, command_line, resolve
from diloco.log import metrics
from diloco.util import shipped

_CONFIG = config_flags.DEFINE_config_file(
  "config", shipped.find("batch_32"), "Config; the script sets diagnostics.every=4."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder to write to; it must be new.")
COMPILING = 60  # Steps, of which the first ones compile programs.


def main(argv) -> None:
  del argv
  c, workdir = _CONFIG.value, pathlib.Path(_WORKDIR.value)
  add_plugins(c, "diagnostics")
  c.log.every, c.diagnostics.every = 1, 4
  c.eval.every = c.checkpoint.every = 0
  c = resolve(c)
  train.train(c, workdir)

  ended = {r["step"]: r["time"] for r in metrics.read(workdir)}
  sends = metrics.read(workdir, "send")
  diagnosed = {r["step"] for r in sends if "replica_drift_by_layer" in r}
  took: dict[bool, list[float]] = {True: [], False: []}
  for sent in {r["step"] for r in sends}:
    merged = sent + max(c.overlap.taus)
    if sent > COMPILING and merged in ended:
      took[sent in diagnosed].append(ended[merged] - ended[sent - 1])
  with_, without = (1e3 * statistics.median(took[x]) for x in (True, False))
  steps = [s for s in ended if s > COMPILING]
  step = 1e3 * (ended[max(steps)] - ended[min(steps)]) / (len(steps) - 1)
  share = len(took[True]) * (with_ - without) / (step * len(steps))
  print(f"around {len(took[False])} syncs {without:.1f} ms; diagnosed, ", end="")
  print(f"around {len(took[True])}, {with_:.1f} ms; steps of {step:.1f} ms")
  print(f"diagnostics take {100 * share:.1f}% of the run's time")


if __name__ == "__main__":
  flags.mark_flag_as_required("workdir")
  command_line.run(main)
