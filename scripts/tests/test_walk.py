"""What goes wrong before a move of chapters 4 to 14, and is right after it: the chapters
have the reader see both."""

import filecmp
import functools
import os
import re
import resource
import signal
import subprocess
import time

import pytest

import moves
from harness import (BUILD, OVER_VERBS, PROVIDERS, AnyServer, Server, is_here, owned_shm_files,
                     shares, under_strict, wait_until, write_source)
from marks import takes_shm
from repository import QUICKLY, ROOT, build_moves, make, variant
from test_moves import position

LONG = "x" * 65528
GIVEN_UP = "nothing has happened for 10 s"
SOON = "nothing has happened for 3 s"
# A long text waits for its client here, and overtakes nothing. From libfabric 1.18 on,
# that isn't its first choice: chapter 4 says what to type then.
RXM = "tcp;ofi_rxm" if not OVER_VERBS and is_here("tcp;ofi_rxm") else ""


def step_of(number):
    return next(step for step in moves.steps() if step.startswith(f"{number}_"))


def after(number, words):
    """Marks a test of a step's moves: those have to be there. One worker builds them."""
    step = step_of(number)
    assert {*words.split()} <= {moves.word(path) for path in moves.patches(step)}, words
    marks = [pytest.mark.xdist_group(f"moves of {step}"), *[pytest.mark.thorough] * (number > 7)]
    return lambda test: functools.reduce(lambda test, mark: mark(test), marks, test)


def may_warn(*names):
    """Marks a test in which the servers of these moves close an endpoint while a message
    to its client is on its way: see "close" in the appendix of providers."""
    def mark(test):
        for name in names:
            test = pytest.mark.may_warn("fi_close: Device or resource busy", "tcp;ofi_rxm",
                                        name)(test)
        return test
    return mark


def impatient(step, words):
    """The programs after these moves, whose patience ends after 3 s."""
    return {word: variant(step, ("kSilenceLimit = 10s;", "kSilenceLimit = 3s;"),
                          source=lambda word=word: moves.states(step)[position(step, word)])
            for word in words}


IMPATIENT = {5: impatient("5_reverse", ["answer", "round"]),
             7: impatient("7_queue", ["measure", "queue", "flight"])}
PROVIDERS_OF_ATOMICS = [name for name in PROVIDERS if name in ("", "shm")]

over_tcp = pytest.mark.skipif(os.environ.get("RDMA", "") != "", reason="TCP's own ways")


def name_of(number, word):
    """5.3"""
    return f"{number}.{position(step_of(number), word)}"


def path_of(number, word):
    """Builds the program after a move."""
    name = name_of(number, word)
    return f"{build_moves([name])}/{name}"


@pytest.fixture
def walk(run):
    """Starts the server of a move: walk(5, "loop")."""
    def start(number, word, provider="", *args, **env):
        return AnyServer(run, *path_of(number, word).rsplit("/", 1), provider, *args, **env)

    def start_impatient(number, word, provider=""):
        return AnyServer(run, IMPATIENT[number][word](), step_of(number), provider)
    start.impatient = start_impatient
    return start


@pytest.fixture
def still():
    """Starts a client that stands still between its CONNECT and its text: it prints more
    than a pipe holds, and nobody reads that until go() does."""
    clients = []

    def start(server, provider=""):
        client = subprocess.Popen(
            [server.path, server.address, LONG], cwd=ROOT, text=True,
            env={**os.environ, **({"FI_PROVIDER": provider} if provider else {})},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        clients.append(client)
        return client
    yield start
    for client in clients:
        client.kill()
        client.communicate()
    for name in owned_shm_files([client.pid for client in clients]):
        os.unlink("/dev/shm/" + name)


def go(client):
    """Lets it go on. Returns what it prints, without the long text."""
    return client.communicate(timeout=90)[0].replace("x" * 99, "")


def first_wrong(server, *args, times=20):
    """The first client that ends with an error, of so many that come one after the other. What
    goes wrong does not do so each time, but soon."""
    for _ in range(times):
        client = server.start_client(*args)
        if client.wait() == 1:
            return client
    return pytest.fail("all went well")


def check_right(server, *args, times=5):
    for _ in range(times):
        client = server.start_client(*args)
        assert client.wait() == 0 and "Data is correct" in client.output, client.output


@after(4, "stay record")
def test_any_order(walk):
    """RECVs complete in any order. Without a record for each, the server prints what
    nobody has sent: not each time, but soon. With one, each text is somebody's."""
    def lines(word):
        server = walk(4, word, RXM)
        clients = [server.start_client(text) for text in ["x" * 60000, "two"] * 4]
        for client in clients:
            client.wait()
        server.process.wait_for("^Received ", count=8)
        return [line.split(": ") for line in server.process.lines
                if line.startswith("Received ")]
    for _ in range(20):
        wrong = [text for head, text in lines("stay")
                 if text.strip("\n") != ("two" if " 3 " in head else "x" * 60000)]
        if wrong:
            break
    assert wrong
    for head, text in lines("record"):
        assert text == ("two\n" if " 3 " in head else "x" * 60000 + "\n")


@takes_shm
@after(4, "close signal")
def test_closed_terminal(walk):
    """A signal closes nothing, and leaves the server's shared memory behind, until it only
    sets a flag."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has us and our children ignore it
    for word in "close", "signal":
        server = walk(4, word, "shm")
        server.process.signal(signal.SIGHUP)
        status = server.process.wait()
        left = owned_shm_files([server.process.popen.pid], server.process.born)
        for name in left:
            os.unlink("/dev/shm/" + name)
        assert (status, bool(left)) == {"close": (-signal.SIGHUP, True),
                                        "signal": (1, False)}[word]


@after(4, "record error free")
def test_deaf(walk):
    """Each message that is too long costs the server a RECV, until it asks its buffers which
    of them are free. Its own client sends none; that of the move `record` does."""
    sending = walk(4, "record").path
    for word in "error", "free":
        server = walk(4, word)
        own = server.path
        for count in range(1, 10 if word == "free" else 9):
            server.path = sending
            server.start_client("x" * 70000).wait()
            server.process.wait_for("^error: RECV failed: Truncation error", count=count)
        server.path = own
        server.start_client().wait()
        if word == "free":
            server.process.wait_for("^Received 13 bytes: Hello, world!$")
        else:
            time.sleep(1)
            assert "Received" not in server.process.output


@pytest.mark.skipif("sockets" not in PROVIDERS, reason="sockets is not here")
@after(5, "introduce answer")
def test_one_buffer(walk):
    """The text overwrites the CONNECT, which is still in flight."""
    server = walk(5, "introduce", "sockets")
    server.start_client().wait()
    server.process.wait_for("^Received 13 bytes: Hello, world!$")
    server.process.wait_for("^Received (?!13 )[0-9]+ bytes: Hello, world!")
    assert "Received CONNECT" not in server.process.output
    server = walk(5, "answer", "sockets")
    assert server.start_client().wait() == 0
    server.process.wait_for("^Received CONNECT")
    server.process.wait_for("^Received 13 bytes: Hello, world!$")


@after(5, "answer")
def test_last_peer(walk, still):
    """The answer to the first client goes to the second, which has gone."""
    server = walk.impatient(5, "answer", RXM)
    first = still(server, RXM)
    server.process.wait_for("^Received CONNECT")
    second = server.start_client()
    assert second.wait() == 0 and "The text is correct" in second.output
    assert f"error: {SOON} while waiting for the reversed text" in go(first)
    server.process.wait_for(f"^Received {len(LONG)} bytes: x")


@after(5, "endpoint round")
def test_one_after_the_other(walk, still):
    """A client that stands still keeps the server from all others until it goes on, and
    from nobody once the server goes round its clients."""
    for word in "endpoint", "round":
        server = walk(5, word, RXM)
        first = still(server, RXM)
        server.process.wait_for(r"^\[1\] Received CONNECT")
        second = server.start_client()
        if word == "endpoint":
            time.sleep(2)
            assert server.process.output.count("Received CONNECT") == 1
        else:
            assert second.wait() == 0
        assert "The text is correct" in go(first)
        assert second.wait() == 0 and "The text is correct" in second.output


@takes_shm
@after(5, "round")
def test_places_of_the_dead(walk, still):
    """Over shared memory, nothing tells the server that eight clients were killed. The
    ninth waits in the inbox until the first of them has been silent for too long."""
    server = walk.impatient(5, "round", "shm")
    clients = [still(server, "shm") for _ in range(8)]
    server.process.wait_for("Received CONNECT", count=8)
    for client in clients:
        client.kill()
    time.sleep(1)  # so that the ninth has some of its 3 s left when the dead have none
    ninth = server.start_client()
    server.process.wait_for(r"^\[9\] Received CONNECT", 30)
    before = server.process.output.partition("[9] ")[0]
    assert f"[1] error: {SOON} while waiting for the client\n" in before
    assert ninth.wait() == 0, ninth.output


PATIENT_SERVER = variant("5_reverse", ("kSilenceLimit = 10s;", "kSilenceLimit = 1000s;"))


@may_warn("5_reverse")
def test_still(run, tmp_path):
    """scripts/still: other clients are served meanwhile, and then it goes on, or is
    killed. Its seconds begin when the test says so, and the server is patient."""
    server = Server(run, PATIENT_SERVER(), "5_reverse")
    (tmp_path / "sleep").write_text(
        '#!/bin/bash\nuntil [ -e "$GO_ON" ]; do command -p sleep 0.02; done\n'
        'command -p sleep $((($1 - 1) * 5))\n')  # the reader sleeps for longer than the script
    (tmp_path / "sleep").chmod(0o755)
    for option, end in ("", "The text is correct.\n"), ("-k", "Killed.\n"):
        go_on = tmp_path / f"go on{option}"
        client = subprocess.Popen(
            ["scripts/still", *option.split(), "1", server.path, server.address], cwd=ROOT,
            stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}",
                 "GO_ON": str(go_on)})
        server.process.wait_for("Received CONNECT", count=3 if option else 1)
        server.check_client()
        assert client.poll() is None
        go_on.touch()
        assert client.communicate(timeout=90)[0].endswith(end)
    server.process.signal(signal.SIGTERM)


@pytest.fixture
def late(run):
    """For both sides of 6_write: a network that this machine hasn't got."""
    return under_strict(run, STRICT_PIECES="16", STRICT_DELAY_US="200000")


@after(6, "write number")
def test_looking(walk, late):
    """Both ends of a page are there, and the middle is not."""
    client = first_wrong(walk(6, "write", "shm", **late))
    assert "The page is there.\nerror: the data is not correct\n" in client.output
    check_right(walk(6, "number", "shm", **late))


@after(6, "pages rule")
def test_overtaking(walk, late):
    """The number overtakes the pages, most of the time, until it waits for them."""
    for provider in "", "shm":
        server = walk(6, "pages", provider)
        assert server.start_client("4096", "1000").wait() == 0
    client = first_wrong(walk(6, "pages", "shm", **late))
    assert "Received RDMA WRITE to local memory.\nerror: the data is not correct\n" in \
        client.output
    check_right(walk(6, "rule", "shm", **late))


@after(6, "number pages")
def test_no_word(walk):
    """A page that has not even one word ends a server that believes everything."""
    server = walk(6, "number")
    client = server.start_client("4")
    assert server.process.wait() != 0
    assert client.wait() != 0
    server = walk(6, "pages")
    assert server.start_client("4", "1").wait() == 0


@pytest.mark.parametrize("word", [
    pytest.param("measure", marks=pytest.mark.thorough), "queue", "flight"])
@over_tcp
@after(7, "measure queue flight awake")
def test_silent(walk, word):
    """A client that hears nothing gives up, although its pages arrive. First a message has
    no turn, then its turn comes after all WRITEs, then after those that are in flight."""
    server = walk.impatient(7, word, RXM)
    clients = (server.start_client("65536", "1000", "5") for _ in range(3))
    if word == "flight":
        # On a busy machine, even what is in flight may take 3 s.
        assert any(client.wait() == 0 for client in clients)
        return
    next(clients).check_error(f"{SOON} while waiting for the pages")
    # One PROGRESS is under way, and the server waits for it before it reports again. (On a
    # busy machine, the client may be gone before the first.)
    server.process.wait_for("error: WRITE failed: ")
    assert len(re.findall("WRITE: [0-9]+%", server.process.output)) <= 1


@over_tcp
@after(7, "flight awake")
def test_asleep(walk):
    """Over tcp, a page takes a whole millisecond as long as both sides sleep."""
    def seconds(word):
        server = walk(7, word, RXM)
        assert server.start_client("65536", "1000", "3").wait() == 0
        server.process.wait_for("WRITE: 100%")
        return float(re.findall(r"\[([0-9.]+)s\] WRITE: 100%", server.process.output)[-1])
    assert seconds("flight") > 3
    assert any(seconds("awake") < 3 for _ in range(10))  # a busy machine may need some tries


@takes_shm
@after(6, "gpu flush")
@pytest.mark.thorough
def test_gpu(run):
    """The copy has to end before the WRITE, and what has come has to be flushed, which a
    kernel that is running would notice. The stand-ins have a GPU, and an adapter for it."""
    names = {word: name_of(6, word) for word in ("gpu", "flush")}
    make(*(f"{BUILD}/cuda/{name}" for name in names.values()))
    strict = under_strict(run)
    for one, other, right in [("gpu", "flush", False), ("flush", "gpu", True),
                              ("flush", "flush", True)]:
        server = AnyServer(run, f"{BUILD}/cuda", names[one], "shm", "--gpu", **strict)
        client = run([f"{BUILD}/cuda/{names[other]}", "--gpu", server.address], "shm",
                     **strict)
        assert client.wait() == (not right)
        assert ("Data is correct." if right else "error: the data is not correct") in \
            client.output
        assert "regions of GPU memory=1" in client.output
        assert ("VIOLATION of flush: " in client.output) == (other == "gpu")


@pytest.mark.parametrize("provider", ["", "shm"])
@after(9, "again credit")
def test_saved_too_late(run, walk, provider):
    """The next chunk arrives in a slot before the disk has saved the one before it, and
    everybody reports success, until the sender waits for a credit. With one slot, disk and
    network take turns then; with eight they don't."""
    source = run.new_folder() + "/file"
    write_source(source, 20 << 20, 1)
    seconds = {}
    for word, slots in ("again", "8"), ("credit", "1"), ("credit", "8"):
        folder = run.new_folder()
        server = walk(9, word, provider, folder, SLOW_DISK_MS="50")
        client = server.start_client(source, slots)
        assert client.wait() == 0 and "has saved the file" in client.output, client.output
        assert os.path.getsize(f"{folder}/file") == 20 << 20
        assert filecmp.cmp(source, f"{folder}/file", shallow=False) == (word != "again")
        seconds[word, slots] = client.seconds
    assert seconds["credit", "1"] > 1, seconds
    assert seconds["credit", "8"] < seconds["credit", "1"] / 1.5, seconds


@after(9, "write again")
def test_one_disk_for_all(run, walk):
    """Without another thread, a client waits for the disk of another one. And a file has to
    fit into the slots."""
    first, second = (run.new_folder() + name for name in ("/first", "/second"))
    write_source(first, 5 << 20, 1)
    write_source(second, 1, 1)
    for word in "write", "again":
        server = walk(9, word, "", run.new_folder(), SLOW_DISK_MS="1000")
        clients = [server.start_client(first)]
        server.process.wait_for("Receiving")
        clients.append(server.start_client(second))
        assert [client.wait() for client in clients] == [0, 0]
        # CONNECT, PUT and CHUNK are seen in several rounds of its loop.
        assert word == "again" or clients[1].seconds > 2, clients[1].seconds
        large = run.new_folder() + "/large"
        write_source(large, 9 << 20, 1)
        client = server.start_client(large)
        assert client.wait() == (word == "write")
        assert ("does not fit into the slots" in client.output) == (word == "write")


@over_tcp
@after(9, "credit whole")
def test_whole_or_not(run, walk):
    """A file that exceeds the server's limit ends the server, until the client hears why it
    is not saved. And half a file has the name of the whole one, until that comes last."""
    source = run.new_folder() + "/file"
    write_source(source, 20 << 20, 1)
    for word in "credit", "whole":
        folder = run.new_folder()
        server = walk(9, word, "", folder)
        resource.prlimit(server.process.popen.pid, resource.RLIMIT_FSIZE, (5 << 20, 5 << 20))
        client = server.start_client(source)
        if word == "credit":
            assert server.process.wait() == -signal.SIGXFSZ
            client.signal(signal.SIGKILL)
            assert os.listdir(folder) == ["file"]
            continue
        client.check_error("the server: cannot write file.part: File too large")
        server.process.wait_for("Done")
        assert not os.listdir(folder)


@over_tcp
@after(10, "draw add")
def test_same_ticket(walk):
    """Two clients that READ how many tickets have been drawn, and WRITE one more, draw the
    same ones: not each time, but soon. With FETCH-AND-ADD, none is drawn twice."""
    server = walk(10, "draw", "tcp")
    for rounds in range(1, 21):
        clients = [server.start_client("2000") for _ in range(2)]
        assert [client.wait() for client in clients] == [0, 0]
        found = server.process.wait_for(r"^(\d+) tickets have been drawn$", count=rounds)
        if int(found[1]) < 4000 * rounds:
            break
    assert int(found[1]) < 4000 * rounds
    server = walk(10, "add", "tcp")
    clients = [server.start_client("2000") for _ in range(2)]
    assert [client.wait() for client in clients] == [0, 0]
    server.process.wait_for(
        r"^the log has 4000 entries .0 holes.. It all fits together\.$")


@pytest.mark.parametrize("provider", PROVIDERS_OF_ATOMICS)
@after(10, "ledger lock")
def test_unlocked_ledger(walk, provider):
    """Without a lock, changes of the ledger are lost, and with one none is."""
    for word in "ledger", "lock":
        server = walk(10, word, provider, HOLD_MS="3")
        clients = [server.start_client("300") for _ in range(2)]
        status = [client.wait() for client in clients]
        found = server.process.wait_for(
            r"^.*the log has 600 entries .0 holes., the ledger (\d+) changes\.")
        if word == "ledger":
            assert status != [0, 0] and int(found[1]) < 600
            assert "of our 300 changes of the ledger are lost" in \
                clients[status.index(1)].output
        else:
            assert status == [0, 0] and int(found[1]) == 600


@pytest.mark.parametrize("provider", PROVIDERS_OF_ATOMICS)
@after(10, "lock aside")
def test_slow_owner(walk, provider):
    """A client that was only slow spoils the ledger, until it WRITEs aside."""
    for word in "lock", "aside":
        server = walk(10, word, provider)
        server.env = {**server.env, "HOLD_MS": "3000"}
        slow = server.start_client("1")
        slow.wait_for("FETCH-AND-ADD and WRITE: ")  # and holds the lock
        time.sleep(0.5)
        server.env = {**server.env, "HOLD_MS": "0"}
        other = server.start_client("5")
        assert other.wait() == 0 and "of others that we ended: 1" in other.output
        assert slow.wait() == 0, slow.output
        server.process.wait_for(
            r"^error: the log has 6 entries .0 holes., the ledger 2 changes\." if word == "lock"
            else r"^the log has 6 entries .0 holes., the ledger 6 changes\. It all fits ")


# ---- Chapter 11: two hosts, with links of known speeds ----

@pytest.fixture
def walk_rails(run, network):
    """Starts the server of a move of chapter 11, or another one, on one host. Its clients run
    on the other one."""

    def start(word, path=None):
        network.wait()
        server = AnyServer(run, *(path or path_of(11, word)).rsplit("/", 1), "tcp",
                           netns=network.hosts[0])
        server.env = {"netns": network.hosts[1]}
        return server
    return start


def plug_unequal(network):
    """Two links, the second of which is slow."""
    network.plug_all(2, mbits=400)
    for host in 0, 1:
        network.limit(host, "link2", 20)


@over_tcp
@after(11, "listen pull dead")
def test_slow_rail(network, walk_rails):
    """Dealt out, all pages wait for the slow link. Pulled, they still do, until each rail
    has only few in flight."""
    plug_unequal(network)
    for word in "listen", "pull", "dead":
        server = walk_rails(word)
        if word == "listen":
            addresses = dict(zip(
                re.findall("^domain: ([^,]+)", server.process.output, re.M),
                server.address.split(",")))
            clients = [server.run([server.path, address, "65536", "100", "1"], "tcp",
                                  FI_TCP_IFACE=link, **server.env)
                       for link, address in addresses.items()]
        else:
            clients = [server.start_client("65536", "200", "1")]
        for client in clients:
            assert client.wait() == 0 and "Data is correct." in client.output
        server.process.wait_for("Done", count=len(clients))
        took = [float(found) for found in re.findall(
            r"^\[\d\] \[([0-9.]+)s\] WRITE: 100%", server.process.output, re.M)]
        # 100 pages take 2.6 s on the slow link.
        assert (max(took) > 1.5) == (word != "dead"), (word, took)
        assert word == "listen" or (shares(server, 1)["link2"] > 40) == (word == "pull")


@over_tcp
@pytest.mark.thorough
def test_number_of_one_rail(network, walk_rails, tmp_path):
    """The number comes before the pages on another rail, if it waits for those on its own
    alone."""
    plug_unequal(network)
    make("break-11.one", *QUICKLY, f"BUILD={tmp_path}", "CUDA_HOME=")
    server = walk_rails("", f"{tmp_path}/break/11.one")
    client = first_wrong(server, "65536", "200", "1", times=5)
    assert client.output.endswith("Received RDMA WRITE to local memory.\n"
                                  "error: the data is not correct\n")


@over_tcp
@after(11, "group answer")
def test_docker(network, walk_rails):
    """Each host has a network of the same name for itself."""
    for host in 0, 1:
        network.ip(host, "link", "add", "docker0", "type", "bridge")
        network.ip(host, "address", "add", "172.17.0.1/16", "dev", "docker0")
        network.ip(host, "link", "set", "docker0", "up")
    network.plug_all(2, mbits=None)
    for word in "group", "answer":
        client = walk_rails(word).start_client("65536", "100", "1")
        assert client.wait() == (word == "group"), client.output
        assert ("rail docker0 is given up: no answer" if word == "answer" else
                "error: nothing has happened for 10 s while waiting for ACCEPT"
                ) in client.output


@over_tcp
@after(11, "pull dead")
def test_cable(network, walk_rails):
    """A link goes down, and what it has taken is missing, until it is posted again."""
    network.plug_all(2)
    for word in "pull", "dead":
        server = walk_rails(word)
        client = server.start_client("65536", "100", "8")
        server.process.wait_for(r"^.* WRITE: [1-9]")
        network.down(0, "link2")
        assert client.wait() == (word == "pull"), client.output
        if word == "pull":
            assert "error: nothing has happened for 10 s while waiting for the pages" in \
                client.output
        else:
            server.process.wait_for(
                "rail link2 is given up: none of 8 WRITEs has completed for 4 s")
        network.up(0, "link2")


@over_tcp
@pytest.mark.thorough
def test_late_bytes(run, network, walk_rails, tmp_path):
    """What a rail that was given up has left in the kernel's queue arrives after the
    notification, nearly each time, and in no client that has closed its rails."""
    network.plug_all(2)
    found = {}
    for name, program in ("11.open", "11.open"), ("11", "11_rails"):
        make(f"break-{name}", *QUICKLY, f"BUILD={tmp_path}", "CUDA_HOME=")
        for _ in range(3 if name == "11.open" else 1):
            server = walk_rails("dead")
            client = run([f"{tmp_path}/break/{program}", server.address, "65536", "100", "5"],
                         "tcp", **server.env)
            server.process.wait_for(r"^.* WRITE: [1-9]")
            network.ip(0, "route", "add", "blackhole", "10.11.2.2")
            server.process.wait_for("is given up")
            client.wait_for("^Data is correct", 30)
            time.sleep(1)
            network.ip(0, "route", "delete", "blackhole", "10.11.2.2")
            assert client.wait() == 0, client.output
            found[name] = int(re.search(r"^(\d+) late bytes$", client.output, re.M)[1])
            if found[name] > 0:
                break
    assert found["11.open"] > 0 and found["11"] == 0, found


@after(13, "listener number")
def test_whose_message(walk):
    """All answers of one endpoint go to the client that has connected last, until each
    message has a number."""
    for word in "listener", "number":
        server = walk(13, word)
        clients = [server.start_client(text) for text in ("one", "two")]
        right = [client.wait() == 0 for client in clients]
        assert all(right) if word == "number" else not any(right), clients[0].output


@pytest.mark.skipif(not is_here("tcp;ofi_rxm"), reason="others have room for everything")
@after(13, "crowd share")
def test_deaf_client(run, walk, tmp_path):
    """After a client that asks and never reads, nobody gets so much as an ACCEPT, until
    each peer has a queue and a buffer of its own."""
    make("break-13", *QUICKLY, f"BUILD={tmp_path}", "CUDA_HOME=")
    for word in "crowd", "share":
        server = walk(13, word, "tcp;ofi_rxm")
        deaf = run([f"{tmp_path}/break/13_crowd", server.address, "deaf"], "tcp;ofi_rxm")
        deaf.wait_for("^Asked 30,000 times, and read nothing.$", 30)
        client = server.start_client()
        if word == "crowd":
            client.check_error(f"{GIVEN_UP} while waiting for ACCEPT")
        else:
            assert client.wait() == 0, client.output
            server.process.wait_for(r"^\[[0-9a-f]{16}\] forgotten: it asks and does not read$")
        deaf.signal(signal.SIGTERM)
        assert deaf.wait() == 0, deaf.output


@after(13, "share forget")
def test_dead_crowd(walk):
    """The server remembers clients that have died, until it listens for silence."""
    servers = [walk(13, word) for word in ("share", "forget")]
    for server in servers:
        crowd = server.start_client("5", "100000")
        server.process.wait_for("^5 clients, ")
        time.sleep(1)
        crowd.popen.kill()
    servers[1].process.wait_for("^0 clients, [1-9]", 60)
    assert re.findall(r"^\d+ clients", servers[0].process.output, re.M)[-1] == "5 clients"


# ---- Chapter 14: the reader attacks, over TCP ----

SHORT = "4096", "10", "1"


@pytest.fixture
def attack(run):
    """Starts an attack of scripts/stranger: attack("greet", server.address)."""
    return lambda *args: run([f"{ROOT}/scripts/stranger", *map(str, args)],
                             BUILD=f"{ROOT}/{BUILD}", CXXFLAGS="-O0")


def crowded(attack, server, count):
    """Has so many strangers want a place."""
    strangers = attack("crowd", server.address, count)
    strangers.wait_for("^sent")
    server.process.wait_for("Received CONNECT", count=8)


@over_tcp
@after(14, "nonce")
def test_greeting(run, walk, attack):
    """A stranger ends a session whose messages carry no nonce, and none that has one."""
    before = AnyServer(run, BUILD, "7_queue", "tcp")
    for server in before, walk(14, "nonce", "tcp"):
        client = server.start_client("65536", "100", "1000000")
        server.process.wait_for(r"^\[1\] .*WRITE: ")
        assert attack("greet", server.address).wait() == 0
        if server is before:
            server.process.wait_for(r"^\[1\] error: bad message: type 1819043144$")
        else:
            already = server.process.output.count("WRITE: ")
            server.process.wait_for("WRITE: ", count=already + 3)
            assert "error" not in server.process.output
        client.popen.kill()


@over_tcp
@after(14, "nonce refuse")
def test_reason(walk, attack):
    """A client that asks for nothing waits for it, until it is told."""
    for word, said in ("nonce", GIVEN_UP), ("refuse", "refused: bad message: 0 pages"):
        server = walk(14, word, "tcp")
        attack("empty", name_of(14, word), server.address).check_error(said)
        server.process.wait_for(r"^\[1\] error: bad message: ")


@over_tcp
@after(14, "refuse")
def test_red(run, attack):
    """A server whose reason is red."""
    stranger = attack("red", name_of(14, "refuse"))
    address = stranger.wait_for(r"^ .* ([0-9a-f]+)\n")[1]
    client = run([path_of(14, "refuse"), address], "tcp")
    client.check_error(r"refused: \?\[31mThis is red\.$")
    assert stranger.wait() == 0


@over_tcp
@after(14, "refuse wait")
def test_crowd_of_the_dead(walk, attack):
    """Three hundred who have gone keep an honest client out, until it is told to wait and
    they are forgotten."""
    for word in "refuse", "wait":
        server = walk(14, word, "tcp")
        crowded(attack, server, 300)
        client = server.start_client(*SHORT)
        assert client.wait() == (word == "refuse"), client.output
        assert (f"{GIVEN_UP} while waiting for ACCEPT" if word == "refuse" else
                "The server can't serve us yet: waiting\n") in client.output


@over_tcp
@after(14, "refuse wait")
def test_flooded(walk, attack):
    """While all have to wait, junk stays in the inbox, until the server takes it out."""
    for word in "refuse", "wait":
        server = walk(14, word, "tcp")
        crowded(attack, server, 20)
        before = server.memory()
        assert attack("flood", server.address, "500").wait() == 0
        assert (server.memory() > before + 20_000) == (word == "refuse")


@pytest.mark.skipif(not is_here("tcp;ofi_rxm"), reason="others may take back what they have")
@over_tcp
@after(14, "wait aside")
def test_connections_of_the_dead(walk, attack):
    """The listener never gives back what it has sent to those who have gone."""
    servers = [walk(14, word, "tcp") for word in ("wait", "aside")]
    before = [server.process.descriptors() for server in servers]
    for server in servers:
        crowded(attack, server, 300)
        wait_until(lambda: server.process.descriptors() > 100, 30)
    wait_until(lambda: servers[1].process.descriptors() < before[1] + 10, 60)
    assert servers[0].process.descriptors() > before[0] + 200


@over_tcp
@after(14, "wait aside")
def test_family(walk, attack):
    """After one address of another family, a server tells nobody any more."""
    for word in "wait", "aside":
        server = walk(14, word, "tcp")
        crowded(attack, server, 8)
        assert attack("family", server.address).wait() == 0
        time.sleep(2)
        client = server.start_client(*SHORT)
        if word == "wait":
            client.check_error(GIVEN_UP)
        else:
            assert client.wait() == 0, client.output


@over_tcp
@after(14, "aside share")
def test_large_share(run, walk):
    """One that is alone may have more than an eighth. The next one waits for it."""
    assert walk(14, "aside").start_client("1048576", "65").wait() == 2
    server = walk(14, "share", "tcp")
    large = server.start_client("1048576", "320", "100000")
    server.process.wait_for(r"^\[1\] .*WRITE: ")
    second = server.start_client("1048576", "320", "1")
    server.process.wait_for(r"^\[2\] Received RandomFill")
    time.sleep(2)
    assert not re.search(r"^\[2\] .*WRITE: ", server.process.output, re.M)
    large.signal(signal.SIGINT)
    assert second.wait() == 0, second.output


@over_tcp
@after(14, "share files")
def test_silent_connections(walk, attack):
    """Three hundred connections take all descriptors of a server that has 256."""
    for word in "share", "files":
        server = walk(14, word, "tcp", wrapper=["sh", "-c", 'ulimit -Sn 256; exec "$0"'])
        attack("connect", server.address, "300").wait_for("^300 ")
        wait_until(lambda: server.process.descriptors() >= 256, 30)
        client = server.start_client(*SHORT)
        assert client.wait() == (word == "share"), client.output
        assert (GIVEN_UP in client.output) == (word == "share")


@over_tcp
@after(14, "share files")
def test_closed_files(walk):
    """Without standard input and error, libfabric's first files take their numbers."""
    for word in "share", "files":
        server = walk(14, word, "tcp", wrapper=["sh", "-c", 'exec "$0" <&- 2>&-'])
        files = {os.readlink(f"/proc/{server.process.popen.pid}/fd/{fd}") for fd in (0, 2)}
        assert (files == {"/dev/null"}) == (word == "files")
        assert word == "share" or server.start_client(*SHORT).wait() == 0
