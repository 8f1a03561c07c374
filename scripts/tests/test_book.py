"""The pages of `make book`, without a browser: everything is there, and every link leads
somewhere. scripts/book/test_pages.py looks at them in one."""

import html
import html.parser
import json
import os
import re
import shutil
import subprocess
import urllib.parse

import pytest

import chapters
import lines
import moves
from harness import PROGRAMS
from repository import ROOT, make, number, parent
from small_repository import STATES, write_moves

pytest.importorskip("markdown_it", reason="scripts/install-deps.sh book installs it")
import book  # noqa: E402
import manual  # noqa: E402
import naming  # noqa: E402
import program  # noqa: E402

# In one worker: each builds a book of its own.
pytestmark = pytest.mark.xdist_group("book")

PAGES = {name: chapters.Page(ROOT, f"chapters/{name}.md")
         for name in chapters.chapters(ROOT)}
# The chapters that have a program beside them.
BESIDE = [name for name, page in PAGES.items() if page.program]
VOID = {"br", "hr", "img", "input", "link", "meta", "path"}
LOADS = {"src", "srcset", "poster", "data"}


class Read(html.parser.HTMLParser):
    """What the tests want to know of a page."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.hrefs, self.loaded, self.headings = [], [], [], []
        self.images, self.excerpts, self.rows, self.notes = [], [], {}, []
        self.text = ""
        self.open = []
        with open(path, encoding="utf-8") as file:
            self.feed(file.read())
        self.close()
        assert not self.open, (path, self.open)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag not in VOID:
            self.open.append((tag, attrs, len(self.text)))
        if tag == "sup":
            self.text += " "  # or a note's number would become part of a word
        if "id" in attrs:
            self.ids.append(attrs["id"])
        if tag == "link":
            self.loaded.append(attrs["href"])
        elif "href" in attrs:
            self.hrefs.append(attrs["href"])
        self.loaded += [value for name, value in attrs.items() if name in LOADS]
        if tag == "img":
            self.images.append(attrs)

    handle_startendtag = handle_starttag

    def handle_endtag(self, tag):
        opened, attrs, start = self.open.pop()
        assert opened == tag, (opened, tag, self.getpos())
        text = self.text[start:]
        if re.fullmatch("h[1-6]", tag) and "id" in attrs:
            self.headings.append(attrs["id"])
        if attrs.get("class") == "excerpt":
            self.excerpts.append((attrs["data-lines"], text))
        if tag == "div" and re.fullmatch(r"L\d+", attrs.get("id", "")):
            self.rows[int(attrs["id"][1:])] = (attrs.get("class"), text)
        if tag == "aside":
            self.notes.append(attrs["id"])

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The book, with figures that take no browser: empty ones."""
    folder = tmp_path_factory.mktemp("book")
    built = book.Book(ROOT, str(folder / "out"), str(folder / "figures"))
    built.build()
    return folder / "out"


@pytest.fixture(scope="module")
def pages(out):
    return {str(path.relative_to(out)): Read(path) for path in sorted(out.rglob("*.html"))}


def moves_of(path):
    """What a page has of each move, by its name."""
    found = re.search(r'id="program-moves">(.*?)</script>', path.read_text())
    return {move["name"]: move for move in json.loads(found[1])} if found else {}


@pytest.mark.thorough
def test_links(out, pages):
    """They lead to a page of the book that has the place, or into the web. No two places
    of a page have the same name."""
    dead = []
    for name, page in pages.items():
        assert sorted(page.ids) == sorted(set(page.ids)), name
        for href in page.hrefs:
            if re.match("https?:", href):
                continue
            path, _, fragment = urllib.parse.unquote(href).partition("#")
            target = os.path.normpath(
                os.path.join(os.path.dirname(name), path)) if path else name
            # The script understands these: #new, and of a move #5.3-new.
            if target not in pages or (
                    fragment not in ["", "new"] and fragment not in pages[target].ids
                    and fragment not in [f"{move}-new" for move in moves_of(out / target)]):
                dead.append(f"{name}: {href}")
    assert not dead


def test_nothing_from_outside(out, pages):
    """Everything that a page loads is beside it."""
    for name, page in pages.items():
        for path in page.loaded:
            if path != "data:,":
                assert (out / os.path.dirname(name) / path).is_file(), (name, path)
    assert not re.search(r"@import|url\(", (out / "book.css").read_text())
    assert not re.search(r"https?:|fetch\(|XMLHttp", (out / "book.js").read_text())


@pytest.mark.parametrize("name", PAGES)
def test_headings(pages, name):
    """Have GitHub's names, so that links from outside work in both."""
    page = PAGES[name]
    assert pages[f"{name}.html"].headings == chapters.slugs(page.prose)


@pytest.mark.parametrize("name", PAGES)
def test_text(pages, name):
    """All that the chapter says is on the page, in this order, footnotes apart."""
    page = PAGES[name]
    text = re.sub(r"(?ms)^\[\^.*", "", page.prose)
    # Pictures, notes, rules of tables, numbers of lists and targets are no text.
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|\[\^\w+\]|<a id=[^>]*></a>|"
                  r"(?m:^\| -.*|^ *\d+\. )", "", text)
    text = chapters.LINK.sub("]", text).replace("*", "")
    shown = iter(re.findall(r"\w+", pages[f"{name}.html"].text))
    for word in re.findall(r"\w+", text):
        assert word in shown, f"{word} is missing, or comes too early"
    for block in page.blocks:
        if block.info != "mermaid":
            assert "\n".join(block.lines).rstrip() in pages[f"{name}.html"].text


@pytest.mark.parametrize("name", BESIDE)
def test_excerpts(pages, name):
    """Each names exactly its lines."""
    page = PAGES[name]
    found = pages[f"{name}.html"].excerpts
    wanted = [block for block in page.blocks if chapters.excerpt(block) is not None
              and not page.broken(block.line)]
    assert len(found) == len(wanted) and (found or not page.is_main)
    for (where, _), block in zip(found, wanted):
        _, source = page.source(block.line)
        ranges = [range(int(first) - 1, int(last)) for first, last in
                  (part.split("-") for part in where.split(","))]
        parts = [part for _, part in chapters.excerpt(block) if part]
        assert [[source[at] for at in lines_] for lines_ in ranges] == parts


@pytest.mark.parametrize("name", BESIDE)
def test_program(pages, name):
    """All lines are there, and those are marked as new that `make diff-N` adds."""
    rows = pages[f"{name}.html"].rows
    beside = PAGES[name].program
    source = lines.source_lines(ROOT, beside)[:-1]
    assert [text for _, (_, text) in sorted(rows.items())] == [
        f"{at}{line}\n" for at, line in enumerate(source, 1)]
    new = [source[at - 1] for at, (mark, _) in sorted(rows.items()) if mark == "new"]
    diff = make(f"diff-{number(beside)}") if parent(beside) else ""
    assert new == [line[1:] for line in diff.splitlines()
                   if line[:1] == "+" and not line.startswith("+++ b/")]


@pytest.mark.parametrize("name", BESIDE)
def test_names(out, pages, name):
    """A name in the program leads to its definition, or to its manual page."""
    text = (out / f"{name}.html").read_text()
    names = json.loads(re.search(r'id="names">(.*?)</script>', text)[1])
    rows = pages[f"{name}.html"].rows
    assert names
    for word, where in names.items():
        if where.startswith("#"):
            first, last = (re.findall(r"\d+", where) * 2)[:2]
            # Where a function is defined, and not where it is declared.
            assert not re.match(rf".*\b{word}\(.*\);$", rows[int(last) - 1][1]), word
            assert any(re.search(rf"(?<![A-Za-z_]){word}\b", rows[at][1])
                       for at in range(int(first), int(last) + 1)), word
        else:
            page, _, place = where.partition("#")
            assert page in pages and (not place or place in pages[page].ids), word
    if manual.Manual().texts:
        missing = set(re.findall(r"\bfi_\w+(?=\()", "".join(
            line for line in lines.source_lines(ROOT, PAGES[name].program)
            if not line.lstrip().startswith("//")))) - set(names)
        assert not missing


@pytest.fixture(scope="module")
def programs():
    return program.programs(ROOT)


@pytest.mark.parametrize("name", PROGRAMS[1:])
def test_step(programs, name):
    """The new lines and the removed ones make one program from the other."""
    now, before = programs[name], programs[parent(name)]
    rebuilt = {}
    for at, old in now.step.before.items():
        assert now.source[at] == before.source[old]
        rebuilt[old] = now.source[at]
    for old in sum(now.step.removed.values(), []):
        assert old not in rebuilt
        rebuilt[old] = before.source[old]
    assert sorted(rebuilt) == list(range(len(before.source)))
    assert sorted([*now.step.before, *now.step.new]) == list(range(len(now.source)))


def shown_lines(page):
    """The numbers of the lines of the finished program that are in an excerpt."""
    states = lines.states(page)
    shown = lines.shown_lines(page, states)
    return {at for at, line in enumerate(lines.origins(states)[-1]) if line in shown}


@pytest.mark.parametrize("name", BESIDE)
def test_passages(out, pages, name):
    """Each line leads to the excerpt that shows it, or to the name of what it belongs
    to."""
    page = PAGES[name]
    source = lines.source_lines(ROOT, page.program)
    shown = shown_lines(page)
    words = naming.Naming(page, source, shown)
    text = (out / f"{name}.html").read_text()
    runs = re.search(r'id="passages">(\[.*?\])</script>', text)[1]
    kinds = {}
    for first, last, kind, where, place in json.loads(runs):
        assert place in pages[where or f"{name}.html"].ids
        kinds.update(dict.fromkeys(range(first - 1, last), kind))
    for at in range(len(source) - 1):
        if source[at].strip():
            wanted = "shown" if at in shown else "named" if words.word(at) else None
            assert kinds.get(at) == wanted or wanted is None and kinds.get(at) == "earlier"


def test_notes(pages):
    """Each footnote is an aside, and leads back."""
    for name, page in PAGES.items():
        text = page.prose
        count = len(set(re.findall(r"(?m)^\[\^(\w+)\]:", text)))
        notes = pages[f"{name}.html"].notes
        assert notes == [f"note-{n}" for n in range(1, count + 1)]


def test_figures(tmp_path):
    """Those that have been drawn are shown in both themes, with their text."""
    source = next(block for block in chapters.Page(ROOT, "chapters/6_write.md").blocks
                  if block.info == "mermaid")
    built = book.Book(ROOT, str(tmp_path), str(tmp_path / "figures"))
    digest = subprocess.run(["sha256sum"], input="\n".join(source.lines) + "\n", text=True,
                            capture_output=True, check=True).stdout[:16]
    (tmp_path / "figures").mkdir()
    for theme in "light", "dark":
        (tmp_path / f"figures/{digest}-{theme}.svg").write_text(
            '<svg viewBox="-50 -10 650.5 400"></svg>')
    text = book.Chapter(built, chapters.Page(ROOT, "chapters/6_write.md")).html()
    for theme in "light", "dark":
        assert f'class="{theme}" src="{digest}-{theme}.svg"' in text
    assert 'width="650" height="400"' in text
    assert "client → server: CONNECT (address)" in text
    assert built.not_drawn == 0


def test_manual(tmp_path):
    """A name leads to the page that is about it, and links are followed."""
    (tmp_path / "man3").mkdir()
    (tmp_path / "man7").mkdir()
    page = ('.TH "{0}" "3" "" "" ""\n.SH NAME\n.PP\n{0} - text\n.SH FLAGS\n{1}'
            "\n.SH SEE ALSO\n.PP\n\\f[C]fi_cq\\f[R](3), \\f[C]fi_none\\f[R](3)\n")
    for path, text in {
            "man3/fi_cq.3": page.format("fi_cq", ".TP\n\\f[I]FI_DONE\\f[R]\nIt is."),
            "man3/fi_cq_read.3": ".so man3/fi_cq.3\n",
            "man3/fi_msg.3": page.format("fi_msg", "FI_DONE and FI_DONE"),
            "man3/fi_mr.3": page.format("fi_mr", ".TP\n\\f[I]FI_READ\\f[R]\nA right."),
            "man7/fi_tcp.7": page.format("fi_tcp", ".TP\nFI_DONE\n.TP\nFI_OTHERS")}.items():
        (tmp_path / path).write_text(text)
    found = manual.Manual([str(tmp_path)])
    assert found.link("fi_cq_read").startswith("man/fi_cq.3.html")
    assert found.link("FI_READ") == "man/fi_mr.3.html#FI_READ"
    assert found.link("FI_DONE") == "man/fi_cq.3.html#FI_DONE"
    assert found.link("fi_msg", "3") == "man/fi_msg.3.html"
    assert found.link("FI_OTHER") is None and found.link("fi_msg", "7") is None
    assert found.needed == {"fi_cq(3)", "fi_mr(3)", "fi_msg(3)"}
    text = found.render("fi_msg(3)")
    assert '<a href="fi_cq.3.html">' in text and "fi_none.3.html" not in text


# ---- The menu and the search ----

def test_menu(out, pages):
    """Every page lists all chapters, in their order."""
    for name in pages:
        text = (out / name).read_text()
        menu = re.search("(?s)<ol class=chapters>(.*?)</ol>", text)[1]
        assert re.findall(r'href="(?:\.\./)?(\w+)\.html"', menu) == list(PAGES), name


@pytest.fixture(scope="module")
def index(out):
    return json.loads((out / "search.js").read_text()[len("book.index("):-len(");\n")])


@pytest.mark.parametrize("name", PAGES)
def test_search_knows_all_words(pages, index, name):
    """Of the text, of what is typed and printed, and of the programs."""
    found = [entry for entry in index["text"] if entry[0] == f"{name}.html"]
    assert all(place in pages[f"{name}.html"].ids for _, place, _, _ in found)
    known = "\n".join([text or heading for _, _, heading, text in found] +
                      [line for line, *_ in index["code"]])
    words = re.findall(r"\w+", chapters.without_targets(re.sub(
        r"<[^>]*>|\[\^\w+\]|(?m:^\| -.*|^ *\d+\. )", "", PAGES[name].prose)))
    for block in PAGES[name].blocks:
        words += re.findall(r"\w+" if block.info != "mermaid" else r'"([A-Za-z]+)',
                            "\n".join(block.lines))
    assert not [word for word in words if word not in known]


def test_figures_need_nothing_of_the_page(out, pages):
    """They are pictures with a text, which see no style of the page. One that does not
    know of themes gets a light background."""
    for name, page in pages.items():
        text = re.sub("(?s)<script.*?</script>", "", (out / name).read_text())
        assert text.count("<svg") == text.count('<div class="map"'), name
        for image in page.images:
            assert image["alt"] and image["width"] and image["height"], (name, image)
            path = out / os.path.dirname(name) / image["src"]
            themed = path.suffix == ".svg" and "prefers-color-scheme" in path.read_text()
            assert themed or image.get("class") in ("plain", "light", "dark"), image


# ---- Chapters and programs of other names ----

def small_book(folder, **more):
    """A repository with a program whose chapter has another name, one that two chapters
    are about, and programs of somebody's own."""
    files = {
        "README.md": "# Read me\n", "scripts/README.md": "# Tools\n",
        "chapters/0_start.md": "# 0. Start\n\n[All](../src)\n",
        "chapters/1_first.md": "# 1. The first\n\n[It](../src/1_one.cpp#L2)\n\n"
                               "```cpp\nint one = 1;\n```\n",
        "chapters/2_more.md": "# 2. More\n\n[It](../src/2_more.cpp), `make diff-2`\n\n"
                              "```cpp\nint more = 2;\n```\n",
        "chapters/2_extra.md": "# 2. Extra\n\n[It](../src/2_more.cpp)\n\n"
                               "```cpp\nint extra = 3;\n```\n",
        "chapters/3_end.md": "# 3. End\n\n[It](../src/1_one.cpp)\n",
        "src/1_one.cpp": "// One.\nint one = 1;\n",
        "src/2_more.cpp": "// Based on 1_one.\nint one = 1;\nint more = 2;\nint extra = 3;\n",
        **more}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return build_small(folder)


def build_small(folder):
    (folder / "scripts/book").mkdir()
    for name in "common.sh", "diff.sh", "book/book.css", "book/book.js":
        shutil.copy(f"{ROOT}/scripts/{name}", folder / "scripts" / name)
    book.Book(str(folder), str(folder / "out"), str(folder / "figures")).build()
    return {path.stem: path.read_text() for path in (folder / "out").glob("*.html")}


def test_programs_stand_beside_chapters_of_their_number(tmp_path):
    pages = small_book(tmp_path)
    beside = {name: re.findall(r'aria-label="The program (.*)\.cpp"', text)
              for name, text in pages.items()}
    assert beside == {"index": [], "contributing": [], "0_start": [], "1_first": ["1_one"],
                      "2_more": ["2_more"], "2_extra": ["2_more"], "3_end": []}
    # The main chapter of a program comes first.
    assert 'rel=next href="2_more.html"' in pages["1_first"]
    assert 'rel=prev href="2_more.html"' in pages["2_extra"]
    # Links lead to the chapter that a program is beside.
    assert 'href="#L2"' in pages["1_first"] and 'href="1_first.html#program"' in pages["3_end"]
    assert 'against <a href="1_first.html#program">1_one</a>' in pages["2_more"]
    assert '<a href="#new"><code>make diff-2' in pages["2_more"]
    listed = (tmp_path / "out/files/src.html").read_text()
    assert '<a href="../1_first.html">1_one.cpp</a>' in listed
    # What the other chapter explains, this one says; and what the one before does.
    runs = {name: json.loads(re.search(r'id="passages">(.*?)</script>', text)[1])
            for name, text in pages.items() if beside[name]}
    assert [2, 2, "earlier", "1_first.html", "excerpt-1"] in runs["2_more"]
    assert [3, 3, "shown", "", "excerpt-1"] in runs["2_more"]
    assert [4, 4, "earlier", "2_extra.html", "excerpt-1"] in runs["2_more"]
    assert [3, 3, "earlier", "2_more.html", "excerpt-1"] in runs["2_extra"]
    # Each line of a program is there once.
    index = (tmp_path / "out/search.js").read_text()
    assert '["1_one","1_first.html"]' in index and index.count('"int extra = 3;"') == 1


def test_moves_are_beside_their_sections(tmp_path):
    """The page has the program after each move, as lines of the finished one and others,
    and what is new in it; excerpts, names and headings lead there."""
    write_moves(tmp_path)
    text = build_small(tmp_path)["5_two"]
    rows = Read(tmp_path / "out/5_two.html").rows
    finished = {at: row.removeprefix(str(at)) for at, (_, row) in rows.items()}
    assert "".join(finished.values()) == STATES[2]
    found = moves_of(tmp_path / "out/5_two.html")
    assert list(found) == ["5.1", "5.2"]

    def code(line):
        line = line[1] if isinstance(line, list) else line
        return finished[line] if isinstance(line, int) else html.unescape(
            re.sub("<.*?>", "", line)) + "\n"

    for k, move in enumerate(found.values(), 1):
        groups = [(kind, [code(line) for line in lines_]) for kind, *lines_ in move["lines"]]
        assert "".join(line for kind, lines_ in groups if kind != "gone"
                       for line in lines_) == STATES[k]
        added, removed = moves.counts("5_two", k, tmp_path)
        assert [sum(len(lines_) for kind, lines_ in groups if kind == wanted)
                for wanted in ("new", "gone")] == [added, removed]
        size = f"<b>+{added}</b> <s>−{removed}</s>"
        assert move["size"] == f"{size} against {['4_one', '5.1'][k - 1]}"
        assert re.search(rf'<h2 id="5{k}-a-\w+-one" data-move="5.{k}">.*'
                         + re.escape(size), text)
    # What is only indented differently in the finished program is known to be the same.
    assert any(isinstance(line, list) and line[0] == 4 for _, *lines_ in
               found["5.1"]["lines"] for line in lines_)
    excerpts = re.findall(r'class="excerpt" id="(.*?)" data-lines="(.*?)"(?: data-move="(.*?)")?>'
                          r'<figcaption>\w+ <a href="(.*?)"', text)
    assert excerpts == [
        ("excerpt-1", "8-8", "", "#L8"), ("excerpt-2", "5-6", "5.1", "#L9"),
        ("excerpt-3", "8-9", "5.2", "#L8"), ("excerpt-4", "3-3,5-5,7-7", "5.2", "#L3"),
        ("excerpt-5", "6-6", "", "#L6")]
    # A name leads to what it is after the move, or else in the finished program; without
    # the script, to what is left of it there.
    links = re.findall(r'<a href="([^"]*)" data-lines="(.*?)"(?: data-move="(.*?)")?><code>(\w+)',
                       text)
    assert links == [("#L8", "8-10", "", "fast"), ("#L9", "5-7", "5.1", "slow"),
                     ("#L2", "2-4", "5.1", "one"), ("#L8", "8-10", "5.2", "fast")]
    assert '<a href="#5.2-new"><code>make diff-5.2' in text
    assert found["5.1"]["names"]["slow"] == "#5.1-L5-L7"
    # A line leads to the excerpt of its move, or else to one where it still stands.
    assert [5, 6, "shown", "", "excerpt-2"] in found["5.1"]["passages"]
    runs = json.loads(re.search(r'id="passages">(.*?)</script>', text)[1])
    assert [8, 8, "shown", "", "excerpt-1"] in runs
    assert [9, 9, "shown", "", "excerpt-2"] in runs
    # The search knows what only a move has.
    index = (tmp_path / "out/search.js").read_text()
    for place, line in ("excerpt-2", "int slow() {"), ("excerpt-3", "-int slow() {"):
        assert re.search(rf'\["5_two.html","{place}","[^"]*","{re.escape(line)}"\]', index)


def test_names_may_be_in_any_chapter_of_a_program(tmp_path):
    small_book(tmp_path, **{
        "src/2_more.cpp": "// Based on 1_one.\nint more = fi_read();\n",
        "chapters/2_extra.md": "# 2. Extra\n\n[It](../src/2_more.cpp), `fi_read`\n",
        "chapters/2_more.md": "# 2. More\n\n[It](../src/2_more.cpp)\n"})
    more, extra = (chapters.Page(tmp_path, f"chapters/2_{name}.md")
                   for name in ("more", "extra"))
    assert chapters.check_names(more) == chapters.check_names(extra) == []


# ---- What it takes ----

@pytest.mark.parametrize("missing,figures", [(True, ""), (True, "no"), (False, "")])
def test_says_what_it_installs(tmp_path, missing, figures):
    """Before it does."""
    (tmp_path / "scripts/book").mkdir(parents=True)
    (tmp_path / "build/book").mkdir(parents=True)
    for name in "common.sh", "book/book.sh":
        shutil.copy(f"{ROOT}/scripts/{name}", tmp_path / "scripts" / name)
    for name, said in [("install-deps.sh", "mandoc"), ("book/figures.sh", "to draw: npm")]:
        (tmp_path / "scripts" / name).write_text(
            "#!/bin/bash\n" f'[ "$1" != --list ] || {{ {f"echo {said}" * missing or ":"}; '
            f'exit; }}\necho "runs {name} $*"\n')
        (tmp_path / "scripts" / name).chmod(0o755)
    (tmp_path / "scripts/book/book.py").write_text("")
    done = subprocess.run(["scripts/book/book.sh"], cwd=tmp_path, check=True, text=True,
                          capture_output=True, env={**os.environ, "FIGURES": figures})
    said, runs, _ = done.stdout.partition("runs install-deps.sh build book\n")
    assert runs and ("runs book/figures.sh --book" in done.stdout) == (not figures)
    assert ("to build the pages: mandoc\n" in said) == missing
    assert ("to draw: npm\n" in said) == (missing and not figures)
    assert ("Nothing has to be installed.\n" in said) == (not missing)
