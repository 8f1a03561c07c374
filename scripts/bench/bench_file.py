"""Measures 9_file, and beside it what this machine can do with a file. From memory to
memory, because the files are on a tmpfs, all in turn:
  9_file     for each provider and number of slots; and with a disk that takes the receiver
             2 ms longer for each chunk: while that saves some, other slots are filled,
  socat      the same file through a TCP socket.
Every program may use all cores, as they do outside a benchmark: the threads of
9_file that read and write the file would not fit on the cores of its pollers.

Variables:
  FILE_SIZE  of the file (1G); /dev/shm must have room for two and a half of it
  SLOTS      numbers of slots ("1 2 4 8 16")
"""

import contextlib
import os
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
SLOW_DISK_MS = 2
SOCAT_BLOCK = 1 << 20    # bytes; of 8K to 4M the fastest


@contextlib.contextmanager
def new_file():
    """Makes a file. Yields its path."""
    room = shutil.disk_usage(MEMORY).free
    if room < 2.5 * FILE_SIZE:
        sys.exit(f"{MEMORY} has room for {room >> 20} MiB. FILE_SIZE must be "
                 f"{int(room / 2.5) >> 20}M at most.")
    with tempfile.TemporaryDirectory(prefix="bench-file.", dir=MEMORY) as folder:
        os.mkdir(f"{folder}/target")
        block = os.urandom(1 << 20)
        with open(f"{folder}/source", "wb") as file:
            for start in range(0, FILE_SIZE, len(block)):
                file.write(block[:FILE_SIZE - start])
        yield f"{folder}/source"


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

def gbps(started_at):
    return FILE_SIZE * 8e-9 / (time.monotonic() - started_at)


def measure_file(provider, source, slots, *disk):
    """9_file, by its client's clock: from its first message until the file is
    saved."""
    with target_of(source) as target:
        with background(ANY_CORE, provider, *disk, f"{BUILD}/9_file",
                        os.path.dirname(target)) as server:
            output = run(ANY_CORE, provider, f"{BUILD}/9_file",
                         bench.server_address(server), source, str(slots))
    return float(re.search(r"^Sent .* ([0-9.]+) Gbps", output, re.M)[1])


def measure_socat(source):
    """From the start of the sender until the receiver has ended."""
    port = bench.free_port()
    # With -d -d it says when it listens.
    socat = ["socat", "-d", "-d", "-u", "-b", str(SOCAT_BLOCK)]
    with target_of(source) as target:
        with background(ANY_CORE, "", *socat, f"TCP4-LISTEN:{port},bind=127.0.0.1",
                        f"OPEN:{target},creat,wronly") as receiver:
            bench.read_until(receiver, "listening on")
            started_at = time.monotonic()
            run(ANY_CORE, "", *socat, f"OPEN:{source},rdonly", f"TCP4:127.0.0.1:{port}")
            receiver.wait(bench.TIME_LIMIT)
            return gbps(started_at)


# ---- The benchmark ----

def slow(provider):
    return f"{provider}, disk of {SLOW_DISK_MS} ms"


def measure_all(providers, source):
    steps = {("socat", "", ""): lambda: measure_socat(source)}
    for p in providers:
        for n in SLOTS:
            steps["9_file", p, n] = lambda p=p, n=n: measure_file(p, source, n)
            steps["9_file", slow(p), n] = lambda p=p, n=n: measure_file(
                p, source, n, "env", f"SLOW_DISK_MS={SLOW_DISK_MS}")
    results = bench.Results("program", "place", "slots")
    results.measure(steps)
    return results


def print_all(results, providers):
    rows = [["", "slots", "Gbps", "/ 1 slot", "/ socat"]]
    for place in [*providers, *map(slow, providers)]:
        for slots in SLOTS:
            key = ("9_file", place, slots)
            rows.append([place, str(slots), show(results.median(*key), 3),
                         *(show(results.ratio(key, other))
                           for other in [("9_file", place, 1), ("socat", "", "")])])
    bench.print_table(f"9_file, and its ratio to others (medians; {FILE_SIZE * 1e-6:.3f} MB):",
                      rows)
    print(f"socat: {results.median('socat', '', ''):.3f} Gbps")


def main():
    bench.exit_on_signals()
    providers = bench.providers_here()
    with new_file() as source:
        results = measure_all(providers, source)
    print_all(results, providers)
    results.write("bench-file")


if __name__ == "__main__":
    main()
