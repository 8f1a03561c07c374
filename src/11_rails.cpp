// 11_rails: one transfer over several adapters.
//
// A rail is an endpoint in a domain of its own. Each takes the next page when
// it has room, so a faster one takes more. If one fails, others take its pages.
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
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <sstream>
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

constexpr size_t kMaxPageSize = 1 << 20;   // bytes
constexpr size_t kMaxPages = 16000;        // their indices fit into a message
constexpr size_t kMaxTransfer = 64 << 20;  // bytes, all pages of a client

constexpr size_t kHugePageSize = 2 << 20;     // bytes
constexpr size_t kMaxRepeat = 1'000'000'000;  // times that pages are written
constexpr size_t kCompletionQueueReadCount = 16;  // entries read at a time
constexpr size_t kPollsPerYield = 64;             // empty polls
constexpr auto kReportPeriod = 1s;                // between two reports

// WRITEs in flight to a client: enough to fill the time until one completes,
// but so little that a message does not wait behind them for long.
constexpr size_t kMaxOutstandingWrites = 4096;
constexpr size_t kMaxOutstandingBytes = 16 << 20;

// The same for each of several rails: at the end of a transfer, all others have
// to wait for what the slowest one has taken.
constexpr size_t kMaxOutstandingRailBytes = 512 << 10;

constexpr size_t kIdSize = 8;    // bytes of a client's own number
constexpr auto kRailLimit = 4s;  // without a completion, then a rail has failed
constexpr auto kAnswerGrace = 2s;  // for rails, after another one was accepted
constexpr auto kByeGrace = 1s;     // for BYE to leave on rails that may be dead

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
  hints->caps = FI_MSG | FI_RMA;     // we want to send messages, and to WRITE
  hints->ep_attr->type = FI_EP_RDM;  // reliably, to any number of peers,
  hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;  // and hear of their arrival
  // Where a queue is full, we want -FI_EAGAIN, and no overrun: fi_domain(3).
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->ep_attr->max_msg_size = kMaxPageSize;  // each as long as this
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
  bool gpu;  // our pages are in the memory of a GPU
  Info info;
  Owned<fid_fabric> fabric;
  Owned<fid_domain> handle;
  std::random_device random;

  // Opens the first interface of a list.
  Domain(Info list, bool with_gpu) : gpu(with_gpu), info(std::move(list)) {
    printf("domain: %s, fabric: %s, provider: %s\n", info->domain_attr->name,
           info->fabric_attr->name, info->fabric_attr->prov_name);
    // Over shm, FI_DELIVERY_COMPLETE has the other side copy, under a lock: if
    // it is killed, we wait for ever (libfabric 1.17). Without the flag we copy
    // a WRITE without a number ourselves before it completes (no GPU memory).
    bool shm = strcmp(info->fabric_attr->prov_name, "shm") == 0;
    if (shm && !gpu) info->tx_attr->op_flags = 0;
    // The last WRITE carries a number, as immediate data.
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

// Opens the interface that libfabric likes best, and all others of its kind.
std::list<Domain> OpenDomains(bool gpu) {
  Info list = GetInfo(gpu);
  std::list<Domain> domains;
  for (fi_info* info = list.get(); info != nullptr; info = info->next) {
    std::string name = info->domain_attr->name;
    // Nobody on another machine reaches the loopback interface.
    if (name == "lo") continue;
    // On each host, an address of this kind means another link.
    if (strncmp(info->fabric_attr->name, "fe80:", 5) == 0) continue;
    // Not what is open already, nor what is of another kind.
    auto excludes = [&](const Domain& open) {
      return name == open.info->domain_attr->name ||
             info->addr_format != open.info->addr_format ||
             strcmp(info->fabric_attr->prov_name,
                    open.info->fabric_attr->prov_name) != 0;
    };
    if (std::any_of(domains.begin(), domains.end(), excludes)) continue;
    domains.emplace_back(Info(fi_dupinfo(info), fi_freeinfo), gpu);
  }
  if (domains.empty()) domains.emplace_back(std::move(list), gpu);
  return domains;
}

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
  size_t size;                   // bytes
  bool gpu;                      // it is memory of the GPU
  std::shared_ptr<char[]> data;  // several adapters may use the same memory
  Owned<fid_mr> mr;
  size_t in_flight = 0;  // operations that have it: hands off, unless 0

  // Allocates the memory, unless it is to be registered with one more adapter.
  Buffer(Domain& domain, size_t bytes, uint64_t access, bool on_gpu = false,
         std::shared_ptr<char[]> memory = nullptr)
      : size(bytes), gpu(on_gpu), data(std::move(memory)) {
    if (data == nullptr) data = gpu ? CudaAlloc(bytes) : AllocHost(bytes);
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
  size_t eagain_count = 0;          // times there was no room (-FI_EAGAIN)

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
      if (ret == -FI_EAGAIN) {
        ++eagain_count;
        return;  // reading completions makes room
      }
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
  kConnect = 1,  // client: this is my number, and an address of mine
  kAccept = 2,   // server: this is the address of the endpoint that serves you
  kBye = 3,      // client: I want nothing more

  kRandomFill = 6,  // client: fill my memory
  kProgress = 7,    // server: I am still at it
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
// The server has a session for each rail of a client, because only closing an
// endpoint ends what is in flight over it. A server's listener is a session
// without a peer: it hears everybody, and says nothing.
struct Session {
  Domain& domain;
  std::optional<Buffer> memory;  // of the WRITEs, registered with this adapter
  std::deque<Buffer> recv_bufs;
  Buffer send_buf;
  std::deque<Message> inbox;   // that have arrived
  std::deque<Message> outbox;  // that wait for send_buf
  fi_addr_t peer = FI_ADDR_UNSPEC;
  Clock::time_point heard_at = Clock::now();  // the last sign of life
  bool asked = false;  // server: the request has come over it

  // Server: where the client's memory is for this rail, and our WRITEs to it.
  uint64_t remote_addr = 0;
  uint64_t remote_key = 0;
  std::set<size_t> writes;  // the numbers of those in flight
  size_t written = 0;       // how many have completed

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

  const char* Name() const { return domain.info->domain_attr->name; }

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

// All rails of a conversation.
struct Rails {
  std::list<Session> all;
  std::string prefix;      // begins each line about a rail
  std::set<size_t> again;  // numbers of WRITEs that failed rails have left
  Clock::time_point heard_at = Clock::now();  // the last sign of life
  Clock::time_point opened_at = heard_at;

  // Does something with each rail. One that fails is closed, which ends what it
  // has in flight, and leaves that to the others. Throws if there is no other.
  void ForEach(const std::function<void(Session&)>& use) {
    for (auto it = all.begin(); it != all.end();) {
      auto rail = it++;
      try {
        use(*rail);
      } catch (const std::exception& e) {
        if (all.size() == 1) throw;
        fprintf(stderr, "%srail %s is given up: %s\n", prefix.c_str(),
                rail->Name(), e.what());
        again.insert(rail->writes.begin(), rail->writes.end());
        all.erase(rail);
      }
    }
  }

  // Polls all rails. Returns the number of completions.
  size_t Poll() {
    size_t completions = 0;
    ForEach([&](Session& rail) {
      completions += rail.Poll();
      heard_at = std::max(heard_at, rail.heard_at);
    });
    return completions;
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

  // Client: asks for the other end of each rail, the first adapter here at the
  // first address, and so on. Names of networks prove nothing: only an answer
  // does. A rail that gets none soon after another one has is given up.
  void Connect(std::list<Domain>& domains,
               const std::vector<Address>& server_addrs) {
    // The server learns by it which rails are ours.
    uint64_t id = std::mt19937_64{std::random_device{}()}();
    for (Domain& domain : domains) {
      if (all.size() == server_addrs.size()) break;
      const Address& addr = server_addrs[all.size()];
      Session& rail = all.emplace_back(domain);
      rail.peer = rail.endpoint.AddPeerAddress(addr);
    }
    ForEach([&](Session& rail) {
      rail.Send(AppMessageType::kConnect,
                BytesOf(&id, sizeof(id)) + rail.endpoint.addr);
    });
    const char* what =
        "waiting for ACCEPT (is the server running, with the same "
        "FI_PROVIDER?)";
    WaitUntil(what, [&] {
      size_t silent =
          std::count_if(all.begin(), all.end(),
                        [](const Session& rail) { return rail.inbox.empty(); });
      return silent == 0 ||
             (silent < all.size() && Clock::now() - heard_at > kAnswerGrace);
    });
    ForEach([](Session& rail) {
      if (rail.inbox.empty()) throw std::runtime_error("no answer");
      rail.peer = rail.endpoint.AddPeerAddress(
          BodyOf(*rail.Take(), AppMessageType::kAccept));
    });
  }

  // Client: tells the server that we want nothing more, over each rail, because
  // we cannot know which ones still work. Closes each as soon as that has left.
  void SayBye() {
    Clock::time_point start = Clock::now();
    for (bool first = true; !all.empty(); first = false) {
      for (auto it = all.begin(); it != all.end();) {
        auto rail = it++;
        try {
          if (first) rail->Send(AppMessageType::kBye);
          rail->Poll();
          bool late = Clock::now() - start > kByeGrace;
          if (!rail->HasSent() && !late) continue;
        } catch (const std::runtime_error&) {
          // The server will notice our silence.
        }
        all.erase(rail);
      }
    }
  }
};

// ---- The application ----

// Prints how to reach the server: an address for each of its adapters.
void PrintClientCommand(const char* program, const std::string& addresses) {
  printf("Run the client with the following command:\n  ");
  const char* provider = getenv("FI_PROVIDER");
  if (provider != nullptr) printf("FI_PROVIDER='%s' ", provider);
  printf("%s %s\n", program, addresses.c_str());
}

// RANDOM_FILL: make pages. The i-th, which depends on seed + i, goes to page
// page_idx[i] of this memory. It comes over each rail, with the address and the
// key that the memory has there.
struct AppRandomFillMessage {
  uint64_t addr;  // of the memory
  uint64_t size;  // bytes
  uint64_t rkey;  // with which the server may WRITE to it
  uint64_t seed;
  uint32_t page_size;  // bytes
  uint32_t imm_data;   // to come back as immediate data; not 0

  uint64_t total_repeat;  // how many times to write all of the pages
  // Followed by page_idx: an index for each page, a uint32_t.
};
static_assert(sizeof(AppRandomFillMessage) + kMaxPages * sizeof(uint32_t) <=
              kMaxBodySize);

// Makes a page that depends on the seed.
std::vector<uint64_t> MakePage(size_t page_size, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::vector<uint64_t> page((page_size + 7) / sizeof(uint64_t));
  for (uint64_t& word : page) word = generator();
  return page;
}

// A client, and what it asks of the server: to fill its memory with pages.
struct ServedClient {
  size_t number;                 // of the client; begins each line about it
  std::string id;                // its own number, which each CONNECT has
  std::optional<Buffer> source;  // the pages, once the client has asked
  Rails rails;
  AppRandomFillMessage request = {};
  std::vector<uint32_t> page_idx;
  size_t posted_write_ops = 0;
  size_t finished_write_ops = 0;
  size_t total_write_ops = 0;
  Clock::time_point write_start_at;
  Clock::time_point reported_at;
  bool done = false;  // has said BYE, or its session has failed

  // Opens the first rail. Throws if the machine lacks what that takes.
  ServedClient(Domain& domain, size_t client_number, const std::string& its_id,
               const Address& addr)
      : number(client_number), id(its_id) {
    rails.prefix = "[" + std::to_string(number) + "] ";
    AddRail(domain, addr);
  }

  // Opens our end of a rail, and tells the client which endpoint it is.
  void AddRail(Domain& domain, const Address& addr) {
    std::list<Session> opened;  // joins the client's if nothing here throws
    Session& rail = opened.emplace_back(domain);
    printf("[%zu] Received CONNECT message from client %s on %s\n", number,
           ToHex(addr).c_str(), rail.Name());
    rail.peer = rail.endpoint.AddPeerAddress(addr);
    rail.Send(AppMessageType::kAccept, rail.endpoint.addr);
    rails.all.splice(rails.all.end(), opened);
  }

  // Does what can be done for the client now. Returns the number of
  // completions. Throws if the client has sent something wrong, or nothing for
  // too long.
  size_t Poll() {
    size_t completions = rails.Poll();
    // What is wrong with a message is wrong with the client, not with a rail.
    for (Session& rail : rails.all) {
      while (std::optional<Message> message = rail.Take()) {
        done |= message->type == AppMessageType::kBye;
        if (done) break;
        // The request comes over each rail. The first one is to be done.
        if (!source) HandleRequest(*message, rail.domain);
        UseRail(*message, rail);
      }
    }
    rails.ForEach([&](Session& rail) {
      if (rail.asked && !done) ContinuePostWrite(rail);
    });
    if (done) {
      if (Busy()) PrintProgress();  // our last completions are late
      printf("[%zu] Done.\n", number);
      return completions;
    }
    if (source) Report();
    if (completions == 0) {
      CheckSilence(rails.heard_at, "waiting for the client");
    }
    return completions;
  }

  // Compares sizes and indices in the message with what was received and what
  // was offered, before it uses them. Then makes the pages.
  void HandleRequest(const Message& message, Domain& domain) {
    const std::string& body = BodyOf(message, AppMessageType::kRandomFill);
    if (body.size() < sizeof(request)) throw BadMessage("request");
    body.copy(reinterpret_cast<char*>(&request), sizeof(request));
    size_t page_size = request.page_size;
    page_idx.resize((body.size() - sizeof(request)) / sizeof(uint32_t));
    body.copy(reinterpret_cast<char*>(page_idx.data()),
              page_idx.size() * sizeof(uint32_t), sizeof(request));
    if (page_size == 0 || page_size > kMaxPageSize || page_idx.empty() ||
        page_idx.size() > kMaxTransfer / page_size || request.imm_data == 0 ||
        request.total_repeat == 0 || request.total_repeat > kMaxRepeat ||
        *std::max_element(page_idx.begin(), page_idx.end()) >=
            request.size / page_size) {
      throw BadMessage("request");
    }
    source.emplace(domain, page_idx.size() * page_size, FI_WRITE, domain.gpu);
    for (size_t i = 0; i < page_idx.size(); ++i) {
      auto page = MakePage(page_size, request.seed + i);
      source->Copy(&source->data[i * page_size], page.data(), page_size);
    }
    printf(
        "[%zu] Received RandomFill request: page_size=%zu num_pages=%zu "
        "total_repeat=%zu\n",
        number, page_size, page_idx.size(), size_t(request.total_repeat));
    total_write_ops = page_idx.size() * request.total_repeat;
    write_start_at = reported_at = Clock::now();
  }

  // Takes what only the request over this rail says: where the memory is for
  // its adapter.
  void UseRail(const Message& message, Session& rail) {
    const std::string& body = BodyOf(message, AppMessageType::kRandomFill);
    AppRandomFillMessage msg = {};
    if (rail.asked || body.size() < sizeof(msg)) throw BadMessage("request");
    body.copy(reinterpret_cast<char*>(&msg), sizeof(msg));
    rail.remote_addr = msg.addr;
    rail.remote_key = msg.rkey;
    rail.asked = true;
  }

  // Returns whether there are pages to write.
  bool Busy() const { return finished_write_ops < total_write_ops; }

  // Lets a rail take the next WRITEs, as far as libfabric has room: the queue
  // stays short, however long the transfer is.
  void ContinuePostWrite(Session& rail) {
    if (!rail.memory) {
      rail.memory.emplace(rail.domain, source->size, FI_WRITE, source->gpu,
                          source->data);
    }
    bool several = rails.all.size() > 1;
    size_t in_flight = rail.memory->in_flight;
    if (several && in_flight > 0 && Clock::now() - rail.heard_at > kRailLimit) {
      throw std::runtime_error("none of " + std::to_string(in_flight) +
                               " WRITEs has completed for " +
                               std::to_string(kRailLimit.count()) + " s");
    }
    size_t bytes = several ? kMaxOutstandingRailBytes : kMaxOutstandingBytes;
    size_t most =
        std::clamp(bytes / request.page_size, size_t{2}, kMaxOutstandingWrites);
    while (rail.memory->in_flight < most && rail.endpoint.HasRoom()) {
      std::optional<size_t> write = TakeWrite();
      if (!write) return;
      PostWrite(rail, *write);
    }
  }

  // Returns the number of the next WRITE, if it is time for it.
  std::optional<size_t> TakeWrite() {
    std::set<size_t>& again = rails.again;
    size_t write = again.empty() ? posted_write_ops : *again.begin();
    // Immediate data tells the client that all is there, but WRITEs may arrive
    // in any order, and on several rails even more so. So the last one waits
    // until all others have completed, whichever rail they are on.
    size_t last = total_write_ops - 1;
    if (write > last || (write == last && finished_write_ops < last)) {
      return std::nullopt;
    }
    if (again.erase(write) == 0) ++posted_write_ops;
    return write;
  }

  // Posts the WRITE with this number: of a page, in one of the rounds.
  void PostWrite(Session& rail, size_t write) {
    size_t page_size = request.page_size;
    size_t i = write % page_idx.size();
    bool last = write + 1 == total_write_ops;
    // It has been idle, and its silence begins now.
    if (rail.memory->in_flight == 0) rail.heard_at = Clock::now();
    rail.writes.insert(write);
    rail.endpoint.Post(
        {.type = RdmaOpType::kWrite,
         .peer = rail.peer,
         .buf = &*rail.memory,
         .len = page_size,
         .offset = i * page_size,
         .remote_addr = rail.remote_addr + page_idx[i] * page_size,
         .remote_key = rail.remote_key,
         .imm_data = last ? request.imm_data : 0,
         .callback = [this, write, &rail](const RdmaOp& op) {
           op.Check();
           rail.heard_at = Clock::now();
           rail.writes.erase(write);
           ++rail.written;
           ++finished_write_ops;
           if (!Busy()) PrintProgress();
         }});
  }

  // Reports progress now and then, also to the client, whose program takes no
  // part in a WRITE: a long transfer would be silence to it.
  void Report() {
    if (Clock::now() - reported_at < kReportPeriod || !Busy()) return;
    reported_at = Clock::now();
    PrintProgress();
    rails.ForEach([](Session& rail) {
      if (rail.HasSent()) rail.Send(AppMessageType::kProgress);
    });
  }

  // Prints how far the WRITEs have come, how fast, and how many of them each
  // rail has done.
  void PrintProgress() const {
    std::chrono::duration<double> seconds = Clock::now() - write_start_at;
    double mpps = double(finished_write_ops) / seconds.count() * 1e-6;
    size_t eagain_count = 0;
    std::string shares;
    for (const Session& rail : rails.all) {
      eagain_count += rail.endpoint.eagain_count;
      size_t percent =
          100 * rail.written / std::max(finished_write_ops, size_t{1});
      shares +=
          std::string(", ") + rail.Name() + "=" + std::to_string(percent) + "%";
    }
    printf(
        "[%zu] [%.3fs] WRITE: %zu%%, %zu/%zu, bw=%.3fGbps, %.3fMpps, "
        "EAGAIN=%zu%s\n",
        number, seconds.count(), 100 * finished_write_ops / total_write_ops,
        finished_write_ops, total_write_ops, 8e-3 * mpps * request.page_size,
        mpps, eagain_count, shares.c_str());
  }
};

// Runs the server, until a signal ends it.
void ServerMain(const char* program, bool gpu) {
  std::list<Domain> domains = OpenDomains(gpu);
  std::list<Session> listeners;  // one for each adapter
  std::string addresses;
  for (Domain& domain : domains) {
    if (gpu) Buffer(domain, 1, FI_WRITE, true);  // throws if that's impossible
    if (!addresses.empty()) addresses += ",";
    addresses += ToHex(listeners.emplace_back(domain).endpoint.addr);
  }
  std::list<ServedClient> clients;
  size_t num_clients = 0;  // so far
  size_t empty_polls = 0;
  PrintClientCommand(program, addresses);
  while (!g_interrupted) {
    size_t completions = 0;
    bool busy = false;
    for (Session& listener : listeners) {
      try {
        completions += listener.Poll();
        for (size_t i = listener.inbox.size(); i > 0; --i) {
          Message message = *listener.Take();
          const std::string& body = BodyOf(message, AppMessageType::kConnect);
          std::string id = body.substr(0, kIdSize);
          Address addr = body.substr(id.size());
          auto client = std::find_if(
              clients.begin(), clients.end(),
              [&](const ServedClient& served) { return served.id == id; });
          if (client != clients.end()) {
            client->AddRail(listener.domain, addr);
          } else if (clients.size() < kMaxClients) {
            clients.emplace_back(listener.domain, ++num_clients, id, addr);
          } else {
            // Waits in the inbox, until a client leaves.
            listener.inbox.push_back(message);
          }
        }
      } catch (const std::exception& e) {
        // A bad message must not end the server.
        fprintf(stderr, "error: %s\n", e.what());
      }
    }
    for (ServedClient& client : clients) {
      try {
        completions += client.Poll();
        busy |= client.Busy();
      } catch (const std::exception& e) {
        // It ends this client's session, and costs the others nothing.
        fprintf(stderr, "[%zu] error: %s\n", client.number, e.what());
        client.done = true;
      }
    }
    clients.remove_if([](const ServedClient& c) { return c.done; });
    if (completions > 0) continue;
    if (!busy) {
      std::this_thread::sleep_for(kIdlePause);
    } else if (++empty_polls % kPollsPerYield == 0) {
      std::this_thread::yield();
    }
  }
}

// Throws unless every page that we asked for is there, and nothing else.
void CheckMemory(const Buffer& memory, const AppRandomFillMessage& request,
                 const std::vector<uint32_t>& page_idx) {
  std::string expected(memory.size, 0);
  for (size_t i = 0; i < page_idx.size(); ++i) {
    auto page = MakePage(request.page_size, request.seed + i);
    memcpy(&expected[page_idx[i] * request.page_size], page.data(),
           request.page_size);
  }
  std::string received(memory.size, 0);
  memory.Copy(received.data(), memory.data.get(), memory.size);
  if (received != expected) {
    throw std::runtime_error("the data is not correct");
  }
  printf("Data is correct.\n");
}

// Runs the client. Throws unless it gets what it asks for.
void ClientMain(const std::vector<Address>& server_addrs, bool gpu,
                size_t page_size, size_t num_pages, size_t total_repeat) {
  std::list<Domain> domains = OpenDomains(gpu);
  // A few pages more than will be written, to see that they stay as they are.
  size_t room = num_pages + num_pages / 8 + 1;
  // FI_RECV, too: an adapter without WRITEs has us fetch the data ourselves.
  uint64_t access = FI_REMOTE_WRITE | FI_RECV;
  Buffer memory(domains.front(), room * page_size, access, gpu);
  AppRandomFillMessage request = {};
  bool filled = false;
  Rails rails;
  rails.Connect(domains, server_addrs);

  // Where the pages go is as random as what is in them.
  std::mt19937_64 random{std::random_device{}()};
  std::vector<uint32_t> page_idx(room);
  std::iota(page_idx.begin(), page_idx.end(), 0);
  std::shuffle(page_idx.begin(), page_idx.end(), random);
  page_idx.resize(num_pages);
  // The server names a place in our memory by its address or, if the provider
  // does without FI_MR_VIRT_ADDR, by its distance from the start.
  if (domains.front().info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) {
    request.addr = reinterpret_cast<uint64_t>(memory.data.get());
  }
  request.size = memory.size;
  request.seed = random();
  request.page_size = uint32_t(page_size);
  request.imm_data = uint32_t(random()) | 1;
  request.total_repeat = total_repeat;
  rails.ForEach([&](Session& rail) {
    rail.endpoint.on_imm_data = [&](uint32_t imm_data) {
      if (imm_data == request.imm_data) filled = true;
    };
    rail.memory.emplace(rail.domain, memory.size, access, gpu, memory.data);
    request.rkey = fi_mr_key(rail.memory->mr);
    rail.Send(AppMessageType::kRandomFill,
              BytesOf(&request, sizeof(request)) +
                  BytesOf(page_idx.data(), num_pages * sizeof(uint32_t)));
    printf("Sent RandomFill request on %s. page_size: %zu, num_pages: %zu\n",
           rail.Name(), page_size, num_pages);
  });
  rails.WaitUntil("waiting for the pages", [&] {
    rails.ForEach([](Session& rail) {
      while (std::optional<Message> message = rail.Take()) {
        BodyOf(*message, AppMessageType::kProgress);  // throws if it is another
      }
    });
    return filled;
  });
  printf("Received RDMA WRITE to local memory.\n");
  // What the server has posted on a rail that failed, and then on another one,
  // may still be on its way. Only closed rails keep it out of our memory.
  rails.SayBye();
  if (gpu) CudaFlushWrites();
  CheckMemory(memory, request, page_idx);
}

// ---- Command line ----

constexpr const char* kUsage =
    "Usage:\n"
    "  11_rails [--gpu]\n"
    "      Run the server.\n"
    "  11_rails [--gpu] ADDRESS [PAGE_SIZE NUM_PAGES [REPEAT]]\n"
    "      Have it write pages into our memory (65536 1000 500).\n"
    "ADDRESS is what the server prints. FI_PROVIDER chooses the provider.\n"
    "With --gpu, this side's pages are in the memory of the first GPU.\n";

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
    if (args.size() > 4 || args.size() == 2) {
      throw std::invalid_argument("wrong number of arguments");
    }
    size_t page_size = 65536;
    size_t num_pages = 1000;
    size_t total_repeat = 500;
    if (args.size() > 1) {
      page_size = ParseNumber(args[1], kMaxPageSize);
      num_pages =
          ParseNumber(args[2], std::min(kMaxPages, kMaxTransfer / page_size));
    }
    if (args.size() > 3) total_repeat = ParseNumber(args[3], kMaxRepeat);
    std::vector<Address> addresses;
    std::istringstream list(args[0] + ",");
    for (std::string hex; std::getline(list, hex, ',');) {
      addresses.push_back(ParseAddress(hex));
    }
    ClientMain(addresses, gpu, page_size, num_pages, total_repeat);
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
