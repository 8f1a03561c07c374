"""13_crowd: one endpoint for all clients. Whatever one of them does, the others get
their answers, each once and the right one, and the server's memory is bounded.

KILLS=100 scripts/test.sh -k test_crowd.py        kills 100 of 150 clients
CLIENTS=10000 scripts/test.sh -k test_one_after_the_other_of_a_crowd"""

import os
import random
import re
import signal
import threading
import time

import pytest

from fakes import CrowdGuest, CrowdHost
from harness import LIBFABRIC_LEAKS, TIME_FACTOR, Server, is_here
from marks import each_provider, not_over_verbs, two_providers
from messages import (ACCEPT, BYE, CONNECT, DELETE, DONE, FULL, GET, NOT_FOUND, STORE,
                      crowd, crowd_request)
from repository import read_source, variant
from table import BAD_CROWDS

# How many clients of a crowd test_killed_crowd kills, and how many come one after the
# other: see above.
KILLS = int(os.environ.get("KILLS", "6"))
CLIENTS = int(os.environ.get("CLIENTS", "200"))
PROGRAM = "13_crowd"
MAX_MESSAGE = 2048  # bytes


# ---- The program, with other limits ----

# Each of these constants can be set in the environment of the variant.
SETTING = """
template <typename T>
T Setting(const char* name, T value) {
  const char* text = getenv(name);
  return text == nullptr ? value : T(atoll(text));
}
"""
SETTINGS = ["kMaxStoreSize", "kEntrySize", "kSilenceLimit", "kForgetAfter", "kMaxClients",
            "kMaxInFlight", "kMaxUnsent"]
# With DEAF, a client of a crowd asks and asks, and looks at nothing any more. With
# FLOOD, it does look, but does not wait for the answers. With SLOWLY, it asks no faster
# than a server can answer as long as there is room.
MISBEHAVE = """
    bool deaf = getenv("DEAF") != nullptr;
    if (sequence >= 2 && (deaf || getenv("FLOOD") != nullptr)) {
      int most = getenv("SLOWLY") != nullptr ? 5 : 100;
      for (int i = 0; i < most && server->outbox.size() < 4; ++i) {
        Ask(AppMessageType::kGet, key);
      }
      mailbox.PostBlocked();
      if (!deaf) mailbox.Poll();
      while (!deaf && mailbox.Take()) continue;
      if (sequence / 5000 != (sequence - 100) / 5000) {
        printf("asked %u\\n", sequence);
      }
      std::this_thread::sleep_for(1ms);
      return false;
    }
"""

def variant_of(source):
    """The program's source, with SETTINGS and MISBEHAVE."""
    def replace(pattern, new):
        nonlocal source
        source, count = re.subn(pattern, new, source, flags=re.M)
        assert count == 1, pattern

    replace(r"^(using Clock = .*\n)", lambda match: match[0] + SETTING)
    for name in SETTINGS:
        replace(rf"^constexpr (?:size_t|auto) ({name}) = ([^;]+);",
                lambda match: f'const auto {match[1]} = Setting<size_t>("{match[1]}", {match[2]});'
                if not re.search(r"\d+m?s$", match[2]) else
                f'const auto {match[1]} = decltype({match[2]})'
                f'(Setting("{match[1]}", ({match[2]}).count()));')
    replace(r"^  bool HasReply\(\) {\n", lambda match: match[0] + MISBEHAVE)
    # So that an answer is as long as it can be.
    replace(r'if \(put\) stored = (key [^;]*);',
            r'if (put) stored = getenv("DEAF") ? std::string(1024, 0x78) : \1;')
    return source


VARIANT = variant(PROGRAM, source=lambda: variant_of(read_source(PROGRAM)))


@pytest.fixture
def serve_variant(run):
    """Starts a server of that program, for clients of it: settings by name."""
    def start(provider="", **settings):
        return Server(run, VARIANT(), PROGRAM, provider,
                      **{name: str(value) for name, value in settings.items()})
    return start


def connections(server):
    """How many descriptors a server has."""
    return len(os.listdir(f"/proc/{server.process.popen.pid}/fd"))


def wait_until(condition, timeout=10):
    end = time.monotonic() + timeout * TIME_FACTOR
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_for_nobody(server):
    """Waits until all clients have gone. There were none at first, either."""
    server.process.wait_for(r"^0 clients, [1-9].*\n\Z")


def check_crowd(crowd, clients, requests, timeout=60):
    """All of a crowd's clients got what they asked for, which they compare."""
    assert crowd.wait(timeout) == 0, crowd.output
    assert re.search(rf"^{clients} clients are connected\.\n{clients * requests} "
                     "replies, all correct, ", crowd.output, re.M), crowd.output


# ---- By hand ----

@pytest.mark.builds("plain")
@each_provider
def test_by_hand(serve, provider):
    """A value is stored, returned, replaced and forgotten; beside a crowd."""
    server = serve(PROGRAM, provider)

    def ask(*args, answer="Done.", status=0):
        client = server.start_client(*args)
        assert client.wait() == status, client.output + server.process.output
        assert client.output.endswith(f"\n{answer}\n"), client.output

    # On a busy machine, the socket of udp;ofi_rxd overflows, and what is lost is sent again
    # more and more seldom: a small crowd.
    clients = 4 if provider == "udp;ofi_rxd" else 20
    crowd = server.start_client(str(clients), "20", "50")
    ask("put", "key", "value")
    ask("get", "key", answer="value")
    if provider == "":
        nothing = {"answer": "error: the server has no such key", "status": 1}
        ask("put", "key", "")
        ask("get", "key", answer="")
        ask("delete", "key")
        ask("delete", "key", **nothing)
        ask("get", "key", **nothing)
        longest = "k" * 64, "v" * 1024
        ask("put", *longest)
        ask("get", longest[0], answer=longest[1])
    check_crowd(crowd, clients, 20)
    wait_for_nobody(server)
    assert not server.errors()
    server.stop()


@pytest.mark.builds("plain")
@two_providers
def test_many_at_once(run, serve, provider):
    """Requests that the server finds together are all answered, in their order, though
    not all answers may be in flight at a time."""
    server = serve(PROGRAM, provider)
    client = CrowdGuest(run, server)
    client.open_session()
    server.process.signal(signal.SIGSTOP)
    for _ in range(12):
        client.send(client.request(GET))
    server.process.signal(signal.SIGCONT)
    assert [client.receive().sequence for _ in range(12)] == [*range(1, 13)]
    server.stop()


@pytest.mark.builds("plain")
def test_full_store(run, serve_variant):
    """Who stores more than there is room for is told so, and what was there stays."""
    server = serve_variant(kMaxStoreSize=1000, kEntrySize=0)
    client = CrowdGuest(run, server)
    assert client.open_session().type == ACCEPT

    def put(key, size, answer):
        assert client.ask(STORE, key, b"v" * size).type == answer
        assert (client.ask(GET, key).body == b"v" * size) == (answer == DONE)

    for _ in range(3):
        put(b"a", 599, DONE)
        put(b"b", 400, FULL)
        put(b"b", 399, DONE)
        assert client.ask(STORE, b"a", b"w" * 600).type == FULL
        assert client.ask(GET, b"a").body == b"v" * 599
        put(b"a", 10, DONE)
        put(b"b", 988, DONE)
        assert client.ask(STORE, b"", b"").type == DONE
        for key in b"a", b"b", b"":
            assert client.ask(DELETE, key).type == DONE
            assert client.ask(DELETE, key).type == NOT_FOUND
            assert client.ask(GET, key).type == NOT_FOUND
    full = server.start_client("put", "c", "v" * 1000)
    assert full.wait() == 1
    assert full.output.endswith("error: the server has no room for it\n")
    server.stop()


@pytest.mark.builds("plain")
def test_full_server(run, serve_variant):
    """One client too many is told so, and gets in when another one has left."""
    server = serve_variant(kMaxClients=3)
    clients = [CrowdGuest(run, server) for _ in range(3)]
    for client in clients:
        assert client.open_session().type == ACCEPT
    crowd = server.start_client("2", "1")
    server.process.wait_for("^error: a CONNECT finds no room for one more client")
    for client in clients:
        assert client.ask(STORE).type == DONE
    clients[0].leave()
    # It asks again each second.
    server.process.wait_for("^3 clients, ", after=len(server.process.lines))
    clients[1].leave()
    check_crowd(crowd, 2, 1)
    server.stop()


# ---- Clients that go, or do not read ----

@pytest.mark.builds("plain")
@two_providers
def test_killed_crowd(serve, provider):
    """Two of three clients are killed at any moment. The others lose nothing, get
    nothing twice and nothing that is not theirs: they look at that."""
    server = serve(PROGRAM, provider)
    server.check_client("1", "1")
    before = server.memory()
    each = 5 if KILLS >= 50 else 2  # clients in a process
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


# How much a deaf client asks for before its own queue is full: more than what fits
# into the queues of sockets and of the server's endpoint.
ASKED = 20000
DEAF = {"DEAF": "1", "kMaxInFlight": str(1 << 20),
        "FI_OFI_RXM_TX_SIZE": str(1 << 15)}
FLOOD = {"FLOOD": "1", "kMaxInFlight": str(1 << 20)}
NO_LIMIT = 1 << 20


@pytest.mark.skipif(not is_here("tcp;ofi_rxm"), reason="others have room for everything")
@not_over_verbs("an adapter has no such queues")
@pytest.mark.builds("plain")
@pytest.mark.parametrize("limits,is_forgotten,others_finish", [
    ({}, True, True),
    ({"kMaxUnsent": NO_LIMIT}, False, True),
    ({"kMaxUnsent": NO_LIMIT, "kMaxInFlight": NO_LIMIT}, False, False)],
    ids=["limits", "in flight", "no limits"])
@pytest.mark.thorough
def test_deaf_client(run, serve_variant, limits, is_forgotten, others_finish):
    """A client that asks and reads no answer has no more than its share of the room
    for SENDs. Without the limits, nobody else gets an answer."""
    server = serve_variant("tcp;ofi_rxm", kSilenceLimit=3, **limits)
    server.check_client("20", "5")
    wait_for_nobody(server)
    before, connected_before = server.memory(), connections(server)
    deaf = server.start_client("1", "1000", **DEAF)
    deaf.wait_for(rf"^asked {ASKED // 1000}\d\d\d", 30)
    if is_forgotten:
        flood = server.start_client("1", "1000", **FLOOD)
        server.process.wait_for(
            r"^\[[0-9a-f]{16}\] forgotten: it asks and does not read", count=2)
        flood.popen.kill()
        # Its connection is given up, though it is still there.
        wait_until(lambda: connections(server) <= connected_before)
    else:
        wait_until(lambda: any(int(count) > ASKED for count in re.findall(
            r"(\d+) requests", server.process.output)), 30)
    others = server.start_client("20", "50")
    if others_finish:
        check_crowd(others, 20, 50)
    else:
        assert others.wait() == 1, others.output
        assert "nothing has happened for 3 s" in others.output
    assert deaf.popen.poll() is None
    if is_forgotten:
        assert server.memory() < before + 60_000  # KB; kept, they would be 170 MB
    deaf.popen.kill()
    if others_finish:
        server.stop()


@not_over_verbs("an adapter has no such queues")
@pytest.mark.builds("sanitized")
@pytest.mark.thorough
def test_deaf_and_forgotten(run, serve):
    """What is in flight to a deaf client completes after the server has forgotten it. Its
    record is there until then."""
    server = serve(PROGRAM)
    deaf = run([f"{VARIANT()}/{PROGRAM}", server.address, "1", "1000"], "", **DEAF,
               SLOWLY="1")
    server.process.wait_for(r"^\[[0-9a-f]{16}\] forgotten: it asks and does not read", 60)
    server.check_client("3", "3")
    wait_for_nobody(server)
    deaf.popen.kill()
    server.check_client("3", "3")
    server.stop()


@pytest.mark.builds("plain")
def test_lost_connect(run, build):
    """A client of a crowd that gets no ACCEPT sends its CONNECT again."""
    server = CrowdHost(run, build, "1", "1")
    again = server.receive_any()
    assert again[:4] == crowd(CONNECT)[:4]
    assert again[8:16] == server.number.to_bytes(8, "little")
    server.reply(ACCEPT)
    assert server.receive().type == STORE
    server.reply(DONE)
    assert server.receive().type == BYE
    assert server.client.wait() == 0, server.client.output


@pytest.mark.builds("plain")
def test_rare_requests(serve_variant):
    """Clients that ask more rarely than the server remembers them begin anew each
    time, and get on."""
    server = serve_variant(kForgetAfter=5)
    check_crowd(server.start_client("3", "2", "6000"), 3, 2)
    server.process.wait_for(r"^\[[0-9a-f]{16}\] forgotten: it has been silent for long")
    server.stop()


@pytest.mark.builds("plain")
def test_forgotten(run, serve_variant):
    """What has been said by one who has been forgotten is that of a stranger. One that
    goes on asking is not forgotten."""
    # A busy machine may keep the other one from asking for seconds.
    server = serve_variant(kForgetAfter=10)
    other, client = CrowdGuest(run, server), CrowdGuest(run, server)
    other.open_session()
    client.open_session()
    assert client.ask(STORE, b"key", b"value").type == DONE

    def forgotten():
        assert other.ask(GET).body == b"value"
        return f"[{client.number:016x}] forgotten: it has been silent for long" in \
            server.process.output

    wait_until(forgotten, 40)
    server.process.wait_for(r"^\[[0-9a-f]{16}\] forgotten: .*\n1 clients, ")
    # Its connection has been given up.
    client.send(client.request(DELETE), "(sent|failed)")
    assert other.ask(GET).body == b"value"
    server.stop()


@pytest.mark.builds("plain")
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

@pytest.mark.builds("plain")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP],
                         ids=["killed", "stopped"])
def test_server_of_a_crowd_gone(serve, signum):
    """Whoever waits for it gives up, and says so."""
    server = serve(PROGRAM)
    crowd = server.start_client("5", "1000000")
    crowd.wait_for("are connected")
    server.process.signal(signum)
    late = server.start_client("get", "key")
    for client in crowd, late:
        assert client.wait() == 1
        assert re.search("error: .*(nothing has happened for 10 s|SEND failed|"
                         "RECV failed)", client.output), client.output


# ---- Messages that no client of ours would send ----

@pytest.mark.builds("sanitized")
def test_at_the_door_of_a_crowd(run, serve):
    """Messages that are nobody's cost nobody anything."""
    server = serve(PROGRAM, **LIBFABRIC_LEAKS)
    client = CrowdGuest(run, server)
    with server.others("5", "50", count=1):
        for message in (b"", b"x", crowd(CONNECT)[:-1], crowd(0), crowd(BYE),
                        crowd_request(GET, b"key"), b"\0" * MAX_MESSAGE):
            client.send(message)
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
            guest.send(guest.request(STORE, b"afterwards", b"value"), "(sent|failed)")
    client = CrowdGuest(run, server)
    client.open_session()
    assert client.ask(GET, b"afterwards").type == NOT_FOUND
    server.stop()


@pytest.mark.builds("sanitized")
def test_whose_message(run, serve):
    """A message with the number of no client is heard by nobody. One with the address of
    another client's takes the place of that one."""
    server = serve(PROGRAM, **LIBFABRIC_LEAKS)
    client, other = CrowdGuest(run, server), CrowdGuest(run, server)
    client.open_session()
    assert client.ask(STORE, b"key", b"value").type == DONE
    other.open_session()
    for number in 0, client.number ^ 1, 2**64 - 1:
        other.number, kept = number, other.number
        other.send(crowd_request(DELETE, b"key"))
        other.number = kept
    assert other.ask(GET).body == b"value"
    # A CONNECT that comes again begins nothing, and is answered.
    client.send(client.connect())
    assert client.receive().type == ACCEPT
    assert client.ask(GET).body == b"value"
    client.open_session()
    assert client.ask(GET).body == b"value"
    server.process.wait_for("^2 clients, ")
    server.stop()


# ---- Answers that no server of ours would give ----

@pytest.mark.builds("plain")
def test_stray_replies(run, build):
    """A client takes the reply to its last request, with its number, and no other."""
    server = CrowdHost(run, build, "1", "2")

    def stray(sequence):
        for message in b"", b"x", crowd(ACCEPT), crowd(DONE, b"stray", sequence ^ 3):
            server.send(message)
        number, server.number = server.number, server.number ^ 1
        server.send(crowd(DONE, b"stray", sequence))
        server.number = number

    server.reply(ACCEPT)
    put = server.receive()
    assert put.type == STORE
    stray(put.sequence)
    server.reply(DONE, sequence=put.sequence)
    get = server.receive()
    assert get.type == GET
    stray(get.sequence)
    server.reply(DONE, put.body.split(b"\0")[1], get.sequence)
    assert server.receive().type == BYE
    assert server.client.wait() == 0, server.client.output


@pytest.mark.builds("plain")
@pytest.mark.parametrize("answer", [crowd(DONE, b"not ours", 1), crowd(FULL, b"", 1),
                                    crowd(99, b"", 1)], ids=["value", "full", "type"])
def test_wrong_reply(run, build, answer):
    """A client of a crowd compares what it gets."""
    server = CrowdHost(run, build, "1", "2")
    server.reply(ACCEPT)
    assert server.receive().type == STORE
    server.send(answer)
    assert server.client.wait() == 1
    assert server.client.output.endswith("error: the reply is not correct\n")
