"""The site of documents: links and lists of GitHub become those of mkdocs."""

import re
import sys
import types

import pytest
from running import ROOT, read_csv

pytest.importorskip("mkdocs")
pytest.importorskip("markdown")

import markdown

from diloco import __main__ as listing
from diloco.config import describe
from diloco.spec import plugins

sys.path.insert(0, str(ROOT / "docs"))
import site_hooks

REPOSITORY = "https://example.org/r"
FILES = f"{REPOSITORY}/blob/main"


def html(text: str) -> str:
  extensions = ["tables", "pymdownx.superfences"]
  rendered = markdown.markdown(site_hooks.indent_lists(text), extensions=extensions)
  return re.sub(r"\s*(</?\w+>)\s*", r"\1", re.sub(r"</?p>", "", rendered))


@pytest.mark.parametrize(
  ("target", "source", "link"),
  [
    ("docs/data.md", "README.md", "data.md"),
    ("docs/figures/wan.png", "README.md", "figures/wan.png"),
    ("../README.md", "docs/sites.md", "index.md"),
    ("CONTRIBUTING.md", "README.md", "contributing.md"),
    ("../configs/ladder.py", "docs/sweep.md", f"{FILES}/configs/ladder.py"),
    ("notebooks", "README.md", f"{REPOSITORY}/tree/main/notebooks"),
    ("../../etc/passwd", "docs/sites.md", None),
  ],
)
def test_links_lead_to_pages_or_to_the_repository(target, source, link):
  assert site_hooks.site_link(target, ROOT / source, REPOSITORY) == link


@pytest.mark.parametrize(
  ("link", "text"),
  [
    ("[a page](data.md#own)", "[a page](data.md#own)"),
    ("[`outer.py`](../diloco/algorithm/outer.py)", "`outer.py`"),
    ("[this](../configs/wan.py)", "this (`configs/wan.py`)"),
    ("![1](figures/wan.png)", "![1](figures/wan.png)"),
  ],
)
def test_without_a_public_repository_code_is_not_linked(link, text, monkeypatch):
  monkeypatch.setattr(site_hooks, "URLS", {})
  page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="sites.md"))
  assert site_hooks.on_page_markdown(link, page, None, None) == text + "\n"


def test_nested_lists_keep_their_nesting_their_code_and_their_tables():
  text = "Text:\n- one\n  more\n  - inner\n\n    rest\n- two\n\nEnd"
  found = re.sub(r"\s+", " ", html(text))
  inner = "<ul><li>inner rest</li></ul>"
  assert found == f"Text:<ul><li>one more{inner}</li><li>two</li></ul>End"
  code = "   ```\n   a\n\n     b\n   ```\n"
  found = html(f"1. one\n\n{code}2. two\n\n   | x |\n   |---|\n   | 1 |\n3. three\n")
  assert found.count("<li>") == 3
  assert "a\n\n  b</code>" in found
  assert "<td>1</td></tr></tbody></table></li><li>three</li>" in found


def test_the_page_has_a_row_per_field_and_no_raw_html():
  page = site_hooks.fields_page()
  rows = [line for line in page.splitlines() if line.startswith("| `")]
  groups = [g for g in describe.groups(plugins.contrib()) if g.fields]
  assert len(rows) == sum(len(group.fields) for group in groups)
  assert all(row.replace("\\|", "").count("|") == 5 for row in rows)
  assert "<name>" not in page
  assert page.count("\n## ") == len(groups)


def test_every_command_has_a_section_with_its_examples_as_code():
  page = site_hooks.commands_page()
  names = re.findall(r"^## (\w+)$", page, re.M)
  assert names == listing.NAMES
  started_by_programs = {"main", "job", "worker"}
  assert {*listing.commands()} - {*names} == started_by_programs
  assert "```sh\npython -m diloco.main --config=sample --workdir=runs/sample\n" in page


def test_a_table_of_a_file_has_its_rows_and_code_in_commands():
  text = "<!-- table: claims.csv verdict claim command -->"
  page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="claims.md"))
  head, _, *rows = site_hooks.on_page_markdown(text, page, None, None).splitlines()
  assert head == "| verdict | claim | command |"
  claims = read_csv(ROOT / "docs" / "claims.csv")
  assert len(rows) == len(claims)
  assert rows[0].startswith("| contradicted | ")
  assert f"`{claims[0]['command']}`" in rows[0]
  undecided = "<!-- table: claims.csv claim verdict=undecided choice= -->"
  chosen = site_hooks.on_page_markdown(undecided, page, None, None).splitlines()
  count = [row["verdict"] for row in claims].count("undecided")
  assert len(chosen) == count + 2
