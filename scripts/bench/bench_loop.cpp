// The fastest transfer that a program without any bookkeeping makes on this
// machine. The benchmark compares 7_queue with it.
//
// Usage:
//   bench_loop target PAGE_SIZE NUM_PAGES
//       Prints "target ADDRESS PLACE KEY" and waits until a WRITE brings
//       immediate data.
//   bench_loop write PAGE_SIZE NUM_PAGES TOTAL ADDRESS PLACE KEY SETTINGS...
//       WRITEs TOTAL pages to such a target, once for each SETTINGS, such as
//       "delivery,16,16": the completion level of a WRITE ("any", or "delivery"
//       for FI_DELIVERY_COMPLETE), the number of WRITEs posted between two
//       readings of the completion queue, and the number of entries read at a
//       time. Prints "seconds N" for each.
//
// As in 7_queue the pages are on huge pages, and all of them are touched before
// the clock starts. They are read in order and written in a random order.
//
// The clock stops when the data is in place. As in 7_queue, the last WRITE is
// posted when all others have completed. Here it asks for delivery completion
// whatever SETTINGS say. Otherwise the time without delivery completion would
// leave out the data that still waits in the kernel's buffers (tcp) or in the
// command queue (shm). Both deliver in order, so everything before the last
// WRITE is in place when that one is. An adapter reports a WRITE only after the
// peer's adapter has acknowledged it. 7_queue's clock stops when all its WRITEs
// have completed; over shm, where it asks for no delivery completion, the last
// few small pages may still be in the queue.

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

constexpr size_t kHugePageSize = 2 << 20;
// As in 7_queue: the limits on what is in flight, in WRITEs and in bytes.
constexpr size_t kMaxOutstanding = 4096;
constexpr size_t kMaxOutstandingBytes = 16 << 20;

// As in 7_queue: the lower of the headers' version and 2.0.
constexpr uint32_t kApiVersion =
    FI_VERSION_LT(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION),
                  FI_VERSION(2, 0))
        ? FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION)
        : FI_VERSION(2, 0);

void Check(ssize_t ret, const char* what) {
  if (ret >= 0) return;
  fprintf(stderr, "bench_loop: %s: %s\n", what,
          fi_strerror(static_cast<int>(-ret)));
  exit(1);
}

double Now() {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

// Returns touched memory on huge pages.
uint8_t* Alloc(size_t size) {
  size = (size + kHugePageSize - 1) / kHugePageSize * kHugePageSize;
  void* data = aligned_alloc(kHugePageSize, size);
  if (data == nullptr) Check(-FI_ENOMEM, "aligned_alloc");
  madvise(data, size, MADV_HUGEPAGE);
  memset(data, 1, size);
  return static_cast<uint8_t*>(data);
}

// The destinations of the pages, in bytes from the start.
std::vector<size_t> RandomOffsets(size_t page_size, size_t count) {
  std::vector<size_t> offsets(count);
  for (size_t i = 0; i < count; ++i) offsets[i] = i * page_size;
  std::shuffle(offsets.begin(), offsets.end(), std::mt19937_64(1));
  return offsets;
}

struct Endpoint {
  struct fi_info* info = nullptr;
  struct fid_fabric* fabric = nullptr;
  struct fid_domain* domain = nullptr;
  struct fid_av* av = nullptr;
  struct fid_cq* cq = nullptr;
  struct fid_ep* ep = nullptr;
  struct fid_mr* mr = nullptr;

  // The hints are those of 7_queue.
  void Open() {
    struct fi_info* hints = fi_allocinfo();
    hints->caps = FI_MSG | FI_RMA;
    hints->ep_attr->type = FI_EP_RDM;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->domain_attr->mr_mode =
        FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->tx_attr->msg_order = FI_ORDER_SAS;
    hints->rx_attr->msg_order = FI_ORDER_SAS;
    Check(fi_getinfo(kApiVersion, nullptr, nullptr, 0, hints, &info),
          "fi_getinfo");
    fi_freeinfo(hints);
    struct fi_av_attr av_attr = {};
    struct fi_cq_attr cq_attr = {};
    cq_attr.format = FI_CQ_FORMAT_DATA;
    Check(fi_fabric(info->fabric_attr, &fabric, nullptr), "fi_fabric");
    Check(fi_domain(fabric, info, &domain, nullptr), "fi_domain");
    Check(fi_av_open(domain, &av_attr, &av, nullptr), "fi_av_open");
    Check(fi_cq_open(domain, &cq_attr, &cq, nullptr), "fi_cq_open");
    Check(fi_endpoint(domain, info, &ep, nullptr), "fi_endpoint");
    Check(fi_ep_bind(ep, &av->fid, 0), "fi_ep_bind");
    Check(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
    Check(fi_enable(ep), "fi_enable");
  }

  void Register(void* data, size_t size, uint64_t access) {
    Check(fi_mr_reg(domain, data, size, access, 0, 4711, 0, &mr, nullptr),
          "fi_mr_reg");
  }

  ~Endpoint() {
    if (mr) fi_close(&mr->fid);
    if (ep) fi_close(&ep->fid);
    if (cq) fi_close(&cq->fid);
    if (av) fi_close(&av->fid);
    if (domain) fi_close(&domain->fid);
    if (fabric) fi_close(&fabric->fid);
    if (info) fi_freeinfo(info);
  }

  fi_addr_t Insert(const std::string& address_hex) {
    std::vector<uint8_t> address;
    for (size_t i = 0; i + 1 < address_hex.size(); i += 2) {
      address.push_back(
          static_cast<uint8_t>(stoul(address_hex.substr(i, 2), nullptr, 16)));
    }
    fi_addr_t target;
    if (fi_av_insert(av, address.data(), 1, &target, 0, nullptr) != 1) {
      Check(-FI_EINVAL, "fi_av_insert");
    }
    return target;
  }

  // Returns the number of operations that have completed, at most `max`.
  size_t Poll(struct fi_cq_data_entry* entries, size_t max) {
    ssize_t ret = fi_cq_read(cq, entries, max);
    if (ret >= 0) return static_cast<size_t>(ret);
    if (ret != -FI_EAGAIN) Check(ret, "fi_cq_read");
    return 0;
  }
};

void RunTarget(size_t page_size, size_t count) {
  Endpoint endpoint;
  endpoint.Open();
  size_t size = count * page_size;
  uint8_t* data = Alloc(size);
  endpoint.Register(data, size, FI_REMOTE_WRITE);

  uint8_t address[256];
  size_t address_size = sizeof(address);
  Check(fi_getname(&endpoint.ep->fid, address, &address_size), "fi_getname");
  printf("target ");
  for (size_t i = 0; i < address_size; ++i) printf("%02x", address[i]);
  bool virt_addr = endpoint.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
  printf(" %lu %lu\n", virt_addr ? reinterpret_cast<uint64_t>(data) : 0,
         fi_mr_key(endpoint.mr));

  struct fi_cq_data_entry entry;
  while (endpoint.Poll(&entry, 1) == 0) continue;
  // The confirmation of the last WRITE may still have to leave.
  for (double end = Now() + 0.02; Now() < end;) endpoint.Poll(&entry, 1);
}

struct Settings {
  uint64_t flags;   // of each WRITE
  size_t max_post;  // WRITEs between two readings of the completion queue
  size_t max_read;  // entries read at a time

  explicit Settings(const std::string& text) {
    char level[9];
    if (sscanf(text.c_str(), "%8[a-z],%zu,%zu", level, &max_post, &max_read) !=
        3) {
      Check(-FI_EINVAL, text.c_str());
    }
    flags = strcmp(level, "delivery") == 0 ? FI_DELIVERY_COMPLETE : 0;
  }
};

void Write(size_t page_size, size_t count, size_t total,
           const std::string& address_hex, uint64_t place, uint64_t key,
           const std::vector<Settings>& all_settings) {
  Endpoint endpoint;
  endpoint.Open();
  uint8_t* from = Alloc(count * page_size);
  endpoint.Register(from, count * page_size, FI_WRITE);
  fi_addr_t target = endpoint.Insert(address_hex);
  std::vector<size_t> offsets = RandomOffsets(page_size, count);
  // An operation is no more than this memory, which the provider may use while
  // the operation is in flight.
  std::vector<struct fi_context2> contexts(
      std::clamp<size_t>(kMaxOutstandingBytes / page_size, 2, kMaxOutstanding));
  std::vector<void*> free_contexts;
  for (struct fi_context2& context : contexts) {
    free_contexts.push_back(&context);
  }

  struct iovec iov = {nullptr, page_size};
  struct fi_rma_iov rma_iov = {0, page_size, key};
  void* desc = fi_mr_desc(endpoint.mr);
  struct fi_msg_rma msg = {};
  msg.msg_iov = &iov;
  msg.desc = &desc;
  msg.iov_count = 1;
  msg.addr = target;
  msg.rma_iov = &rma_iov;
  msg.rma_iov_count = 1;
  msg.data = 1;

  // Posts WRITEs and waits until all of them have completed.
  size_t i = 0;  // the next page
  auto Run = [&](size_t writes, uint64_t flags, const Settings& settings) {
    std::vector<struct fi_cq_data_entry> entries(settings.max_read);
    size_t posted = 0;
    size_t completed = 0;
    while (completed < writes) {
      for (size_t n = 0;
           n < settings.max_post && posted < writes && !free_contexts.empty();
           ++n) {
        iov.iov_base = from + i * page_size;
        rma_iov.addr = place + offsets[i];
        msg.context = free_contexts.back();
        ssize_t ret = fi_writemsg(endpoint.ep, &msg, flags);
        if (ret == -FI_EAGAIN) break;
        Check(ret, "fi_writemsg");
        free_contexts.pop_back();
        ++posted;
        if (++i == count) i = 0;
      }
      size_t n = endpoint.Poll(entries.data(), settings.max_read);
      for (size_t j = 0; j < n; ++j) {
        free_contexts.push_back(entries[j].op_context);
      }
      completed += n;
    }
  };
  const Settings& first = all_settings.at(0);
  Run(1, FI_DELIVERY_COMPLETE, first);  // connects
  for (const Settings& settings : all_settings) {
    double start = Now();
    Run(total - 1, settings.flags, settings);
    Run(1, FI_DELIVERY_COMPLETE, settings);
    printf("seconds %.9f\n", Now() - start);
  }
  Run(1, FI_DELIVERY_COMPLETE | FI_REMOTE_CQ_DATA, first);  // ends the target
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  std::vector<std::string> args(argv + 1, argv + argc);
  auto number = [&](size_t i) { return std::stoul(args.at(i)); };
  std::string mode = args.at(0);
  size_t count = number(2);
  if (mode == "target") RunTarget(number(1), count);
  if (mode == "write") {
    Write(number(1), count, number(3), args.at(4), number(5), number(6),
          std::vector<Settings>(args.begin() + 7, args.end()));
  }
}
