"""Exercise 15: what does a WRITE wait for? Each rank prints how many of its WRITEs were held
up, by the first reason: `[2] Held up by data 41, by credit 7, by completion 0.`"""

import os
import re
import signal
import time


def ranks_of(run, build, count, floats, stopped=None):
    """Runs a ring, and stops one of its ranks for a while. Returns each rank's three
    numbers."""
    folder = f"{run.new_folder()}/run"
    ranks = [run([f"{build}/15_ring", folder, str(rank), str(count), str(floats)])
             for rank in range(count)]
    if stopped is not None:
        while not all(os.path.exists(f"{folder}/{rank}.right") for rank in range(count)):
            assert all(rank.popen.poll() is None for rank in ranks)
            time.sleep(0.005)
        ranks[stopped].signal(signal.SIGSTOP)
        time.sleep(2)
        ranks[stopped].signal(signal.SIGCONT)
    found = []
    for number, rank in enumerate(ranks):
        assert rank.wait() == 0, rank.output
        match = re.search(rf"^\[{number}\] Held up by data (\d+), by credit (\d+), "
                          r"by completion (\d+)\.$", rank.output, re.M)
        assert match, rank.output
        found.append([int(count) for count in match.groups()])
    return found


def test_few(run, build):
    """Two ranks with a block for each piece have two WRITEs each, and eight slots: they can
    wait for nothing but data, and each of them once."""
    for data, credit, completion in ranks_of(run, build, 2, 1000):
        assert data <= 2 and credit == completion == 0


def test_stopped(run, build):
    """The right neighbour of a rank that stands still waits for data, and its left neighbour
    for credits. No WRITE counts twice."""
    floats, count = 16 << 20, 3
    total = 2 * (count - 1) * -(-4 * floats // (count * (256 << 10)))
    held = ranks_of(run, build, count, floats, stopped=1)
    assert held[2][0] > 0 and held[0][1] > 0, held
    assert all(sum(numbers) <= total for numbers in held), (total, held)
