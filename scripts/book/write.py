#!/usr/bin/env python3
"""Writes anew what the chapters show and what follows from the programs: excerpts whose
place can still be found, the numbers in tables of moves, transcripts, and the shares in
lines.py, which only rise. What a chapter says stays as it is. Prints what it has changed.
What it leaves to you, the check names that follows it.

Usage: scripts/book/write.py    (make check WRITE=1)
"""

import collections
import concurrent.futures
import difflib
import math
import os
import re
import sys

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
sys.path += [f"{ROOT}/scripts/{folder}" for folder in ("tests", "book", "moves")]

import chapters  # noqa: E402  (the path has to be known)
import harness  # noqa: E402
import lines  # noqa: E402
import moves  # noqa: E402
from repository import make, programs  # noqa: E402

# By so many lines a part may have become longer or shorter, but not by more than it has.
MOST_SHIFTED = 8


def closest(part, source, start=0):
    """Where in the source the part now is that once was there as a whole: a range of lines,
    or None if that is not clear."""
    def weight(line):
        return len(line.strip())

    if len(part) == 1:
        found = difflib.get_close_matches(part[0], source[start:], 2, 0.7)
        if not found or source.count(found[0]) > 1:
            return None
        at = source.index(found[0])
        return range(at, at + 1)
    most = min(MOST_SHIFTED, len(part))
    # How much of the part is so many lines further down in the source.
    shifts = collections.Counter()
    same = [(index, at) for index, line in enumerate(part)
            for at in range(start, len(source)) if source[at] == line]
    for index, at in same:
        shifts[at - index] += weight(part[index])
    if not shifts:
        return None
    best = max(shifts, key=shifts.get)
    near = [(index, at) for index, at in same
            if abs(at - index - best) <= most and weight(part[index]) > 2]
    others = [count for shift, count in shifts.items() if abs(shift - best) > most]
    if not near or max(others, default=0) > 0.7 * shifts[best]:
        return None
    (first, begin), (last, end) = min(near), max(near)
    found = range(begin - first, end + len(part) - last)
    known = sum(weight(part[index]) for index in {index for index, _ in near})
    if found.start < start or found.stop > len(source) or len(found) < 1 or \
            2.5 * known < sum(map(weight, part)):
        return None
    return found


def excerpt_edits(page):
    """What to write into excerpts and diffs: new lines, by the line of the page."""
    edits = {}
    for block in page.blocks:
        try:
            if block.info == "cpp" and (page.program or page.own(block.line)):
                edits.update(part_edits(page, block))
            elif block.info == "diff" and page.before:
                edits.update(diff_edits(page, block))
        except FileNotFoundError:
            pass  # a check says so
    return edits


def part_edits(page, block):
    source, start, edits = page.source(block.line)[1], 0, {}
    for index, part in chapters.split(block.lines, chapters.is_gap):
        at = chapters.find(part, source, start) if part else start
        found = range(at, at + len(part)) if at >= 0 else closest(part, source, start)
        if found is None:
            break
        if at < 0:
            first = block.line + index
            edits.update({first + i: [] for i in range(len(part))})
            edits[first] = source[found.start:found.stop]
        start = found.stop
    return edits


def diff_edits(page, block):
    """Only where each line has become another one."""
    edits = {}
    for before, other in (True, "+"), (False, "-"):
        source, start = page.source(block.line, before)[1], 0
        flat = chapters.without_blanks if before and page.move(block.line) else str
        for index, part in chapters.split(block.lines, lambda line: line.strip() == "..."):
            own = [(block.line + index + i, line) for i, line in enumerate(part)
                   if line[:1] != other]
            text = [flat(line[1:]) for _, line in own]
            at = chapters.find(text, list(map(flat, source)), start)
            found = range(at, at + len(text)) if at >= 0 else \
                closest([line[1:] for _, line in own], source, start)
            if found is None or len(found) != len(own):
                break
            start = found.stop
            edits.update({at: [(line[:1] or " ") + source[now]]
                          for (at, line), now in zip(own, found)
                          if flat(line[1:]) != flat(source[now])})
    return edits


def row_edits(page):
    """The numbers in tables of moves."""
    edits = {}
    for row in chapters.MOVE_ROW.finditer(page.prose) if page.states else []:
        said = chapters.COUNTS.search(row[0])
        if said and int(row[1]) == page.number and 0 < int(row[2]) < len(page.states):
            added, removed = moves.counts(page.program, int(row[2]), page.root)
            right = re.sub(r"\d+", "{}", said[0]).format(added, removed)
            if right != said[0]:
                edits[chapters.line_at(page.prose, row.start())] = [
                    row[0].replace(said[0], right)]
    return edits


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

        def run(command, *args, **env):
            processes.append(harness.Process(command, *args, **env))
            return processes[-1]

        try:
            again = chapters.Rerun(page, run, 10)
            again.all()
            return again
        finally:
            for process in processes:
                if process.popen.poll() is None:
                    process.popen.kill()
                    process.popen.wait()

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for again in pool.map(rerun, pages):
            apply(again.page, again.edits, "transcript")
            for message in again.messages:
                if message not in again.mended:
                    print(f"left to you: {message}")


def write_shares():
    path = f"{ROOT}/scripts/book/lines.py"
    text = chapters.read(path)
    for program, page in chapters.pages_of_programs(ROOT).items():
        now, least = math.floor(lines.share(page)), lines.LEAST.get(program, 0)
        if now > least:
            text = text.replace(f'"{program}": {least}', f'"{program}": {now}')
            print(f"scripts/book/lines.py: {program}: {now} % instead of {least} %")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def main():
    paths = ["README.md", "scripts/README.md",
             *(f"chapters/{name}.md" for name in chapters.chapters(ROOT))]
    for path in paths:
        page = chapters.Page(ROOT, path)
        apply(page, excerpt_edits(page), "excerpt")
        page = chapters.Page(ROOT, path)
        apply(page, row_edits(page), "table of moves")
    write_transcripts(paths)
    write_shares()


if __name__ == "__main__":
    main()
