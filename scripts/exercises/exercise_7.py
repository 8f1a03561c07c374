"""Exercise 7: how long does the queue get? The server's last line for a client
ends with the greatest length that pending_ops has had: `, queued=N`."""

import re

import pytest


def transfer(server, page_size, num_pages, repeat):
    """Has pages written. Returns how often there was no room for an operation,
    and how long the queue got."""
    already = len(server.process.lines)
    server.check_client(str(page_size), str(num_pages), str(repeat))
    total = num_pages * repeat
    line = server.process.wait_for(rf"^.* {total}/{total}, .*$", after=already)[0]
    match = re.search(r", EAGAIN=([0-9]+), queued=([0-9]+)$", line)
    assert match, line
    return int(match[1]), int(match[2])


@pytest.mark.parametrize("provider", ["", "shm"], ids=["default", "shm"])
def test_no_room(serve, provider):
    """Whatever had to wait was in the queue. The queue never gets long."""
    server = serve("7_queue", provider)
    for page_size in [64, 65536]:
        eagain, queued = transfer(server, page_size, 1000, 3)
        assert queued <= 8
        assert queued >= 1 or eagain == 0
    server.stop()


def test_room(serve):
    """A provider that has room for a few WRITEs: none of them has waited. Each may
    have passed through the queue, though."""
    server = serve("7_queue", "sockets")
    eagain, queued = transfer(server, 4096, 10, 1)
    assert eagain == 0 and queued <= 1
    server.stop()
