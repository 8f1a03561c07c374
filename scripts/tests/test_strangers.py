"""Those whom nobody has asked in, those who wait for a place, and those who keep one
without need."""

import contextlib
import os
import random
import re
import signal
import time

import pytest

from fakes import Borrower, FakeClient, FakeServer, FileSender
from harness import BUILD, PROGRAMS, ROOT, AnyServer, provider_in, wait_until
from marks import each_provider, not_over_verbs
from messages import BYE, JOIN, MALLOC, PROGRESS, TEXT, base, plain, read_reply
from table import TABLE

# How many keys a stranger tries for each program, over libfabric's first choice: GUESSES=300.
# (shm compares no keys: whoever may use it may read the whole process.)
GUESSES = int(os.environ.get("GUESSES", "8"))
GUESS = 2  # seconds for one of them, which nobody may answer


def guesses():
    """The keys that come first when one counts, and any others."""
    return [*range(GUESSES // 2), *(random.getrandbits(64) for _ in range(GUESSES // 2))]


def stranger(run, provider, address, command):
    """Somebody who knows an address, and tries a key. A new one each time: over tcp, a
    wrong key costs the connection. Returns whether it was the right one."""
    process = run([f"{BUILD}/sender", address], provider, stdin=-1)
    process.write(command)
    said = process.wait_for("^(read|written|failed: .*)$")[1]
    process.kill()
    run.processes.remove(process)
    process.popen.stdin.close()
    process.popen.stdout.close()
    return not said.startswith("failed")


def check_keys(run, provider, address, command, right=None):
    """Nobody guesses a key. The right one would do, which shows that the guesses were
    not in vain."""
    for key in guesses():
        assert not stranger(run, provider, address, f"{command} 0 {key} {GUESS}"), key
    if right is not None:
        assert stranger(run, provider, address, f"{command} 0 {right}")


@pytest.mark.parametrize("program", ["8_malloc", "10_lock"])
def test_memory_of_a_server(run, serve, program):
    """The pool and the table can be reached at the listener's address."""
    server = serve(program)
    if program == "8_malloc":
        client = Borrower(run, server)
        key = read_reply(client.ask(MALLOC, 64)).key
    else:
        client = FakeClient(run, server)
        client.open_session()
        client.send(plain(JOIN))
        key = int.from_bytes(client.receive()[20:28], "little")
    client.leave()
    # 10_lock may get another provider than the sender would.
    provider = provider_in(server.process.output)
    check_keys(run, provider, server.address, "read", key)
    check_keys(run, provider, server.address, "overwrite")
    server.check_client(*server.entry.short)
    server.stop()


def test_slots_of_a_server(run, serve):
    server = serve("9_file")
    client = FileSender(run, server)
    client.put(size=1 << 20)
    with client.saying(plain(PROGRESS)):
        check_keys(run, "", server.address, "overwrite", client.slots[1])
    server.check_client()


@pytest.mark.parametrize("program", ["6_write", "7_queue", "11_rails", "14_strangers"])
def test_memory_of_a_client(run, build, program):
    """The address of a client is in its CONNECT, which anybody may read."""
    server = FakeServer(run, build, program, *TABLE[program].least)
    request = server.receive()
    # The header, and the place and the size of the memory.
    at = 24 if TABLE[program].guarded else 20
    key = int.from_bytes(request[at:at + 8], "little")
    # To 6_write, too: it knows no such message, and takes it for a sign of life.
    with server.saying(TABLE[program].base(PROGRESS)):
        check_keys(run, "", server.client_address, "overwrite", key)


@each_provider
def test_byes_of_strangers(run, serve, provider):
    """A conversation goes on, whatever others send to its address: a BYE, other bytes,
    too much. It is the first client that says that it is over."""
    server = serve("14_strangers", provider)
    client, other = FakeClient(run, server), FakeClient(run, server)
    client.open_session()
    other.peer(client.session)
    for message in (base(BYE), base(BYE, client.nonce ^ 1), b"\3\0\0\0", b"",
                    base(TEXT)):
        other.send(message, as_it_is=True)
    if provider != "shm":  # libfabric itself hangs there: chapter 4
        other.send(bytes(70_000), answer="(sent|failed)", as_it_is=True)
    client.leave()
    assert not server.errors()
    server.stop()


def appendix_says():
    """What the reader types on a network of strangers."""
    with open(f"{ROOT}/chapters/appendix_setup.md") as file:
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
    wait_until(lambda: listening(process) or provider == "shm" or
               "provider: shm" in process.output, 15)
    addresses = listening(process)
    assert all(address.startswith("0100007F:") for address in addresses), addresses


@not_over_verbs("an adapter listens wherever it is")
@each_provider
def test_only_from_here(run, serve, provider):
    """After the line that one types on a network of strangers, nobody else
    reaches a program, server or client, over any provider."""
    variables = appendix_says()
    for program in ["2_first", *PROGRAMS]:
        if program == "2_first":
            server = AnyServer(run, BUILD, program, provider, **variables)
        elif provider in TABLE[program].refused_by:
            continue
        else:
            server = serve(program, provider, **variables)
        check_only_from_here(server.process, provider)
        if program != "2_first":  # whose client may be done before the server has anything
            # So that its client is there for a while.
            server.process.signal(signal.SIGSTOP)
            client = server.start_client()
            check_only_from_here(client, provider)
            client.kill()
        server.process.kill()
