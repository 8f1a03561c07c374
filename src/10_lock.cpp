// 10_lock: memory of one machine that several others change at once.
//
// The server registers memory and says where it is. The clients agree about it
// among themselves: by atomic operations they take places in a log, wait their
// turn for a lock, and claim records of a hash table.
//
// Based on 8_malloc.

#include <fcntl.h>
#include <rdma/fi_atomic.h>
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

// Has all of the checksums in the header, so there is no library to link.
#define XXH_INLINE_ALL
#include <xxhash.h>

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
constexpr uint64_t kCaps = FI_MSG | FI_RMA | FI_ATOMIC;

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
constexpr auto kDrainLimit = 1s;      // that we wait for what is in flight
constexpr auto kIdleLimit = 60s;      // without any work, while others wait
constexpr size_t kMaxClients = 8;     // that are served at a time
constexpr size_t kMaxWaiting = 1000;  // clients that wait to be served
constexpr auto kAskPeriod = 1s;       // in line, then a client is to ask again
constexpr size_t kMaxContacts = 256;  // that are told from one endpoint
constexpr auto kTellGrace = 2s;       // for what it is told to arrive

constexpr auto kLease = 1s;             // without a change, then a turn is over
constexpr auto kTurnPause = 50us;       // for each client before us
constexpr size_t kMaxCount = 100'000;   // changes of each kind by a client
constexpr size_t kLogSize = 1 << 20;    // entries
constexpr size_t kNumRecords = 1024;    // of the hash table
constexpr size_t kKeysPerClient = 32;   // of the hash table
constexpr size_t kMaxReads = 100;       // of a record that changes meanwhile
constexpr size_t kChunkSize = 1 << 16;  // bytes of a READ of the whole

// After so many polls without a completion, a loop gives the core to others.
// Not after each poll: one may move data without completing anything, and the
// others may keep the core for long.
constexpr size_t kPollsPerYield = 64;

constexpr auto kListenPeriod = 1ms;  // between two looks for new clients
constexpr auto kReportPeriod = 1s;   // between two reports of progress
constexpr auto kAlivePeriod = 1s;    // between two messages that we are alive

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

// 1. Ask: which interfaces can do what we need?
Info GetInfo() {
  Info hints(fi_allocinfo(), fi_freeinfo);
  hints->caps = kCaps;               // we want to send messages, and to WRITE
  hints->ep_attr->type = FI_EP_RDM;  // reliably, to any number of peers,
  hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;  // and hear of their arrival
  // Demands that we can meet.
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY;
  // Messages to the same peer must arrive in the order of their SENDs.
  hints->tx_attr->msg_order = FI_ORDER_SAS;
  hints->rx_attr->msg_order = FI_ORDER_SAS;
  // Only one thread uses the domain, so the provider needs no locks.
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
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
    // it under a lock, and waits for ever if that side is killed.
    if (strcmp(info->fabric_attr->prov_name, "shm") == 0) write_flags = 0;
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

// 3. Registered memory: the adapter may use it, for FI_SEND, FI_RECV ...
struct Buffer {
  size_t size;  // bytes
  Memory data;
  Owned<fid_mr> mr;

  Buffer(Domain& domain, size_t bytes, uint64_t access)
      : size(bytes), data(AllocHost(bytes)) {
    // Without FI_MR_LOCAL, memory that is not for others needs no registration.
    // With FI_ATOMIC, ofi_rxm of libfabric 2.6 refuses a second region of it.
    if ((access & (FI_REMOTE_READ | FI_REMOTE_WRITE)) == 0 &&
        (domain.info->domain_attr->mr_mode & FI_MR_LOCAL) == 0) {
      return;
    }
    iovec iov = {.iov_base = data.get(), .iov_len = size};
    fi_mr_attr attr = {};
    attr.mr_iov = &iov;
    attr.iov_count = 1;
    attr.access = access;
    // Used by providers that let us choose the key (those without
    // FI_MR_PROV_KEY). No two regions of a domain may have the same one.
    int ret = 0;
    do {
      attr.requested_key = domain.RandomKey();
      ret = fi_mr_regattr(domain.handle, &attr, 0, &mr.ptr);
    } while (ret == -FI_ENOKEY);
    FiCheck(ret, "fi_mr_regattr of " + std::to_string(size) + " bytes");
  }

  // Returns the provider's descriptor of the region; nothing if there is none.
  void* Desc() const { return mr == nullptr ? nullptr : fi_mr_desc(mr); }
};

// ---- Operations and completions ----

// The kinds of operations.
enum class RdmaOpType { kRecv, kSend, kWrite, kRead, kFetchAdd, kCompareSwap };

// Returns the name of an operation, for error messages.
const char* NameOf(RdmaOpType type) {
  switch (type) {
    case RdmaOpType::kRecv:
      return "RECV";
    case RdmaOpType::kSend:
      return "SEND";
    case RdmaOpType::kWrite:
      return "WRITE";
    case RdmaOpType::kRead:
      return "READ";
    case RdmaOpType::kFetchAdd:
      return "FETCH-AND-ADD";
    case RdmaOpType::kCompareSwap:
      return "COMPARE-AND-SWAP";
  }
  return "";
}

// The numbers of an atomic operation, which are in its buffer, at its offset.
// It changes one word of 64 bits at the peer.
struct AtomicNumbers {
  uint64_t operand;   // added to the word, or put in its place
  uint64_t expected;  // of a compare-and-swap: only this word is replaced
  uint64_t before;    // set at completion: the word as it was
};

// A work request: an operation for libfabric to do, and the function to call
// once when it is done, which may post others.
struct RdmaOp {
  fi_context2 context = {};  // must come first: for the provider's notes
  RdmaOpType type = RdmaOpType::kRecv;
  fi_addr_t peer = FI_ADDR_UNSPEC;  // of a SEND; a RECV takes from anybody
  Buffer* buf = nullptr;
  size_t len = 0;            // bytes; of a RECV, set when a message has arrived
  size_t offset = 0;         // of a one-sided operation, in buf
  uint64_t remote_addr = 0;  // of a one-sided operation: as the owner has said
  uint64_t remote_key = 0;   // of a one-sided operation: from the owner, too
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
  Clock::time_point silent_since = Clock::now();  // see CheckSilence
  Address addr;                                   // our own

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

  // Hands over what is waiting, as far as libfabric has room. An operation that
  // libfabric refuses completes at once, with an error.
  void ProgressPendingOps() {
    while (!pending_ops.empty()) {
      RdmaOp* op = pending_ops.front();
      ssize_t ret = Submit(op);
      if (ret == -FI_EAGAIN) return;  // reading completions makes room
      pending_ops.pop_front();
      op->in_flight = true;
      if (ret != 0) Complete(op, 0, ErrorText(int(-ret)));
    }
  }

  // Calls the function of libfabric for an operation.
  ssize_t Submit(RdmaOp* op) {
    if (op->type > RdmaOpType::kRead) return SubmitAtomic(op);
    uint8_t* data = &op->buf->data[op->offset];
    void* desc = op->buf->Desc();
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
      // No level to ask for: a READ is complete when its data is here.
      if (op->type == RdmaOpType::kRead) return fi_readmsg(ep, &msg, 0);
      return fi_writemsg(ep, &msg, domain.write_flags);
    }
    if (op->type == RdmaOpType::kRecv) {
      return fi_recv(ep, data, op->len, desc, op->peer, op);
    }
    return fi_send(ep, data, op->len, desc, op->peer, op);
  }

  // The same for an atomic operation. See fi_atomic(3).
  ssize_t SubmitAtomic(RdmaOp* op) {
    void* desc = op->buf->Desc();
    auto* numbers =
        reinterpret_cast<AtomicNumbers*>(&op->buf->data[op->offset]);
    // They count words, where an iovec counts bytes.
    fi_ioc operand = {.addr = &numbers->operand, .count = 1};
    fi_ioc expected = {.addr = &numbers->expected, .count = 1};
    fi_ioc before = {.addr = &numbers->before, .count = 1};
    fi_rma_ioc remote = {
        .addr = op->remote_addr, .count = 1, .key = op->remote_key};
    fi_msg_atomic msg = {};
    msg.msg_iov = &operand;
    msg.desc = &desc;
    msg.iov_count = 1;
    msg.addr = op->peer;
    msg.rma_iov = &remote;
    msg.rma_iov_count = 1;
    msg.datatype = FI_UINT64;
    msg.context = op;
    if (op->type == RdmaOpType::kFetchAdd) {
      msg.op = FI_SUM;
      return fi_fetch_atomicmsg(ep, &msg, &before, &desc, 1, 0);
    }
    msg.op = FI_CSWAP;
    return fi_compare_atomicmsg(ep, &msg, &expected, &desc, 1, &before, &desc,
                                1, 0);
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
        // A client may post a WRITE with immediate data, which we do not use.
        // shm reports it with a context that is none of ours.
        if ((cqe[i].flags & (FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA)) &&
            !(cqe[i].flags & (FI_RECV | FI_WRITE))) {
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

  kJoin = 6,    // client: where is your memory, and who am I?
  kAppend = 7,  // client: append this entry to a log of your own
  kReply = 8,   // server: the answer to either of these
  kReport = 9,  // client: this is what I have changed
  kAlive = 10,  // client: I am still at it
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

// Memory that its owner lets the other side use.
struct AppMemoryRegion {
  uint64_t addr;
  uint64_t size;  // bytes
  uint64_t rkey;
};

// An entry of a log. Each client counts its own entries, from 0.
struct LogEntry {
  uint32_t client;  // its number; 0 means that nobody has written the entry
  uint32_t count;
};

// APPEND: write this entry into the log for me.
struct AppAppendMessage {
  AppMessageBase base;
  LogEntry entry;
};

// Sent when the client has changed everything, and before it checks that.
struct AppReportMessage {
  AppMessageBase base;
  uint64_t num_entries;
  uint64_t num_changes;
};

// ALIVE. Without requests, a client keeps its place as long as it does
// something with the memory.
struct AppAliveMessage {
  AppMessageBase base;
  uint64_t finished;  // one-sided operations so far
};

// The answer to a JOIN or an APPEND. Client and server exchange the key by it:
// it says where the shared memory is, and with which key it can be used.
struct AppReplyMessage {
  AppMessageBase base;
  uint32_t client;        // the number of the client, from 1
  uint32_t seat;          // its seat: a number below kMaxClients
  AppMemoryRegion table;  // the shared memory
  uint64_t ticket;        // of an APPEND: the place of the entry
};

// The record that the lock protects. It is more than one word, so no atomic
// operation can change it.
struct Ledger {
  uint64_t total;                 // of all changes
  uint64_t changes[kMaxClients];  // by seat

  // Returns the changes of all clients together.
  uint64_t Sum() const {
    return std::accumulate(std::begin(changes), std::end(changes), uint64_t{0});
  }
};

// The state of the lock, which is one word: whose turn it is, and which of the
// ledgers is the valid one.
struct Turn {
  uint64_t ticket;
  uint64_t ledger;

  uint64_t Word() const { return ticket * 256 + ledger; }
  static Turn FromWord(uint64_t word) { return {word / 256, word % 256}; }
};
static_assert(2 * kMaxClients <= 256);

// A record of the hash table. The client that puts the key there owns the
// record, and nobody else writes it.
struct Record {
  uint64_t key;       // 0 means that the record is free
  uint64_t version;   // counts the WRITEs; 0 before the first
  uint64_t checksum;  // of all but itself
  uint8_t data[232];

  // Returns what `checksum` is in a record that is whole.
  uint64_t Checksum() const {
    return XXH3_64bits_withSeed(data, sizeof(data), key * 31 + version);
  }
  // Returns whether it is whole; one that was never written is all zeros.
  bool IsValid() const { return checksum == (version == 0 ? 0 : Checksum()); }
};

// What the clients change. It begins as zeros. Words that many change are in
// lines of the cache of their own.
struct SharedTable {
  alignas(64) uint64_t tickets;       // for places in the log: the next one
  alignas(64) uint64_t lock_tickets;  // for the lock: the next one
  alignas(64) uint64_t turn;          // the word of a Turn
  // Each seat has two, and writes to the one that is not valid.
  alignas(64) Ledger ledgers[2 * kMaxClients];
  alignas(64) Record records[kNumRecords];
  LogEntry log[kLogSize];
};

// Throws if the provider has no atomic operations on words of 64 bits.
void CheckAtomics(const Endpoint& endpoint) {
  size_t max_count = 0;
  if (fi_fetch_atomicvalid(endpoint.ep, FI_UINT64, FI_SUM, &max_count) == 0 &&
      fi_compare_atomicvalid(endpoint.ep, FI_UINT64, FI_CSWAP, &max_count) ==
          0) {
    return;
  }
  throw std::runtime_error(
      std::string(endpoint.domain.info->fabric_attr->prov_name) +
      " has no atomic operations on 64 bits; try another provider");
}

// The memory that the server registers for its clients. The server looks at it
// only when it has no client.
struct SharedMemory {
  Buffer buf;
  AppMemoryRegion region;
  std::set<uint32_t> free_seats;
  std::vector<LogEntry> own_log;  // that clients ask us to append to
  std::map<uint32_t, uint32_t> reported_entries;  // by the client's number
  uint64_t reported_changes = 0;
  size_t unfinished = 0;  // clients that have gone without a report

  explicit SharedMemory(Domain& domain)
      // FI_RECV, too: an adapter without WRITEs has us fetch the data.
      : buf(domain, sizeof(SharedTable),
            FI_REMOTE_READ | FI_REMOTE_WRITE | FI_RECV) {
    // A place in a region is named by its address or, if the provider does
    // without FI_MR_VIRT_ADDR, by its distance from the start.
    bool virt_addr = domain.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
    region = {virt_addr ? reinterpret_cast<uint64_t>(buf.data.get()) : 0,
              buf.size, fi_mr_key(buf.mr)};
    for (uint32_t seat = 0; seat < kMaxClients; ++seat) free_seats.insert(seat);
    printf("Registered %zu bytes that clients can change\n", buf.size);
  }

  // Checks what the clients have left behind.
  void Check() const {
    const auto* table = reinterpret_cast<const SharedTable*>(buf.data.get());
    size_t num_entries = std::min<uint64_t>(table->tickets, kLogSize);
    // Each client has counted its entries, and appended them in that order.
    std::map<uint32_t, uint32_t> counts;
    size_t missing = 0;
    bool correct = true;
    for (size_t i = 0; i < num_entries; ++i) {
      const LogEntry& entry = table->log[i];
      if (entry.client == 0) {
        ++missing;
      } else {
        correct &= entry.count == counts[entry.client]++;
      }
    }
    for (auto [client, count] : reported_entries) {
      correct &= counts[client] == count;
    }
    Turn turn = Turn::FromWord(table->turn);
    const Ledger& ledger = table->ledgers[turn.ledger % (2 * kMaxClients)];
    correct &= ledger.total == ledger.Sum();
    // Clients that have gone without a report may have changed something, too.
    correct &= unfinished > 0 ? ledger.total >= reported_changes
                              : ledger.total == reported_changes;
    size_t claimed = 0;
    size_t invalid = 0;
    for (const Record& record : table->records) {
      claimed += record.key != 0;
      invalid += !record.IsValid();
    }
    // A client that ends between two steps leaves one thing unfinished.
    correct &= missing + invalid <= unfinished;
    std::string left = std::to_string(num_entries) + " entries, the ledger " +
                       std::to_string(ledger.total) + " changes, the table " +
                       std::to_string(claimed) + " records";
    if (missing + invalid > 0) {
      left += " (unfinished: " + std::to_string(missing) + " entries, " +
              std::to_string(invalid) + " records)";
    }
    fprintf(correct ? stdout : stderr, "%sthe log has %s. %s\n",
            correct ? "" : "error: ", left.c_str(),
            correct ? "It all fits together." : "It does not fit together.");
  }

  // Begins anew. To be called while there is no client, and just before one
  // comes: in between, too, something may have changed the memory.
  void Clear() {
    memset(buf.data.get(), 0, buf.size);
    own_log.clear();
    reported_entries.clear();
    reported_changes = 0;
    unfinished = 0;
  }
};

// The seat of a client. Declare it before the session: nobody else gets the
// seat as long as something from the client can arrive.
struct Seat {
  SharedMemory& memory;
  uint32_t seat;

  explicit Seat(SharedMemory& of) : memory(of) {
    seat = memory.free_seats.extract(memory.free_seats.begin()).value();
  }
  Seat(const Seat&) = delete;
  Seat& operator=(const Seat&) = delete;
  ~Seat() { memory.free_seats.insert(seat); }
};

// A client. Of what it does with the memory, the server hears nothing.
struct ServedClient {
  size_t number;  // of the client; begins each line about it
  AppConnectMessage connect_msg;
  Seat seat;
  Session session;
  Clock::time_point worked_at = Clock::now();  // as far as we know
  uint64_t finished = 0;                       // of the client's operations
  bool reported = false;  // the client has said what it has changed
  bool done = false;  // has said BYE or failed; last messages may be leaving

  // Opens the session. Throws if the machine lacks what that takes.
  ServedClient(Domain& domain, size_t client_number,
               const AppConnectMessage& connect, SharedMemory& memory)
      : number(client_number),
        connect_msg(connect),
        seat(memory),
        session(domain) {}

  // Accepts the client. Throws if its address cannot be right.
  void Accept() {
    PrintLine(stdout, number,
              "Received CONNECT message from client " +
                  ToHex(AddressIn(connect_msg)));
    session.Accept(connect_msg);
  }

  // Does what can be done for the client now. Returns the number of
  // completions. Throws if the client has sent something wrong, or nothing for
  // too long.
  size_t Poll() {
    if (session.peer == FI_ADDR_UNSPEC) Accept();
    size_t completions = session.endpoint.PollCompletion();
    try {
      // One request at a time, so that no answers pile up if a client does not
      // take them.
      while (session.mailbox.unsent == 0) {
        std::optional<Message> message = session.Take();
        if (!message) break;
        if (TypeOf(*message) == AppMessageType::kBye) {
          PrintLine(stdout, number, "Done.");
          done = true;
          return completions;
        }
        HandleRequest(*message);
      }
    } catch (const std::exception& e) {
      session.Refuse(e.what());
      throw;
    }
    session.endpoint.CheckSilence("waiting for the client");
    return completions;
  }

  // Does what the client asks for, and answers.
  void HandleRequest(const Message& message) {
    AppMessageType type = TypeOf(message);
    if (type == AppMessageType::kAlive) return HandleAlive(message);
    worked_at = Clock::now();
    AppReplyMessage reply = {};
    reply.base.type = AppMessageType::kReply;
    switch (type) {
      case AppMessageType::kReport:
        HandleReport(message);
        return;
      case AppMessageType::kJoin:
        reply.client = uint32_t(number);
        reply.seat = seat.seat;
        reply.table = seat.memory.region;
        break;
      case AppMessageType::kAppend:
        reply.ticket = Append(message);
        break;
      default:
        throw BadMessage("its type is no request");
    }
    session.Send(reply);
  }

  // Appends an entry to a log of our own: an atomic operation that comes by the
  // network may not be atomic to what this processor does.
  uint64_t Append(const Message& message) {
    std::vector<LogEntry>& log = seat.memory.own_log;
    if (log.size() >= kLogSize) throw std::runtime_error("our log is full");
    log.push_back(
        ReadMessage<AppAppendMessage>(message, AppMessageType::kAppend).entry);
    return log.size() - 1;
  }

  // Notes whether the client has finished anything since its last ALIVE.
  void HandleAlive(const Message& message) {
    auto alive = ReadMessage<AppAliveMessage>(message, AppMessageType::kAlive);
    if (alive.finished > finished) worked_at = Clock::now();
    finished = alive.finished;
  }

  // To be called while others wait for a place. Throws if this client has only
  // been alive for a long time.
  void CheckIdle() {
    if (Clock::now() - worked_at < kIdleLimit) return;
    session.Refuse("you do nothing, and others wait");
    throw std::runtime_error("it does nothing, and others wait");
  }

  // Takes what a client says that it has changed; once.
  void HandleReport(const Message& message) {
    auto report =
        ReadMessage<AppReportMessage>(message, AppMessageType::kReport);
    if (reported) throw BadMessage("a second report");
    reported = true;
    auto client = uint32_t(number);
    seat.memory.reported_entries[client] = uint32_t(report.num_entries);
    seat.memory.reported_changes += report.num_changes;
  }
};

// Runs the server, until a signal ends it.
int ServerMain(const char* program) {
  Domain domain(GetInfo());
  SharedMemory memory(domain);
  Mailbox listener(domain);
  CheckAtomics(listener.endpoint);
  WaitingLine line{domain};
  std::list<ServedClient> clients;
  PrintClientCommand(program, listener.endpoint);

  size_t num_clients = 0;        // so far
  Clock::time_point full_until;  // there is no memory for another one
  size_t empty_polls = 0;
  Clock::time_point listened_at;
  while (!g_interrupted) {
    size_t completions = 0;
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
        if (clients.empty()) memory.Clear();
        // One at a time: opening an endpoint takes tens of ms over
        // tcp;ofi_rxm. If that fails, this client keeps its place in the line.
        full_until = Clock::now() + kAskPeriod;
        clients.emplace_back(domain, num_clients + 1,
                             line.visitors.front().connect, memory);
        full_until = {};
        ++num_clients;
        line.visitors.pop_front();
      }
    } catch (const std::exception& e) {
      // A bad message must not end the server.
      fprintf(stderr, "error: %s\n", e.what());
    }
    size_t left = clients.remove_if([&](ServedClient& client) {
      try {
        if (!client.done) completions += client.Poll();
        if (!client.done && !line.visitors.empty()) client.CheckIdle();
      } catch (const std::exception& e) {
        // It ends this client's session, and costs the others nothing.
        PrintLine(stderr, client.number, "error: " + Printable(e.what()));
        client.done = true;
      }
      if (!client.done || !client.session.HasLeft()) return false;
      memory.unfinished += !client.reported;
      return true;
    });
    if (left > 0 && clients.empty()) memory.Check();
    if (completions > 0) continue;
    // What the clients do to our memory completes nothing here, but many
    // providers do their part of the work only while we poll.
    if (!clients.empty()) {
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

// Memory of the client, all of it registered: each operation has a place.
struct ClientMemory {
  AtomicNumbers atomic;
  LogEntry entry;
  Ledger ledger;
  Record written;
  Record read;
  uint8_t chunk[kChunkSize];
};

// A client of the server's memory, which does one operation at a time.
struct TableClient {
  Buffer buf;
  ClientMemory* memory;
  Session session;
  size_t outstanding = 0;  // one-sided operations in flight
  uint64_t finished = 0;   // those that have completed
  AppReplyMessage joined = {};
  Clock::time_point alive_at;

  explicit TableClient(Domain& domain)
      : buf(domain, sizeof(ClientMemory), FI_READ | FI_WRITE),
        memory(reinterpret_cast<ClientMemory*>(buf.data.get())),
        session(domain) {
    CheckAtomics(session.endpoint);
  }

  // Waits until `done` returns true. Tells the server now and then that we are
  // alive: it sees nothing of our one-sided operations.
  void WaitUntil(const char* what, const std::function<bool()>& done) {
    session.endpoint.WaitUntil(what, [&] {
      if (done()) return true;
      Clock::time_point now = Clock::now();
      if (now - alive_at > kAlivePeriod && session.mailbox.unsent == 0) {
        alive_at = now;
        session.Send(AppAliveMessage{{AppMessageType::kAlive}, finished});
      }
      return false;
    });
  }

  // Waits for what is in flight, but not for long. The tcp provider of
  // libfabric 1.17 crashes if its endpoint is closed while READs are in flight.
  void Drain() {
    Clock::time_point end = Clock::now() + kDrainLimit;
    while (outstanding > 0 && Clock::now() < end) {
      try {
        session.endpoint.PollCompletion();
      } catch (const std::exception&) {
        // The error that has brought us here is the one to report.
      }
    }
  }

  // Sends a request, of which only an APPEND has an entry, and waits for the
  // answer.
  AppReplyMessage Ask(AppMessageType type, const LogEntry& entry = {}) {
    session.Send(AppAppendMessage{{type}, entry});
    std::optional<Message> message;
    WaitUntil("waiting for an answer", [&] {
      message = session.Take();
      return message.has_value();
    });
    return ReadMessage<AppReplyMessage>(*message, AppMessageType::kReply);
  }

  // Asks where the server's memory is.
  void Join() {
    joined = Ask(AppMessageType::kJoin);
    if (joined.table.size != sizeof(SharedTable) ||
        joined.seat >= kMaxClients) {
      throw BadMessage("the server's memory is of another kind");
    }
  }

  // Does a one-sided operation, and waits until it has completed. `local` is
  // where in our memory it takes place, `remote` where in the table.
  void Do(RdmaOpType type, void* local, size_t len, size_t remote) {
    ++outstanding;
    session.endpoint.Post(
        {.type = type,
         .peer = session.peer,
         .buf = &buf,
         .len = len,
         .offset = size_t(static_cast<uint8_t*>(local) - buf.data.get()),
         .remote_addr = joined.table.addr + remote,
         .remote_key = joined.table.rkey,
         .callback = [this](const RdmaOp& op) {
           --outstanding;
           ++finished;
           op.Check();
         }});
    WaitUntil("waiting for a one-sided operation",
              [this] { return outstanding == 0; });
  }

  // Adds to a word, and returns what it was before. Adding nothing reads it.
  uint64_t FetchAdd(size_t remote, uint64_t number) {
    memory->atomic = {number, 0, 0};
    Do(RdmaOpType::kFetchAdd, &memory->atomic, sizeof(memory->atomic), remote);
    return memory->atomic.before;
  }

  // Replaces a word if it is as expected. Returns what it was before.
  uint64_t CompareSwap(size_t remote, uint64_t expected, uint64_t number) {
    memory->atomic = {number, expected, 0};
    Do(RdmaOpType::kCompareSwap, &memory->atomic, sizeof(memory->atomic),
       remote);
    return memory->atomic.before;
  }
};

// The log: a place for each entry.
struct Log {
  TableClient& client;
  LogEntry& entry = client.memory->entry;
  uint32_t num_messages = 0;  // entries that the server has appended for us
  uint32_t num_entries = 0;   // that we have appended

  // Has the server write the next entry.
  void AppendByMessage() {
    client.Ask(AppMessageType::kAppend, {client.joined.client, num_messages});
    ++num_messages;
  }

  // Draws a ticket, and WRITEs the next entry to the place that it names.
  void Append() {
    uint64_t ticket = client.FetchAdd(offsetof(SharedTable, tickets), 1);
    if (ticket >= kLogSize) {
      throw std::runtime_error(
          "the log is full; the server empties it when all clients have gone");
    }
    entry = {client.joined.client, num_entries};
    client.Do(RdmaOpType::kWrite, &entry, sizeof(entry),
              offsetof(SharedTable, log) + ticket * sizeof(LogEntry));
    ++num_entries;
  }

  // Our entries are in the order in which we have appended them.
  void Check() {
    size_t num = std::min<uint64_t>(
        client.FetchAdd(offsetof(SharedTable, tickets), 0), kLogSize);
    size_t step =
        std::min(kChunkSize,
                 client.session.mailbox.domain.info->ep_attr->max_msg_size) /
        sizeof(LogEntry);
    const auto* entries =
        reinterpret_cast<const LogEntry*>(client.memory->chunk);
    size_t found = 0;
    bool right = true;
    for (size_t first = 0; first < num; first += step) {
      size_t n = std::min(step, num - first);
      client.Do(RdmaOpType::kRead, client.memory->chunk, n * sizeof(LogEntry),
                offsetof(SharedTable, log) + first * sizeof(LogEntry));
      for (size_t i = 0; i < n; ++i) {
        if (entries[i].client != client.joined.client) continue;
        right &= entries[i].count == found++;
      }
    }
    if (!right || found != num_entries) {
      throw std::runtime_error("the log is not as we have written it");
    }
  }
};

// Returns for how long to keep the lock: for tests, and for the chapter.
std::chrono::milliseconds HoldTime() {
  const char* text = getenv("HOLD_MS");
  return std::chrono::milliseconds(text != nullptr ? atoi(text) : 0);
}

// Changes the ledger, which a lock protects.
struct Bookkeeper {
  TableClient& client;
  Ledger& ledger = client.memory->ledger;  // what we have READ
  std::chrono::milliseconds hold = HoldTime();
  std::optional<uint64_t> changes_before = {};  // by our seat
  size_t num_changes = 0;                       // that we have made
  size_t lost_changes = 0;  // of these, those that are not there any more
  size_t lost_turns = 0;    // that others have ended
  size_t ended_turns = 0;   // of others, that we have ended

  // Returns whose turn it is, and which ledger is valid.
  Turn ReadTurn() {
    Turn turn = Turn::FromWord(client.FetchAdd(offsetof(SharedTable, turn), 0));
    if (turn.ledger >= 2 * kMaxClients) throw BadMessage("no such ledger");
    return turn;
  }

  // Replaces the turn, if it is still as expected. Returns whether it was.
  bool ReplaceTurn(const Turn& expected, const Turn& turn) {
    return client.CompareSwap(offsetof(SharedTable, turn), expected.Word(),
                              turn.Word()) == expected.Word();
  }

  // Waits until it is the turn of a ticket, or of a later one. Ends the turn of
  // a client that does not end it itself: it may have died.
  Turn WaitForTurn(uint64_t ticket) {
    Turn turn = ReadTurn();
    Clock::time_point changed_at = Clock::now();
    while (turn.ticket < ticket) {
      // Each look costs the server work, so a client far back looks less often.
      // Of those before us, no more than kMaxClients are alive.
      std::this_thread::sleep_for(
          kTurnPause * std::min<uint64_t>(ticket - turn.ticket, kMaxClients));
      Turn now = ReadTurn();
      if (now.Word() != turn.Word()) {
        changed_at = Clock::now();
      } else if (Clock::now() - changed_at > kLease) {
        if (ReplaceTurn(turn, {turn.ticket + 1, turn.ledger})) ++ended_turns;
      }
      turn = now;
    }
    return turn;
  }

  // Changes the ledger, while nobody else does.
  void Change() {
    while (true) {
      uint64_t ticket = client.FetchAdd(offsetof(SharedTable, lock_tickets), 1);
      Turn turn = WaitForTurn(ticket);
      if (turn.ticket == ticket && TryChange(turn)) return;
      ++lost_turns;
    }
  }

  // Writes the changed ledger aside, then makes it the valid one and ends our
  // turn, both at once. Returns false if our turn was over before that; then
  // nothing has changed.
  bool TryChange(const Turn& turn) {
    Read(turn);
    ++ledger.changes[client.joined.seat];
    ++ledger.total;
    Clock::time_point until = Clock::now() + hold;
    client.WaitUntil("holding the lock", [&] {
      client.session.endpoint.RestartSilence();  // this one is ours
      return Clock::now() >= until;
    });
    size_t aside = 2 * client.joined.seat;
    if (turn.ledger == aside) ++aside;
    client.Do(RdmaOpType::kWrite, &ledger, sizeof(ledger),
              offsetof(SharedTable, ledgers) + aside * sizeof(Ledger));
    if (!ReplaceTurn(turn, {turn.ticket + 1, aside})) return false;
    ++num_changes;
    // It was our turn until now, so nobody has written what we have READ.
    Compare();
    return true;
  }

  // READs the ledger that is valid.
  void Read(const Turn& turn) {
    client.Do(RdmaOpType::kRead, &ledger, sizeof(Ledger),
              offsetof(SharedTable, ledgers) + turn.ledger * sizeof(Ledger));
  }

  // Compares the ledger that we have READ with what we have done ourselves.
  void Compare() {
    uint64_t ours = ledger.changes[client.joined.seat];
    // Others may have had our seat before.
    if (!changes_before) changes_before = ours - num_changes;
    uint64_t expected = *changes_before + num_changes - lost_changes;
    if (ours < expected) lost_changes += expected - ours;
    if (ours > expected || ledger.total != ledger.Sum()) {
      throw std::runtime_error("the ledger is wrong");
    }
  }

  // Takes no lock: if the turn is the same after the READ as before it, nobody
  // has written this ledger meanwhile.
  void Check() {
    Turn turn = ReadTurn();
    while (true) {
      Turn before = turn;
      Read(turn);
      turn = ReadTurn();
      if (turn.Word() == before.Word()) break;
    }
    Compare();
    if (lost_changes > 0) {
      throw std::runtime_error(std::to_string(lost_changes) + " of our " +
                               std::to_string(num_changes) +
                               " changes of the ledger have been lost");
    }
  }
};

// The hash table: READs without a lock.
struct HashTable {
  struct OwnRecord {
    size_t place;
    uint64_t version;
  };
  TableClient& client;
  Record& written = client.memory->written;
  Record& read = client.memory->read;
  std::map<uint64_t, OwnRecord> own_records = {};  // by their keys
  size_t torn_reads = 0;  // of records that changed meanwhile

  // The keys that we own, and those of others.
  static uint64_t Key(size_t seat, size_t i) {
    return 1 + seat * kKeysPerClient + i;
  }

  // The places where a key may be: the next one if this one is taken.
  static size_t Place(uint64_t key, size_t attempt) {
    return (XXH3_64bits(&key, sizeof(key)) + attempt) % kNumRecords;
  }

  // Returns where a record is in the table.
  static size_t RecordAt(size_t place) {
    return offsetof(SharedTable, records) + place * sizeof(Record);
  }

  // READs a record. If it changes meanwhile, we may get a part of the old one
  // and a part of the new one, and READ it again. Returns false if that goes
  // on: its owner has died while it wrote.
  bool Read(size_t place) {
    for (size_t i = 0; i < kMaxReads; ++i) {
      client.Do(RdmaOpType::kRead, &read, sizeof(Record), RecordAt(place));
      if (read.IsValid()) return true;
      ++torn_reads;
    }
    return false;
  }

  // Looks a key up. Returns whether it is there; then its record has been READ.
  bool Get(uint64_t key) {
    for (size_t i = 0; i < kNumRecords; ++i) {
      bool valid = Read(Place(key, i));
      if (read.key == key) return valid && read.version > 0;
      if (read.key == 0) break;
    }
    return false;
  }

  // Takes the first free record for a key, unless the key has one. Returns the
  // place of the record.
  size_t Claim(uint64_t key) {
    for (size_t i = 0; i < kNumRecords; ++i) {
      size_t place = Place(key, i);
      uint64_t before =
          client.CompareSwap(RecordAt(place) + offsetof(Record, key), 0, key);
      if (before == 0 || before == key) return place;
    }
    throw std::runtime_error("the hash table is full");
  }

  // Writes a new version of a record of ours.
  void Put(size_t i) {
    written.key = Key(client.joined.seat, i);
    auto [entry, is_new] = own_records.try_emplace(written.key);
    OwnRecord& own = entry->second;
    if (is_new) {
      own.place = Claim(written.key);
      // Others may have had our seat before.
      Read(own.place);
      own.version = read.version;
    }
    written.version = ++own.version;
    memset(written.data, uint8_t(written.version), sizeof(written.data));
    written.checksum = written.Checksum();
    // The key is there already.
    constexpr size_t kKeySize = offsetof(Record, version);
    client.Do(RdmaOpType::kWrite, &written.version, sizeof(Record) - kKeySize,
              RecordAt(own.place) + kKeySize);
  }

  // Throws if a key is there twice, or a record is not as we have written it.
  void Check() {
    std::set<uint64_t> keys;
    for (size_t place = 0; place < kNumRecords; ++place) {
      Read(place);
      uint64_t key = read.key;
      if (key != 0 && !keys.insert(key).second) {
        throw std::runtime_error("a key is twice in the hash table");
      }
    }
    for (const auto& [key, own] : own_records) {
      if (!Get(key) || read.version != own.version) {
        throw std::runtime_error("a record is not as we have written it");
      }
    }
  }
};

// Returns the seconds since a point in time.
double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Makes all changes of one kind, and prints how long they take.
void Repeat(TableClient& client, const char* what, size_t count,
            const std::function<void()>& change) {
  Clock::time_point start = Clock::now();
  Clock::time_point reported_at = start;
  for (size_t i = 0; i < count; ++i) {
    change();
    if (Clock::now() - reported_at < kReportPeriod) continue;
    reported_at = Clock::now();
    PrintLine(stdout, client.joined.client,
              std::to_string(i + 1) + "/" + std::to_string(count) + " " + what,
              true);
  }
  double seconds = SecondsSince(start);
  char text[100];
  snprintf(text, sizeof(text), "%zu %s: %.3f s, %.1f us each", count, what,
           seconds, 1e6 * seconds / static_cast<double>(count));
  PrintLine(stdout, client.joined.client, text);
}

// Runs the client. Throws unless it gets what it asks for.
int ClientMain(const Address& server_addr, size_t count) {
  Domain domain(GetInfo());
  TableClient client(domain);
  Log log{client};
  Bookkeeper ledger{client};
  HashTable table{client};
  client.session.Connect(server_addr);
  std::mt19937_64 random{std::random_device{}()};
  try {
    client.Join();
    Repeat(client, "entries by message", count, [&] { log.AppendByMessage(); });
    Repeat(client, "entries by FETCH-AND-ADD and WRITE", count,
           [&] { log.Append(); });
    Repeat(client, "changes under the lock", count, [&] { ledger.Change(); });
    Repeat(client, "records written, and as many read", count, [&] {
      table.Put(random() % kKeysPerClient);
      table.Get(
          HashTable::Key(random() % kMaxClients, random() % kKeysPerClient));
    });
    client.session.Send(AppReportMessage{
        {AppMessageType::kReport}, log.num_entries, ledger.num_changes});
    log.Check();
    ledger.Check();
    table.Check();
  } catch (...) {
    client.Drain();
    client.session.SayBye(kContactGrace);
    throw;
  }
  printf(
      "Turns of ours that others ended: %zu, of others that we ended: %zu; "
      "READs of half a WRITE: %zu\n",
      ledger.lost_turns, ledger.ended_turns, table.torn_reads);
  client.session.SayBye();
  printf("Data is correct.\n");
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
    "  10_lock\n"
    "      Run the server.\n"
    "  10_lock ADDRESS [COUNT]\n"
    "      Change its memory COUNT times in each way (1000), while others may\n"
    "      do the same.\n"
    "  10_lock --list\n"
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
    if (args.size() > 2) throw std::invalid_argument("too many arguments");
    size_t count = args.size() > 1 ? ParseNumber("COUNT", args[1]) : 1000;
    if (count > kMaxCount) {
      throw std::invalid_argument("COUNT is more than " +
                                  std::to_string(kMaxCount));
    }
    return ClientMain(ParseAddress(args[0]), count);
  } catch (const std::invalid_argument& e) {
    fprintf(stderr, "error: %s\n%s", e.what(), kUsage);
    return 2;
  } catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
