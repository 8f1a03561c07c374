// 15_ring: a sum over the memories of many, without a server.
//
// Each of N ranks has an array of floats, and all get the sums: an all-reduce.
// A rank WRITEs to its right neighbour in a ring, and the left one to it.
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
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
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
constexpr auto kLeaveLimit = 2s;           // for the neighbours' last words

constexpr size_t kMaxRanks = 64;          // so that all sums are exact
constexpr size_t kMaxFloats = 1 << 30;    // that a rank has
constexpr size_t kBlockSize = 256 << 10;  // bytes in a WRITE, at most
constexpr size_t kSlots = 8;              // a block's places at its receiver

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
  hints->ep_attr->max_msg_size = kBlockSize;  // each as long as this
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
    // Over shm, FI_DELIVERY_COMPLETE has the other side copy, under a lock: if
    // it is killed, we wait for ever (libfabric 1.17). Without the flag we copy
    // a WRITE without a number ourselves before it completes.
    bool shm = strcmp(info->fabric_attr->prov_name, "shm") == 0;
    if (shm) info->tx_attr->op_flags = 0;
    // Each WRITE carries its number, as immediate data.
    if (info->domain_attr->cq_data_size < sizeof(uint32_t)) {
      throw std::runtime_error("no immediate data; try another FI_PROVIDER");
    }
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
  uint32_t imm_data = 0;     // of a WRITE; 0 means none; efa carries 4 bytes
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

  // Called with the immediate data of a WRITE from the other side, once that
  // WRITE has arrived. It belongs to no operation of ours.
  std::function<void(uint32_t)> on_imm_data;

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
    if (op->imm_data == 0) {
      return fi_write(ep, data, op->len, desc, op->peer, op->remote_addr,
                      op->remote_key, op);
    }
    return fi_writedata(ep, data, op->len, desc, op->imm_data, op->peer,
                        op->remote_addr, op->remote_key, op);
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
    for (ssize_t i = 0; i < ret; ++i) HandleCompletion(entries[i]);
    return size_t(ret);
  }

  // Ends our operation, or reports the number of a WRITE from the other side.
  void HandleCompletion(const fi_cq_data_entry& entry) {
    // Some versions of shm report such a WRITE without FI_REMOTE_WRITE.
    if ((entry.flags & (FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA)) &&
        !(entry.flags & (FI_RECV | FI_WRITE))) {
      if (on_imm_data) on_imm_data(uint32_t(entry.data));
      return;
    }
    Complete(entry.op_context, entry.len, "");
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
  kBye = 3,       // to both neighbours: I have all sums, and nothing in flight
  kProgress = 7,  // to both: I am still at it
  kReady = 8,    // to the left: these slots are yours, and all of them are free
  kCredit = 10,  // to the left: you may WRITE up to this number
  kFailed = 12,  // to both: a rank has failed; which one, and why
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
// A rank has a session with each neighbour, because only closing an endpoint
// ends what is in flight to a neighbour that has died.
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
};

// ---- The application ----

// READY: the slots into which the left neighbour WRITEs. Number n goes to slot
// n % kSlots, each time that this slot is free.
struct AppReadyMessage {
  uint64_t addr;        // of the slots, one after the other
  uint64_t rkey;        // with which the left neighbour may WRITE to them
  uint64_t num_ranks;   // the same for all ranks,
  uint64_t num_floats;  // and so is this
};

// Says which rank has failed, and why. It ends all others, too.
struct RankFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
  RankFailed(size_t rank, const std::string& why)
      : runtime_error("rank " + std::to_string(rank) + " has failed: " + why) {}
};

// Writes an address into a file, for another rank, which never sees half of it.
void WriteAddress(const std::string& path, const Address& addr) {
  // The address of an earlier run would lead nowhere.
  if (std::filesystem::exists(path)) {
    throw std::runtime_error(path + " exists: each run needs a new folder");
  }
  std::ofstream file(path + ".new");
  if (!(file << addr << std::flush)) {
    throw std::runtime_error("cannot write " + path + ".new");
  }
  std::filesystem::rename(path + ".new", path);
}

// Waits for such a file, for as long as its rank takes to start.
Address ReadAddress(const std::string& path) {
  while (!std::filesystem::exists(path)) {
    if (g_interrupted) throw std::runtime_error("interrupted");
    std::this_thread::sleep_for(kIdlePause);
  }
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A neighbour in the ring, and our session with it.
struct Neighbour {
  size_t rank;
  Session session;
  Clock::time_point told_at = Clock::now();  // our last sign of life
  bool said_bye = false;   // we have said our last word, BYE or FAILED,
  bool heard_bye = false;  // and so has the neighbour
  bool gone = false;       // nothing more is to come, in either direction
};

// One of N ranks. The array has N pieces, and each piece some blocks. There are
// 2 (N - 1) steps. In each of them, a rank sends a piece to the right: its own
// one first, then the one that has come from the left in the step before. What
// comes is added to what is there. After half of the steps each piece is
// complete somewhere, so from then on, what comes replaces what is there.
//
// A block is a WRITE. Those of a rank are numbered, from 0: what comes from the
// left in its WRITE n goes on to the right in our WRITE n + num_blocks.
struct Ring {
  size_t rank;
  size_t num_ranks;
  size_t num_floats;
  size_t num_blocks;  // in a piece
  size_t total;       // WRITEs of a rank, in all steps
  Buffer data;        // our array; WRITEs leave from here
  Buffer slots;       // the left neighbour's WRITEs arrive here
  Neighbour left;     // closed before the buffers
  Neighbour right;
  AppReadyMessage ready = {};  // of the right neighbour

  size_t posted = 0;          // our WRITEs
  size_t credit = 0;          // we may post those below this number,
  std::vector<bool> written;  // and these have completed
  std::vector<bool> arrived;  // WRITEs of the left neighbour, in their slots
  size_t taken = 0;           // of these, out of their slots
  size_t lent = kSlots;       // the left neighbour knows of this credit
  Clock::time_point start_at;
  Clock::time_point end_at;

  Ring(Domain& domain, size_t our_rank, size_t ranks, size_t floats)
      : rank(our_rank),
        num_ranks(ranks),
        num_floats(floats),
        num_blocks(1 + (floats * sizeof(float) - 1) / (ranks * kBlockSize)),
        total(2 * (ranks - 1) * num_blocks),
        data(domain, floats * sizeof(float), FI_WRITE),
        // FI_RECV, too: an adapter without WRITEs has us fetch the data
        // ourselves.
        slots(domain, kSlots * kBlockSize, FI_REMOTE_WRITE | FI_RECV),
        left{(rank + ranks - 1) % ranks, Session(domain)},
        right{(rank + 1) % ranks, Session(domain)},
        written(total),
        arrived(total) {
    for (size_t i = 0; i < num_floats; ++i) Floats()[i] = Value(rank, i);
    // Each number speaks for its own WRITE, and for no other.
    left.session.endpoint.on_imm_data = [this](uint32_t number) {
      if (number == 0 || number > total) throw BadMessage("number");
      arrived[number - 1] = true;
    };
  }

  // Our array.
  float* Floats() { return reinterpret_cast<float*>(data.data.get()); }

  // The i-th float of a rank: small integers, whose sums are exact.
  static float Value(size_t r, size_t i) { return float((r + 1) * (i % 4093)); }

  // Returns which block of the array a rank sends in its WRITE n.
  size_t BlockOf(size_t sender, size_t n) const {
    size_t piece = (sender + 2 * num_ranks - n / num_blocks) % num_ranks;
    return piece * num_blocks + n % num_blocks;
  }

  // Returns which float a block begins with. All blocks are about as long.
  size_t BlockBegin(size_t block) const {
    return block * num_floats / (num_ranks * num_blocks);
  }

  // Publishes our addresses, and learns those of the neighbours. Waits for all
  // other ranks, so that afterwards no neighbour has a reason for silence.
  void Join(const std::string& folder) {
    std::filesystem::create_directories(folder);
    auto path = [&](size_t r, const char* side) {
      return folder + "/" + std::to_string(r) + side;
    };
    WriteAddress(path(rank, ".left"), left.session.endpoint.addr);
    WriteAddress(path(rank, ".right"), right.session.endpoint.addr);
    printf("[%zu] Waiting for %zu ranks in %s\n", rank, num_ranks,
           folder.c_str());
    for (size_t r = 0; r < num_ranks; ++r) ReadAddress(path(r, ".right"));
    // What is to the left of us has us to its right.
    Greet(left, ReadAddress(path(left.rank, ".right")));
    Greet(right, ReadAddress(path(right.rank, ".left")));
    // The right neighbour names a place in our memory by its address or, if the
    // provider does without FI_MR_VIRT_ADDR, by its distance from the start.
    AppReadyMessage ours = {.addr = 0,
                            .rkey = fi_mr_key(slots.mr),
                            .num_ranks = num_ranks,
                            .num_floats = num_floats};
    if (left.session.domain.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) {
      ours.addr = reinterpret_cast<uint64_t>(slots.data.get());
    }
    left.session.Send(AppMessageType::kReady, BytesOf(&ours, sizeof(ours)));
  }

  // Begins to talk to a neighbour. Its silence counts from now on.
  void Greet(Neighbour& neighbour, const Address& addr) {
    Session& session = neighbour.session;
    session.peer = session.endpoint.AddPeerAddress(addr);
    session.heard_at = Clock::now();
  }

  // Sums up the arrays of all ranks. Returns when both neighbours have all that
  // they need of us.
  void AllReduce() {
    size_t empty_polls = 0;
    try {
      while (!left.gone || !right.gone) {
        if (g_interrupted) throw RankFailed(rank, "interrupted");
        if (!Done()) end_at = Clock::now();
        // No sleep: a poll that completes nothing may move data all the same.
        if (Continue() == 0 && ++empty_polls % kPollsPerYield == 0) {
          std::this_thread::yield();
        }
      }
    } catch (const RankFailed& e) {
      PassOn(e.what());
      throw;
    }
  }

  // Returns whether all sums are here, and nothing of ours is in flight.
  bool Done() const {
    return taken == total && posted == total && data.in_flight == 0;
  }

  // Does what can be done now. Returns the number of completions. Throws
  // RankFailed if a neighbour has failed, or says that a rank has.
  size_t Continue() {
    Neighbour* at = &left;
    try {
      size_t completions = Poll(left);
      ContinueTake();
      ContinueCredit();
      at = &right;
      completions += Poll(right);
      ContinueWrite();
      return completions;
    } catch (const RankFailed&) {
      throw;
    } catch (const std::exception& e) {
      // Once both have said BYE, the neighbour may leave.
      if (!at->said_bye || !at->heard_bye) throw RankFailed(at->rank, e.what());
      at->gone = true;
      return 1;
    }
  }

  // Polls a session, takes its messages, and shows the neighbour now and then
  // that we live: a rank that waits for a third one would be silent otherwise.
  size_t Poll(Neighbour& neighbour) {
    Session& session = neighbour.session;
    if (neighbour.gone) return 0;
    size_t completions = session.Poll();
    while (std::optional<Message> message = session.Take()) {
      HandleMessage(neighbour, *message);
    }
    if (Done() && !neighbour.said_bye) {
      neighbour.said_bye = true;
      session.Send(AppMessageType::kBye);
    }
    if (neighbour.said_bye && neighbour.heard_bye) {
      // It may have left before it could confirm our last message.
      neighbour.gone =
          session.HasSent() || Clock::now() - session.heard_at > kLeaveLimit;
    } else if (Clock::now() - neighbour.told_at >= kReportPeriod &&
               session.HasSent()) {
      neighbour.told_at = Clock::now();
      session.Send(AppMessageType::kProgress);
    }
    if (completions == 0) {
      CheckSilence(session.heard_at, "waiting for it");
    }
    return completions;
  }

  // Takes a message. READY, and then CREDITs, come from the right.
  void HandleMessage(Neighbour& neighbour, const Message& message) {
    if (message.type == AppMessageType::kProgress) return;
    if (message.type == AppMessageType::kFailed) {
      neighbour.heard_bye = true;
      throw RankFailed(message.body);
    }
    if (message.type == AppMessageType::kBye) {
      neighbour.heard_bye = true;
    } else if (credit == 0) {
      HandleReady(BodyOf(message, AppMessageType::kReady));
    } else {
      HandleCredit(BodyOf(message, AppMessageType::kCredit));
    }
  }

  // Learns where our WRITEs go.
  void HandleReady(const std::string& body) {
    body.copy(reinterpret_cast<char*>(&ready), sizeof(ready));
    if (body.size() != sizeof(ready) || ready.num_ranks != num_ranks ||
        ready.num_floats != num_floats) {
      throw BadMessage("READY (have all ranks the same N and FLOATS?)");
    }
    credit = kSlots;
    start_at = Clock::now();
  }

  // Learns how many slots have become free.
  void HandleCredit(const std::string& body) {
    uint64_t now = 0;
    body.copy(reinterpret_cast<char*>(&now), sizeof(now));
    if (body.size() != sizeof(now) || now < credit || now > posted + kSlots) {
      throw BadMessage("CREDIT");
    }
    credit = now;
  }

  // Posts the next WRITEs, as long as three questions have a good answer.
  void ContinueWrite() {
    while (posted < total && right.session.endpoint.HasRoom()) {
      // Is there something to send? A piece has to come before it can go on.
      if (posted >= taken + num_blocks) return;
      // May we overwrite the slot? Its owner has to say so,
      if (posted >= credit) return;
      // and our own former WRITE into it must have completed.
      if (posted >= kSlots && !written[posted - kSlots]) return;
      PostWrite(posted++);
    }
  }

  // Posts a WRITE, straight from the array.
  void PostWrite(size_t n) {
    size_t block = BlockOf(rank, n);
    size_t begin = BlockBegin(block) * sizeof(float);
    right.session.endpoint.Post(
        {.type = RdmaOpType::kWrite,
         .peer = right.session.peer,
         .buf = &data,
         .len = BlockBegin(block + 1) * sizeof(float) - begin,
         .offset = begin,
         .remote_addr = ready.addr + n % kSlots * kBlockSize,
         .remote_key = ready.rkey,
         .imm_data = uint32_t(n + 1),
         .callback = [this, n](const RdmaOp& op) {
           op.Check();
           written[n] = true;
         }});
  }

  // Takes the blocks that have arrived out of their slots, in order.
  void ContinueTake() {
    for (; taken < total && arrived[taken]; ++taken) {
      // May we change the block? In the second half, sums replace what we have
      // sent ourselves, half of all WRITEs ago.
      size_t half = total / 2;
      if (taken >= half && !written[taken - half]) return;
      size_t block = BlockOf(left.rank, taken);
      const char* slot = &slots.data[taken % kSlots * kBlockSize];
      auto* from = reinterpret_cast<const float*>(slot);
      float* to = Floats() + BlockBegin(block);
      size_t len = BlockBegin(block + 1) - BlockBegin(block);
      for (size_t i = 0; i < len; ++i) {
        to[i] = taken < half ? to[i] + from[i] : from[i];
      }
    }
  }

  // Lends the left neighbour the slots that are free again. A CREDIT speaks for
  // all of them, so a few RECVs are enough for any number of slots.
  void ContinueCredit() {
    uint64_t now = std::min(taken + kSlots, total);
    if (now <= lent || !left.session.HasSent()) return;
    lent = now;
    left.session.Send(AppMessageType::kCredit, BytesOf(&now, sizeof(now)));
  }

  // Passes on that a rank has failed. Then waits for the last words of our
  // neighbours, so that ours reaches them, but not for long: one may be dead.
  void PassOn(const std::string& what) {
    Clock::time_point until = Clock::now() + kLeaveLimit;
    left.said_bye = right.said_bye = false;  // there is one more word to say
    while (Clock::now() < until && (!left.gone || !right.gone)) {
      for (Neighbour* neighbour : {&left, &right}) {
        if (neighbour->gone) continue;
        Session& session = neighbour->session;
        try {
          if (!std::exchange(neighbour->said_bye, true)) {
            session.Send(AppMessageType::kFailed, what);
          }
          session.Poll();
          while (std::optional<Message> message = session.Take()) {
            neighbour->heard_bye |= message->type == AppMessageType::kFailed;
          }
          neighbour->gone = neighbour->heard_bye && session.HasSent();
        } catch (const std::exception&) {
          neighbour->gone = true;
        }
      }
    }
  }

  // Throws unless the array has the sums. Prints how long that has taken, and
  // the bandwidth of the bytes that each rank has to send at least.
  void CheckSums() {
    for (size_t i = 0; i < num_floats; ++i) {
      float sum = 0;
      for (size_t r = 0; r < num_ranks; ++r) sum += Value(r, i);
      if (Floats()[i] != sum) {
        throw std::runtime_error("the sums are not correct");
      }
    }
    std::chrono::duration<double> seconds = end_at - start_at;
    double least = 2 * double(num_ranks - 1) / double(num_ranks);
    printf("[%zu] %zu bytes in %.3f s, bus bandwidth %.3f Gbps. Correct.\n",
           rank, data.size, seconds.count(),
           8e-9 * least * double(data.size) / seconds.count());
  }
};

// ---- Command line ----

constexpr const char* kUsage =
    "Usage:\n"
    "  15_ring FOLDER RANK N [FLOATS]\n"
    "      Be one of N ranks, from 0 on, that sum up their arrays (16777216).\n"
    "FOLDER is a new one that all ranks see. Their addresses go there.\n"
    "FI_PROVIDER chooses the provider.\n";

// Reads a number from `min` to `max`. Throws std::invalid_argument.
size_t ParseNumber(const std::string& text, size_t min, size_t max) {
  size_t number = 0;
  const char* end = text.data() + text.size();
  auto result = std::from_chars(text.data(), end, number);
  if (result.ec != std::errc() || result.ptr != end || number < min ||
      number > max) {
    throw std::invalid_argument("not a number from " + std::to_string(min) +
                                " to " + std::to_string(max) + ": " + text);
  }
  return number;
}

int main(int argc, char** argv) {
  std::vector<std::string> args(argv + 1, argv + argc);
  setvbuf(stdout, nullptr, _IOLBF, 0);  // whole lines, also into a pipe
  CatchSignals();
  try {
    if (!args.empty() && args[0] == "--help") {
      printf("%s", kUsage);
      return 0;
    }
    if (args.size() != 3 && args.size() != 4) {
      throw std::invalid_argument("wrong number of arguments");
    }
    size_t num_ranks = ParseNumber(args[2], 2, kMaxRanks);
    size_t rank = ParseNumber(args[1], 0, num_ranks - 1);
    size_t num_floats = 16 << 20;
    if (args.size() > 3) {
      num_floats = ParseNumber(args[3], num_ranks, kMaxFloats);
    }
    Domain domain;
    Ring ring(domain, rank, num_ranks, num_floats);
    ring.Join(args[0]);
    ring.AllReduce();
    ring.CheckSums();
    return 0;
  } catch (const std::invalid_argument& e) {
    fprintf(stderr, "error: %s\n%s", e.what(), kUsage);
    return 2;
  } catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
