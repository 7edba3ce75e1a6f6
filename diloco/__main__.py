"""Lists the commands of diloco, or runs one of them.

python -m diloco
python -m diloco main --config=sample --workdir=/tmp/sample
python -m diloco launch_local -n 2 -- --config=sample --workdir=/tmp/two

`python -m diloco main` is the same as `python -m diloco.main`.
"""

import ast
import pathlib
import runpy
import sys
from collections.abc import Sequence

from diloco.config import shipped

# The scripts that ship with the package: launch, data, tables and pictures of own runs.
# pyproject.toml copies them into the wheel. The other scripts measure this repository.
SCRIPTS = (
  "launch_local",
  "keep_running",
  "list_configs",
  "make_certificates",
  "make_standin",
  "prepare_data",
  "train_tokenizer",
  "draw_run",
  "reproduce",
)


def commands() -> dict[str, pathlib.Path]:
  """Returns {name: file} of all commands; main, which trains, is the first."""
  modules = {}
  for file in sorted(shipped.PACKAGE.rglob("*.py")):
    path = file.relative_to(shipped.PACKAGE).with_suffix("")
    parts = path.parent.parts if path.name == "__main__" else path.parts
    shipped_too = parts[:1] in (("scripts",), ("configs",))
    if parts and not shipped_too and '__name__ == "__main__"' in file.read_text():
      modules[".".join(parts)] = file
  scripts = {name: shipped.folder("scripts") / f"{name}.py" for name in SCRIPTS}
  return {"main": modules.pop("main")} | modules | scripts


def listing() -> str:
  """Returns one line for each command: its name, and what it does."""
  lines = ["Commands, as in `python -m diloco main --help`:", ""]
  for name, file in commands().items():
    doc = ast.get_docstring(ast.parse(file.read_text())) or ""
    lines.append(f"  {name:<19}{doc.partition(chr(10))[0]}")
  names = ", ".join(shipped.names("get_config"))
  lines += ["", f"Configs to give by name, as --config=sample: {names}."]
  return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
  if argv[1:] in ([], ["--help"], ["-h"]):
    print(listing())
    return 0
  name, found = argv[1], commands()
  if name not in found:
    known = ", ".join(found)
    print(f"error: there is no command {name}; give one of {known}.", file=sys.stderr)
    return 2
  sys.argv = list(argv[1:])
  if name in SCRIPTS:
    runpy.run_path(str(found[name]), run_name="__main__")
  else:
    runpy.run_module(f"diloco.{name}", run_name="__main__", alter_sys=True)
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
