// 13_crowd: a thousand clients, asleep most of the time.
//
// Does what 12_sleep does, for a crowd. The server answers all clients from one
// endpoint, so it counts what closing an endpoint for each of them had given
// for nothing: whose message this is, who has which buffer, and who has gone.
//
// Based on 12_sleep.

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
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// ---- Constants ----

constexpr size_t kMaxAddressSize = 256;   // bytes
constexpr size_t kMaxMessageSize = 2048;  // bytes
constexpr size_t kRecvCount = 64;         // RECVs posted at a time
constexpr size_t kClientRecvCount = 4;    // those of a client
constexpr auto kSilenceLimit = 10s;       // then we give up
constexpr auto kIdlePause = 500us;        // where nothing can wake us
constexpr auto kContactGrace = 500ms;     // that an interrupted client stays

constexpr size_t kCompletionQueueReadCount = 16;  // entries read at a time

constexpr size_t kMaxClients = 2000;  // at a time; ofi_rxm has room for 2048
constexpr size_t kMaxUnsent = 16;     // messages to one that have not left
constexpr auto kForgetAfter = 30s;    // of silence, the server forgets a client
constexpr auto kConnectAgain = 1s;    // without an ACCEPT

constexpr auto kSpin = 50us;        // of polling, before we sleep
constexpr auto kCrowded = 100ms;    // we do not poll on a core in demand
constexpr auto kMaxSleep = 500ms;   // at a time: then we look at our limits
constexpr auto kMaxPause = 20ms;    // where nothing wakes us, in a long silence
constexpr size_t kEmptyWakes = 16;  // in a row, then we pause
constexpr size_t kMaxNumber = 1'000'000;  // on the command line

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
    cq_attr.format = FI_CQ_FORMAT_DATA;       // what we want to know of each
    cq_attr.size = kMaxClients + kRecvCount;  // what is usually in flight
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

  // Takes out a peer's address. Operations in flight to it are undefined then
  // (fi_av(3)); ofi_rxm ends them, with the settings that main makes.
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
  // read. Returns the number of completions. Throws if a callback does: that of
  // an error, which is read alone.
  size_t PollCompletion() {
    fi_cq_data_entry entries[kCompletionQueueReadCount];
    ssize_t ret = fi_cq_read(cq, entries, kCompletionQueueReadCount);
    if (ret == -FI_EAGAIN) return 0;
    domain.empty_wakes = 0;
    if (ret == -FI_EAVAIL) {
      ReadError();
      return 1;
    }
    FiCheck(ret, "fi_cq_read");
    for (ssize_t i = 0; i < ret; ++i) {
      Complete(entries[i].op_context, entries[i].len, "");
    }
    return size_t(ret);
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

// ---- Messages ----

// The kinds of messages, and who sends them.
enum class AppMessageType : uint32_t {
  kConnect = 1,  // client: this is my address
  kAccept = 2,   // server: I know you now
  kBye = 3,      // client: I want nothing more

  kText = 6,  // client: a text; server: the same, reversed
};

// A message. It travels as its type and number, in the byte order of our
// processors, and the rest.
struct Message {
  AppMessageType type;
  uint64_t number;   // of the client: all of them write to the same endpoint
  std::string body;  // any bytes
};
constexpr size_t kHeaderSize = sizeof(Message::type) + sizeof(Message::number);
constexpr size_t kMaxBodySize = kMaxMessageSize - kHeaderSize;

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

// ---- Mailboxes ----

// Somebody to send messages to. The SEND in flight shares it, so it is there
// until that has completed.
struct Peer {
  Address address;  // of a client
  fi_addr_t addr = FI_ADDR_UNSPEC;
  uint64_t number = 0;  // of the client
  Buffer send_buf;
  std::deque<Message> outbox;  // that have not left; send_buf has the first
  std::string error;           // not empty: we send nothing more
  Clock::time_point heard_at = Clock::now();  // the last sign of life
  bool reached = false;  // somebody is there: the address is not invented

  explicit Peer(Domain& domain) : send_buf(domain, kMaxMessageSize, FI_SEND) {}
};

// An endpoint, and messages from and to any number of peers.
struct Mailbox {
  std::deque<Buffer> recv_bufs;
  std::deque<Message> inbox;                // that have arrived
  std::deque<std::shared_ptr<Peer>> ready;  // with a message and a free buffer
  Clock::time_point heard_at = Clock::now();  // the last sign of life
  Clock::time_point opened_at = heard_at;
  Endpoint endpoint;  // the last, so that it is closed before it loses buffers

  Mailbox(Domain& domain, size_t num_recvs) : endpoint(domain) {
    for (size_t i = 0; i < num_recvs; ++i) {
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
    PostReady();
    size_t completions = endpoint.PollCompletion();
    PostRecvs();
    return completions;
  }

  // Gives each peer whose message can leave one try. One for which there is no
  // room now stays in front of those that come later.
  void PostReady() {
    for (size_t i = ready.size(); i > 0; --i) {
      std::shared_ptr<Peer> peer = std::move(ready.front());
      ready.pop_front();
      if (peer->error.empty() && !PostSend(peer)) ready.push_back(peer);
    }
  }

  // Posts the first message to a peer. A peer has one SEND in flight at most,
  // so that one that does not read cannot use up the room of all others.
  // Returns false if there is no room.
  bool PostSend(const std::shared_ptr<Peer>& peer) {
    const Message& message = peer->outbox.front();
    char* data = peer->send_buf.data.get();
    memcpy(data, &message.type, sizeof(message.type));
    memcpy(data + sizeof(message.type), &message.number,
           sizeof(message.number));
    message.body.copy(data + kHeaderSize, message.body.size());
    return endpoint.Post(
        {.type = RdmaOpType::kSend,
         .peer = peer->addr,
         .buf = &peer->send_buf,
         .len = kHeaderSize + message.body.size(),
         .callback = [this, peer](const RdmaOp& op) { Sent(peer, op); }});
  }

  // Makes room for the next message to a peer. A failure concerns it alone.
  void Sent(const std::shared_ptr<Peer>& peer, const RdmaOp& op) {
    try {
      op.Check();
      peer->reached = true;
    } catch (const std::runtime_error& e) {
      peer->error = e.what();
    }
    peer->outbox.pop_front();
    if (!peer->outbox.empty()) ready.push_back(peer);
  }

  // Puts the message that has come with a RECV into the inbox. One that is too
  // short has type 0, which nobody expects.
  void Arrived(const RdmaOp& op) {
    op.Check();  // throws if it was too long, for example
    Message message = {};
    const char* data = op.buf->data.get();
    if (op.len >= kHeaderSize) {
      memcpy(&message.type, data, sizeof(message.type));
      memcpy(&message.number, data + sizeof(message.type),
             sizeof(message.number));
      message.body.assign(data + kHeaderSize, data + op.len);
    }
    inbox.push_back(std::move(message));
    heard_at = Clock::now();
  }

  // Sends a message to a peer, as soon as those before it have left.
  void Send(const std::shared_ptr<Peer>& peer, AppMessageType type,
            const std::string& body = {}) {
    if (body.size() > kMaxBodySize) throw std::length_error("a long message");
    peer->outbox.push_back({type, peer->number, body});
    if (peer->outbox.size() == 1) ready.push_back(peer);
  }

  // Takes out the next message, if there is one.
  std::optional<Message> Take() {
    if (inbox.empty()) return std::nullopt;
    Message message = std::move(inbox.front());
    inbox.pop_front();
    return message;
  }

  // Returns when something may have completed in one of the mailboxes (all of
  // one domain), when a signal has come, or after `limit`. If a peer was heard
  // just now, it returns at once.
  static void Sleep(const std::vector<Mailbox*>& mailboxes,
                    Clock::duration limit = kMaxSleep) {
    Domain& domain = mailboxes.front()->endpoint.domain;
    std::vector<fid*> cqs;
    std::vector<pollfd> fds = {{g_wake_fd, POLLIN, 0}};
    Clock::time_point now = Clock::now();
    Clock::duration silence = Clock::duration::max();
    bool can_be_woken = true;
    for (Mailbox* mailbox : mailboxes) {
      silence = std::min(silence, now - mailbox->heard_at);
      const Endpoint& endpoint = mailbox->endpoint;
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
        auto timeout = std::chrono::ceil<std::chrono::milliseconds>(limit);
        ret = poll(fds.data(), fds.size(), int(timeout.count()));
      }
      // A descriptor that is always readable lets nobody sleep.
      domain.empty_wakes = ret == 0 ? 0 : domain.empty_wakes + 1;
      return;
    }
    // The longer nothing has come, the less often we look.
    std::this_thread::sleep_for(std::min(
        limit,
        std::clamp<Clock::duration>(silence / 64, kIdlePause, kMaxPause)));
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
};

// ---- The server ----

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

// The server: one mailbox, and what it knows about each client.
struct Server {
  using Clients = std::unordered_map<uint64_t, std::shared_ptr<Peer>>;

  Domain domain;
  Clients clients;  // by their numbers
  size_t num_texts = 0;
  std::string printed;  // how things stood when we looked last
  Clock::time_point looked_at = Clock::now();
  Mailbox mailbox{domain, kRecvCount};

  // Handles the messages that have come. Returns the number of completions.
  size_t Poll() {
    size_t completions = mailbox.Poll();
    while (std::optional<Message> message = mailbox.Take()) {
      HandleMessage(*message);
    }
    if (Clock::now() - looked_at >= kMaxSleep) {
      looked_at = Clock::now();
      ForgetGone();
      PrintStatus();
    }
    return completions;
  }

  // Handles a message. Ignores what no client of ours can have sent.
  void HandleMessage(const Message& message) {
    if (message.type == AppMessageType::kConnect) return HandleConnect(message);
    auto it = clients.find(message.number);
    if (it == clients.end()) return;
    it->second->heard_at = Clock::now();
    if (message.type == AppMessageType::kBye) return Forget(it);
    try {
      HandleRequest(it->second, message);
    } catch (const std::runtime_error& e) {
      Forget(it, e.what());
    }
  }

  // Accepts a client. One that we know says CONNECT again when it has slept, or
  // when its ACCEPT was lost.
  void HandleConnect(const Message& message) {
    auto it = clients.find(message.number);
    if (it == clients.end()) {
      // An address is that of one client: whoever had it before has gone.
      auto before = std::find_if(
          clients.begin(), clients.end(),
          [&](auto& each) { return each.second->address == message.body; });
      if (before != clients.end()) Forget(before);
      if (clients.size() >= kMaxClients) return;  // it will ask again
      auto peer = std::make_shared<Peer>(domain);
      peer->address = message.body;
      peer->addr = mailbox.endpoint.AddPeerAddress(message.body);
      peer->number = message.number;
      it = clients.emplace(message.number, peer).first;
    }
    it->second->heard_at = Clock::now();
    if (it->second->outbox.empty()) {
      mailbox.Send(it->second, AppMessageType::kAccept);
    }
  }

  // Answers a text of the client with the same text, reversed.
  void HandleRequest(const std::shared_ptr<Peer>& client,
                     const Message& message) {
    const std::string& text = BodyOf(message, AppMessageType::kText);
    // What is not taken must not pile up.
    if (client->outbox.size() >= kMaxUnsent) {
      throw std::runtime_error("it asks and does not read");
    }
    ++num_texts;
    mailbox.Send(client, AppMessageType::kText, {text.rbegin(), text.rend()});
  }

  // Hears a client no more, and sends nothing more to it.
  void Forget(Clients::iterator it, const std::string& why = {}) {
    if (!why.empty()) {
      fprintf(stderr, "[%016jx] forgotten: %s\n", uintmax_t(it->first),
              why.c_str());
    }
    it->second->error = "forgotten";
    // What is in flight to nobody may never complete. An address at which
    // nobody has ever been is not removed: libfabric 1.17 may crash.
    if (it->second->reached) {
      mailbox.endpoint.RemovePeerAddress(it->second->addr);
    }
    clients.erase(it);
  }

  // Forgets the clients that have gone.
  void ForgetGone() {
    for (auto it = clients.begin(); it != clients.end();) {
      auto client = it++;
      const std::string& error = client->second->error;
      if (!error.empty()) {
        Forget(client, error);
      } else if (Clock::now() - client->second->heard_at > kForgetAfter) {
        Forget(client, "it has been silent for long");
      }
    }
  }

  // Prints how things stand, if that has changed.
  void PrintStatus() {
    std::string status = std::to_string(clients.size()) + " clients, " +
                         std::to_string(num_texts) + " texts so far";
    if (status != printed) printf("%s\n", status.c_str());
    printed = status;
  }
};

// Runs the server, until a signal ends it.
void ServerMain(const char* program) {
  Server server;
  PrintSleep(server.mailbox.endpoint);
  PrintClientCommand(program, server.mailbox.endpoint.addr);
  while (!g_interrupted) {
    try {
      if (server.Poll() == 0) Mailbox::Sleep({&server.mailbox});
    } catch (const std::exception& e) {
      // A bad message must not end the server.
      fprintf(stderr, "error: %s\n", e.what());
    }
  }
}

// ---- The client ----

// A client, which has the server reverse texts, one at a time.
struct Client {
  std::shared_ptr<Peer> server;
  std::string text;      // the last one that we have sent
  size_t num_texts = 0;  // so far
  bool waiting = false;  // for the answer
  Clock::time_point asked_at = Clock::now();
  Mailbox mailbox;

  Client(Domain& domain, const Address& server_addr)
      : server(std::make_shared<Peer>(domain)),
        mailbox(domain, kClientRecvCount) {
    server->addr = mailbox.endpoint.AddPeerAddress(server_addr);
    std::random_device random;
    server->number = uint64_t{random()} << 32 | random();
    Connect();
  }

  // Takes out the next message to us. Throws if ours could not be sent.
  std::optional<Message> Take() {
    if (!server->error.empty()) throw std::runtime_error(server->error);
    while (std::optional<Message> message = mailbox.Take()) {
      if (message->number == server->number) return message;
    }
    return std::nullopt;
  }

  // Tells the server our address, until it answers. With a connection that the
  // server has just given up, a CONNECT is lost.
  void Connect() {
    mailbox.Poll();  // libfabric notices if the server has hung up
    Clock::time_point again_at;
    const char* what =
        "waiting for ACCEPT (is the server running, with the same "
        "FI_PROVIDER?)";
    mailbox.WaitUntil(what, [&] {
      if (Clock::now() >= again_at) {
        mailbox.Send(server, AppMessageType::kConnect, mailbox.endpoint.addr);
        again_at = Clock::now() + kConnectAgain;
      }
      std::optional<Message> message = Take();
      return message && message->type == AppMessageType::kAccept;
    });
  }

  // Sends a text, for whose answer we do not wait. The server may have
  // forgotten a client that has been silent for long.
  void Ask() {
    if (Clock::now() - asked_at > kForgetAfter / 2) Connect();
    text = std::to_string(server->number) + ", text " +
           std::to_string(++num_texts);
    mailbox.heard_at = asked_at = Clock::now();
    mailbox.Send(server, AppMessageType::kText, text);
    mailbox.PostReady();  // before we sleep
    waiting = true;
  }

  // Polls. Returns whether the answer has come. Throws if nothing comes, or not
  // what should come.
  bool HasAnswer() {
    // Looks at the clock only when all that has come is read.
    if (mailbox.Poll() == 0) {
      CheckSilence(mailbox.heard_at, "waiting for the reversed text");
    }
    while (std::optional<Message> message = Take()) {
      if (message->type == AppMessageType::kAccept) continue;  // a second one
      if (BodyOf(*message, AppMessageType::kText) !=
          std::string(text.rbegin(), text.rend())) {
        throw std::runtime_error("the text is not correct");
      }
      waiting = false;
    }
    return !waiting;
  }

  // Tells the server that we want nothing more, which spares it waiting for our
  // silence.
  void SayBye() {
    mailbox.Send(server, AppMessageType::kBye);
    try {
      mailbox.WaitUntil("saying BYE", [&] { return server->outbox.empty(); });
    } catch (const std::runtime_error&) {
      // The server will notice our silence.
    }
  }
};

// Runs many clients in one process, until each has had so many texts reversed.
// None of them waits for its answer: the others would wait along.
void ClientMain(const Address& server_addr, size_t num_clients,
                size_t num_texts, std::chrono::milliseconds period) {
  Domain domain;
  std::list<Client> crowd;
  while (crowd.size() < num_clients && !g_interrupted) {
    crowd.emplace_back(domain, server_addr);
  }
  printf("%zu clients are connected.\n", crowd.size());
  std::vector<double> times;  // us
  Clock::time_point start = Clock::now();
  while (true) {
    if (g_interrupted) throw std::runtime_error("interrupted");
    Clock::time_point now = Clock::now();
    Clock::time_point wake_at = now + kMaxSleep;
    std::vector<Mailbox*> waiting = {&crowd.front().mailbox};
    for (Client& client : crowd) {
      if (client.waiting && client.HasAnswer()) {
        std::chrono::duration<double, std::micro> time =
            Clock::now() - client.asked_at;
        times.push_back(time.count());
      }
      Clock::time_point due_at = client.asked_at + period;
      bool idle = !client.waiting && client.num_texts < num_texts;
      if (idle && due_at <= Clock::now()) client.Ask();
      if (client.waiting) {
        waiting.push_back(&client.mailbox);
      } else if (idle) {
        wake_at = std::min(wake_at, due_at);
      }
    }
    // Before we sleep: nothing more comes that would wake us.
    if (times.size() == num_clients * num_texts) break;
    Mailbox::Sleep(waiting, wake_at - now);
  }
  std::chrono::duration<double> seconds = Clock::now() - start;
  for (Client& client : crowd) client.SayBye();
  std::sort(times.begin(), times.end());
  printf(
      "%zu texts, all correct, %.0f a second: half of the answers took up to "
      "%.0f us, 99 %% up to %.0f us.\n",
      times.size(), double(times.size()) / seconds.count(),
      times[times.size() / 2], times[times.size() * 99 / 100]);
}

// ---- Command line ----

constexpr const char* kUsage =
    "Usage:\n"
    "  13_crowd\n"
    "      Run the server.\n"
    "  13_crowd ADDRESS [CLIENTS [TEXTS [PERIOD]]]\n"
    "      Run so many clients (1), each of which has it reverse so many\n"
    "      texts (1000), one every PERIOD milliseconds (or at once).\n"
    "ADDRESS is what the server prints. FI_PROVIDER chooses the provider.\n";

// Reads a number from 1 to `max`. Throws std::invalid_argument.
size_t ParseNumber(const std::string& text, size_t max) {
  size_t number = 0;
  const char* end = text.data() + text.size();
  auto result = std::from_chars(text.data(), end, number);
  if (result.ec != std::errc() || result.ptr != end || number < 1 ||
      number > max) {
    throw std::invalid_argument("not a number from 1 to " +
                                std::to_string(max) + ": " + text);
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
  setvbuf(stdout, nullptr, _IOLBF, 0);  // whole lines, also into a pipe
  g_wake_fd = eventfd(0, EFD_CLOEXEC);
  CatchSignals();
  RaiseFileLimit();
  // Settings of tcp;ofi_rxm: fi_av_remove gives up what is in flight to the
  // peer, and buffers are as short as our messages.
  setenv("FI_AV_REMOVE_CLEANUP", "1", 0);
  setenv("FI_OFI_RXM_BUFFER_SIZE", "2048", 0);
  try {
    if (args.empty()) {
      ServerMain(argv[0]);
      return 0;
    }
    if (args[0] == "--help") {
      printf("%s", kUsage);
      return 0;
    }
    if (args.size() > 4) throw std::invalid_argument("too many arguments");
    size_t clients = args.size() > 1 ? ParseNumber(args[1], kMaxClients) : 1;
    size_t texts = args.size() > 2 ? ParseNumber(args[2], kMaxNumber) : 1000;
    size_t period = args.size() > 3 ? ParseNumber(args[3], kMaxNumber) : 0;
    ClientMain(ParseAddress(args[0]), clients, texts,
               std::chrono::milliseconds(period));
    return 0;
  } catch (const std::invalid_argument& e) {
    fprintf(stderr, "error: %s\n%s", e.what(), kUsage);
    return 2;
  } catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
