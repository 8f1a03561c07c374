"""A reader's own program lies in src/ beside those of the tutorial. It can be built, run
and compared, and nothing else takes notice of it, even if it is half done."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

import chapters
from harness import BUILD, PROGRAMS, address_of
from repository import ROOT, build_source, patched, programs, replaced, variant

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
    assert "+++ b/src/7_queue.cpp\n" in make("diff-7")
    assert re.match("failed: .*src/another.cpp names no parent", make("diff-another"))
    assert programs(tmp_path) == programs() and "src/2nd-try.cpp" in make("-n")
    assert [*chapters.pages_of_programs(tmp_path)] == [*chapters.pages_of_programs(ROOT)]
    plan = make("-n", "all", "OWN=")
    assert "src/7_queue.cpp" in plan and not any(f"src/{name}.cpp" in plan for name in OWN)


# ---- Programs that a page has the reader make: scripts/own ----

def own(name):
    return patched(f"scripts/own/{name}.patch")


def own_variant(name, *changes):
    return variant(name, *changes, source=lambda: own(name))


class Made:
    """What a patch of scripts/own makes, or a variant of that: its server, and clients
    for it. `env` is what both get."""

    def __init__(self, run, name, folder="", **env):
        self.run = run
        self.env = env
        self.path = f"{folder or build_source(name, own(name))}/{name}"
        self.serve()

    def serve(self):
        """Starts a server."""
        self.server = self.run([self.path], **self.env)
        self.address = address_of(self.server)

    def start(self, *args, **env):
        return self.run([self.path, self.address, *args], **{**self.env, **env})

    def stop(self):
        """Ends the server, and returns its last line."""
        self.server.signal(signal.SIGTERM)
        assert self.server.wait() == 0
        return self.server.output.splitlines()[-1]


def preload(library):
    return {"LD_PRELOAD": os.path.join(ROOT, BUILD, library)}


def strict(run):
    return {**preload("strict.so"), "STRICT_DIR": run.new_folder()}


RULES = r"^strict: seen .* rules broken: (\d+) "


# ---- A ping-pong and a feed ----

def cut(source, first, last, new):
    """The source with something else for all from `first` through `last`."""
    assert source.count(first) == 1, first
    at = source.index(first)
    end = source.index(last, at) + len(last)
    return source[:at] + new + source[end:]


def add(source, new, after):
    """The source with something behind a line."""
    assert source.count(after) == 1, after
    return source.replace(after, after + new)


def blocks(first, last):
    """The C++ that a part of the page has its reader type, and what it begins with."""
    with open(f"{ROOT}/chapters/appendix_own.md") as file:
        page = file.read()
    found = re.findall(r"(?ms)^```cpp\n(.*?)^```$",
                       page[page.index(first):page.index(last)])
    return own("blank"), found


LAST_TYPE = "  kBye = 3,      // client: I want nothing more\n"
BUSY = "  bool Busy() const { return false; }\n"
MESSAGE = "  void HandleMessage(const Message& message) {\n"
BYE = "  session.SayBye();\n"


def typed_ping():
    """What blank becomes as a reader of the page types a ping-pong."""
    source, (kind, answer, client, busy) = blocks("## A ping-pong", "## A feed")
    source = add(source, kind, LAST_TYPE)
    source = cut(source, MESSAGE, "\n  }\n", MESSAGE + answer + "  }\n")
    yield source
    source = source.replace(BYE, client)
    yield source
    yield source.replace(BUSY, busy)


def without_comments(source):
    """Its lines, without comments and the text that explains its use."""
    source = re.sub(r'kUsage =\n(    ".*\n)*', "", source)
    return [line for line in (re.sub("//.*", "", line).strip()
                              for line in source.split("\n")) if line]


@pytest.mark.static
def test_typed():
    """In the end it is the patch's."""
    *_, last = typed_ping()
    assert without_comments(last) == without_comments(own("ping"))


@pytest.mark.thorough
def test_ping_from_the_page(run):
    """It compiles after each step, and answers."""
    *steps, _ = typed_ping()
    for number, source in enumerate(steps):
        made = Made(run, "ping", build_source("ping", source))
        client = made.start()
        assert client.wait() == 0, client.output
        assert ("median" in client.output) == (number == 1)
        made.stop()


OURS = "      if (slots[i].in_flight > 0) continue;\n"
CREDIT = "      if (!credits[i]) continue;\n"
WITHOUT_OURS = own_variant("feed", (OURS, ""))
WITHOUT_CREDIT = own_variant("feed", (CREDIT, ""))


@pytest.mark.thorough
def test_feed_of_whom(run):
    """The server checks what a client asks for, if it has not done so itself."""
    made = Made(run, "feed", own_variant("feed", ("ParseNumber(args[1], kMaxSlots)",
                                                  "ParseNumber(args[1], 65)"))())
    made.start("65", "300").wait()  # it doesn't wait for an answer
    made.server.wait_for("error: bad message: so many slots")
    made.stop()


GREEDY = own_variant("feed", (OURS, ""), (CREDIT, ""), ("    if (!free.empty()", "    if (false"))


@pytest.mark.thorough
def test_greedy(run):
    """Without either question, the sum of more items than slots is wrong."""
    made = Made(run, "feed", GREEDY())
    client = made.start("8", "8")
    assert client.wait() == 0 and "The sum is correct." in client.output, client.output
    # Some runs may be right, by luck; hardly twenty of them.
    for _ in range(20):
        client = made.start("8", "2000")
        if client.wait() != 0:
            break
    assert "the sum is not correct" in client.output, client.output
    made.stop()


@pytest.mark.thorough
def test_feed(run):
    """Each item comes once, and as it was made, on a network without order."""
    feed = Made(run, "feed", **strict(run))
    clients = [feed.start(slots, "300") for slots in ("1", "8")]
    for client in clients:
        assert client.wait() == 0, client.output
        assert "The sum is correct." in client.output
    feed.stop()
    for process in feed.server, *clients:
        assert re.findall(RULES, process.output, re.M) == ["0"], process.output


@pytest.mark.thorough
def test_feed_without_ours(run):
    """The sum is right all the same, but strict.so finds it."""
    # The server hears of its WRITEs late, and its client of everything at once.
    feed = Made(run, "feed", WITHOUT_OURS(), **strict(run), STRICT_CQ_DELAY_US="50000")
    client = feed.start("8", "500", STRICT_CQ_DELAY_US="0", STRICT_DELAY_US="0")
    assert client.wait() == 0, client.output
    feed.stop()
    assert re.search(r"VIOLATION of change: WRITE of 4096 bytes: changed while in flight",
                     feed.server.output), feed.server.output


def watched(run, program, *args, **env):
    """What the recorder finds in a run over tcp."""
    return subprocess.run(
        [sys.executable, "scripts/watch/run.py", "-q", "-o", run.new_folder(), program, *args],
        cwd=ROOT, check=False, capture_output=True, text=True,
        env={**os.environ, "BUILD": BUILD, "FI_PROVIDER": "tcp", **env})


@pytest.mark.thorough
def test_feed_without_ours_watched(run):
    """With strict.so behind it, the recorder names the buffer and the place."""
    for _ in range(3):
        found = watched(run, f"{WITHOUT_OURS()}/feed", "8", "300", BEHIND=f"{BUILD}/strict.so")
        if "WRONG" in found.stdout:
            break
    assert " goes where WRITE #" in found.stdout, found
    assert "was changed between post and completion" in found.stdout, found


@pytest.mark.thorough
def test_feed_without_credit(run):
    """The client finds it, or the server, and strict.so does not."""
    feed = Made(run, "feed", WITHOUT_CREDIT(), **strict(run))
    client = feed.start("8", "2000")
    assert client.wait() == 1
    assert ("error: the sum is not correct" in client.output
            or "bad message: credit" in feed.server.output), client.output
    feed.stop()
    for process in feed.server, client:
        assert re.findall(RULES, process.output, re.M) == ["0"], process.output


# ---- A queue whose consumers may die ----

def counts(queue):
    """What the server says in the end: jobs used up, thrown away, left; scenes of the
    film, those made twice, those missing; and whether it all fits."""
    last = queue.stop()
    return [*map(int, re.findall(r"\d+", last)), not last.startswith("error: ")]


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


@pytest.mark.thorough
def test_queue(run):
    """One consumer is killed at its work. Another one takes the job over, and each job
    is done once."""
    queue = Made(run, "jobs")
    producer = queue.start("put", "12")
    producer.wait_for("put job 1.7")  # it has no more pieces
    killed = queue.start("take", WORK_MS="60000")
    job = killed.wait_for(r"took job (1\.\d+)")[1]
    other = queue.start("take", WORK_MS="10")
    killed.signal(signal.SIGKILL)
    other.wait_for("did job", count=12)
    assert producer.wait() == 0
    assert re.findall(r"took over job (.*)", other.output) == [job]
    assert sorted(re.findall(r"did job 1\.(\d+)", other.output), key=int) == [
        str(i) for i in range(12)]
    assert counts(queue) == [12, 0, 0, 12, 0, 0, True]


def without_rounds():
    """What the page has the reader change in Put."""
    page = chapters.Page(ROOT, "chapters/appendix_queue.md")
    new, = [block.lines[0] for block in page.blocks
            if block.info == "text" and block.lines[0].strip().startswith("Word ")]
    old = " ".join(re.search(r"`(Word empty = [^`]*;)`", page.text)[1].split())
    return replaced(own("jobs"), (old, new.strip()))


WITHOUT_ROUNDS = variant("jobs", source=without_rounds)


@pytest.mark.thorough
def test_queue_without_rounds(run):
    queue = Made(run, "jobs", WITHOUT_ROUNDS())
    # Some runs come out right, and in some a producer waits for ever.
    for _ in range(5):
        consumers, producers = ([queue.start(*args) for _ in range(2)]
                                for args in (["take"], ["put", "300"]))
        for consumer in consumers:
            assert consumer.wait() == 0, consumer.output
        for producer in producers:
            if producer.popen.poll() is None:
                producer.signal(signal.SIGTERM)
            producer.wait()
        *_, missing, fits = counts(queue)
        if missing > 0 and not fits:
            return
        queue.serve()
    pytest.fail("nothing goes wrong")


@pytest.mark.static
def test_own_patches():
    """They fit to the letter, and what they make says what it is based on."""
    for patch in os.listdir(f"{ROOT}/scripts/own"):
        name = patch.removesuffix(".patch")
        source = patched(f"scripts/own/{patch}")
        with open(f"{ROOT}/scripts/own/{patch}") as file:
            before, after = re.findall(r"(?m)^copy (?:from|to) src/(\w+)\.cpp$",
                                       file.read())
        assert after == name and f"// Based on {before}.\n" in source
        assert max(map(len, source.splitlines())) <= 80
