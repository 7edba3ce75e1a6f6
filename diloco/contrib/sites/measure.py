"""Measures the payloads of a round, for `rounds.Outliers`.

A site with wrong numbers may also send a wrong norm. So the holder of the lease decodes
the payloads that came, and measures the outer gradients that would enter the mean.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from diloco.algorithm import sync_metrics
from diloco.algorithm.method import Method, make_method
from diloco.algorithm.placement import OnDevices
from diloco.config import changed
from diloco.contrib.sites import outer_state
from diloco.contrib.sites.calendar import Calendar, config_of
from diloco.contrib.sites.group.rounds import Measure, Measured
from diloco.mesh import sharding
from diloco.mesh.devices import make_mesh
from diloco.wire import exchange


def method_on_cpu(calendar: Calendar) -> Method:
  """Makes the method of a site on the first CPU of this process."""
  c = changed(calendar.config, {"mesh.replica": 1, "mesh.fsdp": 1})
  return make_method(config_of(c, 0), make_mesh(c, jax.devices("cpu")[:1]))


@functools.cache
def measurer(calendar: Calendar) -> Measure:
  """Returns a function that measures the payloads {site: bytes} of a round.

  The function runs on a CPU of this process alone, even if the site has several
  processes.
  """
  sync = method_on_cpu(calendar).sync
  mesh = sync.place.devices
  sync = dataclasses.replace(sync, place=OnDevices(mesh))

  @functools.partial(jax.jit, static_argnums=1)
  def products(payload: jax.Array, p: int) -> jax.Array:
    like = sharding.abstract(sync.shapes[p], "float32")
    delta_R = exchange.decode(sync.wire, mesh, payload, like, (None,))
    return sync_metrics.products(delta_R)

  def measure(number: int, payloads: Mapping[int, bytes]) -> dict[int, Measured]:
    p = calendar.rounds[number][1]
    with jax.set_mesh(mesh):
      products_RxR = products(outer_state.place(sync, calendar, p, payloads), p)
    return measured(np.asarray(products_RxR), [*payloads], calendar.sites)

  return measure


def measured(
  products_RxR: np.ndarray, sites: Sequence[int], count: int
) -> dict[int, Measured]:
  """Returns the norm and the mean cosine of the payload of each site that has sent.

  Args:
    products_RxR: scalar products of the outer gradients of all replicas, site after
      site.
    sites: the sites that have sent.
    count: number of all sites.
  """
  n = len(products_RxR) // count
  products_KxNxKxN = products_RxR.astype(np.float64).reshape(count, n, count, n)
  norms_KxN = np.sqrt(np.diag(products_RxR)).reshape(count, n)
  finite = [k for k in sites if np.isfinite(norms_KxN[k]).all()]
  norms_FxN = np.maximum(norms_KxN[finite], 1e-30)
  of_finite = products_KxNxKxN[finite][:, :, finite]
  cosines_FxF = (of_finite / norms_FxN[:, :, None, None] / norms_FxN).mean((1, 3))
  others_F = (cosines_FxF.sum(1) - np.diag(cosines_FxF)) / max(len(finite) - 1, 1)
  known = {
    k: Measured(float(norms.max()), float(cosine) if len(finite) > 2 else None)
    for k, norms, cosine in zip(finite, norms_FxN, others_F)
  }
  return {k: known.get(k, Measured(None)) for k in sites}
