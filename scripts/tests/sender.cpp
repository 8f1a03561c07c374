// A sender for the tests: puts any bytes on the wire, as a client of the
// programs in src or as somebody who is none.
//
// Usage: sender SERVER_ADDRESS
// Prints "address HEX", its own. Then obeys standard input, a command a line:
//   peer HEX      sends to this address from now on
//   send HEX      sends these bytes; prints "sent", or "failed: ..."
//   zeros N       sends N zero bytes; likewise
//   wait HEX      waits for a message that begins so; prints "received HEX"
// and ends, closing nothing, at the end of its input. It never waits for more
// than 5 s.

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <iostream>
#include <string>
#include <vector>

void Check(ssize_t ret, const char* what) {
  if (ret >= 0) return;
  fprintf(stderr, "sender: %s: %s\n", what,
          fi_strerror(static_cast<int>(-ret)));
  _exit(1);
}

std::vector<uint8_t> FromHex(const std::string& hex) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<uint8_t>(stoul(hex.substr(i, 2), nullptr, 16)));
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

struct Sender {
  struct fid_ep* ep = nullptr;
  struct fid_cq* cq = nullptr;
  struct fid_av* av = nullptr;
  fi_addr_t server = 0;
  bool sent = false;
  bool received = false;
  std::string error;
  size_t len = 0;
  char send_context[64];
  char recv_context[64];
  std::vector<uint8_t> inbox = std::vector<uint8_t>(1 << 20);

  void Poll() {
    struct fi_cq_data_entry entry;
    ssize_t ret = fi_cq_read(cq, &entry, 1);
    if (ret == -FI_EAVAIL) {
      struct fi_cq_err_entry failure = {};
      if (fi_cq_readerr(cq, &failure, 0) == 1) {
        error = fi_strerror(failure.err);
      }
    } else if (ret == 1 && entry.op_context == send_context) {
      sent = true;
    } else if (ret == 1 && entry.op_context == recv_context) {
      received = true;
      len = entry.len;
    } else if (ret != -FI_EAGAIN) {
      Check(ret, "fi_cq_read");
    }
  }

  void SetPeer(const std::string& hex) {
    std::vector<uint8_t> address = FromHex(hex);
    Check(fi_av_insert(av, address.data(), 1, &server, 0, nullptr) - 1,
          "fi_av_insert");
  }

  void PostRecv() {
    received = false;
    Check(fi_recv(ep, inbox.data(), inbox.size(), nullptr, FI_ADDR_UNSPEC,
                  recv_context),
          "fi_recv");
  }

  void Send(const std::vector<uint8_t>& bytes) {
    sent = false;
    error.clear();
    time_t end = time(nullptr) + 5;
    ssize_t ret;
    do {
      ret = fi_send(ep, bytes.data(), bytes.size(), nullptr, server,
                    send_context);
      Poll();
    } while (ret == -FI_EAGAIN && time(nullptr) < end);
    if (ret != 0) error = fi_strerror(static_cast<int>(-ret));
    while (!sent && error.empty() && time(nullptr) < end) Poll();
    printf("%s\n", sent ? "sent" : ("failed: " + error).c_str());
  }

  void Wait(const std::string& beginning) {
    for (time_t end = time(nullptr) + 5; time(nullptr) < end;) {
      Poll();
      if (!received) continue;
      std::string hex = ToHex(inbox.data(), len);
      PostRecv();
      if (hex.compare(0, beginning.size(), beginning) == 0) {
        printf("received %s\n", hex.c_str());
        return;
      }
    }
    printf("nothing received\n");
  }
};

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  setvbuf(stdout, nullptr, _IOLBF, 0);
  struct fi_info* hints = fi_allocinfo();
  hints->caps = FI_MSG;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode =
      FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  struct fi_info* info = nullptr;
  Check(fi_getinfo(FI_VERSION(1, 17), nullptr, nullptr, 0, hints, &info),
        "fi_getinfo");
  struct fid_fabric* fabric;
  struct fid_domain* domain;
  Sender sender;
  struct fi_av_attr av_attr = {};
  struct fi_cq_attr cq_attr = {};
  cq_attr.format = FI_CQ_FORMAT_DATA;
  Check(fi_fabric(info->fabric_attr, &fabric, nullptr), "fi_fabric");
  Check(fi_domain(fabric, info, &domain, nullptr), "fi_domain");
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
  sender.SetPeer(argv[1]);
  sender.PostRecv();
  printf("address %s\n", ToHex(name, name_size).c_str());

  std::string command;
  std::string argument;
  while (std::cin >> command >> argument) {
    if (command == "peer") sender.SetPeer(argument);
    if (command == "send") sender.Send(FromHex(argument));
    if (command == "zeros") {
      sender.Send(std::vector<uint8_t>(std::stoul(argument)));
    }
    if (command == "wait") sender.Wait(argument);
  }
  _exit(0);
}
