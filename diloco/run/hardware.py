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

# Device memory that XLA gives to programs; TPU v5e has 16 GiB, v6e 32, v5p 96.
HBM_BYTES = {
  "TPU v5 lite": int(15.75 * 2**30),
  "TPU v5e": int(15.75 * 2**30),
  "TPU v5p": int(95.74 * 2**30),
  "TPU v5": int(95.74 * 2**30),
  "TPU v6": int(31.25 * 2**30),
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
