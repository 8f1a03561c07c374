"""What tests and exercises share: running servers and clients. The fixtures are in
conftest.py. It takes no pytest, because others than tests need it."""

import concurrent.futures
import contextlib
import filecmp
import io
import itertools
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

from repository import ROOT, programs
from table import TABLE

# Processes in the background may ignore Ctrl-C. The programs that the tests start
# would inherit this, and ignore it until main() says otherwise.
signal.signal(signal.SIGINT, signal.default_int_handler)

BUILD = os.environ.get("BUILD") or "build"
# What scripts/rdma/inside.sh says: the default provider is verbs here, over a device
# of this kind; and on an emulated processor, all that waits has to wait longer.
OVER_VERBS = os.environ.get("RDMA", "")
TIME_FACTOR = float(os.environ.get("TIME_FACTOR", "1"))
# One that the tests know nothing of is left out; a test in test_tools.py names it.
PROGRAMS = [program for program in programs() if program in TABLE]
# libfabric 1.17 itself leaks in its net provider, and in the others when a connection breaks
# while it is being made; 2.6 when one is closed. Leaks of our programs show in all other tests.
LIBFABRIC_LEAKS = {
    "LSAN_OPTIONS": f"suppressions={ROOT}/scripts/tests/lsan.txt:print_suppressions=0"}

# An endpoint of ofi_rxm has buffers of 88 MB. Smaller ones save the suite a third of
# its time; test_data and the transcripts of the chapters do without.
RXM_BUFFERS = "FI_OFI_RXM_BUFFER_SIZE"
os.environ.setdefault(RXM_BUFFERS, "2048")


# That of the libfabric that the programs are linked with: see the Makefile.
LIBFABRIC_HOME = os.environ.get("LIBFABRIC_HOME") or "/opt/amazon/efa"
FI_INFO = [shutil.which(f"{LIBFABRIC_HOME}/bin/fi_info") or "fi_info", "-t", "FI_EP_RDM"]


def is_here(provider):
    """Whether libfabric has a provider, and this machine what it takes."""
    return subprocess.run(FI_INFO, env={**os.environ, "FI_PROVIDER": provider},
                          check=False, capture_output=True).returncode == 0


# libfabric's own choice, then the software providers that it has: net came with
# libfabric 1.16 and went with 1.18.
PROVIDERS = [""] if OVER_VERBS else \
    ["", *filter(is_here, ["shm", "net", "sockets", "udp;ofi_rxd"])]


class Process:
    """A running program, and what it has printed so far."""

    def __init__(self, command, provider="", netns=None, stdin=None, cwd=ROOT,
                 **env):
        if provider:
            env["FI_PROVIDER"] = provider
        # So does sockets, for an address that 13_crowd has removed.
        if provider == "net" or provider == "sockets" and "13_crowd" in command[0]:
            env.update(LIBFABRIC_LEAKS)
        # Otherwise PSM, which comes with Debian's libfabric, would catch a crash
        # and write a file about it here.
        env.update(IPATH_NO_BACKTRACE="1", HFI_NO_BACKTRACE="1")
        if netns:
            command = ["ip", "netns", "exec", netns, *command]
        self.command = command
        self.started = time.monotonic()
        self.born = time.time() - 0.1  # the clock of files is coarser
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

    def wait_for(self, pattern, timeout=40, count=1, after=0):
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

    def check_error(self, what, timeout=60):
        """Waits for its end with an error, which this pattern describes."""
        assert self.wait(timeout) == 1, self.output
        assert re.search(f"^error: (?:{what})", self.output, re.M), self.output

    def interrupt(self):
        """Ctrl-C for a client, which ends it."""
        self.signal(signal.SIGINT)
        self.check_error("interrupted\n\\Z")

    def kill(self):
        self.popen.kill()
        self.wait()

    def cpu_seconds(self, main_thread=False):
        """How long it has had a core so far, or its main thread alone."""
        folder = f"/proc/{self.popen.pid}" + f"/task/{self.popen.pid}" * main_thread
        with open(f"{folder}/stat") as stat:
            user, system = stat.read().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def status(self, name):
        """A number in what the kernel tells of it."""
        with open(f"/proc/{self.popen.pid}/status") as file:
            return int(re.search(rf"^{name}:\s+(\d+)", file.read(), re.M)[1])

    def pauses(self):
        """How often it has waited for something so far, and left its core meanwhile."""
        return self.status("voluntary_ctxt_switches")

    def descriptors(self):
        """How many it has open."""
        return len(os.listdir(f"/proc/{self.popen.pid}/fd"))

    def warnings(self):
        """Those of our programs, without those that libfabric may print."""
        return re.findall(r"^(?:\[\d+\] )?warning: .*", self.output, re.M)


def shares_of_a_core(processes, seconds, **which):
    """How much of a core each takes for so long."""
    def used():
        return [process.cpu_seconds(**which) for process in processes]

    before, started = used(), time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - started
    return [(now - earlier) / passed for now, earlier in zip(used(), before)]


def wait_until(condition, timeout=10):
    end = time.monotonic() + timeout * TIME_FACTOR
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def owned_shm_files(pids, since=0.0):
    """Returns the files that these processes have left in /dev/shm, and made after that
    time: an older one is of another process, which had the same number. The shm provider
    names them after the process."""
    return [name for name in os.listdir("/dev/shm")
            if re.split(r"[^0-9]", name.split("//")[-1].lstrip("_"))[0]
            in [str(pid) for pid in pids]
            and os.lstat(f"/dev/shm/{name}").st_ctime >= since]


def remove_stale_shm_files():
    """Removes the files of processes that are gone, made more than a minute ago: somebody
    has killed them. A new process with the number of one of them could not start over
    shm."""
    for name in os.listdir("/dev/shm"):
        number = re.match(r"(\d+):\d+:\d+$", name)
        path = f"/dev/shm/{name}"
        try:
            if (number and not os.path.exists(f"/proc/{number[1]}")
                    and time.time() - os.lstat(path).st_ctime > 60):
                os.unlink(path)
        except OSError:
            pass  # another test has removed it, or it is of another user


def under_strict(run, **settings):
    """What a process needs in its environment to be on a network as strict as EFA, with
    others that get the same: see strict.cpp."""
    return {"LD_PRELOAD": os.path.join(ROOT, BUILD, "strict.so"),
            "STRICT_DIR": run.new_folder(), **settings}


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
    """Waits until a server prints its address, or several with commas in between."""
    return server.wait_for(r"following command:\n.* ([0-9a-f,]+)( FILE| \d+ \d+ TEXT)?\n")[1]


@contextlib.contextmanager
def nobody_at(address):
    """Keeps the port of a server that has ended. A server of another test would get it now
    and then, and take what is meant for nobody."""
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        if address.startswith("0200"):  # AF_INET, then the port
            for kept in tcp, udp:
                kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with contextlib.suppress(OSError):
                    kept.bind(("", int(address[4:8], 16)))
        yield


def watch(folder, program, *args, provider="tcp", **env):
    """Runs a program with the recorder: see scripts/watch. Returns the exit status, and what
    was printed."""
    if provider:
        env["FI_PROVIDER"] = provider
    done = subprocess.run(
        [sys.executable, "scripts/watch/run.py", "-q", "-o", str(folder), program, *args],
        cwd=ROOT, env={**os.environ, "BUILD": BUILD, **env}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


class AnyServer:
    """A server of a program that TABLE need not know, its address, and clients for it: of
    2_first, which takes one message and ends, of a move, or of a program of one's own."""

    def __init__(self, run, build, program, provider="", *args, wrapper=(), **env):
        self.run = run
        self.path = f"{build}/{program}"
        self.provider = provider
        self.env = env
        # The wrapper is a command that runs the server.
        self.process = run([*wrapper, self.path, *args], provider, **env)
        self.address = address_of(self.process)

    def start_client(self, *args, **env):
        return self.run([self.path, self.address, *args], self.provider, **self.env, **env)

    def check_client(self, *args):
        """Runs a client, which must succeed. Returns it."""
        client = self.start_client(*args)
        assert client.wait() == 0, client.output + "\nserver:\n" + self.process.output
        text = args[0] if args else "Hello, world!"
        assert client.output.endswith(f"\nSent {len(text)} bytes.\n"), client.output
        return client

    def received(self):
        """Waits for its end. Returns what it has received, as it prints it."""
        assert self.process.wait() == 0, self.process.output
        return re.search("^Received (.*)$", self.process.output, re.M)[1]

    def errors(self):
        """What the server has printed about errors."""
        return re.findall(r"^(?:\[\d+\] )?error: .*", self.process.output, re.M)

    def memory(self):
        """What it has of the machine's memory, in kB."""
        return self.process.status("VmRSS")

    def stop(self, signum=signal.SIGTERM):
        """Ends the server as a user would, and checks how it ends."""
        assert self.process.popen.poll() is None, self.process.output
        self.process.signal(signum)
        assert self.process.wait(40) == 0, self.process.output
        assert not owned_shm_files([self.process.popen.pid], self.process.born)


class Server(AnyServer):
    """A server of a program in TABLE."""

    def __init__(self, run, build, program, provider="", netns=None, folder=None,
                 wrapper=(), options=(), **env):
        self.run = run
        self.program = program
        self.entry = TABLE[program]
        self.path = f"{build}/{program}"
        self.provider = provider
        self.env = env
        # The options are for clients, too.
        self.command = [self.path, *options]
        command = [*wrapper, *self.command]
        # Where it saves files, if it does.
        self.folder = None
        if self.entry.files:
            self.folder = folder or run.new_folder()
            command.append(self.folder)
        self.process = run(command, provider, netns, **env)
        # What its clients take. A fake one takes one address, of the first adapter.
        self.addresses = address_of(self.process)
        self.address = self.addresses.split(",")[0]

    def start_client(self, *args, netns=None, **env):
        """Starts a client. If the first argument is a number where a file has to be,
        the client sends a new file of that size."""
        source = None
        args = args or (self.entry.quick if self.entry.files else self.entry.least)
        if self.entry.files:
            if args[0].isdigit():
                source = self.new_source(int(args[0]))
                args = [source, *args[1:]]
        client = self.run([*self.command, self.addresses, *args], self.provider, netns,
                          **{**self.env, **env})
        client.source = source
        return client

    def new_source(self, size):
        """Makes a file for a client. Returns its path."""
        number = next(SOURCE_NUMBERS)
        path = f"{self.run.new_folder()}/file {number}"
        write_source(path, size, number)
        return path

    def check_file(self, client):
        """Compares the file that a client has sent with what the server has saved, and
        removes both. Most programs have no files to compare."""
        if client.source:
            saved = os.path.join(self.folder, os.path.basename(client.source))
            assert os.path.getsize(saved) == os.path.getsize(client.source)
            assert filecmp.cmp(saved, client.source, shallow=False)
            os.unlink(saved)
            os.unlink(client.source)

    def check_client(self, *args, netns=None, timeout=60, **env):
        """Runs a client, which must succeed. Returns it."""
        client = self.start_client(*(args or self.entry.quick), netns=netns, **env)
        self.check_success(client, timeout)
        return client

    def check_all(self, clients, timeout=120):
        """Waits for clients, all of which must succeed. Nothing may have gone wrong."""
        for client in clients:
            self.check_success(client, timeout)
        assert not self.errors()

    def check_success(self, client, timeout):
        assert client.wait(timeout) == 0, client.output + "\nserver:\n" + self.process.output
        assert self.entry.success in client.output
        self.check_file(client)

    @contextlib.contextmanager
    def others(self, *args, count=2):
        """Clients that come one after the other, `count` of them at any time,
        while the block runs. Every one of them must succeed."""
        stopping = threading.Event()

        def keep_coming():
            while True:
                self.check_client(*args)
                # They leave the cores to those whom the test is about.
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

    def pool_line(self, number, timeout=40):
        """What 8_malloc has printed about its pool after a client has gone."""
        return self.process.wait_for(
            rf"^\[{number}\] (?:Done|error: ).*\n(?:.*\n)*?(The pool .*)$", timeout)[1]


def shares(server, client):
    """What each rail of 11_rails has written for a client, in percent, by the names of
    the rails, as its last line of progress says."""
    line = re.findall(rf"^\[{client}\] .* EAGAIN=\d+(.*)$", server.process.output,
                      re.M)[-1]
    return {name: int(percent)
            for name, percent in re.findall(r", (\S+)=(\d+)%", line)}


def provider_in(output):
    """The provider that a program says it uses. 10_lock wants atomic operations, so
    libfabric may choose another one for it than for sender.cpp."""
    return re.search(r"^domain: .*, provider: ([^,\n]+)", output, re.M)[1]
