"""Exercise 10: a client that is interrupted while it has the lock gives its turn back,
so that the others need not wait until the lease is over."""

import signal
import time

import pytest

LEASE = 1  # s


@pytest.mark.parametrize("provider,signum", [
    ("", signal.SIGINT), ("shm", signal.SIGTERM)], ids=["default", "shm"])
def test_interrupted_holder(serve, provider, signum):
    server = serve("10_lock", provider)
    holder = server.start_client("3", HOLD_MS="60000")
    holder.wait_for("FETCH-AND-ADD and WRITE")
    other = server.start_client("5")
    other.wait_for("FETCH-AND-ADD and WRITE")
    holder.signal(signum)
    assert holder.wait(10) == 1
    assert holder.output.endswith("error: interrupted\n")
    assert other.wait() == 0, other.output
    # Nobody has waited for the end of a lease, and nothing has changed in the ledger.
    assert "of others that we ended: 0" in other.output
    server.process.wait_for("^the log has 8 entries .0 holes., the ledger 5 changes")
    server.stop()


def test_killed_holder(serve):
    """A client that is killed can give nothing back. The lease is still there."""
    server = serve("10_lock")
    holder = server.start_client("3", HOLD_MS="60000")
    holder.wait_for("FETCH-AND-ADD and WRITE")
    other = server.start_client("5")
    other.wait_for("FETCH-AND-ADD and WRITE")
    holder.signal(signal.SIGKILL)
    killed = time.monotonic()
    assert other.wait() == 0, other.output
    assert time.monotonic() - killed > LEASE / 2
    assert "of others that we ended: 1" in other.output
    server.stop()
