#!/usr/bin/env python3
"""Gives every figure of the chapters its style. Shown as an image, a figure can load no
other file, so figures.css is copied into each. And each of its elements gets the colours
of its class as attributes, because not everything that shows a figure knows variables.

Usage: scripts/book/style.py     (make figures)"""

import glob
import os
import re
import sys

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
with open(f"{ROOT}/scripts/book/figures.css", encoding="utf-8") as sheet:
    SHEET = sheet.read()
FIRST, *_, LAST = SHEET.splitlines()
COPY = re.compile(f"{re.escape(FIRST)}.*?{re.escape(LAST)}\n", re.S)
# The colours by their names: as they are in a figure, and on a dark page.
COLOURS = re.findall(r'/\* ([\w-]+) \*/ \[fill="(#\w{6})"\] \{ fill: (#\w{6}) \}', SHEET)
PALETTE = {name: light for name, light, _ in COLOURS}
DARK = {name: dark for name, _, dark in COLOURS}

# What each class means: the colour of its lines and texts, and that of its boxes.
ROLES = {
    "call": ("text", "host"),          # requests, axes, what else acts
    "host": ("line", "host"),          # a machine, a lifetime
    "box": ("faint", "page"),          # a thing in a machine
    "idle": ("line", "none"),          # takes no part, free, empty
    "region": ("blue", "none"),        # registered memory
    "data": ("blue", "pale-blue"),     # bytes, in flight
    "reply": ("amber", "pale-amber"),  # an acknowledgement, a completion
    "first": ("blue", "pale-blue"),    # of two that are compared
    "second": ("amber", "pale-amber"),
    "good": ("green", "pale-green"),
    "wrong": ("red", "pale-red"),
    "faint": ("faint", "host"),
    "badge": ("page", "text"),         # a text on a disc
}

TAG = re.compile(r'<(\w+)((?:\s+[\w:-]+="[^"]*")+)')


def figures():
    """All but the terminals, which have a style of their own."""
    return sorted(set(glob.glob(f"{ROOT}/chapters/*.svg")) -
                  {f"{ROOT}/chapters/0_terminals.svg"})


def read(path):
    with open(path, encoding="utf-8") as figure:
        return figure.read()


def colours(shape, classes):
    """The attributes of a shape that has a class, and of a text."""
    role = next(filter(ROLES.get, classes), "call")
    ink, pale = (PALETTE.get(name, name) for name in ROLES[role])
    if shape == "circle" and role == "idle":
        return {"fill": PALETTE["page"], "stroke": PALETTE["faint"]}
    return {"rect": {"fill": pale, "stroke": ink}, "path": {"fill": "none", "stroke": ink},
            "circle": {"fill": ink}, "polygon": {"fill": ink}, "text": {"fill": ink}}[shape]


def coloured(tag):
    """An opening tag with the colours of its class as attributes."""
    shape, attributes = tag.groups()
    classes = re.search(r'\sclass="([^"]*)"', attributes)
    if shape not in ("rect", "path", "circle", "polygon", "text") or not (
            classes or shape == "text" and " fill=" not in attributes):
        return tag[0]
    found = colours(shape, classes[1].split() if classes else [])
    for name in found:
        attributes = re.sub(rf'\s{name}="[^"]*"', "", attributes)
    added = "".join(f' {name}="{value}"' for name, value in found.items())
    # Behind the class, so that what they come from stands before them.
    end = classes.end() if classes and attributes.startswith(classes[0]) else 0
    return f"<{shape}{attributes[:end]}{added}{attributes[end:]}"


def styled(figure):
    """A figure in today's style. Rules of its own may follow the sheet."""
    return TAG.sub(coloured, COPY.sub(lambda copy: SHEET, figure))


def main():
    for path in figures():
        svg = styled(read(path))
        if svg.count(SHEET) != 1:
            sys.exit(f"{path}: its style is not that of figures.css")
        with open(path, "w", encoding="utf-8") as figure:
            figure.write(svg)


if __name__ == "__main__":
    main()
