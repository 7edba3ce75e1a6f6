"""Which paragraphs are English prose, and which repeat others."""

import gzip

import clean_text
import pytest

PROSE = (
  "The harbour was quiet in the morning, and only two of the boats had left before the"
  " rain came down on the roofs of the town."
)


@pytest.mark.parametrize(
  ("reason", "paragraph"),
  [
    ("code", "for (i = 0; i < n; i++) { the[i] = of[i] + and[i]; } return the_a(i);"),
    ("German", "Der Hafen war am Morgen ruhig, und nur zwei von den Booten hatten ihn"
     " vor dem Regen verlassen, der auf die Dächer der Stadt fiel."),
    ("French", "Le port était calme ce matin, et seuls deux des bateaux étaient partis"
     " avant que la pluie ne tombe sur les toits de la ville."),
    ("numbers", "The values of the run are 1.25, 3.75 and 8.125 at 10, 20, 30 and 40 of"
     " the 50 steps, and 2.5 at the end of it."),
    ("a heading", "The Harbour in the Morning and the Boats of the Town in the Rain"),
    ("short", "It was quiet in the morning, and it rained."),
    ("names", "Adams, Baker, Clark, Davis, Evans, Frank, Ghosh, Hills, Irwin, Jones,"
     " Klein, Lopez, Mason and Nolan."),
    ("an option", "--of the options that are in this file, it is the one we want."),
  ],
)  # fmt: skip
def test_other_text_is_no_prose(reason, paragraph):
  assert clean_text.is_prose(PROSE)
  assert not clean_text.is_prose(paragraph), reason


def test_pages_lose_their_code_and_keep_their_words(tmp_path):
  page = tmp_path / "page.html"
  page.write_text(
    "<html><head><title>A title</title></head><body><!-- <p>hidden</p> -->"
    "<p>One <b>bold</b>\n <code>word</code> &amp; more.<pre>x = 1</pre>"
    "<script>run()</script>After it.</p><li>An item.<td>A cell.</body>"
  )
  paragraphs = ["One bold word & more.", "After it.", "An item.", "A cell."]
  assert clean_text.read_paragraphs(page) == paragraphs


def test_plain_text_loses_its_code_and_its_markup(tmp_path):
  text = (
    "A :ref:`section <the-target>` of *this*\n``file``, and `a link <x.org>`_.\n\n"
    "    indented = code\n\n"
    "Perl's C<print> and [words](https://x.org).\n \nLast."
  )
  kept = ["A section of this file, and a link.", "Perl's print and words.", "Last."]
  plain, packed = tmp_path / "a.rst", tmp_path / "a.rst.gz"
  plain.write_text(text)
  packed.write_bytes(gzip.compress(text.encode()))
  assert clean_text.read_paragraphs(plain) == kept
  assert clean_text.read_paragraphs(packed) == kept


def test_text_in_latin_1_is_read_and_a_cut_file_is_refused(tmp_path):
  old, cut = tmp_path / "old.txt", tmp_path / "cut.txt.gz"
  old.write_bytes("A café.".encode("latin-1"))
  cut.write_bytes(gzip.compress(PROSE.encode())[:-12])
  assert clean_text.read_paragraphs(old) == ["A café."]
  with pytest.raises(OSError, match=r"cut\.txt\.gz is not a whole gzip file"):
    clean_text.read_paragraphs(cut)


def test_repeats_are_found_although_some_words_differ():
  seen = clean_text.Seen()
  assert seen.add(PROSE)
  assert not seen.add(PROSE)
  assert not seen.add(PROSE.upper().replace(",", ""))
  assert not seen.add(PROSE.replace("two of", "three of"))
  assert seen.add(
    "The harbour was quiet in the evening, but nobody who lived there slept, since a"
    " ship that none of them knew lay at anchor outside it."
  )


def paragraph(letter: str, words: int) -> str:
  """Makes a paragraph of words that no paragraph of another letter has."""
  return " ".join(f"{letter}{'xyz'[i % 3] * (i // 3 + 1)}" for i in range(words))


def test_every_document_has_the_least_length(monkeypatch):
  """Neither a short beginning before a long paragraph nor a short end is a document."""
  monkeypatch.setattr(clean_text, "_LONGEST", 900)
  head, body, tail, other = map(paragraph, "abcd", (15, 66, 20, 30))
  seen = clean_text.Seen()
  found = lambda *paragraphs: [*clean_text.documents("\n".join(paragraphs), seen)]
  assert len(head) < len(tail) < 200 < len(other) < 700 < len(body) < 900
  assert len(head) + len(body) > 900
  assert found(head, body, tail) == [f"{head}\n\n{body}"]
  # The end was left out, so a longer document may have it, but none has it twice.
  assert found(tail, tail) == []
  assert found(head, tail, other) == [f"{tail}\n\n{other}"]
  assert found(tail, body) == []
