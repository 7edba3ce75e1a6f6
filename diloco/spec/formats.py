"""Number formats: plain floats, eXmY of 2 to 8 bits, formats of plug-ins. No JAX.

eXmY (arXiv 2405.13938) has one sign bit, X exponent bits, Y mantissa bits and
subnormals, but no infinity and no NaN: larger values saturate. Some formats are also
types of `ml_dtypes` (float8_e4m3fn, ...); codes that `ml_dtypes` reserves are not used.

Streaming DiLoCo sends E3M0 (2501.18512, section 2.4): zero and seven powers of two.
"""

import dataclasses
import re

from diloco.errors import ConfigError
from diloco.spec.plugins import NAMES, hint
from diloco.util.command import meant

# Bytes per value of the plain formats, which have no scale.
PLAIN = {"fp32": 4, "bf16": 2}


@dataclasses.dataclass(frozen=True)
class Format:
  """A format of 1 + exponent_bits + mantissa_bits bits.

  Attributes:
    name: the name in configs, for example e3m0.
    exponent_bits: X.
    mantissa_bits: Y.
    bias: a normal value's exponent is its exponent field minus the bias.
    max_code: magnitude code of the largest finite value.
  """

  name: str
  exponent_bits: int
  mantissa_bits: int
  bias: int
  max_code: int

  @property
  def bits(self) -> int:
    return 1 + self.exponent_bits + self.mantissa_bits

  @property
  def min_exponent(self) -> int:
    """Exponent of the smallest normal value, and of subnormals."""
    return 1 - self.bias

  @property
  def max_value(self) -> float:
    return self.magnitude(self.max_code)

  def magnitude(self, code: int) -> float:
    """Returns the value of a magnitude code as a Python float."""
    field, mantissa = divmod(code, 1 << self.mantissa_bits)
    if field:
      mantissa += 1 << self.mantissa_bits
    return mantissa * 2.0 ** (max(field, 1) - self.bias - self.mantissa_bits)


# Formats of ml_dtypes that reserve codes for infinity or NaN: {name: code of the
# largest finite value}.
_RESERVED = {"e5m2": 0x7B, "e4m3": 0x77, "e3m4": 0x6F, "e4m3fn": 0x7E}


def parse_format(name: str) -> Format:
  """Returns the format of a name such as e3m0, e2m1 or e4m3fn.

  Raises:
    ConfigError: no format of 2 to 8 bits has this name.
  """
  match = re.fullmatch(r"e(\d)m(\d)(fn)?", name)
  if match and (not match[3] or name in _RESERVED):
    x, y = int(match[1]), int(match[2])
    if x >= 1 and 2 <= 1 + x + y <= 8:
      bias = (1 << (x - 1)) - 1
      return Format(name, x, y, bias, _RESERVED.get(name, (1 << (x + y)) - 1))
  known = "".join(f", {format_name}" for format_name in NAMES["wire.format"])
  raise ConfigError(
    f"wire.format is {name!r}; choose fp32, bf16 or eXmY with 1 + X + Y from 2 to 8"
    f" bits and X at least 1, for example e3m0, e2m1, e4m3fn{known}"
    f"{hint(name) or meant(name, ('fp32', 'bf16', 'e3m0', 'e4m3'))}."
  )


def code_bits(name: str) -> int:
  """Returns the bits per value of a format: eXmY, or one of a plug-in."""
  block = NAMES["wire.format"].get(name)
  return block.bits if block else parse_format(name).bits


def block_bytes(name: str) -> int:
  """Returns the bytes that a block sends besides its codes: for eXmY, one scale."""
  block = NAMES["wire.format"].get(name)
  return block.block_bytes if block else 1
