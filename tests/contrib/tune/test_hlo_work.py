"""Counts the bytes and the FLOPs of compiled programs."""

import math

import jax
import jax.numpy as jnp
import pytest
from dry_run_needs import needs_cuda_plugin, needs_libtpu

from diloco.aot import topology
from diloco.aot.programs import Programs
from diloco.config import default_config, resolve
from diloco.contrib.tune import hlo_work

# Of a TPU program: one copy to the vector memory, one fusion that changes a row.
IN_PLACE = """
%fused (param_0: f32[8,128], param_1: f32[8,128], param_2: s32[]) -> f32[8,128] {
  %param_1 = f32[8,128]{1,0} parameter(1)
  %param_0 = f32[8,128]{1,0} parameter(0)
  %param_2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,128]{1,0} dynamic-slice(%param_1, %param_2, %zero), sizes={1,128}
  ROOT %out = f32[8,128]{1,0} dynamic-update-slice(%param_0, %row, %param_2, %zero)
}

ENTRY %main (x: f32[8,128], y: f32[8,128], i: s32[]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %y = f32[8,128]{1,0:T(8,128)} parameter(1)
  %i = s32[]{:T(128)S(6)} parameter(2)
  %start = (f32[8,128]{1,0}, f32[8,128]{1,0:T(8,128)S(1)}, u32[]) copy-start(%y)
  %done = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%start)
  %log = f32[8,128]{1,0:T(8,128)S(1)} log(%done)
  ROOT %end = f32[8,128]{1,0:T(8,128)} fusion(%x, %MEMORY, %i), kind=kLoop, calls=%fused
}
"""


@pytest.mark.parametrize(
  ("operand", "moved"),
  # The copy reads 8 rows; the fusion writes one row, and reads it if not from VMEM.
  [("log", 8 + 1), ("y", 8 + 1 + 1)],
)
def test_slices_and_vector_memory(operand, moved):
  assert hlo_work.nbytes(IN_PLACE.replace("MEMORY", operand)) == moved * 128 * 4


def test_an_operation_reads_operands_and_writes_results():
  x = jnp.ones((100, 10))
  text = jax.jit(lambda x, y: 2 * x + y).lower(x, x).compile().as_text()
  assert hlo_work.nbytes(text) == 3 * 4 * 1000


def test_a_loop_counts_each_round():
  def program(rounds):
    loop = lambda x: jax.lax.fori_loop(0, rounds, lambda i, x: jnp.cos(x), x)
    return hlo_work.nbytes(jax.jit(loop).lower(jnp.ones(10_000)).compile().as_text())

  # A round reads and writes x; the counter adds little.
  each = (program(7) - program(5)) / 2
  assert 80_000 <= each < 81_000


def test_a_loop_without_a_known_end_is_an_error():
  program = lambda n, x: jax.lax.fori_loop(0, n, lambda i, x: jnp.cos(x), x)
  text = jax.jit(program).lower(3, jnp.ones(100)).compile().as_text()
  with pytest.raises(ValueError, match=r"rounds of loop 'while.* are not known"):
    hlo_work.nbytes(text)


# Of a v5p program: XLA gathers a weight in 16 shards beside the products with them, two
# in a round.
UNROLLED = """
%condition (p: (u32[], f32[64])) -> pred[] {
  %p = (u32[]{:T(128)}, f32[64]{0}) parameter(0)
  %limit = u32[]{:T(128)} constant(16), metadata={op_name="dot_general"}
  %i = u32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%body (p: (u32[], f32[64])) -> (u32[], f32[64]) {
  %p = (u32[]{:T(128)}, f32[64]{0}) parameter(0)
  %two = u32[]{:T(128)} constant(STRIDE)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[64]{0} get-tuple-element(%p), index=1
  %next = u32[]{:T(128)S(6)} add(%i, %two), metadata={op_name="dot_general"}
  %cos = f32[64]{0} cosine(%x)
  ROOT %out = (u32[]{:T(128)}, f32[64]{0}) tuple(%next, %cos)
}

ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %zero = u32[]{:T(128)} constant(0)
  %in = (u32[]{:T(128)}, f32[64]{0}) tuple(%zero, %x)
  %loop = (u32[], f32[64]{0}) while(%in), condition=%condition, body=%body
  ROOT %end = f32[64]{0} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(("stride", "rounds"), [(1, 16), (2, 8), (3, 6)])
def test_rounds_of_a_loop_that_xla_has_unrolled(stride, rounds):
  found = {
    x.name: x.rounds for x in hlo_work.works(UNROLLED.replace("STRIDE", f"{stride}"))
  }
  assert found["cos"] == rounds


# Forms of a matrix product in TPU programs: plain, a weight's gradient over 8
# sequences, a batch of 8, and a fusion of one with a sum.
PRODUCTS = """
%fused (param_0: bf16[64,32], param_1: bf16[32,16]) -> bf16[64,16] {
  %param_0 = bf16[64,32]{1,0} parameter(0)
  %param_1 = bf16[32,16]{1,0} parameter(1)
  %c = bf16[64,16]{1,0} convolution(%param_0, %param_1), dim_labels=bf_io->bf
  ROOT %s = bf16[64,16]{1,0} add(%c, %c)
}

ENTRY %main (a: bf16[64,32], b: bf16[32,16]) -> bf16[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  %x = bf16[8,64,32]{2,1,0} parameter(2)
  %y = bf16[8,64,16]{2,1,0} parameter(3)
  %z = bf16[8,32,16]{2,1,0} parameter(4)
  %plain = bf16[64,16]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
  %w = bf16[32,16,1]{2,1,0} convolution(%x, %y), window={size=8}
  %t = bf16[8,64,16]{2,1,0} convolution(%x, %z), window={size=8 stride=7 lhs_dilate=8}
  ROOT %f = bf16[64,16]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused
}
"""


def test_flops_of_the_forms_of_a_product_on_tpus():
  one = 2 * 64 * 32 * 16
  found = {x.name: x.flops for x in hlo_work.works(PRODUCTS)}
  assert found == pytest.approx({"plain": one, "w": 8 * one, "t": 8 * one, "f": one})


def test_flops_of_batched_products_in_a_loop():
  def loop(x, y):
    body = lambda i, x: jnp.einsum("bij,bjk->bik", x, y)
    return jax.lax.fori_loop(0, 3, body, x)

  args = jnp.ones((4, 64, 48)), jnp.ones((4, 48, 48))
  text = jax.jit(loop).lower(*args).compile().as_text()
  flops = sum(x.rounds * x.flops for x in hlo_work.works(text))
  assert flops == pytest.approx(3 * 4 * 2 * 64 * 48 * 48)


def ratios(chip: str) -> dict[str, float]:
  """Compiles a fragment of 50M values; bytes of main memory over the least possible."""
  c = default_config()
  c.replicas, c.fragments.size = 2, 4
  c.model.num_layers, c.model.dim, c.model.num_heads = 4, 1024, 8
  c.train.steps = 1000
  c = resolve(c)
  programs = Programs(c, topology.make_mesh(c, topology.describe(chip)))
  theta = programs.state.outer.theta[programs.fragment]
  values = 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(theta))
  assert values > 200e6
  least = {
    "send": 3 * values + programs.payload.size,
    "update": programs.payload.size + 4 * values,
    "merge": (5 if c.overlap.alpha else 3) * values,
  }
  with jax.set_mesh(programs.mesh):
    texts = {k: programs.lower[k]().compile().as_text() for k in least}
  moved = {k: hlo_work.nbytes(text) for k, text in texts.items()}
  for k, n in least.items():
    print(f"{k:<7} {moved[k]:>14,} bytes   least {n:>13,}   {moved[k] / n:.2f}")
  return {k: moved[k] / least[k] for k in least}


@needs_libtpu
@pytest.mark.slow("compiles for TPUs")
def test_the_outer_step_moves_few_bytes_on_tpus():
  found = ratios("v5e:1x1")
  assert found["send"] < 1.4
  assert found["update"] < 1.15
  assert found["merge"] < 1.75


@needs_cuda_plugin
@pytest.mark.slow("compiles for GPUs")
def test_the_outer_step_moves_few_bytes_on_gpus():
  found = ratios("h100:1")
  assert found["send"] < 3.8  # Three passes over outer gradients in memory.
  assert found["update"] < 1.9
  assert found["merge"] < 1.75
