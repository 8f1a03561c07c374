"""13_crowd: one endpoint for all clients. Whatever one of them does, the others get
their answers, each once and the right one, and the server's memory is bounded.

KILLS=100 scripts/test.sh -k test_crowd.py        kills 100 of 150 clients
CLIENTS=10000 scripts/test.sh -k test_one_after_the_other_of_a_crowd"""

import os
import random
import re
import signal
import socket
import subprocess
import threading
import time

import pytest

import carry
from fakes import CrowdGuest, CrowdHost
from harness import LIBFABRIC_LEAKS, Server, is_here, wait_until
from marks import not_over_verbs, two_providers
from messages import ACCEPT, BYE, CONNECT, TEXT, crowd
from repository import read_source, variant
from table import BAD_CROWDS

# How many clients of a crowd test_killed_crowd kills, and how many come one after the
# other: see above.
KILLS = int(os.environ.get("KILLS", "6"))
CLIENTS = int(os.environ.get("CLIENTS", "200"))
PROGRAM = "13_crowd"
MAX_MESSAGE = 2048  # bytes
# Says how often each of two peers has its turn while there is no room.
TURNS = """
int main() {
  static size_t tries[2] = {};
  Domain domain;
  std::shared_ptr<Peer> peers[2];
  Mailbox mailbox(domain, kClientRecvCount);
  struct fi_ops_msg full = *mailbox.endpoint.ep.ptr->msg;
  full.send = [](struct fid_ep*, const void*, size_t, void*, fi_addr_t addr, void*) {
    ++tries[addr];
    return ssize_t{-FI_EAGAIN};
  };
  mailbox.endpoint.ep.ptr->msg = &full;
  for (fi_addr_t addr : {0, 1}) {
    peers[addr] = std::make_shared<Peer>(domain);
    peers[addr]->addr = addr;
    for (int i = 0; i < 3; ++i) {
      mailbox.Send(peers[addr], AppMessageType::kText);
    }
  }
  for (int i = 0; i < 10; ++i) mailbox.PostReady();
  printf("turns: %zu and %zu\\n", tries[0], tries[1]);
}
"""


def with_turns():
    source = read_source(PROGRAM)
    return source[:source.index("\nint main(")] + TURNS


TURNING = variant(PROGRAM, source=with_turns)
SMALL = variant(PROGRAM, ("kMaxClients = 2000;", "kMaxClients = 3;"),
                ("kForgetAfter = 30s;", "kForgetAfter = 8s;"))
HASTY = variant(PROGRAM, ("kSilenceLimit = 10s;", "kSilenceLimit = 2s;"))
# Its client may be deaf, and its server has any number of SENDs in flight to a client.
BROKEN = variant(PROGRAM, source=lambda: carry.text_of("breaks/13_crowd"))


def wait_for_nobody(server):
    """Waits until all clients have gone. There were none at first, either."""
    server.process.wait_for(r"^0 clients, [1-9].*\n\Z")


def check_crowd(crowd, clients, requests, timeout=60):
    """All of a crowd's clients got what they asked for, which they compare."""
    assert crowd.wait(timeout) == 0, crowd.output
    assert re.search(rf"^{clients} clients are connected\.\n{clients * requests} "
                     "texts, all correct, ", crowd.output, re.M), crowd.output


@two_providers
def test_many_at_once(run, serve, provider):
    """Texts that the server finds together are all answered, in their order, though
    not all answers may be in flight at a time."""
    server = serve(PROGRAM, provider)
    client = CrowdGuest(run, server)
    client.open_session()
    server.process.signal(signal.SIGSTOP)
    texts = [b"%02d" % i for i in range(12)]
    for text in texts:
        client.send(crowd(TEXT, text))
    server.process.signal(signal.SIGCONT)
    assert [client.receive().body[::-1] for _ in texts] == texts
    server.stop()


@pytest.mark.thorough
def test_turns(run):
    """Those for whom something waits have their turn one after the other."""
    process = run([f"{TURNING()}/{PROGRAM}"])
    assert process.wait() == 0
    assert "turns: 10 and 10\n" in process.output


def test_full_server(run):
    """One client too many is not answered, and gets in when another one has left."""
    server = Server(run, SMALL(), PROGRAM)
    clients = [CrowdGuest(run, server) for _ in range(3)]
    for client in clients:
        assert client.open_session().type == ACCEPT
    crowd = server.start_client("2", "1")
    time.sleep(2)
    assert "are connected" not in crowd.output
    for client in clients:
        client.check_text()
    clients[0].leave()
    clients[1].leave()
    check_crowd(crowd, 2, 1)
    server.stop()


# ---- Clients that go, or do not read ----

def kill_crowd(server, provider):
    server.check_client("1", "1")
    before = server.memory()
    each = 2  # clients in a process
    crowds = [server.start_client(str(each), "100", "20")
              for _ in range(KILLS * 3 // 2 // each)]
    random.shuffle(crowds)
    dying = crowds[:KILLS // each]
    if provider == "shm":
        # A client that goes before its first message is seen takes the server with it.
        for crowd in dying:
            crowd.wait_for("are connected", 60)
    threads = [threading.Timer(random.uniform(0, 2), crowd.popen.kill)
               for crowd in dying]
    for thread in threads:
        thread.start()
    for crowd in crowds[len(dying):]:
        check_crowd(crowd, each, 100)
    for thread in threads:
        thread.join()
    server.check_client("20", "20")
    assert not server.errors(), server.process.output
    assert server.memory() < before + 20_000
    server.stop()


@two_providers
def test_killed_crowd(serve, provider):
    """Two of three clients are killed at any moment. The others lose nothing, get
    nothing twice and nothing that is not theirs: they look at that. Over shm of 1.17, one
    that dies while it holds a lock in the server's memory takes all others with it, less than
    once in a thousand kills. Then they hang, and are tried once more."""
    try:
        kill_crowd(serve(PROGRAM, provider), provider)
    except subprocess.TimeoutExpired:
        if provider != "shm":
            raise
        kill_crowd(serve(PROGRAM, provider), provider)


@pytest.fixture
def start_deaf(run):
    """Starts a client that asks 30,000 times, and never reads."""
    def start(server):
        deaf = run([f"{BROKEN()}/{PROGRAM}", server.address, "deaf"], server.provider)
        deaf.wait_for("^Asked 30,000 times, and read nothing.$", 60)
        return deaf
    return start


@pytest.mark.skipif(not is_here("tcp;ofi_rxm"), reason="others have room for everything")
@not_over_verbs("an adapter has no such queues")
@pytest.mark.thorough
def test_deaf_client(serve, start_deaf):
    """A client that asks and reads no answer has no more than its share of the room
    for SENDs, and is forgotten. What happens otherwise is in test_breaks.py."""
    server = serve(PROGRAM, "tcp;ofi_rxm")
    server.check_client("20", "5")
    wait_for_nobody(server)
    before, connected_before = server.memory(), server.process.descriptors()
    deaf = start_deaf(server)
    server.process.wait_for(r"^\[[0-9a-f]{16}\] forgotten: it asks and does not read")
    # Its connection is given up, though it is still there.
    wait_until(lambda: server.process.descriptors() <= connected_before)
    check_crowd(server.start_client("20", "50"), 20, 50)
    assert deaf.popen.poll() is None
    assert server.memory() < before + 60_000  # KB
    deaf.popen.kill()
    server.stop()


@not_over_verbs("an adapter has no such queues")
@pytest.mark.builds("sanitized")
@pytest.mark.thorough
def test_deaf_and_forgotten(serve, start_deaf):
    """What is in flight to a deaf client completes after the server has forgotten it. Its
    record and its buffer are there until then."""
    server = serve(PROGRAM)
    deaf = start_deaf(server)
    server.process.wait_for(r"^\[[0-9a-f]{16}\] forgotten: it asks and does not read", 60)
    server.check_client("3", "3")
    deaf.popen.kill()
    server.check_client("3", "3")
    wait_for_nobody(server)
    server.stop()


def test_lost_connect(run, build):
    """A client of a crowd that gets no ACCEPT sends its CONNECT again."""
    server = CrowdHost(run, build, "1", "1")
    again = server.receive_any()
    assert again[:12] == crowd(CONNECT)[:4] + server.number.to_bytes(8, "little")
    server.reply(ACCEPT)
    server.reply(ACCEPT)
    server.reply(TEXT, server.receive().body[::-1])
    assert server.receive().type == BYE
    assert server.client.wait() == 0, server.client.output


def test_last_answer(serve):
    """The last answer ends the run: its client does not sleep until it looks at its
    limits, half a second later, which would count as time that the answers took. (One
    of three tries shows it, however busy the machine is.)"""
    server = serve(PROGRAM)
    rates = []
    for _ in range(3):
        crowd = server.start_client("100", "1")
        check_crowd(crowd, 100, 1)
        rates.append(int(re.search(r"(\d+) a second", crowd.output)[1]))
    assert max(rates) > 100 / 0.4
    server.stop()


def test_rare_requests(run):
    """Clients that ask more rarely than the server remembers them begin anew each
    time, and get on."""
    server = Server(run, SMALL(), PROGRAM)
    check_crowd(server.start_client("3", "2", "9000"), 3, 2)
    server.process.wait_for(r"^\[[0-9a-f]{16}\] forgotten: it has been silent for long")
    server.stop()


def test_next_server(run):
    """A client that asks rarely may outlive its server, and goes on with the next one
    that has the same address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ports = {"FI_TCP_PORT_LOW_RANGE": port, "FI_TCP_PORT_HIGH_RANGE": port}
    server = Server(run, SMALL(), PROGRAM, **ports)
    server.env = {}  # a client takes any port
    client = server.start_client("1", "2", "5000")
    client.wait_for("1 clients are connected")
    server.stop()
    successor = Server(run, SMALL(), PROGRAM, **ports)
    assert successor.address == server.address
    check_crowd(client, 1, 2)
    successor.process.wait_for("^1 clients, 1 texts so far")
    successor.stop()


def test_forgotten(run):
    """What has been said by one who has been forgotten is that of a stranger. One that
    goes on asking is not forgotten."""
    server = Server(run, SMALL(), PROGRAM)
    other, client = CrowdGuest(run, server), CrowdGuest(run, server)
    other.open_session()
    client.open_session()
    client.check_text()

    def forgotten():
        other.check_text()
        return f"[{client.number:016x}] forgotten: it has been silent for long" in \
            server.process.output

    wait_until(forgotten, 40)
    server.process.wait_for(r"^\[[0-9a-f]{16}\] forgotten: .*\n1 clients, ")
    # Its connection has been given up.
    client.send(crowd(TEXT, b"text"), "(sent|failed)")
    other.check_text()
    server.stop()


@pytest.mark.builds("sanitized")
@two_providers
def test_asks_and_leaves(run, serve, provider):
    """A client says BYE without a look at its answers. Those that have not left by then go
    nowhere: its address has been removed."""
    server = serve(PROGRAM, provider)
    other = CrowdGuest(run, server)
    other.open_session()
    for _ in range(5):
        guest = CrowdGuest(run, server)
        guest.open_session()
        for message in [crowd(TEXT, b"text")] * 5 + [crowd(BYE)]:
            guest.process.write(guest.send_line(message))
        other.check_text()
    server.process.wait_for(r"^1 clients, .*\n\Z")
    server.stop()


def test_one_after_the_other_of_a_crowd(serve):
    """Many clients, none of which leaves anything behind. libfabric keeps some of what
    it has needed for a later use: 13 MB in the first 4,000, nearly nothing after."""
    server = serve(PROGRAM)
    each = 50
    used = []
    for _ in range(CLIENTS // each):
        server.check_client(str(each), "1")
        used.append(server.memory())
    half = len(used) // 2
    assert max(used[half:]) < max(used[:half]) + 2000 + CLIENTS // 2, used
    wait_for_nobody(server)
    server.stop()


# ---- Those who are interrupted, or lose their server ----

def test_server_of_a_crowd_gone(serve):
    """Whoever waits for it gives up, and says so."""
    server = serve(PROGRAM)
    crowd = server.start_client("5", "1000000")
    crowd.wait_for("are connected")
    server.process.signal(signal.SIGKILL)
    late = server.start_client()
    for client in crowd, late:
        client.check_error(".*(nothing has happened for 10 s|SEND failed|RECV failed)")


# ---- Messages that no client of ours would send ----

@pytest.mark.builds("sanitized")
def test_at_the_door_of_a_crowd(run, serve):
    """Messages that are nobody's cost nobody anything."""
    server = serve(PROGRAM, **LIBFABRIC_LEAKS)
    client = CrowdGuest(run, server)
    with server.others("5", "50", count=1):
        for message in (b"", b"x", crowd(CONNECT)[:-1], crowd(0), crowd(BYE),
                        crowd(TEXT, b"text"), b"\0" * MAX_MESSAGE):
            client.send(message)
        for _ in range(70):  # more than there are RECVs
            client.send(bytes(MAX_MESSAGE + 1), answer="(sent|failed)", as_it_is=True)
    server.check_client("5", "5")
    server.stop()


@pytest.mark.builds("sanitized")
def test_requests_that_are_none(run, serve):
    """A client that asks for what cannot be is forgotten."""
    server = serve(PROGRAM)
    with server.others("5", "50", count=1):
        for count, messages in enumerate(BAD_CROWDS.values(), 1):
            guest = CrowdGuest(run, server)
            assert guest.open_session().type == ACCEPT
            for message in messages:
                guest.send(message, "(sent|failed)")
            server.process.wait_for("^\\[[0-9a-f]{16}\\] forgotten: bad message: ", count=count)
            # Nobody hears it any more.
            guest.send(crowd(TEXT, b"afterwards"), "(sent|failed)")
    server.stop()


@pytest.mark.builds("sanitized")
def test_whose_message(run, serve):
    """A message with the number of no client is heard by nobody. One with the address of
    another client's takes the place of that one."""
    server = serve(PROGRAM, **LIBFABRIC_LEAKS)
    client, other = CrowdGuest(run, server), CrowdGuest(run, server)
    client.open_session()
    client.check_text()
    other.open_session()
    for number in 0, client.number ^ 1, 2**64 - 1:
        other.number, kept = number, other.number
        other.send(crowd(BYE))
        other.number = kept
    other.check_text()
    # A CONNECT that comes again begins nothing, and is answered.
    client.send(client.connect())
    assert client.receive().type == ACCEPT
    client.check_text()
    client.open_session()
    client.check_text()
    server.process.wait_for("^2 clients, 4 texts so far$")  # and not three, all in all
    server.stop()


# ---- Answers that no server of ours would give ----

def test_stray_replies(run, build):
    """A client takes the answers with its number, and no others."""
    server = CrowdHost(run, build, "1", "2")
    server.reply(ACCEPT)
    for _ in range(2):
        text = server.receive().body
        for message in b"", b"x", crowd(ACCEPT):
            server.send(message)
        number, server.number = server.number, server.number ^ 1
        server.send(crowd(TEXT, b"stray"))
        server.number = number
        server.reply(TEXT, text[::-1])
    assert server.receive().type == BYE
    assert server.client.wait() == 0, server.client.output


def test_stopped_client(run):
    """A client that has stood still for long reads what has come before it looks at
    the clock."""
    server = CrowdHost(run, HASTY(), "1", "1")
    server.reply(ACCEPT)
    text = server.receive().body
    server.client.signal(signal.SIGSTOP)
    server.reply(TEXT, text[::-1])
    time.sleep(3)
    server.client.signal(signal.SIGCONT)
    assert server.receive().type == BYE
    assert server.client.wait() == 0, server.client.output


@pytest.mark.parametrize("answer,error", [
    (crowd(TEXT, b"not ours"), "the text is not correct"),
    (crowd(99), "bad message: type 99")], ids=["text", "type"])
def test_wrong_reply(run, build, answer, error):
    """A client compares what it gets."""
    server = CrowdHost(run, build, "1", "2")
    server.reply(ACCEPT)
    assert server.receive().type == TEXT
    server.send(answer)
    server.client.check_error(f"{error}\n\\Z")
