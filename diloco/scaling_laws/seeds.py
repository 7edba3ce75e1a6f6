"""Joins runs that differ only in the seed."""

import statistics

import pandas as pd

from diloco.scaling_laws.cells import AXES, CELL

# Other columns of an export that runs of one setting share.
_SHAPE = ("num_layers", "dim", "vocab_size", "seq_len")
_MORE = ("outer_optimizer", *_SHAPE, "tokens", "sync_every", "config")


def joined(runs: pd.DataFrame) -> pd.DataFrame:
  """Joins runs of one setting that differ only in the seed to one row.

  A sweep tunes with one seed, and repeats the best settings with others. So `choice`,
  by which the best setting is found, is the loss of the tuning seed alone: with a mean,
  settings that were repeated would compete with lucky single runs. The best of many
  runs is a lucky one, so a repeated setting is reported without the tuning seed.

  Args:
    runs: a row per run, with the columns of `runs.read`; `seed` may be absent, and
      nothing is joined then.

  Returns:
    A row per setting, that of the most frequent seed of `runs`, or else of the first.
    `all_losses` has (seed, loss) of every seed; `losses` leaves out the tuning seed,
    which is the most frequent one, if others repeat the setting; `loss` is the mean of
    `losses`. Runs with equal seeds differ in something else, so they stay apart.
  """
  if "seed" not in runs:
    alone = [((0, loss),) for loss in runs["loss"]]
    return runs.assign(losses=alone, all_losses=alone)
  counts = runs["seed"].value_counts()
  most = sorted(counts.index[counts == counts.max()])
  tuning = most[0] if len(most) == 1 else None  # All seeds are alike: none tunes.
  same = [c for c in (*CELL, *AXES, *_MORE) if c in runs]
  rows = {}
  for _, some in runs.groupby(same, sort=False):
    parts = [some] if some["seed"].is_unique else [some.loc[[i]] for i in some.index]
    for part in parts:
      row = part.index[(part["seed"] != most[0]).argmin()]
      every = tuple(zip(part["seed"], part["loss"]))
      rows[row] = tuple(x for x in every if x[0] != tuning) or every, every
  found = runs.loc[sorted(rows)]
  losses, every = zip(*(rows[i] for i in found.index))
  means = [statistics.mean(loss for _, loss in some) for some in losses]
  return found.assign(loss=means, losses=losses, all_losses=every)
