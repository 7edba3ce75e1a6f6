"""Coordinates the sites of a run (docs/sites.md)."""

import runpy

if __name__ == "__main__":
  runpy.run_module("diloco.contrib.sites.coordinator", None, "__main__", True)
