"""Counts the memory of parameters and optimizers (2501.18512, Section 2.5)."""

from diloco.util.types import Json

# Transfer rates of an H100 in bytes per second: of its memory, which the paper mistakes
# for PCIe, and of PCIe 5.0 in one direction
# (https://www.nvidia.com/en-gb/data-center/h100).
RATES = {"2 TB/s": 2e12, "64 GB/s of PCIe": 64e9}


def memory(params: float, fragment: float) -> list[Json]:
  """Returns the memory of one replica in float32, and the time to load this memory.

  Args:
    params: N.
    fragment: parameters of the largest fragment, at most N.

  Returns:
    Rows with GB (1e9 bytes), GiB (2^30 bytes), the size divided by that of the first
    row, and the loading time in milliseconds at each of RATES. Data-parallel needs the
    first row; DiLoCo adds the second row. If hosts hold the fragments that are not
    being sent, the device needs the third row instead of the second row.
  """
  states = {
    "parameters, two moments": 3 * params,
    "outer parameters, momentum": 2 * params,
    "of these one fragment": 2 * fragment,
  }
  return [
    {
      "state": name,
      "GB": 4 * values / 1e9,
      "GiB": 4 * values / 2**30,
      "share": values / (3 * params),
      **{at: 4e3 * values / rate for at, rate in RATES.items()},
    }
    for name, values in states.items()
  ]
