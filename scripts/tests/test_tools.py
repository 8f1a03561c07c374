"""The Makefile and the scripts, as a reader uses them."""

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

import chapters
import fuzz
import mutants
from harness import PROGRAMS, Process
from repository import ROOT, make, number, numbered, parent, programs
from table import TABLE, WITHOUT_ENTRY, Entry

# Chapter 4 breaks 2_first, which breaks more easily.
NOT_BROKEN = ["4_hello"]


# What `make help` says about CUDA.
CUDA_IS_HERE = "(now: none)" not in make("help")


def scratch_make(tmp_path, *arguments, **env):
    return make(f"BUILD={tmp_path}/build", *arguments, **env)


def uses(text, program):
    with open(f"{ROOT}/src/{program}.cpp") as file:
        return text in file.read()


@pytest.mark.parametrize("compiler,cuda", [
    ("g++", ["CUDA_HOME="]), ("clang++", [])])
def test_builds(tmp_path, compiler, cuda):
    """All programs, without a warning: warnings are errors. With g++, and CUDA
    where it is, scripts/test.sh has built them. Without CUDA, only those that know it
    are others."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not here")
    if compiler == "g++" and not CUDA_IS_HERE:
        pytest.skip("without CUDA, scripts/test.sh has built the same")
    names = [program for program in programs()
             if not cuda or uses("USE_CUDA", program)]
    scratch_make(tmp_path, f"CXX={compiler}", "CXXFLAGS=-O0", *cuda, *names)
    for program in filter(TABLE.get, names):
        done = subprocess.run([tmp_path / "build" / program, "--help"],
                              check=False, capture_output=True)
        assert done.returncode == 0


def test_make_one(tmp_path):
    """make 4_hello builds it and nothing else; then nothing is left to do; other
    options build it again."""
    output = scratch_make(tmp_path, "4_hello")
    assert "4_hello.cpp" in output and "5_reverse" not in output
    assert "4_hello.cpp" not in scratch_make(tmp_path, "4_hello")
    assert "4_hello.cpp" in scratch_make(tmp_path, "4_hello", "CXXFLAGS=-O0")


def test_programs_before_6_know_no_cuda(tmp_path):
    output = scratch_make(tmp_path, "-n")
    for line in re.sub(r"\\\n", " ", output).splitlines():
        if re.search(r"\b[245]_\w+\.cpp", line):
            assert "cuda" not in line.lower()


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_libfabric_home(tmp_path, how):
    """It is used for the headers, for the library and for the run path. Tests and
    benchmark hand it on in the environment."""
    home = tmp_path / "fabric"
    for path in ["lib/libfabric.so", "include/rdma/fabric.h"]:
        (home / path).parent.mkdir(parents=True)
        (home / path).touch()
    if how == "argument":
        output = scratch_make(tmp_path, "-n", "4_hello", f"LIBFABRIC_HOME={home}")
    else:
        output = scratch_make(tmp_path, "-n", "4_hello", LIBFABRIC_HOME=str(home))
    assert f"-I{home}/include" in output
    assert f"-L{home}/lib -lfabric" in output
    assert f"-Wl,-rpath,{home}/lib" in output


# A compiler that does not find the header $MISSING, and builds empty files.
FAKE_COMPILER = """\
#!/bin/bash
[ "${!#}" != - ] || { ! grep -qF "<$MISSING>"; exit; }
while [ $# -gt 0 ]; do [ "$1" != -o ] || touch "$2"; shift; done
"""


@pytest.fixture
def make_without(tmp_path):
    """Runs make on a machine without a header. Returns its exit status, the programs
    that it has built, and its errors."""
    compiler = tmp_path / "compiler"
    compiler.write_text(FAKE_COMPILER)
    compiler.chmod(0o755)

    def run(header, *targets):
        done = subprocess.run(
            ["make", "-j2", f"BUILD={tmp_path}/build", f"CXX={compiler}", *targets],
            cwd=ROOT, env={**os.environ, "MISSING": header, "CUDA_HOME": ""},
            check=False, text=True, capture_output=True)
        built = [p for p in PROGRAMS if (tmp_path / "build" / p).exists()]
        return done.returncode, built, done.stderr
    return run


def test_make_without_xxhash(make_without):
    """What can be built is built, and one line says what is left out. It is an error
    only for somebody who asks for that program."""
    status, built, error = make_without("xxhash.h")
    assert status == 0
    left_out = [program for program in PROGRAMS if uses("<xxhash.h>", program)]
    assert left_out and built == [p for p in PROGRAMS if p not in left_out]
    said = re.fullmatch("not built: (.*); xxHash is missing .*libxxhash-dev.*"
                        r"xxhash-devel.*install-deps\.sh.*\n", error)
    assert {*left_out} <= {*said[1].split()}
    status, built, error = make_without("xxhash.h", "9_file")
    assert status == 2 and "9_file" not in built
    assert re.fullmatch(r".*\*\*\* xxHash is missing .*libxxhash-dev.*\n", error)
    assert make_without("xxhash.h", "7_queue")[::2] == (0, "")


def test_make_without_libfabric(make_without):
    """One line, however many programs there are to build."""
    for targets in [[], ["4_hello"]]:
        status, built, error = make_without("rdma/fabric.h", *targets)
        assert status == 2 and not built
        assert re.fullmatch(r".* does not find libfabric .*libfabric-dev.*"
                            r"libfabric-devel.*install-deps\.sh.*\n", error)
    assert make_without("rdma/fabric.h", "help")[::2] == (0, "")


def test_make_with_everything(make_without):
    """The line is not there without a reason."""
    assert make_without("nothing.h") == (0, PROGRAMS, "")


def test_help_and_diff():
    output = make("help")
    for target in ["make demo", "make test", "make mutants", "make fuzz", "make bench",
                   "make bench-file", "make diff-7", "make exercise-4", "make book",
                   "make figures", "make clean"]:
        assert target in output
    for program in PROGRAMS[1:]:
        output = make(f"diff-{number(program)}")
        assert f"--- a/src/{parent(program)}.cpp" in output
        assert f"+++ b/src/{program}.cpp" in output
        # What is shared comes first, where the application is another one.
        headings = re.findall("^==== ([12])", output, re.M)
        assert headings == (["1", "2"] if TABLE[program].most_added else [])
    for program in "2_first", "4_hello":
        assert f"{program} is based on no other" in make(f"diff-{number(program)}")


def test_breaks():
    """Each patch fits a program exactly, and says at its top what to do. Whoever asks
    for one that is not there is told which there are."""
    numbers_of = []
    for name in os.listdir(f"{ROOT}/scripts/breaks"):
        program, extension = os.path.splitext(name)
        if extension != ".patch":
            continue
        numbers_of.append(str(number(program)))
        path = f"scripts/breaks/{name}"
        done = subprocess.run(
            ["git", "apply", "--check", "-v", path], cwd=ROOT, check=False, text=True,
            capture_output=True, env={**os.environ, "LC_ALL": "C"})
        assert done.returncode == 0, done.stderr
        assert "offset" not in done.stderr
        with open(f"{ROOT}/{path}") as file:
            assert re.match(
                r"Broken: (?s:.*)^  build/break/(?s:.*)\n\n"
                rf"--- a/src/{program}\.cpp\n\+\+\+ b/src/{program}\.cpp\n",
                file.read(), re.M)
    done = subprocess.run(["scripts/breaks/run.sh", "99"], cwd=ROOT, check=False,
                          text=True, capture_output=True)
    assert done.returncode == 2
    assert done.stderr == ("error: there is nothing to break in 99; there is in: "
                           f"{' '.join(sorted(numbers_of, key=int))}\n")


APPLICATION = """
// ---------------------------------------------------------------------------
// The application
// ---------------------------------------------------------------------------

"""


@pytest.fixture
def diff(tmp_path):
    """Runs scripts/diff.sh for programs that a test makes up."""
    for folder in ["src", "scripts"]:
        (tmp_path / folder).mkdir()
    for name in ["common.sh", "diff.sh"]:
        shutil.copy(f"{ROOT}/scripts/{name}", tmp_path / "scripts")

    def run(number, **sources):
        for name, text in sources.items():
            (tmp_path / f"src/{name[1:]}.cpp").write_text(text)
        names = numbered(tmp_path / "src", ".cpp")
        return subprocess.run(
            ["scripts/diff.sh", str(number), *names], cwd=tmp_path, check=False, text=True, capture_output=True)
    return run


LINES = "".join(f"line {i}\n" for i in range(20))
BEFORE = "shared\n" + APPLICATION + LINES


def test_diff_against_the_parent(diff):
    """Not against the program with the number before it. A change within the
    application is one diff."""
    after = "// Based on 4_a.\nshared\n" + APPLICATION + LINES.replace("7", "seven")
    done = diff(6, _4_a=BEFORE, _5_b="// Based on 4_a.\n", _6_c=after)
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.count("\n--- a/src/4_a.cpp\n+++ b/src/6_c.cpp\n") == 1
    assert "====" not in done.stdout


def test_diff_of_another_application(diff):
    """Two diffs, where most of the application is gone: what is shared, with the
    lines that stay in it, then the applications."""
    after = ("// Based on 4_a.\nshared\nnew\n" + APPLICATION
             + LINES.replace("line", "other"))
    done = diff(5, _4_a=BEFORE, _5_b=after)
    assert done.returncode == 0 and not done.stderr
    _, shared, application = re.split("^==== .*\n", done.stdout, flags=re.M)
    for part in shared, application:
        assert part.count("\n--- a/src/4_a.cpp\n+++ b/src/5_b.cpp\n") == 1
    assert "\n shared\n+new\n" in shared and "line" not in shared
    assert "-line 7\n" in application and "+other 7\n" in application
    assert "shared" not in application and "line 5 of src/5_b.cpp" in application


def test_diff_without_a_parent(diff):
    done = diff(5, _4_a=BEFORE, _5_b=BEFORE)
    assert done.returncode == 1 and "src/5_b.cpp names no parent" in done.stderr
    done = diff(7)
    assert done.returncode == 2 and "no program has the number 7" in done.stderr


@pytest.mark.usefixtures("terminals")
def test_diff_on_a_terminal():
    """Each diff is coloured, and a pager shows all of it."""
    for program in PROGRAMS[1:]:
        master, slave = pty.openpty()
        pager = subprocess.Popen(
            ["make", f"diff-{number(program)}"], cwd=ROOT, stdin=slave, stdout=slave,
            stderr=slave, env={**os.environ, "TERM": "xterm", "CUDA_HOME": "",
                               "GIT_PAGER": "sed 's/^/paged /'"})
        os.close(slave)
        output = b""
        try:
            while data := os.read(master, 65536):
                output += data
        except OSError:
            pass  # as it is at the end
        os.close(master)
        assert pager.wait() == 0
        lines = output.decode().splitlines()
        assert all(line.startswith("paged ") for line in lines)
        assert any("\x1b[32m+" in line for line in lines)


def test_dependencies_are_here():
    """Nothing is done when everything is there."""
    done = subprocess.run(["scripts/install-deps.sh", "build", "test"],
                          cwd=ROOT, capture_output=True, check=True)
    assert not done.stdout and not done.stderr


def machine_without_anything(folder, manager, user):
    """A PATH with a package manager that only prints its arguments, with a sudo
    that runs a command and an id that names another user, and with nothing else
    that could be installed."""
    stubs = {manager: f'echo "{manager}: $*"', "sudo": '"$@"',
             "id": f"echo {user}", "env": 'shift; "$@"'}
    for name, body in stubs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    (folder / "dirname").symlink_to(shutil.which("dirname"))
    return {"PATH": str(folder), "CXX": "g++", "LIBFABRIC_HOME": str(folder)}


# An exercise and the tests do without what only the benchmark needs to draw.
PACKAGES = {
    ("apt-get", "build exercise"):
        "g++ make pkg-config libfabric-dev libxxhash-dev python3-pytest",
    ("apt-get", "build test"):
        "g++ make pkg-config libfabric-dev libxxhash-dev git python3-pytest "
        "python3-pytest-xdist iproute2 libfabric-bin iperf3 socat",
    ("apt-get", "bench"): "iperf3 socat python3-matplotlib",
    ("apt-get", "bench-crowd"): "redis-server redis-tools git",
    ("dnf", "bench-crowd"): "redis git",
    ("dnf", "build test"):
        "gcc-c++ make pkgconf-pkg-config libfabric-devel xxhash-devel git "
        "python3-pytest python3-pytest-xdist iproute libfabric iperf3 socat",
    ("dnf", "figures"): "chromium liberation-sans-fonts nodejs-npm",
    ("apt-get", "book"):
        "python3-markdown-it python3-mdit-py-plugins python3-pygments git mandoc",
    ("dnf", "book"):
        "python3-markdown-it-py python3-mdit-py-plugins python3-pygments git mandoc",
    ("apt-get", "browser"):
        "python3-pytest python3-selenium chromium fonts-liberation chromium-driver npm",
    ("dnf", "browser"):
        "python3-pytest python3-selenium chromium liberation-sans-fonts chromedriver "
        "nodejs-npm",
}


@pytest.mark.parametrize("manager,groups", PACKAGES)
@pytest.mark.parametrize("user", [0, 1000])
def test_dependencies_are_installed(tmp_path, manager, groups, user):
    """What is missing, and nothing else; with sudo for everybody but root."""
    env = machine_without_anything(tmp_path, manager, user)
    done = subprocess.run(["/bin/bash", "scripts/install-deps.sh",
                           *groups.split()], cwd=ROOT, env=env, text=True,
                          check=True, capture_output=True)
    assert not done.stderr
    lines = done.stdout.splitlines()
    said = [line for line in lines if line.startswith("+ ")]
    ran = [line for line in lines if line.startswith(f"{manager}: ")]
    assert len(said) == len(ran) and said
    assert all(line.startswith("+ sudo ") == (user != 0) for line in said)
    install = " -y " + {"apt-get": "--no-install-recommends "}.get(manager, "")
    for line in said[-1], ran[-1]:
        assert line.endswith(install + PACKAGES[manager, groups])
    # It can say so, and do nothing.
    done = subprocess.run(["/bin/bash", "scripts/install-deps.sh", "--list",
                           *groups.split()], cwd=ROOT, env=env, text=True,
                          check=True, capture_output=True)
    assert done.stdout == PACKAGES[manager, groups] + "\n"


@pytest.mark.parametrize("program", PROGRAMS[1:])
def test_step(tmp_path, program):
    """What two programs share stands in both, letter for letter. A step hardly
    removes anything (Entry.most_removed); one that replaces the application may drop
    what it has no use for, but hardly adds anything to the rest (Entry.most_added)."""
    before = parent(program)
    most_added = TABLE[program].most_added
    for name in before, program:
        with open(f"{ROOT}/src/{name}.cpp") as file:
            text = file.read()
        if most_added:
            text, heading, _ = text.partition("\n// The application\n")
            assert heading, f"src/{name}.cpp has no section `// The application`"
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


def what_is_missing(root, table, sessions):
    """What programs lack, and what there is for programs that do not exist, one
    message each. The table is that of table.py, the sessions are those of fuzz.py."""
    there = programs(root)
    tested = [program for program in there if program not in WITHOUT_ENTRY]
    messages = []

    def each(names, path, needed):
        """For each of the programs its own, and nothing else."""
        messages.extend(f"{path(program)} is missing: {program} needs it"
                        for program in needed if program not in names)
        messages.extend(f"{path(name)}: there is no src/{name}.cpp"
                        for name in names if name not in there)

    numbers = [number(program) for program in there]
    messages += [f"src/: two programs have the number {n}"
                 for n in sorted(set(numbers)) if numbers.count(n) > 1]
    each(chapters.pages_of_programs(root), "chapters/{}.md".format, there)
    each(numbered(f"{root}/scripts/exercises", ".patch"),
         "scripts/exercises/{}.patch".format, tested)
    each(numbered(f"{root}/scripts/breaks", ".patch"),
         "scripts/breaks/{}.patch".format,
         [program for program in there if program not in NOT_BROKEN])
    fields = ", ".join(name for name in Entry._fields
                       if name not in Entry._field_defaults)
    messages += [f"TABLE[{program!r}] in scripts/tests/table.py is missing: no test "
                 f"runs {program} without an Entry; it needs at least: {fields}"
                 for program in tested if program not in table]
    messages += [f"TABLE[{name!r}] in scripts/tests/table.py: there is no "
                 f"src/{name}.cpp" for name in table if name not in there]
    messages += [f"SESSIONS[{name!r}] in scripts/tests/fuzz.py is missing: {name} "
                 "needs it" for name in table
                 if table[name].bad_sessions and name not in sessions]
    messages += [f"SESSIONS[{name!r}] in scripts/tests/fuzz.py: no such program has "
                 "sessions" for name in sessions
                 if name not in table or not table[name].bad_sessions]
    exercises = [name.removeprefix("exercise_") for name in
                 numbered(f"{root}/scripts/exercises", ".py")
                 if name.startswith("exercise_")]
    messages += [f"scripts/exercises/exercise_{n}.py is missing: its program needs it"
                 for n in map(number, tested) if str(n) not in exercises]
    messages += [f"scripts/exercises/exercise_{n}.py: no program has this number"
                 for n in exercises if n not in map(str, numbers)]
    return messages


def test_every_program_has_everything():
    """The tests find programs in src/. This tells what one still lacks, and the
    others do without what it lacks."""
    messages = what_is_missing(ROOT, TABLE, fuzz.SESSIONS)
    assert not messages, "\n".join(messages)


def an_entry(**kwargs):
    return Entry(success="", long=[], wrong={}, sizes=[], **kwargs)


@pytest.mark.parametrize("path,message", [
    ("src/10_lock.cpp", [
        "chapters/10_lock.md is missing: 10_lock needs it",
        "scripts/exercises/10_lock.patch is missing: 10_lock needs it",
        "scripts/breaks/10_lock.patch is missing: 10_lock needs it",
        "TABLE['10_lock'] in scripts/tests/table.py is missing: no test runs 10_lock "
        "without an Entry; it needs at least: success, long, wrong, sizes",
        "scripts/exercises/exercise_10.py is missing: its program needs it"]),
    ("src/4_twin.cpp", ["src/: two programs have the number 4"]),
    ("chapters/10_lock.md", ["chapters/10_lock.md: there is no src/10_lock.cpp"]),
    ("chapters/3_before.md", []),
    ("scripts/exercises/exercise_10.py",
     ["scripts/exercises/exercise_10.py: no program has this number"]),
    ("scripts/exercises/10_lock.patch",
     ["scripts/exercises/10_lock.patch: there is no src/10_lock.cpp"]),
    ("scripts/breaks/10_lock.patch",
     ["scripts/breaks/10_lock.patch: there is no src/10_lock.cpp"]),
    ("", ["TABLE['10_lock'] in scripts/tests/table.py: there is no src/10_lock.cpp",
          "SESSIONS['10_lock'] in scripts/tests/fuzz.py is missing: 10_lock needs it"]),
])
def test_finds_what_is_missing(tmp_path, path, message):
    table = {"4_hello": an_entry()}
    for name in ["src/4_hello.cpp", "chapters/4_hello.md",
                 "scripts/exercises/exercise_4.py", "scripts/exercises/conftest.py",
                 "scripts/exercises/4_hello.patch", "scripts/breaks/run.sh"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert what_is_missing(tmp_path, table, {}) == []
    if path:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    else:
        table["10_lock"] = an_entry(bad_sessions={"empty": [b""]})
    assert what_is_missing(tmp_path, table, {})[:len(message) or 1] == message


def test_last_line_is_waited_for(run, monkeypatch):
    """A program that has ended may have printed more than has been read so far."""
    read = Process._read

    def read_late(process):
        time.sleep(0.3)
        read(process)

    monkeypatch.setattr(Process, "_read", read_late)
    run(["echo", "the last line"]).wait_for("last line")
    with pytest.raises(AssertionError, match=r"ended:\s+the last line"):
        run(["echo", "the last line"]).wait_for("another")


WARNING_TEST = '''
import pytest

SAY = "echo 'domain: lo, fabric: f, provider: tcp;ofi_rxm'; echo '{}'"

@pytest.mark.parametrize("said", [
    "warning: fi_close: Device or resource busy", "[1] warning: other",
    "libfabric:1:core:core:fi_getinfo():1:<warn> text", "no warning: here"])
@pytest.mark.parametrize("sh", ["exit", "exec sleep 60"])
def test_plain(run, said, sh):
    run(["sh", "-c", SAY.format(said) + "; " + sh]).wait_for("[a-z]$", count=2)

@pytest.mark.may_warn("fi_close: Device or resource busy", "tcp;ofi_rxm", "sh")
@pytest.mark.parametrize("said", [
    "warning: fi_close: Device or resource busy", "warning: fi_close: Other"])
def test_expected(run, said):
    run(["sh", "-c", SAY.format(said)]).wait()

@pytest.mark.may_warn("fi_close: Device or resource busy", "shm", "sh")
@pytest.mark.may_warn("fi_close: Device or resource busy", "tcp;ofi_rxm", "5_reverse")
def test_other(run):
    run(["sh", "-c", SAY.format("warning: fi_close: Device or resource busy")]).wait()
'''


def test_warnings_are_failures(tmp_path):
    """Those of our programs, unless a test says that there may be one."""
    (tmp_path / "conftest.py").symlink_to(f"{ROOT}/scripts/tests/conftest.py")
    (tmp_path / "test_warnings.py").write_text(WARNING_TEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rE", "-p", "no:cacheprovider",
         tmp_path], cwd=tmp_path, check=False, text=True, capture_output=True,
        env={**os.environ, "COLUMNS": "500"})
    assert done.stdout.splitlines()[-1].startswith("11 passed, 6 errors in"), done.stdout
    failed = re.findall(r"^ERROR .*::(.*) - ", done.stdout, re.M)
    assert failed == [
        *(f"test_plain[{sh}-{said}]" for sh in ["exit", "exec sleep 60"] for said in [
            "warning: fi_close: Device or resource busy", "[1] warning: other"]),
        "test_expected[warning: fi_close: Other]", "test_other"]


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_mutants(name):
    """Each still breaks something, and names tests that are there. Whether these
    notice, `make mutants` tells."""
    messages = list(mutants.faults(mutants.MUTANTS[name]))
    assert not messages, "\n".join(messages)


def test_faulty_mutants():
    """Lines that are not there, that are there twice, or that no test is about."""
    mutant = mutants.MUTANTS["silence"]
    for change, message in [
            ({"old": "no such line"}, "'no such line' occurs 0 times in src/5_"),
            ({"old": "return;"}, "'return;' occurs "),
            ({"new": mutant.old}, "it changes nothing"),
            ({"tests": "test_no.py test_x"}, "there is no scripts/tests/test_no.py"),
            ({"tests": "test_tools.py test_absent"},
             "scripts/tests/test_tools.py has no test_absent")]:
        messages = list(mutants.faults(mutant._replace(**change)))
        assert len(messages) == 1 and messages[0].startswith(message), messages


def test_source_format():
    for name in programs():
        with open(f"{ROOT}/src/{name}.cpp") as file:
            for at, line in enumerate(file, 1):
                assert len(line.rstrip("\n")) <= 80, (name, at)
                assert line == line.rstrip() + "\n", (name, at)


@pytest.mark.parametrize("program", PROGRAMS)
def test_demo(program):
    # The arguments that 11_rails takes otherwise are those of 7_queue, and take long;
    # 13_crowd takes none otherwise.
    args = TABLE[program].quick if program in ("11_rails", "13_crowd") else []
    output = make("demo", CHAPTER=program, ARGS=" ".join(args))
    lines = output.splitlines()
    assert any(line.startswith("server | ") for line in lines)
    assert any(line.startswith("client | ") and TABLE[program].success in line
               for line in lines)
    # 9_file saves the file somewhere else.
    assert not os.path.exists(f"{ROOT}/demo.bin")


def test_demo_leaves_nothing(tmp_path):
    shutil.copy(f"{ROOT}/build/5_reverse", tmp_path)
    subprocess.run(["scripts/demo.sh", str(tmp_path / "5_reverse")], cwd=ROOT,
                   check=True, capture_output=True)
    assert left_running("5_reverse", str(tmp_path)) == []


def test_demo_tells_the_status():
    """It exits with the client's."""
    done = subprocess.run(["scripts/demo.sh", "build/6_write", "7", "1"],
                          cwd=ROOT, check=False, capture_output=True)
    assert done.returncode == 2


def left_running(program, folder="build"):
    """The processes that run this very program."""
    path = os.path.join(ROOT, folder, program)
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/exe") == path:
                found.append(int(pid))
        except OSError:
            pass
    return found


@pytest.mark.usefixtures("terminals")
@pytest.mark.parametrize("moment", [0.2, 0.6, 1.5])
def test_demo_interrupted(tmp_path, moment):
    """Ctrl-C on a terminal leaves nothing running."""
    program = tmp_path / "7_queue"
    shutil.copy(f"{ROOT}/build/7_queue", program)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv("/bin/bash", ["bash", "scripts/demo.sh", str(program),
                               "65536", "1000", "100000"])
    end = time.monotonic() + moment
    os.set_blocking(terminal, False)

    def drain(until):
        while time.monotonic() < until:
            try:
                os.read(terminal, 65536)
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                return

    drain(end)
    os.write(terminal, b"\x03")
    drain(time.monotonic() + 5)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    # 1 where the client was the first to notice; the signal itself where the script
    # had not yet got to its trap.
    assert os.waitstatus_to_exitcode(status) in (130, 1, -signal.SIGINT)
    assert left_running("7_queue", str(tmp_path)) == []


@pytest.mark.usefixtures("terminals")
def test_progress_on_a_terminal():
    """One line, written over."""
    master, slave = pty.openpty()
    server = subprocess.Popen(["build/7_queue"], cwd=ROOT, stdout=slave,
                              stdin=subprocess.DEVNULL)
    os.close(slave)
    output = b""
    try:
        while not re.search(rb"command:\r\n.* ([0-9a-f]+)\r\n", output):
            output += os.read(master, 65536)
        address = re.search(rb"command:\r\n.* ([0-9a-f]+)\r\n", output)[1]
        subprocess.run(["build/7_queue", address.decode(), "65536", "1000",
                        "100"], cwd=ROOT, check=True, capture_output=True)
        while not re.search(rb"WRITE: 100%[^\r\n]*\r\n", output):
            output += os.read(master, 65536)
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0
        os.close(master)
    # Each line but the first replaces the one before it.
    replaced = output.count(b"\r\x1b[K[1] [")
    assert replaced >= 1
    assert output.count(b"Mpps") == replaced + 1
