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
        "  Endpoint endpoint;  // the last, so that it is closed before it loses buffers\n",
        "  Endpoint endpoint;\n"
        "  std::deque<Buffer> recv_bufs;\n"
        "  Buffer send_buf;\n"
        "  std::deque<Message> inbox;   // that have arrived\n"
        "  std::deque<Message> outbox;  // that wait for send_buf\n"
        "  fi_addr_t peer = FI_ADDR_UNSPEC;\n"
        "  Clock::time_point heard_at = Clock::now();  // the last sign of life\n",
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
        "[this] { return outstanding == 0; });",
        "[this, type] { return outstanding == 0 || type == RdmaOpType::kWrite; });",
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
        "~Seat() { memory.free_seats.insert(seat); }",
        "~Seat() { memory.free_seats.insert(0); }",
        "test_lock.py test_seats"),
    "other-second-signal": Mutant(
        "a second signal ends the process, of whatever kind it is", "14_strangers",
        "{SIGINT, SIGTERM, SIGHUP}) signal(signum, SIG_DFL);",
        "{SIGINT}) signal(signum, SIG_DFL);",
        "test_failures.py test_second_signal"),
    "locked-memory": Mutant(
        "an error about memory names `ulimit -l`", "14_strangers",
        "if (error == FI_ENOMEM) {", "if (error == -1) {",
        "test_failures.py test_locked_memory and 14_strangers"),
    "pipe": Mutant(
        "nobody who reads our output ends us", "14_strangers",
        "signal(SIGPIPE, SIG_IGN);", "",
        "test_failures.py test_nobody_reads and 14_strangers"),
    "key": Mutant(
        "nobody guesses a key", "8_malloc",
        "uint64_t key = uint64_t{random()} << 32 | random();",
        "static uint64_t key = random() % 1; ++key;",
        "test_strangers.py test_memory_of_a_server and 8_malloc"),
    "nonce": Mutant(
        "a message of a stranger ends no conversation", "14_strangers",
        "      if (base.nonce != nonce) continue;\n", "",
        "test_strangers.py test_byes_of_strangers and 14_strangers"),
    "too-long": Mutant(
        "nor does one that is too long", "14_strangers",
        "      } catch (const std::runtime_error&) {\n        continue;\n",
        "      } catch (const std::logic_error&) {\n        continue;\n",
        "test_strangers.py test_byes_of_strangers and 14_strangers"),
    "junk-at-the-door": Mutant(
        "bad messages keep nobody out", "14_strangers",
        "        Add(ReadConnect(*listener.Take(), AppMessageType::kConnect));\n"
        "      } catch (const std::exception& e) {\n",
        "        Add(ReadConnect(*listener.Take(), AppMessageType::kConnect));\n"
        "      } catch (const std::logic_error& e) {\n",
        "test_attacks.py test_junk_at_the_door and 14_strangers"),
    "number-of-another": Mutant(
        "only a client itself says which of its chunks have arrived", "9_file",
        "return chunk ^ (nonce | 1u << 31);", "return chunk ^ 1u << 31;",
        "test_file.py test_number_of_another"),
    "idle-sender": Mutant(
        "whoever is only alive leaves its place to those who wait", "9_file",
        "        if (!client.done && !line.visitors.empty()) client.CheckIdle();\n", "",
        "test_strangers.py test_idle_senders"),
    "torn-version": Mutant(
        "half of a version is not that of a free record", "10_lock",
        "return checksum == (version == 0 ? 0 : Checksum());",
        "return version == 0 || checksum == Checksum();",
        "test_inside.py test_ledger_that_changes"),
    "dead-in-line": Mutant(
        "a client that dies while it waits for memory is given up", "11_rails",
        "if (rail.outstanding == 0 && endpoint.HasRoom()) endpoint",
        "if (rail.outstanding == 0) endpoint",
        "test_strangers.py test_killed_while_it_waits_for_memory and 11_rails"),
    "dead-waiter": Mutant(
        "a dead client that waits for memory gives its place up", "14_strangers",
        """    Report();
    session.endpoint.CheckSilence""",
        """    Report();
    if (state == State::kWrite) session.endpoint.CheckSilence""",
        "test_strangers.py test_killed_while_it_waits_for_memory and 14_strangers"),
    "dead-waiter-of-rails": Mutant(
        "a dead client that waits for memory gives its place up", "11_rails",
        """    Report();
    Freshest(rails).CheckSilence""",
        """    Report();
    if (state == State::kWrite) Freshest(rails).CheckSilence""",
        "test_strangers.py test_killed_while_it_waits_for_memory and 11_rails"),
    "waiting-is-not-silence": Mutant(
        "the time in which a client waits for its pages is no silence", "14_strangers",
        "    if (state != State::kWrite) session.endpoint.RestartSilence();\n", "",
        "test_inside.py test_server_of_strangers and silence"),
    "told": Mutant(
        "who waits is told so", "8_malloc",
        "if (untold.empty()) return;", "return;",
        "test_strangers.py test_line"),
    "given-up": Mutant(
        "who has given up leaves the line", "8_malloc",
        "      visitors.pop_front();\n    }\n    if (untold",
        "      visitors.push_back({visitors.front().connect});\n"
        "      visitors.pop_front();\n    }\n    if (untold",
        "test_strangers.py test_line"),
    "tell-when-full": Mutant(
        "a server with places left tells those who wait for one, too", "14_strangers",
        "      line.TellAll();\n",
        "      if (clients.size() >= kMaxClients) line.TellAll();\n",
        "test_strict.py test_slow_endpoints"),
    "line-once": Mutant(
        "nobody stands in the line twice", "14_strangers",
        "if (AddressIn(visitor.connect) != AddressIn(connect)) continue;",
        "continue;",
        "test_attacks.py test_asking_at_once"),
    "idle": Mutant(
        "a client that does nothing gives its place to those who wait", "8_malloc",
        "if (Clock::now() - worked_at < kIdleLimit) return;", "return;",
        "test_strangers.py test_idle_clients and 8_malloc"),
    "busy": Mutant(
        "one that does something keeps it", "8_malloc",
        "if (alive.finished > finished) worked_at = Clock::now();", "",
        "test_strangers.py test_idle_clients and 8_malloc"),
    "refused": Mutant(
        "a server says what it refuses", "14_strangers",
        "      session.Refuse(e.what());\n", "",
        "test_strangers.py test_refused and 14_strangers"),
    "no-descriptor": Mutant(
        "a client for whom there is no descriptor keeps its place in the line",
        "14_strangers",
        """        clients.emplace_back(domain, num_clients + 1,
                             line.visitors.front().connect, memory_left);
        full_until = {};
        ++num_clients;
        line.visitors.pop_front();
""", """        AppConnectMessage connect = line.visitors.front().connect;
        line.visitors.pop_front();
        clients.emplace_back(domain, num_clients + 1, connect, memory_left);
        full_until = {};
        ++num_clients;
""",
        "test_strangers.py test_no_descriptor"),
    "clear": Mutant(
        "a first client finds a table that nobody has touched", "10_lock",
        "if (clients.empty()) memory.Clear();", "",
        "test_strangers.py test_idle_table"),
    "far-back": Mutant(
        "a client far back in the queue looks again soon", "10_lock",
        "std::min<uint64_t>(ticket - turn.ticket, kMaxClients)", "(ticket - turn.ticket)",
        "test_strangers.py test_far_back"),
    "rest": Mutant(
        "an RdmaOp rests before it is used again", "14_strangers",
        "while (free_ops.size() < kSpareOps) {", "while (free_ops.empty()) {",
        "test_strict.py test_receipt_fails and 14_strangers"),
    "second-report": Mutant(
        "a second report about a RECV leaves the WRITE in its record alone",
        "14_strangers",
        "if ((entry.flags & FI_RECV) &&\n", "if (false &&\n",
        "test_strict.py test_receipt_fails and 14_strangers"),
    "address-size": Mutant(
        "a length in a message is checked", "14_strangers",
        "connect.addr_size > sizeof(connect.addr)", "false",
        "test_messages.py test_at_the_door and 14_strangers"),
    "early-bye": Mutant(
        "a BYE may overtake a completion", "14_strangers",
        "          HandleBye();\n", "",
        "test_reorder.py test_late_completions and 14_strangers"),
    "no-nic": Mutant(
        "a software provider has no NIC", "14_strangers",
        "if (info->nic == nullptr || info->nic->link_attr == nullptr) return 0;", "",
        "test_programs.py test_data and 14_strangers and shm"),
    "batch": Mutant(
        "a batch of completions is finished", "14_strangers",
        "if (!failure) failure = std::current_exception();", "throw;",
        "test_failures.py test_callback_that_throws"),
    "signal-handlers": Mutant(
        "our signal handlers come before those of shm", "14_strangers",
        "    if (!g_interrupted) InstallSignalHandlers();\n", "",
        "test_messages.py test_client_interrupted_at_first_contact and 14_strangers"),
    "bye-after-an-error": Mutant(
        "a client that fails says BYE", "14_strangers",
        "session.SayBye(kContactGrace);", "",
        "test_failures.py test_client_signals_at_work and 14_strangers"),
    "memory-for-all": Mutant(
        "the memory of the server is bounded", "14_strangers",
        "if (size > memory_left) return;", "",
        "test_strangers.py test_memory_for_all"),
    "loan": Mutant(
        "the pool gets back what a client had", "8_malloc",
        "for (size_t offset : pieces) pool.allocator.Free(offset);", "",
        "test_malloc.py test_killed_clients"),
    "somebody-else-piece": Mutant(
        "a client frees only what it has", "8_malloc",
        "if (loan.pieces.erase(addr - loan.pool.base) == 0) {",
        "if (loan.pieces.erase(addr - loan.pool.base) > 9) {",
        "test_malloc.py test_ and not allocator"),
    "credit": Mutant(
        "the sender waits for a credit", "9_file",
        "if (!slot.full || !slot.credit) return;", "if (!slot.full) return;",
        "test_file.py test_"),
    "next-chunk": Mutant(
        "a number names the chunk that is next in its slot", "9_file",
        "if (slot.chunk != chunk || slot.save.valid()) return;",
        "if (slot.save.valid()) return;",
        "test_file.py test_credits"),
    "handlers-again": Mutant(
        "a second signal ends the process, also if an endpoint is opened before it",
        "14_strangers", "if (!g_interrupted) InstallSignalHandlers();",
        "InstallSignalHandlers();",
        "test_inside.py test_signal_before_an_endpoint and strangers"),
    "page-at-a-time": Mutant(
        "the other clients need not wait until all pages are made", "14_strangers",
        "if (++made_pages < page_idx.size()) return;",
        "if (++made_pages < page_idx.size()) return ContinueMakePages();",
        "test_inside.py test_server_of_strangers and pages"),
    "progress-piles-up": Mutant(
        "no PROGRESS follows one that is on its way", "14_strangers",
        "< kReportPeriod || session.mailbox.unsent > 0) return;",
        "< kReportPeriod) return;",
        "test_inside.py test_server_of_strangers and progress"),
    "buffers-first": Mutant(
        "an endpoint is closed before the buffers that it uses", "14_strangers",
        "  Endpoint endpoint;\n", "  Endpoint endpoint;\n  struct Early {\n"
        "    std::list<Buffer>& bufs;\n    ~Early() { bufs.clear(); }\n"
        "  } early{bufs};\n",
        "test_inside.py test_server_of_strangers and close"),
    "ledger-once": Mutant(
        "a ledger that is not the valid one any more is READ again", "10_lock",
        "if (turn.Word() == before.Word()) break;", "break;",
        "test_inside.py test_ledger_that_changes"),
    "answers": Mutant(
        "no answers pile up", "8_malloc",
        "while (session.mailbox.unsent == 0) {", "while (true) {",
        "test_malloc.py test_flood and shm"),
    "sync-file": Mutant(
        "a file is saved when it is on disk", "9_file",
        'if (fsync(file) != 0) throw SystemError("cannot sync " + path);', "",
        "test_file.py test_disk_that_forgets"),
    "sync-name": Mutant(
        "a file is saved when its name is on disk", "9_file",
        'if (fsync(dir) != 0) throw SystemError("cannot sync the directory");', "",
        "test_file.py test_disk_that_forgets"),
    "longer": Mutant(
        "a file that is longer than it says is not sent", "9_file",
        'throw std::runtime_error("the file is longer than it says");', "return;",
        "test_file.py test_longer_than_it_says"),
    "leavers": Mutant(
        "clients that have left count until their chunks are saved", "9_file",
        "bool full = clients.size() >= kMaxClients",
        "bool full = std::count_if(clients.begin(), clients.end(), [](auto& client) {\n"
        "        return !client.done;\n"
        "      }) >= int(kMaxClients)",
        "test_file.py test_slow_leavers"),
    "refused-writer": Mutant(
        "a client that is refused has time to hear it", "9_file",
        "      if (state != State::kRefused) RefuseFile(e.what());\n",
        "      RefuseFile(e.what());\n"
        "      throw;\n",
        "test_file.py test_refused_while_it_writes"),
    "lease-of-a-turn": Mutant(
        "a lease begins with the turn", "10_lock",
        "        changed_at = Clock::now();\n", "",
        "test_lock.py test_long_queue"),
    "released-twice": Mutant(
        "a client ends its own turn, and not the next one", "10_lock",
        "++num_changes;",
        "++num_changes;\n"
        "    ReplaceTurn({turn.ticket + 1, aside}, {turn.ticket + 2, aside});",
        "test_lock.py test_together"),
}

MUTANTS |= {
    "rail-again": Mutant(
        "what a failed rail had in flight is written again", "11_rails",
        "if (op.in_flight && op.OneSided()) again", "if (op.number > ~0u) again",
        "test_rails.py test_link_down"),
    "rail-away": Mutant(
        "a rail survives that is away for a moment", "11_rails",
        "constexpr auto kRailLimit = 4s;", "constexpr auto kRailLimit = 1s;",
        "test_rails.py test_link_away"),
    "rail-nonce": Mutant(
        "only who knows the nonce of a client is one of its rails", "11_rails",
        "if (!client.done && client.Nonce() == nonce) return",
        "if (!client.done && (client.Nonce() == nonce || nonce > 0)) return",
        "test_rails.py test_nonce_of_a_rail"),
    "rail-request": Mutant(
        "all rails bring the same request", "11_rails",
        "if (indices == page_idx && memcmp(&msg, &request_msg, sizeof(msg)) == 0) {",
        "if (msg.num_pages > 0) {",
        "test_rails.py test_another_request"),
    "rail-next-address": Mutant(
        "an adapter without an answer asks at the next address", "11_rails",
        "if (!rail->untried.empty() && !late) {", "if (rail->untried.size() > 99) {",
        "test_rails.py test_dead_from_the_start"),
    "rail-each-address": Mutant(
        "an adapter asks at each address once", "11_rails",
        "    untried.pop_front();\n    session.peer = ", "    session.peer = ",
        "test_failures.py test_address_of_another_provider and 11_rails"),
    "rail-waiting": Mutant(
        "a client in line gives up when it hears nothing more", "11_rails",
        "if (session.waiting || (rail->untried.empty() && !answered)) {",
        "if (session.waiting) continue;\n"
        "        if (rail->untried.empty() && !answered) {",
        "test_strangers.py test_server_killed_while_others_wait and 11_rails"),
    "rail-link-local": Mutant(
        "a link-local address is no rail", "11_rails",
        '"fe80:", 5) == 0) return', '"fe80:", 5) == 77) return',
        "test_rails.py test_ipv6"),
    "rail-flood": Mutant(
        "the rails of a client are limited", "11_rails",
        "if (num_rails == kMaxRails) return;", "if (kMaxRails == 0) return;",
        "test_rails.py test_flood_of_rails"),
}

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
    "crowd-in-flight": Mutant(
        "no client has more than its share of the room for SENDs", "13_crowd",
        "!peer->outbox.empty() && peer->in_flight < kMaxInFlight) {",
        "!peer->outbox.empty() && peer->in_flight < (kMaxInFlight << 30)) {",
        "test_crowd.py test_deaf_client"),
    "crowd-unsent": Mutant(
        "who asks and does not read is forgotten", "13_crowd",
        "client.peer->Unsent() >= kMaxUnsent) {",
        "client.peer->Unsent() >= (kMaxUnsent << 30)) {",
        "test_crowd.py test_deaf_client"),
    "crowd-remove": Mutant(
        "what is in flight to a client that is forgotten is given up", "13_crowd",
        "      mailbox.endpoint.RemovePeerAddress(client.peer->addr);\n", "",
        "test_crowd.py test_deaf_client"),
    "crowd-cleanup": Mutant(
        "fi_av_remove closes the connection", "13_crowd",
        'setenv("FI_AV_REMOVE_CLEANUP", "1", 0);', "",
        "test_crowd.py test_deaf_client"),
    "crowd-same-address": Mutant(
        "an address is that of one client", "13_crowd",
        "if (before != numbers.end()) Forget(clients.find(before->second));", "",
        "test_crowd.py test_whose_message"),
    "crowd-number": Mutant(
        "a client hears only what has its number", "13_crowd",
        "header.number != server->number || !IsWaiting()", "!IsWaiting()",
        "test_crowd.py test_stray_replies"),
    "crowd-sequence": Mutant(
        "a reply is that to the last request", "13_crowd",
        "} else if (header.sequence == sequence) {", "} else {",
        "test_crowd.py test_stray_replies"),
    "crowd-peer": Mutant(
        "a peer is there as long as a SEND to it is in flight", "13_crowd",
        ".callback = [peer](const RdmaOp& op) {",
        ".callback = [peer = peer.get()](const RdmaOp& op) {",
        "test_crowd.py test_deaf_and_forgotten"),
    "crowd-silent": Mutant(
        "who is silent for long is forgotten", "13_crowd",
        "} else if (silence > kForgetAfter) {", "} else if (silence > 1h) {",
        "test_crowd.py test_forgotten"),
    "crowd-blocked": Mutant(
        "what had to wait is posted when there is room", "13_crowd",
        "      PostSends(peer);\n    }", "      blocked.push_back(peer);\n    }",
        "test_crowd.py test_many_at_once"),
    "crowd-key-size": Mutant(
        "a key is no longer than it may be", "13_crowd",
        "if (key_size > kMaxKeySize ||", "if (key_size > 1000 ||",
        "test_crowd.py test_requests_that_are_none"),
    "crowd-value-size": Mutant(
        "a value is no longer than it may be", "13_crowd",
        "message.body.size() - key_size - 1 > kMaxValueSize) {", "false) {",
        "test_crowd.py test_requests_that_are_none"),
    "crowd-tiny-entries": Mutant(
        "an entry without a value takes room as well", "13_crowd",
        "size_t size = kEntrySize + key.size()", "size_t size = key.size()",
        "test_crowd.py test_tiny_entries"),
    "crowd-store": Mutant(
        "what has been deleted makes room", "13_crowd",
        "      store_size -= old_size;\n", "",
        "test_crowd.py test_full_store"),
    "crowd-full": Mutant(
        "the server takes no more clients than it has room for", "13_crowd",
        "if (clients.size() >= kMaxClients) {", "if (clients.size() >= 99999) {",
        "test_crowd.py test_full_server"),
    "crowd-again": Mutant(
        "a client that was forgotten begins anew", "13_crowd",
        "      connected = false;\n", "",
        "test_crowd.py test_rare_requests"),
    "crowd-connect-again": Mutant(
        "a CONNECT that is lost is sent again", "13_crowd",
        "Clock::now() - connect_at > kConnectAgain) {",
        "Clock::now() - connect_at > 1h) {",
        "test_crowd.py test_lost_connect"),
}

MUTANTS |= {
    "ledger-bound": Mutant(
        "a number of a ledger in the turn is checked", "10_lock",
        'if (turn.ledger >= 2 * kMaxClients) throw BadMessage("no such ledger");', "",
        "test_lock.py test_clients_find"),
    "log-bound": Mutant(
        "no entry is written behind the log", "10_lock",
        "if (ticket >= kLogSize) {", "if (ticket > kLogSize) {",
        "test_lock.py test_clients_find"),
    "fair": Mutant(
        "a server looks at the other clients after a few WRITEs", "14_strangers",
        "size_t end = std::min(posted_write_ops + kWritesPerPoll, total_write_ops);",
        "size_t end = total_write_ops;",
        "test_inside.py test_server_of_strangers and pages"),
    "longest-page": Mutant(
        "no WRITE is longer than the provider takes", "14_strangers",
        "msg.page_size > session.mailbox.domain.info->ep_attr->max_msg_size ||", "",
        "test_strict.py test_long_pages and 14_strangers"),
    "checksum-last": Mutant(
        "a WRITE that comes while a chunk is saved is in its checksum", "9_file",
        "      file.Write(data, size, slot.chunk * chunk_size);\n"
        "      // Afterwards, so that it reveals a WRITE that came while we wrote.\n"
        "      slot.checksum = Checksum(slot.chunk, data, size);\n",
        "      slot.checksum = Checksum(slot.chunk, data, size);\n"
        "      file.Write(data, size, slot.chunk * chunk_size);\n",
        "test_file.py test_write_while_saving"),
    "rail-failed-write": Mutant(
        "a WRITE that has failed on a rail is written again", "11_rails",
        "if (!op.error.empty()) again.insert(op.number);", "",
        "test_strict.py test_rail_fails and write"),
    "rail-not-registered": Mutant(
        "what an adapter has not registered counts as not registered", "11_rails",
        "if (ret != 0) mrs.erase(&domain);", "",
        "test_strict.py test_rail_fails and memory"),
    "too-long-a-message": Mutant(
        "a message that did not fit is no message", "8_malloc",
        '      if (len > done.len) done.error = "the message is longer than the buffer";\n',
        "",
        "test_reorder.py test_truncated and 8_malloc"),
    "random-nonce": Mutant(
        "nobody guesses a nonce", "14_strangers",
        "nonce = std::random_device()();",
        "nonce = static_cast<uint32_t>(Clock::now().time_since_epoch() / 1ms);",
        "test_messages.py test_bad_answers and 14_strangers"),
    "refusal-arrives": Mutant(
        "what is refused is heard of, before the endpoint is closed", "14_strangers",
        "reason);\n    leave_at = Clock::now() + kContactGrace;", "reason);",
        "test_strict.py test_long_pages and 14_strangers"),
    "sleep-wakes": Mutant(
        "who is woken for something goes on sleeping between", "12_sleep",
        "    domain.empty_wakes = 0;\n    if (ret == -FI_EAVAIL) {",
        "    if (ret == -FI_EAVAIL) {",
        "test_sleep.py test_woken_once"),
    "family": Mutant(
        "an address of another family spoils no address vector", "14_strangers",
        "(internet ? 2 : 0)", "(internet ? 0 : 0)",
        "test_attacks.py test_another_family"),
    "junk": Mutant(
        "only a message with the nonce is a sign of life", "14_strangers",
        "      if (base.nonce != nonce) continue;\n      endpoint.RestartSilence();\n",
        "      endpoint.RestartSilence();\n      if (base.nonce != nonce) continue;\n",
        "test_attacks.py test_junk"),
    "line-forgets": Mutant(
        "what was told to invented addresses is given up", "14_strangers",
        "if (endpoint && now > close_at) {", "if (false) {",
        "test_attacks.py test_invented_addresses_in_line"),
    "file-limit": Mutant(
        "connections without a word take up no place", "14_strangers",
        "  setrlimit(RLIMIT_NOFILE, &limit);\n", "",
        "test_attacks.py test_idle_connections"),
    "connections-soon": Mutant(
        "connections without a word are accepted soon", "14_strangers",
        '  setenv("FI_OFI_RXM_CM_PROGRESS_INTERVAL", "1000", 0);\n', "",
        "test_attacks.py test_idle_connections"),
    "descriptors": Mutant(
        "no file of libfabric's is standard error", "14_strangers",
        'if (fcntl(fd, F_GETFD) < 0) open("/dev/null", O_RDWR);', "(void)fd;",
        "test_attacks.py test_closed_descriptors"),
    "crowd-connect-twice": Mutant(
        "a CONNECT that comes twice begins one conversation", "13_crowd",
        "        mailbox.Send(it->second.peer, AppMessageType::kAccept);\n      }\n      return;",
        "        mailbox.Send(it->second.peer, AppMessageType::kAccept);\n      }",
        "test_crowd.py test_whose_message"),
    "crowd-heard": Mutant(
        "who goes on asking is not forgotten", "13_crowd",
        "    client.heard_at = Clock::now();\n", "",
        "test_crowd.py test_forgotten"),
}

# Made by somebody who had not seen the tests.
MUTANTS |= {
    "line-latest": Mutant(
        "of several CONNECTs of a client in line, the last one counts", "14_strangers",
        "      visitor.connect = connect;\n",
        "",
        "test_attacks.py test_asking_at_once"),
    "no-contact-after-a-signal": Mutant(
        "after a signal nobody is contacted for the first time", "14_strangers",
        "    CheckInterrupted();\n"
        "    SendAddress(AppMessageType::kConnect);",
        "    SendAddress(AppMessageType::kConnect);",
        "test_strict.py test_interrupted_before_first_contact and 14_strangers"),
    "two-in-flight": Mutant(
        "of the largest pages, two are in flight", "14_strangers",
        "std::max<size_t>(kMaxOutstandingBytes / page_size, 2)",
        "std::max<size_t>(kMaxOutstandingBytes / page_size, 1)",
        "test_inside.py test_server_of_strangers and large"),
    "no-zero-byte": Mutant(
        "a text ends with its field, even without a zero byte", "8_malloc",
        "    reply.error[sizeof(reply.error) - 1] = 0;\n",
        "",
        "test_malloc.py test_bad_answers"),
    "pieces": Mutant(
        "a client has so many pieces, and no more", "8_malloc",
        '    if (loan.pieces.size() >= kMaxBlocks) return "you have too many pieces";\n',
        "",
        "test_malloc.py test_many_pieces"),
    "asking": Mutant(
        "a client that asks for something keeps its place", "8_malloc",
        "    worked_at = Clock::now();\n"
        "    auto request",
        "    auto request",
        "test_strangers.py test_idle_clients and 8_malloc"),
    "leavers-at-the-disk": Mutant(
        "nobody waits until the disk has saved what is left of others", "9_file",
        "      return client.done && !client.DiskBusy() && client.session.HasLeft();",
        "      return client.done && client.session.HasLeft();",
        "test_file.py test_disk_that_stands_still"),
    "no-thread": Mutant(
        "a client hears why its chunk can't be saved", "9_file",
        "      arrived.push_back(ChunkNumber(imm_data, session.nonce));",
        "      SaveChunk(ChunkNumber(imm_data, session.nonce));",
        "test_file.py test_no_thread"),
    "one-endpoint-a-round": Mutant(
        "a server opens one endpoint, then looks at its clients", "9_file",
        "      if (!full && !line.visitors.empty()) {\n",
        "      for (; !full && !line.visitors.empty();\n"
        "           full = clients.size() >= kMaxClients) {\n",
        "test_watch.py test_one_endpoint_a_round and 9_file"),
    "claim-again": Mutant(
        "a key of a client that has gone belongs to the next one in its seat", "10_lock",
        "      if (before == 0 || before == key) return place;",
        "      if (before == 0) return place;",
        "test_lock.py test_seats"),
    "seat-bound": Mutant(
        "a seat that is not there is refused", "10_lock",
        "    if (joined.table.size != sizeof(SharedTable) ||\n"
        "        joined.seat >= kMaxClients) {",
        "    if (joined.table.size != sizeof(SharedTable)) {",
        "test_lock.py test_bad_replies"),
    "reported-entries": Mutant(
        "a log lacks no entry that a client has reported", "10_lock",
        "      correct &= counts[client] == count;\n",
        "      correct &= counts[client] <= count;\n",
        "test_lock.py test_the_server_finds"),
    "rail-pending": Mutant(
        "what waits for room on a rail that is given up is written again", "11_rails",
        "    for (const RdmaOp* op : endpoint.pending_ops) {\n"
        "      if (op->OneSided()) again.insert(op->number);\n"
        "    }\n",
        "",
        "test_strict.py test_rail_fails and room"),
    "rails-closed-first": Mutant(
        "the rails are closed before the memory is looked at", "11_rails",
        "  SayBye(rails);\n"
        "  if (memory->gpu >= 0) CudaFlushWrites(memory->gpu);\n"
        "  CheckMemory(*memory, request, page_idx);\n",
        "  if (memory->gpu >= 0) CudaFlushWrites(memory->gpu);\n"
        "  CheckMemory(*memory, request, page_idx);\n"
        "  SayBye(rails);\n",
        "test_rails.py test_late_bytes"),
    "later-answers": Mutant(
        "each answer is compared", "12_sleep",
        "  if (received != std::string(text.rbegin(), text.rend())) {", "  if (false) {",
        "test_sleep.py test_a_later_answer"),
    "crowd-order": Mutant(
        "answers leave in their order", "13_crowd",
        "    peer->outbox.push_back({{type", "    peer->outbox.push_front({{type",
        "test_crowd.py test_many_at_once"),
    "crowd-turns": Mutant(
        "those for whom something waits have their turn one after the other", "13_crowd",
        "    if (!peer->outbox.empty()) blocked.push_back(peer);",
        "    if (!peer->outbox.empty()) blocked.push_front(peer);",
        "test_crowd.py test_turns"),
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
    "strict-rail-notification": Mutant(
        "the last WRITE waits for those on all rails", "11_rails",
        "(write == last && finished_write_ops < last)",
        "(write == last && again.size() > 0)",
        "test_strict.py test_last_write and 11_rails"),
    "strict-rail-key": Mutant(
        "each rail has the key of its own domain", "11_rails",
        "rail.rkey = std::exchange(msg.rkey, 0);",
        "static const uint64_t first = msg.rkey;  // whichever rail was quickest\n"
        "    msg.rkey = 0;\n"
        "    rail.rkey = first;",
        "test_strict.py test_rules and 11_rails and not gpu"),
    "strict-rail-descriptor": Mutant(
        "each rail has the descriptor of its own domain", "11_rails",
        "fi_mr_desc(op->buf->mrs.at(&domain));",
        "fi_mr_desc(op->buf->mrs.begin()->second);",
        "test_strict.py test_rules and 11_rails and not gpu"),
    "strict-receipt": Mutant(
        "an error of an operation that is not in flight is nobody's", "14_strangers",
        "    if (!op->in_flight) return;\n", "",
        "test_strict.py test_receipt_fails and 14_strangers"),
}
# Helpers that contain the code of a program, by a word in the names of their tests.
HELPERS = {("callback", "14_strangers"): "callbacks", ("inside", "7_queue"): "inside_queue",
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
