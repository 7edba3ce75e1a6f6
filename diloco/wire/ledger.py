"""Counts the bytes that one replica sends in a run. No JAX."""

import dataclasses

from diloco.config import Config
from diloco.spec import sizes
from diloco.spec.shapes import num_params


@dataclasses.dataclass
class Ledger:
  """Counts bytes by fragment; checkpoints save the counts, so a resumed run continues.

  Attributes:
    fragments: {str(p): [number of syncs, bytes sent by one replica]}.
    averages: {kind: [number of averages, bytes sent by one replica]}, see
      `plugins.Average`.
    peak: the most bytes that one replica sent at a single step. Gradients do not count:
      a step that sends gradients sends nothing else.
    latest: [step, bytes] of the latest step that sent something.
  """

  fragments: dict[str, list[int]] = dataclasses.field(default_factory=dict)
  averages: dict[str, list[int]] = dataclasses.field(default_factory=dict)
  peak: int = 0
  latest: list[int] = dataclasses.field(default_factory=lambda: [0, 0])

  def record(self, fragment: int | str, step: int, sent: int) -> None:
    """Counts one sync, in which one replica sent `sent` bytes."""
    self._count(self.fragments.setdefault(str(fragment), [0, 0]), step, sent)

  def record_average(self, kind: int | str, step: int, sent: int) -> None:
    """Counts one average of `kind`, in which one replica sent `sent` bytes."""
    self._count(self.averages.setdefault(str(kind), [0, 0]), step, sent)

  def _count(self, account: list[int], step: int, sent: int) -> None:
    account[0] += 1
    account[1] += sent
    before = self.latest[1] if self.latest[0] == step else 0
    self.latest = [step, before + sent]
    self.peak = max(self.peak, self.latest[1])

  @property
  def total(self) -> int:
    both = (*self.fragments.values(), *self.averages.values())
    return sum(sent for _, sent in both)

  @property
  def syncs(self) -> int:
    return sum(count for count, _ in self.fragments.values())


def all_reduced_bytes(c: Config, t: int) -> int:
  """Counts the bytes of gradients that one replica has sent up to inner step t."""
  steps = min(t, c.joint_steps) if c.make_fragments() else t
  return steps * gradient_bytes(c)


def gradient_bytes(c: Config) -> int:
  """Counts the bytes that one data-parallel replica sends in a step."""
  value_bytes = sizes.DTYPE_BYTES[c.inner.gradient_dtype]
  params = num_params(c.model)
  return int(sizes.all_reduce_bytes(c.replicas, params, 1, value_bytes))
