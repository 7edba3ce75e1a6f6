"""Hooks of mkdocs.yml: pages from other folders, and Markdown as GitHub reads it.

  pip install '.[docs]' && mkdocs build --strict

The documents are written for GitHub: links lead to any file of the repository, and a
list is indented by the width of its marker. mkdocs knows only links within docs/, and
Python-Markdown wants four spaces. Everything that a link names must exist. A line
`<!-- table: FILE.csv column ... -->` becomes the rows of the file. A number of a table
and its ± stay in one line.
"""

import csv
import html
import logging
import pathlib
import re
import tomllib

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from diloco import __main__ as listing
from diloco.config import describe
from diloco.spec import plugins

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Pages of the site that lie outside of docs/.
PAGES = {
  "index.md": "README.md",
  "changelog.md": "CHANGELOG.md",
  "contributing.md": "CONTRIBUTING.md",
}
# Addresses of the repository and of the site, if they have one.
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
_LOG = logging.getLogger("mkdocs.site_hooks")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
  """Sets the addresses of pyproject.toml."""
  config.site_url, config.repo_url = URLS.get("Documentation"), URLS.get("Repository")
  return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
  """Adds the pages of PAGES, and the references of fields and commands."""
  pages = {page: (ROOT / source).read_text() for page, source in PAGES.items()}
  pages |= {"fields.md": fields_page(), "commands.md": commands_page()}
  for page, text in pages.items():
    files.append(File.generated(config, page, content=text))
  return files


def commands_page() -> str:
  """Formats what `--help` of each command begins with, its examples as code."""
  parts = ["# Commands", "`python -m diloco NAME --help` has the flags of a command."]
  modules = listing.commands()
  for name in listing.NAMES:
    parts.append(f"## {name}")
    for paragraph in listing.document(modules[name]).split("\n\n"):
      is_code = paragraph.lstrip().startswith(("python ", "diloco ", "$ "))
      parts.append(f"```sh\n{paragraph}\n```" if is_code else _cell(paragraph))
  return "\n\n".join(parts) + "\n"


def fields_page() -> str:
  """Formats all fields as a page of the documentation."""
  parts = [
    "# Config fields",
    "Every field with its type, its default and its meaning, made from"
    " `diloco/spec/fields.py`. A flag `--config.NAME=VALUE` sets a field; a config"
    " file sets it by `c.NAME = VALUE`. `python -m diloco.main --config=sample"
    " --print_config` prints the values of a run.",
  ]
  for group in describe.groups(plugins.contrib()):
    if not group.fields:
      continue  # A plug-in that only adds names.
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for f in group.fields:
      default = describe.show(f.default)
      rows += [f"| `{f.name}` | {_cell(f.kind)} | `{default}` | {_cell(f.meaning)} |"]
    parts += [f"## {group.name or 'run'}", _cell(group.meaning), "\n".join(rows)]
  return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
  """Escapes a text for a table in Markdown."""
  return html.escape(text, quote=False).replace("|", "\\|").replace("*", "\\*")


def on_page_markdown(
  markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
  """Rewrites links and lists of a page."""
  del files
  source = PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
  repository = URLS.get("Repository", "").rstrip("/")

  def rewritten(link: re.Match) -> str:
    text, target, anchor = link.groups(default="")
    site = site_link(target, ROOT / source, repository)
    if site is None:
      _LOG.warning("%s links to %s, which does not exist.", source, target)
    elif not site:
      path = (ROOT / source).parent.joinpath(target).resolve().relative_to(ROOT)
      return text if path.name in text else f"{text} (`{path}`)"
    return f"[{text}]({site or target}{anchor})"

  markdown = re.sub(r"<!-- table: (.*?) -->", lambda m: table(m[1], source), markdown)
  text = re.sub(r"\[([^\[\]]*)\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)", rewritten, markdown)
  text = re.sub(
    r"^\|.*", lambda m: m[0].replace(" ± ", "\u00a0±\u00a0"), text, flags=re.M
  )
  return indent_lists(text)


def table(words: str, source: str) -> str:
  """Formats columns of a CSV file as a Markdown table.

  Args:
    words: `FILE column column ...`; the file is relative to the document. `column=TEXT`
      and `column!=TEXT` choose rows instead.
    source: the document, relative to the repository.
  """
  name, *words_left = words.split()
  chosen = [word.partition("=")[::2] for word in words_left if "=" in word]
  columns = [word for word in words_left if "=" not in word]
  with ((ROOT / source).parent / name).open(newline="") as file:
    rows = [
      [row[column] for column in columns]
      for row in csv.DictReader(file)
      if all((row[k.strip("!")] == v) != k.endswith("!") for k, v in chosen)
    ]
  code = columns.index("command") if "command" in columns else -1
  lines = [columns, ["---"] * len(columns)]
  for row in rows:
    cells = [f"`{x}`" if i == code and x else _cell(x) for i, x in enumerate(row)]
    lines.append(cells)
  return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def site_link(target: str, source: pathlib.Path, repository: str) -> str | None:
  """Returns where a relative link of a document leads on the site.

  Args:
    target: path relative to the document.
    source: the document.
    repository: address of the repository, for files that are no page; may be empty.

  Returns:
    None if there is no such file; "" if it is no page and there is no repository.
  """
  file = (source.parent / target).resolve()
  if not file.exists() or not file.is_relative_to(ROOT):
    return None
  path = file.relative_to(ROOT).as_posix()
  for page, origin in PAGES.items():
    if path == origin:
      return page
  if file.is_relative_to(ROOT / "docs") and file.is_file():
    return path.removeprefix("docs/")
  kind = "tree" if file.is_dir() else "blob"
  return repository and f"{repository}/{kind}/main/{path}"


def indent_lists(markdown: str) -> str:
  """Indents the content of lists by four spaces for each level."""
  lines: list[str] = []
  columns: list[int] = []  # Where the content of each open item begins.
  fenced = apart = (
    False  # `apart`: an empty line lies between the last marker and here.
  )
  for line in markdown.splitlines():
    indent = len(line) - len(line.lstrip())
    marker = None if fenced else re.match(r" *(?:[-*]|\d+\.) +(?=\S)", line)
    apart |= not columns or not line.strip()
    while line.strip() and not fenced and columns and indent < columns[-1]:
      columns.pop()
    own = line[min(indent, columns[-1] if columns else 0) :]
    if marker and apart and lines and lines[-1].strip():
      lines.append("")  # Python-Markdown reads the marker as text of a paragraph above.
    lines.append(("    " * len(columns) + own) if own else "")
    if marker:
      columns.append(marker.end())
      apart = False
    fenced ^= own.lstrip().startswith("```")
  return "\n".join(lines) + "\n"
