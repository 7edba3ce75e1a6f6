"""Predicted times of steps."""

import math
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from dry_run_needs import needs_libtpu

from diloco.contrib.tune import bounds
from diloco.errors import ConfigError

SMALL = (
  *(
    "--config=sample",
    "--topology=v5e:1x1",
    "--slices=2",
    "--config.model.seq_len=128",
  ),
  *("--config.model.num_layers=2", "--config.model.dtype=bfloat16"),
)


def test_the_longer_of_products_and_bytes_counts_for_each_operation():
  def program(x, w, y):
    return jax.lax.optimization_barrier(x @ w), jax.lax.optimization_barrier(y + 1)

  args = jnp.ones((256, 256)), jnp.ones((256, 256)), jnp.ones(10_000)
  text = jax.jit(program).lower(*args).compile().as_text()
  flops, moved = 2 * 256**3, 3 * 4 * 256**2
  peak, bandwidth = 1e9, 1e6
  found = bounds.bound(text, peak, bandwidth)
  # The bytes of the product take longer than its FLOPs here, with 1e8 bytes/s not.
  assert found.products == pytest.approx(flops / peak)
  assert found.memory == pytest.approx((moved + 80_000) / bandwidth, rel=0.01)
  assert found.seconds == pytest.approx(found.memory, rel=1e-6)
  found = bounds.bound(text, peak, 1e8)
  assert found.seconds == pytest.approx(flops / peak + 80_000 / 1e8, rel=0.01)


def test_each_combination_of_values_is_tried():
  tries = ["model.remat=none,dots", "model.unroll=1,0"]
  assert list(bounds.settings(tries)) == [
    {"model.remat": remat, "model.unroll": unroll}
    for remat in ("none", "dots")
    for unroll in (1, 0)
  ]
  assert list(bounds.settings([])) == [{}]


def test_a_try_without_values_is_refused():
  with pytest.raises(ConfigError, match=r"--try is 'model\.remat'; write a field"):
    list(bounds.settings(["model.remat"]))


@needs_libtpu
@pytest.mark.slow("compiles for TPUs")
def test_the_command_predicts_and_chooses():
  command = [
    sys.executable,
    "-m",
    "diloco",
    "roofline",
    *SMALL,
    "--try=model.unroll=1,0",
  ]
  ended = subprocess.run(command, capture_output=True, text=True, check=False)
  assert ended.returncode == 0, ended.stderr[-2000:]
  _, *rows, last = ended.stdout.splitlines()
  assert len(rows) == 2
  ms = {row.split()[0]: float(row.split()[1]) for row in rows}
  assert all(0 < x < math.inf for x in ms.values())
  assert re.match(
    r"fastest that fits, [\d.]+ ms at least: --config.model.unroll=", last
  )
