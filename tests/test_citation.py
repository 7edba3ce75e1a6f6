"""CITATION.cff, notebooks and documents say what pyproject.toml says."""

import json
import pathlib
import re
import tomllib

import diloco

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URLS = PROJECT.get("urls", {})
# Repositories of other programs, all of which were read or fetched.
OTHERS = {
  "Adnan082/diloco-measured",
  "AI-Hypercomputer/maxtext", "PrimeIntellect-ai/OpenDiloco", "PrimeIntellect-ai/prime",
  "PrimeIntellect-ai/prime-diloco", "exo-explore/gym", "facebookresearch/MuLoCo",
  "google-deepmind/nanodo", "google-deepmind/xmanager",
  "meta-pytorch/torchft", "pytorch/torchtitan",
  "Neumann-Labs/ft-diloco", "PrimeIntellect-ai/pccl", "agentenv/yeto",
  "UnbearableFate/fsb_decoupled_diloco", "jdinalt/forgather",
}  # fmt: skip
FOLDERS = (".github", "configs", "diloco", "docs", "examples", "notebooks", "scripts")


def citation() -> list[str]:
  return (ROOT / "CITATION.cff").read_text().splitlines()


def test_citation_has_the_packages_version_licence_and_addresses():
  assert f"title: {PROJECT['name']}" in citation()
  assert f"version: {diloco.__version__}" in citation()
  assert f"license: {PROJECT['license']}" in citation()
  for field, name in (("repository-code", "Repository"), ("url", "Documentation")):
    lines = [line for line in citation() if line.startswith(f"{field}:")]
    assert lines == ([f"{field}: {URLS[name]}"] if name in URLS else [])


def test_the_readme_has_the_citation_as_bibtex_and_the_changes_the_version():
  assert f"## {diloco.__version__}" in (ROOT / "CHANGELOG.md").read_text()
  page = (ROOT / "README.md").read_text()
  entry = re.search(r"```bibtex\n@software\{(.*?)\}\n```", page)
  key, *fields = entry[1].split(", ")
  cited = dict(re.fullmatch(r"(\w+) = \{\{?(.*?)\}?\}", f).groups() for f in fields)
  names = [x.split("name: ")[1] for x in citation() if x.startswith("  - name: ")]
  assert key == cited["title"] == PROJECT["name"]
  assert cited["author"] == " and ".join(names)
  assert f"version: {cited['version']}" in citation()


def test_no_file_names_a_repository_or_a_site_that_is_not_ours_or_known():
  address = re.compile(
    r"(?<!\.)github(?:usercontent)?(?:\.com)?/([\w-]+/[\w.-]*\w)|([\w-]+)\.github\.io"
  )
  files = [p for p in ROOT.iterdir() if p.is_file()]
  files += [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.*")]
  own = " ".join(URLS.values())
  for file in files:
    if file.suffix in {".cff", ".ipynb", ".md", ".py", ".sh", ".toml", ".yml"}:
      for match in address.finditer(file.read_text()):
        found = match[1] or match[2]
        assert found.removesuffix(".git") in OTHERS or found in own, (file.name, found)


def test_every_notebook_clones_the_address_of_the_project():
  books = [json.loads(p.read_text()) for p in ROOT.glob("notebooks/*.ipynb")]
  assert books
  for book in books:
    cells = ["".join(cell["source"]) for cell in book["cells"]]
    named = re.findall(r'^REPOSITORY = "(.*?)"', "\n".join(cells), re.M)
    assert named == [URLS.get("Repository", "")]
