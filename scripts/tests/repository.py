"""What is in the repository: its programs, and what is based on what. The book and the
checks of the chapters need no more than this."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.abspath(f"{os.path.dirname(os.path.realpath(__file__))}/../..")
# For a program that a test builds, when its options must be short. scripts/test.sh has
# compiled the headers beforehand, which spares such a program a third of its time.
HEADERS = f"{ROOT}/build/headers.h"
QUICK_CXXFLAGS = "-O0" + (
    f" -fPIC -include {HEADERS}" if os.path.exists(f"{HEADERS}.gch") else "")
QUICKLY = ["BUILD=build", f"CXXFLAGS={QUICK_CXXFLAGS}"]
# Whether nothing is left out: see scripts/README.md.
ALL = os.environ.get("ALL") == "1"


def number(name):
    """4 for 4_hello, and -1 for what has no number before an underscore."""
    found = re.match(r"(\d+)_", name)
    return int(found[1]) if found else -1


def numbered(folder, suffix):
    """The names of a folder's files that end like this, without their ends, in the
    order of their numbers."""
    return sorted((name.removesuffix(suffix) for name in os.listdir(folder)
                   if name.endswith(suffix)), key=lambda name: (number(name), name))


def programs(root=ROOT):
    """Those of the tutorial. Another name is that of somebody's own program, which is
    no matter of the tests and of the book."""
    return [name for name in numbered(f"{root}/src", ".cpp") if number(name) >= 0]


def parent(program, root=ROOT):
    """The program that this one is based on, or None: see scripts/common.sh."""
    done = subprocess.run(
        ["bash", "-c", '. "$0/scripts/common.sh"; parent "$1"', ROOT, program],
        cwd=root, check=False, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() or None


# All that variant() has been called for: where, and what makes the source.
VARIANTS = []


def variant(program, *changes, source=None):
    """A program, or another source under its name, with other texts in the place of some,
    each of which it has once: shorter limits, for example, so that a test need not wait for
    them. Returns a function that builds it and returns the folder that it is in. Called at
    the top of a test file, so that `make check` sees whether the texts are still there."""
    def changed():
        return replaced(source() if source else read_source(program), *changes)

    # The line at the top of the test file.
    where, frame = "", sys._getframe(1)
    while frame.f_code.co_filename.startswith(f"{ROOT}/scripts/tests/"):
        where = f"{os.path.relpath(frame.f_code.co_filename, ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    VARIANTS.append((where, changed))
    # A mutant may leave something unused.
    return lambda: build_source(program, changed(), "-Wno-error")


def replaced(text, *changes):
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"it has {text.count(old)} times: {old}")
        text = text.replace(old, new)
    return text


def read_source(program):
    with open(f"{ROOT}/src/{program}.cpp") as file:
        return file.read()


def build_source(name, text, *flags):
    """Builds a program from this text, once for all tests. Returns the folder it is in."""
    folder = f"{ROOT}/build/variants/{name}-{hashlib.sha1(text.encode()).hexdigest()[:10]}"
    os.makedirs(f"{folder}/src", exist_ok=True)
    with open(f"{folder}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(f"{folder}/src/{name}.cpp"):
            with open(f"{folder}/src/{name}.cpp", "w") as file:
                file.write(text)
        shutil.copy(f"{ROOT}/Makefile", folder)
        make("-C", folder, "BUILD=build", f"CXXFLAGS={' '.join([QUICK_CXXFLAGS, *flags])}",
             "CUDA_HOME=", f"build/{name}")
    return f"{folder}/build"


def build_moves(names):
    """Builds the programs after these moves, 5.3. Returns their folder. Where nothing is
    left out, they are built without the headers of QUICK_CXXFLAGS: one that includes too
    little would not be noticed otherwise."""
    folder = "build/quick"
    flags = "-O0" if ALL else QUICK_CXXFLAGS
    with open(f"{ROOT}/Makefile") as lock:
        # Several workers may want the same ones.
        fcntl.flock(lock, fcntl.LOCK_EX)
        names = [name for name in names if not copy_last_move(name, folder)]
        if names:
            make(f"CXXFLAGS={flags}", f"BUILD={folder}", "CUDA_HOME=", *names)
    return folder


def copy_last_move(name, folder):
    """After the last move of a step, the program is the finished one, as test_moves.py
    sees. Returns whether it is there."""
    steps = f"{ROOT}/scripts/moves"
    step = next((step for step in os.listdir(steps) if number(step) == int(name.split(".")[0])),
                None)
    program = f"{ROOT}/{os.environ.get('BUILD')}/{step}"
    if not step or not os.path.exists(program) or name != (
            f"{number(step)}.{len(numbered(f'{steps}/{step}', '.patch'))}"):
        return False
    copy = f"{ROOT}/{folder}/{name}"
    os.makedirs(os.path.dirname(copy), exist_ok=True)
    if not os.path.exists(copy) or os.path.getmtime(copy) != os.path.getmtime(program):
        # One that runs can't be written to, but another one can take its place.
        shutil.copy2(program, f"{copy}.new")
        os.replace(f"{copy}.new", copy)
    return True


def make(*arguments, **env):
    """Runs make and returns what it printed."""
    done = subprocess.run(["make", "-j2", *arguments], cwd=ROOT,
                          env={**os.environ, **env}, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout
