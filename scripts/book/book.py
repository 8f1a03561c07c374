#!/usr/bin/env python3
"""Builds the book: a page for each chapter, with its program beside it. `make book`.

Usage: scripts/book/book.py [OUT]     (build/book)

The Markdown stays what GitHub shows. What the page adds comes from the program: where
an excerpt stands in it, what is new, and what a name means."""

import hashlib
import html
import json
import os
import posixpath
import re
import shutil
import struct
import sys

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.footnote import footnote_plugin
from pygments.lexers import BashLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
sys.path += [f"{ROOT}/scripts/{folder}" for folder in ("tests", "book", "moves")]

import chapters  # noqa: E402  (the path has to be known)
import manual  # noqa: E402
import program  # noqa: E402

TITLE = "RDMA, step by step"
# The Markdown files that are no chapters.
OTHERS = {"README.md": "index.html", "scripts/README.md": "contributing.html"}
# What readers look for under a name that the chapters do not use, and their own words
# for it. The first is a pattern, and is found with any ending.
SAME = [["torn", "mix of old", "half of the old"], ["tear", "mix of old", "half of the old"],
        ["throughput", "bandwidth"], ["out.of.order", "any order", "overtak", "reorder"],
        ["flow.control", "credit"], ["back.?pressure", "credit"], ["time.?out", "gives up"],
        ["spin", "poll"], ["mutex", "lock"], ["zero.copy", "copies nothing", "without copying"]]


def escape(text):
    return html.escape(text, quote=True)


def page_name(path):
    """The file in the book for a file of the repository."""
    if path in OTHERS:
        return OTHERS[path]
    name = posixpath.basename(path)
    if path.startswith("chapters/") and path.endswith(".md"):
        return name.removesuffix(".md") + ".html"
    return "files/" + path.replace("/", "-") + ".html"


class Book:
    def __init__(self, root, out, figures):
        self.root, self.out, self.figures = root, out, figures
        self.manual = manual.Manual()
        self.programs = program.programs(root)
        self.pages = [chapters.Page(root, f"chapters/{name}.md")
                      for name in chapters.chapters(root)]
        self.titles = {page.path: title_of(page) for page in self.pages}
        self.files = set()  # files of the repository that a page links to
        self.search = []
        self.not_drawn = 0

    def write(self, name, text):
        path = f"{self.out}/{name}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def build(self):
        shutil.rmtree(self.out, ignore_errors=True)
        os.makedirs(self.out)
        for name in "book.css", "book.js":
            shutil.copy(f"{self.root}/scripts/book/{name}", self.out)
        # A line may lead to a chapter that comes later, so all of them are read first.
        for chapter in [Chapter(self, page) for page in [
                *self.pages, *(chapters.Page(self.root, path) for path in OTHERS)]]:
            self.write(page_name(chapter.page.path), chapter.html())
        for path in sorted(self.files):
            self.write(page_name(path), self.file_page(path))
        for page in sorted(self.manual.needed):
            self.write(f"man/{manual.file_name(page)}", self.frame(
                f"<article><h1>{page}</h1>{self.manual.render(page)}</article>", page,
                depth=1, kind="manual"))
        self.write("search.js", self.search_index())
        # Tells GitHub's pages to leave the files as they are.
        self.write(".nojekyll", "")

    def program_of(self, page):
        """The program as a chapter has it, or None."""
        found = self.programs.get(page.program)
        return found and next(one for one in found.all if one.page.path == page.path)

    def new_lines(self, number, page):
        """How a page leads to what a program adds, of 5, or a move, of 5.3. None if the
        book shows it nowhere."""
        step, _, move = number.partition(".")
        for name, found in self.programs.items():
            tell = [one for one in found.all if chapters.number(name) == int(step) and (
                not move or int(move) in [known.move for known in one.told])]
            if tell:
                here = page.path in [one.page.path for one in tell]
                return ("" if here else tell[0].address) + (
                    f"#{number}-new" if move else "#new")
        return None

    def address(self, path):
        """The page for a file of the repository: a program is beside its chapter."""
        found = re.fullmatch(r"src/(.*)\.cpp", path)
        if found and found[1] in self.programs:
            return self.programs[found[1]].address
        return page_name(path)

    def file_page(self, path):
        """A file of the repository that is no program of the book's, or a folder."""
        if os.path.isdir(f"{self.root}/{path}"):
            # Those that have a page.
            known = {page_name(page.path) for page in self.pages}
            where = {name: self.address(f"{path}/{name}")
                     for name in sorted(os.listdir(f"{self.root}/{path}"))}
            text = "<ul>" + "".join(
                f'<li><a href="../{page}">{name}</a></li>'
                for name, page in where.items() if page in known) + "</ul>"
        else:
            try:
                lexer = get_lexer_for_filename(path, stripnl=False)
            except ClassNotFound:
                lexer = BashLexer(stripnl=False)
            rows = program.highlight(chapters.read(f"{self.root}/{path}"), lexer)
            text = '<div class="code whole" tabindex="0">' + "".join(
                f"<div id=L{n}><i>{n}</i>{row}\n</div>"
                for n, row in enumerate(rows, 1)) + "</div>"
        return self.frame(f"<article><h1>{escape(path)}</h1>{text}</article>", path,
                          depth=1, kind="file")

    def search_index(self):
        """What the search looks through, as a script: a page that is opened as a file
        may load nothing else."""
        where = {}  # a line of code: the programs that have it, and where
        for number, found in enumerate(self.programs.values()):
            for at, line in enumerate(found.source, 1):
                if re.search(r"\w{2}", line):
                    where.setdefault(line.strip(), []).append([number, at])
        index = {"programs": [[found.name, found.address]
                              for found in self.programs.values()],
                 "text": self.search, "same": SAME,
                 "code": [[line, *places] for line, places in where.items()]}
        return "book.index(" + json.dumps(index, ensure_ascii=False,
                                          separators=(",", ":")) + ");\n"

    # ---- What is around each page ----

    def frame(self, body, title, page=None, depth=0, kind="", sections=()):
        up = "../" * depth
        names = [known.path for known in self.pages]
        at = names.index(page.path) if page and page.path in names else None
        before = names[at - 1] if at else None
        after = names[at + 1] if at is not None and at + 1 < len(names) else None
        if page and page.path == "README.md":
            after = names[0]

        def step(path, rel, text):
            if not path:
                return ""
            title = escape(self.titles[path])
            return (f'<a class=step rel={rel} href="{up}{page_name(path)}" '
                    f'title="{title}">{text}<span>{title}</span></a>')

        menu = ["<ol class=chapters>"]
        for path in names:
            here = page and path == page.path
            # A phone shows "6. Write" of "6. Write: into somebody else's memory".
            short, rest = re.fullmatch(r"(\d\S*\. [^:]*|.*)(: .*|)",
                                       escape(self.titles[path])).groups()
            menu.append(f'<li><a href="{up}{page_name(path)}"'
                        + ' aria-current="page"' * bool(here)
                        + f">{short}<span>{rest}</span></a></li>")
        menu.append("</ol>")
        if sections:
            menu.append("<div class=sections><p>On this page</p><ol>" + "".join(
                f'<li><a href="#{slug}">{text}</a></li>' for slug, text in sections)
                + "</ol></div>")
        current = escape(title) if at is None else escape(self.titles[page.path])
        if title == TITLE:
            current = "Chapters"
        full = title if title == TITLE else f"{title} · {TITLE}"
        return f"""<!DOCTYPE html>
<html lang="en" data-up="{up}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(full)}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="{up}book.css">
<script src="{up}book.js"></script>
</head>
<body class="{kind}">
<a class="skip" href="#text">Skip to the text</a>
<header class="bar">
<a class="home" href="{up}index.html">{TITLE}</a>
<nav aria-label="Chapters">
{step(before, "prev", "←")}
<details class="menu"><summary>{current}</summary>
<div class=panel>{"".join(menu)}</div></details>
{step(after, "next", "→")}
</nav>
<div class="tools">
<button type="button" data-do="search" title="Search (/)">Search</button>
<button type="button" data-do="theme" title="Light or dark (t)">Theme</button>
<button type="button" data-do="help" title="Keys (?)">Keys</button>
</div>
</header>
<main id="text" tabindex="-1">
{body}
</main>
</body>
</html>
"""


def title_of(page):
    return inline_text(chapters.HEADING.search(page.prose)[2])


def inline_text(markdown):
    return re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", markdown)


class Chapter:
    """One page: a chapter, or a README."""

    def __init__(self, book, page):
        self.book, self.page = book, page
        self.program = book.program_of(page)
        self.blocks = {block.line: block for block in page.blocks}
        self.slugs = iter(chapters.slugs(page.prose))
        self.sections = []  # of level 2: their #fragments and titles
        self.heading = ("", title_of(page))
        self.paragraphs = 0
        self.move = None  # that of the section which is being read
        if self.program:
            self.names = {found.name for one in [self.program, *self.program.told]
                          for found in one.naming.definitions}
            self.finished_lines = {line.strip() for line in self.program.source}
        self.body = self.read()

    # ---- Links ----

    def href(self, target):
        """Where a link of the Markdown file leads to in the book."""
        path, _, fragment = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return target
        path = posixpath.normpath(posixpath.join(
            posixpath.dirname(self.page.path), path))
        name = self.book.address(path)
        if name.startswith("files/"):
            self.book.files.add(path)
        elif path.endswith(".cpp"):
            # Of the lines that a link names, the first has a place.
            fragment = fragment.partition("-")[0] or "program"
        if fragment and name == page_name(self.page.path):
            name = ""
        return name + (fragment and f"#{fragment}")

    def mention(self, text, move=None):
        """What a piece of code in the text leads to: a definition in the program, that
        after the move whose section it is in first, or a manual page. None if nothing."""
        name = re.fullmatch(r"((?:\w+::)?~?\w+)(?:\(\))?", text)
        for one in [move, None] if self.program and name else []:
            found = self.program.at(one).targets.get(name[1])
            if found:
                return self.program.at(one).plain_place(found.first, found.last), {
                    "data-lines": f"{found.first + 1}-{found.last + 1}",
                    **({"data-move": self.program.at(one).name} if one else {})}
        known = re.fullmatch(r"man ([137]) (f\w+)|(fi_info) .*", text)
        if known:
            link = self.book.manual.link(known[2] or known[3], known[1] or "1")
        else:
            known = re.fullmatch(rf"-?({chapters.NAME.pattern})(\(\))?", text)
            link = known and self.book.manual.link(known[1])
        if link:
            return link, {"class": "man"}
        number = re.fullmatch(r"make diff-(\d+(?:\.\d+)?)", text)
        link = number and self.book.new_lines(number[1], self.page)
        return (link, {}) if link else None

    # ---- Blocks ----

    def fence(self, token):
        block = self.blocks[token.map[0] + 2]
        place = token.attrGet("id")
        if block.info == "mermaid":
            return self.figure("".join(f"{line}\n" for line in block.lines), place)
        beside = self.program and self.program.at(self.page.move(block.line))
        if block.info in chapters.CPP and beside:
            text, ranges = beside.excerpt(block)
            if text:
                return self.excerpt(block, text, ranges)
        if block.info == "diff" and beside:
            ranges = [where for _, where in beside.excerpts.get(block.line, [])]
            rows = "".join(
                f"<{tag}>{escape(line)}\n</{tag}>" if tag else escape(line) + "\n"
                for line in block.lines
                for tag in [{"+": "ins", "-": "del"}.get(line[:1])])
            return self.excerpt(block, rows, ranges)
        if block.info == "console":
            text = "".join(
                "<span>" + re.sub(r"^(\$ )(.*)", r"<i>\1</i><b>\2</b>", escape(line))
                + "\n</span>" for line in block.lines)
        elif block.info == "sh":
            text = "\n".join(program.highlight(token.content, BashLexer()))
        elif block.info in chapters.CPP:
            text = "\n".join(program.highlight(token.content))
        else:
            text = escape(token.content)
        return (f'<pre class="{block.info}" id="{place}" tabindex="0"><code>{text}</code>'
                "</pre>\n")

    def excerpt(self, block, text, ranges):
        """An excerpt, with where it stands in the program, or in what this is after the
        move."""
        if not ranges:
            return f'<pre class="{block.info}" tabindex="0"><code>{text}</code></pre>\n'
        beside = self.program.at(self.page.move(block.line))
        move = f' data-move="{beside.name}"' if beside.move else ""
        links = []
        for where in ranges:
            first, last = where[0] + 1, where[-1] + 1
            links.append(f'<a href="{beside.plain_place(where[0], where[-1])}" '
                         f'data-lines="{first}-{last}">'
                         + (f"{first} to {last}" if last > first else f"{first}") + "</a>")
        said = ", ".join(links[:-1]) + " and " * (len(links) > 1) + links[-1]
        said = ("line " if len(ranges) == 1 and len(ranges[0]) == 1 else "lines ") + said
        # Lines from the middle of something say of what.
        around = [found.name for found in beside.naming.around(ranges[0][0])
                  if found.first < ranges[0][0] and found.kind == "function"]
        if around:
            said += f", in <code>{escape(around[-1])}</code>"
        lines = ",".join(f"{where[0] + 1}-{where[-1] + 1}" for where in ranges)
        return (f'<figure class="excerpt" id="{self.program.ids[block.line]}" '
                f'data-lines="{lines}"{move}><figcaption>{said}</figcaption>'
                f'<pre class="{block.info}" tabindex="0"><code>{text}</code></pre>'
                "</figure>\n")

    def figure(self, source, place):
        """A Mermaid figure, which has been drawn in both themes, and its text."""
        digest = hashlib.sha256(source.encode()).hexdigest()[:16]
        images = []
        for theme in "light", "dark":
            path = f"{self.book.figures}/{digest}-{theme}.svg"
            if not os.path.exists(path):
                self.book.not_drawn += 1
                return (f'<pre class="mermaid" id="{place}" tabindex="0"><code>'
                        f"{escape(source)}</code></pre>\n")
            shutil.copy(path, self.book.out)
            images.append(f'<img class="{theme}" src="{digest}-{theme}.svg" '
                          f'alt="A figure; its text is below it." {size_of(path)}>')
        return (f'<figure class="drawn" id="{place}"><div class="wide" tabindex="0">'
                f'{"".join(images)}</div><details><summary>The figure as '
                f"text</summary><ul>{figure_text(source)}</ul></details></figure>\n")

    def beside(self, token):
        """The file of a picture."""
        return f"{self.page.root}/{posixpath.dirname(self.page.path)}/{token.attrs['src']}"

    def image(self, token):
        """A picture beside the chapter."""
        path = self.beside(token)
        shutil.copy(path, self.book.out)
        # A picture that does not know of themes stays as light as it is.
        themed = path.endswith(".svg") and "prefers-color-scheme" in chapters.read(path)
        plain = "" if themed else ' class="plain"'
        return (f'<span class="wide" tabindex="0"><img{plain} '
                f'src="{posixpath.basename(path)}" alt="{escape(token.content)}" '
                f"{size_of(path)}></span>")

    # ---- Markdown ----

    def read(self):
        """The text as HTML."""
        parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
        parser.use(footnote_plugin)
        rules = {"fence": lambda _, tokens, at, *__: self.fence(tokens[at]),
                 "code_inline": lambda _, tokens, at, *__: self.code(tokens, at),
                 "image": lambda _, tokens, at, *__: self.image(tokens[at]),
                 "footnote_ref": lambda _, tokens, at, *__: self.footnote_ref(tokens[at]),
                 "table_open": lambda *_: '<div class="table" tabindex="0"><table>\n',
                 "table_close": lambda *_: "</table></div>\n"}
        for name, rule in rules.items():
            parser.add_render_rule(name, rule)
        env = {}
        tokens = parser.parse(self.page.text, env)
        self.parser, self.env = parser, env
        for token in tokens:
            for child in token.children or []:
                if child.type == "link_open":
                    child.attrs["href"] = self.href(child.attrs["href"])
        notes, tokens = self.take_notes(tokens)
        return parser.renderer.render(self.with_places(tokens, notes), parser.options, env)

    def html(self):
        """The page."""
        kind = "chapter"
        title = self.heading_title
        article = f"<article>\n{self.body}</article>\n"
        if self.program:
            kind += " two"
            article += self.program_html()
        return self.book.frame(article, TITLE if self.page.path == "README.md" else title,
                               self.page, kind=kind, sections=self.sections)

    def take_notes(self, tokens):
        """The footnotes by their numbers, and the tokens without them."""
        notes, rest, note = {}, [], None
        for token in tokens:
            if token.type == "footnote_open":
                note = notes.setdefault(token.meta["id"], [])
            elif token.type == "footnote_close":
                note = None
            elif note is not None:
                if token.type != "footnote_anchor":
                    note.append(token)
            elif not token.type.startswith("footnote_block"):
                rest.append(token)
        return notes, rest

    def footnote_ref(self, token):
        number = token.meta["id"] + 1
        # A note that is referred to twice leads back to the first place.
        place = "" if token.meta["subId"] else f' id="ref-{number}"'
        return (f'<sup class="ref"><a href="#note-{number}"{place} '
                f'aria-label="Note {number}">{number}</a></sup>')

    def with_places(self, tokens, notes):
        """The tokens with an id for each heading and block. Each footnote comes right
        after the block that refers to it."""
        done, waiting = [], []
        in_table = 0
        for at, token in enumerate(tokens):
            if token.type == "th_open" and not tokens[at + 1].content:
                # An empty cell heads nothing.
                token.tag = tokens[at + 2].tag = "td"
            in_table += {"table_open": 1, "table_close": -1}.get(token.type, 0)
            if token.type == "heading_open":
                if token.tag in ("h1", "h2"):
                    self.move = self.page.move(token.map[0] + 1)
                self.heading_open(token, tokens[at + 1])
            elif token.type == "fence":
                self.paragraphs += 1
                token.attrSet("id", f"p{self.paragraphs}")
                self.find_block(self.blocks[token.map[0] + 2])
            elif token.level == 0 and token.nesting == 1:
                self.paragraphs += 1
                token.attrSet("id", f"p{self.paragraphs}")
                if token.type == "table_open":
                    done.append(html_token(f'<div id="p{self.paragraphs}">'))
            if token.type == "inline":
                self.set_move(token)
                self.find_text(token)
                waiting += [child.meta["id"] for child in token.children
                            if child.type == "footnote_ref" and not child.meta["subId"]]
            done.append(token)
            if token.type == "table_open":
                token.attrs.pop("id", None)
            if token.type == "table_close" and token.level == 0:
                done.append(html_token("</div>\n"))
            if waiting and not in_table and token.type in ("paragraph_close", "table_close"):
                for note in waiting:
                    done += self.note(note, notes.get(note, []))
                waiting = []
        return done

    def note(self, note, tokens):
        for token in tokens:
            if token.type == "inline":
                self.set_move(token)
                self.find_text(token, f"note-{note + 1}")
        return [html_token(f'<aside class="note" role="note" id="note-{note + 1}"><a class="number" '
                           f'href="#ref-{note + 1}" aria-label="Back to the text">'
                           f"{note + 1}</a>\n"), *tokens, html_token("</aside>\n")]

    def set_move(self, token):
        """Tells each name in a text in which move's section it is."""
        for child in token.children:
            if child.type == "code_inline":
                child.meta["move"] = self.move

    def heading_open(self, token, inline):
        slug = next(self.slugs)
        token.attrSet("id", slug)
        text = self.parser.renderer.render([inline_without_links(inline)],
                                           self.parser.options, self.env)
        if token.tag == "h1":
            self.heading_title = re.sub("<[^>]*>", "", text)
            self.heading_title = html.unescape(self.heading_title)
        elif token.tag == "h2":
            self.sections.append((slug, text))
        self.heading = (slug, plain(inline))
        self.book.search.append([page_name(self.page.path), slug, plain(inline), ""])
        mark = Token("html_inline", "", 0)
        mark.content = (f' <a class="here" href="#{slug}" '
                        f'aria-label="Link to “{escape(plain(inline))}”">#</a>')
        inline.children.append(mark)
        if token.tag == "h2" and self.move:
            found = self.program.at(self.move)
            token.attrSet("data-move", found.name)
            mark.content = (f' <a class="adds" href="#{found.name}-new" '
                            f'title="What this move adds">{counts(found)}</a>') + mark.content

    def find(self, text, place=None):
        """Puts a text into the index of the search."""
        self.book.search.append([page_name(self.page.path), place or f"p{self.paragraphs}",
                                 self.heading[1], " ".join(text.split())])

    def find_text(self, token, place=None):
        """A block's text, with that in its pictures."""
        if plain(token) != self.heading[1]:
            self.find(" ".join([plain(token), *(
                svg_text(self.beside(child)) for child in token.children
                if child.type == "image" and child.attrs["src"].endswith(".svg"))]), place)

    def find_block(self, block):
        """What has been typed and printed, and figures. The search knows the lines of the
        programs already."""
        if block.info == "mermaid":
            source = "".join(f"{line}\n" for line in block.lines)
            self.find(html.unescape(re.sub("<[^>]*>", " ", figure_text(source))))
        elif not (self.program and block.line in self.program.ids):
            self.find(" ".join(block.lines))
        elif self.page.move(block.line):
            only_here = [line for line in block.lines
                         if line.lstrip("+- ") not in self.finished_lines]
            if only_here:
                self.find(" ".join(only_here), self.program.ids[block.line])

    def code(self, tokens, at):
        """Code within the text. The first mention of a name gets a place of its own, to
        which the lines of the program lead."""
        text = tokens[at].content
        place = ""
        if self.program:
            for word in re.findall(r"~?\w+", text):
                if word in self.names and word not in self.program.mentioned:
                    self.program.mentioned.add(word)
                    place += f'<span id="name-{word}"></span>'
        code = f"<code>{escape(text)}</code>"
        link = self.mention(text, tokens[at].meta.get("move"))
        if link and not in_link(tokens, at):
            attributes = "".join(f' {name}="{escape(value)}"'
                                 for name, value in link[1].items())
            code = f'<a href="{escape(link[0])}"{attributes}>{code}</a>'
        return place + code

    # ---- The program ----

    def meaning(self, word, program):
        """Where a name in the program is explained: its definition there, or a manual
        page. None if nowhere."""
        found = program.targets.get(word)
        if found:
            return program.place(found.first, found.last)
        return chapters.NAME.fullmatch(word) and self.book.manual.link(word)

    def meanings(self, program):
        names = {word: self.meaning(word, program) for word in program.words()}
        return {word: where for word, where in names.items() if where}

    def move_for_script(self, found):
        """The program after a move."""
        runs = found.passages()
        return {"name": found.name, "size": f"{counts(found)} against {found.parent.name}",
                "lines": found.lines_for_script(), "map": found.map(runs),
                "passages": runs, "names": self.meanings(found)}

    def program_html(self):
        found = self.program
        runs = found.passages()
        names = self.meanings(found)
        name = f"{found.name}.cpp"
        views = said = ""
        legend = "<i class=shown></i>shown <i class=named></i>named in the chapter"
        if found.parent:
            legend += " <i class=new></i>new"
            said = (f'<span class="size">{counts(found)} against '
                    f'<a href="{found.parent.address}#program">{found.parent.name}</a>'
                    "</span>")
            views = ('<span class="views" role="group" aria-label="What to show">'
                     '<button type="button" data-view="all" aria-pressed="true">All'
                     '</button><button type="button" data-view="new" '
                     'aria-pressed="false" title="Only what is new (n)">New</button></span>')
        told = ""
        if found.told:
            views = ('<span class="views which" role="group" aria-label="Which program" hidden>'
                     '<button type="button" data-which="move" aria-pressed="false"></button>'
                     '<button type="button" data-which="finished" aria-pressed="true" '
                     'title="The program at the end of the chapter (f)">Finished</button>'
                     f"</span>{views}")
            told = ('<script type="application/json" id="program-moves">'
                    + to_json([self.move_for_script(one) for one in found.told])
                    + "</script>\n")
        return f"""<section class="program" id="program" aria-label="The program {name}">
<header><h2>{name}</h2>{said}{views}
<div class="below"><p class="state"></p><p class="legend">{legend}</p></div></header>
<div class="pane">
<div class="code" tabindex="0" role="region" aria-label="{name}">{found.rows()}</div>
<div class="map" title="The whole program: shown or named in the chapter; new">{found.map(runs)}<div class="view"></div></div>
</div>
<script type="application/json" id="passages">{to_json(runs)}</script>
<script type="application/json" id="names">{to_json(names)}</script>
{told}</section>
"""


def to_json(what):
    """For a page: nothing in it ends the script."""
    return json.dumps(what, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")


def counts(program):
    """How many lines it adds and removes."""
    removed, added = program.step.size
    return f"<b>+{added}</b> <s>−{removed}</s>"


def html_token(text):
    token = Token("html_block", "", 0)
    token.content = text
    return token


def in_link(tokens, at):
    """Whether a token is in a link: links can't be in each other."""
    types = [token.type for token in tokens[:at]]
    return types.count("link_open") > types.count("link_close")


def plain(inline):
    """The text of a block as it is read."""
    return "".join(
        {"softbreak": " ", "hardbreak": " "}.get(child.type, child.content)
        for child in inline.children if child.type != "html_inline")


def inline_without_links(inline):
    token = Token("inline", "", 0)
    token.children = []
    for child in inline.children:
        if child.type == "code_inline":
            text = Token("html_inline", "", 0)
            text.content = f"<code>{escape(child.content)}</code>"
            token.children.append(text)
        elif not child.type.startswith("link_"):
            token.children.append(child)
    return token


def size_of(path):
    """The attributes that keep a picture's place free until it is there."""
    if path.endswith(".png"):
        with open(path, "rb") as file:
            width, height = struct.unpack(">16x2I", file.read(24))
        return f'width="{width}" height="{height}"'
    box = re.search(r'viewBox="\s*\S+\s+\S+\s+(\S+)\s+([\d.]+)\s*"', chapters.read(path))
    if not box:
        return ""
    return f'width="{round(float(box[1]))}" height="{round(float(box[2]))}"'


def svg_text(path):
    """The words in a picture."""
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", text)) for text in re.findall(
        r"(?s)<text\b.*?</text>", chapters.read(path)))


def figure_text(source):
    """A Mermaid figure in words, a list item for each of its lines."""
    names, items = {}, []
    # The labels of nodes and participants, wherever they are introduced.
    for name, label in re.findall(r'(\w+)\["?(.*?)"?\]', source) + \
            re.findall(r"(?:participant|actor)\s+(\w+)\s+as\s+(.*)", source):
        names[name] = label
    for line in source.splitlines()[1:]:
        line = re.sub(r'(\w+)\[.*?\]', r"\1", line.strip())
        if not line or re.match(r"participant|actor|style|class|linkStyle|%%|end$", line):
            continue
        line, colon, text = line.partition(":")
        note = re.match(r"Note (?:over|left of|right of) (.*)", line)
        line = note[1] if note else re.sub(
            r"\s*(-->>|->>|--\)|-\)|-->|-\.->|---)\s*(\|.*?\|)?", r" → ", line)
        line = re.sub(r"\w+", lambda match: names.get(match[0], match[0]), line)
        line = re.sub(r"</?[bi]>", "", re.sub(r"<br ?/?>", " ", f"{line}{colon}{text}"))
        items.append(f"<li>{escape(line)}</li>")
    return "".join(items)


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else f"{ROOT}/build/book"
    book = Book(ROOT, out, f"{ROOT}/build/figures/book")
    book.build()
    if book.not_drawn:
        print(f"{book.not_drawn} figures are in the book as text, because they have not "
              "been drawn.")
    if not book.manual.texts:
        print("libfabric's manual pages are not installed here, so nothing leads to "
              "them.")


if __name__ == "__main__":
    main()
