"""What chapters and README have to keep to. Each check takes a page and returns
what it found wrong, one message each; test_chapters.py runs them."""

import difflib
import functools
import os
import re
import shlex
import signal
import subprocess
import time
import typing
import urllib.parse

import carry
import moves
from repository import make, number, numbered, parent, programs

# ---- Pages ----

FENCE = re.compile(r"^(\s*)```(\w*)$")
CODE_SPAN = re.compile(r"`[^`]+`")
COMMENT = re.compile(r"<!--.*?-->", re.S)
LINKED = re.compile(r"\]\(\.\./(src/\w+\.cpp)\)")
OWN_PATCH = re.compile(r"(?m)^git apply (scripts/own/(\w+)\.patch)\b")
BROKEN = re.compile(r"<!-- from make break-([\w.]+) -->")
HEADING = re.compile(r"(?m)^(#{1,6}) (.*)$")


class Block:
    """A fenced block: its info string, the number of its first line, how far it is
    indented, its lines."""

    def __init__(self, info, line, indent):
        self.info, self.line, self.indent, self.lines = info, line, indent, []


class Page:
    """A Markdown file, and the program it belongs to if it is such a chapter."""

    def __init__(self, root, path):
        self.root, self.path = str(root), path
        self.text = read(f"{root}/{path}")
        self.blocks = []
        self.prose = self._split()
        name = os.path.basename(path)[:-len(".md")]
        self.is_chapter = path.startswith("chapters/")
        self.number = number(name)
        # The one of its number that has its name, or that it links to.
        found = [program for program in programs(self.root)
                 if number(program) == self.number]
        linked = [program for program in found if f"/src/{program}.cpp" in self.text]
        self.program = name if name in found else next(iter(linked), None)

    def _split(self):
        """Collects the fenced blocks, and returns the text without them and
        without comments. All lines keep their numbers."""
        prose, block = [], None
        for line_number, line in enumerate(self.text.split("\n"), 1):
            fence = FENCE.match(line)
            if block is None and fence:
                block = Block(fence[2], line_number + 1, fence[1])
                self.blocks.append(block)
            elif block is not None and fence and not fence[2]:
                block = None
            elif block is not None:
                block.lines.append(line.removeprefix(block.indent).rstrip())
            else:
                prose.append(line)
                continue
            prose.append("")
        if block:
            raise ValueError(self.message(block.line, "this block does not end"))
        return COMMENT.sub(blank, "\n".join(prose))

    # Read only when a check needs it: a program that names no parent would otherwise
    # stop pytest before the first test.
    @functools.cached_property
    def ancestors(self):
        """What the page's program is based on, what that is based on, and so on."""
        found, program = [], self.program
        while program and (program := parent(program, self.root)):
            found.append(program)
        return found

    def own(self, line):
        """What the excerpts of a page without a program may be from: the patch that it
        has the reader apply, which makes a program of one's own, or else a program that
        it links to; the last one above this line."""
        if self.program:
            return None
        above = "\n".join(self.text.split("\n")[:line - 1])
        found = [path for path, _ in OWN_PATCH.findall(above)]
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
        about, as in `## 5.3 Take, and answer`; None for others."""
        found = []
        for heading in HEADING.finditer(self.prose):
            move = re.match(rf"{self.number}\.(\d+) ", heading[2])
            if len(heading[1]) <= 2:
                found.append((line_at(self.prose, heading.start()), int(move[1])
                              if move and 0 < int(move[1]) < len(self.states) else None))
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
            return path, to_lines(carry.text_of(path, self.root))
        at = (self.move(line) or 0) - before
        if at > 0:
            return f"move {self.number}.{at}", self.states[at]
        path = self.own(line) or f"src/{self.before if before else self.program}.cpp"
        return path, to_lines(carry.text_of(path, self.root) if path.endswith(".patch")
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


def chapters(root):
    """In the order of reading: that in which the README lists them."""
    listed = read(f"{root}/README.md")
    return sorted(numbered(f"{root}/chapters", ".md"),
                  key=lambda name: listed.rfind(f"chapters/{name}.md"))


def blank(match):
    """As many lines, with nothing in them."""
    return re.sub(r"[^\n]", " ", match[0])


def line_at(text, position):
    return text.count("\n", 0, position) + 1


def pages_of_programs(root):
    """The main chapter of each program."""
    pages = [Page(root, f"chapters/{name}.md") for name in chapters(root)]
    return {page.program: page for page in pages if page.program and page.is_main}


# ---- Blocks ----

INFOS = ["cpp", "console", "sh", "mermaid", "text", "diff"]
# What GitHub shows as code, and the checks would not see.
HIDDEN_CODE = re.compile(
    r"```|~~~|<(?:pre|code)\b|(?<=\n\n)(?: {4}|\t)[ \t]*(?![-*+\d\s])")


def check_blocks(page):
    """Nothing evades the other checks."""
    messages = [page.message(block.line - 1, f'a block of "{block.info}"; there may be: '
                             + ", ".join(INFOS))
                for block in page.blocks if page.is_chapter and block.info not in INFOS]
    return messages + [page.message(line_at(page.prose, match.start()),
                                    "code outside a fenced block")
                       for match in HIDDEN_CODE.finditer(page.prose)]


# ---- Excerpts ----

# Stands for other lines; in what the line below it is, where a reader can't see that.
GAP = re.compile(r"\s*// \.\.\.(?: in ([\w:~]+))?")


class Shown(typing.NamedTuple):
    """What an excerpt shows of a source. A diff shows two of these."""
    name: str
    source: list  # its lines
    parts: list   # between gaps, each a list of (number in the page, mark, line)
    flat: typing.Callable  # the lines are compared when this has been done to both


def split(block, gap, marks=0):
    """The parts of a block. Blank lines around them do not count."""
    parts = [[]]
    for at, line in enumerate(block.lines, block.line):
        if gap.fullmatch(line):
            parts.append([])
        elif line or parts[-1]:
            parts[-1].append((at, (line or " ")[:marks], line[marks:]))
    for part in parts:
        while part and not part[-1][2]:
            part.pop()
    return [part for part in parts if part]


def shown(page, block):
    """Of an excerpt, what it shows; of a diff, what it shows of the program before it (in
    the section of a move, of that before the move), and of that after it."""
    if block.info == "cpp" and (page.program or page.own(block.line)):
        return [Shown(*page.source(block.line), split(block, GAP), str)]
    if block.info != "diff" or not page.before:
        return []
    parts = split(block, re.compile(r"\s*\.\.\."), 1)
    sides = [[[line for line in part if line[1] in marks] for part in parts]
             for marks in (" -", " +")]
    # As in `make diff-5.3`, what stays has the blanks that it has afterwards.
    return [Shown(*page.source(block.line, before), [part for part in side if part], flat)
            for side, before, flat in zip(sides, (True, False), (without_blanks, str))]


def find(part, lines, start=0):
    """Where the part stands as a whole, or -1."""
    return next((at for at in range(start, len(lines) - len(part) + 1)
                 if lines[at:at + len(part)] == part), -1)


def without_blanks(line):
    return "".join(line.split())


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


def check_excerpts(page):
    """What an excerpt or a diff shows stands in its program, letter for letter and in this
    order; and what a gap says to be in a function is in that."""
    messages = []
    for block in page.blocks:
        found = shown(page, block)
        if page.is_chapter and block.info in ("cpp", "diff") and not found:
            messages.append(page.message(block.line, "of a program that isn't there"))
        messages += [message for one in found for message in check_parts(page, one)]
    return messages


def check_parts(page, one):
    source, start = [*map(one.flat, one.source)], 0
    for part in one.parts:
        lines = [one.flat(line) for *_, line in part]
        at = find(lines, source, start)
        if at < 0:
            having = [move for move, state in enumerate(page.states)
                      if find(lines, [*map(one.flat, state)]) >= 0]
            wrong = 0 if having else max(
                next((i for i, line in enumerate(lines) if source[at + i:at + i + 1] != [line]), 0)
                for at in range(start, len(source)))
            where = f", but in move {page.number}.{having[-1]}" if having else " at this place"
            return [page.message(part[wrong][0],
                                 f'not in {one.name}{where}: "{part[wrong][2]}"')]
        start = at + len(lines)
        said = GAP.fullmatch(page.text.split("\n")[part[0][0] - 2])
        if said and said[1] and said[1] != (there := scope(one.source, at)):
            return [page.message(part[0][0], f"not in {said[1]}, but in "
                                 f"{there or 'no function'}")]
    return []


# ---- Moves ----

# A row of a chapter's table of moves: | 5.3 answer | +82 −44 | ... |
MOVE_ROW = re.compile(r"(?m)^\| *\[?(\d+)\.(\d+) .*\| (\+\d+ −\d+) .*")


def move_rows(page):
    """The rows of its table of moves: the line, the move, the numbers, the right ones."""
    for row in MOVE_ROW.finditer(page.prose) if page.states else []:
        if int(row[1]) == page.number and 0 < int(row[2]) < len(page.states):
            counts = moves.counts(page.program, int(row[2]), page.root)
            yield (line_at(page.prose, row.start()), int(row[2]), row[3],
                   "+{} −{}".format(*counts))


def check_moves(page):
    """Each move of a program has a section in its chapters, and a row in a table of moves,
    in their order and with the right numbers."""
    rows = [*move_rows(page)]
    messages = [page.message(line, f"move {page.number}.{move} is {right}")
                for line, move, said, right in rows if said != right]
    if not page.states or not page.is_main:
        return messages
    told = [move for one in page.companions for _, move in one.sections if move]
    for what, found in ("sections", told), ("rows", [move for _, move, *_ in rows]):
        if found != [*range(1, len(page.states))]:
            messages.append(f"{page.path}: the {what} about its {len(page.states) - 1} moves are: "
                            + ", ".join(f"{page.number}.{move}" for move in found))
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
    if not page.program or not page.is_main:
        return []
    known = set().union(*(names_in(page.root, program) for program in page.ancestors))
    said = set(NAME.findall("\n".join(as_read(one.prose) for one in page.companions)))
    missing = sorted(names_in(page.root, page.program) - known - said)
    return [f"{page.path}: not named outside of code blocks: "
            + ", ".join(missing)] if missing else []


# ---- Links ----

LINK = re.compile(r"\]\(([^()\s]*)\)")
# What GitHub takes for a link, too.
OTHER_LINK = re.compile(r"\]\(.*|\]\[.*|<[^>]*\b(?:href|src)=.*|<https?:.*|"
                        r"(?m:^ {0,3}\[[^\]^][^\]\n]*\]:.*)")


def as_read(prose):
    """The text without where links lead to."""
    return re.sub(r"https?://\S+", "", LINK.sub("]()", prose))


def links(page):
    """All targets of links and images, with their lines."""
    text = CODE_SPAN.sub(blank, page.prose)
    return [(line_at(text, match.start()), match[1]) for match in LINK.finditer(text)]


def places(text):
    """The #fragments that the file's author has set."""
    return re.findall(r'<a id="([^"]*)"', text)


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


def check_target(page, target):
    """What is wrong with where a link leads to, or None."""
    if re.match(r"[a-z]+:|/", target):
        return None if re.match(r"https?://([a-z0-9-]+\.)+[a-z]{2,}(/|$)", target) else "not a URL"
    path, _, fragment = urllib.parse.unquote(target).partition("#")
    path = os.path.normpath(os.path.join(os.path.dirname(page.path), path)
                            if path else page.path)
    if path.split("/")[0] in ("..", "build", ".git"):
        return "not in the repository"
    if not os.path.exists(f"{page.root}/{path}"):
        return "no such file"
    if not fragment:
        return None
    # Headings may hold code; blocks may hold what looks like a heading.
    text = Page(page.root, path).prose if path.endswith(".md") else ""
    return None if fragment in [*places(text), *slugs(text)] else "no such heading"


def check_links(page):
    messages = [page.message(line, f"dead link, {wrong}: {target}")
                for line, target in links(page) if (wrong := check_target(page, target))]
    text = LINK.sub(blank, CODE_SPAN.sub(blank, page.prose))
    return messages + [page.message(line_at(text, match.start()), "not a link: " + match[0])
                       for match in OTHER_LINK.finditer(text)]


def check_neighbours(page):
    """A chapter leads to those around it, to its program and to what that adds;
    the README for readers leads to every chapter."""
    names = chapters(page.root)
    wanted = []
    if page.path == "README.md":
        wanted = [f"chapters/{name}.md" for name in names]
    elif page.is_chapter:
        at = names.index(os.path.basename(page.path)[:-len(".md")])
        wanted = [f"{name}.md" for name in names[max(0, at - 1):at] + names[at + 1:at + 2]]
        wanted += [f"../src/{page.program}.cpp"] if page.program else []
    targets = [target.partition("#")[0] for _, target in links(page)]
    messages = [f"{page.path}: no link to {target}" for target in wanted
                if target not in targets]
    if page.before and page.is_main and not re.search(rf"\bmake diff-{page.number}\b", page.text):
        messages.append(f"{page.path}: `make diff-{page.number}` is not named")
    return messages


# ---- Providers ----

# A chapter with a program names a provider or a version of libfabric where the reader
# types or sees it, and says nothing else about it: that has an entry in
# appendix_providers.md, to which a word leads. At most so many in 1000 words, outside of
# code blocks, in what is read.
MOST_NAMED = 2

NAMED = re.compile(
    r"(?<![\w.-])(?:(?:(?:tcp|udp|net|verbs);)?ofi_rx[dm]|tcp|udp|shm|efa(?:-direct)?|cxi|opx|ucx|"
    r"psm[23]?)(?![\w-]|\.\w)|\blibfabric(?:'s)?\s+\d[\d.]*")


def check_named(page):
    """Few providers and versions, from chapter 4 on."""
    text = LINK.sub(blank, page.prose)
    words, found = len(re.findall(r"\S*\w\S*", text)), [*NAMED.finditer(text)]
    if page.number < 4 or len(found) * 1000 <= MOST_NAMED * words:
        return []
    return [f"{page.path}: more than {MOST_NAMED} providers and versions in 1000 words; what "
            "they do differently belongs into chapters/appendix_providers.md"] + [
                page.message(line_at(text, match.start()), match[0]) for match in found]


# ---- Commands that are not run ----

MAKE = re.compile(r"(\w+=\S* +)*make\b(?!-)")


@functools.lru_cache(maxsize=None)
def is_target(target):
    try:
        make("-n", target)
    except AssertionError:
        return False
    return True


def check_targets(page):
    """What a page has the reader make can be made."""
    commands = [(at, line.removeprefix("$ ")) for block in page.blocks
                if block.info in ("sh", "console") for at, line in enumerate(block.lines, block.line)]
    # Programs of the reader's own, which the page has copied, or made by a patch or a move.
    own = [*re.findall(r"\bsrc/(\w+)\.cpp\b|\bown/(\w+)\.patch\b", page.text),
           *((f"my_{step}",) for step in re.findall(r"\bmake type-(\d+)\.\d", page.text))]
    own = {name for names in own for name in names if name}
    known = {str(number(program)) for program in programs(page.root)} | {
        f"{number(step)}.{move}" for step in moves.steps(page.root)
        for move in range(1, len(moves.patches(step, page.root)) + 1)}
    messages = []
    for line, command in commands:
        words = shlex.split(command, comments=True) if MAKE.match(command) else ["make"]
        for target in words[words.index("make") + 1:]:
            if target in ["&&", "||", "|", "&"]:
                break
            if "=" in target or re.sub(r"^(build/cuda/|watch-|diff-)", "", target) in own:
                continue
            of = re.fullmatch(r"(?:diff|exercise)-(.*)|(?:\w+-)?(\d+\.\d+)", target)
            if not is_target(target) or of and (of[1] or of[2]) not in known:
                messages.append(page.message(line, f"make has no {target}"))
    return messages


# ---- Transcripts ----

# An address is a word of hexadecimal digits, and no 0x comes before it.
ADDRESS = re.compile(r"\b[0-9a-f]{16,}\b")
# The server of 9_file is told where to save files.
SERVER = re.compile(r"((?:\w+=\S+ +)*)(\./build/\w+(?: received)?)")
PROGRESS = re.compile(r"WRITE: \d+%, (\d+)/(\d+)")
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
        line = re.sub(r"\b(domain|fabric): [^,\s]+", r"\1: #", line.rstrip())
        line = ADDRESS.sub("ADDRESS", line)
        line = re.sub(r"\d+\.\d+|\bEAGAIN=\d+|\bup to \d+ us\b", "#", line)
        # libfabric 2 needs no layer above its tcp.
        line = line.replace("tcp;ofi_rxm", "tcp")
        progress = PROGRESS.search(line)
        if not progress or progress[1] == progress[2]:
            result.append((line, at))
    while result and not result[-1][0]:
        result.pop()
    return result


def matches(expected, lines):
    """Both normalised; `...` stands for any number of lines."""
    pattern = "".join(r"(?:.*\n)*" if line == "..." else re.escape(line) + r"\n"
                      for line in expected)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None


def mended(shown_lines, printed):
    """What takes the place of which lines of a transcript, by their indices, so that it
    shows what was printed; what is the same in each run stays. None if that is not clear, or
    if something went wrong."""
    old, new = with_places(shown_lines), with_places(printed)
    before, after = [text for text, _ in old], [text for text, _ in new]
    edits = {}
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(
            None, before, after, False).get_opcodes():
        if tag == "equal":
            continue
        gone = [(text, at) for text, at in old[i1:i2] if text != "..."]
        # A reader finds the address of the page in all its commands.
        addresses = {*ADDRESS.findall("\n".join(shown_lines[at] for _, at in gone))}
        lines = [ADDRESS.sub(*addresses, printed[at]) if len(addresses) == 1 else printed[at]
                 for _, at in new[j1:j2]]
        if len(gone) < i2 - i1:  # `...` is one of them
            for text, at in gone:
                close = difflib.get_close_matches(text, after[j1:j2], 1)
                edits[at] = [lines[after[j1:j2].index(close[0])]] if close else [shown_lines[at]]
        elif gone:
            edits.update({at: [] for _, at in gone})
            edits[gone[0][1]] = lines
        elif i1:
            edits[old[i1 - 1][1]] = [shown_lines[old[i1 - 1][1]], *lines]
    if any(re.search(r"\b(error|warning): ", line) for now in edits.values() for line in now
           if line not in shown_lines):
        return None
    result = [line for at, now in enumerate(shown_lines) for line in edits.get(at, [now])]
    return edits if matches(normalised(result), normalised(printed)) else None


class Rerun:
    """Runs a page's transcripts again, from the repository's root and in their
    order, and compares what comes out.

    A program without arguments is a server. It runs until the next one starts or
    the page ends; only then is what it has printed compared. Every address in a
    command is replaced by that of the server that runs."""

    def __init__(self, page, run, patience=10):
        self.page = page
        self.run = run
        # Seconds for a server to print what it should, once its clients have ended,
        # and again to end.
        self.patience = patience
        self.server = self.address = None
        self.messages = []
        # Which of these need no human, and what to write: new lines, by the line of the page.
        self.mended = []
        self.edits = {}

    def all(self):
        for line, command, output in transcripts(self.page):
            if command is None:
                self.output += output
                self.places += range(line, line + len(output))
            elif SERVER.fullmatch(command):
                self.start_server(line, command, output)
            elif output or not MAKE.match(command):  # check_targets() has a look at these
                self.command(line, command, output)
        self.end_server()
        return self.messages

    def tell(self, line, text):
        self.messages.append(self.page.message(line, text))

    def compare(self, line, command, output, printed, places):
        expected = normalised(output)
        if not matches(expected, normalised(printed)):
            diff = difflib.unified_diff(
                expected, normalised(printed), f"{self.page.path}:{line}",
                "what it prints", lineterm="")
            self.tell(line, f"`{command}` prints something else:\n" + "\n".join(diff))
            if (edits := mended(output, printed)) is not None:
                self.edits.update({places[at]: new for at, new in edits.items()})
                self.mended.append(self.messages[-1])

    def command(self, line, command, output):
        process = self.run(["timeout", "-k", "5", str(LIMIT), "bash", "-c",
                            ADDRESS.sub(self.address or "ADDRESS", command)])
        if process.wait(LIMIT + 30) in (124, 137):
            self.tell(line, f"`{command}` does not end:\n{process.output}")
        else:
            self.compare(line, command, output, process.output.splitlines(),
                         range(line + 1, line + 1 + len(output)))

    def start_server(self, line, command, output):
        self.end_server()
        settings, path = SERVER.fullmatch(command).groups()
        self.server = self.run(path.split(), **dict(
            setting.split("=", 1) for setting in shlex.split(settings)))
        self.address = self.server.wait_for(
            r"following command:\n.* ([0-9a-f]+)( FILE)?\n")[1]
        self.line, self.shown, self.output = line, command, output
        self.places = [*range(line + 1, line + 1 + len(output))]

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
        time.sleep(0.2)  # for a line too many
        # The server of 2_first takes one message and ends.
        if not self.shown.endswith("/2_first"):
            if process.popen.poll() is not None:
                self.tell(self.line, f"`{self.shown}` has ended by itself")
            process.signal(signum)
        try:
            if status := process.wait(self.patience):
                self.tell(self.line, f"`{self.shown}` exits with {status}")
        except subprocess.TimeoutExpired:
            self.tell(self.line, f"`{self.shown}` does not end")
        self.compare(self.line, self.shown, output, process.output.splitlines(),
                     self.places)
