"""Sweeps: grids of runs, a table of their results, figures. Imports no JAX.

Runs are processes (`diloco.main`, or `diloco.sweep.worker` for several runs at once).
The driver starts them and reads run directories, so it is light and can be killed at
any moment.
"""
