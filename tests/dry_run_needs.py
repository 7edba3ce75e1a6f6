"""Marks of tests that compile for devices that are not there."""

import importlib.util

import pytest

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="libtpu is not installed (pip install libtpu)",
)

needs_cuda_plugin = pytest.mark.skipif(
  not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))),
  reason="JAX's CUDA plugin is not installed (pip install 'jax[cuda12-local]')",
)
