"""What only 9_file has: a file that arrives whole or not at all, and a sender that
goes no faster than the disk of the receiver."""

import concurrent.futures
import contextlib
import filecmp
import os
import random
import re
import resource
import signal
import time

import pytest

from fakes import FakeServer, FileSender
from harness import BUILD, LIBFABRIC_LEAKS, wait_until, write_source
from marks import each_provider, two_providers
from messages import (BYE, FAILED, PROGRESS, PUT, SAVED, chunk, credit, plain, put,
                      ready)
from repository import ROOT

MIB = 1 << 20  # bytes of a chunk
# The checksums of the first chunks of a file of zeros: XXH3_64bits_withSeed of 1 MiB,
# where the seed is the number of the chunk.
ZEROS = [0x918780b90550bf34, 0x9d7d2e9aaa03f330, 0x511f3e0f81b878ab,
         0xe3663441c804a5c6]
# How many senders test_senders_that_go kills, and twice as many as
# test_servers_that_go kills servers. KILLS=50 takes minutes.
KILLS = int(os.environ.get("KILLS", "4"))


def check_empty(server, timeout=40, others=()):
    """Waits until the server has cleaned up: nothing but `others` is in its directory."""
    wait_until(lambda: {*os.listdir(server.folder)} <= {*others}, timeout)


def check_failure(client, error, timeout=60):
    """The client ends with this error, and with no other, after one line of it."""
    assert client.wait(timeout) == 1, client.output
    errors = re.findall("^error: .*", client.output, re.M)
    assert len(errors) == 1 and re.search(error, errors[0]), client.output
    assert "saved" not in client.output


def part_size(server):
    """How much there is of the only file that is on its way; 0 if there is none."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(server.folder):
            if name.endswith(".part"):
                return os.path.getsize(f"{server.folder}/{name}")
    return 0


def strange_disk(**settings):
    """What a server needs in its environment to have a disk of strict.cpp's."""
    return {"LD_PRELOAD": os.path.join(ROOT, BUILD, "strict.so"), "STRICT_NETWORK": "0",
            **settings}


class WaitingDisk:
    """That of a server whose pwrites wait, from the first one on, until go_on()."""

    def __init__(self, serve, folder):
        self.file = folder + "/go on"
        self.server = serve("9_file", **strange_disk(STRICT_SLOW_WRITE=self.file))

    def wait(self):
        self.server.process.wait_for("^strict: a pwrite waits$")

    def go_on(self):
        with open(self.file, "w"):
            pass


@pytest.fixture
def waiting_disk(run, serve):
    return WaitingDisk(serve, run.new_folder())


# ---- Files of every size ----

# Bytes, and slots.
CASES = [(0, 8), (MIB, 8), (MIB + 1, 1), (20 * MIB, 16)]


@each_provider
def test_sizes(serve, provider):
    """Every byte arrives, in files that fill their chunks and that do not, with few
    slots and many; and nothing else is left in the directory."""
    server = serve("9_file", provider)
    # At a time: over sockets, one of many now and then hears nothing for 10 s.
    count = 1 if provider == "sockets" else len(CASES)
    for i in range(0, len(CASES), count):
        server.check_all([server.start_client(str(size), str(slots))
                          for size, slots in CASES[i:i + count]])
    assert not os.listdir(server.folder)
    server.stop()


# ---- The server's directory ----

def test_no_directory(run, build):
    """What is no directory is a wrong argument. So is an address without a file."""
    folder = run.new_folder()
    write_source(folder + "/file", 1, 1)
    for given in ["missing", "file", "", "-x", "/dev/null",
                  "0200a5c5c00002020000000000000000"]:
        server = run([f"{ROOT}/{build}/9_file", given], cwd=folder)
        assert server.wait() == 2, (given, server.output)
        assert server.output.startswith("error: wrong number of arguments\nUsage:\n")
    assert os.listdir(folder) == ["file"]


@pytest.mark.parametrize("folder_of_server", ["received", ""])
def test_two_terminals(run, build, folder_of_server):
    """The command that the server prints, in another terminal, for a file that is
    where both were started. The server saves it where it has been told to, or where it was
    started, so there it exists already."""
    folder = run.new_folder()
    os.mkdir(folder + "/received")
    os.symlink(f"{ROOT}/{build}", folder + "/build")
    write_source(folder + "/file", 3 * MIB, 1)
    server = run(["sh", "-c", f"exec build/9_file {folder_of_server}"], cwd=folder)
    command = server.wait_for("following command:\n(  .* )FILE\n")[1]
    if folder_of_server:
        client = run(["sh", "-c", command + "file"], cwd=folder)
        assert client.wait() == 0, client.output
        assert filecmp.cmp(f"{folder}/file", f"{folder}/received/file", shallow=False)
    check_failure(run(["sh", "-c", command + "file"], cwd=folder),
                  "the server: file exists already")
    server.signal(signal.SIGINT)
    assert server.wait() == 0


# ---- Names that are refused ----

BAD_NAMES = [b"", b"/", b"../up", b"/etc/passwd2", b"sub/file", b"a/", b"a\0b", b"\0"]


@pytest.mark.builds("sanitized")
def test_names(run, serve):
    """A name that leads elsewhere, or that is none. The sender hears what is wrong, and
    nothing is written, inside the directory or outside."""
    outside = run.new_folder()
    folder = f"{outside}/server"
    os.mkdir(folder)
    os.mkdir(folder + "/sub")
    server = serve("9_file", folder=folder)
    client = FileSender(run, server)
    reasons = {**dict.fromkeys(BAD_NAMES, "bad message: PUT"), b".": "exists already",
               b"..": "exists already", b"x" * 251: "File name too long"}
    for name, reason in reasons.items():
        client.send(put(name))
        assert reason in client.failure()
        client.open_session()
    client.leave()
    assert len(server.errors()) == len(reasons)
    assert os.listdir(outside) == ["server"] and os.listdir(folder) == ["sub"]
    assert not os.listdir(folder + "/sub")
    assert not os.path.exists("/etc/passwd2")
    server.stop()


@pytest.mark.parametrize("name", ["file", "file.part"])
def test_existing_files(serve, name):
    """Whatever has the name of the file, or of its .part, stays as it is: a file, a
    directory, a symbolic link to a file, and one to nothing."""
    server = serve("9_file")
    outside = server.run.new_folder()
    write_source(outside + "/file", 3 * MIB, 1)
    write_source(outside + "/precious", 8, 2)
    path = f"{server.folder}/{name}"
    for make in [lambda: os.link(outside + "/precious", path), lambda: os.mkdir(path),
                 lambda: os.symlink(outside + "/precious", path),
                 lambda: os.symlink(outside + "/new", path)]:
        make()
        before = os.lstat(path)
        check_failure(server.start_client(outside + "/file"),
                      "the server: .*(exists already|File exists|Is a directory)")
        after = os.lstat(path)
        assert (before.st_ino, before.st_mtime_ns, before.st_size) == \
            (after.st_ino, after.st_mtime_ns, after.st_size)
        wait_until(lambda: os.listdir(server.folder) == [name])
        (os.rmdir if os.path.isdir(path) and not os.path.islink(path) else os.unlink)(path)
    assert sorted(os.listdir(outside)) == ["file", "precious"]
    server.stop()


def test_created_meanwhile(waiting_disk):
    """Somebody else creates a file of this name during the transfer. It stays."""
    server = waiting_disk.server
    client = server.start_client(str(4 * MIB), "1")
    waiting_disk.wait()
    name = os.path.basename(client.source)
    with open(f"{server.folder}/{name}", "w") as file:
        file.write("precious")
    waiting_disk.go_on()
    check_failure(client, "the server: cannot rename .*: File exists")
    server.process.wait_for(r"^\[1\] Done")
    check_empty(server, others=[name])
    with open(f"{server.folder}/{name}") as file:
        assert file.read() == "precious"
    server.stop()


# ---- Sources that are none, or that change ----

def test_no_source(serve, run):
    """What cannot be sent, is said before the server hears of it."""
    server = serve("9_file")
    folder = run.new_folder()
    for source, error in {
            f"{folder}/missing": "No such file", "": "No such file", "/dev/null": "file size",
            folder: "Is a directory", f"{folder}/{'x' * 256}": "too long"}.items():
        check_failure(server.start_client(source), error)
    assert "CONNECT" not in server.process.output
    server.stop()


def test_source_shrinks(waiting_disk):
    """Both sides say so, and nothing of it is left."""
    server = waiting_disk.server
    client = server.start_client(str(8 * MIB), "2")
    waiting_disk.wait()
    os.truncate(client.source, 3 * MIB)
    waiting_disk.go_on()
    check_failure(client, "is too short")
    server.process.wait_for(r"^\[1\] Done")
    check_empty(server)
    server.check_client("1")
    server.stop()


# ---- Disks that fail ----

@pytest.mark.builds("sanitized")
def test_file_size_limit(serve):
    """It comes with a signal that would end the server. Both sides say so, nothing is left,
    and what fits is saved afterwards, as with a disk that is full. Of the last chunk, some
    fits, so the kernel takes less of it than it is given, which is no error yet."""
    server = serve("9_file")
    limit = 3 * MIB - 4096
    resource.prlimit(server.process.popen.pid, resource.RLIMIT_FSIZE, (limit, limit))
    error = "cannot write .*: File too large"
    check_failure(server.start_client(str(3 * MIB)), "the server: " + error)
    server.process.wait_for(r"^\[1\] error: " + error)
    check_empty(server)
    assert len(server.errors()) == 1
    server.check_client(str(limit))
    server.stop()


@pytest.mark.parametrize("what,error", [("files", r"cannot sync file \d+\.part"),
                                        ("directories", "cannot sync the directory")])
def test_disk_that_forgets(serve, what, error):
    """The kernel has taken the file, but the disk keeps it, or its name, no longer
    than until the power fails: see strict.cpp. So it is not saved."""
    server = serve("9_file", **strange_disk(STRICT_LACKS=f"fsync-of-{what}"))
    check_failure(server.start_client("1"),
                  f"the server: {error}: Input/output error")
    server.process.wait_for("Done")
    # It has its name already, and is whole.
    wait_until(lambda: len(os.listdir(server.folder)) == (what == "directories"))
    assert len(server.errors()) == 1
    server.stop()


# ---- Credits ----

def test_slow_disk(serve):
    """The sender waits for credits: it takes as long as the disk does, and it is
    never more chunks ahead than it has slots. The server needs no more memory for a
    large file than for a small one."""
    server = serve("9_file", SLOW_DISK_MS="20")
    peaks = []
    for chunks in 10, 100:
        client = server.start_client(str(chunks * MIB), "4")
        peaks.append(0)
        while client.popen.poll() is None:
            peaks[-1] = max(peaks[-1], server.memory())
            time.sleep(0.02)
        assert client.wait() == 0, client.output
        server.check_file(client)
        assert client.seconds > chunks / 4 * 0.02
    # libfabric keeps some of what it has needed for a later use.
    assert peaks[1] < peaks[0] + 30_000, peaks
    server.stop()


@pytest.mark.builds("sanitized")
def test_credits(run, serve):
    """A slot is lent again when its chunk has been saved, and not before; the order of
    the chunks does not matter."""
    server = serve("9_file", SLOW_DISK_MS="500")
    client = FileSender(run, server)
    assert client.put(size=4 * MIB, slots=2) == 2
    assert part_size(server) == 0
    started = time.monotonic()
    client.send(chunk(1, ZEROS[1]))
    assert client.credit() == 1
    assert time.monotonic() - started >= 0.5
    assert part_size(server) == 2 * MIB
    client.send(chunk(1, ZEROS[3]))
    client.send(chunk(0, ZEROS[0]))
    assert {client.credit(), client.credit()} == {0, 1}
    client.send(chunk(0, ZEROS[2]))
    while (message := client.answer()) != plain(SAVED):
        assert message == credit(0)
    assert time.monotonic() - started >= 1.5
    client.leave()
    with open(f"{server.folder}/file", "rb") as file:
        assert file.read() == bytes(4 * MIB)
    assert os.listdir(server.folder) == ["file"]
    assert not server.errors()
    server.stop()


@pytest.mark.builds("sanitized")
@pytest.mark.parametrize("what", ["while it is saved", "too many"])
def test_chunk_without_credit(run, serve, what):
    """A CHUNK for a slot that is not lent ends the transfer."""
    server = serve("9_file", SLOW_DISK_MS="1000" if what == "while it is saved" else "0")
    client = FileSender(run, server)
    client.put(size=2 * MIB, slots=2)
    client.send(chunk(1, ZEROS[1]))
    if what == "too many":
        assert client.credit() == 1
    client.send(chunk(1, ZEROS[1]))
    assert "bad message: CHUNK" in client.failure()
    check_empty(server)
    server.stop()


@pytest.mark.builds("sanitized")
def test_checksum(run, serve):
    """The chunks are not those that the sender had, or they are in the wrong order."""
    server = serve("9_file")
    client = FileSender(run, server)
    for wrong in [0, ZEROS[0] ^ 1, ZEROS[0] ^ 1 << 63, ZEROS[1]]:
        client.put(size=2 * MIB, slots=2)
        client.send(chunk(0, wrong))
        assert "checksum" in client.failure()
        check_empty(server)
        client.open_session()
    server.stop()


@pytest.fixture
def saved_slowly(run, waiting_disk):
    """A sender whose only chunk is being saved."""
    client = FileSender(run, waiting_disk.server)
    client.put(size=MIB)
    client.send(chunk(0, ZEROS[0]))
    waiting_disk.wait()
    return client


def test_write_while_saving(waiting_disk, saved_slowly):
    """A sender that WRITEs into a slot while its chunk is being saved. The checksum is that
    of what may have come into the file, not of what was there before."""
    server, client = waiting_disk.server, saved_slowly
    addr, key = client.slots
    client.command(f"overwrite {addr} {key}", "written")
    waiting_disk.go_on()
    assert "checksum" in client.failure()
    check_empty(server)
    server.stop()


def test_disk_that_stands_still(waiting_disk, saved_slowly):
    """The disk does not go on with a chunk, and its client has left meanwhile. Others are
    served all the same."""
    server, client = waiting_disk.server, saved_slowly
    client.leave()
    client.open_session()
    client.put(b"empty")
    assert client.answer() == plain(SAVED)
    client.leave()
    assert sorted(os.listdir(server.folder)) == ["empty", "file.part"]
    waiting_disk.go_on()
    os.unlink(f"{server.folder}/empty")
    check_empty(server)
    server.stop()


def test_disk_slower_than_patience(serve):
    """A chunk takes longer than the time after which a silent side is given up: both say
    that they are still there."""
    server = serve("9_file", SLOW_DISK_MS="13000")
    client = server.check_client("1")
    assert client.seconds > 13
    server.stop()


# ---- Messages ----

def test_failed_while_it_writes(run, serve):
    """A client hears why its file is not saved before a WRITE of it fails: until it
    leaves, its slots are there."""
    server = serve("9_file")
    client = FileSender(run, server)
    client.put(size=9 * MIB, slots=3)
    client.send(plain(99))
    client.expect("error: bad message")
    addr, key = client.slots
    client.command(f"overwrite {addr} {key}", "written")
    assert "bad message" in client.answer()[4:].decode()
    client.leave()
    check_empty(server)
    server.check_client("1")
    server.stop()


BAD_ANSWERS = {
    "type": [plain(99)],
    "no slots": [ready(0)],
    "too many slots": [ready(17)],
    "CREDIT before READY": [credit(0)],
    "SAVED before READY": [plain(SAVED)],
    "SAVED before the end": [ready(1), plain(SAVED)],
    "credit twice": [ready(4), credit(0)],
    "no such slot": [ready(1), credit(1)],
    "second READY": [ready(1), ready(1)],
    "PUT": [put()],
}


@pytest.mark.builds("sanitized")
def test_bad_answers(run, build):
    """A client does not believe everything either, and says BYE."""
    source = run.new_folder() + "/file"
    answers = {**BAD_ANSWERS, "FAILED": [plain(FAILED) + b"no"]}
    write_source(source, 0, 1)  # otherwise, it might be a WRITE that fails first
    write_source(source + "1", 2 * MIB, 1)  # of which one slot takes a half

    def check(what):
        sent = source + "1" * (what == "SAVED before the end")
        server = FakeServer(run, build, "9_file", sent, "4")
        assert server.receive_other_than(PROGRESS)[:4] == plain(PUT)
        for message in answers[what]:
            server.send(message, "(sent|failed)")
        errors = "bad message: |WRITE failed" if "the end" in what else "bad message: "
        check_failure(server.client, "the server: no$" if what == "FAILED" else errors)
        if what == "type":
            while server.receive()[:4] != plain(BYE):
                pass

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        list(pool.map(check, answers))


# ---- Processes that go ----

@pytest.mark.builds("sanitized")
@two_providers
def test_senders_that_go(run, serve, provider):
    """Senders that are killed at any moment, and one that says no more. Nothing is left of
    their files: the server waits for 10 s at most. It waits longer for one that says that
    it is still at it. None of them costs others anything."""
    server = serve("9_file", provider, SLOW_DISK_MS="300", **LIBFABRIC_LEAKS)
    silent, alive = FileSender(run, server), FileSender(run, server)
    silent.put(b"silent", size=1000 * MIB, slots=8)
    alive.put(b"alive", size=1000 * MIB, slots=8)

    with alive.saying(plain(PROGRESS)):
        for kills in range(1, KILLS + 1):
            already = len(server.process.lines)
            client = server.start_client("20000000", random.choice(["1", "8"]))
            # libfabric 1.17's shm does not survive a sender that goes in its first contact.
            server.process.wait_for(r"^\[\d+\] Receiving", after=already)
            time.sleep(random.uniform(0, 0.5))
            client.kill()
            if kills % 4 == 0:
                check_empty(server, 25, others=["alive.part"])
                server.check_client(str(3 * MIB))
        check_empty(server, 25, others=["alive.part"])
    silent.expect("error: nothing has happened for 10 s")
    alive.leave()
    check_empty(server)
    server.check_client()
    server.stop()
