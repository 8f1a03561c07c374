"""The chapters and the README: what they show is so. And the checks themselves,
each of which has to find what it is there for."""

import os
import shutil

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
CHECKS = {check.__name__: check for check in [
    chapters.check_blocks, chapters.check_excerpts, chapters.check_diffs,
    chapters.check_moves, chapters.check_names, chapters.check_links,
    chapters.check_neighbours, chapters.check_named, chapters.check_text, chapters.check_targets]}


@pytest.fixture(autouse=True)
def as_a_reader(monkeypatch):
    """Commands of transcripts inherit no choice of a provider."""
    monkeypatch.delenv("FI_PROVIDER", raising=False)
    monkeypatch.delenv(RXM_BUFFERS, raising=False)


@pytest.mark.static
def test_no_chapter_is_left_out():
    nothing_wrong(chapters.check_numbers(ROOT))


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
def test_limits():
    """Each is that of a program."""
    assert set(lines.LEAST) <= set(chapters.programs(ROOT))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Chapters and programs, for tests that change them."""
    folder = tmp_path_factory.mktemp("copy")
    for name in "src", "chapters", "scripts/moves":
        shutil.copytree(f"{ROOT}/{name}", folder / name)
    for name in "README.md", "scripts/common.sh":
        shutil.copy(f"{ROOT}/{name}", folder / name)
    return folder


@pytest.mark.static
@pytest.mark.parametrize("path", [
    path if "/5" in path or "/12" in path else pytest.param(path, marks=pytest.mark.thorough)
    for path in PAGES])
def test_finds_what_is_not_quoted(copy, path):
    """A chapter fails that is nothing but its heading and a link to its program, and one
    that has lost the excerpt with most new lines. If a chapter has got better and fails
    only here, its number in lines.LEAST has to rise."""
    page = Page(ROOT, path)
    if page.program not in lines.LEAST:
        return
    states = lines.states(page)
    new = lines.new_lines(states)

    def quoted(block):
        return len(lines.shown_lines(page, states, [block]) & new)

    largest = max(page.blocks, key=quoted, default=None)
    if not largest or not quoted(largest):
        return  # an epilogue
    rows = page.text.split("\n")
    first = largest.line - 1
    without = rows[:first] + rows[first + len(largest.lines):]
    heading = [rows[0], f"[Program](../src/{page.program}.cpp)"]
    main = page.companions[0].path
    assert lines.check_lines(Page(copy, main)) == []
    for changed in heading, without:
        (copy / path).write_text("\n".join(changed) + "\n")
        messages = lines.check_lines(Page(copy, main))
        (copy / path).write_text(page.text)
        assert len(messages) == 1 and messages[0].startswith(f"{main}: only "), messages


def test_lines_are_counted(tmp_path):
    """Those that are new, in an excerpt, and code. Text and comments that name them count
    for nothing, and a program has to have a limit."""
    excerpt = "```cpp\nint two = 2;\n```\n"
    for path, text in {
            "src/4_a.cpp": "int main() {\n  return 0;\n}\n",
            "src/5_b.cpp": "// Based on 4_a.\n#include <new>\n\n// one: explained\n"
                           "int one = 1;\nint two = 2;\nint main() {\n    return 0;\n}\n",
            "chapters/4_a.md": "# A\n",
            "chapters/5_b.md": f"# B\n\n`one`.\n\n{excerpt}",
            "chapters/5_more.md": "# More\n\n[Program](../src/5_b.cpp)\n"}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    page = Page(tmp_path, "chapters/5_b.md")
    assert lines.share(page) == 50
    assert lines.check_lines(page) == [
        "chapters/5_b.md: LEAST in scripts/book/lines.py has no 5_b"]
    # What another page about the program quotes counts as well.
    (tmp_path / "chapters/5_more.md").write_text(
        "[Program](../src/5_b.cpp)\n" + excerpt.replace("two = 2", "one = 1"))
    assert lines.share(Page(tmp_path, "chapters/5_b.md")) == 100


def test_lines_of_moves_are_counted(tmp_path):
    """Where they are added, in the section of that move; what the finished program has,
    wherever it is shown. What is only indented anew is not new."""
    write_moves(tmp_path)
    path = "chapters/5_two.md"
    found = lines.states(Page(tmp_path, path))
    slow, one, fast = (1, 4), (1, 5), (2, 7)
    new = {slow, one, (2, 2), (2, 5), fast}
    assert lines.new_lines(found) == new
    assert lines.new_and_shown(Page(tmp_path, path)) == (new, new)
    for old, missing in [
            ("int slow() {\n  return one();\n", {slow}),  # move 2 shows `one`, too
            ("-int slow() {\n+int fast() {\n   return one();\n", set()),
            ("  return 2;\n", {(2, 5)})]:
        assert CHAPTER.count(old) == 1
        (tmp_path / path).write_text(CHAPTER.replace(old, ""))
        assert lines.new_and_shown(Page(tmp_path, path)) == (new, new - missing)


MOVE_FAULTS = {
    "not-yet": ("check_excerpts", "int slow() {\n  return one();", "  return 2;",
                "chapters/5_two.md:19: not in move 5.1, but in move 5.2: \"  return 2;\""),
    "no-longer": ("check_excerpts", "  return 2;", "int slow() {",
                  ":46: not in src/5_two.cpp, but in move 5.1: \"int slow() {\""),
    "of-the-last": ("check_excerpts", "  if (fast()) {", "  if (slow()) {",
                    ":36: not in move 5.2 at this place: \"  if (slow()) {\""),
    "before": ("check_diffs", "-int slow() {", "-int two() {",
               ":28: not in move 5.1 at this place: \"int two() {\""),
    "after": ("check_diffs", "+int fast() {", "+int faster() {",
              ":29: not in move 5.2 at this place: \"int faster() {\""),
    "count": ("check_moves", "slow | +4 −1", "slow | +4 −2", ":7: move 5.1 is +4 −1"),
    "row": ("check_moves", "[5.2 fast]", "[5.3 fast]", ":8: 5_two has no move 5.3"),
    "no-row": ("check_moves", "| 5.1 slow", "| slow",
               "5_two.md: no row in its table is about move 5.1"),
    "heading": ("check_moves", "## 5.1 A", "## 5.3 A", ":14: 5_two has no move 5.3"),
    "no-heading": ("check_moves", "## 5.1 A", "## A",
                   "5_two.md: no section is about move 5.1"),
    "form": ("check_moves", "## 5.1 A", "## 5.1: A",
             ":14: a move's heading is `## 5.1 Its title`"),
    "level": ("check_moves", "### In it", "### 5.2 In it",
              ":33: a move's heading is `## 5.1 Its title`"),
    "order": ("check_moves", "## What", "## 5.1 What",
              "5_two.md: the order of its sections is 5.1, 5.2, 5.1"),
    "target": ("check_targets", "## What", "```sh\nmake diff-5.7\n```\n\n## What",
               ":44: make has no diff-5.7"),
    "typed": ("check_targets", "## What", "```sh\nmake type-5.1\nmake my_5\nmake my_6\n```"
              "\n\n## What", ":46: make has no my_6"),
}


@pytest.mark.parametrize("fault", MOVE_FAULTS)
def test_finds_in_a_chapter_of_moves(tmp_path, fault):
    """Each excerpt is looked for in the program after its move."""
    write_moves(tmp_path)
    path = "chapters/5_two.md"
    check, old, new, expected = MOVE_FAULTS[fault]
    assert CHECKS[check](Page(tmp_path, path)) == []
    assert CHAPTER.count(old) == 1
    (tmp_path / path).write_text(CHAPTER.replace(old, new))
    messages = CHECKS[check](Page(tmp_path, path))
    assert messages and expected in messages[0], messages


def test_indentation_of_moves(tmp_path):
    """In a diff, what stays is shown as it is indented afterwards."""
    write_moves(tmp_path)
    path = "chapters/5_two.md"
    (tmp_path / path).write_text(CHAPTER.replace("""\
-int slow() {
""", """\
+  if (fast()) {
     return 1;
+  }
...
-int slow() {
"""))
    assert chapters.check_diffs(Page(tmp_path, path)) == []


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

SAMPLE = {
    "src/4_hello.cpp": """\
#include <rdma/fi_domain.h>
int main() {
  first();
  if (fi_getinfo(FI_SEND)) {
    second();
  }
  third();
}
""",
    "src/5_reverse.cpp": """\
// Based on 4_hello.
#include <rdma/fi_domain.h>
int main() {
  first();
  if (fi_getinfo(FI_SEND)) {
    last();
  }
  fi_close(cudaMalloc);

  third();
}
""",
    "chapters/3_setup.md": "# Set-up\n\nNext: [hello](4_hello.md)\n",
    "chapters/4_hello.md": """\
# Hello

[Before](3_setup.md), [program](../src/4_hello.cpp#L2-L4).
`fi_getinfo` with FI_SEND, and [fi_cq](https://example.org/a_(b)).

[Next](5_reverse.md#what-fi_close-does-not "title")

1. An excerpt:

   ```cpp
   int main() {
     // ...
       second();
     }
     third();
     // ...
   ```

```mermaid
fi_mermaid
```
""",
    "chapters/5_reverse.md": """\
# Reverse

[Before](4_hello.md), [program](../src/5_reverse.cpp), `make diff-5`.

## What `fi_close` does not

`cudaMalloc` is ![drawn](../src).

```diff
...
   if (fi_getinfo(FI_SEND)) {
-    second();
+    last();
   }
+  fi_close(cudaMalloc);
+
   third();
...
```

```sh
make diff-5
```

```cpp
    last();
  }
  fi_close(cudaMalloc);

  third();
```
""",
    "README.md": "# Read me\n\n[3](chapters/3_setup.md), "
                 "[4](chapters/4_hello.md), [5](chapters/5_reverse.md#reverse)\n",
}


def sample(folder, path=None, old=None, new=None):
    """A small repository in which one thing is changed."""
    for name, text in SAMPLE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if name == path:
            assert text.count(old) == 1, text
            text = text.replace(old, new)
        (folder / name).write_text(text)


README = "README.md"
HELLO = "chapters/4_hello.md"
REVERSE = "chapters/5_reverse.md"


def test_finds_long_excerpt(tmp_path):
    """Which stands in the program, but was not meant to go on so long."""
    sample(tmp_path)
    lines = "".join(f"line({i});\n" for i in range(chapters.LONGEST + 1))
    (tmp_path / "src/4_hello.cpp").write_text(lines)
    (tmp_path / HELLO).write_text(f"# Hello\n\n```cpp\n{lines}```\n")
    assert chapters.check_excerpts(Page(tmp_path, HELLO)) == [
        f"{HELLO}:4: {chapters.LONGEST + 1} lines in one piece"]


def test_good_pages(tmp_path):
    sample(tmp_path)
    for path in SAMPLE:
        for check in CHECKS.values() if path.endswith(".md") else []:
            assert check(Page(tmp_path, path)) == []


def test_excerpts_of_ones_own(tmp_path):
    """Of the program that a page has the reader make by a patch."""
    sample(tmp_path)
    (tmp_path / "scripts/own").mkdir(parents=True)
    (tmp_path / "scripts/own/mine.patch").write_text(
        "diff --git a/src/4_hello.cpp b/src/mine.cpp\nsimilarity index 50%\n"
        "copy from src/4_hello.cpp\ncopy to src/mine.cpp\n--- a/src/4_hello.cpp\n"
        "+++ b/src/mine.cpp\n@@ -2,3 +2,3 @@\n int main() {\n-  first();\n+  mine();\n"
        "   if (fi_getinfo(FI_SEND)) {\n")
    page = "chapters/appendix_own.md"
    text = "# Own\n\n```sh\ngit apply scripts/own/mine.patch\nmake mine\n```\n"
    for line, messages in [("  mine();", []), ("  first();", [
            f'{page}:9: not in scripts/own/mine.patch at this place: "  first();"'])]:
        (tmp_path / page).write_text(f"{text}\n```cpp\n{line}\n```\n")
        found = Page(tmp_path, page)
        assert chapters.check_blocks(found) == chapters.check_targets(found) == []
        assert chapters.check_excerpts(found) == messages
    # A second one: an excerpt is from the last one above it, and none above the first.
    own = tmp_path / "scripts/own"
    (own / "more.patch").write_text(
        (own / "mine.patch").read_text().replace("mine", "more"))
    (tmp_path / page).write_text(text + "```cpp\n  more();\n```\n"
                                 + text.replace("mine", "more")
                                 + "```cpp\n  more();\n```\n")
    assert chapters.check_excerpts(Page(tmp_path, page)) == [
        f'{page}:8: not in scripts/own/mine.patch at this place: "  more();"']
    (tmp_path / page).write_text(f"```cpp\n  mine();\n```\n{text}")
    assert len(chapters.check_blocks(Page(tmp_path, page))) == 1

def test_programs_are_a_tree(tmp_path):
    """A diff starts from the program that the chapter's is based on. New are the names
    that none of its ancestors has."""
    sample(tmp_path)
    for name, call in ("6_left", "fi_read()"), ("7_right", "fi_read(fi_close())"):
        (tmp_path / f"src/{name}.cpp").write_text(
            f"// Based on 5_reverse.\nint main() {{\n  {call};\n}}\n")
    right = "chapters/7_right.md"
    (tmp_path / right).write_text(
        "# Right\n\n```diff\n-  first();\n+  fi_read(fi_close());\n```\n")
    page = Page(tmp_path, right)
    assert page.ancestors == ["5_reverse", "4_hello"] and page.before == "5_reverse"
    assert chapters.check_diffs(page) == []
    assert chapters.check_names(page) == [
        f"{right}: not named outside of code blocks: fi_read"]


SCOPES = """\
struct Session {
  explicit Session(Domain& domain,
                   int size)
      : domain(domain) {
    Send(1);
  }
  enum class Kind {
    kOne,
  };
  // Comment.
  size_t Poll() {
    if (done) {
#ifdef USE_CUDA
      return 1;
    }
    auto ask = [&] {
      Send(2);
    };
  }
};
int main() {
  try {
    Serve(Session(1), [] {
      Send(3);
    });
  } catch (...) {
    Send(4);
  }
}
"""


def test_scopes():
    lines = SCOPES.split("\n")
    scopes = {line.strip(): chapters.scope(lines, at) for at, line in enumerate(lines)
              if line.strip()}
    assert scopes["Send(1);"] == "Session::Session"
    assert scopes["// Comment."] == scopes["size_t Poll() {"] == "Session"
    assert scopes["return 1;"] == scopes["Send(2);"] == "Session::Poll"
    assert scopes["Send(3);"] == scopes["Send(4);"] == scopes["try {"] == "main"
    assert scopes["struct Session {"] == scopes["int main() {"] == ""


FAULTS = {
    # A changed line, wrong order, wrong order with an elision that hides nothing.
    "changed": ("check_excerpts", HELLO, "    second();\n", "    secondly();\n",
                '4_hello.md:13: not in src/4_hello.cpp at this place: "    secondly();"'),
    "indented": ("check_excerpts", HELLO, "     third();", "      third();",
                 ':15: not in src/4_hello.cpp at this place: "   third();"'),
    "order": ("check_excerpts", HELLO, "       second();\n     }\n     third();",
              "     }\n     third();\n       second();",
              ':15: not in src/4_hello.cpp at this place: "    second();"'),
    "elision": ("check_excerpts", HELLO, "     third();\n",
                "     // ...\n     first();\n",
                ':16: not in src/4_hello.cpp at this place: "  first();"'),
    "scope": ("check_excerpts", HELLO, "     // ...\n       second", "     // ... in min\n"
              "       second", ":13: not in min, but in main"),
    "empty": ("check_excerpts", REVERSE, SAMPLE[REVERSE].split("cpp\n")[1],
              "// ...\n```\n", ":26: an excerpt of nothing"),
    "c": ("check_blocks", HELLO, "```cpp", "```c", ':10: a block of "c"; there'),
    "quoted": ("check_blocks", HELLO, "1. An", "> ```c\n\n1. An",
               ":8: code outside a fenced block"),
    "tag": ("check_blocks", HELLO, "1. An", "<pre>x;</pre>\n\n1. An",
            ":8: code outside a fenced block"),
    "no-end": ("check_blocks", HELLO, "fi_mermaid\n```\n", "fi_mermaid\n",
               ":19: this block does not end"),
    "no-program": ("check_blocks", "chapters/3_setup.md", "Next",
                   "```cpp\nx;\n```\n\nNext",
                   ":3: C++ without a program that it could be from"),
    "no-diff": ("check_blocks", HELLO, "```mermaid", "```diff",
                ":19: a diff without a program that this is based on"),
    "added": ("check_diffs", REVERSE, "+    last", "+    lastly",
              '5_reverse.md:13: not in src/5_reverse.cpp at this place: "    lastly();"'),
    "removed": ("check_diffs", REVERSE, "-    second", "-    third",
                ':12: not in src/4_hello.cpp at this place: "    third();"'),
    "no-mark": ("check_diffs", REVERSE, "+    last", "*    last",
                ':13: neither +, - nor a blank: "    last();"'),
    "no-change": ("check_diffs", REVERSE,
                  SAMPLE[REVERSE].split("diff\n")[1].split("```")[0],
                  "   third();\n", ":10: a diff that changes nothing"),
    "name": ("check_names", HELLO, "`fi_getinfo` with FI_SEND", "`fi_getinfos`",
             "chapters/4_hello.md: not named outside of code blocks: FI_SEND, "
             "fi_getinfo"),
    "name-in-code": ("check_names", REVERSE, "`cudaMalloc` is",
                     "```sh\ncudaMalloc\n```\nThis is",
                     "not named outside of code blocks: cudaMalloc"),
    "name-in-link": ("check_names", REVERSE, "`cudaMalloc` is",
                     "[This](x/cudaMalloc) https://example.org/cudaMalloc is",
                     "not named outside of code blocks: cudaMalloc"),
    "dead": ("check_links", README, "3_setup.md", "3_start.md",
             "README.md:3: dead link, no such file: chapters/3_start.md"),
    "fragment": ("check_links", README, "#reverse", "#reversed",
                 ":3: dead link, no such heading: chapters/5_reverse.md#reversed"),
    "code-fragment": ("check_links", HELLO, "#L2-L4", "#L2-L9",
                      ":3: dead link, no such line: ../src/4_hello.cpp#L2-L9"),
    "reference": ("check_links", HELLO, "[Before](3_setup.md)", "[before][3]",
                  ":3: not a link: ][3], "),
    "tag-link": ("check_links", HELLO, "`fi_getinfo` with", '<a href="x">fi_getinfo</a>',
                 ':4: not a link: <a href="x'),
    "outside": ("check_links", HELLO, "(3_setup.md)", "(../../3_setup.md)",
                ":3: dead link, not in the repository: ../../3_setup.md"),
    "url": ("check_links", HELLO, "https://example.org", "https:/example.org",
            ":4: dead link, not a URL: https:/example.org/a_(b)"),
    "no-next": ("check_neighbours", HELLO, "5_reverse.md#", "#",
                "chapters/4_hello.md: no link to 5_reverse.md"),
    "no-src": ("check_neighbours", REVERSE, "[program](../src/5", "(../src/5",
               "no link to ../src/5_reverse.cpp"),
    "readme": ("check_neighbours", README, "[3](chapters/3_setup.md)", "3",
               "README.md: no link to chapters/3_setup.md"),
    "provider": ("check_named", REVERSE, "`cudaMalloc` is",
                 "`cudaMalloc` over `shm` is",
                 "chapters/5_reverse.md: 1 providers and versions in 13 words are 76.9 in "
                 "1000, and not 2 at most; what they do differently belongs into"),
    "blanks": ("check_text", HELLO, "fi_mermaid\n", "fi_mermaid \n",
               ":20: blanks end this line"),
    "long": ("check_text", HELLO, "# Hello\n",
             "# Hello\n\n" + "very " * 20 + "long\n", ":3: more than 100 columns"),
    "titles": ("check_text", HELLO, "1. An", "# Again\n\n1. An",
               "2 headings of level 1, not one"),
    "target": ("check_targets", REVERSE, "make diff-5\n```", "make diffs-5\n```",
               ":22: make has no diffs-5"),
    "number": ("check_targets", REVERSE, "make diff-5\n```",
               "A=1 make help diff-7  # 7\n```", ":22: make has no diff-7"),
    "console": ("check_targets", REVERSE, "sh\nmake diff-5\n",
                "console\n$ make help\n$ make nothing\n$ ls\n",
                ":23: make has no nothing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_finds(tmp_path, fault):
    """Each fault is found by its check, and the first message names it."""
    check, path, old, new, expected = FAULTS[fault]
    sample(tmp_path, path, old, new)
    messages = CHECKS[check](Page(tmp_path, path))
    assert messages and expected in messages[0], messages


NAMED = """\
# A title of `shm`

Over tcp, [`tcp;ofi_rxm`](https://example.org/shm) and `FI_PROVIDER=sockets`, with
efa-direct of libfabric 1.17 or
2.6.0, in version 2.1 and in that of 2.4 (1.22 and libfabric's 2).[^shm]

![drawn over shm](shm.png) The libfabric-efa-demo of `session.net.Poll` knows verbs, net
and sockets; 1.17 GB in 2.3 s, and from 2.1 ms to 1.5 Gbps.

[^shm]: https://example.org/shm

```sh
FI_PROVIDER=shm libfabric 1.17 and many words more, which do not count either
```
"""


def test_providers_are_counted(tmp_path):
    """Where they are read, with their lines. As words of every day they are no names."""
    sample(tmp_path)
    path = tmp_path / HELLO
    path.write_text(NAMED)
    words, found = chapters.named(Page(tmp_path, HELLO))
    assert words == 49
    assert found == [
        (1, "shm"), (3, "tcp"), (3, "tcp;ofi_rxm"), (3, "sockets"), (4, "efa-direct"),
        (4, "libfabric 1.17"), (5, "2.6.0"), (5, "version 2.1"), (5, "2.4"), (5, "1.22"),
        (5, "libfabric's 2")]


def test_finds_many_providers(tmp_path):
    """One more than a chapter may name, in a text of 1000 words, and where they are."""
    sample(tmp_path)
    for count in chapters.MOST_NAMED, chapters.MOST_NAMED + 1:
        text = "# Names\n\n" + count * "over `shm`\n" + "word\n" * (999 - 2 * count)
        (tmp_path / HELLO).write_text(text)
        messages = chapters.check_named(Page(tmp_path, HELLO))
        assert messages[1:] == ([] if count == chapters.MOST_NAMED else [
            f"{HELLO}:{line}: shm" for line in range(3, 3 + count)])
    # The appendix is where they belong, and before chapter 4 there is no limit.
    for path in "chapters/appendix_providers.md", "chapters/3_setup.md":
        (tmp_path / path).write_text("# All of `shm`\n")
        assert chapters.check_named(Page(tmp_path, path)) == []


def test_own_targets(tmp_path):
    """What a page has the reader copy can be made, and what follows is no target."""
    sample(tmp_path, HELLO, "fi_mermaid\n```\n", """fi_mermaid
```

```sh
cp src/4_hello.cpp src/mine.cpp
make mine && ./build/mine
make watch-mine
make theirs
```
""")
    assert chapters.check_targets(Page(tmp_path, HELLO)) == [
        f"{HELLO}:27: make has no theirs"]


def test_order_of_reading(tmp_path):
    """A chapter comes before what else has its number, which comes as the README lists
    it, and the appendices come last. Each leads to its neighbours."""
    names = ["4_hello", "5_reverse", "5_more", "5_end", "10_last", "appendix_own",
             "appendix_memory", "appendix_providers", "appendix_a", "appendix_b"]
    sample(tmp_path)
    shutil.rmtree(tmp_path / "chapters")
    (tmp_path / "chapters").mkdir()
    for name in sorted(names):
        (tmp_path / "chapters" / f"{name}.md").write_text("# Page\n\n")
    (tmp_path / "README.md").write_text("[](chapters/5_more.md) [](chapters/5_end.md)\n")
    assert chapters.chapters(tmp_path) == names
    assert chapters.check_numbers(tmp_path) == ["chapters/: the numbers are [4, 5, 10]"]
    path = "chapters/appendix_own.md"
    assert chapters.check_neighbours(Page(tmp_path, path)) == [
        f"{path}: no link to 10_last.md", f"{path}: no link to appendix_memory.md"]
    (tmp_path / path).write_text("# Page\n\n[1](10_last.md), [2](appendix_memory.md)\n")
    assert chapters.check_neighbours(Page(tmp_path, path)) == []
    assert f"{README}: no link to {path}" in chapters.check_neighbours(
        Page(tmp_path, README))


def test_anchors():
    """As GitHub makes them."""
    text = """# The `fi_cq` of [libfabric](x.md): -FI_EAGAIN?
## Twice
## Twice ##
### Twice-1
#none
<a id="here"></a>
### <a id="there"></a>A place
"""
    assert chapters.anchors(text) == {
        "the-fi_cq-of-libfabric--fi_eagain", "twice", "twice-1", "twice-1-1",
        "here", "there", "a-place"}


# ---- Transcripts ----

ALIKE = [
    (["a", "...", "b"], ["a", "x", "b", "b"], True),
    (["a", "...", "b"], ["a", "b", "x"], False),
    (["...", "b", "...", "a", "..."], ["a", "b"], False),
    (["...", "a", "...", "b", "..."], ["x", "a", "x", "b", "x"], True),
    ([], ["a"], False),
    (["a "], ["a", ""], True),
    (["domain: a, fabric: b/1, provider: tcp;ofi_rxm"],
     ["domain: c, fabric: d::/2, provider: tcp"], True),
    (["domain: a, fabric: a, provider: tcp"],
     ["domain: a, fabric: a, provider: shm"], False),
    (["size=1"], ["size=2"], False),
    (["[0.1s] WRITE: 50%, 1/2", "[0.2s] WRITE: 100%, 2/2, bw=1.5Gbps, EAGAIN=1"],
     ["[3.4s] WRITE: 100%, 2/2, bw=44.1Gbps, EAGAIN=99"], True),
    (["[0.2s] WRITE: 100%, 2/2"], ["[0.2s] WRITE: 50%, 1/2"], False),
    (["client | a", "server | a", "server | b"],
     ["make[1]: 'a' is up to date.", "server | a", "client | a", "server | b"], True),
    (["client | a", "server | a", "server | b"],
     ["client | a", "server | b", "server | a"], False),
]


@pytest.mark.parametrize("expected,printed,alike", ALIKE)
def test_comparison(expected, printed, alike):
    assert alike == chapters.matches(chapters.normalised(expected),
                                     chapters.normalised(printed))


def rerun(folder, run, text, patience=10):
    (folder / "src").mkdir(exist_ok=True)
    (folder / "README.md").write_text(text)
    return chapters.check_transcripts(Page(folder, README), run, patience)


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
OTHERS = """
```console
$ mkdir -p build/elsewhere
$ (cd build/elsewhere && FI_PROVIDER=shm ../4_hello)
domain: shm, fabric: shm, provider: shm
Run the client with the following command:
  FI_PROVIDER='shm' ../4_hello 0123456789abcdef
$ FI_PROVIDER=shm ./build/4_hello 0123456789abcdef | tail -n 1
Sent 13 bytes.
```

Then the server goes on:

```console
Received 13 bytes: Hello, world!
^C
```

```console
$ FI_PROVIDER=nonsense ./build/4_hello
error: fi_getinfo (`fi_info -t FI_EP_RDM` lists what there is): No data available
$ echo $?
1
```
"""


def test_good_transcripts(tmp_path, run):
    assert rerun(tmp_path, run, TWO_TERMINALS + OTHERS) == []


def test_transcripts_of_moves(tmp_path, run, monkeypatch):
    """Their programs are those that have been built for the tests. Here others stand in
    their place: a server that catches no signal, and a client."""
    write_moves(tmp_path)
    folder = tmp_path / "quick"
    folder.mkdir()
    here = os.path.relpath(folder)
    server = ("echo Run the client with the following command:\n"
              f"echo \"  $0 {'0' * 16}\"\nexec sleep 60")
    for name, script in ("5.1", server), ("5.2", 'echo "$0 $1"'):
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    built = []
    monkeypatch.setattr(chapters, "build_moves",
                        lambda names: built.append(names) or here)
    text = ("```console\n$ ./build/5.1\nRun the client with the following command:\n"
            f"  ./build/5.1 {'a' * 16}\n^C\n```\n\n"
            f"```console\n$ ./build/5.2 {'a' * 16}\n./build/5.2 {'a' * 16}\n```\n")
    assert rerun(tmp_path, run, text, 2) == []
    assert built == [["5.1", "5.2"]]
    messages = rerun(tmp_path, run, text.replace("\n./build/5.2", "\n./built/5.2"), 2)
    assert len(messages) == 1 and "README.md:9: `./build/5.2" in messages[0], messages


TRANSCRIPT_FAULTS = {
    "client-changed": ("Sent 13", "Sent 14", "README.md:17: `./build/4_hello 012",
                       "-Sent 14 bytes", "+Sent 13 bytes"),
    "client-missing": ("provider: tcp\nSent", "provider: tcp\n$ true\nSent", ":17:",
                       "+Sent 13 bytes", ""),
    "status": ("$?\n0", "$?\n1", ":23: `echo $?` prints", "-1", "+0"),
    "server-changed": ("Received 13", "Received 14", ":5: `./build/4_hello` prints",
                       "-Received 14 bytes", "+Received 13 bytes"),
    "server-missing": ("Received 2 bytes: ok\n", "", ":5:",
                       "+Received 2 bytes: ok", ""),
    "no-server": ("$ ./build/4_hello\n", "$ ./build/4_hello --help\n",
                  ":17: no server runs that could have this address", "", ""),
    "no-command": ("$ make 4_hello\n", "Hello\n",
                   ":4: a transcript without a command", "", ""),
    "itself": ("$ make 4_hello\n", "$ make test\n...\n",
               ":4: the tests cannot show the tests", "", ""),
}


@pytest.mark.parametrize("fault", TRANSCRIPT_FAULTS)
def test_finds_in_transcript(tmp_path, run, fault):
    old, new, where, minus, plus = TRANSCRIPT_FAULTS[fault]
    assert TWO_TERMINALS.count(old) == 1
    messages = rerun(tmp_path, run, TWO_TERMINALS.replace(old, new), 2)
    message = "".join(message for message in messages if where in message)
    assert message and minus in message and plus in message, messages


def test_finds_a_command_without_end(tmp_path, run, monkeypatch):
    """Nothing of it is left running."""
    monkeypatch.setattr(chapters, "LIMIT", 1)
    messages = rerun(tmp_path, run, "```console\n$ sleep 98 & sleep 99\n```\n")
    assert messages == ["README.md:2: `sleep 98 & sleep 99` does not end:\n"]
    monkeypatch.setattr(chapters, "LIMIT", 60)
    assert rerun(tmp_path, run, "```console\n$ sleep 99 &\n```\n") == []


@pytest.mark.parametrize("script,rest,message", [
    ("", "", "exits with -15"),
    ("trap 'exit 0' TERM; trap '' INT", "^C\n", "does not end: SIGINT"),
    ("trap 'exit 3' INT", "^C\n", "exits with 3"),
    ("trap 'exit 0' INT", "^C\n", None),
    ("exit 0", "", "has ended by itself"),
])
def test_finds_how_a_server_ends(tmp_path, run, script, rest, message):
    """With another program in the place of ours."""
    words = f"the following command:\n./build/4_hello {'0' * 16}\n"
    server = f"printf '{words}'; {script or ':'}; while sleep 0.1; do :; done"

    def run_script(command, **env):
        assert command == ["./build/4_hello"]
        return run(["bash", "-c", server], **env)

    messages = rerun(tmp_path, run_script, "```console\n$ ./build/4_hello\n"
                     + words + rest + "```\n", 2)
    assert bool(messages) == bool(message), messages
    assert not message or message in messages[0]
