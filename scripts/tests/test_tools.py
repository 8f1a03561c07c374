"""The Makefile and the scripts, as a reader uses them."""

import os
import pty
import re
import shutil
import signal
import subprocess
import time

import pytest

from conftest import PROGRAMS, ROOT, SUCCESS, make


def scratch_make(tmp_path, *arguments, **env):
    return make(f"BUILD={tmp_path}/build", *arguments, **env)


@pytest.mark.parametrize("compiler,cuda", [
    ("g++", ["CUDA_HOME="]), ("clang++", [])])
def test_builds(tmp_path, compiler, cuda):
    """All programs, without a warning: warnings are errors. With g++, and CUDA
    where it is, scripts/test.sh has built them."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not here")
    scratch_make(tmp_path, f"CXX={compiler}", "CXXFLAGS=-O0", *cuda)
    for program in PROGRAMS:
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
        if "4_hello.cpp" in line or "5_reverse.cpp" in line:
            assert "cuda" not in line.lower()


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_libfabric_home(tmp_path, how):
    """It is used for the headers, for the library and for the run path. Tests and
    benchmark hand it on in the environment."""
    home = tmp_path / "fabric"
    (home / "lib").mkdir(parents=True)
    (home / "lib" / "libfabric.so").touch()
    if how == "argument":
        output = scratch_make(tmp_path, "-n", "4_hello", f"LIBFABRIC_HOME={home}")
    else:
        output = scratch_make(tmp_path, "-n", "4_hello", LIBFABRIC_HOME=str(home))
    assert f"-I{home}/include" in output
    assert f"-L{home}/lib -lfabric" in output
    assert f"-Wl,-rpath,{home}/lib" in output


def test_help_and_diff():
    output = make("help")
    for target in ["make demo", "make test", "make bench", "make bench-file",
                   "make diff-7", "make exercise-4", "make figures", "make clean"]:
        assert target in output
    for number, program in enumerate(PROGRAMS[1:], 5):
        assert f"+++ b/src/{program}.cpp" in make(f"diff-{number}")
    assert "first program" in make("diff-4")


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
    ("dnf", "build test"):
        "gcc-c++ make pkgconf-pkg-config libfabric-devel xxhash-devel git "
        "python3-pytest python3-pytest-xdist iproute libfabric iperf3 socat",
    ("dnf", "figures"): "chromium liberation-sans-fonts nodejs-npm",
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


def test_shared_code_is_the_same(tmp_path):
    """What two programs share stands in both, letter for letter, and a step
    hardly removes anything. 8_malloc and 9_file have applications of their own:
    only what comes before those counts. There, 9_file changes nothing but its
    includes and its constants."""
    for before, after in zip(PROGRAMS, PROGRAMS[1:]):
        for program in before, after:
            with open(f"{ROOT}/src/{program}.cpp") as file:
                text = file.read()
            if after in ("8_malloc", "9_file"):
                text, mark, _ = text.partition("\nenum class AppMessageType ")
                assert mark
            if after == "9_file":
                # From here on, the two have the same code.
                _, mark, text = text.partition("\n// Errors and signals\n")
                assert mark
            (tmp_path / program).write_text(text)
        done = subprocess.run(
            ["git", "diff", "--no-index", "--numstat", before, after],
            cwd=tmp_path, text=True, capture_output=True, check=False)
        added, removed = map(int, done.stdout.split()[:2] or (0, 0))
        total = len((tmp_path / before).read_text().splitlines())
        assert removed <= 0.06 * total, (before, after)
        assert added == removed == 0 or after != "9_file"


def test_source_format():
    for folder, _, names in os.walk(f"{ROOT}/src"):
        for name in names:
            with open(os.path.join(folder, name)) as file:
                for number, line in enumerate(file, 1):
                    assert len(line.rstrip("\n")) <= 80, (name, number)
                    assert line == line.rstrip() + "\n", (name, number)


@pytest.mark.parametrize("program", PROGRAMS)
def test_demo(program):
    output = make("demo", CHAPTER=program)
    lines = output.splitlines()
    assert any(line.startswith("server | ") for line in lines)
    assert any(line.startswith("client | ") and SUCCESS[program] in line
               for line in lines)


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
