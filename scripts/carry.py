#!/usr/bin/env python3
"""Carries a change into all texts that share the changed lines.

The programs, the programs after their moves, and what patches make of them (answers of
exercises, breaks, programs of one's own) are the nodes of one tree. A child is its parent's
text with a patch; that of a program without moves is a file. In memory they are one weave:
each line once, with the nodes that have it. Change any node, and this changes all below it,
and the moves that lead to it, which have the lines.

Usage: scripts/carry.py [--since REV] [--compile]
           --since REV  what has changed since this commit (HEAD)
           --compile    compiles each text that it has changed
       scripts/carry.py list                        the nodes, below their parents
       scripts/carry.py state NODE [FILE]           prints a node's text, or writes it
       scripts/carry.py write NODE FILE [PARENT]    makes a node's patch from a text;
                                                    PARENT: of a new one in own/
A NODE is 6_write, 6.3 (after that move), exercises/6_write, breaks/6.3, own/blank ..., or
the path of its file.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import difflib
import functools
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import typing

sys.path.insert(0, f"{os.path.dirname(os.path.realpath(__file__))}/moves")
import moves  # noqa: E402  pylint: disable=wrong-import-position

ROOT = moves.ROOT
FOLDERS = ["exercises", "breaks", "own"]
SIMILAR = 0.5  # a line and the one that replaces it
LARGE = 20  # lines; where a node has as many others, it has another section
# What a node does with a change.
TAKEN = ["there", "put", "perhaps"]
SAYS = {"perhaps": "put in beside lines of its own, look",
        "alike": "done in a similar line, look",
        "look": "LOOK, left out, since it has others there",
        "hand": "left as somebody has changed it by hand",
        "nameless": "left out, since the move has not got its names yet",
        "later": "left out, since the move has not got its neighbours yet"}
WORD = re.compile(r"[A-Za-z_]\w*")


# ---- The tree ----

class Node(typing.NamedTuple):
    name: str  # as somebody calls it
    parent: str  # the key of another one
    file: pathlib.Path  # what stores it
    program: str = ""  # for a program: the one that it is based on
    last: typing.Optional[pathlib.Path] = None  # the patch of its last move

    def is_program(self):
        return self.file.suffix == ".cpp"

    def is_move(self):
        return self.file.parent.parent.name == "moves"


def graph(root):
    """The nodes by their keys, each after its parent. The key of a move has its name, which
    stays when its number changes."""
    root = pathlib.Path(root)
    # One without libfabric shares nothing with the others.
    names = sorted((path.stem for path in root.glob("src/*.cpp")
                    if re.match(r"\d+_", path.stem)
                    and "#include <infiniband/verbs.h>" not in path.read_text()),
                   key=lambda name: int(name.split("_")[0]))
    found, known = {}, {}
    for name in names:
        before = based_on = moves.parent(name, root) if name != names[0] else ""
        patches, number = moves.patches(name, root), name.split("_")[0]
        for k, path in enumerate(patches[:-1], 1):
            key = f"{name}/{moves.word(path)}"
            found[key] = Node(f"{number}.{k}", before, path)
            before = known[f"{number}.{k}"] = key
        known[f"{number}.{len(patches)}"] = name
        found[name] = Node(name, before, root / f"src/{name}.cpp", based_on,
                           patches[-1] if patches else None)
    paths = [path for folder in FOLDERS for path in sorted(root.glob(f"scripts/{folder}/*.patch"))]
    known.update({path.stem: f"own/{path.stem}" for path in paths if path.parent.name == "own"})
    for path in paths:
        head = re.search(r"(?m)^--- a/src/(.+)\.cpp$", path.read_text())
        key = f"{path.parent.name}/{path.stem}"
        found[key] = Node(key, known.get(head and head[1], head and head[1]), path)
    placed = {}
    while found:
        ready = [key for key, node in found.items() if not node.parent or node.parent in placed]
        if not ready:
            raise ValueError("\n".join(f"{node.file}: there is no {node.parent}"
                                       for node in found.values() if node.parent not in found))
        placed.update({key: found.pop(key) for key in ready})
    return placed


def fit_exactly(patch, text):
    """What a patch makes of a text, at its very place."""
    return moves.apply(text, moves.split(patch)[1])


def fit(patch, text):
    """What a patch makes of a text, where git may look for another place."""
    try:
        return fit_exactly(patch, text)
    except ValueError:
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "x").write_text(text)
            moves.output(["git", "apply", "-"], folder, input=re.sub(
                r"\A--- a/.*\n\+\+\+ b/.*", "--- a/x\n+++ b/x", moves.split(patch)[1]),
                         env={**os.environ, "GIT_CEILING_DIRECTORIES": folder, "LC_ALL": "C"})
            return pathlib.Path(folder, "x").read_text()


def texts_of(nodes, says, fitting=fit):
    """The text of each node. Says of which it can't be made."""
    texts = {}
    for key, node in nodes.items():
        try:
            if node.is_program():
                texts[key] = node.file.read_text()
            elif node.parent in texts:
                texts[key] = fitting(node.file.read_text(), texts[node.parent])
        except ValueError as error:
            says.append(f"{node.name}: its patch does not fit: {error}")
    return texts


def find(nodes, name):
    """The key of a node that somebody has named."""
    short = re.sub(r"^scripts/|\.(patch|cpp)$", "", os.path.normpath(name))
    for key, node in nodes.items():
        last = node.last and f"{key.split('_')[0]}.{node.last.name.split('_')[0]}"
        if short in (node.name, f"src/{key}", last) or \
                pathlib.Path(name).resolve() in (node.file, node.last):
            return key
    raise ValueError(f"there is no {name}; scripts/carry.py list names what there is")


@functools.lru_cache(maxsize=None)
def read_all(root):
    """The nodes, their texts, and what is wrong with those that have none. Read once."""
    says, nodes = [], graph(root)
    return nodes, texts_of(nodes, says), says


def text_of(name, root=ROOT):
    """The text of a node that somebody has named."""
    nodes, texts, says = read_all(root)
    key = find(nodes, name)
    if key not in texts:
        raise ValueError("\n".join(says))
    return texts[key]


# ---- The weave ----

class Line:
    """A line, and how it is written in each node that has it: the blanks before a comment
    may differ."""

    def __init__(self, key):
        self.key, self.at = key, {}


def key_of(line):
    return re.sub(r"(?<=\S) +//", " //", line)


def common(a, b):
    """The pairs of indices of the same lines of two texts, as git sees them."""
    pairs, i, j = [], 0, 0
    hunks = re.findall(r"(?m)^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@",
                       moves.diff("".join(a), "".join(b), "-U0"))
    for start, removed, _, added in [*hunks, (len(a) + 1, 1, 0, 0)]:
        start, removed = int(start), int(removed or 1)
        while i < start - (removed > 0):
            pairs.append((i, j))
            i, j = i + 1, j + 1
        i, j = i + removed, j + int(added or 1)
    return pairs


def alike(old, new):
    """Whether these lines replace those, one by one."""
    return len(old) == len(new) and all(
        difflib.SequenceMatcher(None, a.strip(), b.strip(), False).ratio() > SIMILAR
        for a, b in zip(old, new))


class Weave:
    def __init__(self):
        self.lines = []

    def of(self, node):
        return [line for line in self.lines if node in line.at]

    def text(self, node):
        return "".join(line.at[node] for line in self.of(node))

    def add(self, node, text, parent):
        """Adds a text, which has lines of its parent, and may have others that are between
        them already: it shares those, too."""
        raw = moves.lines_of(text)
        keys = [key_of(line) for line in raw]
        old = self.of(parent)
        pairs = common([line.key for line in old], keys)
        where = {line: i for i, line in enumerate(self.lines)}
        result, at, j = [], 0, 0
        for i, k in [*((where[old[i]], k) for i, k in pairs), (len(self.lines), len(keys))]:
            result += self.gap(self.lines[at:i], node, raw[j:k], keys[j:k], parent)
            if k < len(keys):
                self.lines[i].at[node] = raw[k]
                result.append(self.lines[i])
            at, j = i + 1, k + 1
        self.lines = result

    @staticmethod
    def gap(lines, node, raw, keys, parent):
        """Puts a node's lines between those that lie there."""
        if not raw:
            return lines
        there, result, at, j = [line.key for line in lines], [], 0, 0
        for i, k, n in difflib.SequenceMatcher(None, there, keys, False).get_matching_blocks():
            if n and not any(WORD.search(key) for key in keys[k:k + n]):
                continue  # braces and blanks, which say nothing
            new = [Line(key) for key in keys[j:k]]
            for line, text in zip(new + lines[i:i + n], raw[j:k + n]):
                line.at[node] = text
            # Before the lines of the parent that they replace.
            gone = [line for line in lines[at:i] if parent in line.at]
            each = alike([line.at[parent] for line in gone], raw[j:k])
            result += [] if gone else new
            for line in lines[at:i]:
                if line in gone and new:
                    result += new[:1] if each else new
                    new = new[1:] if each else []
                result.append(line)
            result += lines[i:i + n]
            at, j = i + n, k + n
        return result


def weave_of(nodes, texts):
    weave = Weave()
    for key, text in texts.items():
        weave.add(key, text, nodes[key].parent)
    return weave


# ---- Carrying ----

class Hunk(typing.NamedTuple):
    """What has changed at one place of a node."""
    source: str
    gone: tuple  # lines of the weave
    new: tuple

    def diff(self):
        return [f"    {mark}{line.at[key].rstrip()}" for mark, lines, key in (
            ("-", self.gone, self.source), ("+", self.new, self.source + "'")) for line in lines]


def hunks(weave, node):
    """What was done to a node. Lines that replace similar ones do so one by one."""
    found, gone, new = [], [], []
    for line in [*weave.lines, None]:
        before, after = line and node in line.at, line and node + "'" in line.at
        if line and not before and not after:
            continue
        if before == after:
            pairs = [(gone, new)] if gone or new else []
            if gone and alike([x.at[node] for x in gone], [x.at[node + "'"] for x in new]):
                pairs = [([x], [y]) for x, y in zip(gone, new)]
            found += [Hunk(node, tuple(x), tuple(y)) for x, y in pairs]
            gone, new = [], []
        elif before:
            gone.append(line)
        else:
            new.append(line)
    return found


class State:
    """Which lines each node had, and has now."""

    def __init__(self, nodes, old, new):
        self.nodes = nodes
        self.weave = weave_of(nodes, old)
        self.edited = [key for key in old if new[key] != old[key]]
        for key in self.edited:
            self.weave.add(key + "'", new[key], key)
        self.old = {key: set(self.weave.of(key)) for key in old}
        self.now = {key: set(self.weave.of(key + "'" * (key in self.edited))) for key in old}
        self.at = {line: i for i, line in enumerate(self.weave.lines)}
        self.verdicts = collections.defaultdict(dict)  # of each node, by hunk
        self.alike = {}

    def text(self, key):
        return "".join(line.at.get(key + "'") or line.at.get(key) or [*line.at.values()][-1]
                       for line in self.weave.lines if line in self.now[key])

    def carry(self):
        """Carries each change on, from neighbour to neighbour, as far as it goes."""
        for key in self.edited:
            for hunk in hunks(self.weave, key):
                same = [x for x in self.verdicts if (x.gone, x.new) == (hunk.gone, hunk.new)]
                self.verdicts[(same or [hunk])[0]][key] = "there"
        queue = collections.deque((hunk, key) for hunk, by in self.verdicts.items() for key in by)
        while queue:
            while queue:
                hunk, near = queue.popleft()
                by = self.verdicts[hunk]
                for node, up in self.neighbours(near, hunk):
                    if node not in self.old or by.get(node) in [*TAKEN, "alike", "hand", "done"]:
                        continue
                    by[node] = self.decide(hunk, node, near, up)
                    same = by[node] == "look" and self.adapt(hunk, node, near)
                    if same:
                        by[node] = "done" if same == hunk else "alike"
                    if by[node] in [*TAKEN, "alike"]:
                        self.take(same or hunk, node)
                        queue.append((same or hunk, node))
            queue.extend(self.needed())

    def adapt(self, hunk, node, near):
        """The same change in a similar line that a node has of its own, if there is one. The
        change itself if somebody has done that by hand."""
        if len(hunk.gone) != 1 or len(hunk.new) != 1 or hunk.gone[0] in self.old[node]:
            return None
        old, new = (line.key.strip() for line in hunk.gone + hunk.new)
        a, b = (re.findall(r"\w+|.", text) for text in (old, new))
        first = len(os.path.commonprefix([a, b]))
        last = len(os.path.commonprefix([a[:first - 1:-1] if first else a[::-1],
                                         b[:first - 1:-1] if first else b[::-1]]))
        was, becomes = ("".join(x[first:len(x) - last]) for x in (a, b))
        if not was:
            return None
        found = [line for line in self.now[node] if was in line.key]
        if not found and any(becomes in line.key for line in self.now[node] - self.old[node]):
            return hunk
        found = [line for line in found if line not in self.old[near] and alike([line.key], [old])]
        if len(found) != 1 or found[0].key.count(was) != 1:
            return None
        key = found[0].key.replace(was, becomes)
        if (found[0], key) not in self.alike:
            same = self.alike[found[0], key] = Hunk(node, (found[0],), (Line(key),))
            self.weave.lines.insert(self.at[found[0]], same.new[0])
            self.at = {line: i for i, line in enumerate(self.weave.lines)}
        same = self.alike[found[0], key]
        raw = found[0].at.get(node + "'") or found[0].at[node]
        same.new[0].at[node + "'"] = raw.replace(was, becomes)
        return same

    def take(self, hunk, node):
        self.verdicts[hunk][node] = self.verdicts[hunk].get(node, "there")
        self.now[node] -= {*hunk.gone}
        self.now[node] |= {*hunk.new}

    def needed(self):
        """What was left for a later move, and has a new name that an earlier one uses."""
        for hunk, by in self.verdicts.items():
            for node in [node for node, verdict in by.items() if verdict == "later"]:
                if any(self.names(hunk) & self.names(other)
                       for other, of in self.verdicts.items() if of.get(node) in TAKEN):
                    by[node] = "perhaps"
                    self.take(hunk, node)
                    yield hunk, node

    @functools.lru_cache(maxsize=None)
    def names(self, hunk):
        return names_in(self.new_text(hunk)) - self.words(hunk.source)

    @staticmethod
    def new_text(hunk):
        return "".join(line.at[hunk.source + "'"] for line in hunk.new)

    @functools.lru_cache(maxsize=None)
    def words(self, node):
        return names_in(self.weave.text(node))

    def lacks(self, hunk, node):
        """Whether a change uses a name of ours that its source had and this has not."""
        return any(re.match("k?([A-Z]+[a-z]|[A-Z]$)", word) and word not in self.words(node)
                   for word in names_in(self.new_text(hunk)) & self.words(hunk.source))

    def neighbours(self, key, hunk):
        """Where a change goes on to: the nodes below, and the moves that lead to a program
        that has it. And whether that is up."""
        for other, node in self.nodes.items():
            if key in (node.parent, node.program):
                yield other, False
        above = self.nodes[key].parent
        if above and self.nodes[above].is_move() and (
                self.nodes[key].is_program() or
                self.nodes[key].is_move() and key != hunk.source):
            yield above, True

    def decide(self, hunk, node, near, up):
        """What a node does with a change that its neighbour has."""
        verdict = self.place(hunk, node, near, up)
        if verdict in ("put", "perhaps") and self.lacks(hunk, node):
            verdict = "nameless" if up else "look"
        return verdict

    def place(self, hunk, node, near, up):
        has, had = self.now[node], self.old[node]
        gone = [line for line in hunk.gone if line in has]
        there = [line for line in hunk.new if line in has]
        if not gone and len(there) == len(hunk.new):
            return "there" if there or {*hunk.gone} & had else "away"
        touched = sorted(self.at[line] for line in hunk.gone + hunk.new)
        before, after = self.around(touched, self.old[near])
        # The place, up to what both have on either side.
        start, end = self.around(touched, self.old[near] & has)
        place = self.weave.lines[start + 1:end]
        own = [line for line in place if line in has and line not in hunk.gone]
        if {*hunk.gone} & had - has and not gone or any(
                line not in had and line not in self.now[near] for line in own):
            return "hand" if node in self.edited else "look"
        if there:
            return "perhaps" if node in self.edited and not gone else "look"
        if hunk.gone and gone:
            inside = self.weave.lines[self.at[gone[0]]:self.at[gone[-1]]]
            whole = len(gone) == len(hunk.gone) or not hunk.new
            return "put" if whole and not {*inside} & {*own} else "look"
        sides = 0 if hunk.gone else (start == before) + (end == after)
        if sides == 0:
            rewritten = sum(line in self.old[near] for line in place)
            return "look" if own and rewritten < LARGE else "away"
        return "later" if sides == 1 and up else "perhaps" if own or sides == 1 else "put"

    def around(self, touched, lines):
        """The indices of the nearest lines of a set before and after these."""
        i, j = touched[0] - 1, touched[-1] + 1
        while i >= 0 and self.weave.lines[i] not in lines:
            i -= 1
        while j < len(self.weave.lines) and self.weave.lines[j] not in lines:
            j += 1
        return i, j


def names_in(text):
    """The words of its code."""
    return {*WORD.findall(re.sub(r'//.*|"(\\.|[^"\\\n])*"', "", text))}


def renamed(before, after):
    """The names that a change has replaced everywhere, each by one that was not there."""
    gone = names_in(before) - {*WORD.findall(after)}
    new = names_in(after) - {*WORD.findall(before)}
    a, b = before.splitlines(), after.splitlines()
    pairs = set()
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, a, b, False).get_opcodes():
        x, y = WORD.findall("\n".join(a[i1:i2])), WORD.findall("\n".join(b[j1:j2]))
        if tag == "replace" and len(x) == len(y):
            pairs |= {(p, q) for p, q in zip(x, y) if p in gone and q in new}
    olds, news = [p for p, _ in pairs], [q for _, q in pairs]
    return {p: q for p, q in pairs if olds.count(p) == news.count(q) == 1 < len(p)}


def rename_all(nodes, old, new, says):
    """Renames what a node has renamed, also in what others have of their own."""
    for source in [key for key in old if new[key] != old[key]]:
        names = renamed(old[source], new[source])
        names = {p: q for p, q in names.items()
                 if not any(re.search(rf"\b{q}\b", text) for text in old.values())}
        # The moves of a step belong to its program, and so does what is below them.
        tops = {source, *(key for key in old if key.startswith(source + "/"))}
        scope = [key for key in old if tops & {*above(nodes, key)}]
        for key in scope if names else []:
            for texts in old, new:
                text = WORD.sub(lambda found: names.get(found[0], found[0]), texts[key])
                if text != texts[key]:
                    texts[key] = like(texts[key], text)
        for p, q in names.items():
            says.append(f"{nodes[source].name}: {p} is {q} now")


def above(nodes, key):
    """A node, and all above it."""
    while key:
        yield key
        key = nodes[key].parent


@functools.lru_cache(maxsize=None)
def formatted(text):
    """What clang-format makes of it. Without it, the column of comments is left to do."""
    if not (ROOT / ".clang-format").exists() or not shutil.which("clang-format"):
        return text
    return moves.output(["clang-format", "--assume-filename=src/x.cpp"], ROOT, input=text)


def like(old, text):
    """A text that has been changed, in the format that it had."""
    return formatted(text) if text != old and formatted(old) == old else text


def at_commit(rev, folder, root):
    """Writes the files of a commit into a folder."""
    done = subprocess.run(["git", "archive", rev], cwd=root, check=False, capture_output=True)
    if done.returncode:
        raise ValueError(f"there is no commit {rev}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder)


def before_and_after(nodes, rev, root, bad):
    """The texts at a commit, and as they are now. A patch that is as it was makes what it
    made: its new text is to be found."""
    with tempfile.TemporaryDirectory() as folder:
        at_commit(rev, folder, root)
        old_nodes = graph(folder)
        old = texts_of(old_nodes, bad)
        patches = {key: old_nodes[key].file.read_text() for key in old}
    new = {}
    for key, node in nodes.items():
        now = node.file.read_text()
        if node.is_program():
            new[key] = now
        elif patches.get(key) == now:
            new[key] = old[key]
        else:
            for texts in new, old:
                with contextlib.suppress(ValueError):
                    if key not in new and node.parent in texts:
                        new[key] = fit(now, texts[node.parent])
            if key not in new:
                bad.append(f"{node.name}: its patch does not fit" + (
                    f"; it is made of that at {rev}" if key in old else ""))
            if key not in new and key in old:
                new[key] = old[key]
        if key in new and re.search("(?m)^(<<<<<<<|>>>>>>>) ", new[key]):
            raise ValueError(f"{node.file} has conflicts; resolve them first")
    return {key: old.get(key, text) for key, text in new.items()}, new


def carry(rev="HEAD", root=ROOT):
    """Returns the nodes, their texts at a commit and afterwards, what to say, what is wrong,
    and the nodes that have to be looked at."""
    says, bad, nodes = [], [], graph(root)
    old, new = before_and_after(nodes, rev, root, bad)
    first = dict(old)
    new = {key: like(old[key], text) for key, text in new.items()}
    rename_all(nodes, old, new, says)
    state = State(nodes, old, new)
    state.carry()
    made = {key: state.text(key) for key in new}
    new = {key: like(old[key], text) for key, text in made.items()}
    looks = set()
    for hunk, by in state.verdicts.items():
        named = {what: [nodes[key].name for key, verdict in by.items() if verdict == what]
                 for what in SAYS}
        looks |= {key for key, verdict in by.items() if verdict == "look"}
        if any(named.values()):
            says.append(f"{nodes[hunk.source].name}:\n" + "\n".join(
                hunk.diff() + [f"  {SAYS[what]}: {' '.join(names)}"
                               for what, names in named.items() if names]))
    return nodes, first, new, says, bad, looks


def new_patch(nodes, key):
    """How a patch that is new begins. One of own/ makes a copy."""
    move = re.match(r"breaks/(\d+\.\d+)", key)
    before = move[1] if move else nodes[key].parent.removeprefix("own/")
    after = key.removeprefix("own/") if key.startswith("own/") else before
    copy = (f"diff --git a/src/{before}.cpp b/src/{after}.cpp\nsimilarity index 50%\n"
            f"copy from src/{before}.cpp\ncopy to src/{after}.cpp\n")
    return (copy if after != before else "") + \
        f"--- a/src/{before}.cpp\n+++ b/src/{after}.cpp\n"


def files_of(nodes, texts):
    """What the files have to be, those alone that are something else."""
    files = {}
    for key, node in nodes.items():
        if node.is_program():
            files[node.file] = texts.get(key)
        patch = node.last if node.is_program() else node.file
        if patch and key in texts and node.parent in texts:
            head, made = moves.split(
                patch.read_text() if patch.exists() else new_patch(nodes, key))
            with contextlib.suppress(ValueError):
                if moves.apply(texts[node.parent], made) == texts[key]:
                    continue
            # Answers are read, too.
            context = 3 if patch.parent.name == "exercises" else moves.CONTEXT
            anew = moves.make_patch("x", texts[node.parent], texts[key], context)
            files[patch] = "".join([head, *moves.lines_of(made)[:2], *moves.lines_of(anew)[2:]])
    return {path: text for path, text in files.items()
            if text is not None and (not path.exists() or path.read_text() != text)}


def write_all(files):
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def compile_error(text):
    """The first error of the compiler, or an empty string."""
    home = os.environ.get("LIBFABRIC_HOME")
    flags = f"-I{home}/include" if home else subprocess.run(
        ["pkg-config", "--cflags", "libfabric"], check=False, **moves.TEXT).stdout
    done = subprocess.run(
        [*os.environ.get("CXX", "g++").split(), "-std=c++20", "-Wall", "-Wextra", "-Werror",
         "-fsyntax-only", *flags.split(), "-x", "c++", "-"],
        input=text, check=False, **moves.TEXT)
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    return (errors or [done.stderr[:200] or "the compiler fails"])[0] \
        if done.returncode else ""


def carry_and_say(options):
    nodes, old, new, says, bad, looks = carry(options.since)
    files = files_of(nodes, new)
    says += [str(path.relative_to(ROOT)) for path in files]
    for key in sorted(looks, key=[*nodes].index):
        node = nodes[key]
        path = node.file
        if not node.is_program():
            path = ROOT / f"build/carry/{node.name.replace('/', '_')}.cpp"
            if not path.exists():  # somebody may have begun to edit it
                files[path] = new[key]
        path = path.relative_to(ROOT)
        bad.append(f"look at {path}" + (
            "" if node.is_program() else f", then: scripts/carry.py write {node.name} {path}"))
    write_all(files)
    if options.compile:
        changed = [key for key in new if new[key] != old[key]]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            errors = pool.map(compile_error, [new[key] for key in changed])
        bad += [f"{nodes[key].name} does not compile: {error}"
                for key, error in zip(changed, errors) if error]
    print(*says, *bad, sep="\n", end="\n" if says or bad else "")
    return 1 if bad else 0


def write(name, file, parent=""):
    """Makes the patch of a node, and of its children, whose texts stay as they are."""
    nodes, says = graph(ROOT), []
    texts = texts_of(nodes, says)
    short = re.sub(r"^scripts/|\.patch$", "", name)
    if short.partition("/")[0] in FOLDERS and short not in nodes:
        # It is new. 8_malloc.asleep is of 8_malloc, and 10.4 of that move.
        before = parent or re.match(r"\d+(_\w+|\.\d+)|", short.partition("/")[2])[0]
        nodes[short] = Node(short, find(nodes, before), ROOT / f"scripts/{short}.patch")
    key = find(nodes, name)
    node = nodes[key]
    text = pathlib.Path(file).read_text()
    if node.is_program():
        raise ValueError(f"{name} is a file: edit {node.file.relative_to(ROOT)}")
    if node.parent not in texts or text == texts[node.parent]:
        raise ValueError(f"{file} is what {nodes[node.parent].name} is already")
    texts[key] = text
    ours = {node.file, *(path for child in nodes.values() if child.parent == key
                         for path in (child.file, child.last))}
    files = {path: made for path, made in files_of(nodes, texts).items() if path in ours}
    write_all(files)
    for path, made in files.items():
        print(f"{path.relative_to(ROOT)}: {made.count(chr(10) + '+') - 1} lines added, "
              f"{made.count(chr(10) + '-') - 1} removed")
    left = ROOT / f"build/carry/{node.name.replace('/', '_')}.cpp"
    if left.exists() and left.samefile(file):
        left.unlink()


def check(root=ROOT):
    """What is wrong with the tree, a message each."""
    messages = []
    nodes = graph(root)
    texts = texts_of(nodes, messages, fit_exactly)
    weave = weave_of(nodes, texts)
    return messages + [f"{nodes[key].name}: the weave makes something else of it"
                       for key, text in texts.items() if weave.text(key) != text]


def main(arguments):
    if arguments[:1] == ["list"] and len(arguments) == 1:
        nodes = graph(ROOT)
        for key, node in nodes.items():
            print(f"{node.name:28} {nodes[node.parent].name if node.parent else ''}")
    elif arguments[:1] == ["state"] and len(arguments) in (2, 3):
        text = text_of(arguments[1])
        if len(arguments) == 3:
            pathlib.Path(arguments[2]).write_text(text)
        else:
            print(text, end="")
    elif arguments[:1] == ["write"] and len(arguments) in (3, 4):
        write(*arguments[1:])
    else:
        parser = argparse.ArgumentParser(usage=__doc__.partition("Usage: ")[2])
        parser.add_argument("--since", default="HEAD")
        parser.add_argument("--compile", action="store_true")
        return carry_and_say(parser.parse_args(arguments))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
