// 5_reverse: both directions, and many clients at once.
//
// The client sends its own address in a CONNECT message, then a text. The
// server answers from an endpoint that it opens for this client alone, and
// sends the text back reversed.

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

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
constexpr uint64_t kCaps = FI_MSG;

constexpr size_t kMaxAddressSize = 256;        // bytes
constexpr size_t kMaxMessageSize = 64 * 1024;  // bytes
constexpr size_t kBufferAlign = 4096;          // bytes
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

  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { Free(); }

  // Allocates zeroed memory. Writing the zeros makes sure that every page of it
  // exists, which a provider may demand before registration (FI_MR_ALLOCATED).
  void Alloc(size_t bytes) {
    size = bytes;
    size_t align = kBufferAlign;
    size_t rounded = (size + align - 1) / align * align;
    data = static_cast<uint8_t*>(aligned_alloc(align, rounded));
    if (data == nullptr) throw std::bad_alloc();
    memset(data, 0, rounded);
  }

  void Free() {
    if (mr) Close(&mr->fid, "memory region");
    free(data);
    mr = nullptr;
    data = nullptr;
  }
};

// ---------------------------------------------------------------------------
// Operations
// ---------------------------------------------------------------------------

enum class RdmaOpType : uint8_t {
  kRecv,
  kSend,
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
  RdmaCallback callback = nullptr;
  std::string error = {};  // set at completion; empty if all went well

  const char* Name() const {
    switch (type) {
      case RdmaOpType::kRecv:
        return "RECV";
      case RdmaOpType::kSend:
        return "SEND";
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

  Network() = default;
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;
  ~Network();

  void Open(Domain& open_domain);
  fi_addr_t AddPeerAddress(const Address& address);

  bool PostRecv(Buffer& buf, const RdmaCallback& callback);
  bool PostSend(fi_addr_t peer, Buffer& buf, size_t len,
                const RdmaCallback& callback);
  size_t PollCompletion();
  void WaitUntil(const char* what, const std::function<bool()>& done);

  bool Post(RdmaOp request);
  bool Submit(RdmaOp* op);
  void Complete(void* context, size_t len, const std::string& error);
  void ReadError();
  Clock::duration CheckSilence(const char* what) const;
};

// Returns the setting of FI_PROVIDER, as one types it; empty if there is none.
std::string ProviderSetting() {
  const char* provider = getenv("FI_PROVIDER");
  return provider ? "FI_PROVIDER='" + std::string(provider) + "' " : "";
}

// Asks libfabric for the interfaces that can do what we need (`caps`), the best
// first. FI_PROVIDER narrows the choice. The caller owns the list; see
// fi_getinfo(3).
struct fi_info* GetInfo(uint64_t caps) {
  struct fi_info* hints = fi_allocinfo();
  if (hints == nullptr) throw std::bad_alloc();
  hints->caps = caps;
  // Reliable, whole messages, and one endpoint for any number of peers.
  hints->ep_attr->type = FI_EP_RDM;
  // Demands that we can meet. The answer keeps those that the provider makes.
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  // Only one thread uses the domain, so the provider needs no locks.
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  // Messages to the same peer must arrive in the order of their SENDs.
  hints->tx_attr->msg_order = FI_ORDER_SAS;
  hints->rx_attr->msg_order = FI_ORDER_SAS;

  struct fi_info* info = nullptr;
  int ret = fi_getinfo(kApiVersion, nullptr, nullptr, 0, hints, &info);
  fi_freeinfo(hints);
  FiCheck(ret,
          ProviderSetting() +
              "fi_getinfo finds no interface that can do what this "
              "program needs (`fi_info -t FI_EP_RDM` lists what there is)");
  return info;
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

  kText = 4,  // client: a text; server: the same, reversed
};

// The beginning of each message.
struct AppMessageBase {
  AppMessageType type;
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

// Prints a line about a client. The number says which one.
void PrintLine(FILE* file, size_t number, const std::string& text) {
  fprintf(file, "[%zu] %s\n", number, text.c_str());
}

// A client, and what it asks of the server: to reverse a text.
struct ReverseRequestState {
  Session session;
  size_t number;  // of the client; begins each line about it
  bool answered = false;

  // Opens the session. Throws if that fails.
  ReverseRequestState(Domain& domain, size_t client_number,
                      const AppConnectMessage& connect)
      : number(client_number) {
    session.Open(domain);
    session.Accept(connect, {});
    PrintLine(
        stdout, number,
        "Received CONNECT message from client " + ToHex(connect.GetAddress()));
  }

  // Does what can be done for the client now. Returns the number of
  // completions. Throws if the client has sent something wrong, or nothing for
  // too long.
  size_t Poll() {
    size_t completions = session.Poll();
    Message message;
    while (session.Take(message)) HandleRequest(message);
    session.net.CheckSilence("waiting for the client");
    return completions;
  }

  void HandleRequest(const Message& message) {
    AppMessageBase base;
    ReadMessage(message, AppMessageType::kText, &base, sizeof(base));
    std::string text(message.begin() + sizeof(base), message.end());
    if (text.empty()) throw BadMessage("its text is empty");
    if (answered) throw BadMessage("it is a second text");
    PrintLine(stdout, number,
              "Received " + std::to_string(text.size()) + " bytes: " + text);
    std::reverse(text.begin(), text.end());
    session.Send(&base, sizeof(base), text.data(), text.size());
    PrintLine(stdout, number, "Sent them back reversed.");
    answered = true;
  }
};

int ServerMain(const char* program) {
  Domain domain;
  Inbox inbox;
  Network net;
  std::list<ReverseRequestState> clients;
  domain.Open(GetInfo(kCaps));
  net.Open(domain);
  inbox.Open(net);
  PrintClientCommand(program, net);

  std::deque<AppConnectMessage> waiting;  // for whom there is no room yet
  size_t num_clients = 0;                 // so far
  Clock::time_point listened_at;
  while (!g_interrupted) {
    size_t completions = 0;
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
        if (!client->session.done) continue;
        PrintLine(stdout, client->number, "Done.");
      } catch (const std::exception& e) {
        // It ends this client's session, and costs the others nothing.
        PrintLine(stderr, client->number, std::string("error: ") + e.what());
      }
      clients.erase(client);
    }
    if (completions > 0) continue;
    std::this_thread::sleep_for(kIdlePause);
  }
  return 0;
}

// ---------------------------------------------------------------------------
// Client
// ---------------------------------------------------------------------------

int ClientMain(const Address& server_addr, const std::string& text) {
  Domain domain;
  Session session;
  domain.Open(GetInfo(kCaps));
  session.Open(domain);
  printf("%s\n", Describe(domain.info).c_str());
  AppMessageBase request = {AppMessageType::kText};
  if (sizeof(request) + text.size() > domain.MaxMessageSize()) {
    throw std::invalid_argument("TEXT is too long");
  }
  session.Connect(server_addr, {});

  session.Send(&request, sizeof(request), text.data(), text.size());
  printf("Sent %zu bytes: %s\n", text.size(), text.c_str());
  Message message;
  session.WaitUntil("waiting for the reversed text",
                    [&] { return session.Take(message); });
  AppMessageBase base;
  ReadMessage(message, AppMessageType::kText, &base, sizeof(base));
  std::string received(message.begin() + sizeof(base), message.end());
  printf("Received %zu bytes: %s\n", received.size(), received.c_str());
  session.SayBye();

  if (received != std::string(text.rbegin(), text.rend())) {
    throw std::runtime_error("the text is not correct");
  }
  printf("The text is correct.\n");
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
          "  %s ADDRESS [TEXT]\n"
          "      Have a text reversed (\"Hello, world!\").\n"
          "  %s --list\n"
          "      List the interfaces found, the one it uses first.\n"
          "  %s --help\n"
          "      Print this.\n"
          "ADDRESS is what the server prints. FI_PROVIDER chooses the "
          "provider.\n",
          program, program, program, program);
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
    std::string text = args.size() > 1 ? args[1] : "Hello, world!";
    if (text.empty()) throw std::invalid_argument("TEXT is empty");
    return ClientMain(ParseAddress(args[0]), text);
  } catch (const std::invalid_argument& e) {
    fprintf(stderr, "error: %s\n", e.what());
    PrintUsage(stderr, program);
    return 2;
  } catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
