"""The SVG figures of the chapters and their style."""

import re
import xml.etree.ElementTree

import pytest

import owner
import style
from repository import number, programs

pytestmark = pytest.mark.static

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("path", style.figures(), ids=lambda path: path.name)
def test_style(path):
    """A figure has the style of all, letter for letter, and no colour beside it. It says
    what it shows, one of owner.py where a chapter shows it, and has the size of all."""
    figure = path.read_text()
    assert figure.count(style.SHEET) == 1 and style.styled(figure) == figure
    own = figure.replace(style.SHEET, "")
    assert set(re.findall(r"#[0-9a-fA-F]{6}\b", own)) <= set(style.PALETTE.values())
    assert not re.search(r"var\(|(fill|stroke): ", own)
    root = xml.etree.ElementTree.fromstring(figure)
    owned = path.name.endswith("_owner.svg")
    assert root.find(f"{SVG}title").text and (owned or root.find(f"{SVG}desc").text)
    _, _, width, height = map(float, root.get("viewBox").split())
    assert (root.get("width"), root.get("height")) == (f"{width:g}", f"{height:g}")
    assert width == (owner.WIDTH if owned else 740)
    for element in root.iter():
        for role in element.get("class", "").split():
            assert role in style.ROLES or f"\n.{role} " in style.SHEET, role


def test_owners():
    """Each chapter from 4 on has the figure that scripts/book/owner.py draws. Whoever
    sleeps (12) owns what he owned before."""
    assert sorted(owner.FIGURES) == [
        number(program) for program in programs()
        if number(program) >= 4 and number(program) != 12]
    for chapter, figure in owner.FIGURES.items():
        assert owner.path_of(chapter).read_text() == owner.draw(figure), chapter
