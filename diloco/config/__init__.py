"""Configs: every field with its default, and how files and flags set them. No JAX."""

from diloco.config.fields import ALGORITHMS, Config, ConfigError
from diloco.config.resolve import changed, complete, default_config, resolve

__all__ = [
  "ALGORITHMS",
  "Config",
  "ConfigError",
  "changed",
  "complete",
  "default_config",
  "resolve",
]
