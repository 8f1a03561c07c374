// A network without order, for the tests: a library that is loaded in front of
// libfabric and does what FI_ORDER_NONE permits, but tcp and shm never do. On
// request, it also lacks what some networks lack.
//
// Usage: LD_PRELOAD=build/reorder.so PROGRAM...
//   REORDER_MS=N              WRITEs without immediate data start N ms late
//                             (300); those with immediate data overtake them
//   REORDER_COMPLETIONS_MS=N  completions of WRITEs appear N ms late (0), so
//                             that the answer of the peer may come first
//   NO_IMM_DATA=1             there is no immediate data, as with iWARP
//   NO_ATOMICS=1              there are no atomic operations on 64 bits
//   NO_MEMORY=send, NO_MEMORY=register
//                             SENDs, or registrations of memory, find no memory
//                             that may be locked, as where `ulimit -l` is low
//   NO_SYNC=file, NO_SYNC=directory
//                             the disk keeps no file, or no name: fsync fails
//   TRUNCATES=1               a message that is longer than its RECV is no error: it
//                             completes, with the length that it had
//   SLOW_WRITE=FILE           a pwrite waits, and says so, until there is this file
//   KEY_SIZE=N                a key of registered memory has N bytes, and one that
//                             is larger is refused
//
// What the programs do is enough here: one thread, one endpoint for each
// completion queue, entries in FI_CQ_FORMAT_DATA, the short forms of operations.

#define STAND_IN "reorder"
#include <errno.h>
#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <unordered_map>

#include "stand_in.h"

using Clock = std::chrono::steady_clock;

const std::chrono::milliseconds g_write_delay(Setting("REORDER_MS", 300));
const std::chrono::milliseconds g_completion_delay(
    Setting("REORDER_COMPLETIONS_MS", 0));
const auto g_key_size = static_cast<size_t>(Setting("KEY_SIZE", 8));

// Returns whether there is no memory for `what`.
bool NoMemory(const char* what) {
  const char* value = getenv("NO_MEMORY");
  return value && strcmp(value, what) == 0;
}

// A WRITE that the provider has not got yet.
struct Write {
  Clock::time_point due;
  std::function<ssize_t()> post;
};

struct Completion {
  Clock::time_point due;
  struct fi_cq_data_entry entry;
};

struct Endpoint {
  struct fi_ops* real_ops = nullptr;
  struct fi_ops_rma* real_rma = nullptr;
  struct fi_ops_msg* real_msg = nullptr;
  struct fid* cq = nullptr;
  std::deque<Write> writes;
};

struct CompletionQueue {
  struct fi_ops_cq* real_cq = nullptr;
  std::deque<Completion> completions;
};

std::unordered_map<struct fid*, Endpoint> g_endpoints;
std::unordered_map<struct fid*, CompletionQueue> g_cqs;
std::unordered_map<struct fid*, struct fi_ops_fabric*> g_real_fabrics;
std::unordered_map<struct fid*, struct fi_ops_domain*> g_real_domains;
std::unordered_map<struct fid*, struct fi_ops_mr*> g_real_mrs;  // of domains

// One with immediate data is never delayed. The data itself has to stay in place
// until the completion, and so has the context.
ssize_t LateWrite(struct fid_ep* ep, const void* data, size_t size, void* desc,
                  fi_addr_t peer, uint64_t addr, uint64_t key, void* context) {
  Endpoint& endpoint = g_endpoints.at(&ep->fid);
  auto post = [=, real = endpoint.real_rma->write] {
    return real(ep, data, size, desc, peer, addr, key, context);
  };
  if (g_write_delay.count() == 0) return post();
  endpoint.writes.push_back({Clock::now() + g_write_delay, post});
  return 0;
}

// Hands over the WRITEs of an endpoint that are due, while there is room.
void ProgressWrites(Endpoint& endpoint) {
  while (!endpoint.writes.empty() &&
         endpoint.writes.front().due <= Clock::now()) {
    ssize_t ret = endpoint.writes.front().post();
    if (ret == -FI_EAGAIN) return;
    // It is too late to return this. The WRITE never completes, as with a
    // provider that does not report lost peers.
    if (ret != 0) {
      fprintf(stderr, "reorder: lost a WRITE: %s\n",
              fi_strerror(static_cast<int>(-ret)));
    }
    endpoint.writes.pop_front();
  }
}

ssize_t CqRead(struct fid_cq* cq, void* buf, size_t count) {
  for (auto& [fid, endpoint] : g_endpoints) {
    if (endpoint.cq == &cq->fid) ProgressWrites(endpoint);
  }
  CompletionQueue& queue = g_cqs.at(&cq->fid);
  auto* entries = static_cast<struct fi_cq_data_entry*>(buf);
  ssize_t ret = queue.real_cq->read(cq, buf, count);
  if (ret == -FI_EAVAIL && getenv("TRUNCATES") != nullptr) {
    struct fi_cq_err_entry error = {};
    queue.real_cq->readerr(cq, &error, 0);
    if (error.err != FI_ETRUNC) Die("another error than a truncation");
    *entries = {error.op_context, error.flags, error.len + error.olen, nullptr,
                0};
    return 1;
  }
  if (ret < 0 && ret != -FI_EAGAIN) return ret;
  // Keep the completions of WRITEs, and move the others to the front.
  struct fi_cq_data_entry* end = std::remove_if(
      entries, entries + std::max<ssize_t>(ret, 0), [&](const auto& entry) {
        bool ours = (entry.flags & (FI_WRITE | FI_REMOTE_WRITE)) == FI_WRITE;
        if (!ours || g_completion_delay.count() == 0) return false;
        queue.completions.push_back({Clock::now() + g_completion_delay, entry});
        return true;
      });
  while (end != entries + count && !queue.completions.empty() &&
         queue.completions.front().due <= Clock::now()) {
    *end++ = queue.completions.front().entry;
    queue.completions.pop_front();
  }
  return end == entries ? -FI_EAGAIN : end - entries;
}

ssize_t Send(struct fid_ep* ep, const void* data, size_t size, void* desc,
             fi_addr_t peer, void* context) {
  if (NoMemory("send")) return -FI_ENOMEM;
  return g_endpoints.at(&ep->fid).real_msg->send(ep, data, size, desc, peer,
                                                 context);
}

int Register(struct fid* fid, const struct fi_mr_attr* attr, uint64_t flags,
             struct fid_mr** mr) {
  if (NoMemory("register")) return -FI_ENOMEM;
  if (g_key_size < 8 && attr->requested_key >> (8 * g_key_size) != 0) {
    return -FI_EKEYREJECTED;
  }
  return g_real_mrs.at(fid)->regattr(fid, attr, flags, mr);
}

int RegisterBuffer(struct fid* fid, const void* data, size_t size,
                   uint64_t access, uint64_t offset, uint64_t key,
                   uint64_t flags, struct fid_mr** mr, void* context) {
  if (g_key_size < 8) Die("short keys are for fi_mr_regattr");
  if (NoMemory("register")) return -FI_ENOMEM;
  return g_real_mrs.at(fid)->reg(fid, data, size, access, offset, key, flags,
                                 mr, context);
}

int EndpointBind(struct fid* fid, struct fid* other, uint64_t flags) {
  Endpoint& endpoint = g_endpoints.at(fid);
  if (other->fclass == FI_CLASS_CQ) endpoint.cq = other;
  return endpoint.real_ops->bind(fid, other, flags);
}

int EndpointControl(struct fid* fid, int command, void* arg) {
  Endpoint& endpoint = g_endpoints.at(fid);
  int ret = endpoint.real_ops->control(fid, command, arg);
  // Not before: fi_enable is where a provider may still choose other functions.
  if (command == FI_ENABLE && ret == 0 && endpoint.real_rma == nullptr) {
    auto* ep = reinterpret_cast<struct fid_ep*>(fid);
    endpoint.real_rma = Replace(ep->rma);
    ep->rma->write = LateWrite;
    endpoint.real_msg = Replace(ep->msg);
    ep->msg->send = Send;
  }
  return ret;
}

// Closing an endpoint ends what is in flight, and that includes what we keep.
int EndpointClose(struct fid* fid) {
  struct fi_ops* real = g_endpoints.at(fid).real_ops;
  g_endpoints.erase(fid);
  return real->close(fid);
}

int NotValid(struct fid_ep*, enum fi_datatype, enum fi_op, size_t*) {
  return -FI_EOPNOTSUPP;
}

int OpenEndpoint(struct fid_domain* domain, struct fi_info* info,
                 struct fid_ep** ep, void* context) {
  int ret =
      g_real_domains.at(&domain->fid)->endpoint(domain, info, ep, context);
  if (ret != 0) return ret;
  g_endpoints[&(*ep)->fid].real_ops = Replace((*ep)->fid.ops);
  (*ep)->fid.ops->bind = EndpointBind;
  (*ep)->fid.ops->control = EndpointControl;
  (*ep)->fid.ops->close = EndpointClose;
  if (getenv("NO_ATOMICS") != nullptr) {
    Replace((*ep)->atomic);
    (*ep)->atomic->compwritevalid = NotValid;
  }
  return 0;
}

int OpenCq(struct fid_domain* domain, struct fi_cq_attr* attr,
           struct fid_cq** cq, void* context) {
  if (attr->format != FI_CQ_FORMAT_DATA) Die("entries in an unknown format");
  int ret = g_real_domains.at(&domain->fid)->cq_open(domain, attr, cq, context);
  if (ret != 0) return ret;
  g_cqs[&(*cq)->fid] = {Replace((*cq)->ops), {}};
  (*cq)->ops->read = CqRead;
  return 0;
}

int OpenDomain(struct fid_fabric* fabric, struct fi_info* info,
               struct fid_domain** domain, void* context) {
  int ret =
      g_real_fabrics.at(&fabric->fid)->domain(fabric, info, domain, context);
  if (ret != 0) return ret;
  g_real_domains[&(*domain)->fid] = Replace((*domain)->ops);
  (*domain)->ops->endpoint = OpenEndpoint;
  (*domain)->ops->cq_open = OpenCq;
  g_real_mrs[&(*domain)->fid] = Replace((*domain)->mr);
  (*domain)->mr->regattr = Register;
  (*domain)->mr->reg = RegisterBuffer;
  return 0;
}

extern "C" int fi_getinfo(uint32_t version, const char* node,
                          const char* service, uint64_t flags,
                          const struct fi_info* hints, struct fi_info** info) {
  int ret = Next("fi_getinfo", fi_getinfo)(version, node, service, flags, hints,
                                           info);
  if (ret != 0) return ret;
  for (struct fi_info* one = *info; one != nullptr; one = one->next) {
    if (getenv("NO_IMM_DATA") != nullptr) one->domain_attr->cq_data_size = 0;
    if (g_key_size < 8) one->domain_attr->mr_key_size = g_key_size;
  }
  return ret;
}

extern "C" int fi_fabric(struct fi_fabric_attr* attr,
                         struct fid_fabric** fabric, void* context) {
  // A provider may be built upon another, as ofi_rxm upon tcp, and open that in
  // here. Its WRITEs are not those of the program.
  static int depth = 0;
  ++depth;
  int ret = Next("fi_fabric", fi_fabric)(attr, fabric, context);
  --depth;
  if (ret != 0 || depth > 0) return ret;
  g_real_fabrics[&(*fabric)->fid] = Replace((*fabric)->ops);
  (*fabric)->ops->domain = OpenDomain;
  return 0;
}

extern "C" int fsync(int fd) {
  const char* what = getenv("NO_SYNC");
  struct stat status = {};
  if (what == nullptr || fstat(fd, &status) != 0 ||
      S_ISDIR(status.st_mode) != (strcmp(what, "directory") == 0)) {
    return Next("fsync", fsync)(fd);
  }
  errno = EIO;
  return -1;
}

extern "C" ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  const char* file = getenv("SLOW_WRITE");
  if (file != nullptr) fprintf(stderr, "reorder: a pwrite waits\n");
  while (file != nullptr && access(file, F_OK) != 0) usleep(1000);
  return Next("pwrite", pwrite)(fd, data, size, offset);
}
