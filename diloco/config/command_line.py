"""Reads the flags of a config; every mistake of the user becomes one sentence. No JAX.

absl and ml_collections parse the flags. This file first checks the config file and the
names of the fields, because the libraries answer a mistake in them with a traceback.
"""

import inspect
import re
import signal
import sys
from collections.abc import Callable, Sequence

import ml_collections
from absl import app, flags
from ml_collections import config_flags

from diloco.config.checks import unknown
from diloco.config.resolve import default_config, leaves, plugins_of, resolve
from diloco.errors import ConfigError
from diloco.spec import plugins
from diloco.spec.fields import Config
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
# The arguments that `_parse` reads, including the arguments in flag files. The package
# ml_collections finds in this list which fields are set.
_ARGUMENTS: list[str] = []


class _Made(flags.ArgumentParser):
  """Gives ml_collections the config that `_take_config` has made from --config."""

  def __init__(self, config: ml_collections.ConfigDict):
    self._config = config

  def parse(self, argument: str) -> ml_collections.ConfigDict:
    return self._config


def define_config(values: flags.FlagValues = flags.FLAGS) -> flags.FlagHolder:
  """Defines the flags --config and --config.FIELD."""
  text = "A file with get_config(), or a name: sample, chinchilla:1.3B,M=2."
  where = {"flag_values": values, "sys_argv": _ARGUMENTS}
  return config_flags.DEFINE_config_file("config", None, text, **where)


def run(main: Callable[[list[str]], object]) -> None:
  """Runs a program with absl flags; a ConfigError becomes one sentence, exit status 2.

  Args:
    main: the program; its argument is a list with only the program's name.
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
    A list with only the program's name.
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
  except SystemExit:  # After the help, absl ends with status 1.
    sys.exit(0)


def load_config(name: str, overrides: Sequence[str] = ()) -> Config:
  """Resolves the config that the trainer would take from the same arguments.

  Args:
    name: a file or the name of a shipped config, perhaps with ":" and its argument.
    overrides: flags such as --config.overlap.tau=5.

  Raises:
    ConfigError: the file does not exist, or a field has a value that cannot work.
  """
  values, argv = flags.FlagValues(), ["", f"--config={name}", *overrides]
  define_config(values)
  _parse(values, argv)
  return resolve(values["config"].value)


def with_flags(
  config: ml_collections.ConfigDict, given: Sequence[str]
) -> ml_collections.ConfigDict:
  """Applies flags to a config that was not made from a file of --config.

  Args:
    config: has all fields of `given`.
    given: flags such as --config.overlap.tau=5.

  Raises:
    ConfigError: a value has another type than its field.
  """
  values, argv = flags.FlagValues(), ["", *given]
  config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
  try:
    values(argv)
  except flags.Error as error:
    raise ConfigError(f"{error}; diloco.main --print_config shows all.") from error
  return values["config"].value


def _parse(values: flags.FlagValues, argv: Sequence[str]) -> list[str]:
  """Parses flags into `values`; returns the program and the arguments without flags.

  Raises:
    ConfigError: a flag is missing, is unknown or has a wrong value.
  """
  try:
    argv = [*argv[:1], *values.read_flags_from_files(argv[1:], force_gnu=False)]
    _ARGUMENTS[:] = argv
    if "config" in values:
      _take_config(values, argv)
    return values(argv)
  except flags.UnrecognizedFlagError as error:
    flag, fields = f"--{error.flagname}", leaves(Config().to_dict())
    known = [f"--{name}" for name in values]
    if "config" in values:
      known += [f"--config.{field}" for field in fields]
    text = f"there is no flag {flag}{meant(flag, known)}; see --help."
    raise ConfigError(text) from error
  except ConfigError:
    raise
  except UnicodeError as error:
    raise ConfigError("--flagfile names a file that is no text in UTF-8.") from error
  except ValueError as error:  # From absl's own flags, e.g. --stderrthreshold.
    raise ConfigError(f"{error} (see --help)") from error
  except flags.Error as error:
    text = str(error).removeprefix("ERROR:: ")
    missing = re.findall(r"Flag (--\w+) must have a value other than None", text)
    wrong = re.match(r"flag --([\w.]+)=", text)
    if missing:
      text = f"{' and '.join(missing)} must be given"
    elif wrong and wrong[1] in values:
      parser = values[wrong[1]].parser
      others = {"bool": "true or false", "tuple": "values such as (1, 2)"}
      wanted = parser.syntactic_help or others.get(parser.flag_type())
      if wanted:
        text = text.removesuffix(str(error.__context__)) + f"give {wanted}"
    raise ConfigError(f"{text} (see --help)") from error


def _take_config(values: flags.FlagValues, argv: Sequence[str]) -> None:
  """Makes the config of --config; fields that the file leaves out get their defaults.

  A field that a flag will set gets its default first, because ml_collections takes the
  type of a flag from the value in the config.

  Raises:
    ConfigError: the file does not return a config, or a field does not exist, or
      --config is given twice.
  """
  files, fields = list[str](), list[tuple[str, str]]()
  for word, after in zip(argv, [*argv[1:], ""]):
    flag = re.fullmatch(r"--?(?:no)?config(\.[^=]*)?(=.*)?", word, re.DOTALL)
    if flag:
      value = after if flag[2] is None else flag[2][1:]
      fields += [(flag[1][1:], value)] if flag[1] else []
      files += [] if flag[1] else [value]
  if not files:
    if fields:
      raise ConfigError(f"--config.{fields[0][0]} needs a --config before it.")
    return
  if len(files) > 1:
    raise ConfigError(f"--config is given as {' and as '.join(files)}; give one.")
  config = _check_file(files[0])
  defaults = default_config(*plugins_of(leaves(config)), *asked_plugins(fields))
  _fill_in(config, defaults)
  usual = leaves(Config().to_dict()) | leaves(defaults)
  known = usual | leaves(config)
  for field, _ in fields:
    if field not in known:
      raise ConfigError(f"--config.{field} is no field{unknown(field, known)}.")
    if field in usual:
      group, _, name = field.rpartition(".")
      holder = config[group] if group else config
      with holder.ignore_type():
        holder[name] = usual[field]
  for field, value in leaves(config).items():
    if value is None:
      raise ConfigError(
        f"{field} is None in {files[0]}; give it a value there, or by the flag"
        f" --config.{field}."
      )
  values["config"].parser = _Made(config=config.lock())


def asked_plugins(fields: Sequence[tuple[str, str]]) -> tuple[str, ...]:
  """Returns the plug-ins that flags name, given as pairs (field, value)."""
  named = [x for field, x in fields if field == "plugins"]
  asked = dict(fields) | {"plugins": re.findall(r"[^\s,()'\"\[\]]+", " ".join(named))}
  return plugins_of(asked)


def _fill_in(
  config: ml_collections.ConfigDict, defaults: ml_collections.ConfigDict
) -> None:
  """Adds the fields that a config lacks, with their defaults."""
  with config.unlocked():
    for name, value in defaults.items():
      if name not in config:
        config[name] = value
      elif isinstance(value, ml_collections.ConfigDict):
        group = dict(config.items(preserve_field_references=True))[name]
        if isinstance(group, ml_collections.ConfigDict):
          _fill_in(group, value)


def _check_file(name: str) -> ml_collections.ConfigDict:
  """Returns the config of a file, unlocked, so that flags may change it.

  Raises:
    ConfigError: the file is missing, fails or returns no config.
  """
  path, *argument = name.split(":", 1)
  module = load_module(path, "get_config", "configs/sample.py")
  try:
    config = module.get_config(*argument)
  except Exception as error:
    if isinstance(error, TypeError):  # get_config() may take other arguments.
      if hasattr(module, "get_sweep"):
        raise ConfigError(
          f"--config is {name!r}, a sweep; run `python -m diloco sweep --sweep={name}`."
        ) from error
      if argument and not inspect.signature(module.get_config).parameters:
        raise ConfigError(
          f"--config is {name!r}, but {path} takes no argument; set fields by flags,"
          " such as --config.replicas=4."
        ) from error
    group = getattr(error, "name", None)
    known = group in plugins.contrib()
    remedy = f"; write default_config({group!r})" if known else ""
    raise ConfigError(f"{name}: {located(error, path)}{remedy}") from error
  if not isinstance(config, ml_collections.ConfigDict):
    raise ConfigError(
      f"{name}: get_config() returns no config; return default_config() with changes."
    )
  if isinstance(config, ml_collections.FrozenConfigDict):
    return ml_collections.ConfigDict(config)
  return config
