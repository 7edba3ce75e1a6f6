"""Joins runs that differ only in the seed."""

import pandas as pd

from diloco.scaling_laws.cells import AXES, CELL

# Other columns of an export that runs of one setting share.
_SHAPE = ("num_layers", "dim", "vocab_size", "seq_len")
_MORE = ("outer_optimizer", *_SHAPE, "tokens", "sync_every", "config")


def joined(runs: pd.DataFrame) -> pd.DataFrame:
  """Joins runs of one setting that differ only in the seed to one row.

  A sweep tunes with one seed, and repeats the best settings with others. So `choice`,
  by which the best setting is found, is the loss of the tuning seed alone: with a mean,
  settings that were repeated would compete with lucky single runs.

  Args:
    runs: a row per run, with the columns of `runs.read`; `seed` may be absent, and
      nothing is joined then.

  Returns:
    A row per setting, that of the most frequent seed of `runs`, or else of the first.
    `loss` is the mean over the seeds; `losses` has (seed, loss) of each. Runs with
    equal seeds differ in something else, so they stay apart.
  """
  if "seed" not in runs:
    return runs.assign(losses=[((0, loss),) for loss in runs["loss"]])
  tuned = runs["seed"].mode()[0]
  same = [c for c in (*CELL, *AXES, *_MORE) if c in runs]
  rows = {}
  for _, some in runs.groupby(same, sort=False):
    parts = [some] if some["seed"].is_unique else [some.loc[[i]] for i in some.index]
    for part in parts:
      row = part.index[(part["seed"] != tuned).argmin()]
      rows[row] = (part["loss"].mean(), tuple(zip(part["seed"], part["loss"])))
  found = runs.loc[sorted(rows)]
  means, losses = zip(*(rows[i] for i in found.index))
  return found.assign(loss=means, losses=losses)
