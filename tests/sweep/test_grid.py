"""The search of a cell: how it grows, bounds, failures, starting points, errors."""

import math

import hypothesis
import pytest
from hypothesis import strategies as st

from diloco.sweep.chart import PLAIN, Chart
from diloco.sweep.grid import Axis, Grid, Sweep, exponent, key, power, powers
from diloco.sweep.search import search

ROOT2 = 2**0.5


def known(losses: dict):
  """Makes a function that returns the loss of a point, or None if it has no loss."""
  return lambda point: losses.get(key(point))


def run_out(grid, cell, loss, start=None):
  """Searches a cell to its end against a loss function; returns (Search, losses)."""
  losses = {}
  for _ in range(200):
    state = search(grid, cell, start, known(losses))
    if not state.todo:
      return state, losses
    losses |= {key(p): loss(p) for p in state.todo}
  raise AssertionError("the search does not end")


def test_a_power_is_the_same_number_however_it_is_computed():
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
def test_a_search_grows_until_the_best_point_is_interior(lr, batch, first):
  """On a bowl, the search ends at the bottom and knows both neighbours there."""
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


def test_the_whole_first_grid_runs_before_the_search_grows():
  grid = Grid("g", [{}], (Axis("lr", powers(2, -3, -1), ratio=2), Axis("m", (1, 2))))
  assert len(search(grid, {}, None, known({})).todo) == 6


def test_a_search_stops_at_bounds_and_reports_them():
  grid = Grid("g", [{}], (Axis("batch", (8,), ratio=2, low=4, high=16),))
  state, losses = run_out(grid, {}, lambda p: p["batch"])
  assert (state.state, state.edge, state.best) == ("edge", ["batch"], {"batch": 4})
  assert len(losses) == 3


def test_an_axis_without_ratio_tries_first_values_and_then_neighbours():
  outer = Axis("outer_lr", (0.2, 1.0, 0.4, 0.6, 0.8), first=(0.6,))  # Gets sorted.
  state, losses = run_out(
    Grid("g", [{}], (outer,)), {}, lambda p: abs(p["outer_lr"] - 0.8)
  )
  assert (state.state, state.best) == ("interior", {"outer_lr": 0.8})
  assert len(losses) == 4  # 0.6, its neighbours, then 1.0; never 0.2.


def test_failed_points_bound_the_search_and_can_fail_the_cell():
  grid = Grid("g", [{}], (Axis("lr", (1,), ratio=2),))
  state, _ = run_out(grid, {}, lambda p: math.inf if p["lr"] > 1 else -p["lr"])
  assert (state.state, state.best) == ("interior", {"lr": 1})
  state, losses = run_out(grid, {}, lambda p: math.inf)
  assert (state.state, state.best, len(losses)) == ("failed", None, 1)


def test_a_cell_starts_from_the_best_point_of_another():
  grid = Grid("g", [{"size": "b"}], (Axis("lr", (1,), ratio=2),))
  start = {"size": "a", "lr": 4, "batch": 16}
  todo = search(grid, {"size": "b"}, start, known({})).todo
  assert todo == [{"size": "b", "lr": 4, "batch": 16}]


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: Axis("lr", ()), "axis 'lr' is empty"),
    (lambda: Axis("lr", (x for x in (1, 2))), "the values of axis 'lr' are <generator"),
    (lambda: Axis("lr", (0.1, 0.1)), "axis 'lr' has a value twice"),
    (lambda: Axis("lr", (0.003,), ratio=2), "the nearest is 0.00390625"),
    (lambda: Axis("lr", (1,), ratio=1), "has the ratio 1 and the values"),
    (lambda: Axis("lr", (1,), ratio=math.inf), "has the ratio inf and the values"),
    (lambda: Axis("lr", (0,), ratio=2), "ratio 2 and the values .0,.; give a ratio ab"),
    (lambda: Axis("lr", (1, 2), first=(3,)), r"begins with \(3,\), which are not all"),
    (lambda: Axis("lr", (1, 2)).neighbours(3), "starts from 3, which is none of"),
    (lambda: Grid("g", [{"m": 1}, {"m": 1}]), "the cell m=1 twice"),
    (lambda: Grid("g", ["a"]), "the cells of grid 'g' have 'a', which is no dict"),
    (lambda: Grid("g", [{}], Axis("lr", (1,))), "the axes of grid 'g' are Axis"),
    (
      lambda: Grid("g", [{}], [Axis("lr", (i,)) for i in (1, 2)]),
      "the axis 'lr' twice",
    ),
    (lambda: Grid("g", [{"lr": 3}], [Axis("lr", (1,))]), "its cell lr=3 sets lr"),
    (lambda: Sweep(dict, []), "no cell to run"),
    (lambda: Sweep(dict, [Grid("g", [])]), "no cell to run"),
    (lambda: Sweep(dict, ["g"]), "the grids of a sweep have 'g', which is no Grid"),
    (lambda: Sweep(dict, [Grid("g", [{}])], {"A": 1}), "A=1; give the value as a text"),
    *(
      (
        lambda chart=chart: Sweep(dict, [Grid("g", [{"tau": 1}])], chart=chart),
        f"the chart asks for '{name}', which no cell or axis has; they have tau",
      )
      for name, chart in (
        ("rat", Chart("t", "rat")),
        ("m", Chart("t", "tau", ("m",))),
        ("lr", Chart("t", "tau", y=(("lr", ""),))),
        ("first", Chart("t", "tau", against="first")),
        ("algorithm", Chart("t", "tau", against=PLAIN)),
      )
    ),
  ],
)
def test_a_sweep_that_cannot_be_searched_is_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
