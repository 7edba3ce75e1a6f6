"""Sweeps: grids of runs, a table of their results, figures. Imports no JAX.

Each run is a separate process (`diloco.main`). The driver only starts processes and
reads run directories, so it is light and can be killed at any moment.
"""
