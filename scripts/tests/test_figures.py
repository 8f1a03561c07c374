"""The SVG figures of the chapters and their style."""

import re
import xml.etree.ElementTree

import pytest

import style

pytestmark = pytest.mark.static

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("path", style.figures(), ids=lambda path: path.name)
def test_style(path):
    """A figure has the style of all, letter for letter, and no colour beside it. It says
    what it shows, and has the size of all. "Who owns it now?" is narrower, for telephones,
    and says more where a chapter shows it."""
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
    assert width == (520 if owned else 740)
    for element in root.iter():
        for role in element.get("class", "").split():
            assert role in style.ROLES or f"\n.{role} " in style.SHEET, role
