// A network as strict as EFA, for the tests: a library that is loaded in front
// of libfabric and makes tcp or shm behave as the efa provider may. It says
// which of EFA's rules a program breaks, and counts what it has seen.
//
// Usage: LD_PRELOAD=build/strict.so PROGRAM...
//   STRICT_DIR=FOLDER     what an adapter would know, addresses and keys, is in
//                         files here (/tmp/strict). Both sides must be on this
//                         host, with this library and the same folder
//   STRICT_SEED=N         of all that is random (otherwise another one each time)
//   STRICT_EAGAIN=P       percent of the posts that find no room (20)
//   STRICT_TX=N           operations in flight, then there is no room (64)
//   STRICT_DELAY_US=N     an operation starts up to so much later (2000)
//   STRICT_CQ_DELAY_US=N  and is reported up to so much later (3000)
//   STRICT_SEND_CQ_DELAY_US=N  so is a SEND (as CQ_DELAY)
//   STRICT_PIECES=N       a READ or WRITE travels in up to so many pieces (4)
//   STRICT_MAX_MSG=N      bytes of the longest SEND; efa has no limit, efa-direct
//                         that of a packet, some 8 KiB
//   STRICT_RECV_DISORDER=1  RECVs complete in any order
//   STRICT_HMEM=N         1: GPU memory is supported (default; only that of
//                         cuda_stub.cpp, which we can touch), 0: it is not,
//                         2: the provider says so and then registers none
//   STRICT_NAME=NAME      what the provider is called (efa)
//   STRICT_ADAPTERS=N     so many adapters, each a domain (1)
//   STRICT_EQ=0           there are no event queues, as with opx
//   STRICT_WRITE_FAILS=N  the first WRITE of the N-th adapter is refused
//   STRICT_NO_ROOM=N      the N-th adapter has no room for any WRITE
//   STRICT_ONCE=1         an adapter registers nothing to WRITE from that another
//                         one has registered
//   STRICT_P4D=1          an older device, which has no RDMA WRITE
//   STRICT_WAIT=1         a completion queue can have a descriptor (FI_WAIT_FD);
//                         otherwise it can't, as with efa of libfabric 1.17
//   STRICT_REMOVED=NAME   what becomes of operations in flight to an address that
//                         is removed: they are `canceled` (default), or nobody
//                         hears of them again (`lost`, as with efa)
//
// The rules, by the names under which it reports them, and where they are from:
// fi_...(N) are libfabric's manual pages, files are those of prov/efa/src in
// libfabric 2.6.0 unless another version is named.
//
//   hints      demands that a program must be able to meet: FI_MR_ALLOCATED,
//              VIRT_ADDR, PROV_KEY, HMEM with FI_HMEM (efa_prov_info.c,
//              efa_user_info.c); FI_MR_LOCAL and FI_CONTEXT2 (efa-direct)
//   sas        who sends a peer several messages has asked for their order
//              (FI_ORDER_SAS in fi_endpoint(3))
//   thread     one thread uses a domain (FI_THREAD_DOMAIN in fi_domain(3))
//   eq         without an event queue, an error that belongs to no operation
//              aborts the process (efa_base_ep_write_eq_error in efa_base_ep.c)
//   order      what is in use is not closed (fi_close in fi_cq(3), fi_av(3), fi_mr(3))
//   closed     what is closed is not used, and all is closed in the end
//   desc       a local buffer has the descriptor of a region that it lies in
//              (FI_MR_LOCAL in fi_mr(3); "a valid desc" in efa_msg.c), and that
//              is one of the endpoint's own domain (fi_domain(3))
//   access     rights, bounds and keys (fi_mr(3); ofi_mr_map_verify, called in
//              rdm/efa_rdm_rma.c), and alignment of atomic operations. A key is
//              one of the domain in which the peer's endpoint is
//   context    one operation at a time has a context, which is the provider's
//              as long as it is in flight (FI_CONTEXT2 in fi_getinfo(3))
//   change     the buffer of a SEND or WRITE stays as it is until it completes
//   memory     a region's pages exist (FI_MR_ALLOCATED in fi_mr(3)) as long as
//              the region, and iface says where they are
//   size       nothing is longer than max_msg_size; immediate data has 4 bytes
//              (EFA_CQ_DATA_SIZE in efa_cq.h)
//   cq         completions never outnumber the entries of their queue; efa does
//              not prevent it (docs/efa_fabric_comparison.md, FI_RM_ENABLED)
//   peer       an address is used after fi_av_insert and before fi_av_remove, after
//              which it is invalid (fi_av(3))
//   wait       fi_trywait takes open queues that have a descriptor (it fails in
//              prov/verbs/src/verbs_cq.c), and has said that it is safe before each
//              poll(2) on that descriptor, after the last completion was read
//              (fi_poll(3))
//
// What it does that programs must bear:
//   WRITEs and READs start in any order (msg_order has no bit for them:
//   efa_prov_info.c), in pieces (max_order_waw_size, also in fi_endpoint(3)), and
//   a WRITE with immediate data before all others. SENDs keep their order
//   only for a program that asks for FI_ORDER_SAS (efa_user_info_alter_rdm).
//   Who does not ask for FI_DELIVERY_COMPLETE gets a completion while its data
//   is still here (fi_cq(3)). A RECV's or READ's buffer holds garbage until it
//   completes. -FI_EAGAIN can come at any time (rdm/efa_rdm_rma.c, _msg.c).
//   An entry of the completion queue has garbage where fi_cq(3) says nothing.
//   P4D: a WRITE of 64 KiB, or of more than a packet to a GPU, is a READ by the
//   target (rdm/efa_rdm_rma.c, efa_hmem.c) into a region that lets it do so
//   only with FI_RECV (libfabric 1.19 to 2.1: efa_mr_reg_impl in efa_mr.c).
//   Without WAIT, who asks for a descriptor gets no queue (rxr_cq_open in
//   rxr/rxr_cq.c of libfabric 1.17), and there is no fi_trywait (fi_no_trywait, as
//   in prov/lnx and prov/ucx).
//   WAIT: the descriptor becomes readable for one completion, the first that comes
//   after an fi_trywait that said 0, and stays so until the next fi_trywait, as a
//   completion channel of verbs does (vrb_cq_trywait in prov/verbs/src/verbs_cq.c,
//   efa_cq_trywait in efa_cq.c). For what had come before, there is no wake-up. We
//   see a program wait because our poll(2) takes the place of the C library's; the
//   adapter goes on working meanwhile.
//   REMOVED: "the behavior of operations in progress [...] is undefined" (fi_av(3)).
//   efa releases them without a completion (efa_rdm_peer_destruct in
//   rdm/efa_rdm_peer.c).
//
// The objects that a program gets are ours, with tables of our functions; the
// provider's are behind them. What it knows is what the programs use: the short
// forms (fi_send, not fi_sendmsg), and entries in FI_CQ_FORMAT_DATA.

#define STAND_IN "strict"
#include <execinfo.h>
#include <fcntl.h>
#include <poll.h>
#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "stand_in.h"

// The functions that a table does not name stay null.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

using Clock = std::chrono::steady_clock;

// ---- Settings ----

const auto g_seed =
    static_cast<uint32_t>(Setting("STRICT_SEED", std::random_device()()));
const long g_eagain = Setting("STRICT_EAGAIN", 20);
const auto g_tx = static_cast<size_t>(Setting("STRICT_TX", 64));
const long g_delay = Setting("STRICT_DELAY_US", 2000);
const long g_cq_delay = Setting("STRICT_CQ_DELAY_US", 3000);
const long g_send_cq_delay = Setting("STRICT_SEND_CQ_DELAY_US", g_cq_delay);
const auto g_pieces = static_cast<size_t>(Setting("STRICT_PIECES", 4));
const auto g_max_msg = static_cast<size_t>(Setting("STRICT_MAX_MSG", -1));
const bool g_recv_disorder = Setting("STRICT_RECV_DISORDER", 0);
const long g_hmem = Setting("STRICT_HMEM", 1);
const long g_adapters = Setting("STRICT_ADAPTERS", 1);
const long g_eq = Setting("STRICT_EQ", 1);
const long g_write_fails = Setting("STRICT_WRITE_FAILS", 0);
const long g_no_room = Setting("STRICT_NO_ROOM", 0);
const bool g_once = Setting("STRICT_ONCE", 0);
const bool g_p4d = Setting("STRICT_P4D", 0);
const bool g_wait = Setting("STRICT_WAIT", 0);
const bool g_lost =
    getenv("STRICT_REMOVED") && !strcmp(getenv("STRICT_REMOVED"), "lost");

constexpr size_t kPageSize = 4096;
constexpr size_t kAddressSize = 32;      // that of efa: GID, QPN, QKEY
constexpr size_t kImmDataSize = 4;       // bytes
constexpr size_t kInjectSize = 32;       // bytes; efa-direct's
constexpr size_t kQueueSize = 1024;      // of a program that leaves it to us
constexpr size_t kP4dHostWrite = 65536;  // a WRITE of so many bytes is a READ
constexpr size_t kP4dGpuWrite = 8000;
constexpr long kReadyPercent = 70;   // of the looks at the completion queue
constexpr size_t kMaxReports = 3;    // of the same rule
constexpr long kPollStep = 200'000;  // ns, between two looks of a sleeper

std::mt19937_64 g_random(g_seed);

uint64_t Random(uint64_t below) { return g_random() % below; }

bool Percent(long percent) { return static_cast<long>(Random(100)) < percent; }

Clock::time_point Later(long us) {
  return Clock::now() +
         std::chrono::microseconds(Random(static_cast<uint64_t>(us) + 1));
}

// Returns a number that no other process has, whatever the seed.
uint64_t Unique() {
  static std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

// ---- Reports ----

std::map<std::string, size_t> g_counts;      // how often each thing was seen
std::map<std::string, size_t> g_violations;  // by rule

void Count(const std::string& what) { ++g_counts[what]; }

void Violation(const char* rule, const std::string& text) {
  if (++g_violations[rule] > kMaxReports) return;
  fprintf(stderr, "strict: VIOLATION of %s: %s (STRICT_SEED=%u)\n", rule,
          text.c_str(), g_seed);
  void* frames[8];
  int depth = backtrace(frames, 8);
  backtrace_symbols_fd(frames + 2, std::max(depth - 2, 0), STDERR_FILENO);
}

void CheckThread() {
  static const long first = syscall(SYS_gettid);
  if (syscall(SYS_gettid) != first) {
    Violation("thread", "a call from another thread");
  }
}

// ---- Objects ----

// What we know about a domain.
struct Domain {
  uint64_t number = 0;  // that no other one has, here or in another process
  long adapter = 1;     // which of those that we offer
  uint64_t mr_mode = 0;
  size_t open = 0;  // objects in it that the program has not closed yet
  struct fi_ops* real_fid = nullptr;
  struct fi_ops_domain* real = nullptr;
  struct fi_ops_mr* real_mr = nullptr;
};

std::map<struct fid*, Domain> g_domains;  // by the provider's object

// What we know about an object that a program has got from us. It is never
// freed, so that we see what a program does with it after fi_close.
struct Object {
  const char* kind;
  Domain* domain = nullptr;  // that it is in; an event queue is in none
  struct fid* real = nullptr;
  size_t users = 0;  // open endpoints, or operations in flight
  bool open = true;
};

size_t g_open = 0;  // objects that the program has not closed yet

// Begins each call of a function of an object. Returns false if it is closed.
bool Use(const Object& object) {
  CheckThread();
  if (!object.open) {
    Violation("closed", std::string(object.kind) + " is used after fi_close");
  }
  return object.open;
}

// Begins the life of an object.
void Opened(Object& object, Domain* domain) {
  ++g_open;
  object.domain = domain;
  if (domain != nullptr) ++domain->open;
}

// Begins each fi_close. Returns false if there is nothing to close.
bool BeginClose(Object& object) {
  if (!Use(object)) return false;
  if (object.users > 0) {
    Violation("order", std::string(object.kind) + " is closed while " +
                           std::to_string(object.users) + " others use it");
  }
  object.open = false;
  --g_open;
  if (object.domain != nullptr) --object.domain->open;
  return true;
}

// ---- Memory of the GPU: what cuda_stub.cpp tells us ----

struct GpuMemory {
  char* alias;  // where we may touch it
  size_t size;
};
std::map<char*, GpuMemory> g_gpu_memory;
// A real GPU tells us nothing of its memory, and we could not touch it.
bool g_gpu_is_ours = false;

// Returns the GPU memory that `address` is in, or the end of the map.
auto FindGpuMemory(const void* address) {
  auto* at = static_cast<char*>(const_cast<void*>(address));
  auto it = g_gpu_memory.upper_bound(at);
  if (it == g_gpu_memory.begin()) return g_gpu_memory.end();
  --it;
  return at < it->first + it->second.size ? it : g_gpu_memory.end();
}

// Returns where we can read and write what is at this address.
char* Touch(const void* address) {
  auto* at = static_cast<char*>(const_cast<void*>(address));
  auto gpu = FindGpuMemory(address);
  return gpu == g_gpu_memory.end() ? at : gpu->second.alias + (at - gpu->first);
}

// Sums up a buffer. Of a large one, a part is enough.
uint64_t Hash(const char* bytes, size_t size) {
  uint64_t hash = size;
  size_t step = size > 16384 ? size / 2048 / 8 * 8 : 8;
  for (size_t i = 0; i < size; i += step) {
    uint64_t word = 0;
    memcpy(&word, bytes + i, std::min<size_t>(8, size - i));
    hash = (hash ^ word) * 1099511628211u;
  }
  return hash;
}

// Returns whether all pages of a buffer are in memory.
bool PagesExist(const void* data, size_t size) {
  auto begin = reinterpret_cast<uint64_t>(data) / kPageSize * kPageSize;
  auto end = reinterpret_cast<uint64_t>(data) + size;
  std::vector<unsigned char> pages((end - begin + kPageSize - 1) / kPageSize);
  return mincore(reinterpret_cast<void*>(begin), pages.size() * kPageSize,
                 pages.data()) == 0 &&
         std::all_of(pages.begin(), pages.end(), [](auto p) { return p & 1; });
}

// ---- What both processes know ----

// A registered region.
struct Key {
  uint64_t base;  // as its program sees it
  uint64_t size;
  uint64_t access;
  uint64_t real_base;
  uint64_t real_key;
  uint64_t domain;
  uint64_t mr_mode;  // of the provider
  bool open;
  bool gpu;
};

// An endpoint.
struct Name {
  size_t size;  // bytes of real
  uint8_t real[512];
  uint64_t domain;
};

std::string Folder() {
  const char* folder = getenv("STRICT_DIR");
  if (folder == nullptr) folder = "/tmp/strict";
  mkdir(folder, 0700);
  return std::string(folder) + "/";
}

// Maps the file of a key or name into memory. Returns nullptr if there is none.
template <typename T>
T* Map(const std::string& file, bool create) {
  int flags = create ? O_RDWR | O_CREAT | O_EXCL : O_RDWR;
  int fd = open((Folder() + file).c_str(), flags, 0600);
  if (fd < 0 && create) Die("no file can be made in STRICT_DIR");
  if (fd < 0) return nullptr;
  if (create && ftruncate(fd, sizeof(T)) != 0) Die("STRICT_DIR is full");
  void* map =
      mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (map == MAP_FAILED) Die("a file in STRICT_DIR can't be mapped");
  return static_cast<T*>(map);
}

std::string KeyFile(uint64_t key) { return "key-" + std::to_string(key); }

std::string NameFile(const uint8_t* address) {
  std::string file = "name-";
  for (size_t i = 0; i < kAddressSize; ++i) {
    char digits[3];
    snprintf(digits, sizeof(digits), "%02x", address[i]);
    file += digits;
  }
  return file;
}

// Returns what is known about a key; nullptr if nobody has ever had it.
Key* FindKey(uint64_t key) {
  static std::unordered_map<uint64_t, Key*> known;
  Key*& found = known[key];
  if (found == nullptr) found = Map<Key>(KeyFile(key), false);
  return found;
}

// ---- Regions ----

struct Region : fid_mr {
  Object object = {.kind = "a region"};
  Key* shared = nullptr;
};

std::unordered_set<void*> g_regions;  // all that there ever were

// ---- Operations ----

enum Kind : uint8_t { kSend, kRecv, kWrite, kRead, kFetch, kCompare };
constexpr const char* kNames[] = {"SEND", "RECV",     "WRITE",
                                  "READ", "FETCH-OP", "COMPARE-OP"};
constexpr uint64_t kFlags[] = {FI_SEND | FI_MSG,    FI_RECV | FI_MSG,
                               FI_WRITE | FI_RMA,   FI_READ | FI_RMA,
                               FI_READ | FI_ATOMIC, FI_READ | FI_ATOMIC};

struct Endpoint;
struct Op;

// A part of an operation, which the provider takes for a whole one.
struct Piece {
  struct fi_context2 context = {};  // must come first: it comes back to us
  Op* op = nullptr;
  size_t offset = 0;
  size_t len = 0;
  Clock::time_point due;  // when the provider gets it
};

// Memory of the program that an operation takes something from.
struct Source {
  const char* data;
  size_t size;
  uint64_t hash;  // must be the same at the end
};

struct Op {
  Kind kind = kSend;
  Endpoint* ep = nullptr;
  void* user = nullptr;                              // the program's context,
  uint8_t pattern[sizeof(struct fi_context2)] = {};  // and what is in it now
  std::vector<Region*> regions;
  std::vector<Source> sources;  // one; a compare-and-swap has two
  char* target = nullptr;       // of a RECV, a READ, or an old word
  size_t size = 0;              // bytes of the operation
  // What the provider uses instead of the target; or a copy of the source, where
  // the completion comes before the provider has got the operation.
  std::vector<char> shadow;
  std::deque<Piece> pieces;
  size_t pieces_left = 0;  // that have not completed
  bool refused = false;    // by the adapter at the other end
  bool ended = false;      // well or not; the program will read so
  bool reported = false;   // it has done so

  // The rest of the call.
  uint64_t flags = 0;
  fi_addr_t addr = FI_ADDR_UNSPEC;
  uint64_t data = 0;
  struct fi_rma_iov remote = {};
  enum fi_datatype datatype = FI_UINT64;
  enum fi_op atomic_op = FI_SUM;
};

struct Completion {
  Clock::time_point due;
  Op* op;  // nullptr: immediate data from the other side
  struct fi_cq_data_entry entry;
};

struct Failure {
  Op* op;  // nullptr: it belongs to no operation in flight
  struct fi_cq_err_entry entry;
};

struct Queue : fid_cq {
  Object object = {.kind = "a completion queue"};
  size_t size = 0;
  size_t in_flight = 0;
  std::list<Completion> completions;
  std::deque<Failure> failures;
  Clock::time_point last_recv;  // when the last RECV will be reported
  std::set<Endpoint*> endpoints;
  int wait_fd = -1;    // an eventfd, if the program has asked for one
  bool armed = false;  // the next completion makes it readable
  bool safe = false;   // fi_trywait has said that the program may sleep
};

std::set<Queue*> g_queues;  // those that are open

struct AddressVector : fid_av {
  Object object = {.kind = "an address vector"};
  std::unordered_map<fi_addr_t, Name*> names;
};

struct EventQueue : fid_eq {
  Object object = {.kind = "an event queue"};
};

struct Endpoint : fid_ep {
  Object object = {.kind = "an endpoint"};
  Queue* cq = nullptr;
  AddressVector* av = nullptr;
  EventQueue* eq = nullptr;
  bool keeps_order = false;     // of SENDs
  std::set<fi_addr_t> greeted;  // those that have been sent something
  uint64_t op_flags = 0;        // of SENDs that are posted without flags
  size_t tx = 0;                // operations in flight that are no RECVs
  std::set<Op*> in_flight;
  std::vector<Piece*> held;         // that the provider gets in any order,
  std::deque<Piece*> ordered_held;  // and that it gets in this one
  uint8_t address[kAddressSize] = {};
  Name* name = nullptr;
};

// Returns the provider's object behind one of ours.
template <typename T>
T* Real(const Object& object) {
  return reinterpret_cast<T*>(object.real);
}

// Returns our object of this type. The fid is at the beginning of each.
template <typename T, typename Base>
T* Ours(struct fid* fid) {
  return static_cast<T*>(reinterpret_cast<Base*>(fid));
}

std::unordered_set<void*> g_contexts;  // of operations in flight

// ---- Checks of what is posted ----

// Checks a local buffer, and remembers that the operation uses its region.
bool CheckLocal(Op& op, const char* what, void* of_region, const void* data,
                size_t size, uint64_t right) {
  std::string name = std::string(kNames[op.kind]) + ", " + what + ": ";
  if (!g_regions.contains(of_region)) {
    Violation("desc",
              name + (of_region ? "not a descriptor" : "no descriptor"));
    return false;
  }
  auto* region = static_cast<Region*>(of_region);
  if (!Use(region->object)) return false;
  const Key& key = *region->shared;
  if (region->object.domain != op.ep->object.domain) {
    Violation("desc", name + "the descriptor is of another domain");
    return false;
  }
  auto at = reinterpret_cast<uint64_t>(data);
  if (at < key.base || at + size > key.base + key.size) {
    Violation("desc", name + "it is not in the region of its descriptor");
    return false;
  }
  if ((key.access & right) != right) {
    Violation("access", name + "the region lacks a local right; it has " +
                            fi_tostr(&key.access, FI_TYPE_CAPS));
    return false;
  }
  op.regions.push_back(region);
  return true;
}

// Returns why the adapter at the other end would refuse; empty if it would not.
std::string WhyRefused(const Op& op, const Key* key, uint64_t addr,
                       uint64_t rights) {
  // A region with any other right gets all local ones: see efa_mr_reg_impl.
  constexpr uint64_t kP4dRights =
      FI_SEND | FI_RECV | FI_REMOTE_READ | FI_REMOTE_WRITE;
  if (key == nullptr) return "there is no such key";
  auto peer = op.ep->av->names.find(op.addr);
  if (peer == op.ep->av->names.end()) return "there is no such peer";
  if (key->domain != peer->second->domain) {
    return "this is a key of another domain than the peer's";
  }
  if (!key->open) return "the region has been closed";
  if (addr < key->base || addr + op.size > key->base + key->size) {
    return "this is outside of the region";
  }
  if ((key->access & rights) != rights) return "the region lacks a right";
  if (g_p4d && op.kind == kWrite &&
      op.size >= (key->gpu ? kP4dGpuWrite : kP4dHostWrite) &&
      (key->access & FI_RECV) == 0 && (key->access & ~kP4dRights) == 0) {
    return "a target without FI_RECV may not READ into its region";
  }
  return "";
}

// Checks a remote address, and translates it into the provider's.
void CheckRemote(Op& op, uint64_t addr, uint64_t key_number, uint64_t rights) {
  const Key* key = FindKey(key_number);
  std::string why = WhyRefused(op, key, addr, rights);
  if (!why.empty()) {
    Violation("access", std::string(kNames[op.kind]) + ": " + why);
    op.refused = true;
    return;
  }
  uint64_t base = key->mr_mode & FI_MR_VIRT_ADDR ? key->real_base : 0;
  op.remote = {base + (addr - key->base), op.size, key->real_key};
}

// Writes over the program's context, as a provider that uses it.
void Scribble(Op& op) {
  for (uint8_t& byte : op.pattern) byte = static_cast<uint8_t>(g_random());
  memcpy(op.user, op.pattern, sizeof(op.pattern));
}

// Notes what an operation takes from the program's memory.
void AddSource(Op& op, const void* data, size_t size) {
  const char* at = Touch(data);
  op.sources.push_back({at, size, Hash(at, size)});
}

// Notes where the operation puts something. Until it completes, garbage is
// there.
void SetTarget(Op& op, const void* data, size_t size) {
  op.target = Touch(data);
  memset(op.target, 0xa5, size);
  op.shadow.assign(size, 0x5a);
}

// Returns whether there is no room for one more operation.
bool NoRoom(const Endpoint& ep, Kind kind) {
  bool never = kind == kWrite && ep.object.domain->adapter == g_no_room;
  if (!never && (kind == kRecv || ep.tx < g_tx) && !Percent(g_eagain)) {
    return false;
  }
  Count("-FI_EAGAIN");
  return true;
}

// ---- From posting to completion ----

// Hands a piece over to the provider.
ssize_t HandOver(Piece& piece) {
  Op& op = *piece.op;
  auto* ep = Real<struct fid_ep>(op.ep->object);
  char* local = op.shadow.empty() ? const_cast<char*>(op.sources[0].data)
                                  : op.shadow.data();
  struct iovec iov = {local + piece.offset, piece.len};
  struct fi_rma_iov remote = {op.remote.addr + piece.offset, piece.len,
                              op.remote.key};
  void* no_desc = nullptr;
  if (op.kind == kSend || op.kind == kRecv) {
    struct fi_msg msg = {&iov, &no_desc, 1, op.addr, &piece, 0};
    return op.kind == kSend ? fi_sendmsg(ep, &msg, op.flags)
                            : fi_recvmsg(ep, &msg, op.flags);
  }
  if (op.kind == kWrite || op.kind == kRead) {
    struct fi_msg_rma msg = {&iov,    &no_desc, 1,      op.addr,
                             &remote, 1,        &piece, op.data};
    uint64_t flags = op.flags;
    if (&piece != &op.pieces.back()) flags &= ~FI_REMOTE_CQ_DATA;
    return op.kind == kWrite ? fi_writemsg(ep, &msg, flags)
                             : fi_readmsg(ep, &msg, flags);
  }
  auto word = [](const void* data) {
    struct fi_ioc ioc = {};
    ioc.addr = const_cast<void*>(data);
    ioc.count = 1;
    return ioc;
  };
  struct fi_ioc operand = word(op.sources[0].data);
  struct fi_ioc before = word(op.shadow.data());
  struct fi_rma_ioc remote_word = {op.remote.addr, 1, op.remote.key};
  struct fi_msg_atomic msg = {};
  msg.msg_iov = &operand;
  msg.desc = &no_desc;
  msg.iov_count = 1;
  msg.addr = op.addr;
  msg.rma_iov = &remote_word;
  msg.rma_iov_count = 1;
  msg.datatype = op.datatype;
  msg.op = op.atomic_op;
  msg.context = &piece;
  if (op.kind == kFetch) {
    return fi_fetch_atomicmsg(ep, &msg, &before, &no_desc, 1, op.flags);
  }
  struct fi_ioc expected = word(op.sources[1].data);
  return fi_compare_atomicmsg(ep, &msg, &expected, &no_desc, 1, &before,
                              &no_desc, 1, op.flags);
}

// Lets the program read that an operation has succeeded, some time later.
void Succeed(Op& op, size_t len) {
  if (op.ended) return;
  op.ended = true;
  Queue& cq = *op.ep->cq;
  Clock::time_point due =
      Later(op.kind == kSend ? g_send_cq_delay : g_cq_delay);
  if (op.kind == kRecv && !g_recv_disorder) {
    due = cq.last_recv = std::max(due, cq.last_recv);
  }
  struct fi_cq_data_entry entry = {};
  entry.flags = kFlags[op.kind];
  entry.len = op.kind == kRecv ? len : g_random();
  entry.buf = reinterpret_cast<void*>(g_random());
  entry.data = g_random();
  cq.completions.push_back({due, &op, entry});
}

void Fail(Op& op, struct fi_cq_err_entry entry) {
  // The pieces that the provider has not got yet go no further.
  auto forgotten = [&](const Piece* piece) { return piece->op == &op; };
  op.pieces_left -= std::erase_if(op.ep->held, forgotten);
  op.pieces_left -= std::erase_if(op.ep->ordered_held, forgotten);
  if (op.ended) return;
  op.ended = true;
  entry.flags = kFlags[op.kind];
  op.ep->cq->failures.push_back({&op, entry});
}

void Fail(Op& op, int error) {
  struct fi_cq_err_entry entry = {};
  entry.err = error;
  Fail(op, entry);
}

void ForgetIfDone(Op* op) {
  if (!op->reported || op->pieces_left > 0) return;
  op->ep->in_flight.erase(op);
  delete op;
}

// Begins when the provider has completed a piece.
void PieceDone(Piece& piece, size_t len) {
  Op& op = *piece.op;
  --op.pieces_left;
  if (op.pieces_left == 1 && (op.flags & FI_REMOTE_CQ_DATA) && !op.ended) {
    op.ep->held.push_back(&op.pieces.back());
  }
  if (op.pieces_left == 0) Succeed(op, len);
  ForgetIfDone(&op);
}

// Tries to hand over a piece. Returns false if the provider has no room.
bool Start(Piece& piece) {
  Op& op = *piece.op;
  ssize_t ret = HandOver(piece);
  if (ret == -FI_EAGAIN) return false;
  if (ret != 0) {
    --op.pieces_left;
    Fail(op, static_cast<int>(-ret));
    ForgetIfDone(&op);
  }
  return true;
}

// Hands over what is due, as far as the provider has room.
void Progress(Endpoint& ep) {
  if (ep.held.empty() && ep.ordered_held.empty()) return;
  Clock::time_point now = Clock::now();
  std::shuffle(ep.held.begin(), ep.held.end(), g_random);
  for (size_t i = 0; i < ep.held.size();) {
    Piece* piece = ep.held[i];
    if (piece->due > now) {
      ++i;
      continue;
    }
    // Not in the list any more when it fails.
    ep.held.erase(ep.held.begin() + static_cast<ptrdiff_t>(i));
    if (!Start(*piece)) {
      ep.held.push_back(piece);
      break;
    }
  }
  // The order is that of the SENDs to one peer. Another peer's need not wait.
  std::set<fi_addr_t> in_line;
  for (size_t i = 0; i < ep.ordered_held.size();) {
    Piece* piece = ep.ordered_held[i];
    fi_addr_t peer = piece->op->addr;
    auto place = ep.ordered_held.begin() + static_cast<ptrdiff_t>(i);
    if (in_line.count(peer) == 0 && piece->due <= now) {
      ep.ordered_held.erase(place);
      if (Start(*piece)) continue;
      place = ep.ordered_held.begin() + static_cast<ptrdiff_t>(i);
      ep.ordered_held.insert(place, piece);
    }
    in_line.insert(peer);
    ++i;
  }
}

// Cuts an operation into pieces. A word of 8 bytes stays whole.
void Cut(Op& op) {
  std::set<size_t> cuts = {0};
  if (op.kind == kWrite || op.kind == kRead) {
    for (size_t i = Random(g_pieces); i > 0 && op.size > 0; --i) {
      size_t cut = Random(op.size);
      cuts.insert(cut - std::min(cut, (op.remote.addr + cut) % 8));
    }
  }
  for (auto it = cuts.begin(); it != cuts.end(); ++it) {
    size_t end = std::next(it) == cuts.end() ? op.size : *std::next(it);
    op.pieces.push_back({.op = &op, .offset = *it, .len = end - *it});
  }
  op.pieces_left = op.pieces.size();
}

// Takes an operation that is in order, and starts it sooner or later.
ssize_t Accept(std::unique_ptr<Op> owned, void* context) {
  Op& op = *owned.release();
  Endpoint& ep = *op.ep;
  if (context == nullptr) Die("an operation without a context");
  if (!g_contexts.insert(context).second) {
    Violation("context", std::string(kNames[op.kind]) +
                             ": an operation in flight has the same context");
  }
  op.user = context;
  Scribble(op);
  for (Region* region : op.regions) ++region->object.users;
  ep.in_flight.insert(&op);
  Count(kNames[op.kind]);
  if (op.kind != kRecv) ++ep.tx;
  if (++ep.cq->in_flight > ep.cq->size) {
    Violation("cq", "more operations are in flight than it has entries");
  }
  if (op.refused) {
    Fail(op, FI_EACCES);
    return 0;
  }
  Cut(op);
  // Immediate data overtakes all else, and comes after its own WRITE.
  bool imm_data = op.flags & FI_REMOTE_CQ_DATA;
  for (Piece& piece : op.pieces) {
    bool at_once = op.kind == kRecv || imm_data;
    piece.due = at_once ? Clock::now() : Later(g_delay);
    if (imm_data && op.pieces.size() > 1 && &piece == &op.pieces.back()) break;
    if (op.kind == kSend && ep.keeps_order) {
      ep.ordered_held.push_back(&piece);
    } else {
      ep.held.push_back(&piece);
    }
  }
  if ((op.kind == kSend || op.kind == kWrite) &&
      (op.flags & FI_DELIVERY_COMPLETE) == 0) {
    Count("completions before delivery");
    const Source& source = op.sources[0];
    op.shadow.assign(source.data, source.data + source.size);
    Succeed(op, 0);
  }
  Progress(ep);
  return 0;
}

// Gives back what an operation has of the program and of the adapter.
void Release(Op* op) {
  for (Region* region : op->regions) --region->object.users;
  g_contexts.erase(op->user);
  if (op->kind != kRecv) --op->ep->tx;
  --op->ep->cq->in_flight;
  op->reported = true;
}

// Ends an operation, because the program reads so. Returns its context.
void* Report(Op* op, size_t received) {
  void* user = op->user;
  if (memcmp(user, op->pattern, sizeof(op->pattern)) != 0) {
    Violation("context",
              std::string(kNames[op->kind]) + ": changed while in flight");
  }
  Scribble(*op);
  for (const Source& source : op->sources) {
    if (Hash(source.data, source.size) != source.hash) {
      Violation("change", std::string(kNames[op->kind]) + " of " +
                              std::to_string(source.size) +
                              " bytes: changed while in flight");
    }
  }
  if (op->target != nullptr) {
    memcpy(op->target, op->shadow.data(), std::min(received, op->size));
  }
  Release(op);
  ForgetIfDone(op);
  return user;
}

// ---- The functions of an endpoint ----

// Begins an operation. Returns nullptr if there is no room, or nothing to post to.
std::unique_ptr<Op> Begin(Kind kind, struct fid_ep* fid, size_t size,
                          fi_addr_t addr, ssize_t& ret) {
  auto& ep = *static_cast<Endpoint*>(fid);
  ret = Use(ep.object) ? -FI_EAGAIN : -FI_EINVAL;
  if (ret == -FI_EINVAL || NoRoom(ep, kind)) return nullptr;
  auto op = std::make_unique<Op>();
  op->kind = kind;
  op->ep = &ep;
  op->size = size;
  op->addr = addr;
  op->flags = kind == kRecv ? 0 : ep.op_flags;
  return op;
}

// Returns whether an address is in use.
bool IsKnown(const Endpoint& ep, fi_addr_t addr) {
  if (ep.av->names.count(addr) > 0) return true;
  Violation("peer", "a SEND to an address that is not in the address vector");
  return false;
}

ssize_t Send(struct fid_ep* fid, const void* data, size_t size, void* desc,
             fi_addr_t addr, void* context) {
  ssize_t ret = 0;
  auto op = Begin(kSend, fid, size, addr, ret);
  if (op == nullptr) return ret;
  Endpoint& ep = *op->ep;
  if (!IsKnown(ep, addr)) return -FI_EINVAL;
  if (!ep.greeted.insert(addr).second && !ep.keeps_order) {
    Violation("sas", "a second SEND to a peer");
  }
  if (size > g_max_msg) {
    Violation("size", "a SEND of " + std::to_string(size) + " bytes");
    return -FI_EMSGSIZE;
  }
  if (!CheckLocal(*op, "buffer", desc, data, size, FI_SEND)) return -FI_EINVAL;
  AddSource(*op, data, size);
  return Accept(std::move(op), context);
}

ssize_t Recv(struct fid_ep* fid, void* data, size_t size, void* desc,
             fi_addr_t addr, void* context) {
  ssize_t ret = 0;
  auto op = Begin(kRecv, fid, size, addr, ret);
  if (op == nullptr) return ret;
  if (!CheckLocal(*op, "buffer", desc, data, size, FI_RECV)) return -FI_EINVAL;
  SetTarget(*op, data, size);
  return Accept(std::move(op), context);
}

// Leaves at once, and nobody hears what became of it.
ssize_t Inject(struct fid_ep* fid, const void* data, size_t size,
               fi_addr_t addr) {
  ssize_t ret = 0;
  auto op = Begin(kSend, fid, size, addr, ret);
  if (op == nullptr) return ret;
  if (size > kInjectSize) {
    Violation("size", "fi_inject of " + std::to_string(size) + " bytes");
  }
  if (!IsKnown(*op->ep, addr)) return -FI_EINVAL;
  ret = fi_inject(Real<struct fid_ep>(op->ep->object), data, size, addr);
  if (ret == 0) Count("fi_inject");
  return ret;
}

ssize_t WriteData(struct fid_ep* fid, const void* data, size_t size, void* desc,
                  uint64_t number, uint64_t flags, fi_addr_t addr, uint64_t at,
                  uint64_t key, void* context) {
  ssize_t ret = 0;
  auto op = Begin(kWrite, fid, size, addr, ret);
  if (op == nullptr) return ret;
  op->flags |= flags;
  op->data = static_cast<uint32_t>(number);
  if (number != op->data) {
    Violation("size", "immediate data of more than 4 bytes");
  }
  if (!CheckLocal(*op, "buffer", desc, data, size, FI_WRITE)) return -FI_EINVAL;
  CheckRemote(*op, at, key, FI_REMOTE_WRITE);
  static bool has_failed = false;
  if (op->ep->object.domain->adapter == g_write_fails &&
      !std::exchange(has_failed, true)) {
    Count("WRITEs that fail");
    op->refused = true;
  }
  AddSource(*op, data, size);
  return Accept(std::move(op), context);
}

ssize_t Write(struct fid_ep* ep, const void* data, size_t size, void* desc,
              fi_addr_t addr, uint64_t at, uint64_t key, void* context) {
  return WriteData(ep, data, size, desc, 0, 0, addr, at, key, context);
}

ssize_t WriteNumber(struct fid_ep* ep, const void* data, size_t size,
                    void* desc, uint64_t number, fi_addr_t addr, uint64_t at,
                    uint64_t key, void* context) {
  return WriteData(ep, data, size, desc, number, FI_REMOTE_CQ_DATA, addr, at,
                   key, context);
}

ssize_t Read(struct fid_ep* fid, void* data, size_t size, void* desc,
             fi_addr_t addr, uint64_t at, uint64_t key, void* context) {
  ssize_t ret = 0;
  auto op = Begin(kRead, fid, size, addr, ret);
  if (op == nullptr) return ret;
  if (!CheckLocal(*op, "buffer", desc, data, size, FI_READ)) return -FI_EINVAL;
  CheckRemote(*op, at, key, FI_REMOTE_READ);
  SetTarget(*op, data, size);
  return Accept(std::move(op), context);
}

// Without `expected`, it is no compare-and-swap.
ssize_t Compare(struct fid_ep* fid, const void* operand, size_t count,
                void* desc, const void* expected, void* expected_desc,
                void* before, void* before_desc, fi_addr_t addr, uint64_t at,
                uint64_t key, enum fi_datatype type, enum fi_op atomic_op,
                void* context) {
  if (type != FI_UINT64 || count != 1) {
    Die("an atomic operation on anything but one word of 64 bits");
  }
  ssize_t ret = 0;
  auto op =
      Begin(expected ? kCompare : kFetch, fid, sizeof(uint64_t), addr, ret);
  if (op == nullptr) return ret;
  op->atomic_op = atomic_op;
  if (!CheckLocal(*op, "operand", desc, operand, op->size, FI_WRITE) ||
      !CheckLocal(*op, "result", before_desc, before, op->size, FI_READ) ||
      (expected != nullptr && !CheckLocal(*op, "comparison", expected_desc,
                                          expected, op->size, FI_WRITE))) {
    return -FI_EINVAL;
  }
  CheckRemote(*op, at, key, FI_REMOTE_READ | FI_REMOTE_WRITE);
  if (at % sizeof(uint64_t) != 0) {
    Violation("access", "an atomic operation on a word that is not aligned");
  }
  SetTarget(*op, before, op->size);
  AddSource(*op, operand, op->size);
  if (expected != nullptr) AddSource(*op, expected, op->size);
  return Accept(std::move(op), context);
}

ssize_t Fetch(struct fid_ep* ep, const void* operand, size_t count, void* desc,
              void* before, void* before_desc, fi_addr_t addr, uint64_t at,
              uint64_t key, enum fi_datatype type, enum fi_op op,
              void* context) {
  return Compare(ep, operand, count, desc, nullptr, nullptr, before,
                 before_desc, addr, at, key, type, op, context);
}

int FetchValid(struct fid_ep* fid, enum fi_datatype datatype, enum fi_op op,
               size_t* count) {
  const Object& object = static_cast<Endpoint*>(fid)->object;
  return fi_fetch_atomicvalid(Real<struct fid_ep>(object), datatype, op, count);
}

int CompareValid(struct fid_ep* fid, enum fi_datatype datatype, enum fi_op op,
                 size_t* count) {
  const Object& object = static_cast<Endpoint*>(fid)->object;
  return fi_compare_atomicvalid(Real<struct fid_ep>(object), datatype, op,
                                count);
}

// Gives the endpoint an address as long as efa's, and tells the other process
// which one that is in truth.
int GetName(struct fid* fid, void* address, size_t* size) {
  auto& ep = *Ours<Endpoint, fid_ep>(fid);
  if (!Use(ep.object)) return -FI_EINVAL;
  bool fits = *size >= kAddressSize;
  *size = kAddressSize;
  if (!fits) return -FI_ETOOSMALL;
  memcpy(address, ep.address, kAddressSize);
  return 0;
}

void MakeName(Endpoint& ep) {
  for (uint8_t& byte : ep.address) byte = static_cast<uint8_t>(Unique());
  ep.name = Map<Name>(NameFile(ep.address), true);
  ep.name->domain = ep.object.domain->number;
  ep.name->size = sizeof(ep.name->real);
  if (fi_getname(ep.object.real, ep.name->real, &ep.name->size) != 0) {
    Die("the provider does not tell its address");
  }
}

int BindEndpoint(struct fid* fid, struct fid* other, uint64_t flags) {
  auto& ep = *Ours<Endpoint, fid_ep>(fid);
  Object* object = nullptr;
  if (other->fclass == FI_CLASS_CQ) {
    auto* cq = Ours<Queue, fid_cq>(other);
    if (ep.cq != nullptr && ep.cq != cq) Die("an endpoint with two queues");
    ep.cq = cq;
    ep.cq->endpoints.insert(&ep);
    object = &ep.cq->object;
  } else if (other->fclass == FI_CLASS_AV) {
    ep.av = Ours<AddressVector, fid_av>(other);
    object = &ep.av->object;
  } else if (other->fclass == FI_CLASS_EQ) {
    ep.eq = Ours<EventQueue, fid_eq>(other);
    object = &ep.eq->object;
  } else {
    Die("an object of unknown kind is bound to an endpoint");
  }
  if (!Use(ep.object) || !Use(*object)) return -FI_EINVAL;
  ++object->users;
  return ep.object.real->ops->bind(ep.object.real, object->real, flags);
}

int ControlEndpoint(struct fid* fid, int command, void* arg) {
  auto& ep = *Ours<Endpoint, fid_ep>(fid);
  if (!Use(ep.object)) return -FI_EINVAL;
  if (command == FI_ENABLE && (ep.cq == nullptr || ep.av == nullptr)) {
    Die("an endpoint without a completion queue or an address vector");
  }
  if (command == FI_ENABLE && ep.eq == nullptr && g_eq != 0) {
    Violation("eq", "an endpoint is enabled without an event queue");
  }
  int ret = ep.object.real->ops->control(ep.object.real, command, arg);
  if (command == FI_ENABLE && ret == 0) MakeName(ep);
  return ret;
}

int CloseEndpoint(struct fid* fid) {
  auto& ep = *Ours<Endpoint, fid_ep>(fid);
  if (!BeginClose(ep.object)) return -FI_EINVAL;
  // First, so that nobody inserts the address of an endpoint that is gone: libfabric
  // 1.17's shm provider would give the next address the same number.
  if (ep.name != nullptr) unlink((Folder() + NameFile(ep.address)).c_str());
  int ret = fi_close(ep.object.real);
  if (ep.tx > 0) Count("endpoints closed with operations in flight");
  // What is in flight ends here, and its completions are lost.
  auto ours = [&](const auto& item) { return item.op && item.op->ep == &ep; };
  if (ep.cq != nullptr) {
    std::erase_if(ep.cq->completions, ours);
    std::erase_if(ep.cq->failures, ours);
    ep.cq->endpoints.erase(&ep);
    --ep.cq->object.users;
  }
  if (ep.av != nullptr) --ep.av->object.users;
  if (ep.eq != nullptr) --ep.eq->object.users;
  for (Op* op : ep.in_flight) {
    if (!op->reported) Release(op);
    delete op;
  }
  return ret;
}

struct fi_ops g_ep_fid_ops = {.size = sizeof(g_ep_fid_ops),
                              .close = CloseEndpoint,
                              .bind = BindEndpoint,
                              .control = ControlEndpoint};
struct fi_ops_cm g_ep_cm = {.size = sizeof(g_ep_cm), .getname = GetName};
struct fi_ops_msg g_ep_msg = {
    .size = sizeof(g_ep_msg), .recv = Recv, .send = Send, .inject = Inject};
struct fi_ops_rma g_ep_rma = {
    .size = sizeof(g_ep_rma),
    .read = Read,
    .write = Write,
    .writedata = WriteNumber,
};
struct fi_ops_atomic g_ep_atomic = {.size = sizeof(g_ep_atomic),
                                    .readwrite = Fetch,
                                    .compwrite = Compare,
                                    .readwritevalid = FetchValid,
                                    .compwritevalid = CompareValid};

// A call that none of our programs makes says so, instead of jumping to nowhere.
template <typename Table>
Table* WithoutHoles(Table& table) {
  void (*calls[sizeof(table) / sizeof(void*)])();
  memcpy(calls, &table, sizeof(table));
  for (auto& call : calls) {
    if (call == nullptr) call = [] { Die("a call that it does not know"); };
  }
  memcpy(&table, calls, sizeof(table));
  return &table;
}

// ---- The functions of a completion queue ----

// Takes from the provider all completions that it has. Returns 0, or what is
// wrong with its queue.
ssize_t Drain(Queue& queue) {
  auto* cq = Real<struct fid_cq>(queue.object);
  for (;;) {
    struct fi_cq_data_entry entries[16];
    ssize_t ret = fi_cq_read(cq, entries, 16);
    if (ret == -FI_EAGAIN || ret == 0) return 0;
    if (ret == -FI_EAVAIL) {
      struct fi_cq_err_entry entry = {};
      if (fi_cq_readerr(cq, &entry, 0) != 1) return 0;
      entry.err_data = nullptr;  // it does not last until the program reads it
      entry.err_data_size = 0;
      if (entry.op_context == nullptr) {
        queue.failures.push_back({nullptr, entry});
        continue;
      }
      Op& op = *static_cast<Piece*>(entry.op_context)->op;
      --op.pieces_left;
      Fail(op, entry);
      ForgetIfDone(&op);
      continue;
    }
    if (ret < 0) return ret;
    for (ssize_t i = 0; i < ret; ++i) {
      // Some versions of shm report it without FI_REMOTE_WRITE.
      if ((entries[i].flags & (FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA)) &&
          (entries[i].flags & FI_RECV) == 0) {
        Count("immediate data");
        struct fi_cq_data_entry entry = {};
        entry.flags = FI_REMOTE_WRITE | FI_RMA | FI_REMOTE_CQ_DATA;
        entry.len = g_random();
        entry.data = static_cast<uint32_t>(entries[i].data);
        queue.completions.push_back({Later(g_cq_delay), nullptr, entry});
      } else if (entries[i].op_context != nullptr) {
        PieceDone(*static_cast<Piece*>(entries[i].op_context), entries[i].len);
      }
    }
  }
}

ssize_t ReadQueue(struct fid_cq* fid, void* buffer, size_t count) {
  auto& queue = *static_cast<Queue*>(fid);
  if (!Use(queue.object)) return -FI_EINVAL;
  for (Endpoint* ep : queue.endpoints) Progress(*ep);
  ssize_t ret = Drain(queue);
  if (ret != 0) return ret;
  auto* entries = static_cast<struct fi_cq_data_entry*>(buffer);
  size_t done = 0;
  Clock::time_point now = Clock::now();
  // Now and then nothing has come, and more the next time.
  if (!Percent(kReadyPercent)) return -FI_EAGAIN;
  for (auto it = queue.completions.begin();
       it != queue.completions.end() && done < count;) {
    if (it->due > now) {
      ++it;
      continue;
    }
    struct fi_cq_data_entry& entry = entries[done++] = it->entry;
    if (it->op != nullptr) entry.op_context = Report(it->op, entry.len);
    it = queue.completions.erase(it);
  }
  if (done > 0 || !queue.failures.empty()) queue.safe = false;
  if (done > 0) return static_cast<ssize_t>(done);
  return queue.failures.empty() ? -FI_EAGAIN : -FI_EAVAIL;
}

ssize_t ReadError(struct fid_cq* fid, struct fi_cq_err_entry* entry, uint64_t) {
  auto& queue = *static_cast<Queue*>(fid);
  if (!Use(queue.object)) return -FI_EINVAL;
  if (queue.failures.empty()) return -FI_EAGAIN;
  Failure failure = queue.failures.front();
  queue.failures.pop_front();
  Count("operations that failed");
  *entry = failure.entry;
  if (failure.op != nullptr) entry->op_context = Report(failure.op, 0);
  return 1;
}

const char* DescribeError(struct fid_cq* fid, int error, const void* data,
                          char* text, size_t size) {
  const Object& object = static_cast<Queue*>(fid)->object;
  return fi_cq_strerror(Real<struct fid_cq>(object), error, data, text, size);
}

// Lets the adapter work. Returns whether the program has something to read.
bool HasCompletions(Queue& queue) {
  for (Endpoint* ep : queue.endpoints) Progress(*ep);
  Drain(queue);
  Clock::time_point now = Clock::now();
  auto due = [&](const Completion& completion) {
    return completion.due <= now;
  };
  return !queue.failures.empty() ||
         std::any_of(queue.completions.begin(), queue.completions.end(), due);
}

int ControlQueue(struct fid* fid, int command, void* arg) {
  auto& queue = *Ours<Queue, fid_cq>(fid);
  if (!Use(queue.object)) return -FI_EINVAL;
  if (command != FI_GETWAIT) return -FI_ENOSYS;
  if (queue.wait_fd < 0) return -FI_ENODATA;
  *static_cast<int*>(arg) = queue.wait_fd;
  return 0;
}

int TryWait(struct fid_fabric*, struct fid** fids, int count) {
  CheckThread();
  if (!g_wait) return -FI_ENOSYS;
  // Now and then something has come that turns out to be nothing.
  bool idle = !Percent(g_eagain);
  for (int i = 0; i < count; ++i) {
    if (fids[i]->fclass != FI_CLASS_CQ) Die("fi_trywait of no queue");
    auto& queue = *Ours<Queue, fid_cq>(fids[i]);
    if (!Use(queue.object)) return -FI_EINVAL;
    if (queue.wait_fd < 0) {
      Violation("wait", "fi_trywait of a queue that has no descriptor");
      return -FI_EINVAL;
    }
    queue.safe = false;
    uint64_t wakes = 0;
    if (eventfd_read(queue.wait_fd, &wakes) != 0) wakes = 0;
    if (HasCompletions(queue) || !idle) {
      Count("fi_trywait without leave");
      return -FI_EAGAIN;
    }
    queue.armed = queue.safe = true;
  }
  return 0;
}

int CloseQueue(struct fid* fid) {
  auto& queue = *Ours<Queue, fid_cq>(fid);
  if (!BeginClose(queue.object)) return -FI_EINVAL;
  g_queues.erase(&queue);
  if (queue.wait_fd >= 0) close(queue.wait_fd);
  return fi_close(queue.object.real);
}

struct fi_ops g_cq_fid_ops = {
    .size = sizeof(g_cq_fid_ops), .close = CloseQueue, .control = ControlQueue};
struct fi_ops_cq g_cq_ops = {.size = sizeof(g_cq_ops),
                             .read = ReadQueue,
                             .readerr = ReadError,
                             .strerror = DescribeError};

// ---- Address vector and event queue ----

// Ends what is in flight to an address: with an error, or without a word.
void EndAll(const AddressVector& av, fi_addr_t addr) {
  for (Queue* queue : g_queues) {
    for (Endpoint* ep : queue->endpoints) {
      if (ep->av != &av) continue;
      for (Op* op :
           std::vector<Op*>(ep->in_flight.begin(), ep->in_flight.end())) {
        if (op->addr != addr || op->kind == kRecv || op->reported) continue;
        // The program has not read that it has ended, if it has.
        auto its_own = [&](const auto& item) { return item.op == op; };
        std::erase_if(queue->failures, its_own);
        std::erase_if(queue->completions, its_own);
        Count("in flight to an address that is removed");
        op->ended = false;
        Fail(*op, FI_ECANCELED);
        if (!g_lost) continue;
        queue->failures.pop_back();
        Release(op);
        ForgetIfDone(op);
      }
    }
  }
}

int Insert(struct fid_av* fid, const void* address, size_t count,
           fi_addr_t* number, uint64_t flags, void* context) {
  auto& av = *static_cast<AddressVector*>(fid);
  if (!Use(av.object)) return -FI_EINVAL;
  if (count != 1) Die("several addresses at once");
  Name* name = Map<Name>(NameFile(static_cast<const uint8_t*>(address)), false);
  if (name == nullptr) return 0;
  int ret = fi_av_insert(Real<struct fid_av>(av.object), name->real, 1, number,
                         flags, context);
  if (ret == 1) av.names[*number] = name;
  return ret;
}

int Remove(struct fid_av* fid, fi_addr_t* addrs, size_t count, uint64_t flags) {
  auto& av = *static_cast<AddressVector*>(fid);
  if (!Use(av.object)) return -FI_EINVAL;
  if (flags != 0) Die("flags of fi_av_remove");
  for (size_t i = 0; i < count; ++i) {
    if (av.names.erase(addrs[i]) == 0) {
      Violation("peer", "an address is removed that is not there");
      return -FI_EINVAL;
    }
    Count("fi_av_remove");
    // The provider keeps the address: it may need it for what it has got already.
    EndAll(av, addrs[i]);
  }
  return 0;
}

template <typename T, typename Base>
int Close(struct fid* fid) {
  Object& object = Ours<T, Base>(fid)->object;
  return BeginClose(object) ? fi_close(object.real) : -FI_EINVAL;
}

struct fi_ops g_av_fid_ops = {.size = sizeof(g_av_fid_ops),
                              .close = Close<AddressVector, fid_av>};
struct fi_ops_av g_av_ops = {
    .size = sizeof(g_av_ops), .insert = Insert, .remove = Remove};
struct fi_ops g_eq_fid_ops = {.size = sizeof(g_eq_fid_ops),
                              .close = Close<EventQueue, fid_eq>};

// ---- Regions ----

int CloseRegion(struct fid* fid) {
  auto& region = *Ours<Region, fid_mr>(fid);
  if (!BeginClose(region.object)) return -FI_EINVAL;
  Key& key = *region.shared;
  if (!key.gpu && !PagesExist(reinterpret_cast<void*>(key.base), key.size)) {
    Violation("memory", "the memory of a region is freed before the region");
  }
  key.open = false;
  unlink((Folder() + KeyFile(region.key)).c_str());
  return region.object.real ? fi_close(region.object.real) : 0;
}

struct fi_ops g_mr_fid_ops = {.size = sizeof(g_mr_fid_ops),
                              .close = CloseRegion};

int Register(struct fid* domain, const struct fi_mr_attr* attr, uint64_t flags,
             struct fid_mr** result) {
  CheckThread();
  if (attr->iov_count != 1) Die("a region of several parts");
  void* data = attr->mr_iov->iov_base;
  size_t size = attr->mr_iov->iov_len;
  bool gpu = FindGpuMemory(data) != g_gpu_memory.end();
  if ((attr->iface == FI_HMEM_CUDA) != gpu) {
    Violation("memory", gpu ? "GPU memory without FI_HMEM_CUDA"
                            : "FI_HMEM_CUDA for memory of the host");
    return -FI_EINVAL;
  }
  if (gpu) Count("regions of GPU memory");
  if (gpu && g_hmem == 0) Violation("memory", "FI_HMEM was not offered");
  if (gpu && g_hmem == 2) return -FI_ENOSYS;
  if (attr->access == 0) Violation("access", "a region without any right");
  if (!gpu && !PagesExist(data, size)) {
    Violation("memory", "a region of pages that do not exist");
  }
  if (g_once && attr->access == FI_WRITE) {
    static std::map<void*, struct fid*> owners;
    if (owners.try_emplace(data, domain).first->second != domain) {
      return -FI_ENOMEM;
    }
  }
  auto region = std::make_unique<Region>();
  region->fid.fclass = FI_CLASS_MR;
  region->fid.ops = &g_mr_fid_ops;
  region->mem_desc = region.get();
  region->key = static_cast<uint32_t>(Unique());  // as wide as efa's
  region->shared = Map<Key>(KeyFile(region->key), true);
  Domain& ours = g_domains.at(domain);
  *region->shared = {.base = reinterpret_cast<uint64_t>(data),
                     .size = size,
                     .access = attr->access,
                     .real_base = reinterpret_cast<uint64_t>(Touch(data)),
                     .real_key = 0,
                     .domain = ours.number,
                     .mr_mode = ours.mr_mode,
                     .open = true,
                     .gpu = gpu};
  // The provider has no use for local registrations: see fi_getinfo below.
  if (attr->access & (FI_REMOTE_READ | FI_REMOTE_WRITE)) {
    struct iovec iov = {Touch(data), size};
    struct fi_mr_attr real_attr = *attr;
    real_attr.mr_iov = &iov;
    real_attr.requested_key = region->key;
    real_attr.iface = FI_HMEM_SYSTEM;
    real_attr.device = {};
    struct fid_mr* real = nullptr;
    int ret = ours.real_mr->regattr(domain, &real_attr, flags, &real);
    if (ret != 0) return ret;
    region->object.real = &real->fid;
    region->shared->real_key = fi_mr_key(real);
  }
  Opened(region->object, &ours);
  g_regions.insert(region.get());
  *result = region.release();
  return 0;
}

// The short form.
int RegisterBuffer(struct fid* domain, const void* data, size_t size,
                   uint64_t access, uint64_t offset, uint64_t key,
                   uint64_t flags, struct fid_mr** result, void* context) {
  struct iovec iov = {const_cast<void*>(data), size};
  struct fi_mr_attr attr = {};
  attr.mr_iov = &iov;
  attr.iov_count = 1;
  attr.access = access;
  attr.offset = offset;
  attr.requested_key = key;
  attr.context = context;
  return Register(domain, &attr, flags, result);
}

// ---- Opening ----

// The provider's answers, by what we have made of them.
std::map<const struct fi_info*, struct fi_info*> g_real_infos;

struct fi_info* RealInfo(const struct fi_info* info) {
  auto it = g_real_infos.find(info);
  if (it == g_real_infos.end()) Die("an fi_info that is not from fi_getinfo");
  return it->second;
}

std::map<struct fid*, struct fi_ops_fabric*> g_real_fabrics;

// Makes what the program gets instead of the provider's object.
template <typename Ours, typename Base>
Ours* MakeObject(Base** result, Base* real, size_t fclass, void* context,
                 struct fi_ops* ops, Domain* domain) {
  auto* ours = new Ours;
  ours->object.real = &real->fid;
  ours->fid = {.fclass = fclass, .context = context, .ops = ops};
  Opened(ours->object, domain);
  *result = ours;
  return ours;
}

int OpenEndpoint(struct fid_domain* domain, struct fi_info* info,
                 struct fid_ep** result, void* context) {
  CheckThread();
  struct fid_ep* real = nullptr;
  Domain& ours = g_domains.at(&domain->fid);
  int ret = ours.real->endpoint(domain, RealInfo(info), &real, context);
  if (ret != 0) return ret;
  auto* ep = MakeObject<Endpoint>(result, real, FI_CLASS_EP, context,
                                  &g_ep_fid_ops, &ours);
  ep->keeps_order =
      info->tx_attr->msg_order & info->rx_attr->msg_order & FI_ORDER_SAS;
  ep->op_flags = info->tx_attr->op_flags & FI_DELIVERY_COMPLETE;
  ep->cm = &g_ep_cm;
  ep->msg = WithoutHoles(g_ep_msg);
  ep->rma = WithoutHoles(g_ep_rma);
  ep->atomic = WithoutHoles(g_ep_atomic);
  return 0;
}

int OpenQueue(struct fid_domain* domain, struct fi_cq_attr* attr,
              struct fid_cq** result, void* context) {
  CheckThread();
  if (attr->format != FI_CQ_FORMAT_DATA) Die("entries in another format");
  bool waits = attr->wait_obj != FI_WAIT_NONE;
  if (waits && (!g_wait || attr->wait_obj != FI_WAIT_FD)) return -FI_ENOSYS;
  struct fi_cq_attr real_attr = *attr;
  real_attr.wait_obj = FI_WAIT_NONE;
  struct fid_cq* real = nullptr;
  Domain& ours = g_domains.at(&domain->fid);
  int ret = ours.real->cq_open(domain, &real_attr, &real, context);
  if (ret != 0) return ret;
  auto* queue = MakeObject<Queue>(result, real, FI_CLASS_CQ, context,
                                  &g_cq_fid_ops, &ours);
  g_queues.insert(queue);
  if (waits) {
    queue->wait_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (queue->wait_fd < 0) Die("no eventfd");
  }
  queue->size = attr->size > 0 ? attr->size : kQueueSize;
  queue->ops = &g_cq_ops;
  return 0;
}

int OpenAddressVector(struct fid_domain* domain, struct fi_av_attr* attr,
                      struct fid_av** result, void* context) {
  CheckThread();
  struct fid_av* real = nullptr;
  Domain& ours = g_domains.at(&domain->fid);
  int ret = ours.real->av_open(domain, attr, &real, context);
  if (ret != 0) return ret;
  auto* av = MakeObject<AddressVector>(result, real, FI_CLASS_AV, context,
                                       &g_av_fid_ops, &ours);
  av->ops = &g_av_ops;
  return 0;
}

int OpenEventQueue(struct fid_fabric* fabric, struct fi_eq_attr* attr,
                   struct fid_eq** result, void* context) {
  CheckThread();
  if (g_eq == 0) return -FI_ENOSYS;
  struct fid_eq* real = nullptr;
  auto* real_fabric = g_real_fabrics.at(&fabric->fid);
  int ret = real_fabric->eq_open(fabric, attr, &real, context);
  if (ret != 0) return ret;
  MakeObject<EventQueue>(result, real, FI_CLASS_EQ, context, &g_eq_fid_ops,
                         nullptr);
  return 0;
}

int CloseDomain(struct fid* fid) {
  CheckThread();
  Domain& ours = g_domains.at(fid);
  if (ours.open > 0) {
    Violation("order", "a domain is closed before what is in it");
  }
  return ours.real_fid->close(fid);
}

int OpenDomain(struct fid_fabric* fabric, struct fi_info* info,
               struct fid_domain** domain, void* context) {
  struct fi_info* real = RealInfo(info);
  auto* real_fabric = g_real_fabrics.at(&fabric->fid);
  int ret = real_fabric->domain(fabric, real, domain, context);
  if (ret != 0) return ret;
  Domain& ours = g_domains[&(*domain)->fid];
  ours.number = Unique();
  const char* name = info->domain_attr->name;
  size_t real_len = strlen(real->domain_attr->name);
  if (strlen(name) > real_len) ours.adapter = atol(name + real_len + 1);
  ours.mr_mode = static_cast<uint64_t>(real->domain_attr->mr_mode);
  ours.real = Replace((*domain)->ops);
  (*domain)->ops->endpoint = OpenEndpoint;
  (*domain)->ops->cq_open = OpenQueue;
  (*domain)->ops->av_open = OpenAddressVector;
  ours.real_mr = Replace((*domain)->mr);
  (*domain)->mr->regattr = Register;
  (*domain)->mr->reg = RegisterBuffer;
  ours.real_fid = Replace((*domain)->fid.ops);
  (*domain)->fid.ops->close = CloseDomain;
  return 0;
}

// ---- The adapter that a program finds ----

int CloseNic(struct fid*) { return 0; }

struct fi_ops g_nic_ops = {.size = sizeof(g_nic_ops), .close = CloseNic};
char g_nic_name[] = "rdmap79s0";
struct fi_device_attr g_device = {};
struct fi_link_attr g_link = {};
struct fid_nic g_nic = {};

// Makes efa's answer of a provider's. It keeps the names of fabric and domain,
// by which a program may ask for the same interface once more.
void Disguise(struct fi_info* info, const struct fi_info* hints) {
  info->mode = FI_CONTEXT2;
  info->addr_format = FI_ADDR_EFA;
  info->caps &= ~FI_HMEM;
  info->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  if (hints->caps & FI_HMEM) {
    info->caps |= FI_HMEM;
    info->domain_attr->mr_mode |= FI_MR_HMEM;
  }
  info->domain_attr->mr_key_size = sizeof(uint32_t);
  info->domain_attr->cq_data_size = kImmDataSize;
  info->tx_attr->msg_order = hints->tx_attr->msg_order & FI_ORDER_SAS;
  info->rx_attr->msg_order = hints->rx_attr->msg_order & FI_ORDER_SAS;
  info->ep_attr->max_msg_size = g_max_msg;
  free(info->fabric_attr->prov_name);
  const char* name = getenv("STRICT_NAME");
  info->fabric_attr->prov_name = strdup(name != nullptr ? name : "efa");
  g_device.name = g_nic_name;
  g_link.speed = 100'000'000'000;
  g_nic.fid.fclass = FI_CLASS_NIC;
  g_nic.fid.ops = &g_nic_ops;
  g_nic.device_attr = &g_device;
  g_nic.link_attr = &g_link;
  info->nic = &g_nic;
}

// Returns whether efa would have something for who asks for this.
bool CheckHints(const struct fi_info* hints) {
  constexpr int kModes =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  int mr_mode = hints->domain_attr->mr_mode;
  if ((mr_mode & kModes) != kModes) {
    Violation("hints", "mr_mode lacks one of the bits that EFA needs");
    return false;
  }
  if ((hints->mode & FI_CONTEXT2) == 0) {
    Violation("hints", "mode lacks FI_CONTEXT2");
    return false;
  }
  if (hints->ep_attr->max_msg_size > g_max_msg) return false;
  if ((hints->caps & FI_HMEM) == 0) return true;
  if ((mr_mode & FI_MR_HMEM) == 0) {
    Violation("hints", "mr_mode lacks FI_MR_HMEM");
    return false;
  }
  return g_hmem != 0 && g_gpu_is_ours;
}

// Says at the end of the process what there was.
struct Summary {
  ~Summary() {
    if (g_counts.empty()) return;
    if (g_open > 0) {
      Violation("closed",
                std::to_string(g_open) + " objects were never closed");
    }
    fprintf(stderr, "strict: seen");
    for (const auto& [what, count] : g_counts) {
      fprintf(stderr, " %s=%zu,", what.c_str(), count);
    }
    size_t broken = g_violations.size();
    fprintf(stderr, " rules broken: %zu (STRICT_SEED=%u)\n", broken, g_seed);
  }
} g_summary;

// ---- What takes the place of functions of libfabric ----

// Returns whether libfabric itself has called, to build one provider upon
// another. `next` is one of its functions.
bool IsLibfabric(const void* caller, const void* next) {
  Dl_info program;
  Dl_info library;
  return dladdr(caller, &program) != 0 && dladdr(next, &library) != 0 &&
         program.dli_fbase == library.dli_fbase;
}

extern "C" int fi_getinfo(uint32_t version, const char* node,
                          const char* service, uint64_t flags,
                          const struct fi_info* hints, struct fi_info** info) {
  auto* next = Next("fi_getinfo", fi_getinfo);
  if (IsLibfabric(__builtin_return_address(0), reinterpret_cast<void*>(next))) {
    return next(version, node, service, flags, hints, info);
  }
  if (hints == nullptr) Die("fi_getinfo without hints");
  if (!CheckHints(hints)) return -FI_ENODATA;
  // The provider need not do what we do, or what only an adapter can.
  struct fi_info* real_hints = fi_dupinfo(hints);
  real_hints->caps &= ~FI_HMEM;
  real_hints->domain_attr->mr_mode &=
      ~(FI_MR_HMEM | FI_MR_PROV_KEY | FI_MR_LOCAL);
  real_hints->fabric_attr->prov_name = nullptr;
  real_hints->ep_attr->max_msg_size = 0;
  int ret = next(version, node, service, flags, real_hints, info);
  if (ret != 0) return ret;
  auto* dup = Next("fi_dupinfo", fi_dupinfo);
  struct fi_info* first = *info;
  // The answers of other providers would look as if they were efa's, too.
  for (struct fi_info** one = &first->next; *one != nullptr;) {
    struct fi_info* other = *one;
    if (other->addr_format == first->addr_format &&
        strcmp(other->fabric_attr->prov_name, first->fabric_attr->prov_name) ==
            0) {
      one = &other->next;
      continue;
    }
    *one = std::exchange(other->next, nullptr);
    fi_freeinfo(other);
  }
  // The other adapters come first, as copies of the first one.
  std::string name = first->domain_attr->name;
  for (long i = g_adapters; i > 1; --i) {
    struct fi_info* copy = dup(first);
    copy->next = *info;
    *info = copy;
  }
  long number = 0;
  for (struct fi_info* one = *info; one != nullptr; one = one->next) {
    g_real_infos[one] = dup(one);
    Disguise(one, hints);
    if (++number == 1 || number > g_adapters) continue;
    free(one->domain_attr->name);
    one->domain_attr->name =
        strdup((name + "-" + std::to_string(number)).c_str());
  }
  return 0;
}

// A copy of an answer is as good as the answer.
extern "C" struct fi_info* fi_dupinfo(const struct fi_info* info) {
  auto* next = Next("fi_dupinfo", fi_dupinfo);
  auto it = g_real_infos.find(info);
  if (it == g_real_infos.end() ||
      IsLibfabric(__builtin_return_address(0), reinterpret_cast<void*>(next))) {
    return next(info);
  }
  // The adapter is ours, and is never copied.
  struct fi_info bare = *info;
  bare.nic = nullptr;
  struct fi_info* copy = next(&bare);
  copy->nic = info->nic;
  g_real_infos[copy] = next(it->second);
  return copy;
}

extern "C" int fi_fabric(struct fi_fabric_attr* attr,
                         struct fid_fabric** fabric, void* context) {
  auto* next = Next("fi_fabric", fi_fabric);
  if (IsLibfabric(__builtin_return_address(0), reinterpret_cast<void*>(next))) {
    return next(attr, fabric, context);
  }
  // The name of the provider is ours.
  const struct fi_info* real = nullptr;
  for (const auto& [info, real_info] : g_real_infos) {
    if (info->fabric_attr == attr) real = real_info;
  }
  if (real == nullptr) Die("a fabric that is not from fi_getinfo");
  int ret = next(real->fabric_attr, fabric, context);
  if (ret != 0) return ret;
  g_real_fabrics[&(*fabric)->fid] = Replace((*fabric)->ops);
  (*fabric)->ops->domain = OpenDomain;
  (*fabric)->ops->eq_open = OpenEventQueue;
  (*fabric)->ops->trywait = TryWait;
  return 0;
}

// Sleeps on descriptors, and lets the adapters work meanwhile.
int Poll(struct pollfd* fds, nfds_t count, int timeout) {
  static auto* next = Next("poll", poll);
  std::vector<Queue*> queues;
  for (Queue* queue : g_queues) {
    bool asked = std::any_of(fds, fds + count, [&](const struct pollfd& entry) {
      return entry.fd >= 0 && entry.fd == queue->wait_fd;
    });
    if (asked) queues.push_back(queue);
  }
  if (queues.empty()) return next(fds, count, timeout);
  CheckThread();
  Count("poll(2)");
  for (Queue* queue : queues) {
    if (!queue->safe) {
      Violation("wait", "poll(2) without an fi_trywait that said it is safe");
    }
    queue->safe = false;
  }
  Clock::time_point end = Clock::now() + std::chrono::milliseconds(timeout);
  for (;;) {
    for (Queue* queue : g_queues) {
      if (queue->wait_fd < 0 || !HasCompletions(*queue) || !queue->armed) {
        continue;
      }
      Count("wake-ups");
      queue->armed = false;
      eventfd_write(queue->wait_fd, 1);
    }
    bool over = timeout >= 0 && Clock::now() >= end;
    struct timespec step = {0, over ? 0 : kPollStep};
    int ret = ppoll(fds, count, &step, nullptr);
    if (ret != 0 || over) return ret;
  }
}

extern "C" int poll(struct pollfd* fds, nfds_t count, int timeout) {
  return Poll(fds, count, timeout);
}

// What a compiler that fortifies may make of it.
extern "C" int __poll_chk(struct pollfd* fds, nfds_t count, int timeout,
                          size_t) {
  return Poll(fds, count, timeout);
}

// ---- What cuda_stub.cpp calls ----

extern "C" void strict_gpu() { g_gpu_is_ours = true; }

extern "C" void strict_gpu_memory(void* data, void* alias, size_t size) {
  g_gpu_memory[static_cast<char*>(data)] = {static_cast<char*>(alias), size};
}

extern "C" void strict_gpu_memory_freed(void* data) {
  auto gpu = FindGpuMemory(data);
  auto begin = reinterpret_cast<uint64_t>(data);
  for (void* each : g_regions) {
    auto* region = static_cast<Region*>(each);
    const Key& key = *region->shared;
    if (region->object.open && key.base < begin + gpu->second.size &&
        key.base + key.size > begin) {
      Violation("memory", "GPU memory is freed before its region");
    }
  }
  g_gpu_memory.erase(gpu);
}
