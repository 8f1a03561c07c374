"""What a stranger may try in order to lock, stall or fill a server or a client of
14_strangers. Each time an honest client beside it is served, and soon. What chapter 14 has
its reader try, before a move and after it, is in test_walk.py."""

import contextlib
import re
import resource
import signal
import socket
import struct
import time

import pytest

from fakes import FakeClient, FakeServer, new_nonce
from harness import TIME_FACTOR, Server, wait_until
from marks import not_over_verbs
from messages import BYE, WAIT, base, type_and_nonce
from repository import variant

pytestmark = not_over_verbs("the attacks make connections of TCP")

STRANGERS = "14_strangers"
SHORT = "4096", "10", "1"
SILENCE = 10  # seconds without a sign of life, then the programs give up
PLACES = 8  # for clients of a server
# Its server bears the silence of those who have their places.
PATIENT_CHECK = 'CheckSilence(session.heard_at, "waiting for the client");', ""
PATIENT = variant(STRANGERS, PATIENT_CHECK)
IMPATIENT = variant(STRANGERS, ("kMaxTransfer = 512 << 20", "kMaxTransfer = 4 << 20"),
                    ("kSilenceLimit = 10s", "kSilenceLimit = 3s"))
JUNK = b"Z" * 24


@pytest.fixture
def patient(run):
    return Server(run, PATIENT(), STRANGERS, "tcp")


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


# ---- Addresses ----

def of_another_family(address):
    """It is as long, and libfabric's tcp and udp have no such addresses. One of them in an
    address vector is enough: libfabric then takes none any more."""
    return struct.pack("<H", socket.AF_UNIX) + address[2:8] + b"A" * (len(address) - 8)


# Nobody can be there, or nobody is.
NOWHERE = ["255.255.255.255", "224.0.0.1", "240.0.0.1", "0.0.0.0", "127.0.0.1"]


@pytest.mark.long
@pytest.mark.parametrize("what,provider", [
    ("family", "tcp"), ("nowhere", "tcp"), ("nowhere", "udp;ofi_rxd")])
def test_in_line(run, what, provider):
    """All places are taken, so these would be told to wait, and cannot be. That costs the
    server nothing: those who come later are told, and get in when somebody leaves."""
    server = Server(run, PATIENT(), STRANGERS, provider)
    client = FakeClient(run, server)
    places = take_places(client)
    client.peer(server.address)
    connect_from(client, [of_another_family(client.address)] if what == "family" else [
        struct.pack("<H", socket.AF_INET) + struct.pack(">H", 9) + socket.inet_aton(host) +
        bytes(8) for host in NOWHERE])
    time.sleep(2)
    later = server.start_client(*SHORT)
    later.wait_for("^The server can't serve us yet: waiting$")
    leave(client, places.pop())
    assert later.wait() == 0, later.output
    if what == "family":  # those who are connected have noticed nothing
        for place in places:
            leave(client, place)
        server.process.wait_for("Done.", count=PLACES + 1)
    server.stop()


WAITING = 400
CONTACTS = 256  # at a time, that a server tells


@pytest.mark.long
def test_invented_addresses_in_line(run, patient):
    """All who wait are told so, also where nobody listens. The server does not keep their
    addresses, nor the connections that it has made to them, of which there are never
    many."""
    client = FakeClient(run, patient)
    places = take_places(client)
    before = patient.process.descriptors()
    client.peer(patient.address)
    with mute_host() as invented:
        connect_from(client, map(invented, range(WAITING)))
        later = patient.start_client(*SHORT)
        later.wait_for("^The server can't serve us yet: waiting$")
        found = []

        def few():
            found.append(patient.process.descriptors() - before)
            return found[-1] < WAITING // 4

        wait_until(few, 30)
        assert max(found) < (CONTACTS + WAITING) // 2
        for place in places:
            leave(client, place)
        assert later.wait() == 0, later.output
    patient.stop()


# ---- Messages that are none ----

def test_junk_at_the_door(run, serve):
    """Thousands of bad messages a second keep nobody out, and fill no terminal."""
    server = serve(STRANGERS, "tcp")
    stranger = FakeClient(run, server)
    stranger.send(JUNK, as_it_is=True)
    # For longer than a client waits.
    stranger.process.write(f"stream 60000 300 {JUNK.hex()}")
    time.sleep(1)
    server.check_client(*SHORT)
    assert not server.errors()
    stranger.process.kill()
    server.stop()


def test_full_and_filled(run, patient):
    """A server that is full keeps no message that is none, and no address that is none."""
    take_places(FakeClient(run, patient))
    stranger = FakeClient(run, patient)
    before = patient.memory()
    for _ in range(200):
        stranger.send(bytes(65536), as_it_is=True)
        stranger.send(stranger.connect(bytes(65000)))
    assert patient.memory() < before + 10_000
    patient.stop()


# ---- Bytes that are no sign of life ----

def send_junk(sender, until):
    """Sends bytes that belong to no conversation, each second. Returns whether it was over
    soon."""
    began = time.monotonic()
    while not until():
        if time.monotonic() - began > 6 * SILENCE * TIME_FACTOR:
            return False
        sender.send(JUNK, answer="(sent|failed)", as_it_is=True)
        time.sleep(1)
    return True


@pytest.mark.long
@pytest.mark.parametrize("accepted", [False, True], ids=["connecting", "accepted"])
def test_junk_from_a_dead_server(run, accepted):
    """A client notices that its server has gone, before the ACCEPT and after, whatever
    others send to it meanwhile."""
    server = FakeServer(run, IMPATIENT(), STRANGERS, *SHORT, provider="tcp", accepts=accepted)
    assert send_junk(server, lambda: server.client.popen.poll() is not None)
    server.client.wait()
    assert "nothing has happened for 3 s" in server.client.output


@pytest.mark.long
def test_junk_to_the_place_of_a_dead_client(run, serve):
    """A server gives up a client that has gone, whatever others send to its session."""
    server = serve(STRANGERS, "tcp")
    dead = FakeClient(run, server)
    dead.open_session()
    stranger = FakeClient(run, server)
    stranger.peer(dead.session)
    line = rf"^\[{dead.number}\] error: .*nothing has happened for {SILENCE} s"
    assert send_junk(stranger, lambda: re.search(line, server.process.output, re.M))
    server.stop()


# ---- Those who take what others need ----

CONNECTIONS = 1200


def test_idle_connections(serve):
    """Connections over which nothing comes keep nobody out."""
    with many_descriptors(2 * CONNECTIONS), contextlib.ExitStack() as stack:
        # As on most machines, it may have many more descriptors than it begins with.
        server = serve(STRANGERS, "tcp",
                       wrapper=["sh", "-c", 'ulimit -Sn 256; exec "$0" "$@"'])
        port, host = struct.unpack(">HI", bytes.fromhex(server.address)[2:8])
        host = socket.inet_ntoa(struct.pack(">I", host))
        for _ in range(CONNECTIONS):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex((host, port))
        server.check_client(*SHORT)
        wait_until(lambda: server.process.descriptors() > CONNECTIONS, 60)
    server.stop()


def test_no_descriptor(serve):
    """A client for whom the server has no descriptors is told to ask again, and served as
    soon as there are some."""
    server = serve(STRANGERS)
    pid = server.process.popen.pid
    # One is for the connection over which the CONNECT comes.
    used = server.process.descriptors() + 1
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, before[1]))
    client = server.start_client(*SHORT)
    server.process.wait_for("^error: ")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert client.wait(30) == 0, client.output + server.process.output
    server.stop()


@pytest.mark.long
def test_waiting_is_not_silence(run):
    """One client has all the memory and the time of the server for longer than
    the limit, which is 3 s here. Seven others wait for memory, and ten for an ACCEPT: more
    than the listener has RECVs."""
    server = Server(run, IMPATIENT(), STRANGERS)
    greedy = server.start_client("65536", "64", "1000000")
    server.process.wait_for(r"^\[1\] .*WRITE: ")
    waiting = [server.start_client(*SHORT) for _ in range(7)]
    server.process.wait_for("Received RandomFill", count=8)
    waiting += [server.start_client(*SHORT) for _ in range(10)]
    for client in waiting[7:]:
        client.wait_for("^The server can't serve us yet: waiting$", 30)
    time.sleep(4)
    for client in [greedy, *waiting]:
        assert client.popen.poll() is None, client.output
    assert not re.search(r"^\[[^1]\] .*WRITE: ", server.process.output, re.M)
    assert server.process.output.count("Received CONNECT") == 8
    greedy.signal(signal.SIGKILL)
    for client in waiting:
        assert client.wait(60) == 0, client.output
    assert len(server.errors()) == 1 and server.errors()[0].startswith("[1] ")
    server.stop()


@pytest.mark.long
@pytest.mark.parametrize("provider,signum", [
    ("tcp", signal.SIGSTOP), ("tcp", signal.SIGKILL), ("shm", signal.SIGKILL)])
def test_killed_while_it_waits_for_memory(run, provider, signum):
    """A client that waits because others have the memory answers each PROGRESS. One that has
    died or stands still does not, and is given up. The next one gets its memory."""
    server = Server(run, IMPATIENT(), STRANGERS, provider)
    pages = "65536", "64"
    first = server.start_client(*pages, "1000000")
    server.process.wait_for(r"^\[1\] .*WRITE: ")
    dead = server.start_client(*pages, "1")
    server.process.wait_for(r"^\[2\] Received RandomFill")
    dead.popen.send_signal(signum)
    alive = server.start_client(*pages, "1")
    server.process.wait_for(r"^\[3\] Received RandomFill")
    server.process.wait_for(r"^\[2\] error: ", 60)
    assert first.popen.poll() is None and alive.popen.poll() is None
    first.interrupt()
    assert alive.wait() == 0, alive.output
    server.check_client(*pages, "1")
    server.stop()


SLOW = variant(STRANGERS, (
    "    auto page = MakePage(page_size, request.seed + made_pages);",
    "    std::this_thread::sleep_for(100ms);\n"
    "    auto page = MakePage(page_size, request.seed + made_pages);"))


def test_pages_of_another(run):
    """A server that makes many pages for one client, for 20 s here, looks at the others
    after each of them."""
    server = Server(run, SLOW(), STRANGERS)
    greedy = server.start_client("4096", "200", "1")
    server.process.wait_for(r"^\[1\] Received RandomFill")
    server.check_client("4096", "1", "1")
    greedy.interrupt()
    server.stop()


SHORT_LINE = variant(STRANGERS, PATIENT_CHECK, ("kMaxWaiting = 1000", "kMaxWaiting = 4"))


@pytest.mark.long
@pytest.mark.thorough
def test_long_line(run):
    """Of those who come together, only so many stand in line. The others hear nothing."""
    server = Server(run, SHORT_LINE(), STRANGERS, "tcp")
    take_places(FakeClient(run, server))
    client = FakeClient(run, server)
    client.send(b"")  # so that it is connected
    server.process.signal(signal.SIGSTOP)
    for _ in range(8):
        client.nonce = new_nonce()
        client.send(client.connect())
    server.process.signal(signal.SIGCONT)
    for _ in range(4):
        assert type_and_nonce(client.receive_any())[0] == WAIT
    client.process.write("wait")
    time.sleep(3)
    assert client.process.output.count("\nreceived ") == 4
    server.stop()
