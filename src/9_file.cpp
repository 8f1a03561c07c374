// 9_file: a file, as fast as the receiver can take it.
//
// The receiver lends slots of its memory and says when each of them is free
// again, which is a credit. The sender WRITEs a chunk of the file into a slot
// only if it has the credit for it. Immediate data says which chunk has come.
//
// Based on 14_strangers.

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
#include <sys/stat.h>
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
#include <filesystem>
#include <functional>
#include <future>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
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

constexpr size_t kChunkSize = 1 << 20;    // bytes of the file in a WRITE
constexpr size_t kDefaultSlots = 8;       // that a client asks for
constexpr size_t kMaxSlots = 64;          // that a client gets
constexpr uint64_t kMaxChunks = 1 << 30;  // of a file; so 1 PiB
constexpr size_t kMaxNameSize = 250;      // bytes; with ".part" 255

// After so many polls without a completion, a loop gives the core to others.
// Not after each poll: one may move data without completing anything, and the
// others may keep the core for long.
constexpr size_t kPollsPerYield = 64;

constexpr auto kListenPeriod = 1ms;  // between two looks for new clients
constexpr auto kAlivePeriod = 1s;    // between two signs of life
constexpr auto kIdleLimit = 60s;     // without any work, while others wait

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

  kPut = 6,     // client: take this file
  kReady = 7,   // server: these slots are yours, and all of them are free
  kChunk = 8,   // client: these chunks are in your slots
  kCredit = 9,  // server: these slots are free again
  kEnd = 10,    // client: that was all; does the checksum agree?
  kSaved = 11,  // server: the file is safe on disk
  kAlive = 12,  // either side: my disk is busy
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
  printf("Run the client with the following command:\n  %s%s %s FILE\n",
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

// PUT: a client wants to send a file.
struct AppPutMessage {
  AppMessageBase base;
  uint64_t file_size;  // bytes
  uint32_t num_slots;  // that it would like to have
  char name[252];      // ends with a zero byte
};

// READY: the slots that the client gets. Chunk i of the file goes to slot
// i % num_slots, each time that this slot is free.
struct AppReadyMessage {
  AppMessageBase base;
  uint32_t num_slots;
  uint32_t chunk_size;  // bytes of a chunk, and of a slot
  uint64_t addr;        // of the slots, one after the other
  uint64_t size;        // bytes, of all of them
  uint64_t rkey;        // with which the client may WRITE to them
};

// END: the sum of the checksums of all chunks.
struct AppEndMessage {
  AppMessageBase base;
  uint64_t checksum;
};

// Reads a CHUNK or a CREDIT: numbers of chunks or of slots, a uint32_t each.
std::vector<uint32_t> ReadNumbers(const Message& message, AppMessageType type) {
  auto base = ReadMessage<AppMessageBase>(message, type);
  size_t size = message.size() - sizeof(base);
  if (size % sizeof(uint32_t) != 0) throw BadMessage("half a number");
  std::vector<uint32_t> numbers(size / sizeof(uint32_t));
  if (size > 0) memcpy(numbers.data(), message.data() + sizeof(base), size);
  return numbers;
}

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
  for (size_t i = 0; i < name.size(); ++i) {
    auto c = uint8_t(name[i]);
    // In UTF-8, those from 0x80 to 0x9f follow a 0xc2.
    bool high = i > 0 && name[i - 1] == '\xc2' && c < 0xa0;
    if (c < ' ' || c == 0x7f || high) {
      return "the name contains a control character";
    }
  }
  return "";
}

// Owns the descriptor of an open file, and closes it.
struct File {
  int fd = -1;

  File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  operator int() const { return fd; }
  ~File() {
    if (fd >= 0) close(fd);
  }
};

// A file that is being sent.
struct SourceFile {
  File file;
  struct stat status = {};  // at the beginning

  explicit SourceFile(const std::string& path) {
    // O_NONBLOCK, because opening a named pipe would wait for its other end.
    file.fd = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (file < 0 || fstat(file, &status) != 0) {
      throw SystemError("cannot open " + path);
    }
    if (!S_ISREG(status.st_mode)) {
      throw std::runtime_error(path + " is not a regular file");
    }
  }

  // Returns how long the file was when it was opened, in bytes.
  uint64_t Size() const { return uint64_t(status.st_size); }

  // Reads all of a piece, however little the kernel gives at a time.
  void Read(uint8_t* data, size_t size, uint64_t offset) const {
    while (size > 0) {
      ssize_t ret = pread(file, data, size, off_t(offset));
      if (ret < 0) throw SystemError("cannot read the file");
      if (ret == 0) throw std::runtime_error("the file has become shorter");
      data += ret;
      size -= size_t(ret);
      offset += size_t(ret);
    }
  }

  // Throws if the file is not what it was when we opened it.
  void CheckUnchanged() const {
    struct stat now = {};
    if (fstat(file, &now) != 0) throw SystemError("fstat");
    if (now.st_size != status.st_size ||
        now.st_mtim.tv_sec != status.st_mtim.tv_sec ||
        now.st_mtim.tv_nsec != status.st_mtim.tv_nsec) {
      throw std::runtime_error("the file has changed while it was being sent");
    }
    // Some files report a size of 0 but contain data, such as those in /proc.
    char byte = 0;
    ssize_t ret = pread(file, &byte, 1, status.st_size);
    if (ret < 0) throw SystemError("cannot read the file");
    if (ret > 0) throw std::runtime_error("the file is longer than it says");
  }
};

// A file that is being received. It is called NAME.part until it is complete.
// The destructor removes it, unless `keep` is set.
struct TargetFile {
  File dir;
  File file;
  std::string name;
  std::string path;  // what the file is called now; empty: there is none
  bool keep = false;

  ~TargetFile() {
    if (!path.empty() && !keep) unlinkat(dir, path.c_str(), 0);
  }

  // Creates the file in a directory. Never touches a file that exists, nor what
  // a symbolic link points to.
  void Create(const std::string& directory, const std::string& file_name) {
    name = file_name;
    std::string part = name + ".part";
    dir.fd = open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0) throw SystemError("cannot open " + directory);
    if (faccessat(dir, name.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0) {
      throw std::runtime_error(name + " exists already");
    }
    file.fd = openat(dir, part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                     0666);
    if (file < 0 && errno == EEXIST) {
      throw std::runtime_error(part +
                               " exists already; if nobody is sending this "
                               "file, a transfer has left it: remove it");
    }
    if (file < 0) throw SystemError("cannot create " + part);
    path = part;
  }

  // Writes all of a piece, however little the kernel takes at a time.
  void Write(const uint8_t* data, size_t size, uint64_t offset) const {
    while (size > 0) {
      ssize_t ret = pwrite(file, data, size, off_t(offset));
      if (ret < 0) throw SystemError("cannot write " + path);
      data += ret;
      size -= size_t(ret);
      offset += size_t(ret);
    }
  }

  // Gives the complete file its name. Returns when the file and its name are on
  // disk. Makes a second name and removes the first, because rename(2) would
  // replace a file that somebody has created in the meantime.
  void Finish() {
    if (fsync(file) != 0) throw SystemError("cannot sync " + path);
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

// Returns whether a thread is still at work.
bool Running(const Task& task) { return task.valid() && !Ended(task); }

// Makes the disk of the receiver slow, to show what credits do, and for tests.
void SlowDown() {
  if (const char* ms = getenv("SLOW_DISK_MS")) {
    std::this_thread::sleep_for(std::chrono::milliseconds(atoi(ms)));
  }
}

// Returns the checksum of a chunk. It depends on the number of the chunk, so
// the sum for a file depends on the order of its chunks, but not on the order
// in which they are added.
uint64_t Checksum(uint64_t chunk, const uint8_t* data, size_t size) {
  return XXH3_64bits_withSeed(data, size, chunk);
}

// Returns how many bytes of a file are in a chunk: all but the last are full.
size_t BytesOf(uint64_t chunk, uint64_t chunk_size, uint64_t file_size) {
  return size_t(std::min(chunk_size, file_size - chunk * chunk_size));
}

// Turns a chunk's number into immediate data, and back. Whoever does not know
// the nonce cannot do that. The result is never 0, because that would be none.
uint32_t ChunkNumber(uint32_t chunk, uint32_t nonce) {
  return chunk ^ (nonce | 1u << 31);
}

// Returns how many chunks a file has.
uint64_t CountChunks(uint64_t file_size, uint64_t chunk_size) {
  return file_size / chunk_size + (file_size % chunk_size > 0);
}

// To be called while our disk works. Tells the other side now and then that we
// are alive, and does not take its silence for an end: it waits for us.
void WaitForDisk(Session& session, Clock::time_point& alive_at) {
  Clock::time_point now = Clock::now();
  session.endpoint.RestartSilence();
  if (now - alive_at < kAlivePeriod || session.mailbox.unsent > 0) return;
  alive_at = now;
  session.Send(AppMessageBase{AppMessageType::kAlive});
}

// Sends the numbers of chunks or of slots, and clears them. While an earlier
// message is on its way, they wait, and others join them, so that few messages
// take many numbers.
void SendNumbers(Session& session, AppMessageType type,
                 std::vector<uint32_t>& numbers) {
  if (numbers.empty() || session.mailbox.unsent > 0) return;
  session.Send(AppMessageBase{type},
               {reinterpret_cast<const char*>(numbers.data()),
                numbers.size() * sizeof(uint32_t)});
  numbers.clear();
}

// Returns the time that has passed.
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

// A client, and the file that it wants to put here.
struct ServedClient {
  enum class State {
    kWaitPut,
    kReceive,
    kFinish,
    kSaved,
    kRefused,  // after an error, until the client says BYE
  };

  // A piece of our memory, lent to the client for one WRITE. When the chunk has
  // been written to the file, the slot is lent again.
  struct Slot {
    uint64_t chunk = 0;  // in the slot, or the next to arrive
    uint64_t checksum = 0;
    Task save;
  };

  size_t number;  // of the client; begins each line about it
  AppConnectMessage connect_msg;
  std::string directory;      // for the file
  std::optional<Buffer> buf;  // all slots, one after the other
  Session session;
  State state = State::kWaitPut;
  TargetFile file;
  uint64_t file_size = 0;   // bytes
  uint64_t chunk_size = 0;  // bytes
  uint64_t num_chunks = 0;
  uint64_t saved_chunks = 0;
  uint64_t checksum = 0;             // of the saved chunks
  std::optional<AppEndMessage> end;  // once the client has sent it
  std::vector<uint32_t> arrived;     // chunks to save, as the client says
  std::vector<uint32_t> credits;     // slots to report as free
  std::vector<Slot> slots;
  Task finish;
  Clock::time_point started_at;
  Clock::time_point alive_at;
  Clock::time_point printed_at;
  Clock::time_point worked_at = Clock::now();
  bool done = false;  // has said BYE or failed; last messages may be leaving

  // Opens the session. Throws if the machine lacks what that takes.
  ServedClient(Domain& domain, size_t client_number,
               const AppConnectMessage& connect, const std::string& target)
      : number(client_number),
        connect_msg(connect),
        directory(target),
        session(domain) {}

  // Accepts the client. Throws if its address cannot be right.
  void Accept() {
    PrintLine(stdout, number,
              "Received CONNECT message from client " +
                  ToHex(AddressIn(connect_msg)));
    session.Accept(connect_msg);
    alive_at = Clock::now();
    session.endpoint.on_imm_data = [this](uint32_t imm_data) {
      arrived.push_back(ChunkNumber(imm_data, session.nonce));
    };
  }

  // Does what can be done for the client now. Returns the number of
  // completions. Throws if the client has gone.
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
        if (state != State::kRefused) HandleMessage(*message);
      }
      for (uint32_t chunk : std::exchange(arrived, {})) SaveChunk(chunk);
      ContinueSave();
      ContinueFinish();
      SendNumbers(session, AppMessageType::kCredit, credits);
      if (DiskBusy()) WaitForDisk(session, alive_at);
      PrintProgress();
    } catch (const std::exception& e) {
      if (state != State::kRefused) RefuseFile(e.what());
    }
    session.endpoint.CheckSilence("waiting for the client");
    return completions;
  }

  // Returns whether there is more to do right away, even if nothing completes.
  // Many providers take the client's WRITEs only while we poll.
  bool Busy() const { return state == State::kReceive; }

  // Prints how far it is, now and then.
  void PrintProgress() {
    Clock::time_point now = Clock::now();
    if (state != State::kReceive || now - printed_at < kAlivePeriod) return;
    printed_at = now;
    PrintLine(stdout, number,
              "Saved " + std::to_string(saved_chunks) + " of " +
                  std::to_string(num_chunks) + " chunks",
              true);
  }

  // To be called while others wait for a place. Throws if this client has only
  // been alive for a long time.
  void CheckIdle() {
    if (DiskBusy() || Clock::now() - worked_at < kIdleLimit) return;
    session.Refuse("you do nothing, and others wait");
    throw std::runtime_error("it does nothing, and others wait");
  }

  // Returns whether other threads still use what we own.
  bool DiskBusy() const {
    return Running(finish) ||
           std::any_of(slots.begin(), slots.end(),
                       [](const Slot& slot) { return Running(slot.save); });
  }

  // Tells the client why its file is not saved. It may still WRITE, so we keep
  // the session until it has heard that and says BYE.
  void RefuseFile(const std::string& reason) {
    PrintLine(stderr, number, "error: " + Printable(reason));
    state = State::kRefused;
    session.Refuse(reason);
  }

  // Does what a message asks for, in the state that we are in.
  void HandleMessage(const Message& message) {
    AppMessageType type = TypeOf(message);
    if (state == State::kWaitPut) return HandlePut(message);
    if (type == AppMessageType::kChunk) return HandleChunk(message);
    if (type == AppMessageType::kAlive) return;
    end = ReadMessage<AppEndMessage>(message, AppMessageType::kEnd);
  }

  // A client that gives up says BYE, too.
  void HandleBye() const {
    if (state == State::kSaved || state == State::kRefused) return;
    PrintLine(stderr, number,
              "error: the client has left before its file was saved");
  }

  // Creates the file, and lends the client its slots.
  void HandlePut(const Message& message) {
    auto put = ReadMessage<AppPutMessage>(message, AppMessageType::kPut);
    const fi_info* info = session.mailbox.domain.info.get();
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
    file.Create(directory, name);

    // A small file does not need all that the client would like to have.
    slots.resize(std::clamp<uint64_t>(num_chunks, 1, put.num_slots));
    for (size_t i = 0; i < slots.size(); ++i) slots[i].chunk = i;
    // FI_RECV, too: an adapter without WRITEs has us fetch the data ourselves.
    buf.emplace(session.mailbox.domain, slots.size() * chunk_size,
                FI_REMOTE_WRITE | FI_RECV);

    AppReadyMessage ready = {};
    ready.base.type = AppMessageType::kReady;
    ready.num_slots = uint32_t(slots.size());
    ready.chunk_size = uint32_t(chunk_size);
    // A place in a region is named by its address or, if the provider does
    // without FI_MR_VIRT_ADDR, by its distance from the start.
    bool virt_addr = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
    if (virt_addr) ready.addr = reinterpret_cast<uint64_t>(buf->data.get());
    ready.size = buf->size;
    ready.rkey = fi_mr_key(buf->mr);
    session.Send(ready);
    PrintLine(stdout, number,
              "Receiving " + Printable(name) + ": " +
                  std::to_string(file_size) + " bytes into " +
                  std::to_string(slots.size()) + " slots of " +
                  std::to_string(chunk_size));
    started_at = printed_at = Clock::now();
    state = State::kReceive;
  }

  // Does the work of immediate data, for clients that send none.
  void HandleChunk(const Message& message) {
    for (uint32_t chunk : ReadNumbers(message, AppMessageType::kChunk)) {
      if (chunk >= num_chunks) throw BadMessage("a chunk beyond the end");
      SaveChunk(chunk);
    }
  }

  // Begins to save a chunk that has arrived in its slot. A client may send any
  // number, so a chunk that no slot is lent for is ignored.
  void SaveChunk(uint64_t chunk) {
    if (state != State::kReceive || chunk >= num_chunks) return;
    size_t i = chunk % slots.size();
    Slot& slot = slots[i];
    if (slot.chunk != chunk || slot.save.valid()) return;
    session.endpoint.RestartSilence();
    slot.save = Start([this, i, &slot] {
      SlowDown();
      const uint8_t* data = &buf->data[i * chunk_size];
      size_t size = BytesOf(slot.chunk, chunk_size, file_size);
      file.Write(data, size, slot.chunk * chunk_size);
      // Afterwards, so that it reveals a WRITE that came while we wrote.
      slot.checksum = Checksum(slot.chunk, data, size);
    });
  }

  // Lends the slots whose chunks have been saved, each for its next chunk.
  void ContinueSave() {
    for (size_t i = 0; i < slots.size(); ++i) {
      if (!Ended(slots[i].save)) continue;
      slots[i].save.get();
      checksum += slots[i].checksum;
      ++saved_chunks;
      worked_at = Clock::now();
      slots[i].chunk += slots.size();
      if (slots[i].chunk >= num_chunks) continue;
      credits.push_back(uint32_t(i));
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
    worked_at = Clock::now();
    session.Send(AppMessageBase{AppMessageType::kSaved});
    file.keep = true;
    PrintLine(stdout, number,
              "Saved " + Printable(file.name) + ": " +
                  DescribeRate(file_size, SecondsSince(started_at)));
    state = State::kSaved;
  }
};

// Runs the server, which saves files in a directory.
int ServerMain(const char* program, const std::string& directory) {
  Domain domain(GetInfo());
  Mailbox listener(domain);
  WaitingLine line{domain};
  std::list<ServedClient> clients;
  // Without this, a file that exceeds a size limit would kill the server.
  signal(SIGXFSZ, SIG_IGN);
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
                             line.visitors.front().connect, directory);
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
        if (!client.done && !line.visitors.empty()) client.CheckIdle();
      } catch (const std::exception& e) {
        // It ends this client's session, and costs the others nothing. What is
        // wrong with a client is said once.
        if (client.state != ServedClient::State::kRefused) {
          PrintLine(stderr, client.number, "error: " + Printable(e.what()));
        }
        client.done = true;
      }
      return client.done && !client.DiskBusy() && client.session.HasLeft();
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
  std::optional<Buffer> buf;  // all slots, one after the other
  Session session;
  AppPutMessage put = {};
  AppReadyMessage ready = {};
  uint64_t num_chunks = 0;
  uint64_t read_chunks = 0;
  uint64_t checksum = 0;  // of the chunks that have been read
  bool imm_data = false;  // immediate data tells the server what has arrived
  std::vector<uint32_t> written_chunks;  // otherwise we tell it
  bool end_sent = false;
  bool saved = false;
  std::vector<Slot> slots;
  Clock::time_point started_at;
  Clock::time_point alive_at;

  PutClient(Domain& domain, const std::string& path)
      : file(path), session(domain) {
    // Some providers have no immediate data. With ofi_rxm (libfabric 1.17 and
    // 2.6), a server crashes if it closes an endpoint while a WRITE with
    // immediate data is arriving. NO_IMMEDIATE_DATA is for tests.
    imm_data =
        domain.info->domain_attr->cq_data_size >= sizeof(uint32_t) &&
        strstr(domain.info->fabric_attr->prov_name, "ofi_rxm") == nullptr &&
        getenv("NO_IMMEDIATE_DATA") == nullptr;
  }

  // Sends the file. Throws if the server does not say that it is saved.
  void Put(const std::string& name, size_t num_slots) {
    put.base.type = AppMessageType::kPut;
    put.num_slots = uint32_t(num_slots);
    put.file_size = file.Size();
    snprintf(put.name, sizeof(put.name), "%s", name.c_str());
    session.Send(put);
    started_at = alive_at = Clock::now();
    try {
      session.endpoint.WaitUntil("sending the file",
                                 [this] { return Continue(); });
    } catch (...) {
      session.SayBye(kContactGrace);
      throw;
    }
  }

  // Does what can be done now. Returns whether the file is saved.
  bool Continue() {
    HandleMessages();
    for (size_t i = 0; i < slots.size(); ++i) ContinueSlot(i);
    ContinueEnd();
    SendNumbers(session, AppMessageType::kChunk, written_chunks);
    if (DiskBusy()) WaitForDisk(session, alive_at);
    return saved;
  }

  // Returns whether other threads still read our file.
  bool DiskBusy() const {
    return std::any_of(slots.begin(), slots.end(),
                       [](const Slot& slot) { return Running(slot.read); });
  }

  // Takes the server's messages.
  void HandleMessages() {
    while (std::optional<Message> message = session.Take()) {
      switch (TypeOf(*message)) {
        case AppMessageType::kReady:
          HandleReady(*message);
          break;
        case AppMessageType::kCredit:
          HandleCredit(*message);
          break;
        case AppMessageType::kSaved:
          if (!end_sent) throw BadMessage("SAVED before the end");
          saved = true;
          break;
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
    ready = ReadMessage<AppReadyMessage>(message, AppMessageType::kReady);
    if (ready.num_slots == 0 || ready.num_slots > put.num_slots ||
        ready.chunk_size == 0 || ready.chunk_size > kChunkSize ||
        ready.size < size_t{ready.num_slots} * ready.chunk_size) {
      throw BadMessage("its numbers do not fit together");
    }
    num_chunks = CountChunks(put.file_size, ready.chunk_size);
    buf.emplace(session.mailbox.domain,
                size_t{ready.num_slots} * ready.chunk_size, FI_WRITE);
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
      uint8_t* data = &buf->data[i * ready.chunk_size];
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
    session.endpoint.Post({
        .type = RdmaOpType::kWrite,
        .peer = session.peer,
        .buf = &*buf,
        .len = BytesOf(slot.chunk, ready.chunk_size, put.file_size),
        .offset = i * ready.chunk_size,
        .remote_addr = ready.addr + i * ready.chunk_size,
        .remote_key = ready.rkey,
        .imm_data =
            imm_data ? ChunkNumber(uint32_t(slot.chunk), session.nonce) : 0,
        .callback =
            [this, i](const RdmaOp& op) {
              op.Check();
              HandleWriteCompletion(i);
            },
    });
  }

  // Called when a chunk is in place: begins to read this slot's next one.
  void HandleWriteCompletion(size_t i) {
    Slot& slot = slots[i];
    if (!imm_data) written_chunks.push_back(uint32_t(slot.chunk));
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

  // Sends the END, once the whole file has been read.
  void ContinueEnd() {
    if (slots.empty() || end_sent || read_chunks < num_chunks) return;
    file.CheckUnchanged();
    session.Send(AppEndMessage{{AppMessageType::kEnd}, checksum});
    end_sent = true;
  }
};

// Sends a file. Throws if the server has not saved it.
int ClientMain(const Address& server_addr, const std::string& path,
               size_t num_slots) {
  Domain domain(GetInfo());
  PutClient client(domain, path);
  client.session.Connect(server_addr);
  std::string name = std::filesystem::path(path).filename();
  client.Put(name, num_slots);
  printf("Sent %s: %s\n", name.c_str(),
         DescribeRate(client.put.file_size, SecondsSince(client.started_at))
             .c_str());
  client.session.SayBye();
  printf("The server has saved the file.\n");
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
    "  9_file [DIRECTORY]\n"
    "      Run the server. It saves files in DIRECTORY (.).\n"
    "  9_file ADDRESS FILE [SLOTS]\n"
    "      Send it a file, with up to SLOTS chunks on their way (8).\n"
    "  9_file --list\n"
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
    if (args.empty()) return ServerMain(argv[0], ".");
    if (args[0] == "--help") {
      printf("%s", kUsage);
      return 0;
    }
    if (args[0] == "--list" && args.size() == 1) return ListMain();
    if (args.size() > 3) throw std::invalid_argument("too many arguments");
    if (args.size() == 1) {
      std::error_code ignored;
      if (!std::filesystem::is_directory(args[0], ignored)) {
        throw std::invalid_argument("\"" + args[0].substr(0, 80) +
                                    "\" is not a directory, and not ADDRESS "
                                    "FILE either");
      }
      return ServerMain(argv[0], args[0]);
    }
    size_t num_slots =
        args.size() > 2 ? ParseNumber("SLOTS", args[2]) : kDefaultSlots;
    if (num_slots > kMaxSlots) {
      throw std::invalid_argument("SLOTS is more than " +
                                  std::to_string(kMaxSlots));
    }
    return ClientMain(ParseAddress(args[0]), args[1], num_slots);
  } catch (const std::invalid_argument& e) {
    fprintf(stderr, "error: %s\n%s", e.what(), kUsage);
    return 2;
  } catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
