"""What the tests share: building the programs, running servers and clients."""

import concurrent.futures
import contextlib
import filecmp
import io
import itertools
import os
import pty
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import typing

import pytest

# Processes in the background may ignore Ctrl-C. The programs that the tests start
# would inherit this, and ignore it until main() says otherwise.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
# Some tests import what they check: bench.py and chapters.py.
sys.path += [f"{ROOT}/scripts/bench", f"{ROOT}/scripts/book"]
BUILD = os.environ.get("BUILD") or "build"
# What scripts/rdma/inside.sh says: the default provider is verbs here, over a device
# of this kind; and on an emulated processor, all that waits has to wait longer.
OVER_VERBS = os.environ.get("RDMA", "")
TIME_FACTOR = float(os.environ.get("TIME_FACTOR", "1"))


def number(name):
    """4 for 4_hello."""
    return int(re.match(r"\d*", name)[0] or -1)


def numbered(folder, suffix):
    """The names of a folder's files that end like this, without their ends, in the
    order of their numbers."""
    return sorted((name.removesuffix(suffix) for name in os.listdir(folder)
                   if name.endswith(suffix)), key=lambda name: (number(name), name))


def parent(program, root=ROOT):
    """The program that this one is based on, or None: see scripts/common.sh."""
    done = subprocess.run(
        ["bash", "-c", '. "$0/scripts/common.sh"; parent "$1"', ROOT, program],
        cwd=root, check=False, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() or None


PROGRAMS = numbered(f"{ROOT}/src", ".cpp")
# What a client prints once it has checked that all is right.
SUCCESS = {
    "4_hello": "Sent ",
    "5_reverse": "The text is correct.",
    "6_write": "Data is correct.",
    "7_queue": "Data is correct.",
    "8_malloc": "Data is correct.",
    "9_file": "The server has saved the file.",
    "10_lock": "Data is correct.",
}
# Arguments for the programs whose defaults take long. For 9_file, the tests give the
# size of a file instead of its name: see Server.start_client.
QUICK = {"7_queue": ["65536", "100", "3"], "8_malloc": ["16"],
         "9_file": ["5000001", "2"], "10_lock": ["50"]}
# Those that take next to nothing, for tests that look at how long a client waits.
SHORT = {"6_write": ["4096", "10"], "7_queue": ["4096", "10", "1"],
         "8_malloc": ["1"], "9_file": ["1"], "10_lock": ["1"]}
# What a program refuses: the provider lacks what it needs.
REFUSED = [("10_lock", "net")]
# libfabric 1.17 itself leaks in its net provider, and in the others when a
# connection breaks while it is being made. Leaks of our programs show in all the
# other tests.
LIBFABRIC_LEAKS = {
    "LSAN_OPTIONS": f"suppressions={ROOT}/scripts/tests/lsan.txt"}


# An endpoint of ofi_rxm has buffers of 88 MB. Smaller ones save the suite a third of
# its time; test_data and the transcripts of the chapters do without.
RXM_BUFFERS = "FI_OFI_RXM_BUFFER_SIZE"
os.environ.setdefault(RXM_BUFFERS, "2048")


def is_here(provider):
    """Asks 4_hello, because fi_info may belong to another libfabric than the one
    that the programs are linked with. Exercises do not ask, and may not have
    4_hello."""
    program = os.path.join(ROOT, BUILD, "4_hello")
    return os.path.exists(program) and subprocess.run(
        [program, "--list"], env={**os.environ, "FI_PROVIDER": provider},
        check=False, capture_output=True).returncode == 0


# libfabric's own choice, then the software providers that it has: net came with
# libfabric 1.16 and went with 1.18.
PROVIDERS = [""] if OVER_VERBS else \
    ["", *filter(is_here, ["shm", "net", "sockets", "udp;ofi_rxd"])]


# For tests that kill a client. The net provider came with libfabric 1.16 and went
# with 1.18.
sturdy_providers = pytest.mark.parametrize("provider", ["", pytest.param(
    "shm", marks=pytest.mark.skipif(
        "net" in PROVIDERS,
        reason="a process that is killed in a READ or WRITE through libfabric "
        "1.17's shm leaves a lock behind in the memory of the other"))],
    ids=["default", "shm"])


def not_over_verbs(why):
    return pytest.mark.skipif(bool(OVER_VERBS), reason=why)


def make(*arguments, **env):
    """Runs make and returns what it printed."""
    done = subprocess.run(["make", "-j2", *arguments], cwd=ROOT,
                          env={**os.environ, **env}, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout


def pytest_configure(config):
    config.addinivalue_line("markers", "builds(*names): the builds to test")


def pytest_generate_tests(metafunc):
    """Runs every test that takes `build` with the plain programs, and again with
    those that have sanitizers."""
    if "build" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("builds")
        names = marker.args if marker else ("plain", "sanitized")
        # Sanitizers would take too long on an emulated processor.
        names = ("plain",) if OVER_VERBS else names
        metafunc.parametrize("build", names, indirect=True, scope="session")


# libfabric's issue 11828: ofi_rxm closes a connection and only then handles what had
# arrived over it, for which it uses the connection. No release has it mended yet.
KNOWN_CRASH = "libfabric crashed when a connection was closed: its issue 11828"


def crashed_in_libfabric(process):
    """Whether the kernel says so."""
    return process.popen.poll() == -signal.SIGSEGV and re.search(
        rf"\[{process.popen.pid}\]: segfault .* in libfabric\.so",
        subprocess.run(["dmesg"], check=False, text=True, capture_output=True).stdout)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """Over verbs, tells that crash from a failure of ours."""
    report = (yield).get_result()
    processes = getattr(item.funcargs.get("run"), "processes", []) \
        if hasattr(item, "funcargs") else []
    if report.failed and OVER_VERBS and any(map(crashed_in_libfabric, processes)):
        report.outcome, report.wasxfail = "skipped", KNOWN_CRASH


@pytest.fixture(scope="session")
def build(request):
    """The folder of the programs to test. scripts/test.sh has built them, or make
    for an exercise, into $BUILD."""
    return {"plain": BUILD, "sanitized": "build/sanitized"}[request.param]


class Process:
    """A running program, and what it has printed so far."""

    def __init__(self, command, provider="", netns=None, stdin=None, cwd=ROOT,
                 **env):
        if provider:
            env["FI_PROVIDER"] = provider
        if provider == "net":
            env.update(LIBFABRIC_LEAKS)
        # Otherwise PSM, which comes with Debian's libfabric, would catch a crash
        # and write a file about it here.
        env.update(IPATH_NO_BACKTRACE="1", HFI_NO_BACKTRACE="1")
        if netns:
            command = ["ip", "netns", "exec", netns, *command]
        self.command = command
        self.started = time.monotonic()
        self.popen = subprocess.Popen(
            command, cwd=cwd, env={**os.environ, **env},
            stdin=stdin or subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT)
        # Unlike Popen's own, this leaves carriage returns as they are.
        self.popen.stdout = io.TextIOWrapper(self.popen.stdout, errors="replace",
                                             newline="\n")
        self.lines = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.popen.stdout:
            self.lines.append(line)
        self.ended = time.monotonic()

    @property
    def output(self):
        return "".join(self.lines)

    def wait_for(self, pattern, timeout=15, count=1, after=0):
        """Waits until the pattern occurs `count` times in what the program has
        printed after the first `after` lines. Returns the last match."""
        end = time.monotonic() + timeout * TIME_FACTOR
        while True:
            alive = self.popen.poll() is None
            if not alive:
                # Waits for its last lines, which may still be in the pipe.
                self.reader.join(max(0, end - time.monotonic()))
            text = "".join(self.lines[after:])
            matches = list(re.finditer(pattern, text, re.M))
            if len(matches) >= count:
                return matches[count - 1]
            assert alive, f"{self.command} ended:\n{self.output}"
            assert time.monotonic() < end, f"no {pattern} in:\n{self.output}"
            time.sleep(0.01)

    def write(self, line):
        self.popen.stdin.write(f"{line}\n".encode())
        self.popen.stdin.flush()

    def signal(self, signum):
        self.popen.send_signal(signum)

    def wait(self, timeout=60):
        """Waits for the end of the program. Returns its exit status."""
        self.popen.wait(timeout * TIME_FACTOR)
        self.seconds = time.monotonic() - self.started
        self.reader.join(timeout)
        return self.popen.returncode


def owned_shm_files(pids):
    """Returns the files that these processes have left in /dev/shm. The shm
    provider names them after the process."""
    return [name for name in os.listdir("/dev/shm")
            if re.split(r"[^0-9]", name.split("//")[-1].lstrip("_"))[0]
            in [str(pid) for pid in pids]]


@pytest.fixture
def run():
    """Starts processes, and ends those that still run after the test. Its
    new_folder() makes an empty folder that lasts as long."""
    processes = []
    folders = []

    def start(command, *args, **kwargs):
        process = Process(command, *args, **kwargs)
        processes.append(process)
        return process

    def new_folder():
        # In memory, where there is such a place: many tests move files.
        folders.append(tempfile.mkdtemp(
            dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        return folders[-1]

    start.new_folder = new_folder
    start.processes = processes
    yield start
    for process in processes:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait()
        if process.popen.stdin:
            process.popen.stdin.close()
        process.reader.join()
        process.popen.stdout.close()
    # Removes what those that were killed or that crashed have left behind: the shm
    # provider of a later process with the same number would find its files in use.
    for name in owned_shm_files([p.popen.pid for p in processes]):
        os.unlink("/dev/shm/" + name)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


# What the files that 9_file sends are made of. The size is not that of a chunk, so
# no two chunks are the same.
BLOCK = random.Random(9).randbytes((1 << 20) + 4099)
SOURCE_NUMBERS = itertools.count(1)


def write_source(path, size, number):
    """Makes a file of that size, with a content that depends on the number. What
    lies beyond 64 MB is a hole, which takes no time to make."""
    with open(path, "wb") as file:
        start = number * 7919 % len(BLOCK)
        file.write(BLOCK[start:][:size])
        while file.tell() < min(size, 64_000_000):
            file.write(BLOCK[:size - file.tell()])
        file.truncate(size)


def address_of(server):
    """Waits until a server prints its address."""
    return server.wait_for(r"following command:\n.* ([0-9a-f]+)( FILE)?\n")[1]


class Server:
    """A server, its address, and clients for it."""

    def __init__(self, run, build, program, provider="", netns=None, folder=None,
                 wrapper=(), **env):
        self.run = run
        self.program = program
        self.path = f"{build}/{program}"
        self.provider = provider
        self.env = env
        # The wrapper is a command that runs the server.
        command = [*wrapper, self.path]
        if program == "9_file":
            # Where it saves files.
            self.folder = folder or run.new_folder()
            command.append(self.folder)
        self.process = run(command, provider, netns, **env)
        self.address = address_of(self.process)

    def start_client(self, *args, netns=None, **env):
        """Starts a client. If the first argument for 9_file is a number, the client
        sends a new file of that size."""
        source = None
        if self.program == "9_file":
            args = args or QUICK[self.program]
            if args[0].isdigit():
                source = self.new_source(int(args[0]))
                args = [source, *args[1:]]
        client = self.run([self.path, self.address, *args], self.provider, netns,
                          **{**self.env, **env})
        client.source = source
        return client

    def new_source(self, size):
        """Makes a file for a client of 9_file. Returns its path."""
        number = next(SOURCE_NUMBERS)
        path = f"{self.run.new_folder()}/file {number}"
        write_source(path, size, number)
        return path

    def check_file(self, client):
        """Compares what the client of 9_file has sent with what the server has
        saved, and removes both. The other programs have no files to compare."""
        if client.source:
            saved = os.path.join(self.folder, os.path.basename(client.source))
            assert os.path.getsize(saved) == os.path.getsize(client.source)
            assert filecmp.cmp(saved, client.source, shallow=False)
            os.unlink(saved)
            os.unlink(client.source)

    def check_client(self, *args, netns=None, timeout=60, **env):
        """Runs a client, which must succeed. Returns it."""
        client = self.start_client(*(args or QUICK.get(self.program, [])),
                                   netns=netns, **env)
        status = client.wait(timeout)
        assert status == 0, client.output + "\nserver:\n" + self.process.output
        assert SUCCESS[self.program] in client.output
        self.check_file(client)
        return client

    @contextlib.contextmanager
    def others(self, *args, count=2):
        """Clients that come one after the other, `count` of them at any time,
        while the block runs. Every one of them must succeed."""
        stopping = threading.Event()

        def keep_coming():
            while True:
                self.check_client(*args)
                # Starting a process costs 0.1 s of a core.
                if stopping.wait(0.6):
                    return

        with concurrent.futures.ThreadPoolExecutor() as pool:
            clients = [pool.submit(keep_coming) for _ in range(count)]
            try:
                yield
            finally:
                stopping.set()
                for client in clients:
                    client.result()

    def errors(self):
        """What the server has printed about errors."""
        return re.findall(r"^(?:\[\d+\] )?error: .*", self.process.output, re.M)

    def memory(self):
        """What it has of the machine's memory, in kB."""
        with open(f"/proc/{self.process.popen.pid}/status") as status:
            return int(re.search(r"VmRSS:\s+(\d+)", status.read())[1])

    def pool_line(self, number, timeout=15):
        """What 8_malloc has printed about its pool after a client has gone."""
        return self.process.wait_for(rf"^\[{number}\] (the pool .*)$", timeout)[1]

    def stop(self, signum=signal.SIGTERM):
        """Ends the server as a user would, and checks how it ends."""
        assert self.process.popen.poll() is None, self.process.output
        self.process.signal(signum)
        assert self.process.wait(10) == 0, self.process.output
        assert not owned_shm_files([self.process.popen.pid])


@pytest.fixture
def serve(run, build):
    """Starts a server of a program: serve("4_hello", "shm")."""
    def start(program, provider="", **kwargs):
        if (program, provider) in REFUSED:
            pytest.skip("this provider has no atomic operations")
        return Server(run, build, program, provider, **kwargs)
    return start


# ---- Clients that send whatever bytes a test makes up ----

CONNECT, ACCEPT, BYE = 1, 2, 3
MALLOC, FREE, USAGE, REPLY, ALIVE = 4, 5, 6, 7, 8  # of 8_malloc
PUT, READY, CHUNK, CREDIT, END, SAVED, ERROR, FILE_ALIVE = range(4, 12)  # of 9_file
JOIN, APPEND, TABLE_REPLY, REPORT, TABLE_ALIVE = range(4, 9)  # of 10_lock


def base(type_):
    return struct.pack("<I", type_)


def address_message(type_, address, addr_size=None, *, nonce):
    """A CONNECT or an ACCEPT."""
    return base(type_) + struct.pack(
        "<2I256s", nonce, len(address) if addr_size is None else addr_size, address)


def read_address(message):
    """Returns the nonce and the address in a CONNECT or an ACCEPT."""
    nonce, size = struct.unpack_from("<2I", message, 4)
    return nonce, message[12:12 + size].hex()


def provider_in(output):
    """The provider that a program says it uses. 10_lock wants atomic operations, so
    libfabric may choose another one for it than for sender.cpp."""
    return re.search(r"^domain: .*, provider: ([^,\n]+)", output, re.M)[1]


class FakeClient:
    """Speaks to a server by scripts/tests/sender.cpp."""

    def __init__(self, run, server):
        self.server = server
        self.number = None
        self.process = run([f"{BUILD}/sender", server.address],
                           provider_in(server.process.output), stdin=-1)
        self.nonce = self.process.popen.pid
        self.address = bytes.fromhex(
            self.process.wait_for(r"address ([0-9a-f]+)\n").group(1))

    def command(self, line, answer):
        already = len(self.process.lines)
        self.process.write(line)
        return self.process.wait_for("^" + answer, 30, after=already)

    def send(self, message, answer="sent"):
        self.command("send " + message.hex(), answer)

    @contextlib.contextmanager
    def saying(self, message):
        """Sends a message every second, however long the test takes."""
        stop, failures = threading.Event(), []

        def say():
            try:
                while not stop.wait(1):
                    self.send(message)
            except AssertionError as error:
                failures.append(error)

        thread = threading.Thread(target=say, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        assert not failures, failures[0]

    def peer(self, hex_address):
        self.process.write("peer " + hex_address)

    def receive(self):
        return bytes.fromhex(self.command("wait", "received (.*)")[1])

    def connect(self, address=None, addr_size=None):
        """A CONNECT, by default with our own address."""
        return address_message(CONNECT, self.address if address is None else address,
                               addr_size, nonce=self.nonce)

    def open_session(self):
        """Sends a CONNECT, and whatever comes next to the address of the
        ACCEPT."""
        already = len(self.server.process.lines)
        self.peer(self.server.address)
        self.send(self.connect())
        self.number = self.server.process.wait_for(
            r"^\[(\d+)\] Received CONNECT .* " + self.address.hex() + "$",
            after=already)[1]
        # Answers to what we said in an earlier session may come first.
        while (accept := self.receive())[:4] != base(ACCEPT):
            pass
        self.peer(read_address(accept)[1])

    def expect(self, line, timeout=30):
        """Waits for what the server prints about this client."""
        self.server.process.wait_for(rf"^\[{self.number}\] {line}", timeout)


class FakeServer(FakeClient):
    """Accepts a client of a program, then answers it with whatever bytes a test
    makes up."""

    def __init__(self, run, build, program, *args, provider=""):
        if not provider:
            choices = run([f"{build}/{program}", "--list"])
            assert choices.wait() == 0
            provider = provider_in(choices.output)
        self.process = run([f"{BUILD}/sender"], provider, stdin=-1)
        self.address = self.process.wait_for(r"address ([0-9a-f]+)\n")[1]
        self.client = run([f"{build}/{program}", self.address, *args], provider)
        connect = self.receive()
        assert connect[:4] == base(CONNECT)
        nonce, client = read_address(connect)
        self.peer(client)
        self.send(address_message(ACCEPT, bytes.fromhex(self.address), nonce=nonce))

    def receive_other_than(self, ignored):
        """Returns the next message that is not this one."""
        while (message := self.receive()) == ignored:
            pass
        return message


def request(type_, size=0, addr=0):
    """A message to the server of 8_malloc."""
    return base(type_) + struct.pack("<4xQQ", size, addr)


class Reply(typing.NamedTuple):
    """What the server of 8_malloc answers to a request."""
    error: str  # empty if all went well
    addr: int
    size: int
    key: int
    lent: int  # bytes, to this client


class Borrower(FakeClient):
    """A client of 8_malloc, in a session of its own."""

    def __init__(self, run, server):
        super().__init__(run, server)
        self.open_session()

    def ask(self, type_, size=0, addr=0):
        self.process.write("send " + request(type_, size, addr).hex())
        message = self.receive()
        type_, error, *numbers = struct.unpack("<I108s4Q", message)
        assert type_ == REPLY
        return Reply(error.split(b"\0")[0].decode(), *numbers)

    def borrow(self, size):
        reply = self.ask(MALLOC, size)
        assert not reply.error and reply.size == size
        return reply.addr

    def give_back(self, addr):
        assert not self.ask(FREE, addr=addr).error

    def leave(self):
        """Says BYE. Returns what the server then prints about its pool."""
        self.send(base(BYE))
        self.expect("Done")
        return self.server.pool_line(self.number)


def append(client=1, count=0):
    """An APPEND to the server of 10_lock."""
    return base(APPEND) + struct.pack("<2I", client, count)


def report(entries=0, changes=0):
    """A REPORT to the server of 10_lock."""
    return base(REPORT) + struct.pack("<IQ", entries, changes)


def put(name=b"file", size=0, slots=1):
    """A PUT to the server of 9_file."""
    return base(PUT) + struct.pack("<IQ256s", slots, size, name)


def numbers(type_, *which):
    """A CHUNK or a CREDIT of 9_file."""
    return base(type_) + struct.pack(f"<{len(which)}I", *which)


def end(checksum):
    """An END to the server of 9_file."""
    return base(END) + struct.pack("<4xQ", checksum)


def give_up(text=b""):
    """An ERROR of 9_file."""
    return base(ERROR) + struct.pack("<252s", text)


class FileSender(FakeClient):
    """A client of 9_file, in a session of its own. All of its files are full of
    zeros, as the slots are. So it may do without WRITEs, and say by a CHUNK that a
    chunk has been written."""

    def __init__(self, run, server):
        super().__init__(run, server)
        self.slots = None  # where they are, and their key
        self.open_session()

    def answer(self):
        """Returns the next message of the server, and ignores that it is alive."""
        while (message := self.receive()) == base(FILE_ALIVE):
            pass
        return message

    def put(self, *args, **kwargs):
        """Sends a PUT. Returns how many slots the server lends."""
        self.send(put(*args, **kwargs))
        message = self.answer()
        assert message[:4] == base(READY), message
        num_slots, _, addr, _, key = struct.unpack("<IQQQQ", message[4:])
        self.slots = (addr, key)
        return num_slots

    def write(self, number):
        """WRITEs 8 zeros into the first slot, with this number as immediate data:
        that of a chunk, plus 1."""
        addr, key = self.slots
        self.command(f"write {addr} {key} {number} {bytes(8).hex()}", "written")

    def credits(self):
        """Returns the slots of the next CREDIT."""
        message = self.answer()
        assert message[:4] == base(CREDIT), message
        return list(struct.unpack(f"<{len(message) // 4 - 1}I", message[4:]))

    def refusal(self):
        """Returns the reason that the server gives, and leaves."""
        message = self.answer()
        assert message[:4] == base(ERROR), message
        reason = message[4:].split(b"\0")[0].decode()
        self.expect("error: " + re.escape(reason) + "$")
        self.send(give_up())
        self.expect("Done")
        return reason


# ---- What not every machine permits ----

@pytest.fixture
def hosts():
    """Two network namespaces with a cable between them, which behave like two
    hosts: their names. Their addresses are 10.123.0.1 and 10.123.0.2."""
    names = [f"rdma{os.getpid()}{side}" for side in "ab"]

    def ip(*args):
        done = subprocess.run(["ip", *args], check=False, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode != 0:
            pytest.skip("network namespaces are not permitted: "
                        f"ip {' '.join(args)}: {done.stdout.strip()}")

    try:
        for name in names:
            ip("netns", "add", name)
            ip("netns", "exec", name, "true")
        ip("link", "add", "cable0", "netns", names[0], "type", "veth",
           "peer", "name", "cable0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.123.0.{number}/24", "dev",
               "cable0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable0", "up")
        for name in names:
            # It takes a moment until the cable carries anything.
            list_here = ["ip", "netns", "exec", name,
                         os.path.join(ROOT, BUILD, "4_hello"), "--list"]
            end = time.monotonic() + 10
            while "cable0" not in (found := subprocess.run(
                    list_here, check=False, text=True, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT).stdout):
                assert time.monotonic() < end, found
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False,
                           capture_output=True)


@pytest.fixture(scope="session")
def terminals():
    """For tests that open pseudo-terminals."""
    try:
        for end in pty.openpty():
            os.close(end)
    except OSError as error:
        pytest.skip(f"pseudo-terminals are not permitted: {error}")
