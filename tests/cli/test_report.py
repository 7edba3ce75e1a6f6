"""The page about runs: what it says, and folders of sweeps and sites."""

import base64
import json
import re

import pytest
from conftest import tiny_config

from diloco.cli import report
from diloco.config import resolve
from diloco.contrib.sites.calendar import config_of
from diloco.errors import ConfigError


def make_run(folder, c, loss=5.0):
  folder.mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps(c.to_dict()))
  step = {"kind": "step", "step": 1, "tokens": c.tokens_per_step, "loss": loss + 1}
  step |= {"tokens_per_s": 7.0, "time": 1.0, "bytes_sent": 123_456, "peak_bytes": 9}
  held_out = {"kind": "eval", "step": 1, "loss_outer": loss}
  lines = "".join(json.dumps(r) + "\n" for r in (step, held_out))
  (folder / "metrics.jsonl").write_text(lines)
  (folder / "summary.json").write_text(json.dumps({"syncs": 31, "note": "a < b"}))
  return folder


def test_a_page_has_numbers_fields_and_pictures(tmp_path, capsys):
  c = tiny_config()
  c.sync_every = 6
  folder = make_run(tmp_path / "a&b", resolve(c))
  (folder / "loss.png").write_bytes(b"picture")
  assert report.main([str(folder), "--config=sample"]) == 0
  assert f"{folder}/report.html" in capsys.readouterr().out
  page = (folder / "report.html").read_text()
  for text in ("<h1>a&amp;b</h1>", "5.0000", "123,456", "a &lt; b", "Gbit/s"):
    assert text in page
  assert re.search(r"\nsyncs +31\n|>syncs +31\n", page)
  assert re.search(r"\nsync_every +10 -&gt; 6\n", page)
  pictures = re.findall('base64,([^"]+)', page)
  assert base64.b64decode(pictures[0]).startswith(b"\x89PNG")
  assert base64.b64decode(pictures[1]) == b"picture"


def test_sites_are_one_run_and_a_sweep_has_its_best_runs(tmp_path, monkeypatch):
  c = tiny_config()
  c.overlap.transport = "sites"
  for k in (0, 1):
    make_run(tmp_path / f"sites/site-{k}", config_of(resolve(c), k))
  assert report.folders_of(tmp_path / "sites") == [tmp_path / "sites"]
  for k in range(3):
    make_run(tmp_path / f"sweep/runs/run{k}", resolve(tiny_config()), loss=5.0 - k)
  monkeypatch.setattr(report, "MOST", 2)
  page = report.page(report.folders_of(tmp_path / "sweep"), "")
  assert re.findall("<h2>(.*?)</h2>", page) == ["run2", "run1"]
  assert "the 2 runs with the least held-out loss" in page


def test_the_folder_of_a_group_has_no_run(tmp_path):
  (tmp_path / "rounds.jsonl").write_text("")
  with pytest.raises(ConfigError, match="of sites, not of their group"):
    report.folders_of(tmp_path)


@pytest.mark.parametrize(
  ("args", "message"),
  [
    ([], "where no run has written metrics.jsonl"),
    (["--config=nothing"], "nothing"),
    (["--out={0}"], "a folder; give a file such as report.html"),
  ],
)
def test_mistakes_are_one_sentence(tmp_path, capsys, args, message):
  folder = tmp_path / "run"
  if args:
    make_run(folder, resolve(tiny_config()))
  folder.mkdir(exist_ok=True)
  assert report.main([str(folder), *[arg.format(folder) for arg in args]]) == 2
  error = capsys.readouterr().err
  assert message in error
  assert error.count("\n") == 1
