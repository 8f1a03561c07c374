"""Exercise 12: a deadline of the program's own. `12_sleep ADDRESS TEXT MS` sends a text
every MS milliseconds, and sleeps until it is time for the next one."""

import os
import signal
import time

import pytest

pytestmark = pytest.mark.builds("plain")

ENDS = "^Of 1000 answers, half took up to "


def cpu_seconds(process):
    """What a process has used of the processor so far."""
    with open(f"/proc/{process.popen.pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("provider", ["", "shm"], ids=["default", "shm"])
def test_pace(serve, provider):
    """A thousand texts, 4 ms from one to the next, take four seconds, and hardly any of
    the processor's time."""
    server = serve("12_sleep", provider)
    client = server.start_client("hello", "4")
    client.wait_for("^Sending ")
    start, used = time.monotonic(), cpu_seconds(client)
    time.sleep(2)
    assert client.popen.poll() is None, "it is faster than it should be"
    used = cpu_seconds(client) - used
    elapsed = time.monotonic() - start
    assert used < elapsed / 3, f"{used:.2f} s of the processor in {elapsed:.1f} s"
    assert client.wait() == 0, client.output
    client.wait_for(ENDS)
    assert client.seconds > 3.9
    server.stop()


def test_no_pace(serve):
    """Without a pace, each text follows the answer to the one before."""
    server = serve("12_sleep")
    for args in [[], ["hello"], ["hello", "0"]]:
        client = server.start_client(*args)
        assert client.wait() == 0, client.output
        client.wait_for(ENDS)
    server.stop()


def test_signal(serve):
    """A signal ends the wait, however long it still is."""
    server = serve("12_sleep")
    client = server.start_client("hello", "5000")
    client.wait_for("^Sending ")
    time.sleep(0.5)
    start = time.monotonic()
    client.signal(signal.SIGINT)
    assert client.wait() == 1, client.output
    assert time.monotonic() - start < 2
    assert "interrupted" in client.output
    server.stop()


def test_wrong_pace(serve):
    server = serve("12_sleep")
    client = server.start_client("hello", "x")
    assert client.wait() == 2, client.output
    assert "too many arguments" not in client.output
    server.stop()
