"""Clients and servers that send whatever bytes a test makes up."""

import contextlib
import random
import re
import struct
import threading
import time

from harness import BUILD, provider_in
from messages import (ACCEPT, BYE, CONNECT, CREDIT, FAILED, FREE, MALLOC, PROGRESS, READY,
                      REFUSAL, REPLY, TEXT, WAIT, base, crowd, plain, put, read_crowd,
                      read_reply, request, type_and_nonce, type_of, with_nonce)
from table import TABLE


def chosen_provider(run, build, program, provider=""):
    """Which one a program takes, as a client of nobody says. For atomics, that is another
    one than tcp from libfabric 1.18 on."""
    client = run([f"{build}/{program}", "00", *TABLE[program].least], provider)
    chosen = client.wait_for(r"^domain: .*, provider: ([^,\n]+)")[1]
    client.kill()
    return chosen


def new_nonce():
    """Each session has its own. 0 is that of the listener."""
    return random.randrange(1, 2**32)


class FakeClient:
    """Speaks to a server by scripts/tests/sender.cpp."""

    def __init__(self, run, server):
        self.server = server
        self.program = server.program
        self.number = None
        self.session = None  # the address of the endpoint that serves this client
        self.process = run([f"{BUILD}/sender", server.address],
                           provider_in(server.process.output), stdin=-1)
        self.nonce = new_nonce() if server.entry.guarded else None
        self.rails = random.randbytes(8)  # the number in each CONNECT of 11_rails
        self.address = bytes.fromhex(
            self.process.wait_for(r"address ([0-9a-f]+)\n").group(1))

    def command(self, line, answer):
        already = len(self.process.lines)
        self.process.write(line)
        return self.process.wait_for("^" + answer, 30, after=already)

    def send(self, message, answer="sent", as_it_is=False):
        """Sends a message with the nonce of this session, if it has one, or as it is."""
        self.command(self.send_line(message, as_it_is), answer)

    def send_line(self, message, as_it_is=False):
        """The command that sends it."""
        if self.nonce is not None and not as_it_is:
            message = with_nonce(message, self.nonce)
        return "send " + message.hex()

    @contextlib.contextmanager
    def saying(self, message, answered=False):
        """Sends a message every second, however long the test takes. It may be a
        function that makes the next one, and may have an answer."""
        stop, failures = threading.Event(), []

        def say():
            try:
                while not stop.wait(1):
                    self.send(message() if callable(message) else message)
                    if answered:
                        self.receive()
            except AssertionError as error:
                failures.append(error)

        thread = threading.Thread(target=say, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        assert not failures, failures[0]

    def peer(self, hex_address):
        self.process.write("peer " + hex_address)

    def receive_any(self):
        return bytes.fromhex(self.command("wait", "received (.*)")[1])

    def receive(self):
        """Returns the next message of this session, without its nonce, and ignores what
        is left of earlier ones."""
        while True:
            message = self.receive_any()
            if self.nonce is None:
                return message
            if type_and_nonce(message)[1] == self.nonce:
                return with_nonce(message, 0)

    def renew(self):
        """Begins another conversation."""
        if self.nonce is not None:
            self.nonce = new_nonce()
        self.rails = random.randbytes(8)

    def message_with(self, type_, address):
        """A CONNECT or an ACCEPT."""
        return (plain(type_) if self.nonce is None else base(type_, self.nonce)) + address

    def address_in(self, message):
        """The nonce and the address in a CONNECT or an ACCEPT."""
        if TABLE[self.program].guarded:
            return type_and_nonce(message)[1], message[8:].hex()
        at = 12 if TABLE[self.program].numbered and type_of(message) == CONNECT else 4
        return None, message[at:].hex()

    def connect(self, address=None):
        """A CONNECT, by default with our own address."""
        address = self.address if address is None else address
        return self.message_with(CONNECT, self.rails * self.server.entry.numbered + address)

    def open_session(self):
        """Sends a CONNECT, and whatever comes next to the address of the
        ACCEPT."""
        already = len(self.server.process.lines)
        self.renew()
        self.peer(self.server.address)
        self.send(self.connect())
        # Where all places are taken, it may be told to wait, and asks again.
        while type_of(accept := self.receive()) != ACCEPT:
            assert type_of(accept) == WAIT
            time.sleep(1)
            self.send(self.connect())
        self.number = self.server.process.wait_for(
            r"^\[(\d+)\] Received CONNECT .* " + self.address.hex() + r"( on \S+)?$",
            after=already)[1]
        self.session = self.address_in(accept)[1]
        self.peer(self.session)

    def memory(self):
        """Registers memory that the server may write to: 1 MiB. Returns its address and
        its key."""
        return map(int, self.command("memory", r"memory (\d+) (\d+)").groups())

    def work(self):
        """A message that gives the server something to do, which succeeds."""
        entry = self.server.entry
        if not entry.fill:
            return entry.work
        addr, key = self.memory()
        return entry.fill(1 << 20, indices=[0] * 20, addr=addr, rkey=key)

    def expect(self, line, timeout=30):
        """Waits for what the server prints about this client."""
        self.server.process.wait_for(rf"^\[{self.number}\] {line}", timeout)

    def leave(self):
        """Says BYE, and waits until the server is done with this client."""
        self.send(self.server.entry.base(BYE))
        self.expect("Done")


class FakeServer(FakeClient):
    """Accepts a client of a program, unless it is told not to, then answers it with
    whatever bytes a test makes up."""

    def __init__(self, run, build, program, *args, provider="", accepts=True, meets=True):
        self.program = program
        provider = chosen_provider(run, build, program, provider)
        self.process = run([f"{BUILD}/sender"], provider, stdin=-1)
        self.address = self.process.wait_for(r"address ([0-9a-f]+)\n")[1]
        self.client = run([f"{build}/{program}", self.address, *args], provider)
        if meets:
            self.meet()
        if meets and accepts:
            self.send(self.accept())

    def meet(self):
        """Takes the CONNECT. What comes before it is for a process of another test, which
        had this address and has died."""
        while type_of(connect := self.receive_any()) != CONNECT:
            pass
        self.nonce, self.client_address = self.address_in(connect)
        self.peer(self.client_address)

    def accept(self, address=None):
        return self.message_with(
            ACCEPT, bytes.fromhex(self.address) if address is None else address)

    def receive_other_than(self, type_):
        """Returns the next message that is of another type."""
        while type_of(message := self.receive()) == type_:
            pass
        return message


class Borrower(FakeClient):
    """A client of 8_malloc, in a session of its own."""

    def __init__(self, run, server):
        super().__init__(run, server)
        self.open_session()

    def ask(self, type_, number):
        """Asks for something. Returns the answer."""
        self.process.write(self.send_line(request(type_, number)))
        return self.receive()

    def borrow(self, size):
        piece = read_reply(self.ask(MALLOC, size))
        assert piece.size == size
        return piece

    def give_back(self, piece):
        assert self.ask(FREE, piece.addr) == plain(REPLY)

    def refused(self, type_, number):
        """Asks for what can't be. Returns the reason."""
        answer = self.ask(type_, number)
        assert type_of(answer) == REFUSAL
        return answer[len(plain(0)):].decode()

    def leave(self):
        """Says BYE. Returns what the server then prints about its pool."""
        super().leave()
        return self.server.pool_line(self.number)


class FileSender(FakeClient):
    """A client of 9_file, in a session of its own. All of its files are full of
    zeros, as the slots are. So it may do without WRITEs, and say by a CHUNK that one
    is there."""

    def __init__(self, run, server):
        super().__init__(run, server)
        self.slots = None  # where they are, and their key
        self.open_session()

    def answer(self):
        """Returns the next message of the server, and ignores that it is still at it."""
        while (message := self.receive()) == plain(PROGRESS):
            pass
        return message

    def put(self, *args, **kwargs):
        """Sends a PUT. Returns how many slots the server lends."""
        self.send(put(*args, **kwargs))
        message = self.answer()
        assert message[:4] == plain(READY), message
        addr, key, num_slots = struct.unpack_from("<3Q", message, 4)
        self.slots = (addr, key)
        return num_slots

    def credit(self):
        """Returns the slot of the next CREDIT."""
        message = self.answer()
        assert message[:4] == plain(CREDIT), message
        return struct.unpack("<Q", message[4:])[0]

    def failure(self):
        """Returns the reason that the server gives, and leaves. Credits may come before."""
        while (message := self.answer())[:4] == plain(CREDIT):
            pass
        assert message[:4] == plain(FAILED), message
        reason = message[4:].decode()
        self.expect("error: " + re.escape(reason) + "$")
        self.leave()
        return reason


class CrowdGuest(FakeClient):
    """A client of 13_crowd. All of them send to the same endpoint, so each message
    begins with the number of its client."""

    def __init__(self, run, server):
        super().__init__(run, server)
        self.number = new_number()

    def send_line(self, message, as_it_is=False):
        """The command that sends it, if it is long enough with our number."""
        if not as_it_is and len(message) >= 12:
            message = message[:4] + struct.pack("<Q", self.number) + message[12:]
        return "send " + message.hex()

    def connect(self, address=None):
        return crowd(CONNECT, self.address if address is None else address)

    def receive(self):
        """Returns the next message of this conversation."""
        while (message := read_crowd(self.receive_any())).number != self.number:
            pass
        return message

    def open_session(self):
        """Begins a conversation. Returns the answer."""
        self.number = new_number()
        self.send(self.connect())
        return self.receive()

    def check_text(self, text=b"text"):
        """The server reverses it."""
        self.send(crowd(TEXT, text))
        assert self.receive()[::2] == (TEXT, text[::-1])

    def leave(self):
        self.send(crowd(BYE))


def new_number():
    return random.getrandbits(64)


class CrowdHost(CrowdGuest):
    """A server of 13_crowd, for a client that it meets, whose number it takes."""

    def __init__(self, run, build, *args, provider=""):
        provider = provider or chosen_provider(run, build, "13_crowd")
        self.process = run([f"{BUILD}/sender"], provider, stdin=-1)
        self.address = self.process.wait_for(r"address ([0-9a-f]+)\n")[1]
        self.client = run([f"{build}/13_crowd", self.address, *args], provider)
        connect = read_crowd(self.receive_any())
        assert connect.type == CONNECT
        self.number = connect.number
        self.client_address = connect.body.hex()
        self.peer(self.client_address)

    def receive(self):
        """Ignores a CONNECT that comes again: it does if the ACCEPT takes longer than a
        second, as it may on a busy machine."""
        while (message := super().receive()).type == CONNECT:
            pass
        return message

    def reply(self, type_, body=b""):
        self.send(crowd(type_, body))
