"""Configs: every field with its default, and how files and flags set them. No JAX."""

from diloco.config.fields import (
  ALGORITHMS,
  ConfigError,
  complete,
  default_config,
  difference,
  leaves,
  make_fragments,
  make_schedule,
  merge,
  num_params,
  resolve,
  trained_replicas,
  validate,
)

__all__ = [
  "ALGORITHMS",
  "ConfigError",
  "complete",
  "default_config",
  "difference",
  "leaves",
  "make_fragments",
  "make_schedule",
  "merge",
  "num_params",
  "resolve",
  "trained_replicas",
  "validate",
]
