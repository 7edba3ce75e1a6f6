"""README and docs: every link leads somewhere, every command exists and is accepted."""

import pathlib
import re
import shlex
from collections.abc import Iterator

import pytest

from diloco import __main__ as listing
from diloco.cli import list_configs
from diloco.config import default_config
from diloco.config.command_line import load_config
from diloco.config.resolve import leaves
from diloco.spec import plugins
from diloco.util import command, shipped

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
FIELDS = leaves(default_config(*plugins.contrib()).to_dict())


def prose(page: pathlib.Path) -> str:
  """The text of a page without fenced code."""
  return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)


def anchors(page: pathlib.Path) -> set[str]:
  """The anchors that GitHub gives to the headings of a page."""
  found: set[str] = set()
  for heading in re.findall(r"^#+ (.*)$", prose(page), re.M):
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
    found.add(slug if slug not in found else f"{slug}-1")
  return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_leads_to_a_file_and_a_heading(page):
  for target, anchor in re.findall(r"\]\((?!\w+:)([^)\s#]*)(#[^)\s]*)?\)", prose(page)):
    file = page.parent / target if target else page
    assert file.exists(), target
    if anchor and file.suffix == ".md":
      assert anchor[1:] in anchors(file), target + anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_config_and_field_exists(page):
  text, commands = page.read_text(), listing.commands()
  modules = {m.removeprefix("diloco.") for m in commands.values()}
  for module in re.findall(r"python -m diloco\.([\w.]*\w)", text):
    assert module in modules, module
  for name in re.findall(r"python -m diloco (\w[\w.]*)", text):
    assert name in commands, name
  for script in re.findall(r"(?:python |sbatch |`|^)(scripts/[\w/]+\.\w+)", text, re.M):
    assert (ROOT / script).is_file(), script
  for field in re.findall(r"--config\.([a-z_.]+[a-z_])\b", text):
    groups = {name.split(".")[0] for name in FIELDS}
    assert field in FIELDS or field in groups, field
  for config in re.findall(r"--config=(\w[\w/]*(?:\.py)?)", text):
    if config != "my_config.py":
      assert pathlib.Path(shipped.find(config)).is_file(), config


def trainings(page: pathlib.Path) -> Iterator[list[str]]:
  """The words of each command in a page's code that trains, without placeholders."""
  for block in re.findall(r"^ *```\w*\n(.*?)^ *```$", page.read_text(), re.M | re.S):
    for line in block.replace("\\\n", " ").splitlines():
      found = re.search(
        r"(?:python -m diloco[. ]main|-n 2 (?:--sites )?--) (--.*)", line
      )
      if found and not re.search(r"\.\.\.|my_|\$|/models|/etc|nohup", found[1]):
        yield shlex.split(found[1], comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_training_has_a_config_that_is_accepted(page, tmp_path):
  plugins = re.findall(
    r"^```python\n# (\w+\.py).*?^```$", page.read_text(), re.M | re.S
  )
  for name in plugins:
    code = page.read_text().partition(f"```python\n# {name}")[2].partition("\n```")[0]
    (tmp_path / name).write_text(f"# {code}\n")
  for words in trainings(page):
    words = [word.replace("=./", f"={tmp_path}/") for word in words]
    name = next(word for word in words if word.startswith("--config="))
    fields = [re.sub(r"=(arrays|files):.*", "=sotu", w) for w in words]
    if fields != words:  # Text that other commands of the page prepare is not there.
      data = "--config.data"
      fields += [f"{data}.train_split=train", f"{data}.eval_split=validation"]
    load_config(name[9:], [w for w in fields if w.startswith("--config.")])


def test_code_names_only_pages_that_exist():
  folders = ("configs", "diloco", "examples", "scripts", "tests")
  files = [file for name in folders for file in ROOT.glob(f"{name}/**/*.py")]
  for file in files:
    for name in re.findall(r"docs/(\w+\.(?:md|csv))", file.read_text()):
      assert (ROOT / "docs" / name).is_file() or name == "none.md", (file, name)


def test_no_page_and_no_help_trains_in_a_folder_that_others_share():
  """In /tmp, the second user of a machine meets the finished run of the first."""
  files = [*PAGES, *ROOT.glob("configs/*.py"), *ROOT.glob("diloco/**/*.py")]
  files = [file for file in files if file.name != "CHANGELOG.md"]
  assert not [file for file in files if "--workdir=/tmp" in file.read_text()]
  assert "/runs/" in (ROOT / ".gitignore").read_text().split()


def test_every_method_has_a_row_with_the_bytes_of_its_sample_run():
  page = (ROOT / "docs/methods.md").read_text()
  found = dict(re.findall(r"^\| `(\w+)` \|.*? ([\d,]+) (?:\|[^|]*){3}\|$", page, re.M))
  named = [*command.load_module("methods", "get_config", "").METHODS]
  counted = list_configs.rows([f"configs/methods.py:{name}" for name in named])
  assert [*found.items()] == [
    (n, f"{row['sent']:,}") for n, row in zip(named, counted, strict=True)
  ]
