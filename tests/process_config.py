"""A config for runs of several processes: few programs, which compile quickly."""

import conftest


def get_config():
  c = conftest.tiny_config()
  c.model.num_layers, c.fragments.pattern = 2, "whole"
  c.sync_every, c.overlap.tau = 3, 2
  c.train.batch_size, c.train.steps = 8, 60
  c.checkpoint.every = 21  # With a payload in flight that was just sent.
  return c
