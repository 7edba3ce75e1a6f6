"""Peak matrix throughput and memory of known accelerators."""

# bfloat16 dense FLOP/s per chip, from the vendors' data sheets; keys are prefixes
# of jax.Device.device_kind.
PEAK_FLOPS = {
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5e": 197e12,
  "TPU v5p": 459e12,
  "TPU v5": 459e12,
  "TPU v6": 918e12,
  "NVIDIA A100": 312e12,
  "NVIDIA H100": 989e12,
  "NVIDIA H200": 989e12,
}

# Device memory per JAX device, from the vendors' data sheets.
HBM_BYTES = {
  "TPU v4": 32 * 2**30,
  "TPU v5 lite": 16 * 2**30,
  "TPU v5e": 16 * 2**30,
  "TPU v5p": 95 * 2**30,
  "TPU v5": 95 * 2**30,
  "TPU v6": 32 * 2**30,
}


def peak_flops(device_kind: str) -> float | None:
  """Peak FLOP/s of a device kind, None where it is not known."""
  return _of_kind(PEAK_FLOPS, device_kind)


def hbm_bytes(device_kind: str) -> int | None:
  """Device memory in bytes of a device kind, None where it is not known."""
  return _of_kind(HBM_BYTES, device_kind)


def _of_kind(table: dict, device_kind: str):
  for prefix, value in table.items():
    if device_kind.startswith(prefix):
      return value
  return None
