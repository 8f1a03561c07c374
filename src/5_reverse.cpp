// 5_reverse: both directions.
//
// The client sends its own address in a CONNECT message, then a text. The
// server sends the text back reversed.

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <list>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

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

// What the program uses of libfabric: messages.
constexpr uint64_t kCaps = FI_MSG;

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

  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { Free(); }

  void Free() {
    free(data);
    data = nullptr;
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
};

struct RdmaOp;

// Called once when an operation has completed. It takes note of that and no
// more: nothing may be posted from here.
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
  // Set when it has completed; empty if all went well.
  std::string error;
  RdmaCallback callback;

  const char* Name() const {
    switch (type) {
      case RdmaOpType::kRecv:
        return "RECV";
      case RdmaOpType::kSend:
        return "SEND";
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

  size_t PollCompletion();
  void WaitUntil(const char* what, Peer* peer,
                 const std::function<bool()>& done);

  RdmaOp* NewOp(RdmaOpType type, Peer* peer, Buffer* buf, size_t len,
                const RdmaCallback& callback);
  void Post(RdmaOp* op);
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

// Hands the operation over, waiting for room where there is none.
void Network::Post(RdmaOp* op) {
  try {
    WaitUntil(op->Name(), op->peer, [this, op] { return Submit(op); });
  } catch (...) {
    Complete(op, "given up");
    throw;
  }
}

// Hands an operation to libfabric. False if there is no room for it now: what
// makes room is to read the completion queue (FI_EAGAIN in fi_endpoint(3)).
bool Network::Submit(RdmaOp* op) {
  void* desc = fi_mr_desc(op->buf->mr);
  ssize_t ret = 0;
  switch (op->type) {
    case RdmaOpType::kRecv:
      ret = fi_recv(ep, op->buf->data, op->len, desc, FI_ADDR_UNSPEC, op);
      break;
    case RdmaOpType::kSend:
      ret = fi_send(ep, op->buf->data, op->len, desc, op->peer->fi_addr, op);
      break;
  }
  if (ret == -FI_EAGAIN) {
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
  return count;
}

void Network::HandleCompletion(const struct fi_cq_data_entry& cqe) {
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

  kText = 5,  // client: a text; server: the same, reversed
};

// What each message begins with.
struct AppMessageBase {
  AppMessageType type;
  uint32_t reserved;
  // Chosen by the client at random, and in all messages of its turn, so that
  // none is ever taken for somebody else's.
  uint64_t session;
};

// CONNECT: the client's address. ACCEPT: that of the endpoint that serves it.
struct AppConnectMessage {
  AppMessageBase base;
  uint64_t addr_size;  // bytes used of addr
  uint8_t addr[kMaxAddressSize];

  void SetAddress(const Address& address) {
    addr_size = address.bytes.size();
    memcpy(addr, address.bytes.data(), addr_size);
  }

  Address GetAddress() const { return {{addr, addr + addr_size}}; }
};

// kText is an AppMessageBase, then the text.
constexpr size_t kMaxTextSize = kMessageBufferSize - sizeof(AppMessageBase);

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
      connect.addr_size > sizeof(connect.addr)) {
    throw BadMessage("its sizes do not fit together");
  }
}

// ---------------------------------------------------------------------------
// Application: server
// ---------------------------------------------------------------------------

// What came from elsewhere is not sent to the terminal as it is.
std::string Printable(const std::string& text) {
  std::string result;
  for (char c : text) {
    auto byte = static_cast<uint8_t>(c);
    if (byte < 0x20 || byte == 0x7f) {
      char escape[5];
      snprintf(escape, sizeof(escape), "\\x%02x", byte);
      result += escape;
    } else {
      result += c;
    }
  }
  return result;
}

// The start of the command line for whoever wants to talk to us.
std::string ClientCommand(const char* program, const Network& net) {
  const char* provider = getenv("FI_PROVIDER");
  return (provider ? "FI_PROVIDER='" + std::string(provider) + "' "
                   : std::string()) +
         program + " " + net.addr.ToString();
}

// The client whose turn it is, and an endpoint for it alone. When this is
// destroyed, nothing of the client is left, whatever was in flight.
struct ReverseRequestState {
  enum class State {
    kWaitRequest,
    kWaitBye,
    kDone,
  };

  Inbox inbox;
  Outbox outbox;
  Network net;
  State state = State::kWaitRequest;
  Peer* client = nullptr;
  uint64_t session = 0;

  // Throws if the client sends what it should not, here and below.
  void HandleConnect(const Network& listener, const AppConnectMessage& msg) {
    printf("------\n");
    printf("Received CONNECT message from client:\n");
    printf("  addr: %s\n", msg.GetAddress().ToString().c_str());
    net.OpenBeside(listener);
    inbox.Open(net);
    session = msg.base.session;
    client = net.AddPeerAddress(msg.GetAddress());
    if (client == nullptr) throw BadMessage("an impossible address");

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
      if (base.type == AppMessageType::kText && state == State::kWaitRequest) {
        HandleRequest(message);
      } else if (base.type == AppMessageType::kBye &&
                 state == State::kWaitBye) {
        state = State::kDone;
      } else {
        throw UnexpectedMessage(base);
      }
    }
  }

  void HandleRequest(const Message& message) {
    AppMessageBase base;
    ReadMessage(message, &base, sizeof(base));
    std::string text(message.bytes.begin() + sizeof(base), message.bytes.end());
    if (text.empty()) throw BadMessage("a text that is empty");
    printf("Received %zu bytes: %s\n", text.size(), Printable(text).c_str());
    std::reverse(text.begin(), text.end());
    outbox.Send(net, client, &base, sizeof(base), text.data(), text.size());
    printf("Sent them back reversed.\n");
    state = State::kWaitBye;
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
  Listener listener;
  Network& net = listener.net;
  net.Open(GetInfo(kCaps));
  listener.inbox.Open(net);
  printf("%s\n", Describe(net.info).c_str());
  printf("Run the client with the following command:\n  %s\n",
         ClientCommand(program, net).c_str());

  // One client after the other.
  for (;;) {
    AppConnectMessage connect;
    net.WaitUntil("waiting for a client", nullptr,
                  [&] { return listener.TakeConnect(connect); });
    listener.last_session = connect.base.session;
    try {
      ReverseRequestState s;
      s.HandleConnect(net, connect);
      s.net.housekeeping = [&listener] { listener.TurnAway(); };
      s.net.WaitUntil("serving the client", s.client, [&s] {
        s.HandleMessages();
        return s.state == ReverseRequestState::State::kDone;
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

int ClientMain(const Address& server_addr, const std::string& text) {
  Inbox inbox;
  Outbox outbox;
  Network net;
  net.Open(GetInfo(kCaps));
  inbox.Open(net);
  printf("%s\n", Describe(net.info).c_str());
  Peer* listener = net.AddPeerAddress(server_addr);
  if (listener == nullptr) throw WrongProvider(server_addr, net);

  AppConnectMessage connect = {};
  connect.base = {AppMessageType::kConnect, 0, net.random()};
  connect.SetAddress(net.addr);
  Peer* server = Connect(net, inbox, outbox, listener, connect);

  AppMessageBase request = {AppMessageType::kText, 0, connect.base.session};
  outbox.Send(net, server, &request, sizeof(request), text.data(), text.size());
  printf("Sent %zu bytes: %s\n", text.size(), Printable(text).c_str());
  Message answer;
  AppMessageBase base;
  net.WaitUntil("waiting for the reversed text", server, [&] {
    return TakeMessage(net, inbox, connect.base.session, answer, base);
  });
  if (base.type != AppMessageType::kText) throw UnexpectedMessage(base);
  std::string received(answer.bytes.begin() + sizeof(base), answer.bytes.end());
  printf("Received %zu bytes: %s\n", received.size(),
         Printable(received).c_str());
  SayBye(net, outbox, server, connect.base.session);

  if (received != std::string(text.rbegin(), text.rend())) {
    fprintf(stderr, "error: the text is not correct\n");
    return 1;
  }
  printf("The text is correct.\n");
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
  fprintf(file, "  %s ADDRESS [TEXT]\n", program);
  fprintf(file, "      Have a text reversed (\"Hello, world!\").\n");
  fprintf(file, "  %s --list\n", program);
  fprintf(file, "      List the interfaces found, the one it uses first.\n");
  fprintf(file, "  %s --help\n", program);
  fprintf(file, "      Print this.\n");
  fprintf(file,
          "ADDRESS is what the server prints. The provider is chosen by "
          "FI_PROVIDER.\n");
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
    if (args.size() > 2) throw UsageError{"too many arguments"};
    std::string text = args.size() > 1 ? args[1] : "Hello, world!";
    if (text.empty()) throw UsageError{"TEXT is empty"};
    if (text.size() > kMaxTextSize) throw UsageError{"TEXT is too long"};
    return ClientMain(Address::Parse(args[0]), text);
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
