"""A program as the book shows it: highlighted, with what is new in it, and with the
passage of a chapter that explains each line. The same for what it is after each of its
moves."""

import functools
import html
import posixpath
import re
import subprocess
import typing

from pygments.lexers import CppLexer
from pygments.token import Comment, Keyword, Name, Number, String

import chapters
import lines
import naming
import repository

# The classes of what has a colour. All else goes without a <span>, which halves a page.
CLASSES = [(Comment.PreprocFile, "s"), (Comment.Preproc, "p"), (Comment, "c"),
           (Keyword.Type, "t"), (Keyword, "k"), (String, "s"), (Number, "m"),
           (Name.Function, "f"), (Name.Class, "f")]


def highlight(text, lexer=None):
    """The lines of a source as HTML."""
    if lexer:
        return coloured(text, lexer)
    # Most of a program is in those before it, too. A blank line before one that isn't
    # indented is between two definitions.
    parts = [highlight_part(part) for part in re.split(r"\n\n(?=\S)", text)]
    return [line for at, part in enumerate(parts) for line in [""] * (at > 0) + part]


@functools.lru_cache(maxsize=None)
def highlight_part(text):
    return coloured(text, CppLexer(stripnl=False))


def coloured(text, lexer):
    done = [""]
    for kind, value in lexer.get_tokens(text):
        name = next((name for token, name in CLASSES if kind in token), None)
        for at, part in enumerate(value.split("\n")):
            if at:
                done.append("")
            if part:
                part = html.escape(part, quote=False)
                done[-1] += f"<b class={name}>{part}</b>" if name else part
    return done[:-1] if done[-1] == "" else done


class Step(typing.NamedTuple):
    """What `make diff-N` shows, in numbers of lines from 0."""
    new: set
    removed: dict  # the number of the line before which they stood: their numbers
    before: dict  # a line that stays: its number in the program before
    size: tuple = (0, 0)  # how many lines are removed and added


def application(source):
    """Where the application begins, as in scripts/diff.sh."""
    title = "// ---- The application ----"
    return source.index(title) if title in source else 0


def read_diff(text, before, after):
    """The step that the output of scripts/diff.sh describes."""
    new, removed, kept = set(), {}, {}
    shift = old = now = 0
    shift_old = shift_now = 0

    def keep(until):
        nonlocal old, now
        while now < until:
            kept[now] = old
            old, now = old + 1, now + 1

    for line in text.splitlines():
        hunk = re.match(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", line)
        if re.match(r"==== 2\. ", line):
            # The lines of the second diff are counted from its own beginning.
            shift = 1
        elif hunk:
            if shift == 1:
                shift_old, shift_now = application(before), application(after)
                keep(shift_now)
                shift = 2
            # A hunk without lines names the line before it.
            keep(int(hunk[3]) - (hunk[4] != "0") + shift_now)
            left = [int(hunk[2] or 1), int(hunk[4] or 1)]
            assert old == int(hunk[1]) - (hunk[2] != "0") + shift_old
        elif line[:1] == "-" and not line.startswith("--- a/"):
            removed.setdefault(now, []).append(old)
            old += 1
        elif line[:1] == "+" and not line.startswith("+++ b/"):
            new.add(now)
            now += 1
        elif line[:1] == " " and left != [0, 0]:
            keep(now + 1)
    keep(len(after))
    return Step(new, removed, kept,
                (sum(map(len, removed.values())), len(new)))


def move_step(before, after):
    """What a move changes. Lines that are only indented anew stay."""
    same = lines.kept(before, after)
    removed, stayed = {}, {old: now for now, old in same.items()}
    now = 0
    for old in range(len(before)):
        if old in stayed:
            now = stayed[old] + 1
        else:
            removed.setdefault(now, []).append(old)
    new = set(range(len(after))) - set(same)
    return Step(new, removed, same, (len(before) - len(same), len(new)))


class Program:
    """The program of a chapter, which is a chapters.Page; or what it is after a move, if
    the finished one is given."""

    def __init__(self, page, parent=None, main=None, finished=None, move=None):
        self.page = page
        self.address = posixpath.basename(page.path).removesuffix(".md") + ".html"
        self.finished, self.move = finished or self, move
        self.name = f"{page.number}.{move}" if move else page.program
        self.parent = parent  # the Program that this one is based on
        # The same one as other chapters have it, the main chapter first.
        self.all = main.all if main else []
        self.all.append(self)
        if not finished:
            self.states = main.states if main else lines.states(page)
            self.origins = main.origins if main else lines.origins(self.states)
        at = move or -1
        self.source = self.finished.states[at][:-1]
        self.lives = self.finished.origins[at][:-1]
        self.excerpts = {}  # the line of a block in the chapter: its parts
        for block in page.blocks:
            parts = lines.shown_parts(block, self.source)
            if parts and page.move(block.line) == move:
                self.excerpts[block.line] = parts
        # The names that have a passage; set by the chapter.
        self.mentioned = finished.mentioned if finished else set()
        if finished:
            return
        self.moves = []
        for number in range(1, len(page.states)):
            self.moves.append(Program(
                page, self.moves[-1] if self.moves else parent,
                main.moves[number - 1] if main else None, self, number))
        self.ids = {line: f"excerpt-{n}" for n, line in enumerate(sorted(
            line for one in [self, *self.moves] for line in one.excerpts), 1)}

    @functools.cached_property
    def html(self):
        done = highlight("\n".join(self.source) + "\n")
        assert len(done) == len(self.source), self.name
        return done

    @functools.cached_property
    def step(self):
        if not self.parent:
            return Step(set(), {}, {})
        if self.move:
            return move_step(self.parent.source, self.source)
        done = subprocess.run(
            ["scripts/diff.sh", self.name, self.name],
            cwd=self.page.root, check=True, text=True, capture_output=True)
        return read_diff(done.stdout, self.parent.source, self.source)

    @functools.cached_property
    def places(self):
        """What the chapter shows of it: the name of each excerpt, and the numbers of its
        lines. Other moves' excerpts show what has stayed until this one, or stays after
        it; they come last."""
        where = {line: at for at, line in enumerate(self.lives)}
        found = []
        for one in [self.finished, *self.finished.moves]:
            for line, parts in one.excerpts.items():
                numbers = {where.get(one.lives[at]) for _, part in parts for at in part}
                found.append((one is not self, line, numbers - {None}))
        return [(self.finished.ids[line], numbers) for _, line, numbers in sorted(
            found, key=lambda place: place[:2])]

    @functools.cached_property
    def naming(self):
        return naming.Naming(self.page, self.source,
                             set().union(*(numbers for _, numbers in self.places)))

    @functools.cached_property
    def targets(self):
        """Where a name in the text leads to: its definition, a new one first."""
        found = {}
        for definition in self.naming.definitions:
            found.setdefault(definition.name, []).append(definition)
            for outer in self.naming.around(definition.first)[:-1]:
                found[f"{outer.name}::{definition.name}"] = [definition]
        targets = {}
        for name, those in found.items():
            if those[0].kind == "value" and (
                    len(those) > 1 or naming.is_common(those[0])):
                continue
            # A declaration only tells that there is a definition elsewhere.
            targets[name] = min(those, key=lambda d: (
                d.kind != "type",
                d.kind == "function" and bool(
                    re.search(r"\);(\s*//.*)?$", self.source[d.last])),
                not self.step.new.intersection(
                    range(d.first, d.last + 1)), d.first))
        return targets

    @property
    def told(self):
        """Itself after the moves that the chapter tells."""
        those = {move for _, move in self.page.sections}
        return [one for one in self.moves if one.move in those]

    def at(self, move):
        """Itself after a move, or, without one, finished."""
        return self.moves[move - 1] if move else self

    def place(self, first, last):
        """The address of its lines from one number to another, which begin at 0."""
        return (f"#{self.name}-" if self.move else "#") + f"L{first + 1}" + (
            f"-L{last + 1}" if last > first else "")

    def plain_place(self, first, last):
        """Without the page's script, only the finished program is there: the first of these
        lines that it has."""
        where = {line: at for at, line in enumerate(self.finished.lives)}
        left = [where[line] for line in self.lives[first:last + 1] if line in where]
        return f"#L{left[0] + 1}" if left else "#program"

    def words(self):
        """All words in it: its names, and others that mean nothing."""
        return sorted(set(re.findall(r"\w+", "\n".join(self.source))))

    @functools.lru_cache(maxsize=None)
    def passage(self, number):
        """What explains a line: shown or named, the chapter's page (empty for this
        one), and the place in it. None if nothing does."""
        for place, numbers in self.places:
            if number in numbers:
                return "shown", "", place
        word = self.naming.word(number)
        if word in self.mentioned:
            return "named", "", f"name-{word}"
        if word:
            for place, numbers in self.places:
                if any(re.search(rf"\b{word}\b", self.source[n]) for n in numbers):
                    return "named", "", place
        return None

    def inherited(self, number):
        """The passage of another chapter about this line, or of an earlier one if this
        step has kept it."""
        program = self
        while True:
            for other in program.all:
                found = other is not self and other.passage(number)
                if found:
                    # An earlier move may have it in this very chapter.
                    return found if other.address == self.address else (
                        "earlier", other.address, found[2])
            if not program.parent or number not in program.step.before:
                return None
            number, program = program.step.before[number], program.parent

    def passages(self):
        """Runs of lines with the same passage: first, last, kind, page, place."""
        runs = []
        for number in range(len(self.source)):
            found = self.passage(number) or self.inherited(number)
            if found is None or not self.source[number].strip():
                continue
            if runs and runs[-1][1] == number and runs[-1][2:] == list(found):
                runs[-1][1] += 1
            else:
                runs.append([number + 1, number + 1, *found])
        return runs

    # ---- HTML ----

    def groups(self):
        """All lines, in groups: those as in the program before, with a text that can stand
        for them; new ones; and, with the numbers that they had, those that are gone."""
        found = []

        def put(kind, number):
            if not found or found[-1][0] != kind:
                found.append((kind, []))
            found[-1][1].append(number)

        for number in range(len(self.source) + 1):
            for old in self.step.removed.get(number, []):
                put("gone", old)
            if number < len(self.source):
                put("old" if self.parent and number not in self.step.new else "new", number)
        return [(self.summary(numbers) if kind == "old" else kind, numbers)
                for kind, numbers in found]

    def summary(self, numbers):
        last, count = numbers[-1], len(numbers)
        text = f"{count} line{'s' * (count > 1)} as in {self.parent.name}"
        following = self.naming.around(min(last + 1, len(self.source) - 1))
        if following and following[0].first <= last:
            text += f" · then, in <i>{following[0].name}</i>"
        return text

    def rows(self):
        """All lines. What has not changed is in groups that can be folded."""
        done = []
        for kind, numbers in self.groups():
            if kind == "gone":
                done += [f"<del>{self.parent.html[old]}</del>" for old in numbers]
            elif kind == "new":
                done += [self.row(number) for number in numbers]
            else:
                done += [f"<details class=old open><summary>{kind}</summary>",
                         *(self.row(number) for number in numbers), "</details>"]
        return "".join(done)

    def lines_for_script(self):
        """The groups, after a move. A line is what it is in the finished program, as its
        number there, or its HTML; or both, if it is only indented differently there."""
        where = {line: at for at, line in enumerate(self.finished.lives)}

        def line(number):
            at, code = where.get(self.lives[number]), self.html[number]
            if at is None:
                return code
            return at + 1 if code == self.finished.html[at] else [at + 1, code]

        return [[kind, *([self.parent.html[old] for old in numbers] if kind == "gone"
                         else map(line, numbers))] for kind, numbers in self.groups()]

    def row(self, number):
        new = " class=new" if number in self.step.new else ""
        at = number + 1
        return (f"<div id=L{at}{new}><a href=#L{at}>{at}</a>"
                f"{self.html[number]}\n</div>")

    def map(self, runs):
        """A picture of the whole program: left what is shown or named, right what is
        new."""
        kinds = {"shown": [], "named": []}
        for first, last, kind, *_ in runs:
            if kind in kinds:
                kinds[kind].append((first - 1, last - first + 1))
        paths = {name: "".join(f"M0 {at}h2v{count}h-2z" for at, count in where)
                 for name, where in kinds.items()}
        paths["new"] = "".join(f"M2 {n}h1v1h-1z" for n in sorted(self.step.new))
        return (f'<svg viewBox="0 0 3 {len(self.source)}" preserveAspectRatio="none" '
                'aria-hidden="true">' + "".join(
                    f'<path class={name} d="{path}"/>' for name, path in paths.items())
                + "</svg>")

    def excerpt(self, block):
        """The lines of an excerpt as they stand in the program, and its places there:
        HTML, and a list of ranges."""
        parts = self.excerpts.get(block.line)
        if not parts:
            return None, []
        done, at = [], 0
        ends = {index: where for index, where in parts}
        while at < len(block.lines):
            if at in ends:
                where = ends[at]
                done.append(f'<span class=part data-lines="{where[0] + 1}-{where[-1] + 1}">')
                done += ["<span class=new>" * (n in self.step.new) + self.html[n]
                         + "\n" + "</span>" * (n in self.step.new) for n in where]
                done.append("</span>")
                at += len(where)
            else:
                done.append("<span class=gap>" + html.escape(block.lines[at].rstrip())
                            + "\n</span>")
                at += 1
        return "".join(done), [where for _, where in parts]


def parent(name, root):
    """The program that this one is based on. None also if that cannot be told, which
    the tests complain about."""
    try:
        return repository.parent(name, root)
    except AssertionError:
        return None


def programs(root):
    """All programs by their names, parents first. One without a chapter has no page; the
    tests say what it lacks."""
    pages, found = chapters.pages_of_programs(root), {}

    def add(name):
        """With its parent, which may have the higher number."""
        if name in found or name not in pages or name not in chapters.programs(root):
            return found.get(name)
        main = Program(pages[name], add(parent(name, root)))
        for other in pages[name].companions[1:]:
            Program(other, main.parent, main)
        found[name] = main
        return main

    for name in pages:
        add(name)
    return found
