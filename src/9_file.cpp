// 9_file: a file, as fast as the receiver can take it.
//
// The receiver lends slots of its memory and says when each of them is free
// again, which is a credit. The sender WRITEs a chunk of the file into a slot
// only if it has the credit for it. Immediate data says which chunk has come.

#include <fcntl.h>
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
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

// Has all of the checksums in the header, so there is no library to link.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <chrono>
#include <cmath>
#include <deque>
#include <filesystem>
#include <functional>
#include <future>
#include <list>
#include <new>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
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

constexpr size_t kChunkSize = 1 << 20;    // bytes of the file in a WRITE
constexpr size_t kDefaultSlots = 8;       // that a client asks for
constexpr size_t kMaxSlots = 64;          // that a client gets
constexpr uint64_t kMaxChunks = 1 << 30;  // of a file; so 1 PiB
constexpr size_t kMaxNameSize = 250;      // bytes; with ".part" 255
constexpr auto kAlivePeriod = 1s;  // between two messages that we are alive
constexpr auto kGiveUpLimit = 1s;  // for telling the server that we give up

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

  kPut = 4,     // client: take this file
  kReady = 5,   // server: these slots are yours, and all of them are free
  kChunk = 6,   // client: these chunks are in your slots
  kCredit = 7,  // server: these slots are free again
  kEnd = 8,     // client: that was all; does the checksum agree?
  kSaved = 9,   // server: the file is safe on disk
  kError = 10,  // either side: I give up, for this reason
  kAlive = 11,  // either side: my disk is at work
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

// PUT: a client wants to send a file.
struct AppPutMessage {
  AppMessageBase base;
  uint32_t num_slots;  // that it would like to have
  uint64_t file_size;  // bytes
  char name[256];      // ends with a zero byte
};

// READY: the slots that the client gets. Chunk i of the file goes to slot
// i % num_slots, each time that this slot is free.
struct AppReadyMessage {
  AppMessageBase base;
  uint32_t num_slots;
  uint64_t chunk_size;    // bytes of a chunk, and of a slot
  AppMemoryRegion slots;  // one after the other
};

// END: the sum of the checksums of all chunks.
struct AppEndMessage {
  AppMessageBase base;
  uint64_t checksum;
};

struct AppErrorMessage {
  AppMessageBase base;
  char text[252];  // ends with a zero byte
};

// Numbers travel as they are in memory, so both sides need the same byte order.
static_assert(std::endian::native == std::endian::little,
              "the numbers in messages are little-endian");

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

// Reads a CHUNK or a CREDIT: numbers of chunks or of slots, a uint32_t each.
std::vector<uint32_t> ReadNumbers(const Message& message, AppMessageType type) {
  AppMessageBase base;
  ReadMessage(message, type, &base, sizeof(base));
  size_t size = message.size() - sizeof(base);
  if (size % sizeof(uint32_t) != 0) throw BadMessage("half a number");
  std::vector<uint32_t> numbers(size / sizeof(uint32_t));
  if (size > 0) memcpy(numbers.data(), message.data() + sizeof(base), size);
  return numbers;
}

// Returns whether a text contains control characters, which a terminal would
// obey: those of ASCII, and U+0080 to U+009F in UTF-8.
bool HasControl(const std::string& text) {
  unsigned char before = 0;
  for (unsigned char c : text) {
    if (iscntrl(c) || (before == 0xc2 && c < 0xa0)) return true;
    before = c;
  }
  return false;
}

// Reads an ERROR. Returns its text, or a stand-in for control characters.
std::string ReadReason(const Message& message) {
  AppErrorMessage error;
  ReadMessage(message, AppMessageType::kError, &error, sizeof(error));
  std::string text(error.text, strnlen(error.text, sizeof(error.text)));
  return HasControl(text) ? "(an unreadable reason)" : text;
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
// Files
// ---------------------------------------------------------------------------

// Returns an error about a system call that has just failed.
std::system_error SystemError(const std::string& what) {
  return std::system_error(errno, std::generic_category(), what);
}

// Returns what is wrong with the name of a file, or an empty text. A name must
// not lead out of the directory, nor contain what a terminal would obey.
std::string CheckName(const std::string& name) {
  if (name.empty()) return "the name is empty";
  if (name.size() > kMaxNameSize) {
    return "the name is longer than " + std::to_string(kMaxNameSize) + " bytes";
  }
  if (name == "." || name == "..") return "the name is that of a directory";
  if (name.find('/') != std::string::npos) return "the name contains a /";
  if (HasControl(name)) return "the name contains a control character";
  return "";
}

// A file that is being sent.
struct SourceFile {
  int fd = -1;
  struct stat status = {};  // at the beginning

  SourceFile() = default;
  SourceFile(const SourceFile&) = delete;
  SourceFile& operator=(const SourceFile&) = delete;
  ~SourceFile() {
    if (fd >= 0) close(fd);
  }

  void Open(const std::string& path) {
    // O_NONBLOCK, because opening a named pipe would wait for its other end.
    fd = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &status) != 0) {
      throw SystemError("cannot open " + path);
    }
    if (!S_ISREG(status.st_mode)) {
      throw std::runtime_error(path + " is not a regular file");
    }
  }

  uint64_t Size() const { return static_cast<uint64_t>(status.st_size); }

  void Read(uint8_t* data, size_t size, uint64_t offset) const {
    while (size > 0) {
      ssize_t ret = pread(fd, data, size, static_cast<off_t>(offset));
      if (ret < 0) throw SystemError("cannot read the file");
      if (ret == 0) throw std::runtime_error("the file has become shorter");
      data += ret;
      size -= static_cast<size_t>(ret);
      offset += static_cast<size_t>(ret);
    }
  }

  // Throws if the file is not what it was when we opened it.
  void CheckUnchanged() const {
    struct stat now = {};
    if (fstat(fd, &now) != 0) throw SystemError("fstat");
    if (now.st_size != status.st_size ||
        now.st_mtim.tv_sec != status.st_mtim.tv_sec ||
        now.st_mtim.tv_nsec != status.st_mtim.tv_nsec) {
      throw std::runtime_error("the file has changed while it was being sent");
    }
    // Some files report a size of 0 but contain data, such as those in /proc.
    char byte = 0;
    if (pread(fd, &byte, 1, status.st_size) > 0) {
      throw std::runtime_error("the file is longer than it says");
    }
  }
};

// A file that is being received. It is called NAME.part until it is complete.
// The destructor removes it, unless `keep` is set.
struct TargetFile {
  int dir = -1;
  int fd = -1;
  std::string name;
  std::string path;  // what the file is called now; empty: there is none
  bool keep = false;

  TargetFile() = default;
  TargetFile(const TargetFile&) = delete;
  TargetFile& operator=(const TargetFile&) = delete;
  ~TargetFile() {
    if (!path.empty() && !keep) unlinkat(dir, path.c_str(), 0);
    if (fd >= 0) close(fd);
    if (dir >= 0) close(dir);
  }

  // Creates the file in the directory in which we were started. Never touches
  // a file that exists, nor what a symbolic link points to.
  void Create(const std::string& file_name) {
    name = file_name;
    std::string part = name + ".part";
    dir = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0) throw SystemError("cannot open the directory");
    if (faccessat(dir, name.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0) {
      throw std::runtime_error(name + " exists already");
    }
    fd = openat(dir, part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                0666);
    if (fd < 0 && errno == EEXIST) {
      throw std::runtime_error(part +
                               " exists already; if nobody is sending this "
                               "file, a transfer has left it: remove it");
    }
    if (fd < 0) throw SystemError("cannot create " + part);
    path = part;
  }

  void Write(const uint8_t* data, size_t size, uint64_t offset) const {
    while (size > 0) {
      ssize_t ret = pwrite(fd, data, size, static_cast<off_t>(offset));
      if (ret < 0) throw SystemError("cannot write " + path);
      data += ret;
      size -= static_cast<size_t>(ret);
      offset += static_cast<size_t>(ret);
    }
  }

  // Gives the complete file its name. Returns when the file and its name are on
  // disk. Makes a second name and removes the first, because rename(2) would
  // replace a file that somebody has created in the meantime.
  void Finish() {
    if (fsync(fd) != 0) throw SystemError("cannot sync " + path);
    if (linkat(dir, path.c_str(), dir, name.c_str(), 0) != 0) {
      throw SystemError("cannot rename " + path + " to " + name);
    }
    std::string part = std::exchange(path, name);
    if (unlinkat(dir, part.c_str(), 0) != 0) {
      throw SystemError("cannot remove " + part);
    }
    if (fsync(dir) != 0) throw SystemError("cannot sync the directory");
  }
};

// Work for the disk. Another thread does it, because it may take long.
// Destroying a Task waits for the end of that thread, so declare it after
// everything that the thread uses.
using Task = std::future<void>;

// Starts a thread for some work.
Task Start(const std::function<void()>& work) {
  try {
    return std::async(std::launch::async, work);
  } catch (const std::system_error& e) {
    throw std::runtime_error(std::string("cannot start a thread: ") + e.what());
  }
}

// Returns whether a task has been started and has ended. Its get() then throws
// the exception that has ended it, if there was one.
bool Ended(const Task& task) {
  return task.valid() && task.wait_for(0s) == std::future_status::ready;
}

bool Running(const Task& task) { return task.valid() && !Ended(task); }

// Makes the disk of the receiver slow, to show what credits do, and for tests.
void SlowDown() {
  if (const char* ms = getenv("SLOW_DISK_MS")) {
    std::this_thread::sleep_for(std::chrono::milliseconds(atoi(ms)));
  }
}

// ---------------------------------------------------------------------------
// Chunks and slots
// ---------------------------------------------------------------------------

// Returns the checksum of a chunk. It depends on the number of the chunk, so
// the sum for a file depends on the order of its chunks, but not on the order
// in which they are added.
uint64_t Checksum(uint64_t chunk, const uint8_t* data, size_t size) {
  return XXH3_64bits_withSeed(data, size, chunk);
}

// Returns how many bytes of a file are in a chunk: all but the last are full.
size_t BytesOf(uint64_t chunk, uint64_t chunk_size, uint64_t file_size) {
  return static_cast<size_t>(
      std::min(chunk_size, file_size - chunk * chunk_size));
}

// Returns how many chunks a file has.
uint64_t CountChunks(uint64_t file_size, uint64_t chunk_size) {
  return file_size / chunk_size + (file_size % chunk_size > 0);
}

// To be called while our disk works. Tells the other side now and then that we
// are alive, and does not take its silence for an end: it waits for us.
void WaitForDisk(Session& session, Clock::time_point& alive_at) {
  Clock::time_point now = Clock::now();
  session.net.last_completion = now;
  if (now - alive_at < kAlivePeriod || !session.outbox.AllSent()) return;
  alive_at = now;
  AppMessageBase alive = {AppMessageType::kAlive};
  session.Send(&alive, sizeof(alive));
}

// Tells the other side why we give up.
void SendError(Session& session, const std::string& text) {
  AppErrorMessage error = {{AppMessageType::kError}, ""};
  snprintf(error.text, sizeof(error.text), "%s", text.c_str());
  session.Send(&error, sizeof(error));
}

// Sends the numbers of chunks or of slots, and clears them. While an earlier
// message is on its way, they wait, and others join them. So however many there
// are, they don't use up the other side's RECVs.
void SendNumbers(Session& session, AppMessageType type,
                 std::vector<uint32_t>& numbers) {
  if (numbers.empty() || !session.outbox.AllSent()) return;
  AppMessageBase base = {type};
  session.Send(&base, sizeof(base), numbers.data(),
               numbers.size() * sizeof(uint32_t));
  numbers.clear();
}

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Describes a transfer in words.
std::string DescribeRate(uint64_t bytes, double seconds) {
  char text[100];
  snprintf(text, sizeof(text), "%.3f MB in %.3f s, %.3f Gbps",
           1e-6 * static_cast<double>(bytes), seconds,
           8e-9 * static_cast<double>(bytes) / seconds);
  return text;
}

// ---------------------------------------------------------------------------
// Server
// ---------------------------------------------------------------------------

// Prints which interface the server uses, and how to reach it.
void PrintClientCommand(const char* program, const Network& net) {
  printf("%s\n", Describe(net.domain->info).c_str());
  printf("Run the client with the following command:\n  %s%s %s FILE\n",
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

// A client, and the file that it wants to put here.
struct PutRequestState {
  enum class State {
    kWaitPut,
    kReceive,
    kFinish,
    kSaved,
    kGivenUp,  // after an error, until the client says ERROR or BYE
  };

  // A piece of our memory, lent to the client for one WRITE. When the chunk has
  // been written to the file, the slot is lent again.
  struct Slot {
    uint64_t chunk = 0;  // in the slot, or the next to arrive
    uint64_t checksum = 0;
    Task save;
  };

  Buffer buf;  // all slots, one after the other
  Session session;
  size_t number;  // of the client; begins each line about it
  State state = State::kWaitPut;
  TargetFile file;
  uint64_t file_size = 0;   // bytes
  uint64_t chunk_size = 0;  // bytes
  uint64_t num_chunks = 0;
  uint64_t saved_chunks = 0;
  uint64_t checksum = 0;             // of the saved chunks
  std::optional<AppEndMessage> end;  // once the client has sent it
  std::vector<uint32_t> credits;     // slots to report as free
  std::vector<Slot> slots;
  Task finish;
  Clock::time_point started_at;
  Clock::time_point alive_at;

  // Opens the session. Throws if that fails.
  PutRequestState(Domain& domain, size_t client_number,
                  const AppConnectMessage& connect)
      : number(client_number) {
    session.Open(domain);
    session.Accept(connect, {});
    PrintLine(
        stdout, number,
        "Received CONNECT message from client " + ToHex(connect.GetAddress()));
    alive_at = Clock::now();
  }

  // Does what can be done for the client now. Returns the number of
  // completions. Throws if the client has gone.
  size_t Poll() {
    size_t completions = session.Poll();
    Message message;
    while (session.Take(message)) {
      Try([&] { HandleMessage(message); });
    }
    if (session.done && state != State::kSaved && state != State::kGivenUp) {
      throw std::runtime_error("the client has left before its file was saved");
    }
    if (session.done) return completions;
    Try([this] {
      if (state == State::kGivenUp) return;
      ContinueSave();
      ContinueFinish();
      SendNumbers(session, AppMessageType::kCredit, credits);
      if (DiskBusy()) WaitForDisk(session, alive_at);
    });
    session.net.CheckSilence("waiting for the client");
    return completions;
  }

  // Returns whether there is more to do right away, even if nothing completes.
  // Many providers take the client's WRITEs only while we poll.
  bool Busy() const { return state == State::kReceive; }

  // Returns whether other threads still use what we own.
  bool DiskBusy() const {
    return Running(finish) ||
           std::any_of(slots.begin(), slots.end(),
                       [](const Slot& slot) { return Running(slot.save); });
  }

  // Does some work for the client. If it fails, gives up and tells the client
  // why. The client should then give up, too.
  void Try(const std::function<void()>& work) {
    try {
      work();
    } catch (const std::exception& e) {
      SendError(session, e.what());  // throws if the client has gone
      GiveUp(e.what());
    }
  }

  void GiveUp(const std::string& reason) {
    PrintLine(stderr, number, "error: " + reason);
    state = State::kGivenUp;
  }

  void HandleMessage(const Message& message) {
    AppMessageType type = TypeOf(message);
    if (type == AppMessageType::kError) return HandleError(message);
    if (type == AppMessageType::kAlive || state == State::kGivenUp) return;
    if (state == State::kWaitPut) return HandlePut(message);
    if (type == AppMessageType::kChunk) return HandleChunk(message);
    AppEndMessage msg;
    ReadMessage(message, AppMessageType::kEnd, &msg, sizeof(msg));
    end = msg;
  }

  // A client that gives up ends with an ERROR instead of a BYE.
  void HandleError(const Message& message) {
    session.done = true;
    if (state == State::kGivenUp) return;
    GiveUp("the client gives up: " + ReadReason(message));
  }

  // Creates the file, and lends the client its slots.
  void HandlePut(const Message& message) {
    AppPutMessage put;
    ReadMessage(message, AppMessageType::kPut, &put, sizeof(put));
    const struct fi_info* info = session.net.domain->info;
    std::string name(put.name, strnlen(put.name, sizeof(put.name)));
    file_size = put.file_size;
    chunk_size = std::min(kChunkSize, info->ep_attr->max_msg_size);
    num_chunks = CountChunks(file_size, chunk_size);
    if (num_chunks > kMaxChunks) throw std::runtime_error("too large a file");
    if (put.num_slots == 0 || put.num_slots > kMaxSlots) {
      throw BadMessage(std::to_string(put.num_slots) + " slots");
    }
    if (std::string wrong = CheckName(name); !wrong.empty()) {
      throw std::runtime_error(wrong);
    }
    file.Create(name);

    // A small file does not need all that the client would like to have.
    slots.resize(std::clamp<uint64_t>(num_chunks, 1, put.num_slots));
    buf.Alloc(slots.size() * chunk_size);
    session.net.domain->RegisterMemory(buf, FI_REMOTE_WRITE);
    for (size_t i = 0; i < slots.size(); ++i) Lend(i, i);

    AppReadyMessage ready = {};
    ready.base.type = AppMessageType::kReady;
    ready.num_slots = static_cast<uint32_t>(slots.size());
    ready.chunk_size = chunk_size;
    // A place in a region is named by its address or, if the provider does
    // without FI_MR_VIRT_ADDR, by its distance from the start.
    bool virt_addr = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
    ready.slots = {virt_addr ? reinterpret_cast<uint64_t>(buf.data) : 0,
                   buf.size, fi_mr_key(buf.mr)};
    session.Send(&ready, sizeof(ready));
    PrintLine(stdout, number,
              "Receiving " + name + ": " + std::to_string(file_size) +
                  " bytes into " + std::to_string(slots.size()) + " slots of " +
                  std::to_string(chunk_size));
    started_at = Clock::now();
    state = State::kReceive;
  }

  // Lends a slot for a chunk. The immediate data of its WRITE is the number of
  // the chunk plus 1, because 0 would be none.
  void Lend(size_t slot, uint64_t chunk) {
    slots[slot].chunk = chunk;
    auto arrived = [this, slot](const RdmaOp&) {
      Try([this, slot] { SaveChunk(slot); });
    };
    session.net.AddRemoteWrite(static_cast<uint32_t>(chunk + 1), arrived);
  }

  // Does the work of immediate data, for clients that send none.
  void HandleChunk(const Message& message) {
    for (uint32_t chunk : ReadNumbers(message, AppMessageType::kChunk)) {
      if (chunk >= num_chunks) throw BadMessage("a chunk beyond the end");
      session.net.CompleteRemoteWrite(chunk + 1);
    }
  }

  // Begins to save a chunk that has arrived in its slot.
  void SaveChunk(size_t slot) {
    if (state != State::kReceive) return;
    Slot& s = slots[slot];
    s.save = Start([this, slot, &s] {
      SlowDown();
      const uint8_t* data = buf.data + slot * chunk_size;
      size_t size = BytesOf(s.chunk, chunk_size, file_size);
      file.Write(data, size, s.chunk * chunk_size);
      // Afterwards, so that it reveals a WRITE that came while we wrote.
      s.checksum = Checksum(s.chunk, data, size);
    });
  }

  // Lends the slots whose chunks have been saved, each for its next chunk.
  void ContinueSave() {
    for (size_t i = 0; i < slots.size(); ++i) {
      if (!Ended(slots[i].save)) continue;
      slots[i].save.get();
      checksum += slots[i].checksum;
      ++saved_chunks;
      uint64_t next = slots[i].chunk + slots.size();
      if (next >= num_chunks) continue;
      Lend(i, next);
      credits.push_back(static_cast<uint32_t>(i));
    }
  }

  // Gives the file its name when all chunks are saved, and tells the client.
  void ContinueFinish() {
    if (state == State::kReceive && end && saved_chunks == num_chunks) {
      if (end->checksum != checksum) {
        throw std::runtime_error("the checksum of the file is not correct");
      }
      finish = Start([this] { file.Finish(); });
      state = State::kFinish;
    }
    if (state != State::kFinish || !Ended(finish)) return;
    finish.get();
    AppMessageBase saved = {AppMessageType::kSaved};
    session.Send(&saved, sizeof(saved));
    file.keep = true;
    PrintLine(stdout, number,
              "Saved " + file.name + ": " +
                  DescribeRate(file_size, SecondsSince(started_at)));
    state = State::kSaved;
  }
};

int ServerMain(const char* program) {
  Domain domain;
  Inbox inbox;
  Network net;
  std::list<PutRequestState> clients;
  std::list<PutRequestState> leaving;  // whose chunks are still being saved
  // Without this, a file that exceeds a size limit would kill the server.
  signal(SIGXFSZ, SIG_IGN);
  domain.Open(GetInfo(kCaps));
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
      try {
        completions += net.PollCompletion();
        Message message;
        while (waiting.size() < kMaxWaiting && inbox.Take(net, message)) {
          waiting.push_back(ReadConnect(message, AppMessageType::kConnect));
        }
        // One at a time: opening an endpoint takes some providers 50 ms.
        if (clients.size() + leaving.size() < kMaxClients && !waiting.empty()) {
          AppConnectMessage connect = waiting.front();
          waiting.pop_front();
          clients.emplace_back(domain, num_clients + 1, connect);
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
      leaving.splice(leaving.end(), clients, client);
    }
    leaving.remove_if([](PutRequestState& c) { return !c.DiskBusy(); });
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

// Shows how far a transfer is: a bar on a terminal, otherwise a line now and
// then.
struct ProgressBar {
  bool terminal = isatty(STDOUT_FILENO) == 1;
  Clock::duration period = terminal ? 100ms : 1000ms;  // between two lines
  Clock::time_point printed_at = Clock::now();
  bool line_open = false;  // the cursor is behind the bar

  ~ProgressBar() { EndLine(); }

  void Print(uint64_t bytes, uint64_t all_bytes, double seconds) {
    Clock::time_point now = Clock::now();
    if (now - printed_at < period) return;
    printed_at = now;
    double share = 1;
    if (all_bytes > 0) {
      share = static_cast<double>(bytes) / static_cast<double>(all_bytes);
    }
    std::string bar(static_cast<size_t>(20 * share), '#');
    bar.resize(20, '.');
    printf("%s[%s] %3.0f%% of %.3f MB, %.3f Gbps", terminal ? "\r" : "",
           bar.c_str(), 100 * share, 1e-6 * static_cast<double>(all_bytes),
           8e-9 * static_cast<double>(bytes) / seconds);
    if (bytes == all_bytes) {
      printf(", waiting for the disk");
    } else if (bytes > 0) {
      printf(", %.0f s left", seconds * (1 - share) / share);
    }
    printf("%s", terminal ? "\033[K" : "\n");
    fflush(stdout);
    line_open = terminal;
  }

  void EndLine() {
    if (line_open) printf("\n");
    line_open = false;
  }
};

// What the client does: it sends a file.
struct PutClient {
  // A place in our memory for a chunk on its way from the file into the slot of
  // the server that has the same number.
  struct Slot {
    uint64_t chunk = 0;     // in the slot, or the next to be read
    uint64_t checksum = 0;  // of the chunk
    Task read;
    bool full = false;   // the chunk has been read; its WRITE is not posted
    bool credit = true;  // the server's slot is free
  };

  SourceFile file;
  Buffer buf;  // all slots, one after the other
  Session session;
  AppPutMessage put = {};
  AppReadyMessage ready = {};
  uint64_t num_chunks = 0;
  uint64_t read_chunks = 0;
  uint64_t written_bytes = 0;
  uint64_t checksum = 0;  // of the chunks that have been read
  bool imm_data = false;  // immediate data tells the server what has arrived
  std::vector<uint32_t> written_chunks;  // otherwise we tell it
  bool end_sent = false;
  bool saved = false;
  std::vector<Slot> slots;
  Clock::time_point started_at;
  Clock::time_point alive_at;
  ProgressBar bar;

  void Open(Domain& domain) {
    session.Open(domain);
    // Some providers have no immediate data. With tcp;ofi_rxm (libfabric 1.17
    // and 2.6), a server crashes if it closes an endpoint while a WRITE with
    // immediate data is arriving. NO_IMMEDIATE_DATA is for tests.
    imm_data =
        domain.info->domain_attr->cq_data_size >= sizeof(uint32_t) &&
        strcmp(domain.info->fabric_attr->prov_name, "tcp;ofi_rxm") != 0 &&
        getenv("NO_IMMEDIATE_DATA") == nullptr;
  }

  // Sends the file. Throws if the server does not say that it is saved.
  void Put(const std::string& name, size_t num_slots) {
    put.base.type = AppMessageType::kPut;
    put.num_slots = static_cast<uint32_t>(num_slots);
    put.file_size = file.Size();
    snprintf(put.name, sizeof(put.name), "%s", name.c_str());
    session.Send(&put, sizeof(put));
    started_at = alive_at = Clock::now();
    try {
      session.WaitUntil("sending the file", [this] { return Continue(); });
    } catch (const std::exception& e) {
      GiveUp(e.what());
      throw;
    }
    bar.EndLine();
  }

  // Does what can be done now. Returns whether the file is saved.
  bool Continue() {
    HandleMessages();
    for (size_t i = 0; i < slots.size(); ++i) ContinueSlot(i);
    ContinueEnd();
    SendNumbers(session, AppMessageType::kChunk, written_chunks);
    if (DiskBusy()) WaitForDisk(session, alive_at);
    bar.Print(written_bytes, put.file_size, SecondsSince(started_at));
    return saved;
  }

  bool DiskBusy() const {
    return std::any_of(slots.begin(), slots.end(),
                       [](const Slot& slot) { return Running(slot.read); });
  }

  // Tells the server why we give up. Does not wait for long, because the server
  // may be the reason.
  void GiveUp(const std::string& reason) {
    Clock::time_point end = Clock::now() + kGiveUpLimit;
    try {
      SendError(session, reason);
      while (!session.outbox.AllSent() && Clock::now() < end) session.Poll();
    } catch (const std::exception&) {
      // Ignored, because the error to report is the one that made us give up.
    }
  }

  void HandleMessages() {
    Message message;
    while (session.Take(message)) {
      switch (TypeOf(message)) {
        case AppMessageType::kReady:
          HandleReady(message);
          break;
        case AppMessageType::kCredit:
          HandleCredit(message);
          break;
        case AppMessageType::kSaved:
          if (!end_sent) throw BadMessage("SAVED before the end");
          saved = true;
          break;
        case AppMessageType::kError:
          throw std::runtime_error("the server says: " + ReadReason(message));
        case AppMessageType::kAlive:
          break;
        default:
          throw BadMessage("its type is unknown");
      }
    }
  }

  // Begins to fill the slots.
  void HandleReady(const Message& message) {
    if (!slots.empty()) throw BadMessage("a second READY");
    ReadMessage(message, AppMessageType::kReady, &ready, sizeof(ready));
    if (ready.num_slots == 0 || ready.num_slots > put.num_slots ||
        ready.chunk_size == 0 || ready.chunk_size > kChunkSize ||
        ready.slots.size < ready.num_slots * ready.chunk_size) {
      throw BadMessage("its numbers do not fit together");
    }
    num_chunks = CountChunks(put.file_size, ready.chunk_size);
    buf.Alloc(ready.num_slots * ready.chunk_size);
    session.net.domain->RegisterMemory(buf, FI_WRITE);
    slots.resize(ready.num_slots);
    for (size_t i = 0; i < slots.size(); ++i) {
      slots[i].chunk = i;
      ReadChunk(i);
    }
  }

  // Begins to read the next chunk into a slot.
  void ReadChunk(size_t i) {
    Slot& slot = slots[i];
    if (slot.chunk >= num_chunks) return;
    slot.read = Start([this, i, &slot] {
      uint8_t* data = buf.data + i * ready.chunk_size;
      size_t size = BytesOf(slot.chunk, ready.chunk_size, put.file_size);
      file.Read(data, size, slot.chunk * ready.chunk_size);
      slot.checksum = Checksum(slot.chunk, data, size);
    });
  }

  // Posts the WRITE of a slot, if there are a chunk and a credit for it.
  void ContinueSlot(size_t i) {
    Slot& slot = slots[i];
    if (Ended(slot.read)) {
      slot.read.get();
      checksum += slot.checksum;
      ++read_chunks;
      slot.full = true;
    }
    if (!slot.full || !slot.credit) return;
    slot.full = false;
    slot.credit = false;
    RdmaWriteOp write = {
        .buf = &buf,
        .offset = i * ready.chunk_size,
        .len = BytesOf(slot.chunk, ready.chunk_size, put.file_size),
        .dest_ptr = ready.slots.addr + i * ready.chunk_size,
        .dest_key = ready.slots.rkey,
        .imm_data = imm_data ? static_cast<uint32_t>(slot.chunk + 1) : 0,
    };
    auto written = [this, i](const RdmaOp& op) {
      op.Check();
      HandleWriteCompletion(i, op.len);
    };
    session.net.PostWrite(session.peer, write, written);
  }

  void HandleWriteCompletion(size_t i, size_t len) {
    Slot& slot = slots[i];
    written_bytes += len;
    if (!imm_data) written_chunks.push_back(static_cast<uint32_t>(slot.chunk));
    slot.chunk += slots.size();
    ReadChunk(i);
  }

  // Takes back the credits for slots. A WRITE has used each of them up, and the
  // server returns it when it has saved the chunk.
  void HandleCredit(const Message& message) {
    for (uint32_t i : ReadNumbers(message, AppMessageType::kCredit)) {
      if (i >= slots.size() || slots[i].credit) {
        throw BadMessage("a credit that is none");
      }
      slots[i].credit = true;
    }
  }

  void ContinueEnd() {
    if (slots.empty() || end_sent || read_chunks < num_chunks) return;
    file.CheckUnchanged();
    AppEndMessage end = {{AppMessageType::kEnd}, checksum};
    session.Send(&end, sizeof(end));
    end_sent = true;
  }
};

int ClientMain(const Address& server_addr, const std::string& path,
               size_t num_slots) {
  Domain domain;
  PutClient client;
  client.file.Open(path);
  domain.Open(GetInfo(kCaps));
  client.Open(domain);
  printf("%s\n", Describe(domain.info).c_str());
  client.session.Connect(server_addr, {});
  std::string name = std::filesystem::path(path).filename();
  client.Put(name, num_slots);
  printf("Sent %s: %s\n", name.c_str(),
         DescribeRate(client.put.file_size, SecondsSince(client.started_at))
             .c_str());
  client.session.SayBye();
  printf("The server has saved the file.\n");
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
          "      Run the server. It saves files where it was started.\n"
          "  %s ADDRESS FILE [SLOTS]\n"
          "      Send it a file, with up to SLOTS chunks on their way (8).\n"
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
    if (args.size() == 1) throw std::invalid_argument("FILE is missing");
    size_t num_slots =
        args.size() > 2 ? ParseNumber("SLOTS", args[2]) : kDefaultSlots;
    if (num_slots > kMaxSlots) {
      throw std::invalid_argument("SLOTS is more than " +
                                  std::to_string(kMaxSlots));
    }
    return ClientMain(ParseAddress(args[0]), args[1], num_slots);
  } catch (const std::invalid_argument& e) {
    fprintf(stderr, "error: %s\n", e.what());
    PrintUsage(stderr, program);
    return 2;
  } catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
