#!/usr/bin/env python3
"""Which lines of a step its chapter accounts for: it shows them, its text names the
function, constant or type that they belong to, or a comment in the program explains
that where it is defined. Prints the shares of each chapter; test_chapters.py looks for
what is left."""

import os
import re
import subprocess
import sys
import typing

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
sys.path += [f"{ROOT}/scripts/tests", f"{ROOT}/scripts/book"]

import chapters  # noqa: E402  (the path has to be known)


class Definition(typing.NamedTuple):
    """Where in a program something is defined: the numbers of its lines, from 0."""
    name: str
    first: int
    last: int
    kind: str  # function, type or value: a constant, a field, a value of an enum


# Lines that need no account: blank ones, comments, the preprocessor's, texts, and what
# only ends something.
NOTHING_NEW = re.compile(r"\s*($|//|#|\"|[})\]]+[;,]?$|using namespace|struct \w+;$|"
                         r"static_assert|constexpr const char\* kUsage)")


def definitions(lines, first=0, last=None, indent="", ends=("{", ";", "}")):
    """What clang-format has put at this indentation, and the members of types."""
    last = len(lines) if last is None else last
    at = first
    while at < last:
        start = at
        if not re.match(indent + r"[\w~\[]", lines[at]):
            at += 1
            continue
        code = ""
        while True:
            code += " " + re.sub(r"\s*//.*", "", lines[at]).strip()
            if code.endswith(ends) or at + 1 == last:
                break
            at += 1
        if code.endswith("{"):
            at = next(i for i in range(at + 1, last)
                      if lines[i].startswith(indent + "}"))
        type_ = re.match(r"(?: template <.*>)? (enum class|struct) (\w+)[^(=]*\{(.*\};)?$",
                         code)
        # A field may be a function, too.
        function = re.match(r"(?! std::function| using| static_assert)[^=({]*?(~?\w+)\(", code)
        value = re.search(r"(\w+)(\[\w*\])?( ?= ?.*|\{.*)?[;,{]$", code)
        if type_:
            yield Definition(type_[2], start, at, "type")
            yield from definitions(lines, start + 1, at, indent + "  ",
                                   (",",) if type_[1] != "struct" else ends)
        elif function:
            yield Definition(function[1], start, at, "function")
        elif value:
            yield Definition(value[1], start, at, "value")
        at += 1


def source_lines(root, program):
    return [line.rstrip() for line in
            chapters.read(f"{root}/src/{program}.cpp").split("\n")]


def new_lines(page, source):
    """The numbers of the lines that the page's program does not share with the one that
    it is based on, without those that need no account."""
    numbers = range(len(source))
    if page.before:
        paths = [f"{page.root}/src/{name}.cpp" for name in (page.before, page.program)]
        done = subprocess.run(
            ["diff", "--old-line-format=", "--unchanged-line-format=",
             "--new-line-format=%dn\n", *paths],
            check=False, text=True, capture_output=True)
        numbers = [int(number) - 1 for number in done.stdout.split()]
    return [number for number in numbers if not NOTHING_NEW.match(source[number])]


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


def is_common(definition):
    """A constant or member with a name like `size`, which as often as not means
    something else."""
    name = definition.name
    return definition.kind == "value" and name.isalpha() and name.islower()


class Naming:
    """By which of their words chapters account for a line that they do not show."""

    def __init__(self, pages, source):
        self.source = source
        self.definitions = list(definitions(source))
        self.shown = set().union(*(shown_lines(page, source) for page in pages))
        words = re.compile(r"~?\w+")
        self.named = set(words.findall(" ".join(
            match[0] for page in pages
            for match in chapters.CODE_SPAN.finditer(page.prose))))
        # A constant or a field that is used where the chapter shows it needs no more.
        self.used = set(words.findall("\n".join(source[n] for n in self.shown)))

    def around(self, number):
        """The definitions that a line belongs to, the innermost last."""
        return [d for d in self.definitions if d.first <= number <= d.last]

    def explained(self, number):
        """Whether a comment stands above what the line belongs to or, for a value, at
        the end of a line of it. The comment of a type is also for its fields, its
        constructors and its destructor."""
        for owner in reversed(self.around(number)):
            if owner.name == "main":
                return True  # the program's usage explains it
            above = self.source[max(owner.first - 1, 0):owner.first]
            beside = self.source[owner.first:owner.last + 1] \
                if owner.kind == "value" else []
            if any(line.lstrip().startswith("//") for line in above) or \
                    any(" // " in line for line in beside):
                return True
            types = [d.name for d in self.around(number) if d.kind == "type"]
            if owner.kind == "function" and \
                    owner.name.lstrip("~") not in [*types, "operator"]:
                return False
        return False

    def word(self, number):
        """The name that the text or an excerpt has, or None."""
        around = self.around(number)
        if not around:
            return None
        owner = around[-1]
        if is_common(owner) and around[0].name in self.named:
            return around[0].name
        if owner.name in self.named:
            return owner.name
        if owner.kind == "value" and around[0].name in self.named:
            return around[0].name
        return owner.name if owner.kind == "value" and owner.name in self.used else None


class Account(typing.NamedTuple):
    new: int
    shown: int
    left: dict  # the names that the text lacks, each with its lines


def account(page):
    source = source_lines(page.root, page.program)
    naming = Naming(page.companions, source)
    new = new_lines(page, source)
    left = {}
    for number in new:
        if number not in naming.shown and naming.word(number) is None \
                and not naming.explained(number):
            around = naming.around(number)
            left.setdefault(around[-1].name if around else "?", []).append(number + 1)
    return Account(len(new), len(naming.shown.intersection(new)), left)


def check_lines(page):
    """Each line that is new in a program is shown, or what it belongs to is named or
    has a comment."""
    if page.program not in chapters.programs(page.root) or not page.is_main:
        return []
    return [f"{page.path}: neither shown nor named nor explained by a comment: {name}, "
            f"in line {lines[0]} of src/{page.program}.cpp" for name, lines in account(page).left.items()]


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
        new, shown, left = account(page)
        lost = sum(map(len, left.values()))
        print(f"{program}: {new} new lines, {100 * shown // new} % shown, "
              f"{100 * (new - shown - lost) // new} % named or explained, {lost} neither")
        for name, lines in left.items():
            print(f"  {name}: line {lines[0]}" + f" and {len(lines) - 1} more"
                  * (len(lines) > 1))


if __name__ == "__main__":
    main()
