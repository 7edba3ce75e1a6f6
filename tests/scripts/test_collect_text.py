"""Text from packages: splits, manifest, and what happens if a registry is silent."""

import collections
import hashlib
import itertools
import json
import os
import pathlib
import random
import string

import clean_text
import collect_text
import pytest
from collect_text import Package

from diloco.data import make_source
from diloco.spec.fields import DataConfig


def story(seed: int, paragraphs: int = 4) -> list[str]:
  """Makes paragraphs of common and of made-up words; no other seed makes the same."""
  draw = random.Random(seed)

  def word() -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=6))

  def sentence() -> str:
    return f"the {word()} of the {word()} {word()} it and the {word()} was with them"

  return [f"{'; '.join(sentence() for _ in range(6))}." for _ in range(paragraphs)]


class Registry:
  """Packages in memory: {name: {path: paragraphs}}; counts what it is asked."""

  def __init__(self, packages):
    self.packages, self.asked = packages, []

  def __call__(self, name, folder):
    self.asked.append(name)
    if name not in self.packages:
      raise collect_text.Unreachable("no such package")
    for path, paragraphs in self.packages[name].items():
      file = folder / "files" / path
      file.parent.mkdir(parents=True, exist_ok=True)
      file.write_text("\n\n".join(paragraphs))
    archive = folder / "archive"
    archive.write_bytes(name.encode())
    return archive, "1.0", "License: GPL-2\n"


@pytest.fixture
def registry(monkeypatch):
  shared = story(0)
  registry = Registry(
    {
      "first": {f"doc/{i}.txt": story(i) for i in range(60)} | {"doc/code.py": shared},
      "second": {"doc/a.txt": shared, "doc/b.txt": story(60), "other/c.txt": story(61)},
    }
  )
  monkeypatch.setattr(collect_text, "FETCH", {"debian": registry})
  return registry


FIRST, SECOND = Package("debian", "first"), Package("debian", "second", "/doc/")


def collect(out, packages=(FIRST, SECOND), least=1e9):
  return collect_text.collect(packages, out, least, pause=0)


def rows(out):
  """Returns [(split, row)] of every file."""
  files = sorted(out.glob("text/*/*.jsonl"))
  return [(f.parent.name, json.loads(x)) for f in files for x in f.open()]


def files(out):
  return {
    path.relative_to(out): path.read_bytes()
    for path in out.rglob("*")
    if path.is_file() and "raw" not in path.parts
  }


def test_each_new_document_is_in_its_split_and_in_the_manifest(registry, tmp_path):
  total = collect(tmp_path)
  found = rows(tmp_path)
  texts = [row["text"] for _, row in found]
  expected = ["\n\n".join(story(i)) for i in range(61)]
  # The page that two packages have is kept once; other/ was not asked for.
  assert sorted(texts) == sorted(expected)
  assert sum(len(t) for t in texts) == total
  assert all(split == collect_text.split_of(row["text"]) for split, row in found)
  (second,) = (row for _, row in found if row["package"] == "debian-second")
  assert second["path"] == "doc/b.txt"
  manifest = json.loads((tmp_path / "manifest.json").read_text())
  first, second = manifest["packages"]
  digest = hashlib.sha256(b"first").hexdigest()
  wanted = {"package": "first", "version": "1.0", "licences": ["GPL-2"]}
  assert first.items() >= (wanted | {"archive_sha256": digest}).items()
  only = "\n\n".join(story(60))
  assert second["sha256"] == hashlib.sha256(only.encode()).hexdigest()
  counted = collections.Counter(split for split, _ in found)
  for split, sizes in manifest["splits"].items():
    assert sizes["documents"] == counted[split]
  assert sum(sizes["bytes"] for sizes in manifest["splits"].values()) == total
  config = DataConfig(source=f"files:{tmp_path}/text")
  assert sum(len(make_source(config, s)) for s in ("train", "eval")) == 61


def test_the_same_command_goes_on_without_fetching_again(registry, tmp_path):
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  collect(whole)
  collect(parts, (FIRST,))
  registry.asked.clear()
  collect(parts)
  assert registry.asked == ["second"]
  assert files(parts) == files(whole)
  # A smaller target takes files away again.
  collect(parts, least=10)
  assert {row["package"] for _, row in rows(parts)} == {"debian-first"}


def test_another_part_or_another_rule_is_fetched_again(registry, tmp_path, monkeypatch):
  parts = lambda: {row["path"] for _, row in rows(tmp_path)}
  collect(tmp_path, (SECOND,))
  assert parts() == {"doc/a.txt", "doc/b.txt"}
  collect(tmp_path, (Package("debian", "second", "/other/"),))
  assert parts() == {"other/c.txt"}
  collect(tmp_path, (SECOND,))
  assert registry.asked == ["second", "second"]
  rules = tmp_path / "rules.py"
  rules.write_bytes(pathlib.Path(clean_text.__file__).read_bytes() + b"\n")
  monkeypatch.setattr(clean_text, "__file__", str(rules))
  collect(tmp_path, (SECOND,))
  assert registry.asked == ["second"] * 3


def test_another_order_leaves_no_text_of_the_one_before(registry, tmp_path):
  """The page that both packages have moves from one to the other."""
  before, after = tmp_path / "before", tmp_path / "after"
  collect(before)
  collect(before, (SECOND, FIRST))
  collect(after, (SECOND, FIRST))
  assert files(before) == files(after)


def test_a_silent_registry_is_asked_three_times(registry, tmp_path, capsys):
  packages = [Package("debian", f"none{i}") for i in range(9)]
  packages.insert(2, FIRST)  # After an answer, it is asked three times again.
  assert collect(tmp_path, packages) > 0
  assert registry.asked == ["none0", "none1", "first", "none2", "none3", "none4"]
  said = "debian-none0 cannot be fetched (no such package); left out."
  assert said in capsys.readouterr().out
  assert {row["package"] for _, row in rows(tmp_path)} == {"debian-first"}


def test_shares_of_the_splits():
  drawn = [collect_text.split_of(f"document {i}") for i in range(5000)]
  share = {split: drawn.count(split) / len(drawn) for split in collect_text.SPLITS}
  # The standard deviation of a share of 3% is 0.24%.
  assert share["validation"] == pytest.approx(0.03, abs=0.005)
  assert share["test"] == pytest.approx(0.03, abs=0.005)
  assert share["train"] == pytest.approx(0.94, abs=0.014)


def test_long_files_are_cut_between_paragraphs():
  paragraphs = list(itertools.chain.from_iterable(story(i) for i in range(60)))
  parts = [*clean_text.documents("\n".join(paragraphs), clean_text.Seen())]
  assert len(parts) > 1
  assert max(map(len, parts)) < 52_000
  assert "\n\n".join(parts).split("\n\n") == paragraphs


@pytest.mark.parametrize(
  ("notice", "names"),
  [
    ("Files: *\nLicense: GPL-2+\n text\n\nFiles: a\nLicense: MIT\n", ["GPL-2+", "MIT"]),
    ("It is under /usr/share/common-licenses/GFDL-1.3.\n", ["GFDL-1.3"]),
    ("Name: a\nLicense-Expression: MIT\n\n# Words\nLicense: none\n", ["MIT"]),
    ("Classifier: License :: Public Domain\n", ["Public Domain"]),
    ("License: You may copy and change this.\n", ["see the notice"]),
  ],
)
def test_licences_of_a_notice(notice, names):
  assert collect_text.licences(notice) == names


def test_a_client_that_fails_or_is_missing_says_why(tmp_path, monkeypatch):
  client = tmp_path / "apt-get"
  client.write_text("#!/bin/sh\necho 'E: Unable to locate package x' >&2\nexit 100\n")
  client.chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
  with pytest.raises(collect_text.Unreachable, match="Unable to locate package x"):
    collect_text.fetch_debian("x", tmp_path)
  monkeypatch.setenv("PATH", str(tmp_path / "empty"))
  with pytest.raises(collect_text.Unreachable, match="apt-get is not installed here"):
    collect_text.fetch_debian("x", tmp_path)


def test_lists_name_the_line_that_is_wrong(tmp_path):
  path = tmp_path / "list.txt"
  path.write_text("# Words\n\ndebian a /doc/  # Words\npypi b\n")
  wanted = [Package("debian", "a", "/doc/"), Package("pypi", "b")]
  assert collect_text.read_list(path) == wanted
  path.write_text("debian a\nnpm b\n")
  with pytest.raises(collect_text.ConfigError, match="line 2, is 'npm b'; write deb"):
    collect_text.read_list(path)
  path.write_text("debian a /doc/\npypi a\ndebian a /other/\n")
  said = "line 3, is 'debian a /other/', but a line before"
  with pytest.raises(collect_text.ConfigError, match=said):
    collect_text.read_list(path)


def test_the_list_that_ships_is_read():
  packages = collect_text.read_list(collect_text.LIST)
  assert len({package.label for package in packages}) == len(packages) > 60
