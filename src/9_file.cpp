// 9_file: a file, as fast as the receiver can take it.
//
// The client WRITEs chunks of the file into slots of memory that the server
// lends it, each as soon as the server says that it is free: a credit.
//
// Based on 7_queue.

#include <fcntl.h>
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

// Has all of the checksums in the header, so there is no library to link.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <deque>
#include <filesystem>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// ---- Constants ----

constexpr size_t kMaxAddressSize = 256;    // bytes
constexpr size_t kMaxMessageSize = 65536;  // bytes
constexpr size_t kRecvCount = 24;          // for each slot, and some more
constexpr auto kSilenceLimit = 10s;        // then we give up
constexpr auto kIdlePause = 1ms;           // between two looks at quiet queues
constexpr auto kContactGrace = 500ms;      // that an interrupted client stays

constexpr size_t kMaxClients = 8;  // at a time; an endpoint may take 100 MB

constexpr size_t kChunkSize = 1 << 20;  // bytes of the file in a WRITE
constexpr size_t kDefaultSlots = 8;     // that a client asks for
constexpr size_t kMaxSlots = 16;        // that a client gets

constexpr size_t kHugePageSize = 2 << 20;         // bytes
constexpr size_t kCompletionQueueReadCount = 16;  // entries read at a time
constexpr size_t kPollsPerYield = 64;             // empty polls
constexpr auto kReportPeriod = 1s;                // between two reports

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
  hints->caps = FI_MSG | FI_RMA;     // we want to send messages, and to WRITE
  hints->ep_attr->type = FI_EP_RDM;  // reliably, to any number of peers,
  hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;  // and hear of their arrival
  // Where a queue is full, we want -FI_EAGAIN, and no overrun: fi_domain(3).
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->ep_attr->max_msg_size = kChunkSize;  // each as long as this
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
    attr.access = access;
    attr.requested_key = domain.RandomKey();  // not with FI_MR_PROV_KEY
    FiCheck(fi_mr_regattr(domain.handle, &attr, 0, &mr.ptr), "fi_mr_regattr");
  }
};

// ---- Operations and completions ----

// The kinds of operations.
enum class RdmaOpType { kRecv, kSend, kWrite };
constexpr const char* kOpNames[] = {"RECV", "SEND", "WRITE"};

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
    return fi_write(ep, data, op->len, desc, op->peer, op->remote_addr,
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

  kPut = 6,       // client: take this file
  kProgress = 7,  // either side: I am still at it
  kReady = 8,     // server: these slots are yours, and all of them are free
  kChunk = 9,     // client: a chunk is in this slot
  kCredit = 10,   // server: this slot is free again
  kSaved = 11,    // server: the file is safe on disk
  kFailed = 12,   // server: it cannot be saved; followed by the reason
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
  Clock::time_point opened_at = heard_at;
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
      // Over shm, the server may crash if we leave during our first contact.
      if (g_interrupted && Clock::now() - opened_at > kContactGrace) {
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
  printf("%s %s FILE\n", program, ToHex(addr).c_str());
}

// PUT: take a file.
struct AppPutMessage {
  uint64_t file_size;  // bytes
  uint64_t num_slots;  // that the client would like to have
  // Followed by the name of the file.
};

// READY: the slots that the client gets. Chunk i of the file goes to slot
// i % num_slots.
struct AppReadyMessage {
  uint64_t addr;  // of the slots, one after the other
  uint64_t rkey;  // with which the client may WRITE to them
  uint64_t num_slots;
};

// CHUNK: there is a chunk in a slot.
struct AppChunkMessage {
  uint64_t slot;
  uint64_t checksum;  // of the chunk
};

// Returns an error about a system call that has just failed.
std::system_error SystemError(const std::string& what) {
  return std::system_error(errno, std::generic_category(), what);
}

// An open file.
struct File {
  std::string path;
  int fd;

  // Opens it. A relative path begins in the directory `dir`.
  File(int dir, const std::string& file_path, int flags)
      : path(file_path), fd(openat(dir, path.c_str(), flags, 0666)) {
    if (fd < 0) throw SystemError("cannot open " + path);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { close(fd); }

  // Reads all of a piece.
  void Read(char* data, size_t size, uint64_t offset) const {
    ssize_t ret = pread(fd, data, size, off_t(offset));
    if (ret < 0) throw SystemError("cannot read " + path);
    if (size_t(ret) < size) throw std::runtime_error(path + " is too short");
  }

  // Writes all of a piece, however little the kernel takes at a time.
  void Write(const char* data, size_t size, uint64_t offset) const {
    for (size_t done = 0; done < size;) {
      ssize_t ret = pwrite(fd, data + done, size - done, off_t(offset + done));
      if (ret < 0) throw SystemError("cannot write " + path);
      done += size_t(ret);
    }
  }
};

// A file that is being received. It is called NAME.part until it is complete.
struct TargetFile {
  int dir;
  std::string name;
  File part;

  // Creates the file in a directory. Never touches a file that exists, nor what
  // a symbolic link points to.
  TargetFile(int directory, const std::string& file_name)
      : dir(directory),
        name(file_name),
        part(dir, name + ".part", O_WRONLY | O_CREAT | O_EXCL) {}

  // Whole or not, the file is no longer called NAME.part.
  ~TargetFile() { unlinkat(dir, part.path.c_str(), 0); }

  // Gives the complete file its name. Returns when file and name are on disk.
  void Finish() const {
    if (fsync(part.fd) != 0) throw SystemError("cannot sync " + part.path);
    // Adds a name, because rename(2) would replace an older file.
    if (linkat(dir, part.path.c_str(), dir, name.c_str(), 0) != 0) {
      throw SystemError("cannot rename " + part.path);
    }
    if (fsync(dir) != 0) throw SystemError("cannot sync the directory");
  }
};

// Work for the disk. Another thread does it, because it may take long.
// Destroying a Task waits for the end of that thread, so a Task is declared
// after everything that the thread uses.
using Task = std::future<void>;

// Returns whether a task has been started and has ended. Its get() then throws
// the exception that has ended it, if there was one.
bool Ended(const Task& task) {
  return task.valid() && task.wait_for(0s) == std::future_status::ready;
}

// Returns how many chunks a file has.
uint64_t CountChunks(uint64_t file_size) {
  return file_size / kChunkSize + (file_size % kChunkSize > 0);
}

// Returns how many bytes of a file are in a chunk: all but the last are full.
size_t ChunkLength(uint64_t chunk, uint64_t file_size) {
  return std::min(kChunkSize, file_size - chunk * kChunkSize);
}

// A client, and the file that it wants to put here.
struct ServedClient {
  // A piece of our memory, lent to the client for one WRITE. It is ours while a
  // chunk is being saved from it, then lent again.
  struct Slot {
    uint64_t chunk = 0;  // in the slot, or the next to arrive
    Task save;
  };

  size_t number;  // of the client; begins each line about it
  int dir;        // for the file

  std::optional<TargetFile> file;  // from PUT until it is saved
  std::optional<Buffer> buf;       // all slots, one after the other
  Session session;
  uint64_t file_size = 0;  // bytes
  uint64_t num_chunks = 0;
  uint64_t saved_chunks = 0;
  std::vector<Slot> slots;
  Task finish;
  Clock::time_point start_at;
  Clock::time_point reported_at;
  bool failed = false;  // has been told why, and is to say BYE
  bool done = false;    // has said BYE, or its session has failed

  // Opens the session. Throws if the machine lacks what that takes.
  ServedClient(Domain& domain, size_t client_number, const Address& addr,
               int directory)
      : number(client_number), dir(directory), session(domain) {
    session.peer = session.endpoint.AddPeerAddress(addr);
    session.Send(AppMessageType::kAccept, session.endpoint.addr);
  }

  // Does what can be done for the client now. Returns the number of
  // completions. Throws if the client has sent nothing for too long.
  size_t Poll() {
    size_t completions = session.Poll();
    try {
      while (std::optional<Message> message = session.Take()) {
        if (message->type == AppMessageType::kBye) {
          if (Busy()) PrintProgress();
          printf("[%zu] Done.\n", number);
          done = true;
          return completions;
        }
        if (!failed) HandleMessage(*message);
      }
      if (Busy()) {
        ContinueSave();
        ContinueFinish();
        Report();
      }
    } catch (const std::exception& e) {
      fprintf(stderr, "[%zu] error: %s\n", number, e.what());
      failed = true;
      // The client may still WRITE, so it keeps its slots until it says BYE.
      session.Send(AppMessageType::kFailed, e.what());
    }
    if (completions == 0) {
      CheckSilence(session.heard_at, "waiting for the client");
    }
    return completions;
  }

  // Returns whether a file is being received.
  bool Busy() const { return file && !failed && !done; }

  // Returns whether other threads use what we own.
  bool DiskBusy() const {
    auto running = [](const Task& t) { return t.valid() && !Ended(t); };
    return running(finish) ||
           std::any_of(slots.begin(), slots.end(),
                       [&](const Slot& slot) { return running(slot.save); });
  }

  // Does what a message asks for.
  void HandleMessage(const Message& message) {
    if (message.type == AppMessageType::kProgress) return;
    if (!buf) {
      HandlePut(BodyOf(message, AppMessageType::kPut));
    } else {
      HandleChunk(BodyOf(message, AppMessageType::kChunk));
    }
  }

  // Compares each value in the message with what was offered, before it uses
  // the value. Then creates the file, and lends the client its slots.
  void HandlePut(const std::string& body) {
    AppPutMessage put = {};
    if (body.size() < sizeof(put)) throw BadMessage("PUT");
    body.copy(reinterpret_cast<char*>(&put), sizeof(put));
    // The name must not lead out of the directory.
    std::string name = body.substr(sizeof(put));
    if (put.num_slots == 0 || put.num_slots > kMaxSlots || name.empty() ||
        name.find_first_of(std::string("/\0", 2)) != std::string::npos) {
      throw BadMessage("PUT");
    }
    if (faccessat(dir, name.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0) {
      throw std::runtime_error(name + " exists already");
    }
    file.emplace(dir, name);
    file_size = put.file_size;
    num_chunks = CountChunks(file_size);
    // A small file does not need all that the client would like to have.
    size_t num_slots = std::clamp<uint64_t>(num_chunks, 1, put.num_slots);
    slots.resize(num_slots);
    for (size_t i = 0; i < num_slots; ++i) slots[i].chunk = i;
    // FI_RECV, too: an adapter without WRITEs has us fetch the data ourselves.
    buf.emplace(session.domain, num_slots * kChunkSize,
                FI_REMOTE_WRITE | FI_RECV);
    AppReadyMessage ready = {};
    // The client names a place in our memory by its address or, if the provider
    // does without FI_MR_VIRT_ADDR, by its distance from the start.
    if (session.domain.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) {
      ready.addr = reinterpret_cast<uint64_t>(buf->data.get());
    }
    ready.rkey = fi_mr_key(buf->mr);
    ready.num_slots = num_slots;
    session.Send(AppMessageType::kReady, BytesOf(&ready, sizeof(ready)));
    printf("[%zu] Receiving %s: %zu bytes into %zu slots\n", number,
           name.c_str(), size_t(file_size), num_slots);
    start_at = reported_at = Clock::now();
  }

  // Begins to save the chunk that has arrived in a slot.
  void HandleChunk(const std::string& body) {
    AppChunkMessage message = {};
    body.copy(reinterpret_cast<char*>(&message), sizeof(message));
    if (body.size() != sizeof(message) || message.slot >= slots.size()) {
      throw BadMessage("CHUNK");
    }
    Slot& slot = slots[message.slot];
    if (slot.chunk >= num_chunks || slot.save.valid()) {
      throw BadMessage("CHUNK");
    }
    slot.save = std::async(std::launch::async, [this, message, &slot] {
      // A disk that is slow on purpose shows what credits do.
      if (const char* ms = getenv("SLOW_DISK_MS")) {
        std::this_thread::sleep_for(std::chrono::milliseconds(atoi(ms)));
      }
      const char* data = &buf->data[message.slot * kChunkSize];
      size_t size = ChunkLength(slot.chunk, file_size);
      file->part.Write(data, size, slot.chunk * kChunkSize);
      // Afterwards, so that it reveals a WRITE that came while we wrote.
      if (XXH3_64bits_withSeed(data, size, slot.chunk) != message.checksum) {
        throw std::runtime_error("a checksum is not correct");
      }
    });
  }

  // Lends the slots whose chunks have been saved, each for its next chunk.
  void ContinueSave() {
    for (uint64_t i = 0; i < slots.size(); ++i) {
      Slot& slot = slots[i];
      if (!Ended(slot.save)) continue;
      slot.save.get();
      ++saved_chunks;
      slot.chunk += slots.size();
      session.Send(AppMessageType::kCredit, BytesOf(&i, sizeof(i)));
    }
  }

  // Gives the file its name when all chunks are saved, and tells the client.
  void ContinueFinish() {
    if (saved_chunks == num_chunks && !finish.valid()) {
      finish = std::async(std::launch::async, [this] { file->Finish(); });
    }
    if (!Ended(finish)) return;
    finish.get();
    PrintProgress();
    printf("[%zu] Saved %s.\n", number, file->name.c_str());
    file.reset();
    session.Send(AppMessageType::kSaved);
  }

  // Reports progress now and then, also to the client: work on a slow disk
  // would be silence to it.
  void Report() {
    if (Clock::now() - reported_at < kReportPeriod || !Busy()) return;
    if (!session.HasSent()) return;
    reported_at = Clock::now();
    PrintProgress();
    session.Send(AppMessageType::kProgress);
  }

  // Prints how many chunks have been saved, and how fast.
  void PrintProgress() const {
    std::chrono::duration<double> seconds = Clock::now() - start_at;
    printf("[%zu] [%.3fs] Saved: %zu/%zu chunks, bw=%.3fGbps\n", number,
           seconds.count(), size_t(saved_chunks), size_t(num_chunks),
           8e-9 * double(std::min(saved_chunks * kChunkSize, file_size)) /
               seconds.count());
  }
};

// Runs the server, which saves files in a directory, until a signal ends it.
void ServerMain(const char* program, const std::string& directory) {
  File dir(AT_FDCWD, directory, O_RDONLY | O_DIRECTORY);
  // Otherwise a file that exceeds a size limit would end the server.
  signal(SIGXFSZ, SIG_IGN);
  Domain domain;
  Session listener(domain);
  std::list<ServedClient> clients;
  size_t num_clients = 0;  // so far
  size_t empty_polls = 0;
  PrintClientCommand(program, listener.endpoint.addr);
  while (!g_interrupted) {
    size_t completions = 0;
    bool busy = false;
    try {
      completions = listener.Poll();
      // The others wait in the inbox, until a client leaves.
      while (clients.size() < kMaxClients && !listener.inbox.empty()) {
        Address addr = BodyOf(*listener.Take(), AppMessageType::kConnect);
        printf("[%zu] Received CONNECT message from client %s\n", ++num_clients,
               ToHex(addr).c_str());
        clients.emplace_back(domain, num_clients, addr, dir.fd);
      }
    } catch (const std::exception& e) {
      // A bad message must not end the server.
      fprintf(stderr, "error: %s\n", e.what());
    }
    for (ServedClient& client : clients) {
      try {
        if (!client.done) completions += client.Poll();
        busy |= client.Busy();
      } catch (const std::exception& e) {
        // It ends this client's session, and costs the others nothing.
        if (!client.failed) {
          fprintf(stderr, "[%zu] error: %s\n", client.number, e.what());
        }
        client.done = true;
      }
    }
    // To wait for its threads would hold up the others.
    clients.remove_if(
        [](const ServedClient& c) { return c.done && !c.DiskBusy(); });
    if (completions > 0) continue;
    if (!busy) {
      std::this_thread::sleep_for(kIdlePause);
    } else if (++empty_polls % kPollsPerYield == 0) {
      std::this_thread::yield();
    }
  }
}

// What the client does: it sends a file.
struct PutClient {
  // A place in our memory for a chunk on its way from the file into the slot of
  // the server that has the same number.
  struct Slot {
    uint64_t chunk = 0;  // in the slot, or being read
    uint64_t checksum = 0;
    Task read;           // once it has ended, the slot is full
    bool credit = true;  // the server's slot is free
  };

  uint64_t file_size;  // bytes
  File file;
  size_t num_chunks;
  size_t read_chunks = 0;
  std::optional<Buffer> buf;  // all slots, one after the other
  Session session;
  AppReadyMessage ready = {};
  std::vector<Slot> slots;
  Clock::time_point reported_at = Clock::now();
  bool saved = false;

  PutClient(Domain& domain, const std::string& path)
      : file_size(std::filesystem::file_size(path)),
        file(AT_FDCWD, path, O_RDONLY),
        num_chunks(CountChunks(file_size)),
        session(domain) {}

  // Sends the file. Throws unless the server has saved it.
  void Put(size_t num_slots) {
    std::string name = std::filesystem::path(file.path).filename();
    AppPutMessage put = {.file_size = file_size, .num_slots = num_slots};
    session.Send(AppMessageType::kPut, BytesOf(&put, sizeof(put)) + name);
    Clock::time_point start_at = Clock::now();
    std::string error;
    session.WaitUntil("sending the file", [&] {
      try {
        Continue();
      } catch (const std::exception& e) {
        error = e.what();
      }
      return saved || !error.empty();
    });
    std::chrono::duration<double> seconds = Clock::now() - start_at;
    session.SayBye();
    if (!error.empty()) throw std::runtime_error(error);
    printf("Sent %s: %.3f MB in %.3f s, %.3f Gbps\n", name.c_str(),
           1e-6 * double(file_size), seconds.count(),
           8e-9 * double(file_size) / seconds.count());
    printf("The server has saved the file.\n");
  }

  // Does what can be done now.
  void Continue() {
    while (std::optional<Message> message = session.Take()) {
      HandleMessage(*message);
    }
    for (size_t i = 0; i < slots.size(); ++i) ContinueSlot(i);
    // While we wait for a disk, that would be silence to the server.
    if (Clock::now() - reported_at < kReportPeriod) return;
    if (!session.HasSent()) return;
    reported_at = Clock::now();
    session.Send(AppMessageType::kProgress);
  }

  // Takes a message of the server.
  void HandleMessage(const Message& message) {
    if (message.type == AppMessageType::kProgress) return;
    if (message.type == AppMessageType::kFailed) {
      throw std::runtime_error("the server: " + message.body);
    }
    if (slots.empty()) {
      HandleReady(BodyOf(message, AppMessageType::kReady));
    } else if (message.type == AppMessageType::kCredit ||
               read_chunks < num_chunks) {
      HandleCredit(BodyOf(message, AppMessageType::kCredit));
    } else {
      BodyOf(message, AppMessageType::kSaved);
      saved = true;
    }
  }

  // Begins to fill the slots.
  void HandleReady(const std::string& body) {
    body.copy(reinterpret_cast<char*>(&ready), sizeof(ready));
    if (ready.num_slots == 0 || ready.num_slots > kMaxSlots) {
      throw BadMessage("READY");
    }
    buf.emplace(session.domain, ready.num_slots * kChunkSize, FI_WRITE);
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
    slot.read = std::async(std::launch::async, [this, i, &slot] {
      char* data = &buf->data[i * kChunkSize];
      size_t size = ChunkLength(slot.chunk, file_size);
      file.Read(data, size, slot.chunk * kChunkSize);
      // The seed makes it depend on the place in the file, too.
      slot.checksum = XXH3_64bits_withSeed(data, size, slot.chunk);
    });
  }

  // Posts the WRITE of a slot, if there are a credit and a chunk for it.
  void ContinueSlot(size_t i) {
    Slot& slot = slots[i];
    if (!slot.credit || !Ended(slot.read)) return;
    slot.read.get();
    ++read_chunks;
    slot.credit = false;
    session.endpoint.Post({.type = RdmaOpType::kWrite,
                           .peer = session.peer,
                           .buf = &*buf,
                           .len = ChunkLength(slot.chunk, file_size),
                           .offset = i * kChunkSize,
                           .remote_addr = ready.addr + i * kChunkSize,
                           .remote_key = ready.rkey,
                           .callback = [this, i](const RdmaOp& op) {
                             op.Check();
                             HandleWriteCompletion(i);
                           }});
  }

  // Tells the server that a chunk is in place. Begins to read the next one.
  void HandleWriteCompletion(size_t i) {
    AppChunkMessage chunk = {.slot = i, .checksum = slots[i].checksum};
    session.Send(AppMessageType::kChunk, BytesOf(&chunk, sizeof(chunk)));
    slots[i].chunk += slots.size();
    ReadChunk(i);
  }

  // Takes back a credit, which a WRITE has used up.
  void HandleCredit(const std::string& body) {
    uint64_t i = 0;
    body.copy(reinterpret_cast<char*>(&i), sizeof(i));
    if (i >= slots.size() || slots[i].credit) throw BadMessage("CREDIT");
    slots[i].credit = true;
  }
};

// Runs the client. Throws unless the server has saved the file.
void ClientMain(const Address& server_addr, const std::string& path,
                size_t num_slots) {
  Domain domain;
  PutClient client(domain, path);
  client.session.Connect(server_addr);
  client.Put(num_slots);
}

// ---- Command line ----

constexpr const char* kUsage =
    "Usage:\n"
    "  9_file [DIRECTORY]\n"
    "      Run the server. It saves files in DIRECTORY (.).\n"
    "  9_file ADDRESS FILE [SLOTS]\n"
    "      Send it a file, with up to SLOTS chunks on their way (8).\n"
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
      ServerMain(argv[0], ".");
      return 0;
    }
    if (args[0] == "--help") {
      printf("%s", kUsage);
      return 0;
    }
    if (args.size() == 1 && std::filesystem::is_directory(args[0])) {
      ServerMain(argv[0], args[0]);
      return 0;
    }
    if (args.size() == 1 || args.size() > 3) {
      throw std::invalid_argument("wrong number of arguments");
    }
    size_t num_slots =
        args.size() > 2 ? ParseNumber(args[2], kMaxSlots) : kDefaultSlots;
    ClientMain(ParseAddress(args[0]), args[1], num_slots);
    return 0;
  } catch (const std::invalid_argument& e) {
    fprintf(stderr, "error: %s\n%s", e.what(), kUsage);
    return 2;
  } catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
