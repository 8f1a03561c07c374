#!/usr/bin/env python3
"""The style of the figures of the chapters, to which `make figures` gives it, and of those
that `make watch-6` draws. Shown as an image, a figure can load no other file, so figures.css is copied into each. And each
of its elements gets the colours of its class as attributes, because not everything that
shows a figure knows variables."""

import os
import pathlib
import re

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
SHEET = pathlib.Path(f"{ROOT}/scripts/book/figures.css").read_text(encoding="utf-8")
FIRST, *_, LAST = SHEET.splitlines()
COPY = re.compile(f"{re.escape(FIRST)}.*?{re.escape(LAST)}\n", re.S)
# The colours by their names, as they are on a light page.
PALETTE = dict(re.findall(r'/\* ([\w-]+) \*/ \[fill="(#\w{6})"\]', SHEET))

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

TAG = re.compile(r'<(rect|path|circle|polygon|text)((?:\s+[\w:-]+="[^"]*")+)')


def figures():
    """All but the terminals, which have a style of their own."""
    return sorted(path for path in pathlib.Path(f"{ROOT}/chapters").glob("*.svg")
                  if path.name != "0_terminals.svg")


def coloured(tag):
    """An opening tag with the colours of its class as attributes. A text has some in any
    case."""
    shape, attributes = tag.groups()
    classes = re.search(r'\sclass="([^"]*)"', attributes)
    if not classes and (shape != "text" or " fill=" in attributes):
        return tag[0]
    role = next(filter(ROLES.get, classes[1].split() if classes else []), "call")
    ink, pale = (PALETTE.get(name, name) for name in ROLES[role])
    found = {"rect": {"fill": pale, "stroke": ink},
             "path": {"fill": "none", "stroke": ink}}.get(shape, {"fill": ink})
    if shape == "circle" and role == "idle":
        found = {"fill": PALETTE["page"], "stroke": PALETTE["faint"]}
    for name in found:
        attributes = re.sub(rf'\s{name}="[^"]*"', "", attributes)
    added = "".join(f' {name}="{value}"' for name, value in found.items())
    # Behind the class, so that what they come from stands before them.
    end = classes.end() if classes and attributes.startswith(classes[0]) else 0
    return f"<{shape}{attributes[:end]}{added}{attributes[end:]}"


def styled(figure):
    """A figure in today's style. Rules of its own may follow the sheet."""
    return TAG.sub(coloured, COPY.sub(lambda copy: SHEET, figure))


def svg(title, width, height, kinds, lines, rules=""):
    """A figure of these elements, and of arrows of these kinds."""
    markers = "".join(f"""\
    <marker id="{kind}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="10" markerHeight="10"
            orient="auto" markerUnits="userSpaceOnUse">
      <polygon class="{kind}" points="0,0 8,4 0,8"/>
    </marker>
""" for kind in kinds)
    drawing = "\n".join(f"  {line}" for line in lines)
    return styled(f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"
     height="{height}" role="img">
  <title>{title}</title>
  <style>
{SHEET}{rules}  </style>
  <defs>
{markers}  </defs>

{drawing}
</svg>
""")


if __name__ == "__main__":
    for figure_path in figures():
        figure_path.write_text(styled(figure_path.read_text(encoding="utf-8")), encoding="utf-8")
