// Tries the Allocator of 8_malloc: random calls, beside a model that is too simple
// to be wrong, a list of what is lent. And a client's pieces have to be declared
// before its session: then they come back after its endpoint is closed. Exits with 1
// and a line if something is wrong.
//
// Usage: allocator [CALLS [SEED]]

// Everything but its main().
#define main MallocMain
#include "../../src/8_malloc.cpp"
#undef main

using Pieces = std::map<size_t, size_t>;  // sizes by offsets

struct Trial {
  size_t pool_size;
  std::mt19937_64 random;
  Allocator allocator{pool_size};
  Pieces lent = {};

  void Check(bool right, const char* what) const {
    if (right) return;
    printf("wrong: %s; a pool of %zu bytes, %zu pieces lent\n", what, pool_size,
           lent.size());
    exit(1);
  }

  // What lies between the pieces that are lent.
  Pieces Gaps() const {
    Pieces gaps;
    size_t at = 0;
    for (auto [offset, size] : lent) {
      if (offset > at) gaps[at] = offset - at;
      at = offset + size;
    }
    if (pool_size > at) gaps[at] = pool_size - at;
    return gaps;
  }

  void Alloc() {
    // Most are no longer than 1 MiB, some are short, some as long as the pool.
    size_t limits[] = {200, pool_size + 50, 1 << 20, 1 << 20, 1 << 20};
    size_t size = 1 + random() % limits[random() % std::size(limits)];
    std::optional<size_t> offset = allocator.Alloc(size);
    // As whole lines of the cache.
    size = (size + kPieceAlign - 1) / kPieceAlign * kPieceAlign;
    Pieces gaps = Gaps();
    size_t best = SIZE_MAX;  // the smallest gap that is large enough
    for (auto [at, room] : gaps) {
      if (room >= size) best = std::min(best, room);
    }
    if (!offset) {
      Check(best == SIZE_MAX, "nothing is lent, but there was room");
      return;
    }
    Check(gaps.contains(*offset) && gaps[*offset] == best,
          "not the beginning of the smallest free piece that is large enough");
    lent[*offset] = size;
  }

  void Free(Pieces::iterator piece) {
    allocator.Free(piece->first);
    lent.erase(piece);
  }

  void Run(size_t calls) {
    for (size_t i = 0; i < calls; ++i) {
      // In turn, more comes than goes, and more goes than comes.
      size_t allocs = i / 4096 % 2 == 0 ? 44 : 24;  // of 64 calls
      if (random() % 64 < allocs) {
        Alloc();
      } else if (!lent.empty()) {
        Free(std::next(lent.begin(), ptrdiff_t(random() % lent.size())));
      }
      if (i % 100 != 0) continue;
      Check(allocator.lent == lent, "the pieces that are lent");
      Check(allocator.free == Gaps(), "the free pieces");
    }
    while (!lent.empty()) Free(lent.begin());
    Check(allocator.free == Pieces{{0, pool_size}},
          "the pool is not whole in the end");
  }
};

int main(int argc, char** argv) {
  size_t calls = argc > 1 ? strtoul(argv[1], nullptr, 10) : 1'000'000;
  uint64_t seed =
      argc > 2 ? strtoul(argv[2], nullptr, 10) : std::random_device{}();
  size_t sizes[] = {kPieceAlign, 4096, 1'000'000, 1 << 20, 16 << 20, kPoolSize};
  setvbuf(stdout, nullptr, _IOLBF, 0);
  printf("seed %lu\n", seed);
  for (size_t size : sizes) {
    Trial trial{size, std::mt19937_64(seed)};
    trial.Run(calls / std::size(sizes));
  }
  Domain domain(false);
  Pool pool(domain, 4096, FI_REMOTE_WRITE);
  Session listener(domain);
  ServedClient client(domain, 1, listener.endpoint.addr, pool);
  if (static_cast<void*>(&client.loan) > static_cast<void*>(&client.session)) {
    printf("wrong: a piece comes back before the endpoint is closed\n");
    return 1;
  }
  printf("all as it should be\n");
}
