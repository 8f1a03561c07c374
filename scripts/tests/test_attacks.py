"""What a stranger may try in order to lock, stall or fill a server or a client of 14, and
of those that have its defences. Each time an honest client beside it is served, and
soon."""

import concurrent.futures
import contextlib
import os
import re
import resource
import signal
import socket
import struct
import time

import pytest

from fakes import (CrowdGuest, CrowdHost, FakeClient, FakeServer, new_nonce,
                   type_and_nonce)
from harness import PROGRAMS, ROOT, TIME_FACTOR, Server, is_here, provider_in
from marks import not_over_verbs
from messages import ACCEPT, BYE, GET, NOT_FOUND, TEXT, WAIT, base, with_nonce
from repository import PATIENT, variant
from table import TABLE

pytestmark = [pytest.mark.builds("plain"),
              not_over_verbs("the attacks make connections of TCP")]

SILENCE = 10  # seconds without a sign of life, then the programs give up
PLACES = 8  # for clients of a server
# The programs with sessions that defend themselves. The lean trunk has no defence.
SESSIONS = [program for program in PROGRAMS if TABLE[program].guarded and
            not TABLE[program].one_endpoint]
STRANGERS, CROWD = "14_strangers", "13_crowd"
# The line is the same in all of them, letter for letter, but 11_rails has one for each
# adapter.
ONE_LINE = [STRANGERS, "11_rails"]
# Their servers bear the silence of those who have their places.
PATIENT_ONES = {program: variant(program, PATIENT) for program in ONE_LINE}
with_one_line = pytest.mark.parametrize("program", ONE_LINE)
JUNK = b"Z" * 24


def guest_of(run, server):
    return (CrowdGuest if server.entry.one_endpoint else FakeClient)(run, server)


def wait_until(condition, timeout=10):
    end = time.monotonic() + timeout * TIME_FACTOR
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def descriptors(server):
    """What the descriptors of a server are, by their numbers."""
    folder = f"/proc/{server.process.popen.pid}/fd"
    names = {}
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names[int(name)] = os.readlink(f"{folder}/{name}")
    return names


def cpu_time(server):
    """How long a server has computed so far, in seconds."""
    with open(f"/proc/{server.process.popen.pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


@contextlib.contextmanager
def mute_host():
    """Takes every connection to its port, and says nothing. All of 127.0.0.0/8 is this
    machine. Yields a function that invents addresses: it returns that of a number."""
    with socket.create_server(("", 0), backlog=4096) as mute:
        port = mute.getsockname()[1]
        yield lambda number: struct.pack("<H", socket.AF_INET) + struct.pack(
            ">HI8x", port, 0x7f010000 + number)


@contextlib.contextmanager
def many_descriptors(count):
    """Raises the limit of this process, and of those that it starts."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < count:
        pytest.skip(f"at most {before[1]} descriptors are permitted")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], count), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def take_places(client):
    """One process has all the places of a server. Returns the nonce and the address of
    each session."""
    places = []
    for _ in range(PLACES):
        client.open_session()
        places.append((client.nonce, client.session))
    return places


def leave(client, place):
    client.nonce, address = place
    client.peer(address)
    client.send(base(BYE))


# ---- Addresses of another family ----

def of_another_family(address):
    """It is as long, and libfabric's tcp and udp have no such addresses. One of them in an
    address vector is enough: libfabric then takes none any more."""
    return struct.pack("<H", socket.AF_UNIX) + address[2:8] + b"A" * (len(address) - 8)


@pytest.mark.parametrize("provider", [
    p for p in ("tcp", "udp;ofi_rxd") if is_here(p)])
def test_another_family(run, serve, provider):
    """It costs those who are connected nothing, and those who come."""
    server = serve(CROWD, provider)
    client = CrowdGuest(run, server)
    assert client.open_session().type == ACCEPT
    stranger = CrowdGuest(run, server)
    stranger.send(stranger.connect(of_another_family(stranger.address)))
    server.process.wait_for("^error: .* is not an address")
    assert client.ask(GET).type == NOT_FOUND
    server.check_client("1", "1")
    assert client.ask(GET).type == NOT_FOUND
    assert len(server.errors()) == 1
    server.stop()


@with_one_line
def test_another_family_in_line(run, program):
    """All places are taken, so this one would be told to wait. Those who come later are
    told, and get in when somebody leaves."""
    server = Server(run, PATIENT_ONES[program](), program, "tcp")
    client = FakeClient(run, server)
    places = take_places(client)
    client.peer(server.address)
    client.nonce = new_nonce()
    client.send(client.connect(of_another_family(client.address)))
    server.process.wait_for("^error: .* is not an address")
    later = server.start_client(*server.entry.short)
    later.wait_for("^The server can't serve us yet: waiting$")
    leave(client, places.pop())
    assert later.wait() == 0, later.output
    # Those who are connected have noticed nothing.
    for place in places:
        leave(client, place)
    server.process.wait_for("Done.|has left before", count=PLACES + 1)
    server.stop()


def test_asking_at_once(run):
    """Somebody who asks three times has one place in line, and gets one answer."""
    server = Server(run, PATIENT_ONES[STRANGERS](), STRANGERS, "tcp")
    take_places(FakeClient(run, server))
    client = FakeClient(run, server)
    client.send(b"")  # so that it is connected
    server.process.wait_for("^error: bad message: ")
    # The server finds them together.
    server.process.signal(signal.SIGSTOP)
    for _ in range(3):
        client.nonce = new_nonce()
        client.send(client.connect())
    server.process.signal(signal.SIGCONT)
    assert type_and_nonce(client.receive_any()) == (WAIT, client.nonce)
    client.process.write("wait")
    time.sleep(2)
    assert client.process.output.count("\nreceived ") == 1
    server.stop()


# ---- Messages that are none ----

@pytest.mark.parametrize("program", [STRANGERS, "11_rails", CROWD])
def test_junk_at_the_door(run, serve, program):
    """Thousands of bad messages a second keep nobody out."""
    server = serve(program, "tcp")
    stranger = FakeClient(run, server)
    stranger.send(b"Z", as_it_is=True)
    server.process.wait_for("^error: bad message: ")
    # For longer than a client waits.
    stranger.process.write(f"stream 60000 300 {b'Z'.hex()}")
    server.process.wait_for("^error: bad message: ", count=100)
    server.check_client(*server.entry.short)
    stranger.process.popen.kill()
    stranger.process.wait()
    server.stop()


# It would sleep for longer than the sender waits.
SLEEPER = variant("12_sleep", ("kMaxSleep = 500ms", "kMaxSleep = 100s"))


def test_junk_before_a_connect(run):
    """A server does not sleep while there are messages that it has read."""
    server = Server(run, SLEEPER(), "12_sleep", "tcp")
    client = FakeClient(run, server)
    client.send(b"Z", as_it_is=True)
    server.process.wait_for("^error: bad message: ")
    time.sleep(0.1)
    server.process.signal(signal.SIGSTOP)
    client.command(f"stream 9 0 {b'Z'.hex()}", "streamed")
    client.send(client.connect())
    server.process.signal(signal.SIGCONT)
    assert client.receive()[:8] == base(ACCEPT)
    server.process.wait_for("^error: bad message: ", count=10)
    server.stop()


def test_answers_that_nobody_takes(run, serve):
    """A client that asks on and on, and reads nothing, is sent away before its answers
    fill the server's memory."""
    server = serve("12_sleep", "tcp")
    client = FakeClient(run, server)
    client.open_session()
    text = with_nonce(base(TEXT) + b"x" * 32, client.nonce)
    client.process.write(f"stream 2000 0 {text.hex()}")
    client.expect("error: bad message: it asks and does not read$")
    server.check_client()
    server.stop()


# ---- Bytes that are no sign of life ----

def is_over(process, pattern=None):
    """Whether a program has ended, or has printed something."""
    return process.popen.poll() is not None if pattern is None else \
        re.search(pattern, process.output, re.M)


def send_junk(sender, until):
    """Sends bytes that belong to no conversation, each second. Returns after how many
    seconds it is over, or None."""
    began = time.monotonic()
    while not until():
        if time.monotonic() - began > 6 * SILENCE * TIME_FACTOR:
            return None
        sender.send(JUNK, answer="(sent|failed)", as_it_is=True)
        time.sleep(1)
    return time.monotonic() - began


def client_of_a_dead_server(run, build, program, accepted):
    """A client whose server falls silent. Returns what it prints at the end."""
    entry = TABLE[program]
    args = entry.least if entry.files else entry.short
    if entry.one_endpoint:
        server = CrowdHost(run, build, *args, provider="tcp")
        if accepted:
            server.reply(ACCEPT)
    else:
        server = FakeServer(run, build, program, *args, provider="tcp",
                            accepts=accepted)
    seconds = send_junk(server, lambda: server.client.popen.poll() is not None)
    if seconds is None:
        return "still waiting"
    server.client.wait()
    return server.client.output


@pytest.mark.long
def test_junk_from_a_dead_server(run, build):
    """A client notices that its server has gone, before the ACCEPT and after, whatever
    others send to it meanwhile. All programs at once, because it takes long."""
    cases = [(program, accepted) for program in [*SESSIONS, CROWD]
             for accepted in (False, True)]
    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        outputs = pool.map(lambda case: client_of_a_dead_server(run, build, *case), cases)
        outputs = dict(zip(cases, outputs))
    wrong = {case: output for case, output in outputs.items()
             if f"nothing has happened for {SILENCE} s" not in output}
    assert not wrong


def place_of_a_dead_client(run, serve, program):
    """Returns after how many seconds its place is free, or None."""
    server = serve(program, "tcp")
    dead = FakeClient(run, server)
    dead.open_session()
    stranger = FakeClient(run, server)
    stranger.peer(dead.session)
    line = rf"^\[{dead.number}\] error: .*nothing has happened for {SILENCE} s"
    return send_junk(stranger, lambda: re.search(line, server.process.output, re.M))


@pytest.mark.long
@pytest.mark.thorough
def test_junk_to_the_place_of_a_dead_client(run, serve):
    """A server gives up a client that has gone, whatever others send to its session."""
    with concurrent.futures.ThreadPoolExecutor(len(SESSIONS)) as pool:
        seconds = dict(zip(SESSIONS, pool.map(
            lambda program: place_of_a_dead_client(run, serve, program), SESSIONS)))
    assert None not in seconds.values(), seconds


# ---- Many addresses, many connections ----

RAILS = 48
MOST_RAILS = 4  # of a client, at an adapter of the server


@pytest.mark.thorough
def test_many_rails(run, serve):
    """Somebody asks for rails without end. A transfer goes on meanwhile, and the server
    opens no more of them than a client may have."""
    server = serve("11_rails", "tcp")
    transfer = server.start_client("4096", "1000", "1000000")
    server.process.wait_for(r"^\[1\] .*WRITE: ")
    stranger = FakeClient(run, server)
    with mute_host() as invented:
        for rail in range(RAILS):
            stranger.send(stranger.connect(invented(rail)))
        already = server.process.output.count("WRITE: ")
        wait_until(lambda: server.process.output.count("WRITE: ") > already + 3)
        server.check_client("4096", "10", "1")
    assert server.process.output.count("Received CONNECT") <= 2 + MOST_RAILS
    assert transfer.popen.poll() is None
    transfer.popen.kill()
    transfer.wait()
    server.stop()


CONNECTIONS = 1200


@pytest.mark.parametrize("program", [STRANGERS, "12_sleep", CROWD])
def test_idle_connections(serve, program):
    """Connections over which nothing comes keep nobody out."""
    with many_descriptors(2 * CONNECTIONS), contextlib.ExitStack() as stack:
        # As on most machines, it may have many more descriptors than it begins with.
        server = serve(program, "tcp",
                       wrapper=["sh", "-c", 'ulimit -Sn 256; exec "$0" "$@"'])
        if program != STRANGERS:
            time.sleep(2)  # after so long a silence, pauses are long
        port, host = struct.unpack(">HI", bytes.fromhex(server.address)[2:8])
        host = socket.inet_ntoa(struct.pack(">I", host))
        for _ in range(CONNECTIONS):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connection.connect((host, port))
        server.check_client(*server.entry.short)
        wait_until(lambda: len(descriptors(server)) > CONNECTIONS, 60)
    server.stop()


def connect_from(client, addresses):
    """Sends a CONNECT with each of these addresses. All at once: one by one, hundreds of
    them would take seconds."""
    lines = []
    for address in addresses:
        client.nonce = new_nonce()
        lines.append(client.send_line(client.connect(address)))
    already = len(client.process.lines)
    client.process.write("\n".join(lines))
    client.process.wait_for("^sent$", count=len(lines), after=already)


WAITING = 300


@pytest.mark.long
@with_one_line
def test_invented_addresses_in_line(run, program):
    """All who wait are told so, also where nobody listens. The server does not keep their
    addresses, nor the connections that it has made to them."""
    server = Server(run, PATIENT_ONES[program](), program, "tcp")
    client = FakeClient(run, server)
    places = take_places(client)
    before = len(descriptors(server))
    client.peer(server.address)
    with mute_host() as invented:
        connect_from(client, map(invented, range(WAITING)))
        later = server.start_client(*server.entry.short)
        later.wait_for("^The server can't serve us yet: waiting$")
        for place in places:
            leave(client, place)
        assert later.wait() == 0, later.output
        wait_until(lambda: len(descriptors(server)) < before + WAITING // 4, 30)
    server.stop()


CROWD_OF_STRANGERS = 800


@pytest.mark.long
def test_invented_addresses_of_a_crowd(run, serve):
    """Thousands who never read what the server sends: those who do are served
    meanwhile, and it forgets the others as soon as an honest one would have given up."""
    with many_descriptors(2 * CROWD_OF_STRANGERS), mute_host() as invented:
        server = serve(CROWD, "tcp")
        stranger = CrowdGuest(run, server)
        before = len(descriptors(server))
        connect_from(stranger, map(invented, range(CROWD_OF_STRANGERS)))
        for _ in range(3):
            server.check_client("1", "10")
        server.process.wait_for("^[0-9]{3} clients, ")
        server.process.wait_for("forgotten: nobody is there", count=CROWD_OF_STRANGERS)
        # Others may keep their connections: fi_av_remove promises nothing.
        if provider_in(server.process.output) == "tcp;ofi_rxm":
            wait_until(lambda: len(descriptors(server)) < before + 50)
        server.check_client("1", "10")
    server.stop()


# ---- Keys that collide ----

def test_nothing_of_clients_is_hashed():
    """The hash of libstdc++ has no secret, so clients could choose keys that all collide,
    and each look would go through all of them. What that costs is too little for a test
    in seconds, so this looks at the source: it hashes only numbers that the server gives
    out."""
    with open(f"{ROOT}/src/{CROWD}.cpp") as file:
        assert set(re.findall(r"unordered_\w+<([^,>]+)", file.read())) == {"uint32_t"}


# ---- Descriptors that are closed ----

@pytest.mark.parametrize("program", [*SESSIONS, CROWD])
def test_closed_descriptors(serve, program):
    """Without standard input and error, no file of libfabric's takes their numbers, in
    which the server's lines would end."""
    server = serve(program, "tcp", wrapper=["sh", "-c", 'exec "$0" "$@" <&- 2>&-'])
    assert {descriptors(server)[number] for number in (0, 2)} == {"/dev/null"}
    server.check_client(*server.entry.short)
    server.stop()
