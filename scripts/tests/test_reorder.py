"""A network without order: the programs must not depend on more than the chapters
say. build/reorder.so (reorder.cpp) delays WRITEs, or their completions, which is
what FI_ORDER_NONE permits. Neither tcp nor shm ever does it."""

import os

import pytest

from fakes import FakeClient
from harness import BUILD, PROGRAMS, provider_in
from marks import two_providers
from messages import LONGEST
from repository import ROOT
from table import TABLE

# A library to be loaded first gets along with no sanitizer.
pytestmark = pytest.mark.builds("plain")
PRELOAD = {"LD_PRELOAD": os.path.join(ROOT, BUILD, "reorder.so")}
# The delays are in milliseconds.
DELAY = 300
LATE_WRITES = {**PRELOAD, "REORDER_MS": str(DELAY)}
LATE_COMPLETIONS = {**PRELOAD, "REORDER_MS": "0",
                    "REORDER_COMPLETIONS_MS": str(DELAY)}
each_program = pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if TABLE[p].once])


@two_providers
@each_program
def test_late_writes(serve, program, provider):
    """The WRITE that says that all pages are there overtakes every other one. So
    the server must not post it before the others have completed."""
    server = serve(program, provider, **LATE_WRITES)
    client = server.check_client(*server.entry.once, LD_PRELOAD="")
    assert client.seconds >= DELAY / 1000
    assert not server.errors()
    server.stop()


@two_providers
@each_program
def test_late_completions(serve, program, provider):
    """The client sees the last WRITE and says BYE before the server sees the
    completion of that WRITE. That costs nobody anything."""
    server = serve(program, provider, **LATE_COMPLETIONS)
    client = server.check_client(*server.entry.once, LD_PRELOAD="")
    assert client.seconds >= DELAY / 1000
    server.process.wait_for(r"^\[1\] Done")
    assert not server.errors()
    server.stop()


@two_providers
def test_short_keys(serve, provider):
    """Each key is as short as the provider wants it."""
    server = serve("6_write", provider, LD_PRELOAD=PRELOAD["LD_PRELOAD"], KEY_SIZE="4",
                   REORDER_MS="0")
    server.check_client(*server.entry.short)
    server.stop()


def test_truncated(run, serve):
    """A message may be longer than its RECV without an error. Its end is not in our
    buffer."""
    server = serve("4_hello", LD_PRELOAD=PRELOAD["LD_PRELOAD"], TRUNCATES="1",
                   REORDER_MS="0")
    if provider_in(server.process.output) != "tcp;ofi_rxm":
        pytest.skip("others don't say how long the message was")
    client = FakeClient(run, server)
    client.send(b"\0" * (LONGEST + 1), "(sent|failed)", as_it_is=True)
    server.process.wait_for(f"^Received {LONGEST} bytes: ")
    server.check_client(LD_PRELOAD="")
    server.stop()


def test_late_writes_of_a_file(serve):
    """Here the client posts the WRITEs, and says by a message which chunks are in place:
    not before they are."""
    server = serve("9_file")
    client = server.check_client("5000001", "2", **LATE_WRITES)
    # Five chunks through two slots: three WRITEs, one after the other.
    assert client.seconds >= 3 * DELAY / 1000
    assert not server.errors()
    server.stop()


@two_providers
def test_late_completions_of_a_file(serve, provider):
    """The credit for a slot comes back before the completion of the WRITE into it.
    The client needs both before the next WRITE from that slot."""
    server = serve("9_file", provider)
    client = server.check_client("5000001", "2", **LATE_COMPLETIONS)
    # Nobody waits for the third, once the server says that the file is saved.
    assert client.seconds >= 2 * DELAY / 1000
    assert not server.errors()
    server.stop()
