// A sender for the tests: puts any bytes on the wire, as a client of the
// programs in src or as a stranger.
//
// Usage: sender [ADDRESS]
// Sends to this address. Prints "address HEX", its own. Then it obeys standard
// input, a command a line:
//   peer HEX   sends to this address from now on
//   send HEX   sends these bytes, or an empty message; prints "sent", or
//              "failed: ..."
//   wait       waits for the next message; prints "received HEX"
//   write ADDR KEY DATA HEX
//              WRITEs these bytes to a place in the peer's memory, with a number
//              as immediate data; prints "written", or "failed: ..."
//   read ADDR KEY [SECONDS]
//              READs 8 bytes of the peer's memory; prints "read", or
//              "failed: ..."
//   memory     registers 1 MiB that the peer may write to; prints
//              "memory ADDR KEY"
//   overwrite ADDR KEY [SECONDS]
//              WRITEs 8 bytes to it, without a number; prints "written" only if
//              they have arrived there, otherwise "failed: ..."
//   stream COUNT MICROSECONDS HEX
//              sends these bytes (not too many to inject) so many times, with
//              such a pause in between; prints "streamed"
// It takes part in the network only while it obeys a command, and never waits
// for more than 20 s, or SECONDS: nobody may answer a READ or WRITE. At the end
// of its input it ends without closing anything.

#include <inttypes.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <deque>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::seconds;

constexpr Seconds kLimit = 20s;

void Check(ssize_t ret, const char* what) {
  if (ret >= 0) return;
  fprintf(stderr, "sender: %s: %s\n", what,
          fi_strerror(static_cast<int>(-ret)));
  _exit(1);
}

std::vector<uint8_t> FromHex(const std::string& hex) {
  std::vector<uint8_t> bytes(hex.size() / 2);
  const char* digits = hex.data();
  for (uint8_t& byte : bytes) {
    std::from_chars(digits, digits + 2, byte, 16);
    digits += 2;
  }
  return bytes;
}

std::string ToHex(const uint8_t* bytes, size_t size) {
  std::string hex;
  for (size_t i = 0; i < size; ++i) {
    char digits[3];
    snprintf(digits, sizeof(digits), "%02x", bytes[i]);
    hex += digits;
  }
  return hex;
}

// Reads the limit at the end of a command, if there is one.
Seconds LimitIn(std::istringstream& words) {
  Seconds::rep seconds = 0;
  return words >> seconds ? Seconds(seconds) : kLimit;
}

struct Operation {
  struct fi_context2 context = {};  // must come first
  std::vector<uint8_t> bytes;
  size_t len = 0;
  bool done = false;
  std::string error;
};

struct Sender {
  struct fid_ep* ep = nullptr;
  struct fid_cq* cq = nullptr;
  struct fid_av* av = nullptr;
  struct fid_domain* domain = nullptr;
  bool virt_addr = false;  // remote addresses are not offsets
  fi_addr_t peer = 0;
  std::deque<Operation> ops;  // all that there ever were
  Operation* recv = nullptr;

  void Poll() {
    struct fi_cq_data_entry entry;
    ssize_t ret = fi_cq_read(cq, &entry, 1);
    if (ret == -FI_EAVAIL) {
      struct fi_cq_err_entry failure = {};
      ret = fi_cq_readerr(cq, &failure, 0);
      if (ret != 1 || failure.op_context == nullptr) return;
      static_cast<Operation*>(failure.op_context)->error =
          fi_strerror(failure.err);
    } else if (ret == 1 && entry.op_context != nullptr) {
      static_cast<Operation*>(entry.op_context)->len = entry.len;
      static_cast<Operation*>(entry.op_context)->done = true;
    } else if (ret != -FI_EAGAIN) {
      Check(ret, "fi_cq_read");
    }
  }

  void Register() {
    static uint64_t key = 0;
    struct fid_mr* mr;
    Operation& op = ops.emplace_back();
    op.bytes.resize(1 << 20);
    Check(fi_mr_reg(domain, op.bytes.data(), op.bytes.size(),
                    FI_REMOTE_WRITE | FI_RECV, 0, ++key, 0, &mr, nullptr),
          "fi_mr_reg");
    uint64_t addr = virt_addr ? reinterpret_cast<uint64_t>(op.bytes.data()) : 0;
    printf("memory %" PRIu64 " %" PRIu64 "\n", addr, fi_mr_key(mr));
  }

  void SetPeer(const std::string& hex) {
    std::vector<uint8_t> address = FromHex(hex);
    Check(fi_av_insert(av, address.data(), 1, &peer, 0, nullptr) - 1,
          "fi_av_insert");
  }

  void PostRecv() {
    recv = &ops.emplace_back();
    recv->bytes.resize(1 << 16);
    Check(fi_recv(ep, recv->bytes.data(), recv->bytes.size(), nullptr,
                  FI_ADDR_UNSPEC, recv),
          "fi_recv");
  }

  void Send(const std::string& hex) {
    Operation& op = ops.emplace_back();
    op.bytes = FromHex(hex);
    Finish(op, "sent", [&] {
      return fi_send(ep, op.bytes.data(), op.bytes.size(), nullptr, peer, &op);
    });
  }

  // Takes no part in anything else meanwhile.
  void Stream(size_t count, std::chrono::microseconds pause,
              const std::string& hex) {
    std::vector<uint8_t> bytes = FromHex(hex);
    auto next = Clock::now();
    for (size_t i = 0; i < count; ++i, next += pause) {
      while (Clock::now() < next) usleep(100);
      ssize_t ret = fi_inject(ep, bytes.data(), bytes.size(), peer);
      if (ret != -FI_EAGAIN) Check(ret, "fi_inject");
    }
    printf("streamed\n");
  }

  // READs or WRITEs, by default without a number.
  void Access(bool reads, uint64_t addr, uint64_t key,
              const std::vector<uint8_t>& bytes, Seconds limit,
              uint64_t data = 0, uint64_t flags = FI_DELIVERY_COMPLETE) {
    Operation& op = ops.emplace_back();
    op.bytes = bytes;
    struct iovec iov = {op.bytes.data(), op.bytes.size()};
    struct fi_rma_iov remote = {addr, op.bytes.size(), key};
    struct fi_msg_rma msg = {&iov, nullptr, 1, peer, &remote, 1, &op, data};
    Finish(
        op, reads ? "read" : "written",
        [&] {
          return reads ? fi_readmsg(ep, &msg, 0) : fi_writemsg(ep, &msg, flags);
        },
        limit);
  }

  // Posts an operation, waits until it has completed, and prints how it went.
  void Finish(Operation& op, const std::string& success,
              const std::function<ssize_t()>& post, Seconds limit = kLimit) {
    ssize_t ret = -FI_EAGAIN;
    for (auto end = Clock::now() + limit; Clock::now() < end; Poll()) {
      if (ret == -FI_EAGAIN) ret = post();
      if (ret != 0 && ret != -FI_EAGAIN) {
        op.error = fi_strerror(static_cast<int>(-ret));
      }
      if (op.done || !op.error.empty()) break;
    }
    printf("%s\n", (op.done ? success : "failed: " + op.error).c_str());
  }

  void Wait() {
    auto end = Clock::now() + kLimit;
    while (!recv->done && recv->error.empty() && Clock::now() < end) Poll();
    if (!recv->done) {
      printf("nothing received: %s\n", recv->error.c_str());
      return;
    }
    printf("received %s\n", ToHex(recv->bytes.data(), recv->len).c_str());
    PostRecv();
  }
};

int main(int argc, char** argv) {
  if (argc > 2) return 2;
  setvbuf(stdout, nullptr, _IOLBF, 0);
  // The same hints as those of the programs, where they matter for the choice
  // of the provider.
  struct fi_info* hints = fi_allocinfo();
  hints->caps = FI_MSG | FI_RMA;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode =
      FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  hints->tx_attr->msg_order = FI_ORDER_SAS;
  hints->rx_attr->msg_order = FI_ORDER_SAS;
  struct fi_info* info = nullptr;
  Check(fi_getinfo(FI_VERSION(1, 17), nullptr, nullptr, 0, hints, &info),
        "fi_getinfo");
  struct fid_fabric* fabric;
  Sender sender;
  struct fi_av_attr av_attr = {};
  struct fi_cq_attr cq_attr = {};
  cq_attr.format = FI_CQ_FORMAT_DATA;
  Check(fi_fabric(info->fabric_attr, &fabric, nullptr), "fi_fabric");
  Check(fi_domain(fabric, info, &sender.domain, nullptr), "fi_domain");
  sender.virt_addr = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
  struct fid_domain* domain = sender.domain;
  Check(fi_av_open(domain, &av_attr, &sender.av, nullptr), "fi_av_open");
  Check(fi_cq_open(domain, &cq_attr, &sender.cq, nullptr), "fi_cq_open");
  Check(fi_endpoint(domain, info, &sender.ep, nullptr), "fi_endpoint");
  Check(fi_ep_bind(sender.ep, &sender.av->fid, 0), "fi_ep_bind");
  Check(fi_ep_bind(sender.ep, &sender.cq->fid, FI_TRANSMIT | FI_RECV),
        "fi_ep_bind");
  Check(fi_enable(sender.ep), "fi_enable");
  uint8_t name[256];
  size_t name_size = sizeof(name);
  Check(fi_getname(&sender.ep->fid, name, &name_size), "fi_getname");
  if (argc == 2) sender.SetPeer(argv[1]);
  sender.PostRecv();
  printf("address %s\n", ToHex(name, name_size).c_str());

  std::string line;
  while (std::getline(std::cin, line)) {
    std::string command;
    std::string argument;
    std::istringstream words(line);
    words >> command >> argument;
    uint64_t key = 0;
    if (command == "write") {
      uint64_t data = 0;
      std::string hex;
      words >> key >> data >> hex;
      sender.Access(false, std::stoull(argument), key, FromHex(hex), kLimit,
                    data, FI_REMOTE_CQ_DATA);
    }
    if (command == "read" || command == "overwrite") {
      words >> key;
      // Without FI_DELIVERY_COMPLETE, a WRITE that is refused may complete, too.
      sender.Access(command == "read", std::stoull(argument), key,
                    std::vector<uint8_t>(8, 0x55), LimitIn(words));
    }
    if (command == "stream") {
      size_t pause = 0;
      std::string hex;
      words >> pause >> hex;
      sender.Stream(std::stoul(argument), std::chrono::microseconds(pause),
                    hex);
    }
    if (command == "memory") sender.Register();
    if (command == "peer") sender.SetPeer(argument);
    if (command == "send") sender.Send(argument);
    if (command == "wait") sender.Wait();
  }
  _exit(0);
}
