"""A payload with bad numbers changes nothing of what the other sites compute."""

import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sites import Brisk, fields_of, make_calendar

from diloco.config import changed
from diloco.contrib.sites import measure, outer_state
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.group.holder import Holder
from diloco.contrib.sites.group.journal import Journal
from diloco.contrib.sites.group.records import Payload
from diloco.contrib.sites.group.rounds import Closing, Measured
from diloco.mesh.devices import make_mesh
from diloco.mesh.sharding import abstract
from diloco.wire import exchange

BAD = 2


class Four:
  """Four sites whose outer gradients have something in common, in float32."""

  def __init__(self, folder):
    fields = {"wire.format": "fp32", "sites.least_cosine": -0.05}
    self.calendar = Calendar(changed(make_calendar(4).config, fields))
    method = measure.method_on_cpu(self.calendar)
    self.sync, self.state = method.sync, method.init().outer
    self.measure = measure.measurer(self.calendar)
    self.said = []
    self.holder = self.new_holder(Journal(Brisk(folder)))

  def new_holder(self, journal):
    return Holder(Brisk("none"), self.calendar, journal, True, self.said.append)

  def payload(self, site, change=lambda x: x):
    """The payload of a site in fragment 0."""
    common, own = np.random.default_rng(9), np.random.default_rng(site)
    like = abstract(self.sync.shapes[0], "float32")
    draw = lambda x: common.normal(size=x.shape) + own.normal(size=x.shape)
    delta_M = jax.tree.map(lambda x: jnp.float32(change(draw(x))[None]), like)
    return np.asarray(self._encode(delta_M)).tobytes()

  @functools.partial(jax.jit, static_argnums=0)
  def _encode(self, delta_M):
    wire, keys_M = self.sync.wire, jax.random.split(jax.random.key(0), 1)
    state_M = exchange.init_state(wire, delta_M)
    return exchange.encode(wire, self.sync.mesh, delta_M, state_M, keys_M)[0]

  def close(self, payloads):
    """Closes a round with these payloads {site: bytes}."""
    holder = self.holder
    for k, x in payloads.items():
      said = fields_of(self.calendar, k, 0)
      holder._payloads[0, k] = Payload(**said, body=x)
    closing, outliers = Closing(0, tuple(payloads), (), 0.0), holder._start()[1]
    return asyncio.run(holder._closed(closing, outliers, self.measure))

  def after(self, entry):
    """Digests of the outer state after a round."""
    args = self.state.theta[0], self.state.opt_state[0]
    theta, opt_state, _ = outer_state.apply(self.sync, self.calendar, entry, *args)
    return outer_state.digest(theta, opt_state)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
  with jax.set_mesh(make_mesh(make_calendar(4).config, jax.devices()[:1])):
    yield Four(tmp_path_factory.mktemp("four"))


def flip(data: bytes) -> bytes:
  """Flips the highest bit of the exponent of the last value: 1 becomes infinite."""
  return data[:-1] + bytes([data[-1] ^ 0x40])


CASES = {
  "a flipped bit of an exponent": lambda four: flip(four.payload(BAD)),
  "a diverged site": lambda four: four.payload(BAD, lambda x: x * np.nan),
  "values a hundred times too large": lambda four: four.payload(BAD, lambda x: 100 * x),
  "a reversed sign": lambda four: four.payload(BAD, np.negative),
}


@pytest.mark.parametrize("bad", CASES.values(), ids=CASES)
def test_the_others_compute_what_they_do_without_this_payload(four, bad):
  good = {k: four.payload(k) for k in (0, 1, 3)}
  without = four.close(good)
  assert without.refused == ()
  entry = four.close(good | {BAD: bad(four)})
  assert entry.refused == (BAD,)
  said = f"Group: refuses the payload of site {BAD} in round 0: "
  assert four.said.pop().startswith(said)
  assert (entry.tokens, entry.data) == (without.tokens, without.data)
  assert four.after(entry) == four.after(without)


def test_an_honest_payload_counts_with_any_number_of_sites(four):
  for count in range(1, 5):
    entry = four.close({k: four.payload(k) for k in range(count)})
    assert entry.refused == ()
    assert len(entry.tokens) == count
  # Two sites cannot say which of them has the wrong sign.
  payloads = {0: four.payload(0), 1: four.payload(1, np.negative)}
  assert four.close(payloads).refused == ()


def test_the_numbers_are_those_of_numpy():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(4, 2, 50)).astype(np.float32)  # Four sites of two replicas.
  x[1, 1, 7] = np.nan
  products = np.einsum("knd,lmd->knlm", x, x).reshape(8, 8)
  found = measure.measured(products, sites=(0, 1, 2, 3), count=4)
  assert found[1] == Measured(None)
  unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
  for k, others in ((0, (2, 3)), (2, (0, 3)), (3, (0, 2))):
    assert found[k].norm == pytest.approx(np.linalg.norm(x[k], axis=-1).max(), 1e-5)
    pairs = [u @ v for u in unit[k] for j in others for v in unit[j]]
    assert found[k].cosine == pytest.approx(np.mean(pairs), abs=1e-6)
  assert measure.measured(products, (0, 2), 4)[0].cosine is None


def test_another_holder_knows_what_is_usual(tmp_path, four):
  first, second = Journal(Brisk(tmp_path)), Journal(Brisk(tmp_path))
  entry = four.close({k: four.payload(k) for k in (0, 1)})
  assert first.write(entry)
  second.advance()
  rounds, outliers = four.new_holder(second)._start()
  alone = {0: Measured(11 * entry.measured[0].norm)}
  assert list(outliers.refused(0, alone, {0: 64})) == [0]
  assert not outliers.refused(1, alone, {0: 64})
  # It expects the sites of the last round.
  rounds.ready(0, 1)
  rounds.sent(0, 1, now=0)
  assert rounds.close(now=1) is None
