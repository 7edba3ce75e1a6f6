"""Tells whether a machine would accept a run, in seconds and without that machine.

  python -m diloco check --config=chinchilla:1.3B,M=2 --topology=v5e:8x8 --slices=2
  python -m diloco check --config=streaming:1B --topology=h100:8 --workdir=/data/runs/1B

Training makes the same checks before anything compiles. The exit status is 2 if the
devices or the disk would refuse the run. The command looks for text, tokenizer and
tasks on this machine; what is missing must be on the machine of the run. The last
line printed is the command that starts the run. --config.FIELD=VALUE changes a field,
as for `diloco.main`. `python -m diloco aot`, with the same flags except --workdir,
checks the memory, which takes minutes.
"""

import argparse
import pathlib
import shlex
import sys
from collections.abc import Callable, Sequence

from diloco.aot import look_for_no_device
from diloco.config import Config, changed
from diloco.config.command_line import load_config
from diloco.errors import ConfigError, TryAgain
from diloco.util.command import Parser, as_place, guarded, in_range, make_folder
from diloco.util.storage import open_storage


def devices(c: Config, topology: str, slices: int) -> str:
  """Describes how a run uses the devices of a machine.

  Raises:
    ConfigError: training refuses the machine.
  """
  from diloco.aot.topology import count
  from diloco.mesh.devices import layout
  from diloco.model import attention
  from diloco.spec.shapes import microbatches

  chips, kind = count(topology)
  n = slices * chips
  replica, fsdp = layout(c, n)
  attention.check(c.model, kind)
  rows = c.train.batch_size // n
  rows //= microbatches(c.train.accumulate, rows)
  crosses = "; some replica lies on several slices" if replica % slices else ""
  return (
    f"{n} {kind}, mesh replica {replica} x fsdp {fsdp}, {rows} sequences on each at a"
    f" time, attention {attention.choose(c.model, kind)}{crosses}"
  )


def checkpoints(c: Config, workdir: pathlib.Path | str | None) -> str:
  """Describes the disk space that the checkpoints take.

  Raises:
    ConfigError: the disk of --workdir has no room for the checkpoints, or --workdir
      is a bucket that cannot be used.
  """
  import jax

  from diloco.algorithm.method import make_method
  from diloco.checkpoint.checkpoints import tree_of
  from diloco.checkpoint.disk import at_once, check_room, needed
  from diloco.mesh.devices import make_mesh

  # On a mesh of one device, the state has the same shapes as on the run's mesh.
  fields = {"mesh.replica": 0, "mesh.fsdp": 0, "outer.offload": False}
  one = changed(c, fields)
  mesh = make_mesh(one, jax.devices()[:1])
  size = needed(tree_of(make_method(one, mesh).abstract()))
  if isinstance(workdir, str):
    open_storage(workdir, "--workdir")
  elif workdir:
    make_folder(workdir, "--workdir", later=True)
    check_room(workdir, size, c.checkpoint, c.train.steps)
  most = at_once(c.checkpoint, c.train.steps)
  return f"{size / 1e9:,.1f} GB each, at most {most} at once"


def text(c: Config) -> str:
  """Describes the training text, and how often the run passes over it.

  Raises:
    ConfigError: the text is not on this machine, or does not fit the config.
  """
  from diloco.data.pipeline import training_documents
  from diloco.tokenizer.vocabulary import read_manifest, split_folder

  size = f"{len(training_documents(c)):,} documents"
  if c.data.source.startswith("arrays:"):
    shards = read_manifest(split_folder(c.data.source, c.data.train_split))["shards"]
    tokens = sum(shard["tokens"] for shard in shards)
    size += f", {tokens:,} tokens, {c.train.tokens / tokens:.2f} passes"
  return f"{c.data.source}: {size}"


def evaluation(c: Config) -> str:
  """Describes the texts and tasks that evaluations read.

  Raises:
    ConfigError: a text or task is not on this machine, or does not fit the config.
  """
  from diloco.data.documents import make_documents
  from diloco.evaluate.tasks import INSTALL, load_items

  inputs = [f"{len(make_documents(c, 'eval')):,} documents"]
  for task in filter(None, map(str.strip, c.eval.tasks.split(","))):
    inputs.append(f"{task} ({len(load_items(task, c.eval.task_items)):,} items)")
  if not c.eval.tasks:
    inputs.append(f"no tasks (those of the papers: {INSTALL})")
  return ", ".join(inputs)


def launch(topology: str, slices: int, words: str) -> str:
  """Returns the command that starts the run.

  Args:
    words: the flags of diloco.main.
  """
  from diloco.aot.topology import GPUS, count

  (chip, _, grid), (chips, _) = topology.partition(":"), count(topology)
  if slices == 1 and (chip in GPUS or chips <= (4 if chip == "v5p" else 8)):
    return f"python -m diloco.main {words}"
  if chip in GPUS:
    each = f"--gpus-per-node={grid} --ntasks-per-node={grid}"
    return f"sbatch --nodes={slices} {each} scripts/launchers/slurm.sh {words}"
  # Google Cloud names a v5p slice by its cores, other TPU slices by their chips.
  name = {"v5e": f"v5litepod-{chips}", "v5p": f"v5p-{2 * chips}"}
  script = "scripts/launchers/tpu_multislice.sh run"
  kind = name.get(chip, f"{chip}-{chips}")
  return f"SLICES={slices} ACCELERATOR={kind} {script} {words}"


def run(args: argparse.Namespace, others: Sequence[str]) -> int:
  look_for_no_device()
  c = load_config(args.config, others)
  topology, slices, workdir = args.topology, args.slices, args.workdir

  def works(part: str, describe: Callable[..., str], *given: object) -> bool:
    """Prints what `describe` returns, or its error; returns whether there was none."""
    try:
      description = describe(*given)
    except (ConfigError, TryAgain) as error:
      print(f"{part:<12} no: {error}", flush=True)
      return False
    print(f"{part:<12} {description}", flush=True)
    return True

  machine = works("devices", devices, c, topology, slices)
  disk = works("checkpoints", checkpoints, c, workdir)
  inputs = works("text", text, c), works("evaluation", evaluation, c)
  if not all(inputs):
    print(f"{'':<12} what is not here has to be on that machine")
  flags = [f"--config={args.config}", *others, f"--workdir={workdir or '...'}"]
  works("launch", launch, topology, slices, shlex.join(flags))
  return 0 if machine and disk else 2


def main(argv: Sequence[str] | None = None) -> int:
  parser = Parser(prog="python -m diloco check", description=__doc__)
  add = parser.add_argument
  add("--config", required=True, help="file, or name: sample, chinchilla:1.3B,M=2")
  text = "chip and grid of a slice, as v5e:8x8; or GPUs of a node, as h100:8"
  add("--topology", required=True, help=text)
  add("--slices", type=in_range(1), default=1, help="slices or nodes; default 1")
  text = "folder of the run, if it can be reached from here"
  add("--workdir", type=as_place, help=text)
  args, others = parser.parse_known_args(argv)
  return guarded(run, args, others, mistakes=ConfigError)


if __name__ == "__main__":
  sys.exit(main())
