"""Fits scaling laws to a grid of runs, and predicts with them. Imports no JAX."""
