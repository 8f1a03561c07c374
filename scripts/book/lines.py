#!/usr/bin/env python3
"""How much of the code that a program adds its chapters quote: the lines that stand in
their excerpts and diffs. What a comment or the text names does not count. Prints the
share of each program; test_chapters.py compares it with LEAST."""

import os
import re
import subprocess
import sys

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
sys.path += [f"{ROOT}/scripts/tests", f"{ROOT}/scripts/book"]

import chapters  # noqa: E402  (the path has to be known)

# The least share for each program, in percent. Once a chapter quotes more, its number
# rises.
LEAST = {"2_first": 59, "4_hello": 19, "5_reverse": 15, "6_write": 22, "7_queue": 14,
         "8_malloc": 8, "9_file": 6, "10_lock": 12, "11_rails": 7, "12_sleep": 48,
         "13_crowd": 8}

# What there is nothing to say about: blank lines, comments, includes, lone braces.
NO_CODE = re.compile(r"\s*($|//|#include|[{}();,]+$)")


def source_lines(root, program):
    return [line.rstrip() for line in
            chapters.read(f"{root}/src/{program}.cpp").split("\n")]


def new_lines(page, source):
    """The numbers, from 0, of the lines of code that the page's program does not share
    with the one that it is based on, however far they are indented there."""
    numbers = range(len(source))
    if page.before:
        paths = [f"{page.root}/src/{name}.cpp" for name in (page.before, page.program)]
        done = subprocess.run(
            ["diff", "-w", "--old-line-format=", "--unchanged-line-format=",
             "--new-line-format=%dn\n", *paths],
            check=False, text=True, capture_output=True)
        numbers = [int(number) - 1 for number in done.stdout.split()]
    return {number for number in numbers if not NO_CODE.match(source[number])}


def shown_parts(block, source):
    """Where the parts of an excerpt or a diff stand in the program: the index of each
    in the block, and the numbers of its lines."""
    parts, start = [], 0
    for index, part in chapters.excerpt(block) or []:
        at = chapters.find(part, source, start) if part else -1
        if at >= 0:
            start = at + len(part)
            parts.append((index, range(at, start)))
    return parts


def shown_lines(page, source):
    """The numbers of the lines that are in excerpts and diffs."""
    return {number for block in page.blocks
            for _, numbers in shown_parts(block, source) for number in numbers}


def share(page):
    """How much of what its program adds this page and its companions quote, in
    percent."""
    source = source_lines(page.root, page.program)
    new = new_lines(page, source)
    shown = set().union(*(shown_lines(one, source) for one in page.companions))
    return 100 * len(new & shown) / max(1, len(new))


def check_lines(page):
    """The chapters of a program quote enough of it."""
    if page.program not in chapters.programs(page.root) or not page.is_main:
        return []
    least = LEAST.get(page.program)
    if least is None:
        return [f"{page.path}: LEAST in scripts/book/lines.py has no {page.program}"]
    if share(page) >= least:
        return []
    return [f"{page.path}: only {share(page):.1f} % of the new lines of "
            f"src/{page.program}.cpp are in an excerpt; LEAST in scripts/book/lines.py "
            f"wants {least} %"]


def check_counts(page):
    """A chapter that says how many lines its step removes and adds is right."""
    said = re.search(r"removes\s+(\d+)\s+lines\s+and\s+adds\s+(\d+)", page.prose)
    if said is None or page.before is None:
        return []
    paths = [f"{page.root}/src/{name}.cpp" for name in (page.before, page.program)]
    done = subprocess.run(
        ["git", "diff", "--no-index", "--numstat", "--patience", *paths],
        check=False, text=True, capture_output=True)
    added, removed = done.stdout.split()[:2]
    if said.groups() == (removed, added):
        return []
    return [page.message(chapters.line_at(page.prose, said.start()),
                         f"the step removes {removed} lines and adds {added}")]


def main():
    for program, page in chapters.pages_of_programs(ROOT).items():
        print(f"{program}: {share(page):.1f} % (at least {LEAST.get(program, '?')} %)")


if __name__ == "__main__":
    main()
