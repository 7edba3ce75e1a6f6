"""Command lines: what is wrong with one is told in a sentence, before anything runs.

Imports no JAX: simulators and config files use it too.
"""

import difflib
import importlib.util
import math
import pathlib
import re
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import app, flags
from ml_collections import config_flags

from diloco.config.fields import Config, ConfigError
from diloco.config.resolve import leaves, resolve


def run(main: Callable, commands: Sequence[str] = ()) -> None:
  """`app.run` for a program whose mistaken users get one sentence and exit code 2.

  Args:
    main: takes the program's name and its command; may raise ConfigError.
    commands: see `parse_flags`.
  """

  app.run(
    lambda argv: sys.exit(guarded(main, argv, mistakes=ConfigError)),
    flags_parser=lambda argv: parse_flags(argv, commands),
  )


def guarded(run: Callable[..., Any], *args, mistakes=(ValueError, OSError)) -> int:
  """Calls `run(*args)`; a mistake of the user is one sentence and exit status 2.

  Args:
    run: the program.
    args: its arguments.
    mistakes: exceptions that tell of a mistake of the user. Programs that use JAX name
      ConfigError alone: a ValueError of JAX is not the user's.

  Returns:
    The exit status: what `run` returns if that is an int, else 0.
  """
  try:
    status = run(*args)
  except mistakes as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return status if isinstance(status, int) else 0


def parse_flags(argv: Sequence[str], commands: Sequence[str] = ()) -> list[str]:
  """Parses flags for `app.run`; on an error says one sentence and exits with 2.

  Args:
    argv: the program and its arguments.
    commands: the words of which one is to be given besides the flags; none: no word.

  Returns:
    The program and the command.
  """
  try:
    program, *words = _parse(flags.FLAGS, argv)
    if commands and (len(words) != 1 or words[0] not in commands):
      given = " ".join(words) or "no command"
      raise ConfigError(
        f"{given} is given besides the flags; say one of {', '.join(commands)}."
      )
    if words and not commands:
      raise ConfigError(
        f"{' '.join(words)} is given besides the flags; write --name=value."
      )
    return [program, *words]
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


def load_config(name: str, overrides: Sequence[str] = ()) -> Config:
  """The resolved config that the trainer would take from the same arguments.

  Args:
    name: file, or file:argument.
    overrides: such as --config.overlap.tau=5.

  Raises:
    ConfigError: there is no such file, or a field cannot work.
  """
  values, argv = flags.FlagValues(), ["", f"--config={name}", *overrides]
  config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
  _parse(values, argv)
  return resolve(values["config"].value)


def load_module(path: str, function: str, example: str) -> types.ModuleType:
  """The module of a Python file that has the function.

  Raises:
    ConfigError: there is no such file or function.
  """
  if not pathlib.Path(path).is_file():
    raise ConfigError(f"{path!r} is no file; give for example {example}.")
  spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
  if spec is None or spec.loader is None:
    raise ConfigError(f"{path!r} is no Python file; give for example {example}.")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except Exception as error:
    raise ConfigError(f"{path}: {_in_one_line(error)}") from error
  if not hasattr(module, function):
    raise ConfigError(f"{path} has no {function}(); see {example}.")
  return module


def make_folder(path: str | pathlib.Path, flag: str) -> pathlib.Path:
  """Makes the folder that a flag names, if need be, and sees that it can be written.

  Raises:
    ConfigError: it cannot.
  """
  folder = pathlib.Path(path)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
  except OSError as error:
    raise ConfigError(
      f"{flag} is {str(path)!r}, where nothing can be written ({error.strerror}); name"
      " a folder of your own."
    ) from error
  return folder


def parse_options(
  text: str,
  known: Mapping[str, type | tuple[str, ...]] | None = None,
  place: str = "the config's argument",
) -> dict[str, Any]:
  """`name=value,name=value` as {name: value}.

  Args:
    text: the options; empty: none.
    known: of every name that may be given int, float or str, or the words it may be;
      None: any names, whose values are strings.
    place: what the options were given as, such as --where.

  Raises:
    ConfigError: an option is unknown or twice, or its value is of another type.
  """
  found: dict[str, Any] = {}
  for item in text.split(","):
    name, equals, value = (part.strip() for part in item.partition("="))
    if not item.strip():
      continue
    if not equals or not name or (known is not None and name not in known):
      names = "name=value" if known is None else " ".join(map(_option, known.items()))
      raise ConfigError(f"{place} has {item!r}; write {names}, by commas.")
    if name in found:
      raise ConfigError(f"{place} has {name} twice; give it once.")
    found[name] = _typed(value, str if known is None else known[name])
    if found[name] is None:
      assert known is not None
      raise ConfigError(f"{place} has {item!r}; write {_option((name, known[name]))}.")
  return found


def _option(option: tuple[str, type | tuple[str, ...]]) -> str:
  name, kind = option
  if isinstance(kind, tuple):
    return f"{name}={'|'.join(kind)}"
  return f"{name}=<{ {int: 'integer', float: 'number', str: 'text'}[kind] }>"


def _typed(text: str, kind: type | tuple[str, ...]):
  """The value that a text stands for, None if it stands for none."""
  if isinstance(kind, tuple):
    return text if text in kind else None
  try:
    value = kind(text)
  except ValueError:
    return None
  return value if kind is str or math.isfinite(value) else None


def _parse(values: flags.FlagValues, argv: Sequence[str]) -> list[str]:
  """Parses flags into `values`; returns what is no flag.

  Raises:
    ConfigError: one sentence on what cannot be understood.
  """
  given = _config_argument(argv)
  try:
    rest = values(argv)
    if given is not None:
      config: Any = values["config"].value
      config.to_dict()  # A file that could not be read says so only now.
    return rest
  except Exception as error:
    sentence = _sentence(values, argv, given, error)
    raise ConfigError(" ".join(sentence.split())) from error


def _sentence(
  values: flags.FlagValues, argv: Sequence[str], given: str | None, error: Exception
) -> str:
  """What is wrong, from the errors of absl and ml_collections."""
  needed = re.findall(r"Flag (--\w+) must have a value other than None", str(error))
  if needed:
    return f"{' and '.join(needed)} must be given; --help says what for."
  if isinstance(error, flags.UnrecognizedFlagError):
    if error.flagname.startswith("config."):
      return f"--{error.flagname} needs a --config before it."
    near = _suggestion(error.flagname, list(values))
    return f"--{error.flagname} is no flag of this command{near}; --help lists them."
  cause = _cause(error)
  if given is not None and not isinstance(cause, flags.Error):
    path = given.partition(":")[0]
    if not pathlib.Path(path).is_file():
      return (
        f"--config is {given!r}, but there is no file {path}; give for example"
        " configs/sample.py."
      )
    inside = _in_config_file(path, cause)
    if inside:
      return f"{given}: {inside}"
  if isinstance(error, flags.IllegalFlagValueError):
    return _illegal_value(values, error)
  if isinstance(error, flags.Error):
    return str(error)
  return _unknown_field(argv) or f"{given}: {_in_one_line(error)}"


def _cause(error: BaseException) -> BaseException:
  """The error inside a config file, for which others raised errors of their own."""
  if isinstance(error, flags.IllegalFlagValueError):
    # absl and, inside it, ml_collections.
    if str(error).startswith("flag --config=") and error.__context__:
      return error.__context__.__context__ or error.__context__
  elif isinstance(error, OSError) and error.__cause__:
    return error.__cause__
  return error


def _in_config_file(path: str, error: BaseException) -> str:
  """What went wrong in a config file, empty if nothing did."""
  if isinstance(error, SyntaxError):
    return _in_one_line(error)
  if "get_config" in str(error) and isinstance(error, AttributeError):
    return "the file has no get_config(); see configs/sample.py."
  if "to_dict" in str(error) and isinstance(error, AttributeError):
    return "get_config() returns no config; return default_config() with changes."
  if str(error).startswith("get_config() ") and isinstance(error, TypeError):
    return f"{error}; its argument is what follows the colon after the file."
  if isinstance(error, OSError):
    return str(error)
  if all(f.filename != path for f in traceback.extract_tb(error.__traceback__)):
    return ""
  # A ValueError is meant for the user, others for who wrote the file.
  return str(error) if isinstance(error, ValueError) else _in_one_line(error, path)


def _in_one_line(error: BaseException, path: str = "") -> str:
  """An error with its place in the program, if possible in the file of that path."""
  if isinstance(error, SyntaxError):
    return f"{error.msg} ({error.filename}, line {error.lineno})"
  frames = traceback.extract_tb(error.__traceback__)
  frame = [f for f in frames if f.filename == path or not path][-1]
  said = error.args[0] if isinstance(error, KeyError) and error.args else error
  return f"{type(error).__name__}: {said} ({frame.filename}, line {frame.lineno})"


def _illegal_value(values: flags.FlagValues, error: Exception) -> str:
  """From `flag --name=value: reason`, where all three may have colons."""
  reason = str(error.__context__)
  given = str(error).removesuffix(f": {reason}").removeprefix("flag --")
  name, _, value = given.partition("=")
  group = [
    field for field in _known_fields() if f"config.{field}".startswith(f"{name}.")
  ]
  if group:
    return (
      f"--{name} is {value!r}, but it is a group of fields; set one of them, such as"
      f" --config.{group[0]}."
    )
  parser = values[name].parser if name in values else flags.ArgumentParser()
  named = {"bool": "true or false", "tuple": "values by commas"}
  wanted = parser.syntactic_help or named.get(parser.flag_type())
  return f"--{name} is {value!r}" + (f"; give {wanted}." if wanted else f": {reason}.")


def _unknown_field(argv: Sequence[str]) -> str:
  """A sentence on the first override of a field that there is not, or nothing."""
  known = _known_fields()
  for arg in argv:
    match = re.match(r"--?(?:no)?config\.([^=]+)", arg)
    if match and not any(f"{k}.".startswith(f"{match[1]}.") for k in known):
      near = _suggestion(match[1], known)
      return (
        f"--config.{match[1]} is no field{near}; diloco/config/fields.py lists all."
      )
  return ""


def _known_fields() -> list[str]:
  return list(leaves(Config().to_dict()))


def _suggestion(name: str, known: Sequence[str]) -> str:
  """` (did you mean ...?)` if some known name is like this one."""
  last = name.rpartition(".")[2]
  near = [k for k in known if k.rpartition(".")[2] == last]
  near = near or difflib.get_close_matches(name, known, 1)
  return f" (did you mean {' or '.join(near)}?)" if near else ""


def _config_argument(argv: Sequence[str]) -> str | None:
  """The value of --config, if it is given."""
  for i, arg in enumerate(argv):
    if re.fullmatch(r"--?config", arg):
      return "".join(argv[i + 1 : i + 2])
    if re.match(r"--?config=", arg):
      return arg.partition("=")[2]
  return None
