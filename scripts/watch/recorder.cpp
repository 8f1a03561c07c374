// Records what a program asks of libfabric, from post to completion, and what becomes
// of its memory meanwhile. model.py puts the records of all processes together.
//
// Usage: WATCH=FOLDER LD_PRELOAD=build/watch.so PROGRAM...
//   WATCH=FOLDER   each process writes FOLDER/PID.watch; without it, nothing is recorded
//   WATCH_MB=N     a file has at most N MB (256); what comes later is only counted
//
// The program is not changed, and neither is what it gets to see. The file is mapped, so a
// process that is killed leaves all that it has recorded. One thread posts and reads
// completions, as in all programs here; others may read and write files.
//
// Each object of libfabric gets its own copies of its tables of functions. In front of
// strict.so, if LD_PRELOAD names that after watch.so, it sees what the program sees. Of the calls that post, it knows those that the
// tutorial makes, with one buffer or one word; what others have posted is counted as it
// completes.

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
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
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

// Summing up buffers is most of what recording costs. xxHash does it as fast as memory is.
#define XXH_INLINE_ALL
#include <xxhash.h>

#define VISIBLE extern "C" __attribute__((visibility("default")))
// A library behind this one may have functions of the same names.
#pragma GCC visibility push(hidden)
#define STAND_IN "watch"
#include "../tests/stand_in.h"

// Gives an object a copy of one of its tables. Returns the table that it had. The library
// may be newer than our headers and its tables longer, so a table itself says how long it
// is. Copies are never freed: an object may use its table until the end of its fi_close.
template <typename Table>
Table* Replace(Table*& table) {
  Table* real = table;
  table = static_cast<Table*>(malloc(real->size));
  if (table == nullptr) Die("no memory");
  memcpy(table, real, real->size);
  return real;
}

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
          // expected word, fi_op
  kNoRoom,  // for what; the same again until there is room isn't noted
  kComplete,  // length, immediate data, error, sum; text: the error, or the payload
  kNotice,   // immediate data, length
  kChanged,  // where, from, to, whether these are known
  kFlying,   // a region is closed, or memory is freed, with it in flight
  kFreed,    // a region whose memory is freed
  kUnseen,   // a completion of what none of the calls below has posted
  kTouch,    // pread or pwrite: data, size, end
  kEnd       // records that were dropped, the status that the program ends with
};
enum What : uint8_t { kSend = 1, kRecv, kWrite, kRead, kAtomic };

// Bits beside What.
constexpr uint8_t kHasImm = 0x80, kInjected = 0x20;

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

// Of a longer text, the rest is not shown; of a longer buffer, there is only a sum.
constexpr size_t kShown = 320, kCopied = 4096;

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
  if (g_records == nullptr) return;
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
  size_t bytes = size_t(Setting("WATCH_MB", 256)) << 20;
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
  g_capacity = bytes / sizeof(Record) - 1;
  g_records = static_cast<Record*>(map);
  char arguments[1000] = {};
  int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  ssize_t size = read(fd, arguments, sizeof(arguments));
  close(fd);
  Log(Now(), kProcess, 0, 0, uint32_t(getpid()), {}, arguments, size_t(size));
  on_exit(CloseFile, nullptr);
}

// ---- What is known ----

struct Region {
  uint32_t id;
  char* data;
  size_t size;
  bool device;  // memory that a processor can't read
  struct fi_ops* real;

  bool Has(uintptr_t at, size_t bytes = 1) const {
    return uintptr_t(data) < at + bytes && at < uintptr_t(data) + size;
  }
};

struct Endpoint {
  uint16_t id;
  uint16_t cq = 0, av = 0;
  struct fi_ops* real = nullptr;
  struct fi_ops_msg* msg = nullptr;
  struct fi_ops_rma* rma = nullptr;
  struct fi_ops_atomic* atomic = nullptr;
  bool refused = false;  // the last post, for lack of room
};

struct Op {
  uint32_t id;
  What what;
  Endpoint* ep;
  char* data;
  size_t size;
  bool device = false;
  uint64_t sum = 0;  // of what its buffer was like; or what a word should be
  std::vector<char> copy = {};  // and its bytes, if there are few
};

struct Queue {
  uint16_t id;
  struct fi_ops_cq* real;
};

struct AddressVector {
  uint16_t id;
  bool text;
  struct fi_ops_av* real;
};

struct Domain {
  bool text;  // whether addresses are
  struct fi_ops_domain* real;
  struct fi_ops_mr* mr;
};

std::mutex g_mutex;
std::unordered_map<struct fid*, Endpoint> g_endpoints;
std::unordered_map<struct fid*, Queue> g_queues;
std::unordered_map<struct fid*, AddressVector> g_avs;
std::unordered_map<struct fid*, struct fi_ops_fabric*> g_fabrics;
std::unordered_map<struct fid*, Domain> g_domains;
std::map<struct fid*, Region> g_regions;  // those that are open
std::map<uintptr_t, Op> g_flight;         // by their contexts
std::atomic<uintptr_t> g_lowest = UINTPTR_MAX,
                       g_highest = 0;  // of regions and contexts
uint32_t g_ops = 0, g_region_count = 0;
uint16_t g_objects = 0;
size_t g_name_size = 0;
// How deep this thread is in libfabric: what that does itself is not the program's.
thread_local int g_inside = 0;

// Lives as long as libfabric, or we, work for this thread.
struct Inside {
  Inside() { ++g_inside; }
  ~Inside() { --g_inside; }
};

struct Lock {
  Inside inside;
  std::lock_guard<std::mutex> guard{g_mutex};
};

Region* RegionOf(uintptr_t at) {
  for (auto& [fid, region] : g_regions) {
    if (region.Has(at)) return &region;
  }
  return nullptr;
}

void Widen(uintptr_t low, uintptr_t high) {
  g_lowest = std::min(g_lowest.load(), low);
  g_highest = std::max(g_highest.load(), high);
}

// ---- Operations ----

struct Remote {
  uint64_t addr = 0, key = 0;
  uint64_t data = 0;  // immediate data, or the operand of an atomic operation
  bool has_imm = false;
  uint64_t atomic = 0;  // which one: enum fi_op
  uint64_t expected = 0;
  bool injected = false;
};
using Ep = struct fid_ep*;

Op MakeOp(What what, const void* data, size_t size) {
  return {0, what, nullptr, static_cast<char*>(const_cast<void*>(data)), size};
}

// Posts an operation, and writes it down. One that is injected has no completion, and its
// buffer is the program's again at once.
template <typename Table, typename... Types>
ssize_t Post(Op op, fi_addr_t peer, void* context, Remote remote,
             Table* Endpoint::*table, ssize_t (*Table::*function)(Ep, Types...),
             Ep ep, std::type_identity_t<Types>... arguments) {
  Endpoint* endpoint = &g_endpoints.at(&ep->fid);
  auto* real = (endpoint->*table)->*function;
  if (g_inside > 0)
    return real(ep, arguments...);  // one function of libfabric calls another
  Inside inside;
  uint64_t time = Now();
  ssize_t ret = real(ep, arguments...);
  if (ret == -FI_EAGAIN) {
    if (!std::exchange(endpoint->refused, true))
      Log(time, kNoRoom, op.what, endpoint->id, 0, {});
    return ret;
  }
  endpoint->refused = false;
  op.ep = endpoint;
  {
    Lock lock;
    op.id = ++g_ops;
    const Region* region = op.size > 0 ? RegionOf(uintptr_t(op.data)) : nullptr;
    op.device = region && region->device;
  }
  // What is behind a message was libfabric's until it had taken the buffer, so not before.
  bool readable = !op.device && op.size > 0 && op.what != kAtomic;
  // The bytes of what is short or, of a RECV, of the beginning that a message may fill; and
  // the sum of what may be long. That of a message leads model.py to the RECV that takes it.
  if (readable &&
      (op.what == kRecv || (op.size <= kCopied && op.what != kRead)))
    op.copy.assign(op.data, op.data + std::min(op.size, kCopied));
  if (readable && (op.what == kSend || op.what == kWrite))
    op.sum = XXH3_64bits(op.data, op.size);
  if (op.what == kAtomic) op.sum = remote.expected;
  uint8_t bits = uint8_t(op.what | (remote.has_imm ? kHasImm : 0) |
                         (remote.injected ? kInjected : 0));
  Log(time, kPost, bits, endpoint->id, op.id,
      {uint64_t(op.data), op.size, peer, remote.addr, remote.key, remote.data,
       op.sum, remote.atomic},
      readable && op.what == kSend ? op.data : nullptr,
      std::min(op.size, kShown));
  if (ret != 0) {
    const char* error = fi_strerror(int(-ret));
    Log(Now(), kComplete, op.what, endpoint->id, op.id, {0, 0, uint64_t(-ret)},
        error, strlen(error));
  } else if (!remote.injected) {
    Lock lock;
    if (context) Widen(uintptr_t(context), uintptr_t(context) + 1);
    if (op.size > 0) Widen(uintptr_t(op.data), uintptr_t(op.data) + 1);
    g_flight.insert_or_assign(uintptr_t(context), std::move(op));
  }
  return ret;
}

// Writes down where a buffer is not as it was when it was posted. Of a RECV, only what is
// behind its message has to be.
void CheckChange(const Op& op, uint16_t ep, size_t length, uint64_t time) {
  size_t from = op.what == kRecv ? std::min(length, op.copy.size()) : 0;
  auto [was, is] = std::mismatch(op.copy.begin() + ptrdiff_t(from),
                                 op.copy.end(), op.data + from);
  if (was != op.copy.end()) {
    Log(time, kChanged, op.what, ep, op.id,
        {uint64_t(was - op.copy.begin()), uint8_t(*was), uint8_t(*is), 1});
  } else if (op.copy.empty() && (op.what == kSend || op.what == kWrite) &&
             !op.device && op.size > 0 &&
             XXH3_64bits(op.data, op.size) != op.sum) {
    Log(time, kChanged, op.what, ep, op.id, {});
  }
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
  auto node = [&] {
    Lock lock;
    return g_flight.extract(uintptr_t(context));
  }();
  if (!node) return Log(time, kUnseen, 0, queue.id, 0, {});
  const Op& op = node.mapped();
  uint16_t ep = op.ep->id;
  uint64_t sum = 0;
  bool got = op.what == kRecv && !error && !op.device && op.size > 0;
  if (got) sum = XXH3_64bits(op.data, std::min(size, op.size));
  bool word = op.what == kAtomic || (op.what == kRead && op.size == 8);
  if (word && !error && !op.device) memcpy(&sum, op.data, 8);
  if (!error) CheckChange(op, ep, size, time);
  const char* shown = error ? text : got ? op.data : nullptr;
  size_t length = error ? strlen(text) : std::min({size, op.size, kShown});
  Log(time, kComplete, op.what, ep, op.id, {size, data, uint64_t(error), sum},
      shown, shown ? length : 0);
}

// ---- The functions of a completion queue ----

ssize_t CqRead(struct fid_cq* cq, void* buffer, size_t count) {
  Inside inside;
  const Queue& queue = g_queues.at(&cq->fid);
  ssize_t ret = queue.real->read(cq, buffer, count);
  for (ssize_t i = 0; i < ret && g_inside == 1; ++i) {
    const auto& entry = static_cast<const struct fi_cq_data_entry*>(buffer)[i];
    Completed(queue, entry.op_context, entry.flags, entry.len, entry.data);
  }
  return ret;
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

uint64_t Word(const void* data) {
  uint64_t word;
  memcpy(&word, data, sizeof(word));
  return word;
}

ssize_t Recv(Ep ep, void* data, size_t size, void* desc, fi_addr_t peer,
             void* context) {
  return Post(MakeOp(kRecv, data, size), peer, context, {}, &Endpoint::msg,
              &fi_ops_msg::recv, ep, data, size, desc, peer, context);
}
ssize_t Send(Ep ep, const void* data, size_t size, void* desc, fi_addr_t peer,
             void* context) {
  return Post(MakeOp(kSend, data, size), peer, context, {}, &Endpoint::msg,
              &fi_ops_msg::send, ep, data, size, desc, peer, context);
}
ssize_t Inject(Ep ep, const void* data, size_t size, fi_addr_t peer) {
  return Post(MakeOp(kSend, data, size), peer, nullptr, {.injected = true},
              &Endpoint::msg, &fi_ops_msg::inject, ep, data, size, peer);
}

ssize_t Write(Ep ep, const void* data, size_t size, void* desc, fi_addr_t peer,
              uint64_t addr, uint64_t key, void* context) {
  return Post(MakeOp(kWrite, data, size), peer, context, {addr, key},
              &Endpoint::rma, &fi_ops_rma::write, ep, data, size, desc, peer,
              addr, key, context);
}
ssize_t WriteData(Ep ep, const void* data, size_t size, void* desc,
                  uint64_t imm, fi_addr_t peer, uint64_t addr, uint64_t key,
                  void* context) {
  return Post(MakeOp(kWrite, data, size), peer, context, {addr, key, imm, true},
              &Endpoint::rma, &fi_ops_rma::writedata, ep, data, size, desc, imm,
              peer, addr, key, context);
}
ssize_t Read(Ep ep, void* data, size_t size, void* desc, fi_addr_t peer,
             uint64_t addr, uint64_t key, void* context) {
  return Post(MakeOp(kRead, data, size), peer, context, {addr, key},
              &Endpoint::rma, &fi_ops_rma::read, ep, data, size, desc, peer,
              addr, key, context);
}

// Its buffer is that of its result. All are about one integer of 64 bits.
ssize_t Fetch(Ep ep, const void* data, size_t count, void* desc, void* result,
              void* rdesc, fi_addr_t peer, uint64_t addr, uint64_t key,
              enum fi_datatype type, enum fi_op what, void* context) {
  return Post(MakeOp(kAtomic, result, sizeof(uint64_t)), peer, context,
              {addr, key, Word(data), false, what}, &Endpoint::atomic,
              &fi_ops_atomic::readwrite, ep, data, count, desc, result, rdesc,
              peer, addr, key, type, what, context);
}
ssize_t Compare(Ep ep, const void* data, size_t count, void* desc,
                const void* expected, void* edesc, void* result, void* rdesc,
                fi_addr_t peer, uint64_t addr, uint64_t key,
                enum fi_datatype type, enum fi_op what, void* context) {
  return Post(MakeOp(kAtomic, result, sizeof(uint64_t)), peer, context,
              {addr, key, Word(data), false, what, Word(expected)},
              &Endpoint::atomic, &fi_ops_atomic::compwrite, ep, data, count,
              desc, expected, edesc, result, rdesc, peer, addr, key, type, what,
              context);
}

int EndpointBind(struct fid* fid, struct fid* other, uint64_t flags) {
  Endpoint& endpoint = g_endpoints.at(fid);
  if (auto cq = g_queues.find(other); cq != g_queues.end())
    endpoint.cq = cq->second.id;
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
  if (ep->rma) {
    endpoint.rma = Replace(ep->rma);
    ep->rma->read = Read;
    ep->rma->write = Write;
    ep->rma->writedata = WriteData;
  }
  if (ep->atomic) {
    endpoint.atomic = Replace(ep->atomic);
    ep->atomic->readwrite = Fetch;
    ep->atomic->compwrite = Compare;
  }
  char name[512];
  size_t size = sizeof(name);
  if (fi_getname(fid, name, &size) != 0) size = 0;
  g_name_size = size;
  Log(Now(), kEndpoint, 0, endpoint.id, 0, {endpoint.cq, endpoint.av}, name,
      size);
  return ret;
}

int EndpointClose(struct fid* fid) {
  Inside inside;
  Endpoint& endpoint = g_endpoints.at(fid);
  int ret = endpoint.real->close(fid);
  if (ret != 0) return ret;
  Lock lock;
  auto open = std::erase_if(
      g_flight, [&](const auto& item) { return item.second.ep == &endpoint; });
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
    Region region = g_regions.extract(fid).mapped();
    for (auto& [context, op] : g_flight) {
      if (op.size > 0 && region.Has(uintptr_t(op.data))) {
        Log(time, kFlying, op.what, op.ep->id, op.id, {0, region.id});
      }
    }
    Log(time, kRegionClosed, 0, 0, region.id, {});
    real = region.real;
  }
  return real->close(fid);
}

// Not of what a provider registers, or opens, for itself, hence g_inside.
int Registered(struct fid_mr** mr, const void* data, size_t size,
               uint64_t access, bool device, int ret) {
  if (ret != 0 || g_inside > 1) return ret;
  Lock lock;
  auto* at = static_cast<char*>(const_cast<void*>(data));
  struct fid* fid = &(*mr)->fid;
  uint32_t id = ++g_region_count;
  g_regions[fid] = {id, at, size, device, Replace(fid->ops)};
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

bool IsWatched(uintptr_t at, size_t size) {
  return at < g_highest && g_lowest < at + size;
}

// Notes that memory is given back which is registered, or in flight, or holds the record
// of an operation that is.
void Freed(const void* data, size_t size) {
  auto at = uintptr_t(data);
  if (g_records == nullptr || !IsWatched(at, size) || g_inside > 0) return;
  Lock lock;
  for (auto& [fid, region] : g_regions) {
    if (!region.device && region.Has(at, size))
      Log(Now(), kFreed, 0, 0, region.id, {});
  }
  for (auto& [context, op] : g_flight) {
    bool record = at <= context && context < at + size;
    bool buffer = op.size > 0 && at <= uintptr_t(op.data) &&
                  uintptr_t(op.data) < at + size;
    if (record || buffer)
      Log(Now(), kFlying, op.what, op.ep->id, op.id, {record ? 2u : 1u});
  }
}

VISIBLE void __libc_free(void*);
VISIBLE void free(void* data) {
  if (data != nullptr && g_records != nullptr)
    Freed(data, malloc_usable_size(data));
  __libc_free(data);
}
VISIBLE int munmap(void* data, size_t size) {
  static auto* real = Next("munmap", munmap);
  Freed(data, size);
  return real(data, size);
}

// Does what reads or writes a file, and notes if the memory is registered.
template <typename Call>
ssize_t File(const void* data, size_t size, uint8_t into, Call call) {
  auto at = uintptr_t(data);
  if (g_records == nullptr || !IsWatched(at, size) || g_inside > 0)
    return call();
  uint64_t time = Now();
  ssize_t ret = call();
  Lock lock;
  if (RegionOf(at)) Log(time, kTouch, into, 0, 0, {at, size, Now()});
  return ret;
}
VISIBLE ssize_t pread(int fd, void* data, size_t size, off_t at) {
  static auto* real = Next("pread", pread);
  return File(data, size, 1, [&] { return real(fd, data, size, at); });
}
VISIBLE ssize_t pwrite(int fd, const void* data, size_t size, off_t at) {
  static auto* real = Next("pwrite", pwrite);
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
  if (ret == 1 && count == 1 && number)
    Log(Now(), kPeer, 0, vector.id, 0, {*number}, address, size);
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
  if (attr->format != FI_CQ_FORMAT_DATA)
    Die("a queue without FI_CQ_FORMAT_DATA");
  g_queues[&(*cq)->fid] = {++g_objects, Replace((*cq)->ops)};
  (*cq)->ops->read = CqRead;
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

VISIBLE int fi_fabric(struct fi_fabric_attr* attr, struct fid_fabric** fabric,
                      void* context) {
  if (g_inside > 0) {  // a provider is built upon another, as ofi_rxm upon tcp
    static void* library = dlopen("libfabric.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<decltype(&fi_fabric)>(dlsym(library, "fi_fabric"))(
        attr, fabric, context);
  }
  OpenFile();
  Inside inside;
  int ret = Next("fi_fabric", fi_fabric)(attr, fabric, context);
  if (ret != 0) return ret;
  g_fabrics[&(*fabric)->fid] = Replace((*fabric)->ops);
  (*fabric)->ops->domain = OpenDomain;
  return ret;
}
