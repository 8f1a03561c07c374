// 4_hello: one message from a client to a server.
//
// The server posts RECVs and prints its address. The client posts a SEND to
// that address. Both learn from a completion queue what became of it.
//
// Based on 2_first.

#include <fcntl.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// ---- Constants ----

constexpr size_t kMaxAddressSize = 256;        // bytes
constexpr size_t kMaxMessageSize = 64 * 1024;  // bytes
constexpr size_t kRecvCount = 8;               // RECVs posted at a time
constexpr auto kSilenceLimit = 10s;            // then a client gives up
constexpr auto kIdlePause = 1ms;    // between two looks at a quiet queue
constexpr auto kContactGrace = 1s;  // for a first message, after a signal

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

// Called for a signal: the loops end, and a second signal ends the process.
void HandleSignal(int) {
  g_interrupted = true;
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
  uint64_t next_key = 1;  // no two regions may have the same one

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
  std::deque<RdmaOp> ops;         // as many as were ever in use
  std::vector<RdmaOp*> free_ops;  // those that are not in flight
  Address addr;                   // our own

  Owned<fid_av> av;  // the addresses of our peers
  Owned<fid_cq> cq;  // how our operations have ended
  Owned<fid_ep> ep;  // where we post them

  explicit Endpoint(Domain& open_domain) : domain(open_domain) {
    fi_av_attr av_attr = {};
    fi_cq_attr cq_attr = {};
    cq_attr.format = FI_CQ_FORMAT_DATA;  // what we want to know of each
    FiCheck(fi_av_open(domain.handle, &av_attr, &av.ptr, nullptr),
            "fi_av_open");
    FiCheck(fi_cq_open(domain.handle, &cq_attr, &cq.ptr, nullptr),
            "fi_cq_open");
    FiCheck(fi_endpoint(domain.handle, domain.info.get(), &ep.ptr, nullptr),
            "fi_endpoint");
    // The shm provider has just put handlers of its own before ours. They
    // delete our shared memory at once, and then the other side may crash.
    if (!g_interrupted) InstallSignalHandlers();
    FiCheck(fi_ep_bind(ep, &av->fid, 0), "fi_ep_bind");
    FiCheck(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
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
    if (free_ops.empty()) free_ops.push_back(&ops.emplace_back());
    RdmaOp* op = free_ops.back();
    *op = std::move(request);
    ssize_t ret = Submit(op);
    if (ret == -FI_EAGAIN) return false;
    free_ops.pop_back();
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

  // Polls until `done` returns true. Error messages begin with `what`. During
  // the first `grace`, it goes on in spite of a signal.
  void WaitUntil(const char* what, const std::function<bool()>& done,
                 Clock::duration grace = 0s) {
    Clock::time_point start = Clock::now();
    while (!done()) {
      if (g_interrupted && Clock::now() - start >= grace) CheckInterrupted();
      if (Clock::now() - start > kSilenceLimit) {
        throw std::runtime_error(std::string(what) +
                                 ": nothing has happened for " +
                                 std::to_string(kSilenceLimit.count()) +
                                 " s; is the other side running, with the same "
                                 "FI_PROVIDER?");
      }
      if (PollCompletion() == 0) std::this_thread::sleep_for(kIdlePause);
    }
  }
};

// ---- The application ----

// Prints how to reach the server.
void PrintClientCommand(const char* program, const Endpoint& endpoint) {
  printf("Run the client with the following command:\n  %s%s %s\n",
         ProviderSetting().c_str(), program, ToHex(endpoint.addr).c_str());
}

// Posts a RECV for each free buffer, as far as libfabric has room. When a
// message has come, prints it, and its buffer is free again.
void PostRecvs(Endpoint& endpoint, std::vector<Buffer*>& free_bufs) {
  auto arrived = [&free_bufs](const RdmaOp& op) {
    free_bufs.push_back(op.buf);
    op.Check();  // throws if the message was too long, for example
    std::string text(op.buf->data.get(), op.len);
    printf("Received %zu bytes: %s\n", op.len, Printable(text).c_str());
  };
  while (!free_bufs.empty()) {
    Buffer* buf = free_bufs.back();
    free_bufs.pop_back();
    if (endpoint.Post({.buf = buf, .len = buf->size, .callback = arrived})) {
      continue;
    }
    free_bufs.push_back(buf);
    return;
  }
}

// Runs the server, until a signal ends it.
int ServerMain(const char* program) {
  Domain domain;
  std::deque<Buffer> bufs;
  std::vector<Buffer*> free_bufs;  // those without a RECV
  Endpoint endpoint(domain);
  for (size_t i = 0; i < kRecvCount; ++i) {
    free_bufs.push_back(
        &bufs.emplace_back(domain, domain.MaxMessageSize(), FI_RECV));
  }
  PostRecvs(endpoint, free_bufs);
  PrintClientCommand(program, endpoint);
  while (!g_interrupted) {
    size_t completions = 0;
    try {
      PostRecvs(endpoint, free_bufs);
      completions = endpoint.PollCompletion();
    } catch (const std::exception& e) {
      // A bad message must not end the server.
      fprintf(stderr, "error: %s\n", e.what());
    }
    if (completions == 0) std::this_thread::sleep_for(kIdlePause);
  }
  return 0;
}

// Runs the client.
int ClientMain(const Address& server_addr, const std::string& text) {
  Domain domain;
  if (text.size() > domain.MaxMessageSize()) {
    throw std::invalid_argument("TEXT is longer than " +
                                std::to_string(domain.MaxMessageSize()) +
                                " bytes");
  }
  Buffer buf(domain, text.size(), FI_SEND);
  memcpy(buf.data.get(), text.data(), text.size());
  Endpoint endpoint(domain);
  fi_addr_t server = endpoint.AddPeerAddress(server_addr);
  // A signal may come before the first contact, or wait for it. In between, the
  // shm provider of libfabric 1.17 would end the other process with ours.
  CheckInterrupted();
  bool posted = false;
  bool sent = false;
  auto post_and_ask = [&] {
    if (!posted) {
      posted = endpoint.Post({.type = RdmaOpType::kSend,
                              .peer = server,
                              .buf = &buf,
                              .len = text.size(),
                              .callback = [&](const RdmaOp& op) {
                                op.Check();
                                sent = true;
                              }});
    }
    return sent;
  };
  endpoint.WaitUntil("sending the text", post_and_ask, kContactGrace);
  printf("Sent %zu bytes.\n", text.size());
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
    "  4_hello\n"
    "      Run the server.\n"
    "  4_hello ADDRESS [TEXT]\n"
    "      Send it a text (\"Hello, world!\").\n"
    "  4_hello --list\n"
    "      List the interfaces found, the one it uses first.\n"
    "ADDRESS is what the server prints. FI_PROVIDER chooses the provider.\n";

int main(int argc, char** argv) {
  std::vector<std::string> args(argv + 1, argv + argc);
  // Otherwise our lines would go into the first files that libfabric opens.
  for (int fd : {0, 1, 2}) {
    if (fcntl(fd, F_GETFD) < 0) open("/dev/null", O_RDWR);
  }
  setvbuf(stdout, nullptr, _IOLBF, 0);  // whole lines, also into a pipe
  InstallSignalHandlers();
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
