"""Configs: every field with its default, set by files and flags. No JAX."""

from diloco.config.resolve import (
  add_plugins,
  changed,
  complete,
  default_config,
  resolve,
)
from diloco.errors import ConfigError
from diloco.spec.fields import ALGORITHMS, Config

__all__ = [
  "ALGORITHMS",
  "Config",
  "ConfigError",
  "add_plugins",
  "changed",
  "complete",
  "default_config",
  "resolve",
]
