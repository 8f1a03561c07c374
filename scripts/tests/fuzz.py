#!/usr/bin/env python3
"""Sends made-up messages to servers with sanitizers, for as long as you like. It is
not part of `make test`.

Usage: scripts/tests/fuzz.py [--messages 20000] [--seed N] [--provider tcp]
           [PROGRAM...]
  make fuzz ARGS="--messages 2000 7_queue" builds what it needs, and calls it;
  scripts/test.sh builds that, too

Several senders at a time open sessions. Each takes good messages of the program and
spoils one of them at random. Meanwhile honest clients come and go, and every one of
them must succeed. In the end the server must stop as it always does. A failure
prints the last messages. The same seed makes each sender send the same messages,
but which sender comes first is up to the scheduler.
"""

import argparse
import collections
import functools
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
from messages import (ACCEPT, ALIVE, BYE, CHUNK, CONNECT, DELETE, DONE, FREE, GET,
                      JOIN, LONGEST, MALLOC, PROGRESS, PUT, RANDOM_FILL, STORE, TABLE_ALIVE,
                      TEXT, WAIT, base, read_address, read_crowd, with_nonce)
from repository import ROOT

SANITIZED = "build/sanitized"
SESSION_LIMIT = 11  # seconds; a server ends a silent session after 10
SESSIONS_PER_SENDER = 100  # because a sender keeps the buffers of all that it did
# An endpoint of ofi_rxm is opened four times as fast if its queues are short.
RXM_QUEUES = {f"FI_OFI_RXM_{name}_SIZE": "128"
              for name in ("TX", "RX", "MSG_TX", "MSG_RX")}
SANITIZER = re.compile("AddressSanitizer|LeakSanitizer|runtime error:")

# ---- The messages ----

# The messages of 13_crowd begin with the type, the number of a request and that of the
# client, those of 14_strangers with a nonce, and all others with nothing but the type.
PLAIN = ["5_reverse", "6_write", "7_queue", "8_malloc", "9_file", "10_lock", "11_rails",
         "12_sleep"]
# The fields behind that: in the letters of Python's struct, except "bytes" (any number of
# them) and "numbers" (any number of uint32_t).
PLACE = [("addr", "Q"), ("size", "Q"), ("rkey", "Q"), ("seed", "Q")]
PLAIN_FILL = [*PLACE, ("page_size", "I"), ("imm_data", "I")]
IN_A_CROWD = [("sequence", "I"), ("number", "Q")]
GUARDED = {
    "CONNECT": (CONNECT, [("addr_size", "I"), ("addr", "256s")]),
    "BYE": (BYE, []),
    "TEXT": (TEXT, [("text", "bytes")]),
    "RANDOM_FILL": (RANDOM_FILL, [
        ("imm_data", "I"), ("num_pages", "I"), *PLACE, ("page_size", "Q"),
        ("total_repeat", "Q"), ("page_idx", "numbers")]),
}
FORMATS = {
    **{name: (type_, [("nonce", "I"), *fields])
       for name, (type_, fields) in GUARDED.items()},
    "CONNECT of 14_strangers": (CONNECT, [("nonce", "I"), ("addr", "bytes")]),
    "RANDOM_FILL of 14_strangers": (RANDOM_FILL, [
        ("nonce", "I"), *PLAIN_FILL, ("total_repeat", "Q"), ("page_idx", "numbers")]),
    "plain CONNECT": (CONNECT, [("addr", "bytes")]),
    "CONNECT of 11_rails": (CONNECT, [("rails", "Q"), ("addr", "bytes")]),
    "plain BYE": (BYE, []),
    "plain TEXT": (TEXT, [("text", "bytes")]),
    "PUT": (PUT, [("file_size", "Q"), ("num_slots", "Q"), ("text", "bytes")]),
    "CHUNK": (CHUNK, [("slot", "Q"), ("checksum", "Q")]),
    "plain PROGRESS": (PROGRESS, []),
    "RANDOM_FILL of 6_write": (RANDOM_FILL, [*PLAIN_FILL, ("page_idx", "numbers")]),
    "RANDOM_FILL of 7_queue": (RANDOM_FILL, [*PLAIN_FILL, ("total_repeat", "Q"),
                                             ("page_idx", "numbers")]),
    "MALLOC": (MALLOC, [("size", "Q")]),
    "FREE": (FREE, [("addr", "Q")]),
    "ALIVE of 8_malloc": (ALIVE, []),
    "JOIN": (JOIN, []),
    "ALIVE of 10_lock": (TABLE_ALIVE, []),
    "CONNECT of 13_crowd": (CONNECT, [*IN_A_CROWD, ("addr", "bytes")]),
    "BYE of 13_crowd": (BYE, IN_A_CROWD),
    **{f"{name} of 13_crowd": (type_, [*IN_A_CROWD, ("bytes", "bytes")])
       for name, type_ in [("GET", GET), ("STORE", STORE), ("DELETE", DELETE),
                           ("DONE", DONE)]},
}
BOUNDARIES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 8,
              2**64 - 1]
# Values that a field only just may have, or only just may not.
LIMITS = {
    "addr_size": [15, 16, 17, 255, 256, 257],
    "page_size": [4, 7, 8, 12, 1 << 20, (1 << 20) + 1, 16 << 20, (16 << 20) + 8],
    "num_pages": [2, 3, 2**30 + 2, 2**31],
    "total_repeat": [2, 1_000_000_000, 1_000_000_001],
    "num_slots": [2, 16, 17],
    "file_size": [1 << 20, (1 << 20) + 1, 1 << 50, (1 << 50) + 1],
    "size": [63, 64, 4096, 64 << 20, (64 << 20) + 1, 1 << 30],
    "rkey": [2, 9, 10],
    "number": [2, 3],
    "key_size": [3, 63, 64, 65, 1024, 1088],
}


class Message:
    """A message that can be spoiled field by field."""

    def __init__(self, kind, /, **values):
        type_, fields = FORMATS[kind]
        self.names = ["type", *(name for name, _ in fields)]
        self.formats = ["I", *(format_ for _, format_ in fields)]
        self.values = [type_, *(values.get(name, 0 if format_ in "IQ" else b"")
                                for name, format_ in fields)]

    def in_session(self, nonce, number=0):
        for name, value in ("nonce", nonce), ("number", number):
            if name in self.names:
                self.values[self.names.index(name)] = value
        return self

    def pack(self):
        parts = []
        for format_, value in zip(self.formats, self.values):
            if format_ == "bytes":
                parts.append(value)
            elif format_ == "numbers":
                parts.append(struct.pack(f"<{len(value)}I", *value))
            else:
                parts.append(struct.pack("<" + format_, value))
        return b"".join(parts)

    def set_number(self, rng):
        """Gives one of the numbers another value."""
        i = rng.choice([i for i, format_ in enumerate(self.formats)
                        if format_ in ("I", "Q", "numbers")])
        values = BOUNDARIES + LIMITS.get(self.names[i], []) * 2
        value = rng.choice([*values, rng.getrandbits(64)])
        if self.formats[i] == "numbers" and self.values[i]:
            self.values[i] = list(self.values[i])
            self.values[i][rng.randrange(len(self.values[i]))] = value % 2**32
        elif self.formats[i] != "numbers":
            self.values[i] = value % 2**(8 * struct.calcsize(self.formats[i]))


def spoil(message, rng, longest):
    """Returns the bytes of the message with something changed."""
    kind = rng.randrange(8)
    if kind <= 2:
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            message.set_number(rng)
    elif kind == 3:
        message.values[0] = rng.choice([*range(14), rng.getrandbits(32)])
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


# The checksums of the first chunks of a file of zeros: see test_file.py.
ZEROS = [0x918780b90550bf34, 0x9d7d2e9aaa03f330, 0x511f3e0f81b878ab]


# Each returns the messages of a session, without CONNECT and BYE. The number is
# another one each time.

def session_of_texts(kind, rng, number):
    size = rng.choices([1, 10, 1000, 60000], [8, 8, 8, 1])[0]
    return [Message(kind, text=b"x" * size)]


def session_of_fills(kind, rng, number):
    # There is no memory at this address, and nobody has this key.
    indices = [rng.randrange(16) for _ in range(rng.choice([1, 2, 5, 300]))]
    return [Message(kind, imm_data=rng.getrandbits(31) + 1, addr=0x1000,
                    size=1 << 20, rkey=rng.getrandbits(48), seed=rng.getrandbits(64),
                    page_size=rng.choice([8, 512, 4096, 65536]),
                    num_pages=len(indices), total_repeat=rng.randrange(1, 4),
                    page_idx=indices)]


def session_of_requests(rng, number):
    names = [rng.choice(["MALLOC", "MALLOC", "FREE", "ALIVE of 8_malloc"])
             for _ in range(rng.randrange(1, 5))]
    return [Message(name, size=rng.choice([1, 64, 5000, 1 << 20]),
                    addr=rng.getrandbits(48)) for name in names]


def session_of_changes(rng, number):
    return [Message("JOIN"), *(
        Message(rng.choice(["JOIN", "ALIVE of 10_lock"]))
        for _ in range(rng.randrange(4)))]


def session_of_a_file(rng, number):
    # The slots are full of zeros, because nobody writes anything into them.
    chunks = rng.choice([0, 1, 1, 2, 3])
    messages = [
        Message("PUT", num_slots=rng.choice([1, 1, 2, 8]), file_size=chunks << 20,
                text=b"fuzz %d" % number),
        *(Message("CHUNK", slot=i, checksum=ZEROS[i]) for i in range(chunks))]
    if rng.random() < 0.2:
        messages.insert(rng.randrange(len(messages) + 1),
                        Message(rng.choice(["plain BYE", "plain PROGRESS", "CHUNK"])))
    return messages


def session_of_a_crowd(rng, number):
    messages = []
    for sequence in range(1, rng.choice([2, 3, 5, 12])):
        key = b"k" * rng.choice([0, 1, 3, 64])
        value = b"v" * rng.choice([0, 1, 100, 1024])
        kind = rng.choice(["GET", "STORE", "STORE", "DELETE"])
        messages.append(Message(f"{kind} of 13_crowd", sequence=sequence,
                                bytes=key + b"\0" + value * (kind == "STORE")))
    if rng.random() < 0.1:
        messages.append(Message("DONE of 13_crowd"))
    return messages


SESSIONS = {
    "5_reverse": functools.partial(session_of_texts, "plain TEXT"),
    "6_write": functools.partial(session_of_fills, "RANDOM_FILL of 6_write"),
    "7_queue": functools.partial(session_of_fills, "RANDOM_FILL of 7_queue"),
    "8_malloc": session_of_requests,
    "9_file": session_of_a_file,
    "10_lock": session_of_changes,
    "11_rails": functools.partial(session_of_fills, "RANDOM_FILL of 7_queue"),
    "12_sleep": functools.partial(session_of_texts, "plain TEXT"),
    "13_crowd": session_of_a_crowd,
    "14_strangers": functools.partial(session_of_fills, "RANDOM_FILL of 14_strangers"),
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
        self.plain = server.program in PLAIN
        self.strange = server.program == "14_strangers"  # an address has no size there
        self.numbered = server.program == "11_rails"
        self.nonce = 0  # of its session

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

    def send(self, message):
        """Returns whether it got away. It cannot if the server has ended the
        session."""
        self.write("send " + message.hex())
        return self.answer() == "sent\n"

    def wait(self):
        """Returns the next message; None if there is none for 20 s."""
        self.write("wait")
        what, text = self.answer().split(" ", 1)
        # If its RECV has failed, the sender has none any more.
        if what == "nothing" and text != "received: \n":
            raise Lost
        return None if what == "nothing" else bytes.fromhex(text)

    def connect(self, address=None):
        address = address or self.address
        if self.numbered:
            return Message("CONNECT of 11_rails", rails=random.getrandbits(64), addr=address)
        if self.plain:
            return Message("plain CONNECT", addr=address)
        if self.strange:
            return Message("CONNECT of 14_strangers", nonce=self.nonce, addr=address)
        return Message("CONNECT", nonce=self.nonce, addr_size=len(address), addr=address)

    def bye(self):
        return Message("plain BYE" if self.plain else "BYE", nonce=self.nonce)

    def accepted(self):
        """Waits for an ACCEPT, and returns the address in it; None if there is
        none. Answers to earlier messages may come first."""
        while (message := self.wait()) is not None:
            if self.plain and message[:4] == struct.pack("<I", ACCEPT):
                return message[4:].hex()
            if message[:8] == base(ACCEPT, self.nonce):
                return message[8:].hex() if self.strange else read_address(message)[1]
            if message[:8] == base(WAIT, self.nonce):
                time.sleep(1)
                self.send(self.connect().pack())
        return None

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

    new_sender = Sender

    def __init__(self, run, program, args):
        self.program = program
        self.goal = args.messages
        self.every = args.every
        self.seconds = 0
        self.memory = ()
        self.read = 0  # of the lines of the server
        self.server = Server(
            run, SANITIZED, program, args.provider, **LIBFABRIC_LEAKS,
            UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1")
        # With shm, libfabric 1.17 never returns from a message that is longer than
        # the RECV (smr_cma_loop).
        self.longest = LONGEST + (args.provider != "shm")
        self.lock = threading.Lock()
        self.counts = collections.Counter()
        self.recent = collections.deque(maxlen=60)
        self.abandoned = []  # when
        self.failure = None
        self.rngs = [random.Random(f"{args.seed} {program} {i}")
                     for i in range(args.senders)]

    def count(self, what):
        with self.lock:
            self.counts[what] += 1
            return self.counts[what]

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
                sender = self.new_sender(self.server)
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

    def send(self, sender, i, message, where):
        # Beforehand, so that the message that ends the server is there.
        self.recent.append((time.monotonic(), i, where, message))
        self.count("messages")
        return sender.send(message)

    def step(self, sender, i):
        """Messages that open no session, perhaps, and a session."""
        rng = self.rngs[i]
        assert self.server.process.popen.poll() is None, "the server has ended"
        sender.peer(self.server.address)
        sender.nonce = rng.randrange(1, 2**32)
        # Messages to the listener cost nothing beside a session.
        for _ in range(rng.choice([0, 0, 0, 0, 2, 4, 8])):
            message = self.at_the_door(sender, rng)
            self.send(sender, i, message, "listener")
            if self.opens(sender, message):
                break
        else:
            sender.send(sender.connect().pack())
        self.count("sessions")
        address = sender.accepted()
        assert address is not None, "the server does not answer"
        sender.peer(address)

        messages = [message.in_session(sender.nonce) for message in
                    SESSIONS[self.program](rng, self.counts["messages"])]
        bad = rng.randrange(-1, len(messages))  # -1: none
        for number, message in enumerate(messages):
            if number != bad:
                data = message.pack()
            elif rng.random() < 0.1:
                data = rng.choice([b"", rng.randbytes(rng.randrange(1, 300)),
                                   sender.connect().pack()])
            else:
                data = spoil(message, rng, self.longest)
            if not self.send(sender, i, data, "session"):
                self.count("too late")
                return
            # If the server left in the middle of a long answer, our RECV would fail.
            if number != bad and len(data) > 2000 and "text" in message.names:
                sender.wait()
            if number == bad and rng.random() < 0.7:
                break
        if rng.random() < 0.05 and self.may_abandon():
            self.count("abandoned")
            return
        sender.send(sender.bye().pack())

    def at_the_door(self, sender, rng):
        """Returns a message for the listener."""
        kind = rng.randrange(10)
        if kind == 0:
            return rng.choice([b"", rng.randbytes(rng.randrange(1, 400)),
                               bytes(self.longest), sender.bye().pack()])
        if kind == 1:
            return rng.choice(SESSIONS[self.program](rng, 0)).pack()
        message = spoil(sender.connect(), rng, self.longest)
        if self.opens(sender, message):
            # With the nonce that its session then has.
            return message if sender.plain else with_nonce(message, sender.nonce)
        if not self.looks_good(sender, message):
            return message
        # The server will call there. It must not call strangers, and not often:
        # it waits up to 10 s for an answer.
        if self.may_abandon():
            self.count("dead addresses")
            dead = b"fi_shm://nobody\0"
            if len(sender.address) == 16 and b"shm" not in sender.address:
                dead = (sender.address[:2] + struct.pack(">H", 9) +
                        sender.address[4:])
            elif b"shm" not in sender.address:
                dead = sender.address
            return sender.connect(dead).in_session(rng.randrange(1, 2**32)).pack()
        return message[:3] if sender.plain or sender.strange else message[:-1]

    @staticmethod
    def looks_good(sender, message):
        """Returns whether the server takes this for a CONNECT with an address to
        which it can try to send."""
        if sender.plain:
            return message[:4] == struct.pack("<I", CONNECT) and \
                12 * sender.numbered <= len(message) <= LONGEST
        if sender.strange:
            return message[:4] == struct.pack("<I", CONNECT) and (
                len(message) == 8 + len(sender.address) or
                b"shm" in sender.address and 8 < len(message) <= LONGEST)
        if len(message) != 268 or message[:4] != struct.pack("<I", CONNECT):
            return False
        (size,) = struct.unpack_from("<I", message, 8)
        return size <= 256 and (size == len(sender.address) or
                                b"shm" in sender.address)

    def opens(self, sender, message):
        """Returns whether this is a CONNECT from the sender all the same."""
        size = len(sender.address)
        at = 12 if sender.numbered else 4
        if sender.plain:  # what is missing is zeros to it, and what is too much nothing
            return self.looks_good(sender, message) and \
                message[at:at + size].ljust(size, b"\0") == sender.address
        if sender.strange:
            return self.looks_good(sender, message) and message[8:] == sender.address
        return self.looks_good(sender, message) and message[8:12 + size] == (
            struct.pack("<I", size) + sender.address)

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
        if self.program == "9_file":
            self.remove_files()

    def remove_files(self):
        """Removes what has been saved, except the files of honest clients, which
        begin with "file"."""
        for entry in os.scandir(self.server.folder):
            if (not entry.name.startswith("file") and
                    not entry.name.endswith(".part") and
                    entry.is_file() and time.time() - entry.stat().st_mtime > 5):
                os.unlink(entry.path)

    def fuzz(self):
        """Returns what has failed, or nothing."""
        server = self.server
        threads = [threading.Thread(target=self.work, args=(i,), daemon=True)
                   for i in range(len(self.rngs))]
        try:
            self.honest_client()
            memory = server.memory()
            started = time.monotonic()
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                if (self.counts["messages"] >=
                        self.every * self.counts["honest clients"]):
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

    def print_failure(self):
        print(f"{self.program} FAILED:\n{self.failure}")
        print("The last lines of the server:")
        print("".join(self.server.process.lines[-60:]))
        print("The last messages:")
        for when, i, where, message in self.recent:
            print(f"  {when:.3f} sender {i} to the {where}: {len(message)} bytes "
                  f"{message[:600].hex()}")


class CrowdSender(Sender):
    """A client of 13_crowd."""

    number = 0

    def connect(self):
        return Message("CONNECT of 13_crowd", number=self.number, addr=self.address)

    def is_accepted(self):
        """Waits for an ACCEPT."""
        while (message := self.wait()) is not None:
            answer = read_crowd(message)
            if (answer.type, answer.number) == (ACCEPT, self.number):
                return True
        return False


class CrowdFuzzer(Fuzzer):
    """13_crowd has one endpoint for all, and conversations instead of sessions."""

    new_sender = CrowdSender

    def __init__(self, run, program, args):
        super().__init__(run, program, args)
        self.longest = 2048 + (args.provider != "shm")

    def step(self, sender, i):
        """Messages of nobody, perhaps, and a conversation."""
        rng = self.rngs[i]
        assert self.server.process.popen.poll() is None, "the server has ended"
        for _ in range(rng.choice([0, 0, 2, 4, 8])):
            message = spoil(sender.connect(), rng, self.longest)
            # Not one that begins a conversation with an address that is only nearly one:
            # the server would call there.
            if message[:4] != struct.pack("<I", CONNECT):
                self.send(sender, i, message, "stranger")
        sender.number = rng.getrandbits(64)
        sender.send(sender.connect().pack())
        self.count("sessions")
        assert sender.is_accepted(), "the server does not answer"
        messages = [message.in_session(0, sender.number) for message in
                    session_of_a_crowd(rng, self.counts["messages"])]
        bad = rng.randrange(-1, len(messages))  # -1: none
        for place, message in enumerate(messages):
            data = message.pack() if place != bad else \
                spoil(message, rng, self.longest)
            if data[:4] == struct.pack("<I", CONNECT):
                continue
            if not self.send(sender, i, data, "session"):
                self.count("too late")
                return
            if place == bad and rng.random() < 0.7:
                break
        if rng.random() < 0.05:
            self.count("abandoned")
        else:
            sender.send(Message("BYE of 13_crowd", number=sender.number).pack())


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20000,
                        help="to each program (20000)")
    parser.add_argument("--seed", type=int, default=random.getrandbits(32))
    parser.add_argument("--provider", default="", help="FI_PROVIDER")
    parser.add_argument("--senders", type=int, default=3,
                        help="at a time (3)")
    parser.add_argument("--every", type=int, default=1000,
                        help="messages between two honest clients (1000)")
    parser.add_argument("programs", nargs="*", metavar="PROGRAM",
                        default=list(SESSIONS))
    args = parser.parse_args()
    print(f"--seed {args.seed}", flush=True)
    for name, value in RXM_QUEUES.items():
        os.environ.setdefault(name, value)
    # So that a server never outlives us.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed = False
    for program in args.programs:
        with tempfile.TemporaryDirectory(
                dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            run = Run(folder)
            try:
                fuzzer = (CrowdFuzzer if program == "13_crowd" else Fuzzer)(
                    run, program, args)
                if fuzzer.fuzz():
                    failed = True
                    fuzzer.print_failure()
            finally:
                run.end()
        counts = ", ".join(f"{count} {what}"
                           for what, count in fuzzer.counts.items())
        print(f"{program}: {counts}", end="")
        if not fuzzer.failure:
            print(f"; {fuzzer.counts['messages'] / fuzzer.seconds:.0f} messages/s; "
                  f"memory of the server {fuzzer.memory[0] >> 10} MB, then "
                  f"{fuzzer.memory[1] >> 10} MB", end="")
        print(flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
