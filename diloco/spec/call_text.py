"""Parses a name with keyword arguments: an optimizer or a compressor. No JAX."""

import ast
from typing import Any

from diloco.errors import ConfigError

# The largest number in float32, the widest type that training uses.
LARGEST_FLOAT = 3.4028235e38


def parse(field: str, text: str) -> tuple[str, dict[str, Any]]:
  """Parses a name and its keyword arguments.

  Args:
    field: name of the config's field, for error messages.
    text: the text to parse, such as "adamw(b1=0.9)"; arguments are Python literals.

  Raises:
    ConfigError: the text is neither a name nor a name with keyword arguments, or one of
      its numbers is too large for float32.
  """
  try:
    call = ast.parse(text.strip(), mode="eval").body
    if isinstance(call, ast.Name):
      call = ast.Call(call, [], [])
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
      raise ValueError("no name with arguments")
    if call.args:
      raise ValueError("an argument without a name")
    arguments = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    if len(arguments) < len(call.keywords):
      raise ValueError("an argument is given twice")
  # A text that is nested too deeply, or a value that is not a string, fails here, too.
  except (AttributeError, MemoryError, RecursionError, SyntaxError, ValueError):
    raise ConfigError(
      f"{field} is {text!r}; write a name, alone or with keyword arguments, each once,"
      " for example sgd(momentum=0.9, nesterov=True)."
    ) from None
  for node in ast.walk(call):
    value = node.value if isinstance(node, ast.Constant) else 0
    if isinstance(value, int | float) and not value <= LARGEST_FLOAT:
      raise ConfigError(
        f"{field} is {text!r}, which has the number {value:.3g}; give at most"
        f" {LARGEST_FLOAT:.2g}."
      )
  return call.func.id, arguments
