"""Counts the bytes that one replica puts on the wire. No JAX.

An all-gather of payloads sends each replica's payload to each of the M-1 others; a
ring all-reduce of n bytes makes each replica send 2 (M-1)/M n: of data-parallel's
gradients, and of decoded float32 values where `wire.exchange` is psum. For M=2 and
16-bit gradients that is 16 bits per parameter and step for data-parallel against 4
bits per parameter and H steps: 400x at H=100 (2501.18512, Section 3.2.2), less the
scales.
"""

import dataclasses

# Of a gradient value in the papers' count, to which all ratios refer.
GRADIENT_BYTES = 2


def gather_bytes(replicas: int, payload: int) -> int:
  """Bytes one replica sends when payloads of this size are all-gathered."""
  return (replicas - 1) * payload


def all_reduce_bytes(replicas: int, size: float) -> float:
  """Bytes one replica sends in a ring all-reduce of `size` bytes."""
  return 2 * (replicas - 1) / replicas * size


def sync_bytes(exchange: str, replicas: int, size: int) -> int:
  """Bytes one replica sends in a sync of one fragment.

  Args:
    exchange: as `config.wire.exchange`.
    replicas: M.
    size: bytes of one replica's packed codes (gather), or of the float32 values that
      are reduced (psum).
  """
  if exchange == "psum":
    return round(all_reduce_bytes(replicas, size))
  return gather_bytes(replicas, size)


def data_parallel_bytes(
  replicas: int, num_params: int, steps: int, value_bytes: int = GRADIENT_BYTES
) -> float:
  """Bytes one of M data-parallel workers sends in `steps` steps."""
  return all_reduce_bytes(replicas, value_bytes * num_params) * steps


@dataclasses.dataclass
class Ledger:
  """Running account of one run; saved with its checkpoints.

  Attributes:
    replicas: M.
    exchange: as `config.wire.exchange`.
    fragments: {str(p): [syncs, bytes sent by one replica]}.
    peak: most bytes that one replica sent at the end of one step.
    latest: [step, bytes] of the latest step with a send.
  """

  replicas: int
  exchange: str = "gather"
  fragments: dict[str, list[int]] = dataclasses.field(default_factory=dict)
  peak: int = 0
  latest: list[int] = dataclasses.field(default_factory=lambda: [0, 0])

  def record(self, fragment: int, step: int, size: int) -> int:
    """Books one sync, with `size` as of `sync_bytes`; returns the bytes sent."""
    sent = sync_bytes(self.exchange, self.replicas, size)
    account = self.fragments.setdefault(str(fragment), [0, 0])
    account[0] += 1
    account[1] += sent
    before = self.latest[1] if self.latest[0] == step else 0
    self.latest = [step, before + sent]
    self.peak = max(self.peak, self.latest[1])
    return sent

  @property
  def total(self) -> int:
    return sum(sent for _, sent in self.fragments.values())

  @property
  def syncs(self) -> int:
    return sum(count for count, _ in self.fragments.values())
