"""A reader's own program lies in src/ beside those of the tutorial. It can be built, run
and compared, and nothing else takes notice of it, even if it is half done."""

import os
import re
import shutil
import subprocess

import pytest

import carry
import chapters
from harness import BUILD, PROGRAMS, AnyServer, under_strict, watch
from repository import ROOT, build_source, programs, variant
from test_strict import check_rules

MINE = '#include <stdio.h>\n\nint main() { puts("mine"); }\n'
HALF_DONE = "int main() {  \n  fi_something(;\n"
OWN = {"mine": "// Based on 7_queue.\n" + MINE, "another": MINE,
       "2nd-try": "// Based on 7_queue.\n" + HALF_DONE, "half_done": HALF_DONE,
       "7": "// Based on nothing.\n<<<<<<< HEAD\n"}


def test_beside_the_others(tmp_path):
    """Each is built, by its name, and compared with what it is based on; a number is that of a
    program of the tutorial. The tests, the book and the tools see those alone."""
    for name in "Makefile", "README.md":
        shutil.copy(f"{ROOT}/{name}", tmp_path)
    for name in "src", "scripts", "chapters":
        shutil.copytree(f"{ROOT}/{name}", tmp_path / name, symlinks=True)
    for name, text in OWN.items():
        (tmp_path / f"src/{name}.cpp").write_text(text)

    def make(*arguments):
        done = subprocess.run(["make", *arguments], cwd=tmp_path, check=False, text=True,
                              capture_output=True, env={**os.environ, "CUDA_HOME": ""})
        return done.stdout if done.returncode == 0 else f"failed: {done.stderr}"

    for name in "mine", "another":
        make(name)
        assert subprocess.run([tmp_path / "build" / name], check=True, text=True,
                              capture_output=True).stdout == "mine\n"
    assert "--- a/src/7_queue.cpp\n+++ b/src/mine.cpp\n" in make("diff-mine")
    assert "+++ b/src/12_sleep.cpp\n" in make("diff-12")
    assert re.match("failed: .*src/another.cpp names no parent", make("diff-another"))
    assert programs(tmp_path) == programs() and "src/2nd-try.cpp" in make("-n")
    assert [*chapters.pages_of_programs(tmp_path)] == [*chapters.pages_of_programs(ROOT)]
    plan = make("-n", "all", "OWN=")
    assert "src/7_queue.cpp" in plan and not any(f"src/{name}.cpp" in plan for name in OWN)


# ---- Programs that a page has the reader make: scripts/own ----

def own(name):
    return carry.text_of(f"own/{name}")


def own_variant(name, *changes):
    return variant(name, *changes, source=lambda: own(name))


def made(run, name, folder="", **env):
    """What a patch of scripts/own makes, or a variant of that: its server, and clients
    for it."""
    return AnyServer(run, folder or build_source(name, own(name)), name, **env)


# ---- A ping-pong and a feed ----

@pytest.mark.thorough
def test_ping(run):
    """Each round gets its own answer."""
    ping = made(run, "ping")
    client = ping.start_client()
    assert client.wait() == 0 and "median" in client.output, client.output
    ping.stop()


OURS = "      if (slots[i].in_flight > 0) continue;\n"
CREDIT = "      if (!credits[i]) continue;\n"
WITHOUT_OURS = own_variant("feed", (OURS, ""))
WITHOUT_CREDIT = own_variant("feed", (CREDIT, ""))


@pytest.mark.thorough
def test_feed_of_whom(run):
    """The server checks what a client asks for, if it has not done so itself."""
    feed = made(run, "feed", own_variant("feed", ("ParseNumber(args[1], kMaxSlots)",
                                                  "ParseNumber(args[1], 65)"))())
    feed.start_client("65", "300").wait()  # it doesn't wait for an answer
    feed.process.wait_for("error: bad message: so many slots")
    feed.stop()


GREEDY = own_variant("feed", (OURS, ""), (CREDIT, ""), ("    if (!free.empty()", "    if (false"))


@pytest.mark.thorough
def test_greedy(run):
    """Without either question, the sum of more items than slots is wrong."""
    feed = made(run, "feed", GREEDY())
    client = feed.start_client("8", "8")
    assert client.wait() == 0 and "The sum is correct." in client.output, client.output
    # Some runs may be right, by luck; hardly twenty of them.
    for _ in range(20):
        client = feed.start_client("8", "2000")
        if client.wait() != 0:
            break
    assert "the sum is not correct" in client.output, client.output
    feed.stop()


@pytest.mark.parametrize("late", [
    {}, {"STRICT_DELAY_US": "20000", "STRICT_CQ_DELAY_US": "20000"}], ids=["", "late"])
@pytest.mark.thorough
def test_feed(run, late):
    """Each item comes once, and as it was made, on a network without order."""
    feed = made(run, "feed", **under_strict(run, **late))
    clients = [feed.start_client(slots, "300") for slots in ("4" if late else "1", "8")]
    for client in clients:
        assert client.wait() == 0, client.output
        assert "The sum is correct." in client.output
    feed.stop()
    check_rules(feed.process, *clients)


@pytest.mark.thorough
def test_feed_without_ours_watched(run):
    """With strict.so behind it, the recorder names the buffer and the place."""
    for _ in range(6):
        _, said = watch(run.new_folder(), f"{WITHOUT_OURS()}/feed", "8", "300",
                        BEHIND=f"{BUILD}/strict.so")
        if "WRONG" in said:
            break
    assert " goes where WRITE #" in said, said
    assert "was changed between post and completion" in said, said


@pytest.mark.thorough
def test_feed_without_credit(run):
    """The client finds it, or the server, and strict.so does not."""
    feed = made(run, "feed", WITHOUT_CREDIT(), **under_strict(run))
    client = feed.start_client("8", "2000")
    assert client.wait() == 1
    assert ("error: the sum is not correct" in client.output
            or "bad message: credit" in feed.process.output), client.output
    feed.stop()
    check_rules(feed.process, client)


# ---- The patches ----

def copies():
    """The blocks in which a page has the reader copy a program and change the copy."""
    found = []
    for name in chapters.chapters(ROOT):
        for block in chapters.Page(ROOT, f"chapters/{name}.md").blocks:
            text = "\n".join(block.lines)
            if block.info == "sh" and "cp src/" in text and "sed -i" in text:
                found.append(pytest.param(text, id=name))
    return found


@pytest.mark.parametrize("commands", copies())
@pytest.mark.thorough
def test_copy(tmp_path, commands):
    """Such a copy differs from its program, and compiles."""
    shutil.copy(f"{ROOT}/Makefile", tmp_path)
    shutil.copytree(f"{ROOT}/src", tmp_path / "src")
    original, copy = re.search(r"cp src/(\w+)\.cpp src/(\w+)\.cpp", commands).groups()
    if original not in PROGRAMS:
        (tmp_path / f"src/{original}.cpp").write_text(own(original))
    change, _, _ = commands.partition("\nmake ")
    subprocess.run(["sh", "-ec", change], cwd=tmp_path, check=True)
    source = (tmp_path / f"src/{copy}.cpp").read_text()
    assert source != (tmp_path / f"src/{original}.cpp").read_text()
    subprocess.run(["make", "-s", copy, "CXXFLAGS=-fsyntax-only", "CUDA_HOME="],
                   cwd=tmp_path, check=True)


@pytest.mark.static
def test_own_patches():
    """What they make says what it is based on."""
    for patch in os.listdir(f"{ROOT}/scripts/own"):
        name = patch.removesuffix(".patch")
        source = own(name)
        with open(f"{ROOT}/scripts/own/{patch}") as file:
            before, after = re.findall(r"(?m)^copy (?:from|to) src/(\w+)\.cpp$",
                                       file.read())
        assert after == name and f"// Based on {before}.\n" in source
        assert max(map(len, source.splitlines())) <= 80
