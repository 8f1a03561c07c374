"""What chapters and README have to keep to. Each check takes a page and returns
what it found wrong, one message each; test_chapters.py runs them."""

import difflib
import functools
import math
import os
import re
import shlex
import signal
import subprocess
import time
import urllib.parse

import moves
from repository import (broken, build_moves, make, number, numbered, parent,
                        patched, programs)

# ---- Pages ----

FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*([^\s`]*)[^`]*$")
CODE_SPAN = re.compile(r"(`+)(?!`)((?!\n\s*\n).)+?(?<!`)\1(?!`)", re.S)
COMMENT = re.compile(r"<!--.*?-->", re.S)
LINKED = re.compile(r"\]\(\.\./(src/\w+\.cpp)\)")
OWN_PATCH = re.compile(r"(?m)^git apply (scripts/own/(\w+)\.patch)\b")
BROKEN = re.compile(r"<!-- from make break-([\w.]+) -->")
HEADING = re.compile(r"(?m)^ {0,3}(#{1,6})[ \t]+(.*?)[ \t]*#*[ \t]*$")
# The heading of a move, `## 5.3 Take, and answer`, without its marks.
MOVE = re.compile(r"(\d+)\.(\d+) \S")


class Block:
    """A fenced block: its info string, the number of its first line, how far it is
    indented, its lines."""

    def __init__(self, info, line, indent):
        self.info = info
        self.line = line
        self.indent = indent
        self.lines = []
        self.closed = False


class Page:
    """A Markdown file, and the program it belongs to if it is such a chapter."""

    def __init__(self, root, path):
        self.root = str(root)
        self.path = path
        self.text = read(f"{root}/{path}")
        self.blocks = []
        self.prose = self._split()
        name = os.path.basename(path)[:-len(".md")]
        self.is_chapter = path.startswith("chapters/")
        self.number = number(name) if self.is_chapter else -1
        self.program = self._program(name) if self.is_chapter else None

    def _program(self, name):
        """The program beside a chapter: the one of its number that has its name, or
        that it links to."""
        found = [program for program in programs(self.root)
                 if number(program) == self.number]
        linked = [program for program in found if f"/src/{program}.cpp" in self.text]
        # From 4 on, each chapter has one, even if it is missing.
        if self.number >= 4:
            linked += [*found, name]
        return name if name in found else next(iter(linked), None)

    def _split(self):
        """Collects the fenced blocks, and returns the text without them and
        without comments. All lines keep their numbers."""
        prose = []
        block = None
        for line_number, line in enumerate(self.text.split("\n"), 1):
            fence = FENCE.match(line)
            if block is None and fence:
                block = Block(fence[3], line_number + 1, fence[1])
                marks = fence[2]
                self.blocks.append(block)
            elif block is not None:
                if fence and fence[2].startswith(marks) and not fence[3]:
                    block.closed = True
                    block = None
                else:
                    block.lines.append(line.removeprefix(block.indent).rstrip())
            else:
                prose.append(line)
                continue
            prose.append("")
        return COMMENT.sub(blank, "\n".join(prose))

    # Read only when a check needs it: a program that names no parent would otherwise
    # stop pytest before the first test.
    @functools.cached_property
    def ancestors(self):
        """What the page's program is based on, what that is based on, and so on."""
        found = []
        program = self.program
        # Without a program, check_numbers() complains.
        while program in programs(self.root) and (program := parent(program, self.root)):
            found.append(program)
        return found

    def own(self, line):
        """What the excerpts of a page without a program may be from: the patch that it
        has the reader apply, which makes a program of one's own, or else a program that
        it links to; the last one above this line."""
        if self.program:
            return None
        above = "\n".join(self.text.split("\n")[:line - 1])
        found = [path for path, *_ in OWN_PATCH.findall(above)]
        return (found or LINKED.findall(above) or [None])[-1]

    def broken(self, line):
        """The patch of which an excerpt in this line shows lines, if a comment above it
        says that it's from a broken program."""
        above = self.program and BROKEN.fullmatch(self.text.split("\n")[line - 3])
        return above and above[1].replace(str(self.number), f"scripts/breaks/{self.program}",
                                          1) + ".patch"

    @property
    def before(self):
        return self.ancestors[0] if self.ancestors else None

    @functools.cached_property
    def states(self):
        """The lines of its program's parent, and of the program after each of its moves.
        Empty if it has no moves."""
        if self.program not in moves.steps(self.root):
            return []
        return [to_lines(text) for text in moves.states(self.program, self.root)]

    @functools.cached_property
    def sections(self):
        """Where the sections of level 2 begin, and the number of the move that each is
        about; None for others."""
        found = []
        for heading in HEADING.finditer(self.prose):
            move = MOVE.match(heading[2])
            known = (heading[1] == "##" and move and int(move[1]) == self.number
                     and 0 < int(move[2]) < len(self.states))
            if len(heading[1]) <= 2:
                found.append((line_at(self.prose, heading.start()),
                              int(move[2]) if known else None))
        return found

    def move(self, line):
        """The move in whose section this line is, or None. Excerpts there are of the
        program after that move, all others of the finished one."""
        above = [move for at, move in self.sections if at <= line]
        return above[-1] if above else None

    def source(self, line, before=False):
        """The name and the lines of that of which an excerpt in this line is; of that from
        which a diff there starts, with `before`."""
        if path := self.broken(line):
            return path, to_lines(broken(path, self.root))
        at = (self.move(line) or 0) - before
        if at > 0:
            return f"move {self.number}.{at}", self.states[at]
        path = self.own(line) or f"src/{self.before if before else self.program}.cpp"
        return path, to_lines(patched(path, self.root) if path.endswith(".patch")
                              else read(f"{self.root}/{path}"))

    @functools.cached_property
    def companions(self):
        """The chapters about its program in their order, with itself."""
        pages = [self if self.path == f"chapters/{name}.md" else
                 Page(self.root, f"chapters/{name}.md") for name in chapters(self.root)
                 if number(name) == self.number]
        return [page for page in pages if page.program == self.program]

    @property
    def is_main(self):
        """Whether it is the first of these."""
        return self.companions[0] is self

    def message(self, line, text):
        return f"{self.path}:{line}: {text}"


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def to_lines(text):
    return [line.rstrip() for line in text.split("\n")]


# In the order in which they are read. Others follow.
APPENDICES = ["appendix_own", "appendix_memory",
              "appendix_measured", "appendix_providers", "appendix_setup"]


def is_appendix(name):
    return name.startswith("appendix_")


def chapters(root):
    """In the order of reading: those with the same number as the README lists them. The
    appendices come last."""
    readme = f"{root}/README.md"
    listed = read(readme) if os.path.exists(readme) else ""

    def place(name):
        if is_appendix(name):
            at = APPENDICES.index(name) if name in APPENDICES else len(APPENDICES)
            return math.inf, at, name
        return number(name), listed.find(f"chapters/{name}.md"), name

    return sorted(numbered(f"{root}/chapters", ".md"), key=place)


def blank(match):
    """As many lines, with nothing in them."""
    return re.sub(r"[^\n]", " ", match[0])


def line_at(text, position):
    return text.count("\n", 0, position) + 1


def pages_of_programs(root):
    """The main chapter of each program."""
    pages = [Page(root, f"chapters/{name}.md") for name in chapters(root)]
    return {page.program: page for page in pages if page.program and page.is_main}


# ---- Chapters and programs ----

def check_numbers(root):
    """None is left out. That each program has its chapter, test_tools.py checks."""
    numbers = sorted({number(name) for name in chapters(root) if not is_appendix(name)})
    if numbers == list(range(len(numbers))):
        return []
    return [f"chapters/: the numbers are {numbers}"]


# ---- Blocks ----

INFOS = ["cpp", "console", "sh", "mermaid", "text", "diff"]
# What GitHub shows as code, and the checks would not see.
HIDDEN_CODE = re.compile(
    r"```|~~~|<(?:pre|code)\b|(?<=\n\n)(?: {4}|\t)[ \t]*(?![-*+\d\s])")


def check_blocks(page):
    """Nothing evades the other checks."""
    messages = []
    for block in page.blocks if page.is_chapter else []:
        if block.info not in INFOS:
            messages.append(page.message(
                block.line - 1, f'a block of "{block.info}"; there may be: '
                                + ", ".join(INFOS)))
        elif block.info == "cpp" and not page.program and not page.own(block.line):
            messages.append(page.message(
                block.line - 1, "C++ without a program that it could be from"))
        elif block.info == "diff" and not page.before:
            messages.append(page.message(
                block.line - 1, "a diff without a program that this is based on"))
    messages += [page.message(block.line - 1, "this block does not end")
                 for block in page.blocks if not block.closed]
    messages += [page.message(line_at(page.prose, match.start()),
                              "code outside a fenced block")
                 for match in HIDDEN_CODE.finditer(page.prose)]
    return messages


# ---- Excerpts ----

def split(lines, is_elision):
    """The parts between elisions, each with the index of its first line. Blank
    lines around them do not count."""
    parts = [(0, [])]
    for index, line in enumerate(lines):
        if is_elision(line):
            parts.append((index + 1, []))
        elif line or parts[-1][1]:
            parts[-1][1].append(line)
        else:
            parts[-1] = (index + 1, [])
    for _, part in parts:
        while part and not part[-1]:
            part.pop()
    return parts


def agreement(part, lines, at):
    """How many lines of the part stand there."""
    count = 0
    while (count < len(part) and at + count < len(lines)
           and part[count] == lines[at + count]):
        count += 1
    return count


# Stands for other lines; in what the line below it is, where a reader can't see that.
GAP = re.compile(r"\s*// \.\.\.(?: in ([\w:~]+))?")


def is_gap(line):
    """Whether the line stands for others: `// ...`, `// ... in Session::Take`."""
    return bool(GAP.fullmatch(line))


def excerpt(block):
    """The parts of an excerpt or a diff as they stand in the chapter's program, each
    with the index of its first line in the block. None for other blocks."""
    if block.info == "cpp":
        return split(block.lines, is_gap)
    if block.info == "diff":
        return [(at, [line[1:] for line in part if not line.startswith("-")])
                for at, part in split(block.lines, lambda line: line.strip() == "...")]
    return None


def find(part, lines, start):
    """Where the part stands as a whole, or -1."""
    for at in range(start, len(lines) - len(part) + 1):
        if agreement(part, lines, at) == len(part):
            return at
    return -1


def without_blanks(line):
    return "".join(line.split())


def check_parts(page, block, parts, before=False):
    """The parts stand in the block's source, each in one piece, and in this order. Each is
    a list of (number of the line in the page, line)."""
    try:
        path, source = page.source(block.line, before)
    except FileNotFoundError as error:
        path = os.path.relpath(error.filename, page.root)
        return [f"{page.path}: there is no {path}"]
    # As in `make diff-5.3`, what stays has the blanks that it has afterwards.
    flat = without_blanks if before and page.move(block.line) else str
    source = [flat(line) for line in source]
    start = 0
    for part in parts:
        lines = [flat(line) for _, line in part]
        at = find(lines, source, start)
        if at < 0:
            # Where most of it stands.
            most = max(agreement(lines, source, at) for at in range(start, len(source) + 1))
            having = [f"move {page.number}.{move}" for move, state in enumerate(page.states)
                      if find(lines, [flat(line) for line in state], 0) >= 0]
            where = f", but in {having[-1]}" if having else " at this place"
            return [page.message(part[0 if having else most][0],
                                 f'not in {path}{where}: "{part[0 if having else most][1]}"')]
        start = at + len(lines)
    return []


def scope(lines, at):
    """The struct and the function in which the line is: "Session::Take", "ServerMain",
    or "". It goes by indentation, which clang-format sees to."""
    names = []
    indent = len(lines[at]) - len(lines[at].lstrip())
    for line in reversed(lines[:at]):
        left = len(line) - len(line.lstrip())
        if not line.strip() or left >= indent or re.match(r"\s*(//|#|})", line):
            continue
        indent = left
        struct = re.match(r"(?:struct|enum class) (\w+)", line)
        member = re.match(r" *[^=(]*?(~?\w+)\(", line)
        if struct:
            return "::".join([struct[1], *names[-1:]])
        names += [member[1]] if member else []
    # Of a function that is in no struct, what is indented most is a statement.
    return names[-1] if names else ""


def check_gaps(page, block, parts):
    """What is said to be the struct and the function of a part is that."""
    try:
        _, source = page.source(block.line)
    except FileNotFoundError:
        return []
    messages = []
    start = 0
    for part in parts:
        at = find([line for _, line in part], source, start)
        if at < 0:
            break
        start = at + len(part)
        above = block.lines[part[0][0] - block.line - 1] if part[0][0] > block.line else ""
        said = GAP.fullmatch(above)
        if said and said[1] and said[1] != (there := scope(source, at)):
            messages.append(page.message(part[0][0], f"not in {said[1]}, but in "
                                         f"{there or 'no function'}"))
    return messages


# Who shows more lines than these in one piece has mistaken where it ends.
LONGEST = 80


def check_excerpts(page):
    """C++ stands in the chapter's program, letter for letter."""
    messages = []
    for block in page.blocks:
        if block.info != "cpp" or not page.program and not page.own(block.line):
            continue
        parts = [list(enumerate(part, block.line + index)) for index, part
                 in split(block.lines, is_gap) if part]
        messages += check_parts(page, block, parts) or check_gaps(page, block, parts)
        if not parts:
            messages.append(page.message(block.line, "an excerpt of nothing"))
        messages += [page.message(part[0][0], f"{len(part)} lines in one piece")
                     for part in parts if len(part) > LONGEST]
    return messages


def check_diffs(page):
    """A diff leads from the parent of the chapter's program to that program, in the
    section of a move from the program before it to that after it."""
    messages = []
    for block in page.blocks if page.before else []:
        if block.info == "diff":
            messages += check_diff(page, block)
    return messages


def check_diff(page, block):
    before, after = [], []
    for index, part in split(block.lines, lambda line: line.strip() == "..."):
        # Blanks at the end of a line are gone, also in an empty line of context.
        lines = [(block.line + index + i, line[:1] or " ", line[1:])
                 for i, line in enumerate(part)]
        for at, mark, line in lines:
            if mark not in "+- ":
                return [page.message(at, f'neither +, - nor a blank: "{line}"')]
        before.append([(at, line) for at, mark, line in lines if mark != "+"])
        after.append([(at, line) for at, mark, line in lines if mark != "-"])
    if before == after:
        return [page.message(block.line, "a diff that changes nothing")]
    return (check_parts(page, block, [part for part in before if part], before=True)
            + check_parts(page, block, [part for part in after if part]))


# ---- Moves ----

# A row of a chapter's table of moves: | 5.3 answer | +82 −44 | ... |
MOVE_ROW = re.compile(r"(?m)^\| *\[?`?(\d+)\.(\d+)\b.*")
COUNTS = re.compile(r"\+(\d+) [−-](\d+)")


def check_moves(page):
    """Each move of a program has a section in its chapters, in their order, and tables of
    moves have the right numbers. There are no others."""
    if page.program not in programs(page.root):
        return []
    messages, rows = [], []
    for heading in HEADING.finditer(page.prose):
        line = line_at(page.prose, heading.start())
        if not re.match(r"\d+\.\d+\b", heading[2]):
            continue
        if heading[1] != "##" or not MOVE.match(heading[2]):
            messages.append(page.message(
                line, f"a move's heading is `## {page.number}.1 Its title`"))
        elif dict(page.sections)[line] is None:
            messages.append(page.message(
                line, f"{page.program} has no move {heading[2].split()[0]}"))
    for row in MOVE_ROW.finditer(page.prose) if page.states else []:
        number_, move = int(row[1]), int(row[2])
        if number_ != page.number:
            continue
        line = line_at(page.prose, row.start())
        if not 0 < move < len(page.states):
            messages.append(page.message(line, f"{page.program} has no move {row[1]}.{move}"))
            continue
        rows.append(move)
        said = COUNTS.search(row[0])
        added, removed = moves.counts(page.program, move, page.root)
        if said and said.groups() != (str(added), str(removed)):
            messages.append(page.message(line, f"move {row[1]}.{move} is +{added} −{removed}"))
    if not page.is_main:
        return messages
    told = [move for one in page.companions for _, move in one.sections if move]
    wanted = [*range(1, len(page.states))]
    for what, found in ("section", told), ("row in its table", rows or wanted):
        messages += [f"{page.path}: no {what} is about move {page.number}.{move}"
                     for move in wanted if move not in found]
    if told != sorted(set(told)):
        messages.append(f"{page.path}: the order of its sections is "
                        + ", ".join(f"{page.number}.{move}" for move in told))
    return messages


# ---- Names ----

NAME = re.compile(
    r"\b(?:fi_[a-z0-9_]+|fid_[a-z0-9_]+|FI_[A-Z0-9_]+|cuda[A-Z]\w*)\b")


def names_in(root, program):
    """In the program, and in what its moves lead through."""
    source = read(f"{root}/src/{program}.cpp")
    if program in moves.steps(root):
        source = "\n".join([source, *moves.states(program, root)[1:]])
    return set(NAME.findall(re.sub(r"(?m)^\s*#\s*include.*", "", source)))


def check_names(page):
    """Each name of libfabric's and CUDA's that the program uses, and none of its
    ancestors, is named in the text of its chapters."""
    if page.program not in programs(page.root) or not page.is_main:
        return []
    known = set().union(*(names_in(page.root, program) for program in page.ancestors))
    said = set(NAME.findall("\n".join(
        without_targets(one.prose) for one in page.companions)))
    missing = sorted(names_in(page.root, page.program) - known - said)
    return [f"{page.path}: not named outside of code blocks: "
            + ", ".join(missing)] if missing else []


# ---- Links ----

TARGET = r"(<[^>\n]*>|[^\s()]*(?:\([^\s()]*\)[^\s()]*)*)"
LINK = re.compile(r"\]\(\s*" + TARGET + r"""(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)""")
OTHER_LINK = re.compile(r"""\]\(.*|\]\[.*|<[^>]*\b(?:href|src)=.*|<https?:.*|"""
                        r"""(?m:^ {0,3}\[[^\]^][^\]\n]*\]:.*)""")


def without_targets(prose):
    """The text as it is read: without where links lead to."""
    return re.sub(r"https?://\S+", "", LINK.sub("]()", prose))


def links(page):
    """All targets of links and images, with their lines; and messages about what GitHub takes
    for a link, too, and the checks don't."""
    text = CODE_SPAN.sub(blank, page.prose)
    found = [(line_at(text, match.start()), match[1].strip("<>"))
             for match in LINK.finditer(text)]
    messages = [page.message(line_at(text, match.start()), "not a link: " + match[0])
                for match in OTHER_LINK.finditer(LINK.sub(blank, text))]
    return found, messages


def anchors(text):
    """What #fragments a Markdown file has: GitHub's, of its headings."""
    return {*places(text), *slugs(text)}


def places(text):
    """The #fragments that the file's author has set."""
    return re.findall(r"""<[^>]*\b(?:id|name)=["']([^"']*)["']""", text)


def slugs(text):
    """GitHub's #fragment of each heading."""
    taken, found = set(places(text)), []
    for _, heading in HEADING.findall(text):
        heading = re.sub(r"\]\([^)]*\)|<a\b[^>]*>|</a>", "]", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        unique, count = slug, 0
        while unique in taken:
            count += 1
            unique = f"{slug}-{count}"
        taken.add(unique)
        found.append(unique)
    return found


def well_formed(url):
    try:
        host = urllib.parse.urlsplit(url).hostname or ""
    except ValueError:
        return False
    return re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", host) is not None


def check_target(page, target):
    """What is wrong with where a link leads to, or None."""
    if re.match(r"https?:", target):
        return None if well_formed(target) else "not a URL"
    path, _, fragment = urllib.parse.unquote(target).partition("#")
    if not target or re.match(r"[a-z]+:|/", target):
        return "neither http(s) nor relative"
    path = os.path.normpath(os.path.join(os.path.dirname(page.path), path)
                            if path else page.path)
    full = os.path.join(page.root, path)
    if path.split("/")[0] in ("..", "build", ".git"):
        return "not in the repository"
    if not os.path.exists(full):
        return "no such file"
    if not fragment:
        return None
    if os.path.isdir(full):
        return "a folder has no such place"
    if path.endswith(".md"):
        # Headings may hold code; blocks may hold what looks like a heading.
        found = fragment in anchors(Page(page.root, path).prose)
        return None if found else "no such heading"
    lines = re.fullmatch(r"L(\d+)(?:-L(\d+))?", fragment)
    last = len(read(full).split("\n")) - 1
    if lines and all(0 < int(n) <= last for n in lines.groups() if n):
        return None
    return "no such line"


def check_links(page):
    found, messages = links(page)
    for line, target in found:
        wrong = check_target(page, target)
        if wrong:
            messages.append(page.message(line, f"dead link, {wrong}: {target}"))
    return messages


def check_neighbours(page):
    """A chapter leads to those around it, to its program and to what that adds;
    the README for readers leads to every chapter."""
    names = chapters(page.root)
    wanted = []
    if page.path == "README.md":
        wanted = [f"chapters/{name}.md" for name in names]
    elif page.is_chapter:
        at = names.index(os.path.basename(page.path)[:-len(".md")])
        wanted = [f"{name}.md" for name in names[max(0, at - 1):at]
                  + names[at + 1:at + 2]]
        wanted += [f"../src/{page.program}.cpp"] if page.program else []
    targets = [target.partition("#")[0] for _, target in links(page)[0]]
    messages = [f"{page.path}: no link to {target}" for target in wanted
                if target not in targets]
    diff = f"make diff-{page.number}"
    if page.before and page.is_main and not re.search(rf"\b{diff}\b", page.text):
        messages.append(f"{page.path}: `{diff}` is not named")
    return messages


# ---- Providers ----

# A chapter with a program names a provider or a version of libfabric where the reader
# types or sees it, and says nothing else about it: that has an entry in
# appendix_providers.md, to which a word leads. At most so many in 1000 words, outside of
# code blocks, in what is read.
MOST_NAMED = 2

PROVIDER = (r"(?:(?:tcp|udp|net|verbs);)?ofi_rx[dm]|tcp|udp|shm|efa-direct|efa|cxi|opx|ucx|"
            r"psm[23]?")
# As part of a longer name they are another word: libfabric-efa-demo, session.net.
ALONE = r"(?<![\w.-])(?:%s)(?![\w-]|\.\w)"
NAMED = re.compile(ALONE % PROVIDER)
# Words of every day, unless they are code.
NAMED_IN_CODE = re.compile(ALONE % (PROVIDER + "|net|sockets|verbs"))
VERSION = re.compile(
    r"\blibfabric(?:'s)?\s+(?:version\s+)?\d+(?:\.\d+)*|\b[Vv]ersions?\s+\d\.\d+(?:\.\d+)?|"
    r"(?<![\w.])(?:1\.(?:1[7-9]|2\d)(?:\.\d)?|2\.\d\.\d|"
    r"(?<=\bof\s)2\.\d|(?<=\bfrom\s)2\.\d|(?<=\buntil\s)2\.\d)"
    r"(?!\d|\.\d|\s*(?:[KMG]|[mnuµ]?s\b|%|times|seconds))")
# What is not read: pictures, labels of footnotes, where links lead to.
UNREAD = re.compile(r"!\[[^\]]*\]\([^)\s]*\)|\[\^\w+\]:?|https?://\S+")


def named(page):
    """The number of words, and each provider and version that they name, with its
    line."""
    text = page.prose
    for pattern in UNREAD, LINK:
        text = pattern.sub(blank, text)
    found = []
    for span in CODE_SPAN.finditer(text):
        found += [(span.start() + match.start(), match[0])
                  for match in NAMED_IN_CODE.finditer(span[0])]
    bare = CODE_SPAN.sub(blank, text)
    for pattern in NAMED, VERSION:
        found += [(match.start(), match[0]) for match in pattern.finditer(bare)]
    return len(re.findall(r"\S*\w\S*", text)), [
        (line_at(text, at), " ".join(name.split())) for at, name in sorted(found)]


def check_named(page):
    """Few providers and versions, from chapter 4 on."""
    if page.number < 4:
        return []
    words, found = named(page)
    if len(found) * 1000 <= MOST_NAMED * words:
        return []
    return [f"{page.path}: {len(found)} providers and versions in {words} words are "
            f"{len(found) * 1000 / words:.1f} in 1000, and not {MOST_NAMED} at most; what they "
            "do differently belongs into chapters/appendix_providers.md"] + [
                page.message(line, name) for line, name in found]


# ---- Text ----

def check_text(page):
    if not page.is_chapter:
        return []
    messages = []
    for line_number, line in enumerate(page.text.split("\n"), 1):
        if line != line.rstrip():
            messages.append(page.message(line_number, "blanks end this line"))
    read_text = re.sub(r"\]\([^)\s]*\)|https?://\S+", "", page.prose)
    for line_number, line in enumerate(read_text.split("\n"), 1):
        if len(line) > 100 and not line.lstrip().startswith("|"):
            messages.append(page.message(line_number, "more than 100 columns"))
    if not page.text.endswith("\n") or page.text.endswith("\n\n"):
        messages.append(f"{page.path}: does not end with one newline")
    titles = [marks for marks, _ in HEADING.findall(page.prose) if marks == "#"]
    if len(titles) != 1:
        messages.append(f"{page.path}: {len(titles)} headings of level 1, not one")
    return messages


# ---- Commands that are not run ----

MAKE = re.compile(r"(\w+=\S* +)*make\b(?!-)")


@functools.lru_cache(maxsize=None)
def is_target(target):
    try:
        make("-n", target)
    except AssertionError:
        return False
    return True


def known_moves(root):
    """As make knows them: 5.3."""
    return [f"{number(step)}.{move}" for step in moves.steps(root)
            for move in range(1, len(moves.patches(step, root)) + 1)]


def check_targets(page):
    """What a page has the reader make can be made."""
    commands = [(block.line + index, line) for block in page.blocks
                if block.info == "sh" for index, line in enumerate(block.lines)]
    commands += [(line, command) for line, command, output in transcripts(page)
                 if command and not output]
    # A program of the reader's own, which the page has copied, or made by a patch.
    own = re.findall(r"(?m)^(?:cp src/\w+\.cpp |.* > )src/(\w+)\.cpp$",
                     "\n".join(command for _, command in commands))
    own += [name for _, name in OWN_PATCH.findall(page.text)]
    own += [f"my_{step}" for step in re.findall(r"\bmake type-(\d+)\.\d", page.text)]
    own += [f"{prefix}{name}" for prefix in ("build/cuda/", "watch-", "diff-") for name in own]
    known = [str(number(name)) for name in programs(page.root)] + known_moves(page.root)
    messages = []
    for line, command in commands:
        if not MAKE.match(command):
            continue
        words = shlex.split(command, comments=True)
        for target in words[words.index("make") + 1:]:
            if target in ["&&", "||", "|", "&"]:
                break
            if "=" in target or target.startswith("-") or target in own:
                continue
            of = (re.fullmatch(r"(?:diff|exercise)-(.*)", target)
                  or re.fullmatch(r"(?:\w+-)?(\d+\.\d+)", target))
            if not is_target(target) or (of and of[1] not in known):
                messages.append(page.message(line, f"make has no {target}"))
    return messages


# ---- Transcripts ----

# An address is a word of hexadecimal digits, and no 0x comes before it.
ADDRESS = re.compile(r"\b[0-9a-f]{16,}\b")
# The server of 9_file may be told where to save files.
SERVER = re.compile(
    r"(?:\((cd \S+ && ))?((?:\w+=\S+ +)*)((?:\./build|\.\.)/\w[\w.]*(?: received)?)"
    r"\)?(\s+#.*)?")
PROGRESS = re.compile(r"WRITE: \d+%, (\d+)/(\d+)")
# Its server takes one message and ends.
ENDS_BY_ITSELF = re.compile(r"/(2_first|4\.[123])\b")
MOVE_PROGRAM = re.compile(r"\bbuild/(\d+\.\d+)(?![\w.])")
# Seconds for a command. On a busy machine 10_lock's needs more than 60.
LIMIT = 180


def transcripts(page):
    """The commands of a page's transcripts: line, command, lines of output. There
    is no command where a block goes on with what the server prints."""
    found = []
    for block in page.blocks:
        if block.info != "console":
            continue
        found.append((block.line, None, []))
        for line_number, line in enumerate(block.lines, block.line):
            if line.startswith("$ "):
                found.append((line_number, line[2:].strip(), []))
            else:
                found[-1][2].append(line)
    return [entry for entry in found if entry[1] or any(entry[2])]


def normalised(lines):
    """What is the same in each run."""
    return [text for text, _ in with_places(lines)]


def with_places(lines):
    """What is the same in each run, with the index of each line."""
    result = []
    for at, line in enumerate(lines):
        line = re.sub(r"\bdomain: [^,\s]+", "domain: D", line.rstrip())
        line = re.sub(r"\bfabric: [^,\s]+", "fabric: F", line)
        line = ADDRESS.sub("ADDRESS", line)
        line = re.sub(r"\d+\.\d+", "#.#", line)
        line = re.sub(r"\bEAGAIN=\d+", "EAGAIN=#", line)
        line = re.sub(r"\bup to \d+ us\b", "up to # us", line)
        # libfabric 2 needs no layer above its tcp.
        line = line.replace("tcp;ofi_rxm", "tcp")
        progress = PROGRESS.search(line)
        if progress and progress[1] != progress[2]:
            continue
        if re.match(r"make(\[\d+\])?: .* is up to date\.$", line):
            continue
        result.append((line, at))
    while result and not result[-1][0]:
        result.pop()
    # A demo's lines come as its two programs write them.
    labels = ["", "client | ", "server | "]
    if any(line.startswith(labels[2]) for line, _ in result):
        result.sort(key=lambda found: max(
            i for i, label in enumerate(labels) if found[0].startswith(label)))
    return result


def matches(expected, lines):
    """Both normalised; `...` stands for any number of lines."""
    parts = [[]]
    for line in expected:
        if line == "...":
            parts.append([])
        else:
            parts[-1].append(line)
    if len(parts) == 1:
        return lines == expected
    first, *middle, last = parts
    position = len(first)
    if lines[:position] != first:
        return False
    for part in middle:
        at = find(part, lines, position)
        if at < 0:
            return False
        position = at + len(part)
    end = len(lines) - len(last)
    return end >= position and lines[end:] == last


def mended(shown, printed):
    """What takes the place of which lines of a transcript, by their indices, so that it
    shows what was printed; what is the same in each run stays. None if that is not clear, or
    if something went wrong."""
    old, new = with_places(shown), with_places(printed)
    before, after = [text for text, _ in old], [text for text, _ in new]
    edits = {}
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(
            None, before, after, False).get_opcodes():
        if tag == "equal":
            continue
        gone = [(text, at) for text, at in old[i1:i2] if text != "..."]
        # A reader finds the address of the page in all its commands.
        addresses = {*ADDRESS.findall("\n".join(shown[at] for _, at in gone))}
        lines = [ADDRESS.sub(*addresses, printed[at]) if len(addresses) == 1 else printed[at]
                 for _, at in new[j1:j2]]
        if len(gone) < i2 - i1:  # `...` is one of them
            for text, at in gone:
                close = difflib.get_close_matches(text, after[j1:j2], 1)
                edits[at] = [lines[after[j1:j2].index(close[0])]] if close else [shown[at]]
        elif gone:
            edits.update({at: [] for _, at in gone})
            edits[gone[0][1]] = lines
        elif i1:
            edits[old[i1 - 1][1]] = [shown[old[i1 - 1][1]], *lines]
    if any(re.search(r"\b(error|warning): ", line) for now in edits.values() for line in now
           if line not in shown):
        return None
    result = [line for at, now in enumerate(shown) for line in edits.get(at, [now])]
    return edits if matches(normalised(result), normalised(printed)) else None


class Rerun:
    """Runs a page's transcripts again, from the repository's root and in their
    order, and compares what comes out.

    A program without arguments is a server. It runs until the next one starts or
    the page ends; only then is what it has printed compared. Every address in a
    command is replaced by that of the server that runs."""

    def __init__(self, page, run, patience):
        self.page = page
        self.run = run
        # Seconds for a server to print what it should, once its clients have ended,
        # and again to end.
        self.patience = patience
        self.server = None
        self.messages = []
        # Which of these need no human, and what to write: new lines, by the line of the page.
        self.mended = []
        self.edits = {}
        self.status = 0
        # The moves that it runs are built as quickly as for their own tests.
        typed = "\n".join(command or "" for _, command, _ in transcripts(page))
        self.moves = {*MOVE_PROGRAM.findall(typed)} & {*known_moves(page.root)}
        self.folder = build_moves(sorted(self.moves)) if self.moves else None

    def here(self, command):
        """The command, with moves where they have been built."""
        return MOVE_PROGRAM.sub(lambda found: f"{self.folder}/{found[1]}"
                                if found[1] in self.moves else found[0], command)

    def all(self):
        for line, command, output in transcripts(self.page):
            self.one(line, command, output)
        self.end_server()
        return self.messages

    def one(self, line, command, output):
        if command is None and self.server:
            self.output += output
            self.places += range(line, line + len(output))
        elif command is None:
            self.tell(line, "a transcript without a command")
        elif command == "echo $?":
            self.compare(line, command, output, [str(self.status)])
        elif MAKE.match(command) and not output:
            self.status = 0  # check_targets() has a look at these
        elif re.search(r"\bmake test\b|\btest\.sh\b|\bpytest\b", command):
            self.tell(line, "the tests cannot show the tests")
        elif SERVER.fullmatch(command):
            self.start_server(line, command, output)
        else:
            self.command(line, command, output)

    def tell(self, line, text):
        self.messages.append(self.page.message(line, text))

    def compare(self, line, command, shown, printed, places=None):
        printed = [line.replace(f"{self.folder}/", "build/") for line in printed]
        expected = normalised(shown)
        if not matches(expected, normalised(printed)):
            diff = difflib.unified_diff(
                expected, normalised(printed), f"{self.page.path}:{line}",
                "what it prints", lineterm="")
            self.tell(line, f"`{command}` prints something else:\n"
                            + "\n".join(diff))
            if (edits := mended(shown, printed)) is not None:
                places = places or range(line + 1, line + 1 + len(shown))
                self.edits.update({places[at]: new for at, new in edits.items()})
                self.mended.append(self.messages[-1])

    def command(self, line, command, output):
        typed = command
        if ADDRESS.search(command):
            if not self.server:
                self.tell(line, "no server runs that could have this address")
                return
            typed = ADDRESS.sub(self.address, command)
        # timeout makes a process group of all that the command starts.
        process = self.run(["timeout", "-k", "5", str(LIMIT), "bash", "-c",
                            self.here(typed)])
        process.popen.wait(LIMIT + 30)
        try:
            os.killpg(process.popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # as it should be: nothing is left
        self.status = process.wait()
        if self.status in (124, 137):
            self.tell(line, f"`{command}` does not end:\n{process.output}")
        else:
            self.compare(line, command, output, process.output.splitlines())

    def start_server(self, line, command, output):
        self.end_server()
        cd, settings, path, _ = SERVER.fullmatch(command).groups()
        path = self.here(path)
        env = dict(setting.split("=", 1) for setting in shlex.split(settings))
        # exec, so that the process that we end is the server.
        process = self.run(["bash", "-c", f"{cd}exec {path}"] if cd else path.split(),
                           **env)
        try:
            match = process.wait_for(r"following command:\n.* ([0-9a-f]+)( FILE)?\n")
        except AssertionError:  # it has ended, which may be what is shown
            process.signal(signal.SIGKILL)
            self.status = process.wait()
            if ADDRESS.search(process.output):
                self.tell(line, f"`{command}` has ended by itself")
            self.compare(line, command, output, process.output.splitlines())
            return
        self.address = match[1]
        self.server = process
        self.line, self.shown, self.output = line, command, output
        self.places = [*range(line + 1, line + 1 + len(output))]
        self.status = 0  # seen to when it ends

    def end_server(self):
        if not self.server:
            return
        process, self.server = self.server, None
        output = list(self.output)
        while output and not output[-1]:
            output.pop()
        signum = signal.SIGTERM
        if output and output[-1] == "^C":
            signum = signal.SIGINT
            output.pop()
        expected = normalised(output)
        end = time.monotonic() + self.patience
        while (time.monotonic() < end and process.popen.poll() is None
               and not matches(expected, normalised(process.output.splitlines()))):
            time.sleep(0.05)
        how = "by itself"
        if not ENDS_BY_ITSELF.search(self.shown):
            how = signum.name
            time.sleep(0.2)  # for a line too many
            if process.popen.poll() is not None:
                self.tell(self.line, f"`{self.shown}` has ended by itself")
            process.signal(signum)
        try:
            status = process.wait(self.patience)
        except subprocess.TimeoutExpired:
            self.tell(self.line, f"`{self.shown}` does not end: {how}")
            return
        # The first moves catch no signals.
        if status != 0 and not (status == -signum and MOVE_PROGRAM.search(self.shown)):
            self.tell(self.line, f"`{self.shown}` exits with {status}")
        self.compare(self.line, self.shown, output, process.output.splitlines(),
                     self.places)


def check_transcripts(page, run, patience=10):
    return Rerun(page, run, patience).all()
