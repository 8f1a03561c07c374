// A network as strict as EFA, for the tests: a library that is loaded in front of libfabric
// and makes tcp or shm behave as the efa provider may. It says which of EFA's rules a program
// breaks, and counts what it has seen.
//
// Usage: LD_PRELOAD=build/strict.so PROGRAM...
//   STRICT_DIR=FOLDER     what an adapter would know, addresses and keys, is in files here
//                         (/tmp/strict). Both sides must be on this host, with this library
//                         and the same folder
//   STRICT_SEED=N         of all that is random (otherwise another one each time)
//   STRICT_EAGAIN=P       percent of the posts that find no room (20)
//   STRICT_TX=N           operations in flight, then there is no room (64)
//   STRICT_DELAY_US=N     each piece of an operation starts up to so much later (2000); that of
//   STRICT_WRITE_DELAY_US=N  a WRITE exactly so much, unless it has immediate data
//   STRICT_CQ_DELAY_US=N  and is reported up to so much later (3000); a SEND or
//   STRICT_LATE_SENDS_US=N, STRICT_LATE_WRITES_US=N  a WRITE exactly so much
//   STRICT_PIECES=N       a READ or WRITE travels in up to so many pieces (4)
//   STRICT_RECV_DISORDER=1  RECVs complete in any order
//   STRICT_P4D=1          an older device, which has no RDMA WRITE
//   STRICT_WAIT=1         a completion queue can have a descriptor (FI_WAIT_FD); otherwise it
//                         can't, as with efa of libfabric 1.17
//   STRICT_ADAPTERS=N     so many adapters, each a domain (1)
//   STRICT_SECOND=WHAT    the second of them refuses its first WRITE (write), or has no room
//                         for any (room); or none of them registers what another one has
//                         registered, to WRITE from it (memory)
// Or it lacks what another provider or machine lacks:
//   STRICT_NAME=NAME      what the provider is called (efa)
//   STRICT_MAX_MSG=N      bytes of the longest SEND; efa has no limit, efa-direct that of a
//                         packet, some 8 KiB
//   STRICT_LACKS=WHAT     one of these: gpu; events (event queues, as opx); immediate-data
//                         (as iWARP); atomics; keys of its own, so that a program chooses them;
//                         truncation, an error for a message longer than its RECV (one that
//                         fills its RECV is said to be longer); memory-to-send or
//                         memory-to-register (as where `ulimit -l` is low); fsync-of-files or
//                         fsync-of-directories (a disk that does not keep them)
//   STRICT_SLOW_WRITE=FILE  a pwrite waits, and says so, until there is this file
//   STRICT_NETWORK=0      the network is left as it is
//
// The rules, by the names under which it reports them, and where they are from: fi_...(N) are
// libfabric's manual pages, files are those of prov/efa/src in libfabric 2.6.0 unless another
// version is named.
//
//   hints      demands that a program must be able to meet: FI_MR_ALLOCATED, VIRT_ADDR,
//              PROV_KEY, HMEM with FI_HMEM (efa_prov_info.c, efa_user_info.c); FI_MR_LOCAL and
//              FI_CONTEXT2 (efa-direct)
//   sas        who sends several messages has asked for their order (fi_endpoint(3))
//   thread     one thread uses a domain (FI_THREAD_DOMAIN in fi_domain(3))
//   eq         without an event queue, an error that belongs to no operation aborts the
//              process (efa_base_ep_write_eq_error in efa_base_ep.c)
//   order      what is in use is not closed (fi_close in fi_cq(3), fi_av(3), fi_mr(3))
//   closed     what is closed is not used (this ends the process), and all is in the end
//   desc       a local buffer has the descriptor of a region that it lies in (FI_MR_LOCAL in
//              fi_mr(3); "a valid desc" in efa_msg.c), and that is one of the endpoint's own
//              domain (fi_domain(3))
//   access     rights, bounds and keys (fi_mr(3); ofi_mr_map_verify, called in
//              rdm/efa_rdm_rma.c), and alignment of atomic operations. A key is one of the
//              domain in which the peer's endpoint is
//   context    one operation at a time has a context, which is the provider's as long as it is
//              in flight (FI_CONTEXT2 in fi_getinfo(3))
//   change     the buffer of a SEND or WRITE stays as it is until it completes
//   memory     a region's pages exist (FI_MR_ALLOCATED in fi_mr(3)) as long as the region, and
//              iface says where they are
//   size       nothing is longer than max_msg_size; immediate data has 4 bytes
//              (EFA_CQ_DATA_SIZE in efa_cq.h)
//   cq         completions never outnumber the entries of their queue; efa does not prevent it
//              (docs/efa_fabric_comparison.md, FI_RM_ENABLED)
//   peer       an address is used after fi_av_insert and before fi_av_remove (fi_av(3))
//   flush      what an adapter has written into a GPU's memory is flushed before it is read
//              (cudaDeviceFlushGPUDirectRDMAWrites in NVIDIA's CUDA Runtime API). A copy
//              could do without, but not a kernel that is running
//   wait       fi_trywait takes queues that have a descriptor (prov/verbs/src/verbs_cq.c), and
//              has allowed each poll(2) after the last completion was read (fi_poll(3))
//
// What it does that programs must bear:
//   WRITEs and READs start in any order (msg_order has no bit for them: efa_prov_info.c), in
//   pieces (max_order_waw_size, also in fi_endpoint(3)). Immediate data comes with the last
//   piece of its WRITE, when all others have arrived. If other WRITEs are in flight, every
//   second one that has immediate data starts at once, to overtake them. SENDs keep their
//   order only for a program that asks for FI_ORDER_SAS
//   (efa_user_info_alter_rdm). Who does not ask for FI_DELIVERY_COMPLETE gets a completion
//   while its data is still here (fi_cq(3)). A RECV's or READ's buffer holds garbage until it
//   completes. -FI_EAGAIN can come at any time (rdm/efa_rdm_rma.c, _msg.c). An entry of the
//   completion queue has garbage where fi_cq(3) says nothing. What is in flight to an address
//   that is removed is canceled, or nobody hears of it again: "the behavior of operations in
//   progress [...] is undefined" (fi_av(3)); efa releases them (efa_rdm_peer_destruct in
//   rdm/efa_rdm_peer.c).
//   P4D: a WRITE of more than a packet may be a READ by the target (rdm/efa_rdm_rma.c,
//   efa_hmem.c), into a region that lets it do so only with FI_RECV (libfabric 1.19 to 2.1:
//   efa_mr_reg_impl in efa_mr.c).
//   Without WAIT, who asks for a descriptor gets no queue (rxr_cq_open in rxr/rxr_cq.c of
//   libfabric 1.17), and there is no fi_trywait (fi_no_trywait, as in prov/lnx and prov/ucx).
//   WAIT: the descriptor becomes readable for one completion, the first that comes after an
//   fi_trywait that said 0, and stays so until the next fi_trywait, as a completion channel of
//   verbs does (vrb_cq_trywait in prov/verbs/src/verbs_cq.c, efa_cq_trywait in efa_cq.c). Our
//   poll(2) takes the place of the C library's; the adapter goes on working meanwhile.
//
// The objects that a program gets are ours, with tables of our functions; the provider's are
// behind them. What it knows is what the programs use: the short forms (fi_send, not
// fi_sendmsg), and entries in FI_CQ_FORMAT_DATA.

#define STAND_IN "strict"
#include <errno.h>
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
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "stand_in.h"

#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

using Clock = std::chrono::steady_clock;

// ---- Settings ----

const auto g_seed =
    static_cast<uint32_t>(Setting("STRICT_SEED", std::random_device()()));
const long g_eagain = Setting("STRICT_EAGAIN", 20);
const auto g_tx = static_cast<size_t>(Setting("STRICT_TX", 64));
const long g_delay = Setting("STRICT_DELAY_US", 2000);
const long g_cq_delay = Setting("STRICT_CQ_DELAY_US", 3000);
const long g_write_delay = Setting("STRICT_WRITE_DELAY_US", -1);
const long g_late_sends = Setting("STRICT_LATE_SENDS_US", -1);
const long g_late_writes = Setting("STRICT_LATE_WRITES_US", -1);
const auto g_pieces = static_cast<size_t>(Setting("STRICT_PIECES", 4));
const bool g_recv_disorder = Setting("STRICT_RECV_DISORDER", 0);
const bool g_p4d = Setting("STRICT_P4D", 0);
const bool g_wait = Setting("STRICT_WAIT", 0);
const long g_adapters = Setting("STRICT_ADAPTERS", 1);
const auto g_max_msg = static_cast<size_t>(Setting("STRICT_MAX_MSG", -1));
const bool g_network = Setting("STRICT_NETWORK", 1);

// Returns whether a setting that is a word has this value.
bool Is(const char* name, const char* word) {
  const char* value = getenv(name);
  return value != nullptr && strcmp(value, word) == 0;
}

bool Lacks(const char* what) { return Is("STRICT_LACKS", what); }

constexpr size_t kPageSize = 4096;
constexpr size_t kInjectSize = 32;   // bytes; efa-direct's
constexpr size_t kQueueSize = 1024;  // of a program that leaves it to us
constexpr size_t kP4dWrite = 8000;   // a WRITE of so many bytes may be a READ
constexpr long kReadyPercent = 70;   // of the looks at the completion queue
constexpr size_t kMaxReports = 3;    // of the same rule
constexpr long kPollStep = 200'000;  // ns, between two looks of a sleeper

std::mt19937_64 g_random(g_seed);

uint64_t Random(uint64_t below) { return g_random() % below; }

bool Percent(long percent) { return static_cast<long>(Random(100)) < percent; }

Clock::time_point Later(long us, bool exactly = false) {
  auto delay = static_cast<uint64_t>(us);
  return Clock::now() +
         std::chrono::microseconds(exactly ? delay : Random(delay + 1));
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

// Says so if a rule is broken. Returns whether it is.
bool Broken(bool broken, const char* rule, const std::string& text) {
  if (!broken || ++g_violations[rule] > kMaxReports) return broken;
  fprintf(stderr, "strict: VIOLATION of %s: %s (STRICT_SEED=%u)\n", rule,
          text.c_str(), g_seed);
  void* frames[8];
  int depth = backtrace(frames, 8);
  backtrace_symbols_fd(frames + 1, std::max(depth - 1, 0), STDERR_FILENO);
  return true;
}

// ---- Objects ----

struct Endpoint;

// What we know about an object that a program has got from us. It is never
// freed, so that we see what a program does with it after fi_close.
struct Object {
  const char* kind;
  Object* parent;                      // the domain or fabric that it is in
  size_t users = 0;                    // open objects, or operations in flight
  std::set<Endpoint*> endpoints = {};  // that it is bound to
  bool open = false;
};

size_t g_open = 0;  // objects that the program has not closed yet

// Begins each call of a function of an object.
void Use(const Object& object) {
  static const long first = syscall(SYS_gettid);
  Broken(syscall(SYS_gettid) != first, "thread", "a call from another thread");
  std::string what = std::string(object.kind) + " is used after fi_close";
  if (Broken(!object.open, "closed", what)) abort();
}

void BeginClose(Object& object) {
  Broken(object.users + object.endpoints.size() > 0, "order",
         std::string(object.kind) + " is closed while others use it");
  object.open = false;
  --g_open;
  if (object.parent != nullptr) --object.parent->users;
}

// What a program gets instead of an object of the provider.
template <typename Fid>
struct Wrapper : Fid, Object {
  using Base = Fid;
  Fid* real = nullptr;  // of a region, only if somebody else may use it

  Wrapper(const char* kind, size_t fclass, fi_ops* ops, Object* parent)
      : Fid{.fid = {.fclass = fclass, .ops = ops}}, Object{kind, parent} {}

  // Begins its life, if the provider has opened its own object. Returns what that
  // has returned.
  int Open(int ret, Fid** result) {
    if (ret != 0) return ret;
    ++g_open;
    open = true;
    if (parent != nullptr) ++parent->users;
    *result = this;
    return 0;
  }
};

// Returns our object of this type, which is used. The fid is at the beginning of each.
template <typename T>
T& Ours(typename T::Base* fid) {
  Use(*static_cast<T*>(fid));
  return *static_cast<T*>(fid);
}

template <typename T>
T& Ours(struct fid* fid) {
  return Ours<T>(reinterpret_cast<typename T::Base*>(fid));
}

template <typename T>
int Close(struct fid* fid) {
  T& ours = Ours<T>(fid);
  BeginClose(ours);
  return fi_close(&ours.real->fid);
}

// Those whose end needs no more than that.
template <typename T>
fi_ops g_ops = {.size = sizeof(g_ops<T>), .close = Close<T>};

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

struct Fabric : Wrapper<fid_fabric> {
  Fabric() : Wrapper("a fabric", FI_CLASS_FABRIC, &g_ops<Fabric>, nullptr) {}
};

struct Domain : Wrapper<fid_domain> {
  explicit Domain(Fabric* fabric)
      : Wrapper("a domain", FI_CLASS_DOMAIN, &g_ops<Domain>, fabric) {}
  uint64_t number = Unique();
  long adapter = 1;             // which of those that we offer
  bool hmem = false;            // the program has asked for GPU memory
  bool real_virt_addr = false;  // the provider has no offsets
};

struct EventQueue : Wrapper<fid_eq> {
  explicit EventQueue(Fabric* fabric)
      : Wrapper("an event queue", FI_CLASS_EQ, &g_ops<EventQueue>, fabric) {}
};

// ---- Memory: that of the GPU is what cuda_stub.cpp tells us ----

struct GpuMemory {
  char* alias;  // where we may touch it
  size_t size;
};
std::map<char*, GpuMemory> g_gpu_memory;

extern "C" void strict_gpu_memory(void* data, void* alias, size_t size) {
  g_gpu_memory[static_cast<char*>(data)] = {static_cast<char*>(alias), size};
}

extern "C" void strict_gpu_not_flushed() {
  Broken(
      true, "flush",
      "GPU memory is read before a flush: a running kernel may see old data");
}

extern "C" void strict_gpu_memory_freed(void* data) {
  g_gpu_memory.erase(static_cast<char*>(data));
}

// Returns where we can read and write what is at this address.
char* Touch(const void* address) {
  auto* at = static_cast<char*>(const_cast<void*>(address));
  auto it = g_gpu_memory.upper_bound(at);
  if (it == g_gpu_memory.begin()) return at;
  const auto& [data, memory] = *--it;
  return at < data + memory.size ? memory.alias + (at - data) : at;
}

bool IsGpuMemory(const void* address) { return Touch(address) != address; }

size_t Hash(const char* bytes, size_t size) {
  return std::hash<std::string_view>()({bytes, size});
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
  uint64_t real_base;  // as the provider of another process does
  uint64_t real_key;
  uint64_t domain;
  bool open;
  bool gpu;

  void* data() const { return reinterpret_cast<void*>(base); }
};

// An endpoint.
struct Name {
  uint8_t real[512];
  uint64_t domain;
};

// What the program takes for an address, as long as efa's (GID, QPN, QKEY).
struct Address {
  uint64_t numbers[4] = {Unique(), Unique(), Unique(), Unique()};
};

// Returns the path of the file of a key or an endpoint.
std::string File(const char* kind, uint64_t number) {
  const char* folder = getenv("STRICT_DIR");
  if (folder == nullptr) folder = "/tmp/strict";
  mkdir(folder, 0700);
  return std::string(folder) + "/" + kind + std::to_string(number);
}

std::string NameFile(const void* address) {
  return File("name-",
              Hash(static_cast<const char*>(address), sizeof(Address)));
}

// Maps such a file into memory. Returns nullptr if there is none.
template <typename T>
T* Map(const std::string& file, bool create) {
  int flags = create ? O_RDWR | O_CREAT | O_EXCL : O_RDWR;
  int fd = open(file.c_str(), flags, 0600);
  if (fd < 0 && create) Die("no file can be made in STRICT_DIR");
  if (fd < 0) return nullptr;
  if (create && ftruncate(fd, sizeof(T)) != 0) Die("STRICT_DIR is full");
  void* map =
      mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (map == MAP_FAILED) Die("a file in STRICT_DIR can't be mapped");
  return static_cast<T*>(map);
}

// ---- Regions ----

extern fi_ops g_mr_fid_ops;

struct Region : Wrapper<fid_mr> {
  explicit Region(Domain* domain)
      : Wrapper("a region", FI_CLASS_MR, &g_mr_fid_ops, domain) {
    mem_desc = this;
  }
  Key* shared = nullptr;
};

std::set<Region*> g_regions;  // all that there ever were

int CloseRegion(struct fid* fid) {
  auto& region = Ours<Region>(fid);
  BeginClose(region);
  Key& key = *region.shared;
  Broken(key.gpu ? !IsGpuMemory(key.data()) : !PagesExist(key.data(), key.size),
         "memory", "the memory of a region is freed before the region");
  key.open = false;
  unlink(File("key-", region.key).c_str());
  return region.real != nullptr ? fi_close(&region.real->fid) : 0;
}

fi_ops g_mr_fid_ops = {.size = sizeof(g_mr_fid_ops), .close = CloseRegion};

int Register(struct fid* fid, const fi_mr_attr* attr, uint64_t flags,
             fid_mr** result) {
  auto& domain = Ours<Domain>(fid);
  auto& region = *new Region(&domain);
  if (attr->iov_count != 1) Die("a region of several parts");
  void* data = attr->mr_iov->iov_base;
  size_t size = attr->mr_iov->iov_len;
  bool gpu = IsGpuMemory(data);
  Broken((attr->iface == FI_HMEM_CUDA) != gpu, "memory",
         gpu ? "GPU memory without FI_HMEM_CUDA"
             : "FI_HMEM_CUDA for memory of the host");
  if (gpu) Count("regions of GPU memory");
  Broken(gpu && !domain.hmem, "memory", "nobody asked for FI_HMEM");
  Broken(attr->access == 0, "access", "a region without any right");
  Broken(!gpu && !PagesExist(data, size), "memory",
         "a region of pages that do not exist");
  // As wide as efa's.
  region.key =
      Lacks("keys") ? attr->requested_key : static_cast<uint32_t>(Unique());
  if (region.key >> 32 != 0) return -FI_EKEYREJECTED;
  bool taken =
      std::any_of(g_regions.begin(), g_regions.end(), [&](Region* other) {
        return other->open && other->parent != &domain &&
               other->shared->data() == data;
      });
  if (Lacks("memory-to-register") ||
      (taken && attr->access == FI_WRITE && Is("STRICT_SECOND", "memory"))) {
    return -FI_ENOMEM;
  }
  auto* key = region.shared = Map<Key>(File("key-", region.key), true);
  *key = {.base = reinterpret_cast<uint64_t>(data),
          .size = size,
          .access = attr->access,
          .domain = domain.number,
          .open = true,
          .gpu = gpu};
  g_regions.insert(&region);
  // The provider has no use for local registrations: see fi_getinfo below.
  if ((attr->access & (FI_REMOTE_READ | FI_REMOTE_WRITE)) == 0) {
    return region.Open(0, result);
  }
  iovec iov = {Touch(data), size};
  fi_mr_attr real = *attr;
  real.mr_iov = &iov;
  real.requested_key = region.key;
  real.iface = FI_HMEM_SYSTEM;
  real.device = {};
  int ret = fi_mr_regattr(domain.real, &real, flags, &region.real);
  if (ret != 0) return ret;
  key->real_base =
      domain.real_virt_addr ? reinterpret_cast<uint64_t>(iov.iov_base) : 0;
  key->real_key = fi_mr_key(region.real);
  return region.Open(0, result);
}

// The short form.
int RegisterBuffer(struct fid* domain, const void* data, size_t size,
                   uint64_t access, uint64_t, uint64_t key, uint64_t flags,
                   fid_mr** result, void*) {
  iovec iov = {const_cast<void*>(data), size};
  fi_mr_attr attr = {
      .mr_iov = &iov, .iov_count = 1, .access = access, .requested_key = key};
  return Register(domain, &attr, flags, result);
}

// ---- Operations ----

enum Kind : uint8_t { kSend, kRecv, kWrite, kRead, kFetch, kCompare };
struct Traits {
  const char* name;
  uint64_t flags;   // of the completion
  uint64_t rights;  // that it takes at the other end
};
constexpr Traits kTraits[] = {
    {"SEND", FI_SEND | FI_MSG, 0},
    {"RECV", FI_RECV | FI_MSG, 0},
    {"WRITE", FI_WRITE | FI_RMA, FI_REMOTE_WRITE},
    {"READ", FI_READ | FI_RMA, FI_REMOTE_READ},
    {"FETCH-OP", FI_READ | FI_ATOMIC, FI_REMOTE_READ | FI_REMOTE_WRITE},
    {"COMPARE-OP", FI_READ | FI_ATOMIC, FI_REMOTE_READ | FI_REMOTE_WRITE}};

struct Op;

// A part of an operation, which the provider takes for a whole one.
struct Piece {
  fi_context2 context = {};  // must come first: it comes back to us
  Op* op = nullptr;
  size_t offset = 0;
  size_t len = 0;
  Clock::time_point due;  // when the provider gets it

  bool has_number() const;
};

// Memory of the program.
struct Buffer {
  const void* data;
  void* desc;
};

// What a function that posts has been called with.
struct Call {
  Kind kind;
  fid_ep* fid;
  size_t size;  // bytes
  fi_addr_t addr;
  void* context;
  Buffer source;  // of all that change what is elsewhere
  Buffer target;  // of a RECV, a READ, or an old word
  uint64_t at;    // in the peer's memory
  uint64_t key;
  bool has_number;  // immediate data
  uint64_t number;
  fi_op atomic_op;
  Buffer expected;  // of a compare-and-swap
};

// What an operation takes from the program's memory.
struct Source {
  const char* data;
  size_t hash;  // must be the same at the end
};

// From CheckRemote() on, its `at` and `key` are the provider's.
struct Op : Call {
  Endpoint* ep = nullptr;
  fi_context2 pattern = {};  // what is in the context now
  std::vector<Region*> regions;
  std::vector<Source> sources;
  char* into = nullptr;  // the target
  // What the provider uses instead of the target; or a copy of the source, where
  // the completion comes before the provider has got the operation.
  std::vector<char> shadow;
  std::deque<Piece> pieces;
  size_t pieces_left = 0;  // that have not completed
  bool ended = false;      // well or not; the program will read so
  bool reported = false;   // it has done so

  // Begins what is said about it.
  std::string Name() const {
    return kTraits[kind].name + (" of " + std::to_string(size) + " bytes: ");
  }
};

// Returns whether immediate data travels with it: with the last piece of a WRITE.
bool Piece::has_number() const {
  return op->has_number && this == &op->pieces.back();
}

struct Completion {
  Clock::time_point due;
  Op* op;  // nullptr: immediate data from the other side, or an error of nobody's
  fi_cq_err_entry entry;  // its `err` is 0 if all is well
};

extern fi_ops g_cq_fid_ops, g_ep_fid_ops;

struct Queue : Wrapper<fid_cq> {
  explicit Queue(Domain* domain)
      : Wrapper("a completion queue", FI_CLASS_CQ, &g_cq_fid_ops, domain) {}
  size_t size = 0;
  size_t in_flight = 0;
  std::deque<Completion> completions;
  Clock::time_point last_recv;  // when the last RECV will be reported
  int wait_fd = -1;             // an eventfd, if the program has asked for one
  bool armed = false;           // the next completion makes it readable
  bool safe = false;  // fi_trywait has said that the program may sleep
};

std::set<Queue*> g_queues;  // those that are open

struct AddressVector : Wrapper<fid_av> {
  explicit AddressVector(Domain* domain)
      : Wrapper("an address vector", FI_CLASS_AV, &g_ops<AddressVector>,
                domain) {}
  std::map<fi_addr_t, Name*> names;
};

struct Endpoint : Wrapper<fid_ep> {
  explicit Endpoint(Domain* domain)
      : Wrapper("an endpoint", FI_CLASS_EP, &g_ep_fid_ops, domain) {}
  Queue* cq = nullptr;
  AddressVector* av = nullptr;
  EventQueue* eq = nullptr;
  bool keeps_order = false;     // of SENDs
  std::set<fi_addr_t> greeted;  // those that have been sent something
  bool delivers = false;        // what completes has arrived
  size_t tx = 0;                // operations in flight that are no RECVs
  size_t write_bytes = 0;       // of the WRITEs among them
  size_t numbers = 0;           // WRITEs so far that had others to overtake
  void* refused = nullptr;  // the context of the last post, if it found no room
  std::set<Op*> in_flight;
  std::vector<Piece*> held;  // that the provider has not got yet
  Address address;

  const Domain& domain() const { return *static_cast<Domain*>(parent); }
};

std::set<void*> g_contexts;  // of operations in flight

// ---- Checks of what is posted ----

// Checks a local buffer, and remembers that the operation uses its region. Returns
// where we can touch it.
char* CheckLocal(Op& op, const Buffer& buffer, uint64_t right) {
  auto* region = static_cast<Region*>(buffer.desc);
  if (Broken(!g_regions.contains(region), "desc",
             op.Name() + "no descriptor")) {
    return Touch(buffer.data);
  }
  Use(*region);
  op.regions.push_back(region);
  const Key& key = *region->shared;
  auto at = reinterpret_cast<uint64_t>(buffer.data);
  Broken(region->parent != op.ep->parent, "desc",
         op.Name() + "the descriptor is of another domain");
  Broken(at < key.base || at + op.size > key.base + key.size, "desc",
         op.Name() + "not in the region of its descriptor");
  Broken((key.access & right) != right, "access",
         op.Name() + "the region lacks a local right");
  return Touch(buffer.data);
}

// Notes what an operation takes from the program's memory, if anything.
void AddSource(Op& op, const Buffer& buffer) {
  if (buffer.data == nullptr) return;
  char* at = CheckLocal(op, buffer, op.kind == kSend ? FI_SEND : FI_WRITE);
  op.sources.push_back({at, Hash(at, op.size)});
}

// Notes where the operation puts something, if it does. Until it completes, garbage
// is there.
void SetTarget(Op& op) {
  if (op.target.data == nullptr) return;
  op.into = CheckLocal(op, op.target, op.kind == kRecv ? FI_RECV : FI_READ);
  memset(op.into, 0xa5, op.size);
  op.shadow.assign(op.size, 0x5a);
}

// Returns whether there is somebody to send to.
bool CheckSend(Endpoint& ep, fi_addr_t addr, size_t size) {
  Broken(!ep.greeted.insert(addr).second && !ep.keeps_order, "sas",
         "a second SEND to a peer");
  Broken(size > g_max_msg, "size",
         "a SEND of " + std::to_string(size) + " bytes");
  return !Broken(!ep.av->names.contains(addr), "peer",
                 "a SEND to an address that is not in the address vector");
}

// Returns why the adapter at the other end would refuse; empty if it would not.
std::string WhyRefused(const Op& op, const Key* key) {
  if (key == nullptr) return "there is no such key";
  auto peer = op.ep->av->names.find(op.addr);
  if (peer == op.ep->av->names.end()) return "there is no such peer";
  if (key->domain != peer->second->domain) {
    return "this is a key of another domain than the peer's";
  }
  if (!key->open) return "the region has been closed";
  if (op.at < key->base || op.at + op.size > key->base + key->size) {
    return "this is outside of the region";
  }
  uint64_t rights = kTraits[op.kind].rights;
  if ((key->access & rights) != rights) return "the region lacks a right";
  if (g_p4d && op.kind == kWrite && (key->access & FI_RECV) == 0 &&
      op.size >= kP4dWrite) {
    return "a target without FI_RECV may not READ into its region";
  }
  return "";
}

// Checks a remote address, and translates it into the provider's. Returns whether
// the adapter there permits this.
bool CheckRemote(Op& op) {
  static std::map<uint64_t, Key*> known;
  Key*& key = known[op.key];
  if (key == nullptr) key = Map<Key>(File("key-", op.key), false);
  std::string why = WhyRefused(op, key);
  if (Broken(!why.empty(), "access", op.Name() + why)) return false;
  op.at = key->real_base + (op.at - key->base);
  op.key = key->real_key;
  // On request, the second adapter fails once.
  static bool fails = Is("STRICT_SECOND", "write");
  return op.kind != kWrite || op.ep->domain().adapter != 2 ||
         !std::exchange(fails, false);
}

// Writes over the program's context, as a provider that uses it.
void Scribble(Op& op) {
  for (void*& word : op.pattern.internal)
    word = reinterpret_cast<void*>(g_random());
  memcpy(op.context, &op.pattern, sizeof(op.pattern));
}

// ---- From posting to completion ----

// Hands a piece over to the provider.
ssize_t HandOver(Piece& piece) {
  Op& op = *piece.op;
  fid_ep* ep = op.ep->real;
  const char* source = op.sources.empty() ? nullptr : op.sources[0].data;
  char* local = op.shadow.data() + piece.offset;
  const char* from =
      (op.shadow.empty() ? source : op.shadow.data()) + piece.offset;
  uint64_t at = op.at + piece.offset;
  switch (op.kind) {
    case kSend:
      return fi_send(ep, from, piece.len, nullptr, op.addr, &piece);
    case kRecv:
      return fi_recv(ep, local, piece.len, nullptr, op.addr, &piece);
    case kWrite:
      return piece.has_number()
                 ? fi_writedata(ep, from, piece.len, nullptr, op.number,
                                op.addr, at, op.key, &piece)
                 : fi_write(ep, from, piece.len, nullptr, op.addr, at, op.key,
                            &piece);
    case kRead:
      return fi_read(ep, local, piece.len, nullptr, op.addr, at, op.key,
                     &piece);
    case kFetch:
      return fi_fetch_atomic(ep, source, 1, nullptr, local, nullptr, op.addr,
                             at, op.key, FI_UINT64, op.atomic_op, &piece);
    case kCompare:
      return fi_compare_atomic(ep, source, 1, nullptr, op.sources[1].data,
                               nullptr, local, nullptr, op.addr, at, op.key,
                               FI_UINT64, op.atomic_op, &piece);
  }
  return -FI_EINVAL;
}

// Lets the program read how an operation has ended: some time later if all is well.
void End(Op& op, fi_cq_err_entry entry) {
  // The pieces that the provider has not got yet go no further.
  op.pieces_left -= std::erase_if(
      op.ep->held, [&](const Piece* piece) { return piece->op == &op; });
  if (std::exchange(op.ended, true)) return;
  entry.flags = kTraits[op.kind].flags;
  Queue& cq = *op.ep->cq;
  Clock::time_point due = Clock::now();
  if (entry.err == 0) {
    long late = op.kind == kSend    ? g_late_sends
                : op.kind == kWrite ? g_late_writes
                                    : -1;
    due = late < 0 ? Later(g_cq_delay) : Later(late, true);
    if (op.kind != kRecv) entry.len = g_random();
    if (op.kind == kRecv && !g_recv_disorder) {
      due = cq.last_recv = std::max(due, cq.last_recv);
    }
    if (entry.len == op.size && Lacks("truncation")) ++entry.len;
    entry.buf = reinterpret_cast<void*>(g_random());
    entry.data = g_random();
  }
  cq.completions.push_back({due, &op, entry});
}

fi_cq_err_entry Error(ssize_t error) {
  fi_cq_err_entry entry = {};
  entry.err = static_cast<int>(error);
  return entry;
}

// Begins when a piece is done, well or not, or the program has read so.
void ForgetIfDone(Op* op) {
  if (!op->reported || op->pieces_left > 0) return;
  op->ep->in_flight.erase(op);
  delete op;
}

void PieceDone(Piece& piece, const fi_cq_err_entry& entry) {
  Op* op = piece.op;
  if (--op->pieces_left == 0 || entry.err != 0) End(*op, entry);
  ForgetIfDone(op);
}

// Hands over what is due, as far as the provider has room.
void Progress(Endpoint& ep) {
  Clock::time_point now = Clock::now();
  // SENDs keep their order to one peer. Another peer's need not wait.
  std::set<fi_addr_t> in_line;
  for (size_t i = 0; i < ep.held.size();) {
    Piece* piece = ep.held[i];
    fi_addr_t peer = piece->op->addr;
    bool in_order = piece->op->kind == kSend && ep.keeps_order;
    bool waits = (in_order && in_line.contains(peer)) ||
                 (piece->has_number() && piece->op->pieces_left > 1);
    if (piece->due <= now && !waits) {
      // Not in the list any more when it fails.
      auto place = static_cast<ptrdiff_t>(i);
      ep.held.erase(ep.held.begin() + place);
      ssize_t ret = HandOver(*piece);
      if (ret != 0 && ret != -FI_EAGAIN) PieceDone(*piece, Error(-ret));
      if (ret != -FI_EAGAIN) continue;
      ep.held.insert(ep.held.begin() + place, piece);
    }
    if (in_order) in_line.insert(peer);
    ++i;
  }
}

// Cuts an operation into pieces. A word of 8 bytes stays whole.
void Cut(Op& op) {
  std::set<size_t> cuts = {0};
  if (op.kind == kWrite || op.kind == kRead) {
    for (size_t i = Random(g_pieces); i > 0 && op.size > 0; --i) {
      size_t cut = Random(op.size);
      cuts.insert(cut - std::min(cut, (op.at + cut) % 8));
    }
  }
  for (auto it = cuts.begin(); it != cuts.end(); ++it) {
    size_t end = std::next(it) == cuts.end() ? op.size : *std::next(it);
    op.pieces.push_back({.op = &op, .offset = *it, .len = end - *it});
  }
  op.pieces_left = op.pieces.size();
}

// Gives back what an operation has of the program and of the adapter.
void Release(Op* op) {
  for (Region* region : op->regions) --region->users;
  g_contexts.erase(op->context);
  if (op->kind != kRecv) --op->ep->tx;
  if (op->kind == kWrite) op->ep->write_bytes -= op->size;
  --op->ep->cq->in_flight;
  op->reported = true;
}

// Ends an operation, because the program reads so. Returns its context.
void* Report(Op* op, size_t received) {
  void* context = op->context;
  Broken(memcmp(context, &op->pattern, sizeof(op->pattern)) != 0, "context",
         op->Name() + "its context changed while in flight");
  Scribble(*op);
  for (const Source& source : op->sources) {
    Broken(Hash(source.data, op->size) != source.hash, "change",
           op->Name() + "changed while in flight");
  }
  if (op->into != nullptr) {
    memcpy(op->into, op->shadow.data(), std::min(received, op->size));
  }
  Release(op);
  ForgetIfDone(op);
  return context;
}

// ---- The functions of an endpoint ----

// Returns whether the adapter has no room for one more operation.
bool NoRoom(const Endpoint& ep, Kind kind) {
  return Percent(g_eagain) || (kind != kRecv && ep.tx >= g_tx) ||
         (kind == kWrite && ep.domain().adapter == 2 &&
          Is("STRICT_SECOND", "room"));
}

// Takes an operation that is in order, and starts it sooner or later.
ssize_t Post(const Call& call) {
  auto& ep = Ours<Endpoint>(call.fid);
  // No rule, but a program that has a queue tries the same one again.
  void* refused = std::exchange(ep.refused, nullptr);
  if (refused != nullptr && refused != call.context) Count("overtaken");
  if (NoRoom(ep, call.kind)) {
    ep.refused = call.context;
    return -FI_EAGAIN;
  }
  if (call.kind == kSend && Lacks("memory-to-send")) return -FI_ENOMEM;
  if (call.kind == kSend && !CheckSend(ep, call.addr, call.size))
    return -FI_EINVAL;
  Op& op = *new Op{call, &ep};
  SetTarget(op);
  AddSource(op, call.source);
  AddSource(op, call.expected);
  if (op.context == nullptr) Die("an operation without a context");
  Broken(!g_contexts.insert(op.context).second, "context",
         op.Name() + "one in flight has the same context");
  Scribble(op);
  for (Region* region : op.regions) ++region->users;
  ep.in_flight.insert(&op);
  Count(kTraits[op.kind].name);
  if (op.kind != kRecv) ++ep.tx;
  if (op.kind == kWrite) {
    size_t& most = g_counts["most bytes of WRITEs"];
    most = std::max(most, ep.write_bytes += op.size);
  }
  Broken(++ep.cq->in_flight > ep.cq->size, "cq",
         "more operations are in flight than it has entries");
  if (kTraits[op.kind].rights != 0 && !CheckRemote(op)) {
    End(op, Error(FI_EACCES));
    return 0;
  }
  if ((op.kind == kSend || op.kind == kWrite) && !ep.delivers) {
    const char* data = op.sources[0].data;
    op.shadow.assign(data, data + op.size);
    End(op, {});
  }
  Cut(op);
  bool overtakes = op.has_number && ep.write_bytes > op.size;
  bool at_once = op.kind == kRecv || (overtakes && ep.numbers++ % 2 == 0);
  for (Piece& piece : op.pieces) {
    bool exactly = op.kind == kWrite && !op.has_number && g_write_delay >= 0;
    piece.due = at_once ? Clock::now()
                        : Later(exactly ? g_write_delay : g_delay, exactly);
    // Anywhere, but SENDs have to stay in line.
    size_t place =
        op.kind == kSend ? ep.held.size() : Random(ep.held.size() + 1);
    ep.held.insert(ep.held.begin() + static_cast<ptrdiff_t>(place), &piece);
  }
  Progress(ep);
  return 0;
}

ssize_t Send(fid_ep* ep, const void* data, size_t size, void* desc,
             fi_addr_t addr, void* context) {
  return Post({kSend, ep, size, addr, context, {data, desc}});
}

ssize_t Recv(fid_ep* ep, void* data, size_t size, void* desc, fi_addr_t addr,
             void* context) {
  return Post({kRecv, ep, size, addr, context, {}, {data, desc}});
}

// Leaves at once, and nobody hears what became of it.
ssize_t Inject(fid_ep* fid, const void* data, size_t size, fi_addr_t addr) {
  auto& ep = Ours<Endpoint>(fid);
  if (NoRoom(ep, kSend)) return -FI_EAGAIN;
  Broken(size > kInjectSize, "size", "too many bytes for fi_inject");
  if (!CheckSend(ep, addr, size)) return -FI_EINVAL;
  return fi_inject(ep.real, data, size, addr);
}

ssize_t Write(fid_ep* ep, const void* data, size_t size, void* desc,
              fi_addr_t addr, uint64_t at, uint64_t key, void* context) {
  return Post({kWrite, ep, size, addr, context, {data, desc}, {}, at, key});
}

ssize_t WriteData(fid_ep* ep, const void* data, size_t size, void* desc,
                  uint64_t number, fi_addr_t addr, uint64_t at, uint64_t key,
                  void* context) {
  Broken(number >> 32 != 0, "size", "immediate data of more than 4 bytes");
  Call call = {kWrite, ep, size, addr, context, {data, desc}, {}, at, key};
  call.has_number = true;
  call.number = static_cast<uint32_t>(number);
  return Post(call);
}

ssize_t Read(fid_ep* ep, void* data, size_t size, void* desc, fi_addr_t addr,
             uint64_t at, uint64_t key, void* context) {
  return Post({kRead, ep, size, addr, context, {}, {data, desc}, at, key});
}

// Without `expected`, it is no compare-and-swap.
ssize_t Compare(fid_ep* ep, const void* operand, size_t count, void* desc,
                const void* expected, void* expected_desc, void* before,
                void* before_desc, fi_addr_t addr, uint64_t at, uint64_t key,
                fi_datatype type, fi_op op, void* context) {
  if (type != FI_UINT64 || count != 1)
    Die("an atomic operation but on 64 bits");
  Broken(at % 8 != 0, "access",
         "an atomic operation on a word that is not aligned");
  Call call = {
      expected ? kCompare : kFetch, ep, 8, addr, context, {operand, desc}};
  call.target = {before, before_desc};
  call.expected = {expected, expected_desc};
  call.at = at;
  call.key = key;
  call.atomic_op = op;
  return Post(call);
}

ssize_t Fetch(fid_ep* ep, const void* operand, size_t count, void* desc,
              void* before, void* before_desc, fi_addr_t addr, uint64_t at,
              uint64_t key, fi_datatype type, fi_op op, void* context) {
  return Compare(ep, operand, count, desc, nullptr, nullptr, before,
                 before_desc, addr, at, key, type, op, context);
}

template <auto valid>
int Valid(fid_ep* ep, fi_datatype type, fi_op op, size_t* count) {
  if (Lacks("atomics")) return -FI_EOPNOTSUPP;
  return valid(Ours<Endpoint>(ep).real, type, op, count);
}

int GetName(struct fid* fid, void* address, size_t* size) {
  auto& ep = Ours<Endpoint>(fid);
  if (*size < sizeof(ep.address)) return -FI_ETOOSMALL;
  *size = sizeof(ep.address);
  memcpy(address, &ep.address, *size);
  return 0;
}

// Binds an object of the provider's, too, and counts the endpoint as its user.
template <typename T>
int Bind(Endpoint& ep, T*& bound, struct fid* fid, uint64_t flags) {
  if (bound != nullptr) Die("an endpoint with two objects of a kind");
  bound = &Ours<T>(fid);
  bound->endpoints.insert(&ep);
  return fi_ep_bind(ep.real, &bound->real->fid, flags);
}

int BindEndpoint(struct fid* fid, struct fid* other, uint64_t flags) {
  auto& ep = Ours<Endpoint>(fid);
  if (other->fclass == FI_CLASS_AV) return Bind(ep, ep.av, other, flags);
  if (other->fclass == FI_CLASS_EQ) return Bind(ep, ep.eq, other, flags);
  return Bind(ep, ep.cq, other, flags);
}

int EnableEndpoint(struct fid* fid, int, void*) {
  auto& ep = Ours<Endpoint>(fid);
  Broken(ep.eq == nullptr && !Lacks("events"), "eq",
         "an endpoint is enabled without an event queue");
  int ret = fi_enable(ep.real);
  if (ret != 0) return ret;
  // Tells the other process which address that is in truth.
  auto* name = Map<Name>(NameFile(&ep.address), true);
  name->domain = ep.domain().number;
  size_t size = sizeof(name->real);
  return fi_getname(&ep.real->fid, name->real, &size);
}

int CloseEndpoint(struct fid* fid) {
  auto& ep = Ours<Endpoint>(fid);
  BeginClose(ep);
  // First, so that nobody inserts the address of an endpoint that is gone: libfabric
  // 1.17's shm provider would give the next address the same number.
  unlink(NameFile(&ep.address).c_str());
  int ret = fi_close(&ep.real->fid);
  // What is in flight ends here, and its completions are lost.
  auto ours = [&](const auto& item) { return item.op && item.op->ep == &ep; };
  if (ep.cq != nullptr) std::erase_if(ep.cq->completions, ours);
  for (Object* bound : std::initializer_list<Object*>{ep.cq, ep.av, ep.eq}) {
    if (bound != nullptr) bound->endpoints.erase(&ep);
  }
  for (Op* op : ep.in_flight) {
    if (!op->reported) Release(op);
    delete op;
  }
  return ret;
}

fi_ops g_ep_fid_ops = {.size = sizeof(g_ep_fid_ops),
                       .close = CloseEndpoint,
                       .bind = BindEndpoint,
                       .control = EnableEndpoint};
fi_ops_cm g_ep_cm = {.size = sizeof(g_ep_cm), .getname = GetName};
fi_ops_msg g_ep_msg = {
    .size = sizeof(g_ep_msg), .recv = Recv, .send = Send, .inject = Inject};
fi_ops_rma g_ep_rma = {.size = sizeof(g_ep_rma),
                       .read = Read,
                       .write = Write,
                       .writedata = WriteData};
fi_ops_atomic g_ep_atomic = {.size = sizeof(g_ep_atomic),
                             .readwrite = Fetch,
                             .compwrite = Compare,
                             .readwritevalid = Valid<fi_fetch_atomicvalid>,
                             .compwritevalid = Valid<fi_compare_atomicvalid>};

// ---- The functions of a completion queue ----

// Lets the adapter work. Returns 0, or what is wrong with the provider's queue.
ssize_t Work(Queue& queue) {
  for (Endpoint* ep : queue.endpoints) Progress(*ep);
  for (;;) {
    fi_cq_data_entry real;
    fi_cq_err_entry entry = {};
    ssize_t ret = fi_cq_read(queue.real, &real, 1);
    if (ret == 1) {
      entry.op_context = real.op_context;
      entry.len = real.len;
    } else if (ret == -FI_EAVAIL) {
      if (fi_cq_readerr(queue.real, &entry, 0) != 1) return 0;
      entry.err_data = nullptr;  // it does not last until the program reads it
      entry.err_data_size = 0;
    } else {
      return ret == -FI_EAGAIN ? 0 : ret;
    }
    // Some versions of shm report such a WRITE without FI_REMOTE_WRITE.
    bool number = ret == 1 && (real.flags & FI_RECV) == 0 &&
                  (real.flags & (FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA));
    if (number) {
      entry.flags = FI_REMOTE_WRITE | FI_RMA | FI_REMOTE_CQ_DATA;
      entry.len = g_random();
      entry.data = static_cast<uint32_t>(real.data);
      queue.completions.push_back({Later(g_cq_delay), nullptr, entry});
    } else if (entry.op_context != nullptr) {
      PieceDone(*static_cast<Piece*>(entry.op_context), entry);
    } else if (entry.err != 0) {
      queue.completions.push_back({Clock::now(), nullptr, entry});
    }
  }
}

ssize_t ReadQueue(fid_cq* fid, void* buffer, size_t count) {
  auto& queue = Ours<Queue>(fid);
  ssize_t ret = Work(queue);
  if (ret != 0) return ret;
  // Now and then nothing has come, and more the next time.
  if (!Percent(kReadyPercent)) return -FI_EAGAIN;
  auto* entries = static_cast<fi_cq_data_entry*>(buffer);
  size_t done = 0;
  bool failed = false;
  Clock::time_point now = Clock::now();
  for (auto it = queue.completions.begin();
       it != queue.completions.end() && done < count;) {
    if (it->due > now) {
      ++it;
      continue;
    }
    queue.safe = false;
    auto [due, op, entry] = *it;
    failed = entry.err != 0;
    if (failed) break;
    it = queue.completions.erase(it);
    void* context = op != nullptr ? Report(op, entry.len) : nullptr;
    entries[done++] = {context, entry.flags, entry.len, entry.buf, entry.data};
  }
  if (done > 0) return static_cast<ssize_t>(done);
  return failed ? -FI_EAVAIL : -FI_EAGAIN;
}

ssize_t ReadError(fid_cq* fid, fi_cq_err_entry* entry, uint64_t) {
  auto& queue = Ours<Queue>(fid);
  auto failed =
      std::find_if(queue.completions.begin(), queue.completions.end(),
                   [](const auto& item) { return item.entry.err != 0; });
  if (failed == queue.completions.end()) return -FI_EAGAIN;
  Op* op = failed->op;
  *entry = failed->entry;
  queue.completions.erase(failed);
  if (op != nullptr) entry->op_context = Report(op, 0);
  return 1;
}

const char* DescribeError(fid_cq* fid, int error, const void* data, char* text,
                          size_t size) {
  return fi_cq_strerror(Ours<Queue>(fid).real, error, data, text, size);
}

// Returns whether the program has something to read.
bool HasCompletions(Queue& queue) {
  Work(queue);
  auto due = [now = Clock::now()](const auto& item) { return item.due <= now; };
  return std::any_of(queue.completions.begin(), queue.completions.end(), due);
}

int ControlQueue(struct fid* fid, int command, void* arg) {
  auto& queue = Ours<Queue>(fid);
  if (command != FI_GETWAIT || queue.wait_fd < 0) return -FI_ENODATA;
  *static_cast<int*>(arg) = queue.wait_fd;
  return 0;
}

int CloseQueue(struct fid* fid) {
  auto& queue = Ours<Queue>(fid);
  BeginClose(queue);
  g_queues.erase(&queue);
  if (queue.wait_fd >= 0) close(queue.wait_fd);
  return fi_close(&queue.real->fid);
}

fi_ops g_cq_fid_ops = {
    .size = sizeof(g_cq_fid_ops), .close = CloseQueue, .control = ControlQueue};
fi_ops_cq g_cq_ops = {.size = sizeof(g_cq_ops),
                      .read = ReadQueue,
                      .readerr = ReadError,
                      .strerror = DescribeError};

// ---- Sleep ----

int TryWait(fid_fabric*, struct fid** fids, int count) {
  if (!g_wait) return -FI_ENOSYS;
  // Now and then something has come that turns out to be nothing.
  bool idle = !Percent(g_eagain);
  for (int i = 0; i < count; ++i) {
    auto& queue = Ours<Queue>(fids[i]);
    Broken(queue.wait_fd < 0, "wait", "fi_trywait without a descriptor");
    queue.safe = false;
    uint64_t wakes = 0;
    if (eventfd_read(queue.wait_fd, &wakes) != 0) wakes = 0;
    if (HasCompletions(queue) || !idle) return -FI_EAGAIN;
    queue.armed = queue.safe = true;
  }
  return 0;
}

// Sleeps on descriptors, and lets the adapters work meanwhile.
extern "C" int poll(pollfd* fds, nfds_t count, int timeout) {
  bool ours = false;
  for (Queue* queue : g_queues) {
    bool asked = std::any_of(fds, fds + count, [&](const pollfd& entry) {
      return entry.fd >= 0 && entry.fd == queue->wait_fd;
    });
    if (!asked) continue;
    Use(*queue);
    Broken(!queue->safe, "wait",
           "poll(2) without an fi_trywait that said it is safe");
    queue->safe = false;
    ours = true;
  }
  if (!ours) return Next("poll", poll)(fds, count, timeout);
  Count("poll(2)");
  Clock::time_point end = Clock::now() + std::chrono::milliseconds(timeout);
  for (;;) {
    for (Queue* queue : g_queues) {
      if (queue->wait_fd < 0 || !HasCompletions(*queue) || !queue->armed) {
        continue;
      }
      queue->armed = false;
      eventfd_write(queue->wait_fd, 1);
    }
    bool over = timeout >= 0 && Clock::now() >= end;
    timespec step = {0, over ? 0 : kPollStep};
    int ret = ppoll(fds, count, &step, nullptr);
    if (ret != 0 || over) return ret;
  }
}

// ---- Address vectors ----

// Ends what is in flight to an address: with an error, or without a word.
void EndAll(const AddressVector& av, fi_addr_t addr) {
  for (Endpoint* ep : av.endpoints) {
    for (Op* op : std::set<Op*>(ep->in_flight)) {
      if (op->addr != addr || op->kind == kRecv || op->reported) continue;
      Count("in flight to an address that is removed");
      // The program has not read that it has ended, if it has.
      std::erase_if(ep->cq->completions,
                    [&](const auto& item) { return item.op == op; });
      op->ended = false;
      End(*op, Error(FI_ECANCELED));
      if (Percent(50)) continue;
      ep->cq->completions.pop_back();
      Release(op);
      ForgetIfDone(op);
    }
  }
}

int Insert(fid_av* fid, const void* address, size_t count, fi_addr_t* number,
           uint64_t flags, void* context) {
  auto& av = Ours<AddressVector>(fid);
  if (count != 1) Die("several addresses at once");
  auto* name = Map<Name>(NameFile(address), false);
  if (name == nullptr) return 0;
  int ret = fi_av_insert(av.real, name->real, 1, number, flags, context);
  if (ret == 1) av.names[*number] = name;
  return ret;
}

int Remove(fid_av* fid, fi_addr_t* addrs, size_t count, uint64_t flags) {
  auto& av = Ours<AddressVector>(fid);
  if (count != 1 || flags != 0) Die("several addresses at once, or flags");
  Broken(av.names.erase(addrs[0]) == 0, "peer",
         "an address is removed that is not there");
  // The provider keeps the address: it may need it for what it has got already.
  EndAll(av, addrs[0]);
  return 0;
}

fi_ops_av g_av_ops = {
    .size = sizeof(g_av_ops), .insert = Insert, .remove = Remove};

// ---- The adapter that a program finds ----

fi_ops g_nic_ops = {.size = sizeof(g_nic_ops),
                    .close = [](struct fid*) { return 0; }};
std::string g_provider;  // its name, where the program has ours

struct Nic : fid_nic {
  fi_info* real;  // the provider's answer, of which we have made ours
  long adapter;   // from 1
};

// Returns nullptr if the answer is not ours.
const Nic* NicOf(const fi_info* info) {
  bool ours = info && info->nic && info->nic->fid.ops == &g_nic_ops;
  return ours ? static_cast<Nic*>(info->nic) : nullptr;
}

// Makes efa's answer of a provider's. It keeps the names of fabric and domain,
// by which a program may ask for the same interface once more.
void Disguise(fi_info* info, const fi_info* hints, long adapter) {
  info->nic = new Nic{{.fid = {.fclass = FI_CLASS_NIC, .ops = &g_nic_ops}},
                      fi_dupinfo(info),
                      adapter};
  info->mode = FI_CONTEXT2;
  info->addr_format = FI_ADDR_EFA;
  info->caps = (info->caps & ~FI_HMEM) | (hints->caps & FI_HMEM);
  fi_domain_attr& domain = *info->domain_attr;
  domain.mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED;
  if (!Lacks("keys")) domain.mr_mode |= FI_MR_PROV_KEY;
  if (hints->caps & FI_HMEM) domain.mr_mode |= FI_MR_HMEM;
  domain.mr_key_size = sizeof(uint32_t);
  domain.cq_data_size = Lacks("immediate-data") ? 0 : sizeof(uint32_t);
  if (adapter > 1) {
    std::string name = domain.name + ("-" + std::to_string(adapter));
    free(domain.name);
    domain.name = strdup(name.c_str());
  }
  info->tx_attr->msg_order = hints->tx_attr->msg_order & FI_ORDER_SAS;
  info->rx_attr->msg_order = hints->rx_attr->msg_order & FI_ORDER_SAS;
  info->ep_attr->max_msg_size = g_max_msg;
  free(info->fabric_attr->prov_name);
  const char* name = getenv("STRICT_NAME");
  info->fabric_attr->prov_name = strdup(name != nullptr ? name : "efa");
}

// Returns whether efa would have something for who asks for this.
bool CheckHints(const fi_info* hints) {
  constexpr int kModes =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  bool hmem = hints->caps & FI_HMEM;
  int mr_mode = hints->domain_attr->mr_mode;
  return !Broken((mr_mode & kModes) != kModes, "hints",
                 "mr_mode lacks a bit") &&
         !Broken(hmem && (mr_mode & FI_MR_HMEM) == 0, "hints",
                 "no FI_MR_HMEM") &&
         !Broken((hints->mode & FI_CONTEXT2) == 0, "hints", "no FI_CONTEXT2") &&
         hints->ep_attr->max_msg_size <= g_max_msg && !(hmem && Lacks("gpu"));
}

// ---- Opening ----

int OpenEndpoint(fid_domain* fid, fi_info* info, fid_ep** result,
                 void* context) {
  auto& domain = Ours<Domain>(fid);
  auto& ep = *new Endpoint(&domain);
  ep.keeps_order =
      info->tx_attr->msg_order & info->rx_attr->msg_order & FI_ORDER_SAS;
  ep.delivers = info->tx_attr->op_flags & FI_DELIVERY_COMPLETE;
  ep.cm = &g_ep_cm;
  ep.msg = WithoutHoles(g_ep_msg);
  ep.rma = WithoutHoles(g_ep_rma);
  ep.atomic = WithoutHoles(g_ep_atomic);
  fi_info* real = NicOf(info)->real;
  real->tx_attr->op_flags = info->tx_attr->op_flags;
  return ep.Open(fi_endpoint(domain.real, real, &ep.real, context), result);
}

int OpenQueue(fid_domain* fid, fi_cq_attr* attr, fid_cq** result,
              void* context) {
  auto& domain = Ours<Domain>(fid);
  auto& queue = *new Queue(&domain);
  if (attr->format != FI_CQ_FORMAT_DATA) Die("entries in another format");
  bool waits = attr->wait_obj != FI_WAIT_NONE;
  if (waits && (!g_wait || attr->wait_obj != FI_WAIT_FD)) return -FI_ENOSYS;
  if (waits) queue.wait_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  fi_cq_attr real = *attr;
  real.wait_obj = FI_WAIT_NONE;
  g_queues.insert(&queue);
  queue.size = attr->size > 0 ? attr->size : kQueueSize;
  queue.ops = &g_cq_ops;
  return queue.Open(fi_cq_open(domain.real, &real, &queue.real, context),
                    result);
}

int OpenAddressVector(fid_domain* fid, fi_av_attr* attr, fid_av** result,
                      void* context) {
  auto& domain = Ours<Domain>(fid);
  auto& av = *new AddressVector(&domain);
  av.ops = &g_av_ops;
  return av.Open(fi_av_open(domain.real, attr, &av.real, context), result);
}

int OpenEventQueue(fid_fabric* fid, fi_eq_attr* attr, fid_eq** result,
                   void* context) {
  if (Lacks("events")) return -FI_ENOSYS;
  auto& fabric = Ours<Fabric>(fid);
  auto& eq = *new EventQueue(&fabric);
  return eq.Open(fi_eq_open(fabric.real, attr, &eq.real, context), result);
}

fi_ops_domain g_domain_ops = {.size = sizeof(g_domain_ops),
                              .av_open = OpenAddressVector,
                              .cq_open = OpenQueue,
                              .endpoint = OpenEndpoint};
fi_ops_mr g_mr_ops = {
    .size = sizeof(g_mr_ops), .reg = RegisterBuffer, .regattr = Register};

int OpenDomain(fid_fabric* fid, fi_info* info, fid_domain** result,
               void* context) {
  auto& fabric = Ours<Fabric>(fid);
  auto& domain = *new Domain(&fabric);
  fi_info* real = NicOf(info)->real;
  domain.adapter = NicOf(info)->adapter;
  domain.hmem = info->caps & FI_HMEM;
  domain.real_virt_addr = real->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
  domain.ops = WithoutHoles(g_domain_ops);
  domain.mr = WithoutHoles(g_mr_ops);
  return domain.Open(fi_domain(fabric.real, real, &domain.real, context),
                     result);
}

fi_ops_fabric g_fabric_ops = {.size = sizeof(g_fabric_ops),
                              .domain = OpenDomain,
                              .eq_open = OpenEventQueue,
                              .trywait = TryWait};

// Says at the end of the process what there was.
struct Summary {
  ~Summary() {
    if (g_counts.empty()) return;
    Broken(g_open > 0, "closed",
           std::to_string(g_open) + " objects were never closed");
    fprintf(stderr, "strict: seen");
    for (const auto& [what, count] : g_counts) {
      fprintf(stderr, " %s=%zu,", what.c_str(), count);
    }
    fprintf(stderr, " rules broken: %zu (STRICT_SEED=%u)\n",
            g_violations.size(), g_seed);
  }
} g_summary;

// ---- What takes the place of functions of libfabric and of the C library ----

// Returns whether a call is not for us: where libfabric itself has called, to build
// one provider upon another. `next` is one of its functions.
bool IsNotForUs(const void* caller, const void* next) {
  Dl_info program;
  Dl_info library;
  return !g_network ||
         (dladdr(caller, &program) != 0 && dladdr(next, &library) != 0 &&
          program.dli_fbase == library.dli_fbase);
}

extern "C" int fi_getinfo(uint32_t version, const char* node,
                          const char* service, uint64_t flags,
                          const fi_info* hints, fi_info** info) {
  auto* next = Next("fi_getinfo", fi_getinfo);
  if (IsNotForUs(__builtin_return_address(0), reinterpret_cast<void*>(next))) {
    return next(version, node, service, flags, hints, info);
  }
  if (!CheckHints(hints)) return -FI_ENODATA;
  // The provider need not do what we do, or what only an adapter can.
  fi_info* real_hints = fi_dupinfo(hints);
  real_hints->caps &= ~FI_HMEM;
  real_hints->domain_attr->mr_mode &=
      ~(FI_MR_HMEM | FI_MR_PROV_KEY | FI_MR_LOCAL);
  real_hints->fabric_attr->prov_name = nullptr;
  real_hints->ep_attr->max_msg_size = 0;
  int ret = next(version, node, service, flags, real_hints, info);
  if (ret != 0) return ret;
  g_provider = (*info)->fabric_attr->prov_name;
  // The answers of other providers would look as if they were efa's, too. There are
  // copies of the first one instead.
  fi_freeinfo(std::exchange((*info)->next, nullptr));
  for (long i = g_adapters; i > 1; --i) {
    fi_info* copy = fi_dupinfo(*info);
    copy->next = *info;
    *info = copy;
  }
  long adapter = 0;
  for (fi_info* one = *info; one != nullptr; one = one->next) {
    Disguise(one, hints, ++adapter);
  }
  return 0;
}

// A copy of an answer is as good as the answer. The adapter is ours, and is never
// copied.
extern "C" fi_info* fi_dupinfo(const fi_info* info) {
  auto* next = Next("fi_dupinfo", fi_dupinfo);
  if (NicOf(info) == nullptr) return next(info);
  fi_info bare = *info;
  bare.nic = nullptr;
  fi_info* copy = next(&bare);
  copy->nic = info->nic;
  return copy;
}

extern "C" int fi_fabric(fi_fabric_attr* attr, fid_fabric** result,
                         void* context) {
  auto* next = Next("fi_fabric", fi_fabric);
  if (IsNotForUs(__builtin_return_address(0), reinterpret_cast<void*>(next))) {
    return next(attr, result, context);
  }
  fi_fabric_attr real_attr = *attr;
  real_attr.prov_name = g_provider.data();
  auto& fabric = *new Fabric;
  fabric.ops = WithoutHoles(g_fabric_ops);
  return fabric.Open(next(&real_attr, &fabric.real, context), result);
}

extern "C" int fsync(int fd) {
  struct stat status = {};
  bool directory = fstat(fd, &status) == 0 && S_ISDIR(status.st_mode);
  if (!Lacks(directory ? "fsync-of-directories" : "fsync-of-files"))
    return Next("fsync", fsync)(fd);
  errno = EIO;
  return -1;
}

extern "C" ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  const char* file = getenv("STRICT_SLOW_WRITE");
  if (file != nullptr) fprintf(stderr, "strict: a pwrite waits\n");
  while (file != nullptr && access(file, F_OK) != 0) usleep(1000);
  return Next("pwrite", pwrite)(fd, data, size, offset);
}
