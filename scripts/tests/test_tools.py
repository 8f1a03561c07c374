"""The Makefile and the scripts, as a reader uses them."""

import ast
import contextlib
import glob
import os
import pathlib
import pty
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

import chapters
import moves
import mutants
import repository
from harness import PROGRAMS
from marks import nothing_wrong
from repository import ROOT, make, number, numbered, parent, programs
from table import TABLE, WITHOUT_ENTRY

# Chapter 4 breaks 2_first, which breaks more easily. A move of the others goes wrong.
# 2_verbs is broken by what is typed.
NOT_BROKEN = ["2_verbs", "4_hello", "6_write", "7_queue", "9_file"]


def uses(text, program):
    with open(f"{ROOT}/src/{program}.cpp") as file:
        return text in file.read()


def test_homes(tmp_path):
    """Those of libfabric and of CUDA: CUDA is for the programs that use it."""
    for path in "lib/libfabric.so", "include/rdma/fabric.h", "lib64/libcudart_static.a":
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    plan = make("-n", "OWN=", "BUILD=build/no", CUDA_HOME=str(tmp_path),
                LIBFABRIC_HOME=str(tmp_path))
    commands = re.sub(r"\\\n", " ", plan).splitlines()
    for program in programs():
        found = [line for line in commands if f" src/{program}.cpp" in line]
        for command in found:  # 2_verbs may be left out
            assert ("-DUSE_CUDA" in command) == ("libcudart" in command) == uses(
                "USE_CUDA", program), command
            assert program == "2_verbs" or (
                f"-I{tmp_path}/include" in command and f"-L{tmp_path}/lib -lfabric" in command
                and f"-Wl,-rpath,{tmp_path}/lib" in command), command
        assert found or program not in PROGRAMS, program


# A compiler that does not find the header $MISSING, and builds empty files.
FAKE_COMPILER = """\
#!/bin/bash
[ "${!#}" != - ] || { ! grep -qF "<$MISSING>"; exit; }
while [ $# -gt 0 ]; do [ "$1" != -o ] || touch "$2"; shift; done
"""


@pytest.fixture
def make_without(tmp_path):
    """Runs make on a machine without a header. Returns its exit status, the programs
    that are built, what it printed, and its errors."""
    compiler = tmp_path / "compiler"
    compiler.write_text(FAKE_COMPILER)
    compiler.chmod(0o755)

    def run(header, *targets):
        done = subprocess.run(
            ["make", "-j2", f"BUILD={tmp_path}/build", f"CXX={compiler}", *targets],
            cwd=ROOT, env={**os.environ, "MISSING": header, "CUDA_HOME": ""},
            check=False, text=True, capture_output=True)
        built = [p for p in programs() if (tmp_path / "build" / p).exists()]
        return done.returncode, built, done.stdout, done.stderr
    return run


@pytest.mark.parametrize("header,name", [
    ("xxhash.h", "xxHash"), ("infiniband/verbs.h", "libibverbs")])
def test_make_without_a_library(make_without, header, name):
    """What can be built is built, and one line says what is left out. It is an error
    only for somebody who asks for that program."""
    status, built, _, error = make_without(header)
    left_out = [program for program in programs() if uses(f"<{header}>", program)]
    assert status == 0 and left_out and built == [p for p in programs() if p not in left_out]
    said = re.fullmatch(rf"not built: (.*); {name} is missing .*install-deps\.sh.*\n", error)
    assert {*left_out} <= {*said[1].split()}
    assert make_without(header, left_out[0])[0] == 2


@pytest.mark.skipif(not os.path.exists("/usr/include/infiniband/verbs.h")
                    or bool(glob.glob("/sys/class/infiniband/*")),
                    reason="no libibverbs, or an RDMA device")
def test_verbs_without_a_device(run, build):
    """2_verbs says so, and where to read on."""
    process = run([f"{build}/2_verbs"])
    assert process.wait() == 1
    page, heading = re.fullmatch(r'error: .*: (\S+\.md) .*\("(.*)"\)\n',
                                 process.output).groups()
    with open(f"{ROOT}/{page}") as file:
        assert f"\n## {heading}\n" in file.read()


def test_make_without_libfabric(make_without):
    """One line, however many programs there are to build."""
    for targets in [[], ["4_hello"]]:
        status, built, _, error = make_without("rdma/fabric.h", *targets)
        assert status == 2 and not built
        assert re.fullmatch(r".* does not find libfabric .*install-deps\.sh.*\n", error)
    assert make_without("rdma/fabric.h", "help")[::3] == (0, "")


def test_diff():
    """What is shared comes first, where the application is another one."""
    for program in "4_hello", "7_queue", "8_malloc":
        output = make(f"diff-{number(program)}")
        assert f"--- a/src/{parent(program)}.cpp" in output
        assert f"+++ b/src/{program}.cpp" in output
        headings = re.findall("^==== ([12])", output, re.M)
        assert headings == (["1", "2"] if TABLE[program].most_added else [])


@pytest.mark.static
def test_breaks(tmp_path):
    """Each patch fits a program, or one after a move, exactly, and says at its top what
    to do. Whoever asks for one that is not there is told which there are."""
    (tmp_path / "src").mkdir()
    called, messages = [], []
    for name in os.listdir(f"{ROOT}/scripts/breaks"):
        if not name.endswith(".patch"):
            continue
        move = re.fullmatch(r"(\d+\.\d+)\.patch", name)
        source = move[1] if move else name.split(".")[0]
        called.append(re.sub("_[^.]*", "", name.removesuffix(".patch")))
        if move:
            step, k = moves.find(source)
            (tmp_path / f"src/{source}.cpp").write_text(moves.states(step)[k])
        else:
            shutil.copy(f"{ROOT}/src/{source}.cpp", tmp_path / "src")
        path = f"{ROOT}/scripts/breaks/{name}"
        done = subprocess.run(
            ["git", "apply", "--check", "-v", path], cwd=tmp_path, check=False, text=True,
            capture_output=True, env={**os.environ, "LC_ALL": "C"})
        if done.returncode or "offset" in done.stderr:
            messages.append(f"scripts/breaks/{name}: {done.stderr}")
        with open(path) as file:
            assert re.match(
                r"(Broken|Changed): (?s:.*)^  build/break/(?s:.*)\n\n"
                rf"--- a/src/{source}\.cpp\n\+\+\+ b/src/{source}\.cpp\n",
                file.read(), re.M)
    nothing_wrong(messages)
    done = subprocess.run(["scripts/breaks/run.sh", "99"], cwd=ROOT, check=False,
                          text=True, capture_output=True)
    assert done.returncode == 2
    there = done.stderr.removeprefix(
        "error: there is nothing to break in 99; there is in: ").split()
    assert sorted(there) == sorted(called) and {"8", "8.asleep", "10.4"} <= {*there}


@pytest.mark.static
@pytest.mark.parametrize("program", PROGRAMS[1:])
def test_step(tmp_path, program):
    """What two programs share stands in both, letter for letter. A step hardly
    removes anything (Entry.most_removed); one that replaces the application may drop
    what it has no use for, but hardly adds anything to the rest (Entry.most_added). 4_hello
    takes 2_first apart, a move at a time: see test_moves.py."""
    before = parent(program)
    most_added = TABLE[program].most_added
    for name in before, program:
        with open(f"{ROOT}/src/{name}.cpp") as file:
            text = file.read()
        if most_added:
            text, heading, _ = text.partition("\n// ---- The application ----\n")
            assert heading, f"src/{name}.cpp has no section `The application`"
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["git", "diff", "--no-index", "--numstat", "--patience", before, program],
        cwd=tmp_path, text=True, capture_output=True, check=False)
    added, removed = map(int, done.stdout.split()[:2] or (0, 0))
    if most_added:
        assert added <= most_added, f"{added} lines added to {before}"
    else:
        total = len((tmp_path / before).read_text().splitlines())
        assert removed <= TABLE[program].most_removed / 100 * total, (
            f"{removed} of the {total} lines of {before} removed")


def what_is_missing():
    """What programs lack, and what there is for programs that do not exist, one message
    each."""
    there = programs()
    tested = [program for program in there if program not in WITHOUT_ENTRY]
    exercises = f"{ROOT}/scripts/exercises"
    breaks = [name for name in numbered(f"{ROOT}/scripts/breaks", ".patch") if "." not in name]
    checks = [name.removeprefix("exercise_") for name in numbered(exercises, ".py")
              if name.startswith("exercise_")]
    numbers = {str(number(program)): program for program in there}
    yield from (f"src/: {program} has the number of another program" for program in tested
                if numbers[str(number(program))] != program)
    for names, path, needed in [
            (chapters.pages_of_programs(ROOT), "chapters/{}.md", there),
            (numbered(exercises, ".patch"), "scripts/exercises/{}.patch",
             [numbers.get(name, name) for name in checks]),
            (breaks, "scripts/breaks/{}.patch",
             [program for program in there if program not in NOT_BROKEN]),
            (TABLE, "TABLE[{!r}] in scripts/tests/table.py", tested),
            ([numbers.get(name, name) for name in checks], "scripts/exercises/exercise_… of {}",
             numbered(exercises, ".patch"))]:
        yield from (f"{path.format(program)} is missing" for program in needed
                    if program not in names)
        yield from (f"{path.format(name)}: there is no such program" for name in names
                    if name not in there)


@pytest.mark.static
def test_every_program_has_everything():
    """The tests find programs in src/. This tells what one still lacks, and the
    others do without what it lacks."""
    nothing_wrong(list(what_is_missing()))


@pytest.mark.static
@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_mutants(name):
    """Each still breaks something, and names tests that are there. Whether these
    notice, `make mutants` tells."""
    nothing_wrong(list(mutants.faults(mutants.MUTANTS[name])))


def wrong_variants(variants):
    """What variant() would find when a test builds one, a message for each."""
    for where, source in variants:
        try:
            source()
        except (AssertionError, LookupError, OSError, ValueError) as error:
            yield f"{where}: {error}".partition("\nassert ")[0]


@pytest.mark.static
def test_variants():
    """The texts that tests replace in programs are still there. All test files have been
    read by now."""
    nothing_wrong(list(wrong_variants(repository.VARIANTS)))


def is_formatter_here():
    """Another version may want another format."""
    return shutil.which("clang-format") and " 14." in subprocess.run(
        ["clang-format", "--version"], check=True, text=True, stdout=subprocess.PIPE).stdout


@pytest.mark.static
@pytest.mark.skipif(not is_formatter_here(), reason="clang-format 14 is not here")
@pytest.mark.parametrize("what", ["scripts", *programs()])
def test_format(what):
    """Of a program, and of what its moves lead through."""
    texts = {f"src/{what}.cpp": what != "scripts" and repository.read_source(what)}
    if what in moves.steps():
        texts.update({f"move {number(what)}.{move}": text
                      for move, text in enumerate(moves.states(what)[:-1]) if move})
    if what == "scripts":
        texts = {str(path.relative_to(ROOT)): path.read_text()
                 for path in pathlib.Path(f"{ROOT}/scripts").glob("*/*.cpp")}
    messages = []
    for name, text in texts.items():
        good = subprocess.run(
            ["clang-format", "--assume-filename=src/x.cpp"], cwd=ROOT, input=text, text=True,
            check=True, stdout=subprocess.PIPE).stdout
        messages += [f"{name}:{at}: clang-format makes this of it: {new}" for at, (old, new)
                     in enumerate(zip(text.split("\n"), good.split("\n")), 1) if old != new][:1]
    nothing_wrong(messages)


@pytest.mark.parametrize("program", PROGRAMS)
def test_demo(program):
    # A file has its name in the script.
    args = [] if TABLE[program].files else TABLE[program].quick
    output = make("demo", CHAPTER=program, ARGS=" ".join(args))
    lines = output.splitlines()
    assert any(line.startswith("server | ") for line in lines)
    assert any(line.startswith("client | ") and TABLE[program].success in line
               for line in lines)


@pytest.mark.parametrize("command", [["scripts/demo.sh"], [
    sys.executable, "scripts/watch/run.py", "-o", "FOLDER"]], ids=["demo", "watch"])
def test_nobody_reads_the_tool(tmp_path, command):
    """`make demo | head -1`: when nobody reads, it ends what it has started, and itself."""
    shutil.copy(f"{ROOT}/build/6_write", tmp_path)
    command = [word.replace("FOLDER", str(tmp_path)) for word in command]
    tool = subprocess.Popen([*command, str(tmp_path / "6_write")], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert tool.stdout.readline().startswith("server | ")
    tool.stdout.close()
    tool.wait(60)
    assert left_running(tmp_path / "6_write") == []


@pytest.mark.static
def test_old_python():
    """Those who are asked for `make report` may have the Python of an older system, 3.6. So
    that, the recorder and the moves use nothing newer, as far as one can see without one."""
    files = ["scripts/report.py", "scripts/moves/moves.py",
             *glob.glob("scripts/watch/*.py", root_dir=ROOT)]
    newer = re.compile(r"\.remove(?:pre|suf)fix|capture_output|\btext=True|functools\.cache\b|"
                       r"(?m:^ *\w[\w.]* \|= \{)|\w \| \{")
    for path in files:
        source = pathlib.Path(f"{ROOT}/{path}").read_text()
        ast.parse(source, path, feature_version=(3, 6))
        assert not newer.search(source), (path, newer.search(source)[0])


@pytest.mark.static
def test_blank_in_the_path(tmp_path):
    """make would say that there is no rule, or leave out half of a command."""
    done = subprocess.run(["make", "BUILD=x y", "help"], cwd=ROOT, check=False, text=True,
                          capture_output=True)
    assert done.returncode and "BUILD has to be the name of one folder" in done.stderr
    folder = tmp_path / "a b"
    folder.mkdir()
    shutil.copy(f"{ROOT}/Makefile", folder)
    done = subprocess.run(["make", "help"], cwd=folder, check=False, text=True,
                          capture_output=True)
    assert done.returncode and f"must not have blanks; it is '{folder}'" in done.stderr


def left_running(path):
    """The processes that run this very program."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/exe") == str(path):
                found.append(int(pid))
    return found


@pytest.mark.usefixtures("terminals")
@pytest.mark.parametrize("moment, deaf", [(0.3, 1), (1.5, 0)])
def test_demo_interrupted(tmp_path, moment, deaf):
    """Ctrl-C on a terminal leaves nothing running. A program that is only being started
    may be deaf to it for a while."""
    program = tmp_path / "7_queue"
    shutil.copy(f"{ROOT}/build/7_queue", tmp_path / "real_7_queue")
    program.write_text(f"#!/bin/bash\ntrap '' INT TERM\nsleep {deaf}\n"
                       'exec "${0%/*}/real_${0##*/}" "$@"\n')
    program.chmod(0o755)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv("/bin/bash", ["bash", "scripts/demo.sh", str(program),
                               "65536", "1000", "100000"])
    os.set_blocking(terminal, False)
    while True:
        with open(f"/proc/{pid}/comm") as file:
            if file.read() == "bash\n":
                break

    begin = time.monotonic()
    interrupted = ended = 0
    while not ended and time.monotonic() < begin + 60:
        with contextlib.suppress(OSError):  # there is nothing to read
            os.read(terminal, 65536)
        if not interrupted and time.monotonic() >= begin + moment:
            interrupted = os.write(terminal, b"\x03")
        time.sleep(0.002)
        ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(terminal)
    assert ended, "it goes on"
    # 1 where the client was the first to notice; the signal itself where the script
    # had not yet got to its trap.
    assert os.waitstatus_to_exitcode(status) in (130, 1, -signal.SIGINT)
    assert left_running(tmp_path / "real_7_queue") == []
