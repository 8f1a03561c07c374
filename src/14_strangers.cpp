// 14_strangers: a server that anyone may reach.
//
// It believes nothing that it is sent, limits what each client may take, and
// tells a client that it cannot serve. Strangers cost the others nothing.
//
// Based on 7_queue.

#include <fcntl.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <charconv>
#include <chrono>
#include <cmath>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// ---- Constants ----

// The version of libfabric's interface that we ask for: the newest that we
// know, but no newer than the headers, because an older library would offer
// nothing.
constexpr uint32_t kApiVersion =
    std::min(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION), FI_VERSION(2, 0));

// What this program uses of libfabric: the capabilities of fi_getinfo(3).
constexpr uint64_t kCaps = FI_MSG | FI_RMA;

constexpr size_t kMaxAddressSize = 256;           // bytes
constexpr size_t kMaxMessageSize = 64 * 1024;     // bytes
constexpr size_t kBufferAlign = 4096;             // bytes
constexpr size_t kHugePageSize = 2 << 20;         // bytes
constexpr size_t kRecvCount = 8;                  // RECVs posted at a time
constexpr size_t kSpareOps = 16;                  // rest before they are reused
constexpr size_t kCompletionQueueSize = 8192;     // more than we ever need
constexpr size_t kCompletionQueueReadCount = 16;  // entries read at a time
constexpr auto kSilenceLimit = 10s;               // then we give up
constexpr auto kIdlePause = 1ms;      // between two looks at quiet queues
constexpr auto kQuietLimit = 2s;      // of silence, then we poll slowly
constexpr auto kContactGrace = 1s;    // for a first or last message
constexpr size_t kMaxClients = 8;     // that are served at a time
constexpr size_t kMaxWaiting = 1000;  // clients that wait to be served
constexpr auto kAskPeriod = 1s;       // in line, then a client is to ask again
constexpr size_t kMaxContacts = 256;  // that are told from one endpoint
constexpr auto kTellGrace = 2s;       // for what it is told to arrive

constexpr size_t kMaxPageSize = 16 << 20;     // bytes
constexpr size_t kMaxTransfer = 512 << 20;    // bytes, all pages of all clients
constexpr size_t kMaxRepeat = 1'000'000'000;  // times that pages are written

// Limits of the WRITEs in flight to a client. Without the limit in bytes, a
// message would have to queue behind gigabytes. Most providers have no room for
// so many WRITEs, and say so; the limit in WRITEs is for those that never do.
constexpr size_t kMaxOutstandingWrites = 4096;
constexpr size_t kMaxOutstandingBytes = 16 << 20;

// WRITEs that are posted each time that the completion queue is read.
constexpr size_t kWritesPerPoll = 16;

// After so many polls without a completion, a loop gives the core to others.
// Not after each poll: one may move data without completing anything, and the
// others may keep the core for long.
constexpr size_t kPollsPerYield = 64;

constexpr auto kListenPeriod = 1ms;  // between two looks for new clients
constexpr auto kReportPeriod = 1s;   // between two reports of progress

// ---- Errors, signals, text ----

// Describes an error number of libfabric (fi_errno(3)).
std::string ErrorText(int error) {
  std::string text = fi_strerror(error);
  if (error == FI_ENOMEM) {
    text += " (is the limit of locked memory, `ulimit -l`, too low?)";
  }
  return text;
}

// Throws if a call has failed: it has then returned an error number, with a
// minus sign.
void FiCheck(ssize_t result, const std::string& call) {
  if (result >= 0) return;
  throw std::runtime_error(call + ": " + ErrorText(int(-result)));
}

// Owns an object of libfabric, and closes it. C++ destroys objects in reverse
// order, so each one is declared after those that it uses.
template <typename T>
struct Owned {
  T* ptr = nullptr;

  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  operator T*() const { return ptr; }
  T* operator->() const { return ptr; }
  ~Owned() {
    int ret = ptr != nullptr ? fi_close(&ptr->fid) : 0;
    if (ret != 0) fprintf(stderr, "warning: fi_close: %s\n", fi_strerror(-ret));
  }
};

// Set by the first signal that asks us to end. All loops look at it, so that
// everything is closed on the way out.
std::atomic<bool> g_interrupted = false;

// Called for a signal: the loops end, and a second signal ends the process.
void HandleSignal(int) {
  g_interrupted = true;
  // A second one, of any kind, ends the process at once.
  for (int signum : {SIGINT, SIGTERM, SIGHUP}) signal(signum, SIG_DFL);
}

// Has HandleSignal called for the signals that ask a process to end.
void InstallSignalHandlers() {
  for (int signum : {SIGINT, SIGTERM, SIGHUP}) signal(signum, HandleSignal);
  signal(SIGPIPE, SIG_IGN);  // `| head` must not end us before we have closed
}

// Throws after a signal that asks us to end.
void CheckInterrupted() {
  if (g_interrupted) throw std::runtime_error("interrupted");
}

// Replaces whatever in a text from the other side could deceive on a terminal:
// all that is not plain ASCII.
std::string Printable(std::string text) {
  for (char& c : text) c = c < ' ' || c > '~' ? '?' : c;
  return text;
}

// ---- Addresses ----

// The address of an endpoint. Only its provider knows what the bytes mean, and
// how many there are.
using Address = std::vector<uint8_t>;

// Returns an address as hexadecimal digits, to be typed into another terminal.
std::string ToHex(const Address& address) {
  std::string hex;
  for (uint8_t byte : address) {
    hex += "0123456789abcdef"[byte / 16];
    hex += "0123456789abcdef"[byte % 16];
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
    address.push_back(uint8_t(std::stoul(hex.substr(i, 2), nullptr, 16)));
  }
  return address;
}

// ---- Domain and buffers ----

// Returns the setting of FI_PROVIDER, as one types it; empty if there is none.
std::string ProviderSetting() {
  const char* provider = getenv("FI_PROVIDER");
  return provider ? "FI_PROVIDER='" + std::string(provider) + "' " : "";
}

// What fi_getinfo answers, and the function that frees it.
using Info = std::unique_ptr<fi_info, void (*)(fi_info*)>;

// 1. Ask: which interfaces can do what we need (`caps`)? Only `same`, if it is
// given.
Info GetInfo(uint64_t caps = kCaps, const fi_info* same = nullptr) {
  Info hints(fi_allocinfo(), fi_freeinfo);
  hints->caps = caps;                // we want to send messages, and to WRITE
  hints->ep_attr->type = FI_EP_RDM;  // reliably, to any number of peers,
  hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;  // and hear of their arrival
  // Demands that we can meet.
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY;
  if (caps & FI_HMEM) hints->domain_attr->mr_mode |= FI_MR_HMEM;
  // Messages to the same peer must arrive in the order of their SENDs.
  hints->tx_attr->msg_order = FI_ORDER_SAS;
  hints->rx_attr->msg_order = FI_ORDER_SAS;
  // Only one thread uses the domain, so the provider needs no locks.
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  if (same != nullptr) {
    hints->fabric_attr->prov_name = strdup(same->fabric_attr->prov_name);
    hints->fabric_attr->name = strdup(same->fabric_attr->name);
    hints->domain_attr->name = strdup(same->domain_attr->name);
  }
  fi_info* info;  // a list, the best one first
  FiCheck(
      fi_getinfo(kApiVersion, nullptr, nullptr, 0, hints.get(), &info),
      ProviderSetting() +
          "fi_getinfo finds no interface that can do what this program needs "
          "(`fi_info -t FI_EP_RDM` lists what there is; shm needs room in "
          "/dev/shm)");
  return Info(info, fi_freeinfo);
}

// Returns the speed of the link in Gbps; 0 if it is not known. Only adapters
// have a NIC: the software providers leave it null.
double LinkGbps(const fi_info* info) {
  if (info->nic == nullptr || info->nic->link_attr == nullptr) return 0;
  return static_cast<double>(info->nic->link_attr->speed) * 1e-9;
}

// Describes the adapter, as far as libfabric tells; empty without one.
std::string DescribeNic(const fi_info* info) {
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
std::string Describe(const fi_info* info) {
  return "domain: " + std::string(info->domain_attr->name) +
         ", fabric: " + info->fabric_attr->name +
         ", provider: " + info->fabric_attr->prov_name + DescribeNic(info);
}

// 2. The network, and in it our access to the adapter.
struct Domain {
  Info info;
  Owned<fid_fabric> fabric;
  Owned<fid_domain> handle;
  std::random_device random{"/dev/urandom"};  // the default may take 25 us
  // Makes a WRITE complete only when the data is in the peer's memory. 0 where
  // it is there by then anyway.
  uint64_t write_flags = FI_DELIVERY_COMPLETE;

  // Opens the first interface of a list.
  explicit Domain(Info list) : info(std::move(list)) {
    printf("%s\n", Describe(info.get()).c_str());
    FiCheck(fi_fabric(info->fabric_attr, &fabric.ptr, nullptr), "fi_fabric");
    FiCheck(fi_domain(fabric, info.get(), &handle.ptr, nullptr), "fi_domain");
    // Over shm a WRITE is copied before it completes, even if we ask for no
    // level. If we ask, the provider of libfabric 1.17 has the other side copy
    // it under a lock, and waits for ever if that side is killed. It copies GPU
    // memory in no other way.
    if (strcmp(info->fabric_attr->prov_name, "shm") == 0 &&
        (info->caps & FI_HMEM) == 0) {
      write_flags = 0;
    }
  }

  // Returns a key that no stranger guesses, as wide as the provider's keys are.
  uint64_t RandomKey() {
    uint64_t key = uint64_t{random()} << 32 | random();
    size_t bits = 8 * info->domain_attr->mr_key_size;
    return bits < 64 ? key & ((uint64_t{1} << bits) - 1) : key;
  }

  // Returns the greatest length of a message, in bytes. Server and client use
  // the same provider, so it is the same for both.
  size_t MaxMessageSize() const {
    return std::min(kMaxMessageSize, info->ep_attr->max_msg_size);
  }
};

// Memory, and the function that frees it.
using Memory = std::unique_ptr<uint8_t[], void (*)(void*)>;

// Allocates zeroed memory. Writing the zeros makes sure that every page of it
// exists, which a provider may demand before registration (FI_MR_ALLOCATED).
Memory AllocHost(size_t size) {
  size_t align = kBufferAlign;
  // Large buffers are on huge pages, which need fewer entries in the page
  // tables and in the adapter's copy of them.
  if (size >= kHugePageSize) align = kHugePageSize;
  size_t rounded = (size + align - 1) / align * align;
  Memory data(static_cast<uint8_t*>(aligned_alloc(align, rounded)), free);
  if (data == nullptr) {
    throw std::runtime_error("no memory for " + std::to_string(size) +
                             " bytes");
  }
  if (align == kHugePageSize) madvise(data.get(), rounded, MADV_HUGEPAGE);
  memset(data.get(), 0, rounded);
  return data;
}

// Memory of a GPU. All calls of CUDA are at the end of this file.
int FindGpu();  // -1 if there is none
Memory CudaAlloc(size_t size);
void CudaCopy(void* to, const void* from, size_t size);
bool CudaFlushWrites(int gpu);

// 3. Registered memory: the adapter may use it, for FI_SEND, FI_RECV ...
struct Buffer {
  size_t size;  // bytes
  int gpu;      // that has the memory; -1: the host
  Memory data;
  Owned<fid_mr> mr;

  Buffer(Domain& domain, size_t bytes, uint64_t access, int on_gpu = -1)
      : size(bytes),
        gpu(on_gpu),
        data(gpu < 0 ? AllocHost(bytes) : CudaAlloc(bytes)) {
    iovec iov = {.iov_base = data.get(), .iov_len = size};
    fi_mr_attr attr = {};
    attr.mr_iov = &iov;
    attr.iov_count = 1;
    attr.access = access;
    if (gpu >= 0) {
      attr.iface = FI_HMEM_CUDA;
      attr.device.cuda = gpu;
    }
    // Used by providers that let us choose the key (those without
    // FI_MR_PROV_KEY). No two regions of a domain may have the same one.
    int ret = 0;
    do {
      attr.requested_key = domain.RandomKey();
      ret = fi_mr_regattr(domain.handle, &attr, 0, &mr.ptr);
    } while (ret == -FI_ENOKEY);
    FiCheck(ret, "fi_mr_regattr of " + std::to_string(size) + " bytes");
  }

  // Copies into the buffer, from host memory.
  void CopyIn(size_t offset, const void* from, size_t len) {
    if (gpu >= 0) return CudaCopy(&data[offset], from, len);
    memcpy(&data[offset], from, len);
  }

  // Copies out of the buffer, to host memory.
  void CopyOut(size_t offset, void* to, size_t len) const {
    if (gpu >= 0) return CudaCopy(to, &data[offset], len);
    memcpy(to, &data[offset], len);
  }
};

// ---- Operations and completions ----

// The kinds of operations.
enum class RdmaOpType { kRecv, kSend, kWrite };

// Returns the name of an operation, for error messages.
const char* NameOf(RdmaOpType type) {
  switch (type) {
    case RdmaOpType::kRecv:
      return "RECV";
    case RdmaOpType::kSend:
      return "SEND";
    case RdmaOpType::kWrite:
      return "WRITE";
  }
  return "";
}

// A work request: an operation for libfabric to do, and the function to call
// once when it is done, which may post others.
struct RdmaOp {
  fi_context2 context = {};  // must come first: for the provider's notes
  RdmaOpType type = RdmaOpType::kRecv;
  fi_addr_t peer = FI_ADDR_UNSPEC;  // of a SEND; a RECV takes from anybody
  Buffer* buf = nullptr;
  size_t len = 0;            // bytes; of a RECV, set when a message has arrived
  size_t offset = 0;         // of a WRITE, in buf
  uint64_t remote_addr = 0;  // of a WRITE: where to, as the owner has said
  uint64_t remote_key = 0;   // of a WRITE: from the owner of the memory, too
  uint32_t imm_data = 0;     // of a WRITE; 0 means none; efa carries 4 bytes
  std::function<void(const RdmaOp&)> callback = nullptr;
  std::string error = {};  // set at completion; empty if all went well
  bool in_flight = false;  // libfabric has it, and has not ended it

  // Returns whether the peer's program takes no part in it.
  bool OneSided() const {
    return type != RdmaOpType::kRecv && type != RdmaOpType::kSend;
  }

  // Throws if the operation has failed.
  void Check() const {
    if (error.empty()) return;
    std::string hint;
    if (type != RdmaOpType::kRecv) hint = "; is the other side still running?";
    if (OneSided()) hint += " Or has it refused the access?";
    throw std::runtime_error(std::string(NameOf(type)) + " failed: " + error +
                             hint);
  }
};

// 4. An endpoint, with an address vector and a completion queue.
struct Endpoint {
  Domain& domain;
  std::deque<RdmaOp> ops;        // as many as were ever in use, and a few more
  std::deque<RdmaOp*> free_ops;  // not in use; the one to use next comes first
  std::deque<RdmaOp*> pending_ops;  // waiting to be handed over, in order
  uint64_t eagain_count = 0;        // times there was no room (-FI_EAGAIN)
  Clock::time_point silent_since = Clock::now();  // see CheckSilence
  // Called with the immediate data of a WRITE from the other side, once that
  // WRITE has arrived. It belongs to no operation of ours.
  std::function<void(uint32_t)> on_imm_data;
  Address addr;  // our own

  Owned<fid_av> av;  // the addresses of our peers
  Owned<fid_cq> cq;  // how our operations have ended
  Owned<fid_eq> eq;  // what happens to the endpoint
  Owned<fid_ep> ep;  // where we post them

  explicit Endpoint(Domain& open_domain) : domain(open_domain) {
    fi_av_attr av_attr = {};
    fi_cq_attr cq_attr = {};
    cq_attr.size = kCompletionQueueSize;
    cq_attr.format = FI_CQ_FORMAT_DATA;  // what we want to know of each
    FiCheck(fi_av_open(domain.handle, &av_attr, &av.ptr, nullptr),
            "fi_av_open");
    FiCheck(fi_cq_open(domain.handle, &cq_attr, &cq.ptr, nullptr),
            "fi_cq_open");
    // Without an event queue, the efa provider ends the process on some errors
    // of a peer. We never read it: such a peer falls silent, and we notice.
    fi_eq_attr eq_attr = {};
    FiCheck(fi_eq_open(domain.fabric, &eq_attr, &eq.ptr, nullptr),
            "fi_eq_open");
    FiCheck(fi_endpoint(domain.handle, domain.info.get(), &ep.ptr, nullptr),
            "fi_endpoint");
    // The shm provider has just put handlers of its own before ours. They
    // delete our shared memory at once, and then the other side may crash.
    if (!g_interrupted) InstallSignalHandlers();
    FiCheck(fi_ep_bind(ep, &av->fid, 0), "fi_ep_bind");
    FiCheck(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
    FiCheck(fi_ep_bind(ep, &eq->fid, 0), "fi_ep_bind");
    FiCheck(fi_enable(ep), "fi_enable");

    size_t length = kMaxAddressSize;
    addr.resize(length);
    FiCheck(fi_getname(&ep->fid, addr.data(), &length), "fi_getname");
    addr.resize(length);
  }

  // Returns whether an address can be one of our provider's.
  bool IsLikeOurs(const Address& address) const {
    uint32_t format = domain.info->addr_format;
    // One that is a name ends with a zero byte and begins as ours does.
    if (format == FI_ADDR_STR) {
      return !address.empty() && address.back() == 0 &&
             address.front() == addr.front();
    }
    // Any other is as long as ours. An internet address begins with its family,
    // and libfabric would expect another family of all addresses after it.
    bool internet = format == FI_SOCKADDR_IN || format == FI_SOCKADDR_IN6;
    return address.size() == addr.size() &&
           std::equal(addr.begin(), addr.begin() + (internet ? 2 : 0),
                      address.begin());
  }

  // Returns libfabric's number for a peer's address, which operations take
  // instead of it. Nothing is sent, so a peer that does not exist shows later,
  // as an error or as silence.
  fi_addr_t AddPeerAddress(const Address& address) {
    fi_addr_t peer = FI_ADDR_UNSPEC;
    if (!IsLikeOurs(address) ||
        fi_av_insert(av, address.data(), 1, &peer, 0, nullptr) != 1) {
      throw std::runtime_error("\"" + ToHex(address) +
                               "\" is not an address of provider " +
                               domain.info->fabric_attr->prov_name +
                               "; do both sides use the same FI_PROVIDER?");
    }
    return peer;
  }

  // 5. Hands an operation to libfabric, or keeps it until there is room. Its
  // buffer must not change until it has completed. Once one operation has to
  // wait, all later ones wait behind it, so that none overtakes another.
  void Post(RdmaOp request) {
    while (free_ops.size() < kSpareOps) {
      free_ops.push_back(&ops.emplace_back());
    }
    RdmaOp* op = free_ops.front();
    *op = std::move(request);
    free_ops.pop_front();
    pending_ops.push_back(op);
    ProgressPendingOps();
  }

  // Returns whether libfabric has taken everything that was posted.
  bool HasRoom() const { return pending_ops.empty(); }

  // Hands over what is waiting, as far as libfabric has room. An operation that
  // libfabric refuses completes at once, with an error.
  void ProgressPendingOps() {
    while (!pending_ops.empty()) {
      RdmaOp* op = pending_ops.front();
      ssize_t ret = Submit(op);
      if (ret == -FI_EAGAIN) {
        ++eagain_count;
        return;  // reading completions makes room
      }
      pending_ops.pop_front();
      op->in_flight = true;
      if (ret != 0) Complete(op, 0, ErrorText(int(-ret)));
    }
  }

  // Calls the function of libfabric for an operation.
  ssize_t Submit(RdmaOp* op) {
    uint8_t* data = &op->buf->data[op->offset];
    void* desc = fi_mr_desc(op->buf->mr);
    if (op->OneSided()) {
      iovec iov = {.iov_base = data, .iov_len = op->len};
      fi_rma_iov remote = {
          .addr = op->remote_addr, .len = op->len, .key = op->remote_key};
      fi_msg_rma msg = {};
      msg.msg_iov = &iov;
      msg.desc = &desc;
      msg.iov_count = 1;
      msg.addr = op->peer;
      msg.rma_iov = &remote;
      msg.rma_iov_count = 1;
      msg.context = op;
      msg.data = op->imm_data;
      uint64_t imm_flag = op->imm_data != 0 ? FI_REMOTE_CQ_DATA : 0;
      return fi_writemsg(ep, &msg, domain.write_flags | imm_flag);
    }
    if (op->type == RdmaOpType::kRecv) {
      return fi_recv(ep, data, op->len, desc, op->peer, op);
    }
    return fi_send(ep, data, op->len, desc, op->peer, op);
  }

  // Reads what has completed and calls back. Many providers work only while we
  // read. Returns the number of completions. Throws if a callback does.
  size_t PollCompletion() {
    ProgressPendingOps();
    fi_cq_data_entry cqe[kCompletionQueueReadCount];
    ssize_t ret = fi_cq_read(cq, cqe, kCompletionQueueReadCount);
    if (ret == -FI_EAGAIN) return 0;
    if (ret == -FI_EAVAIL) {
      ReadError();
      return 1;
    }
    FiCheck(ret, "fi_cq_read");
    // A callback that throws must not cost the entries after it.
    std::exception_ptr failure;
    for (ssize_t i = 0; i < ret; ++i) {
      try {
        // Some versions of shm report such a WRITE without FI_REMOTE_WRITE.
        if ((cqe[i].flags & (FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA)) &&
            !(cqe[i].flags & (FI_RECV | FI_WRITE))) {
          if (on_imm_data) on_imm_data(uint32_t(cqe[i].data));
          continue;
        }
        Complete(cqe[i].op_context, cqe[i].len, "");
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
    return size_t(ret);
  }

  // Ends an operation: its record is free for another one. Calls back.
  void Complete(void* context, size_t len, const std::string& error) {
    if (context == nullptr) return;  // not an operation of ours
    auto* op = static_cast<RdmaOp*>(context);
    // An adapter may report an operation that has completed a second time, as
    // failed: the peer did not get its receipt.
    if (!op->in_flight) return;
    RdmaOp done = std::move(*op);
    op->in_flight = false;
    free_ops.push_back(op);
    // A SEND may complete on this side alone, a RECV takes anybody's message:
    // they say nothing about the peer.
    if (done.OneSided() && error.empty()) RestartSilence();
    done.error = error;
    if (done.type == RdmaOpType::kRecv && error.empty()) {
      if (len > done.len) done.error = "the message is longer than the buffer";
      done.len = len;
    }
    done.callback(done);
  }

  // Reads a failed operation, which is the next entry of the completion queue.
  // Only fi_cq_readerr can read it.
  void ReadError() {
    fi_cq_err_entry entry = {};
    FiCheck(fi_cq_readerr(cq, &entry, 0), "fi_cq_readerr");
    std::string error = ErrorText(entry.err);
    const char* detail =
        fi_cq_strerror(cq, entry.prov_errno, entry.err_data, nullptr, 0);
    if (detail != nullptr && error != detail) {
      error += " (" + std::string(detail) + ")";
    }
    // Some providers do not say which operation has failed, and it may be one
    // from the other side.
    if (entry.op_context == nullptr ||
        (entry.flags & (FI_REMOTE_READ | FI_REMOTE_WRITE))) {
      throw std::runtime_error("an operation failed: " + error);
    }
    // A second report about a RECV says nothing of what uses its record now.
    if ((entry.flags & FI_RECV) &&
        static_cast<RdmaOp*>(entry.op_context)->OneSided()) {
      return;
    }
    Complete(entry.op_context, 0, error);
  }

  // Polls until `done` returns true. Error messages begin with `what`. During
  // the first `grace`, it goes on in spite of a signal. Only a client waits
  // like this; a server must not, because all its clients would have to wait,
  // too.
  void WaitUntil(const char* what, const std::function<bool()>& done,
                 Clock::duration grace = 0s,
                 std::chrono::seconds limit = kSilenceLimit) {
    Clock::time_point start = Clock::now();
    RestartSilence();
    size_t polls = 0;
    while (!done()) {
      if (g_interrupted && Clock::now() - start >= grace) CheckInterrupted();
      size_t completions = PollCompletion();
      if (++polls % kPollsPerYield != 0) continue;
      CheckSilence(what, limit);
      if (completions > 0) continue;
      if (Clock::now() - silent_since > kQuietLimit) {
        std::this_thread::sleep_for(kIdlePause);
      } else {
        // The other side may need the core to answer us.
        std::this_thread::yield();
      }
    }
  }

  // Begins to count the silence anew.
  void RestartSilence() { silent_since = Clock::now(); }

  // Throws after too long a silence of the peer: some providers never report
  // that a peer has gone, and silence is all that there is to notice.
  void CheckSilence(const char* what,
                    std::chrono::seconds limit = kSilenceLimit) const {
    if (Clock::now() - silent_since < limit) return;
    throw std::runtime_error(
        std::string(what) + ": nothing has happened for " +
        std::to_string(limit.count()) +
        " s; is the other side running, with the same FI_PROVIDER?");
  }
};

// ---- Messages and sessions ----

using Message = std::string;  // any bytes

// The kinds of messages, and who sends them.
enum class AppMessageType : uint32_t {
  kConnect = 1,  // client: this is my address
  kAccept = 2,   // server: this is the address of the endpoint that serves you
  kBye = 3,      // client: I want nothing more
  kWait = 4,     // server: I can't serve you yet; ask again
  kRefused = 5,  // server: I end this session; followed by the reason

  kRandomFill = 6,  // client: fill my memory
  kProgress = 7,    // server: I am still at it
};

// The beginning of each message. A stranger may know an address, too, but not
// the number that the client has chosen for its conversation with the server.
struct AppMessageBase {
  AppMessageType type;
  uint32_t nonce = 0;  // set by Session::Send
};

// A CONNECT or an ACCEPT.
struct AppConnectMessage {
  AppMessageBase base;
  uint32_t addr_size;  // bytes used of addr
  uint8_t addr[kMaxAddressSize];
};

// Numbers travel as they are in memory, so both sides need the same byte order.
static_assert(std::endian::native == std::endian::little,
              "the numbers in messages are little-endian");

// Returns what to throw for a message that cannot be right.
std::runtime_error BadMessage(const std::string& what) {
  return std::runtime_error("bad message: " + what);
}

// Returns the beginning of a message; zeros if it is too short to have one.
AppMessageBase BaseOf(const Message& message) {
  AppMessageBase base = {};
  if (message.size() >= sizeof(base)) {
    memcpy(&base, message.data(), sizeof(base));
  }
  return base;
}

// Returns the type of a message; 0 if it is too short to have one.
AppMessageType TypeOf(const Message& message) { return BaseOf(message).type; }

// Copies the beginning of a message into a struct that starts with an
// AppMessageBase. Throws if the message is too short for it, or of another
// type.
template <typename T>
T ReadMessage(const Message& message, AppMessageType type) {
  if (message.size() < sizeof(T) || TypeOf(message) != type) {
    throw BadMessage(std::to_string(message.size()) + " bytes of type " +
                     std::to_string(uint32_t(TypeOf(message))));
  }
  T head;
  memcpy(&head, message.data(), sizeof(head));
  return head;
}

// Returns a CONNECT or an ACCEPT. Throws if it is not a valid one.
AppConnectMessage ReadConnect(const Message& message, AppMessageType type) {
  auto connect = ReadMessage<AppConnectMessage>(message, type);
  if (message.size() != sizeof(connect) ||
      connect.addr_size > sizeof(connect.addr)) {
    throw BadMessage("its sizes do not fit together");
  }
  return connect;
}

// Returns the address that a CONNECT or an ACCEPT carries.
Address AddressIn(const AppConnectMessage& connect) {
  return {connect.addr, connect.addr + connect.addr_size};
}

// Does the reverse of ReadMessage: the bytes of a struct, and of a tail.
template <typename T>
Message WriteMessage(const T& head, std::string_view tail = {}) {
  // Padding would carry whatever was in memory there.
  static_assert(std::has_unique_object_representations_v<T>);
  Message message(reinterpret_cast<const char*>(&head), sizeof(head));
  return std::move(message.append(tail));
}

// An endpoint, and messages from and to those who know its address.
struct Mailbox {
  Domain& domain;
  std::list<Buffer> bufs;               // of all RECVs and SENDs
  std::deque<RdmaOp> arrivals;          // completed RECVs
  std::vector<Buffer*> free_send_bufs;  // those without a message
  size_t unsent = 0;                    // messages whose SEND has not completed
  Endpoint endpoint;

  explicit Mailbox(Domain& open_domain)
      : domain(open_domain), endpoint(open_domain) {
    for (size_t i = 0; i < kRecvCount; ++i) {
      PostRecv(bufs.emplace_back(domain, domain.MaxMessageSize(), FI_RECV));
    }
  }

  // Posts a RECV: the next message, from anybody, goes into `buf`.
  void PostRecv(Buffer& buf) {
    auto arrived = [this](const RdmaOp& op) { arrivals.push_back(op); };
    endpoint.Post({.type = RdmaOpType::kRecv,
                   .buf = &buf,
                   .len = buf.size,
                   .callback = arrived});
  }

  // Takes out the next message, if there is one. Throws if its RECV has failed:
  // it was too long, for example.
  std::optional<Message> Take() {
    if (arrivals.empty()) return std::nullopt;
    RdmaOp recv = std::move(arrivals.front());
    arrivals.pop_front();
    auto* data = recv.buf->data.get();
    Message message(data, data + (recv.error.empty() ? recv.len : 0));
    PostRecv(*recv.buf);
    recv.Check();
    return message;
  }

  // Sends a copy of a message.
  void Send(fi_addr_t peer, const Message& message) {
    if (message.size() > domain.MaxMessageSize()) {
      throw std::runtime_error("a message of " +
                               std::to_string(message.size()) +
                               " bytes is too long for this provider");
    }
    if (free_send_bufs.empty()) {
      free_send_bufs.push_back(
          &bufs.emplace_back(domain, domain.MaxMessageSize(), FI_SEND));
    }
    Buffer* buf = free_send_bufs.back();
    free_send_bufs.pop_back();
    std::copy(message.begin(), message.end(), buf->data.get());
    ++unsent;
    endpoint.Post({.type = RdmaOpType::kSend,
                   .peer = peer,
                   .buf = buf,
                   .len = message.size(),
                   .callback = [this](const RdmaOp& op) {
                     op.Check();
                     --unsent;
                     free_send_bufs.push_back(op.buf);
                   }});
  }
};

// One end of a conversation: an endpoint, and messages from and to one peer.
// The server has a session for each client. Destroying it also ends whatever
// was in flight to that client, and only closing the endpoint can do that.
struct Session {
  Mailbox mailbox;
  Endpoint& endpoint;  // that of the mailbox
  fi_addr_t peer = FI_ADDR_UNSPEC;
  uint32_t nonce = 0;          // of this conversation
  Clock::time_point leave_at;  // until then, the last messages may leave
  bool waiting = false;        // client: has been told to

  explicit Session(Domain& domain)
      : mailbox(domain), endpoint(mailbox.endpoint) {}

  // Takes out the next message of our peer, if there is one. Those without the
  // nonce, and those that are too long, are from somebody else. Throws if the
  // server has refused what we want.
  std::optional<Message> Take() {
    while (!mailbox.arrivals.empty()) {
      Message message;
      try {
        message = *mailbox.Take();
      } catch (const std::runtime_error&) {
        continue;
      }
      AppMessageBase base = BaseOf(message);
      if (base.nonce != nonce) continue;
      endpoint.RestartSilence();
      if (base.type == AppMessageType::kRefused) {
        throw std::runtime_error("the server has refused: " +
                                 Printable(message.c_str() + sizeof(base)));
      }
      return message;
    }
    return std::nullopt;
  }

  // Sends a message: a head of fixed size, and a tail.
  template <typename T>
  void Send(const T& head, std::string_view tail = {}) {
    Message message = WriteMessage(head, tail);
    memcpy(&message[offsetof(AppMessageBase, nonce)], &nonce, sizeof(nonce));
    mailbox.Send(peer, message);
  }

  // Sends our address: in a CONNECT or an ACCEPT.
  void SendAddress(AppMessageType type) {
    AppConnectMessage connect = {};
    connect.base.type = type;
    connect.addr_size = uint32_t(endpoint.addr.size());
    std::copy(endpoint.addr.begin(), endpoint.addr.end(), connect.addr);
    Send(connect);
  }

  // Server: tells a client which endpoint serves it.
  void Accept(const AppConnectMessage& connect) {
    peer = endpoint.AddPeerAddress(AddressIn(connect));
    nonce = connect.base.nonce;
    SendAddress(AppMessageType::kAccept);
  }

  // Server: tells the client why the session ends.
  void Refuse(const std::string& reason) {
    Send(AppMessageBase{AppMessageType::kRefused}, reason);
    leave_at = Clock::now() + kContactGrace;
  }

  // Returns whether the last messages have left, or have had time to.
  bool HasLeft() {
    try {
      if (Clock::now() < leave_at) endpoint.PollCompletion();
    } catch (const std::exception&) {
      return true;
    }
    return mailbox.unsent == 0 || Clock::now() >= leave_at;
  }

  // Client: asks the server for an endpoint of its own, and waits for it.
  void Connect(const Address& server_addr) {
    peer = endpoint.AddPeerAddress(server_addr);
    nonce = std::random_device()();
    // A signal may come before the first contact, or wait for it. In between,
    // the shm provider of libfabric 1.17 would end the other process with ours.
    CheckInterrupted();
    SendAddress(AppMessageType::kConnect);
    // Until we are served, we leave the cores to those who are.
    endpoint.WaitUntil(
        "sending CONNECT",
        [this] {
          std::this_thread::sleep_for(kIdlePause);
          return mailbox.unsent == 0;
        },
        kContactGrace);
    printf("Sent CONNECT message to server\n");
    endpoint.WaitUntil("waiting for ACCEPT", [this] {
      std::this_thread::sleep_for(kIdlePause);
      return IsAccepted();
    });
  }

  // Client: returns whether the server has accepted us. It answers each CONNECT
  // once: with an ACCEPT or, if it can't serve us yet, a second later with a
  // WAIT. Then we ask again, which shows that we are still there.
  bool IsAccepted() {
    std::optional<Message> message = Take();
    if (!message) return false;
    if (TypeOf(*message) == AppMessageType::kWait) {
      if (!waiting) printf("The server can't serve us yet: waiting\n");
      waiting = true;
      SendAddress(AppMessageType::kConnect);
    }
    if (TypeOf(*message) != AppMessageType::kAccept) return false;
    peer = endpoint.AddPeerAddress(
        AddressIn(ReadConnect(*message, AppMessageType::kAccept)));
    return true;
  }

  // Client: tells the server that we want nothing more, which spares it waiting
  // for our silence.
  void SayBye(std::chrono::seconds limit = kSilenceLimit) {
    try {
      Send(AppMessageBase{AppMessageType::kBye});
      endpoint.WaitUntil(
          "saying BYE", [this] { return mailbox.unsent == 0; }, kContactGrace,
          limit);
    } catch (const std::runtime_error&) {
      // The server will notice our silence.
    }
  }
};

// The clients that wait to be served. After a second in line it tells them to
// ask again and forgets them, so only those who are still there stay in it.
struct WaitingLine {
  struct Visitor {
    AppConnectMessage connect;
    Clock::time_point since = Clock::now();
  };
  Domain& domain;
  std::deque<Visitor> visitors = {};
  std::deque<Visitor> untold = {};  // no longer in line, and to be told
  // From which they are told. Their addresses may be invented, and closing it
  // ends whatever is on its way to them.
  std::optional<Endpoint> endpoint = {};
  std::map<Address, fi_addr_t> contacts = {};  // in its address vector
  Clock::time_point close_at = {};

  // Takes a CONNECT. No address stands in line twice.
  void Add(const AppConnectMessage& connect) {
    for (Visitor& visitor : visitors) {
      if (AddressIn(visitor.connect) != AddressIn(connect)) continue;
      visitor.connect = connect;
      return;
    }
    if (visitors.size() < kMaxWaiting) visitors.push_back({connect});
  }

  // Takes all CONNECTs that have come. A message that is none must not hold up
  // those behind it.
  void AddAll(Mailbox& listener) {
    for (size_t i = listener.arrivals.size(); i > 0; --i) {
      try {
        Add(ReadConnect(*listener.Take(), AppMessageType::kConnect));
      } catch (const std::exception& e) {
        fprintf(stderr, "error: %s\n", e.what());
      }
    }
  }

  // Tells those who have been in line for a second to ask again.
  void TellAll() {
    Clock::time_point now = Clock::now();
    if (endpoint && now > close_at) {
      endpoint.reset();
      std::erase_if(untold, [&](const Visitor& visitor) {
        return contacts.contains(AddressIn(visitor.connect));
      });
      contacts.clear();
    }
    if (endpoint) endpoint->PollCompletion();
    while (!visitors.empty() && now - visitors.front().since > kAskPeriod) {
      if (untold.size() < kMaxWaiting) untold.push_back(visitors.front());
      visitors.pop_front();
    }
    if (untold.empty()) return;
    if (!endpoint) {
      if (now < close_at) return;  // there was no memory for it
      close_at = now + kSilenceLimit;
      endpoint.emplace(domain);
    }
    std::erase_if(untold, [&](const Visitor& visitor) {
      return now - visitor.since > kSilenceLimit || Tell(visitor);
    });
  }

  // Tells a client to ask again. libfabric copies so short a message (fi_inject
  // in fi_msg(3)) and reports no completion. Returns false if it has no room.
  bool Tell(const Visitor& visitor) {
    Address address = AddressIn(visitor.connect);
    bool full = contacts.size() >= kMaxContacts;
    if (full && !contacts.contains(address)) return false;
    try {
      if (!contacts.contains(address)) {
        contacts[address] = endpoint->AddPeerAddress(address);
      }
    } catch (const std::runtime_error& e) {
      fprintf(stderr, "error: %s\n", e.what());
      return true;
    }
    AppMessageBase wait = {AppMessageType::kWait, visitor.connect.base.nonce};
    // Closed when nobody waits any more for what it has told, or soon after it
    // has been used for many.
    if (!full) {
      close_at = Clock::now() +
                 (contacts.size() < kMaxContacts ? kSilenceLimit : kTellGrace);
    }
    return fi_inject(endpoint->ep, &wait, sizeof(wait), contacts.at(address)) !=
           -FI_EAGAIN;
  }
};

// ---- The application ----

// Prints how to reach the server.
void PrintClientCommand(const char* program, const Endpoint& endpoint) {
  printf("Run the client with the following command:\n  %s%s %s\n",
         ProviderSetting().c_str(), program, ToHex(endpoint.addr).c_str());
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

// RANDOM_FILL: make num_pages pages. The i-th, which depends on seed + i, goes
// to page page_idx[i] of this memory.
struct AppRandomFillMessage {
  AppMessageBase base;
  uint32_t imm_data;  // to come back as immediate data; not 0
  uint32_t num_pages;
  uint64_t addr;  // of the memory
  uint64_t size;  // bytes
  uint64_t rkey;  // with which the server may WRITE to it
  uint64_t seed;
  uint64_t page_size;     // bytes; a multiple of 8
  uint64_t total_repeat;  // how many times to write all of them
  // Followed by page_idx: num_pages indices, a uint32_t each.
};

// Makes a page that depends on the seed.
std::vector<uint64_t> MakePage(size_t page_size, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::vector<uint64_t> page(page_size / sizeof(uint64_t));
  for (uint64_t& word : page) word = generator();
  return page;
}

// Makes a buffer on the GPU if possible, otherwise in host memory. Returns in
// words where it is. Defined at the end of this file.
std::string MakeBuffer(std::optional<Buffer>& buf, Domain& domain, size_t size,
                       uint64_t access);

// A client, and what it asks of the server: to fill its memory with pages.
struct ServedClient {
  // How far the client is.
  enum class State : uint8_t {
    kWaitRequest,  // it has not asked yet
    kWaitMemory,   // other clients have the memory
    kMakePages,    // one at a time
    kWrite,        // the last WRITE has not completed yet
    kWritten,
  };

  size_t number;  // of the client; begins each line about it
  AppConnectMessage connect_msg;
  size_t& memory_left;           // bytes, for the pages of all clients
  std::optional<Buffer> source;  // the pages, once the client has asked
  Session session;
  State state = State::kWaitRequest;
  AppRandomFillMessage request_msg = {};
  std::vector<uint32_t> page_idx;
  size_t made_pages = 0;
  size_t total_write_ops = 0;
  size_t posted_write_ops = 0;
  size_t finished_write_ops = 0;
  Clock::time_point write_start_at;
  Clock::time_point reported_at;
  bool done = false;  // has said BYE or failed; last messages may be leaving

  // Opens the session. Throws if the machine lacks what that takes.
  ServedClient(Domain& domain, size_t client_number,
               const AppConnectMessage& connect, size_t& memory)
      : number(client_number),
        connect_msg(connect),
        memory_left(memory),
        session(domain) {}

  // Accepts the client. Throws if its address cannot be right.
  void Accept() {
    PrintLine(stdout, number,
              "Received CONNECT message from client " +
                  ToHex(AddressIn(connect_msg)));
    session.Accept(connect_msg);
  }

  ~ServedClient() {
    if (source) memory_left += source->size;
  }

  // Does what can be done for the client now. Returns the number of
  // completions. Throws if the client has sent something wrong, or nothing for
  // too long.
  size_t Poll() {
    if (session.peer == FI_ADDR_UNSPEC) Accept();
    size_t completions = session.endpoint.PollCompletion();
    try {
      while (std::optional<Message> message = session.Take()) {
        if (TypeOf(*message) == AppMessageType::kBye) {
          HandleBye();
          PrintLine(stdout, number, "Done.");
          done = true;
          return completions;
        }
        HandleRequest(*message);
      }
      if (state == State::kWaitMemory) AllocSource();
      if (state == State::kMakePages) ContinueMakePages();
    } catch (const std::exception& e) {
      session.Refuse(e.what());
      throw;
    }
    if (state == State::kWrite) ContinuePostWrite();
    Report();
    session.endpoint.CheckSilence("waiting for the client");
    return completions;
  }

  // Returns whether there is more to do right away, even if nothing completes.
  bool Busy() const {
    return state == State::kMakePages || state == State::kWrite;
  }

  // Compares each value in the message with what was received and what was
  // offered, before it uses the value.
  void HandleRequest(const Message& message) {
    auto msg =
        ReadMessage<AppRandomFillMessage>(message, AppMessageType::kRandomFill);
    if (state != State::kWaitRequest) throw BadMessage("a second request");
    size_t indices_size = message.size() - sizeof(msg);
    if (msg.num_pages == 0 || indices_size % sizeof(uint32_t) != 0 ||
        indices_size / sizeof(uint32_t) != msg.num_pages) {
      throw BadMessage("its sizes do not fit together");
    }
    if (msg.imm_data == 0) throw BadMessage("no imm_data");
    if (msg.page_size == 0 || msg.page_size % sizeof(uint64_t) != 0) {
      throw BadMessage("its page size is not a multiple of 8");
    }
    if (msg.page_size > kMaxPageSize ||
        msg.page_size > session.mailbox.domain.info->ep_attr->max_msg_size ||
        msg.num_pages > kMaxTransfer / msg.page_size) {
      throw BadMessage("the server has no room for " +
                       std::to_string(msg.num_pages) + " pages of " +
                       std::to_string(msg.page_size) + " bytes");
    }
    if (msg.total_repeat == 0 || msg.total_repeat > kMaxRepeat) {
      throw BadMessage("to be repeated " + std::to_string(msg.total_repeat) +
                       " times");
    }
    page_idx.resize(msg.num_pages);
    memcpy(page_idx.data(), message.data() + sizeof(msg), indices_size);
    for (uint32_t idx : page_idx) {
      if (idx >= msg.size / msg.page_size) {
        throw BadMessage("page " + std::to_string(idx) + " is outside of the " +
                         "client's memory");
      }
    }
    request_msg = msg;
    total_write_ops = msg.num_pages * msg.total_repeat;
    PrintLine(stdout, number,
              "Received RandomFill request: page_size=" +
                  std::to_string(msg.page_size) +
                  " num_pages=" + std::to_string(msg.num_pages) +
                  " total_repeat=" + std::to_string(msg.total_repeat));
    reported_at = Clock::now();
    state = State::kWaitMemory;
  }

  // Makes room for the pages as soon as the other clients have left enough.
  void AllocSource() {
    size_t size = page_idx.size() * request_msg.page_size;
    if (size > memory_left) return;
    std::string place =
        MakeBuffer(source, session.mailbox.domain, size, FI_WRITE);
    PrintLine(stdout, number,
              "Registered " + std::to_string(size) + " bytes " + place);
    memory_left -= size;
    state = State::kMakePages;
  }

  // Makes the next page: one at a time, so that the other clients do not have
  // to wait.
  void ContinueMakePages() {
    size_t page_size = request_msg.page_size;
    auto page = MakePage(page_size, request_msg.seed + made_pages);
    source->CopyIn(made_pages * page_size, page.data(), page_size);
    if (++made_pages < page_idx.size()) return;
    write_start_at = Clock::now();
    session.endpoint.eagain_count = 0;
    state = State::kWrite;
  }

  // Posts the next WRITEs, if it is time for them.
  void ContinuePostWrite() {
    size_t page_size = request_msg.page_size;
    size_t max_outstanding =
        std::min(std::max<size_t>(kMaxOutstandingBytes / page_size, 2),
                 kMaxOutstandingWrites);
    size_t end = std::min(posted_write_ops + kWritesPerPoll, total_write_ops);
    while (posted_write_ops < end) {
      // Post only what libfabric has room for, so that the queue stays short,
      // however long the transfer is.
      if (!session.endpoint.HasRoom()) return;
      // Immediate data tells the client that all is there, but WRITEs may
      // arrive in any order. So the last one waits until all others have
      // completed.
      bool last = posted_write_ops + 1 == total_write_ops;
      size_t outstanding = posted_write_ops - finished_write_ops;
      if (outstanding >= (last ? 1 : max_outstanding)) return;
      PostWrite(posted_write_ops++);
    }
  }

  // Posts the WRITE with a number: of a page, in the first round or in a later
  // one.
  void PostWrite(size_t write) {
    size_t page_size = request_msg.page_size;
    size_t i = write % page_idx.size();
    bool last = write + 1 == total_write_ops;
    session.endpoint.Post(
        {.type = RdmaOpType::kWrite,
         .peer = session.peer,
         .buf = &*source,
         .len = page_size,
         .offset = i * page_size,
         .remote_addr = request_msg.addr + page_idx[i] * page_size,
         .remote_key = request_msg.rkey,
         .imm_data = last ? request_msg.imm_data : 0,
         .callback = [this](const RdmaOp& op) {
           op.Check();
           ++finished_write_ops;
           if (finished_write_ops == total_write_ops) FinishWrite();
         }});
  }

  // Called once, when the last WRITE has completed.
  void FinishWrite() {
    state = State::kWritten;
    PrintProgress();
  }

  // The client may see the last WRITE, and say BYE, before we see its
  // completion.
  void HandleBye() {
    if (posted_write_ops < total_write_ops || state != State::kWrite) return;
    finished_write_ops = total_write_ops;
    FinishWrite();
  }

  // Reports progress to the terminal and to the client, now and then. The
  // client takes no part in a WRITE, so to the client a long transfer is
  // silence.
  void Report() {
    if (state == State::kWaitRequest || state == State::kWritten) return;
    Clock::time_point now = Clock::now();
    if (now - reported_at < kReportPeriod || session.mailbox.unsent > 0) return;
    reported_at = now;
    // A client that waits for memory or for its pages need say nothing, as long
    // as our messages to it leave.
    if (state != State::kWrite) session.endpoint.RestartSilence();
    if (posted_write_ops > 0) PrintProgress();
    session.Send(AppMessageBase{AppMessageType::kProgress});
  }

  // Prints how far the WRITEs have come, and how fast.
  void PrintProgress() {
    std::chrono::duration<double> seconds = Clock::now() - write_start_at;
    char text[200];
    snprintf(text, sizeof(text), "[%.3fs] WRITE: %zu%%, %zu/%zu",
             seconds.count(), 100 * finished_write_ops / total_write_ops,
             finished_write_ops, total_write_ops);
    std::string line = text;

    double mpps =
        static_cast<double>(finished_write_ops) / seconds.count() * 1e-6;
    double gbps = 8e-3 * mpps * static_cast<double>(request_msg.page_size);
    double link_gbps = LinkGbps(session.mailbox.domain.info.get());
    std::string share;
    if (link_gbps > 0) {
      share = "(" + std::to_string(std::lround(100 * gbps / link_gbps)) + "%)";
    }
    snprintf(text, sizeof(text), ", bw=%.3fGbps%s, %.3fMpps, EAGAIN=%zu", gbps,
             share.c_str(), mpps, size_t{session.endpoint.eagain_count});
    line += text;
    PrintLine(stdout, number, line, finished_write_ops < total_write_ops);
  }
};

// Throws if the last WRITE could carry no number: the provider would answer it
// with -FI_EAGAIN for ever.
void CheckImmediateData(const Domain& domain) {
  if (domain.info->domain_attr->cq_data_size >= sizeof(uint32_t)) return;
  throw std::runtime_error(std::string(domain.info->fabric_attr->prov_name) +
                           " has no immediate data; try another provider");
}

// Asks for an interface that can use GPU memory, if there is a GPU. Defined at
// the end of this file.
Info GetInfoWithGpu();

// Runs the server, until a signal ends it.
int ServerMain(const char* program) {
  Domain domain(GetInfoWithGpu());
  CheckImmediateData(domain);
  Mailbox listener(domain);
  WaitingLine line{domain};
  size_t memory_left = kMaxTransfer;
  std::list<ServedClient> clients;
  PrintClientCommand(program, listener.endpoint);

  size_t num_clients = 0;        // so far
  Clock::time_point full_until;  // there is no memory for another one
  size_t empty_polls = 0;
  Clock::time_point listened_at;
  while (!g_interrupted) {
    size_t completions = 0;
    bool busy = false;
    try {
      // Looking at a quiet endpoint costs a system call or more, so the clients
      // that are served should not have to wait for that too often.
      if (clients.empty() || Clock::now() - listened_at >= kListenPeriod) {
        listened_at = Clock::now();
        completions += listener.endpoint.PollCompletion();
        line.AddAll(listener);
        line.TellAll();
      }
      bool full = clients.size() >= kMaxClients || Clock::now() < full_until;
      if (!full && !line.visitors.empty()) {
        // One at a time: opening an endpoint takes tens of ms over
        // tcp;ofi_rxm. If that fails, this client keeps its place in the line.
        full_until = Clock::now() + kAskPeriod;
        clients.emplace_back(domain, num_clients + 1,
                             line.visitors.front().connect, memory_left);
        full_until = {};
        ++num_clients;
        line.visitors.pop_front();
      }
    } catch (const std::exception& e) {
      // A bad message must not end the server.
      fprintf(stderr, "error: %s\n", e.what());
    }
    clients.remove_if([&](ServedClient& client) {
      try {
        if (!client.done) completions += client.Poll();
        busy |= client.Busy();
      } catch (const std::exception& e) {
        // It ends this client's session, and costs the others nothing.
        PrintLine(stderr, client.number, "error: " + Printable(e.what()));
        client.done = true;
      }
      return client.done && client.session.HasLeft();
    });
    if (completions > 0) continue;
    if (busy) {
      if (++empty_polls % kPollsPerYield == 0) std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(kIdlePause);
  }
  // An ACCEPT on its way is a first contact, too: see Session::Connect.
  for (ServedClient& client : clients) {
    client.session.leave_at = Clock::now() + kContactGrace;
  }
  while (!clients.empty()) {
    clients.remove_if([](auto& client) { return client.session.HasLeft(); });
  }
  return 0;
}

// Asks the server to fill our memory with pages.
void SendRequest(Session& session, const Buffer& memory,
                 AppRandomFillMessage request,
                 const std::vector<uint32_t>& page_idx) {
  // The server names a place in our memory by its address or, if the provider
  // does without FI_MR_VIRT_ADDR, by its distance from the start.
  if (session.mailbox.domain.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) {
    request.addr = reinterpret_cast<uint64_t>(memory.data.get());
  }
  request.size = memory.size;
  request.rkey = fi_mr_key(memory.mr);
  session.Send(request, {reinterpret_cast<const char*>(page_idx.data()),
                         page_idx.size() * sizeof(uint32_t)});
  printf("Sent RandomFill request to server. page_size: %zu, num_pages: %zu\n",
         size_t{request.page_size}, page_idx.size());
}

// Throws unless every page that we asked for is there, and nothing else.
void CheckMemory(const Buffer& memory, const AppRandomFillMessage& request,
                 const std::vector<uint32_t>& page_idx) {
  std::vector<uint8_t> expected(memory.size);
  for (size_t i = 0; i < page_idx.size(); ++i) {
    auto page = MakePage(request.page_size, request.seed + i);
    memcpy(&expected[page_idx[i] * request.page_size], page.data(),
           request.page_size);
  }
  std::vector<uint8_t> received(memory.size);
  memory.CopyOut(0, received.data(), received.size());
  if (received != expected) {
    throw std::runtime_error("the data is not correct");
  }
  printf("Data is correct.\n");
}

// Runs the client. Throws unless it gets what it asks for.
int ClientMain(const Address& server_addr, size_t page_size, size_t num_pages,
               size_t total_repeat) {
  Domain domain(GetInfoWithGpu());
  CheckImmediateData(domain);
  if (page_size > domain.info->ep_attr->max_msg_size) {
    throw std::invalid_argument("PAGE_SIZE is too large for this provider");
  }
  size_t max_pages = (domain.MaxMessageSize() - sizeof(AppRandomFillMessage)) /
                     sizeof(uint32_t);
  if (num_pages > max_pages) {
    throw std::invalid_argument("NUM_PAGES is more than " +
                                std::to_string(max_pages));
  }
  // A few pages more than will be written, to see that they stay as they are.
  size_t room = num_pages + num_pages / 8 + 1;
  std::optional<Buffer> memory;
  // FI_RECV, too: an adapter without WRITEs has us fetch the data ourselves.
  std::string place =
      MakeBuffer(memory, domain, room * page_size, FI_REMOTE_WRITE | FI_RECV);
  printf("Registered %zu bytes %s\n", memory->size, place.c_str());
  Session session(domain);
  session.Connect(server_addr);

  // Where the pages go is as random as what is in them.
  std::mt19937_64 random{std::random_device{}()};
  std::vector<uint32_t> page_idx(room);
  std::iota(page_idx.begin(), page_idx.end(), 0);
  std::shuffle(page_idx.begin(), page_idx.end(), random);
  page_idx.resize(num_pages);
  AppRandomFillMessage request = {};
  request.base.type = AppMessageType::kRandomFill;
  request.imm_data = uint32_t(random()) | 1;
  request.seed = random();
  request.page_size = page_size;
  request.num_pages = uint32_t(num_pages);
  request.total_repeat = total_repeat;
  bool filled = false;
  session.endpoint.on_imm_data = [&](uint32_t imm_data) {
    if (imm_data == request.imm_data) filled = true;
  };
  try {
    SendRequest(session, *memory, request, page_idx);
    session.endpoint.WaitUntil("waiting for the pages", [&] {
      while (std::optional<Message> message = session.Take()) {
        ReadMessage<AppMessageBase>(*message, AppMessageType::kProgress);
      }
      return filled;
    });
    if (memory->gpu >= 0) CudaFlushWrites(memory->gpu);
  } catch (...) {
    session.SayBye(kContactGrace);
    throw;
  }
  printf("Received RDMA WRITE to local memory.\n");
  session.SayBye();
  CheckMemory(*memory, request, page_idx);
  return 0;
}

// ---- Command line ----

// Prints the interfaces found, a line each.
int ListMain() {
  Info list = GetInfo();
  // An interface may appear several times, with different capabilities.
  std::set<std::string> seen;
  for (fi_info* info = list.get(); info != nullptr; info = info->next) {
    std::string line = Describe(info);
    if (seen.insert(line).second) printf("%s\n", line.c_str());
  }
  return 0;
}

constexpr const char* kUsage =
    "Usage:\n"
    "  14_strangers\n"
    "      Run the server.\n"
    "  14_strangers ADDRESS [PAGE_SIZE NUM_PAGES [REPEAT]]\n"
    "      Have it write pages into our memory (65536 1000 500).\n"
    "  14_strangers --list\n"
    "      List the interfaces found, the one it uses first.\n"
    "ADDRESS is what the server prints. FI_PROVIDER chooses the provider.\n";

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

// Lets this process open as many files as it may: each connection takes some.
void RaiseFileLimit() {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

int main(int argc, char** argv) {
  std::vector<std::string> args(argv + 1, argv + argc);
  // Otherwise our lines would go into the first files that libfabric opens.
  for (int fd : {0, 1, 2}) {
    if (fcntl(fd, F_GETFD) < 0) open("/dev/null", O_RDWR);
  }
  setvbuf(stdout, nullptr, _IOLBF, 0);  // whole lines, also into a pipe
  InstallSignalHandlers();
  RaiseFileLimit();
  // Has ofi_rxm look for new connections each millisecond instead of each ten.
  setenv("FI_OFI_RXM_CM_PROGRESS_INTERVAL", "1000", 0);
  try {
    if (args.empty()) return ServerMain(argv[0]);
    if (args[0] == "--help") {
      printf("%s", kUsage);
      return 0;
    }
    if (args[0] == "--list" && args.size() == 1) return ListMain();
    if (args.size() > 4) throw std::invalid_argument("too many arguments");
    if (args.size() == 2) throw std::invalid_argument("NUM_PAGES is missing");
    size_t page_size = 65536;
    size_t num_pages = 1000;
    size_t total_repeat = 500;
    if (args.size() > 2) {
      page_size = ParseNumber("PAGE_SIZE", args[1]);
      num_pages = ParseNumber("NUM_PAGES", args[2]);
    }
    if (args.size() > 3) total_repeat = ParseNumber("REPEAT", args[3]);
    if (page_size % sizeof(uint64_t) != 0 || page_size > kMaxPageSize) {
      throw std::invalid_argument("PAGE_SIZE is not a multiple of 8 up to " +
                                  std::to_string(kMaxPageSize));
    }
    if (num_pages > kMaxTransfer / page_size) {
      throw std::invalid_argument("that does not fit: at most " +
                                  std::to_string(kMaxTransfer) + " bytes");
    }
    if (total_repeat > kMaxRepeat) {
      throw std::invalid_argument("REPEAT is more than " +
                                  std::to_string(kMaxRepeat));
    }
    return ClientMain(ParseAddress(args[0]), page_size, num_pages,
                      total_repeat);
  } catch (const std::invalid_argument& e) {
    fprintf(stderr, "error: %s\n%s", e.what(), kUsage);
    return 2;
  } catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}

// ---- GPU memory: all calls of CUDA ----

#ifdef USE_CUDA

#include <cuda_runtime.h>

// Why there is no GPU, in words.
constexpr const char* kNoGpu = "no GPU";

// Throws if a function of CUDA has failed.
void CudaCheck(cudaError_t ret, const char* what) {
  if (ret == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(ret));
}

// Returns the first GPU that CUDA_VISIBLE_DEVICES allows; -1 if there is none.
int FindGpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 ? 0 : -1;
}

// Frees memory of CudaAlloc.
void CudaFree(void* data) { cudaFree(data); }

// Allocates zeroed memory.
Memory CudaAlloc(size_t size) {
  void* data = nullptr;
  CudaCheck(cudaMalloc(&data, size), "cudaMalloc");
  Memory memory(static_cast<uint8_t*>(data), CudaFree);
  CudaCheck(cudaMemset(data, 0, size), "cudaMemset");
  CudaCheck(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return memory;
}

// Copies between host and GPU, in either direction. cudaMemcpy may return
// before the copy has ended, and the adapter would then send what was there
// before.
void CudaCopy(void* to, const void* from, size_t size) {
  CudaCheck(cudaMemcpy(to, from, size, cudaMemcpyDefault), "cudaMemcpy");
  CudaCheck(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

// Makes data that an adapter has written visible to the GPU. The completion is
// in host memory and the data in GPU memory, where work that is running may
// still see old data. Call it between the completion and the use of the data.
// Does nothing if the GPU keeps the order by itself. Returns false if it does
// not, and there is no way to ask for it.
bool CudaFlushWrites(int gpu) {
  int ordering = 0;
  int options = 0;
  CudaCheck(cudaDeviceGetAttribute(&ordering,
                                   cudaDevAttrGPUDirectRDMAWritesOrdering, gpu),
            "cudaDeviceGetAttribute");
  CudaCheck(cudaDeviceGetAttribute(
                &options, cudaDevAttrGPUDirectRDMAFlushWritesOptions, gpu),
            "cudaDeviceGetAttribute");
  if (ordering >= cudaGPUDirectRDMAWritesOrderingOwner) return true;
  if ((options & cudaFlushGPUDirectRDMAWritesOptionHost) == 0) return false;
  CudaCheck(cudaDeviceFlushGPUDirectRDMAWrites(
                cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
                cudaFlushGPUDirectRDMAWritesToOwner),
            "cudaDeviceFlushGPUDirectRDMAWrites");
  return true;
}

#else  // Built without CUDA: no GPU is found, and nothing else is called.

// Why there is no GPU, in words.
constexpr const char* kNoGpu = "built without CUDA";

int FindGpu() { return -1; }
Memory CudaAlloc(size_t) { return {nullptr, free}; }
void CudaCopy(void*, const void*, size_t) {}
bool CudaFlushWrites(int) { return true; }

#endif

// Does the same as GetInfo, but asks for GPU memory (FI_HMEM) if there is a GPU
// and the interface that we would use anyway supports it. We do not change to
// another interface for it: a libfabric without CUDA would offer shm, which
// reaches nobody outside this host.
Info GetInfoWithGpu() {
  Info plain = GetInfo();
  if (FindGpu() < 0) return plain;
  try {
    return GetInfo(kCaps | FI_HMEM, plain.get());
  } catch (const std::runtime_error&) {
    return plain;
  }
}

// See its declaration. What has kept it from the GPU is in the answer.
std::string MakeBuffer(std::optional<Buffer>& buf, Domain& domain, size_t size,
                       uint64_t access) {
  std::string reason = kNoGpu;
  int gpu = FindGpu();
  if (gpu >= 0 && (domain.info->caps & FI_HMEM) == 0) {
    reason = std::string(domain.info->fabric_attr->prov_name) +
             " offers no GPU memory";
  } else if (gpu >= 0) {
    try {
      buf.emplace(domain, size, access, gpu);
      std::string place = "on cuda:" + std::to_string(gpu);
      if (!CudaFlushWrites(gpu)) {
        place += ", which may show a WRITE later than its completion";
      }
      return place;
    } catch (const std::runtime_error& e) {
      reason = e.what();
    }
  }
  buf.emplace(domain, size, access);
  return "in host memory (" + reason + ")";
}
