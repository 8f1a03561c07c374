#!/usr/bin/env python3
"""The moves of a step: patches that lead from a program's parent to the program.

scripts/moves/5_reverse/1_introduce.patch makes the program after move 5.1 from
src/4_hello.cpp, 2_send.patch makes that after move 5.2 from it, and so on. The last one
ends in src/5_reverse.cpp, byte for byte. Above each patch is its head: a title, what the
move cures, what to try, and what goes wrong next.

Usage: scripts/moves/moves.py COMMAND ...
  list                 the moves, and how many lines each adds and removes
  head 5.3             prints what is above the patch
  state 5.3 [FILE]     prints the program after a move (5.0: its parent), or writes it
                       into a file, if that has not got it already
  states STEP          writes the programs after all moves into build/moves/STEP
  write STEP FILE...   makes the patches from programs: one for each move, named like
                       the move, 3_answer.cpp. A patch that has the name answer already
                       keeps its head; a new one gets that in 3_answer.head
  check [STEP]         do they begin with the parent, end in the program, compile, and
                       stay within their limits?
  carry [STEP [REV]]   carries into all moves what has changed since REV (HEAD) in the
                       program and in its parent
"""

import difflib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
MOST_ADDED = 120  # lines, in a move
# One that replaces the sessions and the application of its parent may add more.
MOST_ADDED_BY = {"13.1 number": 230}
MOST_IN_ALL = 1.25  # lines that all moves add, for each one that the step adds
LONGEST_LINE = 80
CONFLICT = re.compile(r"^<{7} [^\n]*\n(.*?)^\|{7} [^\n]*\n(.*?)^={7}\n(.*?)^>{7} [^\n]*\n",
                      re.M | re.S)


# ---- What there is ----

def in_order(paths):
    return sorted(paths, key=lambda path: int(path.name.split("_")[0]))


def steps(root=ROOT):
    """The programs that have moves."""
    return [path.name for path in in_order(pathlib.Path(root).glob("scripts/moves/[0-9]*_*"))
            if path.is_dir()]


def patches(step, root=ROOT):
    """The files, one for each move."""
    return in_order(pathlib.Path(root).glob(f"scripts/moves/{step}/*_*.patch"))


def name(step, k, root=ROOT):
    """answer, for scripts/moves/5_reverse/3_answer.patch."""
    return word(patches(step, root)[k - 1])


def word(path):
    return path.stem.partition("_")[2]


def head(step, k, root=ROOT):
    """What is above a patch."""
    return split(patches(step, root)[k - 1].read_text())[0]


def title(step, k, root=ROOT):
    return head(step, k, root).partition("\n")[0]


def states(step, root=ROOT):
    """The source of the parent, that after the first move, and so on to the program."""
    return apply_all(step, source(parent(step, root), root), root)


def counts(step, k=None, root=ROOT):
    """How many lines a move adds and removes, or the whole step. Lines that are only
    indented differently don't count."""
    texts = states(step, root)
    return count(*(texts[k - 1:k + 1] if k else (texts[0], texts[-1])))


def lines_of(text):
    return re.findall(r"[^\n]*\n|[^\n]+$", text)


def split(text):
    """The head of a patch, and the patch."""
    above, mark, patch = text.partition("--- a/")
    return above, mark + patch


def source(program, root=ROOT, rev=None):
    path = f"src/{program}.cpp"
    if rev is None:
        text = (pathlib.Path(root) / path).read_text()
    else:
        text = output(["git", "show", f"{rev}:./{path}"], root)
    if re.search("^(<<<<<<<|>>>>>>>) ", text, re.M):
        raise ValueError(f"{path} has conflicts; resolve them first")
    return text


def parent(step, root=ROOT):
    """What a program is based on: see scripts/common.sh."""
    found = output(["bash", "-c", '. scripts/common.sh; parent "$0"', step], root).strip()
    if not found:
        raise ValueError(f"{step} is based on no other program")
    return found


def output(command, root, **kwargs):
    done = subprocess.run(command, cwd=root, check=False, text=True, capture_output=True,
                          **kwargs)
    if done.returncode:
        raise ValueError(done.stderr.strip().removeprefix("error: "))
    return done.stdout


# ---- Patches ----

def diff(before, after, *options):
    """What git says about two texts."""
    with tempfile.TemporaryDirectory() as folder:
        for file, text in ("before", before), ("after", after):
            pathlib.Path(folder, file).write_text(text)
        # It exits with 1 for files that differ.
        return subprocess.run(
            ["git", "diff", "--no-index", "--no-color", "--no-ext-diff", "-U3",
             "--patience", *options, "before", "after"],
            cwd=folder, check=False, text=True, capture_output=True).stdout


def count(before, after):
    found = diff(before, after, "-w", "--numstat").split()
    return (int(found[0]), int(found[1])) if found else (0, 0)


def make_patch(step, before, after):
    _, mark, hunks = diff(before, after).partition("\n@@")
    return f"--- a/src/{step}.cpp\n+++ b/src/{step}.cpp{mark}{hunks}" if mark else ""


def apply(text, patch):
    """The text with a patch applied. It has to fit exactly, where git apply would look
    for another place."""
    before, after, at = lines_of(text), [], 0
    for line in lines_of(patch)[2:]:
        hunk = re.match(r"@@ -(\d+)(?:,(\d+))? ", line)
        if hunk:
            start = int(hunk[1]) - (hunk[2] != "0")
            after += before[at:start]
            at = start
        elif line[0] == "+":
            after.append(line[1:])
        elif at < len(before) and line[0] in " -" and before[at] == line[1:]:
            after += before[at:at + 1] if line[0] == " " else []
            at += 1
        else:
            raise ValueError(f"it does not fit at line {at + 1}: {line.rstrip()}")
    return "".join(after + before[at:])


def apply_all(step, first, root):
    """The states of a step whose parent is this text."""
    texts = [first]
    for path in patches(step, root):
        try:
            texts.append(apply(texts[-1], split(path.read_text())[1]))
        except ValueError as error:
            raise ValueError(f"scripts/moves/{step}/{path.name}: {error}") from error
    return texts


def write(step, moves, heads=None, root=ROOT):
    """Makes the patches of a step from the names of its moves, 3_answer, and the programs
    after them. A patch keeps its head, by the name of the move without its number; one
    that is new gets that in `heads`. Others that were there go."""
    folder = pathlib.Path(root) / "scripts/moves" / step
    old = {word(path): split(path.read_text())[0] for path in patches(step, root)}
    before = source(parent(step, root), root)
    made = {}
    for move, after in moves.items():
        given = (heads or {}).get(move, "").strip()
        given += "\n\n" if given else ""
        above = old.get(word(pathlib.Path(move))) or given
        if given and above != given:
            print(f"{move}: its patch keeps its head, which is not {move}.head")
        made[f"{move}.patch"] = above + make_patch(step, before, after)
        before = after
    if len({word(pathlib.Path(move)) for move in moves}) < len(moves):
        raise ValueError("two moves have the same name")
    if before != source(step, root):
        raise ValueError(f"the last move does not end in src/{step}.cpp")
    folder.mkdir(parents=True, exist_ok=True)
    for path in patches(step, root):
        if path.name not in made:
            print(f"removed: scripts/moves/{step}/{path.name}")
            path.unlink()
    for file, text in made.items():
        (folder / file).write_text(text)


# ---- Checking ----

def compile_error(text):
    """The first error of the compiler, or an empty string."""
    home = os.environ.get("LIBFABRIC_HOME")
    flags = f"-I{home}/include" if home else subprocess.run(
        ["pkg-config", "--cflags", "libfabric"], check=False, text=True,
        capture_output=True).stdout
    done = subprocess.run(
        [*os.environ.get("CXX", "g++").split(), "-std=c++20", "-Wall", "-Wextra", "-Werror",
         "-fsyntax-only", *flags.split(), "-x", "c++", "-"],
        input=text, check=False, text=True, capture_output=True)
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    return (errors or [done.stderr[:200] or "the compiler fails"])[0] \
        if done.returncode else ""


def check(step, root=ROOT, compiled=False):
    """What is wrong with the moves of a step, a message each. They are compiled, too,
    unless somebody has done that."""
    try:
        texts = states(step, root)
    except ValueError as error:
        return [str(error)]
    messages = []
    if texts[-1] != source(step, root):
        messages.append(f"{step}: the last move does not end in src/{step}.cpp")
    number, total = step.split("_")[0], 0
    for k, path in enumerate(patches(step, root), 1):
        move = f"{number}.{k} {word(path)}"
        if not path.name.startswith(f"{k}_"):
            messages.append(f"{move}: its file is {path.name}")
        if not re.match(r"\S.*\n\n", split(path.read_text())[0]):
            messages.append(f"{move}: it has no title")
        added, _ = count(*texts[k - 1:k + 1])
        total += added
        limit = MOST_ADDED_BY.get(move, MOST_ADDED)
        if added > limit:
            messages.append(f"{move}: it adds {added} lines; {limit} is the limit")
        messages += [f"{move}: line {at} is longer than {LONGEST_LINE} characters"
                     for at, line in enumerate(texts[k].split("\n"), 1)
                     if len(line) > LONGEST_LINE]
        if not compiled and k < len(texts) - 1 and (error := compile_error(texts[k])):
            messages.append(f"{move}: it does not compile: {error}")
    added, _ = count(texts[0], texts[-1])
    if total > MOST_IN_ALL * added:
        messages.append(f"{step}: the moves add {total} lines, {total / added:.2f} times "
                        f"the {added} of the step; {MOST_IN_ALL} is the limit")
    return messages


# ---- Carrying a change ----

def renamed(before, after):
    """The names that a change has replaced, and replaced everywhere."""
    words = re.compile(r"[A-Za-z_]\w*")
    gone = {*words.findall(before)} - {*words.findall(after)}
    new = {*words.findall(after)} - {*words.findall(before)}
    a, b = before.splitlines(), after.splitlines()
    pairs = set()
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, a, b, False).get_opcodes():
        x, y = words.findall("\n".join(a[i1:i2])), words.findall("\n".join(b[j1:j2]))
        if tag == "replace" and len(x) == len(y):
            pairs |= {(p, q) for p, q in zip(x, y) if p in gone and q in new}
    olds = [p for p, _ in pairs]
    return {p: q for p, q in pairs if olds.count(p) == 1}


def rename(text, names):
    return re.sub(r"[A-Za-z_]\w*", lambda found: names.get(found[0], found[0]), text)


def formatted(text, root):
    """What clang-format makes of it, as of the program that somebody has renamed things
    in. Where it is not installed, more is left to carry."""
    if not (root / ".clang-format").exists() or not shutil.which("clang-format"):
        return text
    return output(["clang-format", "--assume-filename=src/x.cpp"], root, input=text)


def resolve(mine, base, theirs, insert, said):
    """Does to the lines `mine` what was done to `base`, line by line. What concerns only
    lines that `mine` has not got is left out, and said. A new line that has lost one of
    its two neighbours is left out, too, unless `insert`. None: this takes a human."""
    at = {}  # a line of base: the same one of mine
    for a, b, n in difflib.SequenceMatcher(None, mine, base, False).get_matching_blocks():
        at.update({b + i: a + i for i in range(n)})
    at[-1], at[len(base)] = -1, len(mine)
    edits = []
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(
            None, base, theirs, False).get_opcodes():
        if tag == "replace" and i2 - i1 == j2 - j1:
            edits += [(i1 + i, i1 + i + 1, j1 + i, j1 + i + 1) for i in range(i2 - i1)]
        elif tag != "equal":
            edits.append((i1, i2, j1, j2))
    result = list(mine)
    for i1, i2, j1, j2 in reversed(edits):
        new = theirs[j1:j2]
        if new and all(line in mine and line not in base for line in new):
            continue  # it has been done already
        there = [at[i] for i in range(i1, i2) if i in at]
        if i1 == i2:
            before, after = at.get(i1 - 1), at.get(i1)
            if before is not None and after == before + 1:
                result[after:after] = new
            elif before is None and after is None:
                said["not here"] += [(line, mine) for line in new]
            else:
                said["unclear"] += [(line, mine) for line in new]
                if insert:
                    where = before + 1 if before is not None else after
                    result[where:where] = new
        elif not there:
            # Lines that it has of its own in that place may need the same.
            for line in new or base[i1:i2]:
                said["look" if mine else "not here"].append((line, mine))
        elif len(there) == i2 - i1 == there[-1] - there[0] + 1:
            result[there[0]:there[-1] + 1] = new
        else:
            return None
    return result


def left_to_do(mine, base, theirs):
    """What was done to base, without the blocks that mine has got already: git would merge
    a block a second time where it stands beside other lines."""
    mine, base, theirs = lines_of(mine), lines_of(base), lines_of(theirs)

    def has(lines, block):
        return any(lines[at:at + len(block)] == block for at in range(len(lines)))

    return "".join(
        line for tag, i1, i2, j1, j2 in
        difflib.SequenceMatcher(None, base, theirs, False).get_opcodes()
        for line in (base[i1:i2] if tag in ("insert", "replace")
                     and has(mine, theirs[j1:j2]) and not has(base, theirs[j1:j2])
                     else theirs[j1:j2]))


def merge(mine, base, theirs, insert, said):
    """Merges what was done to base into mine. Leaves the markers of a conflict that takes
    a human."""
    theirs = left_to_do(mine, base, theirs)
    with tempfile.TemporaryDirectory() as folder:
        files = {"this move": mine, "before": base, "after": theirs}
        for file, text in files.items():
            pathlib.Path(folder, file).write_text(text)
        text = subprocess.run(["git", "merge-file", "-p", "--diff3", *files], cwd=folder,
                              check=False, text=True, capture_output=True).stdout

    def one(found):
        lines = resolve(*(lines_of(part) for part in found.groups()), insert, said)
        return found[0] if lines is None else "".join(lines)

    return CONFLICT.sub(one, text)


def carried(mine, changes):
    """A move after the changes, what there is to say about it, and what is wrong."""
    for insert in (False, True):
        said, text = {"not here": [], "look": [], "unclear": []}, mine
        for base, theirs in changes:
            text = merge(text, base, theirs, insert, said)
        error = "it has conflicts" if CONFLICT.search(text) else compile_error(text)
        if not error or not said["unclear"]:
            break
    there = lines_of(text)
    unchanged = {*lines_of(mine)} & {*there}
    says = []
    for kind, what in [("not here", "not in this move yet"),
                       ("look", "LOOK, left out where the move has lines of its own"),
                       ("unclear", f"LOOK, {'put in' if insert else 'left out'}, because "
                                   "it compiles so")]:
        for line, own in said[kind]:
            # What one change could not do, the other has done.
            if line.strip() and (line not in there or kind == "unclear" and insert):
                done = kind == "look" and not {*own} <= unchanged
                says.append(f"    {'done otherwise' if done else what}: {line.strip()}")
    return text, says, error


def lead(step, first, last, root):
    """The states, if the moves lead from the first one to the last one; otherwise
    nothing."""
    try:
        texts = apply_all(step, first, root)
    except ValueError:
        return []
    return texts if texts[-1] == last else []


def carry(step, rev="HEAD", root=ROOT):
    """Carries what has changed since a commit. Returns whether all went well."""
    root = pathlib.Path(root)
    before = parent(step, root)
    new_first, new_last = source(before, root), source(step, root)
    if lead(step, new_first, new_last, root):
        print(f"{step}: the moves lead from {before} to {step} already")
        return True
    old = lead(step, source(before, root, rev), source(step, root, rev), root)
    if not old:
        raise ValueError(f"the moves do not lead from {before} to {step} as these were at "
                         f"{rev} either; name the commit before the change")
    if error := compile_error(new_last):
        raise ValueError(f"src/{step}.cpp does not compile: {error}")
    moves = patches(step, root)
    names = renamed(old[0], new_first) | renamed(old[-1], new_last)
    names = {p: q for p, q in names.items()
             if not any(re.search(rf"\b{q}\b", text) for text in old)}
    for p, q in names.items():
        print(f"{step}: renamed {p} to {q}")
        for k, path in enumerate(moves, 1):
            if re.search(rf"\b{p}\b", head(step, k, root)):
                print(f"  LOOK: the head of {path.name} still says {p}")
    if names:
        old = [formatted(rename(text, names), root) for text in old]
    used = []
    new = [None] * len(moves) + [new_last]
    for k in range(len(moves) - 1, 0, -1):
        changes = [pair for pair in ((old[k + 1], new[k + 1]), (old[0], new_first))
                   if pair[0] != pair[1]]
        text, says, error = carried(old[k], changes)
        number = f"{step.split('_')[0]}.{k}"
        path = root / f"build/moves/carry/{step}/{moves[k - 1].stem}.cpp"
        asked = path.with_suffix(".conflict")
        if error and path.exists() and path.read_text() != asked.read_text():
            if asked.read_text() != text:
                raise ValueError(f"{path.relative_to(root)} resolves another conflict; move "
                                 "it away, and run this again")
            text = path.read_text()
            used += [path, asked]
            says = [f"    taken from {path.relative_to(root)}"]
            error = "it has conflicts" if re.search("^(<<<<<<<|>>>>>>>) ", text, re.M) \
                else compile_error(text)
        elif error:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            asked.write_text(text)
        added, removed = count(old[k], text)
        print(f"  {number} {word(moves[k - 1])}: +{added} -{removed}")
        for line in says:
            print(line)
        if error:
            raise ValueError(
                f"{number}: {error}\nNothing has been written. Edit "
                f"{path.relative_to(root)}: it has to become the program after move "
                f"{number}. Then go on: scripts/moves/moves.py carry {step} {rev}")
        new[k] = text
    write(step, {path.stem: text for path, text in zip(moves, new[1:])}, root=root)
    for path in used:
        path.unlink()
    messages = check(step, root, compiled=True)
    for message in messages:
        print(message)
    return not messages


# ---- The commands ----

def find(move):
    """The step and the number of a move that somebody has named: 5.3."""
    number, _, k = move.partition(".")
    for step in steps():
        if step.split("_")[0] == number and k.isdigit() and int(k) <= len(patches(step)):
            return step, int(k)
    known = [f"{step.split('_')[0]}.{k}" for step in steps()
             for k in range(1, len(patches(step)) + 1)]
    raise ValueError(f"there is no move {move}; there are: {' '.join(known)}")


def list_moves():
    for step in steps():
        texts, total = states(step), [0, 0]
        for k, path in enumerate(patches(step), 1):
            added, removed = count(*texts[k - 1:k + 1])
            total = [total[0] + added, total[1] + removed]
            print(f"{step.split('_')[0] + '.' + str(k):5} {word(path):10} "
                  f"{f'+{added} -{removed}':10} {title(step, k)}")
        added, removed = count(texts[0], texts[-1])
        print(f"{step}: all moves +{total[0]} -{total[1]}; the step +{added} -{removed}\n")


def write_file(path, text):
    """Leaves a file alone that has this text already, for make."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def main(arguments):
    command, *rest = arguments or ["help"]
    if command == "list" and not rest:
        list_moves()
    elif command == "head" and len(rest) == 1:
        step, k = find(rest[0])
        print(head(step, k) if k else "", end="")
    elif command == "state" and len(rest) in (1, 2):
        step, k = find(rest[0])
        text = states(step)[k]
        if len(rest) == 2:
            write_file(pathlib.Path(rest[1]), text)
        else:
            print(text, end="")
    elif command == "states" and len(rest) == 1:
        folder = ROOT / "build/moves" / rest[0]
        if folder.exists():
            raise ValueError(f"{folder.relative_to(ROOT)} is there already; remove it first")
        for path, text in zip(patches(rest[0]), states(rest[0])[1:]):
            write_file(folder / f"{path.stem}.cpp", text)
    elif command == "write" and len(rest) > 1:
        files = in_order(map(pathlib.Path, rest[1:]))
        heads = {path.stem: path.with_suffix(".head").read_text() for path in files
                 if path.with_suffix(".head").exists()}
        write(rest[0], {path.stem: path.read_text() for path in files}, heads)
    elif command == "check" and len(rest) < 2:
        messages = [message for step in rest or steps() for message in check(step)]
        print(*messages, sep="\n", end="\n" if messages else "")
        return 1 if messages else 0
    elif command == "carry" and len(rest) < 3:
        return 0 if all([carry(step, *rest[1:]) for step in rest[:1] or steps()]) else 1
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # moves.py list | head
    try:
        sys.exit(main(sys.argv[1:]))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
