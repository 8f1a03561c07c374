"""make check WRITE=1: what it writes into pages, and what it leaves to a human."""

import pytest

import chapters
import moves
import write
from chapters import Page
from small_repository import CHAPTER, STATES, write_moves


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
    moves.write("5_two", {"1_slow": states[1], "2_fast": states[2]}, root=tmp_path)
    (tmp_path / path).write_text(page)
    assert len(chapters.check_excerpts(Page(tmp_path, path))) == 5
    for edits in write.excerpt_edits, write.row_edits:
        page = Page(tmp_path, path)
        write.apply(page, edits(page), "excerpt")
    found = Page(tmp_path, path)
    assert found.text == wanted.replace("+5 −1", "+4 −1")
    assert not chapters.check_excerpts(found) + chapters.check_moves(found)


@pytest.mark.parametrize("shown,printed,after", [
    ("a\nSent 13 bytes\nc", "a\nSent 13 bytes!\nc", "a\nSent 13 bytes!\nc"),
    ("took 1.5 s\nold", "took 2.5 s\nnew", "took 1.5 s\nnew"),
    ("a\n...\nthe end", "a\nx\ny\nthe end!", "a\n...\nthe end!"),
    ("a\n...\nthe end", "b", None),
    (f"  {'0' * 16}\n  run {'0' * 16}", f"  {'1' * 16}\n  do run {'1' * 16}",
     f"  {'0' * 16}\n  do run {'0' * 16}"),
])
def test_mended(shown, printed, after):
    """What is the same in each run stays, `...` and the page's address, too."""
    shown = shown.split("\n")
    edits = chapters.mended(shown, printed.split("\n"))
    assert (edits is None) == (after is None)
    assert after is None or after.split("\n") == [
        line for at, now in enumerate(shown) for line in edits.get(at, [now])]


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
