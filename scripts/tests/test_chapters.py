"""The chapters and the README: what they show is so. And the checks themselves: a fault
of each kind is found, and named by its line."""

import os

import pytest

import chapters
import lines
from chapters import Page
from harness import RXM_BUFFERS
from marks import nothing_wrong
from repository import ROOT
from small_repository import CHAPTER, write_moves

PAGES = ["README.md", "scripts/README.md"] + [
    f"chapters/{name}.md" for name in chapters.chapters(ROOT)]
# Those that take a page and nothing else.
CHECKS = [
    chapters.check_blocks, chapters.check_excerpts, chapters.check_moves, chapters.check_names,
    chapters.check_links, chapters.check_neighbours, chapters.check_named,
    chapters.check_targets]


@pytest.fixture(autouse=True)
def as_a_reader(monkeypatch):
    """Commands of transcripts inherit no choice of a provider."""
    monkeypatch.delenv("FI_PROVIDER", raising=False)
    monkeypatch.delenv(RXM_BUFFERS, raising=False)


@pytest.mark.static
@pytest.mark.parametrize("path", PAGES)
def test_page(path):
    page = Page(ROOT, path)
    nothing_wrong([message for check in CHECKS for message in check(page)])


@pytest.mark.static
@pytest.mark.parametrize("program", chapters.pages_of_programs(ROOT))
@pytest.mark.every_program
def test_lines(program):
    """Its chapters quote enough of its new lines."""
    nothing_wrong(lines.check_lines(chapters.pages_of_programs(ROOT)[program]))


@pytest.mark.static
def test_every_script_is_described():
    text = chapters.read(f"{ROOT}/scripts/README.md")
    for entry in os.scandir(f"{ROOT}/scripts"):
        name = entry.name + "/" * entry.is_dir()
        assert name in ["README.md", "__pycache__/"] or f"| `{name}` |" in text


@pytest.mark.parametrize("path", PAGES)
def test_transcripts(run, path):
    nothing_wrong(chapters.Rerun(Page(ROOT, path), run).all())


# ---- The checks ----

PATH = "chapters/5_two.md"


# What is replaced in the chapter, and the message about it.
FAULTS = {
    "not-yet": ("int slow() {\n  return one();", "  return 2;",
                ":19: not in move 5.1, but in move 5.2: \"  return 2;\""),
    "no-longer": ("```cpp\n  return 2;", "```cpp\nint slow() {",
                  ":46: not in src/5_two.cpp, but in move 5.1: \"int slow() {\""),
    "order": ("  return 2;\n", "  return 2;\n  if (fast()) {\n",
              ":47: not in src/5_two.cpp at this place"),
    "scope": ("    // ...\n  }", "    // ... in two\n  }", "not in two"),
    "after": ("+int fast() {", "+int faster() {",
              ":29: not in move 5.2 at this place: \"int faster() {\""),
    "before": ("-int slow() {", "-int two() {",
               ":28: not in move 5.1 at this place: \"int two() {\""),
    "count": ("slow | +4 −1", "slow | +4 −2", ":7: move 5.1 is +4 −1"),
    "no-row": ("| 5.1 slow", "| slow", "the rows about its 2 moves are: 5.2"),
    "form": ("## 5.1 A", "## 5.1: A", "the sections about its 2 moves are: 5.2"),
    "sections": ("## What", "## 5.1 What", "the sections about its 2 moves are: 5.1, 5.2, 5.1"),
    "file": ("(4_one.md)", "(4_none.md)", ":3: dead link, no such file: 4_none.md"),
    "heading": ("#52-a-fast-one", "#52-fast", "dead link, no such heading"),
    "neighbour": ("[Before](4_one.md)", "Before", "no link to 4_one.md"),
    "provider": ("`slow` and `one`.", "`slow` over `shm`.", ":16: shm"),
    "target": ("## What", "```sh\nmake diff-5.7\n```\n\n## What", "make has no diff-5.7"),
    "language": ("```diff", "```c", "a block of \"c\""),
}


def test_finds(tmp_path):
    write_moves(tmp_path)

    def found(old="", new=""):
        assert not old or CHAPTER.count(old) == 1, old
        (tmp_path / PATH).write_text(CHAPTER.replace(old, new) if old else CHAPTER)
        page = Page(tmp_path, PATH)
        return "\n".join(message for check in CHECKS for message in check(page))

    assert found() == ""
    assert [fault for fault, (old, new, message) in FAULTS.items()
            if message not in found(old, new)] == []
