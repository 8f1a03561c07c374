"""make check WRITE=1: what it writes into pages, and what it leaves to a human."""

import pytest

import chapters
import write
from chapters import Page
from small_repository import CHAPTER, STATES, write_moves

LONG = """\
int main() {
  Begin(1);
  if (first) {
    Send(2);
  }
  Receive(3);
  return 0;
}

void Other() {
  if (first) {
    Wait(4);
  }
}
"""


@pytest.mark.parametrize("part,found", [
    ("  if (first) {\n    Send(7);\n  }\n  Receive(3);", (2, 6)),  # a line is another one
    ("  Begin(1);\n  Receive(3);\n  return 0;", (1, 7)),  # others have come between
    ("  Begin(1);\n  Log();\n  if (first) {\n    Send(2);", (1, 4)),  # one has gone
    ("  Receives(3);", (5, 6)),
    ("  if (first) {", None),  # there are two
    ("  Nothing(of, that);\n  is(here);", None),
    ("  if (first) {\n    Go();\n  }", None),  # no less like one than like the other
])
def test_closest(part, found):
    place = write.closest(part.split("\n"), LONG.split("\n"))
    assert place == (found and range(*found))


def test_excerpts_and_tables(tmp_path):
    """They follow the program, and text does not. What is indented stays so."""
    write_moves(tmp_path)
    path = "chapters/5_two.md"
    changes = [("int slow() {", "long slow() {"), ("int fast() {", "long fast() {"),
               ("if (fast()) {", "if (fast(1)) {")]
    page = CHAPTER.replace("+4 −1", "+5 −1", 1).replace("```cpp\nint fast() {\n```",
                                                        "- A:\n\n  ```cpp\n  int fast() {\n  ```")
    page = page.replace("`slow` and `one`.", "`slow` and `one`, of type int.")
    wanted = page
    for old, new in changes:
        wanted = wanted.replace(old, new)
    states = list(STATES)
    for old, new in changes:
        states = [state.replace(old, new) for state in states]
    for name, text in (("src/4_one.cpp", states[0]), ("src/5_two.cpp", states[2])):
        (tmp_path / name).write_text(text)
    write.moves.write("5_two", {"1_slow": states[1], "2_fast": states[2]}, root=tmp_path)
    (tmp_path / path).write_text(page)
    assert len(chapters.check_excerpts(Page(tmp_path, path))) == 3
    for edits in write.excerpt_edits, write.row_edits:
        page = Page(tmp_path, path)
        write.apply(page, edits(page), "excerpt")
    found = Page(tmp_path, path)
    assert found.text == wanted.replace("+5 −1", "+4 −1")
    assert not [message for check in (chapters.check_excerpts, chapters.check_diffs,
                                      chapters.check_moves) for message in check(found)]


def test_unclear_excerpts_are_left(tmp_path):
    write_moves(tmp_path)
    path = tmp_path / "chapters/5_two.md"
    path.write_text(CHAPTER.replace("  return 2;\n", "  something_else_altogether;\n"))
    assert write.excerpt_edits(Page(tmp_path, "chapters/5_two.md")) == {}


@pytest.mark.parametrize("shown,printed,after", [
    ("a\nSent 13 bytes\nc", "a\nSent 13 bytes!\nc", "a\nSent 13 bytes!\nc"),
    ("a\nc", "a\nb\nc", "a\nb\nc"),
    ("a\nb\nc", "a\nc", "a\nc"),
    ("took 1.5 s\nold", "took 2.5 s\nnew", "took 1.5 s\nnew"),
    ("a\n...\nthe end", "a\nx\ny\nthe end!", "a\n...\nthe end!"),
    ("a\n...\nthe end", "b", None),
    ("Sent 13 bytes", "error: no route", None),
    (f"  {'0' * 16}\n  run {'0' * 16}", f"  {'1' * 16}\n  do run {'1' * 16}",
     f"  {'0' * 16}\n  do run {'0' * 16}"),
    ("client | a\nserver | b", "server | c\nclient | a", "client | a\nserver | c"),
])
def test_mended(shown, printed, after):
    """What is the same in each run stays, `...` and the page's address, too."""
    shown = shown.split("\n")
    edits = chapters.mended(shown, printed.split("\n"))
    assert (edits is None) == (after is None)
    assert after is None or after.split("\n") == [
        line for at, now in enumerate(shown) for line in edits.get(at, [now])]


def test_shares_only_rise(tmp_path, monkeypatch, capsys):
    (tmp_path / "scripts/book").mkdir(parents=True)
    path = tmp_path / "scripts/book/lines.py"
    path.write_text('LEAST = {"4_a": 50, "5_b": 50}\n')
    monkeypatch.setattr(write, "ROOT", str(tmp_path))
    monkeypatch.setattr(chapters, "pages_of_programs", lambda root: {"4_a": 55.9, "5_b": 41.0})
    monkeypatch.setattr(write.lines, "share", lambda page: page)
    monkeypatch.setattr(write.lines, "LEAST", {"4_a": 50, "5_b": 50})
    write.write_shares()
    assert path.read_text() == 'LEAST = {"4_a": 55, "5_b": 50}\n'
    assert capsys.readouterr().out == "scripts/book/lines.py: 4_a: 55 % instead of 50 %\n"


def test_transcript_is_written(tmp_path, run, capsys):
    """Also what a server prints, in several blocks."""
    (tmp_path / "src").mkdir()
    text = ("```console\n$ echo new; echo 1.5\nold\n0.1\n```\n\n- One:\n\n"
            "  ```console\n  $ seq 2\n  1\n  ```\n\n```console\n$ false || echo x\ny\n...\n```\n")
    (tmp_path / "README.md").write_text(text)
    again = chapters.Rerun(Page(tmp_path, "README.md"), run, 2)
    assert len(again.all()) == 3 and len(again.mended) == 2
    write.apply(again.page, again.edits, "transcript")
    assert (tmp_path / "README.md").read_text() == text.replace("old", "new").replace(
        "  1\n", "  1\n  2\n")
    assert "README.md:3: transcript: new\n" in capsys.readouterr().out
