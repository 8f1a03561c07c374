"""The pages of `make book`: every link leads somewhere, and an excerpt shows its lines in the
program beside it."""

import os
import re
import urllib.parse

import pytest

import chapters
from repository import ROOT

pytest.importorskip("markdown_it", reason="scripts/install-deps.sh book installs it")
import book  # noqa: E402

# In one worker, which builds the book once.
pytestmark = pytest.mark.xdist_group("book")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The texts of the pages, by their names."""
    out = tmp_path_factory.mktemp("book") / "out"
    book.build(str(out))
    return out, {path.name: path.read_text() for path in sorted(out.glob("*.html"))}


def test_links(pages):
    """They lead to a page of the book that has the place, to a file of the repository, or
    into the web. Nothing is loaded that isn't beside the page."""
    out, texts = pages
    ids = {name: re.findall(r' id="([^"]*)"', text) for name, text in texts.items()}
    dead = []
    for name, text in texts.items():
        assert len(ids[name]) == len(set(ids[name])), name
        assert not re.findall(r'(?:src|rel="stylesheet" href)="(?:https?:|//)', text), name
        assert all((out / path).exists() for path in re.findall(r'<img[^>]* src="([^"]*)"', text))
        for href in re.findall(r'<a [^>]*href="([^"]*)"', text):
            path, _, fragment = urllib.parse.unquote(href).partition("#")
            target = path or name
            if not re.match("[a-z]+:", href) and not (
                    not fragment or fragment in ids[target] if target in texts
                    else os.path.exists(out / path)):
                dead.append(f"{name}: {href}")
    assert not dead


@pytest.mark.parametrize("name", chapters.chapters(ROOT))
def test_excerpts(pages, name):
    """The lines that an excerpt of a finished program names are those that it shows, and
    a click on one of them leads back."""
    page, text = chapters.Page(ROOT, f"chapters/{name}.md"), pages[1][f"{name}.html"]
    for block in page.blocks:
        found = re.search(rf'id="excerpt-{block.line}" data-lines="([^"]*)"', text)
        if not found or block.info == "diff" or page.move(block.line):
            continue
        source = chapters.to_lines(chapters.read(f"{ROOT}/src/{page.program}.cpp"))
        shown = [source[int(at) - 1] for at in found[1].split()]
        assert shown == [line for line in block.lines if line in shown], block.line
    places = re.findall(r'id="L(\d+)"[^>]* data-passage="([^"]*)"', text)
    assert bool(places) == ('data-lines="' in text)
    for at, place in places:
        assert at in re.search(rf'id="{place}" data-lines="([^"]*)"', text)[1].split()
