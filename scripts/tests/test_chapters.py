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
from small_repository import CHAPTER, STATES, write_moves

PAGES = ["README.md", "scripts/README.md"] + [
    f"chapters/{name}.md" for name in chapters.chapters(ROOT)]
# Those that take a page and nothing else.
CHECKS = {check.__name__: check for check in [
    chapters.check_blocks, chapters.check_excerpts, chapters.check_diffs,
    chapters.check_moves, chapters.check_names, chapters.check_links,
    chapters.check_neighbours, chapters.check_named, chapters.check_targets]}


@pytest.fixture(autouse=True)
def as_a_reader(monkeypatch):
    """Commands of transcripts inherit no choice of a provider."""
    monkeypatch.delenv("FI_PROVIDER", raising=False)
    monkeypatch.delenv(RXM_BUFFERS, raising=False)


@pytest.mark.static
@pytest.mark.parametrize("path", PAGES)
def test_page(path):
    page = Page(ROOT, path)
    nothing_wrong([message for check in CHECKS.values() for message in check(page)])


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
    nothing_wrong(chapters.check_transcripts(Page(ROOT, path), run))


# ---- The checks ----

PATH = "chapters/5_two.md"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A repository of two programs, one of which has moves and a chapter without a fault."""
    folder = tmp_path_factory.mktemp("small")
    write_moves(folder)
    return folder


def messages_of(folder, old="", new=""):
    assert not old or CHAPTER.count(old) == 1
    (folder / PATH).write_text(CHAPTER.replace(old, new) if old else CHAPTER)
    page = Page(folder, PATH)
    return [message for check in CHECKS.values() for message in check(page)]


def test_lines_are_counted(small):
    """Those that a move adds, in its section; what the finished program has, wherever it is
    shown. What is only indented anew is not new."""
    assert messages_of(small) == []
    slow, one, fast = (1, 4), (1, 5), (2, 7)
    new = {slow, one, (2, 2), (2, 5), fast}
    assert lines.new_and_shown(Page(small, PATH)) == (new, new)
    for old, missing in [
            ("int slow() {\n  return one();\n", {slow}),  # move 2 shows `one`, too
            ("-int slow() {\n+int fast() {\n   return one();\n", set()),
            ("  return 2;\n", {(2, 5)})]:
        (small / PATH).write_text(CHAPTER.replace(old, ""))
        assert lines.new_and_shown(Page(small, PATH)) == (new, new - missing)


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
    "no-row": ("| 5.1 slow", "| slow", "no row in its table is about move 5.1"),
    "no-section": ("## 5.1 A", "## A", "no section is about move 5.1"),
    "form": ("## 5.1 A", "## 5.1: A", ":14: a move's heading is `## 5.1 Its title`"),
    "sections": ("## What", "## 5.1 What", "the order of its sections is 5.1, 5.2, 5.1"),
    "file": ("(4_one.md)", "(4_none.md)", ":3: dead link, no such file: 4_none.md"),
    "heading": ("#52-a-fast-one", "#52-fast", "dead link, no such heading"),
    "neighbour": ("[Before](4_one.md)", "Before", "no link to 4_one.md"),
    "provider": ("`slow` and `one`.", "`slow` over `shm`.", "providers and versions in "),
    "target": ("## What", "```sh\nmake diff-5.7\n```\n\n## What", "make has no diff-5.7"),
    "language": ("```diff", "```c", "a block of \"c\""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_finds(small, fault):
    messages = messages_of(small, *FAULTS[fault][:2])
    assert any(FAULTS[fault][2] in message for message in messages), messages


def test_finds_a_name(small):
    source = small / "src/5_two.cpp"
    source.write_text(STATES[-1] + "int x = fi_close();\n")
    messages = messages_of(small, "`slow` and `one`.", "`slow`.\n\n```sh\nfi_close\n```")
    source.write_text(STATES[-1])
    assert f"{PATH}: not named outside of code blocks: fi_close" in messages


def test_excerpts_of_ones_own(tmp_path):
    """Of the program that a page has the reader make by a patch."""
    write_moves(tmp_path)
    (tmp_path / "scripts/own").mkdir(parents=True)
    (tmp_path / "scripts/own/mine.patch").write_text(
        "diff --git a/src/4_one.cpp b/src/mine.cpp\nsimilarity index 50%\n"
        "copy from src/4_one.cpp\ncopy to src/mine.cpp\n--- a/src/4_one.cpp\n"
        "+++ b/src/mine.cpp\n@@ -2,3 +2,3 @@\n int one() {\n-  return 1;\n+  return mine;\n }\n")
    page = "chapters/appendix_own.md"
    for line, messages in ("  return mine;", []), ("  return 1;", [
            f'{page}:9: not in scripts/own/mine.patch at this place: "  return 1;"']):
        (tmp_path / page).write_text("# Own\n\n```sh\ngit apply scripts/own/mine.patch\n"
                                     f"make mine\n```\n\n```cpp\n{line}\n```\n")
        assert chapters.check_excerpts(Page(tmp_path, page)) == messages


# ---- Transcripts ----

ALIKE = [
    (["a", "...", "b"], ["a", "x", "b", "b"], True),
    (["a", "...", "b"], ["a", "b", "x"], False),
    (["domain: a, fabric: b/1, provider: tcp;ofi_rxm"],
     ["domain: c, fabric: d::/2, provider: tcp"], True),
    (["size=1"], ["size=2"], False),
    (["[0.1s] WRITE: 50%, 1/2", "[0.2s] WRITE: 100%, 2/2, bw=1.5Gbps, EAGAIN=1"],
     ["[3.4s] WRITE: 100%, 2/2, bw=44.1Gbps, EAGAIN=99"], True),
    (["client | a", "server | a", "server | b"],
     ["make[1]: 'a' is up to date.", "server | a", "client | a", "server | b"], True),
]


@pytest.mark.parametrize("expected,printed,alike", ALIKE)
def test_comparison(expected, printed, alike):
    """What is another in each run is the same, and `...` is anything."""
    assert alike == chapters.matches(chapters.normalised(expected),
                                     chapters.normalised(printed))


def rerun(folder, run, text, patience=10):
    (folder / "src").mkdir(exist_ok=True)
    (folder / "README.md").write_text(text)
    return chapters.check_transcripts(Page(folder, "README.md"), run, patience)


TWO_TERMINALS = """\
The first terminal:

```console
$ make 4_hello
$ ./build/4_hello
domain: eth7, fabric: 10.0.0.0/8, provider: tcp
Run the client with the following command:
  ./build/4_hello 0123456789abcdef0123456789abcdef
Received 13 bytes: Hello, world!
Received 2 bytes: ok
^C
```

The second terminal:

```console
$ ./build/4_hello 0123456789abcdef0123456789abcdef
domain: eth7, fabric: 10.0.0.0/8, provider: tcp
Sent 13 bytes.
$ ./build/4_hello 0123456789abcdef0123456789abcdef ok
...
Sent 2 bytes.
$ echo $?
0
```
"""


def test_good_transcripts(tmp_path, run):
    assert rerun(tmp_path, run, TWO_TERMINALS) == []


@pytest.mark.parametrize("old,new,where,what", [
    ("Sent 13", "Sent 14", "README.md:17: `./build/4_hello 012", "+Sent 13 bytes"),
    ("Received 2 bytes: ok\n", "", ":5: `./build/4_hello` prints", "+Received 2 bytes: ok"),
])
def test_finds_in_transcript(tmp_path, run, old, new, where, what):
    assert TWO_TERMINALS.count(old) == 1
    messages = rerun(tmp_path, run, TWO_TERMINALS.replace(old, new), 2)
    assert any(where in message and what in message for message in messages), messages
