// Tries the Allocator of 8_malloc: random calls, beside a model that is too simple
// to be wrong, a sorted list of what is lent. Then lets a client go, whose pieces
// must still be lent when its endpoint is closed. Exits with 1 and a line if
// something is wrong.
//
// Usage: allocator [CALLS [SEED]]

#include <rdma/fabric.h>

#include <functional>

// Called when an endpoint is closed.
std::function<void()> g_on_close;

int LoggingClose(struct fid* fid) {
  if (fid->fclass == FI_CLASS_EP && g_on_close) g_on_close();
  return fi_close(fid);
}

// Everything but its main().
#define fi_close LoggingClose
#define main MallocMain
#include "../../src/8_malloc.cpp"
#undef main

struct Piece {
  size_t offset;
  size_t size;
  bool operator==(const Piece&) const = default;
};

struct Trial {
  size_t pool_size;
  std::mt19937_64 random;
  Allocator allocator{pool_size};
  std::vector<Piece> lent = {};  // by offset

  void Check(bool right, const char* what) const {
    if (right) return;
    printf("wrong: %s; a pool of %zu bytes, %zu pieces lent\n", what, pool_size,
           lent.size());
    exit(1);
  }

  // What lies between the pieces that are lent.
  std::vector<Piece> Gaps() const {
    std::vector<Piece> gaps;
    size_t at = 0;
    for (const Piece& piece : lent) {
      if (piece.offset > at) gaps.push_back({at, piece.offset - at});
      at = piece.offset + piece.size;
    }
    if (pool_size > at) gaps.push_back({at, pool_size - at});
    return gaps;
  }

  // Compares everything that the allocator knows with the model.
  void CheckAll() const {
    std::vector<Piece> known;
    for (auto [offset, size] : allocator.lent) known.push_back({offset, size});
    Check(known == lent, "the pieces that are lent");
    known.clear();
    for (auto [offset, size] : allocator.free) known.push_back({offset, size});
    Check(known == Gaps(), "the free pieces");
  }

  // From 1 byte on, and no more than about the pool: the server sees to that.
  size_t RandomSize() {
    switch (random() % 16) {
      case 0:  // about as large as the pool, or just a free piece
        return pool_size + random() % 100 - 50;
      case 1: {
        std::vector<Piece> gaps = Gaps();
        return gaps.empty() ? 1 : gaps[random() % gaps.size()].size;
      }
      case 2:
      case 3:
        return 1 + random() % 200;
      case 4:
      case 5:
        return 1 + random() % pool_size;
      default:
        return 1 + random() % (1 << 20);
    }
  }

  void Alloc() {
    size_t size = RandomSize();
    std::optional<size_t> offset = allocator.Alloc(size);
    // As whole lines of the cache.
    size_t lines = size / kPieceAlign + (size % kPieceAlign != 0);
    size_t best = SIZE_MAX;  // the smallest gap that is large enough
    size_t around = 0;       // the gap that the new piece lies in
    for (const Piece& gap : Gaps()) {
      if (gap.size / kPieceAlign < lines) continue;
      best = std::min(best, gap.size);
      if (offset && gap.offset <= *offset &&
          *offset - gap.offset <= gap.size - lines * kPieceAlign) {
        around = gap.size;
      }
    }
    if (!offset) {
      Check(best == SIZE_MAX, "nothing is lent, but there was room");
      return;
    }
    Check(*offset % kPieceAlign == 0, "a piece is not aligned");
    Check(around != 0, "a piece overlaps another one, or the end");
    Check(around == best, "a smaller free piece would have been large enough");
    auto later = std::find_if(
        lent.begin(), lent.end(),
        [&](const Piece& piece) { return piece.offset > *offset; });
    lent.insert(later, {*offset, lines * kPieceAlign});
  }

  void Free(size_t index) {
    allocator.Free(lent[index].offset);
    lent.erase(lent.begin() + static_cast<ptrdiff_t>(index));
  }

  void Run(size_t calls) {
    for (size_t i = 0; i < calls; ++i) {
      // In turn, more comes than goes, and more goes than comes.
      size_t allocs = i / 4096 % 2 == 0 ? 44 : 24;  // of 64 calls
      size_t what = random() % 64;
      if (what < allocs) {
        Alloc();
      } else if (!lent.empty()) {
        Free(random() % lent.size());
      }
      if (i % 100 == 0) CheckAll();
    }
    while (!lent.empty()) Free(random() % lent.size());
    CheckAll();
    Check(allocator.free == std::map<size_t, size_t>{{0, pool_size}},
          "the pool is not whole in the end");
  }
};

// Returns how many pieces were lent when the endpoint of a client with one piece
// was closed, and how many afterwards.
std::pair<size_t, size_t> LentAtClose() {
  Domain domain(false);
  Pool pool(domain, 4096, FI_REMOTE_WRITE);
  Session listener(domain);
  std::optional<ServedClient> client;
  client.emplace(domain, 1, listener.endpoint.addr, pool);
  client->loan.pieces.insert(*pool.allocator.Alloc(64));
  size_t lent = 0;
  g_on_close = [&] { lent = pool.allocator.lent.size(); };
  client.reset();
  g_on_close = nullptr;
  return {lent, pool.allocator.lent.size()};
}

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
  if (LentAtClose() != std::pair<size_t, size_t>{1, 0}) {
    printf("wrong: a piece comes back before the endpoint is closed\n");
    return 1;
  }
  printf("all as it should be\n");
}
