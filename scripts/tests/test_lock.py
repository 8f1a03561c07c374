"""What only 10_lock has: memory that several clients change at once. Whatever becomes
of them, nothing is lost and nothing is there twice; the clients check that, and so does
the server when the last one has gone."""

import os
import random
import re
import signal
import struct
import time

import pytest

from fakes import FakeClient, FakeServer
from harness import LIBFABRIC_LEAKS, PROVIDERS, TIME_FACTOR, under_strict
from marks import takes_strict, two_providers
from messages import JOIN, TABLE_ALIVE, TABLE_REPLY, plain
from repository import variant

LEASE = 1  # s
LOG_SIZE = 1 << 20  # entries
CLIENTS_AT_A_TIME = 8
# How many clients test_killed_clients kills. KILLS=100 takes minutes.
KILLS = int(os.environ.get("KILLS", "3"))
# How much each of four clients changes. COUNT=100000 takes many minutes.
COUNT = int(os.environ.get("COUNT", "200"))

def check_left(server, rounds=1):
    """Waits until the server has had no client for that many times. Returns what it
    then found: entries, holes among them, changes."""
    line = server.process.wait_for(
        r"^(error: )?the log has (\d+) entries \((\d+) holes\), the ledger (\d+) "
        r"changes\. (It all fits together|It does not fit together)\.$", count=rounds)
    assert bool(line[1]) == (line[5] == "It does not fit together")
    assert not line[1], line[0]
    return [int(text) for text in line.groups()[1:4]]


def check_entries(server, total):
    """Waits until there are so many. The first clients may have gone before others come."""
    entries = rounds = 0
    while entries < total:
        rounds += 1
        entries, holes, changes = check_left(server, rounds)
        assert holes == 0 and entries == changes
    assert entries == total


def turns(client):
    """What a client says about turns: of its own that others have ended, and of
    others that it has ended."""
    return [int(text) for text in re.search(
        r"^Turns of ours that others ended: (\d+), of others that we ended: (\d+)$",
        client.output, re.M).groups()]


def test_interrupted_in_the_messages(serve):
    """A signal counts between two messages, each of which takes microseconds."""
    server = serve("10_lock")
    client = server.start_client("100000")
    server.process.wait_for("Received CONNECT")
    time.sleep(0.7)
    client.interrupt()
    assert "messages and their answers" not in client.output
    server.stop()


@two_providers
@pytest.mark.thorough
def test_together(serve, provider):
    """Four clients at once. Then a fifth one, in a seat that another one had."""
    server = serve("10_lock", provider)
    for total, number in (4, 4), (5, 1):
        clients = [server.start_client(str(COUNT)) for _ in range(number)]
        server.check_all(clients, 3600)
        if number == 1:  # there is nobody else to take or end a turn
            assert turns(clients[0]) == [0, 0]
        check_entries(server, total * COUNT)
    server.stop()


@two_providers
def test_stopped_server(serve, provider):
    """The library in the server's process executes the atomic operations, over verbs,
    too. So they wait for it."""
    server = serve("10_lock", provider)
    # Each change takes four atomic operations; all together, 2 s.
    client = server.start_client("100", HOLD_MS="20")
    client.wait_for("FETCH-AND-ADD and WRITE")
    server.process.signal(signal.SIGSTOP)
    time.sleep(5)
    assert "changes under the lock" not in client.output
    server.process.signal(signal.SIGCONT)
    assert client.wait() == 0, client.output
    check_left(server)
    server.stop()


@pytest.mark.builds("sanitized")
@pytest.mark.parametrize("provider,signum", [("", signal.SIGKILL),
                                             ("shm", signal.SIGSTOP)],
                         ids=["killed-default", "stopped-shm"])
def test_holder_that_goes(serve, provider, signum):
    """A client that is killed or stopped while it has the lock costs the others a
    lease, and nothing that is in the ledger."""
    server = serve("10_lock", provider, **LIBFABRIC_LEAKS)
    holder = server.start_client("3", HOLD_MS="60000")
    holder.wait_for("FETCH-AND-ADD and WRITE")
    other = server.start_client("5")
    other.wait_for("FETCH-AND-ADD and WRITE")
    holder.signal(signum)
    assert other.wait() == 0, other.output
    assert turns(other) == [0, 1]
    assert other.seconds > LEASE
    holder.kill()
    if provider == "":
        # The server hears of it after 10 s, or at once.
        entries, _, changes = check_left(server)
        assert entries == 8 and changes == 5
    server.stop()


@pytest.mark.builds("sanitized")
@two_providers
@pytest.mark.thorough
def test_slow_holder(serve, provider):
    """A client that holds the lock for longer than a lease loses it. What it would
    have changed does no harm, and it changes that again."""
    server = serve("10_lock", provider)
    # Enough of them to be still there when the other one gets to the lock.
    held = round(2 * TIME_FACTOR)
    holder = server.start_client(str(held), HOLD_MS=str(1500 * LEASE))
    holder.wait_for("FETCH-AND-ADD and WRITE")
    other = server.start_client("5")
    server.check_all([other, holder])
    assert turns(other)[1] >= 1
    assert turns(holder)[0] >= 1
    entries, _, changes = check_left(server)
    assert entries == changes == held + 5
    server.stop()


@pytest.mark.builds("sanitized")
def test_killed_clients(serve):
    """At any moment, while another one is there: nothing of its is lost. Over tcp,
    because libfabric 1.17's shm has locks in the server's memory."""
    server = serve("10_lock", **LIBFABRIC_LEAKS)
    with server.others("100", count=1):
        for _ in range(KILLS):
            client = server.start_client("1000")
            client.wait_for("provider: ", 30)
            time.sleep(random.uniform(0, 1))
            client.kill()
    # Those that have died keep their seats for a while.
    server.process.wait_for(r"^(error: )?the log has (?!.*^\[\d+\] Rec)", 30)
    assert "It does not fit together" not in server.process.output
    server.check_client()
    server.stop()


@two_providers
def test_interrupted(serve, provider):
    """Ctrl-C at any moment: the client says so, and what it was at completes or not."""
    server = serve("10_lock", provider, **LIBFABRIC_LEAKS)
    for rounds in 1, 2:
        client = server.start_client("1000", HOLD_MS="1")
        client.wait_for("messages and their answers:", 60)
        time.sleep(random.uniform(0, 0.6))
        client.interrupt()
        check_left(server, rounds)
    server.stop()


# ---- Clients that do as they like ----

class Vandal(FakeClient):
    """Writes whatever it likes into the memory of the server, in which it has a
    seat."""

    def __init__(self, run, server):
        super().__init__(run, server)
        self.open_session()
        self.send(plain(JOIN))
        message = self.receive()
        assert message[:4] == plain(TABLE_REPLY)
        self.addr, self.size, self.key, self.client, self.seat = struct.unpack(
            "<3Q2I", message[4:])

    def write(self, offset, *words):
        data = struct.pack(f"<{len(words)}Q", *words)
        self.command(f"write {self.addr + offset} {self.key} 1 {data.hex()}",
                     "written")

    def fail(self):
        """Leaves without a BYE, as a client that has died."""
        self.send(plain(99))
        self.expect("error: bad message: type 99")


TICKETS, LOCK_TICKETS, TURN, LEDGERS = 0, 64, 128, 192  # places in the memory
LOG = 1344
RECORDS, NUM_RECORDS = LOG + 8 * LOG_SIZE, 1024
TABLE_SIZE = RECORDS + NUM_RECORDS * 256


# What is wrong, and the words that make it so: of the number of entries, the first entries
# and the first ledger.
WRONG = {
    "an entry that is there twice": ([2], [1, 1], [2, 2]),
    "entries that nobody wrote": ([2], [1], [2, 2]),
    "a ledger whose total is wrong": ([1], [1], [1, 0]),
    "fewer changes than entries": ([1], [1], [0, 0]),
    "more changes than entries": ([1], [1], [2, 2]),
}


@pytest.mark.builds("sanitized")
@pytest.mark.parametrize("wrong", WRONG)
def test_the_server_finds(run, serve, wrong):
    """What does not fit together."""
    server = serve("10_lock", "shm")
    vandal = Vandal(run, server)
    for place, words in zip((TICKETS, LOG, LEDGERS), WRONG[wrong]):
        vandal.write(place, *words)
    vandal.leave()
    server.process.wait_for("^error: the log has .* It does not fit together.$")
    server.stop()


def test_long_queue(run, serve):
    """A lease is over if the turn has not changed for that long. How long a client has
    waited for the turns of others does not matter."""
    server = serve("10_lock", "shm")
    vandal = Vandal(run, server)
    before = 5
    with vandal.saying(plain(TABLE_ALIVE)):
        vandal.write(LOCK_TICKETS, before)
        began, longest = time.monotonic(), 0
        client = server.start_client("1")
        client.wait_for("FETCH-AND-ADD and WRITE")
        for ticket in range(1, before + 1):
            earlier, began = began, time.monotonic()
            vandal.write(TURN, ticket * 256)
            longest = max(longest, time.monotonic() - earlier)
            time.sleep(0.4 * LEASE)
        assert client.wait() == 0, client.output
    # On a machine that stands still, a turn may be over indeed.
    assert turns(client) == [0, 0] or longest > LEASE
    vandal.leave()
    assert check_left(server) == [1, 0, 1]
    server.stop()


@pytest.mark.builds("sanitized")
def test_failed_clients(run, serve):
    """A client that ends after its ticket leaves a hole, and fewer changes than entries.
    That is no fault, but two holes are."""
    server = serve("10_lock", "shm")
    vandal = Vandal(run, server)
    vandal.write(TICKETS, 1)
    vandal.fail()
    assert check_left(server) == [1, 1, 0]
    vandal = Vandal(run, server)
    vandal.write(TICKETS, 2)
    vandal.leave()
    server.process.wait_for("^error: the log has 2 entries .2 holes.")
    server.stop()


@pytest.mark.builds("sanitized")
def test_seats(run, serve):
    """More clients than there are seats, while one of them stays: those that come
    later get the seats, the keys and the ledgers of those before them, but not its own."""
    server = serve("10_lock")
    staying = Vandal(run, server)
    with staying.saying(plain(TABLE_ALIVE)):
        for _ in range(2):
            server.check_all([server.start_client("20") for _ in range(4)])
            for _ in range(4):
                later = Vandal(run, server)
                assert later.seat != staying.seat
                later.leave()
    assert "the log has" not in server.process.output
    staying.leave()
    entries, _, changes = check_left(server)
    assert entries == changes == 2 * 4 * 20
    server.stop()


@pytest.mark.builds("sanitized")
def test_clients_find(run, serve):
    """A full log."""
    server = serve("10_lock", "shm")
    vandal = Vandal(run, server)
    vandal.write(TICKETS, LOG_SIZE)
    with vandal.saying(plain(TABLE_ALIVE)):
        server.start_client("1").check_error("the log is full$")
    vandal.leave()
    server.stop()


CHECKING = variant("10_lock", ("      Turn before = turn;\n", """\
      Turn before = turn;
      printf("checking\\n");
      std::this_thread::sleep_for(1s);
"""))


def test_ledger_that_changes(run, serve):
    """A client that READs the ledger without a lock, late here, READs it again if it is not
    the valid one any more: others may write it."""
    server = serve("10_lock", "shm")
    vandal = Vandal(run, server)
    with vandal.saying(plain(TABLE_ALIVE)):
        client = run([f"{CHECKING()}/10_lock", server.address, "1"], "shm")
        client.wait_for("^checking$")
        vandal.write(LEDGERS, 6, 5, 1)  # five changes of ours, and that of the client
        vandal.write(TURN, 2 * 256)
        vandal.write(LEDGERS + 2 * 72, 9)  # where the client's turn has left it
        assert client.wait() == 0, client.output
    server.stop()


@pytest.mark.parametrize("words", [(0, 7), (1, 0xd214225a9e084f29)], ids=["version", "data"])
def test_torn_records(run, serve, words):
    """A record with half of a version, 0, is not taken for a free one. Nor is one with a new
    version and old data, whose checksum is that of version 0, taken for a whole one. A
    client READs it 100 times."""
    server = serve("10_lock", "shm")
    vandal = Vandal(run, server)
    vandal.write(RECORDS, *(0, *words, *[0] * 29) * NUM_RECORDS)
    with vandal.saying(plain(TABLE_ALIVE)):
        client = server.check_client("4")  # one may look up what it has just written
    assert re.search("READs of half a WRITE: [1-4]00\n", client.output), client.output
    vandal.leave()
    server.stop()


@pytest.mark.builds("sanitized")
@pytest.mark.parametrize("reply", [
    struct.pack("<3Q2I", 4096, TABLE_SIZE, 1, 1, CLIENTS_AT_A_TIME),
    struct.pack("<3Q2I", 4096, 1 << 20, 1, 1, 0), b"", bytes(9)],
    ids=["seat", "size", "empty", "short"])
def test_bad_replies(run, build, reply):
    """A client does not join a server whose memory is not as it knows it."""
    server = FakeServer(run, build, "10_lock")
    assert server.receive_other_than(TABLE_ALIVE) == plain(JOIN)
    server.send(plain(TABLE_REPLY) + reply)
    server.client.check_error("bad message: ", 30)


# ---- Networks that are not here: see strict.cpp ----

AT_ONCE = {"STRICT_DELAY_US": "0", "STRICT_CQ_DELAY_US": "0", "STRICT_EAGAIN": "0"}


@takes_strict
@two_providers
def test_late_writes(run, serve, provider):
    """A ledger is in place before it becomes the valid one."""
    server = serve("10_lock", provider, **under_strict(run, **AT_ONCE))
    server.check_all([server.start_client("15", STRICT_WRITE_DELAY_US="20000")
                      for _ in range(2)])
    check_entries(server, 30)
    server.stop()


@takes_strict
@pytest.mark.thorough
def test_late_completions(run, serve):
    """A client whose own ledger is the valid one WRITEs the next one aside, and loses
    its turn before it can make that valid. So nobody ever sees it."""
    server = serve("10_lock", **under_strict(run, **AT_ONCE))
    slow = server.start_client("3", STRICT_LATE_WRITES_US=str(1_500_000 * LEASE))
    slow.wait_for("FETCH-AND-ADD and WRITE", 60)
    time.sleep(1.6 * LEASE)  # for its first change
    other = server.start_client("5")
    server.check_all([other, slow])
    assert turns(other)[1] >= 1 and turns(slow)[0] >= 1
    assert check_left(server) == [8, 0, 8]
    server.stop()


@takes_strict
def test_no_atomics(run, build):
    """A provider without atomics is refused at the start, by its name."""
    refused = {"tcp": under_strict(run, STRICT_LACKS="atomics")}
    if "net" in PROVIDERS:
        refused["net"] = {}  # it has none on any day
    for provider, env in refused.items():
        for address in [], ["0200a3c90a0000010000000000000000"]:
            process = run([f"{build}/10_lock", *address], provider, **env)
            process.check_error(r"fi_(fetch|compare)_atomicvalid \(try another provider\): ")
