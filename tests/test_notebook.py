"""Every notebook runs with today's code, and its stored outputs are complete.

Default tests run the cells with smaller numbers, in seconds. Slow tests run the whole
notebooks in a kernel, as notebooks/run_notebooks.py does.
"""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import venv
import zipfile

import jax
import pytest
import running
from dry_run_needs import needs_libtpu

from diloco.config.command_line import load_config
from diloco.simulate.steady import steady_utilisation

ROOT = pathlib.Path(__file__).parents[1]
BOOKS = {p.stem: json.loads(p.read_text()) for p in ROOT.glob("notebooks/*.ipynb")}
NAMES = sorted(BOOKS)
PICTURES = {"anatomy": 6, "own_loop": 2, "quickstart": 4}
PICTURES |= {"scaling_laws": 4, "simulators": 4, "two_places": 1}
PIP = [sys.executable, "-m", "pip", "install", "--quiet"]
MACHINE = ("/tmp/", "/root/", "/home/", "/content/", "Traceback", "Warning")


def code(name: str) -> list[str]:
  """The code cells of a notebook."""
  cells = BOOKS[name]["cells"]
  return ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]


def outputs(name: str) -> list[dict]:
  return [o for c in BOOKS[name]["cells"] for o in c.get("outputs", [])]


def test_there_is_a_notebook_for_each_subject():
  assert sorted(PICTURES) == NAMES
  assert len({code(name)[0] for name in NAMES}) == 1  # All begin with one cell.


@pytest.mark.parametrize("name", NAMES)
def test_the_outputs_are_complete_and_name_no_machine(name):
  book, found = BOOKS[name], outputs(name)
  assert book["nbformat"] == 4
  assert len({c["id"] for c in book["cells"]}) == len(book["cells"])
  assert not [o for o in found if o["output_type"] == "error"]
  assert not [o for o in found if o.get("name") == "stderr"]
  counts = [c["execution_count"] for c in book["cells"] if c["cell_type"] == "code"]
  assert counts == [*range(1, len(counts) + 1)]
  pictures = [o["data"]["image/png"] for o in found if "image/png" in o.get("data", {})]
  assert len(pictures) == PICTURES[name]
  text = json.dumps([o for o in found if "image/png" not in o.get("data", {})])
  assert not [word for word in MACHINE if word in text]


@pytest.fixture
def keeps_path(monkeypatch):
  monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("folder", [".", "docs/figures"])
def test_in_a_clone_the_first_cell_only_finds_the_root(folder, monkeypatch, keeps_path):
  monkeypatch.chdir(ROOT / folder)
  monkeypatch.setattr(subprocess, "run", None)
  exec(code("quickstart")[0], {})
  assert pathlib.Path.cwd() == ROOT
  assert sys.path[0] == str(ROOT)


@pytest.mark.parametrize(
  ("device", "extra"),
  [("accel0", "[tpu]"), ("vfio/0", "[tpu]"), ("nvidia0", "[gpu]"), ("null", "")],
)
@pytest.mark.parametrize("place", ["", "drive/MyDrive", "drive/MyDrive/wheels", "git"])
def test_elsewhere_the_first_cell_installs(
  place, device, extra, monkeypatch, keeps_path, tmp_path
):
  """Runs against a folder of devices, with `pip` replaced."""
  (tmp_path / "dev" / device).parent.mkdir(parents=True)
  (tmp_path / "dev" / device).touch()
  here = tmp_path / "content"
  (here / place).mkdir(parents=True)
  monkeypatch.chdir(here)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  cell = code("quickstart")[0].replace('"/dev"', repr(str(tmp_path / "dev")))
  address, source = "https://example.org/r", "git+https://example.org/r"
  if place != "git":
    address, name = "", "diloco-0.1.0-py3-none-any.whl"
    (here / place / name).touch()
    source = (here / place / name).as_uri()
  cell = re.sub('REPOSITORY = ".*?"', f'REPOSITORY = "{address}"', cell)
  commands = []
  monkeypatch.setattr(subprocess, "run", lambda words, check: commands.append(words))
  exec(cell, {})
  assert commands == [[*PIP, f"diloco{extra} @ {source}"]]
  assert pathlib.Path.cwd() == here
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: "installed")
  exec(cell, {})  # A second run installs nothing.
  assert len(commands) == 1


def test_without_a_wheel_the_first_cell_says_what_to_do(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(subprocess, "run", None)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(SystemExit, match="Upload a wheel of diloco beside this noteb"):
    exec(re.sub('REPOSITORY = ".*?"', 'REPOSITORY = ""', code("quickstart")[0]), {})


@pytest.mark.integration("makes an environment and installs a wheel there")
def test_the_first_cell_installs_a_real_wheel(tmp_path):
  """Without the dependencies, which would be downloaded."""
  wheel = tmp_path / "diloco-0.1.0-py3-none-any.whl"
  with zipfile.ZipFile(wheel, "w") as file:
    file.writestr("diloco/__init__.py", "")
    file.writestr(
      "diloco-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any"
    )
    about = "Metadata-Version: 2.1\nName: diloco\nVersion: 0.1.0\n"
    file.writestr("diloco-0.1.0.dist-info/METADATA", about)
    file.writestr("diloco-0.1.0.dist-info/RECORD", "")
  venv.create(tmp_path / "env", with_pip=True)
  (tmp_path / "cell.py").write_text(code(NAMES[0])[0] + "\nimport diloco\n")
  env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
  env |= {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}
  command = [tmp_path / "env" / "bin" / "python", "cell.py"]
  subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=300)


def run(name: str, cells: slice = slice(None), **smaller: str) -> dict:
  """Runs cells without a kernel; returns their variables.

  Args:
    name: name of the notebook.
    cells: which code cells.
    smaller: {old text: new text} of the cells; each must occur.
  """
  names: dict = {}
  text = "\n".join(code(name)[cells])
  for old, new in smaller.items():
    assert old in text, old
    text = text.replace(old, new)
  # Without IPython, which the tests do not need.
  exec(re.sub(r"(?m)^%.*$|^.*IPython.*$|^display\..*$", "", text), names)
  return names


@pytest.fixture
def folder(monkeypatch, tmp_path, keeps_path):
  monkeypatch.setenv("MPLBACKEND", "agg")  # Draws the plots and shows none.
  monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
  monkeypatch.chdir(tmp_path)  # Outside a clone, as on Colab.
  yield
  from matplotlib import pyplot

  pyplot.close("all")
  pyplot.rcdefaults()


def test_the_laws_are_fitted_and_a_run_is_planned(folder, capsys):
  names = run("scaling_laws")
  assert names["own"].batch_sequences == 256
  assert {*names["laws"]} >= {"data_parallel", "diloco_M2", "diloco_joint"}
  assert "data_parallel  " in capsys.readouterr().out


def test_the_simulators_answer_for_a_small_model(folder, capsys):
  names = run("simulators", **{"LAYERS = 32": "LAYERS = 4", "* 300, 40)": "* 300, 3)"})
  reached = [steady_utilisation(work, [1e9])[0] for work in names["works"].values()]
  assert reached == sorted(reached)  # Data-parallel first, overlapped 4 bits last.
  assert "Gbit/s for 95%" in capsys.readouterr().out


def test_two_places_take_a_number_each_and_a_third_ends(folder, tmp_path, monkeypatch):
  monkeypatch.setenv("GROUP", str(tmp_path / "group"))
  assert [run("two_places", slice(2))["SITE"] for _ in range(2)] == [0, 1]
  with pytest.raises(SystemExit, match="Two places are there already"):
    run("two_places", slice(2))
  c = run("two_places", slice(3), **{"SITE = None": "SITE = 1"})["c"]
  assert (c.replicas, c.overlap.transport) == (2, "sites")


def test_the_anatomy_begins_with_the_fragments(folder):
  fields = '"model.num_layers=2", "model.dim=16", '
  names = run("anatomy", slice(3), **{"overrides = [": f"overrides = [{fields}"})
  assert names["names"] == ["layer 0", "layer 1", "embedding"]
  assert len(names["counts"]) == len(names["kilobytes"]) == 3


def test_the_own_loop_has_fragments_by_path(folder):
  # The cells up to the method; the loop itself is in the next cell.
  names = run("own_loop", slice(5))
  fragments = names["method"].fragments
  assert fragments[0] == ("layer_0/b", "layer_0/w")
  assert fragments[-1] == ("decode/b", "decode/w", "encode/b", "encode/w")


def test_the_config_of_the_quickstart_has_a_schedule(folder, capsys):
  assert run("quickstart", slice(3))["schedule"].num_fragments == 5
  assert "fragments.size: 3 -> 1" in capsys.readouterr().out


@pytest.mark.slow("compiles for TPUs")
@needs_libtpu
def test_the_cell_for_tpus_fits_a_chip(folder):
  names = {"jax": jax, "load_config": load_config}
  exec(code("quickstart")[-1], names)
  flags = [f"--config={names['name']}", *(f"--config.{x}" for x in names["fields"])]
  flags += ["--topology=v5e:1x1", "--quick"]
  done = running.python("-m", "diloco", "aot", *flags)
  assert done.stdout.splitlines()[-1].endswith("of 15.75 GiB, fits")


@pytest.mark.slow("whole notebooks")
@pytest.mark.parametrize("name", NAMES)
def test_a_whole_notebook_runs(name, tmp_path):
  cells = (re.sub(r"(?m)^%.*$", "", cell) for cell in code(name))
  stub = "class display:\n  clear_output = staticmethod(lambda: None)\n"
  text = "\n".join(cells).replace("from IPython import display\n", stub)
  (tmp_path / "cells.py").write_text(text)
  env = {"MPLBACKEND": "agg", "TMPDIR": str(tmp_path), "GROUP": str(tmp_path / "group")}
  env |= {k: v for k, v in os.environ.items() if k not in env}
  places = [
    running.start(tmp_path / "cells.py", cwd=ROOT / "notebooks", env=env, stdout=-1)
    for _ in range(2 if name == "two_places" else 1)
  ]
  said = [place.communicate(timeout=900)[0] for place in places]
  assert [place.returncode for place in places] == [0] * len(places)
  assert len({*re.findall("CRC-32 .*", "".join(said))}) == (name == "two_places")
  assert ("equal bit for bit: True" in said[0]) == (name == "own_loop")
