"""Those whom nobody has asked in, those who wait for a place, and those who keep one
without need."""

import contextlib
import os
import random
import re
import resource
import signal
import subprocess
import time

import pytest

from fakes import Borrower, FakeClient, FakeServer, FileSender
from harness import (BUILD, PROGRAMS, PROVIDERS, ROOT, TIME_FACTOR, First,
                     Server, provider_in)
from marks import not_over_verbs
from messages import (BYE, FILE_ALIVE, JOIN, MALLOC, PROGRESS, REFUSED,
                      TEXT, base, plain, read_reply)
from repository import PATIENT, QUICK_CXXFLAGS, variant
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
        key = read_reply(client.ask(MALLOC, 64)).key
    else:
        client = FakeClient(run, server)
        client.open_session()
        client.send(plain(JOIN))
        key = int.from_bytes(client.receive()[20:28], "little")
    client.send(server.entry.base(BYE))
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
    # Without a nonce, the type and the address come before the key.
    at = 32 if TABLE[program].guarded else 20
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


PATIENT_STRANGERS = variant("14_strangers", PATIENT)


@pytest.mark.parametrize("provider", ["", "shm"], ids=["default", "shm"])
@pytest.mark.thorough
def test_line(run, provider):
    """Those who have no place are told so. Those who give up cost the others nothing:
    they get no place any more."""
    server = Server(run, PATIENT_STRANGERS(), "14_strangers", provider)
    places = [FakeClient(run, server) for _ in range(PLACES)]
    for client in places:
        client.open_session()
    waiting = [server.start_client(*server.entry.short) for _ in range(6)]
    for client in waiting:
        client.wait_for("^The server can't serve us yet: waiting$", 30)
    for client in waiting[1:]:
        client.signal(signal.SIGKILL)
    time.sleep(4)  # the time after which a client has given up
    for client in places:
        client.send(base(BYE))
    assert waiting[0].wait(30) == 0, waiting[0].output
    server.check_client(*server.entry.short)
    assert server.process.output.count("Received CONNECT") == PLACES + 2
    assert not server.errors()
    server.stop()


IMPATIENT = variant("14_strangers", ("kSilenceLimit = 10s", "kSilenceLimit = 3s"))


@pytest.mark.thorough
def test_waiting_is_not_silence(run):
    """One client has all the memory and the time of the server for longer than
    the limit, which is 3 s here. Seven others wait for memory, and ten for an ACCEPT: more
    than the listener has RECVs."""
    server = Server(run, IMPATIENT(), "14_strangers")
    greedy = server.start_client(str(16 << 20), "32", "1000000")
    server.process.wait_for("Registered ")
    waiting = [server.start_client("4096", "10", "1") for _ in range(7)]
    server.process.wait_for("Received RandomFill", count=8)
    waiting += [server.start_client("4096", "10", "1") for _ in range(10)]
    for client in waiting:
        client.wait_for("Sent CONNECT", 30)
    time.sleep(4)
    for client in [greedy, *waiting]:
        assert client.popen.poll() is None, client.output
    assert server.process.output.count("Registered ") == 1
    assert server.process.output.count("Received CONNECT") == 8
    greedy.signal(signal.SIGKILL)
    for client in waiting:
        assert client.wait(60) == 0, client.output
    assert len(server.errors()) == 1 and server.errors()[0].startswith("[1] ")
    server.stop()


@pytest.mark.thorough
def test_memory_for_all(serve):
    """Three clients want 256 MiB each of the 512 that the server has."""
    server = serve("14_strangers", "shm")
    clients = [server.start_client(str(8 << 20), "32", "2") for _ in range(3)]
    for client in clients:
        assert client.wait(60) == 0, client.output
    server.process.wait_for("Done.$", count=3)
    # The third got its memory when another client was done with it.
    events = re.findall("Registered|Done", server.process.output)
    assert events.index("Done") < [i for i, event in enumerate(events)
                                   if event == "Registered"][2]
    server.stop()


LITTLE_MEMORY = {
    program: variant(program, ("kMaxTransfer = 512 << 20", "kMaxTransfer = 4 << 20"))
    for program in ("14_strangers", "11_rails")}


@pytest.mark.long
@pytest.mark.parametrize("program,provider", [("14_strangers", "shm"), ("11_rails", "tcp")])
def test_killed_while_it_waits_for_memory(run, program, provider):
    """A client that waits because others have the memory need say nothing. One that has
    died is given up all the same: while it waits, because it does not take what the server
    sends, and in its turn, although no WRITE to it may be in flight."""
    server = Server(run, LITTLE_MEMORY[program](), program, provider)
    pages = "65536", "64"

    def wait_for_memory(number, dies):
        client = server.start_client(*pages, "1")
        server.process.wait_for(rf"^\[{number}\] Received RandomFill")
        if dies:
            client.popen.kill()
            client.wait()
        return client

    first = server.start_client(*pages, "1000000")
    server.process.wait_for(r"^\[1\] .*WRITE: ")
    wait_for_memory(2, dies=True)
    alive = wait_for_memory(3, dies=False)
    server.process.wait_for(r"^\[2\] error: ", 60)
    assert first.popen.poll() is None and alive.popen.poll() is None
    wait_for_memory(4, dies=True)
    # The server tells this one, too, when it has told the first.
    server.process.wait_for(r"^\[1\] .*WRITE: ", count=3,
                            after=len(server.process.lines))
    first.signal(signal.SIGINT)
    assert first.wait() == 1
    server.process.wait_for(r"^\[4\] error: ", 60)
    assert alive.wait() == 0, alive.output
    server.check_client(*pages, "1")
    server.stop()


PATIENT_RAILS = variant("11_rails", PATIENT)


@not_over_verbs("the dead server's adapter says that it has gone")
@pytest.mark.parametrize("program,signum", [("14_strangers", signal.SIGKILL),
                                            ("11_rails", signal.SIGSTOP)])
def test_server_killed_while_others_wait(run, program, signum):
    """Ten seconds without a word are enough here, too. One that stands still is as
    silent, and its host does not say that it has gone."""
    build = PATIENT_STRANGERS if program == "14_strangers" else PATIENT_RAILS
    server = Server(run, build(), program)
    places = [FakeClient(run, server) for _ in range(PLACES)]
    for client in places:
        client.open_session()
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
    for program in ("9_file",)}


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


@not_over_verbs("an adapter needs other things than descriptors")
@pytest.mark.parametrize("program", ["14_strangers", "11_rails"])
def test_no_descriptor(serve, program):
    """A client for whom the server has no descriptors keeps its place in the line until
    there are some."""
    server = serve(program)
    pid = server.process.popen.pid
    # One is for the connection over which the CONNECT comes.
    used = len(os.listdir(f"/proc/{pid}/fd")) + 1
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, before[1]))
    client = server.start_client("4096", "10", "1")
    server.process.wait_for("^error: ")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert client.wait(30) == 0, client.output + server.process.output
    server.stop()


@pytest.mark.parametrize("program", ["11_rails", "12_sleep", "14_strangers"])
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


# ---- What chapter 14 has its reader try ----

# The second has a defence against each of these, and the first has none.
attacked = pytest.mark.parametrize("program", ["7_queue", "14_strangers"])
over_tcp = not_over_verbs("the attacks make connections of TCP")
GIVEN_UP = "nothing has happened for 10 s"


def is_defended(program):
    return program == "14_strangers"


@attacked
def test_reason(serve, program):
    """scripts/empty asks for pages and names none. It is told why its session ends, or it
    waits for pages that don't come."""
    server = serve(program)
    client = subprocess.run(
        ["scripts/empty", program, server.address], cwd=ROOT, check=False, text=True,
        capture_output=True, env={**os.environ, "CXXFLAGS": QUICK_CXXFLAGS})
    assert client.returncode == 1, client
    server.process.wait_for(r"^\[1\] error: bad message: ")
    assert ("the server has refused: bad message: its sizes do not fit together"
            if is_defended(program) else GIVEN_UP) in client.stderr
    server.stop()


@over_tcp
@attacked
def test_greeting(serve, program):
    """scripts/stranger ends a session whose messages carry no nonce, and none that has
    one."""
    server = serve(program, "tcp")
    client = server.start_client("65536", "100", "1000000")
    server.process.wait_for(r"^\[1\] .*WRITE: ")
    done = subprocess.run(
        ["scripts/stranger", server.address], cwd=ROOT, check=False, text=True,
        capture_output=True, env={**os.environ, "BUILD": BUILD, "FI_PROVIDER": "tcp"})
    assert done.returncode == 0 and "to port " in done.stdout, done
    if is_defended(program):
        already = server.process.output.count("WRITE: ")
        server.process.wait_for("WRITE: ", count=already + 3)
        assert not server.errors()
    else:
        server.process.wait_for(r"^\[1\] error: bad message: type 1819043144$")
    client.signal(signal.SIGKILL)
    client.wait()
    server.process.signal(signal.SIGTERM)


FOR_THE_NINTH = {
    program: variant(program, ("kSilenceLimit = 10s;", "kSilenceLimit = 100s;"))
    for program in ("7_queue", "14_strangers")}


@attacked
@pytest.mark.long
def test_ninth_client(run, program):
    """It takes a busy server for a dead one, unless it is told that it has to wait. Eight
    stand still meanwhile, and the server is patient with them."""
    server = Server(run, FOR_THE_NINTH[program](), program)
    for place in range(1, PLACES + 1):
        client = server.start_client("4096", "1000", "1000000")
        server.process.wait_for(rf"^\[{place}\] Received RandomFill")
        client.signal(signal.SIGSTOP)
    ninth = run([f"{BUILD}/{program}", server.address, "4096", "10", "1"])
    if is_defended(program):
        ninth.wait_for("^The server can't serve us yet: waiting$")
        time.sleep(12)
        assert ninth.popen.poll() is None, ninth.output
    else:
        assert ninth.wait() == 1 and f"{GIVEN_UP} while waiting for ACCEPT" in ninth.output
    server.process.signal(signal.SIGKILL)


@over_tcp
@attacked
def test_idle_strangers(run, serve, program):
    """scripts/stranger takes the descriptors of a server that has only those which it was
    given at first."""
    server = serve(program, "tcp",
                   wrapper=["sh", "-c", 'ulimit -Sn 256; exec "$0" "$@"'])
    stranger = run(["scripts/stranger", "-c", "300", server.address])
    folder = f"/proc/{server.process.popen.pid}/fd"
    end = time.monotonic() + 30 * TIME_FACTOR
    while len(os.listdir(folder)) < 256:
        assert time.monotonic() < end, stranger.output
        time.sleep(0.1)
    client = server.start_client("4096", "10", "1")
    assert (client.wait(), GIVEN_UP in client.output) == (
        (0, False) if is_defended(program) else (1, True)), client.output
    server.process.signal(signal.SIGTERM)


@over_tcp
@attacked
def test_closed_files(serve, program):
    """Without standard input and error, a server prints its errors into a file of
    libfabric's, unless it has taken these numbers first."""
    server = serve(program, "tcp", wrapper=["sh", "-c", 'exec "$0" "$@" <&- 2>&-'])
    files = {os.readlink(f"/proc/{server.process.popen.pid}/fd/{fd}") for fd in (0, 2)}
    assert (files == {"/dev/null"}) == is_defended(program)
    server.stop()
