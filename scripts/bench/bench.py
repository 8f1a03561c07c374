"""What the benchmarks share: they run programs, measure them in turn, and print what they
have found. Variables of all:
  RUNS   the number of runs of each (3); the median counts
  BUILD  the folder of the programs (build)
"""

import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"))
RUNS = int(os.environ.get("RUNS", 3))
TIME_LIMIT = 300  # s; a run that takes longer has failed
# Otherwise two processes of one host use shared memory.
os.environ.setdefault("FI_EFA_ENABLE_SHM_TRANSFER", "0")

# A core for each side: otherwise the scheduler's placement would decide the results. The
# next one may be half of the first.
CORES = sorted(os.sched_getaffinity(0))
WRITER, TARGET = CORES[0], CORES[min(2, len(CORES) - 1)]


# ---- Running programs ----

def environment(provider):
    return {**os.environ, **({"FI_PROVIDER": provider} if provider else {})}


@contextlib.contextmanager
def background(core, provider, *command):
    """Starts a program, and ends it at the end of the block. Its output can be read
    from stdout."""
    # setpriv ends the program even if we are killed, and timeout if it hangs. Without
    # --foreground it would send two signals, and the second leaves shared memory behind.
    with subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", "timeout", "--foreground", "-k", "5",
             str(TIME_LIMIT), "taskset", "-c", str(core), *command],
            env=environment(provider), text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate()


def run(core, provider, *command):
    """Runs a program to its end; returns what it printed."""
    with background(core, provider, *command) as process:
        output = process.stdout.read()
        process.wait()
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


def exit_on_signals():
    """Either way to interrupt us ends the programs that we have started."""
    def interrupt(*_):
        sys.exit("interrupted")
    for signum in signal.SIGINT, signal.SIGTERM:
        signal.signal(signum, interrupt)


# ---- Results ----

class Results(dict):
    """Values by keys. The values of a key are in the order of the rounds, so that those of
    two keys can be compared in pairs."""

    def measure(self, steps):
        """Calls each step RUNS times, in another order in each round, so that other work
        of the machine meets all of them, and so does what one leaves behind."""
        shown = time.monotonic()
        for number in range(RUNS):
            for done, key in enumerate(random.sample([*steps], len(steps)),
                                       number * len(steps)):
                value = steps[key]()
                self.setdefault(key, []).append(value)
                if time.monotonic() - shown > 10:
                    shown = time.monotonic()
                    print(f"[{100 * done // (RUNS * len(steps)):2}%]", *key, flush=True)

    def ratio(self, key, other):
        """The median over the rounds."""
        return statistics.median(a / b for a, b in zip(self[key], self[other]))


def print_table(rows):
    """The first row has the heads."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    print()
    for first, *others in rows:
        print("  ".join([first.ljust(widths[0]),
                         *(text.rjust(width) for text, width in zip(others, widths[1:]))]))


def to_bytes(text):
    """64K is 65536."""
    factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1].upper(), 1)
    return int(text.rstrip("KMkm")) * factor


def to_text(size):
    if size % (1 << 20) == 0:
        return f"{size >> 20} MiB"
    return f"{size >> 10} KiB" if size % (1 << 10) == 0 else f"{size} B"
