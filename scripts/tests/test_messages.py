"""Messages that no client of ours would send."""

import struct

import pytest

from conftest import PROGRAMS, SUCCESS

CONNECT, ACCEPT, BUSY, BYE, TEXT = 1, 2, 3, 4, 5
RANDOM_FILL = 5
SESSION = 0x1122334455667788
HUGE = 2**64 - 1


def base(type_, session=SESSION):
    return struct.pack("<IIQ", type_, 0, session)


class FakeClient:
    """Speaks to a server with whatever bytes a test makes up."""

    def __init__(self, run, server):
        self.server = server
        self.process = run(["build/sender", server.address], server.provider,
                           stdin=-1)
        self.address = bytes.fromhex(
            self.process.wait_for(r"address ([0-9a-f]+)\n").group(1))

    def command(self, line, answer):
        already = len(self.process.lines)
        self.process.write(line)
        self.process.wait_for("^" + answer, after=already)

    def send(self, message):
        if message:
            self.command("send " + message.hex(), "sent")
        else:
            self.command("zeros 0", "sent")

    def connect(self, address=None, addr_size=None, mrs=None, num_mr=None,
                session=SESSION):
        """A CONNECT; for 6 and 7 with memory regions."""
        address = self.address if address is None else address
        message = base(CONNECT, session) + struct.pack(
            "<Q256s", len(address) if addr_size is None else addr_size,
            address)
        if self.server.program in ("6_write", "7_queue"):
            mrs = [(0, 1 << 20, 1)] if mrs is None else mrs
            message += struct.pack("<Q", len(mrs) if num_mr is None else num_mr)
            message += b"".join(struct.pack("<QQQ", *mr) for mr in mrs).ljust(
                16 * 24, b"\0")
        return message

    def open_session(self, **kwargs):
        """Sends a CONNECT, and what comes next to the address of the ACCEPT."""
        self.send(self.connect(**kwargs))
        self.command("wait 02", "received ")
        accept = bytes.fromhex(
            self.process.output.splitlines()[-1].split()[-1])
        (size,) = struct.unpack_from("<Q", accept, 16)
        self.process.write("peer " + accept[24:24 + size].hex())


def fill(program, session, page_size=4096, indices=(0, 1), num_pages=None, context=7,
         repeat=1, tail=b""):
    message = base(RANDOM_FILL, session) + struct.pack(
        "<IIQQQ", context, 0, 42, page_size,
        len(indices) if num_pages is None else num_pages)
    if program == "7_queue":
        message += struct.pack("<Q", repeat)
    return message + struct.pack(f"<{len(indices)}I", *indices) + tail


def expect_error(server, count):
    """Waits for the server's count-th error."""
    server.process.wait_for("^error: (the client's turn is over: )?bad message: ",
                            count=count)


providers = pytest.mark.parametrize("provider", ["", "shm"],
                                    ids=["default", "shm"])


@providers
@pytest.mark.parametrize("program", PROGRAMS)
def test_at_the_door(run, serve, program, provider):
    """Messages that open no session."""
    server = serve(program, provider)
    client = FakeClient(run, server)
    messages = [b""]
    if program != "4_hello":
        connect = client.connect()
        messages += [
            b"x", base(CONNECT)[:-1], base(0), base(99), base(2**32 - 1),
            base(CONNECT), connect[:-1], connect + b"x",
            client.connect(addr_size=257), client.connect(addr_size=HUGE),
            base(TEXT) + b"text", base(BYE), base(BUSY)]
    if program in ("6_write", "7_queue"):
        messages += [client.connect(num_mr=17), client.connect(num_mr=HUGE)]
    for count, message in enumerate(messages, 1):
        client.send(message)
        expect_error(server, count)
    if program != "4_hello":
        # As long as what the server can receive, and longer. The shm provider
        # of libfabric 1.17 never returns from the latter (smr_cma_loop).
        client.command("zeros 1048576", "sent")
        expect_error(server, len(messages) + 1)
    if provider != "shm":
        client.command("zeros 1048577", "(sent|failed)")
        server.process.wait_for("error: bad message: (RECV failed|the message)")
    server.check_client()
    server.stop()


def session_messages(program, session):
    """What is wrong, and the messages of a session that end it."""
    if program == "5_reverse":
        return {
            "short": b"x",
            "empty": b"",
            "type": base(99, session),
            "empty text": base(TEXT, session),
            "other session": base(TEXT, session + 1) + b"text",
            "BYE too early": base(BYE, session),
            "second CONNECT": base(CONNECT, session),
        }
    good = fill(program, session)
    messages = {
        "short": good[:20],
        "no indices": good[:-8],
        "indices cut short": good[:-1],
        "too many indices": good + b"\0\0\0\0",
        "type": base(99, session),
        "other session": base(RANDOM_FILL, session + 1) + good[16:],
        "BYE too early": base(BYE, session),
        "no pages": fill(program, session, indices=()),
        "num_pages": fill(program, session, num_pages=3),
        "num_pages overflows": fill(program, session, num_pages=2**62 + 2),
        "num_pages huge": fill(program, session, num_pages=HUGE),
        "page_size 0": fill(program, session, page_size=0),
        "page_size odd": fill(program, session, page_size=4095),
        "page_size huge": fill(program, session, page_size=HUGE - 7),
        "product overflows": fill(program, session, page_size=2**63),
        "too much": fill(program, session, page_size=2**30),
        "index": fill(program, session, indices=(0, 256)),
        "index huge": fill(program, session, indices=(2**32 - 1, 0)),
        "no context": fill(program, session, context=0),
    }
    if program == "7_queue":
        messages["no repeat"] = fill(program, session, repeat=0)
        messages["repeat huge"] = fill(program, session, repeat=HUGE)
    return messages


@providers
@pytest.mark.parametrize("program", PROGRAMS[1:])
def test_in_a_session(run, serve, program, provider):
    """Messages of a client whose turn it is. They cost it its turn."""
    server = serve(program, provider)
    client = FakeClient(run, server)
    door = server.address
    for count, what in enumerate(session_messages(program, 0), 1):
        client.process.write("peer " + door)
        client.open_session(session=count)
        client.send(session_messages(program, count)[what])
        expect_error(server, count)
    server.check_client()
    server.stop()


@providers
@pytest.mark.parametrize("program", PROGRAMS[1:])
def test_impossible_addresses(run, serve, program, provider):
    """A CONNECT from nowhere."""
    server = serve(program, provider)
    client = FakeClient(run, server)
    for count, address in enumerate(
            [b"", b"\1", client.address[:-1], client.address + b"\1"], 1):
        client.send(client.connect(address=address, session=count))
        expect_error(server, count)
    server.check_client()
    server.stop()


@pytest.mark.builds("sanitized")  # it takes long
@providers
@pytest.mark.parametrize("program", ["6_write", "7_queue"])
def test_memory_that_is_not_there(run, serve, program, provider):
    """Regions that the client has not registered."""
    server = serve(program, provider)
    client = FakeClient(run, server)
    client.open_session(mrs=[(0xdead000, 1 << 40, 0x1234)])
    client.send(fill(program, SESSION))
    server.process.wait_for("^error: the client's turn is over: ")
    server.check_client()
    server.stop()


@pytest.mark.builds("sanitized")  # it takes long
@providers
@pytest.mark.parametrize("program", PROGRAMS[1:])
def test_silent_client(run, serve, program, provider):
    """A client that says nothing after its CONNECT. Others have to wait, but no
    longer than the limit of 10 s."""
    server = serve(program, provider)
    client = FakeClient(run, server)
    client.open_session()
    next_client = server.start_client(*(["8", "1"] if program != "5_reverse"
                                        else []))
    assert next_client.wait(15) == 0, next_client.output
    assert "The server is busy" in next_client.output
    assert SUCCESS[program] in next_client.output
    assert server.process.output.count("error: ") == 1
    server.stop()
