"""Errors that mean out of memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.mesh import memory


@pytest.mark.parametrize(
  ("file", "name"),
  [
    ("algorithm/method.py", "an inner step or the first state did not fit on cpu"),
    ("algorithm/inner.py", "the inner step did not fit on cpu"),
    ("algorithm/outer.py", "the outer step did not fit on cpu"),
    ("evaluate/heldout.py", "the evaluation did not fit on cpu"),
    ("elsewhere.py", "a program did not fit on cpu"),
  ],
)
def test_the_file_that_launched_the_program_names_it(file, name):
  huge = jax.jit(lambda: jnp.ones(2**45) * jnp.ones(2**45))
  code = compile("launch()", memory.PACKAGE / file, "exec")
  with pytest.raises(jax.errors.JaxRuntimeError) as caught:
    exec(code, {"launch": huge})
  line = memory.explain(caught.value)
  assert line.startswith(f"out of memory: {name}")
  assert "(asked for " in line
  assert ("mesh.fsdp" in line) == (file != "evaluate/heldout.py")
  assert "\n" not in line


def test_host_memory_counts_and_other_errors_do_not():
  with pytest.raises(MemoryError) as caught:
    np.ones(2**55)
  assert "out of memory" in memory.explain(caught.value)
  assert memory.explain(ValueError("out of memory")) is None
  assert memory.explain(jax.errors.JaxRuntimeError("INTERNAL: other")) is None
