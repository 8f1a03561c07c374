"""Measures 9_file, and beside it what this machine can do with a file.

Usage: scripts/bench/bench.sh --file   (make bench-file)

From memory to memory, because the files are on a tmpfs, all in turn:
  9_file     for each provider and number of slots,
  7_queue    for each provider, with pages as large as the chunks of 9_file:
             the same WRITEs, but nothing reads or writes a file,
  cp         a copy of the same file,
  socat      the same file through a TCP socket, on the interface of the tcp
             provider,
  writing a file  dd from /dev/zero; no receiver is faster than that.
In turn with those, 9_file with a disk that takes the receiver 2 ms longer for
each chunk. Slots hide this delay: while the disk saves some, others are filled.
Before that, 9_file, 7_queue and socat in turn over a link of a known speed, with a
quarter of the file, where the machine permits it.

Every program may use all cores, as they do outside a benchmark: the threads of
9_file that read and write the file would not fit on the cores of its pollers.

Targets, with 8 slots:
  bandwidth / 7_queue      >= 0.8, memory to memory and over the link
  bandwidth / with 1 slot  >= 2, memory to memory and with the slow disk

Variables:
  RUNS       the number of runs of each (3); the median counts
  FILE_SIZE  of the file (1G); /dev/shm must have room for two and a half of it
  SLOTS      numbers of slots ("1 2 4 8 16")
  PROVIDERS, LINK, BUILD  as in bench.py
"""

import contextlib
import os
import random
import re
import shutil
import sys
import tempfile
import time

import bench
from bench import ANY_CORE, BUILD, background, run, show

FILE_SIZE = bench.to_bytes(os.environ.get("FILE_SIZE", "1G"))
SLOTS = sorted(int(n) for n in os.environ.get("SLOTS", "1 2 4 8 16").split())
MEMORY = "/dev/shm"
CHUNK_SIZE = 1 << 20     # of 9_file
DEFAULT_SLOTS = 8        # of 9_file
LINK_SLOTS = [1, DEFAULT_SLOTS]
SLOW_DISK_MS = 2
SLOW_DISK = ["env", f"SLOW_DISK_MS={SLOW_DISK_MS}"]
SOCAT_BLOCK = 1 << 20    # bytes; of 8K to 4M the fastest


# ---- Files ----

@contextlib.contextmanager
def two_files():
    """Makes a file of FILE_SIZE and another one of a quarter of that. Yields their
    paths."""
    room = shutil.disk_usage(MEMORY).free
    if room < 2.5 * FILE_SIZE:
        sys.exit(f"{MEMORY} has room for {room >> 20} MiB. FILE_SIZE must be "
                 f"{int(room / 2.5) >> 20}M at most.")
    # The number of our process tells a test which folder is ours.
    with tempfile.TemporaryDirectory(prefix=f"bench-file.{os.getpid()}.",
                                     dir=MEMORY) as folder:
        os.mkdir(os.path.join(folder, "target"))
        block = os.urandom(1 << 20)
        paths = []
        for name, size in [("whole", FILE_SIZE), ("quarter", FILE_SIZE // 4)]:
            paths.append(os.path.join(folder, name))
            with open(paths[-1], "wb") as file:
                for start in range(0, size, len(block)):
                    file.write(block[:size - start])
        yield paths


@contextlib.contextmanager
def target_of(source):
    """Yields where to put the copy of a file. Checks that all of it has been put
    there, and removes it."""
    folder, name = os.path.split(source)
    target = os.path.join(folder, "target", name)
    try:
        yield target
        size = os.path.getsize(target)
        if size != os.path.getsize(source):
            raise RuntimeError(f"{target} has only {size} bytes")
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(target)


# ---- What is measured: all return Gbps ----

def gbps(source, started_at):
    seconds = time.monotonic() - started_at
    return os.path.getsize(source) * 8e-9 / seconds


def measure_file(provider, source, slots, hosts=((), ())):
    """9_file, by its client's clock: from its first message until the file is
    saved."""
    program = os.path.join(BUILD, "9_file")
    with target_of(source) as target:
        with background(ANY_CORE, provider, *hosts[1], program,
                        os.path.dirname(target)) as server:
            output = run(ANY_CORE, provider, *hosts[0], program,
                         bench.server_address(server), source, str(slots))
    return float(re.search(r"^Sent .* ([0-9.]+) Gbps", output, re.M)[1])


def measure_queue(provider, source, hosts=((), ())):
    """7_queue, with as many bytes."""
    writes = max(1, os.path.getsize(source) // CHUNK_SIZE)
    pages = min(bench.num_pages(CHUNK_SIZE), writes)
    rate, _ = bench.measure_queue(provider, CHUNK_SIZE, writes, pages,
                                  hosts=hosts, cores=(ANY_CORE, ANY_CORE))
    return rate * CHUNK_SIZE * 8e-9


def measure_cp(source):
    with target_of(source) as target:
        started_at = time.monotonic()
        run(ANY_CORE, "", "cp", source, target)
        return gbps(source, started_at)


def measure_writing(source):
    with target_of(source) as target:
        started_at = time.monotonic()
        run(ANY_CORE, "", "dd", "if=/dev/zero", f"of={target}", "bs=1M",
            "iflag=count_bytes", f"count={os.path.getsize(source)}")
        return gbps(source, started_at)


def measure_socat(ip, source, hosts=((), ())):
    """From the start of the sender until the receiver has ended."""
    port = bench.free_port(ip)
    tcp, host = ("TCP6", f"[{ip}]") if ":" in ip else ("TCP4", ip)
    # With -d -d it says when it listens.
    socat = ["socat", "-d", "-d", "-u", "-b", str(SOCAT_BLOCK)]
    with target_of(source) as target:
        with background(ANY_CORE, "", *hosts[1], *socat,
                        f"{tcp}-LISTEN:{port},bind={host}",
                        f"OPEN:{target},creat,wronly") as receiver:
            bench.read_until(receiver, "listening on")
            started_at = time.monotonic()
            run(ANY_CORE, "", *hosts[0], *socat, f"OPEN:{source},rdonly",
                f"{tcp}:{host}:{port}")
            receiver.wait(bench.TIME_LIMIT)
            return gbps(source, started_at)


# ---- The benchmark ----

class Results(bench.Results):
    """In Gbps, by program, place and number of slots. A place is a provider, "link",
    a provider with the slow disk, or "" for a program that needs no provider."""

    HEADER = ["program", "place", "slots", "run", "gbps"]

    def row(self, key, number, rate):
        return [*key, number, f"{rate:.4f}"]


def slow(provider):
    return f"{provider}, slow disk"


def measure_in_turn(results, steps):
    """Runs each step RUNS times, in another order in each round."""
    progress = bench.Progress(bench.RUNS * len(steps))
    for _ in range(bench.RUNS):
        for key in random.sample(list(steps), len(steps)):
            results.add(*key, steps[key]())
            progress.step(" ".join(str(part) for part in key if part))


def measure_link(results, source):
    with contextlib.ExitStack() as stack:
        try:
            _, ip, hosts = stack.enter_context(bench.link())
        except (OSError, RuntimeError) as error:
            print(f"No link of {bench.LINK}: {str(error).strip().splitlines()[-1]}")
            return
        measure_in_turn(results, {
            **{("9_file", "link", n):
               lambda n=n: measure_file("tcp", source, n, hosts)
               for n in LINK_SLOTS},
            ("7_queue", "link", ""): lambda: measure_queue("tcp", source, hosts),
            ("socat", "link", ""): lambda: measure_socat(ip, source, hosts),
        })


def measure_memory(results, providers, source):
    """From memory to memory, with and without the slow disk."""
    ip = bench.tcp_ip()
    steps = {("cp", "", ""): lambda: measure_cp(source),
             ("writing a file", "", ""): lambda: measure_writing(source),
             ("socat", "", ""): lambda: measure_socat(ip, source)}
    for p in providers:
        steps["7_queue", p, ""] = lambda p=p: measure_queue(p, source)
        for n in SLOTS:
            steps["9_file", p, n] = lambda p=p, n=n: measure_file(p, source, n)
            steps["9_file", slow(p), n] = lambda p=p, n=n: measure_file(
                p, source, n, ((), SLOW_DISK))
    measure_in_turn(results, steps)


# ---- What it prints and draws ----

def limits_of(place, providers):
    """What 9_file is compared with in the table; some of it is not measured."""
    where = "" if place in providers else place
    return {"/ 1 slot": ("9_file", place, 1), "/ 7_queue": ("7_queue", place, ""),
            "/ cp": ("cp", where, ""), "/ socat": ("socat", where, ""),
            "/ writing": ("writing a file", where, "")}


def print_table(results, providers):
    print(f"\n9_file, and its ratio to others (medians; {FILE_SIZE * 1e-6:.3f} MB, "
          f"over the link a\nquarter; the slow disk takes {SLOW_DISK_MS} ms longer "
          "for each chunk):")
    print(f"{'place':<25} {'slots':>5} {'Gbps':>8} " +
          " ".join(f"{name:>9}" for name in limits_of("", [])))
    keys = [("9_file", place, slots)
            for place in [*providers, *map(slow, providers), "link"]
            for slots in (LINK_SLOTS if place == "link" else SLOTS)]
    for key in filter(results.rates.get, keys):
        _, place, slots = key
        ratios = [results.ratio(key, limit)
                  for limit in limits_of(place, providers).values()]
        print(f"{place:<25} {slots:>5} {results.median(*key):>8.3f} " +
              " ".join(f"{show(ratio):>9}" for ratio in ratios))


def print_limits(results):
    print("\nThe others, in Gbps:")
    for program, place, slots in sorted(results.rates, key=str):
        if program != "9_file":
            print(f"{f'{program} {place}'.strip():<31} "
                  f"{results.median(program, place, slots):>8.3f}")


def print_targets(results, providers):
    rows = []

    def row(where, place, name, target):
        ratio = results.ratio(("9_file", place, DEFAULT_SLOTS),
                              limits_of(place, providers)[name])
        rows.append((f"{where}: {DEFAULT_SLOTS} slots {name}", ">=", target, ratio))

    for p in providers:
        row(f"{p}, memory to memory", p, "/ 7_queue", 0.8)
        row(f"{p}, memory to memory", p, "/ 1 slot", 2.0)
        row(f"{p}, disk of {SLOW_DISK_MS} ms", slow(p), "/ 1 slot", 2.0)
    row(f"tcp, link of {bench.LINK or 'known speed'}", "link", "/ 7_queue", 0.8)
    bench.print_reached(rows)


def draw(results, providers, path):
    """Draws the bandwidth over the number of slots, in lines that differ without
    colours."""
    figure, axes = bench.empty_chart()
    colours = bench.style.PALETTE

    def line(label, place, **look):
        rates = [results.median("9_file", place, slots) for slots in SLOTS]
        axes.plot(SLOTS, rates, label=label, linewidth=2, **look)

    for number, provider in enumerate(providers):
        line(f"9_file, {provider}", provider, color=bench.colour_of(number),
             marker="os^D"[number % 4], markersize=8)
    if "tcp" in providers:
        colour = bench.colour_of(providers.index("tcp"))
        line(f"9_file, tcp, disk of {SLOW_DISK_MS} ms", slow("tcp"), color=colour,
             linestyle="--", marker="v", markersize=9, markerfacecolor="none")
        axes.axhline(results.median("7_queue", "tcp", ""), label="7_queue, tcp",
                     color=colour, alpha=0.4, linewidth=8)
    axes.axhline(results.median("cp", "", ""), label="cp", color=colours["faint"],
                 linestyle=":", linewidth=2)
    axes.axhline(results.median("socat", "", ""), label="socat", color=colours["faint"],
                 linestyle="-.", linewidth=2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(SLOTS, [str(slots) for slots in SLOTS])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("slots")
    axes.set_ylabel("bandwidth in Gbps", rotation_mode="anchor")
    bench.save_chart(figure, axes, path)


def main():
    bench.exit_on_signals()
    if sys.argv[1:]:
        sys.exit(__doc__)
    providers = bench.providers_here()
    results = Results()
    with two_files() as (whole, quarter):
        if bench.LINK:
            measure_link(results, quarter)
        measure_memory(results, providers, whole)
    print_limits(results)
    print_table(results, providers)
    print_targets(results, providers)
    bench.write_results(results, "bench-file",
                        lambda path: draw(results, providers, path))


if __name__ == "__main__":
    main()
