"""Measures 7_queue, and beside it, in turn, what this machine can do: for each provider
and page size
  bare loop    around fi_writemsg (bench_loop.cpp), with the settings that are best here,
  ib_write_bw  perftest, which does the same by verbs alone (where the provider is verbs);
and iperf3 with one stream, which has no page size.

With `variants`: 7_queue with one of CHANGES below, beside the unchanged program.

Variables:
  PROVIDERS  as FI_PROVIDER takes them (by default those of shm, tcp, efa and
             verbs;ofi_rxm that are here)
  SIZES      page sizes ("64 1K 64K 1M"; variants: "64 64K")
  SECONDS    of a run, roughly (0.25)
  VARIANTS   names of CHANGES (all)
"""

import json
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time

import bench
from bench import BUILD, ROOT, TARGET, WRITER, background, read_until, run, to_text

OF_VARIANTS = sys.argv[1:2] == ["variants"]
SIZES = sorted(map(bench.to_bytes, os.environ.get(
    "SIZES", "64 64K" if OF_VARIANTS else "64 1K 64K 1M").split()))
SECONDS = float(os.environ.get("SECONDS", 0.25))

# Settings of the bare loop, as bench_loop takes them: when a WRITE is complete,
# WRITEs posted for each reading of the completion queue, entries read at a time.
SETTINGS = [f"{level},{post},{read}" for level in ["any", "delivery"]
            for post, read in [(1, 1), (1, 16), (16, 16), (4096, 16), (4096, 256)]]
ROUNDS = 7  # of all settings; the best median wins

# One change each to what made 7_queue fast: what it means, and pairs of a text that
# src/7_queue.cpp has once and what replaces that.
CHANGES = {
    "sleep": ("a loop that finds nothing sleeps 1 ms, as in 6",
              "if (!busy) {", "if (true) {",
              "if (++empty_polls % kPollsPerYield == 0) std::this_thread::yield();",
              "if (++empty_polls > 0) std::this_thread::sleep_for(kIdlePause);"),
    "small-pages": ("buffers not on huge pages", "MADV_HUGEPAGE", "MADV_NOHUGEPAGE"),
    "untouched": ("the client's memory not touched beforehand",
                  "memset(data, 0, rounded);", ""),
    "no-delivery": ("a WRITE is complete when it has left (tcp)",
                    "op_flags = FI_DELIVERY_COMPLETE;", "op_flags = 0;"),
    "outstanding-1": ("1 WRITE in flight at most",
                      "kMaxOutstandingWrites = 4096;", "kMaxOutstandingWrites = 1;"),
}


def providers_here():
    """Those for which libfabric, the one that the programs are linked with, finds an
    interface."""
    home = os.environ.get("LIBFABRIC_HOME") or "/opt/amazon/efa"
    fi_info = shutil.which(f"{home}/bin/fi_info") or "fi_info"
    return os.environ.get("PROVIDERS", "").split() or [
        provider for provider in ["shm", "tcp", "efa", "verbs;ofi_rxm"]
        if subprocess.run([fi_info, "-t", "FI_EP_RDM"], env=bench.environment(provider),
                          check=False, capture_output=True).returncode == 0]


# ---- What is measured: all return Gbps ----

def num_pages(size):
    """No more than 7_queue serves a client with."""
    return max(1, min(2000, (64 << 20) // size))


def guess(size):
    """How many WRITEs take SECONDS."""
    return max(1, round(SECONDS / (2e-6 + size / 4e9)))


def measure_queue(provider, size, writes, program=f"{BUILD}/7_queue"):
    pages = min(num_pages(size), writes)
    with background(WRITER, provider, program) as server:
        read_until(server, "^Run the client")
        address = read_until(server, r" ([0-9a-f]+)\n")[1]
        run(TARGET, provider, program, address, str(size), str(pages),
            str(max(1, round(writes / pages))))
        gbps, mpps = map(float, read_until(
            server, r"WRITE: 100%.* bw=([0-9.]+)Gbps.* ([0-9.]+)Mpps").groups())
    # Both have three decimals, so the larger one is more exact.
    return max((mpps, mpps * size * 8e-3), (gbps, gbps))[1]


def bench_loop(core, provider, mode, size, *arguments):
    return (core, provider, f"{BUILD}/bench_loop", mode, str(size), str(num_pages(size)),
            *arguments)


def measure_loop(provider, size, writes, *settings):
    """The bare loop, once for each of the settings; returns as many figures."""
    with background(*bench_loop(TARGET, provider, "target", size)) as target:
        where = read_until(target, r"^target (\S+) (\S+) (\S+)").groups()
        output = run(*bench_loop(WRITER, provider, "write", size, str(writes),
                                 *where, *settings))
        target.wait()
    return [writes * size * 8e-9 / float(text) for text in re.findall("seconds (.*)", output)]


def best_settings(provider, size):
    """Runs all of them in turn: what slows the machine down for a while meets all."""
    order = sum((random.sample(SETTINGS, len(SETTINGS)) for _ in range(ROUNDS)), [])
    found = {settings: [] for settings in SETTINGS}
    writes = max(1, guess(size) // 10)
    for settings, gbps in zip(order, measure_loop(provider, size, writes, *order)):
        found[settings].append(gbps)
    return max(SETTINGS, key=lambda settings: statistics.median(found[settings]))


def free_port():
    with socket.socket() as free:
        free.bind(("", 0))
        return str(free.getsockname()[1])


def measure_write_bw(provider, size, writes):
    """perftest on the device that 7_queue uses, such as mlx5_0."""
    with background(TARGET, provider, f"{BUILD}/7_queue") as server:
        device = read_until(server, "^domain: ([^, ]+)")[1]
    # Line by line, as on a terminal.
    command = ["stdbuf", "-oL", "ib_write_bw", "--ib-dev", device, "--size", str(size),
               "--iters", str(max(5, writes)), "--port", free_port(), "--CPU-freq"]
    with background(TARGET, "", *command) as server:
        read_until(server, "Waiting for client")  # it prints this before it listens
        time.sleep(0.5)
        output = run(WRITER, "", *command, "127.0.0.1")
    mpps = float(re.search(rf"^ {size} +\d+ .*", output, re.M)[0].split()[4])
    return mpps * size * 8e-3


def measure_iperf3():
    port = free_port()
    with background(TARGET, "", "iperf3", "--server", "--one-off", "--bind", "127.0.0.1",
                    "--port", port, "--forceflush") as server:
        read_until(server, "^Server listening")
        output = run(WRITER, "", "iperf3", "--client", "127.0.0.1", "--port", port, "--time", "1",
                     "--json")
    return json.loads(output)["end"]["sum_received"]["bits_per_second"] * 1e-9


# ---- The benchmark ----

def measure_all(providers):
    results, steps = bench.Results(), {("iperf3",): measure_iperf3}

    def add(program, provider, size, measure):
        """The number of WRITEs takes SECONDS: as in the last run, or a guess."""
        key = (program, provider, size)
        steps[key] = lambda: measure(provider, size, max(1, round(
            SECONDS * results[key][-1] / size / 8e-9)) if key in results else guess(size))

    for p in providers:
        for size in SIZES:
            best = best_settings(p, size)
            add("7_queue", p, size, measure_queue)
            add("bare loop", p, size, lambda p, size, writes, best=best: measure_loop(
                p, size, writes, best)[0])
            if "verbs" in p and shutil.which("ib_write_bw"):
                add("ib_write_bw", p, size, measure_write_bw)
    results.measure(steps)
    # It decides the speed of tcp and iperf3: bbr paces what it sends.
    with open("/proc/sys/net/ipv4/tcp_congestion_control") as file:
        print(f"\nTCP congestion control: {file.read().strip()}")
    rows = [["page size"], *([to_text(size)] for size in SIZES)]
    for p in providers:
        rows[0].append(f"{p}, Gbps")
        for row, size in zip(rows[1:], SIZES):
            row.append(f"{statistics.median(results['7_queue', p, size]):.2f}")
        for other in "bare loop", "ib_write_bw":
            if (other, p, SIZES[0]) in results:
                rows[0].append(f"/ {other}")
                for row, size in zip(rows[1:], SIZES):
                    row.append(f"{results.ratio(('7_queue', p, size), (other, p, size)):.2f}")
    bench.print_table(rows)
    print(f"iperf3: {statistics.median(results[('iperf3',)]):.2f} Gbps")


# ---- Variants ----

def changed_source(name):
    """The source of 7_queue with one change."""
    with open(f"{ROOT}/src/7_queue.cpp") as file:
        source = file.read()
    pairs = CHANGES[name][1:]
    for old, new in zip(pairs[::2], pairs[1::2]):
        if source.count(old) != 1:
            raise RuntimeError(f"variant {name}: src/7_queue.cpp has this {source.count(old)} "
                               f"times instead of once: {old}")
        source = source.replace(old, new)
    return source


def build_variant(name):
    """Builds it as the others are, in a folder with a src of its own. Returns its path."""
    folder = os.path.join(BUILD, "bench", name)
    os.makedirs(f"{folder}/src", exist_ok=True)
    with open(f"{folder}/src/7_queue.cpp", "w") as file:
        file.write(changed_source(name))
    subprocess.run(["make", "-s", "-C", folder, "-f", f"{ROOT}/Makefile",
                    f"BUILD={folder}", f"{folder}/7_queue"], check=True)
    return f"{folder}/7_queue"


def measure_variants(providers):
    names = os.environ.get("VARIANTS", "").split() or [*CHANGES]
    if not {*names} <= {*CHANGES}:
        sys.exit(f"the variants are: {' '.join(CHANGES)}")
    programs = {"unchanged": f"{BUILD}/7_queue",
                **{name: build_variant(name) for name in names}}
    columns = [(p, size) for p in providers for size in SIZES]
    results = bench.Results()
    results.measure({
        (name, p, size): lambda name=name, p=p, size=size: measure_queue(
            p, size, guess(size), programs[name])
        for name in programs for p, size in columns})
    bench.print_table([
        ["with one change, over unchanged", *(f"{p} {to_text(size)}" for p, size in columns)],
        *([f"{name}: {CHANGES[name][0]}",
           *(f"{results.ratio((name, *column), ('unchanged', *column)):.2f}"
             for column in columns)] for name in names),
        ["unchanged, Gbps", *(f"{statistics.median(results['unchanged', *column]):.2f}"
                              for column in columns)]])


if __name__ == "__main__":
    bench.exit_on_signals()
    (measure_variants if OF_VARIANTS else measure_all)(providers_here())
