"""Reads command lines; every mistake of the user becomes one sentence. No JAX.

absl and ml_collections parse the flags. This file checks the config file and the names
of the fields first, because those libraries answer such mistakes with a traceback.
"""

import argparse
import difflib
import io
import math
import os
import pathlib
import re
import runpy
import select
import signal
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import ml_collections
from absl import app, flags
from ml_collections import config_flags

from diloco.config import shipped
from diloco.config.fields import Config, ConfigError
from diloco.config.resolve import leaves, resolve

INTERRUPTED = 128 + signal.SIGINT  # Exit status of a program that Ctrl-C ended.
UNREAD = 128 + signal.SIGPIPE  # Exit status of a program whose output nobody reads.
# The kind of an option's value: int, float, str, or the words to choose from.
Kind = type | tuple[str, ...]


def run(main: Callable, commands: Sequence[str] = ()) -> None:
  """Runs a program with absl flags; a ConfigError becomes one sentence, exit status 2.

  Args:
    main: takes the program's name and the command.
    commands: see `parse_flags`.
  """
  app.run(
    lambda argv: sys.exit(guarded(main, argv, mistakes=ConfigError)),
    flags_parser=lambda argv: parse_flags(argv, commands),
  )


def guarded(run: Callable[..., Any], *args, mistakes=(ValueError, OSError)) -> int:
  """Calls `run(*args)`; a mistake of the user becomes one sentence, exit status 2.

  Ctrl-C becomes one word, exit status 130. If the reader of the output has ended, as in
  `... | head`, that is no mistake: no word, exit status 141.

  Args:
    args: its arguments.
    mistakes: exceptions that mean a mistake of the user. Programs that use JAX pass
      ConfigError, because a ValueError of JAX is a bug and needs its traceback.

  Returns:
    The exit status: the result of `run` if that is an int, else 0.
  """
  try:
    status = run(*args)
    sys.stdout.flush()
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    return interrupted()
  except Exception as error:
    if isinstance(error, BrokenPipeError) and _output_is_unread():
      # Python flushes again at its end; that must not fail, too.
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
      return UNREAD
    if not isinstance(error, mistakes):
      raise
    print(f"error: {error}", file=sys.stderr)
    return 2
  return status if isinstance(status, int) else 0


def _output_is_unread() -> bool:
  """Whether stdout is a pipe whose reader has ended."""
  poll = select.poll()
  try:
    poll.register(sys.stdout.fileno(), 0)
  except io.UnsupportedOperation:  # A notebook's output.
    return False
  return any(event & select.POLLERR for _, event in poll.poll(0))


def interrupted() -> int:
  """Returns INTERRUPTED; after a KeyboardInterrupt, call it just before the exit.

  A KeyboardInterrupt may come while `exec` runs a string, as dataclasses do.
  Then CPython notes that it will end by SIGINT, even if the program handles the
  exception and exits with another status. The next `exec` makes it forget that.
  """
  exec("")
  return INTERRUPTED


def parse_flags(argv: Sequence[str], commands: Sequence[str] = ()) -> list[str]:
  """Parses flags for `app.run`; a mistake becomes one sentence and exit status 2.

  Args:
    argv: the program and its arguments.
    commands: the user gives one of these words besides the flags; if empty, none.

  Returns:
    The program and the command.
  """
  if "--help" in argv:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends without an error.
  try:
    program, *words = _parse(flags.FLAGS, argv)
    if words not in ([[c] for c in commands] or [[]]):
      given = " ".join(words) or "no command"
      wanted = f"one of {', '.join(commands)}" if commands else "flags as --name=value"
      raise ConfigError(f"{given} is given besides the flags; write {wanted}.")
    return [program, *words]
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
  """A parser of flags that answers a mistake in one sentence, with exit status 2.

  Its help shows the description, often the docstring of a module, line by line.
  """

  def __init__(self, **options):
    show = argparse.RawDescriptionHelpFormatter
    super().__init__(**{"formatter_class": show} | options)

  def error(self, message: str) -> NoReturn:
    self.exit(2, f"error: {message} (see --help)\n")


def model_parser(command: str, description: str | None) -> Parser:
  """Makes the parser of a command that takes a trained model."""
  parser = Parser(prog=f"python -m diloco.{command}", description=description)
  parser.add_argument("--workdir", required=True, help="folder of a run or an export")
  parser.add_argument("--step", type=int, help="default: the newest checkpoint")
  return parser


def load_config(name: str, overrides: Sequence[str] = ()) -> Config:
  """Resolves the config that the trainer would take from the same arguments.

  Args:
    name: a file or the name of a shipped config; an argument follows a colon.
    overrides: flags such as --config.overlap.tau=5.

  Raises:
    ConfigError: the file does not exist, or a field has a value that cannot work.
  """
  values, argv = flags.FlagValues(), ["", f"--config={name}", *overrides]
  config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
  _parse(values, argv)
  return resolve(values["config"].value)


def load_module(path: str, function: str, example: str) -> types.SimpleNamespace:
  """Runs a Python file and returns its globals, which include the function.

  Args:
    path: a file, or what else `shipped.find` finds.

  Raises:
    ConfigError: the file or the function does not exist, or the file has an error.
  """
  path = shipped.find(path)
  if not pathlib.Path(path).is_file():
    known = shipped.names(function)
    names = f", or one of these names: {', '.join(known)}" if known else ""
    raise ConfigError(f"there is no file {path}; give for example {example}{names}.")
  try:
    module = types.SimpleNamespace(**runpy.run_path(path))
  except Exception as error:
    raise ConfigError(f"{path}: {located(error, path)}") from error
  if not hasattr(module, function):
    raise ConfigError(f"{path} has no {function}(); see {example}.")
  return module


def check_picture(path: pathlib.Path, example: str) -> None:
  """Checks that the flag --out names a picture of a kind that matplotlib writes.

  A folder with such a name is refused, too.

  Raises:
    ConfigError: it does not.
  """
  from matplotlib.figure import Figure

  kinds = Figure().canvas.get_supported_filetypes()
  if path.suffix.removeprefix(".") not in kinds or path.is_dir():
    raise ConfigError(f"--out is {str(path)!r}; give a file such as {example}.")


def make_parent(path: pathlib.Path, flag: str, wanted: str = "a file") -> None:
  """Makes the folder of the file that a flag names.

  Raises:
    ConfigError: the path is a folder, or nothing can be written beside it.
  """
  if path.is_dir():
    raise ConfigError(f"{flag} is {str(path)!r}, a folder; give {wanted}.")
  make_folder(path.parent, flag)


def make_folder(path: str | pathlib.Path, flag: str) -> pathlib.Path:
  """Makes the folder that a flag names, unless it exists.

  Raises:
    ConfigError: nothing can be written in the folder.
  """
  if not str(path).strip():
    raise ConfigError(f"{flag} is empty; give a folder (is a shell variable unset?).")
  folder = pathlib.Path(path)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
  except OSError as error:
    raise ConfigError(
      f"{flag} is {str(path)!r}, where nothing can be written ({error.strerror});"
      " choose another folder."
    ) from error
  return folder


def parse_count(text: str, name: str = "size") -> float:
  """Parses a number of parameters or tokens, such as 35M, 2.4B or 4e9.

  Args:
    name: what the user gave, such as --params.

  Raises:
    ConfigError: the text is not a number from 1 on.
  """
  exponent = {"M": "e6", "B": "e9"}.get(text[-1:], text[-1:])
  try:
    value = float(text[:-1] + exponent)
  except ValueError:
    value = 0.0
  if not 1 <= value <= 1e30:
    raise ConfigError(f"{name} is {text!r}; write one such as 35M, 2.4B or 4e9.")
  return value


def parse_options(
  text: str,
  known: Mapping[str, Kind] | None = None,
  place: str = "the config's argument",
) -> dict[str, Any]:
  """Parses `name=value,name=value` into {name: value}.

  Args:
    text: the options; may be empty.
    known: {name: kind of its value} of all options. None: any name is allowed, and
      values are strings.
    place: where the user gave the options, such as --where.

  Raises:
    ConfigError: an option is unknown, is given twice or has a wrong value.
  """
  allowed = " ".join(_option(*option) for option in (known or {}).items())
  found: dict[str, Any] = {}
  for item in filter(None, map(str.strip, text.split(","))):
    name, equals, value = (part.strip() for part in item.partition("="))
    if name in found:
      raise ConfigError(f"{place} has {name} twice; give it once.")
    try:
      if not name or not equals:
        raise ValueError("no name=value")
      kind = known[name] if known else str
      # `index` raises ValueError if the value is not one of the words.
      found[name] = kind[kind.index(value)] if isinstance(kind, tuple) else kind(value)
      if isinstance(found[name], float) and not math.isfinite(found[name]):
        raise ValueError("not finite")
    except (KeyError, ValueError) as error:
      raise ConfigError(
        f"{place} has {item!r}; write {allowed or 'name=value'}, separated by commas."
      ) from error
  return found


def _option(name: str, kind: Kind) -> str:
  if isinstance(kind, tuple):
    return f"{name}={'|'.join(kind)}"
  return f"{name}=<{ {int: 'integer', float: 'number', str: 'text'}[kind] }>"


def _parse(values: flags.FlagValues, argv: Sequence[str]) -> list[str]:
  """Parses flags into `values`; returns the other arguments.

  Raises:
    ConfigError: a flag is missing, is unknown or has a wrong value.
  """
  if "config" in values:
    argv = _with_files(argv)
    _check_config(argv)
  try:
    return values(argv)
  except flags.Error as error:
    text = str(error)
    missing = re.findall(r"Flag (--\w+) must have a value other than None", text)
    wrong = re.match(r"flag --([\w.]+)=", text)
    if missing:
      text = f"{' and '.join(missing)} must be given"
    elif wrong:
      parser = values[wrong[1]].parser
      others = {"bool": "true or false", "tuple": "values such as (1, 2)"}
      wanted = parser.syntactic_help or others.get(parser.flag_type())
      if wanted:
        text = text.removesuffix(str(error.__context__)) + f"give {wanted}"
    raise ConfigError(f"{text} (see --help)") from error


def _with_files(argv: Sequence[str]) -> list[str]:
  """Replaces the name of a shipped config by its file; ml_collections needs a file."""
  found = []
  for before, argument in zip(["", *argv], argv):
    flag = re.match(r"--?config=", argument)
    start = flag.end() if flag else 0
    if flag or before in ("--config", "-config"):
      path, colon, rest = argument[start:].partition(":")
      argument = argument[:start] + shipped.find(path) + colon + rest
    found.append(argument)
  return found


def _check_config(argv: Sequence[str]) -> None:
  """Checks the config file, and the names of the fields that flags set.

  Raises:
    ConfigError: the file does not return a config, or a field does not exist.
  """
  lines = "\n".join(argv)
  name = re.search(r"^--?config[=\n](.*)", lines, re.MULTILINE)
  if name:
    _check_file(name[1])
  known = leaves(Config().to_dict())
  for flag, field in re.findall(r"^(--?(?:no)?config\.([^=\n]+))", lines, re.MULTILINE):
    if not name:
      raise ConfigError(f"{flag} needs a --config before it.")
    if field not in known:
      near = (
        [k for k in known if k.startswith(f"{field}.")]
        or [k for k in known if k.endswith("." + field.rpartition(".")[2])]
        or difflib.get_close_matches(field, known, 1)
      )
      meant = f" (did you mean {' or '.join(near[:3])}?)" if near else ""
      raise ConfigError(
        f"--config.{field} is no field{meant}; see diloco/config/fields.py."
      )


def _check_file(name: str) -> None:
  path, *argument = name.split(":", 1)
  module = load_module(path, "get_config", "configs/sample.py")
  try:
    config = module.get_config(*argument)
  except Exception as error:
    raise ConfigError(f"{name}: {located(error, path)}") from error
  if not isinstance(config, ml_collections.ConfigDict):
    raise ConfigError(
      f"{name}: get_config() returns no config; return default_config() with changes."
    )


def one_line(error: Exception) -> str:
  """Returns the message of an error in one line."""
  return " ".join(str(error).split())


def located(error: Exception, path: str) -> str:
  """Formats an error in one line; tells the line of `path`, except for ValueErrors."""
  message = one_line(error)
  if isinstance(error, ValueError):  # ValueErrors of config files are full sentences.
    return message
  lines = [
    f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path
  ]
  where = f" ({path}, line {lines[-1]})" if lines else ""
  return f"{type(error).__name__}: {message}{where}"
