"""Decides whether losses of runs can be compared: if text and tokens agree. No JAX."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from diloco.config.resolve import leaves

HELD_OUT, CONTENT = "the held-out tokens", "the content of "
# The fields that choose the training text. Runs on different training texts can be
# compared on the same held-out text.
TRAINED_ON = ("data.source", "data.train_split")
# {a text or tokenizer that is compared by its content: the fields that choose it}
CHOSEN_BY = {
  "data.tokenizer": ("data.tokenizer",),
  "data.source": TRAINED_ON,
  HELD_OUT: (
    "data.eval_source",
    "data.eval_split",
    "data.add_bos",
    "eval.tokens",
    "data.tokenizer",
  ),
}
# Model fields that change only speed, memory and rounding.
FREE_OF_MODEL = ("model.attention", "model.remat", "model.unroll", "model.loss_chunk")
# Fields about the reading of text, which do not change the batches. Processes of a run
# may differ in these fields.
READING = ("data.data_dir", "data.prefetch", "data.num_threads")


class Basis(NamedTuple):
  """The config and the data to which the losses of a run belong.

  Attributes:
    fields: all fields of the run's config by name.
    contents: the result of `digests`; {} for a run of an earlier version of diloco.
  """

  fields: Mapping[str, Any]
  contents: Mapping[str, str]

  @property
  def chosen(self) -> tuple[Any, ...]:
    """The values of the fields that choose text and tokenizer."""
    return tuple(self.fields.get(f) for fs in CHOSEN_BY.values() for f in fs)


def digests(contents: Mapping[str, str]) -> dict[str, str]:
  """Returns the digests of the keys of CHOSEN_BY: the first 12 digits of each."""
  return {what: contents[what][:12] for what in CHOSEN_BY if what in contents}


def basis(config: Mapping[str, Any], contents: Mapping[str, str]) -> Basis:
  """Makes a `Basis` from a config (as in JSON) and from `diloco.data.contents`."""
  fields = leaves(config)
  held_out = fields.get("data.eval_source") or fields.get("data.source")
  return Basis(fields | {"data.eval_source": held_out}, digests(contents))


def model_fields(run: Basis) -> list[str]:
  """Lists the fields of the model or of its plug-in, except FREE_OF_MODEL."""
  groups = ("model.", f"{run.fields['model.name']}.")
  return [f for f in run.fields if f.startswith(groups) and f not in FREE_OF_MODEL]


def differing(ours: Basis, theirs: Basis, *more: str) -> dict[str, tuple[Any, Any]]:
  """Finds why the losses of two runs cannot be compared.

  If the contents of both runs are known, the contents are compared instead of the
  paths. So data may move, and a changed text under the same path is noticed.

  Args:
    more: further fields in which the runs must not differ.

  Returns:
    {field: its values in ours and theirs}. If only the content differs, the key is
    CONTENT + field, and the values are the digests.
  """
  pairs = {
    field: (ours.fields.get(field), theirs.fields.get(field))
    for field in dict.fromkeys([*more, *(f for fs in CHOSEN_BY.values() for f in fs)])
  }
  differences = {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}
  for what, chosen_by in CHOSEN_BY.items():
    a, b = (x.contents.get(what) for x in (ours, theirs))
    if a is None or b is None:
      continue
    if a == b:
      differences = {f: pair for f, pair in differences.items() if f not in chosen_by}
    elif not differences.keys() & {*chosen_by}:
      differences[CONTENT + chosen_by[0]] = a, b
  return differences


def apart(ours: Basis, theirs: Basis, *more: str) -> list[str]:
  """Like `differing`, but for held-out losses, so the training texts may differ."""
  return [f for f in differing(ours, theirs, *more) if f not in TRAINED_ON]


def incomparable(runs: Sequence[Basis]) -> list[str]:
  """Returns a warning if the runs' losses per token are on different text or tokens."""
  distinct = {repr((run.chosen, run.contents)): run for run in runs}.values()
  fields = dict[str, None]()
  for ours, theirs in itertools.combinations(distinct, 2):
    fields |= dict.fromkeys(apart(ours, theirs))
  if not fields:
    return []
  return [
    f"The runs differ in {' and '.join(fields)}, so their losses per token cannot be"
    " compared; on one held-out text, bits/byte can."
  ]
