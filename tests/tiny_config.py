"""The tiny config as a file, for tests that run the command."""

import conftest


def get_config():
  c = conftest.tiny_config()
  c.overlap.tau = 2
  return c
