// 12_sleep: when to sleep, when to poll.
//
// Does what 5_reverse does, as often as the client likes. Whoever has nothing
// to do polls for a moment, then sleeps until libfabric wakes it.
//
// Based on 5_reverse.

#include <fcntl.h>
#include <poll.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <deque>
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
#include <type_traits>
#include <utility>
#include <vector>

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// ---- Constants ----

constexpr size_t kMaxAddressSize = 256;        // bytes
constexpr size_t kMaxMessageSize = 64 * 1024;  // bytes
constexpr size_t kRecvCount = 8;               // RECVs posted at a time
constexpr size_t kSpareOps = 16;               // rest before they are reused
constexpr auto kSilenceLimit = 10s;            // then we give up
constexpr auto kSpin = 50us;                   // of polling, before we sleep
constexpr auto kCrowded = 100ms;      // we do not poll on a core in demand
constexpr auto kMaxSleep = 500ms;     // at a time: then we look at our limits
constexpr auto kIdlePause = 500us;    // where nothing can wake us
constexpr auto kMaxPause = 20ms;      // there, after a long silence
constexpr auto kContactGrace = 1s;    // for a first or last message
constexpr size_t kNumTexts = 1000;    // that a client sends
constexpr size_t kEmptyWakes = 16;    // in a row, then we pause
constexpr size_t kManyWakes = 2000;   // in a row, then for longer
constexpr size_t kMaxClients = 8;     // that are served at a time
constexpr size_t kMaxWaiting = 1000;  // clients that wait to be served
constexpr auto kAskPeriod = 1s;       // in line, then a client is to ask again
constexpr size_t kMaxContacts = 256;  // that are told from one endpoint
constexpr auto kTellGrace = 2s;       // for what it is told to arrive

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
  hints->ep_attr->type = FI_EP_RDM;  // reliably, to any number of peers,
  hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;  // and hear of their arrival
  // Demands that we can meet.
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY;
  // Messages to the same peer must arrive in the order of their SENDs.
  hints->tx_attr->msg_order = FI_ORDER_SAS;
  hints->rx_attr->msg_order = FI_ORDER_SAS;
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
    return fi_send(ep, data, op->len, desc, op->peer, op);
  }

  // Reads what has completed and calls back. Many providers work only while we
  // read. Returns the number of completions. Throws if a callback does.
  size_t PollCompletion() {
    fi_cq_data_entry entry;
    ssize_t ret = fi_cq_read(cq, &entry, 1);
    if (ret == -FI_EAGAIN) return 0;
    domain.empty_wakes = 0;
    if (ret == -FI_EAVAIL) {
      ReadError();
      return 1;
    }
    FiCheck(ret, "fi_cq_read");
    Complete(entry.op_context, entry.len, "");
    return 1;
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

// ---- Messages and sessions ----

using Message = std::string;  // any bytes

// The kinds of messages, and who sends them.
enum class AppMessageType : uint32_t {
  kConnect = 1,  // client: this is my address
  kAccept = 2,   // server: this is the address of the endpoint that serves you
  kBye = 3,      // client: I want nothing more
  kWait = 4,     // server: I can't serve you yet; ask again
  kRefused = 5,  // server: I end this session; followed by the reason

  kText = 6,  // client: a text; server: the same, reversed
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
  std::vector<Buffer*> free_recv_bufs;  // those without a RECV
  std::deque<RdmaOp> arrivals;          // completed RECVs
  std::vector<Buffer*> free_send_bufs;  // those without a message
  std::deque<RdmaOp> unposted;          // SENDs that libfabric had no room for
  size_t unsent = 0;                    // messages whose SEND has not completed
  Endpoint endpoint;

  explicit Mailbox(Domain& open_domain)
      : domain(open_domain), endpoint(open_domain) {
    for (size_t i = 0; i < kRecvCount; ++i) {
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

  // Posts the SENDs that wait, in order, as far as libfabric has room.
  void PostSends() {
    while (!unposted.empty() && endpoint.Post(unposted.front())) {
      unposted.pop_front();
    }
  }

  // Posts what has to wait, and polls. Returns the number of completions.
  size_t Poll() {
    PostRecvs();
    PostSends();
    return endpoint.PollCompletion();
  }

  // Posts and polls until `done` returns true. See Endpoint::WaitUntil.
  void WaitUntil(const char* what, const std::function<bool()>& done,
                 Clock::duration grace = 0s,
                 std::chrono::seconds limit = kSilenceLimit) {
    auto post_and_ask = [&] {
      PostRecvs();
      PostSends();
      return done();
    };
    endpoint.WaitUntil(what, post_and_ask, grace, limit);
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
    unposted.push_back({.type = RdmaOpType::kSend,
                        .peer = peer,
                        .buf = buf,
                        .len = message.size(),
                        .callback = [this](const RdmaOp& op) {
                          op.Check();
                          --unsent;
                          free_send_bufs.push_back(op.buf);
                        }});
    PostSends();
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
      if (Clock::now() < leave_at) mailbox.Poll();
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
    mailbox.WaitUntil(
        "sending CONNECT", [this] { return mailbox.unsent == 0; },
        kContactGrace);
    printf("Sent CONNECT message to server\n");
    mailbox.WaitUntil("waiting for ACCEPT", [this] { return IsAccepted(); });
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
      mailbox.WaitUntil(
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

// Prints whether the provider can wake us.
void PrintSleep(const Endpoint& endpoint) {
  printf("%s\n",
         endpoint.wait_fd < 0
             ? "Nothing can wake us here: pauses of up to 20 ms instead."
             : "We sleep until the completion queue wakes us.");
}

// Prints a line about a client. The number says which one.
void PrintLine(FILE* file, size_t number, const std::string& text) {
  fprintf(file, "[%zu] %s\n", number, text.c_str());
}

// A client, and what it asks of the server: to reverse texts.
struct ServedClient {
  size_t number;  // of the client; begins each line about it
  AppConnectMessage connect_msg;
  Session session;
  bool answered = false;
  bool done = false;  // has said BYE or failed; last messages may be leaving

  // Opens the session. Throws if the machine lacks what that takes.
  ServedClient(Domain& domain, size_t client_number,
               const AppConnectMessage& connect)
      : number(client_number), connect_msg(connect), session(domain) {}

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
    size_t completions = session.mailbox.Poll();
    try {
      while (std::optional<Message> message = session.Take()) {
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

  // Answers a text of the client with the same text, reversed.
  void HandleRequest(const Message& message) {
    auto base = ReadMessage<AppMessageBase>(message, AppMessageType::kText);
    std::string text = message.substr(sizeof(base));
    if (text.empty()) throw BadMessage("its text is empty");
    // Answers that a client does not take would pile up here.
    if (session.mailbox.unsent >= kRecvCount) {
      throw BadMessage("it asks and does not read");
    }
    if (!answered) {
      PrintLine(stdout, number,
                "Received " + std::to_string(text.size()) +
                    " bytes: " + Printable(text));
    }
    std::reverse(text.begin(), text.end());
    session.Send(base, text);
    if (!answered) PrintLine(stdout, number, "Sent them back reversed.");
    answered = true;
  }
};

// Runs the server, until a signal ends it.
int ServerMain(const char* program) {
  Domain domain;
  Mailbox listener(domain);
  WaitingLine line{domain};
  std::list<ServedClient> clients;
  PrintSleep(listener.endpoint);
  PrintClientCommand(program, listener.endpoint);

  size_t num_clients = 0;        // so far
  Clock::time_point full_until;  // there is no memory for another one
  while (!g_interrupted) {
    size_t completions = 0;
    try {
      // All that may have come, so that those who wait are in the line.
      for (size_t i = 0; i < kRecvCount; ++i) completions += listener.Poll();
      line.AddAll(listener);
      line.TellAll();
      bool full = clients.size() >= kMaxClients || Clock::now() < full_until;
      if (!full && !line.visitors.empty()) {
        // One at a time: opening an endpoint takes tens of ms over
        // tcp;ofi_rxm. If that fails, this client keeps its place in the line.
        full_until = Clock::now() + kAskPeriod;
        clients.emplace_back(domain, num_clients + 1,
                             line.visitors.front().connect);
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
      } catch (const std::exception& e) {
        // It ends this client's session, and costs the others nothing.
        PrintLine(stderr, client.number, "error: " + Printable(e.what()));
        client.done = true;
      }
      return client.done && client.session.HasLeft();
    });
    if (completions > 0) continue;
    std::vector<Endpoint*> endpoints = {&listener.endpoint};
    for (ServedClient& client : clients) {
      endpoints.push_back(&client.session.endpoint);
    }
    // No descriptor tells that there is a place for those in line, or that it
    // is time to tell them to ask again.
    bool waiting = !line.visitors.empty() || !line.untold.empty();
    Endpoint::Sleep(endpoints, waiting ? kIdlePause : kMaxSleep);
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

// Has the server reverse a text. Throws if it does not do it right.
void ReverseText(Session& session, const std::string& text, bool print) {
  session.Send(AppMessageBase{AppMessageType::kText}, text);
  if (print) printf("Sending %zu bytes: %s\n", text.size(), text.c_str());
  std::optional<Message> message;
  session.mailbox.WaitUntil("waiting for the reversed text", [&] {
    message = session.Take();
    return message.has_value();
  });
  auto base = ReadMessage<AppMessageBase>(*message, AppMessageType::kText);
  std::string received = message->substr(sizeof(base));
  if (received != std::string(text.rbegin(), text.rend())) {
    throw std::runtime_error("the text is not correct: " + Printable(received));
  }
  if (!print) return;
  printf("Received %zu bytes: %s\n", received.size(), received.c_str());
  printf("The text is correct.\n");
}

// Has the server reverse a text many times, one after the other. Prints how
// long the answers took.
void ReverseTexts(Session& session, const std::string& text) {
  std::vector<double> times;  // us
  while (times.size() < kNumTexts) {
    Clock::time_point start = Clock::now();
    ReverseText(session, text, times.empty());
    auto time = Clock::now() - start;
    times.push_back(std::chrono::duration<double, std::micro>(time).count());
  }
  std::sort(times.begin(), times.end());
  printf("Of %zu answers, half took up to %.0f us, 99 %% up to %.0f us.\n",
         kNumTexts, times[kNumTexts / 2], times[kNumTexts * 99 / 100]);
}

// Runs the client. Throws unless it gets what it asks for.
int ClientMain(const Address& server_addr, const std::string& text) {
  Domain domain;
  size_t max_size = domain.MaxMessageSize() - sizeof(AppMessageBase);
  if (text.size() > max_size) {
    throw std::invalid_argument("TEXT is longer than " +
                                std::to_string(max_size) + " bytes");
  }
  Session session(domain);
  PrintSleep(session.endpoint);
  session.Connect(server_addr);
  try {
    ReverseTexts(session, text);
  } catch (...) {
    session.SayBye(kContactGrace);
    throw;
  }
  session.SayBye();
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
    "  12_sleep\n"
    "      Run the server.\n"
    "  12_sleep ADDRESS [TEXT]\n"
    "      Have it reverse a text (\"Hello, world!\").\n"
    "  12_sleep --list\n"
    "      List the interfaces found, the one it uses first.\n"
    "ADDRESS is what the server prints. FI_PROVIDER chooses the provider.\n";

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
  try {
    if (args.empty()) return ServerMain(argv[0]);
    if (args[0] == "--help") {
      printf("%s", kUsage);
      return 0;
    }
    if (args[0] == "--list" && args.size() == 1) return ListMain();
    if (args.size() > 2) throw std::invalid_argument("too many arguments");
    std::string text = args.size() > 1 ? args[1] : "Hello, world!";
    if (text.empty()) throw std::invalid_argument("TEXT is empty");
    return ClientMain(ParseAddress(args[0]), text);
  } catch (const std::invalid_argument& e) {
    fprintf(stderr, "error: %s\n%s", e.what(), kUsage);
    return 2;
  } catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
