"""The config of conftest.py as a file, for tests that run commands."""

import conftest


def get_config():
  c = conftest.tiny_config()
  c.overlap.tau = 2
  return c
