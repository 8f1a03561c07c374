"""The benchmarks, as `make bench` and its like run them. What they find is not tested, only
that they find something, and leave nothing behind."""

import contextlib
import csv
import os
import re
import signal
import subprocess
import time

import pytest

import bench_queue
from harness import owned_shm_files
from repository import ROOT, broken, read_source

# As little as can be measured.
LITTLE = {"RUNS": "1", "SIZES": "64K", "PROVIDERS": "shm tcp", "LINK": "", "SECONDS": "0.05",
          "FILE_SIZE": "5000000", "SLOTS": "8 1", "COUNT": "20", "CLIENTS": "1 3",
          "VARIANTS": "outstanding-1", "CXXFLAGS": "-O0"}


def start(folder, name, **env):
    """Starts a benchmark. Its results are written beside the programs, so not in build."""
    for program in ["7_queue", "9_file", "10_lock", "13_crowd", "bench_loop"]:
        (folder / program).symlink_to(f"{ROOT}/build/{program}")
    file = f"scripts/bench/bench_{name.replace('variants', 'queue')}.py"
    return subprocess.Popen(
        ["python3", "-B", file, name], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, **LITTLE, **env, "BUILD": str(folder)})


def left_behind(pid):
    """Folders of the benchmark of 9_file with this number."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"bench-file.{pid}")]


@pytest.mark.thorough
@pytest.mark.parametrize("name,measured", {
    "queue": {"7_queue", "bare loop", "memcpy", "iperf3"}, "lock": set(),
    "file": {"9_file", "socat"},
    "crowd": {"one endpoint", "an endpoint each"},
    "variants": {"unchanged", "outstanding-1"}}.items())
def test_bench(tmp_path, name, measured):
    """What each measures has a row, in the table and in a file."""
    process = start(tmp_path, name)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    with open(next(tmp_path.glob("bench*.csv"))) as file:
        _, *rows = csv.reader(file)
    # Processor time is counted in ticks of 10 ms.
    assert all(float(row[-1]) > 0 for row in rows if "CPU us each" not in row), rows
    assert {row[0] for row in rows} >= measured, rows
    assert re.search(r"(?m)^.* [0-9]+(\.[0-9]+)?$", output), output
    assert not left_behind(process.pid)


@pytest.mark.static
def test_patch():
    assert broken("scripts/bench/crowd_endpoints.patch") != read_source("13_crowd")


@pytest.mark.static
def test_changes():
    """Each variant's text is in the source, once, and is changed."""
    for name in bench_queue.CHANGES:
        assert bench_queue.changed_source(name) != read_source("7_queue"), name


def test_program_that_fails(tmp_path):
    """The benchmark repeats what the program said and ends."""
    program = tmp_path / "fails"
    program.write_text("#!/bin/sh\necho I cannot; exit 1\n")
    program.chmod(0o755)
    (tmp_path / "build").mkdir()
    process = start(tmp_path / "build", "queue")
    os.replace(program, tmp_path / "build/bench_loop")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "I cannot" in output


def children(pid, program):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            if re.match(rf"\d+ \({program}\) . {pid} ", file.read()):
                found.append(name)
    return found


@pytest.mark.parametrize("name,program,signum", [
    ("queue", "bench_loop", signal.SIGTERM), ("file", "9_file", signal.SIGINT)])
def test_interrupted(tmp_path, name, program, signum):
    """The programs that it has started end with it, and its files are gone."""
    process = start(tmp_path, name, SECONDS="10", RUNS="100", FILE_SIZE="100M")
    end = time.monotonic() + 60
    while len(started := children(process.pid, program)) < 2:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    # One run may have been over by then.
    assert process.returncode == 1 and re.fullmatch(r"(\[.*\n)*interrupted\n", output), output
    assert not any(os.path.exists(f"/proc/{pid}") for pid in started)
    assert not left_behind(process.pid)
    # libfabric now and then misses the signal, and has to be killed.
    for name in owned_shm_files(started):
        os.unlink("/dev/shm/" + name)
