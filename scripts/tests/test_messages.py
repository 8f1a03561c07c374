"""Messages that no client of ours would send. They cost their sender its session,
and others nothing: in each test, other clients come and go meanwhile."""

import contextlib
import os
import re
import socket
import struct
import time

import pytest

from fakes import FakeClient, FakeServer
from harness import LIBFABRIC_LEAKS, PROGRAMS, Server
from marks import ends_in_a_rendezvous, two_providers
from messages import (ACCEPT, BYE, CONNECT, FAILED, LONGEST, PROGRESS, REFUSED, TEXT, base,
                      plain, read_fill, type_of)
from repository import variant
from table import TABLE

RECVS = 8  # posted at a time

# Sanitizers find what a bad message does, and the plain programs do the same.
pytestmark = pytest.mark.builds("sanitized")
# Each program, and one of them through shm, too: what comes out of the inbox is
# the same for all.
each_program = pytest.mark.parametrize(
    "program,provider", [(p, "") for p in PROGRAMS if not TABLE[p].one_endpoint] +
    [("7_queue", "shm"), ("14_strangers", "shm")])
SESSIONS = [p for p in PROGRAMS
            if TABLE[p].bad_sessions and not TABLE[p].one_endpoint]
each_session = pytest.mark.parametrize(
    "program,provider", [(p, "") for p in SESSIONS] +
    [("7_queue", "shm"), ("14_strangers", "shm")])
# For tests that take long, because somebody in them has to wait for 10 s.
each_once = pytest.mark.parametrize(
    "program,provider", [("5_reverse", "shm"), ("7_queue", ""), ("14_strangers", "")])

STRANGERS = "14_strangers"


def stray_accept(fake):
    """An ACCEPT for a client that had this address before."""
    return base(ACCEPT, fake.nonce ^ 1) + b"nowhere"


@contextlib.contextmanager
def others(server):
    with server.others(*server.entry.others, count=1):
        server.process.wait_for(r"^\[1\] Received CONNECT")
        yield


@pytest.fixture
def meet(run, serve):
    """A server, and a client that says what it likes to it while another one comes and goes.
    Afterwards, the server serves the next one, and ends as it should."""
    @contextlib.contextmanager
    def start(program, provider="", **env):
        server = serve(program, provider, **env)
        client = FakeClient(run, server)
        with others(server):
            yield server, client
        server.check_client()
        server.stop()
    return start


@each_program
def test_at_the_door(run, serve, program, provider):
    """Messages that open no session. 14_strangers says nothing about them: there may be
    many."""
    server = serve(program, provider)
    told = program != STRANGERS
    client = FakeClient(run, server)
    if program not in SESSIONS:
        # Any message is a text.
        for message in [b"", b"\0", b"\xff\xfe", b"x" * LONGEST]:
            client.send(message)
            server.process.wait_for(f"^Received {len(message)} bytes: ")
        messages = []
    else:
        begin = server.entry.base
        messages = [b"", b"x", begin(CONNECT)[:-1], begin(0), begin(99), begin(2**32 - 1),
                    begin(TEXT) + b"text", begin(BYE), b"\0" * LONGEST]
        if server.entry.fill:
            messages += [server.entry.fill()]
    with others(server) if messages else contextlib.nullcontext():
        for count, message in enumerate(messages, 1):
            client.send(message)
            if told:
                server.process.wait_for(r"^(\[\d+\] )?error: bad message: ",
                                        count=count)
    # The shm provider of libfabric 1.17 never returns from a message that is
    # longer than the RECV (smr_cma_loop).
    if provider != "shm":
        # One more than there are RECVs: each of those is posted again.
        for count in range(1, RECVS + 2):
            client.send(b"\0" * (LONGEST + 1), "(sent|failed)")
            if told:
                server.process.wait_for("^error: RECV failed: ", count=count)
    server.check_client()
    assert told or not server.errors()
    server.stop()


@each_session
@pytest.mark.every_program
def test_in_a_session(meet, program, provider):
    """Messages that end the session of their sender. Where sessions have a nonce, what has
    another one does not, whatever it is: it comes from a stranger, or was meant for a
    client that had the address of this session before."""
    bad = TABLE[program].bad_sessions
    with meet(program, provider) as (server, client):
        for what, messages in bad.items():
            client.open_session()
            for stray in [stray_accept(client), b"", b"x", base(BYE)[:-1], base(BYE),
                          base(BYE, client.nonce ^ 1), base(99) + bytes(9)
                          ] if server.entry.guarded else []:
                client.send(stray, as_it_is=True)
            for message in messages:
                client.send(message)
            client.expect("error: bad message: ")
            assert len(server.errors()) == list(bad).index(what) + 1, what
            if server.entry.files:  # it says why, and waits until its client leaves
                while type_of(client.receive()) != FAILED:
                    pass
                client.leave()


@two_providers
@pytest.mark.parametrize("program", [p for p in SESSIONS if TABLE[p].fill])
def test_second_request(meet, program, provider):
    """A session has one request: what it has asked for may still be in flight."""
    with meet(program, provider) as (server, client):
        client.open_session()
        for _ in range(2):
            client.send(client.work())
        client.expect("error: bad message: ")
        assert len(server.errors()) == 1


@pytest.mark.parametrize("program", SESSIONS)
def test_too_long(meet, program):
    """A message that is longer than the RECVs of a session. A program that guards itself
    takes it for a stranger's. Not through shm: see test_at_the_door."""
    guarded = TABLE[program].guarded
    with meet(program) as (server, client):
        client.open_session()
        client.send(b"\0" * (LONGEST + 1), "(sent|failed)")
        if guarded:
            client.send(base(BYE))
        client.expect("Done" if guarded else "error: RECV failed: ")
        assert len(server.errors()) == (not guarded)


@each_session
@ends_in_a_rendezvous
def test_bye(meet, program, provider):
    """A client may leave at any moment."""
    with meet(program, provider) as (server, client):
        for working in False, True:
            client.open_session()
            if working:
                client.send(client.work())
            client.send(server.entry.base(BYE))
            client.expect("Done")
        assert not server.errors()
    assert not server.folder or not os.listdir(server.folder)


@each_session
def test_impossible_addresses(meet, program, provider):
    """CONNECTs from nowhere."""
    with meet(program, provider, **LIBFABRIC_LEAKS) as (server, client):
        wrong = [b"", b"\1", b"\xff" * 256, b"f" * 256, b"\0" * 15]
        if server.entry.guarded:
            wrong += [client.address[:-1], client.address + b"\1"]
        elif provider == "shm":
            # It takes any name, and finds nobody there.
            wrong = []
        for count, address in enumerate(wrong, 1):
            client.send(client.connect(address=address))
            server.process.wait_for(r"^(\[\d+\] )?error: .*( is not an address|fi_av_insert)",
                                    count=count)
        # The server may answer itself, and ignores that.
        client.send(client.connect(address=bytes.fromhex(server.address)))
        server.process.wait_for("Received CONNECT .* " + server.address)


def dead_addresses(provider):
    """Well-formed addresses where nobody is, and what must stay open meanwhile:
    a port that nobody listens to, two of one that takes connections without a word, and
    addresses to which nobody can connect; or names of shared memory."""
    if provider == "shm":
        return [b"fi_shm://1:0:0\0", b"fi_shm://nobody\0", b"f\0",
                b"f/../x\0"], contextlib.nullcontext()
    mute = socket.create_server(("", 0))
    port = struct.pack(">H", mute.getsockname()[1])
    return [b"\2\0" + address + bytes(8) for address in (
        b"\0\x09\x7f\0\0\1", port + b"\x7f\0\0\1", port + b"\x7f\0\0\2",
        b"\0\x09\xff\xff\xff\xff", b"\0\x09\xe0\0\0\1", b"\0\x09\xf0\0\0\1")], mute


@pytest.mark.parametrize("program,provider", [
    ("5_reverse", "shm"), ("14_strangers", ""), *((p, "") for p in SESSIONS
                                                  if not TABLE[p].guarded)])
def test_dead_addresses(run, serve, program, provider):
    """CONNECTs from addresses that are well-formed, but nobody is there. Waiting
    for one would take 10 s."""
    server = serve(program, provider, **LIBFABRIC_LEAKS)
    client = FakeClient(run, server)
    addresses, keep_open = dead_addresses(provider)
    with keep_open:
        for number, address in enumerate(addresses, 1):
            client.renew()
            client.send(client.connect(address=address))
            if server.entry.guarded:  # a slow machine would have the next one wait in line
                server.process.wait_for("Received CONNECT", count=number)
        # They would give up, too, if the server waited for one after the other.
        for _ in range(2):
            server.check_client(*server.entry.short)
        server.process.wait_for(r"^(\[\d+\] )?error: ", 30, count=len(addresses))
    server.check_client()
    assert len(server.errors()) == len(addresses)
    server.stop()


@two_providers
@pytest.mark.parametrize("program", [p for p in PROGRAMS if TABLE[p].fill])
def test_memory_that_is_not_there(meet, program, provider):
    """Memory that the client has not registered, with a key that it has not got."""
    with meet(program, provider) as (server, client):
        client.open_session()
        client.send(server.entry.fill(addr=0xdead000, size=1 << 40, rkey=0x1234))
        # The client takes part, because its provider has to refuse the WRITEs.
        client.process.write("wait")
        # The shm provider does not say which operation has failed.
        client.expect("error: an operation failed: " if provider == "shm" else
                      "error: WRITE failed: .*")
        assert len(server.errors()) == 1


@pytest.mark.parametrize("program,provider", [
    ("5_reverse", "shm"), ("14_strangers", ""), ("7_queue", "")])
def test_silent_clients(run, serve, program, provider):
    """Four clients that say nothing after their CONNECT. The server ends them
    after the limit of 10 s, with a line each. They cost the others nothing."""
    server = serve(program, provider)
    clients = [FakeClient(run, server) for _ in range(4)]
    for client in clients[:2]:
        client.open_session()
    started = time.monotonic()
    # These do not even look at the ACCEPT.
    for client in clients[2:]:
        client.send(client.connect())
    server.process.wait_for("Received CONNECT", count=4)
    # It would give up, too, if the server waited for one after the other.
    server.check_client(*server.entry.short)
    with others(server):
        server.process.wait_for(
            r"^\[\d+\] error: .*nothing has happened for 10 s", 30, count=4)
    assert time.monotonic() - started > 5
    assert len(server.errors()) == 4
    server.check_client()
    server.stop()


@pytest.mark.parametrize("program,provider", [
    (p, "") for p in SESSIONS if not TABLE[p].guarded] + [("7_queue", "shm")])
def test_ninth(run, serve, program, provider):
    """The server has eight sessions at a time. A ninth client waits, and is served as soon
    as another one leaves; so are those that come after it."""
    server = serve(program, provider)
    clients = [FakeClient(run, server) for _ in range(8)]
    for client in clients:
        client.open_session()
    late = [server.start_client(*server.entry.short) for _ in range(3)]
    for client in late:
        client.wait_for("^domain: ")
    time.sleep(1)
    assert server.process.output.count("Received CONNECT") == 8
    clients[4].send(server.entry.base(BYE))
    server.check_all(late)
    server.stop()


# ---- Answers that no server of ours would give ----

def fake_server(run, build, program, provider=""):
    """Answers a client with whatever bytes a test makes up, already while it connects."""
    return FakeServer(run, build, program, *(TABLE[program].least or TABLE[program].others),
                      provider=provider, meets=False)


@each_once
def test_bad_answers(run, build, program, provider):
    """A client does not believe everything either."""
    begin, guarded = TABLE[program].base, TABLE[program].guarded
    answers = {
        "BYE": lambda server: [server.accept(), begin(BYE) * 2],
        "second ACCEPT": lambda server: [server.accept(), server.accept()],
        "not its text": lambda server: [server.accept(), begin(TEXT) + b"x"],
        **({
            "short": lambda server: [server.accept()[:-1]],
            "too long": lambda server: [server.accept() + b"x"],
            "no address": lambda server: [server.accept(address=b"")],
        } if guarded else {
            "empty": lambda server: [b""],
            "another type": lambda server: [begin(TEXT)],
            "cut short": lambda server: [server.accept(), begin(TEXT)[:-1]],
        })}
    servers = {what: fake_server(run, build, program, provider) for what in answers}
    for what, server in servers.items():
        server.meet()
        for message in answers[what](server):
            server.send(message, "(sent|failed)")
    # Who has seen one nonce does not know the next one: neither time nor a count.
    assert not guarded or len({server.nonce >> 16 for server in servers.values()}) > 1
    for server in servers.values():
        server.client.check_error("", 30)


@two_providers
@pytest.mark.parametrize("program", SESSIONS)
def test_interrupted_while_waiting(run, build, program, provider):
    """A client that is interrupted while it waits for an answer says so, and, if it guards
    itself, BYE, so that its server has not to wait for its silence. Until then it has
    waited: a number that it has not chosen is no answer, and a message without its
    nonce was meant for somebody else, as was an ACCEPT with another one."""
    entry = TABLE[program]
    if provider in entry.refused_by:
        pytest.skip("this provider lacks what the program needs")
    server = fake_server(run, build, program, provider)
    server.meet()

    def send_strays():
        for stray in [b"", base(PROGRESS), base(TEXT) + b"tfel ,thgir", stray_accept(server),
                      base(REFUSED, server.nonce ^ 1) + b"not you"] * entry.guarded:
            server.send(stray, as_it_is=True)

    if entry.guarded:
        send_strays()
    server.send(server.accept())
    request = server.receive()
    if entry.guarded:
        send_strays()
    if entry.fill and provider != "shm":
        addr, key, number = read_fill(request, entry.base(0))
        server.command(f"write {addr} {key} {number ^ 2} {bytes(8).hex()}", "written")
        # The client has seen that one when this one has arrived.
        server.command(f"overwrite {addr} {key}", "written")
    assert server.client.popen.poll() is None, server.client.output
    server.client.interrupt()


# ---- Texts ----

def test_terrible_texts_of_servers(run, build):
    """A client that guards itself prints the reason for which it is refused as it is, but
    for all that is not plain ASCII: what clears a terminal or colours what follows."""
    server = fake_server(run, build, STRANGERS)
    server.meet()
    server.send(server.accept())
    server.receive()
    server.send(base(REFUSED) + b"\x9bno\x1b[2J\a\r\x7f, gr" + "ü\u202e".encode())
    server.client.wait_for(r"\?no\?\[2J\?{3}, gr\?{5}")
    server.process.write("wait")  # it may want to tell the server that it leaves
    assert server.client.wait(30) == 1
    assert not re.search(r"[^\n -~]", server.client.output), server.client.output
