"""The programs that are broken on purpose (make break-2 and so on): each still goes
wrong as its chapter says, with the commands that its patch names. And what else goes
wrong when the reader types it."""

import contextlib
import os
import re
import signal
import subprocess
import time

import pytest

from chapters import Page
from harness import (BUILD, PROVIDERS, AnyServer, Server, is_here, shares_of_a_core,
                     wait_until)
from marks import ends_in_a_rendezvous, not_over_verbs, takes_shm
from repository import (QUICKLY, ROOT, build_moves, make, number, read_source, replaced,
                        variant)
from table import TABLE


@pytest.fixture
def broken(run, tmp_path):
    """Builds the broken program and starts its server: broken("6_write", "shm"), or
    broken("10.4")."""
    built = set()

    def start(program, provider="", flags=QUICKLY, **kwargs):
        if program not in built:
            name = program if "." in program else number(program)
            said = make(f"break-{name}", *flags, f"BUILD={tmp_path}", "CUDA_HOME=")
            assert f" build/break/{program} ADDRESS" in said
            built.add(program)
        kind = Server if program in TABLE else AnyServer
        return kind(run, f"{tmp_path}/break", program, provider, **kwargs)
    return start


def test_2_first(broken):
    """Where libfabric copies a short text before it goes on, the mistake is hidden."""
    def send(text, provider=""):
        server = broken("2_first", provider)
        server.check_client(text)
        return server, server.received()

    def changed(provider):
        server, received = send("x" * 20000, provider)
        # The tcp of libfabric 2 copies this one, too.
        hidden = "provider: tcp\n" in server.process.output
        return received == "20000 bytes: " + "#x"[hidden] * 20000

    assert send("Hello, world!")[1] == "13 bytes: Hello, world!"
    # Over shm, the server may take it before the client, on a busy core, has changed it.
    for provider in ["", *{"shm"}.intersection(PROVIDERS)]:
        assert any(changed(provider) for _ in range(3))
    if "sockets" in PROVIDERS:
        # Its thread has usually not taken the text yet.
        assert "13 bytes: " + "#" * 13 in (
            send("Hello, world!", "sockets")[1] for _ in range(30))


def of_the_page():
    """What chapter 5 has the reader put into the program of chapter 4, and what that
    prints."""
    page = Page(ROOT, "chapters/5_reverse.md")
    return ["\n".join(block.lines) for block in page.blocks if block.info == "text"][:2]


def without_sender():
    source = read_source("4_hello")
    old = re.search(r'^ *printf\("Received [^;]*;', source, re.M)[0]
    return replaced(source, (old, of_the_page()[0]))


WITHOUT_SENDER = variant("4_hello", source=without_sender)


def test_4_hello_knows_no_sender(run):
    printed = of_the_page()[1]
    server = Server(run, WITHOUT_SENDER(), "4_hello")
    server.check_client()
    server.process.wait_for(f"^{re.escape(printed)}$")
    server.stop()


@contextlib.contextmanager
def stopped(server, path=None, *args):
    """A client over shm, of the broken 5_reverse, that has posted its text and stopped."""
    client = subprocess.Popen([path or server.path, server.address, *args], text=True,
                              stdout=subprocess.PIPE,
                              env={**os.environ, "FI_PROVIDER": "shm"})
    try:
        os.waitid(os.P_PID, client.pid, os.WSTOPPED | os.WNOWAIT)
        yield client
    finally:
        client.kill()
        client.communicate()


@takes_shm
@pytest.mark.thorough
def test_5_reverse(run, broken):
    """A client is killed once it has posted its text. What is in flight to it never ends,
    and the right server closes its endpoint all the same. If the client is only late, it
    takes its answer."""
    late, wrong, right = servers = [broken("5_reverse", "shm"), broken("5_reverse", "shm"),
                                    Server(run, BUILD, "5_reverse", "shm")]
    with stopped(late) as client:
        for server in wrong, right:
            with stopped(server, wrong.path) as dead:
                dead.kill()
            # A later process with the same number would find its file in use.
            address = server.process.wait_for(r"^\[1\] Received CONNECT .* (\w+)$")[1]
            os.unlink("/dev/shm/" + bytes.fromhex(address)[len("fi_shm://"):-1].decode())
        for server in servers:
            server.process.wait_for(
                r"^\[1\] error: nothing has happened for 10 s while waiting for the client", 30)
        right.check_client()
        for server in wrong, late:
            server.process.wait_for("^SENDs in flight: 1$", count=3)
        assert "SENDs" not in right.process.output
        client.send_signal(signal.SIGCONT)
        assert client.communicate(timeout=30)[0].endswith("The text is correct.\n")
    for server in servers:
        server.stop()


def with_destructor():
    """A buffer isn't freed, but filled, all but its message's type."""
    source = read_source("5_reverse")
    constructor = re.search(r'^ *"fi_mr_reg"\);\n  }\n', source, re.M)[0]
    return replaced(source, (constructor, constructor + "  ~Buffer() { memset(data.release() + 4, "
                             "'#', size - 4); }\n"))


WITH_DESTRUCTOR = variant("5_reverse", source=with_destructor)


@ends_in_a_rendezvous
@takes_shm
@pytest.mark.thorough
def test_5_reverse_late(run, broken):
    """A client that is only late, as an appendix has it: over shm it reads memory of the
    server that the server has back."""
    server = Server(run, WITH_DESTRUCTOR(), "5_reverse", "shm")
    # The client's pipe takes all that it prints before it stops.
    with stopped(server, broken("5_reverse", "shm").path, "x" * 9000) as late:
        server.process.wait_for(r"^\[1\] error: ", 30)
        time.sleep(2)
        late.send_signal(signal.SIGCONT)
        assert ": " + "#" * 9000 + "\n" in late.communicate(timeout=30)[0]
    server.check_client()
    server.stop()


@pytest.mark.thorough
def test_6_guesses(broken):
    """The key of a client's memory is always the same, until it is random."""
    provider = "tcp;ofi_rxm" if is_here("tcp;ofi_rxm") else ""
    server = broken("6.3", provider)
    client = server.start_client()
    assert client.wait() == 0 and "Data is correct." in client.output
    server.path = f"{build_moves(['6.4'])}/6.4"
    client = server.start_client()
    server.process.wait_for(r"^\[2\] error: WRITE failed: ")
    assert client.wait() == 1 and "Received RDMA WRITE" not in client.output


@pytest.mark.thorough
def test_8_malloc(broken):
    """One client alone finds its data in memory that it has given back. If another one
    borrows that memory in between, the first one doesn't."""
    server = broken("8_malloc")
    server.check_client()
    client = server.start_client()
    client.wait_for("Gave them back")
    server.check_client()
    client.check_error("the data is not correct$")
    server.stop()


@pytest.mark.thorough
def test_8_malloc_stopped(broken):
    """A server stands still while its client READs, which waits for three seconds
    first. The client gets the bytes when the server goes on."""
    for provider in "", "shm":
        server = broken("8_malloc", provider)
        client = server.start_client("8")
        client.wait_for("Gave them back")
        server.process.signal(signal.SIGSTOP)
        time.sleep(6)
        assert "READ and compared" not in client.output
        server.process.signal(signal.SIGCONT)
        assert client.wait() == 0, client.output
        server.stop()


@takes_shm
@pytest.mark.thorough
def test_8_alone(broken):
    """A client that copies by itself READs the memory of a server that stands still."""
    server = broken("8.alone", "shm")
    client = server.start_client("8")
    client.wait_for("Gave them back")
    server.process.signal(signal.SIGSTOP)
    client.check_error("nothing has happened for 10 s while waiting for an answer$")
    assert "\nREAD and compared them.\n" in client.output
    server.process.signal(signal.SIGCONT)


def test_2_write(broken):
    """A WRITE comes without a RECV, and the second one replaces three bytes."""
    for provider in PROVIDERS:
        server = broken("2.write", provider)
        place, key = re.search(r" (\d+) (\d+) TEXT$", server.process.output, re.M).groups()
        for text, memory in ("Hello, world!", "Hello, world!"), ("Bye", "Byelo, world!"):
            client = server.start_client(place, key, text)
            assert client.wait() == 0, client.output
            assert client.output.endswith(f"\nWrote {len(text)} bytes.\n")
            server.process.wait_for(f"^My memory: {memory}$")


@pytest.mark.thorough
def test_8_asleep(run, broken):
    """A client sleeps longer than the server waits. Its pieces are back by then, and its
    WRITEs fail."""
    right = Server(run, BUILD, "8_malloc")
    client = run([broken("8.asleep").path, right.address])
    right.process.wait_for(
        r"^\[1\] error: nothing has happened for 10 s while waiting for the client$", 30)
    assert right.pool_line(1) == \
        "The pool lends 0 bytes in 0 pieces, and has 268435456 free in 1"
    client.signal(signal.SIGCONT)
    client.check_error("WRITE failed: ")
    right.stop()


@pytest.mark.thorough
def test_9_file(run, broken, tmp_path):
    """Every WRITE has completed, and only the checksum notices that it was of the wrong
    place."""
    right = Server(run, BUILD, "9_file")
    source = tmp_path / "random"
    source.write_bytes(os.urandom(3 << 20))
    wrong = broken("9_file")
    client = run([wrong.path, right.address, str(source), "2"])
    client.check_error("the server: a checksum is not correct$")
    wrong.stop()
    right.stop()


@pytest.mark.parametrize("name", ["10.6", "10.long"])
@pytest.mark.thorough
def test_10_torn(broken, name):
    """READs of a megabyte get half of a WRITE now and then. A checksum notices it."""
    # A checksum of a megabyte takes long if it isn't optimized.
    server = broken(name, flags=["CXXFLAGS=-O2"])
    for _ in range(20):
        clients = [server.start_client("300") for _ in range(4)]
        bad = sum(client.wait(300) for client in clients)
        said = "".join(client.output for client in clients)
        if name == "10.6":
            torn = re.findall(r"^error: a record begins with (\d+) and ends with (\d+)$",
                              said, re.M)
            assert len(torn) == bad and all(len({*found}) > 1 for found in torn), said
        else:
            torn = re.findall("READs of half a WRITE: [1-9]", said)
            assert bad == 0 and said.count("Data is correct.") == 4, said
        if torn:
            return
    pytest.fail("nothing was torn")


@pytest.mark.thorough
def test_10_lock(broken):
    """Where nobody waits and nobody compares, two clients lose changes, and know how
    many: those that are missing in the server's ledger. One alone loses none."""
    server = broken("10_lock")
    left = r"^(?:error: )?the log has (\d+) entries .0 holes., the ledger (\d+) changes"
    server.check_client("200")
    assert server.process.wait_for(left).groups() == ("200", "200")
    clients = [server.start_client(HOLD_MS="1") for _ in range(2)]
    lost = 0
    for client in clients:
        client.wait()
        found = re.search(r"^error: (\d+) of our 1000 changes of the ledger are lost$",
                          client.output, re.M)
        lost += int(found[1]) if found else 0
    assert lost > 0, [client.output for client in clients]
    assert server.process.wait_for(left, count=2).groups() == ("2200", str(2200 - lost))
    server.stop()


@pytest.mark.thorough
def test_10_dead_owner(broken):
    """Without a lease, a client that is killed while it has the lock keeps all others
    out."""
    server = broken("10.4")
    owner = server.start_client("3", HOLD_MS="60000")
    owner.wait_for("FETCH-AND-ADD and WRITE: ")
    time.sleep(0.5)
    owner.kill()
    other = server.start_client("5")
    other.wait_for("FETCH-AND-ADD and WRITE: ")
    time.sleep(3)
    assert "under the lock" not in other.output
    other.interrupt()


@pytest.mark.skipif(not is_here("tcp;ofi_rxm"), reason="others have room for everything")
@pytest.mark.thorough
def test_13_crowd(run, broken):
    """A client that asks and never reads: nobody else hears anything, until that client ends.
    The right server, which forgets it, is in test_crowd.py."""
    server = broken("13_crowd", "tcp;ofi_rxm")
    deaf = run([server.path, server.address, "deaf"], "tcp;ofi_rxm")
    deaf.wait_for("^Asked 30,000 times, and read nothing.$", 30)
    server.process.wait_for("^1 clients, 30000 texts so far$")
    client = server.start_client("20", "100")
    client.check_error("nothing has happened for 10 s while waiting for ACCEPT")
    deaf.signal(signal.SIGTERM)
    assert deaf.wait() == 0, deaf.output
    server.check_client("20", "100")


@pytest.mark.thorough
def test_12_sleep(run, broken):
    """Until its first client it sleeps. From then on it only says so."""
    servers = [broken("12_sleep"), Server(run, BUILD, "12_sleep")]
    wrong, right = processes = [server.process for server in servers]
    assert max(shares_of_a_core(processes, 2)) < 0.05
    for server in servers:
        assert "We sleep until the completion queue wakes us." in server.process.output
        server.check_client()
    wait_until(lambda: max(shares_of_a_core([wrong], 1)) > 0.05, 30)
    assert max(shares_of_a_core([right], 2)) < 0.05
    for server in servers:
        server.stop()


@not_over_verbs("the attack makes connections of TCP")
@pytest.mark.thorough
def test_14_strangers(run, broken):
    """Junk keeps the place of a client that has stopped. Without it, the right server gives it
    up: see test_attacks.py."""
    server = broken("14_strangers", "tcp")
    client = server.start_client("65536", "100", "1000000")
    server.process.wait_for(r"^\[1\] .*WRITE: ")
    client.signal(signal.SIGSTOP)
    stranger = run([f"{ROOT}/scripts/stranger", "junk", server.address],
                   BUILD=f"{ROOT}/{BUILD}")
    stranger.wait_for("^to 1 sessions")
    time.sleep(15)
    assert not server.errors()
    server.process.popen.kill()
