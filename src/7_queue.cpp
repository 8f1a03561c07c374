// 7_queue: as much as the network takes.
//
// What libfabric has no room for waits in a queue, so that nobody who posts an
// operation has to wait. With it, the server measures the bandwidth.

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <deque>
#include <functional>
#include <list>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#ifdef USE_CUDA
#include <cuda_runtime.h>
#endif

// ---------------------------------------------------------------------------
// Constants
// ---------------------------------------------------------------------------

// The API version to ask for: libfabric offers nothing to a program that asks
// for more than it has, and keeps new behaviour from one that asks for less.
constexpr uint32_t kApiVersion =
    FI_VERSION_LT(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION),
                  FI_VERSION(2, 0))
        ? FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION)
        : FI_VERSION(2, 0);

// What the program uses of libfabric: messages and WRITEs.
constexpr uint64_t kCaps = FI_MSG | FI_RMA;

constexpr size_t kMaxAddressSize = 256;           // bytes
constexpr size_t kMessageBufferSize = 1 << 20;    // bytes; the longest message
constexpr size_t kBufferAlign = 4096;             // bytes
constexpr size_t kHugePageSize = 2 << 20;         // bytes
constexpr size_t kRecvCount = 4;                  // RECVs posted at a time
constexpr size_t kCompletionQueueReadCount = 16;  // entries read at a time
constexpr int64_t kTimeLimit = 10'000'000'000;    // ns without progress
constexpr int64_t kIdlePause = 1'000'000;         // ns between polls when idle

constexpr size_t kMaxPeers = 64;               // addresses kept
constexpr int64_t kAskPeriod = 1'000'000'000;  // ns until CONNECT is repeated
constexpr int64_t kBusyPause = 200'000'000;    // ns until it is, after BUSY
constexpr int kMaxUnanswered = 10;             // CONNECTs
constexpr int64_t kHousekeepingPeriod = 1'000'000;  // ns

constexpr size_t kBufferCount = 2;                // a client's
constexpr size_t kMaxMemoryRegions = 16;          // that a client may offer
constexpr size_t kSourceSize = 512 << 20;         // bytes; the server's pages
constexpr size_t kMaxPageSize = 16 << 20;         // bytes
constexpr int64_t kReportPeriod = 1'000'000'000;  // ns between two reports

// WRITEs that have been posted and have not completed. Most providers have no
// room for so many, and say so; this is for those that never do.
constexpr size_t kMaxOutstandingWrites = 4096;

// WRITEs that are posted for each time that the completion queue is read.
constexpr size_t kWritesPerPoll = 16;

// How often a client may have its pages written.
constexpr size_t kMaxRepeat = 1'000'000'000;

// ---------------------------------------------------------------------------
// Errors, signals, time
// ---------------------------------------------------------------------------

// The command line is wrong: the usage is printed, the exit status is 2.
struct UsageError {
  std::string message;
};

// A signal asks us to end. Thrown where the program waits, so that
// everything is closed on the way out.
struct Interrupted {};

volatile sig_atomic_t g_interrupted = 0;

void HandleSignal(int) { g_interrupted = 1; }

void InstallSignalHandlers() {
  struct sigaction action = {};
  action.sa_handler = HandleSignal;
  action.sa_flags = SA_RESTART;  // calls under way go on
  for (int signum : {SIGINT, SIGTERM, SIGHUP}) {
    sigaction(signum, &action, nullptr);
  }
  // A reader of our output that goes away must not end us before we have
  // closed what we opened.
  signal(SIGPIPE, SIG_IGN);
}

// libfabric's functions return 0 or a count, or a negative error number
// (fi_errno(3)). Throws for the latter.
void FiCheck(ssize_t ret, const std::string& what) {
  if (ret < 0) {
    throw std::runtime_error(what + ": " + fi_strerror(-ret));
  }
}

// Nanoseconds of a clock that never jumps.
int64_t Now() {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1'000'000'000) + now.tv_nsec;
}

void Pause(int64_t nanoseconds) {
  struct timespec pause = {nanoseconds / 1'000'000'000,
                           nanoseconds % 1'000'000'000};
  nanosleep(&pause, nullptr);
}

// ---------------------------------------------------------------------------
// GPU memory: all the calls into CUDA
// ---------------------------------------------------------------------------

#ifdef USE_CUDA

void CudaCheck(cudaError_t ret, const char* what) {
  if (ret != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " +
                             cudaGetErrorString(ret));
  }
}

constexpr const char* kNoGpu = "no GPU";

// The first GPU that CUDA_VISIBLE_DEVICES leaves; -1 if there is none, or no
// driver.
int FindGpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 ? 0 : -1;
}

void* CudaAlloc(size_t bytes) {
  void* data = nullptr;
  CudaCheck(cudaMalloc(&data, bytes), "cudaMalloc");
  return data;
}

void CudaFree(void* data) { cudaFree(data); }

// Between host and GPU, in either direction. The copy may still be under way
// when cudaMemcpy returns; an adapter would then send what was there before.
void CudaCopy(void* to, const void* from, size_t bytes) {
  CudaCheck(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
  CudaCheck(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void CudaClear(void* data, size_t bytes) {
  CudaCheck(cudaMemset(data, 0, bytes), "cudaMemset");
  CudaCheck(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

// A completion lies in host memory, the data in GPU memory, and PCI Express may
// have brought the former first. To be called between a completion and the use
// of the data by what already runs on this GPU. For work submitted afterwards,
// as CudaCopy does, CUDA sees to it itself; so where a flush is not supported,
// we go without.
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

#else  // Built without CUDA: no GPU is ever found, and the rest never called.

constexpr const char* kNoGpu = "built without CUDA";

int FindGpu() { return -1; }
void* CudaAlloc(size_t) { return nullptr; }
void CudaFree(void*) {}
void CudaCopy(void*, const void*, size_t) {}
void CudaClear(void*, size_t) {}
void CudaFlushWrites(int) {}

#endif

// ---------------------------------------------------------------------------
// Addresses and buffers
// ---------------------------------------------------------------------------

// Where an endpoint is. Only its provider knows what the bytes mean; how many
// there are depends on the provider too.
struct Address {
  std::vector<uint8_t> bytes;

  std::string ToString() const {
    std::string hex;
    for (uint8_t byte : bytes) {
      char digits[3];
      snprintf(digits, sizeof(digits), "%02x", byte);
      hex += digits;
    }
    return hex;
  }

  // The reverse of ToString. Throws UsageError.
  static Address Parse(const std::string& hex) {
    if (hex.empty() || hex.size() % 2 != 0 ||
        hex.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
      throw UsageError{"the address \"" + hex.substr(0, 80) +
                       "\" is not an even number of hexadecimal digits"};
    }
    if (hex.size() / 2 > kMaxAddressSize) {
      throw UsageError{
          "the address is too long: " + std::to_string(hex.size() / 2) +
          " bytes of at most " + std::to_string(kMaxAddressSize)};
    }
    Address address;
    for (size_t i = 0; i < hex.size(); i += 2) {
      address.bytes.push_back(
          static_cast<uint8_t>(stoul(hex.substr(i, 2), nullptr, 16)));
    }
    return address;
  }
};

// Memory that can be registered. It must outlive the Network that it is
// registered with: until the endpoint is closed, the adapter may still use it.
struct Buffer {
  uint8_t* data = nullptr;
  size_t size = 0;              // bytes, as asked for
  struct fid_mr* mr = nullptr;  // set by Network::RegisterMemory, which owns it

  // The GPU that has the memory; -1: the host has it.
  int cuda_device = -1;

  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { Free(); }

  void Free() {
    if (is_cuda()) {
      CudaFree(data);
      data = nullptr;
      cuda_device = -1;
    }
    free(data);
    data = nullptr;
  }

  bool is_cuda() const { return cuda_device >= 0; }

  void AllocCuda(size_t bytes, int device) {
    data = static_cast<uint8_t*>(CudaAlloc(bytes));
    size = bytes;
    cuda_device = device;
  }

  void CopyIn(size_t offset, const void* from, size_t len) {
    if (is_cuda()) {
      CudaCopy(data + offset, from, len);
    } else {
      memcpy(data + offset, from, len);
    }
  }

  void CopyOut(size_t offset, void* to, size_t len) const {
    if (is_cuda()) {
      CudaCopy(to, data + offset, len);
    } else {
      memcpy(to, data + offset, len);
    }
  }

  void Clear() {
    if (is_cuda()) {
      CudaClear(data, size);
    } else {
      memset(data, 0, size);
    }
  }

  void Alloc(size_t bytes) {
    size = bytes;
    // Large buffers go onto huge pages: fewer entries in the page tables, and
    // in the adapter's copy of them.
    size_t align = size < kHugePageSize ? kBufferAlign : kHugePageSize;
    size_t rounded = (size + align - 1) / align * align;
    data = static_cast<uint8_t*>(aligned_alloc(align, rounded));
    if (data == nullptr) {
      throw std::runtime_error("no memory for a buffer of " +
                               std::to_string(size) + " bytes");
    }
    if (align == kHugePageSize) {
      madvise(data, rounded, MADV_HUGEPAGE);
    }
  }

  // Sees to it that all of the memory really exists, as some providers demand
  // before it is registered: the kernel makes a page when it is first used.
  void Touch() {
    if (is_cuda()) return;
    for (size_t i = 0; i < size; i += kBufferAlign) {
      volatile uint8_t* byte = data + i;
      *byte = *byte;
    }
  }
};

// ---------------------------------------------------------------------------
// Network
// ---------------------------------------------------------------------------

struct Network;

// Somebody whose address we know.
struct Peer {
  Address address;
  // What libfabric calls it from now on.
  fi_addr_t fi_addr = FI_ADDR_UNSPEC;
  // Whoever sees that what we wait for makes progress increases this.
  uint64_t progress = 0;
  // The first of its operations to fail, and why; empty if none has.
  std::string error;
};

enum class RdmaOpType : uint8_t {
  kRecv,
  kSend,
  kWrite,
  kRemoteWrite,  // posted by the other side; all we see of it is its end
};

// From where to where a WRITE goes.
struct RdmaWriteOp {
  Buffer* buf;
  size_t offset;      // bytes from the start of buf
  size_t len;         // bytes
  uint64_t dest_ptr;  // as the owner of the memory has told
  uint64_t dest_key;  // the same
  uint32_t imm_data;  // 0: none. Some providers carry 4 bytes and no more
};

struct RdmaOp;

// Called once when an operation has completed.
using RdmaCallback = std::function<void(Network&, RdmaOp&)>;

// A work request: what libfabric is asked to do, and whom to tell when it is
// done.
struct RdmaOp {
  // Must come first. Some providers keep notes of their own there while the
  // operation is in flight (FI_CONTEXT2 in fi_getinfo(3)).
  struct fi_context2 context;
  RdmaOpType type;
  // Null for a RECV: from anybody.
  Peer* peer;
  // Must stay as it is until the operation has completed.
  Buffer* buf;
  // Bytes; for a RECV, set when it has completed.
  size_t len;
  RdmaWriteOp write;
  // Set when it has completed; empty if all went well.
  std::string error;
  RdmaCallback callback;

  const char* Name() const {
    switch (type) {
      case RdmaOpType::kRecv:
        return "RECV";
      case RdmaOpType::kSend:
        return "SEND";
      case RdmaOpType::kWrite:
        return "WRITE";
      case RdmaOpType::kRemoteWrite:
        return "REMOTE WRITE";
    }
    return "operation";
  }
};

// An endpoint with all that belongs to it: its fabric (the network), domain
// (the adapter), completion queue, address vector, and the memory registered.
struct Network {
  struct fi_info* info = nullptr;
  struct fid_fabric* fabric = nullptr;
  struct fid_domain* domain = nullptr;
  struct fid_av* av = nullptr;
  struct fid_cq* cq = nullptr;
  struct fid_ep* ep = nullptr;
  Address addr;  // our own
  // Fabric and domain are somebody else's.
  bool borrowed = false;

  std::vector<struct fid_mr*> mrs;
  std::list<Peer> peers;
  // The first error that belongs to no operation; empty if there is none.
  std::string stray_error;
  // All operations there are, so that each has an owner.
  std::deque<RdmaOp> ops;
  // Those of them that are not in flight.
  std::vector<RdmaOp*> free_ops;
  // Called now and then while we wait for a peer. It must not wait itself.
  std::function<void()> housekeeping;
  int64_t housekept_at = 0;  // ns
  // What a WRITE asks for: to be complete when the data is in place.
  uint64_t write_flags = FI_DELIVERY_COMPLETE;
  // What waits for a WRITE from elsewhere, by its immediate data.
  std::unordered_map<uint32_t, RdmaOp*> remote_write_ops;
  // Those that libfabric had no room for.
  std::deque<RdmaOp*> pending_ops;
  // How often it had none.
  uint64_t eagain_count = 0;
  std::mt19937_64 random{std::random_device{}()};

  Network() = default;
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;
  ~Network();

  void Open(struct fi_info* list);
  void OpenBeside(const Network& other);
  void OpenEndpoint();
  Peer* AddPeerAddress(const Address& address);
  void RegisterMemory(Buffer& buf, uint64_t access);

  void PostRecv(Buffer& buf, const RdmaCallback& callback);
  void PostSend(Peer* peer, Buffer& buf, size_t len,
                const RdmaCallback& callback);
  bool Inject(Peer* peer, const void* data, size_t len);

  void PostWrite(Peer* peer, const RdmaWriteOp& write,
                 const RdmaCallback& callback);
  void AddRemoteWrite(uint32_t imm_data, const RdmaCallback& callback);

  size_t PollCompletion();
  void WaitUntil(const char* what, Peer* peer,
                 const std::function<bool()>& done);

  RdmaOp* NewOp(RdmaOpType type, Peer* peer, Buffer* buf, size_t len,
                const RdmaCallback& callback);
  void Post(RdmaOp* op);
  void ProgressPendingOps();
  bool Submit(RdmaOp* op);
  void HandleCompletion(const struct fi_cq_data_entry& cqe);
  void HandleError(const struct fi_cq_err_entry& entry);
  void Complete(RdmaOp* op, const std::string& error);
};

// What this program can do, and what it needs: `caps`. libfabric answers with a
// list of the interfaces that suit, the best first; FI_PROVIDER narrows it.
// Null if there are none. The caller owns the list. See fi_getinfo(3).
struct fi_info* GetInfo(uint64_t caps) {
  struct fi_info* hints = fi_allocinfo();
  if (hints == nullptr) {
    throw std::runtime_error("no memory for fi_allocinfo");
  }
  hints->caps = caps;
  // RDM: reliable, whole messages, one endpoint for all peers.
  hints->ep_attr->type = FI_EP_RDM;
  // What providers may ask of us; each asks for what it needs of it.
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  if (caps & FI_HMEM) hints->domain_attr->mr_mode |= FI_MR_HMEM;
  // One thread alone uses the domain: the provider needs no locks.
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  // Without it, a completion may only mean that the data has left this host;
  // with it, that the data is in the peer's memory (fi_cq(3)).
  hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;

  struct fi_info* info = nullptr;
  int ret = fi_getinfo(kApiVersion, nullptr, nullptr, 0, hints, &info);
  fi_freeinfo(hints);
  if (ret == -FI_ENODATA) return nullptr;
  FiCheck(ret, "fi_getinfo");
  return info;
}

std::runtime_error NoInterface() {
  const char* provider = getenv("FI_PROVIDER");
  return std::runtime_error(
      "fi_getinfo: no interface offers what this program needs" +
      (provider ? " with FI_PROVIDER=" + std::string(provider) : "") +
      "; `fi_info -t FI_EP_RDM` lists what there is");
}

// As GetInfo, but with FI_HMEM if there is a GPU, and if the interface that we
// would use anyway can do that. Else a libfabric that knows no CUDA would offer
// us shm, and nobody outside this host could reach us.
struct fi_info* GetInfoWithGpu() {
  struct fi_info* plain = GetInfo(kCaps);
  if (plain == nullptr || FindGpu() < 0) return plain;
  struct fi_info* list = GetInfo(kCaps | FI_HMEM);
  struct fi_info* found = nullptr;
  for (struct fi_info* i = list; i != nullptr && found == nullptr;
       i = i->next) {
    if (strcmp(i->fabric_attr->prov_name, plain->fabric_attr->prov_name) == 0 &&
        strcmp(i->fabric_attr->name, plain->fabric_attr->name) == 0 &&
        strcmp(i->domain_attr->name, plain->domain_attr->name) == 0) {
      found = fi_dupinfo(i);
    }
  }
  if (list != nullptr) fi_freeinfo(list);
  if (found == nullptr) return plain;
  fi_freeinfo(plain);
  return found;
}

// One line about an interface: what is known of it.
std::string Describe(const struct fi_info* info) {
  std::string line = "domain: " + std::string(info->domain_attr->name) +
                     ", fabric: " + info->fabric_attr->name +
                     ", provider: " + info->fabric_attr->prov_name;
  // Only adapters have a NIC; the software providers leave it null.
  if (info->nic != nullptr) {
    if (info->nic->device_attr != nullptr && info->nic->device_attr->name) {
      line += ", nic: " + std::string(info->nic->device_attr->name);
    }
    if (info->nic->link_attr != nullptr && info->nic->link_attr->speed > 0) {
      char speed[32];
      snprintf(speed, sizeof(speed), ", link: %.0fGbps",
               info->nic->link_attr->speed * 1e-9);
      line += speed;
    }
  }
  return line;
}

// Opens the first interface of a list made by GetInfo, and owns the list from
// then on.
void Network::Open(struct fi_info* list) {
  if (list == nullptr) throw NoInterface();
  info = list;
  FiCheck(fi_fabric(info->fabric_attr, &fabric, nullptr), "fi_fabric");
  FiCheck(fi_domain(fabric, info, &domain, nullptr), "fi_domain");
  OpenEndpoint();
}

// Opens one more endpoint, with queues of its own, on the domain of another
// Network, which must outlive this one. Memory registered with either serves
// both. Closing an endpoint is the only sure way to be rid of what is in
// flight, so one that serves a single client forgets it by being closed.
void Network::OpenBeside(const Network& other) {
  info = fi_dupinfo(other.info);
  fabric = other.fabric;
  domain = other.domain;
  borrowed = true;
  OpenEndpoint();
}

void Network::OpenEndpoint() {
  struct fi_av_attr av_attr = {};
  FiCheck(fi_av_open(domain, &av_attr, &av, nullptr), "fi_av_open");

  struct fi_cq_attr cq_attr = {};
  cq_attr.format = FI_CQ_FORMAT_DATA;
  FiCheck(fi_cq_open(domain, &cq_attr, &cq, nullptr), "fi_cq_open");

  FiCheck(fi_endpoint(domain, info, &ep, nullptr), "fi_endpoint");
  FiCheck(fi_ep_bind(ep, &av->fid, 0), "fi_ep_bind (address vector)");
  FiCheck(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV),
          "fi_ep_bind (completion queue)");
  FiCheck(fi_enable(ep), "fi_enable");

  size_t length = kMaxAddressSize;
  addr.bytes.resize(length);
  FiCheck(fi_getname(&ep->fid, addr.bytes.data(), &length), "fi_getname");
  addr.bytes.resize(length);

  // The shm provider copies the data of a WRITE when it is posted, or queues it
  // in front of all later ones, so it is in place in time without our asking.
  // If we ask, libfabric 1.17 has the other side copy it under a lock, and
  // waits for ever if that side is killed meanwhile.
  // (Not for GPU memory: there, only the other way works.)
  if (strcmp(info->fabric_attr->prov_name, "shm") == 0 &&
      (info->caps & FI_HMEM) == 0) {
    write_flags = 0;
  }
}

void Close(struct fid* fid, const char* what) {
  int ret = fi_close(fid);
  if (ret != 0) {
    fprintf(stderr, "warning: fi_close of the %s: %s\n", what,
            fi_strerror(-ret));
  }
}

// What uses something is closed before what it uses: the endpoint first, since
// RECVs that are still posted use memory regions.
Network::~Network() {
  if (ep) Close(&ep->fid, "endpoint");
  for (struct fid_mr* mr : mrs) Close(&mr->fid, "memory region");
  if (cq) Close(&cq->fid, "completion queue");
  if (av) Close(&av->fid, "address vector");
  if (domain && !borrowed) Close(&domain->fid, "domain");
  if (fabric && !borrowed) Close(&fabric->fid, "fabric");
  if (info) fi_freeinfo(info);
}

// Tells libfabric of a peer. Nothing is sent: a wrong address shows later, as
// an error or as silence. Null for an address that cannot be right.
Peer* Network::AddPeerAddress(const Address& address) {
  for (Peer& peer : peers) {
    if (peer.address.bytes == address.bytes) return &peer;
  }
  if (peers.size() == kMaxPeers) {
    // The oldest makes room. Nothing may be in flight to it (fi_av(3)), and
    // nothing is: whoever knows so many peers only injects.
    fi_av_remove(av, &peers.front().fi_addr, 1, 0);
    peers.pop_front();
  }
  // A name ends with a zero byte, and begins as ours does; all else is as long
  // as our own address.
  bool fits = info->addr_format == FI_ADDR_STR
                  ? !address.bytes.empty() && address.bytes.back() == 0 &&
                        address.bytes.front() == addr.bytes.front()
                  : address.bytes.size() == addr.bytes.size();
  fi_addr_t fi_addr = FI_ADDR_UNSPEC;
  if (!fits ||
      fi_av_insert(av, address.bytes.data(), 1, &fi_addr, 0, nullptr) != 1) {
    return nullptr;
  }
  Peer* peer = &peers.emplace_back();
  peer->address = address;
  peer->fi_addr = fi_addr;
  return peer;
}

// Tells the adapter of a buffer, which it may use from now on, and for which
// operations (fi_mr(3)).
void Network::RegisterMemory(Buffer& buf, uint64_t access) {
  if (info->domain_attr->mr_mode & FI_MR_ALLOCATED) buf.Touch();
  struct iovec iov = {.iov_base = buf.data, .iov_len = buf.size};
  struct fi_mr_attr attr = {};
  attr.mr_iov = &iov;
  attr.iov_count = 1;
  attr.access = access;
  if (buf.is_cuda()) {
    attr.iface = FI_HMEM_CUDA;
    attr.device.cuda = buf.cuda_device;
  }
  // Without FI_MR_PROV_KEY it is for us to choose a key. It is another one each
  // time, so that none from earlier fits by accident.
  size_t key_bits = 8 * info->domain_attr->mr_key_size;
  attr.requested_key =
      key_bits < 64 ? random() & ((UINT64_C(1) << key_bits) - 1) : random();
  int ret = fi_mr_regattr(domain, &attr, 0, &buf.mr);
  FiCheck(ret, "fi_mr_regattr of " + std::to_string(buf.size) + " bytes" +
                   (ret == -FI_ENOMEM
                        ? " (`ulimit -l`, the limit of locked memory, may be "
                          "too low)"
                        : ""));
  mrs.push_back(buf.mr);
}

// The next message, whoever sends it, goes into `buf`.
void Network::PostRecv(Buffer& buf, const RdmaCallback& callback) {
  Post(NewOp(RdmaOpType::kRecv, nullptr, &buf, buf.size, callback));
}

// Sends the first `len` bytes of `buf`.
void Network::PostSend(Peer* peer, Buffer& buf, size_t len,
                       const RdmaCallback& callback) {
  Post(NewOp(RdmaOpType::kSend, peer, &buf, len, callback));
}

// Sends a few bytes if there is room for them now, and does not care what
// becomes of them: there is no completion, and `data` may go at once. False if
// there was no room. See fi_inject in fi_msg(3).
bool Network::Inject(Peer* peer, const void* data, size_t len) {
  return fi_inject(ep, data, len, peer->fi_addr) == 0;
}

// Writes into memory of the peer, whose program takes no part in it.
void Network::PostWrite(Peer* peer, const RdmaWriteOp& write,
                        const RdmaCallback& callback) {
  RdmaOp* op = NewOp(RdmaOpType::kWrite, peer, write.buf, write.len, callback);
  op->write = write;
  Post(op);
}

// Calls back when a WRITE with this immediate data has arrived here.
void Network::AddRemoteWrite(uint32_t imm_data, const RdmaCallback& callback) {
  remote_write_ops[imm_data] =
      NewOp(RdmaOpType::kRemoteWrite, nullptr, nullptr, 0, callback);
}

RdmaOp* Network::NewOp(RdmaOpType type, Peer* peer, Buffer* buf, size_t len,
                       const RdmaCallback& callback) {
  if (free_ops.empty()) {
    free_ops.push_back(&ops.emplace_back());
  }
  RdmaOp* op = free_ops.back();
  free_ops.pop_back();
  op->type = type;
  op->peer = peer;
  op->buf = buf;
  op->len = len;
  op->callback = callback;
  return op;
}

// Hands the operation over, or keeps it until there is room. Once one has to
// wait, all later ones wait behind it, so that none overtakes another.
void Network::Post(RdmaOp* op) {
  if (pending_ops.empty() && Submit(op)) return;
  pending_ops.push_back(op);
}

// Hands over what has been waiting, as far as there is room.
void Network::ProgressPendingOps() {
  while (!pending_ops.empty()) {
    if (!Submit(pending_ops.front())) return;
    pending_ops.pop_front();
  }
}

// Hands an operation to libfabric. False if there is no room for it now: what
// makes room is to read the completion queue (FI_EAGAIN in fi_endpoint(3)).
bool Network::Submit(RdmaOp* op) {
  void* desc = fi_mr_desc(op->buf->mr);
  const RdmaWriteOp& write = op->write;
  struct iovec from = {};
  struct fi_rma_iov to = {};
  struct fi_msg_rma msg = {};
  ssize_t ret = 0;
  switch (op->type) {
    case RdmaOpType::kRecv:
      ret = fi_recv(ep, op->buf->data, op->len, desc, FI_ADDR_UNSPEC, op);
      break;
    case RdmaOpType::kSend:
      ret = fi_send(ep, op->buf->data, op->len, desc, op->peer->fi_addr, op);
      break;
    case RdmaOpType::kWrite:
      from = {write.buf->data + write.offset, write.len};
      to = {write.dest_ptr, write.len, write.dest_key};
      msg.msg_iov = &from;
      msg.desc = &desc;
      msg.iov_count = 1;
      msg.addr = op->peer->fi_addr;
      msg.rma_iov = &to;
      msg.rma_iov_count = 1;
      msg.context = op;
      msg.data = write.imm_data;
      ret = fi_writemsg(ep, &msg,
                        write_flags | (write.imm_data ? FI_REMOTE_CQ_DATA : 0));
      break;
    case RdmaOpType::kRemoteWrite:
      break;  // never posted
  }
  if (ret == -FI_EAGAIN) {
    ++eagain_count;
    return false;
  }
  // An endpoint without its RECVs is of no use to anybody.
  if (op->type == RdmaOpType::kRecv) FiCheck(ret, "fi_recv");
  if (ret != 0) {
    // It will not be seen in the completion queue.
    Complete(op, fi_strerror(static_cast<int>(-ret)));
  }
  return true;
}

// Reads what there is in the completion queue, which also drives the providers
// that have no thread of their own. Returns the number of entries.
size_t Network::PollCompletion() {
  struct fi_cq_data_entry cqe[kCompletionQueueReadCount];
  size_t count = 0;
  for (;;) {
    ssize_t ret = fi_cq_read(cq, cqe, kCompletionQueueReadCount);
    if (ret == -FI_EAGAIN || ret == 0) break;
    if (ret == -FI_EAVAIL) {
      // A failed operation lies in front; it has to be read in its own way.
      struct fi_cq_err_entry entry = {};
      ret = fi_cq_readerr(cq, &entry, 0);
      if (ret == -FI_EAGAIN || ret == 0) break;
      FiCheck(ret, "fi_cq_readerr");
      HandleError(entry);
      ++count;
      continue;
    }
    FiCheck(ret, "fi_cq_read");
    for (ssize_t i = 0; i < ret; ++i) HandleCompletion(cqe[i]);
    count += static_cast<size_t>(ret);
    if (static_cast<size_t>(ret) < kCompletionQueueReadCount) break;
  }
  ProgressPendingOps();
  return count;
}

void Network::HandleCompletion(const struct fi_cq_data_entry& cqe) {
  if (cqe.flags & FI_REMOTE_WRITE) {
    // Somebody else's operation, hence no context of ours. What nobody waits
    // for is no concern of ours either.
    auto it = remote_write_ops.find(static_cast<uint32_t>(cqe.data));
    if (it == remote_write_ops.end()) return;
    RdmaOp* remote = it->second;
    remote_write_ops.erase(it);
    return Complete(remote, "");
  }
  auto* op = static_cast<RdmaOp*>(cqe.op_context);
  if (op->type == RdmaOpType::kRecv) {
    if (cqe.len > op->buf->size) {
      return Complete(op, "the message is longer than the buffer");
    }
    op->len = cqe.len;
  }
  Complete(op, "");
}

void Network::HandleError(const struct fi_cq_err_entry& entry) {
  std::string error = fi_strerror(entry.err);
  const char* detail =
      fi_cq_strerror(cq, entry.prov_errno, entry.err_data, nullptr, 0);
  if (detail != nullptr && error != detail) {
    error += " (" + std::string(detail) + ")";
  }
  if (entry.op_context == nullptr) {
    // Some providers do not say whose error it is. Those who wait for a peer
    // take it for theirs.
    if (stray_error.empty()) {
      stray_error = error;
      fprintf(stderr, "warning: libfabric reports: %s\n", error.c_str());
    }
    return;
  }
  Complete(static_cast<RdmaOp*>(entry.op_context), error);
}

// The end of every operation, whatever became of it.
void Network::Complete(RdmaOp* op, const std::string& error) {
  if (!error.empty()) {
    op->error = op->Name() + (" failed: " + error);
    if (op->peer != nullptr && op->peer->error.empty()) {
      op->peer->error = op->error;
    }
  }
  if (op->callback) op->callback(*this, *op);
  op->callback = nullptr;
  op->error.clear();
  free_ops.push_back(op);
}

// Polls the completion queue until `done` says so. `what` is what we are doing,
// for messages.
//
// Waiting for a peer is never for ever: throws std::runtime_error when one of
// its operations has failed, and after kTimeLimit without progress, since some
// providers say nothing when a peer has gone. Waiting for anybody (no peer) has
// no limit, and leaves the core to others when all is quiet.
//
// Throws Interrupted after a signal.
void Network::WaitUntil(const char* what, Peer* peer,
                        const std::function<bool()>& done) {
  uint64_t progress = peer ? peer->progress : 0;
  int64_t since = 0;
  for (;;) {
    if (g_interrupted) throw Interrupted();
    if (done()) return;
    size_t completions = PollCompletion();
    if (peer == nullptr) {
      if (completions == 0) Pause(kIdlePause);
      continue;
    }
    const std::string& error = peer->error.empty() ? stray_error : peer->error;
    if (!error.empty()) {
      throw std::runtime_error(std::string(what) + ": " + error +
                               "; is the other side still running?");
    }
    int64_t now = Now();
    if (housekeeping && now - housekept_at > kHousekeepingPeriod) {
      housekept_at = now;
      housekeeping();
    }
    if (since == 0 || peer->progress != progress) {
      progress = peer->progress;
      since = now;
    } else if (now - since > kTimeLimit) {
      throw std::runtime_error(
          std::string(what) + ": nothing has happened for " +
          std::to_string(kTimeLimit / 1'000'000'000) +
          " s; is the other side running, with the same FI_PROVIDER?");
    }
  }
}

// ---------------------------------------------------------------------------
// Messages
// ---------------------------------------------------------------------------

// A message that has arrived, or what kept it from arriving.
struct Message {
  std::vector<uint8_t> bytes;
  std::string error;
};

// Keeps RECVs posted, and the messages that they have received.
struct Inbox {
  struct Arrival {
    Buffer* buf;
    size_t len;  // bytes
    std::string error;
  };

  Buffer bufs[kRecvCount];
  std::deque<Arrival> arrivals;

  void Open(Network& net) {
    for (Buffer& buf : bufs) {
      buf.Alloc(kMessageBufferSize);
      net.RegisterMemory(buf, FI_RECV);
      Post(net, buf);
    }
  }

  void Post(Network& net, Buffer& buf) {
    net.PostRecv(buf, [this](Network&, RdmaOp& op) {
      arrivals.push_back({op.buf, op.len, op.error});
    });
  }

  // Takes the first message out, and gives its buffer to the next one.
  Message Take(Network& net) {
    Arrival arrival = arrivals.front();
    arrivals.pop_front();
    Message message;
    message.error = arrival.error;
    if (message.error.empty()) {
      message.bytes.assign(arrival.buf->data, arrival.buf->data + arrival.len);
    }
    Post(net, *arrival.buf);
    return message;
  }
};

// Sends copies of messages, so that the caller need not keep them.
struct Outbox {
  std::list<Buffer> bufs;
  std::vector<Buffer*> free_bufs;  // those that are not in flight

  // A message is a fixed part, the head, and may have a tail.
  void Send(Network& net, Peer* peer, const void* head, size_t head_size,
            const void* tail = nullptr, size_t tail_size = 0,
            const RdmaCallback& callback = nullptr) {
    if (free_bufs.empty()) {
      Buffer& buf = bufs.emplace_back();
      buf.Alloc(kMessageBufferSize);
      net.RegisterMemory(buf, FI_SEND);
      free_bufs.push_back(&buf);
    }
    Buffer* buf = free_bufs.back();
    free_bufs.pop_back();
    memcpy(buf->data, head, head_size);
    if (tail_size > 0) memcpy(buf->data + head_size, tail, tail_size);
    net.PostSend(peer, *buf, head_size + tail_size,
                 [this, callback](Network& network, RdmaOp& op) {
                   free_bufs.push_back(op.buf);
                   if (callback) callback(network, op);
                 });
  }
};

enum class AppMessageType : uint32_t {
  kConnect = 1,  // client: here I am
  kAccept = 2,   // server: it is your turn; use this address from now on
  kBusy = 3,     // server: it is somebody else's turn, ask again
  kBye = 4,      // client: I have all that I wanted

  kRandomFill = 5,  // client: fill my memory
  kProgress = 6,    // server: this much is done
};

// What each message begins with.
struct AppMessageBase {
  AppMessageType type;
  uint32_t reserved;
  // Chosen by the client at random, and in all messages of its turn, so that
  // none is ever taken for somebody else's.
  uint64_t session;
};

// Memory that its owner lets the other side use.
struct AppMemoryRegion {
  uint64_t addr;
  uint64_t size;  // bytes
  uint64_t rkey;
};

// CONNECT: the client's address, and the memory that it offers. ACCEPT: the
// address of the endpoint that serves it.
struct AppConnectMessage {
  AppMessageBase base;
  uint64_t addr_size;  // bytes used of addr
  uint8_t addr[kMaxAddressSize];
  uint64_t num_mr;  // used of mr
  AppMemoryRegion mr[kMaxMemoryRegions];

  void SetAddress(const Address& address) {
    addr_size = address.bytes.size();
    memcpy(addr, address.bytes.data(), addr_size);
  }

  Address GetAddress() const { return {{addr, addr + addr_size}}; }
};

// Make num_pages pages from the seed for the first memory region, from seed + 1
// for the second, and so on. The i-th goes to page page_idx[i] of the region.
struct AppRandomFillMessage {
  AppMessageBase base;
  uint32_t remote_context;  // to come back as immediate data; not 0
  uint32_t reserved;
  uint64_t seed;
  uint64_t page_size;  // bytes; a multiple of 8
  uint64_t num_pages;
  uint64_t total_repeat;  // how often to write all of them
  // Followed by num_pages page indices, a uint32_t each.
};

constexpr size_t kMaxPages =
    (kMessageBufferSize - sizeof(AppRandomFillMessage)) / sizeof(uint32_t);

// A long transfer looks like silence to a client, which takes no part in it.
struct AppProgressMessage {
  AppMessageBase base;
  uint64_t finished;  // WRITEs
  uint64_t total;
};

// The next page of a sequence that a seed has started.
void MakePage(std::mt19937_64& generator, std::vector<uint64_t>& page) {
  if (g_interrupted) throw Interrupted();
  for (uint64_t& word : page) word = generator();
}

std::runtime_error BadMessage(const std::string& what) {
  return std::runtime_error("bad message: " + what);
}

std::runtime_error UnexpectedMessage(const AppMessageBase& base) {
  return BadMessage("type " + std::to_string(static_cast<uint32_t>(base.type)) +
                    " is not expected now");
}

// Copies the fixed part out of a message. Throws if it is not whole.
void ReadMessage(const Message& message, void* head, size_t head_size) {
  if (!message.error.empty()) throw BadMessage(message.error);
  if (message.bytes.size() < head_size) {
    throw BadMessage("it has " + std::to_string(message.bytes.size()) +
                     " bytes instead of " + std::to_string(head_size));
  }
  memcpy(head, message.bytes.data(), head_size);
}

// Reads a CONNECT or an ACCEPT. Throws if it cannot be one.
void ReadConnect(const Message& message, AppConnectMessage& connect) {
  ReadMessage(message, &connect, sizeof(connect));
  if (message.bytes.size() != sizeof(connect) ||
      connect.addr_size > sizeof(connect.addr) ||
      connect.num_mr > kMaxMemoryRegions) {
    throw BadMessage("its sizes do not fit together");
  }
}

// ---------------------------------------------------------------------------
// Application: server
// ---------------------------------------------------------------------------

// Registers `size` bytes of GPU memory if that is possible, else of the host.
// Returns which of them, in words.
std::string AllocOnGpu(Network& net, Buffer& buf, size_t size,
                       uint64_t access) {
  std::string why = kNoGpu;
  int gpu = FindGpu();
  if (gpu >= 0) {
    why = std::string(net.info->fabric_attr->prov_name) + " has no GPU support";
  }
  if (gpu >= 0 && (net.info->caps & FI_HMEM)) {
    try {
      buf.AllocCuda(size, gpu);
      net.RegisterMemory(buf, access);
      return "on cuda:" + std::to_string(gpu);
    } catch (const std::runtime_error& e) {
      why = e.what();
      buf.Free();
    }
  }
  buf.Alloc(size);
  net.RegisterMemory(buf, access);
  return "in host memory (" + why + ")";
}

// How far a transfer is, on one line: written over on a terminal, and a line
// now and then elsewhere.
struct ProgressLine {
  bool terminal = isatty(STDOUT_FILENO);
  int64_t last = 0;  // ns; when it was printed

  // Whether it is time to print it.
  bool IsDue(int64_t now) {
    return now - last >= (terminal ? kReportPeriod / 4 : 2 * kReportPeriod);
  }

  void Print(int64_t now, const std::string& text, bool done) {
    last = now;
    if (terminal) {
      printf("\r%s\033[K%s", text.c_str(), done ? "\n" : "");
    } else {
      printf("%s\n", text.c_str());
    }
    fflush(stdout);
  }
};

// The start of the command line for whoever wants to talk to us.
std::string ClientCommand(const char* program, const Network& net) {
  const char* provider = getenv("FI_PROVIDER");
  return (provider ? "FI_PROVIDER='" + std::string(provider) + "' "
                   : std::string()) +
         program + " " + net.addr.ToString();
}

// The client whose turn it is, and an endpoint for it alone. When this is
// destroyed, nothing of the client is left, whatever was in flight.
struct RandomFillRequestState {
  enum class State {
    kWaitRequest,
    kMakePages,
    kWrite,
    kWaitBye,
    kDone,
  };

  // The next page to make or to write.
  struct PageState {
    size_t i_buf = 0;
    size_t i_page = 0;
  };

  Inbox inbox;
  Outbox outbox;
  Network net;
  State state = State::kWaitRequest;
  Peer* client = nullptr;
  uint64_t session = 0;

  Buffer* source;  // all pages of the client's first buffer, of its second, ...
  AppConnectMessage connect_msg = {};
  AppRandomFillMessage request_msg = {};
  std::vector<uint32_t> page_idx;
  std::mt19937_64 generator;
  PageState page_state;
  size_t total_write_ops = 0;
  size_t posted_write_ops = 0;
  size_t finished_write_ops = 0;
  int64_t write_start_at = 0;  // ns
  int64_t reported_at = 0;     // ns
  ProgressLine progress_line;

  explicit RandomFillRequestState(Buffer* buf) : source(buf) {}

  // Throws if the client sends what it should not, here and below.
  void HandleConnect(const Network& listener, const AppConnectMessage& msg) {
    printf("------\n");
    printf("Received CONNECT message from client:\n");
    printf("  addr: %s\n", msg.GetAddress().ToString().c_str());
    for (size_t i = 0; i < msg.num_mr; ++i) {
      printf("  MR[%zu]: addr=0x%012lx size=%lu rkey=0x%016lx\n", i,
             msg.mr[i].addr, msg.mr[i].size, msg.mr[i].rkey);
    }
    net.OpenBeside(listener);
    inbox.Open(net);
    session = msg.base.session;
    connect_msg = msg;
    client = net.AddPeerAddress(msg.GetAddress());
    if (client == nullptr) throw BadMessage("an impossible address");
    if (msg.num_mr == 0) throw BadMessage("no memory to write to");

    AppConnectMessage accept = {};
    accept.base = {AppMessageType::kAccept, 0, session};
    accept.SetAddress(net.addr);
    outbox.Send(net, client, &accept, sizeof(accept));
  }

  void HandleMessages() {
    while (!inbox.arrivals.empty()) {
      Message message = inbox.Take(net);
      AppMessageBase base;
      ReadMessage(message, &base, sizeof(base));
      if (base.session != session) throw BadMessage("of another session");
      ++client->progress;
      if (base.type == AppMessageType::kRandomFill &&
          state == State::kWaitRequest) {
        HandleRequest(message);
      } else if (base.type == AppMessageType::kBye && state == State::kWrite &&
                 posted_write_ops == total_write_ops) {
        // The client has seen the last WRITE; that we hear so is still to come.
        finished_write_ops = total_write_ops;
        PrintProgress(Now());
        state = State::kDone;
      } else if (base.type == AppMessageType::kBye &&
                 state == State::kWaitBye) {
        state = State::kDone;
      } else {
        throw UnexpectedMessage(base);
      }
    }
  }

  // Nothing in a message is believed before it has been compared with what was
  // received and what was registered.
  void HandleRequest(const Message& message) {
    AppRandomFillMessage msg;
    ReadMessage(message, &msg, sizeof(msg));
    size_t indices_size = message.bytes.size() - sizeof(msg);
    if (msg.num_pages == 0 || indices_size % sizeof(uint32_t) != 0 ||
        indices_size / sizeof(uint32_t) != msg.num_pages) {
      throw BadMessage("its sizes do not fit together");
    }
    if (msg.remote_context == 0) throw BadMessage("no remote_context");
    if (msg.page_size == 0 || msg.page_size % sizeof(uint64_t) != 0 ||
        msg.page_size > kMaxPageSize ||
        msg.page_size > net.info->ep_attr->max_msg_size ||
        msg.num_pages > source->size / connect_msg.num_mr / msg.page_size) {
      throw BadMessage(std::to_string(msg.num_pages) + " pages of " +
                       std::to_string(msg.page_size) +
                       " bytes are not what the server has room for");
    }
    if (msg.total_repeat == 0 || msg.total_repeat > kMaxRepeat) {
      throw BadMessage("to be repeated " + std::to_string(msg.total_repeat) +
                       " times");
    }
    page_idx.resize(msg.num_pages);
    memcpy(page_idx.data(), message.bytes.data() + sizeof(msg), indices_size);
    for (size_t i_buf = 0; i_buf < connect_msg.num_mr; ++i_buf) {
      for (uint32_t idx : page_idx) {
        if (idx >= connect_msg.mr[i_buf].size / msg.page_size) {
          throw BadMessage("page " + std::to_string(idx) +
                           " lies outside of MR[" + std::to_string(i_buf) +
                           "]");
        }
      }
    }
    request_msg = msg;

    printf("Received RandomFill request from client:\n");
    printf("  remote_context: 0x%08x\n", msg.remote_context);
    printf("  seed: 0x%016lx\n", msg.seed);
    printf("  page_size: %lu\n", msg.page_size);
    printf("  num_pages: %lu\n", msg.num_pages);
    printf("  total_repeat: %lu\n", msg.total_repeat);
    total_write_ops = connect_msg.num_mr * msg.num_pages * msg.total_repeat;
    reported_at = Now();
    state = State::kMakePages;
  }

  // Where a page lies in the source, in bytes.
  size_t SourceOffset() const {
    return (page_state.i_buf * request_msg.num_pages + page_state.i_page) *
           request_msg.page_size;
  }

  // Makes the next page. One at a time, so that others are answered meanwhile.
  void ContinueMakePages() {
    if (state != State::kMakePages) return;
    auto& s = page_state;
    if (s.i_page == 0) generator.seed(request_msg.seed + s.i_buf);
    std::vector<uint64_t> page(request_msg.page_size / sizeof(uint64_t));
    MakePage(generator, page);
    source->CopyIn(SourceOffset(), page.data(), request_msg.page_size);
    ++client->progress;  // it is we who take the time

    if (++s.i_page == request_msg.num_pages) {
      s.i_page = 0;
      if (++s.i_buf == connect_msg.num_mr) {
        s.i_buf = 0;
        write_start_at = Now();
        progress_line.last = write_start_at;
        state = State::kWrite;
      }
    }
  }

  // Posts the next WRITE, if it is time for it.
  void ContinuePostWrite() {
    if (state != State::kWrite || posted_write_ops == total_write_ops) return;
    // As far as libfabric takes it and no further: the queue stays short,
    // however long the transfer.
    if (!net.pending_ops.empty()) return;
    // Immediate data tells the client that all is there, but WRITEs may arrive
    // in any order: the last one is not posted before all others have
    // completed.
    bool last = posted_write_ops + 1 == total_write_ops;
    size_t outstanding = posted_write_ops - finished_write_ops;
    if (outstanding >= (last ? 1 : kMaxOutstandingWrites)) return;

    auto& s = page_state;
    const AppMemoryRegion& mr = connect_msg.mr[s.i_buf];
    size_t page_size = request_msg.page_size;
    RdmaWriteOp write = {
        .buf = source,
        .offset = SourceOffset(),
        .len = page_size,
        .dest_ptr = mr.addr + page_idx[s.i_page] * page_size,
        .dest_key = mr.rkey,
        .imm_data = last ? request_msg.remote_context : 0,
    };
    net.PostWrite(client, write, [this](Network&, RdmaOp& op) {
      if (op.error.empty()) HandleWriteCompletion();
    });
    ++posted_write_ops;

    if (++s.i_page == request_msg.num_pages) {
      s.i_page = 0;
      if (++s.i_buf == connect_msg.num_mr) s.i_buf = 0;
    }
  }

  void HandleWriteCompletion() {
    ++client->progress;
    if (++finished_write_ops == total_write_ops) {
      PrintProgress(Now());
      state = State::kWaitBye;
    }
  }

  // Tells the terminal and the client how far we are, now and then.
  void Report() {
    if (state != State::kMakePages && state != State::kWrite) return;
    int64_t now = Now();
    if (state == State::kWrite && progress_line.IsDue(now)) PrintProgress(now);
    if (now - reported_at < kReportPeriod) return;
    AppProgressMessage report = {{AppMessageType::kProgress, 0, session},
                                 finished_write_ops,
                                 total_write_ops};
    if (net.Inject(client, &report, sizeof(report))) reported_at = now;
  }

  void PrintProgress(int64_t now) {
    double seconds = (now - write_start_at) * 1e-9;
    char text[100];
    snprintf(text, sizeof(text), "[%.3fs] WRITE: %.0f%%, %zu/%zu", seconds,
             100.0 * finished_write_ops / total_write_ops, finished_write_ops,
             total_write_ops);
    std::string line = text;

    double mpps = finished_write_ops / seconds * 1e-6;
    double gbps = 8e-3 * mpps * request_msg.page_size;
    std::string share;
    if (net.info->nic != nullptr && net.info->nic->link_attr != nullptr &&
        net.info->nic->link_attr->speed > 0) {
      double link_gbps = net.info->nic->link_attr->speed * 1e-9;
      share = "(" + std::to_string(std::lround(100 * gbps / link_gbps)) + "%)";
    }
    snprintf(text, sizeof(text), ", bw=%.3fGbps%s, %.3fMpps, EAGAIN=%lu", gbps,
             share.c_str(), mpps, net.eagain_count);
    line += text;
    progress_line.Print(now, line, finished_write_ops == total_write_ops);
  }
};

// Where all clients knock.
struct Listener {
  Inbox inbox;
  Network net;
  uint64_t last_session = 0;

  // Takes out the next CONNECT, if there is one. Any other message only makes
  // us print a line.
  bool TakeConnect(AppConnectMessage& connect) {
    while (!inbox.arrivals.empty()) {
      Message message = inbox.Take(net);
      try {
        ReadMessage(message, &connect, sizeof(connect.base));
        if (connect.base.type != AppMessageType::kConnect) {
          throw UnexpectedMessage(connect.base);
        }
        ReadConnect(message, connect);
      } catch (const std::runtime_error& e) {
        fprintf(stderr, "error: %s\n", e.what());
        continue;
      }
      // Who had to wait for an answer may have asked twice.
      if (connect.base.session != last_session) return true;
    }
    return false;
  }

  // Tells those who come while another client is served that they have to wait.
  void TurnAway() {
    net.PollCompletion();
    AppConnectMessage connect;
    while (TakeConnect(connect)) {
      AppMessageBase busy = {AppMessageType::kBusy, 0, connect.base.session};
      Peer* peer = net.AddPeerAddress(connect.GetAddress());
      if (peer != nullptr) net.Inject(peer, &busy, sizeof(busy));
    }
  }
};

int ServerMain(const char* program) {
  Buffer source;
  Listener listener;
  Network& net = listener.net;
  net.Open(GetInfoWithGpu());
  listener.inbox.Open(net);
  printf("%s\n", Describe(net.info).c_str());
  std::string place = AllocOnGpu(net, source, kSourceSize, FI_WRITE);
  printf("Registered 1 buffer %s\n", place.c_str());
  printf("Run the client with the following command:\n  %s\n",
         ClientCommand(program, net).c_str());

  // One client after the other.
  for (;;) {
    AppConnectMessage connect;
    net.WaitUntil("waiting for a client", nullptr,
                  [&] { return listener.TakeConnect(connect); });
    listener.last_session = connect.base.session;
    try {
      RandomFillRequestState s(&source);
      s.HandleConnect(net, connect);
      s.net.housekeeping = [&listener, &s] {
        listener.TurnAway();
        s.Report();
      };
      s.net.WaitUntil("serving the client", s.client, [&s] {
        s.HandleMessages();
        s.ContinueMakePages();
        // Several each time: to read the completion queue, which comes next, is
        // a system call or more with some providers.
        for (size_t i = 0; i < kWritesPerPoll; ++i) s.ContinuePostWrite();
        return s.state == RandomFillRequestState::State::kDone;
      });
    } catch (const std::runtime_error& e) {
      // It costs this client its turn, and the others nothing.
      fprintf(stderr, "error: the client's turn is over: %s\n", e.what());
    }
  }
}

// ---------------------------------------------------------------------------
// Application: client
// ---------------------------------------------------------------------------

UsageError WrongProvider(const Address& address, const Network& net) {
  return {"the address " + address.ToString() + " is not one of provider " +
          net.info->fabric_attr->prov_name +
          "; was the server started with the same FI_PROVIDER?"};
}

// Takes out the next message of our session, if there is one.
bool TakeMessage(Network& net, Inbox& inbox, uint64_t session, Message& message,
                 AppMessageBase& base) {
  while (!inbox.arrivals.empty()) {
    message = inbox.Take(net);
    try {
      ReadMessage(message, &base, sizeof(base));
      if (base.session == session) return true;
    } catch (const std::runtime_error& e) {
      fprintf(stderr, "warning: %s\n", e.what());  // not from our server
    }
  }
  return false;
}

// Asks the server for its time until it has some. Returns the endpoint that
// will serve us.
Peer* Connect(Network& net, Inbox& inbox, Outbox& outbox, Peer* listener,
              const AppConnectMessage& connect) {
  bool told = false;
  for (int unanswered = 0; unanswered < kMaxUnanswered; ++unanswered) {
    outbox.Send(net, listener, &connect, sizeof(connect));
    int64_t end = Now() + kAskPeriod;
    bool answered = false;
    Message answer;
    AppMessageBase base;
    net.WaitUntil("asking the server", listener, [&] {
      answered = TakeMessage(net, inbox, connect.base.session, answer, base);
      return answered || Now() > end;
    });
    if (!answered) continue;
    if (base.type == AppMessageType::kAccept) {
      AppConnectMessage accept;
      ReadConnect(answer, accept);
      Peer* server = net.AddPeerAddress(accept.GetAddress());
      if (server == nullptr) throw BadMessage("an impossible address");
      printf("Sent CONNECT message to server\n");
      return server;
    }
    if (base.type != AppMessageType::kBusy) throw UnexpectedMessage(base);
    if (!told) printf("The server is busy; asking again until it is not.\n");
    told = true;
    unanswered = 0;
    Pause(kBusyPause);
  }
  throw std::runtime_error(
      "asking the server: no answer; is it running, the same program, with "
      "the same FI_PROVIDER?");
}

// Tells the server that it can forget us. Nothing depends on it any more: if it
// does not get through, the server notices our silence.
void SayBye(Network& net, Outbox& outbox, Peer* server, uint64_t session) {
  AppMessageBase bye = {AppMessageType::kBye, 0, session};
  bool sent = false;
  try {
    outbox.Send(net, server, &bye, sizeof(bye), nullptr, 0,
                [&sent](Network&, RdmaOp& op) { sent = op.error.empty(); });
    net.WaitUntil("saying BYE", server, [&sent] { return sent; });
  } catch (const std::runtime_error& e) {
    fprintf(stderr, "warning: %s\n", e.what());
  }
}

// Whether each page that was asked for is there, and nothing else.
bool CheckPages(const Buffer& buf, uint64_t seed,
                const std::vector<uint32_t>& page_idx, size_t page_size) {
  std::mt19937_64 generator(seed);
  std::vector<uint64_t> expected(page_size / sizeof(uint64_t));
  std::vector<uint64_t> received(page_size / sizeof(uint64_t));
  std::vector<bool> asked_for(buf.size / page_size);
  for (uint32_t idx : page_idx) {
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

int ClientMain(const Address& server_addr, size_t page_size, size_t num_pages,
               size_t total_repeat) {
  Buffer bufs[kBufferCount];
  Inbox inbox;
  Outbox outbox;
  Network net;
  net.Open(GetInfoWithGpu());
  inbox.Open(net);
  printf("%s\n", Describe(net.info).c_str());
  Peer* listener = net.AddPeerAddress(server_addr);
  if (listener == nullptr) throw WrongProvider(server_addr, net);
  if (page_size > net.info->ep_attr->max_msg_size) {
    throw UsageError{"PAGE_SIZE is more than this provider moves at a time, " +
                     std::to_string(net.info->ep_attr->max_msg_size)};
  }

  // Some pages more than will be written, which must stay as they are.
  size_t room = num_pages + num_pages / 8 + 1;
  std::string place;
  for (Buffer& buf : bufs) {
    place = AllocOnGpu(net, buf, room * page_size, FI_REMOTE_WRITE);
    buf.Clear();
  }
  printf("Registered %zu buffers %s\n", kBufferCount, place.c_str());

  AppConnectMessage connect = {};
  connect.base = {AppMessageType::kConnect, 0, net.random()};
  connect.SetAddress(net.addr);
  connect.num_mr = kBufferCount;
  for (size_t i = 0; i < kBufferCount; ++i) {
    // Who may write names a place by its address or, with providers that do
    // without FI_MR_VIRT_ADDR, by its distance from the start.
    bool virt_addr = net.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
    connect.mr[i] = {virt_addr ? reinterpret_cast<uint64_t>(bufs[i].data) : 0,
                     bufs[i].size, fi_mr_key(bufs[i].mr)};
  }
  Peer* server = Connect(net, inbox, outbox, listener, connect);

  // Where they go is as random as what is in them.
  std::vector<uint32_t> page_idx(room);
  for (size_t i = 0; i < room; ++i) page_idx[i] = static_cast<uint32_t>(i);
  std::shuffle(page_idx.begin(), page_idx.end(), net.random);
  page_idx.resize(num_pages);

  AppRandomFillMessage request = {};
  request.base = {AppMessageType::kRandomFill, 0, connect.base.session};
  request.remote_context = static_cast<uint32_t>(net.random()) | 1;
  request.seed = net.random();
  request.page_size = page_size;
  request.num_pages = num_pages;
  request.total_repeat = total_repeat;
  bool filled = false;
  net.AddRemoteWrite(request.remote_context,
                     [&filled](Network&, RdmaOp&) { filled = true; });
  outbox.Send(net, server, &request, sizeof(request), page_idx.data(),
              num_pages * sizeof(uint32_t));
  printf("Sent RandomFill request to server. page_size: %zu, num_pages: %zu\n",
         page_size, num_pages);

  Message message;
  AppMessageBase base;
  net.WaitUntil("waiting for the pages", server, [&] {
    while (TakeMessage(net, inbox, connect.base.session, message, base)) {
      if (base.type != AppMessageType::kProgress) throw UnexpectedMessage(base);
      ++server->progress;
    }
    return filled;
  });
  for (const Buffer& buf : bufs) {
    if (buf.is_cuda()) CudaFlushWrites(buf.cuda_device);
  }
  printf("Received RDMA WRITE to local memory.\n");
  SayBye(net, outbox, server, connect.base.session);

  for (size_t i = 0; i < kBufferCount; ++i) {
    if (!CheckPages(bufs[i], request.seed + i, page_idx, page_size)) {
      fprintf(stderr, "error: the data in buffer %zu is not correct\n", i);
      return 1;
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
  if (list == nullptr) throw NoInterface();
  // One interface may be there several times, with other capabilities each.
  std::vector<std::string> lines;
  for (struct fi_info* info = list; info != nullptr; info = info->next) {
    std::string line = Describe(info);
    if (std::find(lines.begin(), lines.end(), line) == lines.end()) {
      lines.push_back(line);
    }
  }
  fi_freeinfo(list);
  for (const std::string& line : lines) printf("%s\n", line.c_str());
  return 0;
}

void PrintUsage(FILE* file, const char* program) {
  fprintf(file, "Usage:\n");
  fprintf(file, "  %s\n", program);
  fprintf(file, "      Run the server.\n");
  fprintf(file, "  %s ADDRESS [PAGE_SIZE NUM_PAGES [REPEAT]]\n", program);
  fprintf(file,
          "      Have it write pages into our memory (65536 1000 500).\n");
  fprintf(file, "  %s --list\n", program);
  fprintf(file, "      List the interfaces found, the one it uses first.\n");
  fprintf(file, "  %s --help\n", program);
  fprintf(file, "      Print this.\n");
  fprintf(file,
          "ADDRESS is what the server prints. The provider is chosen by "
          "FI_PROVIDER.\n");
}

// A number of at least 1. Throws UsageError.
size_t ParseNumber(const char* name, const std::string& text) {
  size_t number = 0;
  const char* end = text.data() + text.size();
  auto result = std::from_chars(text.data(), end, number);
  if (result.ec != std::errc() || result.ptr != end || number == 0) {
    throw UsageError{std::string(name) + " is not a number of at least 1: \"" +
                     text.substr(0, 80) + "\""};
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
    if (args.size() == 1 && args[0] == "--list") return ListMain();
    if (args.size() > 4) throw UsageError{"too many arguments"};
    if (args.size() == 2) throw UsageError{"NUM_PAGES is missing"};
    size_t page_size = 65536;
    size_t num_pages = 1000;
    size_t total_repeat = 500;
    if (args.size() > 2) {
      page_size = ParseNumber("PAGE_SIZE", args[1]);
      num_pages = ParseNumber("NUM_PAGES", args[2]);
    }
    if (args.size() > 3) total_repeat = ParseNumber("REPEAT", args[3]);
    if (page_size % sizeof(uint64_t) != 0 || page_size > kMaxPageSize) {
      throw UsageError{"PAGE_SIZE is not a multiple of 8 up to " +
                       std::to_string(kMaxPageSize)};
    }
    if (num_pages > kMaxPages ||
        num_pages > kSourceSize / kBufferCount / page_size) {
      throw UsageError{"that does not fit: at most " +
                       std::to_string(kMaxPages) + " pages and " +
                       std::to_string(kSourceSize / kBufferCount) + " bytes"};
    }
    if (total_repeat > kMaxRepeat) {
      throw UsageError{"REPEAT is more than " + std::to_string(kMaxRepeat)};
    }
    return ClientMain(Address::Parse(args[0]), page_size, num_pages,
                      total_repeat);
  } catch (const UsageError& e) {
    fprintf(stderr, "error: %s\n", e.message.c_str());
    PrintUsage(stderr, program);
    return 2;
  } catch (const Interrupted&) {
    if (args.empty()) return 0;  // how a server ends
    fprintf(stderr, "error: interrupted\n");
    return 1;
  } catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
