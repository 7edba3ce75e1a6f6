"""Names with keyword arguments in a config: optimizers and compressors. No JAX."""

import ast
from typing import Any

from diloco.errors import ConfigError


def parse(field: str, text: str) -> tuple[str, dict[str, Any]]:
  """Parses a name and its keyword arguments.

  Args:
    field: name of the config's field, for error messages.
    text: such as "adamw(b1=0.9)"; arguments are Python literals.

  Raises:
    ConfigError: the text is not a name, alone or with keyword arguments.
  """
  try:
    call = ast.parse(text.strip(), mode="eval").body
    if isinstance(call, ast.Name):
      return call.id, {}
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
      pairs = [(k.arg, ast.literal_eval(k.value)) for k in call.keywords]
      return call.func.id, {str(name): value for name, value in pairs}
  except (SyntaxError, ValueError, AttributeError):  # The last: it is no text.
    pass
  raise ConfigError(
    f"{field} is {text!r}; write a name, alone or with keyword arguments, for example"
    " sgd(momentum=0.9, nesterov=True)."
  )
