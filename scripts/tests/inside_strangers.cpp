// Tries what nobody sees of 14_strangers from the outside, in one process and with
// its own code. Exits with 1 and a line if it is not as it should be.
//
// Usage: inside_strangers CHECK
//   pages    the server makes one page a round, and looks at others meanwhile
//   silence  a client that waits for memory is not silent as long as it takes
//            our messages
//   leave    a client that is refused keeps its place until its REFUSED has
//            left, but not for long
//   line     one whose second in line is over is told so, once, and forgotten
//   renew    the endpoint that tells is closed after a while, or soon after it
//            has told many, and takes those with it to whom nothing has gone

// Everything but its main().
#define main StrangersMain
#include "../../src/14_strangers.cpp"
#undef main

#include "inside.h"

// ---- A client and its server ----

constexpr uint32_t kNonce = 7;

// Both ends of a session that has just begun, and whose client has asked.
struct Pair {
  Domain domain{false};
  size_t memory_left = kMaxTransfer;
  Session client{domain};
  ServedClient served{domain, 1, client.endpoint.addr, kNonce, memory_left};

  explicit Pair(uint32_t num_pages) {
    client.peer = client.endpoint.AddPeerAddress(served.session.endpoint.addr);
    client.nonce = kNonce;
    Until([&] { Poll(); }, [&] { return client.Take().has_value(); });
    std::vector<uint32_t> page_idx(num_pages);
    std::iota(page_idx.begin(), page_idx.end(), 0);
    AppRandomFillMessage request = {};
    request.page_size = kPageAlign;
    request.imm_data = 1;
    request.size = num_pages * kPageAlign;
    request.total_repeat = 1;
    client.Send(AppMessageType::kRandomFill,
                BytesOf(&request, sizeof(request)) +
                    BytesOf(page_idx.data(), num_pages * sizeof(uint32_t)));
  }

  void Poll() {
    client.Poll();
    served.Poll();
  }
};

int CheckPages() {
  constexpr size_t kNumPages = 64;
  Pair pair(kNumPages);
  Until([&] { pair.Poll(); }, [&] { return pair.served.made_pages > 0; });
  size_t polls = 1;
  for (; pair.served.made_pages < kNumPages; ++polls) pair.served.Poll();
  printf("%zu pages in %zu polls\n", kNumPages, polls);
  if (polls < kNumPages) return Fail("several pages at a time");
  size_t left = kMaxTransfer - kNumPages * kPageAlign;
  return pair.memory_left == left ? 0 : Fail("the memory is not counted");
}

int CheckWaiting() {
  Pair pair(1);
  pair.memory_left = 0;  // others have it
  Until([&] { pair.Poll(); }, [&] { return pair.served.total_write_ops > 0; });
  for (int i = 0; i < 3; ++i) {
    Until([&] { pair.Poll(); }, [&] { return pair.served.session.HasSent(); });
    pair.served.session.heard_at -= kSilenceLimit - 1s;
    pair.served.reported_at -= 1h;  // so PROGRESS is due
    pair.served.Poll();
    pair.served.session.heard_at -= kSilenceLimit - 1s;
    pair.served.Poll();  // throws if that adds up
  }
  if (pair.served.source) return Fail("it has got memory that others have");
  // One that does not take our messages, on the other hand, is silent.
  pair.served.session.send_bufs.front().in_flight += 1;
  pair.served.session.heard_at -= 1h;
  pair.served.reported_at -= 1h;
  try {
    pair.served.Poll();
  } catch (const std::runtime_error&) {
    pair.served.session.send_bufs.front().in_flight -= 1;
    return 0;
  }
  return Fail("a client that has gone is not silent");
}

int CheckLeave() {
  Pair pair(1);
  ServedClient& served = pair.served;
  pair.client.Send(AppMessageType::kWait);  // which no client says
  Until(
      [&] {
        try {
          pair.Poll();
        } catch (const std::runtime_error&) {
          served.done = true;
        }
      },
      [&] { return served.done; });
  size_t& in_flight = served.session.send_bufs.front().in_flight;
  in_flight += 1;  // the client does not take it
  bool stays = !served.HasLeft();
  served.leave_at -= kLeaveGrace;
  bool leaves = served.HasLeft();
  in_flight -= 1;
  if (!stays) return Fail("the REFUSED has no time to leave");
  return leaves ? 0 : Fail("one that has gone keeps its place");
}

// ---- The line ----

// One who asks a listener.
struct Visit {
  Domain domain{false};
  Session listener{domain};
  WaitingLine line{listener};
  Session client{domain};

  Visit() {
    client.peer = client.endpoint.AddPeerAddress(listener.endpoint.addr);
    client.nonce = kNonce;
    client.Send(AppMessageType::kConnect, client.endpoint.addr);
    Until([&] { Poll(); }, [&] { return !line.visitors.empty(); });
  }

  void Poll() {
    client.Poll();
    listener.Poll();
    line.AddAll();
    line.TellAll();
  }
};

int CheckLine() {
  Visit visit;
  WaitingLine& line = visit.line;
  if (line.First() != line.visitors.begin()) return Fail("it has no place");
  if (line.endpoint) return Fail("an endpoint for nobody");
  line.visitors.front().tell_at = Clock::now();
  if (line.First() != line.visitors.end()) return Fail("its second is over");
  std::optional<Message> told;
  Until([&] { visit.Poll(); },
        [&] { return (told = visit.client.Take()).has_value(); });
  if (told->header.type != AppMessageType::kWait) return Fail("not a WAIT");
  for (int i = 0; i < 100; ++i) visit.Poll();
  if (!visit.client.inbox.empty()) return Fail("it is told twice");
  return line.visitors.empty() ? 0 : Fail("it is not forgotten");
}

int CheckRenew() {
  Visit visit;
  WaitingLine& line = visit.line;
  line.visitors.front().tell_at = Clock::now();
  Until([&] { visit.Poll(); }, [&] { return line.endpoint.has_value(); });
  Clock::duration left = line.tell_until - Clock::now();
  if (left > kTellPeriod || left < kTellPeriod / 2) return Fail("its time");
  // It is full soon: whoever comes then has to wait for the next one.
  line.num_contacts = kMaxContacts - 1;
  std::string addr = visit.client.endpoint.addr;
  line.visitors.push_back({addr, kNonce, Clock::now()});
  line.visitors.push_back({addr, kNonce, Clock::now()});
  line.TellAll();
  if (line.tell_until > Clock::now() + kTellGrace)
    return Fail("full, and open");
  if (line.visitors.empty() || line.visitors.back().contact != FI_ADDR_UNSPEC) {
    return Fail("more contacts than there is room for");
  }
  line.tell_until = Clock::now() - 2 * kTellGrace;
  line.TellAll();  // closes it, and opens another
  if (line.num_contacts != 1) return Fail("not a new endpoint");
  line.visitors.clear();
  line.tell_until = Clock::now() - 2 * kTellGrace;
  line.TellAll();
  return line.endpoint ? Fail("an endpoint for nobody") : 0;
}

int main(int argc, char** argv) {
  std::string check = argc == 2 ? argv[1] : "";
  if (check == "pages") return CheckPages();
  if (check == "silence") return CheckWaiting();
  if (check == "leave") return CheckLeave();
  if (check == "line") return CheckLine();
  if (check == "renew") return CheckRenew();
  return 2;
}
