"""Adapters and GPUs that are not here. build/strict.so (strict.cpp) makes tcp and shm
as strict as EFA may be, and says which of its rules a program breaks. The programs in
build/cuda/ are linked with cuda_stub.cpp, whose GPU has memory that kills those who
touch it, and wants a flush before what an adapter has written is read."""

import os
import re
import signal

import pytest

from harness import BUILD, PROGRAMS, Server, shares, under_strict
from marks import takes_strict, two_providers
from messages import LONGEST
from repository import ROOT, variant
from table import TABLE

pytestmark = takes_strict
CUDA = f"{BUILD}/cuda"
GPU_PROGRAMS = [program for program in PROGRAMS
                if os.path.exists(os.path.join(ROOT, CUDA, program))]
# Each with the folder that it is in.
ALL = [(BUILD, program) for program in PROGRAMS] + \
      [(CUDA, program) for program in GPU_PROGRAMS]
all_programs = pytest.mark.parametrize(
    "place,program", ALL,
    ids=[program + ("-gpu" if place == CUDA else "") for place, program in ALL])
# Here each operation takes milliseconds. Each page is written once: otherwise a WRITE
# that comes too late would find its data in place already.
ARGUMENTS = {"6_write": ["65536", "20"], "7_queue": ["65536", "100", "1"],
             "8_malloc": ["4"], "10_lock": ["1"], "11_rails": ["65536", "100", "1"],
             "13_crowd": ["3", "4"], "14_strangers": ["65536", "100", "1"]}
# Those that write pages.
WRITERS = ["6_write", "7_queue", "11_rails", "14_strangers"]
each_writer = pytest.mark.parametrize("program", WRITERS)
# Rarely is there room, what has been posted takes long, and RECVs complete in any
# order. The device is an old one, as those beside A100 GPUs: it has no RDMA WRITE. A
# long WRITE is a READ by the target, into a region that needs FI_RECV for it.
HARSH = {"STRICT_EAGAIN": "50", "STRICT_TX": "4", "STRICT_DELAY_US": "10000",
         "STRICT_CQ_DELAY_US": "10000", "STRICT_RECV_DISORDER": "1",
         "STRICT_P4D": "1", "STRICT_WAIT": "1"}
# These have thousands of operations, one after the other.
SHORT_DELAYS = {
    "10_lock": {"STRICT_DELAY_US": "200", "STRICT_CQ_DELAY_US": "300"},
    "12_sleep": {"STRICT_DELAY_US": "20", "STRICT_CQ_DELAY_US": "20"}}
# The last line about a client, where it is not "Done.".
LAST_LINES = {"4_hello": "^Received ",
              "13_crowd": "^0 clients, [1-9][0-9]* texts so far$"}
SLEEPERS = ["12_sleep", "13_crowd"]
# How long the other side may take to learn that this one has given up. Left to
# silence, 13_crowd would learn it after 30 seconds, and the others with an error.
SOON = 15  # seconds, of which other work on this machine may take most


@pytest.fixture
def strict(run):
    """Starts a server on such a network: strict("7_queue", "shm")."""
    def start(program, provider="", place=BUILD, **env):
        env = {**env, **SHORT_DELAYS.get(program, {})}
        if program == "11_rails":
            env = {"STRICT_ADAPTERS": "3", **env}
        options = ["--gpu"] if place == CUDA else []
        return Server(run, place, program, provider, options=options,
                      **under_strict(run, **env))
    return start


def check_rules(*processes):
    """No rule has been broken by processes that have ended."""
    for process in processes:
        assert "strict: VIOLATION" not in process.output, process.output
        assert re.search("^strict: seen .* rules broken: 0 ", process.output, re.M), \
            process.output


def check_transfer(server, *args, **env):
    """One client, which succeeds; then neither side has broken a rule."""
    args = args or ARGUMENTS.get(server.program, server.entry.quick)
    client = server.check_client(*args, **env)
    # The last message of the client has reached it, too. That of 13_crowd may not: its
    # server then forgets the client after 30 s.
    server.process.wait_for(LAST_LINES.get(server.program, r"^\[1\] Done[.:]"),
                            50 if server.entry.one_endpoint else SOON)
    server.stop()
    check_rules(client, server.process)
    assert not server.errors(), server.process.output
    return client


@two_providers
@all_programs
@pytest.mark.every_program
def test_rules(strict, place, program, provider):
    """Without a descriptor, and with one through shm, which has none of its own: this
    one becomes readable only after an fi_trywait, and once."""
    waits = provider == "shm"
    server = strict(program, provider, place, STRICT_WAIT=str(int(waits)))
    client = check_transfer(server)
    if program in SLEEPERS:
        for process in client, server.process:
            assert (" poll(2)=" in process.output) == waits
        assert ("Nothing can wake us" in server.process.output) != waits
    if place == CUDA:
        assert " regions of GPU memory=" in server.process.output
        assert " regions of GPU memory=" in client.output
    if program == "11_rails":
        assert len(shares(server, 1)) == 3 and min(shares(server, 1).values()) > 0


@pytest.mark.parametrize("place,program", [
    pair for pair in ALL if pair[0] == BUILD or pair[1] == "7_queue"],
    ids=lambda value: "-gpu" if value == CUDA else "" if value == BUILD else value)
@pytest.mark.every_program
def test_harsh(strict, place, program):
    check_transfer(strict(program, "shm", place, **HARSH))


@each_writer
def test_last_write(strict, program):
    """The WRITE that says that all pages are there overtakes all others, and its client
    loses no time. So it must not be posted before the others have completed, which has
    to mean that their data is in place."""
    server = strict(program, "shm", STRICT_WRITE_DELAY_US="200000")
    check_transfer(server, *ARGUMENTS[program], STRICT_DELAY_US="0",
                   STRICT_CQ_DELAY_US="0")


@each_writer
def test_stopped_in_a_transfer(strict, program):
    """A server that ends while its pages are in flight closes the endpoint, which ends
    that, and then frees them."""
    server = strict(program, "shm", STRICT_DELAY_US="2000000")
    client = server.start_client(*ARGUMENTS[program], STRICT_DELAY_US="0")
    server.process.wait_for("Received RandomFill")
    server.stop()
    check_rules(server.process)
    client.signal(signal.SIGKILL)


def test_removed(strict):
    """What is in flight to a client when its address is removed fails, or is never heard
    of again. This costs the server and the other clients nothing."""
    # Later, and a client would say CONNECT again: this might be read when it has gone, and
    # strict.so knows no address of anybody who has gone.
    server = strict("13_crowd", STRICT_LATE_SENDS_US="400000", STRICT_RECV_DISORDER="1")
    fast = {"STRICT_DELAY_US": "0", "STRICT_CQ_DELAY_US": "0", "STRICT_LATE_SENDS_US": "0",
            "STRICT_RECV_DISORDER": "0"}
    clients = [server.check_client(count, "1", **fast) for count in ("25", "1")]
    # The last of them, too.
    server.process.wait_for(LAST_LINES["13_crowd"], SOON)
    server.stop()
    check_rules(*clients, server.process)
    assert " in flight to an address that is removed=" in server.process.output
    assert not server.errors()


@pytest.mark.parametrize("program", ["5_reverse", "7_queue"])
def test_late_sends(strict, program):
    """A message has its answer before its SEND has completed. The next one waits for that."""
    check_transfer(strict(program, "shm", STRICT_LATE_SENDS_US="1000000"))


@each_writer
def test_late_writes(strict, program):
    """The client has all pages, and says BYE, before the server hears of its WRITEs. That
    costs nobody anything."""
    check_transfer(strict(program, "shm", STRICT_LATE_WRITES_US="300000"))


def test_late_writes_of_a_file(strict):
    """The credit for a slot comes back before the completion of the WRITE into it. The
    client needs both before it fills that slot again."""
    check_transfer(strict("9_file", "shm"), "5000001", "2", STRICT_LATE_WRITES_US="300000")


def test_queue(strict):
    """What libfabric has no room for waits, and nothing overtakes it. No more than 16 MiB
    are in flight."""
    server = strict("7_queue", "shm", STRICT_EAGAIN="50", STRICT_LATE_WRITES_US="100000")
    client = check_transfer(server, "1048576", "32", "1")
    assert " overtaken=" not in server.process.output + client.output
    most = re.search(r" most bytes of WRITEs=(\d+),", server.process.output)[1]
    assert 0 < int(most) <= 16 << 20


HASTY = variant("7_queue", ("kSilenceLimit = 10s", "kSilenceLimit = 3s"))


def test_message_between_writes(strict):
    """While there is no room, a single WRITE waits. So a PROGRESS soon has its turn, and
    the client, whose patience ends after 3 s here, hears it."""
    check_transfer(strict("7_queue", "shm", HASTY(), STRICT_TX="1",
                          STRICT_LATE_WRITES_US="50000"), "4096", "90", "1")


def test_reports(strict):
    """A server reports once its last message has arrived, but for the end of all. Here it
    never hears that its ACCEPT has, and the WRITEs take some seconds."""
    server = strict("7_queue", "shm", STRICT_LATE_SENDS_US="600000000",
                    STRICT_LATE_WRITES_US="1800000")
    check_transfer(server, "4096", "16", "1", STRICT_LATE_SENDS_US="0")
    assert server.process.output.count(" WRITE: ") == 1


def test_short_keys(strict):
    """Each key is as short as the provider wants it."""
    check_transfer(strict("6_write", "shm", STRICT_LACKS="keys"))


def test_truncated(strict):
    """A message may be longer than its RECV without an error. Its end is not in our
    buffer."""
    server = strict("4_hello", "shm", STRICT_LACKS="truncation")
    server.start_client("x" * LONGEST).wait()
    server.process.wait_for(f"^Received {LONGEST} bytes: ")
    server.stop()


def test_last_message(strict):
    """A BYE starts late. Its client must not be gone before it has arrived."""
    check_transfer(strict("5_reverse", "shm"), STRICT_DELAY_US="300000")


@pytest.mark.parametrize("program", [p for p in PROGRAMS if not TABLE[p].one_endpoint])
def test_short_messages(run, program):
    """efa-direct carries no message that is longer than a packet. A program asks for
    longer ones, and doesn't find this adapter."""
    server = run([f"{BUILD}/{program}"], "shm", **under_strict(run, STRICT_MAX_MSG="8192"))
    server.check_error("fi_getinfo .*: No data available$")


@pytest.mark.parametrize("program", ["5_reverse", "13_crowd"])
def test_no_event_queue(strict, program):
    """The opx provider has none, so there is none to bind."""
    server = strict(program, "shm", STRICT_LACKS="events")
    client = server.check_client(*server.entry.quick, STRICT_LACKS="events")
    server.stop()
    check_rules(client, server.process)


LITTLE = variant("14_strangers", ("kMaxTransfer = 512 << 20", "kMaxTransfer = 1 << 20"),
                 ("kMaxClients = 8", "kMaxClients = 1"))


@pytest.mark.parametrize("late,error", [
    ("0", "refused: bad message: 100 pages$"), ("600000000", "nothing has happened for 10 s")])
def test_late_refusal(run, strict, late, error):
    """A server has less memory than its client may ask for. The client hears so, though this
    message starts late. Or it can't start, because the ACCEPT before it does not complete.
    Until it has left, its client keeps its place, but not for long: then the next one is
    served."""
    server = strict("14_strangers", "shm", LITTLE(), STRICT_DELAY_US="300000",
                    STRICT_LATE_SENDS_US=late)
    client = run([f"{BUILD}/14_strangers", server.address, "65536", "100", "1"], "shm",
                 **{**server.env, "STRICT_DELAY_US": "0", "STRICT_LATE_SENDS_US": "0"})
    server.process.wait_for("error: bad message: 100 pages$")
    other = server.check_client("65536", "5", "1", STRICT_LATE_SENDS_US="0")
    client.check_error(error)
    server.stop()
    check_rules(client, other, server.process)


@pytest.mark.parametrize("failure", ["write", "memory", "room"])
def test_rail_fails(strict, failure):
    """One of two adapters does not do its part: a WRITE of it fails, it has no room for
    the pages, or none for any WRITE. The other one does the work. What has failed counts
    once, when it is done: the last WRITE waits for all others."""
    server = strict("11_rails", "shm", STRICT_ADAPTERS="2", STRICT_SECOND=failure)
    # The server has read all completions when the client's late BYE comes. The request over
    # the second rail may be as late: the first one must not have done everything by then.
    client = server.check_client("65536", "100", "10", STRICT_ADAPTERS="2",
                                 STRICT_DELAY_US="100000")
    server.process.wait_for(r"^\[1\] Done\.$")
    assert server.process.output.count(" is given up: ") == 1
    written = re.findall(r"^\[1\] .* WRITE: \d+%, (\d+)/1000, ", server.process.output, re.M)
    assert int(written[-1]) <= 1000
    server.stop()
    check_rules(client, server.process)


# ---- GPU memory ----

@pytest.mark.skipif(not GPU_PROGRAMS, reason="the programs for GPUs are not built")
class TestGpu:
    @pytest.mark.parametrize("program", GPU_PROGRAMS, ids="{}-gpu".format)
    @pytest.mark.parametrize("reason,env", [
        (r"fi_getinfo \(.*\): No data available", {"STRICT_LACKS": "gpu"}),
        ("cudaMalloc: unknown error", {"CUDA_STUB_FAIL": "cudaMalloc:2"}),
        ("cudaMemset: unknown error", {"CUDA_STUB_FAIL": "cudaMemset:2"}),
        ("cudaDeviceSynchronize: unknown error",
         {"CUDA_STUB_FAIL": "cudaDeviceSynchronize:2"}),
        ("cudaDeviceGetAttribute: unknown error",
         {"CUDA_STUB_FAIL": "cudaDeviceGetAttribute:1"}),
        ("cudaDeviceFlushGPUDirectRDMAWrites: unknown error",
         {"CUDA_STUB_FAIL": "cudaDeviceFlushGPUDirectRDMAWrites:1"}),
        ("cudaDeviceFlushGPUDirectRDMAWrites: invalid argument",
         {"CUDA_STUB_FLUSH": "0"}),
    ], ids=lambda value: "-".join(*value.items()) if isinstance(value, dict) else "gpu")
    def test_no_gpu(self, strict, program, reason, env):
        """A client that is told to take a GPU takes no other memory. It says what there
        isn't, and the server serves others."""
        server = strict(program, "shm", CUDA)
        server.start_client(*ARGUMENTS[program], **env).check_error(f"{reason}$")
        server.check_client(*ARGUMENTS[program])
        server.stop()
        check_rules(server.process)

    @pytest.mark.parametrize("program", GPU_PROGRAMS, ids="{}-gpu".format)
    def test_ordered(self, strict, program):
        """Some GPUs keep the order by themselves, and have no flush."""
        server = strict(program, "shm", CUDA)
        check_transfer(server, *ARGUMENTS[program], CUDA_STUB_ORDERING="100",
                       CUDA_STUB_FLUSH="0")

    @pytest.mark.parametrize("program", WRITERS, ids="{}-gpu".format)
    @pytest.mark.parametrize("call", ["cudaMemcpy:1", "cudaDeviceSynchronize:2"])
    def test_server_fails(self, strict, program, call):
        """A server whose GPU fails ends the session, and others are served. If it guards
        itself, it tells the client why."""
        # The server tries each of its adapters before it serves anybody.
        first = 5 if program == "11_rails" else 3
        call = call.replace("Synchronize:2", f"Synchronize:{first}")
        server = strict(program, "shm", CUDA, CUDA_STUB_FAIL=call)
        client = server.start_client(*ARGUMENTS[program], CUDA_STUB_FAIL="")
        function = call.split(":")[0]
        server.process.wait_for(rf"^\[1\] error: {function}: unknown error$")
        tells = program == "14_strangers"
        if not tells:
            client.signal(signal.SIGINT)
        assert client.wait() == 1, client.output
        assert not tells or f"refused: {function}: unknown error" in client.output
        other = server.check_client(*ARGUMENTS[program], CUDA_STUB_FAIL="")
        server.stop()
        assert len(server.errors()) == 1
        check_rules(client, other, server.process)

    @pytest.mark.parametrize("program", WRITERS, ids="{}-gpu".format)
    def test_shm(self, strict, program):
        """Over shm, what is in host memory has been copied when its WRITE completes. Of
        GPU memory a program has to ask for that."""
        server = strict(program, "shm", CUDA, STRICT_NAME="shm", STRICT_WRITE_DELAY_US="200000")
        client = check_transfer(server, *ARGUMENTS[program], STRICT_DELAY_US="0",
                                STRICT_CQ_DELAY_US="0")
        assert "provider: shm" in client.output
        assert " regions of GPU memory=" in client.output
