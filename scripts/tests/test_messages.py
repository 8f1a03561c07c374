"""Messages that no client of ours would send. They cost their sender its session,
and others nothing: in each test, other clients come and go meanwhile."""

import contextlib
import os
import re
import signal
import socket
import struct
import threading
import time

import pytest

from conftest import (ACCEPT, ALIVE, BUILD, BYE, CHUNK, CONNECT, CREDIT, ERROR,
                      FREE, JOIN, LIBFABRIC_LEAKS, MALLOC, PROGRAMS, QUICK, READY,
                      REPLY, SAVED, SHORT, TABLE_ALIVE, TABLE_REPLY, USAGE, FakeClient,
                      address_message, append, base, end, give_up, numbers, put,
                      read_address, report, request)

TEXT, RANDOM_FILL, PROGRESS = 4, 4, 5
HUGE = 2**64 - 1
LONGEST = 65536  # bytes of a message

# Sanitizers find what a bad message does, and the plain programs do the same.
pytestmark = pytest.mark.builds("sanitized")
two_providers = pytest.mark.parametrize("provider", ["", "shm"],
                                        ids=["default", "shm"])
# Each program, and one of them through shm, too: what comes out of the inbox is
# the same for all.
each_program = pytest.mark.parametrize(
    "program,provider", [(p, "") for p in PROGRAMS] + [("7_queue", "shm")])
each_session = pytest.mark.parametrize(
    "program,provider", [(p, "") for p in PROGRAMS[1:]] + [("7_queue", "shm")])
# For tests that take long, because somebody in them has to wait for 10 s.
each_once = pytest.mark.parametrize(
    "program,provider", [("5_reverse", "shm"), ("7_queue", "")])
# What the other clients do. It takes a moment, so that bad messages come while
# they are at it.
OTHERS = {**QUICK, "5_reverse": ["0123456789" * 6000],
          "6_write": ["65536", "100"], "7_queue": ["65536", "100", "3"]}


def stray_accept(fake):
    """An ACCEPT for a client that had this address before."""
    return address_message(ACCEPT, b"nowhere", nonce=fake.nonce ^ 1)


def fill(program, page_size=4096, indices=(0, 1), num_pages=None, context=7,
         repeat=1, addr=0, size=1 << 20, rkey=1):
    """A RANDOM_FILL, by default for memory that is not there."""
    message = base(RANDOM_FILL) + struct.pack(
        "<I6Q", context, addr, size, rkey, 42, page_size,
        len(indices) if num_pages is None else num_pages)
    if program == "7_queue":
        message += struct.pack("<Q", repeat)
    return message + struct.pack(f"<{len(indices)}I", *indices)


@contextlib.contextmanager
def others(server):
    with server.others(*OTHERS[server.program], count=1):
        server.process.wait_for(r"^\[1\] Received CONNECT")
        yield


@each_program
def test_at_the_door(run, serve, program, provider):
    """Messages that open no session."""
    server = serve(program, provider)
    client = FakeClient(run, server)
    if program == "4_hello":
        # Any message is a text.
        for message in [b"", b"\0", b"\xff\xfe", b"x" * LONGEST]:
            client.send(message)
            server.process.wait_for(f"^Received {len(message)} bytes: ")
        messages = []
    else:
        connect = client.connect()
        messages = [
            b"", b"x", base(CONNECT)[:-1], base(0), base(99), base(2**32 - 1),
            base(CONNECT), connect[:-1], connect + b"x",
            client.connect(addr_size=257), client.connect(addr_size=2**32 - 1),
            base(TEXT) + b"text", base(BYE), b"\0" * LONGEST]
    if program in ("6_write", "7_queue"):
        messages.append(fill(program))
        client.send(stray_accept(client))  # nobody cares
    with others(server) if messages else contextlib.nullcontext():
        for count, message in enumerate(messages, 1):
            client.send(message)
            server.process.wait_for(r"^(\[\d+\] )?error: bad message: ",
                                    count=count)
    # The shm provider of libfabric 1.17 never returns from a message that is
    # longer than the RECV (smr_cma_loop).
    if provider != "shm":
        client.send(b"\0" * (LONGEST + 1), "(sent|failed)")
        server.process.wait_for("^error: RECV failed: ")
    server.check_client()
    server.stop()


def session_messages(program):
    """What is wrong, and the messages of a session that end it."""
    if program == "5_reverse":
        text = base(TEXT) + b"text"
        return {
            "short": [b"x"],
            "empty": [b""],
            "type": [base(99)],
            "empty text": [base(TEXT)],
            "CONNECT": [base(CONNECT) + bytes(260)],
            "second text": [text, text],
        }
    if program == "8_malloc":
        return {
            "short": [b"x"],
            "empty": [b""],
            "type": [request(99)],
            "CONNECT": [request(CONNECT)],
            "REPLY": [base(REPLY) + bytes(140)],
            "MALLOC cut short": [request(MALLOC, 64)[:-1]],
            "type only": [base(FREE)],
            "after good ones": [base(ALIVE), request(MALLOC, 64),
                                request(USAGE)[:-8]],
        }
    if program == "10_lock":
        return {
            "short": [b"x"],
            "empty": [b""],
            "type": [base(99)],
            "CONNECT": [base(CONNECT) + bytes(260)],
            "REPLY": [base(TABLE_REPLY) + bytes(44)],
            "APPEND cut short": [append()[:-1]],
            "REPORT cut short": [report()[:-1]],
            "second REPORT": [report(), report()],
            "after good ones": [base(TABLE_ALIVE), base(JOIN), append(), report(),
                                base(0)],
        }
    if program == "9_file":
        good = put(size=9 << 20, slots=8)
        return {
            "short": [b"x"],
            "empty": [b""],
            "type": [base(99)],
            "CONNECT": [base(CONNECT) + good[4:]],
            "PUT cut short": [good[:-1]],
            "no slots": [put(size=9 << 20, slots=0)],
            "too many slots": [put(size=9 << 20, slots=65)],
            "slots huge": [put(size=9 << 20, slots=2**32 - 1)],
            "CHUNK before PUT": [numbers(CHUNK, 0)],
            "END before PUT": [end(0)],
            "ERROR cut short": [give_up()[:-1]],
            "second PUT": [good, good],
            "CHUNK beyond the end": [good, numbers(CHUNK, 9)],
            "CHUNK huge": [good, numbers(CHUNK, 2**32 - 1)],
            "half a CHUNK": [good, numbers(CHUNK, 0)[:-1]],
            "END cut short": [good, end(0)[:-1]],
            "READY": [good, base(READY) + bytes(36)],
            "CREDIT": [good, numbers(CREDIT, 0)],
            "SAVED": [good, base(SAVED)],
            "half an ERROR": [good, base(ERROR)],
            "after good ones": [good, numbers(CHUNK, 0, 1), end(0), base(99)],
            "after the END": [put(), end(0), numbers(CHUNK, 0)],
        }
    good = fill(program)
    messages = {
        "empty": [b""],
        "short": [good[:20]],
        "no indices": [good[:-8]],
        "indices cut short": [good[:-1]],
        "too many indices": [good + base(0)],
        "type": [base(99)],
        "CONNECT": [base(CONNECT) + good[4:]],
        "PROGRESS": [base(PROGRESS)],
        "no pages": [fill(program, indices=())],
        "num_pages": [fill(program, num_pages=3)],
        "num_pages overflows": [fill(program, num_pages=2**62 + 2)],
        "num_pages huge": [fill(program, num_pages=HUGE)],
        "page_size 0": [fill(program, page_size=0)],
        "page_size odd": [fill(program, page_size=4095)],
        "page_size huge": [fill(program, page_size=HUGE - 7)],
        "page_size too large": [fill(program, page_size=(16 << 20) + 8)],
        "product overflows": [fill(program, page_size=2**63)],
        "too much": [fill(program, page_size=16 << 20, size=1 << 40,
                          indices=[0] * (5 if program == "6_write" else 33))],
        "index": [fill(program, indices=(0, 256))],
        "index huge": [fill(program, indices=(2**32 - 1, 0))],
        "no context": [fill(program, context=0)],
        "memory too small": [fill(program, size=8191)],
        "no memory": [fill(program, size=0)],
        "page larger than memory": [fill(program, page_size=2 << 20, indices=[0])],
        "longest": [fill(program, page_size=8, indices=[2**30] * (
            (LONGEST - len(good) + 8) // 4))],
    }
    if program == "7_queue":
        messages["no repeat"] = [fill(program, repeat=0)]
        messages["repeat huge"] = [fill(program, repeat=HUGE)]
    return messages


@each_session
def test_in_a_session(run, serve, program, provider):
    """Messages that end the session of their sender. An ACCEPT with another nonce
    does not: it may be the server's answer to a client that had the address of this
    session before."""
    server = serve(program, provider)
    client = FakeClient(run, server)
    bad = session_messages(program)
    with others(server):
        for what, messages in bad.items():
            client.open_session()
            for message in [stray_accept(client), *messages]:
                client.send(message)
            client.expect("error: bad message: ")
            assert len(server.errors()) == list(bad).index(what) + 1
            # The server of 9_file says why, and waits until the client gives up.
            if program == "9_file":
                client.send(base(BYE))
                client.expect("Done")
    server.check_client()
    server.stop()


@pytest.mark.parametrize("program", PROGRAMS[1:])
def test_too_long(run, serve, program):
    """A message that is longer than the RECVs of a session. Not through shm: see
    test_at_the_door."""
    server = serve(program)
    client = FakeClient(run, server)
    with others(server):
        client.open_session()
        client.send(b"\0" * (LONGEST + 1), "(sent|failed)")
        client.expect("error: RECV failed: ")
    assert len(server.errors()) == 1
    server.check_client()
    server.stop()


@each_session
def test_bye(run, serve, program, provider):
    """A client may leave at any moment. The server says no more than it has
    done."""
    server = serve(program, provider)
    client = FakeClient(run, server)
    end_of_session = "Done"
    if program == "9_file":
        end_of_session = "error: the client has left before its file was saved$"
    with others(server):
        client.open_session()
        client.send(base(BYE))
        client.expect(end_of_session)
        if program == "5_reverse":
            work = base(TEXT) + b"x" * 60000
        elif program == "8_malloc":
            work = request(MALLOC, 1 << 20)
        elif program == "9_file":
            work = put(size=9 << 20, slots=8)
        elif program == "10_lock":
            work = base(JOIN)
        else:
            work = fill(program, 1 << 20, indices=[0] * 20)
        client.open_session()
        client.send(work)
        client.send(base(BYE))
        client.expect(end_of_session)
        assert not re.search(rf"^\[{client.number}\] .*100%",
                             server.process.output, re.M)
    assert len(server.errors()) == 2 * (program == "9_file")
    server.check_client()
    assert program != "9_file" or not os.listdir(server.folder)
    server.stop()


@each_session
def test_impossible_addresses(run, serve, program, provider):
    """CONNECTs from nowhere."""
    server = serve(program, provider, **LIBFABRIC_LEAKS)
    client = FakeClient(run, server)
    wrong = [b"", b"\1", client.address[:-1], client.address + b"\1",
             b"\xff" * 256, b"f" * 256, b"\0" * 15]
    with others(server):
        for count, address in enumerate(wrong, 1):
            client.send(client.connect(address=address))
            server.process.wait_for(r"^(\[\d+\] )?error: .* is not an address",
                                    count=count)
        # The server may answer itself, and ignores that.
        client.send(client.connect(address=bytes.fromhex(server.address)))
        server.process.wait_for("Received CONNECT .* " + server.address)
    server.check_client()
    server.stop()


def dead_addresses(provider):
    """Well-formed addresses where nobody is, and what must stay open meanwhile:
    a port that nobody listens to, one that takes connections without a word, and
    names of shared memory."""
    if provider == "shm":
        return [b"fi_shm://1:0:0\0", b"fi_shm://nobody\0", b"f\0",
                b"f/../x\0"], contextlib.nullcontext()
    mute = socket.create_server(("127.0.0.1", 0))
    port = struct.pack(">H", mute.getsockname()[1])
    return [b"\2\0\0\x09\x7f\0\0\1" + bytes(8),
            b"\2\0" + port + b"\x7f\0\0\1" + bytes(8),
            b"\2\0" + port + b"\x7f\0\0\1" + bytes(8),
            b"\2\0\0\x09\xff\xff\xff\xff" + bytes(8)], mute


@each_once
def test_dead_addresses(run, serve, program, provider):
    """CONNECTs from addresses that are well-formed, but nobody is there. Waiting
    for one would take 10 s."""
    server = serve(program, provider, **LIBFABRIC_LEAKS)
    client = FakeClient(run, server)
    addresses, keep_open = dead_addresses(provider)
    with keep_open:
        for address in addresses:
            client.send(client.connect(address=address))
        for _ in range(2):
            other = server.check_client(*SHORT.get(program, []))
            assert other.seconds < 8
        server.process.wait_for(r"^(\[\d+\] )?error: ", 30, count=4)
    server.check_client()
    assert len(server.errors()) == 4
    server.stop()


@two_providers
@pytest.mark.parametrize("program", ["6_write", "7_queue"])
def test_memory_that_is_not_there(run, serve, program, provider):
    """Memory that the client has not registered, with a key that it has not got.
    The line about it says that this may be the reason."""
    server = serve(program, provider)
    client = FakeClient(run, server)
    with others(server):
        client.open_session()
        client.send(fill(program, addr=0xdead000, size=1 << 40, rkey=0x1234))
        # The client takes part, because its provider has to refuse the WRITEs.
        client.process.write("wait")
        # The shm provider does not say which operation has failed.
        client.expect("error: an operation failed: " if provider == "shm" else
                      "error: WRITE failed: .* has it refused the access")
    assert len(server.errors()) == 1
    server.check_client()
    server.stop()


@each_once
def test_silent_clients(run, serve, program, provider):
    """Four clients that say nothing after their CONNECT. The server ends them
    after the limit of 10 s, with a line each. They cost the others nothing."""
    server = serve(program, provider)
    clients = [FakeClient(run, server) for _ in range(4)]
    for client in clients[:2]:
        client.open_session()
    # These do not even look at the ACCEPT.
    for client in clients[2:]:
        client.send(client.connect())
    server.process.wait_for("Received CONNECT", count=4)
    started = time.monotonic()
    other = server.check_client(*SHORT.get(program, []))
    assert other.seconds < 8
    with others(server):
        server.process.wait_for(
            r"^\[\d+\] error: waiting for the client: nothing has happened for "
            "10 s", 30, count=4)
    assert time.monotonic() - started > 5
    assert len(server.errors()) == 4
    server.check_client()
    server.stop()


@pytest.mark.parametrize("program", ["5_reverse", "7_queue"])
def test_flood(run, serve, program):
    """Somebody sends more CONNECTs than the server lets wait. Then it takes no more
    messages, instead of more and more memory."""
    server = serve(program, "shm")
    client = FakeClient(run, server)

    def flood():
        line = f"send {client.connect().hex()}\n".encode()
        # The pipe breaks at the end of the test.
        with contextlib.suppress(OSError):
            for _ in range(5000):
                os.write(client.process.popen.stdin.fileno(), line)

    # 8 are served, and 1000 wait.
    threading.Thread(target=flood, daemon=True).start()
    client.process.wait_for("^sent", count=1008)
    server.process.wait_for("Received CONNECT", count=8)
    # Some more get into the RECVs, or into the queue that shm has before them.
    time.sleep(3)
    assert client.process.output.count("\nsent\n") < 4000
    # Within the limit of 10 s, after which those that are served give up their place.
    assert not server.errors()
    server.stop()


# ---- Answers that no server of ours would give ----

class FakeServer(FakeClient):
    """Answers a client with whatever bytes a test makes up."""

    def __init__(self, run, build, program, provider=""):
        self.process = run([f"{BUILD}/sender"], provider, stdin=-1)
        self.address = self.process.wait_for(r"address ([0-9a-f]+)\n")[1]
        args = ["Makefile"] if program == "9_file" else OTHERS.get(program, [])
        self.client = run([f"{build}/{program}", self.address, *args], provider)

    def meet(self):
        """Takes the CONNECT."""
        connect = self.receive()
        assert connect[:4] == base(CONNECT)
        self.nonce, client = read_address(connect)
        self.peer(client)

    def accept(self, address=None, addr_size=None):
        return address_message(
            ACCEPT, bytes.fromhex(self.address) if address is None else address,
            addr_size, nonce=self.nonce)


@each_once
def test_bad_answers(run, build, program, provider):
    """A client does not believe everything either."""
    answers = {
        "short": lambda server: [server.accept()[:-1]],
        "addr_size": lambda server: [server.accept(addr_size=257)],
        "no address": lambda server: [server.accept(address=b"")],
        "BYE": lambda server: [server.accept(), base(BYE) * 2],
        "second ACCEPT": lambda server: [server.accept(), server.accept()],
        "not its text": lambda server: [server.accept(), base(TEXT) + b"x"],
    }
    servers = {what: FakeServer(run, build, program, provider)
               for what in answers}
    for what, server in servers.items():
        server.meet()
        for message in answers[what](server):
            server.send(message, "(sent|failed)")
    for what, server in servers.items():
        assert server.client.wait(30) == 1, (what, server.client.output)
        assert "error: " in server.client.output, what


@two_providers
def test_stray_messages(run, build, provider):
    """What arrives before the ACCEPT, and is none, was meant for somebody else, and
    so was an ACCEPT with another nonce, whenever it arrives."""
    server = FakeServer(run, build, "5_reverse", provider)
    server.meet()
    for stray in [b"", base(99) + server.accept()[4:], base(PROGRESS),
                  base(TEXT) + b"tfel ,thgir", stray_accept(server)]:
        server.send(stray)
    server.send(server.accept())
    text = server.receive()
    assert text[:4] == base(TEXT)
    server.send(stray_accept(server))
    server.send(text[:4] + text[:3:-1])
    assert server.receive() == base(BYE)
    assert server.client.wait(30) == 0, server.client.output


@two_providers
@pytest.mark.parametrize("program", ["5_reverse", "6_write", "7_queue", "8_malloc"])
def test_interrupted_while_waiting(run, build, program, provider):
    """A client that is interrupted while it waits for an answer says BYE, so that
    its server has not to wait for its silence."""
    server = FakeServer(run, build, program, provider)
    server.meet()
    server.send(server.accept())
    server.receive()
    server.client.signal(signal.SIGINT)
    # The client of 8_malloc may have sent a sign of life before.
    while (message := server.receive()) == base(ALIVE):
        pass
    assert message == base(BYE)
    assert server.client.wait(8) == 1
    assert server.client.output.endswith("error: interrupted\n")


@pytest.mark.builds("plain")  # they start faster
@pytest.mark.parametrize("program,provider",
                         [("7_queue", ""), *((p, "shm") for p in PROGRAMS)])
def test_client_interrupted_at_first_contact(run, build, program, provider):
    """A client that is interrupted before the server has looked at its first
    message waits for that, but not for long. Otherwise, the shm provider of
    libfabric 1.17 would end the server."""
    def interrupt(answer):
        """Returns how long the client stays; 0 if it leaves at once."""
        server = FakeServer(run, build, program, provider)
        server.client.wait_for("^domain: ")
        time.sleep(0.5)
        server.client.signal(signal.SIGINT)
        interrupted = time.monotonic()
        time.sleep(0.3)
        waits = server.client.popen.poll() is None
        if waits and answer:
            server.process.write("wait")
        status = server.client.wait(10)
        assert status == 1 and "error: interrupted" in server.client.output or \
            status == 0 and program == "4_hello", server.client.output
        seconds = time.monotonic() - interrupted
        # On a busy machine, tcp may need longer than that for a connection.
        if waits and answer and provider == "shm":
            server.process.wait_for("^received ")
        return seconds * waits

    assert interrupt(answer=False) < 5
    # A client that is slow to start may leave before it has turned to the server.
    assert any(interrupt(answer=True) for _ in range(3))


@pytest.mark.builds("plain")
@pytest.mark.parametrize("program,provider",
                         [("7_queue", ""), *((p, "shm") for p in PROGRAMS[1:])])
def test_server_interrupted_at_first_contact(run, serve, program, provider):
    """The same the other way round: the client has not yet looked at the ACCEPT."""
    server = serve(program, provider)
    client = FakeClient(run, server)
    client.send(client.connect())
    server.process.wait_for("Received CONNECT")
    server.process.signal(signal.SIGTERM)
    time.sleep(0.3)
    assert server.process.popen.poll() is None
    assert client.receive()[:4] == base(ACCEPT)
    assert server.process.wait(5) == 0


# ---- Texts ----

# Clears a terminal, rings its bell, goes back to the start of the line, and colours
# what follows, by an escape sequence in one character.
TERRIBLE = "no\x1b[2J\a\r\x9b31m\x7f, gr\u00fc\u00dfe"
# A pattern. \x9b is two bytes in UTF-8.
HARMLESS = r"no\?\[2J\?\?.?\?31m\?, gr\u00fc\u00dfe"


def check_harmless(process):
    assert not re.search(r"[^\n -~\xa0-\uffff]", process.output), process.output


@pytest.mark.parametrize("program", ["4_hello", "5_reverse", "9_file"])
def test_terrible_texts_of_clients(run, serve, program):
    """A server prints a text as it is, but for what its terminal would obey."""
    server = serve(program)
    client = FakeClient(run, server)
    text = TERRIBLE.encode()
    if program == "4_hello":
        client.send(text)
        server.process.wait_for(f"^Received {len(text)} bytes: "
                                f"{HARMLESS}$")
    else:
        client.open_session()
        client.send(base(TEXT) + text if program == "5_reverse" else give_up(text))
        client.expect(f".*{HARMLESS}$")
    check_harmless(server.process)
    server.stop()


@pytest.mark.parametrize("program", ["5_reverse", "8_malloc", "9_file"])
def test_terrible_texts_of_servers(run, build, program):
    """So does a client: with what is not its text reversed, and with the reason for
    which the server refuses what it wants."""
    server = FakeServer(run, build, program)
    server.meet()
    server.send(server.accept())
    server.receive()
    text = TERRIBLE.encode()
    server.send({
        "5_reverse": base(TEXT) + text,
        "8_malloc": base(REPLY) + struct.pack("<108s4Q", text, 0, 0, 0, 0),
        "9_file": give_up(text)}[program])
    server.client.wait_for(HARMLESS)
    # It may want to tell the server that it leaves.
    server.process.write("wait")
    assert server.client.wait(30) == 1
    check_harmless(server.client)
