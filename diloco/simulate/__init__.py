"""Simulates the bandwidth that a method needs, training time, and failures. No JAX."""
