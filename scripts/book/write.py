#!/usr/bin/env python3
"""Writes anew what the chapters show and what follows from the programs: excerpts whose
place can still be found, the numbers in tables of moves, and transcripts. What a chapter
says stays as it is. Prints what it has changed. What it leaves to you, the check names that
follows it.

Usage: scripts/book/write.py    (make check WRITE=1)
"""

import concurrent.futures
import difflib
import os
import re
import sys

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
sys.path += [f"{ROOT}/scripts/{folder}" for folder in ("tests", "book", "moves", ".")]

import chapters  # noqa: E402  (the path has to be known)
import harness  # noqa: E402
from repository import make, programs  # noqa: E402

# By so many lines a part may have become longer or shorter.
MOST_SHIFTED = 8


def closest(part, source, start=0):
    """Where in the source the part now is that once was there as a whole: a range of lines,
    or None if that is not clear."""
    if len(part) == 1:
        found = difflib.get_close_matches(part[0], source[start:], 1, 0.7)
        if not found or source.count(found[0]) > 1:
            return None
        at = source.index(found[0])
        return range(at, at + 1)

    def blocks(begin, end):
        """What is the same in the part, and in these lines."""
        return difflib.SequenceMatcher(
            None, part, source[max(begin, start):end], False).get_matching_blocks()[:-1]

    def weight(at):
        return sum(len(line.strip()) for block in blocks(at, at + len(part))
                   for line in part[block.a:block.a + block.size])
    at = max(range(start, len(source)), key=weight, default=start)
    if 2.5 * weight(at) < sum(len(line.strip()) for line in part):
        return None
    begin = max(at - MOST_SHIFTED, start)
    first, *_, last = 2 * blocks(begin, at + len(part) + MOST_SHIFTED)
    found = range(begin + first.b - first.a, begin + last.b - last.a + len(part))
    return found if start <= found.start < found.stop <= len(source) else None


def excerpt_edits(page):
    """What to write into excerpts and diffs: new lines, by the line of the page."""
    edits = {}
    for block in page.blocks:
        for one in chapters.shown(page, block):
            edits.update(part_edits(one))
    return edits


def part_edits(one):
    source, start, edits = [*map(one.flat, one.source)], 0, {}
    for part in one.parts:
        text = [one.flat(line) for *_, line in part]
        at = chapters.find(text, source, start)
        found = range(at, at + len(part)) if at >= 0 else closest(text, source, start)
        # In a diff, only where each line has become another one.
        if found is None or part[0][1] and len(found) != len(part):
            break
        start = found.stop
        if len(found) == len(part):
            edits.update({line: [mark + one.source[now]] for (line, mark, _), old, now in
                          zip(part, text, found) if old != source[now]})
        else:
            edits.update({line: [] for line, *_ in part})
            edits[part[0][0]] = one.source[found.start:found.stop]
    return edits


def row_edits(page):
    """The numbers in tables of moves."""
    return {line: [page.text.split("\n")[line - 1].replace(said, right)]
            for line, _, said, right in chapters.move_rows(page) if said != right}


def apply(page, edits, what):
    """Writes edits into a page, and says so."""
    rows = page.text.split("\n")
    for line in sorted(edits, reverse=True):
        indent = next((block.indent for block in page.blocks
                       if block.line <= line < block.line + len(block.lines)), "")
        if edits[line]:
            print(page.message(line, f"{what}: {' | '.join(edits[line]).strip()[:90]}"))
        rows[line - 1:line] = [(indent + new).rstrip() for new in edits[line]]
    if edits:
        with open(f"{page.root}/{page.path}", "w", encoding="utf-8") as file:
            file.write("\n".join(rows))


def write_transcripts(paths):
    """Runs them, and writes what is printed now. Builds the programs that they name."""
    pages = [chapters.Page(ROOT, path) for path in paths]
    typed = "\n".join(command or "" for page in pages
                      for _, command, _ in chapters.transcripts(page))
    make("BUILD=build", *sorted({*re.findall(r"\bbuild/(\w+)", typed)} & {*programs()}))
    # As a reader runs them.
    for name in "FI_PROVIDER", harness.RXM_BUFFERS:
        os.environ.pop(name, None)

    def rerun(page):
        processes = []

        def run(command, **env):
            processes.append(harness.Process(command, **env))
            return processes[-1]

        try:
            again = chapters.Rerun(page, run)
            again.all()
            return again
        finally:
            for process in processes:
                process.popen.kill()

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for again in pool.map(rerun, pages):
            apply(again.page, again.edits, "transcript")
            for message in again.messages:
                if message not in again.mended:
                    print(f"left to you: {message}")


def main():
    paths = ["README.md", "scripts/README.md",
             *(f"chapters/{name}.md" for name in chapters.chapters(ROOT))]
    for path in paths:
        page = chapters.Page(ROOT, path)
        apply(page, excerpt_edits(page), "excerpt")
        page = chapters.Page(ROOT, path)
        apply(page, row_edits(page), "table of moves")
    write_transcripts(paths)


if __name__ == "__main__":
    main()
