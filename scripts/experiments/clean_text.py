"""Makes documents from the English prose in documentation files. No JAX.

The few rules count characters and words, so a reader can check them by eye. The rules
drop some prose, so that hardly any code, table or other language is kept.

This file decides which text a package gives. So collect_text.py keeps prose in a folder
whose name is the hash of this file.
"""

import gzip
import html
import pathlib
import re
import string
import zlib
from collections.abc import Iterator

import numpy as np

# Kinds of files, by the end of the name without .gz; other files are left out.
MARKUP = (".html", ".htm", ".xhtml", ".xml", ".docbook", ".page", ".xhp")
PLAIN = (".txt", ".md", ".rst", ".pod", ".info", ".text")
_INFO_PART = re.compile(r"\.info-\d+$")  # A large Info manual has numbered parts.

# Longer texts are cut between paragraphs, so that no book fills a held-out split.
_LONGEST, _SHORTEST = 50_000, 200  # Characters of a document.

# Elements whose text is no prose: code, programs' output, and the frame of a page.
_DROPPED = re.compile(
  r"<!--.*?-->|<(head|script|style|pre|nav|svg|math|screen|programlisting|synopsis"
  r"|literallayout|blockcode|footer)\b[^>]*>.*?</\1\s*>",
  re.DOTALL | re.IGNORECASE,
)
# Elements inside a paragraph; every other tag ends a paragraph.
_INLINE = re.compile(
  r"</?(a|abbr|acronym|app|application|b|bdo|big|br|cite|citetitle|code|command|dfn|em"
  r"|emph|emphasis|file|filename|firstterm|font|function|gui|guibutton|guilabel"
  r"|guimenu|guimenuitem|guiseq|i|ins|kbd|key|keyseq|link|literal|mark|option|q|quote"
  r"|replaceable|samp|small|span|strong|sub|sup|systemitem|tt|u|ulink|var|varname|wbr"
  r"|xref)\b[^>]*>",
  re.IGNORECASE,
)
_TAG = re.compile(r"<[^>]*>")
# Markup inside plain text; group 1 has the words that are kept.
_ROLES = (
  re.compile(r":[\w:-]+:`~?([^`<]*?)\s*(?:<[^>]*>)?`"),  # :ref:`words <target>`
  re.compile(r"`([^`<]+?)\s*<[^>]*>`_{0,2}"),  # `words <address>`_
  re.compile(r"\b[A-Z]<+\s?([^<>]*?)\s?>+"),  # Perl's C<words>
  re.compile(r"\[([^\]]*)\]\([^)]*\)"),  # [words](address)
  re.compile(r"\*{1,2}([^*\s][^*]*)\*{1,2}"),
  re.compile(r"`+([^`]*)`+_{0,2}"),
)

# The commonest words of English; texts in other languages have few of them.
_COMMON_WORDS = """
  the of and to a in that is was it for on with as be by at this which or from are
  not have an had but were they you his he her she their if will one all when
  there can we has been would who may its more no so what them these any than some
  into only other also such could then our your my do does use used
"""
_COMMON = frozenset(_COMMON_WORDS.split())
LEAST_WORDS, LEAST_CHARACTERS = 10, 60
_LETTERS = string.ascii_letters
# Tables for str.translate: _TO_WORDS keeps only words, _TO_CODE only the signs of code.
# Letters beyond ASCII count as letters.
_QUOTES = "\u2018\u2019\u201c\u201d\u2013\u2014"  # Curly quotes and dashes.
_TO_WORDS = {c: " " for c in range(128) if chr(c) not in _LETTERS}
_TO_WORDS |= {ord(c): " " for c in _QUOTES}
_NOT_CODE = _LETTERS + string.whitespace + ".,;:?!'\"()-" + _QUOTES
_TO_CODE = dict.fromkeys(map(ord, _NOT_CODE))
_SPACE = re.compile(r"\s+")


def is_text(name: str) -> bool:
  """Tells whether a file is documentation, by its name."""
  name = name.lower().removesuffix(".gz")
  return name.endswith(MARKUP + PLAIN) or bool(_INFO_PART.search(name))


def read_paragraphs(path: pathlib.Path) -> list[str]:
  """Returns all paragraphs of a file, each on one line; `is_prose` chooses later.

  A file that is not UTF-8 is read as Latin-1.

  Raises:
    OSError: the file cannot be read.
  """
  raw = path.read_bytes()
  if path.suffix == ".gz":
    try:
      raw = gzip.decompress(raw)
    except (EOFError, zlib.error) as error:
      raise OSError(f"{path} is not a whole gzip file: {error}") from error
  try:
    text = raw.decode("utf-8")
  except UnicodeDecodeError:
    text = raw.decode("latin-1")
  if path.name.lower().removesuffix(".gz").endswith(MARKUP):
    blocks = _TAG.split(_INLINE.sub("", _DROPPED.sub("<p>", text)))
    blocks = [html.unescape(block) for block in blocks]
  else:
    for role in _ROLES:
      text = role.sub(r"\1", text)
    # An indented block of plain text is code, a table or a list of options.
    blocks = [b for b in re.split(r"\n\s*?\n", text) if not b.startswith("    ")]
  lines = (_SPACE.sub(" ", block).strip() for block in blocks)
  return [line for line in lines if line]


def is_prose(paragraph: str) -> bool:
  """Tells whether a paragraph is English prose.

  Prose has at least 10 words and 60 characters. It begins with a letter, a quote or a
  bracket, and ends like a sentence. At least a quarter of its words, and at least three
  different words, are among the commonest words of English. Words make up at least 75%
  of its characters. At most 3% of its characters are digits, braces and other signs of
  code.
  """
  if len(paragraph) < LEAST_CHARACTERS:
    return False
  if not (paragraph[0].isalpha() or paragraph[0] in "\"'(\u2018\u201c"):
    return False
  if paragraph.rstrip("\"')\u2019\u201d")[-1:] not in {".", "!", "?", ":"}:
    return False
  words = split_words(paragraph)
  common = [word for word in words if word in _COMMON]
  return (
    len(words) >= LEAST_WORDS
    and len(common) * 4 >= len(words)
    and len(set(common)) >= 3
    and sum(map(len, words)) >= 0.75 * len(paragraph)
    and len(paragraph.translate(_TO_CODE)) <= 0.03 * len(paragraph)
  )


def split_words(paragraph: str) -> list[str]:
  """Returns the words in lower case, without digits and punctuation."""
  return paragraph.translate(_TO_WORDS).lower().split()


class _WordIds(dict[str, int]):
  """Gives each word a number, which is the same in every process."""

  def __missing__(self, word: str) -> int:
    self[word] = zlib.crc32(word.encode())
    return self[word]


class Seen:
  """Remembers paragraphs, and finds repeated and nearly repeated paragraphs.

  A paragraph is a repeat if at least half of its sampled runs of 5 words were seen
  before. Case, digits and punctuation do not count. Hashes choose the sample: one run
  in 4, and always the run with the smallest hash (after Broder 1997, "On the
  resemblance and containment of documents"). So two versions of one page are repeats,
  and so are notices in which only the name differs.
  """

  # Weights of the hash: any odd numbers, one for each word of a run.
  _WEIGHTS = np.array(
    [
      0x5187F5E7ECE1412F,
      0x22885EFC416CEB91,
      0x53E9ED4A766F45D,
      0x21D93DB09A1780F,
      0x68193D3C166F289D,
    ],
    np.uint64,
  )
  _SAMPLED = 4

  def __init__(self) -> None:
    self._ids = _WordIds()
    self._runs: set[int] = set()

  def add(self, paragraph: str) -> set[int]:
    """Remembers a new paragraph; returns its new runs, an empty set for a repeat.

    Args:
      paragraph: at least 5 words.
    """
    runs = self._sample(split_words(paragraph))
    new = [run for run in runs if run not in self._runs]
    if 2 * len(new) <= len(runs):
      return set()
    self._runs.update(new)
    return {*new}

  def forget(self, runs: set[int]) -> None:
    """Forgets runs of words, because their paragraphs are not used."""
    self._runs -= runs

  def _sample(self, words: list[str]) -> list[int]:
    """Returns the hashes of the sampled runs of words."""
    ids = np.array([self._ids[word] for word in words], np.uint64)
    # np.convolve of integers adds modulo 2^64.
    hashes = np.convolve(ids, self._WEIGHTS, "valid") >> np.uint64(16)
    sampled = hashes[(hashes % self._SAMPLED == 0) | (hashes == hashes.min())]
    return sampled.tolist()


def prose_of(files: pathlib.Path, part: str) -> Iterator[dict[str, str]]:
  """Yields {path, text} of each file with prose; a line of `text` is a paragraph.

  Args:
    files: root of a package's files.
    part: only files whose path contains this text are read.
  """
  for path in sorted(files.rglob("*")):
    name = path.relative_to(files).as_posix()
    if part not in f"/{name}" or not is_text(name):
      continue
    if path.is_symlink() or not path.is_file():
      continue
    try:
      found = filter(is_prose, read_paragraphs(path))
      text = "\n".join(found)
    except OSError as error:
      print(f"{error}; the file is left out.", flush=True)
      continue
    if text:
      yield {"path": name, "text": text}


def documents(text: str, seen: Seen) -> Iterator[str]:
  """Yields the documents of a file, without the paragraphs that were seen before.

  If the last document has too few characters, it is left out. Its paragraphs then do
  not count as seen, because a longer document may contain them.
  """
  kept, size, runs = list[str](), 0, set[int]()
  for paragraph in text.split("\n"):
    new = seen.add(paragraph)
    if not new:
      continue
    if size >= _SHORTEST and size + len(paragraph) > _LONGEST:
      yield "\n\n".join(kept)
      kept, size, runs = [], 0, set()
    kept.append(paragraph)
    size += len(paragraph)
    runs |= new
  if size >= _SHORTEST:
    yield "\n\n".join(kept)
  else:
    seen.forget(runs)
