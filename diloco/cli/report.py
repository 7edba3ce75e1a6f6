"""Writes one page about a run, a sweep or a group of sites.

python -m diloco report runs/sample --config=sample
python -m diloco report /tmp/sweep --out=sweep.html

The page is HTML, with its pictures inside: fields that differ from --config, state,
losses, bytes, syncs, speed. Several WORKDIR are compared. The runs may still go on.
"""

import argparse
import base64
import html
import math
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

from diloco.cli import compare, status
from diloco.config.command_line import load_config
from diloco.config.resolve import difference, leaves
from diloco.errors import ConfigError
from diloco.log import metrics, read_run
from diloco.log.workdir import parts_of
from diloco.simulate import wallclock
from diloco.spec.fields import Config
from diloco.util import files, palette
from diloco.util.command import Parser, as_path, guarded, make_parent

MOST = 12  # Runs that are drawn and described; more could not be told apart.
_STYLE = """:root { color-scheme: light dark; font-family: sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre { overflow-x: auto; } img { max-width: 100%; background: white; }"""


def folders_of(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the folders of the runs in a folder; a group of sites is one run.

  Raises:
    ConfigError: there is no run.
  """
  if parts_of(folder):
    return [folder]
  found = [f for f in status.find(folder) if (f / metrics.FILE).is_file()]
  if not found:
    raise ConfigError(
      f"WORKDIR is {str(folder)!r}, where no run has a step; give the folder of a run,"
      " or of sites, not of their group."
    )
  return found


def page(folders: Sequence[pathlib.Path], config: str) -> str:
  """Makes the page.

  Args:
    folders: those of the runs.
    config: the config file with which the runs are compared; "" for the defaults.
  """
  runs = compare.named(read_run.read_all(folders))
  network = wallclock.NETWORKS["low"]
  places = dict(zip([run.name for run in runs], folders))
  best = sorted(runs, key=lambda run: min(run.held_out.values(), default=math.inf))
  shown = best[:MOST] if len(runs) > MOST else runs
  drawn = [compare.mean_of(group) for group in read_run.joined(shown)]
  seconds, notes = compare.idealised(drawn, None, network)
  notes = compare.incomparable(runs) + notes
  if len(runs) > MOST:
    notes.append(f"Shown below: the {MOST} runs with the least held-out loss.")
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "compare.png"
    palette.save(lambda: compare.draw(drawn, seconds, network), path)
    parts = [_text(compare.table(runs)), _picture(path)]
  parts += [f"<p>{html.escape(note)}</p>" for note in notes]
  base = (load_config(config) if config else Config()).to_dict()
  for run in shown:
    state = status.lines(places[run.name], time.time())
    changed = difference(base, run.config.to_dict()).items()
    parts += [f"<h2>{html.escape(run.name)}</h2>", _text("\n".join(state))]
    for part in parts_of(places[run.name]):
      summary = leaves(files.read_json(part / status.SUMMARY) or {}).items()
      parts += [_picture(part / "loss.png"), _columns(summary)]
    parts += [f"<h3>Fields that differ from {html.escape(config) or 'defaults'}</h3>"]
    parts += [_columns(changed) or "none"]
  title = html.escape("; ".join(run.name for run in drawn))
  head = f"<meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
  return f"<!doctype html>{head}<h1>{title}</h1>\n" + "\n".join(parts) + "\n"


def _columns(values: Iterable[tuple[str, Any]]) -> str:
  short = lambda v: f"{v:.6g}" if isinstance(v, float) else v
  return _text("\n".join(f"{name:<32} {short(value)}" for name, value in values))


def _text(text: str) -> str:
  return f"<pre>{html.escape(text)}</pre>" if text else ""


def _picture(path: pathlib.Path) -> str:
  if not path.is_file():
    return ""
  data = base64.b64encode(path.read_bytes()).decode()
  return f'<img alt="{path.stem}" src="data:image/png;base64,{data}">'


def report(args: argparse.Namespace) -> None:
  """Writes the page."""
  out = args.out or args.workdir[0] / "report.html"
  folders = [f for folder in args.workdir for f in folders_of(folder)]
  text = page(folders, args.config)
  make_parent(out, "--out", "a file such as report.html")
  with files.replacing(out) as file:
    file.write(text.encode())
  print(f"report       {out}")


def main(argv: Sequence[str] | None = None) -> int:
  parser = Parser(prog="python -m diloco report", description=__doc__)
  add, path = parser.add_argument, as_path
  text = "folder of a run, of its sites, or of several runs"
  add("workdir", metavar="WORKDIR", type=path, nargs="+", help=text)
  add("--config", default="", help="config file of the runs; default: all defaults")
  add("--out", type=path, help="page to write; default WORKDIR/report.html")
  return guarded(report, parser.parse_args(argv))


if __name__ == "__main__":
  sys.exit(main())
