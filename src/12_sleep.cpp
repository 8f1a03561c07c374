// 12_sleep: when to sleep, when to poll.
//
// Does what 5_reverse does, a thousand times. Whoever has nothing to do polls
// for a moment, then sleeps until libfabric wakes it.
//
// Based on 5_reverse.

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
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// ---- Constants ----

constexpr size_t kMaxAddressSize = 256;    // bytes
constexpr size_t kMaxMessageSize = 65536;  // bytes
constexpr size_t kRecvCount = 8;           // RECVs posted at a time
constexpr auto kSilenceLimit = 10s;        // then we give up
constexpr auto kIdlePause = 500us;         // where nothing can wake us
constexpr auto kContactGrace = 500ms;      // that an interrupted client stays

constexpr size_t kMaxClients = 8;  // at a time; an endpoint may take 100 MB

constexpr auto kSpin = 50us;        // of polling, before we sleep
constexpr auto kCrowded = 100ms;    // we do not poll on a core in demand
constexpr auto kMaxSleep = 500ms;   // at a time: then we look at our limits
constexpr auto kMaxPause = 20ms;    // where nothing wakes us, in a long silence
constexpr size_t kEmptyWakes = 16;  // in a row, then we pause
constexpr size_t kNumTexts = 1000;  // that a client sends

// ---- Errors and signals ----

// Throws if a call has failed: it has then returned an error number, with a
// minus sign.
void FiCheck(ssize_t result, const char* call) {
  if (result >= 0) return;
  throw std::runtime_error(std::string(call) + ": " +
                           fi_strerror(int(-result)));
}

// Throws if nothing has happened for too long. Some providers never report that
// a peer has gone, and silence is all that there is to notice. But poll first:
// if we have stood still ourselves, its message may be waiting.
void CheckSilence(Clock::time_point heard_at, const char* what) {
  if (Clock::now() - heard_at < kSilenceLimit) return;
  throw std::runtime_error("nothing has happened for " +
                           std::to_string(kSilenceLimit.count()) + " s while " +
                           what);
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

// Set by a signal that asks us to end. All loops look at it, so that everything
// is closed on the way out.
std::atomic<bool> g_interrupted = false;
int g_wake_fd = -1;  // a descriptor that is readable after such a signal

// Handles such a signal. A second one ends the process at once, unless it is a
// SIGPIPE: each line that we print into a closed pipe brings one.
void HandleSignal(int signum) {
  if (g_interrupted.exchange(true) && signum != SIGPIPE) _exit(128 + signum);
  eventfd_write(g_wake_fd, 1);  // wakes a loop that is about to fall asleep
}

// Installs HandleSignal, again after libfabric's libraries have set theirs.
void CatchSignals() {
  for (int sig : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) signal(sig, HandleSignal);
}

// ---- Addresses ----

// The address of an endpoint. Only its provider knows what the bytes mean, and
// how many there are.
using Address = std::string;

// Returns an address as hexadecimal digits, to be typed into another terminal.
std::string ToHex(const Address& address) {
  std::string hex;
  for (unsigned char byte : address) {
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
    throw std::invalid_argument("ADDRESS is not what a server prints");
  }
  Address address;
  for (size_t i = 0; i < hex.size(); i += 2) {
    address += char(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return address;
}

// ---- Domain and buffers ----

// What fi_getinfo answers, and the function that frees it.
using Info = std::unique_ptr<fi_info, void (*)(fi_info*)>;

// 1. Ask: which interfaces can do what we need?
Info GetInfo() {
  Info hints(fi_allocinfo(), fi_freeinfo);
  hints->caps = FI_MSG;              // we want to send messages,
  hints->ep_attr->type = FI_EP_RDM;  // reliably, to any number of peers,
  hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;  // and hear of their arrival
  // Where a queue is full, we want -FI_EAGAIN, and no overrun: fi_domain(3).
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->ep_attr->max_msg_size = kMaxMessageSize;  // each as long as this
  // Demands that we can meet.
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY;
  // Messages to the same peer must take its RECVs in the order of their SENDs.
  hints->tx_attr->msg_order = FI_ORDER_SAS;
  hints->rx_attr->msg_order = FI_ORDER_SAS;
  // The interface's newest version that we and the headers know: with an older
  // one, some providers offer no GPU memory.
  uint32_t version = std::min(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION),
                              FI_VERSION(2, 0));
  fi_info* info;  // a list, the best one first
  FiCheck(fi_getinfo(version, nullptr, nullptr, 0, hints.get(), &info),
          "fi_getinfo (`fi_info -t FI_EP_RDM` lists what there is)");
  return Info(info, fi_freeinfo);
}

// 2. The network, and in it our access to the adapter.
struct Domain {
  Info info = GetInfo();
  Owned<fid_fabric> fabric;
  Owned<fid_domain> handle;
  uint64_t next_key = 1;  // no two regions may have the same one

  size_t empty_wakes = 0;     // since something has last completed
  Clock::time_point poll_at;  // before that, others need our core

  Domain() {
    printf("domain: %s, fabric: %s, provider: %s\n", info->domain_attr->name,
           info->fabric_attr->name, info->fabric_attr->prov_name);
    FiCheck(fi_fabric(info->fabric_attr, &fabric.ptr, nullptr), "fi_fabric");
    FiCheck(fi_domain(fabric, info.get(), &handle.ptr, nullptr), "fi_domain");
  }
};

// 3. Registered memory: the adapter may use it, for FI_SEND or for FI_RECV.
struct Buffer {
  size_t size;                   // bytes
  std::unique_ptr<char[]> data;  // zeros, so that its pages exist
  Owned<fid_mr> mr;
  size_t in_flight = 0;  // operations that have it: hands off, unless 0

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
constexpr const char* kOpNames[] = {"RECV", "SEND"};

// A work request: an operation for libfabric to do, and the function to call
// when it is done, which may post others.
struct RdmaOp {
  fi_context2 context = {};  // must come first: for the provider's notes
  RdmaOpType type = RdmaOpType::kRecv;
  fi_addr_t peer = FI_ADDR_UNSPEC;  // not of a RECV, which takes from anybody
  Buffer* buf = nullptr;
  size_t len = 0;  // bytes; of a RECV, set when a message has arrived
  std::function<void(const RdmaOp&)> callback = nullptr;
  std::string error = {};  // set at completion; empty if all went well

  // Throws if the operation has failed.
  void Check() const {
    if (error.empty()) return;
    const char* hint =
        type == RdmaOpType::kRecv ? "" : "; is the other side still running?";
    throw std::runtime_error(kOpNames[int(type)] + (" failed: " + error) +
                             hint);
  }
};

// 4. An endpoint, with an address vector and a completion queue.
struct Endpoint {
  Domain& domain;
  std::deque<RdmaOp> ops;         // as many as were ever in use
  std::vector<RdmaOp*> free_ops;  // those that are not in flight
  Address addr;                   // our own

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
    // of a peer. We never read it: such a peer falls silent, and we notice. The
    // opx provider has none.
    fi_eq_attr eq_attr = {};
    int ret = fi_eq_open(domain.fabric, &eq_attr, &eq.ptr, nullptr);
    if (ret != -FI_ENOSYS) FiCheck(ret, "fi_eq_open");
    FiCheck(fi_endpoint(domain.handle, domain.info.get(), &ep.ptr, nullptr),
            "fi_endpoint");
    // Again: in fi_endpoint, the shm provider installs handlers that delete our
    // shared memory at once, and the other side may crash.
    CatchSignals();
    FiCheck(fi_ep_bind(ep, &av->fid, 0), "fi_ep_bind");
    FiCheck(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
    if (eq != nullptr) FiCheck(fi_ep_bind(ep, &eq->fid, 0), "fi_ep_bind");
    FiCheck(fi_enable(ep), "fi_enable");

    size_t length = kMaxAddressSize;
    addr.resize(length);
    FiCheck(fi_getname(&ep->fid, addr.data(), &length), "fi_getname");
    addr.resize(length);
  }

  // Returns libfabric's number for a peer's address, which operations take
  // instead of it. Nothing is sent, so a peer that does not exist shows later,
  // as an error or as silence.
  fi_addr_t AddPeerAddress(Address address) {
    fi_addr_t peer = FI_ADDR_UNSPEC;
    address.resize(kMaxAddressSize);  // libfabric reads as much as it needs
    int inserted = fi_av_insert(av, address.data(), 1, &peer, 0, nullptr);
    FiCheck(inserted == 0 ? -FI_EINVAL : inserted,
            "fi_av_insert (do both sides use the same FI_PROVIDER?)");
    return peer;
  }

  // 5. Hands an operation to libfabric. Its buffer must not change until it has
  // completed. Returns false if libfabric has no room for it now; reading
  // completions makes room, so try again afterwards. An operation that
  // libfabric refuses completes at once, with an error.
  bool Post(RdmaOp request) {
    if (free_ops.empty()) free_ops.push_back(&ops.emplace_back());
    RdmaOp* op = free_ops.back();
    *op = std::move(request);
    ssize_t ret = Submit(op);
    if (ret == -FI_EAGAIN) {
      refused = true;
      return false;
    }
    free_ops.pop_back();
    ++op->buf->in_flight;
    if (ret != 0) Complete(op, 0, fi_strerror(int(-ret)));
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
    RdmaOp done = std::move(*op);
    free_ops.push_back(op);
    --done.buf->in_flight;
    done.error = error;
    if (done.type == RdmaOpType::kRecv) done.len = std::min(len, done.len);
    done.callback(done);
  }

  // Reads a failed operation, which is the next entry of the completion queue.
  // Only fi_cq_readerr can read it.
  void ReadError() {
    fi_cq_err_entry entry = {};
    FiCheck(fi_cq_readerr(cq, &entry, 0), "fi_cq_readerr");
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
};

// ---- Messages and sessions ----

// The kinds of messages, and who sends them.
enum class AppMessageType : uint32_t {
  kConnect = 1,  // client: this is my address
  kAccept = 2,   // server: this is the address of the endpoint that serves you
  kBye = 3,      // client: I want nothing more

  kText = 6,  // client: a text; server: the same, reversed
};

// A message. It travels as its type, in the byte order of our processors, and
// the rest.
struct Message {
  AppMessageType type;
  std::string body;  // any bytes
};
constexpr size_t kMaxBodySize = kMaxMessageSize - sizeof(AppMessageType);

// Returns what to throw for a message that cannot be right.
std::runtime_error BadMessage(const std::string& what) {
  return std::runtime_error("bad message: " + what);
}

// Returns the body of a message. Throws if it has another type.
std::string BodyOf(const Message& message, AppMessageType type) {
  if (message.type != type) {
    throw BadMessage("type " + std::to_string(uint32_t(message.type)));
  }
  return message.body;
}

// One end of a conversation: an endpoint, and messages from and to one peer.
// The server has a session for each client, because only closing an endpoint
// ends what is in flight to a client that has died. A server's listener is a
// session without a peer: it hears everybody, and says nothing.
struct Session {
  std::deque<Buffer> recv_bufs;
  Buffer send_buf;
  std::deque<Message> inbox;   // that have arrived
  std::deque<Message> outbox;  // that wait for send_buf
  fi_addr_t peer = FI_ADDR_UNSPEC;
  Clock::time_point heard_at = Clock::now();  // the last sign of life
  Clock::time_point opened_at = heard_at;
  Endpoint endpoint;  // the last, so that it is closed before it loses buffers

  explicit Session(Domain& domain)
      : send_buf(domain, kMaxMessageSize, FI_SEND), endpoint(domain) {
    for (size_t i = 0; i < kRecvCount; ++i) {
      recv_bufs.emplace_back(domain, kMaxMessageSize, FI_RECV);
    }
    PostRecvs();
  }

  // Posts a RECV for each free buffer, as far as libfabric has room.
  void PostRecvs() {
    for (Buffer& buf : recv_bufs) {
      if (buf.in_flight > 0) continue;
      endpoint.Post({.type = RdmaOpType::kRecv,
                     .buf = &buf,
                     .len = buf.size,
                     .callback = [this](const RdmaOp& op) { Arrived(op); }});
    }
  }

  // Posts what waits, and polls. Posts RECVs again before the program answers,
  // because the peer may react at once. Returns the number of completions.
  size_t Poll() {
    endpoint.refused = false;
    if (send_buf.in_flight == 0 && !outbox.empty()) PostSend(outbox.front());
    size_t completions = endpoint.PollCompletion();
    PostRecvs();
    return completions;
  }

  // Posts a message, which is the first of the outbox.
  void PostSend(const Message& message) {
    char* data = send_buf.data.get();
    memcpy(data, &message.type, sizeof(message.type));
    message.body.copy(data + sizeof(message.type), message.body.size());
    if (endpoint.Post({.type = RdmaOpType::kSend,
                       .peer = peer,
                       .buf = &send_buf,
                       .len = sizeof(message.type) + message.body.size(),
                       .callback = [](const RdmaOp& op) { op.Check(); }})) {
      outbox.pop_front();
    }
  }

  // Puts the message that has come with a RECV into the inbox. One that is too
  // short has type 0, which nobody expects.
  void Arrived(const RdmaOp& op) {
    op.Check();  // throws if it was too long, for example
    Message message = {};
    const char* data = op.buf->data.get();
    if (op.len >= sizeof(message.type)) {
      memcpy(&message.type, data, sizeof(message.type));
      message.body.assign(data + sizeof(message.type), data + op.len);
    }
    inbox.push_back(std::move(message));
    heard_at = Clock::now();
  }

  // Sends a message, as soon as those before it have left.
  void Send(AppMessageType type, const std::string& body = {}) {
    if (body.size() > kMaxBodySize) throw std::length_error("a long message");
    outbox.push_back({type, body});
  }

  // Returns whether all messages have left.
  bool HasSent() const { return outbox.empty() && send_buf.in_flight == 0; }

  // Takes out the next message, if there is one.
  std::optional<Message> Take() {
    if (inbox.empty()) return std::nullopt;
    Message message = std::move(inbox.front());
    inbox.pop_front();
    return message;
  }

  // Returns when something may have completed in one of the sessions (all of
  // one domain), when a signal has come, or after kMaxSleep. If a peer was
  // heard just now, it returns at once.
  static void Sleep(const std::vector<Session*>& sessions) {
    Domain& domain = sessions.front()->endpoint.domain;
    std::vector<fid*> cqs;
    std::vector<pollfd> fds = {{g_wake_fd, POLLIN, 0}};
    Clock::time_point now = Clock::now();
    Clock::duration silence = Clock::duration::max();
    bool can_be_woken = true;
    for (Session* session : sessions) {
      silence = std::min(silence, now - session->heard_at);
      const Endpoint& endpoint = session->endpoint;
      // Nothing tells us that there is room again.
      if (endpoint.refused || endpoint.wait_fd < 0) can_be_woken = false;
      cqs.push_back(&endpoint.cq.ptr->fid);
      fds.push_back({endpoint.wait_fd, POLLIN, 0});
    }
    // The next message often comes at once, and being woken takes longer than
    // looking again. The peer may need this core to send it, though.
    if (now >= domain.poll_at && silence < kSpin) {
      std::this_thread::yield();
      // A process that computes keeps it for ms, and would do so each time.
      if (Clock::now() - now > kSpin) domain.poll_at = now + kCrowded;
      return;
    }
    if (can_be_woken && domain.empty_wakes < kEmptyWakes) {
      // What has come since we have last looked need not make a descriptor
      // readable any more. Only this tells that it is safe to sleep
      // (fi_poll(3)).
      int ret = fi_trywait(domain.fabric, cqs.data(), int(cqs.size()));
      if (ret != -FI_EAGAIN) {
        FiCheck(ret, "fi_trywait");
        auto limit = std::chrono::milliseconds(kMaxSleep);
        ret = poll(fds.data(), fds.size(), int(limit.count()));
      }
      // A descriptor that is always readable lets nobody sleep.
      domain.empty_wakes = ret == 0 ? 0 : domain.empty_wakes + 1;
      return;
    }
    // The longer nothing has come, the less often we look.
    std::this_thread::sleep_for(
        std::clamp<Clock::duration>(silence / 64, kIdlePause, kMaxPause));
  }

  // Client: polls until `done` returns true. Errors say `what` we were doing.
  // A server must not wait like this: all its clients would have to wait, too.
  void WaitUntil(const char* what, const std::function<bool()>& done) {
    heard_at = Clock::now();
    while (!done()) {
      // Over shm, the server may crash if we leave during our first contact.
      if (g_interrupted && Clock::now() - opened_at > kContactGrace) {
        throw std::runtime_error("interrupted");
      }
      if (Poll() > 0) continue;
      CheckSilence(heard_at, what);
      Sleep({this});
    }
  }

  // Client: waits for the next message, and returns its body. Throws if it has
  // another type.
  std::string WaitFor(const char* what, AppMessageType type) {
    WaitUntil(what, [&] { return !inbox.empty(); });
    return BodyOf(*Take(), type);
  }

  // Client: asks the server for an endpoint of its own, and waits for it.
  void Connect(const Address& server_addr) {
    peer = endpoint.AddPeerAddress(server_addr);
    Send(AppMessageType::kConnect, endpoint.addr);
    const char* what =
        "waiting for ACCEPT (is the server running, with the same "
        "FI_PROVIDER?)";
    peer = endpoint.AddPeerAddress(WaitFor(what, AppMessageType::kAccept));
  }

  // Client: tells the server that we want nothing more, which spares it waiting
  // for our silence.
  void SayBye() {
    try {
      Send(AppMessageType::kBye);
      WaitUntil("saying BYE", [&] { return HasSent(); });
    } catch (const std::runtime_error&) {
      // The server will notice our silence.
    }
  }
};

// ---- The application ----

// Prints how to reach the server.
void PrintClientCommand(const char* program, const Address& addr) {
  printf("Run the client with the following command:\n  ");
  const char* provider = getenv("FI_PROVIDER");
  if (provider != nullptr) printf("FI_PROVIDER='%s' ", provider);
  printf("%s %s\n", program, ToHex(addr).c_str());
}

// Prints whether the provider can wake us.
void PrintSleep(const Endpoint& endpoint) {
  printf("%s\n",
         endpoint.wait_fd < 0
             ? "Nothing can wake us here: pauses of up to 20 ms instead."
             : "We sleep until the completion queue wakes us.");
}

// A client, and what it asks of the server: to reverse texts.
struct ServedClient {
  size_t number;  // of the client; begins each line about it
  Session session;
  bool answered = false;
  bool done = false;  // has said BYE, or its session has failed

  // Opens the session. Throws if the machine lacks what that takes.
  ServedClient(Domain& domain, size_t client_number, const Address& addr)
      : number(client_number), session(domain) {
    session.peer = session.endpoint.AddPeerAddress(addr);
    session.Send(AppMessageType::kAccept, session.endpoint.addr);
  }

  // Does what can be done for the client now. Returns the number of
  // completions. Throws if the client has sent something wrong, or nothing for
  // too long.
  size_t Poll() {
    size_t completions = session.Poll();
    while (std::optional<Message> message = session.Take()) {
      if (message->type == AppMessageType::kBye) {
        printf("[%zu] Done.\n", number);
        done = true;
        return completions;
      }
      HandleRequest(*message);
    }
    if (completions == 0) {
      CheckSilence(session.heard_at, "waiting for the client");
    }
    return completions;
  }

  // Answers a text of the client with the same text, reversed.
  void HandleRequest(const Message& message) {
    std::string text = BodyOf(message, AppMessageType::kText);
    if (!answered) {
      printf("[%zu] Received %zu bytes: %s\n", number, text.size(),
             text.c_str());
    }
    answered = true;
    session.Send(AppMessageType::kText, {text.rbegin(), text.rend()});
  }
};

// Runs the server, until a signal ends it.
void ServerMain(const char* program) {
  Domain domain;
  Session listener(domain);
  std::list<ServedClient> clients;
  size_t num_clients = 0;  // so far
  PrintSleep(listener.endpoint);
  PrintClientCommand(program, listener.endpoint.addr);
  while (!g_interrupted) {
    size_t completions = 0;
    try {
      completions = listener.Poll();
      // The others wait in the inbox, until a client leaves.
      while (clients.size() < kMaxClients && !listener.inbox.empty()) {
        Address addr = BodyOf(*listener.Take(), AppMessageType::kConnect);
        printf("[%zu] Received CONNECT message from client %s\n", ++num_clients,
               ToHex(addr).c_str());
        clients.emplace_back(domain, num_clients, addr);
      }
    } catch (const std::exception& e) {
      // A bad message must not end the server.
      fprintf(stderr, "error: %s\n", e.what());
    }
    for (ServedClient& client : clients) {
      try {
        completions += client.Poll();
      } catch (const std::exception& e) {
        // It ends this client's session, and costs the others nothing.
        fprintf(stderr, "[%zu] error: %s\n", client.number, e.what());
        client.done = true;
      }
    }
    clients.remove_if([](const ServedClient& c) { return c.done; });
    if (completions > 0) continue;
    std::vector<Session*> sessions = {&listener};
    for (ServedClient& client : clients) sessions.push_back(&client.session);
    Session::Sleep(sessions);
  }
}

// Has the server reverse a text. Throws if it does not do it right.
void ReverseText(Session& session, const std::string& text) {
  session.Send(AppMessageType::kText, text);
  std::string received =
      session.WaitFor("waiting for the reversed text", AppMessageType::kText);
  if (received != std::string(text.rbegin(), text.rend())) {
    throw std::runtime_error("the text is not correct");
  }
}

// Runs the client. Throws unless it gets what it asks for. Prints how long the
// answers took.
void ClientMain(const Address& server_addr, const std::string& text) {
  Domain domain;
  Session session(domain);
  PrintSleep(session.endpoint);
  session.Connect(server_addr);
  printf("Sending %zu bytes: %s\n", text.size(), text.c_str());
  std::vector<double> times;  // us
  while (times.size() < kNumTexts) {
    Clock::time_point start = Clock::now();
    ReverseText(session, text);
    std::chrono::duration<double, std::micro> time = Clock::now() - start;
    times.push_back(time.count());
  }
  session.SayBye();
  printf("The text is correct.\n");
  std::sort(times.begin(), times.end());
  printf("Of %zu answers, half took up to %.0f us, 99 %% up to %.0f us.\n",
         kNumTexts, times[kNumTexts / 2], times[kNumTexts * 99 / 100]);
}

// ---- Command line ----

constexpr const char* kUsage =
    "Usage:\n"
    "  12_sleep\n"
    "      Run the server.\n"
    "  12_sleep ADDRESS [TEXT]\n"
    "      Have it reverse a text (\"Hello, world!\").\n"
    "ADDRESS is what the server prints. FI_PROVIDER chooses the provider.\n";

int main(int argc, char** argv) {
  std::vector<std::string> args(argv + 1, argv + argc);
  setvbuf(stdout, nullptr, _IOLBF, 0);  // whole lines, also into a pipe
  g_wake_fd = eventfd(0, EFD_CLOEXEC);
  CatchSignals();
  try {
    if (args.empty()) {
      ServerMain(argv[0]);
      return 0;
    }
    if (args[0] == "--help") {
      printf("%s", kUsage);
      return 0;
    }
    if (args.size() > 2) throw std::invalid_argument("too many arguments");
    std::string text = args.size() > 1 ? args[1] : "Hello, world!";
    if (text.empty() || text.size() > kMaxBodySize) {
      throw std::invalid_argument("TEXT is empty, or too long");
    }
    ClientMain(ParseAddress(args[0]), text);
    return 0;
  } catch (const std::invalid_argument& e) {
    fprintf(stderr, "error: %s\n%s", e.what(), kUsage);
    return 2;
  } catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
