"""Simulates the bandwidth that a method needs, and the training time. No JAX."""
