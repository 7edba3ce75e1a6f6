"""The run of batch_32 with a method of a later paper: methods:NAME (docs/methods.md).

  python -m diloco.main --config=methods:warm_start --workdir=runs/warm
  python -m diloco sweep --sweep=ablations:methods,seeds=3 --results=runs/a

METHODS names the plug-ins of a method, if it has some, and the fields that it sets in a
config of Streaming DiLoCo. The first command runs one, the second compares all of them
in smaller runs.
"""

from collections.abc import Callable
from typing import Any

from diloco.config import Config, add_plugins, resolve
from diloco.errors import ConfigError
from diloco.spec.call_text import parse
from diloco.util.command import load_module

# A value, or how to compute it from a run's config.
Value = Any | Callable[[Config], Any]

DILOCO = {"algorithm": "diloco"}
MEAN = {"outer.optimizer": "sgd", "outer.learning_rate": 1.0}
LOCAL_ADAMW = DILOCO | MEAN
# Updates as large as AdamW's (arXiv 2502.16982, section 2.2), and the papers' b2.
# MuLoCo's authors scale them otherwise (docs/methods.md).
MUON = {"inner.optimizer": "muon(consistent_rms=0.2, adam_b2=0.99)"}
FLOAT32, TWO_BITS = {"wire.format": "fp32"}, {"wire.format": "bins2"}
# A plug-in of 2 bits, and one that sends later what the codes lost.
LATER = ("bins", "error_feedback")
# Pier's outer rate falls from 1.1 to 0.9, its outer momentum from 0.99 to 0.9.
PIER_RATE, PIER_MOMENTUM = 0.9 / 1.1, 0.9 / 0.99
WARM = {"plugins": ("warm_start",), "warm_start.steps": lambda c: c.train.steps // 10}


def falling(fraction: float = 1.0, share: float = 1.0) -> dict[str, Value]:
  """Returns fields with which outer rate and momentum fall to these shares."""
  rate = f"final_fraction={fraction}"

  def text(c: Config) -> str:
    ends = f", {rate}, final_momentum={share * momentum(c)})"
    return c.outer.optimizer.replace("sgd(", "falling(").replace(")", ends)

  return {"plugins": ("falling",), "outer.optimizer": text}


METHODS: dict[str, dict[str, Value]] = {
  "data_parallel": {"algorithm": "data_parallel"},
  "diloco": DILOCO,
  "diloco_4": DILOCO | {"replicas": 4},
  "local_adamw": LOCAL_ADAMW,
  "streaming": {},
  "fedpart": {"plugins": ("fedpart",), "fedpart.on": True},
  "topk": {"wire.compressor": "topk", **FLOAT32},
  "random": {"wire.compressor": "random", **FLOAT32},
  "dare": {"wire.compressor": "dare", **FLOAT32},
  "snoo": DILOCO | {"replicas": 1},
  "error_feedback": {
    "plugins": ("error_feedback",),
    "wire.compressor": "error_feedback(beta=1.0, of='quantize')",
  },
  "sparseloco": {
    "plugins": ("chunked_topk", *LATER),
    "wire.compressor": "error_feedback(beta=0.95, of='chunked_topk(chunk=4096)')",
    "wire.density": 0.03,
    **LOCAL_ADAMW,
    **TWO_BITS,
  },
  "muon": {"algorithm": "data_parallel", **MUON},
  "muon_diloco": DILOCO | MUON,
  # A table of bins for each row, and the error of the authors' 2-bit runs.
  "muloco": {
    "plugins": LATER,
    "wire.compressor": "error_feedback(beta=0.9, of='quantize')",
    "wire.block_size": -1,
    **DILOCO,
    **TWO_BITS,
    **MUON,
  },
  "des_loc": {
    "plugins": ("des_loc",),
    "des_loc.first_every": lambda c: 3 * c.sync_every,
    "des_loc.second_every": lambda c: 6 * c.sync_every,
    **LOCAL_ADAMW,
  },
  "sparta": DILOCO | {"plugins": ("sparta",), "sparta.share": 0.005},
  "noloco": {
    "replicas": 4,
    "plugins": ("noloco",),
    "wire.exchange": "pair",
    "outer.optimizer": "sgd(momentum=0.5)",
    "outer.learning_rate": 0.7,
    **DILOCO,
  },
  "falling_rate": falling(fraction=0.1),
  "falling_momentum": falling(share=0.0),
  "restarts": {
    "plugins": ("restarted",),
    "outer.optimizer": lambda c: c.outer.optimizer.replace(
      "sgd(", "restarted(every=10, "
    ),
  },
  "warm_start": DILOCO | WARM,
  "warm_start_zero": {**DILOCO, **WARM, "warm_start.momentum": False},
  "pier": {
    **DILOCO,
    **WARM,
    **falling(PIER_RATE, PIER_MOMENTUM),
    "plugins": ("warm_start", "falling"),
  },
  "eager": DILOCO | {"plugins": ("eager",), "eager.on": True},
  "radial": {"plugins": ("radial",), "outer.average": "radial"},
  # The paper's g is of one worker, so N of them are about one mean of all replicas.
  "delayed_nesterov": {
    "plugins": ("delayed_nesterov",),
    "outer.optimizer": lambda c: f"delayed_nesterov(every=4, momentum={momentum(c)})",
    "outer.learning_rate": lambda c: 4 * c.outer.learning_rate,
    **DILOCO,
  },
  "gpa": {
    "algorithm": "data_parallel",
    "plugins": ("gpa",),
    "inner.optimizer": "gpa(b1=0.9, b2=0.99)",
  },
}


def momentum(c: Config) -> float:
  """Returns the momentum of the outer optimizer.

  Raises:
    ConfigError: it has none.
  """
  _, arguments = parse("outer.optimizer", c.outer.optimizer)
  if not isinstance(arguments.get("momentum"), float):
    raise ConfigError(
      f"outer.optimizer is {c.outer.optimizer!r}, which has no momentum; the method"
      " needs one, for example sgd(momentum=0.9, nesterov=True)."
    )
  return arguments["momentum"]


def use(c, name: str) -> None:
  """Sets a method's fields in a config whose steps or tokens are set.

  Raises:
    ConfigError: the name is unknown.
  """
  if name not in METHODS:
    raise ConfigError(f"the method is {name!r}; write one of {', '.join(METHODS)}.")
  run, fields = resolve(c), dict(METHODS[name])
  if "plugins" in fields:
    add_plugins(c, *fields.pop("plugins"))
  for field, value in fields.items():
    found = value(run) if callable(value) else value
    c.update_from_flattened_dict({field: found})


def get_config(name: str = "streaming"):
  c = load_module("batch_32", "get_config", "batch_32").get_config()
  use(c, name)
  return c
