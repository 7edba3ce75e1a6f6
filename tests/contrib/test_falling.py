"""`falling`: when it ends; test_streaming.py compares its steps with NumPy."""

import jax.numpy as jnp
import pytest

from diloco.algorithm import optimizers
from diloco.config import add_plugins, resolve
from diloco.contrib import falling  # noqa: F401  Registers its name.
from diloco.spec.call_text import parse
from diloco.spec.fields import OuterConfig

TEXT = "falling(momentum=0.9, final_fraction=0.5, final_momentum=0.5"


def syncs(config) -> int:
  c = resolve(config)
  assert resolve(c) == c
  return parse("outer.optimizer", c.outer.optimizer)[1].get("syncs", 0)


def test_the_rate_falls_until_the_last_sync_of_a_run(tiny):
  add_plugins(tiny, "falling")
  tiny.outer.optimizer = f"{TEXT})"
  assert syncs(tiny) == max(resolve(tiny).num_syncs()) > 1
  tiny.outer.final_sync = True
  assert syncs(tiny) == max(resolve(tiny).num_syncs())
  tiny.outer.optimizer = f"{TEXT}, syncs=3)"
  assert syncs(tiny) == 3
  tiny.outer.optimizer, tiny.algorithm = f"{TEXT})", "data_parallel"
  assert syncs(tiny) == 0


@pytest.mark.parametrize(("momentum", "count"), [(True, 6), (False, 4)])
def test_updates_of_a_warm_start_count(tiny, momentum, count):
  add_plugins(tiny, "warm_start", "falling")
  tiny.warm_start.steps, tiny.sync_every, tiny.train.steps = 8, 4, 24
  tiny.algorithm, tiny.outer.optimizer = "diloco", f"{TEXT})"
  tiny.warm_start.momentum = momentum
  assert syncs(tiny) == count


def test_the_state_has_the_numbers_of_an_update():
  outer = OuterConfig(f"{TEXT}, syncs=3)", learning_rate=1.0)
  made = optimizers.make_outer(outer)
  state, found = made.init(jnp.float32(0)), list[tuple[float, ...]]()
  for _ in range(4):
    _, state = made.update(jnp.float32(1), state, jnp.float32(0))
    numbers = (state.hyperparams[name] for name in ("learning_rate", "momentum"))
    found.append(tuple(round(float(x), 6) for x in numbers))
  assert found == [(1.0, 0.9), (0.75, 0.7), (0.5, 0.5), (0.5, 0.5)]
