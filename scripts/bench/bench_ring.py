"""Measures 15_ring beside MPI_Allreduce of Open MPI, over the same provider of libfabric.

Usage: scripts/bench/bench.sh --ring    (make bench-ring)

In turn, four ranks of each sum up their arrays, and check the sums. The slowest rank
counts. Open MPI does it twice, and the second one counts, because it makes its connections
in the first one; 15_ring has made them when its clock starts. Open MPI is told to use
libfabric (its `mtl ofi`) and this provider: it would take shared memory of its own.

Variables:
  RUNS       the number of runs of each (5); the median counts
  SIZES      floats of each rank ("1048576 16777216", which are 4 and 64 MiB)
  PROVIDERS  as FI_PROVIDER takes them ("tcp"); Open MPI 4.1 can't do without tagged
             messages, so it refuses shm of libfabric 1.17
  BUILD      the folder of the programs (build); the results are written there
"""

import csv
import os
import random
import re
import statistics
import subprocess
import tempfile

from bench import BUILD, TIME_LIMIT, Progress, exit_on_signals

RUNS = int(os.environ.get("RUNS", 5))
SIZES = [int(size) for size in os.environ.get("SIZES", "1048576 16777216").split()]
PROVIDERS = os.environ.get("PROVIDERS", "tcp").split()
RANKS = 4
ROOT_TOO = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def measure(program, provider, floats):
    """Returns the seconds of the slowest rank."""
    env = {**os.environ, **ROOT_TOO, "FI_PROVIDER": provider}
    with tempfile.TemporaryDirectory() as folder:
        if program == "Open MPI":
            commands = [["mpirun", "--oversubscribe", "-n", str(RANKS), "--mca", "pml", "cm",
                         "--mca", "mtl", "ofi", "--mca", "mtl_ofi_provider_include",
                         provider.split(";")[0], f"{BUILD}/bench_allreduce", str(floats)]]
        else:
            commands = [[f"{BUILD}/15_ring", f"{folder}/run", str(rank), str(RANKS), str(floats)]
                        for rank in range(RANKS)]
        processes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True,
                                      stderr=subprocess.STDOUT) for command in commands]
        try:
            output = "".join(process.communicate(timeout=TIME_LIMIT)[0] for process in processes)
        finally:
            for process in processes:
                process.kill()
    seconds = re.findall(r"^\[\d+\] \d+ bytes in ([0-9.]+) s.*Correct\.$", output, re.M)
    if len(seconds) != RANKS:
        raise RuntimeError(f"{program} over {provider}:\n{output}")
    return max(map(float, seconds))


def main():
    exit_on_signals()
    steps = [(program, provider, size) for program in ("15_ring", "Open MPI")
             for provider in PROVIDERS for size in SIZES]
    results = {step: [] for step in steps}
    progress = Progress(RUNS * len(steps))
    for _ in range(RUNS):
        for step in random.sample(steps, len(steps)):
            results[step].append(measure(*step))
            progress.step(f"{step[0]}, {step[1]}, {step[2]} floats")
    print("\nSeconds of an all-reduce by four ranks (medians, from the least to the most):")
    for provider in PROVIDERS:
        for size in SIZES:
            ring, mpi = (results[program, provider, size] for program in ("15_ring", "Open MPI"))
            print(f"{provider}, {4 * size / 2**20:g} MiB: " + ", ".join(
                f"{name} {statistics.median(times):.4f} ({min(times):.4f} to {max(times):.4f})"
                for name, times in (("15_ring", ring), ("Open MPI", mpi))) +
                f"; Open MPI / 15_ring {statistics.median(mpi) / statistics.median(ring):.2f}")
    path = os.path.join(BUILD, "bench-ring.csv")
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["program", "provider", "floats", "run", "seconds"])
        for step, times in results.items():
            writer.writerows([*step, number, f"{time:.6f}"]
                             for number, time in enumerate(times, 1))
    print(f"\nWritten: {path} (all runs)")


if __name__ == "__main__":
    main()
