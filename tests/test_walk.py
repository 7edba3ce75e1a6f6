"""docs/design.md says which files a batch passes until it is merged; a trace agrees."""

import pathlib
import re
import sys

import pytest

import diloco
from diloco.algorithm.method import Method
from diloco.config import resolve
from diloco.session import Session
from diloco.train import train

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = pathlib.Path(diloco.__file__).parent


def listed() -> list[str]:
  """The numbered files of the page, in their order."""
  page = (ROOT / "docs/design.md").read_text()
  part = page.partition("## From a batch to a merge")[2].partition("\n## ")[0]
  return re.findall(r"^\d+\. `([\w/]+\.py)`", part, re.M)


@pytest.mark.integration("trains until nothing compiles any more")
def test_a_batch_passes_the_files_of_the_page(tiny, tmp_path, monkeypatch):
  files, walks = list[str](), list[list[str]]()
  take, outer = Session.take, Method.outer

  def note(frame, event, _):
    path = pathlib.Path(frame.f_code.co_filename)
    if event == "call" and path.is_relative_to(PACKAGE):
      files.append(path.relative_to(PACKAGE).as_posix())

  def begins(session, steps):
    files.clear()
    if steps[0] > 8:  # A profile makes compiling slow.
      sys.setprofile(note)
    return take(session, steps)

  def ends(method, t, state):
    found = outer(method, t, state)
    sys.setprofile(None)
    walks.append([*dict.fromkeys(files)])
    return found

  monkeypatch.setattr(Session, "take", begins)
  monkeypatch.setattr(Method, "outer", ends)
  tiny.wire.format, tiny.train.steps = "e3m0", 14
  try:
    train(resolve(tiny), tmp_path)
  finally:
    sys.setprofile(None)
  # By now each fragment was sent, received and merged, and all programs are compiled.
  assert walks[-1] == walks[-2] == listed()
  assert len(listed()) <= 16
