"""Every run of both papers starts on the slices that docs/aot.md names for its size."""

import json
import pathlib
import re

import conftest
import cpu_devices
import pytest

from diloco.cli import check, list_configs
from diloco.config import resolve
from diloco.data.prepare.tokenize import tokenize
from diloco.spec.shapes import matrix_params
from diloco.util.command import load_module, parse_count

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "aot.md"
# Size: grid of each of two slices of v5e.
SLICES = {
  parse_count(size): grid
  for size, grid in re.findall(
    r"^\| ([\d.]+[MB]) \| 2 x (\w+) \|", PAGE.read_text(), re.MULTILINE
  )
}
# Opens runs as training does, each on its number of CPU devices, up to where training
# would make the first array. Runs of 35M take one step, on short sequences.
OPEN = """
import json, sys
import jax
from diloco import session
from diloco.checkpoint import disk
from diloco.config.command_line import load_config

class Opened(Exception):
  pass

def stop(c, mesh):
  if not steps:
    raise Opened

session.first_params, disk.check_room, opened = stop, lambda *args: None, {}
flags = ["--config.data.source=sotu", "--config.data.tokenizer=sotu_2048"]
flags += ["--config.data.train_split=train", "--config.data.eval_split=validation"]
flags += ["--config.data.eval_source="]
short = ["--config.model.seq_len=16", "--config.model.loss_chunk=0"]
everywhere, workdir = jax.devices(), sys.argv[1]
for name, (count, steps) in json.loads(sys.argv[2]).items():
  jax.devices = lambda *args: everywhere[:count]
  c = load_config(name, flags + short * steps)
  try:
    with session.open_session(c, f"{workdir}/{len(opened)}", None, None) as run:
      _, state = run.start()
      _, [metrics] = run.method.inner(range(1, 2), state, run.take(range(1, 2)))
      opened[name] = metrics.loss.tolist()
      del state
  except Opened:
    opened[name] = []
print(json.dumps(opened))
"""


def devices_of(module, run):
  """Returns a run of a paper, and what `check` says of it on the slices of its size."""
  c = resolve(module.get_config(run))
  n = matrix_params(c.model)
  _, grid = min(SLICES.items(), key=lambda row: abs(row[0] / n - 1))
  return c, check.devices(c, f"v5e:{grid}", 2)


@pytest.mark.parametrize("path", list_configs.DEFAULT, ids=lambda path: path.stem)
def test_the_slices_of_the_page_hold_every_run_of_the_papers(path):
  module = load_module(str(path), "get_config", "")
  for run in dict.fromkeys(module.RUNS):
    c, found = devices_of(module, run)
    assert "attention splash" in found
    assert ("lies on several slices" in found) == (c.replicas == 1)


@pytest.mark.parametrize(
  "every", conftest.first_of("opens three sizes or all runs of each paper", False, True)
)
def test_training_opens_what_the_check_allows(tmp_path, every):
  runs, seen, stepped = dict[str, tuple[int, bool]](), set(), set()
  for path in list_configs.DEFAULT:
    module = load_module(str(path), "get_config", "")
    for run in dict.fromkeys(module.RUNS if every else [*module.SCALES][::3]):
      c, found = devices_of(module, run)
      kind = path, c.algorithm, c.replicas
      # Runs that differ in rates and tokens only open alike.
      own = *kind, c.sync_every, c.model, c.train.batch_size
      # More replicas of 35M would take all memory of a small machine.
      steps = every and run.startswith("35M") and c.models <= 2 and kind not in stepped
      stepped |= {kind} if steps else set()
      if own not in seen:
        runs[f"{path}:{run}"] = (int(found.partition(" ")[0]), steps)
      seen.add(own)
  opened = cpu_devices.run(64, "-c", OPEN, str(tmp_path), json.dumps(runs))
  assert {run: bool(losses) for run, losses in opened.items()} == {
    run: steps for run, (_, steps) in runs.items()
  }
  assert all(9 < loss < 12 for losses in opened.values() for loss in losses)


def test_an_item_chooses_its_configs_itself(capsys):
  assert list_configs.main(["configs/sample.py", "--of=2501.18512 table 2"]) == 2
  assert "give a config or --of" in capsys.readouterr().err


def test_what_training_refuses_is_refused(tmp_path, capsys):
  given = ["--config=chinchilla:35M,M=2", "--topology=h100:8"]
  assert check.main([*given, "--slices=8"]) == 2
  found = capsys.readouterr().out
  assert "devices      no: mesh.fsdp is 32, but a replica has 16 sequences" in found
  (tmp_path / "file").touch()
  assert check.main([*given, f"--workdir={tmp_path}/file/x"]) == 2
  assert "where nothing can be written (Not a directory)" in capsys.readouterr().out
  workdir = tmp_path / "not" / "yet"
  assert check.main([*given, f"--workdir={workdir}", "--config.data.source=sotu"]) == 0
  devices, checkpoints, text, *_, launch = capsys.readouterr().out.splitlines()
  assert "8 NVIDIA H100 80GB HBM3, mesh replica 2 x fsdp 4" in devices
  assert re.search(r"checkpoints  1\.\d GB each, at most 3 at once", checkpoints)
  assert text.startswith("text         no: data.tokenizer is 'c4_32k.model', but there")
  assert launch == (
    "launch       python -m diloco.main --config=chinchilla:35M,M=2"
    f" --config.data.source=sotu --workdir={workdir}"
  )


@pytest.mark.parametrize(
  ("topology", "slices", "start"),
  [
    ("v5e:8x8", 2, "SLICES=2 ACCELERATOR=v5litepod-64 scripts/launchers/tpu_mult"),
    ("v5p:2x2x2", 1, "SLICES=1 ACCELERATOR=v5p-16 scripts/launchers/tpu_multislice.sh"),
    ("v5e:2x4", 1, "python -m diloco.main --x"),
    ("h100:8", 4, "sbatch --nodes=4 --gpus-per-node=8 --ntasks-per-node=8 scripts/la"),
  ],
)
def test_the_launch_line_suits_the_machine(topology, slices, start):
  assert check.launch(topology, slices, "--x").startswith(start)


def test_prepared_text_is_counted_in_passes(tiny, tmp_path):
  (tmp_path / "book.txt").write_text("\n\n".join(f"Paragraph {i}." for i in range(99)))
  book, folder = f"paragraphs:{tmp_path}/book.txt", tmp_path / "tokens"
  made = tokenize(book, "train", "sotu_2048", folder / "train")
  tiny.data.source = f"arrays:{folder}"
  c = resolve(tiny)
  documents, tokens = made["documents"], made["tokens"]
  found = (
    f"{documents} documents, {tokens:,} tokens, {c.train.tokens / tokens:.2f} pass"
  )
  assert found in check.text(c)
