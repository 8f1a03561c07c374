"""The benchmarks: they measure. What they find is not tested."""

import contextlib
import csv
import os
import pty
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
from harness import owned_shm_files
from repository import ROOT, broken, make, read_source

# As little as can be measured.
LITTLE = {"RUNS": "1", "SIZES": "64K", "PROVIDERS": "shm tcp", "LINK": "",
          "SECONDS_PER_RUN": "0.01", "LONG": "2000",
          "FILE_SIZE": "5000000", "SLOTS": "8 1"}
BENCH = "scripts/bench/bench.sh"
PROGRAMS = [("7_queue", "shm"), ("7_queue", "tcp"), ("best loop", "shm"),
            ("best loop", "tcp"), ("our loop", "shm"), ("our loop", "tcp"),
            ("memcpy", ""), ("iperf3", "")]
SIZES = [1 << 16]
FILE_SLOTS = [1, 8]
FILE_PLACES = ["shm", "tcp", "shm, slow disk", "tcp, slow disk"]
FILE_LIMITS = [("7_queue", "shm"), ("7_queue", "tcp"), ("cp", ""), ("socat", ""),
               ("writing a file", "")]
RATE = r"[0-9]+\.[0-9]+"


def run_bench(build, *arguments, **env):
    process = subprocess.Popen(
        [BENCH, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **LITTLE, **env, "BUILD": build})
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert not bench_folders(process.pid)
    return output


def link_programs(folder):
    """Results are written beside the programs, but should not appear in build."""
    for program in ["7_queue", "8_malloc", "9_file", "10_lock", "11_rails", "13_crowd",
                    "bench_loop"]:
        (folder / program).symlink_to(f"{ROOT}/build/{program}")


def bench_folders(pid):
    """Those that a benchmark of 9_file has left: the process with this number."""
    return [name for name in os.listdir(bench_file.MEMORY)
            if name.startswith(f"bench-file.{pid}")]


def read_csv(path):
    with open(path) as file:
        return list(csv.DictReader(file))


@pytest.mark.thorough
def test_bench(tmp_path):
    """Without matplotlib there is no figure, but everything else."""
    link_programs(tmp_path)
    (tmp_path / "matplotlib.py").write_text("raise ImportError('hidden')\n")
    output = run_bench(str(tmp_path), PYTHONPATH=str(tmp_path))
    for provider in ["shm", "tcp"]:
        row = f"^{provider} +64 KiB( +{RATE}){{6}}$"
        assert re.search(row, output, re.M), output
        assert re.search(f"^{provider}( +{RATE}){{2}}$", output, re.M), output
    targets = output[output.index("Targets:"):].splitlines()[1:]
    targets = targets[:targets.index("")]
    assert len(targets) == 11
    # Neither pages of 1 MiB nor a link.
    assert [line for line in targets if "not measured" in line] == targets[3:5]
    assert re.search(r"^Not drawn: .*bench\.svg \(hidden\)$", output, re.M), output

    rows = read_csv(tmp_path / "bench.csv")
    expected = {(program, provider, str(size), run)
                for program, provider in PROGRAMS
                for size in SIZES for run in ["1", ""]}
    expected |= {(program, provider, "64", run)
                 for program in ["8_malloc", "READ loop"]
                 for provider in ["shm", "tcp"] for run in ["1", ""]}
    keys = [(r["program"], r["provider"], r["page_size"], r["run"])
            for r in rows]
    assert len(keys) == len(expected) and set(keys) == expected
    for row in rows:
        assert float(row["writes_per_second"]) > 0
        assert float(row["gbps"]) == pytest.approx(
            float(row["writes_per_second"]) * int(row["page_size"]) * 8e-9,
            rel=0.01, abs=1e-4)
        if row["program"] == "best loop":
            assert row["settings"] in bench.SETTINGS
        elif row["program"] == "our loop":
            assert row["settings"] == bench.our_settings(row["provider"])
        else:
            assert row["settings"] == ""


@pytest.mark.thorough
def test_lock(tmp_path):
    link_programs(tmp_path)
    output = run_bench(str(tmp_path), "--lock", COUNT="20")
    rows = read_csv(tmp_path / "bench-lock.csv")
    for provider in ["shm", "tcp"]:
        table = output.split(f"\n{provider}, changes a second")[1].split("\n\n")[0]
        assert len(re.findall(r"(?m)^\D+( +\d+){3}$", table)) == len(bench_lock.KINDS)
        for kind in bench_lock.KINDS:
            for clients in bench_lock.CLIENTS:
                assert [float(row["changes_per_second"]) > 0 for row in rows
                        if (row["provider"], row["clients"], row["kind"]) ==
                        (provider, str(clients), kind)] == [True]


def test_rails(tmp_path):
    link_programs(tmp_path)
    output = run_bench(str(tmp_path), "--rails", SETS="200 300,150", SECONDS="0.3")
    rows = read_csv(tmp_path / "bench-rails.csv")
    assert sorted({(row["program"], row["links"]) for row in rows}) == sorted(
        (program, links) for program in ["11_rails", "dealt out", "iperf3"]
        for links in ["200", "300, 150"])
    assert all(float(row["gbps"]) > 0 for row in rows)
    for links in ["200", "300, 150"]:
        assert re.search(rf"(?m)^{links}( +[0-9.]+){{5}}$", output)
        assert re.search(rf"(?m)^{links}: / iperf3 +>= 0.9[57] +[0-9.]+$", output)


@pytest.mark.thorough
def test_crowd(tmp_path):
    """Without redis. The patch fits, and its server has an endpoint for each client."""
    link_programs(tmp_path)
    output = run_bench(str(tmp_path), "--crowd", CLIENTS="1 3", COUNT="30", REDIS="",
                       CXXFLAGS="-O0")
    assert "Without redis.\n" in output
    rows = read_csv(tmp_path / "bench-crowd.csv")
    assert sorted((row["program"], row["provider"], row["clients"]) for row in rows) == [
        (program, provider, clients) for program in sorted(bench_crowd.PROGRAMS)
        for provider in ["shm", "tcp"] for clients in ["1", "3"]]
    for row in rows:
        assert all(float(row[field]) > 0 for field in bench_crowd.Measured._fields
                   if field != "cpu_us"), row  # it is counted in ticks of 10 ms
        assert len(re.findall(rf"(?m)^ +{row['clients']}  {row['provider']} +"
                              rf"{row['program']}( +[0-9.]+){{7}}$", output)) == 1
    for provider in ["shm", "tcp"]:
        assert re.search(rf"(?m)^{provider}, 3 clients: requests/s / redis +>= 0.90 +"
                         r"not measured$", output)
        assert re.search(rf"(?m)^{provider}, 3 clients: 99 % / an endpoint each +"
                         rf"<= 1.00 +{RATE}$", output)

    def memory(program, clients):
        return min(float(row["memory_mb"]) for row in rows if row["provider"] == "tcp" and
                   (row["program"], row["clients"]) == (program, clients))
    grown = {program: memory(program, "3") - memory(program, "1")
             for program in bench_crowd.PROGRAMS}
    assert grown["an endpoint each"] > grown["one endpoint"] + 0.1


@pytest.mark.thorough
@pytest.mark.skipif(not all(map(shutil.which, ["mpirun", "mpicxx"])),
                    reason="Open MPI is not installed")
def test_ring():
    """Beside Open MPI, with a ratio."""
    output = make("bench-ring", RUNS="1", SIZES="10000 100000", CXXFLAGS="-O0")
    for size in "0.0381", "0.381":
        assert re.search(rf"(?m)^tcp, {size}\d* MiB: 15_ring {RATE} .*, Open MPI {RATE} .*; "
                         rf"Open MPI / 15_ring {RATE}$", output), output


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
    measured = bench_crowd.measure_redis(7)
    assert measured[:3] == pytest.approx((150, 150, 700))
    assert measured.memory_mb > 0


def test_file(tmp_path):
    link_programs(tmp_path)
    (tmp_path / "matplotlib.py").write_text("raise ImportError('hidden')\n")
    output = run_bench(str(tmp_path), "--file", PYTHONPATH=str(tmp_path))
    for program, place in FILE_LIMITS:
        line = f"{program} {place}".strip()
        assert re.search(f"^{line} +{RATE}$", output, re.M), output
    rows = []
    for place in FILE_PLACES:
        # The slow disk is compared with nothing but itself.
        ratios = rf" +{RATE}( +-){{4}}" if "disk" in place else rf"( +{RATE}){{5}}"
        rows += [f"^{place} +{slots} +{RATE}{ratios}$" for slots in FILE_SLOTS]
    for row in rows:
        assert len(re.findall(row, output, re.M)) == 1, (row, output)
    targets = output[output.index("Targets:"):].splitlines()[1:]
    targets = targets[:targets.index("")]
    assert len(targets) == 7
    assert [line for line in targets if "not measured" in line] == targets[6:]
    assert re.search(r"^Not drawn: .*bench-file\.svg \(hidden\)$", output, re.M)

    expected = {("9_file", place, str(slots), run) for place in FILE_PLACES
                for slots in FILE_SLOTS for run in ["1", ""]}
    expected |= {(*limit, "", run) for limit in FILE_LIMITS for run in ["1", ""]}
    rows = read_csv(tmp_path / "bench-file.csv")
    keys = [(r["program"], r["place"], r["slots"], r["run"]) for r in rows]
    assert len(keys) == len(expected) and set(keys) == expected
    assert all(float(row["gbps"]) > 0 for row in rows)


def test_file_draw(tmp_path, monkeypatch):
    """Also without tcp."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench_file, "SLOTS", FILE_SLOTS)
    results = bench_file.Results()
    for place in FILE_PLACES:
        for slots in FILE_SLOTS:
            results.add("9_file", place, slots, 10)
    for program, place in FILE_LIMITS:
        results.add(program, place, "", 20)
    for providers in [["shm", "tcp"], ["shm"]]:
        bench_file.draw(results, providers, tmp_path / "bench.svg")
        root = xml.etree.ElementTree.parse(tmp_path / "bench.svg").getroot()
        assert root.tag.endswith("svg")


@pytest.mark.usefixtures("small_file")
def test_file_incomplete():
    """A copy that is too short is an error. It is removed, too."""
    with bench_file.two_files() as (whole, quarter):
        assert os.path.getsize(whole) == 5000 and os.path.getsize(quarter) == 1250
        with pytest.raises(RuntimeError, match="only 1250 bytes"):
            with bench_file.target_of(whole) as target:
                os.link(quarter, target)
        assert not os.path.exists(target)
        folder = os.path.dirname(whole)
    assert not os.path.exists(folder)


def test_file_too_large(monkeypatch):
    monkeypatch.setattr(bench_file, "FILE_SIZE", 1 << 60)
    with pytest.raises(SystemExit, match="/dev/shm has room for .* FILE_SIZE must be"):
        with bench_file.two_files():
            pass


def test_draw(tmp_path):
    pytest.importorskip("matplotlib")
    results = bench.Results()
    for program, provider in PROGRAMS:
        for size in SIZES:
            for rate in 1e6, 2e6:
                results.add(program, provider, size, rate)
    bench.draw(results, ["shm", "tcp"], SIZES, tmp_path / "bench.svg")
    root = xml.etree.ElementTree.parse(tmp_path / "bench.svg").getroot()
    assert root.tag.endswith("svg")
    # A colour or a font of matplotlib's own would not follow the page.
    chart = (tmp_path / "bench.svg").read_text()
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
    with bench.background(*bench.bench_loop(0, provider, "target", 64)) as target:
        where = bench.read_until(target, r"^target (\S+) (\S+) (\S+)").groups()
        with bench.background(*bench.bench_loop(
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


@pytest.fixture
def slow_link(monkeypatch):
    """A link that 7_queue can fill on a busy machine, or a skipped test."""
    monkeypatch.setattr(bench, "LINK", "500mbit")
    monkeypatch.setattr(bench, "LINK_SECONDS", 1)
    monkeypatch.setattr(bench, "RUNS", 1)
    try:
        with bench.link():
            pass
    except (OSError, RuntimeError) as error:
        pytest.skip(f"no network namespaces: {error}")


@pytest.mark.usefixtures("slow_link")
def test_link(capsys):
    """Nothing is faster than the link, apart from the bucket's first content."""
    results = bench.Results()
    bench.measure_link(results)
    assert re.search(f"7_queue +{RATE} Gbps, {RATE}", capsys.readouterr().out)
    for program in ["7_queue", "iperf3"]:
        rate = results.median(program, "link", bench.LINK_SIZE)
        assert 0 < rate * bench.LINK_SIZE * 8 < 1.1 * 500e6


@pytest.fixture
def small_file(monkeypatch):
    monkeypatch.setattr(bench_file, "FILE_SIZE", 5000)


@pytest.mark.usefixtures("slow_link", "small_file")
def test_file_link():
    results = bench_file.Results()
    with bench_file.two_files() as (_, quarter):
        bench_file.measure_link(results, quarter)
    assert {key: len(rates) for key, rates in results.rates.items()} == {
        ("9_file", "link", 1): 1, ("9_file", "link", 8): 1,
        ("7_queue", "link", ""): 1, ("socat", "link", ""): 1}


@pytest.mark.usefixtures("slow_link")
def test_link_is_removed():
    """The processes that keep the namespaces end, also after a failure."""
    with pytest.raises(ZeroDivisionError):
        with bench.link() as (_, _, hosts):
            keepers = re.findall(r"--target=(\d+)", str(hosts))
            assert all(os.path.exists(f"/proc/{pid}") for pid in keepers)
            _ = 1 / 0
    assert len(keepers) == 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in keepers)


@pytest.mark.parametrize("measure", [
    bench.measure_link, lambda results: bench_file.measure_link(results, "")])
def test_no_link(monkeypatch, tmp_path, capsys, measure):
    monkeypatch.setattr(bench, "LINK", "2gbit")
    monkeypatch.setenv("PATH", str(tmp_path))
    measure(bench.Results())
    assert re.search("^No link of 2gbit: .*unshare.*\n$", capsys.readouterr().out)


@pytest.mark.thorough
def test_variants(tmp_path):
    """A variant is built, differs, and is measured beside the unchanged program.
    MAKEFLAGS is in the environment when make runs the benchmark."""
    name = "outstanding-1"
    link_programs(tmp_path)
    output = run_bench(str(tmp_path), "--variants", name, SIZES="64 4K",
                       PROVIDERS="shm", CXXFLAGS="-O0", MAKEFLAGS="n")
    assert re.search(f"^{name} .*( +{RATE}){{2}}$", output, re.M), output
    built = tmp_path / "bench" / name / "7_queue"
    assert built.read_bytes() != (tmp_path / "7_queue").read_bytes()
    keys = {(r["program"], r["provider"])
            for r in read_csv(tmp_path / "bench-variants.csv")}
    assert keys == {("unchanged", "shm"), (name, "shm")}


@pytest.mark.static
def test_patch():
    assert broken("scripts/bench/crowd_endpoints.patch") != read_source("13_crowd")


@pytest.mark.static
@pytest.mark.parametrize("name", [change[0] for change in bench.CHANGES])
def test_change(name):
    """Each variant's text is in the source, once, and is changed."""
    assert bench.changed_source(name) != read_source("7_queue")


def test_change_that_is_not_there(monkeypatch):
    monkeypatch.setattr(bench, "CHANGES", [("none", "", "no such text", "")])
    with pytest.raises(RuntimeError, match="variant none: .*no such text"):
        bench.changed_source("none")


def test_program_that_fails(tmp_path):
    """The benchmark repeats what the program said and ends."""
    link_programs(tmp_path)
    (tmp_path / "bench_loop").unlink()
    (tmp_path / "bench_loop").write_text("#!/bin/sh\necho I cannot; exit 1\n")
    (tmp_path / "bench_loop").chmod(0o755)
    done = subprocess.run([BENCH], cwd=ROOT, check=False,
                          env={**os.environ, **LITTLE, "BUILD": str(tmp_path)},
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "I cannot" in done.stderr


def children(pid, program):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            if re.match(rf"\d+ \({program}\) . {pid} ", file.read()):
                found.append(name)
    return found


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("arguments,program", [([], "bench_loop"),
                                               (["--file"], "9_file")])
def test_interrupted(tmp_path, signum, arguments, program):
    """The programs that it has started end with it, and its files are gone."""
    link_programs(tmp_path)
    process = subprocess.Popen(
        [BENCH, *arguments], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **LITTLE, "SECONDS_PER_RUN": "10", "RUNS": "100",
             "FILE_SIZE": "100M", "BUILD": str(tmp_path)})
    end = time.monotonic() + 60
    while len(started := children(process.pid, program)) < 2:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    # One run may have been over by then.
    assert process.returncode == 1 and re.fullmatch(rb"(\[.*\n)*interrupted\n", output), output
    assert not any(os.path.exists(f"/proc/{pid}") for pid in started)
    assert not bench_folders(process.pid)
    # libfabric now and then misses the signal, and has to be killed.
    for name in owned_shm_files(started):
        os.unlink("/dev/shm/" + name)


def test_progress_on_a_terminal(monkeypatch):
    """One line, rewritten."""
    terminal, ours = pty.openpty()
    with os.fdopen(ours, "w") as file:
        monkeypatch.setattr("sys.stdout", file)
        progress = bench.Progress(3)
        for number in range(3):
            progress.step(f"step {number}")
    output = b""
    while b"\n" not in output:  # the last step ends its line
        output += os.read(terminal, 65536)
    os.close(terminal)
    assert output.count(b"\r[") == 3 and output.count(b"\n") == 1
    assert b"[" + b"#" * 30 + b"] step 2" in output


def test_small_pages_are_not_compared_with_iperf3(capsys):
    results = bench.Results()
    for program, provider in PROGRAMS:
        for size in [4096, *SIZES]:
            results.add(program, provider, size, 1e6)
    bench.print_table(results, ["shm"], [4096, *SIZES])
    output = capsys.readouterr().out
    assert re.search("/ iperf3$", output, re.M), output
    for row in [rf"^shm +4 KiB( +{RATE}){{5}} +-$", rf"^shm +64 KiB( +{RATE}){{6}}$"]:
        assert re.search(row, output, re.M), output


def test_medians(tmp_path):
    """The table has the median of single runs, a ratio that of pairs."""
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
