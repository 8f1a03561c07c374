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

scripts/carry.py carries a change into them. `make check` says whether they begin with the
parent, end in the program, and stay within their limits.
"""

import pathlib
import re
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
# For subprocess, also of Python 3.6.
TEXT = {"universal_newlines": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
MOST_ADDED = 100  # lines, in a move
MOST_IN_ALL = 1.25  # lines that all moves add, for each one that the step adds
LONGEST_LINE = 80
CONTEXT = 1  # lines beside a hunk: what is farther away may change, and the patch stays


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


def word(path):
    """answer, for scripts/moves/5_reverse/3_answer.patch."""
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


def source(program, root=ROOT):
    return (pathlib.Path(root) / f"src/{program}.cpp").read_text()


def parent(step, root=ROOT):
    """What a program is based on: see scripts/common.sh."""
    found = output(["bash", "-c", '. scripts/common.sh; parent "$0"', step], root).strip()
    if not found:
        raise ValueError(f"{step} is based on no other program")
    return found


def output(command, root, **kwargs):
    done = subprocess.run(command, cwd=root, check=False, **TEXT,
                          **kwargs)
    if done.returncode:
        raise ValueError(done.stderr.strip().replace("error: ", "", 1))
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
            cwd=folder, check=False, **TEXT).stdout


def count(before, after):
    found = diff(before, after, "-w", "--numstat").split()
    return (int(found[0]), int(found[1])) if found else (0, 0)


def make_patch(step, before, after, context):
    _, mark, hunks = diff(before, after, f"-U{context}").partition("\n@@")
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
            raise ValueError(f"it does not fit at line {at + 1}: {line.rstrip()}\n(If that's "
                             "your answer to an exercise, `git stash` puts it away.)")
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
        made[f"{move}.patch"] = above + make_patch(step, before, after, CONTEXT)
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

def check(step, root=ROOT):
    """What is wrong with the moves of a step, a message each."""
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
        if added > MOST_ADDED:
            messages.append(f"{move}: it adds {added} lines; {MOST_ADDED} is the limit")
        messages += [f"{move}: line {at} is longer than {LONGEST_LINE} characters"
                     for at, line in enumerate(texts[k].split("\n"), 1)
                     if len(line) > LONGEST_LINE]
    added, _ = count(texts[0], texts[-1])
    if total > MOST_IN_ALL * added:
        messages.append(f"{step}: the moves add {total} lines, {total / added:.2f} times "
                        f"the {added} of the step; {MOST_IN_ALL} is the limit")
    return messages


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
