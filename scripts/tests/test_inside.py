"""What nobody sees of a program from the outside: inside_queue.cpp, inside_strangers.cpp
and inside_lock.cpp contain the code of 7_queue, 14_strangers and 10_lock."""

import os
import signal

import pytest

from harness import BUILD
from marks import each_provider, two_providers
from repository import ROOT

# They are built once, without sanitizers.


def try_inside(run, program, *check, provider="", status=0):
    process = run([os.path.join(ROOT, BUILD, program), *check], provider)
    assert process.wait(30) == status, process.output
    return process


@each_provider
def test_order(run, provider):
    """Operations for which there is no room wait in a queue in which none overtakes
    another, whatever the network is."""
    try_inside(run, "inside_queue", "order", provider=provider)


@two_providers
def test_signal_before_an_endpoint(run, provider):
    """The shm provider sets handlers of its own whenever an endpoint is opened, and we
    set ours again: after a first signal, the second one must have its effect."""
    try_inside(run, "inside_queue", "signal", provider=provider,
               status=128 + signal.SIGINT)


@two_providers
@pytest.mark.parametrize("check", ["pages", "silence", "leave", "line", "renew"])
def test_server_of_strangers(run, check, provider):
    """A server that makes pages for one client looks at the others in between. A client
    that waits for its pages is not silent. One that is refused keeps its place until it
    hears so, but not for long. One in line is told once, and forgotten; the
    endpoint that tells it is closed after a while, or soon after it has told many."""
    try_inside(run, "inside_strangers", check, provider=provider)


@two_providers
@pytest.mark.parametrize("check", ["flight", "room"])
def test_server_of_a_queue(run, check, provider):
    """A server bounds what is in flight, and what waits for room, and posts the last WRITE
    when all others have completed. It reports once its last report has arrived."""
    try_inside(run, "inside_queue", check, provider=provider)


@two_providers
def test_ledger_that_changes(run, provider):
    """A client that READs the ledger without a lock READs it again if it is not the
    valid one any more. A record with half of a version is not taken for a free one, nor one
    with a new version and old data for a whole one."""
    assert "READs: 2," in try_inside(run, "inside_lock", provider=provider).output
