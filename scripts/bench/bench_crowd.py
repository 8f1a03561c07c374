"""Measures 13_crowd, beside the same server with an endpoint for each client, and redis.
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

Variables:
  CLIENTS  how many ("1 10 100")
  COUNT    requests of a run, of all clients together (100000)
"""

import csv
import io
import os
import re
import shutil
import statistics
import subprocess

import bench
from bench import BUILD, ROOT, background, read_until, show

CLIENTS = sorted(int(number) for number in os.environ.get("CLIENTS", "1 10 100").split())
COUNT = int(os.environ.get("COUNT", 100000))
# As long as a text of 13_crowd: "12345678901234567890, text 123".
KEY = "key of client __rand_int__"  # redis-benchmark puts 12 digits there
VALUE_SIZE = 30
# Of a run: requests a second, half and 99 % of the times up to so many us, the most
# memory that the server ever had, and its CPU time for a request, in us.
MEASURED = ["requests/s", "median us", "99 % us", "MB", "CPU us each"]


def programs():
    """The servers that are ours. Builds that with an endpoint for each client."""
    source = subprocess.run(
        [f"{ROOT}/scripts/carry.py", "state", "bench/crowd_endpoints"],
        check=True, capture_output=True, text=True).stdout
    return {"one endpoint": f"{BUILD}/13_crowd",
            "an endpoint each": bench.build_variant("endpoints", "13_crowd", source)}


def cpu_seconds(process):
    with open(f"/proc/{process.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(process):
    with open(f"/proc/{process.pid}/status") as file:
        return int(re.search(r"VmHWM:\s*(\d+) kB", file.read())[1]) * 1024e-6


def measure_crowd(program, provider, clients):
    requests = max(1, COUNT // clients)
    with background(bench.TARGET, provider, program) as server:
        address = bench.server_address(server)
        with background(bench.WRITER, provider, program, address, str(clients),
                        str(requests)) as client:
            # To open endpoints is not what is measured.
            read_until(client, "clients are connected")
            cpu = cpu_seconds(server)
            replies, *found = map(float, read_until(
                client, r"(\d+) texts, all correct, (\d+) a second: half of the answers "
                        r"took up to (\d+) us, 99 % up to (\d+) us").groups())
            cpu = cpu_seconds(server) - cpu
            return dict(zip(MEASURED, [*found, memory_mb(server), cpu / replies * 1e6]))


def measure_redis(clients):
    port = bench.free_port()
    with background(bench.TARGET, "", "redis-server", "--port", port, "--bind", "127.0.0.1",
                    "--save", "", "--appendonly", "no") as server:
        read_until(server, "Ready to accept connections")
        cpu = cpu_seconds(server)
        rows = []
        for command in [["SET", KEY, "v" * VALUE_SIZE], ["GET", KEY]]:
            output = bench.run(bench.WRITER, "", "redis-benchmark", "-h", "127.0.0.1", "-p",
                               port, "-c", str(clients), "-n", str(COUNT), "-r", str(clients),
                               "--csv", *command)
            rows.append(next(csv.DictReader(io.StringIO(output))))
        cpu = cpu_seconds(server) - cpu
        memory = memory_mb(server)

    def us(column):
        return statistics.mean(float(row[column]) for row in rows) * 1e3
    # As many of both, one kind after the other.
    rate = statistics.harmonic_mean([float(row["rps"]) for row in rows])
    return dict(zip(MEASURED, [rate, us("p50_latency_ms"), us("p99_latency_ms"), memory,
                               cpu / (2 * COUNT) * 1e6]))


def main():
    bench.exit_on_signals()
    steps, servers, providers = {}, programs(), bench.providers_here()
    with_redis = shutil.which("redis-server") and shutil.which("redis-benchmark")
    if not with_redis:
        print("Without redis.")
    for n in CLIENTS:
        for p in providers:
            for name, path in servers.items():
                steps[name, p, n] = lambda path=path, p=p, n=n: measure_crowd(path, p, n)
        if with_redis:
            steps["redis", "", n] = lambda n=n: measure_redis(n)
    results = bench.Results("program", "provider", "clients", "what")
    results.measure(steps)
    bench.print_table("Medians of the runs:", [["clients", "provider", "program", *MEASURED], *(
        [str(n), p, name, *(show(results.median(name, p, n, what), int("us each" in what))
                            for what in MEASURED)] for name, p, n in steps)])
    results.write("bench-crowd")


if __name__ == "__main__":
    main()
