"""The run of batch_32 with a method of a later paper: methods:NAME (docs/methods.md).

  python -m diloco.main --config=methods:warm_start --workdir=runs/warm
  python -m diloco sweep --sweep=ablations:methods,seeds=3 --results=runs/a

METHODS has the plug-ins of each method, if any, and the fields that the method sets in
a config of Streaming DiLoCo. The first command runs one method; the second command
compares all methods in smaller runs.
"""

from collections.abc import Callable
from typing import Any

from diloco.config import Config, add_plugins, resolve
from diloco.errors import ConfigError
from diloco.util.command import load_module

# A field's value, or a function that computes the value from a run's config.
Value = Any | Callable[[Config], Any]

DILOCO = {"algorithm": "diloco"}
MEAN = {"outer.optimizer": "sgd", "outer.learning_rate": 1.0}
LOCAL_ADAMW = DILOCO | MEAN
# Muon with updates as large as AdamW's (arXiv 2502.16982, section 2.2), and the papers'
# b2. MuLoCo's authors scale the updates differently (docs/methods.md).
MUON = {"inner.optimizer": "muon(consistent_rms=0.2, adam_b2=0.99)"}
FLOAT32, TWO_BITS = {"wire.format": "fp32"}, {"wire.format": "bins2"}
# The plug-in of the 2-bit format, and the plug-in that later sends what codes lost.
LATER = ("bins", "error_feedback")
WARM = {"plugins": ("warm_start",), "warm_start.steps": lambda c: c.train.steps // 10}


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
  # Each row has its own table of bins. beta is that of the authors' 2-bit runs.
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
  "warm_start": DILOCO | WARM,
  "warm_start_zero": {**DILOCO, **WARM, "warm_start.momentum": False},
}


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
