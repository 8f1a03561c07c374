#!/usr/bin/env python3
"""How much of the code that a program adds its chapters quote: the lines that stand in
their excerpts and diffs. What a comment or the text names does not count. A program that
is made in moves adds what these add.

Usage: scripts/book/lines.py            the share of each program, which test_chapters.py
                                        compares with LEAST
       scripts/book/lines.py NUMBER...  of these, with each move and the lines that are
                                        not quoted
"""

import os
import re
import sys

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
sys.path += [f"{ROOT}/scripts/{folder}" for folder in ("tests", "book", "moves")]

import chapters  # noqa: E402  (the path has to be known)
import moves  # noqa: E402

# The least share for each program, in percent. Once a chapter quotes more, its number
# rises. The aims are 54 for 4_hello, 50 for 5_reverse, 6_write and 7_queue, a third
# for 10_lock, and about a sixth for the others: there, readers skipped what was quoted
# only because it was new.
LEAST = {"2_first": 61, "2_verbs": 15, "4_hello": 54, "5_reverse": 70, "6_write": 70,
         "7_queue": 71,
         "8_malloc": 22, "9_file": 17, "10_lock": 35, "11_rails": 23, "12_sleep": 39,
         "13_crowd": 15, "14_strangers": 48, "15_ring": 15}

# What there is nothing to say about: blank lines, comments, includes, lone braces.
NO_CODE = re.compile(r"\s*($|//|#include|[{}();,]+$)")


def source_lines(root, program):
    return chapters.to_lines(chapters.read(f"{root}/src/{program}.cpp"))


def states(page):
    """The parent of the page's program, and the program after each of its moves. A program
    without moves is one move."""
    return page.states or [source_lines(page.root, page.before) if page.before else [],
                           source_lines(page.root, page.program)]


def kept(before, after):
    """The lines that stay, however far they are indented: the number of each, from 0, and
    the one that it had."""
    texts = ["".join(f"{line}\n" for line in lines) for lines in (before, after)]
    everything = f"-U{len(before) + len(after)}"
    _, changed, text = moves.diff(*texts, "-w", everything).partition("\n@@")
    if not changed:
        return {at: at for at in range(len(after))}
    found, old, now = {}, 0, 0
    for line in text.splitlines()[1:]:
        if line[0] == " ":
            found[now] = old
        old += line[0] in " -"
        now += line[0] in " +"
    return found


def origins(found):
    """For each of these states the lines: in which of them each is new, and where there."""
    lives = [[(0, at) for at in range(len(found[0]))]]
    for move in range(1, len(found)):
        same = kept(found[move - 1], found[move])
        lives.append([lives[-1][same[at]] if at in same else (move, at)
                      for at in range(len(found[move]))])
    return lives


def new_lines(found):
    """The lines of code that are new in one of these states, as in origins()."""
    return {line for move, lives in enumerate(origins(found)) if move
            for at, line in enumerate(lives)
            if line[0] == move and not NO_CODE.match(found[move][at])}


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


def shown_lines(page, found, blocks=None):
    """The lines that are in the page's excerpts and diffs, or in some of them, as in
    origins(): in the section of the move that adds them, or anywhere if the finished
    program has them."""
    lives = origins(found)
    last = set(lives[-1])
    shown = set()
    for block in page.blocks if blocks is None else blocks:
        move = page.move(block.line) or len(found) - 1
        shown |= {line for _, numbers in shown_parts(block, found[move])
                  for line in [lives[move][at] for at in numbers]
                  if line[0] == move or line in last}
    return shown


def new_and_shown(page):
    """The lines that the steps to its program add, and those of them that this page and
    its companions quote, as in origins()."""
    found = states(page)
    new = new_lines(found)
    return new, new & set().union(*(shown_lines(one, found) for one in page.companions))


def share(page):
    """How much of what its program adds this page and its companions quote, in
    percent."""
    new, shown = new_and_shown(page)
    return 100 * len(shown) / max(1, len(new))


def check_lines(page):
    """The chapters of a program quote enough of it."""
    if page.program not in chapters.programs(page.root) or not page.is_main:
        return []
    least = LEAST.get(page.program)
    if least is None:
        return [f"{page.path}: LEAST in scripts/book/lines.py has no {page.program}"]
    quoted = share(page)
    if quoted >= least:
        return []
    return [f"{page.path}: only {quoted:.1f} % of the new lines of "
            f"src/{page.program}.cpp are in an excerpt; LEAST in scripts/book/lines.py "
            f"wants {least} %"]


def print_moves(page):
    """For who writes a chapter: the share of each move, and the lines that are missing."""
    found = states(page)
    new, shown = new_and_shown(page)
    for move in range(1, len(found)):
        added = sorted(line for line in new if line[0] == move)
        quoted = sum(line in shown for line in added)
        name = f"{page.number}.{move}" if page.states else page.program
        print(f"\n{name}: {quoted} of {len(added)} lines, "
              f"{100 * quoted / max(1, len(added)):.0f} %; the others are:")
        for line in added:
            if line not in shown:
                print(f"{line[1] + 1:5}  {found[move][line[1]]}")


def main():
    for program, page in chapters.pages_of_programs(ROOT).items():
        if sys.argv[1:] and str(page.number) not in sys.argv[1:]:
            continue
        print(f"{program}: {share(page):.1f} % (at least {LEAST.get(program, '?')} %)")
        if sys.argv[1:]:
            print_moves(page)


if __name__ == "__main__":
    main()
