"""Prints a table of runs: what each run trains and how much it sends. Imports no JAX.

  python -m diloco list_configs
  python -m diloco list_configs configs/streaming.py:1B,H=100 configs/sample.py
  python -m diloco list_configs --of="2503.09799 table 4"

A config file without an argument stands for all runs in its list `RUNS`. Without any
config, the command lists the papers' runs: configs/streaming.py and
configs/chinchilla.py. With --of, it lists the runs of one table, figure or section at
the paper's scale, and then the command of each run. If a sweep tunes the rates of a
setting, the setting counts as one run here.

M          replicas
N          parameters without positions and norms; the papers name models by this N
tokens     training tokens, all replicas together
batch x L  sequences per step, all replicas together, and tokens per sequence
inner      peak of the inner learning rate
outer      outer learning rate
H          inner steps between two syncs of a fragment
P          fragments
payload    bytes of the largest payload of one replica, with scales
sent       bytes that one replica sends in the whole run
FLOPs      6 N per token, as the papers count
"""

import argparse
import pathlib
import sys
from typing import Any

import pandas as pd

from diloco.config import Config, resolve
from diloco.config.command_line import load_config
from diloco.errors import ConfigError
from diloco.spec import sizes
from diloco.spec.shapes import flops_per_token, matrix_params, num_params, parameters
from diloco.util import shipped
from diloco.util.command import Parser, guarded, load_module, prefixed
from diloco.util.types import Json
from diloco.wire.ledger import all_reduced_bytes

CONFIGS = shipped.folder("configs")
DEFAULT = (CONFIGS / "streaming.py", CONFIGS / "chinchilla.py")


def rows(names: list[str]) -> list[Json]:
  """Returns the rows of configs such as `configs/streaming.py:1B,H=100`."""
  config_rows = []
  for name in names or map(str, DEFAULT):
    path, _, argument = name.partition(":")
    module = load_module(path, "get_config", "configs/streaming.py:1B")
    arguments = [argument] if argument else getattr(module, "RUNS", [""])
    for a in arguments:
      c = load_config(f"{path}:{a}" if a else path)
      config_rows.append(row(f"{pathlib.Path(path).stem}:{a}" if a else path, c))
  return config_rows


def runs_of(item: str) -> tuple[list[Json], list[str]]:
  """Returns rows and commands for the runs of an item, at the paper's scale.

  Args:
    item: a paper and its table, figure or section, such as 2503.09799 table 4.

  Raises:
    ConfigError: no config names runs of the item.
  """
  items = dict[str, tuple[str, tuple[str, ...]]]()
  for path in DEFAULT:
    module = load_module(str(path), "get_config", "")
    items |= {f"{module.PAPER} {k}": (path.name, v) for k, v in module.ITEMS.items()}
  if item in items:
    file, arguments = items[item]
    names = [f"configs/{file}:{argument}" for argument in arguments]
    run_rows, flags = rows(names), [f"--config={name}" for name in names]
  else:
    ablations = load_module("ablations", "get_sweep", "")
    runs = ablations.paper_runs(item)
    if not runs:
      titles = [ablation.chart.title for ablation in ablations.ABLATIONS.values()]
      raise ConfigError(
        f"--of is {item!r}; write one of {', '.join([*items, *titles])}."
      )
    run_rows = [row(label, resolve(c)) for label, c, _ in runs]
    flags = [run_flags for *_, run_flags in runs]
  return run_rows, [f"python -m diloco.main {words} --workdir=..." for words in flags]


def row(name: str, c: Config) -> Json:
  """Returns the row of a config; the module's docstring explains the columns."""
  most, sent = traffic(c)
  parallel = c.one_model
  return {
    "config": name,
    "M": c.replicas,
    "N": matrix_params(c.model),
    "tokens": c.train.tokens,
    "batch x L": f"{c.train.batch_size} x {c.model.seq_len}",
    "steps": c.train.steps,
    "inner": c.inner.learning_rate,
    "outer": 0.0 if parallel else c.outer.learning_rate,
    "H": 1 if parallel else c.sync_every,
    "P": 1 if parallel else len(c.make_fragments()),
    "payload": most,
    "sent": sent,
    "FLOPs": flops_per_token(c.model, attention=False) * c.train.tokens,
  }


def traffic(c: Config) -> tuple[int, int]:
  """Returns the bytes of the largest payload, and all bytes that one replica sends.

  data_parallel all-reduces its gradients at every step.
  """
  sent = all_reduced_bytes(c, c.train.steps)
  if c.one_model:
    return sizes.DTYPE_BYTES[c.inner.gradient_dtype] * num_params(c.model), sent
  whole, most = parameters(c.model), 0
  for times, fragment in zip(c.num_syncs(), c.make_fragments()):
    shapes = fragment.shapes(whole)
    most = max(most, sizes.exchanged_bytes(c.wire, shapes))
    sent += times * sizes.sync_bytes(c.wire, c.replicas, shapes)
  warm = min(c.joint_steps, c.train.steps)
  for average in c.averages.values():
    times = c.train.steps // average.every - warm // average.every
    sent += times * average.sent
  return most, sent


def table(found: list[Json]) -> str:
  """Formats the rows: one line per run."""
  in_bytes = lambda value: f"{prefixed(value)}B"
  forms: dict[Any, Any] = {
    "N": prefixed,
    "tokens": prefixed,
    "steps": "{:,}".format,
    "inner": "{:.2e}".format,
    "outer": "{:.2g}".format,
    "payload": in_bytes,
    "sent": in_bytes,
    "FLOPs": "{:.2g}".format,
  }
  frame = pd.DataFrame(found).set_index("config").rename_axis(None)
  return frame.to_string(formatters=forms)


def main(argv: list[str] | None = None) -> int:
  parser = Parser(prog="python -m diloco list_configs", description=__doc__)
  parser.add_argument("config", nargs="*", help="file, or file:argument")
  parser.add_argument("--of", help="runs of an item, such as '2503.09799 table 4'")
  return guarded(run, parser.parse_args(argv))


def run(args: argparse.Namespace) -> None:
  if args.of and args.config:
    raise ConfigError("--of chooses the configs itself; give a config or --of.")
  run_rows, commands = runs_of(args.of) if args.of else (rows(args.config), [])
  print("\n".join([table(run_rows), *commands]))


if __name__ == "__main__":
  sys.exit(main())
