"""Remembers what tune found: a JSON file for each step in the user's cache folder."""

import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import platform
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax

import diloco
from diloco.aot.programs import Programs, nbytes
from diloco.config import Config, changed
from diloco.mesh.devices import make_mesh
from diloco.util.files import read_json, write_json

Conditions = dict[str, str | int | float]  # What decides which settings are fastest.


@dataclasses.dataclass(frozen=True)
class Found:
  """The fastest settings of a config.

  Attributes:
    fields: those that differ from the config's.
    ratio: time of a step of the config over that of the fastest.
    when: date and time of the measurement.
  """

  fields: dict[str, Any]
  ratio: float
  when: str = dataclasses.field(
    default_factory=lambda: f"{datetime.datetime.now().astimezone():%F %H:%M %z}"
  )


def step(c: Config, tried: Sequence[object]) -> str:
  """Returns a digest of all that decides the times of a config on one machine.

  This is the step's program before XLA compiles it: every field that shapes the step
  counts, and no other does. The outer state takes memory beside it.

  Args:
    tried: the settings among which the fastest was sought.
  """
  programs = Programs(c, make_mesh(c))
  with jax.set_mesh(programs.mesh):
    program = programs.lower["inner step"]().as_text()
  # A number such as the last step of the schedule is not part of the shape.
  program = re.sub(r"dense<\S+> : tensor<f32>", "", program)
  return _digest([program, nbytes(programs.state.outer), repr(tried)])


def conditions(step: str, devices: Sequence[jax.Device]) -> Conditions:
  """Returns what decides which settings are fastest.

  Args:
    step: from `step`.
  """
  return {
    "devices": f"{len(devices)} x {devices[0].device_kind}",
    "processor": _processor(),
    "cores": len(os.sched_getaffinity(0)),
    "jax": jax.__version__,
    "diloco": diloco.__version__,
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    "step": step,
  }


def path(of: Conditions) -> pathlib.Path:
  """Returns the file of some conditions."""
  folder = os.environ.get("XDG_CACHE_HOME", "")
  if not os.path.isabs(folder):  # As XDG demands.
    folder = os.path.expanduser("~/.cache")
  return pathlib.Path(folder) / "diloco" / "tune" / f"{_digest(of)}.json"


def read(c: Config, of: Conditions) -> Found | None:
  """Returns what was found before; None, perhaps after a warning, if nothing."""
  if not os.path.exists(file := path(of)):
    return None
  try:
    saved = read_json(file) or {}
    changed(c, saved["fields"])  # Such fields exist, and the values work.
    return Found(saved["fields"], float(saved["ratio"]), str(saved["when"]))
  except (KeyError, TypeError, ValueError, OSError):
    _warn(f"{file} cannot be read, or is damaged; the settings are measured again.")
    return None


def write(of: Conditions, found: Found) -> None:
  """Saves what was found; if that fails, warns."""
  try:
    write_json(path(of), {"of": of, **dataclasses.asdict(found)})
  except OSError as error:
    _warn(
      f"this is not remembered, because {error.filename} cannot be written"
      f" ({error.strerror}); set XDG_CACHE_HOME to another folder."
    )


def _warn(sentence: str) -> None:
  print(f"warning: {sentence}", file=sys.stderr)


def _digest(value: object) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:20]


def _processor() -> str:
  """Names the processor: a home folder may serve machines of several kinds."""
  try:
    text = pathlib.Path("/proc/cpuinfo").read_text()
  except OSError:
    text = ""
  name = re.search(r"^model name\s*: (.*)", text, re.M)
  return name[1] if name else platform.machine()
