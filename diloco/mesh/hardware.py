"""Peak matrix throughput and memory of known accelerators."""

import os

# {prefix of jax.Device.device_kind: (dense bfloat16 FLOP/s per chip, from the vendors'
# data sheets; device memory in GiB, None: unknown)}. The memory of a TPU is the memory
# that XLA gives to programs; the memory of a GPU is the memory that the driver reports.
CHIPS = {
  "TPU v4": (275e12, None),
  "TPU v5 lite": (197e12, 15.75),
  "TPU v5e": (197e12, 15.75),
  "TPU v5p": (459e12, 95.74),
  "TPU v5": (459e12, 95.74),
  "TPU v6": (918e12, 31.25),
  "NVIDIA A100": (312e12, None),
  "NVIDIA H100 80GB HBM3": (989e12, 79.11),
  "NVIDIA H100 PCIe": (756e12, None),
  "NVIDIA H100 NVL": (835e12, None),
  "NVIDIA H100": (989e12, None),
  "NVIDIA H200 NVL": (835e12, None),
  "NVIDIA H200": (989e12, 141.0),
}


def peak_flops(device_kind: str) -> float | None:
  """Returns the peak FLOP/s of a kind of device, None if unknown."""
  return _chip(device_kind)[0]


def hbm_bytes(device_kind: str) -> int | None:
  """Returns the bytes of device memory that XLA gives to programs, None if unknown."""
  gib = _chip(device_kind)[1]
  if gib is None:
    return None
  # XLA reserves this share of a GPU's memory for its programs.
  share = float(os.environ.get("XLA_CLIENT_MEM_FRACTION") or 0.75)
  return int((share if device_kind.startswith("NVIDIA") else 1.0) * gib * 2**30)


def _chip(device_kind: str) -> tuple[float | None, float | None]:
  matches = (CHIPS[prefix] for prefix in CHIPS if device_kind.startswith(prefix))
  return next(matches, (None, None))
