"""The README's figure of two terminals: it shows what the program prints."""

import xml.etree.ElementTree

import pytest

import terminals
from chapters import normalised, read

SVG = "{http://www.w3.org/2000/svg}"


def parsed(figure):
    return xml.etree.ElementTree.fromstring(figure)


def shown(figure, side):
    """What is the same in each run, of what one of the terminals shows."""
    terminal = parsed(figure).find(f"{SVG}g[@id='{side}']")
    lines = ["".join(line.itertext()) for line in terminal]
    assert lines[0].startswith(f"$ {terminals.PROGRAM}")
    # An address that has been shortened is still an address.
    return normalised(line.replace("…", 16 * "0") for line in lines)


@pytest.fixture(scope="module")
def new_figure():
    return terminals.draw(terminals.record())


@pytest.mark.parametrize("side", terminals.SIDES)
def test_lines(new_figure, side):
    """Otherwise scripts/book/terminals.py has to draw the figure again."""
    lines = shown(read(terminals.FIGURE), side)
    assert lines == shown(new_figure, side)
    assert side != "client" or lines[-1] == "Data is correct."
