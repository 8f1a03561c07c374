"""The moves of the steps: what each promises is looked for in a run of its program. And
the tool that makes and keeps them, in a small repository."""

import filecmp
import functools
import os
import re
import shutil
import subprocess
import typing

import pytest

import moves
from harness import PROVIDERS, AnyServer, nobody_at, owned_shm_files, write_source
from marks import nothing_wrong
from repository import QUICK_CXXFLAGS, ROOT, build_moves
from small_repository import FIRST, HEAD, LAST, PARENT, with_moves


class Promise(typing.NamedTuple):
    """What the program after a move does. Patterns are looked for in all lines."""
    # The arguments of each client, after the address. All of them run at the same time.
    clients: list = [[]]
    # What each client prints, and exits with 0.
    client: str = ""
    # What the server prints, and how often.
    server: dict = {}
    # The error of another client that comes once the server has gone.
    late: str = ""
    # That client leaves nothing in /dev/shm.
    leaves_nothing: bool = False


# By the names of moves; "" is for all other moves of that step.
HELLO = Promise(client="^Sent 13 bytes\\.$",
                server={"^Received 13 bytes: Hello, world!$": 1})
NOTHING_HAPPENED = ".*nothing has happened for 10 s"
SAVED = "^The server has saved the file\\.$"
LAGER = Promise([["lager"]], client="^The text is correct")
CROWD = Promise([["5", "50"]] * 2, "^250 texts, all correct, ")
PROMISES = {
    "4_hello": {
        "": HELLO,
        "limit": HELLO._replace(late=NOTHING_HAPPENED),
        "close": HELLO._replace(late=NOTHING_HAPPENED, leaves_nothing=True),
        "signal": HELLO,
        "stay": HELLO._replace(clients=[[], []],
                               server={"^Received 13 bytes: Hello, world!$": 2}),
        "record": Promise([["x" * 60000], ["two"]] * 4, "^Sent (60000|3) bytes\\.$",
                          {"^Received 60000 bytes: x{60000}$": 4,
                           "^Received 3 bytes: two$": 4}),
        "error": HELLO},  # see test_deaf in test_walk.py
    "5_reverse": {
        "": LAGER,
        "introduce": Promise([["lager"]], "^Sent 5 bytes\\.$",
                             {"^Received CONNECT message from client ": 1,
                              "^Received 5 bytes: lager$": 1}),
        "endpoint": LAGER._replace(clients=[["lager"]] * 2, server={"\\] Done\\.$": 2}),
        "round": LAGER._replace(clients=[["lager"]] * 4, server={"\\] Done\\.$": 4})},
    "6_write": {
        "": Promise([["65536", "20"]] * 2, "^Data is correct\\.$",
                    {"Done\\.$": 2}),
        "write": Promise(client="^Data is correct\\.$", server={"Done\\.$": 1}),
        "number": Promise([["8"], ["65536"]], "^Received RDMA WRITE to local memory\\.$",
                          {"Done\\.$": 2}),
        "pages": Promise([["65536", "20"]] * 2, "^Data is correct\\.$", {"Done\\.$": 2})},
    "7_queue": {"": Promise([["4096", "100", "3"]], client="^Data is correct",
                            server={"bw=[0-9.]+Gbps": 1})},
    # Of files, the size is given, and of those that are saved, each byte is compared.
    "9_file": {
        "": Promise([["3000000"], ["5"]], SAVED, {"Done": 2}),
        "put": Promise([["5"]], "^The server has created the file\\.$", {"Done": 1}),
        "lend": Promise([["5000000"], ["0"]], "^The server lends [51] slots\\.$", {"Done": 2}),
        # Otherwise the bytes may be wrong: see test_saved_too_late.
        "again": Promise([["1000000"], ["5"]], SAVED, {"Done": 2})},
    "10_lock": {
        "": Promise([["50"]] * 2, "^Data is correct\\.$",
                    {"^the log has \\d+ entries .* It all fits together\\.$": 1}),
        "draw": Promise([["50"]], "^Done\\.$", {"^50 tickets have been drawn$": 1}),
        "add": Promise([["50"]] * 2, "^Done\\.$", {"It all fits together\\.$": 1}),
        # Two lose changes: see test_unlocked_ledger.
        "ledger": Promise([["50"]], "^Data is correct\\.$", {"It all fits together\\.$": 1})},
    # With one adapter. What several do is in test_walk.py.
    "11_rails": {"": Promise([["4096", "100", "3"]] * 2, "^Data is correct\\.$",
                             {"bw=[0-9.]+Gbps": 2, "Done": 2})},
    # Two more than there are places.
    "14_strangers": {"": Promise([["4096", "100", "3"]] * 10, "^Data is correct\\.$",
                                 {"bw=[0-9.]+Gbps": 10, "Done": 10})},
    "13_crowd": {
        "": CROWD,
        "listener": LAGER._replace(clients=[["lager"]]),
        "number": LAGER._replace(clients=[["lager"]] * 3)},
}


# ---- The moves themselves ----

def name_of(step, k):
    """5.3"""
    return f"{step.split('_')[0]}.{k}"


@functools.cache
def build(step):
    """Builds all moves of a step. Returns their folder."""
    return build_moves([name_of(step, k) for k in range(1, len(moves.patches(step)) + 1)])


def of_steps(*values):
    """A worker builds the moves of a step, and runs them all. Where something is left out,
    those of the second half, which take a minute each to build, and all over shm."""
    return [pytest.param(*value, marks=[
        pytest.mark.xdist_group(f"moves of {value[0]}"),
        *[pytest.mark.thorough] * (int(value[0].split("_")[0]) > 7 or
                                   value[2] == "shm")],
        id="-".join(map(str, value))) for value in values]


STEPS = moves.steps()
MOVES = [(step, moves.word(path)) for step in STEPS for path in moves.patches(step)]
RUNS = [(*move, provider) for move in MOVES for provider in PROVIDERS
        if provider in ("", "shm")]


def position(step, word):
    """The number of a move."""
    return [moves.word(path) for path in moves.patches(step)].index(word) + 1


def start(run, step, name, provider, *arguments):
    return AnyServer(run, build(step), name_of(step, position(step, name)), provider, *arguments)


@pytest.mark.static
@pytest.mark.parametrize("step", STEPS)
def test_moves(step):
    """They begin with the parent, end in the program, and are small. That they compile,
    test_promise sees."""
    nothing_wrong(moves.check(step))


@pytest.mark.static
def test_promises():
    """There is a promise for each move, and none for one that is not there."""
    for step in STEPS:
        names = {name for of, name in MOVES if of == step}
        assert "" in PROMISES[step] or names <= {*PROMISES[step]}
        assert {*PROMISES[step]} - {""} <= names


@pytest.mark.parametrize("step,name,provider", of_steps(*RUNS))
def test_promise(run, step, name, provider):
    promise = PROMISES[step].get(name) or PROMISES[step][""]
    files = {}
    if step == "9_file":
        folder = run.new_folder()
        server = start(run, step, name, provider, folder)
        for number, (size,) in enumerate(promise.clients):
            source = f"{run.new_folder()}/file{number or ''}"
            write_source(source, int(size), number)
            files[source] = f"{folder}/file{number or ''}"
        promise = promise._replace(clients=[[source] for source in files])
    else:
        server = start(run, step, name, provider)
    clients = [server.start_client(*arguments) for arguments in promise.clients]
    for client in clients:
        status = client.wait()
        assert status == 0, client.output + "\nserver:\n" + server.process.output
        assert re.search(promise.client, client.output, re.M), client.output
    for pattern, count in promise.server.items():
        server.process.wait_for(pattern, count=count)
    for source, saved in files.items():
        assert promise.client != SAVED or filecmp.cmp(source, saved, shallow=False)
    if promise.late:
        assert server.process.wait() == 0
        with nobody_at(server.address):
            late = server.start_client()
            late.check_error(promise.late)
        if promise.leaves_nothing:
            assert not owned_shm_files([late.popen.pid], late.born)


# ---- The tool ----

def tool(repo, *arguments):
    return repo.run("moves/moves.py", *arguments)


def test_write(tmp_path):
    """The patches lead from the parent to the program, by the way of the first move. A move
    keeps its head, also with another number. The last one has to be the program."""
    repo = with_moves(tmp_path)
    assert moves.states("5_two", repo.folder) == [PARENT, FIRST, LAST]
    assert moves.check("5_two", repo.folder) == []
    assert tool(repo, "state", "5.0")[1] == PARENT and tool(repo, "head", "5.1")[1] == HEAD
    assert tool(repo, "list") == (
        0, "5.1   twice      +7 -2      Twice: a function.\n"
           "5.2   loop       +6 -2      Loop: again.\n"
           "5_two: all moves +13 -4; the step +11 -2\n\n", "")
    status, _, error = tool(repo, "write", "5_two", "1_twice.cpp")
    assert status == 1 and "does not end in src/5_two.cpp" in error
    (tmp_path / "1_new.cpp").write_text(PARENT.replace("4_one", "Based on 4_one."))
    (tmp_path / "2_twice.cpp").write_text(LAST)
    status, output, _ = tool(repo, "write", "5_two", "1_new.cpp", "2_twice.cpp")
    assert status == 0 and "removed: scripts/moves/5_two/2_loop.patch" in output
    assert moves.head("5_two", 2, repo.folder) == HEAD


def test_make(tmp_path):
    """What a reader does with a move: builds it, looks at it, types it, and compares that as
    code. What somebody has typed is not written over."""
    repo = with_moves(tmp_path)
    for file in "Makefile", "scripts/diff.sh", "scripts/moves/type.sh":
        shutil.copy(f"{ROOT}/{file}", tmp_path / file)

    def make_it(*arguments):
        done = subprocess.run(
            ["make", "BUILD=build", "CUDA_HOME=", *arguments], cwd=tmp_path, text=True,
            check=False, capture_output=True, env={**os.environ, "CXXFLAGS": QUICK_CXXFLAGS})
        return done.stdout if done.returncode == 0 else done.stderr

    assert "-o build/5.1 " in make_it("5.1") and "-o" not in make_it("5.1")
    assert subprocess.run(tmp_path / "build/5.1", check=False).returncode == 3
    assert make_it("moves").startswith("5.1   twice ")
    lines = make_it("diff-5.1").splitlines()
    assert lines[0] == "Twice: a function." and "+int Twice(int number) {" in lines
    assert "there is no move 5.3; there are: 5.1 5.2" in make_it("diff-5.3")

    mine = repo.path("my_5")
    assert "make my_5 " in make_it("type-5.2") and mine.read_text() == FIRST
    assert "+  int result = 2;" in make_it("typed-5.2").splitlines()
    mine.write_text(LAST.replace("  ", "    ").replace("\n\n", "\n// Here:\n"))
    assert "src/my_5.cpp is what it should be after move 5.2.\n" in make_it("typed-5.2")
    assert "FORCE=1 writes over it" in make_it("type-5.2")
