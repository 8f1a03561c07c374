"""The recorder and its model (make watch-6): what it names, and that it names nothing in a
program that is right."""

import glob
import os
import re
import signal
import subprocess
import sys
import xml.dom.minidom

import pytest

import harness
from fakes import FakeClient
from harness import BUILD, OVER_VERBS, PROGRAMS, PROVIDERS, ROOT, Server
from messages import ACCEPT, WAIT, base
from repository import QUICKLY, build_moves, make, number, variant

sys.path.append(f"{ROOT}/scripts/watch")
import model  # noqa: E402

pytestmark = pytest.mark.skipif(bool(OVER_VERBS), reason="it is judged over tcp and shm")
# So that a run takes a moment. 7, 11 and 14 have 64 pages.
QUICK = {**dict.fromkeys(["7_queue", "11_rails", "14_strangers"], ["4096", "64", "1"]),
         "8_malloc": ["2"], "10_lock": ["3"], "13_crowd": ["1"]}
RULES = {name: rule for name, (rule, _) in model.RULES.items()}
# Mistakes: the rule by which each is named, its client's arguments, and the program with it.
WAITING = "  fi_cq_data_entry entry;\n"  # in 2_first, once it has posted its operation
MISTAKES = {
    "recv-changed": ("flight", [], variant(
        "2_first", (WAITING, "  if (server) buffer[1000] = 'x';\n" + WAITING))),
    "region-closed": ("region", [], variant(
        "2_first", (WAITING, "  fi_close(&mr->fid);\n" + WAITING), ("&mr->fid,     &cq", "&cq"))),
    "memory-freed": ("region", [], variant(
        "2_first", ("static char buffer[65536];", "char (&buffer)[65536] = "
                    "*static_cast<char (*)[65536]>(aligned_alloc(4096, 65536));"),
        (WAITING, "  if (!server) free(buffer);\n" + WAITING))),
    "context-freed": ("captured", [], variant(
        "2_first", ("fi_context2 context = {};", "fi_context2& context = *new fi_context2();"),
        (WAITING, "  if (!server) delete &context;\n" + WAITING))),
    # Both SENDs are posted, usually before the server has closed its endpoint.
    "no-recv": ("room", [], variant("2_first", ("  ssize_t posted;\n", (
        "  ssize_t posted;\n  fi_context2 second;\n"
        "  while (!server && fi_send(ep, buffer, length, desc, peer, &second) == -FI_EAGAIN) {\n"
        "    fi_cq_read(cq, nullptr, 0);\n  }\n")))),
    "short-recv": ("room", ["x" * 500], variant(
        "5_reverse", (".len = buf.size,", ".len = 100,"))),
    "one-place": ("writers", [], variant(
        "6_write", ("request.addr + page_idx[i] * page_size", "request.addr"))),
    "said-too-early": ("told", [], variant(
        "6_write", (".imm_data = last ? request.imm_data : 0", ".imm_data = 0"),
        ("      ++posted_write_ops;\n", "      ++posted_write_ops;\n"
         "      if (last) session.Send(AppMessageType::kAccept);\n"),
        ("[&] { return filled; }", "[&] { return !session.inbox.empty(); }"))),
    "read-too-early": ("lent", ["20"], variant("8_malloc", (
        '  client.WaitForAll(pool.buf);\n  printf("Filled', '  printf("Filled'))),
    "saved-too-early": ("lent", [], variant("9_file", (
        "op.Check();\n                             HandleWriteCompletion(i);\n"
        "                           }});\n",
        "op.Check();\n slots[i].chunk += slots.size();\n ReadChunk(i); }});\n"
        "    AppChunkMessage chunk = {.slot = i, .checksum = slots[i].checksum};\n"
        "    session.Send(AppMessageType::kChunk, BytesOf(&chunk, sizeof(chunk)));\n"))),
    "swap-too-early": ("number", ["3"], variant("10_lock", (
        "[this] { return buf.in_flight == 0; });",
        "[&] { return type == RdmaOpType::kWrite || buf.in_flight == 0; });"))),
}


def watch(folder, program, *arguments, **env):
    """Also returns the run, as the model has it."""
    status, output = harness.watch(folder, program, *arguments, **env)
    run = model.load(str(folder), f"{ROOT}/src/{os.path.basename(program)}.cpp")
    assert run, output
    return status, output, run


def rules(found):
    return [w.rule for w in found]


# Another program breaks the rule of each, too.
LARGER = "short-recv", "saved-too-early", "swap-too-early"


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.thorough] * (name in LARGER)) for name in MISTAKES])
def test_mistake(tmp_path, name):
    """Most clients say that all is well."""
    rule, arguments, build = MISTAKES[name]
    folder = build()
    [program] = [entry for entry in os.listdir(folder) if re.match(r"\d+_", entry)]
    # On a very busy machine, the server of no-recv has closed before the second SEND.
    for _ in range(3 if name == "no-recv" else 1):
        _, output, run = watch(tmp_path, f"{folder}/{program}", *arguments)
        found = rules(run.wrongs) + rules(run.notes)
        if RULES[rule] in found:
            break
    assert RULES[rule] in found, output


@pytest.mark.parametrize("program,provider", [
    *((program, "tcp") for program in PROGRAMS),
    *((program, "shm") for program in PROGRAMS if 2 < number(program) < 8),
    *(("9_file", provider) for provider in PROVIDERS if provider in ("shm", "net")),
    *(("4_hello", provider) for provider in PROVIDERS if provider == "net")])
def test_no_false_alarm(tmp_path, program, provider):
    """The recorder changes nothing, and finds nothing."""
    status, output, run = watch(tmp_path, f"{BUILD}/{program}", *QUICK.get(program, []),
                                provider=provider)
    assert status == 0, output
    assert not run.wrongs, output
    assert sorted(p.name for p in run.ps) == ["client", "server"]
    assert all(p.ended and not p.lost for p in run.ps)
    sends = [op for p in run.ps for op in p.ops.values() if op.what == model.SEND]
    # Only the last message to somebody who leaves is nobody's. Each has a name.
    assert sum(op.match is not None for op in sends) >= max(len(sends) - 2, 1), output
    assert not run.names or all(model.words(run, op).split()[0] in run.names.values()
                                for op in sends)
    # The pictures are well-formed.
    svg = (tmp_path / "picture.svg").read_text()
    xml.dom.minidom.parseString(svg)
    assert svg in (tmp_path / "page.html").read_text()
    assert "RECV completed: " in (tmp_path / "trace.txt").read_text()


# What the recorder names in the broken programs, over plain tcp, and what they are run with.
BREAKS = {"2_first": ("flight", [], {}),
          "10_lock": ("words", ["100"], {"CLIENTS": "2", "HOLD_MS": "10"})}


@pytest.mark.parametrize("program", BREAKS)
def test_break(tmp_path, program):
    """What a laptop hides: the client says that all is well."""
    rule, arguments, env = BREAKS[program]
    make(f"break-{number(program)}", *QUICKLY, f"BUILD={tmp_path}", "CUDA_HOME=")
    folder = tmp_path / "records"
    status, output, run = watch(folder, f"{tmp_path}/break/{program}", *arguments, **env)
    assert status == 1, output
    assert RULES[rule] in rules(run.wrongs), output
    assert f"(chapter {model.RULES[rule][1]})" in output


@pytest.mark.parametrize("move,rule,env", [
    ("6.3", "number", {}), ("9.4", "credit", {"SLOW_DISK_MS": "50"})])
def test_move(tmp_path, move, rule, env):
    """A move that goes wrong on other networks, or with a slow disk."""
    status, output, run = watch(tmp_path, f"{build_moves([move])}/{move}", **env)
    assert status == 1, output
    assert RULES[rule] in rules(run.wrongs), output


def test_credits(tmp_path):
    """The trace says of each slot that it waits: its next chunk has been read long before the
    disk has saved the last one."""
    status, output, _ = watch(tmp_path, f"{BUILD}/9_file", SLOW_DISK_MS="400")
    assert status == 0, output
    trace = (tmp_path / "trace.txt").read_text()
    for slot in range(4):
        assert re.search(rf"client +slot {slot}: no credit, waits [0-9.]+ ms$", trace, re.M)


def test_by_hand(run, tmp_path):
    """In two terminals, as the page says; the client is killed, and its records stay."""
    folder = tmp_path / "new"
    env = {"WATCH": str(folder), "LD_PRELOAD": os.path.abspath(f"{ROOT}/{BUILD}/watch.so")}
    server = Server(run, BUILD, "7_queue", "tcp", **env)
    client = server.start_client("1048576", "16", "100000")
    server.process.wait_for("WRITE: ", timeout=30)
    client.kill()
    server.process.wait_for(r"^\[1\] error: ", timeout=60)
    server.check_client("4096", "64", "1")
    server.stop()
    done = subprocess.run(["make", "-s", "watch", f"DIR={folder}", f"BUILD={BUILD}"],
                          cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "processes" in done.stdout
    assert re.search("would have done next: it ended by a signal", done.stdout)
    found = model.load(str(folder))
    assert sorted(p.name for p in found.ps) == ["client 1", "client 2", "server"]
    assert sorted(p.ended for p in found.ps) == [False, True, True]
    assert not found.wrongs


def test_full(tmp_path):
    """Records that have no room are counted, and the program goes on."""
    status, output, run = watch(tmp_path, f"{BUILD}/7_queue", "4096", "500", "40",
                                WATCH_MB="1")
    assert status == 0, output
    lost = sum(p.lost for p in run.ps)
    assert lost > 0 and f"{lost} records had no room" in output
    assert all(os.path.getsize(path) <= 1 << 20 for path in glob.glob(f"{tmp_path}/*.watch"))
    assert not run.wrongs, output


def test_one_endpoint_a_round(run, tmp_path):
    """A server that finds several CONNECTs together opens an endpoint for one of them, and
    looks at its clients before it opens the next one."""
    for attempt in range(10):
        server = Server(run, BUILD, "14_strangers", "tcp", WATCH=str(tmp_path / str(attempt)),
                        LD_PRELOAD=os.path.abspath(f"{ROOT}/{BUILD}/watch.so"))
        clients = [FakeClient(run, server) for _ in range(3)]
        for client in clients:  # so that they are connected
            client.send(b"")
        server.process.signal(signal.SIGSTOP)
        for client in clients:
            client.send(client.connect())
        server.process.signal(signal.SIGCONT)
        answers = [client.receive()[:8] for client in clients]
        server.stop()
        # A machine that needs a second for two endpoints has the third client wait.
        if base(WAIT) not in answers:
            break
    assert answers == [base(ACCEPT)] * len(clients)
    [path] = glob.glob(f"{tmp_path}/{attempt}/*.watch")
    process = model.read_process(path)
    opened = sorted(ep.t0 for ep in process.eps.values())[-len(clients):]
    # When it has accepted a client, it knows its address.
    accepted = sorted(time for peers in process.peers.values() for time, _ in peers)
    assert len(accepted) == len(clients)
    assert all(known < later for known, later in zip(accepted, opened[1:]))


UNSEEN = variant("2_first", ("fi_send(ep, buffer, length, desc, peer, &context)",
                             "fi_senddata(ep, buffer, length, desc, 0, peer, &context)"))


def test_unseen(tmp_path):
    """What a call has posted that isn't recorded is counted, and the program goes on."""
    status, output, _ = watch(tmp_path, f"{UNSEEN()}/2_first")
    assert status == 0, output
    assert "Not seen: 1 operation posted by calls that the recorder does not know" in output
