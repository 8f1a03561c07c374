// 2_verbs: the message of 2_first, and one WRITE behind it, in verbs, the
// interface of InfiniBand and RoCE adapters, without libfabric.
//
// The five steps are those of 2_first, to be read side by side. A queue pair
// has one peer, and each side has to be told of the other, so you carry a line
// both ways.

#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Ends the program.
[[noreturn]] void Fail(const char* what, const char* why) {
  fprintf(stderr, "error: %s: %s\n", what, why);
  exit(1);
}

// Ends the program if a call has failed: most return an error number then.
void Check(int error, const char* call) {
  if (error != 0) Fail(call, strerror(error));
}

// Ends the program if a call has made no object. Most set errno then.
void CheckMade(const void* object, const char* call) {
  if (object == nullptr) Fail(call, strerror(errno));
}

// Tells whether we take this address (GID) of a port: one of InfiniBand, or an
// IPv4 address of RoCE v2, whose packets travel in UDP.
bool IsReachable(const ibv_gid_entry& entry) {
  return entry.gid_type == IBV_GID_TYPE_IB ||
         (entry.gid_type == IBV_GID_TYPE_ROCE_V2 &&
          IN6_IS_ADDR_V4MAPPED(entry.gid.raw));
}

// Finds a port of this device that is up, and an address of it that we take.
bool FindAddress(ibv_context* context, ibv_port_attr* port,
                 ibv_gid_entry* local) {
  ibv_device_attr device;
  Check(ibv_query_device(context, &device), "ibv_query_device");
  for (int number = 1; number <= device.phys_port_cnt; ++number) {
    Check(ibv_query_port(context, number, port), "ibv_query_port");
    if (port->state != IBV_PORT_ACTIVE) continue;
    for (int i = 0; i < port->gid_tbl_len; ++i) {
      int error = ibv_query_gid_ex(context, number, i, local, 0);
      if (error == ENODATA) continue;  // an empty place
      Check(error, "ibv_query_gid_ex");
      if (IsReachable(*local)) return true;
    }
  }
  return false;
}

// Waits until the next operation has completed. Ends the program if it failed:
// its wr_id, which is ours to choose, is its name.
ibv_wc WaitForCompletion(ibv_cq* cq) {
  ibv_wc wc;
  int count;
  while ((count = ibv_poll_cq(cq, 1, &wc)) == 0) continue;
  if (count < 0) Fail("ibv_poll_cq", "no entry can be read");
  if (wc.status != IBV_WC_SUCCESS) {
    Fail(reinterpret_cast<const char*>(wc.wr_id), ibv_wc_status_str(wc.status));
  }
  return wc;
}

int main(int argc, char** argv) {
  bool server = argc == 1;
  setlinebuf(stdout);

  // 1. Ask: which device has a port that is up, with an address?
  int num_devices = 0;
  ibv_device** devices = ibv_get_device_list(&num_devices);
  const char* only = getenv("DEVICE");  // to choose one: DEVICE=mlx5_1
  ibv_context* context = nullptr;
  ibv_port_attr port;
  ibv_gid_entry local = {};  // our address, and the port that has it
  for (int i = 0; i < num_devices && context == nullptr; ++i) {
    const char* name = ibv_get_device_name(devices[i]);
    if (only != nullptr && strcmp(name, only) != 0) continue;
    if (devices[i]->transport_type != IBV_TRANSPORT_IB) continue;
    ibv_context* opened = ibv_open_device(devices[i]);
    CheckMade(opened, "ibv_open_device");
    if (FindAddress(opened, &port, &local)) {
      context = opened;
    } else {
      Check(ibv_close_device(opened), "ibv_close_device");
    }
  }
  if (context == nullptr) {
    Fail("no port is up, of InfiniBand or of RoCE with an IPv4 address",
         "chapters/appendix_setup.md makes one in software (\"Real verbs, "
         "without a card\")");
  }
  char gid[INET6_ADDRSTRLEN];
  inet_ntop(AF_INET6, local.gid.raw, gid, sizeof(gid));
  printf("device: %s, port: %u, GID %u: %s\n",
         ibv_get_device_name(context->device), local.port_num, local.gid_index,
         gid);

  // 2. The device is open. Make a protection domain in it.
  ibv_pd* pd = ibv_alloc_pd(context);
  CheckMade(pd, "ibv_alloc_pd");

  // 3. Make a queue pair, with a completion queue.
  // The completion queue says how our operations have ended. Room for four.
  ibv_cq* cq = ibv_create_cq(context, 4, nullptr, nullptr, 0);
  CheckMade(cq, "ibv_create_cq");
  ibv_qp_init_attr wanted = {};
  wanted.qp_type = IBV_QPT_RC;  // reliable, and connected to one peer
  wanted.send_cq = wanted.recv_cq = cq;
  wanted.cap.max_send_wr = wanted.cap.max_recv_wr = 2;    // how many at a time
  wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;  // pieces of memory
  ibv_qp* qp = ibv_create_qp(pd, &wanted);
  CheckMade(qp, "ibv_create_qp");
  ibv_qp_attr attr = {};
  attr.qp_state = IBV_QPS_INIT;  // it takes RECVs, but nothing arrives
  attr.port_num = local.port_num;
  attr.pkey_index = 0;  // the port's first partition
  attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  Check(ibv_modify_qp(qp, &attr,
                      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                          IBV_QP_ACCESS_FLAGS),
        "ibv_modify_qp to INIT");

  // 4. Register memory that the adapter may use, and our peer may WRITE to.
  static char buffer[2][65536];  // for messages, and for WRITEs of our peer
  ibv_mr* mr = ibv_reg_mr(pd, buffer, sizeof(buffer),
                          IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  CheckMade(mr, "ibv_reg_mr");
  ibv_sge sge = {uintptr_t(buffer[0]), sizeof(buffer[0]), mr->lkey};

  // 5. Post operations, and wait until they have completed.
  if (server) {
    ibv_recv_wr empty = {};  // for a message of no bytes
    empty.wr_id = uintptr_t("RECV");
    ibv_recv_wr recv = empty;
    recv.sg_list = &sge;
    recv.num_sge = 1;
    recv.next = &empty;  // one call posts both
    ibv_recv_wr* failed;
    Check(ibv_post_recv(qp, &recv, &failed), "ibv_post_recv");
    printf("Run the client with the following command:\n  %s ", argv[0]);
  } else {
    printf("Type this into the server's terminal:\n  ");
  }
  printf("%u,%u,%s,%" PRIx64 ",%x\n", qp->qp_num, port.lid, gid,
         uint64_t(uintptr_t(buffer[1])), mr->rkey);
  printf(server ? "Then type here what it prints:\n"
                : "Then press Enter here.\n");

  // Connect our queue pair to that of the peer, which may have others.
  char line[128] = {};
  if (!server) strncpy(line, argv[1], sizeof(line) - 1);
  if (server && fgets(line, sizeof(line), stdin) == nullptr) return 1;
  line[strcspn(line, "\n")] = '\0';
  uint64_t place;
  uint32_t key;
  if (sscanf(line, " %u,%hu,%45[^,],%" SCNx64 ",%x", &attr.dest_qp_num,
             &attr.ah_attr.dlid, gid, &place, &key) != 5 ||
      inet_pton(AF_INET6, gid, &attr.ah_attr.grh.dgid) != 1) {
    Fail(line, "that is not what the other side has printed");
  }
  attr.ah_attr.is_global = 1;  // packets carry GIDs, as RoCE needs
  attr.ah_attr.grh.sgid_index = local.gid_index;
  attr.ah_attr.grh.hop_limit = 64;
  attr.ah_attr.port_num = local.port_num;
  attr.path_mtu = IBV_MTU_1024;  // bytes in a packet, the same on both sides
  attr.rq_psn = 0;               // the number of the peer's first packet
  attr.max_dest_rd_atomic = 1;   // READs of the peer at a time
  attr.min_rnr_timer = 12;       // a peer that finds no RECV here waits 0.64 ms
  attr.qp_state = IBV_QPS_RTR;   // ready to receive
  Check(ibv_modify_qp(qp, &attr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
                          IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
        "ibv_modify_qp to RTR");
  attr.sq_psn = 0;              // the number of our first packet
  attr.timeout = 14;            // without an answer, we try again after 67 ms,
  attr.retry_cnt = 6;           // six times (Soft-RoCE takes 7 for "for ever"),
  attr.rnr_retry = 0;           // and not at all if the peer has no RECV
  attr.max_rd_atomic = 1;       // READs of ours at a time
  attr.qp_state = IBV_QPS_RTS;  // ready to send, too
  Check(ibv_modify_qp(qp, &attr,
                      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                          IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                          IBV_QP_MAX_QP_RD_ATOMIC),
        "ibv_modify_qp to RTS");

  if (server) {
    ibv_wc wc = WaitForCompletion(cq);
    printf("Received %u bytes: %.*s\n", wc.byte_len, int(wc.byte_len),
           buffer[0]);
    WaitForCompletion(cq);  // the message behind the WRITE
    printf("My memory: %.*s\n", int(sizeof(buffer[1])), buffer[1]);
    // Keep the queue pair: the adapter may still have to acknowledge the last
    // message, or to do so again if that packet is lost.
    printf("Press Enter when the client has ended.\n");
    getchar();
  } else {
    if (fgets(line, sizeof(line), stdin) == nullptr) return 1;  // Enter
    const char* text = argc > 2 ? argv[2] : "Hello, world!";
    sge.length = strnlen(text, sizeof(buffer[0]));
    memcpy(buffer[0], text, sge.length);
    ibv_send_wr send = {};
    send.wr_id = uintptr_t("SEND");
    send.opcode = IBV_WR_SEND;
    send.sg_list = &sge;
    send.num_sge = 1;
    send.send_flags = IBV_SEND_SIGNALED;  // we want a completion
    ibv_send_wr* failed;
    Check(ibv_post_send(qp, &send, &failed), "ibv_post_send");
    WaitForCompletion(cq);
    printf("Sent %u bytes.\n", sge.length);

    // The server takes no part in a WRITE. A message of no bytes behind it
    // tells the server that it is in place, and gives the client its buffer.
    ibv_send_wr write = send;
    write.wr_id = uintptr_t("WRITE");
    write.opcode = IBV_WR_RDMA_WRITE;
    write.wr.rdma.remote_addr = place;
    write.wr.rdma.rkey = key;
    write.send_flags = 0;  // no completion, unless it fails
    write.next = &send;
    send.num_sge = 0;
    Check(ibv_post_send(qp, &write, &failed), "ibv_post_send");
    WaitForCompletion(cq);
    printf("Wrote %u bytes.\n", sge.length);
  }

  // Close everything: the queue pair first, and each object before its domain.
  Check(ibv_destroy_qp(qp), "ibv_destroy_qp");
  Check(ibv_dereg_mr(mr), "ibv_dereg_mr");
  Check(ibv_destroy_cq(cq), "ibv_destroy_cq");
  Check(ibv_dealloc_pd(pd), "ibv_dealloc_pd");
  Check(ibv_close_device(context), "ibv_close_device");
  ibv_free_device_list(devices);
}
