"""A config for runs of several processes: few programs, to compile quickly."""

import conftest


def get_config():
  c = conftest.tiny_config()
  c.model.num_layers, c.fragments.pattern = 2, "whole"
  c.sync_every, c.overlap.tau = 3, 2
  c.train.batch_size, c.train.steps = 8, 8
  c.checkpoint.every = 4  # With a payload in flight, sent at 3.
  c.log.sample_tokens = 0
  return c
