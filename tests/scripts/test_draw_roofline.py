"""The counts of the roofline picture agree with the FLOPs of MFU and with arrays."""

import pathlib
import sys

import jax
import pytest

from diloco.algorithm.make import make_plan
from diloco.algorithm.state import abstract_state
from diloco.config import changed, resolve
from diloco.mesh.devices import make_mesh
from diloco.spec.shapes import flops_per_token

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts" / "benchmarks"))
import bench_step
import draw_roofline


@pytest.mark.parametrize(("remat", "recomputed"), [("none", 0), ("full", 1 / 4)])
def test_products_are_those_of_mfu_and_the_recomputed_forward_pass(
  tiny, remat, recomputed
):
  tiny.model.remat = remat
  c = resolve(tiny)
  work = draw_roofline.count(c, keeps_scores=True)
  names = (draw_roofline.ATTENTION, draw_roofline.SCORES, draw_roofline.FEED_FORWARD)
  blocks, loss = sum(work[name].flops for name in names), work[draw_roofline.LOSS].flops
  # The backward pass has twice the products of the forward pass; recomputing them in
  # the blocks adds a third.
  assert blocks * (1 - recomputed) + loss == pytest.approx(
    flops_per_token(c.model) * c.tokens_per_step
  )


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_bytes_of_the_outer_step_are_those_of_its_arrays(tiny, alpha):
  c = changed(resolve(tiny), {"overlap.alpha": alpha})
  mesh = make_mesh(c, jax.devices()[:1])
  plan = make_plan(c, mesh)
  outer = abstract_state(c, mesh, plan).outer
  count = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  for p, fragment in enumerate(plan.shapes):
    theta, momentum = count(outer.theta[p]), count(outer.opt_state[p])
    payloads, replicas = plan.payload(p).size, c.replicas * theta
    send = replicas + theta + payloads
    update = payloads + 2 * (theta + momentum)
    merge = theta + replicas * (2 if alpha else 1)
    assert bench_step.outer_bytes(c, fragment) == send + update + merge
