// Tries what a callback that throws costs the completions that libfabric has
// returned together with its own: nothing. Posts SENDs and RECVs to itself, waits
// until they have completed, and reads all of them at once. Exits with 1 and a line
// if a callback was left out, or if nobody heard of the exception.
//
// Usage: callbacks

// Everything but its main().
#define main QueueMain
#include "../../src/14_strangers.cpp"
#undef main

int main() {
  Domain domain(GetInfo());
  Buffer buf(domain, 4096, FI_SEND | FI_RECV);
  Endpoint endpoint(domain);
  fi_addr_t self = endpoint.AddPeerAddress(endpoint.addr);
  constexpr size_t kCount = kCompletionQueueReadCount / 2;
  size_t called = 0;
  auto throw_first = [&called](const RdmaOp& op) {
    op.Check();
    if (++called == 1) throw std::runtime_error("the first callback");
  };
  for (RdmaOpType type : {RdmaOpType::kRecv, RdmaOpType::kSend}) {
    for (size_t i = 0; i < kCount; ++i) {
      endpoint.Post({.type = type,
                     .peer = type == RdmaOpType::kSend ? self : FI_ADDR_UNSPEC,
                     .buf = &buf,
                     .len = 1,
                     .callback = throw_first});
    }
  }
  // To read no entries only makes the provider work.
  for (Clock::time_point start = Clock::now(); Clock::now() - start < 300ms;) {
    fi_cq_read(endpoint.cq, nullptr, 0);
    endpoint.ProgressPendingOps();
  }
  bool thrown = false;
  try {
    endpoint.PollCompletion();
  } catch (const std::runtime_error& e) {
    thrown = std::string(e.what()) == "the first callback";
  }
  printf("%s; callbacks called: %zu of %zu\n",
         thrown ? "thrown" : "wrong: nothing was thrown", called, 2 * kCount);
  return thrown && called == 2 * kCount ? 0 : 1;
}
