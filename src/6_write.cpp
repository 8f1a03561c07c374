// 6_write: one-sided operations.
//
// The server WRITEs pages into the client's memory, on the GPU if there is one.
// The client's program takes no part in that. Immediate data, which comes with
// the last WRITE, tells it that all of the pages are there.

#include <rdma/fabric.h>
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
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <new>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#ifdef USE_CUDA
#include <cuda_runtime.h>
#endif

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// ---------------------------------------------------------------------------
// Constants
// ---------------------------------------------------------------------------

// The version of libfabric's interface that we ask for: the newest that we
// know, but no newer than the headers, because an older library would offer
// nothing.
constexpr uint32_t kApiVersion =
    std::min(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION), FI_VERSION(2, 0));

// What this program uses of libfabric: the capabilities of fi_getinfo(3).
constexpr uint64_t kCaps = FI_MSG | FI_RMA;

constexpr size_t kMaxAddressSize = 256;        // bytes
constexpr size_t kMaxMessageSize = 64 * 1024;  // bytes
constexpr size_t kBufferAlign = 4096;          // bytes
constexpr size_t kHugePageSize = 2 << 20;      // bytes
constexpr size_t kRecvCount = 8;               // RECVs posted at a time

// Entries that are read from the completion queue at a time, and entries that
// it holds: more than we ever have operations in flight.
constexpr size_t kCompletionQueueReadCount = 16;
constexpr size_t kCompletionQueueSize = 128;

// After so many polls without a completion, a loop gives the core to others.
// Not after each poll: one may move data without completing anything, and the
// others may keep the core for long.
constexpr size_t kPollsPerYield = 64;

constexpr auto kSilenceLimit = 10s;  // without a completion, then we give up
constexpr auto kQuietLimit = 2s;  // without a completion, then we poll slowly
constexpr auto kIdlePause = 1ms;  // between two looks at quiet queues

constexpr size_t kMaxClients = 8;     // that are served at a time
constexpr size_t kMaxWaiting = 1000;  // clients that wait to be served
constexpr auto kAcceptLimit = 60s;    // that a client waits to be served
constexpr auto kListenPeriod = 1ms;   // between two looks for new clients
constexpr auto kReportPeriod = 1s;    // between two reports of progress

constexpr size_t kBufferCount = 2;           // of a client, for pages
constexpr size_t kMaxMemoryRegions = 16;     // that a client may offer
constexpr size_t kMaxPageSize = 16 << 20;    // bytes
constexpr size_t kSourceMemory = 512 << 20;  // bytes, for all clients' pages

// Limits of the WRITEs in flight to a client. Without the limit in bytes, a
// message would have to queue behind gigabytes.
constexpr size_t kMaxOutstandingWrites = 64;
constexpr size_t kMaxOutstandingBytes = 16 << 20;

// WRITEs that are posted each time that the completion queue is read.
constexpr size_t kWritesPerPoll = 16;

// ---------------------------------------------------------------------------
// Errors and signals
// ---------------------------------------------------------------------------

// Throws if a function of libfabric has failed. Such functions return 0 or a
// count if all went well, otherwise a negative error number (fi_errno(3)).
void FiCheck(ssize_t ret, const std::string& what) {
  if (ret < 0) {
    throw std::runtime_error(what + ": " + fi_strerror(static_cast<int>(-ret)));
  }
}

void Close(struct fid* fid, const char* what) {
  int ret = fi_close(fid);
  if (ret != 0) {
    fprintf(stderr, "warning: fi_close of the %s: %s\n", what,
            fi_strerror(-ret));
  }
}

// Set by the first signal that asks us to end. All loops look at it, so that
// everything is closed on the way out.
volatile sig_atomic_t g_interrupted = 0;

void HandleSignal(int signum) {
  g_interrupted = 1;
  signal(signum, SIG_DFL);  // a second one ends the process at once
}

void InstallSignalHandlers() {
  for (int signum : {SIGINT, SIGTERM, SIGHUP}) signal(signum, HandleSignal);
  signal(SIGPIPE, SIG_IGN);  // `| head` must not end us before we have closed
}

// ---------------------------------------------------------------------------
// GPU memory: all calls of CUDA
// ---------------------------------------------------------------------------

#ifdef USE_CUDA

inline constexpr const char* kNoGpu = "no GPU";

void CudaCheck(cudaError_t ret, const char* what) {
  if (ret != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " +
                             cudaGetErrorString(ret));
  }
}

// Returns the first GPU that CUDA_VISIBLE_DEVICES allows; -1 if there is none.
int FindGpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 ? 0 : -1;
}

// Allocates zeroed memory.
void* CudaAlloc(size_t bytes) {
  void* data = nullptr;
  CudaCheck(cudaMalloc(&data, bytes), "cudaMalloc");
  CudaCheck(cudaMemset(data, 0, bytes), "cudaMemset");
  CudaCheck(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return data;
}

void CudaFree(void* data) { cudaFree(data); }

// Copies between host and GPU, in either direction. cudaMemcpy may return
// before the copy has ended, and the adapter would then send what was there
// before.
void CudaCopy(void* to, const void* from, size_t bytes) {
  CudaCheck(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
  CudaCheck(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

// Makes data that an adapter has written visible to the GPU. The completion is
// in host memory and the data in GPU memory, and PCI Express may have brought
// the completion first. Call it between the completion and the use of the data.
// Does nothing if the GPU keeps that order by itself.
void CudaFlushWrites(int gpu) {
  int ordering = 0;
  int options = 0;
  CudaCheck(cudaDeviceGetAttribute(&ordering,
                                   cudaDevAttrGPUDirectRDMAWritesOrdering, gpu),
            "cudaDeviceGetAttribute");
  CudaCheck(cudaDeviceGetAttribute(
                &options, cudaDevAttrGPUDirectRDMAFlushWritesOptions, gpu),
            "cudaDeviceGetAttribute");
  if (ordering >= cudaGPUDirectRDMAWritesOrderingOwner ||
      (options & cudaFlushGPUDirectRDMAWritesOptionHost) == 0) {
    return;
  }
  CudaCheck(cudaDeviceFlushGPUDirectRDMAWrites(
                cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
                cudaFlushGPUDirectRDMAWritesToOwner),
            "cudaDeviceFlushGPUDirectRDMAWrites");
}

#else  // Built without CUDA: no GPU is found, and nothing else is called.

inline constexpr const char* kNoGpu = "built without CUDA";

int FindGpu() { return -1; }
void* CudaAlloc(size_t) { return nullptr; }
void CudaFree(void*) {}
void CudaCopy(void*, const void*, size_t) {}
void CudaFlushWrites(int) {}

#endif

// ---------------------------------------------------------------------------
// Addresses and buffers
// ---------------------------------------------------------------------------

// The address of an endpoint. Only its provider knows what the bytes mean, and
// how many there are.
using Address = std::vector<uint8_t>;

std::string ToHex(const Address& address) {
  std::string hex;
  for (uint8_t byte : address) {
    char digits[3];
    snprintf(digits, sizeof(digits), "%02x", byte);
    hex += digits;
  }
  return hex;
}

// Does the reverse of ToHex. Throws std::invalid_argument, which main() takes
// for a wrong command line.
Address ParseAddress(const std::string& hex) {
  if (hex.empty() || hex.size() % 2 != 0 || hex.size() / 2 > kMaxAddressSize ||
      hex.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
    throw std::invalid_argument(
        "ADDRESS is not an even number of hexadecimal digits, " +
        std::to_string(2 * kMaxAddressSize) + " at most: \"" +
        hex.substr(0, 80) + "\"");
  }
  Address address;
  for (size_t i = 0; i < hex.size(); i += 2) {
    address.push_back(
        static_cast<uint8_t>(stoul(hex.substr(i, 2), nullptr, 16)));
  }
  return address;
}

// Memory that can be registered, and its registration. While an operation is
// in flight the adapter may use its buffer at any time, so declare a buffer
// before the Network that uses it. Then C++ closes the Network first.
struct Buffer {
  uint8_t* data = nullptr;
  size_t size = 0;              // bytes
  struct fid_mr* mr = nullptr;  // set by Domain::RegisterMemory
  int gpu = -1;                 // the GPU that has the memory; -1: the host

  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { Free(); }

  // Allocates zeroed memory. Writing the zeros makes sure that every page of it
  // exists, which a provider may demand before registration (FI_MR_ALLOCATED).
  void Alloc(size_t bytes) {
    size = bytes;
    size_t align = kBufferAlign;
    // Large buffers are on huge pages, which need fewer entries in the page
    // tables and in the adapter's copy of them.
    if (size >= kHugePageSize) align = kHugePageSize;
    size_t rounded = (size + align - 1) / align * align;
    data = static_cast<uint8_t*>(aligned_alloc(align, rounded));
    if (data == nullptr) throw std::bad_alloc();
    if (align == kHugePageSize) madvise(data, rounded, MADV_HUGEPAGE);
    memset(data, 0, rounded);
  }

  void AllocOnGpu(size_t bytes, int on_gpu) {
    data = static_cast<uint8_t*>(CudaAlloc(bytes));
    size = bytes;
    gpu = on_gpu;
  }

  void CopyIn(size_t offset, const void* from, size_t len) {
    gpu < 0 ? (void)memcpy(data + offset, from, len)
            : CudaCopy(data + offset, from, len);
  }

  void CopyOut(size_t offset, void* to, size_t len) const {
    gpu < 0 ? (void)memcpy(to, data + offset, len)
            : CudaCopy(to, data + offset, len);
  }

  void Free() {
    if (mr) Close(&mr->fid, "memory region");
    gpu < 0 ? free(data) : CudaFree(data);
    mr = nullptr;
    data = nullptr;
    gpu = -1;
  }
};

// ---------------------------------------------------------------------------
// Operations
// ---------------------------------------------------------------------------

enum class RdmaOpType : uint8_t {
  kRecv,
  kSend,
  kWrite,
  kRemoteWrite,  // posted by the other side; we see only its completion
};

// Where the data of a WRITE comes from, and where it goes.
struct RdmaWriteOp {
  Buffer* buf = nullptr;
  size_t offset = 0;      // bytes from the start of buf
  size_t len = 0;         // bytes
  uint64_t dest_ptr = 0;  // from the owner of the memory
  uint64_t dest_key = 0;  // from the owner of the memory
  uint32_t imm_data = 0;  // 0: none; some providers carry no more than 4 bytes
};

struct RdmaOp;

// Called once, when an operation has completed. It may post others.
using RdmaCallback = std::function<void(const RdmaOp&)>;

// A work request: an operation for libfabric to do, and the function to call
// when it is done.
struct RdmaOp {
  // Must come first: some providers keep notes of their own here while the
  // operation is in flight (FI_CONTEXT2 in fi_getinfo(3)).
  struct fi_context2 context = {};
  RdmaOpType type = RdmaOpType::kRecv;
  fi_addr_t peer = FI_ADDR_UNSPEC;  // of a SEND
  Buffer* buf = nullptr;
  size_t len = 0;  // bytes; of a RECV, set when a message has arrived
  RdmaWriteOp write = {};
  RdmaCallback callback = nullptr;
  std::string error = {};  // set at completion; empty if all went well

  const char* Name() const {
    switch (type) {
      case RdmaOpType::kRecv:
        return "RECV";
      case RdmaOpType::kSend:
        return "SEND";
      case RdmaOpType::kWrite:
        return "WRITE";
      case RdmaOpType::kRemoteWrite:
        return "remote WRITE";
    }
    return "operation";
  }

  // Throws if the operation has failed.
  void Check() const {
    if (error.empty()) return;
    bool to_peer = type != RdmaOpType::kRecv;
    throw std::runtime_error(
        std::string(Name()) + " failed: " + error +
        (to_peer ? "; is the other side still running?" : ""));
  }
};

// ---------------------------------------------------------------------------
// Domain and Network
// ---------------------------------------------------------------------------

// An interface that has been opened: its fabric, which is the network, and its
// domain, which is our access to the adapter. Declare it before everything that
// uses it, so that it is closed last.
struct Domain {
  struct fi_info* info = nullptr;
  struct fid_fabric* fabric = nullptr;
  struct fid_domain* domain = nullptr;
  uint64_t next_key = 1;
  // Complete a WRITE only when the data is in the peer's memory.
  uint64_t write_flags = FI_DELIVERY_COMPLETE;

  Domain() = default;
  Domain(const Domain&) = delete;
  Domain& operator=(const Domain&) = delete;
  ~Domain();

  void Open(struct fi_info* list);
  void RegisterMemory(Buffer& buf, uint64_t access);
  size_t MaxMessageSize() const;
};

// An endpoint, where operations are posted, and what belongs to it: a
// completion queue, which says what became of them, an address vector, which
// holds the addresses of peers, and an event queue.
struct Network {
  Domain* domain = nullptr;
  struct fid_av* av = nullptr;
  struct fid_cq* cq = nullptr;
  struct fid_eq* eq = nullptr;
  struct fid_ep* ep = nullptr;
  Address addr;                       // our own
  Clock::time_point last_completion;  // of anything but a SEND
  std::chrono::seconds silence_limit = kSilenceLimit;

  std::deque<RdmaOp> ops;         // as many as were ever in use at a time
  std::vector<RdmaOp*> free_ops;  // those of them that are not in flight
  // Callbacks for WRITEs from the other side, by their immediate data.
  std::unordered_map<uint32_t, RdmaCallback> remote_writes;

  Network() = default;
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;
  ~Network();

  void Open(Domain& open_domain);
  fi_addr_t AddPeerAddress(const Address& address);

  bool PostRecv(Buffer& buf, const RdmaCallback& callback);
  bool PostSend(fi_addr_t peer, Buffer& buf, size_t len,
                const RdmaCallback& callback);
  bool PostWrite(fi_addr_t peer, const RdmaWriteOp& write,
                 const RdmaCallback& callback);
  void AddRemoteWrite(uint32_t imm_data, const RdmaCallback& callback);
  size_t PollCompletion();
  void WaitUntil(const char* what, const std::function<bool()>& done);

  bool Post(RdmaOp request);
  bool Submit(RdmaOp* op);
  void Complete(void* context, size_t len, const std::string& error);
  void CompleteRemoteWrite(uint32_t imm_data);
  void ReadError();
  Clock::duration CheckSilence(const char* what) const;
};

// Returns the setting of FI_PROVIDER, as one types it; empty if there is none.
std::string ProviderSetting() {
  const char* provider = getenv("FI_PROVIDER");
  return provider ? "FI_PROVIDER='" + std::string(provider) + "' " : "";
}

// Asks libfabric for the interfaces that can do what we need (`caps`), the best
// first. FI_PROVIDER narrows the choice, and so does `same`, to one interface.
// The caller owns the list; see fi_getinfo(3).
struct fi_info* GetInfo(uint64_t caps, const struct fi_info* same = nullptr) {
  struct fi_info* hints = fi_allocinfo();
  if (hints == nullptr) throw std::bad_alloc();
  hints->caps = caps;
  // Reliable, whole messages, and one endpoint for any number of peers.
  hints->ep_attr->type = FI_EP_RDM;
  // Demands that we can meet. The answer keeps those that the provider makes.
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  if (caps & FI_HMEM) hints->domain_attr->mr_mode |= FI_MR_HMEM;
  // Only one thread uses the domain, so the provider needs no locks.
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  // Messages to the same peer must arrive in the order of their SENDs.
  hints->tx_attr->msg_order = FI_ORDER_SAS;
  hints->rx_attr->msg_order = FI_ORDER_SAS;

  if (same != nullptr) {
    hints->fabric_attr->prov_name = strdup(same->fabric_attr->prov_name);
    hints->fabric_attr->name = strdup(same->fabric_attr->name);
    hints->domain_attr->name = strdup(same->domain_attr->name);
  }

  struct fi_info* info = nullptr;
  int ret = fi_getinfo(kApiVersion, nullptr, nullptr, 0, hints, &info);
  fi_freeinfo(hints);
  FiCheck(ret,
          ProviderSetting() +
              "fi_getinfo finds no interface that can do what this "
              "program needs (`fi_info -t FI_EP_RDM` lists what there is)");
  return info;
}

// Does the same as GetInfo, but asks for GPU memory (FI_HMEM) if there is a GPU
// and the interface that we would use anyway supports it. We do not change to
// another interface for it: a libfabric without CUDA would offer shm, which
// reaches nobody outside this host.
struct fi_info* GetInfoWithGpu() {
  struct fi_info* plain = GetInfo(kCaps);
  if (FindGpu() < 0) return plain;
  try {
    struct fi_info* with_gpu = GetInfo(kCaps | FI_HMEM, plain);
    fi_freeinfo(plain);
    return with_gpu;
  } catch (const std::runtime_error&) {
    return plain;
  }
}

// Describes an interface in one line.
std::string Describe(const struct fi_info* info) {
  return "domain: " + std::string(info->domain_attr->name) +
         ", fabric: " + info->fabric_attr->name +
         ", provider: " + info->fabric_attr->prov_name;
}

// Opens the first interface of a list made by GetInfo, and owns the list from
// then on.
void Domain::Open(struct fi_info* list) {
  info = list;
  FiCheck(fi_fabric(info->fabric_attr, &fabric, nullptr), "fi_fabric");
  FiCheck(fi_domain(fabric, info, &domain, nullptr), "fi_domain");

  // The shm provider copies the data of a WRITE when we post it, or before any
  // later WRITE, so the data is in place in time even if we do not ask for
  // that. If we ask, the provider of libfabric 1.17 has the other side copy it
  // under a lock, and waits for ever if that side is killed in the meantime. It
  // copies GPU memory in no other way.
  if (strcmp(info->fabric_attr->prov_name, "shm") == 0 &&
      (info->caps & FI_HMEM) == 0) {
    write_flags = 0;
  }
}

// Opens an endpoint on a domain, which must outlive it.
void Network::Open(Domain& open_domain) {
  domain = &open_domain;
  struct fi_av_attr av_attr = {};
  FiCheck(fi_av_open(domain->domain, &av_attr, &av, nullptr), "fi_av_open");

  struct fi_cq_attr cq_attr = {};
  cq_attr.size = kCompletionQueueSize;
  cq_attr.format = FI_CQ_FORMAT_DATA;
  FiCheck(fi_cq_open(domain->domain, &cq_attr, &cq, nullptr), "fi_cq_open");

  // Without an event queue, the efa provider ends the process on some errors of
  // a peer. We never read it: such a peer falls silent, and we notice that.
  struct fi_eq_attr eq_attr = {};
  FiCheck(fi_eq_open(domain->fabric, &eq_attr, &eq, nullptr), "fi_eq_open");

  FiCheck(fi_endpoint(domain->domain, domain->info, &ep, nullptr),
          "fi_endpoint");
  FiCheck(fi_ep_bind(ep, &av->fid, 0), "fi_ep_bind (address vector)");
  FiCheck(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV),
          "fi_ep_bind (completion queue)");
  FiCheck(fi_ep_bind(ep, &eq->fid, 0), "fi_ep_bind (event queue)");
  FiCheck(fi_enable(ep), "fi_enable");

  size_t length = kMaxAddressSize;
  addr.resize(length);
  FiCheck(fi_getname(&ep->fid, addr.data(), &length), "fi_getname");
  addr.resize(length);
  last_completion = Clock::now();
}

// Closes the endpoint first, because the operations that are still in flight
// use everything else.
Network::~Network() {
  if (ep) Close(&ep->fid, "endpoint");
  if (eq) Close(&eq->fid, "event queue");
  if (cq) Close(&cq->fid, "completion queue");
  if (av) Close(&av->fid, "address vector");
}

Domain::~Domain() {
  if (domain) Close(&domain->fid, "domain");
  if (fabric) Close(&fabric->fid, "fabric");
  if (info) fi_freeinfo(info);
}

// Tells the adapter about a buffer, and which operations may use it from now on
// (FI_SEND, FI_RECV ...; see fi_mr(3)).
void Domain::RegisterMemory(Buffer& buf, uint64_t access) {
  struct iovec iov = {.iov_base = buf.data, .iov_len = buf.size};
  struct fi_mr_attr attr = {};
  attr.mr_iov = &iov;
  attr.iov_count = 1;
  attr.access = access;
  // Used by providers that let us choose the key (those without
  // FI_MR_PROV_KEY). No two regions of a domain may have the same one.
  attr.requested_key = next_key++;
  if (buf.gpu >= 0) {
    attr.iface = FI_HMEM_CUDA;
    attr.device.cuda = buf.gpu;
  }
  int ret = fi_mr_regattr(domain, &attr, 0, &buf.mr);
  FiCheck(ret, "fi_mr_regattr of " + std::to_string(buf.size) + " bytes" +
                   (ret == -FI_ENOMEM
                        ? " (the limit of locked memory, `ulimit -l`, may be "
                          "too low)"
                        : ""));
}

// Returns the greatest length of a message, in bytes. Server and client use the
// same provider, so it is the same for both.
size_t Domain::MaxMessageSize() const {
  return std::min(kMaxMessageSize, info->ep_attr->max_msg_size);
}

// Returns libfabric's number for a peer's address. Nothing is sent, so a peer
// that does not exist shows later, as an error or as silence.
fi_addr_t Network::AddPeerAddress(const Address& address) {
  // An address that is a name ends with a zero byte and begins as ours does.
  // Any other address is as long as ours.
  bool fits = domain->info->addr_format == FI_ADDR_STR
                  ? !address.empty() && address.back() == 0 &&
                        address.front() == addr.front()
                  : address.size() == addr.size();
  fi_addr_t peer = FI_ADDR_UNSPEC;
  if (!fits || fi_av_insert(av, address.data(), 1, &peer, 0, nullptr) != 1) {
    throw std::runtime_error("\"" + ToHex(address) +
                             "\" is not an address of provider " +
                             domain->info->fabric_attr->prov_name +
                             "; do both sides use the same FI_PROVIDER?");
  }
  return peer;
}

// Posts a RECV: the next message, from anybody, goes into `buf`. Like all
// functions that post, returns false if libfabric has no room for it now.
bool Network::PostRecv(Buffer& buf, const RdmaCallback& callback) {
  RdmaOp op = {.type = RdmaOpType::kRecv,
               .buf = &buf,
               .len = buf.size,
               .callback = callback};
  return Post(std::move(op));
}

// Sends the first `len` bytes of `buf`, which must not change until the SEND
// has completed.
bool Network::PostSend(fi_addr_t peer, Buffer& buf, size_t len,
                       const RdmaCallback& callback) {
  RdmaOp op = {.type = RdmaOpType::kSend,
               .peer = peer,
               .buf = &buf,
               .len = len,
               .callback = callback};
  return Post(std::move(op));
}

// Posts a WRITE into memory of the peer, whose program takes no part in it.
bool Network::PostWrite(fi_addr_t peer, const RdmaWriteOp& write,
                        const RdmaCallback& callback) {
  RdmaOp op = {.type = RdmaOpType::kWrite,
               .peer = peer,
               .buf = write.buf,
               .len = write.len,
               .write = write,
               .callback = callback};
  return Post(std::move(op));
}

// Calls back once, when a WRITE with this immediate data has arrived here. Has
// to be called before the WRITE can arrive.
void Network::AddRemoteWrite(uint32_t imm_data, const RdmaCallback& callback) {
  remote_writes[imm_data] = callback;
}

bool Network::Post(RdmaOp request) {
  if (free_ops.empty()) free_ops.push_back(&ops.emplace_back());
  RdmaOp* op = free_ops.back();
  *op = std::move(request);
  if (!Submit(op)) return false;
  free_ops.pop_back();
  return true;
}

// Hands an operation to libfabric. Returns false if there is no room for it now
// (-FI_EAGAIN); reading the completion queue makes room. See fi_msg(3).
bool Network::Submit(RdmaOp* op) {
  void* desc = fi_mr_desc(op->buf->mr);
  struct iovec iov = {.iov_base = op->buf->data, .iov_len = op->len};
  ssize_t ret = 0;
  switch (op->type) {
    case RdmaOpType::kRecv: {
      ret = fi_recv(ep, op->buf->data, op->len, desc, FI_ADDR_UNSPEC, op);
      break;
    }
    case RdmaOpType::kSend: {
      struct fi_msg msg = {};
      msg.msg_iov = &iov;
      msg.desc = &desc;
      msg.iov_count = 1;
      msg.addr = op->peer;
      msg.context = op;
      // Complete only when the data is in place at the peer. The default of a
      // provider may be a weaker level (fi_cq(3)).
      ret = fi_sendmsg(ep, &msg, FI_DELIVERY_COMPLETE);
      break;
    }
    case RdmaOpType::kWrite: {
      const RdmaWriteOp& write = op->write;
      iov.iov_base = write.buf->data + write.offset;
      struct fi_rma_iov to = {
          .addr = write.dest_ptr, .len = write.len, .key = write.dest_key};
      struct fi_msg_rma msg = {};
      msg.msg_iov = &iov;
      msg.desc = &desc;
      msg.iov_count = 1;
      msg.addr = op->peer;
      msg.rma_iov = &to;
      msg.rma_iov_count = 1;
      msg.context = op;
      msg.data = write.imm_data;
      ret = fi_writemsg(
          ep, &msg,
          domain->write_flags | (write.imm_data ? FI_REMOTE_CQ_DATA : 0));
      break;
    }
    case RdmaOpType::kRemoteWrite:
      break;  // never posted
  }
  if (ret == -FI_EAGAIN) {
    return false;
  }
  if (ret != 0) op->error = fi_strerror(static_cast<int>(-ret));
  op->Check();
  return true;
}

// Reads what has completed and calls back. Many providers work only while we
// read: they have no thread of their own. Returns the number of completions.
// Throws if something is wrong with the endpoint, or if a callback does.
size_t Network::PollCompletion() {
  struct fi_cq_data_entry cqe[kCompletionQueueReadCount];
  ssize_t ret = fi_cq_read(cq, cqe, kCompletionQueueReadCount);
  if (ret == -FI_EAGAIN) return 0;
  if (ret == -FI_EAVAIL) {
    ReadError();
    return 1;
  }
  FiCheck(ret, "fi_cq_read");
  for (ssize_t i = 0; i < ret; ++i) {
    if (cqe[i].flags & FI_REMOTE_WRITE) {
      CompleteRemoteWrite(static_cast<uint32_t>(cqe[i].data));
      continue;
    }
    Complete(cqe[i].op_context, cqe[i].len, "");
  }
  return static_cast<size_t>(ret);
}

// Ends an operation: makes its RdmaOp free for another one, and calls back.
void Network::Complete(void* context, size_t len, const std::string& error) {
  if (context == nullptr) return;  // not an operation of ours
  auto* op = static_cast<RdmaOp*>(context);
  RdmaOp done = std::move(*op);
  free_ops.push_back(op);
  // A SEND may complete on this side alone: it says nothing about the peer.
  if (done.type != RdmaOpType::kSend) last_completion = Clock::now();
  done.error = error;
  if (done.type == RdmaOpType::kRecv && error.empty()) {
    if (len > done.len) done.error = "the message is longer than the buffer";
    done.len = len;
  }
  done.callback(done);
}

// Calls back for a WRITE from the other side. Ignores it if nobody waits for
// it.
void Network::CompleteRemoteWrite(uint32_t imm_data) {
  last_completion = Clock::now();
  auto it = remote_writes.find(imm_data);
  if (it == remote_writes.end()) return;
  RdmaCallback callback = it->second;
  remote_writes.erase(it);
  callback({.type = RdmaOpType::kRemoteWrite});
}

// Reads a failed operation, which is the next entry of the completion queue.
// Only fi_cq_readerr can read it.
void Network::ReadError() {
  struct fi_cq_err_entry entry = {};
  ssize_t ret = fi_cq_readerr(cq, &entry, 0);
  if (ret == -FI_EAGAIN) return;
  FiCheck(ret, "fi_cq_readerr");
  std::string error = fi_strerror(entry.err);
  const char* detail =
      fi_cq_strerror(cq, entry.prov_errno, entry.err_data, nullptr, 0);
  if (detail != nullptr && error != detail) {
    error += " (" + std::string(detail) + ")";
  }
  // Some providers do not say which operation has failed.
  if (entry.op_context == nullptr) {
    throw std::runtime_error("an operation failed: " + error);
  }
  Complete(entry.op_context, 0, error);
}

// Polls the completion queue until `done` returns true. Error messages begin
// with `what`. Only a client waits like this; a server must not, because all
// its clients would have to wait, too.
void Network::WaitUntil(const char* what, const std::function<bool()>& done) {
  last_completion = Clock::now();
  size_t empty_polls = 0;
  while (!done()) {
    if (g_interrupted) throw std::runtime_error("interrupted");
    if (PollCompletion() > 0) continue;
    if (CheckSilence(what) > kQuietLimit) {
      std::this_thread::sleep_for(kIdlePause);
    } else if (++empty_polls % kPollsPerYield == 0) {
      // The other side may need the core to answer us.
      std::this_thread::yield();
    }
  }
}

// Returns for how long nothing has completed. Throws if that is too long: some
// providers never report that a peer has gone, and silence is all that there is
// to notice.
Clock::duration Network::CheckSilence(const char* what) const {
  Clock::duration quiet = Clock::now() - last_completion;
  if (quiet < silence_limit) return quiet;
  throw std::runtime_error(
      std::string(what) + ": nothing has happened for " +
      std::to_string(silence_limit.count()) +
      " s; is the other side running, with the same FI_PROVIDER?");
}

// ---------------------------------------------------------------------------
// Messages
// ---------------------------------------------------------------------------

using Message = std::vector<uint8_t>;

// Keeps RECVs posted, and keeps what they receive until somebody takes it.
struct Inbox {
  Buffer bufs[kRecvCount];
  std::deque<Buffer*> idle_bufs;  // those without a RECV
  std::deque<RdmaOp> arrivals;    // completed RECVs

  void Open(Network& net) {
    for (Buffer& buf : bufs) {
      buf.Alloc(net.domain->MaxMessageSize());
      net.domain->RegisterMemory(buf, FI_RECV);
      idle_bufs.push_back(&buf);
    }
    PostRecvs(net);
  }

  // Posts a RECV for each idle buffer, as far as libfabric has room.
  void PostRecvs(Network& net) {
    auto arrived = [this](const RdmaOp& op) { arrivals.push_back(op); };
    while (!idle_bufs.empty() && net.PostRecv(*idle_bufs.front(), arrived)) {
      idle_bufs.pop_front();
    }
  }

  // Takes out the next message. Returns false if there is none. Throws if the
  // next RECV has failed, because its message was too long, for example.
  bool Take(Message& message) {
    if (arrivals.empty()) return false;
    RdmaOp recv = arrivals.front();
    arrivals.pop_front();
    if (recv.error.empty()) {
      message.assign(recv.buf->data, recv.buf->data + recv.len);
    }
    idle_bufs.push_back(recv.buf);
    recv.Check();
    return true;
  }
};

// Sends copies of messages, in order, as soon as libfabric has room for them.
struct Outbox {
  struct Outgoing {
    fi_addr_t peer;
    Buffer* buf;
    size_t len;  // bytes
  };

  std::list<Buffer> bufs;          // as many as we have ever needed at a time
  std::vector<Buffer*> idle_bufs;  // those of them that hold no message
  std::deque<Outgoing> to_send;    // messages whose SEND is not posted yet

  // Sends a message: a head of fixed size, and a tail if there is one.
  void Send(Network& net, fi_addr_t peer, const void* head, size_t head_size,
            const void* tail = nullptr, size_t tail_size = 0) {
    size_t len = head_size + tail_size;
    if (len > net.domain->MaxMessageSize()) {
      throw std::runtime_error("a message of " + std::to_string(len) +
                               " bytes is too long for this provider");
    }
    if (idle_bufs.empty()) {
      Buffer& buf = bufs.emplace_back();
      buf.Alloc(net.domain->MaxMessageSize());
      net.domain->RegisterMemory(buf, FI_SEND);
      idle_bufs.push_back(&buf);
    }
    Buffer* buf = idle_bufs.back();
    idle_bufs.pop_back();
    memcpy(buf->data, head, head_size);
    if (tail_size > 0) memcpy(buf->data + head_size, tail, tail_size);
    to_send.push_back({peer, buf, len});
    PostSends(net);
  }

  // Posts the SENDs of messages that wait, as far as libfabric has room.
  void PostSends(Network& net) {
    auto sent = [this](const RdmaOp& op) {
      op.Check();
      idle_bufs.push_back(op.buf);
    };
    while (!to_send.empty()) {
      const Outgoing& next = to_send.front();
      if (!net.PostSend(next.peer, *next.buf, next.len, sent)) return;
      to_send.pop_front();
    }
  }

  bool AllSent() const { return idle_bufs.size() == bufs.size(); }
};

enum class AppMessageType : uint32_t {
  kConnect = 1,  // client: this is my address
  kAccept = 2,   // server: this is the address of the endpoint that serves you
  kBye = 3,      // client: I have everything that I wanted

  kRandomFill = 4,  // client: fill my memory
  kProgress = 5,    // server: I am still at it
};

// The beginning of each message.
struct AppMessageBase {
  AppMessageType type;
};

// Memory that its owner lets the other side use.
struct AppMemoryRegion {
  uint64_t addr;
  uint64_t size;  // bytes
  uint64_t rkey;
};

// A CONNECT or an ACCEPT.
struct AppConnectMessage {
  AppMessageBase base;
  uint32_t addr_size;  // bytes used of addr
  uint8_t addr[kMaxAddressSize];
  uint64_t num_mr;  // used of mr; an ACCEPT uses none
  AppMemoryRegion mr[kMaxMemoryRegions];

  void SetAddress(const Address& address) {
    addr_size = static_cast<uint32_t>(address.size());
    memcpy(addr, address.data(), address.size());
  }

  Address GetAddress() const { return {addr, addr + addr_size}; }
};

// RANDOM_FILL: make num_pages pages from the seed for the first memory region,
// from seed + 1 for the second, and so on. The i-th goes to page page_idx[i] of
// its region.
struct AppRandomFillMessage {
  AppMessageBase base;
  uint32_t remote_context;  // to come back as immediate data; not 0
  uint64_t seed;
  uint64_t page_size;  // bytes; a multiple of 8
  uint64_t num_pages;
  // Followed by page_idx: num_pages indices, a uint32_t each.
};

// Makes the next page of the sequence that belongs to the generator's seed.
void MakePage(std::mt19937_64& generator, std::vector<uint64_t>& page) {
  for (uint64_t& word : page) word = generator();
}

std::runtime_error BadMessage(const std::string& what) {
  return std::runtime_error("bad message: " + what);
}

// Returns the type of a message, or 0 if it is too short to have one.
AppMessageType TypeOf(const Message& message) {
  AppMessageBase base = {};
  if (message.size() < sizeof(base)) return base.type;
  memcpy(&base, message.data(), sizeof(base));
  return base.type;
}

// Copies the beginning of a message into a struct that starts with an
// AppMessageBase. Throws if the message is too short for it, or of another
// type.
void ReadMessage(const Message& message, AppMessageType type, void* head,
                 size_t head_size) {
  if (message.size() < head_size) {
    throw BadMessage("its " + std::to_string(message.size()) +
                     " bytes are too few");
  }
  if (TypeOf(message) != type) {
    throw BadMessage("its type is " +
                     std::to_string(static_cast<uint32_t>(TypeOf(message))) +
                     " instead of " +
                     std::to_string(static_cast<uint32_t>(type)));
  }
  memcpy(head, message.data(), head_size);
}

// Reads a CONNECT or an ACCEPT. Throws if it cannot be one.
AppConnectMessage ReadConnect(const Message& message, AppMessageType type) {
  AppConnectMessage connect;
  ReadMessage(message, type, &connect, sizeof(connect));
  if (message.size() != sizeof(connect) ||
      connect.addr_size > sizeof(connect.addr) ||
      connect.num_mr > kMaxMemoryRegions) {
    throw BadMessage("its sizes do not fit together");
  }
  return connect;
}

// ---------------------------------------------------------------------------
// Session
// ---------------------------------------------------------------------------

// One end of a conversation: an endpoint, and messages from and to one peer.
// The server has a session for each client. Destroying it also ends whatever
// was in flight to that client, and only closing the endpoint can do that.
struct Session {
  Inbox inbox;
  Outbox outbox;
  Network net;
  fi_addr_t peer = FI_ADDR_UNSPEC;
  bool done = false;  // the client has said BYE

  void Open(Domain& domain) {
    net.Open(domain);
    inbox.Open(net);
  }

  void Accept(const AppConnectMessage& connect, AppConnectMessage accept);
  AppConnectMessage Connect(const Address& server_addr,
                            AppConnectMessage connect);
  void SayBye();

  void Send(const void* head, size_t head_size, const void* tail = nullptr,
            size_t tail_size = 0) {
    outbox.Send(net, peer, head, head_size, tail, tail_size);
  }

  // Takes out the next message. Returns false if there is none, or if it is a
  // BYE.
  bool Take(Message& message) {
    if (done || !inbox.Take(message)) return false;
    done = TypeOf(message) == AppMessageType::kBye;
    return !done;
  }

  // Posts what had to wait, and polls. Returns the number of completions.
  size_t Poll() {
    inbox.PostRecvs(net);
    outbox.PostSends(net);
    return net.PollCompletion();
  }

  void WaitUntil(const char* what, const std::function<bool()>& is_done) {
    net.WaitUntil(what, [&] {
      inbox.PostRecvs(net);
      outbox.PostSends(net);
      return is_done();
    });
  }
};

// Server: tells a client which endpoint serves it, and whatever else is in
// `accept`.
void Session::Accept(const AppConnectMessage& connect,
                     AppConnectMessage accept) {
  peer = net.AddPeerAddress(connect.GetAddress());
  accept.base.type = AppMessageType::kAccept;
  accept.SetAddress(net.addr);
  Send(&accept, sizeof(accept));
}

// Client: asks the server for an endpoint of its own, and waits for it. Tells
// the server whatever else is in `connect`. Returns the ACCEPT.
AppConnectMessage Session::Connect(const Address& server_addr,
                                   AppConnectMessage connect) {
  peer = net.AddPeerAddress(server_addr);
  connect.base.type = AppMessageType::kConnect;
  connect.SetAddress(net.addr);
  Send(&connect, sizeof(connect));
  WaitUntil("sending CONNECT", [this] { return outbox.AllSent(); });
  printf("Sent CONNECT message to server\n");

  // The server answers at once, unless it serves as many clients as it can.
  // Anything else that arrives was meant for an earlier owner of our address.
  Message message;
  net.silence_limit = kAcceptLimit;
  WaitUntil("waiting for ACCEPT (the server may have too many clients)", [&] {
    return Take(message) && TypeOf(message) == AppMessageType::kAccept;
  });
  net.silence_limit = kSilenceLimit;
  AppConnectMessage accept = ReadConnect(message, AppMessageType::kAccept);
  peer = net.AddPeerAddress(accept.GetAddress());
  return accept;
}

// Client: tells the server that we are done. If the message does not get
// through, the server will notice our silence.
void Session::SayBye() {
  AppMessageBase bye = {AppMessageType::kBye};
  try {
    Send(&bye, sizeof(bye));
    WaitUntil("saying BYE", [this] { return outbox.AllSent(); });
  } catch (const std::runtime_error& e) {
    fprintf(stderr, "warning: %s\n", e.what());
  }
}

// ---------------------------------------------------------------------------
// Server
// ---------------------------------------------------------------------------

// Prints which interface the server uses, and how to reach it.
void PrintClientCommand(const char* program, const Network& net) {
  printf("%s\n", Describe(net.domain->info).c_str());
  printf("Run the client with the following command:\n  %s%s %s\n",
         ProviderSetting().c_str(), program, ToHex(net.addr).c_str());
}

// Prints a line about a client. The number says which one. On a terminal, a
// line that shows progress is replaced by the next line about the same client.
void PrintLine(FILE* file, size_t number, const std::string& text,
               bool progress = false) {
  static size_t open_line = 0;  // whose line the cursor is in; 0: nobody's
  if (open_line != 0) {
    printf(open_line == number ? "\r\033[K" : "\n");
    fflush(stdout);
  }
  progress &= isatty(fileno(file)) == 1;
  open_line = progress ? number : 0;
  fprintf(file, "[%zu] %s%s", number, text.c_str(), progress ? "" : "\n");
  fflush(file);
}

// Allocates and registers `size` bytes of GPU memory if possible, otherwise of
// host memory. Returns in words where they are.
std::string AllocAndRegister(Domain& domain, Buffer& buf, size_t size,
                             uint64_t access) {
  std::string reason = kNoGpu;
  int gpu = FindGpu();
  if (gpu >= 0 && (domain.info->caps & FI_HMEM) == 0) {
    reason = std::string(domain.info->fabric_attr->prov_name) +
             " does not support GPUs";
  } else if (gpu >= 0) {
    try {
      buf.AllocOnGpu(size, gpu);
      domain.RegisterMemory(buf, access);
      return "on cuda:" + std::to_string(gpu);
    } catch (const std::runtime_error& e) {
      reason = e.what();
      buf.Free();
    }
  }
  buf.Alloc(size);
  domain.RegisterMemory(buf, access);
  return "in host memory (" + reason + ")";
}

// A client, and what it asks of the server: to fill its memory with pages.
struct RandomFillRequestState {
  enum class State {
    kWaitRequest,
    kWaitMemory,
    kMakePages,
    kWrite,
    kWaitBye,
  };

  Buffer source;  // the pages for the client's first region, its second, ...
  Session session;
  size_t number;            // of the client; begins each line about it
  size_t* memory_left;      // bytes left for the sources of all clients
  size_t memory_taken = 0;  // bytes that our source uses
  State state = State::kWaitRequest;
  AppConnectMessage connect_msg;
  AppRandomFillMessage request_msg = {};
  std::vector<uint32_t> page_idx;
  std::mt19937_64 generator;
  size_t total_pages = 0;  // of all regions
  size_t made_pages = 0;
  size_t total_write_ops = 0;
  size_t posted_write_ops = 0;
  size_t finished_write_ops = 0;
  Clock::time_point write_start_at;
  Clock::time_point reported_at;

  // Opens the session. Throws if that fails.
  RandomFillRequestState(Domain& domain, size_t client_number,
                         const AppConnectMessage& connect, size_t* memory)
      : number(client_number), memory_left(memory), connect_msg(connect) {
    if (connect.num_mr == 0) throw BadMessage("it offers no memory");
    session.Open(domain);
    session.Accept(connect, {});
    PrintLine(
        stdout, number,
        "Received CONNECT message from client " + ToHex(connect.GetAddress()));
    for (size_t i = 0; i < connect.num_mr; ++i) {
      char text[100];
      snprintf(text, sizeof(text), "  MR[%zu]: addr=0x%lx size=%lu rkey=0x%lx",
               i, connect.mr[i].addr, connect.mr[i].size, connect.mr[i].rkey);
      PrintLine(stdout, number, text);
    }
  }

  ~RandomFillRequestState() { *memory_left += memory_taken; }

  // Does what can be done for the client now. Returns the number of
  // completions. Throws if the client has sent something wrong, or nothing for
  // too long.
  size_t Poll() {
    size_t completions = session.Poll();
    Message message;
    while (session.Take(message)) HandleRequest(message);
    if (session.done) {
      HandleBye();
      return completions;
    }
    AllocSource();
    ContinueMakePages();
    ContinuePostWrite();
    Report();
    if (state != State::kWaitMemory && state != State::kMakePages) {
      session.net.CheckSilence("waiting for the client");
    }
    return completions;
  }

  // Returns whether there is more to do right away, even if nothing completes.
  bool Busy() const {
    return state == State::kMakePages || state == State::kWrite;
  }

  // Compares each value in the message with what was received and what was
  // offered, before it uses the value.
  void HandleRequest(const Message& message) {
    AppRandomFillMessage msg;
    ReadMessage(message, AppMessageType::kRandomFill, &msg, sizeof(msg));
    if (state != State::kWaitRequest) throw BadMessage("a second request");
    size_t indices_size = message.size() - sizeof(msg);
    if (msg.num_pages == 0 || indices_size % sizeof(uint32_t) != 0 ||
        indices_size / sizeof(uint32_t) != msg.num_pages) {
      throw BadMessage("its sizes do not fit together");
    }
    if (msg.remote_context == 0) throw BadMessage("no remote_context");
    if (msg.page_size == 0 || msg.page_size % sizeof(uint64_t) != 0 ||
        msg.page_size > kMaxPageSize ||
        msg.page_size > session.net.domain->info->ep_attr->max_msg_size ||
        msg.num_pages > kSourceMemory / connect_msg.num_mr / msg.page_size) {
      throw BadMessage("the server has no room for " +
                       std::to_string(msg.num_pages) + " pages of " +
                       std::to_string(msg.page_size) + " bytes");
    }
    page_idx.resize(msg.num_pages);
    memcpy(page_idx.data(), message.data() + sizeof(msg), indices_size);
    for (size_t i = 0; i < connect_msg.num_mr; ++i) {
      for (uint32_t idx : page_idx) {
        if (idx >= connect_msg.mr[i].size / msg.page_size) {
          throw BadMessage("page " + std::to_string(idx) +
                           " is outside of MR[" + std::to_string(i) + "]");
        }
      }
    }
    request_msg = msg;
    total_pages = connect_msg.num_mr * msg.num_pages;
    total_write_ops = total_pages;
    PrintLine(stdout, number,
              "Received RandomFill request: page_size=" +
                  std::to_string(msg.page_size) +
                  " num_pages=" + std::to_string(msg.num_pages));
    reported_at = Clock::now();
    state = State::kWaitMemory;
  }

  // Allocates the source as soon as the other clients have left enough memory.
  void AllocSource() {
    size_t size = total_pages * request_msg.page_size;
    if (state != State::kWaitMemory || size > *memory_left) return;
    *memory_left -= size;
    memory_taken = size;
    std::string place =
        AllocAndRegister(*session.net.domain, source, size, FI_WRITE);
    PrintLine(stdout, number,
              "Registered " + std::to_string(size) + " bytes " + place);
    state = State::kMakePages;
  }

  // Makes the next page. It makes one at a time, so that the other clients do
  // not have to wait.
  void ContinueMakePages() {
    if (state != State::kMakePages) return;
    if (made_pages % request_msg.num_pages == 0) {
      generator.seed(request_msg.seed + made_pages / request_msg.num_pages);
    }
    std::vector<uint64_t> page(request_msg.page_size / sizeof(uint64_t));
    MakePage(generator, page);
    source.CopyIn(made_pages * request_msg.page_size, page.data(),
                  request_msg.page_size);
    if (++made_pages < total_pages) return;
    write_start_at = Clock::now();
    session.net.last_completion = write_start_at;  // silence counts from here
    state = State::kWrite;
  }

  // Posts the next WRITEs, if it is time for them.
  void ContinuePostWrite() {
    if (state != State::kWrite) return;
    size_t page_size = request_msg.page_size;
    size_t max_outstanding =
        std::min(std::max<size_t>(kMaxOutstandingBytes / page_size, 2),
                 kMaxOutstandingWrites);
    for (size_t i = 0; i < kWritesPerPoll; ++i) {
      if (posted_write_ops == total_write_ops) return;
      // Immediate data tells the client that all is there, but WRITEs may
      // arrive in any order. So the last one waits until all others have
      // completed.
      bool last = posted_write_ops + 1 == total_write_ops;
      size_t outstanding = posted_write_ops - finished_write_ops;
      if (outstanding >= (last ? 1 : max_outstanding)) return;

      size_t i_source = posted_write_ops;
      const AppMemoryRegion& mr =
          connect_msg.mr[i_source / request_msg.num_pages];
      RdmaWriteOp write = {
          .buf = &source,
          .offset = i_source * page_size,
          .len = page_size,
          .dest_ptr =
              mr.addr + page_idx[i_source % request_msg.num_pages] * page_size,
          .dest_key = mr.rkey,
          .imm_data = last ? request_msg.remote_context : 0,
      };
      auto written = [this](const RdmaOp& op) {
        op.Check();
        HandleWriteCompletion();
      };
      if (!session.net.PostWrite(session.peer, write, written)) return;
      ++posted_write_ops;
    }
  }

  void HandleWriteCompletion() {
    if (++finished_write_ops < total_write_ops) return;
    PrintProgress();
    state = State::kWaitBye;
  }

  // The client may see the last WRITE, and say BYE, before we see its
  // completion.
  void HandleBye() {
    if (state != State::kWrite || posted_write_ops < total_write_ops) return;
    finished_write_ops = total_write_ops;
    PrintProgress();
  }

  // Reports progress to the terminal and to the client, now and then. The
  // client takes no part in a WRITE, so to the client a long transfer is
  // silence.
  void Report() {
    if (state == State::kWaitRequest || state == State::kWaitBye) return;
    Clock::time_point now = Clock::now();
    if (now - reported_at < kReportPeriod || !session.outbox.AllSent()) return;
    reported_at = now;
    if (state == State::kWrite) PrintProgress();
    AppMessageBase progress = {AppMessageType::kProgress};
    session.Send(&progress, sizeof(progress));
  }

  void PrintProgress() {
    std::chrono::duration<double> seconds = Clock::now() - write_start_at;
    char text[200];
    snprintf(text, sizeof(text), "[%.3fs] WRITE: %zu%%, %zu/%zu",
             seconds.count(), 100 * finished_write_ops / total_write_ops,
             finished_write_ops, total_write_ops);
    std::string line = text;
    PrintLine(stdout, number, line, finished_write_ops < total_write_ops);
  }
};

int ServerMain(const char* program) {
  Domain domain;
  Inbox inbox;
  Network net;
  size_t memory_left = kSourceMemory;
  std::list<RandomFillRequestState> clients;
  domain.Open(GetInfoWithGpu());
  net.Open(domain);
  inbox.Open(net);
  PrintClientCommand(program, net);

  std::deque<AppConnectMessage> waiting;  // for whom there is no room yet
  size_t num_clients = 0;                 // so far
  size_t empty_polls = 0;
  Clock::time_point listened_at;
  while (!g_interrupted) {
    size_t completions = 0;
    bool busy = false;
    // Looking at a quiet endpoint costs a system call or more, so the clients
    // that are served should not have to wait for that too often.
    if (clients.empty() || Clock::now() - listened_at >= kListenPeriod) {
      listened_at = Clock::now();
      inbox.PostRecvs(net);
      try {
        completions += net.PollCompletion();
        Message message;
        while (waiting.size() < kMaxWaiting && inbox.Take(message)) {
          waiting.push_back(ReadConnect(message, AppMessageType::kConnect));
        }
        // One at a time: opening an endpoint takes some providers 50 ms.
        if (clients.size() < kMaxClients && !waiting.empty()) {
          AppConnectMessage connect = waiting.front();
          waiting.pop_front();
          clients.emplace_back(domain, num_clients + 1, connect, &memory_left);
          ++num_clients;
        }
      } catch (const std::exception& e) {
        // A bad message must not end the server.
        fprintf(stderr, "error: %s\n", e.what());
      }
    }
    for (auto it = clients.begin(); it != clients.end();) {
      auto client = it++;
      try {
        completions += client->Poll();
        busy |= client->Busy();
        if (!client->session.done) continue;
        PrintLine(stdout, client->number, "Done.");
      } catch (const std::exception& e) {
        // It ends this client's session, and costs the others nothing.
        PrintLine(stderr, client->number, std::string("error: ") + e.what());
      }
      clients.erase(client);
    }
    if (completions > 0) continue;
    if (busy) {
      if (++empty_polls % kPollsPerYield == 0) std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(kIdlePause);
  }
  return 0;
}

// ---------------------------------------------------------------------------
// Client
// ---------------------------------------------------------------------------

// Returns whether every page that we asked for is there, and nothing else.
bool CheckPages(const Buffer& buf, uint64_t seed,
                const std::vector<uint32_t>& page_idx, size_t page_size) {
  std::mt19937_64 generator(seed);
  std::vector<uint64_t> expected(page_size / sizeof(uint64_t));
  std::vector<uint64_t> received(page_size / sizeof(uint64_t));
  std::vector<bool> asked_for(buf.size / page_size);
  for (uint32_t idx : page_idx) {
    if (g_interrupted) throw std::runtime_error("interrupted");
    MakePage(generator, expected);
    buf.CopyOut(idx * page_size, received.data(), page_size);
    if (received != expected) return false;
    asked_for[idx] = true;
  }
  std::fill(expected.begin(), expected.end(), 0);
  for (size_t idx = 0; idx < asked_for.size(); ++idx) {
    if (asked_for[idx]) continue;
    buf.CopyOut(idx * page_size, received.data(), page_size);
    if (received != expected) return false;
  }
  return true;
}

int ClientMain(const Address& server_addr, size_t page_size, size_t num_pages) {
  Domain domain;
  Buffer bufs[kBufferCount];
  Session session;
  domain.Open(GetInfoWithGpu());
  session.Open(domain);
  printf("%s\n", Describe(domain.info).c_str());
  if (page_size > domain.info->ep_attr->max_msg_size) {
    throw std::invalid_argument("PAGE_SIZE is too large for this provider");
  }
  AppRandomFillMessage request = {};
  size_t max_pages =
      (domain.MaxMessageSize() - sizeof(request)) / sizeof(uint32_t);
  if (num_pages > max_pages) {
    throw std::invalid_argument("NUM_PAGES is more than " +
                                std::to_string(max_pages));
  }

  // A few pages more than will be written, to see that they stay as they are.
  size_t room = num_pages + num_pages / 8 + 1;
  std::string place;
  AppConnectMessage connect = {};
  connect.num_mr = kBufferCount;
  for (size_t i = 0; i < kBufferCount; ++i) {
    place =
        AllocAndRegister(domain, bufs[i], room * page_size, FI_REMOTE_WRITE);
    // The server names a place in a region by its address or, if the provider
    // does without FI_MR_VIRT_ADDR, by its distance from the start.
    bool virt_addr = domain.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
    connect.mr[i] = {virt_addr ? reinterpret_cast<uint64_t>(bufs[i].data) : 0,
                     bufs[i].size, fi_mr_key(bufs[i].mr)};
  }
  printf("Registered %zu buffers %s\n", kBufferCount, place.c_str());
  session.Connect(server_addr, connect);

  // Where the pages go is as random as what is in them.
  std::mt19937_64 random{std::random_device{}()};
  std::vector<uint32_t> page_idx(room);
  for (size_t i = 0; i < room; ++i) page_idx[i] = static_cast<uint32_t>(i);
  std::shuffle(page_idx.begin(), page_idx.end(), random);
  page_idx.resize(num_pages);

  request.base.type = AppMessageType::kRandomFill;
  request.remote_context = static_cast<uint32_t>(random()) | 1;
  request.seed = random();
  request.page_size = page_size;
  request.num_pages = num_pages;
  bool filled = false;
  session.net.AddRemoteWrite(request.remote_context,
                             [&filled](const RdmaOp&) { filled = true; });
  session.Send(&request, sizeof(request), page_idx.data(),
               num_pages * sizeof(uint32_t));
  printf("Sent RandomFill request to server. page_size: %zu, num_pages: %zu\n",
         page_size, num_pages);
  session.WaitUntil("waiting for the pages", [&] {
    Message message;
    AppMessageBase progress;
    while (session.Take(message)) {
      ReadMessage(message, AppMessageType::kProgress, &progress,
                  sizeof(progress));
    }
    return filled;
  });
  for (const Buffer& buf : bufs) {
    if (buf.gpu >= 0) CudaFlushWrites(buf.gpu);
  }
  printf("Received RDMA WRITE to local memory.\n");
  session.SayBye();

  for (size_t i = 0; i < kBufferCount; ++i) {
    if (!CheckPages(bufs[i], request.seed + i, page_idx, page_size)) {
      throw std::runtime_error("the data in buffer " + std::to_string(i) +
                               " is not correct");
    }
  }
  printf("Data is correct.\n");
  return 0;
}

// ---------------------------------------------------------------------------
// Command line
// ---------------------------------------------------------------------------

int ListMain() {
  struct fi_info* list = GetInfo(kCaps);
  // An interface may appear several times, with different capabilities.
  std::set<std::string> seen;
  for (struct fi_info* info = list; info != nullptr; info = info->next) {
    std::string line = Describe(info);
    if (seen.insert(line).second) printf("%s\n", line.c_str());
  }
  fi_freeinfo(list);
  return 0;
}

void PrintUsage(FILE* file, const char* program) {
  fprintf(file,
          "Usage:\n"
          "  %s\n"
          "      Run the server.\n"
          "  %s ADDRESS [PAGE_SIZE NUM_PAGES]\n"
          "      Have it write pages into our memory (1048576 8).\n"
          "  %s --list\n"
          "      List the interfaces found, the one it uses first.\n"
          "  %s --help\n"
          "      Print this.\n"
          "ADDRESS is what the server prints. FI_PROVIDER chooses the "
          "provider.\n",
          program, program, program, program);
}

// Reads a number of at least 1. Throws std::invalid_argument.
size_t ParseNumber(const char* name, const std::string& text) {
  size_t number = 0;
  const char* end = text.data() + text.size();
  auto result = std::from_chars(text.data(), end, number);
  if (result.ec != std::errc() || result.ptr != end || number == 0) {
    throw std::invalid_argument(std::string(name) +
                                " is not a number of at least 1: \"" +
                                text.substr(0, 80) + "\"");
  }
  return number;
}

int main(int argc, char** argv) {
  const char* program = argv[0];
  std::vector<std::string> args(argv + 1, argv + argc);
  setvbuf(stdout, nullptr, _IOLBF, 0);  // whole lines, also into a pipe
  InstallSignalHandlers();
  try {
    if (args.empty()) return ServerMain(program);
    if (args[0] == "--help") {
      PrintUsage(stdout, program);
      return 0;
    }
    if (args[0] == "--list" && args.size() == 1) return ListMain();
    if (args.size() > 3) throw std::invalid_argument("too many arguments");
    if (args.size() == 2) throw std::invalid_argument("NUM_PAGES is missing");
    size_t page_size = 1048576;
    size_t num_pages = 8;
    if (args.size() > 2) {
      page_size = ParseNumber("PAGE_SIZE", args[1]);
      num_pages = ParseNumber("NUM_PAGES", args[2]);
    }
    if (page_size % sizeof(uint64_t) != 0 || page_size > kMaxPageSize) {
      throw std::invalid_argument("PAGE_SIZE is not a multiple of 8 up to " +
                                  std::to_string(kMaxPageSize));
    }
    if (num_pages > kSourceMemory / kBufferCount / page_size) {
      throw std::invalid_argument("that does not fit: at most " +
                                  std::to_string(kSourceMemory / kBufferCount) +
                                  " bytes");
    }
    return ClientMain(ParseAddress(args[0]), page_size, num_pages);
  } catch (const std::invalid_argument& e) {
    fprintf(stderr, "error: %s\n", e.what());
    PrintUsage(stderr, program);
    return 2;
  } catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
