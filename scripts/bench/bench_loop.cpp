// What a program without any bookkeeping gets out of this machine; the
// benchmark compares 7_queue with it.
//
// Usage:
//   bench_loop copy PAGE_SIZE NUM_PAGES TOTAL
//       Copies pages from one buffer to another, TOTAL of them.
//   bench_loop target PAGE_SIZE NUM_PAGES
//       Prints "target ADDRESS PLACE KEY", and lets itself be written to until a
//       WRITE brings immediate data.
//   bench_loop write PAGE_SIZE NUM_PAGES TOTAL LEVEL ADDRESS PLACE KEY
//       WRITEs pages to such a target, TOTAL of them. LEVEL says when one counts
//       as complete: "delivery", when it is in place, or "any".
// Those that copy or write print "seconds N".
//
// As in 7_queue there are twice NUM_PAGES pages on huge pages, all of them used
// before the clock starts. They are read in order and written in a random one.

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
#include <time.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

constexpr size_t kHugePageSize = 2 << 20;
constexpr size_t kReadCount = 16;         // entries read at a time; as 7_queue
constexpr size_t kPostCount = 16;         // posted for each reading; as 7_queue
constexpr size_t kMaxOutstanding = 4096;  // WRITEs; as 7_queue

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

// Memory on huge pages, touched.
uint8_t* Alloc(size_t size) {
  size = (size + kHugePageSize - 1) / kHugePageSize * kHugePageSize;
  void* data = aligned_alloc(kHugePageSize, size);
  if (data == nullptr) Check(-FI_ENOMEM, "aligned_alloc");
  madvise(data, size, MADV_HUGEPAGE);
  memset(data, 1, size);
  return static_cast<uint8_t*>(data);
}

// Where the pages go, in bytes from the start.
std::vector<size_t> RandomOffsets(size_t page_size, size_t count) {
  std::vector<size_t> offsets(count);
  for (size_t i = 0; i < count; ++i) offsets[i] = i * page_size;
  std::shuffle(offsets.begin(), offsets.end(), std::mt19937_64(1));
  return offsets;
}

void Copy(size_t page_size, size_t count, size_t total) {
  const uint8_t* from = Alloc(count * page_size);
  uint8_t* to = Alloc(count * page_size);
  std::vector<size_t> offsets = RandomOffsets(page_size, count);
  double start = Now();
  for (size_t done = 0, i = 0; done < total; ++done) {
    memcpy(to + offsets[i], from + i * page_size, page_size);
    // The compiler may not think that nobody reads what was copied.
    asm volatile("" : : "r"(to) : "memory");
    if (++i == count) i = 0;
  }
  printf("seconds %.9f\n", Now() - start);
}

struct Endpoint {
  struct fi_info* info = nullptr;
  struct fid_fabric* fabric = nullptr;
  struct fid_domain* domain = nullptr;
  struct fid_av* av = nullptr;
  struct fid_cq* cq = nullptr;
  struct fid_ep* ep = nullptr;
  struct fid_mr* mr = nullptr;

  // Asks for what 7_queue asks for.
  void Open(uint64_t op_flags) {
    struct fi_info* hints = fi_allocinfo();
    hints->caps = FI_MSG | FI_RMA;
    hints->ep_attr->type = FI_EP_RDM;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->domain_attr->mr_mode =
        FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->tx_attr->op_flags = op_flags;
    Check(fi_getinfo(FI_VERSION(1, 17), nullptr, nullptr, 0, hints, &info),
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

  // Returns how many operations have completed.
  size_t Poll(struct fi_cq_data_entry* entries) {
    ssize_t ret = fi_cq_read(cq, entries, kReadCount);
    if (ret >= 0) return static_cast<size_t>(ret);
    if (ret != -FI_EAGAIN) Check(ret, "fi_cq_read");
    return 0;
  }
};

void RunTarget(size_t page_size, size_t count) {
  Endpoint endpoint;
  endpoint.Open(0);
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

  struct fi_cq_data_entry entries[kReadCount];
  while (endpoint.Poll(entries) == 0) continue;
  // The confirmation may still have to leave.
  for (double end = Now() + 0.02; Now() < end;) endpoint.Poll(entries);
}

void Write(size_t page_size, size_t count, size_t total, uint64_t op_flags,
           const std::string& address_hex, uint64_t place, uint64_t key) {
  Endpoint endpoint;
  endpoint.Open(op_flags);
  uint8_t* from = Alloc(count * page_size);
  endpoint.Register(from, count * page_size, FI_WRITE);
  std::vector<uint8_t> address;
  for (size_t i = 0; i + 1 < address_hex.size(); i += 2) {
    address.push_back(
        static_cast<uint8_t>(stoul(address_hex.substr(i, 2), nullptr, 16)));
  }
  fi_addr_t target;
  if (fi_av_insert(endpoint.av, address.data(), 1, &target, 0, nullptr) != 1) {
    Check(-FI_EINVAL, "fi_av_insert");
  }
  std::vector<size_t> offsets = RandomOffsets(page_size, count);
  void* desc = fi_mr_desc(endpoint.mr);
  struct fid_ep* ep = endpoint.ep;
  struct fi_cq_data_entry entries[kReadCount];
  // All that is kept of an operation: where the provider may keep its notes.
  std::vector<struct fi_context2> contexts(kMaxOutstanding);
  std::vector<void*> free_contexts;
  for (struct fi_context2& context : contexts) {
    free_contexts.push_back(&context);
  }

  // Posts WRITEs, and waits for all of them.
  auto Run = [&](size_t writes, bool last) {
    size_t posted = 0;
    size_t completed = 0;
    size_t i = 0;
    while (completed < writes) {
      for (size_t n = 0;
           n < kPostCount && posted < writes && !free_contexts.empty(); ++n) {
        void* context = free_contexts.back();
        ssize_t ret = last ? fi_writedata(ep, from, page_size, desc, 1, target,
                                          place, key, context)
                           : fi_write(ep, from + i * page_size, page_size, desc,
                                      target, place + offsets[i], key, context);
        if (ret == -FI_EAGAIN) break;
        Check(ret, "fi_write");
        free_contexts.pop_back();
        ++posted;
        if (++i == count) i = 0;
      }
      size_t n = endpoint.Poll(entries);
      for (size_t j = 0; j < n; ++j) {
        free_contexts.push_back(entries[j].op_context);
      }
      completed += n;
    }
  };
  Run(1, false);  // connects
  double start = Now();
  Run(total, false);
  double seconds = Now() - start;
  Run(1, true);  // ends the target
  printf("seconds %.9f\n", seconds);
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  std::vector<std::string> args(argv + 1, argv + argc);
  auto number = [&](size_t i) { return std::stoul(args.at(i)); };
  std::string mode = args.at(0);
  size_t count = 2 * number(2);
  if (mode == "copy") Copy(number(1), count, number(3));
  if (mode == "target") RunTarget(number(1), count);
  if (mode == "write") {
    Write(number(1), count, number(3),
          args.at(4) == "delivery" ? FI_DELIVERY_COMPLETE : 0, args.at(5),
          number(6), number(7));
  }
}
