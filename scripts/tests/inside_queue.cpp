// Tries what nobody sees of 7_queue from the outside, in one process and with
// its own code. Exits with 1 and a line if it is not as it should be.
//
// Usage: inside_queue CHECK
//   order     SENDs for which libfabric has no room arrive in their order, and
//             each has its buffer until it has completed
//   signal    an endpoint that is opened after a first signal leaves the second
//             one its effect: it ends this process; a SIGPIPE is no second one
//   flight    a bounded number of bytes is in flight, and the last WRITE waits
//             for all others; no PROGRESS follows one that is still on its way
//   room      where libfabric has no room for a WRITE, only one waits for that

// Everything but its main().
#define main QueueMain
#include "../../src/7_queue.cpp"
#undef main

#include "inside.h"

// ---- A network that has no room ----

fi_ops_msg g_real_msg;
size_t g_refused = 0;

// Has room for every second SEND, and not for the first few.
ssize_t SendSeldom(fid_ep* ep, const void* data, size_t len, void* desc,
                   fi_addr_t peer, void* context) {
  static size_t calls = 0;
  if (++calls > 4 && calls % 2 == 0) {
    return g_real_msg.send(ep, data, len, desc, peer, context);
  }
  ++g_refused;
  return -FI_EAGAIN;
}

int CheckOrder() {
  Domain domain(false);
  Buffer in(domain, 4096, FI_RECV);
  Buffer out(domain, 4096, FI_SEND);
  Endpoint receiver(domain);
  Endpoint sender(domain);
  fi_addr_t peer = sender.AddPeerAddress(receiver.addr);
  fi_ops_msg seldom = g_real_msg = *sender.ep->msg;
  seldom.send = SendSeldom;
  sender.ep->msg = &seldom;

  const std::string sent = "01234567";
  std::string arrived;
  for (size_t i = 0; i < sent.size(); ++i) {
    receiver.Post({.type = RdmaOpType::kRecv,
                   .buf = &in,
                   .len = 1,
                   .offset = i,
                   .callback = [&](const RdmaOp& op) {
                     op.Check();
                     arrived += op.buf->data[op.offset];
                   }});
  }
  for (size_t i = 0; i < sent.size(); ++i) {
    out.data[i] = sent[i];
    sender.Post({.type = RdmaOpType::kSend,
                 .peer = peer,
                 .buf = &out,
                 .len = 1,
                 .offset = i,
                 .callback = [](const RdmaOp& op) { op.Check(); }});
  }
  if (out.in_flight != sent.size()) return Fail("one that waits has no buffer");
  Until(
      [&] {
        sender.PollCompletion();
        receiver.PollCompletion();
      },
      [&] { return arrived.size() == sent.size() && out.in_flight == 0; });
  printf("%s; no room: %zu times\n", arrived.c_str(), g_refused);
  if (in.in_flight != 0) return Fail("a RECV keeps its buffer");
  return arrived == sent ? 0 : Fail("SENDs arrive in another order");
}

// ---- Signals ----

int CheckSignal() {
  Domain domain(false);
  Endpoint first(domain);
  raise(SIGINT);
  raise(SIGPIPE);
  Endpoint second(domain);
  raise(SIGINT);
  return Fail("the second signal has done nothing");
}

// ---- A client and its server ----

// Both ends of a session.
struct Pair {
  Domain domain{false};
  Session client{domain};
  Buffer memory{domain, 32 * kMaxPageSize, FI_REMOTE_WRITE | FI_RECV};
  std::optional<ServedClient> served;

  // Opens the session.
  Pair() {
    served.emplace(domain, 1, client.endpoint.addr);
    Until([this] { return client.Take() && served->session.HasSent(); });
    client.peer = client.endpoint.AddPeerAddress(served->session.endpoint.addr);
  }

  // Asks for pages, and waits until the server has seen that.
  void Ask(uint32_t num_pages) {
    AppRandomFillMessage request = {};
    if (domain.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) {
      request.addr = reinterpret_cast<uint64_t>(memory.data.get());
    }
    request.size = memory.size;
    request.rkey = fi_mr_key(memory.mr);
    request.page_size = kMaxPageSize;
    request.imm_data = 1;
    request.total_repeat = 1;
    std::vector<uint32_t> page_idx(num_pages);
    client.Send(AppMessageType::kRandomFill,
                BytesOf(&request, sizeof(request)) +
                    BytesOf(page_idx.data(), num_pages * sizeof(uint32_t)));
    Until([this] { return served->Busy(); });
  }

  // Polls until `done` returns true.
  void Until(const std::function<bool()>& done) {
    ::Until(
        [this] {
          client.Poll();
          if (served) served->Poll();
        },
        done);
  }
};

// Counts on a provider that keeps WRITEs in flight for longer than a moment, as
// tcp does.
int CheckFlight() {
  Pair pair;
  constexpr size_t kNumPages = 20;
  bool arrived = false;
  pair.client.endpoint.on_imm_data = [&](uint32_t) { arrived = true; };
  pair.Ask(kNumPages);
  ServedClient& served = *pair.served;
  for (size_t i = 0; i < 3; ++i) {
    served.reported_at -= 1h;
    served.Report();
  }
  size_t progress = served.session.send_bufs.size();
  size_t most = 0;
  size_t with_last = 0;
  pair.Until([&] {
    most = std::max(most, served.source->in_flight);
    if (served.posted_write_ops == kNumPages) {
      with_last = std::max(with_last, served.source->in_flight);
    }
    return arrived;
  });
  printf("in flight: %zu, with the last one %zu\n", most, with_last);
  if (progress != 1) return Fail("PROGRESS piles up");
  if (most > kMaxOutstandingBytes / kMaxPageSize) return Fail("too much");
  return with_last <= 1 ? 0 : Fail("the last one has not waited");
}

int CheckRoom() {
  static fi_ops_rma full;  // as long as the endpoint
  Pair pair;
  Endpoint& endpoint = pair.served->session.endpoint;
  full = *endpoint.ep->rma;
  full.write = [](fid_ep*, const void*, size_t, void*, fi_addr_t, uint64_t,
                  uint64_t, void*) -> ssize_t { return -FI_EAGAIN; };
  endpoint.ep->rma = &full;
  pair.Ask(8);
  for (size_t i = 0; i < 8; ++i) pair.served->Poll();
  auto waiting = std::count_if(
      endpoint.pending_ops.begin(), endpoint.pending_ops.end(),
      [](const RdmaOp* op) { return op->type == RdmaOpType::kWrite; });
  printf("waiting: %td\n", waiting);
  return waiting == 1 ? 0 : Fail("not one");
}

int main(int argc, char** argv) {
  std::string check = argc == 2 ? argv[1] : "";
  if (check == "order") return CheckOrder();
  if (check == "signal") return CheckSignal();
  if (check == "flight") return CheckFlight();
  if (check == "room") return CheckRoom();
  return 2;
}
