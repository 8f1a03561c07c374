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
// Memory, domain and endpoint are 7_queue's: its code is included. The pages are read in
// order and written in a random order.
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

// Everything but its main().
#define main QueueMain
#include "../../src/7_queue.cpp"
#undef main

// The destinations of the pages, in bytes from the start.
std::vector<size_t> RandomOffsets(size_t page_size, size_t count) {
  std::vector<size_t> offsets(count);
  for (size_t i = 0; i < count; ++i) offsets[i] = i * page_size;
  std::shuffle(offsets.begin(), offsets.end(), std::mt19937_64(1));
  return offsets;
}

void RunTarget(size_t page_size, size_t count) {
  Domain domain(false);
  Buffer memory(domain, count * page_size, FI_REMOTE_WRITE | FI_RECV);
  Endpoint endpoint(domain);
  bool arrived = false;
  endpoint.on_imm_data = [&](uint32_t) { arrived = true; };
  bool virt_addr = domain.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
  printf("target %s %lu %lu\n", ToHex(endpoint.addr).c_str(),
         virt_addr ? reinterpret_cast<uint64_t>(memory.data.get()) : 0,
         fi_mr_key(memory.mr));
  while (!arrived && !g_interrupted) endpoint.PollCompletion();
  // The confirmation of the last WRITE may still have to leave.
  for (auto end = Clock::now() + 20ms; Clock::now() < end;) {
    endpoint.PollCompletion();
  }
}

struct Settings {
  uint64_t flags;   // of each WRITE
  size_t max_post;  // WRITEs between two readings of the completion queue
  size_t max_read;  // entries read at a time

  explicit Settings(const std::string& text) {
    char level[9];
    if (sscanf(text.c_str(), "%8[a-z],%zu,%zu", level, &max_post, &max_read) !=
        3) {
      throw std::invalid_argument(text);
    }
    flags = strcmp(level, "delivery") == 0 ? FI_DELIVERY_COMPLETE : 0;
  }
};

void Write(size_t page_size, size_t count, size_t total,
           const std::string& address_hex, uint64_t place, uint64_t key,
           const std::vector<Settings>& all_settings) {
  Domain domain(false);
  Buffer from(domain, count * page_size, FI_WRITE);
  Endpoint endpoint(domain);
  std::vector<size_t> offsets = RandomOffsets(page_size, count);
  // An operation is no more than this memory, which the provider may use while
  // the operation is in flight.
  std::vector<fi_context2> contexts(std::clamp<size_t>(
      kMaxOutstandingBytes / page_size, 2, kMaxOutstandingWrites));
  std::vector<void*> free_contexts;
  for (fi_context2& context : contexts) free_contexts.push_back(&context);

  iovec iov = {nullptr, page_size};
  fi_rma_iov rma_iov = {0, page_size, key};
  void* desc = fi_mr_desc(from.mr);
  fi_msg_rma msg = {};
  msg.msg_iov = &iov;
  msg.desc = &desc;
  msg.iov_count = 1;
  msg.addr = endpoint.AddPeerAddress(ParseAddress(address_hex));
  msg.rma_iov = &rma_iov;
  msg.rma_iov_count = 1;
  msg.data = 1;

  // Posts WRITEs and waits until all of them have completed.
  size_t i = 0;  // the next page
  auto Run = [&](size_t writes, uint64_t flags, const Settings& settings) {
    std::vector<fi_cq_data_entry> entries(settings.max_read);
    size_t posted = 0;
    size_t completed = 0;
    while (completed < writes) {
      for (size_t n = 0;
           n < settings.max_post && posted < writes && !free_contexts.empty();
           ++n) {
        iov.iov_base = &from.data[i * page_size];
        rma_iov.addr = place + offsets[i];
        msg.context = free_contexts.back();
        ssize_t ret = fi_writemsg(endpoint.ep, &msg, flags);
        if (ret == -FI_EAGAIN) break;
        FiCheck(ret, "fi_writemsg");
        free_contexts.pop_back();
        ++posted;
        if (++i == count) i = 0;
      }
      ssize_t n = fi_cq_read(endpoint.cq, entries.data(), entries.size());
      if (n == -FI_EAGAIN) continue;
      FiCheck(n, "fi_cq_read");
      for (ssize_t j = 0; j < n; ++j) {
        free_contexts.push_back(entries[j].op_context);
      }
      completed += size_t(n);
    }
  };
  const Settings& first = all_settings.at(0);
  Run(1, FI_DELIVERY_COMPLETE, first);  // connects
  for (const Settings& settings : all_settings) {
    Clock::time_point start = Clock::now();
    Run(total - 1, settings.flags, settings);
    Run(1, FI_DELIVERY_COMPLETE, settings);
    std::chrono::duration<double> seconds = Clock::now() - start;
    printf("seconds %.9f\n", seconds.count());
  }
  Run(1, FI_DELIVERY_COMPLETE | FI_REMOTE_CQ_DATA, first);  // ends the target
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  std::vector<std::string> args(argv + 1, argv + argc);
  auto number = [&](size_t i) { return std::stoul(args.at(i)); };
  try {
    if (args.at(0) == "target") {
      RunTarget(number(1), number(2));
    } else {
      Write(number(1), number(2), number(3), args.at(4), number(5), number(6),
            std::vector<Settings>(args.begin() + 7, args.end()));
    }
  } catch (const std::exception& e) {
    fprintf(stderr, "bench_loop: %s\n", e.what());
    return 1;
  }
}
