"""When 12_sleep sleeps, and what wakes it. That it is as right as the others is in the
tests of all programs; test_data sends 1000 texts over each provider."""

import re
import signal
import time

import pytest

from fakes import FakeClient, FakeServer
from harness import (BUILD, PROVIDERS, Server, provider_in, shares_of_a_core,
                     under_strict)
from marks import not_over_verbs, takes_strict
from messages import TEXT, plain
from repository import variant
from test_strict import SHORT_DELAYS, check_rules

PROGRAM = "12_sleep"
# Whether a completion queue has a descriptor. Adapters have, or not.
WAKES = {"tcp;ofi_rxm": True, "tcp": True, "net": True, "sockets": True, "shm": False,
         "udp;ofi_rxd": False}
# Who sleeps takes nothing. That of net is always readable, once there is a connection:
# pauses take less than 1 % of a core, and no pause half of one.
SLEEPY = 0.05
# A client that leaves before its first message was seen would end a server over shm.
STOPPABLE = [provider for provider in PROVIDERS if provider != "shm"]


def check_asleep(processes):
    """Of each, only the main thread is looked at: the provider sockets has one of its own,
    which polls as long as anything is in flight."""
    # On a busy machine, the first seconds may still be about the start.
    for _ in range(3):
        shares = shares_of_a_core(processes, 2, main_thread=True)
        if max(shares) < SLEEPY:
            return
    assert max(shares) < SLEEPY, shares


def test_asleep(run, serve):
    """A server whose client says nothing. It tells whether something can wake it; it
    takes next to nothing either way, and ends when it is asked to."""
    servers = [serve(PROGRAM, provider) for provider in PROVIDERS]
    for server in servers:
        output = server.process.output
        wakes = WAKES.get(provider_in(output), "We sleep until" in output)
        assert ("We sleep until" in output) == wakes
        assert ("Nothing can wake us" in output) != wakes
        FakeClient(run, server).open_session()
    check_asleep([server.process for server in servers])
    for server in servers:
        server.stop()


def test_long_pauses(run, serve):
    """Where nothing wakes a server, it looks every 20 ms after 1.3 s of silence."""
    server = serve(PROGRAM, "shm")
    FakeClient(run, server).open_session()
    time.sleep(1.5)
    before, started = server.process.pauses(), time.monotonic()
    time.sleep(2)
    # A busy machine only makes them longer.
    assert 0 < (server.process.pauses() - before) / (time.monotonic() - started) <= 65
    server.stop()


# Only a completion or a signal wakes it within the hour. With SIGNAL=1 in its environment,
# the signal comes at the worst moment: after the program has looked for one, and before it
# sleeps. With BRAKE=1, wake-ups for nothing cost it more.
HEAVY_SLEEPER = variant(
    PROGRAM,
    ("constexpr auto kMaxSleep = 500ms;", "constexpr auto kMaxSleep = 3600000ms;"),
    ("kSilenceLimit = 10s;", "kSilenceLimit = 1000s;"),
    ("        ret = poll(",
     '        if (getenv("SIGNAL") != nullptr) raise(SIGINT);\n        ret = poll('),
    ("silence / 64, kIdlePause",
     'silence / 64, domain.empty_wakes >= kEmptyWakes && getenv("BRAKE") ? 20ms : kIdlePause'))


@not_over_verbs("the adapter of a process that is stopped still answers")
def test_client_asleep(serve):
    """A client of a server that is stopped, until it is asked to end. It does not give up
    before, however long the machine takes to start them all."""
    servers = [serve(PROGRAM, provider) for provider in STOPPABLE]
    for server in servers:
        server.process.signal(signal.SIGSTOP)
        server.path = f"{HEAVY_SLEEPER()}/{PROGRAM}"
    clients = [server.start_client() for server in servers]
    for client in clients:
        client.wait_for("^domain: ")
    check_asleep(clients)
    for client in clients:
        client.interrupt()


def test_gives_up(run):
    """A server that falls silent wakes nobody, so a client sleeps only for a while."""
    FakeServer(run, BUILD, PROGRAM).client.check_error("nothing has happened for 10 s while ")


def test_a_later_answer(run):
    """A client compares each answer, though it prints none."""
    server = FakeServer(run, BUILD, PROGRAM)
    for _ in range(2):
        text = server.receive()
        server.send(plain(TEXT) + text[:3:-1])
    assert server.receive()[:4] == plain(TEXT)
    server.send(plain(TEXT) + b"another")
    server.client.check_error("the text is not correct$", 30)


# ---- No time-out wakes anybody ----

@pytest.mark.parametrize("provider", [
    provider for provider in PROVIDERS if provider in ("", "net")],
    ids=lambda provider: provider or "default")
def test_woken(run, provider):
    """Each message wakes the other side, and so does a signal."""
    server = Server(run, HEAVY_SLEEPER(), PROGRAM, provider)
    server.check_client(timeout=30)
    server.check_client("x" * 5000, timeout=30)
    server.stop()


@takes_strict
def test_woken_once(run):
    """Through shm, with a descriptor that only an fi_trywait makes sensitive again. What
    there was no room for is posted all the same. Between the texts, of which there are a
    thousand, both sides sleep."""
    server = Server(run, HEAVY_SLEEPER(), PROGRAM, "shm", BRAKE="1",
                    **under_strict(run, STRICT_WAIT="1", STRICT_EAGAIN="60",
                                   **SHORT_DELAYS[PROGRAM]))
    client = server.check_client(timeout=60)
    server.process.wait_for(r"^\[1\] Done\.$")
    server.stop()
    check_rules(client, server.process)
    for process in client, server.process:
        assert int(re.search(r" poll\(2\)=(\d+)", process.output)[1]) > 50


def test_signal_before_sleep(run):
    """A signal that comes just before poll(2) interrupts nothing, and ends the sleep all
    the same."""
    server = run([f"{HEAVY_SLEEPER()}/{PROGRAM}"], SIGNAL="1")
    assert server.wait() == 0, server.output
