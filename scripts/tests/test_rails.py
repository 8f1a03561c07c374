"""11_rails over several links, between two network namespaces. The links are slow, so
that a transfer has a middle.

LINKS=30 scripts/test.sh -k test_link_down    takes a link away 30 times, at any moment"""

import os
import random
import re
import time

import pytest

from fakes import FakeClient
from harness import Server, shares
from links import MBITS
from marks import not_over_verbs
from messages import ACCEPT, BYE, fill_repeatedly, plain, type_of
from repository import variant

pytestmark = not_over_verbs("an adapter has one link")
# How often a link goes down: see above.
LINKS = int(os.environ.get("LINKS", "1"))
GIVEN_UP = r"rail \S+ is given up"
REQUEST = r"^\[\d+\] Received RandomFill"


@pytest.fixture
def serve_rails(serve, network):
    """Starts a server on host 0, once all links are up."""
    def start(**env):
        network.wait()
        return serve("11_rails", netns=network.hosts[0], **env)
    return start


# For a busy machine. Its server bears the silence of a client that it serves, but not for so
# long that of a rail; its client waits for each rail, which is for tests where all addresses
# can be reached.
PATIENT_RAILS = variant("11_rails", ("kAnswerGrace = 2s;", "kAnswerGrace = 30s;"),
                        ("kSilenceLimit = 10s;", "kSilenceLimit = 100s;"),
                        ("kRailLimit = 4s;", "kRailLimit = 2s;"))


@pytest.fixture
def client_of(network):
    """Starts a client on host 1."""
    return lambda server, *args, **env: server.start_client(
        *(args or server.entry.quick), netns=network.hosts[1], **env)


def check(server, client, timeout=60):
    """A client that succeeds. Returns what each rail has written, in percent."""
    assert client.wait(timeout) == 0, \
        client.output + "\nserver:\n" + server.process.output
    assert client.output.endswith("Data is correct.\n"), client.output
    # Counted here: on a busy machine, its server's lines may come later than its end.
    server.served = number = getattr(server, "served", 0) + 1
    server.process.wait_for(rf"^\[{number}\] Done\.$")
    assert not server.errors(), server.process.output
    # No WRITE counts twice, even if it was posted twice.
    assert re.findall(rf"(?m)^\[{number}\] .* WRITE: 100%, (\d+)/\1, ", server.process.output)
    return shares(server, number)


def rails_of(client):
    """The names of the links over which a client has asked for its pages."""
    return re.findall(r"^Sent RandomFill request on (\S+)\. ", client.output,
                      re.M)


# ---- All is well ----

def test_four_rails(run, network, client_of):
    """Each link takes its part. A slow one takes less, and holds up nobody. None is given up
    in a transfer that takes longer than a rail may be without a completion."""
    network.plug_all()
    network.wait()
    server = Server(run, PATIENT_RAILS(), "11_rails", netns=network.hosts[0])
    client = client_of(server, "65536", "200", "10")
    four = check(server, client)
    assert sorted(rails_of(client)) == ["link1", "link2", "link3", "link4"]
    assert sorted(four) == ["link1", "link2", "link3", "link4"]
    assert min(four.values()) > 10 and 96 <= sum(four.values()) <= 100
    for host in 0, 1:
        network.limit(host, "link3", MBITS // 5)
    unequal = check(server, client_of(server, "65536", "400", "1"))
    slow = unequal.pop("link3")
    assert 0 < slow < min(unequal.values()) / 2, unequal
    assert not re.search(GIVEN_UP, server.process.output)
    server.stop()


def test_fewer_addresses(network, serve_rails, client_of):
    """A client has no more rails than it has addresses."""
    network.plug_all(3, mbits=None)
    server = serve_rails()
    server.path = f"{PATIENT_RAILS()}/11_rails"  # for its clients
    assert server.addresses.count(",") == 2
    server.addresses = server.addresses.rpartition(",")[0]
    client = client_of(server)
    assert len(check(server, client)) == len(rails_of(client)) == 2
    server.stop()


@pytest.mark.parametrize("dead", [1, 2])
def test_dead_from_the_start(network, serve_rails, client_of, dead):
    """The server has a link where the client can't reach it. It may be the first."""
    network.plug_all(2, mbits=None)
    server = serve_rails()
    network.ip(0, "address", "delete", f"10.11.{dead}.1/24", "dev", f"link{dead}")
    client = client_of(server)
    assert list(check(server, client)) == [f"link{3 - dead}"]
    assert re.search(rf"^rail link{dead} is given up: ", client.output, re.M)
    server.stop()


def test_namesakes(network, serve_rails, client_of):
    """Each host has a network of its own with the same name and the same address, as
    docker0. It is no rail, because the other host does not answer there."""
    for host in 0, 1:
        network.ip(host, "link", "add", "docker0", "type", "veth", "peer", "name",
                   "container")
        network.ip(host, "address", "add", "172.17.0.1/16", "dev", "docker0")
        network.up(host, "docker0")
        network.up(host, "container")
    network.plug_all(2, mbits=None)
    server = serve_rails()
    assert "domain: docker0" in server.process.output
    client = client_of(server)
    assert sorted(check(server, client)) == ["link1", "link2"]
    assert "rail docker0 is given up: no answer\n" in client.output
    server.stop()


def test_ipv6(network, serve_rails, client_of):
    """Each link has a link-local address, too, which is no use: the number of a link is
    part of it, and another one on each host."""
    network.ip(1, "link", "add", "other", "type", "veth", "peer", "name", "another")
    for i in 1, 2:
        network.plug(f"link{i}", f"fd00:{i}::1/64", f"fd00:{i}::2/64")
    server = serve_rails()
    client = client_of(server)
    assert len(check(server, client)) == 2
    server.stop()


# ---- Links that fail ----

@pytest.mark.parametrize("host", [0, 1], ids=["server", "client"])
def test_link_down(network, serve_rails, client_of, host):
    """In the middle of a transfer, at either end. The others do its work, and the
    next client does without it, or with it, when it is back."""
    # So slow that the transfer would take ten seconds: it has a middle in any case.
    network.plug_all(mbits=MBITS // 5)
    server = serve_rails()
    server.path = f"{PATIENT_RAILS()}/11_rails"  # for its clients
    links = {f"link{i + 1}" for i in range(4)}
    for i in range(LINKS):
        client = client_of(server, "65536", "100", "16")
        server.process.wait_for(REQUEST, count=i + 1)
        if LINKS == 1:
            server.process.wait_for("WRITE: [1-9]")
        else:
            time.sleep(random.uniform(0, 1.2))
        link = random.choice(sorted(links))
        before = server.process.output.count("is given up")
        network.down(host, link)
        # The rest of it need not take long.
        for other in links - {link}:
            network.limit(0, other, MBITS)
        left = check(server, client)
        if LINKS == 1:
            assert link not in left and len(left) == 3
        assert server.process.output.count("is given up") - before == 4 - len(left)
        network.up(host, link)
        network.wait()
    check(server, client_of(server))
    server.stop()


def test_link_away(network, serve_rails, client_of):
    """For a moment. Its rail survives: TCP sends again within little more than twice as
    long, and the rail has four seconds. On a busy machine the moment may be too long: not
    each time."""
    network.plug_all(2)
    server = serve_rails()
    server.path = f"{PATIENT_RAILS()}/11_rails"  # for its clients

    def survives():
        already = len(server.process.lines)
        client = client_of(server, "65536", "100", "10")
        server.process.wait_for(REQUEST, after=already)
        time.sleep(0.3)
        network.down(1, "link2")
        time.sleep(1)
        network.up(1, "link2")
        left = check(server, client)
        said = "".join(server.process.lines[already:]) + client.output
        return len(left) == 2 and not re.search(GIVEN_UP, said)

    assert any(survives() for _ in range(3)), server.process.output
    server.stop()


# ---- Clients that are not as they should be ----

def join(server, rail, first):
    """Has a sender ask for one more rail of a client that is served. Returns the number
    that the server gives to the client of this rail."""
    already = len(server.process.lines)
    rail.rails = first.rails
    rail.peer(server.address)
    rail.send(rail.connect())
    accept = rail.receive()
    assert type_of(accept) == ACCEPT
    rail.peer(accept[4:].hex())
    return server.process.wait_for(
        rf"^\[(\d+)\] Received CONNECT .* {rail.address.hex()} on \S+$",
        after=already)[1]


def test_request_over_each_rail(run, serve):
    """The first one begins the transfer. Another one says only where the memory is for its
    adapter, whatever else is in it, and over the same rail there may be no second one. A rail
    that can't be opened is nobody's."""
    server = serve("11_rails")
    first, second = FakeClient(run, server), FakeClient(run, server)
    first.open_session()
    other = FakeClient(run, server)
    other.rails = first.rails
    other.send(other.connect(b"no address"))  # would be the second of three rails
    assert join(server, second, first) == first.number
    for rail, indices in (first, [1, 2]), (second, [1, 2, 3]):
        addr, key = rail.memory()
        rail.send(fill_repeatedly(addr=addr, rkey=key, indices=indices, repeat=10**9))
        if rail is first:
            first.expect("Received RandomFill request: page_size=4096 num_pages=2")
    server.process.wait_for(
        r"WRITE: 0%, \d+/2000000000, .* EAGAIN=\d+, (\S+)=\d+%, \1=\d+%$", 10)
    second.send(fill_repeatedly(indices=[1, 2]))
    first.expect("error: bad message: request")
    assert server.process.output.count("Received RandomFill") == 1
    server.check_client()
    server.stop()


def test_number_of_a_client(run, serve):
    """Whoever has another number does not become its rail."""
    server = serve("11_rails")
    first, second, other = (FakeClient(run, server) for _ in range(3))
    first.open_session()
    assert join(server, second, first) == first.number
    other.open_session()
    assert other.number != first.number
    other.leave()
    second.send(plain(BYE))
    first.expect("Done")
    server.check_client()
    server.stop()
