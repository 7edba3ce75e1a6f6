"""Every run of both papers starts on the slices that docs/aot.md names for its size."""

import dataclasses
import pathlib
import re

import cpu_devices
import pytest

from diloco.cli import check, list_configs
from diloco.config import resolve
from diloco.data.prepare.tokenize import tokenize
from diloco.errors import ConfigError
from diloco.spec.shapes import matrix_params
from diloco.util.command import load_module, parse_count

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "aot.md"
# Size: grid of each of two slices of v5e, and train.accumulate.
SLICES = {
  parse_count(size): (grid, int(accumulate))
  for size, grid, accumulate in re.findall(
    r"^\| ([\d.]+[MB]) \| 2 x (\w+) \| (\d+) \|", PAGE.read_text(), re.MULTILINE
  )
}


@pytest.mark.parametrize("path", list_configs.DEFAULT, ids=lambda path: path.stem)
def test_the_slices_of_the_page_hold_every_run_of_the_papers(path):
  module = load_module(str(path), "get_config", "")
  for run in dict.fromkeys(module.RUNS):
    c = resolve(module.get_config(run))
    n = matrix_params(c.model)
    _, (grid, accumulate) = min(SLICES.items(), key=lambda row: abs(row[0] / n - 1))
    if c.algorithm == "data_parallel":
      accumulate = max(accumulate // 2, 1)
    train = dataclasses.replace(c.train, accumulate=accumulate)
    found = check.devices(dataclasses.replace(c, train=train), f"v5e:{grid}", 2)
    assert "attention splash" in found
    assert ("lies on several slices" in found) == (c.replicas == 1)


# Opens runs of the papers as training does, up to where it would make the first array.
OPEN = """
import json, sys
from diloco import session
from diloco.checkpoint import disk
from diloco.cli import check
from diloco.config.command_line import load_config

class Opened(Exception):
  pass

def stop(c, mesh):
  raise Opened

session.first_params, disk.check_room, opened = stop, lambda *args: None, {}
flags = ["--config.data.source=sotu", "--config.data.tokenizer=sotu_2048"]
flags += ["--config.data.train_split=train", "--config.data.eval_split=validation"]
for name in sys.argv[2:]:
  c = load_config(name, flags)
  try:
    with session.open_session(c, sys.argv[1], None, None):
      pass
  except Opened:
    opened[name] = check.devices(c, "v5e:4x8", 2)
print(json.dumps(opened))
"""


@pytest.mark.integration("opens four runs in a process with 64 devices")
def test_training_opens_what_the_check_allows(tmp_path):
  names = "chinchilla:1.3B,M=2", "chinchilla:35M,M=8,algorithm=diloco"
  names += "streaming:500M,algorithm=data_parallel", "streaming:1B,data=dolma,M=4"
  opened = cpu_devices.run(64, "-c", OPEN, str(tmp_path), *names)
  meshes = "replica 2 x fsdp 32", "replica 8 x fsdp 8", "replica 2 x fsdp 32"
  for name, mesh in zip(names, (*meshes, "replica 4 x fsdp 16"), strict=True):
    assert mesh in opened[name]


def test_what_training_refuses_is_refused(tmp_path, capsys):
  given = ["--config=chinchilla:35M,M=2", "--topology=h100:8"]
  assert check.main([*given, "--slices=2", "--config.train.accumulate=8"]) == 2
  found = capsys.readouterr().out
  assert "devices      no: mesh.fsdp is 8, but a replica's microbatch has" in found
  assert "lower train.accumulate" in found
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


def test_topologies_are_those_of_the_dry_run(tiny):
  with pytest.raises(ConfigError, match="--topology=v5e:3x3 does not exist; choose"):
    check.devices(resolve(tiny), "v5e:3x3", 1)
