"""Reads the flags of a config; every mistake of the user becomes one sentence. No JAX.

absl and ml_collections parse the flags. This file checks the config file and the names
of the fields first, because those libraries answer such mistakes with a traceback.
"""

import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections
from absl import app, flags
from ml_collections import config_flags

from diloco.config.checks import unknown
from diloco.config.resolve import ask_for, default_config, leaves, plugins_of, resolve
from diloco.errors import ConfigError
from diloco.spec import plugins
from diloco.spec.fields import Config
from diloco.util import shipped
from diloco.util.command import guarded, load_module, located, meant


class _WholeNumber(flags.IntegerParser):
  """A parser of whole numbers that also takes 5e8."""

  def convert(self, argument: int | str) -> int:
    try:
      return super().convert(argument)
    except ValueError:
      value = float(str(argument))
      if not value.is_integer():
        raise
      return int(value)


config_flags.register_flag_parser_for_type(int, _WholeNumber())


def run(main: Callable[[list[str]], object]) -> None:
  """Runs a program with absl flags; a ConfigError becomes one sentence, exit status 2.

  Args:
    main: takes a list of the program's name.
  """
  app.run(
    lambda argv: sys.exit(guarded(main, argv, mistakes=ConfigError)),
    flags_parser=parse_flags,
  )


def parse_flags(argv: Sequence[str]) -> list[str]:
  """Parses flags for `app.run`; a mistake becomes one sentence and exit status 2.

  Args:
    argv: the program and its arguments.

  Returns:
    A list of the program.
  """
  argv = ["--help" if word == "-h" else word for word in argv]
  if "--help" in argv:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends without an error.
  try:
    program, *words = _parse(flags.FLAGS, argv)
    if words:
      given = " ".join(words)
      raise ConfigError(
        f"{given} is given besides the flags; write flags as --name=value."
      )
    return [program]
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  except SystemExit:  # absl ends with 1 after it has printed the help.
    sys.exit(0)


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
  except flags.UnrecognizedFlagError as error:
    flag, fields = f"--{error.flagname}", leaves(Config().to_dict())
    known = [f"--{name}" for name in values]
    if "config" in values:
      known += [f"--config.{field}" for field in fields]
    text = f"there is no flag {flag}{meant(flag, known)}; see --help."
    raise ConfigError(text) from error
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
  finally:
    ask_for(())  # Other configs of this process have their own plug-ins.


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
  naming = r"^--?config\.(plugins|overlap\.transport)[=\n](.*)"
  given = dict[str, Any](re.findall(naming, lines, re.MULTILINE))
  given["plugins"] = re.findall(r"[\w.]+", given.get("plugins", ""))
  ask_for(asked := plugins_of(given))
  name = re.search(r"^--?config[=\n](.*)", lines, re.MULTILINE)
  known = leaves(Config().to_dict())
  if name:
    own = leaves(_check_file(name[1]).to_dict())
    ask_for((*asked, *{*plugins_of(own)}.difference(own.get("plugins", ()))))
    known |= leaves(default_config().to_dict()) | own  # With fields of plug-ins.
  for flag, field in re.findall(r"^(--?(?:no)?config\.([^=\n]+))", lines, re.MULTILINE):
    if not name:
      raise ConfigError(f"{flag} needs a --config before it.")
    if field not in known:
      raise ConfigError(f"--config.{field} is no field{unknown(field, known)}.")
    if known[field] is None:  # ml_collections takes the type of a flag from the value.
      raise ConfigError(f"{field} is None in {name[1]}; give it a value there.")


def _check_file(name: str) -> ml_collections.ConfigDict:
  """Returns the config of a file.

  Raises:
    ConfigError: there is none.
  """
  path, *argument = name.split(":", 1)
  module = load_module(path, "get_config", "configs/sample.py")
  try:
    config = module.get_config(*argument)
  except Exception as error:
    group = getattr(error, "name", None)
    remedy = f"; write default_config({group!r})" * (group in plugins.contrib())
    raise ConfigError(f"{name}: {located(error, path)}{remedy}") from error
  if not isinstance(config, ml_collections.ConfigDict):
    raise ConfigError(
      f"{name}: get_config() returns no config; return default_config() with changes."
    )
  return config
