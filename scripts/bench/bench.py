"""Measures 7_queue, and beside it what this machine can do at its best.

Usage: scripts/bench/bench.sh [--variants [NAME...]]
       (make bench, make bench-variants; for 9_file see bench_file.py)

Without arguments: 7_queue for each provider and page size, and in turn with it
  memcpy     one copy of the same pages,
  iperf3     one stream on the interface of the tcp provider (it has no page size),
  perftest   ib_write_bw, which does the same by verbs alone (where the provider is
             verbs),
  best loop  a bare loop around fi_writemsg (bench_loop.cpp) with the settings
             that a calibration finds best for this provider and page size,
  our loop   the same loop with the settings of 7_queue.
Then 7_queue and iperf3 in turn over a link of a known speed, between two network
namespaces, where the machine permits it. Last the latency of a READ, in 8_malloc,
in a bare loop, and over verbs in ib_read_lat.
With --variants: 7_queue with one change, beside the unchanged program; all
changes of CHANGES below, or those named.

Variables:
  RUNS       the number of runs of each (3; variants: 5); the median counts
  SIZES      page sizes ("64 256 1K 4K 16K 64K 256K 1M"; variants: "64 64K")
  PROVIDERS  as FI_PROVIDER takes them (by default those of shm, tcp, efa and
             verbs;ofi_rxm that are here)
  LINK       the speed of the link, as tc takes it (2gbit); empty: no link
  SECONDS_PER_RUN  roughly (0.25)
  LONG       WRITEs of the long transfer (1000000)
  BUILD      the folder of the programs (build); the results are written there
"""

import contextlib
import csv
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
sys.path.append(f"{ROOT}/scripts/book")

import style  # noqa: E402  (the path has to be known)

BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"))
VARIANTS = sys.argv[1:2] == ["--variants"]
RUNS = int(os.environ.get("RUNS", 5 if VARIANTS else 3))
SIZES = os.environ.get(
    "SIZES", "64 64K" if VARIANTS else "64 256 1K 4K 16K 64K 256K 1M").split()
SECONDS_PER_RUN = float(os.environ.get("SECONDS_PER_RUN", 0.25))
LONG = int(os.environ.get("LONG", 1000000))
# Otherwise two processes of one host use shared memory.
PROVIDER_ENV = {"efa": {"FI_EFA_ENABLE_SHM_TRANSFER": "0"}}
# What the pages of a run may need: no more than 7_queue serves a client with.
MAX_PAGES = 2000
MAX_MEMORY = 64 << 20
LINK = os.environ.get("LINK", "2gbit")
# A run that takes longer, in seconds, has failed.
TIME_LIMIT = 300

# Settings of the bare loop, as bench_loop takes them: when a WRITE is complete,
# WRITEs posted for each reading of the completion queue, entries read at a time.
SETTINGS = [f"{level},{post},{read}" for level in ["any", "delivery"]
            for post, read in [(1, 1), (1, 16), (16, 16), (4096, 16), (4096, 256)]]
# How the best is found, stage by stage: the rounds, in each of which every setting
# runs once, and how many settings go on to the next stage.
CALIBRATION = [(3, 5), (7, 2), (15, 1)]


# The bare loops.
LOOPS = ["best loop", "our loop"]


def our_settings(provider):
    """Those of 7_queue."""
    return "any,4096,16" if provider == "shm" else "delivery,4096,16"


def constant(name, value):
    return f"{name} = [^;]*;", f"{name} = {value};"


def posted(most):
    """ContinuePostWrite posts no more than this each time."""
    return (r"while \(posted_write_ops < total_write_ops &&",
            f"for (int n = 0; n < {most} && posted_write_ops < total_write_ops &&",
            r"session\.endpoint\.HasRoom\(\)\) \{", "session.endpoint.HasRoom(); ++n) {")


# One change each to what made 7_queue fast: the name, what it means, and pairs of a
# pattern that src/7_queue.cpp matches once and what replaces that.
CHANGES = [
    ("sleep", "a loop that finds nothing sleeps 1 ms, as in 6",
     r"if \(!busy\) \{", "if (true) {",
     r"if \(Poll\(\) == 0 && polls % kPollsPerYield == 0\) std::this_thread::yield\(\);",
     "if (Poll() == 0) std::this_thread::sleep_for(kIdlePause);"),
    ("yield-1", "a loop that finds nothing yields at once",
     *constant("kPollsPerYield", 1)),
    ("no-yield", "it never yields", *constant("kPollsPerYield", "SIZE_MAX")),
    ("small-pages", "buffers not on huge pages",
     "MADV_HUGEPAGE", "MADV_NOHUGEPAGE"),
    ("untouched", "the client's memory not touched beforehand",
     r" *memset\(data\.get\(\), 0, rounded\);\n", ""),
    ("thread-safe", "the provider takes its locks",
     "FI_THREAD_DOMAIN;", "FI_THREAD_SAFE;"),
    ("no-delivery", "a WRITE is complete when it has left (tcp)",
     "op_flags = FI_DELIVERY_COMPLETE;", "op_flags = 0;"),
    ("delivery", "a WRITE is complete when it is in place (shm too)",
     "shm && !gpu", "shm && gpu"),
    ("read-1", "1 entry of the completion queue read at a time",
     *constant("kCompletionQueueReadCount", 1)),
    ("read-256", "256 entries",
     *constant("kCompletionQueueReadCount", 256)),
    ("post-1", "1 WRITE posted for each reading of the queue", *posted(1)),
    ("post-16", "16 WRITEs", *posted(16)),
    ("post-64", "64 WRITEs", *posted(64)),
    ("no-free-list", "no operation used again",
     r" *free_ops\.push_back\(op\);\n", ""),
    ("outstanding-1", "1 WRITE in flight at most",
     *constant("kMaxOutstandingWrites", 1)),
    ("outstanding-16", "16 in flight at most",
     *constant("kMaxOutstandingWrites", 16)),
    ("outstanding-any", "as many in flight as libfabric takes",
     *constant("kMaxOutstandingWrites", "SIZE_MAX"),
     *constant("kMaxOutstandingBytes", "SIZE_MAX")),
]


def to_bytes(text):
    """64K is 65536."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1].upper(), 1)
    return int(text.rstrip("KMGkmg")) * factor


def to_text(size):
    if size % (1 << 20) == 0:
        return f"{size >> 20} MiB"
    return f"{size >> 10} KiB" if size % (1 << 10) == 0 else f"{size} B"


def guess(size):
    """WRITEs a second."""
    return 1 / (2e-6 + size / 4e9)


def num_pages(size):
    return max(1, min(MAX_PAGES, MAX_MEMORY // size))


# ---- Running programs ----

def two_cores():
    """Returns a core for the writer and one for the target. Otherwise the
    scheduler's placement would decide the results."""
    cores = sorted(os.sched_getaffinity(0))
    path = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    with contextlib.suppress(OSError):
        with open(path.format(cores[0])) as file:
            # As in 0,48 or 0-1.
            siblings = [int(n) for n in re.split("[,-]", file.read())]
        cores = cores[:1] + [c for c in cores if c not in siblings]
    return cores[0], cores[-1] if len(cores) == 1 else cores[1]


WRITER, TARGET = two_cores()
ANY_CORE = None  # the scheduler places the program


def environment(provider):
    env = {**os.environ, **PROVIDER_ENV.get(provider, {})}
    if provider:
        env["FI_PROVIDER"] = provider
    return env


@contextlib.contextmanager
def background(core, provider, *command):
    """Starts a program, and ends it at the end of the block. Its output can be read
    from stdout."""
    pin = [] if core is ANY_CORE else ["taskset", "-c", str(core)]
    # setpriv ends the program even if we are killed.
    with subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", *pin, *command],
            env=environment(provider), text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT) as process:
        # Reading from a program that hangs then ends, too.
        alarm = threading.Timer(TIME_LIMIT, process.kill)
        alarm.daemon = True
        alarm.start()
        try:
            yield process
        finally:
            alarm.cancel()
            process.terminate()
            # libfabric now and then catches the signal and goes on.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=5)
            process.kill()


def run(core, provider, *command):
    """Runs a program to its end; returns what it printed."""
    with background(core, provider, *command) as process:
        output = process.stdout.read()
        process.wait(TIME_LIMIT)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{output}")
    return output


def read_until(process, pattern):
    """Reads the output up to a line that matches."""
    output = ""
    for line in process.stdout:
        output += line
        match = re.search(pattern, line)
        if match:
            return match
    raise RuntimeError(f"{' '.join(process.args)}:\n{output}")


# ---- What is measured: most return WRITEs (or pages) a second ----

def server_address(server):
    read_until(server, "^Run the client")
    return read_until(server, r" ([0-9a-f]+)( FILE)?\n").group(1)


def measure_queue(provider, size, writes, pages=None, folder=BUILD,
                  hosts=((), ()), cores=(WRITER, TARGET)):
    """7_queue. Also returns the most memory that its server ever had, in bytes."""
    program = os.path.join(folder, "7_queue")
    pages = pages or num_pages(size)
    repeat = max(1, round(writes / pages))
    with background(cores[0], provider, *hosts[0], program) as server:
        run(cores[1], provider, *hosts[1], program, server_address(server),
            str(size), str(pages), str(repeat))
        found = read_until(
            server, r"\[([0-9.]+)s\] WRITE: 100%.* bw=([0-9.]+).* ([0-9.]+)Mpps")
        seconds, gbps, mpps = [float(text) for text in found.groups()]
        with open(f"/proc/{server.pid}/status") as file:
            memory = 1024 * int(re.search(r"VmHWM:\s*(\d+)", file.read())[1])
    # All three have three decimals, so the largest is the most exact.
    _, rate = max((mpps, mpps * 1e6), (gbps, gbps * 1e9 / 8 / size),
                  (seconds, pages * repeat / max(seconds, 1e-3)))
    return rate, memory


def bench_loop(core, provider, mode, size, *arguments):
    return (core, provider, os.path.join(BUILD, "bench_loop"), mode, str(size),
            str(num_pages(size)), *arguments)


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
    """Runs all of them in turn, the better half again, and so on. What slows the
    machine down for a while meets them all, so a rate counts in relation to the
    others of its round; the median over the rounds decides."""
    left = SETTINGS
    rate = guess(size)
    for rounds, keep in CALIBRATION:
        order = [random.sample(left, len(left)) for _ in range(rounds)]
        writes = max(1, round(rate * SECONDS_PER_RUN / 10))
        rates = iter(measure_loop(provider, size, writes, *sum(order, [])))
        shares = {settings: [] for settings in left}
        for settings_of_round in order:
            found = {settings: next(rates) for settings in settings_of_round}
            rate = statistics.median(found.values())
            for settings in left:
                shares[settings].append(found[settings] / rate)
        left = sorted(left, key=lambda settings: statistics.median(shares[settings]),
                      reverse=True)[:keep]
    return left[0]


READ_SIZE = 64  # bytes, of the READs whose latency is measured


def measure_read(provider):
    """READs a second of 8_malloc, one at a time, from the median of their
    latencies."""
    program = os.path.join(BUILD, "8_malloc")
    with background(TARGET, provider, program) as server:
        output = run(WRITER, provider, program, server_address(server), "1")
    found = re.search(rf"^READ of {READ_SIZE} bytes: median ([0-9.]+) us", output, re.M)
    return 1e6 / float(found[1])


def measure_read_loop(provider):
    """The same of the bare loop."""
    with background(*bench_loop(TARGET, provider, "target", READ_SIZE)) as target:
        where = read_until(target, r"^target (\S+) (\S+) (\S+)").groups()
        output = run(*bench_loop(WRITER, provider, "latency", READ_SIZE, "1000",
                                 *where))
        target.wait(TIME_LIMIT)
    return loop_rates(output, 1)[0]


def measure_memcpy(size, writes):
    output = run(*bench_loop(WRITER, "", "copy", size, str(writes)))
    return loop_rates(output, writes)[0]


def tcp_ip():
    """The IP address that the tcp provider uses, from its own address."""
    program = os.path.join(BUILD, "7_queue")
    with background(WRITER, "tcp", program) as server:
        address = bytes.fromhex(server_address(server))
    if int.from_bytes(address[:2], sys.byteorder) == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, address[8:24])
    return socket.inet_ntop(socket.AF_INET, address[4:8])


def free_port(ip):
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as free:
        free.bind(("", 0))
        return str(free.getsockname()[1])


def measure_iperf3(ip, seconds=1, hosts=((), ())):
    """One stream; returns bits a second."""
    port = free_port(ip)
    with background(TARGET, "", *hosts[1], "iperf3", "--server", "--one-off",
                    "--bind", ip, "--port", port, "--forceflush") as server:
        read_until(server, "^Server listening")
        output = run(WRITER, "", *hosts[0], "iperf3", "--client", ip, "--port",
                     port, "--time", str(seconds), "--json")
    return json.loads(output)["end"]["sum_received"]["bits_per_second"]


# ---- perftest: the same by verbs, without libfabric ----

def has_perftest(provider):
    return "verbs" in provider and shutil.which("ib_write_bw") is not None


def rdma_device(provider):
    """The name of the device that 7_queue uses, such as mlx5_0."""
    with background(ANY_CORE, provider, os.path.join(BUILD, "7_queue")) as server:
        return read_until(server, "^domain: ([^, ]+)")[1]


def run_perftest(provider, program, size, iterations):
    """Returns the columns of its result, as text."""
    # Line by line, as on a terminal.
    command = ["stdbuf", "-oL", program, "--ib-dev", rdma_device(provider),
               "--size", str(size), "--iters", str(iterations),
               "--port", free_port("127.0.0.1"), "--CPU-freq"]
    with background(TARGET, "", *command) as server:
        # It prints this before it listens.
        read_until(server, "Waiting for client")
        time.sleep(0.5)
        output = run(WRITER, "", *command, "127.0.0.1")
    return re.search(rf"^ {size} +{iterations} .*", output, re.M)[0].split()


def measure_write_bw(provider, size, writes):
    return float(run_perftest(provider, "ib_write_bw", size, max(5, writes))[4]) * 1e6


def measure_read_lat(provider):
    """From the typical latency, which is the median, in us."""
    return 1e6 / float(run_perftest(provider, "ib_read_lat", READ_SIZE, 1000)[4])


LATENCIES = {"8_malloc": measure_read, "READ loop": measure_read_loop,
             "ib_read_lat": measure_read_lat}


# ---- A link of a known speed ----

LINK_SIZE = 65536  # the page size there, in bytes
LINK_SECONDS = 2   # for each run


@contextlib.contextmanager
def links(speeds):
    """Makes two network namespaces with a cable between them for each of the speeds,
    which holds in both directions. Yields the speeds in bits a second, the IP addresses
    in the second namespace, and for each namespace the start of a command that runs in
    it. Raises OSError or RuntimeError where that is not permitted."""
    # Only root can do without a user namespace.
    root = os.geteuid() == 0
    unshare = ["unshare", "--net", *([] if root else ["--map-root-user"])]
    nsenter = ["nsenter", *([] if root else ["--user", "--preserve-credentials"])]

    with contextlib.ExitStack() as stack:
        def namespace(*command):
            """Returns the start of a command and the process that keeps the
            namespace. The namespace has no name, so it is gone with its last
            process, and this one ends when we do, whatever ends us."""
            keeper = stack.enter_context(subprocess.Popen(
                [*command, "sh", "-c", "echo; exec cat"], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT))
            line = keeper.stdout.readline()
            if line != "\n":
                raise RuntimeError(line or "no network namespace")
            return [*nsenter, f"--target={keeper.pid}", "--net"], keeper

        first, _ = namespace(*unshare)
        second, keeper = namespace(*first, "unshare", "--net")
        rates = []
        for cable, speed in enumerate(speeds):
            name = f"cable{cable}"
            run(WRITER, "", *first, "ip", "link", "add", name, "type", "veth",
                "peer", "name", name, "netns", str(keeper.pid))
            for number, enter in enumerate([first, second], 1):
                # The kernel sends up to 64 KiB at a time, so the bucket has room for
                # several of those.
                run(WRITER, "", *enter, "sh", "-ec", f"""
                    ip address add 10.11.{cable}.{number}/24 dev {name}
                    ip link set {name} up
                    tc qdisc add dev {name} root tbf rate {speed} burst 256kb latency 20ms
                    """)
            # libfabric passes over an interface that is not yet running.
            for enter in [first, second]:
                run(WRITER, "", *enter, "sh", "-c",
                    f"until ip -br link show {name} | grep -q ' UP '; do sleep 0.01; done")
            shown = run(WRITER, "", *first, "tc", "-json", "qdisc", "show", "dev", name)
            rates.append(8 * json.loads(shown)[0]["options"]["rate"])
        yield rates, [f"10.11.{cable}.2" for cable in range(len(speeds))], [first, second]


def over(cable, hosts):
    """For each namespace, the start of a command that uses one cable."""
    return [[*enter, "env", f"FI_TCP_IFACE=cable{cable}"] for enter in hosts]


@contextlib.contextmanager
def link():
    """Makes a cable of the speed LINK. Yields what links() does, for it alone."""
    with links([LINK]) as ([speed], [ip], hosts):
        yield speed, ip, over(0, hosts)


def measure_link(results):
    """7_queue over tcp and iperf3, in turn."""
    with contextlib.ExitStack() as stack:
        try:
            speed, ip, hosts = stack.enter_context(link())
        except (OSError, RuntimeError) as error:
            print(f"No link of {LINK}: {str(error).strip().splitlines()[-1]}")
            return
        steps = {
            "7_queue": lambda: measure_queue(
                "tcp", LINK_SIZE, LINK_SECONDS * speed / 8 / LINK_SIZE,
                hosts=hosts)[0],
            "iperf3": lambda: measure_iperf3(ip, LINK_SECONDS, hosts) / 8 / LINK_SIZE,
        }
        progress = Progress(2 * RUNS)
        for _ in range(RUNS):
            for program in random.sample(list(steps), 2):
                results.add(program, "link", LINK_SIZE, steps[program]())
                progress.step(f"{program} over a link of {LINK}")
    print(f"A link of {LINK} (medians):")
    for program in steps:
        bits = results.median(program, "link", LINK_SIZE) * LINK_SIZE * 8
        print(f"  {program:<8} {bits * 1e-9:.3f} Gbps, {bits / speed:.3f} of it")


# ---- Progress ----

class Progress:
    """Rewrites one line on a terminal; elsewhere prints a line now and then."""

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
    """The rates of the single runs, by program, provider and page size. The rates
    of a program are in the order of the rounds, so that those of two programs can
    be compared in pairs."""

    HEADER = ["program", "provider", "page_size", "num_pages", "settings", "run",
              "writes_per_second", "gbps"]

    def __init__(self):
        self.rates = {}
        self.settings = {}  # of the bare loops, by the same keys

    def add(self, program, provider, size, rate):
        self.rates.setdefault((program, provider, size), []).append(rate)

    def writes(self, program, provider, size):
        """The number of WRITEs that take SECONDS_PER_RUN: as in the last run, or a
        guess."""
        rate = self.rates.get((program, provider, size), [guess(size)])[-1]
        return max(1, round(rate * SECONDS_PER_RUN))

    def median(self, *key):
        return statistics.median(self.rates[key])

    def ratios(self, key, other):
        """Those of the rounds."""
        return [a / b for a, b in zip(self.rates.get(key, []), self.rates.get(other, []))]

    def ratio(self, key, other):
        """The median over the rounds; None if either was not measured."""
        ratios = self.ratios(key, other)
        return statistics.median(ratios) if ratios else None

    def row(self, key, number, rate):
        """A run, as HEADER names its columns."""
        return [*key, num_pages(key[2]), self.settings.get(key, ""), number,
                f"{rate:.0f}", f"{rate * key[2] * 8e-9:.4f}"]

    def write_csv(self, path):
        """Each run, then the median, whose "run" is empty."""
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.HEADER)
            for key, rates in self.rates.items():
                runs = [*enumerate(rates, 1), ("", statistics.median(rates))]
                for number, rate in runs:
                    writer.writerow(self.row(key, number, rate))


def show(ratio):
    return "-" if ratio is None else f"{ratio:.2f}"


# What 7_queue is compared with, and whether that is measured for each provider.
LIMITS = {"best loop": True, "our loop": True, "memcpy": False, "iperf3": False,
          "ib_write_bw": True}
# iperf3 sends blocks of 128 KiB, so it says nothing about pages smaller than this.
IPERF3_FROM = 64 << 10


def print_table(results, providers, sizes):
    limits = {name: own for name, own in LIMITS.items()
              if any(key[0] == name for key in results.rates)}
    print("\n7_queue, and its ratio to each limit (medians):")
    print(f"{'provider':<14} {'page size':>9} {'Gbps':>9} {'M WRITEs/s':>11} " +
          " ".join(f"{'/ ' + name:>13}" for name in limits))
    for provider in providers:
        for size in sizes:
            key = ("7_queue", provider, size)
            rate = results.median(*key)
            ratios = [None if name == "iperf3" and size < IPERF3_FROM else
                      results.ratio(key, (name, provider if own else "", size))
                      for name, own in limits.items()]
            print(f"{provider:<14} {to_text(size):>9} "
                  f"{rate * size * 8e-9:>9.3f} {rate * 1e-6:>11.4f} " +
                  " ".join(f"{show(ratio):>13}" for ratio in ratios))


def print_limits(results, providers, sizes):
    # It decides the speed of tcp and iperf3: bbr paces what it sends.
    with open("/proc/sys/net/ipv4/tcp_congestion_control") as file:
        print(f"\nTCP congestion control: {file.read().strip()}")
    print("\nThe limits, in Gbps:")
    names = [("memcpy", ""), ("iperf3", ""),
             *((loop, p) for p in providers for loop in LOOPS),
             *(("ib_write_bw", p) for p in providers if has_perftest(p))]
    print(f"{'page size':>9} " +
          " ".join(f"{' '.join(n).strip():>18}" for n in names))
    for size in sizes:
        print(f"{to_text(size):>9} " + " ".join(
            f"{results.median(*n, size) * size * 8e-9:>18.3f}" for n in names))
    print("\nThe best settings of the bare loop: completion level, WRITEs posted "
          "for each reading\nof the completion queue, entries read at a time:")
    print(f"{'page size':>9} " + " ".join(f"{p:>18}" for p in providers))
    for size in sizes:
        print(f"{to_text(size):>9} " + " ".join(
            f"{results.settings['best loop', p, size]:>18}" for p in providers))


def print_latency(results, providers):
    print(f"\nLatency of a READ of {READ_SIZE} bytes, in us (medians):")
    names = [name for name in LATENCIES if any(key[0] == name for key in results.rates)]
    print(f"{'provider':<14}" + "".join(f"{name:>13}" for name in names))
    for provider in providers:
        keys = [(name, provider, READ_SIZE) for name in names]
        print(f"{provider:<14}" + "".join(
            f"{1e6 / results.median(*key):>13.2f}" if key in results.rates
            else f"{'-':>13}" for key in keys))


def print_reached(rows):
    print("\nTargets:")
    for what, sign, target, reached in rows:
        reached = "not measured" if reached is None else f"{reached:.2f}"
        print(f"{what:<50} {sign} {target:.2f}   {reached}")


def print_targets(results, providers, long):
    def ratio(size, provider, *limit):
        return results.ratio(("7_queue", provider, size), (*limit, size))

    rows = [
        ("64 KiB, shm: bandwidth / best bare loop", ">=", 1.0,
         ratio(1 << 16, "shm", "best loop", "shm")),
        ("64 KiB, tcp: bandwidth / best bare loop", ">=", 1.0,
         ratio(1 << 16, "tcp", "best loop", "tcp")),
        ("64 KiB, tcp: bandwidth / iperf3, one stream", ">=", 1.0,
         ratio(1 << 16, "tcp", "iperf3", "")),
        ("1 MiB, tcp: bandwidth / iperf3, one stream", ">=", 1.5,
         ratio(1 << 20, "tcp", "iperf3", "")),
        (f"64 KiB, tcp, link of {LINK or 'known speed'}: bandwidth / iperf3",
         ">=", 0.98, ratio(LINK_SIZE, "link", "iperf3", "link")),
    ]
    for provider, (memory, seconds) in long.items():
        rows.append((f"{provider}: memory, {LONG} WRITEs / {LONG // 1000}",
                     "<=", 1.0, memory))
        rows.append((f"{provider}: time per WRITE, {LONG} / {LONG // 100}",
                     "<=", 1.0, seconds))
    for provider in providers:
        ratio_of_rates = results.ratio(("READ loop", provider, READ_SIZE),
                                       ("8_malloc", provider, READ_SIZE))
        rows.append((f"{provider}: latency of a READ / bare loop", "<=", 1.1,
                     ratio_of_rates))
    print_reached(rows)


def empty_chart(height=560, **parts):
    """Returns a figure and its axes, in the style of the other figures. Only this needs
    matplotlib."""
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot

    text, line = style.PALETTE["text"], style.PALETTE["line"]
    pyplot.rcParams.update({
        # Keep texts as texts, and make the same file of the same data.
        "svg.fonttype": "none", "svg.hashsalt": "chart",
        "font.size": 16, "text.color": text, "axes.labelcolor": text,
        "xtick.color": text, "ytick.color": text, "axes.edgecolor": line,
        "axes.grid": True, "grid.color": line, "grid.linewidth": 0.5})
    return pyplot.subplots(figsize=(740 / 72, height / 72), **parts)


def colour_of(number):
    """Returns the colour of a provider."""
    return style.PALETTE[["blue", "amber", "green", "red"][number % 4]]


def save_chart(figure, axes, path):
    # Put it above the axes, where no line crosses it.
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncol=2, handlelength=3,
                frameon=False)
    figure.tight_layout()
    chart = io.StringIO()
    figure.savefig(chart, format="svg", transparent=True,
                   metadata=dict.fromkeys(["Creator", "Date", "Format", "Type"]))
    with open(path, "w", encoding="utf-8") as file:
        file.write(style.themed(chart.getvalue()))


def draw(results, providers, sizes, path):
    """Draws the bandwidth over the page size, in lines that differ without colours.
    Below it, 7_queue beside the bare loop: a fifth would be lost on a logarithmic
    axis."""
    figure, (axes, beside) = empty_chart(
        720, nrows=2, sharex=True, gridspec_kw={"height_ratios": [3, 2]})
    faint = style.PALETTE["faint"]

    def line(label, program, provider, smallest=0, **look):
        shown = [size for size in sizes if size >= smallest]
        gbps = [results.median(program, provider, s) * s * 8e-9 for s in shown]
        axes.plot(shown, gbps, label=label, linewidth=2, **look)

    line("memcpy", "memcpy", "", color=faint, linestyle=":")
    line("iperf3, one stream", "iperf3", "", IPERF3_FROM, color=faint, linestyle="-.")
    for number, provider in enumerate(providers):
        look = {"color": colour_of(number), "marker": "os^D"[number % 4]}
        line(f"7_queue, {provider}", "7_queue", provider, markersize=8, **look)
        ratios = [results.ratios(("7_queue", provider, size),
                                 ("our loop", provider, size)) for size in sizes]
        medians = [statistics.median(of_size) for of_size in ratios]
        # Beside each other, where those of two providers would hide each other.
        places = [size * 2 ** (0.16 * (number - (len(providers) - 1) / 2))
                  for size in sizes]
        beside.plot(places, medians, markersize=8, linewidth=1, linestyle=":", **look)
        # From the smallest to the largest of the rounds.
        beside.vlines(places, [min(r) for r in ratios], [max(r) for r in ratios],
                      color=look["color"], linewidth=2)
    beside.axhline(1, color=faint, linewidth=2)
    beside.set_ylim(bottom=0)
    beside.set_ylabel("7_queue / bare loop", rotation_mode="anchor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    beside.set_xticks(sizes, [to_text(size) for size in sizes])
    axes.yaxis.set_major_formatter("{x:g}")
    beside.set_xlabel("page size")
    axes.set_ylabel("bandwidth in Gbps", rotation_mode="anchor")
    save_chart(figure, axes, path)


def write_results(results, name, draw_figure):
    results.write_csv(os.path.join(BUILD, f"{name}.csv"))
    print(f"\nWritten: {BUILD}/{name}.csv (all runs)")
    try:
        draw_figure(os.path.join(BUILD, f"{name}.svg"))
        print(f"Written: {BUILD}/{name}.svg")
    except ImportError as error:
        print(f"Not drawn: {BUILD}/{name}.svg ({error})")


# ---- The benchmark ----

# That of the libfabric that the programs are linked with: see the Makefile.
FI_INFO = [shutil.which(os.path.join(os.environ.get("LIBFABRIC_HOME") or "/opt/amazon/efa",
                                     "bin/fi_info")) or "fi_info", "-t", "FI_EP_RDM"]


def providers_here(command=FI_INFO):
    """Those for which the command finds an interface."""
    given = os.environ.get("PROVIDERS")
    if given:
        return given.split()

    def is_here(provider):
        done = subprocess.run(command, env=environment(provider), check=False,
                              capture_output=True)
        return done.returncode == 0
    return [p for p in ["shm", "tcp", "efa", "verbs;ofi_rxm"] if is_here(p)]


def measure_all(results, providers, sizes):
    """Measures the programs in turn, so that other work of the machine meets all
    of them. Their order is another one in each round, because what a program
    leaves behind, TCP's notes about the path for one, changes the next run."""
    progress = Progress(len(sizes) * len(providers))
    for provider in providers:
        for size in sizes:
            results.settings["our loop", provider, size] = our_settings(provider)
            results.settings["best loop", provider, size] = best_settings(
                provider, size)
            progress.step(f"settings for {provider} {to_text(size)}")

    def measure(program, provider, size):
        writes = results.writes(program, provider, size)
        if program == "7_queue":
            return measure_queue(provider, size, writes)[0]
        if program == "memcpy":
            return measure_memcpy(size, writes)
        if program == "ib_write_bw":
            return measure_write_bw(provider, size, writes)
        return measure_loop(provider, size, writes,
                            results.settings[program, provider, size])[0]

    steps = [(program, provider, size) for size in sizes
             for program, provider in [
                 ("memcpy", ""),
                 *((name, p) for name in ["7_queue", *LOOPS] for p in providers),
                 *(("ib_write_bw", p) for p in providers if has_perftest(p))]]
    progress = Progress(RUNS * (1 + len(steps)))
    ip = tcp_ip()
    for _ in range(RUNS):
        bits = measure_iperf3(ip)
        for size in sizes:
            results.add("iperf3", "", size, bits / 8 / size)
        progress.step("iperf3")
        for program, provider, size in random.sample(steps, len(steps)):
            results.add(program, provider, size, measure(program, provider, size))
            progress.step(f"{program} {provider} {to_text(size)}")


def measure_latency(results, providers):
    """8_malloc, the bare loop and perftest, in turn."""
    steps = [(program, provider) for provider in providers for program in LATENCIES
             if program != "ib_read_lat" or has_perftest(provider)]
    progress = Progress(RUNS * len(steps))
    for _ in range(RUNS):
        for program, provider in random.sample(steps, len(steps)):
            results.add(program, provider, READ_SIZE, LATENCIES[program](provider))
            progress.step(f"{program} {provider}")


def measure_long(providers):
    """Compares the memory, and the time for each WRITE, of a long transfer with
    those of a short one, which moves the same pages less often."""
    size, pages = 4096, max(1, min(1000, LONG // 1000))
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
    results = Results()
    if LINK:
        measure_link(results)
    measure_all(results, providers, sizes)
    measure_latency(results, providers)
    long = measure_long(providers)
    print_limits(results, providers, sizes)
    print_table(results, providers, sizes)
    print_latency(results, providers)
    print_targets(results, providers, long)
    write_results(results, "bench",
                  lambda path: draw(results, providers, sizes, path))


# ---- Variants ----

def changed_source(name):
    """The source of 7_queue with one change."""
    with open(os.path.join(ROOT, "src/7_queue.cpp")) as file:
        source = file.read()
    pairs = next(c[2:] for c in CHANGES if c[0] == name)
    for pattern, new in zip(pairs[::2], pairs[1::2]):
        source, count = re.subn(pattern, new, source)
        if count != 1:
            raise RuntimeError(f"variant {name}: src/7_queue.cpp matches this {count} "
                               f"times instead of once: {pattern}")
    return source


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
                # In another order each time, so that no variant always follows
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


def exit_on_signals():
    """Either way to interrupt us ends the programs that we have started. A second
    signal is ignored, because it would end the cleaning up."""
    signums = [signal.SIGINT, signal.SIGTERM]

    def interrupt(*_):
        for signum in signums:
            signal.signal(signum, signal.SIG_IGN)
        sys.exit("interrupted")
    for signum in signums:
        signal.signal(signum, interrupt)


def main():
    exit_on_signals()
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
