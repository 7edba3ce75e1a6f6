"""Sweeps: a grid of runs, one table of results, figures. Imports no JAX.

A run is a process of its own (`diloco.main`); the driver only starts processes and
keeps the table, so that it is light and can be killed at any moment.
"""
