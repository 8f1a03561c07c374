"""Measures 13_crowd, beside the same server with an endpoint for each client, and redis.

Usage: scripts/bench/bench.sh --crowd   (make bench-crowd)

In turn, each with 1, 10 and 100 clients in one process, which ask for one thing at a
time:
  one endpoint      13_crowd,
  an endpoint each  13_crowd changed by crowd_endpoints.patch,
  redis             redis-server and redis-benchmark over TCP: as many SETs, then as many
                    GETs, with values as long as the texts of 13_crowd. Its times
                    are the means of both. Don't compare them with ours: each client
                    asks once in CLIENTS / (requests a second), and with 100 clients
                    redis-benchmark counts half of that, and 13_crowd nearly all.
The server has one core, and the clients have another one, where there are two. All
clients of a run share theirs, so what they can do limits the requests a second, too.

Targets, for the most clients:
  requests a second, one endpoint / redis          >= 0.9
  99th percentile, one endpoint / an endpoint each <= 1.0

Variables:
  RUNS       the number of runs of each (5); the median counts
  CLIENTS    how many ("1 10 100")
  COUNT      requests of a run, of all clients together (100000)
  PROVIDERS  as FI_PROVIDER takes them (by default those of shm, tcp, efa and
             verbs;ofi_rxm that are here)
  REDIS      its server (redis-server); empty: without redis
  PRIORITY   runs all of them before the other work of a busy machine, as `chrt -f` does
             (none); 10, for example, for which one has to be root
  BUILD      the folder of the programs (build); the results are written there
"""

import collections
import csv
import filecmp
import io
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

import bench
from bench import BUILD, ROOT, Progress, background, read_until

RUNS = int(os.environ.get("RUNS", 5))
CLIENTS = sorted(int(number) for number in os.environ.get("CLIENTS", "1 10 100").split())
COUNT = int(os.environ.get("COUNT", 100000))
REDIS = os.environ.get("REDIS", "redis-server")
PRIORITY = int(os.environ.get("PRIORITY") or 0)
PROGRAM = os.path.join(BUILD, "13_crowd")
VARIANT = os.path.join(bench.variant_folder("endpoints"), "13_crowd")
PATCH = f"{ROOT}/scripts/bench/crowd_endpoints.patch"
PROGRAMS = {"one endpoint": PROGRAM, "an endpoint each": VARIANT}
# As long as a text of 13_crowd: "12345678901234567890, text 123".
KEY = "key of client __rand_int__"  # redis-benchmark puts 12 digits there
VALUE_SIZE = 30

# Of a run: requests a second, half and 99 % of the times up to so many us, the most
# memory that the server ever had, in MB, and its CPU time for a request, in us.
Measured = collections.namedtuple(
    "Measured", ["requests_per_second", "median_us", "p99_us", "memory_mb", "cpu_us"])


def build_variant():
    """Builds the server with an endpoint for each client."""
    folder = os.path.dirname(VARIANT)
    os.makedirs(os.path.join(folder, "src"), exist_ok=True)
    # git applies nothing to files in a repository that are not in its index.
    with tempfile.TemporaryDirectory() as scratch:
        os.mkdir(f"{scratch}/src")
        shutil.copy(f"{ROOT}/src/13_crowd.cpp", f"{scratch}/src")
        subprocess.run(["git", "apply", PATCH], cwd=scratch, check=True)
        new, old = (f"{place}/src/13_crowd.cpp" for place in [scratch, folder])
        # To build it takes longer than some runs.
        if not os.path.exists(old) or not filecmp.cmp(new, old, shallow=False):
            shutil.copy(new, old)
    subprocess.run(["make", "-s", "-C", folder, "-f", f"{ROOT}/Makefile",
                    f"BUILD={folder}", VARIANT], check=True)


# ---- What is measured ----

def start(core, provider, *command):
    first = ["chrt", "-f", str(PRIORITY)] if PRIORITY else []
    return background(core, provider, *first, *command)


def before_all():
    """Has us look when it's time to, although all cores are busy."""
    if PRIORITY:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY + 1))


def cpu_seconds(process):
    with open(f"/proc/{process.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(process):
    with open(f"/proc/{process.pid}/status") as file:
        return int(re.search(r"VmHWM:\s*(\d+) kB", file.read())[1]) * 1024e-6


def measure_crowd(program, provider, clients):
    path = PROGRAMS[program]
    requests = max(1, COUNT // clients)
    with start(bench.TARGET, provider, path) as server:
        address = bench.server_address(server)
        with start(bench.WRITER, provider, path, address, str(clients),
                   str(requests)) as client:
            # To open endpoints is not what is measured.
            read_until(client, "clients are connected")
            cpu = cpu_seconds(server)
            found = read_until(client, r"(\d+) texts, all correct, (\d+) a second: half of "
                                       r"the answers took up to (\d+) us, 99 % up to (\d+) us")
            cpu = cpu_seconds(server) - cpu
            replies, *rates = [float(text) for text in found.groups()]
            return Measured(*rates, memory_mb(server), cpu / replies * 1e6)


def measure_redis(clients):
    port = bench.free_port("127.0.0.1")
    with start(bench.TARGET, "", REDIS, "--port", port, "--bind", "127.0.0.1",
               "--save", "", "--appendonly", "no") as server:
        read_until(server, "Ready to accept connections")
        cpu = cpu_seconds(server)
        rows = []
        for command in [["SET", KEY, "v" * VALUE_SIZE], ["GET", KEY]]:
            with start(bench.WRITER, "", "redis-benchmark", "-h", "127.0.0.1", "-p",
                       port, "-c", str(clients), "-n", str(COUNT), "-r", str(clients),
                       "--csv", *command) as client:
                output = client.stdout.read()
            rows.append(next(csv.DictReader(io.StringIO(output))))
        cpu = cpu_seconds(server) - cpu
        memory = memory_mb(server)

    def mean(column):
        return statistics.mean(float(row[column]) for row in rows)
    # As many of both, one kind after the other.
    rate = statistics.harmonic_mean([float(row["rps"]) for row in rows])
    return Measured(rate, mean("p50_latency_ms") * 1e3, mean("p99_latency_ms") * 1e3,
                    memory, cpu / (2 * COUNT) * 1e6)


# ---- Results ----

class Results:
    """What the runs have measured, by program, provider and clients, in the order of
    the rounds, so that those of two programs can be compared in pairs."""

    def __init__(self):
        self.runs = {}

    def add(self, key, measured):
        self.runs.setdefault(key, []).append(measured)

    def all(self, key, field):
        return [getattr(measured, field) for measured in self.runs.get(key, [])]

    def ratio(self, key, other, field):
        """The median over the rounds; None if either was not measured."""
        ratios = [a / b for a, b in zip(self.all(key, field), self.all(other, field))]
        return statistics.median(ratios) if ratios else None

    def write_csv(self, path):
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["program", "provider", "clients", "run", *Measured._fields])
            for key, runs in self.runs.items():
                for number, measured in enumerate(runs, 1):
                    writer.writerow([*key, number, *(f"{x:.2f}" for x in measured)])


def print_table(results, providers):
    print("\nMedians of the runs; of requests a second also the least and the most:")
    print(f"{'clients':>7}  {'provider':<14}{'program':<17} {'requests/s':>10} "
          f"{'least':>8} {'most':>8} {'median us':>9} {'99 % us':>8} {'MB':>7} "
          f"{'CPU us each':>11}")
    for clients in CLIENTS:
        for program, provider in [*((program, provider) for provider in providers
                                    for program in PROGRAMS), ("redis", "")]:
            key = (program, provider, clients)
            if key not in results.runs:
                continue
            rate, median, p99, memory, cpu = (
                statistics.median(results.all(key, field)) for field in Measured._fields)
            rates = results.all(key, "requests_per_second")
            print(f"{clients:>7}  {provider:<14}{program:<17} {rate:>10.0f} "
                  f"{min(rates):>8.0f} {max(rates):>8.0f} {median:>9.0f} {p99:>8.0f} "
                  f"{memory:>7.1f} {cpu:>11.1f}")


def print_targets(results, providers):
    most = CLIENTS[-1]
    rows = []
    for provider in providers:
        ours = ("one endpoint", provider, most)
        rows += [
            (f"{provider}, {most} clients: requests/s / redis", ">=", 0.9,
             results.ratio(ours, ("redis", "", most), "requests_per_second")),
            (f"{provider}, {most} clients: 99 % / an endpoint each", "<=", 1.0,
             results.ratio(ours, ("an endpoint each", provider, most), "p99_us"))]
    bench.print_reached(rows)


def main():
    bench.exit_on_signals()
    if sys.argv[1:]:
        sys.exit(__doc__)
    providers = bench.providers_here([PROGRAM, "--list"])
    build_variant()
    before_all()
    steps = [(program, provider, clients) for clients in CLIENTS
             for provider in providers for program in PROGRAMS]
    if REDIS and shutil.which(REDIS) and shutil.which("redis-benchmark"):
        steps += [("redis", "", clients) for clients in CLIENTS]
    else:
        print("Without redis.")
    results = Results()
    progress = Progress(RUNS * len(steps))
    for _ in range(RUNS):
        for key in random.sample(steps, len(steps)):
            program, provider, clients = key
            results.add(key, measure_redis(clients) if program == "redis"
                        else measure_crowd(*key))
            progress.step(f"{program} {provider}, {clients} clients")
    print_table(results, providers)
    print_targets(results, providers)
    path = os.path.join(BUILD, "bench-crowd.csv")
    results.write_csv(path)
    print(f"\nWritten: {path} (all runs)")


if __name__ == "__main__":
    main()
