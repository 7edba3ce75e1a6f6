"""The Dockerfile has what an installation needs. No image is built."""

import json
import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
STEPS = re.findall(r"^([A-Z]+) +(.*)$", TEXT, re.M)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def arguments(instruction: str) -> list[str]:
  return [text for name, text in STEPS if name == instruction]


def test_the_extras_exist():
  extras = PROJECT["project"]["optional-dependencies"]
  (default,) = arguments("ARG")
  asked = [default, *re.findall(r"--build-arg (EXTRA=\w+)", TEXT)]
  assert {text.removeprefix("EXTRA=") for text in asked} == {"export", "gpu"}
  assert {"export", "gpu"} <= extras.keys()


def test_it_copies_all_that_the_wheel_is_made_of():
  copied = [x for text in arguments("COPY") for x in text.split()[:-1]]
  assert all((ROOT / path).exists() for path in copied)
  wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
  project = PROJECT["project"]
  needed = [*wheel["packages"], *wheel["force-include"], *project["license-files"]]
  assert {*needed, project["readme"], "pyproject.toml"} == set(copied)
  ignore = (ROOT / ".dockerignore").read_text().split()
  assert {f"!{path}" for path in copied} == {x for x in ignore if x.startswith("!")}


def test_it_runs_the_commands_as_an_ordinary_user_with_a_python_that_is_allowed():
  version = re.fullmatch(r"python:(3\.\d+)-slim", arguments("FROM")[0])[1]
  python = f"Programming Language :: Python :: {version}"
  assert python in PROJECT["project"]["classifiers"]
  assert json.loads(arguments("ENTRYPOINT")[0]) == ["python", "-m", "diloco"]
  assert json.loads(arguments("CMD")[0]) == ["--help"]
  names = [name for name, _ in STEPS]
  assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
