// Records what a program asks of libfabric, from post to completion, and what becomes
// of its memory meanwhile. model.py puts the records of all processes together.
//
// Usage: WATCH=FOLDER LD_PRELOAD=build/watch.so PROGRAM...
//   WATCH=FOLDER   each process writes FOLDER/PID.watch; without it, nothing is recorded
//   WATCH_MB=N     a file has at most N MB (256); what comes later is only counted
//   WATCH_TRAP=1   memory in flight, or lent, cannot be touched (mprotect), so that each
//                  touch is seen and names its line. Slow. Of a page only the first touch
//                  between two posts or completions is seen, so completions then come one by
//                  one. Not over shm and sockets, where others than this process' own calls
//                  touch memory
//
// The program is not changed, and neither is what it gets to see, traps aside. The file is
// mapped, so a process that is killed leaves all that it has recorded.
//
// As in scripts/tests/reorder.cpp, each object of libfabric gets its own copies of its
// tables of functions. Behind strict.so or reorder.so, if LD_PRELOAD names these after
// watch.so, it sees what the program sees. Of the calls that post, it knows those that the
// tutorial makes, with one buffer or one word; what others have posted is counted as it
// completes.

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <unwind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

// Summing up buffers is most of what recording costs. xxHash does it as fast as memory is.
#if __has_include(<xxhash.h>)
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

#define VISIBLE extern "C" __attribute__((visibility("default")))
// A library behind this one may have functions of the same names.
#pragma GCC visibility push(hidden)

// ---- The file: model.py reads it ----

enum Kind : uint8_t {
  kText = 1,        // follows a record that has one
  kProcess,         // id: of the process; text: its arguments
  kRegion,          // data, size, access, key, whether it is a device's
  kRegionClosed,    //
  kEndpoint,        // completion queue, address vector; text: its name
  kEndpointClosed,  //
  kPeer,            // number; text: its name
  kPost,  // data, size, peer, remote address, key, immediate data or operand, sum or
          // expected word, fi_op with the bit below
  kNoRoom,  // of how many bytes, how often until now
  kComplete,  // length, immediate data, error, sum; text: the error, or the payload
  kNotice,  // immediate data, length
  kChanged,  // where, from, to, whether that is known; or how many bytes from there on
  kFlying,  // a region is closed, or memory is freed, with it in flight
  kFreed,   // a region whose memory is freed
  kGone,    // an operation's buffer or record lies in a frame that has returned
  kUnseen,  // a completion of what none of the calls below has posted
  kTouch,   // pread or pwrite: data, size, end
  kTrap,    // address, region, whether it was written; text: where
  kEnd      // records that were dropped, the status that the program ends with
};
enum What : uint8_t { kSend = 1, kRecv, kWrite, kRead, kAtomic };

// Bits beside What.
constexpr uint8_t kHasImm = 0x80, kInjected = 0x20;
// A bit beside an fi_op: its result is known.
constexpr uint64_t kFetches = 0x100;

struct Record {
  uint64_t time;  // ns, CLOCK_MONOTONIC, which all processes of a host share
  uint8_t kind, what;
  uint16_t object;
  uint32_t id;
  std::array<uint64_t, 8> v;
};
static_assert(sizeof(Record) == 80);

Record* g_records = nullptr;
size_t g_capacity = 0;
std::atomic<size_t> g_next = 0;
int g_file = -1;
pid_t g_process = 0;

long Setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value ? atol(value) : otherwise;
}
bool g_trap = Setting("WATCH_TRAP", 0);
// Of a longer text, the rest is not shown. A longer buffer is not copied, but summed up, in
// blocks. Of a RECV, whose beginning a message may fill, there has to be a copy.
constexpr size_t kShown = 320, kCopied = 4096, kBlock = 4096,
                 kCopiedOfRecv = size_t{1} << 16;

uint64_t Now() {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1000000000u + uint64_t(now.tv_nsec);
}

// Writes a record, and a text behind it.
void Log(uint64_t time, Kind kind, uint8_t what, uint16_t object, uint32_t id,
         std::initializer_list<uint64_t> values, const void* text = nullptr,
         size_t size = 0) {
  if (g_records == nullptr) return;
  size_t slots =
      1 + (text ? 1 + (size + sizeof(Record) - 1) / sizeof(Record) : 0);
  size_t at = g_next.fetch_add(slots);
  if (at + slots > g_capacity) return;
  Record& record = g_records[at];
  record = {time, 0, what, object, id, {}};
  std::copy(values.begin(), values.end(), record.v.begin());
  if (text) {
    g_records[at + 1].id = static_cast<uint32_t>(size);
    memcpy(&g_records[at + 2], text, size);
    g_records[at + 1].kind = kText;
  }
  // Last: a reader of a killed process' file stops where there is none.
  __atomic_store_n(&record.kind, uint8_t(kind), __ATOMIC_RELEASE);
}

// Writes the last record, with the status that the program ends with.
void CloseFile(int status, void*) {
  if (g_records == nullptr || getpid() != g_process) return;
  size_t next = g_next;
  // There is room for one more: see OpenFile.
  g_records[std::min(next, g_capacity)] = {
      Now(), kEnd,
      0,     0,
      0,     {next > g_capacity ? next - g_capacity : 0, uint64_t(status)}};
  size_t used = std::min(next, g_capacity) + 1;
  g_records = nullptr;
  if (ftruncate(g_file, static_cast<off_t>(used * sizeof(Record))) != 0) return;
}

void OpenFile() {
  const char* folder = getenv("WATCH");
  if (folder == nullptr || g_records != nullptr) return;
  std::string path =
      std::string(folder) + "/" + std::to_string(getpid()) + ".watch";
  size_t bytes = static_cast<size_t>(std::max(Setting("WATCH_MB", 256), 1L))
                 << 20;
  mkdir(folder, 0777);  // unless it is there
  g_file = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  void* map = MAP_FAILED;
  if (g_file >= 0 && ftruncate(g_file, static_cast<off_t>(bytes)) == 0) {
    map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, g_file, 0);
  }
  if (map == MAP_FAILED) {
    fprintf(stderr, "watch: %s can't be written: %s\n", path.c_str(),
            strerror(errno));
    return;
  }
  g_process = getpid();
  g_capacity = bytes / sizeof(Record) - 1;
  g_records = static_cast<Record*>(map);
  char arguments[1000] = {};
  int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  ssize_t size = fd < 0 ? 0 : read(fd, arguments, sizeof(arguments));
  if (fd >= 0) close(fd);
  Log(Now(), kProcess, 0, 0, uint32_t(getpid()), {g_trap}, arguments,
      size_t(std::max<ssize_t>(size, 0)));
  on_exit(CloseFile, nullptr);
}

// ---- What is known ----

struct Region {
  uint32_t id;
  char* data;
  size_t size;
  uint64_t access;
  bool device;  // memory that a processor can't read
  struct fi_ops* real;
  std::vector<char> open =
      {};  // of each of its pages, PROT_READ or more: see WATCH_TRAP

  bool Has(uintptr_t at) const {
    return uintptr_t(data) <= at && at < uintptr_t(data) + size;
  }
};

struct Endpoint {
  uint16_t id;
  uint16_t cq = 0, sent_cq = 0, av = 0;  // two queues, or twice the same
  struct fi_ops* real = nullptr;
  struct fi_ops_msg* msg = nullptr;
  struct fi_ops_rma* rma = nullptr;
  struct fi_ops_atomic* atomic = nullptr;
  size_t refused = 0;  // posts since the last that found room
};

struct Op {
  uint32_t id;
  What what;
  Endpoint* ep;
  char* data;
  size_t size;
  bool device = false;
  uint64_t sum = 0;  // 0: not known yet
  // What its buffer was like: of a short one the bytes, of a long one the sum of each block.
  std::vector<char> copy = {};
  std::vector<uint64_t> sums = {};
  // Of an atomic operation, the operand, and what it was.
  const void* operand = nullptr;
  uint64_t was = 0;

  bool Has(uintptr_t at) const {
    return uintptr_t(data) <= at && at < uintptr_t(data) + size;
  }
  // Whether libfabric writes into it.
  bool IsTarget() const { return what == kRecv || what == kRead; }
};

struct Queue {
  uint16_t id;
  size_t entry;  // bytes
  struct fi_ops_cq* real;
};

struct AddressVector {
  uint16_t id;
  bool text;
  struct fi_ops_av* real;
};

using Flight = std::multimap<uintptr_t, Op>;  // by their contexts

std::mutex g_mutex;
std::unordered_map<struct fid*, Endpoint> g_endpoints;
std::unordered_map<struct fid*, Queue> g_queues;
std::unordered_map<struct fid*, AddressVector> g_avs;
std::unordered_map<struct fid*, struct fi_ops_fabric*> g_fabrics;
struct Domain {
  bool text;
  struct fi_ops_domain* real;
  struct fi_ops_mr* mr;
};
std::unordered_map<struct fid*, Domain> g_domains;
std::map<uintptr_t, std::pair<struct fid*, Region>>
    g_regions;  // by id, which never repeats
std::unordered_map<struct fid*, uintptr_t> g_region_ids;
Flight g_flight;
std::map<uintptr_t, uint32_t> g_buffers;  // what is in flight, by its address
// A function that is being called, by its code and by the end of its frame.
using Owner = std::pair<void*, uintptr_t>;
Owner OwnerOf(uintptr_t at);
std::unordered_map<uint32_t, std::pair<uintptr_t, Owner>>
    g_on_stack;  // by id of operation
std::atomic<uintptr_t> g_lowest = UINTPTR_MAX,
                       g_highest = 0;  // of regions and contexts
uint32_t g_ops = 0, g_region_count = 0;
uint16_t g_objects = 0;
size_t g_name_size = 0;
// How deep this thread is in libfabric: what that does itself is not the program's.
thread_local int g_inside = 0;
thread_local bool g_busy = false;  // with records of our own

template <typename Table>
Table* Replace(Table*& table) {
  Table* real = table;
  table = static_cast<Table*>(malloc(real->size));
  memcpy(table, real, real->size);
  return real;
}

struct Lock {
  Lock() : guard(g_mutex) { g_busy = true; }
  ~Lock() { g_busy = false; }
  std::lock_guard<std::mutex> guard;
};

// Sums up bytes.
uint64_t Sum(const char* data, size_t size) {
#ifdef XXH_INLINE_ALL
  return XXH3_64bits(data, size);
#else
  uint64_t sum = size;
  for (size_t i = 0; i < size; ++i)
    sum = (sum ^ uint8_t(data[i])) * 0x100000001b3u;
  return sum;
#endif
}

// Sums up a buffer, block by block.
uint64_t Sum(const Op& op, std::vector<uint64_t>* sums = nullptr) {
  uint64_t sum = 0;
  for (size_t at = 0; at < op.size; at += kBlock) {
    uint64_t block = Sum(op.data + at, std::min(kBlock, op.size - at));
    sum = sum * 31 + block;
    if (sums) sums->push_back(block);
  }
  return sum;
}

Region* RegionOf(uintptr_t at) {
  for (auto& [id, item] : g_regions) {
    if (item.second.Has(at)) return &item.second;
  }
  return nullptr;
}

void Widen(uintptr_t low, uintptr_t high) {
  g_lowest = std::min(g_lowest.load(), low);
  g_highest = std::max(g_highest.load(), high);
}

// ---- The stack ----

// This thread's.
struct Stack {
  Stack() {
    pthread_attr_t attr;
    void* data = nullptr;
    size_t size = 0;
    if (pthread_getattr_np(pthread_self(), &attr) != 0) return;
    pthread_attr_getstack(&attr, &data, &size);
    pthread_attr_destroy(&attr);
    low = uintptr_t(data);
    high = low + size;
  }
  uintptr_t low = 0, high = 0;
};

bool IsOnStack(uintptr_t at) {
  thread_local Stack stack;
  return stack.low <= at && at < stack.high;
}

// Looks for the function whose frame has `at` in it.
Owner OwnerOf(uintptr_t at) {
  struct Search {
    uintptr_t at;
    Owner owner = {};
    void* function = nullptr;
  } search = {at};
  _Unwind_Backtrace(
      [](struct _Unwind_Context* context, void* arg) {
        auto* search = static_cast<Search*>(arg);
        uintptr_t low = _Unwind_GetCFA(context);
        if (low > search->at) {
          search->owner = {search->function, low};
          return _URC_END_OF_STACK;
        }
        search->function = _Unwind_FindEnclosingFunction(
            reinterpret_cast<void*>(_Unwind_GetIP(context)));
        return _URC_NO_REASON;
      },
      &search);
  return search.owner;
}

// Notes which operations use memory of functions that have returned by now.
void CheckStack() {
  if (g_on_stack.empty() || g_inside > 0) return;
  Lock lock;
  for (auto it = g_on_stack.begin(); it != g_on_stack.end();) {
    auto [at, owner] = it->second;
    if (IsOnStack(at) && OwnerOf(at) != owner) {
      Log(Now(), kGone, 0, 0, it->first, {at});
      it = g_on_stack.erase(it);
    } else {
      ++it;
    }
  }
}

// ---- Memory that can't be touched (WATCH_TRAP) ----

constexpr uintptr_t kPage = 4096;
std::atomic<int> g_files = 0;  // reads and writes of files that are under way

// The whole pages of [begin, end) that belong to a region alone.
bool Pages(const Region& region, uintptr_t& begin, uintptr_t& end) {
  uintptr_t first = (uintptr_t(region.data) + kPage - 1) / kPage * kPage;
  uintptr_t last = uintptr_t(region.data) + region.size;
  // Memory that begins with a page has its last page to itself, too.
  bool aligned = uintptr_t(region.data) % kPage == 0;
  last = aligned ? (last + kPage - 1) / kPage * kPage : last / kPage * kPage;
  begin = std::max(begin / kPage * kPage, first);
  end = std::min((end + kPage - 1) / kPage * kPage, last);
  return begin < end;
}

void Protect(uintptr_t begin, uintptr_t end, int protection) {
  mprotect(reinterpret_cast<void*>(begin), end - begin, protection);
}

void ProtectOp(const Op& op, int protection) {
  uintptr_t begin = uintptr_t(op.data), end = begin + op.size;
  const Region* region = RegionOf(begin);
  if (region && !region->device && Pages(*region, begin, end))
    Protect(begin, end, protection);
}

// Memory that others may READ or WRITE: what has not been touched since the last
// completion can't be.
void ProtectRegion(Region& region, bool on) {
  if ((region.access & (FI_REMOTE_WRITE | FI_REMOTE_READ)) == 0 ||
      region.device)
    return;
  uintptr_t begin = uintptr_t(region.data), end = begin + region.size;
  if (!Pages(region, begin, end)) return;
  if (!on) return Protect(begin, end, PROT_READ | PROT_WRITE);
  region.open.resize((end - begin) / kPage);
  for (size_t i = 0, next; i < region.open.size(); i = next) {
    for (next = i + 1;
         next < region.open.size() && region.open[next] == region.open[i];)
      ++next;
    Protect(begin + i * kPage, begin + next * kPage, region.open[i]);
  }
}

// Has the next touch of each page be seen again: others may know more now, or we do.
void WatchAgain() {
  Lock lock;
  for (auto& [id, item] : g_regions)
    std::fill(item.second.open.begin(), item.second.open.end(), 0);
}

void ProtectAll(bool on) {
  Lock lock;
  if (on && g_files > 0) return;
  for (auto& [id, item] : g_regions) ProtectRegion(item.second, on);
  for (auto& [context, op] : g_flight) {
    ProtectOp(op, !on             ? PROT_READ | PROT_WRITE
                  : op.IsTarget() ? PROT_NONE
                                  : PROT_READ);
  }
}

// Lives as long as libfabric works, which may touch everything.
struct Inside {
  Inside() {
    if (++g_inside == 1 && g_trap) ProtectAll(false);
  }
  ~Inside() {
    if (--g_inside == 0 && g_trap) ProtectAll(true);
  }
};

// Is called when the program touches what it can't: notes it, and lets it.
void HandleTrap(int signal_number, siginfo_t* info, void* context) {
  auto at = uintptr_t(info->si_addr);
  bool written = false;
#ifdef __x86_64__
  written = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
#endif
  (void)context;
  uint32_t id = 0, region_id = 0;
  What what = {};
  {
    Lock lock;
    for (auto& [key, op] : g_flight) {
      if (op.Has(at) && (written || op.IsTarget())) id = op.id, what = op.what;
    }
    for (auto& [key, item] : g_regions) {
      Region& region = item.second;
      uintptr_t begin = uintptr_t(region.data), end = begin + region.size;
      if (!Pages(region, begin, end) || at < begin || at >= end) continue;
      region_id = region.id;
      size_t page = (at - begin) / kPage;
      int open = written ? PROT_READ | PROT_WRITE : PROT_READ;
#ifndef __x86_64__
      // Whether it was written is not known, so the second touch is the one that writes.
      written = region.open.size() > page && region.open[page] == PROT_READ;
      open = written ? PROT_READ | PROT_WRITE : PROT_READ;
#endif
      if (region.open.size() > page) region.open[page] = char(open);
      Protect(begin + page * kPage, begin + (page + 1) * kPage, open);
    }
  }
  if (region_id == 0) {  // it is a fault of the program's
    signal(signal_number, SIG_DFL);
    return;
  }
  std::string where;
  void* frames[12];
  for (int i = 0, depth = backtrace(frames, 12); i < depth; ++i) {
    Dl_info from;
    if (dladdr(frames[i], &from) == 0 || from.dli_fname == nullptr) continue;
    char line[300];
    snprintf(line, sizeof(line), "%s %zx\n", from.dli_fname,
             uintptr_t(frames[i]) - uintptr_t(from.dli_fbase));
    where += line;
  }
  Log(Now(), kTrap, what, 0, id, {at, region_id, written}, where.data(),
      where.size());
}

// Has HandleTrap called, also after a provider has put a handler of its own before it.
void InstallTrap() {
  if (!g_trap) return;
  void* frames[2];
  backtrace(frames, 2);  // loads what it needs, which it can't in the handler
  struct sigaction action = {};
  action.sa_sigaction = HandleTrap;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);
}

// ---- Operations ----

struct Remote {
  uint64_t addr = 0, key = 0;
  uint64_t data = 0;  // immediate data, or the operand of an atomic operation
  bool has_imm = false;
  uint64_t atomic = 0;  // which one: enum fi_op, and a bit
  uint64_t expected = 0;
  const void* operand = nullptr;
};

Op MakeOp(What what, const void* data, size_t size) {
  return {0, what, nullptr, static_cast<char*>(const_cast<void*>(data)), size};
}

// Keeps an operation that is in flight, or will be in a moment.
void Fly(Op op, void* context) {
  if (op.size > 0) g_buffers[uintptr_t(op.data)] = op.id;
  uintptr_t places[] = {uintptr_t(context), uintptr_t(op.data)};
  for (uintptr_t at : places) {
    if (at == 0) continue;
    if (IsOnStack(at)) {
      g_on_stack[op.id] = {at, OwnerOf(at)};
    } else {
      Widen(at, at + 1);
    }
  }
  g_flight.emplace(uintptr_t(context), std::move(op));
}

// Takes one out that has completed, or was refused.
Flight::node_type Land(Flight::iterator it) {
  const Op& op = it->second;
  g_on_stack.erase(op.id);
  auto buffer = g_buffers.find(uintptr_t(op.data));
  if (buffer != g_buffers.end() && buffer->second == op.id)
    g_buffers.erase(buffer);
  return g_flight.extract(it);
}

// Looks for an operation in flight. It is among the last ones with its context.
Flight::iterator InFlight(void* context, uint32_t id) {
  auto [begin, it] = g_flight.equal_range(uintptr_t(context));
  while (it != begin) {
    if ((--it)->second.id == id) return it;
  }
  return g_flight.end();
}

// Notes what a buffer is like before libfabric gets it, and keeps that if it is to be
// compared. A message is always summed up: so model.py finds the RECV that takes it.
void Remember(Op& op, bool keep) {
  if (keep && (op.what == kRecv || op.size <= kCopied)) {
    size_t most = op.what == kRecv ? kCopiedOfRecv : kCopied;
    op.copy.assign(op.data, op.data + std::min(op.size, most));
  }
  if (op.what == kSend || op.what == kWrite)
    op.sum = Sum(op, keep && op.copy.empty() ? &op.sums : nullptr);
}

// Posts an operation, and writes it down. One that is injected has no completion, and its
// buffer is the program's again at once.
template <typename Call>
ssize_t Post(struct fid_ep* ep, Op op, fi_addr_t peer, void* context,
             Remote remote, Call call, bool injected = false) {
  Endpoint* endpoint = &g_endpoints.at(&ep->fid);
  if (g_inside > 0)
    return call(*endpoint);  // one function of libfabric calls another
  Inside inside;
  uint64_t time = Now();
  op.ep = endpoint;
  bool readable, check;
  {
    Lock lock;
    op.id = ++g_ops;
    const Region* region = op.size > 0 ? RegionOf(uintptr_t(op.data)) : nullptr;
    op.device = region && region->device;
    readable = !op.device && op.size > 0;
    check = readable && !injected;
  }
  if (op.what == kAtomic) op.sum = remote.expected;
  if (check) {
    op.operand = remote.operand;
    op.was = remote.data;
  }
  // Not again for each post that finds no room; and without a lock, since it takes long.
  bool looks = readable && op.what != kRead && op.what != kAtomic;
  // What is behind a message is libfabric's until it has taken the buffer.
  bool looked = endpoint->refused == 0 && op.what != kRecv;
  if (looks && looked) Remember(op, check);
  // Before the call: another thread may read its completion at once.
  if (!injected) {
    Lock lock;
    Fly(op, context);
  }
  if (g_trap && op.what != kRecv) WatchAgain();
  ssize_t ret = call(*endpoint);
  if (ret != 0 && !injected) {
    Lock lock;
    if (auto it = InFlight(context, op.id); it != g_flight.end()) Land(it);
    if (ret == -FI_EAGAIN && g_ops == op.id) --g_ops;
  }
  if (ret == -FI_EAGAIN) {
    if (endpoint->refused++ == 0)
      Log(time, kNoRoom, op.what, endpoint->id, 0, {op.size, 0});
    return ret;
  }
  if (endpoint->refused > 0) {
    Log(time, kNoRoom, op.what, endpoint->id, 0, {op.size, endpoint->refused});
  }
  endpoint->refused = 0;
  if (looks && !looked) Remember(op, check);
  uint8_t bits = uint8_t(op.what | (remote.has_imm ? kHasImm : 0) |
                         (injected ? kInjected : 0));
  Log(time, kPost, bits, endpoint->id, op.id,
      {uint64_t(op.data), op.size, peer, remote.addr, remote.key, remote.data,
       op.sum, remote.atomic},
      looks && op.what == kSend ? op.data : nullptr, std::min(op.size, kShown));
  if (ret != 0) {
    const char* error = fi_strerror(int(-ret));
    Log(Now(), kComplete, op.what, endpoint->id, op.id, {0, 0, uint64_t(-ret)},
        error, strlen(error));
    return ret;
  }
  if (injected || looked) return ret;
  Lock lock;
  auto it = InFlight(context, op.id);
  if (it == g_flight.end()) return ret;  // it has completed already
  it->second.sum = op.sum;
  it->second.copy.swap(op.copy);
  it->second.sums.swap(op.sums);
  return ret;
}

What WhatOf(uint64_t flags) {
  if (flags & FI_RECV) return kRecv;
  if (flags & FI_SEND) return kSend;
  if (flags & FI_ATOMIC) return kAtomic;
  if (flags & FI_WRITE) return kWrite;
  return flags & FI_READ ? kRead : What{};
}

// Writes down where a buffer is not as it was when it was posted. Of a RECV, only what is
// behind its message has to be.
void CheckChange(const Op& op, uint16_t ep, size_t length, uint64_t time) {
  uint64_t operand = op.was;
  if (op.operand) memcpy(&operand, op.operand, sizeof(operand));
  if (operand != op.was) {
    Log(time, kChanged, op.what, ep, op.id, {0, 0, 0, 0, sizeof(operand)});
  }
  size_t from = op.what == kRecv ? std::min(length, op.copy.size()) : 0;
  // memcmp is several times faster than the search for the first byte.
  if (from < op.copy.size() && memcmp(op.copy.data() + from, op.data + from,
                                      op.copy.size() - from) != 0) {
    auto [was, is] = std::mismatch(op.copy.begin() + ptrdiff_t(from),
                                   op.copy.end(), op.data + from);
    Log(time, kChanged, op.what, ep, op.id,
        {uint64_t(was - op.copy.begin()), uint8_t(*was), uint8_t(*is), 1});
  }
  if (op.sums.empty()) return;
  std::vector<uint64_t> sums;
  sums.reserve(op.sums.size());
  if (Sum(op, &sums) == op.sum) return;
  auto [was, is] = std::mismatch(op.sums.begin(), op.sums.end(), sums.begin());
  size_t at = kBlock * size_t(was - op.sums.begin());
  Log(time, kChanged, op.what, ep, op.id,
      {at, 0, 0, 0, std::min(kBlock, op.size - at)});
}

// Writes down a completion that the program is about to see.
void Completed(const Queue& queue, void* context, uint64_t flags, size_t size,
               uint64_t data, int error = 0, const char* text = nullptr) {
  uint64_t time = Now();
  if ((flags & (FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA)) &&
      !(flags & (FI_RECV | FI_WRITE)) && !error) {
    Log(time, kNotice, 0, queue.id, 0, {data, size});
    return;
  }
  Flight::node_type node;
  uint16_t ep;
  {
    Lock lock;
    auto [begin, end] = g_flight.equal_range(uintptr_t(context));
    auto found = end;
    What what = WhatOf(flags);
    // Of equal contexts, the one that was posted first.
    for (auto it = begin; it != end; ++it) {
      const Endpoint& from = *it->second.ep;
      if ((it->second.what == kRecv ? from.cq : from.sent_cq) != queue.id)
        continue;
      if (what != What{} && it->second.what != what && !error) continue;
      if (found == end || it->second.id < found->second.id) found = it;
    }
    if (found == end) return Log(time, kUnseen, what, queue.id, 0, {});
    ep = found->second.ep->id;
    if (g_trap) ProtectOp(found->second, PROT_READ | PROT_WRITE);
    node = Land(found);
  }
  const Op& op = node.mapped();
  uint64_t sum = 0;
  bool got = op.what == kRecv && !error && !op.device && op.size > 0;
  if (got) sum = Sum(MakeOp(kRecv, op.data, std::min(size, op.size)));
  bool word = op.what == kAtomic || (op.what == kRead && op.size == 8);
  if (word && !error && !op.device) memcpy(&sum, op.data, 8);
  if (!error) CheckChange(op, ep, size, time);
  const char* shown = error ? text : got ? op.data : nullptr;
  size_t length = error ? strlen(text) : std::min({size, op.size, kShown});
  Log(time, kComplete, op.what, ep, op.id, {size, data, uint64_t(error), sum},
      shown, shown ? length : 0);
}

// ---- The functions of a completion queue ----

// Looks at what libfabric has put into the program's buffer.
ssize_t Entries(struct fid_cq* cq, const void* buffer, ssize_t count) {
  const Queue& queue = g_queues.at(&cq->fid);
  for (ssize_t i = 0; i < count && g_inside == 1; ++i) {
    struct fi_cq_data_entry entry = {};
    memcpy(&entry, static_cast<const char*>(buffer) + size_t(i) * queue.entry,
           std::min(queue.entry, sizeof(entry)));
    Completed(queue, entry.op_context, entry.flags, entry.len, entry.data);
  }
  if (count > 0 && g_trap) WatchAgain();
  return count;
}

// How many completions a call gets. With traps one, as a program may get from any
// provider. If it got several, and then touched memory, it would know of all of them, and
// whether it had waited for the right one could not be told.
size_t Some(size_t count) {
  return g_trap && g_inside == 1 ? std::min<size_t>(count, 1) : count;
}

ssize_t CqRead(struct fid_cq* cq, void* buffer, size_t count) {
  CheckStack();
  Inside inside;
  return Entries(cq, buffer,
                 g_queues.at(&cq->fid).real->read(cq, buffer, Some(count)));
}
ssize_t CqSread(struct fid_cq* cq, void* buffer, size_t count,
                const void* until, int ms) {
  CheckStack();
  Inside inside;
  return Entries(
      cq, buffer,
      g_queues.at(&cq->fid).real->sread(cq, buffer, Some(count), until, ms));
}
ssize_t CqReadErr(struct fid_cq* cq, struct fi_cq_err_entry* entry,
                  uint64_t flags) {
  Inside inside;
  const Queue& queue = g_queues.at(&cq->fid);
  ssize_t ret = queue.real->readerr(cq, entry, flags);
  if (ret == 1 && g_inside == 1) {
    Completed(queue, entry->op_context, entry->flags, 0, 0,
              std::max(entry->err, 1), fi_strerror(entry->err));
  }
  return ret;
}

// ---- The functions of an endpoint ----

using Ep = struct fid_ep*;

// Passes a call on that isn't recorded. What libfabric does in it is not the program's.
template <auto table, auto call, typename... Args>
ssize_t Pass(Ep ep, Args... args) {
  Inside inside;
  return (g_endpoints.at(&ep->fid).*table->*call)(ep, args...);
}

ssize_t Recv(Ep ep, void* data, size_t size, void* desc, fi_addr_t peer,
             void* context) {
  return Post(ep, MakeOp(kRecv, data, size), peer, context, {},
              [&](Endpoint& e) {
                return e.msg->recv(ep, data, size, desc, peer, context);
              });
}
ssize_t Send(Ep ep, const void* data, size_t size, void* desc, fi_addr_t peer,
             void* context) {
  return Post(ep, MakeOp(kSend, data, size), peer, context, {},
              [&](Endpoint& e) {
                return e.msg->send(ep, data, size, desc, peer, context);
              });
}
ssize_t Inject(Ep ep, const void* data, size_t size, fi_addr_t peer) {
  return Post(
      ep, MakeOp(kSend, data, size), peer, nullptr, {},
      [&](Endpoint& e) { return e.msg->inject(ep, data, size, peer); }, true);
}

ssize_t Write(Ep ep, const void* data, size_t size, void* desc, fi_addr_t peer,
              uint64_t addr, uint64_t key, void* context) {
  return Post(ep, MakeOp(kWrite, data, size), peer, context, {addr, key},
              [&](Endpoint& e) {
                return e.rma->write(ep, data, size, desc, peer, addr, key,
                                    context);
              });
}
ssize_t WriteMsg(Ep ep, const struct fi_msg_rma* m, uint64_t flags) {
  if (m->iov_count != 1)
    return Pass<&Endpoint::rma, &fi_ops_rma::writemsg>(ep, m, flags);
  return Post(ep, MakeOp(kWrite, m->msg_iov->iov_base, m->msg_iov->iov_len),
              m->addr, m->context,
              {m->rma_iov->addr, m->rma_iov->key, m->data,
               (flags & FI_REMOTE_CQ_DATA) != 0},
              [&](Endpoint& e) { return e.rma->writemsg(ep, m, flags); });
}
ssize_t WriteData(Ep ep, const void* data, size_t size, void* desc,
                  uint64_t imm, fi_addr_t peer, uint64_t addr, uint64_t key,
                  void* context) {
  return Post(ep, MakeOp(kWrite, data, size), peer, context,
              {addr, key, imm, true}, [&](Endpoint& e) {
                return e.rma->writedata(ep, data, size, desc, imm, peer, addr,
                                        key, context);
              });
}
ssize_t Read(Ep ep, void* data, size_t size, void* desc, fi_addr_t peer,
             uint64_t addr, uint64_t key, void* context) {
  return Post(ep, MakeOp(kRead, data, size), peer, context, {addr, key},
              [&](Endpoint& e) {
                return e.rma->read(ep, data, size, desc, peer, addr, key,
                                   context);
              });
}

// Whether an atomic operation is about one integer of 64 bits.
bool IsWord(enum fi_datatype type, size_t count) {
  return count == 1 && (type == FI_UINT64 || type == FI_INT64);
}

// What is known of an atomic operation, and what it brings.
Remote AtomicOf(uint64_t addr, uint64_t key, uint64_t what, const void* operand,
                const void* expected = nullptr) {
  Remote remote = {.addr = addr, .key = key, .atomic = what};
  if (operand && (what & 0xff) != FI_ATOMIC_READ) {
    remote.operand = operand;
    memcpy(&remote.data, operand, sizeof(remote.data));
  }
  if (expected) memcpy(&remote.expected, expected, sizeof(remote.expected));
  return remote;
}

// Its buffer is that of its result.
ssize_t Fetch(Ep ep, const void* data, size_t count, void* desc, void* result,
              void* rdesc, fi_addr_t peer, uint64_t addr, uint64_t key,
              enum fi_datatype type, enum fi_op what, void* context) {
  auto call = [&](Endpoint& e) {
    return e.atomic->readwrite(ep, data, count, desc, result, rdesc, peer, addr,
                               key, type, what, context);
  };
  if (!IsWord(type, count)) {
    Inside inside;
    return call(g_endpoints.at(&ep->fid));
  }
  return Post(ep, MakeOp(kAtomic, result, sizeof(uint64_t)), peer, context,
              AtomicOf(addr, key, what | kFetches, data), call);
}
ssize_t Compare(Ep ep, const void* data, size_t count, void* desc,
                const void* expected, void* edesc, void* result, void* rdesc,
                fi_addr_t peer, uint64_t addr, uint64_t key,
                enum fi_datatype type, enum fi_op what, void* context) {
  auto call = [&](Endpoint& e) {
    return e.atomic->compwrite(ep, data, count, desc, expected, edesc, result,
                               rdesc, peer, addr, key, type, what, context);
  };
  if (!IsWord(type, count)) {
    Inside inside;
    return call(g_endpoints.at(&ep->fid));
  }
  return Post(ep, MakeOp(kAtomic, result, sizeof(uint64_t)), peer, context,
              AtomicOf(addr, key, what | kFetches, data, expected), call);
}

int EndpointBind(struct fid* fid, struct fid* other, uint64_t flags) {
  Endpoint& endpoint = g_endpoints.at(fid);
  if (auto cq = g_queues.find(other); cq != g_queues.end()) {
    if (flags & FI_RECV) endpoint.cq = cq->second.id;
    if (flags & FI_TRANSMIT) endpoint.sent_cq = cq->second.id;
  }
  if (auto av = g_avs.find(other); av != g_avs.end())
    endpoint.av = av->second.id;
  return endpoint.real->bind(fid, other, flags);
}

int EndpointControl(struct fid* fid, int command, void* arg) {
  Inside inside;
  Endpoint& endpoint = g_endpoints.at(fid);
  int ret = endpoint.real->control(fid, command, arg);
  if (command != FI_ENABLE || ret != 0 || endpoint.msg != nullptr) return ret;
  // Not before: fi_enable is where a provider may still choose other functions.
  auto* ep = reinterpret_cast<Ep>(fid);
  endpoint.msg = Replace(ep->msg);
  ep->msg->recv = Recv;
  ep->msg->send = Send;
  ep->msg->inject = Inject;
  ep->msg->recvv = Pass<&Endpoint::msg, &fi_ops_msg::recvv>;
  ep->msg->recvmsg = Pass<&Endpoint::msg, &fi_ops_msg::recvmsg>;
  ep->msg->sendv = Pass<&Endpoint::msg, &fi_ops_msg::sendv>;
  ep->msg->sendmsg = Pass<&Endpoint::msg, &fi_ops_msg::sendmsg>;
  ep->msg->senddata = Pass<&Endpoint::msg, &fi_ops_msg::senddata>;
  ep->msg->injectdata = Pass<&Endpoint::msg, &fi_ops_msg::injectdata>;
  if (ep->rma) {
    endpoint.rma = Replace(ep->rma);
    ep->rma->read = Read;
    ep->rma->write = Write;
    ep->rma->writemsg = WriteMsg;
    ep->rma->writedata = WriteData;
    ep->rma->readv = Pass<&Endpoint::rma, &fi_ops_rma::readv>;
    ep->rma->readmsg = Pass<&Endpoint::rma, &fi_ops_rma::readmsg>;
    ep->rma->writev = Pass<&Endpoint::rma, &fi_ops_rma::writev>;
    ep->rma->inject = Pass<&Endpoint::rma, &fi_ops_rma::inject>;
    ep->rma->injectdata = Pass<&Endpoint::rma, &fi_ops_rma::injectdata>;
  }
  if (ep->atomic) {
    endpoint.atomic = Replace(ep->atomic);
    ep->atomic->write = Pass<&Endpoint::atomic, &fi_ops_atomic::write>;
    ep->atomic->readwrite = Fetch;
    ep->atomic->compwrite = Compare;
    ep->atomic->writev = Pass<&Endpoint::atomic, &fi_ops_atomic::writev>;
    ep->atomic->writemsg = Pass<&Endpoint::atomic, &fi_ops_atomic::writemsg>;
    ep->atomic->inject = Pass<&Endpoint::atomic, &fi_ops_atomic::inject>;
    ep->atomic->readwritev =
        Pass<&Endpoint::atomic, &fi_ops_atomic::readwritev>;
    ep->atomic->readwritemsg =
        Pass<&Endpoint::atomic, &fi_ops_atomic::readwritemsg>;
    ep->atomic->compwritev =
        Pass<&Endpoint::atomic, &fi_ops_atomic::compwritev>;
    ep->atomic->compwritemsg =
        Pass<&Endpoint::atomic, &fi_ops_atomic::compwritemsg>;
  }
  char name[512];
  size_t size = sizeof(name);
  if (fi_getname(fid, name, &size) != 0) size = 0;
  g_name_size = size;
  Log(Now(), kEndpoint, 0, endpoint.id, 0, {endpoint.cq, endpoint.av}, name,
      size);
  InstallTrap();
  return ret;
}

int EndpointClose(struct fid* fid) {
  Inside inside;
  Endpoint& endpoint = g_endpoints.at(fid);
  int ret = endpoint.real->close(fid);
  if (ret != 0) return ret;
  Lock lock;
  auto open = std::erase_if(g_flight, [&](const auto& item) {
    const Op& op = item.second;
    if (op.ep != &endpoint) return false;
    if (g_trap) ProtectOp(op, PROT_READ | PROT_WRITE);
    g_on_stack.erase(op.id);
    g_buffers.erase(uintptr_t(op.data));
    return true;
  });
  Log(Now(), kEndpointClosed, 0, endpoint.id, 0, {uint64_t(open)});
  // Whoever reads the queue now gets nothing of it, and its address may soon be another's.
  g_endpoints.erase(fid);
  return ret;
}

// ---- Registered memory ----

int RegionClose(struct fid* fid) {
  Inside inside;
  uint64_t time = Now();
  struct fi_ops* real;
  {
    Lock lock;
    auto id = g_region_ids.extract(fid).mapped();
    Region region = std::move(g_regions.extract(id).mapped().second);
    for (auto& [context, op] : g_flight) {
      if (op.size > 0 && region.Has(uintptr_t(op.data))) {
        Log(time, kFlying, op.what, op.ep->id, op.id, {0, region.id});
      }
    }
    if (g_trap) ProtectRegion(region, false);
    Log(time, kRegionClosed, 0, 0, region.id, {});
    real = region.real;
  }
  return real->close(fid);
}

int Registered(struct fid_mr** mr, const void* data, size_t size,
               uint64_t access, bool device, int ret) {
  if (ret != 0 || g_inside > 1) return ret;
  InstallTrap();
  Lock lock;
  auto* at = static_cast<char*>(const_cast<void*>(data));
  struct fid* fid = &(*mr)->fid;
  uint32_t id = ++g_region_count;
  g_region_ids[fid] = id;
  g_regions.emplace(id, std::pair{fid, Region{id, at, size, access, device,
                                              Replace(fid->ops)}});
  fid->ops->close = RegionClose;
  Widen(uintptr_t(at), uintptr_t(at) + size);
  Log(Now(), kRegion, 0, 0, id,
      {uint64_t(at), size, access, fi_mr_key(*mr), device});
  return ret;
}

int RegAttr(struct fid* domain, const struct fi_mr_attr* attr, uint64_t flags,
            struct fid_mr** mr) {
  Inside inside;
  int ret = g_domains.at(domain).mr->regattr(domain, attr, flags, mr);
  return Registered(mr, attr->mr_iov->iov_base, attr->mr_iov->iov_len,
                    attr->access, attr->iface != FI_HMEM_SYSTEM, ret);
}
int Reg(struct fid* domain, const void* data, size_t size, uint64_t access,
        uint64_t offset, uint64_t key, uint64_t flags, struct fid_mr** mr,
        void* context) {
  Inside inside;
  int ret = g_domains.at(domain).mr->reg(domain, data, size, access, offset,
                                         key, flags, mr, context);
  return Registered(mr, data, size, access, false, ret);
}
// ---- What else touches memory ----

// libfabric's own function of that name, or the C library's.
template <typename Function>
Function* Real(const char* name, Function*) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

bool IsWatched(uintptr_t at, size_t size) {
  return at < g_highest && g_lowest < at + size;
}

// Notes that memory is given back which is registered, or in flight, or holds the record
// of an operation that is.
void Freed(const void* data, size_t size) {
  auto at = uintptr_t(data);
  if (g_records == nullptr || !IsWatched(at, size) || g_inside > 0 || g_busy)
    return;
  Lock lock;
  for (auto& [id, item] : g_regions) {
    Region& region = item.second;
    if (region.device || uintptr_t(region.data) + region.size <= at ||
        at + size <= uintptr_t(region.data)) {
      continue;
    }
    Log(Now(), kFreed, 0, 0, region.id, {});
    if (g_trap) ProtectRegion(region, false), region.access = 0;
  }
  for (auto op = g_flight.lower_bound(at);
       op != g_flight.end() && op->first < at + size; ++op) {
    Log(Now(), kFlying, op->second.what, op->second.ep->id, op->second.id, {2});
  }
  for (auto op = g_buffers.lower_bound(at);
       op != g_buffers.end() && op->first < at + size; ++op) {
    Log(Now(), kFlying, 0, 0, op->second, {1});
  }
}

VISIBLE void __libc_free(void*);
VISIBLE void free(void* data) {
  if (data != nullptr && g_records != nullptr)
    Freed(data, malloc_usable_size(data));
  __libc_free(data);
}
VISIBLE int munmap(void* data, size_t size) {
  static auto* real = Real("munmap", munmap);
  Freed(data, size);
  return real(data, size);
}

// Does what reads or writes a file, and notes if the memory is registered.
template <typename Call>
ssize_t File(const void* data, size_t size, uint8_t into, Call call) {
  auto at = uintptr_t(data);
  if (g_records == nullptr || !IsWatched(at, size) || g_inside > 0 || g_busy)
    return call();
  bool registered;
  uint32_t flying = 0;
  {
    Lock lock;
    registered = RegionOf(at) != nullptr;
    if (registered && g_trap &&
        ++g_files == 1) {  // the kernel would not call our handler
      for (auto& [id, item] : g_regions) ProtectRegion(item.second, false);
      for (auto& [context, op] : g_flight)
        ProtectOp(op, PROT_READ | PROT_WRITE);
    }
    if (auto op = g_buffers.find(at); op != g_buffers.end())
      flying = op->second;
  }
  if (!registered) return call();
  uint64_t time = Now();
  ssize_t ret = call();
  Log(time, kTouch, into, 0, flying, {at, size, Now()});
  if (g_trap) --g_files;
  return ret;
}
VISIBLE ssize_t pread(int fd, void* data, size_t size, off_t at) {
  static auto* real = Real("pread", pread);
  return File(data, size, 1, [&] { return real(fd, data, size, at); });
}
VISIBLE ssize_t pwrite(int fd, const void* data, size_t size, off_t at) {
  static auto* real = Real("pwrite", pwrite);
  return File(data, size, 0, [&] { return real(fd, data, size, at); });
}
// ---- Opening ----

int AvInsert(struct fid_av* av, const void* address, size_t count,
             fi_addr_t* number, uint64_t flags, void* context) {
  Inside inside;
  const AddressVector& vector = g_avs.at(&av->fid);
  int ret = vector.real->insert(av, address, count, number, flags, context);
  // An address is as long as the name of an endpoint of ours is, or a text.
  size_t size =
      vector.text ? strlen(static_cast<const char*>(address)) + 1 : g_name_size;
  if (ret == 1 && count == 1 && number) {
    Log(Now(), kPeer, 0, vector.id, 0, {*number}, address, size);
  }
  return ret;
}

int OpenAv(struct fid_domain* domain, struct fi_av_attr* attr,
           struct fid_av** av, void* context) {
  Inside inside;
  const Domain& known = g_domains.at(&domain->fid);
  int ret = known.real->av_open(domain, attr, av, context);
  if (ret != 0 || g_inside > 1) return ret;
  g_avs[&(*av)->fid] = {++g_objects, known.text, Replace((*av)->ops)};
  (*av)->ops->insert = AvInsert;
  return ret;
}

int OpenEndpoint(struct fid_domain* domain, struct fi_info* info,
                 struct fid_ep** ep, void* context) {
  Inside inside;
  int ret =
      g_domains.at(&domain->fid).real->endpoint(domain, info, ep, context);
  if (ret != 0 || g_inside > 1) return ret;
  Endpoint endpoint = {.id = ++g_objects, .real = Replace((*ep)->fid.ops)};
  (*ep)->fid.ops->bind = EndpointBind;
  (*ep)->fid.ops->control = EndpointControl;
  (*ep)->fid.ops->close = EndpointClose;
  g_endpoints[&(*ep)->fid] = endpoint;
  return 0;
}

int OpenCq(struct fid_domain* domain, struct fi_cq_attr* attr,
           struct fid_cq** cq, void* context) {
  Inside inside;
  int ret = g_domains.at(&domain->fid).real->cq_open(domain, attr, cq, context);
  if (ret != 0 || g_inside > 1) return ret;
  size_t sizes[] = {8, 8, sizeof(struct fi_cq_msg_entry),
                    sizeof(struct fi_cq_data_entry),
                    sizeof(struct fi_cq_tagged_entry)};
  g_queues[&(*cq)->fid] = {++g_objects, sizes[attr->format],
                           Replace((*cq)->ops)};
  (*cq)->ops->read = CqRead;
  (*cq)->ops->sread = CqSread;
  (*cq)->ops->readerr = CqReadErr;
  return 0;
}

int OpenDomain(struct fid_fabric* fabric, struct fi_info* info,
               struct fid_domain** domain, void* context) {
  Inside inside;
  int ret = g_fabrics.at(&fabric->fid)->domain(fabric, info, domain, context);
  if (ret != 0 || g_inside > 1) return ret;
  Domain known = {info->addr_format == FI_ADDR_STR, Replace((*domain)->ops),
                  Replace((*domain)->mr)};
  (*domain)->ops->endpoint = OpenEndpoint;
  (*domain)->ops->cq_open = OpenCq;
  (*domain)->ops->av_open = OpenAv;
  (*domain)->mr->reg = Reg;
  (*domain)->mr->regattr = RegAttr;
  g_domains[&(*domain)->fid] = known;
  return 0;
}

// libfabric may work in here, too.
int TryWait(struct fid_fabric* fabric, struct fid** fids, int count) {
  Inside inside;
  return g_fabrics.at(&fabric->fid)->trywait(fabric, fids, count);
}

VISIBLE int fi_fabric(struct fi_fabric_attr* attr, struct fid_fabric** fabric,
                      void* context) {
  if (g_inside > 0) {  // a provider is built upon another, as ofi_rxm upon tcp
    static void* library = dlopen("libfabric.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<decltype(&fi_fabric)>(dlsym(library, "fi_fabric"))(
        attr, fabric, context);
  }
  // The traps would see what these do outside of the program's calls.
  if (attr->prov_name &&
      (strstr(attr->prov_name, "shm") || strstr(attr->prov_name, "sockets"))) {
    g_trap = false;
  }
  OpenFile();
  Inside inside;
  int ret = Real("fi_fabric", fi_fabric)(attr, fabric, context);
  if (ret != 0) return ret;
  g_fabrics[&(*fabric)->fid] = Replace((*fabric)->ops);
  (*fabric)->ops->domain = OpenDomain;
  (*fabric)->ops->trywait = TryWait;
  return ret;
}
