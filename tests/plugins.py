"""Two compressors, a model and an outer optimizer, as a user would register them.

Importing this file registers them. `signs`, `bigram` and `signed` are `one_bit`,
`pairs` and `sign_sgd` of docs/extend.md. `feedback` keeps what the codes of earlier
sends lost, and adds it to the next send.
"""

import re
import sys
import types

import jax.numpy as jnp
from running import ROOT

from diloco.spec import sizes
from diloco.spec.plugins import Compressor, register
from diloco.wire import compressors

EXAMPLES = {
  re.match(r"# (\w+)\.py", code)[1]: code
  for code in re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/extend.md").read_text(), re.S
  )
}


def load(example: str, name: str) -> None:
  """Imports a plug-in of the page by another name, so that its own stays free."""
  module = sys.modules[name] = types.ModuleType(name)
  exec(EXAMPLES[example].replace(f'"{example}"', f'"{name}"'), vars(module))


load("one_bit", "signs")
load("pairs", "bigram")
load("sign_sgd", "signed")


def encode_feedback(wire, x_NxS, state, row, key):
  x_NxS = x_NxS + state
  code, _ = compressors.quantize(wire, x_NxS, (), row, key)
  return code, x_NxS - decode_feedback(wire, code, *x_NxS.shape, row)


decode_feedback = compressors.get("quantize").decode

own = encode_feedback, decode_feedback, sizes.quantize, jnp.zeros_like
register("wire.compressor", "feedback", Compressor(*own))
