"""The outer step against the float64 reference of Algorithm 2 (tests/reference.py).

The reference was written without sight of the package. Drawn are schedules down to
H=1, ragged fragments, up to four replicas, blocks, and states before draining.

The package is driven as the training loop drives it, through `make_streaming`,
and `Streaming`'s `init`, `step`, `drain` and `params`; only the inner step is replaced,
by a table of increments that differ between replicas and steps.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference as ref
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco.algorithm.streaming import Streaming, make_streaming
from diloco.config import default_config, resolve
from diloco.mesh import sharding
from diloco.mesh.devices import make_mesh
from diloco.spec import sizes
from diloco.spec.schedule import Schedule

FIXTURES = Path(__file__).parents[1] / "fixtures"
# E3M0 codes with one scale per this many values; None sends float32.
TENSOR, ROW = 0, -1


@dataclasses.dataclass(frozen=True)
class Program:
  """Everything that the compiled programs depend on: all but the schedule.

  With `exact`, the increments are integers and every rate a power of two, so that
  float32 makes no rounding error in `MAX_ROUNDS` rounds.
  """

  M: int
  layers: int = 3
  size: int = 1
  pattern: str = "strided"
  embedding: str = "last"
  alpha: float = 0.0
  optimizer: str = "nesterov"
  lr: float = 0.5
  mu: float = 0.5
  block: int | None = None
  exchange: str = "gather"
  feedback: float = 0.0
  keep: bool = False  # Delayed averaging: equal taus only.
  chunk: int = 0  # With one, half of each chunk is sent in e1m0.
  dtype: str = "float32"  # Of the replicas' parameters.
  exact: bool = True


MAX_ROUNDS = 3
PROGRAMS = (
  Program(M=1, pattern="whole"),
  Program(M=2, alpha=0.5, layers=5, size=2),
  Program(M=2, lr=1.0, block=4, layers=5, size=2, pattern="sequential"),
  Program(M=4, block=TENSOR, lr=1.0),
  Program(M=2, alpha=0.5, block=ROW, optimizer="sgd", exchange="psum"),
  Program(M=3, lr=0.4, mu=0.9, alpha=0.3, layers=5, size=2, exact=False),
  Program(M=3, lr=0.7, mu=0.9, block=4, alpha=0.5, exact=False),
  Program(M=2, alpha=0.5, layers=5, size=2, dtype="bfloat16"),
  Program(M=4, block=4, lr=1.0, pattern="sequential", dtype="bfloat16"),
  Program(M=4, optimizer="adam", lr=0.1, alpha=0.25, exact=False),
  Program(M=2, alpha=1.0, embedding="first"),
  # SparseLoCo: no outer momentum.
  Program(M=3, optimizer="sgd", lr=1.0, mu=0.0, chunk=4, feedback=0.75, exact=False),
  Program(M=2, block=4, alpha=0.5, feedback=1.0, exact=False),
  Program(M=2, keep=True),
  Program(M=2, block=4, keep=True, dtype="bfloat16", layers=5, size=2),
)


def draw_params(program: Program, *seed: int) -> ref.Params:
  """`twin` has as many rows as there are layers, and belongs to the embedding."""
  rng = np.random.default_rng(seed)

  def draw(*shape):
    if program.exact:
      return rng.integers(-3, 4, shape).astype(np.float64)
    return rng.normal(size=shape).astype(np.float32).astype(np.float64)

  n = program.layers
  return {
    "blocks": {"b": draw(n, 4), "w": draw(n, 2, 3)},
    "embed": {"tokens": draw(3, 3), "twin": draw(n, 2)},
  }


def plan_of(program: Program, start: ref.Params) -> Streaming:
  """The sync of a program; `run` adds the schedule."""
  c = default_config("chunked_topk", "delayed_averaging", "error_feedback")
  c.replicas = program.M
  c.sync_every = 100  # Replaced.
  c.outer.final_sync = True  # `run` has other steps.
  c.train.steps = 1
  c.train.batch_size = 8 * program.M
  c.model.num_layers = program.layers
  c.fragments.size = program.size
  c.fragments.pattern = program.pattern
  c.fragments.embedding = program.embedding
  c.overlap.alpha = program.alpha
  c.outer.optimizer = {
    "nesterov": f"sgd(momentum={program.mu}, nesterov=True)",
    "sgd": f"sgd(momentum={program.mu})" if program.mu else "sgd",
    "adam": "adam",
  }[program.optimizer]
  c.outer.learning_rate = program.lr
  c.wire.format = "fp32" if program.block is None else "e3m0"
  c.wire.block_size = program.block or 0
  if program.chunk:
    c.wire.compressor = f"chunked_topk(chunk={program.chunk})"
    c.wire.format, c.wire.density = "e1m0", 0.5
  if program.feedback:
    of = c.wire.compressor
    c.wire.compressor = f"error_feedback(beta={program.feedback}, of={of!r})"
  if program.keep:
    c.delayed_averaging.on = True
  c.wire.exchange = program.exchange
  c = resolve(c)
  mesh = make_mesh(c, jax.devices()[:1])
  return make_streaming(c, mesh, jax.tree.map(np.shape, start))


@dataclasses.dataclass
class Snapshot:
  """The package's side of `reference.Result`; moments per name, as parameters."""

  outer: ref.Params
  replicas: list[ref.Params]
  moments: dict[str, ref.Params]
  log: list[tuple]
  sent: list[int]
  received: list[int]


def run(program: Program, H: int, taus, T: int, start, inner):
  """T steps with the package.

  Args:
    program: what to compile.
    H: inner steps between two sends of a fragment.
    taus: overlap of each replica.
    T: inner steps.
    start: initial parameters.
    inner: (params_M, t) -> params_M, leaves leading with M.

  Returns:
    Snapshots after step T and after draining.
  """
  sync = plan_of(program, start)
  schedule = Schedule(len(sync.fragments), H, tuple(taus))
  sync = dataclasses.replace(sync, schedule=schedule)
  repeat = lambda x: jnp.asarray(np.stack([x] * program.M), program.dtype)
  events = []
  with jax.set_mesh(sync.mesh):
    params_M = jax.tree.map(repeat, start)
    places = sharding.shardings(params_M, sync.mesh, (sharding.REPLICA,))
    params_M = jax.device_put(params_M, places)
    state = sync.init(params_M)
    for t in range(1, T + 1):
      params_M = inner(params_M, t)
      params_M, state, more = sync.step(t, params_M, state)
      events += more
    before = snapshot(program, sync, params_M, state, events)
    params_M, state, more = sync.drain(T, params_M, state)
    return before, snapshot(program, sync, params_M, state, events + more)


def snapshot(program, sync, params_M, state, events) -> Snapshot:
  names = ("mu", "nu") if program.optimizer == "adam" else ("trace",)
  if program.optimizer == "sgd" and not program.mu:
    names = ()
  moments = {}
  for name in names:
    parts = tuple(optax.tree_utils.tree_get(s, name) for s in state.opt_state)
    moments[name] = sync.params(state.replace(theta=parts))
  host = jax.tree.map(lambda x: np.asarray(x, np.float32), params_M)
  kinds = {"send": "send", "receive": "update"}
  return Snapshot(
    outer=jax.tree.map(np.asarray, sync.params(state)),
    replicas=[jax.tree.map(lambda x, m=m: x[m], host) for m in range(program.M)],
    moments=jax.tree.map(np.asarray, moments),
    log=[(kinds[e.kind], e.step, e.fragment) for e in events],
    sent=[e.sent for e in events if e.kind == "send"],
    received=[e.sent for e in events if e.kind == "receive"],
  )


def reference_run(program: Program, H, taus, T, start, table, drain) -> ref.Result:
  fragments = ref.make_fragments(program.layers, program.size, program.pattern)
  if program.embedding == "first":
    fragments = [fragments[-1], *fragments[:-1]]
  rule = {
    "nesterov": lambda: ref.nesterov(program.lr, program.mu),
    "sgd": lambda: ref.heavy_ball(program.lr, program.mu),
    "adam": lambda: ref.adam(program.lr),
  }[program.optimizer]

  def compress(x, row):
    if program.chunk:
      return ref.largest_of_chunks(program.chunk, 0.5, 1, 0)(x, row)
    if program.block is None:
      return ref.uncompressed(x, row)
    block = {TENSOR: None, ROW: row}.get(program.block, program.block)
    return ref.quantised(block)(x, row)

  return ref.simulate(
    start,
    ref.increments(lambda m, t: table[m][t - 1]),
    fragments,
    T=T,
    H=H,
    tau=taus,
    alpha=program.alpha,
    M=program.M,
    outer=rule(),
    compress=compress,
    feedback=program.feedback,
    keep=program.keep,
    stored=lambda x: x.astype(program.dtype).astype(np.float64),
    drain=drain,
  )


def num_values(program: Program, outer: ref.Params, p: int) -> int:
  """Values of fragment p, of the outer parameters of the whole model."""
  fragment = plan_of(program, outer).fragments[p]
  layer = sum(x[0].size for x in jax.tree.leaves(outer["blocks"]))
  embed = sum(x.size for x in jax.tree.leaves(outer["embed"]))
  return len(fragment.layers) * layer + bool(fragment.rest) * embed


def compare(program: Program, got: Snapshot, want: ref.Result, T: int):
  # Draining happens "at T" in the reference and up to max(tau) later in the package.
  sends = [e for e in got.log if e[0] == "send"]
  updates = sorted((min(t, T), p) for what, t, p in got.log if what == "update")
  assert sends == [e for e in want.log if e[0] == "send"]
  assert updates == sorted((t, p) for what, t, p, *_ in want.log if what == "update")
  if program.exchange == "psum":  # Reduces float32, whatever the codes are.
    values = [4 * num_values(program, got.outer, p) for _, _, p in sends]
    assert got.sent == [round(sizes.copies("psum", program.M) * n) for n in values]
  else:
    assert got.sent == [(program.M - 1) * n for n in want.payload]
  assert got.received == [0] * len(updates)  # The senders count these bytes.
  pairs = [("outer", got.outer, want.outer)]
  pairs += [
    (f"replica {m}", got.replicas[m], want.replicas[m]) for m in range(program.M)
  ]
  moments = {"trace": "m", "mu": "m", "nu": "v"}
  pairs += [
    (name, moment, want.moment(moments[name])) for name, moment in got.moments.items()
  ]
  for what, a, b in pairs:
    a, b = ref.split(a), ref.split(b)
    assert a.keys() == b.keys()
    for key in a:
      message = f"{what}, {key}"
      if program.exact:
        representable = b[key].astype(np.float32).astype(np.float64)
        np.testing.assert_array_equal(b[key], representable, "float32 is not exact")
        np.testing.assert_array_equal(a[key], b[key], message)
      else:
        # A few dozen float32 operations on values of order 1 to 10.
        np.testing.assert_allclose(
          a[key], b[key], rtol=1e-5, atol=1e-5, err_msg=message
        )


@st.composite
def cases(draw):
  """(program, H, taus, T): up to MAX_ROUNDS updates of each fragment."""
  program = draw(st.sampled_from(PROGRAMS))
  H = draw(st.integers(1, 5))
  tau = st.integers(0, H - 1)
  if program.keep or draw(st.booleans()):
    taus = (draw(tau),) * program.M
  else:
    taus = tuple(draw(tau) for _ in range(program.M))
  T = draw(st.integers(max(H - 1, 1), MAX_ROUNDS * H + H - 1))
  return program, H, taus, T


def check(program: Program, H: int, taus: tuple[int, ...], T: int):
  start = draw_params(program, 0)
  table = [[draw_params(program, 1, m, t) for t in range(T)] for m in range(program.M)]

  def inner(params_M, t):
    add = jax.tree.map(
      lambda *x: jnp.asarray(np.stack(x), jnp.float32),
      *[table[m][t - 1] for m in range(program.M)],
    )
    return jax.tree.map(lambda x, y: (x + y).astype(x.dtype), params_M, add)

  before, after = run(program, H, taus, T, start, inner)
  args = (program, H, taus, T, start, table)
  compare(program, before, reference_run(*args, drain=False), T)
  compare(program, after, reference_run(*args, drain=True), T)


@given(case=cases())
# Several fragments in flight, more than one round, and a tail to drain.
@example(case=(PROGRAMS[1], 5, (4, 4), 18))
# Replicas of different speed; the earliest updates, the last merges while draining.
@example(case=(PROGRAMS[5], 5, (1, 3, 4), 18))
# Replicas that take nothing of the outer parameters.
@example(case=(PROGRAMS[10], 3, (1, 1), 8))
# Errors of three rounds.
@example(case=(PROGRAMS[11], 4, (1, 0, 3), 15))
@example(case=(PROGRAMS[12], 4, (1, 1), 15))
# Steps that are kept over three rounds, and in the drain.
@example(case=(PROGRAMS[13], 4, (3, 3), 15))
@example(case=(PROGRAMS[14], 5, (2, 2), 19))
# More fragments than steps between two sends of one.
@example(case=(PROGRAMS[3], 2, (1, 0, 1, 1), 7))
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_the_outer_step_equals_the_reference(case):
  check(*case)


def test_the_drain_merges_only_sent_fragments():
  """Fragment 0 was last sent at 8; its send at 12 never happens, for T = 11.

  Replica 1 would have received that at 13, which is within the drain of replica 2,
  and must not merge what it merged at 9 a second time.
  """
  check(Program(M=3, pattern="whole", lr=1.0, exact=False), 4, (0, 1, 3), 11)


@pytest.mark.parametrize("case", range(3))
def test_outer_steps_equal_those_of_pytorch(case):
  """Against torch.optim.SGD([x], lr, momentum, nesterov=True) of torch 2.13.0 on a CPU.

  A torch.Generator of seed 0 draws theta = randn(4), then gradients = 0.1 randn(8, 4).
  One replica, H=1, alpha=0: an inner step that subtracts g makes g the outer
  gradient, to the rounding of theta - (theta - g).
  """
  fixture = json.loads((FIXTURES / "torch_nesterov.json").read_text())
  torch = fixture["cases"][case]
  program = Program(
    M=1, layers=1, pattern="whole", lr=torch["lr"], mu=torch["momentum"], exact=False
  )
  row = lambda x: {"blocks": {"w": np.array([x])}, "embed": {"tokens": np.array(x)}}

  def inner(params_M, t):
    g = row(np.array(fixture["gradients"][t - 1], np.float32))
    return jax.tree.map(lambda x_M, g: x_M - g[None], params_M, g)

  T = len(fixture["gradients"])
  _, got = run(program, 1, (0,), T, row(fixture["theta"]), inner)
  for leaf in (got.outer["blocks"]["w"][0], got.outer["embed"]["tokens"]):
    np.testing.assert_allclose(leaf, torch["trajectory"][-1], rtol=1e-5, atol=1e-5)
