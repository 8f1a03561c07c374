"""Measures 15_ring beside MPI_Allreduce of Open MPI, over the same provider of libfabric:
the seconds in which four ranks sum up their arrays. The slowest rank counts. Open MPI does it
twice, and the second time counts, because it makes its connections in the first; 15_ring has
made them when its clock starts. Open MPI is told to use libfabric (its `mtl ofi`) and this
provider: it would take shared memory of its own.

Variables:
  SIZES      bytes of each rank (4M 64M)
  PROVIDERS  as FI_PROVIDER takes them (tcp); Open MPI 4.1 refuses shm of libfabric 1.17
"""

import os
import re
import statistics
import subprocess
import tempfile

import bench
from bench import BUILD

SIZES = [bench.to_bytes(size) for size in os.environ.get("SIZES", "4M 64M").split()]
PROVIDERS = os.environ.get("PROVIDERS", "tcp").split()
PROGRAMS = ["15_ring", "Open MPI"]
RANKS = 4


def commands(program, provider, size, folder):
    if program == "Open MPI":
        return [["mpirun", "--oversubscribe", "-n", str(RANKS), "--mca", "pml", "cm", "--mca",
                 "mtl", "ofi", "--mca", "mtl_ofi_provider_include", provider.split(";")[0],
                 f"{BUILD}/bench_allreduce", str(size // 4)]]
    return [[f"{BUILD}/15_ring", f"{folder}/run", str(rank), str(RANKS), str(size // 4)]
            for rank in range(RANKS)]


def measure(program, provider, size):
    """Returns the seconds of the slowest rank."""
    env = {**bench.environment(provider), "OMPI_ALLOW_RUN_AS_ROOT": "1",
           "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with tempfile.TemporaryDirectory() as folder:
        processes = [subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT)
                     for command in commands(program, provider, size, folder)]
        try:
            output = "".join(process.communicate(timeout=bench.TIME_LIMIT)[0]
                             for process in processes)
        finally:
            for process in processes:
                process.kill()
    seconds = re.findall(r"^\[\d+\] \d+ bytes in ([0-9.]+) s.*Correct\.$", output, re.M)
    if len(seconds) != RANKS:
        raise RuntimeError(f"{program} over {provider}:\n{output}")
    return max(map(float, seconds))


def main():
    bench.exit_on_signals()
    results = bench.Results()
    results.measure({(program, provider, size): lambda key=(program, provider, size): measure(*key)
                     for program in PROGRAMS for provider in PROVIDERS for size in SIZES})
    rows = [["seconds: median, least, most", *PROGRAMS, "ratio"]]
    for provider in PROVIDERS:
        for size in SIZES:
            ring, mpi = ((program, provider, size) for program in PROGRAMS)
            rows.append([
                f"{provider}, {bench.to_text(size)}",
                *(" ".join(f"{seconds:.2f}" for seconds in [
                    statistics.median(results[key]), min(results[key]), max(results[key])])
                  for key in (ring, mpi)), f"{results.ratio(mpi, ring):.1f}"])
    bench.print_table(rows)


if __name__ == "__main__":
    main()
