"""Those whom nobody has asked in, those who wait for a place, and those who keep one
without need."""

import contextlib
import itertools
import os
import random
import re
import signal
import struct
import time

import pytest

from fakes import Borrower, FakeClient, FakeServer, FileSender
from harness import (BUILD, PROGRAMS, PROVIDERS, ROOT, TIME_FACTOR, First,
                     Server, provider_in)
from marks import not_over_verbs
from messages import (ALIVE, BYE, FILE_ALIVE, JOIN, MALLOC, PROGRESS, REFUSED,
                      TABLE_ALIVE, TEXT, USAGE, base, request)
from repository import PATIENT, number, variant
from table import TABLE

pytestmark = pytest.mark.builds("plain")
# shm compares no keys: whoever may use it may read the whole process.
KEYED = [p for p in PROVIDERS if p != "shm"]  # those that compare keys
compares_keys = pytest.mark.parametrize("provider", KEYED, ids=lambda p: p or "default")
# How many keys a stranger tries for each program and provider: GUESSES=300.
GUESSES = int(os.environ.get("GUESSES", "8"))
GUESS = 2  # seconds for one of them, which nobody may answer
PLACES = 8  # for clients of a server


def guesses(provider):
    """The keys that come first when one counts, and any others."""
    # A wrong key gets no answer over UDP, and costs the sender's patience.
    count = GUESSES // (4 if provider.startswith("udp") else 1)
    return [*range(count // 2), *(random.getrandbits(64) for _ in range(count // 2))]


def stranger(run, provider, address, command):
    """Somebody who knows an address, and tries a key. A new one each time: over tcp, a
    wrong key costs the connection. Returns whether it was the right one."""
    process = run([f"{BUILD}/sender", address], provider, stdin=-1)
    process.write(command)
    said = process.wait_for("^(read|written|failed: .*)$")[1]
    process.signal(signal.SIGKILL)
    process.wait()
    run.processes.remove(process)
    process.popen.stdin.close()
    process.popen.stdout.close()
    return not said.startswith("failed")


def check_keys(run, provider, address, command, right=None):
    """Nobody guesses a key. The right one would do, which shows that the guesses were
    not in vain."""
    for key in guesses(provider):
        assert not stranger(run, provider, address, f"{command} 0 {key} {GUESS}"), key
    if right is not None:
        assert stranger(run, provider, address, f"{command} 0 {right}")


@pytest.mark.parametrize("program,provider", [
    ("8_malloc", provider) for provider in KEYED] + [("10_lock", KEYED[0])])
def test_memory_of_a_server(run, serve, program, provider):
    """The pool and the table can be reached at the listener's address."""
    server = serve(program, provider)
    if program == "8_malloc":
        client = Borrower(run, server)
        key = client.ask(MALLOC, 64).key
    else:
        client = FakeClient(run, server)
        client.open_session()
        client.send(base(JOIN))
        key = int.from_bytes(client.receive()[32:40], "little")
    client.send(base(BYE))
    client.expect("Done")
    # 10_lock may get another provider than the sender would.
    provider = provider_in(server.process.output)
    check_keys(run, provider, server.address, "read", key)
    check_keys(run, provider, server.address, "overwrite")
    if provider not in server.entry.lossy_over:
        server.check_client(*server.entry.short)
    server.stop()


@compares_keys
def test_slots_of_a_server(run, serve, provider):
    server = serve("9_file", provider)
    client = FileSender(run, server)
    client.put(size=1 << 20)
    with client.saying(base(FILE_ALIVE)):
        check_keys(run, provider, server.address, "overwrite", client.slots[1])
    server.check_client()


@pytest.mark.parametrize("program,provider", [
    *((program, provider) for program in ("6_write", "7_queue", "14_strangers")
      for provider in PROVIDERS if provider != "shm"), ("11_rails", "")])
def test_memory_of_a_client(run, build, program, provider):
    """The address of a client is in its CONNECT, which anybody may read."""
    server = FakeServer(run, build, program, *TABLE[program].least, provider=provider)
    request = server.receive()
    # The messages of 6 and 7 have no nonce, and begin with the type and the address.
    at = 32 if program == "11_rails" else 20 if number(program) <= 7 else 24
    key = int.from_bytes(request[at:at + 8], "little")
    # To 6_write, too: it knows no such message, and takes it for a sign of life.
    with server.saying(base(PROGRESS)):
        for guess in guesses(provider)[:PLACES]:
            assert not stranger(run, provider, server.client_address,
                                f"overwrite 0 {guess} {GUESS}"), guess
        assert stranger(run, provider, server.client_address, f"overwrite 0 {key}")


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda p: p or "default")
@pytest.mark.parametrize("program", ["9_file", "14_strangers"])
def test_byes_of_strangers(run, serve, program, provider):
    """A conversation goes on, whatever others send to its address: a BYE, other bytes,
    too much. It is the first client that says that it is over."""
    server = serve(program, provider)
    client, other = FakeClient(run, server), FakeClient(run, server)
    client.open_session()
    other.peer(client.session)
    for message in (base(BYE), base(BYE, client.nonce ^ 1), b"\3\0\0\0", b"",
                    base(TEXT)):
        other.send(message, as_it_is=True)
    if provider != "shm":  # libfabric itself hangs there: chapter 4
        other.send(bytes(70_000), answer="(sent|failed)", as_it_is=True)
    client.send(base(BYE))
    client.expect("(Done|error: the client has left)")
    assert len(server.errors()) == (program == "9_file")
    server.stop()


def readme_says():
    """What README has its reader type on a network of strangers."""
    with open(f"{ROOT}/README.md") as file:
        line = re.search("^export (.*_IFACE=.*)$", file.read(), re.M)[1]
    return dict(word.split("=") for word in line.split())


def listening(process):
    """The addresses at which a process takes connections or messages, as the kernel
    writes them: 0100007F:89B1."""
    proc = f"/proc/{process.popen.pid}"
    inodes = set()
    for name in os.listdir(f"{proc}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(os.readlink(f"{proc}/fd/{name}"))
    addresses = set()
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        # What has ended has none of these files any more.
        assert process.popen.poll() is None, f"{process.command}: {process.output}"
        with open(f"{proc}/net/{kind}") as file:
            for fields in map(str.split, file.read().splitlines()[1:]):
                # 0A: it listens. UDP knows no other state than "closed".
                if f"socket:[{fields[9]}]" in inodes and \
                        (kind.startswith("udp") or fields[3] == "0A"):
                    addresses.add(fields[1])
    return addresses


def check_only_from_here(process, provider):
    """Whoever wants to reach it has to be on this machine."""
    end = time.monotonic() + 15 * TIME_FACTOR
    while not (addresses := listening(process)) and provider != "shm" and \
            "provider: shm" not in process.output:
        assert time.monotonic() < end, process.output
        time.sleep(0.02)
    assert all(address.startswith("0100007F:") for address in addresses), addresses


@not_over_verbs("an adapter listens wherever it is")
@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda p: p or "default")
def test_only_from_here(run, serve, provider):
    """After the line that README has one type on a network of strangers, nobody else
    reaches a program, server or client, over any provider."""
    variables = readme_says()
    for program in ["2_first", *PROGRAMS]:
        if program == "2_first":
            server = First(run, BUILD, program, provider, **variables)
        elif provider in TABLE[program].refused_by:
            continue
        else:
            server = serve(program, provider, **variables)
        check_only_from_here(server.process, provider)
        # So that its client is there for a while.
        server.process.signal(signal.SIGSTOP)
        client = server.start_client()
        check_only_from_here(client, provider)
        for process in client, server.process:
            process.signal(signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("provider", ["", "shm"], ids=["default", "shm"])
@pytest.mark.thorough
def test_line(run, serve, provider):
    """Those who have no place are told so. Those who give up cost the others nothing:
    they get no place any more."""
    server = serve("8_malloc", provider)
    places = [Borrower(run, server) for _ in range(PLACES)]
    with contextlib.ExitStack() as stack:
        for client in places:
            stack.enter_context(client.saying(base(ALIVE) + bytes(8)))
        waiting = [server.start_client("1") for _ in range(6)]
        for client in waiting:
            client.wait_for("^The server can't serve us yet: waiting$", 30)
        for client in waiting[1:]:
            client.signal(signal.SIGKILL)
        time.sleep(4)  # the time after which a client has given up
    for client in places:
        client.leave()
    assert waiting[0].wait(30) == 0, waiting[0].output
    server.check_client("1")
    assert server.process.output.count("Received CONNECT") == PLACES + 2
    assert not server.errors()
    server.stop()


PATIENT_RAILS = variant("11_rails", PATIENT)


@not_over_verbs("the dead server's adapter says that it has gone")
@pytest.mark.parametrize("program,signum", [("8_malloc", signal.SIGKILL),
                                            ("11_rails", signal.SIGSTOP)])
def test_server_killed_while_others_wait(run, serve, program, signum):
    """Ten seconds without a word are enough here, too. One that stands still is as
    silent, and its host does not say that it has gone."""
    server = serve(program) if program == "8_malloc" else \
        Server(run, PATIENT_RAILS(), program)
    places = [FakeClient(run, server) for _ in range(PLACES)]
    with contextlib.ExitStack() as stack:
        for client in places:
            client.open_session()
            if program == "8_malloc":
                stack.enter_context(client.saying(base(ALIVE) + bytes(8)))
        client = server.start_client(*TABLE[program].short)
        client.wait_for("^The server can't serve us yet", 30)
    began = time.monotonic()
    server.process.signal(signum)
    assert client.wait(40) == 1
    assert time.monotonic() - began < 30
    assert "waiting for ACCEPT: nothing has happened for 10 s" in client.output or \
        "SEND failed" in client.output, client.output


# The limit of a minute is 8 s here, in which those who keep their places have to be heard on
# a busy machine, too.
SHORT_IDLE = {
    program: variant(program, PATIENT, ("kIdleLimit = 60s", "kIdleLimit = 8s"))
    for program in ("8_malloc", "9_file", "10_lock")}


@pytest.mark.long
@pytest.mark.parametrize("program,alive,question", [
    pytest.param("8_malloc", ALIVE, request(USAGE), marks=pytest.mark.thorough),
    ("10_lock", TABLE_ALIVE, base(JOIN))], ids=["8_malloc", "10_lock"])
def test_idle_clients(run, program, alive, question):
    """A client that only says that it is alive loses its place, once others wait. One
    that says what it has done keeps it, and so does one that asks for something."""
    server = Server(run, SHORT_IDLE[program](), program)
    worker, asker, *idle = [FakeClient(run, server) for _ in range(PLACES)]
    # These two come first, so that their 8 s would be over first.
    worker.open_session()
    asker.open_session()
    finished = itertools.count(1)
    # By itself: a message of one that is out already may take 20 s to fail.
    with worker.saying(lambda: base(alive) + next(finished).to_bytes(8, "little")), \
            asker.saying(question, answered=True):
        for client in idle:
            client.open_session()
        client = server.start_client(*TABLE[program].quick)
        began = time.monotonic()
        while client.popen.poll() is None:
            assert time.monotonic() - began < 100
            for fake in idle:
                with contextlib.suppress(AssertionError):  # it may be out already
                    fake.send(base(alive) + bytes(8), answer="(sent|failed)")
            time.sleep(1)
    assert client.wait() == 0, client.output
    assert "does nothing, and others wait" in server.process.output
    for client in worker, asker:
        client.send(base(BYE))
        client.expect("Done")
    server.stop()


@pytest.mark.long
@pytest.mark.parametrize("refused", [False, True], ids=["alive", "refused"])
def test_idle_senders(run, refused):
    """The same for those that send a file, and for those whose file was refused, but who
    go on talking. The error of these has been said, and is not said again."""
    server = Server(run, SHORT_IDLE["9_file"](), "9_file")
    idle = [FileSender(run, server) for _ in range(PLACES)]
    for fake in idle:
        if refused:
            fake.send(base(99))
            fake.expect("error: bad message")
        else:
            fake.put(f"file{fake.number}".encode(), 4 << 20)
    client = server.start_client(*TABLE["9_file"].quick)
    began = time.monotonic()
    while client.popen.poll() is None:
        assert time.monotonic() - began < 100
        for fake in idle:
            with contextlib.suppress(AssertionError):  # it may be out already
                fake.send(base(FILE_ALIVE), answer="(sent|failed)")
        time.sleep(1)
    assert client.wait() == 0, client.output
    assert refused == ("does nothing, and others wait" not in server.process.output)
    server.stop()


@pytest.mark.parametrize("program", ["8_malloc", "10_lock", "11_rails", "12_sleep",
                                     "14_strangers"])
def test_refused(run, serve, program):
    """Who asks for what cannot be hears so from the server, and why."""
    server = serve(program)
    client = FakeClient(run, server)
    client.open_session()
    client.send(base(99) + bytes(400))
    message = client.receive()
    assert message[:8] == base(REFUSED)
    assert message[8:].startswith(b"bad message: ")
    client.expect("error: bad message: ")
    server.check_client()
    server.stop()


@pytest.mark.parametrize("provider", ["shm"])
def test_idle_table(run, serve, provider):
    """What happens to the table of 10_lock while no client is there does no harm to the
    next one."""
    server = serve("10_lock", provider)
    client = FakeClient(run, server)
    client.open_session()
    client.send(base(JOIN))
    place, key = struct.unpack_from("<Q8xQ", client.receive(), 16)
    client.send(base(BYE))
    client.expect("Done")
    server.process.wait_for("^the log has .* It all fits together.$")
    client.peer(server.address)
    for offset in 0, 192, 1344:  # the tickets, a ledger, a record
        client.command(f"overwrite {place + offset} {key}", "written")
    server.check_client()
    server.process.wait_for("^the log has .* It all fits together.$", count=2)
    server.stop()


def test_far_back_in_the_queue(run, serve):
    """However many tickets a server says are before it, a client looks again soon, and
    obeys Ctrl-C."""
    server = serve("10_lock", "shm")
    fake = FakeClient(run, server)
    fake.open_session()
    fake.send(base(JOIN))
    place, key = struct.unpack_from("<Q8xQ", fake.receive(), 16)
    fake.command(f"overwrite {place + 64} {key}", "written")  # the next ticket
    client = server.start_client("1")
    client.wait_for("FETCH-AND-ADD and WRITE")
    time.sleep(1)
    client.signal(signal.SIGINT)
    assert client.wait() == 1, client.output
    server.stop()
