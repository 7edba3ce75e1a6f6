"""Checks the numbers and names that the simulators take."""

import typing
from collections.abc import Collection
from typing import Annotated, Any

from diloco.spec.fields import Range

AboveZero = Annotated[float, Range(0, open=True)]
NO_ROUNDS = (
  "algorithm is data_parallel, which has no rounds; choose diloco or streaming."
)


def check(name: str, value: Any, allowed: Range | Collection[str]) -> None:
  """Raises a ValueError if a value is outside its range, or not one of its choices."""
  if value not in allowed:
    wanted = allowed if isinstance(allowed, Range) else f"one of {', '.join(allowed)}"
    raise ValueError(f"{name} is {value!r}, but must be {wanted}.")


def check_fields(instance: Any) -> None:
  """Checks each field of a dataclass against the limits that its type states.

  Raises:
    ValueError: a field is outside its limits.
  """
  for name, kind in typing.get_type_hints(type(instance), include_extras=True).items():
    value = getattr(instance, name)
    for allowed in getattr(kind, "__metadata__", ()):
      if value is not None:
        check(name, value, allowed)
