"""Peak matrix throughput of known accelerators, for model FLOPs utilisation."""

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


def peak_flops(device_kind: str) -> float | None:
  """Peak FLOP/s of a device kind, None where it is not known."""
  for prefix, peak in PEAK_FLOPS.items():
    if device_kind.startswith(prefix):
      return peak
  return None
