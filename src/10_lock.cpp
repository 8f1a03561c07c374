// 10_lock: memory of one machine that several others change at once.
//
// The server registers memory and says where it is. Its program takes no part
// in what follows: the clients agree among themselves about who changes what.
//
// Based on 8_malloc.

#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define XXH_INLINE_ALL  // so that there is no library to link
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <random>
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
constexpr auto kIdlePause = 1ms;           // between two looks at quiet queues
constexpr auto kContactGrace = 500ms;      // that an interrupted client stays

constexpr size_t kMaxClients = 8;  // at a time; an endpoint may take 100 MB

constexpr size_t kHugePageSize = 2 << 20;         // bytes
constexpr size_t kCompletionQueueReadCount = 16;  // entries read at a time
constexpr size_t kPollsPerYield = 64;             // empty polls

constexpr auto kLease = 1s;            // without a change, then a turn is over
constexpr auto kTurnPause = 50us;      // for each client before us
constexpr size_t kMaxCount = 100'000;  // changes of each kind by a client
constexpr size_t kLogSize = 1 << 20;   // entries
constexpr size_t kNumRecords = 1024;   // of the hash table
constexpr size_t kKeysPerClient = 32;  // of the hash table
constexpr size_t kMaxReads = 100;      // of a record that changes meanwhile

constexpr auto kAlivePeriod = 1s;  // between two messages that we are alive

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

// Handles such a signal. A second one ends the process at once, unless it is a
// SIGPIPE: each line that we print into a closed pipe brings one.
void HandleSignal(int signum) {
  if (g_interrupted.exchange(true) && signum != SIGPIPE) _exit(128 + signum);
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
  hints->caps = FI_MSG | FI_RMA | FI_ATOMIC;  // we want to do all of these,
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
  // Only one thread uses the domain, so the provider needs no locks.
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
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
  std::random_device random;

  Domain() {
    printf("domain: %s, fabric: %s, provider: %s\n", info->domain_attr->name,
           info->fabric_attr->name, info->fabric_attr->prov_name);
    FiCheck(fi_fabric(info->fabric_attr, &fabric.ptr, nullptr), "fi_fabric");
    FiCheck(fi_domain(fabric, info.get(), &handle.ptr, nullptr), "fi_domain");
  }

  // Returns a key, as hard to guess as the provider's keys are wide.
  uint64_t RandomKey() {
    uint64_t key = uint64_t{random()} << 32 | random();
    size_t bits = 8 * info->domain_attr->mr_key_size;
    return bits < 64 ? key % (uint64_t{1} << bits) : key;
  }
};

// Memory, and the function that frees it.
using Memory = std::unique_ptr<char[], void (*)(void*)>;

// Allocates zeros. Writing them makes sure that each page exists, which a
// provider may demand before registration (FI_MR_ALLOCATED).
Memory AllocHost(size_t size) {
  // Ask for huge pages for much memory: they need fewer page table entries.
  if (size >= kHugePageSize) {
    size_t rounded = (size + kHugePageSize - 1) / kHugePageSize * kHugePageSize;
    auto* data = static_cast<char*>(aligned_alloc(kHugePageSize, rounded));
    if (data == nullptr) throw std::bad_alloc();
    madvise(data, rounded, MADV_HUGEPAGE);
    memset(data, 0, rounded);
    return Memory(data, free);
  }
  return Memory(new char[size](),
                [](void* data) { delete[] static_cast<char*>(data); });
}

// 3. Registered memory: the adapter may use it, for FI_SEND, FI_RECV ...
struct Buffer {
  size_t size;  // bytes
  Memory data;
  Owned<fid_mr> mr;
  size_t in_flight = 0;  // operations that have it: hands off, unless 0

  Buffer(Domain& domain, size_t bytes, uint64_t access)
      : size(bytes), data(AllocHost(bytes)) {
    iovec iov = {.iov_base = data.get(), .iov_len = size};
    fi_mr_attr attr = {};
    attr.mr_iov = &iov;
    attr.iov_count = 1;
    // A right more than we need: with FI_ATOMIC, ofi_rxm of libfabric 2.6 takes
    // only one region without remote rights. The key stays with us.
    attr.access = access | FI_REMOTE_READ;
    attr.requested_key = domain.RandomKey();  // not with FI_MR_PROV_KEY
    FiCheck(fi_mr_regattr(domain.handle, &attr, 0, &mr.ptr), "fi_mr_regattr");
  }
};

// ---- Operations and completions ----

// The kinds of operations.
enum class RdmaOpType { kRecv, kSend, kWrite, kRead, kFetchAdd, kCompareSwap };
constexpr const char* kOpNames[] = {
    "RECV", "SEND", "WRITE", "READ", "FETCH-AND-ADD", "COMPARE-AND-SWAP"};

// The numbers of an atomic operation, which are in its buffer, at its offset.
// It changes one word of 64 bits at the peer.
struct AtomicNumbers {
  uint64_t operand;       // added to the word, or put in its place
  uint64_t expected = 0;  // of a compare-and-swap: only this word is replaced
  uint64_t before = 0;    // set at completion: the word as it was
};

// A work request: an operation for libfabric to do, and the function to call
// when it is done, which may post others.
struct RdmaOp {
  fi_context2 context = {};  // must come first: for the provider's notes
  RdmaOpType type = RdmaOpType::kRecv;
  fi_addr_t peer = FI_ADDR_UNSPEC;  // not of a RECV, which takes from anybody
  Buffer* buf = nullptr;
  size_t len = 0;  // bytes; of a RECV, set when a message has arrived
  // Of a one-sided operation:
  size_t offset = 0;         // in buf
  uint64_t remote_addr = 0;  // the place, as the owner of the memory has said
  uint64_t remote_key = 0;   // from the owner, too
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
  std::deque<RdmaOp> ops;         // as many as were ever in use
  std::vector<RdmaOp*> free_ops;  // those that are not in flight
  Address addr;                   // our own

  std::deque<RdmaOp*> pending_ops;  // waiting to be handed over, in order

  Owned<fid_av> av;  // the addresses of our peers
  Owned<fid_cq> cq;  // how our operations have ended
  Owned<fid_eq> eq;  // what happens to the endpoint
  Owned<fid_ep> ep;  // where we post them

  explicit Endpoint(Domain& domain) {
    fi_av_attr av_attr = {};
    fi_cq_attr cq_attr = {};
    cq_attr.format = FI_CQ_FORMAT_DATA;  // what we want to know of each
    FiCheck(fi_av_open(domain.handle, &av_attr, &av.ptr, nullptr),
            "fi_av_open");
    FiCheck(fi_cq_open(domain.handle, &cq_attr, &cq.ptr, nullptr),
            "fi_cq_open");
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
    // FI_ATOMIC alone promises neither the operation nor the type.
    size_t max_count = 0;
    FiCheck(fi_fetch_atomicvalid(ep, FI_UINT64, FI_SUM, &max_count),
            "fi_fetch_atomicvalid (try another provider)");
    FiCheck(fi_compare_atomicvalid(ep, FI_UINT64, FI_CSWAP, &max_count),
            "fi_compare_atomicvalid (try another provider)");

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

  // 5. Hands an operation to libfabric, or keeps it until there is room. Its
  // buffer must not change until it has completed. Once one operation has to
  // wait, all later ones wait behind it, so that none overtakes another.
  void Post(RdmaOp request) {
    if (free_ops.empty()) free_ops.push_back(&ops.emplace_back());
    RdmaOp* op = free_ops.back();
    *op = std::move(request);
    free_ops.pop_back();
    ++op->buf->in_flight;
    pending_ops.push_back(op);
    ProgressPendingOps();
  }

  // Calls the function of libfabric for an operation.
  ssize_t Submit(RdmaOp* op) {
    char* data = &op->buf->data[op->offset];
    void* desc = fi_mr_desc(op->buf->mr);
    if (op->type == RdmaOpType::kRecv) {
      return fi_recv(ep, data, op->len, desc, op->peer, op);
    }
    if (op->type == RdmaOpType::kSend) {
      return fi_send(ep, data, op->len, desc, op->peer, op);
    }
    if (op->type == RdmaOpType::kWrite) {
      return fi_write(ep, data, op->len, desc, op->peer, op->remote_addr,
                      op->remote_key, op);
    }
    if (op->type == RdmaOpType::kRead) {
      return fi_read(ep, data, op->len, desc, op->peer, op->remote_addr,
                     op->remote_key, op);
    }
    auto* numbers = reinterpret_cast<AtomicNumbers*>(data);
    if (op->type == RdmaOpType::kFetchAdd) {
      return fi_fetch_atomic(ep, &numbers->operand, 1, desc, &numbers->before,
                             desc, op->peer, op->remote_addr, op->remote_key,
                             FI_UINT64, FI_SUM, op);
    }
    return fi_compare_atomic(ep, &numbers->operand, 1, desc, &numbers->expected,
                             desc, &numbers->before, desc, op->peer,
                             op->remote_addr, op->remote_key, FI_UINT64,
                             FI_CSWAP, op);
  }

  // Hands over what is waiting, as far as libfabric has room. An operation that
  // libfabric refuses completes at once, with an error.
  void ProgressPendingOps() {
    while (!pending_ops.empty()) {
      RdmaOp* op = pending_ops.front();
      ssize_t ret = Submit(op);
      if (ret == -FI_EAGAIN) return;  // reading completions makes room
      pending_ops.pop_front();
      if (ret != 0) Complete(op, 0, fi_strerror(int(-ret)));
    }
  }

  // Reads what has completed and calls back. Many providers work only while we
  // read. Returns the number of completions. Throws if a callback does, and
  // loses the entries behind it then. (An error is read alone.)
  size_t PollCompletion() {
    ProgressPendingOps();
    fi_cq_data_entry entries[kCompletionQueueReadCount];
    ssize_t ret = fi_cq_read(cq, entries, kCompletionQueueReadCount);
    if (ret == -FI_EAGAIN) return 0;
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
    // Some providers do not say which operation has failed, and it may be a
    // WRITE from the other side.
    if (entry.op_context == nullptr || (entry.flags & FI_REMOTE_WRITE)) {
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

  kJoin = 7,    // client: where is your memory, and who am I?
  kReply = 9,   // server: it is done
  kAlive = 10,  // client: I am still at it
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

// Returns a copy of something in memory, to be sent.
std::string BytesOf(const void* data, size_t size) {
  return {static_cast<const char*>(data), size};
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
  Domain& domain;
  std::deque<Buffer> recv_bufs;
  Buffer send_buf;
  std::deque<Message> inbox;   // that have arrived
  std::deque<Message> outbox;  // that wait for send_buf
  fi_addr_t peer = FI_ADDR_UNSPEC;
  Clock::time_point heard_at = Clock::now();  // the last sign of life
  Endpoint endpoint;  // the last, so that it is closed before it loses buffers

  explicit Session(Domain& open_domain)
      : domain(open_domain),
        send_buf(domain, kMaxMessageSize, FI_SEND),
        endpoint(domain) {
    for (size_t i = 0; i < kRecvCount; ++i) {
      recv_bufs.emplace_back(domain, kMaxMessageSize, FI_RECV);
    }
    PostRecvs();
  }

  // Posts a RECV for each free buffer.
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
    endpoint.Post({.type = RdmaOpType::kSend,
                   .peer = peer,
                   .buf = &send_buf,
                   .len = sizeof(message.type) + message.body.size(),
                   .callback = [](const RdmaOp& op) { op.Check(); }});
    outbox.pop_front();
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

  // Client: polls until `done` returns true. Errors say `what` we were doing.
  // A server must not wait like this: all its clients would have to wait, too.
  void WaitUntil(const char* what, const std::function<bool()>& done) {
    heard_at = Clock::now();
    size_t empty_polls = 0;
    while (!done()) {
      // Gives READs in flight a moment to complete: leaving earlier may crash.
      if (g_interrupted && Clock::now() - heard_at > kContactGrace) {
        throw std::runtime_error("interrupted");
      }
      if (Poll() > 0) continue;
      CheckSilence(heard_at, what);
      // No sleep: a poll that completes nothing may move data all the same.
      if (++empty_polls % kPollsPerYield == 0) std::this_thread::yield();
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

// Memory that its owner lets the other side use.
struct AppMemoryRegion {
  uint64_t addr;
  uint64_t size;  // bytes
  uint64_t rkey;
  uint32_t client;  // the number of the client, from 1
  uint32_t seat;    // its seat: a number below kMaxClients
};

// An entry of a log. Each client counts its own entries, from 0.
struct LogEntry {
  uint32_t client;  // its number; 0 means that nobody has written the entry
  uint32_t count;
};

// More than one word, so no atomic operation can change it.
struct Ledger {
  uint64_t total;                 // of all changes
  uint64_t changes[kMaxClients];  // by seat

  // Returns whether its numbers fit together.
  bool IsRight() const {
    uint64_t sum = 0;
    for (uint64_t number : changes) sum += number;
    return sum == total;
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

// A record of the hash table, which only the client that claimed it writes.
struct Record {
  uint64_t key;       // 0 means that the record is free
  uint64_t version;   // counts the WRITEs; 0 before the first
  uint64_t checksum;  // of all but itself
  char data[232];     // each byte is the lowest one of the version

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
  alignas(64) LogEntry log[kLogSize];
  alignas(64) Record records[kNumRecords];
};

// The memory that the server registers for its clients. The server looks at it
// only when it has no client.
struct SharedMemory {
  size_t failures = 0;  // clients that have ended without a BYE
  Buffer buf;
  SharedTable* table;
  uint64_t base = 0;  // what others have to add to an offset

  // FI_RECV, too: an adapter without WRITEs has us fetch the data ourselves.
  explicit SharedMemory(Domain& domain)
      : buf(domain, sizeof(SharedTable),
            FI_REMOTE_READ | FI_REMOTE_WRITE | FI_RECV),
        table(reinterpret_cast<SharedTable*>(buf.data.get())) {
    // Others name a place in our memory by its address or, if the provider does
    // without FI_MR_VIRT_ADDR, by its distance from the start.
    if (domain.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) {
      base = reinterpret_cast<uint64_t>(buf.data.get());
    }
  }

  // Checks what the clients have left behind.
  void Check() const {
    size_t num_entries = std::min<uint64_t>(table->tickets, kLogSize);
    size_t holes = 0;
    bool correct = true;
    std::map<uint32_t, uint32_t> counts;  // of entries, by client
    for (size_t i = 0; i < num_entries; ++i) {
      const LogEntry& entry = table->log[i];
      if (entry.client == 0) {
        ++holes;
      } else {
        correct &= entry.count == counts[entry.client]++;
      }
    }
    Turn turn = Turn::FromWord(table->turn);
    const Ledger& ledger = table->ledgers[turn.ledger % (2 * kMaxClients)];
    // Each client makes as many entries as changes, and the entries first.
    correct &= ledger.IsRight() && (failures > 0 ? ledger.total <= num_entries
                                                 : ledger.total == num_entries);
    // A client that dies between its ticket and its entry leaves a hole.
    correct &= holes <= failures;
    fprintf(correct ? stdout : stderr,
            "%sthe log has %zu entries (%zu holes), the ledger %zu changes. "
            "%s\n",
            correct ? "" : "error: ", num_entries, holes, size_t(ledger.total),
            correct ? "It all fits together." : "It does not fit together.");
  }
};

// A client. Of what it does with the memory, the server hears nothing.
struct ServedClient {
  size_t number;  // of the client; begins each line about it
  SharedMemory& memory;
  Session session;
  uint32_t seat = kMaxClients;  // until the server gives it a smaller one
  bool done = false;            // has said BYE, or its session has failed

  // Opens the session. Throws if the machine lacks what that takes.
  ServedClient(Domain& domain, size_t client_number, const Address& addr,
               SharedMemory& shared)
      : number(client_number), memory(shared), session(domain) {
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

  // Does what the client asks for, and answers.
  void HandleRequest(const Message& message) {
    if (message.type == AppMessageType::kAlive) return;
    BodyOf(message, AppMessageType::kJoin);
    AppMemoryRegion region = {.addr = memory.base,
                              .size = memory.buf.size,
                              .rkey = fi_mr_key(memory.buf.mr),
                              .client = uint32_t(number),
                              .seat = seat};
    session.Send(AppMessageType::kReply, BytesOf(&region, sizeof(region)));
  }
};

// Runs the server, until a signal ends it.
void ServerMain(const char* program) {
  Domain domain;
  SharedMemory memory(domain);
  printf("Registered %zu bytes that clients can change\n", memory.buf.size);
  Session listener(domain);
  std::list<ServedClient> clients;
  size_t num_clients = 0;  // so far
  size_t empty_polls = 0;
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
        clients.emplace_back(domain, num_clients, addr, memory);
        // Takes a seat whose last client is gone, endpoint and all: nothing of
        // it can arrive any more.
        uint32_t seat = 0;
        auto taken = [&](const ServedClient& c) { return c.seat == seat; };
        while (std::any_of(clients.begin(), clients.end(), taken)) ++seat;
        clients.back().seat = seat;
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
        ++memory.failures;
      }
    }
    size_t left =
        clients.remove_if([](const ServedClient& c) { return c.done; });
    if (left > 0 && clients.empty()) memory.Check();
    if (completions > 0) continue;
    // The clients' READs and WRITEs complete nothing here, but many providers
    // do their part of the work only while we poll.
    if (clients.empty()) {
      std::this_thread::sleep_for(kIdlePause);
    } else if (++empty_polls % kPollsPerYield == 0) {
      std::this_thread::yield();
    }
  }
}

// Memory of the client, all of it registered: each operation has a place.
struct ClientMemory {
  AtomicNumbers atomic;
  LogEntry entry;
  Ledger ledger;
  Record written;
  Record read;
};

// What the client does with the server's memory.
struct MemoryClient {
  Buffer buf;
  ClientMemory* memory;
  Session session;
  AppMemoryRegion joined = {};
  Clock::time_point alive_at;

  explicit MemoryClient(Domain& domain)
      : buf(domain, sizeof(ClientMemory), FI_READ | FI_WRITE),
        memory(reinterpret_cast<ClientMemory*>(buf.data.get())),
        session(domain) {}

  // Waits until `done` returns true. Tells the server now and then that we are
  // alive: it sees nothing of our READs and WRITEs. After a signal nothing is
  // ever done, but what is in flight has time to complete.
  void WaitUntil(const char* what, const std::function<bool()>& done) {
    session.WaitUntil(what, [&] {
      if (!g_interrupted && done()) return true;
      if (Clock::now() - alive_at > kAlivePeriod && session.HasSent()) {
        alive_at = Clock::now();
        session.Send(AppMessageType::kAlive);
      }
      return false;
    });
  }

  // Asks where the server's memory is.
  void Join() {
    session.Send(AppMessageType::kJoin);
    WaitUntil("waiting for an answer", [&] { return !session.inbox.empty(); });
    std::string body = BodyOf(*session.Take(), AppMessageType::kReply);
    body.copy(reinterpret_cast<char*>(&joined), sizeof(joined));
    if (joined.size != sizeof(SharedTable) || joined.seat >= kMaxClients) {
      throw BadMessage("the server's memory is of another kind");
    }
  }

  // Does a one-sided operation, and waits until it has completed. `local` is
  // where in our memory it takes place, `remote` where in the table.
  void Do(RdmaOpType type, void* local, size_t len, size_t remote) {
    session.endpoint.Post(
        {.type = type,
         .peer = session.peer,
         .buf = &buf,
         .len = len,
         .offset = size_t(static_cast<char*>(local) - buf.data.get()),
         .remote_addr = joined.addr + remote,
         .remote_key = joined.rkey,
         .callback = [](const RdmaOp& op) { op.Check(); }});
    WaitUntil("waiting for a one-sided operation",
              [this] { return buf.in_flight == 0; });
  }

  // Adds to a word, and returns what it was before. Adding nothing reads it.
  uint64_t FetchAdd(size_t remote, uint64_t number) {
    memory->atomic = {.operand = number};
    Do(RdmaOpType::kFetchAdd, &memory->atomic, sizeof(memory->atomic), remote);
    return memory->atomic.before;
  }

  // Replaces a word if it is as expected. Returns what it was before.
  uint64_t CompareSwap(size_t remote, uint64_t expected, uint64_t number) {
    memory->atomic = {.operand = number, .expected = expected};
    Do(RdmaOpType::kCompareSwap, &memory->atomic, sizeof(memory->atomic),
       remote);
    return memory->atomic.before;
  }
};

// The log: a place for each entry.
struct Log {
  MemoryClient& client;
  uint32_t num_entries = 0;  // that we have appended

  // Draws a ticket, and WRITEs the next entry to the place that it names.
  void Append() {
    uint64_t ticket = client.FetchAdd(offsetof(SharedTable, tickets), 1);
    if (ticket >= kLogSize) throw std::runtime_error("the log is full");
    LogEntry& entry = client.memory->entry;
    entry = {.client = client.joined.client, .count = num_entries++};
    client.Do(RdmaOpType::kWrite, &entry, sizeof(entry),
              offsetof(SharedTable, log) + ticket * sizeof(LogEntry));
  }
};

// Changes the ledger.
struct Bookkeeper {
  MemoryClient& client;
  Ledger& ledger = client.memory->ledger;  // what we have READ
  uint64_t before_us = 0;    // changes by those who had our seat before
  uint64_t num_changes = 0;  // that we have made
  size_t lost_turns = 0;     // that others have ended
  size_t ended_turns = 0;    // of others, that we have ended

  // Changes the ledger, while nobody else does.
  void Change() {
    while (true) {
      uint64_t ticket = client.FetchAdd(offsetof(SharedTable, lock_tickets), 1);
      Turn turn = WaitForTurn(ticket);
      if (turn.ticket == ticket && TryChange(turn)) return;
      ++lost_turns;
    }
  }

  // Returns whose turn it is, and which ledger is valid.
  Turn ReadTurn() {
    return Turn::FromWord(client.FetchAdd(offsetof(SharedTable, turn), 0));
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
      // Each look costs the server work, so a client far back looks less often;
      // but most of those before us may be dead.
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

  // READs the ledger that is valid.
  void Read(const Turn& turn) {
    client.Do(RdmaOpType::kRead, &ledger, sizeof(Ledger),
              offsetof(SharedTable, ledgers) + turn.ledger * sizeof(Ledger));
  }

  // Writes the changed ledger aside, then makes it the valid one and ends our
  // turn, both at once. Returns false if our turn was over before that; then
  // nothing has changed.
  bool TryChange(const Turn& turn) {
    uint64_t& ours = ledger.changes[client.joined.seat];
    Read(turn);
    uint64_t before = ours++;
    ++ledger.total;
    Hold();
    size_t aside = 2 * client.joined.seat;
    if (turn.ledger == aside) ++aside;
    client.Do(RdmaOpType::kWrite, &ledger, sizeof(ledger),
              offsetof(SharedTable, ledgers) + aside * sizeof(Ledger));
    if (!ReplaceTurn(turn, {turn.ticket + 1, aside})) return false;
    // It was our turn until now, so nobody has written what we have READ.
    if (num_changes++ == 0) before_us = before;
    return true;
  }

  // Lets some time pass, as if a change took that long.
  void Hold() {
    const char* ms = getenv("HOLD_MS");
    if (ms == nullptr) return;
    auto until = Clock::now() + std::chrono::milliseconds(atoi(ms));
    client.WaitUntil("changing the ledger", [&] {
      client.session.heard_at = Clock::now();  // we wait for nobody
      return Clock::now() >= until;
    });
  }

  // READs the ledger, and returns what is wrong with it. Takes no lock: if the
  // turn is the same after the READ as before it, nobody has written this
  // ledger meanwhile.
  std::string Check() {
    Turn turn = ReadTurn();
    while (true) {
      Turn before = turn;
      Read(turn);
      turn = ReadTurn();
      if (turn.Word() == before.Word()) break;
    }
    uint64_t found = ledger.changes[client.joined.seat] - before_us;
    if (!ledger.IsRight() || found > num_changes) return "the ledger is wrong";
    if (found == num_changes) return "";
    return std::to_string(num_changes - found) + " of our " +
           std::to_string(num_changes) + " changes of the ledger are lost";
  }
};

// The hash table: READs without a lock.
struct HashTable {
  MemoryClient& client;
  Record& written = client.memory->written;
  Record& read = client.memory->read;
  size_t places[kKeysPerClient] = {};      // of our records
  uint64_t versions[kKeysPerClient] = {};  // 0 as long as we have none
  size_t torn_reads = 0;                   // of records that changed meanwhile

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

  // READs a record. If it changes meanwhile, we may get half of the old one and
  // half of the new one, and READ again. Returns false if that goes on: its
  // owner has died while it wrote.
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

  // Returns the place of a key's record. If it has none, takes a free one.
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
    if (versions[i] == 0) places[i] = Claim(written.key);
    written.version = ++versions[i];
    memset(written.data, int(written.version), sizeof(written.data));
    written.checksum = written.Checksum();
    // The key is there already.
    constexpr size_t kKeySize = offsetof(Record, version);
    client.Do(RdmaOpType::kWrite, &written.version, sizeof(Record) - kKeySize,
              RecordAt(places[i]) + kKeySize);
  }

  // READs our records, and returns what is wrong with them.
  std::string Check() {
    for (size_t i = 0; i < kKeysPerClient; ++i) {
      if (versions[i] > 0 &&
          !(Get(Key(client.joined.seat, i)) && read.version == versions[i])) {
        return "a record is not as we have written it";
      }
    }
    return "";
  }
};

// Makes all changes of one kind, and prints how long they take.
void Repeat(MemoryClient& client, const char* what, size_t count,
            const std::function<void()>& change) {
  Clock::time_point start = Clock::now();
  for (size_t i = 0; i < count; ++i) change();
  std::chrono::duration<double> seconds = Clock::now() - start;
  printf("[%u] %zu %s: %.3f s, %.1f us each\n", client.joined.client, count,
         what, seconds.count(), 1e6 * seconds.count() / double(count));
}

// Runs the client. Throws unless it gets what it asks for.
void ClientMain(const Address& server_addr, size_t count) {
  Domain domain;
  MemoryClient client(domain);
  client.session.Connect(server_addr);
  client.Join();
  Repeat(client, "messages and their answers", count, [&] { client.Join(); });
  Log log{client};
  Repeat(client, "entries by FETCH-AND-ADD and WRITE", count,
         [&] { log.Append(); });
  Bookkeeper ledger{client};
  Repeat(client, "changes under the lock", count, [&] { ledger.Change(); });
  HashTable table{client};
  std::mt19937_64 random{domain.random()};
  Repeat(client, "records written, and as many read", count, [&] {
    table.Put(random() % kKeysPerClient);
    table.Get(1 + random() % (kMaxClients * kKeysPerClient));
  });
  std::string wrong = ledger.Check();
  if (wrong.empty()) wrong = table.Check();
  printf("Turns of ours that others ended: %zu, of others that we ended: %zu\n",
         ledger.lost_turns, ledger.ended_turns);
  printf("READs of half a WRITE: %zu\n", table.torn_reads);
  client.session.SayBye();
  if (!wrong.empty()) throw std::runtime_error(wrong);
  printf("Data is correct.\n");
}

// ---- Command line ----

constexpr const char* kUsage =
    "Usage:\n"
    "  10_lock\n"
    "      Run the server.\n"
    "  10_lock ADDRESS [COUNT]\n"
    "      Change its memory COUNT times in each way (1000).\n"
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

int main(int argc, char** argv) {
  std::vector<std::string> args(argv + 1, argv + argc);
  setvbuf(stdout, nullptr, _IOLBF, 0);  // whole lines, also into a pipe
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
    if (args.size() > 2) {
      throw std::invalid_argument("wrong number of arguments");
    }
    size_t count = args.size() > 1 ? ParseNumber(args[1], kMaxCount) : 1000;
    ClientMain(ParseAddress(args[0]), count);
    return 0;
  } catch (const std::invalid_argument& e) {
    fprintf(stderr, "error: %s\n%s", e.what(), kUsage);
    return 2;
  } catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
