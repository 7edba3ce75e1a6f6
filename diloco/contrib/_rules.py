"""Rules about other fields that several plug-ins share. No JAX."""

from diloco.config import Config
from diloco.config.combinations import DEVICE
from diloco.errors import ConfigError
from diloco.spec.plugins import Rule


def averages_of(field: str) -> Rule:
  """Makes the rule about other fields for a `field` that averages values on devices."""
  needs = {"overlap.transport": DEVICE}
  return Rule(field, None, "which averages values of the replicas on devices", needs)


def alone(c: Config) -> tuple[bool, str]:
  """Returns whether a replica has no other replica to exchange with, and the reason."""
  return c.replicas == 1, "replicas is 1, and a single replica sends nothing"


def check_equal_taus(c: Config, choice: str) -> None:
  """Refuses replicas that merge at different steps.

  Args:
    choice: beginning of the error message: the field and value that need equal taus.

  Raises:
    ConfigError: the taus differ.
  """
  if len({*c.overlap.taus}) > 1:
    raise ConfigError(
      f"{choice}, but overlap.taus is {c.overlap.taus}; choose equal ones."
    )
