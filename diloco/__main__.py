"""Lists the commands of diloco, or runs one of them.

python -m diloco
python -m diloco train --config=sample --workdir=runs/sample
python -m diloco launch_local -n 2 -- --config=sample --workdir=runs/two

`diloco` is the same as `python -m diloco`, and `diloco train` is the same as
`python -m diloco.main`. Every command takes --plugins=NAME,... for modules that do not
ship with diloco, but that a run or an export needs (docs/evaluation.md).
"""

import ast
import runpy
import sys
from collections.abc import Sequence

import diloco
from diloco.util import shipped
from diloco.util.command import guarded, meant

GROUPS = {
  "Train": ("train", "launch_local", "sweep", "check", "check_plugin", "aot"),
  "Data": ("prepare_data", "train_tokenizer", "make_items"),
  "Settings": ("list_configs", "plan", "tune", "simulate", "scaling_laws"),
  "Runs, while they train and after": ("status", "compare", "diagnostics", "replay"),
  "Trained models": ("evaluate", "generate", "export"),
  "The claims of both papers": ("reproduce",),
}
# The commands in the list. Mostly programs start the other commands.
NAMES = [name for names in GROUPS.values() for name in names]


def commands() -> dict[str, str]:
  """Returns {name: module}: the commands in GROUPS, then commands that programs start.

  A command is a module that may be run. Its name is the name of its file, or of its
  folder if the file is `__main__.py`; `train` is diloco/main.py.
  """
  found = {}
  for file in sorted(shipped.PACKAGE.rglob("*.py")):
    *folders, stem = file.relative_to(shipped.PACKAGE).with_suffix("").parts
    is_config = folders[:1] == ["configs"]  # A wheel has configs in the package.
    is_command = '__name__ == "__main__"' in file.read_text() and not is_config
    if is_command and [*folders, stem] != ["__main__"]:
      name = folders[-1] if stem == "__main__" else stem
      found[name] = ".".join(["diloco", *folders, stem])
  found["train"] = found["main"]
  return {name: found[name] for name in NAMES} | found


def document(module: str) -> str:
  """Returns the docstring of a command's module, without importing the module."""
  file = shipped.PACKAGE.parent / f"{module.replace('.', '/')}.py"
  return ast.get_docstring(ast.parse(file.read_text())) or ""


def listing() -> str:
  """Returns the list of commands by group: the name and the purpose of each."""
  lines, modules = ["Commands, as in `python -m diloco train --help`:"], commands()
  for group, names in GROUPS.items():
    lines += ["", f"{group}:"]
    lines += [f"  {n:<17}{document(modules[n]).partition(chr(10))[0]}" for n in names]
  configs = ", ".join(shipped.names("get_config"))
  lines += ["", "Every command takes --plugins=NAME: modules that are not of diloco."]
  lines += ["", f"Configs by name, as in --config=sample: {configs}."]
  return "\n".join(lines)


def _import_plugins(flags: Sequence[str]) -> None:
  from diloco.spec import plugins

  names = ",".join(flag.removeprefix("--plugins=") for flag in flags).split(",")
  plugins.load(filter(None, names))


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv if argv is None else argv
  if argv[1:2] == ["help"]:
    argv = [argv[0], *argv[2:], "--help"]
  if argv[1:] in ([], ["--help"], ["-h"]):
    return guarded(print, listing())
  if argv[1:] == ["--version"]:
    print(f"diloco {diloco.__version__}")
    return 0
  # The flags after `--` are those of another command.
  end = argv.index("--") if "--" in argv else len(argv)
  given = [word for word in argv[:end] if word.startswith("--plugins=")]
  argv = [*(word for word in argv[:end] if word not in given), *argv[end:]]
  if given and (status := guarded(_import_plugins, given)):
    return status
  name, found = argv[1], commands()
  if name not in found:
    near, known = f"{name}{meant(name, found)}", ", ".join(NAMES)
    print(f"error: there is no command {near}; give one of {known}.", file=sys.stderr)
    return 2
  sys.argv = list(argv[1:])
  runpy.run_module(found[name], run_name="__main__", alter_sys=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
