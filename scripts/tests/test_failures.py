"""Peers that vanish, signals, wrong arguments: nothing is lost, and whatever goes
wrong is said."""

import concurrent.futures
import contextlib
import fcntl
import itertools
import os
import random
import re
import resource
import signal
import socket
import subprocess
import time

import pytest

from fakes import CrowdGuest, FakeClient, FakeServer
from harness import (LIBFABRIC_LEAKS, PROGRAMS, PROVIDERS, TIME_FACTOR, Server,
                     nobody_at, owned_shm_files, shares_of_a_core, under_strict)
from marks import (each_provider, ends_in_a_rendezvous, not_over_verbs, over, takes_shm,
                   takes_strict, two_providers)
from messages import TEXT, plain
from repository import ALL, ROOT
from table import ADDRESS, EXAMPLES, TABLE, WRONG_ADDRESSES

# How many clients test_killed_clients kills. KILLS=50 takes minutes.
KILLS = int(os.environ.get("KILLS", "3"))


@pytest.mark.builds("sanitized")  # it takes long
@ends_in_a_rendezvous
@over([p for p in PROGRAMS if not TABLE[p].killed_in])
def test_killed_clients(serve, program, provider):
    """Clients that are killed at any moment. They cost the others nothing, two of
    which are there at any time, and the next one gets its data. The programs that are
    left out have such a test in a file of their own."""
    server = serve(program, provider, **LIBFABRIC_LEAKS)
    with server.others(*server.entry.others):
        for _ in range(KILLS):
            already = len(server.process.lines)
            client = server.start_client(*server.entry.long)
            if provider == "shm" and server.entry.long_begun:
                server.process.wait_for(server.entry.long_begun, after=already)
            time.sleep(random.uniform(0, 0.8))
            client.kill()
    server.check_client()
    server.stop()


@pytest.mark.builds("sanitized")  # it takes long
@pytest.mark.parametrize("program", ["4_hello", "7_queue", "14_strangers"])
def test_server_gone(serve, run, build, program):
    """A client whose server has gone, or never was there, says so."""
    servers = [serve(program, provider) for provider in PROVIDERS
               if program == "4_hello" or provider in ("", "shm")]
    for server in servers:
        server.process.kill()
    # Addresses that are well-formed and nobody's: port 9 here, and a name.
    nobody = {"": "020000097f0000010000000000000000",
              "shm": b"fi_shm://1:0:0\0".hex()}
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(nobody_at(server.address))
        clients = [server.start_client(*server.entry.short) for server in servers]
        clients += [run([f"{build}/{program}", address], provider)
                    for provider, address in nobody.items()]
        for client in clients:
            client.check_error(".*( the same FI_PROVIDER|still running)[?]")


@each_provider
def test_server_gone_before_the_bye(serve, provider, tmp_path):
    """A client that has all its pages, and whose server dies before the BYE, compares them
    all the same. Over sockets, the BYE fails in the post itself."""
    server = serve("7_queue", provider)
    os.mkfifo(tmp_path / "unread")
    pipe = os.open(tmp_path / "unread", os.O_RDWR)
    # It has room for two lines, so the client stands still with the third, "Received".
    room = len(server.process.lines[0]) + 80
    os.write(pipe, b"." * (fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096) - room))
    client = server.run(
        ["bash", "-c", 'exec "$@" >"$0"', str(tmp_path / "unread"), *server.command,
         server.addresses, "64", "10", "1"], server.provider)
    server.process.wait_for("RandomFill request")
    time.sleep(2 * TIME_FACTOR)
    assert client.popen.poll() is None, client.output
    server.process.kill()
    output = os.read(pipe, 4096)
    assert b"Sent RandomFill" in output and b"Received" not in output, output
    assert client.wait() == 0, client.output
    assert b"Data is correct.\n" in os.read(pipe, 4096)
    os.close(pipe)


@not_over_verbs("under that limit, no client gets through to the server")
@pytest.mark.parametrize("program,pages,mb", [
    ("7_queue", (1 << 20, 64), 60), ("14_strangers", (1 << 20, 500), 300)])
def test_no_memory(serve, program, pages, mb):
    """A server that gets no more memory says so to one client, and serves the
    next."""
    server = serve(program)
    pid = server.process.popen.pid
    size = server.process.status("VmSize") * 1024
    resource.prlimit(pid, resource.RLIMIT_AS,
                     (size + (mb << 20), resource.RLIM_INFINITY))
    client = server.start_client(*map(str, pages), "1")
    server.process.wait_for(r"^\[1\] error: ")
    server.check_client("65536", "10", "1")
    client.signal(signal.SIGINT)  # 7_queue tells it nothing
    assert client.wait(30) == 1, client.output
    assert len(server.errors()) == 1
    server.stop()


@pytest.mark.builds("sanitized")  # it takes long
@ends_in_a_rendezvous
@over(PROGRAMS)
def test_signals(run, serve, build, program, provider):
    """At any moment: while starting, idle, with a client, in a transfer. Each
    moment has a server of its own."""
    def while_starting(signum, moment):
        server = run([f"{build}/{program}"], provider)
        time.sleep(moment)
        server.signal(signum)
        status = server.wait()
        # Before there is an endpoint, the signal still has its default effect, or
        # that of a library (PSM's exits with 1).
        assert status == 0 or "following command" not in server.output, server.output
        assert not owned_shm_files([server.popen.pid], server.born)

    def with_a_client(signum, moment):
        server = serve(program, provider, **LIBFABRIC_LEAKS)
        client = server.start_client(*server.entry.long)
        time.sleep(moment)
        server.stop(signum)
        client.signal(signal.SIGKILL)  # what it says: test_server_gone

    with concurrent.futures.ThreadPoolExecutor() as pool:
        tests = [pool.submit(when, signum, moment)
                 # Some libraries let main() begin after 0.2 s: see common.sh.
                 for when, moments in [(while_starting, [0.01, 0.05, 0.2, 0.3]),
                                       (with_a_client, [0, 0.3, 0.6, 1.0])]
                 for signum, moment in zip([signal.SIGINT, signal.SIGTERM] * 2,
                                           moments)]
        for test in tests:
            test.result()


# What asks a program to end.
ASKING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def test_second_signal(build):
    """A process that hangs does not get as far as its end. Then a second signal, of
    the same kind or another, ends it at once. Here, a client of a server that does not
    answer hangs because nobody reads its error."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = (b"\2\0" + mute.getsockname()[1].to_bytes(2, "big") + b"\x7f\0\0\1" +
                   bytes(8)).hex()
        # As many of each program as there are kinds of first signals.
        processes = [subprocess.Popen(
            [f"{build}/{program}", *client_args(program, address)], cwd=ROOT, stderr=writer,
            stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
            env={**os.environ, "IPATH_NO_BACKTRACE": "1", "HFI_NO_BACKTRACE": "1"})
            for program in PROGRAMS for _ in ASKING]
        try:
            while not all(catches(process.pid, signum) for process in processes
                          for signum in ASKING):
                time.sleep(0.01)
            time.sleep(1)  # libraries may set handlers of their own before main() begins
            pairs = list(zip(processes, itertools.cycle(itertools.product(ASKING, ASKING))))
            for process, (first, _) in pairs:
                process.send_signal(first)
            time.sleep(3 * TIME_FACTOR)  # some wait a second for an answer
            for process, (_, second) in pairs:
                assert process.poll() is None, process.args
                process.send_signal(second)
            for process, (_, second) in pairs:
                # As a shell sees it, both are the same.
                assert process.wait(60) in (-second, 128 + second), process.args
        finally:
            for process in processes:
                process.kill()
                process.wait()
            os.close(reader)
            os.close(writer)


def catches(pid, signum):
    """Whether a process has a handler for a signal."""
    with open(f"/proc/{pid}/status") as status:
        mask = int(re.search(r"SigCgt:\s+([0-9a-f]+)", status.read())[1], 16)
    return bool(mask >> (signum - 1) & 1)


@two_providers
@pytest.mark.parametrize("program", ["7_queue", "14_strangers"])
def test_client_signals_at_work(serve, program, provider):
    """Interrupted in the middle of its work, a client leaves nothing in /dev/shm. One of the
    former server says BYE, so that the server is rid of it long before its silence of
    10 s would mean something."""
    server = serve(program, provider, **LIBFABRIC_LEAKS)
    for signum in signal.SIGINT, signal.SIGTERM:
        already = len(server.process.lines)
        client = server.start_client(*TABLE["7_queue"].long)
        server.process.wait_for("Received RandomFill", after=already)
        time.sleep(random.uniform(0, 0.1))
        client.signal(signum)
        client.check_error("interrupted\n\\Z")
        assert not owned_shm_files([client.popen.pid], client.born)
        server.process.wait_for(r"^\[\d+\] (Done|error)", after=already)
    assert len(server.errors()) == 2
    server.check_client()
    server.stop()


@takes_shm
def test_client_signals_at_its_first_contact(serve):
    """Its shared memory outlives the signal, because the server is about to map it. The
    provider's own handler would delete it at once."""
    server = serve("7_queue", "shm")
    server.process.signal(signal.SIGSTOP)
    client = server.start_client(*server.entry.long)
    while not owned_shm_files([client.popen.pid], client.born):
        time.sleep(0.01)
    time.sleep(0.1)
    client.signal(signal.SIGINT)
    time.sleep(0.1)
    kept = owned_shm_files([client.popen.pid], client.born)
    assert kept or client.popen.poll() is not None
    server.process.signal(signal.SIGCONT)
    assert client.wait() == 1 and not owned_shm_files([client.popen.pid], client.born)
    server.check_client()
    server.stop()


@over(PROGRAMS)
def test_client_signals_at_the_start(serve, program, provider):
    """Clients that are interrupted in their first moments, also before they have turned
    to the server, or while they do."""
    server = serve(program, provider)

    def interrupt(moment):
        client = server.start_client(*server.entry.quick)
        time.sleep(moment)
        client.signal(signal.SIGINT)
        status = client.wait()
        # At first, the signal still has its default effect: see test_signals.
        assert status == 1 and "error: interrupted" in client.output or \
            status == 0 and server.entry.success in client.output or \
            status == -signal.SIGINT or not client.output, client.output
        assert not owned_shm_files([client.popen.pid], client.born)

    # Over tcp, none has ever harmed the server. Over shm, many at a time may hang it on a
    # busy machine: kContactGrace is then too short for a first contact.
    count, together = (10, 2) if provider == "shm" else (5, 5)
    with concurrent.futures.ThreadPoolExecutor(together) as pool:
        list(pool.map(interrupt, [random.uniform(0, 0.3) for _ in range(count)]))
    server.check_client()
    server.stop()


@two_providers
def test_stood_still(run, build, provider):
    """A client that has stood still for longer than it waits first reads what has come."""
    server = FakeServer(run, build, "5_reverse", provider=provider)
    assert server.receive() == plain(TEXT) + b"Hello, world!"
    server.client.signal(signal.SIGSTOP)
    server.send(plain(TEXT) + b"!dlrow ,olleH")
    time.sleep(11)
    server.client.signal(signal.SIGCONT)
    assert server.client.wait() == 0, server.client.output
    assert "The text is correct." in server.client.output


# Nobody can be at these: connect(2) to them fails at once, or gets no answer.
NOWHERE = "255.255.255.255", "224.0.0.1", "240.0.0.1"


@pytest.mark.long
@not_over_verbs("these are addresses of TCP")
def test_addresses_of_nobody(run, serve):
    """A client behind a translator of addresses, for example, names one at which the server
    can't reach it. That costs 13_crowd nothing, also when it gives this client up. The
    others are in test_dead_addresses."""
    server = serve("13_crowd", "tcp")
    client = CrowdGuest(run, server)
    for host in NOWHERE:
        client.send(client.connect(client.address[:4] + socket.inet_aton(host) +
                                   client.address[8:]))
        client.number = client.number + 1
    time.sleep(12)
    server.check_client(timeout=60)
    server.stop()


@over(PROGRAMS)
def test_nobody_reads(serve, program, provider):
    """A server whose lines go to a process that has ended, as `head` does: that is a signal
    to end, so it closes everything."""
    # This one ends once it has seen the address.
    head = ["bash", "-c", 'exec "$@" > >(sed "/^  /q")', "bash"]
    server = serve(program, provider, wrapper=head)
    client = server.start_client()
    assert server.process.wait() == 0, server.process.output
    assert not owned_shm_files([server.process.popen.pid], server.process.born)
    client.signal(signal.SIGKILL)  # what it says: test_server_gone


@two_providers
def test_nobody_reads_a_client(serve, provider):
    """Each of its lines brings a signal then. The later ones are no second signal, which
    would end it at once."""
    server = serve("7_queue", provider)
    unread = ["bash", "-c", 'exec > >(exit); wait $!; exec "$@"', "bash"]
    client = server.run([*unread, *server.command, server.addresses, "65536", "10", "1"],
                        server.provider)
    assert client.wait() in (0, 1), client.output  # it may be done by then
    server.stop()


def busy(servers):
    """Those that take more than 5 % of a core for three seconds."""
    shares = shares_of_a_core([server.process for server in servers], 3 if servers else 0)
    return [server for server, share in zip(servers, shares) if share >= 0.05]


def test_idle(serve):
    """Servers that wait take next to nothing."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        servers = list(pool.map(lambda which: serve(*which), [
            (program, provider) for program in (PROGRAMS if ALL else EXAMPLES)
            for provider in PROVIDERS if provider not in TABLE[program].refused_by]))
        # On a busy machine, the first seconds may still be about the start.
        time.sleep(1)
        found = busy(busy(busy(servers)))
        assert not found, [(server.program, server.provider) for server in found]
        list(pool.map(Server.stop, servers))


@two_providers
def test_idle_in_a_session(run, serve, provider):
    """A client that says nothing keeps its server as quiet, also after one that has gone."""
    # Those that lend memory poll while they have clients, whose READs and WRITEs may need it.
    servers = [serve(program, provider) for program in PROGRAMS
               if program not in ("8_malloc", "10_lock", "13_crowd")]
    for server in servers:
        if server.entry.bad_sessions:
            server.check_client()
            FakeClient(run, server).open_session()
    time.sleep(1)
    assert [server.program for server in busy(servers)] == []
    for server in servers:
        server.stop()


# ---- Arguments ----

def ran(build, program, *args, **env):
    """One that ends by itself, and soon."""
    return subprocess.run([f"{build}/{program}", *args], cwd=ROOT, text=True, check=False,
                          capture_output=True, timeout=20, env={**os.environ, **env})


def client_args(program, address=ADDRESS):
    """The fewest arguments that a client takes."""
    return [address, *TABLE[program].least]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.every_program
def test_wrong_arguments(build, program):
    # What is wrong with these is the address, and nothing else.
    wrong = {what: [*args, *TABLE[program].least]
             for what, args in WRONG_ADDRESSES.items()}
    wrong.update(TABLE[program].wrong)

    def check(case):
        what, args = case
        done = ran(build, program, *args)
        assert done.returncode == 2, (what, done)
        assert done.stderr.startswith("error: "), (what, done)
        assert "Usage:" in done.stderr, (what, done)
        # Before it has turned to anybody.
        assert "Sent" not in done.stdout, (what, done)

    # Libraries may sleep for 0.2 s before main() begins: see common.sh.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(check, wrong.items()))


@pytest.mark.builds("plain", "sanitized")
@pytest.mark.parametrize("program", PROGRAMS)
def test_address_of_another_provider(build, program):
    """It is well-formed; only this provider has no such addresses."""
    for address in [b"fi_shm://1:0:0\0".hex(), *[ADDRESS[:-2]] * TABLE[program].guarded]:
        done = ran(build, program, *client_args(program, address))
        assert done.returncode == 1
        assert re.match(r"error: .* is not an address of (our )?provider.*|error: fi_av_insert "
                        r"\(do both sides use the same FI_PROVIDER\?\): Invalid argument\n$",
                        done.stderr), done
        assert "Sent" not in done.stdout


@pytest.mark.builds("plain", "sanitized")
@pytest.mark.parametrize("program", PROGRAMS)
def test_help(build, program):
    done = ran(build, program, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage:") and "ADDRESS" in done.stdout
    assert not done.stderr


@pytest.mark.parametrize("program", [p for p in PROGRAMS if TABLE[p].imm_data])
def test_no_gpu(build, program):
    """Who asks for a GPU where there is none, or without CUDA, gets an error before anything
    else happens."""
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("there is one")
    for args in ["--gpu"], ["--gpu", ADDRESS]:
        done = ran(build, program, *args)
        assert done.returncode == 1 and not done.stdout, done
        assert re.fullmatch(r"error: (cudaMalloc: .*|built without CUDA)\n", done.stderr), done


@pytest.mark.builds("plain", "sanitized")
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_provider(build, program):
    """An error that says what was tried."""
    for args in [], client_args(program):
        done = ran(build, program, *args, FI_PROVIDER="none")
        assert done.returncode == 1
        assert done.stderr.startswith(
            "error: fi_getinfo (`fi_info -t FI_EP_RDM` lists what there is): No data")


# ---- Networks that are not here: see strict.cpp ----


@takes_strict
@two_providers
@pytest.mark.parametrize("program", [p for p in PROGRAMS if TABLE[p].imm_data])
def test_no_immediate_data(run, build, program, provider):
    """Where a network has no immediate data, server and client say so at once."""
    address = b"fi_shm://1:0:0\0".hex() if provider else ADDRESS
    for args in [], [address]:
        process = run([f"{build}/{program}", *args], provider,
                      **under_strict(run, STRICT_LACKS="immediate-data"))
        process.check_error("no immediate data; try another FI_PROVIDER$")
        assert "Sent" not in process.output


@takes_strict
@pytest.mark.parametrize("program", PROGRAMS)
def test_locked_memory(run, serve, build, program):
    """Where not enough memory may be locked, a line says so."""
    server = run([f"{build}/{program}"],
                 **under_strict(run, STRICT_LACKS="memory-to-register"))
    server.check_error("fi_mr_reg(attr)?( of [0-9]+ bytes)?: Cannot allocate memory")
    server = serve(program, **under_strict(run))
    client = server.start_client(STRICT_LACKS="memory-to-send")
    client.check_error("SEND failed: Cannot allocate memory")
    server.stop()
