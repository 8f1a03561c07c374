"""A program as the book shows it: highlighted, with what is new in it, and with the
passage of a chapter that explains each line."""

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
    done = [""]
    for kind, value in (lexer or CppLexer(stripnl=False)).get_tokens(text):
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
    rule = "// The application"
    return source.index(rule) - 1 if rule in source else 0


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


class Program:
    """The program of a chapter, which is a chapters.Page."""

    def __init__(self, page, parent=None, main=None):
        self.page = page
        self.address = posixpath.basename(page.path).removesuffix(".md") + ".html"
        self.name = page.program
        self.parent = parent  # the Program that this one is based on
        # The same one as other chapters have it, the main chapter first.
        self.all = main.all if main else []
        self.all.append(self)
        self.source = lines.source_lines(page.root, self.name)[:-1]
        self.html = highlight("\n".join(self.source) + "\n")
        assert len(self.html) == len(self.source), self.name
        self.naming = naming.Naming(page, self.source)
        self.excerpts = {}  # the line of a block in the chapter: its parts
        for block in page.blocks:
            parts = lines.shown_parts(block, self.source)
            if parts:
                self.excerpts[block.line] = parts
        self.ids = {line: f"excerpt-{n}" for n, line in enumerate(self.excerpts, 1)}
        self.step = Step(set(), {}, {})
        if parent:
            done = subprocess.run(
                ["scripts/diff.sh", self.name, self.name],
                cwd=page.root, check=True, text=True, capture_output=True)
            self.step = read_diff(done.stdout, parent.source, self.source)
        self.targets = self._targets()
        self.mentioned = set()  # the names that have a passage; set by the chapter

    def _targets(self):
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

    def words(self):
        """All words in it: its names, and others that mean nothing."""
        return sorted(set(re.findall(r"\w+", "\n".join(self.source))))

    @functools.lru_cache(maxsize=None)
    def passage(self, number):
        """What explains a line: shown or named, the chapter's page (empty for this
        one), and the place in it. None if nothing does."""
        for line, parts in self.excerpts.items():
            if any(number in where for _, where in parts):
                return "shown", "", self.ids[line]
        word = self.naming.word(number)
        if word in self.mentioned:
            return "named", "", f"name-{word}"
        if word:
            for line, parts in self.excerpts.items():
                if any(re.search(rf"\b{word}\b", self.source[n])
                       for _, where in parts for n in where):
                    return "named", "", self.ids[line]
        return None

    def inherited(self, number):
        """The passage of another chapter about this line, or of an earlier one if this
        step has kept it."""
        program = self
        while True:
            for other in program.all:
                found = other is not self and other.passage(number)
                if found:
                    return "earlier", other.address, found[2]
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

    def rows(self):
        """All lines. What has not changed is in groups that can be folded."""
        done, group = [], []

        def fold():
            if not group:
                return
            first, last = group[0], group[-1]
            count = last - first + 1
            text = f"{count} line{'s' * (count > 1)} as in {self.parent.name}"
            following = self.naming.around(min(last + 1, len(self.source) - 1))
            if following and following[0].first <= last:
                text += f" · then, in <i>{following[0].name}</i>"
            done.append(f"<details class=old open><summary>{text}</summary>")
            done.extend(self.row(number) for number in group)
            done.append("</details>")
            group.clear()

        for number in range(len(self.source) + 1):
            gone = self.step.removed.get(number, [])
            if gone:
                fold()
                done.extend(f"<del>{self.parent.html[old]}</del>" for old in gone)
            if number == len(self.source):
                break
            if self.parent and number not in self.step.new:
                group.append(number)
            else:
                fold()
                done.append(self.row(number))
        fold()
        return "".join(done)

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
    found = {}
    for page in chapters.pages_of_programs(root).values():
        if page.program not in chapters.programs(root):
            continue
        main = Program(page, found.get(parent(page.program, root)))
        for other in page.companions[1:]:
            Program(other, main.parent, main)
        found[main.name] = main
    return found
