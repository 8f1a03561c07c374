"""15_ring, whose sides are peers: it is no program of TABLE.

KILLS=20 scripts/test.sh -k test_killed_rank    kills so many ranks, each at any moment"""

import os
import random
import re
import signal
import subprocess
import time

import pytest

from harness import (BUILD, LIBFABRIC_LEAKS, PROVIDERS, owned_shm_files,
                     under_strict, wait_until, watch)
from marks import not_over_verbs, takes_shm
from repository import QUICKLY, ROOT, make

KILLS = int(os.environ.get("KILLS", "1"))
# They do not divide by anything: blocks and pieces have different lengths.
FLOATS = "1000003"
CORRECT = (r"^\[{}\] {} bytes in \d+\.\d{{3}} s, bus bandwidth \d+\.\d{{3}} Gbps\. "
           r"Correct\.$")


class Ring:
    """N ranks, each with its output."""

    def __init__(self, run, build, count, floats=FLOATS, provider="", **env):
        self.folder = f"{run.new_folder()}/run"
        self.floats = floats
        self.ranks = [run([f"{build}/15_ring", self.folder, str(rank), str(count), floats],
                          provider, **env) for rank in range(count)]

    def join(self):
        """Waits until each rank has found all others."""
        wait_until(lambda: all(os.path.exists(f"{self.folder}/{rank}.right")
                               for rank in range(len(self.ranks))), 60)

    def check(self):
        """All have the right sums, and leave nothing behind."""
        for number, rank in enumerate(self.ranks):
            assert rank.wait() == 0, self.output()
            assert re.search(CORRECT.format(number, 4 * int(self.floats)), rank.output, re.M)
        for rank in self.ranks:
            assert not owned_shm_files([rank.popen.pid], rank.born)

    def check_failure(self, failed, began, why=".*", limit=15):
        """All others end in time, and name the rank that has failed, unless they had all
        that they wanted before."""
        for number, rank in enumerate(self.ranks):
            if number == failed:
                continue
            status = rank.wait(limit + 5)
            assert rank.ended - began < limit, self.output()
            assert status == 0 and "Correct." in rank.output or status == 1 and re.search(
                rf"^error: rank {failed} has failed: {why}$", rank.output, re.M), self.output()

    def output(self):
        return "\n".join(rank.output for rank in self.ranks)


@pytest.fixture
def ring(run, build):
    return lambda *args, **kwargs: Ring(run, build, *args, **kwargs)


@pytest.mark.builds("plain", "sanitized")
@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("floats", ["8", FLOATS])
def test_sums(ring, count, provider, floats):
    """A rank has some floats of each piece, or a single one."""
    ring(count, floats, provider).check()


@pytest.mark.builds("plain", "sanitized")
def test_late_rank(run, build):
    """The others wait for a rank that starts late, and say so."""
    folder = f"{run.new_folder()}/run"
    command = [f"{build}/15_ring", folder]
    first = run([*command, "0", "2", "100"], **LIBFABRIC_LEAKS)
    first.wait_for(rf"^\[0\] Waiting for 2 ranks in {folder}$")
    time.sleep(1)
    second = run([*command, "1", "2", "100"], **LIBFABRIC_LEAKS)
    assert first.wait() == second.wait() == 0, first.output + second.output


def test_stragglers(ring):
    """A rank stands still for a while, and then one that isn't its neighbour, which costs
    the others that time and no more. In between, nothing but signs of life tells them that
    all live. (Not over shm, where one that stands still may hold a lock that its neighbour
    needs.)"""
    some = ring(4, "8000000")
    some.join()
    time.sleep(random.uniform(0, 0.1))
    some.ranks[2].signal(signal.SIGSTOP)
    time.sleep(6)
    some.ranks[0].signal(signal.SIGSTOP)
    some.ranks[2].signal(signal.SIGCONT)
    time.sleep(6)
    some.ranks[0].signal(signal.SIGCONT)
    some.check()


@not_over_verbs("an emulated processor takes longer for all")
def test_killed_rank(ring):
    """Each survivor hears of it, also one that is no neighbour of the dead. (Not over shm,
    where the dead may leave a lock to its neighbour, which never returns from libfabric.)"""
    for _ in range(KILLS):
        some = ring(5, "32000000")
        some.join()
        time.sleep(random.uniform(0, 0.2))  # long before they end
        dead = random.randrange(5)
        some.ranks[dead].signal(signal.SIGKILL)
        some.check_failure(dead, time.monotonic())


@pytest.mark.thorough
@not_over_verbs("an emulated processor takes longer for all")
def test_stop(ring):
    """A rank that stands still for longer than others wait is given up, and ends, too."""
    some = ring(4, "64000000")
    some.join()
    time.sleep(0.1)
    some.ranks[1].signal(signal.SIGSTOP)
    began = time.monotonic()
    some.check_failure(1, began)
    time.sleep(max(0, began + 14 - time.monotonic()))
    some.ranks[1].signal(signal.SIGCONT)
    assert some.ranks[1].wait(15) == 1, some.output()


def test_interrupted(ring):
    """The one that is interrupted says so, and all end at once. Nothing is left."""
    some = ring(4, "64000000")
    some.join()
    time.sleep(0.2)
    some.ranks[3].signal(signal.SIGINT)
    some.check_failure(3, time.monotonic(), "interrupted", limit=8)
    some.ranks[3].check_error("rank 3 has failed: interrupted\n\\Z")


def test_others_have_other_arguments(run, build):
    """Whose left neighbour has another array is named."""
    folder = f"{run.new_folder()}/run"
    ranks = [run([f"{build}/15_ring", folder, str(rank), "3", "1000" if rank == 2 else "1001"])
             for rank in range(3)]
    for rank in ranks:
        rank.check_error("rank [02] has failed: bad message: READY", 30)


def test_old_folder(run, build):
    """The addresses of an earlier run mislead nobody."""
    folder = run.new_folder()
    with open(f"{folder}/1.left", "w") as file:
        file.write("old")
    again = run([f"{build}/15_ring", folder, "1", "2"])
    again.check_error(f"{folder}/1.left exists: each run needs a new folder$")


@pytest.mark.parametrize("arguments", [
    [], ["x"], ["x", "0"], ["x", "0", "1"], ["x", "2", "2"], ["x", "-1", "2"],
    ["x", "", "2"], ["x", "0", "65"], ["x", "0", "2.5"], ["x", "0", "4", "3"],
    ["x", "0", "2", "1073741825"], ["x", "0", "2", "100", "1"]], ids=" ".join)
def test_wrong_arguments(run, build, arguments):
    wrong = run([f"{build}/15_ring", *arguments])
    assert wrong.wait() == 2
    assert re.match(r"error: (.*\n)+?Usage:\n  15_ring FOLDER RANK N", wrong.output)
    assert not os.path.exists(f"{ROOT}/x")


def test_help(run, build):
    said = run([f"{build}/15_ring", "--help"])
    assert said.wait() == 0 and said.output.startswith("Usage:\n  15_ring FOLDER RANK N")


@pytest.mark.parametrize("count,floats,delay,times", [
    (3, "8000000", "3000", 1), (2, "100000", "50000", 3)], ids=["long", "late"])
def test_ring_under_strict_rules(ring, run, count, floats, delay, times):
    """A network as strict as EFA has nothing to complain about: also if a piece comes back
    as a sum before our own WRITE of it has completed."""
    for _ in range(times):
        some = ring(count, floats, **under_strict(run, STRICT_CQ_DELAY_US=delay))
        some.check()
        assert len(re.findall("^strict: .*rules broken: 0 ", some.output(), re.M)) == count


@takes_shm
@pytest.mark.parametrize("floats,env", [
    ("8000000", {}),
    ("1000000", {"BEHIND": "build/strict.so", "STRICT_LATE_WRITES_US": "50000"}),
    ("100000", {"BEHIND": "build/strict.so", "STRICT_LATE_WRITES_US": "200000"})],
    ids=["", "late", "later"])
def test_watched_ring(tmp_path, floats, env):
    """Where each WRITE completes late, a block comes back as a sum before, and waits in its
    slot: our own WRITE still has the place where it goes."""
    status, said = watch(tmp_path, f"{BUILD}/15_ring", floats, provider="shm", **env)
    assert status == 0 and "No violation seen" in said and " of 3 processes" in said, said


@pytest.mark.thorough
@takes_shm
def test_break_15(tmp_path):
    """All sums are right, and only the recorder in front of a late network sees it."""
    make("break-15", *QUICKLY, f"BUILD={tmp_path}", "CUDA_HOME=")
    for _ in range(5):
        status, said = watch(tmp_path / "run", f"{tmp_path}/break/15_ring", "8000000",
                             provider="shm", BEHIND="build/strict.so")
        if status:
            break
    assert status == 1 and re.search(
        r"^WRONG: rank \d, .* WRITE #\d+ goes where WRITE #\d+ goes", said, re.M), said


def test_demo_of_peers():
    """With a line of each rank; it fails if they do, and leaves nothing running."""
    output = make("demo", CHAPTER="15_ring", ARGS="1000000")
    for rank in range(4):
        assert re.search(rf"^rank {rank} \| \[{rank}\] 4000000 bytes in .*Correct\.$", output,
                         re.M), output
    done = subprocess.run(["scripts/demo.sh", "build/15_ring", "3"], cwd=ROOT, check=False,
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 2 and "rank 3 | Usage:" in done.stdout
