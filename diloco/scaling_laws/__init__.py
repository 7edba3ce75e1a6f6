"""Scaling laws: from a grid of runs to laws, from laws to predictions. No JAX."""
