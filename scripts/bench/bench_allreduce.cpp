// MPI_Allreduce of the floats of 15_ring, which prints what 15_ring prints: see bench_ring.py.
//
// Usage: mpirun -n N bench_allreduce FLOATS

#define OMPI_SKIP_MPICXX  // the old C++ bindings, which have warnings
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, num_ranks;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &num_ranks);
  int num_floats = argc > 1 ? atoi(argv[1]) : 16 << 20;
  std::vector<float> data(num_floats);
  double start = 0;
  // The second one counts: the first one makes the connections.
  for (int run = 0; run < 2; ++run) {
    for (int i = 0; i < num_floats; ++i) {
      data[i] = float((rank + 1) * (i % 4093));
    }
    MPI_Barrier(MPI_COMM_WORLD);
    start = MPI_Wtime();
    MPI_Allreduce(MPI_IN_PLACE, data.data(), num_floats, MPI_FLOAT, MPI_SUM,
                  MPI_COMM_WORLD);
  }
  double seconds = MPI_Wtime() - start;
  bool correct = true;
  for (int i = 0; i < num_floats; ++i) {
    correct &= data[i] == float(num_ranks * (num_ranks + 1) / 2 * (i % 4093));
  }
  printf("[%d] %zu bytes in %.6f s. %s.\n", rank, num_floats * sizeof(float),
         seconds, correct ? "Correct" : "WRONG");
  MPI_Finalize();
  return correct ? 0 : 1;
}
