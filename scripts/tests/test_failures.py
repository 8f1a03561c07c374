"""Peers that vanish, signals, wrong arguments: nothing is lost, and whatever goes
wrong is said."""

import concurrent.futures
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

from conftest import (BUILD, LIBFABRIC_LEAKS, PROGRAMS, PROVIDERS, QUICK, ROOT, SHORT,
                      REFUSED, SUCCESS, TIME_FACTOR, Server, not_over_verbs,
                      owned_shm_files)

ids = {"argvalues": PROVIDERS, "ids": [p or "default" for p in PROVIDERS]}
two_providers = pytest.mark.parametrize("provider", ["", "shm"],
                                        ids=["default", "shm"])
# What takes each program long enough to be killed in the middle. The pages are
# large: a process that is killed while it holds a lock in the shared memory of
# libfabric 1.17's shm provider takes the others with it, and with small pages it
# holds one a good part of the time. Two such clients leave memory for others.
LONG = {
    "4_hello": ["x" * 60000],
    "5_reverse": ["x" * 60000],
    "6_write": ["1048576", "64"],
    "7_queue": ["1048576", "200", "100000"],
    "8_malloc": ["100"],
    "9_file": ["1000000000", "1"],
    "10_lock": ["10000"],
}
# What clients do that are not killed.
OTHERS = {**QUICK, "6_write": ["65536", "100"], "7_queue": ["65536", "100", "3"]}
# How many clients test_killed_clients kills. KILLS=50 takes minutes.
KILLS = int(os.environ.get("KILLS", "4"))


@pytest.mark.builds("sanitized")  # it takes long
@two_providers
@pytest.mark.parametrize("program", [p for p in PROGRAMS
                                     if p not in ("8_malloc", "9_file", "10_lock")])
def test_killed_clients(serve, program, provider):
    """Clients that are killed at any moment. They cost the others nothing, two of
    which are there at any time. For the programs after 7_queue, see test_malloc.py,
    test_file.py and test_lock.py."""
    server = serve(program, provider, **LIBFABRIC_LEAKS)
    with server.others(*OTHERS.get(program, [])):
        for _ in range(KILLS):
            already = len(server.process.lines)
            client = server.start_client(*LONG[program])
            # Not just after its first message: libfabric 1.17's shm provider does
            # not survive that its sender has gone before the message is seen.
            if provider == "shm" and program in ("6_write", "7_queue"):
                server.process.wait_for("^.*RandomFill.*=1048576", after=already)
            time.sleep(random.uniform(0, 0.8))
            client.signal(signal.SIGKILL)
            client.wait()
    server.check_client()
    server.stop()


@not_over_verbs("a stopped client still gets its WRITEs, so it does not fall silent")
@pytest.mark.builds("plain")
@pytest.mark.parametrize(
    "program,provider", [("7_queue", provider) for provider in PROVIDERS
                         if provider in ("", "udp;ofi_rxd")])
def test_stopped_clients(serve, program, provider):
    """Four clients that are stopped, in the middle of the handshake or of a
    transfer. They cost the others nothing, and their sessions end after the limit
    of 10 s. Through shm, others may have to wait: whenever a client polls, it
    holds a lock in memory that the server writes to."""
    server = serve(program, provider)
    clients = []
    for moment in ["Registered|domain", "Sent CONNECT", "Sent [^C]", "Sent [^C]"]:
        clients.append(server.start_client(*LONG[program]))
        clients[-1].wait_for(moment)
        clients[-1].signal(signal.SIGSTOP)
    for _ in range(2):
        other = server.check_client(*SHORT.get(program, []))
        assert other.seconds < 8
    # Those of which the server knows. Some may have been through with it.
    server.process.wait_for("Received CONNECT", count=4)
    end = time.monotonic() + 40
    while True:
        output = server.process.output
        ended = re.findall(r"^\[(\d+)\] (?:Done|error)", output, re.M)
        if len(ended) == output.count("Received CONNECT"):
            break
        assert time.monotonic() < end, output
        time.sleep(0.1)
    for client in clients:
        client.signal(signal.SIGCONT)
        client.signal(signal.SIGTERM)
        status = client.wait(30)
        assert status == 1 and "error: " in client.output or \
            status == 0 and SUCCESS[program] in client.output, client.output
    server.check_client()
    server.stop()


def reserve_port(server):
    """Keeps the port of a server that has gone from other processes, which would get
    its clients' messages. Nobody listens on it."""
    address = bytes.fromhex(server.address)
    if server.provider == "shm" or len(address) != 16:
        return None
    kind = socket.SOCK_DGRAM if "udp" in server.provider else socket.SOCK_STREAM
    reserved = socket.socket(socket.AF_INET, kind)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("0.0.0.0", int.from_bytes(address[2:4], "big")))
    return reserved


@pytest.mark.builds("sanitized")  # it takes long
@pytest.mark.parametrize("program", ["4_hello", "7_queue"])
def test_server_gone(serve, run, build, program):
    """A client whose server has gone, or never was there, says so."""
    servers = [serve(program, provider) for provider in PROVIDERS
               if program == "4_hello" or provider in ("", "shm")]
    for server in servers:
        server.process.signal(signal.SIGKILL)
        server.process.wait()
    reserved = [reserve_port(server) for server in servers]
    clients = [server.start_client(*SHORT.get(program, [])) for server in servers]
    # Addresses that are well-formed and nobody's: port 9 here, and a name.
    nobody = {"": "020000097f0000010000000000000000",
              "shm": b"fi_shm://1:0:0\0".hex()}
    clients += [run([f"{build}/{program}", address], provider)
                for provider, address in nobody.items()]
    for client in clients:
        assert client.wait(30) == 1, client.output
        assert "error: " in client.output
        assert " the same FI_PROVIDER?" in client.output or \
            "still running?" in client.output
        # 7 clients that all poll share two cores here.
        assert client.seconds < 18 * TIME_FACTOR
    for port in reserved:
        if port:
            port.close()


@pytest.mark.builds("sanitized")  # it takes long
@pytest.mark.parametrize("program", ["7_queue", "8_malloc"])
def test_server_killed_during_work(serve, program):
    """Through tcp. Through shm, libfabric 1.17 may never return: the server may
    have held a lock that lies in memory of both."""
    server = serve(program)
    client = server.start_client(*LONG[program])
    # Before, it waits for an ACCEPT, and for up to 60 s.
    client.wait_for("Sent [^C]|Borrowed")
    time.sleep(random.uniform(0, 0.5))
    server.process.signal(signal.SIGKILL)
    killed = time.monotonic()
    status = client.wait(30)
    # The short ones may have been through with it.
    assert status == 1 or (status == 0 and "orrect." in client.output)
    assert program != "7_queue" or status == 1, client.output
    if status == 1:
        assert "error: " in client.output
    assert time.monotonic() - killed < 15


@not_over_verbs("under that limit, no client gets through to the server")
@pytest.mark.builds("plain")
def test_no_memory(serve):
    """A server that gets no more memory says so to one client, and serves the
    next."""
    server = serve("7_queue")
    pid = server.process.popen.pid
    with open(f"/proc/{pid}/status") as status:
        size = int(re.search(r"VmSize:\s+(\d+)", status.read())[1]) * 1024
    resource.prlimit(pid, resource.RLIMIT_AS,
                     (size + (300 << 20), resource.RLIM_INFINITY))
    client = server.start_client(str(16 << 20), "32", "1")
    server.process.wait_for(r"^\[1\] error: ")
    server.check_client("65536", "10", "1")
    assert client.wait(30) == 1, client.output
    assert len(server.errors()) == 1
    server.stop()


@pytest.mark.builds("sanitized")  # it takes long
@two_providers
@pytest.mark.parametrize("program", PROGRAMS)
def test_signals(run, serve, build, program, provider):
    """At any moment: while starting, idle, with a client, in a transfer. Each
    moment has a server of its own."""
    def while_starting(signum, moment):
        server = run([f"{build}/{program}"], provider)
        time.sleep(moment)
        server.signal(signum)
        status = server.wait(10)
        # Before main() has begun, the signal still has its default effect, or
        # that of a library (PSM's exits with 1); main() never ends without a
        # word and a status other than 0.
        assert status == 0 or not server.output, server.output

    def with_a_client(signum, moment):
        server = serve(program, provider, **LIBFABRIC_LEAKS)
        client = server.start_client(*LONG[program])
        time.sleep(moment)
        server.stop(signum)
        client.signal(signal.SIGKILL)  # what it says: test_server_gone

    with concurrent.futures.ThreadPoolExecutor() as pool:
        tests = [pool.submit(when, signum, moment)
                 for when, moments in [(while_starting, [0.05, 0.1, 0.2, 0.3]),
                                       (with_a_client, [0, 0.3, 0.6, 1.0])]
                 for signum, moment in zip([signal.SIGINT, signal.SIGTERM] * 2,
                                           moments)]
        for test in tests:
            test.result()


@pytest.mark.builds("plain")
def test_second_signal(build):
    """A process that hangs does not get as far as closing. Then a second signal
    ends it at once. Here, it hangs because nobody reads what it prints."""
    reader, writer = os.pipe()
    flags = fcntl.fcntl(writer, fcntl.F_GETFL)
    fcntl.fcntl(writer, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        fcntl.fcntl(writer, fcntl.F_SETFL, flags)
    # A server and a client of each program.
    processes = [subprocess.Popen(
        [f"{build}/{program}", *args], cwd=ROOT, stdout=writer,
        stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        env={**os.environ, "IPATH_NO_BACKTRACE": "1", "HFI_NO_BACKTRACE": "1"})
        for program in PROGRAMS for args in [[], client_args(program)]]
    try:
        while not all(catches(process.pid, signal.SIGINT) for process in processes):
            time.sleep(0.01)
        # Libraries may set handlers of their own before main() begins.
        time.sleep(1)
        for process in processes:
            process.send_signal(signal.SIGINT)
        time.sleep(1)
        for process in processes:
            assert process.poll() is None, process.args
            assert not catches(process.pid, signal.SIGINT)
            process.send_signal(signal.SIGINT)
        for process in processes:
            assert process.wait(5) == -signal.SIGINT, process.args
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


@pytest.mark.builds("sanitized")  # it takes long
@pytest.mark.parametrize("program", PROGRAMS)
def test_client_signals(serve, program):
    """A client that is interrupted says so, and costs the server nothing."""
    server = serve(program, **LIBFABRIC_LEAKS)
    for signum, moment in [(signal.SIGINT, 0.1), (signal.SIGTERM, 0.3),
                           (signal.SIGINT, 0.7)]:
        client = server.start_client(*LONG[program])
        client.wait_for("domain: ")
        time.sleep(moment)
        client.signal(signum)
        status = client.wait(20)
        assert status == 1 and "error: interrupted" in client.output or \
            status == 0 and SUCCESS[program] in client.output, client.output
    server.check_client()
    server.stop()


@pytest.mark.builds("plain")
@two_providers
@pytest.mark.parametrize("program,args,started", [
    ("7_queue", LONG["7_queue"], "Sent RandomFill"), ("8_malloc", ["400"], "Borrowed")])
def test_client_signals_at_work(serve, program, args, started, provider):
    """Interrupted in the middle of its work, a client leaves nothing in /dev/shm, and
    says BYE, so that the server is rid of it long before its silence of 10 s would
    mean something."""
    server = serve(program, provider, **LIBFABRIC_LEAKS)
    for signum in signal.SIGINT, signal.SIGTERM:
        already = len(server.process.lines)
        client = server.start_client(*args)
        client.wait_for(started)
        if program == "7_queue":
            server.process.wait_for("Registered", after=already)
        # The work of 8_malloc takes 0.3 s.
        time.sleep(random.uniform(0, 0.1))
        client.signal(signum)
        assert client.wait(20) == 1, client.output
        assert client.output.endswith("error: interrupted\n")
        assert not owned_shm_files([client.popen.pid])
        server.process.wait_for("Done.$", timeout=3, after=already)
    assert not server.errors()
    server.check_client()
    server.stop()


@pytest.mark.builds("plain")
@two_providers
@pytest.mark.parametrize("program", PROGRAMS)
def test_client_signals_at_the_start(serve, program, provider):
    """Clients that are interrupted in their first half second, also before they have
    turned to the server, or while they do."""
    server = serve(program, provider)

    def interrupt(moment):
        client = server.start_client(*QUICK.get(program, []))
        time.sleep(moment)
        client.signal(signal.SIGINT)
        status = client.wait(20)
        # Before main() has begun, it says nothing: see test_signals.
        assert status == 1 and "error: interrupted" in client.output or \
            status == 0 and SUCCESS[program] in client.output or \
            not client.output, client.output
        assert not owned_shm_files([client.popen.pid])

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        # Over tcp, none has ever harmed the server.
        count = 15 if provider == "shm" else 5
        list(pool.map(interrupt, [random.uniform(0, 0.5) for _ in range(count)]))
    server.check_client()
    server.stop()


@pytest.mark.builds("plain")
@two_providers
@pytest.mark.parametrize("program", PROGRAMS)
def test_nobody_reads(serve, program, provider):
    """A server whose lines go to a process that has ended, as `head` does. It serves
    its clients and closes everything all the same."""
    # This one ends once it has seen the address.
    head = ["bash", "-c", 'exec "$@" > >(sed "/^  /q")', "bash"]
    server = serve(program, provider, wrapper=head)
    for _ in range(2):
        server.check_client()
    assert "Received" not in server.process.output
    server.stop()


@pytest.mark.builds("plain")
def test_idle(serve):
    """Servers that wait take less than 5 % of a core."""
    pool = concurrent.futures.ThreadPoolExecutor(8)
    servers = list(pool.map(lambda which: serve(*which),
                            sorted({*itertools.product(PROGRAMS, PROVIDERS)} -
                                   {*REFUSED})))

    def ticks(server):
        with open(f"/proc/{server.process.popen.pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    # On a busy machine, the first seconds may still be about the start.
    busy = servers
    for _ in range(3):
        time.sleep(1)
        before = [ticks(server) for server in busy]
        started = time.monotonic()
        time.sleep(3)
        limit = 0.05 * (time.monotonic() - started) * os.sysconf("SC_CLK_TCK")
        busy = [server for server, earlier in zip(busy, before)
                if ticks(server) - earlier >= limit]
    assert not busy, [(server.program, server.provider) for server in busy]
    list(pool.map(Server.stop, servers))
    pool.shutdown()


# ---- Arguments ----

ADDRESS = "0200a3c90a0000010000000000000000"
WRONG = {
    "no hexadecimal": ["xyz1"],
    "odd length": [ADDRESS + "0"],
    "too long": ["00" * 257],
    "much too long": ["0" * 100000],
    "empty": [""],
    "an option": ["--port"],
    "minus": ["-1"],
}
WRONG_TEXT = {
    "empty text": [ADDRESS, ""],
    "too long": [ADDRESS, "x" * 65537],
    "too many": [ADDRESS, "a", "b"],
}
WRONG_SIZES = {
    "zero": [ADDRESS, "0", "8"],
    "zero pages": [ADDRESS, "4096", "0"],
    "negative": [ADDRESS, "-8", "8"],
    "negative pages": [ADDRESS, "8", "-8"],
    "no multiple of 8": [ADDRESS, "4095", "8"],
    "no number": [ADDRESS, "4k", "8"],
    "empty size": [ADDRESS, "", "8"],
    "fraction": [ADDRESS, "4096", "1.5"],
    "space": [ADDRESS, " 4096", "1"],
    "size only": [ADDRESS, "4096"],
    "enormous": [ADDRESS, "99999999999999999999999", "1"],
    "overflow": [ADDRESS, str(2**63), "2"],
    "overflow pages": [ADDRESS, "8", str(2**63)],
    "does not fit": [ADDRESS, str(8 << 20), "10000"],
    "too many pages": [ADDRESS, "8", "300000"],
    "page too large": [ADDRESS, str((16 << 20) + 8), "1"],
    "too many": [ADDRESS, "8", "8", "8", "8"],
}
WRONG_COUNT = {
    "zero": [ADDRESS, "0"],
    "negative": [ADDRESS, "-1"],
    "no number": [ADDRESS, "x"],
    "fraction": [ADDRESS, "1.5"],
    "empty count": [ADDRESS, ""],
    "space": [ADDRESS, " 1"],
    "too large": [ADDRESS, "1000001"],
    "overflow": [ADDRESS, str(2**64 + 1)],
    "too many": [ADDRESS, "1", "1"],
}


WRONG_FILE = {
    "no file": [ADDRESS],
    "zero slots": [ADDRESS, "Makefile", "0"],
    "negative slots": [ADDRESS, "Makefile", "-1"],
    "no number": [ADDRESS, "Makefile", "x"],
    "fraction": [ADDRESS, "Makefile", "1.5"],
    "empty slots": [ADDRESS, "Makefile", ""],
    "space": [ADDRESS, "Makefile", " 1"],
    "too many slots": [ADDRESS, "Makefile", "65"],
    "overflow": [ADDRESS, "Makefile", str(2**64 + 1)],
    "too many": [ADDRESS, "Makefile", "8", "8"],
}


def client_args(program, address=ADDRESS):
    """The fewest arguments that a client takes."""
    return [address, "Makefile"] if program == "9_file" else [address]


def wrong_arguments(program):
    wrong = dict(WRONG)
    if program in ("4_hello", "5_reverse"):
        wrong.update(WRONG_TEXT)
    elif program in ("8_malloc", "10_lock"):
        wrong.update(WRONG_COUNT)
    elif program == "9_file":
        # Otherwise, FILE is what is wrong.
        wrong = {what: [*args, "Makefile"] for what, args in WRONG.items()}
        wrong.update(WRONG_FILE)
    else:
        wrong.update(WRONG_SIZES)
    if program == "6_write":
        wrong["repeat"] = [ADDRESS, "8", "8", "8"]
    if program == "7_queue":
        wrong["repeat 0"] = [ADDRESS, "8", "8", "0"]
        wrong["repeat negative"] = [ADDRESS, "8", "8", "-1"]
        wrong["repeat enormous"] = [ADDRESS, "8", "8", str(2**63)]
    return wrong


@pytest.mark.builds("plain")
@pytest.mark.parametrize("program", PROGRAMS)
def test_wrong_arguments(build, program):
    def check(case):
        what, args = case
        done = subprocess.run([f"{build}/{program}", *args], cwd=ROOT,
                              text=True, capture_output=True, check=False,
                              timeout=20)
        assert done.returncode == 2, (what, done)
        assert done.stderr.startswith("error: "), (what, done)
        assert "Usage:" in done.stderr, (what, done)
        # Before it has turned to anybody.
        assert "Sent" not in done.stdout, (what, done)

    # Libraries sleep for 0.2 s before main() begins.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(check, wrong_arguments(program).items()))


@pytest.mark.parametrize("program", PROGRAMS)
def test_address_of_another_provider(build, program):
    """It is well-formed; only this provider has no such addresses."""
    for address in [ADDRESS[:-2], b"fi_shm://1:0:0\0".hex()]:
        done = subprocess.run([f"{build}/{program}", *client_args(program, address)],
                              cwd=ROOT, text=True, capture_output=True,
                              check=False, timeout=20)
        assert done.returncode == 1
        assert "is not an address of provider" in done.stderr
        assert "Sent" not in done.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_help(build, program):
    done = subprocess.run([f"{build}/{program}", "--help"], cwd=ROOT, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage:") and "ADDRESS" in done.stdout
    assert not done.stderr


def test_list(build):
    for provider in PROVIDERS:
        env = dict(os.environ)
        if provider:
            env["FI_PROVIDER"] = provider
        done = subprocess.run([f"{build}/4_hello", "--list"], cwd=ROOT,
                              text=True, capture_output=True, check=True,
                              env=env)
        lines = done.stdout.splitlines()
        assert lines and len(set(lines)) == len(lines)
        for line in lines:
            assert line.startswith("domain: ")
            assert f"provider: {provider}" in line


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_provider(build, program):
    """An error that says what was tried."""
    for args in [], client_args(program):
        done = subprocess.run([f"{build}/{program}", *args], cwd=ROOT, text=True,
                              capture_output=True, check=False,
                              env={**os.environ, "FI_PROVIDER": "none"})
        assert done.returncode == 1
        assert done.stderr.startswith("error: FI_PROVIDER='none' fi_getinfo ")


# ---- Networks that are not here: see reorder.cpp ----

PRELOAD = {"LD_PRELOAD": os.path.join(ROOT, BUILD, "reorder.so"), "REORDER_MS": "0"}


@pytest.mark.builds("plain")
@pytest.mark.parametrize("program", PROGRAMS)
def test_event_queue(serve, program):
    """Each endpoint has an event queue, without which efa would end the process one
    day. reorder.so does so at once."""
    server = serve(program, **PRELOAD)
    server.check_client()
    server.stop()


@pytest.mark.builds("plain")
@two_providers
@pytest.mark.parametrize("program", ["6_write", "7_queue"])
def test_no_immediate_data(run, build, program, provider):
    """Where a network has no immediate data, server and client say so at once."""
    address = b"fi_shm://1:0:0\0".hex() if provider else ADDRESS
    for args in [], [address]:
        process = run([f"{build}/{program}", *args], provider, NO_IMM_DATA="1",
                      **PRELOAD)
        assert process.wait(5) == 1
        assert re.search(r"^error: \S+ has no immediate data; try another provider$",
                         process.output, re.M)
        assert "Sent" not in process.output


@pytest.mark.builds("plain")
@pytest.mark.parametrize("program", PROGRAMS)
def test_locked_memory(run, serve, build, program):
    """Where not enough memory may be locked, the line about it names the limit."""
    hint = "Cannot allocate memory .*`ulimit -l`"
    server = run([f"{build}/{program}"], NO_MEMORY="register", **PRELOAD)
    assert server.wait(5) == 1
    assert re.search(f"^error: fi_mr_regattr .*{hint}", server.output, re.M)
    server = serve(program)
    client = server.start_client(NO_MEMORY="send", **PRELOAD)
    assert client.wait(5) == 1
    assert re.search(f"^error: SEND failed: {hint}", client.output, re.M)
    server.check_client()
    server.stop()


@pytest.mark.builds("plain")
@pytest.mark.parametrize("provider", **ids)
def test_callback_that_throws(run, build, provider):
    """It does not cost the completions that came together with its own."""
    callbacks = run([f"{build}/callbacks"], provider)
    assert callbacks.wait(10) == 0, callbacks.output
