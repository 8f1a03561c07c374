"""Exercise 9: how often did the sender wait? The client prints how many chunks were
read before there was a credit for them: `Waited for a credit: N times`."""

import re

import pytest

pytestmark = pytest.mark.builds("plain")

CHUNK = 1 << 20  # bytes


def waits(client):
    match = re.search(r"^Waited for a credit: ([0-9]+) times$", client.output, re.M)
    assert match, client.output
    return int(match[1])


@pytest.mark.parametrize("slots,chunks,expected", [
    (1, 5, 4), (2, 6, 4), (8, 4, 0)])
def test_slow_disk(serve, slots, chunks, expected):
    """Saving a chunk takes much longer than reading one, so each chunk waits, but
    for those that find a slot that is still unused. It counts once, however long
    it waits."""
    server = serve("9_file", SLOW_DISK_MS="300")
    client = server.check_client(str(chunks * CHUNK), str(slots))
    assert waits(client) == expected
    server.stop()


def test_nothing_to_wait_for(serve):
    """A file without a single chunk."""
    server = serve("9_file")
    assert waits(server.check_client("0")) == 0
    server.stop()
