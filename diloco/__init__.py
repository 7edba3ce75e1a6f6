"""DiLoCo, Streaming DiLoCo and their scaling laws, in JAX.

The names below are for a training loop of your own (docs/library.md). The trainer is
`python -m diloco.main`; `python -m diloco` lists all commands.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from diloco.algorithm.state import Event, OuterState
  from diloco.errors import ConfigError
  from diloco.library.layout import Stacked
  from diloco.library.streaming import Streaming, replicate, streaming
  from diloco.mesh.devices import replica_mesh
  from diloco.spec.fields import OuterConfig, WireConfig
  from diloco.wire.ledger import Ledger

__all__ = [
  "ConfigError",
  "Event",
  "Ledger",
  "OuterConfig",
  "OuterState",
  "Stacked",
  "Streaming",
  "WireConfig",
  "replica_mesh",
  "replicate",
  "streaming",
]

__version__ = "0.1.0"  # pyproject.toml reads this line.

_HOMES = {
  "diloco.library.layout": ("Stacked",),
  "diloco.algorithm.state": ("Event", "OuterState"),
  "diloco.library.streaming": ("Streaming", "replicate", "streaming"),
  "diloco.errors": ("ConfigError",),
  "diloco.spec.fields": ("OuterConfig", "WireConfig"),
  "diloco.mesh.devices": ("replica_mesh",),
  "diloco.wire.ledger": ("Ledger",),
}


def __getattr__(name: str) -> Any:
  """Imports a public name when it is first used: the simulators import no JAX."""
  for home, names in _HOMES.items():
    if name in names:
      return getattr(importlib.import_module(home), name)
  raise AttributeError(f"module 'diloco' has no attribute {name!r}")


def __dir__() -> list[str]:
  return [*globals(), *__all__]
