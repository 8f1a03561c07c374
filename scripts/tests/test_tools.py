"""The Makefile and the scripts, as a reader uses them."""

import ast
import contextlib
import glob
import os
import pathlib
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
    for program in PROGRAMS:
        [command] = [line for line in commands if f" src/{program}.cpp" in line]
        assert ("-DUSE_CUDA" in command) == ("libcudart" in command) == uses(
            "USE_CUDA", program), command
        for option in f"-I{tmp_path}/include", f"-L{tmp_path}/lib -lfabric", \
                f"-Wl,-rpath,{tmp_path}/lib":
            assert option in command, command


# A compiler that does not find the header $MISSING, and builds empty files.
FAKE_COMPILER = """\
#!/bin/bash
[ "${!#}" != - ] || { ! grep -qF "<$MISSING>"; exit; }
while [ $# -gt 0 ]; do [ "$1" != -o ] || touch "$2"; shift; done
"""


@pytest.mark.parametrize("header,name", [
    ("xxhash.h", "xxHash"), ("infiniband/verbs.h", "libibverbs"), ("rdma/fabric.h", "libfabric")])
def test_make_without_a_library(tmp_path, header, name):
    """What can be built is built, and one line says what is left out. It is an error
    only for somebody who asks for that program, or where libfabric is missing."""
    compiler = tmp_path / "compiler"
    compiler.write_text(FAKE_COMPILER)
    compiler.chmod(0o755)

    def run(*targets):
        return subprocess.run(
            ["make", "-j2", f"BUILD={tmp_path}/build", f"CXX={compiler}", *targets], cwd=ROOT,
            env={**os.environ, "MISSING": header, "CUDA_HOME": ""}, check=False, text=True,
            capture_output=True)

    done = run()
    built = {program for program in programs() if (tmp_path / "build" / program).exists()}
    folder = header.partition("/")[0]
    left_out = [program for program in programs() if uses(f"<{folder}", program)]
    assert re.fullmatch(rf".*\b{name}\b.*install-deps\.sh.*\n", done.stderr)
    if name == "libfabric":
        assert done.returncode == 2 and not built
    else:
        assert done.returncode == 0 and built == {*programs()} - {*left_out}
        assert done.stderr.startswith(f"not built: {' '.join(left_out)}")
    assert run(left_out[0]).returncode == 2
    assert run("help").returncode == 0


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


def test_diff():
    """What is shared comes first, where the application is another one. The steps 5 to 7 come
    in two parts."""
    for program in "4_hello", "14_strangers", "8_malloc":
        output = make(f"diff-{number(program)}")
        assert f"--- a/src/{parent(program)}.cpp" in output
        assert f"+++ b/src/{program}.cpp" in output
        headings = re.findall("^==== ([12])", output, re.M)
        assert headings == (["1", "2"] if TABLE[program].most_added else [])
    write, gpu = make("diff-6").split("==== 2. ")
    assert "--- a/5_reverse.cpp\n" in write and "+++ b/6_write.cpp\n" in gpu
    assert "\n+  void ContinuePostWrite() {\n" in write and "ContinuePostWrite" not in gpu
    assert "\n+void CudaFlushWrites() {\n" in gpu and not re.search("(?i)gpu", write)
    both, session = make("diff-5").split("==== 2. ")
    assert "\n+  void Arrived(" in both and "\n+struct ServedClient {\n" in session
    queue, awake = make("diff-7").split("==== 2. ")
    assert "\n+  void ProgressPendingOps() {\n" in queue and "kPollsPerYield" not in queue
    assert "kPollsPerYield" in awake and "+++ b/7_queue.cpp\n" in awake


@pytest.mark.static
def test_breaks():
    """Each says at its top what to do. Whoever asks for one that is not there is told which
    there are."""
    paths = [*pathlib.Path(f"{ROOT}/scripts/breaks").glob("*.patch")]
    for path in paths:
        assert re.match(r"(Broken|Changed): (?s:.*)^  build/break/(?s:.*)\n\n--- a/",
                        path.read_text(), re.M), path
    done = subprocess.run(["scripts/breaks/run.sh", "99"], cwd=ROOT, check=False,
                          text=True, capture_output=True)
    assert done.returncode == 2
    there = done.stderr.removeprefix(
        "error: there is nothing to break in 99; there is in: ").split()
    assert sorted(there) == sorted(re.sub("_[^.]*", "", path.stem) for path in paths)


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


@pytest.mark.static
def test_variants():
    """The texts that tests replace in programs are still there. All test files have been
    read by now."""
    messages = []
    for where, source in repository.VARIANTS:
        try:
            source()
        except (LookupError, OSError, ValueError) as error:
            messages.append(f"{where}: {error}")
    nothing_wrong(messages)


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
    # Where nobody else can reach it.
    assert "server | domain: lo, " in output or program == "11_rails"
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


def left_running(path):
    """The processes that run this very program."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/exe") == str(path):
                found.append(int(pid))
    return found


@pytest.mark.parametrize("moment, deaf", [(0.3, 1), (1.5, 0)])
def test_demo_interrupted(tmp_path, moment, deaf):
    """Ctrl-C, which a terminal sends to all that it runs, leaves nothing running. A program
    that is only being started may be deaf to it for a while."""
    program = tmp_path / "7_queue"
    shutil.copy(f"{ROOT}/build/7_queue", tmp_path / "real_7_queue")
    program.write_text(f"#!/bin/bash\ntrap '' INT TERM\nsleep {deaf}\n"
                       'exec "${0%/*}/real_${0##*/}" "$@"\n')
    program.chmod(0o755)
    demo = subprocess.Popen(["scripts/demo.sh", program, "65536", "1000", "100000"], cwd=ROOT,
                            start_new_session=True, stdout=subprocess.DEVNULL)
    time.sleep(moment)
    os.killpg(demo.pid, signal.SIGINT)
    try:
        # 1 where the client was the first to notice; the signal itself where the script
        # had not yet got to its trap.
        assert demo.wait(60) in (130, 1, -signal.SIGINT)
        assert left_running(tmp_path / "real_7_queue") == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(demo.pid, signal.SIGKILL)
