"""Exercise 8: in how large a piece can the pool still lend? The server's line about
its pool ends with the size of the largest free piece: `, the largest of N bytes`."""

import re

import pytest

from fakes import Borrower
from messages import ALIVE, plain

pytestmark = pytest.mark.builds("plain")

POOL = 256 << 20  # bytes


def free_pieces(line):
    """Returns what the line says about free memory: all of it, in how many pieces,
    and the largest of them."""
    match = re.search(r", and has ([0-9]+) free in ([0-9]+), the largest of ([0-9]+) "
                      "bytes$", line)
    assert match, line
    return tuple(map(int, match.groups()))


@pytest.mark.parametrize("provider", ["", "shm"], ids=["default", "shm"])
def test_whole(serve, provider):
    """Nothing is lent any more: the largest piece is the whole pool."""
    server = serve("8_malloc", provider)
    for number in 1, 2:
        server.check_client("8")
        assert free_pieces(server.pool_line(number)) == (POOL, 1, POOL)
    server.stop()


def test_holes(run, serve):
    """Clients that go leave holes between the pieces of those that stay."""
    server = serve("8_malloc")
    clients = []
    for size in [100 << 20, 64, 50 << 20, (106 << 20) - 128, 64]:
        clients.append(Borrower(run, server))
        clients[-1].borrow(size)
        # It may take long to start them on a busy machine.
        for client in clients:
            client.send(plain(ALIVE))
    # The last ones lie at the end, so what becomes free is a hole at first.
    first, _, third, fourth, last = clients
    assert free_pieces(third.leave()) == (50 << 20, 1, 50 << 20)
    assert free_pieces(first.leave()) == (150 << 20, 2, 100 << 20)
    assert free_pieces(fourth.leave()) == ((256 << 20) - 128, 2, (156 << 20) - 128)
    assert free_pieces(last.leave()) == (POOL - 64, 2, (156 << 20) - 64)
    server.stop()


def test_nothing_free(run, serve):
    """There is no largest piece where there is none: it has 0 bytes."""
    server = serve("8_malloc")
    guest, owner = Borrower(run, server), Borrower(run, server)
    owner.borrow(POOL)
    assert free_pieces(guest.leave()) == (0, 0, 0)
    server.stop()
