#!/usr/bin/env python3
"""Copies figures.css into every figure of the chapters: shown as an image, a figure can
load no other file.

Usage: scripts/book/style.py [--check]
With --check, changes nothing, and fails if a copy is not the same."""

import glob
import os
import re
import sys

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
with open(f"{ROOT}/scripts/book/figures.css", encoding="utf-8") as sheet:
    SHEET = sheet.read()
FIRST, *_, LAST = SHEET.splitlines()
COPY = re.compile(f"{re.escape(FIRST)}.*?{re.escape(LAST)}\n", re.S)
# The light palette is the first rule, so a later colour must not replace it.
PALETTE = dict(reversed(re.findall(r"--([\w-]+): (#\w{6})", SHEET)))


def figures():
    """All but the terminals: terminals.py draws them in a style of their own."""
    return sorted(set(glob.glob(f"{ROOT}/chapters/*.svg")) -
                  {f"{ROOT}/chapters/0_terminals.svg"})


def read(path):
    with open(path, encoding="utf-8") as figure:
        return figure.read()


def themed(chart):
    """Gives a chart of matplotlib the sheet. Its colours become those of the palette,
    so they follow the page, too."""
    for name, colour in PALETTE.items():
        chart = chart.replace(colour, f"var(--{name})")
    # Leaves the font and the size in pixels to the sheet.
    chart = re.sub(r"font: [^;\"]*(; )?", "", chart)
    chart = re.sub(r'(width|height)="(\d+)pt"', r'\1="\2"', chart)
    return chart.replace("<defs>", f"<style>\n{SHEET}</style>\n <defs>", 1)


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    failed = False
    for path in figures():
        svg = read(path)
        if svg.count(SHEET) == 1:
            continue
        if sys.argv[1:] or not COPY.search(svg):
            print(f"{path}: its style is not that of figures.css", file=sys.stderr)
            failed = True
            continue
        # Rules of the figure's own may follow the sheet.
        svg = COPY.sub(lambda copy: SHEET, svg)
        with open(path, "w", encoding="utf-8") as figure:
            figure.write(svg)
    sys.exit(failed)


if __name__ == "__main__":
    main()
