"""Peak matrix throughput and memory of known accelerators."""

# By prefix of jax.Device.device_kind: bfloat16 dense FLOP/s per chip, from the vendors'
# data sheets, and the device memory in GiB that XLA gives to programs (None: unknown).
CHIPS = {
  "TPU v4": (275e12, None),
  "TPU v5 lite": (197e12, 15.75),
  "TPU v5e": (197e12, 15.75),
  "TPU v5p": (459e12, 95.74),
  "TPU v5": (459e12, 95.74),
  "TPU v6": (918e12, 31.25),
  "NVIDIA A100": (312e12, None),
  "NVIDIA H100": (989e12, None),
  "NVIDIA H200": (989e12, None),
}


def peak_flops(device_kind: str) -> float | None:
  """Peak FLOP/s of a kind of device, None if unknown."""
  return _chip(device_kind)[0]


def hbm_bytes(device_kind: str) -> int | None:
  """Device memory in bytes of a kind of device, None if unknown."""
  gib = _chip(device_kind)[1]
  return None if gib is None else int(gib * 2**30)


def _chip(device_kind: str) -> tuple[float | None, float | None]:
  matches = (CHIPS[prefix] for prefix in CHIPS if device_kind.startswith(prefix))
  return next(matches, (None, None))
