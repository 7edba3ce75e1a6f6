"""The citation file says of the package what pyproject.toml says."""

import pathlib
import tomllib

ROOT = pathlib.Path(__file__).parents[1]


def test_citation_has_the_packages_version_and_licence():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  lines = (ROOT / "CITATION.cff").read_text().splitlines()
  assert f"title: {project['name']}" in lines
  assert f"version: {project['version']}" in lines
  assert f"license: {project['license']}" in lines
