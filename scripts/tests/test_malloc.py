"""What only 8_malloc has: a pool that is lent in pieces. Whatever its clients ask
for, and however they go, nobody gets memory of others, and all of it comes back."""

import os
import random
import re
import signal
import struct
import subprocess
import time

import pytest

from fakes import Borrower, FakeServer
from harness import LIBFABRIC_LEAKS, under_strict, wait_until
from marks import takes_strict, two_providers
from messages import ACCEPT, ALIVE, FREE, MALLOC, REFUSAL, plain, reply, type_of
from repository import ROOT

POOL = 256 << 20  # bytes
ALIGN = 64  # bytes
WHOLE = f"The pool lends 0 bytes in 0 pieces, and has {POOL} free in 1"
# How many clients test_killed_clients kills. KILLS=50 takes minutes.
KILLS = int(os.environ.get("KILLS", "3"))


def wait_for_seats(server, taken):
    """Waits until the server serves no more clients than that. A client that has
    gone without a word keeps its seat for 10 s."""
    def count(pattern):
        return len(re.findall(rf"^\[\d+\] (?:{pattern})", server.process.output, re.M))

    wait_until(lambda: count("Received CONNECT") - count("Done|error: ") <= taken, 40)


def check_whole(server):
    """Once all clients have gone."""
    wait_for_seats(server, 0)
    server.process.wait_for(f"^{WHOLE}\n\\Z")


def test_allocator(build):
    """Each of many random calls has to do what a simple model expects. A client's piece comes
    back when its endpoint is closed."""
    done = subprocess.run([f"{build}/allocator", "300000"], cwd=ROOT, text=True,
                          capture_output=True, check=False, timeout=60,
                          env={**os.environ, **LIBFABRIC_LEAKS})
    assert done.returncode == 0, done.stdout + done.stderr


# ---- Requests ----

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
    for size in [0, POOL, POOL + 1, 2**32, 2**63, 2**64 - ALIGN, 2**64 - 63,
                 2**64 - 1]:
        assert client.refused(MALLOC, size) == "the pool has no piece of this size left"
    # Where pieces begin at 0, so does ours.
    for addr in [2**64 - 1, freed.addr, theirs.addr, mine.addr + 1, mine.addr + ALIGN,
                 mine.addr - ALIGN, mine.addr + POOL]:
        assert client.refused(FREE, addr % 2**64) == "this piece is not lent to you"
    guest = Borrower(run, server)
    assert guest.leave().startswith("The pool lends 1088 bytes in 2 pieces")
    other.give_back(theirs)
    client.give_back(mine)
    # All of it, and then nothing more.
    everything = client.borrow(POOL)
    for asking in client, other:
        for size in POOL, 1:
            assert "left" in asking.refused(MALLOC, size)
    client.give_back(everything)
    assert other.leave() == client.leave() == WHOLE
    assert not server.errors()
    server.check_client(*server.entry.short)
    server.stop()


# ---- Clients that go ----

@pytest.mark.builds("sanitized")
@two_providers
def test_killed_clients(serve, provider):
    """Clients that are killed at any moment, while another one is there. They
    cost that one nothing, and their pieces come back. (libfabric 1.17's shm has them
    take a lock in the server's memory, and a death may leave it locked: not each time.)"""
    def survives():
        server = serve("8_malloc", provider, **LIBFABRIC_LEAKS)
        try:
            with server.others(count=1):
                for _ in range(KILLS):
                    wait_for_seats(server, 5)
                    client = server.start_client("32")
                    client.wait_for("Borrowed")
                    time.sleep(random.uniform(0, 0.5))
                    client.kill()
        except AssertionError:
            if provider != "shm":
                raise
            server.process.signal(signal.SIGKILL)
            return False
        check_whole(server)
        server.check_client()
        server.stop()
        return True

    assert any(survives() for _ in range(3))


@takes_strict
def test_stopped_client(run, serve):
    """A client that is stopped while it has pieces. They come back after the limit of
    10 s. One that says no more than that it is alive keeps its pieces."""
    # No client hears of its WRITEs, so none ends before it is stopped.
    server = serve("8_malloc", **under_strict(run, STRICT_LATE_WRITES_US="600000000"))
    living, client = server.start_client("4"), server.start_client("64")
    living.wait_for("Borrowed")
    client.wait_for("Borrowed")
    client.signal(signal.SIGSTOP)
    server.process.wait_for(r"^\[\d+\] error: nothing has happened for 10 s")
    server.process.wait_for(r"^The pool lends \d+ bytes in 4 ")
    assert len(server.errors()) == 1
    client.signal(signal.SIGCONT)
    client.check_error("")
    living.signal(signal.SIGINT)
    check_whole(server)
    server.stop()


@takes_strict
def test_late_writes(run, serve):
    """On a network that takes its time for WRITEs, and none for READs, a client READs what
    it has written."""
    server = serve("8_malloc", "shm", **under_strict(run))
    client = server.start_client("4", STRICT_WRITE_DELAY_US="50000")
    client.wait_for("^READ and compared them")
    client.signal(signal.SIGKILL)


@takes_strict
@pytest.mark.long
@pytest.mark.thorough
def test_alive(run, serve):
    """A client that has nothing to ask for as long as its WRITEs take, which is longer than
    the limit of 10 s, keeps its pieces."""
    server = serve("8_malloc", **under_strict(run, STRICT_LATE_WRITES_US="6000000"))
    client = server.start_client("80")
    client.wait_for("^Borrowed")
    begun = time.monotonic()
    client.wait_for("^Filled", 60)
    assert time.monotonic() - begun > 12
    assert not server.errors()
    client.kill()


# ---- Clients that fail ----

@pytest.mark.builds("sanitized")
@two_providers
@pytest.mark.thorough
def test_interrupted(serve, provider):
    """Clients that are interrupted among their WRITEs, and among their READs."""
    server = serve("8_malloc", provider, **LIBFABRIC_LEAKS)
    for moment in "Borrowed", "Filled":
        client = server.start_client("400")
        client.wait_for(f"^{moment} ")
        client.interrupt()
        check_whole(server)
    server.check_client()
    server.stop()


# Answers to a MALLOC, by what the client then says.
BAD_ANSWERS = {
    "the server refuses: no": plain(REFUSAL) + b"no",
    "bad message: type 2": plain(ACCEPT) + bytes(24),
    "bad message: piece": reply(0, 1, 0),
    "(WRITE|an operation) failed: .*": None,  # the piece is nowhere
}


@pytest.mark.builds("sanitized")
@two_providers
def test_bad_answers(run, build, provider):
    """A client does not believe all of them."""
    answers = dict(BAD_ANSWERS)
    if provider == "shm":
        answers.popitem()  # it compares no keys
    for error, answer in answers.items():
        server = FakeServer(run, build, "8_malloc", "1", provider=provider)
        message = server.receive_other_than(ALIVE)
        assert type_of(message) == MALLOC
        (size,) = struct.unpack_from("<Q", message, 4)
        server.send(answer or reply(8, size, 99))
        if not answer:
            for _ in range(20):  # it works while it waits for a message
                server.process.write("wait")
        server.client.check_error(f"{error}\n\\Z")
