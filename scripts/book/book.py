#!/usr/bin/env python3
"""Builds the book: a page for each chapter, with its program beside it (`make book`). As one
reads, the program shows the lines of the excerpt that is in the middle of the window; a
click on one of its lines leads to the excerpt that has it.

Usage: scripts/book/book.py [OUT]     (build/book)"""

import html
import os
import posixpath
import re
import shutil
import sys

from markdown_it import MarkdownIt
from mdit_py_plugins.footnote import footnote_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CppLexer

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
sys.path += [f"{ROOT}/scripts/{folder}" for folder in ("tests", "book", "moves")]

import chapters  # noqa: E402  (the path has to be known)
import lines  # noqa: E402

TITLE = "RDMA, step by step"
README = "README.md"
PLAIN = HtmlFormatter(nowrap=True)


def escape(text):
    return html.escape(text, quote=True)


def title_of(page):
    return re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", chapters.HEADING.search(page.prose)[2])


def page_name(path):
    if path == README:
        return "index.html"
    return posixpath.basename(path)[:-len(".md")] + ".html"


class Book:
    def __init__(self, root, out):
        self.root, self.out = root, out
        self.pages = [chapters.Page(root, README)] + [
            chapters.Page(root, f"chapters/{name}.md") for name in chapters.chapters(root)]
        with open(f"{os.path.dirname(os.path.abspath(__file__))}/book.html") as file:
            self.frame = file.read()
        self.not_drawn = 0

    def build(self):
        shutil.rmtree(self.out, ignore_errors=True)
        os.makedirs(self.out)
        for at, page in enumerate(self.pages):
            step = "".join(f'<a rel="{rel}" href="{page_name(other.path)}">{sign}</a>'
                           for rel, sign, other in (
                               ("prev", "←", self.pages[at - 1] if at else None),
                               ("next", "→", (self.pages + [None])[at + 1])) if other)
            menu = "".join(f'<option value="{page_name(other.path)}"'
                           f'{" selected" * (other is page)}>{escape(title_of(other))}</option>'
                           for other in self.pages)
            text = Text(self, page)
            parts = {"title": escape(title_of(page)), "menu": menu, "step": step,
                     "kind": "two" if text.program else "one", "body": text.html(),
                     "program": text.beside(), "colours": PLAIN.get_style_defs("pre"),
                     "dark": HtmlFormatter(style="monokai").get_style_defs("pre")}
            with open(f"{self.out}/{page_name(page.path)}", "w", encoding="utf-8") as file:
                file.write(re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], self.frame))

    def href(self, page, target):
        """Where a link of a page leads to in the book: to another page, to the program beside
        one, or to the file in the repository."""
        path, mark, fragment = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return target
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.path), path))
        for other in self.pages:
            if path == other.path:
                return page_name(path) + mark + fragment
            if other.program and path == f"src/{other.program}.cpp":
                return f"{page_name(other.path)}#{fragment.partition('-')[0] or 'program'}"
        return os.path.relpath(f"{self.root}/{path}", self.out)


class Text:
    """A chapter as HTML, and its program."""

    def __init__(self, book, page):
        self.book, self.page = book, page
        self.program = page.program and os.path.exists(
            f"{book.root}/src/{page.program}.cpp") and page.program
        self.blocks = {block.line: block for block in page.blocks}
        self.slugs = iter(chapters.slugs(page.prose))
        self.figures = 0  # so far
        self.passages = {}  # a line of the program, from 0: the id of the excerpt with it
        if self.program:
            self.states = lines.states(page)
            self.lives = lines.origins(self.states)
            self.finished = {life: at for at, life in enumerate(self.lives[-1])}

    def html(self):
        parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
        parser.use(footnote_plugin)
        parser.add_render_rule("fence", lambda _, tokens, at, *__: self.fence(tokens[at]))
        parser.add_render_rule("image", lambda _, tokens, at, *__: self.image(tokens[at]))
        tokens = parser.parse(self.page.text, env := {})
        for token in tokens:
            if token.type == "heading_open":
                token.attrSet("id", next(self.slugs))
            for child in token.children or []:
                if child.type == "link_open":
                    child.attrs["href"] = self.book.href(self.page, child.attrs["href"])
        return parser.renderer.render(tokens, parser.options, env)

    def shown(self, block):
        """The lines of the finished program that an excerpt or a diff shows, from 0."""
        if not self.program or block.info not in ("cpp", "diff"):
            return []
        move = self.page.move(block.line) or len(self.states) - 1
        return sorted(self.finished[life] for _, numbers in
                      lines.shown_parts(block, self.states[move])
                      for life in [self.lives[move][at] for at in numbers]
                      if life in self.finished)

    def fence(self, token):
        block = self.blocks[token.map[0] + 2]
        if block.info == "mermaid":
            return self.figure(token.content)
        place = ""
        shown = self.shown(block)
        if shown:
            name = f"excerpt-{block.line}"
            for at in shown:
                self.passages.setdefault(at, name)
            place = f' id="{name}" data-lines="{ranges(shown)}"'
        text = (highlight(token.content, CppLexer(stripnl=False), PLAIN)
                if block.info == "cpp" else escape(token.content))
        return f"<pre{place}><code>{text}</code></pre>\n"

    def figure(self, source):
        """A Mermaid figure, if `make figures` has drawn it, or else its text."""
        self.figures += 1
        name = f"{page_name(self.page.path)[:-len('.html')]}-{self.figures}.png"
        if not os.path.exists(f"{self.book.root}/build/figures/{name}"):
            self.book.not_drawn += 1
            return f"<pre>{escape(source)}</pre>\n"
        shutil.copy(f"{self.book.root}/build/figures/{name}", self.book.out)
        return f'<img src="{name}" alt="{escape(source)}">'

    def image(self, token):
        path = posixpath.join(posixpath.dirname(self.page.path), token.attrs["src"])
        shutil.copy(f"{self.book.root}/{path}", self.book.out)
        return f'<img src="{posixpath.basename(path)}" alt="{escape(token.content)}">'

    def beside(self):
        """The program, once the text is there. What the step adds has a mark."""
        if not self.program:
            return ""
        source = "\n".join(self.states[-1])
        rows = highlight(source, CppLexer(stripnl=False), PLAIN).split("\n")
        text = []
        for at, row in enumerate(rows[:len(self.states[-1])]):
            new = len(self.states[0]) > 1 and self.lives[-1][at][0] > 0
            place = self.passages.get(at)
            kind = " ".join(["new"] * new + ["shown"] * bool(place))
            text.append(f'<span id="L{at + 1}" data-n="{at + 1}" class="{kind}"'
                        + (f' data-passage="{place}"' if place else "") + f">{row}</span>")
        return (f'<section class="program" id="program"><h2>{self.program}.cpp</h2>'
                f"<pre>{''.join(text)}</pre></section>")


def ranges(numbers):
    """Numbers from 0 in order, as "3-5,9-9" from 1."""
    found = []
    for at in numbers:
        if found and found[-1][1] == at:
            found[-1][1] = at + 1
        elif not found or found[-1][1] < at:
            found.append([at + 1, at + 1])
    return ",".join(f"{first}-{last}" for first, last in found)


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else f"{ROOT}/build/book"
    book = Book(ROOT, out)
    book.build()
    if book.not_drawn:
        print(f"{book.not_drawn} figures are in the book as text; `make figures` draws them, in "
              "a browser.")


if __name__ == "__main__":
    main()
