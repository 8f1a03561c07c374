"""Exercise 11: how many WRITEs may each rail have in flight? As many as it completes in
100 ms. The server prints the number behind each share: `eth4=6% (9), eth3=31% (45)`."""

import re

PAGE = 65536  # bytes
MOST = 256  # pages: 16 MiB
TAIL = 0.1  # s


def bounds(server, client=1):
    """What the server's last line about a client says: the bandwidth in bytes a second,
    and for each rail its share in percent and its bound."""
    line = server.process.wait_for(
        rf"^\[{client}\] .* WRITE: 100%, (\d+)/\1, .*$", 5)[0]
    rails = re.findall(r", (\S+)=(\d+)% \((\d+)\)", line)
    assert len(rails) == line.count("=") - 2, line  # not bw, and not EAGAIN
    return float(re.search("bw=([0-9.]+)Gbps", line)[1]) * 1e9 / 8, {
        name: (int(share), int(bound)) for name, share, bound in rails}


def test_one_rail(serve):
    """A single rail holds up no other one: it has as much room as before."""
    server = serve("11_rails", "shm")
    server.check_client(str(PAGE), "100", "3")
    assert bounds(server)[1] == {"shm": (100, MOST)}
    server.stop()


def test_slow_rail(serve, request):
    """Two links, one of them slow. Whatever their speeds are on a busy machine, the
    bounds are for the speeds that the line shows."""
    network = request.getfixturevalue("network")
    network.plug_all(2, mbits=200)
    for host in 0, 1:
        network.limit(host, "link2", 20)
    network.wait()
    server = serve("11_rails", netns=network.hosts[0])
    client = server.start_client(str(PAGE), "200", "4", netns=network.hosts[1])
    assert client.wait(60) == 0, client.output
    bandwidth, rails = bounds(server)
    assert sorted(rails) == ["link1", "link2"]
    for name, (share, bound) in rails.items():
        pages = bandwidth * share / 100 * TAIL / PAGE
        assert 1 <= bound <= MOST
        assert pages / 2 - 1 <= bound <= pages * 1.5 + 1, (name, pages, rails)
    assert rails["link2"][1] < rails["link1"][1]
    server.stop()
