// Tries what nobody sees of 10_lock from the outside, in one process and with
// its own code: a client that checks the ledger while somebody else ends a
// turn. It has READ a ledger that is not the valid one any more, and has to
// READ the one that is. Exits with 1 and a line if it does not. It also looks
// at a record of the hash table whose version is torn: between the WRITEs of
// 255 and 256, the bytes of both may read 0. And the version may be the next
// one, while all else is still as it was.
//
// Usage: inside_lock

// Everything but its main().
#define main LockMain
#include "../../src/10_lock.cpp"
#undef main

fi_ops_cq g_real_cq;
fi_ops_rma g_real_rma;
Session* g_server = nullptr;
SharedTable* g_table = nullptr;
size_t g_reads = 0;

// Reads the client's completions, and lets the server take part.
ssize_t ReadBoth(fid_cq* cq, void* entries, size_t count) {
  g_server->endpoint.PollCompletion();
  return g_real_cq.read(cq, entries, count);
}

// Before the first READ: somebody has changed the other ledger and made it the
// valid one, and somebody else already writes the one that was valid.
ssize_t ReadLate(fid_ep* ep, void* buf, size_t len, void* desc, fi_addr_t peer,
                 uint64_t addr, uint64_t key, void* context) {
  if (++g_reads == 1) {
    g_table->ledgers[1] = {.total = 5, .changes = {0, 5}};
    g_table->ledgers[0] = {.total = 7, .changes = {0, 6}};
    g_table->turn = Turn{.ticket = 2, .ledger = 1}.Word();
  }
  return g_real_rma.read(ep, buf, len, desc, peer, addr, key, context);
}

int main() {
  Record record = {};
  record.key = 1;
  record.version = 256;
  record.checksum = record.Checksum();
  Record torn = record;
  torn.version = 0;
  Record old = record;  // but for the version, which is the next one
  old.version = 257;
  if (!Record{}.IsValid() || !record.IsValid() || torn.IsValid() ||
      old.IsValid()) {
    printf("wrong: which records are valid\n");
    return 1;
  }
  Domain domain;
  SharedMemory memory(domain);
  g_table = memory.table;
  Session server(domain);
  g_server = &server;
  MemoryClient client(domain);
  Bookkeeper keeper{client};
  Endpoint& endpoint = client.session.endpoint;
  client.session.peer = endpoint.AddPeerAddress(server.endpoint.addr);
  client.joined.addr = memory.base;
  client.joined.rkey = fi_mr_key(memory.buf.mr);
  fi_ops_cq cq_ops = g_real_cq = *endpoint.cq.ptr->ops;
  cq_ops.read = ReadBoth;
  endpoint.cq.ptr->ops = &cq_ops;
  fi_ops_rma rma_ops = g_real_rma = *endpoint.ep.ptr->rma;
  rma_ops.read = ReadLate;
  endpoint.ep.ptr->rma = &rma_ops;
  g_table->ledgers[0] = {.total = 4, .changes = {0, 4}};
  g_table->turn = Turn{.ticket = 1, .ledger = 0}.Word();
  std::string wrong = keeper.Check();
  if (!wrong.empty()) {
    printf("wrong: %s\n", wrong.c_str());
    return 1;
  }
  printf("READs: %zu, total: %lu\n", g_reads, keeper.ledger.total);
  return keeper.ledger.total == 5 ? 0 : 1;
}
