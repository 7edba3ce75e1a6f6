"""The exception that a mistake of the user raises."""


class ConfigError(ValueError):
  """A mistake of the user; one sentence gives the field, its value and the remedy."""
