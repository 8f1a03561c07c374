"""Exercise 13: a server that a signal ends says so to all its clients, by a BYE. Each ends
then: `error: the server has left`."""

import signal
import time

import pytest


def crowd(server, *arguments):
    """Some clients in a process, once they are connected."""
    client = server.start_client(*arguments)
    client.wait_for(f"^{arguments[0]} clients are connected")
    return client


def check_goodbye(server, *crowds):
    """The server ends soon, and so do its clients."""
    server.process.wait_for(r"clients, \d+ texts so far")
    start = time.monotonic()
    server.stop()
    for clients in crowds:
        assert clients.wait() == 1, clients.output
        assert "error: the server has left\n" in clients.output, clients.output
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("provider", ["", "shm"], ids=["default", "shm"])
def test_all_hear_it(serve, provider):
    """Also clients that have asked for nothing."""
    server = serve("13_crowd", provider)
    check_goodbye(server, crowd(server, "20", "1000", "200"), crowd(server, "3", "9", "60000"))


@pytest.mark.parametrize("provider", ["", "shm"], ids=["default", "shm"])
def test_one_stands_still(serve, provider):
    """It keeps neither the server nor the others."""
    server = serve("13_crowd", provider)
    still, others = (crowd(server, "2", "1000", "200") for _ in range(2))
    still.signal(signal.SIGSTOP)
    check_goodbye(server, others)
    still.signal(signal.SIGKILL)
    still.signal(signal.SIGCONT)


def test_answers_are_right(serve):
    """As before."""
    server = serve("13_crowd")
    client = server.start_client("20", "100")
    assert client.wait() == 0 and "\n2000 texts, all correct, " in client.output
    server.stop()
