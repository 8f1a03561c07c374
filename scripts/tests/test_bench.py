"""The benchmarks, as `make bench` and its like run them. What they find is not tested, only
that they find something."""

import csv
import os
import re
import subprocess

import pytest

import bench_queue
from repository import ROOT, read_source

# As little as can be measured.
LITTLE = {"RUNS": "1", "SIZES": "64K", "PROVIDERS": "shm tcp", "SECONDS": "0.05",
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
