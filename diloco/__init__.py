"""DiLoCo, Streaming DiLoCo and their scaling laws, in JAX.

Use the names below in your own training loop (docs/library.md). The trainer is
`python -m diloco.main`; `python -m diloco` lists all commands.
"""

from etils import epy

# Imports each name at its first use, so that the simulators need no JAX.
with epy.lazy_api_imports(globals()):
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
