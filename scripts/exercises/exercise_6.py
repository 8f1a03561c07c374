"""Exercise 6: count instead of wait. Every WRITE carries the immediate data, and
the client counts them: `Received 16 RDMA WRITEs to local memory.`."""

import re

import pytest

pytestmark = pytest.mark.builds("plain")


@pytest.mark.parametrize("provider", ["", "shm"], ids=["default", "shm"])
def test_count(serve, provider):
    """There are two buffers, so twice as many WRITEs as pages."""
    server = serve("6_write", provider)
    for args, count in [([], 16), (["4096", "3"], 6), (["64", "1"], 2),
                        (["65536", "400"], 800)]:
        client = server.check_client(*args)
        lines = re.findall("^Received .*$", client.output, re.M)
        assert lines == [f"Received {count} RDMA WRITEs to local memory."]
    server.stop()
