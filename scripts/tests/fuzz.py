#!/usr/bin/env python3
"""Sends made-up messages to servers with sanitizers, for as long as you like. It is
not part of `make test`.

Usage: scripts/tests/fuzz.py [--messages 20000] [--seed N] [--provider tcp]
           [PROGRAM...]
  make fuzz ARGS="--messages 2000 7_queue" builds what it needs, and calls it

Several senders at a time open sessions. Each takes good messages of the program and
spoils one of them at random. Meanwhile honest clients come and go, and every one of
them must succeed. In the end the server must stop as it always does. A failure
prints the last messages. The same seed makes each sender send the same messages,
but which sender comes first is up to the scheduler.
"""

import argparse
import collections
import os
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback

from harness import BUILD, LIBFABRIC_LEAKS, Process, Server, owned_shm_files
from messages import (ACCEPT, ALIVE, BYE, CHUNK, CONNECT, FREE, JOIN, LONGEST,
                      MALLOC, PROGRESS, PUT, RANDOM_FILL, TABLE_ALIVE,
                      TEXT, WAIT, type_of)
from repository import ROOT

SENDERS = 3  # at a time
EVERY = 1000  # messages between two honest clients
SESSION_LIMIT = 11  # seconds; a server ends a silent session after 10
SESSIONS_PER_SENDER = 100  # because a sender keeps the buffers of all that it did
# An endpoint of ofi_rxm is opened four times as fast if its queues are short.
RXM_QUEUES = {f"FI_OFI_RXM_{name}_SIZE": "128"
              for name in ("TX", "RX", "MSG_TX", "MSG_RX")}
SANITIZER = re.compile("AddressSanitizer|LeakSanitizer|runtime error:")

# ---- The messages ----

SIZES = {"type": 4, "nonce": 4, "page_size": 4, "imm_data": 4}  # else 8 bytes
BOUNDARIES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 8,
              2**64 - 1]
# Values that a field only just may have, or only just may not.
LIMITS = {
    "page_size": [4, 7, 8, 12, 1 << 20, (1 << 20) + 1, 16 << 20, (16 << 20) + 8],
    "total_repeat": [2, 1_000_000_000, 1_000_000_001],
    "num_slots": [2, 16, 17],
    "file_size": [1 << 20, (1 << 20) + 1, 1 << 50, (1 << 50) + 1],
    "size": [63, 64, 4096, 64 << 20, (64 << 20) + 1, 1 << 30],
    "rkey": [2, 9, 10],
    "number": [2, 3],
}
# What a program knows a client by behind the type, if anything.
KEYS = {"13_crowd": "number", "14_strangers": "nonce"}


class Message(dict):
    """The fields of a message in their order: numbers, bytes, or a list of numbers of 32
    bits."""

    def pack(self):
        return b"".join(value if isinstance(value, bytes) else
                        struct.pack(f"<{len(value)}I", *value) if isinstance(value, list) else
                        value.to_bytes(SIZES.get(name, 8), "little")
                        for name, value in self.items())

    def set_number(self, rng):
        """Gives one of the numbers another value."""
        name = rng.choice([name for name in self if not isinstance(self[name], bytes)])
        value = rng.choice([*BOUNDARIES, *LIMITS.get(name, []) * 2, rng.getrandbits(64)])
        if isinstance(self[name], list):
            self[name][rng.randrange(len(self[name]))] = value % 2**32
        else:
            self[name] = value % 2**(8 * SIZES.get(name, 8))


def spoil(message, rng, longest):
    """Returns the bytes of the message with something changed."""
    kind = rng.randrange(8)
    if kind <= 2:
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            message.set_number(rng)
    elif kind == 3:
        message["type"] = rng.choice([*range(14), rng.getrandbits(32)])
    data = bytearray(message.pack())
    if kind == 4:
        del data[rng.randrange(len(data)):]
    elif kind == 5:
        more = rng.choice([1, 2, 4, 8, rng.randrange(1, 600), longest])
        data += rng.randbytes(min(more, max(longest - len(data), 1)))
    elif kind == 6:
        for _ in range(rng.choice([1, 1, 2, 4, 8])):
            data[rng.randrange(len(data))] = rng.getrandbits(8)
    elif kind == 7:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


# Each returns the messages of a session, without CONNECT and BYE. The number is
# another one each time.

def texts(rng, number):
    size = rng.choices([1, 10, 1000, 60000], [8, 8, 8, 1])[0]
    return [Message(type=TEXT, text=b"x" * size)]


def fills(*head, repeat=True):
    def session(rng, number):
        # There is no memory at this address, and nobody has this key.
        return [Message(
            type=RANDOM_FILL, **dict.fromkeys(head, 0), addr=0x1000, size=1 << 20,
            rkey=rng.getrandbits(48), seed=rng.getrandbits(64),
            page_size=rng.choice([8, 512, 4096, 65536]), imm_data=rng.getrandbits(31) + 1,
            **({"total_repeat": rng.randrange(1, 4)} if repeat else {}),
            page_idx=[rng.randrange(16) for _ in range(rng.choice([1, 2, 5, 300]))])]
    return session


def pool_requests(rng, number):
    return [rng.choice([Message(type=MALLOC, size=rng.choice([1, 64, 5000, 1 << 20])),
                        Message(type=MALLOC, size=64), Message(type=ALIVE),
                        Message(type=FREE, addr=rng.getrandbits(48))])
            for _ in range(rng.randrange(1, 5))]


def table_requests(rng, number):
    return [Message(type=JOIN), *(Message(type=rng.choice([JOIN, TABLE_ALIVE]))
                                  for _ in range(rng.randrange(4)))]


# The checksums of the first chunks of a file of zeros: see test_file.py.
ZEROS = [0x918780b90550bf34, 0x9d7d2e9aaa03f330, 0x511f3e0f81b878ab]


def file_of_zeros(rng, number):
    # The slots are full of zeros, because nobody writes anything into them.
    chunks = rng.choice([0, 1, 1, 2, 3])
    messages = [Message(type=PUT, file_size=chunks << 20, num_slots=rng.choice([1, 1, 2, 8]),
                        name=b"fuzz %d" % number),
                *(Message(type=CHUNK, slot=i, checksum=ZEROS[i]) for i in range(chunks))]
    if rng.random() < 0.2:
        other = [Message(type=BYE), Message(type=PROGRESS), Message(type=CHUNK, slot=0, checksum=0)]
        messages.insert(rng.randrange(len(messages) + 1), rng.choice(other))
    return messages


def texts_of_a_crowd(rng, number):
    return [Message(type=TEXT, number=0, text=b"x" * rng.choice([0, 1, 100, 1024]))
            for _ in range(rng.choice([1, 2, 4, 11]))]


SESSIONS = {
    "5_reverse": texts,
    "6_write": fills(repeat=False),
    "7_queue": fills(),
    "8_malloc": pool_requests,
    "9_file": file_of_zeros,
    "10_lock": table_requests,
    "11_rails": fills(),
    "12_sleep": texts,
    "13_crowd": texts_of_a_crowd,
    "14_strangers": fills("nonce"),
}


# ---- The senders ----

class Lost(Exception):
    """A sender has ended or cannot receive any more. Another one takes its
    place."""


class Sender:
    """Runs build/sender. Waits for its answers, and is faster than the FakeClient
    of the tests, which looks for them every 10 ms."""

    def __init__(self, server):
        env = {**os.environ, "IPATH_NO_BACKTRACE": "1", "HFI_NO_BACKTRACE": "1"}
        if server.provider:
            env["FI_PROVIDER"] = server.provider
        self.popen = subprocess.Popen(
            [f"{BUILD}/sender", server.address], cwd=ROOT, env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL)
        self.address = bytes.fromhex(self.answer().split()[1])
        self.program = server.program
        self.key = 0  # of its session

    def answer(self):
        line = self.popen.stdout.readline()
        if not line:
            raise Lost
        return line

    def write(self, line):
        try:
            self.popen.stdin.write(line + "\n")
            self.popen.stdin.flush()
        except BrokenPipeError as error:
            raise Lost from error

    def peer(self, address):
        self.write("peer " + address)

    def send(self, data):
        """Returns whether it got away. It cannot if the server has ended the
        session."""
        self.write("send " + data.hex())
        return self.answer() == "sent\n"

    def wait(self, seconds=20):
        """Returns the next message; None if there is none for so long."""
        self.write(f"wait {seconds}")
        what, text = self.answer().split(" ", 1)
        # If its RECV has failed, the sender has none any more.
        if what == "nothing" and text != "received: \n":
            raise Lost
        return None if what == "nothing" else bytes.fromhex(text)

    def message(self, type_, **fields):
        """A CONNECT or a BYE."""
        if self.program == "13_crowd":
            return Message(type=type_, number=self.key, **fields)
        if self.program == "14_strangers":
            return Message(type=type_, nonce=self.key, **fields)
        return Message(type=type_, **fields)

    def connect(self, address=None):
        rails = {"rails": random.getrandbits(64)} if self.program == "11_rails" else {}
        return self.message(CONNECT, **rails, addr=address or self.address)

    def accepted(self):
        """Waits for an ACCEPT, and has the address in it as its peer. Returns whether it
        came. Answers to earlier messages may come first."""
        crowd = self.program == "13_crowd"
        for _ in range(20):
            while (data := self.wait(1 if crowd else 20)) is not None:
                head = self.message(type_of(data)).pack()
                if data.startswith(head) and type_of(data) == ACCEPT:
                    if not crowd:
                        self.peer(data[len(head):].hex())
                    return True
                if data == head and type_of(data) == WAIT:
                    time.sleep(1)
                    self.send(self.connect().pack())
            if not crowd:
                return False
            # As its clients do: the server may have closed the connection meanwhile.
            self.send(self.connect().pack())
        return False

    def end(self):
        self.popen.stdin.close()
        try:
            self.popen.wait(30)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.popen.stdout.close()
        for name in owned_shm_files([self.popen.pid]):
            os.unlink("/dev/shm/" + name)


class Fuzzer:
    """A server, and those who bother it."""

    def __init__(self, run, program, options):
        self.program = program
        self.goal = options.messages
        self.seconds = 0
        self.memory = ()
        self.read = 0  # of the lines of the server
        self.server = Server(
            run, "build/sanitized", program, options.provider, **LIBFABRIC_LEAKS,
            UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1")
        # With shm, libfabric 1.17 never returns from a message that is longer than
        # the RECV (smr_cma_loop).
        self.longest = (2048 if program == "13_crowd" else LONGEST) + (options.provider != "shm")
        self.lock = threading.Lock()
        self.counts = collections.Counter()
        self.recent = collections.deque(maxlen=60)
        self.abandoned = []  # when
        self.failure = None
        self.rngs = [random.Random(f"{options.seed} {program} {i}") for i in range(SENDERS)]

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def may_abandon(self):
        """Returns whether a session may be left silent. The server keeps it for
        10 s, and has room for 8."""
        with self.lock:
            now = time.monotonic()
            self.abandoned = [t for t in self.abandoned if now - t < SESSION_LIMIT]
            if len(self.abandoned) >= 2:
                return False
            self.abandoned.append(now)
            return True

    def stopping(self):
        return self.failure or self.counts["messages"] >= self.goal

    def work(self, i):
        """What each thread does, with a sender of its own."""
        try:
            while not self.stopping():
                sender = Sender(self.server)
                try:
                    for _ in range(SESSIONS_PER_SENDER):
                        if self.stopping():
                            break
                        self.step(sender, i)
                except Lost:
                    self.count("lost senders")
                finally:
                    sender.end()
        except Exception:
            self.failure = self.failure or traceback.format_exc()

    def send(self, sender, i, data, where):
        # Beforehand, so that the message that ends the server is there.
        self.recent.append((time.monotonic(), i, where, data))
        self.count("messages")
        return sender.send(data)

    def step(self, sender, i):
        """Messages that open no session, perhaps, and a session."""
        rng = self.rngs[i]
        assert self.server.process.popen.poll() is None, "the server has ended"
        sender.peer(self.server.address)
        sender.key = rng.randrange(1, 2**32)
        # Messages to the listener cost nothing beside a session.
        for _ in range(rng.choice([0, 0, 0, 0, 2, 4, 8])):
            data, opens = self.at_the_door(sender, rng)
            self.send(sender, i, data, "listener")
            if opens:
                break
        else:
            sender.send(sender.connect().pack())
        self.count("sessions")
        assert sender.accepted(), "the server does not answer"

        messages = SESSIONS[self.program](rng, self.counts["messages"])
        bad = rng.randrange(-1, len(messages))  # -1: none
        for number, message in enumerate(messages):
            if self.program in KEYS:
                message[KEYS[self.program]] = sender.key
            if number != bad:
                data = message.pack()
            elif rng.random() < 0.1:
                data = rng.choice([b"", rng.randbytes(rng.randrange(1, 300)),
                                   sender.connect().pack()])
            else:
                data = spoil(message, rng, self.longest)
            # There, a session has no endpoint of its own: the server would call strangers.
            if self.program == "13_crowd" and data[:4] == struct.pack("<I", CONNECT):
                data = data[:3]
            if not self.send(sender, i, data, "session"):
                self.count("too late")
                return
            # If the server left in the middle of a long answer, our RECV would fail.
            if number != bad and len(data) > 2000 and "text" in message:
                sender.wait()
            if number == bad and rng.random() < 0.7:
                break
        if rng.random() < 0.05 and self.may_abandon():
            self.count("abandoned")
        else:
            sender.send(sender.message(BYE).pack())

    def at_the_door(self, sender, rng):
        """Returns a message for the listener, and whether it opens a session."""
        kind = rng.randrange(10)
        if kind == 0:
            return rng.choice([b"", rng.randbytes(rng.randrange(1, 400)), bytes(self.longest),
                               sender.message(BYE).pack()]), False
        if kind == 1:
            return rng.choice(SESSIONS[self.program](rng, 0)).pack(), False
        good = sender.connect().pack()
        data = spoil(sender.connect(), rng, self.longest)
        address = data[len(good) - len(sender.address):]
        if data[:4] != good[:4]:
            return data, False
        if self.program not in KEYS and address.startswith(sender.address):
            return data, len(data) <= LONGEST  # what is too much is nothing to it
        if address == sender.address:
            return good, True  # with the key that its session then has
        if self.program == "14_strangers" and b"shm" not in address and len(data) != len(good):
            return data, False
        # The server will call there. It must not call strangers, and not often:
        # it waits up to 10 s for an answer.
        if self.program == "13_crowd" or not self.may_abandon():
            return data[:3], False
        self.count("dead addresses")
        dead = b"fi_shm://nobody\0"
        if b"shm" not in sender.address:
            dead = sender.address
            if len(dead) == 16:
                dead = dead[:2] + struct.pack(">H", 9) + dead[4:]
        data = sender.connect(dead).pack()
        sender.key = rng.randrange(1, 2**32)
        return data, False

    # ---- What the server has to do meanwhile, and afterwards ----

    def honest_client(self):
        self.server.check_client(timeout=120)
        self.count("honest clients")

    def read_output(self):
        """Looks for reports of sanitizers, and forgets what is old."""
        lines = self.server.process.lines
        for line in lines[self.read:]:
            assert not SANITIZER.search(line), line
        self.read = min(len(lines), 500)
        del lines[:-500]
        for entry in os.scandir(self.server.folder) if self.server.folder else []:
            # What has been saved, except the files of honest clients: "file 1".
            if entry.name.startswith("fuzz") and not entry.name.endswith(".part") and \
                    time.time() - entry.stat().st_mtime > 5:
                os.unlink(entry.path)

    def fuzz(self):
        """Returns what has failed, or nothing."""
        server = self.server
        threads = [threading.Thread(target=self.work, args=(i,), daemon=True)
                   for i in range(SENDERS)]
        try:
            self.honest_client()
            memory = server.memory()
            started = time.monotonic()
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                if self.counts["messages"] >= EVERY * self.counts["honest clients"]:
                    self.honest_client()
                self.read_output()
                time.sleep(0.2)
            self.seconds = time.monotonic() - started
            assert not self.failure, self.failure
            # By now the server has given up the silent sessions.
            time.sleep(SESSION_LIMIT)
            self.honest_client()
            self.read_output()
            self.check_nothing_left()
            self.memory = (memory, server.memory())
            server.stop()
            self.read_output()
        except Exception:
            self.failure = self.failure or traceback.format_exc()
        return self.failure

    def check_nothing_left(self):
        if self.program == "8_malloc":
            lines = [line for line in self.server.process.lines
                     if "The pool lends" in line]
            assert "lends 0 bytes in 0 pieces" in lines[-1], lines[-1]
        if self.program == "9_file":
            left = [name for name in os.listdir(self.server.folder)
                    if name.endswith(".part")]
            assert not left, left

    def print_result(self):
        if self.failure:
            print(f"{self.program} FAILED:\n{self.failure}\nThe last lines of the server:\n" +
                  "".join(self.server.process.lines[-60:]) + "The last messages:")
            for when, i, where, data in self.recent:
                print(f"  {when:.3f} sender {i} to the {where}: {len(data)} bytes "
                      f"{data[:600].hex()}")
        line = f"{self.program}: " + ", ".join(
            f"{count} {what}" for what, count in self.counts.items())
        if not self.failure:
            before, after = (memory >> 10 for memory in self.memory)
            line += (f"; {self.counts['messages'] / self.seconds:.0f} messages/s; "
                     f"memory of the server {before} MB, then {after} MB")
        print(line, flush=True)


class Run:
    """What the fixture `run` is to the tests."""

    def __init__(self, folder):
        self.folder = folder
        self.processes = []

    def __call__(self, *args, **kwargs):
        self.processes = [p for p in self.processes if p.popen.poll() is None]
        self.processes.append(Process(*args, **kwargs))
        return self.processes[-1]

    def new_folder(self):
        return tempfile.mkdtemp(dir=self.folder)

    def end(self):
        for process in self.processes:
            process.popen.kill()
            process.wait()


def main():
    parser = argparse.ArgumentParser(usage=__doc__.partition("Usage: ")[2])
    parser.add_argument("--messages", type=int, default=20000)  # to each program
    parser.add_argument("--seed", type=int, default=random.getrandbits(32))
    parser.add_argument("--provider", default="")
    parser.add_argument("programs", nargs="*", default=[*SESSIONS])
    options = parser.parse_args()
    print(f"--seed {options.seed}", flush=True)
    for name, value in RXM_QUEUES.items():
        os.environ.setdefault(name, value)
    # So that a server never outlives us.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed = False
    for program in options.programs:
        with tempfile.TemporaryDirectory(
                dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            run = Run(folder)
            try:
                fuzzer = Fuzzer(run, program, options)
                failed = bool(fuzzer.fuzz()) or failed
            finally:
                run.end()
            fuzzer.print_result()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
