// 13_crowd: a thousand clients, asleep most of the time.
//
// A store of keys and values. The server answers all clients from one endpoint,
// so it counts what closing an endpoint for each of them had given for nothing:
// who has how many buffers, and who has gone.
//
// Based on 12_sleep.

#include <fcntl.h>
#include <poll.h>
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
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <charconv>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// ---- Constants ----

constexpr size_t kMaxAddressSize = 256;           // bytes
constexpr size_t kMaxKeySize = 64;                // bytes
constexpr size_t kMaxValueSize = 1024;            // bytes
constexpr size_t kMaxMessageSize = 2048;          // bytes
constexpr size_t kMaxStoreSize = 64 << 20;        // bytes, of all entries
constexpr size_t kEntrySize = 128;                // bytes, beside key and value
constexpr size_t kServerRecvCount = 256;          // RECVs, for all clients
constexpr size_t kClientRecvCount = 4;            // RECVs, for the server
constexpr size_t kSpareOps = 256;                 // rest before they are reused
constexpr size_t kCompletionQueueSize = 16384;    // more than we ever need
constexpr size_t kCompletionQueueReadCount = 64;  // entries read at a time
constexpr auto kSilenceLimit = 10s;               // then we give up
constexpr auto kSpin = 50us;                      // of polling, before we sleep
constexpr auto kCrowded = 100ms;      // we do not poll on a core in demand
constexpr auto kMaxSleep = 500ms;     // at a time: then we look at our limits
constexpr auto kIdlePause = 500us;    // where nothing can wake us
constexpr auto kMaxPause = 20ms;      // there, after a long silence
constexpr auto kContactGrace = 1s;    // for a first or last message
constexpr auto kConnectAgain = 1s;    // without an ACCEPT
constexpr auto kForgetAfter = 30s;    // of silence, the server forgets a client
constexpr size_t kEmptyWakes = 16;    // in a row, then we pause
constexpr size_t kManyWakes = 2000;   // in a row, then for longer
constexpr size_t kMaxClients = 4000;  // of the server; as many may be leaving
constexpr size_t kConnectBatch = 4;   // CONNECTs that are handled at a time
constexpr size_t kBlockedBatch = 64;  // peers that have their turn at a time
constexpr size_t kMaxRecords = 4;     // of one address
constexpr size_t kMaxInFlight = 4;    // SENDs to one peer
constexpr size_t kMaxUnsent = 16;     // SENDs to one peer, with those that wait
constexpr size_t kMaxNumber = 1'000'000'000;  // on the command line

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
int g_wake_fd = -1;  // a descriptor that is readable after such a signal

// Called for a signal: the loops end, and a second signal ends the process.
void HandleSignal(int) {
  g_interrupted = true;
  eventfd_write(g_wake_fd, 1);  // wakes a loop that is about to fall asleep
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
  hints->caps = FI_MSG;              // we want to send messages,
  hints->ep_attr->type = FI_EP_RDM;  // reliably, to any number of peers
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
      fi_getinfo(FI_VERSION(1, 17), nullptr, nullptr, 0, hints.get(), &info),
      ProviderSetting() +
          "fi_getinfo finds no interface that can do what this program needs "
          "(`fi_info -t FI_EP_RDM` lists what there is; shm needs room in "
          "/dev/shm)");
  return Info(info, fi_freeinfo);
}

// Describes an interface in one line.
std::string Describe(const fi_info* info) {
  return "domain: " + std::string(info->domain_attr->name) +
         ", fabric: " + info->fabric_attr->name +
         ", provider: " + info->fabric_attr->prov_name;
}

// 2. The network, and in it our access to the adapter.
struct Domain {
  Info info = GetInfo();
  Owned<fid_fabric> fabric;
  Owned<fid_domain> handle;
  uint64_t next_key = 1;      // no two regions may have the same one
  size_t empty_wakes = 0;     // since something has last completed
  Clock::time_point poll_at;  // before that, others need our core

  Domain() {
    printf("%s\n", Describe(info.get()).c_str());
    FiCheck(fi_fabric(info->fabric_attr, &fabric.ptr, nullptr), "fi_fabric");
    FiCheck(fi_domain(fabric, info.get(), &handle.ptr, nullptr), "fi_domain");
  }

  // Returns the greatest length of a message, in bytes. Server and client use
  // the same provider, so it is the same for both.
  size_t MaxMessageSize() const {
    return std::min(kMaxMessageSize, info->ep_attr->max_msg_size);
  }
};

// 3. Registered memory: the adapter may use it, for FI_SEND or for FI_RECV.
struct Buffer {
  size_t size;                   // bytes
  std::unique_ptr<char[]> data;  // zeros, so that its pages exist
  Owned<fid_mr> mr;

  Buffer(Domain& domain, size_t bytes, uint64_t access)
      : size(bytes), data(std::make_unique<char[]>(bytes)) {
    FiCheck(fi_mr_reg(domain.handle, data.get(), size, access, 0,
                      domain.next_key++, 0, &mr.ptr, nullptr),
            "fi_mr_reg");
  }
};

// ---- Operations and completions ----

// The kinds of operations.
enum class RdmaOpType { kRecv, kSend };

// A work request: an operation for libfabric to do, and the function to call
// once when it is done, which may post others.
struct RdmaOp {
  fi_context2 context = {};  // must come first: for the provider's notes
  RdmaOpType type = RdmaOpType::kRecv;
  fi_addr_t peer = FI_ADDR_UNSPEC;  // of a SEND; a RECV takes from anybody
  Buffer* buf = nullptr;
  size_t len = 0;  // bytes; of a RECV, set when a message has arrived
  std::function<void(const RdmaOp&)> callback = nullptr;
  uint64_t flags = 0;      // of a SEND: FI_DELIVERY_COMPLETE, where it matters
  std::string error = {};  // set at completion; empty if all went well
  bool in_flight = false;  // libfabric has it, and has not ended it

  // Throws if the operation has failed.
  void Check() const {
    if (error.empty()) return;
    throw std::runtime_error(type == RdmaOpType::kRecv
                                 ? "RECV failed: " + error
                                 : "SEND failed: " + error +
                                       "; is the other side still running?");
  }
};

// 4. An endpoint, with an address vector and a completion queue.
struct Endpoint {
  Domain& domain;
  std::deque<RdmaOp> ops;        // as many as were ever in use, and a few more
  std::deque<RdmaOp*> free_ops;  // not in use; the one to use next comes first
  Clock::time_point silent_since = Clock::now();  // see CheckSilence
  Address addr;                                   // our own
  bool refused = false;  // there was no room for an operation
  int wait_fd = -1;  // readable when to read `cq`; -1: there is no such thing

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
    // Ask for a descriptor, for poll(2). Not all providers can have one.
    cq_attr.wait_obj = FI_WAIT_FD;
    if (fi_cq_open(domain.handle, &cq_attr, &cq.ptr, nullptr) != 0) {
      cq_attr.wait_obj = FI_WAIT_NONE;
      FiCheck(fi_cq_open(domain.handle, &cq_attr, &cq.ptr, nullptr),
              "fi_cq_open");
    }
    if (fi_control(&cq.ptr->fid, FI_GETWAIT, &wait_fd) != 0) wait_fd = -1;
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

  // Ends all contact with a peer.
  void RemovePeerAddress(fi_addr_t peer) {
    int ret = fi_av_remove(av, &peer, 1, 0);
    if (ret != 0) {
      fprintf(stderr, "warning: fi_av_remove: %s\n", fi_strerror(-ret));
    }
  }

  // 5. Hands an operation to libfabric. Its buffer must not change until it has
  // completed. Returns false if libfabric has no room for it now; reading
  // completions makes room, so try again afterwards. An operation that
  // libfabric refuses completes at once, with an error.
  bool Post(RdmaOp request) {
    while (free_ops.size() < kSpareOps) {
      free_ops.push_back(&ops.emplace_back());
    }
    RdmaOp* op = free_ops.front();
    *op = std::move(request);
    ssize_t ret = Submit(op);
    if (ret == -FI_EAGAIN) {
      refused = true;
      return false;
    }
    free_ops.pop_front();
    op->in_flight = true;
    if (ret != 0) Complete(op, 0, ErrorText(int(-ret)));
    return true;
  }

  // Calls the function of libfabric for an operation.
  ssize_t Submit(RdmaOp* op) {
    char* data = op->buf->data.get();
    void* desc = fi_mr_desc(op->buf->mr);
    if (op->type == RdmaOpType::kRecv) {
      return fi_recv(ep, data, op->len, desc, op->peer, op);
    }
    iovec iov = {.iov_base = data, .iov_len = op->len};
    fi_msg msg = {};
    msg.msg_iov = &iov;
    msg.desc = &desc;
    msg.iov_count = 1;
    msg.addr = op->peer;
    msg.context = op;
    // An answer tells that a request has arrived, so most SENDs may complete as
    // soon as their buffer is free again.
    return fi_sendmsg(ep, &msg, op->flags);
  }

  // Reads what has completed and calls back. Many providers work only while we
  // read. Returns the number of completions. Throws if a callback does.
  size_t PollCompletion() {
    fi_cq_data_entry cqe[kCompletionQueueReadCount];
    ssize_t ret = fi_cq_read(cq, cqe, kCompletionQueueReadCount);
    if (ret == -FI_EAGAIN) return 0;
    domain.empty_wakes = 0;
    if (ret == -FI_EAVAIL) {
      ReadError();
      return 1;
    }
    FiCheck(ret, "fi_cq_read");
    // A callback that throws must not cost the entries after it.
    std::exception_ptr failure;
    for (ssize_t i = 0; i < ret; ++i) {
      try {
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
    // Some providers do not say which operation has failed.
    if (entry.op_context == nullptr) {
      throw std::runtime_error("an operation failed: " + error);
    }
    Complete(entry.op_context, 0, error);
  }

  // Returns when something may have completed at one of the endpoints (all of
  // one domain), when a signal has come, or after `limit`. If a peer
  // was heard just now, it returns at once.
  static void Sleep(const std::vector<Endpoint*>& endpoints,
                    Clock::duration limit = kMaxSleep) {
    Domain& domain = endpoints.front()->domain;
    std::vector<fid*> cqs;
    std::vector<pollfd> fds = {{g_wake_fd, POLLIN, 0}};
    Clock::time_point now = Clock::now();
    Clock::duration silence = Clock::duration::max();
    bool can_be_woken = true;
    for (Endpoint* endpoint : endpoints) {
      silence = std::min(silence, now - endpoint->silent_since);
      // The next message often comes at once, and being woken takes longer than
      // looking again. The peer may need this core to send it, though.
      if (now >= domain.poll_at && silence < kSpin) {
        std::this_thread::yield();
        // A process that computes keeps it for ms, and would do so each time.
        if (Clock::now() - now > kSpin) domain.poll_at = now + kCrowded;
        return;
      }
      // Nothing tells us that there is room again.
      if (endpoint->refused || endpoint->wait_fd < 0) can_be_woken = false;
      endpoint->refused = false;
      if (endpoint->wait_fd < 0) continue;
      cqs.push_back(&endpoint->cq.ptr->fid);
      fds.push_back({endpoint->wait_fd, POLLIN, 0});
    }
    // The longer nothing has come, the less often we look.
    auto pause =
        std::clamp<Clock::duration>(silence / 64, kIdlePause, kMaxPause);
    if (!can_be_woken) {
      std::this_thread::sleep_for(std::min(limit, pause));
      return;
    }
    // What has come since we have last looked need not make a descriptor
    // readable any more. Only this tells that it is safe to sleep (fi_poll(3)).
    int ret = fi_trywait(domain.fabric, cqs.data(), int(cqs.size()));
    if (ret != -FI_EAGAIN) {
      FiCheck(ret, "fi_trywait");
      auto timeout = std::chrono::ceil<std::chrono::milliseconds>(limit);
      ret = poll(fds.data(), fds.size(), int(timeout.count()));
      if (ret == 0) domain.empty_wakes = 0;  // it was sleep
    }
    // A descriptor that is always readable lets nobody sleep. First, though, it
    // may be for work that completes nothing: many new connections.
    if (++domain.empty_wakes > kManyWakes) {
      std::this_thread::sleep_for(std::min(limit, pause));
    } else if (domain.empty_wakes > kEmptyWakes) {
      std::this_thread::sleep_for(std::min<Clock::duration>(limit, kIdlePause));
    }
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
    while (!done()) {
      if (g_interrupted && Clock::now() - start >= grace) CheckInterrupted();
      CheckSilence(what, limit);
      if (PollCompletion() == 0) Sleep({this});
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

// ---- Messages ----

using Message = std::string;  // any bytes

// The kinds of messages, and who sends them.
enum class AppMessageType : uint32_t {
  kConnect = 1,  // client: this is my address
  kAccept = 2,   // server: this is your number
  kBye = 3,      // client: I want nothing more
  kRefused = 4,  // server: you get nothing more; followed by the reason

  kGet = 5,  // client: requests
  kPut = 6,
  kDelete = 7,
  kDone = 8,      // server: replies; after a GET, followed by the value
  kNotFound = 9,  // there is no such key
  kFull = 10,     // there is no room for this value
};

// The beginning of each message. All clients write to the same endpoint, so the
// number says whose message it is. A stranger may guess that, but not the
// number that the client has chosen for its conversation with the server.
struct AppMessageBase {
  AppMessageType type;
  uint32_t number = 0;  // of the client; set by Mailbox::Send, like the nonce
  uint32_t nonce = 0;
};

// A CONNECT.
struct AppConnectMessage {
  AppMessageBase base;
  uint32_t addr_size;  // bytes used of addr
  uint8_t addr[kMaxAddressSize];
};

// A request, followed by the key and the value; or a reply, followed by the
// value.
struct AppRequestMessage {
  AppMessageBase base;
  uint32_t sequence = 0;  // of the client's requests; a reply repeats it
  uint32_t key_size = 0;  // bytes
};

// Numbers travel as they are in memory, so both sides need the same byte order.
static_assert(std::endian::native == std::endian::little,
              "the numbers in messages are little-endian");

// Returns what to throw for a message that cannot be right.
std::runtime_error BadMessage(const std::string& what) {
  return std::runtime_error("bad message: " + what);
}

// Copies the beginning of a message into a struct that starts with an
// AppMessageBase. Throws if the message is too short for it.
template <typename T>
T ReadMessage(const Message& message) {
  if (message.size() < sizeof(T)) {
    throw BadMessage(std::to_string(message.size()) + " bytes");
  }
  T head;
  memcpy(&head, message.data(), sizeof(head));
  return head;
}

// Does the reverse of ReadMessage: the bytes of a struct, and of a tail.
template <typename T>
Message WriteMessage(const T& head, std::string_view tail = {}) {
  // Padding would carry whatever was in memory there.
  static_assert(std::has_unique_object_representations_v<T>);
  Message message(reinterpret_cast<const char*>(&head), sizeof(head));
  return std::move(message.append(tail));
}

// ---- Mailboxes ----

// Somebody to send messages to, and the messages that are on their way. Must
// not be destroyed while one of them is in flight.
struct Peer {
  fi_addr_t addr = FI_ADDR_UNSPEC;
  uint32_t number = 0;          // of the client
  uint32_t nonce = 0;           // of the conversation
  std::deque<RdmaOp> unposted;  // SENDs that wait for room
  size_t in_flight = 0;         // SENDs
  std::string error;            // of the first SEND that has failed

  // Returns how many SENDs wait or are in flight.
  size_t Unsent() const { return unposted.size() + in_flight; }
};

// An endpoint, and messages from and to any number of peers.
struct Mailbox {
  Domain& domain;
  std::list<Buffer> bufs;               // of all RECVs and SENDs
  std::vector<Buffer*> free_recv_bufs;  // those without a RECV
  std::deque<RdmaOp> arrivals;          // completed RECVs
  std::vector<Buffer*> free_send_bufs;  // those without a message
  std::deque<Peer*> blocked;            // those with messages that wait
  Endpoint endpoint;

  Mailbox(Domain& open_domain, size_t recv_count)
      : domain(open_domain), endpoint(open_domain) {
    for (size_t i = 0; i < recv_count; ++i) {
      free_recv_bufs.push_back(
          &bufs.emplace_back(domain, domain.MaxMessageSize(), FI_RECV));
    }
    PostRecvs();
  }

  // Posts a RECV for each idle buffer, as far as libfabric has room.
  void PostRecvs() {
    auto arrived = [this](const RdmaOp& op) { arrivals.push_back(op); };
    while (!free_recv_bufs.empty() &&
           endpoint.Post({.type = RdmaOpType::kRecv,
                          .buf = free_recv_bufs.back(),
                          .len = free_recv_bufs.back()->size,
                          .callback = arrived})) {
      free_recv_bufs.pop_back();
    }
  }

  // Posts the SENDs to a peer, in order, as far as libfabric has room; the rest
  // waits for its turn. A peer that does not read must not use up the room of
  // all others, so each has a share of it.
  void PostSends(Peer& peer) {
    while (!peer.unposted.empty() && peer.in_flight < kMaxInFlight) {
      ++peer.in_flight;  // before its callback, which Post may call
      if (!endpoint.Post(peer.unposted.front())) {
        --peer.in_flight;
        break;
      }
      peer.unposted.pop_front();
    }
    if (!peer.unposted.empty()) blocked.push_back(&peer);
  }

  // Posts what waits. Each peer gets its turn, as often as the others. One with
  // its share in flight waits for a completion, and is no turn.
  void PostBlocked() {
    size_t turns = kBlockedBatch;
    for (size_t i = blocked.size(); i > 0 && turns > 0; --i) {
      Peer* peer = blocked.front();
      blocked.pop_front();
      if (peer->in_flight < kMaxInFlight) --turns;
      PostSends(*peer);
    }
  }

  // Posts what has to wait, and polls. Returns the number of completions.
  size_t Poll() {
    PostRecvs();
    PostBlocked();
    return endpoint.PollCompletion();
  }

  // Takes out the next message, if there is one. Throws if its RECV has failed:
  // it was too long, for example.
  std::optional<Message> Take() {
    if (arrivals.empty()) return std::nullopt;
    RdmaOp recv = std::move(arrivals.front());
    arrivals.pop_front();
    auto* data = recv.buf->data.get();
    Message message(data, data + (recv.error.empty() ? recv.len : 0));
    free_recv_bufs.push_back(recv.buf);
    recv.Check();
    return message;
  }

  // Sends a message: a head of fixed size, and a tail.
  template <typename T>
  void Send(Peer& peer, const T& head, std::string_view tail = {},
            uint64_t flags = 0) {
    Message message = WriteMessage(head, tail);
    AppMessageBase base = {head.base.type, peer.number, peer.nonce};
    memcpy(message.data(), &base, sizeof(base));
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
    auto sent = [this, &peer](const RdmaOp& op) {
      --peer.in_flight;
      free_send_bufs.push_back(op.buf);
      if (peer.error.empty()) peer.error = op.error;
    };
    peer.unposted.push_back({.type = RdmaOpType::kSend,
                             .peer = peer.addr,
                             .buf = buf,
                             .len = message.size(),
                             .callback = sent,
                             .flags = flags});
    if (peer.unposted.size() == 1) PostSends(peer);  // else it has its turn
  }

  // Drops the SENDs to a peer that wait.
  void DropSends(Peer& peer) {
    for (RdmaOp& op : peer.unposted) free_send_bufs.push_back(op.buf);
    peer.unposted.clear();
    std::erase(blocked, &peer);
  }
};

// ---- The server ----

// Prints how to reach the server.
void PrintClientCommand(const char* program, const Endpoint& endpoint) {
  printf("Run the client with the following command:\n  %s%s %s\n",
         ProviderSetting().c_str(), program, ToHex(endpoint.addr).c_str());
}

// Prints whether the provider can wake us.
void PrintSleep(const Endpoint& endpoint) {
  printf("%s\n",
         endpoint.wait_fd < 0
             ? "Nothing can wake us here: pauses of up to 20 ms instead."
             : "We sleep until the completion queue wakes us.");
}

// What clients say is their address, and who says so.
struct Contact {
  fi_addr_t addr = FI_ADDR_UNSPEC;  // libfabric's number, while it is in use
  size_t users = 0;                 // clients that use the number
  std::set<uint32_t> nonces;        // of all clients with this address
};

// A client of the server.
struct ServedClient {
  Address addr;
  Peer peer;
  Clock::time_point heard_at = Clock::now();
  bool answered = false;            // it has, so its address is not invented
  Clock::time_point leave_at = {};  // until then, the last messages may leave
};

// The server: one mailbox, and what it knows about each client.
struct Server {
  using Clients = std::unordered_map<uint32_t, ServedClient>;  // by number

  Domain domain;
  Clients clients;
  Clients leaving;           // with messages on their way; nobody hears them
  uint32_t last_number = 0;  // of a client
  // What clients choose is not hashed: they could choose what collides.
  std::map<Address, Contact> contacts;
  std::deque<Message> connects;  // CONNECTs that are still to be handled
  std::map<std::string, std::string> store;
  size_t store_size = 0;  // bytes
  size_t num_requests = 0;
  std::string printed;  // how things stood when we looked last
  Clock::time_point looked_at = Clock::now();
  Mailbox mailbox{domain, kServerRecvCount};

  // Does what may fail without ending the server: a message that cannot be
  // right, or something wrong with the endpoint.
  static void Try(const std::function<void()>& what) {
    try {
      what();
    } catch (const std::exception& e) {
      fprintf(stderr, "error: %s\n", e.what());
    }
  }

  // Handles the messages that have come. All of them, so that whoever sends bad
  // ones holds up nobody. Returns 0 if there was nothing to do.
  size_t Poll() {
    size_t completions = 0;
    Try([&] { completions = mailbox.Poll(); });
    while (!mailbox.arrivals.empty()) {
      Try([&] { HandleMessage(*mailbox.Take()); });
    }
    // A few at a time: contacting a client may take a millisecond.
    for (size_t i = 0; i < kConnectBatch && !connects.empty(); ++i) {
      Message message = std::move(connects.front());
      connects.pop_front();
      Try([&] { HandleConnect(message); });
    }
    if (Clock::now() - looked_at >= kMaxSleep) {
      looked_at = Clock::now();
      ForgetGone();
    }
    return completions + connects.size();
  }

  // Handles a message. Throws if it cannot be right.
  void HandleMessage(const Message& message) {
    auto base = ReadMessage<AppMessageBase>(message);
    if (base.type == AppMessageType::kConnect) {
      if (connects.size() < kMaxClients) connects.push_back(message);
      return;
    }
    auto it = clients.find(base.number);
    // A stranger, or a client that we have forgotten.
    if (it == clients.end() || it->second.peer.nonce != base.nonce) return;
    ServedClient& client = it->second;
    client.heard_at = Clock::now();
    client.answered = true;
    mailbox.endpoint.RestartSilence();
    if (base.type == AppMessageType::kBye) return Leave(client);
    try {
      HandleRequest(client, message);
    } catch (const std::exception& e) {
      Refuse(client, e.what());
    }
  }

  // Accepts a new client.
  void HandleConnect(const Message& message) {
    auto connect = ReadMessage<AppConnectMessage>(message);
    if (connect.addr_size > sizeof(connect.addr)) {
      throw BadMessage("its sizes do not fit together");
    }
    if (clients.size() + leaving.size() >= 2 * kMaxClients) {
      throw std::runtime_error("a CONNECT finds no room for one more record");
    }
    Address addr(connect.addr, connect.addr + connect.addr_size);
    // Whoever begins anew, after a long silence, has an address here already.
    auto it = contacts.find(addr);
    if (it != contacts.end()) {
      // A CONNECT that we have, sent again: its ACCEPT is on its way.
      if (it->second.nonces.contains(connect.base.nonce)) return;
      // Each record has a share of its own.
      if (it->second.nonces.size() >= kMaxRecords) {
        throw BadMessage("one CONNECT too many");
      }
    }
    if (it == contacts.end() || it->second.users == 0) {
      fi_addr_t peer_addr = mailbox.endpoint.AddPeerAddress(addr);
      it = contacts.try_emplace(addr).first;
      it->second.addr = peer_addr;
    }
    ++it->second.users;
    it->second.nonces.insert(connect.base.nonce);
    mailbox.endpoint.RestartSilence();
    uint32_t number = ++last_number;
    ServedClient& client = clients[number];
    client.addr = addr;
    client.peer.addr = it->second.addr;
    client.peer.number = number;
    client.peer.nonce = connect.base.nonce;
    if (clients.size() > kMaxClients) {
      return Refuse(client, "there are too many clients");
    }
    mailbox.Send(client.peer, AppRequestMessage{{AppMessageType::kAccept}});
  }

  // Does what a client asks for, and replies. Throws if it cannot be right.
  void HandleRequest(ServedClient& client, const Message& message) {
    auto request = ReadMessage<AppRequestMessage>(message);
    size_t size = message.size() - sizeof(request);
    AppMessageType type = request.base.type;
    if (type < AppMessageType::kGet || type > AppMessageType::kDelete ||
        request.key_size > std::min(kMaxKeySize, size) ||
        size - request.key_size > kMaxValueSize) {
      throw BadMessage("its type or its sizes");
    }
    if (client.peer.Unsent() >= kMaxUnsent) {
      return Forget(client, "it asks and does not read");
    }
    ++num_requests;
    std::string key = message.substr(sizeof(request), request.key_size);
    std::string value = message.substr(sizeof(request) + request.key_size);
    AppRequestMessage reply = {{AppMessageType::kDone}, request.sequence};
    auto it = store.find(key);
    size_t new_size = size + kEntrySize;
    size_t old_size =
        it == store.end() ? 0 : key.size() + it->second.size() + kEntrySize;
    if (type == AppMessageType::kPut) {
      if (store_size - old_size + new_size > kMaxStoreSize) {
        reply.base.type = AppMessageType::kFull;
      } else {
        store_size += new_size - old_size;
        store[key].swap(value);  // a copy might keep the memory of the old one
      }
    } else if (it == store.end()) {
      reply.base.type = AppMessageType::kNotFound;
    } else if (type == AppMessageType::kGet) {
      return mailbox.Send(client.peer, reply, it->second);
    } else {
      store_size -= old_size;
      store.erase(it);
    }
    mailbox.Send(client.peer, reply);
  }

  // Tells a client why it gets nothing more.
  void Refuse(ServedClient& client, const std::string& reason) {
    fprintf(stderr, "[%u] refused: %s\n", client.peer.number, reason.c_str());
    mailbox.Send(client.peer, AppRequestMessage{{AppMessageType::kRefused}},
                 reason);
    Leave(client, kContactGrace);
  }

  // Sends nothing more to a client, not even what waits.
  void Forget(ServedClient& client, const std::string& why) {
    fprintf(stderr, "[%u] forgotten: %s\n", client.peer.number, why.c_str());
    Leave(client);
  }

  // Hears a client no more. Messages to it may leave for some time.
  void Leave(ServedClient& client, Clock::duration grace = 0s) {
    client.leave_at = Clock::now() + grace;
    leaving.insert(clients.extract(client.peer.number));
  }

  // Forgets the clients that have gone.
  void ForgetGone() {
    for (auto it = clients.begin(); it != clients.end();) {
      ServedClient& client = (it++)->second;
      auto silence = Clock::now() - client.heard_at;
      if (!client.peer.error.empty()) {
        Forget(client, "SEND failed: " + client.peer.error);
      } else if (silence > kSilenceLimit && client.peer.Unsent() > 0 &&
                 !client.answered) {
        Forget(client, "nobody is there");
      } else if (silence > kForgetAfter) {
        Forget(client, "it has been silent for long");
      }
    }
    for (auto it = leaving.begin(); it != leaving.end();) {
      ServedClient& client = it->second;
      if (client.peer.Unsent() == 0 || Clock::now() >= client.leave_at) {
        GiveUp(client);
      }
      bool gone = client.peer.Unsent() == 0;
      if (gone) ForgetNonce(client);
      it = gone ? leaving.erase(it) : std::next(it);
    }
    std::string status = std::to_string(clients.size()) + " clients, " +
                         std::to_string(num_requests) + " requests so far";
    if (status != printed) printf("%s\n", status.c_str());
    printed = status;
  }

  // Makes room for another client with the same address.
  void ForgetNonce(const ServedClient& client) {
    auto it = contacts.find(client.addr);
    it->second.nonces.erase(client.peer.nonce);
    if (it->second.nonces.empty()) contacts.erase(it);
  }

  // Drops what waits for a client, and has libfabric give up what is in flight.
  void GiveUp(ServedClient& client) {
    Peer& peer = client.peer;
    mailbox.DropSends(peer);
    if (peer.addr == FI_ADDR_UNSPEC) return;
    // An address that we remove must not be that of another record.
    if (--contacts[client.addr].users == 0) {
      mailbox.endpoint.RemovePeerAddress(peer.addr);
    }
    peer.addr = FI_ADDR_UNSPEC;
  }
};

// Runs the server, until a signal ends it.
int ServerMain(const char* program) {
  Server server;
  Endpoint& endpoint = server.mailbox.endpoint;
  PrintSleep(endpoint);
  PrintClientCommand(program, endpoint);
  while (!g_interrupted) {
    if (server.Poll() == 0) Endpoint::Sleep({&endpoint});
  }
  // An ACCEPT on its way is a first contact: with the shm provider of libfabric
  // 1.17, the client would end with us.
  auto has_sends = [](auto& client) { return client.second.peer.Unsent() > 0; };
  Clock::time_point end = Clock::now() + kContactGrace;
  while (Clock::now() < end &&
         std::any_of(server.clients.begin(), server.clients.end(), has_sends)) {
    Server::Try([&] { server.mailbox.Poll(); });
  }
  return 0;
}

// ---- The client ----

// A client: a mailbox, and requests to the server, one at a time.
struct Client {
  Peer server;
  AppRequestMessage request;            // the last one
  std::string content;                  // its key and its value
  uint32_t sequence = 0;                // of the last request
  std::optional<AppMessageType> reply;  // to it, once it is there
  std::string value;                    // in the reply
  Clock::time_point asked_at;
  Clock::time_point connect_at;  // when the last CONNECT was sent
  Mailbox mailbox;

  Client(Domain& domain, const Address& server_addr)
      : mailbox(domain, kClientRecvCount) {
    server.addr = mailbox.endpoint.AddPeerAddress(server_addr);
  }

  // Polls and handles messages. Throws if a message could not be sent, or if we
  // are refused.
  void Poll() {
    mailbox.Poll();
    while (!mailbox.arrivals.empty()) {
      Message message;
      try {
        message = *mailbox.Take();
      } catch (const std::runtime_error&) {
        continue;
      }
      HandleMessage(message);
    }
    if (!server.error.empty()) {
      throw std::runtime_error("SEND failed: " + server.error +
                               "; is the other side still running?");
    }
    // With a connection that the server has just given up, a CONNECT is lost.
    if (IsWaiting() && !IsConnected() &&
        Clock::now() - connect_at > kConnectAgain) {
      SendConnect();
    }
  }

  // Handles a message. Ignores what is not from our server.
  void HandleMessage(const Message& message) {
    if (message.size() < sizeof(AppRequestMessage)) return;
    auto head = ReadMessage<AppRequestMessage>(message);
    if (head.base.nonce != server.nonce) return;
    mailbox.endpoint.RestartSilence();
    std::string tail = message.substr(sizeof(head));
    if (head.base.type == AppMessageType::kAccept) {
      server.number = head.base.number;
      if (IsWaiting()) SendRequest();
    } else if (head.base.type == AppMessageType::kRefused) {
      throw std::runtime_error("the server has refused: " + Printable(tail));
    } else if (head.sequence == sequence && !reply) {
      reply = head.base.type;
      value = tail;
    } else {
      throw BadMessage("it answers nothing that we have asked");
    }
  }

  // Begins a conversation. IsConnected tells whether the server takes part.
  void Connect() {
    mailbox.Poll();  // libfabric notices if the server has hung up
    server.nonce = std::random_device()();
    server.number = 0;
    asked_at = Clock::now();
    mailbox.endpoint.RestartSilence();
    SendConnect();
  }

  // Sends a CONNECT, perhaps again.
  void SendConnect() {
    const Address& addr = mailbox.endpoint.addr;
    AppConnectMessage connect = {};
    connect.base.type = AppMessageType::kConnect;
    connect.addr_size = uint32_t(addr.size());
    std::copy(addr.begin(), addr.end(), connect.addr);
    mailbox.Send(server, connect);
    connect_at = Clock::now();
  }

  // Returns whether the server has accepted us.
  bool IsConnected() const { return server.number != 0; }

  // Returns whether a reply should come.
  bool IsWaiting() const { return sequence != 0 && !reply; }

  // Asks for something; then `reply` comes. Connects first if the server may
  // have forgotten us.
  void Ask(AppMessageType type, const std::string& key,
           const std::string& value = {}) {
    bool forgotten = Clock::now() - asked_at > kForgetAfter / 2;
    if (forgotten) Connect();
    reply.reset();
    request = {{type}, ++sequence, uint32_t(key.size())};
    content = key + value;
    if (!forgotten) SendRequest();
  }

  // Sends the request, once we are connected.
  void SendRequest() {
    asked_at = Clock::now();
    mailbox.endpoint.RestartSilence();
    mailbox.Send(server, request, content);
  }

  // Tells the server that we want nothing more. It must arrive before we close.
  void SayBye() {
    if (!IsConnected()) return;
    mailbox.Send(server, AppRequestMessage{{AppMessageType::kBye}}, {},
                 FI_DELIVERY_COMPLETE);
  }

  // Returns whether nothing of ours waits or is in flight any more.
  bool HasLeft() const { return server.Unsent() == 0; }
};

// Waits until something is there from the server. Throws if nothing comes.
void WaitFor(Client& client, const char* what,
             const std::function<bool()>& done, Clock::duration grace = 0s,
             std::chrono::seconds limit = kSilenceLimit) {
  auto poll_and_ask = [&] {
    client.Poll();
    return done();
  };
  client.mailbox.endpoint.WaitUntil(what, poll_and_ask, grace, limit);
}

// Connects, asks for one thing, and prints the reply.
int ClientMain(const Address& server_addr, AppMessageType type,
               const std::string& key, const std::string& value) {
  if (key.size() > kMaxKeySize || value.size() > kMaxValueSize) {
    throw std::invalid_argument("KEY or VALUE is too long");
  }
  Domain domain;
  Client client(domain, server_addr);
  // A signal may come before the first contact or wait for its end. In between,
  // the shm provider of libfabric 1.17 would end the server with us.
  CheckInterrupted();
  client.Connect();
  auto has_left = [&] { return client.HasLeft(); };
  WaitFor(client, "sending CONNECT", has_left, kContactGrace);
  WaitFor(client, "waiting for ACCEPT", [&] { return client.IsConnected(); });
  client.Ask(type, key, value);
  WaitFor(client, "waiting for the reply", [&] { return !!client.reply; });
  try {
    client.SayBye();
    WaitFor(client, "saying BYE", has_left, 0s, kContactGrace);
  } catch (const std::runtime_error&) {
    // The server will notice our silence.
  }
  if (client.reply != AppMessageType::kDone) {
    throw std::runtime_error(client.reply == AppMessageType::kFull
                                 ? "the server has no room for it"
                                 : "the server has no such key");
  }
  printf("%s\n", type == AppMessageType::kGet ? Printable(client.value).c_str()
                                              : "Done.");
  return 0;
}

// One of a crowd. It puts a value, gets it back and compares, over and over.
struct CrowdClient : Client {
  using Client::Client;
  std::string key = "key of client " + std::to_string(std::random_device()());
  std::string stored;             // the value that the server should have
  Clock::time_point due_at = {};  // when to ask again

  // Asks for the next thing.
  void AskNext() {
    bool put = sequence % 2 == 0;
    if (put) stored = key + ": " + std::to_string(sequence);
    Ask(put ? AppMessageType::kPut : AppMessageType::kGet, key,
        put ? stored : "");
  }

  // Polls. Returns whether the reply has come. Throws if nothing comes, or not
  // what should come.
  bool HasReply() {
    Poll();
    mailbox.endpoint.CheckSilence("waiting for the server");
    bool put = sequence % 2 == 1;
    if (reply &&
        (reply != AppMessageType::kDone || value != (put ? "" : stored))) {
      throw std::runtime_error("the reply is not correct: " + Printable(value));
    }
    return reply.has_value();
  }
};

// Runs many clients in one process, until the server has replied so often since
// all were connected. None of them may wait: the others would wait along.
int CrowdMain(const Address& server_addr, size_t num_clients,
              size_t num_replies, std::chrono::milliseconds period) {
  Domain domain;
  std::list<CrowdClient> crowd;
  while (crowd.size() < num_clients) crowd.emplace_back(domain, server_addr);
  std::vector<Clock::duration> times;                  // of the replies
  Clock::time_point start = Clock::time_point::max();  // all are connected
  while (!g_interrupted && times.size() < num_replies) {
    Clock::time_point now = Clock::now();
    Clock::time_point wake_at = now + kMaxSleep;
    std::vector<Endpoint*> waiting = {&crowd.front().mailbox.endpoint};
    bool connected = true;
    for (CrowdClient& each : crowd) {
      // Nothing comes to those that have not asked.
      if (each.IsWaiting() && each.HasReply()) {
        if (start <= now) times.push_back(Clock::now() - each.asked_at);
        each.due_at = each.asked_at + period;
      }
      // One after the other: at first, each has to be connected.
      bool idle = !each.IsWaiting() && times.size() < num_replies;
      if (idle && connected && now >= each.due_at) each.AskNext();
      connected = connected && each.IsConnected();
      if (each.IsWaiting()) {
        waiting.push_back(&each.mailbox.endpoint);
      } else if (each.due_at > now) {
        wake_at = std::min(wake_at, each.due_at);
      }
    }
    if (connected && start > now) {
      start = now;
      printf("%zu clients are connected.\n", num_clients);
    }
    Endpoint::Sleep(waiting, wake_at - now);
  }
  double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  for (CrowdClient& each : crowd) each.SayBye();
  for (auto end = Clock::now() + kContactGrace; CrowdClient & each : crowd) {
    while (!each.HasLeft() && Clock::now() < end) each.mailbox.Poll();
  }
  CheckInterrupted();
  times.resize(num_replies);  // the last round may have brought more
  std::sort(times.begin(), times.end());
  printf(
      "%zu replies, all correct, %.0f a second: half took up to %ld us, 99 %% "
      "up to %ld us.\n",
      num_replies, static_cast<double>(num_replies) / seconds,
      times[num_replies / 2] / 1us, times[num_replies * 99 / 100] / 1us);
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
    "  13_crowd\n"
    "      Run the server.\n"
    "  13_crowd ADDRESS {put KEY VALUE | get KEY | delete KEY}\n"
    "      Have it store a value, return it, or forget it.\n"
    "  13_crowd ADDRESS CLIENTS [REQUESTS [PERIOD]]\n"
    "      Run many clients, with so many requests (1000) each, one every "
    "PERIOD\n"
    "      milliseconds (0).\n"
    "  13_crowd --list\n"
    "      List the interfaces found, the one it uses first.\n"
    "ADDRESS is what the server prints. FI_PROVIDER chooses the provider.\n";

// Reads a number of at least `least`. Throws std::invalid_argument.
size_t ParseNumber(const char* name, const std::string& text,
                   size_t least = 1) {
  size_t number = 0;
  const char* end = text.data() + text.size();
  auto result = std::from_chars(text.data(), end, number);
  if (result.ec != std::errc() || result.ptr != end || number < least) {
    throw std::invalid_argument(
        std::string(name) + " is not a number of at least " +
        std::to_string(least) + ": \"" + text.substr(0, 80) + "\"");
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
  g_wake_fd = eventfd(0, EFD_CLOEXEC);
  InstallSignalHandlers();
  RaiseFileLimit();
  // Has ofi_rxm look for new connections each millisecond instead of each ten.
  setenv("FI_OFI_RXM_CM_PROGRESS_INTERVAL", "1000", 0);
  // Settings of tcp;ofi_rxm: fi_av_remove gives up what is in flight to the
  // peer, and buffers are as short as our messages.
  setenv("FI_AV_REMOVE_CLEANUP", "1", 0);
  setenv("FI_OFI_RXM_BUFFER_SIZE", "2048", 0);
  try {
    if (args.empty()) return ServerMain(argv[0]);
    if (args[0] == "--help") {
      printf("%s", kUsage);
      return 0;
    }
    if (args[0] == "--list" && args.size() == 1) return ListMain();
    Address server_addr = ParseAddress(args[0]);
    args.erase(args.begin());
    if (args.empty()) throw std::invalid_argument("what to do is missing");
    for (auto [name, type, num_args] :
         {std::tuple("get", AppMessageType::kGet, 2),
          std::tuple("put", AppMessageType::kPut, 3),
          std::tuple("delete", AppMessageType::kDelete, 2)}) {
      if (args[0] != name) continue;
      if (args.size() != size_t(num_args)) {
        throw std::invalid_argument(args[0] + ": wrong number of arguments");
      }
      args.resize(3);
      return ClientMain(server_addr, type, args[1], args[2]);
    }
    if (args.size() > 3) throw std::invalid_argument("too many arguments");
    size_t num_clients = ParseNumber("CLIENTS", args[0]);
    size_t requests = 1000;
    size_t period = 0;
    if (args.size() > 1) requests = ParseNumber("REQUESTS", args[1]);
    if (args.size() > 2) period = ParseNumber("PERIOD", args[2], 0);
    if (std::max({num_clients, requests, period}) > kMaxNumber) {
      throw std::invalid_argument("a number is larger than " +
                                  std::to_string(kMaxNumber));
    }
    return CrowdMain(server_addr, num_clients, num_clients * requests,
                     std::chrono::milliseconds(period));
  } catch (const std::invalid_argument& e) {
    fprintf(stderr, "error: %s\n%s", e.what(), kUsage);
    return 2;
  } catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
