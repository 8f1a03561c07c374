"""The benchmark: that it measures, not what it finds."""

import csv
import os
import pty
import re
import subprocess
import xml.etree.ElementTree

import pytest

import bench
from conftest import ROOT

# As little as can be measured.
LITTLE = {"RUNS": "1", "SIZES": "64 64K", "PROVIDERS": "shm tcp",
          "SECONDS_PER_RUN": "0.01", "LONG": "2000"}
RATE = r"[0-9]+\.[0-9]+"


def run_bench(build, *arguments, **env):
    done = subprocess.run(["scripts/bench.sh", *arguments], cwd=ROOT, text=True,
                          env={**os.environ, **LITTLE, **env, "BUILD": build},
                          check=False, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout


def link_programs(folder):
    """What it writes beside the programs should not lie in build."""
    for program in ["7_queue", "bench_loop"]:
        (folder / program).symlink_to(f"{ROOT}/build/{program}")


def read_csv(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_bench(tmp_path):
    link_programs(tmp_path)
    output = run_bench(str(tmp_path))
    for row in [r"shm +64 B", r"shm +64 KiB", r"tcp +64 B", r"tcp +64 KiB"]:
        assert re.search(f"^{row}( +{RATE}){{5}}$", output, re.M), output
    targets = output[output.index("Targets:"):].splitlines()[1:]
    assert len(targets[:targets.index("")]) == 8
    assert "not measured" not in output

    rows = read_csv(tmp_path / "bench.csv")
    expected = {(program, provider, size, run)
                for program, provider in [
                    ("7_queue", "shm"), ("7_queue", "tcp"), ("loop", "shm"),
                    ("loop", "tcp"), ("memcpy", ""), ("iperf3", "")]
                for size in ["64", "65536"] for run in ["1", ""]}
    keys = [(r["program"], r["provider"], r["page_size"], r["run"])
            for r in rows]
    assert len(keys) == len(expected) and set(keys) == expected
    for row in rows:
        assert float(row["writes_per_second"]) > 0
        assert float(row["gbps"]) == pytest.approx(
            float(row["writes_per_second"]) * int(row["page_size"]) * 8e-9,
            rel=0.01, abs=1e-4)

    root = xml.etree.ElementTree.parse(tmp_path / "bench.svg").getroot()
    assert root.tag.endswith("svg")


def test_variants(tmp_path):
    """One is built, differs, and is measured beside the unchanged one. In the
    environment, what make would hand on."""
    name = "outstanding-1"
    link_programs(tmp_path)
    output = run_bench(str(tmp_path), "--variants", name, SIZES="64 4K",
                       PROVIDERS="shm", MAKEFLAGS="n")
    assert re.search(f"^{name} .*( +{RATE}){{2}}$", output, re.M), output
    built = tmp_path / "bench" / name / "7_queue"
    assert built.read_bytes() != (tmp_path / "7_queue").read_bytes()
    keys = {(r["program"], r["provider"])
            for r in read_csv(tmp_path / "bench-variants.csv")}
    assert keys == {("unchanged", "shm"), (name, "shm")}


@pytest.mark.parametrize("name", [change[0] for change in bench.CHANGES])
def test_change(name):
    """Each variant's text is in the source, once, and is changed."""
    with open(f"{ROOT}/src/7_queue.cpp") as file:
        assert bench.changed_source(name) != file.read()


def test_change_that_is_not_there(monkeypatch):
    monkeypatch.setattr(bench, "CHANGES", [("none", "", "no such text", "")])
    with pytest.raises(RuntimeError, match="variant none: .*no such text"):
        bench.changed_source("none")


def test_program_that_fails(tmp_path):
    """It says what the program said, ends, and leaves nothing running."""
    link_programs(tmp_path)
    (tmp_path / "bench_loop").unlink()
    (tmp_path / "bench_loop").write_text("#!/bin/sh\necho I cannot; exit 1\n")
    (tmp_path / "bench_loop").chmod(0o755)
    done = subprocess.run(["scripts/bench.sh"], cwd=ROOT, check=False,
                          env={**os.environ, **LITTLE, "BUILD": str(tmp_path)},
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "I cannot" in done.stderr


def test_progress_on_a_terminal(monkeypatch):
    """One line, written over."""
    terminal, ours = pty.openpty()
    with os.fdopen(ours, "w") as file:
        monkeypatch.setattr("sys.stdout", file)
        progress = bench.Progress(3)
        for number in range(3):
            progress.step(f"step {number}")
    output = os.read(terminal, 65536)
    os.close(terminal)
    assert output.count(b"\r[") == 3 and output.count(b"\n") == 1
    assert b"[" + b"#" * 30 + b"] step 2" in output


def test_medians(tmp_path):
    """Of single runs in the table; of pairs in a ratio."""
    results = bench.Results()
    for ours, limit in [(10, 10), (30, 40), (90, 60)]:
        results.add("7_queue", "shm", 64, ours)
        results.add("loop", "shm", 64, limit)
    assert results.ratio(("7_queue", "shm", 64), ("loop", "shm", 64)) == 1
    assert results.ratio(("7_queue", "shm", 64), ("loop", "shm", 4096)) is None
    results.write_csv(tmp_path / "csv")
    rates = [(r["run"], r["writes_per_second"]) for r in read_csv(tmp_path / "csv")
             if r["program"] == "7_queue"]
    assert rates == [("1", "10"), ("2", "30"), ("3", "90"), ("", "30")]
