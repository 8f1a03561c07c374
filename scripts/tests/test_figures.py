"""The SVG figures of the chapters: their style, and what a browser would do with it."""

import os
import re
import xml.etree.ElementTree

import pytest

import owner
import style
from repository import ROOT, number, programs

pytestmark = pytest.mark.static

SVG = "{http://www.w3.org/2000/svg}"
FIGURES = [os.path.basename(path) for path in style.figures()]


def check_style(figure):
    """A figure has the style of all, letter for letter, and no colour beside it. All it
    draws has its colours as attributes, so it has them also where neither variables nor
    style sheets are known."""
    assert figure.count(style.SHEET) == 1 and style.styled(figure) == figure
    own = figure.replace(style.SHEET, "")
    assert set(re.findall(r"#[0-9a-fA-F]{6}\b", own)) <= set(style.PALETTE.values())
    assert not re.search(r"var\(|(fill|stroke): ", own)
    root = xml.etree.ElementTree.fromstring(figure)
    for clip in root.iter(f"{SVG}clipPath"):
        clip.clear()
    for shape in ["rect", "path", "circle", "polygon", "text"]:
        for element in root.iter(f"{SVG}{shape}"):
            assert {"fill", "stroke"} & set(element.keys()), element.attrib


@pytest.mark.parametrize("name", FIGURES)
def test_style(name):
    check_style(style.read(f"{ROOT}/chapters/{name}"))


@pytest.mark.parametrize("name", FIGURES)
def test_by_hand(name):
    """A figure says what it shows, one of owner.py where a chapter shows it. Its texts begin
    within it. Each class is in the style."""
    root = xml.etree.ElementTree.parse(f"{ROOT}/chapters/{name}").getroot()
    assert root.find(f"{SVG}title").text
    assert name.endswith("_owner.svg") or root.find(f"{SVG}desc").text
    _, _, width, height = map(float, root.get("viewBox").split())
    assert (root.get("width"), root.get("height")) == (f"{width:g}", f"{height:g}")
    # As it is, so that a text has the same size in all figures.
    assert width == (owner.WIDTH if name.endswith("_owner.svg") else 740)
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
        assert style.read(owner.path_of(chapter)) == owner.draw(figure), chapter
