// 8_malloc: memory of another machine, borrowed and given back.
//
// The server registers one large pool and lends pieces of it. A client asks for
// a piece by message, then WRITEs into it and READs it back, in which the
// server's program takes no part.

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
#include <cmath>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <new>
#include <optional>
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
constexpr size_t kCompletionQueueSize = 8192;

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

constexpr size_t kPoolSize = 256 << 20;       // bytes that the server lends
constexpr size_t kPieceAlign = 64;            // bytes: a line of the cache
constexpr size_t kMaxBlockSize = 1 << 20;     // bytes of a client's block
constexpr size_t kMaxBlocks = 10'000;         // of a client
constexpr size_t kClientPoolSize = 16 << 20;  // bytes
constexpr auto kAlivePeriod = 1s;  // between two messages that we are alive
constexpr double kMeasureSeconds = 0.25;  // for each of our measurements
constexpr auto kDrainLimit = 1s;          // that we wait for what is in flight

// Limit of the READs and WRITEs in flight. The client's pool limits their
// bytes.
constexpr size_t kMaxOutstanding = 4096;

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
  kRead,
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

// Where the data of a READ comes from, and where it goes.
struct RdmaReadOp {
  Buffer* buf = nullptr;
  size_t offset = 0;     // bytes from the start of buf
  size_t len = 0;        // bytes
  uint64_t src_ptr = 0;  // from the owner of the memory
  uint64_t src_key = 0;  // from the owner of the memory
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
  RdmaReadOp read = {};
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
      case RdmaOpType::kRead:
        return "READ";
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

  std::deque<RdmaOp> ops;           // as many as were ever in use at a time
  std::vector<RdmaOp*> free_ops;    // those of them that are not in use
  std::deque<RdmaOp*> pending_ops;  // those that libfabric had no room for
  uint64_t eagain_count = 0;        // how many times it had none (-FI_EAGAIN)
  // Callbacks for WRITEs from the other side, by their immediate data.
  std::unordered_map<uint32_t, RdmaCallback> remote_writes;

  Network() = default;
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;
  ~Network();

  void Open(Domain& open_domain);
  fi_addr_t AddPeerAddress(const Address& address);

  void PostRecv(Buffer& buf, const RdmaCallback& callback);
  void PostSend(fi_addr_t peer, Buffer& buf, size_t len,
                const RdmaCallback& callback);
  void PostWrite(fi_addr_t peer, const RdmaWriteOp& write,
                 const RdmaCallback& callback);
  void PostRead(fi_addr_t peer, const RdmaReadOp& read,
                const RdmaCallback& callback);
  void AddRemoteWrite(uint32_t imm_data, const RdmaCallback& callback);
  size_t PollCompletion();
  void WaitUntil(const char* what, const std::function<bool()>& done);

  void Post(RdmaOp request);
  void ProgressPendingOps();
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

// Returns the speed of the link in Gbps; 0 if it is not known. Only adapters
// have a NIC: the software providers leave it null.
double LinkGbps(const struct fi_info* info) {
  if (info->nic == nullptr || info->nic->link_attr == nullptr) return 0;
  return static_cast<double>(info->nic->link_attr->speed) * 1e-9;
}

std::string DescribeNic(const struct fi_info* info) {
  std::string text;
  if (info->nic != nullptr && info->nic->device_attr != nullptr &&
      info->nic->device_attr->name != nullptr) {
    text += ", nic: " + std::string(info->nic->device_attr->name);
  }
  if (LinkGbps(info) > 0) {
    text += ", link: " + std::to_string(std::lround(LinkGbps(info))) + "Gbps";
  }
  return text;
}

// Describes an interface in one line.
std::string Describe(const struct fi_info* info) {
  return "domain: " + std::string(info->domain_attr->name) +
         ", fabric: " + info->fabric_attr->name +
         ", provider: " + info->fabric_attr->prov_name + DescribeNic(info);
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

// Posts a RECV: the next message, from anybody, goes into `buf`.
void Network::PostRecv(Buffer& buf, const RdmaCallback& callback) {
  RdmaOp op = {.type = RdmaOpType::kRecv,
               .buf = &buf,
               .len = buf.size,
               .callback = callback};
  Post(std::move(op));
}

// Sends the first `len` bytes of `buf`, which must not change until the SEND
// has completed.
void Network::PostSend(fi_addr_t peer, Buffer& buf, size_t len,
                       const RdmaCallback& callback) {
  RdmaOp op = {.type = RdmaOpType::kSend,
               .peer = peer,
               .buf = &buf,
               .len = len,
               .callback = callback};
  Post(std::move(op));
}

// Posts a WRITE into memory of the peer, whose program takes no part in it.
void Network::PostWrite(fi_addr_t peer, const RdmaWriteOp& write,
                        const RdmaCallback& callback) {
  RdmaOp op = {.type = RdmaOpType::kWrite,
               .peer = peer,
               .buf = write.buf,
               .len = write.len,
               .write = write,
               .callback = callback};
  Post(std::move(op));
}

// Posts a READ from memory of the peer, whose program takes no part in it.
void Network::PostRead(fi_addr_t peer, const RdmaReadOp& read,
                       const RdmaCallback& callback) {
  RdmaOp op = {.type = RdmaOpType::kRead,
               .peer = peer,
               .buf = read.buf,
               .len = read.len,
               .read = read,
               .callback = callback};
  Post(std::move(op));
}

// Calls back once, when a WRITE with this immediate data has arrived here. Has
// to be called before the WRITE can arrive.
void Network::AddRemoteWrite(uint32_t imm_data, const RdmaCallback& callback) {
  remote_writes[imm_data] = callback;
}

// Hands an operation to libfabric, or keeps it until there is room. Once one
// has to wait, all later ones wait behind it, so that none overtakes another.
void Network::Post(RdmaOp request) {
  if (free_ops.empty()) free_ops.push_back(&ops.emplace_back());
  RdmaOp* op = free_ops.back();
  *op = std::move(request);
  free_ops.pop_back();
  if (pending_ops.empty() && Submit(op)) return;
  pending_ops.push_back(op);
}

// Hands over what has been waiting, as far as there is room.
void Network::ProgressPendingOps() {
  while (!pending_ops.empty() && Submit(pending_ops.front())) {
    pending_ops.pop_front();
  }
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
    case RdmaOpType::kRead: {
      const RdmaReadOp& read = op->read;
      iov.iov_base = read.buf->data + read.offset;
      struct fi_rma_iov from = {
          .addr = read.src_ptr, .len = read.len, .key = read.src_key};
      struct fi_msg_rma msg = {};
      msg.msg_iov = &iov;
      msg.desc = &desc;
      msg.iov_count = 1;
      msg.addr = op->peer;
      msg.rma_iov = &from;
      msg.rma_iov_count = 1;
      msg.context = op;
      // No level to ask for: a READ is complete when its data is here.
      ret = fi_readmsg(ep, &msg, 0);
      break;
    }
    case RdmaOpType::kRemoteWrite:
      break;  // never posted
  }
  if (ret == -FI_EAGAIN) {
    ++eagain_count;
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
  ProgressPendingOps();
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
  std::deque<RdmaOp> arrivals;  // completed RECVs

  void Open(Network& net) {
    for (Buffer& buf : bufs) {
      buf.Alloc(net.domain->MaxMessageSize());
      net.domain->RegisterMemory(buf, FI_RECV);
      PostRecv(net, buf);
    }
  }

  void PostRecv(Network& net, Buffer& buf) {
    auto arrived = [this](const RdmaOp& op) { arrivals.push_back(op); };
    net.PostRecv(buf, arrived);
  }

  // Takes out the next message. Returns false if there is none. Throws if the
  // next RECV has failed, because its message was too long, for example.
  bool Take(Network& net, Message& message) {
    if (arrivals.empty()) return false;
    RdmaOp recv = arrivals.front();
    arrivals.pop_front();
    if (recv.error.empty()) {
      message.assign(recv.buf->data, recv.buf->data + recv.len);
    }
    PostRecv(net, *recv.buf);
    recv.Check();
    return true;
  }
};

// Sends copies of messages, in order.
struct Outbox {
  std::list<Buffer> bufs;          // as many as we have ever needed at a time
  std::vector<Buffer*> idle_bufs;  // those of them that hold no message

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
    auto sent = [this](const RdmaOp& op) {
      op.Check();
      idle_bufs.push_back(op.buf);
    };
    net.PostSend(peer, *buf, len, sent);
  }

  bool AllSent() const { return idle_bufs.size() == bufs.size(); }
};

enum class AppMessageType : uint32_t {
  kConnect = 1,  // client: this is my address
  kAccept = 2,   // server: this is the address of the endpoint that serves you
  kBye = 3,      // client: I have everything that I wanted

  kMalloc = 4,  // client: lend me a piece
  kFree = 5,    // client: take this piece back
  kUsage = 6,   // client: how much have you lent me?
  kReply = 7,   // server: the answer to any of these
  kAlive = 8,   // client: I am still at it
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

  void SetAddress(const Address& address) {
    addr_size = static_cast<uint32_t>(address.size());
    memcpy(addr, address.data(), address.size());
  }

  Address GetAddress() const { return {addr, addr + addr_size}; }
};

// A request: MALLOC, FREE or USAGE.
struct AppPoolMessage {
  AppMessageBase base;
  uint64_t size;  // bytes; of a MALLOC
  uint64_t addr;  // of the piece to FREE
};

// The answer to a request. Client and server exchange keys by it: a piece says
// where it is, how large it is and with which key it can be used.
struct AppReplyMessage {
  AppMessageBase base;
  char error[108];        // why nothing was done; empty if all went well
  AppMemoryRegion piece;  // of a MALLOC
  uint64_t bytes_lent;    // to this client
};

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
      connect.addr_size > sizeof(connect.addr)) {
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
    if (done || !inbox.Take(net, message)) return false;
    done = TypeOf(message) == AppMessageType::kBye;
    return !done;
  }

  size_t Poll() { return net.PollCompletion(); }

  void WaitUntil(const char* what, const std::function<bool()>& is_done) {
    net.WaitUntil(what, is_done);
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
// Memory in pieces
// ---------------------------------------------------------------------------

// Divides a range of memory into pieces. Knows them by their offset in bytes,
// and never touches the memory, which may be that of a GPU. Each byte belongs
// to just one piece, lent or free, and no two free pieces are neighbours.
struct Allocator {
  std::map<size_t, size_t> lent;  // the sizes of pieces, by their offsets
  std::map<size_t, size_t> free;
  std::set<std::pair<size_t, size_t>> free_by_size;  // (size, offset)
  size_t bytes_lent = 0;

  explicit Allocator(size_t size) { AddFree(0, size); }

  // Lends the smallest free piece that is large enough, and keeps what remains
  // of it. Returns nothing if there is no such piece.
  std::optional<size_t> Alloc(size_t size) {
    size_t rounded = std::max<size_t>(size, 1);
    if (rounded > SIZE_MAX - kPieceAlign) return std::nullopt;
    rounded = (rounded + kPieceAlign - 1) / kPieceAlign * kPieceAlign;
    auto best = free_by_size.lower_bound({rounded, 0});
    if (best == free_by_size.end()) return std::nullopt;
    auto [free_size, offset] = *best;
    RemoveFree(offset, free_size);
    if (free_size > rounded) AddFree(offset + rounded, free_size - rounded);
    lent[offset] = rounded;
    bytes_lent += rounded;
    return offset;
  }

  // Takes a piece back, and joins it with its neighbours if they are free.
  // Returns its size; 0 if it is not lent.
  size_t Free(size_t offset) {
    auto piece = lent.find(offset);
    if (piece == lent.end()) return 0;
    size_t piece_size = piece->second;
    lent.erase(piece);
    bytes_lent -= piece_size;
    size_t size = piece_size;
    auto next = free.lower_bound(offset);
    if (next != free.begin()) {
      auto [before, before_size] = *std::prev(next);
      if (before + before_size == offset) {
        RemoveFree(before, before_size);
        offset = before;
        size += before_size;
      }
    }
    if (next != free.end() && next->first == offset + size) {
      auto [after, after_size] = *next;
      RemoveFree(after, after_size);
      size += after_size;
    }
    AddFree(offset, size);
    return piece_size;
  }

  void AddFree(size_t offset, size_t size) {
    free[offset] = size;
    free_by_size.insert({size, offset});
  }

  void RemoveFree(size_t offset, size_t size) {
    free.erase(offset);
    free_by_size.erase({size, offset});
  }
};

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

// Memory that is registered once and lent in pieces.
struct Pool {
  Buffer buf;
  Allocator allocator;
  uint64_t base = 0;  // what others have to add to an offset

  Pool(Domain& domain, size_t size) : allocator(size) {
    std::string place =
        AllocAndRegister(domain, buf, size, FI_REMOTE_READ | FI_REMOTE_WRITE);
    printf("Registered a pool of %zu bytes %s\n", size, place.c_str());
    // A place in a region is named by its address or, if the provider does
    // without FI_MR_VIRT_ADDR, by its distance from the start.
    if (domain.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) {
      base = reinterpret_cast<uint64_t>(buf.data);
    }
  }

  // Describes in one line what is lent.
  std::string Usage() const {
    return "the pool lends " + std::to_string(allocator.bytes_lent) +
           " bytes in " + std::to_string(allocator.lent.size()) +
           " pieces, and has " +
           std::to_string(buf.size - allocator.bytes_lent) + " free in " +
           std::to_string(allocator.free.size());
  }
};

// The pieces that a client has. The pool gets them back in the end. Declare it
// before the session: then no WRITE to that session can arrive any more.
struct Loan {
  Pool& pool;
  std::set<size_t> pieces;  // their offsets
  size_t bytes = 0;

  explicit Loan(Pool& from) : pool(from) {}
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;
  ~Loan() {
    for (size_t offset : pieces) pool.allocator.Free(offset);
  }
};

// A client, and the pieces that it has borrowed.
struct MallocRequestState {
  Loan loan;
  Session session;
  size_t number;  // of the client; begins each line about it
  size_t reported_bytes = 0;
  Clock::time_point reported_at;

  // Opens the session. Throws if that fails.
  MallocRequestState(Domain& domain, size_t client_number,
                     const AppConnectMessage& connect, Pool& pool)
      : loan(pool), number(client_number) {
    session.Open(domain);
    session.Accept(connect, {});
    PrintLine(
        stdout, number,
        "Received CONNECT message from client " + ToHex(connect.GetAddress()));
    reported_at = Clock::now();
  }

  // Does what can be done for the client now. Returns the number of
  // completions. Throws if the client has sent something wrong, or nothing for
  // too long.
  size_t Poll() {
    size_t completions = session.Poll();
    Message message;
    // One request at a time, so that no answers pile up if a client does not
    // take them.
    while (session.outbox.AllSent() && session.Take(message)) {
      HandleRequest(message);
    }
    if (session.done) return completions;
    PrintProgress();
    session.net.CheckSilence("waiting for the client");
    return completions;
  }

  // Returns whether there is more to do right away, even if nothing completes.
  // The client's READs and WRITEs complete nothing here, but many providers do
  // their part of the work only while we poll.
  bool Busy() const { return true; }

  void HandleRequest(const Message& message) {
    AppMessageType type = TypeOf(message);
    if (type == AppMessageType::kAlive) return;
    AppPoolMessage request;
    ReadMessage(message, type, &request, sizeof(request));
    AppReplyMessage reply = {};
    reply.base.type = AppMessageType::kReply;
    std::string error;
    switch (type) {
      case AppMessageType::kMalloc:
        error = Malloc(request.size, reply);
        break;
      case AppMessageType::kFree:
        error = Free(request.addr);
        break;
      case AppMessageType::kUsage:
        break;
      default:
        throw BadMessage("its type is no request");
    }
    snprintf(reply.error, sizeof(reply.error), "%s", error.c_str());
    reply.bytes_lent = loan.bytes;
    session.Send(&reply, sizeof(reply));
  }

  // Lends a piece. Returns what is wrong, or nothing.
  std::string Malloc(uint64_t size, AppReplyMessage& reply) {
    if (size == 0) return "a piece of 0 bytes";
    if (size > kPoolSize) return "a piece larger than the pool";
    if (loan.pieces.size() >= kMaxBlocks) return "you have too many pieces";
    std::optional<size_t> offset = loan.pool.allocator.Alloc(size);
    if (!offset) return "the pool has no piece of this size left";
    loan.pieces.insert(*offset);
    loan.bytes += loan.pool.allocator.lent[*offset];
    reply.piece = {loan.pool.base + *offset, size, fi_mr_key(loan.pool.buf.mr)};
    return "";
  }

  // Takes a piece back. Returns what is wrong, or nothing.
  std::string Free(uint64_t addr) {
    if (loan.pieces.erase(addr - loan.pool.base) == 0) {
      return "this piece is not lent to you";
    }
    loan.bytes -= loan.pool.allocator.Free(addr - loan.pool.base);
    return "";
  }

  void PrintProgress() {
    Clock::time_point now = Clock::now();
    if (now - reported_at < kReportPeriod || loan.bytes == reported_bytes) {
      return;
    }
    reported_at = now;
    reported_bytes = loan.bytes;
    PrintLine(stdout, number,
              "has " + std::to_string(loan.bytes) + " bytes in " +
                  std::to_string(loan.pieces.size()) + " pieces",
              true);
  }
};

int ServerMain(const char* program) {
  Domain domain;
  domain.Open(GetInfoWithGpu());
  Pool pool(domain, kPoolSize);
  Inbox inbox;
  Network net;
  net.Open(domain);
  inbox.Open(net);
  std::list<MallocRequestState> clients;
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
      try {
        completions += net.PollCompletion();
        Message message;
        while (waiting.size() < kMaxWaiting && inbox.Take(net, message)) {
          waiting.push_back(ReadConnect(message, AppMessageType::kConnect));
        }
        // One at a time: opening an endpoint takes some providers 50 ms.
        if (clients.size() < kMaxClients && !waiting.empty()) {
          AppConnectMessage connect = waiting.front();
          waiting.pop_front();
          clients.emplace_back(domain, num_clients + 1, connect, pool);
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
      size_t number = client->number;
      clients.erase(client);
      PrintLine(stdout, number, pool.Usage());
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

// Fills a block with words that depend on its seed and on their place in it.
void Fill(uint8_t* data, size_t size, uint64_t seed) {
  for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
    uint64_t word = (seed + i) * 0x9e3779b97f4a7c15;
    memcpy(data + i, &word, std::min(sizeof(word), size - i));
  }
}

// What the client does with the server's memory.
struct MallocClient {
  // Our own pool: whatever we WRITE or READ has its place here, and needs no
  // registration of its own.
  Buffer buf;
  Allocator allocator{kClientPoolSize};
  Session session;
  size_t outstanding = 0;  // READs and WRITEs in flight
  Clock::time_point alive_at;

  void Open(Domain& domain) {
    session.Open(domain);
    buf.Alloc(kClientPoolSize);
    domain.RegisterMemory(buf, FI_READ | FI_WRITE);
  }

  // Waits until `done` returns true. Tells the server now and then that we are
  // alive: it sees nothing of our READs and WRITEs.
  void WaitUntil(const char* what, const std::function<bool()>& done) {
    try {
      session.WaitUntil(what, [&] {
        if (done()) return true;
        Clock::time_point now = Clock::now();
        if (now - alive_at > kAlivePeriod && session.outbox.AllSent()) {
          alive_at = now;
          AppMessageBase alive = {AppMessageType::kAlive};
          session.Send(&alive, sizeof(alive));
        }
        return false;
      });
    } catch (...) {
      Drain();
      throw;
    }
  }

  // Waits for what is in flight, but not for long. The tcp provider of
  // libfabric 1.17 crashes if its endpoint is closed while READs are in flight.
  void Drain() {
    Clock::time_point end = Clock::now() + kDrainLimit;
    while (outstanding > 0 && Clock::now() < end) {
      try {
        session.Poll();
      } catch (const std::exception&) {
        // The error that has brought us here is the one to report.
      }
    }
  }

  // Sends a request and waits for the answer. Throws if the server refuses.
  AppReplyMessage Ask(AppPoolMessage request) {
    session.Send(&request, sizeof(request));
    Message message;
    WaitUntil("waiting for an answer", [&] { return session.Take(message); });
    AppReplyMessage reply;
    ReadMessage(message, AppMessageType::kReply, &reply, sizeof(reply));
    reply.error[sizeof(reply.error) - 1] = 0;
    if (reply.error[0] != 0) {
      session.SayBye();
      throw std::runtime_error("the server refuses: " +
                               std::string(reply.error));
    }
    return reply;
  }

  // Borrows memory of the server. What we get can be used with Write and Read.
  AppMemoryRegion RemoteMalloc(size_t size) {
    AppMemoryRegion piece = Ask({{AppMessageType::kMalloc}, size, 0}).piece;
    if (piece.size != size) throw BadMessage("a piece of another size");
    return piece;
  }

  void RemoteFree(const AppMemoryRegion& piece) {
    Ask({{AppMessageType::kFree}, 0, piece.addr});
  }

  // Takes memory from our own pool, for a READ or a WRITE. If there is none
  // left, waits until others have completed. Returns its offset.
  size_t LocalMalloc(size_t size) {
    std::optional<size_t> offset;
    WaitUntil("waiting for READs and WRITEs", [&] {
      if (outstanding < kMaxOutstanding && session.net.pending_ops.empty()) {
        offset = allocator.Alloc(size);
        if (!offset && outstanding == 0) {
          throw std::runtime_error("our own pool has no piece of " +
                                   std::to_string(size) + " bytes left");
        }
      }
      return offset.has_value();
    });
    return *offset;
  }

  // Returns a callback that counts an operation as completed, then calls `then`
  // if there is one.
  RdmaCallback Completed(const std::function<void()>& then) {
    RdmaCallback count = [this](const RdmaOp& op) {
      --outstanding;
      op.Check();
    };
    if (!then) return count;
    return [count, then](const RdmaOp& op) {
      count(op);
      then();
    };
  }

  // WRITEs `size` bytes at an offset of a buffer into a piece, and calls back
  // when they are there.
  void Write(const AppMemoryRegion& piece, Buffer& from, size_t offset,
             size_t size, const std::function<void()>& written = nullptr) {
    if (size > piece.size) throw std::runtime_error("a WRITE beyond a piece");
    RdmaWriteOp write = {.buf = &from,
                         .offset = offset,
                         .len = size,
                         .dest_ptr = piece.addr,
                         .dest_key = piece.rkey};
    ++outstanding;
    session.net.PostWrite(session.peer, write, Completed(written));
  }

  // READs a piece to an offset in our pool, and calls back when it is there.
  void Read(const AppMemoryRegion& piece, size_t offset, size_t size,
            const std::function<void()>& arrived = nullptr) {
    if (size > piece.size) throw std::runtime_error("a READ beyond a piece");
    RdmaReadOp read = {.buf = &buf,
                       .offset = offset,
                       .len = size,
                       .src_ptr = piece.addr,
                       .src_key = piece.rkey};
    ++outstanding;
    session.net.PostRead(session.peer, read, Completed(arrived));
  }

  void WaitForAll() {
    WaitUntil("waiting for READs and WRITEs",
              [this] { return outstanding == 0; });
  }
};

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void PrintRate(const char* what, size_t bytes, double seconds) {
  printf("%s %.3f MB: %.3f s, %.3f Gbps\n", what,
         1e-6 * static_cast<double>(bytes), seconds,
         8e-9 * static_cast<double>(bytes) / seconds);
}

// Borrows pieces of random sizes, fills them, reads them back, compares, and
// gives them back in another order.
void UseBlocks(MallocClient& client, size_t num_blocks) {
  std::mt19937_64 random{std::random_device{}()};
  std::vector<AppMemoryRegion> pieces;
  size_t total = 0;
  Clock::time_point start = Clock::now();
  for (size_t i = 0; i < num_blocks; ++i) {
    pieces.push_back(client.RemoteMalloc(1 + random() % kMaxBlockSize));
    total += pieces.back().size;
  }
  printf("Borrowed %zu pieces, %.3f MB: %.3f s\n", num_blocks,
         1e-6 * static_cast<double>(total), SecondsSince(start));

  uint64_t seed = random();
  start = Clock::now();
  for (size_t i = 0; i < num_blocks; ++i) {
    size_t size = pieces[i].size;
    size_t offset = client.LocalMalloc(size);
    Fill(client.buf.data + offset, size, seed + i);
    client.Write(pieces[i], client.buf, offset, size,
                 [&client, offset] { client.allocator.Free(offset); });
  }
  client.WaitForAll();
  PrintRate("Filled them by WRITE,", total, SecondsSince(start));

  // All WRITEs have completed, so a READ finds what they have written.
  size_t wrong = 0;
  std::vector<uint8_t> expected(kMaxBlockSize);
  start = Clock::now();
  for (size_t i = 0; i < num_blocks; ++i) {
    size_t size = pieces[i].size;
    size_t offset = client.LocalMalloc(size);
    memset(client.buf.data + offset, 0, size);
    client.Read(pieces[i], offset, size, [&, i, size, offset] {
      Fill(expected.data(), size, seed + i);
      wrong += memcmp(client.buf.data + offset, expected.data(), size) != 0;
      client.allocator.Free(offset);
    });
  }
  client.WaitForAll();
  PrintRate("READ and compared", total, SecondsSince(start));
  if (wrong > 0) {
    throw std::runtime_error("the data of " + std::to_string(wrong) +
                             " pieces is not correct");
  }

  std::shuffle(pieces.begin(), pieces.end(), random);
  start = Clock::now();
  for (const AppMemoryRegion& piece : pieces) client.RemoteFree(piece);
  printf("Gave them back: %.3f s\n", SecondsSince(start));
}

// Measurements of one kind. An object of ours like any other, except that it is
// born in registered memory and can travel as it is.
struct Samples {
  uint64_t count = 0;
  double us[1000] = {};

  void Add(Clock::time_point start) { us[count++] = 1e6 * SecondsSince(start); }

  bool Full() const { return count == std::size(us); }

  // The time that `percent` of the samples do not exceed. To be called once
  // they are sorted.
  double Percentile(size_t percent) const {
    return us[(count - 1) * percent / 100];
  }
};

// Compares what the chapter compares.
void Measure(MallocClient& client, Domain& domain, Buffer& buf) {
  constexpr size_t kSize = 64;
  AppMemoryRegion piece = client.RemoteMalloc(kMaxBlockSize);
  size_t offset = client.LocalMalloc(kMaxBlockSize);

  // An object in our pool. It fills itself while we measure, then it is sorted
  // where it is, travels, and comes back to another place.
  size_t born_at = client.LocalMalloc(sizeof(Samples));
  auto* samples = new (client.buf.data + born_at) Samples;
  Clock::time_point begin = Clock::now();
  while (!samples->Full() && SecondsSince(begin) < kMeasureSeconds) {
    Clock::time_point start = Clock::now();
    client.Read(piece, offset, kSize);
    client.WaitForAll();
    samples->Add(start);
  }
  std::sort(samples->us, samples->us + samples->count);
  AppMemoryRegion remote = client.RemoteMalloc(sizeof(Samples));
  client.Write(remote, client.buf, born_at, sizeof(Samples));
  client.WaitForAll();
  size_t back_at = client.LocalMalloc(sizeof(Samples));
  client.Read(remote, back_at, sizeof(Samples));
  client.WaitForAll();
  auto* back = reinterpret_cast<Samples*>(client.buf.data + back_at);
  if (memcmp(samples, back, sizeof(Samples)) != 0) {
    throw std::runtime_error("the object came back changed");
  }
  Samples messages;
  begin = Clock::now();
  while (!messages.Full() && SecondsSince(begin) < kMeasureSeconds) {
    Clock::time_point start = Clock::now();
    client.Ask({{AppMessageType::kUsage}, 0, 0});
    messages.Add(start);
  }
  std::sort(messages.us, messages.us + messages.count);
  printf("READ of %zu bytes: median %.2f us, 99th percentile %.2f us\n", kSize,
         back->Percentile(50), back->Percentile(99));
  printf("Message there and back: median %.2f us, 99th percentile %.2f us\n",
         messages.Percentile(50), messages.Percentile(99));

  constexpr size_t kMaxReads = 2'000;
  double reads_per_s[2] = {};
  size_t in_flight[2] = {1, 64};
  for (size_t i = 0; i < 2; ++i) {
    size_t n = 0;
    Clock::time_point start = Clock::now();
    for (; n < kMaxReads && SecondsSince(start) < kMeasureSeconds; ++n) {
      client.WaitUntil("waiting for READs", [&client, limit = in_flight[i]] {
        return client.outstanding < limit;
      });
      client.Read(piece, offset + n % 64 * kSize, kSize);
    }
    client.WaitForAll();
    reads_per_s[i] = static_cast<double>(n) / SecondsSince(start);
  }
  printf("READs in a millisecond: %.1f with 1 in flight, %.1f with 64\n",
         1e-3 * reads_per_s[0], 1e-3 * reads_per_s[1]);

  // What registering costs if it is done for each transfer.
  constexpr size_t kMaxTransfers = 200;
  constexpr size_t kTransferSize = 64 * 1024;
  buf.Alloc(kTransferSize);
  double us[3] = {};
  for (size_t i = 0; i < 3; ++i) {
    size_t n = 0;
    Clock::time_point start = Clock::now();
    for (; n < kMaxTransfers && SecondsSince(start) < kMeasureSeconds; ++n) {
      if (i > 0) domain.RegisterMemory(buf, FI_WRITE);
      if (i > 1) client.Ask({{AppMessageType::kUsage}, 0, 0});
      client.Write(piece, i > 0 ? buf : client.buf, i > 0 ? 0 : offset,
                   kTransferSize);
      client.WaitForAll();
      if (i > 0) Close(&buf.mr->fid, "memory region");
      buf.mr = nullptr;
    }
    us[i] = 1e6 * SecondsSince(start) / static_cast<double>(n);
  }
  printf(
      "WRITE of %zu bytes: %.1f us from the pool, %.1f us registered each "
      "time, "
      "%.1f us with an exchange of keys each time\n",
      kTransferSize, us[0], us[1], us[2]);

  client.RemoteFree(remote);
  client.RemoteFree(piece);
  for (size_t at : {offset, born_at, back_at}) client.allocator.Free(at);
}

int ClientMain(const Address& server_addr, size_t num_blocks) {
  Domain domain;
  Buffer buf;  // for Measure; its WRITEs may be in flight until `client` goes
  MallocClient client;
  // Our own pool is in host memory, but the server's may be on a GPU.
  domain.Open(GetInfoWithGpu());
  client.Open(domain);
  printf("%s\n", Describe(domain.info).c_str());
  client.session.Connect(server_addr, {});

  UseBlocks(client, num_blocks);
  Measure(client, domain, buf);
  AppReplyMessage usage = client.Ask({{AppMessageType::kUsage}, 0, 0});
  if (usage.bytes_lent != 0) {
    throw std::runtime_error("the server still lends us " +
                             std::to_string(usage.bytes_lent) + " bytes");
  }
  printf("The server lends us nothing any more.\n");
  client.session.SayBye();
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
          "  %s ADDRESS [BLOCKS]\n"
          "      Borrow BLOCKS pieces of its memory, use them and give them\n"
          "      back (64).\n"
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
    if (args.size() > 2) throw std::invalid_argument("too many arguments");
    size_t num_blocks = args.size() > 1 ? ParseNumber("BLOCKS", args[1]) : 64;
    if (num_blocks > kMaxBlocks) {
      throw std::invalid_argument("BLOCKS is more than " +
                                  std::to_string(kMaxBlocks));
    }
    return ClientMain(ParseAddress(args[0]), num_blocks);
  } catch (const std::invalid_argument& e) {
    fprintf(stderr, "error: %s\n", e.what());
    PrintUsage(stderr, program);
    return 2;
  } catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
