#!/usr/bin/env python3
"""Builds the book: a page for each chapter, with its program beside it (`make book`). As one
reads, the program shows the lines of the excerpt that is in the middle of the window; a
click on one of its lines leads to the excerpt that has it.

Usage: scripts/book/book.py [OUT]     (build/book)"""

import os
import posixpath
import re
import shutil
import sys
from html import escape

from markdown_it import MarkdownIt
from mdit_py_plugins.footnote import footnote_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CppLexer

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
sys.path += [f"{ROOT}/scripts/{folder}" for folder in ("tests", "book", "moves", ".")]

import chapters  # noqa: E402  (the path has to be known)
import lines  # noqa: E402

PLAIN = HtmlFormatter(nowrap=True)


def coloured(source):
    return highlight(source, CppLexer(stripnl=False), PLAIN)


def title_of(page):
    return escape(re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", chapters.HEADING.search(page.prose)[2]))


def page_name(page):
    return "index.html" if page.path == "README.md" else \
        posixpath.basename(page.path)[:-len(".md")] + ".html"


def build(out):
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    pages = [chapters.Page(ROOT, path) for path in (
        "README.md", *(f"chapters/{name}.md" for name in chapters.chapters(ROOT)))]
    frame = chapters.read(f"{ROOT}/scripts/book/book.html")
    for at, page in enumerate(pages):
        step = "".join(f'<a rel="{rel}" href="{page_name(other)}">{sign}</a>'
                       for rel, sign, others in (("prev", "←", pages[:at][-1:]),
                                                 ("next", "→", pages[at + 1:at + 2]))
                       for other in others)
        menu = "".join(f'<option value="{page_name(other)}"{" selected" * (other is page)}>'
                       f"{title_of(other)}</option>" for other in pages)
        text = Text(pages, page, out)
        parts = {"title": title_of(page), "menu": menu, "step": step,
                 "kind": "two" if page.program else "one", "body": text.html(),
                 "program": text.beside(), "colours": PLAIN.get_style_defs("pre"),
                 "dark": HtmlFormatter(style="monokai").get_style_defs("pre")}
        with open(f"{out}/{page_name(page)}", "w", encoding="utf-8") as file:
            file.write(re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], frame))


class Text:
    """A chapter as HTML, and its program."""

    def __init__(self, pages, page, out):
        self.pages, self.page, self.out = pages, page, out
        self.blocks = {block.line: block for block in page.blocks}
        self.slugs = iter(chapters.slugs(page.prose))
        self.passages = {}  # a line of the program, from 0: the id of the excerpt with it
        if page.program:
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
                    child.attrs["href"] = self.href(child.attrs["href"])
        return parser.renderer.render(tokens, parser.options, env)

    def href(self, target):
        """Where a link leads to in the book: to another page, to the program beside one, or
        to the file in the repository."""
        path, mark, fragment = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return target
        path = posixpath.normpath(posixpath.join(posixpath.dirname(self.page.path), path))
        for other in self.pages:
            if path == other.path:
                return page_name(other) + mark + fragment
            if path == f"src/{other.program}.cpp":
                return f"{page_name(other)}#program"
        return os.path.relpath(f"{ROOT}/{path}", self.out)

    def fence(self, token):
        block = self.blocks[token.map[0] + 2]
        place, name, shown = "", f"excerpt-{block.line}", []
        if self.page.program:
            quoted = lines.quoted(self.page, block, self.states, self.lives)
            shown = sorted(self.finished[life] for life in quoted if life in self.finished)
        for at in shown:
            self.passages.setdefault(at, name)
        if shown:
            place = ' id="{}" data-lines="{}"'.format(name, " ".join(str(at + 1) for at in shown))
        text = coloured(token.content) if block.info == "cpp" else escape(token.content)
        return f"<pre{place}><code>{text}</code></pre>\n"

    def image(self, token):
        path = posixpath.join(posixpath.dirname(self.page.path), token.attrs["src"])
        shutil.copy(f"{ROOT}/{path}", self.out)
        return f'<img src="{posixpath.basename(path)}" alt="{escape(token.content)}">'

    def beside(self):
        """The program, once the text is there. What the step adds has a mark."""
        if not self.page.program:
            return ""
        text = []
        rows = coloured("\n".join(self.states[-1])).split("\n")
        for at, (row, life) in enumerate(zip(rows, self.lives[-1])):
            place = self.passages.get(at)
            kind = " ".join(["new"] * (life[0] > 0 and bool(self.page.before))
                            + ["shown"] * bool(place))
            text.append(f'<span id="L{at + 1}" data-n="{at + 1}" class="{kind}"'
                        + (f' data-passage="{place}"' if place else "") + f">{row}</span>")
        return (f'<section class="program" id="program"><h2>{self.page.program}.cpp</h2>'
                f"<pre>{''.join(text)}</pre></section>")


if __name__ == "__main__":
    build((sys.argv[1:] or [f"{ROOT}/build/book"])[0])
