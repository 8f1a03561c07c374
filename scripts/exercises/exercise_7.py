"""Exercise 7: how long does the queue get? The server's last line for a client
ends with the greatest length that pending_ops has had: `, queued=N`."""

import re

import pytest

pytestmark = pytest.mark.builds("plain")


def transfer(server, page_size, num_pages, repeat):
    """Has pages written. Returns how often there was no room for an operation,
    and how long the queue got."""
    already = len(server.process.lines)
    server.check_client(str(page_size), str(num_pages), str(repeat))
    total = 2 * num_pages * repeat
    line = server.process.wait_for(rf"^.* {total}/{total}, .*$", 5,
                                   after=already)[0]
    match = re.search(r", EAGAIN=([0-9]+), queued=([0-9]+)$", line)
    assert match, line
    return int(match[1]), int(match[2])


@pytest.mark.parametrize("provider", ["", "shm"], ids=["default", "shm"])
def test_no_room(serve, provider):
    """Where there was no room, something has waited. It need not wait any more
    when the line is printed."""
    server = serve("7_queue", provider)
    for _ in range(2):
        eagain, queued = transfer(server, 65536, 1000, 3)
        if eagain > 0:
            assert 1 <= queued <= 8
        else:  # there always was some
            assert queued == 0
    server.stop()


def test_room(serve):
    """A provider that has room for a few WRITEs: nothing has waited."""
    server = serve("7_queue", "sockets")
    assert transfer(server, 4096, 10, 1) == (0, 0)
    server.stop()
