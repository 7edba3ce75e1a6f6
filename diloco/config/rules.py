"""Fields that do not work together or do nothing, refused with one sentence. No JAX."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from diloco.config.optimizer import parse
from diloco.errors import ConfigError
from diloco.spec.fields import Config
from diloco.spec.formats import BINS

DILOCO = ("streaming", "diloco")
DEVICE = ("device",)
OFF = (0,)  # Also False.


class Rule(NamedTuple):
  """What one choice needs of other fields.

  Attributes:
    field: the field with the choice.
    choice: its value; None: any but the default.
    reason: why it needs that.
    needs: {other field: values that work}. data_parallel ignores most fields, so then
      only `algorithm` counts.
  """

  field: str
  choice: Any
  reason: str
  needs: Mapping[str, tuple]


_OWN_OUTER = {
  "overlap.transport": DEVICE,
  "outer.average": ("mean",),
  "outer.offload": OFF,
  "outer.final_sync": OFF,
  "outer.warm_start_steps": OFF,
  "log.diagnostics_every": OFF,
}
_PAIRS = {
  **_OWN_OUTER,
  "overlap.eager": OFF,  # Before tau, which eager updates set to H.
  "overlap.tau": (0,),
  "overlap.alpha": OFF,
  "wire.compressor": ("quantize",),
  "wire.format": ("fp32",),
  "wire.error_feedback": OFF,
}
_AVERAGES = {"algorithm": DILOCO, "overlap.transport": DEVICE, "overlap.eager": OFF}

RULES = (
  Rule(
    "overlap.transport", "sites", "which carries outer gradients", {"algorithm": DILOCO}
  ),
  Rule(
    "wire.exchange",
    "psum",
    "where devices add up what replicas send",
    {"overlap.transport": DEVICE, "outer.average": ("mean",), "overlap.eager": OFF},
  ),
  *(
    Rule(
      "wire.format",
      name,
      "whose bins are decoded to means",
      {"wire.rounding": ("nearest",)},
    )
    for name in BINS
  ),
  Rule(
    "wire.format", "bf16", "which casts to nearest", {"wire.rounding": ("nearest",)}
  ),
  Rule(
    "wire.compressor",
    "dare",
    "which enlarges the values that it sends",
    {"wire.error_feedback": OFF},  # Each send would add to the error, without end.
  ),
  Rule("wire.exchange", "pair", "where replicas exchange parameters and wait", _PAIRS),
  Rule(
    "log.diagnostics_every",
    None,
    "which compares replicas on devices",
    {"overlap.transport": DEVICE},
  ),
  Rule(
    "outer.warm_start_steps",
    None,
    "which averages gradients at every step and sends nothing else",
    {"overlap.transport": ("device", "host"), "outer.fedpart": OFF},
  ),
  Rule("overlap.eager", True, "where every replica has its outer state", _OWN_OUTER),
  *(
    Rule(field, None, "which averages values of the replicas on devices", _AVERAGES)
    for field in ("des_loc.first_every", "des_loc.second_every", "sparta.share")
  ),
)


def check(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
  """Refuses fields that do not work together.

  Args:
    values: a config's fields by name, such as "outer.average"; overlap.tau is the
      largest tau.
    defaults: the default of each field.

  Raises:
    ConfigError: a choice needs another value of a field.
  """
  data_parallel = values["algorithm"] == "data_parallel"
  for field, choice, reason, needs in RULES:
    value, default = values[field], defaults[field]
    if value == default or choice not in (None, value):
      continue
    for other, works in needs.items():
      if values[other] in works or (data_parallel and other != "algorithm"):
        continue
      given = values[other]
      choices = " or ".join(str(type(given)(x)).lower() for x in works)
      raise ConfigError(
        f"{field} is {value}, {reason}, but {other} is {given}; choose {choices}, or"
        f" set {field}={str(default).lower()}."
      )


# A compressor that you registered may use any field of `wire`.
_BUILT_IN = {"quantize", "topk", "random", "dare"}


def check_effects(c: Config) -> None:
  """Refuses fields that other fields leave without effect; data_parallel ignores them.

  Not for saved configs: a run that had such a field can still be read.

  Raises:
    ConfigError: such a field is not at its default.
  """
  if not c.make_fragments():
    return
  name, arguments = parse("outer.optimizer", c.outer.optimizer)
  momentum = arguments.get("momentum") or c.outer.final_momentum > 0
  alone = c.replicas == 1, "replicas is 1, and a single replica sends nothing"
  fp32, compressor = c.wire.format == "fp32", c.wire.compressor
  for field, (useless, reason) in {
    "overlap.eager": alone,
    "sparta.share": alone,
    "des_loc.first_every": alone,
    "des_loc.second_every": alone,
    "wire.error_feedback": (
      fp32 and compressor == "quantize",
      "wire.format is fp32, whose codes lose nothing",
    ),
    "wire.rounding": (
      fp32 and compressor in _BUILT_IN,
      "wire.format is fp32, whose values are not rounded",
    ),
    "wire.chunk": (
      compressor in _BUILT_IN - {"topk"},
      f"wire.compressor is {compressor}, which has no chunks",
    ),
    "outer.restart_every": (
      name == "sgd" and not momentum,
      "outer.optimizer is sgd without momentum, which has nothing to forget",
    ),
    "outer.decay_syncs": (
      not c.outer.changes,
      "outer.final_fraction and outer.final_momentum keep rate and momentum constant",
    ),
    "outer.warm_start_momentum": (
      not c.outer.warm_start_steps,
      "outer.warm_start_steps is 0",
    ),
  }.items():
    value, default = attrgetter(field)(c), attrgetter(field)(Config())
    if useless and value != default:
      raise ConfigError(
        f"{field} is {value}, but {reason}; change that, or set"
        f" {field}={str(default).lower()}."
      )
