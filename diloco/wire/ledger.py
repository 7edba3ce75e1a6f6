"""Counts the bytes that one replica sends in a run. No JAX."""

import dataclasses

from diloco.config import Config
from diloco.model.shapes import num_params
from diloco.wire import sizes


@dataclasses.dataclass
class Ledger:
  """Bytes by fragment. Checkpoints save the ledger, so a resumed run goes on counting.

  Attributes:
    fragments: {str(p): [number of syncs, bytes sent by one replica]}.
    peak: the most bytes that one replica sent after a single step.
    latest: [step, bytes] of the latest step that sent something.
  """

  fragments: dict[str, list[int]] = dataclasses.field(default_factory=dict)
  peak: int = 0
  latest: list[int] = dataclasses.field(default_factory=lambda: [0, 0])

  def record(self, fragment: int, step: int, sent: int) -> None:
    """Counts one sync, in which one replica sent `sent` bytes."""
    account = self.fragments.setdefault(str(fragment), [0, 0])
    account[0] += 1
    account[1] += sent
    before = self.latest[1] if self.latest[0] == step else 0
    self.latest = [step, before + sent]
    self.peak = max(self.peak, self.latest[1])

  @property
  def total(self) -> int:
    return sum(sent for _, sent in self.fragments.values())

  @property
  def syncs(self) -> int:
    return sum(count for count, _ in self.fragments.values())


def all_reduced_bytes(c: Config, t: int) -> int:
  """Counts the bytes of gradients that one replica has sent after inner step t."""
  steps = t if c.data_parallel else min(t, c.outer.warm_start_steps)
  return steps * gradient_bytes(c)


def gradient_bytes(c: Config) -> int:
  """Counts the bytes that one data-parallel replica sends in a step."""
  value_bytes = sizes.DTYPE_BYTES[c.inner.gradient_dtype]
  params = num_params(c.model)
  return int(sizes.data_parallel_bytes(c.replicas, params, 1, value_bytes))
