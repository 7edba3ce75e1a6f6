"""Describes every field of a config, from the comments of fields.py. No JAX."""

import ast
import dataclasses
import functools
import inspect
import math
import sys
import textwrap
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_collections

from diloco.config.resolve import leaves, resolve
from diloco.spec import fields, plugins
from diloco.spec.fields import Config, Range

_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_WIDTH = 88


class Field(NamedTuple):
  """One field.

  Attributes:
    name: such as wire.format.
    kind: type and limits, in words.
    default: the value if nobody sets the field.
    meaning: the comment above the field in its source, in one line.
  """

  name: str
  kind: str
  default: object
  meaning: str


class Group(NamedTuple):
  """Fields whose names begin with the name of the group and a dot, such as `wire.`."""

  name: str
  meaning: str
  fields: tuple[Field, ...]


def groups(names: Sequence[str] = ()) -> list[Group]:
  """Reads all groups in the order of fields.py; the first group has no name.

  Args:
    names: plug-ins, whose groups come last.
  """
  kinds: dict[str, type] = {"": Config}
  for field in dataclasses.fields(Config):
    if dataclasses.is_dataclass(field.default):
      kinds[field.name] = type(field.default)
  kinds |= plugins.load(names)
  return [_group(name, kind) for name, kind in kinds.items()]


def text(config: ml_collections.ConfigDict) -> str:
  """Formats all fields with their values, for a terminal.

  Raises:
    ConfigError: a field has a value that cannot work.
  """
  c = resolve(config)
  given, used = leaves(config), leaves(c.to_dict())
  lines = ["Set a field by --config.NAME=VALUE, or in a config file by c.NAME = VALUE."]
  for group in groups(c.plugins):
    lines += ["", _filled(f"{group.name.upper() or 'RUN'}: {group.meaning}")]
    for field in group.fields:
      value, final = given[field.name], used[field.name]
      line = f"{field.name} = {show(value)}"
      line += f", here {show(final)}" if final != value else ""
      line += f" (default {show(field.default)})" if value != field.default else ""
      lines += [line, _filled(f"[{field.kind}] {field.meaning}", indent=4)]
  return "\n".join(lines)


def show(value: object) -> str:
  """Formats a value as in a flag; an empty text becomes ''."""
  if isinstance(value, bool):
    return str(value).lower()
  return value or "''" if isinstance(value, str) else str(value)


def _group(name: str, kind: type) -> Group:
  comments = _comments(inspect.getsource(sys.modules[kind.__module__]))
  hints = typing.get_type_hints(kind, include_extras=True)
  prefix = f"{name}." if name else ""
  fields = tuple(
    Field(
      prefix + f.name, _kind(hints[f.name]), f.default, comments[kind.__name__, f.name]
    )
    for f in dataclasses.fields(kind)
    if not dataclasses.is_dataclass(f.default) and f.name != "extensions"
  )
  return Group(name, " ".join((kind.__doc__ or "").split()), fields)


@functools.cache  # One file has many groups.
def _comments(source: str) -> dict[tuple[str, str], str]:
  """Returns {(class, field): the comment above the field} of a Python source.

  Fields in adjacent lines share the comment above the first field.
  """
  lines, by_field, comment = source.splitlines(), dict[tuple[str, str], str](), ""
  for node in ast.parse(source).body:
    if not isinstance(node, ast.ClassDef):
      continue
    for field in node.body:
      if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
        continue
      first = last = field.lineno - 1
      while lines[first - 1].lstrip().startswith("#"):
        first -= 1
      if first < last:
        parts = (line.strip().lstrip("#").strip() for line in lines[first:last])
        comment = " ".join(parts)
      by_field[node.name, field.target.id] = comment
  return by_field


def _kind(hint: Any) -> str:
  """Describes the type of a field, such as `whole number, at least 0`."""
  arguments = typing.get_args(hint)
  if typing.get_origin(hint) is typing.Literal:
    return " or ".join(map(str, arguments))
  if typing.get_origin(hint) is tuple:
    return f"several, as {(1, 2) if arguments[0] is int else ('a', 'b')}"
  limits = [_limits(m) for m in getattr(hint, "__metadata__", ())]
  return ", ".join([_KINDS[arguments[0] if limits else hint], *limits])


def _limits(limits: Range) -> str:
  """Describes limits in words; leaves out the limit LARGEST, which every count has."""
  told = limits.high < fields.LARGEST
  return str(limits if told else dataclasses.replace(limits, high=math.inf))


def _filled(text: str, indent: int = 0) -> str:
  space = " " * indent
  return textwrap.fill(text, _WIDTH, initial_indent=space, subsequent_indent=space)
