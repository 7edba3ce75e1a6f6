"""Simulates the bandwidth that a method needs, and training time. No JAX."""
