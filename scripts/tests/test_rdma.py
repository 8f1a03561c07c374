"""The programs over real verbs: Soft-RoCE or another RDMA device, which
scripts/rdma/inside.sh makes available. What the chapters say about verbs is tried
here; a wrong key is tried in test_messages.py."""

import re
import shutil
import signal
import time

import pytest

from fakes import FakeClient
from harness import OVER_VERBS, PROGRAMS, is_here
from messages import BYE, base
from table import TABLE

VERBS = "verbs;ofi_rxm"
pytestmark = [
    pytest.mark.builds("plain"),
    pytest.mark.skipif(not is_here(VERBS), reason="there is no RDMA device here; "
                       "make test-rdma brings one")]
# iWARP has no immediate data, so what needs that refuses to run.
IWARP = OVER_VERBS == "siw"
RUNNING = [program for program in PROGRAMS
           if not (IWARP and TABLE[program].imm_data)]
with_imm_data = pytest.mark.skipif(IWARP, reason="iWARP has no immediate data")
MANY = 3000  # more messages than anybody has RECVs for, and less than a pipe holds


@pytest.mark.parametrize("program", RUNNING)
def test_data_over_verbs(serve, program):
    """Small and large."""
    server = serve(program, VERBS)
    assert re.search(r"^domain: \w+, .*provider: verbs;ofi_rxm\b",
                     server.process.output, re.M)
    for args in server.entry.sizes:
        server.check_client(*args)
    assert not server.errors()
    server.stop()


@pytest.mark.parametrize("program", RUNNING)
def test_clients_at_once(serve, program):
    server = serve(program, VERBS)
    clients = [server.start_client(*server.entry.quick) for _ in range(4)]
    for client in clients:
        assert client.wait() == 0, client.output + server.process.output
        assert server.entry.success in client.output
        server.check_file(client)
    assert not server.errors()
    server.stop()


@pytest.mark.skipif(not IWARP, reason="this device has immediate data")
@pytest.mark.parametrize("program", [p for p in PROGRAMS if TABLE[p].imm_data])
def test_iwarp_is_refused(run, build, program):
    server = run([f"{build}/{program}"], VERBS)
    assert server.wait() == 1
    assert re.search(r"^error: \S+ has no immediate data; try another provider$",
                     server.output, re.M)


@with_imm_data
def test_killed_client(serve):
    """The server notices at once that a client in the middle of a transfer has gone,
    and other clients are served."""
    server = serve("7_queue", VERBS)
    client = server.start_client("1048576", "64", "100000")
    server.process.wait_for(r"^\[1\] .*WRITE: ")
    client.signal(signal.SIGKILL)
    killed = time.monotonic()
    server.process.wait_for(r"^\[1\] error: WRITE failed: ")
    assert time.monotonic() - killed < 5
    server.check_client()
    server.stop()


@pytest.mark.parametrize("program", ["5_reverse", "10_lock"])
def test_message_after_bye(run, serve, program):
    """What arrives while an endpoint is being closed does no harm, if ofi_rxm shares
    its RECVs. Otherwise libfabric crashes sooner or later: see KNOWN_CRASH."""
    server = serve(program, VERBS, FI_OFI_RXM_USE_SRX="1")
    for _ in range(8):
        client = FakeClient(run, server)
        client.open_session()
        client.process.write("\n".join(2 * [client.send_line(base(BYE))]))
        client.expect("Done")
        client.process.signal(signal.SIGKILL)
        client.process.wait()
    server.check_client()
    server.stop()


@with_imm_data
def test_target_stands_still(serve):
    """WRITEs go on while the target's program does not run at all: it is the adapter
    that puts them in place."""
    server = serve("7_queue", VERBS)
    client = server.start_client("65536", "100", "1000000")
    server.process.wait_for(r"^\[1\] .*WRITE: ")
    client.signal(signal.SIGSTOP)
    time.sleep(1)

    def written():
        already = len(server.process.lines)
        return int(server.process.wait_for(r"^\[1\] .*WRITE: +\d+%, (\d+)/",
                                           after=already)[1])

    first, second, third = written(), written(), written()
    assert first < second < third
    client.signal(signal.SIGCONT)
    client.signal(signal.SIGINT)
    assert client.wait() == 1
    assert not server.errors()
    server.stop()


@pytest.mark.skipif(IWARP, reason="iWARP has no RNR")
def test_no_recv(run, serve):
    """The RECVs of a server that stands still are used up. From then on, the adapter
    sends again and again (RNR, receiver not ready) until there is another RECV, and
    nothing is lost."""
    server = serve("4_hello", VERBS)
    sender = FakeClient(run, server)
    sender.send(b"first")
    server.process.wait_for("^Received 5 bytes: first$")
    server.process.signal(signal.SIGSTOP)
    for _ in range(MANY):
        sender.process.write("send " + b"more".hex())
    sent = 0
    while (now := sender.process.output.count("\nsent\n")) > sent:
        sent = now
        time.sleep(5)
    assert 10 < sent < MANY
    server.process.signal(signal.SIGCONT)
    sender.process.wait_for("^sent$", count=1 + MANY)
    server.process.wait_for("^Received 4 bytes: more$", count=MANY)
    assert not server.errors()
    server.stop()


# An ordinary user's limit of locked memory, in KiB. Root is above it, but not without
# this capability.
LIMITED = ["setpriv", "--bounding-set", "-ipc_lock", "bash", "-c",
           'ulimit -l $0; exec "$@"']
with_setpriv = pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")


@with_setpriv
@pytest.mark.parametrize("program", RUNNING)
def test_locked_memory_over_verbs(run, build, program):
    """A user whose limit of locked memory is low is told so."""
    process = run([*LIMITED, "64", f"{build}/{program}"], VERBS)
    assert process.wait() == 1
    assert re.search(r"^error: .*Cannot allocate memory .*`ulimit -l`", process.output,
                     re.M), process.output


@with_setpriv
def test_8_mib_of_locked_memory(run, build, serve):
    """With ofi_rxm's buffers as they are, the first SEND fails; with smaller ones,
    4_hello gets by."""
    for size, status in [("16384", 1), ("2048", 0)]:
        server = serve("4_hello", VERBS, FI_OFI_RXM_BUFFER_SIZE=size)
        client = run([*LIMITED, "8192", f"{build}/4_hello", server.address], VERBS,
                     FI_OFI_RXM_BUFFER_SIZE=size)
        assert client.wait() == status
        assert status == 0 or re.search(
            r"^error: SEND failed: Cannot allocate memory .*`ulimit -l`", client.output,
            re.M), client.output
        server.stop()
