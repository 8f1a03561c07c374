"""What the benchmarks share: they run programs, measure them in turn, and print what they
have found. Variables of all:
  RUNS       the number of runs of each (3); the median counts
  PROVIDERS  as FI_PROVIDER takes them (by default those of shm, tcp, efa and
             verbs;ofi_rxm that are here)
  BUILD      the folder of the programs (build); the results are written there
"""

import contextlib
import csv
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
BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"))
RUNS = int(os.environ.get("RUNS", 3))
# Otherwise two processes of one host use shared memory.
PROVIDER_ENV = {"efa": {"FI_EFA_ENABLE_SHM_TRANSFER": "0"}}
# A run that takes longer, in seconds, has failed.
TIME_LIMIT = 300


# ---- Running programs ----

# A core for each side: otherwise the scheduler's placement would decide the results. The
# next one may be half of the first.
CORES = sorted(os.sched_getaffinity(0))
WRITER, TARGET = CORES[0], CORES[min(2, len(CORES) - 1)]
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


def server_address(server):
    """One, or several with commas in between."""
    read_until(server, "^Run the client")
    return read_until(server, r" ([0-9a-f,]+)( FILE)?\n").group(1)


def build_variant(name, program, source):
    """Builds a changed program as the others are, in a folder with a src of its own.
    Returns its path."""
    folder = os.path.join(BUILD, "bench", name)
    path = f"{folder}/src/{program}.cpp"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(source)
    subprocess.run(["make", "-s", "-C", folder, "-f", f"{ROOT}/Makefile",
                    f"BUILD={folder}", f"{folder}/{program}"], check=True)
    return f"{folder}/{program}"


# That of the libfabric that the programs are linked with: see the Makefile.
FI_INFO = shutil.which(os.path.join(os.environ.get("LIBFABRIC_HOME") or "/opt/amazon/efa",
                                    "bin/fi_info")) or "fi_info"


def providers_here():
    """Those for which libfabric finds an interface."""
    return os.environ.get("PROVIDERS", "").split() or [
        provider for provider in ["shm", "tcp", "efa", "verbs;ofi_rxm"]
        if subprocess.run([FI_INFO, "-t", "FI_EP_RDM"], env=environment(provider),
                          check=False, capture_output=True).returncode == 0]


# ---- What several benchmarks measure ----

def to_bytes(text):
    """64K is 65536."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1].upper(), 1)
    return int(text.rstrip("KMGkmg")) * factor


def num_pages(size):
    """What the pages of a run may need: no more than 7_queue serves a client with."""
    return max(1, min(2000, (64 << 20) // size))


def measure_queue(provider, size, writes, program=f"{BUILD}/7_queue"):
    """7_queue, in pages a second."""
    pages = max(1, min(num_pages(size), round(writes)))
    repeat = max(1, round(writes / pages))
    with background(WRITER, provider, program) as server:
        run(TARGET, provider, program, server_address(server), str(size), str(pages),
            str(repeat))
        seconds, gbps, mpps = map(float, read_until(
            server, r"\[([0-9.]+)s\] WRITE: 100%.* bw=([0-9.]+).* ([0-9.]+)Mpps").groups())
    # All three have three decimals, so the largest is the most exact.
    return max((mpps, mpps * 1e6), (gbps, gbps * 1e9 / 8 / size),
               (seconds, pages * repeat / max(seconds, 1e-3)))[1]


def free_port():
    with socket.socket() as free:
        free.bind(("", 0))
        return str(free.getsockname()[1])


def measure_iperf3():
    """One stream; returns bits a second."""
    port = free_port()
    with background(TARGET, "", "iperf3", "--server", "--one-off", "--bind", "127.0.0.1",
                    "--port", port, "--forceflush") as server:
        read_until(server, "^Server listening")
        output = run(WRITER, "", "iperf3", "--client", "127.0.0.1", "--port", port, "--time", "1",
                     "--json")
    return json.loads(output)["end"]["sum_received"]["bits_per_second"]


# ---- Results ----

class Results:
    """Values by keys of several parts, which the columns name. The values of a key are in
    the order of the rounds, so that those of two keys can be compared in pairs."""

    def __init__(self, *columns):
        self.columns = columns
        self.values = {}

    def measure(self, steps):
        """Calls each step RUNS times, in another order in each round, so that other work
        of the machine meets all of them, and so does what one leaves behind. A step
        returns a value, or several by what they are, the last part of their keys."""
        shown = time.monotonic()
        for number in range(RUNS):
            for done, key in enumerate(random.sample([*steps], len(steps)),
                                       number * len(steps)):
                found = steps[key]()
                for what, value in found.items() if isinstance(found, dict) else [((), found)]:
                    self.values.setdefault((*key, what) if what else key, []).append(value)
                if time.monotonic() - shown > 10:
                    shown = time.monotonic()
                    print(f"[{100 * done // (RUNS * len(steps)):2}%]", *key, flush=True)

    def median(self, *key):
        return statistics.median(self.values[key]) if key in self.values else None

    def ratios(self, key, other):
        """Those of the rounds."""
        return [a / b for a, b in zip(self.values.get(key, []), self.values.get(other, []))]

    def ratio(self, key, other):
        """The median over the rounds; None if either was not measured."""
        ratios = self.ratios(key, other)
        return statistics.median(ratios) if ratios else None

    def write(self, name):
        """Each run."""
        path = os.path.join(BUILD, f"{name}.csv")
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*self.columns, "run", "value"])
            for key, values in self.values.items():
                writer.writerows([*key, number, f"{value:.6g}"]
                                 for number, value in enumerate(values, 1))
        print(f"\nWritten: {path} (all runs)")


def show(value, decimals=2):
    return "-" if value is None else f"{value:.{decimals}f}"


def print_table(title, rows):
    """The first row has the heads."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    print(f"\n{title}")
    for first, *others in rows:
        print("  ".join([first.ljust(widths[0]),
                         *(text.rjust(width) for text, width in zip(others, widths[1:]))]))


def to_text(size):
    if size % (1 << 20) == 0:
        return f"{size >> 20} MiB"
    return f"{size >> 10} KiB" if size % (1 << 10) == 0 else f"{size} B"


def exit_on_signals():
    """Either way to interrupt us ends the programs that we have started."""
    def interrupt(*_):
        sys.exit("interrupted")
    for signum in signal.SIGINT, signal.SIGTERM:
        signal.signal(signum, interrupt)
