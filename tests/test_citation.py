"""CITATION.cff, mkdocs.yml and the documents say what pyproject.toml says."""

import pathlib
import re
import tomllib

import diloco

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URLS = PROJECT["urls"]


def test_citation_has_the_packages_version_licence_and_addresses():
  lines = (ROOT / "CITATION.cff").read_text().splitlines()
  assert f"title: {PROJECT['name']}" in lines
  assert f"version: {diloco.__version__}" in lines
  assert f"license: {PROJECT['license']}" in lines
  assert f"repository-code: {URLS['Repository']}" in lines
  assert f"url: {URLS['Documentation']}" in lines


def test_the_changes_and_the_site_have_them_too():
  assert f"## {diloco.__version__}" in (ROOT / "CHANGELOG.md").read_text()
  lines = (ROOT / "mkdocs.yml").read_text().splitlines()
  assert f"repo_url: {URLS['Repository']}" in lines
  assert f"site_url: {URLS['Documentation']}" in lines


def test_every_file_names_the_same_repository():
  owner_and_name = URLS["Repository"].removeprefix("https://github.com/")
  owner, name = owner_and_name.split("/")
  assert URLS["Documentation"] == f"https://{owner}.github.io/{name}"
  assert all(
    url.startswith(("https://github.com/" + owner_and_name, URLS["Documentation"]))
    for url in URLS.values()
  )
  found = set()
  for pattern in ("*.*", "docs/*.md", "notebooks/*.ipynb", "scripts/*", ".github/*/*"):
    for file in ROOT.glob(pattern):
      if file.is_file():
        text = file.read_text(errors="ignore")
        # Also addresses of Colab and of raw files.
        found |= set(re.findall(rf"github\w*(?:\.com)?/([\w.-]+/{name})\b", text))
  assert found == {owner_and_name}
