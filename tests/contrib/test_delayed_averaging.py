"""Delayed averaging; tests/algorithm/test_outer_reference.py has its NumPy form."""

import conftest
import plugins  # noqa: F401  Registers `bigram`.
import pytest

from diloco.train import train

FIELDS = {"plugins": ("delayed_averaging",), "delayed_averaging.on": True}


@pytest.mark.integration("trains one and a half small models")
def test_a_run_resumes_exactly_while_fragments_are_in_flight(tiny, tmp_path):
  whole, part = tmp_path / "whole", tmp_path / "part"
  conftest.update(tiny, FIELDS | {"overlap.tau": 3, "train.steps": 14})
  tiny.model.name = "bigram"  # A small model compiles quickly.
  tiny.checkpoint.every = 7  # Fragments 1, 2 and 3 are on the way.
  first = train(tiny, whole)
  conftest.rewind(whole, part, 7)
  assert train(tiny, part)["eval_loss"] == first["eval_loss"]
