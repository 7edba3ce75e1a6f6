"""Checks whether a run may go on with a config; tells the user what changes."""

from collections.abc import Mapping

from absl import logging

from diloco.algorithm.optimizers import learning_rate
from diloco.config import Config, complete
from diloco.config.comparable import CHOSEN_BY, FREE_OF_MODEL, READING
from diloco.config.resolve import difference
from diloco.errors import ConfigError
from diloco.spec import plugins
from diloco.spec.formats import PLAIN
from diloco.spec.sizes import coder
from diloco.util.types import Json

# Fields that may change when a run goes on. They do not change what is computed, with
# two exceptions: mesh.fsdp changes how outer gradients are encoded
# (`warn_of_other_shards`), and fields of mesh, train and model change the rounding.
# Plug-ins may add fields, see `Extension.free`.
FREE_FIELDS = (
  "log.",
  "profile.",
  "init.",
  "eval.",
  "checkpoint.",
  "mesh.",
  "train.accumulate",
  *FREE_OF_MODEL,
  "outer.offload",
  "data.eval_",
  *READING,
)
# {contents that must stay the same: the fields that name the path of the contents}
_PATHS = {what: CHOSEN_BY[what] for what in ("data.tokenizer", "data.source")}
# Fields that may change when a run is extended, that is, when train.steps grows.
_EXTENSION = {"train.steps", "train.tokens", "inner.decay_steps"}

# A run that diverges writes DIVERGED in its folder. The _RATES may be lowered from then
# on, until a checkpoint of that step or a later step is there.
DIVERGED = "diverged.json"
_RATES = ("inner.learning_rate", "outer.learning_rate")


def differing(old: Json, new: Json) -> dict[str, str]:
  """Returns {field: "old -> new"} of the fields that differ and may not change."""
  free = FREE_FIELDS + plugins.free()
  # A transport may load a plug-in of the same name. Transport and plug-in may change if
  # both transports keep payloads in flight in a checkpoint, or both do not.
  transports = {x.get("overlap", {}).get("transport") for x in (old, new)}
  if len(transports) > 1:
    free += tuple(f"{name}." for name in transports)
    if len({bool(plugins.transport(name).needs) for name in transports}) == 1:
      free += ("overlap.transport",)
  fixed = lambda x: [name for name in x.get("plugins", ()) if f"{name}." not in free]
  old, new = {**old, "plugins": fixed(old)}, {**new, "plugins": fixed(new)}
  changes = difference(old, new).items()
  return {field: x for field, x in changes if not field.startswith(free)}


def check(
  saved: Json,
  c: Config,
  step: int,
  read: Mapping[str, str] | None = None,
  reads: Mapping[str, str] | None = None,
  diverged: bool = False,
) -> str:
  """Refuses a config that differs from the checkpoint's config.

  But the new config may extend the run, or lower its rates after the run diverged.
  If `saved` lacks a field, the field has its default value.

  Args:
    saved: config of the checkpoint.
    c: config of this process.
    step: step of the checkpoint.
    read, reads: `diloco.data.contents` of the checkpoint and of this process. If both
      have a digest, the digests are compared instead of the paths.
    diverged: whether the run diverged after this step.

  Returns:
    A sentence that says how an extension or a lower rate changes the run; else "".

  Raises:
    ConfigError: fields differ (the message shows "old -> new"), the saved config is not
      valid, or the learning rate's schedule in the extension is not clear.
  """
  try:
    old = complete(saved)
  except ConfigError as error:
    raise ConfigError(
      f"workdir holds a checkpoint of step {step} whose config cannot be used here;"
      f" choose another --workdir, or: {error}"
    ) from error
  changes = differing(old.to_dict(), c.to_dict())
  read, reads = read or {}, reads or {}
  for field in sorted(read.keys() & reads.keys() & _PATHS.keys()):
    for path in _PATHS[field]:
      changes.pop(path, None)
    if read[field] != reads[field]:
      changes[field] = "other contents than before, under the same name or another"
  follow = {"train.tokens"}  # Fields whose value follows from train.steps.
  if all(x.inner.weight_decay == 1.0 / x.schedule_steps for x in (old, c)):
    follow.add("inner.weight_decay")
  if c.train.steps > old.train.steps and changes.keys() <= _EXTENSION | follow:
    return _extension(old, c, step)
  if "train.steps" in changes:
    changes = {field: x for field, x in changes.items() if field not in follow}
  lines = "; ".join(f"{field}: {change}" for field, change in changes.items())
  if diverged and changes and changes.keys() <= {*_RATES}:
    rates = [(x.inner.learning_rate, x.outer.learning_rate) for x in (old, c)]
    if all(after <= before for before, after in zip(*rates)):
      return f"The run diverged; it goes on with {lines}."
  if changes:
    raise ConfigError(
      f"workdir holds a checkpoint of step {step} made with another config ({lines});"
      " choose another --workdir or the same values."
    )
  return ""


def mixture(read: Mapping[str, str], reads: Mapping[str, str], step: int) -> str:
  """Returns a sentence on changed code, versions or evaluation; "" if none changed.

  Args:
    read, reads: see `check`; a key that only one of them has is not compared.
    step: step of the checkpoint.
  """
  # Refuses no change: a user may edit a plug-in between two starts on purpose, and most
  # releases of a package change nothing here. The package grain restores the position
  # in the text. Only grain 0.2.15 is known to restore it wrongly, and pyproject.toml
  # excludes this version.
  names = [n for n in read if n not in _PATHS and read[n] != reads.get(n, read[n])]
  changes = "; ".join(f"{n}: {read[n][:12]} -> {reads[n][:12]}" for n in names)
  return changes and (
    f"Code, versions or evaluation changed at step {step} ({changes}); to go on"
    " exactly, put back what was there before."
  )


def _extension(old: Config, c: Config, step: int) -> str:
  before, now = old.train.steps, c.train.steps
  if step == before and not all(x.extends() for x in c.extensions):
    raise ConfigError(
      f"train.steps is {now}, but the run finished after {before} steps, and one of its"
      f" plug-ins ({', '.join(c.plugins)}) cannot extend it; choose another --workdir."
    )
  rates = [float(learning_rate(x)(step)) for x in (old, c)]
  cosine = c.inner.final_fraction != 1
  if cosine and not c.inner.decay_steps and c.schedule_steps != old.schedule_steps:
    raise ConfigError(
      f"train.steps is {now}, but the run's cosine ends at step {old.schedule_steps};"
      f" set inner.decay_steps={old.schedule_steps} to keep the cosine (later steps use"
      f" its last rate), or inner.decay_steps={now} to stretch it (the rate jumps from"
      f" {rates[0]:.3g} to {rates[1]:.3g} at step {step + 1})."
    )
  text = "the learning rate follows the same schedule"
  if cosine and old.schedule_steps != c.schedule_steps:
    text = f"the learning rate jumps from {rates[0]:.3g} to {rates[1]:.3g}"
  if old.inner.weight_decay != c.inner.weight_decay:
    text += (
      f", the weight decay changes from {old.inner.weight_decay:.3g} to"
      f" {c.inner.weight_decay:.3g}"
    )
  return f"Extends the run from {before} to {now} steps: {text}."


def coded_by_shard(c: Config) -> bool:
  """Returns whether a shard is sent by itself; if so, mesh.fsdp changes payloads."""
  if any(average.by_shard for average in c.averages.values()):
    return True
  plain = coder(c.wire.compressor) == "quantize" and c.wire.format in PLAIN
  same = plain or plugins.transport(c.overlap.transport).needs  # Such as `sites`.
  return not same and bool(c.make_fragments())


def warn_of_other_shards(c: Config, before: int, now: int) -> None:
  """Warns if a resumed run has another fsdp size, and this changes how it encodes."""
  if before != now and coded_by_shard(c):
    logging.warning(
      f"mesh.fsdp was {before} and is {now}: each shard is coded or drawn by itself, so"
      f" replicas send other values than before; set mesh.fsdp={before} for the results"
      " of an uninterrupted run."
    )
