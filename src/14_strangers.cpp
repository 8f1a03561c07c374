// 14_strangers: a server that anyone may reach.
//
// It listens only to those who know the number of a session, says why it ends
// one, tells those who have to wait, and bounds what all of them may take.
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
#include <new>
#include <numeric>
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

constexpr auto kLeaveGrace = 1s;      // for a REFUSED to leave
constexpr size_t kMaxWaiting = 1000;  // clients in line
constexpr auto kAskPeriod = 1s;       // in line, then a client is to ask again
constexpr size_t kMaxContacts = 256;  // that are told from one endpoint
constexpr auto kTellPeriod = 5s;      // in which it tells them
constexpr auto kTellGrace = 1s;       // for what it has told to arrive

constexpr size_t kMaxPageSize = 1 << 20;    // bytes
constexpr size_t kMaxPages = 16000;         // their indices fit into a message
constexpr size_t kMaxTransfer = 512 << 20;  // bytes, all pages of all clients

constexpr size_t kHugePageSize = 2 << 20;     // bytes
constexpr size_t kMaxRepeat = 1'000'000'000;  // times that pages are written
constexpr size_t kCompletionQueueReadCount = 16;  // entries read at a time
constexpr size_t kPollsPerYield = 64;             // empty polls
constexpr auto kReportPeriod = 1s;                // between two reports

// WRITEs in flight to a client: enough to fill the time until one completes,
// but so little that a message does not wait behind them for long.
constexpr size_t kMaxOutstandingWrites = 4096;
constexpr size_t kMaxOutstandingBytes = 16 << 20;

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

// Replaces what could deceive on a terminal, all that is not plain ASCII, and
// cuts off what would fill it.
std::string Printable(std::string text) {
  text = text.substr(0, 200);
  for (char& c : text) c = c < ' ' || c > '~' ? '?' : c;
  return text;
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

  explicit Domain(bool with_gpu) : gpu(with_gpu), info(GetInfo(gpu)) {
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
  uint32_t addr_format;           // what kind of addresses the provider has
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

  explicit Endpoint(Domain& domain) : addr_format(domain.info->addr_format) {
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

  // Returns whether an address can be one of our provider's. We know one that
  // is: our own.
  bool IsLikeOurs(const Address& address) const {
    // One that is a name ends with a zero byte and begins as ours does.
    if (addr_format == FI_ADDR_STR) {
      return !address.empty() && address.back() == 0 &&
             address.front() == addr.front();
    }
    // Any other is as long as ours. An internet address begins with its family,
    // and after one of another family, libfabric may take no more of ours.
    bool internet =
        addr_format == FI_SOCKADDR_IN || addr_format == FI_SOCKADDR_IN6;
    size_t same = internet ? 2 : 0;  // bytes at the beginning
    return address.size() == addr.size() &&
           address.compare(0, same, addr, 0, same) == 0;
  }

  // Returns libfabric's number for a peer's address, which operations take
  // instead of it. Nothing is sent, so a peer that does not exist shows later,
  // as an error or as silence.
  fi_addr_t AddPeerAddress(Address address) {
    if (!IsLikeOurs(address)) {
      throw std::runtime_error(ToHex(address) +
                               " is not an address of our provider; do both "
                               "sides use the same FI_PROVIDER?");
    }
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
  kConnect = 1,  // client: this is my address
  kAccept = 2,   // server: this is the address of the endpoint that serves you
  kBye = 3,      // client: I want nothing more
  kWait = 4,     // server: I can't serve you yet; ask again
  kRefused = 5,  // server: I end this session; the body says why

  kRandomFill = 6,  // client: fill my memory
  kProgress = 7,    // server: I am still at it; client: I am still there
};

// The beginning of each message.
struct Header {
  AppMessageType type;
  // A number that the client has chosen for its conversation with the server.
  // Strangers may know the address of a session, but they don't know this.
  uint32_t nonce;
};

// A message. It travels as its header, in the byte order of our processors, and
// the rest.
struct Message {
  Header header;
  std::string body;  // any bytes
};
constexpr size_t kMaxBodySize = kMaxMessageSize - sizeof(Header);

// Returns what to throw for a message that cannot be right.
std::runtime_error BadMessage(const std::string& what) {
  return std::runtime_error("bad message: " + what);
}

// Returns a copy of something in memory, to be sent.
std::string BytesOf(const void* data, size_t size) {
  return {static_cast<const char*>(data), size};
}

// Returns the body of a message. Throws if it has another type, or says that we
// are refused.
std::string BodyOf(const Message& message, AppMessageType type) {
  AppMessageType is = message.header.type;
  if (is == AppMessageType::kRefused) {
    throw std::runtime_error("refused: " + Printable(message.body));
  }
  if (is != type) throw BadMessage("type " + std::to_string(uint32_t(is)));
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
  uint32_t nonce = 0;                         // of the conversation
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
    memcpy(data, &message.header, sizeof(message.header));
    message.body.copy(data + sizeof(message.header), message.body.size());
    endpoint.Post({.type = RdmaOpType::kSend,
                   .peer = peer,
                   .buf = &send_buf,
                   .len = sizeof(message.header) + message.body.size(),
                   .callback = [](const RdmaOp& op) { op.Check(); }});
    outbox.pop_front();
  }

  // Puts the message that has come with a RECV into the inbox. One that is too
  // short or too long is a stranger's, and so is one of another conversation:
  // none of them is a sign of life of our peer. A listener hears everybody.
  void Arrived(const RdmaOp& op) {
    if (!op.error.empty() || op.len < sizeof(Header)) return;
    Message message;
    const char* data = op.buf->data.get();
    memcpy(&message.header, data, sizeof(Header));
    if (peer != FI_ADDR_UNSPEC && message.header.nonce != nonce) return;
    message.body.assign(data + sizeof(Header), data + op.len);
    inbox.push_back(std::move(message));
    heard_at = Clock::now();
  }

  // Sends a message, as soon as those before it have left.
  void Send(AppMessageType type, const std::string& body = {}) {
    if (body.size() > kMaxBodySize) throw std::length_error("a long message");
    outbox.push_back({{type, nonce}, body});
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

  // Client: asks the server for an endpoint of its own, and waits for it. A
  // server that is full says WAIT, and forgets us. We ask again, which shows
  // that we are still there.
  void Connect(const Address& server_addr) {
    peer = endpoint.AddPeerAddress(server_addr);
    nonce = domain.random();
    const char* what =
        "waiting for ACCEPT (is the server running, with the same "
        "FI_PROVIDER?)";
    Message answer = {{AppMessageType::kWait, nonce}, ""};
    for (size_t asked = 0; answer.header.type == AppMessageType::kWait;) {
      if (++asked == 2) printf("The server can't serve us yet: waiting\n");
      Send(AppMessageType::kConnect, endpoint.addr);
      WaitUntil(what, [&] {
        std::this_thread::sleep_for(kIdlePause);  // the cores are for others
        return !inbox.empty();
      });
      answer = *Take();
    }
    peer = endpoint.AddPeerAddress(BodyOf(answer, AppMessageType::kAccept));
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

// The clients that wait to be served. Each is told after a second to ask again,
// and forgotten, so only those who are still there stay in line.
struct WaitingLine {
  struct Visitor {
    Address addr;
    uint32_t nonce;
    Clock::time_point tell_at = Clock::now() + kAskPeriod;
    fi_addr_t contact = FI_ADDR_UNSPEC;  // libfabric's number for addr
  };

  Session& listener;
  std::list<Visitor> visitors = {};
  // They are told from an endpoint that can be closed: nobody may be at their
  // addresses, and nothing else ends what is on its way there.
  std::optional<Endpoint> endpoint = {};
  size_t num_contacts = 0;            // in its address vector
  Clock::time_point tell_until = {};  // then it is closed soon

  // Takes all messages that have come. A stranger's junk is not worth a line on
  // our terminal, where it would hide the others.
  void AddAll() {
    while (std::optional<Message> message = listener.Take()) {
      if (message->header.type == AppMessageType::kConnect &&
          message->body.size() <= kMaxAddressSize &&
          visitors.size() < kMaxWaiting) {
        visitors.push_back({message->body, message->header.nonce});
      }
    }
  }

  // Returns the first one whose second in line is not over.
  std::list<Visitor>::iterator First() {
    Clock::time_point now = Clock::now();
    return std::find_if(visitors.begin(), visitors.end(),
                        [&](const Visitor& v) { return now < v.tell_at; });
  }

  // Tells the others, and forgets them.
  void TellAll() {
    Clock::time_point now = Clock::now();
    if (endpoint && now > tell_until + kTellGrace) {
      endpoint.reset();
      visitors.remove_if(
          [](const Visitor& v) { return v.contact != FI_ADDR_UNSPEC; });
    }
    bool due = std::any_of(visitors.begin(), visitors.end(),
                           [&](const Visitor& v) { return now >= v.tell_at; });
    if (!endpoint && due && now > tell_until) {
      num_contacts = 0;
      // Set first: if opening it fails, the next try waits for a period.
      tell_until = now + kTellPeriod;
      endpoint.emplace(listener.domain);
    }
    if (!endpoint) return;
    try {
      endpoint->PollCompletion();
    } catch (const std::runtime_error&) {
      // One that we have told is gone.
    }
    for (auto it = visitors.begin(); it != visitors.end();) {
      auto visitor = it++;
      if (now < visitor->tell_at) continue;
      bool late = now - visitor->tell_at > kSilenceLimit;
      if (late || Tell(*visitor)) visitors.erase(visitor);
    }
  }

  // Tells a client to ask again. libfabric copies so short a message (fi_inject
  // in fi_msg(3)) and reports no completion. Returns false if it has no room.
  bool Tell(Visitor& visitor) {
    if (Clock::now() > tell_until) return false;
    if (visitor.contact == FI_ADDR_UNSPEC) {
      if (num_contacts == kMaxContacts) return false;  // the next endpoint will
      try {
        visitor.contact = endpoint->AddPeerAddress(visitor.addr);
      } catch (const std::runtime_error&) {
        return true;  // this is no address
      }
      if (++num_contacts == kMaxContacts) {
        tell_until = Clock::now() + kTellGrace;
      }
    }
    Header wait = {AppMessageType::kWait, visitor.nonce};
    return fi_inject(endpoint->ep, &wait, sizeof(wait), visitor.contact) !=
           -FI_EAGAIN;
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

// RANDOM_FILL: make pages. The i-th, which depends on seed + i, goes to page
// page_idx[i] of this memory.
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
  size_t& memory_left;           // bytes, for the pages of all clients
  std::optional<Buffer> source;  // the pages, once the client has asked
  Session session;
  AppRandomFillMessage request = {};
  std::vector<uint32_t> page_idx;
  size_t made_pages = 0;
  size_t posted_write_ops = 0;
  size_t total_write_ops = 0;
  Clock::time_point write_start_at;
  Clock::time_point reported_at;
  bool done = false;           // has said BYE, or its session has failed
  Clock::time_point leave_at;  // until then, a REFUSED may leave

  // Opens the session. Throws if the machine lacks what that takes.
  ServedClient(Domain& domain, size_t client_number, const Address& addr,
               uint32_t nonce, size_t& memory)
      : number(client_number), memory_left(memory), session(domain) {
    session.peer = session.endpoint.AddPeerAddress(addr);
    session.nonce = nonce;
    session.Send(AppMessageType::kAccept, session.endpoint.addr);
  }

  ~ServedClient() {
    if (source) memory_left += source->size;
  }

  // Does what can be done for the client now. Returns the number of
  // completions. Throws if the client has sent something wrong, or nothing for
  // too long.
  size_t Poll() {
    size_t completions = session.Poll();
    if (done) return completions;  // only a REFUSED is leaving
    try {
      while (std::optional<Message> message = session.Take()) {
        if (message->header.type == AppMessageType::kBye) {
          // Our last completions are late.
          if (posted_write_ops > 0 && Busy()) PrintProgress();
          printf("[%zu] Done.\n", number);
          done = true;
          return completions;
        }
        // Says that the client is still there, while it waits for memory.
        if (message->header.type == AppMessageType::kProgress) continue;
        HandleRequest(*message);
      }
      if (made_pages < page_idx.size()) MakeNextPage();
    } catch (const std::exception& e) {
      // It might be a mistake, and no attack, so the client is told.
      session.Send(AppMessageType::kRefused, e.what());
      leave_at = Clock::now() + kLeaveGrace;
      throw;
    }
    if (!page_idx.empty()) {
      if (made_pages == page_idx.size()) ContinuePostWrite();
      Report();
    }
    if (completions == 0) {
      CheckSilence(session.heard_at, "waiting for the client");
    }
    return completions;
  }

  // Returns whether the session can be closed, which ends what is in flight.
  bool HasLeft() const {
    return done && (session.HasSent() || Clock::now() > leave_at);
  }

  // Compares sizes and indices in the message with what was received and what
  // was offered, before it uses them.
  void HandleRequest(const Message& message) {
    const std::string& body = BodyOf(message, AppMessageType::kRandomFill);
    if (!page_idx.empty()) throw BadMessage("a second request");
    if (body.size() < sizeof(request)) throw BadMessage("a short request");
    body.copy(reinterpret_cast<char*>(&request), sizeof(request));
    size_t page_size = request.page_size;
    page_idx.resize((body.size() - sizeof(request)) / sizeof(uint32_t));
    body.copy(reinterpret_cast<char*>(page_idx.data()),
              page_idx.size() * sizeof(uint32_t), sizeof(request));
    if (page_size == 0 || page_size > kMaxPageSize) {
      throw BadMessage("pages of " + std::to_string(page_size) + " bytes");
    }
    if (page_idx.empty() || page_idx.size() > kMaxTransfer / page_size) {
      throw BadMessage(std::to_string(page_idx.size()) + " pages");
    }
    uint32_t largest = *std::max_element(page_idx.begin(), page_idx.end());
    if (largest >= request.size / page_size) {
      throw BadMessage("page " + std::to_string(largest) + " in " +
                       std::to_string(request.size) + " bytes");
    }
    if (request.total_repeat == 0 || request.total_repeat > kMaxRepeat) {
      throw BadMessage(std::to_string(request.total_repeat) + " times");
    }
    if (request.imm_data == 0) throw BadMessage("no number");
    printf(
        "[%zu] Received RandomFill request: page_size=%zu num_pages=%zu "
        "total_repeat=%zu\n",
        number, page_size, page_idx.size(), size_t(request.total_repeat));
    total_write_ops = page_idx.size() * request.total_repeat;
    reported_at = Clock::now();
  }

  // Makes the next page, once the other clients leave memory for all of them.
  // One a round, so that the others do not have to wait.
  void MakeNextPage() {
    size_t page_size = request.page_size;
    size_t size = page_idx.size() * page_size;
    if (!source) {
      if (size > memory_left) return;
      source.emplace(session.domain, size, FI_WRITE, session.domain.gpu);
      memory_left -= size;
    }
    auto page = MakePage(page_size, request.seed + made_pages);
    source->Copy(&source->data[made_pages * page_size], page.data(), page_size);
    session.heard_at = Clock::now();  // our work is not the client's silence
    if (++made_pages == page_idx.size()) write_start_at = Clock::now();
  }

  // Returns how many WRITEs have completed.
  size_t FinishedWriteOps() const {
    return source ? posted_write_ops - source->in_flight : 0;
  }

  // Returns whether there are pages to write.
  bool Busy() const { return FinishedWriteOps() < total_write_ops; }

  // Posts the next WRITEs, as far as libfabric has room: the queue stays short,
  // however long the transfer is.
  void ContinuePostWrite() {
    size_t most = std::clamp(kMaxOutstandingBytes / request.page_size,
                             size_t{1}, kMaxOutstandingWrites);
    while (posted_write_ops < total_write_ops && session.endpoint.HasRoom()) {
      // Immediate data tells the client that all is there, but WRITEs may
      // arrive in any order. So the last one waits until all others have
      // completed.
      bool last = posted_write_ops + 1 == total_write_ops;
      if (last && source->in_flight > 0) return;
      if (source->in_flight >= most) return;
      PostWrite(posted_write_ops++ % page_idx.size(), last);
    }
  }

  // Posts the WRITE of a page.
  void PostWrite(size_t i, bool last) {
    size_t page_size = request.page_size;
    session.endpoint.Post(
        {.type = RdmaOpType::kWrite,
         .peer = session.peer,
         .buf = &*source,
         .len = page_size,
         .offset = i * page_size,
         .remote_addr = request.addr + page_idx[i] * page_size,
         .remote_key = request.rkey,
         .imm_data = last ? request.imm_data : 0,
         .callback = [this](const RdmaOp& op) {
           op.Check();
           session.heard_at = Clock::now();
           if (!Busy()) PrintProgress();
         }});
  }

  // Reports progress now and then, also to the client, whose program takes no
  // part in a WRITE: a long transfer would be silence to it.
  void Report() {
    if (Clock::now() - reported_at < kReportPeriod || !Busy()) return;
    if (!session.HasSent()) return;
    reported_at = Clock::now();
    if (posted_write_ops > 0) PrintProgress();
    session.Send(AppMessageType::kProgress);
  }

  // Prints how far the WRITEs have come, and how fast.
  void PrintProgress() const {
    std::chrono::duration<double> seconds = Clock::now() - write_start_at;
    size_t finished = FinishedWriteOps();
    double mpps = double(finished) / seconds.count() * 1e-6;
    printf(
        "[%zu] [%.3fs] WRITE: %zu%%, %zu/%zu, bw=%.3fGbps, %.3fMpps, "
        "EAGAIN=%zu\n",
        number, seconds.count(), 100 * finished / total_write_ops, finished,
        total_write_ops, 8e-3 * mpps * request.page_size, mpps,
        session.endpoint.eagain_count);
  }
};

// Runs the server, until a signal ends it.
void ServerMain(const char* program, bool gpu) {
  Domain domain(gpu);
  if (gpu) Buffer(domain, 1, FI_WRITE, true);  // throws if that's impossible
  Session listener(domain);
  WaitingLine line{listener};
  size_t memory_left = kMaxTransfer;
  std::list<ServedClient> clients;
  size_t num_clients = 0;  // so far
  size_t empty_polls = 0;
  PrintClientCommand(program, listener.endpoint.addr);
  while (!g_interrupted) {
    size_t completions = 0;
    bool busy = false;
    try {
      completions = listener.Poll();
      line.AddAll();
      line.TellAll();
      auto first = line.First();
      // One a round: opening an endpoint may take tens of milliseconds.
      if (clients.size() < kMaxClients && first != line.visitors.end()) {
        printf("[%zu] Received CONNECT message from client %s\n", ++num_clients,
               ToHex(first->addr).c_str());
        // Should this fail, it is told to ask again.
        first->tell_at = Clock::now();
        clients.emplace_back(domain, num_clients, first->addr, first->nonce,
                             memory_left);
        line.visitors.erase(first);
      }
    } catch (const std::exception& e) {
      // What fails for one client must not end the server.
      fprintf(stderr, "error: %s\n", e.what());
    }
    for (ServedClient& client : clients) {
      try {
        completions += client.Poll();
        busy |= client.Busy();
      } catch (const std::exception& e) {
        // It ends this client's session, and costs the others nothing.
        if (client.done) {
          client.leave_at = {};  // not even a REFUSED leaves
          continue;
        }
        fprintf(stderr, "[%zu] error: %s\n", client.number, e.what());
        client.done = true;
      }
    }
    clients.remove_if([](const ServedClient& c) { return c.HasLeft(); });
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
void ClientMain(const Address& server_addr, bool gpu, size_t page_size,
                size_t num_pages, size_t total_repeat) {
  Domain domain(gpu);
  // A few pages more than will be written, to see that they stay as they are.
  size_t room = num_pages + num_pages / 8 + 1;
  // FI_RECV, too: an adapter without WRITEs has us fetch the data ourselves.
  Buffer memory(domain, room * page_size, FI_REMOTE_WRITE | FI_RECV, gpu);
  AppRandomFillMessage request = {};
  bool filled = false;
  Session session(domain);
  session.Connect(server_addr);

  // Where the pages go is as random as what is in them.
  std::mt19937_64 random{std::random_device{}()};
  std::vector<uint32_t> page_idx(room);
  std::iota(page_idx.begin(), page_idx.end(), 0);
  std::shuffle(page_idx.begin(), page_idx.end(), random);
  page_idx.resize(num_pages);
  // The server names a place in our memory by its address or, if the provider
  // does without FI_MR_VIRT_ADDR, by its distance from the start.
  if (domain.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) {
    request.addr = reinterpret_cast<uint64_t>(memory.data.get());
  }
  request.size = memory.size;
  request.rkey = fi_mr_key(memory.mr);
  request.seed = random();
  request.page_size = uint32_t(page_size);
  request.imm_data = uint32_t(random()) | 1;
  request.total_repeat = total_repeat;
  session.endpoint.on_imm_data = [&](uint32_t imm_data) {
    if (imm_data == request.imm_data) filled = true;
  };

  session.Send(AppMessageType::kRandomFill,
               BytesOf(&request, sizeof(request)) +
                   BytesOf(page_idx.data(), num_pages * sizeof(uint32_t)));
  printf("Sent RandomFill request to server. page_size: %zu, num_pages: %zu\n",
         page_size, num_pages);
  session.WaitUntil("waiting for the pages", [&] {
    while (std::optional<Message> message = session.Take()) {
      BodyOf(*message, AppMessageType::kProgress);  // throws if it is another
      session.Send(AppMessageType::kProgress);
    }
    return filled;
  });
  if (gpu) CudaFlushWrites();
  printf("Received RDMA WRITE to local memory.\n");
  session.SayBye();
  CheckMemory(memory, request, page_idx);
}

// ---- Command line ----

constexpr const char* kUsage =
    "Usage:\n"
    "  14_strangers [--gpu]\n"
    "      Run the server.\n"
    "  14_strangers [--gpu] ADDRESS [PAGE_SIZE NUM_PAGES [REPEAT]]\n"
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

// Takes the numbers of standard input, output and error if they are closed.
// Otherwise our lines would go into the first files that libfabric opens.
void TakeStandardFiles() {
  for (int fd : {0, 1, 2}) {
    if (fcntl(fd, F_GETFD) < 0) open("/dev/null", O_RDWR);
  }
}

// Lets this process open as many files as it may: each connection takes one,
// before a byte has come.
void RaiseFileLimit() {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

int main(int argc, char** argv) {
  TakeStandardFiles();
  RaiseFileLimit();
  // Has ofi_rxm take a connection each millisecond instead of each ten.
  setenv("FI_OFI_RXM_CM_PROGRESS_INTERVAL", "1000", 0);
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
    ClientMain(ParseAddress(args[0]), gpu, page_size, num_pages, total_repeat);
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
