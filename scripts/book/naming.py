"""What a program defines, and which of it the text of a chapter names. The book links
the two."""

import re
import typing

import chapters


class Definition(typing.NamedTuple):
    """Where in a program something is defined: the numbers of its lines, from 0."""
    name: str
    first: int
    last: int
    kind: str  # function, type or value: a constant, a field, a value of an enum


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


def is_common(definition):
    """A constant or member with a name like `size`, which as often as not means
    something else."""
    name = definition.name
    return definition.kind == "value" and name.isalpha() and name.islower()


class Naming:
    """Which of a chapter's words name what a line of its program belongs to, and which
    are in the lines that it shows."""

    def __init__(self, page, source, shown):
        self.definitions = list(definitions(source))
        self.owners = [[d for d in self.definitions if d.first <= number <= d.last]
                       for number in range(len(source))]
        words = re.compile(r"~?\w+")
        self.named = set(words.findall(" ".join(
            match[0] for match in chapters.CODE_SPAN.finditer(page.prose))))
        # A constant or a field that is used where the chapter shows it needs no more.
        self.used = set(words.findall("\n".join(source[n] for n in shown)))

    def around(self, number):
        """The definitions that a line belongs to, the innermost last."""
        return self.owners[number]

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
