"""What only 8_malloc has: a pool that is lent in pieces. Whatever its clients ask
for, and however they go, nobody gets memory of others, and all of it comes back."""

import concurrent.futures
import os
import random
import re
import signal
import struct
import subprocess
import time

import pytest

from fakes import Borrower, FakeServer
from harness import BUILD, LIBFABRIC_LEAKS, PROVIDERS, Server
from marks import sturdy_providers
from messages import (ACCEPT, ALIVE, BYE, FREE, MALLOC, USAGE, alive, base, reply,
                      request)
from repository import ROOT, variant

POOL = 256 << 20  # bytes
ALIGN = 64  # bytes
WHOLE = f"the pool lends 0 bytes in 0 pieces, and has {POOL} free in 1"
# How many clients test_killed_clients kills. KILLS=50 takes minutes.
KILLS = int(os.environ.get("KILLS", "3"))

two_providers = pytest.mark.parametrize("provider", ["", "shm"],
                                        ids=["default", "shm"])


def wait_for_seats(server, taken):
    """Waits until the server serves no more clients than that. A client that has
    gone without a word keeps its seat for 10 s. Returns what the server said about
    its pool when the last one had gone."""
    end = time.monotonic() + 40
    while True:
        output = server.process.output
        served = re.findall(r"^\[\d+\] Received CONNECT", output, re.M)
        gone = re.findall(r"^\[\d+\] (the pool .*)\n", output, re.M)
        if len(served) - len(gone) <= taken:
            return gone[-1] if gone else ""
        assert time.monotonic() < end, output
        time.sleep(0.01)


def check_whole(server):
    """Once all clients have gone."""
    assert wait_for_seats(server, 0) == WHOLE, server.process.output


def test_allocator(build):
    """A million random calls, or fewer where they take long. Each has to do what a
    simple model expects."""
    calls = "100000" if "sanitized" in build else "1000000"
    done = subprocess.run([f"{build}/allocator", calls], cwd=ROOT, text=True,
                          capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- Requests ----

@pytest.mark.builds("sanitized")
@two_providers
def test_pieces(run, serve, provider):
    """Where pieces of two clients lie, and what becomes of them."""
    server = serve("8_malloc", provider)
    one, two = Borrower(run, server), Borrower(run, server)
    sizes = [1, 63, 64, 65, 4096, 1 << 20, 100 << 20, 1000003]
    pieces = {}
    for size in sizes:
        for client in one, two:
            pieces[client.borrow(size)] = size
    start, end = min(pieces), max(addr + size for addr, size in pieces.items())
    assert end - start <= POOL
    for (addr, size), after in zip(sorted(pieces.items()),
                                   sorted(pieces)[1:] + [start + POOL]):
        assert (addr - start) % ALIGN == 0
        assert addr + size <= after
    lent = sum((size + ALIGN - 1) // ALIGN * ALIGN for size in sizes)
    assert one.ask(USAGE).lent == two.ask(USAGE).lent == lent
    # One goes with what it has, the other one gives its pieces back.
    assert one.leave().startswith(f"the pool lends {lent} bytes in {len(sizes)} ")
    given_back = 0
    for addr in pieces:
        given_back += not two.ask(FREE, addr=addr).error
    assert given_back == len(sizes)
    assert two.ask(USAGE).lent == 0
    two.borrow(POOL)
    assert two.leave() == WHOLE
    assert not server.errors()
    server.stop()


@pytest.mark.builds("sanitized")
@two_providers
def test_refusals(run, serve, provider):
    """Requests that cannot be met have an answer that says why, and change
    nothing: not what their client has, nor what others have."""
    server = serve("8_malloc", provider)
    client, other = Borrower(run, server), Borrower(run, server)
    mine, theirs = client.borrow(1000), other.borrow(ALIGN)
    freed = client.borrow(ALIGN)
    client.give_back(freed)

    def check_refused(*args, **kwargs):
        reply = client.ask(*args, **kwargs)
        assert re.fullmatch("[ -~]+", reply.error)
        assert (reply.addr, reply.size, reply.key) == (0, 0, 0)
        for reply in reply, client.ask(USAGE):
            assert reply.lent == 1024
        assert other.ask(USAGE).lent == ALIGN

    for size in [0, POOL, POOL + 1, 2**32, 2**63, 2**64 - ALIGN, 2**64 - 63,
                 2**64 - 1]:
        check_refused(MALLOC, size)
    # Where pieces begin at 0, so does ours.
    for addr in [2**64 - 1, freed, theirs, mine + 1, mine + ALIGN, mine - ALIGN,
                 mine + POOL]:
        check_refused(FREE, addr=addr % 2**64)
    other.give_back(theirs)
    client.give_back(mine)
    # All of it, and then nothing more.
    everything = client.borrow(POOL)
    for asking in client, other:
        for size in POOL, 1:
            assert "left" in asking.ask(MALLOC, size).error
    assert client.ask(USAGE).lent == POOL
    client.give_back(everything)
    assert other.leave() == client.leave() == WHOLE
    assert not server.errors()
    server.check_client(*server.entry.short)
    server.stop()


FEW = variant("8_malloc", ("kMaxBlocks = 10'000;", "kMaxBlocks = 3;"))


@pytest.mark.thorough
def test_many_pieces(run):
    """A client has so many pieces at most, 3 here. It gets another one for one that it
    gives back."""
    server = Server(run, FEW(), "8_malloc")
    client, other = Borrower(run, server), Borrower(run, server)
    addr, *_ = [client.borrow(1) for _ in range(3)]
    refused = client.ask(MALLOC, 1)
    assert "too many pieces" in refused.error and refused.lent == 3 * ALIGN
    other.borrow(1)
    client.give_back(addr)
    client.borrow(1)
    client.leave()
    assert other.leave() == WHOLE
    server.stop()


@pytest.mark.builds("sanitized")
def test_a_bad_end(run, serve):
    """A client that is sent away because of a message: its pieces come back, and
    those of others stay."""
    server = serve("8_malloc")
    client, other = Borrower(run, server), Borrower(run, server)
    other.borrow(64)
    client.borrow(100 << 20)
    client.send(base(99))
    client.expect("error: bad message: ")
    assert server.pool_line(client.number).startswith(
        "the pool lends 64 bytes in 1 pieces")
    other.borrow(POOL - 64)
    assert other.leave() == WHOLE
    server.stop()


@pytest.mark.builds("plain")
@two_providers
@pytest.mark.thorough
def test_flood(run, serve, provider):
    """A client that asks and asks, and takes no answer. It costs the server no
    memory to speak of, and others nothing."""
    server = serve("8_malloc", provider)
    client = Borrower(run, server)
    # libfabric keeps some of what it has needed for a later use.
    for number in 2, 3:
        server.check_client(*server.entry.short)
        server.pool_line(number)
    before = server.memory()
    already = len(client.process.lines)
    for _ in range(200):
        client.process.write(client.send_line(request(MALLOC, ALIGN)))
    client.process.wait_for("^sent", 30, count=200, after=already)
    other = server.check_client(*server.entry.short)
    assert other.seconds < 8
    pieces = int(re.search(r" in (\d+) pieces", server.pool_line(4))[1])
    # tcp takes the answers, which its sender does not know of. Over shm of libfabric
    # 1.17 they wait for it, and the server waits with what it asks for next.
    assert provider != "shm" or "net" not in PROVIDERS or pieces <= 2
    assert server.memory() < before + 50000
    client.process.signal(signal.SIGKILL)
    client.process.wait()
    check_whole(server)
    server.check_client(*server.entry.short)
    server.stop()


# ---- Clients that go ----

@pytest.mark.builds("sanitized")
@sturdy_providers
def test_killed_clients(serve, provider):
    """Clients that are killed at any moment, while another one is there. They
    cost that one nothing, and their pieces come back."""
    server = serve("8_malloc", provider, **LIBFABRIC_LEAKS)
    with server.others(count=1):
        for _ in range(KILLS):
            wait_for_seats(server, 5)
            client = server.start_client("32")
            client.wait_for("Sent CONNECT")
            time.sleep(random.uniform(0, 0.5))
            client.signal(signal.SIGKILL)
            client.wait()
    check_whole(server)
    server.check_client()
    server.stop()


@pytest.mark.builds("plain")
def test_stopped_client(run, serve):
    """A client that is stopped while it has pieces. They come back after the limit
    of 10 s. One that says no more than that it is alive keeps its piece."""
    server = serve("8_malloc")
    living = Borrower(run, server)
    living.borrow(64)
    with living.saying(alive()):
        # Its WRITEs never begin, so it does not end before it is stopped.
        client = server.start_client("64", LD_PRELOAD=os.path.join(ROOT, BUILD, "reorder.so"),
                                     REORDER_MS="600000")
        client.wait_for("Borrowed")
        client.signal(signal.SIGSTOP)
        number = server.process.wait_for(r"^\[(\d+)\] Received CONNECT", count=2)[1]
        server.process.wait_for(
            rf"^\[{number}\] error: waiting for the client: nothing has happened")
        assert server.pool_line(number).startswith("the pool lends 64 bytes in 1 ")
        client.signal(signal.SIGCONT)
        assert client.wait() == 1, client.output
    assert "error: " in client.output
    assert living.leave() == WHOLE
    assert len(server.errors()) == 1
    server.stop()


# ---- Clients that fail ----

def check_left(server, client, number, error):
    """The client has failed and said BYE. So the server has its place and its
    pieces back at once, and not only after the limit of 10 s."""
    assert client.wait() == 1, client.output
    assert client.output.endswith(f"\nerror: {error}\n")
    assert server.pool_line(number) == WHOLE
    assert f"[{number}] Done.\n" in server.process.output
    assert not server.errors()


@pytest.mark.builds("plain")
def test_too_much(serve):
    """A client that wants more than there is. Others can have the memory again."""
    server = serve("8_malloc", "shm")
    check_left(server, server.start_client("2000"), 1,
               "the server refuses: the pool has no piece of this size left")
    server.check_client("400")
    server.stop()


@pytest.mark.builds("sanitized")
@two_providers
@pytest.mark.thorough
def test_interrupted(serve, provider):
    """Clients that are interrupted among their WRITEs, and among their READs."""
    server = serve("8_malloc", provider)
    for number, moment in enumerate(["Borrowed", "Filled"], 1):
        client = server.start_client("400")
        client.wait_for(f"^{moment} ")
        client.signal(signal.SIGINT)
        check_left(server, client, number, "interrupted")
    server.check_client()
    server.stop()


# Answers to a MALLOC, by what the client then says.
BAD_ANSWERS = {
    "the server refuses: no": reply(b"no"),
    "the server refuses: x{103}": reply(b"x" * 104),
    "bad message: 143 bytes of type 9": reply(lent=2**64 - 1)[:-1],
    "bad message: 144 bytes of type 2": base(ACCEPT) + reply()[8:],
    "bad message: a piece of another size": reply(size=1),
    "(WRITE|an operation) failed: .*": None,  # the piece is nowhere
}


@pytest.mark.builds("sanitized")
@two_providers
def test_bad_answers(run, build, provider):
    """A client does not believe all of them, and says BYE even to a server that
    lies."""
    answers = dict(BAD_ANSWERS)
    if provider != "shm" or "net" not in PROVIDERS:
        # Others may close the connection. Over shm of libfabric 2.6, the server
        # does not get the BYE. (net went with 1.18.)
        answers.popitem()

    def check(error):
        server = FakeServer(run, build, "8_malloc", "1", provider=provider)
        message = server.receive_other_than(ALIVE)
        assert message[:8] == base(MALLOC)
        (size,) = struct.unpack_from("<Q", message, 8)
        server.send(answers[error] or reply(addr=8, size=size, key=99, lent=size))
        assert server.receive_other_than(ALIVE) == base(BYE), error
        assert server.client.wait() == 1
        assert re.search(f"\nerror: {error}\n$", server.client.output), \
            server.client.output

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(check, answers))


# ---- Much at a time ----


@pytest.mark.builds("plain")
@two_providers
def test_nearly_everything(serve, provider):
    """Two clients at once, which borrow 220 of the 256 MiB, give or take 6."""
    server = serve("8_malloc", provider)
    clients = [server.start_client("220") for _ in range(2)]
    for client in clients:
        assert client.wait() == 0, client.output
        assert "Data is correct." in client.output
    check_whole(server)
    assert not server.errors()
    server.stop()
