"""Measures 7_queue, and beside it what this machine can do at its best: for each provider
and page size, in turn with it
  bare loop    around fi_writemsg (bench_loop.cpp), with the settings that are best here,
  memcpy       one copy of the same pages,
  iperf3       one stream on the interface of the tcp provider (it has no page size),
  ib_write_bw  perftest, which does the same by verbs alone (where the provider is verbs).
Before that, 7_queue and iperf3 in turn over a link of a known speed, between two network
namespaces, where the machine permits it.

With `variants`: 7_queue with one of CHANGES below, beside the unchanged program.

Variables:
  SIZES     page sizes ("64 256 1K 4K 16K 64K 256K 1M"; variants: "64 64K")
  LINK      the speed of the link, as tc takes it (2gbit); empty: no link
  SECONDS   of a run, roughly (0.25)
  VARIANTS  names of CHANGES (all)
"""

import contextlib
import os
import random
import re
import shutil
import statistics
import sys
import time

import bench
from bench import (BUILD, ROOT, TARGET, TIME_LIMIT, WRITER, background, free_port,
                   measure_queue, num_pages, print_table, read_until, run, show, to_text)

OF_VARIANTS = sys.argv[1:2] == ["variants"]
SIZES = sorted(map(bench.to_bytes, os.environ.get(
    "SIZES", "64 64K" if OF_VARIANTS else "64 256 1K 4K 16K 64K 256K 1M").split()))
LINK = os.environ.get("LINK", "2gbit")
LINK_SIZE = 65536  # the page size there, in bytes
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
              "if (Poll() == 0 && ++empty_polls % kPollsPerYield == 0) {\n",
              "if (Poll() == 0) {\n        std::this_thread::sleep_for(kIdlePause);\n"),
    "small-pages": ("buffers not on huge pages", "MADV_HUGEPAGE", "MADV_NOHUGEPAGE"),
    "untouched": ("the client's memory not touched beforehand",
                  "memset(data.get(), 0, rounded);", ""),
    "no-delivery": ("a WRITE is complete when it has left (tcp)",
                    "op_flags = FI_DELIVERY_COMPLETE;", "op_flags = 0;"),
    "outstanding-1": ("1 WRITE in flight at most",
                      "kMaxOutstandingWrites = 4096;", "kMaxOutstandingWrites = 1;"),
}


# ---- What is measured: all return WRITEs (or pages) a second ----

def bench_loop(core, provider, mode, size, *arguments):
    return (core, provider, f"{BUILD}/bench_loop", mode, str(size), str(num_pages(size)),
            *arguments)


def loop_rates(output, writes):
    return [writes / float(text) for text in re.findall("seconds (.*)", output)]


def measure_loop(provider, size, writes, *settings):
    """The bare loop, once for each of the settings; returns as many rates."""
    with background(*bench_loop(TARGET, provider, "target", size)) as target:
        where = read_until(target, r"^target (\S+) (\S+) (\S+)").groups()
        output = run(*bench_loop(WRITER, provider, "write", size, str(writes),
                                 *where, *settings))
        target.wait(TIME_LIMIT)
    return loop_rates(output, writes)


def best_settings(provider, size):
    """Runs all of them in turn: what slows the machine down for a while meets all."""
    order = sum((random.sample(SETTINGS, len(SETTINGS)) for _ in range(ROUNDS)), [])
    rates = {settings: [] for settings in SETTINGS}
    writes = max(1, round(guess(size) * SECONDS / 10))
    for settings, rate in zip(order, measure_loop(provider, size, writes, *order)):
        rates[settings].append(rate)
    return max(SETTINGS, key=lambda settings: statistics.median(rates[settings]))


def measure_memcpy(size, writes):
    return loop_rates(run(*bench_loop(WRITER, "", "copy", size, str(writes))), writes)[0]


def measure_write_bw(provider, size, writes):
    """perftest on the device that 7_queue uses, such as mlx5_0."""
    with background(bench.ANY_CORE, provider, f"{BUILD}/7_queue") as server:
        device = read_until(server, "^domain: ([^, ]+)")[1]
    # Line by line, as on a terminal.
    command = ["stdbuf", "-oL", "ib_write_bw", "--ib-dev", device, "--size", str(size),
               "--iters", str(max(5, writes)), "--port", free_port("127.0.0.1"), "--CPU-freq"]
    with background(TARGET, "", *command) as server:
        read_until(server, "Waiting for client")  # it prints this before it listens
        time.sleep(0.5)
        output = run(WRITER, "", *command, "127.0.0.1")
    return float(re.search(rf"^ {size} +\d+ .*", output, re.M)[0].split()[4]) * 1e6


def guess(size):
    return 1 / (2e-6 + size / 4e9)


def measure_link(results):
    """7_queue over tcp and iperf3, in turn."""
    with contextlib.ExitStack() as stack:
        try:
            [speed], [ip], hosts = stack.enter_context(bench.links([LINK]))
        except (OSError, RuntimeError) as error:
            print(f"No link of {LINK}: {str(error).strip().splitlines()[-1]}")
            return
        hosts = bench.over(0, hosts)
        seconds = max(1, round(8 * SECONDS))
        results.measure({
            ("7_queue", "link", LINK_SIZE): lambda: measure_queue(
                "tcp", LINK_SIZE, seconds * speed / 8 / LINK_SIZE, hosts=hosts),
            ("iperf3", "link", LINK_SIZE): lambda: bench.measure_iperf3(
                ip, seconds, hosts) / 8 / LINK_SIZE})
    rates = {program: results.median(program, "link", LINK_SIZE) * LINK_SIZE * 8
             for program in ["7_queue", "iperf3"]}
    print_table(f"A link of {LINK} (medians):", [
        ["", "Gbps", "of it"],
        *([program, show(rate * 1e-9, 3), show(rate / speed, 3)]
          for program, rate in rates.items())])


# ---- The benchmark ----

def measure_all(results, providers):
    """Returns the best settings of the bare loop."""
    best = {(p, size): best_settings(p, size) for p in providers for size in SIZES}
    ip = bench.tcp_ip()
    steps = {}

    def add(program, provider, size, measure):
        """The number of WRITEs takes SECONDS: as in the last run, or a guess."""
        key = (program, provider, size)
        steps[key] = lambda: measure(provider, size, max(1, round(
            SECONDS * results.values.get(key, [guess(size)])[-1])))

    for size in SIZES:
        add("memcpy", "", size, lambda _, size, writes: measure_memcpy(size, writes))
        for p in providers:
            add("7_queue", p, size, measure_queue)
            add("bare loop", p, size, lambda p, size, writes: measure_loop(
                p, size, writes, best[p, size])[0])
            if "verbs" in p and shutil.which("ib_write_bw"):
                add("ib_write_bw", p, size, measure_write_bw)
    # It sends blocks of 128 KiB, so it says nothing about smaller pages.
    steps["iperf3", "", 65536] = lambda: bench.measure_iperf3(ip) / 8 / 65536
    results.measure(steps)
    return best


def print_all(results, providers, best):
    # It decides the speed of tcp and iperf3: bbr paces what it sends.
    with open("/proc/sys/net/ipv4/tcp_congestion_control") as file:
        print(f"\nTCP congestion control: {file.read().strip()}")
    programs = [("memcpy", ""), *((program, p) for p in providers for program in
                                  ["7_queue", "bare loop", "ib_write_bw"])]
    programs = [key for key in programs if (*key, SIZES[0]) in results.values]
    print_table("Gbps (medians):", [
        ["page size", *(" ".join(key).strip() for key in programs)],
        *([to_text(size), *(show(results.median(*key, size) * size * 8e-9, 3)
                            for key in programs)] for size in SIZES)])
    print(f"iperf3: {results.median('iperf3', '', 65536) * 65536 * 8e-9:.3f}")
    print_table("7_queue / bare loop (medians of the rounds), and the best settings of that: "
                "completion level,\nWRITEs posted for each reading of the completion queue, "
                "entries read at a time:", [
                    ["page size", *(f"{p}{x}" for p in providers for x in ("", ", settings"))],
                    *([to_text(size), *sum(([show(beside(results, p, size)), best[p, size]]
                                            for p in providers), [])] for size in SIZES)])


def beside(results, provider, size):
    return results.ratio(("7_queue", provider, size), ("bare loop", provider, size))


def draw(results, providers):
    """The bandwidth over the page size, and below it 7_queue beside the bare loop: a fifth
    would be lost on a logarithmic axis."""
    def gbps(*key):
        return [results.median(*key, size) * size * 8e-9 for size in SIZES]

    faint = bench.style.PALETTE["faint"]
    large = [size for size in SIZES if size >= 65536] or SIZES[-1:]
    bench.draw(
        "bench", "page size", {size: to_text(size) for size in SIZES},
        ("bandwidth in Gbps", True, [
            ("memcpy", SIZES, gbps("memcpy", ""), {"color": faint, "linestyle": ":"}),
            ("iperf3, one stream", large,
             [results.median("iperf3", "", 65536) * 65536 * 8e-9] * len(large),
             {"color": faint, "linestyle": "-."}),
            *((f"7_queue, {p}", SIZES, gbps("7_queue", p), bench.look(number))
              for number, p in enumerate(providers))]),
        ("7_queue / bare loop", False, [
            (p, SIZES, [beside(results, p, size) for size in SIZES],
             {**bench.look(number), "linestyle": ":", "linewidth": 1})
            for number, p in enumerate(providers)] + [
                ("", SIZES, [1] * len(SIZES), {"color": faint})]))


# ---- Variants ----

def changed_source(name):
    """The source of 7_queue with one change."""
    source = bench.style.read(f"{ROOT}/src/7_queue.cpp")
    pairs = CHANGES[name][1:]
    for old, new in zip(pairs[::2], pairs[1::2]):
        if source.count(old) != 1:
            raise RuntimeError(f"variant {name}: src/7_queue.cpp has this {source.count(old)} "
                               f"times instead of once: {old}")
        source = source.replace(old, new)
    return source


def measure_variants(providers):
    names = os.environ.get("VARIANTS", "").split() or [*CHANGES]
    if not {*names} <= {*CHANGES}:
        sys.exit(f"the variants are: {' '.join(CHANGES)}")
    programs = {"unchanged": f"{BUILD}/7_queue", **{
        name: bench.build_variant(name, "7_queue", changed_source(name)) for name in names}}
    columns = [(p, size) for p in providers for size in SIZES]
    results = bench.Results("program", "provider", "page_size")
    results.measure({
        (name, p, size): lambda name=name, p=p, size=size: measure_queue(
            p, size, max(1, round(guess(size) * SECONDS)), programs[name])
        for name in programs for p, size in columns})
    print_table("The rate of 7_queue with one change, over that of the unchanged one (medians):", [
        ["", *(f"{p} {to_text(size)}" for p, size in columns)],
        ["unchanged, M WRITEs/s", *(show(results.median("unchanged", *column) * 1e-6, 4)
                                    for column in columns)],
        *([f"{name}: {CHANGES[name][0]}",
           *(show(results.ratio((name, *column), ("unchanged", *column)))
             for column in columns)] for name in names)])
    results.write("bench-variants")


def main():
    bench.exit_on_signals()
    providers = bench.providers_here()
    if OF_VARIANTS:
        measure_variants(providers)
        return
    results = bench.Results("program", "provider", "page_size")
    if LINK:
        measure_link(results)
    best = measure_all(results, providers)
    print_all(results, providers, best)
    results.write("bench")
    draw(results, providers)


if __name__ == "__main__":
    main()
