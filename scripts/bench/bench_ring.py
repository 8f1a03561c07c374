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
import subprocess
import tempfile

import bench
from bench import BUILD, show

SIZES = [bench.to_bytes(size) for size in os.environ.get("SIZES", "4M 64M").split()]
PROVIDERS = os.environ.get("PROVIDERS", "tcp").split()
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
    results = bench.Results("program", "provider", "size")
    results.measure({(program, provider, size): lambda key=(program, provider, size): measure(*key)
                     for program in ("15_ring", "Open MPI") for provider in PROVIDERS
                     for size in SIZES})
    for provider in PROVIDERS:
        keys = [[(program, provider, size) for program in ("15_ring", "Open MPI")]
                for size in SIZES]
        bench.print_table(f"{provider}, seconds (medians), and Open MPI's by those of 15_ring:", [
            ["bytes", "15_ring", "Open MPI", "ratio"],
            *([bench.to_text(ring[2]), show(results.median(*ring), 4),
               show(results.median(*mpi), 4), show(results.ratio(mpi, ring))]
              for ring, mpi in keys)])
    results.write("bench-ring")


if __name__ == "__main__":
    main()
