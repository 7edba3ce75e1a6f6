"""Simulates which bandwidth a method needs and how long training takes. No JAX."""
