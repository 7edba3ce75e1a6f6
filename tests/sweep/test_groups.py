"""Which runs train together."""

import pytest
from fake_runs import Fake, config, finish, make_driver, rows_of

from diloco.config import default_config, resolve
from diloco.sweep.grid import Axis, Grid, Sweep
from diloco.sweep.runner import Driver
from diloco.sweep.table import as_json
from diloco.together import groups


def saved(**fields):
  c = default_config()
  c.train.steps = 1000
  c.update_from_flattened_dict(fields)
  return as_json(resolve(c))


NESTEROV = "sgd(nesterov=True, momentum = 0.9)"


def outer(text):
  return {"outer.optimizer": text}


@pytest.mark.parametrize(
  ("a", "b", "same"),
  [
    ({"seed": 3, "inner.learning_rate": 1.0, "outer.learning_rate": 0.0}, {}, True),
    ({"inner.weight_decay": 0.1}, {}, True),
    ({"inner.weight_decay": 0.0}, {}, False),
    (outer("sgd(momentum=0.25, nesterov=True)"), {}, True),
    (outer("sgd(nesterov=True, momentum = 5e-1)"), outer(NESTEROV), True),
    (outer("sgd(nesterov=True, momentum = 1.5)"), outer(NESTEROV), False),
    (outer("sgd(momentum=0.9)"), {}, False),
    (outer("sgd()"), outer("sgd(momentum=0.9)"), False),
    (outer("rmsprop(momentum=0.5)"), outer("rmsprop(momentum=0.6)"), False),
    ({"sync_every": 50}, {}, False),
    ({"inner.warmup_steps": 1}, {}, False),
  ],
)
def test_only_these_numbers_may_differ(a, b, same):
  assert (groups.alike(saved(**a)) == groups.alike(saved(**b))) == same


def test_groups_have_at_most_so_many_runs_and_keep_the_order():
  configs = {f"{h}{s}": saved(seed=s, sync_every=h) for s in range(3) for h in (5, 6)}
  assert groups.split(configs, 2) == [["50", "51"], ["52"], ["60", "61"], ["62"]]
  assert groups.split(configs, 1) == [[name] for name in configs]


def test_a_run_with_more_than_arrays_trains_alone():
  assert groups.obstacle(saved()) == ""
  needs = {"overlap.transport": "host", "outer.offload": True}
  needs |= {"log.wandb_project": "mine", "plugins": ("json",)}
  for field, value in needs.items():
    configs = {str(s): saved(seed=s, **{field: value}) for s in range(2)}
    assert groups.split(configs, 8) == [["0"], ["1"]]
    assert field in groups.obstacle(configs["0"])


def test_a_driver_starts_groups_and_counts_processes(tmp_path):
  started = []

  class Alive(Fake):
    def start(self, *runs):
      started.append([run.name for run in runs])

    def running(self, run):
      return ends == 0 and any(run.name in group for group in started)

  ends = 0
  cells = [{"replicas": m} for m in (1, 2)]
  sweep = Sweep(config, [Grid("g", cells, (Axis("lr", (1, 2, 3)),))])
  for parallel, sizes in ((1, [2]), (1, [2]), (3, [2, 1, 2]), (4, [2, 1, 2, 1])):
    Driver(sweep, tmp_path, Alive(), parallel, vectorize=2).step()
    assert [len(group) for group in started] == sizes
  ends = 1  # All vanish: the next driver starts all again, each alone.
  finish(make_driver(sweep, tmp_path, Fake()))
  assert {row["status"] for row in rows_of(tmp_path)} == {"done"}
