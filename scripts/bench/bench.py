"""What this machine can do, and how close 7_queue comes to it.

Usage: scripts/bench.sh [--variants [NAME...]]    (make bench, make bench-variants)

Without arguments: 7_queue for each provider and page size, and beside it, in
turn, the three limits: one memcpy of the same pages, iperf3 with one stream on
the interface of the tcp provider, and a bare loop of fi_write (bench_loop.cpp).
With --variants: 7_queue with one change, beside the one that is unchanged; all
those of CHANGES below, or those named.

Variables:
  RUNS       how often each is run (3; variants: 5); the median counts
  SIZES      page sizes ("64 256 1K 4K 16K 64K 256K 1M 4M"; variants: "64 64K")
  PROVIDERS  as FI_PROVIDER takes them (those of shm, tcp, efa and verbs;ofi_rxm
             that are here)
  SECONDS_PER_RUN  roughly (0.25)
  LONG       WRITEs of the long transfer (1000000)
  BUILD      where the programs are (build); the results are written there too
"""

import contextlib
import csv
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"))
VARIANTS = sys.argv[1:2] == ["--variants"]
RUNS = int(os.environ.get("RUNS", 5 if VARIANTS else 3))
SIZES = os.environ.get(
    "SIZES", "64 64K" if VARIANTS else "64 256 1K 4K 16K 64K 256K 1M 4M").split()
SECONDS_PER_RUN = float(os.environ.get("SECONDS_PER_RUN", 0.25))
LONG = int(os.environ.get("LONG", 1000000))
# Two processes of one host would else go through shared memory.
PROVIDER_ENV = {"efa": {"FI_EFA_ENABLE_SHM_TRANSFER": "0"}}
# A client has two buffers, of as many pages each.
MAX_PAGES = 1000
MAX_BUFFER = 64 << 20
# More than any run takes.
TIME_LIMIT = 120

# One change each to what made 7_queue fast: the name, what it means, and the
# text in src/7_queue.cpp with what takes its place.
CHANGES = [
    ("small-pages", "buffers not on huge pages",
     "      madvise(data, rounded, MADV_HUGEPAGE);\n", ""),
    ("untouched", "the client's memory not touched beforehand",
     "    buf.Clear();\n", ""),
    ("thread-safe", "the provider takes its locks",
     "threading = FI_THREAD_DOMAIN;", "threading = FI_THREAD_SAFE;"),
    ("no-delivery", "a WRITE is complete when it has left (tcp)",
     "write_flags = FI_DELIVERY_COMPLETE;", "write_flags = 0;"),
    ("delivery", "a WRITE is complete when it is in place (shm too)",
     "    write_flags = 0;\n", ""),
    ("read-1", "1 entry of the completion queue at a time",
     "kCompletionQueueReadCount = 16;", "kCompletionQueueReadCount = 1;"),
    ("read-256", "256 entries of it at a time",
     "kCompletionQueueReadCount = 16;", "kCompletionQueueReadCount = 256;"),
    ("post-1", "1 WRITE posted for each time that it is read",
     "kWritesPerPoll = 16;", "kWritesPerPoll = 1;"),
    ("post-64", "64 of them", "kWritesPerPoll = 16;", "kWritesPerPoll = 64;"),
    ("post-256", "256 of them", "kWritesPerPoll = 16;", "kWritesPerPoll = 256;"),
    ("no-free-list", "no operation used again",
     "  free_ops.push_back(op);\n", ""),
    ("outstanding-1", "1 WRITE in flight at most",
     "kMaxOutstandingWrites = 4096;", "kMaxOutstandingWrites = 1;"),
    ("outstanding-16", "16 in flight at most",
     "kMaxOutstandingWrites = 4096;", "kMaxOutstandingWrites = 16;"),
    ("outstanding-any", "as many in flight as libfabric takes",
     "kMaxOutstandingWrites = 4096;", "kMaxOutstandingWrites = SIZE_MAX;"),
]


def to_bytes(text):
    """64K is 65536."""
    factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1].upper(), 1)
    return int(text.rstrip("KMkm")) * factor


def to_text(size):
    if size % (1 << 20) == 0:
        return f"{size >> 20} MiB"
    return f"{size >> 10} KiB" if size % (1 << 10) == 0 else f"{size} B"


def num_pages(size):
    return max(1, min(MAX_PAGES, MAX_BUFFER // size))


# ---- Running programs ----

def two_cores():
    """Who writes and who is written to stay on a core each. Where the scheduler
    happens to put them would else decide the results."""
    cores = sorted(os.sched_getaffinity(0))
    path = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    with contextlib.suppress(OSError):
        with open(path.format(cores[0])) as file:
            # As in 0,48 or 0-1.
            siblings = [int(n) for n in re.split("[,-]", file.read())]
        cores = cores[:1] + [c for c in cores if c not in siblings]
    return cores[0], cores[-1] if len(cores) == 1 else cores[1]


WRITER, TARGET = two_cores()


def environment(provider):
    env = {**os.environ, **PROVIDER_ENV.get(provider, {})}
    if provider:
        env["FI_PROVIDER"] = provider
    return env


@contextlib.contextmanager
def background(core, provider, *command):
    """A process that is ended when it is no longer needed. Its output can be read
    from stdout."""
    process = subprocess.Popen(
        ["taskset", "-c", str(core), *command], env=environment(provider),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    # Whoever reads from a process that has hung reads its end.
    alarm = threading.Timer(TIME_LIMIT, process.kill)
    alarm.start()
    try:
        yield process
    finally:
        process.terminate()
        process.stdout.read()
        process.wait()
        process.stdout.close()
        alarm.cancel()


def run(core, provider, *command):
    """Runs a program to its end; returns what it printed."""
    done = subprocess.run(
        ["taskset", "-c", str(core), *command], env=environment(provider),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=TIME_LIMIT, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}")
    return done.stdout


def read_until(process, pattern):
    """Reads the output up to a line that matches."""
    output = ""
    for line in process.stdout:
        output += line
        match = re.search(pattern, line)
        if match:
            return match
    raise RuntimeError(f"{' '.join(process.args)}:\n{output}")


# ---- What is measured: each returns WRITEs (or pages) a second ----

def server_address(server):
    read_until(server, "^Run the client")
    return read_until(server, r" ([0-9a-f]+)\n").group(1)


def measure_queue(provider, size, writes, pages=None, folder=BUILD):
    """7_queue. Also returns the most memory that its server ever had, in bytes."""
    program = os.path.join(folder, "7_queue")
    pages = pages or num_pages(size)
    repeat = max(1, round(writes / (2 * pages)))
    with background(WRITER, provider, program) as server:
        run(TARGET, provider, program, server_address(server), str(size),
            str(pages), str(repeat))
        found = read_until(
            server, r"^\[(.*)s\] WRITE: 100%.* bw=([0-9.]+).* ([0-9.]+)Mpps")
        seconds, gbps, mpps = [float(text) for text in found.groups()]
        with open(f"/proc/{server.pid}/status") as file:
            memory = 1024 * int(re.search(r"VmHWM:\s*(\d+)", file.read())[1])
    # All three have three decimals, so the largest is the most exact.
    _, rate = max((mpps, mpps * 1e6), (gbps, gbps * 1e9 / 8 / size),
                  (seconds, 2 * pages * repeat / max(seconds, 1e-3)))
    return rate, memory


def loop_program():
    return os.path.join(BUILD, "bench_loop")


def loop_rate(output, writes):
    return writes / float(re.search(r"seconds ([0-9.]+)", output)[1])


def measure_loop(provider, size, writes):
    """A bare loop, with the same completion level as 7_queue."""
    sizes = [str(size), str(num_pages(size))]
    level = "any" if provider == "shm" else "delivery"
    with background(TARGET, provider, loop_program(), "target",
                    *sizes) as target:
        where = read_until(target, r"^target (\S+) (\S+) (\S+)").groups()
        output = run(WRITER, provider, loop_program(), "write", *sizes,
                     str(writes), level, *where)
        target.wait(TIME_LIMIT)
    return loop_rate(output, writes)


def measure_memcpy(_, size, writes):
    output = run(WRITER, "", loop_program(), "copy", str(size),
                 str(num_pages(size)), str(writes))
    return loop_rate(output, writes)


def tcp_ip():
    """The IP address that the tcp provider uses, which is in its own address."""
    program = os.path.join(BUILD, "7_queue")
    with background(WRITER, "tcp", program) as server:
        address = bytes.fromhex(server_address(server))
    if int.from_bytes(address[:2], sys.byteorder) == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, address[8:24])
    return socket.inet_ntop(socket.AF_INET, address[4:8])


def measure_iperf3(ip):
    """One stream; returns bits a second."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family) as free:
        free.bind((ip, 0))
        port = str(free.getsockname()[1])
    with background(TARGET, "", "iperf3", "--server", "--one-off", "--bind", ip,
                    "--port", port, "--forceflush") as server:
        read_until(server, "^Server listening")
        output = run(WRITER, "", "iperf3", "--client", ip, "--port", port,
                     "--time", "1", "--json")
    return json.loads(output)["end"]["sum_received"]["bits_per_second"]


# ---- Progress ----

class Progress:
    """One line, written over on a terminal; elsewhere a line now and then."""

    def __init__(self, total):
        self.total = total
        self.done = 0
        self.printed = time.monotonic()

    def step(self, text):
        self.done += 1
        line = f"[{100 * self.done // self.total:3}%] {text}"
        if sys.stdout.isatty():
            end = "\n" if self.done == self.total else ""
            bar = 30 * self.done // self.total
            print(f"\r[{'#' * bar}{' ' * (30 - bar)}]{line[6:]}\033[K", end=end,
                  flush=True)
        elif time.monotonic() - self.printed > 10:
            self.printed = time.monotonic()
            print(line, flush=True)


# ---- Results ----

class Results:
    """The single runs: rates by program, provider and page size. A program's
    rates stand in the order of the rounds, so that those of two programs can be
    compared in pairs."""

    def __init__(self):
        self.rates = {}

    def add(self, program, provider, size, rate):
        self.rates.setdefault((program, provider, size), []).append(rate)

    def writes(self, program, provider, size):
        """How many WRITEs take SECONDS_PER_RUN: as in the last run, or a guess."""
        rates = self.rates.get((program, provider, size))
        rate = rates[-1] if rates else 1 / (2e-6 + size / 4e9)
        return max(1, round(rate * SECONDS_PER_RUN))

    def median(self, *key):
        return statistics.median(self.rates[key])

    def ratio(self, key, other):
        """The median over the rounds; None if one was not measured."""
        pairs = list(zip(self.rates.get(key, []), self.rates.get(other, [])))
        return statistics.median(a / b for a, b in pairs) if pairs else None

    def write_csv(self, path):
        """Each run, then each median: run is empty there."""
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["program", "provider", "page_size", "num_pages",
                             "run", "writes_per_second", "gbps"])
            for key, rates in self.rates.items():
                runs = [*enumerate(rates, 1), ("", statistics.median(rates))]
                for number, rate in runs:
                    gbps = rate * key[2] * 8e-9
                    writer.writerow([*key, num_pages(key[2]), number,
                                     f"{rate:.0f}", f"{gbps:.4f}"])


def show(ratio):
    return "-" if ratio is None else f"{ratio:.2f}"


def print_table(results, providers, sizes):
    print("\n7_queue, and how it compares with each limit (medians):")
    print(f"{'provider':<14} {'page size':>9} {'Gbps':>9} {'M WRITEs/s':>11} "
          f"{'/ loop':>7} {'/ memcpy':>9} {'/ iperf3':>9}")
    for provider in providers:
        for size in sizes:
            key = ("7_queue", provider, size)
            rate = results.median(*key)
            print(f"{provider:<14} {to_text(size):>9} "
                  f"{rate * size * 8e-9:>9.3f} {rate * 1e-6:>11.4f} "
                  f"{show(results.ratio(key, ('loop', provider, size))):>7} "
                  f"{show(results.ratio(key, ('memcpy', '', size))):>9} "
                  f"{show(results.ratio(key, ('iperf3', '', size))):>9}")


def print_limits(results, providers, sizes):
    # It decides how fast tcp and iperf3 are: bbr paces what it sends.
    with open("/proc/sys/net/ipv4/tcp_congestion_control") as file:
        print(f"\nTCP congestion control: {file.read().strip()}")
    print("\nThe limits, in Gbps:")
    names = [("memcpy", ""), ("iperf3", ""), *(("loop", p) for p in providers)]
    print(f"{'page size':>9} " +
          " ".join(f"{' '.join(n).strip():>18}" for n in names))
    for size in sizes:
        print(f"{to_text(size):>9} " + " ".join(
            f"{results.median(*n, size) * size * 8e-9:>18.3f}" for n in names))


def print_targets(results, long):
    def ratio(provider, size, *limit):
        return results.ratio(("7_queue", provider, size), (*limit, size))

    rows = [
        ("64 KiB, shm: bandwidth / bare loop", ">=", 1.0,
         ratio("shm", 65536, "loop", "shm")),
        ("64 KiB, tcp: bandwidth / bare loop", ">=", 1.0,
         ratio("tcp", 65536, "loop", "tcp")),
        ("64 KiB, tcp: bandwidth / iperf3, one stream", ">=", 1.5,
         ratio("tcp", 65536, "iperf3", "")),
        ("64 B, shm: WRITEs a second / bare loop", ">=", 0.9,
         ratio("shm", 64, "loop", "shm")),
    ]
    for provider, (memory, seconds) in long.items():
        rows.append((f"{provider}: memory, {LONG} WRITEs / {LONG // 1000}",
                     "<=", 1.0, memory))
        rows.append((f"{provider}: time per WRITE, {LONG} / {LONG // 100}",
                     "<=", 1.0, seconds))
    print("\nTargets:")
    for what, sign, target, reached in rows:
        reached = "not measured" if reached is None else f"{reached:.2f}"
        print(f"{what:<46} {sign} {target:.1f}   {reached}")


def draw(results, providers, sizes, path):
    """Bandwidth over page size. It has to be clear without colours."""
    # Here, since the rest goes without.
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5))

    def line(label, program, provider, **style):
        gbps = [results.median(program, provider, s) * s * 8e-9 for s in sizes]
        axes.plot(sizes, gbps, label=label, **style)

    for number, provider in enumerate(providers):
        marker = "os^D"[number % 4]
        # As broad as that it is seen below the other.
        line(f"bare fi_write loop, {provider}", "loop", provider, color="0.75",
             linewidth=5, marker=marker, markersize=11)
        line(f"7_queue, {provider}", "7_queue", provider, color="black",
             linewidth=1.5, marker=marker, markersize=5)
    line("memcpy", "memcpy", "", color="0.45", linestyle=":", linewidth=2)
    line("iperf3, one stream", "iperf3", "", color="0.45", linestyle="-.")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [to_text(size) for size in sizes], rotation=30)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("page size")
    axes.set_ylabel("bandwidth in Gbps")
    axes.grid(color="0.88", linewidth=0.6)
    axes.legend(handlelength=4, frameon=False)
    figure.tight_layout()
    figure.savefig(path)


# ---- The benchmark ----

def providers_here():
    given = os.environ.get("PROVIDERS")
    if given:
        return given.split()

    def is_here(provider):
        done = subprocess.run([os.path.join(BUILD, "7_queue"), "--list"],
                              env=environment(provider), check=False,
                              capture_output=True)
        return done.returncode == 0
    return [p for p in ["shm", "tcp", "efa", "verbs;ofi_rxm"] if is_here(p)]


def measure_all(providers, sizes):
    """Never all runs of one program in a row: what else the machine does should
    meet all of them. In another order each time, since what a program leaves
    behind, TCP's notes about the way among it, changes what comes next."""
    results = Results()
    progress = Progress(RUNS * (1 + len(sizes) * (1 + 2 * len(providers))))
    ip = tcp_ip()

    def take(program, provider, size, measure):
        writes = results.writes(program, provider, size)
        results.add(program, provider, size, measure(provider, size, writes))
        progress.step(f"{program} {provider} {to_text(size)}")

    for _ in range(RUNS):
        bits = measure_iperf3(ip)
        progress.step("iperf3")
        steps = []
        for size in sizes:
            results.add("iperf3", "", size, bits / 8 / size)
            steps.append(("memcpy", "", size, measure_memcpy))
            for provider in providers:
                steps.append(("loop", provider, size, measure_loop))
                steps.append(("7_queue", provider, size,
                              lambda *args: measure_queue(*args)[0]))
        for step in random.sample(steps, len(steps)):
            take(*step)
    return results


def measure_long(providers):
    """Whether a long transfer takes more memory, or more time for each WRITE, than
    a short one. The same pages, and as few as that takes, over and over."""
    size, pages = 4096, max(1, min(500, LONG // 2000))
    progress = Progress((2 + 2 * RUNS) * len(providers))
    ratios = {}
    for provider in providers:
        def take(writes, provider=provider):
            result = measure_queue(provider, size, writes, pages)
            progress.step(f"7_queue {provider}, {writes} WRITEs")
            return result
        _, short_memory = take(LONG // 1000)
        rates = [take(LONG // 100)[0] for _ in range(RUNS)]
        rate, memory = take(LONG)
        rates += [take(LONG // 100)[0] for _ in range(RUNS)]
        ratios[provider] = (memory / short_memory,
                            statistics.median(rates) / rate)
    return ratios


def bench(providers, sizes):
    results = measure_all(providers, sizes)
    long = measure_long(providers)
    print_limits(results, providers, sizes)
    print_table(results, providers, sizes)
    print_targets(results, long)
    results.write_csv(os.path.join(BUILD, "bench.csv"))
    draw(results, providers, sizes, os.path.join(BUILD, "bench.svg"))
    print(f"\nWritten: {BUILD}/bench.csv (all runs), {BUILD}/bench.svg")


# ---- Variants ----

def changed_source(name):
    """The source of 7_queue with one change."""
    with open(os.path.join(ROOT, "src/7_queue.cpp")) as file:
        source = file.read()
    old, new = next(c[2:] for c in CHANGES if c[0] == name)
    if source.count(old) != 1:
        raise RuntimeError(f"variant {name}: in src/7_queue.cpp, this is there "
                           f"{source.count(old)} times instead of once: {old}")
    return source.replace(old, new)


def variant_folder(name):
    return os.path.join(BUILD, "bench", name)


def build_variant(name):
    """Builds it as the other programs are, in a folder with a src of its own."""
    folder = variant_folder(name)
    os.makedirs(os.path.join(folder, "src"), exist_ok=True)
    source = changed_source(name)
    path = os.path.join(folder, "src", "7_queue.cpp")
    with open(path, "w") as file:
        file.write(source)
    subprocess.run(["make", "-s", "-C", folder, "-f", f"{ROOT}/Makefile",
                    f"BUILD={folder}", f"{folder}/7_queue"], check=True)


def bench_variants(providers, sizes, names):
    progress = Progress(len(names))
    for name in names:
        build_variant(name)
        progress.step(f"built {name}")

    results = Results()
    progress = Progress(RUNS * len(providers) * len(sizes) * (1 + len(names)))
    for _ in range(RUNS):
        for provider in providers:
            for size in sizes:
                # In another order each time, so that none always comes after
                # the same one.
                for name in random.sample(["unchanged", *names], 1 + len(names)):
                    writes = results.writes(name, provider, size)
                    folder = (BUILD if name == "unchanged"
                              else variant_folder(name))
                    rate, _ = measure_queue(provider, size, writes,
                                            folder=folder)
                    results.add(name, provider, size, rate)
                    progress.step(f"{name} {provider} {to_text(size)}")

    columns = [(p, s) for p in providers for s in sizes]
    print("\nThe rate of 7_queue with one change, over that of the unchanged one "
          "(medians):")
    print(f"{'':<70}" + "".join(f"{p + ' ' + to_text(s):>15}"
                                for p, s in columns))
    print(f"{'unchanged, M WRITEs/s':<70}" + "".join(
        f"{results.median('unchanged', *c) * 1e-6:>15.4f}" for c in columns))
    for name, what, *_ in CHANGES:
        if name in names:
            print(f"{name:<18}{what:<52}" + "".join(
                f"{show(results.ratio((name, *c), ('unchanged', *c))):>15}"
                for c in columns))
    results.write_csv(os.path.join(BUILD, "bench-variants.csv"))
    print(f"\nWritten: {BUILD}/bench-variants.csv (all runs)")


def main():
    known = [change[0] for change in CHANGES]
    names = sys.argv[2:] or known
    if (sys.argv[1:] and not VARIANTS) or not set(names) <= set(known):
        sys.exit(f"{__doc__}\nThe variants are: {', '.join(known)}")
    sizes = sorted(to_bytes(text) for text in SIZES)
    if VARIANTS:
        bench_variants(providers_here(), sizes, names)
    else:
        bench(providers_here(), sizes)


if __name__ == "__main__":
    main()
