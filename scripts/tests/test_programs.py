"""The four programs, as their users run them."""

import re
import signal
import time

import pytest

from conftest import PROGRAMS, PROVIDERS, QUICK, SUCCESS

ids = {"argvalues": PROVIDERS, "ids": [p or "default" for p in PROVIDERS]}


@pytest.mark.parametrize("provider", **ids)
@pytest.mark.parametrize("program", PROGRAMS)
def test_data(serve, program, provider):
    """Several clients, one after the other, each with correct data."""
    server = serve(program, provider)
    # This provider crawls with large pages once all cores are busy.
    small = program == "6_write" and provider == "udp;ofi_rxd"
    for _ in range(3):
        server.check_client(*(["65536", "8"] if small else []))
    server.stop()


@pytest.mark.parametrize("provider", **ids)
@pytest.mark.parametrize("program", ["4_hello", "5_reverse"])
def test_texts(serve, program, provider):
    """Texts of one byte and of many, and what is in them arrives unchanged."""
    server = serve(program, provider)
    for text in ["x", "a\nb\x1b[31m\x7f", "grüße", "0123456789" * 12000]:
        server.check_client(text)
        # What could confuse a terminal is not printed as it is.
        shown = re.sub(r"[\x00-\x1f\x7f]",
                       lambda m: f"\\x{ord(m[0]):02x}", text)
        size = len(text.encode())
        server.process.wait_for(
            re.escape(f"Received {size} bytes: {shown}\n"))
    server.stop()


SIZES = [(8, 1), (8, 10000), (64, 10000), (4096, 1), (65528, 17),
         (1 << 20, 3), (8 << 20, 1)]


@pytest.mark.parametrize("provider", **ids)
@pytest.mark.parametrize("program", ["6_write", "7_queue"])
def test_sizes(serve, program, provider):
    server = serve(program, provider)
    for page_size, num_pages in SIZES:
        repeat = ["2"] if program == "7_queue" else []
        server.check_client(str(page_size), str(num_pages), *repeat)
    server.stop()


@pytest.mark.builds("plain")
def test_largest(serve):
    """All that fits into the server's buffer, and the longest message."""
    server = serve("7_queue", "shm")
    server.check_client(str(16 << 20), "16", "1")
    server.check_client("8", "262130", "1")
    server.stop()


def test_bandwidth_line(serve):
    """The last line of 7_queue's server for a client."""
    server = serve("7_queue")
    server.check_client()
    last = server.process.output.splitlines()[-1]
    assert re.search(r"\b600/600\b.*bw=[0-9.]+Gbps\b.*, [0-9.]+Mpps, "
                     r"EAGAIN=[0-9]+$", last), last
    server.stop()


def test_progress_lines(serve):
    """A long transfer prints a line now and then where there is no terminal."""
    server = serve("7_queue")
    client = server.start_client("65536", "1000", "1000000")
    server.process.wait_for("WRITE: [0-9]+%", count=2)
    assert "\r" not in server.process.output
    client.signal(signal.SIGINT)
    assert client.wait() == 1
    assert "interrupted" in client.output
    server.check_client()
    server.stop()


@pytest.mark.builds("plain")  # it takes long
@pytest.mark.parametrize("provider", **ids)
def test_eagain(serve, provider):
    """A client that is stopped for a while fills all queues. -FI_EAGAIN is met,
    and every byte is right afterwards."""
    server = serve("7_queue", provider)
    client = server.start_client("4096", "1000", "50")
    server.process.wait_for("total_repeat: 50")
    client.signal(signal.SIGSTOP)
    time.sleep(2)
    client.signal(signal.SIGCONT)
    assert client.wait() == 0, client.output
    assert SUCCESS["7_queue"] in client.output
    count = re.findall(r"EAGAIN=([0-9]+)$", server.process.output, re.M)[-1]
    assert int(count) > 0
    server.stop()


@pytest.mark.parametrize("provider", **ids)
@pytest.mark.parametrize("program", PROGRAMS)
def test_four_clients(serve, program, provider):
    """Started at the same moment, all are served."""
    server = serve(program, provider)
    clients = [server.start_client(*QUICK.get(program, []))
               for _ in range(4)]
    for client in clients:
        assert client.wait(60) == 0, client.output
        assert SUCCESS[program] in client.output
    server.stop()


@pytest.mark.builds("plain")
@pytest.mark.parametrize("provider", ["", "shm"])
def test_waiting_is_not_silence(serve, provider):
    """Behind a transfer that takes longer than the limit of 10 s, a client waits
    for its turn."""
    server = serve("7_queue", provider)
    long = server.start_client("65536", "1000", "1000000")
    server.process.wait_for("total_repeat: 1000000")
    waiting = server.start_client(*QUICK["7_queue"])
    waiting.wait_for("server is busy")
    time.sleep(12)
    assert long.popen.poll() is None, long.output
    assert waiting.popen.poll() is None, waiting.output
    long.signal(signal.SIGKILL)
    assert waiting.wait(15) == 0, waiting.output
    server.stop()
