// Races in pairs: programs of a few lines, each of which breaks one rule about who owns
// which memory when, and its twin, which keeps it. They judge the model: it names the
// first of each pair, and nothing in the second.
//
// Usage: races NAME wrong|right    runs one, in two or three processes
//
// The kinds of races are those that a list of such programs for one-sided operations of
// MPI has (RMARaceBench), as far as there is one here, and those of this tutorial.
//
// Three sides know each other's addresses and keys from the beginning: this is not what
// they are about. Whatever they say afterwards, they say with libfabric.

#include <fcntl.h>
#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <set>
#include <string>
#include <vector>

constexpr size_t kPage = 4096, kMemory = 64 * kPage, kRecvs = 8;
constexpr int kSides = 3;

void Check(ssize_t ret, const char* what) {
  if (ret >= 0) return;
  fprintf(stderr, "error: %s: %s\n", what, fi_strerror(static_cast<int>(-ret)));
  _exit(1);
}

// What each side tells the others before it begins.
struct Known {
  std::atomic<bool> ready;
  std::atomic<bool> done;
  bool absent;
  char name[256];
  uint64_t key, base;
};
Known* g_known;

char* Pages(size_t size) {
  return static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1,
                                 0));
}

// One side: memory that the others may READ and WRITE, memory of its own, and RECVs.
struct Side {
  int me;
  struct fi_info* info = nullptr;
  struct fid_fabric* fabric = nullptr;
  struct fid_domain* domain = nullptr;
  struct fid_cq* cq = nullptr;
  struct fid_eq* eq = nullptr;
  struct fid_av* av = nullptr;
  struct fid_ep* ep = nullptr;
  struct fid_mr *memory_mr = nullptr, *own_mr = nullptr, *recv_mr = nullptr;
  char* memory = Pages(kMemory);
  char* own = Pages(kMemory);
  char* recvs = Pages(kRecvs * kPage);
  fi_addr_t peers[kSides];
  std::multiset<void*> completed;
  std::vector<uint64_t> numbers;
  std::vector<std::string> messages;
  std::vector<char*> taken;  // RECVs to be posted again
  char tags[64];             // contexts

  explicit Side(int number) : me(number) {
    struct fi_info* hints = fi_allocinfo();
    hints->caps = FI_MSG | FI_RMA | FI_ATOMIC;
    hints->ep_attr->type = FI_EP_RDM;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->domain_attr->mr_mode =
        FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
    Check(fi_getinfo(FI_VERSION(1, 17), nullptr, nullptr, 0, hints, &info),
          "fi_getinfo");
    Check(fi_fabric(info->fabric_attr, &fabric, nullptr), "fi_fabric");
    Check(fi_domain(fabric, info, &domain, nullptr), "fi_domain");
    struct fi_cq_attr cq_attr = {};
    cq_attr.format = FI_CQ_FORMAT_DATA;
    Check(fi_cq_open(domain, &cq_attr, &cq, nullptr), "fi_cq_open");
    struct fi_eq_attr eq_attr = {};
    Check(fi_eq_open(fabric, &eq_attr, &eq, nullptr), "fi_eq_open");
    struct fi_av_attr av_attr = {};
    Check(fi_av_open(domain, &av_attr, &av, nullptr), "fi_av_open");
    Check(fi_endpoint(domain, info, &ep, nullptr), "fi_endpoint");
    Check(fi_ep_bind(ep, &eq->fid, 0), "fi_ep_bind");
    Check(fi_ep_bind(ep, &av->fid, 0), "fi_ep_bind");
    Check(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
    Check(fi_enable(ep), "fi_enable");
    memory_mr = Register(memory, kMemory);
    own_mr = Register(own, kMemory);
    recv_mr = Register(recvs, kRecvs * kPage);
    Known& known = g_known[me];
    size_t size = sizeof(known.name);
    Check(fi_getname(&ep->fid, known.name, &size), "fi_getname");
    known.key = fi_mr_key(memory_mr);
    bool virtual_addresses = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
    known.base = virtual_addresses ? reinterpret_cast<uint64_t>(memory) : 0;
    known.ready = true;
    for (int i = 0; i < kSides; ++i) {
      if (g_known[i].absent) continue;
      while (!g_known[i].ready) usleep(1000);
      Check(fi_av_insert(av, g_known[i].name, 1, &peers[i], 0, nullptr) - 1,
            "fi_av_insert");
    }
  }

  struct fid_mr* Register(void* data, size_t size) {
    static uint64_t key = static_cast<uint64_t>(getpid()) << 8;
    struct fid_mr* mr;
    Check(fi_mr_reg(domain, data, size,
                    FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ |
                        FI_REMOTE_WRITE,
                    0, ++key, 0, &mr, nullptr),
          "fi_mr_reg");
    return mr;
  }

  // Calls until there is room.
  template <typename Call>
  void Retry(const char* what, Call call) {
    ssize_t ret;
    while ((ret = call()) == -FI_EAGAIN) Poll();
    Check(ret, what);
  }

  void Poll() {
    struct fi_cq_data_entry entry;
    ssize_t ret = fi_cq_read(cq, &entry, 1);
    if (ret == -FI_EAGAIN) return;
    if (ret == -FI_EAVAIL) {
      struct fi_cq_err_entry error = {};
      fi_cq_readerr(cq, &error, 0);
      completed.insert(error.op_context);
      return;
    }
    Check(ret, "fi_cq_read");
    if (entry.flags & FI_RECV) {
      auto* at = static_cast<char*>(entry.op_context);
      messages.emplace_back(at, entry.len);
      taken.push_back(at);
    } else if (entry.flags & FI_REMOTE_CQ_DATA) {
      numbers.push_back(entry.data);
    } else {
      completed.insert(entry.op_context);
    }
  }

  // ---- What a case is made of ----

  void PostRecv(char* at, size_t size = kPage) {
    Retry("fi_recv", [&] {
      return fi_recv(ep, at, size, fi_mr_desc(recv_mr), FI_ADDR_UNSPEC, at);
    });
  }
  void PostRecvs() {
    for (size_t i = 0; i < kRecvs; ++i) PostRecv(recvs + i * kPage);
  }
  void* Tag(int tag) { return &tags[tag]; }
  void PostSend(int to, const void* data, size_t size, void* context) {
    Retry("fi_send", [&] {
      return fi_send(ep, data, size, fi_mr_desc(own_mr), peers[to], context);
    });
  }
  // A message in the last page of our own memory, and its completion.
  void Say(int to, const std::string& text) {
    memcpy(own + kMemory - kPage, text.data(), text.size());
    PostSend(to, own + kMemory - kPage, text.size(), Tag(63));
    Wait(Tag(63));
  }
  void PostWrite(int to, size_t from, size_t size, size_t at, void* context) {
    Retry("fi_write", [&] {
      return fi_write(ep, own + from, size, fi_mr_desc(own_mr), peers[to],
                      g_known[to].base + at, g_known[to].key, context);
    });
  }
  void PostWriteNumber(int to, size_t from, size_t size, size_t at,
                       uint64_t number, void* context) {
    Retry("fi_writedata", [&] {
      return fi_writedata(ep, own + from, size, fi_mr_desc(own_mr), number,
                          peers[to], g_known[to].base + at, g_known[to].key,
                          context);
    });
  }
  void PostRead(int from, size_t to, size_t size, size_t at, void* context) {
    Retry("fi_read", [&] {
      return fi_read(ep, own + to, size, fi_mr_desc(own_mr), peers[from],
                     g_known[from].base + at, g_known[from].key, context);
    });
  }
  // Adds one to a word.
  void PostAdd(int to, size_t at, void* context) {
    auto* one = reinterpret_cast<uint64_t*>(own + kMemory - 2 * kPage);
    *one = 1;
    Retry("fi_fetch_atomic", [&] {
      return fi_fetch_atomic(ep, one, 1, fi_mr_desc(own_mr),
                             own + kMemory - 3 * kPage, fi_mr_desc(own_mr),
                             peers[to], g_known[to].base + at, g_known[to].key,
                             FI_UINT64, FI_SUM, context);
    });
  }

  void Wait(void* context) {
    while (!completed.contains(context)) Poll();
    completed.erase(completed.find(context));
  }
  std::string Hear() {
    while (messages.empty()) Poll();
    std::string text = messages.front();
    messages.erase(messages.begin());
    return text;
  }
  uint64_t HearNumber() {
    while (numbers.empty()) Poll();
    uint64_t number = numbers.front();
    numbers.erase(numbers.begin());
    return number;
  }
  void PollFor(int ms) {
    for (int i = 0; i < ms; ++i) {
      for (int k = 0; k < 20; ++k) Poll();
      usleep(1000);
    }
  }

  // Stays until all are through.
  void End() {
    g_known[me].done = true;
    for (int i = 0; i < kSides; ++i) {
      while (!g_known[i].absent && !g_known[i].done) PollFor(1);
    }
    PollFor(20);
    fi_close(&ep->fid);
    for (struct fid_mr* mr : {memory_mr, own_mr, recv_mr}) {
      if (mr) fi_close(&mr->fid);
    }
    fi_close(&av->fid);
    fi_close(&cq->fid);
    fi_close(&eq->fid);
    fi_close(&domain->fid);
    fi_close(&fabric->fid);
  }
};

// A touch that no compiler leaves out.
void Store(char* at, char value) { *static_cast<volatile char*>(at) = value; }

int TemporaryFile() {
  FILE* file = tmpfile();
  if (file == nullptr) _exit(1);
  std::vector<char> bytes(kMemory, 'f');
  if (pwrite(fileno(file), bytes.data(), bytes.size(), 0) < 0) _exit(1);
  return fileno(file);
}

using Part = std::function<void(Side&, bool wrong)>;
struct Case {
  const char *name, *rule;
  Part owner, peer, other = {};  // sides 0, 1 and 2
};

const Part kNothing = [](Side&, bool) {};
// Takes messages until the peer says so.
const Part kListens = [](Side& s, bool) {
  while (s.Hear() != "end") {
  }
};

// Posts something with this context.
using Posting = std::function<void(Side&, void* context)>;
Posting Writes(size_t from, size_t size, size_t at) {
  return
      [=](Side& s, void* context) { s.PostWrite(0, from, size, at, context); };
}
Posting Reads(size_t to, size_t size, size_t at) {
  return [=](Side& s, void* context) { s.PostRead(0, to, size, at, context); };
}
const Posting kAdds = [](Side& s, void* context) { s.PostAdd(0, 0, context); };

// Stores into its own memory before what it has posted has completed, or after that.
Part StoresAround(Posting post, size_t at) {
  return [=](Side& s, bool wrong) {
    post(s, s.Tag(1));
    if (wrong) Store(s.own + at, 'x');
    s.Wait(s.Tag(1));
    Store(s.own + at, 'y');
    s.Say(0, "end");
  };
}

// Posts one after the other: the wrong one before the first has completed.
Part InOrder(Posting first, Posting second) {
  return [=](Side& s, bool wrong) {
    memset(s.own, 'a', kMemory / 2);
    first(s, s.Tag(1));
    if (!wrong) s.Wait(s.Tag(1));
    second(s, s.Tag(2));
    if (wrong) s.Wait(s.Tag(1));
    s.Wait(s.Tag(2));
    s.Say(0, "end");
  };
}

// Does something, and says so. The second of two waits until it is told that the first one
// is through, and the wrong one doesn't.
Part DoesFirst(Posting post) {
  return [=](Side& s, bool) {
    post(s, s.Tag(1));
    s.Wait(s.Tag(1));
    s.Say(0, "done");
  };
}
Part DoesSecond(Posting post) {
  return [=](Side& s, bool wrong) {
    memset(s.own, 'b', kPage);
    if (!wrong) s.Hear();
    post(s, s.Tag(1));
    s.Wait(s.Tag(1));
    s.Say(0, "done");
    if (wrong) s.Hear();
  };
}
// Tells the second that the first one is through. It must not come early to the wrong one: a
// post that finds no room looks for completions, and would have been told before it was
// posted.
const Part kTellsSecond = [](Side& s, bool wrong) {
  s.Hear();
  if (wrong) s.Hear();
  s.Say(2, "it is through");
  if (!wrong) s.Hear();
};

// Saves what comes with a number, twice, and says so: the wrong one, if it is hasty, before
// it has saved it.
Part Saves(bool hasty) {
  return [=](Side& s, bool wrong) {
    int file = TemporaryFile();
    for (int i = 0; i < 2; ++i) {
      s.HearNumber();
      if (wrong && hasty) s.Say(1, "credit");
      if (!hasty) s.PollFor(20);
      if (pwrite(file, s.memory, kPage, 0) < 0) _exit(1);
      if (!wrong || !hasty) s.Say(1, "credit");
    }
  };
}
// WRITEs to one place, with a number each time, and waits for the credit in between; the
// wrong one, if it is hasty, doesn't.
Part Fills(bool hasty) {
  return [=](Side& s, bool wrong) {
    for (int i = 0; i < 2; ++i) {
      s.own[0] = static_cast<char>('a' + i);
      s.PostWriteNumber(0, 0, kPage, 0, 7, s.Tag(1));
      s.Wait(s.Tag(1));
      if (!wrong || !hasty) s.Hear();
    }
    while (wrong && hasty && s.messages.size() < 2) s.Poll();
  };
}

// WRITEs, and says so: the wrong one before the WRITE has completed.
Part WritesAndSays(size_t size, const std::string& text) {
  return [=](Side& s, bool wrong) {
    memset(s.own, 'a', size);
    s.PostWrite(0, 0, size, 0, s.Tag(1));
    if (!wrong) s.Wait(s.Tag(1));
    s.Say(0, text);
    if (wrong) s.Wait(s.Tag(1));
  };
}
// WRITEs with a number.
const Part kWritesNumber = [](Side& s, bool) {
  s.PostWriteNumber(0, 0, kPage, 0, 7, s.Tag(1));
  s.Wait(s.Tag(1));
};

const std::vector<Case> kCases = {
    // ---- My own buffer, between post and completion ----
    {"send-store", "flight", kListens,
     StoresAround(
         [](Side& s, void* context) { s.PostSend(0, s.own, 2000, context); },
         10)},
    {"write-store", "flight", kListens,
     StoresAround(Writes(0, 2 * kPage, 0), 0)},
    {"recv-store", "flight",
     [](Side& s, bool wrong) {
       if (wrong) Store(s.recvs + 1000, 'x');  // behind a short message
       s.Hear();
       Store(s.taken[0] + 1000, 'y');
     },
     [](Side& s, bool) { s.Say(0, "short"); }},
    {"write-file-into", "flight", kListens,
     [](Side& s, bool wrong) {
       int file = TemporaryFile();
       s.PostWrite(0, 0, kPage, 0, s.Tag(1));
       if (wrong && pread(file, s.own, kPage, 0) < 0) _exit(1);
       s.Wait(s.Tag(1));
       if (!wrong && pread(file, s.own, kPage, 0) < 0) _exit(1);
       s.Say(0, "end");
     }},

    {"inject-store", "flight", kListens,
     [](Side& s, bool wrong) {
       s.Retry("a short message", [&] {  // the right call copies it
         return wrong ? fi_send(s.ep, s.own, 40, fi_mr_desc(s.own_mr),
                                s.peers[0], s.Tag(1))
                      : fi_inject(s.ep, s.own, 40, s.peers[0]);
       });
       Store(s.own + 10, 'x');
       if (wrong) s.Wait(s.Tag(1));
       s.PollFor(5);
       s.Say(0, "end");
     }},

    // ---- Memory that is lent ----
    {"number-first", "number", kListens,
     InOrder(Writes(0, 8 * kPage, 0),
             [](Side& s, void* context) {
               s.PostWriteNumber(0, 8 * kPage, kPage, 8 * kPage, 7, context);
             })},
    {"number-over-number", "credit",
     [](Side& s, bool wrong) {
       for (int i = 0; i < 3; ++i) {
         s.HearNumber();
         if (!wrong) s.Say(1, "credit");
       }
     },
     [](Side& s, bool wrong) {
       for (int i = 0; i < 3; ++i) {
         s.own[0] = static_cast<char>('a' + i);
         s.PostWriteNumber(0, 0, kPage, 0, 7, s.Tag(1));
         s.Wait(s.Tag(1));
         if (!wrong) s.Hear();
       }
     }},
    {"told-nobody", "told", [](Side& s, bool) { s.Hear(); },
     [](Side& s, bool wrong) {
       s.PostWrite(0, 0, 16 * kPage, 0, s.Tag(1));
       if (!wrong) s.Wait(s.Tag(1));
       s.PostSend(0, s.own + kMemory - kPage, 20, s.Tag(2));
       if (wrong) s.Wait(s.Tag(1));
       s.Wait(s.Tag(2));
     }},
    {"take-before-number", "lent",
     [](Side& s, bool wrong) {
       int file = TemporaryFile();
       if (!wrong) s.HearNumber();
       if (pwrite(file, s.memory, kPage, 0) < 0) _exit(1);
       if (wrong) s.HearNumber();
     },
     kWritesNumber},
    {"credit-before-saved", "lent", Saves(true), Fills(false)},
    {"no-credit", "credit", Saves(false), Fills(true)},

    // ---- Two operations, one place ----
    {"two-writes", "writers", kListens,
     InOrder(Writes(0, kPage, 0), Writes(kMemory / 2, kPage, 0))},
    {"two-writes-overlap", "writers", kListens,
     [](Side& s, bool wrong) {
       memset(s.own, 'a', 4 * kPage);
       memset(s.own + 4 * kPage, 'b', 4 * kPage);
       s.PostWrite(0, 0, 4 * kPage, 0, s.Tag(1));
       s.PostWrite(0, 4 * kPage, 4 * kPage, wrong ? 4 * kPage - 1 : 4 * kPage,
                   s.Tag(2));
       s.Wait(s.Tag(1));
       s.Wait(s.Tag(2));
       s.Say(0, "end");
     }},
    {"two-writers", "writers", kTellsSecond, DoesFirst(Writes(0, kPage, 0)),
     DoesSecond(Writes(0, kPage, 0))},
    {"told-too-early", "writers",  // as above, but the first one lies
     [](Side& s, bool) {
       s.Hear();
       s.Say(2, "it is free");
       s.Hear();
     },
     WritesAndSays(8 * kPage, "done"),
     [](Side& s, bool) {
       memset(s.own, 'b', 8 * kPage);
       s.Hear();
       s.PostWrite(0, 0, 8 * kPage, 0, s.Tag(1));
       s.Wait(s.Tag(1));
       s.Say(0, "done");
     }},
    {"read-behind-write", "lent", kListens,
     InOrder(Writes(0, kPage, 0), Reads(kPage, kPage, 0))},
    {"read-what-is-written", "lent", kTellsSecond,
     DoesFirst(Writes(0, kPage, 0)), DoesSecond(Reads(0, kPage, 0))},
    {"add-beside-write", "words", kListens, InOrder(Writes(0, 8, 0), kAdds)},

    {"unlock-first", "number",
     kListens,  // the sum says that it is there
     InOrder(Writes(0, 8 * kPage, kPage), kAdds)},

    // ---- Memory that goes ----
    {"region-closed", "region", kListens,
     [](Side& s, bool wrong) {
       struct fid_mr* mr = s.Register(s.own, kPage);
       s.PostWrite(0, 0, kPage, 0, s.Tag(1));
       if (!wrong) s.Wait(s.Tag(1));
       fi_close(&mr->fid);
       if (wrong) s.Wait(s.Tag(1));
       s.Say(0, "end");
     }},
    {"buffer-freed", "flight", kListens,
     [](Side& s, bool wrong) {
       auto* text = static_cast<char*>(malloc(3000));
       memset(text, 't', 3000);
       s.PostSend(0, text, 3000, s.Tag(1));
       if (!wrong) s.Wait(s.Tag(1));
       free(text);
       if (wrong) s.Wait(s.Tag(1));
       s.Say(0, "end");
     }},
    {"registered-unmapped", "region", kNothing,
     [](Side& s, bool wrong) {
       char* pages = Pages(16 * kPage);
       struct fid_mr* mr = s.Register(pages, 16 * kPage);
       if (wrong) munmap(pages, 16 * kPage);
       fi_close(&mr->fid);
       if (!wrong) munmap(pages, 16 * kPage);
     }},
    {"context-freed", "captured", kListens,
     [](Side& s, bool wrong) {
       auto* context = new fi_context2;
       s.PostSend(0, s.own, 64, context);
       if (!wrong) s.Wait(context);
       delete context;
       s.PollFor(5);
       s.Say(0, "end");
     }},

    // ---- Messages ----
    {"no-recv", "room",
     [](Side& s, bool wrong) {
       if (!wrong) s.PostRecv(s.own);
       while (s.messages.size() < kRecvs) s.Poll();
       s.PollFor(50);
     },
     [](Side& s, bool) {
       for (size_t i = 0; i < kRecvs; ++i) s.Say(0, "one of many");
       s.PostSend(0, s.own, 10,
                  s.Tag(1));  // one more than there are RECVs
       s.PollFor(20);
     }},
    {"short-recv", "room",
     [](Side& s, bool wrong) {
       for (size_t i = 0; i < kRecvs; ++i) s.Hear();
       s.PostRecv(s.taken[0], wrong ? 16 : kPage);
       s.Say(1, "go on");
       s.PollFor(50);
     },
     [](Side& s, bool) {
       for (size_t i = 0; i < kRecvs; ++i) s.Say(0, "short");
       s.Hear();
       s.PostSend(0, s.own, 1000, s.Tag(1));
       s.PollFor(50);
     }},
};

int main(int argc, char** argv) {
  const Case* found = nullptr;
  for (const Case& one : kCases) {
    if (argc == 3 && strcmp(argv[1], one.name) == 0) found = &one;
  }
  if (found == nullptr) {
    fprintf(stderr, "usage: races NAME wrong|right\n");
    return 2;
  }
  bool wrong = strcmp(argv[2], "wrong") == 0;
  g_known = static_cast<Known*>(mmap(nullptr, kSides * sizeof(Known),
                                     PROT_READ | PROT_WRITE,
                                     MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const Part* parts[kSides] = {&found->owner, &found->peer, &found->other};
  g_known[2].absent = !found->other;
  for (int i = 0; i < kSides; ++i) {
    if (!*parts[i] || fork() != 0) continue;
    alarm(20);
    Side side(i);
    side.PostRecvs();
    (*parts[i])(side, wrong);
    side.End();
    exit(0);
  }
  int failed = 0, status;
  while (wait(&status) > 0) failed |= status;
  return failed != 0;
}
