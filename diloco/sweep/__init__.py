"""Runs sweeps: grids of runs, tables of their results, and figures. Imports no JAX.

Each run is a process (`diloco.main`); `diloco.sweep.worker` trains several at once.
The driver starts these processes and keeps all state in the run directories. So the
driver needs few resources, and you may kill it at any moment.
"""
