"""The programs over real verbs: Soft-RoCE or another RDMA device, which
scripts/rdma/inside.sh makes available. What the chapters say about verbs is tried
here; a wrong key is tried in test_messages.py, too."""

import re
import shutil
import signal
import subprocess
import time

import pytest

from fakes import FakeClient
from harness import PROGRAMS, TIME_FACTOR, is_here
from messages import BYE, base
from repository import ROOT, variant
from test_ring import Ring

VERBS = "verbs;ofi_rxm"
pytestmark = pytest.mark.skipif(
    not is_here(VERBS), reason="there is no RDMA device here; make test-rdma brings one")
MANY = 3000  # more messages than anybody has RECVs for, and less than a pipe holds


@pytest.mark.parametrize("program", PROGRAMS)
def test_data_over_verbs(serve, program):
    """Small and large, and four at once."""
    server = serve(program, VERBS)
    assert re.search(r"^domain: \w+, .*provider: verbs;ofi_rxm\b",
                     server.process.output, re.M)
    for args in server.entry.sizes:
        server.check_client(*args)
    # Longer ones have 16 MB in flight to each client, too much for an emulated processor.
    server.check_all([server.start_client(*server.entry.short) for _ in range(4)])
    server.stop()


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
        client.process.kill()
    server.check_client()
    server.stop()


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
    client.interrupt()
    server.process.wait_for(r"^\[1\] error: WRITE failed: ")  # it has left without a word
    server.stop()


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


def test_ring(run, build):
    """All four ranks have the right sums. Each has sessions with both neighbours."""
    ring = Ring(run, build, 4, provider=VERBS)
    ring.check()
    for rank in ring.ranks:
        assert re.search(r"^domain: \w+, .*provider: verbs;ofi_rxm\b", rank.output, re.M)


# An ordinary user's limit of locked memory, in KiB. Root is above it, but not without
# this capability.
LIMITED = ["setpriv", "--bounding-set", "-ipc_lock", "bash", "-c",
           'ulimit -l $0; exec "$@"']
with_setpriv = pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")


@with_setpriv
@pytest.mark.parametrize("program", PROGRAMS)
def test_locked_memory_over_verbs(run, build, program):
    """The appendix has a row for what a user with a low limit of locked memory reads."""
    process = run([*LIMITED, "64", f"{build}/{program}"], VERBS)
    process.check_error(".*: Cannot allocate memory$")


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
            r"^error: SEND failed: Cannot allocate memory\b", client.output,
            re.M), client.output
        server.stop()


# ---- 2_verbs ----

WITH_ONE_RECV = variant("2_verbs", ("    recv.next = &empty;  // one call posts both\n", ""))
INLINE = variant(
    "2_verbs",
    ("  wanted.cap.max_send_wr", "  wanted.cap.max_inline_data = 64;\n  wanted.cap.max_send_wr"),
    ("IBV_SEND_SIGNALED;", "IBV_SEND_SIGNALED | IBV_SEND_INLINE;"),
    ('(qp, &send, &failed), "ibv_post_send");\n',
     '(qp, &send, &failed), "ibv_post_send");\n    buffer[0][0] = \'J\';\n'))


def typed(process, words):
    """What it asks to be typed into the other terminal."""
    return process.wait_for(rf"^{words}:\n  (.*)\n")[1]


class Verbs:
    """A server and a client of 2_verbs. The reader carries what each prints."""

    def __init__(self, run, build, *args, change=lambda address: address):
        self.server = run([f"{build}/2_verbs"], stdin=subprocess.PIPE)
        command = typed(self.server, "Run the client with the following command")
        self.client = run([f"{build}/2_verbs", change(command.split()[1]), *args],
                          stdin=subprocess.PIPE)
        self.address = typed(self.client, "Type this into the server's terminal")

    def connect(self):
        self.server.write(self.address)
        time.sleep(TIME_FACTOR)  # it says nothing
        return self

    def enter(self):
        self.client.write("")
        return self

    def finish(self):
        """The server keeps its queue pair until the client has ended."""
        assert self.client.wait() == 0, self.outputs()
        self.server.wait_for(r"^Press Enter when the client has ended\.$")
        assert self.server.popen.poll() is None
        self.server.write("")
        assert self.server.wait() == 0, self.outputs()

    def ends(self, server, client):
        """With these statuses. What both have printed is on the page, but for numbers."""
        assert (self.client.wait(), self.server.wait()) == (client, server), self.outputs()
        with open(f"{ROOT}/chapters/2_verbs.md") as file:
            page = alike(file.read())
        for line in self.outputs().splitlines():
            assert alike(line) in page, line

    def outputs(self):
        return self.server.output + self.client.output


def alike(text):
    """Without what is another number in each run."""
    return re.sub(r"\d+,0,::ffff:[\d.]+,[0-9a-f]+,[0-9a-f]+", "ADDRESS",
                  re.sub(r"\S*build/\S*2_verbs", "2_verbs", text))


@pytest.mark.parametrize("text", ["", "x", "Hello, world!", "x" * 65536, "x" * 70000],
                         ids=len)
def test_verbs(run, build, text):
    verbs = Verbs(run, build, *([] if text.startswith("H") else [text])).connect().enter()
    verbs.finish()
    text = text[:65536]
    assert verbs.server.output.endswith(
        f"\nReceived {len(text)} bytes: {text}\nMy memory: {text}\n"
        "Press Enter when the client has ended.\n")
    assert verbs.client.output.endswith(
        f"\nSent {len(text)} bytes.\nWrote {len(text)} bytes.\n")
    if text.startswith("H"):
        verbs.ends(0, 0)


def test_verbs_stopped(run, build):
    """The client's completions come from the server's adapter, not from its program."""
    verbs = Verbs(run, build).connect()
    verbs.server.signal(signal.SIGSTOP)
    verbs.enter()
    assert verbs.client.wait() == 0
    assert verbs.client.output.endswith("\nSent 13 bytes.\nWrote 13 bytes.\n")
    assert "Received" not in verbs.server.output
    verbs.server.signal(signal.SIGCONT)
    verbs.finish()
    verbs.ends(0, 0)


def test_verbs_too_early(run, build):
    """The server's queue pair is in INIT."""
    verbs = Verbs(run, build).enter()
    verbs.client.check_error("SEND: transport retry counter exceeded\n\\Z")
    verbs.server.popen.stdin.close()
    verbs.ends(1, 1)


def test_verbs_wrong_key(run, build):
    """The last digit of the key is another one."""
    verbs = Verbs(run, build, change=lambda address: (
        address[:-1] + "10"[address.endswith("1")])).connect().enter()
    verbs.ends(1, 1)
    assert verbs.client.output.endswith("\nerror: WRITE: remote access error\n")


def test_verbs_without_a_recv(run):
    """A WRITE takes no RECV, and the message after it does."""
    verbs = Verbs(run, WITH_ONE_RECV()).connect().enter()
    verbs.client.check_error("SEND: RNR retry counter exceeded\n\\Z")
    assert "\nSent 13 bytes.\n" in verbs.client.output
    assert verbs.server.popen.poll() is None  # it waits for ever


def test_verbs_inline(run):
    """The exercise: the buffer may be changed at once."""
    verbs = Verbs(run, INLINE()).connect().enter()
    verbs.finish()
    assert ("\nReceived 13 bytes: Hello, world!\nMy memory: Jello, world!\n"
            in verbs.server.output)
    # A longer text has no room in the request.
    verbs = Verbs(run, INLINE(), "x" * 65).connect().enter()
    verbs.client.check_error("ibv_post_send: Invalid argument\n\\Z")


def test_verbs_typed_wrong(run, build):
    server = run([f"{build}/2_verbs"], stdin=subprocess.PIPE)
    server.wait_for("^Then type")
    server.write("17,0,here")
    server.check_error("17,0,here: that is not what the other side has printed$")


def test_verbs_device(run, build):
    """The reader may choose one."""
    run([f"{build}/2_verbs"], DEVICE="rxe0", stdin=subprocess.PIPE).wait_for("^device: rxe0, ")
    run([f"{build}/2_verbs"], DEVICE="rxe1").check_error("no port is up, ")


def test_queue_pair_for_each_peer(run, serve):
    """The one endpoint of 4_hello has them, as page 2½ says of an RDM endpoint."""
    server = serve("4_hello", VERBS)
    for count in 1, 2:
        FakeClient(run, server).send(b"text")
        server.process.wait_for("^Received 4 bytes: text$", count=count)
        listed = subprocess.run(["rdma", "res", "show", "qp"], check=True, text=True,
                                capture_output=True).stdout
        assert len(re.findall(rf"type RC state RTS .* pid {server.process.popen.pid} ",
                              listed)) == count, listed
    server.stop()
