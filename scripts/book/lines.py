"""How much of the code that a program adds its chapters quote: the lines that stand in
their excerpts and diffs. What a comment or the text names does not count. A program that
is made in moves adds what these add."""

import difflib
import re

import chapters

# The least share for each program, in percent. This is no goal: where code was quoted only
# because it was new, readers skipped it.
LEAST = {"2_first": 61, "2_verbs": 15, "4_hello": 45, "5_reverse": 41, "6_write": 56,
         "7_queue": 53,
         "8_malloc": 22, "9_file": 23, "10_lock": 35, "11_rails": 23, "12_sleep": 45,
         "13_crowd": 23, "14_strangers": 45, "15_ring": 17}

# What there is nothing to say about: blank lines, comments, includes, lone braces.
NO_CODE = re.compile(r"\s*($|//|#include|[{}();,]+$)")


def states(page):
    """The parent of the page's program, and the program after each of its moves. A program
    without moves is one move."""
    def lines_of(program):
        return chapters.to_lines(chapters.read(f"{page.root}/src/{program}.cpp"))
    return page.states or [lines_of(page.before) if page.before else [], lines_of(page.program)]


def kept(before, after):
    """The lines that stay, however far they are indented: the number of each, from 0, and
    the one that it had."""
    flat = [[*map(chapters.without_blanks, lines)] for lines in (before, after)]
    return {now + i: old + i for old, now, size in difflib.SequenceMatcher(
        None, *flat, False).get_matching_blocks() for i in range(size)}


def origins(found):
    """For each of these states the lines: in which of them each is new, and where there."""
    lives = [[(0, at) for at in range(len(found[0]))]]
    for move in range(1, len(found)):
        same = kept(found[move - 1], found[move])
        lives.append([lives[-1][same[at]] if at in same else (move, at)
                      for at in range(len(found[move]))])
    return lives


def quoted(page, block, found, lives):
    """The lines that an excerpt or a diff shows of the program after it, as in origins()."""
    move, start, result = page.move(block.line) or len(found) - 1, 0, []
    for part in [part for one in chapters.shown(page, block)[-1:] for part in one.parts]:
        at = chapters.find([line for *_, line in part], found[move], start)
        if at >= 0:
            start = at + len(part)
            result += lives[move][at:start]
    return result


def share(page):
    """How much of what its program adds this page and its companions quote, in
    percent."""
    found = states(page)
    lives = origins(found)
    new = {line for move, state in enumerate(found) if move
           for at, line in enumerate(lives[move])
           if line[0] == move and not NO_CODE.match(state[at])}
    shown = {line for one in page.companions for block in one.blocks
             for line in quoted(one, block, found, lives)}
    return 100 * len(new & shown) / max(1, len(new))


def check_lines(page):
    """The chapters of a program quote enough of it."""
    least, now = LEAST.get(page.program, 100), share(page)
    return [] if now >= least else [
        f"{page.path}: only {now:.1f} % of the new lines of src/{page.program}.cpp are in an "
        f"excerpt; LEAST in scripts/book/lines.py wants {least} %"]
