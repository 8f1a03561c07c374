"""The benchmarks, as `make bench` runs them. What they find is not tested, only that they
find something."""

import os
import re
import subprocess

import pytest

import bench_queue
from repository import ROOT, read_source

# As little as can be measured.
LITTLE = {"RUNS": "1", "SIZES": "64K", "PROVIDERS": "shm tcp", "SECONDS": "0.05",
          "VARIANTS": "outstanding-1", "CXXFLAGS": "-O0"}
NUMBER = r" +\d+\.\d\d"


@pytest.mark.thorough
@pytest.mark.parametrize("args,lines", [
    ([], f"64 KiB{4 * NUMBER}\niperf3:{NUMBER} Gbps\n"),
    (["variants"], f"outstanding-1: .*{2 * NUMBER}\nunchanged, Gbps{2 * NUMBER}\n")])
def test_bench(tmp_path, args, lines):
    """It runs beside the programs that it measures."""
    for program in "7_queue", "bench_loop":
        (tmp_path / program).symlink_to(f"{ROOT}/build/{program}")
    done = subprocess.run(
        ["python3", "-B", "scripts/bench/bench_queue.py", *args], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        env={**os.environ, **LITTLE, "BUILD": str(tmp_path)})
    assert done.returncode == 0 and re.search(f"\n{lines}$", done.stdout), done.stdout


@pytest.mark.parametrize("name", bench_queue.CHANGES)
def test_variant(monkeypatch, tmp_path, name):
    """Each variant compiles."""
    monkeypatch.setattr(bench_queue, "BUILD", str(tmp_path))
    monkeypatch.setenv("CXXFLAGS", "-fsyntax-only")
    bench_queue.build_variant(name)


@pytest.mark.static
def test_changes():
    """Each variant's text is in the source, once, and is changed."""
    for name in bench_queue.CHANGES:
        assert bench_queue.changed_source(name) != read_source("7_queue"), name
