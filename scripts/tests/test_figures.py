"""The SVG figures of the chapters: their style, and what a browser would do with it."""

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree

import pytest

import owner
import style
from repository import ROOT, number, programs

pytestmark = pytest.mark.static

SVG = "{http://www.w3.org/2000/svg}"
FIGURES = [os.path.basename(path) for path in style.figures()]
# Not drawn by matplotlib.
BY_HAND = [name for name in FIGURES if not name.endswith("_bench.svg")]


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


def test_chart():
    """What matplotlib writes gets the style. So does a chart of the days when the colours
    were variables."""
    lines = ('<svg xmlns="http://www.w3.org/2000/svg" height="560pt" width="740pt">\n'
             ' <defs>\n  <style>*{stroke-linejoin: round}</style>\n </defs>\n'
             ' <path d="M 0 0 \nL 1 1" style="fill: none; stroke: %s; stroke-width: 2"/>\n'
             ' <text style="font: 16px sans; text-anchor: end; fill: %s" x="1">a</text>\n'
             '</svg>\n')
    chart = style.themed(lines % (style.PALETTE["blue"], style.PALETTE["text"]))
    check_style(chart)
    assert (' <path fill="none" stroke="#0969da" d="M 0 0 \nL 1 1" '
            'style="stroke-width: 2"/>\n') in chart
    assert ' <text fill="#1f2328" style="text-anchor: end" x="1">a</text>\n' in chart
    assert chart == style.themed(lines % ("var(--blue)", "var(--text)"))


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    """A figure says what it shows, and its texts begin within it. Each class is in the
    style."""
    root = xml.etree.ElementTree.parse(f"{ROOT}/chapters/{name}").getroot()
    assert root.find(f"{SVG}title").text and root.find(f"{SVG}desc").text
    _, _, width, height = map(float, root.get("viewBox").split())
    assert (root.get("width"), root.get("height")) == (f"{width:g}", f"{height:g}")
    # As it is, so that a text has the same size in all figures.
    assert width == (owner.WIDTH if name.endswith("_owner.svg") else 740)
    for element in root.iter():
        for role in element.get("class", "").split():
            assert role in style.ROLES or f"\n.{role} " in style.SHEET, role


# Thousandths of the font's size, of Helvetica; 556 for any other letter.
WIDTHS = {letter: width for width, letters in {
    191: "'", 222: "ijl", 278: " !,./:;I[]ft", 333: "()-r", 500: "ckszvxyJ", 611: "FTZ",
    667: "ABEKPSVXY&", 722: "CDHNRUw", 778: "GOQ", 833: "mM", 944: "W"}.items()
    for letter in letters}


def places_of_texts(root):
    """Each text of a figure, with its left, upper, right and lower edge."""
    for element in root.iter(f"{SVG}text"):
        classes = element.get("class", "").split()
        size = 14 if {"small", "badge"} & set(classes) else 16
        words = "".join(element.itertext())
        width = size * sum(WIDTHS.get(letter, 556) for letter in words) / 1000
        if element.text and {"bold", "badge"} & set(classes):
            width *= 1.1
        x, y = float(element.get("x")), float(element.get("y"))
        if {"middle", "badge"} & set(classes):
            x -= width / 2
        elif "end" in classes:
            x -= width
        yield words, x, y - 0.75 * size, x + width, y + 0.2 * size


@pytest.mark.parametrize("name", BY_HAND)
def test_texts(name):
    """No text leaves the figure, and none covers another one."""
    root = xml.etree.ElementTree.parse(f"{ROOT}/chapters/{name}").getroot()
    texts = list(places_of_texts(root))
    for words, left, upper, right, lower in texts:
        assert 0 < left and right < float(root.get("width")), words
        assert 0 < upper and lower < float(root.get("height")), words
    for at, (words, left, upper, right, lower) in enumerate(texts):
        for other, *edges in texts[:at]:
            assert (right < edges[0] or edges[2] < left or lower < edges[1]
                    or edges[3] < upper), (words, other)


def test_owners():
    """Each chapter from 4 on has the figure that scripts/book/owner.py draws. Whoever
    sleeps (12) owns what he owned before."""
    assert sorted(owner.FIGURES) == [
        number(program) for program in programs()
        if number(program) >= 4 and number(program) != 12]
    for chapter, figure in owner.FIGURES.items():
        assert style.read(owner.path_of(chapter)) == owner.draw(figure), chapter


@pytest.mark.parametrize("chapter", owner.FIGURES)
def test_owner(chapter):
    """The words of a piece fit into it, and no arrow crosses a word. A lane's owner
    changes only at an event."""
    figure = owner.FIGURES[chapter]
    root = xml.etree.ElementTree.fromstring(owner.draw(figure))
    texts = list(places_of_texts(root))
    for box in root.iter(f"{SVG}rect"):
        left, top, width, height = (
            float(box.get(edge)) for edge in ["x", "y", "width", "height"])
        for words, *edges in texts:
            if left < (edges[0] + edges[2]) / 2 < left + width and (
                    top < edges[1] and edges[3] < top + height):
                assert left + 2 < edges[0] and edges[2] < left + width - 2, words
    for arrow in root.iter(f"{SVG}path"):
        ends = re.fullmatch(r"M([\d.]+),([\d.]+)L([\d.]+),([\d.]+)", arrow.get("d"))
        if not ends:
            continue
        x1, y1, x2, y2 = map(float, ends.groups())
        for step in range(101):
            x, y = x1 + (x2 - x1) * step / 100, y1 + (y2 - y1) * step / 100
            for words, left, upper, right, lower in texts:
                assert not (left - 3 < x < right + 3 and upper < y < lower), words
    # What happens to both memories at once is written beside one of them.
    happens = {at for lane in (figure.mine, figure.theirs) for at, *_ in lane.events}
    for lane in figure.mine, figure.theirs:
        pieces = [(start, kind) for start, kind, _ in lane.pieces]
        for (_, before), (start, after) in zip(pieces, pieces[1:]):
            assert before == after or any(abs(start - at) <= 20 for at in happens)


def luminance(colour):
    parts = [int(colour[at:at + 2], 16) / 255 for at in (1, 3, 5)]
    parts = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4
             for part in parts]
    return sum(part * weight for part, weight in zip(parts, (0.2126, 0.7152, 0.0722)))


def contrast(one, other):
    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


def test_contrast():
    """Texts can be read on GitHub's pages, light and dark, and in boxes (WCAG AA)."""
    for palette in style.PALETTE, style.DARK:
        for ink in ["text", "faint", "blue", "amber", "green", "red"]:
            for ground in ["page", "host"]:
                assert contrast(palette[ink], palette[ground]) >= 4.5, (ink, ground)
        for ground in filter(re.compile("pale-").match, palette):
            assert contrast(palette["text"], palette[ground]) >= 4.5, ground
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def test_tool(tmp_path):
    """style.py mends a copy and colours that differ, and keeps a figure's own rules."""
    (tmp_path / "scripts").mkdir()
    shutil.copytree(f"{ROOT}/scripts/book", tmp_path / "scripts" / "book")
    (tmp_path / "chapters").mkdir()
    figure = tmp_path / "chapters" / BY_HAND[0]
    good = style.read(f"{ROOT}/chapters/{BY_HAND[0]}").replace(
        style.LAST, f"{style.LAST}\n.own {{ fill: none }}")
    tool = [sys.executable, f"{tmp_path}/scripts/book/style.py"]

    def run_tool():
        return subprocess.run(tool, check=False, capture_output=True)

    for old, new in [('[fill="#1f2328"]', '[fill="#000000"]'),
                     (' fill="#1f2328" x=', ' x='), (' stroke="#1f2328"', "")]:
        bad = good.replace(old, new)
        assert bad != good
        figure.write_text(bad)
        assert run_tool().returncode == 0 and figure.read_text() == good
    figure.write_text("<svg/>")
    assert BY_HAND[0].encode() in run_tool().stderr
