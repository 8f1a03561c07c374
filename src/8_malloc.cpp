// 8_malloc: memory of another machine, borrowed and given back.
//
// The server registers one large pool and lends pieces of it. A client asks for
// a piece by message, then WRITEs into it and READs it back, in which the
// server's program takes no part.
//
// Based on 7_queue.

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
#include <set>
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

constexpr size_t kPoolSize = 256 << 20;       // bytes that the server lends
constexpr size_t kClientPoolSize = 16 << 20;  // bytes
constexpr size_t kPieceAlign = 64;            // bytes: a line of the cache
constexpr size_t kMaxPieceSize = 1 << 20;     // bytes that a client asks for
constexpr size_t kMaxPieces = 10'000;         // that a client asks for
constexpr size_t kSamples = 100;              // of each of our measurements

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
Info GetInfo(bool gpu) {
  Info hints(fi_allocinfo(), fi_freeinfo);
  hints->caps = FI_MSG | FI_RMA;  // we want to send messages, WRITE and READ,
  hints->ep_attr->type = FI_EP_RDM;  // reliably, to any number of peers,
  hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;  // and hear of their arrival
  // Where a queue is full, we want -FI_EAGAIN, and no overrun: fi_domain(3).
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->ep_attr->max_msg_size = kMaxPieceSize;  // each as long as this
  // Demands that we can meet.
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY;
  if (gpu) {
    hints->caps |= FI_HMEM;  // into memory that isn't the host's
    hints->domain_attr->mr_mode |= FI_MR_HMEM;
  }
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
  bool gpu;  // our pool is in the memory of a GPU
  Info info;
  Owned<fid_fabric> fabric;
  Owned<fid_domain> handle;
  std::random_device random;

  explicit Domain(bool with_gpu) : gpu(with_gpu), info(GetInfo(gpu)) {
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

// Memory of a GPU. All calls of CUDA are at the end of this file.
Memory CudaAlloc(size_t size);
void CudaCopy(void* to, const void* from, size_t size);
void CudaFlushWrites();

// 3. Registered memory: the adapter may use it, for FI_SEND, FI_RECV ...
struct Buffer {
  size_t size;  // bytes
  bool gpu;     // it is memory of the GPU
  Memory data;
  Owned<fid_mr> mr;
  size_t in_flight = 0;  // operations that have it: hands off, unless 0

  Buffer(Domain& domain, size_t bytes, uint64_t access, bool on_gpu = false)
      : size(bytes),
        gpu(on_gpu),
        data(gpu ? CudaAlloc(bytes) : AllocHost(bytes)) {
    iovec iov = {.iov_base = data.get(), .iov_len = size};
    fi_mr_attr attr = {};
    attr.mr_iov = &iov;
    attr.iov_count = 1;
    attr.access = access;
    attr.requested_key = domain.RandomKey();  // not with FI_MR_PROV_KEY
    if (gpu) attr.iface = FI_HMEM_CUDA;
    FiCheck(fi_mr_regattr(domain.handle, &attr, 0, &mr.ptr), "fi_mr_regattr");
  }

  // Copies between the buffer and host memory, in either direction.
  void Copy(void* to, const void* from, size_t len) const {
    if (gpu) return CudaCopy(to, from, len);
    memcpy(to, from, len);
  }
};

// ---- Operations and completions ----

// The kinds of operations.
enum class RdmaOpType { kRecv, kSend, kWrite, kRead };
constexpr const char* kOpNames[] = {"RECV", "SEND", "WRITE", "READ"};

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

  // Returns whether libfabric has taken everything that was posted.
  bool HasRoom() const { return pending_ops.empty(); }

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
    return fi_read(ep, data, op->len, desc, op->peer, op->remote_addr,
                   op->remote_key, op);
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

  kMalloc = 6,   // client: lend me a piece
  kFree = 7,     // client: take this piece back
  kReply = 8,    // server: it is done
  kRefusal = 9,  // server: I can't, and this is why
  kAlive = 10,   // client: I am still at it
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
};

// Divides a range of memory into pieces. It knows them by their offset in bytes
// and never touches the memory, which may be that of a GPU. Each byte belongs
// to just one piece, lent or free, and no two free pieces are neighbours.
struct Allocator {
  std::map<size_t, size_t> lent;  // the sizes of pieces, by their offsets
  std::map<size_t, size_t> free;

  explicit Allocator(size_t size) : free({{0, size}}) {}

  // Lends the smallest free piece that is large enough, and keeps what remains
  // of it. Returns nothing if there is no such piece.
  std::optional<size_t> Alloc(size_t size) {
    size = (size + kPieceAlign - 1) / kPieceAlign * kPieceAlign;
    auto best = free.end();
    for (auto piece = free.begin(); piece != free.end(); ++piece) {
      if (piece->second < size) continue;
      if (best == free.end() || piece->second < best->second) best = piece;
    }
    if (best == free.end()) return std::nullopt;
    auto [offset, free_size] = *best;
    free.erase(best);
    if (free_size > size) free[offset + size] = free_size - size;
    lent[offset] = size;
    return offset;
  }

  // Takes a piece back, and joins it with its neighbours if they are free.
  void Free(size_t offset) {
    auto piece = free.insert(lent.extract(offset)).position;
    auto next = std::next(piece);
    if (next != free.end() && piece->first + piece->second == next->first) {
      piece->second += next->second;
      free.erase(next);
    }
    if (piece == free.begin()) return;
    auto before = std::prev(piece);
    if (before->first + before->second == piece->first) {
      before->second += piece->second;
      free.erase(piece);
    }
  }
};

// Memory that is registered once and lent in pieces.
struct Pool {
  Buffer buf;
  Allocator allocator;
  uint64_t base = 0;  // what others have to add to an offset

  Pool(Domain& domain, size_t size, uint64_t access)
      : buf(domain, size, access, domain.gpu), allocator(size) {
    // Others name a place in our memory by its address or, if the provider does
    // without FI_MR_VIRT_ADDR, by its distance from the start.
    if (domain.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) {
      base = reinterpret_cast<uint64_t>(buf.data.get());
    }
  }

  // Prints what is lent, and in how many pieces the rest is.
  void PrintUsage() const {
    size_t bytes_lent = 0;
    for (auto [offset, size] : allocator.lent) bytes_lent += size;
    printf("The pool lends %zu bytes in %zu pieces, and has %zu free in %zu\n",
           bytes_lent, allocator.lent.size(), buf.size - bytes_lent,
           allocator.free.size());
  }
};

// The pieces that a client has. The pool gets them back in the end. Declare it
// before the session: then no WRITE to that session can arrive any more.
struct Loan {
  Pool& pool;
  std::set<size_t> pieces;  // their offsets

  explicit Loan(Pool& from) : pool(from) {}
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;
  ~Loan() {
    for (size_t offset : pieces) pool.allocator.Free(offset);
  }
};

// A client, and what it has borrowed.
struct ServedClient {
  size_t number;  // of the client; begins each line about it
  Loan loan;
  Session session;
  bool done = false;  // has said BYE, or its session has failed

  // Opens the session. Throws if the machine lacks what that takes.
  ServedClient(Domain& domain, size_t client_number, const Address& addr,
               Pool& pool)
      : number(client_number), loan(pool), session(domain) {
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
    uint64_t value;  // the size of a MALLOC, or the address of a FREE
    if (message.body.size() != sizeof(value)) throw BadMessage("request");
    memcpy(&value, message.body.data(), sizeof(value));
    if (message.type == AppMessageType::kMalloc) return Malloc(value);
    BodyOf(message, AppMessageType::kFree);
    Free(value);
  }

  // Lends a piece.
  void Malloc(uint64_t size) {
    std::optional<size_t> offset;
    if (size > 0 && size <= kPoolSize) offset = loan.pool.allocator.Alloc(size);
    if (!offset) {
      return session.Send(AppMessageType::kRefusal,
                          "the pool has no piece of this size left");
    }
    loan.pieces.insert(*offset);
    AppMemoryRegion piece = {.addr = loan.pool.base + *offset,
                             .size = size,
                             .rkey = fi_mr_key(loan.pool.buf.mr)};
    session.Send(AppMessageType::kReply, BytesOf(&piece, sizeof(piece)));
  }

  // Takes a piece back.
  void Free(uint64_t addr) {
    size_t offset = addr - loan.pool.base;
    if (loan.pieces.erase(offset) == 0) {
      return session.Send(AppMessageType::kRefusal,
                          "this piece is not lent to you");
    }
    loan.pool.allocator.Free(offset);
    session.Send(AppMessageType::kReply);
  }
};

// Runs the server, until a signal ends it.
void ServerMain(const char* program, bool gpu) {
  Domain domain(gpu);
  // FI_RECV, too: an adapter without WRITEs has us fetch the data ourselves.
  Pool pool(domain, kPoolSize, FI_REMOTE_READ | FI_REMOTE_WRITE | FI_RECV);
  printf("Registered a pool of %zu bytes\n", kPoolSize);
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
        clients.emplace_back(domain, num_clients, addr, pool);
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
    size_t left =
        clients.remove_if([](const ServedClient& c) { return c.done; });
    if (left > 0) pool.PrintUsage();
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

// What the client does with the server's memory.
struct MemoryClient {
  Pool pool;  // our own: whatever we WRITE or READ has its place here
  std::optional<Buffer> other;  // a buffer outside of it
  Session session;
  Clock::time_point alive_at;

  explicit MemoryClient(Domain& domain)
      : pool(domain, kClientPoolSize, FI_READ | FI_WRITE), session(domain) {}

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

  // Asks the server for something, and returns its answer.
  std::string Ask(AppMessageType type, uint64_t value) {
    session.Send(type, BytesOf(&value, sizeof(value)));
    WaitUntil("waiting for an answer", [&] { return !session.inbox.empty(); });
    Message reply = *session.Take();
    if (reply.type == AppMessageType::kRefusal) {
      session.SayBye();  // what we have borrowed comes back at once
      throw std::runtime_error("the server refuses: " + reply.body);
    }
    return BodyOf(reply, AppMessageType::kReply);
  }

  // Borrows memory of the server. What we get can be READ and written.
  AppMemoryRegion RemoteMalloc(size_t size) {
    std::string body = Ask(AppMessageType::kMalloc, size);
    AppMemoryRegion piece = {};
    body.copy(reinterpret_cast<char*>(&piece), sizeof(piece));
    if (piece.size != size) throw BadMessage("piece");
    return piece;
  }

  // Gives a piece back.
  void RemoteFree(const AppMemoryRegion& piece) {
    Ask(AppMessageType::kFree, piece.addr);
  }

  // Takes memory from our own pool, for a READ or a WRITE. If there is none
  // left, waits until others have completed. Returns its offset.
  size_t LocalMalloc(size_t size) {
    std::optional<size_t> offset;
    WaitUntil("waiting for READs and WRITEs", [&] {
      if (session.endpoint.HasRoom()) offset = pool.allocator.Alloc(size);
      return offset.has_value();
    });
    return *offset;
  }

  // WRITEs data from our buffer to a piece, or READs the piece into the buffer.
  // Takes the length from the piece: nothing else keeps us within it. Calls
  // back when that has completed.
  void Post(RdmaOpType type, const AppMemoryRegion& piece, Buffer& buf,
            size_t offset, std::function<void()> completed) {
    session.endpoint.Post({.type = type,
                           .peer = session.peer,
                           .buf = &buf,
                           .len = piece.size,
                           .offset = offset,
                           .remote_addr = piece.addr,
                           .remote_key = piece.rkey,
                           .callback = [this, completed](const RdmaOp& op) {
                             op.Check();
                             session.heard_at = Clock::now();
                             completed();
                           }});
  }

  // Waits until all that was posted on a buffer has completed.
  void WaitForAll(const Buffer& buf) {
    WaitUntil("waiting for READs and WRITEs",
              [&] { return buf.in_flight == 0; });
  }
};

// Makes data that depends on the seed.
std::string MakeData(size_t size, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::vector<uint64_t> words((size + 7) / sizeof(uint64_t));
  for (uint64_t& word : words) word = generator();
  return BytesOf(words.data(), size);
}

// Borrows pieces of random sizes, fills them, reads them back, compares, and
// gives them back in another order.
void UsePieces(MemoryClient& client, size_t num_pieces) {
  Pool& pool = client.pool;
  std::mt19937_64 random{std::random_device{}()};
  std::vector<AppMemoryRegion> pieces;
  size_t total = 0;
  for (size_t i = 0; i < num_pieces; ++i) {
    pieces.push_back(client.RemoteMalloc(1 + random() % kMaxPieceSize));
    total += pieces.back().size;
  }
  printf("Borrowed %zu pieces, %.3f MB.\n", num_pieces, 1e-6 * double(total));

  uint64_t seed = random();
  for (size_t i = 0; i < num_pieces; ++i) {
    size_t size = pieces[i].size;
    size_t offset = client.LocalMalloc(size);
    pool.buf.Copy(&pool.buf.data[offset], MakeData(size, seed + i).data(),
                  size);
    client.Post(RdmaOpType::kWrite, pieces[i], pool.buf, offset,
                [&pool, offset] { pool.allocator.Free(offset); });
  }
  client.WaitForAll(pool.buf);
  printf("Filled them by WRITE.\n");

  // All WRITEs have completed, so a READ finds what they have written.
  const std::string zeros(kMaxPieceSize, 0);
  bool correct = true;
  for (size_t i = 0; i < num_pieces; ++i) {
    size_t size = pieces[i].size;
    size_t offset = client.LocalMalloc(size);
    pool.buf.Copy(&pool.buf.data[offset], zeros.data(), size);
    client.Post(RdmaOpType::kRead, pieces[i], pool.buf, offset,
                [&pool, &correct, offset, size, seed = seed + i] {
                  if (pool.buf.gpu) CudaFlushWrites();
                  std::string data(size, 0);
                  pool.buf.Copy(data.data(), &pool.buf.data[offset], size);
                  if (data != MakeData(size, seed)) correct = false;
                  pool.allocator.Free(offset);
                });
  }
  client.WaitForAll(pool.buf);
  // Not before: closing the endpoint under READs in flight may crash.
  if (!correct) throw std::runtime_error("the data is not correct");
  printf("READ and compared them.\n");

  std::shuffle(pieces.begin(), pieces.end(), random);
  for (const AppMemoryRegion& piece : pieces) client.RemoteFree(piece);
  printf("Gave them back.\n");
}

// Prints the median time that something takes.
void PrintMedian(const char* what, const std::function<void()>& something) {
  std::vector<double> us;
  for (size_t i = 0; i < kSamples; ++i) {
    Clock::time_point start = Clock::now();
    something();
    us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start)
                     .count());
  }
  std::sort(us.begin(), us.end());
  printf("%s: median %.2f us\n", what, us[kSamples / 2]);
}

// Compares what the chapter compares.
void Measure(MemoryClient& client) {
  constexpr size_t kSize = 65536;
  AppMemoryRegion small = client.RemoteMalloc(64);
  AppMemoryRegion large = client.RemoteMalloc(kSize);
  Pool& pool = client.pool;
  size_t offset = client.LocalMalloc(kSize);
  auto transfer = [&](RdmaOpType type, const AppMemoryRegion& piece,
                      Buffer& buf, size_t at) {
    client.Post(type, piece, buf, at, [] {});
    client.WaitForAll(buf);
  };
  PrintMedian("READ of 64 bytes",
              [&] { transfer(RdmaOpType::kRead, small, pool.buf, offset); });
  PrintMedian("WRITE of 65536 bytes",
              [&] { transfer(RdmaOpType::kWrite, large, pool.buf, offset); });
  PrintMedian("WRITE of 65536 bytes from a buffer made for it", [&] {
    client.other.emplace(client.session.domain, kSize, FI_WRITE, pool.buf.gpu);
    transfer(RdmaOpType::kWrite, large, *client.other, 0);
  });
  PrintMedian("WRITE of 65536 bytes to a piece borrowed for it", [&] {
    AppMemoryRegion piece = client.RemoteMalloc(kSize);
    transfer(RdmaOpType::kWrite, piece, pool.buf, offset);
    client.RemoteFree(piece);
  });
  client.RemoteFree(small);
  client.RemoteFree(large);
}

// Runs the client. Throws unless it gets what it asks for.
void ClientMain(const Address& server_addr, bool gpu, size_t num_pieces) {
  Domain domain(gpu);
  MemoryClient client(domain);
  client.session.Connect(server_addr);
  UsePieces(client, num_pieces);
  Measure(client);
  client.session.SayBye();
  printf("Data is correct.\n");
}

// ---- Command line ----

constexpr const char* kUsage =
    "Usage:\n"
    "  8_malloc [--gpu]\n"
    "      Run the server.\n"
    "  8_malloc [--gpu] ADDRESS [PIECES]\n"
    "      Borrow pieces of its memory, use them and give them back (64).\n"
    "ADDRESS is what the server prints. FI_PROVIDER chooses the provider.\n"
    "With --gpu, this side's pool is in the memory of the first GPU.\n";

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
    bool gpu = !args.empty() && args[0] == "--gpu";
    if (gpu) args.erase(args.begin());
    if (gpu) CudaAlloc(1);  // throws if there is none
    if (args.empty()) {
      ServerMain(argv[0], gpu);
      return 0;
    }
    if (args[0] == "--help") {
      printf("%s", kUsage);
      return 0;
    }
    if (args.size() > 2) {
      throw std::invalid_argument("wrong number of arguments");
    }
    size_t num_pieces = args.size() > 1 ? ParseNumber(args[1], kMaxPieces) : 64;
    ClientMain(ParseAddress(args[0]), gpu, num_pieces);
    return 0;
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

// Throws if a function of CUDA has failed.
void CudaCheck(cudaError_t ret, const char* what) {
  if (ret == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(ret));
}

// Allocates zeroed memory, on the first GPU that CUDA_VISIBLE_DEVICES allows.
Memory CudaAlloc(size_t size) {
  void* data = nullptr;
  CudaCheck(cudaMalloc(&data, size), "cudaMalloc");
  Memory memory(static_cast<char*>(data), [](void* p) { cudaFree(p); });
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
void CudaFlushWrites() {
  int ordering = 0;
  CudaCheck(cudaDeviceGetAttribute(&ordering,
                                   cudaDevAttrGPUDirectRDMAWritesOrdering, 0),
            "cudaDeviceGetAttribute");
  // Some GPUs keep the order by themselves, and may have no flush.
  if (ordering >= cudaGPUDirectRDMAWritesOrderingOwner) return;
  CudaCheck(cudaDeviceFlushGPUDirectRDMAWrites(
                cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
                cudaFlushGPUDirectRDMAWritesToOwner),
            "cudaDeviceFlushGPUDirectRDMAWrites");
}

#else

Memory CudaAlloc(size_t) { throw std::runtime_error("built without CUDA"); }
void CudaCopy(void*, const void*, size_t) {}
void CudaFlushWrites() {}

#endif
