// Tries what nobody sees of 14_strangers from the outside, in one process and with
// its own code. Exits with 1 and a line if it is not as it should be.
//
// Usage: inside_strangers CHECK
//   order     SENDs for which libfabric has no room arrive in their order
//   signal    an endpoint that is opened after a first signal leaves the second
//             one its effect: it ends this process
//   pages     the server makes one page at a time, and posts a few WRITEs at a
//             time, looking at others meanwhile
//   large     of the largest pages, two are on their way at a time
//   silence   the time in which a client waits for its pages is no silence
//   progress  no PROGRESS follows one that is still on its way
//   close     an endpoint is closed before the regions that it uses

#include <rdma/fabric.h>

#include <vector>

// What fi_close has closed, in that order: FI_CLASS_EP, FI_CLASS_MR ...
std::vector<size_t> g_closed;

int LoggingClose(struct fid* fid) {
  g_closed.push_back(fid->fclass);
  return fi_close(fid);
}

// Everything but its main().
#define fi_close LoggingClose
#define main QueueMain
#include "../../src/14_strangers.cpp"
#undef main

int Fail(const std::string& text) {
  printf("wrong: %s\n", text.c_str());
  return 1;
}

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
  Domain domain(GetInfo());
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
                     arrived += static_cast<char>(op.buf->data[op.offset]);
                   }});
  }
  for (size_t i = 0; i < sent.size(); ++i) {
    out.data[i] = static_cast<uint8_t>(sent[i]);
    sender.Post({.type = RdmaOpType::kSend,
                 .peer = peer,
                 .buf = &out,
                 .len = 1,
                 .offset = i,
                 .callback = [](const RdmaOp& op) { op.Check(); }});
  }
  for (Clock::time_point start = Clock::now();
       arrived.size() < sent.size() && Clock::now() - start < kSilenceLimit;) {
    sender.PollCompletion();
    receiver.PollCompletion();
  }
  printf("%s; no room: %zu times\n", arrived.c_str(), g_refused);
  return arrived == sent ? 0 : Fail("SENDs arrive in another order");
}

// ---- Signals ----

int CheckSignal() {
  InstallSignalHandlers();
  Domain domain(GetInfo());
  raise(SIGINT);
  Endpoint endpoint(domain);
  raise(SIGINT);
  return Fail("the second signal has done nothing");
}

// ---- A client and its server ----

// Both ends of a session that has just begun.
struct Pair {
  Domain domain{GetInfo()};
  size_t memory_left = kMaxTransfer;
  Mailbox listener{domain};
  Session client{domain};
  std::optional<ServedClient> state;  // the server's

  Pair() {
    client.peer = client.endpoint.AddPeerAddress(listener.endpoint.addr);
    client.nonce = 7;
    client.SendAddress(AppMessageType::kConnect);
    std::optional<Message> connect;
    Until([&] { return (connect = listener.Take()).has_value(); });
    state.emplace(domain, 1, ReadConnect(*connect, AppMessageType::kConnect),
                  memory_left);
    client.peer = client.endpoint.AddPeerAddress(state->session.endpoint.addr);
    // The ACCEPT has arrived, and the server knows it.
    Until([&] { return client.Take().has_value(); });
    Until([&] { return state->session.mailbox.unsent == 0; });
  }

  // Asks for pages, and waits until the server has seen that.
  void Ask(uint32_t num_pages, uint64_t page_size = 4096) {
    std::vector<uint32_t> page_idx(num_pages);
    std::iota(page_idx.begin(), page_idx.end(), 0);
    AppRandomFillMessage request = {};
    request.base.type = AppMessageType::kRandomFill;
    request.imm_data = 1;
    request.page_size = page_size;
    request.num_pages = num_pages;
    request.size = num_pages * request.page_size;
    request.total_repeat = 1;
    client.Send(request, {reinterpret_cast<const char*>(page_idx.data()),
                          num_pages * sizeof(uint32_t)});
    Until([&] { return state->total_write_ops > 0; });
  }

  // Polls until `done` returns true.
  void Until(const std::function<bool()>& done) {
    Clock::time_point start = Clock::now();
    while (!done()) {
      if (Clock::now() - start > kSilenceLimit) {
        throw std::runtime_error("waited for too long");
      }
      listener.endpoint.PollCompletion();
      client.endpoint.PollCompletion();
      if (state) state->Poll();
    }
  }
};

int CheckPages() {
  Pair pair;
  constexpr size_t kNumPages = 64;
  pair.Ask(kNumPages);
  size_t polls = 1;
  for (; pair.state->made_pages < kNumPages; ++polls) pair.state->Poll();
  printf("%zu pages in %zu polls\n", kNumPages, polls);
  if (polls < kNumPages) return Fail("several pages at a time");
  printf("%zu WRITEs\n", pair.state->posted_write_ops);
  return pair.state->posted_write_ops <= kWritesPerPoll
             ? 0
             : Fail("many WRITEs at a time");
}

int CheckLarge() {
  Pair pair;
  pair.Ask(3, kMaxPageSize);
  while (pair.state->made_pages < 3) pair.state->Poll();
  printf("in flight: %zu\n", pair.state->posted_write_ops);
  return pair.state->posted_write_ops == 2 ? 0 : Fail("not two at a time");
}

int CheckSilence() {
  Pair pair;
  pair.memory_left = 0;  // so the client has to wait
  pair.Ask(1);
  pair.state->session.endpoint.silent_since -= 1h;
  pair.state->reported_at -= 1h;  // and PROGRESS is due
  pair.state->Poll();
  pair.memory_left = kMaxTransfer;
  while (pair.state->posted_write_ops == 0) pair.state->Poll();
  return 0;
}

int CheckProgress() {
  Pair pair;
  pair.memory_left = 0;  // so the client has to wait
  pair.Ask(1);
  for (size_t i = 0; i < 3; ++i) {
    pair.state->reported_at -= 1h;
    pair.state->Report();
  }
  printf("on its way: %zu\n", pair.state->session.mailbox.unsent);
  return pair.state->session.mailbox.unsent == 1 ? 0
                                                 : Fail("PROGRESS piles up");
}

int CheckClose() {
  Pair pair;
  pair.Ask(1);
  if (!pair.state->source) return Fail("there are no pages");
  g_closed.clear();
  pair.state.reset();
  auto endpoint = std::find(g_closed.begin(), g_closed.end(), FI_CLASS_EP);
  auto region = std::find(g_closed.begin(), g_closed.end(), FI_CLASS_MR);
  printf("closed: %zu objects\n", g_closed.size());
  if (endpoint == g_closed.end() || region == g_closed.end()) {
    return Fail("not everything is closed");
  }
  return endpoint < region ? 0 : Fail("a region is closed first");
}

int main(int argc, char** argv) {
  std::string check = argc == 2 ? argv[1] : "";
  if (check == "order") return CheckOrder();
  if (check == "signal") return CheckSignal();
  if (check == "pages") return CheckPages();
  if (check == "large") return CheckLarge();
  if (check == "silence") return CheckSilence();
  if (check == "progress") return CheckProgress();
  if (check == "close") return CheckClose();
  return 2;
}
