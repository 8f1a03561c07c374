"""2_first: what chapters 2 and 4 say about it. It is no program of TABLE: its server takes
one message and ends, and a client that nobody answers is silent."""

import contextlib
import re
import socket
import subprocess

import pytest

from harness import LIBFABRIC_LEAKS, OVER_VERBS, AnyServer, nobody_at, under_strict
from marks import each_provider, takes_strict, two_providers

PROGRAM = "2_first"
# For a client that nobody answers. 4_hello gives up after 10.
SILENT = 2  # seconds


@pytest.fixture
def first(run, build):
    """Starts a server: first("shm")."""
    return lambda provider="", **env: AnyServer(run, build, PROGRAM, provider, **env)


@pytest.mark.builds("plain", "sanitized")
@each_provider
def test_one_message(first, provider):
    """Of any length, also of none. What is longer than the buffer is cut."""
    for text in "Hello, world!", "", "x", "x" * 20000, "x" * 65536:
        # The client's completion of such a message never comes over shm.
        if text or provider != "shm":
            server = first(provider)
            client = server.check_client(text)
            assert server.received() == f"{len(text)} bytes: {text}"
            for process in client, server.process:
                assert re.search(r"^domain: \S+, fabric: \S+, provider: \S", process.output, re.M)
    server = first(provider)
    client = server.start_client("x" * 70000)
    assert client.wait() == 0 and "\nSent 65536 bytes.\n" in client.output
    assert server.received() == "65536 bytes: " + "x" * 65536


@each_provider
def test_nobody_there(first, provider):
    """A client whose server has ended is silent. Only sockets says something."""
    server = first(provider)
    server.check_client()
    server.received()
    with nobody_at(server.address):
        client = server.start_client()
        if provider == "sockets":
            client.check_error("fi_send: ")
            return
        with pytest.raises(subprocess.TimeoutExpired):
            client.wait(SILENT)
    # Its only line is still in the buffer of a pipe.
    assert not client.output
    client.kill()


@each_provider
def test_two_messages(first, provider):
    """One is printed. The client of the other one may say that it was sent, stand still,
    or end with an error. (libfabric itself leaks where a connection breaks while it is
    being made.)"""
    server = first(provider, **LIBFABRIC_LEAKS)
    clients = {text: server.start_client(text) for text in ["one", "two"]}
    received = server.received()
    assert received in ["3 bytes: one", "3 bytes: two"]
    client = clients.pop(received[-3:])
    assert client.wait() == 0 and "\nSent 3 bytes.\n" in client.output
    [client] = clients.values()
    try:
        client.wait(SILENT)
    except subprocess.TimeoutExpired:
        client.kill()


def test_one_digit(first):
    """Exercise 3 of chapter 2: over tcp, the first digits say what kind of address it is,
    and nobody looks at the others."""
    if OVER_VERBS:
        pytest.skip("about addresses of tcp")
    server = first()
    good = server.address
    server.address = good[1:]
    server.start_client().check_error("fi_av_insert: Invalid argument$")
    # A digit of the port: of one that no server of another test has, or gets meanwhile.
    with socket.socket() as kept:
        for digit in set("0123456789abcdef") - {good[7]}:
            server.address = good[:7] + digit + good[8:]
            with contextlib.suppress(OSError):
                kept.bind(("", int(server.address[4:8], 16)))
                break
        client = server.start_client()
        with pytest.raises(subprocess.TimeoutExpired):
            client.wait(SILENT)
    client.kill()
    server.address = good
    server.check_client()
    server.received()


@takes_strict
@two_providers
def test_strict(run, first, provider):
    """It breaks one of EFA's rules: it has no event queue, which chapter 4 brings."""
    for text in "Hello, world!", "x" * 3000:
        server = first(provider, **under_strict(run))
        client = server.start_client(text)
        for process in client, server.process:
            assert process.wait() == 0, process.output
            assert set(re.findall("strict: VIOLATION of (.*?):", process.output)) == {"eq"}
            assert "rules broken: 1 " in process.output
        assert f"Received {len(text)} bytes: {text}\n" in server.process.output
