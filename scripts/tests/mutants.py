#!/usr/bin/env python3
"""Breaks one rule of the programs at a time, and checks that a test notices.

Usage: scripts/tests/mutants.py [NAME...]    (make mutants)
  NAME  the mutants to try; without any: all of them, which takes an hour
  JOBS  in the environment: how many to try at a time (as many as there are cores)

Each mutant is made in a copy of the repository, in build/mutants/. It is caught if
the tests that are named beside it fail. Exits with 1 if one survives.

No test of ours can see what huge pages are for, so they have no mutant.
"""

import concurrent.futures
import contextlib
import os
import queue
import re
import shutil
import subprocess
import sys
import time
import typing

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
COPIES = f"{ROOT}/build/mutants"
JOBS = int(os.environ.get("JOBS") or os.cpu_count() or 1)
# What the tests call each build, and how it is built.
BUILDS = {"build": ("plain", "-O1"),
          "build/sanitized": ("sanitized", "-O0 -g1 -fsanitize=address,undefined"),
          "build/cuda": ("gpu", "-O1")}  # the Makefile has options of its own for it


class Mutant(typing.NamedTuple):
    rule: str  # what is broken
    program: str
    old: str  # occurs once in the program
    new: str
    tests: str  # a file, and what to pass to pytest's -k


# Of 4 to 7: the rules that all programs keep.
MUTANTS = {
    "posted-again": Mutant(
        "a buffer in flight is not posted again", "4_hello",
        "    if (buf.in_flight > 0) continue;\n", "",
        "test_strict.py test_rules and 4_hello"),
    "kept": Mutant(
        "a RECV that has completed gives its buffer back", "4_hello",
        "    --done.buf->in_flight;\n", "",
        "test_messages.py test_at_the_door and 4_hello"),
    "kept-after-a-failure": Mutant(
        "so does one that has failed", "5_reverse",
        "    --done.buf->in_flight;\n", "    if (error.empty()) --done.buf->in_flight;\n",
        "test_messages.py test_at_the_door and 5_reverse"),
    "overwritten": Mutant(
        "the buffer of a SEND stays as it is until that has completed", "5_reverse",
        "if (send_buf.in_flight == 0 && !outbox.empty())", "if (!outbox.empty())",
        "test_strict.py test_late_sends and 5_reverse"),
    "overwritten-of-7": Mutant(
        "the buffer of a SEND stays as it is until that has completed", "7_queue",
        "while (i < send_bufs.size() && send_bufs[i].in_flight > 0) ++i;", "",
        "test_strict.py test_late_sends and 7_queue"),
    "eagain": Mutant(
        "what libfabric has no room for is posted again", "5_reverse",
        "if (ret == -FI_EAGAIN) return false;", "if (ret == -FI_EAGAIN) return true;",
        "test_programs.py test_data and 5_reverse and default"),
    "owner": Mutant(
        "everything is closed", "4_hello",
        "int ret = ptr != nullptr ? fi_close(&ptr->fid) : 0;", "int ret = 0;",
        "test_programs.py test_data and 4_hello and shm"),
    "endpoint-last": Mutant(
        "an endpoint is closed before the buffers that it uses", "5_reverse",
        "  std::deque<Buffer> recv_bufs;\n"
        "  Buffer send_buf;\n"
        "  std::deque<Message> inbox;   // that have arrived\n"
        "  std::deque<Message> outbox;  // that wait for send_buf\n"
        "  fi_addr_t peer = FI_ADDR_UNSPEC;\n"
        "  Clock::time_point heard_at = Clock::now();  // the last sign of life\n"
        "  Clock::time_point opened_at = heard_at;\n"
        "  Endpoint endpoint;  // the last, so that it is closed before it loses buffers\n",
        "  Endpoint endpoint;\n"
        "  std::deque<Buffer> recv_bufs;\n"
        "  Buffer send_buf;\n"
        "  std::deque<Message> inbox;   // that have arrived\n"
        "  std::deque<Message> outbox;  // that wait for send_buf\n"
        "  fi_addr_t peer = FI_ADDR_UNSPEC;\n"
        "  Clock::time_point heard_at = Clock::now();  // the last sign of life\n"
        "  Clock::time_point opened_at = heard_at;\n",
        "test_strict.py test_rules and 5_reverse"),
    "session-last": Mutant(
        "a session is closed before the pages that it writes", "7_queue",
        "  std::optional<Buffer> source;  // the pages, once the client has asked\n"
        "  Session session;\n",
        "  Session session;\n"
        "  std::optional<Buffer> source;  // the pages, once the client has asked\n",
        "test_inside.py test_server_of_a_queue and close and default"),
    "region-first": Mutant(
        "a region is closed before its memory is freed", "7_queue",
        "  Memory data;\n"
        "  Owned<fid_mr> mr;\n",
        "  Owned<fid_mr> mr;\n"
        "  Memory data;\n",
        "test_strict.py test_rules and 7_queue and not gpu"),
    "error": Mutant(
        "an error reaches the operation's own callback", "5_reverse",
        "    done.error = error;\n", "",
        "test_messages.py test_too_long and 5_reverse"),
    "bad-recv": Mutant(
        "a RECV that has failed is no message", "5_reverse",
        "    op.Check();  // throws if it was too long, for example\n", "",
        "test_messages.py test_too_long and 5_reverse"),
    "refused-post": Mutant(
        "an operation that libfabric refuses completes, with an error", "4_hello",
        "    if (ret != 0) Complete(op, 0, fi_strerror(int(-ret)));\n", "",
        "test_failures.py test_locked_memory and 4_hello"),
    "failed-write": Mutant(
        "a WRITE that has failed ends the session", "7_queue",
        "           op.Check();\n"
        "           session.heard_at", "           session.heard_at",
        "test_messages.py test_memory_that_is_not_there and 7_queue and default"),
    "nobodys-error": Mutant(
        "an error that belongs to no operation ends the session", "7_queue",
        "if (entry.op_context == nullptr || (entry.flags & FI_REMOTE_WRITE)) {",
        "if (entry.op_context == nullptr && entry.err == 0) {",
        "test_messages.py test_memory_that_is_not_there and 7_queue and shm"),
    "length": Mutant(
        "a message is no longer than its buffer", "4_hello",
        "done.len = std::min(len, done.len);", "done.len = len;",
        "test_reorder.py test_truncated and 4_hello"),
    "known": Mutant(
        "an address that the provider does not take is an error", "5_reverse",
        "FiCheck(known ? 0 : -FI_EINVAL,", "FiCheck(known ? 0 : 0,",
        "test_failures.py test_address_of_another_provider and 5_reverse"),
    "no-immediate-data": Mutant(
        "a provider without immediate data is refused", "6_write",
        "if (info->domain_attr->cq_data_size < sizeof(uint32_t)) {",
        "if (info == nullptr) {",
        "test_failures.py test_no_immediate_data and 6_write"),
    "client-error": Mutant(
        "a client's error does not end the server", "5_reverse",
        "      } catch (const std::exception& e) {\n"
        "        // It ends this client's session",
        "      } catch (const std::logic_error& e) {\n"
        "        // It ends this client's session",
        "test_messages.py test_in_a_session and 5_reverse"),
    "session-after-an-error": Mutant(
        "an error ends the client's session", "6_write",
        "        client.done = true;\n"
        "      }\n", "      }\n",
        "test_messages.py test_in_a_session and 6_write"),
    "at-the-door": Mutant(
        "a bad message does not end the server", "5_reverse",
        "    } catch (const std::exception& e) {\n"
        "      // A bad",
        "    } catch (const std::logic_error& e) {\n"
        "      // A bad",
        "test_messages.py test_at_the_door and 5_reverse"),
    "silence": Mutant(
        "silence ends a session", "5_reverse",
        '    CheckSilence(session.heard_at, "waiting for the client");\n', "",
        "test_messages.py test_silent_clients and 5_reverse"),
    "silent-server": Mutant(
        "a client gives up a silent server", "7_queue",
        "      CheckSilence(heard_at, what);\n", "",
        "test_failures.py test_server_gone and 7_queue"),
    "silent-server-of-4": Mutant(
        "a client gives up a silent server", "4_hello",
        "      CheckSilence(start, what);\n", "",
        "test_failures.py test_server_gone and 4_hello"),
    "heard-writes": Mutant(
        "a WRITE that has completed is a sign of life", "7_queue",
        "           session.heard_at = Clock::now();\n", "",
        "test_programs.py test_slow_cable"),
    "heard-messages": Mutant(
        "so is a message", "7_queue",
        "    inbox.push_back(std::move(message));\n"
        "    heard_at = Clock::now();\n", "    inbox.push_back(std::move(message));\n",
        "test_programs.py test_slow_cable"),
    "progress": Mutant(
        "a client hears of a long transfer", "7_queue",
        "    session.Send(AppMessageType::kProgress);\n", "",
        "test_programs.py test_slow_cable"),
    "progress-at-a-time": Mutant(
        "no PROGRESS follows one that is on its way", "7_queue",
        "    if (!session.HasSent()) return;\n", "",
        "test_inside.py test_server_of_a_queue and flight and default"),
    "bye": Mutant(
        "a client that leaves says BYE", "5_reverse",
        "  session.SayBye();\n", "",
        "test_strict.py test_last_message"),
    "bye-arrives": Mutant(
        "it waits until its BYE has arrived", "5_reverse",
        '      WaitUntil("saying BYE", [&] { return HasSent(); });\n', "",
        "test_strict.py test_last_message"),
    "eight": Mutant(
        "a server has so many sessions, and no more", "7_queue",
        "clients.size() < kMaxClients && ", "",
        "test_messages.py test_ninth and 7_queue and shm"),
    "ninth": Mutant(
        "a CONNECT that comes when all places are taken waits", "5_reverse",
        "      while (clients.size() < kMaxClients &&",
        "      if (clients.size() >= kMaxClients) listener.inbox.clear();\n"
        "      while (clients.size() < kMaxClients &&",
        "test_messages.py test_ninth and 5_reverse"),
    "first-signal": Mutant(
        "a signal closes everything", "5_reverse",
        "  while (!g_interrupted) {", "  while (true) {",
        "test_strict.py test_rules and 5_reverse and default"),
    "client-signal": Mutant(
        "a client that is interrupted ends", "7_queue",
        "if (g_interrupted && Clock::now()", "if (false && Clock::now()",
        "test_failures.py test_client_signals_at_work and 7_queue and shm"),
    "second-signal": Mutant(
        "a second signal ends the process", "4_hello",
        "_exit(128 + signum);", "(void)signum;",
        "test_failures.py test_second_signal"),
    "other-second-signal-of-4": Mutant(
        "of whatever kind it is", "4_hello",
        "signum != SIGPIPE", "signum == SIGINT",
        "test_failures.py test_second_signal"),
    "pipe-is-no-second-signal": Mutant(
        "but for a line that nobody reads", "7_queue",
        " && signum != SIGPIPE", "",
        "test_inside.py test_signal_before_an_endpoint and inside_queue"),
    "pipe-of-5": Mutant(
        "a server whose output nobody reads closes everything", "5_reverse",
        "{SIGINT, SIGTERM, SIGHUP, SIGPIPE}", "{SIGINT, SIGTERM, SIGHUP}",
        "test_failures.py test_nobody_reads and 5_reverse"),
    "handlers-late": Mutant(
        "our signal handlers take the place of those of shm", "7_queue",
        "    CatchSignals();\n", "",
        "test_failures.py test_client_signals_at_work and 7_queue and shm"),
    "pause": Mutant(
        "an idle server is quiet", "5_reverse",
        "if (completions == 0) std::this_thread::sleep_for(kIdlePause);", "",
        "test_failures.py test_idle and not session"),
    "pause-of-7": Mutant(
        "an idle server is quiet", "7_queue",
        "    if (!busy) {\n", "    if (false) {\n",
        "test_failures.py test_idle and not session"),
    "busy-of-7": Mutant(
        "a server that writes pages does not sleep", "7_queue",
        "    if (!busy) {\n", "    if (true) {\n",
        "test_programs.py test_busy"),
    "busy-client": Mutant(
        "a client that waits for its pages does not sleep", "7_queue",
        "      if (Poll() == 0 && polls % kPollsPerYield == 0) std::this_thread::yield();",
        "      if (Poll() == 0) std::this_thread::sleep_for(kIdlePause);",
        "test_programs.py test_busy"),
    "type": Mutant(
        "the type of a message is checked", "5_reverse",
        "  if (message.type != type) {", "  if (uint32_t(message.type) > 1000) {",
        "test_messages.py test_in_a_session and 5_reverse"),
    "short-message": Mutant(
        "a message that is too short has no type", "5_reverse",
        "    if (op.len >= sizeof(message.type)) {", "    if (op.len >= 0) {",
        "test_messages.py test_at_the_door and 5_reverse"),
    "wrong-answer": Mutant(
        "a client compares what it gets", "5_reverse",
        "  if (received != std::string(text.rbegin(), text.rend())) {",
        "  if (received.empty()) {",
        "test_messages.py test_bad_answers and 5_reverse"),
    "typed-address": Mutant(
        "a length on the command line is checked", "4_hello",
        "hex.size() / 2 > kMaxAddressSize ||", "false ||",
        "test_failures.py test_wrong_arguments and 4_hello"),
    "page-size-0": Mutant(
        "a request is checked: pages without a byte", "6_write",
        "page_size == 0 || ", "",
        "test_messages.py test_in_a_session and 6_write"),
    "page-size": Mutant(
        "pages that are too long", "6_write",
        "page_size > kMaxPageSize ||", "",
        "test_messages.py test_in_a_session and 6_write"),
    "no-pages": Mutant(
        "no pages at all", "6_write",
        "page_size > kMaxPageSize || page_idx.empty() ||", "page_size > kMaxPageSize ||",
        "test_messages.py test_in_a_session and 6_write"),
    "too-many-pages": Mutant(
        "more than the server makes", "6_write",
        "page_idx.size() > kMaxTransfer / page_size || ", "",
        "test_messages.py test_in_a_session and 6_write"),
    "number-0": Mutant(
        "no number", "6_write",
        " || request.imm_data == 0 ||", " ||",
        "test_messages.py test_in_a_session and 6_write"),
    "page-index": Mutant(
        "a page outside of the client's memory", "6_write",
        ">=\n"
        "            request.size / page_size) {",
        ">=\n"
        "            ~uint64_t{0} - page_size) {",
        "test_messages.py test_in_a_session and 6_write"),
    "second-request": Mutant(
        "a second one, while the first is under way", "6_write",
        "if (source || body.size() < sizeof(request))",
        "if (body.size() < sizeof(request))",
        "test_messages.py test_second_request and 6_write and default"),
    "short-request": Mutant(
        "one that is cut short", "7_queue",
        "if (source || body.size() < sizeof(request))", "if (source)",
        "test_messages.py test_in_a_session and 7_queue"),
    "no-repeat": Mutant(
        "one to be written not once", "7_queue",
        "request.total_repeat == 0 || ", "",
        "test_messages.py test_in_a_session and 7_queue"),
    "repeat": Mutant(
        "one to be written too often", "7_queue",
        "request.total_repeat == 0 || request.total_repeat > kMaxRepeat ||",
        "request.total_repeat == 0 ||",
        "test_messages.py test_in_a_session and 7_queue"),
    "number": Mutant(
        "a client waits for the number that it has chosen", "6_write",
        "if (imm_data == request.imm_data) filled = true;", "filled = imm_data != 0;",
        "test_messages.py test_interrupted_while_waiting and 6_write and default"),
    "last-write-of-6": Mutant(
        "the last WRITE waits for all others", "6_write",
        "      if (last && source->in_flight > 0) return;\n", "",
        "test_reorder.py test_late_writes and 6_write"),
    "last-write-of-7": Mutant(
        "the last WRITE waits for all others", "7_queue",
        "(last ? 1 : most)", "most",
        "test_reorder.py test_late_writes and 7_queue"),
    "bytes-in-flight": Mutant(
        "what is in flight is bounded in bytes", "7_queue",
        "std::clamp(kMaxOutstandingBytes / request.page_size,",
        "std::clamp(kMaxOutstandingWrites,",
        "test_inside.py test_server_of_a_queue and flight and default"),
    "room": Mutant(
        "the queue stays short, however long a transfer is", "7_queue",
        "posted_write_ops < total_write_ops && session.endpoint.HasRoom()",
        "posted_write_ops < total_write_ops",
        "test_inside.py test_server_of_a_queue and room and default"),
    "queue": Mutant(
        "no operation overtakes one that waits", "7_queue",
        "pending_ops.push_back(op);", "pending_ops.push_front(op);",
        "test_inside.py test_order and inside_queue"),
    "pending": Mutant(
        "reading completions hands over what has to wait", "7_queue",
        "  size_t PollCompletion() {\n"
        "    ProgressPendingOps();\n", "  size_t PollCompletion() {\n",
        "test_inside.py test_order and inside_queue"),
    "keys": Mutant(
        "no two regions have the same key", "6_write",
        "attr.requested_key = domain.RandomKey();", "attr.requested_key = 1;",
        "test_programs.py test_data and 6_write and default"),
    "keys-of-5": Mutant(
        "no two regions have the same key", "5_reverse",
        "domain.next_key++", "domain.next_key",
        "test_programs.py test_data and 5_reverse and default"),
    "key-of-6": Mutant(
        "nobody guesses a key", "6_write",
        "    uint64_t key = uint64_t{random()} << 32 | random();\n"
        "    return key >> (64 - 8 * info->domain_attr->mr_key_size);",
        "    static uint64_t key = 0;\n"
        "    return ++key;",
        "test_strangers.py test_memory_of_a_client and 6_write"),
    "key-size": Mutant(
        "a key is no larger than the provider's are", "6_write",
        "    return key >> (64 - 8 * info->domain_attr->mr_key_size);", "    return key;",
        "test_reorder.py test_short_keys"),
    "virtual-addresses": Mutant(
        "the provider says how a place is named", "6_write",
        "  if (domain.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) {",
        "  if (domain.info == nullptr) {",
        "test_programs.py test_data and 6_write and shm"),
    "offsets": Mutant(
        "the provider says how a place is named", "6_write",
        "  if (domain.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) {",
        "  if (domain.info != nullptr) {",
        "test_programs.py test_data and 6_write and default"),
    "event-queue": Mutant(
        "an event queue is bound to the endpoint", "5_reverse",
        '    FiCheck(fi_ep_bind(ep, &eq->fid, 0), "fi_ep_bind");\n', "",
        "test_failures.py test_event_queue and 5_reverse"),
}

# What no network here would notice: see strict.cpp and cuda_stub.cpp.
MUTANTS |= {
    "strict-order": Mutant(
        "messages to a peer have an order", "7_queue",
        "  hints->tx_attr->msg_order = FI_ORDER_SAS;\n", "",
        "test_strict.py test_rules and 7_queue and not gpu"),
    "strict-last-write": Mutant(
        "the last WRITE waits for all others", "7_queue",
        "(last ? 1 : most)", "most",
        "test_strict.py test_last_write and 7_queue"),
    "strict-delivery": Mutant(
        "a completion that says where the data is has been asked for", "7_queue",
        "hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;", "",
        "test_strict.py test_last_write and 7_queue"),
    "strict-last-message": Mutant(
        "a message has arrived before its endpoint is closed", "5_reverse",
        "hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;", "",
        "test_strict.py test_last_message"),
    "strict-length": Mutant(
        "a program says how long its messages are", "5_reverse",
        "hints->ep_attr->max_msg_size = kMaxMessageSize;", "",
        "test_strict.py test_short_messages and 5_reverse"),
    "strict-page-length": Mutant(
        "and its pages", "7_queue",
        "hints->ep_attr->max_msg_size = kMaxPageSize;", "",
        "test_strict.py test_short_messages and 7_queue"),
    "strict-context": Mutant(
        "an operation in flight has a context of its own", "7_queue",
        "    *op = std::move(request);\n"
        "    free_ops.pop_back();\n", "    *op = std::move(request);\n",
        "test_strict.py test_rules and 7_queue and not gpu"),
    "strict-context-of-4": Mutant(
        "an operation in flight has a context of its own", "4_hello",
        "    free_ops.pop_back();\n", "",
        "test_strict.py test_rules and 4_hello"),
    "strict-old-device": Mutant(
        "a region that others WRITE can receive", "7_queue",
        "FI_REMOTE_WRITE | FI_RECV, gpu);", "FI_REMOTE_WRITE, gpu);",
        "test_strict.py test_harsh and 7_queue and not gpu"),
    "strict-remote-right": Mutant(
        "a region has the right that others need", "7_queue",
        "FI_REMOTE_WRITE | FI_RECV, gpu);", "FI_REMOTE_READ | FI_RECV, gpu);",
        "test_strict.py test_rules and 7_queue and not gpu"),
    "strict-local-right": Mutant(
        "a region has the right that we need", "7_queue",
        "page_idx.size() * page_size, FI_WRITE,", "page_idx.size() * page_size, FI_SEND,",
        "test_strict.py test_rules and 7_queue and not gpu"),
    "strict-descriptor": Mutant(
        "a local buffer comes with its descriptor", "7_queue",
        "void* desc = fi_mr_desc(op->buf->mr);", "void* desc = nullptr;",
        "test_strict.py test_rules and 7_queue and not gpu"),
    "strict-address": Mutant(
        "the provider says how a place is named", "7_queue",
        "  if (domain.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) {",
        "  if (domain.info == nullptr) {",
        "test_strict.py test_rules and 7_queue and not gpu"),
    "strict-pages": Mutant(
        "all pages of a region exist", "7_queue",
        "  memset(data.get(), 0, rounded);\n", "",
        "test_strict.py test_rules and 7_queue and not gpu"),
    "strict-pages-of-5": Mutant(
        "all pages of a region exist", "5_reverse",
        "std::make_unique<char[]>(bytes)", "std::make_unique_for_overwrite<char[]>(bytes)",
        "test_strict.py test_rules and 5_reverse and default"),
    "strict-event-queue": Mutant(
        "an event queue is bound to the endpoint", "7_queue",
        '    FiCheck(fi_ep_bind(ep, &eq->fid, 0), "fi_ep_bind");\n', "",
        "test_strict.py test_rules and 7_queue and not gpu"),
    "strict-mode": Mutant(
        "a program says that its contexts are as large as any", "7_queue",
        "FI_CONTEXT | FI_CONTEXT2;", "FI_CONTEXT;",
        "test_strict.py test_rules and 7_queue and not gpu"),
    "strict-local": Mutant(
        "a program says that it registers what is its own", "7_queue",
        "FI_MR_LOCAL | FI_MR_ALLOCATED", "FI_MR_ALLOCATED",
        "test_strict.py test_rules and 7_queue and not gpu"),
    "gpu-shm": Mutant(
        "over shm, a WRITE of GPU memory is complete when it has been copied", "6_write",
        "if (shm && !gpu) info", "if (shm) info",
        "test_strict.py test_shm and 6_write"),
    "gpu-mode": Mutant(
        "a program says that it registers memory of a GPU", "7_queue",
        "    hints->domain_attr->mr_mode |= FI_MR_HMEM;\n", "",
        "test_strict.py test_rules and 7_queue-gpu"),
    "gpu-caps": Mutant(
        "a program asks for memory of a GPU", "7_queue",
        "    hints->caps |= FI_HMEM;  // into memory that isn't the host's\n", "",
        "test_strict.py test_no_gpu and 7_queue"),
    "gpu-interface": Mutant(
        "a region of a GPU's memory says that it is one", "7_queue",
        "    if (gpu) attr.iface = FI_HMEM_CUDA;\n", "",
        "test_strict.py test_rules and 7_queue-gpu"),
    "gpu-flush": Mutant(
        "what an adapter has written is made visible to the GPU", "7_queue",
        "  if (gpu) CudaFlushWrites();\n", "",
        "test_strict.py test_rules and 7_queue-gpu"),
    "gpu-copy": Mutant(
        "a copy to the GPU has ended before it is sent on", "7_queue",
        '  CudaCheck(cudaMemcpy(to, from, size, cudaMemcpyDefault), "cudaMemcpy");\n'
        '  CudaCheck(cudaDeviceSynchronize(), "cudaDeviceSynchronize");',
        '  CudaCheck(cudaMemcpy(to, from, size, cudaMemcpyDefault), "cudaMemcpy");',
        "test_strict.py test_rules and 7_queue-gpu"),
    "gpu-zeros": Mutant(
        "memory of a GPU is zeroed", "7_queue",
        '  CudaCheck(cudaMemset(data, 0, size), "cudaMemset");\n', "",
        "test_strict.py test_rules and 7_queue-gpu"),
    "gpu-ordered": Mutant(
        "a GPU that keeps the order by itself may have no flush", "7_queue",
        "  if (ordering >= cudaGPUDirectRDMAWritesOrderingOwner) return;\n", "",
        "test_strict.py test_ordered and 7_queue"),
    "gpu-touched": Mutant(
        "the processor does not touch memory of a GPU", "7_queue",
        "    if (gpu) return CudaCopy(to, from, len);\n", "",
        "test_strict.py test_rules and 7_queue-gpu"),
}

# The defences of 14_strangers.
MUTANTS |= {
    "nonce": Mutant(
        "a message of a stranger ends no conversation", "14_strangers",
        "if (peer != FI_ADDR_UNSPEC && message.header.nonce != nonce) return;", "",
        "test_strangers.py test_byes_of_strangers and 14_strangers"),
    "too-long": Mutant(
        "nor does one that is too long", "14_strangers",
        "    if (!op.error.empty() || op.len < sizeof(Header)) return;\n",
        "    op.Check();\n    if (op.len < sizeof(Header)) return;\n",
        "test_messages.py test_too_long and 14_strangers"),
    "nonce-guessed": Mutant(
        "nobody guesses a nonce", "14_strangers",
        "nonce = domain.random();", "nonce = uint32_t(time(nullptr));",
        "test_messages.py test_bad_answers and 14_strangers"),
    "sign-of-life": Mutant(
        "only a message with the nonce is a sign of life", "14_strangers",
        "    if (!op.error.empty() || op.len < sizeof(Header)) return;\n",
        "    heard_at = Clock::now();\n"
        "    if (!op.error.empty() || op.len < sizeof(Header)) return;\n",
        "test_attacks.py test_junk_to_the_place"),
    "refuse": Mutant(
        "a server says what it refuses", "14_strangers",
        "      session.Send(AppMessageType::kRefused, e.what());\n", "",
        "test_strangers.py test_refused and 14_strangers"),
    "refuse-leaves": Mutant(
        "what is refused is heard of, before the endpoint is closed", "14_strangers",
        "return done && (session.HasSent() || Clock::now() > leave_at);", "return done;",
        "test_strict.py test_late_refusal"),
    "refuse-ends": Mutant(
        "one that is refused and gone is not waited for", "14_strangers",
        "leave_at = Clock::now() + kLeaveGrace;", "leave_at = Clock::now() + 1h;",
        "test_attacks.py test_refused_and_gone"),
    "printable": Mutant(
        "a terminal does not obey a reason", "14_strangers",
        "\"refused: \" + Printable(message.body)", "\"refused: \" + message.body",
        "test_messages.py test_terrible_texts_of_servers and 14_strangers"),
    "printable-delete": Mutant(
        "nor what is beyond ASCII in it", "14_strangers",
        "c < ' ' || c > '~' ? '?' : c", "c == 0x7f ? '?' : c",
        "test_messages.py test_terrible_texts_of_servers and 14_strangers"),
    **{f"request-{what}": Mutant(
        f"the server checks a request: {what}", "14_strangers", old, new,
        "test_messages.py test_in_a_session and 14_strangers")
       for what, old, new in [
           ("size", "if (page_size == 0 || page_size > kMaxPageSize) {",
            "if (page_size == 0) {"),
           ("pages", "page_idx.empty() || page_idx.size() > kMaxTransfer / page_size",
            "page_idx.empty()"),
           ("index", "if (largest >= request.size / page_size) {",
            "if (largest > request.size / page_size) {"),
           ("repeat", "request.total_repeat == 0 || request.total_repeat > kMaxRepeat",
            "request.total_repeat == 0"),
           ("number", "    if (request.imm_data == 0) throw BadMessage(\"no number\");\n",
            ""),
           ("short", "    if (body.size() < sizeof(request)) "
                     "throw BadMessage(\"a short request\");\n", "")]},
    "request-twice": Mutant(
        "a client asks once", "14_strangers",
        "    if (!page_idx.empty()) throw BadMessage(\"a second request\");\n", "",
        "test_messages.py test_second_request and 14_strangers"),
    "wait": Mutant(
        "those who wait are told", "14_strangers",
        "kSilenceLimit || Tell(visitor);", "kSilenceLimit;",
        "test_attacks.py test_another_family"),
    "wait-again": Mutant(
        "one who is told to wait asks again", "14_strangers",
        "answer.header.type == AppMessageType::kWait;) {",
        "asked == 0 && answer.header.type == AppMessageType::kWait;) {",
        "test_attacks.py test_another_family"),
    "wait-forgets": Mutant(
        "one who is told is forgotten", "14_strangers",
        "    return fi_inject(endpoint->ep, &wait, sizeof(wait), visitor.contact) !=\n"
        "           -FI_EAGAIN;\n",
        "    fi_inject(endpoint->ep, &wait, sizeof(wait), visitor.contact);\n"
        "    return false;\n",
        "test_inside.py test_server_of_strangers and line"),
    "wait-second": Mutant(
        "only those whose second is not over have a place in line", "14_strangers",
        "[&](const Visitor& v) { return now < v.tell_at; }",
        "[](const Visitor&) { return true; }",
        "test_inside.py test_server_of_strangers and line"),
    "wait-many": Mutant(
        "a line is not longer than a thousand", "14_strangers",
        "          visitors.size() < kMaxWaiting) {", "          true) {",
        "test_attacks.py test_long_line"),
    "wait-junk": Mutant(
        "a server that is full keeps no message that is none", "14_strangers",
        "      line.AddAll();\n", "      if (clients.size() < kMaxClients) line.AddAll();\n",
        "test_attacks.py test_full_and_filled"),
    "wait-failed": Mutant(
        "one for whom there is no endpoint is told to ask again", "14_strangers",
        "        first->tell_at = Clock::now();\n",
        "        first->tell_at = Clock::now() - 1h;\n",
        "test_attacks.py test_no_descriptor"),
    "wait-dead-endpoint": Mutant(
        "one that was told and is gone costs nobody anything", "14_strangers",
        "      endpoint->PollCompletion();\n    } catch (const std::runtime_error&) {",
        "      endpoint->PollCompletion();\n    } catch (const std::logic_error&) {",
        "test_attacks.py test_nowhere_in_line"),
    "aside-closed": Mutant(
        "what was told to invented addresses is given up", "14_strangers",
        "    if (endpoint && now > tell_until + kTellGrace) {", "    if (endpoint && false) {",
        "test_attacks.py test_invented_addresses_in_line"),
    "aside-contacts": Mutant(
        "an endpoint tells no more than it has room for", "14_strangers",
        "      if (num_contacts == kMaxContacts) return false;", "",
        "test_inside.py test_server_of_strangers and renew"),
    "aside-full": Mutant(
        "one that is full is closed sooner", "14_strangers",
        "        tell_until = Clock::now() + kTellGrace;\n", "",
        "test_inside.py test_server_of_strangers and renew"),
    "family": Mutant(
        "an address of another family gets into no address vector", "14_strangers",
        "size_t same = internet ? 2 : 0;", "size_t same = internet ? 0 : 0;",
        "test_attacks.py test_another_family"),
    "family-size": Mutant(
        "an address is as long as ours", "14_strangers",
        "    return address.size() == addr.size() &&\n           address.compare",
        "    return address.compare",
        "test_messages.py test_impossible_addresses and 14_strangers"),
    "budget": Mutant(
        "the memory of the server is bounded", "14_strangers",
        "      if (size > memory_left) return;\n", "",
        "test_attacks.py test_waiting_is_not_silence"),
    "budget-returns": Mutant(
        "what a client had goes to the next one", "14_strangers",
        "    if (source) memory_left += source->size;\n", "",
        "test_attacks.py test_killed_while_it_waits"),
    "page-a-round": Mutant(
        "the other clients need not wait until all pages are made", "14_strangers",
        "      if (made_pages < page_idx.size()) MakeNextPage();\n",
        "      while (made_pages < page_idx.size()) {\n"
        "        MakeNextPage();\n        if (!source) break;\n      }\n",
        "test_inside.py test_server_of_strangers and pages"),
    "waiting": Mutant(
        "the time in which a client waits for memory is no silence", "14_strangers",
        "      session.heard_at = Clock::now();\n    }\n    session.Send",
        "    }\n    session.Send",
        "test_attacks.py test_waiting_is_not_silence"),
    "waiting-dead": Mutant(
        "a dead client that waits for memory gives its place up", "14_strangers",
        "    if (!session.HasSent()) return;\n    reported_at = Clock::now();\n", 
        "    reported_at = Clock::now();\n",
        "test_attacks.py test_killed_while_it_waits and tcp"),
    "descriptors": Mutant(
        "connections without a word take up no place", "14_strangers",
        "  RaiseFileLimit();\n", "", "test_attacks.py test_idle_connections"),
    "descriptors-soon": Mutant(
        "connections without a word are accepted soon", "14_strangers",
        "  setenv(\"FI_OFI_RXM_CM_PROGRESS_INTERVAL\", \"1000\", 0);\n", "",
        "test_attacks.py test_idle_connections"),
    "descriptors-closed": Mutant(
        "no file of libfabric's is standard error", "14_strangers",
        "  TakeStandardFiles();\n", "", "test_attacks.py test_closed_descriptors"),
}

# Those of 8_malloc.
MUTANTS |= {
    "key": Mutant(
        "nobody guesses a key", "8_malloc",
        "uint64_t key = uint64_t{random()} << 32 | random();",
        "static uint64_t key = random() % 1; ++key;",
        "test_strangers.py test_memory_of_a_server and 8_malloc"),
    "loan": Mutant(
        "the pool gets back what a client had", "8_malloc",
        "for (size_t offset : pieces) pool.allocator.Free(offset);", "",
        "test_malloc.py test_killed_clients"),
    "loan-before-the-session": Mutant(
        "a piece comes back when the endpoint is closed, and not before", "8_malloc",
        "  Loan loan;\n  Session session;\n", "  Session session;\n  Loan loan;\n",
        "test_malloc.py test_allocator and plain"),
    "size-of-a-piece": Mutant(
        "no piece is larger than the pool", "8_malloc",
        "if (size > 0 && size <= kPoolSize) offset", "if (size > 0) offset",
        "test_malloc.py test_refusals"),
    "value-cut-short": Mutant(
        "a request is as long as it has to be", "8_malloc",
        "if (message.body.size() != sizeof(value)) throw",
        "if (message.body.empty()) throw",
        "test_messages.py test_in_a_session and 8_malloc"),
    "neighbours": Mutant(
        "no two free pieces are neighbours", "8_malloc",
        "before->first + before->second == piece->first", "false",
        "test_malloc.py test_allocator and plain"),
    "best-fit": Mutant(
        "the smallest piece that is large enough is lent", "8_malloc",
        "piece->second < best->second) best", "piece->second > best->second) best",
        "test_malloc.py test_allocator and plain"),
    "alive": Mutant(
        "a client that READs and WRITEs says that it is alive", "8_malloc",
        "        session.Send(AppMessageType::kAlive);\n", "",
        "test_malloc.py test_alive"),
    "drain": Mutant(
        "what is in flight has time to complete after a signal", "8_malloc",
        "!g_interrupted && done()", "done()", "test_malloc.py test_interrupted"),
    "read-what-was-written": Mutant(
        "a READ waits for the WRITE of what it READs", "8_malloc",
        """  client.WaitForAll(pool.buf);
  printf("Filled""", """  printf("Filled""",
        "test_malloc.py test_late_writes"),
    "place-in-flight": Mutant(
        "the place of a WRITE is free when that has completed", "8_malloc",
        "                [&pool, offset] { pool.allocator.Free(offset); });\n",
        "                [] {});\n    pool.allocator.Free(offset);\n",
        "test_strict.py test_ and 8_malloc"),
    "flush-of-a-read": Mutant(
        "a READ into a GPU's memory is flushed", "8_malloc",
        "if (pool.buf.gpu) CudaFlushWrites();", "",
        "test_strict.py test_rules and 8_malloc-gpu"),
    "server-copies": Mutant(
        "a WRITE that has completed is in place; over shm, that has the server copy", "8_malloc",
        "hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;", "",
        "test_strict.py test_harsh and 8_malloc"),
    "somebody-else-piece": Mutant(
        "a client frees only what it has", "8_malloc",
        "if (loan.pieces.erase(offset) == 0) {",
        "if (loan.pieces.erase(offset) > 9) {",
        "test_malloc.py test_ and not allocator"),
}

# Those of 9_file.
MUTANTS |= {
    "credit": Mutant(
        "the sender waits for a credit", "9_file",
        "if (!slot.credit || !Ended(slot.read)) return;", "if (!Ended(slot.read)) return;",
        "test_file.py test_slow_disk"),
    "lent-slot": Mutant(
        "only a slot that is lent can be filled", "9_file",
        "if (slot.chunk >= num_chunks || slot.save.valid()) {",
        "if (slot.chunk >= num_chunks) {",
        "test_file.py test_chunk_without_credit and saved"),
    "last-chunk": Mutant(
        "a slot is not filled after the last chunk", "9_file",
        "if (slot.chunk >= num_chunks || slot.save.valid()) {",
        "if (slot.save.valid()) {",
        "test_file.py test_chunk_without_credit and many"),
    "disk-in-a-thread": Mutant(
        "the server waits for no disk", "9_file",
        "      if (!Ended(slot.save)) continue;\n", "      if (!slot.save.valid()) continue;\n",
        "test_file.py test_disk_that_stands_still"),
    "checksum-last": Mutant(
        "a WRITE that comes while a chunk is saved is in its checksum", "9_file",
        "      file->part.Write(data, size, slot.chunk * kChunkSize);\n"
        "      // Afterwards, so that it reveals a WRITE that came while we wrote.\n"
        "      if (XXH3_64bits_withSeed(data, size, slot.chunk) != message.checksum) {\n"
        "        throw std::runtime_error(\"a checksum is not correct\");\n"
        "      }\n",
        "      if (XXH3_64bits_withSeed(data, size, slot.chunk) != message.checksum) {\n"
        "        throw std::runtime_error(\"a checksum is not correct\");\n"
        "      }\n"
        "      file->part.Write(data, size, slot.chunk * kChunkSize);\n",
        "test_file.py test_write_while_saving"),
    "sync-file": Mutant(
        "a file is saved when it is on disk", "9_file",
        'if (fsync(part.fd) != 0) throw SystemError("cannot sync " + part.path);', "",
        "test_file.py test_disk_that_forgets"),
    "sync-name": Mutant(
        "a file is saved when its name is on disk", "9_file",
        'if (fsync(dir) != 0) throw SystemError("cannot sync the directory");', "",
        "test_file.py test_disk_that_forgets"),
    "replace": Mutant(
        "a file that exists is not replaced", "9_file",
        "linkat(dir, part.path.c_str(), dir, name.c_str(), 0)",
        "renameat(dir, part.path.c_str(), dir, name.c_str())",
        "test_file.py test_created_meanwhile"),
    "part-stays": Mutant(
        "half a file goes", "9_file",
        "  ~TargetFile() { unlinkat(dir, part.path.c_str(), 0); }\n", "",
        "test_file.py test_file_size_limit"),
    "way-out": Mutant(
        "a name does not lead out of the directory", "9_file",
        'std::string("/\\0", 2)', 'std::string("\\0", 1)',
        "test_file.py test_names"),
    "size-limit": Mutant(
        "a file that exceeds a limit does not end the server", "9_file",
        "  signal(SIGXFSZ, SIG_IGN);\n", "",
        "test_file.py test_file_size_limit"),
    "failed-writer": Mutant(
        "a client that hears why its file is not saved keeps its slots until then", "9_file",
        "      session.Send(AppMessageType::kFailed, e.what());\n",
        "      session.Send(AppMessageType::kFailed, e.what());\n      done = true;\n",
        "test_file.py test_failed_while_it_writes"),
    "leavers-at-the-disk": Mutant(
        "nobody waits until the disk has saved what is left of others", "9_file",
        "      return client.done && !client.DiskBusy();", "      return client.done;",
        "test_file.py test_disk_that_stands_still"),
    "patient-server": Mutant(
        "a server whose disk is slow says that it is still at it", "9_file",
        "        Report();\n", "",
        "test_file.py test_disk_slower_than_patience"),
    "patient-sender": Mutant(
        "a client that waits for a disk says that it is still at it", "9_file",
        "    reported_at = Clock::now();\n    session.Send(AppMessageType::kProgress);\n  }\n"
        "\n  // Takes",
        "  }\n\n  // Takes",
        "test_file.py test_disk_slower_than_patience"),
    "saved-early": Mutant(
        "a file is not saved before all of it is sent", "9_file",
        "               read_chunks < num_chunks) {", "               slots.empty()) {",
        "test_file.py test_bad_answers"),
    "sender-says-bye": Mutant(
        "a sender that gives up says so", "9_file",
        "    session.SayBye();\n    if (!error.empty())", "    if (!error.empty())",
        "test_file.py test_source_shrinks"),
}

# Those of 10_lock.
MUTANTS |= {
    "compare": Mutant(
        "a turn is ended by whoever has it, and only once", "10_lock",
        """turn.Word()) == expected.Word();""",
        """turn.Word()) != ~uint64_t{0};""",
        "test_lock.py test_slow_holder"),
    "lease": Mutant(
        "the turn of a client that has died is ended", "10_lock",
        "} else if (Clock::now() - changed_at > kLease) {",
        "} else if (Clock::now() - changed_at > 1h) {",
        "test_lock.py test_holder_that_goes and killed"),
    "order-of-turn": Mutant(
        "a ledger is in place before it is the valid one", "10_lock",
        "[this] { return buf.in_flight == 0; });",
        "[this, type] { return buf.in_flight == 0 || type == RdmaOpType::kWrite; });",
        "test_lock.py test_late_writes"),
    "aside": Mutant(
        "a ledger that is valid is not written", "10_lock",
        "if (turn.ledger == aside) ++aside;", "",
        "test_lock.py test_late_completions"),
    "claim": Mutant(
        "a record of the hash table belongs to one key", "10_lock",
        "if (before == 0 || before == key) return place;", "return place;",
        "test_lock.py test_together"),
    "seat": Mutant(
        "no two clients have the same seat", "10_lock",
        "~Seat() { memory.free_seats.insert(number); }",
        "~Seat() { memory.free_seats.insert(0); }",
        "test_lock.py test_seats"),
    "torn-version": Mutant(
        "half of a version is not that of a free record", "10_lock",
        "return checksum == (version == 0 ? 0 : Checksum());",
        "return version == 0 || checksum == Checksum();",
        "test_inside.py test_ledger_that_changes"),
    "far-back": Mutant(
        "a client far back in the queue looks again soon", "10_lock",
        "std::min<uint64_t>(ticket - turn.ticket, kMaxClients)", "(ticket - turn.ticket)",
        "test_lock.py test_far_back"),
    "ledger-once": Mutant(
        "a ledger that is not the valid one any more is READ again", "10_lock",
        "if (turn.Word() == before.Word()) break;", "break;",
        "test_inside.py test_ledger_that_changes"),
    "lease-of-a-turn": Mutant(
        "a lease begins with the turn", "10_lock",
        "        changed_at = Clock::now();\n", "",
        "test_lock.py test_long_queue"),
    "released-twice": Mutant(
        "a client ends its own turn, and not the next one", "10_lock",
        "    if (num_changes++ == 0) before_us = before;\n",
        "    if (num_changes++ == 0) before_us = before;\n"
        "    ReplaceTurn({turn.ticket + 1, aside}, {turn.ticket + 2, aside});",
        "test_lock.py test_together"),
    "log-bound": Mutant(
        "no entry is written behind the log", "10_lock",
        "if (ticket >= kLogSize) throw", "if (ticket > kLogSize) throw",
        "test_lock.py test_clients_find"),
    "claim-again": Mutant(
        "a key of a client that has gone belongs to the next one in its seat", "10_lock",
        "      if (before == 0 || before == key) return place;",
        "      if (before == 0) return place;",
        "test_lock.py test_seats"),
    "seat-bound": Mutant(
        "a seat that is not there is refused", "10_lock",
        "    if (joined.size != sizeof(SharedTable) || joined.seat >= kMaxClients) {",
        "    if (joined.size != sizeof(SharedTable)) {",
        "test_lock.py test_bad_replies"),
    "holes": Mutant(
        "a log has a hole only where a client has ended", "10_lock",
        "correct &= holes <= failures;", "",
        "test_lock.py test_the_server_finds or test_failed_clients"),
    "fewer-changes": Mutant(
        "clients that have said BYE have made all of their changes", "10_lock",
        ": ledger.total == num_entries", ": ledger.total <= num_entries",
        "test_lock.py test_the_server_finds"),
}

# Those of 11_rails.
MUTANTS |= {
    "rail-again": Mutant(
        "what a failed rail had in flight is written again", "11_rails",
        "        again.insert(rail->writes.begin(), rail->writes.end());\n", "",
        "test_rails.py test_link_down"),
    "rail-number": Mutant(
        "only what has the number of a client is one of its rails", "11_rails",
        "return served.client_number == its_number;", "return its_number > 0;",
        "test_rails.py test_number_of_a_client"),
    "rail-second-request": Mutant(
        "over each rail comes one request", "11_rails",
        "if (rail.memory || body.size()", "if (body.size()",
        "test_rails.py test_request_over_each_rail"),
    "rail-one-request": Mutant(
        "the first request begins the transfer, and no other one", "11_rails",
        "    if (!source) {\n      request = msg;", "    {\n      request = msg;",
        "test_rails.py test_request_over_each_rail"),
    "rail-no-answer": Mutant(
        "a rail without an answer is given up", "11_rails",
        'throw std::runtime_error("no answer");', "return;",
        "test_rails.py test_namesakes"),
    "rail-bad-message": Mutant(
        "an error on one rail costs the client no other one", "11_rails",
        "if (all.size() == 1) throw;", "if (!all.empty()) throw;",
        "test_strict.py test_rail_fails and memory"),
    "rail-link-local": Mutant(
        "a link-local address is no rail", "11_rails",
        '"fe80:", 5) == 0) continue', '"fe80:", 5) == 77) continue',
        "test_rails.py test_ipv6"),
    "rail-tail": Mutant(
        "each of several rails takes little", "11_rails",
        "several ? kMaxOutstandingRailBytes : kMaxOutstandingBytes;",
        "several ? kMaxOutstandingBytes : kMaxOutstandingBytes;",
        "test_rails.py test_four_rails"),
    "rail-failed-write": Mutant(
        "a WRITE that has failed on a rail is written again", "11_rails",
        """           op.Check();
           rail.session.heard_at = rail.completed_at = Clock::now();
           rail.writes.erase(write);
""",
        """           rail.writes.erase(write);
           op.Check();
           rail.session.heard_at = rail.completed_at = Clock::now();
""",
        "test_strict.py test_rail_fails and write"),
    "rails-closed-first": Mutant(
        "the rails are closed before the memory is looked at", "11_rails",
        "  rails.SayBye();\n"
        "  if (gpu) CudaFlushWrites();\n"
        "  CheckMemory(memory, request, page_idx);\n",
        "  if (gpu) CudaFlushWrites();\n"
        "  CheckMemory(memory, request, page_idx);\n"
        "  rails.SayBye();\n",
        "test_rails.py test_late_bytes"),
    "strict-rail-notification": Mutant(
        "the last WRITE waits for those on all rails", "11_rails",
        "(write == last && finished_write_ops < last)",
        "(write == last && again.size() > 0)",
        "test_strict.py test_last_write and 11_rails"),
    "strict-rail-key": Mutant(
        "each rail has the key of its own domain", "11_rails",
        "rail.remote_key = msg.rkey;",
        "static const uint64_t first = msg.rkey;  // whichever rail was quickest\n"
        "    rail.remote_key = first;",
        "test_strict.py test_rules and 11_rails and not gpu"),
    "strict-rail-descriptor": Mutant(
        "each rail has the descriptor of its own domain", "11_rails",
        ".buf = &*rail.memory,", ".buf = &*source,",
        "test_strict.py test_rules and 11_rails and not gpu"),
    "rail-away": Mutant(
        "a rail survives that is away for a moment", "11_rails",
        "constexpr auto kRailLimit = 4s;", "constexpr auto kRailLimit = 1s;",
        "test_rails.py test_link_away"),
}

# Those of 15_ring.
MUTANTS |= {
    "ring-piece": Mutant(
        "a piece goes on when it has come", "15_ring",
        "      if (posted >= taken + num_blocks) return;\n", "",
        "test_ring.py test_sums"),
    "ring-credit": Mutant(
        "a slot is overwritten when its owner has said so", "15_ring",
        "      if (posted >= credit) return;\n", "      if (credit == 0) return;\n",
        "test_ring.py test_ring_under_strict_rules and long"),
    "ring-slot-in-flight": Mutant(
        "and when the former WRITE into it has completed", "15_ring",
        "      if (posted >= kSlots && !written[posted - kSlots]) return;\n", "",
        "test_ring.py test_watched_ring and strict"),
    "ring-number": Mutant(
        "a number speaks for its own WRITE", "15_ring",
        "      arrived[number - 1] = true;",
        "      static size_t num_arrived = 0;\n      arrived[num_arrived++] = true;",
        "test_ring.py test_ring_under_strict_rules"),
    "ring-early-credit": Mutant(
        "a slot is lent again when it is empty", "15_ring",
        "std::min(taken + kSlots, total);", "std::min(taken + kSlots + 2, total);",
        "test_ring.py test_sums or test_stragglers"),
    "ring-alive": Mutant(
        "a rank that waits for another one shows that it lives", "15_ring",
        "      session.Send(AppMessageType::kProgress);\n", "",
        "test_ring.py test_stragglers"),
    "ring-pass-on": Mutant(
        "all hear which rank has failed", "15_ring",
        "      PassOn(e.what());\n", "",
        "test_ring.py test_killed_rank"),
    "ring-whom": Mutant(
        "the neighbour is named whose session has failed", "15_ring",
        "      at = &right;\n", "",
        "test_ring.py test_interrupted or test_killed_rank"),
    "ring-folder": Mutant(
        "the addresses of an earlier run are refused", "15_ring",
        "  if (std::filesystem::exists(path)) {", "  if (path.empty()) {",
        "test_ring.py test_old_folder"),
    "ring-same": Mutant(
        "all ranks have arrays of the same length", "15_ring",
        "        ready.num_floats != num_floats) {", "        ready.num_floats == 0) {",
        "test_ring.py test_others_have_other_arguments"),
}

# Those of 12_sleep.
MUTANTS |= {
    "sleep": Mutant(
        "whoever has nothing to do falls asleep", "12_sleep",
        "now >= domain.poll_at && silence < kSpin) {",
        "silence < 1h) {",
        "test_sleep.py test_asleep"),
    "sleep-empty-wakes": Mutant(
        "a descriptor that is always readable does not keep us busy", "12_sleep",
        "can_be_woken && domain.empty_wakes < kEmptyWakes) {", "can_be_woken) {",
        "test_sleep.py test_asleep"),
    "sleep-long-pause": Mutant(
        "after a long silence the pauses are longer", "12_sleep",
        "kIdlePause, kMaxPause));", "kIdlePause, kIdlePause));",
        "test_sleep.py test_long_pauses"),
    "sleep-signal": Mutant(
        "a signal ends a sleep that is about to begin", "12_sleep",
        "  eventfd_write(g_wake_fd, 1);  // wakes a loop that is about to fall asleep\n",
        "",
        "test_sleep.py test_signal_before_sleep"),
    "sleep-all-sessions": Mutant(
        "the descriptors of all sessions wake a server", "12_sleep",
        "    for (ServedClient& client : clients) sessions.push_back(&client.session);\n", "",
        "test_sleep.py test_woken and default"),
    "sleep-wakes": Mutant(
        "who is woken for something goes on sleeping between", "12_sleep",
        "    domain.empty_wakes = 0;\n    if (ret == -FI_EAVAIL) {",
        "    if (ret == -FI_EAVAIL) {",
        "test_sleep.py test_woken_once"),
    "later-answers": Mutant(
        "each answer is compared", "12_sleep",
        "  if (received != std::string(text.rbegin(), text.rend())) {", "  if (false) {",
        "test_sleep.py test_a_later_answer"),
    "strict-trywait": Mutant(
        "nobody sleeps without asking whether that is safe", "12_sleep",
        "int ret = fi_trywait(domain.fabric, cqs.data(), int(cqs.size()));",
        "int ret = 0;",
        "test_sleep.py test_woken_once"),
    "strict-no-trywait": Mutant(
        "nobody asks where nothing can wake us", "12_sleep",
        "    if (can_be_woken && domain", "    if (domain",
        "test_strict.py test_rules and 12_sleep and default"),
    "strict-refused": Mutant(
        "what there was no room for is posted again without a wake-up", "12_sleep",
        "if (endpoint.refused || endpoint.wait_fd < 0) can", "if (endpoint.wait_fd < 0) can",
        "test_sleep.py test_woken_once"),
}

# Those of 13_crowd.
MUTANTS |= {
    "crowd-nobody": Mutant(
        "an address at which nobody has been is not removed", "13_crowd",
        "    if (it->second->reached) {", "    if (true) {",
        "test_failures.py test_addresses_of_nobody and 13_crowd"),
    "crowd-unsent": Mutant(
        "who asks and does not read is forgotten", "13_crowd",
        "client->outbox.size() >= kMaxUnsent) {",
        "client->outbox.size() >= (kMaxUnsent << 30)) {",
        "test_crowd.py test_deaf_client"),
    "crowd-remove": Mutant(
        "what is in flight to a client that is forgotten is given up", "13_crowd",
        "      mailbox.endpoint.RemovePeerAddress(it->second->addr);\n", "",
        "test_crowd.py test_deaf_client"),
    "crowd-cleanup": Mutant(
        "fi_av_remove closes the connection", "13_crowd",
        'setenv("FI_AV_REMOVE_CLEANUP", "1", 0);', "",
        "test_crowd.py test_deaf_client"),
    "crowd-same-address": Mutant(
        "an address is that of one client", "13_crowd",
        "      if (before != clients.end()) Forget(before);\n", "",
        "test_crowd.py test_whose_message"),
    "crowd-number": Mutant(
        "a client hears only what has its number", "13_crowd",
        "if (message && message->number != server->number) return", "if (!message) return",
        "test_crowd.py test_stray_replies"),
    "crowd-peer": Mutant(
        "a peer is there as long as a SEND to it is in flight", "13_crowd",
        ".callback = [this, peer](const RdmaOp& op) { Sent(peer, op); }});",
        ".callback = [this, weak = peer.get()](const RdmaOp& op) {\n"
        "           Sent({std::shared_ptr<Peer>(), weak}, op); }});",
        "test_crowd.py test_deaf_and_forgotten"),
    "crowd-silent": Mutant(
        "who is silent for long is forgotten", "13_crowd",
        "client->second->heard_at > kForgetAfter) {", "client->second->heard_at > 1h) {",
        "test_crowd.py test_forgotten"),
    "crowd-ready": Mutant(
        "what had to wait is posted when there is room", "13_crowd",
        "    if (!peer->outbox.empty()) ready.push_back(peer);\n", "",
        "test_crowd.py test_many_at_once"),
    "crowd-full": Mutant(
        "the server takes no more clients than it has room for", "13_crowd",
        "if (clients.size() >= kMaxClients) return;", "",
        "test_crowd.py test_full_server"),
    "crowd-again": Mutant(
        "a client that was forgotten begins anew", "13_crowd",
        "    if (Clock::now() - asked_at > kForgetAfter / 2) Connect();\n", "",
        "test_crowd.py test_rare_requests"),
    "crowd-connect-again": Mutant(
        "a CONNECT that is lost is sent again", "13_crowd",
        "again_at = Clock::now() + kConnectAgain;", "again_at = Clock::now() + 1h;",
        "test_crowd.py test_lost_connect"),
    "crowd-heard": Mutant(
        "who goes on asking is not forgotten", "13_crowd",
        "    it->second->heard_at = Clock::now();\n    if (message.type", "    if (message.type",
        "test_crowd.py test_forgotten"),
    "crowd-order": Mutant(
        "answers leave in their order", "13_crowd",
        "    peer->outbox.push_back({type", "    peer->outbox.push_front({type",
        "test_crowd.py test_many_at_once"),
    "crowd-turns": Mutant(
        "those for whom something waits have their turn one after the other", "13_crowd",
        "if (peer->error.empty() && !PostSend(peer)) ready.push_back(peer);",
        "if (peer->error.empty() && !PostSend(peer)) ready.push_front(peer);",
        "test_crowd.py test_turns"),
}
# Helpers that contain the code of a program, by a word in the names of their tests.
HELPERS = {("allocator", "8_malloc"): "allocator", ("inside", "7_queue"): "inside_queue",
           ("inside", "14_strangers"): "inside_strangers",
           ("inside", "10_lock"): "inside_lock"}


def faults(mutant):
    """What is wrong with the mutant itself, one message each. A test in test_tools.py
    looks at all of them."""
    with open(f"{ROOT}/src/{mutant.program}.cpp") as file:
        count = file.read().count(mutant.old)
    if count != 1:
        yield (f"{mutant.old!r} occurs {count} times in src/{mutant.program}.cpp, and "
               "not once")
    if mutant.new == mutant.old:
        yield "it changes nothing"
    test_file, _, names = mutant.tests.partition(" ")
    path = f"{ROOT}/scripts/tests/{test_file}"
    if not os.path.exists(path):
        yield f"there is no scripts/tests/{test_file}"
        return
    with open(path) as file:
        if f"def {names.split()[0]}" not in file.read():
            yield f"scripts/tests/{test_file} has no {names.split()[0]}"


class Broken(Exception):
    """A mutant that says nothing about the tests: it does not build, or no test runs
    for it."""


class Copy:
    """A copy of the repository, in which one mutant after the other is made."""

    def __init__(self, number):
        self.root = f"{COPIES}/{number}"
        os.makedirs(f"{self.root}/build")
        shutil.copy(f"{ROOT}/Makefile", self.root)
        for folder in "src", "scripts", "chapters":
            shutil.copytree(f"{ROOT}/{folder}", f"{self.root}/{folder}", symlinks=True)
        for build in BUILDS:
            os.makedirs(f"{self.root}/{build}", exist_ok=True)
            for entry in os.scandir(f"{ROOT}/{build}"):
                if entry.is_file():
                    shutil.copy2(entry.path, f"{self.root}/{build}")

    def run(self, *command):
        try:
            return subprocess.run(
                command, cwd=self.root, env={**os.environ, "BUILD": "build", "ALL": "1"},
                text=True, check=False, timeout=900, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT)
        except subprocess.TimeoutExpired as error:
            raise Broken(f"{' '.join(command)} does not end") from error

    def make(self, target, build, flags):
        if build == "build/cuda":
            target, build = f"{build}/{target}", "build"
        # A mutant may leave something unused, which is no concern of ours.
        done = self.run("make", "-s", target, f"BUILD={build}", f"CXXFLAGS={flags}",
                        "OUR_CXXFLAGS=-std=c++20")
        if done.returncode != 0:
            raise Broken(done.stdout)

    def pytest(self, tests, *options):
        file, _, names = tests.partition(" ")
        return self.run(sys.executable, "-m", "pytest", "-q", *options,
                        f"scripts/tests/{file}", "-k", names).stdout

    def catches(self, mutant):
        """Returns whether the tests notice."""
        # Most tests run one of the builds, and to build takes long.
        ids = self.pytest(mutant.tests, "--collect-only")
        wanted = [build for build, (word, _) in BUILDS.items()
                  if re.search(rf"\[.*\b{word}\b.*\]", ids)]
        helpers = [helper for (word, program), helper in HELPERS.items()
                   if word in mutant.tests and program == mutant.program]
        path = f"{self.root}/src/{mutant.program}.cpp"
        with open(path) as file:
            source = file.read()
        stat = os.stat(path)
        with open(path, "w") as file:
            file.write(source.replace(mutant.old, mutant.new))
        try:
            for build in wanted or ["build"]:
                self.make(mutant.program, build, BUILDS[build][1])
            for helper in helpers:
                self.make(f"build/{helper}", "build", BUILDS["build"][1])
            said = self.pytest(mutant.tests, "-x", "-n", "2")
        finally:
            with open(path, "w") as file:
                file.write(source)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            # Later tests need the program, too: they ask 4_hello for the providers.
            for path in (*(f"{build}/{mutant.program}" for build in BUILDS),
                         *(f"build/{helper}" for helper in helpers)):
                if os.path.exists(f"{ROOT}/{path}"):
                    # It may still run somewhere.
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(f"{self.root}/{path}")
                    shutil.copy2(f"{ROOT}/{path}", f"{self.root}/{path}")
        # The last line is short. Above it, a failure may show numbers of 100,000 digits,
        # in which these searches would not end.
        summary = said.rstrip().rsplit("\n", 1)[-1]
        # A warning is an error, after a test that has passed.
        if re.search(r"\d+ failed|\d+ passed.* \d+ error", summary):
            return True
        if not re.search(r"\d+ passed", summary):
            raise Broken(said)
        return False


def main():
    names = sys.argv[1:] or list(MUTANTS)
    unknown = [name for name in names if name not in MUTANTS]
    if unknown:
        sys.exit(f"error: no mutant {unknown[0]!r}; there are: {', '.join(MUTANTS)}")
    # Before any of them takes its time.
    wrong = [f"{name}: {message}" for name in names
             for message in faults(MUTANTS[name])]
    if wrong:
        sys.exit("error: " + "\n".join(wrong))
    shutil.rmtree(COPIES, ignore_errors=True)
    copies = queue.SimpleQueue()
    for number in range(JOBS):
        copies.put(Copy(number))
    survivors, broken = [], []

    def try_one(name):
        started = time.monotonic()
        copy = copies.get()
        said = ""
        try:
            caught = copy.catches(MUTANTS[name])
            result = "caught" if caught else "SURVIVED"
            if not caught:
                survivors.append(name)
        except Broken as error:
            result, said = "NOT TRIED", f"\n{error}"
            broken.append(name)
        finally:
            copies.put(copy)
        print(f"{result}: {MUTANTS[name].program}, {name}: {MUTANTS[name].rule} "
              f"({time.monotonic() - started:.0f} s){said}", flush=True)

    # Most tests spend their time waiting.
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(try_one, names))
    print(f"{len(names) - len(survivors) - len(broken)} caught, "
          f"{len(survivors)} survived" + f", {len(broken)} not tried" * bool(broken))
    return 1 if survivors or broken else 0


if __name__ == "__main__":
    sys.exit(main())
