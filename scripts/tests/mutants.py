#!/usr/bin/env python3
"""Breaks one rule of the programs at a time, that of its name, and checks that a test
notices.

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
    program: str
    old: str  # occurs once in the program
    new: str
    tests: str  # a file, and what to pass to pytest's -k


TEXTS = {
    # Of 4 to 7: the rules that all programs keep.
    "posted-again": ("4_hello", "    if (buf.in_flight > 0) continue;\n", "",
        "test_strict.py test_rules and 4_hello"),
    "kept-after-a-failure": ("5_reverse", "    --done.buf->in_flight;\n",
        "    if (error.empty()) --done.buf->in_flight;\n",
        "test_messages.py test_at_the_door and 5_reverse"),
    "overwritten": ("5_reverse", "if (send_buf.in_flight == 0 && !outbox.empty())",
        "if (!outbox.empty())", "test_strict.py test_late_sends and 5_reverse"),
    "overwritten-of-7": ("7_queue",
        "while (i < send_bufs.size() && send_bufs[i].in_flight > 0) ++i;", "",
        "test_strict.py test_late_sends and 7_queue"),
    "eagain": ("5_reverse", "if (ret == -FI_EAGAIN) return false;",
        "if (ret == -FI_EAGAIN) return true;",
        "test_programs.py test_data and 5_reverse and default"),
    "owner": ("4_hello", "int ret = ptr != nullptr ? fi_close(&ptr->fid) : 0;", "int ret = 0;",
        "test_programs.py test_data and 4_hello and shm"),
    "endpoint-last": ("5_reverse",
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
        "  Clock::time_point opened_at = heard_at;\n", "test_strict.py test_rules and 5_reverse"),
    "session-last": ("7_queue",
        "  std::optional<Buffer> source;  // the pages, once the client has asked\n"
        "  Session session;\n",
        "  Session session;\n"
        "  std::optional<Buffer> source;  // the pages, once the client has asked\n",
        "test_strict.py test_stopped_in_a_transfer and 7_queue"),
    "region-first": ("7_queue",
        "  Memory data;\n"
        "  Owned<fid_mr> mr;\n",
        "  Owned<fid_mr> mr;\n"
        "  Memory data;\n", "test_strict.py test_rules and 7_queue and not gpu"),
    "error": ("5_reverse", "    done.error = error;\n", "",
        "test_messages.py test_too_long and 5_reverse"),
    "bad-recv": ("5_reverse", "    op.Check();  // throws if it was too long, for example\n", "",
        "test_messages.py test_too_long and 5_reverse"),
    "refused-post": ("4_hello", "    if (ret != 0) Complete(op, 0, fi_strerror(int(-ret)));\n", "",
        "test_failures.py test_locked_memory and 4_hello"),
    "failed-write": ("7_queue",
        "           op.Check();\n"
        "           session.heard_at", "           session.heard_at",
        "test_messages.py test_memory_that_is_not_there and 7_queue and default"),
    "nobodys-error": ("7_queue",
        "if (entry.op_context == nullptr || (entry.flags & FI_REMOTE_WRITE)) {",
        "if (entry.op_context == nullptr && entry.err == 0) {",
        "test_messages.py test_memory_that_is_not_there and 7_queue and shm"),
    "length": ("4_hello", "done.len = std::min(len, done.len);", "done.len = len;",
        "test_strict.py test_truncated"),
    "inserted": ("5_reverse", "FiCheck(inserted == 0 ? -FI_EINVAL : inserted,",
        "FiCheck(inserted == 0 ? 0 : inserted,",
        "test_failures.py test_address_of_another_provider and 5_reverse"),
    "no-immediate-data": ("6_write", "if (info->domain_attr->cq_data_size < sizeof(uint32_t)) {",
        "if (info == nullptr) {", "test_failures.py test_no_immediate_data and 6_write"),
    "client-error": ("5_reverse",
        "      } catch (const std::exception& e) {\n"
        "        // It ends this client's session",
        "      } catch (const std::logic_error& e) {\n"
        "        // It ends this client's session",
        "test_messages.py test_in_a_session and 5_reverse"),
    "session-after-an-error": ("6_write",
        "        client.done = true;\n"
        "      }\n", "      }\n", "test_messages.py test_in_a_session and 6_write"),
    "at-the-door": ("5_reverse",
        "    } catch (const std::exception& e) {\n"
        "      // A bad",
        "    } catch (const std::logic_error& e) {\n"
        "      // A bad", "test_messages.py test_at_the_door and 5_reverse"),
    "silence": ("5_reverse", '    CheckSilence(session.heard_at, "waiting for the client");\n', "",
        "test_messages.py test_silent_clients and 5_reverse"),
    "silent-server": ("7_queue", "      CheckSilence(heard_at, what);\n", "",
        "test_failures.py test_server_gone and 7_queue"),
    "heard-writes": ("7_queue", "           session.heard_at = Clock::now();\n", "",
        "test_programs.py test_slow_cable"),
    "heard-messages": ("7_queue",
        "    inbox.push_back(std::move(message));\n"
        "    heard_at = Clock::now();\n", "    inbox.push_back(std::move(message));\n",
        "test_programs.py test_slow_cable"),
    "progress": ("7_queue", "    session.Send(AppMessageType::kProgress);\n", "",
        "test_programs.py test_slow_cable"),
    "progress-at-a-time": ("7_queue", "    if (!session.HasSent()) return;\n", "",
        "test_inside.py test_server_of_a_queue and flight and default"),
    "bye": ("5_reverse", "  session.SayBye();\n", "", "test_strict.py test_last_message"),
    "bye-arrives": ("5_reverse", '      WaitUntil("saying BYE", [&] { return HasSent(); });\n', "",
        "test_strict.py test_last_message"),
    "eight": ("7_queue", "clients.size() < kMaxClients && ", "",
        "test_messages.py test_ninth and 7_queue and shm"),
    "ninth": ("5_reverse", "      while (clients.size() < kMaxClients &&",
        "      if (clients.size() >= kMaxClients) listener.inbox.clear();\n"
        "      while (clients.size() < kMaxClients &&",
        "test_messages.py test_ninth and 5_reverse"),
    "first-signal": ("5_reverse", "  while (!g_interrupted) {", "  while (true) {",
        "test_strict.py test_rules and 5_reverse and default"),
    "client-signal": ("7_queue", "if (g_interrupted && Clock::now()", "if (false && Clock::now()",
        "test_failures.py test_client_signals_at_work and 7_queue and shm"),
    "second-signal": ("4_hello", "_exit(128 + signum);", "(void)signum;",
        "test_failures.py test_second_signal"),
    "pipe-is-no-second-signal": ("7_queue", " && signum != SIGPIPE", "",
        "test_inside.py test_signal_before_an_endpoint"),
    "pipe-of-5": ("5_reverse", "{SIGINT, SIGTERM, SIGHUP, SIGPIPE}", "{SIGINT, SIGTERM, SIGHUP}",
        "test_failures.py test_nobody_reads and 5_reverse"),
    "handlers-late": ("7_queue", "    CatchSignals();\n", "",
        "test_failures.py test_client_signals_at_its_first_contact"),
    "pause": ("5_reverse", "if (completions == 0) std::this_thread::sleep_for(kIdlePause);", "",
        "test_failures.py test_idle and not session"),
    "pause-of-7": ("7_queue", "    if (!busy) {\n", "    if (false) {\n",
        "test_failures.py test_idle and not session"),
    "busy-of-7": ("7_queue", "    if (!busy) {\n", "    if (true) {\n",
        "test_programs.py test_busy"),
    "busy-client": ("7_queue",
        "      if (Poll() == 0 && ++empty_polls % kPollsPerYield == 0) {\n",
        "      if (Poll() == 0) {\n        std::this_thread::sleep_for(kIdlePause);\n",
        "test_programs.py test_busy"),
    "type": ("5_reverse", "  if (message.type != type) {",
        "  if (uint32_t(message.type) > 1000) {",
        "test_messages.py test_in_a_session and 5_reverse"),
    "short-message": ("5_reverse", "    if (op.len >= sizeof(message.type)) {",
        "    if (op.len >= 0) {", "test_messages.py test_at_the_door and 5_reverse"),
    "wrong-answer": ("5_reverse", "  if (received != std::string(text.rbegin(), text.rend())) {",
        "  if (received.empty()) {", "test_messages.py test_bad_answers and 5_reverse"),
    "typed-address": ("4_hello", "hex.size() / 2 > kMaxAddressSize ||", "false ||",
        "test_failures.py test_wrong_arguments and 4_hello"),
    "page-size": ("6_write", "page_size > kMaxPageSize ||", "",
        "test_messages.py test_in_a_session and 6_write"),
    "no-pages": ("6_write", "page_size > kMaxPageSize || page_idx.empty() ||",
        "page_size > kMaxPageSize ||", "test_messages.py test_in_a_session and 6_write"),
    "too-many-pages": ("6_write", "page_idx.size() > kMaxTransfer / page_size || ", "",
        "test_messages.py test_in_a_session and 6_write"),
    "number-0": ("6_write", " || request.imm_data == 0 ||", " ||",
        "test_messages.py test_in_a_session and 6_write"),
    "page-index": ("6_write",
        ">=\n"
        "            request.size / page_size) {",
        ">=\n"
        "            ~uint64_t{0} - page_size) {",
        "test_messages.py test_in_a_session and 6_write"),
    "second-request": ("6_write", "if (source || body.size() < sizeof(request))",
        "if (body.size() < sizeof(request))",
        "test_messages.py test_second_request and 6_write and default"),
    "repeat": ("7_queue", "request.total_repeat == 0 || request.total_repeat > kMaxRepeat ||",
        "request.total_repeat == 0 ||", "test_messages.py test_in_a_session and 7_queue"),
    "number": ("6_write", "if (imm_data == request.imm_data) filled = true;",
        "filled = imm_data != 0;",
        "test_messages.py test_interrupted_while_waiting and 6_write and default"),
    "last-write-of-6": ("6_write", "      if (last && source->in_flight > 0) return;\n", "",
        "test_strict.py test_last_write and 6_write"),
    "last-write-of-7": ("7_queue", "(last ? 1 : most)", "most",
        "test_strict.py test_last_write and 7_queue"),
    "bytes-in-flight": ("7_queue", "std::clamp(kMaxOutstandingBytes / request.page_size,",
        "std::clamp(kMaxOutstandingWrites,",
        "test_inside.py test_server_of_a_queue and flight and default"),
    "room": ("7_queue", "posted_write_ops < total_write_ops && session.endpoint.HasRoom()",
        "posted_write_ops < total_write_ops",
        "test_inside.py test_server_of_a_queue and room and default"),
    "queue": ("7_queue", "pending_ops.push_back(op);", "pending_ops.push_front(op);",
        "test_inside.py test_order"),
    "pending": ("7_queue",
        "  size_t PollCompletion() {\n"
        "    ProgressPendingOps();\n", "  size_t PollCompletion() {\n",
        "test_inside.py test_order"),
    "keys": ("6_write", "attr.requested_key = domain.RandomKey();", "attr.requested_key = 1;",
        "test_programs.py test_data and 6_write and default"),
    "key-of-6": ("6_write",
        "    uint64_t key = uint64_t{random()} << 32 | random();\n"
        "    return key >> (64 - 8 * info->domain_attr->mr_key_size);",
        "    static uint64_t key = 0;\n"
        "    return ++key;", "test_strangers.py test_memory_of_a_client and 6_write"),
    "key-size": ("6_write", "    return key >> (64 - 8 * info->domain_attr->mr_key_size);",
        "    return key;", "test_strict.py test_short_keys"),
    "virtual-addresses": ("6_write",
        "  if (domain.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) {",
        "  if (domain.info == nullptr) {", "test_programs.py test_data and 6_write and shm"),
    "offsets": ("6_write", "  if (domain.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) {",
        "  if (domain.info != nullptr) {", "test_programs.py test_data and 6_write and default"),
    "event-queue": ("4_hello", '    if (eq != nullptr) FiCheck(fi_ep_bind(ep, &eq->fid, 0), "fi_ep_bind");\n',
        "",
        "test_strict.py test_rules and 4_hello and default"),
    # What no network here would notice: see strict.cpp and cuda_stub.cpp.
    "strict-order": ("7_queue", "  hints->tx_attr->msg_order = FI_ORDER_SAS;\n", "",
        "test_strict.py test_rules and 7_queue and not gpu"),
    "strict-delivery": ("7_queue", "hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;", "",
        "test_strict.py test_last_write and 7_queue"),
    "strict-last-message": ("5_reverse", "hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;", "",
        "test_strict.py test_last_message"),
    "strict-length": ("5_reverse", "hints->ep_attr->max_msg_size = kMaxMessageSize;", "",
        "test_strict.py test_short_messages and 5_reverse"),
    "strict-context": ("7_queue",
        "    *op = std::move(request);\n"
        "    free_ops.pop_back();\n", "    *op = std::move(request);\n",
        "test_strict.py test_rules and 7_queue and not gpu"),
    "strict-old-device": ("7_queue", "FI_REMOTE_WRITE | FI_RECV, gpu);", "FI_REMOTE_WRITE, gpu);",
        "test_strict.py test_harsh and 7_queue and not gpu"),
    "strict-local-right": ("7_queue", "page_idx.size() * page_size, FI_WRITE,",
        "page_idx.size() * page_size, FI_SEND,",
        "test_strict.py test_rules and 7_queue and not gpu"),
    "strict-descriptor": ("7_queue", "void* desc = fi_mr_desc(op->buf->mr);",
        "void* desc = nullptr;", "test_strict.py test_rules and 7_queue and not gpu"),
    "strict-pages": ("7_queue", "  memset(data.get(), 0, rounded);\n", "",
        "test_strict.py test_rules and 7_queue and not gpu"),
    "strict-mode": ("7_queue", "FI_CONTEXT | FI_CONTEXT2;", "FI_CONTEXT;",
        "test_strict.py test_rules and 7_queue and not gpu"),
    "gpu-shm": ("6_write", "if (shm && !gpu) info", "if (shm) info",
        "test_strict.py test_shm and 6_write"),
    "gpu-mode": ("7_queue", "    hints->domain_attr->mr_mode |= FI_MR_HMEM;\n", "",
        "test_strict.py test_rules and 7_queue-gpu"),
    "gpu-interface": ("7_queue", "    if (gpu) attr.iface = FI_HMEM_CUDA;\n", "",
        "test_strict.py test_rules and 7_queue-gpu"),
    "gpu-flush": ("7_queue", "  if (gpu) CudaFlushWrites();\n", "",
        "test_strict.py test_rules and 7_queue-gpu"),
    "gpu-copy": ("7_queue",
        '  CudaCheck(cudaMemcpy(to, from, size, cudaMemcpyDefault), "cudaMemcpy");\n'
        '  CudaCheck(cudaDeviceSynchronize(), "cudaDeviceSynchronize");',
        '  CudaCheck(cudaMemcpy(to, from, size, cudaMemcpyDefault), "cudaMemcpy");',
        "test_strict.py test_rules and 7_queue-gpu"),
    "gpu-zeros": ("7_queue", '  CudaCheck(cudaMemset(data, 0, size), "cudaMemset");\n', "",
        "test_strict.py test_rules and 7_queue-gpu"),
    "gpu-ordered": ("7_queue", "  if (ordering >= cudaGPUDirectRDMAWritesOrderingOwner) return;\n",
        "", "test_strict.py test_ordered and 7_queue"),
    "gpu-touched": ("7_queue", "    if (gpu) return CudaCopy(to, from, len);\n", "",
        "test_strict.py test_rules and 7_queue-gpu"),
    # Of 8_malloc.
    "loan": ("8_malloc", "for (size_t offset : pieces) pool.allocator.Free(offset);", "",
        "test_malloc.py test_killed_clients"),
    "loan-before-the-session": ("8_malloc",
        "  Loan loan;\n"
        "  Session session;\n",
        "  Session session;\n"
        "  Loan loan;\n", "test_malloc.py test_allocator and plain"),
    "size-of-a-piece": ("8_malloc", "if (size > 0 && size <= kPoolSize) offset",
        "if (size > 0) offset", "test_malloc.py test_refusals"),
    "neighbours": ("8_malloc", "before->first + before->second == piece->first", "false",
        "test_malloc.py test_allocator and plain"),
    "best-fit": ("8_malloc", "piece->second < best->second) best",
        "piece->second > best->second) best", "test_malloc.py test_allocator and plain"),
    "alive": ("8_malloc", "        session.Send(AppMessageType::kAlive);\n", "",
        "test_malloc.py test_alive"),
    "drain": ("8_malloc", "!g_interrupted && done()", "done()", "test_malloc.py test_interrupted"),
    "read-what-was-written": ("8_malloc",
        "  client.WaitForAll(pool.buf);\n"
        '  printf("Filled', '  printf("Filled', "test_malloc.py test_late_writes"),
    "place-in-flight": ("8_malloc",
        "                [&pool, offset] { pool.allocator.Free(offset); });\n",
        "                [] {});\n"
        "    pool.allocator.Free(offset);\n", "test_strict.py test_ and 8_malloc"),
    "somebody-else-piece": ("8_malloc", "if (loan.pieces.erase(offset) == 0) {",
        "if (loan.pieces.erase(offset) > 9) {", "test_malloc.py test_ and not allocator"),
    # Of 9_file.
    "credit": ("9_file", "if (!slot.credit || !Ended(slot.read)) return;",
        "if (!Ended(slot.read)) return;", "test_file.py test_slow_disk"),
    "lent-slot": ("9_file", "if (slot.chunk >= num_chunks || slot.save.valid()) {",
        "if (slot.chunk >= num_chunks) {", "test_file.py test_chunk_without_credit and saved"),
    "disk-in-a-thread": ("9_file", "      if (!Ended(slot.save)) continue;\n",
        "      if (!slot.save.valid()) continue;\n", "test_file.py test_disk_that_stands_still"),
    "checksum-last": ("9_file",
        "      file->part.Write(data, size, slot.chunk * kChunkSize);\n"
        "      // Afterwards, so that it reveals a WRITE that came while we wrote.\n"
        "      if (XXH3_64bits_withSeed(data, size, slot.chunk) != message.checksum) {\n"
        '        throw std::runtime_error("a checksum is not correct");\n'
        "      }\n",
        "      if (XXH3_64bits_withSeed(data, size, slot.chunk) != message.checksum) {\n"
        '        throw std::runtime_error("a checksum is not correct");\n'
        "      }\n"
        "      file->part.Write(data, size, slot.chunk * kChunkSize);\n",
        "test_file.py test_write_while_saving"),
    "sync-file": ("9_file",
        'if (fsync(part.fd) != 0) throw SystemError("cannot sync " + part.path);', "",
        "test_file.py test_disk_that_forgets"),
    "replace": ("9_file", "linkat(dir, part.path.c_str(), dir, name.c_str(), 0)",
        "renameat(dir, part.path.c_str(), dir, name.c_str())",
        "test_file.py test_created_meanwhile"),
    "part-stays": ("9_file", "  ~TargetFile() { unlinkat(dir, part.path.c_str(), 0); }\n", "",
        "test_file.py test_file_size_limit"),
    "way-out": ("9_file", 'std::string("/\\0", 2)', 'std::string("\\0", 1)',
        "test_file.py test_names"),
    "size-limit": ("9_file", "  signal(SIGXFSZ, SIG_IGN);\n", "",
        "test_file.py test_file_size_limit"),
    "short-write": ("9_file", "      done += size_t(ret);\n", "      done = size;\n",
        "test_file.py test_file_size_limit"),
    "failed-writer": ("9_file", "      session.Send(AppMessageType::kFailed, e.what());\n",
        "      session.Send(AppMessageType::kFailed, e.what());\n"
        "      done = true;\n", "test_file.py test_failed_while_it_writes"),
    "leavers-at-the-disk": ("9_file", "      return client.done && !client.DiskBusy();",
        "      return client.done;", "test_file.py test_disk_that_stands_still"),
    "patient-server": ("9_file", "        Report();\n", "",
        "test_file.py test_disk_slower_than_patience"),
    "patient-sender": ("9_file",
        "    reported_at = Clock::now();\n"
        "    session.Send(AppMessageType::kProgress);\n"
        "  }\n"
        "\n"
        "  // Takes",
        "  }\n"
        "\n"
        "  // Takes", "test_file.py test_disk_slower_than_patience"),
    "saved-early": ("9_file", "               read_chunks < num_chunks) {",
        "               slots.empty()) {", "test_file.py test_bad_answers"),
    # Of 10_lock.
    "compare": ("10_lock", "turn.Word()) == expected.Word();", "turn.Word()) != ~uint64_t{0};",
        "test_lock.py test_slow_holder"),
    "lease": ("10_lock", "} else if (Clock::now() - changed_at > kLease) {",
        "} else if (Clock::now() - changed_at > 1h) {",
        "test_lock.py test_holder_that_goes and killed"),
    "order-of-turn": ("10_lock", "[this] { return buf.in_flight == 0; });",
        "[this, type] { return buf.in_flight == 0 || type == RdmaOpType::kWrite; });",
        "test_lock.py test_late_writes"),
    "aside": ("10_lock", "if (turn.ledger == aside) ++aside;", "",
        "test_lock.py test_late_completions"),
    "claim": ("10_lock", "if (before == 0 || before == key) return place;", "return place;",
        "test_lock.py test_together"),
    "seat": ("10_lock", "while (std::any_of(clients.begin(), clients.end(), taken)) ++seat;",
        "while (taken(clients.front())) ++seat;",
        "test_lock.py test_seats"),
    "entry-twice": ("10_lock", "correct &= entry.count == counts[entry.client]++;", "",
        "test_lock.py test_the_server_finds"),
    "torn-version": ("10_lock", "return checksum == (version == 0 ? 0 : Checksum());",
        "return version == 0 || checksum == Checksum();",
        "test_inside.py test_ledger_that_changes"),
    "old-data": ("10_lock", "key * 31 + version);", "key * 31);",
        "test_inside.py test_ledger_that_changes"),
    "ledger-once": ("10_lock", "if (turn.Word() == before.Word()) break;", "break;",
        "test_inside.py test_ledger_that_changes"),
    "lease-of-a-turn": ("10_lock", "        changed_at = Clock::now();\n", "",
        "test_lock.py test_long_queue"),
    "released-twice": ("10_lock", "    if (num_changes++ == 0) before_us = before;\n",
        "    if (num_changes++ == 0) before_us = before;\n"
        "    ReplaceTurn({turn.ticket + 1, aside}, {turn.ticket + 2, aside});",
        "test_lock.py test_together"),
    "log-bound": ("10_lock", "if (ticket >= kLogSize) throw", "if (ticket > kLogSize) throw",
        "test_lock.py test_clients_find"),
    "claim-again": ("10_lock", "      if (before == 0 || before == key) return place;",
        "      if (before == 0) return place;", "test_lock.py test_seats"),
    "seat-bound": ("10_lock",
        "    if (joined.size != sizeof(SharedTable) || joined.seat >= kMaxClients) {",
        "    if (joined.size != sizeof(SharedTable)) {", "test_lock.py test_bad_replies"),
    "holes": ("10_lock", "correct &= holes <= failures;", "",
        "test_lock.py test_the_server_finds or test_failed_clients"),
    # Of 11_rails.
    "rail-again": ("11_rails", "        again.insert(rail->writes.begin(), rail->writes.end());\n",
        "", "test_rails.py test_link_down"),
    "rail-number": ("11_rails", "{ return served.id == id; }",
        "{ return !served.id.empty(); }", "test_rails.py test_number_of_a_client"),
    "rail-one-request": ("11_rails",
        "if (!source) HandleRequest(*message, rail.domain);",
        "HandleRequest(*message, rail.domain);", "test_rails.py test_request_over_each_rail"),
    "rail-no-answer": ("11_rails", 'throw std::runtime_error("no answer");', "return;",
        "test_rails.py test_namesakes"),
    "rail-bad-message": ("11_rails", "if (all.size() == 1) throw;", "if (!all.empty()) throw;",
        "test_strict.py test_rail_fails and memory"),
    "rail-link-local": ("11_rails", '"fe80:", 5) == 0) continue', '"fe80:", 5) == 77) continue',
        "test_rails.py test_ipv6"),
    "rail-tail": ("11_rails", "several ? kMaxOutstandingRailBytes : kMaxOutstandingBytes;",
        "several ? kMaxOutstandingBytes : kMaxOutstandingBytes;", "test_rails.py test_four_rails"),
    "rail-failed-write": ("11_rails",
        "           op.Check();\n"
        "           rail.heard_at = Clock::now();\n"
        "           rail.writes.erase(write);\n",
        "           rail.writes.erase(write);\n"
        "           op.Check();\n"
        "           rail.heard_at = Clock::now();\n",
        "test_strict.py test_rail_fails and write"),
    "rail-failed-counts": ("11_rails",
        "           op.Check();\n"
        "           rail.heard_at = Clock::now();\n"
        "           rail.writes.erase(write);\n"
        "           ++rail.written;\n"
        "           ++finished_write_ops;\n",
        "           ++finished_write_ops;\n"
        "           op.Check();\n"
        "           rail.heard_at = Clock::now();\n"
        "           rail.writes.erase(write);\n"
        "           ++rail.written;\n", "test_strict.py test_rail_fails and write"),
    "rail-completed": ("11_rails",
        "           op.Check();\n           rail.heard_at = Clock::now();\n",
        "           op.Check();\n", "test_rails.py test_four_rails"),
    "strict-rail-notification": ("11_rails", "(write == last && finished_write_ops < last)",
        "(write == last && again.size() > 0)", "test_strict.py test_last_write and 11_rails"),
    "strict-rail-key": ("11_rails", "rail.remote_key = msg.rkey;",
        "static const uint64_t first = msg.rkey;  // whichever rail was quickest\n"
        "    rail.remote_key = first;", "test_strict.py test_rules and 11_rails and not gpu"),
    "strict-rail-descriptor": ("11_rails", ".buf = &*rail.memory,", ".buf = &*source,",
        "test_strict.py test_rules and 11_rails and not gpu"),
    "rail-away": ("11_rails", "constexpr auto kRailLimit = 4s;", "constexpr auto kRailLimit = 1s;",
        "test_rails.py test_link_away"),
    # Of 12_sleep.
    "sleep": ("12_sleep", "now >= domain.poll_at && silence < kSpin) {", "silence < 1h) {",
        "test_sleep.py test_asleep"),
    "sleep-empty-wakes": ("12_sleep", "can_be_woken && domain.empty_wakes < kEmptyWakes) {",
        "can_be_woken) {", "test_sleep.py test_asleep"),
    "sleep-long-pause": ("12_sleep", "kIdlePause, kMaxPause));", "kIdlePause, kIdlePause));",
        "test_sleep.py test_long_pauses"),
    "sleep-signal": ("12_sleep",
        "  eventfd_write(g_wake_fd, 1);  // wakes a loop that is about to fall asleep\n", "",
        "test_sleep.py test_signal_before_sleep"),
    "sleep-all-sessions": ("12_sleep",
        "    for (ServedClient& client : clients) sessions.push_back(&client.session);\n", "",
        "test_sleep.py test_woken and default"),
    "sleep-wakes": ("12_sleep",
        "    domain.empty_wakes = 0;\n"
        "    if (ret == -FI_EAVAIL) {", "    if (ret == -FI_EAVAIL) {",
        "test_sleep.py test_woken_once"),
    "later-answers": ("12_sleep", "  if (received != std::string(text.rbegin(), text.rend())) {",
        "  if (false) {", "test_sleep.py test_a_later_answer"),
    "strict-trywait": ("12_sleep",
        "int ret = fi_trywait(domain.fabric, cqs.data(), int(cqs.size()));", "int ret = 0;",
        "test_sleep.py test_woken_once"),
    "strict-no-trywait": ("12_sleep", "    if (can_be_woken && domain", "    if (domain",
        "test_strict.py test_rules and 12_sleep and default"),
    "strict-refused": ("12_sleep", "if (endpoint.refused || endpoint.wait_fd < 0) can",
        "if (endpoint.wait_fd < 0) can", "test_sleep.py test_woken_once"),
    # Of 13_crowd.
    "crowd-nobody": ("13_crowd", "    if (it->second->reached) {", "    if (true) {",
        "test_failures.py test_addresses_of_nobody"),
    "crowd-unsent": ("13_crowd", "client->outbox.size() >= kMaxUnsent) {",
        "client->outbox.size() >= (kMaxUnsent << 30)) {", "test_crowd.py test_deaf_client"),
    "crowd-remove": ("13_crowd", "      mailbox.endpoint.RemovePeerAddress(it->second->addr);\n",
        "", "test_crowd.py test_deaf_client"),
    "crowd-late": ("13_crowd", '    it->second->error = "forgotten";\n', "",
        "test_crowd.py test_asks_and_leaves"),
    "crowd-cleanup": ("13_crowd", 'setenv("FI_AV_REMOVE_CLEANUP", "1", 0);', "",
        "test_crowd.py test_deaf_client"),
    "crowd-same-address": ("13_crowd", "      if (before != clients.end()) Forget(before);\n", "",
        "test_crowd.py test_whose_message"),
    "crowd-number": ("13_crowd", "if (message->number == server->number) return message;",
        "return message;", "test_crowd.py test_stray_replies"),
    "crowd-peer": ("13_crowd", ".callback = [this, peer](const RdmaOp& op) { Sent(peer, op); }});",
        ".callback = [this, weak = peer.get()](const RdmaOp& op) {\n"
        "           Sent({std::shared_ptr<Peer>(), weak}, op); }});",
        "test_crowd.py test_deaf_and_forgotten"),
    "crowd-silent": ("13_crowd", "client->second->heard_at > kForgetAfter) {",
        "client->second->heard_at > 1h) {", "test_crowd.py test_forgotten"),
    "crowd-full": ("13_crowd", "if (clients.size() >= kMaxClients) return;", "",
        "test_crowd.py test_full_server"),
    "crowd-again": ("13_crowd", "    if (Clock::now() - asked_at > kForgetAfter / 2) Connect();\n",
        "", "test_crowd.py test_rare_requests"),
    "crowd-connect-again": ("13_crowd", "again_at = Clock::now() + kConnectAgain;",
        "again_at = Clock::now() + 1h;", "test_crowd.py test_lost_connect"),
    "crowd-order": ("13_crowd", "    peer->outbox.push_back({type",
        "    peer->outbox.push_front({type", "test_crowd.py test_many_at_once"),
    "crowd-ready": ("13_crowd", "    if (!peer->outbox.empty()) ready.push_back(peer);\n", "",
        "test_crowd.py test_many_at_once"),
    "crowd-heard": ("13_crowd",
        "    it->second->heard_at = Clock::now();\n"
        "    if (message.type", "    if (message.type", "test_crowd.py test_forgotten"),
    "crowd-turns": ("13_crowd",
        "if (peer->error.empty() && !PostSend(peer)) ready.push_back(peer);",
        "if (peer->error.empty() && !PostSend(peer)) ready.push_front(peer);",
        "test_crowd.py test_turns"),
    # Of 14_strangers.
    "nonce": ("14_strangers",
        "if (peer != FI_ADDR_UNSPEC && message.header.nonce != nonce) return;", "",
        "test_strangers.py test_byes_of_strangers"),
    "too-long": ("14_strangers", "    if (!op.error.empty() || op.len < sizeof(Header)) return;\n",
        "    op.Check();\n"
        "    if (op.len < sizeof(Header)) return;\n",
        "test_messages.py test_too_long and 14_strangers"),
    "nonce-guessed": ("14_strangers", "nonce = domain.random();",
        "nonce = uint32_t(time(nullptr));", "test_messages.py test_bad_answers and 14_strangers"),
    "sign-of-life": ("14_strangers",
        "    if (!op.error.empty() || op.len < sizeof(Header)) return;\n",
        "    heard_at = Clock::now();\n"
        "    if (!op.error.empty() || op.len < sizeof(Header)) return;\n",
        "test_attacks.py test_junk_to_the_place"),
    "refuse": ("14_strangers", "      session.Send(AppMessageType::kRefused, e.what());\n", "",
        "test_strangers.py test_refused"),
    "refuse-leaves": ("14_strangers",
        "return done && (session.HasSent() || Clock::now() > leave_at);", "return done;",
        "test_strict.py test_late_refusal"),
    "refuse-ends": ("14_strangers", "leave_at = Clock::now() + kLeaveGrace;",
        "leave_at = Clock::now() + 1h;",
        "test_inside.py test_server_of_strangers and leave"),
    "printable": ("14_strangers", '"refused: " + Printable(message.body)',
        '"refused: " + message.body', "test_messages.py test_terrible_texts_of_servers"),
    "request-pages": ("14_strangers",
        "page_idx.empty() || page_idx.size() > kMaxTransfer / page_size", "page_idx.empty()",
        "test_messages.py test_in_a_session and 14_strangers"),
    "wait": ("14_strangers", "kSilenceLimit || Tell(visitor);", "kSilenceLimit;",
        "test_attacks.py test_another_family"),
    "wait-again": ("14_strangers", "answer.header.type == AppMessageType::kWait;) {",
        "asked == 0 && answer.header.type == AppMessageType::kWait;) {",
        "test_attacks.py test_another_family"),
    "wait-forgets": ("14_strangers",
        "    return fi_inject(endpoint->ep, &wait, sizeof(wait), visitor.contact) !=\n"
        "           -FI_EAGAIN;\n",
        "    fi_inject(endpoint->ep, &wait, sizeof(wait), visitor.contact);\n"
        "    return false;\n", "test_inside.py test_server_of_strangers and line"),
    "wait-second": ("14_strangers", "[&](const Visitor& v) { return now < v.tell_at; }",
        "[](const Visitor&) { return true; }", "test_inside.py test_server_of_strangers and line"),
    "wait-many": ("14_strangers", "          visitors.size() < kMaxWaiting) {",
        "          true) {", "test_attacks.py test_long_line"),
    "wait-junk": ("14_strangers", "      line.AddAll();\n",
        "      if (clients.size() < kMaxClients) line.AddAll();\n",
        "test_attacks.py test_full_and_filled"),
    "wait-failed": ("14_strangers", "        first->tell_at = Clock::now();\n",
        "        first->tell_at = Clock::now() - 1h;\n", "test_attacks.py test_no_descriptor"),
    "wait-dead-endpoint": ("14_strangers",
        "      endpoint->PollCompletion();\n"
        "    } catch (const std::runtime_error&) {",
        "      endpoint->PollCompletion();\n"
        "    } catch (const std::logic_error&) {", "test_attacks.py test_nowhere_in_line"),
    "aside-closed": ("14_strangers", "    if (endpoint && now > tell_until + kTellGrace) {",
        "    if (endpoint && false) {", "test_attacks.py test_invented_addresses_in_line"),
    "aside-contacts": ("14_strangers", "      if (num_contacts == kMaxContacts) return false;", "",
        "test_inside.py test_server_of_strangers and renew"),
    "aside-full": ("14_strangers", "        tell_until = Clock::now() + kTellGrace;\n", "",
        "test_inside.py test_server_of_strangers and renew"),
    "family": ("14_strangers", "size_t same = internet ? 2 : 0;",
        "size_t same = internet ? 0 : 0;", "test_attacks.py test_another_family"),
    "budget": ("14_strangers", "      if (size > memory_left) return;\n", "",
        "test_attacks.py test_waiting_is_not_silence"),
    "budget-returns": ("14_strangers", "    if (source) memory_left += source->size;\n", "",
        "test_attacks.py test_killed_while_it_waits"),
    "page-a-round": ("14_strangers", "      if (made_pages < page_idx.size()) MakeNextPage();\n",
        "      while (made_pages < page_idx.size()) {\n"
        "        MakeNextPage();\n"
        "        if (!source) break;\n"
        "      }\n", "test_inside.py test_server_of_strangers and pages"),
    "waiting": ("14_strangers",
        "      session.heard_at = Clock::now();\n"
        "    }\n"
        "    session.Send",
        "    }\n"
        "    session.Send", "test_attacks.py test_waiting_is_not_silence"),
    "waiting-dead": ("14_strangers",
        "    if (!session.HasSent()) return;\n"
        "    reported_at = Clock::now();\n", "    reported_at = Clock::now();\n",
        "test_attacks.py test_killed_while_it_waits and tcp"),
    "descriptors": ("14_strangers", "  RaiseFileLimit();\n", "",
        "test_attacks.py test_idle_connections"),
    "descriptors-soon": ("14_strangers",
        '  setenv("FI_OFI_RXM_CM_PROGRESS_INTERVAL", "1000", 0);\n', "",
        "test_attacks.py test_idle_connections"),
    "descriptors-closed": ("14_strangers", "  TakeStandardFiles();\n", "",
        "test_attacks.py test_closed_descriptors"),
    # Of 15_ring.
    "ring-piece": ("15_ring", "      if (posted >= taken + num_blocks) return;\n", "",
        "test_ring.py test_sums"),
    "ring-credit": ("15_ring", "      if (posted >= credit) return;\n",
        "      if (credit == 0) return;\n", "test_ring.py test_ring_under_strict_rules and long"),
    "ring-slot-in-flight": ("15_ring",
        "      if (posted >= kSlots && !written[posted - kSlots]) return;\n", "",
        "test_ring.py test_watched_ring and strict"),
    "ring-own-write": ("15_ring", "      if (taken >= half && !written[taken - half]) return;\n",
        "", "test_ring.py test_watched_ring and late"),
    "ring-number": ("15_ring", "      arrived[number - 1] = true;",
        "      static size_t num_arrived = 0;\n"
        "      arrived[num_arrived++] = true;", "test_ring.py test_ring_under_strict_rules"),
    "ring-early-credit": ("15_ring", "std::min(taken + kSlots, total);",
        "std::min(taken + kSlots + 2, total);", "test_ring.py test_sums or test_stragglers"),
    "ring-alive": ("15_ring", "      session.Send(AppMessageType::kProgress);\n", "",
        "test_ring.py test_stragglers"),
    "ring-pass-on": ("15_ring", "      PassOn(e.what());\n", "", "test_ring.py test_killed_rank"),
    "ring-whom": ("15_ring", "      at = &right;\n", "",
        "test_ring.py test_interrupted or test_killed_rank"),
    "ring-folder": ("15_ring", "  if (std::filesystem::exists(path)) {", "  if (path.empty()) {",
        "test_ring.py test_old_folder"),
    "ring-same": ("15_ring", "        ready.num_floats != num_floats) {",
        "        ready.num_floats == 0) {", "test_ring.py test_others_have_other_arguments"),
}
MUTANTS = {name: Mutant(*texts) for name, texts in TEXTS.items()}
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
        print(f"{result}: {MUTANTS[name].program}, {name} "
              f"({time.monotonic() - started:.0f} s){said}", flush=True)

    # Most tests spend their time waiting.
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(try_one, names))
    print(f"{len(names) - len(survivors) - len(broken)} caught, "
          f"{len(survivors)} survived" + f", {len(broken)} not tried" * bool(broken))
    return 1 if survivors or broken else 0


if __name__ == "__main__":
    sys.exit(main())
