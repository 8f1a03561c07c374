"""The benchmarks: they measure. What they find is not tested."""

import contextlib
import csv
import os
import re
import shutil
import signal
import subprocess
import time
import xml.etree.ElementTree

import pytest

import bench
import bench_crowd
import bench_file
import bench_lock
import bench_queue
from harness import owned_shm_files
from repository import ROOT, broken, make, read_source

# As little as can be measured.
LITTLE = {"RUNS": "1", "SIZES": "64K", "PROVIDERS": "shm tcp", "LINK": "",
          "SECONDS": "0.01", "FILE_SIZE": "5000000", "SLOTS": "8 1"}
RATE = r"[0-9]+\.[0-9]+"


def start(folder, name, **env):
    """Results are written beside the programs, but should not appear in build."""
    for program in ["7_queue", "9_file", "10_lock", "11_rails", "13_crowd", "bench_loop"]:
        if not (folder / program).exists():
            (folder / program).symlink_to(f"{ROOT}/build/{program}")
    return subprocess.Popen(
        ["scripts/bench/bench.sh", name], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, **LITTLE, **env, "BUILD": str(folder)})


def run_bench(folder, name, **env):
    """Returns its output, and all values by their keys."""
    process = start(folder, name, **env)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    with open(next(folder.glob("bench*.csv"))) as file:
        values = {tuple(row[:-2]): float(row[-1]) for row in [*csv.reader(file)][1:]}
    assert all(value > 0 for key, value in values.items() if "CPU us each" not in key)
    return output, values


def rows(output, pattern):
    return re.findall(f"(?m)^{pattern}$", output)


@pytest.mark.thorough
def test_queue(tmp_path):
    """Without matplotlib there is no figure, but everything else."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError('hidden')\n")
    output, values = run_bench(tmp_path, "queue", PYTHONPATH=str(tmp_path))
    assert rows(output, f"64 KiB( +{RATE}){{5}}")
    assert rows(output, rf"64 KiB( +{RATE} +\w+,\d+,\d+){{2}}") and rows(output, f"iperf3: {RATE}")
    assert rows(output, r"Not drawn: .*bench\.svg \(hidden\)")
    assert {*values} == {("memcpy", "", "65536"), ("iperf3", "", "65536"), *(
        (program, provider, "65536") for program in ["7_queue", "bare loop"]
        for provider in ["shm", "tcp"])}


@pytest.mark.thorough
def test_variants(tmp_path):
    """A variant is built, differs, and is measured beside the unchanged program.
    MAKEFLAGS is in the environment when make runs the benchmark."""
    name = "outstanding-1"
    output, values = run_bench(tmp_path, "variants", VARIANTS=name, SIZES="64 4K",
                               PROVIDERS="shm", CXXFLAGS="-O0", MAKEFLAGS="n")
    assert rows(output, f"{name}: .*( +{RATE}){{2}}")
    built = tmp_path / "bench" / name / "7_queue"
    assert built.read_bytes() != (tmp_path / "7_queue").read_bytes()
    assert {key[0] for key in values} == {"unchanged", name}


@pytest.mark.thorough
def test_lock(tmp_path):
    output, values = run_bench(tmp_path, "lock", COUNT="20")
    for kind in bench_lock.KINDS.values():
        assert len(rows(output, rf"{kind}( +\d+){{3}}")) == 2
    assert len(values) == 2 * len(bench_lock.CLIENTS) * len(bench_lock.KINDS)


def test_rails(tmp_path):
    output, values = run_bench(tmp_path, "rails", SETS="200 300,150", SECONDS="0.3")
    for links in ["200", "300, 150"]:
        assert rows(output, f"{links}( +{RATE}){{5}}")
    assert {*values} == {(program, links) for program in ["11_rails", "dealt out", "iperf3"]
                         for links in ["200", "300, 150"]}


@pytest.mark.thorough
def test_crowd(tmp_path):
    """The server that the patch makes has an endpoint for each client."""
    output, values = run_bench(tmp_path, "crowd", CLIENTS="1 3", COUNT="30", CXXFLAGS="-O0")
    for provider in ["shm", "tcp"]:
        for program in ["one endpoint", "an endpoint each"]:
            assert rows(output, rf"[13] +{provider} +{program}( +[0-9.]+){{5}}")
    grown = {program: values[program, "tcp", "3", "MB"] - values[program, "tcp", "1", "MB"]
             for program in ["one endpoint", "an endpoint each"]}
    assert grown["an endpoint each"] > grown["one endpoint"] + 0.1


@pytest.mark.thorough
@pytest.mark.skipif(not all(map(shutil.which, ["mpirun", "mpicxx"])),
                    reason="Open MPI is not installed")
def test_ring(tmp_path):
    """Beside Open MPI."""
    for program in "15_ring", "bench_allreduce":
        make("CXXFLAGS=-O0", f"BUILD={tmp_path}", f"{tmp_path}/{program}")
    output, values = run_bench(tmp_path, "ring", SIZES="4K 64K", PROVIDERS="tcp")
    assert len(rows(output, f"(?:4|64) KiB( +{RATE}){{3}}")) == 2
    assert {*values} == {(program, "tcp", size) for program in ["15_ring", "Open MPI"]
                         for size in ["4096", "65536"]}


# What redis-server and redis-benchmark say, of what the benchmark reads.
FAKE_REDIS = {
    "redis-server": """echo '1:M 01 Jan 2026 * Ready to accept connections tcp'
exec sleep 60""",
    "redis-benchmark": """echo '"test","rps","p50_latency_ms","p99_latency_ms"'
case "$*" in
  *" -c 7 -n 30 -r 7 --csv SET key of client "*) echo '"SET a b","300.00","0.100","0.5"' ;;
  *" -c 7 -n 30 -r 7 --csv GET key of client "*) echo '"GET a","100.00","0.200","0.9"' ;;
esac"""}


def test_redis(tmp_path, monkeypatch):
    for name, text in FAKE_REDIS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(bench_crowd, "COUNT", 30)
    measured = [*bench_crowd.measure_redis(7).values()]
    assert measured[:3] == pytest.approx([150, 150, 700]) and measured[3] > 0


def test_file(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('hidden')\n")
    output, values = run_bench(tmp_path, "file", PYTHONPATH=str(tmp_path))
    places = {"shm": f"( +{RATE}){{5}}", "tcp": f"( +{RATE}){{5}}"}
    # The slow disk is compared with nothing but itself.
    places.update({bench_file.slow(p): rf"( +{RATE}){{2}}( +-){{3}}" for p in ["shm", "tcp"]})
    for place, numbers in places.items():
        assert len(rows(output, f"{place} +[18]{numbers}")) == 2, output
    others = [("7_queue", "shm"), ("7_queue", "tcp"), ("cp", ""), ("socat", "")]
    for other in others:
        assert rows(output, f"{' '.join(other).strip()} +{RATE}")
    assert {*values} == {*((*other, "") for other in others), *(
        ("9_file", place, slots) for place in places for slots in "18")}


def test_file_incomplete(monkeypatch):
    """A copy that is too short is an error. It is removed, too."""
    monkeypatch.setattr(bench_file, "FILE_SIZE", 5000)
    with bench_file.new_file() as source:
        assert os.path.getsize(source) == 5000
        with pytest.raises(RuntimeError, match="only 5 bytes"):
            with bench_file.target_of(source) as target:
                with open(target, "wb") as file:
                    file.write(b"short")
        assert not os.path.exists(target)
    assert not os.path.exists(os.path.dirname(source))


def test_file_too_large(monkeypatch):
    monkeypatch.setattr(bench_file, "FILE_SIZE", 1 << 60)
    with pytest.raises(SystemExit, match="/dev/shm has room for .* FILE_SIZE must be"):
        with bench_file.new_file():
            pass


def test_draw(tmp_path, monkeypatch):
    """Each chart is in the style of the other figures: a colour or a font of matplotlib's own
    would not follow the page."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "BUILD", str(tmp_path))
    monkeypatch.setattr(bench_file, "SLOTS", [1, 8])
    monkeypatch.setattr(bench_queue, "SIZES", [64, 65536])
    results = bench.Results()
    for program in ["7_queue", "bare loop", "memcpy", "9_file", "cp", "socat", "iperf3"]:
        for place in ["", "shm", "tcp", *map(bench_file.slow, ["shm", "tcp"])]:
            for number in ["", 1, 8, 64, 65536]:
                results.values[program, place, number] = [1e6, 2e6]
    bench_queue.draw(results, ["shm", "tcp"])
    bench_file.draw(results, ["shm", "tcp"])
    for name in "bench.svg", "bench-file.svg":
        assert xml.etree.ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")
        chart = (tmp_path / name).read_text()
        assert chart.count(bench.style.SHEET) == 1 and bench.style.styled(chart) == chart
        own = chart.replace(bench.style.SHEET, "")
        assert set(re.findall(r"#[0-9a-f]{6}", own)) <= set(bench.style.PALETTE.values())
        assert not re.search(r"(fill|stroke|font): ", own)


def read_what_is_there(file):
    output = b""
    os.set_blocking(file.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        while part := os.read(file.fileno(), 65536):
            output += part
    os.set_blocking(file.fileno(), True)
    return output


@pytest.mark.parametrize("level", ["any", "delivery"])
@pytest.mark.parametrize("provider", ["shm", "tcp"])
def test_loop_waits_for_the_data_to_be_in_place(provider, level):
    """No run ends while the target stands still, apart from one that was about to
    end. Each has less data than a socket's buffers hold."""
    with bench.background(*bench_queue.bench_loop(0, provider, "target", 64)) as target:
        where = bench.read_until(target, r"^target (\S+) (\S+) (\S+)").groups()
        with bench.background(*bench_queue.bench_loop(
                0, provider, "write", 64, "16", *where,
                *[f"{level},16,16"] * 10000)) as writer:
            bench.read_until(writer, "seconds")
            writer.send_signal(signal.SIGSTOP)
            target.send_signal(signal.SIGSTOP)
            time.sleep(0.1)
            read_what_is_there(writer.stdout)
            writer.send_signal(signal.SIGCONT)
            time.sleep(0.5)
            output = read_what_is_there(writer.stdout)
            target.send_signal(signal.SIGCONT)
            assert output.count(b"seconds") <= 1
            assert writer.poll() is None
            # It goes on.
            bench.read_until(writer, "seconds")


def test_link(monkeypatch, capsys):
    """Nothing is faster than the link, apart from the bucket's first content. The processes
    that keep the namespaces end, also after a failure."""
    monkeypatch.setattr(bench_queue, "LINK", "500mbit")
    monkeypatch.setattr(bench, "RUNS", 1)
    try:
        with bench.links(["500mbit"]) as (_, _, hosts):
            keepers = re.findall(r"--target=(\d+)", str(hosts))
            assert all(os.path.exists(f"/proc/{pid}") for pid in keepers)
            _ = 1 / 0
    except ZeroDivisionError:
        assert len(keepers) == 2
        assert not any(os.path.exists(f"/proc/{pid}") for pid in keepers)
    except (OSError, RuntimeError) as error:
        pytest.skip(f"no network namespaces: {error}")
    results = bench.Results()
    bench_queue.measure_link(results)
    assert re.search(f"7_queue +{RATE} +{RATE}", capsys.readouterr().out)
    for program in ["7_queue", "iperf3"]:
        rate = results.median(program, "link", bench_queue.LINK_SIZE)
        assert 0 < rate * bench_queue.LINK_SIZE * 8 < 1.1 * 500e6


def test_no_link(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    bench_queue.measure_link(bench.Results())
    assert re.search("^No link of 2gbit: .*unshare.*\n$", capsys.readouterr().out)


@pytest.mark.static
def test_patch():
    assert broken("scripts/bench/crowd_endpoints.patch") != read_source("13_crowd")


@pytest.mark.static
@pytest.mark.parametrize("name", bench_queue.CHANGES)
def test_change(name):
    """Each variant's text is in the source, once, and is changed."""
    assert bench_queue.changed_source(name) != read_source("7_queue")


def test_program_that_fails(tmp_path):
    """The benchmark repeats what the program said and ends."""
    (tmp_path / "bench_loop").write_text("#!/bin/sh\necho I cannot; exit 1\n")
    (tmp_path / "bench_loop").chmod(0o755)
    process = start(tmp_path, "queue")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "I cannot" in output


def children(pid, program):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            if re.match(rf"\d+ \({program}\) . {pid} ", file.read()):
                found.append(name)
    return found


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name,program", [("queue", "bench_loop"), ("file", "9_file")])
def test_interrupted(tmp_path, signum, name, program):
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
    assert not [name for name in os.listdir(bench_file.MEMORY)
                if name.startswith(f"bench-file.{process.pid}")]
    # libfabric now and then misses the signal, and has to be killed.
    for name in owned_shm_files(started):
        os.unlink("/dev/shm/" + name)


def test_medians():
    """A ratio is the median of those of pairs."""
    results = bench.Results()
    results.values = {("a",): [10, 30, 90], ("b",): [10, 40, 60]}
    assert results.ratio(("a",), ("b",)) == 1 and results.median("a") == 30
    assert results.ratio(("a",), ("c",)) is results.median("c") is None
