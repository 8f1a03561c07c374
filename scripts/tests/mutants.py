#!/usr/bin/env python3
"""Breaks one rule of the programs at a time, that of its name, and checks that a test
notices.

Usage: scripts/tests/mutants.py [NAME...]    (make mutants)
  NAME  the mutants to try; without any: all of them, which takes an hour
  JOBS  in the environment: how many to try at a time (as many as there are cores)

Each mutant is made in a copy of the repository, in build/mutants/. It is caught if
the tests that are named beside it fail. Exits with 1 if one survives.

No test of ours can see what huge pages are for, and no provider here reports that an
fi_inject has failed, so these have no mutant.
"""

import concurrent.futures
import os
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
    change: str  # {-what goes-} and {+what comes+}, with what is around it
    where: str  # a file, and what to pass to pytest's -k beside the program's name

    @property
    def old(self):
        """Occurs once in the program."""
        return re.sub(r"(?s)\{-(.*?)-\}|\{\+.*?\+\}", r"\1", self.change)

    @property
    def new(self):
        return re.sub(r"(?s)\{\+(.*?)\+\}|\{-.*?-\}", r"\1", self.change)

    @property
    def tests(self):
        """The file, and the names."""
        file, _, names = self.where.partition(": ")
        return f"test_{file}.py", names


# By program: the rule, the change, and the tests that should fail then.
CHANGES = {
    "4_hello": {
        "posted-again": ("{-if (buf.in_flight > 0) continue;-}", "strict: test_rules"),
        "owner": ("int ret = {-ptr != nullptr ? fi_close(&ptr->fid) : -}0;",
            "programs: test_data and shm"),
        "refused-post": ("{-if (ret != 0) Complete(op, 0, fi_strerror(int(-ret)));-}",
            "failures: test_locked_memory"),
        "length": ("done.len = {-std::min(len, done.len)-}{+len+};", "strict: test_truncated"),
        "second-signal": ("{-_exit(128 + signum)-}{+(void)signum+};",
            "failures: test_second_signal"),
        "typed-address": ("{-hex.size() / 2 > kMaxAddressSize-}{+false+} ||",
            "failures: test_wrong_arguments"),
        "event-queue": (
            '{-if (eq != nullptr) FiCheck(fi_ep_bind(ep, &eq->fid, 0), "fi_ep_bind");-}',
            "strict: test_rules and default"),
    },
    "5_reverse": {
        "kept-after-a-failure": ("    {+if (error.empty()) +}--done.buf->in_flight;",
            "messages: test_at_the_door"),
        "overwritten": ("if ({-send_buf.in_flight == 0 && -}!outbox.empty())",
            "strict: test_late_sends"),
        "eagain": ("if (ret == -FI_EAGAIN) return {-false-}{+true+};",
            "programs: test_data and default"),
        "error": ("{-done.error = error;-}", "messages: test_too_long"),
        "bad-recv": ("{-op.Check();  // throws if it was too long, for example-}",
            "messages: test_too_long"),
        "inserted": ("FiCheck(inserted == 0 ? {--FI_EINVAL-}{+0+} : inserted,",
            "failures: test_address_of_another_provider"),
        "client-error": ("} catch (const std::{-exception-}{+logic_error+}& e) {\n"
            "        // It ends this client's session", "messages: test_in_a_session"),
        "at-the-door": ("} catch (const std::{-exception-}{+logic_error+}& e) {\n      // A bad",
            "messages: test_at_the_door"),
        "clock-before-the-queue": ("{-if (Poll() > 0) continue;\n"
            "      -}CheckSilence(heard_at, what);{+\n      Poll();+}",
            "failures: test_stood_still"),
        "silence": ('{-CheckSilence(session.heard_at, "waiting for the client");-}',
            "messages: test_silent_clients"),
        "bye-arrives": ('{-WaitUntil("saying BYE", [&] { return HasSent(); });-}',
            "strict: test_last_message"),
        "ninth": ("      {+if (clients.size() >= kMaxClients) listener.inbox.clear();\n"
            "      +}while (clients.size() < kMaxClients &&", "messages: test_ninth"),
        "first-signal": ("while ({-!g_interrupted-}{+true+}) {", "strict: test_rules and default"),
        "pipe-of-5": ("{SIGINT, SIGTERM, SIGHUP{-, SIGPIPE-}}", "failures: test_nobody_reads"),
        "pause": ("{-if (completions == 0) std::this_thread::sleep_for(kIdlePause);-}",
            "failures: test_idle and not session"),
        "type": ("if ({-message.type != type-}{+uint32_t(message.type) > 1000+}) {",
            "messages: test_in_a_session"),
        "short-message": ("if (op.len >= {-sizeof(message.type)-}{+0+}) {",
            "messages: test_at_the_door"),
        "wrong-answer": (
            "if (received{- != std::string(text.rbegin(), text.rend()-}{+.empty(+})) {",
            "messages: test_bad_answers"),
        "strict-last-message": ("{-hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;-}",
            "strict: test_last_message"),
        "strict-length": ("{-hints->ep_attr->max_msg_size = kMaxMessageSize;-}",
            "strict: test_short_messages"),
    },
    "7_queue": {
        "busy-again": ("    {+static +}bool busy", "failures: test_idle_in_a_session"),
        "overwritten-of-7": ("if ({-send_buf.in_flight == 0 && -}!outbox.empty())",
            "strict: test_late_sends"),
        "session-last": (
            "  {-std::optional<Buffer> source;  // the pages, once the client has asked\n"
            "  Session session;-}{+Session session;\n"
            "  std::optional<Buffer> source;  // the pages, once the client has asked+}",
            "strict: test_stopped_in_a_transfer"),
        "region-first": (
            "  {-Memory data;\n  Owned<fid_mr> mr-}{+Owned<fid_mr> mr;\n  Memory data+};",
            "strict: test_rules and not gpu"),
        "failed-write": ("           {-op.Check();\n           -}session.heard_at",
            "messages: test_memory_that_is_not_there and default"),
        "nobodys-error": (
            "if (entry.op_context == nullptr {-|| (entry.flags & FI_REMOTE_WRITE)-}{+&& "
            "entry.err == 0+}) {", "messages: test_memory_that_is_not_there and shm"),
        "silent-server": ("{-CheckSilence(heard_at, what);-}", "failures: test_server_gone"),
        "heard-writes": ("{-session.heard_at = Clock::now();-}", "programs: test_slow_cable"),
        "heard-messages": ("inbox.push_back(std::move(message));{-\n    heard_at = Clock::now();-}",
            "programs: test_slow_cable"),
        "progress": ("{-session.Send(AppMessageType::kProgress);-}", "programs: test_slow_cable"),
        "progress-at-a-time": ("{-if (!session.HasSent()) return;-}", "strict: test_reports"),
        "bye": ("} catch (const std::{-runtime_error-}{+logic_error+}&) {\n      // The server",
            "failures: test_server_gone_before_the_bye and sockets"),
        "eight": ("{-clients.size() < kMaxClients &&-}", "messages: test_ninth and shm"),
        "client-signal": ("if ({-g_interrupted-}{+false+} && Clock::now()",
            "failures: test_client_signals_at_work and shm"),
        "pipe-is-no-second-signal": ("{-&& signum != SIGPIPE-}",
            "failures: test_nobody_reads_a_client"),
        "handlers-late": ("{-    CatchSignals();\n-}",
            "failures: test_client_signals_at_its_first_contact"),
        "pause-of-7": ("if ({-!busy-}{+false+}) {", "failures: test_idle and not session"),
        "busy-of-7": ("if ({-!busy-}{+true+}) {", "programs: test_busy"),
        "busy-client": (
            "{-if (++empty_polls % kPollsPerYield == 0) std::this_thread::yield();-}"
            "{+std::this_thread::sleep_for(kIdlePause);+}", "programs: test_busy"),
        "repeat": ("request.total_repeat == 0 ||{- request.total_repeat > kMaxRepeat ||-}",
            "messages: test_in_a_session"),
        "last-write-of-7": ("{-if (last && source->in_flight > 0) return;-}", "strict: test_last_write"),
        "bytes-in-flight": (
            "std::clamp({-kMaxOutstandingBytes / request.page_size-}{+kMaxOutstandingWrites+},",
            "strict: test_queue"),
        "room": ("posted_write_ops < total_write_ops{- && session.endpoint.HasRoom()-}",
            "strict: test_message_between_writes"),
        "queue": ("pending_ops.{-push_back-}{+push_front+}(op);", "strict: test_queue"),
        "pending": ("size_t PollCompletion() {{-\n    ProgressPendingOps();-}",
            "strict: test_harsh and not gpu"),
        "strict-order": ("{-hints->tx_attr->msg_order = FI_ORDER_SAS;-}",
            "strict: test_rules and not gpu"),
        "strict-delivery": ("{-hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;-}",
            "strict: test_last_write"),
        "strict-context": ("*op = std::move(request);{-\n    free_ops.pop_back();-}",
            "strict: test_rules and not gpu"),
        "strict-old-device": ("FI_REMOTE_WRITE{- | FI_RECV-}, gpu);",
            "strict: test_harsh and not gpu"),
        "strict-local-right": ("page_idx.size() * page_size, {-FI_WRITE-}{+FI_SEND+},",
            "strict: test_rules and not gpu"),
        "strict-descriptor": ("void* desc = {-fi_mr_desc(op->buf->mr)-}{+nullptr+};",
            "strict: test_rules and not gpu"),
        "strict-pages": ("{-memset(data, 0, rounded);-}", "strict: test_rules and not gpu"),
        "strict-mode": ("FI_CONTEXT{- | FI_CONTEXT2-};", "strict: test_rules and not gpu"),
        "gpu-mode": ("{-hints->domain_attr->mr_mode |= FI_MR_HMEM;-}",
            "strict: test_rules and gpu"),
        "gpu-interface": ("{-if (gpu) attr.iface = FI_HMEM_CUDA;-}", "strict: test_rules and gpu"),
        "gpu-flush": ("{-if (gpu) CudaFlushWrites();-}", "strict: test_rules and gpu"),
        "gpu-copy": ('CudaCheck(cudaMemcpy(to, from, size, cudaMemcpyDefault), "cudaMemcpy");{-\n'
            '  CudaCheck(cudaDeviceSynchronize(), "cudaDeviceSynchronize");-}',
            "strict: test_rules and gpu"),
        "gpu-ordered": ("{-if (ordering >= cudaGPUDirectRDMAWritesOrderingOwner) return;-}",
            "strict: test_ordered"),
        "gpu-touched": ("{-if (gpu) return CudaCopy(to, from, len);-}",
            "strict: test_rules and gpu"),
    },
    "6_write": {
        "no-immediate-data": (
            "if (info{-->domain_attr->cq_data_size < sizeof(uint32_t)-}{+ == nullptr+}) {",
            "failures: test_no_immediate_data"),
        "session-after-an-error": ("{-        client.done = true;\n      -}{+      +}}",
            "messages: test_in_a_session"),
        "number-0": ("||{- request.imm_data == 0 ||-}", "messages: test_in_a_session"),
        "page-index": (">=\n            {-request.size /-}{+~uint64_t{0} -+} page_size) {",
            "messages: test_in_a_session"),
        "second-request": ("if ({-source || -}body.size() < sizeof(request))",
            "messages: test_second_request and default"),
        "number": ("{-if (imm_data == request.imm_data) filled = true-}{+filled = imm_data != 0+};",
            "messages: test_interrupted_while_waiting and default"),
        "last-write-of-6": ("{-if (last && source->in_flight > 0) return;-}",
            "strict: test_last_write"),
        "key-of-6": ("    {-uint64_t key = uint64_t{random()} << 32 | random();\n"
            "    size_t bits = 8 * info->domain_attr->mr_key_size;\n"
            "    return bits < 64 ? key % (uint64_t{1} << bits) : key-}{+static uint64_t "
            "key = 0;\n"
            "    return ++key+};", "strangers: test_memory_of_a_client"),
        "key-size": ("return {-bits < 64 ? key % (uint64_t{1} << bits) : -}key;",
            "strict: test_short_keys"),
        "virtual-addresses": (
            "if (domain.info{-->domain_attr->mr_mode & FI_MR_VIRT_ADDR-}{+ == nullptr+}) {",
            "programs: test_data and shm"),
        "offsets": ("if (domain.info{-->domain_attr->mr_mode & FI_MR_VIRT_ADDR-}{+ != nullptr+}) {",
            "programs: test_data and default"),
        "gpu-shm": ("if (shm{- && !gpu-}) info", "strict: test_shm"),
    },
    "8_malloc": {
        "loan": ("{-for (size_t offset : pieces) pool.allocator.Free(offset);-}",
            "malloc: test_killed_clients"),
        "size-of-a-piece": ("if (size > 0{- && size <= kPoolSize-}) offset",
            "malloc: test_refusals"),
        "neighbours": ("{-before->first + before->second == piece->first-}{+false+}",
            "malloc: test_allocator and plain"),
        "alive": ("{-session.Send(AppMessageType::kAlive);-}", "malloc: test_alive"),
        "drain": ("{-!g_interrupted && -}done()", "malloc: test_interrupted"),
        "read-what-was-written": ('  {-client.WaitForAll(pool.buf);\n  -}printf("Filled',
            "malloc: test_late_writes"),
        "place-in-flight": ("[{-&pool, offset] { pool.allocator.Free(offset); }-}{+] {});\n"
            "    pool.allocator.Free(offset+});", "strict: test_"),
        "somebody-else-piece": ("if (loan.pieces.erase(offset) {-== 0-}{+> 9+}) {",
            "malloc: test_ and not allocator"),
    },
    "9_file": {
        "credit": ("if (!{-slot.credit || !-}Ended(slot.read)) return;", "file: test_slow_disk"),
        "lent-slot": ("if (slot.chunk >= num_chunks{- || slot.save.valid()-}) {",
            "file: test_chunk_without_credit and saved"),
        "disk-in-a-thread": ("if (!{-Ended(slot.save-}{+slot.save.valid(+})) continue;",
            "file: test_disk_that_stands_still"),
        "checksum-last": ("{-      file->part.Write(data, size, slot.chunk * kChunkSize);\n"
            "      // Afterwards, so that it reveals a WRITE that came while we wrote.\n-}"
            "      if (XXH3_64bits_withSeed(data, size, slot.chunk) != message.checksum) {\n"
            '        throw std::runtime_error("a checksum is not correct");\n'
            "{-      }-}{+      }\n      file->part.Write(data, size, slot.chunk * kChunkSize);+}",
            "file: test_write_while_saving"),
        "sync-file": ('{-if (fsync(part.fd) != 0) throw SystemError("cannot sync " + part.path);-}',
            "file: test_disk_that_forgets"),
        "replace": ("{-linkat(dir, part.path.c_str(), dir, name.c_str(), 0-}{+renameat(dir, "
            "part.path.c_str(), dir, name.c_str()+})", "file: test_created_meanwhile"),
        "part-stays": ("{-~TargetFile() { unlinkat(dir, part.path.c_str(), 0); }-}",
            "file: test_file_size_limit"),
        "way-out": ('std::string("{-/\\0", 2-}{+\\0", 1+})', "file: test_names"),
        "size-limit": ("{-signal(SIGXFSZ, SIG_IGN);-}", "file: test_file_size_limit"),
        "failed-writer": (
            "session.Send(AppMessageType::kFailed, e.what());{+\n      done = true;+}",
            "file: test_failed_while_it_writes"),
        "leavers-at-the-disk": ("return c.done{- && !c.DiskBusy()-};",
            "file: test_disk_that_stands_still"),
        "patient-server": ("{-Report();-}", "file: test_disk_slower_than_patience"),
        "patient-sender": (
            "{-    reported_at = Clock::now();\n    session.Send(AppMessageType::kProgress);\n-}"
            "  }\n\n  // Takes", "file: test_disk_slower_than_patience"),
        "saved-early": ("               {-read_chunks < num_chunks-}{+slots.empty()+}) {",
            "file: test_bad_answers"),
    },
    "10_lock": {
        "own-seat": ("seat = {-seat-}{+(num_clients - 1) % kMaxClients+};", "lock: test_seats"),
        "compare": ("turn.Word()) {-== expected.Word()-}{+!= ~uint64_t{0}+};",
            "lock: test_slow_holder"),
        "lease": ("} else if (Clock::now() - changed_at > {-kLease-}{+1h+}) {",
            "lock: test_holder_that_goes and killed"),
        "order-of-turn": (
            "[this{-] { return buf.in_flight == 0-}{+, type] { return buf.in_flight == 0 || "
            "type == RdmaOpType::kWrite+}; });", "lock: test_late_writes"),
        "aside": ("{-if (turn.ledger == aside) ++aside;-}", "lock: test_late_completions"),
        "claim": ("{-if (before == 0 || before == key) -}return place;", "lock: test_together"),
        "seat": ("while ({-std::any_of(clients.begin(), clients.end(), "
            "taken-}{+taken(clients.front()+})) ++seat;", "lock: test_seats"),
        "torn-version": ("return {-checksum == (version == 0 ? 0 : Checksum())-}"
            "{+version == 0 || checksum == Checksum()+};", "lock: test_torn_records"),
        "old-data": ("key * 31{- + version-});", "lock: test_torn_records"),
        "ledger-once": ("{-if (turn.Word() == before.Word()) -}break;",
            "lock: test_ledger_that_changes"),
        "lease-of-a-turn": ("{-        changed_at = Clock::now();\n-}", "lock: test_long_queue"),
        "seat-bound": (
            "if (joined.size != sizeof(SharedTable){- || joined.seat >= kMaxClients-}) {",
            "lock: test_bad_replies"),
        "interrupted-message": ('{-WaitUntil("waiting-}{+session.WaitUntil("waiting+} for an answer"',
            "lock: test_interrupted_in_the_messages"),
        "holes": ("{-correct &= holes <= failures;-}",
            "lock: test_the_server_finds or test_failed_clients"),
    },
    "11_rails": {
        "rail-opened": ("Session& rail = {-opened-}{+rails.all+}.emplace_back(domain);",
            "rails: test_request_over_each_rail"),
        "rail-again": ("{-again.insert(rail->writes.begin(), rail->writes.end());-}",
            "rails: test_link_down"),
        "rail-number": ("{ return {-served.id == id-}{+!served.id.empty()+}; }",
            "rails: test_number_of_a_client"),
        "rail-one-request": ("{-if (!source) -}HandleRequest(*message, rail.domain);",
            "rails: test_request_over_each_rail"),
        "rail-no-answer": ('{-throw std::runtime_error("no answer")-}{+return+};',
            "rails: test_namesakes"),
        "rail-bad-message": ("if ({-all.size() == 1-}{+!all.empty()+}) throw;",
            "strict: test_rail_fails and memory"),
        "rail-link-local": ('"fe80:", 5) == {-0-}{+77+}) continue', "rails: test_ipv6"),
        "rail-tail": ("several ? {-kMaxOutstandingRailBytes-}{+kMaxOutstandingBytes+} : "
            "kMaxOutstandingBytes;", "rails: test_four_rails"),
        "rail-failed-write": ("{+           rail.writes.erase(write);\n+}           op.Check();\n"
            "{-           rail.heard_at = Clock::now();\n"
            "           rail.writes.erase(write);-}{+           rail.heard_at = Clock::now();+}",
            "strict: test_rail_fails and write"),
        "rail-failed-counts": ("{+           ++finished_write_ops;\n+}           op.Check();\n"
            "           rail.heard_at = Clock::now();\n           rail.writes.erase(write);\n"
            "{-           ++rail.written;\n"
            "           ++finished_write_ops;-}{+           ++rail.written;+}",
            "strict: test_rail_fails and write"),
        "rail-completed": ("op.Check();{-\n           rail.heard_at = Clock::now();-}",
            "rails: test_four_rails"),
        "strict-rail-notification": (
            "(write == last && {-finished_write_ops < last-}{+again.size() > 0+})",
            "strict: test_last_write"),
        "strict-rail-key": (
            "{-rail.remote_key = msg.rkey-}{+static const uint64_t first = msg.rkey;  // "
            "whichever rail was quickest\n"
            "    rail.remote_key = first+};", "strict: test_rules and not gpu"),
        "strict-rail-descriptor": (".buf = &*{-rail.memory-}{+source+},",
            "strict: test_rules and not gpu"),
        "rail-away": ("constexpr auto kRailLimit = {-4s-}{+1s+};", "rails: test_link_away"),
    },
    "12_sleep": {
        "sleeps-again": ("int(limit.count(){+ * 0 - 1+})", "sleep: test_gives_up"),
        "sleep": ("{-now >= domain.poll_at && silence < kSpin-}{+silence < 1h+}) {",
            "sleep: test_asleep"),
        "sleep-empty-wakes": ("can_be_woken{- && domain.empty_wakes < kEmptyWakes-}) {",
            "sleep: test_asleep"),
        "sleep-long-pause": ("kIdlePause, {-kMaxPause-}{+kIdlePause+}));",
            "sleep: test_long_pauses"),
        "sleep-signal": (
            "{-eventfd_write(g_wake_fd, 1);  // wakes a loop that is about to fall asleep-}",
            "sleep: test_signal_before_sleep"),
        "sleep-all-sessions": (
            "{-for (ServedClient& client : clients) sessions.push_back(&client.session);-}",
            "sleep: test_woken and default"),
        "sleep-wakes": ("    {-domain.empty_wakes = 0;\n    -}if (ret == -FI_EAVAIL) {",
            "sleep: test_woken_once"),
        "strict-trywait": (
            "int ret = {-fi_trywait(domain.fabric, cqs.data(), int(cqs.size()))-}{+0+};",
            "sleep: test_woken_once"),
        "strict-no-trywait": ("if ({-can_be_woken && -}domain", "strict: test_rules and default"),
        "strict-refused": ("if (endpoint.{-refused || endpoint.-}wait_fd < 0) can",
            "sleep: test_woken_once"),
    },
    "13_crowd": {
        "crowd-nobody": ("if ({-it->second->reached-}{+true+}) {",
            "failures: test_addresses_of_nobody"),
        "crowd-unsent": ("client->outbox.size() >= {-kMaxUnsent-}{+(kMaxUnsent << 30)+}) {",
            "crowd: test_deaf_client"),
        "crowd-remove": ("{-mailbox.endpoint.RemovePeerAddress(it->second->addr);-}",
            "crowd: test_deaf_client"),
        "crowd-late": ('{-it->second->error = "forgotten";-}', "crowd: test_asks_and_leaves"),
        "crowd-same-address": ("{-if (before != clients.end()) Forget(before);-}",
            "crowd: test_whose_message"),
        "crowd-number": ("{-if (message->number == server->number) -}return message;",
            "crowd: test_stray_replies"),
        "crowd-peer": (".callback = [this, {-peer](const RdmaOp& op) { Sent(peer-}{+weak = "
            "peer.get()](const RdmaOp& op) {\n"
            "           Sent({std::shared_ptr<Peer>(), weak}+}, op); }});",
            "crowd: test_deaf_and_forgotten"),
        "crowd-silent": ("client->second->heard_at > {-kForgetAfter-}{+1h+}) {",
            "crowd: test_forgotten"),
        "crowd-full": ("{-if (clients.size() >= kMaxClients) return;-}", "crowd: test_full_server"),
        "crowd-again": ("{-if (Clock::now() - asked_at > kForgetAfter / 2) Connect();-}",
            "crowd: test_rare_requests"),
        "crowd-connect-again": ("again_at = Clock::now() + {-kConnectAgain-}{+1h+};",
            "crowd: test_lost_connect"),
        "crowd-last": ("{-if (times.size() == num_clients * num_texts) break;\n    -}"
            "Mailbox::Sleep(waiting, wake_at - now);"
            "{+ if (times.size() == num_clients * num_texts) break;+}",
            "crowd: test_last_answer"),
        "crowd-clock": ("    {-if (mailbox.Poll() == 0) {\n      -}CheckSilence(mailbox.heard_at, "
            '"waiting for the reversed text");\n    {-}-}{+mailbox.Poll();+}',
            "crowd: test_stopped_client"),
        "crowd-ready": ("{-if (!peer->outbox.empty()) ready.push_back(peer);-}",
            "crowd: test_many_at_once"),
        "crowd-heard": ("    {-it->second->heard_at = Clock::now();\n    -}if (message.type",
            "crowd: test_forgotten"),
        "crowd-turns": (
            "if (peer->error.empty() && !PostSend(peer)) ready.{-push_back-}{+push_front+}(peer);",
            "crowd: test_turns"),
    },
    "14_strangers": {
        "nonce": ("{-if (peer != FI_ADDR_UNSPEC && message.header.nonce != nonce) return;-}",
            "strangers: test_byes_of_strangers"),
        "too-long": ("    {-if (!op.error.empty() || -}{+op.Check();\n"
            "    if (+}op.len < sizeof(Header)) return;", "messages: test_too_long"),
        "nonce-guessed": ("nonce = {-domain.random(-}{+uint32_t(time(nullptr)+});",
            "messages: test_bad_answers"),
        "sign-of-life": ("    {+heard_at = Clock::now();\n"
            "    +}if (!op.error.empty() || op.len < sizeof(Header)) return;",
            "attacks: test_junk_to_the_place"),
        "refuse": ("{-session.Send(AppMessageType::kRefused, e.what());-}",
            "strict: test_late_refusal"),
        "refuse-leaves": ("return done{- && (session.HasSent() || Clock::now() > leave_at)-};",
            "strict: test_late_refusal"),
        "refuse-ends": ("leave_at = Clock::now() + {-kLeaveGrace-}{+1h+};",
            "strict: test_late_refusal"),
        "printable": ('"refused: " + {-Printable(message.body)-}{+message.body+}',
            "messages: test_terrible_texts_of_servers"),
        "wait": ("if (late{- || Tell(*visitor)-})", "attacks: test_in_line and family"),
        "wait-again": ("{+asked == 0 && +}answer.header.type == AppMessageType::kWait;) {",
            "attacks: test_in_line and family"),
        "wait-forgets": (
            "    {-return fi_inject(endpoint->ep, &wait, sizeof(wait), visitor.contact) !=\n"
            "           -FI_EAGAIN-}{+fi_inject(endpoint->ep, &wait, sizeof(wait), "
            "visitor.contact);\n"
            "    return false+};", "attacks: test_long_line"),
        "wait-many": ("          {-visitors.size() < kMaxWaiting-}{+true+}) {",
            "attacks: test_long_line"),
        "wait-junk": ("      {+if (clients.size() < kMaxClients) +}line.AddAll();",
            "attacks: test_full_and_filled"),
        "wait-failed": ("first->tell_at = Clock::now(){+ - 1h+};", "attacks: test_no_descriptor"),
        "aside-closed": ("if (endpoint && {-now > tell_until + kTellGrace-}{+false+}) {",
            "attacks: test_invented_addresses_in_line"),
        "aside-contacts": ("{-if (num_contacts == kMaxContacts) return false;-}",
            "attacks: test_invented_addresses_in_line"),
        "family": ("size_t same = internet ? {-2-}{+0+} : 0;", "attacks: test_in_line and family"),
        "budget": ("{-if (size > memory_left) return;-}", "attacks: test_waiting_is_not_silence"),
        "budget-returns": ("{-if (source) memory_left += source->size;-}",
            "attacks: test_killed_while_it_waits"),
        "page-a-round": ("{-      if (made_pages < page_idx.size()) MakeNextPage();-}{+      while "
            "(made_pages < page_idx.size()) {\n"
            "        MakeNextPage();\n        if (!source) break;\n      }+}",
            "attacks: test_pages_of_another"),
        "waiting": ("BodyOf(*message, AppMessageType::kProgress);  // throws if it is another\n"
            "      {-session.Send(AppMessageType::kProgress);-}",
            "attacks: test_waiting_is_not_silence"),
        "waiting-dead": ("    {+session.heard_at = Clock::now();\n    +}if (posted_write_ops > 0) "
            "PrintProgress();\n    session.Send", "attacks: test_killed_while_it_waits"),
        "descriptors": ("{-RaiseFileLimit();-}", "attacks: test_idle_connections"),
        "descriptors-soon": ('{-setenv("FI_OFI_RXM_CM_PROGRESS_INTERVAL", "1000", 0);-}',
            "attacks: test_idle_connections"),
        "descriptors-closed": ("{-TakeStandardFiles();-}", "walk: test_closed_files"),
    },
    "15_ring": {
        "ring-piece": ("{-if (posted >= taken + num_blocks) return;-}", "ring: test_sums"),
        "ring-credit": ("if ({-posted >= credit-}{+credit == 0+}) return;",
            "ring: test_ring_under_strict_rules and long"),
        "ring-slot-in-flight": ("{-if (posted >= kSlots && !written[posted - kSlots]) return;-}",
            "ring: test_watched_ring and late"),
        "ring-own-write": ("{-if (taken >= half && !written[taken - half]) return;-}",
            "ring: test_watched_ring and later"),
        "ring-number": ("      {-arrived[number - 1-}{+static size_t num_arrived = 0;\n"
            "      arrived[num_arrived+++}] = true;", "ring: test_ring_under_strict_rules"),
        "ring-alive": ("{-session.Send(AppMessageType::kProgress);-}", "ring: test_stragglers"),
        "ring-pass-on": ("{-PassOn(e.what());-}", "ring: test_killed_rank"),
        "ring-whom": ("{-at = &right;-}", "ring: test_interrupted or test_killed_rank"),
    },
}
MUTANTS = {name: Mutant(program, *texts) for program, changes in CHANGES.items()
           for name, texts in changes.items()}


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
    test_file, names = mutant.tests
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
    """A copy of the repository, in which a mutant is made. Its files are links: what is made
    anew takes the place of one."""

    def __init__(self, name):
        self.root = f"{COPIES}/{name}"
        for folder in "src", "scripts", "chapters":
            shutil.copytree(f"{ROOT}/{folder}", f"{self.root}/{folder}", symlinks=True,
                            copy_function=os.link)
        for folder in ".", *BUILDS:
            os.makedirs(f"{self.root}/{folder}", exist_ok=True)
            for entry in os.scandir(f"{ROOT}/{folder}"):
                if entry.is_file():
                    os.link(entry.path, f"{self.root}/{folder}/{entry.name}")

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

    def pytest(self, file, names, *options):
        return self.run(sys.executable, "-m", "pytest", "-q", *options,
                        f"scripts/tests/{file}", "-k", names).stdout

    def catches(self, mutant):
        """Returns whether the tests notice."""
        # Most tests run one of the builds, and to build takes long.
        test_file, names = mutant.tests
        ids = self.pytest(test_file, names, "--collect-only")
        if re.search(rf"[\[-]{mutant.program}\b", ids):
            names = f"({names}) and {mutant.program}"
            ids = self.pytest(test_file, names, "--collect-only")
        wanted = [build for build, (word, _) in BUILDS.items()
                  if re.search(rf"\[.*\b{word}\b.*\]", ids)]
        path = f"{self.root}/src/{mutant.program}.cpp"
        with open(path) as file:
            source = file.read()
        os.unlink(path)
        with open(path, "w") as file:
            file.write(source.replace(mutant.old, mutant.new))
        for build in wanted or ["build"]:
            self.make(mutant.program, build, BUILDS[build][1])
        if "test_allocator" in names:  # it contains the code of 8_malloc
            self.make("build/allocator", "build", BUILDS["build"][1])
        said = self.pytest(test_file, names, "-x", "-n", "2")
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
    missing = [path for path in [*BUILDS, "build/strict.so"]
               if not os.path.exists(f"{ROOT}/{path}")]
    if missing:
        sys.exit(f"error: there is no {missing[0]}; `make mutants` builds what is missing")
    # Before any of them takes its time.
    wrong = [f"{name}: {message}" for name in names
             for message in faults(MUTANTS[name])]
    if wrong:
        sys.exit("error: " + "\n".join(wrong))
    shutil.rmtree(COPIES, ignore_errors=True)

    def try_one(name):
        started, said = time.monotonic(), ""
        try:
            result = "caught" if Copy(name).catches(MUTANTS[name]) else "SURVIVED"
        except Broken as error:
            result, said = "NOT TRIED", f"\n{error}"
        shutil.rmtree(f"{COPIES}/{name}")
        print(f"{result}: {MUTANTS[name].program}, {name} "
              f"({time.monotonic() - started:.0f} s){said}", flush=True)
        return result

    # Most tests spend their time waiting.
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        results = list(pool.map(try_one, names))
    print(", ".join(f"{results.count(result)} {result}" for result in sorted({*results})))
    return 1 if {*results} != {"caught"} else 0


if __name__ == "__main__":
    sys.exit(main())
