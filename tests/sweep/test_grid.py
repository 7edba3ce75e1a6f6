"""The search of a cell: extension, bounds, failures, what it starts from, errors."""

import math

import hypothesis
import pytest
from hypothesis import strategies as st

from diloco.sweep.grid import Axis, Grid, Sweep, exponent, key, power, powers, search

ROOT2 = 2**0.5


def run_out(grid, cell, loss, start=None):
  """Searches a cell to its end against a loss function; returns (Search, losses)."""
  losses = {}
  for _ in range(200):
    state = search(grid, cell, start, losses)
    if not state.todo:
      return state, losses
    losses |= {key(p): loss(p) for p in state.todo}
  raise AssertionError("the search does not end")


def test_powers_are_the_same_number_however_they_are_reached():
  assert powers(2, 2, 5) == (4, 8, 16, 32)
  assert [exponent(ROOT2, power(ROOT2, k)) for k in range(-20, 20)] == [*range(-20, 20)]
  axis = Axis("lr", (power(ROOT2, -9),), ratio=ROOT2)
  up = axis.neighbours(power(ROOT2, -9))[1]
  assert axis.neighbours(up)[0] == power(ROOT2, -9)


@hypothesis.settings(deadline=None)
@hypothesis.given(
  lr=st.integers(-20, -2),
  batch=st.integers(0, 10),
  first=st.tuples(st.integers(-14, -8), st.integers(3, 6)),
)
def test_extends_until_the_best_point_is_interior(lr, batch, first):
  """On a separable bowl the search ends at its bottom with both neighbours known."""
  axes = (
    Axis("lr", (power(ROOT2, first[0]),), ratio=ROOT2),
    Axis("batch", (power(2, first[1]),), ratio=2),
  )

  def bowl(p):
    return (exponent(ROOT2, p["lr"]) - lr) ** 2 + (exponent(2, p["batch"]) - batch) ** 2

  state, losses = run_out(Grid("g", [{"size": "a"}], axes), {"size": "a"}, bowl)
  assert state.state == "interior"
  assert state.best == {"size": "a", "lr": power(ROOT2, lr), "batch": power(2, batch)}
  for axis in axes:
    for value in axis.neighbours(state.best[axis.name]):
      assert key({**state.best, axis.name: value}) in losses


def test_a_whole_first_grid_is_run_before_it_is_extended():
  grid = Grid("g", [{}], (Axis("lr", powers(2, -3, -1), ratio=2), Axis("m", (1, 2))))
  assert len(search(grid, {}, None, {}).todo) == 6


def test_bounds_stop_the_extension_and_are_reported():
  grid = Grid("g", [{}], (Axis("batch", (8,), ratio=2, low=4, high=16),))
  state, losses = run_out(grid, {}, lambda p: p["batch"])
  assert (state.state, state.edge, state.best) == ("edge", ("batch",), {"batch": 4})
  assert len(losses) == 3


def test_a_closed_axis_tries_its_first_values_and_then_neighbours():
  outer = Axis("outer_lr", (0.2, 0.4, 0.6, 0.8, 1.0), first=(0.6,))
  state, losses = run_out(
    Grid("g", [{}], (outer,)), {}, lambda p: abs(p["outer_lr"] - 0.8)
  )
  assert (state.state, state.best) == ("interior", {"outer_lr": 0.8})
  assert len(losses) == 4  # 0.6, its neighbours, then 1.0; never 0.2.


def test_failed_points_bound_the_search_and_failed_cells_say_so():
  grid = Grid("g", [{}], (Axis("lr", (1,), ratio=2),))
  state, _ = run_out(grid, {}, lambda p: math.inf if p["lr"] > 1 else -p["lr"])
  assert (state.state, state.best) == ("interior", {"lr": 1})
  state, losses = run_out(grid, {}, lambda p: math.inf)
  assert (state.state, state.best, len(losses)) == ("failed", None, 1)


def test_a_cell_takes_over_the_best_point_of_another():
  grid = Grid("g", [{"size": "b"}], (Axis("lr", (1,), ratio=2),))
  start = {"size": "a", "lr": 4, "batch": 16}
  todo = search(grid, {"size": "b"}, start, {}).todo
  assert todo == [{"size": "b", "lr": 4, "batch": 16}]


@pytest.mark.parametrize(
  ("cells", "axis", "message"),
  [
    ([{"m": 1}, {"m": 1}], Axis("lr", (1,)), "the cell m=1 twice"),
    ([{"m": 1}], Axis("lr", ()), "axis 'lr' of grid 'g' is empty"),
    ([{"m": 1}], Axis("lr", (0.1, 0.1)), "a value twice"),
    ([{"m": 1}], Axis("lr", (0.003,), ratio=2), "the nearest is 0.00390625"),
  ],
)
def test_errors_of_a_sweep_file(cells, axis, message):
  with pytest.raises(ValueError, match=message):
    Sweep(config=lambda p: None, grids=[Grid("g", cells, (axis,))])
