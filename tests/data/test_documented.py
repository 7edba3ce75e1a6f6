"""The page's commands for C4 and Dolma, as written, on stand-ins of both data sets."""

import re
import shlex

import pytest
from running import ROOT

from diloco import session
from diloco.checkpoint import disk
from diloco.cli import train_tokenizer
from diloco.config.command_line import load_config
from diloco.data.prepare import prepare_data
from diloco.util.command import load_module


def commands(data):
  """Returns {command: [its arguments, ...]} of the page, with `data` for /data."""
  page = (ROOT / "docs" / "data.md").read_text()
  section = page.partition("## C4 and Dolma")[2].partition("\n## ")[0]
  lines = section.replace("\\\n", "").replace("/data", str(data)).splitlines()
  found = dict[str, list[list[str]]]()
  for line in lines:
    words = shlex.split(line) if re.match(r" +python -m diloco.*--", line) else []
    if words and "..." not in words:
      start = 4 if words[2] == "diloco" else 3
      found.setdefault(words[start - 1], []).append(words[start:])
  return found


class Opened(Exception):
  """The session got as far as its first array."""


@pytest.mark.integration("prepares two data sets, and opens three large runs")
def test_the_papers_runs_open_as_the_page_says(tmp_path, monkeypatch, in_line):
  monkeypatch.chdir(tmp_path)
  script = f"{ROOT}/scripts/benchmarks/make_standin.py"
  make_standin = load_module(script, "write", "")
  for name in ("c4/en:3.1.0", "dolma:1.0.0"):
    make_standin.write(name, tmp_path)
  found = commands(tmp_path)
  [words] = found["train_tokenizer"]
  assert train_tokenizer.main([*words, "--vocab_size=600", "--max_mb=1"]) == 0
  # The command after these two reads the files that the page downloads.
  prepared, downloaded = found["prepare_data"][:2], found["prepare_data"][2:]
  assert [words[0].split(":")[0] for words in prepared] == ["--source=tfds"] * 2
  assert len(downloaded) == 1
  for words in prepared:
    assert prepare_data.main(words) == 0

  def stop(c, mesh):
    raise Opened

  monkeypatch.setattr(session, "first_params", stop)
  monkeypatch.setattr(disk, "check_room", lambda *args: None)
  assert len(found["diloco.main"]) == 3
  for flag, workdir, *fields in found["diloco.main"]:
    c = load_config(flag.removeprefix("--config="), fields)
    folder = workdir.removeprefix("--workdir=")
    with pytest.raises(Opened), session.open_session(c, folder, None, None):
      pass
