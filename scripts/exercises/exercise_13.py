"""Exercise 13: a client of the crowd has several texts on their way, up to WINDOW,
and fewer of them as long as the server is slow. The last line tells how many there were:
`Windows: up to 8, halved 3 times.`"""

import re
import signal
import time

import pytest

pytestmark = pytest.mark.builds("plain")

WINDOWS = r"Windows: up to (\d+), halved (\d+) times\.\n$"


def windows(client, num_replies):
    """What its last line says, if all is well otherwise."""
    assert client.wait(60) == 0, client.output
    assert f"\n{num_replies} texts, all correct, " in client.output
    line = re.search(WINDOWS, client.output)
    assert line, client.output
    return int(line[1]), int(line[2])


def texts(server):
    """How many the server has handled, once they become no more."""
    count = -1
    while True:
        time.sleep(1.2)  # it tells every half second
        lines = re.findall(r"^\d+ clients, (\d+) texts so far$", server.process.output, re.M)
        if int(lines[-1]) == count:
            return count
        count = int(lines[-1])


@pytest.mark.parametrize("provider", ["", "shm"], ids=["default", "shm"])
def test_window_grows(serve, provider):
    """From 1 to WINDOW, which is 1 if nothing else is said."""
    server = serve("13_crowd", provider)
    assert windows(server.start_client("3", "500"), 1500) == (1, 0)
    assert windows(server.start_client("3", "2000", WINDOW="8"), 6000)[0] == 8
    assert "forgotten" not in server.process.output
    server.stop()


def test_wrong_window(serve):
    """More than 8 is a wrong argument: half of what the server permits."""
    server = serve("13_crowd")
    for window in "0", "9", "x":
        client = server.start_client("1", "10", WINDOW=window)
        assert client.wait() == 2, client.output
    assert windows(server.start_client("1", "2000", WINDOW="8"), 2000)[0] == 8
    server.stop()


def test_window_shrinks(serve):
    """When the server stands still for a moment."""
    server = serve("13_crowd")
    client = server.start_client("1", "2000", "1", WINDOW="8")
    client.wait_for("^1 clients are connected")
    time.sleep(0.5)
    server.process.signal(signal.SIGSTOP)
    time.sleep(0.3)
    server.process.signal(signal.SIGCONT)
    largest, halved = windows(client, 2000)
    assert largest == 8
    assert halved >= 1
    server.stop()


def test_texts_on_their_way(serve):
    """A server that stands still finds more than one text, when it goes on."""
    server = serve("13_crowd")
    for _ in range(3):  # on a busy machine, the window may just have been halved
        client = server.start_client("1", "1000", "100", WINDOW="8")
        client.wait_for("^1 clients are connected")
        time.sleep(4)
        line = server.process.wait_for(r"^1 clients, (\d+) texts so far$",
                                       after=len(server.process.lines))
        server.process.signal(signal.SIGSTOP)
        time.sleep(2)
        client.signal(signal.SIGSTOP)
        server.process.signal(signal.SIGCONT)
        found = texts(server) - int(line[1])
        client.signal(signal.SIGCONT)
        client.signal(signal.SIGINT)
        client.wait()
        if found >= 4:
            break
    assert 4 <= found <= 10
    server.stop()
