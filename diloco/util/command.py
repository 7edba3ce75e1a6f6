"""Handles arguments, mistakes and interruptions for every command. No JAX."""

import argparse
import difflib
import importlib
import io
import math
import os
import pathlib
import re
import runpy
import select
import shlex
import signal
import socket
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from diloco import errors
from diloco.errors import ConfigError
from diloco.util import shipped
from diloco.util.files import is_address, local_path, shown

INTERRUPTED = 128 + signal.SIGINT  # Exit status of a program that Ctrl-C ended.
UNREAD = 128 + signal.SIGPIPE  # Exit status of a program whose output nobody reads.
# The kind of an option's value: int, float, str, or the words to choose from.
Kind = type | tuple[str, ...]


def guarded(
  run: Callable[..., Any], *args: Any, mistakes: type[Exception] = ValueError
) -> int:
  """Calls `run(*args)`; an error becomes one sentence and a status (`errors.explain`).

  After Ctrl-C, prints one word; the exit status is 130. If the reader of the output has
  ended, as in `... | head`, this is no mistake: prints nothing; the exit status is 141.

  Args:
    args: the arguments of `run`.
    mistakes: an exception that means a mistake of the user. Programs that use JAX pass
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
      # Python flushes stdout again at its end; this flush must not fail.
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
      return UNREAD
    if not (told := errors.explain(error, mistakes)):
      raise
    sentence, status = told
    print(f"error: {shown(sentence)}", file=sys.stderr)
    return status
  return status if isinstance(status, int) else 0


def _output_is_unread() -> bool:
  """Returns whether stdout is a pipe whose reader has ended."""
  poll = select.poll()
  try:
    poll.register(sys.stdout.fileno(), 0)
  except io.UnsupportedOperation:  # A notebook's stdout is no file.
    return False
  return any(event & select.POLLERR for _, event in poll.poll(0))


def interrupted() -> int:
  """Returns INTERRUPTED; after a KeyboardInterrupt, call this just before the exit.

  A KeyboardInterrupt may come while `exec` runs a string, as in dataclasses. Then
  CPython decides to end by SIGINT, even if the program handles the exception and exits
  with another status. The next `exec` cancels this decision.
  """
  exec("")
  return INTERRUPTED


class Parser(argparse.ArgumentParser):
  """A parser of flags that answers a mistake in one sentence, with exit status 2.

  The help shows the line breaks of the description, which is often a docstring.
  """

  def __init__(self, **options: Any):
    show = argparse.RawDescriptionHelpFormatter
    super().__init__(**{"formatter_class": show} | options)

  def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
    self._given = sys.argv[1:] if args is None else [*args]
    return super().parse_known_args(args, namespace)

  def error(self, message: str) -> NoReturn:
    self.exit(2, f"error: {message}{self._meant(message)} (see --help)\n")

  def _meant(self, message: str) -> str:
    """Suggests a name for a wrong choice, or else for the first unknown flag."""
    if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
      return meant(choice[1], re.findall(r"[\w.:-]+", choice[2]))
    if not re.search(r"unrecognized|required", message):
      return ""
    flags = [f for parser in self._parsers() for f in parser._option_string_actions]
    given = [word.partition("=")[0] for word in self._given if word.startswith("--")]
    return next((meant(flag, flags) for flag in given if flag not in flags), "")

  def _parsers(self) -> list[argparse.ArgumentParser]:
    """Lists this parser and the parsers of its commands."""
    choices = [a.choices for a in self._actions if isinstance(a.choices, dict)]
    candidates = [x for values in choices for x in values.values()]
    return [self, *(x for x in candidates if isinstance(x, argparse.ArgumentParser))]


# {a word that people may type, in lower case: our names or the ends of our names}.
_TYPED = {
  **{"h": "sync_every", "m": "replicas", "t": "train.steps", "lr": "learning_rate"},
  **{"inner_lr": "inner.learning_rate", "outer_lr": "outer.learning_rate"},
  **{"momentum": "outer.optimizer", "nesterov": "outer.optimizer sgd"},
  **{"beta1": "inner.optimizer", "beta2": "inner.optimizer", "wd": "weight_decay"},
  **{"bits": "wire.format", "precision": "model.dtype", "width": "model.dim"},
  **{"d_model": "model.dim", "hidden_size": "model.dim", "dataset": "data.source"},
  **{"bf16": "bfloat16 model.dtype", "fp32": "float32 model.dtype"},
  **{"bfloat16": "bf16", "float32": "fp32", "fp4": "e3m0", "fp8": "e4m3"},
  **{"top_k": "topk", "dp": "data_parallel", "ddp": "data_parallel"},
}


def meant(word: str, known: Iterable[str]) -> str:
  """Returns " (did you mean NAME?)" if known names are like the word, else "".

  The order of the attempts:
  - the plural or singular of the word;
  - names in the group of this name, such as train.steps for train;
  - names that end with the word's last part or its usual meaning (`_TYPED`), first
    those in the word's group;
  - names that contain the word, such as num_heads for heads;
  - names with almost the same spelling, or whose last part has almost the same.
  """
  plain = {name: name.lstrip("-").removeprefix("config.") for name in known}
  word = word.lstrip("-").removeprefix("config.")
  group, _, last = word.rpartition(".")
  usual = [last, last.lower(), *_TYPED.get(last.lower(), "").split()]
  ending = lambda end: [
    name for name, x in plain.items() if f".{x}".endswith(f".{end}")
  ]
  closest = lambda word, ends: difflib.get_close_matches(word, ends, 1, cutoff=0.8)
  attempts = (
    [name for name, x in plain.items() if x in (f"{word}s", word.removesuffix("s"))],
    [name for name, x in plain.items() if x.startswith(f"{word}.")],
    [name for end in usual for name in ending(f"{group}.{end}") if group],
    [name for end in usual for name in ending(end)],
    [name for name, x in plain.items() if last in re.split(r"[._]", x)],
    [name for x in closest(word, plain.values()) for name in ending(x)],
  )
  ends = {name: x.rpartition(".")[2] for name, x in plain.items()}
  close = difflib.get_close_matches(last, ends.values(), 1, cutoff=0.65)
  names = next(filter(None, attempts), [])
  names = names or [name for name, end in ends.items() if [end] == close]
  return f" (did you mean {' or '.join(dict.fromkeys(names[:3]))}?)" if names else ""


def in_range(least: float, most: float = math.inf) -> Callable[[str], float]:
  """Makes the type of an option: a finite number from `least` to `most`.

  An integer `least` allows only integers.
  """

  def number(text: str) -> float:
    value = type(least)(text)
    if not least <= value <= most or value == math.inf:
      raise argparse.ArgumentTypeError(f"{text}; give {least:g} to {most:g}")
    return value

  return number


def as_path(text: str) -> pathlib.Path:
  """Converts the text of an option to a path."""
  try:
    return local_path(text, "it")
  except ConfigError as error:
    raise argparse.ArgumentTypeError(str(error)) from error


def as_place(text: str) -> pathlib.Path | str:
  """Converts the text of an option to a path; keeps an address (s3://BUCKET/RUN)."""
  return text if is_address(text) else as_path(text)


def model_parser(command: str, description: str | None) -> Parser:
  """Makes the parser of a command that takes a trained model."""
  parser = Parser(prog=f"python -m diloco {command}", description=description)
  run = "folder or address of a run, or of an export"
  parser.add_argument("workdir", metavar="WORKDIR", type=as_place, help=run)
  parser.add_argument("--step", type=int, help="default: the newest checkpoint")
  return parser


def load_module(path: str, function: str, example: str) -> types.SimpleNamespace:
  """Runs a Python file and returns its globals, which include the function.

  The file may import modules of its folder.

  Args:
    path: a file, or another text that `shipped.find` accepts.

  Raises:
    ConfigError: the file or the function does not exist, or the file has an error.
  """
  path = shipped.find(path)
  if not os.path.isfile(path):
    known = shipped.names(function)
    names = f", or one of these names: {', '.join(known)}" if known else ""
    near = meant(pathlib.Path(path).stem, known)
    raise ConfigError(
      f"there is no file {path}{near}; give for example {example}{names}."
    )
  folder = str(pathlib.Path(path).parent.absolute())
  if folder not in sys.path:
    sys.path.append(folder)
  try:
    module = types.SimpleNamespace(**runpy.run_path(path))
  except Exception as error:
    raise ConfigError(f"{path}: {located(error, path)}") from error
  if not hasattr(module, function):
    raise ConfigError(f"{path} has no {function}(); see {example}.")
  return module


def optional(module: str, needs: str, extra: str) -> Any:
  """Imports a module of a package that only some users install.

  Args:
    module: the module's name, such as safetensors.numpy.
    needs: the beginning of the error, such as "exports need".
    extra: the extra of pyproject.toml that has the package.

  Raises:
    ConfigError: the package is not installed.
  """
  try:
    return importlib.import_module(module)
  except ImportError as error:
    package = module.partition(".")[0].replace("_", "-")
    raise ConfigError(
      f"{needs} the package {package}, which is not installed: pip install {package},"
      f" or '.[{extra}]' from a clone."
    ) from error


def check_picture(path: pathlib.Path, example: str) -> None:
  """Checks that --out names a picture, and makes the picture's folder.

  Raises:
    ConfigError: matplotlib cannot write this kind of picture, or the path is a folder,
      or nothing can be written in the folder of the path.
  """
  from matplotlib.figure import Figure

  kinds = Figure().canvas.get_supported_filetypes()
  if path.suffix.removeprefix(".") not in kinds or path.is_dir():
    raise ConfigError(f"--out is {str(path)!r}; give a file such as {example}.")
  make_folder(path.parent, "--out")


def make_parent(path: pathlib.Path, flag: str, wanted: str = "a file") -> None:
  """Makes the folder of the file that a flag names.

  Raises:
    ConfigError: the path is a folder, or nothing can be written in the path's folder.
  """
  if path.is_dir():
    raise ConfigError(f"{flag} is {str(path)!r}, a folder; give {wanted}.")
  make_folder(path.parent, flag)


def shell_words(text: str, flag: str) -> list[str]:
  """Splits the value of a flag as a shell does.

  Raises:
    ConfigError: a quotation in it does not end.
  """
  try:
    return shlex.split(text)
  except ValueError as error:
    raise ConfigError(
      f"{flag} is {text!r}, which a shell cannot read ({error}); complete it."
    ) from error


def make_folder(
  path: str | pathlib.Path, flag: str, later: bool = False
) -> pathlib.Path:
  """Makes the folder that a flag names, unless it exists.

  Args:
    later: whether to make nothing now, and only check that the folder can be made.

  Raises:
    ConfigError: nothing can be written in the folder.
  """
  folder = local_path(path, flag)
  try:
    if not later:
      folder.mkdir(parents=True, exist_ok=True)
    parts = (folder, *folder.absolute().parents)
    tempfile.TemporaryFile(dir=next(p for p in parts if p.exists())).close()
  except OSError as error:
    raise ConfigError(
      f"{flag} is {str(path)!r}, where nothing can be written ({error.strerror});"
      " choose another folder."
    ) from error
  return folder


def free_port() -> int:
  """Finds a port that is free now."""
  with socket.socket() as listener:
    listener.bind(("", 0))
    return listener.getsockname()[1]


def parse_count(text: str, name: str = "size") -> float:
  """Parses a number of parameters or tokens, such as 35M, 2.4B or 4e9.

  Args:
    name: the flag or argument with the text, such as --params.

  Raises:
    ConfigError: the text is not a number from 1 to 1e30.
  """
  exponent = {"M": "e6", "B": "e9"}.get(text[-1:], text[-1:])
  try:
    value = float(text[:-1] + exponent)
  except ValueError:
    value = 0.0
  if not 1 <= value <= 1e30:
    raise ConfigError(f"{name} is {text!r}; write one such as 35M, 2.4B or 4e9.")
  return value


def prefixed(value: float) -> str:
  """Formats a number with three digits and a decimal prefix, such as 2.4G."""
  for size, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
    if value >= 0.9995 * size:
      return f"{value / size:.3g}{suffix}"
  return f"{value:.3g}"


def parse_options(
  text: str,
  known: Mapping[str, Kind] | None = None,
  place: str = "the config's argument",
) -> dict[str, Any]:
  """Parses `name=value,name=value` into {name: value}; brackets may hold commas.

  Args:
    text: the options; may be empty.
    known: {name: kind of its value} of all options. None: any name is allowed, and
      values are strings.
    place: where the user gave the options, such as --where.

  Raises:
    ConfigError: an option is unknown, is given twice or has a wrong value.
  """
  allowed = " ".join(_option(*option) for option in (known or {}).items())
  options: dict[str, Any] = {}
  for item in filter(None, map(str.strip, re.split(r",(?![^(]*\))", text))):
    name, equals, value = (part.strip() for part in item.partition("="))
    if name in options:
      raise ConfigError(f"{place} has {name} twice; give it once.")
    try:
      if not name or not equals:
        raise ValueError("no name=value")
      kind = known[name] if known else str
      # `index` raises ValueError if the value is not one of the words.
      options[name] = (
        kind[kind.index(value)] if isinstance(kind, tuple) else kind(value)
      )
      if isinstance(options[name], float) and not math.isfinite(options[name]):
        raise ValueError("not finite")
    except (KeyError, ValueError) as error:
      raise ConfigError(
        f"{place} has {item!r}; write {allowed or 'name=value'}, separated by commas."
      ) from error
  return options


def _option(name: str, kind: Kind) -> str:
  if isinstance(kind, tuple):
    return f"{name}={'|'.join(kind)}"
  return f"{name}=<{ {int: 'integer', float: 'number', str: 'text'}[kind] }>"


def one_line(error: Exception) -> str:
  """Returns the message of an error in one line."""
  # If a field is unknown, ml_collections raises an error that contains another error.
  cause = error.args[0] if isinstance(error, AttributeError) and error.args else error
  return " ".join(str(cause.args[0] if isinstance(cause, KeyError) else cause).split())


def located(error: Exception, path: str) -> str:
  """Formats an error in one line; adds the line in `path` unless it is a ValueError."""
  message = one_line(error)
  if isinstance(error, ValueError):  # ValueErrors of config files are full sentences.
    return message
  lines = [
    f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path
  ]
  where = f" ({path}, line {lines[-1]})" if lines else ""
  return f"{type(error).__name__}: {message}{where}"
