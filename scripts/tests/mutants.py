#!/usr/bin/env python3
"""Breaks one rule of the programs at a time, and checks that a test notices.

Usage: scripts/tests/mutants.py [NAME...]    (make mutants)
  NAME  the mutants to try; without any: all of them, which takes a quarter of an hour

Each mutant is made in a copy of the repository, in build/mutants/. It is caught if
the tests that are named beside it fail. Exits with 1 if one survives.

No test of ours can see what these rules are for, so they have no mutant: the order of
SENDs (every provider here keeps it), the completion level of a SEND, what a GPU sees,
and huge pages.
"""

import os
import re
import shutil
import subprocess
import sys
import typing

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
COPY = f"{ROOT}/build/mutants"
SANITIZED = "-O0 -g1 -fsanitize=address,undefined"


class Mutant(typing.NamedTuple):
    rule: str  # what is broken
    program: str
    old: str  # occurs once in the program
    new: str
    tests: str  # a file, and what to pass to pytest's -k


MUTANTS = {
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
    "eagain": Mutant(
        "what libfabric has no room for is posted again", "4_hello",
        "if (ret == -FI_EAGAIN) return false;", "if (ret == -FI_EAGAIN) return true;",
        "test_programs.py test_data and 4_hello and default"),
    "owner": Mutant(
        "everything is closed", "4_hello",
        "int ret = ptr != nullptr ? fi_close(&ptr->fid) : 0;", "int ret = 0;",
        "test_programs.py test_data and 4_hello and shm"),
    "second-signal": Mutant(
        "a second signal ends the process", "4_hello",
        "  signal(signum, SIG_DFL);", "  // signal(signum, SIG_DFL);",
        "test_failures.py test_second_signal"),
    "locked-memory": Mutant(
        "an error about memory names `ulimit -l`", "4_hello",
        "if (error == FI_ENOMEM) {", "if (error == -1) {",
        "test_failures.py test_locked_memory and 4_hello"),
    "control-characters": Mutant(
        "a terminal does not obey a text from the other side", "4_hello",
        "if (control) character = '?';", "(void)control;",
        "test_messages.py test_terrible_texts and 4_hello"),
    "event-queue": Mutant(
        "an event queue is bound to the endpoint", "5_reverse",
        'FiCheck(fi_ep_bind(ep, &eq.ptr->fid, 0), "fi_ep_bind (event queue)");', "",
        "test_failures.py test_event_queue and 5_reverse"),
    "pipe": Mutant(
        "nobody who reads our output ends us", "5_reverse",
        "signal(SIGPIPE, SIG_IGN);", "",
        "test_failures.py test_nobody_reads and 5_reverse"),
    "flood": Mutant(
        "the clients that wait are bounded", "7_queue",
        "while (waiting.size() < kMaxWaiting) {", "while (true) {",
        "test_messages.py test_flood"),
    "silence": Mutant(
        "silence ends a session", "5_reverse",
        "if (Clock::now() - last_completion < limit) return;", "if (limit > 0s) return;",
        "test_messages.py test_silent_clients and 5_reverse"),
    "pause": Mutant(
        "an idle server is quiet", "5_reverse",
        "if (completions == 0) std::this_thread::sleep_for(kIdlePause);", "",
        "test_failures.py test_idle"),
    "address-size": Mutant(
        "a length in a message is checked", "5_reverse",
        "connect.addr_size > sizeof(connect.addr)", "false",
        "test_messages.py test_at_the_door and 5_reverse"),
    "bad-recv": Mutant(
        "a RECV that has failed is no message", "5_reverse",
        "    recv.Check();\n", "",
        "test_messages.py test_at_the_door and 5_reverse"),
    "accept-limit": Mutant(
        "a client waits long for its ACCEPT", "7_queue",
        "kAcceptLimit = 60s", "kAcceptLimit = 10s",
        "test_programs.py test_waiting_is_not_silence"),
    "keys": Mutant(
        "no two regions have the same key", "6_write",
        "attr.requested_key = domain.next_key++;",
        "attr.requested_key = domain.next_key;",
        "test_programs.py test_data and 6_write and default"),
    "virtual-addresses": Mutant(
        "the provider says how a place is named", "6_write",
        "if (session.domain.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) {",
        "if (session.domain.info == nullptr) {",
        "test_programs.py test_data and 6_write and shm"),
    "last-write-of-6": Mutant(
        "the last WRITE waits for all others", "6_write",
        "(last ? 1 : kMaxOutstandingWrites)", "kMaxOutstandingWrites",
        "test_reorder.py test_late_writes and 6_write"),
    "last-write-of-7": Mutant(
        "the last WRITE waits for all others", "7_queue",
        "(last ? 1 : max_outstanding)", "max_outstanding",
        "test_reorder.py test_late_writes and 7_queue"),
    "early-bye": Mutant(
        "a BYE may overtake a completion", "6_write",
        "if (done) HandleBye();", "",
        "test_reorder.py test_late_completions and 6_write"),
    "no-immediate-data": Mutant(
        "a provider without immediate data is refused", "6_write",
        "info->domain_attr->cq_data_size < sizeof(uint32_t)", "false",
        "test_failures.py test_no_immediate_data and 6_write"),
    "page-index": Mutant(
        "an index in a message is checked", "6_write",
        "if (idx >= msg.size / msg.page_size) {", "if (msg.page_size == 0) {",
        "test_messages.py test_in_a_session and 6_write"),
    "no-nic": Mutant(
        "a software provider has no NIC", "7_queue",
        "if (info->nic == nullptr || info->nic->link_attr == nullptr) return 0;", "",
        "test_programs.py test_data and 7_queue and default"),
    "bytes-in-flight": Mutant(
        "what is in flight is bounded in bytes", "7_queue",
        "kMaxOutstandingBytes / page_size, 2)", "kMaxOutstandingWrites, 2)",
        "test_programs.py test_slow_cable"),
    "progress": Mutant(
        "a client hears of a long transfer", "7_queue",
        "    session.Send(AppMessageBase{AppMessageType::kProgress});\n", "",
        "test_programs.py test_slow_cable"),
    "failed-write": Mutant(
        "a WRITE that has failed ends the session", "7_queue",
        "op.Check();\n                        HandleWriteCompletion();",
        "(void)op;\n                        HandleWriteCompletion();",
        "test_messages.py test_memory_that_is_not_there and 7_queue"),
    "batch": Mutant(
        "a batch of completions is finished", "7_queue",
        "if (!failure) failure = std::current_exception();", "throw;",
        "test_failures.py test_callback_that_throws"),
    "signal-handlers": Mutant(
        "our signal handlers come before those of shm", "7_queue",
        "    if (!g_interrupted) InstallSignalHandlers();\n", "",
        "test_messages.py test_client_interrupted_at_first_contact and 7_queue and shm"),
    "bye-after-an-error": Mutant(
        "a client that fails says BYE", "7_queue",
        "session.SayBye(kContactGrace);", "",
        "test_failures.py test_client_signals_at_work and 7_queue"),
    "memory-for-all": Mutant(
        "the memory of the server is bounded", "7_queue",
        "|| size > *memory_left) return;", ") return;",
        "test_programs.py test_memory_for_all"),
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
}


def try_mutant(mutant):
    """Returns whether the tests notice."""
    path = f"{COPY}/src/{mutant.program}.cpp"
    with open(path) as file:
        source = file.read()
    stat = os.stat(path)
    with open(path, "w") as file:
        file.write(source.replace(mutant.old, mutant.new))
    try:
        for build, flags in [("build", "-O1"), ("build/sanitized", SANITIZED)]:
            # A mutant may leave something unused, which is no concern of ours.
            subprocess.run(["make", "-s", mutant.program, f"BUILD={build}",
                            f"CXXFLAGS={flags} -Wno-error"], cwd=COPY, check=True)
        if "callback" in mutant.tests:
            subprocess.run(["make", "-s", "build/callbacks", "CXXFLAGS=-O1 -Wno-error"],
                           cwd=COPY, check=True)
        file, _, names = mutant.tests.partition(" ")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2",
             f"scripts/tests/{file}", "-k", names], cwd=COPY,
            env={**os.environ, "BUILD": "build"}, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        failed = re.search(r"\d+ failed", done.stdout)
        # Otherwise no test has run, which is a fault of this list.
        assert failed or re.search(r"\d+ passed", done.stdout), done.stdout
        return bool(failed)
    finally:
        with open(path, "w") as file:
            file.write(source)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        for build in "build", "build/sanitized":
            os.unlink(f"{COPY}/{build}/{mutant.program}")


def main():
    names = sys.argv[1:] or list(MUTANTS)
    unknown = [name for name in names if name not in MUTANTS]
    if unknown:
        sys.exit(f"error: no mutant {unknown[0]!r}; there are: {', '.join(MUTANTS)}")
    shutil.rmtree(COPY, ignore_errors=True)
    os.makedirs(f"{COPY}/build")
    shutil.copy(f"{ROOT}/Makefile", COPY)
    for folder in "src", "scripts", "chapters":
        shutil.copytree(f"{ROOT}/{folder}", f"{COPY}/{folder}", symlinks=True)
    shutil.copytree(f"{ROOT}/build", f"{COPY}/build", dirs_exist_ok=True,
                    ignore=lambda _, found: {"mutants"} & set(found))
    survivors = []
    for name in names:
        caught = try_mutant(MUTANTS[name])
        print(f"{'caught' if caught else 'SURVIVED'}: {MUTANTS[name].program}, {name}: "
              f"{MUTANTS[name].rule}", flush=True)
        if not caught:
            survivors.append(name)
    print(f"{len(names) - len(survivors)} caught, {len(survivors)} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
