// 2_first: one message from a client to a server, in a straight line.
//
// The server takes a single message and ends. What else is missing here is
// where chapter 4 begins.

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Ends the program if a call has failed: it has then returned an error number,
// with a minus sign.
void Check(ssize_t result, const char* call) {
  if (result >= 0) return;
  fprintf(stderr, "error: %s: %s\n", call, fi_strerror(int(-result)));
  exit(1);
}

int main(int argc, char** argv) {
  bool server = argc == 1;

  // 1. Ask: which interfaces can do what we need?
  fi_info* hints = fi_allocinfo();
  hints->caps = FI_MSG;              // we want to send messages,
  hints->ep_attr->type = FI_EP_RDM;  // reliably, to any number of peers,
  hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;  // and hear of their arrival
  // Demands that we can meet.
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY;
  fi_info* info;  // a list, the best one first
  Check(fi_getinfo(FI_VERSION(1, 17), nullptr, nullptr, 0, hints, &info),
        "fi_getinfo");
  printf("domain: %s, provider: %s\n", info->domain_attr->name,
         info->fabric_attr->prov_name);

  // 2. Open the network, and in it our access to the adapter.
  fid_fabric* fabric;
  fid_domain* domain;
  Check(fi_fabric(info->fabric_attr, &fabric, nullptr), "fi_fabric");
  Check(fi_domain(fabric, info, &domain, nullptr), "fi_domain");

  // 3. Make an endpoint, with an address vector and a completion queue.
  fid_av* av;  // the addresses of our peers
  fid_cq* cq;  // how our operations have ended
  fid_ep* ep;  // where we post them
  fi_av_attr av_attr = {};
  fi_cq_attr cq_attr = {};
  cq_attr.format = FI_CQ_FORMAT_DATA;  // what we want to know of each
  Check(fi_av_open(domain, &av_attr, &av, nullptr), "fi_av_open");
  Check(fi_cq_open(domain, &cq_attr, &cq, nullptr), "fi_cq_open");
  Check(fi_endpoint(domain, info, &ep, nullptr), "fi_endpoint");
  Check(fi_ep_bind(ep, &av->fid, 0), "fi_ep_bind");
  Check(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
  Check(fi_enable(ep), "fi_enable");

  // 4. Register memory that the adapter may use.
  static char buffer[65536];
  memset(buffer, 0, sizeof(buffer));  // so that its pages exist
  fid_mr* mr;
  Check(fi_mr_reg(domain, buffer, sizeof(buffer), FI_SEND | FI_RECV, 0, 1, 0,
                  &mr, nullptr),
        "fi_mr_reg");
  void* desc = fi_mr_desc(mr);

  // 5. Post one operation, and wait until it has completed.
  unsigned char address[256] = {};
  size_t size = sizeof(address);
  fi_addr_t peer = FI_ADDR_UNSPEC;  // a RECV takes a message from anybody
  size_t length = sizeof(buffer);
  if (!server) {
    for (size_t i = 0; i < strlen(argv[1]) / 2 && i < size - 1; ++i) {
      sscanf(argv[1] + 2 * i, "%2hhx", &address[i]);
    }
    // Instead of an address, operations take a number that stands for it.
    bool known = fi_av_insert(av, address, 1, &peer, 0, nullptr) == 1;
    Check(known ? 0 : -FI_EINVAL, "fi_av_insert");
    const char* text = argc > 2 ? argv[2] : "Hello, world!";
    length = strnlen(text, sizeof(buffer));
    memcpy(buffer, text, length);
  }
  fi_context2 context = {};  // for the provider's notes, while it works
  ssize_t posted;
  do {
    posted = server ? fi_recv(ep, buffer, length, desc, peer, &context)
                    : fi_send(ep, buffer, length, desc, peer, &context);
    fi_cq_read(cq, nullptr, 0);  // reads no entry, but lets the provider work
  } while (posted == -FI_EAGAIN);
  Check(posted, server ? "fi_recv" : "fi_send");
  if (server) {
    Check(fi_getname(&ep->fid, address, &size), "fi_getname");
    printf("Run the client with the following command:\n  %s ", argv[0]);
    for (size_t i = 0; i < size; ++i) printf("%02x", address[i]);
    printf("\n");
    fflush(stdout);
  }
  fi_cq_data_entry entry;
  ssize_t count;
  while ((count = fi_cq_read(cq, &entry, 1)) == -FI_EAGAIN) continue;
  Check(count, "fi_cq_read");
  if (server) {
    printf("Received %zu bytes: %.*s\n", entry.len, int(entry.len), buffer);
  } else {
    printf("Sent %zu bytes.\n", length);
  }

  // Close everything: the endpoint first, and each object before its domain.
  fid* opened[] = {&ep->fid, &mr->fid,     &cq->fid,
                   &av->fid, &domain->fid, &fabric->fid};
  for (fid* object : opened) Check(fi_close(object), "fi_close");
  fi_freeinfo(info);
  fi_freeinfo(hints);
}
